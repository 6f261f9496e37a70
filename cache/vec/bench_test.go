package vec

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// aligned are numbers as the allocator lays large slices out: at the start of a line of the cache.
func aligned(r *rand.Rand, n int) []float32 { return append(make([]float32, 0, n), floats(r, n)...) }

func BenchmarkDot(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	x, y := aligned(r, 384), aligned(r, 384)
	for _, l := range levels() {
		b.Run(l.String(), func(b *testing.B) {
			var dst [1]float32
			for b.Loop() {
				l.dots(dst[:], x, y)
			}
		})
	}
}

// BenchmarkDots is brute force over 2,000 rows, which do not fit into the caches of a core.
func BenchmarkDots(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	q, rows, dst := aligned(r, 384), aligned(r, 2000*384), make([]float32, 2000)
	for _, l := range levels() {
		b.Run(l.String(), func(b *testing.B) {
			for b.Loop() {
				l.dots(dst, q, rows)
			}
		})
	}
}

// BenchmarkDotsAt asks for lists of 32 anywhere in base.
func BenchmarkDotsAt(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, rows := range []int{1_000, 100_000} {
		q, base, dst := aligned(r, 384), aligned(r, rows*384), make([]float32, 32)
		ids := make([]uint32, 1<<16)
		for i := range ids {
			ids[i] = r.Uint32N(uint32(rows))
		}
		for _, l := range levels() {
			b.Run(fmt.Sprintf("rows=%d/%s", rows, l), func(b *testing.B) {
				for i := 0; b.Loop(); i = (i + 32) % len(ids) {
					l.dotsAt(dst, q, base, ids[i:i+32])
				}
			})
		}
	}
}

func BenchmarkDotsI8(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	q, rows, dst := bytes8(r, 384), bytes8(r, 2000*384), make([]int32, 2000)
	for _, l := range levels() {
		b.Run(l.String(), func(b *testing.B) {
			for b.Loop() {
				l.dotsI8(dst, q, rows)
			}
		})
	}
}

// BenchmarkLinear is the arithmetic of all layers of a MiniLM for a question of 15 tokens: six times
// 384 → 1152, 384 → 384, 384 → 1536 and 1536 → 384.
func BenchmarkLinear(b *testing.B) {
	const tokens, layers = 15, 6
	r := rand.New(rand.NewPCG(1, 1))
	var model []*Packed
	for range layers {
		for _, s := range [][2]int{{1152, 384}, {384, 384}, {1536, 384}, {384, 1536}} {
			model = append(model, Pack(bytes8(r, s[0]*s[1]), s[0], s[1]))
		}
	}
	x, dst, ones := bytes8(r, tokens*1536), make([]float32, tokens*1536), floats(r, 1536)
	for _, l := range levels() {
		b.Run(l.String(), func(b *testing.B) {
			for b.Loop() {
				for _, p := range model {
					to := product{numbers: dst[:tokens*p.n], rows: Rows{ones[:tokens], ones[:tokens]}, columns: Columns{ones[:p.n], ones[:p.n], ones[:p.n]}}
					l.mul(p, x[:tokens*p.k], tokens, &to)
				}
			}
		})
	}
}

// BenchmarkLayers is what lies between the products of a MiniLM for a question of 15 tokens.
func BenchmarkLayers(b *testing.B) {
	const tokens, layers = 15, 6
	r := rand.New(rand.NewPCG(1, 1))
	x, y, q := floats(r, 1536), make([]float32, 1536), make([]int8, 1536)
	for _, l := range levels() {
		b.Run("gelu/"+l.String(), func(b *testing.B) {
			for b.Loop() {
				for range tokens * layers {
					copy(y, x)
					l.gelu(y)
				}
			}
		})
		b.Run("quantize/"+l.String(), func(b *testing.B) {
			for b.Loop() {
				for range tokens * layers {
					l.quantize(q, x)
					l.quantize(q[:1152], x[:1152])
				}
			}
		})
	}
}
