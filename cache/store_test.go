package cache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

// storeWorld is a store whose clock and validity a test moves.
type storeWorld struct {
	*Store
	clock   atomic.Int64
	invalid atomic.Bool
	filled  int // so many keys warm has put
	next    int // of the keys that refused puts
}

func newStoreWorld(t testing.TB, maxBytes int64) *storeWorld {
	t.Helper()
	w := &storeWorld{}
	w.clock.Store(int64(time.Hour))
	s, err := NewStore(StoreConfig{
		MaxBytes: maxBytes, MaxEntry: maxBytes / 4, Now: w.clock.Load, Rand: rand.New(rand.NewPCG(1, 2)),
		Valid: func(*Entry) bool { return !w.invalid.Load() },
	})
	if err != nil {
		t.Fatal(err)
	}
	w.Store = s
	t.Cleanup(s.Close)
	return w
}

func (w *storeWorld) pass(d time.Duration) { w.clock.Add(int64(d)) }

func (w *storeWorld) get(k Key) (Hit, bool) { return w.Get(k, w.clock.Load()) }

// storeKey is a key all of whose bytes depend on n.
func storeKey(n int) (k Key) {
	r := rand.New(rand.NewPCG(uint64(n), 99))
	for i := 0; i < len(k); i += 8 {
		binary.LittleEndian.PutUint64(k[i:], r.Uint64())
	}
	return k
}

// twinKey shares its first 16 bytes with others of its family.
func twinKey(family, n int) Key {
	k := storeKey(family)
	binary.LittleEndian.PutUint64(k[16:], uint64(n))
	return k
}

func storeEntry(k Key, size int) *Entry {
	body := make([]byte, size) // of chance: it does not compress
	r := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(k[:]), binary.LittleEndian.Uint64(k[16:])))
	for i := range body {
		body[i] = byte(r.Uint32())
	}
	return &Entry{Key: k, Tenant: "acme", Surface: "faq", ContentType: "application/json", Body: body, Life: Life{TTL: time.Hour}}
}

// audit recounts what the store holds.
func (w *storeWorld) audit(t interface{ Fatalf(string, ...any) }) {
	held := map[*stored]bool{}
	w.cache.IterValues(func(v *stored) bool { held[v] = true; return false })
	w.bridge.mu.Lock()
	defer w.bridge.mu.Unlock()
	inCache := len(held)
	var ring int64
	for v := w.bridge.ends.next; v != &w.bridge.ends; v = v.next {
		if w.bridge.m[v.entry.Key] != v {
			t.Fatalf("the bridge's ring and map differ")
		}
		held[v] = true
		ring += v.size
	}
	var total int64
	for v := range held {
		total += v.size
	}
	if w.bridge.all != int64(len(held)) || w.bridge.total != total || w.bridge.bytes != ring || ring > w.bridge.max {
		t.Fatalf("counted %d entries of %d bytes, %d in the bridge (of %d); there are %d (%d in ristretto) of %d, %d",
			w.bridge.all, w.bridge.total, w.bridge.bytes, w.bridge.max, len(held), inCache, total, ring)
	}
}

func TestStoreConfig(t *testing.T) {
	good := StoreConfig{MaxBytes: 1 << 20, MaxEntry: 1, Now: func() int64 { return 0 }, Rand: rand.New(rand.NewPCG(1, 1))}
	for want, change := range map[string]func(*StoreConfig){
		"max bytes": func(c *StoreConfig) { c.MaxBytes-- },
		"max entry": func(c *StoreConfig) { c.MaxEntry = 0 },
		"now":       func(c *StoreConfig) { c.Now = nil },
		"rand":      func(c *StoreConfig) { c.Rand = nil },
	} {
		c := good
		change(&c)
		if _, err := NewStore(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want one about %s", err, want)
		}
	}
	s, err := NewStore(good)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	s.Close()
}

func TestStoreReturnsWhatWasPut(t *testing.T) {
	w := newStoreWorld(t, 8<<20)
	text := []byte(strings.Repeat(`{"id":"chatcmpl-1","choices":[]} `, 400))
	for n, body := range [][]byte{nil, []byte("{}"), text[:packFrom-1], text[:packFrom], text, storeEntry(storeKey(1), 100_000).Body} {
		e := &Entry{
			Key: storeKey(n), Tenant: "acme", Surface: "faq", ContentType: "application/json", Body: bytes.Clone(body),
			Tags: []string{"a", "bc"}, Stamp: 7, Input: 1, CachedInput: 2, Output: 3, Life: Life{TTL: time.Hour, Beta: 1}, Delta: time.Second,
		}
		if !w.Put(e) {
			t.Fatalf("%d bytes: not put", len(body))
		}
		for i := range e.Body {
			e.Body[i] = 'x' // the store has a copy
		}
		w.pass(time.Second)
		h, ok := w.get(e.Key)
		if !ok || h.Tier != Local || h.Age != time.Second || h.Stale || h.Refresh {
			t.Fatalf("%d bytes: got %+v, %v", len(body), h, ok)
		}
		got := *h.Entry
		if !bytes.Equal(got.Body, body) || !slices.Equal(got.Tags, e.Tags) {
			t.Fatalf("%d bytes: another body of %d, or tags %q", len(body), len(got.Body), got.Tags)
		}
		got.Body, got.Tags = e.Body, e.Tags
		if fmt.Sprint(got) != fmt.Sprint(*e) {
			t.Errorf("put %v, got %v", *e, got)
		}
	}
	if s := w.Stats(); s.Entries != 6 || s.Puts != 6 || s.Rejected+s.Dropped+s.Evicted != 0 {
		t.Errorf("%+v", s)
	}
	w.audit(t)
	if _, ok := w.get(storeKey(77)); ok {
		t.Error("found what nobody put")
	}
}

func TestStoreCompressesWhatShrinks(t *testing.T) {
	text := []byte(strings.Repeat(`{"role":"assistant","content":"The same again."} `, 100))
	noise := storeEntry(storeKey(1), 4096).Body
	for _, c := range []struct {
		what   string
		body   []byte
		packed bool
	}{{"text", text, true}, {"noise", noise, false}, {"a short text", text[:packFrom-1], false}} {
		v := newStored(&Entry{Body: c.body}, 0, 0)
		if got := v.packed != nil; got != c.packed {
			t.Errorf("%s: compressed %v, want %v", c.what, got, c.packed)
		}
		if c.packed && v.size > int64(len(c.body)) {
			t.Errorf("%s of %d bytes is said to take %d", c.what, len(c.body), v.size)
		}
		if e := v.plain(); e == nil || !bytes.Equal(e.Body, c.body) {
			t.Errorf("%s did not come back", c.what)
		}
	}
}

func TestStoreRefuses(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	large := storeEntry(storeKey(1), int(w.c.MaxEntry)+1)
	dead := storeEntry(storeKey(2), 10)
	dead.Age = time.Hour / 2
	none := storeEntry(storeKey(3), 10)
	none.Life = Life{}
	for what, e := range map[string]*Entry{"a large one": large, "one past half its life": dead, "one without a life": none} {
		if w.Put(e) {
			t.Errorf("%s was put", what)
		}
		if _, ok := w.get(e.Key); ok {
			t.Errorf("%s is found", what)
		}
	}
	w.invalid.Store(true)
	if w.Put(storeEntry(storeKey(4), 10)) {
		t.Error("what is not valid was put")
	}
	if s := w.Stats(); s.TooLarge != 1 || s.Entries != 0 || s.Puts != 0 {
		t.Errorf("%+v", s)
	}
}

// The life of one entry through Get and Stale.
func TestStoreLife(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	e := storeEntry(storeKey(1), 100)
	e.Life = Life{TTL: 100 * time.Second, MaxTTL: 250 * time.Second, Stale: 10 * time.Second, StaleIfError: 20 * time.Second}
	put := func() int64 {
		if !w.Put(e) {
			t.Fatal("not put")
		}
		return w.clock.Load()
	}
	start := put()
	at := func(age time.Duration, get, stale string) {
		t.Helper()
		say := func(h Hit, ok bool) string {
			switch {
			case !ok:
				return "miss"
			case h.Age != age:
				t.Errorf("at %v: age %v", age, h.Age)
			case h.Stale && h.Refresh:
				return "stale, refresh"
			case h.Refresh:
				return "early"
			case h.Stale:
				return "stale"
			}
			return "fresh"
		}
		now := start + int64(age)
		if got := say(w.Stale(e.Key, now)); got != stale {
			t.Errorf("at %v where the model fails: %s, want %s", age, got, stale)
		}
		if got := say(w.Get(e.Key, now)); got != get {
			t.Errorf("at %v: %s, want %s", age, got, get)
		}
	}
	const s = time.Second
	at(50*s, "stale, refresh", "stale") // never hit: half its TTL
	at(51*s, "stale", "stale")          // another refreshes it
	at(60*s, "miss", "stale")
	at(79*s, "miss", "stale")
	at(80*s, "miss", "miss")
	start = put()
	at(49*s, "fresh", "fresh") // the first hit: its TTL
	at(99*s, "fresh", "fresh") // from now on
	at(198*s, "fresh", "fresh")
	at(249*s, "fresh", "fresh")
	at(250*s, "stale, refresh", "stale") // MaxTTL
	at(259*s, "stale", "stale")
	at(260*s, "miss", "stale")
	at(280*s, "miss", "miss")
	start = put()
	at(50*s, "stale, refresh", "stale")
	at(59*s, "stale", "stale") // stale hits do not bring it back
	at(60*s, "miss", "stale")
	if h, ok := w.Get(e.Key, start-1); !ok || h.Age != 0 {
		t.Errorf("a clock that was read before the put finds %+v, %v: want it new", h, ok)
	}
}

func TestStoreKeepsACopyAlive(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	e := storeEntry(storeKey(1), 100)
	e.Life.MaxTTL = 3 * time.Hour
	h := Hit{Entry: e, Age: 90 * time.Minute, Tier: Owner}
	if !w.PutCopy(h) {
		t.Fatal("not put")
	}
	w.pass(59 * time.Minute)
	if got, ok := w.get(e.Key); !ok || got.Stale || got.Age != 149*time.Minute {
		t.Errorf("a copy of a hit is %+v, %v", got, ok)
	}
	h.Stale = true
	if w.PutCopy(h) {
		t.Error("a stale copy was put")
	}
}

// However many read a stale entry at once, one refreshes it: again after Release, after
// refreshFor, and after the next put.
func TestOneRefresherAtATime(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	e := storeEntry(storeKey(1), 100)
	e.Life = Life{TTL: 10 * time.Second, Stale: time.Hour}
	refreshers := func() int64 {
		var served, n atomic.Int64
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for range 50 {
					h, ok := w.get(e.Key)
					if ok && h.Stale {
						served.Add(1)
					}
					if h.Refresh {
						n.Add(1)
					}
				}
			})
		}
		wg.Wait()
		if served.Load() != 16*50 {
			t.Fatalf("%d of %d were served", served.Load(), 16*50)
		}
		return n.Load()
	}
	expect := func(when string, want int64) {
		t.Helper()
		if n := refreshers(); n != want {
			t.Errorf("%s %d refresh, want %d", when, n, want)
		}
	}
	w.Put(e)
	w.pass(5 * time.Second)
	expect("at first", 1)
	expect("while one does", 0)
	w.Release(e.Key, 0)
	expect("after it gave up", 1)
	w.Release(e.Key, refreshPause)
	w.Release(e.Key, refreshFor) // it is no longer than it was
	w.pass(refreshPause - 1)
	expect("in the pause after it failed", 0)
	w.pass(1)
	expect("after the pause", 1)
	w.pass(refreshFor - 1)
	expect("just before it is given up", 0)
	w.pass(1)
	expect("when it is given up", 1)
	w.Put(e)
	w.pass(5 * time.Second)
	w.Release(e.Key, refreshPause) // of a refresh that found it stored
	expect("of the next entry", 1)
}

func TestEarlyRefreshThroughTheStore(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	e := storeEntry(storeKey(1), 100)
	e.Life, e.Delta = Life{TTL: time.Minute, Beta: 1}, 10*time.Second
	w.Put(e)
	w.get(e.Key)
	early := 0
	for range 59 {
		w.pass(time.Second)
		h, ok := w.get(e.Key)
		if !ok || h.Stale {
			t.Fatalf("not served as fresh at %v", h.Age)
		}
		if h.Refresh {
			early++
		}
	}
	// Certain but for 1 in 10^11: 59 draws, the last ten at e^-1 or more each.
	if early == 0 || early > 2 {
		t.Errorf("%d readers refresh early, want one, or a second after %v", early, refreshFor)
	}
}

// Read counts a hit like Get, but leaves it to the next to refresh what is stale or expires before long.
func TestReadRefreshesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		life  Life
		age   time.Duration
		stale bool
	}{
		"stale": {Life{TTL: time.Hour, Stale: time.Hour}, 40 * time.Minute, true},
		"early": {Life{TTL: time.Hour, Beta: 1e9}, time.Minute, false},
	} {
		w := newStoreWorld(t, 1<<20)
		e := storeEntry(storeKey(1), 100)
		e.Life, e.Delta = c.life, time.Second
		w.Put(e)
		w.pass(c.age)
		if h, ok := w.Read(e.Key, w.clock.Load()); !ok || h.Refresh || h.Stale != c.stale || h.Age != c.age || !bytes.Equal(h.Body, e.Body) {
			t.Errorf("%s: read %+v", name, h)
		}
		if h, ok := w.get(e.Key); !ok || !h.Refresh {
			t.Errorf("%s: nobody is left to refresh it: %+v", name, h)
		}
	}
	w := newStoreWorld(t, 1<<20)
	w.Put(storeEntry(storeKey(2), 100))
	w.Read(storeKey(2), w.clock.Load())
	w.pass(45 * time.Minute) // beyond half its time, which the hit made whole
	if _, ok := w.Read(storeKey(2), w.clock.Load()); !ok {
		t.Error("reading it was no hit")
	}
	if _, ok := w.Read(storeKey(3), w.clock.Load()); ok {
		t.Error("read what is not there")
	}
}

// Peek tells what Get would find, and changes nothing.
func TestPeekChangesNothing(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	e := storeEntry(storeKey(1), 100)
	e.Life = Life{TTL: time.Hour, Stale: time.Hour, StaleIfError: time.Hour}
	w.Put(e)
	peek := func(want, stale bool) {
		t.Helper()
		h, ok := w.Peek(e.Key, w.clock.Load())
		if ok != want || ok && (h.Entry != nil || h.Refresh || h.Stale != stale || h.Age != time.Duration(w.clock.Load())-time.Hour) {
			t.Errorf("%v, %+v", ok, h)
		}
	}
	for range 3 {
		peek(true, false)
	}
	w.pass(30 * time.Minute) // it was never hit
	peek(true, true)
	w.invalid.Store(true)
	peek(false, false)
	w.invalid.Store(false)
	if h, ok := w.get(e.Key); !ok || !h.Stale || !h.Refresh {
		t.Errorf("%v, %+v", ok, h)
	}
	w.pass(time.Hour)
	peek(false, false) // it is there where the model fails only
	w.warm(t, 1000)
	out := w.refused(t, 1000)
	if _, ok := w.Peek(out.Key, w.clock.Load()); !ok {
		t.Error("what the bridge alone has is not there")
	}
	if s := w.Stats(); s.Invalid != 0 || s.Bridged != 0 {
		t.Errorf("counted: %+v", s)
	}
}

// Keys of the same first 16 bytes take each other's place, and never answer for each other.
func TestTwinsNeverAnswerForEachOther(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	a, b := storeEntry(twinKey(1, 1), 100), storeEntry(twinKey(1, 2), 100)
	w.Put(a)
	if _, ok := w.get(b.Key); ok {
		t.Fatal("found the twin")
	}
	w.Release(b.Key, 0)
	if h, ok := w.get(a.Key); !ok || !bytes.Equal(h.Body, a.Body) {
		t.Fatal("its twin's release took an entry")
	}
	if !w.Put(b) {
		t.Fatal("not put")
	}
	if h, ok := w.get(b.Key); !ok || !bytes.Equal(h.Body, b.Body) {
		t.Fatal("the last that was put is not found")
	}
	if h, ok := w.get(a.Key); ok && !bytes.Equal(h.Body, a.Body) {
		t.Fatal("the twin's answer")
	}
	if w.Stats().Foreign == 0 {
		t.Error("not counted")
	}
	w.audit(t)
}

// A store against a map: what it finds is what was put last, whatever twins, evictions, the clock
// and validity do; what was put just now is found.
func TestStoreAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &storeWorld{}
		s, err := NewStore(StoreConfig{
			MaxBytes: 1 << 20, MaxEntry: 1 << 16, Now: w.clock.Load, Rand: rand.New(rand.NewPCG(1, 2)),
			Valid: func(*Entry) bool { return !w.invalid.Load() },
		})
		if err != nil {
			t.Fatalf("%v", err)
		}
		w.Store = s
		defer s.Close()
		model := map[Key]*Entry{}
		key := func(t *rapid.T) Key {
			return twinKey(rapid.IntRange(0, 19).Draw(t, "family"), rapid.IntRange(0, 1).Draw(t, "twin"))
		}
		n := 0
		check := func(t *rapid.T, k Key, h Hit, ok bool) {
			want := model[k]
			switch {
			case !ok:
			case w.invalid.Load():
				t.Fatalf("found what is not valid")
			case want == nil:
				t.Fatalf("found what was not put, or dropped as it was not valid")
			case h.Key != k || !bytes.Equal(h.Body, want.Body):
				t.Fatalf("found another answer")
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				k := key(t)
				n++
				size := rapid.SampledFrom([]int{10, 3000, 60_000}).Draw(t, "size")
				e := storeEntry(k, size)
				binary.LittleEndian.PutUint64(e.Body, uint64(n))
				if w.Put(e) {
					model[k] = e
					if h, ok := w.get(k); !ok || !bytes.Equal(h.Body, e.Body) {
						t.Fatalf("what was put is not found")
					}
				} else if !w.invalid.Load() {
					t.Fatalf("not put")
				}
			},
			"get":   func(t *rapid.T) { k := key(t); h, ok := w.get(k); check(t, k, h, ok) },
			"stale": func(t *rapid.T) { k := key(t); h, ok := w.Stale(k, w.clock.Load()); check(t, k, h, ok) },
			"pass":  func(t *rapid.T) { w.pass(time.Duration(rapid.IntRange(1, 20).Draw(t, "s")) * time.Second) },
			"invalidate": func(t *rapid.T) {
				w.invalid.Store(true)
				for k := range maps.Clone(model) {
					if rapid.Bool().Draw(t, "read") {
						_, ok := w.get(k)
						check(t, k, Hit{}, ok)
						delete(model, k) // dropped: it does not come back
					}
				}
				w.invalid.Store(false)
			},
			"": func(t *rapid.T) {
				w.audit(t)
				if st := w.Stats(); st.Bytes+storeFixed > 1<<20 {
					t.Fatalf("holds %d bytes", st.Bytes)
				}
			},
		})
	})
}

// warm fills the store with entries.
func (w *storeWorld) warm(t testing.TB, size int) {
	t.Helper()
	before := w.Stats()
	for w.filled = 0; w.Stats().Evicted+w.Stats().Rejected == before.Evicted+before.Rejected; w.filled++ {
		w.Put(storeEntry(storeKey(w.filled), size))
		if w.filled > 1<<20 {
			t.Fatal("the store does not fill")
		}
	}
}

// refused puts entries until admission refuses one, since others are asked for so often.
func (w *storeWorld) refused(t testing.TB, size int) *Entry {
	t.Helper()
	for range 1000 {
		before := w.Stats().Rejected
		w.next++
		e := storeEntry(storeKey(1<<30+w.next), size)
		if !w.Put(e) {
			t.Fatal("not put")
		}
		if w.Stats().Rejected > before {
			return e
		}
		for range 10 { // ristretto may lose of these what it likes
			for i := range w.filled {
				w.held(new(storeKey(i)))
			}
			runtime.Gosched()
		}
	}
	t.Fatal("admission refuses nothing")
	return nil
}

// Case 8: what admission refuses is found for bridgeFor, and no longer.
func TestRefusedIsBridged(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	w.warm(t, 1000)
	e := w.refused(t, 1000)
	w.pass(bridgeFor - 1)
	// Stale, which offers it again as Get does: it may be refused, or admitted by now.
	if h, ok := w.Stale(e.Key, w.clock.Load()); !ok || !bytes.Equal(h.Body, e.Body) {
		t.Error("lost before its time")
	}
	if w.Stats().Bridged == 0 {
		t.Error("not counted")
	}
	w.audit(t)
	e = w.refused(t, 1000)
	w.pass(bridgeFor)
	if _, ok := w.get(e.Key); ok {
		t.Error("found after its time")
	}
	w.audit(t)
}

// An entry that is refused, but asked for, is admitted in the end.
func TestRefusedAndAskedForIsAdmitted(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	w.warm(t, 1000)
	e := w.refused(t, 1000)
	for range 100_000 {
		if _, ok := w.get(e.Key); !ok {
			t.Fatal("lost")
		}
		if w.held(&e.Key) != nil {
			w.pass(2 * bridgeFor)
			if _, ok := w.get(e.Key); !ok {
				t.Fatal("lost after it was admitted")
			}
			w.audit(t)
			return
		}
		runtime.Gosched()
	}
	t.Error("never admitted")
}

// The bridge holds its share of bytes; the first go.
func TestBridgeIsBounded(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	w.warm(t, 4000)
	first := w.refused(t, 4000)
	for range 1000 {
		last := w.refused(t, 4000)
		if !w.bridge.has(w.bridge.get(&last.Key, w.clock.Load())) {
			t.Fatal("the last is not in the bridge")
		}
		if w.bridge.get(&first.Key, w.clock.Load()) == nil {
			w.audit(t)
			return
		}
	}
	t.Error("the first never goes")
}

// What ristretto evicts within bridgeFor is found for the rest of it.
func TestEvictedAtOnceIsBridged(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	n := 0
	for ; w.Stats().Evicted < 10; n++ {
		if !w.Put(storeEntry(storeKey(n), 1000)) {
			t.Fatal("not put")
		}
	}
	for i := range n {
		if _, ok := w.get(storeKey(i)); !ok {
			t.Fatalf("%d of %d is not found", i, n)
		}
	}
	w.audit(t)
}

// Case 8, the other way: ristretto's buffer is full. Its goroutine is held up where it evicts from
// a part of its map that a reader holds.
func TestDroppedIsBridged(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	shard := func(n, shard int) Key {
		k := storeKey(n)
		k[0] = byte(shard) // ristretto's: the hash modulo 256
		return k
	}
	n := 0
	for ; w.Stats().Evicted == 0; n++ {
		w.Put(storeEntry(shard(n, 1), 1000)) // all in one
	}
	held, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	var once sync.Once
	wg.Go(func() {
		w.cache.IterValues(func(*stored) bool {
			once.Do(func() { close(held) })
			<-release
			return true
		})
	})
	<-held
	for i := range 64 << 10 { // its buffer has room for half of these
		k := shard(n+i, 2)
		v := newStored(&Entry{Key: k}, 0, w.clock.Load())
		if !w.cache.Set(storeHash(&k), v, v.size) {
			break // full
		}
	}
	e := storeEntry(shard(-1, 3), 1000)
	if !w.Put(e) {
		t.Error("not put")
	}
	if h, ok := w.get(e.Key); !ok || !bytes.Equal(h.Body, e.Body) {
		t.Error("not found")
	}
	if w.Put(storeEntry(shard(-2, 3), int(w.bridge.max)+1)) {
		t.Error("one that the bridge has no room for is said to be found")
	}
	if s := w.Stats(); s.Dropped != 3 { // the read offered it again
		t.Errorf("not counted: %+v", s)
	}
	close(release)
	wg.Wait()
	w.pass(bridgeFor)
	if _, ok := w.get(e.Key); ok {
		t.Error("found after its time, though nothing holds it")
	}
}

// What a read finds invalid is dropped, wherever it is, and does not come back.
func TestInvalidIsDropped(t *testing.T) {
	w := newStoreWorld(t, 1<<20)
	w.warm(t, 1000)
	out := w.refused(t, 1000).Key
	var in Key
	for i := range w.filled {
		if in = storeKey(i); w.held(&in) != nil {
			break
		}
	}
	before := w.Stats()
	if w.held(&in) == nil || w.held(&out) != nil {
		t.Fatal("want one in ristretto, and one in the bridge only")
	}
	w.invalid.Store(true)
	for _, k := range []Key{in, out} {
		if _, ok := w.get(k); ok {
			t.Error("found what is not valid")
		}
	}
	w.invalid.Store(false)
	for _, k := range []Key{in, out} {
		if _, ok := w.get(k); ok {
			t.Error("it came back")
		}
	}
	if s := w.Stats(); s.Invalid != 2 || s.Entries != before.Entries-2 || s.Evicted != before.Evicted {
		t.Errorf("%+v, want two entries less than of %+v", s, before)
	}
	w.audit(t)
}

// Entries that grow where they are make no room in ristretto; the store does.
func TestGrowingEntriesStayWithinBounds(t *testing.T) {
	w := newStoreWorld(t, 4<<20)
	for _, size := range []int{1000, 20_000, 100_000} {
		for n := range 200 {
			e := storeEntry(storeKey(n), size)
			if !w.Put(e) {
				t.Fatal("not put")
			}
			if h, ok := w.get(e.Key); !ok || len(h.Body) != size {
				t.Fatal("not found")
			}
			if s := w.Stats(); s.Bytes+storeFixed+storeCounter*storeCounters(4<<20) > 4<<20 {
				t.Fatalf("%d bytes after %d of %d", s.Bytes, n, size)
			}
		}
		w.audit(t)
	}
}

// Readers and writers while all is invalidated again and again: a read finds what was put under its key,
// and nothing of which it was known before the read that it is not valid. What is valid is not lost to
// the drop of what was there before.
func TestInvalidateWhileOthersReadAndWrite(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	w := &storeWorld{}
	var floor atomic.Uint64 // the least stamp that is valid
	s, err := NewStore(StoreConfig{
		MaxBytes: 1 << 20, MaxEntry: 1 << 16, Now: w.clock.Load, Rand: rand.New(rand.NewPCG(1, 2)),
		Valid: func(e *Entry) bool { return e.Stamp >= floor.Load() },
	})
	if err != nil {
		t.Fatal(err)
	}
	w.Store = s
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for g := range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				e := storeEntry(storeKey(1000*g+n%20), 5000) // of this goroutine alone
				if n%3 > 0 {
					known := floor.Load()
					if h, ok := w.get(e.Key); ok && (!bytes.Equal(h.Body, e.Body) || h.Stamp < known) {
						t.Errorf("found a body of %d bytes with stamp %d, of at least %d", len(h.Body), h.Stamp, known)
					}
					continue
				}
				e.Stamp = floor.Load()
				put := w.Put(e)
				if h, ok := w.get(e.Key); put && (!ok || h.Stamp != e.Stamp) && floor.Load() == e.Stamp {
					t.Errorf("put, but not found: %v", h.Entry)
				}
			}
		})
	}
	for round := 0; round < 50 || w.Stats().Puts < 500; round++ {
		floor.Add(1)
		for g := range 4 { // as readers do, of what others write
			for n := range 20 {
				w.get(storeKey(1000*g + n))
			}
		}
		w.audit2(t)
	}
	close(stop)
	wg.Wait()
	w.audit(t)
	floor.Add(1)
	for g := range 4 {
		for n := range 20 {
			w.get(storeKey(1000*g + n))
		}
	}
	if s := w.Stats(); s.Entries != 0 || s.Bytes != 0 || s.Bridge != 0 || s.Invalid == 0 {
		t.Errorf("nothing is valid, but %+v", s)
	}
	w.Close()
}

// audit2 checks what holds while others write.
func (w *storeWorld) audit2(t testing.TB) {
	if s := w.Stats(); s.Entries < 0 || s.Bytes < 0 || s.Bridge > w.bridge.max || s.Bytes > 1<<20 {
		t.Errorf("%+v", s)
	}
}

// Close may come while others read and write, and ends all goroutines.
func TestCloseWhileOthersReadAndWrite(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for round := range 6 {
		w := newStoreWorld(t, 1<<20)
		w.Put(storeEntry(storeKey(1), 1000))
		var wg, started sync.WaitGroup
		stop := make(chan struct{})
		for g := range 6 {
			started.Add(1)
			wg.Go(func() {
				started.Done()
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					switch k := storeKey(n % 50); g % 3 {
					case 0:
						w.get(k)
					case 1:
						w.Put(storeEntry(k, 1000))
					default:
						w.Stale(k, w.clock.Load())
						w.Release(k, 0)
					}
				}
			})
		}
		started.Wait()
		if round%2 == 1 {
			w.invalid.Store(true) // readers drop
		}
		w.Close()
		close(stop)
		wg.Wait()
		w.invalid.Store(false)
		if _, ok := w.get(storeKey(1)); ok || w.Put(storeEntry(storeKey(1), 10)) || w.Stats().Entries != 0 {
			t.Fatalf("a closed store finds, keeps or holds: %+v", w.Stats())
		}
	}
}

// What Stats says is held is what the process holds.
func TestStoreBytesAreHeld(t *testing.T) {
	if storeRace {
		t.Skip("the race detector holds memory of its own")
	}
	for _, size := range []int{200, 1500, 20_000} {
		said, tables, held := storeMemory(t, 32<<20, size)
		t.Logf("bodies of %d: said %d + %d, held %d", size, said, tables, held)
		if ratio := float64(held) / float64(said+tables); ratio < 0.85 || ratio > 1.05 {
			t.Errorf("bodies of %d: the store says %d + %d bytes of tables, the process holds %d", size, said, tables, held)
		}
	}
}

func storeMemory(t testing.TB, maxBytes int64, size int) (said, tables, held int64) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	w := newStoreWorld(t, maxBytes)
	r := rand.New(rand.NewPCG(1, uint64(size)))
	for n := 0; w.Stats().Evicted+w.Stats().Rejected < 2000; n++ {
		e := storeEntry(storeKey(n), size*(50+r.IntN(100))/100)
		e.Tags = []string{fmt.Sprint("tag ", n%10)}
		w.Put(e)
	}
	held = heap() - before
	said = w.Stats().Bytes
	runtime.KeepAlive(w)
	w.Close()
	return said, storeFixed + storeCounter*storeCounters(maxBytes), held
}

func TestStoreGetAllocatesNothing(t *testing.T) {
	if storeRace {
		t.Skip("the race detector allocates")
	}
	w := newStoreWorld(t, 8<<20)
	k := storeKey(1)
	w.Put(storeEntry(k, 1000))
	now := w.clock.Load()
	if n := testing.AllocsPerRun(1000, func() {
		if _, ok := w.Get(k, now); !ok {
			t.Fatal("not found")
		}
	}); n > 0 { // ristretto's batch of reads: 1 in storeBuffer
		t.Errorf("%v allocations a read", n)
	}
}

// wordy is a text that compresses like an answer: to about three quarters.
func wordy(n int) []byte {
	r := rand.New(rand.NewPCG(9, 9))
	words := make([]string, 1500)
	for i := range words {
		for range 2 + r.IntN(8) {
			words[i] += string(rune('a' + r.IntN(26)))
		}
	}
	z := rand.NewZipf(r, 1.1, 4, uint64(len(words)-1))
	var text []byte
	for len(text) < n {
		text = append(append(text, words[z.Uint64()]...), ' ')
	}
	return text[:n]
}

func BenchmarkStoreGet(b *testing.B) {
	text := wordy(16 << 10)
	for _, c := range []struct {
		name string
		body []byte
	}{{"plain", storeEntry(storeKey(1), 1500).Body}, {"packed4KiB", text[:4096]}} {
		b.Run(c.name, func(b *testing.B) {
			w := newStoreWorld(b, 64<<20)
			keys := make([]Key, 4096)
			for i := range keys {
				keys[i] = storeKey(i)
				e := storeEntry(keys[i], 10)
				e.Body = c.body
				w.Put(e)
			}
			now := w.clock.Load()
			b.ReportAllocs()
			b.ResetTimer()
			for i := 0; b.Loop(); i++ {
				if _, ok := w.Get(keys[i%len(keys)], now); !ok {
					b.Fatal("not found")
				}
			}
		})
	}
	b.Run("parallel", func(b *testing.B) {
		w := newStoreWorld(b, 64<<20)
		k := storeKey(1)
		w.Put(storeEntry(k, 1500))
		now := w.clock.Load()
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				w.Get(k, now)
			}
		})
	})
	b.Run("miss", func(b *testing.B) {
		w := newStoreWorld(b, 64<<20)
		k, now := storeKey(1), w.clock.Load()
		b.ReportAllocs()
		for b.Loop() {
			w.Get(k, now)
		}
	})
}

func BenchmarkStorePut(b *testing.B) {
	text := wordy(16 << 10)
	for _, size := range []int{1500, 4096} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			w := newStoreWorld(b, 64<<20)
			keys := make([]Key, 1<<16)
			for i := range keys {
				keys[i] = storeKey(i)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				e := Entry{Key: keys[i%len(keys)], Body: text[:size], Life: Life{TTL: time.Hour}}
				w.Put(&e)
			}
		})
	}
}

// BenchmarkStoreMemory reports what a store of 64 MiB really takes.
func BenchmarkStoreMemory(b *testing.B) {
	for _, size := range []int{200, 1500, 20_000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			for b.Loop() {
				said, tables, held := storeMemory(b, 64<<20, size)
				b.ReportMetric(float64(held)/float64(said+tables), "held/said")
				b.ReportMetric(float64(held)/(64<<20), "held/max")
			}
		})
	}
}
