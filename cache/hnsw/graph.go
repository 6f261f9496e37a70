package hnsw

import (
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"unsafe"
)

const (
	maxLayers = 16 // with M 2, as many as 65,536 vectors have
	absorbed  = 3  // vectors that are linked with each that comes, until all are
	ownBytes  = int64(unsafe.Sizeof(Index{}) + unsafe.Sizeof(view{}) + unsafe.Sizeof(graph{}) + unsafe.Sizeof(rand.PCG{}) + unsafe.Sizeof(rand.Rand{}))
)

// graph is what the writer of an Index has: the view as it stands, and what readers do not need.
// It is deterministic: the same writes in the same order make the same graph, whatever readers do.
type graph struct {
	view
	config   Config
	random   *rand.Rand
	wait     func()   // for the readers of now; nil while none reads this graph
	changed  bool     // readers need a new view
	table    table    // slots by id
	linked   []uint64 // a bit a slot: it is in the graph, as a vertex or a twin
	length   int      // vectors
	used     int      // slots that have ever been taken
	twins    int
	standing int                 // vertices of the lowest layer that are live
	pending  uint32              // while a graph is begun: slots below are linked, or need not be
	free     []uint32            // slots
	limbo    []uint32            // slots that nothing links to, but which readers of before may hold
	tiers    []tier              // what the writer keeps of each layer
	dead     []uint32            // slots of vertices that are deleted, and may be linked to
	journal  map[uint64]struct{} // ids written, or moved to another slot, since a rebuild last asked; nil: there is none
	mending
}

// tier is what the writer keeps of a layer.
type tier struct {
	used  int      // vertices that have ever been taken; of the lowest layer: see graph
	free  []uint32 // of a layer above the lowest
	limbo []uint32
}

func newGraph(c Config) *graph {
	return &graph{
		view:    view{rows: rows{dim: c.Dim}, entry: none},
		config:  c,
		random:  rand.New(rand.NewPCG(c.Seed, 0x9e3779b97f4a7c15)),
		changed: true,
	}
}

// insert adds a vector, whose id is new, and of which there may be one more.
func (g *graph) insert(s *scratch, id uint64, q row) {
	slot := g.take(s)
	g.rows.set(slot, q)
	g.ids[slot] = id
	g.table.put(g.ids, slot)
	g.note(id)
	g.length++
	if len(g.layers) > 0 || g.length > g.config.Crossover/2 {
		g.link(s, slot)
		g.absorb(s)
	}
	setBit(g.live, slot)
	g.mend(s, mendStep)
}

// remove deletes a vector.
func (g *graph) remove(s *scratch, id uint64) bool {
	slot, ok := g.table.find(g.ids, id)
	if !ok {
		return false
	}
	g.table.remove(g.ids, id)
	g.note(id)
	if g.isLinked(slot) && !g.isTwin(slot) && g.next(slot) != none {
		slot = g.succeed(slot)
	}
	clearBit(g.live, slot)
	g.length--
	switch {
	case !g.isLinked(slot):
		g.limbo = append(g.limbo, slot)
	case g.isTwin(slot):
		g.part(slot)
		g.setLinked(slot, false)
		g.limbo = append(g.limbo, slot)
	default:
		g.dead = append(g.dead, slot)
		g.standing--
	}
	if g.length < g.config.Crossover/4 || g.standing == 0 {
		g.drop()
	}
	g.mend(s, mendStep)
	return true
}

// note tells a rebuild of an id.
func (g *graph) note(id uint64) {
	if g.journal != nil {
		g.journal[id] = struct{}{}
	}
}

// absorb links some of the vectors that came before the graph was begun.
func (g *graph) absorb(s *scratch) {
	if g.ready {
		return
	}
	for n := 0; n < absorbed && g.pending < uint32(g.used); g.pending++ {
		if !g.isLinked(g.pending) && g.isLive(g.pending) {
			g.link(s, g.pending)
			n++
		}
	}
	if g.pending == uint32(g.used) {
		g.ready, g.changed = true, true
	}
}

// drop forgets the graph: few are left, and all will be looked at.
func (g *graph) drop() {
	if len(g.layers) == 0 {
		return
	}
	for slot := range uint32(g.used) { // the dead, and those that leave
		if g.isLinked(slot) && !g.isLive(slot) {
			g.limbo = append(g.limbo, slot)
		}
	}
	g.dead, g.mending = nil, mending{}
	g.layers, g.tiers, g.twin, g.entry, g.ready = nil, nil, nil, none, false
	g.twins, g.standing, g.pending = 0, 0, 0
	clear(g.linked)
	g.changed = true
}

// take finds a slot for a vector that comes.
func (g *graph) take(s *scratch) uint32 {
	switch most := g.mostSlots(); {
	case len(g.free) > 0:
	case g.used < len(g.ids):
		g.used++
		return uint32(g.used - 1)
	case len(g.limbo) > 0:
		g.reclaim()
	case len(g.ids) < most:
		g.grow(most)
		g.used++
		return uint32(g.used - 1)
	default: // the places that are not live are dead
		for len(g.limbo) == 0 {
			g.startMending()
			g.mend(s, len(g.ids))
		}
		g.reclaim()
	}
	last := len(g.free) - 1
	slot := g.free[last]
	g.free = g.free[:last]
	return slot
}

// mostSlots is how many slots there may be: some more than vectors, so that not every
// delete in a full index must be mended at once.
func (g *graph) mostSlots() int { return g.config.MaxLen + g.config.MaxLen/128 + 1 }

// reclaim frees what is in limbo, when the readers that may hold it have left.
func (g *graph) reclaim() {
	if g.wait != nil {
		g.wait()
	}
	for _, slot := range g.limbo {
		if g.twin != nil {
			atomic.StoreUint32(&g.twin[slot], 0)
		}
		if len(g.layers) > 0 {
			erase(g.layers[0].list(slot))
		}
	}
	g.free, g.limbo = g.limbo, g.free[:0]
	slices.Reverse(g.free) // taken from the end: the first that was deleted comes first
	for i := range g.tiers {
		t := &g.tiers[i]
		for _, v := range t.limbo {
			g.layers[i].slot[v] = none
			erase(g.layers[i].list(v))
		}
		t.free, t.limbo = append(t.free, t.limbo...), t.limbo[:0]
	}
}

// grow makes room for more slots, in new arrays: readers of the old ones see what was.
func (g *graph) grow(most int) {
	n := roomier(len(g.ids))
	if len(g.ids) < g.config.MaxLen {
		n = min(n, g.config.MaxLen)
	} else {
		n = min(n, most)
	}
	g.rows = g.rows.grown(n, g.config.Int8)
	g.ids = grown(g.ids, n)
	g.live = grown(g.live, (n+31)/32)
	g.linked = grown(g.linked, (n+63)/64)
	if g.twin != nil {
		g.twin = grown(g.twin, n)
	}
	g.table.grow(g.ids, n)
	g.widen(0, n)
}

// roomier is the next size of arrays of n: a sixteenth more, so that little lies idle.
func roomier(n int) int { return n + n/16 + 1 }

// widen makes room for so many vertices in a layer. The layers above it get new arrays, too: what is written
// to them from now on may lead to vertices that readers of the old arrays do not have.
func (g *graph) widen(layer, vertices int) {
	for i := layer; i < len(g.layers); i++ {
		l := &g.layers[i]
		n := l.vertices()
		if i == layer {
			n = vertices
		}
		l.links = moreLinks(l.links, n*l.width)
		if i > 0 {
			l.slot, l.down = grown(l.slot, n), grown(l.down, n)
		}
	}
	g.changed = true
}

// moreLinks is a copy of links, with empty lists behind.
func moreLinks(links []uint32, n int) []uint32 {
	more := grown(links, n)
	for i := len(links); i < n; i++ {
		more[i] = none
	}
	return more
}

func (g *graph) isLinked(slot uint32) bool { return g.linked[slot/64]>>(slot%64)&1 != 0 }

func (g *graph) setLinked(slot uint32, is bool) {
	if is {
		g.linked[slot/64] |= 1 << (slot % 64)
	} else {
		g.linked[slot/64] &^= 1 << (slot % 64)
	}
}

func setBit(words []uint32, i uint32)   { atomic.OrUint32(&words[i/32], 1<<(i%32)) }
func clearBit(words []uint32, i uint32) { atomic.AndUint32(&words[i/32], ^uint32(1<<(i%32))) }

// bytes is what the arrays have allocated.
func (g *graph) bytes() int64 {
	n := 4*cap(g.rows.f) + cap(g.rows.b) + 4*cap(g.rows.scale) + 8*cap(g.ids) + 4*cap(g.live) + 4*cap(g.twin)
	n += 4*cap(g.table.cells) + 8*cap(g.linked) + 4*(cap(g.free)+cap(g.limbo)+cap(g.dead))
	n += g.mending.bytes()
	for i := range g.layers {
		l, t := &g.layers[i], &g.tiers[i]
		n += 4 * (cap(l.links) + cap(l.slot) + cap(l.down) + cap(t.free) + cap(t.limbo))
		n += 2*int(unsafe.Sizeof(*l)) + int(unsafe.Sizeof(*t))
	}
	return int64(n)
}
