package main

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"

	"headgate/proxy/affinity"
)

// The model of a server: prompts are worked off one after the other, but for what is in the prefix cache; then answers
// are written beside each other.
const (
	prefillRate = 10_000 // tokens a second
	outputTime  = 0.025  // seconds a token
	slotTokens  = 16_384 // tokens of a slot: the gateway's default
	slots       = 32     // of a server, by which its load is weighed
	broadcast   = 0.1    // seconds after which gateways know each other's requests
)

// setting is one run.
type setting struct {
	replicas, blocks, gateways int
	busy                       float64 // how busy the servers would be with prompts if nothing were cached
	seed                       uint64
}

// outcome is what came of a run.
type outcome struct {
	hit       float64    // share of blocks found in the cache
	spread    float64    // most to mean of the requests in flight on a server, weighted by time
	p99       float64    // requests in flight on a server, 99th percentile by time
	work      float64    // most to mean of the tokens that servers worked off
	ttft      [2]float64 // seconds to the first token: median and 99th percentile
	meanTTFT  float64
	elsewhere float64 // share of requests that went to another server than the last that began alike
}

// add adds o, times by.
func (sum *outcome) add(o *outcome, by float64) {
	sum.hit += by * o.hit
	sum.spread += by * o.spread
	sum.p99 += by * o.p99
	sum.work += by * o.work
	sum.ttft[0] += by * o.ttft[0]
	sum.ttft[1] += by * o.ttft[1]
	sum.meanTTFT += by * o.meanTTFT
	sum.elsewhere += by * o.elsewhere
}

type replica struct {
	cache    *lru
	free     float64 // when it has worked off all prompts
	inFlight int
	worked   int64
}

// gateway is one that sends requests: it knows its own, and the others' as of the last broadcast.
type gateway struct {
	own, told []int64 // slots in flight, by replica; told are its own at the last broadcast
}

type ending struct {
	at       float64
	gate, on int
	cost     int64
}

type endings []ending

func (e endings) Len() int           { return len(e) }
func (e endings) Less(i, j int) bool { return e[i].at < e[j].at }
func (e endings) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *endings) Push(x any)        { *e = append(*e, x.(ending)) }
func (e *endings) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// world is a run under way.
type world struct {
	choose chooser
	setting
	replicas []replica
	gates    []gateway
	all      []int64 // slots in flight at the last broadcast
	running  endings
	now      float64
	next     float64   // broadcast
	levels   []float64 // seconds, by how many were in flight
	ratio    float64   // most to mean in flight, times seconds
	ratioFor float64   // those seconds

	hits, blocksSeen int
	waits            []float64     // until the first token
	last             map[int32]int // where the last request of a conversation went
	again, moved     int
}

// run replays the trace with that way to choose a server.
func run(t *trace, s setting, choose chooser) outcome {
	w := newWorld(t, s, choose)
	rng := rand.New(rand.NewPCG(s.seed, 1))
	stretch := float64(t.tokens()) / t.seconds() / (s.busy * prefillRate * float64(s.replicas))
	cs := make([]affinity.Candidate, s.replicas)
	for i := range cs {
		cs[i] = affinity.Candidate{ID: "vllm-" + strconv.Itoa(i), Slots: slots}
	}
	for i := range t.requests {
		r := &t.requests[i]
		w.until(r.at * stretch)
		g := rng.IntN(s.gateways)
		w.view(g, cs)
		w.begin(g, choose.pick(g, r, cs), r)
	}
	return w.outcome()
}

func newWorld(t *trace, s setting, choose chooser) *world {
	w := &world{
		setting: s, choose: choose, replicas: make([]replica, s.replicas), gates: make([]gateway, s.gateways),
		all: make([]int64, s.replicas), last: map[int32]int{},
	}
	for i := range w.replicas {
		w.replicas[i].cache = newLRU(s.blocks, t.ids)
	}
	for i := range w.gates {
		w.gates[i] = gateway{own: make([]int64, s.replicas), told: make([]int64, s.replicas)}
	}
	return w
}

// begin gives a request to a server.
func (w *world) begin(g, on int, r *request) {
	p := &w.replicas[on]
	n := p.cache.use(r.blocks)
	w.hits, w.blocksSeen = w.hits+n, w.blocksSeen+len(r.blocks)
	work := max(r.input-int64(n)*blockTokens, 1)
	p.worked += work
	p.free = max(p.free, w.now) + float64(work)/prefillRate
	w.waits = append(w.waits, p.free-w.now)
	cost := min(max((r.input+r.output+slotTokens-1)/slotTokens, 1), slots/2)
	w.gates[g].own[on] += cost
	p.inFlight++
	heap.Push(&w.running, ending{at: p.free + float64(r.output)*outputTime, gate: g, on: on, cost: cost})
	root := r.blocks[min(len(r.blocks), rootBlocks)-1]
	if was, ok := w.last[root]; ok {
		w.again++
		if was != on {
			w.moved++
		}
	}
	w.last[root] = on
}

// until lets time pass.
func (w *world) until(at float64) {
	for len(w.running) > 0 && w.running[0].at <= at {
		e := heap.Pop(&w.running).(ending)
		w.pass(e.at)
		w.gates[e.gate].own[e.on] -= e.cost
		w.replicas[e.on].inFlight--
	}
	w.pass(at)
}

// pass counts the time until then, in which nothing changes, and broadcasts.
func (w *world) pass(at float64) {
	if d := at - w.now; d > 0 {
		most, sum := 0, 0
		for i := range w.replicas {
			n := w.replicas[i].inFlight
			most, sum = max(most, n), sum+n
			for n >= len(w.levels) {
				w.levels = append(w.levels, 0)
			}
			w.levels[n] += d
		}
		if sum > 0 {
			w.ratio += d * float64(most*len(w.replicas)) / float64(sum)
			w.ratioFor += d
		}
	}
	if at >= w.next {
		clear(w.all)
		for i := range w.gates {
			copy(w.gates[i].told, w.gates[i].own)
			for j, n := range w.gates[i].own {
				w.all[j] += n
			}
		}
		w.choose.broadcast()
		w.next = (math.Floor(at/broadcast) + 1) * broadcast
	}
	w.now = at
}

// view is the load that a gateway knows of.
func (w *world) view(g int, cs []affinity.Candidate) {
	for i := range cs {
		cs[i].Load = w.all[i] + w.gates[g].own[i] - w.gates[g].told[i]
	}
}

func (w *world) outcome() outcome {
	o := outcome{
		hit: float64(w.hits) / float64(w.blocksSeen), spread: w.ratio / max(w.ratioFor, 1e-9),
		elsewhere: float64(w.moved) / max(float64(w.again), 1),
	}
	var total, below float64
	for _, d := range w.levels {
		total += d
	}
	for n, d := range w.levels {
		if below += d; below >= .99*total {
			o.p99 = float64(n)
			break
		}
	}
	var most, sum int64
	for i := range w.replicas {
		most, sum = max(most, w.replicas[i].worked), sum+w.replicas[i].worked
	}
	o.work = float64(most) * float64(len(w.replicas)) / float64(sum)
	for _, x := range w.waits {
		o.meanTTFT += x / float64(len(w.waits))
	}
	slices.Sort(w.waits)
	o.ttft = [2]float64{w.waits[len(w.waits)/2], w.waits[len(w.waits)*99/100]}
	return o
}
