package leasetest

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"

	"headgate/lease"
	"headgate/limiter"
)

// Config says what to play.
type Config struct {
	Seed   uint64
	Break  lease.Rule // what the cores are to do wrong
	Trace  bool       // keep a trace
	Sizer  lease.Sizer
	Script *Script // nil: made from Seed

	// MaxBuckets bounds owners and holders.
	MaxBuckets int

	storm  int64 // when all faults are over
	safety bool  // what is to come to a good end is not asked for
	manual bool  // nothing happens by itself: Search and the directed schedules drive
}

// Stats counts what a run met, so that a quiet simulation does not pass for a good one.
type Stats struct {
	Events, Requests, Admitted, Local, Asked, Direct, RefusedLocally, Refused, Void int
	Views, HandOffs, Takeovers, Crashes, Joins, Leaves, Pauses, Draws               int
	Lost, Repeated, Forged                                                          int
	ExcessSlots                                                                     int64
}

// Add adds what another run met.
func (s *Stats) Add(o Stats) {
	s.Events += o.Events
	s.Requests += o.Requests
	s.Admitted += o.Admitted
	s.Local += o.Local
	s.Asked += o.Asked
	s.Direct += o.Direct
	s.RefusedLocally += o.RefusedLocally
	s.Refused += o.Refused
	s.Void += o.Void
	s.Views += o.Views
	s.HandOffs += o.HandOffs
	s.Takeovers += o.Takeovers
	s.Crashes += o.Crashes
	s.Joins += o.Joins
	s.Leaves += o.Leaves
	s.Pauses += o.Pauses
	s.Draws += o.Draws
	s.Lost += o.Lost
	s.Repeated += o.Repeated
	s.Forged += o.Forged
	s.ExcessSlots += o.ExcessSlots
}

const (
	ledgerID   = math.MaxUint64
	traceLines = 3000
)

// packet is a message on its way.
type packet struct {
	from, to  uint64 // incarnations, or ledgerID
	request   *lease.Request
	response  *lease.Response
	handoff   *lease.Handoff
	handedOff *handedOff
	draw      *lease.Draw
	drawn     *lease.Drawn
	forged    bool
	number    int // manual: how many were sent until then
}

type handedOff struct {
	partition uint32
	epoch     uint64
}

// world is one run: machines, their network, the ledger with its views, and the judge.
type world struct {
	cfg    Config
	script *Script
	now    int64
	events queue
	nested int
	moved  int64 // when time last went on
	still  int   // and how many events there were since

	nodes        []*node
	procs        []*proc // every process that ever ran
	byInc        map[uint64]*proc
	incarnations uint64

	partitions int
	views      []*lease.View
	salt       uint64 // of who owns what
	wild       int64  // until when views come of their own accord
	links      [][]link
	calm       bool

	tenants  []string
	buckets  []*bucket
	byKey    map[limiter.Key]*bucket
	durable  bool
	blocks   map[limiter.Key]*blocks
	judge    *judge
	granters []*proc  // by partition: who may grant now
	started  []tenure // and who did last
	sums     []sum
	lax      bool
	dirty    bool
	bag      []packet   // manual: what is on its way
	open     []*request // and what is admitted and not settled
	packets  int

	stats  Stats
	failed string
	trace  []string
}

// link is the way from one machine to another.
type link struct {
	rng      *rand.Rand
	cutUntil int64
	cutSince int64
	loss     int // per mille, until lossUntil
	lossTill int64
	slow     int64 // added until slowTill
	slowTill int64
	forge    int // so many twisted copies go along
}

func newWorld(cfg Config, s *Script) *world {
	w := &world{
		cfg: cfg, script: s, byInc: map[uint64]*proc{}, byKey: map[limiter.Key]*bucket{},
		partitions: s.Partitions, granters: make([]*proc, s.Partitions), started: make([]tenure, s.Partitions), blocks: map[limiter.Key]*blocks{},
	}
	w.judge = newJudge(w)
	for i, c := range s.Clocks {
		w.nodes = append(w.nodes, &node{index: i, name: string(rune('a' + i)), clock: c})
	}
	for i, b := range s.Buckets {
		m := newBucket(i, b.Key, b.Spread, b.Limit)
		w.buckets = append(w.buckets, m)
		w.byKey[b.Key] = m
		w.durable = w.durable || m.durable
		if !slices.Contains(w.tenants, b.Key.Tenant) {
			w.tenants = append(w.tenants, b.Key.Tenant)
		}
		for _, n := range w.nodes {
			n.limit = append(n.limit, m.limit)
		}
	}
	w.sums = make([]sum, len(w.buckets))
	w.links = make([][]link, len(w.nodes)+1)
	for i := range w.links {
		w.links[i] = make([]link, len(w.nodes)+1)
		for k := range w.links[i] {
			w.links[i][k].rng = rand.New(rand.NewPCG(cfg.Seed, uint64(i)<<40|uint64(k)<<20|1))
		}
	}
	return w
}

func (w *world) bucketOf(k *limiter.Key) *bucket { return w.byKey[*k] }

func (b *bucket) partition(w *world) uint32 {
	return w.place(lease.Home(&b.key, b.spread))
}

func (w *world) place(home string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(home))
	return h.Sum32() % uint32(w.partitions)
}

func (w *world) logf(format string, args ...any) {
	if !w.cfg.Trace {
		return
	}
	if len(w.trace) >= traceLines {
		w.trace = slices.Delete(w.trace, 0, traceLines/2)
	}
	w.trace = append(w.trace, fmt.Sprintf("%9.3f ms  ", float64(w.now)/float64(ms))+fmt.Sprintf(format, args...))
}

func (w *world) fail(format string, args ...any) {
	if w.failed == "" {
		w.failed = fmt.Sprintf(format, args...)
		w.logf("VIOLATION: %s", w.failed)
	}
}

func (w *world) newest() *lease.View {
	if len(w.views) == 0 {
		return nil
	}
	return w.views[len(w.views)-1]
}

// later lets something happen to p, if p is not nil, in d.
func (w *world) later(d int64, p *proc, do func()) {
	w.events.push(w.now+max(d, 0), event{p, do})
}

// within lets time pass up to an instant, in the middle of an event.
func (w *world) within(until int64) {
	if w.nested >= 3 {
		w.now = max(w.now, min(until, w.events.next()))
		return
	}
	w.nested++
	w.run(until)
	w.nested--
}

func (w *world) run(until int64) {
	for w.failed == "" && w.events.next() <= until {
		w.now = max(w.now, w.events.next())
		e := w.events.pop()
		if p := e.proc; p != nil {
			if !p.alive {
				continue
			}
			if p.pausedUntil > w.now {
				w.events.push(p.pausedUntil, e)
				continue
			}
		}
		if w.stats.Events++; w.now > w.moved {
			w.moved, w.still = w.now, 0
		} else if w.still++; w.still > 100_000 {
			w.fail("time stands still: somebody has something to do at once, for ever")
			return
		}
		e.do()
		if w.dirty {
			w.dirty = false
			w.judge.check()
		}
	}
	if w.failed == "" {
		w.now = max(w.now, until)
	}
}

// send puts a message on its way, as bytes would be: what is sent shares nothing with what comes.
func (w *world) send(m packet) {
	w.logf("  %s", w.describe(&m, "->"))
	if w.cfg.manual {
		w.packets++
		c := m.clone()
		c.number = w.packets
		w.bag = append(w.bag, c)
		return
	}
	if m.to == m.from {
		c := m.clone()
		p := w.byInc[m.to]
		w.later(10_000, p, func() { p.receive(c) })
		return
	}
	l := w.link(m.from, m.to)
	if l == nil {
		return
	}
	if l.forge > 0 && !w.calm {
		l.forge--
		c := twist(l.rng, m)
		w.stats.Forged++
		w.logf("  %s", w.describe(&c, "forged ->"))
		w.later(l.rng.Int64N(5*ms), w.byInc[m.to], func() { w.deliver(c) })
	}
	copies := 1
	if l.rng.IntN(100) == 0 && !w.calm {
		copies = 2
		w.stats.Repeated++
	}
	for range copies {
		d, ok := l.delay(w)
		if !ok {
			w.stats.Lost++
			w.logf("  lost")
			continue
		}
		c := m.clone()
		w.later(d, w.byInc[m.to], func() { w.deliver(c) })
	}
}

func (w *world) deliver(m packet) {
	if m.to == ledgerID {
		w.draw(m.from, *m.draw)
		return
	}
	if p := w.byInc[m.to]; p != nil && p.alive {
		w.logf("  %s", w.describe(&m, "=>"))
		p.receive(m)
	}
}

func (w *world) where(inc uint64) int {
	if inc == ledgerID {
		return len(w.nodes)
	}
	if p := w.byInc[inc]; p != nil {
		return p.node.index
	}
	return -1
}

func (w *world) link(from, to uint64) *link {
	i, k := w.where(from), w.where(to)
	if i < 0 || k < 0 {
		return nil
	}
	return &w.links[i][k]
}

// delay is how long the next message takes; not ok: it is lost.
func (l *link) delay(w *world) (d int64, ok bool) {
	d = 100_000 + l.rng.Int64N(2*ms)
	odd := l.rng.IntN(1000)
	if w.calm {
		return d, true
	}
	switch {
	case odd < 20:
		d += l.rng.Int64N(60 * ms)
	case odd < 24:
		d += l.rng.Int64N(1500 * ms)
	}
	if l.slowTill > w.now {
		d += l.slow
	}
	if l.cutUntil > w.now || odd > 990 || l.lossTill > w.now && l.rng.IntN(1000) < l.loss {
		return 0, false
	}
	return d, true
}

func (l *link) cut(now, d int64) {
	if l.cutUntil <= now {
		l.cutSince = now
	}
	l.cutUntil = max(l.cutUntil, now+d)
}

// askViewLease asks for a view lease now and every 100 ms.
func (p *proc) askViewLease() {
	p.askViewLeaseOnce()
	p.w.later(p.clock.when(p.clock.local(p.w.now)+askEvery)-p.w.now, p, p.askViewLease)
}

func (p *proc) askViewLeaseOnce() {
	w := p.w
	sent, asked := p.clock.local(w.now), p.rights.epoch
	there, back := w.link(p.inc, ledgerID), w.link(ledgerID, p.inc)
	d, ok := there.delay(w)
	if asked == 0 || !ok {
		return
	}
	w.later(d, nil, func() {
		v := w.newest()
		d, ok := back.delay(w)
		if !ok || v == nil || v.Epoch != asked || !member(v, p.inc) {
			return
		}
		w.later(d, p, func() {
			if p.rights.granted(sent, p.clock.local(w.now), asked) {
				w.dirty = true
			}
		})
	})
}

// catchUp has p apply the views that there are, one by one, or, where it fell behind, perhaps only the newest.
func (w *world) catchUp(p *proc) {
	again := func() { w.later(50*ms, p, func() { w.catchUp(p) }) }
	v := w.newest()
	if !p.alive || v == nil || p.rights.epoch >= v.Epoch {
		return
	}
	l := w.link(ledgerID, p.inc)
	if p.lagUntil > w.now || l.cutUntil > w.now || p.stepping {
		again()
		return
	}
	if behind := v.Epoch - p.rights.epoch; behind > 1 && p.rng.IntN(3) == 0 {
		p.step(v)
		return
	}
	p.step(w.views[p.rights.epoch])
	if p.rights.epoch < v.Epoch {
		w.later(p.rng.Int64N(5*ms), p, func() { w.catchUp(p) })
	}
}

// commit makes the next view, and lets everybody hear of it.
func (w *world) commit(members []lease.Member) {
	v := &lease.View{Epoch: uint64(len(w.views)) + 1, Members: members, Place: w.place}
	for part := range w.partitions {
		v.Owners = append(v.Owners, w.ownerOf(part, members))
	}
	w.commitView(v)
}

func (w *world) commitView(v *lease.View) {
	w.views = append(w.views, v)
	w.stats.Views++
	for _, p := range w.procs {
		if p.alive && !member(v, p.inc) {
			p.lastOut = v.Epoch
			for q := range p.using { // in any order: it only adds up
				q.leftOut()
			}
		}
	}
	w.logf("view %d: %s", v.Epoch, w.describeView(v))
	if w.cfg.manual {
		return
	}
	for _, p := range w.procs {
		if p.alive {
			w.later(ms+p.rng.Int64N(30*ms), p, func() { w.catchUp(p) })
		}
	}
	w.dirty = true
}

// ownerOf is rendezvous hashing with a salt.
func (w *world) ownerOf(part int, members []lease.Member) int32 {
	best, most := int32(-1), uint64(0)
	for i, m := range members {
		h := fnv.New64a()
		fmt.Fprintf(h, "%s %d %d", m.Name, part, w.salt)
		x := h.Sum64()
		x ^= x >> 29
		x *= 0xbf58476d1ce4e5b9
		if x ^= x >> 32; best < 0 || x > most {
			best, most = int32(i), x
		}
	}
	return best
}

// govern is the raft leader: it makes views of who seems alive.
func (w *world) govern() {
	defer w.later(40*ms, nil, w.govern)
	if w.wild > w.now {
		return
	}
	const detection = 300 * ms
	var members []lease.Member
	for _, n := range w.nodes {
		p := n.proc
		if p == nil || p.gone || !p.alive && w.now-p.diedAt > detection ||
			p.pausedUntil > w.now && w.now-p.pausedSince > detection {
			continue
		}
		if l := &w.links[n.index][len(w.nodes)]; l.cutUntil > w.now && w.now-l.cutSince > detection {
			continue
		}
		members = append(members, lease.Member{Name: n.name, Incarnation: p.inc})
	}
	if v := w.newest(); len(members) > 0 && (v == nil || !slices.Equal(members, v.Members) || w.salted(v)) {
		w.commit(members)
	}
}

// salted says whether partitions are to move although the members stay.
func (w *world) salted(v *lease.View) bool {
	for part := range w.partitions {
		if w.ownerOf(part, v.Members) != v.Owners[part] {
			return true
		}
	}
	return false
}
