package hnsw

import (
	"runtime"
	"sync/atomic"
)

// gate lets a writer wait until all readers have left that had come before, without keeping
// any out: readers count themselves by phase, and the writer turns the phase (as sleepable RCU
// does). Readers do two atomic additions.
type gate struct {
	phase atomic.Uint32
	in    [2]atomic.Int64
}

// enter counts a reader in; what it returns is for leave.
func (g *gate) enter() uint32 {
	p := g.phase.Load() & 1
	g.in[p].Add(1)
	return p
}

func (g *gate) leave(p uint32) { g.in[p].Add(-1) }

// wait returns when every reader has left that entered before the call. One writer at a time.
func (g *gate) wait() {
	p := g.phase.Load() & 1
	g.drain(1 - p) // who read the phase before it last turned, and entered after
	g.phase.Store(1 - p)
	g.drain(p)
}

// drain ends when nobody is in phase p, into which nobody enters but a straggler. It takes as long
// as the longest search.
func (g *gate) drain(p uint32) {
	for g.in[p].Load() != 0 {
		runtime.Gosched()
	}
}
