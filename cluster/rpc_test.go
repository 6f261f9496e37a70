package cluster

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"headgate/cluster/clusterpb"
	"headgate/cluster/clustertest"
)

// answering is a gRPC server that says who it is.
type answering struct {
	clusterpb.UnimplementedClusterServer
}

func (answering) Identify(context.Context, *clusterpb.IdentifyRequest) (*clusterpb.IdentifyResponse, error) {
	return &clusterpb.IdentifyResponse{Name: "b"}, nil
}

// wire is host a calling host b.
type wire struct {
	net     *clustertest.Net
	address string // of b's server
	logged  *logged
	dials   atomic.Int64
}

// onWire runs f in virtual time, with a server of cluster "test" on host b.
func onWire(t *testing.T, f func(*testing.T, *wire)) {
	t.Helper()
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	synctest.Test(t, func(t *testing.T) {
		w := &wire{net: clustertest.New(1), logged: &logged{}}
		w.net.Host("a")
		w.net.Delay("a", "b", 2*time.Millisecond)
		w.net.Delay("b", "a", 2*time.Millisecond)
		lis, err := w.net.Host("b").Listen(1)
		if err != nil {
			t.Fatal(err)
		}
		w.address = w.net.Host("b").Address(1)
		server := newServer("test", nil, slog.New(slog.NewTextHandler(w.logged, nil)))
		clusterpb.RegisterClusterServer(server, answering{})
		served := make(chan error, 1)
		go func() { served <- server.Serve(lis) }()
		defer func() {
			server.Stop() // first: a listener that closes under it is an error
			if err := <-served; err != nil {
				t.Error(err)
			}
			w.net.Close()
		}()
		f(t, w)
	})
}

// caller is a peer of b's that belongs to a cluster. It must be closed.
func (w *wire) caller(cluster string) *peers {
	return newPeers(cluster, nil, func(ctx context.Context, address string) (net.Conn, error) {
		w.dials.Add(1)
		return w.net.Host("a").Dial(ctx, address)
	})
}

func identify(ctx context.Context, p *peers, address string, within time.Duration) error {
	client, err := p.client(address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	_, err = client.Identify(ctx, &clusterpb.IdentifyRequest{})
	return err
}

// TestStrangersAreRefused with the reason, and it is logged once, not each time.
func TestStrangersAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		cluster, protocol string
		want              string
	}{
		"another cluster":           {"other", "", `it belongs to cluster "other", this node to "test": see --cluster-name`},
		"another protocol":          {"test", "99", `it speaks protocol "99", this node 1`},
		"another protocol's stream": {"test", "99", `it speaks protocol "99", this node 1`},
	} {
		t.Run(name, func(t *testing.T) {
			onWire(t, func(t *testing.T, w *wire) {
				p, ctx := w.caller(c.cluster), t.Context()
				defer p.close()
				if c.protocol != "" {
					ctx = metadata.AppendToOutgoingContext(ctx, protocolHeader, c.protocol) // the first one counts
				}
				for range 5 {
					err := identify(ctx, p, w.address, time.Second)
					if strings.HasSuffix(name, "stream") {
						err = restoring(ctx, p, w.address)
					}
					if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), c.want) {
						t.Errorf("the answer: %v", err)
					}
				}
				if n := w.logged.count("a call from another cluster was refused"); n != 1 {
					t.Errorf("logged %d times", n)
				}
			})
		})
	}
	t.Run("a member is not", func(t *testing.T) {
		onWire(t, func(t *testing.T, w *wire) {
			p := w.caller("test")
			defer p.close()
			if err := identify(t.Context(), p, w.address, time.Second); err != nil {
				t.Error(err)
			}
		})
	})
}

func restoring(ctx context.Context, p *peers, address string) error {
	client, err := p.client(address)
	if err != nil {
		return err
	}
	stream, err := client.Restore(ctx)
	if err != nil {
		return err
	}
	_, err = sendChunks(stream, strings.NewReader("a backup"), false)
	return err
}

// TestDeadAddressCostsItsDeadline and no more; one that refuses costs a round trip.
func TestDeadAddressCostsItsDeadline(t *testing.T) {
	onWire(t, func(t *testing.T, w *wire) {
		p := w.caller("test")
		defer p.close()
		begin := time.Now()
		if err := identify(t.Context(), p, w.net.Host("b").Address(9), time.Second); status.Code(err) != codes.Unavailable || time.Since(begin) > 10*time.Millisecond {
			t.Errorf("nobody listens: %v after %v", err, time.Since(begin))
		}
		w.net.Cut("a", "b")
		for _, within := range []time.Duration{50 * time.Millisecond, 300 * time.Millisecond, 900 * time.Millisecond} {
			begin = time.Now()
			if err := identify(t.Context(), p, w.address, within); status.Code(err) != codes.DeadlineExceeded || time.Since(begin) != within {
				t.Errorf("nobody answers within %v: %v after %v", within, err, time.Since(begin))
			}
		}
		w.net.Heal()
	})
}

// TestSilentConnectionIsMadeAnew: after two deadlines missed in a row, and not after one.
func TestSilentConnectionIsMadeAnew(t *testing.T) {
	onWire(t, func(t *testing.T, w *wire) {
		p := w.caller("test")
		defer p.close()
		call := func(want codes.Code, dials int64) {
			t.Helper()
			if err := identify(t.Context(), p, w.address, 100*time.Millisecond); status.Code(err) != want {
				t.Errorf("%v, want %v", err, want)
			}
			if n := w.dials.Load(); n != dials {
				t.Errorf("%d connections were opened, want %d", n, dials)
			}
		}
		call(codes.OK, 1)
		w.net.Drop("b", "a") // the connection stands, and is silent
		call(codes.DeadlineExceeded, 1)
		w.net.Heal()
		call(codes.OK, 1) // one is forgiven
		w.net.Drop("b", "a")
		call(codes.DeadlineExceeded, 1)
		call(codes.DeadlineExceeded, 1)
		w.net.Heal()
		call(codes.OK, 2)
	})
}

// TestLateDeadlinesOfAnOldConnection do not count against the one that took its place.
func TestLateDeadlinesOfAnOldConnection(t *testing.T) {
	onWire(t, func(t *testing.T, w *wire) {
		p := w.caller("test")
		defer p.close()
		if err := identify(t.Context(), p, w.address, time.Second); err != nil {
			t.Fatal(err)
		}
		p.mu.Lock()
		old := p.conns[w.address].ClientConn
		p.mu.Unlock()
		missed := status.Error(codes.DeadlineExceeded, "late")
		for range maxStrikes {
			p.judge(w.address, old, missed)
		}
		if err := identify(t.Context(), p, w.address, time.Second); err != nil {
			t.Fatal(err)
		}
		for range 2 * maxStrikes {
			p.judge(w.address, old, missed)
		}
		if err := identify(t.Context(), p, w.address, time.Second); err != nil || w.dials.Load() != 2 {
			t.Errorf("%v; %d connections were opened", err, w.dials.Load())
		}
	})
}

// TestClosedPeersRefuse calls, and keep closes what is not named.
func TestPeersAreKeptAndClosed(t *testing.T) {
	onWire(t, func(t *testing.T, w *wire) {
		p := w.caller("test")
		for range 3 {
			if err := identify(t.Context(), p, w.address, time.Second); err != nil {
				t.Fatal(err)
			}
		}
		p.keep(map[string]bool{w.address: true})
		if err := identify(t.Context(), p, w.address, time.Second); err != nil || w.dials.Load() != 1 {
			t.Errorf("%v; %d connections were opened", err, w.dials.Load())
		}
		p.keep(nil)
		if err := identify(t.Context(), p, w.address, time.Second); err != nil || w.dials.Load() != 2 {
			t.Errorf("%v; %d connections were opened", err, w.dials.Load())
		}
		p.close()
		if _, err := p.client(w.address); err == nil {
			t.Error("a client of closed peers")
		}
	})
}

// TestPromise: a node lends itself to one at a time, for ten seconds, and to nobody once it has a ledger.
func TestPromise(t *testing.T) {
	inRealm(t, 1, func(r *realm) {
		n := r.start("d", func(c *Config) { c.BootstrapExpect = 0 })
		ask := func(to string, want bool) {
			r.t.Helper()
			resp, err := service{c: n.Cluster}.Promise(r.t.Context(), &clusterpb.PromiseRequest{Bootstrapper: to})
			if err != nil || resp.GetPromised() != want || want == (resp.GetReason() != "") {
				r.t.Errorf("to %s: %v, %v", to, resp, err)
			}
		}
		ask("a.1", true)
		ask("b.1", false)
		time.Sleep(9 * time.Second)
		ask("a.1", true) // it holds from now
		time.Sleep(9 * time.Second)
		ask("b.1", false)
		time.Sleep(time.Second)
		ask("b.1", true)
		nodes := r.three()
		r.within(10*time.Second, "d joins them", func() bool { return agree(append(nodes, n), 4) })
		time.Sleep(promiseFor)
		ask("b.1", false)
	})
}
