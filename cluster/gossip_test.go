package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headgate/cluster/clustertest"

	"go.uber.org/goleak"
)

const testGossipPort = 7946

// world is a network of gossips in memory, each with something that answers as its gRPC.
type world struct {
	t   *testing.T
	net *clustertest.Net

	mu   sync.Mutex
	live map[string]Identity // by gRPC address
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, net: clustertest.New(1), live: map[string]Identity{}}
	t.Cleanup(func() {
		w.net.Close()
		time.Sleep(clustertest.Afterlife)
	})
	return w
}

// process is one start of a node on a host.
type process struct {
	*Gossip
	host    *clustertest.Host
	answers net.Listener
	logged  *logged
}

type settings struct {
	name, host string // host: the name's unless given
	seeds      []string
	change     func(*GossipConfig)
}

func (w *world) start(s settings) (*process, error) {
	w.t.Helper()
	if s.host == "" {
		s.host = s.name
	}
	h := w.net.Host(s.host)
	p := &process{host: h, logged: &logged{}}
	transport, err := h.Gossip(testGossipPort)
	if err != nil {
		w.t.Fatal(err)
	}
	if p.answers, err = h.Listen(testGossipPort + GRPCPortOffset); err != nil {
		w.t.Fatal(err)
	}
	cfg := GossipConfig{
		Name: s.name, Incarnation: NewIncarnation(), ServerID: s.name + ".00000000", Bind: h.Address(testGossipPort), ClusterName: "test", Protocol: 3,
		Version: "v1", Insecure: true, Seeds: s.seeds, Identify: w.identify, Dial: h.Dial, Transport: transport,
		Logger: slog.New(slog.NewTextHandler(p.logged, &slog.HandlerOptions{Level: slog.LevelInfo})),
	}
	if s.change != nil {
		s.change(&cfg)
	}
	w.mu.Lock()
	w.live[h.Address(testGossipPort+GRPCPortOffset)] = Identity{cfg.Name, cfg.Incarnation, cfg.ServerID}
	w.mu.Unlock()
	p.Gossip, err = StartGossip(cfg)
	if err != nil {
		h.Crash()
		return nil, err
	}
	w.t.Cleanup(func() { _ = p.Close() })
	return p, nil
}

func (w *world) must(s settings) *process {
	w.t.Helper()
	p, err := w.start(s)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// identify answers for whoever listens at the address; the look has dialed it before.
func (w *world) identify(_ context.Context, address string) (Identity, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	who, ok := w.live[address]
	if !ok {
		return who, errors.New("nobody there")
	}
	return who, nil
}

// kill ends a process as SIGKILL does.
func (p *process) kill() {
	p.host.Crash()
	_ = p.Close()
}

func (w *world) seeds(hosts ...string) (seeds []string) {
	for _, h := range hosts {
		seeds = append(seeds, w.net.Host(h).Address(testGossipPort))
	}
	return seeds
}

// three starts a, b and c, joined through a and each other.
func (w *world) three() (a, b, c *process) {
	w.t.Helper()
	seeds := w.seeds("a", "b", "c")
	a, b, c = w.must(settings{name: "a", seeds: seeds}), w.must(settings{name: "b", seeds: seeds}), w.must(settings{name: "c", seeds: seeds})
	for _, p := range []*process{a, b, c} {
		if err := p.Join(w.t.Context()); err != nil {
			w.t.Fatal(err)
		}
	}
	w.within(time.Second, "all three see three", func() bool {
		return allSee(PeerAlive, 3, a, b, c)
	})
	return a, b, c
}

// within advances the bubble's clock until cond holds and says how long that took.
func (w *world) within(most time.Duration, what string, cond func() bool) time.Duration {
	w.t.Helper()
	begin := time.Now()
	for {
		synctest.Wait()
		if cond() {
			return time.Since(begin)
		}
		if time.Since(begin) > most {
			w.t.Fatalf("not within %v: %s", most, what)
		}
		time.Sleep(5 * time.Millisecond) // virtual
	}
}

func statusOf(p *process, name string) (Peer, bool) {
	peers := p.Members()
	i := slices.IndexFunc(peers, func(p Peer) bool { return p.Name == name })
	if i < 0 {
		return Peer{}, false
	}
	return peers[i], true
}

func allSee(s PeerStatus, n int, ps ...*process) bool {
	for _, p := range ps {
		count := 0
		for _, peer := range p.Members() {
			if peer.Status == s {
				count++
			}
		}
		if count != n {
			return false
		}
	}
	return true
}

func sees(p *process, name string, s PeerStatus) bool {
	peer, ok := statusOf(p, name)
	return ok && peer.Status == s
}

type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), part)
}

func TestNodesFindEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b, _ := w.three()
		peer, _ := statusOf(a, "b")
		want := Peer{
			Name: "b", Incarnation: b.cfg.Incarnation, ServerID: "b.00000000", Address: b.host.Address(testGossipPort), Version: "v1",
			Status: PeerAlive, Since: peer.Since,
		}
		if fmt.Sprint(peer) != fmt.Sprint(want) {
			t.Errorf("a knows of b: %+v, want %+v", peer, want)
		}
		if peer.GRPCAddress() != b.host.Address(testGossipPort+1) {
			t.Errorf("b's port of gRPC: %s", peer.GRPCAddress())
		}
	})
}

func TestMetaSpreads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var id atomic.Value
		id.Store("")
		seeds := w.seeds("a")
		w.must(settings{name: "a", seeds: seeds, change: func(c *GossipConfig) {
			c.ClusterID, c.BootstrapExpect = func() []byte { return []byte(id.Load().(string)) }, 3
		}})
		b := w.must(settings{name: "b", seeds: seeds})
		if err := b.Join(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.within(time.Second, "b sees a", func() bool {
			p, _ := statusOf(b, "a")
			return p.BootstrapExpect == 3 && !p.Founded
		})
		id.Store("the-id")
		seesID := func() bool {
			p, _ := statusOf(b, "a")
			return string(p.ClusterID) == id.Load().(string) && p.Founded
		}
		w.within(time.Second, "b sees a's cluster id", seesID)
		id.Store("another") // a restored one
		w.within(time.Second, "b sees a's next cluster id", seesID)
	})
}

func TestLeaveIsSeenAtOnceEvenThoughPacketsAreLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b, c := w.three()
		for _, to := range []string{"a", "b"} {
			w.net.Lose("c", to, 1)
		}
		if err := c.Leave(t.Context()); err != nil {
			t.Log(err) // no packet of the broadcast arrived
		}
		w.within(50*time.Millisecond, "a and b see c left", func() bool { return sees(a, "c", PeerLeft) && sees(b, "c", PeerLeft) })
		c.kill()
		w.net.Heal()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if !sees(a, "c", PeerLeft) || !sees(b, "c", PeerLeft) {
			t.Error("who left counts as failed later")
		}
	})
}

// TestNewsComeWhileOneLeaves: what memberlist hears of the others is not read while it writes it; the race detector looks.
func TestNewsComeWhileOneLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b, c := w.three()
		var news sync.WaitGroup
		news.Go(func() {
			for range 20 {
				if err := b.list.UpdateNode(time.Second); err != nil {
					t.Error(err)
				}
			}
		})
		for range 200 {
			a.sendLeave()
			time.Sleep(5 * time.Millisecond) // virtual
		}
		news.Wait()
		if !sees(b, "a", PeerLeft) || !sees(c, "a", PeerLeft) {
			t.Error("not all were told")
		}
	})
}

func TestCrashIsSeenWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		seeds := w.seeds("a", "b", "c")
		for i := range 5 {
			a := w.must(settings{name: "a", seeds: seeds})
			b := w.must(settings{name: "b", seeds: seeds})
			c := w.must(settings{name: "c", seeds: seeds})
			for _, p := range []*process{a, b, c} {
				if err := p.Join(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			w.within(time.Second, "three", func() bool { return allSee(PeerAlive, 3, a, b, c) })
			time.Sleep(time.Duration(i) * 77 * time.Millisecond)
			c.kill()
			took := w.within(time.Second, "a and b see c failed", func() bool { return sees(a, "c", PeerFailed) && sees(b, "c", PeerFailed) })
			t.Logf("seen after %v", took)
			a.kill()
			b.kill()
		}
	})
}

func TestCrashIsSeenByAllOfManyWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		seeds := w.seeds("n00", "n01", "n02")
		var all []*process
		for i := range 16 {
			all = append(all, w.must(settings{name: fmt.Sprintf("n%02d", i), seeds: seeds}))
		}
		for _, p := range all {
			if err := p.Join(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		w.within(10*time.Second, "all see all", func() bool { return allSee(PeerAlive, 16, all...) })
		all[7].kill()
		rest := slices.Concat(all[:7], all[8:])
		took := w.within(time.Second, "all see the one failed", func() bool { return allSee(PeerFailed, 1, rest...) })
		t.Logf("seen after %v", took)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if !allSee(PeerAlive, 15, rest...) {
			t.Error("others count as failed, too")
		}
	})
}

func TestWhoAnswersIsNotFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b, c := w.three()
		// All of c's gossip is lost, as if its process had no time for it; its gRPC answers.
		for _, other := range []string{"a", "b"} {
			w.net.Lose("c", other, 1)
			w.net.Lose(other, "c", 1)
		}
		_ = a.list.Shutdown() // not even streams
		_ = b.list.Shutdown()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if !sees(a, "c", PeerAlive) || !sees(b, "c", PeerAlive) {
			t.Error("a member that answers counts as failed")
		}
		c.kill()
		w.within(time.Second, "then it dies", func() bool { return sees(a, "c", PeerFailed) && sees(b, "c", PeerFailed) })
	})
}

func TestPartitionHealsByRejoining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b, c := w.three()
		w.net.Cut("c", "a", "b")
		w.within(4*time.Second, "each side gives the other up", func() bool {
			return sees(a, "c", PeerFailed) && sees(b, "c", PeerFailed) && sees(c, "a", PeerFailed) && sees(c, "b", PeerFailed)
		})
		time.Sleep(2 * time.Minute) // long after memberlist has purged the dead
		w.net.Heal()
		w.within(4*time.Second, "all see all again", func() bool { return allSee(PeerAlive, 3, a, b, c) })
	})
}

func TestOverloadedNodeIsPatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b, _ := w.three()
		w.net.Cut("c", "a", "b")
		took := w.within(4*time.Second, "b gives c up", func() bool {
			a.heed(lateTick) // as if it got no processor
			return sees(b, "c", PeerFailed)
		})
		if sees(a, "c", PeerFailed) {
			t.Errorf("a was as quick, after %v", took)
		}
		w.within(4*time.Second, "a gives it up, too", func() bool {
			a.heed(lateTick)
			return sees(a, "c", PeerFailed)
		})
	})
}

func TestFailedMemberIsFoundAgainWithoutSeeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a := w.must(settings{name: "a"})
		b := w.must(settings{name: "b", seeds: w.seeds("a")})
		for _, p := range []*process{a, b} {
			if err := p.Join(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		w.within(time.Second, "two", func() bool { return allSee(PeerAlive, 2, a, b) })
		w.net.Drop("b", "a") // a hears nothing of b
		w.within(4*time.Second, "a gives b up", func() bool { return sees(a, "b", PeerFailed) })
		time.Sleep(time.Minute)
		w.net.Heal()
		w.within(4*time.Second, "both see both", func() bool { return allSee(PeerAlive, 2, a, b) })
	})
}

func TestRestartAtTheSameAddress(t *testing.T) {
	for name, end := range map[string]func(*process) error{
		"crashed": func(*process) error { return nil },
		"left":    func(p *process) error { return p.Leave(context.Background()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				a, b, c := w.three()
				if err := end(c); err != nil {
					t.Fatal(err)
				}
				c.kill()
				again := w.must(settings{name: "c", seeds: w.seeds("a", "b", "c")})
				if err := again.Join(t.Context()); err != nil {
					t.Fatal(err)
				}
				in := func() bool {
					for _, p := range []*process{a, b} {
						if peer, _ := statusOf(p, "c"); peer.Incarnation != again.cfg.Incarnation || peer.Status != PeerAlive {
							return false
						}
					}
					return true
				}
				took := w.within(time.Second, "the new process is in", in)
				t.Logf("in after %v", took)
				time.Sleep(5 * time.Second)
				synctest.Wait()
				if !in() {
					t.Errorf("it did not stay: %+v", a.Members())
				}
			})
		})
	}
}

func TestRestartAtANewAddress(t *testing.T) {
	for _, wait := range []time.Duration{0, 300 * time.Millisecond, 10 * time.Second, 2 * time.Minute} {
		t.Run(wait.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				a, b, c := w.three()
				c.kill()
				time.Sleep(wait)
				again := w.must(settings{name: "c", host: "elsewhere", seeds: w.seeds("a", "b")})
				if err := again.Join(t.Context()); err != nil {
					t.Fatal(err)
				}
				in := func() bool {
					for _, p := range []*process{a, b} {
						peer, _ := statusOf(p, "c")
						if peer.Incarnation != again.cfg.Incarnation || peer.Status != PeerAlive || peer.Address != again.host.Address(testGossipPort) {
							return false
						}
					}
					return true
				}
				took := w.within(time.Second, "the new process is in", in)
				t.Logf("in after %v", took)
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if !in() || !allSee(PeerAlive, 3, a, b, again) {
					t.Errorf("it did not stay: %+v", a.Members())
				}
				again.kill()
				w.within(time.Second, "and its end is seen", func() bool { return sees(a, "c", PeerFailed) && sees(b, "c", PeerFailed) })
			})
		})
	}
}

func TestSecondOfANameMustNotStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b, c := w.three()
		second := w.must(settings{name: "c", host: "elsewhere", seeds: w.seeds("a", "b")})
		err := second.Join(t.Context())
		if !errors.Is(err, ErrNameTaken) || !strings.Contains(err.Error(), c.host.Address(testGossipPort)) || !strings.Contains(err.Error(), "--node-id") {
			t.Fatalf("joined with %v", err)
		}
		second.kill()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if peer, _ := statusOf(a, "c"); peer.Incarnation != c.cfg.Incarnation || !allSee(PeerAlive, 3, a, b, c) {
			t.Errorf("the first lost its place: %+v", a.Members())
		}
		if n := a.logged.count("a second process uses the name"); n > 1 {
			t.Errorf("said %d times", n)
		}
	})
}

func TestLonelyNodeSaysSoOnceAndKeepsTrying(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		b := w.must(settings{name: "b", seeds: w.seeds("a")})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := b.Join(ctx); !errors.Is(err, ErrNotJoined) || !strings.Contains(err.Error(), "--join") {
			t.Fatalf("joined nobody with %v", err)
		}
		time.Sleep(time.Minute)
		if n := b.logged.count("keeps trying"); n != 1 {
			t.Errorf("said %d times that nobody answers", n)
		}
		a := w.must(settings{name: "a", seeds: w.seeds("a")})
		w.within(3*time.Second, "it joins", func() bool { return allSee(PeerAlive, 2, a, b) })
	})
}

func TestForeignersAreRefused(t *testing.T) {
	key := func(b byte) func() [][]byte {
		return func() [][]byte { return [][]byte{bytes.Repeat([]byte{b}, 32)} }
	}
	for _, c := range []struct {
		name   string
		first  func(*GossipConfig)
		change func(*GossipConfig)
		said   string
	}{
		{"gossip key", func(c *GossipConfig) { c.Keys = key(1) }, func(c *GossipConfig) { c.Keys = key(2) }, "gossip.keys"},
		{"no gossip key", func(c *GossipConfig) { c.Keys = key(1) }, func(*GossipConfig) {}, "gossip.keys"},
		{"cluster name", func(*GossipConfig) {}, func(c *GossipConfig) { c.ClusterName = "other" }, "--cluster-name"},
		{"protocol", func(*GossipConfig) {}, func(c *GossipConfig) { c.Protocol = 2 }, "speaks protocol"},
		{
			"cluster id", func(c *GossipConfig) { c.ClusterID = func() []byte { return []byte("one") } },
			func(c *GossipConfig) { c.ClusterID = func() []byte { return []byte("two") } }, "cluster id",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				a := w.must(settings{name: "a", change: c.first})
				if err := a.Join(t.Context()); err != nil {
					t.Fatal(err)
				}
				b := w.must(settings{name: "b", seeds: w.seeds("a"), change: c.change})
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				if err := b.Join(ctx); !errors.Is(err, ErrNotJoined) {
					t.Errorf("joined with %v", err)
				}
				if len(a.Members()) != 1 || len(b.Members()) != 1 {
					t.Errorf("they know each other: %v %v", a.Members(), b.Members())
				}
				for _, p := range []*process{a, b} {
					if n := p.logged.count(c.said); n < 1 || n > 2 {
						t.Errorf("%s said %d times %q:\n%s", p.cfg.Name, n, c.said, p.logged.b.String())
					}
				}
			})
		})
	}
}

func TestGossipKeysRotateWithoutLosingAnybody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		oldKey, newKey := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
		var all []*process
		for _, name := range []string{"a", "b", "c"} {
			all = append(all, w.must(settings{name: name, seeds: w.seeds("a", "b"), change: func(c *GossipConfig) { c.Keys = func() [][]byte { return [][]byte{oldKey} } }}))
		}
		for _, p := range all {
			if err := p.Join(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for _, keys := range [][][]byte{{oldKey, newKey}, {newKey, oldKey}, {newKey}} {
			for _, p := range all {
				if err := p.SetKeys(keys); err != nil {
					t.Fatal(err)
				}
				time.Sleep(3 * time.Second)
				synctest.Wait()
				if !allSee(PeerAlive, 3, all...) {
					t.Fatal("somebody was lost")
				}
			}
		}
		for _, p := range all {
			if got := p.ring.GetKeys(); len(got) != 1 || !bytes.Equal(got[0], newKey) {
				t.Errorf("%s has keys %v", p.cfg.Name, got)
			}
			if n := p.logged.count("WARN"); n != 0 {
				t.Errorf("%s warned:\n%s", p.cfg.Name, p.logged.b.String())
			}
		}
	})
}

func TestSetKeysSetsExactlyThese(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		k := make([][]byte, 5)
		for i := range k {
			k[i] = bytes.Repeat([]byte{byte(i)}, 32)
		}
		a := w.must(settings{name: "a", change: func(c *GossipConfig) { c.Keys = func() [][]byte { return k[:3] } }})
		for _, want := range [][][]byte{{k[0], k[2]}, {k[3], k[0], k[1]}, {k[1]}, {k[4], k[3]}, {k[3], k[4]}} {
			if err := a.SetKeys(want); err != nil {
				t.Fatal(err)
			}
			got := a.ring.GetKeys()
			if len(got) != len(want) || !bytes.Equal(got[0], want[0]) || countIn(got, want) != len(want) {
				t.Errorf("keys %v, want %v", got, want)
			}
		}
		if err := a.SetKeys([][]byte{{1}}); err == nil {
			t.Error("a key of one byte was taken")
		}
	})
}

func TestSuspectLooksAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, _, c := w.three()
		c.answers.Close() // its gRPC has gone, its gossip lives
		a.Suspect("c")
		w.within(200*time.Millisecond, "c is suspected", func() bool {
			p, _ := statusOf(a, "c")
			return p.Suspected && p.Status == PeerAlive
		})
		c.kill()
		a.Suspect("c")
		w.within(250*time.Millisecond, "c has failed", func() bool { return sees(a, "c", PeerFailed) })
	})
}

func TestGossipConfigIsChecked(t *testing.T) {
	good := GossipConfig{Name: "a", Incarnation: 1, Bind: "127.0.0.1:0", ClusterName: "c", Logger: slog.New(slog.DiscardHandler), Insecure: true}
	for _, c := range []struct {
		name   string
		change func(*GossipConfig)
		said   string
	}{
		{"name", func(c *GossipConfig) { c.Name = "a/b" }, "--node-id"},
		{"long name", func(c *GossipConfig) { c.Name = strings.Repeat("a", 129) }, "--node-id"},
		{"cluster", func(c *GossipConfig) { c.ClusterName = strings.Repeat("a", 64) }, "63"},
		{"no key", func(c *GossipConfig) { c.Insecure = false }, "--insecure"},
		{"port", func(c *GossipConfig) { c.Bind = "127.0.0.1:65534" }, "--cluster-listen"},
		{"bind", func(c *GossipConfig) { c.Bind = "localhost:1" }, "IP"},
		{"advertise", func(c *GossipConfig) { c.Advertise = "x" }, "--cluster-advertise"},
		{"short key", func(c *GossipConfig) { c.Keys = func() [][]byte { return [][]byte{{1}} } }, "gossip keys"},
	} {
		cfg := good
		c.change(&cfg)
		if g, err := StartGossip(cfg); err == nil {
			_ = g.Close()
			t.Errorf("%s: started", c.name)
		} else if !strings.Contains(err.Error(), c.said) {
			t.Errorf("%s: %v does not name %s", c.name, err, c.said)
		}
	}
}

// TestGossipOverRealSockets is the one test with UDP and TCP.
func TestGossipOverRealSockets(t *testing.T) {
	defer goleak.VerifyNone(t)
	start := func(name string, seeds ...string) *Gossip {
		g, err := StartGossip(GossipConfig{
			Name: name, Incarnation: NewIncarnation(), ServerID: name + ".00000000", Bind: "127.0.0.1:0", ClusterName: "c", Protocol: 1,
			Keys: func() [][]byte { return [][]byte{bytes.Repeat([]byte{7}, 32)} }, Logger: slog.New(slog.DiscardHandler), Seeds: seeds,
		})
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	a := start("a")
	defer a.Close()
	_, port, err := net.SplitHostPort(a.Members()[0].Address)
	if err != nil {
		t.Fatal(err)
	}
	b := start("b", "localhost:"+port) // a name, often with two addresses, one of which answers
	defer b.Close()
	if err := b.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	until := func(status PeerStatus) {
		t.Helper()
		for deadline := time.After(20 * time.Second); !slices.ContainsFunc(a.Members(), func(p Peer) bool { return p.Name == "b" && p.Status == status }); {
			select {
			case <-time.After(5 * time.Millisecond):
			case <-deadline:
				t.Fatalf("never %v: %+v", status, a.Members())
			}
		}
	}
	until(PeerAlive)
	if err := b.Leave(t.Context()); err != nil {
		t.Error(err)
	}
	until(PeerLeft)
}

func FuzzDecodeMeta(f *testing.F) {
	f.Add(nodeMeta{Protocol: 1, Incarnation: 2, Cluster: "c", ServerID: "a.00000000", Version: "v", ClusterID: []byte("id"), BootstrapExpect: 3, Founded: true}.encode())
	f.Add([]byte{metaMagic, 2, 0, 0, 0, 9})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		if err != nil {
			return
		}
		out := m.encode()
		if len(out) > 512 {
			t.Fatalf("%d bytes", len(out))
		}
		if again, err := decodeMeta(out); err != nil || fmt.Sprint(again) != fmt.Sprint(m) {
			t.Fatalf("%+v came back as %+v, %v", m, again, err)
		}
	})
}

func FuzzParseUserMessage(f *testing.F) {
	f.Add(userMessage(messageDoubt, "a", 7))
	f.Add([]byte{messageLeave})
	f.Fuzz(func(t *testing.T, b []byte) {
		kind, h, ok := parseUserMessage(b)
		if ok && !bytes.Equal(userMessage(kind, h.name, h.incarnation), b) {
			t.Fatalf("%d %+v was read from %q", kind, h, b)
		}
	})
}

func TestLongestMetaFits(t *testing.T) {
	m := nodeMeta{
		Incarnation: 1, Cluster: strings.Repeat("c", maxClusterLen), ServerID: strings.Repeat("s", maxServerIDLen), Version: strings.Repeat("v", 300),
		ClusterID: bytes.Repeat([]byte{1}, maxClusterIDLen),
	}
	if n := len(m.encode()); n > 512 {
		t.Errorf("%d bytes", n)
	}
	if _, err := decodeMeta(m.encode()); err != nil {
		t.Error(err)
	}
}
