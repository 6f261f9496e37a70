package lease

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/limiter"
)

// The world's times: a message's way, and the reading at which everything starts.
const (
	delay = int64(time.Millisecond)
	epoch = int64(1_700_000_000_000_000_000)
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
	now     int64 // ns from the start
	rand    *rand.Rand
	demand  []arrival
	queue   events
	queued  int
	who     contender
	fate    []fate
	log     []spent
	trips   []int // by holder: questions and answers to the owner, keep-alives apart
	kept    int   // keep-alives
	pushed  int   // messages of the owner that answer nothing
	refused int   // since the last look at what is lent
	// stranded sums, over seconds with a refusal, what lay in leases.
	stranded float64
	looked   int
}

// fate is what became of a request.
type fate struct{ decided, admitted, local bool }

// spent is an entry in the decision log: units taken at a clock reading.
type spent struct{ at, units int64 }

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
	if w.fate[id].decided {
		panic("bench/lease: decided twice") // a contender that counts a request twice measures nothing
	}
	w.fate[id] = fate{true, admitted, local}
	if admitted {
		w.log = append(w.log, spent{at, w.demand[id].cost})
	} else {
		w.refused++
	}
}

// measure runs a contender in a cell.
func measure(c Cell, e entrant) Result {
	who := e.make(&c)
	w := &world{Cell: c, rand: rand.New(rand.NewPCG(c.Seed, 2)), demand: c.arrivals(), who: who}
	w.fate, w.trips = make([]fate, len(w.demand)), make([]int, c.Holders)
	w.every(int64(time.Second), w.look)
	who.start(w)
	// What is asked in the end is answered still.
	ends := int64(c.length() + 5*time.Second)
	for next := 0; ; {
		if next < len(w.demand) && (len(w.queue) == 0 || w.demand[next].at <= w.queue[0].at) {
			w.now = w.demand[next].at
			who.arrive(next)
			next++
			continue
		}
		e := heap.Pop(&w.queue).(event) // there is always the next look
		if e.at > ends {
			break
		}
		w.now = e.at
		e.do()
	}
	r := w.result()
	r.Contender = e.name
	return r
}

// every does something again and again, from a time on.
func (w *world) every(ns int64, do func()) {
	w.after(ns, func() {
		do()
		w.every(ns, do)
	})
}

// look notes what lies in leases while others are refused.
func (w *world) look() {
	if w.refused > 0 && w.now <= int64(w.length()) {
		w.stranded += w.who.lent()
		w.looked++
	}
	w.refused = 0
}

// Result is what one contender did in one cell.
type Result struct {
	Cell
	Contender string
	Requests  int
	// IdealRefused is the part of the requests that one central bucket refuses.
	IdealRefused float64
	// Over is by how much more than burst + 1.01·rate·w was admitted in the worst window, in bursts.
	Over float64
	// Admitted is the units admitted, of those that the ideal bucket admits; AdmittedRequests the requests.
	Admitted, AdmittedRequests float64
	// FalseRefused is the part of the requests that were refused and that the ideal bucket admits.
	FalseRefused float64
	// Trips is the round trips per request; Busy that at holders that see at least 20 requests a second
	// (-1: there is none); Quiet the most round trips a second of any other holder.
	Trips, Busy, Quiet float64
	// Kept is the keep-alives a second and holder.
	Kept float64
	// Pushed is the messages a request that the owner sent unasked.
	Pushed float64
	// Local is the part of the requests that was decided without a message.
	Local float64
	// Stranded is what lay at holders while somebody was refused, on average, in bursts.
	Stranded float64
}

// busy is how many requests a second make a holder one that must do with few round trips.
const busy = 20

func (w *world) result() Result {
	r := Result{Cell: w.Cell, Requests: len(w.demand), Over: over(&w.Limit, w.log), Busy: -1}
	seconds := w.length().Seconds()
	seen := make([]int, w.Holders)
	var units, requests, ideal, idealRequests, wrong, local float64
	var state limiter.State
	for i, a := range w.demand {
		seen[a.holder]++
		f, fits := w.fate[i], w.Limit.Take(&state, epoch+a.at, a.cost, limiter.Refuse).Admitted
		if fits {
			ideal += float64(a.cost)
			idealRequests++
		}
		if f.admitted {
			units += float64(a.cost)
			requests++
		} else if fits {
			wrong++
		}
		if f.local {
			local++
		}
	}
	n := float64(len(w.demand))
	r.Admitted, r.AdmittedRequests = units/ideal, requests/idealRequests
	r.IdealRefused, r.FalseRefused, r.Local = 1-idealRequests/n, wrong/n, local/n
	var trips, busyTrips, busySeen int
	for i, t := range w.trips {
		trips += t
		if float64(seen[i]) >= busy*seconds {
			busyTrips += t
			busySeen += seen[i]
		} else {
			r.Quiet = max(r.Quiet, float64(t)/seconds)
		}
	}
	r.Trips = float64(trips) / n
	if busySeen > 0 {
		r.Busy = float64(busyTrips) / float64(busySeen)
	}
	r.Pushed = float64(w.pushed) / n
	r.Kept = float64(w.kept) / seconds / float64(w.Holders)
	if w.looked > 0 {
		r.Stranded = w.stranded / float64(w.looked) / float64(w.Limit.Burst)
	}
	return r
}

// over holds every window of a decision log against burst + 1.01·rate·w, in one pass: a leaky bucket
// that drains at 1.01·rate holds more than the burst if and only if some window does.
func over(l *limiter.Limit, log []spent) (worst float64) {
	slices.SortStableFunc(log, func(a, b spent) int { return int(a.at - b.at) })
	perNs := 1.01 * float64(l.Rate.Count) / float64(l.Rate.Per)
	held, last := 0.0, int64(0)
	for _, s := range log {
		held = max(0, held-float64(s.at-last)*perNs) + float64(s.units)
		last = s.at
		// Sums of floats are off by less than a millionth of a unit.
		if over := held - float64(l.Burst); over > 1e-6 {
			worst = max(worst, over/float64(l.Burst))
		}
	}
	return worst
}
