package vec

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestGeluIsNear(t *testing.T) {
	var x []float32
	for v := float32(-14); v < 14; v += 1. / 512 {
		x = append(x, v, -v, 3*v)
	}
	x = append(x, 0, geluEdge, -geluEdge, math.Nextafter32(geluEdge, 9), math.Nextafter32(-geluEdge, 0))
	plainly := slices.Clone(x)
	geluGo(plainly)
	for i, v := range x {
		want := float64(v) / 2 * math.Erfc(-float64(v)/math.Sqrt2)
		if d := math.Abs(float64(plainly[i]) - want); d > 2e-6*max(1, math.Abs(want)/8) {
			t.Errorf("Gelu(%v) is %v, want %v", v, plainly[i], want)
		}
	}
	for _, l := range levels() {
		for n := range 50 {
			part := slices.Clone(x[n : 3*n])
			if l.gelu(part); !slices.Equal(part, plainly[n:3*n]) {
				t.Fatalf("%s: %d numbers are not those of plain Go", l, 2*n)
			}
		}
		all := slices.Clone(x)
		if l.gelu(all); !slices.Equal(all, plainly) {
			t.Errorf("%s: not the numbers of plain Go", l)
		}
	}
}

func TestQuantizeI8(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for n := 1; n < 200; n++ {
		x := floats(r, n)
		for i := range x {
			x[i] = x[i]*float32(n) + float32(n%7)
		}
		want := make([]int8, n)
		wantScale, wantZero := plain.quantize(want, x)
		for i, v := range x {
			if d := math.Abs(float64(wantScale)*float64(want[i]) + float64(wantZero) - float64(v)); d > .5001*float64(wantScale)+1e-5*float64(n) {
				t.Fatalf("%v became %d, scale %v, zero %v", v, want[i], wantScale, wantZero)
			}
		}
		for _, l := range levels() {
			got := make([]int8, n)
			if scale, zero := l.quantize(got, x); !slices.Equal(got, want) || scale != wantScale || zero != wantZero {
				t.Fatalf("%s: %d numbers: %v %v %v, want %v %v %v", l, n, got, scale, zero, want, wantScale, wantZero)
			}
		}
	}
	same := []float32{3, 3, 3}
	q := make([]int8, 3)
	if scale, zero := QuantizeI8(q, same); scale*float32(q[1])+zero != 3 {
		t.Errorf("3 became %v, scale %v, zero %v", q, scale, zero)
	}
}
