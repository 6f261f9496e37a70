// Package cluster lets nodes agree on who is there, who owns what and who may grant it. See
// DESIGN.md.
//
// Open joins a node to its cluster, or starts one; from then on Facts is what the cluster has
// agreed on, Propose changes it, Leased says whether this node may act on it, and Close leaves.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/cluster/pki"
)

const (
	askTimeout   = time.Second // of a node that is asked how it is
	joinPatience = time.Second // for a seed to answer, before the start goes on without

	leavePatience = 3 * time.Second // for a view without this node
	leavePoll     = 5 * time.Millisecond
)

// Config is what a Cluster is made from. Listen's port and the two above it are used.
type Config struct {
	Name, ClusterName, Version string
	Incarnation                uint64 // of this process, from NewIncarnation; 0: Open makes one
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
	// Recalled is called, as Changed, where somebody was granted less of a budget than needed while others held
	// some of it.
	Recalled func(ledger.BudgetKey)
	// LastUsed gives when this node saw keys used last, in Unix seconds.
	LastUsed func() map[string]int64
	// Owing gives the incarnations of members that have owed this node an answer for so long that
	// the cluster should do without them.
	Owing func() []uint64
	// Services adds to what this node's gRPC server serves.
	Services   func(*grpc.Server)
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

	ledger    *ledger.Ledger
	gossip    *Gossip
	gossips   chan struct{} // closed when gossip is there: the ledger asks before
	fence     *Fence
	keeper    *Keeper
	peers     *peers
	server    *grpc.Server
	raftTr    *resending
	views     chan *ledger.View // to step to
	asked     chan struct{}     // a new view was stepped to: ask for its lease at once
	ousted    chan struct{}     // closed when another process has this one's name in the view
	told      atomic.Uint64     // the epoch that changed was told last
	next      *Proposer
	trail     trail // of this replica, while it leads
	walls     walls // of the members, while it leads
	led       int64 // since when this node leads; lead's own
	wallOff   wallOff
	stepped   atomic.Uint64 // the epoch of the view that Stepped was told last
	announced atomic.Bool   // that this node leaves

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
		cfg: cfg, log: cfg.Logger, incarnation: cmp.Or(cfg.Incarnation, NewIncarnation()), next: NewProposer(ViewConfig{}),
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
	if c.Owing == nil {
		c.Owing = func() []uint64 { return nil }
	}
	if c.Services == nil {
		c.Services = func(*grpc.Server) {}
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
	c.cfg.Services(c.server)
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
		Peer: forwarder{c.peers}, Servers: c.servers, Stats: c.stats, WallOff: c.WallOff, Changed: c.changed, Recalled: c.cfg.Recalled, Logger: c.log, Registerer: c.cfg.Registerer,
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

// Leave tells the others that this node goes, a leader's leadership first, and waits until Stepped
// has returned from a view without it, so that what it owned can be handed over: Run must go on for so
// long. It does not wait where nobody else is left who could commit one. Close comes after it.
func (c *Cluster) Leave(ctx context.Context) {
	others := len(c.fence.Ring().Members()) > 1
	c.announce(ctx)
	if !others {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leavePatience)
	defer cancel()
	t := time.NewTicker(leavePoll)
	defer t.Stop()
	for c.fence.Member() || c.stepped.Load() < c.fence.Epoch() {
		select {
		case <-ctx.Done():
			c.log.Info("no view without this node came in time: what it owned is not handed over")
			return
		case <-t.C:
		}
	}
}

// announce makes the others see at once that this node is gone, not lost.
func (c *Cluster) announce(ctx context.Context) {
	if c.announced.Swap(true) {
		return
	}
	if c.ledger.IsLeader() {
		if err := c.ledger.TransferLeadership(ctx); err != nil {
			c.log.Info("leadership was not handed over; the others elect", "error", err)
		}
	}
	if err := c.gossip.Leave(ctx); err != nil {
		c.log.Info("not all others were told that this node leaves; they will find out", "error", err)
	}
}

// Close ends a node's part. Where Leave did not come before it, it tells the others, and waits for
// no view.
func (c *Cluster) Close(ctx context.Context) error {
	c.announce(ctx)
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

// Fence says what this process may grant.
func (c *Cluster) Fence() *Fence { return c.fence }

// Conn is a connection to the gRPC server of the node that gossips at an address. It is shared, and
// closed by the cluster.
func (c *Cluster) Conn(address string) (grpc.ClientConnInterface, error) {
	return c.peers.conn(rpcOf(address))
}

// Reconnect has the connection of Conn made anew: after a partition a TCP connection may take
// minutes to notice that it has healed.
func (c *Cluster) Reconnect(address string) { c.peers.drop(rpcOf(address)) }

// MayGrant says whether this process, and no other, may grant a tenant's quota now.
func (c *Cluster) MayGrant(tenant string) bool {
	return c.fence.MayGrant(c.cfg.Seams.Now(), c.fence.Ring().Partition(tenant))
}

// Owner is the member that owns a tenant in the view that this node has stepped to; the zero
// Member before the first.
func (c *Cluster) Owner(tenant string) ledger.Member { return c.fence.Ring().OwnerOf(tenant) }

// Epoch is that of the view that this node has stepped to; 0 before the first.
func (c *Cluster) Epoch() uint64 { return c.fence.Epoch() }
