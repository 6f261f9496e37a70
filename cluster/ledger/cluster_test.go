package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

// testCluster is a cluster in one process: raft over its in-memory transport, peers by
// function calls, gossip by hand. What it starts ends with the test.
type testCluster struct {
	t    testing.TB
	tune func(*Config)

	mu     sync.Mutex
	nodes  map[raft.ServerID]*testNode
	gossip map[raft.ServerID]Server
	cut    map[[2]raft.ServerAddress]bool
}

type testNode struct {
	id        raft.ServerID
	addr      raft.ServerAddress
	config    Config // kept for a restart
	transport *raft.InmemTransport
	ledger    *Ledger // nil: down
}

func newTestCluster(t testing.TB, tune func(*Config)) *testCluster {
	c := &testCluster{
		t: t, tune: tune,
		nodes: map[raft.ServerID]*testNode{}, gossip: map[raft.ServerID]Server{}, cut: map[[2]raft.ServerAddress]bool{},
	}
	t.Cleanup(c.closeAll)
	return c
}

func (c *testCluster) closeAll() {
	c.mu.Lock()
	nodes := make([]*testNode, 0, len(c.nodes))
	for _, n := range c.nodes {
		nodes = append(nodes, n)
	}
	c.mu.Unlock()
	for _, n := range nodes {
		c.kill(n)
	}
}

// add starts a node with empty stores in memory, alive in gossip.
func (c *testCluster) add(id raft.ServerID, addr raft.ServerAddress) *testNode {
	store := raft.NewInmemStore()
	return c.addWith(id, addr, Config{Logs: store, Stable: store, Snapshots: raft.NewInmemSnapshotStore()})
}

func (c *testCluster) addWith(id raft.ServerID, addr raft.ServerAddress, config Config) *testNode {
	c.t.Helper()
	n := &testNode{id: id, addr: addr, config: config}
	c.start(n)
	return n
}

// start opens the node's ledger (anew) and connects it to all others.
func (c *testCluster) start(n *testNode) {
	c.t.Helper()
	if err := c.tryStart(n); err != nil {
		c.t.Fatalf("starting %s: %v", n.id, err)
	}
}

func (c *testCluster) tryStart(n *testNode) error {
	config := n.config
	_, n.transport = raft.NewInmemTransport(n.addr)
	config.ServerID, config.Address, config.Transport = n.id, n.addr, n.transport
	config.Logger = slog.New(slog.DiscardHandler)
	config.Peer = testPeer{c, n.addr}
	config.Servers = c.servers
	config.Stats = func(ctx context.Context, s Server) (uint64, uint64, time.Duration, error) {
		l := c.reach(n.addr, s.ID)
		if l == nil {
			return 0, 0, 0, errors.New("unreachable")
		}
		stats := l.Stats()
		return stats.LastIndex, stats.LastTerm, stats.LastContact, nil
	}
	if c.tune != nil {
		c.tune(&config)
	}
	l, err := Open(config)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n.ledger = l
	c.nodes[n.id] = n
	c.gossip[n.id] = Server{ID: n.id, Name: nodeName(n.id), Address: n.addr}
	for _, other := range c.nodes {
		if other != n && other.ledger != nil {
			c.connect(n, other)
		}
	}
	return nil
}

func (c *testCluster) connect(a, b *testNode) {
	if c.cut[[2]raft.ServerAddress{a.addr, b.addr}] {
		return
	}
	a.transport.Connect(b.addr, b.transport)
	b.transport.Connect(a.addr, a.transport)
}

// kill stops a node without handing over or leaving; its stores stay.
func (c *testCluster) kill(n *testNode) {
	c.t.Helper()
	c.mu.Lock()
	l := n.ledger
	n.ledger = nil
	c.mu.Unlock()
	if l == nil {
		return
	}
	n.transport.DisconnectAll()
	for _, other := range c.others(n) {
		other.transport.Disconnect(n.addr)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // no handing over
	if err := l.Close(ctx); err != nil {
		c.t.Errorf("closing %s: %v", n.id, err)
	}
}

func (c *testCluster) others(n *testNode) (others []*testNode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.nodes {
		if o != n {
			others = append(others, o)
		}
	}
	return others
}

func (c *testCluster) setStatus(id raft.ServerID, s Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	server := c.gossip[id]
	server.Status, server.Since = s, time.Now()
	c.gossip[id] = server
}

func (c *testCluster) servers() (servers []Server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.gossip {
		servers = append(servers, s)
	}
	return servers
}

// isolate cuts a node off from all others, or ends that.
func (c *testCluster) isolate(n *testNode, off bool) {
	for _, o := range c.others(n) {
		c.mu.Lock()
		c.cut[[2]raft.ServerAddress{n.addr, o.addr}] = off
		c.cut[[2]raft.ServerAddress{o.addr, n.addr}] = off
		if !off && n.ledger != nil && o.ledger != nil {
			c.connect(n, o)
		}
		c.mu.Unlock()
		if off {
			n.transport.Disconnect(o.addr)
			o.transport.Disconnect(n.addr)
		}
	}
}

// reach gives the ledger of a server that from can reach, nil if it can't.
func (c *testCluster) reach(from raft.ServerAddress, id raft.ServerID) *Ledger {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[id]
	if n == nil || n.ledger == nil || c.cut[[2]raft.ServerAddress{from, n.addr}] {
		return nil
	}
	return n.ledger
}

// testPeer calls the leader's ledger; an answer is lost where the link was cut meanwhile.
type testPeer struct {
	c    *testCluster
	from raft.ServerAddress
}

func (p testPeer) Propose(ctx context.Context, leader raft.ServerID, _ raft.ServerAddress, command []byte) ([]byte, bool, bool, error) {
	l := p.c.reach(p.from, leader)
	if l == nil {
		return nil, true, false, nil
	}
	result, _, unknown, err := l.ProposeLocal(ctx, command)
	if p.c.reach(p.from, leader) != l {
		return nil, false, true, errors.New("connection lost")
	}
	if errors.Is(err, ErrNotLeader) {
		return nil, true, false, nil
	}
	return result, false, unknown, err
}

// bootstrap starts n nodes n1.a … and makes them the voters of a new cluster.
func (c *testCluster) bootstrap(n int) []*testNode {
	c.t.Helper()
	var nodes []*testNode
	var servers []raft.Server
	for i := range n {
		id, addr := testID(i+1), testAddr(i+1)
		nodes = append(nodes, c.add(id, addr))
		servers = append(servers, raft.Server{ID: id, Address: addr, Suffrage: raft.Voter})
	}
	if err := nodes[0].ledger.Bootstrap(servers); err != nil { // the others hear of it
		c.t.Fatalf("bootstrap of %s: %v", nodes[0].id, err)
	}
	c.leader()
	return nodes
}

func testID(i int) raft.ServerID        { return raft.ServerID(fmt.Sprintf("n%d.a", i)) }
func testAddr(i int) raft.ServerAddress { return raft.ServerAddress(fmt.Sprintf("addr%d", i)) }

func (c *testCluster) until(what string, is func() bool) {
	c.t.Helper()
	until(c.t, what, is)
}

// until waits for the condition, a minute at most of the test's time.
func until(t testing.TB, what string, is func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("never: %s", what)
		}
	}
}

// leader waits for a node that proves that it leads.
func (c *testCluster) leader() (leader *testNode) {
	c.t.Helper()
	c.until("a leader", func() bool {
		c.mu.Lock()
		nodes := make([]*testNode, 0, len(c.nodes))
		for _, n := range c.nodes {
			if n.ledger != nil {
				nodes = append(nodes, n)
			}
		}
		c.mu.Unlock()
		for _, n := range nodes {
			if n.ledger.Barrier(c.t.Context()) == nil {
				leader = n
				return true
			}
		}
		return false
	})
	return leader
}

func (c *testCluster) follower() *testNode {
	c.t.Helper()
	leader := c.leader()
	for _, n := range c.others(leader) {
		if n.ledger != nil {
			return n
		}
	}
	c.t.Fatal("no follower")
	return nil
}

// voters are the ids of those who vote, sorted, by the leader's configuration.
func (c *testCluster) voters() (ids []raft.ServerID) {
	for _, v := range c.leader().ledger.Voters() {
		ids = append(ids, v.ID)
	}
	slices.Sort(ids)
	return ids
}

// settled waits until every node that is up shows the same state, what was committed before or more. A node
// shows it before it has told of it (Config.Changed).
func (c *testCluster) settled() {
	c.t.Helper()
	least := c.leader().ledger.Facts().Changed
	c.until("equal replicas", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		var first *Facts
		for _, n := range c.nodes {
			if n.ledger == nil {
				continue
			}
			f := n.ledger.Facts()
			if first == nil {
				first = f
			}
			if f.Hash != first.Hash || f.Changed != first.Changed || f.Changed < least {
				return false
			}
		}
		return first != nil
	})
}

// set throws a kill switch whose reason is the value: the cluster's registers.
func set(name, value string) *ledgerpb.Command {
	return &ledgerpb.Command{Version: 1, Actor: "test", Body: &ledgerpb.Command_SetKill{SetKill: &ledgerpb.SetKill{
		Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: name, On: true, Reason: value,
	}}}
}

func get(f *Facts, name string) string {
	if k, ok := f.Kills.Lookup(KillTenant, name); ok {
		return k.Reason
	}
	return ""
}

func (c *testCluster) propose(n *testNode, command *ledgerpb.Command) *ledgerpb.Result {
	c.t.Helper()
	result, err := n.ledger.Propose(c.t.Context(), command)
	if err != nil {
		c.t.Fatalf("proposing on %s: %v", n.id, err)
	}
	return result
}

// found names the cluster and gives it a view, as its first leader does.
func (c *testCluster) found() {
	c.t.Helper()
	leader := c.leader()
	c.propose(leader, &ledgerpb.Command{Version: 1, Actor: "test", Body: &ledgerpb.Command_Found{
		Found: &ledgerpb.Found{ClusterId: []byte("0123456789abcdef")},
	}})
	c.propose(leader, &ledgerpb.Command{Version: 1, Actor: "test", Body: &ledgerpb.Command_SetView{SetView: &ledgerpb.SetView{
		View: &ledgerpb.View{Epoch: 1, Partitions: 64, RingVersion: 1, Members: []*ledgerpb.Member{{Name: "n1", Incarnation: 7, Address: "n1:7946"}}},
	}}})
	if v := leader.ledger.Facts().View; v == nil || v.Epoch != 1 {
		c.t.Fatalf("view %+v, want epoch 1", v)
	}
}

func mustMarshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
