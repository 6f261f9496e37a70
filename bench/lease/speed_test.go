package lease_test

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"headgate/lease"
	"headgate/limiter"
)

// ample never runs out, so that every decision takes the same path.
func ample(a limiter.Algorithm) *limiter.Limit {
	l := &limiter.Limit{Algorithm: a, Rate: limiter.Rate{Count: perSecond, Per: time.Second}, Revision: 1}
	if a == limiter.GCRA {
		l.Burst = burst
	}
	return l
}

// instants reads both clocks as a process does.
func instants() lease.Clock {
	now := clock()
	return func() lease.Instant {
		n := now()
		return lease.Instant{Now: n, Wall: n}
	}
}

// taker is one caller's request, taken and settled at its estimate.
type taker struct {
	m   *lease.Manager
	cs  []limiter.Charge
	ds  []limiter.Decision
	act []int64
	by  [limiter.ByAllow + 1]int
}

func newTaker(m *lease.Manager, l *limiter.Limit) *taker {
	return &taker{m: m, cs: []limiter.Charge{{Limit: l, Cost: 1}}, ds: make([]limiter.Decision, 1), act: []int64{1}}
}

func (t *taker) do(ctx context.Context, k *key) bool {
	t.cs[0].Key = k.parts
	if t.m.Take(ctx, t.cs, t.ds) != -1 {
		return false
	}
	t.by[t.ds[0].By]++
	t.m.Settle(t.cs, t.act, t.ds)
	return true
}

// BenchmarkLeased decides and settles on a node with leases in hand, for one tenant's bucket and for
// those of a thousand: one caller, and one a processor. "local" is the part that asked nobody.
func BenchmarkLeased(b *testing.B) {
	ctx := context.Background()
	for _, n := range []int{1, 1000} {
		m, err := lease.NewAlone(instants(), 0)
		if err != nil {
			b.Fatal(err)
		}
		running, stop := context.WithCancel(ctx)
		var ended sync.WaitGroup
		ended.Go(func() { m.Run(running) })
		b.Cleanup(func() { stop(); ended.Wait() })
		ks, limit := keys(n, 1), ample(limiter.GCRA)
		b.Run(fmt.Sprintf("buckets=%d/serial", n), func(b *testing.B) {
			t := newTaker(m, limit)
			m := startMeter(b, nil)
			for i := range b.N {
				if i%64 == 0 { // reading the clock takes as long as a decision
					m.timed(func() { t.do(ctx, &ks[i%n]) })
				} else if !t.do(ctx, &ks[i%n]) {
					b.Fatal("refused")
				}
			}
			m.stop()
			b.ReportMetric(float64(t.by[limiter.ByLease])/float64(b.N), "local")
		})
		b.Run(fmt.Sprintf("buckets=%d/parallel", n), func(b *testing.B) {
			var seat atomic.Int64
			m2 := startMeter(b, nil)
			b.RunParallel(func(pb *testing.PB) {
				t := newTaker(m, limit)
				for i := int(seat.Add(1)) * n / 3; pb.Next(); i++ {
					if !t.do(ctx, &ks[i%n]) {
						b.Error("refused")
						return
					}
				}
			})
			m2.stop()
		})
	}
}

// steady are the rights of a process that keeps its view lease.
type steady struct{}

func (steady) Left(int64, uint32) int64      { return int64(980 * time.Millisecond) }
func (steady) Lease(int64, uint64) int64     { return int64(980 * time.Millisecond) }
func (steady) Started(int64, uint64, uint32) {}

// counter counts what goes over the connections that it dials: bytes, and writes, which are messages
// while little is under way.
type counter struct{ bytes, writes atomic.Int64 }

type countedConn struct {
	net.Conn
	c *counter
}

func (c countedConn) Write(p []byte) (int, error) {
	c.c.bytes.Add(int64(len(p)))
	c.c.writes.Add(1)
	return c.Conn.Write(p)
}

func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.c.bytes.Add(int64(n))
	return n, err
}

// pair is an owner and a holder that speak gRPC over loopback. It returns the holder.
func pair(b *testing.B, count *counter) *lease.Manager {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	dial := func(ctx context.Context, address string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err != nil || count == nil {
			return c, err
		}
		return countedConn{c, count}, nil
	}
	conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
	if err != nil {
		b.Fatal(err)
	}
	view := &lease.View{Epoch: 1, Owners: []int32{0}, Place: func(string) uint32 { return 0 }}
	view.Members = []lease.Member{{Name: "owner", Incarnation: 1, Address: "owner"}, {Name: "holder", Incarnation: 2, Address: "holder"}}
	server := grpc.NewServer()
	ctx, stop := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	b.Cleanup(func() {
		stop()
		_ = conn.Close() // nothing is under way any more
		server.Stop()
		ended.Wait()
	})
	var ms []*lease.Manager
	for _, self := range view.Members {
		m, err := lease.NewManager(lease.ManagerConfig{
			Self: self, Clock: instants(), Rights: steady{}, Wait: time.Second,
			Client: func(string) (grpc.ClientConnInterface, error) { return conn, nil },
		})
		if err != nil {
			b.Fatal(err)
		}
		ms = append(ms, m)
	}
	ms[0].Register(server)
	ended.Go(func() { _ = server.Serve(l) }) // it ends by Stop
	for _, m := range ms {
		ended.Go(func() { m.Run(ctx) })
		m.Step(view)
	}
	return ms[1]
}

// BenchmarkAsked has the owner decide each request over gRPC on loopback, without leases: what a
// sliding window needs. Both ends are this process, so cpu-ns/op is theirs together.
func BenchmarkAsked(b *testing.B) {
	m := pair(b, nil)
	ctx := context.Background()
	ks, limit := keys(1000, 1), ample(limiter.SlidingWindow)
	t := newTaker(m, limit)
	for tries := 0; !t.do(ctx, &ks[0]); tries++ { // opens the stream, which a busy machine may take its time for
		if tries == 20 {
			b.Fatal("refused", t.ds[0])
		}
	}
	b.Run("serial", func(b *testing.B) {
		m := startMeter(b, nil)
		for i := range b.N {
			m.timed(func() {
				if !t.do(ctx, &ks[i%len(ks)]) {
					b.Error("refused")
				}
			})
		}
		m.stop()
	})
	for _, callers := range []int{16, 128} {
		b.Run(fmt.Sprintf("callers=%d", callers*2), func(b *testing.B) {
			b.SetParallelism(callers)
			var seat atomic.Int64
			meter := startMeter(b, nil)
			b.RunParallel(func(pb *testing.PB) {
				t := newTaker(m, limit)
				for i := int(seat.Add(1)) * 7; pb.Next(); i++ {
					if !t.do(ctx, &ks[i%len(ks)]) {
						b.Error("refused")
						return
					}
				}
			})
			meter.stop()
		})
	}
}

// BenchmarkKeepAlive counts for two seconds what a holder and an owner say to each other while so many
// buckets of theirs are in use, and what that comes to where each of 64 nodes has as many with each
// other.
func BenchmarkKeepAlive(b *testing.B) {
	const nodes, seconds = 64, 2
	for _, buckets := range []int{1, 100} {
		b.Run(fmt.Sprintf("buckets=%d", buckets), func(b *testing.B) {
			count := new(counter)
			m := pair(b, count)
			ctx := context.Background()
			ks, limit := keys(buckets, 1), ample(limiter.GCRA)
			t := newTaker(m, limit)
			use := func(d time.Duration) {
				tick := time.NewTicker(20 * time.Millisecond)
				defer tick.Stop()
				for end := time.After(d); ; {
					select {
					case <-tick.C:
						for i := range ks {
							t.do(ctx, &ks[i])
						}
					case <-end:
						return
					}
				}
			}
			use(time.Second) // until there are leases
			for range b.N {
				bytes, writes := count.bytes.Load(), count.writes.Load()
				use(seconds * time.Second)
				perPair := float64(count.bytes.Load()-bytes) / seconds
				b.ReportMetric(perPair, "B/s/pair")
				b.ReportMetric(float64(count.writes.Load()-writes)/seconds, "messages/s/pair")
				b.ReportMetric(perPair*2*(nodes-1)/1000, "kB/s/node-of-64")
			}
		})
	}
}

// plenty lends every holder a block, so that each bucket has a lease.
type plenty struct{}

func (plenty) Size(s *lease.Sight, i int) (share uint32, depth, grant, refuse int64) {
	return 0, 100, 100 - s.Holders[i].Level, 0
}

func (plenty) Recall(*lease.Sight, int, int64) bool { return true }

// BenchmarkTenants has one owner and one holder keep a million tenants' buckets, each with a lease,
// and reports the heap that they take for each, keys included.
func BenchmarkTenants(b *testing.B) {
	const n = 1_000_000
	for range b.N {
		before := heap()
		// The clock stands still, so that no lease lies idle however long this takes.
		at := instants()()
		now := func() lease.Instant { return at }
		view := &lease.View{Epoch: 1, Owners: []int32{0}, Place: func(string) uint32 { return 0 }}
		view.Members = []lease.Member{{Name: "owner", Incarnation: 1}, {Name: "holder", Incarnation: 2}}
		owner := lease.NewOwner(lease.OwnerConfig{Self: 1, Rights: steady{}, Sizer: plenty{}, MaxBuckets: n})
		owner.Step(now(), view)
		holder := lease.NewHolder(lease.HolderConfig{Self: 2, Clock: now, MaxBuckets: n})
		holder.Step(view)
		lend(b, now, owner, holder, n)
		both := heap()
		if s := holder.Stats(); s.Leases < n {
			b.Fatalf("only %d leases of %d", s.Leases, n)
		}
		runtime.KeepAlive(holder)
		holder = nil
		alone := heap()
		if s := owner.Stats(); s.Buckets != n {
			b.Fatalf("%d buckets", s.Buckets)
		}
		b.ReportMetric(float64(alone-before)/n, "B/bucket/owner")
		b.ReportMetric(float64(both-alone)/n, "B/bucket/holder")
		runtime.KeepAlive(owner)
	}
}

// lend has a holder ask for n tenants' buckets, a thousand in a message.
func lend(b *testing.B, now lease.Clock, owner *lease.Owner, holder *lease.Holder, n int) {
	const each = 1000
	limit := ample(limiter.GCRA)
	cs := make([]limiter.Charge, each)
	ds := make([]limiter.Decision, 1)
	for from := 0; from < n; from += each {
		asks := make([]lease.Ask, each)
		for i := range asks {
			cs[i] = limiter.Charge{Key: limiter.Key{Tenant: fmt.Sprintf("tenant-%08d", from+i), Limit: "key-requests", Subject: "k"}, Limit: limit, Cost: 1}
			if _, missing := holder.Take(cs[i:i+1], ds); missing != 1 {
				b.Fatal("there is a lease before one was asked for")
			}
			asks[i] = holder.Ask(cs[i:i+1], 1, 0, false)
		}
		sent := now().Now
		r := owner.Handle(now(), holder.Request(1, asks))[0]
		holder.Handle(r)
		for i := range r.Decisions {
			if refused, ok := holder.Decided(cs[i:i+1], 1, &r.Decisions[i], sent, ds); !ok || refused != -1 {
				b.Fatal("refused", refused, ok)
			}
			holder.Settle(cs[i:i+1], []int64{1}, ds)
		}
	}
}
