// Package clustertest is a network in memory for tests of the cluster: buffered, and with
// faults to order. It works inside testing/synctest bubbles, where memberlist's own mock
// network deadlocks: nothing in it waits but on channels and timers, and it starts no
// goroutine at all.
//
// A Net must be made inside the bubble that uses it. Faults act on what is under way, too:
// what a stream has sent waits behind a cut until it is healed, as TCP would have it, and
// packets vanish.
package clustertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	maxHosts      = 250     // they share one /24
	maxBacklog    = 256     // connections that nobody has accepted yet
	maxInFlight   = 1 << 20 // bytes of a stream, one way
	maxPackets    = 4096    // received and not read
	firstFreePort = 40000   // for the dialing end
)

// Afterlife is how long memberlist's own goroutines may outlive its Shutdown: a bubble must
// let so much of its time pass, time.Sleep(clustertest.Afterlife), before it ends.
const Afterlife = 5 * time.Second

// Net is a network of hosts. It is safe for concurrent use.
type Net struct {
	mu      sync.Mutex
	changed chan struct{} // closed and replaced when a fault begins or ends
	hosts   map[string]*Host
	byIP    map[string]*Host
	links   map[link]fault
	rng     *rand.Rand
	port    int
}

// link is one direction between two hosts, by name.
type link struct{ from, to string }

type fault struct {
	cut   bool
	delay time.Duration
	loss  float64
}

// New makes an empty network; seed decides which packets a lossy link drops.
func New(seed uint64) *Net {
	return &Net{
		changed: make(chan struct{}), hosts: map[string]*Host{}, byIP: map[string]*Host{}, links: map[link]fault{},
		rng: rand.New(rand.NewPCG(seed, 0)), port: firstFreePort,
	}
}

// Host gives the host of that name, with an address of its own from 10.9.0.0/24.
func (n *Net) Host(name string) *Host {
	n.mu.Lock()
	defer n.mu.Unlock()
	if h := n.hosts[name]; h != nil {
		return h
	}
	if len(n.hosts) >= maxHosts {
		panic("clustertest: too many hosts")
	}
	h := &Host{net: n, name: name, ip: net.IPv4(10, 9, 0, byte(len(n.hosts)+1)).To4(), listeners: map[int]*listener{}, gossips: map[int]*Gossip{}, conns: map[*conn]bool{}}
	n.hosts[name], n.byIP[h.ip.String()] = h, h
	return h
}

// Cut keeps all hosts of one side from all of the other, both ways.
func (n *Net) Cut(a, b string, more ...string) {
	for _, other := range append([]string{b}, more...) {
		n.alter(a, other, func(f *fault) { f.cut = true })
		n.alter(other, a, func(f *fault) { f.cut = true })
	}
}

// Drop loses what goes from one host to another, one way.
func (n *Net) Drop(from, to string) { n.alter(from, to, func(f *fault) { f.cut = true }) }

// Delay holds up what goes from one host to another, one way.
func (n *Net) Delay(from, to string, d time.Duration) {
	n.alter(from, to, func(f *fault) { f.delay = d })
}

// Lose drops that share of the packets from one host to another; streams lose nothing.
func (n *Net) Lose(from, to string, share float64) {
	n.alter(from, to, func(f *fault) { f.loss = share })
}

// Heal ends all faults.
func (n *Net) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.links)
	n.announce()
}

// Close ends every host.
func (n *Net) Close() {
	n.mu.Lock()
	hosts := make([]*Host, 0, len(n.hosts))
	for _, h := range n.hosts {
		hosts = append(hosts, h)
	}
	n.mu.Unlock()
	for _, h := range hosts {
		h.Crash()
	}
}

func (n *Net) alter(from, to string, do func(*fault)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := n.links[link{from, to}]
	do(&f)
	n.links[link{from, to}] = f
	n.announce()
}

// announce wakes all that wait for a link; n.mu is held.
func (n *Net) announce() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// state gives a link's faults and a channel that closes when any change.
func (n *Net) state(l link) (fault, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.links[l], n.changed
}

// lost draws whether a packet is lost.
func (n *Net) lost(l link) (bool, time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := n.links[l]
	return f.cut || f.loss > 0 && n.rng.Float64() < f.loss, f.delay
}

func (n *Net) nextPort() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.port++
	return n.port
}

func (n *Net) at(address string) (*Host, int, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, 0, err
	}
	p, err := strconv.Atoi(port)
	if err != nil {
		return nil, 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if h := n.byIP[host]; h != nil {
		return h, p, nil
	}
	if h := n.hosts[host]; h != nil {
		return h, p, nil
	}
	return nil, 0, fmt.Errorf("no host at %s", address)
}

// Host is a machine with one address. Its methods are safe for concurrent use.
type Host struct {
	net  *Net
	name string
	ip   net.IP

	mu        sync.Mutex
	listeners map[int]*listener
	gossips   map[int]*Gossip
	conns     map[*conn]bool
}

// IP is the host's address.
func (h *Host) IP() string { return h.ip.String() }

// Address is the host's address with a port.
func (h *Host) Address(port int) string { return net.JoinHostPort(h.IP(), strconv.Itoa(port)) }

// Crash ends the process that runs on the host, as SIGKILL would: its ports refuse and its
// streams end, and it may listen anew at once.
func (h *Host) Crash() {
	h.mu.Lock()
	var closers []interface{ Close() error }
	for _, l := range h.listeners {
		closers = append(closers, l)
	}
	for _, g := range h.gossips {
		closers = append(closers, g)
	}
	for c := range h.conns {
		closers = append(closers, c)
	}
	h.mu.Unlock()
	for _, c := range closers {
		_ = c.Close()
	}
}

// Listen takes a port of the host for streams.
func (h *Host) Listen(port int) (net.Listener, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.listeners[port] != nil {
		return nil, &net.OpError{Op: "listen", Net: "tcp", Addr: h.addr(port), Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
	}
	l := &listener{host: h, port: port, queue: make(chan net.Conn, maxBacklog), closed: make(chan struct{})}
	h.listeners[port] = l
	return l, nil
}

func (h *Host) addr(port int) *net.TCPAddr { return &net.TCPAddr{IP: h.ip, Port: port} }

// Dial opens a stream to IP:port or NAME:port: refused at once where nobody listens, and
// without an answer, until ctx ends, behind a cut.
func (h *Host) Dial(ctx context.Context, address string) (net.Conn, error) {
	to, port, err := h.net.at(address)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
	remote := to.addr(port)
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: remote, Err: err}
	}
	var waited time.Duration
	for {
		there, changed := h.net.state(link{h.name, to.name})
		back, _ := h.net.state(link{to.name, h.name})
		delay := there.delay + back.delay
		if !there.cut && !back.cut && waited >= delay {
			break
		}
		var timer <-chan time.Time
		if !there.cut && !back.cut {
			timer = time.After(delay - waited)
		}
		select {
		case <-ctx.Done():
			return fail(contextError(ctx))
		case <-changed:
		case <-timer:
			waited = delay
		}
	}
	local, far := newConnPair(h, to, h.addr(h.net.nextPort()), remote)
	if !to.offer(port, far) {
		_, _ = local.Close(), far.Close()
		return fail(os.NewSyscallError("connect", syscall.ECONNREFUSED))
	}
	return local, nil
}

// DialTimeout is Dial with a time instead of a context.
func (h *Host) DialTimeout(address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return h.Dial(ctx, address)
}

func contextError(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return os.ErrDeadlineExceeded
	}
	return ctx.Err()
}

// offer puts a stream before whoever listens at the port.
func (h *Host) offer(port int, c *conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l := h.listeners[port]; l != nil {
		select {
		case l.queue <- c:
			return true
		default:
			return false
		}
	}
	g := h.gossips[port]
	if g == nil {
		return false
	}
	select {
	case g.streams <- c:
		return true
	default:
		return false
	}
}

type listener struct {
	host   *Host
	port   int
	queue  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.closed:
	default:
		select {
		case c := <-l.queue:
			return c, nil
		case <-l.closed:
		}
	}
	return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.Addr(), Err: net.ErrClosed}
}

func (l *listener) Addr() net.Addr { return l.host.addr(l.port) }

func (l *listener) Close() error {
	l.once.Do(func() {
		l.host.mu.Lock()
		delete(l.host.listeners, l.port)
		l.host.mu.Unlock()
		close(l.closed)
		for {
			select {
			case c := <-l.queue:
				_ = c.Close()
			default:
				return
			}
		}
	})
	return nil
}
