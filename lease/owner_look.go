package lease

import (
	"cmp"
	"math"
	"slices"

	"headgate/limiter"
)

// OwnerLevel is a bucket as an operator sees it.
type OwnerLevel struct {
	Key       limiter.Key
	Partition uint32
	Limit     limiter.Limit
	// Level is what a direct decision could take without a recall, negative in debt; of a semaphore,
	// slots not lent.
	Level int64
	// Here is Level, of a durable limit without what the ledger has left.
	Here   int64
	Debt   int64  // how far the level is below zero
	Window int64  // of a fixed window: the one that is open
	Lent   uint32 // of the rate, in 1/ShareOne
	// Outstanding is what holders may still spend at once; of a semaphore, slots lent.
	Outstanding int64
	Holders     []OwnerHolding
}

// OwnerHolding is one series of a bucket.
type OwnerHolding struct {
	Holder            uint64
	Name              string // "" where it is in no view that this owner saw
	Granter, Series   uint64
	Share             uint32 // the larger of what may be in force
	Depth             int64  // the same
	Granted, Returned int64
	Outstanding       int64 // the depth; of a semaphore, slots lent
	Level             int64 // in the lease, as last reported
	Live              bool  // the lease counts and its session holds
}

// OwnerStats counts.
type OwnerStats struct {
	Buckets, Series, Parked int
	Outstanding             int64  // Σ of all leases' depths
	Rejected                uint64 // parts of messages that could not be true
	Recalls                 uint64 // leases recalled
	Ended                   uint64 // sessions ended with what they held counted as spent
	LostDebt                int64  // units of debt reported for unknown series
	SlotsLost               uint64 // slots of processes that left, free again
	// Excess counts slots that turned out to be in use above a limit: rolled by a process that had been
	// cut off, or those counted as lost of one that came back.
	Excess uint64
	// Stranded is what leases of others held, by their last reports, when an ask was refused last.
	Stranded int64
}

// Levels lists a tenant's buckets by limit and subject; of tenant "", those that no tenant owns. It
// looks at every bucket.
func (o *Owner) Levels(at Instant, tenant string) []OwnerLevel {
	ls, _, _ := o.levelsFrom(at, tenant, 0, math.MaxInt)
	sortLevels(ls)
	return ls
}

// levelsFrom lists those of a tenant's buckets that are among so many from a place on, in no order. more: the rest
// begin at next.
func (o *Owner) levelsFrom(at Instant, tenant string, from uint32, looks int) (ls []OwnerLevel, next uint32, more bool) {
	class, i := from&(1<<classBits-1), from>>classBits
	for ; int(class) < len(o.table.pools); class, i = class+1, 0 {
		for ; i < o.table.pools[class].used; i++ {
			id := i<<classBits | class
			if looks--; looks < 0 {
				return ls, id, true
			}
			slab, _, place := o.table.at(id)
			if b := &slab.values[place]; slab.inUse(place) && slab.ofTenant(class, place, tenant) &&
				uint64(b.partition) < uint64(len(o.parts)) && o.parts[b.partition].since != 0 {
				ls = append(ls, o.levelOf(at, id, b))
			}
		}
	}
	return ls, 0, false
}

func sortLevels(ls []OwnerLevel) {
	slices.SortFunc(ls, func(a, b OwnerLevel) int {
		return cmp.Or(cmp.Compare(a.Key.Tenant, b.Key.Tenant), cmp.Compare(a.Key.Limit, b.Key.Limit), cmp.Compare(a.Key.Subject, b.Key.Subject))
	})
}

func (o *Owner) levelOf(at Instant, id uint32, b *bucket) OwnerLevel {
	o.touch(at, b)
	share, depth := o.sums(b)
	l := OwnerLevel{
		Key: o.keyOf(id), Partition: b.partition, Limit: *b.limit, Level: o.shown(at, id, b), Here: o.level(at, id, b),
		Window: int64(o.window(b, at)), Lent: uint32(min(share, limiter.ShareOne)), Outstanding: depth,
	}
	if l.Debt = max(0, -l.Here); b.limit.Algorithm == limiter.Semaphore {
		l.Outstanding = b.limit.Burst - l.Level
	}
	for i := b.first; i != 0; i = o.pool.at(i).next {
		l.Holders = append(l.Holders, o.holding(at, i))
	}
	return l
}

func (o *Owner) holding(at Instant, i uint32) OwnerHolding {
	s := o.pool.at(i)
	p := o.peers[s.peer]
	share, depth := s.counted()
	h := OwnerHolding{
		Holder: p.incarnation, Name: p.name, Granter: o.cfg.Self, Series: s.number(),
		Share: uint32(min(share, limiter.ShareOne)), Depth: depth, Granted: s.granted, Returned: s.returned,
		Outstanding: depth, Level: s.level.value(), Live: !s.is(seriesEnded) && p.deadline >= at.Now,
	}
	if s.is(seriesInherited) {
		h.Granter, h.Live = o.inherited[i].granter, !s.is(seriesEnded)
	}
	if s.is(seriesSlots) {
		h.Outstanding, h.Depth = s.lent(), s.depth
	}
	return h
}

// Sweep looks at up to budget buckets, going on where the last left off, and forgets those that are
// full and owe, lend and remember nothing.
func (o *Owner) Sweep(at Instant, budget int) (forgotten int) {
	t := &o.table
	for range min(budget, t.ids()) {
		id := t.next(t.cursor)
		t.cursor = id + 1<<classBits
		slab, _, i := t.at(id)
		if slab.inUse(i) && o.idle(at, id, &slab.values[i]) {
			o.forget(id, &slab.values[i])
			forgotten++
		}
	}
	return forgotten
}

// idle says whether nothing would be lost with a bucket. What is left of a block goes back first.
func (o *Owner) idle(at Instant, id uint32, b *bucket) bool {
	if as := o.askers[id]; len(as) > 0 && !slices.ContainsFunc(as, func(a asker) bool { return at.Now-a.at <= askerFor }) {
		delete(o.askers, id)
	}
	if b.first != 0 || o.waiting[id] > 0 || slices.Contains(o.used, id) || uint64(b.partition) >= uint64(len(o.parts)) || o.parts[b.partition].since == 0 {
		return false
	}
	if b.limit.Durable() {
		return !o.giveUp(at, id, b)
	}
	o.touch(at, b)
	return b.limit.Full(&b.state, reading(b.limit, at))
}

// Stats counts.
func (o *Owner) Stats() OwnerStats {
	s := o.stats
	s.Buckets, s.Series, s.Parked = int(o.table.live), o.pool.live, len(o.parked)
	return s
}
