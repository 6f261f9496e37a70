package limiter

import (
	"math"
	"math/bits"
)

// wide is an unsigned 128-bit number. The bounds of Validate keep every value
// that this package forms below 2^127, so its sums do not carry out.
type wide struct{ hi, lo uint64 }

// product returns a·b for a, b ≥ 0.
func product(a, b int64) wide {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return wide{hi, lo}
}

func (w wide) plus(v wide) wide {
	lo, carry := bits.Add64(w.lo, v.lo, 0)
	hi, _ := bits.Add64(w.hi, v.hi, carry)
	return wide{hi, lo}
}

// minus returns w − v for v ≤ w.
func (w wide) minus(v wide) wide {
	lo, borrow := bits.Sub64(w.lo, v.lo, 0)
	hi, _ := bits.Sub64(w.hi, v.hi, borrow)
	return wide{hi, lo}
}

func (w wide) less(v wide) bool {
	return w.hi < v.hi || w.hi == v.hi && w.lo < v.lo
}

func (w wide) zero() bool { return w.hi|w.lo == 0 }

// over returns ⌊w/d⌋ and the remainder for d > 0. A quotient that an int64
// does not hold becomes MaxInt64 with remainder 0: the saturation is explicit,
// and every caller says what it means there.
func (w wide) over(d int64) (q, r int64) {
	if w.hi >= uint64(d) {
		return math.MaxInt64, 0
	}
	uq, ur := bits.Div64(w.hi, w.lo, uint64(d))
	if uq > math.MaxInt64 {
		return math.MaxInt64, 0
	}
	return int64(uq), int64(ur)
}

// overUp is over rounded up; it saturates at MaxInt64.
func (w wide) overUp(d int64) int64 {
	q, r := w.over(d)
	if r > 0 && q < math.MaxInt64 {
		q++
	}
	return q
}

// scaleUp returns ⌈w·m/d⌉ for m ≥ 0, d > 0, through a 192-bit product. What
// does not fit 127 bits becomes 2^127 − 1.
func (w wide) scaleUp(m, d int64) wide {
	if m == d {
		return w
	}
	h1, l0 := bits.Mul64(w.lo, uint64(m))
	h2, l1 := bits.Mul64(w.hi, uint64(m))
	l1, carry := bits.Add64(l1, h1, 0)
	h2 += carry
	// Schoolbook division by one limb; each remainder is below d.
	q2, r := h2/uint64(d), h2%uint64(d)
	q1, r := bits.Div64(r, l1, uint64(d))
	q0, r := bits.Div64(r, l0, uint64(d))
	if q2 > 0 || q1 > math.MaxInt64 {
		return wide{math.MaxInt64, math.MaxUint64}
	}
	q := wide{q1, q0}
	if r > 0 {
		q = q.plus(wide{0, 1})
	}
	return q
}
