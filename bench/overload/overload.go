// Package overload measures what stays of a saturated model server's usefulness: it
// offers a fraction or a multiple of what the server can do, through Headgate and
// through what people put there instead, and counts the answers that came in time.
//
// # The world
//
// One simulated vLLM with so many slots and an unbounded queue, in the generator's
// own process, so that its log says what ran for whom. Requests come open-loop, as a
// Poisson process, in three classes; half of them stream. A client leaves when its
// patience ends before the first byte, as clients' timeouts do, and none comes again.
//
// # What is compared
//
// Headgate, a bare [net/http/httputil.ReverseProxy], nginx, and nginx that lets no
// more requests through than there are slots; nginx only where it is installed. Each
// is a process of its own, loaded after the others, with the same arrivals.
//
// # What is measured
//
// Goodput is answers that began within their client's patience and came whole, as a
// ratio to what the same server answers directly, with its slots just kept full: the
// capacity. After the surge the load falls to 0.8, and recovery is the time from which
// on the 99th percentile of interactive requests is normal again.
package overload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"headgate/bench/fakevllm"
	"headgate/bench/load"
	benchnginx "headgate/bench/nginx"
	"headgate/bench/origin"
)

// The requests: what the server takes for each, and how long clients wait.
const (
	model      = "fake"
	ttft       = 100 * time.Millisecond
	interToken = 20 * time.Millisecond
	leastOut   = 5  // tokens of the shortest answer
	mostOut    = 15 // and of the longest

	targetWait   = 2 * time.Second // Headgate's default; what its queue is bounded by
	maxInFlight  = 16384
	requestBound = time.Minute
	settle       = time.Second // left out at the beginning of a phase, while the slots fill
	logSize      = 1 << 17
	logBody      = 128 // bytes of each body in the upstream's log: enough for its mark
)

// The classes, and what of the requests is of each.
const (
	interactive = iota
	background
	bestEffort
	classes
)

func classNames() [classes]string { return [classes]string{"interactive", "background", "best_effort"} }

func patience(class int) time.Duration {
	if class == background {
		return 15 * time.Second
	}
	return 5 * time.Second
}

// Config says what is measured and how long. The zero value of a field means its
// default.
type Config struct {
	// Headgate is the binary; it also serves as the bare proxy. Required.
	Headgate string
	// HeadgateArgs follow the arguments of "headgate serve".
	HeadgateArgs []string
	// Nginx is its command. Default: nginx where it is found, else none; "none" leaves it out.
	Nginx string
	// Only these targets are measured, by name. Default: all.
	Only []string
	// Slots of the upstream. Default: 32.
	Slots int
	// Loads offered, as multiples of capacity, ascending; the last is the surge.
	// Default: 0.8, 1.2, 2, 5.
	Loads []float64
	// Each is the length of a phase. Default: 20 s.
	Each time.Duration
	// Surge is the length of the last phase for Headgate, PeerSurge for the others.
	// Defaults: 5 min, 1 min.
	Surge, PeerSurge time.Duration
	// After is how long recovery is watched. Default: 15 s.
	After time.Duration
	// Quick makes it a minute in all: 0.8 and 5, briefly.
	Quick bool
	// Log receives progress, if set.
	Log io.Writer
}

// Validate reports what makes no sense.
func (c Config) Validate() error {
	switch {
	case c.Headgate == "":
		return errors.New("overload benchmark: no headgate binary")
	case c.Slots < 0 || c.Slots > 1024:
		return fmt.Errorf("overload benchmark: %d slots; between 1 and 1024", c.Slots)
	case c.Each < 0 || c.Surge < 0 || c.PeerSurge < 0 || c.After < 0 || max(c.Each, c.Surge, c.PeerSurge, c.After) > time.Hour:
		return errors.New("overload benchmark: a phase is negative, or longer than an hour")
	case tooShort(c.Each) || tooShort(c.Surge) || tooShort(c.PeerSurge) || tooShort(c.After):
		return fmt.Errorf("overload benchmark: a phase must be at least %v long", leastPhase)
	case !slices.IsSorted(c.Loads) || len(c.Loads) > 0 && (c.Loads[0] <= 0 || c.Loads[len(c.Loads)-1] > 20):
		return errors.New("overload benchmark: loads must ascend, above 0 and up to 20 times the capacity")
	}
	for _, n := range c.Only {
		if !slices.Contains(targetNames(), n) {
			return fmt.Errorf("overload benchmark: no target %q; one of %v", n, targetNames())
		}
	}
	return nil
}

// leastPhase is the shortest phase that something can be said of.
const leastPhase = 2 * settle

func tooShort(d time.Duration) bool { return d > 0 && d < leastPhase }

func (c Config) withDefaults() Config {
	c.Slots = cmp.Or(c.Slots, 32)
	if c.Quick {
		c.Each, c.Surge, c.PeerSurge, c.After = cmp.Or(c.Each, 3*time.Second), cmp.Or(c.Surge, 6*time.Second), cmp.Or(c.PeerSurge, 6*time.Second), cmp.Or(c.After, 4*time.Second)
		if c.Loads == nil {
			c.Loads = []float64{0.8, 5}
		}
	}
	if c.Loads == nil {
		c.Loads = []float64{0.8, 1.2, 2, 5}
	}
	c.Each, c.Surge = cmp.Or(c.Each, 20*time.Second), cmp.Or(c.Surge, 5*time.Minute)
	c.PeerSurge, c.After = cmp.Or(c.PeerSurge, time.Minute), cmp.Or(c.After, 15*time.Second)
	if c.Log == nil {
		c.Log = io.Discard
	}
	c.Nginx = benchnginx.Find(c.Nginx)
	return c
}

// Run measures and returns the report. An error means that something could not be
// started or ctx ended; an aim that is missed is no error but stands in the report.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	dir, err := os.MkdirTemp("", "headgate-overload-")
	if err != nil {
		return nil, fmt.Errorf("overload benchmark: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a scratch directory
	up, err := startUpstream(cfg.Slots)
	if err != nil {
		return nil, fmt.Errorf("overload benchmark: %w", err)
	}
	defer up.stop()
	rep := &Report{Started: time.Now().UTC(), Machine: origin.Machine(), Commit: origin.Commit(ctx), Config: cfg}
	if rep.Capacity, err = up.capacity(ctx, cfg.Quick); err != nil {
		return nil, err
	}
	fmt.Fprintf(cfg.Log, "capacity %.1f answers/s with %d slots\n", rep.Capacity, cfg.Slots)
	for _, name := range targetNames() {
		if len(cfg.Only) > 0 && !slices.Contains(cfg.Only, name) {
			continue
		}
		t, err := startTarget(ctx, &cfg, dir, name, up.url)
		if errors.Is(err, errMissing) {
			rep.note("%s: %v", name, err)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("overload benchmark: %s: %w", name, err)
		}
		err = (&trial{cfg: &cfg, up: up, t: t, rep: rep}).run(ctx)
		t.stop()
		if err != nil {
			return nil, fmt.Errorf("overload benchmark: %s: %w", name, err)
		}
		if err := up.idle(ctx); err != nil {
			return nil, fmt.Errorf("overload benchmark: %s left requests at the upstream: %w", name, err)
		}
	}
	rep.judge()
	return rep, nil
}

// capacity is how many answers a second the upstream gives when its slots are just
// kept full.
func (u *upstream) capacity(ctx context.Context, quick bool) (float64, error) {
	each := 8 * time.Second
	if quick {
		each = 3 * time.Second
	}
	d := newDriver(u.url, nil)
	defer d.close()
	from := time.Now()
	err := d.phase(ctx, load.Config{MaxInFlight: u.slots, Duration: each}, 1)
	if err != nil {
		return 0, err
	}
	good := d.goodBetween(from.Add(settle), from.Add(each))
	if good == 0 {
		return 0, errors.New("overload benchmark: the upstream answers nothing")
	}
	u.server.Reset()
	return float64(good) / (each - settle).Seconds(), nil
}

// mark is what a request carries in its body's first bytes so that the upstream's log
// tells whose it is.
func mark(class int, id int64) string { return fmt.Sprintf("c%d n%d ", class, id) }

// marked reads a mark out of the beginning of a body.
func marked(r *fakevllm.Record) (class int, id int64, ok bool) {
	const before = `"content":"`
	for i := 0; i+len(before) < len(r.Body); i++ {
		if string(r.Body[i:i+len(before)]) == before {
			n, err := fmt.Sscanf(string(r.Body[i+len(before):]), "c%d n%d ", &class, &id)
			return class, id, n == 2 && err == nil && class >= 0 && class < classes
		}
	}
	return 0, 0, false
}
