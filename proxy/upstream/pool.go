package upstream

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// Why Acquire gives no slot.
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
	updating sync.Mutex // serialises Update; taken before mu

	mu       sync.Mutex // short sections only: no I/O, no logging to slow sinks under it
	backends map[string]*backend
	order    []*backend  // as the policy lists them
	draining []*endpoint // gone from the policy or from DNS, requests still in flight
	turn     int         // where the next search begins, so that ties rotate
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

	// Guarded by Pool.mu.
	cfg       *Backend
	endpoints []*endpoint
	drained   bool
	stop      context.CancelFunc // of the loop that watches names and files; nil: none runs
}

// endpoint is one address with its load and health; all but id, host and wake are
// guarded by Pool.mu.
type endpoint struct {
	id   string // the backend's name, for dns:// with @address:port
	host string // host:port that requests are sent to
	wake chan struct{}

	b            *backend
	inFlight     int
	gone         bool
	state        State
	failedProbes int // in a row
	failedDials  int // in a row
	lastError    string
	stop         context.CancelFunc // of its probe loop; nil: none runs
}

// NewPool makes a pool of cfg's backends. It reads certificate files and opens no
// connection; Run does the rest.
func NewPool(cfg Config) (*Pool, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p := &Pool{cfg: cfg.withDefaults(), backends: map[string]*backend{}, changed: make(chan struct{})}
	if err := p.Update(cfg.Backends); err != nil {
		return nil, err
	}
	return p, nil
}

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

	order := make([]*backend, len(bs))
	for i, cfg := range bs { // reads files, so outside of mu
		if o := old[cfg.Name]; o != nil && o.cfg.sameServer(cfg) {
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
	return &backend{base: base, transport: t, cfg: &cfg, models: newModelsCache()}, nil
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
	if b.stop == nil && (b.cfg.dns() || b.cfg.tls()) {
		ctx, stop := context.WithCancel(p.run)
		b.stop = stop
		p.loops.Go(func() { p.watch(ctx, b) })
	}
	for _, e := range b.endpoints {
		p.startProbesLocked(e)
	}
}

func (p *Pool) startProbesLocked(e *endpoint) {
	if p.run == nil || e.stop != nil {
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
	i := slices.IndexFunc(p.draining, func(e *endpoint) bool { return e.id == id && e.host == host })
	if i < 0 {
		b.endpoints = append(b.endpoints, &endpoint{id: id, host: host, b: b, wake: make(chan struct{}, 1)})
		return
	}
	e := p.draining[i]
	p.draining = slices.Delete(p.draining, i, i+1)
	e.b, e.gone, e.state, e.failedProbes, e.failedDials, e.lastError = b, false, Unknown, 0, 0, ""
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

// Acquire takes a slot of the least loaded endpoint (in flight / slots) among the
// named backends that is up, or of one whose health is unknown where no live one has
// room, leaving out those whose Slot.Endpoint is in tried. A name may also be that of an
// endpoint. The caller must Release it.
func (p *Pool) Acquire(names, tried []string) (*Slot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrNoBackend
	}
	p.turn++
	var best *endpoint
	full := false
	for i := range names {
		name := names[(i+p.turn)%len(names)]
		backend, _, one := strings.Cut(name, "@")
		b := p.backends[backend]
		if b == nil {
			continue
		}
		for j := range b.endpoints {
			e := b.endpoints[(j+p.turn)%len(b.endpoints)]
			switch {
			case e.state == Down || one && e.id != name || slices.Contains(tried, e.id):
			case b.cfg.Slots > 0 && e.inFlight >= b.cfg.Slots:
				full = true
			case best == nil || e.betterThan(best):
				best = e
			}
		}
	}
	if best == nil && full {
		return nil, ErrSaturated
	}
	if best == nil {
		return nil, ErrNoBackend
	}
	best.inFlight++
	return &Slot{p: p, e: best, b: best.b, cfg: best.b.cfg}, nil
}

// betterThan prefers what is known to be up, then the smaller load that the request
// would bring it to.
func (e *endpoint) betterThan(o *endpoint) bool {
	if e.state != o.state {
		return e.state == Up
	}
	return (int64(e.inFlight)+1)*o.size() < (int64(o.inFlight)+1)*e.size()
}

func (e *endpoint) size() int64 {
	if s := e.b.cfg.Slots; s > 0 {
		return int64(s)
	}
	return nominalSlots
}

func (p *Pool) release(e *endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.inFlight--
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
}

// Status lists the endpoints in the policy's order, draining ones last. A dns://
// backend without addresses is listed once, down, so that it is seen.
func (p *Pool) Status() []BackendStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []BackendStatus
	for _, b := range p.order {
		for _, e := range b.endpoints {
			out = append(out, e.status())
		}
		if len(b.endpoints) == 0 {
			out = append(out, BackendStatus{
				Name: b.cfg.Name, Endpoint: b.cfg.Name, URL: b.cfg.URL,
				State: Down, Slots: b.cfg.Slots, LastError: "the name has no address yet",
			})
		}
	}
	for _, e := range p.draining {
		out = append(out, e.status())
	}
	return out
}

func (e *endpoint) status() BackendStatus {
	u := *e.b.base
	u.Host = e.host
	return BackendStatus{
		Name: e.b.cfg.Name, Endpoint: e.id, URL: u.String(), State: e.state, Draining: e.gone,
		InFlight: e.inFlight, Slots: e.b.cfg.Slots, LastError: e.lastError,
	}
}

// Up counts the endpoints that are up.
func (p *Pool) Up() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, b := range p.order {
		for _, e := range b.endpoints {
			if e.state == Up {
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

// Close ends Run and the idle connections; Acquire says ErrNoBackend from then on.
// Slots still out remain usable and are to be released as ever.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
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

// setAuth puts the backend's key in place of whatever the request carries.
func setAuth(h http.Header, key string) {
	if key == "" {
		h.Del("Authorization")
		return
	}
	h.Set("Authorization", "Bearer "+key)
}
