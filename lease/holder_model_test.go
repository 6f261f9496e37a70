package lease

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/limiter"
)

// tally adds up what one series was lent and what became of it.
type tally struct {
	granted int64
	used    int64   // reserved and not settled, or settled
	refill  float64 // the most that can have come by the rate
}

// check compares a series with what the test knows. A block is exact; a rate gains no more than
// its share.
func (y *tally) check(t failer, s *stand, series uint64, exact bool) {
	b := s.h.lookup(&keyA)
	if b == nil {
		t.Fatal("the bucket is forgotten while its series is in use")
	}
	u := b.find(ownerA, series)
	if u == nil {
		t.Fatalf("series %d is forgotten", series)
	}
	level := int64(0)
	if c := u.cell.Load(); c != nil {
		level = c.holds(c.word.Load(), s.now.Load())
		if level > c.depth {
			t.Fatalf("level %d of a depth of %d", level, c.depth)
		}
	}
	sum := level + u.returned.Load() + u.refunded.Load() - u.debt.Load() + y.used
	most := y.granted + int64(y.refill)
	if sum > most || exact && sum != most {
		t.Fatalf("level %d + returned %d + refunded %d - debt %d + used %d is %d; granted %d + refill %.3f",
			level, u.returned.Load(), u.refunded.Load(), u.debt.Load(), y.used, sum, y.granted, y.refill)
	}
}

// TestHolderSpendsNoMoreThanItWasLent draws grants, replacements, takes, settles and lapses, and adds
// up after each step: what was granted is in the lease, returned, or used.
func TestHolderSpendsNoMoreThanItWasLent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newStand(t, 0)
		blocks := rapid.Bool().Draw(t, "blocks")
		l := trickle(5, 0, 0, 0, 0)
		if blocks {
			l = block(5, 0, 0, 0)
		}
		var y tally
		var held []limiter.Charge
		lend := func(t *rapid.T) {
			if rapid.Bool().Draw(t, "replace") || l.Number == 0 {
				l.Number++
				l.Depth = rapid.Int64Range(1, 1000).Draw(t, "depth")
				if !blocks {
					l.Share = uint32(rapid.Int64Range(1, ShareOne).Draw(t, "share"))
				}
			}
			grant := rapid.Int64Range(0, 500).Draw(t, "grant")
			l.Granted += grant
			y.granted += grant
			s.answer(ownerA, 1, l, l)
		}
		lend(t)
		t.Repeat(map[string]func(*rapid.T){
			"lend": lend,
			"take": func(t *rapid.T) {
				c := limiter.Charge{Key: keyA, Limit: perSec, Cost: rapid.Int64Range(0, 300).Draw(t, "cost")}
				if _, ok := s.take(&c); ok {
					y.used += c.Cost
					held = append(held, c)
				}
			},
			"settle": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				actual := rapid.Int64Range(0, 400).Draw(t, "actual")
				y.used += actual - held[i].Cost
				s.settle(&held[i], actual)
				s.settle(&held[i], 7)
				held = slices.Delete(held, i, i+1)
			},
			"cancel": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				if blocks {
					t.Skip() // of a full block, what is cancelled is lost
				}
				y.used -= held[i].Cost
				s.h.Cancel(held[i:i+1], 1)
				held = slices.Delete(held, i, i+1)
			},
			"pass": func(t *rapid.T) {
				d := time.Duration(rapid.Int64Range(0, 1.5e9).Draw(t, "ns"))
				s.pass(d)
				if !blocks {
					y.refill += float64(l.Share) / ShareOne * 1000 * d.Seconds()
				}
			},
			"": func(t *rapid.T) { y.check(t, s, 5, blocks) },
		})
	})
}

// TestHolderFromManyGoroutines takes and settles on several while leases are replaced under them. In
// the end all that was granted is in the lease, returned, or used.
func TestHolderFromManyGoroutines(t *testing.T) {
	s := newStand(t, 0)
	l := block(5, 1, 500, 500)
	s.answer(ownerA, 1, l)
	slots := slotLease(6, 1, 4, 4)
	slots.Key.Limit = "slots"
	s.answer(ownerA, 1, slots)
	var used, inUse, taken atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	for g := range 3 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(g)))
			ds := make([]limiter.Decision, 2)
			for !stop.Load() {
				cs := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: r.Int64N(20)}, {Key: slots.Key, Limit: slots8, Cost: 1}}
				cost := cs[0].Cost
				_, missing := s.h.Take(cs, ds)
				if missing != 0 {
					if missing&1 == 0 {
						used.Add(cost)
						s.h.Settle(cs[:1], []int64{cost}, ds)
					}
					s.h.Cancel(cs[1:], 1)
					continue
				}
				if n := inUse.Add(1); n > 8 {
					t.Errorf("%d slots in use", n)
				}
				taken.Add(1)
				actual := r.Int64N(25)
				used.Add(actual)
				inUse.Add(-1)
				s.h.Settle(cs, []int64{actual, 0}, ds)
			}
		})
	}
	// Some of it at once with the takes, however late they start.
	for n := 0; n < 2000 || taken.Load() < 100 && n < 1e7; n++ {
		if n%2 == 0 {
			l.Number++
			l.Depth = 100 + int64(n)%400
		}
		l.Granted += 50
		slots.Number++
		slots.Depth = 1 + int64(n)%4
		s.answer(ownerA, 1, l, slots)
		if s.pass(time.Millisecond); n >= 2000 {
			runtime.Gosched()
		}
	}
	stop.Store(true)
	wg.Wait()
	y := tally{granted: l.Granted, used: used.Load()}
	y.check(t, s, 5, true)
	b := s.h.lookup(&slots.Key)
	u := b.find(ownerA, 6)
	if free := u.cell.Load().holds(u.cell.Load().word.Load(), 0); u.inUse() != 0 || free+u.returned.Load() != 4 {
		t.Errorf("%d in use, %d free, %d returned of 4", u.inUse(), free, u.returned.Load())
	}
	if taken.Load() == 0 {
		t.Error("nothing was taken")
	}
}
