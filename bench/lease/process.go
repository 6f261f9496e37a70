package lease

import (
	"slices"
	"time"

	"headgate/cluster"
	"headgate/lease"
	"headgate/limiter"
)

// The times of a lease.Manager (lease/manager*.go).
const (
	budget       = 250 * time.Millisecond // a request waits for owners, all in all
	firstPause   = 5 * time.Millisecond   // before another try where an owner may not grant yet; then twice that, and so on
	maxPause     = 40 * time.Millisecond
	shutProbe    = 100 * time.Millisecond // how often a partition that is shut is tried
	maxTries     = 32
	openFor      = time.Second
	silentFor    = 2 * lease.KeepEvery // a stream that says nothing for so long though it should is dead
	firstBackoff = 25 * time.Millisecond
	maxBackoff   = time.Second
	handRetry    = 20 * time.Millisecond
	maxHandRetry = 500 * time.Millisecond
	selfRounds   = 8
	leastTick    = time.Millisecond
)

// process is a node's part in the leases: the cores and what a lease.Manager does round them, in virtual time.
type process struct {
	f       *fleet
	node    int
	inc     uint64
	alive   bool
	serves  bool // clients reach it
	open    int  // requests that are not decided
	view    *lease.View
	missed  []*lease.View // on their way to it
	fence   fence
	owner   *lease.Owner
	holder  *lease.Holder
	private *lease.Local
	lines   map[uint64]*wire // by owner; of the others
	peers   []*wire          // the same, in order
	self    []*asker         // asks that the owner here has not decided
	wanted  bool             // the holder has something to say to the owner here
	poked   bool             // it will be seen to what the holder wants
	paused  []*asker
	shut    int64 // until when the partition is; 0: it is not
	trouble bool  // some owner is out of reach
	due     int64 // of the owner's next tick; never
	phase   int64 // of its keep-alives
	handing bool
	// The view lease: since when the leader hears the process, since when it does not (0: it does), and the deadline that it had then.
	linkedAt, cutAt, deadline int64
}

func newProcess(f *fleet, node int, incarnation uint64) *process {
	p := &process{f: f, node: node, inc: incarnation, alive: true, lines: map[uint64]*wire{}, due: never, phase: f.rand.Int64N(int64(lease.KeepEvery))}
	p.linkedAt = f.w.now
	if f.w.now == 0 {
		p.linkedAt = p.phase - int64(time.Minute) // it has run for long
	}
	p.fence = fence{p: p, starts: never}
	p.owner = lease.NewOwner(lease.OwnerConfig{Self: p.inc, Rights: &p.fence, Sizer: f.sizer, Wait: int64(cluster.TakeoverWait)})
	p.holder = lease.NewHolder(lease.HolderConfig{Self: p.inc, Clock: f.instant, Wake: p.wake})
	private, err := lease.NewLocal(lease.Config{Shards: 1})
	if err != nil {
		panic(err) // a constant configuration
	}
	p.private = private
	return p
}

// leased is when the view lease ends.
func (p *process) leased(now int64) int64 {
	until := now
	if p.cutAt > 0 {
		until = min(now, p.cutAt)
	}
	sent := until - p.f.rtt()
	if sent < p.linkedAt {
		return p.deadline
	}
	every := int64(cluster.KeepEvery)
	return sent - (sent-p.linkedAt)%every + int64(viewLease)
}

// linked: the leader hears the process from now on.
func (p *process) linked(now int64) {
	p.deadline = p.leased(now)
	p.linkedAt, p.cutAt = now, 0
}

// step goes on to a view, as Manager.Step does.
func (p *process) step(v *lease.View) {
	if !p.alive || p.view != nil && v.Epoch <= p.view.Epoch {
		return
	}
	if p.view != nil && !has(p.view, p.inc) && has(v, p.inc) {
		p.linked(p.f.w.now)
	}
	at := p.f.instant()
	p.view = v
	p.fence.step(at.Now, v)
	p.owner.Step(at, v)
	p.holder.Step(v)
	for _, l := range slices.Clone(p.peers) {
		if !has(v, l.to.inc) {
			l.end()
		}
	}
	p.shut = 0
	p.wanted = true
	p.exchange(nil)
	p.after()
	p.assess()
	p.changed()
	p.handOver(int64(handRetry))
	for _, o := range p.holder.Owners() {
		if l := p.line(o); l != nil {
			l.keepAlive()
		}
	}
}

// changed wakes who waits for another owner.
func (p *process) changed() {
	paused := p.paused
	p.paused = nil
	for _, x := range paused {
		x.resume()
	}
}

// wake is called from within the holder: it must not call back.
func (p *process) wake(owner uint64) {
	if owner == p.inc {
		p.wanted = true
	} else if l := p.lines[owner]; l != nil {
		l.wanted, l.woken = true, true
	}
	if !p.poked {
		p.poked = true
		p.f.w.after(0, func() {
			p.poked = false
			if !p.alive {
				return
			}
			p.exchange(nil)
			for _, l := range slices.Clone(p.peers) {
				l.next()
			}
		})
	}
}

// keep is what is done every KeepEvery.
func (p *process) keep() {
	if !p.alive {
		return
	}
	p.speak()
	for _, l := range slices.Clone(p.peers) {
		if l.broken {
			l.keepAlive()
		}
		l.check()
	}
	p.f.w.after(int64(lease.KeepEvery), p.keep)
}

// speak is the keep-alive to every owner of whom anything is held.
func (p *process) speak() {
	for _, o := range p.holder.Owners() {
		if o == p.inc {
			p.wanted = true
			p.exchange(nil)
		} else if l := p.line(o); l != nil {
			l.keepAlive()
		}
	}
}

// line is the one to an owner of the view; nil: it is no member, or this process.
func (p *process) line(owner uint64) *wire {
	if l := p.lines[owner]; l != nil {
		return l
	}
	to := p.f.process(owner)
	if owner == p.inc || to == nil || p.view == nil || !has(p.view, owner) {
		return nil
	}
	l := &wire{p: p, to: to, up: true}
	p.lines[owner] = l
	p.peers = append(p.peers, l)
	if !to.alive {
		l.up = false
		l.redial(int64(firstBackoff))
	}
	return l
}

// exchange says to the owner here what the holder has to say, with an ask or, if it has anything, without.
func (p *process) exchange(x *asker) {
	for round := 0; round < selfRounds && (p.wanted || x != nil); round++ {
		p.wanted = false
		var asks []lease.Ask
		with := x
		if x != nil {
			asks = []lease.Ask{x.question()}
			x.sent = epoch + p.f.w.now
			p.self = append(p.self, x)
			x = nil
		}
		r := p.holder.Request(p.inc, asks)
		if r == nil {
			if with != nil {
				p.self = drop(p.self, with)
				with.again()
			}
			return
		}
		answers := p.owner.Handle(p.f.instant(), r)
		p.route(answers)
		if with != nil && len(answers) > 0 && answers[0].Session == 0 && slices.Contains(p.self, with) {
			p.self = drop(p.self, with)
			with.again()
		}
	}
	p.after()
}

func drop(xs []*asker, x *asker) []*asker {
	if i := slices.Index(xs, x); i >= 0 {
		return slices.Delete(xs, i, i+1)
	}
	return xs
}

// route sends what the owner here says to whom it is for.
func (p *process) route(rs []*lease.Response) {
	for _, r := range rs {
		if r.Holder == p.inc {
			p.hear(r)
			continue
		}
		q := p.f.process(r.Holder)
		if r.Answers == 0 {
			p.f.w.pushed++
		}
		if q == nil {
			continue
		}
		p.f.send(p, q, func() {
			if l := q.lines[p.inc]; l != nil {
				l.hear(r)
			}
		})
	}
}

// hear takes what the owner here says.
func (p *process) hear(r *lease.Response) {
	p.holder.Handle(r)
	for i := range r.Decisions {
		d := &r.Decisions[i]
		if at := slices.IndexFunc(p.self, func(x *asker) bool { return x.ask == d.ID }); at >= 0 {
			x := p.self[at]
			p.self = slices.Delete(p.self, at, at+1)
			x.decided(d)
		}
	}
}

// handle is the owner's answer to another process's request.
func (p *process) handle(r *lease.Request) {
	p.route(p.owner.Handle(p.f.instant(), r))
	p.exchange(nil)
}

// after has the owner do what is due, now and later.
func (p *process) after() {
	next := p.owner.Next()
	if next == never || next-epoch > int64(p.f.w.length())*2 {
		return
	}
	at := max(next-epoch, p.f.w.now+int64(leastTick))
	if p.due <= at {
		return
	}
	p.due = at
	p.f.w.after(at-p.f.w.now, func() {
		if p.due != at || !p.alive {
			return
		}
		p.due = never
		p.route(p.owner.Tick(p.f.instant()))
		p.exchange(nil)
	})
}

// assess notes whether some owner is out of reach. When that begins, private buckets are empty.
func (p *process) assess() {
	was := p.trouble
	p.trouble = p.shut != 0 || slices.ContainsFunc(p.peers, func(l *wire) bool { return l.broken })
	if p.trouble && !was {
		p.private.SetFloor(p.f.instant().Now)
	}
}

// handOver gives what this process owned to its next owners, again until they say that they have it.
func (p *process) handOver(wait int64) {
	hs := p.owner.HandOffs(p.f.instant())
	if len(hs) == 0 {
		p.handing = false
		return
	}
	if wait == int64(handRetry) && p.handing {
		return
	}
	p.handing = true
	for _, h := range hs {
		q := p.f.process(h.To)
		if q == nil || p.view.OwnerOf(h.Partition).Incarnation != h.To {
			continue
		}
		p.f.send(p, q, func() { q.handed(p, h) })
	}
	p.f.w.after(wait, func() {
		if p.alive {
			p.handOver(min(2*wait, int64(maxHandRetry)))
		}
	})
}

// handed takes a partition over.
func (p *process) handed(from *process, h *lease.Handoff) {
	if p.view == nil || p.view.Epoch < h.Epoch {
		return // it comes again
	}
	if p.owner.Accept(p.f.instant(), h) {
		p.f.send(p, from, func() { from.owner.HandedOff(h.Partition, h.Epoch) })
	}
	p.after()
	p.changed()
}

// mayTry says whether to ask the owner at all, and whether the partition is not known to be shut.
func (p *process) mayTry() (try, fresh bool) {
	switch now := p.f.w.now; {
	case p.shut == 0:
		return true, true
	case now < p.shut:
		return false, false
	default:
		p.shut = now + int64(shutProbe)
		return true, false
	}
}

func (p *process) shutOff() {
	p.shut = p.f.w.now + int64(shutProbe)
	p.assess()
}

func (p *process) granted() {
	if p.shut != 0 {
		p.shut = 0
		p.assess()
	}
}

// asker is a request.
type asker struct {
	f       *fleet
	p       *process
	id      int
	charges []limiter.Charge
	ds      [1]limiter.Decision
	asked   bool // another process
	done    bool
	fresh   bool
	tries   int
	pauses  int   // that began
	began   int64 // when it found that it has to ask; 0: it has not
	tried   int64 // when this try began
	to      uint64
	line    *wire // on which it asks or waits
	ask     uint64
	sent    int64 // the reading before the request with the ask; 0: it was not sent
	heard   bool  // that request was answered
	lent    int64 // until when what its owner lent may be spent, if that is silent
}

func (x *asker) decide(admitted bool, at int64) {
	x.done = true
	x.p.open--
	x.f.w.decide(x.id, admitted, !x.asked, at)
}

// take decides by the lease in hand, or begins to ask.
func (x *asker) take() {
	if x.local() {
		return
	}
	x.began = x.f.w.now
	x.choose()
	if !x.done {
		x.f.w.after(int64(budget), x.over)
	}
}

// local has the holder decide, if it can.
func (x *asker) local() bool {
	refused, missing := x.p.holder.Take(x.charges, x.ds[:])
	switch {
	case refused >= 0:
		x.decide(false, 0)
	case missing == 0:
		x.took()
	default:
		return false
	}
	return true
}

// took settles at once, at the estimate.
func (x *asker) took() {
	x.decide(true, x.ds[0].At-epoch)
	x.p.holder.Settle(x.charges, []int64{x.charges[0].Cost}, x.ds[:])
}

func (x *asker) question() lease.Ask {
	a := x.p.holder.Ask(x.charges, 1, x.left()*3/4, false)
	x.ask, x.sent, x.heard = a.ID, 0, false
	return a
}

func (x *asker) left() int64 { return max(0, x.began+int64(budget)-x.f.w.now) }

// choose asks whoever owns the bucket now.
func (x *asker) choose() {
	to, _ := x.p.holder.Owner(&x.charges[0])
	if to.Incarnation == 0 {
		x.apart()
		return
	}
	x.to, x.tries = to.Incarnation, 0
	try, fresh := x.p.mayTry()
	if x.fresh = fresh; !try {
		x.apart()
		return
	}
	x.once()
}

// once is one try.
func (x *asker) once() {
	x.tried, x.line = x.f.w.now, nil
	if x.to == x.p.inc {
		x.p.exchange(x)
		return
	}
	l := x.p.line(x.to)
	switch {
	case l == nil:
		x.again() // this process is just stepping to another view
	case l.broken:
		x.silent(l)
	default:
		x.asked, x.line = true, l
		l.enter(x)
	}
}

// decided takes the owner's decision.
func (x *asker) decided(d *lease.AskDecision) {
	if d.Refused == lease.NotOwner {
		x.again()
		return
	}
	refused, ok := x.p.holder.Decided(x.charges, 1, d, x.sent, x.ds[:])
	switch {
	case !ok || refused == lease.NotOwner:
		x.again()
	case refused == -1:
		x.p.granted()
		x.took()
	default:
		x.p.granted()
		x.decide(false, 0)
	}
}

// again: the owner may not grant now, or the stream broke.
func (x *asker) again() {
	if x.done {
		return
	}
	x.line = nil
	if to, _ := x.p.holder.Owner(&x.charges[0]); to.Incarnation != x.to {
		x.choose()
		return
	}
	x.tries++
	now := x.f.instant().Now
	if !x.fresh || x.tries >= maxTries || x.left() == 0 || x.to == x.p.inc && x.p.fence.Lease(now, x.p.fence.epoch) <= 0 {
		x.shutOut()
		return
	}
	x.pauses++
	round := x.pauses
	x.p.paused = append(x.p.paused, x)
	x.f.w.after(min(int64(firstPause)<<min(x.tries-1, 3), int64(maxPause)), func() {
		if x.pauses == round && !x.done {
			x.p.paused = drop(x.p.paused, x)
			x.resume()
		}
	})
}

// resume ends a pause.
func (x *asker) resume() {
	if x.done || !x.p.alive {
		return
	}
	x.pauses++
	if to, _ := x.p.holder.Owner(&x.charges[0]); to.Incarnation != x.to {
		x.choose()
		return
	}
	x.once()
}

// shutOut: the owner has not granted for the whole budget.
func (x *asker) shutOut() {
	if x.fresh {
		x.p.shutOff()
	}
	x.apart()
}

// silent: the owner is out of reach.
func (x *asker) silent(l *wire) {
	x.lent = l.live - x.f.instant().Now
	x.apart()
}

// over: the budget is.
func (x *asker) over() {
	if x.done || !x.p.alive {
		return
	}
	l := x.line
	switch {
	case l != nil:
		l.missed(x)
		x.silent(l)
	case slices.Contains(x.p.self, x):
		x.p.self = drop(x.p.self, x)
		x.apart()
	default:
		x.p.paused = drop(x.p.paused, x)
		x.shutOut()
	}
}

// apart decides by the private bucket of the process, unless what the owner lent may still be spent.
func (x *asker) apart() {
	if x.done {
		return
	}
	c := x.charges[0]
	c.At, c.Held, c.Limit = limiter.NotTaken, nil, c.Private
	if x.lent > 0 || c.Limit == nil {
		x.decide(false, 0)
		return
	}
	refused := x.p.private.Take(x.f.instant().Now, []limiter.Charge{c}, x.ds[:])
	x.decide(refused == -1, x.f.w.now)
}
