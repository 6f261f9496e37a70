package affinity

import (
	"cmp"
	"math"
	"math/bits"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// MaxCandidates bounds the candidates that are put in order; those beyond it stay where they are, behind the others.
const MaxCandidates = 64

// What a Config says where it says nothing; bench/affinity chose them.
const (
	DefaultLeast  = 1
	DefaultMost   = 2
	DefaultTokens = 1 << 15
	DefaultMemory = 1 << 16
)

// What is in flight at an endpoint that is as good as idle: a 16th of its slots, and at least two, such as a turn and the one
// before it, whose slot is not free yet.
const (
	idlePart  = 16
	idleLeast = 2
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
	// before Root, and only where the conversation is known to have gone goes before it.
	Session uint64
	// Root is the hash of how the conversation begins, 0 where it is not known.
	Root uint64
	// Chain are the hashes of the prompt up to the end of each turn, the first turn first; it may be empty. Only
	// requests of one conversation should have one in common.
	Chain []uint64
	// Tokens is how long the prompt is: what there is to lose.
	Tokens int64
	// Told says that Placed tells this router of all requests, since it is the only one, or since the others' are told it, too.
	// Only then does it go by where a conversation went before, and puts others where there is less to do.
	Told bool
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
//
// An endpoint is preferred for what it may have in its cache only while its load is within a bound: a multiple of the mean.
// The longer a prompt, the more is lost elsewhere, and the looser the bound.
type Config struct {
	Least  float64 // the bound of the shortest prompt, and of each whose conversation is new to a router that is told of all; 0: DefaultLeast; below 1: 1; +Inf: whatever the load
	Most   float64 // that of the longest, and of each where its conversation went before; 0: DefaultMost; below Least: Least
	Tokens int64   // by how many tokens the bound grows by one mean; at most 0: DefaultTokens
	Memory int     // how many ends of prompts are remembered, of 16 bytes each, rounded up to a power of two; 0: DefaultMemory; negative: none
}

// Router puts candidates in order. It is safe for concurrent use and takes no lock.
type Router struct {
	least, most, tokens float64
	memory              memory
}

// New makes a router.
func New(cfg Config) *Router {
	r := &Router{
		least:  max(cmp.Or(cfg.Least, DefaultLeast), 1),
		most:   cmp.Or(cfg.Most, DefaultMost),
		tokens: DefaultTokens,
	}
	r.most = max(r.most, r.least)
	if cfg.Tokens > 0 {
		r.tokens = float64(cfg.Tokens)
	}
	if n := cmp.Or(cfg.Memory, DefaultMemory); n > 0 {
		r.memory.init(n)
	}
	return r
}

// rank is what candidates are put in order by, the least first.
type rank struct {
	group uint8   // of groups
	score float64 // its place in the order on which all routers agree; where there is none, or above the bound, its load
}

// The groups of candidates. Those of overflow are the same, behind all others.
const (
	known    = iota // where the conversation went before
	within          // its bound
	above           // its bound
	overflow        // what is added for overflow
)

func (a *rank) less(b *rank) bool {
	return a.group < b.group || a.group == b.group && a.score < b.score
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

// rank says where each candidate belongs.
func (r *Router) rank(ranks []rank, q *Query, cs []Candidate) {
	key := cmp.Or(q.Session, q.Root)
	blind := key == 0 && len(q.Chain) == 0
	bound := r.least
	if !q.Told {
		bound = min(bound+max(float64(q.Tokens), 0)/r.tokens, r.most)
	}
	f := survey(cs)
	var ids [MaxCandidates]uint64
	for i := range cs {
		c := &cs[i]
		ids[i] = xxhash.Sum64String(c.ID)
		weight := float64(f.size(c))
		k := rank{group: within, score: float64(c.Load) / weight}
		switch {
		case blind:
		case f.over(c, bound):
			k.group = above
		case key != 0:
			k.score = exponential(mix(key^ids[i])) / weight
		}
		ranks[i] = k
	}
	if at := r.recall(ids[:len(cs)], q); at >= 0 && !f.over(&cs[at], r.most) {
		ranks[at].group = known
	}
	for i := range cs {
		if cs[i].Overflow {
			ranks[i].group += overflow
		}
	}
}

// recall finds the candidate to which the longest beginning of the prompt went, -1 where that is not known.
func (r *Router) recall(ids []uint64, q *Query) int {
	if !q.Told {
		return -1
	}
	for _, hash := range slices.Backward(q.Chain) {
		place, ok := r.memory.get(hash)
		if !ok {
			continue
		}
		for i, id := range ids {
			if short(id) == place {
				return i
			}
		}
	}
	return -1
}

// Placement says that an endpoint has the beginning of a prompt in its cache, both by their hashes. The zero value says nothing.
type Placement struct {
	Prompt   uint64
	Endpoint uint32
}

// Placed tells where a request went: what it brings is then in that endpoint's cache. What it returns is for the
// routers of other gateways to hear.
func (r *Router) Placed(q *Query, id string) (p Placement) {
	if n := len(q.Chain); n > 0 {
		p = Placement{q.Chain[n-1], short(xxhash.Sum64String(id))}
		r.Heard(p)
	}
	return p
}

// Heard tells where a request of another gateway went.
func (r *Router) Heard(p Placement) { r.memory.put(p.Prompt, p.Endpoint) }

func (c *Candidate) side() int {
	if c.Overflow {
		return 1
	}
	return 0
}

// fleet is what bounds are made of: the largest candidate, and the sums of loads and sizes, apart for overflow.
type fleet struct {
	largest   int64
	load, sum [2]float64
}

func survey(cs []Candidate) fleet {
	f := fleet{largest: 1}
	for i := range cs {
		f.largest = max(f.largest, cs[i].Slots)
	}
	for i := range cs {
		side := cs[i].side()
		f.load[side] += float64(max(cs[i].Load, 0))
		f.sum[side] += float64(f.size(&cs[i]))
	}
	return f
}

func (f *fleet) size(c *Candidate) int64 {
	if c.Slots <= 0 {
		return f.largest
	}
	return c.Slots
}

// over tells whether one request more would lift a candidate's load above the bound: its share of the load of all,
// that request included, times the bound, and at least what is hardly felt there.
func (f *fleet) over(c *Candidate, bound float64) bool {
	side := c.side()
	share := (f.load[side] + 1) * float64(f.size(c)) / f.sum[side]
	return float64(c.Load) >= max(math.Ceil(bound*share), idle(c.Slots))
}

// idle is how much may be in flight at an endpoint of which requests feel little of each other: there is nothing to be had by
// balance yet, and a prompt's beginning to be lost.
func idle(slots int64) float64 {
	if slots <= 0 {
		return idleLeast
	}
	return float64(min(max(idleLeast, slots/idlePart), slots))
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
