package affinity

import (
	"math"
	"math/bits"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// MaxCandidates bounds the candidates that are put in order; those beyond it stay where they are, behind the others.
const MaxCandidates = 64

// DefaultBound is how far above the mean an endpoint's load may be, and DefaultMemory how many beginnings of prompts are
// remembered, which takes 16 bytes each; bench/affinity chose them.
const (
	DefaultBound  = 1.25
	DefaultMemory = 1 << 16
)

// Candidate is an endpoint that may take a request.
type Candidate struct {
	ID       string
	Slots    int64 // its size beside the others'; 0: unbounded, taken for as large as the largest
	Load     int64 // in flight there, in the unit of Slots, as far as is known
	Overflow bool  // used only where no other has room: behind all others, whatever it may remember
}

// Query says what a request has in common with others. The zero value has nothing: then load alone decides.
type Query struct {
	// Session is the hash of what the client said belongs together (see [Session]), 0 where it said nothing. It goes
	// before Root.
	Session uint64
	// Root is the hash of how the conversation begins, 0 where it is not known.
	Root uint64
	// Chain are the hashes of ever longer beginnings of the prompt, the shortest first, Root among them. It may be empty. Those
	// before Root, which many conversations share, decide nothing.
	Chain []uint64
}

// Session makes Query.Session of a prompt_cache_key, 0 of "". seed keeps apart whose caches are apart: by the model
// and the tenant's cache salt, say.
func Session(seed uint64, key string) uint64 {
	if key == "" {
		return 0
	}
	return max(mix(seed^xxhash.Sum64String(key)), 1)
}

// Config is how a router works. The zero value is a good one.
type Config struct {
	// Bound is how many times the mean an endpoint's load may be for it still to be preferred for what it may have in its
	// cache; 0: DefaultBound; below 1: 1; +Inf: whatever its load.
	Bound float64
	// Memory is how many beginnings of prompts are remembered, rounded up to a power of two; 0: DefaultMemory, negative: none.
	Memory int
}

// Router puts candidates in order. It is safe for concurrent use and takes no lock.
type Router struct {
	bound  float64
	memory memory
}

// New makes a router.
func New(cfg Config) *Router {
	r := &Router{bound: max(cfg.Bound, 1)}
	if cfg.Bound == 0 {
		r.bound = DefaultBound
	}
	switch {
	case cfg.Memory == 0:
		r.memory.init(DefaultMemory)
	case cfg.Memory > 0:
		r.memory.init(cfg.Memory)
	}
	return r
}

// rank is what candidates are put in order by, the least first.
type rank struct {
	group uint8   // 0 within the bound, 1 above it; 2 and 3 for overflow
	fresh bool    // it is not where the longest known beginning of the prompt went
	score float64 // its place in the order on which all routers agree; where there is none, or above the bound, its load
}

func (a *rank) less(b *rank) bool {
	switch {
	case a.group != b.group:
		return a.group < b.group
	case a.fresh != b.fresh:
		return b.fresh
	}
	return a.score < b.score
}

// Order puts the indices of cs into order, the first to be tried first, and appends them to order, which it returns. It
// neither keeps nor changes cs. Equals stay in the order of cs.
func (r *Router) Order(order []int, q *Query, cs []Candidate) []int {
	n := min(len(cs), MaxCandidates)
	var ranks [MaxCandidates]rank
	r.rank(ranks[:n], q, cs[:n])
	first := len(order)
	for i := range cs {
		order = append(order, i)
		for at := len(order) - 1; i < n && at > first && ranks[i].less(&ranks[order[at-1]]); at-- {
			order[at], order[at-1] = order[at-1], i
		}
	}
	return order
}

func (r *Router) rank(ranks []rank, q *Query, cs []Candidate) {
	key := q.Session
	if key == 0 {
		key = q.Root
	}
	var ids [MaxCandidates]uint64
	f := survey(cs)
	for i := range cs {
		c := &cs[i]
		ids[i] = xxhash.Sum64String(c.ID)
		weight, over := f.weigh(c, r.bound)
		k := rank{group: c.group(), fresh: true, score: float64(c.Load) / weight}
		switch {
		case key == 0 && len(q.Chain) == 0:
		case over:
			k.group++
		case key != 0:
			k.score = exponential(mix(key^ids[i])) / weight
		}
		ranks[i] = k
	}
	r.recall(ranks, ids[:len(cs)], q)
}

// recall marks the candidate within its bound to which the longest beginning of the prompt went that went to any such.
func (r *Router) recall(ranks []rank, ids []uint64, q *Query) {
	for _, hash := range slices.Backward(q.own()) {
		place, ok := r.memory.get(hash)
		if !ok {
			continue
		}
		for i, id := range ids {
			if short(id) == place && ranks[i].group&1 == 0 {
				ranks[i].fresh = false
				return
			}
		}
	}
}

// own are the hashes of the chain that are the conversation's: from Root on.
func (q *Query) own() []uint64 {
	if i := slices.Index(q.Chain, q.Root); i > 0 {
		return q.Chain[i:]
	}
	return q.Chain
}

// Placed tells where a request went, once it has begun there: what it brings is then in that endpoint's cache.
func (r *Router) Placed(q *Query, id string) {
	place := short(xxhash.Sum64String(id))
	for _, hash := range q.own() {
		r.memory.put(hash, place)
	}
}

func (c *Candidate) group() uint8 {
	if c.Overflow {
		return 2
	}
	return 0
}

// fleet is what bounds are made of: the largest candidate, and the sums of loads and weights, apart for overflow.
type fleet struct {
	largest int64
	load    [3]int64
	weight  [3]int64
}

func survey(cs []Candidate) fleet {
	f := fleet{largest: 1}
	for i := range cs {
		f.largest = max(f.largest, cs[i].Slots)
	}
	for i := range cs {
		g := cs[i].group()
		f.load[g] += max(cs[i].Load, 0)
		f.weight[g] += f.size(&cs[i])
	}
	return f
}

func (f *fleet) size(c *Candidate) int64 {
	if c.Slots <= 0 {
		return f.largest
	}
	return c.Slots
}

// weigh gives a candidate's size, and whether one request more would lift its load above the bound: its share of the load of
// all, that request included, times the bound, and at least one.
func (f *fleet) weigh(c *Candidate, bound float64) (weight float64, over bool) {
	g, size := c.group(), f.size(c)
	share := float64(f.load[g]+1) * float64(size) / float64(f.weight[g])
	return float64(size), float64(c.Load) >= math.Ceil(bound*share)
}

// exponential is what an exponential distribution of mean 1 has at the uniform number h: never 0, never infinite. The least
// of several, each divided by its weight, is each one's with the probability of its weight: rendezvous hashing.
func exponential(h uint64) float64 { return -math.Log((float64(h>>11) + 0.5) / (1 << 53)) }

// mix makes of a number another whose every bit depends on every bit of the first.
func mix(x uint64) uint64 {
	hi, lo := bits.Mul64(x^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)
	x = hi ^ lo
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return x ^ x>>32
}
