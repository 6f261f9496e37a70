package hnsw

import (
	"cmp"
	"math"
	"testing"

	"pgregory.net/rapid"
)

// TestTable holds the table against a map.
func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var x table
		n := rapid.IntRange(1, 60).Draw(t, "slots")
		ids := make([]uint64, n)
		x.grow(ids, n)
		model := make(map[uint64]uint32)
		var free []uint32
		for i := range n {
			free = append(free, uint32(i))
		}
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			id := rapid.Uint64Range(0, 90).Draw(t, "id")
			slot, ok := x.find(ids, id)
			want, wantOK := model[id]
			if ok != wantOK || ok && slot != want {
				t.Fatalf("%d is in %d (%v), want %d (%v)", id, slot, ok, want, wantOK)
			}
			switch {
			case ok && rapid.Bool().Draw(t, "remove"):
				x.remove(ids, id)
				delete(model, id)
				free = append(free, slot)
			case ok:
			case len(free) == 0:
				n += rapid.IntRange(1, 9).Draw(t, "more")
				for i := len(ids); i < n; i++ {
					free = append(free, uint32(i))
				}
				ids = grown(ids, n)
				x.grow(ids, n)
			default:
				slot, free = free[len(free)-1], free[:len(free)-1]
				ids[slot], model[id] = id, slot
				x.put(ids, slot)
			}
		}
		for id, slot := range model {
			if got, ok := x.find(ids, id); !ok || got != slot {
				t.Fatalf("%d is in %d (%v), want %d", id, got, ok, slot)
			}
		}
	})
}

func TestKeysOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := rapid.OneOf(rapid.Float32Range(-1.1, 1.1), rapid.SampledFrom([]float32{-1, 0, 1, 1 - 0x1p-24, 0x1p-149, -0x1p-149}))
		a, b := draw.Draw(t, "a"), draw.Draw(t, "b")
		v, w := rapid.Uint32Range(0, math.MaxInt32).Draw(t, "v"), rapid.Uint32Range(0, math.MaxInt32).Draw(t, "w")
		x, y := keyOf(a, v), keyOf(b, w)
		if similarityOf(x) != a || vertexOf(x) != v || vertexOf(x|1) != v {
			t.Fatalf("%v %d became %v %d", a, v, similarityOf(x), vertexOf(x))
		}
		if want := cmp.Or(cmp.Compare(b, a), cmp.Compare(v, w)); cmp.Compare(x, y) != want && a != 0 {
			t.Fatalf("%v %d beside %v %d: %d, want %d", a, v, b, w, cmp.Compare(x, y), want)
		}
	})
}

// TestOffer holds the pool against sorting.
func TestOffer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ef := rapid.IntRange(1, 20).Draw(t, "ef")
		var s scratch
		best := map[uint64]bool{}
		for _, key := range rapid.SliceOfDistinct(rapid.Uint64Range(0, 200), rapid.ID).Draw(t, "keys") {
			at := s.offer(key, ef)
			if at < len(s.pool) != (at < ef && s.pool[min(at, len(s.pool)-1)] == key) {
				t.Fatalf("%d went to %d of %v", key, at, s.pool)
			}
			best[key] = true
			for i := 1; i < len(s.pool); i++ {
				if s.pool[i-1] >= s.pool[i] {
					t.Fatalf("not in order: %v", s.pool)
				}
			}
		}
		worse := 0
		for key := range best {
			if len(s.pool) > 0 && key > s.pool[len(s.pool)-1] {
				worse++
			}
		}
		if len(s.pool) != min(ef, len(best)) || worse != len(best)-len(s.pool) {
			t.Fatalf("%v of %d at ef %d, %d are worse", s.pool, len(best), ef, worse)
		}
	})
}
