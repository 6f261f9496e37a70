package lease

import (
	"hash/maphash"
	"math/bits"
	"strings"
	"sync/atomic"

	"headgate/limiter"
)

// purse is what a holder knows of one, in 96 bytes. key, hash and part are fixed while it is in the
// index, save that a view with another number of partitions changes part, under the lock.
type purse struct {
	// text is tenant, limit and subject in one, so that the bucket does not pin what they were cut from.
	text                string
	tenantEnd, limitEnd uint32

	lease   atomic.Pointer[cell]    // of the live series; nil: none
	refusal atomic.Pointer[refusal] // nil: none
	// asked counts what was asked of the bucket since demand last looked: the units in the upper bits,
	// the requests in the lower askedBits.
	asked   atomic.Uint64
	wokenAt atomic.Uint32 // a tick: when the owner was last told that the lease is low

	// What follows is under Holder.mu, save for hash.
	hash    uint32
	series  *tab // the newest first
	part    uint32
	pending int32 // asks on their way to the owner
	askedAt tick  // when the last of them left
	demand  demand
}

// newPurse is a bucket that holds nothing.
func newPurse(b *Bucket, hash uint32) *purse {
	k := &b.Key
	return &purse{
		text:      strings.Join([]string{k.Tenant, k.Limit, k.Subject}, ""),
		tenantEnd: uint32(len(k.Tenant)), limitEnd: uint32(len(k.Tenant) + len(k.Limit)),
		hash: hash, part: b.Partition,
	}
}

// key is the bucket's.
func (b *purse) key() limiter.Key {
	return limiter.Key{Tenant: b.text[:b.tenantEnd], Limit: b.text[b.tenantEnd:b.limitEnd], Subject: b.text[b.limitEnd:]}
}

// is says whether a key is the bucket's.
func (b *purse) is(k *limiter.Key) bool {
	t, l := int(b.tenantEnd), int(b.limitEnd)
	return len(k.Tenant) == t && len(k.Tenant)+len(k.Limit) == l &&
		b.text[l:] == k.Subject && b.text[:t] == k.Tenant && b.text[t:l] == k.Limit
}

// bucket is where it lives.
func (b *purse) bucket() Bucket { return Bucket{b.part, b.key()} }

// askedBits hold the number of requests between two looks at purse.asked.
const askedBits = 20

// ask counts a cost. So that none counts for less than those before, a huge one counts for 2^40.
func (b *purse) ask(cost int64) {
	b.asked.Add(uint64(min(cost, 1<<40))<<askedBits + 1)
}

// find returns a series of the bucket, or nil.
func (b *purse) find(granter, number uint64) *tab {
	for s := b.series; s != nil; s = s.next() {
		if s.number == number && s.granter() == granter {
			return s
		}
	}
	return nil
}

// drop takes a series out of the bucket's list.
func (b *purse) drop(s *tab) {
	if b.series == s {
		b.series = s.next()
		return
	}
	for t := b.series; t != nil; t = t.next() {
		if t.next() == s {
			t.aside().next = s.next()
			return
		}
	}
}

// idle says that there is nothing to remember of a bucket.
func (b *purse) idle(now int64) bool {
	if r := b.refusal.Load(); r != nil && now < r.until {
		return false
	}
	return b.series == nil && b.lease.Load() == nil && b.pending <= 0
}

// index finds buckets without a lock: open addressing, collisions go to the next slot. Whoever
// writes holds Holder.mu. What a forgotten bucket leaves behind goes with the next growth.
type index struct {
	slots []atomic.Pointer[purse]
	gone  *purse // in the place of a bucket that was forgotten
	used  int    // slots that are not nil
	live  int    // those of them that hold a bucket
}

// firstSlots is the size of an index that holds nothing yet, a power of two.
const firstSlots = 64

// newIndex returns an empty index of a power of two slots. No key is that of its gone.
func newIndex(size int) *index {
	return &index{slots: make([]atomic.Pointer[purse], size), gone: newPurse(&Bucket{Key: limiter.Key{Tenant: "\x00gone"}}, 0)}
}

func (x *index) find(hash uint32, k *limiter.Key) *purse {
	mask := uint32(len(x.slots) - 1)
	for i := hash & mask; ; i = (i + 1) & mask {
		b := x.slots[i].Load()
		if b == nil || b.hash == hash && b.is(k) {
			return b
		}
	}
}

// add puts in a bucket that is not there, and returns the index that has it: another where it had to
// grow. At least three eighths of the slots are nil.
func (x *index) add(b *purse) *index {
	if (x.used+1)*8 > len(x.slots)*5 {
		size := firstSlots
		if x.live > 0 {
			size = max(size, 1<<bits.Len(uint(2*x.live-1)))
		}
		y := newIndex(size)
		x.each(func(b *purse) { y.put(b) })
		x = y
	}
	x.put(b)
	return x
}

func (x *index) put(b *purse) {
	mask := uint32(len(x.slots) - 1)
	i := b.hash & mask
	for x.slots[i].Load() != nil {
		i = (i + 1) & mask
	}
	x.slots[i].Store(b)
	x.used++
	x.live++
}

// forget takes a bucket out.
func (x *index) forget(b *purse) {
	mask := uint32(len(x.slots) - 1)
	for i := b.hash & mask; ; i = (i + 1) & mask {
		switch x.slots[i].Load() {
		case b:
			x.slots[i].Store(x.gone)
			x.live--
			return
		case nil:
			return
		}
	}
}

func (x *index) each(f func(*purse)) {
	for i := range x.slots {
		if b := x.slots[i].Load(); b != nil && b != x.gone {
			f(b)
		}
	}
}

// hashOf is a key's place in the index.
func (h *Holder) hashOf(k *limiter.Key) uint32 {
	const odd = 0x9e3779b97f4a7c15 // as in Local.locate
	whole := (maphash.String(h.seed, k.Limit)*odd+maphash.String(h.seed, k.Subject))*odd + maphash.String(h.seed, k.Tenant)
	hi, lo := bits.Mul64(whole, odd)
	return uint32((hi ^ lo) >> 32)
}
