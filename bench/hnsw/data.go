package hnsw

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"unsafe"

	"headgate/bench/semantic/corpus"
	"headgate/cache/embed"
	"headgate/cache/vec"
)

// k is how many neighbours are looked for.
const k = 10

// data is vectors, queries, and which vectors are nearest to each.
type data struct {
	name                string
	dim                 int
	base, query         []float32
	baseFile, queryFile string
	nearest             [][]uint32 // by query, the k best first
}

func (d *data) len() int               { return len(d.base) / d.dim }
func (d *data) queries() int           { return len(d.query) / d.dim }
func (d *data) vector(i int) []float32 { return d.base[i*d.dim:][:d.dim] }
func (d *data) asked(i int) []float32  { return d.query[i*d.dim:][:d.dim] }

// clustered draws n vectors and some queries of the same distribution: 2,000 centres in 64 dimensions, the
// first of which are the most popular, each with a cloud around it, all seen through a random projection into dim
// dimensions, with a little noise there.
func clustered(n, queries, dim int) *data {
	const (
		centres = 2000
		inner   = 64
		skew    = 0.6
		cloud   = 0.7
		noise   = 0.15
	)
	random := rand.New(rand.NewPCG(7, 7))
	gauss := func(n int, scale float32) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = scale * float32(random.NormFloat64())
		}
		return v
	}
	centre, projection := gauss(centres*inner, 1), gauss(dim*inner, 1.0/8)
	popularity := make([]float64, centres)
	var sum float64
	for i := range popularity {
		sum += math.Pow(float64(i+1), -skew)
		popularity[i] = sum
	}
	draw := func(n int) []float32 {
		out := make([]float32, n*dim)
		z := make([]float32, inner)
		for i := range n {
			c := min(sort.SearchFloat64s(popularity, random.Float64()*sum), centres-1)
			for j := range z {
				z[j] = centre[c*inner+j] + cloud*float32(random.NormFloat64())
			}
			v := out[i*dim:][:dim]
			vec.Dots(v, z, projection)
			for j := range v {
				v[j] += noise * float32(random.NormFloat64())
			}
			vec.Norm(v)
		}
		return out
	}
	return &data{name: fmt.Sprintf("%d clustered vectors of %d numbers", n, dim), dim: dim, base: draw(n), query: draw(queries)}
}

// readVectors takes vectors from a file of float32, little-endian, dim in a row: the last as queries.
func readVectors(path string, n, queries, dim int) (*data, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(b)%(4*dim) != 0 {
		return nil, fmt.Errorf("%s: %d bytes are no rows of %d float32", path, len(b), dim)
	}
	all := make([]float32, len(b)/4)
	if _, err := binary.Decode(b, binary.LittleEndian, all); err != nil {
		return nil, err
	}
	for i := range len(all) / dim {
		vec.Norm(all[i*dim:][:dim])
	}
	// Files are often sorted by intent; queries are to be of all.
	rows := slices.Collect(slices.Chunk(all, dim))
	shuffler().Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	return split(filepath.Base(path), rows, n, queries)
}

func shuffler() *rand.Rand { return rand.New(rand.NewPCG(7, 7)) }

// split makes the last of rows queries, and n of the others the vectors.
func split(name string, rows [][]float32, n, queries int) (*data, error) {
	n = min(n, len(rows)-queries)
	if n < queries {
		return nil, fmt.Errorf("%s: %d vectors are too few for %d queries", name, len(rows), queries)
	}
	dim := len(rows[0])
	return &data{
		name: fmt.Sprintf("%d vectors of %d numbers of %s", n, dim, name), dim: dim,
		base: slices.Concat(rows[:n]...), query: slices.Concat(rows[len(rows)-queries:]...),
	}, nil
}

// embedded is n questions of people, as the built-in model sees them, and others as queries.
func embedded(ctx context.Context, n, queries int) (*data, error) {
	model, err := embed.Builtin()
	if err != nil {
		return nil, err
	}
	var texts []string
	for _, set := range corpus.Sets() {
		for _, part := range corpus.Splits(set) {
			prompts, err := corpus.Load(set, part)
			if err != nil {
				return nil, err
			}
			for _, p := range prompts {
				texts = append(texts, p.Text)
			}
		}
	}
	shuffler().Shuffle(len(texts), func(i, j int) { texts[i], texts[j] = texts[j], texts[i] })
	texts = texts[:min(len(texts), n+queries)]
	var rows [][]float32
	for batch := range slices.Chunk(texts, 32) {
		v, err := model.Embed(ctx, batch)
		if err != nil {
			return nil, err
		}
		rows = append(rows, v...)
	}
	return split("banking77 and clinc150 by "+model.Version(), rows, n, queries)
}

// prepare finds the nearest by looking at all, and writes files for the yardstick.
func (d *data) prepare(dir string) error {
	d.nearestOf(func(int) bool { return true })
	d.baseFile, d.queryFile = filepath.Join(dir, "base.f32"), filepath.Join(dir, "query.f32")
	for path, v := range map[string][]float32{d.baseFile: d.base, d.queryFile: d.query} {
		if err := os.WriteFile(path, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), 4*len(v)), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// nearestOf finds the nearest to all queries of those vectors that are of what is asked for.
func (d *data) nearestOf(of func(id int) bool) {
	sims := make([]float32, d.len())
	order := make([]uint32, 0, k+1)
	for i := range d.queries() {
		vec.Dots(sims, d.asked(i), d.base)
		order = order[:0]
		for id, s := range sims {
			if len(order) == k && s <= sims[order[k-1]] || !of(id) {
				continue
			}
			at, _ := slices.BinarySearchFunc(order, s, func(o uint32, s float32) int {
				if sims[o] >= s {
					return -1
				}
				return 1
			})
			order = slices.Insert(order, at, uint32(id))
			order = order[:min(len(order), k)]
		}
		d.nearest = append(d.nearest, slices.Clone(order))
	}
}

// recall is the share of the nearest that was found, and of those queries whose nearest came first; k of found
// belong to a query.
func (d *data) recall(found []uint32) (ten, one float64) {
	hits, first := 0, 0
	for i, nearest := range d.nearest {
		got := found[i*k:][:k]
		for _, id := range nearest {
			if slices.Contains(got, id) {
				hits++
			}
		}
		if got[0] == nearest[0] {
			first++
		}
	}
	return float64(hits) / float64(len(d.nearest)*k), float64(first) / float64(len(d.nearest))
}
