package cache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

// StoreConfig is how NewStore makes a store. All but Valid must be set.
type StoreConfig struct {
	MaxBytes int64             // of memory that the store may hold, its tables and all; at least 1 MiB
	MaxEntry int64             // the largest body it takes
	Now      func() int64      // a clock that never goes back, in nanoseconds
	Rand     *rand.Rand        // for XFetch; the store locks it, so that nobody else may use it
	Valid    func(*Entry) bool // asked on each read; an entry that is not is dropped. nil: all are
}

// Store keeps entries of one node in memory. Safe for concurrent use.
//
// An entry that was put is found for at least bridgeFor, unless too many others are put
// meanwhile, whatever the store's admission says to it.
type Store struct {
	c     StoreConfig
	cache *ristretto.Cache[uint64, *stored]
	mu    sync.Mutex // over c.Rand
}

type stored struct {
	entry   Entry
	filled  int64
	hits    atomic.Uint32
	last    atomic.Int64
	claimed atomic.Int64
}

// NewStore makes an empty store. It has goroutines of its own until Close.
func NewStore(c StoreConfig) (*Store, error) {
	if c.MaxBytes < 1<<20 {
		return nil, fmt.Errorf("max bytes %d: at least 1 MiB", c.MaxBytes)
	}
	if c.Now == nil || c.Rand == nil {
		return nil, errors.New("a clock and a source of chance must be given")
	}
	s := &Store{c: c}
	cache, err := ristretto.NewCache(&ristretto.Config[uint64, *stored]{
		NumCounters: c.MaxBytes / 128,
		MaxCost:     c.MaxBytes,
		BufferItems: 16,
		KeyToHash:   func(k uint64) (uint64, uint64) { return k, 0 },
	})
	if err != nil {
		return nil, fmt.Errorf("make the cache: %w", err)
	}
	s.cache = cache
	return s, nil
}

// Get finds what may be served for a key at a moment of the store's clock. A hit that is marked
// Refresh goes to one reader at a time: who got it should put a new entry, or Release the key.
func (s *Store) Get(k Key, now int64) (Hit, bool) {
	v, ok := s.find(k)
	if !ok {
		return Hit{}, false
	}
	age := time.Duration(max(now-v.filled, 0))
	f := v.entry.Life.judge(age, v.hits.Load(), time.Duration(v.last.Load()), v.entry.Delta, s.draw)
	h := Hit{Entry: &v.entry, Age: age, Tier: Local}
	switch f {
	case fresh, freshEarly:
		v.hits.Store(freshCount(v.hits.Load()))
		v.last.Store(int64(age))
		h.Refresh = f == freshEarly && v.claim(now)
	case freshStale:
		h.Stale, h.Refresh = true, v.claim(now)
	default:
		return Hit{}, false
	}
	return h, true
}

// GetForError finds what may be served where the model fails: also what is too old for Get.
// It counts no hit and asks for no refresh.
func (s *Store) GetForError(k Key, now int64) (Hit, bool) {
	v, ok := s.find(k)
	if !ok {
		return Hit{}, false
	}
	age := time.Duration(max(now-v.filled, 0))
	f := v.entry.Life.state(age, v.entry.Life.expiry(v.hits.Load(), time.Duration(v.last.Load())))
	if f == freshDead {
		return Hit{}, false
	}
	return Hit{Entry: &v.entry, Age: age, Stale: f != fresh, Tier: Local}, true
}

func storeHash(k Key) uint64 { return binary.LittleEndian.Uint64(k[:]) }

func (s *Store) find(k Key) (*stored, bool) {
	v, ok := s.cache.Get(storeHash(k))
	if !ok || v.entry.Key != k {
		return nil, false
	}
	if s.c.Valid != nil && !s.c.Valid(&v.entry) {
		s.Drop(k)
		return nil, false
	}
	return v, true
}

const refreshFor = int64(30 * time.Second)

func (v *stored) claim(now int64) bool {
	until := v.claimed.Load()
	return now >= until && v.claimed.CompareAndSwap(until, now+refreshFor)
}

func (s *Store) draw() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return freshDraw(s.c.Rand)
}

// Put keeps a copy of an entry that was just filled (e.Age ago), in the place of the one before
// it. It tells whether the entry is found from now on: it is not where its body is larger than
// MaxEntry, where it is dead or not valid already, or where the store is flooded or closed.
func (s *Store) Put(e *Entry) bool {
	if int64(len(e.Body)) > s.c.MaxEntry {
		return false
	}
	v := &stored{entry: *e, filled: s.c.Now() - int64(e.Age)}
	ok := s.cache.Set(storeHash(e.Key), v, int64(len(e.Body)))
	s.cache.Wait()
	return ok
}

// PutCopy keeps what the store of another node answered with: that was a hit, so that this copy
// lives on as if it had been hit here. Not kept is what is stale: nobody refreshes a copy.
func (s *Store) PutCopy(h Hit) bool {
	if h.Stale {
		return false
	}
	e := *h.Entry
	e.Age = h.Age
	return s.Put(&e)
}

// Drop forgets a key.
func (s *Store) Drop(k Key) { s.cache.Del(storeHash(k)) }

// Release lets the next reader refresh a key, after a refresh that came to nothing.
func (s *Store) Release(k Key) {
	if v, ok := s.cache.Get(storeHash(k)); ok && v.entry.Key == k {
		v.claimed.Store(0)
	}
}

// Clear forgets all. What is put while it runs may be forgotten, too.
func (s *Store) Clear() { s.cache.Clear() }

// Close forgets all and ends the store's goroutines. A closed store finds and keeps nothing.
func (s *Store) Close() { s.cache.Close() }

// Stats is what a store holds and what it did since it was made.
type Stats struct {
	Entries int64 // that are held
	Bytes   int64 // of memory that they take

	Puts     int64 // entries that were handed in and fit
	Rejected int64 // of which admission said no to so many
	Dropped  int64 // and so many did not even get there
	Evicted  int64 // entries that went to make room, or whose time was over
	Invalid  int64 // reads that found an entry that was valid no more
	Foreign  int64 // reads that found another key's entry
	Bridged  int64 // reads that the bridge answered
}

// Stats tells of the store.
func (s *Store) Stats() Stats { return Stats{} }
