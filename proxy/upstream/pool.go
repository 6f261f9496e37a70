package upstream

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Why there is no slot.
var (
	// ErrNoBackend: none of the named backends is alive and untried.
	ErrNoBackend = errors.New("no backend is up")
	// ErrSaturated: some are alive, and all their slots are taken.
	ErrSaturated = errors.New("all backends are full")
)

// nominalSlots is the size that an unbounded backend is given when its load is
// compared with that of others.
const nominalSlots = 64

// State is what is known of an endpoint's health.
type State uint8

// The states; see the package comment for the moves between them.
const (
	Unknown State = iota
	Up
	Down
)

// String gives the word used in status and logs.
func (s State) String() string { return [...]string{"unknown", "up", "down"}[s] }

// Pool holds the backends. All methods are safe for concurrent use.
type Pool struct {
	cfg      Config
	start    time.Time     // what now counts from
	retend   chan struct{} // wakes tend before its time
	updating sync.Mutex    // serialises Update; taken before mu

	mu       sync.Mutex // short sections only: no I/O, no logging to slow sinks under it
	backends map[string]*backend
	order    []*backend  // as the policy lists them
	draining []*endpoint // gone from the policy or from DNS, requests still in flight
	drains   []string    // names of those that take no new request
	turn     int         // where the next search begins, so that ties rotate
	inFlight int         // of all endpoints
	budget   budget      // of second attempts
	closed   bool
	changed  chan struct{}   // closed and replaced when who takes requests changes
	run      context.Context // Run's, while it runs; goroutines start only under it
	stop     context.CancelFunc
	done     chan struct{} // closed when Run has ended
	loops    sync.WaitGroup
}

// backend is a policy entry in use. cfg is replaced, never changed.
type backend struct {
	base      *url.URL
	transport *transport
	models    modelsCache
	key       atomic.Pointer[string] // sent as the credential

	// Guarded by Pool.mu.
	cfg       *Backend
	endpoints []*endpoint
	stop      context.CancelFunc // of the loop that watches names and files; nil: none runs
}

// endpoint is one address with its load and health; all but id, host, wake and heard
// are guarded by Pool.mu.
type endpoint struct {
	id   string // the backend's name, for dns:// with @address:port
	host string // host:port that requests are sent to
	wake chan struct{}
	// heard is when an answer last brought bytes, by Pool.now.
	heard atomic.Int64

	b         *backend
	inFlight  int
	gone      bool
	hastened  int64 // when it was last looked after sooner, for want of another; 0: never
	v         vitals
	held      *Slot         // the first of those out
	lost      chan struct{} // closed and replaced by lostLocked
	lastError string
	stop      context.CancelFunc // of its probe loop; nil: none runs
}

// NewPool makes a pool of cfg's backends. It reads certificate files and opens no
// connection; Run does the rest.
func NewPool(cfg Config) (*Pool, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p := &Pool{
		cfg: cfg.withDefaults(), start: time.Now(), retend: make(chan struct{}, 1),
		backends: map[string]*backend{}, changed: make(chan struct{}), budget: budget{tokens: retryBurst},
	}
	if err := p.Update(cfg.Backends); err != nil {
		return nil, err
	}
	return p, nil
}

// now is the time that vitals go by: never 0, never falling.
func (p *Pool) now() int64 { return int64(time.Since(p.start)) + 1 }

// Update makes bs the backends. One that reaches the same server as before keeps
// its connections, slots in use and health, whatever else of it changed; one that is
// gone takes no new request while those in flight finish. On an error nothing changes.
func (p *Pool) Update(bs []Backend) error {
	if err := validateBackends(bs); err != nil {
		return err
	}
	bs = slices.Clone(bs)
	p.updating.Lock()
	defer p.updating.Unlock()

	p.mu.Lock()
	old := p.backends
	p.mu.Unlock()

	order, keys := make([]*backend, len(bs)), make([]*string, len(bs))
	var err error
	for i, cfg := range bs { // reads files, so outside of mu
		if o := old[cfg.Name]; o != nil && o.cfg.sameServer(cfg) {
			if keys[i], err = readKey(cfg); err != nil {
				return fmt.Errorf("backends[%d].%w", i, err)
			}
			order[i] = o
			continue
		}
		b, err := p.newBackend(cfg)
		if err != nil {
			return fmt.Errorf("backends[%d].%w", i, err)
		}
		order[i] = b
	}

	p.mu.Lock()
	now := make(map[string]*backend, len(bs))
	for i, b := range order {
		b.cfg = &bs[i]
		now[b.cfg.Name] = b
		if keys[i] != nil {
			b.key.Store(keys[i])
		}
	}
	var removed []*backend
	for name, b := range old {
		if now[name] != b {
			removed = append(removed, b)
			p.retireLocked(b)
		}
	}
	p.backends, p.order = now, order
	for _, b := range order {
		p.startLocked(b)
	}
	p.changedLocked()
	p.mu.Unlock()

	for _, b := range removed { // busy connections close as they finish
		b.transport.CloseIdleConnections()
	}
	return nil
}

// Check says why Update would refuse bs, and changes nothing. It reads their files.
func (p *Pool) Check(bs []Backend) error {
	if err := validateBackends(bs); err != nil {
		return err
	}
	for i, cfg := range bs {
		b, err := p.newBackend(cfg)
		if err != nil {
			return fmt.Errorf("backends[%d].%w", i, err)
		}
		b.transport.CloseIdleConnections()
	}
	return nil
}

func (p *Pool) newBackend(cfg Backend) (*backend, error) {
	base, err := cfg.base()
	if err != nil {
		return nil, err
	}
	t, err := newTransport(cfg, p.cfg)
	if err != nil {
		return nil, err
	}
	key, err := readKey(cfg)
	if err != nil {
		return nil, err
	}
	b := &backend{base: base, transport: t, cfg: &cfg, models: newModelsCache()}
	b.key.Store(key)
	return b, nil
}

// startLocked gives a backend of a fixed address its endpoint and starts the loops
// that it lacks, if Run is running.
func (p *Pool) startLocked(b *backend) {
	if !b.cfg.dns() && len(b.endpoints) == 0 {
		p.addEndpointLocked(b, b.cfg.Name, hostPort(b.base))
	}
	if p.run == nil {
		return
	}
	if b.stop == nil && (b.cfg.dns() || b.cfg.tls() || b.cfg.APIKeyFile != "") {
		ctx, stop := context.WithCancel(p.run)
		b.stop = stop
		p.loops.Go(func() { p.watch(ctx, b) })
	}
	for _, e := range b.endpoints {
		p.startProbesLocked(e)
	}
}

func (p *Pool) startProbesLocked(e *endpoint) {
	if p.run == nil || e.stop != nil || !e.b.cfg.probed() {
		return
	}
	ctx, stop := context.WithCancel(p.run)
	e.stop = stop
	b := e.b
	p.loops.Go(func() { p.probeLoop(ctx, b, e) })
}

// addEndpointLocked adds an address to b. One that is still draining returns with the
// load it has, or its slots would be given out twice.
func (p *Pool) addEndpointLocked(b *backend, id, host string) {
	var v vitals
	if !b.cfg.probed() {
		v.state = Up // until answers say otherwise
	}
	v.newcomer, v.breaker.most = len(b.endpoints) > 0, p.cfg.MaxFailures
	i := slices.IndexFunc(p.draining, func(e *endpoint) bool { return e.id == id && e.host == host })
	e := &endpoint{id: id, host: host, wake: make(chan struct{}, 1), lost: make(chan struct{})}
	if i >= 0 {
		e = p.draining[i]
		p.draining = slices.Delete(p.draining, i, i+1)
		v.rest, v.breaker.gen = e.v.rest, e.v.breaker.gen+1
		v.rest.back(p.now())
	}
	e.b, e.gone, e.v, e.lastError = b, false, v, ""
	e.v.drained = p.drainedLocked(e)
	b.endpoints = append(b.endpoints, e)
}

// retireLocked takes b out of use.
func (p *Pool) retireLocked(b *backend) {
	if b.stop != nil {
		b.stop()
		b.stop = nil
	}
	for _, e := range b.endpoints {
		p.retireEndpointLocked(e)
	}
	b.endpoints = nil
}

func (p *Pool) retireEndpointLocked(e *endpoint) {
	e.gone = true
	if e.stop != nil {
		e.stop()
		e.stop = nil
	}
	if e.inFlight > 0 {
		p.draining = append(p.draining, e)
	}
}

func (e *endpoint) size() int {
	if s := e.b.cfg.Slots; s > 0 {
		return s
	}
	return nominalSlots
}

func (p *Pool) holdLocked(now int64, e *endpoint, lease Releaser) *Slot {
	trial := e.v.breaker.state == BreakerHalfOpen
	s := &Slot{p: p, e: e, b: e.b, cfg: e.b.cfg, lease: lease, lost: e.lost, gen: e.v.begin(now), next: e.held}
	if e.held != nil {
		e.held.prev = s
	}
	e.held = s
	e.inFlight++
	p.inFlight++
	p.budget.begin(now, p.fullBudgetLocked())
	if trial { // nobody else is to wait for it
		p.changedLocked()
	}
	return s
}

func (p *Pool) release(s *Slot) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, now := s.e, p.now()
	if !s.open {
		p.endLocked(now, s, nothing)
	}
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		e.held = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	}
	if e.v.share(now) < 1 && e.full(now, p.peers()) {
		p.changedLocked() // a place for one who waits
	}
	e.inFlight--
	p.inFlight--
	if e.gone && e.inFlight == 0 {
		if i := slices.Index(p.draining, e); i >= 0 {
			p.draining = slices.Delete(p.draining, i, i+1)
		}
	}
}

// BackendStatus is one endpoint as metrics, readiness and the admin API show it.
type BackendStatus struct {
	Name     string // of the backend
	Endpoint string // Name, for dns:// with @address:port
	URL      string
	State    State
	Draining bool // gone from the policy or from DNS; requests in flight finish
	InFlight int
	Slots    int // 0: unbounded
	// LastError is why it was last found ill; "" since it was found well.
	LastError string

	Kind     Kind
	Overflow bool
	Drained  bool // by Drain
	Breaker  BreakerState
	Ejected  bool          // its peers do much better
	Paused   time.Duration // for so long yet it asked to be left alone
	Share    float64       // of its room, below 1 during a slow start
	Weight   float64       // below 1: slower than its peers
	// FirstByte is how long streams wait for their first byte, about; 0: unknown.
	FirstByte time.Duration
}

// Status lists the endpoints in the policy's order, draining ones last. A dns://
// backend without addresses is listed once, down, so that it is seen.
func (p *Pool) Status() []BackendStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	var out []BackendStatus
	for _, b := range p.order {
		for _, e := range b.endpoints {
			out = append(out, e.status(now))
		}
		if len(b.endpoints) == 0 {
			out = append(out, BackendStatus{
				Name: b.cfg.Name, Endpoint: b.cfg.Name, URL: b.cfg.URL,
				State: Down, Slots: b.cfg.Slots, LastError: "the name has no address yet",
				Kind: b.cfg.Kind, Overflow: b.cfg.Overflow, Share: 1, Weight: 1,
			})
		}
	}
	for _, e := range p.draining {
		out = append(out, e.status(now))
	}
	return out
}

func (e *endpoint) status(now int64) BackendStatus {
	v := &e.v
	v.settle(now)
	u := *e.b.base
	u.Host = e.host
	return BackendStatus{
		Name: e.b.cfg.Name, Endpoint: e.id, URL: u.String(), State: v.state, Draining: e.gone,
		InFlight: e.inFlight, Slots: e.b.cfg.Slots, LastError: e.lastError,
		Kind: e.b.cfg.Kind, Overflow: e.b.cfg.Overflow, Drained: v.drained, Breaker: v.breaker.state, Ejected: v.ejectedUntil > 0,
		Paused: time.Duration(max(v.pausedUntil-now, 0)), Share: v.share(now), Weight: v.latencyWeight(), FirstByte: time.Duration(v.typical()),
	}
}

// Up counts the endpoints that are up.
func (p *Pool) Up() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, b := range p.order {
		for _, e := range b.endpoints {
			if e.v.state == Up {
				n++
			}
		}
	}
	return n
}

// Run probes and resolves until ctx ends or Close is called, and returns once every
// goroutine of it has ended. It may be called once at a time.
func (p *Pool) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	p.mu.Lock()
	if p.run != nil || p.closed {
		p.mu.Unlock()
		return errors.New("upstream pool is already running or closed")
	}
	p.run, p.stop, p.done = ctx, stop, make(chan struct{})
	done := p.done
	for _, b := range p.order {
		p.startLocked(b)
	}
	p.loops.Go(func() { p.tend(ctx) })
	p.mu.Unlock()

	<-ctx.Done()

	p.mu.Lock()
	p.run, p.stop = nil, nil // from here on nothing is added to loops
	for _, b := range p.order {
		b.stop = nil
		for _, e := range b.endpoints {
			e.stop = nil
		}
	}
	p.mu.Unlock()
	p.loops.Wait()
	close(done)
	return nil
}

// Close ends Run and the idle connections; Candidates and Hold say ErrNoBackend from then on.
// Slots still out remain usable and are to be released as ever.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	p.changedLocked()
	stop, done, order := p.stop, p.done, p.order
	p.mu.Unlock()
	if stop != nil {
		stop()
	}
	if done != nil {
		<-done
	}
	for _, b := range order {
		b.transport.CloseIdleConnections()
	}
}

func hostPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	if u.Scheme == "https" {
		return u.Host + ":443"
	}
	return u.Host + ":80"
}
