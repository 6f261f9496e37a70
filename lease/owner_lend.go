package lease

import (
	"math"
	"slices"

	"headgate/limiter"
)

// lend sizes the leases that a step asks for.
func (o *Owner) lend(at Instant) {
	for n := 0; n < len(o.step.wants); n++ {
		w := o.step.wants[n]
		asks, less := w.asks, w.less
		again := false
		for _, x := range o.step.wants[n+1:] {
			again = again || x.id == w.id && x.peer == w.peer
		}
		if again { // once a step, after all that happened in it
			for m := n + 1; m < len(o.step.wants); m++ {
				if x := &o.step.wants[m]; x.id == w.id && x.peer == w.peer {
					x.asks, x.less = x.asks || asks, x.less || less
				}
			}
			continue
		}
		if b, p := o.bucketOf(w.id), o.peers[w.peer]; b.limit != nil && p != nil && p.member && p.session != 0 {
			o.lendOne(at, w.id, b, p, asks, less)
		}
	}
}

// lendOne puts a peer's lease of a bucket to what the Sizer says, as far as there is as much (R1).
func (o *Owner) lendOne(at Instant, id uint32, b *bucket, p *peer, asks, less bool) {
	switch {
	case b.limit.Algorithm == limiter.SlidingWindow, b.limit.Algorithm == limiter.SlidingLog:
		return // decided here
	case b.limit.Algorithm == limiter.FixedWindow && o.window(b, at) == 0:
		return
	case !o.parts[b.partition].open(o, at, b.partition):
		return
	case b.limit.Algorithm == limiter.Semaphore:
		return // lent by decisions; free ones stay with the holder until somebody asks for them
	}
	o.touch(at, b)
	n := o.look(at, id, b, p, asks)
	share, depth, grant, hold := o.sizer.Size(&o.sight, n)
	i := o.live(b, p, at)
	lost := uint32(0)
	if i != 0 {
		lost = o.pool.at(i).share
	}
	if o.short(b, i, max(share, lost)) && o.endLapsed(at, b) {
		n = o.look(at, id, b, p, asks)
		share, depth, grant, hold = o.sizer.Size(&o.sight, n)
		i = o.live(b, p, at)
	}
	had := o.level(at, id, b)
	o.grant(at, id, b, p, i, share, depth, grant)
	if b.limit.Durable() {
		o.prefetch(at, id, b)
	}
	if i := o.denied(id, p); i >= 0 && refills(b.limit) {
		// A refusal of this step is of before: what went into the lease is not here any more.
		f := &o.to(p).Refusals[o.refusals[id][i].place]
		f.RetryAfter = later(f.RetryAfter, int64(b.limit.Fill(max(0, had-o.level(at, id, b)))))
	}
	if hold > 0 && (less || o.leased(b, p, at)) {
		o.hold(at, id, b, p, hold)
	}
}

// leased says whether a peer has a lease of a bucket.
func (o *Owner) leased(b *bucket, p *peer, at Instant) bool {
	i := o.live(b, p, at)
	return i != 0 && o.pool.at(i).depth > 0
}

// short says whether a share is more than what others leave.
func (o *Owner) short(b *bucket, but uint32, share uint32) bool {
	lent, _ := o.sums(b)
	if but != 0 {
		own, _ := o.pool.at(but).counted()
		lent -= own
	}
	return lent+uint64(share) > limiter.ShareOne
}

// grant cuts a lease to what there is and gives it.
func (o *Owner) grant(at Instant, id uint32, b *bucket, p *peer, i uint32, share uint32, depth, grant int64) {
	lentShare, lentDepth := o.sums(b)
	var s *series
	if i != 0 {
		s = o.pool.at(i)
		ownShare, ownDepth := s.counted()
		lentShare, lentDepth = lentShare-ownShare, lentDepth-ownDepth
	}
	level := max(0, o.level(at, id, b))
	grant = max(0, min(grant, level))
	depth = max(0, depth)
	if b.limit.Algorithm != limiter.GCRA || b.limit.Durable() {
		share = 0
	}
	if lentShare >= limiter.ShareOne || o.level(at, id, b) < 0 {
		share = 0 // a debt is paid by the whole rate
	}
	share = min(share, uint32(limiter.ShareOne-min(lentShare, limiter.ShareOne)))
	if o.cfg.Break&BreakDepth == 0 {
		depth = min(depth, o.deepest(at, id, b, s, lentDepth, grant))
	}
	depth = min(depth, b.limit.Capacity())
	if depth == 0 {
		share, grant = 0, 0
	}
	grant = min(grant, depth)
	if depth == 0 && grant == 0 && (s == nil || s.sent == 0 || s.depth == 0) {
		return
	}
	if s == nil {
		i, s = o.link(b, p, at)
	}
	o.change(at, id, b, i, s, share, depth, grant)
}

// deepest is the most that a lease may hold beside what others do (R1). A depth beyond what was taken
// out of the level would take that out, too, and nobody would get it.
func (o *Owner) deepest(at Instant, id uint32, b *bucket, s *series, others, grant int64) int64 {
	capacity := b.limit.Capacity()
	switch {
	case b.limit.Durable():
		if s != nil {
			grant += s.granted - s.returned - s.refunded
		}
		return max(0, min(grant, capacity-others))
	}
	return max(0, min(capacity, capacity-o.level(at, id, b)+grant)-others)
}

// change puts a lease under a share and depth and tokens into it. While a replacement is under way it
// only adds tokens.
func (o *Owner) change(at Instant, id uint32, b *bucket, i uint32, s *series, share uint32, depth, grant int64) {
	replace := s.sent == 0 || grant == 0 && (far(int64(s.share), int64(share)) || far(s.depth, depth)) ||
		grant > 0 && (s.share != share || s.depth != depth)
	counted, most := s.counted()
	block := counted == 0 && share == 0
	if s.is(seriesPending) {
		depth, replace = s.depth, false
		if block && b.limit.Algorithm == limiter.GCRA {
			return // what is in it will be known when it has acknowledged
		}
	}
	// What does not fit would be lost: the level above the depth has been refilled here already.
	grant = min(grant, max(0, depth-o.held(at, b, s)))
	replace = replace && (grant > 0 || s.sent == 0 || far(int64(s.share), int64(share)) || far(s.depth, depth))
	if !replace && grant == 0 {
		return
	}
	if s.sent == 0 {
		most = -grant // there is no lease yet that it could come on top of
	}
	if grant > 0 {
		o.debit(at, id, b, grant)
		s.granted += grant
		s.level = atLeast(s.level.value() + grant)
	}
	switch {
	case s.is(seriesPending):
		s.flags |= seriesMore
	case replace:
		o.set(b, s, share, depth)
	default:
		o.set(b, s, s.share, s.depth)
	}
	// Nothing flows into a block but what the owner puts there: with what comes it holds its depth at most.
	if grant > 0 && !block && refills(b.limit) {
		o.inFlightTo(s, most+grant)
	}
	o.send(id, i)
	o.advance(b, reading(b.limit, at)) // Σc may have risen
}

// inFlightTo counts a lease with the tokens that are on their way to it, until they are acknowledged: it
// may be full, and spend from that, before they come.
func (o *Owner) inFlightTo(s *series, most int64) {
	if !s.is(seriesPending) {
		return
	}
	_, was := s.counted()
	s.oldDepth = max(s.oldDepth, most)
	_, is := s.counted()
	o.stats.Outstanding += is - was
}

// held is what a lease may have by now: what was reported and granted since, and what its share brought.
func (o *Owner) held(at Instant, b *bucket, s *series) int64 {
	level := s.level.value()
	if share, depth := s.counted(); share > 0 {
		level = min(depth, level+b.limit.Earned(share, at.Now-s.reported(at.Now)))
	}
	return level
}

// far says whether two figures differ by more than a sixteenth, or one is 0.
func far(is, should int64) bool {
	d := is - should
	return (is == 0) != (should == 0) || max(d, -d) > max(is, should)/16
}

// hold refuses all further asks of a peer for a while: what its lease brings is its part. The word of the next is of
// what the owner has; the holder knows its lease. Where nobody else asks, or a typical cost takes longer to come than
// the hold, so that all may ask for it, the hold ends when both have that.
func (o *Owner) hold(at Instant, id uint32, b *bucket, p *peer, hold int64) {
	cost, in, whole := int64(1), int64(0), false
	if i := o.live(b, p, at); i != 0 {
		s := o.pool.at(i)
		whole = s.share == ShareOne // then its lease knows best when there is enough
		cost, in = max(1, s.cost.value()), min(o.has(at, b, s), s.depth)
	}
	if byWall(b.limit) {
		in = 0
	}
	both := o.alone(at, id, b, cost-in)
	alone := both
	if refills(b.limit) {
		alone = o.alone(at, id, b, 1)
	}
	others := 0
	for j := range o.sight.Holders {
		if o.sight.Holders[j].Demand > 0 {
			others++
		}
	}
	hold = min(hold, refusalAlone)
	if slow := int64(b.limit.Fill(cost)) > hold; !whole && (others <= 1 || slow) {
		hold = min(hold, both)
		if slow && o.backs(at, b, p) >= cost-o.level(at, id, b) {
			hold = min(hold, refusalLent) // it could not be recalled just now
		}
	}
	if hold <= 0 {
		return
	}
	f := Refusal{Bucket: Bucket{b.partition, o.keyOf(id)}, Cost: 1, For: hold, RetryAfter: max(alone, 1), Level: o.shown(at, id, b)}
	switch to, i := o.to(p), o.denied(id, p); {
	case i >= 0:
		to.Refusals[o.refusals[id][i].place] = f
	case len(to.Refusals) < maxReports:
		to.Refusals = append(to.Refusals, f)
	}
}

// alone is in how long the owner has units by itself, if nobody takes any meanwhile and all of the rate is its own.
func (o *Owner) alone(at Instant, id uint32, b *bucket, units int64) int64 {
	switch {
	case b.limit.Durable():
		return int64(b.limit.Fill(max(0, units-o.level(at, id, b))))
	case b.limit.Algorithm == limiter.GCRA:
		return int64(b.limit.Until(&b.state, at.Now, min(units, b.limit.Capacity()), 0, 0))
	}
	return int64(b.limit.Until(&b.state, reading(b.limit, at), units, 0, 0))
}

// refills says whether a limit's buckets fill by themselves, with their owner.
func refills(l *limiter.Limit) bool { return l.Algorithm == limiter.GCRA && !l.Durable() }

// later is a wait that is longer by d.
func later(wait, d int64) int64 { return wait + min(d, math.MaxInt64-wait) }

// look fills what a Sizer sees of a bucket that was touched, and returns the peer's place in it.
func (o *Owner) look(at Instant, id uint32, b *bucket, p *peer, asks bool) (n int) {
	v := &o.sight
	share, depth := o.sums(b)
	*v = Sight{
		Now: at.Now, Limit: b.limit, Level: o.level(at, id, b),
		Share: uint32(min(share, limiter.ShareOne)), Outstanding: depth, Holders: v.Holders[:0],
	}
	if v.Level >= 0 && v.Level < b.limit.Capacity() && refills(b.limit) {
		v.Part = int64(b.limit.Fill(1)) - o.alone(at, id, b, v.Level+1)
	}
	o.looks++
	n = -1
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		q := o.peers[s.peer]
		if q.look != o.looks {
			q.look, q.place = o.looks, len(v.Holders)
			v.Holders = append(v.Holders, SightHolder{Live: q.member && q.deadline >= at.Now, Self: q.incarnation == o.cfg.Self})
		}
		o.show(at, b, s, &v.Holders[q.place])
		if q == p {
			n = q.place
		}
	}
	for _, a := range o.askers[id] {
		q := o.peers[a.peer]
		if q == nil || at.Now-a.at > askerFor {
			continue
		}
		if q.look == o.looks { // it has a series, which may be new and know nothing
			if h := &v.Holders[q.place]; a.at >= h.At || h.Demand == 0 {
				h.At, h.Demand, h.Cost = a.at, a.demand, a.cost
			}
			continue
		}
		if q.look, q.place = o.looks, len(v.Holders); q == p {
			n = q.place
		}
		v.Holders = append(v.Holders, SightHolder{At: a.at, Demand: a.demand, Cost: a.cost, Live: q.member && q.deadline >= at.Now, Self: q.incarnation == o.cfg.Self})
	}
	if n < 0 {
		n = len(v.Holders)
		v.Holders = append(v.Holders, SightHolder{Live: true, Self: p.incarnation == o.cfg.Self})
	}
	v.Holders[n].Asks = asks
	return n
}

// show adds a series to what a Sizer sees of its holder.
func (o *Owner) show(at Instant, b *bucket, s *series, h *SightHolder) {
	if !s.is(seriesEnded | seriesSlots) {
		h.Share += s.share
		h.Depth += s.depth
		h.Level += min(o.has(at, b, s), s.depth)
	}
	if when := s.reported(at.Now); when >= h.At {
		h.At, h.Demand = when, s.demand.value()
		h.Cost = max(s.cost.value(), h.Cost)
	}
}

// asker is a holder that asked of a bucket and has no series there.
type asker struct {
	peer         uint16
	at           int64
	demand, cost int64
}

// askerFor is for how long its demand counts.
const askerFor = int64(3e9)

// asked notes what a holder without a series says of its demand.
func (o *Owner) asked(at Instant, p *peer, r *Report) {
	b, id := o.find(&r.Key)
	if b == nil || b.partition != r.Partition {
		return
	}
	as := slices.DeleteFunc(o.askers[id], func(a asker) bool { return a.peer == p.index || at.Now-a.at > askerFor })
	if len(as) < maxAskers {
		as = append(as, asker{p.index, at.Now, min(r.Demand, limiter.MaxUnits), min(r.Cost, limiter.MaxUnits)})
	}
	o.askers[id] = as
}
