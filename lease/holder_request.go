package lease

import (
	"math"
	"slices"
	"time"

	"headgate/limiter"
)

const (
	// lookEvery is how long the queue of an owner is left alone between requests that carry asks.
	lookEvery = 10 * time.Millisecond
	// againAfter is how long an answer may take before what the request said is said again, at least.
	againAfter = 100 * time.Millisecond
	// hintEvery is how often a lease is reported that is in use, at most: with each keep-alive.
	hintEvery = KeepEvery * 4 / 5
	// tellEvery is how often a lease is reported of which nothing changed.
	tellEvery = time.Second
	// maxLooked bounds the series that one request looks at, and maxLookedAsking one that carries asks,
	// of which there may be many.
	maxLooked       = 8 * maxSaid
	maxLookedAsking = maxSaid / 2
	// sweepEvery is how often up to maxSwept buckets are looked at for some to forget.
	sweepEvery = 100 * time.Millisecond
	maxSwept   = 4096
	// wakeEvery is how often an owner is told that a bucket is low, unless a keep-alive goes.
	wakeEvery = 20 * time.Millisecond
	// rttGuess is how long an answer takes as long as none has come.
	rttGuess = 2 * time.Millisecond
)

// Request is the next message to an owner, with these Asks. It reads the clock: the caller sends it at
// once. nil: the owner is not in the view.
func (h *Holder) Request(owner uint64, asks []Ask) *Request {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.peer(owner)
	if p == nil {
		return nil
	}
	at := h.cfg.Clock()
	h.sort()
	p.seq++
	w := writer{h: h, p: p, at: at, r: &Request{
		Holder: h.cfg.Self, Owner: owner, Epoch: h.view.Load().Epoch, Seq: p.seq, Dropped: p.names(at.Now), Asks: asks,
	}}
	if p.session != nil {
		w.r.Session = p.session.number
	}
	w.r.Reports, p.extra = append(w.r.Reports, p.extra...), nil
	for i := range asks {
		w.asked(&asks[i])
	}
	if len(asks) == 0 || at.Now-p.looked >= int64(lookEvery) {
		p.looked = at.Now
		most := maxLooked
		if len(asks) > 0 {
			most = maxLookedAsking
		}
		w.look(most)
		h.sweepAtTimes(at.Now)
	}
	if len(p.rolls) > 0 {
		w.r.Roll = p.rolls[0]
	}
	for i := range asks {
		h.sendsOff(&asks[i], owner, at.Now)
		if asks[i].mayLend() {
			p.asking = max(1, at.Now)
		}
	}
	if len(p.flights) >= maxFlight {
		p.flights = append(p.flights[:0], p.flights[1:]...)
	}
	// After the levels were read, so that of what was taken later they say nothing.
	last := tickOf(h.cfg.Clock().Now)
	for _, it := range w.items {
		it.series.told = false
		it.series.sent.Store(uint32(last))
	}
	p.flights = append(p.flights, flight{seq: p.seq, sent: at.Now, items: w.items})
	return w.r
}

// mayLend says whether an ask may bring a lease. It counts at the owner until somebody else wants it, and slots until
// this holder says that it has them no more; so it goes on speaking to the owner until it must have heard of them,
// also where the answer is lost.
func (a *Ask) mayLend() bool {
	return !a.Peek && slices.ContainsFunc(a.Charges, func(c AskCharge) bool {
		return c.Limit.Algorithm != limiter.SlidingWindow && c.Limit.Algorithm != limiter.SlidingLog
	})
}

// sendsOff notes whom an ask goes to.
func (h *Holder) sendsOff(a *Ask, owner uint64, now int64) {
	h.remember(asked{id: a.ID, owner: owner, peek: a.Peek})
	if a.Peek {
		return
	}
	for i := range a.Charges {
		if b := h.lookup(&a.Charges[i].Key); b != nil {
			b.pending++
			b.askedAt = tickOf(now)
		}
	}
}

// writer fills in a request's reports.
type writer struct {
	h     *Holder
	p     *lender
	at    Instant
	r     *Request
	items []flown
}

// asked reports the buckets that an ask is about. A lease that does not cover it goes back with it, so
// that the owner decides on all that there is. Slots that are free go back, and the lease stays.
func (w *writer) asked(a *Ask) {
	for i := range a.Charges {
		c := &a.Charges[i]
		b := w.h.lookup(&c.Key)
		if b == nil {
			if a.Peek {
				continue
			}
			if b = w.h.make(&c.Bucket, false); b == nil {
				continue
			}
			b.ask(c.Cost)
		}
		if cell := b.lease.Load(); cell != nil && !a.Peek {
			w.giveUp(cell, c)
		}
		b.demand.look(b, w.at.Now)
		if s := b.newest(w.p.id); s != nil {
			w.report(s)
		} else if len(w.r.Reports) < maxSaid {
			w.r.Reports = append(w.r.Reports, Report{Bucket: b.bucket(), Demand: b.demand.per1024(), Cost: b.demand.cost()})
		}
	}
}

// giveUp ends a lease that does not cover a charge on its owner's way. One that is only frozen stays.
func (w *writer) giveUp(cell *cell, c *AskCharge) {
	s, word := cell.series, cell.word.Load()
	if w.at.Now >= s.deadline() || s.detached {
		return
	}
	suits := cell.terms.suits(&c.Limit)
	if suits && cell.terms.inWindow(w.at.Wall) && cell.holds(word, w.at.Now) >= c.Cost {
		return
	}
	if cell.kind == kindSlots && suits {
		if cell.holds(word, w.at.Now) > 0 {
			w.h.returnFree(s, cell)
		}
		return
	}
	w.h.kill(s, w.at.Now, true)
}

// returnFree gives back the free slots of a lease that stays.
func (h *Holder) returnFree(s *tab, c *cell) {
	inUse := c.word.Swap(sealed)
	s.returned.Add(max(0, s.granted-s.returned.Load()-inUse))
	n := c.copy()
	n.depth, n.deep = inUse, inUse
	n.word.Store(inUse)
	s.cell.Store(n)
	s.bucket.lease.Store(n)
}

// Yield gives back the slots of a bucket's lease that are free, and wakes their owner. The lease stays.
func (h *Holder) Yield(key *limiter.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.lookup(key)
	if b == nil {
		return
	}
	c, at := b.lease.Load(), h.cfg.Clock()
	if c == nil || c.kind != kindSlots || c.series.detached || at.Now >= c.series.deadline() || c.holds(c.word.Load(), at.Now) == 0 {
		return
	}
	h.returnFree(c.series, c)
	h.enqueue(c.series)
	if p := h.ownerOf(b.part); p != nil {
		h.wake(p.id)
	}
}

// newest is the series of a bucket that an owner is to hear of with an ask: its newest.
func (b *purse) newest(granter uint64) *tab {
	for s := b.series; s != nil; s = s.next() {
		if s.granter() == granter && s.number != 0 {
			return s
		}
	}
	return nil
}

// look goes through the queue, the longest unheard first, and reports what is new, and each lease
// every second. It looks at most of them.
func (w *writer) look(most int) {
	p := w.p
	p.backlog = false
	for i := range len(p.queue) {
		full := len(w.r.Reports) >= maxSaid
		if p.backlog = full; full || i >= most {
			return
		}
		s := p.queue[0]
		again := w.visit(s) // s is still in the queue
		p.queue[0], p.queue = nil, p.queue[1:]
		if s.queued = again; again {
			p.queue = append(p.queue, s)
		}
	}
}

// visit reports a series if that is due, and says whether to look at it again.
func (w *writer) visit(s *tab) bool {
	if s.gone || s.number == 0 || w.waitsForRoll(s) {
		return !s.gone
	}
	b, now := s.bucket, w.at.Now
	live := s.live()
	if live {
		b.demand.look(b, now)
		cell := s.cell.Load()
		if t := cell.terms; w.at.Wall != 0 && t.closes != 0 && w.at.Wall >= t.closes {
			w.h.kill(s, now, true)
			live = false
		} else if !s.detached {
			w.h.rearm(s, cell, w.p, now, false)
		}
	}
	settled := !s.news()
	age := s.sentAt().age(now)
	waits := s.totals().said() == s.said && age < max(int64(againAfter), 4*w.p.rtt)
	hint := int64(tellEvery)
	switch woken := tick(b.wokenAt.Load()); {
	case woken.age(now) <= age:
		hint = 0
	case b.demand.news() || b.demand.usedAt.age(now) < age || b.asked.Load() != 0:
		hint = int64(hintEvery)
	}
	if !settled && !waits || live && age >= hint {
		w.report(s)
	}
	return live || !settled
}

// waitsForRoll says whether the slots of a series are first to be counted by a roll. That goes with the
// same request is not enough: an owner that has not stepped as far takes the report and not the roll.
func (w *writer) waitsForRoll(s *tab) bool {
	return len(w.p.rolls) > 0 && w.p.rolls[0].Epoch <= s.rarely().after
}

// report says where a series stands, once a request.
func (w *writer) report(s *tab) {
	if s.told || len(w.r.Reports) >= maxSaid || w.waitsForRoll(s) {
		return
	}
	b, t := s.bucket, s.totals()
	r := Report{
		Bucket: b.bucket(), Granter: s.granter(), Series: s.number,
		Ack: t.ack, Returned: t.returned, Refunded: t.refunded, Debt: t.debt, Idle: t.idle, Closed: t.closed,
		Demand: b.demand.per1024(), Cost: b.demand.cost(),
	}
	if c := s.cell.Load(); c != nil && !s.dead {
		r.Level = c.holds(c.word.Load(), w.at.Now)
	}
	b.demand.told = b.demand.units
	s.said, s.told = t.said(), true
	w.r.Reports = append(w.r.Reports, r)
	w.items = append(w.items, flown{s, t.mark(), t.debt, t.closed})
	w.h.enqueue(s)
}

// rearm sets the level below which the owner is to hear of a lease at once: when something came, or
// it is a while since it last did.
func (h *Holder) rearm(s *tab, c *cell, p *lender, now int64, came bool) {
	b := s.bucket
	if c.kind == kindSlots || c.depth == 0 || !came && tick(b.wokenAt.Load()).age(now) < int64(wakeEvery) {
		return
	}
	rate := 0.0
	rtt := max(p.rtt, int64(rttGuess))
	if c.kind == kindRate {
		l := &c.terms.limit.Rate
		rate = float64(l.Count) / float64(l.Per) * 1e9 * float64(c.share) / ShareOne
	}
	low := min(b.demand.low(rate, rtt), c.depth)
	if c.kind == kindRate {
		low = min(c.pace().up(low), c.deep)
	}
	s.low.Store(math.Float32bits(float32(low)))
}

// Decided takes an owner's decision on the charges in which, after Handle of the Response that brought
// it. sent is the reading before the request with the Ask was sent. Not ok: it came too late, from
// nobody who was asked, or a slot that came with it is taken here already: nothing is held of which, and
// the owner may be asked again. Otherwise refused is -1 (all of which are held; a
// shadow charge perhaps not), the index in cs of the refusing charge, TableFull or NotOwner (then
// nothing of which is held). A decision on a peek only fills ds.
func (h *Holder) Decided(cs []limiter.Charge, which uint32, d *AskDecision, sent int64, ds []limiter.Decision) (refused int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := h.cfg.Clock() // R7: not what it was before somebody else had the lock
	a := &h.asks[d.ID%uint64(len(h.asks))]
	order := indices(which, len(cs))
	if d.ID == 0 || a.id != d.ID || len(d.Charges) != 0 && len(d.Charges) != len(order) ||
		len(d.Charges) == 0 && d.Refused >= -1 || d.Refused >= len(order) || d.Refused < NotOwner {
		h.stats.rejected.Add(1)
		return NotOwner, false
	}
	a.id = 0
	for k, i := range order {
		if !a.peek {
			cs[i].Held, cs[i].At = nil, limiter.NotTaken
			h.decidedOn(&cs[i])
		}
		if len(d.Charges) > 0 {
			ds[i] = d.Charges[k].Decision
			ds[i].By = limiter.ByOwner
		}
	}
	switch {
	case d.Refused >= 0:
		return order[d.Refused], true
	case d.Refused != -1 || a.peek:
		return d.Refused, true
	}
	left := min(max(d.Left, 0), int64(sessionFor))
	if at.Now >= sent+left/100*98 && !h.breaks(BreakSecondReading) {
		h.stats.void.Add(1)
		return NotOwner, false
	}
	for k, i := range order {
		if !h.hold(&cs[i], a.owner, &d.Charges[k], at, sent) {
			// Somebody here was faster with the slot: the owner may have another.
			for _, j := range order[:k] {
				h.giveDirect(&cs[j], at.Now)
			}
			h.refundRest(cs, order[k+1:], a.owner, d.Charges[k+1:], at.Now, sent)
			return NotOwner, false
		}
	}
	return -1, true
}

// indices lists the bits of a set below n.
func indices(which uint32, n int) (order []int) {
	for i := range n {
		if which>>i&1 == 1 {
			order = append(order, i)
		}
	}
	return order
}

// decidedOn notes that an ask about a charge is over.
func (h *Holder) decidedOn(c *limiter.Charge) {
	b := h.lookup(&c.Key)
	if b == nil {
		return
	}
	if b.pending = max(0, b.pending-1); b.pending == 0 {
		for s := b.series; s != nil; s = s.next() {
			if s.dead && s.news() {
				h.enqueue(s)
			}
		}
	}
	if r := b.refusal.Load(); r != nil && r.terms == nil {
		known := *r
		known.terms = h.share(c.Limit, 0)
		b.refusal.Store(&known)
	}
}

// hold holds a charge that the owner decided. False: it was a slot, and there is none any more.
func (h *Holder) hold(c *limiter.Charge, owner uint64, d *ChargeDecision, at Instant, sent int64) bool {
	if !d.Admitted || d.Series == 0 {
		return true
	}
	if d.Lent {
		b := h.lookup(&c.Key)
		if b == nil {
			return false
		}
		s := b.find(owner, d.Series)
		if s == nil {
			return false
		}
		cell := s.cell.Load()
		if cell == nil || !s.live() || !cell.spendable(at) {
			return false
		}
		if _, v := cell.take(at.Now, max(c.Cost, 0)); v != took {
			return false
		}
		c.Held, c.At = s, d.At
		return true
	}
	s := h.directSeries(c, owner, d.Series, at.Now)
	s.open.Add(1)
	c.Held, c.At = &direct{s, sent}, d.At
	return true
}

// directSeries finds or makes the series that a direct decision names. Those before it that never had a
// lease the owner will not name any more: of windows there is one for each.
func (h *Holder) directSeries(c *limiter.Charge, owner, number uint64, now int64) *tab {
	_, where := h.Owner(c)
	b := h.make(&where, true)
	s := b.find(owner, number)
	if s == nil {
		for o := b.series; o != nil; o = o.next() {
			if o.number != 0 && o.number < number && !o.dead && !o.lent && o.cell.Load() == nil && o.granter() == owner {
				h.kill(o, now, false)
			}
		}
		p := h.peer(owner)
		s = newTab(b, h.sessionOf(owner), number)
		s.detached = h.ownerOf(b.part) != p
		if p != nil {
			// What it had been granted is not known any more.
			if p.knew(number) {
				s.dead, s.aside().lost = true, true
			}
		}
	}
	return s
}

// giveDirect gives back a charge that the owner decided, under the lock.
func (h *Holder) giveDirect(c *limiter.Charge, now int64) {
	cost := min(max(c.Cost, 0), limiter.MaxUnits)
	switch held := c.Held.(type) {
	case *direct:
		held.series.refunded.Add(h.undone(now, held.asked, c.Limit, held.series.bucket, cost))
		held.series.open.Add(-1)
		h.enqueue(held.series)
	case *tab:
		if cell := held.cell.Load(); cell != nil {
			rest, _ := cell.refill(0, cost, false) // slots
			held.returned.Add(rest)
			h.enqueue(held)
		}
	}
	c.Held, c.At = nil, limiter.NotTaken
}

// refundRest gives back what the owner took for charges that are not held now. Slots among them lie in
// their lease.
func (h *Holder) refundRest(cs []limiter.Charge, order []int, owner uint64, ds []ChargeDecision, now, sent int64) {
	for k, i := range order {
		if d := &ds[k]; d.Admitted && d.Series != 0 && !d.Lent {
			s := h.directSeries(&cs[i], owner, d.Series, now)
			s.refunded.Add(h.undone(now, sent, cs[i].Limit, s.bucket, min(max(cs[i].Cost, 0), limiter.MaxUnits)))
			h.enqueue(s)
		}
	}
}

// remember notes whom an ask went to. IDs come in order, so that the ring is full when one is as large as it.
func (h *Holder) remember(a asked) {
	if n := uint64(len(h.asks)); a.id >= n && n < maxAsked {
		grown := make([]asked, 2*n)
		for _, old := range h.asks {
			grown[old.id%(2*n)] = old
		}
		h.asks = grown
	}
	h.asks[a.id%uint64(len(h.asks))] = a
}
