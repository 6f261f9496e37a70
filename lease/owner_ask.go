package lease

import (
	"cmp"
	"math/bits"
	"slices"
	"time"

	"headgate/limiter"
)

// question is an Ask with its buckets.
type question struct {
	peer     *peer
	epoch    uint64 // of the request
	ask      Ask
	received int64 // by Instant.Now
	until    int64 // when it is refused, if it is parked
	retry    int64 // when it may recall for itself, if it waits for that; 0: it does not
	buckets  [limiter.MaxCharges]*bucket
	ids      [limiter.MaxCharges]uint32
	fresh    uint32 // those made for it
	waits    bool   // it is, or was, parked
	ds       [limiter.MaxCharges]limiter.Decision
}

// recall is what is known of a bucket whose leases were recalled.
type recall struct {
	next    int64 // not before, by Instant.Now
	backoff int64
	came    bool // something came back since
}

// refused is a Refusal that holds at a peer.
type refused struct {
	peer  uint16
	place uint16 // among the Refusals of its step's response to the peer
	step  uint64
	cost  int64
	until int64
}

// ask decides a request's charges, all or none.
func (o *Owner) ask(at Instant, p *peer, epoch uint64, a *Ask) {
	// Most questions are answered at once: one place serves them all.
	q := o.spare
	if o.spare = nil; q == nil {
		q = new(question)
	}
	*q = question{peer: p, epoch: epoch, ask: *a, received: at.Now}
	defer func() {
		if !q.waits {
			q.peer, q.ask = nil, Ask{}
			o.spare = q
		}
	}()
	if !o.valid(a) {
		o.stats.Rejected++
		o.decided(at, q, NotOwner, 0)
		return
	}
	if !p.member {
		o.decided(at, q, NotOwner, 0) // it will discard what it gets by the view that it enters with
		return
	}
	q.until = at.Now + max(0, min(a.Wait, maxPark))
	o.decide(at, q, true)
}

// valid checks what came from outside.
func (o *Owner) valid(a *Ask) bool {
	if len(a.Charges) == 0 || len(a.Charges) > limiter.MaxCharges || a.Wait < 0 {
		return false
	}
	for i := range a.Charges {
		c := &a.Charges[i]
		if c.Cost < 0 || c.Limit.Validate() != nil || c.Oversize > limiter.Debt ||
			uint64(c.Partition) >= uint64(len(o.parts)) || !o.placed(&c.Bucket) {
			return false
		}
	}
	return true
}

// decide decides a question, or parks it. It copies the charges only where it parks.
func (o *Owner) decide(at Instant, q *question, first bool) {
	for i := range q.ask.Charges {
		if c := &q.ask.Charges[i]; !o.may(at, q.epoch, c) {
			o.decided(at, q, NotOwner, 0)
			return
		}
	}
	if why := o.open(at, q); why != 0 {
		o.closeUnused(at, q)
		o.decided(at, q, why, 0)
		return
	}
	by, taken := o.try(at, q)
	if by >= 0 && !q.ask.Peek && o.lapse(at, q) {
		by, taken = o.try(at, q)
	}
	switch {
	case by < 0 && q.ask.Peek:
		o.undo(at, q, taken)
	case by < 0:
		for i := range q.ask.Charges {
			if r := o.recalls[q.ids[i]]; r != nil {
				r.backoff = 0
			}
		}
	case o.mayWait(at, q, first):
		o.park(q, first)
		return
	}
	o.drawShadows(at, q)
	if by >= 0 {
		by = o.undrawn(at, q, by)
		o.reclaim(at, q)
	}
	o.decided(at, q, by, taken)
	o.closeUnused(at, q)
}

// may says whether this owner may grant for a charge now.
func (o *Owner) may(at Instant, epoch uint64, c *AskCharge) bool {
	if uint64(c.Partition) >= uint64(len(o.parts)) {
		return false
	}
	part := &o.parts[c.Partition]
	if part.since == 0 || !part.open(o, at, c.Partition) {
		return false
	}
	if o.ahead(&c.Limit) { // its holder knows a policy first, or lies: what is believed once binds for good
		o.stats.Rejected++
		return false
	}
	// Slots that are lent for an ask of before the roll call nobody waits for: they would never come back.
	if c.Limit.Algorithm == limiter.Semaphore && (epoch < part.since || !o.rollComplete(at, part)) {
		return false
	}
	return at.Wall != 0 || !byWall(&c.Limit) // a wall clock that nobody trusts opens no window
}

// open finds or makes the buckets and brings them to now; else it says why not. A policy that comes to place a
// limit by its users, or ceases to, moves its buckets with what is spent of them; one that is just being handed
// over is to come to its next owner first.
func (o *Owner) open(at Instant, q *question) (refused int) {
	q.fresh = 0
	for i := range q.ask.Charges {
		c := &q.ask.Charges[i]
		b, id := o.find(&c.Key)
		switch {
		case b == nil:
			if int(o.table.live) >= o.cfg.MaxBuckets && !o.makeRoom(at, q.ids[:i]) {
				return TableFull
			}
			b, id = o.make(&c.Key, o.intern(&c.Limit), c.Partition, at)
			q.fresh |= 1 << i
		case b.partition == c.Partition:
		case uint64(b.partition) >= uint64(len(o.parts)) || o.parts[b.partition].since == 0:
			return NotOwner
		default:
			b.partition = c.Partition
		}
		q.buckets[i], q.ids[i] = b, id
		o.touch(at, b)
		o.supersede(at, id, b, &c.Limit)
	}
	return 0
}

// makeRoom forgets buckets that may be forgotten, but none of those that are in use just now.
func (o *Owner) makeRoom(at Instant, used []uint32) bool {
	o.used = used
	defer func() { o.used = nil }()
	return o.Sweep(at, sweepWhenFull) > 0
}

// try takes the charges, and undoes it where one refuses. by is -1 or the refusing charge, of several
// the one that has to wait longest; taken the charges that are taken, or would have been.
func (o *Owner) try(at Instant, q *question) (by int, taken uint32) {
	by = -1
	for i := range q.ask.Charges {
		c, b, d := &q.ask.Charges[i], q.buckets[i], &q.ds[i]
		if b.limit.Durable() {
			o.takeReservoir(at, q.ids[i], b, c.Cost, c.Oversize, d)
		} else {
			b.limit.TakeInto(&b.state, reading(b.limit, at), c.Cost, c.Oversize, d)
			if !d.Admitted {
				d.RetryAfter = o.until(at, b, c.Cost, d.RetryAfter)
			}
		}
		d.By = limiter.ByOwner
		switch {
		case d.Admitted:
			taken |= 1 << i
		case c.Shadow:
		case by < 0 || d.RetryAfter > q.ds[by].RetryAfter:
			by = i
		}
	}
	if by >= 0 {
		o.undo(at, q, taken)
		for i := range q.ask.Charges {
			if b := q.buckets[i]; !b.limit.Durable() {
				now := b.limit.Take(&b.state, reading(b.limit, at), 0, limiter.Refuse)
				q.ds[i].Remaining, q.ds[i].Reset = now.Remaining, now.Reset
			}
		}
		return by, 0
	}
	return by, taken
}

// undo gives back what was taken at this instant, exactly.
func (o *Owner) undo(at Instant, q *question, taken uint32) {
	for ; taken != 0; taken &= taken - 1 {
		i := bits.TrailingZeros32(taken)
		b, cost := q.buckets[i], q.ask.Charges[i].Cost
		if b.limit.Durable() {
			o.reservoir(q.ids[i]).left += cost
		} else {
			b.limit.Adjust(&b.state, reading(b.limit, at), q.ds[i].At, cost)
		}
	}
}

// until is the retry-after of a cost that does not conform: exact where nothing is lent; else the
// sooner of what the owner has by itself and what it would have if all came back.
func (o *Owner) until(at Instant, b *bucket, cost int64, alone time.Duration) time.Duration {
	share, depth := o.sums(b)
	if share == 0 && depth == 0 || cost > b.limit.Capacity() || b.limit.Algorithm != limiter.GCRA {
		return alone
	}
	exact := b.limit.Until(&b.state, at.Now, cost, share, depth)
	return min(exact, max(drawSoon, b.limit.Fill(cost-o.backs(at, b, nil)-b.limit.Level(&b.state, at.Now))))
}

// backs is what would come back of a bucket if all leases but a peer's were recalled, by the last
// reports. The peer gives its own back with its ask, but for what it has not heard of.
func (o *Owner) backs(at Instant, b *bucket, but *peer) (units int64) {
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		if s.is(seriesEnded|seriesInherited) || s.sent == 0 {
			continue
		}
		if but != nil && s.peer == but.index {
			if s.dying() && s.is(seriesPending) {
				_, depth := s.counted()
				units += depth
			}
			continue
		}
		if s.is(seriesSlots) {
			depth := s.depth
			if s.is(seriesPending) {
				depth = max(depth, s.oldDepth) // they were recalled for others, and more may come than those need
			}
			units += min(depth, s.lent()) // any of them may be free by now
			continue
		}
		units += o.has(at, b, s)
	}
	return units
}

// has is what a lease is likely to hold: what was reported, granted since and brought by its share.
func (o *Owner) has(at Instant, b *bucket, s *series) int64 {
	_, depth := s.counted()
	level := s.level.value()
	if s.share > 0 && b.limit.Algorithm == limiter.GCRA {
		perNS := float64(b.limit.Rate.Count) / float64(b.limit.Rate.Per) * float64(s.share) / limiter.ShareOne
		level += int64(min(perNS*float64(at.Now-s.reported(at.Now)), float64(depth)))
	}
	return min(level, depth)
}

// lapse ends the sessions past their deadline that stand in a question's way.
func (o *Owner) lapse(at Instant, q *question) (ended bool) {
	for i := range q.ask.Charges {
		if !q.ds[i].Admitted && o.endLapsed(at, q.buckets[i]) {
			ended = true
		}
	}
	if ended {
		for i := range q.ask.Charges {
			o.touch(at, q.buckets[i])
		}
	}
	return ended
}

// mayWait says whether a question that would be refused can be admitted soon: because leases that
// cover it are recalled, or were already, or the ledger is asked. It recalls them.
func (o *Owner) mayWait(at Instant, q *question, first bool) bool {
	if len(o.parked) >= maxParked {
		return false
	}
	// Look first and recall then: a recall for a request that another limit refuses helps nobody.
	draw := false
	for i := range q.ask.Charges {
		c, b := &q.ask.Charges[i], q.buckets[i]
		if q.ds[i].Admitted || c.Shadow {
			continue
		}
		if b.limit.Durable() && o.draw(at, q.ids[i], b, c.Cost) {
			draw = true // for a Peek, too: a block in hand is nothing spent
			continue
		}
		if q.ask.Peek || !o.covered(at, q, i) {
			return false
		}
	}
	if draw {
		q.until = max(q.until, q.received+leastDraw)
	}
	if at.Now >= q.until {
		return false
	}
	for i := range q.ask.Charges {
		if !q.ds[i].Admitted && !q.ask.Charges[i].Shadow && !o.recall(at, q, i, first) && !draw {
			return false
		}
	}
	return true
}

// reclaim takes the whole rate back from who was its bucket's only holder, when another is refused: what comes from now
// on is for both.
func (o *Owner) reclaim(at Instant, q *question) {
	for i := range q.ask.Charges {
		if q.ask.Peek || q.ds[i].Admitted || q.ask.Charges[i].Shadow {
			continue
		}
		b := q.buckets[i]
		for j := b.first; j != 0; j = o.pool.at(j).next {
			s := o.pool.at(j)
			if s.share == ShareOne && s.peer != q.peer.index && !s.is(seriesEnded|seriesPending|seriesInherited) && s.session == o.peers[s.peer].session {
				o.recallOne(at, q.ids[i], b, j, q.ask.Charges[i].Cost)
			}
		}
	}
}

// undrawn is the refusing charge where those do not count that only wait for a block which the ledger
// seems to have: another limit refuses, and what is lent of that one is not the limit's word.
func (o *Owner) undrawn(at Instant, q *question, by int) int {
	draws := func(i int) bool {
		b := q.buckets[i]
		return b.limit.Durable() && q.ask.Charges[i].Cost <= o.whole(at, q.ids[i], b) && !o.reservoir(q.ids[i]).exhausted(at, 1)
	}
	other := -1
	for i := range q.ask.Charges {
		if d := &q.ds[i]; !d.Admitted && !q.ask.Charges[i].Shadow && !draws(i) && (other < 0 || d.RetryAfter > q.ds[other].RetryAfter) {
			other = i
		}
	}
	if other < 0 {
		return by
	}
	for i := range q.ask.Charges {
		if d := &q.ds[i]; !d.Admitted && draws(i) {
			d.Admitted, d.RetryAfter = true, 0
		}
	}
	return other
}

// drawShadows draws what shadow charges lack: they don't wait for it.
func (o *Owner) drawShadows(at Instant, q *question) {
	for i := range q.ask.Charges {
		if c, b := &q.ask.Charges[i], q.buckets[i]; c.Shadow && !q.ds[i].Admitted && b.limit.Durable() {
			o.draw(at, q.ids[i], b, c.Cost)
		}
	}
}

// needs is what a charge's bucket lacks.
func (o *Owner) needs(at Instant, q *question, i int) int64 {
	c, b := &q.ask.Charges[i], q.buckets[i]
	cost := c.Cost
	if capacity := b.limit.Capacity(); cost > capacity {
		cost = capacity // Debt waits for all of it
	}
	return cost - o.level(at, q.ids[i], b)
}

// covered says whether what can come back covers what a charge needs, and the Sizer agrees.
func (o *Owner) covered(at Instant, q *question, i int) bool {
	c, b := &q.ask.Charges[i], q.buckets[i]
	if c.Cost > b.limit.Capacity() && c.Oversize != limiter.Debt || b.limit.Algorithm == limiter.SlidingWindow || b.limit.Algorithm == limiter.SlidingLog {
		return false
	}
	if o.backs(at, b, q.peer) < o.needs(at, q, i) {
		return false
	}
	if o.inFlight(b) {
		return true
	}
	if b.limit.Algorithm == limiter.Semaphore {
		return true
	}
	n := o.look(at, q.ids[i], b, q.peer, true)
	return o.sizer.Recall(&o.sight, n, c.Cost)
}

// inFlight says whether a replacement that lowers a lease of a bucket is not acknowledged yet.
func (o *Owner) inFlight(b *bucket) bool {
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		if s.is(seriesEnded) || !s.is(seriesPending) {
			continue
		}
		if s.is(seriesSlots) && s.depth < s.lent() && !s.is(seriesRolled) || !s.is(seriesSlots) && (s.dying() || s.depth < s.oldDepth || s.sent > 1 && uint64(s.share) < s.before()) {
			return true
		}
	}
	return false
}

// recall takes back what a charge needs, from the leases that hold most, and rate with it. It says
// whether anything is on its way.
func (o *Owner) recall(at Instant, q *question, i int, first bool) bool {
	b, id := q.buckets[i], q.ids[i]
	r := o.recalls[id]
	if r == nil {
		r = &recall{}
		o.recalls[id] = r
	}
	switch flies := o.inFlight(b); {
	case first || flies:
	case r.came: // and others were faster
		r.backoff = 0
	default:
		r.backoff = max(int64(RecallEvery), min(2*r.backoff, 64*int64(RecallEvery)))
	}
	if at.Now < r.next+r.backoff {
		if !o.inFlight(b) && r.came && r.backoff == 0 {
			q.retry = r.next
			return true
		}
		return o.inFlight(b)
	}
	r.next, r.came = at.Now+int64(RecallEvery), false
	// For those that wait already, too, as far as the bucket can ever hold it.
	cost := max(1, q.ask.Charges[i].Cost)
	need := o.needs(at, q, i) + min(int64(o.waiting[id]), b.limit.Capacity()/cost)*cost
	for _, h := range o.holders(b, q.peer) {
		if need <= 0 {
			break
		}
		need -= o.recallOne(at, id, b, h, need)
	}
	return o.inFlight(b)
}

// holders lists the leases of a bucket that can be recalled, but a peer's, those that hold most first.
func (o *Owner) holders(b *bucket, but *peer) []uint32 {
	var hs []uint32
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		slots := s.is(seriesSlots) // they do not end with their session
		switch {
		case s.is(seriesEnded | seriesInherited | seriesRolled), s.sent == 0, s.peer == but.index, s.depth == 0 && s.share == 0:
		case !slots && (s.is(seriesPending) || s.session != o.peers[s.peer].session):
		default:
			hs = append(hs, i)
		}
	}
	slices.SortStableFunc(hs, func(x, y uint32) int {
		a, b := o.pool.at(x), o.pool.at(y)
		return cmp.Or(cmp.Compare(b.level.value(), a.level.value()), cmp.Compare(a.peer, b.peer))
	})
	return hs
}

// recallOne lowers one lease so that it gives back what is needed, if it has as much, and returns what
// is expected of it.
func (o *Owner) recallOne(at Instant, id uint32, b *bucket, i uint32, need int64) int64 {
	s := o.pool.at(i)
	level := min(o.has(at, b, s), s.depth)
	if s.is(seriesSlots) {
		level = min(s.depth, s.lent())
	}
	if level == 0 && (s.depth == 0 || s.share == 0 && !s.is(seriesSlots)) {
		return 0
	}
	// What was reported has been spent from since, or refilled: keep half of what may be spared.
	keep := max(0, level-need-need/4) / 2
	if s.is(seriesSlots) {
		keep = level - min(level, need)
	}
	share := s.share
	if keep == 0 {
		share = 0
	} else if s.depth > 0 {
		share = uint32(float64(share) * float64(keep) / float64(max(keep, s.depth)))
	}
	if keep >= s.depth && share >= s.share {
		return 0
	}
	o.set(b, s, share, min(keep, s.depth))
	o.send(id, i)
	o.step.recalls = append(o.step.recalls, i)
	o.stats.Recalls++
	if s.is(seriesSlots) {
		return min(level, need)
	}
	return level - keep
}

// park keeps a question for later.
func (o *Owner) park(q *question, first bool) {
	if first {
		q.ask.Charges = slices.Clone(q.ask.Charges)
	}
	q.waits = true
	for i := range q.ask.Charges {
		o.waiting[q.ids[i]]++
	}
	o.parked = append(o.parked, q)
}

// unpark decides the questions whose buckets were stirred, in the order in which they came.
func (o *Owner) unpark(at Instant) {
	if len(o.step.stirred) == 0 {
		return
	}
	stirred := o.step.stirred
	o.step.stirred = nil
	old := o.parked
	o.parked = nil
	for n, q := range old {
		if !slices.ContainsFunc(q.ids[:len(q.ask.Charges)], func(id uint32) bool { return slices.Contains(stirred, id) }) {
			o.parked = append(o.parked, old[n])
			continue
		}
		o.again(at, q)
	}
}

// expire decides the questions whose time is over.
func (o *Owner) expire(at Instant) {
	old := o.parked
	o.parked = nil
	for _, q := range old {
		if q.until > at.Now && (q.retry == 0 || q.retry > at.Now) {
			o.parked = append(o.parked, q)
			continue
		}
		o.again(at, q)
	}
}

// again decides a question that was parked.
func (o *Owner) again(at Instant, q *question) {
	o.unwait(q)
	q.retry = 0
	o.decide(at, q, false)
}

// unwait takes a question off the buckets that it waits for.
func (o *Owner) unwait(q *question) {
	for i := range q.ask.Charges {
		if o.waiting[q.ids[i]]--; o.waiting[q.ids[i]] <= 0 {
			delete(o.waiting, q.ids[i])
		}
	}
}

// decided answers a question.
func (o *Owner) decided(at Instant, q *question, by int, taken uint32) {
	d := AskDecision{ID: q.ask.ID, Refused: by, Left: o.validity(at, q)}
	if by == NotOwner || by == TableFull {
		o.to(q.peer).Decisions = append(o.to(q.peer).Decisions, d)
		return
	}
	d.Charges = make([]ChargeDecision, len(q.ask.Charges))
	for i := range q.ask.Charges {
		d.Charges[i].Decision = q.ds[i]
		switch {
		case q.ask.Peek:
		case by < 0 && taken>>i&1 == 1:
			o.charged(at, q, i, &d.Charges[i])
		case by >= 0 && !q.ds[i].Admitted && !q.ask.Charges[i].Shadow:
			o.refuse(at, q, i)
		}
		if !q.ask.Peek && q.peer.session != 0 {
			o.step.wants = append(o.step.wants, want{q.ids[i], q.peer.index, true, by >= 0})
		}
	}
	o.to(q.peer).Decisions = append(o.to(q.peer).Decisions, d)
}

// validity is for how long from the send of its request a decision holds: not beyond this owner's right
// to grant.
func (o *Owner) validity(at Instant, q *question) int64 {
	left := int64(sessionFor)
	if o.cfg.Break&BreakViewBound != 0 {
		return left
	}
	for i := range q.ask.Charges {
		if p := q.ask.Charges[i].Partition; uint64(p) < uint64(len(o.parts)) {
			left = min(left, o.cfg.Rights.Left(at.Now, p))
		}
	}
	return max(0, left) + (at.Now-q.received)*98/100
}

// charged puts a charge that was taken into a series, where its refund will belong.
func (o *Owner) charged(at Instant, q *question, n int, d *ChargeDecision) {
	b, id, cost := q.buckets[n], q.ids[n], q.ask.Charges[n].Cost
	i := o.live(b, q.peer, at)
	if i == 0 {
		i, _ = o.link(b, q.peer, at)
	}
	if b.limit.Durable() {
		o.prefetch(at, id, b)
	}
	s := o.pool.at(i)
	d.Series = s.number()
	if !s.is(seriesSlots) {
		s.direct += float64(cost)
		return
	}
	if d.Lent = cost > 0; d.Lent {
		o.put(id, b, i, cost)
	}
}

// put lends slots. They are not taken from the level here.
func (o *Owner) put(id uint32, b *bucket, i uint32, units int64) {
	s := o.pool.at(i)
	s.granted += units
	// The holder keeps no more slots than the depth says. Nothing else hangs on it, so that the next
	// Number need not wait for the acknowledgement of the last.
	s.depth = max(s.depth, min(s.lent(), b.limit.Burst))
	s.sent++
	s.flags |= seriesPending
	o.send(id, i)
}

// refuse tells the holder for how long it need not ask.
func (o *Owner) refuse(at Instant, q *question, i int) {
	b, id, d := q.buckets[i], q.ids[i], &q.ds[i]
	cost := q.ask.Charges[i].Cost
	o.stats.Stranded = o.backs(at, b, q.peer)
	hold := refusalAlone
	if share, depth := o.sums(b); share > 0 || depth > 0 {
		hold = refusalLent
	}
	if b.limit.Algorithm == limiter.Semaphore {
		hold = refusalSlots
	}
	hold = min(hold, int64(d.RetryAfter))
	if hold <= 0 {
		return
	}
	o.deny(at, id, q.peer, Refusal{
		Bucket: Bucket{b.partition, q.ask.Charges[i].Key}, Cost: cost, For: hold, RetryAfter: int64(d.RetryAfter), Level: d.Remaining,
	})
}

// For how long a Refusal holds at most: where the owner has all of the bucket, where others hold
// parts of it, and of slots.
const (
	refusalAlone = int64(time.Second)
	refusalLent  = int64(250 * time.Millisecond)
	refusalSlots = int64(20 * time.Millisecond)
)

// deny tells a peer a Refusal and remembers it, to end it when anything is credited. A flood of asks of
// one bucket makes one: that of the smallest cost says most.
func (o *Owner) deny(at Instant, id uint32, p *peer, f Refusal) {
	to := o.to(p)
	if i := o.denied(id, p); i >= 0 {
		r := &o.refusals[id][i]
		if f.Cost < r.cost {
			r.cost, r.until = f.Cost, at.Now+f.For
			to.Refusals[r.place] = f
		}
		return
	}
	if len(to.Refusals) >= maxReports {
		return // it asks again
	}
	rs := slices.DeleteFunc(o.refusals[id], func(r refused) bool { return r.peer == p.index || r.until <= at.Now })
	if len(rs) < maxRefused {
		rs = append(rs, refused{p.index, uint16(len(to.Refusals)), o.steps, f.Cost, at.Now + f.For})
	}
	o.refusals[id] = rs
	to.Refusals = append(to.Refusals, f)
}

// denied is the place among a bucket's refusals of the one that a peer is told in this step; -1: none.
func (o *Owner) denied(id uint32, p *peer) int {
	return slices.IndexFunc(o.refusals[id], func(r refused) bool { return r.peer == p.index && r.step == o.steps })
}

// unrefuse ends the refusals that a credit has made untrue: one with For 0 says so.
func (o *Owner) unrefuse(at Instant, id uint32, b *bucket) {
	rs, ok := o.refusals[id]
	if !ok {
		return
	}
	level := o.level(at, id, b)
	kept := rs[:0]
	for _, r := range rs {
		if r.until <= at.Now {
			continue
		}
		if p := o.peers[r.peer]; p != nil && level >= r.cost {
			if !p.member || p.session == 0 {
				continue
			}
			if to := o.to(p); len(to.Refusals) < maxReports {
				to.Refusals = append(to.Refusals, Refusal{Bucket: Bucket{b.partition, o.keyOf(id)}, Cost: r.cost, Level: level})
				continue
			}
		}
		kept = append(kept, r)
	}
	if o.refusals[id] = kept; len(kept) == 0 {
		delete(o.refusals, id)
	}
}

// closeUnused forgets those buckets made for a question that nothing came of.
func (o *Owner) closeUnused(at Instant, q *question) {
	for ; q.fresh != 0; q.fresh &= q.fresh - 1 {
		i := bits.TrailingZeros32(q.fresh)
		b, _ := o.find(&q.ask.Charges[i].Key)
		if b == nil || b != q.buckets[i] || b.first != 0 || o.waiting[q.ids[i]] > 0 || o.reservoirs[q.ids[i]] != nil {
			continue
		}
		o.forget(q.ids[i], b)
	}
}
