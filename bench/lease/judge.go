package lease

import (
	"math"
	"slices"
	"time"

	"headgate/limiter"
)

// epoch is the clock reading at which every engine's ideal buckets start, in ns.
const epoch = int64(1_700_000_000_000_000_000)

// Fate is what became of a request.
type Fate struct {
	At       int64 // ns from the start at which the bucket was changed, by the clock that all share
	Took     int64 // ns from the arrival to the decision
	Decided  bool
	Admitted bool
	Local    bool // without a message
	Lost     bool // with the node where it was; not Admitted as far as its client knows
}

// Evidence is what an engine saw of a policy in a cell. Judge makes a Result of it.
type Evidence struct {
	Demand []Arrival
	Fates  []Fate // of Demand, by index
	Trips  []int  // by node: questions to an owner and their answers, keep-alives apart
	Kept   int    // keep-alives, of all nodes
	Pushed int    // messages of owners that answer nothing
	// Bytes are those of all messages, CPU the processor time of all nodes; 0 where an engine cannot tell.
	Bytes int64
	CPU   time.Duration
	// Stranded is what lay at nodes on average while somebody was refused, in bursts of all tenants.
	Stranded float64
	FaultAt  time.Duration // 0: there was none
}

// Result is what one policy did in one cell.
type Result struct {
	Cell
	Engine    string
	Contender string
	Requests  int
	// IdealRefused is the part of the requests that one central bucket a tenant refuses.
	IdealRefused float64
	// Over is by how much more than burst + 1.01·rate·w was admitted in the worst window of the worst
	// tenant, in bursts. OverAll is the part of all units admitted for which there was no room at 1.01·rate.
	Over, OverAll float64
	// Admitted is the units admitted, of those that the ideal bucket admits; AdmittedRequests the requests.
	Admitted, AdmittedRequests float64
	// FalseRefused is the part of the requests that were refused and that the ideal bucket admits. Lost is the
	// part that ended with its node.
	FalseRefused, Lost float64
	// Trips is the round trips per request; Busy that at nodes that see at least 20 requests a second
	// (-1: there is none); Quiet the most round trips a second of any other node.
	Trips, Busy, Quiet float64
	// Kept is the keep-alives a second and node.
	Kept float64
	// Pushed is the messages a request that owners sent unasked.
	Pushed float64
	// Local is the part of the requests that was decided without a message.
	Local float64
	// Stranded is what lay at nodes while somebody was refused, on average, in bursts.
	Stranded float64
	// Mean, P50, P99 and P999 are of the time from arrival to decision.
	Mean, P50, P99, P999 time.Duration
	// Bytes and CPU are per request; -1: the engine cannot tell.
	Bytes float64
	CPU   time.Duration
	// Recovery is how long after the fault less than 9 in 10 of what the ideal buckets admit (and of what was kept of it before) were
	// admitted for a second, or somebody waited for longer than 100 ms and ever before, for the last time; -1: there was no fault.
	Recovery time.Duration
	// Course is what happened when.
	Course Course
}

// Course is a cell's time cut into equal parts.
type Course struct {
	Step    time.Duration
	FaultAt time.Duration
	// By part: units that arrived, that the ideal buckets admit, that were admitted; the slowest decision.
	Arrived, Ideal, Admitted []float64
	Slowest                  []time.Duration
}

const (
	// busy is how many requests a second make a node one that must do with few round trips.
	busy = 20
	// parts of a course, at most, and the shortest.
	maxParts = 600
	minPart  = 100 * time.Millisecond
	// What counts as not recovered.
	recovered = 0.9
	tooSlow   = 100 * time.Millisecond
	lull      = time.Second
)

// Judge measures a policy by what an engine saw, against one ideal bucket a tenant that is fed the same.
func Judge(c Cell, e *Evidence) Result {
	t := newTally(&c, e.FaultAt)
	if c.tenants() == 1 {
		t.add(e.Demand, e.Fates)
	} else {
		demand, fates := byTenant(c.tenants(), e)
		for i := range demand {
			t.add(demand[i], fates[i])
		}
	}
	t.count(e)
	return t.result()
}

// byTenant takes evidence apart.
func byTenant(tenants int, e *Evidence) (demand [][]Arrival, fates [][]Fate) {
	demand, fates = make([][]Arrival, tenants), make([][]Fate, tenants)
	for i := range e.Demand {
		t := e.Demand[i].Tenant
		demand[t], fates[t] = append(demand[t], e.Demand[i]), append(fates[t], e.Fates[i])
	}
	return demand, fates
}

// tally sums up what happened, tenant by tenant.
type tally struct {
	r     Result
	seen  []int // requests by node
	trips []int
	took  []int64 // decisions that took any time, ns
	sums
	stranded float64 // summed over tenants
	cpu      time.Duration
	bytes    int64
	kept     int
	pushed   int
}

// sums are of units, where it does not say requests.
type sums struct {
	n, units, requests, ideal, idealRequests, wrong, local, lost, decided, wait, beyond float64
}

func newTally(c *Cell, faultAt time.Duration) *tally {
	t := &tally{r: Result{Cell: *c, Busy: -1, Bytes: -1, CPU: -1, Recovery: -1}, seen: make([]int, c.nodesOf()), trips: make([]int, c.nodesOf())}
	length := c.length()
	step := max(minPart, (length+maxParts-1)/maxParts)
	parts := int(length/step) + 1
	t.r.Course = Course{
		Step: step, FaultAt: faultAt,
		Arrived: make([]float64, parts), Ideal: make([]float64, parts), Admitted: make([]float64, parts), Slowest: make([]time.Duration, parts),
	}
	return t
}

// add takes all requests of one tenant, by time.
func (t *tally) add(demand []Arrival, fates []Fate) {
	c, course := &t.r.Cell, &t.r.Course
	var ideal limiter.State
	log := make([]spent, 0, len(demand))
	for i := range demand {
		a, f := &demand[i], &fates[i]
		cost := float64(a.Cost)
		at := min(int(a.At/int64(course.Step)), len(course.Ideal)-1)
		t.n++
		if int(a.Node) < len(t.seen) {
			t.seen[a.Node]++
		}
		course.Arrived[at] += cost
		fits := c.Limit.Take(&ideal, epoch+a.At, a.Cost, limiter.Refuse).Admitted
		if fits {
			t.ideal += cost
			t.idealRequests++
			course.Ideal[at] += cost
		}
		switch {
		case f.Admitted:
			t.units += cost
			t.requests++
			course.Admitted[at] += cost
			log = append(log, spent{f.At, a.Cost})
		case f.Lost:
			t.lost++
		case fits:
			t.wrong++
		}
		if f.Local {
			t.local++
		}
		if f.Decided {
			t.decided++
			course.Slowest[at] = max(course.Slowest[at], time.Duration(f.Took))
			if f.Took > 0 {
				t.wait += float64(f.Took)
				t.took = append(t.took, f.Took)
			}
		}
	}
	worst, beyond := over(&c.Limit, log)
	t.r.Over, t.beyond = max(t.r.Over, worst), t.beyond+beyond
}

// count adds messages and what they cost.
func (t *tally) count(e *Evidence) {
	for i, n := range e.Trips {
		if i < len(t.trips) {
			t.trips[i] += n
		}
	}
	t.kept, t.pushed, t.bytes, t.cpu, t.stranded = t.kept+e.Kept, t.pushed+e.Pushed, t.bytes+e.Bytes, t.cpu+e.CPU, t.stranded+e.Stranded
}

// merge adds what another tally has, of other tenants.
func (t *tally) merge(o *tally) {
	for i := range t.seen {
		t.seen[i] += o.seen[i]
		t.trips[i] += o.trips[i]
	}
	c, d := &t.r.Course, &o.r.Course
	for i := range c.Ideal {
		c.Arrived[i] += d.Arrived[i]
		c.Ideal[i] += d.Ideal[i]
		c.Admitted[i] += d.Admitted[i]
		c.Slowest[i] = max(c.Slowest[i], d.Slowest[i])
	}
	t.took = append(t.took, o.took...)
	t.r.Over = max(t.r.Over, o.r.Over)
	a, b := &t.sums, &o.sums
	*a = sums{
		a.n + b.n, a.units + b.units, a.requests + b.requests, a.ideal + b.ideal, a.idealRequests + b.idealRequests, a.wrong + b.wrong,
		a.local + b.local, a.lost + b.lost, a.decided + b.decided, a.wait + b.wait, a.beyond + b.beyond,
	}
	t.kept, t.pushed, t.bytes, t.cpu, t.stranded = t.kept+o.kept, t.pushed+o.pushed, t.bytes+o.bytes, t.cpu+o.cpu, t.stranded+o.stranded
}

// result is what it comes to.
func (t *tally) result() Result {
	r, seconds := t.r, t.r.length().Seconds()
	r.Requests = int(t.n)
	r.Admitted, r.AdmittedRequests, r.OverAll = part(t.units, t.ideal), part(t.requests, t.idealRequests), 0
	if t.units > 0 {
		r.OverAll = t.beyond / t.units
	}
	n := max(t.n, 1)
	r.IdealRefused, r.FalseRefused, r.Local, r.Lost = 1-t.idealRequests/n, t.wrong/n, t.local/n, t.lost/n
	slices.Sort(t.took)
	free := int(t.decided) - len(t.took) // took no time
	r.Mean = time.Duration(t.wait / max(t.decided, 1))
	r.P50, r.P99, r.P999 = quantile(free, t.took, .5), quantile(free, t.took, .99), quantile(free, t.took, .999)
	var trips, busyTrips, busySeen int
	for i, of := range t.trips {
		trips += of
		if float64(t.seen[i]) >= busy*seconds {
			busyTrips += of
			busySeen += t.seen[i]
		} else {
			r.Quiet = max(r.Quiet, float64(of)/seconds)
		}
	}
	r.Trips, r.Pushed = float64(trips)/n, float64(t.pushed)/n
	if busySeen > 0 {
		r.Busy = float64(busyTrips) / float64(busySeen)
	}
	r.Kept = float64(t.kept) / seconds / float64(r.Nodes)
	r.Stranded = t.stranded / float64(r.tenants())
	if t.bytes > 0 {
		r.Bytes = float64(t.bytes) / n
	}
	if t.cpu > 0 {
		r.CPU = time.Duration(float64(t.cpu) / n)
	}
	if r.Course.FaultAt > 0 {
		r.Recovery = r.Course.recovery()
	}
	return r
}

// part is a of b; of nothing it is all.
func part(a, b float64) float64 {
	if b == 0 {
		return 1
	}
	return a / b
}

// recovery looks for the end of the last second after the fault in which too little was admitted, or somebody waited for too long. What
// happened before the fault, too, is no trouble that the fault has made.
func (c *Course) recovery() time.Duration {
	each, first := max(1, int(lull/c.Step)), int(c.FaultAt/c.Step)
	least, slowest := recovered, tooSlow
	for end := each; end <= min(first, len(c.Ideal)); end++ {
		least = min(least, recovered*c.kept(end-each, end))
		slowest = max(slowest, c.Slowest[end-1])
	}
	for end := len(c.Ideal); end > first; end-- {
		if c.Slowest[end-1] > slowest || c.kept(max(first, end-each), end) < least {
			return time.Duration(end)*c.Step - c.FaultAt
		}
	}
	return 0
}

// kept is what was admitted of what the ideal buckets admit, in some parts.
func (c *Course) kept(from, to int) float64 {
	var ideal, admitted float64
	for i := from; i < to; i++ {
		ideal += c.Ideal[i]
		admitted += c.Admitted[i]
	}
	return part(admitted, ideal)
}

// quantile is of so many zeros and what is sorted.
func quantile(zeros int, sorted []int64, q float64) time.Duration {
	at := int(math.Ceil(q*float64(zeros+len(sorted)))) - 1 - zeros
	if at < 0 {
		return 0
	}
	return time.Duration(sorted[min(at, len(sorted)-1)])
}

// spent is an entry in the decision log of a tenant: units taken at a clock reading.
type spent struct{ at, units int64 }

// over holds every window of a decision log against burst + 1.01·rate·w, in one pass: a leaky bucket
// that drains at 1.01·rate holds more than the burst if and only if some window does. worst is the most, in
// bursts; beyond what a bucket that spills could not hold, in units.
func over(l *limiter.Limit, log []spent) (worst, beyond float64) {
	slices.SortStableFunc(log, func(a, b spent) int { return int(a.at - b.at) })
	perNs := 1.01 * float64(l.Rate.Count) / float64(l.Rate.Per)
	held, spilt, last := 0.0, 0.0, int64(0)
	for _, s := range log {
		drained := float64(s.at-last) * perNs
		held = max(0, held-drained) + float64(s.units)
		spilt = max(0, spilt-drained) + float64(s.units)
		last = s.at
		// Sums of floats are off by less than a millionth of a unit.
		if over := held - float64(l.Burst); over > 1e-6 {
			worst = max(worst, over/float64(l.Burst))
		}
		if over := spilt - float64(l.Burst); over > 1e-6 {
			beyond += over
			spilt = float64(l.Burst)
		}
	}
	return worst, beyond
}
