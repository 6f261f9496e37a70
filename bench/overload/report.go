package overload

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"headgate/bench/fakevllm"
)

// Row is what one target made of one load.
type Row struct {
	Target string
	Load   float64 // offered, in capacities
	Length time.Duration
	// Arrivals in the phase, and how they ended: in time and whole; refused; left
	// because nothing came; otherwise broken.
	Arrivals, Good, Refused, Left, Broken int
	Goodput                               float64          // good answers a second, in capacities
	Share                                 [classes]float64 // of the slot-time, by class
	Served                                [classes]float64 // good of the arrivals of a class
	FirstP50, FirstP99                    time.Duration    // interactive: from due to first byte
	WaitP99                               time.Duration    // likewise: from due to a slot at the server
	RefusedP99                            time.Duration    // from due to the refusal
	WastedTime, WastedTokens              float64          // shares that went to clients who had left
	Late                                  int              // got a slot after their client's patience
	Running                               float64          // on average at the upstream
	PeakRunning, PeakWaiting              int64            // there, by its own log
	LagP99                                time.Duration    // the generator's own lateness
	Memory                                []int64          // of the target, once a second, in bytes
}

// memory gives the first, the highest and the last figure, and the last over the one
// in the middle.
func (r *Row) memory() (first, peak, last int64, growth float64) {
	if len(r.Memory) == 0 {
		return 0, 0, 0, 0
	}
	first, last = r.Memory[0], r.Memory[len(r.Memory)-1]
	return first, slices.Max(r.Memory), last, float64(last) / float64(max(r.Memory[len(r.Memory)/2], 1))
}

// Aim is what Headgate is held to.
type Aim struct {
	Name, Unit   string
	Value, Bound float64
	AtLeast      bool
}

// Holds reports whether the value keeps the bound.
func (a Aim) Holds() bool {
	return a.AtLeast && a.Value >= a.Bound || !a.AtLeast && a.Value <= a.Bound
}

// Report is what a run has found.
type Report struct {
	Started  time.Time
	Machine  string
	Commit   string
	Config   Config
	Capacity float64 // answers a second
	Rows     []Row
	Recovery map[string]time.Duration // by target; absent: not within Config.After
	Aims     []Aim
	Notes    []string
}

// maxNotes bounds what is written beside the figures.
const maxNotes = 64

func (r *Report) note(format string, args ...any) {
	if len(r.Notes) < maxNotes {
		r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
	}
}

// add turns what a trial saw into rows.
func (r *Report) add(x *trial, d *driver, log []fakevllm.Record, spans []span) {
	d.mu.Lock()
	defer d.mu.Unlock()
	due := make(map[int64]time.Time, len(d.ends))
	for i := range d.ends {
		due[d.ends[i].N] = d.ends[i].Due
	}
	timeline := x.up.server.Timeline()
	if dropped := x.up.server.Stats().Dropped; dropped > 0 {
		r.note("%s: %d requests are missing in the upstream's log: shares and waste are of the rest", x.t.name, dropped)
	}
	for _, s := range spans {
		row := rowOf(x.t.name, r.Capacity, d.ends, s)
		row.ofUpstream(usedBetween(log, s.from.Add(settle), s.to, due), timeline, s)
		r.Rows = append(r.Rows, row)
		if row.Broken > 0 {
			r.note("%s, %.1f ×: %d of %d answers broke off or were errors: %v", row.Target, row.Load, row.Broken, row.Arrivals, kindsOf(d.ends, s))
		}
	}
	normal := 2*r.Rows[len(r.Rows)-len(spans)].FirstP99 + lateBy // of the first load
	if at, ok := recovery(d.ends, spans[len(spans)-1].from, normal); ok {
		if r.Recovery == nil {
			r.Recovery = map[string]time.Duration{}
		}
		r.Recovery[x.t.name] = at
	}
}

// refused says whether an answer is one that a full server gives on purpose. nginx
// answers 502 where all servers are at their max_conns.
func refused(target string, e *end) bool {
	return e.Kind == "status" && (e.Status == 429 || e.Status == 503 || e.Status == 502 && target == nginxSlots)
}

func rowOf(name string, capacity float64, ends []end, s span) Row {
	row := Row{Target: name, Load: s.load, Length: s.to.Sub(s.from), Memory: s.memory}
	var first, refusals, lags []time.Duration
	var came, served [classes]int
	inTime := 0
	for i := range ends {
		e := &ends[i]
		if e.good() && e.Last.After(s.from.Add(settle)) && e.Last.Before(s.to) {
			inTime++
		}
		if e.Due.Before(s.from) || !e.Due.Before(s.to) {
			continue
		}
		row.Arrivals++
		came[e.class]++
		lags = append(lags, e.Sent.Sub(e.Due))
		switch {
		case e.good():
			row.Good++
			served[e.class]++
			if e.class == interactive && e.Due.After(s.from.Add(settle)) {
				first = append(first, e.First.Sub(e.Due))
			}
		case refused(name, e):
			row.Refused++
			refusals = append(refusals, e.Last.Sub(e.Due))
		case e.Kind == "impatient":
			row.Left++
		default:
			row.Broken++
		}
	}
	for c := range served {
		row.Served[c] = float64(served[c]) / float64(max(came[c], 1))
	}
	row.Goodput = float64(inTime) / (row.Length - settle).Seconds() / capacity
	row.FirstP50, row.FirstP99 = quantile(first, 0.5), quantile(first, 0.99)
	row.RefusedP99, row.LagP99 = quantile(refusals, 0.99), quantile(lags, 0.99)
	return row
}

func (r *Row) ofUpstream(u used, timeline []fakevllm.Window, s span) {
	var all time.Duration
	for _, d := range u.slotTime {
		all += d
	}
	for c, d := range u.slotTime {
		r.Share[c] = float64(d) / float64(max(all, 1))
	}
	r.WastedTime = float64(u.wastedTime) / float64(max(all, 1))
	r.WastedTokens = float64(u.wastedTokens) / float64(max(u.tokens, 1))
	r.Late, r.WaitP99 = u.late, quantile(u.waits, 0.99)
	var ran time.Duration
	for _, w := range timeline {
		if w.At.After(s.from.Add(settle)) && w.At.Before(s.to) {
			ran += w.SlotTime
			r.PeakRunning, r.PeakWaiting = max(r.PeakRunning, w.PeakRunning), max(r.PeakWaiting, w.PeakWaiting)
		}
	}
	r.Running = float64(ran) / float64(s.to.Sub(s.from.Add(settle)))
}

// kindsOf counts what broke, by status or kind.
func kindsOf(ends []end, s span) map[string]int {
	out := map[string]int{}
	for i := range ends {
		if e := &ends[i]; !e.Due.Before(s.from) && e.Due.Before(s.to) && !e.good() {
			k := e.Kind
			if k == "status" {
				k = strconv.Itoa(e.Status)
			}
			out[k]++
		}
	}
	return out
}

func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(int(q*float64(len(d))), len(d)-1)]
}

// surgeOf is a target's row of the highest load.
func (r *Report) surgeOf(name string) *Row {
	var out *Row
	for i := range r.Rows {
		if x := &r.Rows[i]; x.Target == name && (out == nil || x.Load > out.Load) {
			out = x
		}
	}
	return out
}

// judge holds Headgate's surge against the aims.
func (r *Report) judge() {
	x := r.surgeOf(headgate)
	if x == nil {
		return
	}
	at := func(s string) string { return fmt.Sprintf("at %g ×: %s", x.Load, s) }
	_, _, _, growth := x.memory()
	recovered, ok := r.Recovery[headgate]
	if !ok {
		recovered = r.Config.After
		r.note("headgate had not recovered when the watch ended after %v", r.Config.After)
	}
	r.Aims = append(r.Aims,
		Aim{Name: at("goodput, of capacity"), Value: x.Goodput, Bound: 0.95, AtLeast: true},
		Aim{Name: at("interactive p99 to a slot"), Unit: "s", Value: x.WaitP99.Seconds(), Bound: targetWait.Seconds()},
		Aim{Name: at("background's share of slot-time"), Value: x.Share[background], Bound: 0.2, AtLeast: true},
		Aim{Name: at("got a slot after their client's patience"), Value: float64(x.Late)},
		Aim{Name: at("most running at the upstream"), Value: float64(x.PeakRunning), Bound: float64(r.Config.Slots)},
		Aim{Name: at("memory at the end over half-way"), Unit: "×", Value: growth, Bound: 1.15},
		Aim{Name: "after the surge: until p99 is normal", Unit: "s", Value: recovered.Seconds(), Bound: targetWait.Seconds()},
	)
	for i := range r.Rows {
		if y := &r.Rows[i]; y.LagP99 > maxLag {
			r.note("%s, %.1f ×: the generator was late by %v at the 99th percentile: the machine was busy, and times are not to be believed", y.Target, y.Load, y.LagP99.Round(time.Millisecond))
		}
	}
}

// maxLag is how late the generator may be before times say more about the machine.
const maxLag = 20 * time.Millisecond

// WriteCSV writes one line for each target and load.
func (r *Report) WriteCSV(w io.Writer) error {
	lines := [][]string{{
		"target", "load", "seconds", "arrivals", "good", "refused", "left", "broken", "goodput", "share_interactive", "share_background", "share_best_effort",
		"served_interactive", "served_background", "served_best_effort", "first_p50_ms", "first_p99_ms", "wait_p99_ms", "refused_p99_ms", "wasted_time", "wasted_tokens",
		"late", "running", "peak_running", "peak_waiting", "memory_first_mib", "memory_peak_mib", "memory_last_mib", "lag_p99_ms",
	}}
	f := func(v float64) string { return strconv.FormatFloat(v, 'f', 4, 64) }
	ms := func(d time.Duration) string { return strconv.FormatFloat(d.Seconds()*1e3, 'f', 1, 64) }
	for i := range r.Rows {
		x := &r.Rows[i]
		first, peak, last, _ := x.memory()
		lines = append(lines, []string{
			x.Target, strconv.FormatFloat(x.Load, 'g', -1, 64), strconv.FormatFloat(x.Length.Seconds(), 'f', 0, 64),
			strconv.Itoa(x.Arrivals), strconv.Itoa(x.Good), strconv.Itoa(x.Refused), strconv.Itoa(x.Left), strconv.Itoa(x.Broken), f(x.Goodput),
			f(x.Share[interactive]), f(x.Share[background]), f(x.Share[bestEffort]), f(x.Served[interactive]), f(x.Served[background]), f(x.Served[bestEffort]),
			ms(x.FirstP50), ms(x.FirstP99), ms(x.WaitP99), ms(x.RefusedP99), f(x.WastedTime), f(x.WastedTokens), strconv.Itoa(x.Late),
			f(x.Running), strconv.FormatInt(x.PeakRunning, 10), strconv.FormatInt(x.PeakWaiting, 10),
			strconv.FormatInt(first>>20, 10), strconv.FormatInt(peak>>20, 10), strconv.FormatInt(last>>20, 10), ms(x.LagP99),
		})
	}
	return csv.NewWriter(w).WriteAll(lines)
}

// WriteText writes the rows, the aims, the machine and the commit for people.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	c := &r.Config
	fmt.Fprintf(&b, "an upstream of %d slots offered multiples of the %.1f answers/s that it gives with its slots just kept full\n", c.Slots, r.Capacity)
	fmt.Fprintf(&b, "started  %s\ncommit   %s\nmachine  %s\n", r.Started.Format(time.RFC3339), r.Commit, r.Machine)
	fmt.Fprintf(&b, `phases   %v each; the surge %v for headgate, %v for the others; then %v at %g
requests 5–15 tokens after %v, %v apart; half of them stream; interactive 50 %%, background 30 %%, best effort 20 %%
clients  leave after 5 s (background 15 s) without a byte and do not come again
goodput  answers that began in time and came whole, of capacity; wasted: slot-time for clients who left
first    interactive, of good answers, from the moment the request was due to the first byte; wait99: of all, to their slot at the server

`, c.Each, c.Surge, c.PeerSurge, c.After, calm, ttft, interToken)
	fmt.Fprintf(&b, "%-16s %5s %8s %6s %7s %6s %8s %8s %7s %9s %9s %7s %7s %6s %5s %7s %5s %7s\n", "", "load", "goodput", "good", "refused", "left",
		"first50", "first99", "wait99", "refusal99", "backgr.", "wasted", "wasted", "ran", "most", "waited", "late", "memory")
	fmt.Fprintf(&b, "%-16s %5s %8s %6s %7s %6s %8s %8s %7s %9s %9s %7s %7s %6s %5s %7s %5s %7s\n", "", "", "", "", "", "", "ms", "ms", "ms", "ms", "slot-time", "time", "tokens", "", "", "there", "", "MiB")
	for i := range r.Rows {
		x := &r.Rows[i]
		n := float64(max(x.Arrivals, 1))
		_, peak, _, _ := x.memory()
		fmt.Fprintf(&b, "%-16s %5.1f %8.3f %5.1f%% %6.1f%% %5.1f%% %8.0f %8.0f %7.0f %9.0f %8.1f%% %6.1f%% %6.1f%% %6.1f %5d %7d %5d %7d\n",
			x.Target, x.Load, x.Goodput, 100*float64(x.Good)/n, 100*float64(x.Refused)/n, 100*float64(x.Left)/n,
			x.FirstP50.Seconds()*1e3, x.FirstP99.Seconds()*1e3, x.WaitP99.Seconds()*1e3, x.RefusedP99.Seconds()*1e3, 100*x.Share[background],
			100*x.WastedTime, 100*x.WastedTokens, x.Running, x.PeakRunning, x.PeakWaiting, x.Late, peak>>20)
	}
	b.WriteString("\nafter the surge, until no more than 1 in 100 interactive requests is later than twice the p99 of the first load\n")
	for _, name := range targetNames() {
		if r.surgeOf(name) == nil {
			continue
		}
		if d, ok := r.Recovery[name]; ok {
			fmt.Fprintf(&b, "%-16s %.2f s\n", name, d.Seconds())
		} else {
			fmt.Fprintf(&b, "%-16s not within %v\n", name, c.After)
		}
	}
	b.WriteString("\nheadgate\n")
	for _, a := range r.Aims {
		sign, word := "≤", "holds"
		if a.AtLeast {
			sign = "≥"
		}
		if !a.Holds() {
			word = "MISSED"
		}
		fmt.Fprintf(&b, "%-52s %8.3f %-2s %s %g: %s\n", a.Name, a.Value, a.Unit, sign, a.Bound, word)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// Write puts overload.csv, overload.txt and overload.svg into dir, making it if need be.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	for name, write := range map[string]func(io.Writer) error{"overload.csv": r.WriteCSV, "overload.txt": r.WriteText, "overload.svg": r.WriteSVG} {
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

// loads lists the loads that were offered before the calm, ascending.
func (r *Report) loads() []float64 {
	out := slices.Clone(r.Config.Loads)
	slices.SortFunc(out, cmp.Compare[float64])
	return out
}
