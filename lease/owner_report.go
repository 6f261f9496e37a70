package lease

import (
	"headgate/limiter"
)

// early is a report on a partition that is still to be handed over.
type early struct {
	holder uint64
	epoch  uint64
	report Report
}

// report takes what a holder says of one series (R3, R6, R8).
func (o *Owner) report(at Instant, p *peer, epoch uint64, r *Report) {
	if uint64(r.Partition) >= uint64(len(o.parts)) || r.Returned < 0 || r.Refunded < 0 || r.Debt < 0 ||
		max(r.Returned, r.Refunded, r.Debt) > maxTotal || r.Level < 0 || r.Demand < 0 || r.Cost < 0 {
		o.stats.Rejected++
		return
	}
	part := &o.parts[r.Partition]
	if part.since == 0 {
		return // the holder has not heard of the view that took it away, or forged it
	}
	if r.Series == 0 {
		o.asked(at, p, r)
		return
	}
	b, id := o.find(&r.Key)
	i := uint32(0)
	if b != nil && b.partition == r.Partition {
		i = o.seriesBy(b, r.Granter, r.Series)
	}
	switch {
	case i != 0:
	case !part.known(at): // also of a series that this owner opened: the partition may have been elsewhere since
		o.await(p, epoch, r, part.step+earlyFor)
		return
	default:
		o.forgotten(p, r)
		return
	}
	if o.pool.at(i).peer != p.index {
		o.stats.Rejected++
		return
	}
	o.touch(at, b)
	o.take(at, p, epoch, id, b, i, r)
	if (r.Idle || r.Closed) && r.Demand > 0 {
		o.asked(at, p, r) // its demand outlives the series
	}
}

// await keeps a report for the hand-over that may bring its series until then.
func (o *Owner) await(p *peer, epoch uint64, r *Report, until int64) {
	if len(o.early) >= maxEarly {
		o.stats.LostDebt += r.Debt
		return
	}
	o.early = append(o.early, early{p.incarnation, epoch, *r})
	o.earlyAt = min(o.earlyAt, until)
}

// installEarly applies the reports that waited for a hand-over that has come, or can come no more.
func (o *Owner) installEarly(at Instant) {
	kept := o.early[:0]
	o.earlyAt = never
	for i := range o.early {
		e := &o.early[i]
		if part := &o.parts[e.report.Partition]; !part.known(at) {
			kept = append(kept, *e)
			o.earlyAt = min(o.earlyAt, part.step+earlyFor)
			continue
		}
		if p := o.peer(e.holder); p != nil {
			o.report(at, p, e.epoch, &e.report)
		}
	}
	clear(o.early[len(kept):])
	o.early = kept
}

// forgotten answers for a series that nobody knows.
func (o *Owner) forgotten(p *peer, r *Report) {
	o.stats.LostDebt += r.Debt
	to := o.to(p)
	if len(to.Forgotten) < maxReports {
		to.Forgotten = append(to.Forgotten, Series{r.Granter, r.Series})
	}
}

// seriesBy finds a series on a bucket; 0: none.
func (o *Owner) seriesBy(b *bucket, granter, number uint64) uint32 {
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		if s.number() != number&(1<<numberBits-1) || number>>numberBits != 0 {
			continue
		}
		of := o.cfg.Self
		if s.is(seriesInherited) {
			of = o.inherited[i].granter
		}
		if of == granter {
			return i
		}
	}
	return 0
}

// take applies a report to its series, on a bucket that was touched. The acknowledgement comes before
// the totals: it is what lowers the outstanding units, above which nothing given back can rise.
func (o *Owner) take(at Instant, p *peer, epoch uint64, id uint32, b *bucket, i uint32, r *Report) {
	s := o.pool.at(i)
	was := s.is(seriesEnded)
	if r.Ack > uint64(s.sent) || !o.likely(b, s, was, r) {
		o.stats.Rejected++
		return
	}
	if (r.Idle || r.Closed) && !s.is(seriesSlots) {
		s.tagged |= dyingBit
	}
	if r.Ack == uint64(s.sent) && s.is(seriesPending) {
		if o.acked(b, s) {
			o.send(id, i)
		}
		o.stir(id)
	}
	// Of a series of an owner of before, nothing can revive the lease at a holder that has stepped on.
	moved := s.is(seriesInherited) && epoch >= o.parts[b.partition].since
	over := (r.Idle || r.Closed) && (r.Ack == uint64(s.sent) && !s.is(seriesPending) || moved)
	if over && !s.is(seriesEnded) {
		o.end(s)
		o.stir(id)
	}
	o.totals(at, id, b, i, was, r)
	if r.Ack == uint64(s.sent) { // else it was sent before the last grant came, which would be forgotten
		s.level = atLeast(r.Level)
	}
	s.demand, s.cost = newHint(r.Demand), newCoarse(r.Cost)
	s.reportedAt(at.Now)
	switch {
	case r.Closed && over && (!s.is(seriesSlots) || s.lent() == 0):
		o.unlink(b, i)
	case !r.Idle && !r.Closed && !s.is(seriesInherited):
		o.step.wants = append(o.step.wants, want{id: id, peer: p.index})
	}
}

// likely says whether totals can be: what comes back can't be more than what was given.
func (o *Owner) likely(b *bucket, s *series, late bool, r *Report) bool {
	returned, refunded := max(0, r.Returned-s.returned), max(0, r.Refunded-s.refunded)
	switch {
	case r.Debt-s.debt > limiter.MaxUnits, s.is(seriesSlots) && (r.Refunded > 0 || r.Debt > 0):
		return false
	case late && !s.is(seriesSlots):
		return refunded <= o.room(b, s)
	}
	return returned <= maxTotal-refunded && returned+refunded <= o.room(b, s)
}

// totals takes what of a series' totals is news.
func (o *Owner) totals(at Instant, id uint32, b *bucket, i uint32, late bool, r *Report) {
	s := o.pool.at(i)
	if o.cfg.Break&BreakRefundSeries != 0 && s.is(seriesEnded) {
		if l := o.live(b, o.peers[s.peer], at); l != 0 {
			s = o.pool.at(l)
		}
	}
	returned, refunded, debt := max(0, r.Returned-s.returned), max(0, r.Refunded-s.refunded), max(0, r.Debt-s.debt)
	if o.cfg.Break&BreakTotals != 0 {
		returned, refunded, debt = r.Returned, r.Refunded, r.Debt
	}
	s.returned, s.refunded, s.debt = min(s.returned+returned, maxTotal), min(s.refunded+refunded, maxTotal), min(s.debt+debt, maxTotal)
	if late && !s.is(seriesSlots) {
		returned = 0 // R7: it counts as spent already
	}
	o.credit(at, id, b, s, returned+refunded)
	if debt > 0 && !s.is(seriesSlots) {
		o.debit(at, id, b, debt)
	}
}

// room is how much more of what it was given the series' holder can give back.
func (o *Owner) room(b *bucket, s *series) int64 {
	if s.is(seriesSlots) {
		return s.lent()
	}
	room := 2.0 // roundings
	for i := b.first; i != 0; i = o.pool.at(i).next {
		if x := o.pool.at(i); x.peer == s.peer && !x.is(seriesSlots) {
			room += float64(x.granted-x.returned-x.refunded) + x.direct
		}
	}
	return int64(max(0, min(room, limiter.MaxUnits)))
}

// credit gives units of a series back to a bucket that was touched. Units are not slots: those of a
// limit that has become a semaphore since, or ceased to be one, mean something else.
func (o *Owner) credit(at Instant, id uint32, b *bucket, s *series, units int64) {
	if units <= 0 || s.is(seriesSlots) != (b.limit.Algorithm == limiter.Semaphore) {
		return
	}
	switch {
	case b.limit.Durable():
		o.refill(at, id, b, s, units)
	case byWall(b.limit) && s.high != o.slice(b, at):
		o.creditPast(at, b, s, units)
	default:
		_, depth := o.sums(b)
		b.limit.Credit(&b.state, reading(b.limit, at), units, o.floor(depth))
	}
	if r := o.recalls[id]; r != nil {
		r.came = true
	}
	o.stir(id)
	o.unrefuse(at, id, b)
}

// creditPast gives back what was charged in an earlier slice, where it still counts. Of an earlier fixed window it
// can only lower the debt that was carried over.
func (o *Owner) creditPast(at Instant, b *bucket, s *series, units int64) {
	began, ok := o.sliceBegan(b, s, at)
	switch {
	case !ok:
	case b.limit.Algorithm != limiter.SlidingLog:
		b.limit.Adjust(&b.state, at.Wall, began, units)
	case began+int64(b.limit.Rate.Per) > max(at.Wall, b.state.Newest()):
		b.limit.Credit(&b.state, at.Wall, units, 0)
	}
}

// debit takes units without asking.
func (o *Owner) debit(at Instant, id uint32, b *bucket, units int64) {
	if b.limit.Durable() {
		o.reservoir(id).left -= units
		return
	}
	b.limit.Debit(&b.state, reading(b.limit, at), units)
	if o.level(at, id, b) >= 0 {
		return
	}
	for i := b.first; i != 0; i = o.pool.at(i).next { // the rate pays debts first
		if s := o.pool.at(i); s.share > 0 && !s.is(seriesEnded|seriesPending|seriesInherited) {
			o.set(b, s, 0, s.depth)
			o.send(id, i)
		}
	}
}

// stir notes that asks that wait for a bucket may go on.
func (o *Owner) stir(id uint32) {
	if o.waiting[id] > 0 {
		o.step.stirred = append(o.step.stirred, id)
	}
}

// roll takes a holder's answer to the roll call: slots in use that other owners lent.
func (o *Owner) roll(at Instant, p *peer, r *Roll) {
	// Of a process that is no member nothing is taken: there is no session for the series.
	if r.Epoch > o.view.Epoch || len(r.Slots) > maxRolled || p.session == 0 {
		if len(r.Slots) > maxRolled {
			o.stats.Rejected++
		}
		return
	}
	o.to(p).RollTaken = max(r.Epoch, p.rolled)
	if r.Epoch <= p.rolled {
		return
	}
	p.rolled, p.wanted = r.Epoch, 0
	for i := range r.Slots {
		x := &r.Slots[i]
		if x.InUse < 0 || x.InUse > limiter.MaxUnits || x.Limit.Algorithm != limiter.Semaphore || x.Limit.Validate() != nil ||
			uint64(x.Partition) >= uint64(len(o.parts)) || !o.placed(&x.Bucket) {
			o.stats.Rejected++
			continue
		}
		if part := &o.parts[x.Partition]; part.since == 0 || part.since > r.Epoch || x.InUse == 0 {
			continue
		}
		o.rolledIn(at, p, x)
	}
}

// rolledIn opens a series of slots in use that an owner of before had lent.
func (o *Owner) rolledIn(at Instant, p *peer, x *RolledSlots) {
	b, id := o.find(&x.Key)
	if b == nil {
		b, id = o.make(&x.Key, o.told(&x.Limit), x.Partition, at)
	}
	if b.partition != x.Partition {
		o.stats.Rejected++
		return
	}
	o.touch(at, b)
	if !o.ahead(&x.Limit) {
		o.supersede(at, id, b, &x.Limit)
	}
	if b.limit.Algorithm != limiter.Semaphore {
		return
	}
	i, s := o.link(b, p, at)
	s.flags |= seriesRolled
	s.granted = x.InUse
	before := o.excess(at, b)
	b.limit.Debit(&b.state, at.Now, x.InUse)
	o.stats.Excess += uint64(o.excess(at, b) - before)
	o.set(b, s, 0, 0)
	o.send(id, i)
}

// excess is how many slots of a semaphore are lent above its limit.
func (o *Owner) excess(at Instant, b *bucket) int64 {
	return max(0, -b.limit.Level(&b.state, at.Now))
}

// placed says whether a bucket is in the partition that its key belongs to.
func (o *Owner) placed(b *Bucket) bool {
	if len(b.Key.Tenant)+len(b.Key.Limit)+len(b.Key.Subject) > maxKey {
		return false
	}
	return o.view.Place(Home(&b.Key, false)) == b.Partition || o.view.Place(Home(&b.Key, true)) == b.Partition
}
