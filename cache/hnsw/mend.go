package hnsw

import "slices"

// Deleted vertices stay, to lead searches on, until nothing links to them any more. A pass
// over all lists replaces the links to them by links to what they linked to, as FreshDiskANN's consolidation
// does (Singh et al., arXiv 2105.09613, algorithm 4), a piece with every write. New links never lead to
// a deleted vertex; so those that were deleted before a pass began are free of links when it ends.

const (
	deadShare = 256 // a pass begins when one in so many vertices is dead
	mendStep  = 512 // lists that a write looks at: a pass ends before the next is due
)

// mending is a pass under way.
type mending struct {
	leaving []uint32   // slots of vertices that were dead when it began; empty: no pass
	leaves  []uint64   // a bit a slot: it is one of those
	gone    [][]uint32 // their vertices, by layer
	layer   int        // that the pass is in; it goes down
	at      uint32     // the next vertex
}

func (m *mending) bytes() int { return 4*2*cap(m.leaving) + 8*cap(m.leaves) }

// startMending begins a pass, if none is under way and there is something to mend.
func (g *graph) startMending() {
	if len(g.leaving) > 0 || len(g.dead) == 0 {
		return
	}
	g.mending = mending{
		leaving: g.dead,
		leaves:  make([]uint64, len(g.linked)),
		gone:    make([][]uint32, len(g.layers)),
		layer:   len(g.layers) - 1,
	}
	for _, slot := range g.dead {
		g.leaves[slot/64] |= 1 << (slot % 64)
	}
	g.dead = nil
}

func (g *graph) isLeaving(slot uint32) bool {
	return int(slot/64) < len(g.leaves) && g.leaves[slot/64]>>(slot%64)&1 != 0
}

// mend looks at so many lists, if there is need.
func (g *graph) mend(s *scratch, lists int) {
	if len(g.dead)*deadShare > g.standing {
		g.startMending()
	}
	if len(g.leaving) == 0 {
		return
	}
	for ; lists > 0; lists-- {
		for int(g.at) >= g.taken(g.layer) {
			if g.layer == 0 {
				g.bury()
				return
			}
			g.layer, g.at = g.layer-1, 0
		}
		g.visit(s, g.layer, g.at)
		g.at++
	}
}

// taken is the number of vertices of a layer that have ever been taken.
func (g *graph) taken(layer int) int {
	if layer == 0 {
		return g.used
	}
	return g.tiers[layer].used
}

// visit mends the list of a vertex, or notes that it goes.
func (g *graph) visit(s *scratch, layer int, vertex uint32) {
	switch slot := g.layers[layer].slotOf(vertex); {
	case slot == none || !g.isLinked(slot) || g.isTwin(slot): // no vertex
	case !g.isLeaving(slot):
		g.mendList(s, layer, vertex)
	case layer > 0:
		g.gone[layer] = append(g.gone[layer], vertex)
	}
}

// mendList replaces the links of a vertex to the dead, and links back from where the new ones lead: else
// what only the dead linked to would be lost.
func (g *graph) mendList(s *scratch, layer int, vertex uint32) {
	l := &g.layers[layer]
	list := l.list(vertex)
	n := count(list)
	chosen := s.chosen[layer][:0]
	for _, to := range list[:n] {
		if g.isLive(l.slotOf(to)) {
			chosen = append(chosen, to)
		}
	}
	if kept := len(chosen); kept < n {
		g.heirs(s, layer, vertex, list[:n])
		chosen = g.pick(s, layer, s.keys, chosen, len(list))
		live := g.isLive(l.slotOf(vertex))
		if live && len(chosen) < l.width/8 { // a whole neighbourhood is gone
			g.strangers(s, layer, vertex, chosen)
			chosen = g.pick(s, layer, s.keys, chosen, g.config.M)
		}
		store(list, chosen)
		for _, to := range chosen[kept:] {
			if back := l.list(to); live && !slices.Contains(back, vertex) {
				g.linkBack(s, layer, to, vertex)
			}
		}
	}
	s.chosen[layer] = chosen
}

// heirs sets s.keys to what stands of that to which the dead of a list link, best first, but
// for what is in the list.
func (g *graph) heirs(s *scratch, layer int, vertex uint32, list []uint32) {
	l := &g.layers[layer]
	s.seenNone(l.vertices())
	s.saw(vertex)
	for _, to := range list {
		s.saw(to)
	}
	s.near = s.near[:0]
	for _, to := range list {
		if g.isLive(l.slotOf(to)) {
			continue
		}
		for _, heir := range s.unseen(l.list(to)) {
			if g.isLive(l.slotOf(heir)) {
				s.near = append(s.near, heir)
			}
		}
	}
	g.rank(s, layer, vertex, s.near)
}

// strangers sets s.keys to the vertices that stand which a search for one finds, but for those in chosen.
func (g *graph) strangers(s *scratch, layer int, vertex uint32, chosen []uint32) {
	q := g.rows.at(g.layers[layer].slotOf(vertex))
	from, similarity := s.approach(&g.view, q, layer)
	g.candidates(s, layer, q, from, similarity)
	s.keys = slices.DeleteFunc(s.keys, func(key uint64) bool {
		return vertexOf(key) == vertex || slices.Contains(chosen, vertexOf(key))
	})
}

// bury ends a pass: nothing links to what leaves.
func (g *graph) bury() {
	top := len(g.layers) - 1
	if g.isLeaving(g.layers[top].slotOf(g.entry)) {
		g.enterElsewhere()
	}
	for i := 1; i < min(len(g.layers), len(g.gone)); i++ { // there may be new layers, and fewer
		g.tiers[i].limbo = append(g.tiers[i].limbo, g.gone[i]...)
	}
	for _, slot := range g.leaving {
		g.setLinked(slot, false)
	}
	g.limbo = append(g.limbo, g.leaving...)
	g.mending = mending{}
}

// enterElsewhere makes the first vertex of the highest layer that stands the entry. Layers in
// which none does go.
func (g *graph) enterElsewhere() {
	g.changed = true
	for top := len(g.layers) - 1; top >= 0; top-- {
		for vertex := range uint32(g.taken(top)) {
			slot := g.layers[top].slotOf(vertex)
			if slot != none && g.isLinked(slot) && !g.isTwin(slot) && g.isLive(slot) {
				g.layers, g.tiers, g.entry = g.layers[:top+1:top+1], g.tiers[:top+1], vertex
				return
			}
		}
	}
	panic("hnsw: no vertex stands, and the graph was not dropped")
}
