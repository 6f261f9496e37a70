package lease_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"headgate/limiter"
)

// TestManagerTakesHeld: what the leases in hand do not cover whole is not taken at all, and nobody is asked for it.
func TestManagerTakesHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 0, 0, 0)
		n := w.nodes[1]
		eight := chargeOn("0eight", &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8, Revision: 1}, 3)
		other := chargeOn("0other", eight.Limit, 1)
		ds := make([]limiter.Decision, 2)
		if n.TakeHeld([]limiter.Charge{eight}, ds) {
			t.Error("taken without a lease")
		}
		if trips := n.count("headgate_lease_round_trips_total", "ask"); trips != 0 {
			t.Errorf("%v asks", trips)
		}
		cs := []limiter.Charge{eight}
		if n.Take(context.Background(), cs, ds) != -1 {
			t.Fatalf("%+v", ds[0])
		}
		n.Settle(cs, []int64{0}, ds) // three free ones are in hand now
		trips := n.count("headgate_lease_round_trips_total", "ask")
		both := []limiter.Charge{eight, other}
		if n.TakeHeld(both, ds) {
			t.Error("taken though one of two is not in hand")
		}
		cs[0] = eight
		if !n.TakeHeld(cs, ds) {
			t.Error("not taken, or the one that was in hand was kept by the call before")
		}
		four := eight
		four.Cost = 1
		if n.TakeHeld([]limiter.Charge{four}, ds) {
			t.Error("a fourth of three")
		}
		n.Settle(cs, []int64{0}, ds)
		if now := n.count("headgate_lease_round_trips_total", "ask"); now != trips {
			t.Errorf("%v asks", now-trips)
		}
		four = eight
		cs[0] = four
		if got := testing.AllocsPerRun(100, func() {
			cs[0] = four
			if !n.TakeHeld(cs, ds) {
				t.Error("not taken")
			}
			n.Settle(cs, []int64{0}, ds)
		}); got != 0 {
			t.Errorf("%v allocations", got)
		}
	})
}

// TestManagerYields: slots that are yielded are with their owner after one message, which recalls nothing for who asks next,
// whichever of several holders had them.
func TestManagerYields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		w.step(w.nodes, 0, 0, 0, 0)
		limit := &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 9, Revision: 1}
		take := func(n *node) []limiter.Charge {
			cs := []limiter.Charge{chargeOn("0nine", limit, 1)}
			if n.Take(context.Background(), cs, make([]limiter.Decision, 1)) != -1 {
				return nil
			}
			return cs
		}
		held := map[*node][][]limiter.Charge{}
		for i := range 9 {
			n := w.nodes[1+i%3]
			held[n] = append(held[n], take(n))
		}
		// In turns each of the three gives one up, and the next has it: the two others hold all of theirs.
		for i := range 30 {
			from, to := w.nodes[1+i%3], w.nodes[1+(i+1)%3]
			cs := held[from][0]
			held[from] = held[from][1:]
			from.Settle(cs, []int64{0}, make([]limiter.Decision, 1))
			from.Yield(&cs[0].Key)
			synctest.Wait() // its message has come
			began := time.Now()
			next := take(to)
			if next == nil {
				t.Fatalf("step %d: the slot that is free is not to be had", i)
			}
			if took := time.Since(began); took > 20*time.Millisecond {
				t.Fatalf("step %d: it took %v", i, took)
			}
			held[to] = append(held[to], next)
		}
		if n := w.nodes[0].count("headgate_lease_recalls_total"); n > 0 {
			t.Errorf("%v recalls", n)
		}
		if take(w.nodes[0]) != nil {
			t.Error("a tenth of nine")
		}
		key := limiter.Key{Tenant: "0nobody"}
		w.nodes[0].Yield(&key) // of nothing
	})
}
