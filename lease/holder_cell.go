package lease

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"

	"headgate/limiter"
)

// sealed is the word of a cell that is being replaced: whoever finds it looks again.
const sealed = math.MinInt64

// pace is how long a unit takes to come: m/2^e ns, rounded up, 2^63 ≤ m < 2^64. So a cost takes a
// multiplication and a shift, and is never too short by the rounding of the quotient.
type pace struct {
	m uint64
	e int16
}

// maxFill is the longest that a lease may take to fill, in ns. What takes longer counts as a block.
const maxFill = 1 << 60

// newPace is the pace of share/ShareOne of a rate: Per·ShareOne/(Count·share) ns a unit.
func newPace(r limiter.Rate, share uint32) pace {
	nhi, nlo := bits.Mul64(uint64(r.Per), ShareOne)
	dhi, dlo := bits.Mul64(uint64(r.Count), uint64(share))
	// The divisor as 64 bits with the highest set; what is cut off makes it smaller, the pace longer.
	e := 0
	if dhi > 0 {
		cut := bits.Len64(dhi)
		dlo, e = dhi<<(64-cut)|dlo>>cut, e+cut
	}
	up := bits.LeadingZeros64(dlo)
	dlo, e = dlo<<up, e-up
	// The numerator as 128 bits, just below the divisor's 64 in its upper half.
	up = bits.LeadingZeros64(nhi)
	if nhi == 0 {
		up = 64 + bits.LeadingZeros64(nlo)
	}
	if up >= 64 {
		nhi, nlo = nlo<<(up-64), 0
	} else {
		nhi, nlo = nhi<<up|nlo>>(64-up), nlo<<up
	}
	e += up
	if nhi >= dlo {
		nhi, nlo = nhi>>1, nhi<<63|nlo>>1 // the lowest bit is 0: at most 92 are in use
		e--
	}
	q, rest := bits.Div64(nhi, nlo, dlo)
	if rest > 0 {
		if q++; q == 0 {
			q, e = 1<<63, e-1
		}
	}
	return pace{m: q, e: int16(e)}
}

// up is how long n ≥ 0 units take, in ns, rounded up; MaxInt64 where it is more.
func (p pace) up(n int64) int64 {
	v, rest := p.times(n)
	if rest && v < math.MaxInt64 {
		v++
	}
	return v
}

// down is up rounded down.
func (p pace) down(n int64) int64 {
	v, _ := p.times(n)
	return v
}

func (p pace) times(n int64) (v int64, rest bool) {
	hi, lo := bits.Mul64(uint64(n), p.m)
	e := uint(p.e)
	var q uint64
	switch {
	case n == 0:
		return 0, false
	case p.e <= 0 || e < 64 && hi>>e > 0:
		return math.MaxInt64, false // a unit of 2^63 ns or more
	case e < 64:
		q, rest = hi<<(64-e)|lo>>e, lo<<(64-e) != 0
	case e < 128:
		q, rest = hi>>(e-64), hi<<(128-e) != 0 || lo != 0
	default:
		rest = true
	}
	if q > math.MaxInt64 {
		return math.MaxInt64, false
	}
	return int64(q), rest
}

// units is how many whole units come in ns ≥ 0, at most most.
func (p pace) units(ns, most int64) int64 {
	e := uint(max(p.e, 0))
	x := uint64(ns)
	var hi, lo uint64
	switch {
	case ns == 0:
		return 0
	case e >= 64:
		if bits.Len64(x)+int(e) > 128 {
			return most
		}
		hi = x << (e - 64)
	default:
		hi, lo = x>>(64-e), x<<e
	}
	if hi >= p.m {
		return most
	}
	q, _ := bits.Div64(hi, lo, p.m)
	return int64(min(q, uint64(most)))
}

// carry is what ns ≥ 0 of pace p are in pace to, rounded down, at most most.
func (p pace) carry(ns int64, to pace, most int64) int64 {
	if p == to {
		return min(ns, most)
	}
	hi, lo := bits.Mul64(uint64(ns), to.m)
	if hi >= p.m {
		return most
	}
	q, _ := bits.Div64(hi, lo, p.m)
	switch by := int(p.e) - int(to.e); {
	case q == 0:
	case by < 0 && by > -64:
		q >>= -by
	case by < 0:
		q = 0
	case bits.Len64(q)+by >= 64:
		return most
	default:
		q <<= by
	}
	return int64(min(q, uint64(most)))
}

// terms is a limit as leases, refusals and headers use it. It never changes.
type terms struct {
	limit limiter.Limit
	whole pace // of the whole rate
	// Most leases have no share of the rate, or all of it.
	plain, full tariff
	// A fixed window's lease may be spent while opens ≤ wall < closes; 0, 0: always.
	opens, closes int64
}

// period is a limit, and of a fixed window also which one.
type period struct {
	limit  limiter.Limit
	window int64
}

func newTerms(p period) *terms {
	t := &terms{limit: p.limit}
	t.plain = tariff{terms: t, kind: kindBlock}
	if p.limit.Algorithm == limiter.Semaphore {
		t.plain.kind = kindSlots
	} else {
		t.whole = newPace(p.limit.Rate, ShareOne)
		t.full = tariff{terms: t, kind: kindRate, m: t.whole.m, e: t.whole.e, share: ShareOne}
	}
	if p.limit.Algorithm == limiter.FixedWindow {
		t.opens = p.window * int64(p.limit.Rate.Per)
		t.closes = t.opens + int64(p.limit.Rate.Per)
	}
	return t
}

// outdated says whether a limit is newer than that of t, and another.
func (t *terms) outdated(l *limiter.Limit) bool {
	return l.Revision > t.limit.Revision && t.differs(l)
}

// differs says whether more than the revision of a limit is another than that of t.
func (t *terms) differs(l *limiter.Limit) bool {
	same := *l
	same.Revision = t.limit.Revision
	return same != t.limit
}

// suits says whether a charge's limit is what a lease was lent under, or one of before. A newer one
// needs the owner, who may not know of it.
func (t *terms) suits(l *limiter.Limit) bool {
	return (l.Algorithm == limiter.Semaphore) == (t.limit.Algorithm == limiter.Semaphore) && !t.outdated(l)
}

// inWindow says whether a lease may be spent by the wall clock.
func (t *terms) inWindow(wall int64) bool {
	return t.closes == 0 || wall >= t.opens && wall < t.closes
}

// refills says whether the owner's bucket fills by itself while leases lie elsewhere.
func (t *terms) refills() bool { return t.limit.Algorithm == limiter.GCRA && !t.limit.Durable() }

// reset is how long it takes until the bucket is full, if level is all that is in it.
func (t *terms) reset(level, wall int64) int64 {
	l := &t.limit
	switch {
	case level >= l.Capacity():
		return 0
	case l.Algorithm == limiter.Semaphore:
		return int64(limiter.Never)
	case l.Algorithm == limiter.GCRA:
		return t.whole.up(l.Burst - max(level, -limiter.MaxUnits))
	}
	return int64(l.Rate.Per) - wall%int64(l.Rate.Per)
}

// kind says what the word of a cell counts.
type kind uint8

const (
	kindRate  kind = iota // the instant when the lease is full again
	kindBlock             // units left
	kindSlots             // slots in use
)

// session is one that an owner opened for this holder. Leases of it may be spent before deadline.
// Number 0 is no session: of what was never lent, or counts no more.
type session struct {
	granter, number uint64
	deadline        atomic.Int64
}

// newSession is a session before its first extension.
func newSession(granter, number uint64) *session {
	s := &session{granter: granter, number: number}
	s.deadline.Store(ended)
	return s
}

// ended is the deadline of a session before its first extension, and after its last.
const ended = math.MinInt64

// tariff is a limit and a share of its rate. It never changes.
type tariff struct {
	terms *terms
	m     uint64 // pace, in parts that leave no gap
	e     int16
	kind  kind
	share uint32
}

// pace is that of a rate.
func (t *tariff) pace() pace { return pace{t.m, t.e} }

// cell is a lease as it is spent: what never changes of it, and the word that counts. Another
// (share, depth) or grant is another cell: the old one is sealed first. It fills 48 bytes.
type cell struct {
	word atomic.Int64
	*tariff
	series *tab
	depth  int64 // units; of slots, how many may be kept, in use or not
	deep   int64 // depth in the word's unit
	level  int64 // left with the owner, when it last said so
}

// copy is a cell with the same lease and no word.
func (c *cell) copy() *cell {
	return &cell{tariff: c.tariff, series: c.series, depth: c.depth, deep: c.deep, level: c.level}
}

// spendable says whether a cell may be spent at a reading.
func (c *cell) spendable(at Instant) bool {
	return at.Now < c.series.deadline() && c.terms.inWindow(at.Wall)
}

// verdict is what became of a try at a cell.
type verdict uint8

const (
	took   verdict = iota
	short          // it does not hold as much
	moving         // sealed: look again
)

// take takes cost ≥ 0. left is what is left then, in the word's unit.
func (c *cell) take(now, cost int64) (left int64, v verdict) {
	if cost > c.depth {
		return 0, short
	}
	need := c.inLeft(cost)
	for {
		w := c.word.Load()
		if w == sealed {
			return 0, moving
		}
		next := w - need
		left = next
		switch c.kind {
		case kindRate:
			next = max(w, now) + need
			left = c.deep - (next - now)
		case kindSlots:
			next = w + need
			left = c.deep - next
		}
		if left < 0 && cost > 0 {
			return 0, short
		}
		if c.word.CompareAndSwap(w, next) {
			return left, took
		}
	}
}

// takeUpTo takes as much of cost as there is, of a rate or block.
func (c *cell) takeUpTo(now, cost int64) (taken int64, v verdict) {
	for {
		w := c.word.Load()
		if w == sealed {
			return 0, moving
		}
		taken = min(cost, c.holds(w, now))
		if taken <= 0 {
			return 0, short
		}
		next := w - taken
		if c.kind == kindRate {
			next = max(w, now) + c.pace().up(taken)
			if next-now > c.deep { // the level was rounded down, so this is a matter of 1 ns
				return 0, short
			}
		}
		if c.word.CompareAndSwap(w, next) {
			return taken, took
		}
	}
}

// free frees slots, if all of them may be kept.
func (c *cell) free(n int64) bool {
	for {
		w := c.word.Load()
		if w == sealed || w < n || w > c.depth {
			return false
		}
		if c.word.CompareAndSwap(w, w-n) {
			return true
		}
	}
}

// refill puts units ≥ 0 back, up to the depth, and returns what does not fit. Slots are freed: rest
// is those that may not be kept. With deep, the depth is no bound: a rule to break.
func (c *cell) refill(now, units int64, deep bool) (rest int64, v verdict) {
	for {
		w := c.word.Load()
		if w == sealed {
			return 0, moving
		}
		next := w
		switch c.kind {
		case kindRate:
			room, x := max(w-now, 0), c.pace().down(units)
			back := min(x, room)
			if deep {
				back = x
			}
			next = w - back
			rest = c.pace().units(x-back, units)
		case kindBlock:
			back := min(units, c.depth-w)
			if deep {
				back = units
			}
			next, rest = w+back, units-back
		case kindSlots:
			freed := min(units, w)
			next, rest = w-freed, min(freed, max(0, w-c.depth))
		}
		if c.word.CompareAndSwap(w, next) {
			return rest, took
		}
	}
}

// undo takes back what take took of this very cell, of a rate: to the nanosecond.
func (c *cell) undo(cost int64) verdict {
	need := c.pace().up(cost)
	for {
		w := c.word.Load()
		if w == sealed {
			return moving
		}
		if c.word.CompareAndSwap(w, w-need) {
			return took
		}
	}
}

// all says that the lease is all that the bucket can ever hold and all that comes in: nobody else has anything
// of it (R1), and what does not conform in it conforms nowhere.
func (c *cell) all() bool {
	return c.kind == kindRate && c.share == ShareOne && c.terms.refills() && c.depth >= c.terms.limit.Capacity()
}

// refuses says whether a lease that is all of its bucket refuses a charge; d is then why.
func (c *cell) refuses(at Instant, charge *limiter.Charge, cost int64, d *limiter.Decision) bool {
	w := c.word.Load()
	if w == sealed || !c.all() || !c.terms.suits(charge.Limit) || !c.spendable(at) {
		return false
	}
	full := max(w-at.Now, 0) // in so long
	wait := full + c.pace().up(min(cost, c.depth)) - c.deep
	if cost > c.depth && charge.Oversize != limiter.Debt {
		wait = int64(limiter.Never)
	}
	if wait <= 0 {
		return false
	}
	*d = limiter.Decision{
		By: limiter.ByRefusal, RetryAfter: time.Duration(wait), Remaining: c.holds(w, at.Now), Reset: time.Duration(full), At: at.Now,
	}
	return true
}

// brings is what of a cost a lease has, or will have, by itself: its level, in ns of the whole rate, and its share.
func (c *cell) brings(at Instant) (level int64, share uint32) {
	w := c.word.Load()
	if w == sealed || !c.terms.refills() || !c.spendable(at) {
		return 0, 0
	}
	if c.kind == kindRate {
		return c.pace().carry(c.inWord(w, at.Now), c.terms.whole, math.MaxInt64), c.share
	}
	return c.terms.whole.down(w), 0
}

// inWord is the level that a word stands for, in the word's unit, at most the depth.
func (c *cell) inWord(w, now int64) int64 {
	switch c.kind {
	case kindRate:
		return max(0, c.deep-max(0, w-now))
	case kindSlots:
		return max(0, c.deep-w)
	}
	return w
}

// holds is the level that a word stands for, in whole units.
func (c *cell) holds(w, now int64) int64 {
	if w == sealed {
		return 0
	}
	n := c.inWord(w, now)
	if c.kind == kindRate {
		return c.pace().units(n, c.depth)
	}
	return n
}

// inUnits is a level in the word's unit as whole units.
func (c *cell) inUnits(left int64) int64 {
	if c.kind == kindRate {
		return c.pace().units(max(left, 0), c.depth)
	}
	return max(left, 0)
}

// left is the level now, in the word's unit.
func (c *cell) left(now int64) int64 {
	w := c.word.Load()
	if w == sealed {
		return 0
	}
	return c.inWord(w, now)
}

// inLeft is a cost in the word's unit.
func (c *cell) inLeft(cost int64) int64 {
	if c.kind == kindRate {
		return c.pace().up(cost)
	}
	return cost
}

// describe says what a lease decided that leaves a level, in the word's unit, in it. It is for people,
// who are not to see a unit less for a part of a nanosecond.
func (c *cell) describe(at Instant, left int64, d *limiter.Decision) {
	if c.kind == kindRate {
		left = min(left+2, c.deep+1)
	}
	d.By, d.RetryAfter, d.At = limiter.ByLease, 0, at.Now
	if c.terms.closes != 0 {
		d.At = at.Wall
	}
	d.Remaining = min(c.inUnits(left)+c.level, c.terms.limit.Capacity())
	d.Reset = time.Duration(c.terms.reset(d.Remaining, at.Wall))
}
