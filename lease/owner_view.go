package lease

import (
	"encoding/binary"
	"math"
	"slices"

	"headgate/limiter"
)

// part is a partition.
type part struct {
	since uint64 // the view since which it is this process's; 0: it is not
	from  uint64 // who owned it in the view before that one; 0: nobody, or unknown
	step  int64  // when that view was stepped to

	started  bool // it was granted of, or could be: nothing can be handed over any more
	accepted bool // what the owner of before knew is here

	full  bool  // what is not mentioned is full; else it was empty at:
	floor int64 // by Instant.Now

	slotsAt int64 // before it no slots are lent: a process that left may have some
}

// open says whether this owner may grant for the partition now (V1, V4). Rights that have gone on to a view that
// the owner has not stepped to may be those of a later tenure, of whose beginning it knows nothing.
func (x *part) open(o *Owner, at Instant, p uint32) bool {
	if o.cfg.Rights.Left(at.Now, p) <= 0 || o.cfg.Rights.Lease(at.Now, o.view.Epoch) <= 0 {
		return false
	}
	if !x.started {
		if !x.accepted && !x.full && at.Now < x.step+o.cfg.Wait && o.cfg.Break&BreakWait == 0 {
			return false
		}
		x.started = true
	}
	return true
}

// known says whether nothing that the owner of before knew is to come any more.
func (x *part) known(at Instant) bool {
	return x.accepted || x.started || x.full || at.Now >= x.step+earlyFor
}

// earlyFor is for how long reports wait for a hand-over, which is taken as long as nobody asked.
const earlyFor = int64(10e9)

// giving is a partition that is to be handed over.
type giving struct {
	partition uint32
	to        uint64
	epoch     uint64
	nothing   bool // its levels are not known here
	part      part
	ids       []uint32
}

// saved is what Load was given.
type saved struct {
	epoch uint64
	parts map[uint32]*Handoff
}

// Step goes on to a view, after Rights did. Lost partitions stop and are kept for HandOffs; gained
// ones wait until they are handed over or the takeover wait has passed. A view that was skipped is
// seen by its number: what was owned before it counts as owned afresh.
func (o *Owner) Step(at Instant, v *View) {
	if v == nil || o.view != nil && v.Epoch <= o.view.Epoch {
		return
	}
	old, was := o.view, o.parts
	follows := old != nil && v.Epoch == old.Epoch+1 && len(v.Owners) == len(was)
	o.view = v
	o.stepPeers(at, v)
	if !follows {
		o.forgetSessions(at)
	}
	o.stepAway(v, was, follows)
	gone := !follows && v.Epoch != 1 || follows && lacks(v, old)
	next := make([]part, len(v.Owners))
	var drop []uint32
	for p := range next {
		mine := v.OwnerOf(uint32(p)).Incarnation == o.cfg.Self
		before := p < len(was) && was[p].since != 0
		switch {
		case !mine:
		case follows && before:
			next[p] = was[p]
			if gone && !o.allRolled(was[p].since, old) {
				next[p].slotsAt = at.Now + o.cfg.Wait
			}
		default:
			next[p] = o.gained(at, v, old, uint32(p), follows, gone)
			drop = append(drop, uint32(p))
		}
	}
	o.parts, o.rollSince, o.wantAt = next, 0, at.Now+int64(KeepEvery)
	for p := range next {
		if next[p].since > 1 {
			o.rollSince = max(o.rollSince, next[p].since)
		}
	}
	o.regain(drop)
	o.load(at, v)
	for _, q := range o.parked {
		for i := range q.ask.Charges {
			if p := q.ask.Charges[i].Partition; uint64(p) >= uint64(len(next)) || next[p].since == 0 {
				q.until = at.Now // Tick refuses it
			}
		}
	}
	o.early = slices.DeleteFunc(o.early, func(e early) bool {
		return uint64(e.report.Partition) >= uint64(len(next)) || next[e.report.Partition].since == 0
	})
}

// forgetSessions ends all sessions. After a view that was skipped what was lent is forgotten here, and a holder that
// saw it and found nothing changed would go on spending it: the next session's number tells it.
func (o *Owner) forgetSessions(at Instant) {
	for _, p := range o.peers {
		if p != nil && p.session != 0 {
			o.endSession(at, p)
		}
	}
}

// lacks says whether a view lacks a process that was in the one before.
func lacks(v, old *View) bool {
	return slices.ContainsFunc(old.Members, func(m Member) bool { return !v.has(m.Incarnation) })
}

func (v *View) has(incarnation uint64) bool {
	return slices.ContainsFunc(v.Members, func(m Member) bool { return m.Incarnation == incarnation })
}

// stepPeers notes who is in the view.
func (o *Owner) stepPeers(at Instant, v *View) {
	for _, m := range v.Members {
		p := o.peer(m.Incarnation)
		if p == nil {
			p = o.addPeer(m.Incarnation)
		}
		if p != nil && !p.member {
			p.member, p.name, p.wanted = true, m.Name, 0
		}
		o.stats.Excess += uint64(o.buried[m.Incarnation]) // it lives, and so may its streams
		delete(o.buried, m.Incarnation)
	}
	for _, p := range o.peers {
		if p != nil && p.member && !v.has(p.incarnation) {
			p.member, p.gone = false, at.Now
			o.buryAt = min(o.buryAt, at.Now+o.cfg.Wait)
		}
	}
}

// gained is a partition that this process owns since v.
func (o *Owner) gained(at Instant, v, old *View, p uint32, follows, gone bool) part {
	x := part{since: v.Epoch, step: at.Now, floor: at.Now + o.cfg.Wait}
	if follows {
		x.from = old.OwnerOf(p).Incarnation
	}
	if gone {
		x.slotsAt = at.Now + o.cfg.Wait
	}
	if v.Epoch == 1 { // V5: nobody can have granted before the first view
		x.full, x.started = true, true
	}
	return x
}

// stepAway stops the partitions that v takes away and lists what is to be handed over.
func (o *Owner) stepAway(v *View, was []part, follows bool) {
	o.giving = slices.DeleteFunc(o.giving, func(g *giving) bool {
		if g.to == v.OwnerOf(g.partition).Incarnation && follows {
			return false
		}
		if v.OwnerOf(g.partition).Incarnation == 0 && g.to == 0 {
			return false // for Save
		}
		o.dropAll(g.ids)
		return true
	})
	lost := map[uint32]*giving{}
	for p := range was {
		if was[p].since == 0 {
			continue
		}
		to := v.OwnerOf(uint32(p)).Incarnation
		if to == o.cfg.Self && follows {
			continue
		}
		g := &giving{partition: uint32(p), to: to, epoch: v.Epoch, part: was[p], nothing: !was[p].started && !was[p].accepted || !follows}
		if o.cfg.Break&BreakNothing != 0 {
			g.nothing = false
		}
		lost[uint32(p)] = g
		o.giving = append(o.giving, g)
	}
	if len(lost) == 0 {
		return
	}
	o.eachBucket(func(id uint32, b *bucket) {
		if g := lost[b.partition]; g != nil {
			g.ids = append(g.ids, id)
		}
	})
	// What goes to nobody and isn't known is of no use; and this process gets nothing of itself.
	o.giving = slices.DeleteFunc(o.giving, func(g *giving) bool {
		if g.to != o.cfg.Self && (g.to != 0 || !g.nothing) {
			return false
		}
		o.dropAll(g.ids)
		return true
	})
}

func (o *Owner) dropAll(ids []uint32) {
	for _, id := range ids {
		if b := o.bucketOf(id); b.limit != nil {
			o.forget(id, b)
		}
	}
}

// regain forgets what is here of partitions that come back: what was kept to be handed over is not
// gone on with (V3).
func (o *Owner) regain(parts []uint32) {
	if len(parts) == 0 {
		return
	}
	back := map[uint32]bool{}
	for _, p := range parts {
		back[p] = true
	}
	o.giving = slices.DeleteFunc(o.giving, func(g *giving) bool { return back[g.partition] })
	var ids []uint32
	o.eachBucket(func(id uint32, b *bucket) {
		if back[b.partition] {
			ids = append(ids, id)
		}
	})
	o.dropAll(ids)
}

// eachBucket calls f for every bucket, in the order of their places. f must not add or remove any.
func (o *Owner) eachBucket(f func(id uint32, b *bucket)) {
	for class := range o.table.pools {
		for i := range o.table.pools[class].used {
			id := i<<classBits | uint32(class)
			if slab, _, at := o.table.at(id); slab.inUse(at) {
				f(id, &slab.values[at])
			}
		}
	}
}

// HandOffs returns what is to be handed over, also again, until HandedOff acknowledges it.
func (o *Owner) HandOffs(at Instant) (hs []*Handoff) {
	for _, g := range o.giving {
		if g.to != 0 {
			hs = append(hs, o.handOff(at, g))
		}
	}
	return hs
}

// heads are HandOffs without what is in them.
func (o *Owner) heads() (hs []handKey) {
	for _, g := range o.giving {
		if g.to != 0 {
			hs = append(hs, handKey{g.partition, g.epoch, g.to})
		}
	}
	return hs
}

// handOffOf is one of HandOffs; nil: it is acknowledged, or nobody's any more.
func (o *Owner) handOffOf(at Instant, k handKey) *Handoff {
	for _, g := range o.giving {
		if g.to != 0 && k == (handKey{g.partition, g.epoch, g.to}) {
			return o.handOff(at, g)
		}
	}
	return nil
}

// handOff is all that is known of a partition (V3).
func (o *Owner) handOff(at Instant, g *giving) *Handoff {
	h := &Handoff{From: o.cfg.Self, To: g.to, Epoch: g.epoch, Partition: g.partition, Nothing: g.nothing}
	if g.nothing {
		return h
	}
	if h.Floor = FloorNever; !g.part.full {
		h.Floor = max(0, at.Now-g.part.floor)
	}
	for _, id := range g.ids {
		b := o.bucketOf(id)
		if b.limit == nil || b.limit.Algorithm == limiter.Semaphore {
			continue
		}
		o.touch(at, b)
		h.Buckets = append(h.Buckets, o.handBucket(at, id, b))
	}
	return h
}

// handBucket is one bucket of a hand-over. The State of a window or log has the wall's reading before
// it, in 8 bytes.
func (o *Owner) handBucket(at Instant, id uint32, b *bucket) HandedBucket {
	h := HandedBucket{Key: o.keyOf(id), Limit: *b.limit}
	now := reading(b.limit, at)
	if b.limit.Algorithm != limiter.GCRA {
		h.State = binary.BigEndian.AppendUint64(nil, uint64(now))
	}
	if b.limit.Durable() {
		h.State = nil
		r := o.reservoir(id)
		h.Drawn, h.Block = max(-maxTotal, min(r.left, maxTotal)), uint64(r.window)
	} else {
		h.State = b.limit.AppendState(h.State, &b.state, now)
	}
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		if s.is(seriesSlots) {
			continue
		}
		share, depth := s.counted()
		x := HandedSeries{
			Holder: o.peers[s.peer].incarnation, Granter: o.cfg.Self, Series: s.number(), Number: uint64(s.sent),
			Share: uint32(min(share, math.MaxUint32)), Depth: min(depth, maxHandedDepth),
			Granted: s.granted, Returned: s.returned, Refunded: s.refunded, Debt: s.debt, Window: int64(s.high),
		}
		if !byWall(b.limit) {
			x.Window = 0
		}
		// What direct decisions took and the share brought may come back, too.
		x.Granted = min(x.Granted+int64(min(s.direct, maxOutstanding)), maxTotal)
		end := o.peers[s.peer].deadline
		if s.is(seriesInherited) {
			x.Granter, end = o.inherited[i].granter, o.inherited[i].end
		}
		if x.Left = max(0, end-at.Now); s.is(seriesEnded) || x.Left == 0 {
			x.Left, x.Share, x.Depth = 0, 0, 0
		}
		h.Series = append(h.Series, x)
	}
	return h
}

// HandedOff says that the receiver has a Handoff.
func (o *Owner) HandedOff(partition uint32, epoch uint64) {
	o.giving = slices.DeleteFunc(o.giving, func(g *giving) bool {
		if g.partition != partition || g.epoch != epoch || g.to == 0 {
			return false
		}
		o.dropAll(g.ids)
		return true
	})
}

// Awaits says by the head of a hand-off whether Accept would look at its buckets.
func (o *Owner) Awaits(h *Handoff) bool {
	if o.view == nil || h.Epoch > o.view.Epoch || h.To != o.cfg.Self || uint64(h.Partition) >= uint64(len(o.parts)) || h.Nothing {
		return false
	}
	x := &o.parts[h.Partition]
	return x.since == h.Epoch && x.from == h.From && h.From != 0 && !x.accepted && !x.started
}

// Accept takes over a partition from its owner of before: once, before anything was granted of it
// in this epoch. It returns true also for a repetition of what it accepted, and for one that it will
// never have a use for, so that the sender can forget it. False: not now.
func (o *Owner) Accept(at Instant, h *Handoff) bool {
	if o.view == nil || h.Epoch > o.view.Epoch {
		return false // this process has not stepped so far
	}
	if h.To != o.cfg.Self || uint64(h.Partition) >= uint64(len(o.parts)) || h.Epoch == 0 {
		o.stats.Rejected++
		return false
	}
	x := &o.parts[h.Partition]
	switch {
	case x.since != h.Epoch, h.From != x.from, h.From == 0:
		if x.since == h.Epoch {
			o.stats.Rejected++ // it is not the sender's to give
			return false
		}
		return true
	case h.Nothing, x.accepted, x.started:
		return true
	case !o.validHandoff(h):
		o.stats.Rejected++
		return false
	}
	o.begin(at)
	o.install(at, x, h)
	for i := range h.Buckets {
		o.installBucket(at, h.Partition, &h.Buckets[i])
	}
	o.cfg.Rights.Started(at.Now, h.Epoch, h.Partition)
	o.installEarly(at)
	return true
}

// install takes the floor.
func (o *Owner) install(at Instant, x *part, h *Handoff) {
	x.accepted = true
	if h.Floor == FloorNever || o.cfg.Break&BreakFloor != 0 {
		x.full = true
		return
	}
	x.floor = at.Now - h.Floor
}

// maxHandedDepth is of a lease that is to be replaced, with what is on its way to it.
const maxHandedDepth = 2 * limiter.MaxUnits

// validHandoff checks what came from outside.
func (o *Owner) validHandoff(h *Handoff) bool {
	if h.Floor < FloorNever {
		return false
	}
	seen := make(map[limiter.Key]bool, len(h.Buckets))
	for i := range h.Buckets {
		b := &h.Buckets[i]
		if b.Limit.Validate() != nil || b.Limit.Algorithm == limiter.Semaphore || seen[b.Key] || !o.placed(&Bucket{h.Partition, b.Key}) ||
			b.Drawn < -maxTotal || b.Drawn > maxTotal {
			return false
		}
		seen[b.Key] = true
		if _, err := restore(b, Instant{Now: 1, Wall: 1}); err != nil {
			return false
		}
		for j := range b.Series {
			s := &b.Series[j]
			if min(s.Depth, s.Left, s.Granted, s.Returned, s.Refunded, s.Debt, s.Window) < 0 || s.Depth > maxHandedDepth ||
				max(s.Granted, s.Returned, s.Refunded, s.Debt) > maxTotal || s.Window > math.MaxUint32 || s.Number > math.MaxUint32 ||
				s.Series>>numberBits != 0 || s.Granter == 0 || s.Holder == 0 ||
				s.Granter == o.cfg.Self && s.Series > o.numbers { // its own come back where a partition goes there and back
				return false
			}
		}
	}
	return true
}

// restore reads a handed state.
func restore(b *HandedBucket, at Instant) (limiter.State, error) {
	if b.Limit.Durable() {
		return limiter.State{}, nil
	}
	state, saved := b.State, int64(0)
	if b.Limit.Algorithm != limiter.GCRA {
		if len(state) < 8 {
			return limiter.State{}, ErrSaved
		}
		saved, state = int64(binary.BigEndian.Uint64(state)&math.MaxInt64), state[8:]
	}
	now := reading(&b.Limit, at)
	if byWall(&b.Limit) && at.Wall == 0 {
		now = saved // the next reading that can be trusted brings it on
	}
	return b.Limit.RestoreState(state, saved, now)
}

// installBucket takes one bucket.
func (o *Owner) installBucket(at Instant, p uint32, h *HandedBucket) {
	b, id := o.find(&h.Key)
	if b != nil {
		o.forget(id, b)
	}
	b, id = o.make(&h.Key, o.told(&h.Limit), p, at)
	state, err := restore(h, at)
	if err != nil {
		return // validHandoff has seen it
	}
	b.state = state
	if h.Limit.Durable() {
		r := o.reservoir(id)
		r.left, r.window = h.Drawn, int64(h.Block)
	}
	for i := range h.Series {
		o.installSeries(at, b, &h.Series[i])
	}
	o.advance(b, reading(b.limit, at))
}

func (o *Owner) installSeries(at Instant, b *bucket, h *HandedSeries) {
	p := o.peer(h.Holder)
	if p == nil {
		if p = o.addPeer(h.Holder); p == nil {
			return
		}
		p.gone = at.Now
		o.buryAt = min(o.buryAt, at.Now+o.cfg.Wait)
	}
	i, s := o.pool.open()
	*s = series{
		tagged: h.Series, granted: h.Granted, returned: h.Returned, refunded: h.Refunded, debt: h.Debt,
		share: h.Share, depth: h.Depth, sent: uint32(h.Number), peer: p.index, next: b.first, flags: seriesInherited,
	}
	if byWall(b.limit) {
		s.share, s.high = 0, uint32(h.Window)
	}
	b.first = i
	o.inherited[i] = inherited{h.Granter, at.Now + h.Left}
	if h.Left == 0 {
		s.flags |= seriesEnded
		s.share, s.depth = 0, 0
	}
	_, depth := s.counted()
	o.stats.Outstanding += depth
}

// rollComplete says whether all slots that others lent of a partition are known here.
func (o *Owner) rollComplete(at Instant, x *part) bool {
	return x.since == 1 || at.Now >= x.slotsAt && o.allRolled(x.since, o.view)
}

// allRolled says whether every member of a view has answered the roll call of an epoch.
func (o *Owner) allRolled(since uint64, v *View) bool {
	for _, m := range v.Members {
		if p := o.peer(m.Incarnation); p == nil || p.rolled < since {
			return false
		}
	}
	return true
}

// wantRolls asks the members that owe a roll: those that have nothing to say to this owner would not hear
// of it with an answer.
func (o *Owner) wantRolls(at Instant) {
	o.wantAt = never
	for _, p := range o.peers {
		if p != nil && p.member && p.rolled < o.rollSince {
			o.to(p).RollWanted = o.rollSince
			p.wanted++
			o.wantAt = at.Now + int64(KeepEvery)
		}
	}
}

// Owing lists the members that were asked maxUnrolled times for a roll that this owner waits for.
func (o *Owner) Owing() (owing []uint64) {
	for _, p := range o.peers {
		if p != nil && p.member && p.rolled < o.rollSince && p.wanted >= maxUnrolled {
			owing = append(owing, p.incarnation)
		}
	}
	return owing
}

// bury forgets the processes that left long enough ago: their slots are free again.
func (o *Owner) bury(at Instant) {
	o.buryAt = never
	dead := map[uint16]bool{}
	for _, p := range o.peers {
		switch {
		case p == nil || p.member:
		case at.Now < p.gone+o.cfg.Wait:
			o.buryAt = min(o.buryAt, p.gone+o.cfg.Wait)
		default:
			dead[p.index] = true
		}
	}
	if len(dead) == 0 {
		return
	}
	o.eachBucket(func(id uint32, b *bucket) {
		for i := b.first; i != 0; {
			s := o.pool.at(i)
			next := s.next
			if dead[s.peer] && (!s.is(seriesInherited) || s.is(seriesEnded) || o.inherited[i].end <= at.Now) {
				o.touch(at, b)
				if s.is(seriesSlots) {
					o.stats.SlotsLost += uint64(s.lent())
					if p := o.peers[s.peer].incarnation; len(o.buried) < maxBuried || o.buried[p] > 0 {
						o.buried[p] += s.lent()
					}
					o.credit(at, id, b, s, s.lent())
				}
				o.unlink(b, i)
				o.stir(id)
			} else if dead[s.peer] {
				dead[s.peer] = false // a lease of an owner of before has not ended yet
				o.buryAt = min(o.buryAt, o.inherited[i].end)
			}
			i = next
		}
	})
	for _, p := range o.peers {
		if p != nil && dead[p.index] {
			delete(o.index, p.incarnation)
			o.peers[p.index] = nil
		}
	}
	o.parked = slices.DeleteFunc(o.parked, func(q *question) bool {
		if !dead[q.peer.index] {
			return false
		}
		o.unwait(q)
		return true
	})
}

// Save returns all partitions that this process owned and nobody took over, for the next process
// on this node, with the epoch of its last view. It is for a process that grants nothing more.
func (o *Owner) Save(at Instant) (epoch uint64, hs []*Handoff) {
	if o.view == nil {
		return 0, nil
	}
	for _, g := range o.giving {
		if g.to == 0 && !g.nothing {
			hs = append(hs, o.handOff(at, g))
		}
	}
	owned := map[uint32]*giving{}
	for p := range o.parts {
		if x := &o.parts[p]; x.since != 0 && (x.started || x.accepted) {
			owned[uint32(p)] = &giving{partition: uint32(p), epoch: o.view.Epoch, part: *x}
		}
	}
	o.eachBucket(func(id uint32, b *bucket) {
		if g := owned[b.partition]; g != nil {
			g.ids = append(g.ids, id)
		}
	})
	for p := range o.parts {
		if g := owned[uint32(p)]; g != nil {
			hs = append(hs, o.handOff(at, g))
		}
	}
	return o.view.Epoch, hs
}

// Load gives back what Save returned, before the first Step. It is used only where the first view
// that this process steps to is the one after, and for what that view gives it: without the wait where it
// is the only member, and so nobody can hold a lease of the process before.
func (o *Owner) Load(epoch uint64, hs []*Handoff) {
	o.loaded = &saved{epoch, map[uint32]*Handoff{}}
	for _, h := range hs {
		o.loaded.parts[h.Partition] = h
	}
}

// load uses what Load was given (V5).
func (o *Owner) load(at Instant, v *View) {
	l := o.loaded
	if l == nil {
		return
	}
	if v.Epoch > l.epoch {
		o.loaded = nil
	}
	if v.Epoch != l.epoch+1 {
		return
	}
	for p := range o.parts {
		x, h := &o.parts[p], l.parts[uint32(p)]
		if x.since != v.Epoch || h == nil || h.Nothing || !o.validHandoff(h) {
			continue
		}
		o.install(at, x, h)
		for i := range h.Buckets {
			h.Buckets[i].Series = nil
			o.installBucket(at, uint32(p), &h.Buckets[i])
		}
		if len(v.Members) == 1 { // else others may still hold what the process before lent: the wait is for them
			o.cfg.Rights.Started(at.Now, v.Epoch, uint32(p))
		}
	}
}
