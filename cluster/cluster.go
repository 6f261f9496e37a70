// Package cluster lets nodes agree on who is there, who owns what and who may grant it. See
// DESIGN.md.
//
// Open joins a node to its cluster, or starts one; from then on Facts is what the cluster has
// agreed on, Propose changes it, Leased says whether this node may act on it, and Close leaves.
package cluster

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/cluster/pki"
)

const (
	keepTimeout  = time.Second           // a later answer to a request for a view lease would grant nothing
	maxAsking    = 32                    // such requests in flight; unanswered, keepTimeout / KeepRetry of them are
	leadEvery    = 50 * time.Millisecond // how often the leader looks for a new view
	startEvery   = 200 * time.Millisecond
	promiseFor   = 10 * time.Second
	askTimeout   = time.Second // of a node that is asked how it is
	joinPatience = time.Second // for a seed to answer, before the start goes on without
	catchUpEvery = time.Second

	// foundersPatience is how long the first view waits for all founders: they need not wait for
	// each other in it, as those who enter a later one must.
	foundersPatience = 2 * time.Second

	viewsPending = 64 // views to step to; beyond these one is skipped, which costs a wait only
)

// Config is what a Cluster is made from. Listen's port and the two above it are used.
type Config struct {
	Name, ClusterName, Version string
	DataDir                    string
	Listen                     string   // HOST:PORT of the gossip; gRPC is the next port, raft the one after
	Advertise                  string   // where others reach it; "": as Listen
	Seeds                      []string // gossip addresses of nodes to join
	BootstrapExpect            int      // how many nodes found the cluster together; 0: join one only
	TLS                        *pki.Bundle
	// Changed is called with what the cluster has agreed on, one call at a time and in order.
	// It must not block: no write commits while it runs.
	Changed func(*ledger.Facts)
	// Stepped is called whenever this node has stepped to a new view; it must not block.
	Stepped func(*ledger.View)
	// LastUsed gives when this node saw keys used last, in Unix seconds.
	LastUsed   func() map[string]int64
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	Seams      Seams
}

// Seams replace the machine's network, disk and clock in tests. With clustertest's network and raft's
// stores in memory whole clusters run in a testing/synctest bubble: neither gRPC nor raft nor memberlist
// waits for anything that a bubble does not see.
type Seams struct {
	Gossip memberlist.NodeAwareTransport
	Listen func(address string) (net.Listener, error)
	Dial   func(ctx context.Context, address string) (net.Conn, error)
	Now    func() int64
	Ledger func(*ledger.Config)
}

// Validate names the field and the remedy.
func (c *Config) Validate() error {
	switch {
	case c.BootstrapExpect < 0:
		return fmt.Errorf("bootstrap-expect is %d; name how many nodes found the cluster together, such as 3", c.BootstrapExpect)
	case c.BootstrapExpect == 1 && len(c.Seeds) > 0:
		return errors.New("join and bootstrap-expect 1 exclude each other: a node that founds a cluster alone has none to join; leave one out")
	}
	if err := CheckName("--node-id", c.Name); err != nil {
		return err
	}
	if err := CheckName("--cluster-name", c.ClusterName); err != nil {
		return err
	}
	if _, _, err := splitAddress("--cluster-listen", c.Listen); err != nil {
		return err
	}
	if c.Advertise == "" {
		return nil
	}
	_, _, err := splitAddress("--cluster-advertise", c.Advertise)
	return err
}

// Cluster is a node's membership. Its methods may be called concurrently.
type Cluster struct {
	cfg         Config
	log         *slog.Logger
	serverID    string
	incarnation uint64
	address     string // of the gossip, as others reach it

	ledger  *ledger.Ledger
	gossip  *Gossip
	gossips chan struct{} // closed when gossip is there: the ledger asks before
	fence   *Fence
	keeper  *Keeper
	peers   *peers
	server  *grpc.Server
	raftTr  *resending
	views   chan *ledger.View // to step to
	asked   chan struct{}     // a new view was stepped to: ask for its lease at once
	ousted  chan struct{}     // closed when another process has this one's name in the view
	told    atomic.Uint64     // the epoch that changed was told last
	next    *Proposer
	trail   trail // of this replica, while it leads
	led     int64 // since when this node leads; lead's own

	wg sync.WaitGroup // what Open started

	mu         sync.Mutex
	promised   string // to whom this node, which has no ledger, has lent itself
	promisedAt int64
}

// Open starts a node's part in its cluster. It returns once the node listens and gossips;
// whether it has a ledger by then shows in Facts.
func Open(ctx context.Context, cfg Config) (*Cluster, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.defaults()
	c := &Cluster{
		cfg: cfg, log: cfg.Logger, incarnation: NewIncarnation(), next: NewProposer(ViewConfig{}),
		views: make(chan *ledger.View, viewsPending), asked: make(chan struct{}, 1), ousted: make(chan struct{}),
		gossips: make(chan struct{}),
	}
	var err error
	if c.serverID, err = StoredServerID(cfg.DataDir, cfg.Name); err != nil {
		return nil, err
	}
	c.fence = NewFence(Self{Name: cfg.Name, Incarnation: c.incarnation}, FenceOptions{})
	if err := c.open(ctx); err != nil {
		return nil, errors.Join(err, c.close(context.WithoutCancel(ctx)))
	}
	return c, nil
}

func (c *Config) defaults() {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registerer == nil {
		c.Registerer = prometheus.NewRegistry()
	}
	if c.Seams.Now == nil {
		c.Seams.Now = Now
	}
	if c.Seams.Dial == nil {
		c.Seams.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", address)
		}
	}
	if c.Seams.Listen == nil {
		c.Seams.Listen = func(address string) (net.Listener, error) { return net.Listen("tcp", address) }
	}
	if c.Changed == nil {
		c.Changed = func(*ledger.Facts) {}
	}
	if c.Stepped == nil {
		c.Stepped = func(*ledger.View) {}
	}
	if c.LastUsed == nil {
		c.LastUsed = func() map[string]int64 { return nil }
	}
}

// open makes the parts in the order in which they need each other.
func (c *Cluster) open(ctx context.Context) error {
	var creds, dialCreds credentials.TransportCredentials
	if c.cfg.TLS != nil {
		creds, dialCreds = credentials.NewTLS(c.cfg.TLS.ServerTLS()), credentials.NewTLS(c.cfg.TLS.ClientTLS())
	}
	c.peers = newPeers(c.cfg.ClusterName, dialCreds, c.cfg.Seams.Dial)
	rpc, raftLis, err := c.listen()
	if err != nil {
		return err
	}
	if err := c.openLedger(raftLis); err != nil {
		return errors.Join(err, rpc.Close())
	}
	c.keeper = NewKeeper(c.ledger.Barrier, func() *ledger.View { return c.ledger.Facts().View })
	c.server = newServer(c.cfg.ClusterName, creds, c.log)
	clusterpb.RegisterClusterServer(c.server, service{c: c})
	if err := c.openGossip(); err != nil {
		return errors.Join(err, rpc.Close())
	}
	c.wg.Go(func() { _ = c.server.Serve(rpc) }) // ends with close, and then with no other error than that
	c.registerMetrics()
	ctx, cancel := context.WithTimeout(ctx, joinPatience)
	defer cancel()
	if err := c.gossip.Join(ctx); err != nil && !errors.Is(err, ErrNotJoined) {
		return err
	}
	return nil
}

// Run keeps the node's view lease and does what falls to a leader, until ctx ends. It returns
// early with an error that the process should end with: another node has this one's name.
func (c *Cluster) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop() // before the wait
	for _, loop := range [...]func(context.Context){c.follow, c.keepView, c.lead, c.found, c.tidy} {
		wg.Go(func() { loop(ctx) })
	}
	if c.cfg.TLS != nil {
		wg.Go(func() { c.cfg.TLS.Watch(ctx, c.log, c.rekey) })
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-c.gossip.Fatal():
		return err
	case <-c.ousted:
		return fmt.Errorf("%w in the view: it was started while this one was stopped or cut off; one of them must have another --node-id", ErrNameTaken)
	}
}

// listen opens the ports of gRPC and raft. Port 0 stands for any three free ports in a row.
func (c *Cluster) listen() (rpc, raftLis net.Listener, err error) {
	const tries = 32
	host, port, err := net.SplitHostPort(c.cfg.Listen)
	if err != nil {
		return nil, nil, fmt.Errorf("cluster-listen %q is not HOST:PORT, such as 127.0.0.1:7946", c.cfg.Listen)
	}
	for range tries {
		if port == "0" {
			if c.cfg.Listen, err = freePort(c.cfg.Seams.Listen, host); err != nil {
				return nil, nil, err
			}
		}
		if rpc, err = c.cfg.Seams.Listen(rpcOf(c.cfg.Listen)); err != nil {
			err = fmt.Errorf("listen for the cluster's gRPC, one port above cluster-listen: %w", err)
		} else if raftLis, err = c.cfg.Seams.Listen(raftOf(c.cfg.Listen)); err != nil {
			err = errors.Join(fmt.Errorf("listen for raft, two ports above cluster-listen: %w", err), rpc.Close())
		}
		if err == nil || port != "0" {
			break
		}
	}
	c.address = cmp.Or(c.cfg.Advertise, c.cfg.Listen)
	return rpc, raftLis, err
}

// freePort is an address of the host that nothing listens at now.
func freePort(listen func(string) (net.Listener, error), host string) (string, error) {
	l, err := listen(net.JoinHostPort(host, "0"))
	if err != nil {
		return "", fmt.Errorf("listen for gossip: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// address is one that others know us by.
type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }

func (c *Cluster) openLedger(lis net.Listener) error {
	sc := RaftStreamConfig{
		Listener: lis, Advertise: address(raftOf(c.address)), Dial: c.cfg.Seams.Dial, ClusterName: c.cfg.ClusterName, Protocol: Protocol, Logger: c.log,
	}
	if c.cfg.TLS != nil {
		sc.ServerTLS, sc.ClientTLS = c.cfg.TLS.ServerTLS(), c.cfg.TLS.ClientTLS()
	}
	stream, err := NewRaftStream(sc)
	if err != nil {
		return errors.Join(err, lis.Close())
	}
	// One call at a time: in raft v1.8.0 a leader whose follower answers a pipelined call with a newer
	// term may wait for ever to hand on the next one, and its shutdown for it.
	c.raftTr = &resending{NetworkTransport: raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: stream, MaxPool: 3, MaxRPCsInFlight: 1, Timeout: 5 * time.Second, Logger: ledger.RaftLogger(c.log), ServerAddressProvider: RaftAddresses(c.raftAddress),
	})}
	lc := ledger.Config{
		Dir: c.cfg.DataDir, ServerID: raft.ServerID(c.serverID), Address: raft.ServerAddress(raftOf(c.address)), Transport: c.raftTr,
		Peer: forwarder{c.peers}, Servers: c.servers, Stats: c.stats, Changed: c.changed, Logger: c.log, Registerer: c.cfg.Registerer,
	}
	if c.cfg.Seams.Ledger != nil {
		c.cfg.Seams.Ledger(&lc)
	}
	if c.ledger, err = ledger.Open(lc); err != nil {
		return err
	}
	c.raftTr.ledger.Store(c.ledger)
	return nil
}

func (c *Cluster) openGossip() error {
	gc := GossipConfig{
		Name: c.cfg.Name, Incarnation: c.incarnation, ServerID: c.serverID, Bind: c.cfg.Listen, Advertise: c.cfg.Advertise,
		ClusterName: c.cfg.ClusterName, Protocol: Protocol, Version: c.cfg.Version, Seeds: c.cfg.Seeds, Transport: c.cfg.Seams.Gossip,
		ClusterID: c.ledger.ClusterID, BootstrapExpect: c.cfg.BootstrapExpect, Founded: c.ledger.HasState,
		Insecure: c.cfg.TLS == nil, Identify: c.identify, Dial: c.cfg.Seams.Dial, Logger: c.log,
	}
	if c.cfg.TLS != nil {
		gc.Keys = c.cfg.TLS.GossipKeys
	}
	var err error
	if c.gossip, err = StartGossip(gc); err != nil {
		return err
	}
	close(c.gossips)
	return nil
}

// rekey takes changed gossip keys over; certificates are read by those who use them.
func (c *Cluster) rekey() {
	if err := c.gossip.SetKeys(c.cfg.TLS.GossipKeys()); err != nil {
		c.log.Error("changed gossip keys can't be used; the old ones stay", "error", err)
	}
}

// Close leaves: the others see at once that this node is gone, not lost. A leader hands its
// leadership over first.
func (c *Cluster) Close(ctx context.Context) error {
	if c.ledger.IsLeader() {
		if err := c.ledger.TransferLeadership(ctx); err != nil {
			c.log.Info("leadership was not handed over; the others elect", "error", err)
		}
	}
	if err := c.gossip.Leave(ctx); err != nil {
		c.log.Info("not all others were told that this node leaves; they will find out", "error", err)
	}
	return c.close(ctx)
}

// close stops what open started, in reverse.
func (c *Cluster) close(ctx context.Context) error {
	var errs []error
	if c.gossip != nil {
		errs = append(errs, c.gossip.Close())
	}
	if c.peers != nil {
		c.peers.close()
	}
	if c.server != nil {
		c.server.Stop()
	}
	if c.keeper != nil {
		c.keeper.Close()
	}
	if c.ledger != nil {
		errs = append(errs, c.ledger.Close(ctx))
	}
	if c.raftTr != nil {
		errs = append(errs, c.raftTr.Close())
		c.raftTr.CloseStreams() // raft leaves those open that wait in its pool, and so the other ends, too
	}
	c.wg.Wait()
	return errors.Join(errs...)
}

// Facts are what the cluster has agreed on, as far as this replica knows.
func (c *Cluster) Facts() *ledger.Facts { return c.ledger.Facts() }

// Ledger is this node's replica.
func (c *Cluster) Ledger() *ledger.Ledger { return c.ledger }

// Incarnation is this process's.
func (c *Cluster) Incarnation() uint64 { return c.incarnation }

// Address is where others reach this node's gossip.
func (c *Cluster) Address() string { return c.address }

// Propose has the cluster agree on a command, wherever the leader is.
func (c *Cluster) Propose(ctx context.Context, cmd *ledgerpb.Command) (*ledgerpb.Result, error) {
	return c.ledger.Propose(ctx, cmd)
}

// Leased says whether this node holds a view lease: whether the cluster counts on it and it
// may grant. It is a clock reading and an atomic load.
func (c *Cluster) Leased() bool { return c.fence.Valid(c.cfg.Seams.Now()) }

// LeaseLeft is how long that still holds unless a new lease comes; 0 where it does not.
func (c *Cluster) LeaseLeft() time.Duration {
	return time.Duration(max(c.fence.Until()-c.cfg.Seams.Now(), 0))
}

// MayGrant says whether this process, and no other, may grant a tenant's quota now.
func (c *Cluster) MayGrant(tenant string) bool {
	return c.fence.MayGrant(c.cfg.Seams.Now(), c.fence.Ring().Partition(tenant))
}

// Owner is the member that owns a tenant in the view that this node has stepped to; the zero
// Member before the first.
func (c *Cluster) Owner(tenant string) ledger.Member { return c.fence.Ring().OwnerOf(tenant) }

// Epoch is that of the view that this node has stepped to; 0 before the first.
func (c *Cluster) Epoch() uint64 { return c.fence.Epoch() }

// changed runs in the ledger's goroutine. A view that finds no room is skipped: the next one
// then shows a gap, and every partition waits.
func (c *Cluster) changed(f *ledger.Facts) {
	if f.View != nil && f.View.Epoch != c.told.Load() {
		select {
		case c.views <- f.View:
		default:
		}
		c.told.Store(f.View.Epoch)
	}
	c.cfg.Changed(f)
}

// follow steps through the views one by one. Should the last of many have found no room, it is
// caught up with here, too.
func (c *Cluster) follow(ctx context.Context) {
	t := time.NewTicker(catchUpEvery)
	defer t.Stop()
	for {
		var v *ledger.View
		select {
		case <-ctx.Done():
			return
		case v = <-c.views:
		case <-t.C:
			// Before one that changed was not told yet there may be others.
			if last := c.ledger.Facts().View; last != nil && last.Epoch == c.told.Load() && len(c.views) == 0 {
				v = last
			}
		}
		if v == nil || v.Epoch <= c.fence.Epoch() {
			continue
		}
		c.fence.Step(c.cfg.Seams.Now(), v)
		if c.fence.Replaced() {
			close(c.ousted)
			return
		}
		select {
		case c.asked <- struct{}{}:
		default:
		}
		c.gossip.Remember(addressesOf(v))
		c.log.Info("view", "epoch", v.Epoch, "members", memberNames(v))
		c.cfg.Stepped(v)
	}
}

func addressesOf(v *ledger.View) []string {
	out := make([]string, 0, len(v.Members))
	for _, m := range v.Members {
		out = append(out, m.Address)
	}
	return out
}

func memberNames(v *ledger.View) []string {
	names := make([]string, 0, len(v.Members))
	for _, m := range v.Members {
		names = append(names, m.Name)
	}
	return names
}

// asking is where the requests for a view lease stand.
type asking struct {
	mu       sync.Mutex
	sent     int64 // of the last request
	answered bool
	inFlight int
	voter    int // the next voter to try
}

// keepView asks for a view lease every KeepEvery, at once on a new view, and anew after KeepRetry
// where no answer came: a fresh request, to another voter.
func (c *Cluster) keepView(ctx context.Context) {
	var a asking
	var wg sync.WaitGroup
	defer wg.Wait()
	t := time.NewTicker(KeepRetry)
	defer t.Stop()
	for {
		now := false
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-c.asked:
			now = true
		}
		epoch, ok := c.fence.Want()
		if !ok { // another process has this name: Run ends
			return
		}
		a.mu.Lock()
		due := now || !a.answered || c.cfg.Seams.Now()-a.sent >= int64(KeepEvery-KeepRetry/2)
		if due = due && a.inFlight < maxAsking; due {
			a.inFlight++
			if !a.answered {
				a.voter++
			}
			voter, retry := a.voter, !a.answered
			a.sent, a.answered = c.cfg.Seams.Now(), false
			wg.Go(func() { c.ask(ctx, &a, epoch, voter, retry) })
		}
		a.mu.Unlock()
	}
}

// ask sends one request for a view lease; the lease runs from before it was sent.
func (c *Cluster) ask(ctx context.Context, a *asking, epoch uint64, voter int, retry bool) {
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	r := &clusterpb.KeepViewRequest{Name: c.cfg.Name, Incarnation: c.incarnation, Epoch: epoch, Applied: c.ledger.Facts().Index}
	sent := c.cfg.Seams.Now()
	resp, err := c.askOne(ctx, r, voter, retry)
	now := c.cfg.Seams.Now()
	if err != nil {
		c.gossip.Suspect(c.LeaderName())
	}
	a.mu.Lock()
	a.inFlight--
	if err == nil && resp.GetReason() != "not_leader" {
		a.answered = true
	}
	a.mu.Unlock()
	if err == nil && resp.GetGranted() {
		c.fence.Granted(sent, now, epoch)
	}
}

// askOne asks the leader, or where that went unanswered, a voter, which passes it on.
func (c *Cluster) askOne(ctx context.Context, r *clusterpb.KeepViewRequest, voter int, retry bool) (*clusterpb.KeepViewResponse, error) {
	if c.ledger.IsLeader() {
		return c.keepAsLeader(ctx, r), nil
	}
	_, leader := c.ledger.Leader()
	address := string(leader)
	if voters := c.ledger.Voters(); address == "" || retry && voter%2 == 0 && len(voters) > 0 {
		if len(voters) == 0 {
			return nil, ledger.ErrNoLeader
		}
		v := voters[voter/2%len(voters)]
		address = c.raftAddressOr(v.ID, v.Address)
	}
	client, err := c.peers.client(rpcOfRaft(address))
	if err != nil {
		return nil, err
	}
	return client.KeepView(ctx, r)
}

// keepAsLeader answers a request for a view lease; that it was asked shows that the member lives.
// One that does not follow the ledger does not count as a member: kill switches and revocations
// would not bind on it, and nothing else would tell.
func (c *Cluster) keepAsLeader(ctx context.Context, r *clusterpb.KeepViewRequest) *clusterpb.KeepViewResponse {
	if r.GetApplied() < c.trail.due(c.cfg.Seams.Now()) {
		return &clusterpb.KeepViewResponse{Reason: reasonLags}
	}
	c.next.Asked(c.cfg.Seams.Now(), r.GetName(), r.GetIncarnation(), r.GetEpoch())
	granted, reason := c.keeper.Keep(ctx, r.GetName(), r.GetIncarnation(), r.GetEpoch())
	resp := &clusterpb.KeepViewResponse{Granted: granted, Reason: reason}
	if v := c.ledger.Facts().View; v != nil {
		resp.Epoch = v.Epoch
	}
	return resp
}

// lead commits the views, while this node leads.
func (c *Cluster) lead(ctx context.Context) {
	t := time.NewTicker(leadEvery)
	defer t.Stop()
	leads := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if !c.ledger.IsLeader() {
			leads = false
			c.trail.forget()
			continue
		}
		if err := c.leadOnce(ctx, leads); err != nil {
			if ctx.Err() == nil {
				c.log.Debug("the leader could not look after the view", "error", err)
			}
			continue
		}
		leads = true
	}
}

// leadOnce commits what is due. A new leader first lets its replica catch up: what earlier
// leaders committed must show.
func (c *Cluster) leadOnce(ctx context.Context, leads bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if !leads {
		if err := c.ledger.Barrier(ctx); err != nil {
			return err
		}
		c.led = c.cfg.Seams.Now()
		c.next.Elected(c.led)
	}
	f := c.ledger.Facts()
	c.trail.note(c.cfg.Seams.Now(), f.Index)
	if len(f.ClusterID) == 0 {
		id := make([]byte, 16)
		if _, err := rand.Read(id); err != nil {
			return err
		}
		return c.command(ctx, &ledgerpb.Command{Body: &ledgerpb.Command_Found{Found: &ledgerpb.Found{ClusterId: id}}})
	}
	now := c.cfg.Seams.Now()
	view, ok := c.next.Next(now, f.View, c.seen())
	if !ok || f.View == nil && len(view.Members) < c.cfg.BootstrapExpect && now-c.led < int64(foundersPatience) {
		return nil
	}
	return c.command(ctx, &ledgerpb.Command{Body: &ledgerpb.Command_SetView{SetView: &ledgerpb.SetView{View: view.Message()}}})
}

func (c *Cluster) command(ctx context.Context, cmd *ledgerpb.Command) error {
	cmd.Version, cmd.Actor = 1, "node "+c.cfg.Name
	r, err := c.ledger.Propose(ctx, cmd)
	return cmp.Or(err, ledger.RefusalOf(r))
}

// seen is what gossip says of everybody's life.
func (c *Cluster) seen() []Seen {
	members := c.gossip.Members()
	out := make([]Seen, 0, len(members))
	for _, m := range members {
		s := Seen{Name: m.Name, Incarnation: m.Incarnation, Address: m.Address, Gossip: GossipAlive}
		switch m.Status {
		case PeerFailed:
			s.Gossip = GossipDead
		case PeerLeft:
			s.Gossip = GossipLeft
		}
		out = append(out, s)
	}
	return out
}

// found starts the cluster's ledger, if this node is the one to do so, and ends once there is one.
func (c *Cluster) found(ctx context.Context) {
	expect := c.cfg.BootstrapExpect
	if c.ledger.HasState() || expect == 0 {
		return
	}
	t := time.NewTicker(startEvery)
	defer t.Stop()
	said := time.Now()
	for {
		done, err := c.foundOnce(ctx, expect)
		if err != nil {
			c.log.Error("the ledger was not started", "error", err)
		}
		if done {
			return
		}
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			c.log.Info("waiting for the nodes that found the cluster", "bootstrap_expect", expect, "seen", len(c.founders()))
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// founders are the nodes without a ledger that expect as many as this one, by name; nil where
// somebody has a ledger to join.
func (c *Cluster) founders() []Peer {
	var out []Peer
	for _, m := range c.gossip.Members() {
		if m.Status != PeerAlive {
			continue
		}
		if m.Founded && m.Name != c.cfg.Name {
			return nil
		}
		if m.BootstrapExpect == c.cfg.BootstrapExpect {
			out = append(out, m)
		}
	}
	return out
}

// foundOnce: the first of the founders by name asks the others for their promise, and starts the
// ledger with all of them as voters once each has given it. A node promises itself to one only,
// so that it is never part of two ledgers.
func (c *Cluster) foundOnce(ctx context.Context, expect int) (done bool, err error) {
	if c.ledger.HasState() {
		return true, nil
	}
	all := c.founders()
	if len(all) < expect {
		return false, nil
	}
	all = all[:expect]
	if all[0].Name != c.cfg.Name {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	began := c.cfg.Seams.Now()
	servers := make([]raft.Server, 0, expect)
	for _, m := range all {
		servers = append(servers, raft.Server{ID: raft.ServerID(m.ServerID), Address: raft.ServerAddress(raftOf(m.Address))})
		if m.Name == c.cfg.Name {
			if ok, _ := c.promise(c.serverID); !ok {
				return false, nil
			}
			continue
		}
		client, err := c.peers.client(rpcOf(m.Address))
		if err != nil {
			return false, err
		}
		resp, err := client.Promise(ctx, &clusterpb.PromiseRequest{Bootstrapper: c.serverID})
		if err != nil || !resp.GetPromised() {
			c.log.Debug("a founder did not promise itself", "node", m.Name, "reason", resp.GetReason(), "error", err)
			return false, nil
		}
	}
	if c.cfg.Seams.Now()-began > int64(promiseFor/2) { // it was suspended: the promises are old
		return false, nil
	}
	c.log.Info("starting the ledger", "voters", len(servers))
	if err := c.ledger.Bootstrap(servers); err != nil {
		return false, err
	}
	return true, nil
}

// promise lends this node to who asks, if it has no ledger and is not lent to another.
func (c *Cluster) promise(to string) (ok bool, reason string) {
	if c.ledger.HasState() {
		return false, "it has a ledger"
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.cfg.Seams.Now()
	if c.promised != "" && c.promised != to && now-c.promisedAt < int64(promiseFor) {
		return false, "it has promised itself to " + c.promised
	}
	c.promised, c.promisedAt = to, now
	return true, ""
}

// tidy closes the connections to nodes that are gone.
func (c *Cluster) tidy(ctx context.Context) {
	t := time.NewTicker(10 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		addresses := map[string]bool{}
		for _, m := range c.gossip.Members() {
			addresses[rpcOf(m.Address)] = true
		}
		c.peers.keep(addresses)
	}
}

// identify asks who answers at a gRPC address.
func (c *Cluster) identify(ctx context.Context, address string) (Identity, error) {
	client, err := c.peers.client(address)
	if err != nil {
		return Identity{}, err
	}
	r, err := client.Identify(ctx, &clusterpb.IdentifyRequest{}, grpc.WaitForReady(true)) // a connection that waits to be retried is no silence
	return Identity{Name: r.GetName(), Incarnation: r.GetIncarnation(), ServerID: r.GetServerId()}, err
}

// forwarder hands proposals to the leader.
type forwarder struct{ peers *peers }

// Propose see ledger.Peer.
func (f forwarder) Propose(ctx context.Context, _ raft.ServerID, address raft.ServerAddress, command []byte) (result []byte, notLeader, unknown bool, err error) {
	client, err := f.peers.client(rpcOfRaft(string(address)))
	if err != nil {
		return nil, true, false, nil //nolint:nilerr // nothing was sent: the ledger looks for the leader again
	}
	r, err := client.Propose(ctx, &clusterpb.ProposeRequest{Command: command})
	if err != nil {
		refused := status.Code(err) == codes.FailedPrecondition
		if refused {
			return nil, false, false, err
		}
		return nil, false, true, nil //nolint:nilerr // it may have been done before the answer was lost
	}
	if r.GetError() != "" && !r.GetNotLeader() && !r.GetUnknown() {
		return nil, false, false, errors.New(r.GetError())
	}
	return r.GetResult(), r.GetNotLeader(), r.GetUnknown(), nil
}

// servers are the nodes as the ledger needs to know them.
func (c *Cluster) servers() []ledger.Server {
	select {
	case <-c.gossips:
	default:
		return nil
	}
	members := c.gossip.Members()
	out := make([]ledger.Server, 0, len(members))
	for _, m := range members {
		if m.Founded && !bytes.Equal(m.ClusterID, c.ledger.ClusterID()) && !c.hasServer(m.ServerID) {
			continue // of another ledger, for all that is known: to follow this one it would give up its own
		}
		out = append(out, ledger.Server{ID: raft.ServerID(m.ServerID), Name: m.Name, Address: raft.ServerAddress(raftOf(m.Address)), Status: ledgerStatus(m.Status), Since: m.Since})
	}
	return out
}

// hasServer says whether the ledger has a server of that id.
func (c *Cluster) hasServer(id string) bool {
	return slices.ContainsFunc(c.ledger.Members(), func(s raft.Server) bool { return string(s.ID) == id })
}

func ledgerStatus(s PeerStatus) ledger.Status {
	switch s {
	case PeerFailed:
		return ledger.StatusFailed
	case PeerLeft:
		return ledger.StatusLeft
	default:
		return ledger.StatusAlive
	}
}

// raftAddress of a server, as gossip has it now.
func (c *Cluster) raftAddress(id string) (address string, ok bool) {
	for _, s := range c.servers() {
		if string(s.ID) == id {
			return string(s.Address), true
		}
	}
	return "", false
}

func (c *Cluster) raftAddressOr(id raft.ServerID, fallback raft.ServerAddress) string {
	if a, ok := c.raftAddress(string(id)); ok {
		return a
	}
	return string(fallback)
}

// RestoreLedger replaces the ledger's content, through the leader; it gives the state's hash. With
// ledger.ErrBackup, ErrNotEmpty and ErrNoLeader nothing was done; with other errors it may have been.
func (c *Cluster) RestoreLedger(ctx context.Context, r io.Reader, force bool) ([]byte, error) {
	if c.ledger.IsLeader() {
		f, err := c.ledger.Restore(ctx, r, force)
		switch {
		case errors.Is(err, ledger.ErrNotLeader): // any more
			return nil, ledger.ErrNoLeader
		case err != nil:
			return nil, err
		}
		return f.Hash[:], nil
	}
	_, leader := c.ledger.Leader()
	if leader == "" {
		return nil, ledger.ErrNoLeader
	}
	client, err := c.peers.client(rpcOfRaft(string(leader)))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // where r fails the leader waits for more
	stream, err := client.Restore(ctx)
	if err != nil {
		return nil, err
	}
	resp, err := sendChunks(stream, r, force)
	switch {
	case err != nil:
		return nil, err
	case resp.GetCode() == codeNotEmpty:
		return nil, ledger.ErrNotEmpty
	case resp.GetCode() == ReasonNotLeader:
		return nil, ledger.ErrNoLeader
	case resp.GetCode() == codeBackup:
		return nil, as(ledger.ErrBackup, resp.GetError())
	case resp.GetError() != "":
		return nil, errors.New(resp.GetError())
	}
	return resp.GetStateHash(), nil
}
