package main

import (
	"fmt"
	"math"

	"headgate/proxy/affinity"
)

// rootBlocks is how many leading blocks stand for the beginning of a conversation: the first is the system prompt, which
// all requests of the trace have in common.
const rootBlocks = 2

// chooser chooses the server of a request.
type chooser interface {
	pick(gateway int, r *request, cs []affinity.Candidate) int
	// broadcast tells the gateways what the others did since the last time.
	broadcast()
}

// turns is round robin, each gateway by itself.
type turns struct{ at []int }

func (t *turns) pick(g int, _ *request, cs []affinity.Candidate) int {
	t.at[g] = (t.at[g] + 1) % len(cs)
	return t.at[g]
}

func (t *turns) broadcast() {}

// least takes the least loaded; ties rotate.
type least struct{ turns }

func (l *least) pick(g int, r *request, cs []affinity.Candidate) int {
	best := l.turns.pick(g, r, cs)
	for i := range cs {
		if j := (l.at[g] + i) % len(cs); cs[j].Load < cs[best].Load {
			best = j
		}
	}
	return best
}

// router is the gateway's own.
type router struct {
	routers []*affinity.Router // of each gateway
	root    int                // leading blocks that stand for the beginning; 0: none
	told    bool               // gateways tell each other where requests went, and so know of all
	mute    bool               // they only believe so
	news    []news
	order   []int
	rotated []affinity.Candidate
	turns
}

// news is where a request went, until the others know.
type news struct {
	gateway int
	r       *request
	id      string
}

func newRouter(gateways, root int, cfg affinity.Config) *router {
	r := &router{root: root, turns: turns{make([]int, gateways)}}
	for range gateways {
		r.routers = append(r.routers, affinity.New(cfg))
	}
	return r
}

func (c *router) pick(g int, r *request, cs []affinity.Candidate) int {
	q := affinity.Query{Chain: r.chain, Tokens: r.input, Told: c.told}
	if c.root > 0 {
		q.Root = mix(uint64(r.blocks[min(c.root, len(r.blocks))-1]))
	}
	first := c.turns.pick(g, r, cs) // as the pool rotates those that are equal
	c.rotated = append(append(c.rotated[:0], cs[first:]...), cs[:first]...)
	c.order = c.routers[g].Order(c.order[:0], &q, c.rotated)
	on := (c.order[0] + first) % len(cs)
	c.routers[g].Placed(&q, cs[on].ID)
	if c.told && !c.mute {
		c.news = append(c.news, news{g, r, cs[on].ID})
	}
	return on
}

func (c *router) broadcast() {
	for _, n := range c.news {
		for g, r := range c.routers {
			if g != n.gateway {
				r.Placed(&affinity.Query{Chain: n.r.chain}, n.id)
			}
		}
	}
	c.news = c.news[:0]
}

// mix makes a hash of a block's id.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// contender is a way to choose, by its name.
type contender struct {
	name   string
	curve  string // the line in the picture that it is a point of; "" for none
	hidden bool   // it is not told of in words, only drawn and listed
	make   func(gateways int) chooser
}

// Names that the report needs.
const (
	roundRobin  = "round robin"
	leastLoaded = "least loaded"
	flat        = "2 leading blocks, bound 1.25"
	ours        = "ours"
	oursTold    = "ours, told of all"
	curveFlat   = "fixed bound"
	curveOurs   = "ours"
	curveTold   = "ours, told of all"
)

func contenders() []contender {
	routed := func(root int, told bool, cfg affinity.Config) func(int) chooser {
		return func(gateways int) chooser {
			r := newRouter(gateways, root, cfg)
			r.told = told
			return r
		}
	}
	fixed := func(bound float64) affinity.Config { return affinity.Config{Least: bound, Most: bound, Memory: -1} }
	all := []contender{
		{name: roundRobin, curve: roundRobin, make: func(n int) chooser { return &turns{make([]int, n)} }},
		{name: leastLoaded, curve: leastLoaded, make: func(n int) chooser { return &least{turns{make([]int, n)}} }},
	}
	for _, k := range []int{1, 2, 4, 8} {
		all = append(all, contender{name: fmt.Sprintf("%d leading blocks, no bound", k), make: routed(k, false, fixed(math.Inf(1)))})
	}
	for _, c := range []float64{1, 1.1, 1.25, 1.5, 2, 3} {
		all = append(all, contender{name: fmt.Sprintf("2 leading blocks, bound %g", c), curve: curveFlat, make: routed(2, false, fixed(c))})
	}
	for _, tokens := range []int64{1 << 13, 1 << 14, affinity.DefaultTokens, 1 << 16, 1 << 17} {
		k := contender{name: ours, curve: curveOurs, make: routed(2, false, affinity.Config{Tokens: tokens})}
		if tokens != affinity.DefaultTokens {
			k.name, k.hidden = fmt.Sprintf("ours, bound 1 + tokens/%d", tokens), true
		}
		all = append(all, k)
	}
	for _, most := range []float64{1, 1.25, 1.5, affinity.DefaultMost, 3} {
		k := contender{name: oursTold, curve: curveTold, make: routed(2, true, affinity.Config{Most: most})}
		if most != affinity.DefaultMost {
			k.name, k.hidden = fmt.Sprintf("%s, bound %g where it went", oursTold, most), true
		}
		all = append(all, k)
	}
	return append(
		all,
		contender{name: "where it went as far as known, else least loaded", make: func(n int) chooser {
			r := newRouter(n, 0, affinity.Config{})
			r.told, r.mute = true, true
			return r
		}},
		contender{name: "where it went, told of all, else least loaded", make: routed(0, true, affinity.Config{})},
	)
}
