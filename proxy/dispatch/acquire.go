package dispatch

import (
	"context"
	"sync/atomic"
	"time"

	"headgate/proxy/queue"
)

// The times of a wait.
const (
	leastRetry = 250 * time.Millisecond
	mostRetry  = time.Minute
	retryGuess = time.Second // where nothing is known
)

// How a ticket stands.
type how uint8

const (
	waits how = iota
	isGranted
	isOver
)

// waiter is a ticket of this node. What is not said otherwise does not change.
type waiter struct {
	t        *Ticket
	id       uint64
	born     int64 // when its request came, wherever that waited
	deadline int64
	ends     []*endpoint
	event    chan struct{} // of one place: it is granted, or over

	// Under Dispatcher.mu while how is waits; else the waiter's own.
	how     how
	sent    bool   // to a queue: another one is to give it a place, too
	epoch   uint64 // of the queue that it was sent to
	backend string
	cost    int64
	leased  bool // the grant is leave to take a lease; else it is the slot
	dropped Dropped
}

// ticket is what the queue is told. The first one is told nothing of the way to it: who has waited had a place
// before, and gets one beyond the bound.
func (w *waiter) ticket(self uint64, now int64) *queue.Ticket {
	t, waited := w.t, max(0, w.t.Waited)
	if w.sent {
		waited = time.Duration(max(1, now-w.born))
	}
	w.sent = true
	return &queue.Ticket{
		Node: self, ID: w.id, Tenant: t.Tenant, Class: t.Class, Work: t.Work, Bytes: t.Bytes,
		Waited: waited, Patience: time.Duration(max(0, w.deadline-now)), Refused: t.Refused, Places: t.Places,
	}
}

// Grant is a right to run one request, with the slots for it.
type Grant struct {
	Backend string
	Cost    int64
	// Queued is how long it was waited for in this Acquire; 0: not at all.
	Queued time.Duration

	d      *Dispatcher
	e      *endpoint
	held   Held // nil: the node goes by its own count
	began  int64
	tenant string
	class  queue.Class
	over   atomic.Bool

	refused, failed atomic.Bool
}

// Acquire waits until the request may run at one of its places, and holds slots there. It returns at once
// where a lease in hand covers that and nobody waits. The error is ErrMoved, a *Dropped, or the context's
// cause. Whatever ends the wait, its place is free at once.
func (d *Dispatcher) Acquire(ctx context.Context, t *Ticket) (*Grant, error) {
	if len(t.Places) == 0 {
		return nil, &Dropped{Reason: queue.NoBackend, RetryAfter: retryGuess}
	}
	if len(t.Places) > queue.MaxPlaces || t.Class >= queue.Classes {
		c := *t
		c.Places, c.Class = t.Places[:min(len(t.Places), queue.MaxPlaces)], min(t.Class, queue.BestEffort)
		t = &c
	}
	p := &t.Places[0]
	if e := (*d.ends.Load())[p.Backend]; e != nil && e.mine() && !d.alone.Load() {
		if held, ok := d.cfg.Slots.Hold(ctx, p.Backend, max(1, p.Cost), false); ok {
			e.used.Add(max(1, p.Cost))
			d.note(e)
			return d.grant(t, e, held, max(1, p.Cost), d.cfg.Now(), 0), nil
		}
	}
	return d.wait(ctx, t)
}

// spread is for how long one of many that wait does not look after a change: all at once they were in each other's way, and
// changes come in bursts.
func (d *Dispatcher) spread() time.Duration {
	if d.Waiting() < manyLook {
		return 0
	}
	return min(time.Duration(d.Waiting())*perLook, mostSpread)
}

// How many are in each other's way, the time that a look takes, about, and the most that one waits for the others'.
const (
	manyLook   = 256
	perLook    = 4 * time.Microsecond
	mostSpread = 20 * time.Millisecond
)

func (d *Dispatcher) grant(t *Ticket, e *endpoint, held Held, cost, now int64, queued time.Duration) *Grant {
	d.met.waited(t.Class, t.Waited+queued)
	return &Grant{Backend: e.id, Cost: cost, Queued: queued, d: d, e: e, held: held, began: now, tenant: t.Tenant, class: t.Class}
}

// Release frees the slots. Only the first call does anything.
func (g *Grant) Release() {
	if g.d == nil || !g.over.CompareAndSwap(false, true) {
		return
	}
	d, e := g.d, g.e
	if g.held != nil {
		g.held.Release(e.yields() && !d.single.Load())
	}
	e.used.Add(-g.Cost)
	d.news.end(done{e.id, g.tenant, g.class, g.Cost, max(0, d.cfg.Now()-g.began), !g.refused.Load()}, e)
	d.hurry(e)
}

// maxWaiters bounds the tickets of a node, whatever its policy says.
const maxWaiters = 1 << 16

// enter sends a new ticket off. nil: this node has too many, or stops.
func (d *Dispatcher) enter(t *Ticket) *waiter {
	now := d.cfg.Now()
	w := &waiter{
		t: t, id: d.lastID.Add(1), born: now - int64(max(0, t.Waited)), deadline: now + int64(max(0, t.Patience)),
		event: make(chan struct{}, 1), ends: make([]*endpoint, 0, len(t.Places)),
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.waiters) >= maxWaiters {
		return nil
	}
	for i := range t.Places {
		if e := d.endpoint(t.Places[i].Backend); e != nil {
			e.waiting.Add(1)
			w.ends = append(w.ends, e)
		}
	}
	d.waiting[t.Class].Add(1)
	d.waiters[w.id] = w
	d.join(now, w)
	d.after(now)
	return w
}

// wait is Acquire where something is to be waited for.
func (d *Dispatcher) wait(ctx context.Context, t *Ticket) (*Grant, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	began := d.cfg.Now()
	w := d.enter(t)
	if w == nil {
		d.met.dropped(queue.QueueFull)
		return nil, &Dropped{Reason: queue.QueueFull, RetryAfter: retryGuess}
	}
	defer func() {
		for _, e := range w.ends {
			e.waiting.Add(-1)
		}
		d.waiting[t.Class].Add(-1)
	}()
	late := time.NewTimer(max(0, t.Patience))
	defer late.Stop()
	var tick <-chan time.Time
	if t.Tick != nil && t.TickEvery > 0 {
		ticker := time.NewTicker(t.TickEvery)
		defer ticker.Stop()
		tick = ticker.C
	}
	var changed <-chan struct{}
	var rested <-chan time.Time // after which to look
	look := t.Watch != nil
	for {
		if look {
			var moved bool
			if changed, moved = t.Watch(); moved {
				d.leave(w)
				return nil, ErrMoved
			}
			look = false
		}
		select {
		case <-w.event:
			if w.how == isOver {
				d.met.dropped(w.dropped.Reason)
				return nil, &w.dropped
			}
			if g := d.take(ctx, w, began); g != nil {
				return g, nil
			}
		case <-ctx.Done():
			d.leave(w)
			return nil, context.Cause(ctx)
		case <-late.C:
			return nil, d.expire(w)
		case <-changed:
			changed, rested = nil, nil
			if wait := d.spread(); wait > 0 {
				rested = time.After(wait)
			} else {
				look = true
			}
		case <-rested:
			look = true
		case <-tick:
			t.Tick()
		}
	}
}

// take makes a grant of leave to try. nil: there was no slot, or the request's time is over, which its timer says.
func (d *Dispatcher) take(ctx context.Context, w *waiter, began int64) *Grant {
	now := d.cfg.Now()
	left := time.Duration(w.deadline - now)
	if left <= 0 {
		return nil // it is still granted; who ends the wait gives that back
	}
	var held Held
	if w.leased {
		until, cancel := ctx, context.CancelFunc(func() {})
		if left < holdFor {
			until, cancel = context.WithTimeout(ctx, left)
		}
		var ok bool
		held, ok = d.cfg.Slots.Hold(until, w.backend, w.cost, true)
		cancel()
		now = d.cfg.Now()
		if now >= w.deadline || ctx.Err() != nil {
			if ok {
				held.Release(!d.single.Load())
			}
			return nil // still granted, as above: that there was no slot for it says nothing
		}
		if !ok {
			d.miss(w, now)
			return nil
		}
	}
	d.mu.Lock()
	e := d.endpoint(w.backend)
	delete(d.waiters, w.id)
	d.mu.Unlock()
	if e == nil { // there are too many: it is counted nowhere
		e = &endpoint{id: w.backend}
	}
	e.used.Add(w.cost)
	d.news.start(w.id, e)
	d.hurry(e)
	return d.grant(w.t, e, held, w.cost, now, time.Duration(max(1, now-began)))
}

// holdFor is longer than Slots.Hold takes.
const holdFor = time.Second

// granted is for a ticket of this node; d.mu is held.
func (d *Dispatcher) granted(id uint64, backend string, cost int64) {
	w := d.waiters[id]
	if w == nil || w.how != waits || w.epoch != d.epoch {
		return // it left: the queue hears, or heard, of that
	}
	w.how, w.backend, w.cost, w.leased = isGranted, backend, max(1, cost), d.seat == nil || d.seat.official
	signal(w.event)
}

// droppedBy is for a ticket that the queue dropped; d.mu is held.
func (d *Dispatcher) droppedBy(id uint64, why Dropped) {
	if w := d.waiters[id]; w != nil && w.epoch == d.epoch {
		d.dropped(w, why)
	}
}

// dropped ends a wait; d.mu is held.
func (d *Dispatcher) dropped(w *waiter, why Dropped) {
	delete(d.waiters, w.id)
	if w.how != waits {
		return // it is just being tried: who is with it says more
	}
	w.how, w.dropped = isOver, why
	signal(w.event)
}

// miss says that the lease had no slot.
func (d *Dispatcher) miss(w *waiter, now int64) {
	d.met.misses.Inc()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		delete(d.waiters, w.id)
		w.how, w.dropped = isOver, Dropped{Reason: queue.NoBackend, RetryAfter: leastRetry}
		signal(w.event)
		return
	case d.waiters[w.id] == nil: // the queue gave it up meanwhile
		d.waiters[w.id] = w
		d.join(now, w)
	case w.epoch != d.epoch:
		d.join(now, w)
	case d.seat != nil:
		w.how = waits
		d.seat.core.Miss(now, d.cfg.Self, w.id, &d.seat.out)
		d.seat.touched = true
	default:
		w.how = waits
		d.link.misses = append(d.link.misses, w.id)
		signal(d.link.urgent)
	}
	d.after(now)
}

// leave frees a ticket's place, or what was granted to it.
func (d *Dispatcher) leave(w *waiter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w.how == isOver {
		return
	}
	delete(d.waiters, w.id)
	w.how = isOver
	if d.closed || w.epoch != d.epoch {
		return
	}
	if d.seat == nil {
		d.link.leave(w.id)
		return
	}
	now := d.cfg.Now()
	d.seat.core.Leave(now, d.cfg.Self, w.id, &d.seat.out)
	d.seat.touched = true
	d.after(now)
}

// expire ends a wait whose time is over.
func (d *Dispatcher) expire(w *waiter) error {
	d.leave(w)
	d.met.dropped(queue.Expired)
	return &Dropped{Reason: queue.Expired, RetryAfter: d.retryAfter(w.t)}
}

// retryAfter is how long those that wait where a ticket may go will take, spread by a quarter.
func (d *Dispatcher) retryAfter(t *Ticket) time.Duration {
	least := mostRetry
	s := d.state.Load()
	for i := range t.Places {
		b, ok := s.Backends[t.Places[i].Backend]
		if after := b.Drain; ok && after > 0 {
			least = min(least, after)
		}
	}
	if least == mostRetry {
		least = retryGuess
	}
	d.mu.Lock()
	spread := .75 + d.rand.Float64()/2
	d.mu.Unlock()
	return min(max(time.Duration(float64(least)*spread), leastRetry), mostRetry)
}

// Waiting is how many requests of this node wait.
func (d *Dispatcher) Waiting() (n int) {
	for i := range d.waiting {
		n += int(d.waiting[i].Load())
	}
	return n
}
