package budget

import (
	"context"
	"errors"
	"log/slog"

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

// Manager spends for one process. Its methods may be called concurrently.
type Manager struct{ cfg Config }

// New returns a Manager that spends nothing before Run.
func New(cfg Config) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Manager{cfg: cfg}, nil
}

// Take grants all charges or none, and says in out, of the same length, what each gave. It waits for
// draws while ctx lives, for two seconds at most. Its errors are *Refused and ctx's. After nil, Settle is
// due.
func (m *Manager) Take(ctx context.Context, cs []Charge, out []Taken) error {
	return &Refused{Kind: Unavailable}
}

// Settle ends what Take granted: actual is what the request cost each of its budgets, 0 if nothing came of it. It
// never waits. What was settled already is left as it is. Used, Amount and Left are then as they stand.
func (m *Manager) Settle(taken []Taken, actual int64) {}

// Peek says what Take would without a word with the ledger, and changes nothing.
func (m *Manager) Peek(cs []Charge, out []Taken) error { return &Refused{Kind: Unavailable} }

// Level says how an account stands; false: nothing is known of it here.
func (m *Manager) Level(key Key) (Level, bool) { return Level{}, false }

// Recall gives back what lies idle of an account: others want it. It never blocks.
func (m *Manager) Recall(key Key) {}

// Now is the ledger's clock, in ns since the Unix epoch: its last word and the time since. Before its first word it is
// this process's. Periods are looked up by it, so that a wall clock that is off harms nothing.
func (m *Manager) Now() int64 { _, wall := m.cfg.Clock(); return wall }

// Run draws, reports and gives back until ctx ends, and returns when all that it started has ended. It
// is called once.
func (m *Manager) Run(ctx context.Context) { <-ctx.Done() }

// Drain takes no more, and tells the ledger of each account that this process is done with it, as soon
// as the account's requests are settled. An error says what was not told when ctx ended: that stays
// outstanding. Run must be running.
func (m *Manager) Drain(ctx context.Context) error { return nil }
