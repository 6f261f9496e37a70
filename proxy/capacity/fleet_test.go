package capacity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func now() int64 { return time.Now().UnixNano() } //nolint:forbidigo // synctest's clock

const text = "vllm:num_requests_waiting 1\nvllm:num_requests_running 7\nvllm:kv_cache_usage_perc 0.5\n"

// gathered are the gauges, all of which must be of backend a.
func gathered(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if len(m.GetLabel()) != 1 || m.GetLabel()[0].GetName() != "backend" || m.GetLabel()[0].GetValue() != "a" {
				t.Errorf("%s has labels %v", family.GetName(), m.GetLabel())
			}
			got[strings.TrimPrefix(family.GetName(), "headgate_backend_")] = m.GetGauge().GetValue()
		}
	}
	return got
}

// running starts a fleet; the test ends it by the function returned, which waits.
func running(t *testing.T, cfg Config, backends ...Backend) (*Fleet, func()) {
	cfg.Now = now
	f := NewFleet(cfg)
	f.Apply(backends)
	ctx, stop := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { f.Run(ctx) })
	return f, func() { stop(); done.Wait() }
}

func TestFleetScrapesWhileItSchedules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var active atomic.Bool
		var fetched atomic.Int64
		reg := prometheus.NewPedanticRegistry()
		_, stop := running(t, Config{
			Active: active.Load, Registerer: reg,
			Fetch: func(_ context.Context, id string) ([]byte, error) {
				if fetched.Add(1); id != "a" {
					t.Errorf("scraped %q", id)
				}
				return []byte(text), nil
			},
		}, Backend{ID: "a", Slots: 8, Learn: true, Metrics: true}, Backend{ID: "b", Slots: 8, Learn: true})
		defer stop()
		time.Sleep(10 * time.Second)
		if n := fetched.Load(); n != 0 {
			t.Errorf("%d scrapes by a node that does not schedule", n)
		}
		active.Store(true)
		time.Sleep(10*time.Second + 500*time.Millisecond)
		if n := fetched.Load(); n < 9 || n > 11 {
			t.Errorf("%d scrapes in 10 s", n)
		}
		want := map[string]float64{"vllm_waiting": 1, "vllm_running": 7, "kv_usage": .5, "metrics_age_seconds": .5}
		if got := gathered(t, reg); !maps.Equal(got, want) {
			t.Errorf("gauges of a: %v, want %v", got, want)
		}
		active.Store(false)
		if got := gathered(t, reg); len(got) != 0 {
			t.Errorf("%v on a node that does not schedule", got)
		}
	})
}

// TestFleetHungBackends: those that never answer hold up no other, and no more than 16 places.
func TestFleetHungBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at, most, well atomic.Int64
		backends := []Backend{}
		for i := range 20 {
			backends = append(backends, Backend{ID: fmt.Sprint("hung", i), Slots: 8, Metrics: true}, Backend{ID: fmt.Sprint("well", i), Slots: 8, Metrics: true})
		}
		_, stop := running(t, Config{Fetch: func(ctx context.Context, id string) ([]byte, error) {
			n := at.Add(1)
			defer at.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			if strings.HasPrefix(id, "hung") {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			well.Add(1)
			return []byte(text), nil
		}}, backends...)
		time.Sleep(60 * time.Second)
		if n := most.Load(); n > scrapesAtOnce {
			t.Errorf("%d scrapes at once", n)
		}
		if n := well.Load(); n < 20*60/int64(staleAfter/time.Second) {
			t.Errorf("%d scrapes of 20 good backends in a minute: some must be stale", n)
		}
		stop()
		if n := at.Load(); n != 0 {
			t.Errorf("%d scrapes outlive Run", n)
		}
	})
}

func TestFleetStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fail atomic.Pointer[error]
		var told atomic.Value
		told.Store(strings.Replace(text, "waiting 1", "waiting 0", 1)) // a queue would be a sign of its own
		var log strings.Builder
		f, stop := running(t, Config{
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Fetch: func(context.Context, string) ([]byte, error) {
				if err := fail.Load(); err != nil {
					return nil, *err
				}
				return []byte(told.Load().(string)), nil
			},
		}, Backend{ID: "a", Slots: 8, Min: 2, Learn: true, Metrics: true}, Backend{ID: "seen", Slots: 8, Metrics: true})
		time.Sleep(3*time.Second + 500*time.Millisecond)
		at, stale := f.Limit(now(), "a")
		if stale {
			t.Error("stale, though it answers")
		}
		refused := errors.New("connection refused")
		fail.Store(&refused)
		time.Sleep(time.Minute)
		if limit, stale := f.Limit(now(), "a"); !stale || limit >= at || limit < 2 {
			t.Errorf("limit %d, stale %v after a minute without metrics; want less than %d, no less than 2, true", limit, stale, at)
		}
		if limit, stale := f.Limit(now(), "seen"); limit != -1 || !stale {
			t.Errorf("limit %d, stale %v of one that is not learnt; want -1, true", limit, stale)
		}
		fail.Store(nil)
		time.Sleep(2 * time.Second)
		if _, stale := f.Limit(now(), "a"); stale {
			t.Error("stale, though it is back")
		}
		told.Store("vllm:names_of_another_version 1\n") // case 8: absent is unknown, not idle
		time.Sleep(10 * time.Second)
		if _, stale := f.Limit(now(), "a"); !stale {
			t.Error("not stale, though its names are gone")
		}
		stop()
		for line, n := range map[string]int{"metrics cannot be read": 2, "metrics are back": 2, "hold no name of vLLM's": 2} {
			if got := strings.Count(log.String(), line); got != n {
				t.Errorf("%q is logged %d times, want %d (once for each backend)\n%s", line, got, n, log.String())
			}
		}
	})
}

func TestFleetApplyAndSeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var active atomic.Bool
		f, stop := running(t, Config{Active: active.Load}, Backend{ID: "a", Slots: 64, Learn: true}, Backend{ID: "b", Slots: 64})
		defer stop()
		limit := func(id string) int64 {
			n, stale := f.Limit(now(), id)
			if stale {
				t.Errorf("%s is stale", id)
			}
			return n
		}
		if a, b, c := limit("a"), limit("b"), limit("c"); a != startLeast || b != -1 || c != -1 {
			t.Errorf("limits %d, %d, %d; want %d, -1, -1", a, b, c, startLeast)
		}
		active.Store(true)
		f.Seed("a", 40)
		f.Seed("a", -1) // another node that learnt nothing
		f.Seed("c", 40)
		if a := limit("a"); a != 40 {
			t.Errorf("%d, want the seed", a)
		}
		push := func(d time.Duration) {
			for range d / (100 * time.Millisecond) {
				time.Sleep(100 * time.Millisecond)
				f.Observe(now(), Observation{Backend: "a", Pushbacks: 1})
				f.Observe(now(), Observation{Backend: "gone", Pushbacks: 1})
			}
		}
		push(3 * time.Second)
		own := limit("a")
		f.Seed("a", 50)
		if a := limit("a"); a != own || own >= 40 {
			t.Errorf("%d, want its own %d, cut from 40", a, own)
		}
		f.Apply([]Backend{{ID: "a", Slots: 64, Learn: true}})
		if a := limit("a"); a != own {
			t.Errorf("%d after another policy, want %d", a, own)
		}
		// Another node schedules, and learns; then this one again.
		active.Store(false)
		f.Observe(now(), Observation{Backend: "a"})
		active.Store(true)
		f.Seed("a", 50)
		if a := limit("a"); a != 50 {
			t.Errorf("%d, want what was learnt meanwhile", a)
		}
		f.Apply(nil)
		if a := limit("a"); a != -1 {
			t.Errorf("%d of one that is gone", a)
		}
	})
}
