// Package cache measures the cache of answers: what a hit costs through a gateway beside a handler that only writes the
// same bytes, what a key and a look-up cost, which hits the store finds beside other caches of the same bytes, what an
// entry takes of memory, what becomes of a crowd that asks five nodes the same, and what a miss pays for being alone.
//
// Gateways, the simulated model and the bare handler are processes of their own: this program, started anew, which must
// call [Child] before anything else.
package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"headgate/bench/origin"
)

// Config is what is measured, and for how long. The zero value of a field means its default.
type Config struct {
	Rounds  int           // of which the median counts. Default: 5
	Each    time.Duration // one measurement of hits; one of keys and look-ups takes an eighth. Default: 2 s
	Reads   int           // of a trace. Default: 2,000,000
	Keys    int           // in a trace. Default: 200,000
	Entries int           // whose memory is weighed. Default: 50,000
	Nodes   int           // of the cluster. Default: 5
	Crowd   int           // requests at once for the same. Default: 1,000
	Misses  int           // of each kind. Default: 400
	Only    []string      // of [Parts]; empty: all
	Kind    string        // of hits, those whose name holds this; empty: all
	Profile string        // folder for the node's CPU profiles while it serves hits; empty: none
	Dir     string        // where data goes; empty: where temporary files do
	Quick   bool          // defaults that say whether it works, not how well
	Log     io.Writer     // receives progress, if set
}

// Bounds of a configuration.
const (
	maxRounds  = 100
	maxReads   = 100_000_000
	maxEntries = 10_000_000
	maxNodes   = 16
	maxCrowd   = 3000 // requests under way, at the generator and everywhere behind
)

func (c Config) withDefaults() Config {
	d := Config{Rounds: 5, Each: 2 * time.Second, Reads: 2_000_000, Keys: 200_000, Entries: 50_000, Nodes: 5, Crowd: 1000, Misses: 400}
	if c.Quick {
		d = Config{Rounds: 1, Each: 200 * time.Millisecond, Reads: 100_000, Keys: 10_000, Entries: 5000, Nodes: 3, Crowd: 100, Misses: 20}
	}
	for _, n := range [...]struct {
		is *int
		d  int
	}{{&c.Rounds, d.Rounds}, {&c.Reads, d.Reads}, {&c.Keys, d.Keys}, {&c.Entries, d.Entries}, {&c.Nodes, d.Nodes}, {&c.Crowd, d.Crowd}, {&c.Misses, d.Misses}} {
		if *n.is == 0 {
			*n.is = n.d
		}
	}
	if c.Each == 0 {
		c.Each = d.Each
	}
	if c.Log == nil {
		c.Log = io.Discard
	}
	return c
}

// Validate reports what makes no sense.
func (c Config) Validate() error {
	c = c.withDefaults()
	for _, n := range [...]struct {
		what           string
		is, least, top int
	}{
		{"rounds", c.Rounds, 1, maxRounds},
		{"reads", c.Reads, 1000, maxReads},
		{"keys", c.Keys, 100, maxEntries},
		{"entries", c.Entries, 100, maxEntries},
		{"nodes", c.Nodes, 2, maxNodes},
		{"crowd", c.Crowd, 1, maxCrowd},
		{"misses", c.Misses, 1, 100_000},
	} {
		if n.is < n.least || n.is > n.top {
			return fmt.Errorf("%s %d: between %d and %d", n.what, n.is, n.least, n.top)
		}
	}
	if c.Each < 8*time.Millisecond || c.Each > time.Minute {
		return fmt.Errorf("each %v: between 8ms and 1m", c.Each)
	}
	if !slices.ContainsFunc(hitKinds(), func(k hitKind) bool { return strings.Contains(k.name, c.Kind) }) {
		return fmt.Errorf("kind %q: there is no such kind of hits", c.Kind)
	}
	for _, name := range c.Only {
		if !slices.Contains(Parts(), name) {
			return fmt.Errorf("part %q: there are %s", name, strings.Join(Parts(), ", "))
		}
	}
	return nil
}

// part is one thing that is measured.
type part struct {
	name string
	run  func(context.Context, *Config, *Report) (section, error)
}

func parts() []part {
	return []part{{"hits", hits}, {"speed", speed}, {"memory", memory}, {"ratio", ratio}, {"crowd", crowd}, {"misses", misses}}
}

// Parts are the names of what can be measured, in the order in which it is.
func Parts() (names []string) {
	for _, p := range parts() {
		names = append(names, p.name)
	}
	return names
}

// Run takes all measurements, which by default is some five minutes. It fails where one could not be taken, or was not
// of what it says: a hit that asked the model. An aim that is missed is no failure; it stands in the report.
func Run(ctx context.Context, c Config) (rep *Report, err error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("cache benchmark: %w", err)
	}
	c = c.withDefaults()
	if c.Dir != "" {
		if err := os.MkdirAll(c.Dir, 0o755); err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp(c.Dir, "cache-*")
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	rep = &Report{config: c, started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx)}
	c.Dir = dir
	for _, p := range parts() {
		if len(c.Only) > 0 && !slices.Contains(c.Only, p.name) {
			continue
		}
		fmt.Fprintf(c.Log, "%s\n", p.name)
		load := machineLoad()
		s, err := p.run(ctx, &c, rep)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		rep.sections = append(rep.sections, measured{s, load, machineLoad()})
	}
	rep.took = time.Since(rep.started)
	return rep, nil
}

// Write puts cache.txt into dir, making it if need be.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "cache.txt"), []byte(r.String()), 0o644) // results are for all to read
}
