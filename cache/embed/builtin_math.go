package embed

import "math"

// softmax sets x to exponentials in proportion to those of x, and gives their sum.
func softmax(x []float32) (total float32) {
	top := x[0]
	for _, v := range x {
		top = max(top, v)
	}
	for i, v := range x {
		e := exp(v - top)
		x[i] = e
		total += e
	}
	return total
}

// exp is e to the x for x ≤ 0, within 1e-6 of its size, and 0 where that is below 2e-37:
// 2^n as bits of a float times a polynomial between ±ln2/2.
func exp(x float32) float32 {
	if x < -85 {
		return 0
	}
	const magic = 3 << 22 // to which a number is added so that it is rounded to a whole one
	n := float32(float32(x*math.Log2E)+magic) - magic
	r := x - float32(n*0.693359375) + float32(n*2.12194440e-4) // ln 2 in two parts (Cody and Waite)
	p := float32(1.0 / 720)
	for _, c := range [...]float32{1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1} {
		p = float32(p*r) + c
	}
	return p * math.Float32frombits(uint32(int32(n)+127)<<23)
}
