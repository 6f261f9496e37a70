package gateway

import (
	"bytes"
	"cmp"
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

	"github.com/HdrHistogram/hdrhistogram-go"

	"headgate/bench/load"
)

// Row is one measurement of one target. Times are microseconds, memory bytes; what a
// scenario does not measure is 0.
type Row struct {
	Scenario, Target                string
	Round                           int
	Rate                            float64 // asked for, 0 at saturation
	Arrivals, Dropped, Good, Failed int64
	Throughput                      float64 // good answers a second
	CPU                             float64 // of the target, for each good answer
	P50, P99                        float64 // from send to last byte
	FirstP50, FirstP99              float64 // from send to first byte
	GapP50, GapP99                  float64 // between reads of a stream
	LagP99                          float64 // the generator's own lateness
	Memory                          float64 // growth for each stream held open, less its body
	Resident                        float64 // set of the target, at the end
	Objects, Allocated              float64 // on the target's heap, for each good answer: of Go processes of ours
	Errors                          string  // what failed: kinds and statuses with their numbers
}

func newRow(sc, target string, round int, rate float64, cpu time.Duration, res *load.Result) Row {
	us := func(h *hdrhistogram.Histogram, q float64) float64 { return float64(h.ValueAtQuantile(q)) / 1e3 }
	r := Row{
		Scenario: sc, Target: target, Round: round + 1, Rate: rate, Arrivals: res.Arrivals, Dropped: res.Dropped, Good: res.Good,
		Failed: res.Arrivals - res.Dropped - res.Good, Throughput: res.Throughput(),
		P50: us(res.Service, 50), P99: us(res.Service, 99), FirstP50: us(res.First, 50), FirstP99: us(res.First, 99),
		GapP50: us(res.Gap, 50), GapP99: us(res.Gap, 99), LagP99: us(res.Lag, 99),
	}
	if r.Failed > 0 {
		r.Errors = fmt.Sprintf("%v, status %v", res.Errors, res.Status)
	}
	if res.Good > 0 {
		r.CPU = float64(cpu.Microseconds()) / float64(res.Good)
	}
	return r
}

// Figure is what the benchmark is about: the median over the rounds, its extremes,
// and the bound where there is one.
type Figure struct {
	Name, Unit       string
	Median, Low, Top float64
	Bound            float64
	AtLeast          bool // the bound is a least, not a most
	Bounded          bool
}

// Holds reports whether the median keeps the bound.
func (f Figure) Holds() bool {
	return !f.Bounded || f.AtLeast && f.Median >= f.Bound || !f.AtLeast && f.Median <= f.Bound
}

// Report is what a run has found.
type Report struct {
	Started time.Time
	Machine string
	Commit  string
	Subject string // what was held against the bare proxy
	Config  Config
	Rows    []Row
	Figures []Figure
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

func (r *Report) add(row Row) {
	r.Rows = append(r.Rows, row)
	if row.Failed > 0 || row.Dropped > 0 {
		r.note("%s, %s, round %d: %d failed and %d dropped of %d; %s", row.Scenario, row.Target, row.Round, row.Failed, row.Dropped, row.Arrivals, row.Errors)
	}
}

// each gives f of two targets' rows in every round where both have good answers.
func (r *Report) each(scenario, a, b string, f func(a, b Row) float64) (out []float64) {
	for _, x := range r.Rows {
		for _, y := range r.Rows {
			if x.Scenario == scenario && y.Scenario == scenario && x.Target == a && y.Target == b && x.Round == y.Round && x.Good > 0 && y.Good > 0 {
				if v := f(x, y); !math.IsNaN(v) && !math.IsInf(v, 0) {
					out = append(out, v)
				}
			}
		}
	}
	return out
}

func (r *Report) figure(f Figure, values []float64) {
	if len(values) == 0 {
		return
	}
	slices.Sort(values)
	n := len(values)
	f.Median, f.Low, f.Top = (values[(n-1)/2]+values[n/2])/2, values[0], values[n-1]
	r.Figures = append(r.Figures, f)
}

// summarize turns rows into figures.
func (r *Report) summarize() {
	s := r.Subject
	cpu := func(a, b Row) float64 { return a.CPU / b.CPU }
	most := func(name, unit string, bound float64) Figure {
		return Figure{Name: name, Unit: unit, Bound: bound, Bounded: true}
	}
	least := func(name, unit string, bound float64) Figure {
		return Figure{Name: name, Unit: unit, Bound: bound, Bounded: true, AtLeast: true}
	}
	p50 := func(a, b Row) float64 { return a.P50 - b.P50 }
	p99 := func(a, b Row) float64 { return a.P99 - b.P99 }
	first50 := func(a, b Row) float64 { return a.FirstP50 - b.FirstP50 }
	first99 := func(a, b Row) float64 { return a.FirstP99 - b.FirstP99 }
	throughput := func(a, b Row) float64 { return a.Throughput / b.Throughput }

	r.figure(most("chat: CPU a request over bare", "×", 1.5), r.each("chat", s, bare, cpu))
	r.figure(most("chat: p50 added", "µs", 150), r.each("chat", s, bare, p50))
	r.figure(most("chat: p99 added", "µs", 1000), r.each("chat", s, bare, p99))
	r.figure(most("stream: CPU a request over bare", "×", 1.5), r.each("stream", s, bare, cpu))
	r.figure(most("stream: p50 to first byte added", "µs", 150), r.each("stream", s, bare, first50))
	r.figure(most("stream: p99 to first byte added", "µs", 1000), r.each("stream", s, bare, first99))
	r.figure(Figure{Name: "stream: p50 to last byte added", Unit: "µs"}, r.each("stream", s, bare, p50))
	r.figure(most("stream: p50 between chunks added", "µs", 100), r.each("stream", s, bare, func(a, b Row) float64 { return a.GapP50 - b.GapP50 }))
	r.figure(most("stream: p99 between chunks added", "µs", 1000), r.each("stream", s, bare, func(a, b Row) float64 { return a.GapP99 - b.GapP99 }))
	r.figure(Figure{Name: "chat: allocations a request", Unit: ""}, r.each("chat", s, s, func(a, _ Row) float64 { return a.Objects }))
	r.figure(Figure{Name: "chat: allocations a request by bare", Unit: ""}, r.each("chat", bare, bare, func(a, _ Row) float64 { return a.Objects }))
	r.figure(Figure{Name: "stream: allocations a request", Unit: ""}, r.each("stream", s, s, func(a, _ Row) float64 { return a.Objects }))
	r.figure(Figure{Name: "stream: allocations a request by bare", Unit: ""}, r.each("stream", bare, bare, func(a, _ Row) float64 { return a.Objects }))
	r.figure(least("chat: throughput at saturation over bare", "×", 0.8), r.each("chat-saturated", s, bare, throughput))
	r.figure(least("stream: throughput at saturation over bare", "×", 0.8), r.each("stream-saturated", s, bare, throughput))
	r.figure(most("memory a stream held open", "KiB", 64), r.each("held", s, s, func(a, _ Row) float64 { return a.Memory / 1024 }))
	r.figure(Figure{Name: "memory a stream held open by bare", Unit: "KiB"}, r.each("held", bare, bare, func(a, _ Row) float64 { return a.Memory / 1024 }))
	r.lateness()
	for _, t := range []string{s, litellm} {
		r.figure(Figure{Name: "chat-slow: CPU a request, " + t, Unit: "µs"}, r.each("chat-slow", t, t, func(a, _ Row) float64 { return a.CPU }))
		r.figure(Figure{Name: "chat-slow: p50 over direct, " + t, Unit: "µs"}, r.each("chat-slow", t, direct, p50))
		r.figure(Figure{Name: "chat-slow: p99 over direct, " + t, Unit: "µs"}, r.each("chat-slow", t, direct, p99))
		r.figure(Figure{Name: "chat-saturated: throughput, " + t, Unit: "/s"}, r.each("chat-saturated", t, t, func(a, _ Row) float64 { return a.Throughput }))
	}
}

// lateBound is how late the generator may be, at the 99th percentile and in
// microseconds, before its latencies say more about the machine than about the target.
const lateBound = 1000

// lateness reports how late the generator itself was where it had a rate to keep, and
// says so in words where that spoils the latencies.
func (r *Report) lateness() {
	var lags []float64
	late := 0
	for _, x := range r.Rows {
		if x.Rate > 0 && x.Good > 0 {
			lags = append(lags, x.LagP99)
			if x.LagP99 > lateBound {
				late++
			}
		}
	}
	r.figure(Figure{Name: "generator: p99 of its lateness", Unit: "µs"}, lags)
	if late > 0 {
		r.note("the generator was late by more than %d µs (p99) in %d of %d measurements: the machine was busy, and added latencies are not to be believed", lateBound, late, len(lags))
	}
}

// WriteCSV writes one line for each measurement.
func (r *Report) WriteCSV(w io.Writer) error {
	c := csv.NewWriter(w)
	f := func(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }
	d := func(v int64) string { return strconv.FormatInt(v, 10) }
	lines := [][]string{{
		"scenario", "target", "round", "rate", "arrivals", "dropped", "good", "failed", "throughput", "cpu_us", "p50_us", "p99_us",
		"first_p50_us", "first_p99_us", "gap_p50_us", "gap_p99_us", "lag_p99_us", "memory_bytes",
		"resident_bytes", "allocations", "allocated_bytes",
	}}
	for _, x := range r.Rows {
		lines = append(lines, []string{
			x.Scenario, x.Target, strconv.Itoa(x.Round), f(x.Rate), d(x.Arrivals), d(x.Dropped), d(x.Good), d(x.Failed), f(x.Throughput),
			f(x.CPU), f(x.P50), f(x.P99), f(x.FirstP50), f(x.FirstP99), f(x.GapP50), f(x.GapP99), f(x.LagP99), f(x.Memory),
			f(x.Resident), f(x.Objects), f(x.Allocated),
		})
	}
	return c.WriteAll(lines)
}

// WriteText writes the figures, the machine and the commit for people.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s against a bare reverse proxy, median of %d rounds of %v\n", r.Subject, r.Config.Rounds, r.Config.Each)
	fmt.Fprintf(&b, "started  %s\ncommit   %s\nmachine  %s\nrates    chat %g/s, stream %g/s of %d chunks, chat-slow %g/s; %d under way at saturation, %d streams held\n\n",
		r.Started.Format(time.RFC3339), r.Commit, r.Machine, r.Config.ChatRate, r.Config.StreamRate, streamChunks, r.Config.SlowRate, r.Config.Parallel, r.Config.Held)
	for _, f := range r.Figures {
		verdict := ""
		if f.Bounded {
			sign, word := "≤", "holds"
			if f.AtLeast {
				sign = "≥"
			}
			if !f.Holds() {
				word = "MISSED"
			}
			verdict = fmt.Sprintf("  %s %g: %s", sign, f.Bound, word)
		}
		fmt.Fprintf(&b, "%-44s %10.2f %-3s (%.2f … %.2f)%s\n", f.Name, f.Median, f.Unit, f.Low, f.Top, verdict)
	}
	r.writeTable(&b)
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// writeTable writes all targets side by side: medians over the rounds. What is not measured of one is a dash.
func (r *Report) writeTable(b *bytes.Buffer) {
	fmt.Fprintf(b, "\nall targets, medians; times in µs from the send, MiB is the resident set at the end, memory a stream in KiB\n\n"+
		"%-16s %-12s %9s %9s %9s %9s %9s %9s %9s %9s %8s %8s %8s\n", "", "", "answers/s", "cpu", "p50", "p99", "first p50", "first p99", "gap p50", "gap p99", "MiB", "allocs", "KiB held")
	type cell struct{ scenario, target string }
	rows := map[cell][]Row{}
	var order []cell
	for _, x := range r.Rows {
		c := cell{x.Scenario, x.Target}
		if rows[c] == nil {
			order = append(order, c)
		}
		if x.Good > 0 {
			rows[c] = append(rows[c], x)
		}
	}
	slices.SortStableFunc(order, func(a, b cell) int { // by scenario, as they came; targets by name, so that reports can be compared
		return cmp.Or(slices.IndexFunc(r.Rows, func(x Row) bool { return x.Scenario == a.scenario })-
			slices.IndexFunc(r.Rows, func(x Row) bool { return x.Scenario == b.scenario }), strings.Compare(a.target, b.target))
	})
	for _, c := range slices.Compact(order) {
		fmt.Fprintf(b, "%-16s %-12s", c.scenario, c.target)
		for i, of := range []func(Row) float64{
			func(x Row) float64 { return x.Throughput }, func(x Row) float64 { return x.CPU }, func(x Row) float64 { return x.P50 }, func(x Row) float64 { return x.P99 },
			func(x Row) float64 { return x.FirstP50 }, func(x Row) float64 { return x.FirstP99 }, func(x Row) float64 { return x.GapP50 }, func(x Row) float64 { return x.GapP99 },
			func(x Row) float64 { return x.Resident / (1 << 20) }, func(x Row) float64 { return x.Objects }, func(x Row) float64 { return x.Memory / 1024 },
		} {
			width := 9
			if i > 7 {
				width = 8
			}
			var values []float64
			for _, x := range rows[c] {
				values = append(values, of(x))
			}
			slices.Sort(values)
			if n := len(values); n == 0 || values[n-1] == 0 {
				fmt.Fprintf(b, " %*s", width, "-")
			} else {
				fmt.Fprintf(b, " %*.1f", width, (values[(n-1)/2]+values[n/2])/2)
			}
		}
		b.WriteString("\n")
	}
}

// Write puts gateway.csv and gateway.txt into dir, making it if need be.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, write := range map[string]func(io.Writer) error{"gateway.csv": r.WriteCSV, "gateway.txt": r.WriteText} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b.Bytes(), 0o644); err != nil { // results are for all to read
			return err
		}
	}
	return nil
}
