// Package hnsw finds, among vectors of unit length, those nearest to one by the cosine: exactly
// while there are few, and by a hierarchical navigable small world graph (Malkov and Yashunin,
// arXiv 1603.09320) from then on. See DESIGN.md.
package hnsw

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"headgate/cache/vec"
)

// Bounds and defaults of a Config.
const (
	MaxDim           = 4096
	MaxM             = 64
	MaxLength        = 1 << 30 // of Config.MaxLen
	DefaultM         = 16
	DefaultEf        = 200  // Config.EfConstruction
	DefaultCrossover = 1500 // vectors
)

// Config says what an Index holds. Only Dim must be set.
type Config struct {
	Dim            int    // of every vector, 1 to MaxDim
	M              int    // links a vector gets when it comes, 2 to MaxM; it may have twice as many; 0: DefaultM
	EfConstruction int    // how widely is searched for them, M to 10,000; 0: DefaultEf
	Seed           uint64 // the same seed and the same writes make the same graph
	Int8           bool   // keep vectors as int8: a quarter of the memory, similarities off by .0005, .003 at worst
	MaxLen         int    // vectors at most, then ErrFull; 0: MaxLength. Nothing is allocated ahead
	// Crossover is the number of vectors up to which all are looked at, which is exact and
	// needs no graph; see the function Crossover. 0: DefaultCrossover; negative: always a graph.
	Crossover int
}

// Validate names what is out of bounds.
func (c Config) Validate() error {
	c = c.filled()
	switch {
	case c.Dim < 1 || c.Dim > MaxDim:
		return fmt.Errorf("hnsw: Dim %d: between 1 and %d", c.Dim, MaxDim)
	case c.M < 2 || c.M > MaxM:
		return fmt.Errorf("hnsw: M %d: between 2 and %d", c.M, MaxM)
	case c.EfConstruction < c.M || c.EfConstruction > maxEf:
		return fmt.Errorf("hnsw: EfConstruction %d: between M and %d", c.EfConstruction, maxEf)
	case c.MaxLen < 1 || c.MaxLen > MaxLength:
		return fmt.Errorf("hnsw: MaxLen %d: between 1 and %d", c.MaxLen, MaxLength)
	}
	return nil
}

// filled is c with its defaults.
func (c Config) filled() Config {
	set := func(field *int, value int) {
		if *field == 0 {
			*field = value
		}
	}
	set(&c.M, DefaultM)
	set(&c.EfConstruction, DefaultEf)
	set(&c.MaxLen, MaxLength)
	set(&c.Crossover, DefaultCrossover)
	c.Crossover = max(c.Crossover, 0)
	return c
}

// Why a vector is refused. Errors wrap one of these and name what is wrong.
var (
	ErrExists    = errors.New("hnsw: the id is in the index")
	ErrFull      = errors.New("hnsw: the index holds MaxLen vectors")
	ErrDim       = errors.New("hnsw: a vector of another dimension")
	ErrNotFinite = errors.New("hnsw: a vector with a number that is not finite")
	ErrNotUnit   = errors.New("hnsw: a vector that is not of unit length")
	ErrRebuilds  = errors.New("hnsw: the index is being rebuilt already")
)

// Neighbor is a vector that a search found.
type Neighbor struct {
	ID         uint64
	Similarity float32 // the cosine, in [-1, 1]
}

// Index holds vectors by id. All methods may be called by many goroutines at once. Writers
// (Insert, Delete, Rebuild) take turns; readers (Search, Len, Bytes) take no lock and never wait
// for a writer. A writer that needs the place of a deleted vector waits for the searches that
// began before the vector was gone.
type Index struct {
	config Config
	gate   gate
	view   atomic.Pointer[view]
	length atomic.Int64
	bytes  atomic.Int64

	mu    sync.Mutex
	graph *graph
}

// New is an empty index. It panics if c.Validate would find fault. An index that holds little
// takes little: some 600 bytes besides its vectors.
func New(c Config) *Index {
	if err := c.Validate(); err != nil {
		panic(err)
	}
	x := &Index{config: c.filled()}
	x.graph = newGraph(x.config)
	x.graph.wait = x.gate.wait
	x.show()
	return x
}

// Insert adds v, of which it keeps a copy, under id. It fails with ErrExists, ErrFull, ErrDim,
// ErrNotFinite or ErrNotUnit, and then has done nothing. A zero vector is none of unit length.
func (x *Index) Insert(id uint64, v []float32) error {
	if err := check(x.config.Dim, v); err != nil {
		return err
	}
	s := takeScratch()
	defer s.put()
	x.mu.Lock()
	defer x.mu.Unlock()
	g := x.graph
	if _, ok := g.table.find(g.ids, id); ok {
		return fmt.Errorf("%w: %d", ErrExists, id)
	}
	if g.length >= x.config.MaxLen {
		return fmt.Errorf("%w: %d", ErrFull, x.config.MaxLen)
	}
	g.insert(s, id, s.row(v, x.config.Int8))
	x.show()
	return nil
}

// Delete removes id and says whether it was there. Searches that begin later do not find it.
// The links that led through it are mended bit by bit, by this and the writes that follow.
func (x *Index) Delete(id uint64) bool {
	s := takeScratch()
	defer s.put()
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.graph.remove(s, id) {
		return false
	}
	x.show()
	return true
}

// Vector is a copy of the vector of id; with Int8, what is left of it.
func (x *Index) Vector(id uint64) ([]float32, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	g := x.graph
	slot, ok := g.table.find(g.ids, id)
	if !ok {
		return nil, false
	}
	return g.rows.vector(slot), true
}

// Len is the number of vectors.
func (x *Index) Len() int { return int(x.length.Load()) }

// Bytes is what the index has allocated, room to grow included, but for what searches need
// while they run. It is as of the last write.
func (x *Index) Bytes() int64 { return x.bytes.Load() }

// Stats are figures of an Index.
type Stats struct {
	Len    int
	Slots  int // places for vectors, taken or not; what Rebuild would give back is Slots - Len of them
	Dead   int // deleted vectors whose links are not mended yet
	Twins  int // vectors that share the links of an equal one
	Layers int // of the graph; 0: all vectors are looked at
	Bytes  int64
}

// Stats are the figures of now.
func (x *Index) Stats() Stats {
	x.mu.Lock()
	defer x.mu.Unlock()
	g := x.graph
	s := Stats{Len: g.length, Slots: len(g.ids), Dead: len(g.dead) + len(g.leaving), Twins: g.twins, Bytes: x.Bytes()}
	if g.ready {
		s.Layers = len(g.layers)
	}
	return s
}

// show lets readers see what has changed.
func (x *Index) show() {
	g := x.graph
	if g.changed {
		g.changed = false
		x.view.Store(g.view.clone())
	}
	x.length.Store(int64(g.length))
	x.bytes.Store(g.bytes() + ownBytes)
}

// check refuses what has no place in an index of dim.
func check(dim int, v []float32) error {
	if len(v) != dim {
		return fmt.Errorf("%w: %d numbers, the index has %d", ErrDim, len(v), dim)
	}
	if isUnit(v) {
		return nil
	}
	for i, f := range v {
		if f64 := float64(f); math.IsNaN(f64) || math.IsInf(f64, 0) {
			return fmt.Errorf("%w: number %d is %v", ErrNotFinite, i, f)
		}
	}
	return fmt.Errorf("%w: its length is %.4g; scale it with vec.Norm", ErrNotUnit, norm(v))
}

// isUnit says whether v has unit length, but for what rounding and a model's own scaling do.
func isUnit(v []float32) bool {
	const tolerance = 2e-3
	n := vec.Dot(v, v)
	return n > 1-tolerance && n < 1+tolerance
}

func norm(v []float32) float64 {
	var sum float64
	for _, f := range v {
		sum += float64(f) * float64(f)
	}
	return math.Sqrt(sum)
}
