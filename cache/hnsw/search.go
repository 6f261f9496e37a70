package hnsw

// Search appends to dst the k vectors nearest to q of those whose id keep wants, the best first, equal
// ones in any order, fewer where there are fewer; it returns the longer dst. It looks at ef
// candidates at least k (10,000 at most): the more, the surer it is to find the nearest. Where
// so many are all there are, or Config.Crossover are, it looks at all of them.
//
// Where keep, which may be nil for all, refuses so many that k are not found, it looks more widely,
// in the end at all: a keep that wants next to nothing costs a look at everything. It is called
// only for those that are otherwise found, more than once for some, by this goroutine,
// and must not write to the index.
//
// A q that Insert would refuse is similar to nothing.
func (x *Index) Search(dst []Neighbor, q []float32, k, ef int, keep func(id uint64) bool) []Neighbor {
	if k <= 0 || len(q) != x.config.Dim || !isUnit(q) {
		return dst
	}
	s := takeScratch()
	defer s.put()
	phase := x.gate.enter()
	defer x.gate.leave(phase)
	v, n := x.view.Load(), int(x.length.Load())
	r := s.row(q, x.config.Int8)
	ef = min(max(ef, k), maxEf)
	if v.ready && n > x.config.Crossover {
		for ; ef < n; ef *= 4 {
			vertex, similarity := s.approach(v, r, 0)
			s.explore(v, &v.layers[0], r, vertex, similarity, ef)
			if found := s.gather(dst, v, k, keep); len(found)-len(dst) == k {
				return found
			}
		}
	}
	s.scan(v, r, k, keep)
	for _, key := range s.pool {
		dst = append(dst, neighbor(v, vertexOf(key), key))
	}
	return dst
}

// gather appends to dst the first k that keep wants of what stands in s.pool, twins included.
func (s *scratch) gather(dst []Neighbor, v *view, k int, keep func(uint64) bool) []Neighbor {
	most := len(dst) + k
	for _, key := range s.pool {
		vertex := vertexOf(key)
		for slot := vertex; slot != none; {
			if v.isLive(slot) && (keep == nil || keep(v.id(slot))) {
				dst = append(dst, neighbor(v, slot, key))
			}
			if len(dst) == most {
				return dst
			}
			if slot = v.next(slot); slot == vertex {
				break
			}
		}
	}
	return dst
}

func neighbor(v *view, slot uint32, key uint64) Neighbor {
	return Neighbor{ID: v.id(slot), Similarity: min(max(similarityOf(key), -1), 1)}
}
