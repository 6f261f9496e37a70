package leasetest

import (
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"headgate/lease"
)

const simSeeds = 1000 // in an ordinary run; HEADGATE_SIM_SEEDS says otherwise

// runAll runs seeds on all processors until one fails; it returns that one and what all met.
func runAll(cfg Config, first, count uint64) (failed *Result, stats Stats) {
	var next atomic.Uint64
	var mu sync.Mutex
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for {
				n := next.Add(1) - 1
				mu.Lock()
				stop := n >= count || failed != nil
				mu.Unlock()
				if stop {
					return
				}
				c := cfg
				c.Seed = first + n
				r := Run(c)
				mu.Lock()
				stats.Add(r.Stats)
				if r.Violation != "" && (failed == nil || r.Seed < failed.Seed) {
					failed = &r
				}
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	return failed, stats
}

func simEnv(t *testing.T, name string, otherwise uint64) (n uint64, set bool) {
	text := os.Getenv(name)
	if text == "" {
		return otherwise, false
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n, true
}

func underRace() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// TestSimulation: in no seed does any oracle object. HEADGATE_SIM_SEED=n replays one and prints its trace;
// HEADGATE_SIM_SEEDS=n runs so many, from HEADGATE_SIM_FIRST on.
func TestSimulation(t *testing.T) {
	if seed, only := simEnv(t, "HEADGATE_SIM_SEED", 0); only {
		r := Run(Config{Seed: seed, Trace: true})
		for _, line := range r.Trace {
			t.Log(line)
		}
		if r.Violation != "" {
			t.Fatal(Report(Config{}, r))
		}
		return
	}
	count, set := simEnv(t, "HEADGATE_SIM_SEEDS", simSeeds)
	first, _ := simEnv(t, "HEADGATE_SIM_FIRST", 1)
	if !set && underRace() {
		count /= 20 // nothing meets here
	}
	failed, stats := runAll(Config{}, first, count)
	if failed != nil {
		t.Fatal(Report(Config{}, *failed))
	}
	t.Logf("%d seeds: %+v", count, stats)
	n := int(count)
	for what, got := range map[string]int{
		"local takes": stats.Local / 10, "direct decisions": stats.Direct / 20, "refusals": stats.Refused + stats.RefusedLocally,
		"views": stats.Views / 2, "hand-offs": stats.HandOffs, "crashes": 2 * stats.Crashes, "leaves": 2 * stats.Leaves,
		"pauses": stats.Pauses, "lost messages": stats.Lost, "repeated messages": stats.Repeated,
	} {
		if n >= 50 && got < n {
			t.Errorf("so few %s in %d seeds (%d) prove nothing", what, n, got)
		}
	}
}

// TestSimulationMisses removes one rule after the other: in so many seeds each must be missed. V3's floor is not among
// them: the schedules have it, and what chance would have to do is too much.
func TestSimulationMisses(t *testing.T) {
	if underRace() {
		t.Skip("nothing meets here, and -race makes it slow")
	}
	const within = 400
	for _, tc := range []struct {
		name   string
		broken lease.Rule
	}{
		{"R1 outstanding", lease.BreakOutstanding},
		{"R2 advance", lease.BreakAdvance},
		{"R3 the larger", lease.BreakLarger},
		{"R4 view lease", lease.BreakViewBound},
		{"R5 numbers", lease.BreakNumbers},
		{"R6 totals", lease.BreakTotals},
		{"R7 second reading", lease.BreakSecondReading},
		{"R8 depth", lease.BreakRefundDepth},
		{"R8 series", lease.BreakRefundSeries},
		{"R9 changed limits", lease.BreakConvert},
		{"V3 nothing", lease.BreakNothing},
		{"V4 wait", lease.BreakWait},
		{"V4 empty", lease.BreakEmpty},
	} {
		t.Run(tc.name, func(t *testing.T) {
			failed, stats := runAll(Config{Break: tc.broken, safety: true}, 1, within)
			if failed == nil {
				t.Fatalf("no violation in %d seeds: %+v", within, stats)
			}
			t.Logf("seed %d: %s", failed.Seed, failed.Violation)
		})
	}
}

// A seed is worth something only if it always does the same.
func TestSimulationRepeats(t *testing.T) {
	for seed := range uint64(5) {
		a, b := Run(Config{Seed: seed, Trace: true}), Run(Config{Seed: seed, Trace: true})
		if a.Stats != b.Stats || !slices.Equal(a.Trace, b.Trace) {
			t.Errorf("seed %d, two runs: %+v, %+v", seed, a.Stats, b.Stats)
		}
	}
}
