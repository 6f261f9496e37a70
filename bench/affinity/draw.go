package main

import (
	"fmt"
	"strings"
)

// The picture's sizes, in pixels.
const (
	panelWidth, panelHeight = 360, 300
	left, right             = 55, 15
	top, bottom             = 35, 45
	legend                  = 30
)

// What the axes show: times the mean in-flight of the fullest server, and the share of one big cache's hits.
const (
	fromSpread, toSpread = 1.0, 2.0
	toShare              = 1.1
)

func colour(curve string) string {
	switch curve {
	case curveOurs:
		return "#d62728"
	case curveTold:
		return "#ff9896"
	case curveFlat:
		return "#1f77b4"
	case leastLoaded:
		return "#2ca02c"
	}
	return "#7f7f7f"
}

func curves() []string {
	return []string{roundRobin, leastLoaded, curveFlat, curveOurs, curveTold}
}

// svg draws hits against balance for each number of servers, a row for each busyness. The upper left is best.
func (r *report) svg() string {
	var b strings.Builder
	width, height := panelWidth*len(r.config.replicas), panelHeight*len(r.config.busy)+legend
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	for row, busy := range r.config.busy {
		column := 0
		for _, c := range r.of(busy) {
			if c.blocks != r.shown() {
				continue
			}
			fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n", column*panelWidth, row*panelHeight)
			c.panel(&b)
			b.WriteString("</g>\n")
			column++
		}
	}
	for i, name := range curves() {
		x, y := left+i*150, panelHeight*len(r.config.busy)+12
		fmt.Fprintf(&b, `<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s" stroke-width="3"/><text x="%d" y="%d">%s</text>`+"\n", x, y, x+25, y, colour(name), x+31, y+4, name)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// panel draws one setting.
func (c *cell) panel(b *strings.Builder) {
	across := func(v float64) float64 {
		return left + (min(v, toSpread)-fromSpread)/(toSpread-fromSpread)*(panelWidth-left-right)
	}
	up := func(v float64) float64 { return panelHeight - bottom - v/toShare*(panelHeight-top-bottom) }
	fmt.Fprintf(b, `<text x="%d" y="20" text-anchor="middle" font-size="13">%d servers of %d blocks, busy %g</text>`+"\n", panelWidth/2, c.replicas, c.blocks, c.busy)
	for i := range 6 {
		v := fromSpread + (toSpread-fromSpread)*float64(i)/5
		fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle">%.1f</text>`+"\n", across(v), top, across(v), panelHeight-bottom, across(v), panelHeight-bottom+15, v)
		h := float64(i) / 5
		fmt.Fprintf(b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n", left, up(h), panelWidth-right, up(h), left-5, up(h)+4, h)
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle">in flight on the fullest server, to the mean</text>`+"\n", (left+panelWidth-right)/2, panelHeight-bottom+32)
	fmt.Fprintf(b, `<text transform="translate(14 %d) rotate(-90)" text-anchor="middle">hits, of one big cache's</text>`+"\n", (top+panelHeight-bottom)/2)
	for _, curve := range curves() {
		var line, dots strings.Builder
		for i := range c.rows {
			w := &c.rows[i]
			if w.curve != curve {
				continue
			}
			x, y := across(w.spread), up(w.hit/c.big)
			fmt.Fprintf(&line, "%.1f,%.1f ", x, y)
			fmt.Fprintf(&dots, `<circle cx="%.1f" cy="%.1f" r="%g" fill="%s"><title>%s</title></circle>`, x, y, map[bool]float64{true: 2.2, false: 3.6}[w.hidden], colour(curve), w.name)
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.8"/>%s`+"\n", line.String(), colour(curve), dots.String())
	}
}
