package vec

import (
	"math"
	"math/rand/v2"
	"testing"
)

// levels are all that this machine can run.
func levels() (all []level) {
	for l := plain; l <= present; l++ {
		all = append(all, l)
	}
	return all
}

// floats are n numbers in [-1, 1), off by one from whatever a vector register would like.
func floats(r *rand.Rand, n int) []float32 {
	off := r.IntN(16)
	x := make([]float32, off+n)
	for i := range x {
		x[i] = r.Float32()*2 - 1
	}
	return x[off : off+n : off+n]
}

// dot64 is the reference, and the sum of the magnitudes: what an error is measured by.
func dot64(a, b []float32) (sum, size float64) {
	for i := range a {
		p := float64(a[i]) * float64(b[i])
		sum, size = sum+p, size+math.Abs(p)
	}
	return sum, size
}

func TestDotsAreWhatTheReferenceSays(t *testing.T) {
	for _, l := range levels() {
		t.Run(l.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			for n := range 601 {
				count := 1 + n%9
				q, rows, dst := floats(r, n), floats(r, n*count), floats(r, count)
				l.dots(dst, q, rows)
				for i, got := range dst {
					row := rows[i*n:][:n]
					want, size := dot64(q, row)
					if math.Abs(float64(got)-want) > 1e-6*size {
						t.Fatalf("%d numbers, row %d of %d: %v, want %v", n, i, count, got, want)
					}
					var alone, turned [1]float32
					l.dots(alone[:], q, row)
					l.dots(turned[:], row, q)
					if alone[0] != got || turned[0] != got {
						t.Fatalf("%d numbers, row %d of %d: %v, alone %v, turned %v", n, i, count, got, alone[0], turned[0])
					}
				}
			}
		})
	}
}

func TestDotsAtAreDots(t *testing.T) {
	for _, l := range levels() {
		t.Run(l.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, 4))
			for n := range 601 {
				const rows = 7
				q, base, all := floats(r, n), floats(r, n*rows), make([]float32, rows)
				l.dots(all, q, base)
				ids := make([]uint32, n%13)
				for i := range ids {
					ids[i] = r.Uint32N(rows)
				}
				dst := floats(r, len(ids))
				l.dotsAt(dst, q, base, ids)
				for i, id := range ids {
					if dst[i] != all[id] {
						t.Fatalf("%d numbers, id %d: %v, want %v", n, id, dst[i], all[id])
					}
				}
			}
		})
	}
}

// TestWidthsAgree holds that nodes of two kinds build the same graphs.
func TestWidthsAgree(t *testing.T) {
	if present < avx512 {
		t.Skip("this processor has one width")
	}
	r := rand.New(rand.NewPCG(5, 6))
	for n := range 601 {
		q, rows := floats(r, n), floats(r, 5*n)
		var narrow, wide [5]float32
		avx2.dots(narrow[:], q, rows)
		avx512.dots(wide[:], q, rows)
		if narrow != wide {
			t.Fatalf("%d numbers: %v with AVX2, %v with AVX-512", n, narrow, wide)
		}
	}
}

// bytes8 are n bytes, often of the ends of their range, and not aligned.
func bytes8(r *rand.Rand, n int) []int8 {
	off := r.IntN(64)
	x := make([]int8, off+n)
	ends := r.IntN(2) == 0
	for i := range x {
		x[i] = int8(r.IntN(256) - 128)
		if ends {
			x[i] = [...]int8{-128, -128, 127, 1}[r.IntN(4)]
		}
	}
	return x[off : off+n : off+n]
}

func TestDotsOfBytesAreExact(t *testing.T) {
	for _, l := range levels() {
		t.Run(l.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(7, 8))
			for n := range 601 {
				const rows = 7
				q, base := bytes8(r, n), bytes8(r, n*rows)
				var want, got [rows]int32
				dotsI8Go(want[:], q, base)
				l.dotsI8(got[:], q, base)
				if got != want {
					t.Fatalf("%d bytes: %v, want %v", n, got, want)
				}
				ids := make([]uint32, n%13)
				for i := range ids {
					ids[i] = r.Uint32N(rows)
				}
				at := make([]int32, len(ids))
				l.dotsAtI8(at, q, base, ids)
				for i, id := range ids {
					if at[i] != want[id] {
						t.Fatalf("%d bytes, id %d: %d, want %d", n, id, at[i], want[id])
					}
				}
			}
		})
	}
}

func TestLongestDotsOfBytesFit(t *testing.T) {
	x := make([]int8, 131_071)
	for i := range x {
		x[i] = -128
	}
	for _, l := range levels() {
		var got [1]int32
		if l.dotsI8(got[:], x, x); got[0] != 131_071<<14 {
			t.Errorf("%s: %d, want %d", l, got[0], 131_071<<14)
		}
	}
}

func FuzzDot(f *testing.F) {
	f.Add(uint64(1), uint16(384), false)
	f.Add(uint64(2), uint16(17), true)
	f.Fuzz(func(t *testing.T, seed uint64, n uint16, odd bool) {
		r := rand.New(rand.NewPCG(seed, 0))
		a, b := floats(r, int(n%2048)), floats(r, int(n%2048))
		if odd && len(a) > 0 {
			a[r.IntN(len(a))] = float32(math.NaN())
		}
		want, size := dot64(a, b)
		for _, l := range levels() {
			var got [1]float32
			l.dots(got[:], a, b)
			if near := math.Abs(float64(got[0])-want) <= 2e-6*size; near != !math.IsNaN(want) {
				t.Errorf("%s: %d numbers: %v, want %v", l, len(a), got[0], want)
			}
		}
	})
}
