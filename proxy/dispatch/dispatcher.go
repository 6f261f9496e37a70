package dispatch

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "headgate/proxy/dispatch/dispatchpb"
	"headgate/proxy/queue"
)

// The times of a Dispatcher.
const (
	aloneAfter = 10 * time.Second      // Config.Alone where that is 0
	coalesce   = 10 * time.Millisecond // how long news waits that nobody waits for
	showSoon   = 5 * time.Millisecond  // between two broadcasts, at least
	showEvery  = 100 * time.Millisecond
	showIdle   = time.Second
	learnEvery = 250 * time.Millisecond
	settleFor  = 250 * time.Millisecond // a new scheduler waits for all nodes' tickets and counts, at most
)

// maxTime is never.
const maxTime = math.MaxInt64

// Dispatcher is a node's part in the cluster's queue. Its methods may be called concurrently.
type Dispatcher struct {
	cfg   Config
	log   *slog.Logger
	met   *metrics
	state atomic.Pointer[State]
	ends  atomic.Pointer[map[string]*endpoint]
	alone atomic.Bool // as in State
	// Without others nothing that is yielded helps anybody.
	single  atomic.Bool
	waiting [queue.Classes]atomic.Int64
	lastID  atomic.Uint64
	news    news
	lazy    atomic.Bool   // Run is to tell the news soon
	soon    chan struct{} // to Run: something is due sooner than it knows
	moved   chan struct{} // to Run: Where may say something else

	mu       sync.Mutex
	rand     *rand.Rand
	life     context.Context // of what Run started; nil before
	closed   bool
	wg       sync.WaitGroup
	waiters  map[uint64]*waiter
	backends []queue.Backend // of the policy
	qcfg     queue.Config
	where    Scheduling
	members  int
	epoch    uint64           // grows with each place that tickets are sent to: a waiter of another is not known there
	seat     *seat            // the queue here: this node schedules, or no scheduler is within reach
	link     *link            // to the scheduler elsewhere, whether that answers or not; nil: there is none
	lost     int64            // since when no scheduler is within reach; maxTime: one is
	dueAt    int64            // when Run looks next
	lazyAt   int64            // when the news is to be told
	told     told             // for use under mu
	learnt   map[string]int64 // limits of backends below their slots, as the cluster's queue had them last
}

// New returns a Dispatcher that knows no backends: call Apply, and Run.
func New(cfg Config) (*Dispatcher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Alone = cmp.Or(cfg.Alone, aloneAfter)
	d := &Dispatcher{
		cfg: cfg, log: cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler)), rand: cfg.Rand,
		soon: make(chan struct{}, 1), moved: make(chan struct{}, 1), waiters: map[uint64]*waiter{}, learnt: map[string]int64{}, members: 1, lost: cfg.Now(), lazyAt: maxTime,
	}
	if d.rand == nil {
		d.rand = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())) //nolint:gosec // it spreads waits
	}
	d.single.Store(true)
	d.ends.Store(&map[string]*endpoint{})
	d.state.Store(&State{})
	d.sit(d.lost, false)
	var err error
	if d.met, err = newMetrics(cfg.Registerer, d); err != nil {
		return nil, fmt.Errorf("dispatch: %w", err)
	}
	return d, nil
}

// Register adds the service that other nodes send their tickets to, before the server serves.
func (d *Dispatcher) Register(s *grpc.Server) { pb.RegisterDispatchServer(s, service{d: d}) }

// Moved says that Config.Where may say something else now. It does not block.
func (d *Dispatcher) Moved() { signal(d.moved) }

// signal says on a channel of one place that there is something to do.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run speaks to the scheduler, or is it, until ctx ends. Requests that still wait then are dropped as NoBackend. It returns
// when all that it started has ended. It is called once.
func (d *Dispatcher) Run(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	d.mu.Lock()
	d.life = ctx
	d.mu.Unlock()
	defer func() {
		stop()
		d.close()
		d.wg.Wait()
	}()
	signal(d.moved)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.moved:
			d.follow()
		case <-d.soon:
		case <-timer.C:
		}
		timer.Reset(max(d.due(), 0))
	}
}

// close ends all waits.
func (d *Dispatcher) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.unlink()
	if d.seat != nil {
		d.seat.dismissAll()
	}
	for _, w := range d.waiters {
		d.dropped(w, Dropped{Reason: queue.NoBackend, RetryAfter: leastRetry})
	}
}

// follow goes to whoever keeps the queue now.
func (d *Dispatcher) follow() {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, was := d.cfg.Now(), d.where
	d.where = d.cfg.Where()
	if d.where.Members > 0 {
		shared := d.members != d.where.Members && d.seat != nil && !d.seat.official
		d.members = d.where.Members
		d.single.Store(d.members == 1 && d.where.Self)
		if shared { // its part is another
			d.seat.apply(now)
			d.after(now)
		}
	}
	switch {
	case d.where.Self && was.Self && d.seat != nil && d.seat.official:
		d.seat.settled(now) // there may be fewer to wait for
		d.after(now)
		return
	case !d.where.Self && d.link != nil && d.where.Address == d.link.address:
		signal(d.link.hurry) // it may keep the queue only now
		return
	}
	d.unlink()
	switch {
	case d.where.Self:
		d.lost = maxTime
		d.sit(now, true)
	case d.seat == nil || d.seat.official:
		d.lose(now)
	}
	if !d.where.Self && d.where.Address != "" && d.cfg.Client != nil {
		d.link = newLink(d, d.where)
		l, ctx := d.link, d.life
		d.wg.Go(func() { l.run(ctx) })
	}
	d.announce()
	signal(d.soon)
}

// unlink ends the link to the scheduler of before; d.mu is held.
func (d *Dispatcher) unlink() {
	if l := d.link; l != nil {
		d.link = nil
		l.close()
		if l.up {
			d.lose(d.cfg.Now())
		}
	}
}

// lose has tickets wait here: no scheduler is within reach; d.mu is held.
func (d *Dispatcher) lose(now int64) {
	d.lost = min(d.lost, now)
	d.sit(now, false)
	d.announce()
}

// sit opens a queue here, for the cluster or for this node until it finds the scheduler; d.mu is held.
func (d *Dispatcher) sit(now int64, official bool) {
	if d.seat != nil {
		d.seat.dismissAll()
	}
	d.alone.Store(false)
	d.seat = newSeat(d, now, official)
	d.joinAll(now)
	d.after(now)
}

// joinAll sends all tickets that wait to where they wait now, the oldest first, and all that this node uses; d.mu is held.
func (d *Dispatcher) joinAll(now int64) {
	d.epoch++
	for _, e := range *d.ends.Load() {
		d.news.touch(e)
	}
	if d.seat != nil {
		d.tell(now)
	}
	ws := slices.SortedFunc(maps.Values(d.waiters), func(a, b *waiter) int {
		return cmp.Or(cmp.Compare(a.born, b.born), cmp.Compare(a.id, b.id))
	})
	for _, w := range ws {
		if w.how == waits {
			d.join(now, w)
		}
	}
}

// join sends a ticket to where tickets wait now; d.mu is held.
func (d *Dispatcher) join(now int64, w *waiter) {
	w.how, w.epoch = waits, d.epoch
	if d.seat != nil {
		d.seat.join(now, w.ticket(d.cfg.Self, now))
		return
	}
	d.link.joins = append(d.link.joins, w)
	signal(d.link.urgent)
}

// announce has State say who schedules; d.mu is held.
func (d *Dispatcher) announce() {
	s := *d.state.Load()
	s.Scheduler, s.Reachable, s.Alone = d.where.Address, d.lost == maxTime, d.alone.Load()
	if d.where.Self {
		s.Scheduler = "self"
	}
	d.state.Store(&s)
}

// Apply takes the policy's backends, those of all models, and the queue's config (its Rand is not used: Config.Rand is).
func (d *Dispatcher) Apply(backends []queue.Backend, cfg queue.Config) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.cfg.Now()
	d.backends, d.qcfg = slices.Clone(backends), cfg
	ends := make(map[string]*endpoint, len(backends))
	for id, e := range *d.ends.Load() {
		if e.used.Load() > 0 || e.waiting.Load() > 0 || e.dirty.Load() {
			ends[id] = e
		}
	}
	for _, b := range backends {
		if e := (*d.ends.Load())[b.ID]; e != nil {
			ends[b.ID] = e
		} else {
			ends[b.ID] = &endpoint{id: b.ID}
		}
	}
	d.ends.Store(&ends)
	if d.seat != nil {
		d.seat.apply(now)
		d.after(now)
	}
}

// endpoint finds or makes one; d.mu is held. nil: there are too many.
func (d *Dispatcher) endpoint(id string) *endpoint {
	ends := *d.ends.Load()
	if e := ends[id]; e != nil || len(ends) >= maxEndpoints {
		return e
	}
	more := maps.Clone(ends)
	more[id] = &endpoint{id: id}
	d.ends.Store(&more)
	return more[id]
}

// note has what happened at an endpoint told: at once where others wait for its slots, or its scheduler counts them, else soon.
func (d *Dispatcher) note(e *endpoint) {
	d.news.touch(e)
	d.hurry(e)
}

// Placed has the other nodes told, soon, that an endpoint has a prompt's beginning in its cache now.
func (d *Dispatcher) Placed(p Placement) {
	if d.single.Load() {
		return
	}
	d.news.place(p)
	if d.lazy.CompareAndSwap(false, true) {
		signal(d.soon)
	}
}

// hurry sees to it that the news is told, at once where that matters to somebody.
func (d *Dispatcher) hurry(e *endpoint) {
	if e.mine() {
		if d.lazy.CompareAndSwap(false, true) {
			signal(d.soon)
		}
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	if l := d.link; d.seat == nil {
		signal(l.urgent)
		return
	}
	now := d.cfg.Now()
	d.tell(now)
	d.after(now)
}

// tell tells the news to the queue here; d.mu is held, and after follows.
func (d *Dispatcher) tell(now int64) {
	d.news.take(now, &d.told, maxDones)
	if !d.told.nothing() {
		d.seat.hear(now, d.cfg.Self, &d.told)
	}
	d.told.reset()
}

// after brings what the queue here decided to whom it is for; d.mu is held.
func (d *Dispatcher) after(now int64) {
	if d.seat == nil {
		return
	}
	d.seat.deliver(now)
	if d.seat.due(now) < d.dueAt {
		signal(d.soon)
	}
}

// due does what is due, and says when there is more.
func (d *Dispatcher) due() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.cfg.Now()
	d.dueAt = maxTime
	if d.lazy.Load() && d.lazyAt == maxTime {
		d.lazyAt = now + int64(coalesce)
	}
	if now >= d.lazyAt {
		d.lazyAt = maxTime
		d.lazy.Store(false) // first: what comes from here on is for the next time
		if d.seat != nil {
			d.tell(now)
		} else {
			signal(d.link.urgent)
		}
	}
	next := d.lazyAt
	if d.lost != maxTime && d.cfg.Alone > 0 && !d.alone.Load() {
		if at := d.lost + int64(d.cfg.Alone); now >= at {
			d.goAlone(now)
		} else {
			next = min(next, at)
		}
	}
	if d.seat != nil {
		d.seat.tick(now)
		d.seat.deliver(now)
		next = min(next, d.seat.due(now))
	}
	d.dueAt = next
	return time.Duration(min(next-now, int64(time.Minute)))
}

// goAlone has this node go by its part of the slots; d.mu is held.
func (d *Dispatcher) goAlone(now int64) {
	d.alone.Store(true)
	d.log.Warn("no node schedules within reach: this node uses its part of the backends' slots by itself", "nodes", d.members)
	d.seat.unsettle(now)
	d.announce()
}

// State is how things stand in the cluster, by the scheduler's last word. It is never nil, does not change, and costs one
// atomic read.
func (d *Dispatcher) State() *State { return d.state.Load() }

// State is a picture of the cluster's queue. It never changes.
type State struct {
	// Backends are by endpoint ID, as the scheduler broadcast them: each 100 ms while anything waits or changes,
	// else each second.
	Backends map[string]queue.BackendStats
	// At is when that was, by Config.Now; 0: there is no word yet.
	At int64
	// Scheduler is the address of the node that keeps the queue, "self", or "" where nobody does.
	Scheduler string
	// Reachable: it answers. Alone: it has not for so long that this node goes by its own part of the slots.
	Reachable, Alone bool
}

// Age is how old the picture is at now.
func (s *State) Age(now int64) time.Duration { return time.Duration(max(0, now-s.At)) }

// shown puts what the scheduler said into State and the endpoints; whole: other backends are gone; d.mu is held.
func (d *Dispatcher) shown(now int64, whole bool, changed []queue.BackendStats, gone []string) {
	s := *d.state.Load()
	s.At = now
	if whole || len(changed) > 0 || len(gone) > 0 {
		next := make(map[string]queue.BackendStats, len(s.Backends)+len(changed))
		if !whole {
			maps.Copy(next, s.Backends)
		}
		for i := range changed {
			next[changed[i].ID] = changed[i]
		}
		for _, id := range gone {
			delete(next, id)
		}
		s.Backends = next
	}
	d.state.Store(&s)
	for i := range changed {
		b := &changed[i]
		e := (*d.ends.Load())[b.ID]
		if e == nil {
			continue
		}
		e.limited.Store(b.Limited)
		if !e.contended.Swap(b.Contended) && b.Contended && !d.single.Load() {
			d.cfg.Slots.Yield(b.ID) // what lies here unused others wait for
		}
	}
}

// placed says what went where at other nodes.
func (d *Dispatcher) placed(ps []Placement) {
	if d.cfg.Placed == nil {
		return
	}
	for _, p := range ps {
		d.cfg.Placed(p)
	}
}

// learn notes what the cluster's queue has as limits: the next begins with them; d.mu is held.
func (d *Dispatcher) learn(changed []queue.BackendStats) {
	for i := range changed {
		if b := &changed[i]; !b.Limited {
			delete(d.learnt, b.ID)
		} else if len(d.learnt) < queue.MaxBackends {
			d.learnt[b.ID] = b.Limit
		}
	}
}
