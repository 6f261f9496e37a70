package cache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

const (
	// bridgeFor is how long an entry is found that was put, whatever admission says to it.
	bridgeFor = 10 * time.Second
	// bridgeShare is the part of MaxBytes that entries may take which admission refused, and so
	// soon evicted again. More of it takes from what is asked for most.
	bridgeShare = 32
	// refreshFor is how long one reader is trusted to refresh an entry before another may try.
	refreshFor = 30 * time.Second
	// refreshPause is how long nobody tries again after a refresh that failed: what is stale is hit
	// as often as ever, and must not ask a model that fails each time.
	refreshPause = 5 * time.Second

	// storeLeast is the least MaxBytes: ristretto's own tables take a third of it.
	storeLeast = 1 << 20
	// storeFixed is what an empty store takes beside its counters: ristretto's buffer, mostly.
	storeFixed = 320 << 10
	// storeCounter is what ristretto takes a counter: four of 4 bits and 16 bits of a Bloom filter,
	// where their number is a power of two.
	storeCounter = 4
	// storePerCounter is so many bytes of MaxBytes a counter. Ristretto's advice is ten counters an
	// entry. But the four rows of its sketch differ by an XOR of their indices only, so that keys
	// that collide in one row collide in all: it is a sketch of one row, and wants more. By
	// BenchmarkStoreHitRatio (Zipf 1.01 and 1.2, with 1 % and 10 % of all bytes) hits are 60.6,
	// 78.8, 85.0 and 92.4 %, with a quarter of the counters 57.0, 77.5, 82.9 and 92.1 %, and of an
	// LRU 55.1, 76.0, 82.5 and 92.3 %. The price: admission forgets what was popular after as many
	// reads as there are counters, if its time is not over before.
	storePerCounter = 64
	// storeBuffer is so many reads are gathered on a processor before they count for admission.
	// Ristretto's 64 is for millions of reads a second; here they may be hundreds, and what an
	// idle processor gathered is lost to the garbage collector.
	storeBuffer = 16
	// storeStripes is how many writes go on at a time at most. Each holds its stripe until ristretto
	// is done with it, so that ristretto's buffer (32,768) never fills and never drops.
	storeStripes = 64
)

// StoreConfig is how NewStore makes a store. All but Valid must be set.
type StoreConfig struct {
	MaxBytes int64             // of memory that the store may hold, its tables and all; at least 1 MiB
	MaxEntry int64             // the largest body it takes
	Now      func() int64      // a clock in nanoseconds that counts suspend and is never put back by more than a moment
	Rand     *rand.Rand        // for XFetch; the store locks it, so that nobody else may use it
	Valid    func(*Entry) bool // asked on each read: an entry that is not is dropped. nil: all are
}

// Validate names the field that is wrong.
func (c *StoreConfig) Validate() error {
	switch {
	case c.MaxBytes < storeLeast:
		return fmt.Errorf("max bytes %d: must be at least %d", c.MaxBytes, storeLeast)
	case c.MaxEntry <= 0:
		return fmt.Errorf("max entry %d: must be positive", c.MaxEntry)
	case c.Now == nil:
		return errors.New("now: a clock is required")
	case c.Rand == nil:
		return errors.New("rand: a source of chance is required")
	}
	return nil
}

// Store keeps entries of one node in memory: those that are asked for most, by bytes at most
// MaxBytes. Safe for concurrent use.
//
// What was put is found for bridgeFor whatever admission and eviction say to it, unless more
// than MaxBytes/bridgeShare of others need that grace as well; an entry that is asked for in that
// time is offered to admission again.
type Store struct {
	c       StoreConfig
	cache   *ristretto.Cache[uint64, *stored]
	bridge  bridge
	stripes [storeStripes]storeStripe

	randMu sync.Mutex // over c.Rand

	puts, tooLarge, rejected, dropped  atomic.Int64
	evicted, invalid, foreign, bridged atomic.Int64
}

// storeStripe orders the calls into ristretto of a share of all keys. Ristretto's callbacks take
// none of its locks.
type storeStripe struct {
	// write is held by who sets or deletes, until ristretto is done with it: two sets of a key
	// that is new would make ristretto reject the second, and a delete may overtake a set.
	write sync.Mutex
	// gate is held, shared, around each call of ristretto: it panics where it is closed meanwhile.
	gate   sync.RWMutex
	closed bool // under gate
	_      [64]byte
}

// NewStore makes an empty store. It has goroutines of its own until Close.
func NewStore(c StoreConfig) (*Store, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("cache store: %w", err)
	}
	s := &Store{c: c}
	s.bridge.init(c.MaxBytes / bridgeShare)
	counters := storeCounters(c.MaxBytes)
	cache, err := ristretto.NewCache(&ristretto.Config[uint64, *stored]{
		NumCounters:        counters,
		MaxCost:            c.MaxBytes - storeFixed - storeCounter*counters - s.bridge.max,
		BufferItems:        storeBuffer,
		IgnoreInternalCost: true, // stored.size has it
		KeyToHash:          func(k uint64) (uint64, uint64) { return k, 0 },
		OnReject:           func(*ristretto.Item[*stored]) { s.rejected.Add(1) },
		OnEvict:            func(i *ristretto.Item[*stored]) { s.onEvict(i.Value) },
		OnExit:             s.bridge.released,
	})
	if err != nil {
		return nil, fmt.Errorf("cache store: %w", err)
	}
	s.cache = cache
	return s, nil
}

// storeCounters is the largest power of two that storePerCounter allows.
func storeCounters(maxBytes int64) int64 {
	return 1 << (bits.Len64(uint64(maxBytes/storePerCounter)) - 1)
}

// storeHash is the name of a key in ristretto: eight of its bytes, which SHA-256 made as good as
// random. Keys that share them take each other's place; whose entry it is tells Entry.Key. (A
// conflict hash of eight more would have ristretto refuse the second for as long as the first
// lives, and forget the cost of the first where the second is deleted.)
func storeHash(k *Key) uint64 { return binary.LittleEndian.Uint64(k[:8]) }

func (s *Store) stripe(hash uint64) *storeStripe { return &s.stripes[hash%storeStripes] }

// Get finds what may be served for a key at a moment of the store's clock: what is fresh, and what
// is stale, but within Life.Stale. A hit that is marked Refresh goes to one reader at a time;
// who got it puts a new entry, or calls Release, or is given up after refreshFor.
// Only hits of fresh entries prolong their lives.
func (s *Store) Get(k Key, now int64) (Hit, bool) { return s.get(&k, now, true) }

// Read finds what Get does, but is nobody to refresh it: the next who gets it is.
func (s *Store) Read(k Key, now int64) (Hit, bool) { return s.get(&k, now, false) }

func (s *Store) get(k *Key, now int64, refreshes bool) (Hit, bool) {
	v := s.find(k, now)
	if v == nil {
		return Hit{}, false
	}
	age := v.age(now)
	state := v.entry.Life.judge(age, v.hits.Load(), time.Duration(v.last.Load()), v.entry.Delta, s.draw)
	h := Hit{Age: age, Tier: Local}
	switch state {
	case fresh, freshEarly:
		v.hit(age)
		h.Refresh = refreshes && state == freshEarly && v.claim(now)
	case freshStale:
		h.Stale, h.Refresh = true, refreshes && v.claim(now)
	default:
		return Hit{}, false
	}
	return h, s.open(v, &h)
}

// Peek tells of what Get would find without taking it: the Hit has no Entry. It counts no hit, drops nothing,
// unpacks nothing and does not wait.
func (s *Store) Peek(k Key, now int64) (Hit, bool) {
	v := s.held(&k)
	if v == nil {
		v = s.bridge.get(&k, now)
	}
	if v == nil || s.c.Valid != nil && !s.c.Valid(&v.entry) {
		return Hit{}, false
	}
	age := v.age(now)
	state := v.entry.Life.state(age, v.entry.Life.expiry(v.hits.Load(), time.Duration(v.last.Load())))
	return Hit{Age: age, Stale: state == freshStale, Tier: Local}, state == fresh || state == freshStale
}

// Stale finds what may be served for a key where the model fails: what Get finds, and what is
// older, but within Life.StaleIfError. It counts no hit and asks for no refresh.
func (s *Store) Stale(k Key, now int64) (Hit, bool) {
	v := s.find(&k, now)
	if v == nil {
		return Hit{}, false
	}
	age := v.age(now)
	state := v.entry.Life.state(age, v.entry.Life.expiry(v.hits.Load(), time.Duration(v.last.Load())))
	if state == freshDead {
		return Hit{}, false
	}
	h := Hit{Age: age, Stale: state != fresh, Tier: Local}
	return h, s.open(v, &h)
}

// find is the valid entry of a key, of any age, or nil.
func (s *Store) find(k *Key, now int64) *stored {
	v := s.held(k)
	if v == nil {
		if v = s.bridge.get(k, now); v == nil {
			return nil
		}
		s.bridged.Add(1)
		s.offerAgain(v, now)
	}
	if s.c.Valid != nil && !s.c.Valid(&v.entry) {
		s.invalid.Add(1)
		s.dropThis(v)
		return nil
	}
	return v
}

// held is what ristretto has of a key, or nil.
func (s *Store) held(k *Key) *stored {
	hash := storeHash(k)
	st := s.stripe(hash)
	st.gate.RLock()
	defer st.gate.RUnlock()
	if st.closed {
		return nil
	}
	v, ok := s.cache.Get(hash)
	if !ok {
		return nil
	}
	if v.entry.Key != *k {
		s.foreign.Add(1)
		return nil
	}
	return v
}

// open puts the plain entry into a hit.
func (s *Store) open(v *stored, h *Hit) bool {
	h.Entry = v.plain()
	if h.Entry == nil { // its bytes changed in memory: nothing that code does
		s.dropThis(v)
		return false
	}
	return true
}

// draw is for XFetch.
func (s *Store) draw() float64 {
	s.randMu.Lock()
	defer s.randMu.Unlock()
	return freshDraw(s.c.Rand)
}

// Put keeps a copy of an entry that the model answered e.Age ago, in the place of the one before.
// It tells whether the entry is found from now on: it is not where its body is larger than
// MaxEntry, where it is dead or not valid already, where the store is closed, or where admission
// refused it and the bridge has no room for its size. It waits for ristretto, microseconds.
func (s *Store) Put(e *Entry) bool { return s.put(e, e.Age, 0) }

// PutCopy keeps what the store of another node answered with. That was a hit, so that the copy
// lives as if it had been hit here: with Put one in the second half of its life would be dead.
// What is stale is not kept: it would be fresh for nobody, and refreshed by two.
func (s *Store) PutCopy(h Hit) bool { return !h.Stale && s.put(h.Entry, h.Age, freshCount(1)) }

func (s *Store) put(e *Entry, age time.Duration, hits uint32) bool {
	if int64(len(e.Body)) > s.c.MaxEntry {
		s.tooLarge.Add(1)
		return false
	}
	age = max(age, 0)
	if e.Life.state(age, e.Life.expiry(hits, age)) == freshDead || s.c.Valid != nil && !s.c.Valid(e) {
		return false
	}
	now := s.c.Now()
	v := newStored(e, age, now)
	v.hits.Store(hits)
	v.last.Store(int64(age))
	st := s.stripe(storeHash(&v.entry.Key))
	st.write.Lock()
	defer st.write.Unlock()
	s.puts.Add(1)
	return s.offer(st, v, now)
}

// offer hands an entry to ristretto and waits for its decision; meanwhile, and where that was no,
// the entry is in the bridge. The caller holds st.write.
func (s *Store) offer(st *storeStripe, v *stored, now int64) bool {
	st.gate.RLock()
	defer st.gate.RUnlock()
	if st.closed {
		return false
	}
	hash := storeHash(&v.entry.Key)
	// Ristretto reads a clock of its own, which is there to free memory: ours decides.
	ttl := max(v.entry.Life.longest()-v.age(now), 1)
	s.bridge.offered(v, now)
	if !s.cache.SetWithTTL(hash, v, v.size, ttl) {
		s.dropped.Add(1)
		s.bridge.released(v)
		return s.bridge.has(v)
	}
	s.cache.Wait()
	if s.cache.RemainingCost() < 0 {
		// The update of an entry makes no room for what the new one is larger: a new one does.
		s.cache.Del(hash)
		s.bridge.offered(v, now)
		s.cache.SetWithTTL(hash, v, v.size, ttl)
		s.cache.Wait()
	}
	return s.bridge.decided(v)
}

// offerAgain offers an entry that admission refused, or evicted at once, and that is asked for
// nevertheless. A reader does not wait for other writers.
func (s *Store) offerAgain(v *stored, now int64) {
	st := s.stripe(storeHash(&v.entry.Key))
	if !st.write.TryLock() {
		return
	}
	defer st.write.Unlock()
	if s.bridge.refused(v) {
		s.offer(st, v, now)
	}
}

// onEvict is called where an entry goes to make room, where its time is over, and where the store is
// closed, by ristretto's goroutine; it may hold a lock of ristretto's.
func (s *Store) onEvict(v *stored) {
	if v == nil {
		return
	}
	s.evicted.Add(1)
	s.bridge.evicted(v, s.c.Now())
}

// dropThis forgets an entry that a reader found unfit, unless a writer is there first.
func (s *Store) dropThis(v *stored) {
	st := s.stripe(storeHash(&v.entry.Key))
	if !st.write.TryLock() {
		return // the entry is as unfit for the next reader
	}
	defer st.write.Unlock()
	if s.held(&v.entry.Key) == v {
		s.del(st, v)
	} else {
		s.del(st, nil)
	}
	s.bridge.dropThis(v)
}

// del deletes what ristretto holds, which may be nothing: after that nothing is on its way from
// there to the bridge. The caller holds st.write.
func (s *Store) del(st *storeStripe, v *stored) {
	st.gate.RLock()
	defer st.gate.RUnlock()
	if st.closed {
		return
	}
	if v != nil {
		s.cache.Del(storeHash(&v.entry.Key))
	}
	s.cache.Wait()
}

// Release lets the next reader refresh a key after a pause at the latest, where a refresh came to nothing.
func (s *Store) Release(k Key, pause time.Duration) {
	now := s.c.Now()
	v := s.held(&k)
	if v == nil {
		v = s.bridge.get(&k, now)
	}
	if v == nil {
		return
	}
	if until := v.claimed.Load(); until > now+int64(pause) {
		v.claimed.CompareAndSwap(until, now+int64(pause)) // else another is trusted by now
	}
}

// Close forgets all, waits for writers that are at work and ends the store's goroutines. A closed store
// finds and keeps nothing; closing it once more does nothing.
func (s *Store) Close() {
	for i := range s.stripes {
		s.stripes[i].write.Lock()
		defer s.stripes[i].write.Unlock()
	}
	if s.stripes[0].closed { // no gate: it is written with all write locks held
		return
	}
	for i := range s.stripes {
		s.stripes[i].gate.Lock()
		s.stripes[i].closed = true
		s.stripes[i].gate.Unlock()
	}
	s.cache.Close()
	s.bridge.clear()
}

// Stats is what a store holds and what it did since it was made.
type Stats struct {
	Entries int64 // that are held
	Bytes   int64 // of memory that they take, what the tables have of them included
	Bridge  int64 // of which the bridge has so many

	Puts     int64 // entries that were put; those that were too large or dead already do not count
	TooLarge int64 // entries that were larger than MaxEntry
	Rejected int64 // times that admission refused an entry
	Dropped  int64 // times that an entry did not even get there
	Evicted  int64 // entries that went to make room, or whose time was over
	Invalid  int64 // reads that found an entry that was valid no more
	Foreign  int64 // reads that found another key's entry, which they did not return
	Bridged  int64 // reads that the bridge answered
}

// Stats tells of the store.
func (s *Store) Stats() Stats {
	entries, bytes, bridge := s.bridge.totals()
	return Stats{
		Entries: entries, Bytes: bytes, Bridge: bridge,
		Puts: s.puts.Load(), TooLarge: s.tooLarge.Load(), Rejected: s.rejected.Load(), Dropped: s.dropped.Load(),
		Evicted: s.evicted.Load(), Invalid: s.invalid.Load(), Foreign: s.foreign.Load(), Bridged: s.bridged.Load(),
	}
}
