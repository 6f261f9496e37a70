// Command semantic replays questions of banking77 and clinc150 to the semantic cache, and shows for thresholds that are
// fixed, learned by entry (vCache) and learned by surface (ours) how many are answered from the cache and how many of the
// answers are wrong, with guards and without. It also measures the embedder: its AUC, and what a question costs.
//
//	go run ./bench/semantic -out bench/results
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"headgate/bench/origin"
	"headgate/cache/embed"
)

// config is what is measured.
type config struct {
	questions int // of a replay
	seeds     int // replays of each set, in other orders and of other questions
	sample    int // questions of a set, for the AUC and for replays to draw from; 0: all
	log       io.Writer
}

// Bounds of a configuration.
const (
	minQuestions, maxQuestions = 100, 10_000
	maxSeeds                   = 50
)

func (c *config) validate() error {
	for _, n := range [...]struct {
		flag           string
		is, least, top int
	}{
		{"questions", c.questions, minQuestions, maxQuestions},
		{"seeds", c.seeds, 1, maxSeeds},
		{"sample", c.sample, 0, 1_000_000},
	} {
		if n.is < n.least || n.is > n.top {
			return fmt.Errorf("-%s %d: between %d and %d", n.flag, n.is, n.least, n.top)
		}
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/semantic:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) (err error) {
	c := config{log: os.Stderr}
	f := flag.NewFlagSet("semantic", flag.ContinueOnError)
	out := f.String("out", "", "folder for semantic.txt, .csv and .svg")
	url := f.String("url", "", "server of embeddings to ask instead of the built-in model, such as http://localhost:8000")
	model := f.String("model", "", "its model")
	f.IntVar(&c.questions, "questions", 3000, "questions of a replay")
	f.IntVar(&c.seeds, "seeds", 10, "replays of each set, in other orders and of other questions")
	f.IntVar(&c.sample, "sample", 0, "questions of each set to go by (default all)")
	if err := f.Parse(args); err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	embedder, closeIt, err := open(*url, *model)
	if err != nil {
		return err
	}
	defer closeIt()
	rep, err := run(ctx, &c, embedder)
	if err != nil {
		return err
	}
	if *out != "" {
		if err := os.MkdirAll(*out, 0o755); err != nil {
			return err
		}
		for name, text := range map[string]string{"semantic.txt": rep.String(), "semantic.csv": rep.csv(), "semantic.svg": rep.svg()} {
			if err := os.WriteFile(filepath.Join(*out, name), []byte(text), 0o644); err != nil {
				return err
			}
		}
	}
	_, err = io.WriteString(os.Stdout, rep.String())
	return err
}

// open is the embedder to measure: the built-in model, or one that a server runs.
func open(url, model string) (embed.Embedder, func(), error) {
	if url == "" {
		m, err := embed.Builtin()
		return m, func() {}, err
	}
	post, err := embed.HTTPPost(nil, url, "")
	if err != nil {
		return nil, nil, err
	}
	e, err := embed.NewEndpoint(embed.EndpointConfig{Model: model, Version: model, Post: post, Timeout: time.Minute})
	if err != nil {
		return nil, nil, err
	}
	return e, e.Close, nil
}

// run takes all measurements.
func run(ctx context.Context, c *config, e embed.Embedder) (*report, error) {
	rep := &report{config: *c, embedder: e.Version(), started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx)}
	for _, s := range sets() {
		fmt.Fprintf(c.log, "%s: embedding\n", s.name)
		m, err := s.measure(ctx, c, e)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		fmt.Fprintf(c.log, "%s: replays\n", s.name)
		if err := m.replays(ctx, c, contenders()); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		rep.sets = append(rep.sets, m)
	}
	rep.took = time.Since(rep.started)
	return rep, nil
}
