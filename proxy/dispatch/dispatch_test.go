package dispatch_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headgate/proxy/dispatch"
	"headgate/proxy/queue"
)

// TestEverybodyIsServed: three nodes share eight slots; all requests come to one, none waits for long, never nine, and
// little of the slots' time is lost on the way from one node to another.
func TestEverybodyIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3, backends(8, "a"))
		w.settles()
		const each, hold = 80, 100 * time.Millisecond
		began := time.Now()
		var wg sync.WaitGroup
		var served atomic.Int64
		for _, n := range w.nodes {
			for range each {
				wg.Go(func() {
					g, err := n.Acquire(context.Background(), ticket("a"))
					if err != nil {
						t.Errorf("%v", err)
						return
					}
					served.Add(1)
					time.Sleep(hold)
					g.Release()
					g.Release()
				})
			}
		}
		wg.Wait()
		took := time.Since(began)
		best := 3 * each / 8 * hold
		if use := float64(best) / float64(took); use < .9 || served.Load() != 3*each {
			t.Errorf("%d served in %v: %.2f of the slots' time was used", served.Load(), took, use)
		} else {
			t.Logf("%.3f of the slots' time was used", use)
		}
		w.idle()
	})
}

// TestFastPath: what a lease in hand covers takes no message, while nobody waits.
func TestFastPath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(8, "a"))
		w.settles()
		n := w.nodes[1]
		g, err := n.Acquire(context.Background(), ticket("a"))
		if err != nil || g.Queued == 0 || g.Backend != "a" || g.Cost != 1 {
			t.Fatalf("%+v, %v", g, err)
		}
		g.Release()
		time.Sleep(200 * time.Millisecond)
		asks := n.hand.asks.Load()
		for range 10 {
			g, err := n.Acquire(context.Background(), ticket("a"))
			if err != nil || g.Queued != 0 {
				t.Fatalf("%+v, %v", g, err)
			}
			time.Sleep(50 * time.Millisecond)
			if b := w.nodes[0].State().Backends["a"]; w.nodes[0].State().Age(time.Now().UnixNano()) > time.Second || b.InUse > 1 {
				t.Errorf("%+v", b)
			}
			g.Release()
		}
		if n.hand.asks.Load() != asks {
			t.Error("it asked")
		}
		w.idle()
	})
}

// TestWhoLeavesFreesItsPlace: by its context, by other places, by its patience; before it is granted, and while.
func TestWhoLeavesFreesItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(1, "a"))
		w.settles()
		for _, n := range w.nodes {
			g, err := n.Acquire(context.Background(), ticket("a"))
			if err != nil {
				t.Fatal(err)
			}
			cause := errors.New("gone")
			ctx, cancel := context.WithCancelCause(context.Background())
			moved := make(chan struct{})
			var ticks atomic.Int64
			var wg sync.WaitGroup
			wg.Go(func() {
				if _, err := n.Acquire(ctx, ticket("a")); !errors.Is(err, cause) {
					t.Errorf("%v", err)
				}
			})
			wg.Go(func() {
				x := ticket("a")
				x.Watch = func() (<-chan struct{}, bool) {
					select {
					case <-moved:
						return nil, true
					default:
						return moved, false
					}
				}
				if _, err := n.Acquire(context.Background(), x); !errors.Is(err, dispatch.ErrMoved) {
					t.Errorf("%v", err)
				}
			})
			wg.Go(func() {
				x := ticket("a")
				x.Patience, x.Tick, x.TickEvery = time.Second, func() { ticks.Add(1) }, 300*time.Millisecond
				_, err := n.Acquire(context.Background(), x)
				var dropped *dispatch.Dropped
				if !errors.As(err, &dropped) || dropped.Reason != queue.Expired || dropped.RetryAfter < 250*time.Millisecond {
					t.Errorf("%v", err)
				}
			})
			synctest.Wait()
			if n.Waiting() != 3 {
				t.Errorf("%d wait", n.Waiting())
			}
			time.Sleep(500 * time.Millisecond)
			cancel(cause)
			close(moved)
			synctest.Wait()
			if n.Waiting() != 1 {
				t.Errorf("%d wait", n.Waiting())
			}
			time.Sleep(time.Second)
			wg.Wait()
			if ticks.Load() != 3 || n.count("headgate_queue_dropped_total", "ttl_expired") != 1 {
				t.Errorf("%d ticks, %v expired", ticks.Load(), n.count("headgate_queue_dropped_total"))
			}
			g.Release()
			time.Sleep(100 * time.Millisecond)
			if g, err = n.Acquire(context.Background(), ticket("a")); err != nil {
				t.Fatal(err)
			}
			g.Release()
			time.Sleep(time.Second)
		}
		w.idle()
	})
}

// TestMisses: where the lease has no slot the request waits on, keeps its place, and is served when there is one.
func TestMisses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(4, "a"))
		w.settles()
		w.truth.mu.Lock()
		w.truth.closed = true
		w.truth.mu.Unlock()
		var wg sync.WaitGroup
		for _, n := range w.nodes {
			for range 6 {
				wg.Go(func() {
					g, err := n.Acquire(context.Background(), ticket("a"))
					if err != nil {
						t.Errorf("%v", err)
						return
					}
					time.Sleep(10 * time.Millisecond)
					g.Release()
				})
			}
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if n := w.nodes[0].count("headgate_queue_misses_total"); n < 2 || n > 2000 || w.nodes[0].Waiting() != 6 {
			t.Errorf("%v misses, %d wait", n, w.nodes[0].Waiting())
		}
		w.truth.mu.Lock()
		w.truth.closed = false
		w.truth.mu.Unlock()
		began := time.Now()
		wg.Wait()
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("it took %v", took)
		}
		w.idle()
	})
}

// TestNobodyIsServedAfterItsPatience, also where that ends while the lease is asked for: the slot goes back.
func TestNobodyIsServedAfterItsPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(1, "a"))
		w.settles()
		for _, n := range w.nodes {
			n.hand.slow.Store(int64(200 * time.Millisecond))
			x := ticket("a")
			x.Patience = 100 * time.Millisecond
			_, err := n.Acquire(context.Background(), x)
			var dropped *dispatch.Dropped
			if !errors.As(err, &dropped) || dropped.Reason != queue.Expired {
				t.Errorf("%v", err)
			}
			n.hand.slow.Store(0)
			w.idle()
			g, err := n.Acquire(context.Background(), ticket("a"))
			if err != nil {
				t.Fatal(err)
			}
			g.Release()
		}
	})
}

// TestMissesOfAnotherQueue: a try that fails when the queue that granted it has moved, or given the ticket up, joins the
// queue that there is.
func TestMissesOfAnotherQueue(t *testing.T) {
	for _, slow := range []time.Duration{400 * time.Millisecond, queue.GrantTimeout + time.Second} {
		for _, to := range []int{1, 0} {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2, backends(1, "a"))
				w.settles()
				n := w.nodes[1]
				n.hand.slow.Store(int64(slow))
				n.hand.none.Store(true)
				began := time.Now()
				var wg sync.WaitGroup
				wg.Go(func() {
					g, err := n.Acquire(context.Background(), ticket("a"))
					if err != nil {
						t.Errorf("%v", err)
						return
					}
					if took := time.Since(began); took > slow+time.Second {
						t.Errorf("it took %v", took)
					}
					g.Release()
				})
				time.Sleep(50 * time.Millisecond)
				w.schedules(w.nodes[to])
				time.Sleep(slow - 60*time.Millisecond)
				n.hand.slow.Store(0)
				time.Sleep(20 * time.Millisecond) // it has failed
				n.hand.none.Store(false)
				wg.Wait()
				w.idle()
			})
		}
	}
}

// TestContendedIsToldAtOnce: where somebody waits, whoever has free slots in hand gives them back within milliseconds, and takes
// no more of them past those who wait.
func TestContendedIsToldAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3, backends(2, "a"))
		w.settles()
		n := w.nodes[1]
		g, err := n.Acquire(context.Background(), ticket("a"))
		if err != nil {
			t.Fatal(err)
		}
		g.Release() // into its hand
		time.Sleep(2 * time.Second)
		yields := n.hand.yields.Load()
		x := ticket("a")
		x.Places[0].Cost = 2
		first, err := w.nodes[0].Acquire(context.Background(), x)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			g, err := w.nodes[2].Acquire(context.Background(), ticket("a"))
			if err != nil {
				t.Errorf("%v", err)
				return
			}
			g.Release()
		})
		time.Sleep(10 * time.Millisecond)
		if b := n.State().Backends["a"]; !b.Contended || n.hand.yields.Load() == yields {
			t.Errorf("%+v, %d yields", b, n.hand.yields.Load()-yields)
		}
		first.Release()
		wg.Wait()
		w.idle()
	})
}

// TestSchedulerDies: its tickets wait where they are, in their order, go to the next, and no slot is given twice.
func TestSchedulerDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3, backends(2, "a"))
		w.settles()
		n := w.nodes[1]
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		first, err := n.Acquire(context.Background(), ticket("a"))
		if err != nil {
			t.Fatal(err)
		}
		second, err := w.nodes[2].Acquire(context.Background(), ticket("a"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			n := w.nodes[1+i%2]
			wg.Go(func() {
				g, err := n.Acquire(context.Background(), ticket("a"))
				if err != nil {
					t.Errorf("%v", err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				time.Sleep(100 * time.Millisecond)
				g.Release()
			})
			time.Sleep(20 * time.Millisecond)
		}
		w.nodes[0].kill()
		w.schedules(nil)
		time.Sleep(700 * time.Millisecond)
		if s := n.State(); s.Reachable || s.Scheduler != "" || n.Waiting() != 5 {
			t.Errorf("%+v, %d wait", s, n.Waiting())
		}
		w.schedules(w.nodes[2])
		time.Sleep(400 * time.Millisecond)
		if s := n.State(); !s.Reachable || w.nodes[2].State().Scheduler != "self" {
			t.Errorf("%+v", s)
		}
		if len(order) != 0 {
			t.Errorf("%v were served while all slots were in use", order)
		}
		first.Release()
		second.Release()
		wg.Wait()
		for i, x := range order {
			if max(i-x, x-i) > 1 {
				t.Errorf("served in the order %v", order)
				break
			}
		}
		w.idle()
	})
}

// TestTakeoverKnowsThePace: a new scheduler lets as many wait as the one before it did, and so does a node by itself, for its part.
func TestTakeoverKnowsThePace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(4, "a"))
		w.settles()
		var wg sync.WaitGroup
		for range 100 {
			g, err := w.nodes[1].Acquire(context.Background(), ticket("a"))
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				time.Sleep(100 * time.Millisecond)
				g.Release()
			})
		}
		wg.Wait()
		time.Sleep(time.Second)
		before := w.nodes[1].State().Backends["a"].Places
		if before < 70 || before > 90 { // 40/s for 2 s
			t.Fatalf("%d places", before)
		}
		w.schedules(nil)
		time.Sleep(200 * time.Millisecond)
		if alone := w.nodes[1].State().Backends["a"].Places; alone < before*2/5 || alone > before*3/5 {
			t.Errorf("%d places of one of two nodes, where there were %d", alone, before)
		}
		w.schedules(w.nodes[1])
		time.Sleep(400 * time.Millisecond)
		if after := w.nodes[0].State().Backends["a"].Places; after < before*9/10 || after > before*11/10 {
			t.Errorf("%d places, before %d", after, before)
		}
		w.idle()
	})
}

// TestAlone: without a scheduler within reach a node goes by its part of the slots after ten seconds, and not before.
func TestAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3, backends(8, "a"))
		w.settles()
		n := w.nodes[1]
		w.net.Cut("n2", "n1", "n3")
		time.Sleep(4 * time.Second)
		if n.State().Reachable {
			t.Error("it has not noticed")
		}
		var in, most, served atomic.Int64
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				g, err := n.Acquire(context.Background(), ticket("a"))
				if err != nil {
					t.Errorf("%v", err)
					return
				}
				if now := in.Add(1); now > most.Load() {
					most.Store(now)
				}
				time.Sleep(100 * time.Millisecond)
				in.Add(-1)
				g.Release()
				served.Add(1)
			})
		}
		time.Sleep(5 * time.Second)
		if served.Load() != 0 || n.State().Alone {
			t.Errorf("%d served too soon", served.Load())
		}
		wg.Wait()
		if most.Load() != 2 || !n.State().Alone {
			t.Errorf("%d at once of a third of eight", most.Load())
		}
		w.net.Heal()
		time.Sleep(2 * time.Second)
		if s := n.State(); s.Alone || !s.Reachable {
			t.Errorf("%+v", s)
		}
		g, err := n.Acquire(context.Background(), ticket("a"))
		if err != nil {
			t.Fatal(err)
		}
		g.Release()
		w.idle()
		// One that was alone and is to schedule goes by leases again.
		w.net.Cut("n2", "n1", "n3")
		time.Sleep(15 * time.Second)
		if !n.State().Alone {
			t.Error("it is not alone")
		}
		w.net.Heal()
		w.schedules(n)
		w.settles()
		asks := n.hand.asks.Load()
		if g, err = n.Acquire(context.Background(), ticket("a")); err != nil || n.State().Alone || n.hand.asks.Load() == asks && g.Queued > 0 {
			t.Errorf("%v, %+v", err, n.State())
		}
		g.Release()
		w.idle()
	})
}

// TestStorm: views change, streams break, clients leave; no slot is given twice, none is lost, and everybody hears something.
func TestStorm(t *testing.T) {
	for seed := range uint64(6) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			w := newWorld(t, 4, backends(5, "a", "b"))
			w.settles()
			var wg sync.WaitGroup
			var outcomes [3]atomic.Int64
			end := time.Now().Add(20 * time.Second)
			for i := range 60 {
				n, r := w.nodes[i%4], rand.New(rand.NewPCG(seed, uint64(i)))
				wg.Go(func() {
					for time.Now().Before(end) {
						x := ticket([][]string{{"a"}, {"b", "a"}, {"a", "b"}}[r.IntN(3)]...)
						x.Class = queue.Class(r.IntN(3))
						x.Patience = time.Duration(r.IntN(2000)) * time.Millisecond
						x.Places[0].Cost = int64(1 + r.IntN(3))
						ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(1500))*time.Millisecond)
						g, err := n.Acquire(ctx, x)
						var dropped *dispatch.Dropped
						switch {
						case err == nil:
							outcomes[0].Add(1)
							time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
							g.FirstByte(time.Millisecond)
							g.Failed()
							g.Pushback(time.Second)
							g.Release()
						case errors.Is(err, context.DeadlineExceeded):
							outcomes[1].Add(1)
						case errors.As(err, &dropped):
							outcomes[2].Add(1)
							time.Sleep(20 * time.Millisecond)
						default:
							t.Errorf("%v", err)
						}
						cancel()
						time.Sleep(time.Millisecond)
					}
				})
			}
			for time.Now().Before(end) {
				time.Sleep(time.Duration(rng.IntN(600)) * time.Millisecond)
				switch rng.IntN(6) {
				case 0:
					w.schedules(nil)
				case 1, 2:
					w.schedules(w.nodes[rng.IntN(4)])
				case 3:
					w.net.Cut("n2", "n1")
				case 4:
					w.net.Delay("n3", "n1", time.Duration(rng.IntN(50))*time.Millisecond)
				default:
					w.net.Heal()
				}
			}
			w.net.Heal()
			w.schedules(w.nodes[rng.IntN(4)])
			wg.Wait()
			if outcomes[0].Load() < 500 || outcomes[1].Load() == 0 || outcomes[2].Load() == 0 {
				t.Errorf("served, gave up, dropped: %v", []int64{outcomes[0].Load(), outcomes[1].Load(), outcomes[2].Load()})
			}
			t.Logf("served, gave up, dropped: %v", []int64{outcomes[0].Load(), outcomes[1].Load(), outcomes[2].Load()})
			time.Sleep(4 * time.Second)
			w.idle()
		})
	}
}

// TestBoundIsTheClusters: the queue is full for the requests of every node, not of the one alone that keeps it.
func TestBoundIsTheClusters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3, backends(8, "a"), func(c *dispatch.Config) { // the way to the queue takes a while
			now, calls := c.Now, new(atomic.Int64)
			c.Now = func() int64 { return now() + calls.Add(1) }
		})
		w.settles()
		const each = 100
		ctx, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		refused := make([]atomic.Int64, len(w.nodes))
		for i, n := range w.nodes {
			for range each {
				wg.Go(func() {
					fresh := ticket("a")
					fresh.Waited = 0
					g, err := n.Acquire(ctx, fresh)
					if _, full := errors.AsType[*dispatch.Dropped](err); full {
						refused[i].Add(1)
					}
					if err == nil {
						<-ctx.Done()
						g.Release()
					}
				})
			}
		}
		synctest.Wait()
		time.Sleep(time.Second)
		waiting := 0
		for i, n := range w.nodes {
			waiting += n.Waiting()
			if refused[i].Load() == 0 {
				t.Errorf("node %d: none of %d was refused", i, each)
			}
		}
		if waiting > 4*8 { // twice the slots, as long as nothing is known of their pace; some were on their way
			t.Errorf("%d wait for 8 slots", waiting)
		}
		leave()
		wg.Wait()
		w.idle()
	})
}
