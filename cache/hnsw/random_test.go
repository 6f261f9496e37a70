package hnsw

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"

	"headgate/cache/vec"
	"pgregory.net/rapid"
)

// opsEnv is how many random operations TestRandomOps does; make soak asks for a million.
const opsEnv = "HEADGATE_HNSW_OPS"

// TestRandomOps does random inserts, deletes, searches, expiries (of the oldest) and rebuilds (which go on beside
// the rest), and holds each search against a look at all; others search all the while.
func TestRandomOps(t *testing.T) {
	ops := 100_000
	if s := os.Getenv(opsEnv); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 100 {
			t.Fatalf("%s=%q: a number of operations, at least 100", opsEnv, s)
		}
		ops = n
	}
	for _, c := range []struct {
		name   string
		config Config
		share  int // of all operations, in percent
		people int // vectors, about
	}{
		{"graph", Config{Dim: 32, M: 8, EfConstruction: 32, Crossover: -1, Seed: 1}, 40, 500},
		{"crossing", Config{Dim: 24, M: 6, EfConstruction: 24, Crossover: 200, MaxLen: 400, Seed: 2}, 30, 220},
		{"int8", Config{Dim: 64, M: 8, EfConstruction: 32, Crossover: -1, Int8: true, Seed: 3}, 20, 300},
		{"384", Config{Dim: 384, Crossover: -1, Seed: 4}, 10, 300},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			one, all := randomOps(t, c.config, ops*c.share/100, c.people)
			t.Logf("recall@1 %.4f, recall@10 %.4f", one, all)
			if one < .99 || all < .97 {
				t.Errorf("recall@1 %.4f, recall@10 %.4f, want .99 and .97", one, all)
			}
		})
	}
}

func randomOps(t *testing.T, c Config, ops, people int) (one, all float64) {
	w := newWorld(t, c)
	draw := newClusters(c.Seed, c.Dim, 30, 0.6)
	random := rand.New(rand.NewPCG(c.Seed, 2))
	var beside sync.WaitGroup
	done := make(chan struct{})
	q := unit(slices.Clone(draw.centres[0])...)
	beside.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				w.x.Search(nil, q, 10, 32, nil)
			}
		}
	})
	defer beside.Wait()
	defer close(done)
	next := uint64(0)
	for op := range ops {
		// Waves: from a fifth of people to twice as many.
		growing := op/(4*people)%2 == 0
		switch p := random.IntN(100); {
		case p < 45 && growing || p < 25:
			v := draw.draw()
			if len(w.ids) > 0 && p%9 == 0 {
				v = w.vectors[w.ids[random.IntN(len(w.ids))]] // a twin
			}
			w.insert(next, v)
			next++
		case p < 70:
			if !growing || random.IntN(3) > 0 {
				w.remove(random.IntN(len(w.ids) + 1))
			}
		case p < 71 && len(w.ids) > people/5:
			for range 8 { // the oldest expire
				w.remove(0)
			}
		case p < 72 && random.IntN(20) == 0:
			beside.Go(func() { // ErrRebuilds is as good
				_ = w.x.Rebuild(t.Context())
			})
		case p < 73 && random.IntN(10) == 0:
			w.check()
		case p < 85:
			w.search(draw.draw(), 10, 64, nil)
		}
	}
	w.check()
	return w.recall()
}

// TestMachine is a state machine of all that can be written, over odd configurations.
func TestMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := Config{
			Dim:       rapid.SampledFrom([]int{1, 2, 3, 16}).Draw(t, "dim"),
			M:         rapid.IntRange(2, 5).Draw(t, "m"),
			Crossover: rapid.SampledFrom([]int{-1, 1, 4, 12}).Draw(t, "crossover"),
			MaxLen:    rapid.SampledFrom([]int{0, 1, 5, 30}).Draw(t, "max"),
			Int8:      rapid.Bool().Draw(t, "int8"),
			Seed:      rapid.Uint64().Draw(t, "seed"),
		}
		c.EfConstruction = c.M + rapid.IntRange(0, 6).Draw(t, "ef")
		w := &world{t: t, x: New(c), vectors: make(map[uint64][]float32)}
		vector := func(t *rapid.T) []float32 {
			v := make([]float32, c.Dim)
			for i := range v { // few directions: twins are common
				v[i] = float32(rapid.IntRange(-2, 2).Draw(t, "v"))
			}
			v[0]++
			if vec.Norm(v); vec.Dot(v, v) == 0 {
				v[0] = 1
			}
			return v
		}
		t.Repeat(map[string]func(*rapid.T){
			"insert": func(t *rapid.T) { w.insert(rapid.Uint64Range(0, 60).Draw(t, "id"), vector(t)) },
			"remove": func(t *rapid.T) { w.remove(rapid.IntRange(0, len(w.ids)).Draw(t, "which")) },
			"search": func(t *rapid.T) { w.search(vector(t), rapid.IntRange(1, 9).Draw(t, "k"), 1, nil) },
			"kept": func(t *rapid.T) {
				w.search(vector(t), 3, 1, func(id uint64) bool { return id%3 == 0 })
			},
			"rebuild": func(t *rapid.T) {
				if err := w.x.Rebuild(t.Context()); err != nil {
					t.Fatalf("rebuild: %v", err)
				}
			},
			"": func(*rapid.T) { w.check() },
		})
	})
}

// FuzzOps reads a stream of operations, three bytes each.
func FuzzOps(f *testing.F) {
	f.Add([]byte{0, 1, 1, 0, 2, 1, 1, 0, 0, 0, 3, 9, 2, 1, 1})
	random := rand.New(rand.NewPCG(1, 1))
	for range 4 {
		b := make([]byte, 240)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 3000 {
			return
		}
		w := newWorld(t, Config{Dim: 2, M: 2, EfConstruction: 3, Crossover: 6 - 1, MaxLen: 50})
		if len(b) > 0 && b[0]&1 != 0 {
			w = newWorld(t, Config{Dim: 2, M: 3, EfConstruction: 4, Crossover: -1, Int8: true})
		}
		for ; len(b) >= 3; b = b[3:] {
			v := unit(float32(b[2]%16)-7.5, float32(b[2]/16)-7.5)
			switch b[0] % 8 {
			case 0, 1, 2:
				w.insert(uint64(b[1]), v)
			case 3, 4:
				w.remove(int(b[1]) % (len(w.ids) + 1))
			case 5:
				w.search(v, int(b[1]%8)+1, 2, nil)
			case 6:
				w.search(v, 2, 1, func(id uint64) bool { return id%2 == uint64(b[1]%2) })
			case 7:
				if b[1]%16 == 0 {
					if err := w.x.Rebuild(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		w.check()
	})
}
