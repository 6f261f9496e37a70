package leasetest

import (
	"cmp"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"

	"headgate/lease"
	"headgate/limiter"
)

// node is a machine: its clock, its name, and the processes that ran on it.
type node struct {
	index int
	name  string
	clock clock
	proc  *proc // the newest; it may be dead
	limit []*limiter.Limit
}

// proc is a process: the shell round an Owner and a Holder, as a Manager is one.
type proc struct {
	w     *world
	node  *node
	name  string // with its incarnation, for traces
	inc   uint64
	rng   *rand.Rand
	clock clock

	alive                    bool
	diedAt                   int64
	pausedSince, pausedUntil int64
	leaving, gone            bool // asked to leave; all it held is returned
	lagUntil                 int64
	epoch                    uint64 // of the view that its cores have stepped to

	rights *rights
	owner  *lease.Owner
	holder *lease.Holder

	// The owner is one critical section: who waits for it, and the reading of who is inside.
	work      []ownerWork
	busy      bool
	busyAt    lease.Instant
	readAt    int64 // by true time, the reading that the owner's work goes by
	before    int64 // how long the next one pauses after it read the clock
	after     int64 // and before it sends what it got
	tick      int64 // when one is due, by true time; never
	handing   bool
	drawing   map[drawKey]bool
	asking    map[uint64]*request
	woken     map[uint64]bool
	readings  *[]reading // of the Take that is running
	takePause int64      // how long the next Take pauses before its second reading
	takeWhole bool       // with all that runs in the process
	stepPause int64      // how long the next step pauses between the rights' and the cores'
	stepping  bool
	lastOut   uint64              // the epoch of the last view that left it out
	using     map[*request]uint32 // the requests that hold slots, and which of their charges do
	early     []lease.Report
	knows     map[uint32]bool // partitions that were handed to it, as long as it owns them
}

type ownerWork struct {
	request *lease.Request
	forged  bool
	do      func(at lease.Instant) []*lease.Response
}

type drawKey struct {
	key limiter.Key
	n   uint64
}

type reading struct {
	at    lease.Instant
	truth int64
}

// start begins a new process on n.
func (w *world) start(n *node) *proc {
	w.incarnations++
	inc := w.incarnations
	p := &proc{
		w: w, node: n, inc: inc, name: fmt.Sprintf("%s.%d", n.name, inc), clock: n.clock, alive: true,
		rng:  rand.New(rand.NewPCG(w.cfg.Seed, inc<<8|2)),
		tick: never, drawing: map[drawKey]bool{}, asking: map[uint64]*request{}, woken: map[uint64]bool{}, knows: map[uint32]bool{}, using: map[*request]uint32{},
	}
	p.rights = &rights{self: inc, noWait: w.cfg.Break&lease.BreakWait != 0}
	p.owner = lease.NewOwner(lease.OwnerConfig{
		Self: inc, Rights: p.rights, Sizer: w.cfg.Sizer, MaxBuckets: w.cfg.MaxBuckets, Wait: takeoverWait, Break: w.cfg.Break,
	})
	p.holder = lease.NewHolder(lease.HolderConfig{
		Self: inc, Clock: p.read, MaxBuckets: w.cfg.MaxBuckets, Wake: p.wake, Break: w.cfg.Break,
	})
	n.proc = p
	w.procs = append(w.procs, p)
	w.byInc[inc] = p
	w.logf("%s starts", p.name)
	w.dirty = true
	if !w.cfg.manual {
		w.later(p.rng.Int64N(50*ms), p, p.askViewLease)
		w.later(p.rng.Int64N(int64(lease.KeepEvery)), p, p.keepAlive)
		w.catchUp(p)
	}
	return p
}

// die ends a process without notice.
func (p *proc) die(how string) {
	p.w.logf("%s %s", p.name, how)
	p.alive, p.diedAt = false, p.w.now
	p.w.dirty = true
}

// read is the holder's clock. Within a Take, of which a goroutine is preempted or a process stopped at any
// place, time passes before the second reading.
func (p *proc) read() lease.Instant {
	if p.readings != nil {
		if p.takePause > 0 && len(*p.readings) > 0 {
			d := min(p.takePause, p.w.cfg.storm-p.w.now)
			p.takePause = 0
			saved := p.readings
			p.readings = nil
			p.w.logf("%s pauses %d ms within a take", p.name, d/ms)
			if p.takeWhole {
				p.pausedSince, p.pausedUntil = p.w.now, p.w.now+d
			}
			p.w.within(p.w.now + d)
			p.readings = saved
		}
		at := p.clock.read(p.w.now)
		*p.readings = append(*p.readings, reading{at, p.w.now})
		return at
	}
	return p.clock.read(p.w.now)
}

// step goes on to a view: the rights first, then, inside the critical section, the cores. The next view waits for that.
func (p *proc) step(v *lease.View) {
	if v.Epoch <= p.rights.epoch || p.stepping {
		return
	}
	w := p.w
	w.logf("%s hears of view %d", p.name, v.Epoch)
	p.rights.step(p.clock.local(w.now), v)
	p.stepping = true
	w.dirty = true
	cores := func() {
		p.own(ownerWork{do: func(at lease.Instant) []*lease.Response {
			w.logf("%s steps to view %d", p.name, v.Epoch)
			p.epoch = v.Epoch
			p.owner.Step(at, v)
			p.forgetEarly(v)
			p.holder.Step(v)
			p.stepping = false
			return nil
		}})
		p.handOver()
		if !w.cfg.manual {
			w.later(p.rng.Int64N(3*ms), p, p.keepAll)
		}
	}
	if !w.cfg.manual {
		p.askViewLeaseOnce()
	}
	d := min(p.stepPause, w.cfg.storm-w.now)
	if p.stepPause = 0; d > 0 {
		w.logf("%s pauses %d ms between its rights' step and its cores'", p.name, d/ms)
		w.later(d, p, cores)
		return
	}
	cores()
}

// lags says whether the cores have not stepped to the view of the rights yet.
func (p *proc) lags() bool { return p.epoch < p.rights.epoch }

// forgetEarly forgets what was told of partitions that have come or gone.
func (p *proc) forgetEarly(v *lease.View) {
	for part, since := range p.rights.since {
		if since == v.Epoch || v.OwnerOf(uint32(part)).Incarnation != p.inc {
			delete(p.knows, uint32(part))
			p.early = slices.DeleteFunc(p.early, func(r lease.Report) bool { return int(r.Partition) == part })
		}
	}
}

// has counts the buckets of a hand-off that the owner has.
func (p *proc) has(at lease.Instant, h *lease.Handoff) (n int) {
	for i := range h.Buckets {
		k := &h.Buckets[i].Key
		for _, l := range p.owner.Levels(at, k.Tenant) {
			if l.Key == *k {
				n++
			}
		}
	}
	return n
}

// own queues for the owner. Its clock is read once it is inside; what it is given then may take its time.
func (p *proc) own(work ownerWork) {
	p.work = append(p.work, work)
	p.pump()
}

func (p *proc) pump() {
	w := p.w
	for !p.busy && len(p.work) > 0 && p.alive {
		work := p.work[0]
		p.work = p.work[1:]
		at, truth := p.clock.read(w.now), w.now
		before, after := max(0, min(p.before, w.cfg.storm-w.now)), max(0, min(p.after, w.cfg.storm-w.now))
		p.before, p.after = 0, 0
		run := func() {
			p.readAt = truth
			outs := work.do(at)
			r := work.request
			if work.forged {
				r = nil // what it says was never so
			}
			w.judge.answered(p, at, truth, r, outs)
			w.dirty = true
			send := func() {
				for _, out := range outs {
					w.send(packet{from: p.inc, to: out.Holder, response: out})
				}
			}
			if after == 0 {
				send()
				return
			}
			p.busy, p.busyAt = true, at
			w.later(after, p, func() {
				send()
				p.busy = false
				p.pump()
			})
		}
		if before == 0 {
			run()
			continue
		}
		w.logf("%s's owner pauses %d ms after it read the clock", p.name, before/ms)
		p.busy, p.busyAt = true, at
		w.later(before, p, func() {
			p.busy = false
			run()
			p.pump()
		})
	}
	if !p.busy && p.alive {
		p.afterwards()
	}
}

// afterwards is what a shell does when its owner has been at work: the next tick, the ledger.
func (p *proc) afterwards() {
	w := p.w
	if w.cfg.manual {
		return
	}
	if next := p.clock.when(p.owner.Next()); next < p.tick {
		p.tick = max(next, w.now)
		at := p.tick
		w.later(at-w.now, p, func() {
			if p.tick == at {
				p.tick = never
				p.own(ownerWork{do: p.owner.Tick})
			}
		})
	}
	if w.durable {
		p.draw()
	}
}

// draw asks the ledger for the blocks that the owner wants.
func (p *proc) draw() {
	for _, d := range p.owner.Draws(p.clock.read(p.w.now)) {
		k := drawKey{d.Key, d.N}
		if p.drawing[k] {
			continue
		}
		p.drawing[k] = true
		p.w.send(packet{from: p.inc, to: ledgerID, draw: &d})
		p.w.later(150*ms, p, func() { // unanswered: ask again
			delete(p.drawing, k)
			p.afterwards()
		})
	}
}

// keepAlive speaks to all owners that hear of this process regularly.
func (p *proc) keepAlive() {
	p.keepAll()
	p.w.later(p.clock.when(p.clock.local(p.w.now)+int64(lease.KeepEvery))-p.w.now, p, p.keepAlive)
}

func (p *proc) keepAll() {
	for _, owner := range p.holder.Owners() {
		p.say(owner, nil)
	}
}

// wake is called from within the holder: it must not call back.
func (p *proc) wake(owner uint64) {
	if p.woken[owner] || p.w.cfg.manual {
		return
	}
	p.woken[owner] = true
	p.w.later(100_000+p.rng.Int64N(ms), p, func() {
		delete(p.woken, owner)
		p.say(owner, nil)
	})
}

// say sends the next request to an owner. Not ok: it is in no view.
func (p *proc) say(owner uint64, asks []lease.Ask) bool {
	now := p.clock.local(p.w.now)
	r := p.holder.Request(owner, asks)
	p.w.dirty = true
	if r == nil {
		return false
	}
	p.w.judge.sentOff(r, now)
	p.w.send(packet{from: p.inc, to: owner, request: r})
	return true
}

// receive takes what the network brings.
func (p *proc) receive(m packet) {
	w := p.w
	switch {
	case m.request != nil:
		r := m.request
		p.own(ownerWork{request: r, forged: m.forged, do: func(at lease.Instant) []*lease.Response { return p.owner.Handle(at, r) }})
	case m.response != nil:
		p.heard(m.response)
	case m.handoff != nil:
		h := m.handoff
		p.own(ownerWork{do: func(at lease.Instant) []*lease.Response {
			if p.epoch < h.Epoch { // not yet: it is sent again
				return nil
			}
			before := p.has(at, h)
			ok := p.owner.Accept(at, h)
			w.logf("%s is handed partition %d of view %d by %d (nothing %v): %v", p.name, h.Partition, h.Epoch, h.From, h.Nothing, ok)
			// The fence may have stepped on already: that the owner has the buckets says it all.
			if ok && !h.Nothing && !p.knows[h.Partition] && (p.has(at, h) > before ||
				p.rights.since[h.Partition] == h.Epoch && !p.rights.waited[h.Partition]) {
				w.stats.HandOffs++
				w.judge.accepted(p, p.readAt, h)
			}
			w.send(packet{from: p.inc, to: h.From, handedOff: &handedOff{h.Partition, h.Epoch}})
			return nil
		}})
	case m.handedOff != nil:
		a := *m.handedOff
		p.own(ownerWork{do: func(lease.Instant) []*lease.Response {
			p.owner.HandedOff(a.partition, a.epoch)
			return nil
		}})
	case m.drawn != nil:
		d := *m.drawn
		p.own(ownerWork{do: func(at lease.Instant) []*lease.Response {
			delete(p.drawing, drawKey{d.Key, d.N})
			return p.owner.Drawn(at, d)
		}})
	}
	w.dirty = true
}

func (p *proc) heard(r *lease.Response) {
	p.w.judge.heard(r)
	p.holder.Handle(r)
	for i := range r.Decisions {
		d := &r.Decisions[i]
		if q := p.asking[d.ID]; q != nil {
			delete(p.asking, d.ID)
			q.decided(d)
		}
	}
}

// handOver sends what is to be handed over until it is acknowledged.
func (p *proc) handOver() {
	if p.handing || p.w.cfg.manual {
		return
	}
	p.handing = true
	var again func()
	again = func() {
		p.handing = false
		p.own(ownerWork{do: func(at lease.Instant) []*lease.Response {
			hs := p.owner.HandOffs(at)
			for _, h := range hs {
				p.w.send(packet{from: p.inc, to: h.To, handoff: h})
			}
			if len(hs) > 0 && !p.handing {
				p.handing = true
				p.w.later(80*ms, p, again)
			}
			return nil
		}})
	}
	p.w.later(p.rng.Int64N(2*ms), p, again)
}

// leave is a graceful end: what is held goes back, a view comes without this process, what it owned is handed
// over.
func (p *proc) leave() {
	p.w.logf("%s leaves", p.name)
	p.leaving = true
	p.holder.Drain()
	began := p.w.now
	var wait func()
	wait = func() {
		switch {
		case !p.gone && (p.holder.Drained() || p.w.now-began > 2500*ms):
			p.gone = true
			p.w.logf("%s is drained: %v", p.name, p.holder.Drained())
		case p.gone && !member(p.w.newest(), p.inc) && p.epoch >= p.w.newest().Epoch && !p.busy &&
			(len(p.owner.HandOffs(p.clock.read(p.w.now))) == 0 || p.w.now-began > 5000*ms):
			p.die("has left")
			return
		}
		if !p.gone {
			p.keepAll()
		}
		p.w.later(40*ms, p, wait)
	}
	p.w.later(0, p, wait)
}

// request is one request of a client: its charges, from the take to the settle.
type request struct {
	p     *proc
	do    Take
	cs    []limiter.Charge
	ds    []limiter.Decision
	bs    []*bucket
	held  uint32
	lack  uint32 // to be asked for yet
	which uint32 // being asked for
	id    uint64
	sent  lease.Instant
	truth int64 // when it was sent
	peek  bool
	ended bool
	out   bool // a view left the process out while this held slots: they are excess
}

func (p *proc) begin(do Take) {
	w := p.w
	q := &request{p: p, do: do, peek: do.Peek}
	for _, c := range do.Charges {
		b := w.buckets[c.Bucket]
		q.bs = append(q.bs, b)
		q.cs = append(q.cs, limiter.Charge{
			Key: b.key, Limit: p.node.limit[c.Bucket], Cost: c.Cost, Oversize: c.Oversize, Shadow: c.Shadow, Spread: b.spread,
		})
	}
	q.ds = make([]limiter.Decision, len(q.cs))
	w.stats.Requests++
	if q.peek {
		_, q.lack = p.holder.Peek(q.cs, q.ds)
		q.next()
		return
	}
	var rs []reading
	p.readings = &rs
	refused, missing := p.holder.Take(q.cs, q.ds)
	p.readings = nil
	w.dirty = true
	if !p.alive {
		return
	}
	if refused >= 0 {
		w.logf("%s refuses %s itself", p.name, q)
		w.stats.RefusedLocally++
		q.ended = true
		return
	}
	q.held, q.lack = (1<<len(q.cs)-1)&^missing, missing
	q.taken(rs)
	q.next()
}

// taken enters what a take got out of leases, at the readings that it did it at.
func (q *request) taken(rs []reading) {
	p, w := q.p, q.p.w
	if len(rs) == 0 && q.held != 0 && q.costs() {
		w.fail("%s took %s and read no clock", p.name, q)
		return
	}
	for i := range q.cs {
		if q.held>>i&1 == 0 || q.cs[i].At == limiter.NotTaken {
			continue
		}
		if q.cs[i].Cost == 0 {
			continue
		}
		r := rs[max(0, len(rs)-2)]
		for _, x := range rs {
			if x.at.Now == q.ds[i].At || x.at.Wall == q.ds[i].At {
				r = x
			}
		}
		w.logf("%s takes %d of %s from its lease, at %d ms", p.name, q.cs[i].Cost, q.bs[i].key.Limit, r.truth/ms)
		w.stats.Local++
		w.judge.spent(q.bs[i], r.truth, q.bs[i].windowOf(r.at.Wall), q.cs[i].Cost, admitted)
		if last := rs[len(rs)-1]; last.at.Now > w.judge.liveUntil(p) {
			w.fail("%s took %s at %d, when no session of its can have lasted longer than to %d", p.name, q, last.at.Now, w.judge.liveUntil(p))
		}
	}
	q.use(q.held)
}

func (q *request) costs() bool {
	for i := range q.cs {
		if q.cs[i].Cost > 0 && q.cs[i].At != limiter.NotTaken && q.held>>i&1 == 1 {
			return true
		}
	}
	return false
}

// use counts slots as in use.
func (q *request) use(mask uint32) {
	for i, b := range q.bs {
		if mask>>i&1 == 0 || b.inUse == nil || q.cs[i].At == limiter.NotTaken {
			continue
		}
		if !q.out && q.p.epoch <= q.p.lastOut {
			q.leftOut()
		}
		q.slots(b)[q.p.inc] += q.cs[i].Cost
		q.p.using[q] |= 1 << i
	}
}

// slots is where a request's slots of a bucket are counted.
func (q *request) slots(b *bucket) map[uint64]int64 {
	if q.out {
		return b.excess
	}
	return b.inUse
}

// leftOut makes the slots that a request holds excess.
func (q *request) leftOut() {
	if q.out {
		return
	}
	q.out = true
	for i, b := range q.bs {
		if q.p.using[q]>>i&1 == 1 {
			b.inUse[q.p.inc] -= q.cs[i].Cost
			b.excess[q.p.inc] += q.cs[i].Cost
		}
	}
}

// next asks the next owner for what is missing; if nothing is, the request is admitted.
func (q *request) next() {
	p, w := q.p, q.p.w
	if q.lack == 0 {
		q.admitted()
		return
	}
	type group struct {
		owner uint64
		which uint32
	}
	var groups []group
	for i := range q.cs {
		if q.lack>>i&1 == 0 {
			continue
		}
		m, _ := p.holder.Owner(&q.cs[i])
		at := slices.IndexFunc(groups, func(g group) bool { return g.owner == m.Incarnation })
		if at < 0 {
			at = len(groups)
			groups = append(groups, group{owner: m.Incarnation})
		}
		groups[at].which |= 1 << i
	}
	g := slices.MinFunc(groups, func(a, b group) int { return cmp.Compare(a.owner, b.owner) })
	if g.owner == 0 {
		q.cancel("has nobody to ask")
		return
	}
	q.which = g.which
	ask := p.holder.Ask(q.cs, q.which, q.do.Wait, q.peek)
	q.id, q.sent, q.truth = ask.ID, p.clock.read(w.now), w.now
	w.judge.asks[askKey{p.inc, ask.ID}] = &asked{q, q.which}
	p.asking[ask.ID] = q
	if !p.say(g.owner, []lease.Ask{ask}) {
		delete(p.asking, ask.ID)
		q.cancel("cannot speak to the owner")
		return
	}
	w.stats.Asked++
	if w.cfg.manual {
		return
	}
	w.later(q.do.Wait+500*ms, p, func() {
		if p.asking[ask.ID] == q {
			delete(p.asking, ask.ID)
			q.cancel("hears nothing")
		}
	})
}

func (q *request) decided(d *lease.AskDecision) {
	p, w := q.p, q.p.w
	before := p.holder.Stats()
	refused, ok := p.holder.Decided(q.cs, q.which, d, q.sent.Now, q.ds)
	w.dirty = true
	switch {
	case q.peek:
		q.lack &^= q.which
		if ok && refused < 0 && q.lack != 0 {
			q.next()
		}
		return
	case !ok:
		w.stats.Void++
		if after := p.holder.Stats(); d.Refused == -1 && after.Void == before.Void && after.Rejected == before.Rejected {
			q.giveBack(d)
			q.cancel("is admitted with a slot that somebody else here took")
			return
		}
		q.cancel("is decided too late, or by an owner of before")
		return
	case refused != -1:
		w.stats.Refused++
		q.cancel(fmt.Sprintf("is refused (%d)", refused))
		return
	}
	if late := w.now - q.truth; late > leaseFor {
		w.fail("%s counts %s as admitted %d ms after it asked", p.name, q, late/ms)
	}
	q.use(q.which)
	q.held |= q.which
	q.lack &^= q.which
	w.stats.Direct++
	q.next()
}

// giveBack notes what is to come back of what an owner took where a slot that it lent for the same request is gone.
func (q *request) giveBack(d *lease.AskDecision) {
	n := 0
	for i, b := range q.bs {
		if q.which>>i&1 == 0 {
			continue
		}
		if c := &d.Charges[n]; c.Admitted && c.Series != 0 && !c.Lent {
			b.refunds[b.windowOf(c.At)] += q.cs[i].Cost
		}
		n++
	}
}

// cancel gives back what is held: the request is not admitted.
func (q *request) cancel(why string) {
	q.p.w.logf("%s: %s %s", q.p.name, q, why)
	if q.ended {
		q.p.w.fail("%s ends twice", q)
		return
	}
	q.ended = true
	if q.peek || q.held == 0 {
		return
	}
	q.end(nil, func() { q.p.holder.Cancel(q.cs, q.held) })
}

func (q *request) admitted() {
	w := q.p.w
	if q.peek {
		return
	}
	w.stats.Admitted++
	if w.cfg.manual {
		w.open = append(w.open, q)
		return
	}
	hold := q.do.Hold
	if end := w.cfg.storm + 500*ms - w.now; hold > end {
		hold = max(0, end)
	}
	w.later(hold, q.p, q.settle)
}

// settle ends the reservation with what was used.
func (q *request) settle() {
	if q.ended {
		return
	}
	q.ended = true
	actual := make([]int64, len(q.cs))
	for i := range actual {
		actual[i] = q.do.Charges[i].Actual
		if q.bs[i].inUse != nil {
			actual[i] = 0
		}
	}
	q.p.w.logf("%s settles %s at %v", q.p.name, q, actual)
	q.end(actual, func() { q.p.holder.Settle(q.cs, actual, q.ds) })
	for _, b := range q.bs {
		if b.inUse != nil && q.do.N%2 == 1 && !q.p.w.cfg.manual {
			q.p.holder.Yield(&b.key) // as if others waited for them
			q.p.w.dirty = true
		}
	}
	if q.do.Twice {
		q.p.holder.Settle(q.cs, actual, q.ds)
		q.p.holder.Cancel(q.cs, q.held)
	}
}

// end enters what comes back, or is owed, when the reservation ends. What comes back into a lease
// at once is seen from its level; the rest when its owner is told.
func (q *request) end(actual []int64, do func()) {
	p, w := q.p, q.p.w
	type part struct {
		b             *bucket
		window, delta int64
		level         int64
	}
	var parts []part
	for i, b := range q.bs {
		if q.held>>i&1 == 0 || q.cs[i].At == limiter.NotTaken {
			continue
		}
		delta := q.cs[i].Cost
		if actual != nil {
			delta -= actual[i]
		}
		if b.inUse != nil {
			delete(p.using, q)
			if q.slots(b)[p.inc] -= q.cs[i].Cost; q.slots(b)[p.inc] < 0 {
				w.fail("%s gives back more slots of %s than it took", p.name, b.key.Limit)
			}
			continue
		}
		at := q.ds[i].At
		if at < epoch/2 { // of a monotonic clock
			at = p.clock.read(w.now).Wall
		}
		x := part{b: b, window: b.windowOf(at), delta: delta}
		if delta > 0 {
			b.refunds[x.window] += delta
		} else {
			b.debts -= delta
		}
		x.level, _ = p.inHand(b)
		parts = append(parts, x)
	}
	do()
	w.dirty = true
	for _, x := range parts {
		level, state := p.inHand(x.b)
		d := level - x.level
		switch {
		case d > 0:
			w.judge.back(x.b, w.now, x.window, d)
		case d < 0 && x.delta < 0: // the debt is taken out of the lease
			d = max(d, x.delta) // levels are whole units, rounded down
			x.b.debts -= min(-d, x.b.debts)
			w.judge.spent(x.b, w.now, x.window, -d, forced)
		}
		switch {
		case x.delta <= 0 || x.b.ideal == nil:
		case state == leaseFrozen:
			x.b.frozen = min(x.b.frozen+x.delta, x.b.refunds[0])
		case state == leaseLive: // a unit may have come back and not show yet: roundings are against the level
			x.b.frozen = min(x.b.frozen+1, x.b.refunds[0])
		}
	}
}

const (
	leaseNone = iota
	leaseLive
	leaseFrozen // it may be spent from again but not now
)

// inHand is what this process could spend of a bucket, and whether it has a lease of it.
func (p *proc) inHand(b *bucket) (level int64, state int) {
	for i, ls := 0, p.holder.Levels(b.key.Tenant); i < len(ls); i++ {
		l := &ls[i]
		if l.Key != b.key {
			continue
		}
		level += max(0, l.Level)
		switch {
		case l.Left > 0 && (!l.Dead || l.Level > 0):
			state = max(state, leaseLive)
		case l.Left <= 0 && !l.Dead:
			state = leaseFrozen
		}
	}
	return level, state
}

func (q *request) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "request %d", q.do.N)
	for i := range q.cs {
		fmt.Fprintf(&s, " %d of %s", q.cs[i].Cost, q.cs[i].Key.Limit)
	}
	if q.lack != 0 {
		fmt.Fprintf(&s, " (%d of %d missing)", bits.OnesCount32(q.lack), len(q.cs))
	}
	return s.String()
}
