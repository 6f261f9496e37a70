// Package replay plays questions to a semantic cache of one partition, whose neighbours are found exactly, and counts
// what it serves, and what of that is wrong. Questions of the same intent have the same answer.
package replay

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"

	"headgate/bench/semantic/corpus"
	"headgate/cache/guard"
	"headgate/cache/threshold"
	"headgate/cache/vec"
)

// Stream is questions in an order, with how similar each is to those before it. Safe for concurrent use.
type Stream struct {
	Prompts []corpus.Prompt
	intents []int32
	sims    []float32 // row i holds those of i to 0 … i-1
	guards  *guards   // nil: none
}

// guards remembers which pairs the guards refuse.
type guards struct {
	texts []*guard.Text
	mu    sync.Mutex
	known map[[2]int32]bool
}

func (g *guards) refuses(a, b int) bool {
	pair := [2]int32{int32(a), int32(b)}
	g.mu.Lock()
	refused, known := g.known[pair]
	g.mu.Unlock()
	if !known {
		refused = !g.texts[a].Compare(g.texts[b]).Allowed()
		g.mu.Lock()
		g.known[pair] = refused
		g.mu.Unlock()
	}
	return refused
}

// Guarded is the same stream, whose entries are served only where no guard refuses it.
func (s *Stream) Guarded() *Stream {
	with := *s
	with.guards = &guards{texts: make([]*guard.Text, len(s.Prompts)), known: map[[2]int32]bool{}}
	for i, p := range s.Prompts {
		with.guards.texts[i] = guard.Parse(p.Text)
	}
	return &with
}

// Uniform is the same stream, whose first n questions all get one answer in the same words: that of an outage, say, or a
// refusal; or one of several, one after the other.
func (s *Stream) Uniform(n, several int) *Stream {
	with := *s
	with.intents = slices.Clone(s.intents)
	for i := range min(n, len(with.intents)) {
		with.intents[i] = -1 - int32(i*several/n)
	}
	return &with
}

// words names the words of the answer to question i; 0 where it has words of its own, as real answers have.
func (s *Stream) words(i int) uint64 { return uint64(max(0, -s.intents[i])) }

// First is the stream of the first n questions.
func (s *Stream) First(n int) *Stream {
	with := *s
	with.Prompts = s.Prompts[:min(n, len(s.Prompts))]
	return &with
}

// NewStream draws n of all questions by seed, without replacement, and compares them by their vectors. Fewer than n
// questions are all drawn.
func NewStream(all []corpus.Prompt, vectors [][]float32, n int, seed uint64) *Stream {
	order := rand.New(rand.NewPCG(seed, 0x5eed)).Perm(len(all))
	order = order[:min(n, len(order))]
	s := &Stream{Prompts: make([]corpus.Prompt, len(order)), intents: make([]int32, len(order)), sims: make([]float32, len(order)*(len(order)-1)/2)}
	known := map[string]int32{}
	for i, x := range order {
		s.Prompts[i] = all[x]
		intent, seen := known[all[x].Intent]
		if !seen {
			intent = int32(len(known))
			known[all[x].Intent] = intent
		}
		s.intents[i] = intent
		row := s.row(i)
		for j := range row {
			row[j] = vec.Dot(vectors[x], vectors[order[j]])
		}
	}
	return s
}

func (s *Stream) row(i int) []float32 { return s.sims[i*(i-1)/2:][:i] }

// Result is what a replay came to.
type Result struct {
	Requests, Served, Wrong int // Wrong of the served
	Explored, Audited       int
	Entries                 int
	Snapshot                threshold.Snapshot
	// Late are the counts of the second half alone, when there was something to learn from.
	LateRequests, LateServed, LateWrong int
}

// Add adds up the counts of several replays. The snapshot stays what it was.
func (r *Result) Add(o *Result) {
	r.Requests += o.Requests
	r.Served += o.Served
	r.Wrong += o.Wrong
	r.Explored += o.Explored
	r.Audited += o.Audited
	r.Entries += o.Entries
	r.LateRequests += o.LateRequests
	r.LateServed += o.LateServed
	r.LateWrong += o.LateWrong
}

func share(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// HitRate is the share of requests that were served.
func (r *Result) HitRate() float64 { return share(r.Served, r.Requests) }

// LateHitRate is the share of the second half of the requests that was served, when there was something to go by.
func (r *Result) LateHitRate() float64 { return share(r.LateServed, r.LateRequests) }

// PerRequest is the share of requests that were answered wrongly.
func (r *Result) PerRequest() float64 { return share(r.Wrong, r.Requests) }

// PerHit is the share of hits that were wrong.
func (r *Result) PerHit() float64 { return share(r.Wrong, r.Served) }

// Options are of a replay.
type Options struct {
	Policy threshold.Policy
	Seed   uint64 // of what is left to chance
	// Reluctant inserts an answer only where it was found to be another than the candidate's, whatever the policy inserts.
	Reluctant bool
	// Coarse compares an answer that is inserted with the candidate's only, so that two entries with the same answer may
	// not know of each other.
	Coarse bool
}

// entry is one of the cache.
type entry struct {
	question int
	class    uint64
	own      threshold.Observations
}

// near is an entry that is close to the question.
type near struct {
	e       *entry
	s       float32
	refused bool // by a guard
}

// cache is the partition.
type cache struct {
	stream  *Stream
	entries []*entry
	classes uint64
	found   []near
}

// candidates is how many neighbours are looked at before the guards: those of the vote, and as many that they may refuse.
const candidates = 2 * threshold.MaxNeighbors

// nearest are the candidates next to question i, the nearest first.
func (c *cache) nearest(i int) []near {
	row, found := c.stream.row(i), c.found[:0]
	least := float32(math.Inf(-1))
	for _, e := range c.entries {
		v := row[e.question]
		if len(found) == candidates && v <= least {
			continue
		}
		at, _ := slices.BinarySearchFunc(found, v, func(n near, v float32) int {
			if n.s >= v {
				return -1
			}
			return 1
		})
		if len(found) == candidates {
			found = found[:candidates-1]
		}
		found = slices.Insert(found, at, near{e, v, false})
		least = found[len(found)-1].s
	}
	c.found = found
	if g := c.stream.guards; g != nil {
		for j := range found {
			found[j].refused = g.refuses(i, found[j].e.question)
		}
	}
	return found
}

// insert makes question i an entry. Its answer is compared with those of its neighbours found.
func (c *cache) insert(i int, found []near) {
	e := &entry{question: i}
	at := slices.IndexFunc(found, func(n near) bool { return c.stream.intents[n.e.question] == c.stream.intents[i] })
	if at >= 0 {
		e.class = found[at].e.class
	} else {
		c.classes++
		e.class = c.classes
	}
	c.entries = append(c.entries, e)
}

// Run plays the stream to an empty cache. The same options make the same result.
func (s *Stream) Run(o Options) Result {
	g := game{
		Options: o, stream: s, rng: rand.New(rand.NewPCG(o.Seed, 0xca11)),
		cache: cache{stream: s, found: make([]near, 0, candidates+1)}, pool: threshold.NewPool(), budget: threshold.NewBudget(&o.Policy),
		result: Result{Requests: len(s.Prompts), LateRequests: len(s.Prompts) / 2},
	}
	for i := range s.Prompts {
		g.ask(i)
	}
	g.result.Entries, g.result.Snapshot = len(g.cache.entries), g.budget.Snapshot()
	return g.result
}

// game is a replay under way.
type game struct {
	Options
	stream *Stream
	rng    *rand.Rand
	cache  cache
	pool   *threshold.Pool
	budget *threshold.Budget
	result Result
}

// ask plays question i.
func (g *game) ask(i int) {
	found := g.cache.nearest(i)
	at := slices.IndexFunc(found, func(n near) bool { return !n.refused })
	if at < 0 {
		g.budget.Count(threshold.Miss)
		g.cache.insert(i, found[:min(len(found), threshold.MaxNeighbors)])
		return
	}
	first := found[at]
	found = found[:min(len(found), threshold.MaxNeighbors)]
	e := threshold.Evidence{Similarity: float64(first.s), Answer: first.e.class, Own: &first.e.own, Pool: g.pool, Neighbors: make([]threshold.Neighbor, len(found))}
	for j, n := range found {
		e.Neighbors[j] = threshold.Neighbor{Similarity: float64(n.s), Answer: n.e.class, Refused: n.refused}
	}
	d := g.Policy.Decide(&e, g.budget, g.rng)
	same := g.stream.intents[first.e.question] == g.stream.intents[i]
	g.budget.Count(d.Action)
	g.pool.Seen(d.Cell)
	if d.Action == threshold.Serve {
		g.served(i, same)
		return
	}
	labelled := d.Action != threshold.Miss || g.Reluctant
	if labelled {
		first.e.own.Add(e.Similarity, d.Cell, same)
		g.pool.Add(d.Cell, same, first.e.class, g.stream.words(first.e.question))
	}
	switch d.Action {
	case threshold.Explore:
		g.result.Explored++
	case threshold.Audit:
		g.result.Audited++
		g.budget.Label(same)
	}
	if inserts := g.Policy.Inserts(e.Similarity, same, labelled); g.Reluctant && !same || !g.Reluctant && inserts {
		if g.Coarse {
			found = []near{first}
		}
		g.cache.insert(i, found)
	}
}

func (g *game) served(i int, same bool) {
	wrong := 0
	if !same {
		wrong = 1
	}
	g.result.Served++
	g.result.Wrong += wrong
	if i >= len(g.stream.Prompts)-g.result.LateRequests {
		g.result.LateServed++
		g.result.LateWrong += wrong
	}
}
