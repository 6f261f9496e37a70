package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	benchlease "headgate/bench/lease"
	"headgate/bench/lease/live"
	benchtrace "headgate/bench/trace"
)

// leaseFlags are those of bench lease.
type leaseFlags struct {
	cfg              benchlease.Config
	out, compare     string
	large, real      bool
	faults           []string
	trace, tenantsBy string
	first            time.Duration
	replay           benchtrace.Config
}

// leaseCommand measures how exactly leases keep a limit, in virtual time.
func leaseCommand() *cobra.Command {
	var f leaseFlags
	c := &cobra.Command{
		Use: "lease", Short: "Measure how exactly leases keep a limit that many nodes share, and for how many messages", Args: exactly(0),
		Long: "Feed the same requests to Headgate's leases and to the ways in which gateways keep a limit today, in virtual time, and hold\n" +
			"each against one bucket that sees all requests at once. The report is a page that needs no network, lease.html, beside\n" +
			"lease.csv, lease.txt, lease.svg and lease.json. The same seed gives the same figures, to the digit.\n\n" +
			"Instead of drawn requests, --trace replays recorded ones: a file in our format (headgate bench convert), or the samples\n" +
			"azure and mooncake that are built in. A request costs its tokens, in and out, when it arrives.",
		Example: "  headgate bench lease --quick\n" +
			"  headgate bench lease --out results\n" +
			"  headgate bench lease --quick --nodes 4 --load 2 --limit '1M tokens/min' --seeds 5\n" +
			"  headgate bench lease --trace azure --tenants-by zipf:20 --speed 10 --out azure\n" +
			"  headgate bench lease --quick --compare results/lease.json",
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	s := c.Flags()
	s.StringVar(&f.out, "out", "", "folder for the report (default: headgate-bench-lease in the folder for temporary files)")
	s.BoolVar(&f.cfg.Quick, "quick", false, "a 13th of the cells: whether it works, not how well; under a minute")
	s.StringVar(&f.compare, "compare", "", "lease.json of an earlier run, to say what has changed since")
	s.StringSliceVar(&f.cfg.Policies, "policy", nil, "ways to run beside headgate, such as 'rate/N' (default all)")
	s.StringSliceVar(&f.cfg.Limits, "limit", nil, "only limits with this in their name, such as 'tokens/min' (default all)")
	s.IntSliceVar(&f.cfg.Nodes, "nodes", nil, "only so many nodes: 4, 16, 64 (default all); of a trace any (default 4)")
	s.Float64SliceVar(&f.cfg.Loads, "load", nil, "only these loads, in times the limit: 0.5, 0.9, 1.1, 2, 10 (default all)")
	s.StringSliceVar(&f.faults, "fault", nil, "only these: none, 'owner crash', 'holder crash', partition, join, 'rolling restart' (default all; of a trace none)")
	s.DurationVar(&f.cfg.RTT, "rtt", 0, "of a message and its answer (default 2ms)")
	s.Uint64Var(&f.cfg.Seed, "seed", 1, "draws the demand")
	s.IntVar(&f.cfg.Seeds, "seeds", 1, "how many seeds, from --seed on")
	s.BoolVar(&f.large, "large", false, "a thousand nodes, a million tenants and 24 million requests instead; some minutes")
	s.BoolVar(&f.real, "real", false, "a few cells instead, with real nodes in one process beside the simulated ones; a minute and a half")
	s.StringVar(&f.trace, "trace", "", "replay this: a file, azure or mooncake")
	s.StringVar(&f.tenantsBy, "tenants-by", "", "whose requests of a trace are whose: file, even:K or zipf:K[:SKEW] (default: as it says, else zipf:20)")
	s.DurationVar(&f.first, "first", 0, "only so much of a trace (default all)")
	s.Float64Var(&f.replay.Speed, "speed", 1, "how many times as fast as it was recorded a trace is replayed")
	s.Float64SliceVar(&f.replay.Headroom, "headroom", nil, "limits of a trace's tenants, in times what they take on average (default 0.5,1,2)")
	s.DurationVar(&f.replay.Burst, "burst", 0, "how much of a trace's rate fits into the burst (default a minute, or a 20th of it)")
	return c
}

func (f *leaseFlags) run(c *cobra.Command) error {
	f.cfg.Command = "headgate " + strings.Join(os.Args[1:], " ")
	f.cfg.Progress = &benchlease.Progress{W: c.ErrOrStderr(), Terminal: isTerminal(c.ErrOrStderr())}
	for _, name := range f.faults {
		if name == "none" {
			name = string(benchlease.NoFault)
		}
		f.cfg.Faults = append(f.cfg.Faults, benchlease.Fault(name))
	}
	var notes []string
	switch {
	case f.large && (f.real || f.trace != "") || f.real && f.trace != "":
		return usageError{fmt.Errorf("--large, --real and --trace: it is one of them")}
	case f.real:
		f.cfg.Cells, f.cfg.Policies = live.Cells(), live.Policies()
		for i := range f.cfg.Cells {
			f.cfg.Cells[i].Name += " for " + f.cfg.Cells[i].For.String()
		}
	case f.large:
		f.cfg.Cells, f.cfg.Policies = []benchlease.Cell{benchlease.Large()}, []string{benchlease.Headgate}
		notes = []string{"each tenant's requests come to eight of the nodes; buckets are simulated one by one, and messages that several would share are counted as if none did"}
	case f.trace != "":
		var err error
		if notes, err = f.cells(); err != nil {
			return usageError{err}
		}
	}
	if err := f.cfg.Validate(); err != nil {
		return usageError{err}
	}
	var earlier *benchlease.Report
	if f.compare != "" {
		var err error
		if earlier, err = benchlease.ReadJSON(f.compare); err != nil {
			return usageError{fmt.Errorf("--compare: %w", err)}
		}
	}
	report, err := benchlease.Run(c.Context(), f.cfg)
	if err != nil {
		return err
	}
	report.Notes = notes
	if f.real {
		if err := f.runReal(c, report); err != nil {
			return err
		}
	}
	if f.out == "" {
		f.out = filepath.Join(os.TempDir(), "headgate-bench-lease")
	}
	if err := report.Write(f.out); err != nil {
		return err
	}
	if err := report.WriteText(c.OutOrStdout()); err != nil {
		return err
	}
	if earlier != nil {
		fmt.Fprintf(c.OutOrStdout(), "\nagainst %s of commit %s:\n", f.compare, earlier.Commit)
		if err := benchlease.WriteDifferences(c.OutOrStdout(), benchlease.Compare(earlier, report)); err != nil {
			return err
		}
	}
	fmt.Fprintf(c.OutOrStdout(), "\nthe report: %s\n", filepath.Join(f.out, "lease.html"))
	return nil
}

// cells makes those of a trace, and says what it is.
func (f *leaseFlags) cells() (notes []string, err error) {
	t, err := benchtrace.Load(f.trace, "", benchtrace.Options{First: f.first})
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	if f.tenantsBy != "" {
		if f.replay.Split, err = benchtrace.ParseSplit(f.tenantsBy, f.cfg.Seed); err != nil {
			return nil, fmt.Errorf("--tenants-by: %w", err)
		}
	}
	f.replay.Nodes, f.replay.RTT, f.replay.Seed, f.replay.Faults = f.cfg.Nodes, f.cfg.RTT, f.cfg.Seed, f.cfg.Faults
	if f.cfg.Cells, err = t.Cells(f.replay); err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	f.cfg.Nodes, f.cfg.Seeds = nil, 1
	notes = append(notes, t.String())
	if f.replay.Speed != 1 {
		notes = append(notes, fmt.Sprintf("replayed %g times as fast as it was recorded", f.replay.Speed))
	}
	notes = append(notes, "a request costs its input and output when it arrives, as if the answer's length were known: a gateway reserves an estimate, and settles when the answer ends")
	if t.Source != "" {
		notes = append(notes, "source: "+t.Source)
	}
	return notes, nil
}

// isTerminal says whether somebody looks on.
func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// runReal adds what real nodes make of the cells that were simulated.
func (f *leaseFlags) runReal(c *cobra.Command, report *benchlease.Report) error {
	var cells []benchlease.Cell
	for i := range report.Results {
		if r := &report.Results[i]; r.Contender == benchlease.Headgate {
			cells = append(cells, r.Cell)
		}
	}
	results, err := live.SideBySide(c.Context(), live.Config{Cells: cells, Policies: []string{benchlease.Headgate, "each request asks"}, Tell: func(engine, policy string, cell *benchlease.Cell) {
		fmt.Fprintf(c.ErrOrStderr(), "%s: %s, %s\n", engine, policy, cell)
	}})
	if err != nil {
		return err
	}
	for i := 1; i < len(results); i += 2 { // the simulator's before each are in the report already
		report.Results = append(report.Results, results[i])
	}
	return nil
}
