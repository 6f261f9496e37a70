package lease

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

//go:embed page.html
var pageText string

// page is what page.html shows.
type page struct {
	*Report
	When, Length string
	Cells        int
	Seeds        string
	Wait, Trips  template.HTML // the two pictures
	Policies     []policyRow
	Behind       []behind
	Courses      []courseView
	Troubles     []trouble
	Engines      []engineRow
	Again        string
}

// policyRow sums a policy up over all cells of the simulator.
type policyRow struct {
	Name, Colour                     string
	Ours                             bool
	Over, OverAll, Below, Above      string
	Wrong, Trips, Wait, P99, Local   string
	overV, belowV, aboveV, tripsV, w float64
}

// behind is where a policy does better than Headgate on one axis at least.
type behind struct {
	Name                          string
	Both, Exact, Fewer, No, Equal int
	Worst                         []string // cells in which Headgate is no better on either
}

// courseView is one fault's time line.
type courseView struct {
	Title, Contender, Recovery string
	Picture                    template.HTML
}

// engineRow is one cell as one engine has it.
type engineRow struct {
	Cell, Contender, Engine         string
	Admitted, Over, Trips, P50, P99 string
	Bytes, CPU                      string
	first                           bool
	Span                            int
}

// First says whether the row begins its cell.
func (e engineRow) First() bool { return e.first }

// WriteHTML writes the report as one file that needs nothing else: no script, no font, no network.
func (r *Report) WriteHTML(w io.Writer) error {
	t, err := template.New("page").Parse(pageText)
	if err != nil {
		return fmt.Errorf("read the page: %w", err)
	}
	p := page{
		Report: r, When: r.Started.Format("2006-01-02 15:04 MST"), Length: r.Took.Round(time.Second).String(), Seeds: r.seeds(), Again: r.Command,
		Policies: r.policies(), Behind: r.behinds(), Courses: r.courses(), Troubles: r.troubles(), Engines: r.engines(),
	}
	p.Cells = len(r.simulated(Headgate))
	p.Wait = r.scatter("mean wait for a decision, ms", []float64{.001, .01, .1, 1, 10}, func(x *Result) float64 { return float64(x.Mean) / float64(time.Millisecond) })
	p.Trips = r.scatter("round trips a request", []float64{1e-4, 1e-3, 1e-2, 1e-1, 1}, func(x *Result) float64 { return x.Trips })
	var b bytes.Buffer
	if err := t.Execute(&b, &p); err != nil {
		return fmt.Errorf("fill the page: %w", err)
	}
	_, err = w.Write(b.Bytes())
	return err
}

func (r *Report) seeds() string {
	var seen []string
	for i := range r.Results {
		if s := fmt.Sprint(r.Results[i].Seed); !slices.Contains(seen, s) {
			seen = append(seen, s)
		}
	}
	return strings.Join(seen, ", ")
}

// simulated are a policy's results in virtual time, of cells in which nothing fails.
func (r *Report) simulated(name string) (out []*Result) {
	for i := range r.Results {
		if x := &r.Results[i]; x.Contender == name && x.Engine == Simulated && x.Fault == NoFault {
			out = append(out, x)
		}
	}
	return out
}

func (r *Report) policies() (rows []policyRow) {
	for i, name := range r.names() {
		row := policyRow{Name: name, Colour: colour(i), Ours: name == Headgate, belowV: 1, aboveV: 1}
		var overAll, wrong, local, n float64
		var p99 time.Duration
		for _, x := range r.simulated(name) {
			n++
			row.overV = max(row.overV, x.Over)
			overAll = max(overAll, x.OverAll)
			row.tripsV += x.Trips
			row.w += float64(x.Mean) / float64(time.Millisecond)
			local += x.Local
			p99 = max(p99, x.P99)
			if x.Load <= 1 {
				row.belowV, wrong = min(row.belowV, x.Admitted), max(wrong, x.FalseRefused)
			} else {
				row.aboveV = min(row.aboveV, x.Admitted)
			}
		}
		if n == 0 {
			continue
		}
		row.Over, row.OverAll = percent(row.overV), percent(overAll)
		row.Below, row.Above, row.Wrong = fmt.Sprintf("%.4f", row.belowV), fmt.Sprintf("%.4f", row.aboveV), percent(wrong)
		row.Trips, row.Wait, row.P99, row.Local = fmt.Sprintf("%.3f", row.tripsV/n), fmt.Sprintf("%.3f ms", row.w/n), p99.String(), percent(local/n)
		rows = append(rows, row)
	}
	return rows
}

func percent(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v < .0005:
		return "< 0.1 %"
	}
	return fmt.Sprintf("%.1f %%", 100*v)
}

// duel counts, cell by cell, where Headgate is nearer to the ideal bucket and asks less often than another policy.
func (r *Report) duel(name string) (d behind) {
	d.Name = name
	ours := r.simulated(Headgate)
	for i, x := range r.simulated(name) {
		if i >= len(ours) {
			break
		}
		exact, trips := ours[i].err()-x.err(), ours[i].Trips-x.Trips
		switch {
		case exact <= near && trips <= 0 && (exact < -near || trips < 0):
			d.Both++
		case exact < -near:
			d.Exact++
		case trips < 0:
			d.Fewer++
		case exact > near || trips > 0:
			d.No++
			d.Worst = append(d.Worst, fmt.Sprintf("%s: error %.4f beside %.4f, %.4f round trips beside %.4f", x.String(), ours[i].err(), x.err(), ours[i].Trips, x.Trips))
		default:
			d.Equal++
		}
	}
	const shown = 8
	if more := len(d.Worst) - shown; more > 0 {
		d.Worst = append(d.Worst[:shown], fmt.Sprintf("and %d more: see the CSV", more))
	}
	return d
}

func (r *Report) behinds() (out []behind) {
	for _, name := range r.names() {
		if name != Headgate {
			out = append(out, r.duel(name))
		}
	}
	return out
}

// engines are the cells that more than one engine has run.
func (r *Report) engines() (rows []engineRow) {
	for i := range r.Results {
		x := &r.Results[i]
		var same []*Result
		for j := range r.Results {
			y := &r.Results[j]
			if y.Contender == x.Contender && y.Cell.String() == x.Cell.String() && y.Seed == x.Seed {
				same = append(same, y)
			}
		}
		if len(same) < 2 || same[0] != x {
			continue
		}
		for k, y := range same {
			row := engineRow{
				Cell: y.Cell.String(), Contender: y.Contender, Engine: y.Engine, Admitted: fmt.Sprintf("%.4f", y.Admitted), Over: percent(y.Over),
				Trips: fmt.Sprintf("%.3f", y.Trips), P50: y.P50.String(), P99: y.P99.String(), Bytes: "–", CPU: "–", first: k == 0, Span: len(same),
			}
			if y.Bytes >= 0 {
				row.Bytes = fmt.Sprintf("%.0f", y.Bytes)
			}
			if y.CPU >= 0 {
				row.CPU = y.CPU.Round(100 * time.Nanosecond).String()
			}
			rows = append(rows, row)
		}
	}
	return rows
}

// colour is a policy's, the same in all pictures.
func colour(i int) string { return palette()[i%len(palette())] }

// loads are those of the results, in order.
func (r *Report) loads() (ls []float64) {
	for i := range r.Results {
		if l := r.Results[i].Load; !slices.Contains(ls, l) {
			ls = append(ls, l)
		}
	}
	slices.Sort(ls)
	return ls
}

// scatter draws each policy as a line through its means at each load, above a cloud of all cells: distance from the ideal bucket
// upwards, x to the right, both logarithmic. The lower left is best.
func (r *Report) scatter(label string, ticks []float64, x func(*Result) float64) template.HTML {
	const w, h, l, rt, t, bt = 860, 430, 70, 20, 14, 46
	low, high := math.Log10(ticks[0]), math.Log10(ticks[len(ticks)-1])
	across := func(v float64) float64 {
		return l + (min(max(math.Log10(max(v, ticks[0])), low), high)-low)/(high-low)*(w-l-rt)
	}
	upwards := func(v float64) float64 { return h - bt - shown(v)*(h-t-bt) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %d %d" role="img" aria-label="error against %s">`, w, h, label)
	for i, v := range ticks {
		text := fmt.Sprint(v)
		if i == 0 {
			text = "≤ " + text
		}
		fmt.Fprintf(&b, `<line class="grid" x1="%.0f" y1="%d" x2="%.0f" y2="%d"/><text x="%.0f" y="%d" text-anchor="middle">%s</text>`, across(v), t, across(v), h-bt, across(v), h-bt+18, text)
	}
	for _, v := range []float64{1e-4, 1e-3, 1e-2, 1e-1, 1} {
		text := fmt.Sprint(v)
		if v == leastShown {
			text = "≤ " + text
		}
		fmt.Fprintf(&b, `<line class="grid" x1="%d" y1="%.0f" x2="%d" y2="%.0f"/><text x="%d" y="%.0f" text-anchor="end">%s</text>`, l, upwards(v), w-rt, upwards(v), l-6, upwards(v)+4, text)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%s</text><text transform="translate(14 %d) rotate(-90)" text-anchor="middle">error</text>`, (l+w-rt)/2, h-8, label, (t+h-bt)/2)
	for i, name := range r.names() {
		var points []string
		var dots strings.Builder
		for _, load := range r.loads() {
			var sx, sy, n float64
			for _, res := range r.simulated(name) {
				if res.Load == load {
					sx, sy, n = sx+x(res), sy+res.err(), n+1
				}
			}
			if n == 0 {
				continue
			}
			px, py := across(sx/n), upwards(sy/n)
			points = append(points, fmt.Sprintf("%.1f,%.1f", px, py))
			size := 4
			if name == Headgate {
				size = 6
			}
			fmt.Fprintf(&dots, `<circle cx="%.1f" cy="%.1f" r="%d" fill="%s"><title>%s, load %g: %.4f, error %.4f</title></circle>`, px, py, size, colour(i), template.HTMLEscapeString(name), load, sx/n, sy/n)
		}
		for _, res := range r.simulated(name) {
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="1.6" fill="%s" fill-opacity=".35"/>`, across(x(res)), upwards(res.err()), colour(i))
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>%s`, strings.Join(points, " "), colour(i), dots.String())
	}
	b.WriteString("</svg>")
	return template.HTML(b.String()) //nolint:gosec // made of numbers and escaped names
}

// picture draws what arrived, what the ideal bucket admits, what was admitted, and the slowest decisions.
func (c *Course) picture() template.HTML {
	const w, h, l, rt, t, bt = 860, 190, 56, 20, 10, 30
	n := len(c.Ideal)
	var most float64
	for i := range n {
		most = max(most, c.Ideal[i], c.Admitted[i])
	}
	most = max(most, 1)
	across := func(i float64) float64 { return l + i/float64(max(n-1, 1))*(w-l-rt) }
	upwards := func(v float64) float64 { return h - bt - min(v/most, 1)*(h-t-bt) }
	line := func(vs []float64) string {
		points := make([]string, 0, n)
		for i, v := range vs {
			points = append(points, fmt.Sprintf("%.1f,%.1f", across(float64(i)), upwards(v)))
		}
		return strings.Join(points, " ")
	}
	seconds := func(i int) float64 { return (time.Duration(i) * c.Step).Seconds() }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %d %d" role="img" aria-label="admitted over time">`, w, h)
	at := across(c.FaultAt.Seconds() / c.Step.Seconds())
	fmt.Fprintf(&b, `<line class="fault" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/><text x="%.1f" y="%d">fault</text>`, at, t, at, h-bt, at+4, t+12)
	fmt.Fprintf(&b, `<polyline class="ideal" points="%s"/><polyline class="ours" points="%s"/>`, line(c.Ideal), line(c.Admitted))
	for i, d := range c.Slowest {
		if d > tooSlow {
			fmt.Fprintf(&b, `<circle class="slow" cx="%.1f" cy="%d" r="2.5"><title>slowest decision %v at %.1f s</title></circle>`, across(float64(i)), h-bt+6, d.Round(time.Millisecond), seconds(i))
		}
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%.0f</text><text x="%d" y="%d" text-anchor="end">0</text>`, l-6, t+10, most, l-6, h-bt)
	fmt.Fprintf(&b, `<text x="%d" y="%d">0 s</text><text x="%d" y="%d" text-anchor="end">%.0f s</text></svg>`, l, h-8, w-rt, h-8, seconds(n-1))
	return template.HTML(b.String()) //nolint:gosec // made of numbers
}
