package proxy_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"headgate/bench/fakevllm"
	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy"
)

// onLeases puts a lease.Manager that owns every bucket behind the front door, in place of a table.
func onLeases(t *testing.T) func(proxy.Limits) proxy.Limits {
	t.Helper()
	start := time.Now()
	m := must[*lease.Manager](t)(lease.NewAlone(func() lease.Instant {
		run := time.Since(start)
		return lease.Instant{Now: int64(run), Wall: start.UnixNano() + int64(run)}
	}, 0))
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() { defer close(ended); m.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended })
	return func(proxy.Limits) proxy.Limits { return m }
}

// TestFiftyAgainstTenOnLeases: of fifty requests at once, quota for ten that is lent admits ten.
func TestFiftyAgainstTenOnLeases(t *testing.T) {
	for unit, each := range map[proxy.Unit]int64{proxy.Requests: 1, proxy.Concurrency: 1, proxy.Tokens: 10, proxy.OutputTokens: 6} {
		algorithms := []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog}
		if unit == proxy.Concurrency {
			algorithms = []limiter.Algorithm{limiter.Semaphore}
		}
		for _, a := range algorithms {
			t.Run(fmt.Sprintf("%s/%s", unit, a), func(t *testing.T) {
				w := newWorld(t, setup{limits: []proxy.Limit{limitOf(unit, a, 10*each)}, guard: onLeases(t)})
				ok, refused := w.fire(call{path: "/v1/completions", body: exactStreamed}, 50, 10)
				if ok != 10 || refused != 40 || w.fake.Stats().Requests != 10 {
					t.Errorf("%d answered, %d refused, %d reached the model server", ok, refused, w.fake.Stats().Requests)
				}
			})
		}
	}
}

// TestSettledOnLeases: what an answer used is in its own headers, and binds the next request.
func TestSettledOnLeases(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{fill(proxy.Tokens, 1, time.Second, 50)}, guard: onLeases(t)})
	for i, want := range []string{"40", "30", "20", "10"} {
		a := w.do(call{path: "/v1/completions", body: exact}).want(t, 200) // ten of ten
		left, err := strconv.Atoi(a.header.Get("X-Ratelimit-Remaining"))
		if least, _ := strconv.Atoi(want); err != nil || left < least || left > least+2 { // a slow machine refills some
			t.Errorf("%d: %d left, want %s", i, left, want)
		}
	}
	w.do(call{path: "/v1/completions", body: plainCall}).refused(t, 400, "request_exceeds_limit")
	if n := w.decisions("tokens", "local", "admitted") + w.decisions("tokens", "direct", "admitted"); n != 4 {
		t.Errorf("%d decisions out of a lease or by the owner", n)
	}
	if w.metric("headgate_decisions_total", "mode", "degraded") != 0 || w.metric("headgate_degraded") != 0 {
		t.Error("degraded, with the owner in reach")
	}
}

// TestRetryAfterIsTrueOnLeases: a request that comes back when it was told is admitted, also where the
// node refused by what the owner had said, and not a millisecond before.
func TestRetryAfterIsTrueOnLeases(t *testing.T) {
	for _, a := range []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow} {
		synctest.Test(t, func(t *testing.T) {
			l := fill(proxy.Requests, 6, 30*time.Second, 2)
			if l.Spec.Algorithm = a; a == limiter.FixedWindow {
				l.Spec.Rate, l.Spec.Burst = limiter.Rate{Count: 2, Per: 30 * time.Second}, 0
			}
			w := bubbled(t, setup{limits: []proxy.Limit{l}, guard: onLeases(t)})
			for range 2 {
				w.handle(call{body: chat}).want(t, 200)
			}
			var wait time.Duration
			for range 3 {
				ms, err := strconv.Atoi(w.handle(call{body: chat}).refused(t, 429, "rate_limit_exceeded").header.Get("Retry-After-Ms"))
				if err != nil || ms < 1 || ms > 30_000 {
					t.Fatalf("%v: Retry-After %d ms, %v", a, ms, err)
				}
				wait = time.Duration(ms) * time.Millisecond
			}
			if w.decisions("requests", "refused_local", "refused") == 0 {
				t.Errorf("%v: the owner was asked for each refusal", a)
			}
			time.Sleep(wait - 2*time.Millisecond)
			w.handle(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
			time.Sleep(2 * time.Millisecond)
			w.handle(call{body: chat}).want(t, 200)
		})
	}
}

// TestSlotsComeBackOnLeases, and at once.
func TestSlotsComeBackOnLeases(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Concurrency, 1)}, guard: onLeases(t)})
	for range 3 {
		w.fake.Hold()
		answers := make(chan answer)
		go func() { answers <- w.do(call{body: chat}) }()
		w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
		a := w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
		if a.header.Get("RateLimit") != `"concurrency";r=0` {
			t.Errorf("%v", a.header)
		}
		w.fake.Release()
		(<-answers).want(t, 200)
		w.do(call{body: chat}).want(t, 200)
	}
}

// TestExplainOnLeases charges nothing, and says who would decide.
func TestExplainOnLeases(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{fill(proxy.Requests, 1, 20*time.Second, 3), named(limit(proxy.Tokens, 100_000), "daily")}, guard: onLeases(t)})
	for range 5 {
		e := must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 40, Output: 20}))
		if !e.Admitted || e.Degraded || len(e.Limits) != 2 || e.Limits[0].Remaining != 2 || e.Limits[1].Remaining != 99_940 {
			t.Fatalf("%+v", e)
		}
		for _, l := range e.Limits {
			if l.By != "local" && l.By != "direct" {
				t.Errorf("%s would be decided by %q", l.Name, l.By)
			}
		}
	}
	if res := w.do(call{method: http.MethodGet, path: "/v1/models"}).want(t, 200); res.header.Get("X-Headgate-Degraded") != "" {
		t.Errorf("%v", res.header)
	}
}
