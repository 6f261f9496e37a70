package overload

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strings"
)

// The picture's sizes, in pixels: two panels side by side and a legend.
const (
	panel, height = 380, 360
	gap, legend   = 70, 150
	top, bottom   = 30, 50
	least, most   = 10, 20_000 // of the right panel's logarithmic axis, in ms
)

func palette() map[string]string {
	return map[string]string{headgate: "#d62728", bare: "#7f7f7f", nginx: "#1f77b4", nginxSlots: "#17becf"}
}

// WriteSVG draws goodput and the interactive p99 against the load offered.
func (r *Report) WriteSVG(w io.Writer) error {
	var b bytes.Buffer
	width := gap + panel + gap + panel + legend
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	loads := r.loads()
	x := func(left int, load float64) float64 {
		lo, hi := math.Log(loads[0]), math.Log(loads[len(loads)-1])
		return float64(left) + float64(panel)*(math.Log(load)-lo)/max(hi-lo, 1e-9)
	}
	up := func(share float64) float64 { return height - bottom - min(max(share, 0), 1)*(height-top-bottom) }
	goodput := func(v float64) float64 { return up(v / 1.1) }
	first := func(v float64) float64 { return up(math.Log(max(v, least)/least) / math.Log(most/least)) }
	frame := func(left int, title string, ticks []float64, y func(float64) float64) {
		fmt.Fprintf(&b, `<text x="%d" y="18">%s</text>`+"\n", left, title)
		for _, v := range ticks {
			fmt.Fprintf(&b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n", left, y(v), left+panel, y(v), left-6, y(v)+4, v)
		}
		for _, l := range loads {
			fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%g</text>`+"\n", x(left, l), height-bottom+18, l)
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">load offered, in capacities</text>`+"\n", left+panel/2, height-10)
	}
	const one, two = gap, gap + panel + gap
	frame(one, "goodput, of capacity", []float64{0, 0.25, 0.5, 0.75, 1}, goodput)
	frame(two, "interactive: p99 to first byte, ms (of answers in time)", []float64{10, 100, 1000, 10000}, first)
	for i, name := range targetNames() {
		var a, c []string
		for _, l := range loads {
			if row := r.at(name, l); row != nil {
				a = append(a, fmt.Sprintf("%.1f,%.1f", x(one, l), goodput(row.Goodput)))
				if row.FirstP99 > 0 {
					c = append(c, fmt.Sprintf("%.1f,%.1f", x(two, l), first(row.FirstP99.Seconds()*1e3)))
				}
			}
		}
		if len(a) == 0 {
			continue
		}
		for _, points := range [][]string{a, c} {
			fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(points, " "), palette()[name])
		}
		fmt.Fprintf(&b, `<circle cx="%d" cy="%d" r="5" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n",
			two+panel+20, top+20*i+10, palette()[name], two+panel+32, top+20*i+14, name)
	}
	b.WriteString("</svg>\n")
	_, err := w.Write(b.Bytes())
	return err
}

// at is a target's row of a load before the calm, or nil.
func (r *Report) at(name string, load float64) *Row {
	for i := range r.Rows {
		if x := &r.Rows[i]; x.Target == name && x.Load == load {
			return x
		}
	}
	return nil
}
