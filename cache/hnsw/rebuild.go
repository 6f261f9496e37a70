package hnsw

import (
	"context"
	"slices"
)

const (
	copied  = 64 // vectors that a rebuild takes at once
	catches = 16 // times that it takes what others have written, before it keeps them waiting
)

// moved is a vector on its way into a new graph.
type moved struct {
	id   uint64
	row  row // a copy; empty: the id was deleted
	gone bool
}

// Rebuild makes the index anew from what it holds: no place is left to deleted vectors, and all
// links are as good as those of an index that has never lost one. Others read and write
// meanwhile; what they write is in the new graph when it takes the place of the old, at
// once. It needs room for both, and as long as inserting everything takes. It fails with
// ErrRebuilds, or with the error of ctx, and then has changed nothing.
//
// Where nothing else is written meanwhile, the new graph is that of an index with the same
// Config into which all were inserted in the order of their places.
func (x *Index) Rebuild(ctx context.Context) error {
	x.mu.Lock()
	if x.graph.journal != nil {
		x.mu.Unlock()
		return ErrRebuilds
	}
	x.graph.journal = make(map[uint64]struct{})
	x.mu.Unlock()

	s := takeScratch()
	defer s.put()
	fresh := newGraph(x.config)
	var slot uint32
	for caught := 0; ; caught++ {
		for more := true; more; {
			if err := ctx.Err(); err != nil {
				x.mu.Lock()
				x.graph.journal = nil
				x.mu.Unlock()
				return err
			}
			var batch []moved
			batch, slot, more = x.batch(slot)
			fresh.adopt(s, batch)
		}
		if x.replace(s, fresh, caught == catches) {
			return nil
		}
	}
}

// batch is what others wrote since the last, and some of the vectors from slot on.
func (x *Index) batch(slot uint32) (batch []moved, next uint32, more bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	batch = x.written()
	g := x.graph
	for end := len(batch) + copied; len(batch) < end && int(slot) < g.used; slot++ {
		if g.isLive(slot) {
			batch = append(batch, g.moved(g.ids[slot]))
		}
	}
	return batch, slot, int(slot) < g.used
}

// written is what others wrote since it was last asked, by id.
func (x *Index) written() []moved {
	ids := make([]uint64, 0, len(x.graph.journal))
	for id := range x.graph.journal {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	clear(x.graph.journal)
	var batch []moved
	for _, id := range ids {
		batch = append(batch, x.graph.moved(id))
	}
	return batch
}

// moved is what there is of an id.
func (g *graph) moved(id uint64) moved {
	slot, ok := g.table.find(g.ids, id)
	if !ok {
		return moved{id: id, gone: true}
	}
	r := g.rows.at(slot)
	return moved{id: id, row: row{f: slices.Clone(r.f), b: slices.Clone(r.b), scale: r.scale}}
}

// adopt makes g hold what batch says, and nothing else under those ids.
func (g *graph) adopt(s *scratch, batch []moved) {
	for _, m := range batch {
		slot, ok := g.table.find(g.ids, m.id)
		if ok && !m.gone && g.rows.equal(slot, m.row) {
			continue
		}
		if ok {
			g.remove(s, m.id)
		}
		if !m.gone {
			g.insert(s, m.id, m.row)
		}
	}
}

// replace puts fresh in the place of the graph, unless so much was written that it should be
// caught up with first, and that is allowed.
func (x *Index) replace(s *scratch, fresh *graph, now bool) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.graph.journal) > copied && !now {
		return false
	}
	fresh.adopt(s, x.written())
	fresh.changed, fresh.wait = true, x.gate.wait
	x.graph = fresh
	x.show()
	return true
}
