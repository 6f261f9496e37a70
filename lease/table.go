package lease

import (
	"hash/maphash"
	"math/bits"
	"sync"

	"headgate/limiter"
)

// account is a level and the limit that it was last updated under.
type account struct {
	limit *limiter.Limit
	state limiter.State
}

// supersede puts the account under l if l comes from a later policy.
func (a *account) supersede(now int64, l *limiter.Limit) {
	if l == a.limit || l.Revision <= a.limit.Revision {
		return
	}
	before := *a.limit
	before.Revision = l.Revision
	if before != *l {
		l.Convert(&a.state, now, a.limit)
	}
	a.limit = l
}

// bucket is one entry of the table: 72 bytes beside the key's own.
type bucket struct {
	// name is the key's three strings end to end, copied, so that a bucket
	// neither pins the request that they were cut from nor carries three
	// headers. A free bucket has none and its tenantLen is the next free id.
	name                string
	tenantLen, limitLen uint32
	account
}

func (b *bucket) key() limiter.Key {
	t, l := b.tenantLen, b.tenantLen+b.limitLen
	return limiter.Key{Tenant: b.name[:t], Limit: b.name[t:l], Subject: b.name[l:]}
}

func (b *bucket) is(k *limiter.Key) bool {
	if int(b.tenantLen) != len(k.Tenant) || int(b.limitLen) != len(k.Limit) {
		return false
	}
	t, l := b.tenantLen, b.tenantLen+b.limitLen
	return b.name[l:] == k.Subject && b.name[:t] == k.Tenant && b.name[t:l] == k.Limit
}

const (
	// slabBuckets is how many buckets are allocated at once. They never move,
	// so growth copies only the index, of 8 bytes a slot.
	slabBuckets = 128
	minSlots    = 8
)

// slot is an index entry: a hash in the low half, id + 1 in the high one; 0 is
// free.
type slot uint64

func (s slot) tag() uint32 { return uint32(s) }
func (s slot) id() uint32  { return uint32(s>>32) - 1 }

// shard is an open-addressing hash table under a lock of its own. Collisions
// go to the next slot; a removal closes the gap, so there are no tombstones.
type shard struct {
	mu     sync.Mutex
	slots  []slot // a power of two, at most three quarters in use
	slabs  []*[slabBuckets]bucket
	used   uint32 // ids given out so far, free or not
	live   uint32 // ids in use
	free   uint32 // the first free id + 1, or 0
	cursor uint32 // the id that a sweep looks at next

	_ [24]byte // 128 bytes: neighbours do not share a pair of cache lines
}

func (s *shard) at(id uint32) *bucket {
	return &s.slabs[id/slabBuckets][id%slabBuckets]
}

// find returns the bucket of k, or nil. tag is the key's hash.
func (s *shard) find(tag uint32, k *limiter.Key) (uint32, *bucket) {
	if len(s.slots) == 0 {
		return 0, nil
	}
	mask := uint32(len(s.slots) - 1)
	for i := tag & mask; s.slots[i] != 0; i = (i + 1) & mask {
		if s.slots[i].tag() != tag {
			continue
		}
		id := s.slots[i].id()
		if b := s.at(id); b.is(k) {
			return id, b
		}
	}
	return 0, nil
}

// insert adds a bucket for k, which has none.
func (s *shard) insert(tag uint32, k *limiter.Key, l *limiter.Limit) (uint32, *bucket) {
	if int(s.live+1)*4 > len(s.slots)*3 {
		s.grow()
	}
	id := s.free - 1
	if s.free != 0 {
		s.free = s.at(id).tenantLen
	} else {
		id = s.used
		if id%slabBuckets == 0 {
			s.slabs = append(s.slabs, new([slabBuckets]bucket))
		}
		s.used++
	}
	s.live++
	b := s.at(id)
	*b = bucket{
		name:      k.Tenant + k.Limit + k.Subject,
		tenantLen: uint32(len(k.Tenant)), limitLen: uint32(len(k.Limit)),
		account: account{limit: l},
	}
	s.place(slot(id+1)<<32 | slot(tag))
	return id, b
}

func (s *shard) place(e slot) {
	mask := uint32(len(s.slots) - 1)
	i := e.tag() & mask
	for s.slots[i] != 0 {
		i = (i + 1) & mask
	}
	s.slots[i] = e
}

func (s *shard) grow() {
	old := s.slots
	s.slots = make([]slot, max(minSlots, 2*len(old)))
	for _, e := range old {
		if e != 0 {
			s.place(e)
		}
	}
}

// remove forgets the bucket with an id and a hash.
func (s *shard) remove(tag, id uint32) {
	mask := uint32(len(s.slots) - 1)
	hole := tag & mask
	for s.slots[hole] != slot(id+1)<<32|slot(tag) {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; s.slots[i] != 0; i = (i + 1) & mask {
		// An entry may fill the hole unless its home lies behind the hole.
		if home := s.slots[i].tag() & mask; (i-home)&mask >= (i-hole)&mask {
			s.slots[hole] = s.slots[i]
			hole = i
		}
	}
	s.slots[hole] = 0
	*s.at(id) = bucket{tenantLen: s.free}
	s.free = id + 1
	s.live--
}

// place is where a key lives: its shard and its hash in there.
type place struct{ shard, tag uint32 }

// locate hashes a key. All buckets of a tenant share a shard, so that a request
// takes one lock for them; those of no tenant are spread.
func (l *Local) locate(k *limiter.Key) place {
	const odd = 0x9e3779b97f4a7c15 // 2^64/φ; any odd number keeps the strings' order apart
	whole := maphash.String(l.seed, k.Limit)*odd + maphash.String(l.seed, k.Subject)
	owner := whole
	if k.Tenant != "" {
		owner = maphash.String(l.seed, k.Tenant)
		whole = whole*odd + owner
	}
	hi, lo := bits.Mul64(whole, odd)
	return place{shard: uint32(owner>>32) & uint32(len(l.shards)-1), tag: uint32(hi ^ lo)}
}
