package dispatch_test

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy/dispatch"
	"headgate/proxy/queue"
)

const takeover = 1070 * time.Millisecond

// rights are what package cluster's Fence says: a partition may be granted from by who has it in the view, from the
// first view on at once, later after the wait.
type rights struct {
	mu    sync.Mutex
	self  uint64
	start int64
	epoch uint64
}

func (r *rights) step(now int64, v *lease.View) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case v.OwnerOf(0).Incarnation != r.self:
		r.start = math.MaxInt64
	case v.Epoch == 1:
		r.start = now
	case r.start == math.MaxInt64 || r.epoch == 0:
		r.start = now + int64(takeover)
	}
	r.epoch = v.Epoch
}

func (r *rights) Left(now int64, _ uint32) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.epoch == 0 || now < r.start {
		return 0
	}
	return int64(980 * time.Millisecond)
}

func (r *rights) Lease(int64, uint64) int64 { return int64(980 * time.Millisecond) }

func (r *rights) Started(now int64, epoch uint64, _ uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.epoch == epoch && r.start != math.MaxInt64 {
		r.start = min(r.start, now)
	}
}

// leased is dispatch.Slots over a Manager, as a node has it, with the truth beside.
type leased struct {
	m    *lease.Manager
	w    *truth
	used map[string]int64 // under w.mu
	gone bool             // likewise
}

type leasedSlots struct {
	l       *leased
	cs      []limiter.Charge
	backend string
	cost    int64
}

func keyOf(backend string) limiter.Key {
	return limiter.Key{Tenant: "\x00backends", Limit: "slots", Subject: backend}
}

// Hold see dispatch.Slots.
func (l *leased) Hold(ctx context.Context, backend string, cost int64, ask bool) (dispatch.Held, bool) {
	l.w.mu.Lock()
	limit := &limiter.Limit{Algorithm: limiter.Semaphore, Burst: l.w.slots[backend], Revision: 1}
	l.w.mu.Unlock()
	cs, ds := []limiter.Charge{{Key: keyOf(backend), Limit: limit, Cost: cost, Apart: limiter.ByDeny}}, make([]limiter.Decision, 1)
	if ask {
		if l.m.Take(ctx, cs, ds) != -1 {
			return nil, false
		}
	} else if !l.m.TakeHeld(cs, ds) {
		return nil, false
	}
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	if l.gone {
		return nil, false
	}
	l.used[backend] += cost
	l.w.inUse[backend] += cost
	l.w.most[backend] = max(l.w.most[backend], l.w.inUse[backend])
	return &leasedSlots{l, cs, backend, cost}, true
}

// Yield see dispatch.Slots.
func (l *leased) Yield(backend string) {
	key := keyOf(backend)
	l.m.Yield(&key)
}

// Release see dispatch.Held.
func (s *leasedSlots) Release(yield bool) {
	s.l.w.mu.Lock()
	if !s.l.gone {
		s.l.used[s.backend] -= s.cost
		s.l.w.inUse[s.backend] -= s.cost
	}
	s.l.w.mu.Unlock()
	s.l.m.Settle(s.cs, []int64{0}, make([]limiter.Decision, 1))
	if yield {
		s.l.Yield(s.backend)
	}
}

// lend gives a node a Manager; it is called before its server serves.
func (n *node) lend(s *grpc.Server) *leased {
	n.self = lease.Member{Name: n.name, Incarnation: n.id, Address: n.host.Address(rpcPort)}
	n.rights = &rights{self: n.id, start: math.MaxInt64}
	m, err := lease.NewManager(lease.ManagerConfig{
		Self: n.self, Rights: n.rights, Wait: takeover, Client: n.client, Drop: n.drop,
		Clock: func() lease.Instant {
			now := time.Now().UnixNano()
			return lease.Instant{Now: now, Wall: now}
		},
	})
	if err != nil {
		n.w.t.Fatal(err)
	}
	m.Register(s)
	n.leases = &leased{m: m, w: n.w.truth, used: map[string]int64{}}
	return n.leases
}

// step has all living nodes go on to a view with the slots at a node, and schedule there.
func (w *world) step(owner *node) {
	v := &lease.View{Epoch: 1, Place: func(string) uint32 { return 0 }}
	if w.view != nil {
		v.Epoch = w.view.Epoch + 1
	}
	for _, n := range w.nodes {
		if n.dead {
			continue
		}
		if n == owner {
			v.Owners = []int32{int32(len(v.Members))}
		}
		v.Members = append(v.Members, n.self)
	}
	w.mu.Lock()
	w.view = v
	w.mu.Unlock()
	for _, n := range w.nodes {
		if !n.dead {
			n.rights.step(time.Now().UnixNano(), v)
			n.leases.m.Step(v)
		}
	}
	w.schedules(owner)
}

// hammer has each node keep so many requests waiting or running for a time; it returns the slot-time that was used.
func (w *world) hammer(backend string, each int, hold, long time.Duration) time.Duration {
	var used atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(long)
	for _, n := range w.nodes {
		for range each {
			wg.Go(func() {
				for time.Now().Before(end) {
					g, err := n.Acquire(context.Background(), ticket(backend))
					if err != nil {
						time.Sleep(20 * time.Millisecond)
						continue
					}
					began := time.Now()
					time.Sleep(hold)
					used.Add(int64(min(time.Since(began), max(0, end.Sub(began)))))
					g.Release()
				}
			})
		}
	}
	wg.Wait()
	return time.Duration(used.Load())
}

// TestFreedSlotsAreUsed: with leases as they are, a slot that one node frees is used by another within milliseconds,
// wherever the queue is kept and however long messages take; never one too many.
func TestFreedSlotsAreUsed(t *testing.T) {
	for _, tc := range []struct {
		name        string
		nodes       int
		slots       int64
		hold, delay time.Duration
		each        int
		least       float64
	}{
		{"8 slots of 100 ms, 3 nodes", 3, 8, 100 * time.Millisecond, 0, 20, .95},
		{"8 slots of 100 ms, 3 nodes 1 ms apart", 3, 8, 100 * time.Millisecond, time.Millisecond, 20, .9},
		{"32 slots of 500 ms, 4 nodes", 4, 32, 500 * time.Millisecond, 0, 30, 31. / 32},
		{"32 slots of 500 ms, 4 nodes 1 ms apart", 4, 32, 500 * time.Millisecond, time.Millisecond, 30, 31. / 32},
		{"1 slot of 20 ms, 3 nodes", 3, 1, 20 * time.Millisecond, 0, 5, .9},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newLeasedWorld(t, tc.nodes, backends(tc.slots, "a"))
				for _, n := range w.nodes {
					for _, to := range w.nodes {
						if n != to {
							w.net.Delay(n.name, to.name, tc.delay)
						}
					}
				}
				w.settles()
				const long = 20 * time.Second
				used := w.hammer("a", tc.each, tc.hold, long)
				misses := 0.
				for _, n := range w.nodes {
					misses += n.count("headgate_queue_misses_total")
				}
				part := float64(used) / float64(long) / float64(tc.slots)
				t.Logf("%.3f of the slots' time was used; %v misses", part, misses)
				if part < tc.least {
					t.Errorf("%.3f of the slots' time was used, want %.3f", part, tc.least)
				}
				w.idle()
			})
		})
	}
}

// TestLeasedSchedulerDies: the node that keeps queue and leases is killed under load. Slots are never given twice, and
// the others go on with all that are left, then, its own slots being free again, with all.
func TestLeasedSchedulerDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLeasedWorld(t, 4, backends(16, "a"))
		w.settles()
		var wg sync.WaitGroup
		stop := make(chan struct{})
		var served atomic.Int64
		for i, n := range w.nodes {
			for range 10 {
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
						}
						x := ticket("a")
						x.Class = queue.Class(i % 3)
						g, err := n.Acquire(context.Background(), x)
						if err != nil {
							time.Sleep(20 * time.Millisecond)
							continue
						}
						time.Sleep(50 * time.Millisecond)
						g.Release()
						served.Add(1)
					}
				})
			}
		}
		time.Sleep(3 * time.Second)
		before := served.Swap(0)
		first := w.nodes[0]
		w.crash(first)
		time.Sleep(500 * time.Millisecond)
		w.step(w.nodes[1])
		time.Sleep(3 * time.Second)
		served.Store(0)
		time.Sleep(3 * time.Second)
		if after := served.Load(); after < before*9/10 {
			t.Errorf("%d were served in three seconds before, %d after", before, after)
		}
		close(stop)
		wg.Wait()
		w.idle()
	})
}

// TestLeasedStorm: the leases' owner and scheduler moves, messages are lost and late; slots are never given twice, and
// everybody is served in the end.
func TestLeasedStorm(t *testing.T) {
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			w := newLeasedWorld(t, 4, backends(6, "a", "b"), func(c *dispatch.Config) { c.Alone = -1 })
			w.settles()
			var wg sync.WaitGroup
			var served, dropped atomic.Int64
			end := time.Now().Add(20 * time.Second)
			for i := range 40 {
				n, r := w.nodes[i%4], rand.New(rand.NewPCG(seed, uint64(i)))
				wg.Go(func() {
					for time.Now().Before(end) {
						x := ticket([][]string{{"a"}, {"b", "a"}, {"a", "b"}}[r.IntN(3)]...)
						x.Patience = time.Duration(r.IntN(3000)) * time.Millisecond
						x.Places[0].Cost = int64(1 + r.IntN(3))
						g, err := n.Acquire(context.Background(), x)
						if err != nil {
							dropped.Add(1)
							time.Sleep(20 * time.Millisecond)
							continue
						}
						served.Add(1)
						time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond)
						g.Release()
						time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
					}
				})
			}
			for time.Now().Before(end) {
				time.Sleep(time.Duration(300+rng.IntN(1200)) * time.Millisecond)
				switch rng.IntN(5) {
				case 0, 1:
					w.step(w.nodes[rng.IntN(4)])
				case 2:
					w.net.Cut("n2", "n1", "n3")
				case 3:
					w.net.Delay("n3", "n1", time.Duration(rng.IntN(50))*time.Millisecond)
				default:
					w.net.Heal()
				}
			}
			w.net.Heal()
			wg.Wait()
			t.Logf("%d served, %d dropped", served.Load(), dropped.Load())
			if served.Load() < 500 {
				t.Errorf("%d were served", served.Load())
			}
			time.Sleep(4 * time.Second)
			w.settles()
			// All slots are to be had at once, wherever they were.
			w.hammer("a", 3, 50*time.Millisecond, time.Second)
			if used := w.hammer("a", 6, 100*time.Millisecond, 2*time.Second); used < 2*6*time.Second*9/10 {
				t.Errorf("%v of 12 s of slots were used afterwards", used)
			}
			w.idle()
		})
	}
}
