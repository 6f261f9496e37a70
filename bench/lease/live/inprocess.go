package live

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	benchlease "headgate/bench/lease"
	"headgate/bench/load"
	"headgate/bench/origin"
	"headgate/cluster"
	"headgate/lease"
	"headgate/lease/leasepb"
	"headgate/limiter"
)

// Bounds of a cell that runs in real time.
const (
	maxNodes    = 64
	maxTenants  = 256
	maxFor      = 5 * time.Minute
	maxRequests = 1_000_000
	maxOpen     = 1 << 14 // requests that wait for a decision
)

const (
	defaultRTT = 2 * time.Millisecond // a Cell's where it says none
	viewLease  = 980 * time.Millisecond
	stopFor    = 10 * time.Second
	warmFor    = 10 * time.Second      // at most, until all nodes reach the owner
	warmEvery  = 10 * time.Millisecond // between two tries
	// A message without a question is a keep-alive if it was sent at a tick of its manager's, or so little after.
	tickLate = 15 * time.Millisecond
	// cellFor is how long each of Cells lasts.
	cellFor = 8 * time.Second
)

// errOpen says that the machine does not keep up.
var errOpen = fmt.Errorf("more than %d requests wait for a decision: the machine does not keep up with the cell; take a lower rate", maxOpen)

// InProcess runs a policy in a cell, in real time, as long as the cell's demand lasts and a moment: a lease.Manager for each node, and one
// more that owns all buckets, as in the simulator, each behind a gRPC server of its own, with connections over TCP on loopback that each
// message takes half of Cell.RTT to cross. Fates.Took is from when the request was put to its node, which is as soon after its arrival as
// the machine could; Evidence.Bytes are those on TCP connections, HTTP/2's frames among them, and Evidence.CPU is the whole process's, the
// generator's and that of all nodes. Cell.For has to be set. Nothing else should run meanwhile.
func InProcess(ctx context.Context, c benchlease.Cell, policy string) (_ benchlease.Evidence, err error) {
	wrap := func(err error) error { return fmt.Errorf("lease benchmark in process, %s, %s: %w", policy, &c, err) }
	sizer, ok := sizerOf(&c, policy)
	if !ok {
		return benchlease.Evidence{}, wrap(fmt.Errorf("the policy runs in the simulator only; in process there are: %s", strings.Join(Policies(), "; ")))
	}
	demand, err := demandOf(&c)
	if err != nil {
		return benchlease.Evidence{}, wrap(err)
	}
	f, err := newFleet(&c, sizer, demand)
	if err != nil {
		return benchlease.Evidence{}, wrap(err)
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	if err := f.warm(ctx); err != nil {
		return benchlease.Evidence{}, wrap(err)
	}
	if err := f.drive(ctx); err != nil {
		return benchlease.Evidence{}, wrap(err)
	}
	return f.evidence(), nil
}

// demandOf is a cell's demand, if the cell can run in real time.
func demandOf(c *benchlease.Cell) ([]benchlease.Arrival, error) {
	switch {
	case c.For <= 0 || c.For > maxFor:
		return nil, fmt.Errorf("the cell lasts %v; give it a For of at most %v, for it passes in real time", c.For, maxFor)
	case c.Nodes < 1 || c.Nodes > maxNodes || c.Tenants > maxTenants:
		return nil, fmt.Errorf("%d nodes and %d tenants; at most %d and %d run in real time", c.Nodes, c.Tenants, maxNodes, maxTenants)
	case c.Fault != benchlease.NoFault:
		return nil, fmt.Errorf("fault %q is made in the simulator only; leave it out", c.Fault)
	}
	demand := c.Demand()
	if len(demand) > maxRequests {
		return nil, fmt.Errorf("%d requests arrive; at most %d do in real time", len(demand), maxRequests)
	}
	return demand, nil
}

// fleet is the nodes of a cell, and what has become of its requests.
type fleet struct {
	cell   *benchlease.Cell
	net    *network
	nodes  []*node // the last one owns all buckets
	limit  limiter.Limit
	part   *limiter.Limit // what a node decides by while the owner is out of reach; nil: it refuses
	start  time.Time
	demand []benchlease.Arrival
	fates  []benchlease.Fate
	cpu    time.Duration
	bytes  int64

	refused  []atomic.Bool // by tenant: since the last look
	stranded float64
	looked   int
}

// node is a lease.Manager with its server and its connections.
type node struct {
	*lease.Manager
	f      *fleet
	self   lease.Member
	server *grpc.Server
	quit   context.CancelFunc
	ended  sync.WaitGroup
	began  time.Time // when the manager did

	trips, kept, pushed atomic.Int64

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
}

func newFleet(c *benchlease.Cell, sizer lease.Sizer, demand []benchlease.Arrival) (*fleet, error) {
	rtt := c.RTT
	if rtt == 0 {
		rtt = defaultRTT
	}
	f := &fleet{cell: c, net: &network{way: rtt / 2}, limit: c.Limit, demand: demand, fates: make([]benchlease.Fate, len(demand)), start: time.Now()}
	f.refused = make([]atomic.Bool, max(c.Tenants, 1))
	f.limit.Revision = 1
	part := f.limit
	part.Rate.Per *= time.Duration(c.Nodes)
	if part.Burst /= int64(c.Nodes); part.Burst > 0 {
		f.part = &part
	}
	view := &lease.View{Epoch: 1, Place: place}
	for range len(f.refused) + 1 {
		view.Owners = append(view.Owners, int32(c.Nodes))
	}
	for i := range c.Nodes + 1 {
		n, err := f.boot(i, sizer)
		if err != nil {
			return nil, errors.Join(err, f.stop())
		}
		view.Members = append(view.Members, n.self)
	}
	for _, n := range f.nodes {
		n.Step(view)
	}
	return f, nil
}

// now is the clock that all nodes share. It never goes back.
func (f *fleet) now() lease.Instant {
	now := f.start.UnixNano() + int64(time.Since(f.start))
	return lease.Instant{Now: now, Wall: now}
}

// boot starts a node.
func (f *fleet) boot(i int, sizer lease.Sizer) (*node, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	n := &node{
		f: f, conns: map[string]*grpc.ClientConn{}, server: grpc.NewServer(),
		self: lease.Member{Name: "node-" + strconv.Itoa(i+1), Incarnation: uint64(i + 1), Address: l.Addr().String()},
	}
	n.Manager, err = lease.NewManager(lease.ManagerConfig{
		Self: n.self, Clock: f.now, Rights: rights{}, Sizer: sizer, Wait: cluster.TakeoverWait, Client: n.client, Drop: n.drop,
	})
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	n.Register(n.server)
	var life context.Context
	life, n.quit = context.WithCancel(context.Background())
	n.began = time.Now()
	n.ended.Go(func() { _ = n.server.Serve(l) }) // ends with stop
	n.ended.Go(func() { n.Run(life) })
	f.nodes = append(f.nodes, n)
	return n, nil
}

// rights are those of a process that keeps its view lease for ever.
type rights struct{}

func (rights) Left(int64, uint32) int64      { return int64(viewLease) }
func (rights) Lease(int64, uint64) int64     { return int64(viewLease) }
func (rights) Started(int64, uint64, uint32) {}

// client is the connection to a node, over the slow network.
func (n *node) client(address string) (grpc.ClientConnInterface, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if c := n.conns[address]; c != nil {
		return c, nil
	}
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(n.f.net.dial), grpc.WithChainStreamInterceptor(n.watch))
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
		_ = c.Close() // it is given up
	}
}

// watch counts what goes over a stream to an owner.
func (n *node) watch(ctx context.Context, d *grpc.StreamDesc, c *grpc.ClientConn, method string, open grpc.Streamer, os ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := open(ctx, d, c, method, os...)
	return &watched{s, n}, err
}

type watched struct {
	grpc.ClientStream
	n *node
}

// SendMsg implements grpc.ClientStream.
func (s *watched) SendMsg(m any) error {
	if f, ok := m.(*leasepb.Frame); ok {
		atTick := time.Since(s.n.began)%lease.KeepEvery < tickLate
		for _, r := range f.GetRequests() {
			if len(r.GetAsks()) == 0 && atTick {
				s.n.kept.Add(1)
			} else {
				s.n.trips.Add(1)
			}
		}
	}
	return s.ClientStream.SendMsg(m)
}

// RecvMsg implements grpc.ClientStream.
func (s *watched) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if f, ok := m.(*leasepb.Frame); ok && err == nil {
		for _, r := range f.GetResponses() {
			if r.GetAnswers() == 0 {
				s.n.pushed.Add(1)
			}
		}
	}
	return err
}

// stop ends all nodes.
func (f *fleet) stop() error {
	for _, n := range f.nodes {
		n.quit()
		n.mu.Lock()
		for _, c := range n.conns {
			_ = c.Close() // nothing is sent any more
		}
		n.mu.Unlock()
		n.server.Stop()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, n := range f.nodes {
			n.ended.Wait()
		}
		f.net.close()
	}()
	select {
	case <-done:
		return nil
	case <-time.After(stopFor):
		return fmt.Errorf("the nodes have not ended after %v", stopFor)
	}
}

// nobody is the tenant whose bucket nodes get to know each other by.
const nobody = -1

// place gives each tenant a partition.
func place(home string) uint32 {
	tenant, _ := strconv.Atoi(home[1:]) // as charge wrote it
	return uint32(tenant + 1)
}

func (f *fleet) charge(tenant int32, cost int64) limiter.Charge {
	return limiter.Charge{
		Key: limiter.Key{Tenant: "t" + strconv.Itoa(int(tenant)), Limit: "l", Subject: "s"}, Limit: &f.limit, Cost: cost,
		Apart: limiter.ByPrivate, Private: f.part,
	}
}

// warm has every node ask the owner something that changes nothing, so that there are connections.
func (f *fleet) warm(ctx context.Context) error {
	var wg sync.WaitGroup
	failed := make([]bool, len(f.nodes))
	for i, n := range f.nodes {
		wg.Go(func() {
			for by := time.Now().Add(warmFor); time.Now().Before(by); {
				cs, ds := []limiter.Charge{f.charge(nobody, 1)}, make([]limiter.Decision, 1)
				if n.Peek(ctx, cs, ds) == -1 && ds[0].By == limiter.ByOwner {
					return
				}
				if !load.WaitUntil(ctx, time.Now().Add(warmEvery)) {
					break
				}
			}
			failed[i] = true
		})
	}
	wg.Wait()
	if slices.Contains(failed, true) {
		return errors.Join(errors.New("a node does not reach the owner"), ctx.Err())
	}
	return nil
}

// drive has the demand arrive, and returns when all of it is decided.
func (f *fleet) drive(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, n := range f.nodes {
		n.trips.Store(0)
		n.kept.Store(0)
		n.pushed.Store(0)
	}
	cpu, bytes := origin.ProcessorTime(), f.net.bytes.Load()
	began := time.Now()
	base := f.start.UnixNano() + int64(began.Sub(f.start))
	var wg, looks sync.WaitGroup
	looks.Go(func() { f.look(ctx, began) })
	var open atomic.Int64
	var err error
	for i := range f.demand {
		if !load.WaitUntil(ctx, began.Add(time.Duration(f.demand[i].At))) {
			err = ctx.Err()
			break
		}
		if open.Add(1) > maxOpen {
			err = errOpen
			break
		}
		wg.Go(func() {
			defer open.Add(-1)
			f.take(ctx, i, base)
		})
	}
	wg.Wait()
	if err == nil && !load.WaitUntil(ctx, began.Add(f.cell.For)) {
		err = ctx.Err()
	}
	f.cpu, f.bytes = origin.ProcessorTime()-cpu, f.net.bytes.Load()-bytes
	cancel()
	looks.Wait()
	return err
}

// take puts a request to its node and settles it at once, at the estimate. base is the clock's reading at the start.
func (f *fleet) take(ctx context.Context, i int, base int64) {
	a := &f.demand[i]
	n := f.nodes[a.Node]
	cs, ds := []limiter.Charge{f.charge(a.Tenant, a.Cost)}, make([]limiter.Decision, 1)
	sent := time.Now()
	admitted := n.Take(ctx, cs, ds) == -1
	took := time.Since(sent)
	by := ds[0].By
	f.fates[i] = benchlease.Fate{
		At: ds[0].At - base, Took: int64(took), Decided: true, Admitted: admitted, Local: by == limiter.ByLease || by == limiter.ByRefusal,
	}
	if !admitted {
		f.refused[a.Tenant].Store(true)
		return
	}
	n.Settle(cs, []int64{a.Cost}, ds)
}

// look notes, at the end of each second, what lies at nodes of the buckets that somebody was refused by.
func (f *fleet) look(ctx context.Context, began time.Time) {
	for s := time.Second; s <= f.cell.For; s += time.Second {
		if !load.WaitUntil(ctx, began.Add(s)) {
			return
		}
		for t := range f.refused {
			if !f.refused[t].Swap(false) {
				continue
			}
			c := f.charge(int32(t), 1)
			for _, n := range f.nodes {
				_, held, _ := n.Where(&c)
				f.stranded += float64(held)
			}
			f.looked++
		}
	}
}

func (f *fleet) evidence() benchlease.Evidence {
	e := benchlease.Evidence{Demand: f.demand, Fates: f.fates, Trips: make([]int, f.cell.Nodes), Bytes: f.bytes, CPU: f.cpu}
	for i, n := range f.nodes {
		e.Kept += int(n.kept.Load())
		e.Pushed += int(n.pushed.Load())
		if i < len(e.Trips) {
			e.Trips[i] = int(n.trips.Load())
		}
	}
	if f.looked > 0 {
		e.Stranded = f.stranded / float64(f.looked) / float64(f.limit.Burst) * float64(max(f.cell.Tenants, 1))
	}
	return e
}
