package lease

import (
	"math"
	"slices"

	"headgate/limiter"
)

// Handle takes what an owner says. The caller routes r.Decisions by their ID to Decided afterwards.
func (h *Holder) Handle(r *Response) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := h.cfg.Clock()
	p := h.peer(r.Owner)
	switch {
	case r.Holder != h.cfg.Self || p != nil && r.Answers > p.seq || r.Left < 0 || r.Left > int64(sessionFor) || len(r.Leases) > maxSaid:
		h.stats.rejected.Add(1)
		return
	case p == nil:
		h.stats.discarded.Add(1)
		return
	}
	h.sort()
	f := p.land(r.Answers)
	// Before there is a session, too: who holds nothing of an owner has none with it, and is asked all the same.
	if r.RollWanted > 0 && r.Epoch <= h.view.Load().Epoch {
		h.rollAgain(p, r.RollWanted)
	}
	if r.Session == 0 {
		return
	}
	if f != nil {
		// The average leans to the last: it is for the low-water mark, which wants to be early.
		took := max(at.Now-f.sent, 0)
		p.rtt += (took - p.rtt) / 4
		if f.sent-p.asking >= int64(askFor) {
			p.asking = 0
		}
	}
	current := h.adopt(p, r, f)
	if f != nil && r.Epoch <= h.view.Load().Epoch {
		h.acknowledge(r, f, at.Now)
	}
	for len(p.rolls) > 0 && r.RollTaken >= p.rolls[0].Epoch && r.RollTaken <= h.view.Load().Epoch {
		p.rolls = p.rolls[1:]
	}
	h.returnDetached(p, r, at.Now)
	for i := range r.Leases {
		if l := &r.Leases[i]; !current || !h.owns(r, l.Partition) {
			h.stats.discarded.Add(1)
		} else if !h.applyLease(p, l, at, r.Answers == 0) {
			h.stats.rejected.Add(1)
		}
	}
	for i := range r.Refusals[:min(len(r.Refusals), maxSaid)] { // hints: what is more is left
		if f := &r.Refusals[i]; !h.owns(r, f.Partition) {
			h.stats.discarded.Add(1)
		} else if !h.applyRefusal(f, at.Now) {
			h.stats.rejected.Add(1)
		}
	}
	if p.backlog && f != nil {
		h.wake(p.id)
	}
}

// land ends a flight; nil: it is not known.
func (p *lender) land(seq uint64) *flight {
	for i := range p.flights {
		if f := p.flights[i]; f.seq == seq {
			p.flights = append(p.flights[:i], p.flights[i+1:]...)
			return &f
		}
	}
	return nil
}

// owns says whether a response speaks for a partition: its sender owns it, and had stepped to the view
// that made it the owner.
func (h *Holder) owns(r *Response, part uint32) bool {
	return uint64(part) < uint64(len(h.since)) && h.view.Load().OwnerOf(part).Incarnation == r.Owner && r.Epoch >= h.since[part]
}

// adopt goes by the session that a response names (R5), extends it if it answers (R4), and says
// whether it is the one that this holder goes by.
func (h *Holder) adopt(p *lender, r *Response, f *flight) bool {
	if p.session == nil || p.session.number != r.Session {
		newer := r.Session > p.dropped && (p.session == nil || r.Session > p.session.number)
		if !newer && !h.breaks(BreakNumbers) {
			return false
		}
		h.dropSession(p)
		p.session = newSession(p.id, r.Session)
	}
	// Who has not stepped to the owner's view does not know which partitions have left it.
	if f != nil && r.Left > 0 && r.Epoch <= h.view.Load().Epoch {
		d := &p.session.deadline
		d.Store(max(d.Load(), f.sent+r.Left/100*98))
	}
	return true
}

// dropSession ends the session that the holder goes by: what was lent in it is lost, save for slots
// in use. Series stay for what is to be settled.
func (h *Holder) dropSession(p *lender) {
	s := p.session
	if s == nil {
		return
	}
	s.deadline.Store(ended) // nothing is spent of it from here on
	p.session, p.dropped = nil, max(p.dropped, s.number)
	for _, b := range h.buckets {
		for t := b.series; t != nil; t = t.next() {
			if t.session.Load() == s && !t.detached && !t.dead {
				h.kill(t, 0, false)
			}
		}
	}
}

// acknowledge notes what an owner has, and forgets what is closed, or unknown to it.
func (h *Holder) acknowledge(r *Response, f *flight, now int64) {
	for _, it := range f.items {
		s := it.series
		if s.gone || !h.owns(r, s.bucket.part) {
			continue
		}
		for _, g := range r.Forgotten {
			if g.Granter == s.granter() && g.Number == s.number {
				h.stats.lostDebt.Add(uint64(max(0, s.debt.Load()-s.rarely().owed)))
				h.forget(s, now)
				break
			}
		}
		if s.gone {
			continue
		}
		switch {
		case it.mark > s.settled:
			s.settled, s.closed = it.mark, it.closed
			if it.debt > 0 {
				s.aside().owed = it.debt
			}
		case it.mark == s.settled:
			s.closed = s.closed || it.closed
		}
		// An owner that still lends in it is to hear once more, also where that came before this answer.
		if s.closed && s.dead && !s.news() && !slices.ContainsFunc(r.Leases, func(l Lease) bool { return l.Series == s.number && s.granter() == r.Owner }) {
			h.forget(s, now)
		}
	}
}

// returnDetached gives the leases of owners of before to the owner that speaks now, unless they have
// ended: a late return refunds nothing.
func (h *Holder) returnDetached(p *lender, r *Response, now int64) {
	stay := p.detached[:0]
	for _, s := range p.detached {
		switch {
		case s.gone || s.dead || s.cell.Load() == nil:
		case h.owns(r, s.bucket.part):
			h.kill(s, now, now < s.deadline())
		default:
			stay = append(stay, s)
		}
	}
	clear(p.detached[len(stay):])
	p.detached = stay
}

// applyRefusal takes a refusal lease, or the end of one. False: it can't be true.
func (h *Holder) applyRefusal(f *Refusal, now int64) bool {
	if f.For < 0 || f.RetryAfter < 0 || f.Cost < 0 || f.Level > limiter.MaxUnits || f.Level < -limiter.MaxUnits {
		return false
	}
	if f.For == 0 {
		if b := h.lookup(&f.Key); b != nil {
			b.refusal.Store(nil)
		}
		return true
	}
	b := h.make(&f.Bucket, false)
	if b == nil {
		return true
	}
	r := &refusal{cost: max(f.Cost, 1), at: now, until: now + min(f.For, int64(maxRefusal)), retryAt: int64(limiter.Never), level: f.Level}
	if f.RetryAfter < math.MaxInt64-max(now, 0) {
		r.retryAt = now + f.RetryAfter
	}
	if c := b.lease.Load(); c != nil {
		r.terms = c.terms
	}
	b.refusal.Store(r)
	return true
}

// plausible says whether a lease could be one.
func (l *Lease) plausible() bool {
	if l.Series == 0 || l.Number == 0 || l.Number > math.MaxUint32 || l.Share > ShareOne || l.Depth < 0 || l.Granted < 0 || l.Granted > math.MaxInt64/2 ||
		l.Limit.Validate() != nil || l.Depth > l.Limit.Capacity() {
		return false
	}
	switch l.Limit.Algorithm {
	case limiter.GCRA:
		return true
	case limiter.FixedWindow:
		return l.Share == 0 && l.Window >= 0 && l.Window < math.MaxInt64/2/int64(l.Limit.Rate.Per)
	case limiter.Semaphore:
		return l.Share == 0
	}
	return l.ends()
}

// ends says whether a lease is an end, whatever the limit has become that it stands under.
func (l *Lease) ends() bool { return l.Depth == 0 && l.Share == 0 }

// window is the index of a lease's window, 0 where it has none.
func (l *Lease) window() int64 {
	if l.Limit.Algorithm == limiter.FixedWindow {
		return l.Window
	}
	return 0
}

// applyLease takes what an owner lends. False: it can't be true.
func (h *Holder) applyLease(p *lender, l *Lease, at Instant, pushed bool) bool {
	if !l.plausible() {
		return false
	}
	b := h.lookup(&l.Key)
	if b != nil && b.part != l.Partition || b == nil && !h.placed(l) {
		return false
	}
	var s *tab
	if b != nil {
		b.refusal.Store(nil)
		if s = b.find(p.id, l.Series); s == nil && l.Rolled {
			if s = b.find(p.id, 0); s != nil {
				s.number, s.granted = l.Series, l.Granted
				s.session.Store(p.session)
			}
		}
	}
	if s == nil {
		if s = h.open(p, l); s == nil {
			return true
		}
	}
	slots := l.Limit.Algorithm == limiter.Semaphore
	window := l.window()
	switch {
	case !s.lent:
		if s.lent, s.slots = true, slots; window != 0 {
			s.aside().window = window
		}
	case l.ends():
	case s.slots != slots || s.rarely().window != window:
		return false
	}
	if uint32(l.Number) < s.ack || uint32(l.Number) == s.ack && l.Granted <= s.granted {
		h.enqueue(s) // it is said again because the owner does not know that it came
		s.settled = -1
		return true
	}
	h.replace(p, s, l, at, pushed)
	return true
}

// placed says whether a lease's bucket may live in its partition.
func (h *Holder) placed(l *Lease) bool {
	place := h.view.Load().Place
	return place(Home(&l.Key, false)) == l.Partition || place(Home(&l.Key, true)) == l.Partition
}

// open makes the series of a lease that is not known. nil: it was closed before, or there is no room,
// or this process takes no more: then the owner hears that it is closed.
func (h *Holder) open(p *lender, l *Lease) *tab {
	back := l.Granted
	if h.share(&l.Limit, l.window()).refills() {
		back = min(back, l.Depth)
	}
	switch {
	case !p.knew(l.Series) && !h.draining:
		if b := h.make(&l.Bucket, false); b != nil {
			return newTab(b, p.session, l.Series)
		}
		h.stats.full.Add(1)
	case p.knew(l.Series) && l.Limit.Algorithm != limiter.Semaphore:
		back = 0 // of what was spent nothing is known any more; slots were all returned
	}
	p.shutSeries(l.Series)
	if len(p.extra) < maxSaid {
		p.extra = append(p.extra, Report{
			Bucket: l.Bucket, Granter: p.id, Series: l.Series, Ack: l.Number, Returned: back, Idle: true, Closed: true,
		})
	}
	return nil
}

// knew says whether a series of an owner that is not known may have been known before.
func (p *lender) knew(series uint64) bool {
	return series <= p.shutUpTo || p.shut[series] || p.shutBefore[series]
}

// replace applies a lease to its series: what is new in Granted is put in, and what is above the depth
// then goes back.
func (h *Holder) replace(p *lender, s *tab, l *Lease, at Instant, pushed bool) {
	b := s.bucket
	fresh := max(0, l.Granted-s.granted)
	if h.breaks(BreakTotals) {
		fresh = l.Granted
	}
	s.granted = max(s.granted, l.Granted)
	old := s.cell.Load()
	if other := b.lease.Load(); other != nil && other.series != s {
		o := other.series
		if o.granter() == p.id && o.number > s.number && !o.detached {
			s.dead = true // a newer one lives
		} else {
			h.kill(o, at.Now, !o.detached || at.Now < o.deadline())
		}
	}
	if h.draining || l.Depth == 0 || s.session.Load() != p.session || s.detached {
		s.dead = true
	}
	shrunk := old != nil && (l.Depth < old.depth || l.Share < old.share)
	s.ack = max(s.ack, uint32(l.Number))
	h.enqueue(s)
	if s.dead {
		// A lease that has ended is not revived: what comes for it goes back.
		h.kill(s, at.Now, true)
		switch {
		case s.slots:
			fresh = max(0, s.granted-s.returned.Load()-s.inUse())
		case s.rarely().lost:
			fresh = 0
		case h.share(&l.Limit, l.window()).refills():
			// No more than the owner counts for the lease: the rest has come to it anew meanwhile.
			a := s.aside()
			room := max(0, a.room, l.Depth-a.back)
			fresh = min(fresh, room)
			a.room, a.back = room-fresh, a.back+fresh
		}
		s.returned.Add(fresh)
		if pushed || fresh > 0 {
			h.wake(p.id) // a recall: somebody waits; or what comes for who gave its lease back with an ask
		}
		return
	}
	c := h.cellOf(s, l)
	if s.slots {
		h.fillSlots(s, old, c, l.Depth)
	} else {
		h.fill(s, old, c, fresh, at.Now)
	}
	if !s.live() {
		p.leases++
	}
	s.low.Store(0) // it is of the old cell
	h.rearm(s, c, p, at.Now, fresh > 0)
	s.cell.Store(c)
	b.lease.Store(c)
	if shrunk && pushed {
		h.wake(p.id)
	}
}

// cellOf makes the cell of a lease.
func (h *Holder) cellOf(s *tab, l *Lease) *cell {
	t := h.share(&l.Limit, l.window())
	c := &cell{tariff: &t.plain, series: s, depth: l.Depth, deep: l.Depth, level: l.Level}
	if l.Share == 0 {
		return c
	}
	x := newPace(l.Limit.Rate, l.Share)
	fill := x.down(l.Depth)
	switch {
	case fill > maxFill:
		c.tariff = &tariff{terms: t, kind: kindBlock, share: l.Share}
	case l.Share == ShareOne:
		c.tariff, c.deep = &t.full, fill
	default:
		c.tariff, c.deep = &tariff{terms: t, kind: kindRate, m: x.m, e: x.e, share: l.Share}, fill
	}
	return c
}

// fill moves the level of the old cell, if any, and fresh units into the new one.
func (h *Holder) fill(s *tab, old, c *cell, fresh, now int64) {
	level, over := int64(0), int64(0) // in c's unit; over: in units
	if old != nil {
		w := old.word.Swap(sealed)
		switch {
		case old.kind == kindRate && c.kind == kindRate:
			// Not by way of whole units: a little would be lost each time.
			was := old.inWord(w, now)
			level = old.pace().carry(was, c.pace(), c.deep)
			// Less the roundings, of which there may be many units in a nanosecond.
			if rest := was - c.pace().carry(level, old.pace(), was) - 2; level == c.deep && rest > 0 {
				over = old.pace().units(rest, old.depth)
			}
		case c.kind == kindRate:
			fresh += old.holds(w, now)
		default:
			level = old.holds(w, now)
		}
	}
	if c.kind == kindRate {
		room := c.deep - level
		if put := c.pace().down(fresh); put > room {
			over += c.pace().units(put-room, fresh)
			level = c.deep
		} else {
			level += put
		}
		c.word.Store(now + c.deep - level)
	} else {
		over += max(0, level+fresh-c.depth)
		c.word.Store(min(level+fresh, c.depth))
	}
	if c.terms.refills() {
		// What the owner counts for the lease and the lease does not hold any more. The rest has come to
		// the owner anew while it was on its way here.
		was := int64(0)
		if old != nil {
			was = old.depth
		}
		over = min(over, max(0, was-c.depth))
	}
	if over > 0 {
		s.returned.Add(over)
	}
}

// fillSlots is fill for slots: those lent are all that were granted and not returned.
func (h *Holder) fillSlots(s *tab, old, c *cell, depth int64) {
	inUse := int64(0)
	if old != nil {
		inUse = old.word.Swap(sealed)
	}
	lent := max(s.granted-s.returned.Load(), inUse)
	c.depth = min(depth, lent)
	c.deep = c.depth
	s.returned.Add(max(0, lent-max(c.depth, inUse)))
	c.word.Store(inUse)
}
