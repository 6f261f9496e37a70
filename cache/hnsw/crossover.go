package hnsw

import (
	"math/rand/v2"
	"time"

	"headgate/cache/vec"
)

// Crossover measures, in some milliseconds, up to how many vectors of dim looking at all of them
// is faster than a graph on this machine. It is for Config.Crossover: once a process; now is a clock.
//
// A search of a graph with M 16 and ef 64 computes some 700 similarities with rows that lie anywhere,
// and does about as much work again to choose among them; what these rows cost beside rows that lie
// one behind the other is the number to which the crossover is in proportion.
func Crossover(dim int, now func() time.Time) int {
	const (
		rows    = 1024
		rounds  = 5
		fetched = 700    // rows of a search
		list    = 16     // of them at once
		each    = 20     // ns, for choosing
		least   = 256    // vectors
		most    = 16_384 // vectors
	)
	random := rand.New(rand.NewPCG(1, 2))
	base := make([]float32, rows*dim)
	for i := range base {
		base[i] = random.Float32() - 0.5
	}
	ids := make([]uint32, rows)
	for i := range ids {
		ids[i] = uint32(i)
	}
	random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	sims := make([]float32, rows)
	query := base[:dim]
	inOrder, anywhere := time.Duration(1<<62), time.Duration(1<<62)
	for range rounds {
		began := now()
		vec.Dots(sims, query, base)
		middle := now()
		for i := 0; i < rows; i += list {
			vec.DotsAt(sims[:list], query, base, ids[i:i+list])
		}
		inOrder, anywhere = min(inOrder, middle.Sub(began)), min(anywhere, now().Sub(middle))
	}
	scan := max(float64(inOrder)/rows, 1)
	search := fetched * (float64(anywhere)/rows + each)
	return min(max(int(search/scan), least), most)
}
