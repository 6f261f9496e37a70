package dispatch

import (
	"sync"
	"sync/atomic"
	"time"

	"headgate/proxy/queue"
)

// The bounds of what a node has to say.
const (
	maxDones     = 1 << 16 // requests that ended and are not told yet; of more only the slots are told
	maxPlaced    = 1 << 12 // placements that are not told yet; more are not told
	maxEndpoints = 4 * queue.MaxBackends
)

// endpoint is a backend as this node uses it.
type endpoint struct {
	id      string
	used    atomic.Int64 // slots that this node's requests have
	waiting atomic.Int64 // this node's tickets that name it
	// As the scheduler said last.
	contended atomic.Bool // others wait: what is free is for them
	limited   atomic.Bool // not all slots may be used, so that the scheduler counts

	dirty atomic.Bool // it is in news.dirty
	seen
}

// seen is what requests found at a backend, since it was last told.
type seen struct {
	firstByte, firstBytes, answer, answers, pushbacks, pausedTill, failures atomic.Int64
}

// found is that at one moment.
type found struct {
	firstByte, firstBytes, answer, answers, pushbacks, pause, failures int64
}

func (s *seen) take(now int64) found {
	return found{
		s.firstByte.Swap(0), s.firstBytes.Swap(0), s.answer.Swap(0), s.answers.Swap(0), s.pushbacks.Swap(0), max(0, s.pausedTill.Load()-now), s.failures.Swap(0),
	}
}

func (f *found) nothing() bool {
	return f.firstBytes == 0 && f.answers == 0 && f.pushbacks == 0 && f.failures == 0
}

// mine says that this node may help itself from a lease in hand: nobody waits, and all slots may be used.
func (e *endpoint) mine() bool {
	return !e.contended.Load() && !e.limited.Load() && e.waiting.Load() == 0
}

// yields says whether slots that are freed are to go back at once.
func (e *endpoint) yields() bool { return e.contended.Load() || e.waiting.Load() > 0 }

// done is a request that has ended.
type done struct {
	backend, tenant string
	class           queue.Class
	cost, held      int64
	worked          bool
}

// news is what happened here that the scheduler has not been told.
type news struct {
	mu      sync.Mutex
	dones   []done
	dirty   []*endpoint
	started []uint64 // by ticket. Their slots were counted as used before
	placed  []Placement
}

// place notes a placement.
func (n *news) place(p Placement) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.placed) < maxPlaced {
		n.placed = append(n.placed, p)
	}
}

// touch has an endpoint told.
func (n *news) touch(e *endpoint) {
	if e.dirty.CompareAndSwap(false, true) {
		n.mu.Lock()
		n.dirty = append(n.dirty, e)
		n.mu.Unlock()
	}
}

func (n *news) start(id uint64, e *endpoint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.started = append(n.started, id)
	if e.dirty.CompareAndSwap(false, true) {
		n.dirty = append(n.dirty, e)
	}
}

func (n *news) end(d done, e *endpoint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.dones) < maxDones {
		n.dones = append(n.dones, d)
	}
	if e.dirty.CompareAndSwap(false, true) {
		n.dirty = append(n.dirty, e)
	}
}

// use is what is told of an endpoint.
type use struct {
	backend string
	inUse   int64
	found
}

// told is news on its way.
type told struct {
	started []uint64
	uses    []use
	dones   []done
	placed  []Placement
}

// take appends what is new to t. more: of the requests that ended there were more than most.
func (n *news) take(now int64, t *told, most int) (more bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t.started = append(t.started, n.started...)
	t.placed = append(t.placed, n.placed...)
	told := min(len(n.dones), most)
	t.dones = append(t.dones, n.dones[:told]...)
	for _, e := range n.dirty {
		// First: who changes it from here on has it told once more.
		e.dirty.Store(false)
		t.uses = append(t.uses, use{e.id, e.used.Load(), e.take(now)})
	}
	rest := copy(n.dones, n.dones[told:])
	clear(n.dones[rest:])
	clear(n.dirty)
	n.started, n.dones, n.dirty, n.placed = n.started[:0], n.dones[:rest], n.dirty[:0], n.placed[:0]
	return rest > 0
}

// reset empties t and keeps its memory.
func (t *told) reset() {
	clear(t.uses)
	clear(t.dones)
	t.started, t.uses, t.dones, t.placed = t.started[:0], t.uses[:0], t.dones[:0], t.placed[:0]
}

func (t *told) nothing() bool {
	return len(t.started) == 0 && len(t.uses) == 0 && len(t.dones) == 0 && len(t.placed) == 0
}

// again has told what was not: its link broke. What was started then means nothing to the next scheduler.
func (n *news) again(t *told, of func(id string) *endpoint) {
	for i := range t.uses {
		u := &t.uses[i]
		e := of(u.backend)
		if e == nil {
			continue
		}
		e.firstByte.Add(u.firstByte)
		e.firstBytes.Add(u.firstBytes)
		e.answer.Add(u.answer)
		e.answers.Add(u.answers)
		e.pushbacks.Add(u.pushbacks)
		e.failures.Add(u.failures)
		n.touch(e)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dones = append(n.dones, t.dones[:min(len(t.dones), maxDones-min(maxDones, len(n.dones)))]...)
	n.placed = append(n.placed, t.placed[:min(len(t.placed), maxPlaced-min(maxPlaced, len(n.placed)))]...)
}

// Refused says that the backend did no work for the request: how long it held its slots says nothing of the pace.
func (g *Grant) Refused() { g.refused.Store(true) }

// Answered says how long the backend took to answer well what does not stream.
func (g *Grant) Answered(took time.Duration) {
	if g.e != nil && took >= 0 {
		g.e.answer.Add(int64(took))
		g.e.answers.Add(1)
	}
}

// FirstByte says how long the backend took to the first byte of a stream that it answers well.
func (g *Grant) FirstByte(took time.Duration) {
	if g.e != nil && took >= 0 {
		g.e.firstByte.Add(int64(took))
		g.e.firstBytes.Add(1)
	}
}

// Pushback says that the backend answered 429 and wants to be left alone for after.
func (g *Grant) Pushback(after time.Duration) {
	if g.e == nil {
		return
	}
	till := g.d.cfg.Now() + int64(min(max(0, after), maxPause))
	for was := g.e.pausedTill.Load(); till > was && !g.e.pausedTill.CompareAndSwap(was, till); was = g.e.pausedTill.Load() {
	}
	g.e.pushbacks.Add(1)
	g.d.note(g.e)
}

// Failed says that the backend failed the request. Only the first call counts: what is wrong may show more than once.
func (g *Grant) Failed() {
	if g.e != nil && g.failed.CompareAndSwap(false, true) {
		g.e.failures.Add(1)
		g.d.note(g.e)
	}
}

// maxPause is the longest Retry-After that is told.
const maxPause = time.Hour
