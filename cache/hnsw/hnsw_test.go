package hnsw

import (
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

// brute is the model: a map that is looked through.
type brute map[uint64][]float32

func (b brute) search(q []float32, k int) []Neighbor {
	var found []Neighbor
	for id, v := range b {
		found = append(found, Neighbor{id, vec.Dot(q, v)})
	}
	slices.SortFunc(found, func(a, b Neighbor) int {
		switch {
		case a.Similarity > b.Similarity, a.Similarity == b.Similarity && a.ID < b.ID:
			return -1
		}
		return 1
	})
	return found[:min(k, len(found))]
}

func TestRecall(t *testing.T) {
	c := newClusters(1, 64, 50, 0.5)
	x := New(Config{Dim: 64, Crossover: -1})
	b := brute{}
	for id := range uint64(5000) {
		v := c.draw()
		if err := x.Insert(id, v); err != nil {
			t.Fatal(err)
		}
		b[id] = v
	}
	rec := func() {
		hit, one, n := 0, 0, 200
		for range n {
			q := c.draw()
			want, got := b.search(q, 10), x.Search(nil, q, 10, 64, nil)
			for _, w := range want {
				if slices.Contains(got, w) {
					hit++
				}
			}
			if got[0] == want[0] {
				one++
			}
		}
		t.Logf("recall@10 %.4f @1 %.4f %+v", float64(hit)/float64(n*10), float64(one)/float64(n), x.Stats())
	}
	rec()
	for id := range uint64(1500) {
		if !x.Delete(id * 3) {
			t.Fatal(id)
		}
		delete(b, id*3)
	}
	rec()
	if err := x.Rebuild(t.Context()); err != nil {
		t.Fatal(err)
	}
	rec()
}
