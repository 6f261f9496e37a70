package hnsw

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/cache/vec"
)

// fewer is n, or what the race detector has time for where only one goroutine is at work.
func fewer[T int | uint64](n T) T {
	if raceEnabled {
		return n / 5
	}
	return n
}

func unit(v ...float32) []float32 {
	vec.Norm(v)
	return v
}

func TestConfig(t *testing.T) {
	for _, c := range []struct {
		config Config
		fault  string
	}{
		{Config{Dim: 1}, ""},
		{Config{Dim: 4096, M: 64, EfConstruction: 10_000, MaxLen: 1, Crossover: -1}, ""},
		{Config{}, "Dim 0"},
		{Config{Dim: 4097}, "Dim 4097"},
		{Config{Dim: 3, M: 1}, "M 1"},
		{Config{Dim: 3, M: 65}, "M 65"},
		{Config{Dim: 3, EfConstruction: 15}, "EfConstruction 15"},
		{Config{Dim: 3, MaxLen: -1}, "MaxLen -1"},
	} {
		err := c.config.Validate()
		if (err == nil) != (c.fault == "") || err != nil && !strings.Contains(err.Error(), c.fault) {
			t.Errorf("%+v: %v, want %q", c.config, err, c.fault)
		}
	}
}

func TestRefused(t *testing.T) {
	x := New(Config{Dim: 3, MaxLen: 2})
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	if err := x.Insert(1, unit(1, 2, 3)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		id    uint64
		v     []float32
		want  error
		words string
	}{
		{2, nil, ErrDim, "0 numbers, the index has 3"},
		{2, unit(1, 2), ErrDim, "2 numbers"},
		{2, []float32{1, nan, 0}, ErrNotFinite, "number 1 is NaN"},
		{2, []float32{0, 0, inf}, ErrNotFinite, "number 2 is +Inf"},
		{2, []float32{3e38, 3e38, 0}, ErrNotUnit, "vec.Norm"},
		{2, []float32{0, 0, 0}, ErrNotUnit, "its length is 0"},
		{2, []float32{1, 1, 0}, ErrNotUnit, "its length is 1.414"},
		{1, unit(1, 0, 0), ErrExists, "1"},
	} {
		if err := x.Insert(c.id, c.v); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%v: %v, want %v with %q", c.v, err, c.want, c.words)
		}
		if !errors.Is(c.want, ErrExists) {
			if got := x.Search(nil, c.v, 1, 1, nil); got != nil {
				t.Errorf("%v is similar to %v", c.v, got)
			}
		}
	}
	if err := x.Insert(2, unit(1, 0, 0)); err != nil {
		t.Fatal(err)
	}
	if err := x.Insert(3, unit(0, 0, 1)); !errors.Is(err, ErrFull) {
		t.Errorf("a third of two: %v", err)
	}
	if got := x.Search(nil, unit(1, 0, 0), 0, 5, nil); got != nil || x.Len() != 2 {
		t.Errorf("no neighbours wanted, found %v; %d in the index", got, x.Len())
	}
}

func TestSearchAppends(t *testing.T) {
	x := New(Config{Dim: 2})
	for id, v := range [][]float32{unit(1, 0), unit(1, 1), unit(-1, 0)} {
		if err := x.Insert(uint64(id), v); err != nil {
			t.Fatal(err)
		}
	}
	got := x.Search([]Neighbor{{7, 7}}, unit(1, 0), 2, 10, nil)
	if len(got) != 3 || got[0].ID != 7 || got[1] != (Neighbor{0, 1}) || got[2].ID != 1 {
		t.Errorf("found %v", got)
	}
	if v, ok := x.Vector(2); !ok || !slices.Equal(v, unit(-1, 0)) {
		t.Errorf("the vector is %v, %v", v, ok)
	}
	if _, ok := x.Vector(3); ok {
		t.Error("there is a vector of an id that is not there")
	}
}

// fill inserts ids from up to below to.
func (w *world) fill(c *clusters, from, to uint64) {
	for id := from; id < to; id++ {
		w.insert(id, c.draw())
	}
}

func (w *world) ask(c *clusters, n, k, ef int) (one, all float64) {
	for range n {
		w.search(c.draw(), k, ef, nil)
	}
	return w.recall()
}

// recallCases are indexes with a graph.
func recallCases() map[string]struct {
	config Config
	n      uint64
	all    float64 // least recall@10 at ef 64; of int8 as far as it can tell
} {
	return map[string]struct {
		config Config
		n      uint64
		all    float64
	}{
		"384":      {Config{Dim: 384, Crossover: -1, Seed: 1}, 2000, .97},
		"384 int8": {Config{Dim: 384, Crossover: -1, Seed: 1, Int8: true}, 2000, .95},
		"32":       {Config{Dim: 32, Crossover: -1, Seed: 1}, 5000, .98},
		"32 M 6":   {Config{Dim: 32, M: 6, EfConstruction: 64, Crossover: -1}, 3000, .93},
	}
}

// TestRecall: what a graph finds, before and after three of ten are deleted, when it was
// rebuilt, and when others have taken the places.
func TestRecall(t *testing.T) {
	for name, c := range recallCases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.n = fewer(c.n)
			draw := newClusters(1, c.config.Dim, 40, 0.5)
			w := newWorld(t, c.config)
			w.fill(draw, 0, c.n)
			hold := func(when string) {
				t.Helper()
				w.check()
				one, all := w.ask(draw, 300, 10, 64)
				t.Logf("%s: recall@1 %.4f, recall@10 %.4f, %+v", when, one, all, w.x.Stats())
				if least := .99; one < least && c.config.M == 0 && !c.config.Int8 || one < .95 || all < c.all {
					t.Errorf("%s: recall@1 %.4f, recall@10 %.4f, want %.2f and %.2f", when, one, all, least, c.all)
				}
			}
			hold("full")
			for range c.n * 3 / 10 {
				w.remove(draw.random.IntN(len(w.ids)))
			}
			hold("30 % deleted")
			if err := w.x.Rebuild(t.Context()); err != nil {
				t.Fatal(err)
			}
			hold("rebuilt")
			w.fill(draw, c.n, c.n*13/10)
			for len(w.ids) > int(c.n)/5 {
				w.remove(0)
			}
			hold("most deleted")
			w.fill(draw, 2*c.n, 2*c.n+c.n/2)
			hold("filled again")
		})
	}
}

// TestRegionDeleted: whole clusters go at once, and with them all neighbours of some.
func TestRegionDeleted(t *testing.T) {
	w := newWorld(t, Config{Dim: 16, Crossover: -1})
	var places []*clusters
	for i := range uint64(8) {
		places = append(places, newClusters(i, 16, 1, 0.2))
		w.fill(places[i], i*400, i*400+400)
	}
	for i := range 7 {
		for range 400 {
			w.remove(0)
		}
		w.check()
		one, all := w.ask(places[7], 50, 10, 64)
		if one < .99 || all < .99 {
			t.Errorf("with %d clusters gone: recall@1 %.3f, recall@10 %.3f", i+1, one, all)
		}
	}
	w.fill(places[0], 10_000, 10_400)
	if one, all := w.ask(places[0], 50, 10, 64); one < .99 || all < .99 {
		t.Errorf("in a cluster that came again: recall@1 %.3f, recall@10 %.3f", one, all)
	}
}

// TestTwins: thousands of equal vectors, deleted in any order, hide nothing.
func TestTwins(t *testing.T) {
	for _, int8s := range []bool{false, true} {
		w := newWorld(t, Config{Dim: 24, Crossover: -1, Int8: int8s})
		draw := newClusters(1, 24, 20, 0.5)
		same, other := draw.draw(), draw.draw()
		n := fewer(8000)
		for id := uint64(0); id < uint64(n); id += 4 {
			w.insert(id, same)
			w.insert(id+1, draw.draw())
			w.insert(id+2, same)
			if id%8 == 0 {
				w.insert(id+3, other)
			}
		}
		w.check()
		if s := w.x.Stats(); s.Twins != n/2+n/8-2 {
			t.Errorf("%d twins", s.Twins)
		}
		if got := w.x.Search(nil, same, n/2+10, 64, nil); len(got) != n/2+10 || got[n/2-1].Similarity < .999 || got[n/2].Similarity > .999 {
			t.Errorf("found %d, the last of the equal %v, the next %v", len(got), got[n/2-1], got[n/2])
		}
		// Those with an odd id are not behind the many.
		odd := func(id uint64) bool { return id%2 == 1 }
		for range 50 {
			w.search(same, 20, 64, odd)
			w.search(draw.draw(), 10, 64, nil)
		}
		if one, all := w.recall(); one < .97 || all < .96 {
			t.Errorf("among twins: recall@1 %.3f, recall@10 %.3f", one, all)
		}
		random := rand.New(rand.NewPCG(5, 5))
		for len(w.ids) > 300 {
			w.remove(min(random.IntN(len(w.ids)), random.IntN(len(w.ids))))
			if len(w.ids)%1000 == 0 {
				w.check()
				w.search(same, 10, 64, nil)
			}
		}
		w.check()
	}
}

// TestAlike: thousands that differ by next to nothing are found, and so is what is near to them.
func TestAlike(t *testing.T) {
	for _, spread := range []float32{1e-3, 1e-4, 1e-6} {
		w := newWorld(t, Config{Dim: 24, Crossover: -1})
		alike, rest := newClusters(1, 24, 1, spread), newClusters(2, 24, 30, 0.5)
		for id := uint64(0); id < fewer(uint64(1000)); id++ {
			w.insert(2*id, alike.draw())
			w.insert(2*id+1, rest.draw())
		}
		w.check()
		one, all := w.ask(rest, 100, 10, 64)
		one2, all2 := w.ask(alike, 100, 10, 64)
		t.Logf("spread %v: elsewhere recall@1 %.3f, recall@10 %.3f; there %.3f, %.3f; %+v", spread, one, all, one2, all2, w.x.Stats())
		if one < .98 || all < .97 {
			t.Errorf("spread %v: elsewhere recall@1 %.3f, recall@10 %.3f", spread, one, all)
		}
		// There, what is found must be as near but for rounding.
		for range 50 {
			q := alike.draw()
			got := w.x.Search(nil, q, 10, 64, nil)
			if want := w.nearest(q, 10, nil); got[9].Similarity < want[9].Similarity-max(spread*spread*4, 1e-6) {
				t.Errorf("spread %v: found %v, want %v", spread, got[9], want[9])
			}
		}
	}
}

// TestKeep: those that are wanted are found however few they are.
func TestKeep(t *testing.T) {
	w := newWorld(t, Config{Dim: 16, Crossover: -1})
	draw := newClusters(1, 16, 20, 0.5)
	w.fill(draw, 0, fewer(uint64(3000)))
	for _, share := range []uint64{1, 2, 10, 100, 1000, 3001} {
		keep := func(id uint64) bool { return id%share == share-1 }
		for range 40 {
			w.search(draw.draw(), 5, 32, keep)
		}
		if w.asked == 0 {
			continue // none is wanted, none was found
		}
		if one, all := w.recall(); one < .95 || all < .9 {
			t.Errorf("one of %d wanted: recall@1 %.3f, recall@5 %.3f", share, one, all)
		}
	}
}

// TestFewAreExact: up to the crossover, and where as many candidates are looked at as there are.
func TestFewAreExact(t *testing.T) {
	w := newWorld(t, Config{Dim: 8, M: 2, EfConstruction: 2, Crossover: 300})
	draw := newClusters(1, 8, 20, 0.5)
	for id := range uint64(300) {
		w.insert(id, draw.draw())
		w.search(draw.draw(), 10, 10, nil)
	}
	for id := uint64(300); id < 500; id++ {
		w.insert(id, draw.draw())
		w.search(draw.draw(), 10, 500, nil)
	}
	w.check()
	if one, all := w.recall(); one != 1 || all != 1 {
		t.Errorf("recall@1 %v, recall@10 %v", one, all)
	}
	if s := w.x.Stats(); s.Layers == 0 {
		t.Errorf("no graph above the crossover: %+v", s)
	}
	for len(w.ids) > 74 {
		w.remove(len(w.ids) / 2)
	}
	w.check()
	if s := w.x.Stats(); s.Layers != 0 {
		t.Errorf("a graph for a quarter of the crossover: %+v", s)
	}
	w.fill(draw, 1000, 1400)
	w.check()
	if s := w.x.Stats(); s.Layers == 0 {
		t.Errorf("no graph when many have come again: %+v", s)
	}
}

// TestDeterministic: the same writes make the same graph, whoever reads meanwhile.
func TestDeterministic(t *testing.T) {
	run := func(readers int) *graph {
		x := New(Config{Dim: 8, Seed: 4, Crossover: 200, MaxLen: 500})
		draw := newClusters(1, 8, 20, 0.5)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range readers {
			q := draw.centres[0]
			q = unit(slices.Clone(q)...)
			all.Go(func() {
				for ctx.Err() == nil {
					x.Search(nil, q, 10, 50, nil)
				}
			})
		}
		for id := range uint64(1200) {
			if err := x.Insert(id, draw.draw()); err != nil {
				t.Fatal(err)
			}
			if id >= 300 {
				x.Delete(id - 300 + id%7)
			}
			for x.Len() >= 500 {
				x.Delete(uint64(draw.random.IntN(int(id))))
			}
		}
		cancel()
		all.Wait()
		return x.graph
	}
	a, b := run(0), run(2)
	if a.entry != b.entry || len(a.layers) != len(b.layers) || !slices.Equal(a.ids, b.ids) || !slices.Equal(a.free, b.free) {
		t.Fatalf("entry %d and %d, layers %d and %d", a.entry, b.entry, len(a.layers), len(b.layers))
	}
	for i := range a.layers {
		if !slices.Equal(a.layers[i].links, b.layers[i].links) {
			t.Errorf("layer %d differs", i)
		}
	}
}

// TestReadersAndWriter: searches beside writes and rebuilds find nothing that was deleted before they began,
// nothing that never was, and all that is there all the time.
func TestReadersAndWriter(t *testing.T) {
	const fixed, moving = 200, 300
	x := New(Config{Dim: 16, EfConstruction: 60, Crossover: 100, MaxLen: fixed + moving})
	draw := newClusters(1, 16, 30, 0.5)
	vectors := make([][]float32, fixed+moving)
	for id := range vectors {
		vectors[id] = draw.draw()
		if id < fixed {
			if err := x.Insert(uint64(id), vectors[id]); err != nil {
				t.Fatal(err)
			}
		}
	}
	var gone atomic.Uint64 // ids of generations before this are deleted
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var searches, missed atomic.Int64
	for r := range 3 {
		all.Go(func() {
			var got []Neighbor
			for i := r; ctx.Err() == nil; i++ {
				before := gone.Load()
				want := uint64(i % fixed)
				got = x.Search(got[:0], vectors[want], 5, 64, nil)
				searches.Add(1)
				if len(got) == 0 || got[0].ID != want {
					missed.Add(1)
				}
				for _, n := range got {
					if n.ID >= fixed && n.ID/moving < before {
						t.Errorf("found %d of generation %d after %d were deleted", n.ID, n.ID/moving, before)
					}
				}
			}
		})
	}
	all.Go(func() {
		for ctx.Err() == nil {
			if err := x.Rebuild(ctx); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("rebuild: %v", err)
			}
		}
	})
	for generation := uint64(1); generation <= 4; generation++ {
		for i := range uint64(moving) {
			if err := x.Insert(generation*moving+i, vectors[fixed+i]); err != nil {
				t.Fatal(err)
			}
		}
		for i := range uint64(moving) {
			if !x.Delete(generation*moving + i) {
				t.Fatalf("%d is not there", generation*moving+i)
			}
		}
		gone.Store(generation + 1)
	}
	cancel()
	all.Wait()
	if x.Len() != fixed {
		t.Errorf("%d are left", x.Len())
	}
	if s, m := searches.Load(), missed.Load(); s == 0 || float64(m) > .02*float64(s) {
		t.Errorf("%d of %d searches did not find what was there all the time", m, s)
	}
}

func TestRebuildIsAsNew(t *testing.T) {
	c := Config{Dim: 16, Seed: 9, Crossover: -1}
	w := newWorld(t, c)
	draw := newClusters(1, 16, 20, 0.5)
	w.fill(draw, 0, 900)
	for range 600 {
		w.remove(0)
	}
	before := w.x.Bytes()
	if err := w.x.Rebuild(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.check()
	if s := w.x.Stats(); s.Slots > 320 || s.Dead != 0 || s.Bytes > before/2 {
		t.Errorf("after a rebuild: %+v, before %d bytes", s, before)
	}
	fresh := New(c)
	g := w.x.graph
	for slot := range g.used {
		if err := fresh.Insert(g.ids[slot], g.rows.vector(uint32(slot))); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(fresh.graph.layers[0].links, g.layers[0].links) || fresh.graph.entry != g.entry {
		t.Error("a rebuilt graph is not that of a new index")
	}
}

func TestRebuildEnds(t *testing.T) {
	x := New(Config{Dim: 2})
	if err := x.Insert(1, unit(1, 0)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := x.Rebuild(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: %v", err)
	}
	x.graph.journal = map[uint64]struct{}{}
	if err := x.Rebuild(t.Context()); !errors.Is(err, ErrRebuilds) {
		t.Errorf("beside another: %v", err)
	}
	x.graph.journal = nil
	if err := x.Rebuild(t.Context()); err != nil || x.Len() != 1 {
		t.Errorf("alone: %v, %d left", err, x.Len())
	}
}

// TestFullIndexTurnsOver: at MaxLen each insert takes the place of one that was deleted.
func TestFullIndexTurnsOver(t *testing.T) {
	for _, crossover := range []int{-1, 0} {
		w := newWorld(t, Config{Dim: 8, M: 4, EfConstruction: 16, MaxLen: 400, Crossover: crossover})
		draw := newClusters(1, 8, 20, 0.5)
		w.fill(draw, 0, 400)
		bytes := w.x.Bytes()
		for id := uint64(400); id < 3000; id++ {
			w.insert(id, draw.draw()) // refused
			w.remove(int(id) % len(w.ids))
			w.insert(id, draw.draw())
			if id%500 == 0 {
				w.check()
			}
		}
		if s := w.x.Stats(); s.Slots > 404 || s.Bytes > bytes+bytes/8+4096 {
			t.Errorf("%+v, %d bytes at first", s, bytes)
		}
	}
}

func TestBytes(t *testing.T) {
	one := New(Config{Dim: 384})
	if err := one.Insert(1, newClusters(1, 384, 1, 1).draw()); err != nil {
		t.Fatal(err)
	}
	if b := one.Bytes(); b > 1024+4*384 {
		t.Errorf("an index of one takes %d bytes", b)
	}
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	draw := newClusters(1, 64, 10, 1)
	vectors := make([][]float32, 3000)
	for i := range vectors {
		vectors[i] = draw.draw()
	}
	for _, c := range []Config{{Dim: 64}, {Dim: 64, Crossover: -1, M: 8, EfConstruction: 16}, {Dim: 64, Int8: true, Crossover: 1 << 20}} {
		before := heap()
		x := New(c)
		for id, v := range vectors {
			if err := x.Insert(uint64(id), v); err != nil {
				t.Fatal(err)
			}
		}
		took := heap() - before
		if b := x.Bytes(); b < took*9/10 || b > took*11/10+8192 {
			t.Errorf("%+v: says %d bytes, the heap %d", c, b, took)
		}
		runtime.KeepAlive(x)
	}
}

func TestSearchAllocatesNothing(t *testing.T) {
	draw := newClusters(1, 32, 10, 1)
	for _, c := range []Config{{Dim: 32}, {Dim: 32, Crossover: -1}, {Dim: 32, Crossover: -1, Int8: true}} {
		x := New(c)
		for id := range uint64(500) {
			if err := x.Insert(id, draw.draw()); err != nil {
				t.Fatal(err)
			}
		}
		q, dst := draw.draw(), make([]Neighbor, 0, 10)
		if n := testing.AllocsPerRun(100, func() { dst = x.Search(dst[:0], q, 10, 64, nil) }); n > 0 && !raceEnabled {
			t.Errorf("%+v: %v allocations a search", c, n)
		}
	}
}

func TestCrossover(t *testing.T) {
	// A clock that says that a row anywhere costs so many times one in order.
	for _, c := range []struct {
		inOrder, anywhere time.Duration // of 1,024 rows
		want              int
	}{
		{1024 * 20, 1024 * 30, 700 * (30 + 20) / 20},
		{1024 * 400, 1024 * 400, 700 * (400 + 20) / 400},
		{1, 1 << 40, 16_384},
		{1 << 40, 1, 256},
	} {
		at, calls := time.Unix(0, 0), 0
		clock := func() time.Time {
			switch calls++; calls % 3 {
			case 2:
				at = at.Add(c.inOrder)
			case 0:
				at = at.Add(c.anywhere)
			}
			return at
		}
		if got := Crossover(16, clock); got != c.want {
			t.Errorf("%v in order and %v anywhere: %d, want %d", c.inOrder, c.anywhere, got, c.want)
		}
	}
}

// TestGate: a wait ends when those have left that had come before, not when those have that came since.
func TestGate(t *testing.T) {
	var g gate
	early := g.enter()
	over := make(chan struct{})
	go func() { g.wait(); close(over) }()
	for g.phase.Load() == 0 { // the writer has turned the phase
		runtime.Gosched()
	}
	late := g.enter()
	select {
	case <-over:
		t.Fatal("the wait ended before a reader of before had left")
	default:
	}
	g.leave(early)
	<-over
	g.leave(late)
	g.wait()
}
