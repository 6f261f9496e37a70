package capacity

import "time"

const (
	smoothOver = 32 // answers: for the floor
	quickOver  = 8  // answers: for what is slow now
	few        = 4  // answers before which nothing is

	slowness = 3.0                             // times the floor (twice, and once more for the noise of eight answers), and
	slack    = float64(250 * time.Millisecond) // so much more, which nobody sees
	highness = 1.5                             // times the floor and slack: no growth, but no cut

	span = 5 * time.Minute // the floor is the least of this span and the one before

	half     = 0.55 // of the limit: where so much was cut, and slowness has not lessened
	lessened = 0.8  // to this, it is not the crowd's
	rise     = 2.0  // times the floor: what it may be higher then, the first time
)

// firstBytes follows how long the first byte takes (ns), beside its floor: how long it takes at best.
type firstBytes struct {
	n      int64   // answers since the last turn
	seen   int64   // answers in the means, up to smoothOver
	smooth float64 // mean of the last 32 or so
	quick  float64 // mean of the last 8 or so

	least [2]float64 // of smooth: in this span, and in the one before; 0: not known
	until int64      // this span's end

	// While cuts for slowness follow one another: the limit before the last halving, the slowest since, and how many
	// halvings were in vain. before is 0 where the last answers were not slow.
	before, worst float64
	inVain        int
}

// add takes n answers whose first bytes took sum together.
func (f *firstBytes) add(sum time.Duration, n int64) {
	if n <= 0 || sum < 0 {
		return
	}
	f.n += n
	f.seen = min(f.seen+n, smoothOver)
	mean := float64(sum) / float64(n)
	f.smooth += (mean - f.smooth) * min(1, float64(n)/float64(f.seen))
	f.quick += (mean - f.quick) * min(1, float64(n)/float64(min(f.seen, quickOver)))
	if f.seen >= quickOver && (f.least[0] == 0 || f.smooth < f.least[0]) {
		f.least[0] = f.smooth
	}
}

// floor is 0 while it is not known. It is the least of a smoothed mean, not of single answers: those of the shortest prompts
// would make all others slow.
func (f *firstBytes) floor() float64 {
	if f.least[0] == 0 || f.least[1] == 0 {
		return max(f.least[0], f.least[1])
	}
	return min(f.least[0], f.least[1])
}

// slow reports whether answers are slow now, and the share of the limit at which they would not be, if all of it is a queue.
func (f *firstBytes) slow() (share float64, slow bool) {
	floor := f.floor()
	most := slowness*floor + slack
	if f.n == 0 || f.seen < few || floor == 0 || f.quick <= most {
		return 1, false
	}
	return max(cutDeeply, min(cutShare, most/f.quick)), true
}

func (f *firstBytes) high() bool { return f.smooth > highness*f.floor()+slack }

// restart forgets how slow it was, not how fast it can be.
func (f *firstBytes) restart() { f.n, f.seen = 0, 0 }

// cut is told of every cut, with the limit before it; idle: the backend itself says that nothing waits there. One that stays as
// slow with half of the crowd is not slow for the crowd: other work came, or the machine is slower. Then the floor rises, since
// cutting on would only idle it: at once where nothing waits, else to twice, in case a queue was only not yet gone, and after
// another halving all the way.
func (f *firstBytes) cut(limit float64, idle bool) {
	if _, slow := f.slow(); !slow {
		return
	}
	switch {
	case f.before != 0 && limit > half*f.before:
	case f.before != 0 && f.quick > lessened*f.worst:
		risen := f.quick
		if f.inVain++; f.inVain < 2 && !idle {
			risen = min(f.quick, f.floor()*rise)
		}
		f.least, f.before = [2]float64{risen, risen}, limit
	default:
		f.before, f.worst, f.inVain = limit, f.quick, 0
	}
}

// turn ends an interval.
func (f *firstBytes) turn(now int64) {
	if f.n > 0 && f.seen >= few {
		f.worst = max(f.worst, f.quick)
		if _, slow := f.slow(); !slow {
			f.before = 0
		}
	}
	f.n = 0
	if now >= f.until {
		f.least, f.until = [2]float64{0, f.least[0]}, now+int64(span)
	}
}
