package dispatch_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/proxy/capacity"
	"headgate/proxy/dispatch"
	pb "headgate/proxy/dispatch/dispatchpb"
	"headgate/proxy/queue"
)

// stream opens one from a node to the scheduler by hand.
func (n *node) stream(ctx context.Context, to *node) pb.Dispatch_ScheduleClient {
	n.w.t.Helper()
	cc, err := n.client(to.host.Address(rpcPort))
	if err != nil {
		n.w.t.Fatal(err)
	}
	s, err := pb.NewDispatchClient(cc).Schedule(ctx)
	if err != nil {
		n.w.t.Fatal(err)
	}
	return s
}

// refusal is with which code a stream ends.
func refusal(s pb.Dispatch_ScheduleClient) codes.Code {
	for {
		if _, err := s.Recv(); err != nil {
			return status.Code(err)
		}
	}
}

// TestNodesSpeakForThemselves: who speaks for another, says nonsense, or comes to the wrong place is refused, and the streams of
// others go on.
func TestNodesSpeakForThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3, backends(2, "a"), func(c *dispatch.Config) {
			c.Peer = func(_ context.Context, incarnation uint64) error {
				if incarnation > 3 {
					return errors.New("it is of another node")
				}
				return nil
			}
		})
		w.settles()
		n := w.nodes[2]
		bad := []struct {
			name string
			to   *node
			say  []*pb.Up
			code codes.Code
		}{
			{"no hello", w.nodes[0], []*pb.Up{{}}, codes.InvalidArgument},
			{"of another node", w.nodes[0], []*pb.Up{{Hello: &pb.Hello{Node: 4}}}, codes.PermissionDenied},
			{"the scheduler's own", w.nodes[0], []*pb.Up{{Hello: &pb.Hello{Node: 1}}}, codes.InvalidArgument},
			{"nobody", w.nodes[0], []*pb.Up{{Hello: &pb.Hello{}}}, codes.InvalidArgument},
			{"elsewhere", w.nodes[1], []*pb.Up{{Hello: &pb.Hello{Node: 3}}}, codes.FailedPrecondition},
		}
		for _, tc := range bad {
			ctx, cancel := context.WithCancel(context.Background())
			s := n.stream(ctx, tc.to)
			for _, u := range tc.say {
				_ = s.Send(u) // Recv says why
			}
			if code := refusal(s); code != tc.code {
				t.Errorf("%s: %v", tc.name, code)
			}
			cancel()
		}
		if broke := n.count("headgate_queue_reconnects_total"); broke != 0 {
			t.Errorf("%v links of the honest node broke", broke)
		}
		// These take the node's own stream's place, and end.
		for name, u := range map[string]*pb.Up{
			"twice":    {Hello: &pb.Hello{Node: 3}},
			"nonsense": {Uses: []*pb.Use{{InUse: -1}}},
		} {
			ctx, cancel := context.WithCancel(context.Background())
			s := n.stream(ctx, w.nodes[0])
			_ = s.Send(&pb.Up{Hello: &pb.Hello{Node: 3}})
			_ = s.Send(u) // Recv says why
			if code := refusal(s); code != codes.InvalidArgument {
				t.Errorf("%s: %v", name, code)
			}
			cancel()
			time.Sleep(time.Second)
		}
		if m := w.nodes[0].count("headgate_queue_malformed_total"); m != 6 {
			t.Errorf("%v are counted as refused", m)
		}
		w.settles()
		g, err := n.Acquire(context.Background(), ticket("a"))
		if err != nil {
			t.Fatal(err)
		}
		g.Release()
		w.idle()
	})
}

// TestHungNode: what was granted to a node that says nothing any more, and takes nothing, goes to others within seconds.
func TestHungNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(1, "a"))
		w.settles()
		n := w.nodes[1]
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		s := n.stream(ctx, w.nodes[0])
		_ = s.Send(&pb.Up{Hello: &pb.Hello{Node: 77}})
		f, err := s.Recv()
		if err != nil || !f.GetState().GetWhole() || len(f.GetState().GetBackends()) != 1 {
			t.Fatalf("%v, %v", f, err)
		}
		for id := range uint64(2) {
			_ = s.Send(&pb.Up{Joins: []*pb.Ticket{{Id: id + 1, Waited: 1, Patience: int64(time.Minute), Places: []*pb.Place{{Backend: []byte("a"), Cost: 1}}}}})
		}
		synctest.Wait()
		time.Sleep(200 * time.Millisecond)
		if b := w.nodes[0].State().Backends["a"]; b.Granted != 1 || b.Waiting != 1 || !b.Contended {
			t.Fatalf("%+v", b)
		}
		began := time.Now()
		g, err := n.Acquire(context.Background(), ticket("a"))
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < time.Second || took > 3*time.Second {
			t.Errorf("it took %v", took)
		}
		g.Release()
		w.idle()
	})
}

// TestPolicyChanges: a backend that goes takes its tickets with it, one that comes is used at once; in whatever order
// the nodes hear of it.
func TestPolicyChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(1, "a"))
		w.settles()
		for _, n := range w.nodes {
			first, err := n.Acquire(context.Background(), ticket("a"))
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				var dropped *dispatch.Dropped
				if _, err := n.Acquire(context.Background(), ticket("a")); !errors.As(err, &dropped) || dropped.Reason != queue.NoBackend {
					t.Errorf("%v", err)
				}
			})
			synctest.Wait()
			time.Sleep(100 * time.Millisecond)
			// A ticket for what only its own node knows yet.
			w.truth.mu.Lock()
			w.truth.slots["b"] = 1
			w.truth.mu.Unlock()
			w.nodes[1].Apply(backends(1, "b"), queue.Config{})
			wg.Go(func() {
				g, err := w.nodes[1].Acquire(context.Background(), ticket("b"))
				if err != nil {
					t.Errorf("%v", err)
					return
				}
				g.Release()
			})
			time.Sleep(100 * time.Millisecond)
			w.nodes[0].Apply(backends(1, "b"), queue.Config{})
			wg.Wait()
			first.Release()
			time.Sleep(2 * time.Second)
			for _, n := range w.nodes {
				if s := n.State(); len(s.Backends) != 1 || s.Backends["b"].Slots != 1 {
					t.Errorf("%+v", s)
				}
				n.Apply(backends(1, "a"), queue.Config{})
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
}

// lessons is a Learner that notes what it is told, and says 1 of everything, at first.
type lessons struct {
	mu    sync.Mutex
	seen  capacity.Observation
	inUse []int64
	seeds []int64
	limit int64
}

func (l *lessons) Observe(_ int64, o capacity.Observation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen.Done += o.Done
	l.seen.SlotTime += o.SlotTime
	l.seen.FirstByte += o.FirstByte
	l.seen.FirstBytes += o.FirstBytes
	l.seen.Answer += o.Answer
	l.seen.Answers += o.Answers
	l.seen.Pushbacks += o.Pushbacks
	l.seen.Failures += o.Failures
	l.seen.Pause = max(l.seen.Pause, o.Pause)
	l.inUse = append(l.inUse, o.InUse)
}

func (l *lessons) Limit(int64, string) (int64, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.limit, true
}

func (l *lessons) Seed(_ string, limit int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seeds = append(l.seeds, limit)
}

// TestLearns: what requests found at backends, at whatever node, is told where it is learnt, once; what is learnt binds all
// nodes, and the next scheduler begins with it.
func TestLearns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var learners []*lessons
		w := newWorld(t, 3, backends(8, "a"), func(c *dispatch.Config) {
			l := &lessons{limit: 2}
			learners = append(learners, l)
			c.Learner = l
		})
		w.settles()
		time.Sleep(time.Second)
		var wg sync.WaitGroup
		began := time.Now()
		for _, n := range w.nodes {
			for range 4 {
				wg.Go(func() {
					g, err := n.Acquire(context.Background(), ticket("a"))
					if err != nil {
						t.Errorf("%v", err)
						return
					}
					g.FirstByte(10 * time.Millisecond)
					g.Answered(20 * time.Millisecond)
					g.Pushback(5 * time.Second)
					g.Failed()
					g.Failed() // is the same failure
					time.Sleep(100 * time.Millisecond)
					g.Release()
				})
			}
		}
		wg.Wait()
		if took := time.Since(began); took < 600*time.Millisecond {
			t.Errorf("twelve took %v, two at a time", took)
		}
		time.Sleep(time.Second)
		l := learners[0]
		l.mu.Lock()
		want := capacity.Observation{Done: 12, SlotTime: 1200 * time.Millisecond, FirstByte: 120 * time.Millisecond, FirstBytes: 12, Answer: 240 * time.Millisecond, Answers: 12, Pushbacks: 12, Failures: 12}
		got := l.seen
		got.Pause = 0
		if got.SlotTime -= want.SlotTime; got.SlotTime < 0 || got.SlotTime > 50*time.Millisecond {
			t.Errorf("slot-time %v too much", got.SlotTime)
		}
		got.SlotTime = want.SlotTime
		if got != want || l.seen.Pause < 4900*time.Millisecond || l.seen.Pause > 5*time.Second || slices.Max(l.inUse) != 2 {
			t.Errorf("%+v, in use %v", l.seen, l.inUse)
		}
		l.mu.Unlock()
		for _, n := range w.nodes {
			if b := n.State().Backends["a"]; b.Limit != 2 || !b.Limited || !b.Stale {
				t.Errorf("%+v", b)
			}
			for _, name := range []string{"headgate_slots_limit", "headgate_backend_stale"} {
				if v := n.count(name); (n == w.nodes[0]) != (v > 0) {
					t.Errorf("node %d: %s %v", n.id, name, v)
				}
			}
		}
		for _, l := range learners[1:] {
			l.mu.Lock()
			if l.inUse != nil {
				t.Error("one that does not schedule was told")
			}
			l.mu.Unlock()
		}
		w.schedules(w.nodes[1])
		w.settles()
		learners[1].mu.Lock()
		if !slices.Equal(learners[1].seeds, []int64{2, 2, 2}) { // its own, and what two others say
			t.Errorf("%v", learners[1].seeds)
		}
		learners[1].mu.Unlock()
		w.idle()
	})
}

// TestStops: when a node stops, whoever waits there is told.
func TestStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, backends(1, "a"))
		w.settles()
		for _, n := range []*node{w.nodes[1], w.nodes[0]} {
			g, err := n.Acquire(context.Background(), ticket("a"))
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			var dropped *dispatch.Dropped
			wg.Go(func() {
				if _, err := n.Acquire(context.Background(), ticket("a")); !errors.As(err, &dropped) || dropped.Reason != queue.NoBackend {
					t.Errorf("%v", err)
				}
			})
			synctest.Wait()
			n.kill()
			wg.Wait()
			g.Release()
			if _, err := n.Acquire(context.Background(), ticket("unknown")); !errors.As(err, &dropped) {
				t.Errorf("%v", err)
			}
		}
	})
}

// TestPlaced: what went where at one node all others hear, once each, whoever keeps the queue; a flood of it is cut off, and
// costs nobody a place.
func TestPlaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		heard := map[uint64]map[dispatch.Placement]int{}
		var mu sync.Mutex
		w := newWorld(t, 3, backends(2, "a"), func(c *dispatch.Config) {
			mine := map[dispatch.Placement]int{}
			heard[c.Self] = mine
			c.Placed = func(p dispatch.Placement) {
				mu.Lock()
				defer mu.Unlock()
				mine[p]++
			}
		})
		want := func(of uint64, n, once int) {
			t.Helper()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			for self, got := range heard {
				n := n
				if self == of {
					n = 0
				}
				if len(got) != n {
					t.Errorf("node %d heard of %d placements, want %d", self, len(got), n)
				}
				for p, times := range got {
					if times != once {
						t.Errorf("node %d heard of %v %d times", self, p, times)
					}
				}
				clear(got)
			}
		}
		for _, keeps := range w.nodes[:2] {
			w.schedules(keeps)
			w.settles()
			for _, n := range w.nodes {
				for i := range uint64(5) {
					n.Placed(dispatch.Placement{Prompt: i + 1, Endpoint: uint32(n.id)})
				}
				want(n.id, 5, 1)
			}
		}
		n := w.nodes[2]
		for i := range uint64(100_000) {
			n.Placed(dispatch.Placement{Prompt: i})
		}
		g, err := n.Acquire(t.Context(), ticket("a"))
		if err != nil {
			t.Fatal(err)
		}
		g.Release()
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		mu.Lock()
		few := len(heard[1])
		clear(heard[1])
		clear(heard[2])
		mu.Unlock()
		if few == 0 || few > 2*4096 {
			t.Errorf("%d of a flood were told", few)
		}
		w.idle()
	})
}
