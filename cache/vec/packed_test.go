package vec

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// mulReference is the product as one would write it down.
func mulReference(x, w []int8, t, n, k int) []int32 {
	dst := make([]int32, t*n)
	for i := range t {
		for j := range n {
			for c := range k {
				dst[i*n+j] += int32(x[i*k+c]) * int32(w[j*k+c])
			}
		}
	}
	return dst
}

func checkMul(t *testing.T, r *rand.Rand, rows, n, k int) {
	t.Helper()
	x, w := bytes8(r, rows*k), bytes8(r, n*k)
	want := mulReference(x, w, rows, n, k)
	p := Pack(w, n, k)
	if gotN, gotK := p.Shape(); gotN != n || gotK != k {
		t.Errorf("packed %d × %d, has %d × %d", n, k, gotN, gotK)
	}
	scales := Rows{floats(r, rows), floats(r, rows)}
	columns := Columns{floats(r, n), floats(r, n), floats(r, n)}
	numbers := make([]float32, rows*n)
	for i := range want {
		scaleGo(numbers[i:i+1], want[i:i+1], columns.cut(i%n, i%n+1), scales.Scale[i/n], scales.Zero[i/n])
	}
	for _, l := range levels() {
		got := make([]int32, rows*n)
		l.mul(p, x, rows, &product{sums: got})
		if !slices.Equal(got, want) {
			t.Fatalf("%s: %d rows by %d × %d is not what the reference says", l, rows, n, k)
		}
		linear := make([]float32, rows*n)
		l.mul(p, x, rows, &product{numbers: linear, rows: scales, columns: columns})
		if !slices.Equal(linear, numbers) {
			t.Fatalf("%s: %d rows by %d × %d: the numbers are not those of plain Go", l, rows, n, k)
		}
	}
}

func TestMulIsExact(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for rows := range 14 {
		for _, n := range []int{1, 15, 16, 17, 64, 65, 80, 128, 131} {
			checkMul(t, r, rows, n, 4*(1+r.IntN(30)))
		}
	}
	checkMul(t, r, 101, 70, 64)
	checkMul(t, r, 3, 384, 1536)
}

func FuzzMul(f *testing.F) {
	f.Add(uint64(1), uint8(15), uint8(64), uint8(96))
	f.Fuzz(func(t *testing.T, seed uint64, rows, n, k uint8) {
		checkMul(t, rand.New(rand.NewPCG(seed, 0)), int(rows%60), 1+int(n), 4*(1+int(k%64)))
	})
}

func TestShapesThatDoNotFitPanic(t *testing.T) {
	p := Pack(make([]int8, 8), 2, 4)
	one, two := make([]float32, 1), make([]float32, 2)
	for name, f := range map[string]func(){
		"Dot":             func() { Dot(make([]float32, 3), make([]float32, 4)) },
		"Dots":            func() { Dots(make([]float32, 2), make([]float32, 4), make([]float32, 7)) },
		"DotsAt, ids":     func() { DotsAt(make([]float32, 2), make([]float32, 4), make([]float32, 8), make([]uint32, 1)) },
		"DotsAt, base":    func() { DotsAt(make([]float32, 1), make([]float32, 4), make([]float32, 7), []uint32{1}) },
		"DotI8":           func() { DotI8(make([]int8, 3), make([]int8, 4)) },
		"DotsI8":          func() { DotsI8(make([]int32, 2), make([]int8, 4), make([]int8, 7)) },
		"DotsAtI8":        func() { DotsAtI8(make([]int32, 1), make([]int8, 4), make([]int8, 4), []uint32{1}) },
		"Pack, not 4":     func() { Pack(make([]int8, 6), 1, 6) },
		"Pack, size":      func() { Pack(make([]int8, 6), 1, 4) },
		"Mul":             func() { p.Mul(make([]int32, 2), make([]int8, 8), 1) },
		"Linear, rows":    func() { p.Linear(make([]float32, 2), make([]int8, 4), Rows{one, nil}, Columns{two, two, two}) },
		"Linear, columns": func() { p.Linear(make([]float32, 2), make([]int8, 4), Rows{one, one}, Columns{two, two, one}) },
		"QuantizeI8":      func() { QuantizeI8(make([]int8, 1), two) },
		"of nothing":      func() { QuantizeI8(nil, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

func TestNothingIsAllocated(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	p := Pack(bytes8(r, 64*32), 64, 32)
	x, dst, one := bytes8(r, 32), make([]float32, 64), make([]float32, 64)
	if n := testing.AllocsPerRun(100, func() {
		p.Linear(dst, x, Rows{one[:1], one[:1]}, Columns{one, one, one})
		QuantizeI8(x, dst[:len(x)])
		Gelu(dst)
		Dots(dst[:1], one, dst)
		Dot(one, dst)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
