package lease

import (
	"testing"
	"time"

	"headgate/limiter"
)

// TestOwnerCreditsTheWindowOfTheCharge: what comes back of a charge whose window has passed frees
// nothing of the present one, also where the bucket has moved meanwhile.
func TestOwnerCreditsTheWindowOfTheCharge(t *testing.T) {
	for _, c := range []struct {
		name             string
		limit            limiter.Limit
		after            time.Duration // from the charge to its refund
		between          int64         // charged half way
		refunded, before int64         // levels
	}{
		{"fixed, same", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 1000, Per: 6 * time.Second}}, time.Second, 10, 985, 90},
		{"fixed, later", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 1000, Per: 6 * time.Second}}, 7 * time.Second, 0, 1000, 1000},
		{"fixed and short, later", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 1000, Per: 100 * time.Millisecond}}, 150 * time.Millisecond, 0, 1000, 1000},
		{"sliding, same", limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: limiter.Rate{Count: 1000, Per: 6 * time.Second}}, time.Second, 10, 985, 90},
		{"sliding, next", limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: limiter.Rate{Count: 1000, Per: 6 * time.Second}}, 9 * time.Second, 0, 997, 550},
		{"sliding, past", limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: limiter.Rate{Count: 1000, Per: 6 * time.Second}}, 15 * time.Second, 100, 950, 950},
		{"log, same", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 1000, Per: 6 * time.Second}}, 5 * time.Second, 10, 985, 90},
		{"log, past", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 1000, Per: 6 * time.Second}}, 7 * time.Second, 10, 990, 990},
	} {
		for _, moves := range []bool{false, true} {
			d := newDuo(t, &oneSize{})
			d.at.Wall = 1_800_000_000e9 // windows of 6 s and of 100 ms begin
			owner := uint64(1)
			level := func() int64 {
				ls := d.o[owner].allLevels(d.at)
				if len(ls) == 0 {
					return c.limit.Capacity()
				}
				return ls[0].Level
			}
			take := func(id uint64, cost int64) {
				if r := d.say(owner, 0, nil, duoAsk(id, cost, c.limit)); len(r.Decisions) != 1 || r.Decisions[0].Refused != -1 {
					t.Fatalf("%s: %+v", c.name, r)
				}
			}
			take(1, 900)
			d.later(int64(c.after) / 2)
			if moves {
				d.step(viewOf(2, 1, 0))
				d.handOver(1, 2)
				owner = 2
			}
			if c.between > 0 {
				take(2, c.between)
			}
			d.later(int64(c.after) - int64(c.after)/2)
			if l := level(); l != c.before {
				t.Errorf("%s, moves %v: a level of %d before the refund, want %d", c.name, moves, l, c.before)
			}
			d.say(owner, 0, []Report{{Bucket: duoKey, Granter: 1, Series: 1, Refunded: 895}})
			if l := level(); l != c.refunded {
				t.Errorf("%s, moves %v: a level of %d after the refund, want %d", c.name, moves, l, c.refunded)
			}
		}
	}
}
