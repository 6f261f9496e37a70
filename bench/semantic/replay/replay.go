// Package replay plays questions to a semantic cache of one partition, whose neighbours are found exactly, and counts
// what it serves, and what of that is wrong. Questions of the same intent have the same answer.
package replay

import (
	"math"
	"math/rand/v2"
	"slices"

	"headgate/bench/semantic/corpus"
	"headgate/cache/threshold"
)

// Stream is questions in an order, with how similar each is to those before it. Safe for concurrent use.
type Stream struct {
	Prompts []corpus.Prompt
	intents []int32
	sims    []float32 // row i holds those of i to 0 … i-1
	// Refuses tells whether a guard forbids to give the answer of question b to question a; nil: none does.
	Refuses func(a, b int) bool
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
			row[j] = dot(vectors[x], vectors[order[j]])
		}
	}
	return s
}

func dot(a, b []float32) float32 {
	var sum [8]float32
	for len(a) >= 8 && len(b) >= 8 {
		for i := range sum {
			sum[i] += a[i] * b[i]
		}
		a, b = a[8:], b[8:]
	}
	for i := range a {
		sum[0] += a[i] * b[i]
	}
	return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7]
}

func (s *Stream) row(i int) []float32 { return s.sims[i*(i-1)/2:][:i] }

// Result is what a replay came to.
type Result struct {
	Requests, Served, Wrong int // Wrong of the served
	Explored, Audited       int
	WouldHits               int
	Entries                 int
	Snapshot                threshold.Snapshot
	// Late are the counts of the second half alone, when there was something to learn from.
	LateRequests, LateServed, LateWrong int
}

func share(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// HitRate is the share of requests that were served.
func (r *Result) HitRate() float64 { return share(r.Served, r.Requests) }

// PerRequest is the share of requests that were answered wrongly.
func (r *Result) PerRequest() float64 { return share(r.Wrong, r.Requests) }

// PerHit is the share of hits that were wrong.
func (r *Result) PerHit() float64 { return share(r.Wrong, r.Served) }

// entry is one of the cache.
type entry struct {
	question int
	class    uint64
	own      threshold.Observations
}

// near is an entry that is close to the question.
type near struct {
	e *entry
	s float32
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

// nearest are the entries next to question i which no guard refuses, the nearest first, at most threshold.MaxNeighbors.
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
		found = slices.Insert(found, at, near{e, v})
		least = found[len(found)-1].s
	}
	c.found = found
	if c.stream.Refuses != nil {
		found = slices.DeleteFunc(found, func(n near) bool { return c.stream.Refuses(i, n.e.question) })
	}
	return found[:min(len(found), threshold.MaxNeighbors)]
}

// insert makes question i an entry. Its answer is compared with those of its neighbours.
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

// Run plays the stream to an empty cache under the policy. The same seed makes the same result.
func (s *Stream) Run(p threshold.Policy, seed uint64) Result {
	rng := rand.New(rand.NewPCG(seed, 0xca11))
	c := &cache{stream: s, found: make([]near, 0, candidates+1)}
	pool, budget := threshold.NewPool(), threshold.NewBudget(&p)
	r := Result{Requests: len(s.Prompts)}
	for i := range s.Prompts {
		late := 2*i >= len(s.Prompts)
		if late {
			r.LateRequests++
		}
		found := c.nearest(i)
		if len(found) == 0 {
			budget.Count(threshold.Miss)
			c.insert(i, nil)
			continue
		}
		first := found[0]
		e := threshold.Evidence{Similarity: float64(first.s), Answer: first.e.class, Own: &first.e.own, Pool: pool}
		for _, n := range found {
			e.Neighbors = append(e.Neighbors, threshold.Neighbor{Similarity: float64(n.s), Answer: n.e.class})
		}
		d := p.Decide(&e, budget, rng)
		same := s.intents[first.e.question] == s.intents[i]
		budget.Count(d.Action)
		pool.Seen(d.Cell)
		if d.WouldHit() {
			r.WouldHits++
		}
		switch d.Action {
		case threshold.Serve:
			r.Served++
			if !same {
				r.Wrong++
			}
			if late {
				r.LateServed++
				if !same {
					r.LateWrong++
				}
			}
			continue
		case threshold.Miss:
			if p.Inserts(e.Similarity, false, false) {
				c.insert(i, found)
			}
			continue
		case threshold.Explore:
			r.Explored++
		case threshold.Audit:
			r.Audited++
			budget.Label(same)
		}
		first.e.own.Add(e.Similarity, d.Cell, same)
		pool.Add(d.Cell, same)
		if p.Inserts(e.Similarity, same, true) {
			c.insert(i, found)
		}
	}
	r.Entries, r.Snapshot = len(c.entries), budget.Snapshot()
	return r
}
