// Package vecbench compares cache/vec with github.com/viterin/vek. It is a module of its own, as
// the product does not need vek: cd bench/vec && go test -bench .
package vecbench

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/viterin/vek/vek32"

	"headgate/cache/vec"
)

const dim = 384

func floats(n int) []float32 {
	r := rand.New(rand.NewPCG(1, 2))
	x := make([]float32, n)
	for i := range x {
		x[i] = r.Float32()*2 - 1
	}
	return x
}

func TestBothComputeTheSame(t *testing.T) {
	x := floats(2 * dim)
	a, b := vec.Dot(x[:dim], x[dim:]), vek32.Dot(x[:dim], x[dim:])
	if math.Abs(float64(a-b)) > 1e-4 {
		t.Errorf("%v here, %v by vek", a, b)
	}
}

func BenchmarkDot(b *testing.B) {
	x := floats(2 * dim)
	b.Run(vec.Kernels(), func(b *testing.B) {
		for b.Loop() {
			vec.Dot(x[:dim], x[dim:])
		}
	})
	b.Run("vek", func(b *testing.B) {
		for b.Loop() {
			vek32.Dot(x[:dim], x[dim:])
		}
	})
}

// BenchmarkBrute is one question against n rows.
func BenchmarkBrute(b *testing.B) {
	for _, n := range []int{500, 2000, 4000} {
		q, rows, dst := floats(dim), floats(n*dim), make([]float32, n)
		b.Run(fmt.Sprintf("rows=%d/%s", n, vec.Kernels()), func(b *testing.B) {
			for b.Loop() {
				vec.Dots(dst, q, rows)
			}
		})
		b.Run(fmt.Sprintf("rows=%d/vek", n), func(b *testing.B) {
			for b.Loop() {
				for i := range dst {
					dst[i] = vek32.Dot(q, rows[i*dim:(i+1)*dim])
				}
			}
		})
	}
}

// BenchmarkNeighbours is a list of 32 neighbours anywhere among 100,000 rows.
func BenchmarkNeighbours(b *testing.B) {
	const rows = 100_000
	q, base, dst := floats(dim), floats(rows*dim), make([]float32, 32)
	r := rand.New(rand.NewPCG(1, 1))
	ids := make([]uint32, 1<<16)
	for i := range ids {
		ids[i] = r.Uint32N(rows)
	}
	b.Run(vec.Kernels(), func(b *testing.B) {
		for i := 0; b.Loop(); i = (i + 32) % len(ids) {
			vec.DotsAt(dst, q, base, ids[i:i+32])
		}
	})
	b.Run("vek", func(b *testing.B) {
		for i := 0; b.Loop(); i = (i + 32) % len(ids) {
			for j, id := range ids[i : i+32] {
				dst[j] = vek32.Dot(q, base[int(id)*dim:][:dim])
			}
		}
	})
}
