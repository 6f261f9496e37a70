package hnsw

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"headgate/cache/vec"
)

// clusters draws vectors of unit length near to some of count centres, the first the most often.
type clusters struct {
	random  *rand.Rand
	centres [][]float32
	spread  float32
}

func newClusters(seed uint64, dim, count int, spread float32) *clusters {
	c := &clusters{random: rand.New(rand.NewPCG(seed, 1)), spread: spread}
	for range count {
		c.centres = append(c.centres, c.gauss(dim))
	}
	return c
}

func (c *clusters) gauss(dim int) []float32 {
	v := make([]float32, dim)
	for i := range v {
		v[i] = float32(c.random.NormFloat64())
	}
	return v
}

func (c *clusters) draw() []float32 {
	f := c.random.Float64()
	centre := c.centres[int(f*f*float64(len(c.centres)))]
	v := c.gauss(len(centre))
	for i := range v {
		v[i] = centre[i] + c.spread*v[i]
	}
	vec.Norm(v)
	return v
}

// world is an index, and a list that is looked through in its place.
type world struct {
	t interface {
		Helper()
		Fatalf(string, ...any)
	}
	x       *Index
	ids     []uint64 // the oldest first, but for swaps
	vectors map[uint64][]float32

	asked, wanted, hits, first int // of searches: recall
}

func newWorld(t *testing.T, c Config) *world {
	return &world{t: t, x: New(c), vectors: make(map[uint64][]float32)}
}

func (w *world) insert(id uint64, v []float32) {
	w.t.Helper()
	_, exists := w.vectors[id]
	err := w.x.Insert(id, v)
	switch full := len(w.ids) == w.x.config.MaxLen; {
	case exists:
		if !errors.Is(err, ErrExists) {
			w.t.Fatalf("insert of %d again: %v", id, err)
		}
	case full:
		if !errors.Is(err, ErrFull) {
			w.t.Fatalf("insert into a full index: %v", err)
		}
	case err != nil:
		w.t.Fatalf("insert: %v", err)
	default:
		w.ids = append(w.ids, id)
		w.vectors[id] = v
	}
}

// remove deletes the ith id, or one that is not there.
func (w *world) remove(i int) {
	w.t.Helper()
	if i >= len(w.ids) {
		if w.x.Delete(1 << 60) {
			w.t.Fatalf("deleted what is not there")
		}
		return
	}
	id := w.ids[i]
	w.ids = slices.Delete(w.ids, i, i+1)
	delete(w.vectors, id)
	if !w.x.Delete(id) || w.x.Delete(id) {
		w.t.Fatalf("%d is to be deleted once", id)
	}
}

// nearest is what a look at all finds.
func (w *world) nearest(q []float32, k int, keep func(uint64) bool) []Neighbor {
	var found []Neighbor
	for _, id := range w.ids {
		v := w.vectors[id]
		if keep != nil && !keep(id) {
			continue
		}
		n := Neighbor{id, min(max(vec.Dot(q, v), -1), 1)}
		if len(found) == k && n.Similarity <= found[k-1].Similarity {
			continue
		}
		at, _ := slices.BinarySearchFunc(found, n, func(a, b Neighbor) int { return cmp.Compare(b.Similarity, a.Similarity) })
		found = slices.Insert(found, at, n)
		found = found[:min(k, len(found))]
	}
	return found
}

// search compares a search with a look at all, and counts what it misses. What it must never do
// fails the test.
func (w *world) search(q []float32, k, ef int, keep func(uint64) bool) {
	w.t.Helper()
	want := w.nearest(q, k, keep)
	got := w.x.Search(nil, q, k, ef, keep)
	if len(got) != len(want) {
		w.t.Fatalf("found %d of %d, with %d in the index", len(got), len(want), len(w.ids))
	}
	seen := make(map[uint64]bool)
	for i, n := range got {
		v, ok := w.vectors[n.ID]
		if !ok || seen[n.ID] || keep != nil && !keep(n.ID) {
			w.t.Fatalf("found %d: in the index %v, twice %v", n.ID, ok, seen[n.ID])
		}
		seen[n.ID] = true
		if s := vec.Dot(q, v); !w.x.config.Int8 && n.Similarity != min(max(s, -1), 1) || w.x.config.Int8 && max(s-n.Similarity, n.Similarity-s) > 0.03 {
			w.t.Fatalf("found %d with similarity %v, it has %v", n.ID, n.Similarity, s)
		}
		if i > 0 && n.Similarity > got[i-1].Similarity {
			w.t.Fatalf("found a better one behind: %v", got)
		}
	}
	if len(want) == 0 {
		return
	}
	w.asked++
	w.wanted += len(want)
	// Equal similarities are as good: twins, and what int8 cannot tell apart.
	if w.true(q, got[0]) >= want[0].Similarity {
		w.first++
	}
	for _, n := range got {
		if w.true(q, n) >= want[len(want)-1].Similarity {
			w.hits++
		}
	}
}

func (w *world) true(q []float32, n Neighbor) float32 {
	return min(max(vec.Dot(q, w.vectors[n.ID]), -1), 1)
}

// recall is the share of searches whose best was found, and of all that was to be found; counting begins anew.
func (w *world) recall() (one, all float64) {
	one, all = float64(w.first)/float64(w.asked), float64(w.hits)/float64(w.wanted)
	w.asked, w.wanted, w.hits, w.first = 0, 0, 0, 0
	return one, all
}

// check looks for what must hold between writes.
func (w *world) check() {
	w.t.Helper()
	x := w.x
	x.mu.Lock()
	defer x.mu.Unlock()
	g := x.graph
	if g.length != len(w.ids) || x.Len() != len(w.ids) {
		w.t.Fatalf("length %d and %d, want %d", g.length, x.Len(), len(w.ids))
	}
	if len(g.ids) > g.mostSlots() {
		w.t.Fatalf("%d slots for %d vectors", len(g.ids), g.config.MaxLen)
	}
	for _, id := range w.ids {
		slot, ok := g.table.find(g.ids, id)
		if !ok || !g.isLive(slot) || g.ids[slot] != id {
			w.t.Fatalf("%d is in slot %d (%v) where %d is", id, slot, ok, g.ids[slot])
		}
	}
	w.checkSlots(g)
	for i := range g.layers {
		w.checkLayer(g, i)
	}
	if len(g.layers) > 0 && !w.isVertex(g, g.layers[len(g.layers)-1].slotOf(g.entry)) {
		w.t.Fatalf("the entry is no vertex")
	}
}

func (w *world) isVertex(g *graph, slot uint32) bool { return g.isLinked(slot) && !g.isTwin(slot) }

// checkSlots holds each slot to be in one state only.
func (w *world) checkSlots(g *graph) {
	w.t.Helper()
	idle := make(map[uint32]string)
	for name, slots := range map[string][]uint32{"free": g.free, "limbo": g.limbo, "dead": g.dead, "leaving": g.leaving} {
		for _, slot := range slots {
			if was, twice := idle[slot]; twice || g.isLive(slot) {
				w.t.Fatalf("slot %d is %s and %q, live %v", slot, name, was, g.isLive(slot))
			}
			idle[slot] = name
		}
	}
	standing, twins := 0, 0
	for slot := range uint32(g.used) {
		state, isIdle := idle[slot]
		onGraph := g.isLinked(slot)
		switch {
		case onGraph && g.isTwin(slot):
			twins++
			if !g.isLive(slot) {
				w.t.Fatalf("twin %d is not live", slot)
			}
		case onGraph && g.isLive(slot):
			standing++
		case onGraph && state != "dead" && state != "leaving", !onGraph && isIdle && state != "free" && state != "limbo":
			w.t.Fatalf("slot %d, linked %v, is %q", slot, onGraph, state)
		}
		if isIdle == g.isLive(slot) {
			w.t.Fatalf("slot %d: live %v, %q", slot, g.isLive(slot), state)
		}
		if g.ready && g.isLive(slot) && !onGraph {
			w.t.Fatalf("slot %d is not in the graph", slot)
		}
	}
	if standing != g.standing || twins != g.twins || g.length+len(idle) != g.used {
		w.t.Fatalf("%d stand of %d, %d twins of %d; %d live and %d idle of %d", standing, g.standing, twins, g.twins, g.length, len(idle), g.used)
	}
}

// checkLayer holds links to lead to other vertices, once.
func (w *world) checkLayer(g *graph, i int) {
	w.t.Helper()
	l := &g.layers[i]
	for vertex := range uint32(g.taken(i)) {
		slot := l.slotOf(vertex)
		list := l.list(vertex)
		list = list[:count(list)]
		if slot == none || !w.isVertex(g, slot) {
			continue
		}
		if i > 0 && g.layers[i-1].slotOf(l.down[vertex]) != slot {
			w.t.Fatalf("layer %d: below slot %d is another", i, slot)
		}
		seen := make(map[uint32]bool)
		for _, to := range list {
			if to == vertex || seen[to] || int(to) >= g.taken(i) || l.slotOf(to) == none || !w.isVertex(g, l.slotOf(to)) {
				w.t.Fatalf("layer %d: %d links to %d, which is no other vertex (twice: %v)", i, vertex, to, seen[to])
			}
			seen[to] = true
		}
	}
}
