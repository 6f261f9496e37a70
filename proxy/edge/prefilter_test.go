package edge

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newTestPrefilter(t testing.TB, cfg PrefilterConfig) *Prefilter {
	t.Helper()
	p, err := NewPrefilter(cfg, epoch)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func ipOf(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
}

func TestPrefilterConfig(t *testing.T) {
	for _, c := range []struct {
		cfg  PrefilterConfig
		want string
	}{
		{PrefilterConfig{}, ""},
		{PrefilterConfig{RequestsPerSecond: -1}, "requests_per_second"},
		{PrefilterConfig{RequestsPerSecond: 2e6}, "requests_per_second"},
		{PrefilterConfig{RequestBurst: 1 << 40}, "request_burst"},
		{PrefilterConfig{ErrorsPerMinute: -1}, "errors_per_minute"},
		{PrefilterConfig{ErrorBurst: 1 << 40}, "error_burst"},
		{PrefilterConfig{Buckets: 1 << 30}, "buckets"},
	} {
		err := c.cfg.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c.cfg, err)
		}
	}
}

// TestStuckClientIsSlowed: 60 errors a minute, burst 20, whatever the requests.
func TestStuckClientIsSlowed(t *testing.T) {
	p := newTestPrefilter(t, PrefilterConfig{})
	ip, now := ipOf(1), epoch
	for i := range 20 {
		if ok, _ := p.Allow(now, ip, "key"); !ok {
			t.Fatalf("refused after %d errors", i)
		}
		p.Fault(now, ip, "key")
	}
	ok, wait := p.Allow(now, ip, "key")
	if ok || wait != time.Second {
		t.Fatalf("after 20 errors: %v, wait %v", ok, wait)
	}
	for range 100 { // of requests that were in flight
		p.Fault(now, ip, "key")
	}
	if _, again := p.Allow(now, ip, "key"); again != wait {
		t.Errorf("late faults lengthened the wait to %v", again)
	}
	if ok, _ := p.Allow(now, ip, "other"); ok {
		t.Error("another key from the same address passed")
	}
	if ok, _ := p.Allow(now, ipOf(2), "key"); ok {
		t.Error("the same key from another address passed")
	}
	if ok, _ := p.Allow(now, ipOf(2), "other"); !ok {
		t.Error("an innocent was refused")
	}
	if ok, _ := p.Allow(now.Add(wait-time.Microsecond), ip, "key"); ok {
		t.Error("passed before the wait was over")
	}
	if ok, _ := p.Allow(now.Add(wait), ip, "key"); !ok {
		t.Error("refused after the wait")
	}
	v6 := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	for range 20 {
		p.Fault(now, v6("2001:db8::1"), "")
	}
	if ok, _ := p.Allow(now, v6("2001:db8::ffff"), ""); ok {
		t.Error("another address of the same /64 passed")
	}
	if ok, _ := p.Allow(now, v6("2001:db8:0:1::1"), ""); !ok {
		t.Error("the next /64 was refused")
	}
	for range 50 {
		p.Fault(now, netip.Addr{}, "")
		if ok, _ := p.Allow(now, netip.Addr{}, ""); !ok {
			t.Fatal("no address and no key were limited")
		}
	}
}

func TestRefusedRequestsChargeNothing(t *testing.T) {
	p := newTestPrefilter(t, PrefilterConfig{RequestsPerSecond: 1, RequestBurst: 2})
	ip := ipOf(1)
	for range 2 {
		if ok, _ := p.Allow(epoch, ip, "full"); !ok {
			t.Fatal("refused")
		}
	}
	for range 100 {
		if ok, wait := p.Allow(epoch, ip, "fresh"); ok || wait != time.Second {
			t.Fatal(ok, wait)
		}
	}
	for range 2 {
		if ok, _ := p.Allow(epoch, ipOf(2), "fresh"); !ok {
			t.Fatal("a key was charged for requests that its address's bucket refused")
		}
	}
}

// TestPrefilterAgainstModel compares with plain buckets as long as the table has room.
func TestPrefilterAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate, burst := rapid.Int64Range(1, 1000).Draw(t, "rate"), rapid.Int64Range(1, 50).Draw(t, "burst")
		p, err := NewPrefilter(PrefilterConfig{RequestsPerSecond: rate, RequestBurst: burst}, epoch)
		if err != nil {
			t.Fatal(err)
		}
		interval := time.Duration(1e6/rate) * time.Microsecond
		tats, now := map[string]time.Time{}, epoch
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, 2*interval.Microseconds()).Draw(t, "µs")) * time.Microsecond)
			key := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key")
			tat := tats[key]
			if tat.Before(now) {
				tat = now
			}
			wait := max(0, tat.Add(interval).Sub(now)-time.Duration(burst)*interval)
			ok, got := p.Allow(now, netip.Addr{}, key)
			if ok != (wait == 0) || got != wait {
				t.Fatalf("%s: %v %v, want wait %v", key, ok, got, wait)
			}
			if ok {
				tats[key] = tat.Add(interval)
			}
		}
	})
}

func TestConcurrentBurstIsExact(t *testing.T) {
	p := newTestPrefilter(t, PrefilterConfig{RequestBurst: 100})
	var passed atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				if ok, _ := p.Allow(epoch, ipOf(1), "key"); ok {
					passed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if passed.Load() != 100 {
		t.Errorf("%d of a burst of 100 passed", passed.Load())
	}
}

// TestFullTableForgetsAndNeverRefuses: one set, overrun by more offenders than it holds.
func TestFullTableForgetsAndNeverRefuses(t *testing.T) {
	p := newTestPrefilter(t, PrefilterConfig{Buckets: ways})
	for i := range 1000 {
		for range 20 {
			p.Fault(epoch, ipOf(i), "")
		}
	}
	refused := 0
	for i := range 1000 {
		if ok, _ := p.Allow(epoch, ipOf(i), ""); !ok {
			refused++
		}
	}
	if refused > ways+3 { // beyond its places only whose tag agrees by chance
		t.Errorf("%d refused by a table of %d", refused, ways)
	}
	if refused == 0 {
		t.Error("the table holds nobody")
	}
	if ok, _ := p.Allow(epoch, netip.MustParseAddr("192.0.2.1"), "innocent"); !ok {
		t.Error("an innocent was refused")
	}
}

// TestOffendersStayKnownAmongMany: at the default size, a thousand offenders are all
// held while a hundred thousand strangers come by.
func TestOffendersStayKnownAmongMany(t *testing.T) {
	p := newTestPrefilter(t, PrefilterConfig{})
	for i := range 1000 {
		for range 20 {
			p.Fault(epoch, ipOf(i), "")
		}
	}
	strangers := 0
	for i := range 100_000 {
		if ok, _ := p.Allow(epoch.Add(time.Duration(i)*time.Microsecond), ipOf(1_000_000+i), fmt.Sprint("k", i)); !ok {
			strangers++
		}
	}
	forgotten := 0
	for i := range 1000 {
		if ok, _ := p.Allow(epoch.Add(100*time.Millisecond), ipOf(i), ""); ok {
			forgotten++
		}
	}
	// Two hundred million pairs meet, and one in 2³³ agrees by chance.
	if strangers > 4 || forgotten > 0 {
		t.Errorf("%d strangers refused, %d offenders forgotten", strangers, forgotten)
	}
}

// TestClockComesRound: an old word means nothing, also when the 44 bits wrap and when a
// caller's clock reading is a little behind.
func TestClockComesRound(t *testing.T) {
	p := newTestPrefilter(t, PrefilterConfig{})
	const wrap = time.Duration(1<<tatBits) * time.Microsecond
	for _, at := range []time.Duration{0, wrap / 2, wrap - time.Second, wrap + time.Hour, 3 * wrap} {
		now := epoch.Add(at)
		if ok, _ := p.Allow(now, ipOf(1), ""); !ok {
			t.Errorf("refused after %v", at)
		}
		for range 20 {
			p.Fault(now, ipOf(1), "")
		}
		if ok, wait := p.Allow(now, ipOf(1), ""); ok || wait != time.Second {
			t.Errorf("at %v: %v %v", at, ok, wait)
		}
		if ok, _ := p.Allow(now.Add(-time.Millisecond), ipOf(1), ""); ok && at > 0 {
			t.Errorf("at %v: a late caller emptied the bucket", at)
		}
	}
}

func TestPrefilterAllocatesNothing(t *testing.T) {
	p := newTestPrefilter(t, PrefilterConfig{})
	ip := netip.MustParseAddr("2001:db8::1")
	if n := testing.AllocsPerRun(1000, func() {
		p.Allow(epoch, ip, "hg_live_key")
		p.Fault(epoch, ip, "hg_live_key")
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkPrefilterAllow(b *testing.B) {
	p := newTestPrefilter(b, PrefilterConfig{})
	var n atomic.Int64
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		ip, key := ipOf(int(n.Add(1))), "hg_live_0123456789abcdef0123456789abcdef"
		for now := epoch; pb.Next(); now = now.Add(time.Millisecond) {
			if ok, _ := p.Allow(now, ip, key); !ok && n.Load() == 1 {
				b.Error("refused")
			}
		}
	})
}
