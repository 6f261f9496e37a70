package hnsw

import "sync/atomic"

// A vector that equals one in the graph, to the bit, gets no vertex of its own but becomes its
// twin: thousands of equal vectors, each the nearest of all others, would link to nothing else.
// A vertex and its twins form a ring: twin[slot] is the next slot of it + 1, or 0 where a
// slot has no twins, with twinFlag where the slot is a twin. When the vector of the vertex is deleted, a twin
// gives it its id, and its own slot goes: the vertex goes last.

const twinFlag = 1 << 31

// next is the slot behind one in its ring, none where it is in no ring.
func (v *view) next(slot uint32) uint32 {
	if v.twin == nil {
		return none
	}
	return atomic.LoadUint32(&v.twin[slot])&^twinFlag - 1
}

func (v *view) isTwin(slot uint32) bool {
	return v.twin != nil && atomic.LoadUint32(&v.twin[slot])&twinFlag != 0
}

// join makes slot a twin of vertex.
func (g *graph) join(vertex, slot uint32) {
	if g.twin == nil {
		g.twin = make([]uint32, len(g.ids))
		g.changed = true
	}
	after := g.next(vertex)
	if after == none {
		after = vertex
	}
	atomic.StoreUint32(&g.twin[slot], (after+1)|twinFlag)
	atomic.StoreUint32(&g.twin[vertex], slot+1)
	g.twins++
}

// succeed gives a vertex the id of a twin, whose slot is returned; it is still in the ring.
func (g *graph) succeed(vertex uint32) (twin uint32) {
	twin = g.next(vertex)
	id := g.ids[twin]
	g.table.remove(g.ids, id)
	clearBit(g.live, twin) // first, so that no search finds the id twice
	atomic.StoreUint64(&g.ids[vertex], id)
	g.table.put(g.ids, vertex)
	g.note(id)
	return twin
}

// part takes a twin out of its ring. What it pointed at stays, for readers that stand on it.
func (g *graph) part(twin uint32) {
	before, vertex := twin, uint32(none)
	for at := g.next(twin); at != twin; at = g.next(at) {
		if !g.isTwin(at) {
			vertex = at
		}
		before = at
	}
	switch after := g.next(twin); {
	case after == before: // the vertex alone is left
		atomic.StoreUint32(&g.twin[vertex], 0)
	case before == vertex:
		atomic.StoreUint32(&g.twin[vertex], after+1)
	default:
		atomic.StoreUint32(&g.twin[before], (after+1)|twinFlag)
	}
	g.twins--
}
