package budget

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestAfterAPauseSeveralBudgetsAreDrawnOnce: what one gave is not given back while the request waits for the next, also
// where others want it all the time.
func TestAfterAPauseSeveralBudgetsAreDrawnOnce(t *testing.T) {
	for n := 1; n <= 8; n++ {
		for _, wanted := range []bool{false, true} {
			inBubble(t, 1, func(t *testing.T, b *bed) {
				m, cs := b.managers[0], make([]Charge, n)
				for i := range cs {
					cs[i] = charge(fmt.Sprint(i), usd, 400_000)
				}
				m.Settle(take(t, m, cs...), 400_000)
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				if wanted {
					wg.Go(func() {
						for ctx.Err() == nil {
							m.Recall(cs[0].Key)
							m.Recall(cs[n/2].Key)
							time.Sleep(time.Millisecond)
						}
					})
				}
				for range 3 {
					time.Sleep(11 * time.Second)
					draws, began := b.tries.Load(), time.Now()
					taken := take(t, m, cs...)
					if took, drew := time.Since(began), b.tries.Load()-draws; took > time.Duration(n)*commit || drew > int64(n) {
						t.Errorf("%d budgets, wanted %v: after a pause it took %v and %d draws", n, wanted, took, drew)
					}
					m.Settle(taken, 400_000)
				}
				cancel()
				wg.Wait()
			})
		}
	}
}

// TestTwoWhoMeetHalfWay: there is enough for one of them. One is served, though each may find in one budget what the other lacks.
func TestTwoWhoMeetHalfWay(t *testing.T) {
	x, y := charge("x", 1000, 600), charge("y", 1000, 600)
	for name, second := range map[string][]Charge{"the same way": {x, y}, "each from another end": {y, x}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 2, func(t *testing.T, b *bed) {
				for round := range 20 {
					var wg sync.WaitGroup
					var served atomic.Int64
					for i, cs := range [][]Charge{{x, y}, second} {
						wg.Go(func() {
							out := make([]Taken, 2)
							if b.managers[i].Take(t.Context(), cs, out) == nil {
								served.Add(1)
								time.Sleep(3 * time.Second)
								b.managers[i].Settle(out, 0)
							}
						})
					}
					wg.Wait()
					if served.Load() != 1 {
						t.Errorf("round %d: %d were served", round, served.Load())
					}
					time.Sleep(time.Duration(round) * 700 * time.Millisecond)
				}
			})
		})
	}
}

// TestWhoFindsNoRoomLeavesNothingBehind: an account was forgotten while the request waited at another, and the table is full.
func TestWhoFindsNoRoomLeavesNothingBehind(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		m.Settle(take(t, m, charge("a", 1000, 1), charge("b", 1000, 1)), 0)
		m.table.most = 1
		b.slow.Store(int64(100 * time.Millisecond))
		done := make(chan error)
		go func() {
			done <- m.Take(t.Context(), []Charge{charge("a", 1000, 800), charge("b", 1000, 1)}, make([]Taken, 2))
		}()
		time.Sleep(50 * time.Millisecond)
		c := m.table.find(&Key{Key: key("b").Key})
		c.mu.Lock()
		c.gone = true
		c.mu.Unlock()
		m.table.drop(c)
		var r *Refused
		if err := <-done; !errors.As(err, &r) || !errors.Is(r, errFull) {
			t.Errorf("take: %v", err)
		}
		if l, _ := m.Level(key("a")); l.Open != 0 || l.Requests != 0 {
			t.Errorf("it left behind %+v", l)
		}
	})
}
