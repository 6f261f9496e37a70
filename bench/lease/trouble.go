package lease

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"time"
)

// trouble is what one fault does to one policy, over all its cells of the simulator: the worst of each.
type trouble struct {
	Fault                 Fault
	Name                  string
	Cells                 int
	Over, Admitted        float64
	Wrong, Lost           float64 // of the requests; Wrong of cells up to the limit
	P99                   time.Duration
	Recovery              time.Duration
	first                 bool
	Span                  int
	OverText, WrongText   string
	LostText, RecoverText string
}

// First says whether the row begins its fault, Ours whether it is Headgate's.
func (t trouble) First() bool { return t.first }

// Ours see First.
func (t trouble) Ours() bool { return t.Name == Headgate }

// troubles are in the order of Faults, and of the policies in each.
func (r *Report) troubles() (rows []trouble) {
	for _, f := range Faults()[1:] {
		begin := len(rows)
		for _, name := range r.names() {
			if t := r.trouble(f, name); t.Cells > 0 {
				t.first = len(rows) == begin
				rows = append(rows, t)
			}
		}
		for i := begin; i < len(rows); i++ {
			rows[i].Span = len(rows) - begin
		}
	}
	return rows
}

func (r *Report) trouble(f Fault, name string) trouble {
	t := trouble{Fault: f, Name: name, Admitted: 1}
	for i := range r.Results {
		x := &r.Results[i]
		if x.Fault != f || x.Contender != name || x.Engine != Simulated {
			continue
		}
		t.Cells++
		t.Over, t.Admitted, t.Lost = max(t.Over, x.Over), min(t.Admitted, x.Admitted), max(t.Lost, x.Lost)
		t.P99, t.Recovery = max(t.P99, x.P99), max(t.Recovery, x.Recovery)
		if x.Load <= 1 {
			t.Wrong = max(t.Wrong, x.FalseRefused)
		}
	}
	t.OverText, t.WrongText, t.LostText, t.RecoverText = percent(t.Over), percent(t.Wrong), percent(t.Lost), "–"
	if t.Recovery > 0 {
		t.RecoverText = fmt.Sprintf("%.1f s", t.Recovery.Seconds())
	}
	return t
}

// courses are the time lines of the simplest cell of each fault: Headgate's, and those of who asks each time. What other engines saw is
// shown whole.
func (r *Report) courses() (out []courseView) {
	seen := map[Fault]string{}
	for i := range r.Results {
		x := &r.Results[i]
		if x.Course.FaultAt == 0 {
			continue
		}
		cell := cmp.Or(seen[x.Fault], x.Cell.String())
		seen[x.Fault] = cell
		if x.Engine == Simulated && (x.Cell.String() != cell || !slices.Contains([]string{Headgate, asksEach}, x.Contender)) {
			continue
		}
		recovery := "never out of step for long"
		if x.Recovery > 0 {
			recovery = "in step again after " + x.Recovery.Round(10*time.Millisecond).String()
		}
		out = append(out, courseView{x.Cell.String(), x.Contender + ", " + x.Engine, recovery, x.Course.picture()})
	}
	return out
}

// writeTroubles says what each fault does to each policy.
func (r *Report) writeTroubles(b *bytes.Buffer) {
	rows := r.troubles()
	if len(rows) == 0 {
		return
	}
	fmt.Fprintf(b, "\n%-16s %-24s %10s %10s %14s %8s %10s %12s\n", "when", "", "over", "admitted", "refused wrongly", "lost", "p99", "in step")
	fmt.Fprintf(b, "%-16s %-24s %10s %10s %14s %8s %10s %12s\n", "something fails", "worst of all cells", "bursts", "", "≤1×", "", "", "again after")
	for _, t := range rows {
		fault := ""
		if t.first {
			fault = string(t.Fault)
		}
		fmt.Fprintf(b, "%-16s %-24s %10.4f %10.4f %14.2f%% %7.3f%% %10v %12s\n", fault, t.Name, t.Over, t.Admitted, 100*t.Wrong, 100*t.Lost, t.P99.Round(100*time.Microsecond), t.RecoverText)
	}
	b.WriteString(`a store in the middle that crashes is away for ` + storeAway.String() + ` and comes back empty; its clients refuse meanwhile. Headgate's nodes decide by rate/N where an
owner is out of reach (unavailable: local, the default), so that k of N nodes that are cut off may add k/N of the limit; with deny it is 0
`)
}
