package ladder

import (
	"math"
	"time"
)

const (
	// maxStep is how much time one step counts at most. Who stood still learnt nothing meanwhile.
	maxStep = 2 * time.Second
	// maxUnknown is for how long everything stays as it is while nobody knows the pressure; from
	// then on it counts as 0. Not to know is not to be idle, but neither is it a reason to stay
	// degraded for good.
	maxUnknown = time.Minute
)

// gauge follows one pressure.
type gauge struct {
	last    int64
	started bool
	told    float64       // NaN: not known
	unknown time.Duration // for how long
}

// newGauge has been told of none.
func newGauge() gauge { return gauge{told: math.NaN()} }

// span is what has passed between two steps: for d the pressure was, and now it is. Either is NaN
// where it is not known.
type span struct {
	d       time.Duration
	was, is float64
}

// step takes the pressure, NaN where nobody knows. What was told last is taken to have lasted until
// now, for at most maxStep; a clock that goes back has stood still.
func (g *gauge) step(now int64, pressure float64) span {
	s := span{is: pressure, was: g.told}
	if g.started {
		s.d = time.Duration(min(max(now-g.last, 0), int64(maxStep)))
	}
	if math.IsNaN(s.was) {
		if g.unknown += s.d; g.unknown >= maxUnknown {
			s.was = 0
		}
	}
	switch {
	case !math.IsNaN(s.is):
		g.unknown = 0
	case g.unknown >= maxUnknown:
		s.is = 0
	}
	g.last, g.started, g.told = now, true, pressure
	return s
}

// tally counts for how long something held: time in which it did not counts against, so that noise
// neither hides it nor makes it.
type tally time.Duration

func (t *tally) add(d time.Duration, held bool, most time.Duration) {
	if !held {
		d = -d
	}
	*t = tally(min(max(time.Duration(*t)+d, 0), most))
}

// trigger decides which automatic rungs of one model are on: always the first few of them. One goes
// on when all below it are, and off before any below it; a step changes at most one. It is a pure
// core, for one goroutine at a time. The zero value has no rungs.
//
// A rung goes on when the pressure has been at its At or above for its For, and off when it has been
// below its OffAt for twice that; the count begins anew with each rung. A rung may be the very reason
// why the pressure is low: one that comes back soon after it went off stays twice as long each time,
// up to maxHold times.
type trigger struct {
	rungs           []step
	level           int   // how many are on
	rising, sinking tally // of the next one's At, and of the last one's OffAt
}

// step is one rung of a trigger.
type step struct {
	Setting               // with OffAt filled in
	off     time.Duration // for how long it has been, at most as long as soon asks
	hold    time.Duration // a factor of how long it stays
}

const (
	maxHold = 8
	soon    = 8 // times For after it went off
)

// stay is how long the pressure must be low until the rung goes off.
func (r *step) stay() time.Duration { return 2 * r.For * r.hold }

// set takes the automatic rungs, in the ladder's order. What is on stays on as far as it and all
// below it are still there; the rest goes off at once.
func (t *trigger) set(rungs []Setting) {
	kept := 0
	for kept < min(t.level, len(rungs)) && t.rungs[kept].Rung == rungs[kept].Rung {
		kept++
	}
	t.rungs = make([]step, len(rungs))
	for i, r := range rungs {
		r.OffAt = r.offAt()
		t.rungs[i] = step{Setting: r, off: soon * r.For, hold: 1}
	}
	t.level, t.rising, t.sinking = kept, 0, 0
}

func (t *trigger) step(s span) {
	var next, last *step
	if t.level < len(t.rungs) {
		next = &t.rungs[t.level]
	}
	if t.level > 0 {
		last = &t.rungs[t.level-1]
	}
	for i := t.level; i < len(t.rungs); i++ {
		r := &t.rungs[i]
		r.off = min(r.off+s.d, soon*r.For)
	}
	known := !math.IsNaN(s.was)
	if known && next != nil {
		t.rising.add(s.d, s.was >= next.At, next.For)
	}
	if known && last != nil {
		t.sinking.add(s.d, s.was < last.OffAt, last.stay())
	}
	switch { // what is not known is on no side
	case next != nil && s.is >= next.At && time.Duration(t.rising) >= next.For:
		next.hold = min(2*next.hold, maxHold)
		if next.off >= soon*next.For {
			next.hold = 1
		}
		t.level, t.rising, t.sinking = t.level+1, 0, 0
	case last != nil && s.is < last.OffAt && time.Duration(t.sinking) >= last.stay():
		last.off = 0
		t.level, t.rising, t.sinking = t.level-1, 0, 0
	}
}

func (t *trigger) on() (s Set) {
	for i := range t.rungs[:t.level] {
		s |= SetOf(t.rungs[i].Rung)
	}
	return s
}
