package semantic

import (
	"fmt"
	"strings"

	"headgate/bench/semantic/replay"
)

// The picture's sizes, in pixels.
const (
	panelWidth, panelHeight = 380, 330
	left, right             = 55, 15
	top, bottom             = 35, 45
	legend                  = 40
)

// colours of the contenders that are drawn.
func colour(name string) string {
	switch name {
	case static:
		return "#7f7f7f"
	case ours:
		return "#d62728"
	}
	return "#1f77b4"
}

// axis is what is drawn against the hit rate.
type axis struct {
	title string
	top   float64
	value func([]replay.Result) float64
}

func axes() []axis {
	return []axis{
		{"wrong answers a hit", 0.2, perHit},
		{"wrong answers a request", 0.06, func(rs []replay.Result) float64 { return mean(rs, (*replay.Result).PerRequest) }},
	}
}

// svg draws the curves of each set: the hit rate against either error. The upper left is best.
func (r *Report) svg() string {
	var b strings.Builder
	width, height := panelWidth*len(r.sets), panelHeight*len(axes())+legend
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	for row, a := range axes() {
		for column, m := range r.sets {
			fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n", column*panelWidth, row*panelHeight)
			m.panel(&b, &a)
			b.WriteString("</g>\n")
		}
	}
	x := left
	for _, who := range contenders() {
		if who.ablation {
			continue
		}
		for _, guarded := range []bool{true, false} {
			y := panelHeight*len(axes()) + 15
			fmt.Fprintf(&b, `<line x1="%d" y1="%d" x2="%d" y2="%d" %s/><text x="%d" y="%d">%s, %s</text>`+"\n", x, y, x+30, y, stroke(who.name, guarded), x+36, y+4, who.name, word(guarded))
			x += 165
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func stroke(name string, guarded bool) string {
	dash := ""
	if !guarded {
		dash = ` stroke-dasharray="5 3"`
	}
	return fmt.Sprintf(`fill="none" stroke="%s" stroke-width="1.8"%s`, colour(name), dash)
}

// panel draws one set against one axis.
func (m *measured) panel(b *strings.Builder, a *axis) {
	across := func(v float64) float64 { return left + v/a.top*(panelWidth-left-right) }
	up := func(v float64) float64 { return panelHeight - bottom - v*(panelHeight-top-bottom) }
	fmt.Fprintf(b, `<text x="%d" y="20" text-anchor="middle" font-size="13">%s</text>`+"\n", panelWidth/2, m.name)
	for i := range 5 {
		v := a.top * float64(i) / 4
		fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle">%.3g</text>`+"\n", across(v), top, across(v), panelHeight-bottom, across(v), panelHeight-bottom+15, v)
		h := float64(i) / 4
		fmt.Fprintf(b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n", left, up(h), panelWidth-right, up(h), left-5, up(h)+4, h)
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", (left+panelWidth-right)/2, panelHeight-bottom+32, a.title)
	fmt.Fprintf(b, `<text transform="translate(14 %d) rotate(-90)" text-anchor="middle">hit rate</text>`+"\n", (top+panelHeight-bottom)/2)
	for _, k := range m.curves {
		if k.ablation {
			continue
		}
		var line, dots strings.Builder
		for _, rs := range k.points {
			x, y := a.value(rs), mean(rs, (*replay.Result).HitRate)
			if x > a.top {
				continue
			}
			fmt.Fprintf(&line, "%.1f,%.1f ", across(x), up(y))
			fmt.Fprintf(&dots, `<circle cx="%.1f" cy="%.1f" r="2.2" fill="%s"/>`, across(x), up(y), colour(k.name))
		}
		fmt.Fprintf(b, `<polyline points="%s" %s/>%s`+"\n", line.String(), stroke(k.name, k.guarded), dots.String())
	}
}
