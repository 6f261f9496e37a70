package lease

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

// WriteJSON writes what ReadJSON reads. Courses are kept of cells with a fault.
func (r *Report) WriteJSON(w io.Writer) error {
	short := *r
	short.Results = slices.Clone(r.Results)
	for i := range short.Results {
		if short.Results[i].Course.FaultAt == 0 {
			short.Results[i].Course = Course{}
		}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(&short)
}

// maxReport bounds the file that ReadJSON reads.
const maxReport = 1 << 30

// ReadJSON reads the report of an earlier run.
func ReadJSON(path string) (*Report, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the earlier report: %w", err)
	}
	defer func() { _ = f.Close() }()
	var r Report
	if err := json.NewDecoder(io.LimitReader(f, maxReport)).Decode(&r); err != nil {
		return nil, fmt.Errorf("%s is no lease.json of this benchmark: %w", path, err)
	}
	if len(r.Results) == 0 {
		return nil, fmt.Errorf("%s has no results; give the lease.json of an earlier run", path)
	}
	return &r, nil
}

// figure is one of what is compared.
type figure struct {
	name  string
	of    func(*Result) float64
	lower bool // is better
}

func figures() []figure {
	return []figure{
		{"error", func(r *Result) float64 { return r.err() }, true},
		{"too much", func(r *Result) float64 { return r.Over }, true},
		{"admitted", func(r *Result) float64 { return r.Admitted }, false},
		{"round trips", func(r *Result) float64 { return r.Trips }, true},
		{"mean wait, ms", func(r *Result) float64 { return float64(r.Mean) / 1e6 }, true},
		{"p99, ms", func(r *Result) float64 { return float64(r.P99) / 1e6 }, true},
	}
}

// Difference is one figure of one policy, in all cells that both runs have with the same seed and engine.
type Difference struct {
	Contender, Figure string
	Cells             int
	Old, New          float64 // means
	Better, Worse     int     // cells
	// P is how likely so much or more is by chance: the two-sided signed-rank test of Wilcoxon (Individual comparisons by ranking
	// methods, Biometrics Bulletin 1945), pairs without a difference left out.
	P float64
}

// Compare holds a run against an earlier one. What is simulated of the same seed differs by what was changed alone; what is real
// also by chance.
func Compare(earlier, now *Report) (ds []Difference) {
	key := func(r *Result) string {
		return fmt.Sprint(r.Engine, "|", r.Contender, "|", r.Cell.String(), "|", r.Seed)
	}
	before := make(map[string]*Result, len(earlier.Results))
	for i := range earlier.Results {
		before[key(&earlier.Results[i])] = &earlier.Results[i]
	}
	for _, name := range now.names() {
		for _, f := range figures() {
			d := Difference{Contender: name, Figure: f.name}
			var changes []float64
			for i := range now.Results {
				r := &now.Results[i]
				was := before[key(r)]
				if r.Contender != name || was == nil {
					continue
				}
				a, b := f.of(was), f.of(r)
				d.Cells++
				d.Old, d.New = d.Old+a, d.New+b
				change := b - a
				switch {
				case change == 0:
				case change < 0 == f.lower:
					d.Better++
				default:
					d.Worse++
				}
				changes = append(changes, change)
			}
			if d.Cells == 0 {
				continue
			}
			d.Old, d.New, d.P = d.Old/float64(d.Cells), d.New/float64(d.Cells), signedRank(changes)
			ds = append(ds, d)
		}
	}
	return ds
}

// WriteDifferences prints those that are, for people.
func WriteDifferences(w io.Writer, ds []Difference) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "way\tfigure\tbefore\tnow\tchange\tbetter in\tworse in\tof cells\tp\t")
	same := 0
	for _, d := range ds {
		if d.Better+d.Worse == 0 {
			same++
			continue
		}
		change := "–"
		if d.Old != 0 {
			change = fmt.Sprintf("%+.1f %%", 100*(d.New/d.Old-1))
		}
		fmt.Fprintf(t, "%s\t%s\t%.4f\t%.4f\t%s\t%d\t%d\t%d\t%.3f\t\n", d.Contender, d.Figure, d.Old, d.New, change, d.Better, d.Worse, d.Cells, d.P)
	}
	fmt.Fprintf(t, "%d figures are the same in all cells\t\n", same)
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write the comparison: %w", err)
	}
	return nil
}

// exactPairs is up to how many pairs every way in which signs can fall is counted.
const exactPairs = 16

// signedRank is the two-sided p of Wilcoxon's signed-rank test of these differences against none.
func signedRank(ds []float64) float64 {
	ds = slices.DeleteFunc(slices.Clone(ds), func(d float64) bool { return d == 0 })
	n := len(ds)
	if n == 0 {
		return 1
	}
	slices.SortFunc(ds, func(a, b float64) int {
		switch a, b := math.Abs(a), math.Abs(b); {
		case a < b:
			return -1
		case a > b:
			return 1
		}
		return 0
	})
	ranks := make([]float64, n)
	ties := 0.0
	for i := 0; i < n; {
		j := i
		for j < n && math.Abs(ds[j]) == math.Abs(ds[i]) {
			j++
		}
		for k := i; k < j; k++ {
			ranks[k] = float64(i+j+1) / 2
		}
		t := float64(j - i)
		ties += t*t*t - t
		i = j
	}
	var up float64
	for i, d := range ds {
		if d > 0 {
			up += ranks[i]
		}
	}
	mean := float64(n*(n+1)) / 4
	far := math.Abs(up - mean)
	if n > exactPairs {
		spread := math.Sqrt(float64(n*(n+1)*(2*n+1))/24 - ties/48)
		return math.Erfc(max(far-.5, 0) / spread / math.Sqrt2)
	}
	extreme := 0
	for signs := range 1 << n {
		var sum float64
		for i := range n {
			if signs>>i&1 == 1 {
				sum += ranks[i]
			}
		}
		if math.Abs(sum-mean) >= far-1e-9 {
			extreme++
		}
	}
	return float64(extreme) / float64(int(1)<<n)
}

// names are the policies, in the order of the results.
func (r *Report) names() (out []string) {
	for i := range r.Results {
		if !slices.Contains(out, r.Results[i].Contender) {
			out = append(out, r.Results[i].Contender)
		}
	}
	return out
}

// Progress says how far a run is, on one line that is written over where w is a terminal.
type Progress struct {
	W        io.Writer
	Terminal bool
}

const barWidth = 30

// Tell shows that done of all are done, and how long the rest will take.
func (p *Progress) Tell(done, all int, left string) {
	if p == nil || p.W == nil {
		return
	}
	full := barWidth * done / max(all, 1)
	if p.Terminal {
		fmt.Fprintf(p.W, "\r[%s%s] %d of %d, %s left   ", strings.Repeat("=", full), strings.Repeat(" ", barWidth-full), done, all, left)
		if done == all {
			fmt.Fprintln(p.W)
		}
		return
	}
	if all < 10 || done*10/all != (done-1)*10/all {
		fmt.Fprintf(p.W, "%d of %d cells, %s left\n", done, all, left)
	}
}
