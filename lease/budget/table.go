package budget

import (
	"errors"
	"hash/maphash"
	"sync"
	"sync/atomic"
)

const shards = 64

// tenantPart: a tenant has at most this part of the accounts. crowded: above so many fourths of them those that are
// idle go at once. looks is how many are looked at for one that may go.
const (
	tenantPart = 4
	crowded    = 3
	looks      = 64
)

var (
	errFull       = errors.New("this process has as many budget accounts as it may keep")
	errTenantFull = errors.New("the tenant has a quarter of the budget accounts that this process may keep: have budgets for fewer subjects, or keys that name fewer users")
)

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
	most   int64 // accounts
	share  int64 // of a tenant
	count  atomic.Int64
	seq    atomic.Uint64
	shards [shards]shard
	// forgotten is called for each cell that had to make room, with its lock and its shard's.
	forgotten func(*cell)

	mu      sync.Mutex
	tenants map[string]int64 // accounts
}

type shard struct {
	sync.RWMutex
	cells map[Key]*cell
	_     [32]byte // a cache line for each
}

func newTable() *table {
	t := &table{
		seed: maphash.MakeSeed(), most: MaxAccounts, share: MaxAccounts / tenantPart, forgotten: func(*cell) {}, tenants: map[string]int64{},
	}
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

// obtain returns the charge's cell, not one that is found to be gone. An error says why there is no room.
func (t *table) obtain(ch *Charge, at instant, gone *cell) (*cell, error) {
	if c := t.find(&ch.Key); c != nil && c != gone {
		return c, nil
	}
	s := t.shard(&ch.Key)
	s.Lock()
	defer s.Unlock()
	c := s.cells[ch.Key]
	if c != nil && c != gone {
		return c, nil
	}
	if c == nil {
		if err := t.enter(s, ch.Key.Tenant, at); err != nil {
			return nil, err
		}
	}
	c = &cell{seq: t.seq.Add(1), account: newAccount(ch.Key, ch.Terms, at), planned: never, queue: quiet}
	c.entry = entry{cell: c, place: -1}
	s.cells[ch.Key] = c
	return c, nil
}

// enter counts an account more of a tenant, and makes room for it in s, which is locked. The tenant's own idle ones go first.
func (t *table) enter(s *shard, tenant string, at instant) error {
	t.mu.Lock()
	has := t.tenants[tenant]
	t.mu.Unlock()
	if tenant != "" && has >= t.share/4*crowded {
		t.evict(s, tenant, at)
	}
	if t.count.Load() >= t.most/4*crowded {
		t.evict(s, "", at)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case tenant != "" && t.tenants[tenant] >= t.share:
		return errTenantFull
	case t.count.Add(1) > t.most:
		t.count.Add(-1)
		return errFull
	}
	t.tenants[tenant]++
	return nil
}

// evict forgets an account of s that is idle, and of which nothing is to be told; of a tenant, if one is named.
func (t *table) evict(s *shard, tenant string, at instant) {
	left := looks
	for k, c := range s.cells {
		if left--; left < 0 {
			return
		}
		if tenant != "" && k.Tenant != tenant || !c.mu.TryLock() {
			continue
		}
		if goes := !c.gone && c.quiet() && c.forgettable() && at.mono >= c.used+idleAfter; goes {
			c.gone = true
			t.forgotten(c)
			c.mu.Unlock()
			t.remove(s, c)
			return
		}
		c.mu.Unlock()
	}
}

// remove takes c out of s, which is locked.
func (t *table) remove(s *shard, c *cell) {
	delete(s.cells, c.key)
	t.count.Add(-1)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tenants[c.key.Tenant]--; t.tenants[c.key.Tenant] == 0 {
		delete(t.tenants, c.key.Tenant)
	}
}

// drop takes a cell out that is gone.
func (t *table) drop(c *cell) {
	s := t.shard(&c.key)
	s.Lock()
	if s.cells[c.key] == c {
		t.remove(s, c)
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
