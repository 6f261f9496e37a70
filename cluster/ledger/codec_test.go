package ledger

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

func TestSnapshotRoundTrip(t *testing.T) {
	for name, s := range map[string]*State{"empty": NewState(), "lived": lived(t).s, "large": manyState(t, 20_000)} {
		snapshot := snapshotOf(t, s)
		back, err := ReadState(iotest.OneByteReader(bytes.NewReader(snapshot)))
		must(t, err)
		if got, want := back.Facts(), s.Facts(); got.Hash != want.Hash || got.Index != want.Index || got.Changed != want.Changed || !got.Time.Equal(want.Time) || got.KeyCount != want.KeyCount {
			t.Errorf("%s: read back as %+v, was %+v", name, got, want)
		}
		if !bytes.Equal(snapshotOf(t, back), snapshot) {
			t.Errorf("%s: written again it is another", name)
		}
		for k, used := range s.Keys().All() {
			if again, ok := back.Keys().ByID(k.ID); !ok || again.Hash != k.Hash || !back.Keys().LastUsed(again).Equal(used) {
				t.Fatalf("%s: key %s is %+v", name, k.ID, again)
			}
		}
	}
}

// TestDamageIsFound at every byte that is missing, and in every bit.
func TestDamageIsFound(t *testing.T) {
	snapshot := snapshotOf(t, lived(t).s)
	damaged := func(b []byte, what string, at int) {
		t.Helper()
		s, err := ReadState(bytes.NewReader(b))
		_, is := errors.AsType[*SnapshotError](err)
		if s != nil || !is && !errors.Is(err, ErrSnapshotVersion) {
			t.Fatalf("%s at %d of %d gave %v", what, at, len(snapshot), err)
		}
	}
	for n := range snapshot {
		damaged(snapshot[:n], "cut off", n)
	}
	for i := range snapshot {
		for bit := range 8 {
			flipped := bytes.Clone(snapshot)
			flipped[i] ^= 1 << bit
			damaged(flipped, "a bit flipped", i)
		}
	}
}

// edited is a snapshot whose records edit changed, with a trailer that fits.
func edited(t *testing.T, snapshot []byte, edit func([]*ledgerpb.Record, *ledgerpb.Header) []*ledgerpb.Record) []byte {
	t.Helper()
	r := bufio.NewReader(bytes.NewReader(snapshot))
	var head ledgerpb.Header
	must(t, protodelim.UnmarshalFrom(r, &head))
	var records []*ledgerpb.Record
	for {
		var rec ledgerpb.Record
		must(t, protodelim.UnmarshalFrom(r, &rec))
		if rec.GetTrailer() != nil {
			break
		}
		records = append(records, &rec)
	}
	records = edit(records, &head)
	var out bytes.Buffer
	sw := &snapshotWriter{w: bufio.NewWriter(&out), sum: sha256.New()}
	sw.message(&head)
	for _, rec := range records {
		sw.record(rec)
	}
	sw.message(trailer(sw.records, sw.sum))
	must(t, errors.Join(sw.err, sw.w.Flush()))
	return out.Bytes()
}

// TestDamageIsNamed, also where somebody made the checksum fit.
func TestDamageIsNamed(t *testing.T) {
	snapshot := snapshotOf(t, lived(t).s)
	type records = []*ledgerpb.Record
	find := func(rs records, is func(*ledgerpb.Record) bool) int {
		for i, r := range rs {
			if is(r) {
				return i
			}
		}
		t.Fatal("no such record")
		return 0
	}
	key := func(r *ledgerpb.Record) bool { return r.GetKey() != nil }
	bucket := func(r *ledgerpb.Record) bool { return r.GetDurable() != nil }
	account := func(r *ledgerpb.Record) bool { return r.GetBudget() != nil }
	edits := func(is func(*ledgerpb.Record) bool, edit func(*ledgerpb.BudgetAccount)) func(records, *ledgerpb.Header) records {
		return func(rs records, _ *ledgerpb.Header) records { edit(rs[find(rs, is)].GetBudget()); return rs }
	}
	generation := func(r *ledgerpb.Record) bool { return r.GetCacheGeneration() != nil }
	tag := func(r *ledgerpb.Record) bool { return r.GetCacheTag() != nil }
	count := func(r *ledgerpb.Record) bool { return r.GetCacheCount() != nil }
	cached := func(is func(*ledgerpb.Record) bool, edit func(*ledgerpb.Record)) func(records, *ledgerpb.Header) records {
		return func(rs records, _ *ledgerpb.Header) records { edit(rs[find(rs, is)]); return rs }
	}
	twice := func(is func(*ledgerpb.Record) bool) func(records, *ledgerpb.Header) records {
		return func(rs records, _ *ledgerpb.Header) records {
			i := find(rs, is)
			return append(rs[:i+1:i+1], rs[i:]...)
		}
	}
	for name, c := range map[string]struct {
		edit func(records, *ledgerpb.Header) records
		want string
	}{
		"nothing":       {func(rs records, _ *ledgerpb.Header) records { return rs }, ""},
		"a key gone":    {func(rs records, _ *ledgerpb.Header) records { i := find(rs, key); return append(rs[:i:i], rs[i+1:]...) }, "whose hash is"},
		"a key changed": {func(rs records, _ *ledgerpb.Header) records { rs[find(rs, key)].GetKey().Revoked = true; return rs }, "whose hash is"},
		"a block changed": {func(rs records, _ *ledgerpb.Header) records {
			rs[find(rs, bucket)].GetDurable().GetBlocks()[0].Outstanding++
			return rs
		}, "whose hash is"},
		"a bucket twice": {func(rs records, _ *ledgerpb.Header) records {
			i := find(rs, bucket)
			return append(rs[:i+1:i+1], rs[i:]...)
		}, "a bucket twice"},
		"blocks reversed": {func(rs records, _ *ledgerpb.Header) records {
			slices.Reverse(rs[find(rs, bucket)].GetDurable().GetBlocks())
			return rs
		}, "its block 1 cannot be"},
		"a block owed": {func(rs records, _ *ledgerpb.Header) records {
			rs[find(rs, bucket)].GetDurable().GetBlocks()[0].Outstanding = -1
			return rs
		}, "its block 0 cannot be"},
		"a block to come": {func(rs records, _ *ledgerpb.Header) records {
			rs[find(rs, bucket)].GetDurable().GetBlocks()[0].Epoch = 2
			return rs
		}, "its block 0 cannot be"},
		"many blocks": {func(rs records, _ *ledgerpb.Header) records {
			b := rs[find(rs, bucket)].GetDurable()
			b.Blocks = make([]*ledgerpb.Block, maxBlocks+1)
			return rs
		}, "9 blocks, of 8"},
		"a bucket of slots": {func(rs records, _ *ledgerpb.Header) records {
			rs[find(rs, bucket)].GetDurable().Spec.Algorithm = 4
			return rs
		}, "semaphore has no blocks"},
		"a bucket of nobody": {func(rs records, _ *ledgerpb.Header) records { rs[find(rs, bucket)].GetDurable().Limit = ""; return rs }, "is no bucket of a durable limit"},
		"a bucket of before": {func(rs records, _ *ledgerpb.Header) records {
			rs[find(rs, bucket)].GetDurable().UnixNano = -1
			return rs
		}, "before 1970"},
		"no level": {func(rs records, _ *ledgerpb.Header) records { rs[find(rs, bucket)].GetDurable().State = nil; return rs }, "no bucket can be in"},
		"an account changed": {func(rs records, _ *ledgerpb.Header) records {
			rs[find(rs, account)].GetBudget().GetHolders()[0].Outstanding++
			return rs
		}, "whose hash is"},
		"an account twice": {func(rs records, _ *ledgerpb.Header) records {
			i := find(rs, account)
			return append(rs[:i+1:i+1], rs[i:]...)
		}, "an account twice"},
		"holders reversed": {func(rs records, _ *ledgerpb.Header) records {
			slices.Reverse(rs[find(rs, account)].GetBudget().GetHolders())
			return rs
		}, "its holder 1 cannot be"},
		"a holder owed":          {edits(account, func(a *ledgerpb.BudgetAccount) { a.GetHolders()[0].Outstanding = -1 }), "its holder 0 cannot be"},
		"nobody's account":       {edits(account, func(a *ledgerpb.BudgetAccount) { a.Key.Budget = "" }), "is no account of a budget"},
		"an account of before":   {edits(account, func(a *ledgerpb.BudgetAccount) { a.UnixNano = -1 }), "its times cannot be"},
		"more money than is":     {edits(account, func(a *ledgerpb.BudgetAccount) { a.Spent = maxSum + 1 }), "its sum, alerts or holders cannot be"},
		"told before it was":     {edits(account, func(a *ledgerpb.BudgetAccount) { a.Notified = a.GetCrossed() + 1 }), "its sum, alerts or holders cannot be"},
		"a period without end":   {edits(account, func(a *ledgerpb.BudgetAccount) { a.Key.Start = a.Key.End }), "a period begins"},
		"terms that cannot be":   {edits(account, func(a *ledgerpb.BudgetAccount) { a.Terms.Amount = -1 }), "a budget is of 0 to"},
		"slots without a window": {edits(account, func(a *ledgerpb.BudgetAccount) { a.Slots = []*ledgerpb.BudgetSlot{{Index: 1, Amount: 1}} }), "its slots are not what it spent"},
		"a slot of nothing":      {edits(account, func(a *ledgerpb.BudgetAccount) { a.Minutes = []*ledgerpb.BudgetSlot{{Index: 1}} }), "its slot 0 cannot be"},
		"many slots":             {edits(account, func(a *ledgerpb.BudgetAccount) { a.Minutes = make([]*ledgerpb.BudgetSlot, spikeMinutes+2) }), "62 slots, of 61"},
		"a generation changed":   {cached(generation, func(r *ledgerpb.Record) { r.GetCacheGeneration().Highest++ }), "whose hash is"},
		"a generation of before": {cached(generation, func(r *ledgerpb.Record) { r.GetCacheGeneration().Now = 0 }), "is a generation that cannot be"},
		"a generation to come":   {cached(generation, func(r *ledgerpb.Record) { r.GetCacheGeneration().Now = 99 }), "is a generation that cannot be"},
		"a generation never set": {cached(generation, func(r *ledgerpb.Record) { g := r.GetCacheGeneration(); g.Now, g.Highest = 1, 1 }), "is a generation that cannot be"},
		"a generation twice":     {twice(generation), "is a generation out of order"},
		"a tag changed":          {cached(tag, func(r *ledgerpb.Record) { r.GetCacheTag().Tag += "x" }), "whose hash is"},
		"a tag in two":           {cached(tag, func(r *ledgerpb.Record) { r.GetCacheTag().Tag = "a b" }), "is a tag that cannot be"},
		"a tag never":            {cached(tag, func(r *ledgerpb.Record) { r.GetCacheTag().Count = 0 }), "is a tag that cannot be"},
		"a tag to come":          {cached(tag, func(r *ledgerpb.Record) { r.GetCacheTag().Count = 99 }), "is a tag that cannot be"},
		"a tag twice":            {twice(tag), "is a tag that cannot be, or twice"},
		"tags reversed": {func(rs records, _ *ledgerpb.Header) records {
			i := find(rs, tag)
			rs[i], rs[i+4] = rs[i+4], rs[i]
			return rs
		}, "is a tag out of order"},
		"a count of nothing": {cached(count, func(r *ledgerpb.Record) { r.GetCacheCount().Count = 0 }), "counts invalidations as they cannot be"},
		"a count from later": {cached(count, func(r *ledgerpb.Record) { r.GetCacheCount().Since = 99 }), "counts invalidations as they cannot be"},
		"a floor above":      {cached(count, func(r *ledgerpb.Record) { r.GetCacheCount().Floor = 99 }), "counts invalidations as they cannot be"},
		"a floor added":      {cached(count, func(r *ledgerpb.Record) { r.GetCacheCount().Floor = 1 }), "whose hash is"},
		"counted twice":      {twice(count), "or twice"},
		"a floor to come":    {cached(tag, func(r *ledgerpb.Record) { r.Body = floorRecord(99) }), "is a tenant's floor that cannot be"},
		"a floor of nothing": {cached(tag, func(r *ledgerpb.Record) { r.Body = floorRecord(0) }), "is a tenant's floor that cannot be"},
		"a key without hash": {func(rs records, _ *ledgerpb.Header) records { rs[find(rs, key)].GetKey().Hash = nil; return rs }, "record 3 at byte"},
		"a key twice": {func(rs records, _ *ledgerpb.Header) records {
			i := find(rs, key)
			return append(rs[:i+1:i+1], rs[i:]...)
		}, "a key out of order"},
		"an id twice": {func(rs records, _ *ledgerpb.Header) records {
			i := find(rs, key)
			rs[i].GetKey().Id = rs[i+1].GetKey().GetId()
			return rs
		}, "two of the keys are called"},
		"revisions reversed": {func(rs records, _ *ledgerpb.Header) records { rs[0], rs[1] = rs[1], rs[0]; return rs }, "is revision 1 of the policy after 2"},
		"a command twice":    {func(rs records, _ *ledgerpb.Header) records { return append(rs, rs[len(rs)-1]) }, "remembers a command twice"},
		"a later record":     {func(rs records, _ *ledgerpb.Header) records { return append(rs, &ledgerpb.Record{}) }, "of a kind that this version does not know"},
		"a short id":         {func(rs records, h *ledgerpb.Header) records { h.ClusterId = []byte{1}; return rs }, "a cluster id of 1 bytes"},
		"a later version":    {func(rs records, h *ledgerpb.Header) records { h.Version = snapshotVersion + 1; return rs }, "written by a newer version"},
		"no version":         {func(rs records, h *ledgerpb.Header) records { h.Version = 0; return rs }, "its header at byte 0 is not that of a ledger's snapshot"},
	} {
		s, err := ReadState(bytes.NewReader(edited(t, snapshot, c.edit)))
		if c.want == "" {
			must(t, err)
			continue
		}
		if s != nil || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
	for name, b := range map[string][]byte{
		"more follows":      append(bytes.Clone(snapshot), 0),
		"a huge length":     append(protowire.AppendVarint(nil, maxRecord+1), 1, 2, 3),
		"a length too long": bytes.Repeat([]byte{0xff}, 20),
		"nothing":           nil,
		"text":              []byte("#!/bin/sh\necho this is no snapshot"),
	} {
		if s, err := ReadState(bytes.NewReader(b)); s != nil || err == nil {
			t.Errorf("%s: %v %v", name, s, err)
		}
	}
	broken := errors.New("the disk broke")
	if _, err := ReadState(io.MultiReader(bytes.NewReader(snapshot[:50]), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("a reader's error became %v", err)
	}
	if err := lived(t).s.Capture().Write(failingWriter{broken}); !errors.Is(err, broken) {
		t.Errorf("a writer's error became %v", err)
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// update writes the newest of testdata anew. The older were written by versions of before: that they
// can still be read is the point, so they are not to be written again.
func update(t *testing.T, dir string) {
	w := newWorld(t)
	var log, half bytes.Buffer
	feed := func(n uint64, body any) {
		c := command(n, body)
		_, err := protodelim.MarshalTo(&log, c)
		must(t, err)
		_, err = w.s.Apply(n, c)
		must(t, err)
		w.index = n
	}
	bodies := slices.Concat(blockBodies(), goldenBodies(), budgetBodies(), cacheBodies())
	r := (&Reserve{Bucket: bucketOf("hourly"), Limit: hourly(200), Owner: 3, Epoch: 1, N: 1, Want: 50, Debt: 7}).message()
	r.Spec.Revision = 2
	for i, body := range append(bodies, r) {
		if feed(uint64(i+1), body); i == len(bodies)/2 {
			must(t, w.s.Capture().Write(&half))
		}
	}
	sum := w.s.Facts().Hash
	must(t, os.MkdirAll(dir, 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "log"), log.Bytes(), 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "snapshot"), half.Bytes(), 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "hash"), []byte(hex.EncodeToString(sum[:])+"\n"), 0o644))
}

func goldenBodies() []any {
	k := keyMessage("full", "acme")
	k.Name, k.User, k.Class, k.Models, k.Routes, k.Surfaces, k.AssertUser, k.ExpiresUnixNano = "n", "u", "background", []string{"llama-8b"}, []string{"chat"}, []string{"*"}, true, 2e18
	return []any{
		&ledgerpb.Found{ClusterId: bytes.Repeat([]byte{7}, 16)},
		&ledgerpb.SetPolicy{Text: []byte(example), NewKeys: []*ledgerpb.Key{keyMessage("filed", "acme")}, Changes: []string{"+ version: 1"}, Seed: true},
		createKeys(k, keyMessage("second", "old")),
		&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: "acme", On: true, Reason: "abuse"},
		&ledgerpb.SetRung{Rung: "cheap_models", On: true, ExpiresUnixNano: 2e18, Reason: "load"},
		&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 1, Partitions: 4093, RingVersion: 1, Members: []*ledgerpb.Member{{Name: "a", Incarnation: 1, Address: "h:1"}}}},
		&ledgerpb.CreateToken{Token: &ledgerpb.Token{Name: "ci", Hash: hashOf("ci"), Role: ledgerpb.Role_ROLE_OPERATE}},
		&ledgerpb.CreateToken{Token: &ledgerpb.Token{Name: "cd", Hash: hashOf("cd"), Role: ledgerpb.Role_ROLE_ADMIN, ExpiresUnixNano: 2e18}},
		&ledgerpb.RevokeKey{Id: "nobody"},
		&ledgerpb.TouchKeys{Ids: []string{"full", "filed"}, Unix: []int64{1e9, 1e9}},
		&ledgerpb.CreateKeys{Keys: []*ledgerpb.Key{keyMessage("third", "old")}, Replaces: "second", ReplacedExpiresUnixNano: 15e17},
		&ledgerpb.RevokeKey{Id: "full"},
		&ledgerpb.TouchKeys{Ids: []string{"full", "third"}, Unix: []int64{2e9, 2e9}},
		&ledgerpb.SetPolicy{Text: []byte("version: 1\n"), Expected: proto.Uint64(1), RolledBackTo: 1},
		&ledgerpb.SetPolicy{Text: []byte("version: 2\n"), Expected: proto.Uint64(1)},
		&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_GLOBAL, On: true},
		&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: "acme"},
		&ledgerpb.RevokeToken{Name: "ci"},
		&ledgerpb.Note{Node: "a", UnixNano: 1e18, Action: "node.override", Detail: "for 15m"},
	}
}

var updateGolden = flag.Bool("update", false, "write golden files anew")

// TestOldLogAndSnapshotStillWork: what earlier versions wrote gives the state that it gave then.
func TestOldLogAndSnapshotStillWork(t *testing.T) {
	newest := filepath.Join("testdata", "v4")
	if *updateGolden {
		update(t, newest)
	}
	oldStillWorks(t, filepath.Join("testdata", "v1"), holdings{})
	oldStillWorks(t, filepath.Join("testdata", "v2"), holdings{durables: 2})
	oldStillWorks(t, filepath.Join("testdata", "v3"), holdings{durables: 2, budgets: 2})
	oldStillWorks(t, newest, holdings{durables: 2, budgets: 2, generations: 4, tags: 5, stamp: 4})
}

// holdings are what versions added to states.
type holdings struct {
	durables, budgets, generations, tags int
	stamp                                uint64
}

func holdingsOf(f *Facts) holdings {
	generations, tags := f.Caches.Len()
	return holdings{f.Durables, f.Budgets, generations, tags, f.Caches.Stamp()}
}

func oldStillWorks(t *testing.T, dir string, holds holdings) {
	t.Helper()
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		return b
	}
	want := strings.TrimSpace(string(read("hash")))
	fromStart, fromHalf := NewState(), readState(t, read("snapshot"))
	half := fromHalf.Facts().Index
	r := bufio.NewReader(bytes.NewReader(read("log")))
	index := uint64(0)
	for {
		var c ledgerpb.Command
		err := protodelim.UnmarshalFrom(r, &c)
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		index++
		_, err = fromStart.Apply(index, &c)
		must(t, err)
		if index > half {
			_, err = fromHalf.Apply(index, &c)
			must(t, err)
		}
	}
	if half == 0 || half >= index || index < 10 {
		t.Fatalf("a log of %d entries, a snapshot at %d", index, half)
	}
	for name, s := range map[string]*State{"the log": fromStart, "the snapshot and the log's end": fromHalf} {
		f := s.Facts()
		if got := hex.EncodeToString(f.Hash[:]); got != want {
			t.Errorf("%s: %s: the state's hash is %s, and was %s", dir, name, got, want)
		}
		if f.KeyCount != 4 || f.Revision() != 2 || holdingsOf(f) != holds || f.View.Epoch != 1 || f.Tokens.Len() != 1 || f.Kills.Len() != 1 {
			t.Errorf("%s: %+v", name, f)
		}
		if again := readState(t, snapshotOf(t, s)).Facts(); again.Hash != f.Hash {
			t.Errorf("%s: written by this version it has the hash %x, not %x", name, again.Hash, f.Hash)
		}
	}
}
