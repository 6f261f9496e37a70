package lease

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"headgate/limiter"
)

// TableFull is what Take returns instead of the index of a limit when a charge
// needs a new bucket and the table has no room for it.
const TableFull = -2

// The bounds and defaults of Config.
const (
	DefaultShards     = 64
	MaxShards         = 1024
	DefaultMaxBuckets = 1 << 20
	// MaxMaxBuckets bounds the table at about 16 GB.
	MaxMaxBuckets = 1 << 27
)

// sweepWhenFull is how many buckets a Take looks at for one to forget before it
// says TableFull; walkBatch how many any walk looks at under one lock.
const (
	sweepWhenFull = 1024
	walkBatch     = 512
)

// Config sizes a Local. A zero field takes its default.
type Config struct {
	// Shards is the number of locks, a power of two.
	Shards int
	// MaxBuckets bounds the table. Each bucket takes about 75 bytes beside
	// its key.
	MaxBuckets int
}

// Validate says what is wrong with c and what to write instead.
func (c Config) Validate() error {
	if c.Shards < 0 || c.Shards > MaxShards || c.Shards&(c.Shards-1) != 0 {
		return fmt.Errorf("%d shards: use a power of two up to %d, or 0 for %d", c.Shards, MaxShards, DefaultShards)
	}
	if c.MaxBuckets < 0 || c.MaxBuckets > MaxMaxBuckets {
		return fmt.Errorf("%d buckets: use 1 to %d, or 0 for %d", c.MaxBuckets, MaxMaxBuckets, DefaultMaxBuckets)
	}
	return nil
}

// Local is the bucket table of one process. Its methods may be called
// concurrently; each is one atomic step against all others, except for Levels
// and Sweep, which are so for each bucket.
//
// now is a reading in nanoseconds since the Unix epoch of a clock that does not
// go back. cs holds at most limiter.MaxCharges charges, with valid limits, and
// ds as many decisions or more; otherwise the methods panic.
type Local struct {
	seed   maphash.Seed
	shards []shard[account]
	max    int64
	floor  atomic.Int64 // 0: none; see SetFloor

	_     [64]byte     // what is above is only read
	count atomic.Int64 // buckets in all shards
	sweep atomic.Uint32
}

// NewLocal returns an empty table.
func NewLocal(c Config) (*Local, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	return &Local{
		seed:   maphash.MakeSeed(),
		shards: make([]shard[account], cmp.Or(c.Shards, DefaultShards)),
		max:    int64(cmp.Or(c.MaxBuckets, DefaultMaxBuckets)),
	}, nil
}

// batch is one call's charges: where their buckets live and which shards are
// locked, once each and in ascending order, so that two calls cannot wait for
// each other.
type batch struct {
	places   [limiter.MaxCharges]place
	accounts [limiter.MaxCharges]*account
	locked   [limiter.MaxCharges]uint32
	locks    int
}

func (l *Local) lock(b *batch, cs []limiter.Charge) {
	for i := range cs {
		p := l.locate(&cs[i].Key)
		b.places[i] = p
		at := b.locks
		for at > 0 && b.locked[at-1] > p.shard {
			at--
		}
		if at > 0 && b.locked[at-1] == p.shard {
			continue
		}
		copy(b.locked[at+1:b.locks+1], b.locked[at:b.locks])
		b.locked[at] = p.shard
		b.locks++
	}
	l.relock(b)
}

func (l *Local) relock(b *batch) {
	for _, s := range b.locked[:b.locks] {
		l.shards[s].mu.Lock()
	}
}

func (l *Local) unlock(b *batch) {
	for _, s := range b.locked[:b.locks] {
		l.shards[s].mu.Unlock()
	}
}

// Take charges all of cs or none. ds[i] is what the limit of cs[i] decides.
//
// It returns -1 if all was charged. Otherwise nothing was, and it returns the
// index of a refusing charge: of several, the one with the longest RetryAfter,
// so that to wait that long is enough for each of them. Then ds holds the
// levels as they are, and its Admitted says which charges would have conformed.
// It returns TableFull, with ds undefined, if a bucket would have to be made
// and there is no room.
//
// A shadow charge is taken if it conforms (or is left out, if the table is
// full) and never refuses. Charges on the same bucket count together.
//
// Take sets At of every charge, to limiter.NotTaken where nothing is held.
// A bucket remembers the limit of the highest Revision that it met and decides
// by that.
func (l *Local) Take(now int64, cs []limiter.Charge, ds []limiter.Decision) (refused int) {
	ds = ds[:len(cs)]
	if len(cs) == 1 {
		if refused, ok := l.takeKnown(now, &cs[0], &ds[0]); ok {
			return refused
		}
	}
	var b batch
	l.lock(&b, cs)
	defer l.unlock(&b)
	fresh, ok := l.open(&b, now, cs)
	if !ok {
		// A sweep needs locks in an order of its own.
		l.unlock(&b)
		l.Sweep(now, sweepWhenFull)
		l.relock(&b)
		fresh, ok = l.open(&b, now, cs)
	}
	refused = TableFull
	taken := uint32(0)
	if ok {
		refused, taken = decide(now, cs, b.accounts[:len(cs)], ds)
	}
	for i := range cs {
		cs[i].At = limiter.NotTaken
		if taken>>i&1 == 1 {
			cs[i].At = ds[i].At
		}
	}
	l.closeUnused(&b, now, cs, fresh, refused != -1)
	return refused
}

// takeKnown is Take of a single charge that has a bucket: the same steps with
// nothing to undo.
func (l *Local) takeKnown(now int64, c *limiter.Charge, d *limiter.Decision) (refused int, ok bool) {
	p := l.locate(&c.Key)
	s := &l.shards[p.shard]
	s.mu.Lock()
	defer s.mu.Unlock()
	a, _ := s.find(p.tag, &c.Key)
	if a == nil {
		return 0, false
	}
	a.supersede(now, c.Limit)
	a.limit.TakeInto(&a.state, now, c.Cost, c.Oversize, d)
	c.At = d.At
	if !d.Admitted {
		c.At = limiter.NotTaken
		if !c.Shadow {
			return 0, true
		}
	}
	return -1, true
}

// open finds or makes the charges' accounts. It returns the set of those it
// made, and false, having made none, if one is missing that has to be there.
func (l *Local) open(b *batch, now int64, cs []limiter.Charge) (fresh uint32, ok bool) {
	for i := range cs {
		p := b.places[i]
		s := &l.shards[p.shard]
		found, _ := s.find(p.tag, &cs[i].Key)
		if found == nil {
			if l.count.Add(1) > l.max {
				l.count.Add(-1)
				b.accounts[i] = nil
				if cs[i].Shadow {
					continue
				}
				l.closeUnused(b, now, cs, fresh, true)
				return 0, false
			}
			found, _ = s.insert(p.tag, &cs[i].Key)
			*found = account{cs[i].Limit, l.fresh(now, cs[i].Limit)}
			fresh |= 1 << i
		}
		b.accounts[i] = found
	}
	return fresh, true
}

// closeUnused forgets those fresh buckets that are still full, and all if nothing
// was charged, so that refused requests fill no table.
func (l *Local) closeUnused(b *batch, now int64, cs []limiter.Charge, fresh uint32, all bool) {
	for ; fresh != 0; fresh &= fresh - 1 {
		i := bits.TrailingZeros32(fresh)
		p := b.places[i]
		s := &l.shards[p.shard]
		if found, id := s.find(p.tag, &cs[i].Key); all || found.limit.Full(&found.state, now) {
			s.remove(p.tag, id)
			l.count.Add(-1)
		}
	}
}

// decide takes cs from their accounts, all or nothing, where no account is a
// charge that is left out. It returns what Take does and the set of charges
// taken.
func decide(now int64, cs []limiter.Charge, accounts []*account, ds []limiter.Decision) (refused int, taken uint32) {
	// First, so that a bucket named twice has one limit throughout.
	for i, a := range accounts {
		if a != nil {
			a.supersede(now, cs[i].Limit)
		}
	}
	refused = -1
	for i, a := range accounts {
		if a == nil {
			ds[i] = limiter.Decision{At: now}
			continue
		}
		c := &cs[i]
		a.limit.TakeInto(&a.state, now, c.Cost, c.Oversize, &ds[i])
		switch {
		case ds[i].Admitted:
			taken |= 1 << i
		case c.Shadow:
		case refused < 0 || ds[i].RetryAfter > ds[refused].RetryAfter:
			refused = i
		}
	}
	if refused < 0 {
		return refused, taken
	}
	// A refund at the instant of the charge undoes it exactly.
	for ; taken != 0; taken &= taken - 1 {
		i := bits.TrailingZeros32(taken)
		accounts[i].limit.Adjust(&accounts[i].state, now, ds[i].At, max(cs[i].Cost, 0))
	}
	for i, a := range accounts {
		if a != nil {
			level := a.limit.Take(&a.state, now, 0, limiter.Refuse)
			ds[i].Remaining, ds[i].Reset = level.Remaining, level.Reset
		}
	}
	return refused, 0
}

// Peek decides as Take would if the table had room, and changes nothing; where
// all would be charged, ds holds the levels after it.
func (l *Local) Peek(now int64, cs []limiter.Charge, ds []limiter.Decision) (refused int) {
	ds = ds[:len(cs)]
	var b batch
	var scratch [limiter.MaxCharges]account
	l.lock(&b, cs)
	for i := range cs {
		first := slices.IndexFunc(cs[:i], func(c limiter.Charge) bool { return c.Key == cs[i].Key })
		if first < 0 {
			first = i
			scratch[i] = account{cs[i].Limit, l.fresh(now, cs[i].Limit)}
			if found, _ := l.shards[b.places[i].shard].find(b.places[i].tag, &cs[i].Key); found != nil {
				scratch[i] = account{found.limit, found.state.Clone()}
			}
		}
		b.accounts[i] = &scratch[first]
	}
	l.unlock(&b)
	refused, _ = decide(now, cs, b.accounts[:len(cs)], ds)
	return refused
}

// Settle replaces the cost of each charge that Take took by actual[i] ≥ 0, and
// puts the level after it into ds[i]. What was charged too much comes back as
// limiter.Adjust says, 0 cancels, a higher figure is charged without asking and
// may leave debt. A semaphore's slots come back with 0. It updates cs[i].Cost,
// so to settle a charge again with the same figure changes nothing.
//
// A charge that holds nothing is skipped, and so is one whose limit has since
// become a semaphore or ceased to be one: its units mean something else. Debt
// is never dropped: for a bucket that was forgotten because it was full again,
// it makes a new one even above MaxBuckets.
func (l *Local) Settle(now int64, cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	ds, actual = ds[:len(cs)], actual[:len(cs)]
	var b batch
	l.lock(&b, cs)
	defer l.unlock(&b)
	for i := range cs {
		ds[i] = l.settle(now, b.places[i], &cs[i], max(actual[i], 0))
	}
}

func (l *Local) settle(now int64, p place, c *limiter.Charge, actual int64) limiter.Decision {
	s := &l.shards[p.shard]
	delta := int64(0)
	if c.At != limiter.NotTaken {
		delta = max(c.Cost, 0) - actual
		c.Cost = actual
	}
	found, _ := s.find(p.tag, &c.Key)
	if found == nil {
		fresh := l.fresh(now, c.Limit)
		if delta >= 0 {
			return c.Limit.Take(&fresh, now, 0, limiter.Refuse)
		}
		l.count.Add(1)
		found, _ = s.insert(p.tag, &c.Key)
		*found = account{c.Limit, fresh}
	}
	found.supersede(now, c.Limit)
	if delta != 0 && (c.Limit.Algorithm == limiter.Semaphore) == (found.limit.Algorithm == limiter.Semaphore) {
		found.limit.Adjust(&found.state, now, c.At, delta)
	}
	return found.limit.Take(&found.state, now, 0, limiter.Refuse)
}

// Level is one bucket as an operator sees it.
type Level struct {
	Key   limiter.Key
	Limit limiter.Limit
	// Level is what is left, negative in debt; Reset the time until it is
	// full, limiter.Never for a semaphore in use.
	Level int64
	Reset time.Duration
}

// Levels lists the buckets of a tenant by limit and subject; of tenant "",
// those that no tenant owns. A bucket that was never used, or was forgotten
// because it was full, is not among them. It looks at every bucket of the
// shards concerned, a batch at a time, so it is for people, not for requests.
func (l *Local) Levels(now int64, tenant string) []Level {
	shards := l.shards
	if tenant != "" {
		p := l.locate(&limiter.Key{Tenant: tenant})
		shards = shards[p.shard : p.shard+1]
	}
	var levels []Level
	for i := range shards {
		shards[i].each(func(id uint32) {
			b, class, i := shards[i].at(id)
			k, a := b.key(class, i), &b.values[i]
			if k.Tenant == tenant {
				d := a.limit.Take(&a.state, now, 0, limiter.Refuse)
				levels = append(levels, Level{k, *a.limit, d.Remaining, d.Reset})
			}
		})
	}
	slices.SortFunc(levels, func(a, b Level) int {
		return cmp.Or(cmp.Compare(a.Key.Limit, b.Key.Limit), cmp.Compare(a.Key.Subject, b.Key.Subject))
	})
	return levels
}

// Sweep looks at up to budget buckets, going on where the last sweep stopped
// and round the table at most once, and forgets those that are full. A bucket
// that is not full is never forgotten. It returns how many it forgot.
func (l *Local) Sweep(now int64, budget int) (forgotten int) {
	for range l.shards {
		s := &l.shards[int(l.sweep.Add(1)-1)&(len(l.shards)-1)]
		budget -= s.walk(budget, func(id uint32) {
			b, class, i := s.at(id)
			if a := &b.values[i]; a.limit.Full(&a.state, now) {
				k := b.key(class, i)
				s.remove(l.locate(&k).tag, id)
				l.count.Add(-1)
				forgotten++
			}
		})
		if budget <= 0 {
			break
		}
	}
	return forgotten
}

// Len is the number of buckets.
func (l *Local) Len() int { return int(l.count.Load()) }
