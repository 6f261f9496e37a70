package lease

import (
	"math/rand/v2"
	"slices"
	"time"

	"headgate/cluster"
	"headgate/limiter"
)

// The times of the faults. Those of package cluster that it does not export are held against it by TestFaultTimes, or come from
// where it says.
const (
	deadAfter   = 300 * time.Millisecond // cluster.ViewConfig: without a request for a view lease, of who is dead
	debounce    = 100 * time.Millisecond // cluster.ViewConfig: from the first change until the view
	rejoinAfter = 2 * time.Second        // cluster.ViewConfig: from its removal until a process may come back
	watchEvery  = 250 * time.Millisecond // cluster/gossip.go: between two pings of one that a node watches
	pingTimeout = 100 * time.Millisecond // cluster/gossip.go
	cutFound    = 2 * time.Second        // cluster/gossip.go: at most, until gossip gives up who is cut off
	reunited    = 2 * time.Second        // cluster/gossip.go: at most, from the end of a cut until gossip tries those again
	viewLease   = 980 * time.Millisecond // cluster/fence.go: from the send of the request for it
	startFor    = 1360 * time.Millisecond
	// startFor is what bench/results/cluster.txt has for a process from its start to ready, the median.

	// A store in the middle that crashes is away for so long and comes back empty, so that every bucket is full: a replica that
	// Redis Sentinel makes the master (down-after-milliseconds 5000) of data that was not written to a disk yet. Its clients refuse
	// meanwhile.
	storeAway = 5 * time.Second
	// askFor is how long a client of the store waits for an answer; so long does Headgate for an owner's.
	askFor = 250 * time.Millisecond
	// blockLost is how long the store hears nothing of a holder of blocks before it counts as spent what that has, and how long a
	// holder that hears nothing of the store goes on spending, each with a margin.
	blockLost = 2 * time.Duration(blockFor)
)

// restartEvery is from one node's leave to the next one's, in a rolling restart.
const restartEvery = 2500 * time.Millisecond

// plan says what a cell's fault does to which node, when. Every policy gets the same.
type plan struct {
	fault     Fault
	at, until int64 // of the fault, ns from the start; until is of a Partition
	nodes     int   // that are there at first
	seed      uint64
	owner     int // of the first tenant's bucket
	victim    int // that crashes; -1: none
	cut       []bool
	leaves    []leave
}

// leave is a node that is restarted.
type leave struct {
	node int
	at   int64
}

// plan makes the plan of a cell, nil where nothing fails. Faults want two nodes.
func (c *Cell) plan() *plan {
	if c.Fault == NoFault || c.Nodes < 2 {
		return nil
	}
	p := &plan{fault: c.Fault, at: int64(c.length() / 3), nodes: c.Nodes, seed: c.Seed, victim: -1, cut: make([]bool, c.Nodes+1)}
	p.owner = p.home(0, func(node int) bool { return node < c.Nodes })
	switch c.Fault {
	case OwnerCrash:
		p.victim = p.owner
	case HolderCrash:
		p.victim = 0 // the one with the most demand
		if p.owner == 0 {
			p.victim = 1
		}
	case Partition:
		p.until = p.at + int64(c.length()/6)
		for i := range max(1, c.Nodes/3) {
			p.cut[(p.owner+1+3*i)%c.Nodes] = true
		}
		p.cut[p.owner] = false
	case RollingRestart:
		// As many as there is time for, the owner first.
		n := min(c.Nodes, max(1, int(c.length()/2/restartEvery)))
		for i := range n {
			p.leaves = append(p.leaves, leave{(p.owner + i) % c.Nodes, p.at + int64(i)*int64(restartEvery)})
		}
	}
	return p
}

// home is the node, of those that are there, that owns a tenant's bucket: the one with the highest hash, which stands for the ring.
// So a bucket moves only if its owner goes, or to a node that comes. The first tenant's moves to the one that joins.
func (p *plan) home(tenant int32, there func(node int) bool) int {
	best, highest := -1, uint64(0)
	for i := range p.nodes + 1 {
		if !there(i) {
			continue
		}
		if i == p.nodes && tenant == 0 {
			return i
		}
		if x := splitmix(splitmix(p.seed, uint64(tenant)), uint64(i)); best < 0 || x > highest {
			best, highest = i, x
		}
	}
	return best
}

// where is the node at which a request arrives: its own, if it is there; else the next one that is. A node that has joined has its
// part of all demand.
func (p *plan) where(id int, a *Arrival, there func(node int) bool) int {
	if there(p.nodes) && splitmix(p.seed, uint64(a.At)^uint64(id))%uint64(p.nodes+1) == 0 {
		return p.nodes
	}
	for i := range p.nodes {
		if n := (int(a.Node) + i) % p.nodes; there(n) {
			return n
		}
	}
	return int(a.Node)
}

// apart says whether a node is cut off from the others, and from the store, at a time.
func (p *plan) apart(node int, now int64) bool {
	return p.fault == Partition && p.cut[node] && now >= p.at && now < p.until
}

// found is how long after its crash a process is in no view any more: gossip has it that it is dead after a ping of who watches it, and
// the leader has not been asked for a view lease for deadAfter, for which processes ask every cluster.KeepEvery.
func found(r *rand.Rand) time.Duration {
	gossip := rand64(r, watchEvery) + pingTimeout
	silent := deadAfter - rand64(r, cluster.KeepEvery)
	return max(gossip, silent) + debounce
}

func rand64(r *rand.Rand, below time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(below)))
}

// faulty is a contender to which faults happen: a baseline. Nodes are taken out of and put back into the demand by the world.
type faulty interface {
	crash(node int)   // the node is gone, and what waited there
	leave(node int)   // the node says what it has to and goes, with leave
	comes(node int)   // a process that knows nothing
	emptied()         // the store knows nothing any more
	deaf(apart []int) // nodes that have heard nothing of the store for blockLost
}

// troubles has a baseline's world go wrong as planned. The store is no node: it crashes where an owner would.
func (w *world) troubles() {
	p := w.plan
	w.gone = make([]bool, p.nodes+1)
	w.gone[p.nodes] = true
	w.lives = make([]int, p.nodes+1)
	f, _ := w.who.(faulty)
	if f == nil {
		return // Headgate sees to it itself
	}
	at := func(t int64, do func()) { w.after(t-w.now, do) }
	switch p.fault {
	case OwnerCrash:
		at(p.at, func() { w.storeGone = true })
		at(p.at+int64(storeAway), func() { w.storeGone = false; f.emptied() })
	case HolderCrash:
		at(p.at, func() {
			w.gone[p.victim] = true
			w.lives[p.victim]++
			f.crash(p.victim)
		})
		at(p.at+int64(blockLost), func() { f.deaf([]int{p.victim}) })
	case Partition:
		var cut []int
		for i, c := range p.cut {
			if c {
				cut = append(cut, i)
			}
		}
		if lost := p.at + int64(blockLost); lost < p.until {
			at(lost, func() { f.deaf(cut) })
		}
	case Join:
		at(p.at+int64(startFor), func() {
			f.comes(p.nodes)
			w.gone[p.nodes] = false
		})
	case RollingRestart:
		for _, l := range p.leaves {
			at(l.at, func() { w.gone[l.node] = true })
			// Until what is under way there is answered.
			at(l.at+int64(askFor), func() { f.leave(l.node) })
			at(l.at+int64(askFor+startFor), func() {
				w.lives[l.node]++
				f.comes(l.node)
				w.gone[l.node] = false
			})
		}
	}
}

// node is where a request arrives.
func (w *world) node(id int) int {
	if w.plan == nil {
		return int(w.demand[id].Node)
	}
	return w.plan.where(id, &w.demand[id], func(i int) bool { return !w.gone[i] })
}

// call is a question of a node to the store, and its answer. Where there is none, failed is called: when the connection is refused, or after
// askFor. A node that has crashed meanwhile hears of neither.
func (w *world) call(node int, asked, answered, failed func()) {
	life, sent := 0, w.now
	if w.plan != nil {
		life = w.lives[node]
	}
	back := func(do func()) func() {
		return func() {
			if w.plan == nil || w.lives[node] == life {
				do()
			}
		}
	}
	cut := func() bool { return w.plan != nil && w.plan.apart(node, w.now) }
	silent := func() { w.after(sent+int64(askFor)-w.now, back(failed)) }
	if cut() {
		silent()
		return
	}
	w.after(w.way(), func() {
		switch {
		case w.storeGone:
			w.after(w.way(), back(failed))
		case cut():
			silent()
		default:
			asked()
			w.after(w.way(), func() {
				if cut() {
					silent()
					return
				}
				back(answered)()
			})
		}
	})
}

// Troubles is every cell with a fault that is measured: the first five, one a fault, are what a quick run has of them.
func Troubles() (cs []Cell) {
	limits := []Cell{
		{Name: "100 requests/s", Mean: 1, Limit: limiter.Limit{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100}},
		{Name: "20M tokens/min", Mean: 1000, Sigma: 1, Limit: limiter.Limit{Rate: limiter.Rate{Count: 20_000_000, Per: time.Minute}, Burst: 20_000_000 / 6}},
	}
	for _, c := range limits {
		for _, c.Nodes = range []int{4, 16} {
			for _, c.Load = range []float64{0.9, 2} {
				for _, c.Fault = range Faults()[1:] {
					c.Seed, c.For = 1, time.Minute
					cs = append(cs, c)
				}
			}
		}
	}
	return cs
}

// nodesOf is how many nodes there may be: one more where one joins.
func (c *Cell) nodesOf() int {
	if c.Fault == Join {
		return c.Nodes + 1
	}
	return c.Nodes
}

// lost marks the requests that were never decided, since their node crashed.
func (w *world) lost() {
	if w.plan == nil || !slices.Contains([]Fault{OwnerCrash, HolderCrash}, w.plan.fault) {
		return
	}
	for i := range w.fate {
		if f := &w.fate[i]; !f.Decided {
			f.Lost = true
		}
	}
}
