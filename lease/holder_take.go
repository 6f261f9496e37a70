package lease

import (
	"math"
	"math/bits"
	"time"

	"headgate/limiter"
)

// tries bounds how often a take or a settle looks again for a lease that is being replaced.
const tries = 64

// Take charges cs from the leases in hand, in their order. Where these cover all it returns -1, 0, and
// takes no lock and allocates nothing. refused ≥ 0 is the index of a charge that is refused here (of
// several, the one with the longest wait): nothing is held. Else the charges in missing need their
// owner, and the others are held: the caller asks and calls Decided, or calls Cancel. A shadow charge
// is never refused, but may be missing. ds[i] is what decided cs[i]; of a missing one only what can be
// said without its owner.
func (h *Holder) Take(cs []limiter.Charge, ds []limiter.Decision) (refused int, missing uint32) {
	return h.take(cs, ds, true)
}

// take is Take. A request that tries again is asked for once, as far as demand goes.
func (h *Holder) take(cs []limiter.Charge, ds []limiter.Decision, first bool) (refused int, missing uint32) {
	ds = ds[:len(cs)]
	at := h.cfg.Clock()
	var cells [limiter.MaxCharges]*cell
	refused = -1
	for i := range cs {
		c, d := &cs[i], &ds[i]
		c.Held, c.At = nil, limiter.NotTaken
		cells[i] = h.takeOne(at, c, d, first)
		switch {
		case cells[i] != nil:
			c.Held, c.At = cells[i].series, d.At
		case d.By != limiter.ByRefusal:
			missing |= 1 << i
		case c.Shadow:
		case refused < 0 || d.RetryAfter > ds[refused].RetryAfter:
			refused = i
		}
	}
	if refused >= 0 {
		h.undo(at, cs, &cells, ds)
		return refused, 0
	}
	// R7: whoever was stopped in between may have spent what was no longer its own.
	if again := h.cfg.Clock(); !h.breaks(BreakSecondReading) {
		for i, cell := range cells[:len(cs)] {
			if cell != nil && !cell.spendable(again) {
				h.void(again, &cs[i], &ds[i])
				missing |= 1 << i
			}
		}
	}
	return -1, missing
}

// takeOne takes a charge and returns the lease that covered it. nil: none did; then d says whether a
// refusal lease refuses it.
func (h *Holder) takeOne(at Instant, c *limiter.Charge, d *limiter.Decision, first bool) *cell {
	*d = limiter.Decision{Admitted: true, By: limiter.ByOwner, At: at.Now}
	b := h.table.Load().find(h.hashOf(&c.Key), &c.Key)
	if b == nil {
		return nil
	}
	cost := max(c.Cost, 0)
	if first {
		b.ask(cost)
	}
	if cell := h.takeFrom(b, at, c.Limit, cost, d); cell != nil {
		return cell
	}
	b.refuses(at, c, cost, d)
	return nil
}

// takeFrom takes a cost from a bucket's lease, which it returns, or nil.
func (h *Holder) takeFrom(b *purse, at Instant, l *limiter.Limit, cost int64, d *limiter.Decision) *cell {
	for range tries {
		cell := b.lease.Load()
		if cell == nil {
			return nil
		}
		s := cell.series
		if !s.noted.Load() {
			h.note(s)
		}
		if !cell.terms.suits(l) || !cell.spendable(at) {
			return nil
		}
		// Before the take, so that nobody closes the series in between.
		if cell.kind != kindSlots {
			s.open.Add(1)
		}
		left, v := cell.take(at.Now, cost)
		if v == took {
			d.Admitted = true
			cell.describe(at, left, d)
			if float32(left) < math.Float32frombits(s.low.Load()) {
				h.lower(s, at.Now)
			}
			return cell
		}
		if cell.kind != kindSlots {
			h.leave(s)
		}
		if v == short {
			return nil
		}
		h.settleDown()
	}
	return nil
}

// settleDown waits until a lease that was found sealed is replaced.
func (h *Holder) settleDown() {
	h.mu.Lock()
	h.mu.Unlock() //nolint:staticcheck // SA2001: the replacement is made under the lock
}

// leave notes that a reservation of a series is over.
func (h *Holder) leave(s *tab) {
	if s.open.Add(-1) == 0 && s.cell.Load() == nil {
		h.note(s) // it may be closed now
	}
}

// note has a series looked at with the next request.
func (h *Holder) note(s *tab) {
	if s.noted.CompareAndSwap(false, true) {
		h.newsMu.Lock()
		h.news = append(h.news, s)
		h.newsMu.Unlock()
	}
}

// lower has the owner told that a lease is low: once, until something came or a keep-alive went.
func (h *Holder) lower(s *tab, now int64) {
	if s.low.Swap(0) == 0 {
		return
	}
	if r := s.bucket.refusal.Load(); r != nil && now < r.until {
		return
	}
	s.bucket.wokenAt.Store(uint32(tickOf(now)))
	h.wake(s.granter())
}

func (h *Holder) wake(owner uint64) {
	if h.cfg.Wake != nil && owner != 0 {
		h.cfg.Wake(owner)
	}
}

// undo takes back what a refused call has taken, as if it had not.
func (h *Holder) undo(at Instant, cs []limiter.Charge, cells *[limiter.MaxCharges]*cell, ds []limiter.Decision) {
	for i := range cs {
		cell, cost := cells[i], max(cs[i].Cost, 0)
		if cell == nil {
			continue
		}
		ds[i].Remaining += cost
		cs[i].Held, cs[i].At = nil, limiter.NotTaken
		switch {
		case cell.kind == kindRate && cell.undo(cost) == took:
		default:
			h.giveBack(at, at.Now, cell.series, cost, true)
		}
		if cell.kind != kindSlots {
			h.leave(cell.series)
		}
	}
}

// void ends the hold of a take that came too late. What it took is spent, save for slots, which
// count as lent until they are returned.
func (h *Holder) void(at Instant, c *limiter.Charge, d *limiter.Decision) {
	h.stats.void.Add(1)
	s := c.Held.(*tab)
	*d = limiter.Decision{Admitted: true, By: limiter.ByOwner, At: at.Now}
	c.Held, c.At = nil, limiter.NotTaken
	if cell := s.current().cell.Load(); cell != nil && cell.kind == kindSlots {
		h.giveBack(at, at.Now, s, max(c.Cost, 0), true)
		return
	}
	h.leave(s)
}

// Peek is what Take would do. It changes nothing.
func (h *Holder) Peek(cs []limiter.Charge, ds []limiter.Decision) (refused int, missing uint32) {
	ds = ds[:len(cs)]
	at := h.cfg.Clock()
	refused = -1
	table := h.table.Load()
	for i := range cs {
		c, d := &cs[i], &ds[i]
		cost := max(c.Cost, 0)
		*d = limiter.Decision{Admitted: true, By: limiter.ByOwner, At: at.Now}
		missing |= 1 << i
		b := table.find(h.hashOf(&c.Key), &c.Key)
		if b == nil {
			continue
		}
		cell := b.lease.Load()
		if cell != nil && cell.terms.suits(c.Limit) && cell.spendable(at) {
			left := cell.left(at.Now)
			if cell.inUnits(left) >= cost {
				missing &^= 1 << i
				cell.describe(at, left-cell.inLeft(cost), d)
				continue
			}
		}
		if b.refuses(at, c, cost, d) {
			missing &^= 1 << i
			if !c.Shadow && (refused < 0 || d.RetryAfter > ds[refused].RetryAfter) {
				refused = i
			}
		}
	}
	return refused, missing
}

// Cancel gives back what is held of the charges in which, as if it had never been taken: less what their buckets may
// have refilled meanwhile for nothing. It takes the lock.
func (h *Holder) Cancel(cs []limiter.Charge, which uint32) {
	at := h.cfg.Clock()
	for ; which != 0; which &= which - 1 {
		i := bits.TrailingZeros32(which)
		if i >= len(cs) {
			return
		}
		h.end(at, &cs[i], 0, true)
	}
}

// Settle replaces the cost of each charge held by actual[i] ≥ 0 and ends the hold: to settle again
// changes nothing. Slots are kept until they are settled with 0. It asks nobody: what a charge cost
// beyond what it reserved is taken from the lease as far as that has it; the rest is debt. ds[i] is
// the level after it: of the lease, or else of the decision that ds[i] is.
func (h *Holder) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	ds, actual = ds[:len(cs)], actual[:len(cs)]
	at := h.cfg.Clock()
	for i := range cs {
		_, leased := cs[i].Held.(*tab)
		cost := max(cs[i].Cost, 0)
		s := h.end(at, &cs[i], max(actual[i], 0), false)
		if s == nil {
			continue
		}
		if cell := s.bucket.lease.Load(); cell != nil && leased {
			cell.describe(at, cell.left(at.Now), &ds[i])
			continue
		}
		afterwards(cs[i].Limit, cost-cs[i].Cost, &ds[i])
	}
}

// afterwards is a decision of before after back units came back, or were charged.
func afterwards(l *limiter.Limit, back int64, d *limiter.Decision) {
	if back == 0 || l.Algorithm == limiter.Semaphore {
		return
	}
	d.Remaining = min(d.Remaining+back, l.Capacity())
	if l.Algorithm != limiter.GCRA {
		return
	}
	whole := newPace(l.Rate, ShareOne)
	if back > 0 {
		d.Reset = max(0, d.Reset-time.Duration(whole.down(min(back, limiter.MaxUnits))))
	} else if d.Reset != limiter.Never {
		d.Reset += min(time.Duration(whole.up(min(-back, limiter.MaxUnits))), limiter.Never-d.Reset)
	}
}

// end settles one charge and returns its series; nil: it held nothing.
func (h *Holder) end(at Instant, c *limiter.Charge, actual int64, cancel bool) *tab {
	var s *tab
	leased, then := false, c.At
	switch held := c.Held.(type) {
	case *tab:
		s, leased = held, true
	case *direct:
		s, then = held.series, held.asked
	default:
		return nil
	}
	cost := max(c.Cost, 0)
	if cell := s.current().cell.Load(); leased && cell != nil && cell.kind == kindSlots {
		if actual < cost {
			h.giveBack(at, c.At, s, cost-actual, cancel)
			c.Cost = actual
		}
		if actual == 0 {
			c.Held, c.At = nil, limiter.NotTaken
		}
		return s
	}
	back := cost - actual
	if cancel {
		h.mu.Lock()
		back = h.undone(at.Now, then, c.Limit, s.bucket, back)
		h.mu.Unlock()
	}
	switch {
	case back < 0:
		h.chargeMore(at, s, -back)
	case back == 0:
	case leased:
		h.giveBack(at, c.At, s, back, cancel)
	default:
		s.refunded.Add(min(back, limiter.MaxUnits))
		h.note(s)
	}
	c.Held, c.At, c.Cost = nil, limiter.NotTaken, actual
	if cancel {
		c.Cost = cost
	}
	h.leave(s)
	return s
}

// giveBack puts units back that were taken, at reading then, out of a series' lease: into the lease
// while it lives, up to its depth; the rest belongs to the owner, in the very series (R8), unless the
// take is undone: then the level would have stood at the depth all the while.
func (h *Holder) giveBack(at Instant, then int64, s *tab, units int64, cancel bool) {
	units = min(units, limiter.MaxUnits)
	if units <= 0 {
		return
	}
	for range tries {
		t := s.current()
		cell := t.cell.Load()
		if h.breaks(BreakRefundSeries) && cell == nil {
			cell = t.bucket.lease.Load()
		}
		if cell == nil || cell.kind != kindSlots && !cell.spendable(at) {
			break
		}
		if cell.kind == kindSlots {
			if h.freeSlots(t, cell, units) {
				return
			}
			continue
		}
		rest, v := h.refill(at.Now, then, cell, units)
		if v == short {
			break
		}
		if v == took {
			if rest > 0 && !cancel {
				s.refunded.Add(rest)
				h.note(s)
			}
			return
		}
		h.settleDown()
	}
	s.refunded.Add(units)
	h.note(s)
}

// refill puts units back into a lease. short: they must not go there. Between two reports the level of
// a block falls, for the owner counts what it grants on top of what it last heard: what was taken before
// the report goes to the owner.
func (h *Holder) refill(now, then int64, c *cell, units int64) (rest int64, v verdict) {
	deep := h.breaks(BreakRefundDepth)
	if c.kind != kindBlock || !c.terms.refills() || deep || h.breaks(BreakRefundSeries) {
		return c.refill(now, units, deep)
	}
	if c.series.sentSince(then, now) {
		return 0, short
	}
	// So that no report reads the level in between.
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.series.sentSince(then, now) {
		return 0, short
	}
	return c.refill(now, units, false)
}

// freeSlots frees slots that are counted in a cell of t. False: the cell was replaced; look again.
func (h *Holder) freeSlots(t *tab, c *cell, units int64) bool {
	if c.free(units) {
		return true
	}
	// Slots that may not be kept: whoever replaces the cell must find both the word and the total
	// changed, or neither.
	h.mu.Lock()
	defer h.mu.Unlock()
	if t.cell.Load() != c {
		return false
	}
	rest, _ := c.refill(0, units, false)
	t.returned.Add(rest)
	h.note(t)
	// They were recalled, so somebody waits for them.
	if p := h.ownerOf(t.bucket.part); p != nil && rest > 0 {
		h.wake(p.id)
	}
	return true
}

// chargeMore charges what a reservation cost beyond what it had reserved.
func (h *Holder) chargeMore(at Instant, s *tab, units int64) {
	units = min(units, limiter.MaxUnits)
	for range tries {
		cell := s.bucket.lease.Load()
		if cell == nil || cell.kind == kindSlots || !cell.spendable(at) {
			break
		}
		taken, v := cell.takeUpTo(at.Now, units)
		if v == moving {
			h.settleDown()
			continue
		}
		if v == took && cell.spendable(h.cfg.Clock()) {
			units -= taken
		}
		break
	}
	if units > 0 {
		s.debt.Add(units)
		h.note(s)
	}
}
