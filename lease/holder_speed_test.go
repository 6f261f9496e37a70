package lease

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"headgate/limiter"
)

// wide is a holder with a deep rate lease on each of n tenants, and a clock that costs little.
func lentHolder(tb testing.TB, n int) (*Holder, []limiter.Charge) {
	var now atomic.Int64
	now.Store(1e12)
	h := NewHolder(HolderConfig{Self: self, Clock: func() Instant { return Instant{Now: now.Load(), Wall: 1e18} }, MaxBuckets: n + 1})
	h.Step(&View{
		Epoch: 1, Place: func(string) uint32 { return 0 }, Owners: []int32{1},
		Members: []Member{{Incarnation: self}, {Incarnation: ownerA}},
	})
	l := &limiter.Limit{Rate: limiter.Rate{Count: 1e9, Per: time.Minute}, Burst: 1e12, Revision: 1}
	var cs []limiter.Charge
	for i := range n {
		cs = append(cs, limiter.Charge{Key: limiter.Key{Tenant: fmt.Sprintf("tenant-%07d", i), Limit: "tokens-per-minute"}, Limit: l, Cost: 1000})
	}
	for i := 0; i < n; i += maxSaid {
		q := h.Request(ownerA, nil)
		r := &Response{Owner: ownerA, Holder: self, Epoch: 1, Answers: q.Seq, Session: 1, Left: 1e9, RollTaken: 1}
		for j := i; j < min(i+maxSaid, n); j++ {
			r.Leases = append(r.Leases, Lease{
				Bucket: Bucket{0, cs[j].Key}, Series: uint64(j + 1), Number: 1, Share: ShareOne / 3, Depth: 1e12, Granted: 1e12, Limit: *l,
			})
		}
		h.Handle(r)
	}
	if st := h.Stats(); st.Leases != n || st.Rejected != 0 {
		tb.Fatalf("%+v", st)
	}
	return h, cs
}

func TestTakeAllocatesNothing(t *testing.T) {
	h, cs := lentHolder(t, 3)
	var ds [limiter.MaxCharges]limiter.Decision
	var actual [limiter.MaxCharges]int64
	if n := testing.AllocsPerRun(1000, func() {
		if refused, missing := h.Take(cs, ds[:]); refused != -1 || missing != 0 {
			t.Fatal("not taken")
		}
		h.Settle(cs, actual[:], ds[:])
		for i := range cs {
			cs[i].Cost = 1000
		}
	}); n != 0 {
		t.Errorf("a take and its settle allocate %v times", n)
	}
}

func BenchmarkHolderTake(b *testing.B) {
	for _, n := range []int{1, 3} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			h, cs := lentHolder(b, n)
			var ds [limiter.MaxCharges]limiter.Decision
			b.ReportAllocs()
			for b.Loop() {
				for i := range cs {
					cs[i].Cost = 1
				}
				h.Take(cs, ds[:])
			}
		})
	}
}

func BenchmarkHolderTakeSettle(b *testing.B) {
	h, cs := lentHolder(b, 1)
	var ds [1]limiter.Decision
	actual := []int64{700}
	b.ReportAllocs()
	for b.Loop() {
		cs[0].Cost = 1000
		h.Take(cs, ds[:])
		h.Settle(cs, actual, ds[:])
	}
}

// Each goroutine on a bucket of its own.
func BenchmarkHolderTakeParallel(b *testing.B) {
	h, cs := lentHolder(b, 64)
	var next atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		c := []limiter.Charge{cs[next.Add(1)%64]}
		c[0].Cost = 1
		var ds [1]limiter.Decision
		for pb.Next() {
			h.Take(c, ds[:])
		}
	})
}

// All on one.
func BenchmarkHolderTakeShared(b *testing.B) {
	h, cs := lentHolder(b, 1)
	b.RunParallel(func(pb *testing.PB) {
		c := []limiter.Charge{cs[0]}
		c[0].Cost = 1
		var ds [1]limiter.Decision
		for pb.Next() {
			h.Take(c, ds[:])
		}
	})
}

// TestHolderMemory: a bucket with a lease takes at most 360 bytes, of which its key is 31.
func TestHolderMemory(t *testing.T) {
	if b, s, c := unsafe.Sizeof(purse{}), unsafe.Sizeof(tab{}), unsafe.Sizeof(cell{}); b != 96 || s != 112 || c != 48 {
		t.Errorf("a bucket has %d bytes, a series %d and a lease %d; 96, 112 and 48 fill what they should", b, s, c)
	}
	if per := holderBytes(t, 50_000); per > 360 {
		t.Errorf("%.0f bytes a bucket", per)
	}
}

// holderBytes is how much a bucket with a lease takes, with its key, in a holder of n.
func holderBytes(tb testing.TB, n int) float64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	h, _ := lentHolder(tb, n)
	h.Owners() // hands out what is new
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(h)
	return float64(after.HeapAlloc-before.HeapAlloc) / float64(n)
}

func BenchmarkHolderMemory(b *testing.B) {
	for b.Loop() {
		b.ReportMetric(holderBytes(b, 1_000_000), "B/bucket")
	}
}
