// Package hnsw measures cache/hnsw beside hnswlib in the same run, one thread each: what it finds, what a search, a
// build and a vector cost; and by itself, what is found after deletes, how searches go with the
// number of cores and beside a writer, and from how many vectors on a graph is faster than a look at all.
//
// hnswlib is compiled from Debian's libhnswlib-dev by g++; where either is missing the report says so.
package hnsw

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"headgate/bench/origin"
)

// Config is what is measured. The zero value of a field means its default.
type Config struct {
	N              int       // vectors. Default: 20,000
	Queries        int       // Default: 1,000
	Dim            int       // numbers of a vector. Default: 384
	M              int       // links of a new vector. Default: 16
	EfConstruction int       // candidates for links. Default: 200
	Rounds         int       // of searches, of which the median counts. Default: 5
	Builds         int       // of which the median counts. Default: 3
	File           string    // of vectors to measure with: float32, little-endian, Dim in a row; "": drawn in clusters
	Questions      bool      // measure with the questions of banking77 and clinc150, embedded by the built-in model
	Quick          bool      // defaults that say whether it works, not how well
	Log            io.Writer // receives progress, if set
}

// defaultVectors is a number at which a run takes two minutes.
const defaultVectors = 20_000

func (c Config) withDefaults() Config {
	d := Config{N: defaultVectors, Queries: 1000, Dim: 384, M: 16, EfConstruction: 200, Rounds: 5, Builds: 3}
	if c.Quick {
		d.N, d.Queries, d.Rounds, d.Builds = 4000, 200, 1, 1
	}
	for _, n := range [...]struct {
		is *int
		d  int
	}{{&c.N, d.N}, {&c.Queries, d.Queries}, {&c.Dim, d.Dim}, {&c.M, d.M}, {&c.EfConstruction, d.EfConstruction}, {&c.Rounds, d.Rounds}, {&c.Builds, d.Builds}} {
		if *n.is == 0 {
			*n.is = n.d
		}
	}
	if c.Log == nil {
		c.Log = io.Discard
	}
	return c
}

// Validate reports what makes no sense.
func (c Config) Validate() error {
	c = c.withDefaults()
	for _, f := range [...]struct {
		what           string
		is, least, top int
	}{
		{"vectors", c.N, 1000, 10_000_000},
		{"queries", c.Queries, 10, 100_000},
		{"numbers of a vector", c.Dim, 8, 4096},
		{"links", c.M, 2, 64},
		{"candidates for links", c.EfConstruction, c.M, 10_000},
		{"rounds", c.Rounds, 1, 100},
		{"builds", c.Builds, 1, 100},
	} {
		if f.is < f.least || f.is > f.top {
			return fmt.Errorf("%s %d: between %d and %d", f.what, f.is, f.least, f.top)
		}
	}
	if c.File != "" && c.Questions {
		return errors.New("vectors of a file and of questions: it is one or the other")
	}
	return nil
}

// Run takes all measurements: two minutes by default, some ten for 100,000 vectors.
func Run(ctx context.Context, c Config) (rep *Report, err error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("hnsw benchmark: %w", err)
	}
	c = c.withDefaults()
	dir, err := os.MkdirTemp("", "hnsw-*")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	rep = &Report{config: c, started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx)}
	d, err := load(ctx, &c)
	if err != nil {
		return nil, err
	}
	if err := d.prepare(dir); err != nil {
		return nil, err
	}
	rep.data = d.name
	for _, p := range parts() {
		fmt.Fprintf(c.Log, "vectors: %s\n", p.name)
		if err := p.run(ctx, &c, d, dir, rep); err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	rep.took = time.Since(rep.started)
	return rep, nil
}

// load is the vectors to measure with.
func load(ctx context.Context, c *Config) (*data, error) {
	if c.Questions {
		return embedded(ctx, c.N, c.Queries)
	}
	if c.File != "" {
		return readVectors(c.File, c.N, c.Queries, c.Dim)
	}
	return clustered(c.N, c.Queries, c.Dim), nil
}

// Name is the file of a result: the plain one is of clusters in the default number, and others do not overwrite it.
func (c Config) Name() string {
	switch c = c.withDefaults(); {
	case c.Questions:
		return "hnsw-questions.txt"
	case c.File != "":
		return "hnsw-file.txt"
	case c.N >= 1000 && c.N%1000 == 0 && c.N != defaultVectors && !c.Quick:
		return fmt.Sprintf("hnsw-%dk.txt", c.N/1000)
	}
	return "hnsw.txt"
}

// Write puts a file by the name that [Config.Name] says into dir, making it if need be.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, r.config.Name()), []byte(r.String()), 0o644) // results are for all to read
}
