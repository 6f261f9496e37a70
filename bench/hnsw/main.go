// Command hnsw measures cache/hnsw beside hnswlib in the same run, one thread each: what it finds, what a search, a
// build and a vector cost; and by itself, what is found after deletes, how searches go with the
// number of cores and beside a writer, and from how many vectors on a graph is faster than a look at all.
//
//	go run ./bench/hnsw -out bench/results [-n 100000] [-questions | -file vectors.f32 -dim 384]
//
// hnswlib is compiled from Debian's libhnswlib-dev by g++; where either is missing the report says so.
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
	"time"

	"headgate/bench/origin"
)

// config is what is measured.
type config struct {
	n, queries, dim int
	m, efc          int
	rounds, builds  int
	file            string
	questions       bool
	only            string
	log             io.Writer
}

func (c *config) validate() error {
	for _, f := range [...]struct {
		flag           string
		is, least, top int
	}{
		{"n", c.n, 1000, 10_000_000},
		{"queries", c.queries, 10, 100_000},
		{"dim", c.dim, 8, 4096},
		{"m", c.m, 2, 64},
		{"efc", c.efc, c.m, 10_000},
		{"rounds", c.rounds, 1, 100},
		{"builds", c.builds, 1, 100},
	} {
		if f.is < f.least || f.is > f.top {
			return fmt.Errorf("-%s %d: between %d and %d", f.flag, f.is, f.least, f.top)
		}
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/hnsw:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	c := config{log: os.Stderr}
	f := flag.NewFlagSet("hnsw", flag.ContinueOnError)
	out := f.String("out", "", "folder for the result")
	name := f.String("name", "hnsw.txt", "file of the result")
	f.IntVar(&c.n, "n", 20_000, "vectors")
	f.IntVar(&c.queries, "queries", 1000, "queries")
	f.IntVar(&c.dim, "dim", 384, "numbers of a vector")
	f.IntVar(&c.m, "m", 16, "links of a new vector")
	f.IntVar(&c.efc, "efc", 200, "candidates for links")
	f.IntVar(&c.rounds, "rounds", 5, "rounds of searches, of which the median counts")
	f.IntVar(&c.builds, "builds", 3, "builds, of which the median counts")
	f.StringVar(&c.file, "file", "", "vectors to measure with: float32, little-endian, -dim in a row (default: drawn in clusters)")
	f.BoolVar(&c.questions, "questions", false, "measure with the questions of banking77 and clinc150, embedded by the built-in model, which takes some minutes")
	f.StringVar(&c.only, "only", "", "parts to measure, by comma: peer, deletes, readers, few (default all)")
	if err := f.Parse(args); err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	rep, err := run(ctx, &c)
	if err != nil {
		return err
	}
	if *out != "" {
		if err := os.MkdirAll(*out, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(*out, *name), []byte(rep.String()), 0o644); err != nil {
			return err
		}
	}
	_, err = io.WriteString(os.Stdout, rep.String())
	return err
}

// run takes all measurements.
func run(ctx context.Context, c *config) (rep *report, err error) {
	dir, err := os.MkdirTemp("", "hnsw-*")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	rep = &report{config: *c, started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx)}
	d, err := load(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := d.prepare(dir); err != nil {
		return nil, err
	}
	rep.data = d.name
	for _, p := range parts() {
		if c.only != "" && !contains(c.only, p.name) {
			continue
		}
		fmt.Fprintln(c.log, p.name)
		if err := p.run(ctx, c, d, dir, rep); err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
	}
	rep.took = time.Since(rep.started)
	return rep, nil
}

func load(ctx context.Context, c *config) (*data, error) {
	if c.questions {
		return embedded(ctx, c.n, c.queries)
	}
	if c.file != "" {
		return readVectors(c.file, c.n, c.queries, c.dim)
	}
	return clustered(c.n, c.queries, c.dim), nil
}
