package upstream

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// pass lets virtual time pass and what is due at its end be done.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestHealthFollowsProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		p := newTestPool(t, Config{
			Transport: f.transport, HealthInterval: 5 * time.Second,
			Backends: []Backend{{Name: "a", URL: "http://a", HealthPath: "/ping"}},
		})
		defer serve(t, p)()
		synctest.Wait()
		if got := states(p); got != "a=up" || f.count("a:80/ping") != 1 {
			t.Fatalf("at start: %s after %d probes", got, f.count("a:80/ping"))
		}

		f.set("a:80", true)
		pass(5*time.Second + time.Millisecond)
		if got := states(p); got != "a=up" {
			t.Fatalf("after one failed probe: %s", got)
		}
		pass(time.Second)
		if got := p.Status()[0]; got.State != Down || got.LastError == "" {
			t.Fatalf("after two: %+v", got)
		}
		if _, err := p.Acquire([]string{"a"}, nil); !errors.Is(err, ErrNoBackend) {
			t.Fatalf("down: %v", err)
		}

		before := f.count("a:80/ping")
		pass(10 * time.Minute)
		probes := f.count("a:80/ping") - before
		if pause := 10 * 60 / max(probes, 1); pause < 60 || pause > 80 {
			t.Errorf("%d probes in 10 minutes of being down, want one in 80 s once it has backed off", probes)
		}

		f.set("a:80", false)
		pass(80 * time.Second)
		if got := p.Status()[0]; got.State != Up || got.LastError != "" {
			t.Fatalf("well again: %+v", got)
		}
	})
}

func TestThreeFailedDialsTakeABackendDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		p := newTestPool(t, Config{
			Transport: f.transport, HealthInterval: time.Hour,
			Backends: []Backend{{Name: "a", URL: "http://a"}},
		})
		defer serve(t, p)()
		synctest.Wait()
		f.set("a:80", true)
		for i := range maxFailedDials {
			s, err := p.Acquire([]string{"a"}, nil)
			if err != nil {
				t.Fatalf("dial %d: %v", i, err)
			}
			if err := send(t, s, "{}"); !Retryable(err) {
				t.Fatalf("dial %d: %v is not retryable", i, err)
			}
			s.Release()
		}
		if got := states(p); got != "a=down" {
			t.Fatal(got)
		}
		f.set("a:80", false)
		pass(minProbeGap + time.Millisecond) // it was woken: no need to wait for the interval
		if got := states(p); got != "a=up" {
			t.Fatal(got)
		}
	})
}

func TestBrokenAnswerBringsAProbeSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		p := newTestPool(t, Config{Transport: f.transport, HealthInterval: time.Hour, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		defer serve(t, p)()
		synctest.Wait()
		s, err := p.Acquire([]string{"a"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Release()
		pass(time.Second)
		before := f.count("a:80/health")
		s.Fail(context.Canceled)
		synctest.Wait()
		if n := f.count("a:80/health") - before; n != 0 {
			t.Errorf("a client that left brought %d probes", n)
		}
		for range 1000 {
			s.Fail(errors.New("unexpected EOF"))
		}
		pass(2 * minProbeGap)
		if n := f.count("a:80/health") - before; n < 1 || n > 2 {
			t.Errorf("a storm of broken answers brought %d probes", n)
		}
		if p.Status()[0].State != Up {
			t.Error("a broken answer alone took the backend down")
		}
	})
}

func TestDNSNameBecomesEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, dns := newFleet(), &names{}
		dns.set(nil, "10.0.0.2", "10.0.0.1", "::ffff:10.0.0.1", "fd00::1")
		p := newTestPool(t, Config{
			Transport: f.transport, Resolver: dns, ResolveInterval: 10 * time.Second,
			Backends: []Backend{{Name: "svc", URL: "dns://vllm:8000/base", Slots: 1}},
		})
		if got := states(p); got != "svc=down" {
			t.Fatalf("before the look-up: %s", got)
		}
		defer serve(t, p)()
		synctest.Wait()
		if got := states(p); got != "svc@10.0.0.1:8000=up svc@10.0.0.2:8000=up svc@[fd00::1]:8000=up" {
			t.Fatal(got)
		}
		held := map[string]*Slot{}
		for range 3 {
			s, err := p.Acquire([]string{"svc"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			held[s.Endpoint()] = s
		}
		if len(held) != 3 {
			t.Fatalf("three slots of one each came from %d addresses", len(held))
		}
		one := held["svc@10.0.0.1:8000"]
		if got := one.URL("/v1/x"); got != "http://10.0.0.1:8000/base/v1/x" {
			t.Error(got)
		}
		req, _ := http.NewRequestWithContext(t.Context(), "GET", one.URL("/v1/x"), nil)
		if resp, err := one.RoundTrip(req); err != nil || req.Host != "vllm:8000" {
			t.Errorf("host %q, %v", req.Host, err)
		} else {
			resp.Body.Close()
		}

		dns.set(errors.New("server misbehaving"))
		pass(10 * time.Second)
		dns.set(nil)
		pass(10 * time.Second)
		if p.Up() != 3 {
			t.Fatalf("a name server in trouble left %s", states(p))
		}

		dns.set(nil, "10.0.0.2", "10.0.0.3")
		pass(10 * time.Second)
		if got := states(p); got != "svc@10.0.0.2:8000=up svc@10.0.0.3:8000=up svc@10.0.0.1:8000=up svc@[fd00::1]:8000=up" {
			t.Fatal(got) // the last two drain
		}
		dns.set(nil, "10.0.0.1", "10.0.0.2", "10.0.0.3")
		pass(10 * time.Second)
		s, err := p.Acquire([]string{"svc"}, nil)
		if err != nil || s.Endpoint() != "svc@10.0.0.3:8000" {
			t.Fatalf("%v %v: an address that came back gave its slot out twice", s, err)
		}
		s.Release()
		for _, s := range held {
			s.Release()
		}
		if got := states(p); got != "svc@10.0.0.2:8000=up svc@10.0.0.3:8000=up svc@10.0.0.1:8000=up" {
			t.Fatal(got)
		}
	})
}

func TestDNSNameWithTooManyAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dns := &names{}
		var addrs []string
		for i := range maxEndpoints + 10 {
			addrs = append(addrs, fmt.Sprintf("10.0.%d.%d", i/250, i%250))
		}
		dns.set(nil, addrs...)
		p := newTestPool(t, Config{Transport: newFleet().transport, Resolver: dns, Backends: []Backend{{Name: "svc", URL: "dns://x:1"}}})
		defer serve(t, p)()
		synctest.Wait()
		if n := len(p.Status()); n != maxEndpoints {
			t.Errorf("%d endpoints", n)
		}
	})
}

// TestUpdateWhileRunning starts and ends loops; goleak and Run's return see to the rest.
func TestUpdateWhileRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		p := newTestPool(t, Config{Transport: f.transport, HealthInterval: time.Second})
		stop := serve(t, p)
		synctest.Wait()
		if err := p.Run(t.Context()); err == nil {
			t.Error("ran twice at once")
		}
		if err := p.Update([]Backend{{Name: "a", URL: "http://a"}}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := states(p); got != "a=up" {
			t.Fatal(got)
		}
		if err := p.Update(nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		before := f.count("a:80/health")
		pass(time.Minute)
		if n := f.count("a:80/health") - before; n != 0 {
			t.Errorf("%d probes of a removed backend", n)
		}
		stop()
		p.Close()
		if _, err := p.Acquire([]string{"a"}, nil); !errors.Is(err, ErrNoBackend) {
			t.Errorf("closed: %v", err)
		}
	})
}

func TestCloseEndsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTestPool(t, Config{Transport: newFleet().transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		done := make(chan error, 1)
		go func() { done <- p.Run(t.Context()) }()
		synctest.Wait()
		p.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestModelsAreFetchedOnceAndKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.body = `{"object":"list","data":[{"id":"m","x":1 },{"id":"n"}]}`
		p := newTestPool(t, Config{Transport: f.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		var wg sync.WaitGroup
		ask := func() {
			got, err := p.Models(t.Context(), "a")
			if err != nil || len(got) != 2 || string(got[0]) != `{"id":"m","x":1 }` {
				t.Errorf("%s %v", got, err)
			}
		}
		for range 20 {
			wg.Go(ask)
		}
		wg.Wait()
		pass(modelsTTL - time.Second)
		ask()
		if n := f.count("a:80/v1/models"); n != 1 {
			t.Errorf("%d fetches within the TTL", n)
		}
		pass(2 * time.Second)
		ask()
		if n := f.count("a:80/v1/models"); n != 2 {
			t.Errorf("%d fetches after it", n)
		}

		f.set("a:80", true)
		pass(modelsTTL)
		for range 5 {
			if _, err := p.Models(t.Context(), "a"); err == nil {
				t.Error("a dead backend listed models")
			}
		}
		if n := f.count("a:80/v1/models"); n != 3 {
			t.Errorf("a dead backend was asked %d times", n-2)
		}
		if _, err := p.Models(t.Context(), "nobody"); !errors.Is(err, ErrNoBackend) {
			t.Error(err)
		}
	})
}

func TestModelsAreBounded(t *testing.T) {
	for name, c := range map[string]struct {
		body string
		n    int // -1: an error
	}{
		"not JSON":   {"<html>", -1},
		"too long":   {`{"data":["` + strings.Repeat("x", maxModelsBody) + `"]}`, -1},
		"too many":   {`{"data":[` + strings.Repeat("1,", 5000) + `1]}`, maxModels},
		"no listing": {`{}`, 0},
	} {
		f := newFleet()
		f.body = c.body
		p := newTestPool(t, Config{Transport: f.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		got, err := p.Models(t.Context(), "a")
		if (err != nil) != (c.n < 0) || err == nil && len(got) != c.n {
			t.Errorf("%s: %d entries, %v", name, len(got), err)
		}
	}
}
