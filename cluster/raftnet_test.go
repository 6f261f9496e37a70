package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headgate/cluster/clustertest"
	"headgate/cluster/pki"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

const testRaftPort = testGossipPort + RaftPortOffset

func (w *world) raftStream(name, cluster string, protocol uint32, bundle *pki.Bundle) (*RaftStream, *logged) {
	w.t.Helper()
	h := w.net.Host(name)
	l, err := h.Listen(testRaftPort)
	if err != nil {
		w.t.Fatal(err)
	}
	out := &logged{}
	cfg := RaftStreamConfig{Listener: l, Dial: h.Dial, ClusterName: cluster, Protocol: protocol, Logger: slog.New(slog.NewTextHandler(out, nil))}
	if bundle != nil {
		cfg.ServerTLS, cfg.ClientTLS = bundle.ServerTLS(), bundle.ClientTLS()
	}
	s, err := NewRaftStream(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = s.Close() })
	return s, out
}

// bundles makes a folder of keys within the bubble, by whose clock they are valid.
func bundles(t *testing.T, cluster string) (a, b *pki.Bundle) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "pki")
	if _, err := pki.Init(dir, pki.Options{ClusterName: cluster, Nodes: []pki.NodeCert{{Name: "a"}, {Name: "b"}}}); err != nil {
		t.Fatal(err)
	}
	var got [2]*pki.Bundle
	for i, name := range []string{"a", "b"} {
		var err error
		if got[i], err = pki.Load(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return got[0], got[1]
}

func (s *RaftStream) dialTest(to *RaftStream) (net.Conn, error) {
	return s.Dial(raft.ServerAddress(to.Addr().String()), time.Second)
}

func TestRaftStreamCarriesBytesBothWays(t *testing.T) {
	for _, secured := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			var ba, bb *pki.Bundle
			if secured {
				ba, bb = bundles(t, "test")
			}
			a, _ := w.raftStream("a", "test", 1, ba)
			b, _ := w.raftStream("b", "test", 1, bb)
			var echo sync.WaitGroup
			echo.Go(func() {
				conn, err := b.Accept()
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(conn, conn)
				_ = conn.Close()
			})
			conn, err := a.dialTest(b)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute) // the handshake's deadline is no longer there
			sent := bytes.Repeat([]byte("raft"), 100_000)
			echo.Go(func() { _, _ = conn.Write(sent) })
			got := make([]byte, len(sent))
			if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, sent) {
				t.Errorf("secured %v: %v", secured, err)
			}
			_ = conn.Close()
			echo.Wait()
		})
	}
}

func TestRaftStreamRefusesForeigners(t *testing.T) {
	for _, c := range []struct {
		name, cluster       string
		protocol            uint32
		foreignCA, plain    bool
		dialerSays, theySay string
	}{
		{name: "cluster", cluster: "other", protocol: 1, dialerSays: `of cluster "test", this node of "other"`, theySay: "of cluster"},
		{name: "protocol", cluster: "test", protocol: 2, dialerSays: "speaks protocol 1, this node 2", theySay: "speaks protocol 2, this node 1"},
		{name: "ca", cluster: "test", protocol: 1, foreignCA: true, dialerSays: "unknown authority", theySay: "bad certificate"},
		{name: "plaintext to TLS", cluster: "test", protocol: 1, plain: true, dialerSays: "preamble", theySay: "TLS"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				var ba, bb *pki.Bundle
				if c.foreignCA || c.plain {
					_, bb = bundles(t, "test")
					if !c.plain {
						ba, _ = bundles(t, "test")
					}
				}
				a, aLog := w.raftStream("a", c.cluster, c.protocol, ba)
				b, bLog := w.raftStream("b", "test", 1, bb)
				for range 3 {
					_, err := a.dialTest(b)
					if err == nil {
						t.Fatal("let in")
					}
					if !strings.Contains(err.Error(), c.dialerSays) && !strings.Contains(err.Error(), "not a Headgate") && !c.plain {
						t.Errorf("the dialer hears %q", err)
					}
				}
				synctest.Wait()
				if n := aLog.count("a node refused the raft connection"); n != 1 {
					t.Errorf("the dialing side said it %d times", n)
				}
				if n := bLog.count("a raft connection was refused"); n != 1 || bLog.count(strings.ReplaceAll(c.theySay, `"`, `\"`)) == 0 {
					t.Errorf("the accepting side said it %d times:\n%s", n, &bLog.b)
				}
			})
		})
	}
}

func TestSilentPeersHoldUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, _ := w.raftStream("a", "test", 1, nil)
		b, bLog := w.raftStream("b", "test", 1, nil)
		silent := w.net.Host("c")
		var held []net.Conn
		for range maxHandshakes - 1 {
			conn, err := silent.Dial(t.Context(), b.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, conn)
		}
		accepted := make(chan net.Conn, 1)
		go func() {
			conn, err := b.Accept()
			if err == nil {
				accepted <- conn
			}
		}()
		begin := time.Now()
		conn, err := a.dialTest(b)
		if err != nil || time.Since(begin) > 10*time.Millisecond {
			t.Fatalf("%v after %v", err, time.Since(begin))
		}
		_ = conn.Close()
		_ = (<-accepted).Close()
		// Beyond the bound they are turned away at once.
		for range 3 {
			conn, err := silent.Dial(t.Context(), b.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, conn)
		}
		synctest.Wait()
		if n := bLog.count("too many"); n != 1 {
			t.Errorf("said %d times that there are too many", n)
		}
		// The silent ones are thrown out.
		for _, c := range held {
			_ = c.SetReadDeadline(time.Now().Add(handshakeTimeout + time.Second))
			if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
				t.Errorf("a silent peer reads %v", err)
			}
		}
	})
}

func TestRaftStreamCloseBreaksOffHandshakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		b, _ := w.raftStream("b", "test", 1, nil)
		conn, err := w.net.Host("c").Dial(t.Context(), b.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		begin := time.Now()
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("took %v", took)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("still open")
		}
		if _, err := b.Accept(); err == nil {
			t.Error("accepts still")
		}
		if _, err := b.Dial("10.9.0.1:1", time.Second); err == nil {
			t.Error("dials still")
		}
	})
}

// TestRaftElectsOverRaftStreams runs a raft of three over the real thing.
func TestRaftElectsOverRaftStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		ba, bb := bundles(t, "test")
		names := []string{"a", "b", "c"}
		at := map[string]string{}
		for _, n := range names {
			at[n] = w.net.Host(n).Address(testRaftPort)
		}
		var servers []raft.Server
		for _, n := range names {
			servers = append(servers, raft.Server{ID: raft.ServerID(n), Address: raft.ServerAddress("moved-" + n + ":1")}) // found by the provider only
		}
		var rafts []*raft.Raft
		for i, n := range names {
			bundle := ba
			if i > 0 {
				bundle = bb
			}
			stream, _ := w.raftStream(n, "test", 1, bundle)
			transport := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
				Stream: stream, MaxPool: 3, Timeout: time.Second, Logger: hclog.NewNullLogger(),
				ServerAddressProvider: RaftAddresses(func(id string) (string, bool) { a, ok := at[id]; return a, ok }),
			})
			cfg := raft.DefaultConfig()
			cfg.LocalID, cfg.Logger = raft.ServerID(n), hclog.NewNullLogger()
			store := raft.NewInmemStore()
			if err := raft.BootstrapCluster(cfg, store, store, raft.NewInmemSnapshotStore(), transport, raft.Configuration{Servers: servers}); err != nil {
				t.Fatal(err)
			}
			r, err := raft.NewRaft(cfg, &raft.MockFSM{}, store, store, raft.NewInmemSnapshotStore(), transport)
			if err != nil {
				t.Fatal(err)
			}
			rafts = append(rafts, r)
			t.Cleanup(func() { _ = transport.Close() })
			t.Cleanup(func() { _ = r.Shutdown().Error() })
		}
		var leader *raft.Raft
		w.within(10*time.Second, "a leader", func() bool {
			for _, r := range rafts {
				if r.State() == raft.Leader {
					leader = r
				}
			}
			return leader != nil
		})
		if err := leader.Apply([]byte("x"), time.Second).Error(); err != nil {
			t.Fatal(err)
		}
		w.within(time.Second, "all have applied", func() bool {
			for _, r := range rafts {
				if r.AppliedIndex() < leader.CommitIndex() {
					return false
				}
			}
			return true
		})
	})
}

func TestRaftStreamConfigIsChecked(t *testing.T) {
	l, err := clustertest.New(1).Host("a").Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	dial := func(context.Context, string) (net.Conn, error) { return nil, io.EOF }
	good := RaftStreamConfig{Listener: l, Dial: dial, ClusterName: "c", Logger: slog.New(slog.DiscardHandler)}
	for i, change := range []func(*RaftStreamConfig){
		func(c *RaftStreamConfig) { c.ServerTLS = &tls.Config{} },
		func(c *RaftStreamConfig) { c.ClientTLS = &tls.Config{} },
		func(c *RaftStreamConfig) { c.Listener = nil },
		func(c *RaftStreamConfig) { c.Dial = nil },
		func(c *RaftStreamConfig) { c.Logger = nil },
		func(c *RaftStreamConfig) { c.ClusterName = "" },
	} {
		cfg := good
		change(&cfg)
		if s, err := NewRaftStream(cfg); err == nil {
			_ = s.Close()
			t.Errorf("%d was taken", i)
		}
	}
}

func TestRaftAddresses(t *testing.T) {
	f := RaftAddresses(func(id string) (string, bool) { return "10.0.0.1:3", id == "a" })
	if got, err := f.ServerAddr("a"); err != nil || got != "10.0.0.1:3" {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := f.ServerAddr("b"); err == nil || !strings.Contains(err.Error(), "b") {
		t.Errorf("%v", err)
	}
}

func FuzzReadPreamble(f *testing.F) {
	f.Add(preamble{Protocol: 1, Cluster: "c"}.encode())
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		p, err := readPreamble(r)
		if err != nil {
			return
		}
		if used := b[:len(b)-r.Len()]; !bytes.Equal(p.encode(), used) {
			t.Fatalf("%+v was read from %q", p, used)
		}
	})
}
