package leasetest

import (
	"slices"

	"headgate/lease"
	"headgate/limiter"
)

// lab is a small world that does nothing by itself: messages lie in the bag until somebody delivers them, and time
// passes when it is told to. Nodes a and b own, c and d hold; there is one partition, and a view lease is renewed
// whenever the newest view allows it. Search and the directed schedules drive it.
type lab struct {
	*world
	cut   map[*proc]bool // no view lease, no view
	park  int64          // how long asks may wait for a recall
	blind bool           // the judge is asked later
}

// newLab is a lab with buckets, in view 1: a owns all.
func newLab(cfg Config, limits ...limiter.Limit) *lab { return newSmallLab(cfg, 4, limits...) }

func newSmallLab(cfg Config, nodes int, limits ...limiter.Limit) *lab {
	s := &Script{Partitions: 1}
	for range nodes {
		s.Clocks = append(s.Clocks, clock{offset: 1000 * ms})
	}
	for i, l := range limits {
		s.Buckets = append(s.Buckets, BucketSpec{Key: limiter.Key{Tenant: "t", Limit: string(rune('l' + i))}, Limit: l})
	}
	return labOf(cfg, s)
}

func labOf(cfg Config, s *Script) *lab {
	cfg.manual = true
	if cfg.MaxBuckets == 0 {
		cfg.MaxBuckets = 16
	}
	cfg.storm = never / 2
	w := &lab{world: newWorld(cfg, s), cut: map[*proc]bool{}}
	for _, n := range w.nodes {
		w.start(n)
	}
	w.own(w.proc('a'), w.living()...)
	w.stepAll()
	return w
}

func (w *lab) proc(name rune) *proc { return w.nodes[name-'a'].proc }

// own commits a view in which one process owns the partition. Nobody has heard of it yet.
func (w *lab) own(owner *proc, members ...*proc) {
	v := &lease.View{Epoch: uint64(len(w.views)) + 1, Place: w.place, Owners: []int32{-1}}
	for i, p := range members {
		v.Members = append(v.Members, lease.Member{Name: p.node.name, Incarnation: p.inc})
		if p == owner {
			v.Owners[0] = int32(i)
		}
	}
	w.commitView(v)
}

// step has a process apply the next view.
func (w *lab) step(p *proc) bool {
	if !p.alive || w.cut[p] || p.epoch >= uint64(len(w.views)) {
		return false
	}
	p.step(w.views[p.epoch])
	w.renew()
	w.handOffs(p)
	w.look()
	return true
}

func (w *lab) stepAll() {
	for _, p := range w.procs {
		for w.step(p) {
			continue
		}
	}
}

// handOffs puts into the bag what a process has to hand over.
func (w *lab) handOffs(p *proc) {
	p.own(ownerWork{do: func(at lease.Instant) []*lease.Response {
		for _, h := range p.owner.HandOffs(at) {
			w.send(packet{from: p.inc, to: h.To, handoff: h})
		}
		return nil
	}})
}

// renew gives view leases to whom the newest view allows one.
func (w *lab) renew() {
	for _, p := range w.procs {
		if v := w.newest(); p.alive && !w.cut[p] && member(v, p.inc) && p.rights.epoch == v.Epoch {
			now := p.clock.local(w.now)
			p.rights.granted(now, now, p.rights.epoch)
		}
	}
}

// look asks the judge.
func (w *lab) look() {
	if w.failed == "" && !w.blind {
		w.judge.check()
	}
}

// wait lets time pass. Owners do what it brings at its end.
func (w *lab) wait(d int64) {
	w.now += d
	w.renew()
	w.look()
	for _, p := range w.procs {
		if p.alive && p.owner.Next() <= p.clock.local(w.now) {
			p.own(ownerWork{do: p.owner.Tick})
		}
	}
	w.look()
}

// take asks for a cost of a bucket at a process.
func (w *lab) take(p *proc, costs ...int64) {
	t := Take{N: w.stats.Requests + 1, Wait: w.park}
	for i, c := range costs {
		if c > 0 {
			t.Charges = append(t.Charges, TakeCharge{Bucket: i, Cost: c, Actual: c})
		}
	}
	p.begin(t)
	w.look()
}

// settle ends the oldest reservation of a process.
func (w *lab) settle(p *proc, actual ...int64) bool {
	for i, q := range w.open {
		if q.p != p {
			continue
		}
		w.open = slices.Delete(w.open, i, i+1)
		for k := range q.do.Charges {
			if k < len(actual) {
				q.do.Charges[k].Actual = actual[k]
			}
		}
		q.settle()
		w.look()
		return true
	}
	return false
}

// keep sends a keep-alive to an owner.
func (w *lab) keep(p *proc, owner uint64) {
	p.say(owner, nil)
	w.look()
}

// deliver takes message i out of the bag; keep: a copy stays.
func (w *lab) deliver(i int, keep bool) {
	m := w.bag[i]
	if keep {
		m = m.clone()
	} else {
		w.bag = slices.Delete(w.bag, i, i+1)
	}
	w.world.deliver(m)
	w.look()
}

// flush delivers everything, and what comes of it, in order.
func (w *lab) flush() {
	for n := 0; len(w.bag) > 0 && n < 1000 && w.failed == ""; n++ {
		w.deliver(0, false)
	}
}

// lose empties the bag.
func (w *lab) lose() { w.bag = nil }

// hold takes out of the bag what fits, to be delivered later.
func (w *lab) hold(fits func(packet) bool) (held []packet) {
	w.bag = slices.DeleteFunc(w.bag, func(m packet) bool {
		if fits(m) {
			held = append(held, m)
			return true
		}
		return false
	})
	return held
}

// late delivers what was held.
func (w *lab) late(ms ...packet) {
	for _, m := range ms {
		w.world.deliver(m.clone())
		w.look()
	}
}
