package budget

import (
	"context"
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
