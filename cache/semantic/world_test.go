package semantic

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
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
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"headgate/cache"
	"headgate/cache/embed/embedtest"
	"headgate/cache/threshold"
	"headgate/cluster/clustertest"
)

const worldPort = 9000

// world is nodes that share a semantic cache, on a network with faults to order.
type world struct {
	t     *testing.T
	net   *clustertest.Net
	nodes []*worldNode
	owner atomic.Int64 // of all partitions
	void  sync.Map     // tag → since when
}

type worldNode struct {
	*Cache
	w      *world
	index  int
	host   *clustertest.Host
	server *grpc.Server
	reg    *prometheus.Registry
	log    bytes.Buffer          // of the node; read when it is dead
	deaf   atomic.Bool           // it does not hear of invalidations
	own    atomic.Int64          // whom it takes for the owner; -1: whom the world does
	order  atomic.Pointer[[]int] // over which nodes it takes partitions to be spread; nil: they are not
	die    context.CancelFunc
	ended  sync.WaitGroup

	mu    sync.Mutex
	dead  bool
	conns map[string]*grpc.ClientConn
}

// worldTest runs in a bubble of virtual time, and looks for goroutines afterwards.
func worldTest(t *testing.T, n int, f func(w *world)) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, net: clustertest.New(1)}
		for i := range n {
			w.nodes = append(w.nodes, w.newNode(i))
		}
		f(w)
		w.net.Heal()
		for _, n := range w.nodes {
			n.kill()
		}
		w.net.Close()
		time.Sleep(time.Minute) // for what gRPC gives up in time
	})
	goleak.VerifyNone(t, before)
}

func (w *world) newNode(index int) *worldNode {
	n := &worldNode{w: w, index: index, host: w.net.Host(fmt.Sprintf("n%d", index)), conns: map[string]*grpc.ClientConn{}, reg: prometheus.NewRegistry()}
	n.own.Store(-1)
	c, err := New(Config{
		Ring: n.ring, Client: n.client, Peers: n.peers, Valid: n.valid, Now: wallNow, Rand: rand.New(rand.NewPCG(uint64(index), 7)), MaxBytes: 64 << 20,
		Logger: slog.New(slog.NewTextHandler(&n.log, &slog.HandlerOptions{Level: slog.LevelDebug})), Registerer: n.reg,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	n.Cache = c
	lis, err := n.host.Listen(worldPort)
	if err != nil {
		w.t.Fatal(err)
	}
	n.server = grpc.NewServer()
	c.Register(n.server)
	var ctx context.Context
	ctx, n.die = context.WithCancel(context.Background())
	server := n.server
	n.ended.Go(func() { _ = server.Serve(lis) })
	n.ended.Go(func() { c.Run(ctx) })
	return n
}

func wallNow() int64 { return time.Now().UnixNano() }

func (n *worldNode) address() string { return n.host.Address(worldPort) }

func (n *worldNode) ring(k cache.Key) []string {
	owner := n.own.Load()
	if order := n.order.Load(); order != nil {
		owner = int64((*order)[int(k[0])%len(*order)])
	}
	if owner < 0 {
		owner = n.w.owner.Load()
	}
	if int(owner) == n.index {
		return []string{""}
	}
	return []string{n.w.nodes[owner].address()}
}

func (n *worldNode) peers() (out []string) {
	for _, o := range n.w.nodes {
		if o != n && !o.isDead() {
			out = append(out, o.address())
		}
	}
	return out
}

func (n *worldNode) valid(e *cache.Entry) bool {
	return n.deaf.Load() || !slices.ContainsFunc(e.Tags, func(tag string) bool {
		_, is := n.w.void.Load(tag)
		return is
	})
}

func (n *worldNode) client(address string) (grpc.ClientConnInterface, error) {
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

func (n *worldNode) isDead() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dead
}

// kill is SIGKILL.
func (n *worldNode) kill() {
	n.mu.Lock()
	dead, conns := n.dead, n.conns
	n.dead, n.conns = true, map[string]*grpc.ClientConn{}
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

// ask has a node look for an answer.
func (n *worldNode) ask(q *Question) Answer { return n.Ask(context.Background(), q) }

// want fails unless a node answers a question by body; "" is a miss or worse.
func (n *worldNode) want(q *Question, body string) Answer {
	n.w.t.Helper()
	a := n.ask(q)
	got := ""
	if a.Action == threshold.Serve {
		got = string(a.Entry.Body)
	}
	if got != body {
		n.w.t.Errorf("node %d answers %q by %q, not by %q: %s at %.3f, %s", n.index, q.Text, got, body, a.Action, a.Similarity, a.Why)
	}
	return a
}

// learn has a node ask, and learn what the model answers, and waits until it has been learnt.
func (n *worldNode) learn(q *Question, body string) {
	a := n.ask(q)
	n.Learn(context.Background(), q, &a, Label{}, answerTo(q, body))
	synctest.Wait()
}

// question is a question whose vector is of its words.
func question(text string, change func(*Question)) *Question {
	q := asks(text, embedtest.Vector(text))
	q.Policy = static(0.85)
	if change != nil {
		change(q)
	}
	return q
}

func TestWorkedExample(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		reset := question("How do I reset my password", nil)
		if got := b.want(reset, ""); got.Why != whyEmpty {
			t.Errorf("the first question: %s", got.Why)
		}
		b.learn(reset, "so")
		for _, n := range w.nodes {
			got := n.want(question("How can I reset my password", nil), "so")
			if s := fmt.Sprintf("%.3f", got.Similarity); s != "0.866" {
				t.Errorf("similarity %s", s)
			}
			if len(got.EntryID) != 16 || got.CachedText != reset.Text || got.Age < 0 || (got.Owner == "") != (n == a) {
				t.Errorf("%+v", got)
			}
		}
		a.learn(question("What is the refund window for annual plans", nil), "30 days")
		monthly := question("What is the refund window for monthly plans", nil)
		if got := b.want(monthly, ""); fmt.Sprintf("%.3f", got.Similarity) != "0.833" {
			t.Errorf("similarity %v", got.Similarity)
		}
		for s := 0.05; s <= 1; s += 0.05 {
			monthly.Policy.Threshold = s
			if got := b.want(monthly, ""); got.Why != whyGuards || len(got.Refused) == 0 {
				t.Errorf("at %.2f: %s, refused %v", s, got.Why, got.Refused)
			}
		}
		b.want(question("How can I reset my password", func(q *Question) { q.Tenant, q.Partition = "bob", keyOf("bob") }), "")
		time.Sleep(time.Hour)
		b.want(reset, "")
		b.want(question("How can I reset my password", nil), "")
	})
}

func TestOwnerDies(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		q := question("reset password", nil)
		b.learn(q, "so")
		b.want(q, "so")
		began := time.Now()
		var got Answer
		var wg sync.WaitGroup
		w.net.Delay("n1", "n0", 200*time.Millisecond)
		wg.Go(func() { got = b.ask(q) })
		time.Sleep(100 * time.Millisecond)
		a.kill() // mid-lookup
		wg.Wait()
		if got.Action != threshold.Miss || time.Since(began) > findFor {
			t.Errorf("%s after %s: %s", got.Action, time.Since(began), got.Why)
		}
		for range 2 { // the second is not even sent
			began = time.Now()
			got = b.ask(q)
			if got.Action != threshold.Miss || time.Since(began) > findFor {
				t.Errorf("%s after %s", got.Action, time.Since(began))
			}
		}
		if got.Why != whyBroken || time.Since(began) != 0 {
			t.Errorf("%s after %s", got.Why, time.Since(began))
		}
		b.Learn(context.Background(), q, &got, Label{}, answerTo(q, "x")) // goes nowhere, and nobody waits
		synctest.Wait()
		w.owner.Store(1)
		b.Moved()
		b.learn(q, "again")
		b.want(q, "again")
	})
}

func TestSlowOwner(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		b := w.nodes[1]
		q := question("reset password", nil)
		b.learn(q, "so")
		w.net.Cut("n0", "n1")
		began := time.Now()
		got := b.want(q, "")
		if took := time.Since(began); took > findFor || got.Why != whyOut {
			t.Errorf("%s after %s", got.Why, took)
		}
		w.net.Heal()
		if got := b.want(q, ""); got.Why != whyBroken {
			t.Errorf("%s", got.Why)
		}
		time.Sleep(2 * breakFor)
		_ = b.ask(q) // the connection may have to come back
		time.Sleep(2 * breakFor)
		b.want(q, "so")
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if a := b.Ask(ctx, q); a.Action != threshold.Miss {
			t.Errorf("for a client that left: %s", a.Action)
		}
		b.want(q, "so") // who leaves breaks nothing
	})
}

func TestInvalidHere(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		q := question("reset password", nil)
		e := answerTo(q, "so")
		e.Tags = []string{"faq"}
		miss := b.ask(q)
		b.Learn(context.Background(), q, &miss, Label{}, e)
		synctest.Wait()
		b.want(q, "so")
		a.deaf.Store(true)
		w.void.Store("faq", true)
		if got := b.want(q, ""); got.Entry != nil || got.Why != whyInvalid {
			t.Errorf("%s", got.Why)
		}
	})
}

func TestMoves(t *testing.T) {
	worldTest(t, 3, func(w *world) {
		a, b, c := w.nodes[0], w.nodes[1], w.nodes[2]
		const n = 600
		for i := range n {
			q := question(fmt.Sprint("word", i), nil)
			c.learn(q, fmt.Sprint(i))
			if i%100 == 99 {
				time.Sleep(3 * time.Second) // of what a tenant may insert
			}
		}
		between := question("word7", func(q *Question) { q.Policy.Audit = 1 })
		asked := c.ask(between)
		c.Learn(context.Background(), between, &asked, Label{Known: true, Same: true}, nil)
		synctest.Wait()
		asked = c.ask(between)
		first := c.want(question("word8", nil), "8")

		w.owner.Store(1)
		b.own.Store(0) // it has not heard: takes nothing
		a.Moved()
		time.Sleep(time.Second)
		if b.shard.totals().entries != 0 || a.shard.totals().entries != n {
			t.Fatalf("%d and %d entries", a.shard.totals().entries, b.shard.totals().entries)
		}
		b.own.Store(-1)
		time.Sleep(2 * moveAgain)
		if b.shard.totals().entries != n || a.shard.totals().entries != 0 || a.shard.totals().partitions != 0 {
			t.Fatalf("%d and %d entries", a.shard.totals().entries, b.shard.totals().entries)
		}
		for i := 0; i < n; i += 50 {
			c.want(question(fmt.Sprint("word", i), nil), fmt.Sprint(i))
		}
		c.Learn(context.Background(), between, &asked, Label{Known: true, Same: true}, nil) // asked of a, told b
		synctest.Wait()
		c.Learn(context.Background(), between, &asked, Label{Known: true, Same: true}, nil) // once more
		synctest.Wait()
		f := b.shard.find(wallNow(), between)
		sc := f.e.p.scope
		sc.mu.Lock()
		observed := f.e.obs.Len()
		sc.mu.Unlock()
		if observed != 2 {
			t.Errorf("%d observations, of one before the move and one after", observed)
		}
		if again := c.want(question("word8", nil), "8"); again.EntryID != first.EntryID || again.Age < first.Age {
			t.Errorf("%+v, before the move %+v", again, first)
		}
		time.Sleep(time.Hour)
		c.want(question("word8", nil), "")
	})
}

// TestHandOver has a node leave in order, with owners that hear of it late, or not at all.
func TestHandOver(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		const n = 40
		name := func(i int) *Question {
			return question(fmt.Sprint("word", i), func(q *Question) { q.Partition = keyOf(q.Text) })
		}
		for i := range n {
			a.learn(name(i), fmt.Sprint(i))
		}
		if left := a.HandOver(context.Background()); left != 0 || a.shard.totals().entries != n {
			t.Errorf("the ring did not go on: %d partitions are left, %d entries here", left, a.shard.totals().entries)
		}
		w.owner.Store(1)
		b.own.Store(0)
		bounded, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if left := a.HandOver(bounded); left != n || b.shard.totals().entries != 0 {
			t.Errorf("to an owner that does not hear: %d partitions are left, %d entries there", left, b.shard.totals().entries)
		}
		began := time.Now()
		hears := time.AfterFunc(100*time.Millisecond, func() { b.own.Store(-1) })
		defer hears.Stop()
		if left := a.HandOver(context.Background()); left != 0 || time.Since(began) > 200*time.Millisecond {
			t.Errorf("%d partitions are left after %s", left, time.Since(began))
		}
		a.kill()
		for i := range n {
			b.want(name(i), fmt.Sprint(i))
		}
		w.owner.Store(0)
		if left := b.HandOver(bounded); left != n {
			t.Errorf("to the dead: %d partitions are left", left)
		}
	})
}

// TestMovesAreOfferedSoonAgain has a node that joins hear of it a moment later than who has what it is to own; and never.
func TestMovesAreOfferedSoonAgain(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.learn(question("reset password", nil), "so")
		w.owner.Store(1)
		b.own.Store(0)
		a.Moved()
		time.Sleep(150 * time.Millisecond)
		b.own.Store(-1)
		time.Sleep(200 * time.Millisecond)
		b.want(question("reset password", nil), "so")
		w.owner.Store(0)
		a.own.Store(1)
		b.Moved()
		time.Sleep(time.Minute) // it is not given up
		a.own.Store(-1)
		time.Sleep(moveAgain)
		a.want(question("reset password", nil), "so")
	})
}

// TestSplitView has two nodes take themselves for the owner; the answers of both are there in the end, of the same words the newer.
func TestSplitView(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		b.own.Store(1)
		a.learn(question("only here", nil), "a")
		a.learn(question("both know", nil), "old")
		b.learn(question("only there", nil), "b")
		time.Sleep(time.Second)
		b.learn(question("both know", nil), "new")
		a.learn(question("both again", nil), "old") // is newer at b, which gives it
		w.owner.Store(1)
		b.own.Store(-1)
		a.Moved()
		time.Sleep(10 * time.Second)
		b.own.Store(0) // has not heard of its being the owner
		b.learn(question("a stray", nil), "stray")
		b.own.Store(-1)
		time.Sleep(10 * time.Second)
		for text, body := range map[string]string{"only here": "a", "only there": "b", "both know": "new", "both again": "old", "a stray": "stray"} {
			a.want(question(text, nil), body)
		}
		if a.shard.totals().entries != 0 || b.shard.totals().entries != 5 {
			t.Errorf("%d and %d entries", a.shard.totals().entries, b.shard.totals().entries)
		}
	})
}

func TestNewOwnerDies(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		q := question("reset password", nil)
		a.learn(q, "so")
		b.kill()
		w.owner.Store(1)
		a.Moved()
		time.Sleep(30 * time.Second)
		a.want(q, "")
		w.owner.Store(0)
		a.want(q, "so") // it was not given away
	})
}

func TestWrongAnswer(t *testing.T) {
	worldTest(t, 3, func(w *world) {
		a, b, c := w.nodes[0], w.nodes[1], w.nodes[2]
		q := question("reset password", nil)
		b.learn(q, "bad")
		got := b.want(q, "bad")
		r, err := c.Wrong(context.Background(), got.EntryID, "alice")
		if err != nil || !r.Found || r.Evicted != 1 || r.Unreached != 0 || r.Tenant != "acme" || r.Surface != "chat" {
			t.Errorf("%+v, %v", r, err)
		}
		b.want(q, "")
		if s := a.Stats()[0]; s.Reported != 1 || s.Entries != 0 || s.Budget.Reported != 1 {
			t.Errorf("%+v", s)
		}
		if r, err = c.Wrong(context.Background(), got.EntryID, "alice"); err != nil || r.Found {
			t.Errorf("a second time: %+v, %v", r, err)
		}
		b.learn(q, "bad")
		got = b.want(q, "bad")
		time.Sleep(time.Hour)
		w.net.Cut("n0", "n1")
		if r, _ = b.Wrong(context.Background(), got.EntryID, "alice"); !r.Found || r.Evicted != 0 || r.Unreached != 1 {
			t.Errorf("what went already: %+v", r)
		}
		for _, id := range []string{"", "x", "0000000000000000", "123", strings.Repeat("f", 17)} {
			if _, err := b.Wrong(context.Background(), id, ""); err == nil {
				t.Errorf("%q is taken for an id", id)
			}
		}
	})
}

// TestReportsCountOnce has one report said again and again, everywhere, with the entry here, there, on two nodes that disagree, or gone.
func TestReportsCountOnce(t *testing.T) {
	for name, prepare := range map[string]func(w *world, q *Question){
		"at its owner": func(*world, *Question) {},
		"gone":         func(*world, *Question) { time.Sleep(2 * time.Hour) },
		"on two nodes": func(w *world, _ *Question) {
			for _, p := range w.nodes[0].shard.held() {
				batch := w.nodes[0].shard.batch(p, wallNow())
				pol := static(0.85)
				for _, h := range batch {
					w.nodes[2].shard.insert(wallNow(), &p.place, &pol, &h.fresh, true)
				}
			}
		},
		"first where its owner is out of reach": func(w *world, q *Question) {
			w.net.Cut("n0", "n1")
			if r, _ := w.nodes[1].Wrong(context.Background(), w.nodes[1].Recent()[0].Entry, "alice"); !r.Found || r.Unreached != 1 {
				w.t.Errorf("%+v", r)
			}
			w.net.Heal()
		},
	} {
		t.Run(name, func(t *testing.T) {
			worldTest(t, 3, func(w *world) {
				w.t = t
				q := question("reset password", nil)
				w.nodes[0].learn(q, "bad")
				var id string
				for _, n := range w.nodes {
					for range 3 {
						id = n.want(q, "bad").EntryID
					}
				}
				prepare(w, q)
				var wg sync.WaitGroup
				for _, n := range w.nodes {
					for range 3 {
						if _, err := n.Wrong(context.Background(), id, "alice"); err != nil {
							t.Error(err)
						}
					}
					wg.Go(func() { _, _ = n.Wrong(context.Background(), id, "bob") })
				}
				wg.Wait()
				time.Sleep(2 * tellEvery)
				var reported, local int64
				for _, n := range w.nodes {
					for _, s := range n.Stats() {
						if reported, local = max(reported, s.Budget.Reported), local+s.Reported; s.Entries != 0 {
							t.Errorf("node %d has it", n.index)
						}
					}
				}
				if reported != 1 || local != 1 {
					t.Errorf("the budget says %d, the nodes %d", reported, local)
				}
				if r, err := w.nodes[1].Wrong(context.Background(), id, "alice"); err != nil || r.Found {
					t.Errorf("%+v, %v", r, err)
				}
			})
		})
	}
}

func TestNodesTellEachOther(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		b.own.Store(1)
		q := question("reset password", func(q *Question) { q.Policy.Audit = 1 })
		a.learn(q, "so")
		for range 20 {
			got := a.ask(q)
			if got.Action != threshold.Audit {
				t.Fatalf("%s: %s", got.Action, got.Why)
			}
			a.Learn(context.Background(), q, &got, Label{Known: true}, nil)
			synctest.Wait()
		}
		time.Sleep(2 * tellEvery)
		_ = b.ask(q)
		s := b.Stats()[0]
		if s.Budget.Audited != 20 || s.Budget.Wrong != 20 || s.Different != 0 || !s.Budget.Tripped {
			t.Errorf("%+v", s)
		}
		served := question("reset password", nil)
		a.want(served, "") // it would be, without audits
		a.kill()
		if log := a.log.String(); !strings.Contains(log, "exceeds its budget") || !strings.Contains(log, "reported=0") {
			t.Error("nothing is said of it")
		}
		time.Sleep(30 * time.Minute)
		_ = b.ask(q)
		if s := b.Stats()[0]; s.Budget.Audited != 20 {
			t.Errorf("half an hour after its death: %+v", s.Budget)
		}
		time.Sleep(40 * time.Minute)
		if s := b.Stats()[0]; s.Budget.Audited != 0 {
			t.Errorf("an hour after its last word: %+v", s.Budget)
		}
	})
}

// TestHeardFirst has a node hear of a surface that it was never asked about: one wrong answer is within the bounds.
func TestHeardFirst(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		a, b := w.nodes[0], w.nodes[1]
		q := question("reset password", func(q *Question) { q.Policy.Audit = 1 })
		a.learn(q, "so")
		for i := range 20 {
			got := a.ask(q)
			a.Learn(context.Background(), q, &got, Label{Known: true, Same: i != 7}, nil)
			synctest.Wait()
		}
		time.Sleep(2 * tellEvery)
		s := b.Stats()
		if len(s) != 1 || s[0].Budget.Audited != 20 || s[0].Budget.Wrong != 1 || s[0].Budget.Tripped || s[0].Missed != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestBlindSurface has nobody check what is served: it stops, and the log says why.
func TestBlindSurface(t *testing.T) {
	worldTest(t, 1, func(w *world) {
		n := w.nodes[0]
		q := question("reset password", func(q *Question) { q.Only, q.Policy.Audit = true, 1 })
		n.learn(q, "so")
		served := 0
		for n.ask(q).Action == threshold.Serve && served < 1000 {
			served++
		}
		time.Sleep(2 * sweepEvery)
		if b := n.Stats()[0].Budget; served < 10 || served == 1000 || !b.Blind || b.Tripped {
			t.Errorf("%d served; %+v", served, b)
		}
		n.kill()
		if log := n.log.String(); !strings.Contains(log, "too few answers") || strings.Contains(log, "exceeds its budget") {
			t.Error("it is not said why")
		}
	})
}

func TestLearnDoesNotWait(t *testing.T) {
	c, err := New(Config{
		Ring: func(cache.Key) []string { return nil }, Client: func(string) (grpc.ClientConnInterface, error) { return nil, net.ErrClosed },
		Peers: func() []string { return nil }, Valid: func(*cache.Entry) bool { return true }, Now: wallNow, Rand: rand.New(rand.NewPCG(1, 2)), MaxBytes: 64 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	q := question("reset password", nil)
	a := c.Ask(t.Context(), q)
	body := strings.Repeat("x", 1<<20)
	for range 2000 { // nobody runs
		c.Learn(t.Context(), q, &a, Label{}, answerTo(q, body))
	}
	if n := c.queue.bytes.Load(); n > lessonBytes || len(c.queue.jobs) == 0 {
		t.Errorf("%d bytes of %d lessons wait", n, len(c.queue.jobs))
	}
	c.Learn(t.Context(), q, &a, Label{}, answerTo(q, body+"x"))
	long := question(strings.Repeat("a", maxText+1), nil)
	if got := c.Ask(t.Context(), long); got.Why != whyUnfit {
		t.Errorf("%s", got.Why)
	}
}

func TestDecisionsAreRemembered(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		b := w.nodes[1]
		q := question("unspeakable secret", nil)
		b.learn(q, "hidden reply")
		got := b.want(q, "hidden reply")
		for range MaxRecent + 10 {
			_ = b.ask(question("something else", nil))
		}
		_ = b.ask(q)
		r := b.Recent()
		if len(r) != MaxRecent || r[0].Entry != got.EntryID || r[0].Action != "serve" || r[0].Similarity < 0.999 || r[0].Threshold != 0.85 || r[1].Action != "miss" {
			t.Errorf("%d, the last %+v", len(r), r[0])
		}
		b.kill()
		log := b.log.String()
		if !strings.Contains(log, "entry="+got.EntryID) || !strings.Contains(log, "similarity=") || !strings.Contains(log, "threshold=0.85") {
			t.Error("no hit is in the log")
		}
		for _, n := range w.nodes {
			n.kill()
			for _, secret := range []string{"unspeakable", "hidden"} {
				if strings.Contains(n.log.String(), secret) || strings.Contains(fmt.Sprint(r), secret) {
					t.Errorf("node %d tells what was asked or answered", n.index)
				}
			}
		}
	})
}
