// Command affinity replays a trace of real conversations to simulated servers with prefix caches, and shows how much of the
// prompts is found cached, what that costs in balance, and how long first tokens take: by round robin, by load alone, by hashes
// of leading blocks with loads bounded and not, and by the gateway's own router (proxy/affinity), beside one big cache.
//
//	go run ./bench/affinity -trace mooncake_conversation.jsonl -out bench/results
//
// The trace is Mooncake's (FAST '25): a JSON object a line, with timestamp in ms, input_length, output_length and hash_ids of
// 512 tokens each, of which equal ones are equal prefixes.
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
	gateways, seeds int
	replicas        []int
	blocks          []int     // of a server's cache
	busy            []float64 // how busy servers would be with prompts if nothing were cached
}

// Bounds of a configuration.
const (
	maxGateways = 64
	maxSeeds    = 50
)

func (c *config) validate() error {
	if c.gateways < 1 || c.gateways > maxGateways {
		return fmt.Errorf("-gateways %d: between 1 and %d", c.gateways, maxGateways)
	}
	if c.seeds < 1 || c.seeds > maxSeeds {
		return fmt.Errorf("-seeds %d: between 1 and %d", c.seeds, maxSeeds)
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/affinity:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, to io.Writer) error {
	c := config{replicas: []int{2, 4, 8}, blocks: []int{500, 2000, 8000}, busy: []float64{0.8, 1.1}}
	f := flag.NewFlagSet("affinity", flag.ContinueOnError)
	path := f.String("trace", "", "the trace to replay")
	out := f.String("out", "", "folder for affinity.txt, .csv and .svg")
	f.IntVar(&c.gateways, "gateways", 3, "gateways, each of which gets its requests by chance")
	f.IntVar(&c.seeds, "seeds", 5, "runs of each setting, of which the mean counts; the seed draws the gateways")
	if err := f.Parse(args); err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	if *path == "" {
		return errors.New("-trace: name the file of a trace, such as Mooncake's mooncake_conversation.jsonl")
	}
	t, err := readTrace(*path)
	if err != nil {
		return err
	}
	rep := &report{config: c, trace: t, started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx)}
	if err := rep.measure(ctx); err != nil {
		return err
	}
	rep.took = time.Since(rep.started)
	if *out != "" {
		if err := os.MkdirAll(*out, 0o755); err != nil {
			return err
		}
		for name, text := range map[string]string{"affinity.txt": rep.String(), "affinity.csv": rep.csv(), "affinity.svg": rep.svg()} {
			if err := os.WriteFile(filepath.Join(*out, name), []byte(text), 0o644); err != nil {
				return err
			}
		}
	}
	_, err = io.WriteString(to, rep.String())
	return err
}
