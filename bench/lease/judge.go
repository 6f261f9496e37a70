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
	// P50, P99 and P999 are of the time from arrival to decision.
	P50, P99, P999 time.Duration
	// Bytes and CPU are per request; -1: the engine cannot tell.
	Bytes float64
	CPU   time.Duration
	// Recovery is how long after the fault less than 9 in 10 of what the ideal buckets admit were admitted for
	// half a second, or somebody waited for longer than 100 ms, for the last time; -1: there was no fault.
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
	lull      = 500 * time.Millisecond
)

// Judge measures a policy by what an engine saw, against one ideal bucket a tenant that is fed the same.
func Judge(c Cell, e *Evidence) Result {
	r := Result{Cell: c, Requests: len(e.Demand), Busy: -1, Bytes: -1, CPU: -1, Recovery: -1, Stranded: e.Stranded}
	n, seconds := float64(len(e.Demand)), c.length().Seconds()
	r.course(e)
	ideal := make([]limiter.State, c.tenants())
	var units, requests, idealUnits, idealRequests, wrong, local, lost float64
	took := make([]int64, 0, len(e.Demand))
	for i := range e.Demand {
		a, f := &e.Demand[i], &e.Fates[i]
		part := int(a.At / int64(r.Course.Step))
		r.Course.Arrived[part] += float64(a.Cost)
		fits := c.Limit.Take(&ideal[a.Tenant], epoch+a.At, a.Cost, limiter.Refuse).Admitted
		if fits {
			idealUnits += float64(a.Cost)
			idealRequests++
			r.Course.Ideal[part] += float64(a.Cost)
		}
		switch {
		case f.Admitted:
			units += float64(a.Cost)
			requests++
			r.Course.Admitted[part] += float64(a.Cost)
		case f.Lost:
			lost++
		case fits:
			wrong++
		}
		if f.Local {
			local++
		}
		if f.Decided {
			took = append(took, f.Took)
			r.Course.Slowest[part] = max(r.Course.Slowest[part], time.Duration(f.Took))
		}
	}
	r.Over, r.OverAll = excess(&c, e)
	r.Admitted, r.AdmittedRequests = units/idealUnits, requests/idealRequests
	r.IdealRefused, r.FalseRefused, r.Local, r.Lost = 1-idealRequests/n, wrong/n, local/n, lost/n
	slices.Sort(took)
	r.P50, r.P99, r.P999 = quantile(took, .5), quantile(took, .99), quantile(took, .999)
	r.messages(e, n, seconds)
	if e.CPU > 0 {
		r.CPU = time.Duration(float64(e.CPU) / n)
	}
	if e.FaultAt > 0 {
		r.Recovery = r.Course.recovery()
	}
	return r
}

func (r *Result) course(e *Evidence) {
	length := r.length()
	step := max(minPart, (length+maxParts-1)/maxParts)
	parts := int(length/step) + 1
	r.Course = Course{
		Step: step, FaultAt: e.FaultAt,
		Arrived: make([]float64, parts), Ideal: make([]float64, parts), Admitted: make([]float64, parts), Slowest: make([]time.Duration, parts),
	}
}

// messages counts those of a result.
func (r *Result) messages(e *Evidence, n, seconds float64) {
	seen := make([]int, max(r.Nodes, len(e.Trips)))
	for i := range e.Demand {
		seen[e.Demand[i].Node]++
	}
	var trips, busyTrips, busySeen int
	for i, t := range e.Trips {
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
	r.Pushed = float64(e.Pushed) / n
	r.Kept = float64(e.Kept) / seconds / float64(r.Nodes)
	if e.Bytes > 0 {
		r.Bytes = float64(e.Bytes) / n
	}
}

// recovery looks for the end of the last half second after the fault in which too little was admitted, or
// somebody waited for too long.
func (c *Course) recovery() time.Duration {
	each := max(1, int(lull/c.Step))
	first := int(c.FaultAt / c.Step)
	for end := len(c.Ideal); end > first; end-- {
		var ideal, admitted float64
		for i := max(first, end-each); i < end; i++ {
			ideal += c.Ideal[i]
			admitted += c.Admitted[i]
		}
		if admitted < recovered*ideal || c.Slowest[end-1] > tooSlow {
			return time.Duration(end)*c.Step - c.FaultAt
		}
	}
	return 0
}

// quantile is of what is sorted.
func quantile(sorted []int64, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return time.Duration(sorted[min(int(math.Ceil(q*float64(len(sorted))))-1, len(sorted)-1)])
}

// spent is an entry in the decision log of a tenant: units taken at a clock reading.
type spent struct{ at, units int64 }

// excess holds every tenant's windows against its limit.
func excess(c *Cell, e *Evidence) (worst, part float64) {
	logs := make([][]spent, c.tenants())
	counts := make([]int32, c.tenants())
	for i := range e.Fates {
		if e.Fates[i].Admitted {
			counts[e.Demand[i].Tenant]++
		}
	}
	for i := range e.Fates {
		if f, a := &e.Fates[i], &e.Demand[i]; f.Admitted {
			if logs[a.Tenant] == nil {
				logs[a.Tenant] = make([]spent, 0, counts[a.Tenant])
			}
			logs[a.Tenant] = append(logs[a.Tenant], spent{f.At, a.Cost})
		}
	}
	var units, beyond float64
	for _, log := range logs {
		for _, s := range log {
			units += float64(s.units)
		}
		w, b := over(&c.Limit, log)
		worst, beyond = max(worst, w), beyond+b
	}
	if units == 0 {
		return worst, 0
	}
	return worst, beyond / units
}

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
