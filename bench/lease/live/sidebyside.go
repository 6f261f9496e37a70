package live

import (
	"context"
	"fmt"
	"slices"
	"strings"

	benchlease "headgate/bench/lease"
)

// Config says what SideBySide runs.
type Config struct {
	// Cells to run; they pass in real time, one after the other, once for each policy. Empty: Cells().
	Cells []benchlease.Cell
	// Policies are some of Policies(). Empty: Headgate alone.
	Policies []string
	// Tell hears of each run that begins, if it is set.
	Tell func(engine, policy string, c *benchlease.Cell)
}

// Cells are a few that say whether the engines agree: a quiet limit and a busy one, with room and without.
func Cells() (cs []benchlease.Cell) {
	for _, c := range benchlease.Grid() {
		if c.Nodes == 4 && !c.Zipf && (c.Load == .9 || c.Load == 2) && (c.Name == "100 requests/s" || c.Name == "1M tokens/min") &&
			int64(float64(c.Limit.Rate.Count)/c.Limit.Rate.Per.Seconds()) == c.Limit.Burst {
			c.For = cellFor
			cs = append(cs, c)
		}
	}
	return cs
}

// SideBySide has the engines make the same cells with the same seeds, and gives what the judge says of each: of every cell and policy the
// simulator's Result, then the one in process. Where the two differ by more than AgreeWithin, one of them is wrong; see Disagree.
func SideBySide(ctx context.Context, cfg Config) ([]benchlease.Result, error) {
	cells, policies := cfg.Cells, cfg.Policies
	if len(cells) == 0 {
		cells = Cells()
	}
	if len(policies) == 0 {
		policies = []string{benchlease.Headgate}
	}
	for _, p := range policies {
		if !slices.Contains(Policies(), p) {
			return nil, fmt.Errorf("policy %q runs in the simulator only: use some of %s", p, strings.Join(Policies(), "; "))
		}
	}
	simulated, err := benchlease.Run(ctx, benchlease.Config{Cells: cells, Policies: policies})
	if err != nil {
		return nil, err
	}
	var out []benchlease.Result
	for i := range simulated.Results {
		r := &simulated.Results[i]
		if !slices.Contains(policies, r.Contender) {
			continue // Run has Headgate in all that it runs
		}
		if cfg.Tell != nil {
			cfg.Tell(benchlease.InProcess, r.Contender, &r.Cell)
		}
		e, err := InProcess(ctx, r.Cell, r.Contender)
		if err != nil {
			return nil, err
		}
		real := benchlease.Judge(r.Cell, &e)
		real.Engine, real.Contender = benchlease.InProcess, r.Contender
		out = append(out, *r, real)
	}
	return out, nil
}

// Bounds are how far apart two engines may be, in the units of the Result's fields.
type Bounds struct {
	Over         float64 // both are at most that
	Admitted     float64
	FalseRefused float64
	Trips        float64
}

// AgreeWithin are the bounds of Headgate. Of what the engines cannot have in common: in process, messages take the machine's time beside the
// network's, arrivals are as late as the machine is busy, and requests that wait for the same owner go in one message.
func AgreeWithin() Bounds { return Bounds{Over: .05, Admitted: .08, FalseRefused: .1, Trips: .1} }

// Disagree says in which figures two engines' Results of the same cell and policy differ by more than the bounds; nil: in none.
func Disagree(a, b *benchlease.Result, by Bounds) (in []string) {
	differ := func(what string, x, y, most float64) {
		if d := x - y; d > most || d < -most {
			in = append(in, fmt.Sprintf("%s: %.4f %s, %.4f %s, more than %g apart", what, x, a.Engine, y, b.Engine, most))
		}
	}
	if a.Requests != b.Requests || a.IdealRefused != b.IdealRefused {
		in = append(in, "they did not get the same requests")
	}
	differ("over", a.Over, 0, by.Over)
	differ("over", b.Over, 0, by.Over)
	differ("admitted", a.Admitted, b.Admitted, by.Admitted)
	differ("falsely refused", a.FalseRefused, b.FalseRefused, by.FalseRefused)
	differ("round trips a request", a.Trips, b.Trips, by.Trips)
	return in
}
