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
	if p.closed {
		return dst, ErrNoBackend
	}
	p.turn++
	from := len(dst)
	for i := range names {
		name := names[(i+p.turn)%len(names)]
		backend, _, one := strings.Cut(name, "@")
		b := p.backends[backend]
		if b == nil {
			continue
		}
		for j := range b.endpoints {
			e := b.endpoints[(j+p.turn)%len(b.endpoints)]
			if e.state == Down || one && e.id != name || slices.Contains(tried, e.id) || b.drained {
				continue
			}
			dst = append(dst, e.candidate())
		}
	}
	if len(dst) == from {
		return dst, ErrNoBackend
	}
	slices.SortStableFunc(dst[from:], compareCandidates)
	return dst, nil
}

func (e *endpoint) candidate() Candidate {
	cfg := e.b.cfg
	return Candidate{
		ID: e.id, Backend: cfg.Name, Slots: cfg.Slots, SlotTokens: cfg.slotTokens(), Overflow: cfg.Overflow, Bounded: cfg.Slots > 0,
		InFlight: e.inFlight, Load: float64(e.inFlight+1) / float64(e.size()), State: e.state,
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

// Hold counts one request in flight to the endpoint of that ID, whatever its Slots: a
// bounded one's are the cluster's to give out. It fails with ErrNoBackend or a
// *PausedError if the endpoint takes none any more; a breaker that is half open lets one
// through. The caller must Release the slot.
func (p *Pool) Hold(id string) (*Slot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.findLocked(id)
	if e == nil || p.closed || e.state == Down || e.b.drained {
		return nil, ErrNoBackend
	}
	e.inFlight++
	return &Slot{p: p, e: e, b: e.b, cfg: e.b.cfg}, nil
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
	var out []Endpoint
	for _, b := range p.order {
		for _, e := range b.endpoints {
			out = append(out, Endpoint{
				ID: e.id, Backend: b.cfg.Name, Slots: b.cfg.Slots, SlotTokens: b.cfg.slotTokens(), Overflow: b.cfg.Overflow,
				Metrics: b.cfg.metricsPath() != "", Share: 1,
			})
		}
	}
	return out
}

// Share is Endpoint.Share of one of them; 1 if it is unknown.
func (p *Pool) Share(id string) float64 { return 1 }

// Drain makes names the backends and endpoints that take no new request; those in flight
// finish, and health is followed as ever. It replaces what an earlier call named. Names
// that nothing bears count once something does.
func (p *Pool) Drain(names []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.order {
		b.drained = slices.Contains(names, b.cfg.Name)
	}
	p.changedLocked()
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

// Retry takes one attempt from the pool's retry budget: a fifth of the requests and three
// a second, up to a bound. It is to be asked before a request that a backend may have
// received is sent to another; one that cannot have been received ([Retryable]) is no load
// on any backend and needs none.
func (p *Pool) Retry() bool { return true }
