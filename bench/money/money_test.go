package main

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-"+readFlag { // export runs this very program
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// TestRun takes every measurement, shortly. That the ledger has all that was spent, and that all is read back that was
// recorded, the run sees to itself.
func TestRun(t *testing.T) {
	c := config{rounds: 1, each: 20 * time.Millisecond, records: 2000, log: io.Discard}
	rep, err := run(t.Context(), c, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for k, r := range rep.rows {
		if len(r.samples) != c.rounds || r.samples[0].ops == 0 {
			t.Errorf("%+v: %d samples", k, len(r.samples))
		}
	}
	whole := rep.String()
	for _, word := range [...]string{leased, direct, commits, journaled, synced, slogged, bare, "CSV of requests", "CSV tenant,model,day", "aim ≥ 20000"} {
		if !strings.Contains(whole, word) {
			t.Errorf("the report does not speak of %q", word)
		}
	}
	if k := (key{direct, 1, 1, 0}); rep.rows[k].samples[0].draws < rep.rows[k].samples[0].ops {
		t.Errorf("%s: %d draws for %d decisions", direct, rep.rows[k].samples[0].draws, rep.rows[k].samples[0].ops)
	}
	if whole, grouped := rep.exports[0].Lines, rep.exports[1].Lines; whole != int64(c.records) || grouped < exportTenants*exportDays || grouped > exportTenants*exportModels*exportDays {
		t.Errorf("%d requests and %d groups", whole, grouped)
	}
}

func TestMedianAndRatio(t *testing.T) {
	at := func(ops ...int64) *row {
		r := &row{}
		for _, n := range ops {
			r.samples = append(r.samples, sample{ops: n, took: time.Second})
		}
		return r
	}
	if v := at(3, 1, 2).of(rate); v != 2 {
		t.Errorf("the median of 1, 2, 3 is %g", v)
	}
	// By round 2, 1 and 8: not the ratio of the medians.
	if v := at(2, 4, 8).against(at(1, 4, 1), rate); v != 2 {
		t.Errorf("the median of the ratios is %g", v)
	}
	if v := at(1).against(nil, rate); v != 0 {
		t.Errorf("without a peer there is a ratio of %g", v)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for _, args := range [][]string{{"-rounds", "0"}, {"-each", "1h"}, {"-records", "0"}} {
		if err := command(t.Context(), args); err == nil {
			t.Errorf("%v is taken", args)
		}
	}
}
