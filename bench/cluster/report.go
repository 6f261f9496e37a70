package cluster

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Row is one measured value.
type Row struct {
	Measure string
	Round   int // from 1
	Value   float64
	Unit    string
}

// kind says how a measure's values become a figure.
type kind int

const (
	spread kind = iota // median, 95th percentile, worst
	sum                // the total
	share              // each value is 1 or 0: how many of them are 1
)

// aim is what a figure is held against.
type aim struct {
	bound   float64
	atLeast bool // the bound is a least, not a most
}

// measure is something that is measured: how it reads, its unit and its aim.
type measure struct {
	name string
	unit string
	kind kind
	aim  *aim
}

func atMost(v float64) *aim  { return &aim{bound: v} }
func atLeast(v float64) *aim { return &aim{bound: v, atLeast: true} }

// Names of measures that are used in more than one place.
const (
	lapsesHealthy  = "view lease: lapses while nobody dies"
	keptLeader     = "view lease: leader kills in which no survivor's lapsed"
	keptFollower   = "view lease: follower kills in which no survivor's lapsed"
	failover       = "fail-over: leader's SIGKILL to the next change accepted"
	changeLeader   = "view change: leader's SIGKILL to settled"
	changeFollower = "view change: follower's SIGKILL to settled"
	detectLeader   = "view change: leader's SIGKILL to the new view"
	detectFollower = "view change: follower's SIGKILL to the new view"
	killAccepted   = "kill switch: accepted to refused everywhere"
	killSent       = "kill switch: sent to refused everywhere"
	revokeAccepted = "key revocation: accepted to refused everywhere"
	revokeSent     = "key revocation: sent to refused everywhere"
	keyCreated     = "new key: accepted to admitted everywhere"
	requestsLeader = "requests sent to survivors of leader kills"
	failedLeader   = "requests failed on survivors, a leader kill"
	requestsOther  = "requests sent to survivors of follower kills"
	failedOther    = "requests failed on survivors, a follower kill"
	failedShare    = "requests failed on survivors, of all in kills"
	startCluster   = "start: fresh cluster to every node ready"
	startNode      = "start: killed node to ready"
)

// measures are all with a fixed name, in the order in which they are reported; those of the
// changes follow.
func measures() []measure {
	return []measure{
		{lapsesHealthy, "", sum, atMost(0)},
		{keptLeader, "%", share, atLeast(95)},
		{keptFollower, "%", share, nil},
		{failover, "ms", spread, atMost(1000)},
		{changeFollower, "ms", spread, atMost(2500)},
		{detectFollower, "ms", spread, nil},
		{changeLeader, "ms", spread, atMost(2500)},
		{detectLeader, "ms", spread, nil},
		{killAccepted, "ms", spread, atMost(250)},
		{killSent, "ms", spread, nil},
		{revokeAccepted, "ms", spread, atMost(250)},
		{revokeSent, "ms", spread, nil},
		{keyCreated, "ms", spread, nil},
		{failedLeader, "", spread, nil},
		{requestsLeader, "", sum, nil},
		{failedOther, "", spread, nil},
		{requestsOther, "", sum, nil},
		{startCluster, "ms", spread, nil},
		{startNode, "ms", spread, nil},
	}
}

// Figure is what a measure came to.
type Figure struct {
	Name, Unit       string
	N                int     // values
	Median, P95, Max float64 // of a spread; of other kinds all are the one value
	Single           bool    // not a spread
	Detail           string  // in words, such as 19 of 20
	aim              *aim
}

// Judged is the value that the aim is held against.
func (f Figure) Judged() float64 { return f.P95 }

// Bounded says whether there is an aim.
func (f Figure) Bounded() bool { return f.aim != nil }

// Holds reports whether the aim, if there is one, is kept.
func (f Figure) Holds() bool {
	return f.aim == nil || f.aim.atLeast && f.Judged() >= f.aim.bound || !f.aim.atLeast && f.Judged() <= f.aim.bound
}

// figure makes a measure's figure of its values; there must be one at least.
func (m measure) figure(values []float64) Figure {
	f := Figure{Name: m.name, Unit: m.unit, N: len(values), aim: m.aim, Single: m.kind != spread}
	values = slices.Sorted(slices.Values(values))
	total := 0.0
	for _, v := range values {
		total += v
	}
	n := len(values)
	switch m.kind {
	case sum:
		f.Median, f.P95, f.Max = total, total, total
	case share:
		v := 100 * total / float64(n)
		f.Median, f.P95, f.Max = v, v, v
		f.Detail = fmt.Sprintf("%.0f of %d", total, n)
	default:
		f.Median, f.P95, f.Max = (values[(n-1)/2]+values[n/2])/2, nearestRank(values, 0.95), values[n-1]
	}
	return f
}

// nearestRank is the least of the sorted values that at least the share q of them do not exceed.
func nearestRank(sorted []float64, q float64) float64 {
	// Without the small step 0.95 × 20 would come to a little more than 19.
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))-1e-9))-1)]
}

// Report is what a run has found.
type Report struct {
	Started time.Time
	Machine string
	Commit  string
	Config  Config
	Rows    []Row
	Notes   []string
}

// maxNotes bounds what is written beside the figures.
const maxNotes = 64

func (r *Report) note(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	if len(r.Notes) < maxNotes && !slices.Contains(r.Notes, s) {
		r.Notes = append(r.Notes, s)
	}
}

func (r *Report) add(name string, round int, value float64, unit string) {
	r.Rows = append(r.Rows, Row{Measure: name, Round: round, Value: value, Unit: unit})
}

// took adds a time in milliseconds.
func (r *Report) took(name string, round int, d time.Duration) {
	r.add(name, round, float64(max(d, 0))/float64(time.Millisecond), "ms")
}

func (r *Report) values(name string) (out []float64) {
	for _, x := range r.Rows {
		if x.Measure == name {
			out = append(out, x.Value)
		}
	}
	return out
}

func (r *Report) total(names ...string) (t float64) {
	for _, n := range names {
		for _, v := range r.values(n) {
			t += v
		}
	}
	return t
}

// Figures are the rows summed up: the measures with fixed names in their order, then the others
// as they came.
func (r *Report) Figures() (out []Figure) {
	all := measures()
	for _, x := range r.Rows {
		if !slices.ContainsFunc(all, func(m measure) bool { return m.name == x.Measure }) {
			all = append(all, measure{name: x.Measure, unit: x.Unit})
		}
	}
	for _, m := range all {
		if v := r.values(m.name); len(v) > 0 {
			out = append(out, m.figure(v))
		}
		if m.name == requestsOther {
			out = append(out, r.failedShare()...)
		}
	}
	return out
}

// failedShare is over all kills.
func (r *Report) failedShare() []Figure {
	sent, failed := r.total(requestsLeader, requestsOther), r.total(failedLeader, failedOther)
	if sent == 0 {
		return nil
	}
	v := 100 * failed / sent
	n := len(r.values(requestsLeader)) + len(r.values(requestsOther))
	return []Figure{{
		Name: failedShare, Unit: "%", N: n, Median: v, P95: v, Max: v, Single: true, Detail: fmt.Sprintf("%.0f of %.0f", failed, sent),
	}}
}

// WriteCSV writes one line for each value.
func (r *Report) WriteCSV(w io.Writer) error {
	lines := [][]string{{"measure", "round", "value", "unit"}}
	for _, x := range r.Rows {
		lines = append(lines, []string{x.Measure, strconv.Itoa(x.Round), strconv.FormatFloat(x.Value, 'f', 3, 64), x.Unit})
	}
	return csv.NewWriter(w).WriteAll(lines)
}

// line is a figure for people.
func (f Figure) line() string {
	var b strings.Builder
	if f.Single {
		fmt.Fprintf(&b, "%-58s %9.4g %10s %10s  %-4s n=%-5d", f.Name, f.Median, "", "", f.Unit, f.N)
	} else {
		fmt.Fprintf(&b, "%-58s %9.2f %10.2f %10.2f  %-4s n=%-5d", f.Name, f.Median, f.P95, f.Max, f.Unit, f.N)
	}
	if f.Detail != "" {
		fmt.Fprintf(&b, " %s", f.Detail)
	}
	if f.aim != nil {
		sign, word := "≤", "holds"
		if f.aim.atLeast {
			sign = "≥"
		}
		if !f.Holds() {
			word = "MISSED"
		}
		fmt.Fprintf(&b, " %s %g: %s", sign, f.aim.bound, word)
	}
	return strings.TrimRight(b.String(), " ")
}

// WriteText writes the figures, the machine and the commit for people.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	c := r.Config
	fmt.Fprintf(&b, "a cluster of %d nodes on one machine, %d rounds: each kills the leader, then another node\n", c.Nodes, c.Rounds)
	fmt.Fprintf(&b, "started  %s\ncommit   %s\nmachine  %s\n", r.Started.Format(time.RFC3339), r.Commit, r.Machine)
	fmt.Fprintf(&b, "load     %g requests a second at every node, for %v around each kill and %v with nobody killed; %v of changes at a time\n", c.Rate, c.Around, c.Watch, c.Each)
	fmt.Fprintf(&b, "An aim of a time is held against the 95th percentile. bench/ledger measures the ledger without the admin API.\n\n")
	fmt.Fprintf(&b, "%-58s %9s %10s %10s\n", "", "median", "p95", "max")
	for _, f := range r.Figures() {
		fmt.Fprintln(&b, f.line())
	}
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// Write puts cluster.csv and cluster.txt into dir, making it if need be.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	for name, write := range map[string]func(io.Writer) error{"cluster.csv": r.WriteCSV, "cluster.txt": r.WriteText} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b.Bytes(), 0o644); err != nil { // results are for all to read
			return fmt.Errorf("write the results: %w", err)
		}
	}
	return nil
}
