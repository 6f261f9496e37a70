// Command cache measures the cache of answers: what a hit costs through a gateway beside a handler that only writes the
// same bytes, what a key and a look-up cost, which hits the store finds beside other caches of the same bytes, what an
// entry takes of memory, what becomes of a crowd that asks five nodes the same, and what a miss pays for being alone.
//
//	go run ./bench/cache -out bench/results
//
// Gateways, the simulated model and the bare handler are processes of their own: this program, started anew.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"headgate/bench/origin"
)

// config is what is measured, and for how long.
type config struct {
	rounds  int
	each    time.Duration // one measurement of hits; one of keys and look-ups takes an eighth
	reads   int           // of a trace
	keys    int           // in a trace
	entries int           // whose memory is weighed
	nodes   int           // of the cluster
	crowd   int           // requests at once
	misses  int           // of each kind
	only    string        // parts, by comma; empty: all
	kind    string        // of hits, those whose name holds this; empty: all
	profile string        // folder for the node's CPU profiles while it serves hits; empty: none
	dir     string        // where data goes; empty: where temporary files do
	log     io.Writer
}

// Bounds of a configuration.
const (
	maxRounds  = 100
	maxReads   = 100_000_000
	maxEntries = 10_000_000
	maxNodes   = 16
	maxCrowd   = 3000 // requests under way, at the generator and everywhere behind
)

func (c *config) validate() error {
	for _, n := range [...]struct {
		flag           string
		is, least, top int
	}{
		{"rounds", c.rounds, 1, maxRounds},
		{"reads", c.reads, 1000, maxReads},
		{"keys", c.keys, 100, maxEntries},
		{"entries", c.entries, 100, maxEntries},
		{"nodes", c.nodes, 2, maxNodes},
		{"crowd", c.crowd, 1, maxCrowd},
		{"misses", c.misses, 1, 100_000},
	} {
		if n.is < n.least || n.is > n.top {
			return fmt.Errorf("-%s %d: between %d and %d", n.flag, n.is, n.least, n.top)
		}
	}
	if c.each < 8*time.Millisecond || c.each > time.Minute {
		return fmt.Errorf("-each %v: between 8ms and 1m", c.each)
	}
	if !slices.ContainsFunc(hitKinds(), func(k hitKind) bool { return strings.Contains(k.name, c.kind) }) {
		return fmt.Errorf("-kind %q: there is no such kind", c.kind)
	}
	for name := range strings.SplitSeq(c.only, ",") {
		if name != "" && !slices.ContainsFunc(parts(), func(p part) bool { return p.name == name }) {
			return fmt.Errorf("-only %q: there is no such part", name)
		}
	}
	return nil
}

// part is one thing that is measured.
type part struct {
	name string
	run  func(context.Context, *config, *report) (section, error)
}

func parts() []part {
	return []part{{"hits", hits}, {"speed", speed}, {"memory", memory}, {"ratio", ratio}, {"crowd", crowd}, {"misses", misses}}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	isChild, err := child(ctx)
	if !isChild {
		err = command(ctx, os.Args[1:])
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/cache:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	c := config{log: os.Stderr}
	f := flag.NewFlagSet("cache", flag.ContinueOnError)
	out := f.String("out", "", "folder for cache.txt, and for data while it is measured")
	f.IntVar(&c.rounds, "rounds", 5, "rounds, of which the median counts")
	f.DurationVar(&c.each, "each", 2*time.Second, "length of one measurement of hits")
	f.IntVar(&c.reads, "reads", 2_000_000, "reads of a trace")
	f.IntVar(&c.keys, "keys", 200_000, "keys of a trace")
	f.IntVar(&c.entries, "entries", 50_000, "entries whose memory is weighed")
	f.IntVar(&c.nodes, "nodes", 5, "nodes of the cluster")
	f.IntVar(&c.crowd, "crowd", 1000, "requests at once for the same")
	f.IntVar(&c.misses, "misses", 400, "misses of each kind")
	f.StringVar(&c.only, "only", "", "parts to measure, by comma: hits, speed, memory, ratio, crowd, misses (default all)")
	f.StringVar(&c.kind, "kind", "", "of hits, those kinds whose name holds this")
	f.StringVar(&c.profile, "profile", "", "folder for CPU profiles of the node that serves hits; its figures are then worth less")
	if err := f.Parse(args); err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	if *out != "" { // beside the results, so that the disk is a real one
		c.dir = filepath.Join(*out, "tmp")
		if err := os.MkdirAll(c.dir, 0o755); err != nil {
			return err
		}
		defer func() { _ = os.Remove(c.dir) }() // kept if something else is in it
	}
	rep, err := run(ctx, &c)
	if err != nil {
		return err
	}
	if *out != "" {
		if err := os.WriteFile(filepath.Join(*out, "cache.txt"), []byte(rep.String()), 0o644); err != nil {
			return err
		}
	}
	_, err = io.WriteString(os.Stdout, rep.String())
	return err
}

// run takes all measurements.
func run(ctx context.Context, c *config) (rep *report, err error) {
	dir, err := os.MkdirTemp(c.dir, "cache-*")
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	inDir := *c
	inDir.dir = dir
	rep = &report{config: *c, started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx)}
	for _, p := range parts() {
		if c.only != "" && !slices.Contains(strings.Split(c.only, ","), p.name) {
			continue
		}
		fmt.Fprintf(c.log, "%s\n", p.name)
		load := machineLoad()
		s, err := p.run(ctx, &inDir, rep)
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
