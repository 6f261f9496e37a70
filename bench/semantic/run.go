// Package semantic replays questions of banking77 and clinc150 to the semantic cache, and shows for thresholds that are
// fixed, learned by entry (vCache) and learned by surface (ours) how many are answered from the cache and how many of the
// answers are wrong, with guards and without. It also measures the embedder: its AUC, and what a question costs.
package semantic

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"headgate/bench/origin"
	"headgate/cache/embed"
)

// Config is what is measured. The zero value of a field means its default.
type Config struct {
	Questions int       // of a replay. Default: 3,000
	Seeds     int       // replays of each set, in other orders and of other questions. Default: 10
	Sample    int       // questions of a set, for the AUC and for replays to draw from; 0: all
	URL       string    // server of embeddings to ask instead of the built-in model
	Model     string    // its model
	Quick     bool      // defaults that say whether it works, not how well
	Log       io.Writer // receives progress, if set
}

// Bounds of a configuration.
const (
	minQuestions, maxQuestions = 100, 10_000
	maxSeeds                   = 50
)

func (c Config) withDefaults() Config {
	questions, seeds, sample := 3000, 10, 0
	if c.Quick {
		questions, seeds, sample = 900, 2, 900
	}
	if c.Questions == 0 {
		c.Questions = questions
	}
	if c.Seeds == 0 {
		c.Seeds = seeds
	}
	if c.Sample == 0 {
		c.Sample = sample
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
		{"questions", c.Questions, minQuestions, maxQuestions},
		{"seeds", c.Seeds, 1, maxSeeds},
		{"sample", c.Sample, 0, 1_000_000},
	} {
		if n.is < n.least || n.is > n.top {
			return fmt.Errorf("%s %d: between %d and %d", n.what, n.is, n.least, n.top)
		}
	}
	return nil
}

// open is the embedder to measure: the built-in model, or one that a server runs.
func (c *Config) open() (embed.Embedder, func(), error) {
	if c.URL == "" {
		m, err := embed.Builtin()
		return m, func() {}, err
	}
	post, err := embed.HTTPPost(nil, c.URL, "")
	if err != nil {
		return nil, nil, err
	}
	e, err := embed.NewEndpoint(embed.EndpointConfig{Model: c.Model, Version: c.Model, Post: post, Timeout: time.Minute})
	if err != nil {
		return nil, nil, err
	}
	return e, e.Close, nil
}

// Run takes all measurements, which by default is a minute or two.
func Run(ctx context.Context, c Config) (*Report, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("semantic benchmark: %w", err)
	}
	c = c.withDefaults()
	e, closeIt, err := c.open()
	if err != nil {
		return nil, fmt.Errorf("semantic benchmark: %w", err)
	}
	defer closeIt()
	rep := &Report{config: c, embedder: e.Version(), started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx)}
	for _, s := range sets() {
		fmt.Fprintf(c.Log, "%s: embedding\n", s.name)
		m, err := s.measure(ctx, &c, e)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		fmt.Fprintf(c.Log, "%s: replays\n", s.name)
		if err := m.replays(ctx, &c, contenders()); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		rep.sets = append(rep.sets, m)
	}
	rep.took = time.Since(rep.started)
	return rep, nil
}

// Write puts semantic.txt, .csv and .svg into dir, making it if need be.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, text := range map[string]string{"semantic.txt": r.String(), "semantic.csv": r.csv(), "semantic.svg": r.svg()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil { // results are for all to read
			return err
		}
	}
	return nil
}
