package queue

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// world is a fleet in virtual time: clients that arrive and lose patience, nodes that try for the leases of
// what they are granted, backends that hold a slot for as long as a request takes. It keeps the true
// bound itself and fails where the scheduler breaks its word.
type world struct {
	t       testing.TB
	rng     *rand.Rand
	s       *Scheduler
	out     Output
	now     int64
	events  heap[int64, *event]
	seq     uint64
	nodes   int
	held    map[string]int64 // slots truly held, by backend
	slots   map[string]int64
	used    map[[2]string]int64
	waiting map[uint64]*request
	nextID  uint64
	hang    map[string]bool // these backends end nothing
	delay   func() int64    // of a message
	leaked  map[string]int64

	peakWaiting int
	peakBytes   int64
	served      map[string]*tally // by class and by tenant
	drops       [Reasons]int
	misses      int
	grants      int
	retry       []time.Duration
	waits       [Classes][]time.Duration
	slotTime    [Classes]float64
	countFrom   int64
}

type tally struct {
	slotTime float64
	n        int
	waits    []time.Duration
}

type request struct {
	id     uint64
	node   int
	ticket Ticket
	takes  time.Duration
	came   int64
	dies   int64
	done   func(ok bool)
}

type event struct {
	do  func()
	pos int
}

func newWorld(t testing.TB, seed uint64, nodes int, cfg Config, backends ...Backend) *world {
	w := &world{
		t: t, rng: rand.New(rand.NewPCG(seed, 7)), nodes: nodes,
		held: map[string]int64{}, slots: map[string]int64{}, used: map[[2]string]int64{},
		waiting: map[uint64]*request{}, served: map[string]*tally{}, hang: map[string]bool{}, leaked: map[string]int64{},
	}
	w.events.at = func(e *event) *int { return &e.pos }
	w.delay = func() int64 { return int64(200*time.Microsecond) + w.rng.Int64N(int64(time.Millisecond)) }
	cfg.Rand = rand.New(rand.NewPCG(seed, 8))
	w.s = New(cfg)
	for _, b := range backends {
		w.slots[b.ID] = b.Slots
	}
	w.s.SetBackends(0, backends, &w.out)
	w.after(0, w.tick)
	return w
}

func (w *world) after(d int64, do func()) {
	w.seq++
	w.events.set(&event{do: do}, w.now+d, w.seq)
}

// run lets time pass until then.
func (w *world) run(until time.Duration) {
	for w.events.len() > 0 {
		e, at := w.events.first()
		if at > int64(until) {
			break
		}
		w.events.remove(e)
		w.now = at
		e.do()
	}
	w.now = int64(until)
}

// tick is the shell's timer: it calls Expire as often as it is told to.
func (w *world) tick() {
	next := w.s.Expire(w.now, &w.out)
	w.deliver()
	if next <= w.now {
		w.t.Fatalf("Expire at %d wants to be called at %d", w.now, next)
	}
	w.after(min(next-w.now, int64(5*time.Millisecond)), w.tick)
}

func nodeID(n int) uint64 { return uint64(n + 1) }

// ask sends a request on its way.
func (w *world) ask(class Class, tenant string, cost, work int64, takes, patience time.Duration, backends ...string) *request {
	w.nextID++
	r := &request{id: w.nextID, node: w.rng.IntN(w.nodes), takes: takes, came: w.now, dies: w.now + int64(patience)}
	r.ticket = Ticket{Node: nodeID(r.node), ID: r.id, Tenant: tenant, Class: class, Work: work, Bytes: 1000, Patience: patience}
	for _, b := range backends {
		r.ticket.Places = append(r.ticket.Places, Place{b, cost})
	}
	w.waiting[r.id] = r
	w.s.Join(w.now, &r.ticket, &w.out)
	w.deliver()
	return r
}

// deliver carries out what the scheduler decided.
func (w *world) deliver() {
	w.peakWaiting = max(w.peakWaiting, w.s.Waiting())
	w.peakBytes = max(w.peakBytes, w.s.bytes)
	for _, g := range w.out.Grants {
		r := w.waiting[g.ID]
		if r == nil || nodeID(r.node) != g.Node {
			w.t.Fatalf("grant for %d, which does not wait", g.ID)
		}
		if w.now >= r.dies {
			w.t.Fatalf("%d is granted %v after its patience", g.ID, time.Duration(w.now-r.dies))
		}
		w.after(w.delay(), func() { w.try(r, g) })
	}
	for _, d := range w.out.Drops {
		r := w.waiting[d.ID]
		if r == nil {
			w.t.Fatalf("drop of %d, which does not wait", d.ID)
		}
		if d.RetryAfter < minRetry || d.RetryAfter > maxRetry {
			w.t.Fatalf("retry after %v", d.RetryAfter)
		}
		delete(w.waiting, d.ID)
		w.drops[d.Reason]++
		w.retry = append(w.retry, d.RetryAfter)
		if r.done != nil {
			r.done(false)
		}
	}
	w.out.Reset()
}

// try is a node that tries for the lease it has leave for.
func (w *world) try(r *request, g Grant) {
	if w.waiting[r.id] != r {
		return // it left in the meantime
	}
	if w.held[g.Backend]+w.leaked[g.Backend]+g.Cost > w.slots[g.Backend] {
		w.misses++
		w.s.Miss(w.now, g.Node, g.ID, &w.out)
		w.deliver()
		return
	}
	delete(w.waiting, r.id)
	w.grants++
	w.hold(r.node, g.Backend, g.Cost)
	w.s.Started(w.now, g.Node, g.ID)
	w.report(r.node, g.Backend)
	wait := time.Duration(w.now - r.came)
	if w.now >= w.countFrom {
		w.waits[r.ticket.Class] = append(w.waits[r.ticket.Class], wait)
	}
	from := w.now
	w.after(int64(r.takes), func() { w.finish(r, g, from, wait) })
}

func (w *world) finish(r *request, g Grant, from int64, wait time.Duration) {
	if w.hang[g.Backend] {
		w.after(int64(100*time.Millisecond), func() { w.finish(r, g, from, wait) })
		return
	}
	took := w.now - from
	w.hold(r.node, g.Backend, -g.Cost)
	w.s.Done(w.now, g.Backend, r.ticket.Class, r.ticket.Tenant, g.Cost, time.Duration(took), true)
	w.report(r.node, g.Backend)
	if w.now >= w.countFrom {
		w.slotTime[r.ticket.Class] += float64(g.Cost) * float64(took)
		for _, name := range []string{r.ticket.Class.String(), r.ticket.Tenant} {
			y := w.served[name]
			if y == nil {
				y = &tally{}
				w.served[name] = y
			}
			y.n++
			y.slotTime += float64(g.Cost) * float64(took)
			y.waits = append(y.waits, wait)
		}
	}
	if r.done != nil {
		r.done(true)
	}
}

func (w *world) hold(node int, backend string, n int64) {
	w.held[backend] += n
	w.used[[2]string{fmt.Sprint(node), backend}] += n
	if h := w.held[backend]; h < 0 || h > w.slots[backend] {
		w.t.Fatalf("%d of %d slots of %s held", h, w.slots[backend], backend)
	}
}

func (w *world) report(node int, backend string) {
	w.s.Used(w.now, nodeID(node), backend, w.used[[2]string{fmt.Sprint(node), backend}], &w.out)
	w.deliver()
}

// leave is a client that goes away while it waits.
func (w *world) leave(r *request) {
	if w.waiting[r.id] != r {
		return
	}
	delete(w.waiting, r.id)
	w.s.Leave(w.now, nodeID(r.node), r.id, &w.out)
	w.deliver()
}

// arrivals calls ask with a Poisson rate a second from now until then.
func (w *world) arrivals(rate float64, until time.Duration, ask func()) {
	gap := func() int64 { return int64(w.rng.ExpFloat64() / rate * 1e9) }
	var next func()
	next = func() {
		if w.now >= int64(until) {
			return
		}
		ask()
		w.after(gap(), next)
	}
	w.after(gap(), next)
}

func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Clone(d)
	slices.Sort(d)
	return d[min(len(d)-1, int(q*float64(len(d))))]
}

func (w *world) share(c Class) float64 {
	var sum float64
	for _, t := range w.slotTime {
		sum += t
	}
	return w.slotTime[c] / sum
}
