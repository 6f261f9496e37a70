package lease_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"headgate/cluster/clustertest"
	"headgate/lease"
	"headgate/lease/leasepb"
	"headgate/limiter"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	rpcPort = 7947
	wait    = 1070 * time.Millisecond // of a takeover
	budget  = 250 * time.Millisecond
	parts   = 4
)

// place puts a bucket by the digit that its home begins with.
func place(home string) uint32 { return uint32(strings.TrimLeft(home, "\x00")[0]-'0') % parts }

// fakeRights are what package cluster's Fence says, without a ledger: a view lease that holds unless
// it is taken away.
type fakeRights struct {
	mu     sync.Mutex
	self   uint64
	epoch  uint64
	start  []int64
	since  []uint64
	lapsed bool
}

func (r *fakeRights) step(now int64, v *lease.View) {
	r.mu.Lock()
	defer r.mu.Unlock()
	follows := v.Epoch == r.epoch+1
	if r.start == nil {
		r.start, r.since = make([]int64, parts), make([]uint64, parts)
		for p := range r.start {
			r.start[p] = math.MaxInt64
		}
	}
	for p := range r.start {
		switch {
		case v.OwnerOf(uint32(p)).Incarnation != r.self:
			r.start[p] = math.MaxInt64
		case !follows || r.start[p] == math.MaxInt64:
			r.start[p], r.since[p] = now+int64(wait), v.Epoch
			if v.Epoch == 1 {
				r.start[p] = now
			}
		}
	}
	r.epoch = v.Epoch
}

func (r *fakeRights) lapse(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lapsed = yes
}

func (r *fakeRights) Left(now int64, p uint32) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lapsed || int(p) >= len(r.start) || now < r.start[p] {
		return 0
	}
	return int64(980 * time.Millisecond)
}

func (r *fakeRights) Lease(int64, uint64) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lapsed || r.epoch == 0 {
		return 0
	}
	return int64(980 * time.Millisecond)
}

func (r *fakeRights) Started(now int64, epoch uint64, p uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since[p] == epoch && now < r.start[p] && r.start[p] != math.MaxInt64 {
		r.start[p] = now
	}
}

// world is nodes on a network in memory.
type world struct {
	t     *testing.T
	net   *clustertest.Net
	nodes []*node
	view  *lease.View
	tune  []func(*lease.ManagerConfig)
}

type node struct {
	*lease.Manager
	w      *world
	self   lease.Member
	host   *clustertest.Host
	rights *fakeRights
	reg    *prometheus.Registry
	server *grpc.Server
	stop   context.CancelFunc
	ended  sync.WaitGroup

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
	dead  bool
}

func newWorld(t *testing.T, n int, tune ...func(*lease.ManagerConfig)) *world {
	w := &world{t: t, net: clustertest.New(1), tune: tune}
	for i := range n {
		w.add(fmt.Sprintf("n%d", i+1))
	}
	t.Cleanup(func() {
		for _, n := range w.nodes {
			n.kill()
		}
		w.net.Close()
	})
	return w
}

func (w *world) add(name string) *node {
	host := w.net.Host(name)
	n := &node{
		w: w, host: host, self: lease.Member{Name: name, Incarnation: uint64(len(w.nodes) + 1), Address: host.Address(rpcPort)},
		reg: prometheus.NewRegistry(), conns: map[string]*grpc.ClientConn{},
	}
	n.rights = &fakeRights{self: n.self.Incarnation}
	c := lease.ManagerConfig{Self: n.self, Clock: wallClock, Rights: n.rights, Wait: wait, Client: n.client, Drop: n.drop, Registerer: n.reg}
	for _, tune := range w.tune {
		tune(&c)
	}
	var err error
	n.Manager, err = lease.NewManager(c)
	if err != nil {
		w.t.Fatal(err)
	}
	lis, err := host.Listen(rpcPort)
	if err != nil {
		w.t.Fatal(err)
	}
	n.server = grpc.NewServer()
	n.Register(n.server)
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	n.ended.Go(func() { _ = n.server.Serve(lis) })
	n.ended.Go(func() { n.Run(ctx) })
	w.nodes = append(w.nodes, n)
	return n
}

// wallClock is the bubble's, or the machine's.
func wallClock() lease.Instant {
	now := time.Now().UnixNano()
	return lease.Instant{Now: now, Wall: now}
}

func (n *node) client(address string) (grpc.ClientConnInterface, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dead {
		return nil, net.ErrClosed
	}
	if c := n.conns[address]; c != nil {
		return c, nil
	}
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(n.host.Dial))
	if err == nil {
		n.conns[address] = c
	}
	return c, err
}

func (n *node) drop(address string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if c := n.conns[address]; c != nil {
		delete(n.conns, address)
		_ = c.Close()
	}
}

// kill is SIGKILL.
func (n *node) kill() {
	n.mu.Lock()
	dead := n.dead
	n.dead = true
	for _, c := range n.conns {
		_ = c.Close()
	}
	n.mu.Unlock()
	if dead {
		return
	}
	n.host.Crash()
	n.stop()
	n.server.Stop()
	n.ended.Wait()
}

// step has every living node go on to a view of these members, with these owners by partition.
func (w *world) step(members []*node, owners ...int32) {
	epoch := uint64(1)
	if w.view != nil {
		epoch = w.view.Epoch + 1
	}
	v := &lease.View{Epoch: epoch, Owners: owners, Place: place}
	for _, n := range members {
		v.Members = append(v.Members, n.self)
	}
	w.view = v
	for _, n := range w.nodes {
		if !n.dead {
			n.rights.step(wallClock().Now, v)
			n.Step(v)
		}
	}
	synctest.Wait()
}

// count is a metric's sum over its labels.
func (n *node) count(name string, label ...string) (sum float64) {
	families, err := n.reg.Gather()
	if err != nil {
		n.w.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if len(label) > 0 && !slices.ContainsFunc(m.GetLabel(), func(p *dto.LabelPair) bool { return p.GetValue() == label[0] }) {
				continue
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}

func chargeOn(tenant string, limit *limiter.Limit, cost int64) limiter.Charge {
	return limiter.Charge{Key: limiter.Key{Tenant: tenant, Limit: "tpm"}, Limit: limit, Cost: cost, Apart: limiter.ByDeny}
}

func bucketOf(count int64, per time.Duration, burst int64) *limiter.Limit {
	return &limiter.Limit{Rate: limiter.Rate{Count: count, Per: per}, Burst: burst, Revision: 1}
}

func (n *node) take(c limiter.Charge) (ok bool, d limiter.Decision) {
	cs, ds := []limiter.Charge{c}, make([]limiter.Decision, 1)
	return n.Take(context.Background(), cs, ds) == -1, ds[0]
}

// slow is a bucket of 50 that hardly fills while a test runs.
func slow() *limiter.Limit { return bucketOf(1, time.Second, 50) }

// TestManagersShareExactly: however three nodes take, all at once, they get what is there, to the unit.
func TestManagersShareExactly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		start := time.Now()
		limit := slow()
		var got atomic.Int64
		var wg sync.WaitGroup
		for range 60 {
			for _, n := range w.nodes {
				wg.Go(func() {
					if ok, _ := n.take(chargeOn("0acme", limit, 1)); ok {
						got.Add(1)
					}
				})
			}
		}
		wg.Wait()
		most := 50 + int64(time.Since(start)/time.Second)
		if n := got.Load(); n > most || n < 45 {
			t.Errorf("180 requests of three nodes got %d, of 50", n)
		}
		for range 40 { // what lay in one node's lease comes to whoever asks
			for _, n := range w.nodes {
				if ok, _ := n.take(chargeOn("0acme", limit, 1)); ok {
					got.Add(1)
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
		elapsed := int64(time.Since(start) / time.Second)
		if n := got.Load(); n > 50+elapsed || n < 50+elapsed-2 {
			t.Errorf("after %d s they got %d, want %d", elapsed, n, 50+elapsed)
		}
	})
}

// TestManagerGivesBackWhatCameTooLate: what an owner took for a request that waited no longer for its word goes back when
// that comes.
func TestManagerGivesBackWhatCameTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 0, 0, 0)
		units := chargeOn("0acme", bucketOf(1, 5*time.Second, 10), 1)
		slots := chargeOn("0acme", &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 10, Revision: 1}, 1)
		slots.Key.Limit = "streams"
		n := w.nodes[1]
		takeBoth := func() bool {
			return n.Take(context.Background(), []limiter.Charge{units, slots}, make([]limiter.Decision, 2)) == -1
		}
		if !takeBoth() {
			t.Fatal("refused one of ten")
		}
		w.net.Delay("n1", "n2", 300*time.Millisecond) // beyond the budget
		for range 3 {
			if takeBoth() {
				t.Fatal("admitted before the owner's word came")
			}
		}
		w.net.Heal()
		time.Sleep(time.Second)
		for i := range 9 {
			if !takeBoth() {
				t.Fatalf("%d of nine that are left", i)
			}
		}
		if takeBoth() {
			t.Error("eleven of ten")
		}
	})
}

// TestManagerSpendsWhatThaws: who asks because its lease is frozen is not refused for what lies in it.
func TestManagerSpendsWhatThaws(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 0, 0, 0)
		n, limit := w.nodes[1], bucketOf(5, time.Second, 5)
		for range 300 {
			n.take(chargeOn("0acme", limit, 1))
			time.Sleep(10 * time.Millisecond)
		}
		w.nodes[0].rights.lapse(true)
		time.Sleep(1500 * time.Millisecond)
		w.nodes[0].rights.lapse(false)
		for i := range 5 {
			if ok, d := n.take(chargeOn("0acme", limit, 1)); !ok || d.By != limiter.ByLease {
				t.Fatalf("%d of five that lie here: %+v", i, d)
			}
		}
	})
}

// TestManagersRefuseNoFreeSlot: as many requests at once as there are slots are all let through, by whatever nodes they come
// and wherever the slots were used before.
func TestManagersRefuseNoFreeSlot(t *testing.T) {
	for _, delay := range []time.Duration{0, time.Millisecond, 7 * time.Millisecond, 15 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 5)
			w.step(w.nodes, 3, 3, 3, 3)
			for _, from := range w.nodes {
				for _, to := range w.nodes {
					if from != to {
						w.net.Delay(from.self.Name, to.self.Name, delay)
					}
				}
			}
			eight := chargeOn("0eight", &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8, Revision: 1}, 1)
			atOnce := func(round int, by func(i int) *node) {
				var wg sync.WaitGroup
				for i := range 8 {
					wg.Go(func() {
						cs, ds := []limiter.Charge{eight}, make([]limiter.Decision, 1)
						if by(i).Take(context.Background(), cs, ds) != -1 {
							t.Errorf("%s each way, round %d: one of eight is refused: %+v", delay, round, ds[0])
							return
						}
						time.Sleep(time.Second)
						by(i).Settle(cs, []int64{0}, ds)
					})
				}
				wg.Wait()
			}
			for round, by := range []func(i int) *node{
				func(int) *node { return w.nodes[0] },
				func(i int) *node { return w.nodes[i%5] },
				func(int) *node { return w.nodes[0] },
				func(int) *node { return w.nodes[3] },
				func(i int) *node { return w.nodes[1+i%4] },
				func(int) *node { return w.nodes[4] },
			} {
				atOnce(round, by)
				time.Sleep(300 * time.Millisecond)
			}
		})
	}
}

// TestManagerAlone decides as a bucket in one process does.
func TestManagerAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := lease.NewAlone(wallClock, 0)
		if err != nil {
			t.Fatal(err)
		}
		one, err := lease.NewLocal(lease.Config{})
		if err != nil {
			t.Fatal(err)
		}
		limit, slots := bucketOf(10, time.Second, 20), &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 3}
		for i := range 300 {
			mine := []limiter.Charge{chargeOn("0acme", limit, int64(i%7)), {Key: limiter.Key{Tenant: "0acme", Limit: "inflight"}, Limit: slots, Cost: 1}}
			theirs := slices.Clone(mine)
			var ds, want [2]limiter.Decision
			got, ref := m.Take(t.Context(), mine, ds[:]), one.Take(wallClock().Now, theirs, want[:])
			if got != ref {
				t.Fatalf("take %d: refused %d, want %d\n%+v\n%+v", i, got, ref, ds, want)
			}
			// A refusal lease knows the level in whole units.
			if over := ds[max(got, 0)].RetryAfter - want[max(ref, 0)].RetryAfter; got >= 0 && (over < 0 || over > 100*time.Millisecond) {
				t.Fatalf("take %d: retry after %v, want %v\n%+v\n%+v", i, ds[got].RetryAfter, want[ref].RetryAfter, ds, want)
			}
			if i%2 == 0 {
				actual := []int64{int64(i % 5), 0}
				m.Settle(mine, actual, ds[:])
				one.Settle(wallClock().Now, theirs, actual, want[:])
			} else {
				m.Settle(mine[1:], []int64{0}, ds[1:])
				one.Settle(wallClock().Now, theirs[1:], []int64{0}, want[1:])
			}
			time.Sleep(time.Duration(i%3) * 40 * time.Millisecond)
		}
	})
}

// TestManagerAloneDurable: a limit that the ledger would fill works in a process that has none.
func TestManagerAloneDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := lease.NewAlone(wallClock, 0)
		if err != nil {
			t.Fatal(err)
		}
		day := bucketOf(100, 24*time.Hour, 100)
		if !day.Durable() {
			t.Fatal("the limit is not durable")
		}
		got := 0
		for range 150 {
			cs, ds := []limiter.Charge{chargeOn("0acme", day, 1)}, make([]limiter.Decision, 1)
			if m.Take(t.Context(), cs, ds) == -1 {
				got++
			}
		}
		if got != 100 {
			t.Errorf("took %d of 100", got)
		}
	})
}

// TestManagerAllocatesNothing where a lease is in hand.
func TestManagerAllocatesNothing(t *testing.T) {
	m, err := lease.NewAlone(wallClock, 0)
	if err != nil {
		t.Fatal(err)
	}
	cs, ds := []limiter.Charge{chargeOn("0acme", bucketOf(1e9, time.Second, 1e10), 1)}, make([]limiter.Decision, 1)
	ctx := t.Context()
	for range 1000 { // a grant is as large as the demand that was seen
		direct := 0
		n := testing.AllocsPerRun(20, func() {
			if m.Take(ctx, cs, ds) != -1 || ds[0].By != limiter.ByLease {
				direct++
			}
		})
		if direct > 0 {
			continue
		}
		if n != 0 {
			t.Errorf("%v allocations a take from the lease in hand", n)
		}
		return
	}
	t.Error("there was never a lease in hand for 21 takes")
}

// TestManagerCancelsAcrossOwners: all or nothing, also where two owners have a say.
func TestManagerCancelsAcrossOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		limit, tight := slow(), slow()
		n := w.nodes[2]
		tight.Burst = 3
		model := limiter.Charge{Key: limiter.Key{Limit: "1model"}, Limit: tight, Cost: 1, Apart: limiter.ByDeny}
		ok := 0
		for range 20 {
			cs, ds := []limiter.Charge{chargeOn("0acme", limit, 1), model}, make([]limiter.Decision, 2)
			switch n.Take(t.Context(), cs, ds) {
			case -1:
				ok++
			case 1:
			default:
				t.Fatalf("refused by another limit: %+v", ds)
			}
		}
		if ok != 3 {
			t.Errorf("%d of 20 passed both limits, want 3", ok)
		}
		rest := 0
		for range 60 {
			if ok, _ := n.take(chargeOn("0acme", limit, 1)); ok {
				rest++
			}
		}
		if rest != 47 {
			t.Errorf("%d were left of 50 after 3, want 47", rest)
		}
	})
}

// TestManagerDeadOwnerCostsOneBudget: the first to miss it pays, everybody else is told at once.
func TestManagerDeadOwnerCostsOneBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		w.net.Cut("n1", "n2", "n3")
		start := time.Now()
		ok, d := w.nodes[1].take(chargeOn("0acme", slow(), 1))
		if took := time.Since(start); ok || d.By != limiter.ByDeny || took > budget {
			t.Errorf("taken %v by %v after %v; want a denial within the budget", ok, d.By, took)
		}
		start = time.Now()
		for range 100 {
			if ok, d := w.nodes[1].take(chargeOn("0acme", slow(), 1)); ok || d.By != limiter.ByDeny {
				t.Fatalf("taken %v by %v", ok, d.By)
			}
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("100 more waited %v, want 0", took)
		}
		if s := w.nodes[1].Degraded(); !strings.Contains(s, "n1") {
			t.Errorf("degraded says %q", s)
		}
		if ok, _ := w.nodes[1].take(chargeOn("1acme", slow(), 1)); !ok {
			t.Error("what this node owns is refused, too")
		}
		w.net.Heal()
		time.Sleep(3 * time.Second)
		if ok, d := w.nodes[1].take(chargeOn("0acme", slow(), 1)); !ok {
			t.Errorf("still refused after the cut: %+v", d)
		}
		if s := w.nodes[1].Degraded(); s != "" {
			t.Errorf("degraded still says %q", s)
		}
	})
}

// TestManagerCrashCostsNothing: a process that is gone refuses connections, which is seen at once.
func TestManagerCrashCostsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 1, 1, 1)
		w.nodes[0].kill()
		start := time.Now()
		if ok, d := w.nodes[1].take(chargeOn("0acme", slow(), 1)); ok || d.By != limiter.ByDeny || time.Since(start) > 50*time.Millisecond {
			t.Errorf("taken %v by %v after %v", ok, d.By, time.Since(start))
		}
	})
}

// TestManagerJoinsTheNextBatch: of a burst of requests of one tenant one asks; what its answer brings
// serves the others, or they ask together.
func TestManagerJoinsTheNextBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 1, 1, 1)
		w.net.Delay("n2", "n1", 10*time.Millisecond)
		w.net.Delay("n1", "n2", 10*time.Millisecond)
		n := w.nodes[1]
		limit := bucketOf(1000, time.Second, 1000)
		n.take(chargeOn("0warm", limit, 1))
		before := n.count("headgate_lease_round_trips_total", "ask")
		var ok atomic.Int64
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				if ok1, _ := n.take(chargeOn("0acme", limit, 1)); ok1 {
					ok.Add(1)
				}
			})
		}
		wg.Wait()
		if ok.Load() != 200 {
			t.Errorf("%d of 200 passed", ok.Load())
		}
		if trips := n.count("headgate_lease_round_trips_total", "ask") - before; trips < 1 || trips > 4 {
			t.Errorf("200 requests at once took %v round trips, want 1 to 4", trips)
		}
	})
}

// TestManagerApart: behind a cut each limit does what it says, and private buckets start empty.
func TestManagerApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 1, 1, 1)
		n := w.nodes[1]
		private := bucketOf(10, time.Second, 10)
		local := chargeOn("0acme", bucketOf(20, time.Second, 20), 1)
		local.Apart, local.Private = limiter.ByPrivate, private
		if ok, d := n.take(local); !ok || d.By == limiter.ByPrivate {
			t.Fatalf("before the cut: %v by %v", ok, d.By)
		}
		w.net.Cut("n1", "n2")
		time.Sleep(1500 * time.Millisecond) // the session ends; nothing is asked meanwhile
		for range 30 {                      // what is left of the lease is frozen
			if ok, d := n.take(local); ok && d.By == limiter.ByLease {
				t.Fatal("a lease was spent after its session")
			}
		}
		time.Sleep(2 * time.Second)
		got := 0
		for range 30 {
			if ok, d := n.take(local); ok {
				if got++; d.By != limiter.ByPrivate {
					t.Fatalf("taken by %v", d.By)
				}
			}
		}
		if got < 9 || got > 10 {
			t.Errorf("a private bucket of 10 gave %d after 2 s", got)
		}
		cs, ds := []limiter.Charge{local}, make([]limiter.Decision, 1)
		time.Sleep(time.Second)
		if n.Take(t.Context(), cs, ds) != -1 {
			t.Fatal("refused")
		}
		left := ds[0].Remaining
		n.Settle(cs, []int64{0}, ds)
		if ds[0].Remaining != left+1 || ds[0].By != limiter.ByPrivate {
			t.Errorf("a settled private charge left %d by %v, want %d", ds[0].Remaining, ds[0].By, left+1)
		}
		open := chargeOn("0acme", slow(), 1)
		open.Apart = limiter.ByAllow
		if ok, d := n.take(open); !ok || d.By != limiter.ByAllow {
			t.Errorf("allow: %v by %v", ok, d.By)
		}
		none := chargeOn("0acme", slow(), 1)
		none.Apart = limiter.ByPrivate
		if ok, d := n.take(none); ok || d.By != limiter.ByDeny || d.RetryAfter <= 0 {
			t.Errorf("without a private limit: %v by %v, retry after %v", ok, d.By, d.RetryAfter)
		}
		shadow := none
		shadow.Shadow = true
		if ok, _ := n.take(shadow); !ok {
			t.Error("a shadow charge refused")
		}
		w.net.Heal()
		time.Sleep(2 * time.Second)
		if ok, d := n.take(local); !ok || d.By == limiter.ByPrivate {
			t.Errorf("after the cut: %v by %v", ok, d.By)
		}
	})
}

// TestManagerWithoutViewLease: a node that may not grant goes by what its limits say, and serves again
// at once when it may.
func TestManagerWithoutViewLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		w.step(w.nodes, 0, 0, 0, 0)
		n := w.nodes[0]
		n.rights.lapse(true)
		time.Sleep(1100 * time.Millisecond)
		start := time.Now()
		if ok, d := n.take(chargeOn("0acme", slow(), 1)); ok || d.By != limiter.ByDeny || time.Since(start) > 0 {
			t.Errorf("taken %v by %v after %v", ok, d.By, time.Since(start))
		}
		if n.Degraded() == "" {
			t.Error("it is not degraded")
		}
		n.rights.lapse(false)
		time.Sleep(100 * time.Millisecond)
		if ok, d := n.take(chargeOn("0acme", slow(), 1)); !ok {
			t.Errorf("still refused by %v", d.By)
		}
		if s := n.Degraded(); s != "" {
			t.Errorf("degraded says %q", s)
		}
	})
}

// TestManagerOwnerWithoutViewLease: an owner that may not grant just now says so, and who asks it waits
// one budget and no more.
func TestManagerOwnerWithoutViewLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 0, 0, 0)
		n := w.nodes[1]
		n.take(chargeOn("0acme", slow(), 1))
		w.nodes[0].rights.lapse(true)
		time.Sleep(1500 * time.Millisecond)
		var waited time.Duration
		for range 100 {
			start := time.Now()
			if ok, d := n.take(chargeOn("0acme", slow(), 1)); ok || d.By != limiter.ByDeny {
				t.Fatalf("taken %v by %v", ok, d.By)
			}
			waited += time.Since(start)
			time.Sleep(20 * time.Millisecond)
		}
		if waited > 300*time.Millisecond {
			t.Errorf("100 requests waited %v", waited)
		}
	})
}

// TestManagerShutsByKind: an owner that may not lend slots yet, since a member has not rolled, serves all else.
func TestManagerShutsByKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		time.Sleep(2 * time.Second)
		w.nodes[2].kill()
		w.step(w.nodes, 1, 1, 2, 0) // partition 0 goes to n2; n3 is a member still
		time.Sleep(100 * time.Millisecond)
		slots := chargeOn("0slots", &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8}, 1)
		slots.Key.Limit = "slots"
		for i := range 20 {
			if i%5 == 0 {
				if ok, d := w.nodes[0].take(slots); ok || d.By != limiter.ByDeny {
					t.Fatalf("slots: %v by %v", ok, d.By)
				}
			}
			if ok, d := w.nodes[0].take(chargeOn(fmt.Sprint("0acme", i), slow(), 40)); !ok {
				t.Errorf("tenant %d is refused by %v", i, d.By)
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
}

// TestManagerLeaves: a node that leaves in order takes nothing with it, and nobody waits.
func TestManagerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		start := time.Now()
		limit := slow()
		got := 0
		for range 10 {
			for _, n := range w.nodes {
				if ok, _ := n.take(chargeOn("0acme", limit, 1)); ok {
					got++
				}
			}
		}
		leaver := w.nodes[0]
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := leaver.Drain(ctx); err != nil {
			t.Fatal(err)
		}
		left := time.Now()
		w.step(w.nodes[1:], 0, 0, 1, 1)
		if err := leaver.HandOver(ctx); err != nil {
			t.Fatal(err)
		}
		leaver.kill()
		if ok, d := w.nodes[2].take(chargeOn("0acme", limit, 1)); !ok {
			t.Errorf("refused after the hand-over: %+v", d)
		} else {
			got++
		}
		if took := time.Since(left); took > 200*time.Millisecond {
			t.Errorf("service stood still for %v", took)
		}
		for range 60 {
			for _, n := range w.nodes[1:] {
				if ok, _ := n.take(chargeOn("0acme", limit, 1)); ok {
					got++
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
		elapsed := int(time.Since(start) / time.Second)
		if got > 50+elapsed || got < 50+elapsed-2 {
			t.Errorf("they got %d in %d s, want %d", got, elapsed, 50+elapsed)
		}
		if n := w.nodes[1].count("headgate_lease_handoffs_total", "received"); n == 0 {
			t.Error("no hand-off is counted")
		}
	})
}

// TestManagerOwnerKilled: its tenants are served again after the wait, from empty buckets.
func TestManagerOwnerKilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		limit := bucketOf(10, time.Second, 100)
		w.nodes[1].take(chargeOn("0acme", limit, 1))
		w.nodes[0].kill()
		w.step(w.nodes[1:], 0, 0, 1, 1)
		stepped := time.Now()
		n := w.nodes[2]
		back := time.Duration(0)
		for back == 0 && time.Since(stepped) < 4*time.Second {
			if ok, _ := n.take(chargeOn("0acme", limit, 1)); ok {
				back = time.Since(stepped)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if back < wait || back > wait+500*time.Millisecond {
			t.Errorf("back after %v, want soon after %v", back, wait)
		}
		got := 0
		for time.Since(stepped) < wait+2*time.Second {
			for _, n := range w.nodes[1:] {
				if ok, _ := n.take(chargeOn("0acme", limit, 1)); ok {
					got++
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
		if got > 20 || got < 17 {
			t.Errorf("an empty bucket of 10/s gave %d in 2 s", got)
		}
	})
}

// TestManagerRefusesForgeries: nobody speaks in another's name.
func TestManagerRefusesForgeries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 1, 1, 1)
		cc, err := w.nodes[1].client(w.nodes[0].self.Address)
		if err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]struct {
			first *leasepb.Frame
			want  codes.Code
		}{
			"another owner":         {&leasepb.Frame{Holder: 2, Owner: 99}, codes.FailedPrecondition},
			"no holder":             {&leasepb.Frame{Owner: 1}, codes.InvalidArgument},
			"the owner itself":      {&leasepb.Frame{Holder: 1, Owner: 1}, codes.InvalidArgument},
			"a request of another":  {&leasepb.Frame{Holder: 2, Owner: 1, Requests: []*leasepb.Request{{Holder: 7, Owner: 1, Seq: 1}}}, codes.PermissionDenied},
			"a request for another": {&leasepb.Frame{Holder: 2, Owner: 1, Requests: []*leasepb.Request{{Holder: 2, Owner: 7, Seq: 1}}}, codes.PermissionDenied},
			"a malformed request":   {&leasepb.Frame{Holder: 2, Owner: 1, Requests: []*leasepb.Request{{Holder: 2, Owner: 1}}}, codes.InvalidArgument},
		} {
			s, err := leasepb.NewLeaseClient(cc).Session(t.Context())
			if err == nil {
				if err = s.Send(c.first); err == nil {
					_, err = s.Recv()
				}
			}
			if status.Code(err) != c.want {
				t.Errorf("%s: %v, want %v", name, err, c.want)
			}
		}
		if n := w.nodes[0].count("headgate_lease_malformed_total"); n != 5 {
			t.Errorf("%v messages were counted as refused, want 5", n)
		}
	})
}

// TestManagerLevels: what one node says of a tenant is what all have.
func TestManagerLevels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		limit := bucketOf(100, time.Second, 1000)
		for _, n := range w.nodes {
			for range 20 {
				n.take(chargeOn("0acme", limit, 1))
			}
		}
		levels, err := w.nodes[2].Levels(t.Context(), "0acme")
		if err != nil || len(levels) != 1 {
			t.Fatalf("%+v, %v", levels, err)
		}
		b := levels[0]
		if b.Owner != "n1" || b.Key.Limit != "tpm" || b.Limit.Burst != 1000 || b.Level+b.Outstanding > 940+10 {
			t.Errorf("the bucket is shown as %+v", b)
		}
		w.nodes[0].kill()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.nodes[2].Levels(ctx, "0acme"); err == nil || err.Error() != "n1 did not answer" {
			t.Errorf("a dead owner's levels: %v", err)
		}
	})
}

// TestManagerSaves: the last node's levels are there again in its next process, once, and only there.
func TestManagerSaves(t *testing.T) {
	for name, gap := range map[string]uint64{"the next view": 1, "a later view": 2} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1)
				w.step(w.nodes, 0, 0, 0, 0)
				limit := slow()
				n := w.nodes[0]
				for range 30 {
					n.take(chargeOn("0acme", limit, 1))
				}
				if err := n.Drain(t.Context()); err != nil {
					t.Fatal(err)
				}
				var saved bytes.Buffer
				if err := n.Save(&saved); err != nil {
					t.Fatal(err)
				}
				n.kill()
				next := w.add("n1")
				if _, err := next.Load(bytes.NewReader(saved.Bytes())); err != nil {
					t.Fatal(err)
				}
				w.view.Epoch += gap - 1
				w.step([]*node{next}, 0, 0, 0, 0)
				got := 0
				for range 60 {
					if ok, _ := next.take(chargeOn("0acme", limit, 1)); ok {
						got++
					}
				}
				if want := map[uint64]int{1: 20, 2: 0}[gap]; got < want || got > want+1 {
					t.Errorf("%d were left, want %d", got, want)
				}
			})
		})
	}
}

func TestManagerLoadRefusesDamage(t *testing.T) {
	m, err := lease.NewAlone(wallClock, 0)
	if err != nil {
		t.Fatal(err)
	}
	m.Take(t.Context(), []limiter.Charge{chargeOn("0acme", slow(), 1)}, make([]limiter.Decision, 1))
	var saved bytes.Buffer
	if err := m.Save(&saved); err != nil {
		t.Fatal(err)
	}
	good := saved.Bytes()
	fresh := func() *lease.Manager {
		m, err := lease.NewManager(lease.ManagerConfig{Self: lease.Member{Name: "n", Incarnation: 9}, Clock: wallClock, Rights: &fakeRights{}, Wait: wait})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	if _, err := fresh().Load(bytes.NewReader(good)); err != nil {
		t.Fatal(err)
	}
	for i := range good {
		bad := slices.Clone(good)
		bad[i] ^= 0x40
		if i >= len("headgate partitions 1\n") && i < len("headgate partitions 1\n")+8 {
			continue // the epoch is under the checksum, too, but let that say so below
		}
		if _, err := fresh().Load(bytes.NewReader(bad)); !errors.Is(err, lease.ErrSaved) {
			t.Errorf("byte %d spoiled: %v", i, err)
		}
	}
	for i := range good {
		if _, err := fresh().Load(bytes.NewReader(good[:i])); !errors.Is(err, lease.ErrSaved) {
			t.Errorf("cut off after %d bytes: %v", i, err)
		}
	}
	if _, err := fresh().Load(bytes.NewReader(append(slices.Clone(good), 0))); !errors.Is(err, lease.ErrSaved) {
		t.Errorf("one byte more: %v", err)
	}
}

func TestManagerConfigNamesTheField(t *testing.T) {
	good := lease.ManagerConfig{Self: lease.Member{Incarnation: 1}, Clock: wallClock, Rights: &fakeRights{}, Wait: wait}
	for field, spoil := range map[string]func(*lease.ManagerConfig){
		"Incarnation": func(c *lease.ManagerConfig) { c.Self.Incarnation = 0 },
		"Clock":       func(c *lease.ManagerConfig) { c.Clock = nil },
		"Rights":      func(c *lease.ManagerConfig) { c.Rights = nil },
		"Budget":      func(c *lease.ManagerConfig) { c.Budget = -1 },
		"Wait":        func(c *lease.ManagerConfig) { c.Wait = 0 },
		"buckets":     func(c *lease.ManagerConfig) { c.MaxBuckets = -1 },
	} {
		c := good
		spoil(&c)
		if _, err := lease.NewManager(c); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestManagerClientGone: who gives up holds nothing.
func TestManagerClientGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 1, 1, 1)
		w.net.Cut("n1", "n2")
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		cs, ds := []limiter.Charge{chargeOn("1mine", slow(), 1), chargeOn("0acme", slow(), 1)}, make([]limiter.Decision, 2)
		start := time.Now()
		if got := w.nodes[1].Take(ctx, cs, ds); got != 1 || time.Since(start) > 20*time.Millisecond {
			t.Errorf("refused %d after %v", got, time.Since(start))
		}
		if s := w.nodes[1].Degraded(); s != "" {
			t.Errorf("an impatient client broke the line: %q", s)
		}
		if cs[0].Held != nil || cs[1].Held != nil {
			t.Errorf("it holds %v and %v", cs[0].Held, cs[1].Held)
		}
	})
}

// TestManagerSlots: slots are never more than there are, whoever holds them, and come back.
func TestManagerSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		limit := &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8, Revision: 1}
		key := limiter.Key{Tenant: "0acme", Limit: "inflight"}
		var inUse, most, served atomic.Int64
		var wg sync.WaitGroup
		for i := range 90 {
			wg.Go(func() {
				n := w.nodes[i%3]
				for range 50 {
					cs, ds := []limiter.Charge{{Key: key, Limit: limit, Cost: 1, Apart: limiter.ByDeny}}, make([]limiter.Decision, 1)
					if n.Take(context.Background(), cs, ds) == -1 {
						most.Store(max(most.Load(), inUse.Add(1)))
						time.Sleep(30 * time.Millisecond)
						inUse.Add(-1)
						served.Add(1)
						n.Settle(cs, []int64{0}, ds)
						return
					}
					time.Sleep(20 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		if most.Load() > 8 || most.Load() < 7 {
			t.Errorf("%d of 8 slots were in use at once", most.Load())
		}
		if served.Load() != 90 {
			t.Errorf("%d of 90 requests were served", served.Load())
		}
	})
}

// fakeBlocks are a ledger that fails at first and then gives what is left of total.
type fakeBlocks struct {
	mu     sync.Mutex
	left   int64
	fail   int
	drawn  map[uint64]lease.Drawn
	unlike bool // the same draw came with another content
	draws  map[uint64]lease.Draw
}

func (b *fakeBlocks) Draw(_ context.Context, d lease.Draw) (lease.Drawn, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if was, ok := b.draws[d.N]; ok && was != d {
		b.unlike = true
	}
	b.draws[d.N] = d
	if b.fail > 0 {
		b.fail--
		return lease.Drawn{}, errors.New("no quorum")
	}
	if was, ok := b.drawn[d.N]; ok {
		return was, nil
	}
	out := lease.Drawn{Bucket: d.Bucket, N: d.N, Granted: min(d.Want, b.left)}
	if out.Granted < d.Least {
		out.Granted, out.RetryAfter = 0, int64(time.Hour)
	}
	b.left -= out.Granted
	out.Level = b.left
	b.drawn[d.N] = out
	return out, nil
}

// TestManagerDrawsBlocks: a durable limit is lent out of the ledger's blocks, to the unit, and a draw of
// which nobody knows what came is tried again as it was.
func TestManagerDrawsBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		blocks := &fakeBlocks{left: 30, fail: 2, drawn: map[uint64]lease.Drawn{}, draws: map[uint64]lease.Draw{}}
		w := newWorld(t, 2, func(c *lease.ManagerConfig) { c.Blocks = blocks })
		w.step(w.nodes, 0, 1, 1, 1)
		day := bucketOf(100, 24*time.Hour, 100)
		got := 0
		for range 60 {
			for _, n := range w.nodes {
				if ok, _ := n.take(chargeOn("0acme", day, 1)); ok {
					got++
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
		if got != 30 {
			t.Errorf("%d were taken of the ledger's 30", got)
		}
		if blocks.unlike || blocks.fail > 0 {
			t.Errorf("%d failures were not met, or a draw was tried again with another content: %v", blocks.fail, blocks.unlike)
		}
	})
}

// TestManagerHandsOverMuch: a partition that fills more than one message arrives whole, also where its
// next owner may not have as many buckets of its own.
func TestManagerHandsOverMuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, func(c *lease.ManagerConfig) {
			if c.Self.Name == "n2" {
				c.MaxBuckets = 1000
			}
		})
		w.step(w.nodes, 0, 1, 1, 1)
		limit := slow()
		const users = 5000
		on := func(i int) limiter.Charge {
			c := chargeOn("0acme", limit, 30)
			c.Key.Subject = fmt.Sprintf("%0300d", i)
			return c
		}
		for i := range users {
			if ok, d := w.nodes[0].take(on(i)); !ok {
				t.Fatalf("user %d refused: %+v", i, d)
			}
		}
		if err := w.nodes[0].Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.step(w.nodes[1:], 0, 0, 0, 0)
		if err := w.nodes[0].HandOver(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := w.nodes[1].Len(); n < users {
			t.Errorf("%d buckets arrived, want %d", n, users)
		}
		for i := 0; i < users; i += 500 {
			if ok, _ := w.nodes[1].take(on(i)); ok {
				t.Errorf("user %d has 30 of 50 left twice", i)
			}
		}
	})
}

// choosy is a connection to a process that refuses every hand-off.
type choosy struct {
	grpc.ClientConnInterface
	handed *atomic.Int64
}

func (c choosy) NewStream(ctx context.Context, d *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if strings.HasSuffix(method, "HandOff") {
		c.handed.Add(1)
		return nil, status.Error(codes.InvalidArgument, "bucket 0 of a hand-off: a message that no process of this release sends")
	}
	return c.ClientConnInterface.NewStream(ctx, d, method, opts...)
}

// TestManagerGivesUpWhatNobodyReads: a hand-off that its receiver cannot read is not repeated, and a
// process that leaves does not wait for it.
func TestManagerGivesUpWhatNobodyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		handed := new(atomic.Int64)
		w := newWorld(t, 2, func(c *lease.ManagerConfig) {
			client := c.Client
			c.Client = func(address string) (grpc.ClientConnInterface, error) {
				cc, err := client(address)
				return choosy{cc, handed}, err
			}
		})
		w.step(w.nodes, 0, 1, 1, 1)
		w.nodes[0].take(chargeOn("0acme", slow(), 30))
		w.step(w.nodes[1:], 0, 0, 0, 0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := w.nodes[0].HandOver(ctx); err != nil {
			t.Error(err)
		}
		if n := handed.Load(); n != 1 {
			t.Errorf("sent %d times", n)
		}
		if n := w.nodes[0].count("headgate_lease_handoffs_total", "useless"); n != 1 {
			t.Errorf("%v counted", n)
		}
	})
}

// TestManagersInTrouble: cuts, delays and partitions that move, under a load from all sides. Nothing is
// over-admitted in any window, and when the trouble is over every node serves every tenant.
func TestManagersInTrouble(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { trouble(t, rand.New(rand.NewPCG(seed, 0))) })
		})
	}
}

type admission struct{ at, cost int64 }

func trouble(t *testing.T, rng *rand.Rand) {
	const rate, burst = 100, 50
	w := newWorld(t, 3)
	w.step(w.nodes, 0, 1, 2, 0)
	limit := bucketOf(rate, time.Second, burst)
	tenants := [...]string{"0a", "1b", "2c", "3d"}
	var mu sync.Mutex
	var admitted [len(tenants)][]admission
	over := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 12 {
		rng := rand.New(rand.NewPCG(rng.Uint64(), uint64(i)))
		wg.Go(func() {
			for {
				select {
				case <-over:
					return
				case <-time.After(time.Duration(5+rng.IntN(20)) * time.Millisecond):
				}
				k, cost := rng.IntN(len(tenants)), 1+rng.Int64N(3)
				if ok, d := w.nodes[i%3].take(chargeOn(tenants[k], limit, cost)); ok {
					mu.Lock()
					admitted[k] = append(admitted[k], admission{d.At, cost})
					mu.Unlock()
				}
			}
		})
	}
	owners := []int32{0, 1, 2, 0}
	for range 25 {
		time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
		a, b := rng.IntN(3), rng.IntN(3)
		from, to := w.nodes[a].self.Name, w.nodes[b].self.Name
		switch rng.IntN(5) {
		case 0:
			if a != b {
				w.net.Cut(from, to)
			}
		case 1:
			w.net.Delay(from, to, time.Duration(rng.IntN(100))*time.Millisecond)
		case 2:
			owners = slices.Clone(owners)
			owners[rng.IntN(parts)] = int32(b)
			w.step(w.nodes, owners...)
		case 3:
			w.nodes[a].rights.lapse(rng.IntN(2) == 0)
		default:
			w.net.Heal()
		}
	}
	close(over)
	wg.Wait()
	for k, as := range admitted {
		if len(as) < 30 {
			t.Errorf("tenant %s was admitted %d times", tenants[k], len(as))
		}
		// A bucket of the same burst that fills 1 % faster would have admitted all of it.
		slices.SortFunc(as, func(a, b admission) int { return cmp.Compare(a.at, b.at) })
		level, last := float64(burst), as[0].at
		for _, a := range as {
			level = min(burst, level+1.01*rate*float64(a.at-last)/1e9) - float64(a.cost)
			if last = a.at; level < -1e-3 {
				t.Fatalf("tenant %s is over-admitted by %.3f at %d", tenants[k], -level, a.at)
			}
		}
	}
	w.net.Heal()
	for _, n := range w.nodes {
		n.rights.lapse(false)
	}
	time.Sleep(4 * time.Second)
	for _, n := range w.nodes {
		for _, tenant := range tenants {
			if ok, d := n.take(chargeOn(tenant, limit, 1)); !ok {
				t.Errorf("%s is refused %s afterwards: %+v", n.self.Name, tenant, d)
			}
		}
		if s := n.Degraded(); s != "" {
			t.Errorf("%s is degraded afterwards: %s", n.self.Name, s)
		}
	}
}

// TestManagerPeeks: what would happen is told, and does not.
func TestManagerPeeks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 1, 1, 1)
		for _, n := range w.nodes {
			cs := []limiter.Charge{chargeOn("0acme", slow(), 5), chargeOn("0acme", slow(), 60)}
			cs[1].Key.Limit = "other"
			ds := make([]limiter.Decision, 2)
			for range 30 {
				if got := n.Peek(t.Context(), cs[:1], ds); got != -1 || ds[0].Remaining != 45 {
					t.Fatalf("%s: %d, %+v", n.self.Name, got, ds[0])
				}
			}
			if got := n.Peek(t.Context(), cs, ds); got != 1 || ds[1].RetryAfter != limiter.Never {
				t.Errorf("%s: more than the burst: %d, %+v", n.self.Name, got, ds[1])
			}
			if cs[0].Held != nil {
				t.Errorf("%s: a peek holds %v", n.self.Name, cs[0].Held)
			}
		}
		w.net.Cut("n1", "n2")
		cs, ds := []limiter.Charge{chargeOn("0acme", slow(), 5)}, make([]limiter.Decision, 1)
		if got := w.nodes[1].Peek(t.Context(), cs, ds); got != 0 || ds[0].By != limiter.ByDeny {
			t.Errorf("behind a cut: %d, %+v", got, ds[0])
		}
	})
}

// TestManagerWhere names the owner, what is held here, and why the owner is out of reach.
func TestManagerWhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		c := chargeOn("0acme", slow(), 1)
		n := w.nodes[1]
		if _, _, away := n.Where(&c); away == "" {
			t.Error("before the first view nothing is out of reach")
		}
		w.step(w.nodes, 0, 1, -1, 1)
		for range 5 {
			n.take(c)
			time.Sleep(300 * time.Millisecond)
		}
		if owner, held, away := n.Where(&c); owner != "n1" || held < 0 || away != "" {
			t.Errorf("owner %q, held %d, away %q", owner, held, away)
		}
		orphan := chargeOn("2acme", slow(), 1)
		if owner, _, away := n.Where(&orphan); owner != "" || away == "" {
			t.Errorf("of nobody: owner %q, away %q", owner, away)
		}
		if ok, d := n.take(orphan); ok || d.By != limiter.ByDeny {
			t.Errorf("of nobody: %v by %v", ok, d.By)
		}
		w.net.Cut("n1", "n2")
		time.Sleep(2 * time.Second)
		n.take(c)
		if _, held, away := n.Where(&c); held != 0 || !strings.Contains(away, "n1") {
			t.Errorf("behind a cut: held %d, away %q", held, away)
		}
	})
}

// TestManagerSettlesBoth: one request may have charges on leases and on private buckets.
func TestManagerSettlesBoth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.step(w.nodes, 0, 1, 1, 1)
		w.net.Cut("n1", "n2")
		n := w.nodes[1]
		far, near := chargeOn("0acme", slow(), 2), chargeOn("1acme", slow(), 10)
		far.Apart, far.Private = limiter.ByPrivate, bucketOf(10, time.Second, 10)
		n.take(far)
		time.Sleep(2 * time.Second)
		cs, ds := []limiter.Charge{far, near}, make([]limiter.Decision, 2)
		if got := n.Take(t.Context(), cs, ds); got != -1 || ds[0].By != limiter.ByPrivate {
			t.Fatalf("%d, %+v", got, ds)
		}
		n.Settle(cs, []int64{0, 4}, ds)
		if ds[0].Remaining != 10 || cs[0].Held != nil || cs[1].Held != nil {
			t.Errorf("settled: %+v, %+v", ds, cs)
		}
		n.Settle(cs, []int64{0, 0}, ds) // a second time changes nothing
		rest := 0
		for range 60 {
			if ok, _ := n.take(chargeOn("1acme", slow(), 1)); ok {
				rest++
			}
		}
		if rest != 46 {
			t.Errorf("%d of 50 are left after 4, want 46", rest)
		}
	})
}

// TestManagerRefusesTornHandOffs: only what is whole, for this process, of a view that it knows, and from the
// owner of before is taken; what nobody waits for is not even read.
func TestManagerRefusesTornHandOffs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 1, 0, 0, 0)
		w.nodes[1].kill()
		w.step([]*node{w.nodes[0], w.nodes[2]}, 0, 0, 0, 0)
		cc, err := w.nodes[2].client(w.nodes[0].self.Address)
		if err != nil {
			t.Fatal(err)
		}
		head := func(from, to, epoch uint64) *leasepb.HandOffHead {
			return &leasepb.HandOffHead{From: from, To: to, Epoch: epoch, Partition: 0, Floor: -1}
		}
		bucket := &leasepb.HandedBucket{
			Bucket: &leasepb.Bucket{Tenant: []byte("0acme")}, Limit: &leasepb.Limit{Count: 1, Per: 1, Burst: 1},
			State: bucketOf(1, 1, 1).AppendState(nil, new(limiter.State), 1),
		}
		long := &leasepb.HandedBucket{Bucket: &leasepb.Bucket{Tenant: []byte("0" + strings.Repeat("x", 2000))}, Limit: bucket.GetLimit()}
		for _, c := range []struct {
			name            string
			parts           []*leasepb.HandOffPart
			want            codes.Code
			later, accepted bool
		}{
			{"no head", []*leasepb.HandOffPart{{End: true}}, codes.InvalidArgument, false, false},
			{"another number", []*leasepb.HandOffPart{{Head: head(2, 1, 2)}, {End: true, Count: 1}}, codes.InvalidArgument, false, false},
			{"a bad bucket", []*leasepb.HandOffPart{{Head: head(2, 1, 2), Buckets: []*leasepb.HandedBucket{{}}, End: true, Count: 1}}, codes.InvalidArgument, false, false},
			{"a long key", []*leasepb.HandOffPart{{Head: head(2, 1, 2), Buckets: []*leasepb.HandedBucket{long}, End: true, Count: 1}}, codes.InvalidArgument, false, false},
			{"another node", []*leasepb.HandOffPart{{Head: head(2, 3, 2), End: true}}, codes.FailedPrecondition, false, false},
			{"a later view", []*leasepb.HandOffPart{{Head: head(2, 1, 9)}}, codes.OK, true, false},
			{"not the owner of before", []*leasepb.HandOffPart{{Head: head(3, 1, 2)}}, codes.OK, false, false},
			{"a view that is over", []*leasepb.HandOffPart{{Head: head(2, 1, 1)}}, codes.OK, false, true},
			{"slow", []*leasepb.HandOffPart{{Head: head(2, 1, 2)}}, codes.DeadlineExceeded, false, false},
			{"whole", []*leasepb.HandOffPart{{Head: head(2, 1, 2), Buckets: []*leasepb.HandedBucket{bucket}}, {End: true, Count: 1}}, codes.OK, false, true},
			{"again", []*leasepb.HandOffPart{{Head: head(2, 1, 2)}}, codes.OK, false, true},
		} {
			s, err := leasepb.NewLeaseClient(cc).HandOff(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range c.parts {
				_ = s.Send(p) // what came of it is in the answer
			}
			r := new(leasepb.HandOffResponse) // and comes, though the sender has not closed its side
			err = s.RecvMsg(r)
			if status.Code(err) != c.want || r.GetLater() != c.later || r.GetAccepted() != c.accepted {
				t.Errorf("%s: %v, %v", c.name, r, err)
			}
			_ = s.CloseSend()
		}
	})
}

// TestManagerNamesDebtors: a member that does not answer the roll call of slots is named after 3 s.
func TestManagerNamesDebtors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.step(w.nodes, 0, 1, 2, 0)
		w.net.Cut("n2", "n3")
		w.step(w.nodes, 1, 1, 2, 0)
		time.Sleep(4 * time.Second)
		if got := w.nodes[1].Owing(); !slices.Equal(got, []uint64{3}) {
			t.Errorf("owing are %v, want 3", got)
		}
		w.net.Heal()
		time.Sleep(2 * time.Second)
		if got := w.nodes[1].Owing(); len(got) > 0 {
			t.Errorf("after the cut %v still owe", got)
		}
	})
}

// TestManagerSweeps: what is full and lent to nobody is forgotten, nothing else.
func TestManagerSweeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		w.step(w.nodes, 0, 0, 0, 0)
		n := w.nodes[0]
		for i := range 500 {
			cs, ds := []limiter.Charge{chargeOn("0acme", slow(), 1)}, make([]limiter.Decision, 1)
			cs[0].Key.Subject = fmt.Sprint(i)
			n.Take(t.Context(), cs, ds)
			n.Settle(cs, []int64{1}, ds)
		}
		n.Sweep(10_000)
		if got := n.Len(); got != 500 {
			t.Errorf("%d of 500 buckets are left that are not full", got)
		}
		for range 90 { // leases run down with their use
			time.Sleep(time.Second)
			n.Sweep(10_000)
		}
		if got := n.Len(); got != 0 {
			t.Errorf("%d full buckets are left", got)
		}
	})
}
