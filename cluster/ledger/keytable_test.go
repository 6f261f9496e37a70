package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/cluster/ledger/ledgerpb"
)

// TestKeyTableIsAMap holds the table against a map, with hashes that share prefixes or are
// the same but for the last bit.
func TestKeyTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := newKeyTable()
		ks := &Keys{}
		ks.table.Store(table)
		model := map[[32]byte]*KeyRecord{}
		hash := rapid.Custom(func(t *rapid.T) (h [32]byte) {
			if rapid.Bool().Draw(t, "spread") {
				return sha256.Sum256([]byte{byte(rapid.IntRange(0, 200).Draw(t, "n"))})
			}
			h[rapid.SampledFrom([]int{0, 1, 5, 6, 31}).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
			return h
		})
		for range rapid.IntRange(1, 20).Draw(t, "batches") {
			var batch []*KeyRecord
			for _, h := range rapid.SliceOfN(hash, 0, 40).Draw(t, "batch") {
				if model[h] == nil {
					model[h] = &KeyRecord{ID: fmt.Sprintf("id-%d", len(model)), Hash: h, KeyScope: table.noScope}
					batch = append(batch, model[h])
				}
			}
			table.insert(batch, nil)
			if h := hash.Draw(t, "changed"); model[h] != nil {
				next := *model[h]
				next.Revoked = !next.Revoked
				model[h] = &next
				table.replace(&next)
			}
		}
		for h, want := range model {
			if got, ok := ks.Lookup(h); !ok || got != want {
				t.Fatalf("%x is %v, want %v", h, got, want)
			}
			if got, ok := ks.ByID(want.ID); !ok || got != want {
				t.Fatalf("%s is %v, want %v", want.ID, got, want)
			}
		}
		if h := hash.Draw(t, "any"); model[h] == nil {
			if got, ok := ks.Lookup(h); ok {
				t.Fatalf("%x was found: %v", h, got)
			}
		}
		if _, ok := ks.ByID("nobody"); ok {
			t.Fatal("nobody was found")
		}
		var order [][32]byte
		for k := range ks.All() {
			order = append(order, k.Hash)
		}
		if len(order) != len(model) || ks.Len() != len(model) || !slices.IsSortedFunc(order, func(a, b [32]byte) int { return bytes.Compare(a[:], b[:]) }) {
			t.Fatalf("%d of %d keys, in order: %x", len(order), len(model), order)
		}
	})
}

func TestNilKeysAreEmpty(t *testing.T) {
	var ks *Keys
	if _, ok := ks.Lookup([32]byte{}); ok || ks.Len() != 0 || !ks.LastUsed(&KeyRecord{}).IsZero() {
		t.Error("nil holds a key")
	}
	if _, ok := ks.ByID(""); ok {
		t.Error("nil holds an id")
	}
	for k := range ks.All() {
		t.Errorf("nil holds %v", k)
	}
}

// TestManyKeysOfOneShard: made-up hashes that all begin alike are found, too.
func TestManyKeysOfOneShard(t *testing.T) {
	var keys []Key
	for i := range 5_000 {
		keys = append(keys, Key{ID: fmt.Sprint(i), Tenant: "t", Hash: fmt.Sprintf("sha256:%064x", i)})
	}
	ks := keysOf(t, keys...)
	for i := range keys {
		var h [32]byte
		binary.BigEndian.PutUint64(h[24:], uint64(i))
		if k, ok := ks.Lookup(h); !ok || k.ID != keys[i].ID {
			t.Fatalf("key %d is %v", i, k)
		}
	}
	if _, ok := ks.Lookup([32]byte{31: 1, 0: 1}); ok {
		t.Error("another one was found")
	}
}

func TestKeysOfRefusesTwins(t *testing.T) {
	a := Key{ID: "a", Tenant: "t", Hash: zeroHash}
	for _, b := range []Key{{ID: "a", Tenant: "t", Hash: FormatHash([32]byte{1})}, {ID: "b", Tenant: "t", Hash: zeroHash}, {ID: "b", Tenant: "t"}} {
		if _, err := KeysOf(a, b); err == nil {
			t.Errorf("%v was taken beside %v", b, a)
		}
	}
}

// TestCaptureStaysAsItWas while keys are created, revoked and touched.
func TestCaptureStaysAsItWas(t *testing.T) {
	w := lived(t)
	want := snapshotOf(t, w.s)
	captured := w.s.Capture()
	for i := range 100 {
		w.do(createKeys(keyMessage(fmt.Sprint(i), "t")))
	}
	w.do(&ledgerpb.TouchKeys{Ids: []string{"third", "filed"}, Unix: []int64{2e9, 2e9}})
	w.do(&ledgerpb.RevokeKey{Id: "third"})
	w.do(&ledgerpb.SetPolicy{Text: []byte("x")})
	w.do(&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_GLOBAL})
	var got bytes.Buffer
	must(t, captured.Write(&got))
	if !bytes.Equal(got.Bytes(), want) {
		t.Error("what was captured has changed")
	}
	third, _ := w.s.Keys().ByID("third")
	if at := w.s.Keys().LastUsed(third); !at.Equal(time.Unix(2e9, 0)) {
		t.Errorf("the touch after the capture is lost: %v", at)
	}
}

// TestReadersNeedNoLock: under the race detector, with a writer and captures beside them.
func TestReadersNeedNoLock(t *testing.T) {
	w := lived(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				third, ok := w.s.Keys().Lookup(HashKey("third"))
				if !ok || third.ID != "third" {
					t.Error("a key was gone for a while")
					return
				}
				w.s.Keys().LastUsed(third)
				for k := range w.s.Keys().All() {
					_ = k.Active(time.Time{})
				}
				w.s.Audit(5, AuditFilter{Action: "key."})
				w.s.Facts().Kills.Len()
			}
		})
	}
	for i := range 300 {
		w.do(createKeys(keyMessage(fmt.Sprint(i), "t")))
		w.do(&ledgerpb.TouchKeys{Ids: []string{"third"}, Unix: []int64{2e9 + int64(i)}})
		if i%50 == 0 {
			wg.Go(func(c *Capture) func() { return func() { _ = c.Write(&bytes.Buffer{}) } }(w.s.Capture()))
		}
	}
	close(stop)
	wg.Wait()
	if got := w.s.Keys().Len(); got != 304 {
		t.Errorf("%d keys", got)
	}
}

// TestLookupAllocatesNothing, by hash or id, found or not, through an index or not.
func TestLookupAllocatesNothing(t *testing.T) {
	p := mustParse(t, example)
	s := NewState()
	_, err := s.Apply(1, command(1, createKeys(keyMessage("mine", "acme"), keyMessage("orphan", "nobody"))))
	must(t, err)
	ix, err := p.Index(time.Unix(2e9, 0), 1, Share{}, s.Keys(), Key{ID: "dev", Tenant: "old", Hash: zeroHash})
	must(t, err)
	mine, orphan := HashKey("mine"), HashKey("orphan")
	if n := testing.AllocsPerRun(100, func() {
		c, ok := ix.Lookup(mine)
		d, dev := ix.Lookup([32]byte{})
		_, lost := ix.Lookup(orphan)
		_, none := ix.Lookup([32]byte{1})
		k, byID := s.Keys().ByID("mine")
		if !ok || !dev || lost || none || !byID || c.Key != k || d.Key.ID != "dev" || c.Tenant.Name != "acme" {
			t.Error("a look-up went wrong")
		}
		s.Keys().LastUsed(k)
	}); n != 0 {
		t.Errorf("look-ups allocate %v times", n)
	}
}

// TestIndexSeesTheLiveTable: a key that comes, changes or takes the place of an extra one
// needs no new index, and its pointer changes only with it.
func TestIndexSeesTheLiveTable(t *testing.T) {
	p := mustParse(t, example)
	w := newWorld(t)
	ix, err := p.Index(time.Unix(2e9, 0), 1, Share{}, w.s.Keys(), Key{ID: "dev", Tenant: "old", Hash: FormatHash(HashKey("mine"))})
	must(t, err)
	look := func() *KeyRecord {
		c, ok := ix.Lookup(HashKey("mine"))
		if !ok {
			t.Fatal("the key is unknown")
		}
		return c.Key
	}
	if k := look(); k.ID != "dev" {
		t.Errorf("before: %v", k)
	}
	w.do(createKeys(keyMessage("mine", "acme")))
	first := look()
	w.do(createKeys(keyMessage("other", "acme")))
	w.do(&ledgerpb.TouchKeys{Ids: []string{"mine"}, Unix: []int64{1e9}})
	if look() != first || first.ID != "mine" {
		t.Error("another key or a touch changed the pointer")
	}
	w.do(&ledgerpb.RevokeKey{Id: "mine"})
	if k := look(); k == first || !k.Revoked || first.Revoked {
		t.Error("a revocation does not show")
	}
	if c, ok := ix.Tenant("acme"); !ok || c.Key != nil || c.Plan.Name != "pro" {
		t.Errorf("the tenant is %+v", c)
	}
}

const million = 1_000_000

// manyKeys are those of a large cluster: an id, a name, one of 10,000 tenants.
func manyKeys(n int) []*ledgerpb.Key {
	keys := make([]*ledgerpb.Key, n)
	for i := range keys {
		h := sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(i)))
		keys[i] = &ledgerpb.Key{Id: fmt.Sprintf("key_%012d", i), Hash: h[:], Tenant: fmt.Sprintf("tenant-%d", i%10_000), Name: fmt.Sprintf("service %d", i)}
	}
	return keys
}

func manyState(tb testing.TB, n int) *State {
	s := NewState()
	all := manyKeys(n)
	for i := uint64(1); len(all) > 0; i++ {
		batch := all[:min(len(all), 10_000)]
		r, err := s.Apply(i, command(i, createKeys(batch...)))
		must(tb, err)
		must(tb, RefusalOf(r))
		all = all[len(batch):]
	}
	return s
}

func BenchmarkKeyLookup1M(b *testing.B) {
	ks := manyState(b, million).Keys()
	hashes := make([][32]byte, 1<<16)
	for i := range hashes {
		hashes[i] = sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(i)*15%million))
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if _, ok := ks.Lookup(hashes[i&(len(hashes)-1)]); !ok {
			b.Fatal("not found")
		}
		i++
	}
}

// BenchmarkKeyMemory says what a key takes of the heap, all in.
func BenchmarkKeyMemory(b *testing.B) {
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		before := heap()
		s := manyState(b, million)
		b.ReportMetric(float64(heap()-before)/million, "B/key")
		runtime.KeepAlive(s)
	}
}

func BenchmarkSnapshot1M(b *testing.B) {
	s := manyState(b, million)
	var out bytes.Buffer
	b.ReportAllocs()
	for b.Loop() {
		out.Reset()
		must(b, s.Capture().Write(&out))
	}
	b.SetBytes(int64(out.Len()))
}

func BenchmarkRestore1M(b *testing.B) {
	snapshot := snapshotOf(b, manyState(b, million))
	b.SetBytes(int64(len(snapshot)))
	b.ReportAllocs()
	for b.Loop() {
		readState(b, snapshot)
	}
}

func BenchmarkCapture1M(b *testing.B) {
	s := manyState(b, million)
	for b.Loop() {
		s.Capture()
	}
}

func BenchmarkCreateKey1M(b *testing.B) {
	s := manyState(b, million)
	i := uint64(1000)
	for b.Loop() {
		_, err := s.Apply(i, command(i, createKeys(keyMessage(strings.Repeat("x", 10)+fmt.Sprint(i), "t"))))
		must(b, err)
		i++
	}
}
