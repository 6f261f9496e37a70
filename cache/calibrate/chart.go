package calibrate

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// frame maps values to a rectangle of pixels.
type frame struct {
	left, top, width, height float64
	x0, x1, y0, y1           float64 // the values at its edges
	bend                     func(float64) float64
}

func (f *frame) x(v float64) float64 { return f.left + (v-f.x0)/(f.x1-f.x0)*f.width }

func (f *frame) y(v float64) float64 {
	at := func(v float64) float64 {
		if f.bend != nil {
			return f.bend(v)
		}
		return v
	}
	v = min(max(v, f.y0), f.y1)
	return f.top + f.height - (at(v)-at(f.y0))/(at(f.y1)-at(f.y0))*f.height
}

// drawing is an SVG in the making. Colours are classes: chartStyle has them, for light and dark.
type drawing struct{ strings.Builder }

func (d *drawing) line(class string, x1, y1, x2, y2 float64) {
	fmt.Fprintf(d, `<line class="%s" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`+"\n", class, x1, y1, x2, y2)
}

func (d *drawing) text(class string, x, y float64, s string) {
	fmt.Fprintf(d, `<text class="%s" x="%.1f" y="%.1f">%s</text>`+"\n", class, x, y, html.EscapeString(s))
}

// path through points; none is drawn without two.
func (d *drawing) path(class string, points [][2]float64, closed bool) {
	if len(points) < 2 {
		return
	}
	fmt.Fprintf(d, `<path class="%s" d="`, class)
	for i, p := range points {
		c := 'L'
		if i == 0 {
			c = 'M'
		}
		fmt.Fprintf(d, "%c%.1f %.1f", c, p[0], p[1])
	}
	if closed {
		d.WriteByte('Z')
	}
	d.WriteString("\"/>\n")
}

// key of a legend: a swatch and what it stands for. It gives where the next one begins.
func (d *drawing) key(class string, x, y float64, s string) float64 {
	if strings.HasPrefix(class, "fill") || strings.HasPrefix(class, "ghost") {
		fmt.Fprintf(d, `<rect class="%s" x="%.1f" y="%.1f" width="16" height="10"/>`+"\n", class, x, y-9)
	} else {
		d.line(class, x, y-4, x+16, y-4)
	}
	d.text("note", x+22, y, s)
	return x + 22 + 6.4*float64(len([]rune(s))) + 22
}

// axis of similarity below a frame, with marks each tenth or twentieth.
func (d *drawing) axis(f *frame, step float64, title string) {
	for i := math.Ceil(f.x0/step - 1e-9); i*step <= f.x1+1e-9; i++ {
		x := f.x(i * step)
		d.line("grid", x, f.top, x, f.top+f.height)
		d.text("tick mid", x, f.top+f.height+17, decimal(i*step))
	}
	d.line("edge", f.left, f.top+f.height, f.left+f.width, f.top+f.height)
	if title != "" {
		d.text("note mid", f.left+f.width/2, f.top+f.height+36, title)
	}
}

// levels are marks of shares at the left of a frame.
func (d *drawing) levels(f *frame, at ...float64) {
	last := math.Inf(1)
	for _, v := range at {
		y := f.y(v)
		if v > f.y1+1e-9 || last-y < 15 {
			continue
		}
		last = y
		d.line("grid", f.left, y, f.left+f.width, y)
		d.text("tick end", f.left-8, y+4, percent(v))
	}
}

// steps are round shares up to one, four or five of them.
func steps(to float64) (at []float64) {
	width := 0.25
	for _, w := range []float64{0.1, 0.05, 0.02, 0.01, 0.005, 0.002} {
		if to/width < 3 {
			width = w
		}
	}
	for i := 0; float64(i)*width <= to; i++ {
		at = append(at, float64(i)*width)
	}
	return at
}

// limit marks the recommended threshold in a frame.
func (d *drawing) limit(f *frame, r *Recommendation, label bool) {
	if r.Threshold < f.x0 || r.Threshold == 0 {
		return
	}
	x := f.x(r.Threshold)
	d.line("limit", x, f.top-6, x, f.top+f.height)
	if !label {
		return
	}
	d.text("strong mid", min(max(x, f.left+70), f.left+f.width-70), f.top-12, r.mark())
}

// mark is what stands at a threshold in charts.
func (r *Recommendation) mark() string {
	if r.Outcome == Doubtful {
		return "doubtful " + decimal(r.Threshold)
	}
	return "threshold " + decimal(r.Threshold)
}

// chartWidth of those that fill the page, in pixels.
const chartWidth = 920

// overlap draws how alike pairs with one answer and pairs with two are, without guards and with them.
func (r *Report) overlap() string {
	var d drawing
	const left, width, height = 62, chartWidth - 62 - 20, 170
	x := d.key("fill-same", left, 22, "one answer ("+plural(r.Pairs.Same, "pair")+")")
	x = d.key("fill-different", x, 22, "different answers ("+plural(r.Pairs.Different, "pair")+")")
	d.key("ghost-key", x, 22, "refused by guards")
	var most float64
	for _, b := range r.histogram.bins {
		most = max(most, float64(b.same)/float64(r.Pairs.Same), float64(b.different)/float64(r.Pairs.Different))
	}
	for i, title := range []string{"Without guards", "With guards"} {
		guarded := i == 1
		f := &frame{left: left, top: 78 + float64(i)*(height+86), width: width, height: height, x0: r.histogram.from, x1: 1, y0: 0, y1: most * 1.06}
		d.text("title", left, f.top-32, title)
		d.levels(f, steps(f.y1)...)
		axis := ""
		if guarded {
			axis = "similarity of the two questions"
		}
		d.axis(f, 0.1, axis)
		r.bars(&d, f, guarded)
		rec := &r.Recommendation
		if !guarded {
			rec = &r.Unguarded
		}
		d.text("note end", left+width, f.top-32, overlapNote(r, rec, guarded))
		d.limit(f, rec, true)
	}
	return d.String()
}

// overlapNote says what a threshold gets, with or without guards.
func overlapNote(r *Report, c *Recommendation, guarded bool) string {
	switch {
	case c.Outcome == None:
		return "no threshold keeps " + percent(r.Budget) + " wrong hits"
	case guarded:
		return fmt.Sprintf("%s of the pairs with one answer hit", percent(c.Whole.SameHit))
	}
	return fmt.Sprintf("%s of the pairs with one answer would hit", percent(c.Whole.SameHit))
}

// bars of a histogram, both kinds over each other as shares of their own; what guards refuse is an outline.
func (r *Report) bars(d *drawing, f *frame, guarded bool) {
	kind := func(class string, of int, open, all func(*bin) int) [][2]float64 {
		area, outline := [][2]float64{{f.x(f.x0), f.y(0)}}, [][2]float64{{f.x(f.x0), f.y(0)}}
		for i := range r.histogram.bins {
			b := &r.histogram.bins[i]
			x0, x1 := f.x(f.x0+float64(i)/binsPerUnit), f.x(f.x0+float64(i+1)/binsPerUnit)
			shown, whole := all(b), all(b)
			if guarded {
				shown = open(b)
			}
			y, top := f.y(float64(shown)/float64(of)), f.y(float64(whole)/float64(of))
			area = append(area, [2]float64{x0, y}, [2]float64{x1, y})
			outline = append(outline, [2]float64{x0, top}, [2]float64{x1, top})
		}
		area = append(area, [2]float64{f.x(f.x1), f.y(0)})
		d.path("fill-"+class, area, true)
		return append(outline, [2]float64{f.x(f.x1), f.y(0)})
	}
	different := kind("different", r.Pairs.Different, func(b *bin) int { return b.different - b.refusedDifferent }, func(b *bin) int { return b.different })
	same := kind("same", r.Pairs.Same, func(b *bin) int { return b.same - b.refusedSame }, func(b *bin) int { return b.same })
	if guarded { // over the areas, which would hide them
		d.path("ghost-different", different, false)
		d.path("ghost-same", same, false)
	}
}

// errors draws how often hits are wrong and how many there are, over the threshold.
func (r *Report) errors() string {
	var d drawing
	const left, width = 62, chartWidth - 62 - 20
	top := r.Budget * 2
	for _, p := range append(r.chosen, r.plain...) {
		if p.Hits > 0 {
			top = max(top, p.Error*1.1)
		}
	}
	x := d.key("line-error", left, 22, "wrong hits per hit, with guards")
	x = d.key("fill-band", x, 22, "its bounds at "+percent(r.Confidence))
	d.key("line-plain", x, 22, "without guards")
	f := &frame{left: left, top: 74, width: width, height: 230, x0: 0.5, x1: 1, y0: 0, y1: min(top, 1), bend: math.Sqrt}
	d.levels(f, 0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1)
	d.axis(f, 0.05, "")
	r.band(&d, f)
	d.line("budget", f.left, f.y(r.Budget), f.left+width, f.y(r.Budget))
	d.text("strong end", left+width-6, f.y(r.Budget)-6, "budget "+percent(r.Budget))
	d.limit(f, &r.Recommendation, true)
	if c := &r.Recommendation; c.Threshold > 0 && c.Tested.Hits > 0 {
		x := f.x(c.Threshold)
		d.line("whisker", x, f.y(c.Tested.Lower), x, f.y(c.Tested.Upper))
		fmt.Fprintf(&d, `<circle class="dot" cx="%.1f" cy="%.1f" r="5"/>`+"\n", x, f.y(c.Tested.Error))
	}
	g := &frame{left: left, top: 372, width: width, height: 120, x0: 0.5, x1: 1, y0: 0, y1: 1}
	x = d.key("line-same", left, 356, "pairs with one answer that hit")
	d.key("line-different", x, 356, "pairs with different answers that hit")
	d.levels(g, 0, 0.25, 0.5, 0.75, 1)
	d.axis(g, 0.05, "threshold")
	for _, l := range []struct {
		class string
		of    func(*Point) float64
	}{{"line-different", func(p *Point) float64 { return p.Different }}, {"line-same", func(p *Point) float64 { return p.SameHit }}} {
		var points [][2]float64
		for i := range r.chosen {
			p := &r.chosen[i]
			points = append(points, [2]float64{g.x(p.Threshold), g.y(l.of(p))})
		}
		d.path(l.class, points, false)
	}
	d.limit(g, &r.Recommendation, false)
	return d.String()
}

// band draws the error with its bounds, and that without guards.
func (r *Report) band(d *drawing, f *frame) {
	var upper, lower, middle, plain [][2]float64
	for i := range r.chosen {
		p, q := &r.chosen[i], &r.plain[i]
		if p.Hits > 0 {
			x := f.x(p.Threshold)
			upper = append(upper, [2]float64{x, f.y(p.Upper)})
			lower = append(lower, [2]float64{x, f.y(p.Lower)})
			middle = append(middle, [2]float64{x, f.y(p.Error)})
		}
		if q.Hits > 0 {
			plain = append(plain, [2]float64{f.x(q.Threshold), f.y(q.Error)})
		}
	}
	for _, p := range slices.Backward(lower) {
		upper = append(upper, p)
	}
	d.path("fill-band", upper, true)
	d.path("line-plain", plain, false)
	d.path("line-error", middle, false)
}

// rocSize is the side of the ROC, in pixels.
const rocSize = 440

// roc draws the shares of both kinds that a falling threshold takes in.
func (r *Report) roc() string {
	var d drawing
	f := &frame{left: 68, top: 44, width: rocSize - 68 - 28, height: rocSize - 44 - 56, x0: 0, x1: 1, y0: 0, y1: 1}
	d.levels(f, 0, 0.25, 0.5, 0.75, 1)
	for _, v := range []float64{0, 0.25, 0.5, 0.75, 1} {
		d.line("grid", f.x(v), f.top, f.x(v), f.top+f.height)
		d.text("tick mid", f.x(v), f.top+f.height+17, percent(v))
	}
	d.text("note mid", f.left+f.width/2, f.top+f.height+38, "pairs with different answers that hit")
	fmt.Fprintf(&d, `<text class="note mid" transform="translate(13 %.1f) rotate(-90)">pairs with one answer that hit</text>`+"\n", f.top+f.height/2)
	d.line("chance", f.x(0), f.y(0), f.x(1), f.y(1))
	for _, c := range []struct {
		class  string
		points []rate
	}{{"line-plain", r.rocOff}, {"line-error", r.rocOn}} {
		d.path(c.class, f.thin(c.points), false)
		if last := c.points[len(c.points)-1]; last.same < 1 || last.different < 1 {
			d.line("rest", f.x(last.different), f.y(last.same), f.x(1), f.y(1))
		}
	}
	if c := &r.Recommendation; c.Threshold > 0 {
		fmt.Fprintf(&d, `<circle class="dot" cx="%.1f" cy="%.1f" r="5"/>`+"\n", f.x(c.Whole.Different), f.y(c.Whole.SameHit))
		d.text("strong", f.x(c.Whole.Different)+10, f.y(c.Whole.SameHit)+16, c.mark())
	}
	x := d.key("line-error", f.left, 22, fmt.Sprintf("with guards, AUC %.3f", r.AUC.On))
	d.key("line-plain", x, 22, fmt.Sprintf("without, AUC %.3f", r.AUC.Off))
	return d.String()
}

// thin gives the points that can be told apart.
func (f *frame) thin(curve []rate) (points [][2]float64) {
	for i, p := range curve {
		at := [2]float64{f.x(p.different), f.y(p.same)}
		if n := len(points); n > 0 && i < len(curve)-1 && math.Abs(at[0]-points[n-1][0])+math.Abs(at[1]-points[n-1][1]) < 1 {
			continue
		}
		points = append(points, at)
	}
	return points
}

// svg wraps a drawing. It is read out as its title.
func svg(width, height int, title, style, body string) string {
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">`+"\n%s%s</svg>\n",
		width, height, width, height, html.EscapeString(title), style, body)
}

// Heights of the charts, in pixels.
const (
	overlapHeight = 548
	errorsHeight  = 540
)

// WriteOverlap writes how alike both kinds of pairs are, without guards and with them, as an SVG of its own.
func (r *Report) WriteOverlap(w io.Writer) error {
	style := "<style>" + chartColours + chartStyle + "</style>\n" + fmt.Sprintf(`<rect class="paper" width="%d" height="%d"/>`+"\n", chartWidth, overlapHeight)
	_, err := io.WriteString(w, svg(chartWidth, overlapHeight, "How alike pairs of questions are, without guards and with them", style, r.overlap()))
	return err
}
