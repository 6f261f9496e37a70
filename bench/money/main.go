// Command money measures budgets and the usage log: how many decisions three nodes make, with blocks in hand and
// without, what a record in the journal costs, and how fast usage is read back. All runs in this process, on a real
// disk, without HTTP, and beside peers in the same round: one commit a decision, Redis, a bare write, log/slog.
//
//	go run ./bench/money -out bench/results
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

// config is what is measured, and for how long.
type config struct {
	rounds  int
	each    time.Duration // one measurement
	records int           // of the export
	dir     string        // where data goes; empty: where temporary files do
	log     io.Writer
}

func (c *config) validate() error {
	switch {
	case c.rounds < 1 || c.rounds > 100:
		return fmt.Errorf("-rounds %d: between 1 and 100", c.rounds)
	case c.each < time.Millisecond || c.each > time.Minute:
		return fmt.Errorf("-each %v: between 1ms and 1m", c.each)
	case c.records < 1 || c.records > 100_000_000:
		return fmt.Errorf("-records %d: between 1 and 100,000,000", c.records)
	}
	return nil
}

// settle is how long purses are used before they are measured: some two seconds, which is what their blocks are for.
func (c *config) settle() time.Duration { return 5 * c.each }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/money:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	c := config{log: os.Stderr}
	f := flag.NewFlagSet("money", flag.ContinueOnError)
	out := f.String("out", "", "folder for money.txt, and for data while it is measured")
	f.IntVar(&c.rounds, "rounds", 5, "rounds, of which the median counts")
	f.DurationVar(&c.each, "each", 300*time.Millisecond, "length of one measurement")
	f.IntVar(&c.records, "records", 10_000_000, "records that are exported")
	read := f.String(readFlag, "", "export the usage log in a folder, and say how that went: what this program asks of itself")
	by := f.String("by", "", "with -"+readFlag+": the fields to group by")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *read != "" {
		return readBack(ctx, *read, *by, os.Stdout)
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
	data, err := os.MkdirTemp(c.dir, "money-*")
	if err != nil {
		return err
	}
	rep, err := run(ctx, c, data)
	if err = errors.Join(err, os.RemoveAll(data)); err != nil {
		return err
	}
	if *out != "" {
		if err := os.WriteFile(filepath.Join(*out, "money.txt"), []byte(rep.String()), 0o644); err != nil {
			return err
		}
	}
	_, err = io.WriteString(os.Stdout, rep.String())
	return err
}

// run takes all measurements, with data in a folder. Each round has a cluster of its own; the export comes once.
func run(ctx context.Context, c config, data string) (*report, error) {
	rep := &report{config: c, started: time.Now().UTC(), machine: origin.Machine(), commit: origin.Commit(ctx), rows: map[key]*row{}}
	for round := range c.rounds {
		dir := filepath.Join(data, fmt.Sprint("round-", round))
		for _, part := range [...]struct {
			name string
			run  func(context.Context, config, string, *report) error
		}{{"decisions", decisions}, {"redis", redisDecisions}, {"journal", appends}} {
			fmt.Fprintf(c.log, "round %d of %d: %s\n", round+1, c.rounds, part.name)
			if err := part.run(ctx, c, filepath.Join(dir, part.name), rep); err != nil {
				return nil, fmt.Errorf("%s: %w", part.name, err)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			return nil, err
		}
	}
	fmt.Fprintf(c.log, "export of %d records\n", c.records)
	if err := export(ctx, c, filepath.Join(data, "export"), rep); err != nil {
		return nil, fmt.Errorf("export: %w", err)
	}
	rep.took = time.Since(rep.started)
	return rep, nil
}
