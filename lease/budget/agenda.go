package budget

import (
	"container/heap"
	"sync"
	"time"
)

// MaxDraws bounds the draws under way; maxQuiet those of them that no request needs soon.
const (
	MaxDraws = 64
	maxQuiet = 48
)

// probeEvery is the ns between draws while the ledger is out of reach.
const probeEvery = int64(time.Second)

// The queues of an agenda.
const (
	rushed = iota
	quiet
	queues
)

// agenda is when which account has something to do.
type agenda struct {
	mu    sync.Mutex
	due   [queues]dues
	busy  [queues]int   // draws under way
	probe int64         // the next draw while the ledger is out of reach; 0: it is not
	soon  chan struct{} // something may be due sooner
}

// dues is a heap by time. Its entries are guarded by the agenda's lock.
type dues []*entry

// entry is an account's place on the agenda.
type entry struct {
	cell  *cell
	at    int64
	place int // -1: none
	queue int
}

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].at < d[j].at }
func (d dues) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].place, d[j].place = i, j
}

// Push is heap.Interface's.
func (d *dues) Push(x any) {
	e := x.(*entry)
	e.place = len(*d)
	*d = append(*d, e)
}

// Pop is heap.Interface's.
func (d *dues) Pop() any {
	last := len(*d) - 1
	e := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	e.place = -1
	return e
}

// put has c seen to at a time, at the latest.
func (g *agenda) put(c *cell, at int64, queue int) {
	g.mu.Lock()
	e := &c.entry
	if e.place >= 0 {
		heap.Remove(&g.due[e.queue], e.place)
	}
	e.at, e.queue = at, queue
	heap.Push(&g.due[queue], e)
	first := e.place == 0
	g.mu.Unlock()
	if first {
		g.hurry()
	}
}

// remove has c not seen to any more.
func (g *agenda) remove(c *cell) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if e := &c.entry; e.place >= 0 {
		heap.Remove(&g.due[e.queue], e.place)
	}
}

func (g *agenda) hurry() { signal(g.soon) }

// take returns an account that has something to do for which there is room, or when to ask again.
func (g *agenda) take(now int64) (c *cell, queue int, wait int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now < g.probe {
		return nil, 0, g.probe
	}
	wait = never
	for q := range g.due {
		if g.busy[rushed]+g.busy[quiet] >= MaxDraws || q == quiet && g.busy[quiet] >= maxQuiet || len(g.due[q]) == 0 {
			continue // whoever ends a draw hurries
		}
		if first := g.due[q][0]; first.at > now {
			wait = min(wait, first.at)
			continue
		}
		e := heap.Pop(&g.due[q]).(*entry)
		g.busy[q]++
		if g.probe != 0 {
			g.probe = now + probeEvery
		}
		return e.cell, q, 0
	}
	return nil, 0, wait
}

// ended gives back the room that take gave, and the probe if none was made.
func (g *agenda) ended(queue int, drew bool) {
	g.mu.Lock()
	g.busy[queue]--
	if !drew && g.probe != 0 {
		g.probe = 1
	}
	g.mu.Unlock()
	g.hurry()
}

// probing has one draw a second made from now on, or as many as there are.
func (g *agenda) probing(now int64, on bool) {
	g.mu.Lock()
	switch {
	case !on:
		g.probe = 0
	case g.probe == 0:
		g.probe = now + probeEvery
	}
	g.mu.Unlock()
	g.hurry()
}
