package capacity

import (
	"math"
	"time"
)

// window sums observations to one a second, for the rivals.
type window struct {
	o    Observation
	from int64
}

func (w *window) add(now int64, o Observation) (sum Observation, whole bool) {
	w.o.Done += o.Done
	w.o.SlotTime += o.SlotTime
	w.o.FirstByte += o.FirstByte
	w.o.FirstBytes += o.FirstBytes
	w.o.InUse = o.InUse
	if now-w.from < int64(time.Second) || w.o.FirstBytes == 0 {
		return Observation{}, false
	}
	sum, w.o, w.from = w.o, Observation{}, now
	return sum, true
}

// aimd is the textbook's, as in Netflix/concurrency-limits: +1 a window while half used, ×.9 where an answer took too long.
type aimd struct {
	window
	most    float64
	l       float64
	timeout time.Duration
}

func (a *aimd) scraped(int64, Sample) {}
func (a *aimd) limit(int64) int64     { return int64(a.l) }
func (a *aimd) observe(now int64, o Observation) {
	s, ok := a.add(now, o)
	if !ok {
		return
	}
	if s.FirstByte/time.Duration(s.FirstBytes) > a.timeout {
		a.l = max(1, a.l*.9)
	} else if float64(s.InUse)*2 >= a.l {
		a.l = min(a.most, a.l+1)
	}
}

// vegas is TCP Vegas's as in Netflix/concurrency-limits: the queue is limit × (1 − least/actual); α = 3·log10, β = 6·log10.
type vegas struct {
	window
	most, l, least float64
	n              int
}

func (v *vegas) scraped(int64, Sample) {}
func (v *vegas) limit(int64) int64     { return int64(v.l) }
func (v *vegas) observe(now int64, o Observation) {
	s, ok := v.add(now, o)
	if !ok {
		return
	}
	rtt := (s.FirstByte / time.Duration(s.FirstBytes)).Seconds()
	v.n++
	if v.n%600 == 0 || v.least == 0 || rtt < v.least {
		v.least = rtt
		return
	}
	if float64(s.InUse)*2 < v.l {
		return
	}
	log := max(1, math.Floor(math.Log10(v.l)))
	queue := math.Ceil(v.l * (1 - v.least/rtt))
	switch {
	case queue <= log:
		v.l += 6 * log
	case queue < 3*log:
		v.l += log
	case queue > 6*log:
		v.l -= log
	}
	v.l = max(1, min(v.most, v.l))
}

// gradient2 is Netflix's: limit × clamp(tolerance × long/short, ½, 1) + queue, smoothed by .2; long is an average over 600 windows.
type gradient2 struct {
	window
	most, l, long, tolerance float64
	whole                    bool // the whole answer's time, not its first byte's
}

func (g *gradient2) scraped(int64, Sample) {}
func (g *gradient2) limit(int64) int64     { return int64(g.l) }
func (g *gradient2) observe(now int64, o Observation) {
	s, ok := g.add(now, o)
	if !ok {
		return
	}
	short := (s.FirstByte / time.Duration(s.FirstBytes)).Seconds()
	if g.whole {
		if s.Done == 0 {
			return
		}
		short = (s.SlotTime / time.Duration(s.Done)).Seconds()
	}
	if g.long == 0 {
		g.long = short
	}
	g.long += (short - g.long) * 2 / 601
	if g.long/short > 2 {
		g.long *= .9
	}
	if float64(s.InUse) < g.l/2 {
		return
	}
	grad := max(.5, min(1, g.tolerance*g.long/short))
	g.l = g.l*.8 + .2*(g.l*grad+4)
	g.l = max(1, min(g.most, g.l))
}

// learnt is the learner itself.
type learnt struct{ *learner }

func (c learnt) observe(now int64, o Observation) { c.learner.observe(now, &o) }
func (c learnt) scraped(now int64, s Sample)      { c.learner.scraped(now, &s) }
func (c learnt) limit(int64) int64                { return c.told() }
