package ladder

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// told is one pressure, held for so long, and which rungs are on at its end.
type told struct {
	pressure float64
	d        time.Duration
	want     Set
}

const tick = 250 * time.Millisecond

// run tells the trigger of a pressure for d, in ticks.
func run(g *gauge, tr *trigger, now *int64, pressure float64, d time.Duration) {
	for end := *now + int64(d); *now < end; {
		*now += int64(tick)
		tr.step(g.step(*now, pressure))
	}
}

func three() []Setting {
	return []Setting{
		{Rung: ShedBestEffort, At: .5, For: 2 * time.Second},
		{Rung: StaleCache, At: .6, OffAt: .55, For: 2 * time.Second},
		{Rung: CutMaxTokens, At: .9, For: 4 * time.Second},
	}
}

// TestTriggerTable: when each rung goes on and off, to the tick.
func TestTriggerTable(t *testing.T) {
	best, stale, cut := SetOf(ShedBestEffort), SetOf(ShedBestEffort, StaleCache), SetOf(ShedBestEffort, StaleCache, CutMaxTokens)
	for _, c := range []struct {
		name  string
		rungs []Setting
		told  []told
	}{
		{"no rungs", nil, []told{{1, time.Minute, 0}}},
		{"one after the other", three(), []told{
			{1, tick, 0},
			{1, 2*time.Second - tick, 0},
			{1, tick, best},
			{1, 2*time.Second - tick, best},
			{1, tick, stale},
			{1, 4*time.Second - tick, stale},
			{1, tick, cut},
			{1, time.Hour, cut},
			// the last one: off below .7, after twice 4 s
			{.69, tick, cut},
			{.69, 8*time.Second - tick, cut},
			{.69, tick, stale},
			{.69, time.Minute, stale},
			{.2, tick, stale},
			{.2, 4*time.Second - tick, stale},
			{.2, tick, best},
			{.2, 4*time.Second - tick, best},
			{.2, tick, 0},
			{.2, time.Minute, 0},
		}},
		{"at the threshold, and just below", three()[:1], []told{
			{.4999, time.Minute, 0},
			{.5, 2 * time.Second, 0},
			{.5, tick, best},
			{.3, time.Minute, best},
			{.2999, 4 * time.Second, best},
			{.2999, tick, 0},
		}},
		{"a rung waits for those below it", []Setting{{Rung: StaleCache, At: .8, For: time.Second}, {Rung: SmallerModel, At: .4, For: time.Second}}, []told{
			{.7, time.Minute, 0},
			{.8, 2*time.Second + tick, SetOf(StaleCache, SmallerModel)},
			{.3, time.Minute, SetOf(StaleCache, SmallerModel)}, // the last one is off below .2
			{.1, 4*time.Second + tick, 0},
		}},
		{"what is below the threshold counts against", three()[:1], []told{
			{.5, time.Second, 0}, {.49, time.Second, 0}, {.5, 1500 * time.Millisecond, 0}, {.5, tick, 0}, {.5, tick, 0}, {.5, 2 * tick, best},
		}},
		{"and no more than there was", three()[:1], []told{{0, time.Hour, 0}, {.5, 2 * time.Second, 0}, {.5, tick, best}}},
		{"nobody knows", three()[:2], []told{
			{1, 2*time.Second + tick, best},
			{math.NaN(), 30 * time.Second, best},
			{1, tick, best},
			{1, 2 * time.Second, stale},
			{math.NaN(), time.Minute, stale},
			{math.NaN(), tick, stale}, // from here on it counts as 0
			{math.NaN(), 4*time.Second - tick, best},
			{math.NaN(), 4 * time.Second, 0},
		}},
		{"not knowing counts for neither side", three()[:1], []told{
			{1, time.Second, 0},
			{math.NaN(), 10 * time.Second, 0},
			{1, time.Second, 0},
			{1, tick, best},
			{0, 2 * time.Second, best},
			{math.NaN(), 10 * time.Second, best},
			{0, 2 * time.Second, best},
			{0, tick, 0},
		}},
		{"not knowing is never a reason to go on", three(), []told{{.9, time.Second, 0}, {math.NaN(), 10 * time.Second, 0}, {.4, tick, 0}}},
		{"at once", []Setting{{Rung: DropOptional, At: .5}}, []told{{.5, tick, SetOf(DropOptional)}, {.4, tick, SetOf(DropOptional)}, {.29, tick, 0}}},
		{"a low threshold", []Setting{{Rung: DropOptional, At: .1}}, []told{{.1, tick, SetOf(DropOptional)}, {.05, tick, SetOf(DropOptional)}, {.04, tick, 0}}},
		{"an OffAt that is not below At is none", []Setting{{Rung: DropOptional, At: .5, OffAt: .5}}, []told{{.5, tick, SetOf(DropOptional)}, {.4, tick, SetOf(DropOptional)}, {.29, tick, 0}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, tr, now := newGauge(), trigger{}, int64(0)
			tr.set(c.rungs)
			for i, s := range c.told {
				run(&g, &tr, &now, s.pressure, s.d)
				if got := tr.on(); got != s.want {
					t.Fatalf("%d: after %v at %v: %q, want %q", i, s.d, s.pressure, got, s.want)
				}
			}
		})
	}
}

// TestATriggerThatStoodStill does not take the time for pressure; a clock that goes back is none.
func TestATriggerThatStoodStill(t *testing.T) {
	g, tr := newGauge(), trigger{}
	tr.set([]Setting{{Rung: StaleCache, At: .5, For: 5 * time.Second}})
	step := func(now time.Duration) Set {
		tr.step(g.step(int64(now), .9))
		return tr.on()
	}
	for _, c := range []struct {
		now  time.Duration
		want Set
	}{{time.Hour, 0}, {24 * time.Hour, 0}, {23 * time.Hour, 0}, {25 * time.Hour, 0}, {25*time.Hour + time.Second - 1, 0}, {25*time.Hour + time.Second, SetOf(StaleCache)}} {
		if got := step(c.now); got != c.want {
			t.Fatalf("at %v: %q, want %q", c.now, got, c.want)
		}
	}
}

// TestANewPolicyKeepsWhatIsOn as far as it is still there from the first on.
func TestANewPolicyKeepsWhatIsOn(t *testing.T) {
	for _, c := range []struct {
		name string
		next []Setting
		want Set
	}{
		{"the same", three(), SetOf(ShedBestEffort, StaleCache, CutMaxTokens)},
		{"one at the end gone", three()[:2], SetOf(ShedBestEffort, StaleCache)},
		{"the first gone", three()[1:], 0},
		{"one between", slices.Insert(three(), 2, Setting{Rung: SmallerModel, At: .5}), SetOf(ShedBestEffort, StaleCache)},
		{"one more", append(three(), Setting{Rung: ShedCost, At: .5}), SetOf(ShedBestEffort, StaleCache, CutMaxTokens)},
		{"none", nil, 0},
	} {
		g, tr, now := newGauge(), trigger{}, int64(0)
		tr.set(three())
		run(&g, &tr, &now, 1, 20*time.Second)
		if tr.set(c.next); tr.on() != c.want {
			t.Errorf("%s: %q, want %q", c.name, tr.on(), c.want)
		}
	}
}

// TestNoFlapping: under noise around a threshold, as wide as the gap or not, a rung changes no more
// often than its times allow, and under a pressure whose mean is clear it does not change at all.
func TestNoFlapping(t *testing.T) {
	const hour = time.Hour
	rung := Setting{Rung: SmallerModel, At: .6, For: 5 * time.Second}
	for _, c := range []struct {
		mean, noise float64
		most        int // changes in an hour
		end         Set
	}{
		{.6, .1, 1, SetOf(SmallerModel)},  // around At: it goes on, once
		{.62, .3, 1, SetOf(SmallerModel)}, // wider than the gap
		{.5, .05, 0, 0},                   // between the thresholds
		{.5, .3, 0, 0},                    // on both sides of both
		{.3, .3, 0, 0},
		{.9, .3, 1, SetOf(SmallerModel)},
	} {
		for seed := range uint64(20) {
			r := rand.New(rand.NewPCG(seed, 7))
			g, tr, now, changes, on := newGauge(), trigger{}, int64(0), 0, Set(0)
			tr.set([]Setting{rung})
			for range int(hour / tick) {
				now += int64(tick)
				tr.step(g.step(now, max(0, c.mean+c.noise*r.NormFloat64())))
				if tr.on() != on {
					changes, on = changes+1, tr.on()
				}
			}
			if changes > c.most || on != c.end {
				t.Errorf("mean %v, noise %v, seed %d: %d changes, %q in the end", c.mean, c.noise, seed, changes, on)
			}
		}
	}
}

// TestRungsKeepTheirOrder holds a trigger, fed with anything, against what it promises: a prefix of
// its rungs is on; a step changes one; one goes on only at or above its At, and not before its For
// has passed at or above it; off only below its OffAt, and not before twice that below it.
func TestRungsKeepTheirOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rungs []Setting
		for _, r := range Rungs() {
			if rapid.Bool().Draw(t, r.String()) {
				rungs = append(rungs, Setting{
					Rung: r, At: rapid.Float64Range(.05, 1).Draw(t, "at"), OffAt: rapid.Float64Range(0, 1).Draw(t, "off_at"),
					For: time.Duration(rapid.IntRange(0, 4000).Draw(t, "for")) * time.Millisecond,
				})
			}
		}
		g, tr := newGauge(), trigger{}
		tr.set(rungs)
		now, level := int64(rapid.IntRange(-5, 5).Draw(t, "now")), 0
		var above, below time.Duration // with the thresholds of this level, since it was reached
		last := math.NaN()
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			d := time.Duration(rapid.IntRange(-100, 3000).Draw(t, "d")) * time.Millisecond
			p := rapid.Float64Range(0, 1.2).Draw(t, "p")
			now += int64(d)
			d = min(max(d, 0), maxStep)
			if level < len(rungs) && last >= rungs[level].At {
				above += d
			}
			if level > 0 && last < rungs[level-1].offAt() {
				below += d
			}
			last = p
			tr.step(g.step(now, p))
			switch tr.level {
			case level:
				continue
			case level + 1:
				if p < rungs[level].At || above < rungs[level].For {
					t.Fatalf("%v went on at %v after %v", rungs[level], p, above)
				}
			case level - 1:
				if p >= rungs[level-1].offAt() || below < 2*rungs[level-1].For {
					t.Fatalf("%v went off at %v after %v", rungs[level-1], p, below)
				}
			default:
				t.Fatalf("from %d rungs to %d in one step", level, tr.level)
			}
			level, above, below = tr.level, 0, 0
			var want []Rung
			for _, r := range rungs[:level] {
				want = append(want, r.Rung)
			}
			if tr.on() != SetOf(want...) {
				t.Fatalf("%q is on, want %q", tr.on(), SetOf(want...))
			}
		}
	})
}

// TestUpAndDown: under a surge with noise the rungs go on in the ladder's order and off in the
// reverse, each once.
func TestUpAndDown(t *testing.T) {
	var rungs []Setting
	var up, down []string
	for i, r := range Rungs() {
		rungs = append(rungs, Setting{Rung: r, At: .4 + .1*float64(i), For: 3 * time.Second})
		up, down = append(up, "+"+r.String()), append(down, "-"+r.String())
	}
	slices.Reverse(down)
	want := append(up, down...)
	const minute = 60 * 4 // in ticks
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		g, tr, now := newGauge(), trigger{}, int64(0)
		tr.set(rungs)
		var seen []string
		for s := range 6 * minute { // a minute's rise, three of overload, a minute's fall, and nothing
			p := 1.2 * min(1, float64(s)/minute, max(0, 5-float64(s)/minute))
			on := tr.on()
			now += int64(tick)
			tr.step(g.step(now, max(0, p+.05*r.NormFloat64())))
			if is := tr.on(); is > on {
				seen = append(seen, "+"+(is^on).String())
			} else if is < on {
				seen = append(seen, "-"+(is^on).String())
			}
		}
		if !slices.Equal(seen, want) {
			t.Errorf("seed %d: %v", seed, seen)
		}
	}
}

// TestARungThatHelps lowers the pressure below its own OffAt. It stays longer from time to time, and
// yet goes off, each time and in the end.
func TestARungThatHelps(t *testing.T) {
	g, tr := newGauge(), trigger{}
	tr.set([]Setting{{Rung: SmallerModel, At: .6, For: 5 * time.Second}})
	now, pressure, offered := int64(0), 0., .9
	changes, in, steps := 0, 0, int(time.Hour/tick)
	run := func(n int) {
		for range n {
			target := offered
			if tr.level > 0 {
				target = offered / 3
				in++
			}
			pressure += (target - pressure) * (1 - math.Exp(-tick.Seconds()))
			now += int64(tick)
			before := tr.level
			if tr.step(g.step(now, pressure)); tr.level != before {
				changes++
			}
		}
	}
	run(steps)
	if share := float64(in) / float64(steps); changes < 20 || changes > 100 || share < .85 {
		t.Errorf("%d changes in an hour, in force %.2f of it", changes, share)
	}
	offered, changes = .3, 0
	if run(steps / 30); tr.level != 0 || changes > 1 {
		t.Errorf("after the load has gone: %d on, %d changes", tr.level, changes)
	}
	offered, in = .9, 0 // a new surge: it is as quick as the first
	run(int(20 * time.Second / tick))
	offered = .1
	run(int(20 * time.Second / tick))
	if stayed := time.Duration(in) * tick; tr.level != 0 || stayed > 30*time.Second {
		t.Errorf("%d on, for %v", tr.level, stayed)
	}
}

func sheds() []Shed {
	return []Shed{{At: .75, AboveTokens: 32_768}, {At: .85, BelowTier: 2}, {At: .9, Class: Background}}
}

// TestShedder: entries go on at once and off one by one.
func TestShedder(t *testing.T) {
	g, now := newGauge(), int64(0)
	var s shedder
	s.set(sheds())
	for i, c := range []struct {
		pressure float64
		d        time.Duration
		want     int
	}{
		{.7499, time.Minute, 0},
		{.75, tick, 1},
		{.84, time.Minute, 1},
		{.9, tick, 3},
		{.81, time.Minute, 3},
		{.79, tick, 3},
		{.79, 2*time.Second - tick, 3},
		{.79, tick, 2},
		{.79, time.Minute, 2}, // below .8
		{0, 2 * time.Second, 2},
		{0, tick, 1},
		{0, 2*time.Second - tick, 1},
		{0, tick, 0},
		{1.5, tick, 3},
		{math.NaN(), 50 * time.Second, 3},
		{.9, tick, 3},
		{math.NaN(), time.Minute, 3},
		{math.NaN(), time.Minute, 0},
	} {
		for end := now + int64(c.d); now < end; {
			now += int64(tick)
			s.step(g.step(now, c.pressure))
		}
		if s.level != c.want {
			t.Fatalf("%d: after %v at %v: %d are on, want %d", i, c.d, c.pressure, s.level, c.want)
		}
	}
	for _, p := range []float64{.9, .79, math.NaN(), .79} { // not to know counts for neither side
		for range 4 {
			now += int64(tick)
			s.step(g.step(now, p))
		}
	}
	if now += int64(tick); s.level != 3 {
		t.Errorf("%d are on, too early", s.level)
	}
	if s.step(g.step(now, .79)); s.level != 2 {
		t.Errorf("%d are on", s.level)
	}
	s.set([]Shed{sheds()[0], {At: .8, BelowTier: 3}})
	if s.level != 1 {
		t.Errorf("%d of another list are on", s.level)
	}
	if (&shedder{}).cutoff() != (Cutoff{}) {
		t.Error("nothing is configured, and something refused")
	}
}

// TestShedderKeepsItsOrder: what is on is what the pressure has reached and has not been left.
func TestShedderKeepsItsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g, now, off := newGauge(), int64(0), time.Duration(0)
		var s shedder
		s.set(sheds())
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			p, d := rapid.Float64Range(0, 1.2).Draw(t, "p"), time.Duration(rapid.IntRange(0, 3000).Draw(t, "d"))*time.Millisecond
			before, was := s.level, g.told
			now += int64(d)
			if before > 0 && was < s.sheds[before-1].offAt() {
				off += min(d, maxStep)
			}
			s.step(g.step(now, p))
			reached := 0
			for _, e := range sheds() {
				if p >= e.At {
					reached++
				}
			}
			if s.level < reached {
				t.Fatalf("at %v %d are on", p, s.level)
			}
			switch {
			case s.level > max(before, reached), s.level < before-1:
				t.Fatalf("from %d to %d at %v", before, s.level, p)
			case s.level < before && (off < shedHold || p >= s.sheds[before-1].offAt()):
				t.Fatalf("off after %v", off)
			}
			if s.level != before {
				off = 0
			}
		}
	})
}

func TestSheds(t *testing.T) {
	all := Cutoff{AboveTokens: 1000, BelowTier: 2, Class: Background}
	for _, c := range []struct {
		cutoff Cutoff
		tokens int64
		tier   int
		class  Class
		want   Reason
	}{
		{Cutoff{}, math.MaxInt64, 0, BestEffort, ""},
		{Cutoff{}, math.MaxInt64, -1, BestEffort, ""},
		{all, 1000, 2, Interactive, ""},
		{all, 1001, 1, BestEffort, "shed_cost"},
		{all, 1000, 1, BestEffort, "shed_tier"},
		{all, 1000, 2, BestEffort, "shed_class"},
		{all, 1000, 2, Background, "shed_class"},
		{Cutoff{Class: BestEffort}, 1, 0, Background, ""},
		{Cutoff{Class: BestEffort}, 1, 0, BestEffort, "shed_class"},
		{Cutoff{BelowTier: 1}, 1, 1, BestEffort, ""},
		{Cutoff{BelowTier: 1}, 1, 0, Interactive, "shed_tier"},
	} {
		if got := c.cutoff.Sheds(c.tokens, c.tier, c.class); got != c.want {
			t.Errorf("%+v of %d tokens, tier %d, %v: %q, want %q", c.cutoff, c.tokens, c.tier, c.class, got, c.want)
		}
	}
}

// TestWords are what people read.
func TestWords(t *testing.T) {
	nan := math.NaN()
	for want, got := range map[string]fmt.Stringer{
		"nothing": Cutoff{},
		"requests above 32,768 tokens; tiers below 2; class best_effort":                                        Cutoff{32_768, 2, BestEffort},
		"requests above 999 tokens; classes background and best_effort":                                         Cutoff{999, 0, Background},
		"requests above 1,000,000 tokens":                                                                       Cutoff{AboveTokens: 1_000_000},
		"from pressure 0.75: requests above 32,768 tokens":                                                      sheds()[0],
		"from pressure 0.85: tiers below 2":                                                                     sheds()[1],
		"from pressure 0.9: classes background and best_effort":                                                 sheds()[2],
		"shed_cost from pressure 0.9 for 5s, until below 0.7 for 10s: requests above 16,384 tokens":             Setting{Rung: ShedCost, At: .9, For: 5 * time.Second},
		"cut_max_tokens by hand only: answers of at most 256 tokens":                                            Setting{Rung: CutMaxTokens, MaxTokens: 256},
		"static_answer from pressure 0.95 for 30s, until below 0.5 for 1m0s":                                    Setting{Rung: StaticAnswer, At: .95, OffAt: .5, For: 30 * time.Second},
		"shed_best_effort, stale_cache, smaller_model, drop_optional, cut_max_tokens, shed_cost, static_answer": SetOf(Rungs()...),
		"":              Set(0),
		"drop_optional": SetOf(DropOptional), "interactive": Interactive, "background": Background, "best_effort": BestEffort, "rung(9)": Rung(9),
	} {
		if got.String() != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for want, s := range map[string]*State{
		"at pressure 0.82: requests above 32,768 tokens; class best_effort": {Pressure: .8249, Cutoff: Cutoff{AboveTokens: 32_768}},
		"the pressure is not known: class best_effort":                      {Pressure: nan},
	} {
		if got := s.Explain(SetOf(ShedBestEffort)); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := (&State{}).Explain(0); got != "at pressure 0: nothing" {
		t.Errorf("%q", got)
	}
}

// TestRungNames: the list is in the ladder's order, and what is not on it is refused with it.
func TestRungNames(t *testing.T) {
	all := Rungs()
	if !slices.IsSorted(all) || len(all) != int(count) {
		t.Errorf("%v", all)
	}
	seen := map[string]bool{}
	for _, r := range all {
		got, err := ParseRung(r.String())
		if err != nil || got != r || r.Effect() == "" || strings.Contains(r.Effect(), "\n") || seen[r.Effect()] {
			t.Errorf("%v: %v, %v, %q", r, got, err, r.Effect())
		}
		seen[r.Effect()] = true
	}
	for _, name := range []string{"", "cache_only", "Smaller_model", "smaller_model ", "rung(9)"} {
		_, err := ParseRung(name)
		if want := fmt.Sprintf("rung %q is not known; use one of %s", name, SetOf(all...)); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if _, err := ParseRung(strings.Repeat("é", 100)); err == nil || len(err.Error()) > 250 {
		t.Errorf("%v", err)
	}
}

// TestKept: who says no to degradation is still refused like others.
func TestKept(t *testing.T) {
	if got := SetOf(Rungs()...).Kept(); got != SetOf(ShedBestEffort, ShedCost) {
		t.Errorf("%q", got)
	}
	if got := SetOf(SmallerModel).Kept(); got != 0 {
		t.Errorf("%q", got)
	}
}

// TestByHand: rungs by name, until their time.
func TestByHand(t *testing.T) {
	now := time.Unix(1000, 0)
	h := ByHand(map[string]time.Time{"stale_cache": {}, "smaller_model": now.Add(time.Second), "drop_optional": now, "of a newer version": {}, "drain/vllm-a": {}})
	for _, c := range []struct {
		at   time.Time
		want Set
	}{
		{now.Add(-1), SetOf(StaleCache, SmallerModel, DropOptional)},
		{now, SetOf(StaleCache, SmallerModel)},
		{now.Add(time.Second - 1), SetOf(StaleCache, SmallerModel)},
		{now.Add(time.Second), SetOf(StaleCache)},
	} {
		if got := h.On(c.at); got != c.want {
			t.Errorf("at %v: %q, want %q", c.at, got, c.want)
		}
	}
	if got := (&Hand{}).On(now); got != 0 {
		t.Errorf("nothing was set: %q", got)
	}
}

// TestLadder: what the policy says reaches the requests of each model.
func TestLadder(t *testing.T) {
	l := New()
	if s := l.State("big"); s.Rungs != 0 || s.MaxTokens != DefaultMaxTokens || s.Text != DefaultText || !math.IsNaN(s.Pressure) {
		t.Errorf("%+v", s)
	}
	if on, c := l.State("big").With(SetOf(ShedBestEffort, ShedCost, StaticAnswer)); on != SetOf(ShedBestEffort, ShedCost, StaticAnswer) || c != (Cutoff{AboveTokens: DefaultAboveTokens, Class: BestEffort}) {
		t.Errorf("by hand, without a policy: %q, %v", on, c)
	}
	l.Apply(Config{
		Settings: []Setting{ // in no order
			{Rung: StaticAnswer, Text: "for big", Models: []string{"big"}},
			{Rung: StaticAnswer, Text: "for others", FallbackURL: "https://example.com/busy"},
			{Rung: ShedCost, At: .9, AboveTokens: 9},
			{Rung: DropOptional, At: .5, Models: []string{"small", "big"}},
		},
		Sheds:  []Shed{sheds()[2], sheds()[0], sheds()[1]},
		Models: []string{"small", "big", "third"},
	})
	changed := l.Step(1, func(model string) float64 {
		return map[string]float64{"big": 1, "small": .6, "third": .8}[model]
	})
	var got []string
	for _, c := range changed {
		got = append(got, fmt.Sprintf("%s: %q to %q, %s", c.Model, c.Was.Rungs, c.Is.Rungs, c.Is.Cutoff))
		if c.Was.Cutoff != (Cutoff{}) || c.Is != l.State(c.Model) {
			t.Errorf("%+v", c)
		}
	}
	want := []string{
		`big: "" to "drop_optional", requests above 32,768 tokens; tiers below 2; classes background and best_effort`,
		`small: "" to "drop_optional", nothing`,
		`third: "" to "", requests above 32,768 tokens`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("changed:\n%s", strings.Join(got, "\n"))
	}
	big, third := l.State("big"), l.State("third")
	if big.Text != "for big" || big.FallbackURL != "" || third.Text != "for others" || third.FallbackURL == "" || big.Pressure != 1 || big.Shedding != 3 {
		t.Errorf("%+v\n%+v", big, third)
	}
	if other := l.State("unknown"); other.Text != "for others" || other.Rungs != 0 || other.AboveTokens != 9 {
		t.Errorf("%+v", other)
	}
	if again := l.Step(2, func(string) float64 { return math.NaN() }); len(again) != 0 || l.State("big").Rungs != big.Rungs {
		t.Errorf("%+v", again)
	}
	if c := l.Step(3, func(string) float64 { return 1 }); len(c) != 3 || l.State("big").Rungs != SetOf(DropOptional, ShedCost) || l.State("third").Rungs != SetOf(ShedCost) {
		t.Errorf("the next rung: %+v", c)
	}
	if c := l.Step(4, func(string) float64 { return 1 }); len(c) != 0 {
		t.Errorf("a rung that is by hand only: %+v", c)
	}
	if _, c := l.State("third").With(SetOf(ShedBestEffort)); c.Class != Background {
		t.Errorf("of two classes the more urgent holds: %v", c)
	}
	if _, c := l.State("third").With(0); c.AboveTokens != 9 {
		t.Errorf("of two bounds the lower holds: %v", c)
	}
	l.Apply(Config{Settings: []Setting{{Rung: DropOptional, At: .5}}, Sheds: sheds()[:1], Models: []string{"big"}})
	if s := l.State("big"); s.Rungs != SetOf(DropOptional) || s.Cutoff != (Cutoff{AboveTokens: 32_768}) || s.Text != DefaultText {
		t.Errorf("after another policy: %+v", s)
	}
	if s := l.State("third"); s.Rungs != 0 || s.Cutoff != (Cutoff{}) {
		t.Errorf("a model that is gone: %+v", s)
	}
}

// TestLadderUnderLoad: requests read while pressures and policies come.
func TestLadderUnderLoad(t *testing.T) {
	l := New()
	policy := Config{Settings: []Setting{{Rung: StaleCache, At: .5}}, Sheds: sheds(), Models: []string{"m"}}
	var all sync.WaitGroup
	var wrong sync.Map
	for range 4 {
		all.Go(func() {
			for range 5000 {
				s := l.State("m")
				on, c := s.With(0)
				if on.Has(StaleCache) != (s.Pressure >= .5) || (c.AboveTokens > 0) != (s.Pressure >= .75) {
					wrong.Store(fmt.Sprintf("%+v", s), true)
				}
			}
		})
	}
	all.Go(func() {
		for range 200 {
			l.Apply(policy)
		}
	})
	for i := range 500 {
		l.Step(int64(i), func(string) float64 { return 1 })
	}
	all.Wait()
	for s := range wrong.Range {
		t.Errorf("torn: %s", s)
	}
	l.Step(500, func(string) float64 { return 1 })
	if l.State("m").Rungs != SetOf(StaleCache) {
		t.Errorf("%+v", l.State("m"))
	}
}

// TestWhatEveryRequestPasses allocates nothing.
func TestWhatEveryRequestPasses(t *testing.T) {
	l := New()
	l.Apply(Config{Settings: three(), Sheds: sheds(), Models: []string{"m"}})
	l.Step(1, func(string) float64 { return .8 })
	h := ByHand(map[string]time.Time{"shed_cost": time.Unix(1000, 0)})
	now, shed := time.Unix(1, 0), Reason("")
	if n := testing.AllocsPerRun(100, func() {
		_, c := l.State("m").With(h.On(now))
		shed = c.Sheds(20_000, 1, Interactive)
	}); n != 0 || shed != ByCost {
		t.Errorf("%v allocations, %q", n, shed)
	}
}
