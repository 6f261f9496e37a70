package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"headgate/bench/origin"
)

// Config says what is measured and how long. The zero value of a field means its default.
type Config struct {
	// Headgate is the binary to run. It must be set.
	Headgate string
	// Nodes of the cluster. Default: 3.
	Nodes int
	// Rounds of kills, and of kill switches and revocations. Default: 20.
	Rounds int
	// Starts of a fresh cluster. Default: 5.
	Starts int
	// Watch is how long leases are watched while nobody dies. Default: 60 s.
	Watch time.Duration
	// Around is how long the load lasts at each kill, from shortly before it. Default: 5 s.
	Around time.Duration
	// Rate of that load, in requests a second at each node. Default: 50.
	Rate float64
	// Each is how long changes are made by one number of writers. Default: 3 s.
	Each time.Duration
	// Repeats of the changes. Default: 3.
	Repeats int
	// Writers that make changes at once. Default: 1, 16 and 256.
	Writers []int
	// Quick makes everything that is not set short: a look whether it works, no measurement.
	Quick bool
	// Dir is where the nodes' folders are made, on the disk that is to be measured. Default:
	// the system's folder for temporary files.
	Dir string
	// Log receives progress, if set.
	Log io.Writer
}

// Bounds of a configuration.
const (
	minNodes   = 3 // with fewer no majority survives
	maxNodes   = 9
	maxRounds  = 1000
	maxSpan    = time.Hour
	maxRate    = 10_000
	maxWriters = 512
)

// Validate reports what makes no sense.
func (c Config) Validate() error {
	switch {
	case c.Headgate == "":
		return errors.New("cluster benchmark: no headgate binary is named")
	case c.Nodes != 0 && (c.Nodes < minNodes || c.Nodes > maxNodes):
		return fmt.Errorf("nodes: %d is not between %d and %d", c.Nodes, minNodes, maxNodes)
	case c.Rounds < 0 || c.Rounds > maxRounds || c.Starts < 0 || c.Starts > maxRounds || c.Repeats < 0 || c.Repeats > maxRounds:
		return fmt.Errorf("rounds: a number of them is not between 0 and %d", maxRounds)
	case min(c.Watch, c.Around, c.Each) < 0 || max(c.Watch, c.Around, c.Each) > maxSpan:
		return fmt.Errorf("a length of time is not between 0 and %v", maxSpan)
	case c.Rate < 0 || c.Rate > maxRate:
		return fmt.Errorf("rate: %g is not between 0 and %d", c.Rate, maxRate)
	}
	for _, w := range c.Writers {
		if w < 1 || w > maxWriters {
			return fmt.Errorf("writers: %d is not between 1 and %d", w, maxWriters)
		}
	}
	return nil
}

func pick[T comparable](v *T, quick bool, short, long T) {
	var zero T
	if *v != zero {
		return
	}
	if *v = long; quick {
		*v = short
	}
}

func (c Config) withDefaults() Config {
	pick(&c.Nodes, c.Quick, 3, 3)
	pick(&c.Rounds, c.Quick, 1, 20)
	pick(&c.Starts, c.Quick, 1, 5)
	pick(&c.Watch, c.Quick, 2*time.Second, time.Minute)
	pick(&c.Around, c.Quick, 3*time.Second, 5*time.Second)
	pick(&c.Rate, c.Quick, 20, 50)
	pick(&c.Each, c.Quick, 300*time.Millisecond, 3*time.Second)
	pick(&c.Repeats, c.Quick, 1, 3)
	if c.Writers == nil {
		c.Writers = []int{1, 16, 256}
	}
	if c.Log == nil {
		c.Log = io.Discard
	}
	return c
}

// bench is a run in progress.
type bench struct {
	*fleet
	rep *Report
}

// Run measures and returns the report. With the defaults it takes some ten minutes. An aim that
// is missed is no error but stands in the report. Where the run could not go on, or ctx ended,
// the report holds what was measured until then, and comes with the error; it is nil only where
// nothing could be started.
func Run(ctx context.Context, cfg Config) (rep *Report, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if cfg.Dir != "" {
		if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
			return nil, fmt.Errorf("cluster benchmark: %w", err)
		}
	}
	dir, err := os.MkdirTemp(cfg.Dir, "headgate-bench-")
	if err != nil {
		return nil, fmt.Errorf("cluster benchmark: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a scratch directory
	f, err := newFleet(cfg, dir)
	if err != nil {
		return nil, fmt.Errorf("cluster benchmark: %w", err)
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	b := &bench{fleet: f, rep: &Report{Started: time.Now().UTC(), Machine: origin.Machine(), Commit: origin.Commit(ctx), Config: cfg}}
	if cfg.Quick {
		b.rep.note("a quick run: its figures say that it works, not how well")
	}
	return b.rep, b.run(ctx)
}

// run takes the measurements in turn; each leaves a cluster that is whole.
func (b *bench) run(ctx context.Context) error {
	for _, step := range [...]func(context.Context) error{b.starts, b.healthy, b.switches, b.kills, b.changes} {
		if err := step(ctx); err != nil {
			b.rep.note("the run ended early: %v", err)
			return err
		}
	}
	return nil
}

func (b *bench) progress(format string, args ...any) {
	fmt.Fprintf(b.cfg.Log, format+"\n", args...)
}

// starts measures fresh clusters; the last one stays for what follows.
func (b *bench) starts(ctx context.Context) error {
	for round := 1; round <= b.cfg.Starts; round++ {
		if err := b.stopNodes(); err != nil {
			return err
		}
		if err := b.prepare(); err != nil {
			return err
		}
		began := time.Now()
		for _, n := range b.nodes {
			if err := b.start(n); err != nil {
				return err
			}
		}
		if err := b.ready(ctx, b.nodes...); err != nil {
			return err
		}
		took := time.Since(began)
		b.rep.took(startCluster, round, took)
		b.progress("start %d: %v", round, took.Round(time.Millisecond))
		if _, err := b.whole(ctx); err != nil {
			return err
		}
	}
	return nil
}
