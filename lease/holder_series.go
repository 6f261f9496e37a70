package lease

import (
	"math"
	"sync/atomic"
	"time"

	"headgate/limiter"
)

// totals are what is reported of a series. They only ever grow.
type totals struct {
	ack                      uint64
	returned, refunded, debt int64
	idle, closed             bool
}

// mark stands for totals but for closed. As none of them ever shrinks, a larger mark is of later totals,
// and equal marks are of equal ones. Of a series that nothing is to be said of it is 0.
func (t totals) mark() int64 {
	m := int64(t.ack) + t.returned + t.refunded + t.debt
	if t.idle {
		m++
	}
	return m
}

// said is the lower half of a mark that also tells whether the series is closed. Of later totals it is
// another, save by an accident that delays a report by againAfter.
func (t totals) said() uint32 {
	if t.closed {
		return uint32(t.mark()<<1 | 1)
	}
	return uint32(t.mark() << 1)
}

// tab is one that an owner opened for this holder: what a reservation is settled into, and whose
// lease, while it lives, is spent. A reservation out of the lease holds a *tab, one that the
// owner decided a *direct.
//
// It fills 112 bytes; what most series never need is aside.
type tab struct {
	bucket *purse
	cell   atomic.Pointer[cell] // what is left of the lease; of slots, also after its end: who counts those in use
	// session is never nil, and written under Holder.mu. Of a partition that moved it is one of its own.
	session atomic.Pointer[session]
	rare    atomic.Pointer[aside] // nil: all zero; written under Holder.mu

	returned, refunded, debt atomic.Int64

	open  atomic.Int32  // reservations that are not settled, save for slots
	low   atomic.Uint32 // a float32: below this level, in the word's unit, the owner is to hear of it; 0: not again
	sent  atomic.Uint32 // a tick: when it was reported last, or just after; written under Holder.mu
	noted atomic.Bool   // it is in Holder.news: something happened since it was last looked at

	// What follows is under Holder.mu.
	number  uint64 // 0: of rolled slots that the owner has not numbered yet
	granted int64
	settled int64  // of what is acknowledged
	said    uint32 // what was reported last: totals.said
	ack     uint32 // an owner's Numbers are no higher
	told    bool   // it is reported in the request that is being written
	lent    bool   // it had a lease, so slots and the window are set
	slots   bool
	dead    bool // its lease will not be spent again
	closed  bool // as acknowledged
	gone    bool // forgotten: what is settled into it is lost
	queued  bool // in lender.queue

	detached bool // its partition went to another owner
}

// aside is what most series never need. It is written under Holder.mu, and read under it save for moved.
type aside struct {
	moved atomic.Pointer[tab] // its slots in use are counted there since a roll
	facts
}

type facts struct {
	next   *tab   // the next older in purse.series
	window int64  // of a fixed window's lease: its index
	after  uint64 // nothing is said of the series before the roll of this epoch is
	owed   int64  // the debt that is acknowledged
	room   int64  // how much of the lease's depth had not been given back when it ended
	back   int64  // how much had
	deadAt tick   // when the sweep first found it dead; 0: not yet
	late   bool   // it has been dead for longer than an ask may be on its way
	lost   bool   // it was forgotten once: what it had been granted is not known
}

// newTab is a series of a session, the newest of its bucket. The lock is held.
func newTab(b *purse, s *session, number uint64) *tab {
	t := &tab{bucket: b, number: number}
	t.session.Store(s)
	if b.series != nil {
		t.aside().next = b.series
	}
	b.series = t
	return t
}

// sentAt is when it was reported last.
func (s *tab) sentAt() tick { return tick(s.sent.Load()) }

// sentSince says whether it was, or may have been, reported since a reading. What is more than a day
// back is taken to be.
func (s *tab) sentSince(then, now int64) bool {
	return now-then >= 1<<(30+tickShift) || int32(tickOf(then)-s.sentAt()) <= 0
}

// aside is where the facts of the series are written. The lock is held.
func (s *tab) aside() *aside {
	a := s.rare.Load()
	if a == nil {
		a = new(aside)
		s.rare.Store(a)
	}
	return a
}

// granter is who opened the series.
func (s *tab) granter() uint64 { return s.session.Load().granter }

// deadline is until when its lease may be spent.
func (s *tab) deadline() int64 { return s.session.Load().deadline.Load() }

// rarely are the facts of the series, all zero if there are none. The lock is held.
func (s *tab) rarely() facts {
	if a := s.rare.Load(); a != nil {
		return a.facts
	}
	return facts{}
}

// tick is a reading of the clock in units of 2^tickShift ns. It wraps after three days: what lies further
// back looks newer, and is looked at again as if it were.
type tick uint32

const tickShift = 16

func tickOf(now int64) tick { return tick(now >> tickShift) }

// age is how long ago t was: to the unit, and rather longer.
func (t tick) age(now int64) int64 { return int64(tickOf(now)-t+1) << tickShift }

// direct is a reservation that the owner decided.
type direct struct {
	series *tab
	asked  int64 // when, by Instant.Now
}

// next is the next older series of the bucket, or nil. The lock is held.
func (s *tab) next() *tab {
	if a := s.rare.Load(); a != nil {
		return a.next
	}
	return nil
}

// current is where slots of s are counted now.
func (s *tab) current() *tab {
	for {
		a := s.rare.Load()
		if a == nil {
			return s
		}
		t := a.moved.Load()
		if t == nil {
			return s
		}
		s = t
	}
}

// inUse is how many slots of a series are in use.
func (s *tab) inUse() int64 {
	c := s.cell.Load()
	if c == nil || c.kind != kindSlots {
		return 0
	}
	if w := c.word.Load(); w != sealed {
		return w
	}
	return 0
}

// done says that nothing will be settled into the series any more. The lease is dead.
func (s *tab) done() bool { return s.open.Load() == 0 && s.inUse() == 0 }

// live says whether its lease may be spent, now or when it thaws.
func (s *tab) live() bool {
	c := s.bucket.lease.Load()
	return c != nil && c.series == s
}

// totals is where the series stands.
func (s *tab) totals() totals {
	t := totals{ack: uint64(s.ack), idle: s.dead}
	// Before the totals: what is added to them is added before open falls.
	t.closed = s.dead && s.done() && (s.bucket.pending <= 0 || s.rarely().late)
	t.returned, t.refunded, t.debt = s.returned.Load(), s.refunded.Load(), s.debt.Load()
	return t
}

// news says whether an owner is still to hear where the series stands.
func (s *tab) news() bool {
	t := s.totals()
	return t.mark() != s.settled || t.closed && !s.closed
}

// demand is what is asked of a bucket: averages over about a second, of units and of requests.
type demand struct {
	at              tick // when it was last looked at; 0: never
	usedAt          tick // when something was last found to have been asked
	units, requests float32
	told            float32 // units as last reported
}

const (
	// demandOver is the time constant of the averages, in ns.
	demandOver = 1e9
	// demandEvery is how long a sample takes at least.
	demandEvery = 20_000_000
)

// look takes a sample at now, unless the last is too fresh.
func (d *demand) look(b *purse, now int64) {
	at := tickOf(now)
	if d.at == 0 {
		d.at, d.usedAt = at-demandEvery>>tickShift-1, at
	}
	span := float64(at-d.at) * (1 << tickShift)
	if span < demandEvery {
		return
	}
	word := b.asked.Swap(0)
	units, n := float64(word>>askedBits), float64(word&(1<<askedBits-1))
	d.at = at
	part := 1 - math.Exp(-span/demandOver)
	d.units += float32(part * (units*1e9/span - float64(d.units)))
	d.requests += float32(part * (n*1e9/span - float64(d.requests)))
	if n > 0 {
		d.usedAt = at
	}
}

// per1024 is the demand as a Report has it.
func (d *demand) per1024() int64 { return int64(min(float64(d.units)*1024, 1<<60)) }

// cost is that of a typical request, at least 1.
func (d *demand) cost() int64 {
	if d.requests <= 0 {
		return 1
	}
	return max(1, int64(min(float64(d.units)/float64(d.requests)+0.5, limiter.MaxUnits)))
}

// news says whether the demand differs from what was reported.
func (d *demand) news() bool { return max(d.units-d.told, d.told-d.units) > d.told/16+1e-3 }

// low is below which level the owner is to hear of a lease with a share of the rate: what is asked
// beyond that share while a request goes and comes and three deviations of it, at least one request.
func (d *demand) low(rate float64, rtt int64) int64 {
	t, cost, units := float64(rtt)/1e9, float64(d.cost()), float64(d.units)
	return int64(min(max(cost, max(0, units-rate)*t+3*math.Sqrt(units*t*2*cost)), 1<<60))
}

// refusal is a refusal lease. It never changes.
type refusal struct {
	cost           int64 // this and more is refused
	at             int64 // when it came
	until, retryAt int64 // retryAt: of cost; limiter.Never
	level          int64
	terms          *terms // nil: not known
}

// refuses says whether a charge that the bucket's lease does not cover is refused here; d is then why.
func (b *purse) refuses(at Instant, c *limiter.Charge, cost int64, d *limiter.Decision) bool {
	cell := b.lease.Load()
	if cell != nil && cell.refuses(at, c, cost, d) {
		return true
	}
	r := b.refusal.Load()
	return r != nil && r.refuses(at, c, cost, cell, d)
}

// wait is how long a cost has to wait, as far as the owner knew. What it had then is what its word lacks of
// the cost that it is of; since then that has filled by what the lease does not bring, and of the lease this process
// knows best.
func (r *refusal) wait(at Instant, cost int64, c *cell) int64 {
	now := at.Now
	switch {
	case r.retryAt == int64(limiter.Never):
		return r.retryAt
	case r.terms == nil || !r.terms.refills():
		return max(r.retryAt, r.until) - now
	}
	const most = math.MaxInt64 / 8 // so that nothing overflows
	whole := &r.terms.whole
	had := whole.down(min(r.cost, limiter.MaxUnits)) - (r.retryAt - r.at)
	if r.level >= r.cost {
		had = max(had, whole.down(r.level))
	}
	need := whole.up(min(cost, limiter.MaxUnits))
	if need > most || had < -most {
		return max(r.retryAt, r.until) - now
	}
	passed, level := now-r.at, int64(0)
	if c != nil {
		in, share := c.brings(at)
		level = min(in, most)
		passed -= int64(float64(passed) * float64(share) / ShareOne)
	}
	return max(need-min(had, most)-level-passed, r.until-now)
}

// refuses says whether a charge is refused at now, beside what the bucket's lease has, if there is one; d is then why.
func (r *refusal) refuses(at Instant, c *limiter.Charge, cost int64, lease *cell, d *limiter.Decision) bool {
	if cost < max(r.cost, 1) || at.Now >= r.until {
		return false
	}
	if r.terms != nil && r.terms.outdated(c.Limit) {
		return false
	}
	wait := int64(limiter.Never)
	if cost <= c.Limit.Capacity() || c.Oversize == limiter.Debt {
		wait = r.wait(at, cost, lease)
		if wait == int64(limiter.Never) && r.terms != nil && r.terms.limit.Algorithm == limiter.FixedWindow {
			wait = r.terms.reset(0, at.Wall)
		}
	}
	*d = limiter.Decision{By: limiter.ByRefusal, RetryAfter: time.Duration(wait), Remaining: r.level, At: at.Now}
	if r.terms != nil {
		d.Reset = time.Duration(r.terms.reset(r.level, at.Wall))
	}
	return true
}
