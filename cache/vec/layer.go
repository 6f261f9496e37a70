package vec

import (
	"math"
	"slices"
)

// What a model does to its numbers between two products. As Linear they give the same bits on
// all machines: every step is rounded, in one order.

// QuantizeI8 sets dst to the 256 steps between the least and the greatest of x, which must be
// finite, there be at least one and as many as in dst: x is about scale·dst + zero.
func QuantizeI8(dst []int8, x []float32) (scale, zero float32) {
	if len(dst) != len(x) || len(x) == 0 {
		panic("vec: QuantizeI8 wants room for as many numbers as there are")
	}
	return present.quantize(dst, x)
}

// Gelu applies the Gaussian error linear unit, x·Φ(x), in place and within 2e-6.
func Gelu(x []float32) { present.gelu(x) }

const block = 16 // numbers that a kernel of a layer works on at a time

func (l level) quantize(dst []int8, x []float32) (scale, zero float32) {
	low, high := l.bounds(x)
	scale = (high - low) / 255
	if scale == 0 {
		scale = 1
	}
	inverse := 1 / scale
	shift := float32(-low*inverse) - 128
	done := l.quantizeBlocks(dst, x, inverse, shift)
	quantizeGo(dst[done:], x[done:], inverse, shift)
	return scale, low + float32(128*scale)
}

// bounds are the least and the greatest of x.
func (l level) bounds(x []float32) (low, high float32) {
	var lows, highs [8]float32
	for i := range lows {
		lows[i], highs[i] = x[0], x[0]
	}
	done := l.boundsBlocks(x, &lows, &highs)
	low, high = slices.Min(lows[:]), slices.Max(highs[:])
	for _, v := range x[done:] {
		low, high = min(low, v), max(high, v)
	}
	return low, high
}

func (l level) gelu(x []float32) { geluGo(x[l.geluBlocks(x):]) }

// quantizeGo rounds to even: what is added has no room for a fraction of a small number.
func quantizeGo(dst []int8, x []float32, inverse, shift float32) {
	const magic = 3 << 22
	for i, v := range x {
		product := float32(v * inverse)
		sum := float32(product + shift)
		whole := int32(math.Float32bits(sum+magic)) - int32(0x4B400000) // the bits of magic
		dst[i] = int8(max(-128, min(whole, 127)))
	}
}

// Φ(x) is ½ + x·P(x²)/Q(x²) for |x| ≤ 5.25, fitted by weighted least squares to 1e-8 of x·Φ(x); beyond it
// Φ is 0 or 1 but for 1e-7. The generator has the same numbers.
const (
	geluEdge = 5.25

	geluP0, geluQ0 = 0.39894214272499084, 1
	geluP1, geluQ1 = 0.033619675785303116, 0.2509371340274811
	geluP2, geluQ2 = 0.004672061186283827, 0.02853626199066639
	geluP3, geluQ3 = 0.00016767121269367635, 0.0018774372292682528
	geluP4, geluQ4 = 6.463330464612227e-06, 7.389755774056539e-05
	geluP5, geluQ5 = 2.370860308076317e-08, 1.2335411838648724e-06
)

func geluGo(x []float32) {
	for i, v := range x {
		if !(v > -geluEdge) {
			x[i] = 0
			continue
		}
		c := min(v, geluEdge)
		u := float32(c * c)
		p := float32(u*geluP5) + geluP4
		p = float32(u*p) + geluP3
		p = float32(u*p) + geluP2
		p = float32(u*p) + geluP1
		p = float32(u*p) + geluP0
		q := float32(u*geluQ5) + geluQ4
		q = float32(u*q) + geluQ3
		q = float32(u*q) + geluQ2
		q = float32(u*q) + geluQ1
		q = float32(u*q) + geluQ0
		x[i] = v * (float32(c*(p/q)) + .5)
	}
}
