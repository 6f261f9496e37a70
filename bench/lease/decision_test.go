// Package lease_test measures one limiter decision beside its peers: a keyed
// look-up, a clock reading, and an admission under a token bucket that has room.
//
//	go test -run=NONE -bench=. -benchmem ./bench/lease
package lease_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/lease"
	"headgate/limiter"

	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	"golang.org/x/time/rate"
)

// perSecond and burst are never exhausted, so that all take the same path.
const (
	perSecond = 100_000_000
	burst     = 1 << 30
)

// key is a caller as each contender is given it: whole, or in its parts, which
// are the same bytes.
type key struct {
	whole string
	parts limiter.Key
}

// keys makes n callers in an order that seed gives. As in a request, the texts
// are fresh: they are not the strings that a store has kept.
func keys(n int, seed uint64) []key {
	ks := make([]key, n)
	for at, i := range rand.New(rand.NewPCG(seed, 0)).Perm(n) {
		whole := fmt.Sprintf("tenant-%06d/key-requests/key-%012d", i/10, i)
		ks[at] = key{whole, limiter.Key{Tenant: whole[:13], Limit: whole[14:26], Subject: whole[27:]}}
	}
	return ks
}

// decider says whether one more request of a caller is admitted. One goroutine
// uses it.
type decider func(k *key) bool

// contender makes a store with room for n callers, which makes the deciders.
type contender struct {
	name string
	make func(tb testing.TB, n int) func() decider
}

var contenders = []contender{
	{"headgate", headgate},
	{"x-time-rate", xTimeRate},
	{"go-limiter", goLimiter},
	{"throttled", throttledGCRA},
}

// clock counts nanoseconds since the epoch and does not go back.
func clock() func() int64 {
	began := time.Now()
	epoch := began.UnixNano()
	return func() int64 { return epoch + int64(time.Since(began)) }
}

func headgate(tb testing.TB, n int) func() decider {
	table, err := lease.NewLocal(lease.Config{MaxBuckets: n})
	if err != nil {
		tb.Fatal(err)
	}
	limit := &limiter.Limit{Rate: limiter.Rate{Count: perSecond, Per: time.Second}, Burst: burst}
	now := clock()
	return func() decider {
		// A request keeps these beside its other state.
		cs, ds := []limiter.Charge{{Limit: limit, Cost: 1}}, make([]limiter.Decision, 1)
		return func(k *key) bool {
			cs[0].Key = k.parts
			return table.Take(now(), cs, ds) == -1
		}
	}
}

// xTimeRate is the map under a lock that people put before it.
func xTimeRate(testing.TB, int) func() decider {
	var mu sync.Mutex
	limiters := make(map[string]*rate.Limiter)
	return func() decider {
		return func(k *key) bool {
			mu.Lock()
			l := limiters[k.whole]
			if l == nil {
				l = rate.NewLimiter(perSecond, burst)
				limiters[k.whole] = l
			}
			mu.Unlock()
			return l.Allow()
		}
	}
}

func goLimiter(tb testing.TB, _ int) func() decider {
	// It refills once an interval, by interval/tokens instead of tokens/interval: an hour keeps that out of the run.
	store, err := memorystore.New(&memorystore.Config{Tokens: burst, Interval: time.Hour})
	if err != nil {
		tb.Fatal(err)
	}
	ctx := context.Background()
	tb.Cleanup(func() {
		if err := store.Close(ctx); err != nil {
			tb.Error(err)
		}
	})
	return func() decider {
		return func(k *key) bool {
			_, _, _, ok, err := store.Take(ctx, k.whole)
			return ok && err == nil
		}
	}
}

func throttledGCRA(tb testing.TB, _ int) func() decider {
	store, err := memstore.NewCtx(0)
	if err != nil {
		tb.Fatal(err)
	}
	l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerSec(perSecond), MaxBurst: burst})
	if err != nil {
		tb.Fatal(err)
	}
	// Under contention it gives up after ten tries, which is no decision.
	l.SetMaxCASAttemptsLimit(1 << 20)
	ctx := context.Background()
	return func() decider {
		return func(k *key) bool {
			limited, _, err := l.RateLimitCtx(ctx, k.whole, 1)
			return !limited && err == nil
		}
	}
}

// BenchmarkDecision asks for one caller, or for 100,000 in random order, from
// one goroutine or from GOMAXPROCS of them.
func BenchmarkDecision(b *testing.B) {
	for _, n := range []int{1, 100_000} {
		ks := keys(n, 1)
		for _, c := range contenders {
			b.Run(fmt.Sprintf("keys=%d/%s", n, c.name), func(b *testing.B) {
				decide := warm(b, c, n)()
				at := 0
				for b.Loop() {
					if !decide(&ks[at]) {
						b.Fatal("refused")
					}
					if at++; at == n {
						at = 0
					}
				}
			})
			b.Run(fmt.Sprintf("keys=%d/parallel/%s", n, c.name), func(b *testing.B) {
				store := warm(b, c, n)
				var seat atomic.Int64
				b.ResetTimer()
				b.RunParallel(func(pb *testing.PB) {
					decide := store()
					at := int(seat.Add(1)) * n / 3 % n
					for pb.Next() {
						if !decide(&ks[at]) {
							b.Error("refused")
							return
						}
						if at++; at == n {
							at = 0
						}
					}
				})
			})
		}
	}
}

// warm makes a store that knows n callers.
func warm(tb testing.TB, c contender, n int) func() decider {
	store := c.make(tb, n)
	decide := store()
	ks := keys(n, 2)
	for i := range ks {
		if !decide(&ks[i]) {
			tb.Fatalf("%s refused a first request", c.name)
		}
	}
	runtime.GC()
	return store
}

// BenchmarkMemory reports the heap that a million callers take, their keys'
// texts included, for all keep them.
func BenchmarkMemory(b *testing.B) {
	const n = 1_000_000
	for _, c := range contenders {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				before := heap()
				store := warm(b, c, n)
				b.ReportMetric(float64(heap()-before)/n, "B/bucket")
				runtime.KeepAlive(store)
			}
		})
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
