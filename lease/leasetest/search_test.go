package leasetest

import (
	"fmt"
	"testing"
	"time"

	"headgate/lease"
	"headgate/limiter"
)

// spaces are the small worlds: each kind of limit, moved or its owner crashed, from nothing and with leases out.
func spaces(depth, budget int) map[string]Space {
	window := limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 3, Per: time.Second}, Revision: 1}
	all := map[string]Space{}
	for _, l := range []limiter.Limit{perSecond(2, 3), window, slots(3)} {
		for _, move := range []bool{false, true} {
			for _, warm := range []bool{false, true} {
				s := Space{Limit: l, Move: move, Warm: warm, Costs: []int64{1, 2}, Packets: 8, Depth: depth, Budget: budget}
				if warm {
					s.Sizer = constant{lease.ShareOne / 2, 1, 1}
				}
				all[fmt.Sprintf("%v, move %v, warm %v", l.Algorithm, move, warm)] = s
			}
		}
	}
	return all
}

// TestSmallWorld goes through every interleaving of the small worlds' next acts: no oracle objects.
// HEADGATE_SEARCH_DEPTH says how many acts in a row, HEADGATE_SEARCH_STATES how many states at most.
func TestSmallWorld(t *testing.T) {
	depth, set := simEnv(t, "HEADGATE_SEARCH_DEPTH", 3)
	if !set && underRace() {
		t.Skip("nothing meets here")
	}
	budget, _ := simEnv(t, "HEADGATE_SEARCH_STATES", 3_000_000)
	for name, space := range spaces(int(depth), int(budget)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := Search(space)
			if f.Violation != "" {
				t.Fatal(f.Text())
			}
			if !f.Whole || f.States < 100 {
				t.Errorf("this is not all: %s", f.Text())
			}
			t.Logf("%d states, %d runs", f.States, f.Runs)
		})
	}
}
