package lease

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// The engines that a Result can be of.
const (
	Simulated = "simulated" // in virtual time
	InProcess = "in process"
	Processes = "processes"
)

// contender is one way to keep a limit over many nodes.
type contender interface {
	// start is called once, before the first arrival.
	start(w *world)
	// arrive is a request: it, or what it schedules, calls w.decide once.
	arrive(id int)
	// lent is how many units lie at holders now.
	lent() float64
}

// world is one cell's bucket, nodes and clock, for one contender.
type world struct {
	Cell
	now    int64 // ns from the start
	rand   *rand.Rand
	demand []Arrival
	queue  events
	queued int
	who    contender
	fate   []Fate
	trips  []int // by node: questions and answers to the owner, keep-alives apart
	kept   int   // keep-alives
	pushed int   // messages of the owner that answer nothing
	looks  bool  // there is to be a look at what is lent
	plan   *plan // nil: nothing fails
	// Of a baseline's nodes which are not there, and how many processes each has had before; whether the store is away.
	gone      []bool
	lives     []int
	storeGone bool
	// stranded sums, over seconds with a refusal, what lay in leases.
	stranded float64
	looked   int
}

type event struct {
	at  int64
	seq int
	do  func()
}

type events []event

func (e events) Len() int      { return len(e) }
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}

func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// after does something later; what is due at once comes in the order in which it was asked for.
func (w *world) after(ns int64, do func()) {
	w.queued++
	heap.Push(&w.queue, event{w.now + max(ns, 0), w.queued, do})
}

// decide ends a request. at is the clock reading, from the start, at which the bucket was changed.
func (w *world) decide(id int, admitted, local bool, at int64) {
	if w.fate[id].Decided {
		panic("bench/lease: decided twice") // a contender that counts a request twice measures nothing
	}
	w.fate[id] = Fate{At: at, Took: w.now - w.demand[id].At, Decided: true, Admitted: admitted, Local: local}
	if !admitted && !w.looks {
		w.looks = true
		w.after(int64(time.Second)-w.now%int64(time.Second), w.look)
	}
}

// measure runs a policy in a cell of one tenant.
func measure(c Cell, p Policy) Result {
	e := simulate(c, p, c.Demand(), c.plan())
	r := Judge(c, &e)
	r.Engine, r.Contender = Simulated, p.Name
	return r
}

// simulate runs a policy on one bucket. what goes wrong is planned for all buckets of a cell.
func simulate(c Cell, p Policy, demand []Arrival, what *plan) Evidence {
	who := p.make(&c)
	w := &world{Cell: c, rand: rand.New(rand.NewPCG(c.Seed, 2)), demand: demand, who: who, plan: what}
	w.fate, w.trips = make([]Fate, len(w.demand)), make([]int, c.nodesOf())
	if what != nil {
		w.troubles()
	}
	who.start(w)
	// What is asked in the end is answered still.
	ends := int64(c.length() + 5*time.Second)
	for next := 0; next < len(w.demand) || len(w.queue) > 0; {
		if next < len(w.demand) && (len(w.queue) == 0 || w.demand[next].At <= w.queue[0].at) {
			w.now = w.demand[next].At
			who.arrive(next)
			next++
			continue
		}
		e := heap.Pop(&w.queue).(event)
		if e.at > ends {
			break
		}
		w.now = e.at
		e.do()
	}
	w.lost()
	return w.evidence()
}

// every does something again and again, from a time on.
func (w *world) every(ns int64, do func()) {
	w.after(ns, func() {
		do()
		w.every(ns, do)
	})
}

// look notes what lies in leases at the end of a second in which somebody was refused.
func (w *world) look() {
	if w.now <= int64(w.length()) {
		w.stranded += w.who.lent()
		w.looked++
	}
	w.looks = false
}

func (w *world) evidence() Evidence {
	e := Evidence{Demand: w.demand, Fates: w.fate, Trips: w.trips, Kept: w.kept, Pushed: w.pushed}
	if w.plan != nil {
		e.FaultAt = time.Duration(w.plan.at)
	}
	if w.looked > 0 {
		e.Stranded = w.stranded / float64(w.looked) / float64(w.Limit.Burst)
	}
	return e
}
