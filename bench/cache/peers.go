package cache

import (
	"container/list"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/Yiling-J/theine-go"
	"github.com/maypok86/otter/v2"

	"headgate/cache"
)

// contender is a cache of a bounded number of bytes. All copy the entries that they are given, as caches must that own
// their memory, and are safe for concurrent use.
type contender interface {
	get(k *cache.Key) bool
	put(e *cache.Entry)
	close()
}

// Contenders that are spoken of elsewhere.
const (
	theStore = "store" // our own
	plainLRU = "plain LRU"
)

// contenderKind makes contenders of one kind, which charge overhead bytes an entry beside its body. The store's own
// charge is its own.
type contenderKind struct {
	name string
	open func(maxBytes int64) (contender, error)
	with func(overhead int64) func(maxBytes int64) (contender, error)
}

func contenders() []contenderKind {
	kinds := []contenderKind{
		{name: theStore, with: func(int64) func(int64) (contender, error) { return newStore }},
		{name: "otter v2", with: newOtter},
		{name: "theine", with: newTheine},
		{name: plainLRU, with: newLRU},
	}
	for i := range kinds {
		kinds[i].open = kinds[i].with(assumed)
	}
	return kinds
}

// assumed is the overhead until it is measured.
const assumed = 512

// own is a copy of an entry.
func own(e *cache.Entry) *cache.Entry {
	c := *e
	c.Body = append([]byte(nil), e.Body...)
	return &c
}

type storeContender struct {
	*cache.Store
	began time.Time
}

func newStore(maxBytes int64) (contender, error) {
	c := storeContender{began: time.Now()}
	var err error
	c.Store, err = cache.NewStore(cache.StoreConfig{
		MaxBytes: maxBytes, MaxEntry: 1 << 20, Now: c.now, Rand: rand.New(rand.NewPCG(1, 1)), Valid: func(*cache.Entry) bool { return true },
	})
	return c, err
}

func (c storeContender) now() int64 { return int64(time.Since(c.began)) }
func (c storeContender) get(k *cache.Key) bool {
	_, ok := c.Get(*k, c.now())
	return ok
}
func (c storeContender) put(e *cache.Entry) { c.Put(e) }
func (c storeContender) close()             { c.Close() }

type otterContender struct {
	*otter.Cache[cache.Key, *cache.Entry]
}

// newOtter has otter do its upkeep at once, by who comes: it then decides as well as it can.
func newOtter(overhead int64) func(int64) (contender, error) {
	return func(maxBytes int64) (contender, error) {
		c, err := otter.New(&otter.Options[cache.Key, *cache.Entry]{
			MaximumWeight: uint64(maxBytes),
			Weigher: func(_ cache.Key, e *cache.Entry) uint32 {
				return uint32(min(overhead+int64(cap(e.Body)), math.MaxUint32))
			},
			Executor: func(f func()) { f() },
		})
		return otterContender{c}, err
	}
}

func (c otterContender) get(k *cache.Key) bool {
	_, ok := c.GetIfPresent(*k)
	return ok
}
func (c otterContender) put(e *cache.Entry) { c.Set(e.Key, own(e)) }
func (c otterContender) close()             { c.StopAllGoroutines() }

type theineContender struct {
	*theine.Cache[cache.Key, *cache.Entry]
	overhead int64
}

func newTheine(overhead int64) func(int64) (contender, error) {
	return func(maxBytes int64) (contender, error) {
		c, err := theine.NewBuilder[cache.Key, *cache.Entry](maxBytes).Build()
		return theineContender{c, overhead}, err
	}
}

func (c theineContender) get(k *cache.Key) bool {
	_, ok := c.Get(*k)
	return ok
}

func (c theineContender) put(e *cache.Entry) {
	e = own(e)
	c.Set(e.Key, e, c.overhead+int64(cap(e.Body)))
}
func (c theineContender) close() { c.Close() }

// lru is the plain one: a list and a map under a mutex.
type lru struct {
	overhead, max int64

	mu    sync.Mutex
	order *list.List // of *cache.Entry, the latest in front
	at    map[cache.Key]*list.Element
	used  int64
}

func newLRU(overhead int64) func(int64) (contender, error) {
	return func(maxBytes int64) (contender, error) {
		return &lru{overhead: overhead, max: maxBytes, order: list.New(), at: map[cache.Key]*list.Element{}}, nil
	}
}

func (l *lru) get(k *cache.Key) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.at[*k]
	if e == nil {
		return false
	}
	l.order.MoveToFront(e)
	return true
}

func (l *lru) put(e *cache.Entry) {
	e = own(e)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remove(l.at[e.Key])
	l.at[e.Key] = l.order.PushFront(e)
	for l.used += l.weight(e); l.used > l.max; {
		l.remove(l.order.Back())
	}
}

func (l *lru) remove(at *list.Element) {
	if at == nil {
		return
	}
	if e, ok := l.order.Remove(at).(*cache.Entry); ok {
		l.used -= l.weight(e)
		delete(l.at, e.Key)
	}
}

func (l *lru) weight(e *cache.Entry) int64 { return l.overhead + int64(cap(e.Body)) }

func (l *lru) close() {}
