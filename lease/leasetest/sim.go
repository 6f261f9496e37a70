package leasetest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"headgate/lease"
)

// Result is what came of a run.
type Result struct {
	Seed      uint64
	Violation string // what was wrong first; "": nothing
	Trace     []string
	Stats     Stats
}

// Run plays a seed, or a script with its chances.
func Run(cfg Config) Result {
	s := cfg.Script
	if s == nil {
		s = NewScript(cfg.Seed)
	}
	w := start(cfg, s)
	w.run(storm + quiet)
	if w.failed == "" && !cfg.safety {
		w.finish()
	}
	return Result{Seed: cfg.Seed, Violation: w.failed, Trace: w.trace, Stats: w.stats}
}

// start makes the world of a script, and puts its steps where they belong.
func start(cfg Config, s *Script) *world {
	if cfg.MaxBuckets == 0 {
		cfg.MaxBuckets = cmp.Or(s.MaxBuckets, 64)
	}
	cfg.storm = storm
	w := newWorld(cfg, s)
	if s.Whim && cfg.Sizer == nil {
		w.cfg.Sizer = whim{rand.New(rand.NewPCG(cfg.Seed, 4)), &w.calm}
	}
	for _, n := range w.nodes {
		w.start(n)
	}
	w.govern()
	for i := range s.Steps {
		step := &s.Steps[i]
		w.events.push(step.At, event{do: func() { w.apply(step) }})
	}
	w.events.push(storm, event{do: w.calmDown})
	return w
}

// apply does one step of the script.
func (w *world) apply(s *Step) {
	n := w.nodes[s.Node]
	p := n.proc
	alive := p != nil && p.alive
	if s.Kind != DoTake {
		w.logf("-- %s", strings.TrimSpace(s.String()))
	}
	switch s.Kind {
	case DoTake:
		if alive && p.pausedUntil <= w.now && !p.leaving {
			p.begin(*s.Take)
		}
	case PauseProc, PauseTake, PauseOwner, PauseStep, PauseAnswer, Lag, Zombie:
		if alive {
			w.hinder(p, s)
		}
	case Cut, CutOneWay, Lossy, Slow:
		w.disturb(s)
	case Crash:
		if alive {
			w.stats.Crashes++
			p.die("crashes")
			w.restart(n, s.For)
		}
	case Leave:
		if alive && !p.leaving && len(w.living()) > 1 {
			w.stats.Leaves++
			p.leave()
			w.restart(n, s.For+600*ms)
		}
	case Forge:
		w.links[s.Node][s.To].forge += 3
	case Move:
		w.salt = uint64(s.N)
	case AwayAndBack:
		w.awayAndBack(n, s.For)
	case Wild:
		w.wildView(s)
	case Policy:
		w.policy(s)
	case Sweep:
		if alive {
			p.own(ownerWork{do: func(at lease.Instant) []*lease.Response {
				p.owner.Sweep(at, 8)
				return nil
			}})
		}
	}
}

func (w *world) hinder(p *proc, s *Step) {
	w.stats.Pauses++
	switch s.Kind {
	case PauseProc:
		p.pausedSince, p.pausedUntil = w.now, w.now+s.For
	case PauseTake: // when something is taken next
		p.takePause, p.takeWhole = s.For, s.N == 1
	case PauseOwner:
		p.before = s.For
	case PauseStep:
		p.stepPause = s.For
	case PauseAnswer:
		p.after = s.For
	case Lag:
		p.lagUntil = w.now + s.For
	case Zombie:
		p.pausedSince, p.pausedUntil = w.now, w.now+s.For
		w.start(p.node)
	}
}

func (w *world) disturb(s *Step) {
	for from := range w.links {
		for to := range w.links {
			if from == to {
				continue
			}
			l := &w.links[from][to]
			switch {
			case s.Kind == Cut && (s.N>>from^s.N>>to)&1 == 1,
				s.Kind == CutOneWay && from == s.Node && to == s.To:
				l.cut(w.now, s.For)
			case s.Kind == Lossy:
				l.loss, l.lossTill = int(s.N), w.now+s.For
			case s.Kind == Slow && to == s.Node:
				l.slow, l.slowTill = s.N, w.now+s.For
			}
		}
	}
}

// restart starts another process on a node, unless one runs.
func (w *world) restart(n *node, in int64) {
	w.later(in, nil, func() {
		switch {
		case n.proc == nil || !n.proc.alive:
			w.stats.Joins++
			w.start(n)
		case n.proc.leaving:
			w.restart(n, 200*ms)
		}
	})
}

// awayAndBack takes a node's partitions away for a while during which it applies no view, and gives them back
// before it does.
func (w *world) awayAndBack(n *node, d int64) {
	p, v := n.proc, w.newest()
	if p == nil || !p.alive || !member(v, p.inc) || len(v.Members) < 2 {
		return
	}
	p.lagUntil = w.now + d + 20*ms
	w.wild = w.now + d + 10*ms
	w.commit(slices.DeleteFunc(slices.Clone(v.Members), func(m lease.Member) bool { return m.Incarnation == p.inc }))
	w.later(d, nil, func() {
		if p.alive && w.newest().Epoch == v.Epoch+1 {
			w.commit(v.Members)
		}
	})
}

// wildView is a view whatever the members did: nothing may hang on why views change.
func (w *world) wildView(s *Step) {
	var members []lease.Member
	for i, n := range w.nodes {
		if n.proc != nil && (s.N>>i&1 == 1 || len(w.nodes) == 1) {
			members = append(members, lease.Member{Name: n.name, Incarnation: n.proc.inc})
		}
	}
	if len(members) > 0 && w.newest() != nil {
		w.wild = w.now + min(s.For, 400*ms)
		w.commit(members)
	}
}

// policy changes a limit; nodes hear of it one after the other.
func (w *world) policy(s *Step) {
	b := w.buckets[s.To]
	if s.Lim.Durable() != b.durable {
		return
	}
	b.revise(w.now, *s.Lim)
	l := b.limit
	for i, n := range w.nodes {
		at := s.For * int64(i) / int64(len(w.nodes))
		w.later(at, nil, func() {
			if n.limit[s.To].Revision < l.Revision {
				n.limit[s.To] = l
			}
		})
	}
}

// calmDown ends every fault.
func (w *world) calmDown() {
	w.calm = true
	w.logf("-- calm")
	for i := range w.links {
		for k := range w.links[i] {
			l := &w.links[i][k]
			l.cutUntil, l.lossTill, l.slowTill = min(l.cutUntil, w.now), 0, 0
		}
	}
	for _, p := range w.procs {
		p.pausedUntil, p.lagUntil = min(p.pausedUntil, w.now), 0
		p.takePause, p.before, p.after, p.stepPause = 0, 0, 0, 0
		if p.alive && p.node.proc != p {
			p.die("finds its name taken, and ends")
		}
	}
	for _, n := range w.nodes {
		if n.proc == nil || !n.proc.alive {
			w.start(n)
		}
	}
	w.wild = 0
}

// finish asks, long after the last fault and the last settle, whether all is well: everything is acknowledged, all
// slots are free, and what ought to be there can be had.
func (w *world) finish() {
	for part, g := range w.granters {
		if g == nil {
			w.fail("nobody grants of partition %d long after the last fault", part)
			return
		}
	}
	for _, p := range w.procs {
		if !p.alive {
			continue
		}
		for range 10 { // owners still change their mind about what a holder needs
			if p.holder.Stats().Unacknowledged == 0 {
				break
			}
			w.run(w.now + 77*ms)
		}
		if n := p.holder.Stats().Unacknowledged; n > 0 {
			for _, tenant := range w.tenants {
				w.dump(tenant)
			}
			w.fail("%s has %d totals that no owner acknowledged, long after the last fault", p.name, n)
		}
		if n := p.owner.Stats().Parked; n > 0 {
			w.fail("%s has %d asks parked, long after the last", p.name, n)
		}
		if n := len(p.asking); n > 0 {
			w.fail("%s has %d asks without an answer", p.name, n)
		}
	}
	for _, b := range w.buckets {
		w.finishBucket(b)
	}
}

// finishBucket takes all of a bucket at one process.
func (w *world) finishBucket(b *bucket) {
	for inc, n := range b.inUse {
		if p := w.byInc[inc]; p.alive && n != 0 {
			w.fail("%s: %d slots are in use by %s after all was settled", b.key.Limit, n, p.name)
		}
	}
	if w.failed != "" || b.durable || w.script.MaxBuckets > 0 { // which others may fill
		return
	}
	there := w.living()
	if len(there) == 0 {
		return // the last has left
	}
	p, want := there[0], b.limit.Capacity()
	if b.ideal != nil {
		// By the slowest clocks, and less what a unit's fraction and a fault may have cost.
		want = min(want, w.due(b))
	}
	if b.win != nil || b.ideal != nil && len(b.revs) > 1 { // a lower burst makes a debt of what was spent
		want = 0 // a fault may have cost the window that is open
	}
	if want <= 0 {
		return
	}
	take := Take{N: 1_000_000 + b.index, Wait: 200 * ms, Charges: []TakeCharge{{Bucket: b.index, Cost: want, Actual: want}}}
	for _, n := range w.nodes {
		n.limit[b.index] = b.limit
	}
	before := w.stats.Admitted
	w.cfg.storm = w.now
	for range 4 { // a recall may be fruitless once
		p.begin(take)
		w.run(w.now + 700*ms)
		if w.stats.Admitted > before || w.failed != "" {
			return
		}
	}
	w.dump(b.key.Tenant)
	w.fail("%s: %d cannot be had at %s, long after the last fault and the last settle", b.key.Limit, want, p.name)
}

// dump writes into the trace what everybody has of a tenant's buckets.
func (w *world) dump(tenant string) {
	for _, p := range w.procs {
		if w.cfg.Trace && p.alive {
			w.logf("%s owns %+v", p.name, p.owner.Levels(p.clock.read(w.now), tenant))
			w.logf("%s holds %+v", p.name, p.holder.Levels(tenant))
		}
	}
}

// living are the processes that live, by node.
func (w *world) living() (ps []*proc) {
	for _, n := range w.nodes {
		if n.proc != nil && n.proc.alive && !n.proc.leaving {
			ps = append(ps, n.proc)
		}
	}
	return ps
}

// due is what a bucket must have gained since the storm whatever was lost in it.
func (w *world) due(b *bucket) int64 {
	// After the storm: what was left to settle, at most half a second; a takeover, at most 1.6 s; by clocks 2 % apart.
	gained := float64(w.now-storm-2600*ms) / float64(b.limit.Rate.Per) * float64(b.limit.Rate.Count) * .98
	owed := int64(0)
	for _, e := range b.ideal.entries {
		if e.kind == forced && e.amount > 0 || e.kind == oversize {
			owed += e.amount
		}
	}
	return int64(gained) - owed - 1
}

// Shrink finds a short script that fails as cfg does; nil: cfg does not fail. It takes at most
// budget runs.
func Shrink(cfg Config, budget int) *Script {
	s := cfg.Script
	if s == nil {
		s = NewScript(cfg.Seed)
	}
	cfg.Trace = false
	play := func(steps []Step) string {
		budget--
		c := *s
		c.Steps = steps
		try := cfg
		try.Script = &c
		return kindOf(Run(try).Violation)
	}
	kind := play(s.Steps)
	if kind == "" {
		return nil
	}
	fails := func(steps []Step) bool { return play(steps) == kind }
	steps := s.Steps
	for size := (len(steps) + 1) / 2; size > 0 && budget > 0; {
		shorter := false
		for at := 0; at < len(steps) && budget > 0; {
			without := slices.Concat(steps[:at], steps[min(at+size, len(steps)):])
			if fails(without) {
				steps, shorter = without, true
				continue
			}
			at += size
		}
		switch {
		case size > 1:
			size /= 2
		case !shorter:
			size = 0
		}
	}
	c := *s
	c.Steps = steps
	return &c
}

// kindOf is a violation without what differs from one run to another.
func kindOf(violation string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune("abcd.-0123456789", r) {
			return -1
		}
		return r
	}, violation)
}

// Report is a failure for a person: the seed, the shortest script found, and the end of its trace.
func Report(cfg Config, r Result) string {
	var out strings.Builder
	fmt.Fprintf(&out, "seed %d: %s\n", r.Seed, r.Violation)
	cfg.Seed = r.Seed
	s := Shrink(cfg, 2000)
	if s == nil {
		return out.String() + "(and does not repeat)"
	}
	cfg.Script, cfg.Trace = s, true
	short := Run(cfg)
	fmt.Fprintf(&out, "shortest: %s\n", short.Violation)
	for _, b := range s.Buckets {
		fmt.Fprintf(&out, "  bucket %+v %+v\n", b.Key, b.Limit)
	}
	for i, c := range s.Clocks {
		fmt.Fprintf(&out, "  node %c %+v\n", 'a'+i, c)
	}
	for _, step := range s.Steps {
		fmt.Fprintln(&out, "  "+step.String())
	}
	trace := short.Trace[max(0, len(short.Trace)-250):]
	return out.String() + strings.Join(trace, "\n")
}
