package live_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	benchlease "headgate/bench/lease"
	"headgate/bench/lease/live"
	"headgate/limiter"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func small(load float64) benchlease.Cell {
	return benchlease.Cell{
		Name: "100 requests/s", Mean: 1, Nodes: 3, Load: load, Seed: 1, RTT: 10 * time.Millisecond, For: 4 * time.Second,
		Limit: limiter.Limit{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100},
	}
}

// TestEnginesAgree: the nodes that are simulated do what real ones do.
func TestEnginesAgree(t *testing.T) {
	within := map[string]live.Bounds{
		benchlease.Headgate: live.AgreeWithin(),
		// Asks of one node for one owner go one message after the other, and what is refused is refused for others, too: fewer messages.
		"each request asks": {Over: .01, Admitted: .03, FalseRefused: .25, Trips: .6},
		// The simulator's holders of blocks keep what they have for longer, and get what is left of a bucket.
		"blocks of 5 requests": {Over: .01, Admitted: .08, FalseRefused: .15, Trips: .4},
	}
	for policy, by := range within {
		for _, load := range []float64{.9, 2} {
			t.Run(policy, func(t *testing.T) {
				t.Parallel()
				results, err := live.SideBySide(t.Context(), live.Config{Cells: []benchlease.Cell{small(load)}, Policies: []string{policy}})
				if err != nil {
					t.Fatal(err)
				}
				if len(results) != 2 || results[0].Engine != benchlease.Simulated || results[1].Engine != benchlease.InProcess || results[1].Contender != policy {
					t.Fatalf("of %d results the first is %s and the last of %s", len(results), results[0].Engine, results[len(results)-1].Contender)
				}
				for _, d := range live.Disagree(&results[0], &results[1], by) {
					t.Errorf("load %g: %s", load, d)
				}
				real := &results[1]
				if real.Bytes <= 0 || real.Trips <= 0 || real.Mean <= 0 || real.Lost != 0 {
					t.Errorf("load %g: a run without messages, bytes or time: %+v", load, real)
				}
			})
		}
	}
}

// TestDisagreementIsFound: figures that are further apart than they may be are named.
func TestDisagreementIsFound(t *testing.T) {
	a := benchlease.Result{Engine: benchlease.Simulated, Requests: 100, Admitted: 1, Trips: .1}
	same := a
	if in := live.Disagree(&a, &same, live.AgreeWithin()); in != nil {
		t.Errorf("the same differs: %q", in)
	}
	for what, change := range map[string]func(*benchlease.Result){
		"same requests":   func(r *benchlease.Result) { r.Requests++ },
		"over":            func(r *benchlease.Result) { r.Over = .06 },
		"admitted":        func(r *benchlease.Result) { r.Admitted = .9 },
		"falsely refused": func(r *benchlease.Result) { r.FalseRefused = .2 },
		"round trips":     func(r *benchlease.Result) { r.Trips = .3 },
	} {
		b := a
		change(&b)
		for _, in := range [][]string{live.Disagree(&a, &b, live.AgreeWithin()), live.Disagree(&b, &a, live.AgreeWithin())} {
			if len(in) != 1 || !strings.Contains(in[0], what) {
				t.Errorf("%s: %q", what, in)
			}
		}
	}
}

// TestWayIsReal: who asks for each request waits for the way there and back, at least.
func TestWayIsReal(t *testing.T) {
	t.Parallel()
	c := small(.5)
	c.For, c.RTT, c.Tenants = time.Second, 60*time.Millisecond, 3
	e, err := live.InProcess(t.Context(), c, "each request asks")
	if err != nil {
		t.Fatal(err)
	}
	tenants := map[int32]bool{}
	asked := 0
	for i, f := range e.Fates {
		// What is admitted is admitted by the owner, or, where the machine is so busy that it does not answer in time, by the node.
		if !f.Decided || f.Local && f.Admitted {
			t.Fatalf("request %d: %+v", i, f)
		}
		if f.Admitted && f.Took >= int64(c.RTT) {
			asked++
		}
		tenants[e.Demand[i].Tenant] = true
	}
	if len(tenants) != 3 || asked < 100 {
		t.Errorf("%d of %d requests of %d tenants waited for the way there and back", asked, len(e.Fates), len(tenants))
	}
}

func TestCellsThatCannotBeRealAreRefused(t *testing.T) {
	for what, change := range map[string]func(*benchlease.Cell){
		"give it a For":  func(c *benchlease.Cell) { c.For = 0 },
		"nodes":          func(c *benchlease.Cell) { c.Nodes = 65 },
		"tenants":        func(c *benchlease.Cell) { c.Tenants = 100_000 },
		"simulator only": func(c *benchlease.Cell) { c.Fault = benchlease.OwnerCrash },
		"requests":       func(c *benchlease.Cell) { c.Limit.Rate.Count = math.MaxInt32 / 1000 },
	} {
		c := small(.9)
		change(&c)
		if _, err := live.InProcess(t.Context(), c, benchlease.Headgate); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := live.InProcess(t.Context(), small(.9), "rate/N"); err == nil || !strings.Contains(err.Error(), "simulator only") {
		t.Errorf("rate/N: %v", err)
	}
	if _, err := live.SideBySide(t.Context(), live.Config{Policies: []string{"rate/N"}}); err == nil || !strings.Contains(err.Error(), "simulator only") {
		t.Errorf("rate/N side by side: %v", err)
	}
	if names := live.Policies(); len(names) != 6 || !slices.Contains(names, benchlease.Headgate) {
		t.Errorf("in process there are %q", names)
	}
}

// TestCanceledRunEnds: nothing of it is left, which TestMain sees.
func TestCanceledRunEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	c := small(.9)
	c.For = time.Minute
	if _, err := live.InProcess(ctx, c, benchlease.Headgate); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a run of a minute that is cut short: %v", err)
	}
}

func TestCellsAreFew(t *testing.T) {
	cells := live.Cells()
	if len(cells) != 4 {
		t.Errorf("%d cells", len(cells))
	}
	for _, c := range cells {
		if c.For <= 0 || c.For > 10*time.Second || c.Nodes != 4 {
			t.Errorf("%s lasts %v", &c, c.For)
		}
	}
}
