package hnsw

import (
	"math"
	"slices"
	"sync/atomic"

	"headgate/cache/vec"
)

// none is no vertex.
const none = math.MaxUint32

// view is the arrays of a graph as readers see them. Readers share them with the writer, which
// changes links, live, ids and twin by atomic stores, and anything else only where no reader looks:
// in slots that are not live and that nothing links to. Where an array must grow, or the entry
// changes, readers get a new view.
type view struct {
	rows   rows
	ids    []uint64 // by slot; see succeed
	live   []uint32 // a bit a slot: its vector is to be found
	twin   []uint32 // by slot, see twins.go; nil until the first
	layers []layer  // from the lowest, which has a vertex for every vector, to the highest
	entry  uint32   // a vertex of the highest layer, where searches begin; none: no layers
	ready  bool     // all live vectors are in the graph
}

func (v *view) clone() *view {
	c := *v
	c.layers = slices.Clone(v.layers)
	return &c
}

func (v *view) isLive(slot uint32) bool {
	return atomic.LoadUint32(&v.live[slot/32])>>(slot%32)&1 != 0
}

func (v *view) id(slot uint32) uint64 { return atomic.LoadUint64(&v.ids[slot]) }

// layer is a graph over vertices, which it numbers for itself: in the lowest layer they are
// slots, in those above each has its slot and its vertex in the layer below.
type layer struct {
	width int
	links []uint32 // width a vertex; the first none ends a list
	slot  []uint32 // by vertex; none: it is free. Nil in the lowest layer
	down  []uint32 // by vertex; nil in the lowest layer
}

func (l *layer) list(vertex uint32) []uint32 {
	return l.links[int(vertex)*l.width:][:l.width]
}

func (l *layer) slotOf(vertex uint32) uint32 {
	if l.slot == nil {
		return vertex
	}
	return l.slot[vertex]
}

// slots are the slots of vertices; the result may be vertices itself, or is in buf.
func (l *layer) slots(vertices, buf []uint32) []uint32 {
	if l.slot == nil {
		return vertices
	}
	for i, v := range vertices {
		buf[i] = l.slot[v]
	}
	return buf[:len(vertices)]
}

func (l *layer) vertices() int { return len(l.links) / l.width }

// rows are vectors by slot, as float32 or as int8.
type rows struct {
	dim   int
	f     []float32
	b     []int8
	scale []float32 // of each row of b: it makes the row one of unit length
}

// row is one of rows, or a vector in the same form.
type row struct {
	f     []float32
	b     []int8
	scale float32
}

// at is a row; it shares the arrays.
func (r *rows) at(slot uint32) row {
	from, to := int(slot)*r.dim, (int(slot)+1)*r.dim
	if r.scale != nil {
		return row{b: r.b[from:to], scale: r.scale[slot]}
	}
	return row{f: r.f[from:to]}
}

func (r *rows) set(slot uint32, q row) {
	if r.scale != nil {
		copy(r.b[int(slot)*r.dim:], q.b)
		r.scale[slot] = q.scale
		return
	}
	copy(r.f[int(slot)*r.dim:], q.f)
}

// vector is a copy of a row.
func (r *rows) vector(slot uint32) []float32 {
	q := r.at(slot)
	if q.b == nil {
		return slices.Clone(q.f)
	}
	v := make([]float32, r.dim)
	for i, c := range q.b {
		v[i] = float32(c) * q.scale
	}
	return v
}

// equal says whether the row of a slot is q, to the bit.
func (r *rows) equal(slot uint32, q row) bool {
	at := r.at(slot)
	return slices.Equal(at.f, q.f) && slices.Equal(at.b, q.b)
}

// grown is r with room for so many rows; nothing is shared with r.
func (r *rows) grown(slots int, int8s bool) rows {
	g := rows{dim: r.dim}
	if int8s {
		g.b, g.scale = grown(r.b, slots*r.dim), grown(r.scale, slots)
		return g
	}
	g.f = grown(r.f, slots*r.dim)
	return g
}

// quantised is v as int8, in buf. The largest number becomes 127, and the scale is such that
// the row has unit length whatever rounding did to it.
func quantised(v []float32, buf []int8) row {
	var largest float32
	for _, f := range v {
		largest = max(largest, f, -f)
	}
	buf = buf[:len(v)]
	for i, f := range v {
		buf[i] = int8(math.RoundToEven(float64(f * (127 / largest))))
	}
	return row{b: buf, scale: float32(1 / math.Sqrt(float64(vec.DotI8(buf, buf))))}
}

// grown is a copy of a with length n.
func grown[T any](a []T, n int) []T {
	b := make([]T, n)
	copy(b, a)
	return b
}
