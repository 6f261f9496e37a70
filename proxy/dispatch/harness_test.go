package dispatch_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"headgate/cluster/clustertest"
	"headgate/lease"
	"headgate/proxy/dispatch"
	"headgate/proxy/queue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const rpcPort = 7947

// truth is who really has which slots: what the lease room would hold.
type truth struct {
	mu    sync.Mutex
	slots map[string]int64
	inUse map[string]int64
	hands map[string]map[*hand]int64 // free ones in nodes' leases
	most  map[string]int64
	wrong []string
	// closed: nobody is lent anything that is not in hand, as before a new owner may lend.
	closed bool
}

// hand is a node's side of it: dispatch.Slots.
type hand struct {
	w    *truth
	node *node
	asks atomic.Int64
	gone atomic.Bool
	slow atomic.Int64 // how long an ask takes, whatever becomes of its context; 0: a millisecond
	none atomic.Bool  // what is asked for is not to be had

	yields atomic.Int64
}

func newTruth() *truth {
	return &truth{slots: map[string]int64{}, inUse: map[string]int64{}, most: map[string]int64{}, hands: map[string]map[*hand]int64{}}
}

// Hold see dispatch.Slots.
func (h *hand) Hold(ctx context.Context, backend string, cost int64, ask bool) (dispatch.Held, bool) {
	if ask {
		h.asks.Add(1)
		if slow := h.slow.Load(); slow > 0 {
			time.Sleep(time.Duration(slow))
			ctx = context.Background()
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return nil, false
		}
		if h.none.Load() {
			return nil, false
		}
	}
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	hands := h.w.hands[backend]
	if hands == nil {
		hands = map[*hand]int64{}
		h.w.hands[backend] = hands
	}
	free := h.w.slots[backend] - h.w.inUse[backend]
	for other, n := range hands {
		if other != h && !ask || h.w.closed {
			free -= n
		}
	}
	if !ask || h.w.closed {
		free = min(free, hands[h])
	}
	if free < cost {
		return nil, false
	}
	h.w.inUse[backend] += cost
	h.w.most[backend] = max(h.w.most[backend], h.w.inUse[backend])
	// First out of the own hand, then of nobody's, then of others'.
	hands[h] -= min(cost, hands[h])
	free = h.w.slots[backend] - h.w.inUse[backend]
	for _, n := range hands {
		free -= n
	}
	for other, n := range hands {
		if take := min(n, -free); take > 0 {
			hands[other] -= take
			free += take
		}
	}
	return &held{h, backend, cost, false}, true
}

// Yield see dispatch.Slots.
func (h *hand) Yield(backend string) {
	h.yields.Add(1)
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	if hands := h.w.hands[backend]; hands != nil {
		hands[h] = 0
	}
}

type held struct {
	h       *hand
	backend string
	cost    int64
	over    bool
}

// Release see dispatch.Held.
func (h *held) Release(yield bool) {
	h.h.w.mu.Lock()
	defer h.h.w.mu.Unlock()
	if h.over {
		h.h.w.wrong = append(h.h.w.wrong, "slots were released twice")
	}
	h.over = true
	h.h.w.inUse[h.backend] -= h.cost
	if !yield && !h.h.gone.Load() {
		h.h.w.hands[h.backend][h.h] += h.cost
	}
}

// world is nodes on a network in memory.
type world struct {
	t     testing.TB
	net   *clustertest.Net
	truth *truth
	nodes []*node
	tune  []func(*dispatch.Config)
	bs    []queue.Backend
	qcfg  queue.Config
	// real: slots are real leases, and the view is what says who schedules.
	real bool
	view *lease.View

	mu    sync.Mutex
	owner *node
	views map[*node]dispatch.Scheduling // of nodes that see something else
}

type node struct {
	*dispatch.Dispatcher
	w      *world
	host   *clustertest.Host
	name   string
	hand   *hand
	self   lease.Member // and what follows, in a world of leases
	rights *rights
	leases *leased
	id     uint64
	reg    *prometheus.Registry
	server *grpc.Server
	stop   context.CancelFunc
	ended  sync.WaitGroup

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
	dead  bool
}

func newWorld(t testing.TB, n int, backends []queue.Backend, tune ...func(*dispatch.Config)) *world {
	w := makeWorld(t, n, backends, false, tune...)
	w.schedules(w.nodes[0])
	return w
}

// newLeasedWorld is one with real leases. The first node has them, and the queue.
func newLeasedWorld(t testing.TB, n int, backends []queue.Backend, tune ...func(*dispatch.Config)) *world {
	w := makeWorld(t, n, backends, true, tune...)
	w.step(w.nodes[0])
	return w
}

func makeWorld(t testing.TB, n int, backends []queue.Backend, real bool, tune ...func(*dispatch.Config)) *world {
	w := &world{t: t, net: clustertest.New(1), truth: newTruth(), tune: tune, bs: backends, real: real, views: map[*node]dispatch.Scheduling{}}
	for _, b := range backends {
		w.truth.slots[b.ID] = b.Slots
	}
	for i := range n {
		w.add(fmt.Sprintf("n%d", i+1))
	}
	t.Cleanup(func() {
		for _, n := range w.nodes {
			n.kill()
		}
		w.net.Close()
		if len(w.truth.wrong) > 0 {
			t.Errorf("%v", w.truth.wrong)
		}
		for id, most := range w.truth.most {
			if most > w.truth.slots[id] {
				t.Errorf("%d of %d slots of %s were in use at once", most, w.truth.slots[id], id)
			}
		}
	})
	return w
}

func (w *world) add(name string) *node {
	host := w.net.Host(name)
	n := &node{w: w, host: host, name: name, id: uint64(len(w.nodes) + 1), reg: prometheus.NewRegistry(), conns: map[string]*grpc.ClientConn{}}
	n.hand = &hand{w: w.truth, node: n}
	c := dispatch.Config{
		Self: n.id, Where: n.where, Client: n.client, Slots: n.hand, Now: func() int64 { return time.Now().UnixNano() }, Registerer: n.reg,
	}
	for _, tune := range w.tune {
		tune(&c)
	}
	n.server = grpc.NewServer()
	if w.real {
		c.Slots = n.lend(n.server)
	}
	var err error
	if n.Dispatcher, err = dispatch.New(c); err != nil {
		w.t.Fatal(err)
	}
	n.Apply(w.bs, w.qcfg)
	lis, err := host.Listen(rpcPort)
	if err != nil {
		w.t.Fatal(err)
	}
	n.Register(n.server)
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	w.mu.Lock()
	w.nodes = append(w.nodes, n)
	w.mu.Unlock()
	n.ended.Go(func() { _ = n.server.Serve(lis) })
	n.ended.Go(func() { n.Run(ctx) })
	if w.real {
		n.ended.Go(func() { n.leases.m.Run(ctx) })
	}
	return n
}

func (n *node) where() dispatch.Scheduling {
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	if s, ok := n.w.views[n]; ok {
		return s
	}
	s := dispatch.Scheduling{Members: len(n.w.nodes)}
	if n.w.view != nil {
		s.Members = len(n.w.view.Members)
	}
	switch n.w.owner {
	case n:
		s.Self = true
	case nil:
	default:
		s.Address = n.w.owner.host.Address(rpcPort)
	}
	return s
}

// schedules has all see another scheduler; nil: none.
func (w *world) schedules(n *node) {
	w.mu.Lock()
	w.owner = n
	w.mu.Unlock()
	for _, n := range w.nodes {
		n.Moved()
	}
}

// settles waits until everybody has found the scheduler, and that gives out slots.
func (w *world) settles() {
	time.Sleep(300 * time.Millisecond)
	synctest.Wait()
	for _, n := range w.nodes {
		if !n.dead && !n.State().Reachable {
			w.t.Errorf("node %d has not found the scheduler", n.id)
		}
	}
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

// crash kills a node, and with it what its requests use.
func (w *world) crash(n *node) {
	w.truth.mu.Lock()
	n.leases.gone = true
	for id, used := range n.leases.used {
		w.truth.inUse[id] -= used
	}
	w.truth.mu.Unlock()
	n.kill()
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
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

func ticket(backends ...string) *dispatch.Ticket {
	// It has waited already, so that no bound refuses it: those are the queue's to test.
	t := &dispatch.Ticket{Tenant: "acme", Work: 100, Bytes: 100, Waited: time.Millisecond, Patience: 30 * time.Second}
	for _, b := range backends {
		t.Places = append(t.Places, queue.Place{Backend: b, Cost: 1})
	}
	return t
}

func backends(slots int64, ids ...string) (bs []queue.Backend) {
	for _, id := range ids {
		bs = append(bs, queue.Backend{ID: id, Slots: slots, Limit: -1})
	}
	return bs
}

// idle says that nothing is left anywhere: no slot in use, no place taken.
func (w *world) idle() {
	time.Sleep(3 * time.Second)
	synctest.Wait()
	w.truth.mu.Lock()
	for id, n := range w.truth.inUse {
		if n != 0 {
			w.t.Errorf("%d slots of %s are in use at the end", n, id)
		}
	}
	w.truth.mu.Unlock()
	for _, n := range w.nodes {
		if n.dead {
			continue
		}
		if n.Waiting() != 0 || n.count("headgate_slots_in_use") != 0 {
			w.t.Errorf("node %d: %d wait, %v slots in use", n.id, n.Waiting(), n.count("headgate_slots_in_use"))
		}
		for id, b := range n.State().Backends {
			if b.InUse != 0 || b.Granted != 0 || b.Waiting != 0 {
				w.t.Errorf("node %d: %s is said to have %d in use, %d granted, %d waiting", n.id, id, b.InUse, b.Granted, b.Waiting)
			}
		}
	}
}
