package budget

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// crowd is clients that hammer one or several budgets from all nodes until these are spent, or for a while.
type crowd struct {
	clients int
	charges func(client int) []Charge
	actual  func(rng *rand.Rand, granted int64) int64 // what a request costs of what it was granted
	within  time.Duration
}

// outcome is how it went for them.
type outcome struct {
	spent, clamped, refusals int64
	waits                    []time.Duration // of refused requests, rising
	spentOut                 int             // clients that were told that it is spent
}

func (c crowd) run(t *testing.T, b *bed) (o outcome) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	end := time.Now().Add(c.within)
	for i := range c.clients {
		rng := rand.New(rand.NewPCG(1, uint64(i)))
		wg.Go(func() {
			m := b.managers[i%len(b.managers)]
			for time.Now().Before(end) {
				cs := c.charges(i)
				out, began := make([]Taken, len(cs)), time.Now()
				err := m.Take(t.Context(), cs, out)
				var r *Refused
				if err != nil {
					if !errors.As(err, &r) {
						t.Errorf("take: %v", err)
						return
					}
					mu.Lock()
					o.refusals++
					o.waits = append(o.waits, time.Since(began))
					if r.Kind == Exhausted {
						o.spentOut++
					}
					mu.Unlock()
					if r.Kind == Exhausted {
						return
					}
					time.Sleep(time.Duration(rng.IntN(int(100 * time.Millisecond))))
					continue
				}
				granted := out[0].Granted
				for j := range out {
					granted = min(granted, out[j].Granted)
				}
				actual := c.actual(rng, granted)
				time.Sleep(time.Duration(rng.IntN(int(100 * time.Millisecond))))
				mu.Lock()
				o.spent += actual
				if granted < cs[0].Cost {
					o.clamped++
				}
				mu.Unlock()
				m.Settle(out, actual)
			}
		})
	}
	wg.Wait()
	slices.Sort(o.waits)
	return o
}

// TestWhatWillDoIsSoldToTheEnd: near the end each node holds a part of what a request would like, all of which would do.
func TestWhatWillDoIsSoldToTheEnd(t *testing.T) {
	total := usd
	all := func(_ *rand.Rand, granted int64) int64 { return granted }
	strict := func(cost, least int64) func(int) []Charge {
		return func(int) []Charge {
			c := charge("b", total, cost)
			c.Least = least
			return []Charge{c}
		}
	}
	for name, c := range map[string]crowd{
		"dear":         {24, strict(80_000_000, 400_000), all, 20 * time.Second},
		"dear, a part": {24, strict(80_000_000, 400_000), func(rng *rand.Rand, granted int64) int64 { return rng.Int64N(granted) + 1 }, 20 * time.Second},
		"small, many":  {64, strict(1_000_000, 400_000), all, 20 * time.Second},
		"some of each": {24, func(i int) []Charge { return strict(int64(i%4+1)*20_000_000, int64(i%3+1)*400_000)(i) }, all, 20 * time.Second},
		"beside another": {24, func(i int) []Charge {
			return append(strict(80_000_000, 400_000)(i), charge("org", 10*total, 40_000_000))
		}, all, 20 * time.Second},
		"of two": {24, func(i int) []Charge {
			other := charge("org", 2*total, 80_000_000)
			other.Least = 400_000
			return append(strict(80_000_000, 400_000)(i), other)
		}, all, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, b *bed) {
				o := c.run(t, b)
				if o.spent > total || o.spent < total*99/100 {
					t.Errorf("%d of %d spent", o.spent, total)
				}
				if len(o.waits) > 0 && o.waits[len(o.waits)-1] > 300*time.Millisecond {
					t.Errorf("%d refusals, after %v, %v in the middle", o.refusals, o.waits[len(o.waits)-1], o.waits[len(o.waits)/2])
				}
				if n := b.draws(); n > 300 {
					t.Errorf("%d draws", n)
				}
				if o.spentOut != c.clients {
					t.Errorf("%d of %d clients were told that it is spent", o.spentOut, c.clients)
				}
			})
		})
	}
}

// TestWhileAnotherHoldsTheRestNobodyStorms: a request that goes on for long has what is left.
func TestWhileAnotherHoldsTheRestNobodyStorms(t *testing.T) {
	for name, least := range map[string]func(cost int64) int64{
		"all of it":      func(int64) int64 { return 0 },
		"less will do":   func(cost int64) int64 { return cost / 50 },
		"a bit will do":  func(int64) int64 { return 1 },
		"half will do":   func(cost int64) int64 { return cost/2 + 1 },
		"what else will": func(cost int64) int64 { return max(cost-5_000_000, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, b *bed) {
				long := take(t, b.managers[0], charge("b", usd, usd*3/10))
				rng := rand.New(rand.NewPCG(2, 2))
				var mu sync.Mutex
				hammer := crowd{24, func(int) []Charge {
					mu.Lock()
					c := charge("b", usd, rng.Int64N(80_000_000)+5_000_001)
					mu.Unlock()
					c.Least = least(c.Cost)
					return []Charge{c}
				}, func(_ *rand.Rand, granted int64) int64 { return granted }, 5 * time.Second}
				first := hammer.run(t, b)
				draws := b.draws()
				o := hammer.run(t, b)
				if o.spentOut > 0 || first.spentOut > 0 || first.spent+o.spent < usd*69/100 {
					t.Errorf("%d and %d spent; %d and %d times it was spent out", first.spent, o.spent, first.spentOut, o.spentOut)
				}
				if n := b.draws() - draws; n > 150 {
					t.Errorf("%d draws in 5 s for nothing", n)
				}
				if o.waits[len(o.waits)-1] > 300*time.Millisecond || o.waits[len(o.waits)/2] > commit {
					t.Errorf("%d refusals, after %v, %v in the middle", o.refusals, o.waits[len(o.waits)-1], o.waits[len(o.waits)/2])
				}
				b.managers[0].Settle(long, 0)
				if last := hammer.run(t, b); first.spent+o.spent+last.spent < usd*99/100 {
					t.Errorf("%d spent after all of it came free", first.spent+o.spent+last.spent)
				}
			})
		})
	}
}

// TestALedgerThatIsSlowCostsNobodyWhatIsHere: after two seconds who can do with what there is gets it, and does not
// wait for another account either.
func TestALedgerThatIsSlowCostsNobodyWhatIsHere(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		m.Settle(take(t, m, charge("a", usd, 1000)), 0)
		held, _ := m.Level(key("a"))
		b.slow.Store(int64(3 * time.Second))
		c := charge("a", usd, usd/2)
		c.Least = held.Held
		began := time.Now()
		taken := take(t, m, c)
		if took := time.Since(began); taken[0].Granted != held.Held || took != maxWait {
			t.Errorf("%d of %d were granted after %v", taken[0].Granted, held.Held, took)
		}
		m.Settle(taken, 0)
		b.slow.Store(0)
		time.Sleep(5 * time.Second)
		m.Settle(take(t, m, charge("c", usd, 1000)), 0)
		b.slow.Store(int64(3 * time.Second))
		held, _ = m.Level(key("c"))
		c.Key, c.Least = key("c"), held.Held
		began = time.Now()
		if r := refused(t, m, Unavailable, c, charge("b", usd, 1000)); r.Index != 1 {
			t.Errorf("refused: %+v", r)
		}
		if took := time.Since(began); took != maxWait {
			t.Errorf("it waited %v", took)
		}
		if l, _ := m.Level(c.Key); l.Requests != 0 || l.Open != 0 {
			t.Errorf("it holds something: %+v", l)
		}
	})
}

// TestWhatIsSetAsideLeavesTheBudget: however much each node is to set aside, at most half of the amount is, and the rest is sold.
func TestWhatIsSetAsideLeavesTheBudget(t *testing.T) {
	for name, emergency := range map[string]int64{
		"all of it": usd, "more than there is": 20 * usd, "a third each": usd * 34 / 100, "a sixth each": usd / 6, "little": usd / 100,
	} {
		for _, at := range []string{"one after another", "at once"} {
			t.Run(name+", "+at, func(t *testing.T) {
				inBubble(t, 3, func(t *testing.T, b *bed) {
					paid := func(int) []Charge {
						c := charge("b", usd, 400_000)
						c.Emergency = emergency
						return []Charge{c}
					}
					if at == "one after another" {
						for _, m := range b.managers {
							m.Settle(take(t, m, paid(0)...), 0)
						}
					}
					all := func(_ *rand.Rand, granted int64) int64 { return granted }
					o := crowd{24, paid, all, 20 * time.Second}.run(t, b)
					var aside, least int64
					for _, m := range b.managers {
						l, _ := m.Level(key("b"))
						aside += l.Emergency
						least = max(least, l.Emergency)
					}
					if aside > usd/2 || aside < min(3*emergency, usd/2)*9/10 {
						t.Errorf("%d are set aside", aside)
					}
					if o.spent+aside > usd || o.spent+aside < usd*99/100 {
						t.Errorf("%d spent, %d set aside of %d", o.spent, aside, usd)
					}
					if o.spentOut > 0 {
						t.Errorf("%d times it was called spent", o.spentOut)
					}
					if o.waits[len(o.waits)-1] > 300*time.Millisecond || b.draws() > 800 {
						t.Errorf("refusals after up to %v, %d draws", o.waits[len(o.waits)-1], b.draws())
					}
					lowered := paid(0)
					lowered[0].Terms = &Terms{Amount: usd / 10, Revision: 2}
					aside = 0
					for _, m := range b.managers {
						if out := make([]Taken, 1); m.Take(t.Context(), lowered, out) == nil { // what it holds stays usable
							m.Settle(out, 0)
						}
						l, _ := m.Level(key("b"))
						aside += l.Emergency
					}
					if aside > usd/20 {
						t.Errorf("%d are set aside of %d", aside, usd/10)
					}
				})
			})
		}
	}
}

// TestManyCrowdsBuyAll: nodes, clients, costs and budgets beside it by chance.
func TestManyCrowdsBuyAll(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 7))
		nodes, clients, beside := rng.IntN(5)+1, rng.IntN(60)+1, rng.IntN(4)
		cost := usd * int64(rng.IntN(100)+1) / 1000
		least := max(cost/int64(rng.IntN(300)+2), usd/5000)
		all := rng.IntN(3) == 0
		t.Run(fmt.Sprintf("%d: %d nodes, %d clients, %d budgets more", seed, nodes, clients, beside), func(t *testing.T) {
			inBubble(t, nodes, func(t *testing.T, b *bed) {
				o := crowd{clients, func(i int) []Charge {
					cs := []Charge{charge("b", usd, cost)}
					cs[0].Least = least
					for k := range beside {
						c := charge(fmt.Sprint("x", k), usd*int64(k+2), cost/2+1)
						switch k {
						case 0, 2:
							c.Cost, c.Least = cost, least
						case 1:
							c.Key.Subject = fmt.Sprint(i)
						}
						cs = append(cs, c)
					}
					return cs
				}, func(rng *rand.Rand, granted int64) int64 {
					if all {
						return granted
					}
					return rng.Int64N(granted) + 1
				}, 400 * time.Second}.run(t, b)
				if o.spent > usd || o.spent < usd*99/100-least || o.spentOut != clients {
					t.Errorf("%d of %d spent, %d of %d clients were told; a request costs %d, %d at the least", o.spent, usd, o.spentOut, clients, cost, least)
				}
				// Five draws at a budget, and 10, 20, 40 and 80 ms between them, are 180 ms; others of the crowd may
				// take at one what was drawn while it waits at the next, so that it begins anew. Never until maxWait.
				if len(o.waits) > 0 && o.waits[len(o.waits)-1] > maxWait/2 {
					t.Errorf("%d refusals, after up to %v", o.refusals, o.waits[len(o.waits)-1])
				}
			})
		})
	}
}
