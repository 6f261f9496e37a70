package upstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// ErrNoMetrics is what Fetch says of a backend that has none.
var ErrNoMetrics = errors.New("the backend has no metrics")

// Candidate is an endpoint that may take a request now.
type Candidate struct {
	ID         string // of the endpoint: Hold's, and the lease's and the queue's name of it
	Backend    string
	Slots      int   // 0: unbounded
	SlotTokens int64 // ≥ 1
	Overflow   bool  // only where no other has room
	Bounded    bool  // Slots > 0: a slot is to be had from the cluster first
	InFlight   int   // of this gateway
	// Load is what one more request would make of the endpoint's load here: in flight
	// by its size, larger while it starts slowly or answers more slowly than its peers.
	Load  float64
	State State // Up or Unknown
}

// PausedError says that every live endpoint has asked to be left alone for a while
// (429, 503 with Retry-After), or has come back a moment ago and takes no more yet. It
// is an ErrSaturated.
type PausedError struct {
	Until time.Time // when the first of them takes requests again; Changed may say so earlier
}

func (e *PausedError) Error() string { return "all backends have asked to be left alone for a while" }

// Is makes it a kind of ErrSaturated.
func (e *PausedError) Is(target error) bool { return target == ErrSaturated }

// Candidates appends to dst the endpoints of the named backends that may take a request
// now, without those whose ID is in tried, best first: overflow last, then up before
// unknown, then the smaller Load; ties rotate. A name may be that of an endpoint. Without
// any the error is ErrNoBackend, or *PausedError where waiting for it or for Changed
// helps. Whether a bounded one has a slot free is the cluster's to say, not the pool's.
func (p *Pool) Candidates(dst []Candidate, names, tried []string) ([]Candidate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, from := p.now(), len(dst)
	err := p.eachLocked(now, names, tried, func(e *endpoint) { dst = append(dst, e.candidate(now)) })
	slices.SortStableFunc(dst[from:], compareCandidates)
	return dst, err
}

// eachLocked calls f for each of the named that may take a request now, beginning with
// another one each time. The error says why there was none.
func (p *Pool) eachLocked(now int64, names, tried []string, f func(*endpoint)) error {
	if p.closed {
		return ErrNoBackend
	}
	p.turn++
	found, wait, peers := false, int64(0), p.peers()
	for i := range names {
		name := names[(i+p.turn)%len(names)]
		backend, _, one := strings.Cut(name, "@")
		b := p.backends[backend]
		if b == nil {
			continue
		}
		for j := range b.endpoints {
			e := b.endpoints[(j+p.turn)%len(b.endpoints)]
			if one && e.id != name || slices.Contains(tried, e.id) {
				continue
			}
			e.v.settle(now)
			until, ok := e.takes(now, peers)
			if ok {
				found = true
				f(e)
			} else if until > 0 && (wait == 0 || until < wait) {
				wait = until
			}
		}
	}
	switch {
	case found:
		return nil
	case wait > 0:
		return &PausedError{Until: p.start.Add(time.Duration(wait - 1))}
	}
	p.hastenLocked(now, names, tried)
	return ErrNoBackend
}

// hastenLocked has those of the named looked after sooner that are left alone, now that requests come and there is no other: once in
// five seconds. To try what flaps ever more rarely is for where there is something better.
func (p *Pool) hastenLocked(now int64, names, tried []string) {
	for _, name := range names {
		backend, _, one := strings.Cut(name, "@")
		b := p.backends[backend]
		if b == nil {
			continue
		}
		for _, e := range b.endpoints {
			if one && e.id != name || slices.Contains(tried, e.id) || e.hastened > 0 && now-e.hastened < int64(downPause) || !e.v.hasten(now) {
				continue
			}
			e.hastened = max(now, 1)
			e.probeSoon()
			p.tendSoon()
		}
	}
}

// takes says whether e takes a request now, after settle; else until when to wait, if
// time alone will change it.
func (e *endpoint) takes(now int64, peers int) (until int64, ok bool) {
	switch {
	case e.v.onTrial(now): // its first byte says more, soon
		return e.v.breaker.trial + int64(probePatience), false
	case !e.v.eligible(now):
		return 0, false
	case e.v.paused(now):
		return e.v.pausedUntil, false
	case e.full(now, peers):
		return min(now+int64(rampStep), e.v.rampSince+int64(rampTime)), false
	}
	return 0, true
}

// rampStep is how often one looks whether a slow start has room again.
const rampStep = 250 * time.Millisecond

// full says whether e, which is unbounded, has this gateway's part of a slow start's room
// in use. The room of a bounded one is the cluster's to give out, by Share.
func (e *endpoint) full(now int64, peers int) bool {
	share := e.v.share(now)
	return share < 1 && e.b.cfg.Slots == 0 && e.inFlight >= max(int(share*nominalSlots)/peers, 1)
}

func (p *Pool) peers() int {
	if p.cfg.Peers == nil {
		return 1
	}
	return max(p.cfg.Peers(), 1)
}

func (e *endpoint) candidate(now int64) Candidate {
	cfg := e.b.cfg
	size := float64(e.size()) * e.v.share(now) * e.v.latencyWeight()
	return Candidate{
		ID: e.id, Backend: cfg.Name, Slots: cfg.Slots, SlotTokens: cfg.slotTokens(), Overflow: cfg.Overflow, Bounded: cfg.Slots > 0,
		InFlight: e.inFlight, Load: float64(e.inFlight+1) / size, State: e.v.state,
	}
}

func (b *Backend) slotTokens() int64 {
	if b.SlotTokens > 0 {
		return b.SlotTokens
	}
	return DefaultSlotTokens
}

func compareCandidates(a, b Candidate) int {
	switch {
	case a.Overflow != b.Overflow:
		if b.Overflow {
			return -1
		}
		return 1
	case a.State != b.State:
		if a.State == Up {
			return -1
		}
		return 1
	case a.Load < b.Load:
		return -1
	case a.Load > b.Load:
		return 1
	}
	return 0
}

// Releaser is what a slot gives back with itself: the cluster's lease on it.
type Releaser interface{ Release() }

// Hold counts one request in flight to the endpoint of that ID, whatever its Slots: a
// bounded one's are the cluster's to give out, and lease, if it isn't nil, is what it
// gave; Slot.Release releases it, once. Hold fails with ErrNoBackend or a *PausedError if
// the endpoint takes none any more, and leaves lease to the caller; a breaker that is
// half open lets one through.
func (p *Pool) Hold(id string, lease Releaser) (*Slot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, now := p.findLocked(id), p.now()
	if e == nil || p.closed {
		return nil, ErrNoBackend
	}
	e.v.settle(now)
	until, ok := e.takes(now, p.peers())
	switch {
	case ok:
		return p.holdLocked(now, e, lease), nil
	case until > 0:
		return nil, &PausedError{Until: p.start.Add(time.Duration(until - 1))}
	}
	return nil, ErrNoBackend
}

func (p *Pool) findLocked(id string) *endpoint {
	name, _, _ := strings.Cut(id, "@")
	b := p.backends[name]
	if b == nil {
		return nil
	}
	i := slices.IndexFunc(b.endpoints, func(e *endpoint) bool { return e.id == id })
	if i < 0 {
		return nil
	}
	return b.endpoints[i]
}

// Changed is closed when it may be worth to ask for Candidates again: an endpoint came,
// went, or takes requests again or no more. Take it before asking.
func (p *Pool) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

func (p *Pool) changedLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Endpoint is one address of a backend, as the queue and the learner need it.
type Endpoint struct {
	ID, Backend string
	Slots       int   // 0: unbounded
	SlotTokens  int64 // ≥ 1
	Overflow    bool
	Metrics     bool // Fetch finds metrics there
	// Share is the part of Slots that it may have in use by all gateways: below 1 while
	// it starts slowly after it came back.
	Share float64
}

// Endpoints lists all that the policy and DNS name, in the policy's order, whatever their
// health. Changed says when the list may have changed.
func (p *Pool) Endpoints() []Endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	var out []Endpoint
	for _, b := range p.order {
		for _, e := range b.endpoints {
			out = append(out, Endpoint{
				ID: e.id, Backend: b.cfg.Name, Slots: b.cfg.Slots, SlotTokens: b.cfg.slotTokens(), Overflow: b.cfg.Overflow,
				Metrics: b.cfg.metricsPath() != "", Share: e.v.share(now),
			})
		}
	}
	return out
}

// Share is Endpoint.Share of one of them; 1 if it is unknown.
func (p *Pool) Share(id string) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.findLocked(id); e != nil {
		return e.v.share(p.now())
	}
	return 1
}

// Fetch gives what a GET of path, below the base path of the endpoint's backend, answers
// within the health timeout; "" is the backend's metrics (ErrNoMetrics if it has none).
// More than limit bytes, or a status other than 2xx, is an error.
func (p *Pool) Fetch(ctx context.Context, id, path string, limit int64) ([]byte, error) {
	p.mu.Lock()
	e := p.findLocked(id)
	if e == nil {
		p.mu.Unlock()
		return nil, fmt.Errorf("fetch from %q: %w", id, ErrNoBackend)
	}
	b, cfg := e.b, e.b.cfg
	p.mu.Unlock()
	if path == "" {
		if path = cfg.metricsPath(); path == "" {
			return nil, fmt.Errorf("fetch from %q: %w", id, ErrNoMetrics)
		}
	}
	body, err := p.get(ctx, b, cfg, b.url(e.host, path), limit)
	if err != nil {
		return nil, fmt.Errorf("fetch from %q: %w", id, err)
	}
	return body, nil
}
