package lease

import (
	"hash/maphash"
	"math/bits"
	"strings"
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
	if l != a.limit && l.Revision > a.limit.Revision {
		a.convert(now, l)
	}
}

func (a *account) convert(now int64, l *limiter.Limit) {
	before := *a.limit
	before.Revision = l.Revision
	if before != *l {
		l.Convert(&a.state, now, a.limit)
	}
	a.limit = l
}

const (
	// slabBuckets is how many buckets are allocated at once. They never move,
	// so growth copies only the index, of 8 bytes a slot. A slab of 169 fills a
	// size class of the allocator.
	slabBuckets = 169
	minSlots    = 8
	// classWidth is the step from one size of key to the next, and longClass
	// the class of those that are longer than the widest.
	classWidth = 16
	longClass  = 8
)

// slab holds buckets whose keys take the same room: a value each (of Local, an
// account of 48 bytes) and, beside it, a copy of the key, so that a bucket does not pin the request
// that its key was cut from. Where both are follows from the bucket's id alone,
// so that the processor fetches them at the same time. That, and no pointer
// from one to the other, is why keys have classes.
type slab[V any] struct {
	values [slabBuckets]V
	// keys has (class+1)·classWidth bytes a bucket: the lengths of tenant,
	// limit and subject in a byte each, and the three texts.
	keys []byte
	long []limiter.Key // instead, in the long class
	used [(slabBuckets + 63) / 64]uint64
}

func (b *slab[V]) inUse(i uint32) bool { return b.used[i/64]>>(i%64)&1 == 1 }

// lengths is how many bytes come before a key's texts.
const lengths = 3

// classOf returns the class of a key, which has room for it.
func classOf(k *limiter.Key) uint32 {
	n := lengths + len(k.Tenant) + len(k.Limit) + len(k.Subject)
	return uint32(min((n-1)/classWidth, longClass))
}

func newSlab[V any](class uint32) *slab[V] {
	if class == longClass {
		return &slab[V]{long: make([]limiter.Key, slabBuckets)}
	}
	return &slab[V]{keys: make([]byte, slabBuckets*classWidth*(class+1))}
}

// text returns the bytes of the i-th key of a class but the long one.
func (b *slab[V]) text(class, i uint32) []byte {
	width := (class + 1) * classWidth
	return b.keys[i*width : (i+1)*width]
}

func (b *slab[V]) setKey(class, i uint32, k *limiter.Key) {
	if class == longClass {
		b.long[i] = limiter.Key{Tenant: strings.Clone(k.Tenant), Limit: strings.Clone(k.Limit), Subject: strings.Clone(k.Subject)}
		return
	}
	t := append(b.text(class, i)[:0], byte(len(k.Tenant)), byte(len(k.Limit)), byte(len(k.Subject)))
	t = append(t, k.Tenant...)
	t = append(t, k.Limit...)
	_ = append(t, k.Subject...)
}

func (b *slab[V]) key(class, i uint32) limiter.Key {
	if class == longClass {
		return b.long[i]
	}
	text := b.text(class, i)
	t, l, u := splits(text)
	return limiter.Key{Tenant: string(text[lengths:t]), Limit: string(text[t:l]), Subject: string(text[l:u])}
}

// splits returns where tenant, limit and subject end in a key's bytes.
func splits(text []byte) (tenant, limit, subject int) {
	tenant = lengths + int(text[0])
	limit = tenant + int(text[1])
	return tenant, limit, limit + int(text[2])
}

// ofTenant says whether the i-th key is a tenant's, without making it.
func (b *slab[V]) ofTenant(class, i uint32, tenant string) bool {
	if class == longClass {
		return b.long[i].Tenant == tenant
	}
	text := b.text(class, i)
	return int(text[0]) == len(tenant) && string(text[lengths:lengths+len(tenant)]) == tenant
}

// is compares the i-th key with k, which is of the same class.
func (b *slab[V]) is(class, i uint32, k *limiter.Key) bool {
	if class == longClass {
		return b.long[i] == *k
	}
	text := b.text(class, i)
	if int(text[0]) != len(k.Tenant) || int(text[1]) != len(k.Limit) || int(text[2]) != len(k.Subject) {
		return false
	}
	t, l, u := splits(text)
	return string(text[l:u]) == k.Subject && string(text[lengths:t]) == k.Tenant && string(text[t:l]) == k.Limit
}

// pool is the buckets of one class.
type pool[V any] struct {
	slabs []*slab[V]
	free  []uint32
	used  uint32 // indices given out so far, free or not
}

// A bucket's id is its index in its pool and, in the low bits, its class.
const classBits = 4

// slot is an index entry: a hash in the low half, id + 1 in the high one; 0 is
// free.
type slot uint64

func newSlot(tag, id uint32) slot { return slot(id+1)<<32 | slot(tag) }
func (s slot) tag() uint32        { return uint32(s) }
func (s slot) id() uint32         { return uint32(s>>32) - 1 }

// shard is an open-addressing hash table under a lock of its own. Collisions
// go to the next slot; a removal closes the gap, so there are no tombstones.
type shard[V any] struct {
	mu     sync.Mutex
	live   uint32
	cursor uint32 // the id that a sweep looks at next
	slots  []slot // at most four fifths of them in use
	pools  [longClass + 1]pool[V]

	_ [64]byte // neighbours do not share a cache line
}

// at returns the slab and place in it of an id.
func (s *shard[V]) at(id uint32) (b *slab[V], class, i uint32) {
	class, i = id&(1<<classBits-1), id>>classBits
	return s.pools[class].slabs[i/slabBuckets], class, i % slabBuckets
}

// find returns the value of k and its id, or nil. tag is the key's hash.
func (s *shard[V]) find(tag uint32, k *limiter.Key) (*V, uint32) {
	if len(s.slots) == 0 {
		return nil, 0
	}
	own := classOf(k)
	for i := s.home(tag); s.slots[i] != 0; i = s.after(i) {
		if s.slots[i].tag() != tag {
			continue
		}
		id := s.slots[i].id()
		if b, class, at := s.at(id); class == own && b.is(class, at, k) {
			return &b.values[at], id
		}
	}
	return nil, 0
}

// insert adds a bucket for k, which has none, with a zero value.
func (s *shard[V]) insert(tag uint32, k *limiter.Key) (*V, uint32) {
	if int(s.live+1)*5 > len(s.slots)*4 {
		s.grow()
	}
	class := classOf(k)
	p := &s.pools[class]
	i := p.used
	if n := len(p.free); n > 0 {
		i, p.free = p.free[n-1], p.free[:n-1]
	} else {
		if i%slabBuckets == 0 {
			p.slabs = append(p.slabs, newSlab[V](class))
		}
		p.used++
	}
	s.live++
	b := p.slabs[i/slabBuckets]
	b.setKey(class, i%slabBuckets, k)
	b.used[i%slabBuckets/64] |= 1 << (i % slabBuckets % 64)
	id := i<<classBits | class
	s.place(newSlot(tag, id))
	return &b.values[i%slabBuckets], id
}

// home is the slot at which the search for a hash begins, after the next one.
func (s *shard[V]) home(tag uint32) int { return int(uint64(tag) * uint64(len(s.slots)) >> 32) }

func (s *shard[V]) after(i int) int {
	if i++; i == len(s.slots) {
		return 0
	}
	return i
}

// distance is the number of steps from one slot to another.
func (s *shard[V]) distance(from, to int) int {
	if to < from {
		to += len(s.slots)
	}
	return to - from
}

func (s *shard[V]) place(e slot) {
	i := s.home(e.tag())
	for s.slots[i] != 0 {
		i = s.after(i)
	}
	s.slots[i] = e
}

// grow makes room by a quarter: to double would leave, on average, as much
// again unused.
func (s *shard[V]) grow() {
	old := s.slots
	s.slots = make([]slot, max(minSlots, len(old)+len(old)/4))
	for _, e := range old {
		if e != 0 {
			s.place(e)
		}
	}
}

// remove forgets the bucket with an id and a hash.
func (s *shard[V]) remove(tag, id uint32) {
	hole := s.home(tag)
	for s.slots[hole] != newSlot(tag, id) {
		hole = s.after(hole)
	}
	for i := s.after(hole); s.slots[i] != 0; i = s.after(i) {
		// An entry may fill the hole unless its home lies behind the hole.
		if home := s.home(s.slots[i].tag()); s.distance(home, i) >= s.distance(hole, i) {
			s.slots[hole] = s.slots[i]
			hole = i
		}
	}
	s.slots[hole] = 0
	b, class, i := s.at(id)
	var none V
	b.values[i] = none
	b.used[i/64] &^= 1 << (i % 64)
	if class == longClass {
		b.long[i] = limiter.Key{}
	}
	p := &s.pools[class]
	p.free = append(p.free, id>>classBits)
	s.live--
}

// ids is how many ids were given out, free ones included.
func (s *shard[V]) ids() (n int) {
	for i := range s.pools {
		n += int(s.pools[i].used)
	}
	return n
}

// next returns the first id given out from id on, class by class and round to
// the beginning. There must be one.
func (s *shard[V]) next(id uint32) uint32 {
	class, i := id&(1<<classBits-1), id>>classBits
	for i >= s.pools[class].used {
		class, i = (class+1)%(longClass+1), 0
	}
	return i<<classBits | class
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

// each calls f, under the lock, for the buckets in use; it gives the lock up
// between batches.
func (s *shard[V]) each(f func(id uint32)) {
	for class := range s.pools {
		p := &s.pools[class]
		for i, more := uint32(0), true; more; {
			s.mu.Lock()
			for end := min(i+walkBatch, p.used); i < end; i++ {
				s.visit(i<<classBits|uint32(class), f)
			}
			more = i < p.used
			s.mu.Unlock()
		}
	}
}

// walk is each for up to budget ids, going on where the last walk stopped and
// round the shard at most once. It returns how many ids it saw.
func (s *shard[V]) walk(budget int, f func(id uint32)) (seen int) {
	for todo := 1; seen < todo; {
		s.mu.Lock()
		todo = min(budget, s.ids())
		for range min(todo-seen, walkBatch) {
			id := s.next(s.cursor)
			s.visit(id, f)
			s.cursor = id + 1<<classBits
			seen++
		}
		s.mu.Unlock()
	}
	return seen
}

func (s *shard[V]) visit(id uint32, f func(id uint32)) {
	if b, _, i := s.at(id); b.inUse(i) {
		f(id)
	}
}
