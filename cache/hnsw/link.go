package hnsw

import (
	"math"
	"slices"
	"sync/atomic"
)

// alike is the similarity from which two vectors differ by little more than rounding. Which of many of them hides
// which is chance; they get half of a list at most, or links would lead nowhere else.
const alike = 1 - 1e-6

// link makes a vector a vertex (algorithm 1), or the twin of one.
func (g *graph) link(s *scratch, slot uint32) {
	g.setLinked(slot, true)
	height, top := g.draw(), len(g.layers)-1
	q := g.rows.at(slot)
	if top >= 0 {
		vertex, similarity := s.approach(&g.view, q, min(height, top))
		for i := min(height, top); ; i-- {
			g.candidates(s, i, q, vertex, similarity)
			if i == 0 {
				break
			}
			s.chosen[i] = g.pick(s, i, s.keys, s.chosen[i][:0], g.config.M)
			vertex, similarity = g.layers[i].down[vertexOf(s.pool[0])], similarityOf(s.pool[0])
		}
		if vertex := g.equal(s, q); vertex != none {
			g.join(vertex, slot)
			return
		}
		s.chosen[0] = g.pick(s, 0, s.keys, s.chosen[0][:0], g.config.M)
	}
	g.standing++
	vertex := slot
	for i := range height + 1 {
		vertex = g.place(i, slot, vertex)
		if i > top {
			continue
		}
		store(g.layers[i].list(vertex), s.chosen[i])
		for _, neighbor := range s.chosen[i] {
			g.linkBack(s, i, neighbor, vertex)
		}
	}
	if height > top {
		g.entry, g.changed = vertex, true
	}
}

// draw is the highest layer that a new vertex is in.
func (g *graph) draw() int {
	return min(int(-math.Log(1-g.random.Float64())/math.Log(float64(g.config.M))), maxLayers-1)
}

// candidates sets s.keys to the vertices of a layer near q that stand, best first.
func (g *graph) candidates(s *scratch, layer int, q row, from uint32, similarity float32) {
	l := &g.layers[layer]
	for ef := g.config.EfConstruction; ; ef *= 4 {
		s.explore(&g.view, l, q, from, similarity, ef)
		s.keys = s.keys[:0]
		for _, key := range s.pool {
			if g.isLive(l.slotOf(vertexOf(key))) {
				s.keys = append(s.keys, key&^1)
			}
		}
		// All of ef may have been deleted; then wider, as far as the layer goes.
		if len(s.keys) >= g.config.M || len(s.pool) < ef {
			return
		}
	}
}

// equal is a vertex among s.keys of the lowest layer whose vector is q, or none.
func (g *graph) equal(s *scratch, q row) uint32 {
	for _, key := range s.keys {
		if similarityOf(key) < 0.999 {
			break
		}
		if g.rows.equal(vertexOf(key), q) {
			return vertexOf(key)
		}
	}
	return none
}

// pick adds to chosen, up to most, those of keys (best first) that are nearer to the vertex they are
// for than to any that is chosen: the heuristic of algorithm 4, so that links lead into
// all directions. Like hnswlib it fills up with none of the others, but prunes nothing where there are
// fewer than most to begin with.
func (g *graph) pick(s *scratch, layer int, keys []uint64, chosen []uint32, most int) []uint32 {
	l := &g.layers[layer]
	if len(chosen) == 0 && len(keys) < most {
		for _, key := range keys {
			chosen = append(chosen, vertexOf(key))
		}
		return chosen
	}
	s.near = s.near[:0]
	for _, vertex := range chosen {
		s.near = append(s.near, l.slotOf(vertex))
	}
	alikes := 0
	for _, key := range keys {
		if len(chosen) >= most {
			break
		}
		if similarityOf(key) >= alike {
			if alikes++; alikes > most/2 {
				continue
			}
		}
		slot := l.slotOf(vertexOf(key))
		if !g.hidden(s, slot, similarityOf(key)) {
			chosen = append(chosen, vertexOf(key))
			s.near = append(s.near, slot)
		}
	}
	return chosen
}

// hidden says whether a slot of s.near is more similar to slot than similarity.
func (g *graph) hidden(s *scratch, slot uint32, similarity float32) bool {
	const batch = 8 // most that are hidden are so by one of the first
	q := g.rows.at(slot)
	for near := s.near; len(near) > 0; {
		n := min(batch, len(near))
		for _, other := range s.score(&g.rows, q, near[:n]) {
			if other > similarity {
				return true
			}
		}
		near = near[n:]
	}
	return false
}

// place makes a vertex for slot in a layer, which may be a new one on top.
func (g *graph) place(layer int, slot, below uint32) uint32 {
	if layer == len(g.layers) {
		g.raise()
	}
	if layer == 0 {
		return slot
	}
	t := &g.tiers[layer]
	var vertex uint32
	if last := len(t.free) - 1; last >= 0 {
		vertex, t.free = t.free[last], t.free[:last]
	} else {
		vertex = uint32(t.used)
		if t.used++; t.used > g.layers[layer].vertices() {
			g.widen(layer, roomier(t.used))
		}
	}
	g.layers[layer].slot[vertex], g.layers[layer].down[vertex] = slot, below
	return vertex
}

// raise adds a layer on top.
func (g *graph) raise() {
	l := layer{width: g.config.M}
	if len(g.layers) == 0 {
		l.width *= 2
		l.links = moreLinks(nil, len(g.ids)*l.width)
	}
	g.layers, g.tiers = append(g.layers, l), append(g.tiers, tier{})
	g.changed = true
}

// linkBack links from a vertex to one that links to it; where it has no room it keeps those that
// pick picks.
func (g *graph) linkBack(s *scratch, layer int, from, to uint32) {
	l := &g.layers[layer]
	list := l.list(from)
	n := count(list)
	if n < len(list) {
		atomic.StoreUint32(&list[n], to)
		return
	}
	s.list = append(append(s.list[:0], list...), to)
	g.rank(s, layer, from, s.list)
	s.list = g.pick(s, layer, s.keys, s.list[:0], len(list))
	store(list, s.list)
}

// rank sets s.keys to vertices in the order of their similarity to one.
func (g *graph) rank(s *scratch, layer int, to uint32, vertices []uint32) {
	l := &g.layers[layer]
	s.slots = sized(s.slots, len(vertices))
	s.keys = s.keys[:0]
	for i, similarity := range s.score(&g.rows, g.rows.at(l.slotOf(to)), l.slots(vertices, s.slots)) {
		s.keys = append(s.keys, keyOf(similarity, vertices[i]))
	}
	slices.Sort(s.keys)
}

// count is the length of a list, as the writer sees it.
func count(list []uint32) int {
	for n, v := range list {
		if v == none {
			return n
		}
	}
	return len(list)
}

// store makes vertices the list. A reader may meanwhile see some of the old links and some of
// the new, which are all good.
func store(list, vertices []uint32) {
	for i := range list {
		v := uint32(none)
		if i < len(vertices) {
			v = vertices[i]
		}
		if list[i] != v {
			atomic.StoreUint32(&list[i], v)
		}
	}
}

func erase(list []uint32) { store(list, nil) }
