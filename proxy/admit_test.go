package proxy_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"

	"headgate/bench/fakevllm"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/openai"
)

// fire sends n calls at once, waits until the model server holds want of them and all
// others are refused, lets them go, and returns the answers.
func (w *world) fire(c call, n int, want int64) (ok, refused int) {
	w.t.Helper()
	w.fake.Hold()
	statuses := make(chan int, n)
	var all sync.WaitGroup
	ctx := patience(w.t)
	for range n {
		r := w.request(ctx, c)
		all.Go(func() {
			resp, err := w.client.Do(r)
			if err != nil {
				statuses <- 0
				return
			}
			defer resp.Body.Close()
			for buf := make([]byte, 4096); err == nil; {
				_, err = resp.Body.Read(buf)
			}
			statuses <- resp.StatusCode
		})
	}
	for range n - int(want) {
		if s := <-statuses; s == http.StatusTooManyRequests {
			refused++
		} else {
			w.t.Errorf("status %d while %d should be held", s, want)
		}
	}
	w.await(func(s fakevllm.Stats) bool { return s.Held == want })
	w.fake.Release()
	all.Wait()
	for range want {
		if s := <-statuses; s == http.StatusOK {
			ok++
		} else {
			w.t.Errorf("status %d of a held request", s)
		}
	}
	return ok, refused
}

// TestFiftyAgainstTen: of fifty requests at once, a balance for ten admits ten.
func TestFiftyAgainstTen(t *testing.T) {
	cost := map[proxy.Unit]int64{proxy.Requests: 1, proxy.Concurrency: 1, proxy.Tokens: 10, proxy.InputTokens: 4, proxy.OutputTokens: 6, proxy.USD: 10}
	cheap := model("m", "vllm")
	cheap.Cost = func(u openai.Usage, _, _ int64) int64 { return u.Input + u.Output }
	for unit, each := range cost {
		algorithms := []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog}
		if unit == proxy.Concurrency {
			algorithms = []limiter.Algorithm{limiter.Semaphore}
		}
		for _, a := range algorithms {
			for _, body := range []string{exact, exactStreamed} {
				t.Run(fmt.Sprintf("%s/%s/stream=%t", unit, a, body == exactStreamed), func(t *testing.T) {
					l := limitOf(unit, a, 10*each)
					w := newWorld(t, setup{limits: []proxy.Limit{l}, models: []*proxy.Model{cheap}})
					ok, refused := w.fire(call{path: "/v1/completions", body: body}, 50, 10)
					if ok != 10 || refused != 40 || w.fake.Stats().Requests != 10 {
						t.Errorf("%d answered, %d refused, %d reached the model server", ok, refused, w.fake.Stats().Requests)
					}
					w.settled()
					want := 10 * each
					if unit == proxy.Concurrency {
						want = 0
					}
					if got := w.spent(l); got != want {
						t.Errorf("%d spent, want %d", got, want)
					}
				})
			}
		}
	}
}

// TestAllOrNothing: what one limit refuses costs nothing of the other.
func TestAllOrNothing(t *testing.T) {
	requests, tokens, slots := limit(proxy.Requests, 10), limit(proxy.Tokens, 50), limit(proxy.Concurrency, 20)
	w := newWorld(t, setup{limits: []proxy.Limit{requests, slots, tokens}})
	if ok, _ := w.fire(call{path: "/v1/completions", body: exact}, 50, 5); ok != 5 {
		t.Errorf("%d answered, want 5", ok)
	}
	w.settled()
	if r, k := w.spent(requests), w.spent(tokens); r != 5 || k != 50 {
		t.Errorf("spent %d requests and %d tokens, want 5 and 50", r, k)
	}
}
