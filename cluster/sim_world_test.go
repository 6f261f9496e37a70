package cluster

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"headgate/cluster/ledger"
)

// simMS is a millisecond of virtual time. All times of the simulation are int64
// nanoseconds of true time unless a clock says otherwise.
const (
	simMS         = int64(time.Millisecond)
	simPartitions = 16 // what masks of 64 bits hold, with room
	simTraceLines = 400
)

// simBreak removes one rule of the protocol from a run.
type simBreak struct {
	verifyLeader       bool // V2: VerifyLeader as of hashicorp/raft v1.8.0 in place of the barrier
	ignoreIncarnations bool // V1: names alone are compared
	noWait             bool // V4: a new owner starts at once
	bridgeGaps         bool // a skipped view counts as one that changed nothing
	lateJoin           bool // V2: a barrier answers those, too, who came after it began
	fromAnswer         bool // V1: a lease counts from its answer, not from the send of the request
	lendLong           bool // R4: an owner lends for 1 s, however long its own lease lasts
}

// simEvent is something that happens to proc, if there is one.
type simEvent struct {
	proc *simProc
	do   func()
}

// simQueue gives events back in the order of their instants, and of one instant in the
// order in which they came. The heap holds no pointers, which halves the cost of a run.
type simQueue struct {
	heap  []simDue
	slots []simEvent
	free  []int32
	seq   uint64
}

type simDue struct {
	at   int64
	seq  uint64
	slot int32
}

func (d simDue) before(o simDue) bool { return d.at < o.at || d.at == o.at && d.seq < o.seq }

func (q *simQueue) push(at int64, e simEvent) {
	var slot int32
	if n := len(q.free); n > 0 {
		slot, q.free = q.free[n-1], q.free[:n-1]
		q.slots[slot] = e
	} else {
		slot = int32(len(q.slots))
		q.slots = append(q.slots, e)
	}
	q.seq++
	d := simDue{at, q.seq, slot}
	q.heap = append(q.heap, d)
	i := len(q.heap) - 1
	for i > 0 && d.before(q.heap[(i-1)/2]) {
		q.heap[i] = q.heap[(i-1)/2]
		i = (i - 1) / 2
	}
	q.heap[i] = d
}

// next is the instant of the earliest event.
func (q *simQueue) next() int64 { return q.heap[0].at }

func (q *simQueue) pop() simEvent {
	first := q.heap[0]
	d := q.heap[len(q.heap)-1]
	q.heap = q.heap[:len(q.heap)-1]
	i := 0
	for {
		child := 2*i + 1
		if child >= len(q.heap) {
			break
		}
		if child+1 < len(q.heap) && q.heap[child+1].before(q.heap[child]) {
			child++
		}
		if !q.heap[child].before(d) {
			break
		}
		q.heap[i] = q.heap[child]
		i = child
	}
	if len(q.heap) > 0 {
		q.heap[i] = d
	}
	e := q.slots[first.slot]
	q.slots[first.slot] = simEvent{}
	q.free = append(q.free, first.slot)
	return e
}

// simClock runs at up to 1 % off true time, from anywhere.
type simClock struct{ offset, ppm int64 }

func (c simClock) read(t int64) int64 { return c.offset + t + t*c.ppm/1_000_000 }

// when is the first true instant at which the clock shows local, or one just after it.
func (c simClock) when(local int64) int64 {
	t := (local - c.offset) * 1_000_000 / (1_000_000 + c.ppm)
	for c.read(t) < local {
		t++
	}
	return t
}

// simStats counts what a run met, so that a quiet simulation does not pass for a good one.
type simStats struct {
	events, elections, views, snapshots, crashes, zombies, lapses, waits, sessions int
}

func (s *simStats) add(o simStats) {
	s.events += o.events
	s.elections += o.elections
	s.views += o.views
	s.snapshots += o.snapshots
	s.crashes += o.crashes
	s.zombies += o.zombies
	s.lapses += o.lapses
	s.waits += o.waits
	s.sessions += o.sessions
}

// simHold delays what is sent to one server before until by extra.
type simHold struct{ until, extra int64 }

// simWorld is one run: machines, their network, the adversary, and the oracle.
type simWorld struct {
	seed    uint64
	rng     *rand.Rand
	broken  simBreak
	now     int64
	events  simQueue
	servers []*simServer
	procs   []*simProc // every process that ever ran, the newest last
	mighty  []*simProc // those that may grant, or of whom somebody may hold something
	voters  int
	calm    bool // no more faults

	// The network.
	cut          [][]int64 // until when nothing sent from one to another gets through
	cutSince     [][]int64
	held         []simHold // by receiver
	slow         int64     // mean delay
	tail         int64     // now and then up to this
	loss, double float64
	leaderLease  int64

	agreed map[uint64]*ledger.View // what was applied, by epoch

	stats     simStats
	violation string // of safety
	stuck     string // what was not granted for long after the last fault
	tracing   bool
	trace     []string
}

func newSimWorld(seed uint64, broken simBreak, tracing bool) *simWorld {
	w := &simWorld{seed: seed, rng: rand.New(rand.NewPCG(seed, 0x6865616467617465)), broken: broken, tracing: tracing, agreed: map[uint64]*ledger.View{}}
	w.voters = 3 + 2*w.rng.IntN(2)
	if w.rng.IntN(4) == 0 {
		w.voters = 4
	}
	nonVoters, spares := w.rng.IntN(3), 1
	w.slow, w.tail = w.between(200_000, 2*simMS), w.between(10*simMS, 400*simMS)
	w.loss, w.double = w.rng.Float64()*.03, w.rng.Float64()*.05
	w.leaderLease = w.between(150*simMS, 500*simMS)
	total := w.voters + nonVoters + spares
	for i := range total {
		s := &simServer{w: w, id: i, voter: i < w.voters, name: fmt.Sprintf("n%d", i), votedFor: -1}
		s.clock = simClock{offset: w.between(0, 1_000_000*simMS), ppm: w.between(-9_999, 10_000)}
		w.servers = append(w.servers, s)
		w.cut = append(w.cut, make([]int64, total))
		w.cutSince = append(w.cutSince, make([]int64, total))
		w.held = append(w.held, simHold{})
	}
	for _, s := range w.servers[:total-spares] {
		s.start()
	}
	return w
}

// between is a random number in [lo, hi).
func (w *simWorld) between(lo, hi int64) int64 { return lo + w.rng.Int64N(max(hi-lo, 1)) }

// chance is true with probability p.
func (w *simWorld) chance(p float64) bool { return w.rng.Float64() < p }

// after runs do in d, if p still runs then; while p is paused, it waits for p.
func (w *simWorld) after(d int64, p *simProc, do func()) {
	w.events.push(w.now+d, simEvent{p, do})
}

// run goes on until the virtual instant end, or to the first violation.
func (w *simWorld) run(end int64) {
	for w.violation == "" && w.events.next() <= end {
		w.now = w.events.next()
		e := w.events.pop()
		w.stats.events++
		w.check()
		switch p := e.proc; {
		case p != nil && !p.alive:
		case p != nil && p.pausedUntil > w.now:
			// What piled up meanwhile comes in any order on waking.
			w.events.push(p.pausedUntil+w.between(0, 3*simMS), e)
		default:
			e.do()
		}
	}
	w.now = end
}

// logf adds a line to the trace.
func (w *simWorld) logf(format string, args ...any) {
	if !w.tracing {
		return
	}
	w.trace = append(w.trace, fmt.Sprintf("%9.3f ms  ", float64(w.now)/float64(simMS))+fmt.Sprintf(format, args...))
	if len(w.trace) > 2*simTraceLines {
		w.trace = append(w.trace[:0], w.trace[len(w.trace)-simTraceLines:]...)
	}
}

func (w *simWorld) tracedTail() string {
	return strings.Join(w.trace[max(0, len(w.trace)-simTraceLines):], "\n")
}

// send delivers to whatever process runs on the server to when it arrives. A cut stops what is sent
// during it, not what is under way.
func (w *simWorld) send(from, to int, deliver func(p *simProc)) {
	w.transmit(from, to, func(d int64) {
		w.after(d, nil, func() {
			if p := w.servers[to].proc; p != nil {
				w.after(0, p, func() { deliver(p) })
			}
		})
	})
}

// answer delivers to the process that asked, on its connection, or to nobody.
func (w *simWorld) answer(from int, to *simProc, deliver func()) {
	w.transmit(from, to.srv.id, func(d int64) { w.after(d, to, deliver) })
}

func (w *simWorld) transmit(from, to int, once func(delay int64)) {
	if from == to {
		once(0)
		return
	}
	if w.cut[from][to] > w.now || !w.calm && w.chance(w.loss) {
		return
	}
	var extra int64
	if w.now < w.held[to].until {
		extra = w.held[to].extra
	}
	once(w.delay() + extra)
	if !w.calm && w.chance(w.double) {
		once(w.delay() + extra)
	}
}

func (w *simWorld) delay() int64 {
	d := w.slow/2 + int64(w.rng.ExpFloat64()*float64(w.slow)/2)
	if !w.calm && w.chance(.02) {
		d += w.between(0, w.tail)
	}
	return d
}

// hesitation is how long a goroutine stands between reading a clock and acting on it.
func (w *simWorld) hesitation() int64 {
	if w.calm || !w.chance(.02) {
		return 0
	}
	return w.between(0, 1500*simMS)
}

// check is the oracle: at no instant do two processes grant for one partition, and
// what one has lent of it is not spendable while another grants.
func (w *simWorld) check() {
	var all uint64
	for _, p := range w.mighty {
		mask := p.grants(w.now)
		if all&mask != 0 {
			w.report("now", all&mask)
			return
		}
		all |= mask
	}
}

func (w *simWorld) report(how string, both uint64) {
	var who []string
	for _, p := range w.procs {
		if mask := p.grants(w.now) & both; mask != 0 {
			who = append(who, fmt.Sprintf("%s at epoch %d (partitions %b)", p, p.fence.Epoch(), mask))
		}
	}
	w.fail("%s: partitions %b have two granters, now: %s", how, both, strings.Join(who, "; "))
}

// applied checks the model itself: raft lets all state machines apply the same.
func (w *simWorld) applied(v *ledger.View) {
	if w.agreed[v.Epoch] == nil {
		w.agreed[v.Epoch] = v
	}
	if w.agreed[v.Epoch] != v {
		w.fail("the model of raft is wrong: two views of epoch %d: %s; %s", v.Epoch, viewString(w.agreed[v.Epoch]), viewString(v))
	}
}

func (w *simWorld) fail(format string, args ...any) {
	w.violation = fmt.Sprintf("at %.3f ms, ", float64(w.now)/float64(simMS)) + fmt.Sprintf(format, args...)
	w.logf("VIOLATION %s", w.violation)
}

// probe reads every process's clock at one instant and asks its fence some time later, as a goroutine
// does that was put aside between the two. The answers are of that one instant.
func (w *simWorld) probe() {
	asked := w.now
	var all uint64
	var answers []string
	for _, p := range w.procs {
		if !p.alive {
			continue
		}
		now := p.clock().read(w.now)
		var late int64
		if w.chance(.5) {
			late = w.between(0, 2500*simMS)
		}
		w.after(late, nil, func() {
			var mask uint64
			for part := range uint32(simPartitions) {
				if p.alive && p.fence.MayGrant(now, part) {
					mask |= 1 << part
				}
			}
			if mask != 0 {
				answers = append(answers, fmt.Sprintf("%s (partitions %b)", p, mask))
			}
			if all&mask != 0 && w.violation == "" {
				w.fail("clocks read at %.3f ms: partitions %b have two granters: %s",
					float64(asked)/float64(simMS), all&mask, strings.Join(answers, "; "))
			}
			all |= mask
		})
	}
}

// every runs do now and again, d apart on average, as long as p runs.
func (w *simWorld) every(d int64, p *simProc, do func()) {
	w.after(w.between(d*9/10, d*11/10), p, func() {
		do()
		w.every(d, p, do)
	})
}

// leader is a process that leads, or thinks it does; the one of the highest term.
func (w *simWorld) leader() (leader *simProc) {
	for _, s := range w.servers {
		if p := s.proc; p != nil && p.role == simLeader && (leader == nil || s.term > leader.srv.term) {
			leader = p
		}
	}
	return leader
}

func (w *simWorld) cutOff(from, to int, d int64) {
	if w.cut[from][to] <= w.now {
		w.cutSince[from][to] = w.now
	}
	w.cut[from][to] = max(w.cut[from][to], w.now+d)
}

// split cuts side off from all others, both ways.
func (w *simWorld) split(side []bool, d int64) {
	for i := range side {
		for j := range side {
			if side[i] != side[j] {
				w.cutOff(i, j, d)
			}
		}
	}
}

// ringCache keeps the rings of few names: building them afresh is most of what a view costs.
type ringCache struct {
	mu     sync.Mutex
	owners map[string][]int32
}

func (c *ringCache) ring(v *ledger.View) *Ring {
	var names strings.Builder
	for _, m := range v.Members {
		names.WriteString(m.Name + " ")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	owners, ok := c.owners[names.String()]
	if !ok {
		owners = NewRing(v).owners
		c.owners[names.String()] = owners
	}
	return &Ring{members: slices.Clone(v.Members), owners: owners} // a view's members are by name
}
