package lease

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"headgate/cluster"
	"headgate/lease"
	"headgate/limiter"
)

// fleet is Headgate where something goes wrong: each node is a process with an owner and a holder, and with what a lease.Manager does
// round them (see process). Views come from a leader that nothing happens to, on the side of the owner. Clocks are exact. A process
// that crashes refuses connections from then on, as its machine lives; what is sent to who is cut off is lost.
type fleet struct {
	w       *world
	plan    *plan
	sizer   lease.Sizer // nil: the default
	deny    bool        // what is out of reach is refused, not decided by rate/N
	rand    *rand.Rand
	tenant  int32
	limit   limiter.Limit
	private *limiter.Limit
	view    *lease.View // the newest
	nodes   []*process  // by node, its newest process; nil: none yet
	all     []*process  // by incarnation, less firstHolder
	outAt   int64       // when those that are cut off left the view
}

const never = int64(math.MaxInt64)

func (f *fleet) instant() lease.Instant {
	return lease.Instant{Now: epoch + f.w.now, Wall: epoch + f.w.now}
}

func (f *fleet) start(w *world) {
	f.w, f.plan, f.limit = w, w.plan, w.Limit
	f.limit.Revision = 1
	if len(w.demand) > 0 {
		f.tenant = w.demand[0].Tenant
	}
	f.rand = rand.New(rand.NewPCG(w.Seed, 3))
	part := f.limit
	part.Rate.Per *= time.Duration(w.Nodes)
	if part.Burst /= int64(w.Nodes); part.Burst > 0 && !f.deny {
		f.private = &part
	}
	f.nodes = make([]*process, w.Nodes+1)
	for i := range w.Nodes {
		f.boot(i)
	}
	f.view = f.viewOf(1, func(*process) bool { return true })
	for _, p := range f.all {
		p.step(f.view)
		p.serves = true
	}
	f.troubles()
}

// boot starts a process on a node. It is no member yet.
func (f *fleet) boot(node int) *process {
	p := newProcess(f, node, firstHolder+uint64(len(f.all)))
	f.all = append(f.all, p)
	f.nodes[node] = p
	f.w.after(p.phase, p.keep)
	return p
}

func (f *fleet) process(incarnation uint64) *process {
	if i := incarnation - firstHolder; i < uint64(len(f.all)) {
		return f.all[i]
	}
	return nil
}

// viewOf is a view of those of the newest processes that are in it.
func (f *fleet) viewOf(number uint64, in func(*process) bool) *lease.View {
	v := &lease.View{Epoch: number, Place: func(string) uint32 { return 0 }}
	there := make([]int32, len(f.nodes))
	for i, p := range f.nodes {
		if there[i] = -1; p != nil && in(p) {
			there[i] = int32(len(v.Members))
			v.Members = append(v.Members, lease.Member{Name: strconv.Itoa(i), Incarnation: p.inc})
		}
	}
	owner := f.plan.home(f.tenant, func(node int) bool { return node < len(there) && there[node] >= 0 })
	v.Owners = []int32{-1}
	if owner >= 0 {
		v.Owners[0] = there[owner]
	}
	return v
}

// commit makes the next view, of those newest processes that are to be in it. Who is cut off hears of it later.
func (f *fleet) commit(in func(*process) bool) {
	f.view = f.viewOf(f.view.Epoch+1, func(p *process) bool { return p.alive && in(p) })
	for _, p := range f.all {
		if p.alive {
			p.missed = append(p.missed, f.view)
			if !f.apart(p) {
				f.tell(p)
			}
		}
	}
}

// tell has a process step to the views that it has not yet.
func (f *fleet) tell(p *process) {
	f.w.after(f.w.way(), func() {
		missed := p.missed
		p.missed = nil
		for _, v := range missed {
			p.step(v)
		}
	})
}

// member says whether a process is in the newest view.
func (f *fleet) member(p *process) bool { return has(f.view, p.inc) }

func has(v *lease.View, incarnation uint64) bool {
	return slices.ContainsFunc(v.Members, func(m lease.Member) bool { return m.Incarnation == incarnation })
}

func (f *fleet) apart(p *process) bool { return f.plan.apart(p.node, f.w.now) }

// reach says whether messages go from one process to another now.
func (f *fleet) reach(a, b *process) bool { return f.apart(a) == f.apart(b) }

// send has something done at a process when a message of another one is there; never, if it is lost.
func (f *fleet) send(from, to *process, do func()) {
	if !f.reach(from, to) {
		return
	}
	f.w.after(f.w.way(), func() {
		if to.alive && f.reach(from, to) {
			do()
		}
	})
}

func (f *fleet) lent() (sum float64) {
	for _, p := range f.nodes {
		if p == nil || !p.alive {
			continue
		}
		for _, l := range p.holder.Levels("t") {
			sum += float64(l.Level)
		}
	}
	return sum
}

func (f *fleet) arrive(id int) {
	a := &f.w.demand[id]
	node := f.plan.where(id, a, func(i int) bool { return f.nodes[i] != nil && f.nodes[i].serves })
	x := &asker{f: f, p: f.nodes[node], id: id, charges: []limiter.Charge{
		{Key: limiter.Key{Tenant: "t", Limit: "l", Subject: "s"}, Limit: &f.limit, Cost: a.Cost, Apart: limiter.ByPrivate, Private: f.private},
	}}
	x.p.open++
	x.take()
}

// troubles has things go wrong as planned.
func (f *fleet) troubles() {
	p, at := f.plan, func(t int64, do func()) { f.w.after(t-f.w.now, do) }
	switch p.fault {
	case OwnerCrash, HolderCrash:
		at(p.at, func() { f.crash(f.nodes[p.victim]) })
	case Partition:
		at(p.at, f.separate)
		at(p.until, f.reunite)
	case Join:
		at(p.at, func() { f.join(p.nodes) })
	case RollingRestart:
		for _, l := range p.leaves {
			at(l.at, func() { f.leave(f.nodes[l.node]) })
		}
	}
}

func (f *fleet) rtt() int64 { return 2 * f.w.way() }

// crash ends a process without a word. Its connections break, and new ones are refused; then a view is without it.
func (f *fleet) crash(p *process) {
	p.alive, p.serves = false, false
	f.w.after(f.w.way(), func() { f.reset(p) })
	f.w.after(int64(found(f.rand))+f.rtt(), func() { f.commit(f.member) })
}

// reset breaks the streams to a process that is gone.
func (f *fleet) reset(gone *process) {
	for _, q := range f.all {
		if l := q.lines[gone.inc]; l != nil && q.alive {
			l.reset()
		}
	}
}

// separate begins a partition: those that are cut off leave the view when gossip gives them up.
func (f *fleet) separate() {
	for _, p := range f.all {
		if f.apart(p) {
			p.cutAt = f.w.now
		}
	}
	f.w.after(int64(cutFound+debounce)+f.rtt(), func() {
		if f.plan.until > f.w.now {
			f.commit(func(q *process) bool { return f.member(q) && !f.apart(q) })
			f.outAt = f.w.now
		}
	})
}

// reunite ends it: who was cut off hears of the views that it has missed, and comes back when gossip has met it again.
func (f *fleet) reunite() {
	out := false
	for _, p := range f.all {
		if p.cutAt == 0 {
			continue
		}
		p.linked(f.w.now)
		if !f.member(p) {
			out = true
			f.tell(p)
		}
	}
	if !out {
		return
	}
	wait := max(int64(rand64(f.rand, reunited)), f.outAt+int64(rejoinAfter)-f.w.now)
	f.w.after(wait+int64(debounce)+f.rtt(), func() { f.commit(func(*process) bool { return true }) })
}

// join starts a process on a node that has none, and has it serve when it has a view lease.
func (f *fleet) join(node int) {
	p := f.boot(node)
	p.step(f.view)
	f.w.after(int64(startFor), func() {
		f.commit(func(q *process) bool { return f.member(q) || q == p })
		f.w.after(f.w.way()+f.rtt(), func() { p.serves = true })
	})
}

// leave has a process end as a clean stop does: it takes no requests, gives its leases back, leaves the view, hands over, and comes
// back as another process.
func (f *fleet) leave(p *process) {
	p.serves = false
	began, step := f.w.now, 0
	var wait func()
	wait = func() {
		now := f.w.now
		switch {
		case step == 0 && p.open == 0:
			step = 1
			p.holder.Drain()
			p.speak()
		case step == 1 && (p.holder.Drained() || now-began > int64(drainFor)):
			step = 2
			f.w.after(f.w.way()+f.rtt(), func() { f.commit(func(q *process) bool { return f.member(q) && q != p }) })
		case step == 1:
			p.speak()
		case step == 2 && !has(p.view, p.inc) && (len(p.owner.HandOffs(f.instant())) == 0 || now-began > 2*int64(drainFor)):
			p.alive = false
			f.w.after(f.w.way(), func() { f.reset(p) })
			f.join(p.node)
			return
		}
		f.w.after(int64(drainLook), wait)
	}
	wait()
}

const (
	drainFor  = 500 * time.Millisecond // at most, until a process that leaves has given back what it holds, and again until it has handed over
	drainLook = 5 * time.Millisecond   // between looks at whether it has
)

// fence is what a process may grant (cluster.Fence), of a world of one partition. The lease of a process that the leader hears is
// renewed every cluster.KeepEvery, and at once on a new view.
type fence struct {
	p       *process
	epoch   uint64
	starts  int64 // when the partition may be granted for; never: it is not this process's
	since   uint64
	sinceAt int64
}

func (r *fence) step(now int64, v *lease.View) {
	follows := v.Epoch == r.epoch+1
	switch mine := v.OwnerOf(0).Incarnation == r.p.inc; {
	case !mine:
		r.starts = never
	case follows && r.epoch > 0 && r.starts != never:
	default:
		r.starts, r.since, r.sinceAt = now+int64(cluster.TakeoverWait), v.Epoch, now
		if v.Epoch == 1 {
			r.starts = now
		}
	}
	r.epoch = v.Epoch
}

// Left implements lease.Rights.
func (r *fence) Left(now int64, _ uint32) int64 {
	if r.starts == never || now < r.starts || r.since > 1 && now < r.sinceAt+r.p.f.rtt() {
		return 0
	}
	return r.Lease(now, r.epoch)
}

// Lease implements lease.Rights.
func (r *fence) Lease(now int64, e uint64) int64 {
	if r.epoch > e || r.p.view == nil || !has(r.p.view, r.p.inc) {
		return 0
	}
	return max(0, r.p.leased(now-epoch)+epoch-now)
}

// Started implements lease.Rights.
func (r *fence) Started(now int64, e uint64, _ uint32) {
	if r.since == e && r.starts != never {
		r.starts = min(r.starts, now)
	}
}
