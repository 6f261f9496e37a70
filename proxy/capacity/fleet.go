package capacity

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	scrapeEvery   = time.Second
	scrapeTimeout = 2 * time.Second // a busy vLLM answers late
	scrapesAtOnce = 16
)

// Backend is one endpoint as the policy describes it.
type Backend struct {
	// ID is the endpoint's ID, as in Observation.
	ID string
	// Slots is the most that Limit ever says; Min the least. Slots below 1 count as 1; Min is kept within 1 and Slots.
	Slots, Min int64
	// Learn is whether Limit says what was learnt. Where false, metrics are still read, for the gauges.
	Learn bool
	// Metrics is whether the endpoint has metrics to be scraped.
	Metrics bool
}

func (b *Backend) settings() settings {
	most := max(1, b.Slots)
	return settings{slots: most, least: min(max(1, b.Min), most), metrics: b.Metrics}
}

// Config is what a Fleet is made of.
type Config struct {
	// Fetch reads the metrics text of one endpoint, at most MaxPage bytes of it. It is called by up to 16 goroutines at once,
	// for one endpoint by one at a time, with a context that ends after 2 s. Nil: nothing is scraped.
	Fetch func(ctx context.Context, id string) ([]byte, error)
	// Active says whether this node schedules: only then are backends scraped and shown in the gauges. It is asked from
	// any goroutine and must be quick. Nil: always.
	Active func() bool
	// Now is the clock, in ns: the one whose times Observe and Limit are given.
	Now func() int64
	// Logger and Registerer may be nil.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Fleet learns the limits of all backends. Its methods may be called from any goroutine; none but Run waits for anything but a
// mutex that is held for microseconds.
type Fleet struct {
	cfg  Config
	busy chan struct{} // a place for each scrape at once

	mu     sync.Mutex
	active bool
	of     map[string]*member
}

// member is one backend of a fleet. The fleet's mutex guards it.
type member struct {
	Backend
	learner  *learner
	scraping bool
	missing  bool // the last scrapes failed, and it was logged
	tried    bool
}

// NewFleet returns a fleet that knows no backend. It registers its gauges, once, and panics if they are there already.
func NewFleet(cfg Config) *Fleet {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Active == nil {
		cfg.Active = func() bool { return true }
	}
	f := &Fleet{cfg: cfg, of: map[string]*member{}, busy: make(chan struct{}, scrapesAtOnce)}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(newGauges(f))
	}
	return f
}

// Apply says which backends there are. One that stays keeps what was learnt of it, within its new bounds; one that goes is
// forgotten. Where an ID is there twice, the last counts.
func (f *Fleet) Apply(backends []Backend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.of
	f.of = make(map[string]*member, len(backends))
	for _, b := range backends {
		m := old[b.ID]
		if m == nil {
			m = &member{learner: newLearner(b.settings())}
		}
		m.Backend = b
		m.learner.apply(b.settings())
		f.of[b.ID] = m
	}
}

// Observe adds what the cluster's requests said about a backend, and moves its limit if it is time. It wants to be called
// every 100 to 250 ms for each backend, also where nothing ended. One that Apply did not name is passed over.
func (f *Fleet) Observe(now int64, o Observation) {
	f.rouse(now)
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.of[o.Backend]; m != nil {
		m.learner.observe(now, &o)
	}
}

// Limit is how many slots of a backend may be used now, at least 1, or -1 where none is learnt: not asked for, or not named by
// Apply. stale: its metrics have been missing for so long that it is taken for saturated; the limit falls towards Min.
func (f *Fleet) Limit(now int64, id string) (limit int64, stale bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.of[id]
	if m == nil {
		return -1, false
	}
	stale = m.learner.stale(now)
	if !m.Learn {
		return -1, stale
	}
	return m.learner.told(), stale
}

// Seed tells a limit that another node had learnt, so that a new scheduler does not start over. It is kept within the backend's
// bounds, and passed over once this node, since it schedules, has moved the limit itself.
func (f *Fleet) Seed(id string, limit int64) {
	f.rouse(f.cfg.Now())
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.of[id]; m != nil && limit > 0 {
		m.learner.seed(limit)
	}
}

// rouse notices that this node has begun to schedule.
func (f *Fleet) rouse(now int64) (active bool) {
	active = f.cfg.Active()
	f.mu.Lock()
	defer f.mu.Unlock()
	if active && !f.active {
		for _, m := range f.of {
			m.learner.resume(now)
			m.tried = false
		}
	}
	f.active = active
	return active
}

// Run scrapes while this node schedules, until ctx ends; it returns when the last scrape has.
func (f *Fleet) Run(ctx context.Context) {
	if f.cfg.Fetch == nil {
		<-ctx.Done()
		return
	}
	var scrapes sync.WaitGroup
	defer scrapes.Wait()
	ticker := time.NewTicker(scrapeEvery) //nolint:forbidigo // the shell's pace; the learner is told the time
	defer ticker.Stop()
	for {
		if f.rouse(f.cfg.Now()) {
			for _, d := range f.due() {
				if !f.begin(ctx, d) {
					continue
				}
				id := d.id
				scrapes.Go(func() {
					f.scrape(ctx, id)
					<-f.busy
				})
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// dueScrape is one that is to begin; late: the last one failed.
type dueScrape struct {
	id   string
	late bool
}

// due are the backends to be scraped now, those first that answered the last time, and marks them: one whose last scrape still
// runs is left out.
func (f *Fleet) due() (ds []dueScrape) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, m := range f.of {
		if m.Metrics && !m.scraping {
			m.scraping = true
			ds = append(ds, dueScrape{id, m.tried && m.missing})
		}
	}
	slices.SortFunc(ds, func(a, b dueScrape) int {
		switch {
		case a.late == b.late:
			return cmp.Compare(a.id, b.id)
		case b.late:
			return -1
		}
		return 1
	})
	return ds
}

// begin waits for a place for a scrape. One that failed the last time does not wait: a rack that hangs must not make all others late.
func (f *Fleet) begin(ctx context.Context, d dueScrape) bool {
	select {
	case f.busy <- struct{}{}:
		return true
	default:
	}
	if !d.late {
		select {
		case f.busy <- struct{}{}:
			return true
		case <-ctx.Done():
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.of[d.id]; m != nil {
		m.scraping = false
	}
	return false
}

func (f *Fleet) scrape(ctx context.Context, id string) {
	ctx, done := context.WithTimeout(ctx, scrapeTimeout)
	defer done()
	text, err := f.cfg.Fetch(ctx, id)
	var s Sample
	if err == nil {
		s, err = ParseMetrics(text)
	}
	now := f.cfg.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.of[id]
	if m == nil {
		return
	}
	m.scraping = false
	if err != nil {
		m.learner.scraped(now, nil)
	} else {
		m.learner.scraped(now, &s)
	}
	f.logChange(m, err, s.Known())
}

// logChange says once that metrics are missing, and once that they are back.
func (f *Fleet) logChange(m *member, err error, known bool) {
	missing := err != nil || !known
	if m.tried && missing == m.missing {
		return
	}
	was := m.tried && m.missing
	m.tried, m.missing = true, missing
	switch {
	case err != nil:
		f.cfg.Logger.Warn("backend's metrics cannot be read", "backend", m.ID, "error", err)
	case missing:
		f.cfg.Logger.Warn("backend's metrics hold no name of vLLM's: its load is unknown", "backend", m.ID)
	case was:
		f.cfg.Logger.Info("backend's metrics are back", "backend", m.ID)
	}
}
