package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
)

// What gossip promises hangs on these. A process that died is found by its watchers' own
// ping (watchEvery, pingTimeout) and the look that follows, well within a second; a node
// that is cut off, by memberlist's suspicion, within two.
const (
	probeInterval  = 200 * time.Millisecond // memberlist's round of pings
	pingTimeout    = 100 * time.Millisecond
	gossipInterval = 50 * time.Millisecond
	suspicionMult  = 3
	suspicionMax   = 2 // × the shortest suspicion, while nobody confirms it
	awarenessMax   = 4 // × probeInterval, while this node doubts itself
	streamTimeout  = time.Second
	exchangeEvery  = 3 * time.Second // of whole states, for what gossip missed
	retransmitMult = 5               // × the decimal magnitude of the cluster

	tickEvery     = 50 * time.Millisecond
	watchEvery    = 250 * time.Millisecond // between this node's own pings of one it watches
	watchWidth    = 3                      // so many successors by name a node watches itself
	lookTimeout   = 300 * time.Millisecond // for a second look
	lookAgain     = 300 * time.Millisecond // between looks at a member that gossip has given up
	describeEvery = 500 * time.Millisecond // what this node says of itself is read anew
	rejoinEvery   = 2 * time.Second        // while a seed or a failed member is missing
	pushEvery     = 250 * time.Millisecond // while others hold our name at an old address,
	pushFor       = 10 * time.Second       // for so long
	forgetAfter   = 10 * time.Minute       // a member that failed or left

	// Gossip has given a member up, and this many looks in a row got no answer: it failed.
	looksToFail   = 2
	looksWhenLate = 6
	lateTick      = 150 * time.Millisecond // between two ticks: this process is overloaded
	lateFor       = 2 * time.Second

	maxMembers      = 1024 // names gossip may hold; more are refused
	maxRejoins      = 16   // addresses tried in one round
	maxRejoinsAtOne = 4    // of them at one time
	maxHints        = 64   // doubts about members, and rivals, waiting for a look
	maxNotices      = 64   // log lines waiting
)

// GRPCPortOffset and RaftPortOffset lead from a node's gossip port to its other two.
const (
	GRPCPortOffset = 1
	RaftPortOffset = 2
)

// PeerStatus is what gossip makes of a peer. It is a hint: whoever holds a gossip key can
// lie, so nothing may be granted on its word.
type PeerStatus uint8

// A peer is alive until it says that it leaves, or until gossip and a second look agree
// that it failed.
const (
	PeerAlive PeerStatus = iota
	PeerFailed
	PeerLeft
)

func (s PeerStatus) String() string {
	switch s {
	case PeerAlive:
		return "alive"
	case PeerFailed:
		return "failed"
	case PeerLeft:
		return "left"
	}
	return "unknown"
}

// Peer is one process of the cluster as gossip knows it.
type Peer struct {
	Name            string
	Incarnation     uint64
	ServerID        string // in raft
	Address         string // of its gossip, IP:port
	Version         string // of its program
	ClusterID       []byte // empty: part of no cluster yet; not to be changed
	BootstrapExpect int
	Founded         bool
	Status          PeerStatus
	Suspected       bool // alive, but the last look at it got no answer
	Since           time.Time
}

// GRPCAddress is where the peer answers this room's calls.
func (p Peer) GRPCAddress() string { return addToPort(p.Address, GRPCPortOffset) }

func addToPort(address string, n int) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return ""
	}
	p, err := strconv.Atoi(port)
	if err != nil {
		return ""
	}
	return net.JoinHostPort(host, strconv.Itoa(p+n))
}

// Identity is who answers at an address.
type Identity struct {
	Name        string
	Incarnation uint64
	ServerID    string
}

// ErrNameTaken says that a live node of the cluster has this node's name. It is fatal to
// the one that started second.
var ErrNameTaken = errors.New("another live node has this name")

// ErrNotJoined says that no seed has answered yet. It is no reason to stop: gossip keeps
// trying.
var ErrNotJoined = errors.New("no seed has answered yet")

// GossipConfig is what a Gossip needs. Name, Incarnation, ServerID, Bind, ClusterName,
// Protocol and Logger must be given.
type GossipConfig struct {
	Name        string
	Incarnation uint64 // of this process start, never 0
	ServerID    string
	Bind        string // IP:port to listen on, TCP and UDP
	Advertise   string // host:port that others reach it at; empty: Bind
	ClusterName string
	Protocol    uint32 // nodes of another are refused; raise it with each change that the one before cannot read
	Version     string

	// ClusterID, Founded and BootstrapExpect describe this node to others; the functions are
	// called twice a second and must not block. ClusterID may be nil, and gives nothing
	// before there is a cluster.
	ClusterID       func() []byte
	Founded         func() bool // nil: founded once there is a cluster id
	BootstrapExpect int

	Seeds []string // host:port of other nodes' gossip; a host may be a DNS name with many addresses
	// Keys gives the gossip keys (16, 24 or 32 bytes), the first of which encrypts; SetKeys
	// replaces them. None is an error, save with Insecure.
	Keys     func() [][]byte
	Insecure bool

	// Identify asks who answers at a gRPC address, within ctx. It is the second look before
	// a member counts as failed, and what decides whether a name is taken. Nil: whoever
	// accepts a connection there counts.
	Identify func(ctx context.Context, grpcAddress string) (Identity, error)
	// Dial opens a plain connection, to see whether anybody listens. Nil: TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)

	Transport memberlist.NodeAwareTransport // nil: UDP and TCP on Bind
	Logger    *slog.Logger
}

func (c *GossipConfig) validate() error {
	if err := CheckName("--node-id", c.Name); err != nil {
		return err
	}
	if err := CheckName("the cluster's name", c.ClusterName); err != nil {
		return err
	}
	if len(c.ClusterName) > maxClusterLen {
		return fmt.Errorf("the cluster's name has %d characters: at most %d fit a certificate", len(c.ClusterName), maxClusterLen)
	}
	if c.Incarnation == 0 || c.Logger == nil || len(c.ServerID) > maxServerIDLen {
		return errors.New("gossip: an incarnation, a logger and a server id of at most 137 characters must be given")
	}
	return nil
}

// Gossip tells who of the cluster seems alive. It is safe for concurrent use.
type Gossip struct {
	cfg  GossipConfig
	log  *slog.Logger
	self Peer // never changed; its description travels in meta
	list *memberlist.Memberlist
	ring *memberlist.Keyring // nil: plaintext

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	done   sync.WaitGroup

	hints   chan hint   // doubts to look into
	rivals  chan rival  // a name seen at a second address
	notices chan func() // log lines, so that a slow log holds up no delegate
	fatal   chan error  // cap 1
	queue   *memberlist.TransmitLimitedQueue

	described time.Time // last; run's own
	said      *sayings

	// mu is a leaf: nothing is called that might lock or wait while it is held, since
	// memberlist calls the delegates with its own lock held.
	mu        sync.Mutex
	meta      nodeMeta
	members   map[string]*member // without this node
	conflicts int                // times that others were seen to hold our name elsewhere
	rival     string             // the gossip address seen last in such a conflict
	settled   bool               // joined once without a conflict, or the first
	lonely    bool               // no seed answers, and it was said
	pushUntil time.Time          // others must still learn our new address
	lateAt    time.Time          // this process last got no processor for a while
	joinedAt  time.Time          // the last round of joins began
	joining   bool               // one round at a time; true until Join was called, too
	round     int
	extra     []string // addresses from Remember
	closed    bool
}

// member is a Peer and what watching it needs; guarded by Gossip.mu.
type member struct {
	Peer
	listed  bool      // memberlist holds it alive, or suspects it at most
	acked   time.Time // it answered a ping or a look last
	pinged  time.Time
	looked  time.Time
	looking bool // one look at a time
	misses  int  // looks in a row without an answer
}

type hint struct {
	name        string
	incarnation uint64 // 0: whichever there is
}

// StartGossip listens and takes part; it joins nobody before Join. The caller must Close it.
func StartGossip(cfg GossipConfig) (*Gossip, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		dialer := &net.Dialer{}
		cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}
	}
	g := &Gossip{
		cfg: cfg, log: cfg.Logger,
		hints: make(chan hint, maxHints), rivals: make(chan rival, maxHints), notices: make(chan func(), maxNotices),
		fatal: make(chan error, 1), members: map[string]*member{}, said: newSayings(),
		joining: true,
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.describe()
	mc, err := g.memberlistConfig()
	if err != nil {
		g.cancel()
		return nil, err
	}
	g.queue = &memberlist.TransmitLimitedQueue{NumNodes: g.known, RetransmitMult: retransmitMult}
	list, err := memberlist.Create(mc)
	if err != nil {
		g.cancel()
		return nil, fmt.Errorf("start gossip on %s (--cluster-listen): %w", cfg.Bind, err)
	}
	local := list.LocalNode()
	g.mu.Lock()
	g.list = list
	g.self = Peer{Name: cfg.Name, Incarnation: cfg.Incarnation, ServerID: cfg.ServerID, Address: local.Address(), Version: cfg.Version, Since: time.Now()}
	g.mu.Unlock()
	g.done.Go(g.run)
	g.done.Go(g.tell)
	return g, nil
}

// memberlistConfig tunes memberlist; the second look makes up for the short suspicion.
func (g *Gossip) memberlistConfig() (*memberlist.Config, error) {
	mc := memberlist.DefaultLANConfig()
	mc.Name, mc.Label = g.cfg.Name, "headgate/"+g.cfg.ClusterName
	mc.Logger = newMemberlistLog(g)
	mc.ProbeInterval, mc.ProbeTimeout, mc.GossipInterval = probeInterval, pingTimeout, gossipInterval
	mc.SuspicionMult, mc.SuspicionMaxTimeoutMult, mc.AwarenessMaxMultiplier = suspicionMult, suspicionMax, awarenessMax
	mc.TCPTimeout, mc.PushPullInterval, mc.RetransmitMult = streamTimeout, exchangeEvery, retransmitMult
	mc.DeadNodeReclaimTime = time.Nanosecond // a name that died may come back elsewhere at once
	mc.EnableCompression = false
	d := &delegate{g}
	mc.Delegate, mc.Events, mc.Alive, mc.Merge, mc.Conflict, mc.Ping = d, d, d, d, d, d
	if g.cfg.Transport != nil {
		mc.Transport = g.cfg.Transport
	}
	if err := g.addresses(mc); err != nil {
		return nil, err
	}
	var keys [][]byte
	if g.cfg.Keys != nil {
		keys = g.cfg.Keys()
	}
	if len(keys) == 0 {
		if !g.cfg.Insecure {
			return nil, errors.New("no gossip key: give the node its folder from `headgate init` as --cluster-tls, or say --insecure on a network that nobody else reaches")
		}
		return mc, nil
	}
	ring, err := memberlist.NewKeyring(keys, keys[0])
	if err != nil {
		return nil, fmt.Errorf("gossip keys: %w", err)
	}
	g.ring, mc.Keyring = ring, ring
	return mc, nil
}

// addresses turns Bind and Advertise into memberlist's, which knows IPs only.
func (g *Gossip) addresses(mc *memberlist.Config) error {
	host, port, err := splitAddress("--cluster-listen", g.cfg.Bind)
	if err != nil {
		return err
	}
	mc.BindAddr, mc.BindPort, mc.AdvertisePort = host, port, port
	if g.cfg.Advertise == "" {
		if ip := net.ParseIP(host); ip == nil {
			return fmt.Errorf("--cluster-listen %s: the host must be an IP address", g.cfg.Bind)
		} else if !ip.IsUnspecified() {
			mc.AdvertiseAddr = host
		}
		return nil
	}
	host, port, err = splitAddress("--cluster-advertise", g.cfg.Advertise)
	if err != nil {
		return err
	}
	mc.AdvertisePort = port
	if net.ParseIP(host) == nil {
		ctx, cancel := context.WithTimeout(g.ctx, 5*time.Second)
		defer cancel()
		found, err := net.DefaultResolver.LookupHost(ctx, host)
		if err != nil || len(found) == 0 {
			return fmt.Errorf("--cluster-advertise %s: %w", g.cfg.Advertise, err)
		}
		host = found[0]
	}
	mc.AdvertiseAddr = host
	return nil
}

func splitAddress(flag, address string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, fmt.Errorf("%s %q: %w: give HOST:PORT", flag, address, err)
	}
	if port, err = strconv.Atoi(p); err != nil || port < 0 || port+RaftPortOffset > 65535 {
		return "", 0, fmt.Errorf("%s %q: the port must be a number up to %d, since two more follow it", flag, address, 65535-RaftPortOffset)
	}
	return host, port, nil
}

// describe reads anew what this node says of itself, and says whether that has changed.
func (g *Gossip) describe() bool {
	var id []byte
	if g.cfg.ClusterID != nil {
		id = g.cfg.ClusterID()
	}
	founded := len(id) > 0
	if g.cfg.Founded != nil {
		founded = g.cfg.Founded()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.meta.encode()
	g.meta = nodeMeta{
		Protocol: g.cfg.Protocol, Incarnation: g.cfg.Incarnation, Cluster: g.cfg.ClusterName, ServerID: g.cfg.ServerID,
		Version: g.cfg.Version, ClusterID: bytes.Clone(id[:min(len(id), maxClusterIDLen)]), BootstrapExpect: uint32(max(g.cfg.BootstrapExpect, 0)),
		Founded: founded, Leaving: g.meta.Leaving,
	}
	return !bytes.Equal(before, g.meta.encode())
}

// Members lists all known processes, this one among them, by name: those that failed or
// left for ten minutes more.
func (g *Gossip) Members() []Peer {
	g.mu.Lock()
	defer g.mu.Unlock()
	self := g.self
	self.ClusterID, self.Founded, self.BootstrapExpect = g.meta.ClusterID, g.meta.Founded, int(g.meta.BootstrapExpect)
	if g.meta.Leaving {
		self.Status = PeerLeft
	}
	peers := append(make([]Peer, 0, len(g.members)+1), self)
	for _, m := range g.members {
		peers = append(peers, m.Peer)
	}
	slices.SortFunc(peers, func(a, b Peer) int { return strings.Compare(a.Name, b.Name) })
	return peers
}

// Fatal gives an ErrNameTaken that was found after Join had given up waiting.
func (g *Gossip) Fatal() <-chan error { return g.fatal }

// Remember adds addresses to try like seeds, those of the members that the ledger names for
// example; it replaces what was remembered before.
func (g *Gossip) Remember(addresses []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.extra = slices.Clone(addresses)
}

// Suspect is a doubt from elsewhere, a call that failed for example: the member is looked
// at, at once. It does not wait.
func (g *Gossip) Suspect(name string) { g.doubt(hint{name: name}) }

func (g *Gossip) doubt(h hint) {
	select {
	case g.hints <- h:
	default: // so many doubts wait already that the watch will come by soon enough
	}
}

// SetKeys replaces the gossip keys, the first of which encrypts from now on. To rotate
// without losing anybody, add the new one as second on all nodes, then make it the first
// everywhere, then drop the old.
func (g *Gossip) SetKeys(keys [][]byte) error {
	if g.ring == nil || len(keys) == 0 {
		return errors.New("gossip keys: a node cannot change between encrypted and plain gossip while it runs: restart it")
	}
	for i, k := range keys {
		if err := memberlist.ValidateKey(k); err != nil {
			return fmt.Errorf("gossip key %d: %w", i+1, err)
		}
	}
	// RemoveKey shifts the slice that readers hold, save when it takes the last. So the
	// wanted ones are brought to the front first; with one or two keys that is one UseKey.
	for _, k := range keys {
		if err := g.ring.AddKey(k); err != nil {
			return fmt.Errorf("gossip keys: %w", err)
		}
	}
	have := g.ring.GetKeys()
	unwantedAtEnd := true
	for i, k := range have {
		wanted := slices.ContainsFunc(keys, func(w []byte) bool { return bytes.Equal(w, k) })
		unwantedAtEnd = unwantedAtEnd && wanted == (i < countIn(have, keys))
	}
	if !unwantedAtEnd {
		for _, k := range slices.Backward(keys[1:]) {
			_ = g.ring.UseKey(k) // it was added above
		}
	}
	_ = g.ring.UseKey(keys[0])
	have = g.ring.GetKeys()
	for _, k := range slices.Backward(have) {
		if slices.ContainsFunc(keys, func(w []byte) bool { return bytes.Equal(w, k) }) {
			break
		}
		if err := g.ring.RemoveKey(k); err != nil {
			return fmt.Errorf("gossip keys: %w", err)
		}
	}
	return nil
}

func countIn(have, wanted [][]byte) (n int) {
	for _, k := range have {
		if slices.ContainsFunc(wanted, func(w []byte) bool { return bytes.Equal(w, k) }) {
			n++
		}
	}
	return n
}

// Leave tells all members that this node goes, so that they see it left at once. Call it
// once everything is handed over; then Close.
func (g *Gossip) Leave(ctx context.Context) error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return errors.New("leave the cluster: gossip is closed")
	}
	g.meta.Leaving = true
	g.mu.Unlock()
	// memberlist's own message does not tell who left from who failed, and a packet may be
	// lost: so it is said in one of ours, to each on a connection and by gossip besides.
	g.queue.QueueBroadcast(broadcast(userMessage(messageLeave, g.cfg.Name, g.cfg.Incarnation)))
	g.sendLeave()
	wait := streamTimeout
	if until, ok := ctx.Deadline(); ok {
		wait = max(min(wait, time.Until(until)), time.Millisecond)
	}
	if err := g.list.Leave(wait); err != nil {
		return fmt.Errorf("leave the cluster: %w", err)
	}
	return nil
}

// sendLeave tells each member that memberlist has, by the addresses that it told of: its own are rewritten while they are read.
func (g *Gossip) sendLeave() {
	message := userMessage(messageLeave, g.cfg.Name, g.cfg.Incarnation)
	slots := make(chan struct{}, 16)
	var sent sync.WaitGroup
	for _, to := range g.listed() {
		sent.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			// Who cannot be told will hear it from the others.
			_ = g.list.SendReliable(to, message)
		})
	}
	sent.Wait()
}

// listed are the members that memberlist has.
func (g *Gossip) listed() (nodes []*memberlist.Node) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		at, err := netip.ParseAddrPort(m.Address)
		if !m.listed || err != nil {
			continue
		}
		nodes = append(nodes, &memberlist.Node{Name: m.Name, Addr: at.Addr().AsSlice(), Port: at.Port()})
	}
	return nodes
}

// Close stops at once, without a word to others, and waits for all that it started.
func (g *Gossip) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	err := g.list.Shutdown()
	g.done.Wait()
	if err != nil {
		return fmt.Errorf("stop gossip: %w", err)
	}
	return nil
}

// refused says that nobody listens at an address: the process there has ended.
func refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

func userMessage(kind byte, name string, incarnation uint64) []byte {
	return append(binary.BigEndian.AppendUint64([]byte{kind}, incarnation), name...)
}

func parseUserMessage(b []byte) (kind byte, h hint, ok bool) {
	if len(b) < 10 || len(b) > 9+maxNameLen {
		return 0, hint{}, false
	}
	return b[0], hint{name: string(b[9:]), incarnation: binary.BigEndian.Uint64(b[1:])}, true
}
