package cache

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestThousandAskOnce: a thousand who want the same, on five nodes, ask the model once.
func TestThousandAskOnce(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 5), fillKey("q")
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 200, Ask{Key: k})
		}
		f := c.lead()
		synctest.Wait()
		time.Sleep(20 * time.Second)
		f.Store(answerFor(k))
		c.want(int(TurnLead), 1, int(TurnHit), 999)
		for _, n := range w.nodes {
			if h, ok := n.Look(k); !ok || h.Delta < 20*time.Second || h.Stamp != 1 {
				t.Errorf("node %d has not got it as it was filled: %v", n.index, h.Entry)
			}
		}
	})
}
