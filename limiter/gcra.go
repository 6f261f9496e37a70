package limiter

import (
	"math"
	"math/bits"
	"time"
)

// A GCRA state is the theoretical arrival time (TAT): the instant at which the
// bucket is full again. A cost of c units moves it by c·T with T = Per/Count,
// which need not be a whole number of nanoseconds and may be less than one; so
// the TAT is s.a + s.b/Count nanoseconds, 0 ≤ s.b < Count, and never rounded.
//
// Decisions are made on the deficit (TAT − now)·Count: how far the level is
// below the burst, in units times Per. It is a whole number below 2^116.

// deficit returns it for a reading now ≥ s.last.
func (l *Limit) deficit(s *State, now int64) wide {
	if s.a < now {
		return wide{}
	}
	return product(s.a-now, l.Rate.Count).plus(wide{0, uint64(s.b)})
}

// carry is a deficit under from as it is under l. Between parts of different size the level
// is what stays, as far as it has room: the deficit grows and shrinks with the burst.
func (l *Limit) carry(deficit wide, from *Limit) wide {
	deficit = deficit.scaleUp(int64(l.Rate.Per), int64(from.Rate.Per))
	if l.Parts == from.Parts {
		return deficit
	}
	if l.Burst > from.Burst {
		return deficit.plus(product(l.Burst-from.Burst, int64(l.Rate.Per)))
	}
	shrunk := product(from.Burst-l.Burst, int64(l.Rate.Per))
	if deficit.less(shrunk) {
		return wide{}
	}
	return deficit.minus(shrunk)
}

// owe sets the TAT from a deficit. One that ends after the clock does is cut
// off there.
func (l *Limit) owe(s *State, now int64, deficit wide) {
	q, r := deficit.over(l.Rate.Count)
	if q >= math.MaxInt64-now {
		s.a, s.b = math.MaxInt64, 0
		return
	}
	s.a, s.b = now+q, r
}

// refill returns the time until the TAT, rounded up.
func (s *State) refill(now int64) int64 {
	if s.a < now {
		return 0
	}
	if s.b > 0 {
		return s.a - now + 1
	}
	return s.a - now
}

// level returns the whole units left in a bucket that holds size/per units of
// which spent/per are gone, rounded down, also below zero.
func level(size, spent wide, per int64) int64 {
	if size.less(spent) {
		return -spent.minus(size).overUp(per)
	}
	q, _ := size.minus(spent).over(per)
	return q
}

// takeGCRA admits cost c if max(now, TAT) + c·T − now ≤ B·T.
func (l *Limit) takeGCRA(s *State, now, cost int64, over Oversize, d *Decision) {
	per := int64(l.Rate.Per)
	size := product(l.Burst, per)
	deficit := l.deficit(s, now)
	after := deficit.plus(product(cost, per))
	if cost > 0 && cost <= l.Burst && !size.less(after) {
		// The common case. As after ≤ size, neither quotient overflows.
		ns, frac := bits.Div64(after.hi, after.lo, uint64(l.Rate.Count))
		s.a, s.b = now+int64(ns), int64(frac)
		left := size.minus(after)
		remaining, _ := bits.Div64(left.hi, left.lo, uint64(per))
		if frac > 0 {
			ns++
		}
		d.Admitted, d.Remaining, d.Reset = true, int64(remaining), time.Duration(ns)
		return
	}
	// A debt that the clock cannot express is refused, so that what is
	// charged is always what a refund gives back.
	payable := cost <= l.Burst || after.overUp(l.Rate.Count) < math.MaxInt64-now
	d.Admitted = fits(cost, l.Burst, over, !size.less(after), deficit.zero()) && payable
	switch {
	case d.Admitted && cost > 0:
		l.owe(s, now, after)
		deficit = after
	case d.Admitted:
	case cost <= l.Burst:
		d.RetryAfter = time.Duration(after.minus(size).overUp(l.Rate.Count))
	case over == Debt && payable && cost <= MaxUnits:
		d.RetryAfter = time.Duration(s.refill(now))
	default:
		d.RetryAfter = Never
	}
	d.Remaining = level(size, deficit, per)
	d.Reset = time.Duration(s.refill(now))
}

// adjustGCRA moves the TAT back, but not before now, or forward.
func (l *Limit) adjustGCRA(s *State, now, delta int64) {
	deficit := l.deficit(s, now)
	if delta <= 0 {
		l.owe(s, now, deficit.plus(product(-delta, int64(l.Rate.Per))))
		return
	}
	back := product(delta, int64(l.Rate.Per))
	if deficit.less(back) {
		back = deficit
	}
	l.owe(s, now, deficit.minus(back))
}
