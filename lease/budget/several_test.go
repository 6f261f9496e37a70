package budget

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// TestAfterAPauseSeveralBudgetsAreDrawnOnce: what one gave is not given back while the request waits for the other.
func TestAfterAPauseSeveralBudgetsAreDrawnOnce(t *testing.T) {
	for _, wanted := range []bool{false, true} {
		inBubble(t, 2, func(t *testing.T, b *bed) {
			m, cs := b.managers[0], []Charge{charge("a", usd, 400_000), charge("b", usd, 400_000), charge("c", usd, 400_000)}
			m.Settle(take(t, m, cs...), 400_000)
			time.Sleep(20 * time.Second)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			if wanted { // by one who lacks it all the time
				wg.Go(func() {
					for ctx.Err() == nil {
						m.Recall(cs[0].Key)
						m.Recall(cs[1].Key)
						time.Sleep(time.Millisecond)
					}
				})
			}
			for range 5 {
				draws, began := b.tries.Load(), time.Now()
				m.Settle(take(t, m, cs...), 400_000)
				if took, n := time.Since(began), b.tries.Load()-draws; took > 3*commit || n > 8 {
					t.Errorf("wanted %v: after a pause it took %v and %d draws", wanted, took, n)
				}
				time.Sleep(20 * time.Second)
			}
			cancel()
			wg.Wait()
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
