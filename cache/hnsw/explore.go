package hnsw

import (
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	"headgate/cache/vec"
)

// maxEf bounds how widely is searched.
const maxEf = 10_000

// scratch is what one search or one write needs while it runs.
type scratch struct {
	pool  []uint64 // the best vertices seen, best first; see key
	seen  []uint64 // a bit a vertex
	ids   []uint32 // vertices whose similarity is wanted
	slots []uint32 // of them
	sims  []float32
	ints  []int32
	query []int8

	chosen [maxLayers][]uint32 // neighbours for a vertex, by layer
	keys   []uint64
	near   []uint32 // slots
	list   []uint32
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

func takeScratch() *scratch { return scratches.Get().(*scratch) }

func (s *scratch) put() { scratches.Put(s) }

// row is v in the form in which the index keeps vectors; it shares v or s.
func (s *scratch) row(v []float32, int8s bool) row {
	if !int8s {
		return row{f: v}
	}
	s.query = sized(s.query, len(v))
	return quantised(v, s.query)
}

// sized is a with length n; what was in it may be lost.
func sized[T any](a []T, n int) []T {
	if cap(a) < n {
		return make([]T, n, n+n/8)
	}
	return a[:n]
}

// score sets the first numbers of s.sims to the similarities of q and the rows of slots.
func (s *scratch) score(r *rows, q row, slots []uint32) []float32 {
	s.sims = sized(s.sims, len(slots))
	if q.b == nil {
		vec.DotsAt(s.sims, q.f, r.f, slots)
		return s.sims
	}
	s.ints = sized(s.ints, len(slots))
	vec.DotsAtI8(s.ints, q.b, r.b, slots)
	for i, n := range s.ints {
		s.sims[i] = float32(n) * (q.scale * r.scale[slots[i]])
	}
	return s.sims
}

// A key orders what was found: the greater similarity first, then the lower number. Its lowest bit says
// that the vertex was expanded.

func keyOf(similarity float32, vertex uint32) uint64 {
	b := math.Float32bits(similarity)
	if b>>31 == 0 {
		b = ^b &^ (1 << 31) // positive: the greater, the less, and below all that are negative
	}
	return uint64(b)<<32 | uint64(vertex)<<1
}

func vertexOf(key uint64) uint32 { return uint32(key) >> 1 }

func similarityOf(key uint64) float32 {
	b := uint32(key >> 32)
	if b>>31 == 0 {
		b = ^b &^ (1 << 31)
	}
	return math.Float32frombits(b)
}

// seenNone prepares s for a search among so many vertices.
func (s *scratch) seenNone(vertices int) {
	s.seen = sized(s.seen, (vertices+63)/64)
	clear(s.seen)
	s.pool = s.pool[:0]
}

// saw marks a vertex and says whether it was new.
func (s *scratch) saw(vertex uint32) bool {
	w := &s.seen[vertex/64]
	fresh := *w>>(vertex%64)&1 == 0
	*w |= 1 << (vertex % 64)
	return fresh
}

// unseen are the vertices of a list that were not seen before, and now are.
func (s *scratch) unseen(list []uint32) []uint32 {
	s.ids = sized(s.ids, len(list))
	n := 0
	for i := range list {
		v := atomic.LoadUint32(&list[i])
		if v == none {
			break
		}
		w := s.seen[v/64]
		s.seen[v/64] = w | 1<<(v%64)
		s.ids[n] = v // overwritten by the next if it was seen: half of them are, which no branch predicts
		n += int(^w >> (v % 64) & 1)
	}
	return s.ids[:n]
}

// explore is algorithm 2: it fills s.pool with the ef vertices of a layer nearest to q, as far as
// they are found from a vertex at that similarity. One array in order holds what the two heaps of the
// paper do: a candidate that is not among the ef best is never expanded.
func (s *scratch) explore(v *view, l *layer, q row, from uint32, similarity float32, ef int) {
	s.seenNone(l.vertices())
	s.saw(from)
	s.pool = append(s.pool, keyOf(similarity, from))
	for at := 0; at < len(s.pool); {
		key := s.pool[at]
		if key&1 != 0 {
			at++
			continue
		}
		s.pool[at] = key | 1
		ids := s.unseen(l.list(vertexOf(key)))
		if len(ids) == 0 {
			continue
		}
		s.slots = sized(s.slots, len(ids))
		sims := s.score(&v.rows, q, l.slots(ids, s.slots))
		for i, sim := range sims {
			at = min(at, s.offer(keyOf(sim, ids[i]), ef))
		}
	}
}

// offer puts key into the pool if it is among the ef best, and says where.
func (s *scratch) offer(key uint64, ef int) int {
	n := len(s.pool)
	if n == ef {
		if key >= s.pool[n-1] {
			return n
		}
		n--
	} else {
		s.pool = append(s.pool, 0)
	}
	lo, hi := 0, n
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if s.pool[mid] < key {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	copy(s.pool[lo+1:], s.pool[lo:n])
	s.pool[lo] = key
	return lo
}

// descend is the greedy search of a layer above the one that is wanted.
func (s *scratch) descend(v *view, l *layer, q row, from uint32, similarity float32) (uint32, float32) {
	for {
		s.ids = sized(s.ids, l.width)
		n := 0
		for list := l.list(from); n < len(list); n++ {
			if s.ids[n] = atomic.LoadUint32(&list[n]); s.ids[n] == none {
				break
			}
		}
		ids := s.ids[:n]
		s.slots = sized(s.slots, n)
		best := from
		for i, sim := range s.score(&v.rows, q, l.slots(ids, s.slots)) {
			if sim > similarity {
				best, similarity = ids[i], sim
			}
		}
		if best == from {
			return from, similarity
		}
		from = best
	}
}

// approach finds where to enter a layer.
func (s *scratch) approach(v *view, q row, layer int) (vertex uint32, similarity float32) {
	top := len(v.layers) - 1
	vertex = v.entry
	similarity = s.one(v, q, v.layers[top].slotOf(vertex))
	for i := top; i > layer; i-- {
		vertex, similarity = s.descend(v, &v.layers[i], q, vertex, similarity)
		vertex = v.layers[i].down[vertex]
	}
	return vertex, similarity
}

// one is the similarity of q and one row.
func (s *scratch) one(v *view, q row, slot uint32) float32 {
	s.slots = append(s.slots[:0], slot)
	return s.score(&v.rows, q, s.slots)[0]
}

// scan fills s.pool with the n live slots nearest to q of those that keep wants, of all.
func (s *scratch) scan(v *view, q row, n int, keep func(uint64) bool) {
	s.pool = s.pool[:0]
	for w := range v.live {
		word := atomic.LoadUint32(&v.live[w])
		if word == 0 {
			continue
		}
		s.ids = s.ids[:0]
		for rest := word; rest != 0; rest &= rest - 1 {
			s.ids = append(s.ids, uint32(w*32+bits.TrailingZeros32(rest)))
		}
		for i, sim := range s.scoreWord(&v.rows, q, word) {
			key := keyOf(sim, s.ids[i])
			if len(s.pool) == n && key >= s.pool[n-1] {
				continue
			}
			if keep == nil || keep(v.id(s.ids[i])) {
				s.offer(key, n)
			}
		}
	}
}

// scoreWord scores s.ids, the slots of a word of live bits; side by side if they are.
func (s *scratch) scoreWord(r *rows, q row, word uint32) []float32 {
	n := len(s.ids)
	if bits.OnesCount32(word+word&-word) > 1 { // not one run of ones
		return s.score(r, q, s.ids)
	}
	s.sims = sized(s.sims, n)
	from, to := int(s.ids[0])*r.dim, (int(s.ids[n-1])+1)*r.dim
	if q.b == nil {
		vec.Dots(s.sims, q.f, r.f[from:to])
		return s.sims
	}
	s.ints = sized(s.ints, n)
	vec.DotsI8(s.ints, q.b, r.b[from:to])
	for i, sum := range s.ints {
		s.sims[i] = float32(sum) * (q.scale * r.scale[s.ids[i]])
	}
	return s.sims
}
