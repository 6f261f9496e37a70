// Package vec computes on vectors of similarities: inner products of float32 and int8, one
// to one and one to many, and the product of matrices that a quantised model is made of.
//
// It uses AVX-512 or AVX2 where the processor has them and plain Go elsewhere; see DESIGN.md.
// All functions are pure, keep nothing and may be called by many goroutines; none allocates,
// save Pack. A shape that does not fit is a mistake of the caller and panics.
package vec

import "math"

// Dot is the inner product of a and b, which must be of one length. For vectors of unit
// length it is the cosine of the angle between them, in [-1, 1] but for rounding.
//
// Dot, Dots and DotsAt give the same for the same two vectors, to the bit, on one machine
// and on all that have AVX2 or AVX-512; Dot(a, b) is Dot(b, a).
func Dot(a, b []float32) float32 {
	if len(a) != len(b) {
		panic("vec: Dot of vectors of two lengths")
	}
	var sum [1]float32
	present.dots(sum[:], a, b)
	return sum[0]
}

// Dots sets dst[i] to the inner product of q and the ith row of rows: len(dst) rows of
// len(q), one behind the other.
func Dots(dst, q, rows []float32) {
	if len(rows) != len(dst)*len(q) {
		panic("vec: Dots wants len(dst) rows of len(q)")
	}
	present.dots(dst, q, rows)
}

// DotsAt sets dst[i] to the inner product of q and row ids[i] of base, whose rows are of
// len(q). It fetches the rows ahead into the cache: give it a whole list of neighbours at once.
func DotsAt(dst []float32, q, base []float32, ids []uint32) {
	checkAt(len(dst), len(q), len(base), ids)
	present.dotsAt(dst, q, base, ids)
}

// DotI8 is the inner product of a and b, exact for vectors of up to 131,071 numbers.
func DotI8(a, b []int8) int32 {
	if len(a) != len(b) {
		panic("vec: DotI8 of vectors of two lengths")
	}
	var sum [1]int32
	present.dotsI8(sum[:], a, b)
	return sum[0]
}

// DotsI8 is Dots of int8.
func DotsI8(dst []int32, q, rows []int8) {
	if len(rows) != len(dst)*len(q) {
		panic("vec: DotsI8 wants len(dst) rows of len(q)")
	}
	present.dotsI8(dst, q, rows)
}

// DotsAtI8 is DotsAt of int8.
func DotsAtI8(dst []int32, q, base []int8, ids []uint32) {
	checkAt(len(dst), len(q), len(base), ids)
	present.dotsAtI8(dst, q, base, ids)
}

// Norm scales x to unit length, in place. A vector without a direction (zero, or one with a
// number that is not finite) becomes zero, so that it is similar to nothing.
func Norm(x []float32) {
	var sum float64
	for _, v := range x {
		sum += float64(v) * float64(v)
	}
	if sum == 0 || math.IsInf(sum, 0) || math.IsNaN(sum) {
		clear(x)
		return
	}
	scale := 1 / math.Sqrt(sum)
	for i, v := range x {
		x[i] = float32(float64(v) * scale)
	}
}

// checkAt panics unless each of ids is a row of base: the kernels do not look.
func checkAt(dst, dim, base int, ids []uint32) {
	if dst != len(ids) {
		panic("vec: as many results as ids are wanted")
	}
	if dim == 0 {
		return
	}
	rows := uint64(base / dim)
	for _, id := range ids {
		if uint64(id) >= rows {
			panic("vec: an id beyond the last row")
		}
	}
}
