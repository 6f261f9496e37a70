package dispatch_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"headgate/proxy/dispatch"
	"headgate/proxy/queue"
)

// free has slots without end: in hand, or, where true, for who asks.
type free bool

func (f free) Hold(_ context.Context, _ string, _ int64, ask bool) (dispatch.Held, bool) {
	return f, ask || !bool(f)
}
func (free) Yield(string) {}
func (free) Release(bool) {}

// pair is two Dispatchers on this machine's network, the first of which schedules.
func pair(tb testing.TB, slots int64, f free) (scheduler, other *dispatch.Dispatcher) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	cc, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		tb.Fatal(err)
	}
	server := grpc.NewServer()
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var ds []*dispatch.Dispatcher
	for i := range 2 {
		d, err := dispatch.New(dispatch.Config{
			Self: uint64(i + 1), Slots: f, Now: func() int64 { return time.Now().UnixNano() },
			Where: func() dispatch.Scheduling {
				return dispatch.Scheduling{Self: i == 0, Address: "first"[:5*i], Members: 2}
			},
			Client: func(string) (grpc.ClientConnInterface, error) { return cc, nil },
		})
		if err != nil {
			tb.Fatal(err)
		}
		d.Apply([]queue.Backend{{ID: "a", Slots: slots, Limit: -1}}, queue.Config{})
		if i == 0 {
			d.Register(server)
			wg.Go(func() { _ = server.Serve(lis) })
		}
		wg.Go(func() { d.Run(ctx) })
		ds = append(ds, d)
	}
	tb.Cleanup(func() {
		stop()
		_ = cc.Close()
		server.Stop()
		wg.Wait()
	})
	for ds[0].State().Backends == nil || !ds[1].State().Reachable || ds[1].State().At == 0 {
		time.Sleep(time.Millisecond)
	}
	return ds[0], ds[1]
}

// TestFastPathAllocates: a request that waits for nothing makes its Grant, and what Slots makes.
func TestFastPathAllocates(t *testing.T) {
	d, err := dispatch.New(dispatch.Config{
		Self: 1, Slots: free(false), Now: func() int64 { return time.Now().UnixNano() }, Where: func() dispatch.Scheduling { return dispatch.Scheduling{Self: true} },
	})
	if err != nil {
		t.Fatal(err)
	}
	d.Apply([]queue.Backend{{ID: "a", Slots: 4, Limit: -1}}, queue.Config{})
	x := ticket("a")
	if got := testing.AllocsPerRun(1000, func() {
		g, err := d.Acquire(context.Background(), x)
		if err != nil {
			t.Fatal(err)
		}
		g.Release()
	}); got > 1 {
		t.Errorf("%v allocations", got)
	}
}

// BenchmarkFast is a request that a lease in hand covers.
func BenchmarkFast(b *testing.B) {
	_, d := pair(b, 1<<30, false)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		x := ticket("a")
		for pb.Next() {
			g, err := d.Acquire(context.Background(), x)
			if err != nil {
				b.Error(err)
				return
			}
			g.Release()
		}
	})
}

// BenchmarkWaited is a request that goes through the queue, on the node that keeps it and on another; so many at once for 8 slots,
// which are held for no time.
func BenchmarkWaited(b *testing.B) {
	for _, at := range []string{"scheduler", "other"} {
		for _, many := range []int{16, 512} {
			b.Run(fmt.Sprintf("%s/%d", at, many), func(b *testing.B) {
				d, other := pair(b, 8, true)
				if at == "other" {
					d = other
				}
				b.ReportAllocs()
				b.SetParallelism(many / 2)
				b.RunParallel(func(pb *testing.PB) {
					x := ticket("a")
					for pb.Next() {
						g, err := d.Acquire(context.Background(), x)
						if err != nil {
							b.Error(err)
							return
						}
						g.Release()
					}
				})
			})
		}
	}
}
