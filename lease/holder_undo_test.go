package lease

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/limiter"
)

// Whatever is taken and cancelled, in whatever order, a bucket never has more than if what was cancelled had never been
// taken; and none misses more than what the rate brought while it was on its way.
func TestCancelledChargesGiveNoMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limiter.Limit{Rate: limiter.Rate{Count: rapid.Int64Range(1, 20).Draw(t, "rate"), Per: 100}, Burst: rapid.Int64Range(1, 30).Draw(t, "burst")}
		type act struct{ at, then, cost int64 } // then < 0: a take, never cancelled; at == then: one that will be
		var acts []act
		for range rapid.IntRange(1, 20).Draw(t, "takes") {
			at, cost := rapid.Int64Range(1, 1000).Draw(t, "at"), rapid.Int64Range(1, 12).Draw(t, "cost")
			if rapid.Bool().Draw(t, "stays") {
				acts = append(acts, act{at, -1, cost})
				continue
			}
			acts = append(acts, act{at, at, cost}, act{at + rapid.Int64Range(1, 300).Draw(t, "for"), at, cost})
		}
		slices.SortStableFunc(acts, func(a, b act) int { return int(a.at - b.at) })
		h, b := &Holder{}, &purse{}
		most, rate := float64(l.Burst), float64(l.Rate.Count)/float64(l.Rate.Per)
		is, never, last, missed, onWay := most, most, int64(0), int64(0), int64(0)
		for _, a := range acts {
			gained := rate * float64(a.at-last)
			is, never = min(most, is+gained), min(most, never+gained)
			last = a.at
			switch {
			case a.then < 0:
				is, never = is-float64(a.cost), never-float64(a.cost)
			case a.then == a.at:
				is -= float64(a.cost)
			default:
				back := h.undone(a.at, a.then, &l, b, a.cost)
				if back < 0 || back > a.cost {
					t.Fatalf("%d of %d come back", back, a.cost)
				}
				missed += a.cost - back
				onWay += a.at - a.then
				is = min(most, is+float64(back))
			}
			if is > never+1.001 {
				t.Fatalf("at %d there are %.2f, and without what was cancelled %.2f", a.at, is, never)
			}
		}
		if got := float64(missed); got > rate*float64(onWay)+1.001 {
			t.Fatalf("%d were missed, of %.2f that came while they were on their way", missed, rate*float64(onWay))
		}
	})
}

// TestLateCancelOverfillsNothing: of a bucket that has refilled meanwhile a cancelled request gives nothing back, be it
// that its owner decided it or that a lease covered it.
func TestLateCancelOverfillsNothing(t *testing.T) {
	l := limiter.Limit{Rate: limiter.Rate{Count: 8, Per: time.Second}, Burst: 10}
	charge := func(cost int64) []limiter.Charge {
		return []limiter.Charge{{Key: limiter.Key{Tenant: "a", Limit: "l"}, Limit: &l, Cost: cost}}
	}
	for name, s := range map[string]Sizer{"direct": &oneSize{}, "block": &oneSize{depth: 5, grant: 5}, "rate": &oneSize{share: 1, depth: 5, grant: 5}} {
		t.Run(name, func(t *testing.T) {
			p := newPair(s)
			ds := make([]limiter.Decision, 1)
			take := func(cs []limiter.Charge) bool {
				refused, missing := p.h.Take(cs, ds)
				if missing != 0 {
					refused = NotOwner
					for _, x := range p.o.Handle(p.at, p.h.Request(1, []Ask{p.h.Ask(cs, 1, 0, false)})) {
						p.h.Handle(x)
						for i := range x.Decisions {
							refused, _ = p.h.Decided(cs, 1, &x.Decisions[i], p.at.Now, ds)
						}
					}
				}
				return refused == -1
			}
			one := charge(1)
			if !take(one) { // brings the lease
				t.Fatal("1 of 10 is refused")
			}
			p.h.Settle(one, []int64{1}, ds)
			p.pass(time.Second)
			late := charge(4)
			if !take(late) {
				t.Fatal("4 of 10 are refused")
			}
			for range 4 {
				p.pass(250 * time.Millisecond)
			}
			drain := func() (n int) {
				for take(charge(1)) && n < 100 {
					n++
				}
				return n
			}
			before := drain()
			p.h.Cancel(late, 1)
			p.pass(10 * time.Millisecond)
			p.pass(10 * time.Millisecond)
			if after := drain(); before < 5 || before+after > 10 {
				t.Errorf("%d, and after the cancel %d are admitted at once, of 10", before, after)
			}
		})
	}
}

// TestPromptCancelLosesNothing: what is cancelled at once comes back whole but for what the rate brings in that time,
// however many cancel at once.
func TestPromptCancelLosesNothing(t *testing.T) {
	l := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: time.Second}, Burst: 50}
	p := newPair(&oneSize{})
	var held [][]limiter.Charge
	ds := make([]limiter.Decision, 1)
	for range 50 {
		cs := []limiter.Charge{{Key: limiter.Key{Tenant: "a", Limit: "l"}, Limit: &l, Cost: 1}}
		if _, missing := p.h.Take(cs, ds); missing == 0 {
			t.Fatal("there is a lease")
		}
		r := p.o.Handle(p.at, p.h.Request(1, []Ask{p.h.Ask(cs, 1, 0, false)}))[0]
		p.h.Handle(r)
		if refused, ok := p.h.Decided(cs, 1, &r.Decisions[0], p.at.Now, ds); !ok || refused != -1 {
			t.Fatalf("refused %d", refused)
		}
		held = append(held, cs)
	}
	p.at.Now += int64(30 * time.Millisecond)
	for _, cs := range held {
		p.h.Cancel(cs, 1)
	}
	p.pass(time.Millisecond)
	if l := p.o.allLevels(p.at)[0]; l.Level < 49 {
		t.Errorf("%d are back of 50", l.Level)
	}
}
