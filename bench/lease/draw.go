package lease

import (
	"bytes"
	"fmt"
	"io"
	"math"
)

// The picture's sizes, in pixels, and the least that its logarithmic axes tell apart.
const (
	width, height = 900, 520
	left, right   = 70, 230
	top, bottom   = 20, 50
	leastShown    = 1e-4
)

// palette has a colour for each contender; Headgate's is the last.
func palette() []string {
	return []string{"#7f7f7f", "#8c564b", "#c5b0d5", "#9467bd", "#e377c2", "#bcbd22", "#98df8a", "#2ca02c", "#17becf", "#d62728"}
}

// WriteSVG draws every cell of every contender: the distance from the ideal bucket against the round
// trips a request. The lower left is best.
func (r *Report) WriteSVG(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	for _, v := range []float64{1e-4, 1e-3, 1e-2, 1e-1, 1} {
		label := fmt.Sprint(v)
		if v == leastShown {
			label = "≤ " + label
		}
		fmt.Fprintf(&b, `<line x1="%.0f" y1="%d" x2="%.0f" y2="%d" stroke="#ddd"/><text x="%.0f" y="%d" text-anchor="middle">%s</text>`+"\n",
			across(v), top, across(v), height-bottom, across(v), height-bottom+18, label)
		fmt.Fprintf(&b, `<line x1="%d" y1="%.0f" x2="%d" y2="%.0f" stroke="#ddd"/><text x="%d" y="%.0f" text-anchor="end">%s</text>`+"\n",
			left, up(v), width-right, up(v), left-6, up(v)+4, label)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">round trips a request</text>`+"\n", (left+width-right)/2, height-10)
	fmt.Fprintf(&b, `<text transform="translate(16 %d) rotate(-90)" text-anchor="middle">over-admitted + not admitted + falsely refused</text>`+"\n", (top+height-bottom)/2)
	for i, name := range r.names() {
		colour := palette()[i%len(palette())]
		for _, x := range r.of(name) {
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s" fill-opacity="0.5"/>`+"\n", across(x.Trips), up(x.err()), colour)
		}
		fmt.Fprintf(&b, `<circle cx="%d" cy="%d" r="5" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n", width-right+20, top+20*i+10, colour, width-right+32, top+20*i+14, name)
	}
	b.WriteString("</svg>\n")
	_, err := w.Write(b.Bytes())
	return err
}

// shown is a value's place on an axis, from 0 to 1.
func shown(v float64) float64 {
	return 1 + math.Log10(min(max(v, leastShown), 1))/4
}

func across(v float64) float64 { return left + shown(v)*(width-left-right) }
func up(v float64) float64     { return height - bottom - shown(v)*(height-top-bottom) }
