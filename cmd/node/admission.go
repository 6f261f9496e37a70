package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"headgate/cluster/ledger"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/affinity"
	"headgate/proxy/capacity"
	"headgate/proxy/dispatch"
	"headgate/proxy/ladder"
	"headgate/proxy/queue"
	"headgate/proxy/upstream"
)

// admission is what decides whether the fleet can, where limits say whether a caller may.

const (
	// slotsTenant is whose the buckets of all backends' slots are, so that one node owns them all: the
	// one that keeps the queue. No tenant's name has such a byte.
	slotsTenant = "\x00backends"
	slotsLimit  = "slots"

	stepEvery   = 250 * time.Millisecond // of the ladder
	metricsSize = 4 << 20                // bytes of a backend's metrics that are read
	ownPatience = 10 * time.Second       // of the gateway's own requests
)

// admission is a node's part in it.
type admission struct {
	fleet    *capacity.Fleet
	dispatch *dispatch.Dispatcher
	affinity *affinity.Router
	ladder   *ladder.Ladder
	slots    atomic.Pointer[map[string]*limiter.Limit] // of the bounded endpoints
	models   atomic.Pointer[map[string][]string]       // the backends of each
	policy   atomic.Pointer[admitted]

	telling  sync.Mutex
	draining sync.Mutex
	drained  []string
}

// admitted is what a policy says of it.
type admitted struct {
	revision uint64 // of the slots' limits
	queue    queue.Config
	learn    map[string]int64 // the least that is learnt of a backend; absent: it has its slots
}

// openAdmission makes the queue's part of this node.
func (n *Node) openAdmission() error {
	a := &n.admission
	a.ladder = ladder.New()
	a.slots.Store(&map[string]*limiter.Limit{})
	a.models.Store(&map[string][]string{})
	a.policy.Store(&admitted{})
	a.fleet = capacity.NewFleet(capacity.Config{
		Fetch:  func(ctx context.Context, id string) ([]byte, error) { return n.pool.Fetch(ctx, id, "", metricsSize) },
		Active: func() bool { return n.scheduling().Self }, Now: n.ticks, Logger: n.log, Registerer: n.registry,
	})
	a.affinity = affinity.New(affinity.Config{})
	var err error
	a.dispatch, err = dispatch.New(dispatch.Config{
		Self: n.self, Where: n.scheduling, Client: func(address string) (grpc.ClientConnInterface, error) { return n.cluster.Conn(address) },
		Peer: n.speaksFor(), Slots: slots{n}, Learner: learner{n}, Now: n.ticks, Placed: func(p dispatch.Placement) { a.affinity.Heard(affinity.Placement(p)) }, Logger: n.log, Registerer: n.registry,
	})
	return err
}

// scheduling says which node keeps the queue: the owner of the slots.
func (n *Node) scheduling() dispatch.Scheduling {
	c := n.joined.Load()
	if c == nil {
		return dispatch.Scheduling{}
	}
	ring := c.Fence().Ring()
	to := ring.OwnerOf(slotsTenant)
	s := dispatch.Scheduling{Address: to.Address, Members: len(ring.Members())}
	if to.Incarnation == n.self {
		s.Address, s.Self = "", true
	}
	return s
}

// speaksFor refuses calls that speak for a process of another node; nil where nodes have no certificates.
func (n *Node) speaksFor() func(context.Context, uint64) error {
	if n.tls == nil {
		return nil
	}
	return func(ctx context.Context, incarnation uint64) error {
		c := n.joined.Load()
		if c == nil {
			return errors.New("this node has not joined yet")
		}
		for _, m := range c.Fence().Ring().Members() {
			if m.Incarnation != incarnation {
				continue
			}
			if name := peerName(ctx); name != m.Name {
				return fmt.Errorf("node %q speaks for a process of node %q", name, m.Name)
			}
			return nil
		}
		return errors.New("no member of the view is this process")
	}
}

// slots are the leases of backends' slots.
type slots struct{ n *Node }

// heldSlots are slots that are held.
type heldSlots struct {
	n      *Node
	charge [1]limiter.Charge
}

func slotsKey(backend string) limiter.Key {
	return limiter.Key{Tenant: slotsTenant, Limit: slotsLimit, Subject: backend}
}

// Hold see dispatch.Slots. A backend without a bound of its own is not in the leases.
func (s slots) Hold(ctx context.Context, backend string, cost int64, ask bool) (dispatch.Held, bool) {
	l := (*s.n.admission.slots.Load())[backend]
	if l == nil {
		return nil, false
	}
	h := &heldSlots{n: s.n}
	h.charge[0] = limiter.Charge{Key: slotsKey(backend), Limit: l, Cost: min(cost, l.Burst), Apart: limiter.ByDeny}
	var d [1]limiter.Decision
	if !ask {
		return h, s.n.limits.TakeHeld(h.charge[:], d[:])
	}
	return h, s.n.limits.Take(ctx, h.charge[:], d[:]) == -1
}

// Yield see dispatch.Slots.
func (s slots) Yield(backend string) {
	key := slotsKey(backend)
	s.n.limits.Yield(&key)
}

// Release see dispatch.Held.
func (h *heldSlots) Release(yield bool) {
	var d [1]limiter.Decision
	key := h.charge[0].Key
	h.n.limits.Settle(h.charge[:], []int64{0}, d[:])
	if yield {
		h.n.limits.Yield(&key)
	}
}

// learner is what is learnt of the backends, and how those that come back are spared.
type learner struct{ n *Node }

// Observe see dispatch.Learner.
func (l learner) Observe(now int64, o capacity.Observation) { l.n.admission.fleet.Observe(now, o) }

// Seed see dispatch.Learner. What is told during a slow start is that start's bound, and was not learnt.
func (l learner) Seed(backend string, limit int64) {
	if l.n.pool.Share(backend) >= 1 {
		l.n.admission.fleet.Seed(backend, limit)
	}
}

// Limit see dispatch.Learner.
func (l learner) Limit(now int64, backend string) (limit int64, stale bool) {
	limit, stale = l.n.admission.fleet.Limit(now, backend)
	share := l.n.pool.Share(backend)
	if share >= 1 {
		return limit, stale
	}
	s := (*l.n.admission.slots.Load())[backend]
	if s == nil {
		return limit, stale
	}
	ramp := max(int64(math.Ceil(share*float64(s.Burst))), 1)
	if limit < 0 {
		return ramp, stale
	}
	return min(limit, ramp), stale
}

// admit takes what a policy says of admission; its backends are in the pool already.
func (n *Node) admit(ix *ledger.Index, number uint64) {
	a := &n.admission
	p := &admitted{revision: number << 20, learn: map[string]int64{}, queue: queueConfig(ix)}
	for _, b := range ix.Backends {
		if b.LearnMin > 0 {
			p.learn[b.Name] = int64(b.LearnMin)
		}
	}
	models := map[string][]string{}
	for _, m := range ix.Models {
		models[m.Name] = m.Backends
	}
	a.models.Store(&models)
	a.policy.Store(p)
	a.ladder.Apply(ladderConfig(ix))
	n.admitBackends()
}

// admitBackends tells all who give out places which there are now.
func (n *Node) admitBackends() {
	a := &n.admission
	a.telling.Lock() // or what was read before could be told after what was read since
	defer a.telling.Unlock()
	p := a.policy.Load()
	limits := map[string]*limiter.Limit{}
	var queued []queue.Backend
	var learnt []capacity.Backend
	for _, e := range n.pool.Endpoints() {
		if e.Slots <= 0 {
			continue
		}
		limits[e.ID] = &limiter.Limit{Algorithm: limiter.Semaphore, Burst: int64(e.Slots), Revision: p.revision}
		queued = append(queued, queue.Backend{ID: e.ID, Slots: int64(e.Slots), Limit: -1, Overflow: e.Overflow})
		least, learn := p.learn[e.Backend]
		learnt = append(learnt, capacity.Backend{ID: e.ID, Slots: int64(e.Slots), Min: least, Learn: learn, Metrics: e.Metrics})
	}
	a.slots.Store(&limits)
	a.fleet.Apply(learnt)
	a.dispatch.Apply(queued, p.queue)
}

// runAdmission follows the backends and has the ladder follow their pressure, until ctx ends.
func (n *Node) runAdmission(ctx context.Context) {
	t := time.NewTicker(stepEvery)
	defer t.Stop()
	changed := n.pool.Changed()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			changed = n.pool.Changed()
			n.admitBackends()
		case <-t.C:
			n.applyDrains(n.truth.Facts()) // some end by themselves
			for _, c := range n.admission.ladder.Step(n.ticks(), n.pressure()) {
				n.log.Warn("the ladder moved", "model", c.Model, "pressure", c.Is.Pressure, "rungs", c.Is.Rungs.String(), "before", c.Was.Rungs.String(), "shed", c.Is.Cutoff.String())
			}
		}
	}
}

// pressure is how full each model's queue is: that of the backend where there is most room. A model with a
// backend that has no bound has none.
func (n *Node) pressure() func(model string) float64 {
	state := n.admission.dispatch.State()
	models := *n.admission.models.Load()
	var cs []upstream.Candidate
	return func(model string) float64 {
		least := math.NaN()
		cs, _ = n.pool.Candidates(cs[:0], models[model], nil) // none: nobody knows
		for _, c := range cs {
			if !c.Bounded {
				return 0
			}
			if s, ok := state.Backends[c.ID]; ok && !(s.Pressure >= least) {
				least = s.Pressure
			}
		}
		return least
	}
}

// ownPlace is a place for a request of the gateway's own, in the queue with all others.
func (n *Node) ownPlace(ctx context.Context, m *proxy.Model, tried []string, bytes int64) (*upstream.Slot, error) {
	t := dispatch.Ticket{Tenant: slotsTenant, Work: max(bytes/4, 1), Bytes: bytes, Patience: ownPatience}
	if end, ok := ctx.Deadline(); ok {
		t.Patience = max(min(time.Until(end), ownPatience), time.Millisecond)
	}
	began, patience := time.Now(), t.Patience
	for {
		cs, err := n.pool.Candidates(nil, m.Backends, tried)
		if err != nil {
			return nil, err
		}
		t.Places = t.Places[:0]
		for _, c := range cs[:min(len(cs), queue.MaxPlaces)] {
			if !c.Bounded {
				return n.pool.Hold(c.ID, nil)
			}
			t.Places = append(t.Places, queue.Place{Backend: c.ID, Cost: 1})
		}
		t.Watch = func() (<-chan struct{}, bool) {
			changed := n.pool.Changed()
			now, err := n.pool.Candidates(nil, m.Backends, tried)
			return changed, err != nil || len(now) != len(cs)
		}
		g, err := n.admission.dispatch.Acquire(ctx, &t)
		if errors.Is(err, dispatch.ErrMoved) {
			t.Waited = time.Since(began)
			t.Patience = max(patience-t.Waited, time.Millisecond)
			continue
		}
		if err != nil {
			return nil, err
		}
		slot, err := n.pool.Hold(g.Backend, g)
		if err != nil {
			g.Release()
		}
		return slot, err
	}
}

// size is how many nodes share the backends.
func (n *Node) size() int { return max(n.scheduling().Members, 1) }

// automatic are the models for which the ladder has set a rung by itself.
func (n *Node) automatic(r ladder.Rung) []string {
	var names []string
	for model := range *n.admission.models.Load() {
		if n.admission.ladder.State(model).Rungs.Has(r) {
			names = append(names, model)
		}
	}
	slices.Sort(names)
	return names
}

// applyDrains tells the pool which backends operators have taken out of use, where that has changed.
func (n *Node) applyDrains(f *ledger.Facts) {
	a, now := &n.admission, drains(f, time.Now())
	a.draining.Lock()
	defer a.draining.Unlock()
	if !slices.Equal(a.drained, now) {
		a.drained = now
		n.pool.Drain(now)
	}
}

// drains are the backends that operators have taken out of use.
func drains(f *ledger.Facts, now time.Time) []string {
	var names []string
	for _, r := range f.Rungs.All() {
		if name, ok := r.Drains(); ok && (r.Expires.IsZero() || now.Before(r.Expires)) {
			names = append(names, name)
		}
	}
	return names
}
