package budget

import (
	"errors"
	"hash/maphash"
	"sync"
	"sync/atomic"
)

const shards = 64

var errFull = errors.New("this process has as many budget accounts as it may keep")

// cell is an account with its lock. Locks of several are taken in the order of seq.
type cell struct {
	seq uint64
	mu  sync.Mutex
	account
	gone    bool  // it is not in the table any more
	planned int64 // when the agenda has it; never: it does not
	queue   int   // where
	entry   entry // the agenda's
}

// table finds cells.
type table struct {
	seed   maphash.Seed
	most   int64
	count  atomic.Int64
	seq    atomic.Uint64
	shards [shards]shard
}

type shard struct {
	sync.RWMutex
	cells map[Key]*cell
	_     [32]byte // a cache line for each
}

func newTable() *table {
	t := &table{seed: maphash.MakeSeed(), most: MaxAccounts}
	for i := range t.shards {
		t.shards[i].cells = map[Key]*cell{}
	}
	return t
}

func (t *table) shard(k *Key) *shard {
	h := maphash.String(t.seed, k.Tenant) ^ maphash.String(t.seed, k.Subject)*31 ^ maphash.String(t.seed, k.Limit)*127
	return &t.shards[h%shards]
}

// find returns the key's cell, or nil.
func (t *table) find(k *Key) *cell {
	s := t.shard(k)
	s.RLock()
	c := s.cells[*k]
	s.RUnlock()
	return c
}

// obtain returns the charge's cell, not one that is found to be gone. nil: there is no room.
func (t *table) obtain(ch *Charge, at instant, gone *cell) *cell {
	if c := t.find(&ch.Key); c != nil && c != gone {
		return c
	}
	s := t.shard(&ch.Key)
	s.Lock()
	defer s.Unlock()
	c := s.cells[ch.Key]
	switch {
	case c != nil && c != gone:
		return c
	case c == nil && t.count.Add(1) > t.most:
		t.count.Add(-1)
		return nil
	}
	c = &cell{seq: t.seq.Add(1), account: newAccount(ch.Key, ch.Terms, at), planned: never, queue: quiet}
	c.entry = entry{cell: c, place: -1}
	s.cells[ch.Key] = c
	return c
}

// drop takes a cell out that is gone.
func (t *table) drop(c *cell) {
	s := t.shard(&c.key)
	s.Lock()
	if s.cells[c.key] == c {
		delete(s.cells, c.key)
		t.count.Add(-1)
	}
	s.Unlock()
}

// each calls f for all cells that there are, under no lock.
func (t *table) each(f func(*cell)) {
	var cells []*cell
	for i := range t.shards {
		s := &t.shards[i]
		s.RLock()
		cells = cells[:0]
		for _, c := range s.cells {
			cells = append(cells, c)
		}
		s.RUnlock()
		for _, c := range cells {
			f(c)
		}
	}
}
