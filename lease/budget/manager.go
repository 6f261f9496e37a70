package budget

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Config is what a Manager is made from. Holder, Draw and Clock are needed.
type Config struct {
	// Holder is the process's incarnation: never 0, never used by another.
	Holder uint64
	// Draw asks the ledger. It is called concurrently, 64 times at most, with a context that ends after
	// two seconds. See ErrNotDone for its errors.
	Draw func(ctx context.Context, d Draw) (Drawn, error)
	// Clock returns a monotonic reading and the wall clock's, both in ns. The wall clock counts only
	// until the ledger answers first.
	Clock func() (mono, wall int64)
	// Override says whether the process is told to spend what was kept aside. nil: never.
	Override   func() bool
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Validate names the field and the remedy.
func (c *Config) Validate() error {
	switch {
	case c.Holder == 0:
		return errors.New("budget: Holder is 0; give the process's incarnation")
	case c.Draw == nil || c.Clock == nil:
		return errors.New("budget: Draw or Clock is nil; give the process's")
	}
	return nil
}

// drawFor is how long one try of a draw takes at most; downAfter is how long all tries have failed when the ledger counts
// as out of reach; warnEvery is the time between two lines in the log of the same kind.
const (
	drawFor   = 2 * time.Second
	warnEvery = int64(10 * time.Second)
	downAfter = int64(time.Second)
)

var errStopped = errors.New("this process draws no more")

// Manager spends for one process. It is the shell round the accounts: it has their locks, the clock, the waiting, and the
// goroutines that draw, which are all Run's. Its methods may be called concurrently. No lock is held across a draw; the
// agenda's is taken with accounts' held, and nothing with the agenda's.
type Manager struct {
	cfg      Config
	log      *slog.Logger
	met      *metrics
	table    *table
	agenda   agenda
	ahead    atomic.Int64 // of the ledger's clock before the monotonic one
	heard    atomic.Bool  // ahead is known
	down     atomic.Pointer[error]
	draining atomic.Bool
	dropped  chan struct{} // to Drain: an account is gone
	// When the log last said that the ledger refuses, that there is no room for an account, that one was released.
	warned, warnedFull, warnedClosed atomic.Int64

	mu      sync.Mutex
	failing int64 // since when draws fail; never: they do not
	last    int64 // when one was answered
}

// New returns a Manager that draws nothing before Run.
func New(cfg Config) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, log: cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler)), table: newTable(),
		agenda: agenda{soon: make(chan struct{}, 1)}, dropped: make(chan struct{}, 1), failing: never,
	}
	m.warned.Store(-warnEvery)
	m.warnedFull.Store(-warnEvery)
	m.warnedClosed.Store(-warnEvery)
	m.table.forgotten = m.agenda.remove
	var err error
	if m.met, err = newMetrics(cfg.Registerer, m); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *Manager) instant() instant {
	mono, wall := m.cfg.Clock()
	if m.heard.Load() {
		wall = mono + m.ahead.Load()
	}
	return instant{mono, wall}
}

// Now is the ledger's clock, in ns since the Unix epoch: its last word and the time since. Before its first word it is
// this process's. Periods are looked up by it, so that a wall clock that is off harms nothing.
func (m *Manager) Now() int64 { return m.instant().wall }

func (m *Manager) outlook() outlook {
	down := m.down.Load()
	if down == nil {
		return outlook{}
	}
	return outlook{down: *down, override: m.cfg.Override != nil && m.cfg.Override()}
}

// count counts a refusal and returns it.
func (m *Manager) count(r *Refused) error {
	m.met.refused.WithLabelValues(r.Kind.String()).Inc()
	return r
}

// after ends a step of c, which is locked: who waited is told, and the next step is planned.
func (m *Manager) after(c *cell, at instant) {
	for i, q := range c.decided {
		close(q.done)
		c.decided[i] = nil
	}
	c.decided = c.decided[:0]
	due, what := c.next(at)
	queue := c.queue
	if what.urgent() || len(c.line) > 0 {
		queue = rushed
	}
	if due < c.planned || due != never && queue < c.queue {
		c.planned, c.queue = min(due, c.planned), queue
		m.agenda.put(c, c.planned, queue)
	}
}

// Run draws, reports and gives back until ctx ends, and returns when all that it started has ended. It
// is called once.
func (m *Manager) Run(ctx context.Context) {
	var draws sync.WaitGroup
	defer draws.Wait()
	defer m.down.Store(&errStopped)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		c, queue, wait := m.agenda.take(m.instant().mono)
		if c != nil {
			draws.Go(func() { m.agenda.ended(queue, m.step(ctx, c)) })
			continue
		}
		timer.Reset(time.Duration(min(wait-m.instant().mono, int64(time.Hour))))
		select {
		case <-ctx.Done():
			return
		case <-m.agenda.soon:
		case <-timer.C:
		}
	}
}

// step has c do what is due, and says whether that was a draw.
func (m *Manager) step(ctx context.Context, c *cell) bool {
	at := m.instant()
	c.mu.Lock()
	c.planned, c.queue = never, quiet
	if c.gone {
		c.mu.Unlock()
		return false
	}
	d, what := c.step(at, m.cfg.Holder)
	switch what {
	case nothing:
		m.after(c, at)
		c.mu.Unlock()
		return false
	case forget:
		c.gone = true
		c.mu.Unlock()
		m.table.drop(c)
		signal(m.dropped)
		return false
	}
	c.mu.Unlock()
	res, err := m.ask(ctx, d, what == retry)
	at = m.instant()
	c.mu.Lock()
	closed := c.closed
	c.answered(at, res, err, m.outlook())
	released := c.closed && !closed && !d.Final
	m.after(c, at)
	c.mu.Unlock()
	if released && due(&m.warnedClosed, at.mono) {
		m.log.Error("an operator released what this process holds of budgets: it serves them no more; restart it", "tenant", d.Key.Tenant, "budget", d.Key.Limit)
	}
	return true
}

// ask makes a draw, and notes whether the ledger can be reached and what its clock says. That of a draw that comes again may be of
// when it came first.
func (m *Manager) ask(ctx context.Context, d Draw, again bool) (Drawn, error) {
	began, _ := m.cfg.Clock()
	ctx, stop := context.WithTimeout(ctx, drawFor)
	res, err := m.cfg.Draw(ctx, d)
	stop()
	mono, _ := m.cfg.Clock()
	var period *PeriodError
	var stale *StaleError
	outcome, now := "granted", res.Now
	switch {
	case err == nil:
		if d.Want == 0 {
			outcome = "told"
		} else if res.Granted == 0 {
			outcome = "refused"
		}
	case errors.As(err, &period):
		outcome, now, again = "out_of_period", period.Now, false
	case errors.As(err, &stale), errors.Is(err, ErrNoAccount):
		outcome = "not_done"
	case errors.Is(err, ErrNotDone):
		outcome = "not_done"
		if due(&m.warned, mono) {
			m.log.Warn("the ledger refuses draws of budgets", "tenant", d.Key.Tenant, "budget", d.Key.Limit, "error", err)
		}
	default:
		m.met.draws.WithLabelValues("unknown").Inc()
		m.failed(began, mono, err)
		return res, err
	}
	if now > 0 && (!again || m.heard.Load() && now-mono > m.ahead.Load()) {
		m.ahead.Store(now - mono)
		m.heard.Store(true)
	}
	m.met.draws.WithLabelValues(outcome).Inc()
	m.reached(mono)
	return res, err
}

// due says, once in a while, that a line may go to the log.
func due(last *atomic.Int64, now int64) bool {
	before := last.Load()
	return now-before >= warnEvery && last.CompareAndSwap(before, now)
}

// full is the refusal of a charge for whose account there is no room.
func (m *Manager) full(i int, key *Key, at instant, err error) *Refused {
	if due(&m.warnedFull, at.mono) {
		m.log.Warn("there is no room for an account of a budget", "tenant", key.Tenant, "budget", key.Limit, "accounts", m.table.count.Load(), "error", err)
	}
	return &Refused{Index: i, Kind: Unavailable, RetryAfter: retryUnavailable, Err: err}
}

// failed notes a draw that was not answered.
func (m *Manager) failed(began, now int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if began < m.last {
		began = now // others were answered meanwhile
	}
	m.failing = min(m.failing, began)
	if now-m.failing < downAfter {
		return
	}
	err = fmt.Errorf("the ledger is out of reach: %w", err)
	if m.down.Swap(&err) == nil {
		m.log.Warn("budgets are spent from what was granted before", "error", err)
	}
	m.agenda.probing(now, true)
}

// reached notes a draw that was answered.
func (m *Manager) reached(now int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failing, m.last = never, now
	if m.down.Swap(nil) != nil {
		m.log.Info("the ledger grants budgets again")
		m.agenda.probing(0, false)
	}
}

// Recall gives back what lies idle of an account: others want it. It never blocks.
func (m *Manager) Recall(key Key) {
	c := m.table.find(&key)
	if c == nil {
		return
	}
	at := m.instant()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.recall(at)
	m.after(c, at)
}

// Retell has every account say again what it spent and holds: the ledger was put back to an earlier time, of a
// backup, and has forgotten what it was told since. It does not wait for that. What was forgotten here, too, since nobody
// had asked for it in ten minutes, is not told.
func (m *Manager) Retell() {
	m.table.each(func(c *cell) {
		at := m.instant()
		c.mu.Lock()
		c.retell = true
		m.after(c, at)
		c.mu.Unlock()
	})
}

// Level says how an account stands; false: nothing is known of it here.
func (m *Manager) Level(key Key) (Level, bool) {
	c := m.table.find(&key)
	if c == nil {
		return Level{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return Level{
		Held: c.avail(), Emergency: c.aside, Open: c.open, Requests: c.opens, Spent: c.spent, Waiting: len(c.line),
		Heard: c.answers > 0, Closed: c.closed,
		Used: c.total(), Amount: c.limit(), Others: c.heard.Others, Free: c.heard.Free, Left: c.left(),
	}, true
}

// Drain takes no more, and tells the ledger of each account that this process is done with it, as soon
// as the account's requests are settled. An error says what was not told when ctx ended: that stays
// outstanding. Run must be running.
func (m *Manager) Drain(ctx context.Context) error {
	m.draining.Store(true)
	m.table.each(func(c *cell) {
		at := m.instant()
		c.mu.Lock()
		c.stop()
		m.after(c, at)
		c.mu.Unlock()
	})
	for {
		left := m.table.count.Load()
		if left == 0 {
			return nil
		}
		select {
		case <-m.dropped:
		case <-ctx.Done():
			return fmt.Errorf("budget: %d accounts were not ended, what they hold stays outstanding: %w", left, context.Cause(ctx))
		}
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
