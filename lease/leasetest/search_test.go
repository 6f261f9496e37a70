package leasetest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"headgate/lease"
	"headgate/limiter"
)

// spaces are the small worlds: each kind of limit, moved or its owner crashed, from nothing and with leases out.
func spaces(in Space) map[string]Space {
	window := limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 4, Per: time.Second}, Revision: 1}
	all := map[string]Space{}
	for _, l := range []limiter.Limit{perSecond(4, 4), window, slots(3)} {
		for _, move := range []bool{false, true} {
			for _, warm := range []bool{false, true} {
				s := in
				s.Limit, s.Move, s.Warm, s.Costs = l, move, warm, []int64{1, 2}
				s.Sizer = constant{lease.ShareOne / 2, 3, 1}
				if s.Budget == 0 {
					s.Budget = 1 << 40
				}
				all[fmt.Sprintf("%v, move %v, warm %v", l.Algorithm, move, warm)] = s
			}
		}
	}
	return all
}

// TestSmallWorld goes through every state that the small worlds can come to: no oracle objects.
// HEADGATE_SEARCH_MESSAGES, _TAKES, _SETTLES, _REPEATS and _TIMES make them larger; _STATES bounds each.
func TestSmallWorld(t *testing.T) {
	if underRace() {
		t.Skip("nothing meets here")
	}
	most, _ := simEnv(t, "HEADGATE_SEARCH_STATES", 400_000_000)
	bounds := map[string]Space{
		"a crash":               {Messages: 4, Takes: 1, Times: 1},
		"a crash and two takes": {Messages: 2, Takes: 2, Times: 1},
		"a crash and a refund":  {Messages: 2, Takes: 1, Settles: 1, Repeats: 1, Times: 1},
		"a move":                {Messages: 3, Takes: 1, Times: 1},
		"a move and a refund":   {Messages: 2, Takes: 1, Settles: 1, Times: 1},
	}
	if n, set := simEnv(t, "HEADGATE_SEARCH_MESSAGES", 0); set {
		env := func(name string) int {
			n, _ := simEnv(t, "HEADGATE_SEARCH_"+name, 1)
			return int(n)
		}
		bounds = map[string]Space{"as asked": {
			Messages: int(n), Takes: env("TAKES"), Settles: env("SETTLES"), Repeats: env("REPEATS"), Times: env("TIMES"),
		}}
	}
	for what, bound := range bounds {
		for name, space := range spaces(bound) {
			if space.Move && strings.HasPrefix(what, "a crash") || !space.Move && strings.HasPrefix(what, "a move") {
				continue
			}
			t.Run(what+", "+name, func(t *testing.T) {
				t.Parallel()
				space.Budget = int(most)
				f := Search(space)
				if f.Violation != "" {
					t.Fatal(f.Text())
				}
				if !f.Whole || f.States < 1000 || f.Ends < 100 {
					t.Errorf("this is not all: %s", f.Text())
				}
				t.Logf("%d states, %d ends, %d acts, of which %d were played", f.States, f.Ends, f.Acts, f.Played)
			})
		}
	}
}

// TestSearchFinds: without a rule the search of a small world objects.
func TestSearchFinds(t *testing.T) {
	for _, tc := range []struct {
		name, world string
		broken      lease.Rule
		bounds      Space
		rate        int64 // 0: as ever
	}{
		{"R1 depth", "gcra, move false, warm true", lease.BreakDepth, Space{Messages: 4, Takes: 1, Times: 2}, 0},
		{"R1 outstanding", "gcra, move false, warm false", lease.BreakOutstanding, Space{Messages: 2, Takes: 1, Times: 1}, 0},
		{"R3 the larger", "gcra, move false, warm true", lease.BreakLarger, Space{Messages: 4, Takes: 1, Settles: 1, Times: 1}, 0},
		{"R5 numbers", "gcra, move false, warm false", lease.BreakNumbers, Space{Messages: 4, Takes: 1, Repeats: 1, Times: 1}, 8},
		{"R6 totals", "gcra, move false, warm true", lease.BreakTotals, Space{Messages: 4, Takes: 1, Settles: 1}, 0},
		{"R7 late decision", "gcra, move false, warm false", lease.BreakSecondReading, Space{Messages: 2, Takes: 1, Times: 1}, 0},
		{"V4 wait", "fixed_window, move false, warm true", lease.BreakWait, Space{Messages: 2, Takes: 1}, 0},
		{"V4 empty", "gcra, move false, warm true", lease.BreakEmpty, Space{Messages: 4, Takes: 1, Times: 1}, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			space := spaces(tc.bounds)[tc.world]
			space.Break = tc.broken
			if tc.rate > 0 {
				space.Limit = perSecond(tc.rate, 4)
			}
			f := Search(space)
			if f.Violation == "" {
				t.Fatal("nobody noticed: " + f.Text())
			}
			t.Log(f.Text())
		})
	}
}

// What the search looks up, a lab that plays the same acts one after the other comes to.
func TestSearchPlays(t *testing.T) {
	for name, space := range spaces(Space{Messages: 8, Takes: 4, Settles: 2, Repeats: 2, Times: 4}) {
		t.Run(name, func(t *testing.T) {
			s, first := newSearch(space)
			for seed := range uint64(20) {
				rng := rand.New(rand.NewPCG(seed, 1))
				at, w := first, space.lab()
				for range 30 {
					acts := s.choices(&at)
					if len(acts) == 0 {
						break
					}
					a := acts[rng.IntN(len(acts))]
					next := at
					if ok, failed := s.apply(&next, a); failed != "" {
						t.Fatal(failed)
					} else if !ok {
						continue
					}
					s.replay(t, w, a)
					at = next
					s.compare(t, w, &at)
				}
			}
		})
	}
}

// replay does an act of a search in a lab of its own.
func (s *search) replay(t *testing.T, w *lab, a act) {
	t.Helper()
	if a.kind != actDeliver && a.kind != actRepeat {
		w.do(a, s.space.Move)
		return
	}
	for i, m := range w.bag {
		m.number = 0
		s.copier.now = lease.Instant{}
		if hashOf(s.copier, &m) == hashOf(s.copier, &s.packets[a.n]) {
			w.deliver(i, a.kind == actRepeat)
			return
		}
	}
	t.Fatal("the lab has no such message")
}

// compare fails the test if a lab is not in a state.
func (s *search) compare(t *testing.T, w *lab, at *state) {
	t.Helper()
	if w.failed != "" || w.now != at.now {
		t.Fatal(w.failed, w.now, at.now)
	}
	for i, p := range w.procs {
		n := at.local[i]
		if p.alive != (n >= 0) {
			t.Fatalf("%s lives: %v", p.name, p.alive)
		}
		if !p.alive {
			continue
		}
		s.copier.now = p.clock.read(w.now)
		s.now = w.now
		if s.hashOf(s.copier, w.part(p)) != s.hashOf(s.copier, s.locals[n].local) {
			t.Fatalf("%s is not as the search has it", p.name)
		}
	}
	o := copyOf(s.copier, w.oracle())
	o.tidy(w.now)
	if hashOf(s.copier, o) != hashOf(s.copier, s.oracles[at.oracle]) {
		t.Fatal("the judge knows something else")
	}
}

// What the search takes for one state leads to the same: whatever the judge is shown when all states are told apart it is
// shown when they are not.
func TestSearchMerges(t *testing.T) {
	for name, space := range spaces(Space{Messages: 2, Takes: 1, Times: 1}) {
		t.Run(name, func(t *testing.T) {
			space.outcomes = map[uint64]bool{}
			few := Search(space)
			got := space.outcomes
			space.plain, space.outcomes = true, map[uint64]bool{}
			all := Search(space)
			t.Logf("%d states for %d, %d outcomes of %d", few.States, all.States, len(got), len(space.outcomes))
			if !few.Whole || !all.Whole || few.States > all.States {
				t.Fatal("this is not all")
			}
			if !maps.Equal(got, space.outcomes) {
				t.Error("another outcome")
			}
		})
	}
}

// Each field that is treated in some way is there.
func TestSearchRules(t *testing.T) {
	s, first := newSearch(spaces(Space{Messages: 4, Takes: 2, Settles: 1, Times: 1})["gcra, move true, warm true"])
	s.space.Budget = 2000
	s.walk(&first)
	for field := range searchRules() {
		if !s.copier.used[field] {
			t.Errorf("%s is nowhere", field)
		}
	}
}
