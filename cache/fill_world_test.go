package cache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
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
)

var _ entries = (*Store)(nil)

const fillPort = 9000

// shelf is a store that keeps all, for as long as its life says.
type shelf struct {
	mu     sync.Mutex
	now    func() int64
	valid  func(*Entry) bool
	filled map[Key]int64
	what   map[Key]*Entry
	claims map[Key]int64 // until when
	puts   int
}

func (s *shelf) find(k Key, now int64, more func(Life) time.Duration) (Hit, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	en := s.what[k]
	if en == nil || !s.valid(en) {
		return Hit{}, false
	}
	age := time.Duration(now - s.filled[k])
	return Hit{Entry: en, Age: age, Stale: age >= en.Life.TTL, Tier: Local}, age < en.Life.TTL+more(en.Life)
}

func (s *shelf) Get(k Key, now int64) (Hit, bool) {
	h, ok := s.find(k, now, func(l Life) time.Duration { return l.Stale })
	if ok && h.Stale {
		s.mu.Lock()
		if h.Refresh = now >= s.claims[k]; h.Refresh {
			s.claims[k] = now + int64(refreshFor)
		}
		s.mu.Unlock()
	}
	return h, ok
}

func (s *shelf) Read(k Key, now int64) (Hit, bool) {
	return s.find(k, now, func(l Life) time.Duration { return l.Stale })
}

func (s *shelf) Peek(k Key, now int64) (Hit, bool) {
	h, ok := s.Read(k, now)
	h.Entry = nil
	return h, ok
}

func (s *shelf) forget(k Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.what, k)
}

func (s *shelf) Stale(k Key, now int64) (Hit, bool) {
	return s.find(k, now, func(l Life) time.Duration { return l.Stale + l.StaleIfError })
}

func (s *shelf) Put(e *Entry) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := *e
	c.Body = bytes.Clone(e.Body)
	s.what[e.Key], s.filled[e.Key], s.claims[e.Key] = &c, s.now()-int64(e.Age), 0
	s.puts++
	return true
}

func (s *shelf) PutCopy(h Hit) bool {
	c := *h.Entry
	c.Age = h.Age
	return !h.Stale && s.Put(&c)
}

func (s *shelf) Release(k Key, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims[k] = min(s.claims[k], s.now()+int64(pause))
}

func (s *shelf) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{Entries: int64(len(s.what))}
}

func (s *shelf) has(k Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.what[k] != nil
}

// world is nodes that share a cache, on a network with faults to order.
type world struct {
	t     *testing.T
	net   *clustertest.Net
	nodes []*peerNode
	ring  atomic.Pointer[func(Key) []int] // indices of nodes: the owner of a key, then its successors
	stamp atomic.Uint64                   // the ledger
	void  sync.Map                        // tag → stamp of its last invalidation
}

type peerNode struct {
	*Exact
	w      *world
	index  int
	host   *clustertest.Host
	shelf  *shelf
	server *grpc.Server
	reg    *prometheus.Registry
	deaf   atomic.Bool // it does not hear of invalidations
	ctx    context.Context
	die    context.CancelFunc
	ended  sync.WaitGroup

	mu    sync.Mutex
	dead  bool
	conns map[string]*grpc.ClientConn
}

// newWorld makes n nodes. Node 0 owns all keys, 1 is next, and so on, until setRing.
func newWorld(t *testing.T, n int) *world {
	w := &world{t: t, net: clustertest.New(1)}
	w.stamp.Store(1)
	w.setRing(0)
	for i := range n {
		w.nodes = append(w.nodes, w.newNode(i))
	}
	t.Cleanup(w.close)
	return w
}

// setRing has the nodes own all keys in the order of their numbers, from first on.
func (w *world) setRing(first int) {
	f := func(Key) (order []int) {
		for i := range w.nodes {
			order = append(order, (first+i)%len(w.nodes))
		}
		return order
	}
	w.ring.Store(&f)
}

func (w *world) newNode(index int) *peerNode {
	n := &peerNode{
		w: w, index: index, host: w.net.Host(fmt.Sprintf("n%d", index)), conns: map[string]*grpc.ClientConn{}, reg: prometheus.NewRegistry(),
	}
	n.start()
	return n
}

func (n *peerNode) start() {
	n.mu.Lock()
	n.dead = false
	n.mu.Unlock()
	n.reg = prometheus.NewRegistry()
	n.shelf = &shelf{now: wallNow, valid: n.valid, filled: map[Key]int64{}, what: map[Key]*Entry{}, claims: map[Key]int64{}}
	e, err := NewExact(Config{
		Store: n.shelf, Ring: n.ringOf, Client: n.client, Valid: n.valid, Stamp: n.w.stamp.Load, Now: wallNow,
		Rand: rand.New(rand.NewPCG(uint64(n.index), 7)), Registerer: n.reg,
	})
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.Exact = e
	lis, err := n.host.Listen(fillPort)
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.server = grpc.NewServer()
	e.Register(n.server)
	n.ctx, n.die = context.WithCancel(context.Background())
	ctx, server := n.ctx, n.server
	n.ended.Go(func() { _ = server.Serve(lis) })
	n.ended.Go(func() { _ = e.Run(ctx) })
}

func wallNow() int64 { return time.Now().UnixNano() }

func (n *peerNode) ringOf(k Key) (addresses []string) {
	for _, i := range (*n.w.ring.Load())(k) {
		if i == n.index {
			addresses = append(addresses, "")
		} else {
			addresses = append(addresses, n.w.nodes[i].host.Address(fillPort))
		}
	}
	return addresses
}

func (n *peerNode) valid(e *Entry) bool {
	if n.deaf.Load() {
		return true
	}
	return !slices.ContainsFunc(e.Tags, func(tag string) bool {
		at, ok := n.w.void.Load(tag)
		return ok && at.(uint64) > e.Stamp
	})
}

func (w *world) invalidate(tag string) { w.void.Store(tag, w.stamp.Add(1)) }

func (n *peerNode) client(address string) (grpc.ClientConnInterface, error) {
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

// kill is SIGKILL.
func (n *peerNode) kill() {
	n.mu.Lock()
	dead := n.dead
	n.dead = true
	conns := n.conns
	n.conns = map[string]*grpc.ClientConn{}
	n.mu.Unlock()
	if dead {
		return
	}
	n.host.Crash()
	n.die()
	for _, c := range conns {
		_ = c.Close()
	}
	n.server.Stop()
	n.Close()
	n.ended.Wait()
}

// close ends the nodes that live, and checks that nothing is left of any flight.
func (w *world) close() {
	w.net.Heal()
	time.Sleep(10 * time.Second) // of the bubble's time: links end
	synctest.Wait()
	for _, n := range w.nodes {
		if !n.dead {
			n.empty()
		}
	}
	for _, n := range w.nodes {
		n.kill()
	}
	w.net.Close()
	time.Sleep(time.Minute) // for what gRPC gives up in time
}

// empty fails where anything is left.
func (n *peerNode) empty() {
	if held := n.room.held.Load(); held != 0 {
		n.w.t.Errorf("node %d still holds %d bytes of streams", n.index, held)
	}
	n.held(func() {
		if len(n.branches) > 0 || n.waiting > 0 || len(n.referee.flights) > 0 || n.referee.sessions > 0 {
			n.w.t.Errorf("node %d still has %d branches with %d waiting, %d flights with %d sessions", n.index, len(n.branches), n.waiting, len(n.referee.flights), n.referee.sessions)
		}
	})
}

// held runs f under the Exact's lock.
func (n *peerNode) held(f func()) {
	n.Exact.mu.Lock()
	defer n.Exact.mu.Unlock()
	f()
}

// count is a metric's sum over its labels.
func (n *peerNode) count(name string, label ...string) (sum float64) {
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

func fillKey(name string) Key { return sha256.Sum256([]byte(name)) }

// answerFor is an entry that tells whose it is.
func answerFor(k Key) *Entry {
	return &Entry{ContentType: "application/json", Body: fmt.Appendf(nil, "{%x}", k), Life: Life{TTL: time.Hour}}
}

// crowd is requests that join, on any node; each turn is kept.
type crowd struct {
	w  *world
	wg sync.WaitGroup

	mu    sync.Mutex
	turns map[TurnKind]int
	got   []Turn
	errs  int
	leads chan Turn
}

func newCrowd(w *world) *crowd {
	return &crowd{w: w, turns: map[TurnKind]int{}, leads: make(chan Turn, 4096)}
}

// join has requests of one kind wait on a node; they end with the node.
func (c *crowd) join(n *peerNode, count int, ask Ask) {
	for range count {
		c.joinFor(n.ctx, n, ask)
	}
}

func (c *crowd) joinFor(ctx context.Context, n *peerNode, ask Ask) {
	c.wg.Go(func() {
		t, err := n.Join(ctx, &ask)
		if n.ctx.Err() != nil {
			return // it died
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			c.errs++
			return
		}
		c.turns[t.Kind]++
		c.got = append(c.got, t)
		if t.Kind == TurnLead {
			c.leads <- t
		}
		if t.Kind == TurnHit && !bytes.Equal(t.Hit.Body, answerFor(ask.Key).Body) {
			c.w.t.Errorf("a foreign answer: %q", t.Hit.Body)
		}
	})
}

// lead waits for the next lead.
func (c *crowd) lead() *Fill {
	c.w.t.Helper()
	select {
	case t := <-c.leads:
		return t.Fill
	case <-time.After(5 * time.Minute):
		c.w.t.Fatalf("nobody leads: %v", c.turns)
		return nil
	}
}

// want waits for all and compares what they got: kinds and how many.
func (c *crowd) want(want ...int) {
	c.w.t.Helper()
	c.wg.Wait()
	for i := 0; i < len(want); i += 2 {
		kind := TurnKind(want[i])
		if c.turns[kind] != want[i+1] {
			c.w.t.Errorf("%d turns of kind %d, want %d; all: %v, %d errors", c.turns[kind], kind, want[i+1], c.turns, c.errs)
		}
	}
	sum := 0
	for i := 1; i < len(want); i += 2 {
		sum += want[i]
	}
	if sum != len(c.got) {
		c.w.t.Errorf("%d turns, want %d: %v", len(c.got), sum, c.turns)
	}
}

// fillTest runs in a bubble and looks for goroutines afterwards.
func fillTest(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	synctest.Test(t, f)
	goleak.VerifyNone(t, before)
}

// readAll reads a stream to its end.
func readAll(r *Reader) ([]byte, error) {
	defer r.Close()
	var all []byte
	for {
		p, err := r.Next(context.Background())
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, p...)
	}
}
