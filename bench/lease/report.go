package lease

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Report is what a run has found.
type Report struct {
	Started time.Time
	Took    time.Duration
	Machine string
	Commit  string
	Command string   // that makes it again
	Notes   []string // of what was replayed, and who recorded it
	Results []Result
}

// near is how close two contenders' errors count as equal.
const near = 0.001

// Missed lists the aims that a result misses, in words.
func (r *Result) Missed() (missed []string) {
	miss := func(format string, args ...any) { missed = append(missed, fmt.Sprintf(format, args...)) }
	if r.Over > 0 {
		miss("over-admission %.4f bursts > 0", r.Over)
	}
	least := 0.999
	if r.Load > 1 {
		least = 0.995
		if r.burst() < 10 {
			least = 0.985
		}
	}
	if r.Admitted < least {
		miss("admitted/ideal %.4f < %g", r.Admitted, least)
	}
	if r.Load < 1 && r.FalseRefused > 0.001 {
		miss("false refusals %.2f %% > 0.1 %%", 100*r.FalseRefused)
	}
	if r.Busy > 0.05 {
		miss("%.3f round trips a request > 0.05 at holders of ≥ %d requests/s", r.Busy, busy)
	}
	if r.Quiet > 4 {
		miss("%.1f round trips a second > 4 (one a keep-alive) at another holder", r.Quiet)
	}
	return missed
}

// err is the distance from the ideal bucket: what was admitted beyond the limit, not admitted of what
// could be, and refused wrongly where there is room for all.
func (r *Result) err() float64 {
	e := r.Over + max(0, 1-r.Admitted)
	if r.Load < 1 {
		e += r.FalseRefused
	}
	return e
}

// of lists a contender's results of cells in which nothing fails, cell by cell.
func (r *Report) of(name string) (out []Result) {
	for _, x := range r.Results {
		if x.Contender == name && x.Engine == Simulated && x.Fault == NoFault {
			out = append(out, x)
		}
	}
	return out
}

// WriteCSV writes a line for each contender in each cell.
func (r *Report) WriteCSV(w io.Writer) error {
	lines := [][]string{{
		"limit", "burst_s", "nodes", "demand", "load", "contender", "requests", "ideal_refused", "over", "admitted",
		"admitted_requests", "false_refusals", "trips", "trips_busy", "trips_quiet_s", "keepalives_s", "pushes", "local", "stranded",
		"fault", "lost", "recovery_s",
	}}
	f := func(v float64) string { return strconv.FormatFloat(v, 'f', 4, 64) }
	for _, x := range r.Results {
		busy, recovery := "", ""
		if x.Recovery >= 0 {
			recovery = f(x.Recovery.Seconds())
		}
		if x.Busy >= 0 {
			busy = f(x.Busy)
		}
		lines = append(lines, []string{
			x.Name, strconv.FormatFloat(x.burst(), 'f', 0, 64), strconv.Itoa(x.Nodes), x.demand(), strconv.FormatFloat(x.Load, 'g', -1, 64),
			x.Contender, strconv.Itoa(x.Requests), f(x.IdealRefused), f(x.Over), f(x.Admitted),
			f(x.AdmittedRequests), f(x.FalseRefused), f(x.Trips), busy, f(x.Quiet), f(x.Kept), f(x.Pushed), f(x.Local), f(x.Stranded),
			string(x.Fault), f(x.Lost), recovery,
		})
	}
	return csv.NewWriter(w).WriteAll(lines)
}

// WriteText writes the summary, the machine and the commit for people.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	ours := r.of(Headgate)
	fmt.Fprintf(&b, "one limit over many nodes, in virtual time: %d cells, each contender fed the same arrivals\n", len(ours))
	fmt.Fprintf(&b, "started  %s, took %s\ncommit   %s\nmachine  %s\n", r.Started.Format(time.RFC3339), r.Took.Round(time.Second), r.Commit, r.Machine)
	b.WriteString(`world    nodes and an owner, 1 ms each way where nothing else is said; even or Zipf demand, Poisson arrivals, tokens lognormal (σ 1)
over     admitted beyond burst + 1.01·rate·w in the worst of all windows, in bursts
admitted units admitted, of those that one central bucket admits of the same arrivals; what lies in leases in the end counts as not admitted
trips    questions to the owner a request; keep-alives (one a node pair and 250 ms, for all buckets together) apart

`)
	for _, note := range r.Notes {
		fmt.Fprintln(&b, note)
	}
	r.writeContenders(&b)
	if len(r.Notes) == 0 { // the aims are of what is drawn
		r.writeLoads(&b, ours)
		r.writeAims(&b, ours)
	}
	r.writeDuels(&b, ours)
	r.writeTroubles(&b)
	_, err := w.Write(b.Bytes())
	return err
}

func (r *Report) writeContenders(b *bytes.Buffer) {
	fmt.Fprintf(b, "%-24s %9s %12s %12s %12s %10s %10s %8s\n", "", "over", "admitted", "admitted", "falsely", "trips", "keep-alive", "local")
	fmt.Fprintf(b, "%-24s %9s %12s %12s %12s %10s %10s %8s\n", "", "worst", "≤0.9×, worst", ">1×, worst", "refused <1×", "mean", "/s/holder", "mean")
	for _, name := range r.names() {
		over, low, high, wrong, trips, kept, local := 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0
		rs := r.of(name)
		for _, x := range rs {
			over = max(over, x.Over)
			if x.Load < 1 {
				low, wrong = min(low, x.Admitted), max(wrong, x.FalseRefused)
			} else {
				high = min(high, x.Admitted)
			}
			n := float64(len(rs))
			trips, kept, local = trips+x.Trips/n, kept+x.Kept/n, local+x.Local/n
		}
		fmt.Fprintf(b, "%-24s %9.4f %12.4f %12.4f %11.2f%% %10.4f %10.2f %8.3f\n", name, over, low, high, 100*wrong, trips, kept, local)
	}
}

// writeLoads sums the leases up by load, over holders that see enough of the bucket.
func (r *Report) writeLoads(b *bytes.Buffer, ours []Result) {
	fmt.Fprintf(b, "\n%-10s %6s %18s %18s %14s %18s %14s %12s\n", "headgate", "load", "admitted, burst 1s", "burst 10s", "falsely refused", "trips, busy holders", "local, mean", "stranded")
	for _, load := range r.loads() {
		short, long, wrong, busiest, local, stranded, n := 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
		for _, x := range ours {
			if x.Load != load {
				continue
			}
			if x.burst() < 10 {
				short = min(short, x.Admitted)
			} else {
				long = min(long, x.Admitted)
			}
			wrong, busiest = max(wrong, x.FalseRefused), max(busiest, x.Busy)
			local, stranded, n = local+x.Local, max(stranded, x.Stranded), n+1
		}
		fmt.Fprintf(b, "%-10s %6g %18.4f %18.4f %13.2f%% %18.4f %14.3f %12.3f\n", "worst", load, short, long, 100*wrong, busiest, local/max(n, 1), stranded)
	}
}

func (r *Report) writeAims(b *bytes.Buffer, ours []Result) {
	var missed []string
	for _, x := range ours {
		if m := x.Missed(); len(m) > 0 {
			missed = append(missed, fmt.Sprintf("  %s: %s", x.String(), strings.Join(m, "; ")))
		}
	}
	b.WriteString("\naims     over 0; admitted ≥ 0.999 below the limit, above it ≥ 0.995 (burst 10 s) and ≥ 0.985 (1 s); falsely refused ≤ 0.1 % below;\n")
	fmt.Fprintf(b, "         trips ≤ 0.05 at holders of ≥ %d requests/s, at others ≤ one a keep-alive: %d of %d cells keep all; the others:\n", busy, len(ours)-len(missed), len(ours))
	for _, m := range missed {
		fmt.Fprintln(b, m)
	}
}

// writeDuels compares with each contender on both axes at once: distance from the ideal, and trips.
func (r *Report) writeDuels(b *bytes.Buffer, ours []Result) {
	fmt.Fprintf(b, "\ncells in which leases are               %14s %14s %14s %14s %14s\n", "better on both", "more exact,", "fewer trips,", "no better on", "the same")
	fmt.Fprintf(b, "%-39s %14s %14s %14s %14s %14s\n", "", "", "more trips", "less exact", "either", "")
	for _, name := range r.names() {
		if name == Headgate {
			continue
		}
		var both, exact, fewer, worse, same int
		for i, x := range r.of(name) {
			e, t := ours[i].err()-x.err(), ours[i].Trips-x.Trips
			switch {
			case e <= near && t <= 0 && (e < -near || t < 0):
				both++
			case e < -near:
				exact++
			case t < 0:
				fewer++
			case e > near || t > 0:
				worse++
			default:
				same++
			}
		}
		fmt.Fprintf(b, "  than %-32s %14d %14d %14d %14d %14d\n", name, both, exact, fewer, worse, same)
	}
}

// Write puts lease.html, lease.csv, lease.txt, lease.svg and lease.json into dir, making it if need be.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	for name, write := range map[string]func(io.Writer) error{
		"lease.csv": r.WriteCSV, "lease.txt": r.WriteText, "lease.svg": r.WriteSVG, "lease.html": r.WriteHTML, "lease.json": r.WriteJSON,
	} {
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
