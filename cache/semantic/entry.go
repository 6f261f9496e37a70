package semantic

import (
	"container/heap"
	"container/list"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"unique"
	"unsafe"

	"headgate/cache"
	"headgate/cache/guard"
	"headgate/cache/threshold"
	"headgate/cache/vec"
)

const (
	// entryTables is what maps, lists and the heap take an entry: a slot of 16 bytes and its control byte in two maps
	// that are 7/16 full at worst, an element of a list (64), a place in the heap (8 to 16).
	entryTables = 192
	// keptHits is how many of an entry's last hits are remembered, for when somebody reports it.
	keptHits = 4
)

// place is where entries belong.
type place struct {
	key      cache.Key
	tenant   string
	surface  string
	embedder string
}

func (p *place) scope() scopeKey {
	return scopeKey{tenant: p.tenant, surface: p.surface, embedder: p.embedder}
}

// fresh is an entry that is to be kept.
type fresh struct {
	id      uint64
	text    string
	vector  []float32
	entry   *cache.Entry // its Age is that of the answer
	class   uint64       // which answer it is: entries with one answer have one class; 0: to be found out
	not     uint64       // a class that it is known not to be of
	answer  uint64       // hash of the normalised answer; 0: unknown
	meaning []int8       // vector of the answer; empty: unknown
	answers float64      // the similarity from which two such say the same
	obs     []byte       // of a moved entry
	hits    []threshold.Cell
}

// entry is an answer and what it was asked by. Vector, text, answer, tags and observations have one lifetime: the vector is
// in its partition's index by the entry's id, and goes when the entry does.
type entry struct {
	id      uint64
	p       *partition
	text    string
	hash    uint64 // of text
	parsed  *guard.Text
	about   cache.Entry // its Body is empty where packed is not
	packed  []byte
	answer  uint64
	meaning []int8
	filled  int64
	dies    int64
	size    int64 // of memory, without the vector and the observations

	changed atomic.Uint64 // counts what is added to it, so that a move sees it

	// Under shard.mu.
	gone   bool
	class  uint64
	tables int64            // of memory, by observations
	hits   []threshold.Cell // of the last that were served
	used   *list.Element    // in its tenant's order of use
	heapAt int

	obs threshold.Observations // under scope.mu
}

// newEntry copies what is to be kept. It parses and packs: microseconds to a millisecond.
func newEntry(f *fresh, hash uint64, now int64) (*entry, error) {
	e := &entry{
		id: f.id, text: strings.Clone(f.text), hash: hash, about: *f.entry, class: f.class, answer: f.answer, meaning: slices.Clone(f.meaning), filled: now - int64(max(f.entry.Age, 0)),
		hits: slices.Clone(f.hits[:min(len(f.hits), keptHits)]),
	}
	e.dies = e.filled + int64(f.entry.Life.TTL)
	if len(f.obs) > 0 {
		if err := e.obs.UnmarshalBinary(f.obs); err != nil {
			return nil, fmt.Errorf("observations: %w", err)
		}
	}
	e.parsed = guard.Parse(e.text)
	e.about.Tenant = unique.Make(f.entry.Tenant).Value() // thousands of entries share these few
	e.about.Surface = unique.Make(f.entry.Surface).Value()
	e.about.ContentType = unique.Make(f.entry.ContentType).Value()
	e.size = int64(unsafe.Sizeof(entry{})) + entryTables + int64(len(e.text)) + e.parsed.Bytes() + keptHits*int64(unsafe.Sizeof(threshold.Cell(0))) + int64(len(e.meaning))
	e.about.Tags = nil
	if len(f.entry.Tags) > 0 {
		e.about.Tags = make([]string, len(f.entry.Tags))
		for i, t := range f.entry.Tags {
			e.about.Tags[i] = strings.Clone(t)
			e.size += int64(len(t)+15)&^15 + int64(unsafe.Sizeof(t))
		}
	}
	e.about.Body, e.packed = cache.Pack(f.entry.Body)
	e.size += int64(cap(e.about.Body) + cap(e.packed))
	e.tables = int64(e.obs.Bytes())
	return e, nil
}

// plain is the answer with its body; nil where its bytes changed in memory.
func (e *entry) plain() *cache.Entry {
	a := e.about
	if e.packed != nil {
		body, err := cache.Unpack(e.packed, maxBody)
		if err != nil {
			return nil
		}
		a.Body = body
	}
	return &a
}

// has says whether it carries all of tags.
func (e *entry) has(tags []string) bool {
	for _, t := range tags {
		if !slices.Contains(e.about.Tags, t) {
			return false
		}
	}
	return true
}

// byDeath is a heap of entries, the next to die first.
type byDeath []*entry

func (h byDeath) Len() int           { return len(h) }
func (h byDeath) Less(i, j int) bool { return h[i].dies < h[j].dies }
func (h byDeath) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapAt, h[j].heapAt = i, j
}

// Push is for container/heap.
func (h *byDeath) Push(x any) {
	e, _ := x.(*entry)
	e.heapAt = len(*h)
	*h = append(*h, e)
}

// Pop is for container/heap.
func (h *byDeath) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return e
}

var _ heap.Interface = (*byDeath)(nil)

// textHash is of a text, in this process only.
func textHash(seed maphash.Seed, text string) uint64 { return maphash.String(seed, text) }

// quantised is a vector in a quarter of its size.
func quantised(v []float32) []int8 {
	var most float32
	for _, x := range v {
		most = max(most, x, -x)
	}
	if most == 0 {
		return nil
	}
	q := make([]int8, len(v))
	for i, x := range v {
		q[i] = int8(math.RoundToEven(float64(x) * 127 / float64(most)))
	}
	return q
}

// alike is the similarity of two quantised vectors; 0 where they cannot be compared.
func alike(a, b []int8) float64 {
	if len(a) == 0 || len(a) != len(b) {
		return 0
	}
	lengths := float64(vec.DotI8(a, a)) * float64(vec.DotI8(b, b))
	if lengths <= 0 {
		return 0
	}
	return float64(vec.DotI8(a, b)) / math.Sqrt(lengths)
}
