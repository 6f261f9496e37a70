package capacity

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

// always is a queue that never empties.
var always = math.Inf(1) //nolint:gochecknoglobals // a constant

// phase is a stretch of a scenario: what is asked, and what the engine is like.
type phase struct {
	name           string
	prompt, output float64
	rate           float64
	long           time.Duration
	slow           float64
	seqs, kv       int64
	// the least share of the best fixed limit's goodput that the learner must reach, with metrics and without, after the first
	// third; and how far its limit may swing (5th and 95th of 100 seconds, over the median) with metrics.
	want, blind, swing float64
}

func (p *phase) load() load { return load{prompt: p.prompt, output: p.output, rate: p.rate} }

func (p *phase) set(e *engine) { e.slow, e.maxSeqs, e.kv = p.slow, p.seqs, p.kv }

// simulations: in each there are 128 slots, which is right for the first only.
func simulations() [][]phase {
	const m = time.Minute
	chat := phase{name: "chat", prompt: 600, output: 200, rate: always, long: 5 * m, slow: 1, seqs: 256, kv: 60_000, want: .95, blind: .9, swing: .2}
	with := func(f func(*phase)) phase { p := chat; f(&p); return p }
	long := with(func(p *phase) {
		// A dozen requests of very different sizes: one more or less is 8 %.
		p.name, p.prompt, p.output, p.want, p.blind, p.swing = "long prompts", 4000, 400, .88, .6, .45
	})
	slow := with(func(p *phase) {
		p.name, p.slow, p.long, p.want, p.blind, p.swing = "ten times slower", 10, 2*m, .8, .8, .9
	})
	return [][]phase{
		{with(func(p *phase) { p.name, p.kv = "batch", 400_000 })},
		{with(func(p *phase) { p.name, p.kv, p.swing = "little memory", 30_000, .25 })},
		{with(func(p *phase) { p.name, p.kv, p.seqs = "24 at once", 400_000, 24 })},
		{with(func(p *phase) { p.name, p.seqs, p.want, p.swing = "4 at once", 4, .9, .3 })},
		{long},
		{chat, long, chat},
		{chat, slow, chat},
		{with(func(p *phase) { p.name, p.rate, p.want = "light", 3, .9 }), chat},
	}
}

const simSlots, simSeeds = 128, 4

// bestFixed is the goodput of the best limit that never moves, and that limit.
func bestFixed(p *phase) (best float64, at int64) {
	for _, n := range []int64{4, 6, 8, 10, 11, 12, 14, 16, 20, 22, 24, 26, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, simSlots} {
		e := newEngine()
		p.set(e)
		w := newWorld(e, fixed(n), 3, false)
		w.run(p.load(), 100*time.Second)
		w.mark()
		w.run(p.load(), 200*time.Second)
		if g := w.goodput(); g > best {
			best, at = g, n
		}
	}
	return best, at
}

// outcome is a control's in one phase, the mean of all seeds: shares of the best fixed limit's goodput in the first third and after
// it; then the limit, its swing, and the 99th percentile of first bytes in seconds.
type outcome struct{ first, then, limit, low, high, late float64 }

func simulate(phases []phase, best []float64, metrics bool, control func() control) []outcome {
	out := make([]outcome, len(phases))
	for seed := range uint64(simSeeds) {
		e := newEngine()
		w := newWorld(e, control(), seed, metrics)
		for i := range phases {
			p, o := &phases[i], &out[i]
			p.set(e)
			w.mark()
			w.run(p.load(), p.long/3)
			o.first += w.goodput() / best[i] / simSeeds
			w.mark()
			w.run(p.load(), p.long-p.long/3)
			o.then += w.goodput() / best[i] / simSeeds
			limit, low, high := w.swing()
			o.limit += limit / simSeeds
			o.low += low / simSeeds
			o.high += high / simSeeds
			o.late += quantile(w.firsts, .99) / simSeeds
		}
	}
	return out
}

// TestSimulation runs the learner beside limits that never move and beside what others published, against a model of vLLM. With
// -v it prints DESIGN.md's table.
func TestSimulation(t *testing.T) {
	rivals := []struct {
		name string
		make func() control
	}{
		{"slots as configured", func() control { return fixed(simSlots) }},
		{"AIMD, 1 s bound", func() control { return &aimd{most: simSlots, l: 16, timeout: time.Second} }},
		{"Vegas", func() control { return &vegas{most: simSlots, l: 16} }},
		{"gradient2", func() control { return &gradient2{most: simSlots, l: 16, tolerance: 1.5} }},
		{"gradient2, whole answers", func() control { return &gradient2{most: simSlots, l: 16, tolerance: 1.5, whole: true} }},
	}
	for _, phases := range simulations() {
		t.Run(strings.ReplaceAll(phases[len(phases)/2].name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			best := make([]float64, len(phases))
			for i := range phases {
				var at int64
				best[i], at = bestFixed(&phases[i])
				t.Logf("%s: best fixed limit %d, %.0f tokens/s", phases[i].name, at, best[i])
			}
			show := func(name string, out []outcome) {
				var sb strings.Builder
				for i, o := range out {
					fmt.Fprintf(&sb, " | %s: %.2f, then %.2f; limit %.0f ×%.2f…%.2f, first byte p99 %.1f s", phases[i].name, o.first, o.then, o.limit, o.low, o.high, o.late)
				}
				t.Logf("%-24s%s", name, sb.String())
			}
			for _, r := range rivals {
				if !testing.Verbose() {
					break // they are only for the table
				}
				show(r.name, simulate(phases, best, false, r.make))
			}
			blind := simulate(phases, best, false, func() control { return learnt{newLearner(settings{simSlots, 1, false})} })
			show("learner without metrics", blind)
			seeing := simulate(phases, best, true, func() control { return learnt{newLearner(settings{simSlots, 1, true})} })
			show("learner", seeing)
			for i, p := range phases {
				if o := seeing[i]; o.then < p.want || o.low < 1-p.swing || o.high > 1+p.swing {
					t.Errorf("%s: %.2f of the best fixed limit's goodput, want %.2f; swing %.2f to %.2f, want within %.2f", p.name, o.then, p.want, o.low, o.high, p.swing)
				}
				if o := blind[i]; o.then < p.blind {
					t.Errorf("%s without metrics: %.2f of the best fixed limit's goodput, want %.2f", p.name, o.then, p.blind)
				}
			}
		})
	}
}

// TestHours: under a demand that never lets up the limit does not creep, which it would if its floor did.
func TestHours(t *testing.T) {
	asked := load{prompt: 600, output: 200, rate: always}
	for _, metrics := range []bool{true, false} {
		w := newWorld(newEngine(), learnt{newLearner(settings{simSlots, 1, metrics})}, 1, metrics)
		w.run(asked, 10*time.Minute)
		w.mark()
		w.run(asked, 20*time.Minute)
		before, _, _ := w.swing()
		good := w.goodput()
		w.run(asked, time.Hour)
		w.mark()
		w.run(asked, 20*time.Minute)
		if after, _, _ := w.swing(); after < .85*before || after > 1.15*before || w.goodput() < .95*good {
			t.Errorf("metrics %v: limit %.0f, %.0f tokens/s; an hour later %.0f, %.0f tokens/s", metrics, before, good, after, w.goodput())
		}
	}
}

// TestSlowForLong: a backend that is ten times slower for ten minutes is not idled for that, since fewer requests make it no faster.
func TestSlowForLong(t *testing.T) {
	const seeds = 8
	asked := load{prompt: 2000, output: 200, rate: always}
	tokens := func(control func() control, metrics bool) (all float64) {
		for seed := range uint64(seeds) {
			w := newWorld(newEngine(), control(), seed, metrics)
			w.run(asked, 3*time.Minute)
			w.e.slow = 10
			w.run(asked, 3*time.Minute)
			w.mark()
			w.run(asked, 7*time.Minute)
			all += float64(w.all) / seeds
		}
		return all
	}
	most := tokens(func() control { return fixed(24) }, false)
	for _, c := range []struct {
		metrics bool
		want    float64
	}{{true, .4}, {false, .3}} {
		got := tokens(func() control { return learnt{newLearner(settings{simSlots, 1, c.metrics})} }, c.metrics)
		if t.Logf("metrics %v: %.2f of what 24 slots yield", c.metrics, got/most); got < c.want*most {
			t.Errorf("metrics %v: %.2f of what 24 slots yield, want %.2f", c.metrics, got/most, c.want)
		}
	}
}

// TestSlowdown: a backend that slows tenfold gets no more than it had from then on, has its limit cut within seconds (the sooner the
// longer its first bytes took already), not to nothing, since that makes nothing faster, and has it back soon after.
func TestSlowdown(t *testing.T) {
	for _, c := range []struct {
		prompt float64
		within time.Duration
	}{{600, 12 * time.Second}, {2000, 12 * time.Second}} {
		asked := load{prompt: c.prompt, output: 200, rate: always}
		for _, metrics := range []bool{true, false} {
			var took time.Duration
			for seed := range uint64(8) {
				e := newEngine()
				l := newLearner(settings{simSlots, 1, metrics})
				w := newWorld(e, learnt{l}, seed, metrics)
				w.run(asked, 3*time.Minute)
				before := l.told()
				e.slow = 10
				slowed := w.now
				for l.told() > before*19/20 && w.now-slowed < int64(time.Minute) {
					w.run(asked, time.Second)
					if l.told() > before+before/5+1 {
						t.Fatalf("prompts of %v, metrics %v, seed %d: limit %d before, grown to %d", c.prompt, metrics, seed, before, l.told())
					}
				}
				took += time.Duration(w.now-slowed) / 8
				w.run(asked, time.Minute)
				if now := l.told(); now < before/10 {
					t.Errorf("prompts of %v, metrics %v, seed %d: cut from %d to %d", c.prompt, metrics, seed, before, now)
				}
				e.slow = 1
				w.run(asked, 90*time.Second)
				if now := l.told(); now < before*6/10 {
					t.Errorf("prompts of %v, metrics %v, seed %d: limit %d before, %d when it had been fast again for 90 s", c.prompt, metrics, seed, before, now)
				}
			}
			if t.Logf("prompts of %v, metrics %v: cut after %v", c.prompt, metrics, took); took > c.within {
				t.Errorf("prompts of %v, metrics %v: %v until the limit was cut, want %v", c.prompt, metrics, took, c.within)
			}
		}
	}
}
