package upstream

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestFiveFailuresOpenTheBreaker(t *testing.T) {
	for name, c := range map[string]struct {
		play act
		err  bool // of the exchange
		most int  // requests that it takes
	}{
		"resets":            {resets, true, 5},
		"cut before":        {cuts(""), true, 5},
		"cut in the middle": {cuts("data: {}\n\n"), true, 5},
		"503":               {answers(503), false, 5},
		"502":               {answers(502), false, 5},
		"500":               {answers(500), false, 10},
		"400":               {answers(400), false, 1000},
		"429":               {answers(429), false, 1000},
		"501":               {answers(501), false, 1000},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newActors(map[string]act{"a": c.play})
				p := newTestPool(t, Config{Transport: a.transport, HealthInterval: time.Hour, Backends: []Backend{{Name: "a", URL: "http://a"}}})
				defer serve(t, p)()
				synctest.Wait()
				for i := range c.most {
					if _, err := one(t, p, "a"); (err != nil) != c.err {
						t.Fatalf("request %d: %v", i, err)
					}
				}
				if c.most == 1000 {
					if st := status(t, p, "a"); st.Breaker != BreakerClosed {
						t.Errorf("%+v", st)
					}
					return
				}
				if _, err := one(t, p, "a"); !errors.Is(err, ErrNoBackend) || a.count("a") != c.most {
					t.Fatalf("%v after %d requests", err, a.count("a"))
				}
				if st := status(t, p, "a"); st.Breaker != BreakerOpen || st.State != Up || st.LastError == "" {
					t.Errorf("%+v", st)
				}
				// Its health is good all the while: only a request shows that it works.
				a.tell("a", answers(200))
				changed := p.Changed()
				pass(breakerPause)
				if !fired(changed) || status(t, p, "a").Breaker != BreakerHalfOpen {
					t.Errorf("nobody is told that it may be tried: %+v", status(t, p, "a"))
				}
				s, err := p.Hold("a", nil)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := p.Hold("a", nil); !errors.Is(err, ErrSaturated) { // it is worth waiting for
					t.Errorf("two on trial: %v", err)
				}
				if err := stream(t.Context(), s); err != nil {
					t.Fatal(err)
				}
				s.Release()
				if st := status(t, p, "a"); st.Breaker != BreakerClosed || st.Share >= 1 {
					t.Errorf("after a good answer: %+v", st)
				}
			})
		})
	}
}

func TestTrialOfAClientThatLeavesPassesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": resets})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		for range dfltFailures {
			_, _ = one(t, p, "a")
		}
		pass(breakerPause)
		s, err := p.Hold("a", nil)
		if err != nil {
			t.Fatal(err)
		}
		changed := p.Changed()
		s.Release() // without a request
		if !fired(changed) {
			t.Error("nobody is told")
		}
		a.tell("a", after(forever, true))
		s, err = p.Hold("a", nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if err := stream(ctx, s); !errors.Is(err, context.Canceled) || Replayable(err) {
			t.Error(err)
		}
		s.Release()
		if st := status(t, p, "a"); st.Breaker != BreakerHalfOpen {
			t.Errorf("%+v", st)
		}
		if _, err = p.Hold("a", nil); err != nil {
			t.Error(err)
		}
	})
}

// TestOneThatNeverAnswers: a hung backend does not stall all. There are three
// endpoints, of which one accepts and never answers.
func TestOneThatNeverAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		hang  act
		ill   bool // its health hangs, too
		first time.Duration
	}{
		"it ignores all":                       {after(forever, false), true, 0},
		"its health is good":                   {after(forever, false), false, 0},
		"its header comes, its health is good": {after(forever, true), false, 0},
		"a first byte is due":                  {after(forever, true), false, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newActors(map[string]act{"a": after(100*time.Millisecond, true), "b": after(100*time.Millisecond, true), "c": after(100*time.Millisecond, true)})
				var bs []Backend
				for _, n := range []string{"a", "b", "c"} {
					bs = append(bs, Backend{Name: n, URL: "http://" + n, Serves: []string{"m"}, FirstByteTimeout: c.first})
				}
				p := newTestPool(t, Config{Transport: a.transport, Backends: bs})
				defer serve(t, p)()
				var mu sync.Mutex
				done, moved := 0, 0
				var slowest time.Duration
				var wg sync.WaitGroup
				load := func(d time.Duration) { // ten a second
					for range int(d / (100 * time.Millisecond)) {
						wg.Go(func() {
							began := time.Now()
							var tried []string
							for {
								cs, err := p.Candidates(nil, []string{"a", "b", "c"}, tried)
								if err != nil {
									t.Error(err)
									return
								}
								s, err := p.Hold(cs[0].ID, nil)
								if err != nil {
									continue
								}
								err = stream(t.Context(), s)
								s.Release()
								mu.Lock()
								if err == nil {
									done, slowest = done+1, max(slowest, time.Since(began))
									mu.Unlock()
									return
								}
								moved++
								mu.Unlock()
								if tried = append(tried, cs[0].ID); !Replayable(err) || !p.MayRetry() {
									t.Errorf("lost: %v", err)
									return
								}
							}
						})
						pass(100 * time.Millisecond)
					}
				}
				load(10 * time.Second)
				a.tell("a", c.hang)
				a.mu.Lock()
				a.ill["a"] = c.ill
				a.mu.Unlock()
				load(30 * time.Second)
				wg.Wait()
				if moved == 0 || slowest > 35*time.Second {
					t.Errorf("%d moved on, the slowest took %v", moved, slowest)
				}
				slowest, moved = 0, 0
				load(30 * time.Second)
				wg.Wait()
				if done != 700 || moved > 40 {
					t.Errorf("%d of 700 done, %d of the last 300 had to move", done, moved)
				}
				a.tell("a", after(100*time.Millisecond, true))
				a.mu.Lock()
				a.ill["a"] = false
				a.mu.Unlock()
				load(90 * time.Second)
				before := a.count("a")
				load(10 * time.Second)
				wg.Wait()
				if n := a.count("a") - before; n < 20 {
					t.Errorf("well again, it gets %d of 100", n)
				}
			})
		})
	}
}

func TestLostBeforeTheFirstByteOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": after(forever, true)})
		p := newTestPool(t, Config{Transport: a.transport, HealthInterval: time.Second, Backends: []Backend{{Name: "a", URL: "http://a"}, {Name: "b", URL: "http://a", Kind: OpenAI}}})
		defer serve(t, p)()
		synctest.Wait()
		hold := func(id string) *Slot {
			s, err := p.Hold(id, nil)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		waits, fixed, begun, sold := hold("a"), hold("a"), hold("a"), hold("b")
		errs := make(chan error, 4)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { errs <- stream(ctx, waits) }()
		go func() { errs <- roundTrip(ctx, fixed) }() // not to be done twice
		go func() { errs <- stream(ctx, sold) }()
		req, _ := http.NewRequestWithContext(ctx, "POST", begun.URL("/"), strings.NewReader("{}"))
		synctest.Wait()
		a.tell("a", after(0, true))
		begun.Movable()
		resp, err := begun.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := resp.Body.Read(make([]byte, 3)); n != 3 || err != nil {
			t.Fatal(n, err)
		}
		synctest.Wait()
		a.mu.Lock()
		a.ill["a"] = true
		a.mu.Unlock()
		pass(10 * time.Second)
		if st := status(t, p, "a"); st.State != Down || !fired(waits.Lost()) || fired(sold.Lost()) {
			t.Fatalf("%+v", st)
		}
		err = <-errs
		if !errors.Is(err, ErrLost) || !Replayable(err) || Retryable(err) || len(errs) > 0 {
			t.Errorf("%v, and %d others ended", err, len(errs))
		}
		if n, err := resp.Body.Read(make([]byte, 3)); n != 3 || err != nil {
			t.Errorf("an answer under way broke off: %v", err)
		}
		resp.Body.Close()
		cancel()
		for range 2 {
			if err := <-errs; !errors.Is(err, context.Canceled) || Replayable(err) {
				t.Error(err)
			}
		}
		if st := status(t, p, "b"); st.Breaker != BreakerClosed || st.LastError != "" {
			t.Errorf("who left is blamed on the backend: %+v", st)
		}
	})
}

func TestTimeoutsOfABackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stalls := func(r *http.Request) (*http.Response, error) { // after some bytes
			sentWhole(r)
			resp := answer(r, 200, "")
			resp.Body = &stallingBody{first: "data: {}", slowBody: slowBody{ctx: r.Context(), wait: forever}}
			return resp, nil
		}
		a := newActors(map[string]act{"a": after(5*time.Second, false)})
		b := Backend{Name: "a", URL: "http://a", FirstByteTimeout: 3 * time.Second, IdleTimeout: 7 * time.Second}
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{b, {Name: "sold", URL: "http://a", Kind: OpenAI, FirstByteTimeout: time.Second}}})
		for _, c := range []struct {
			id     string
			stream bool
			play   act
			want   error
			after  time.Duration
			again  bool
		}{
			{"a", true, after(5*time.Second, false), ErrFirstByte, 3 * time.Second, true},
			{"a", true, after(5*time.Second, true), ErrFirstByte, 3 * time.Second, true},
			{"a", false, after(5*time.Second, false), nil, 5 * time.Second, false}, // whole answers take their time
			{"a", true, stalls, ErrIdle, 7 * time.Second, false},
			{"sold", true, after(5*time.Second, true), ErrFirstByte, time.Second, false}, // it is billed
			{"a", true, after(2*time.Second, true), nil, 2 * time.Second, false},
		} {
			a.tell("a", c.play)
			s, err := p.Hold(c.id, nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.stream {
				s.Stream()
			}
			began := time.Now()
			err = roundTrip(t.Context(), s)
			s.Release()
			if took := time.Since(began); !errors.Is(err, c.want) || took != c.after || Replayable(err) != c.again {
				t.Errorf("%v after %v, want %v after %v; again: %v", err, took, c.want, c.after, Replayable(err))
			}
		}
	})
}

type stallingBody struct {
	slowBody
	first string
}

func (b *stallingBody) Read(p []byte) (int, error) {
	if b.first != "" {
		n := copy(p, b.first)
		b.first = b.first[n:]
		return n, nil
	}
	return b.slowBody.Read(p)
}

func TestPatienceOfOneSaysLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": after(forever, false)})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		ask := func(d time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			s, err := p.Hold("a", nil)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Release()
			if err := roundTrip(ctx, s); !errors.Is(err, context.DeadlineExceeded) || Replayable(err) || Retryable(err) {
				t.Error(err)
			}
		}
		for range 20 {
			ask(time.Second)
		}
		if st := status(t, p, "a"); st.Breaker != BreakerClosed {
			t.Errorf("impatient clients opened it: %+v", st)
		}
		for range dfltFailures {
			ask(patience)
		}
		if st := status(t, p, "a"); st.Breaker != BreakerOpen {
			t.Errorf("it was silent to five that waited long: %+v", st)
		}
	})
}

func TestPushbackPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": answers(429, "Retry-After", "7"), "b": answers(200)})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a"}, {Name: "b", URL: "http://b"}}})
		defer serve(t, p)()
		synctest.Wait()
		at := time.Now()
		if id, err := one(t, p, "a"); id != "a" || err != nil {
			t.Fatal(id, err)
		}
		var e *PausedError
		if _, err := p.Candidates(nil, []string{"a"}, nil); !errors.As(err, &e) || e.Until.Sub(at) != 7*time.Second {
			t.Fatalf("%v %v", err, e)
		}
		if _, err := p.Hold("a", nil); !errors.As(err, &e) {
			t.Fatal(err)
		}
		if st := status(t, p, "a"); st.Paused != 7*time.Second || st.Breaker != BreakerClosed || st.State != Up {
			t.Errorf("%+v", st)
		}
		if got, err := p.Candidates(nil, []string{"a", "b"}, nil); err != nil || ids(got) != "b" {
			t.Errorf("%s %v", ids(got), err)
		}
		changed := p.Changed()
		pass(7*time.Second - time.Millisecond)
		if fired(changed) {
			t.Error("too early")
		}
		pass(2 * time.Millisecond)
		if !fired(changed) {
			t.Error("nobody is told that it takes requests again")
		}
		a.tell("a", answers(429, "Retry-After", "86400"))
		if _, err := one(t, p, "a"); err != nil {
			t.Fatal(err)
		}
		if st := status(t, p, "a"); st.Paused != maxPushback {
			t.Errorf("a day became %v", st.Paused)
		}
		pass(maxPushback)
		a.tell("a", answers(503, "Retry-After", "2"))
		if _, err := one(t, p, "a"); err != nil {
			t.Fatal(err)
		}
		if st := status(t, p, "a"); st.Paused != 2*time.Second {
			t.Errorf("%+v", st)
		}
	})
}

func TestProviderWithoutRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": answers(429)})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a", Kind: OpenAI}}})
		if _, err := one(t, p, "a"); err != nil {
			t.Fatal(err)
		}
		if st := status(t, p, "a"); st.Paused != dfltPushback {
			t.Errorf("%+v", st)
		}
	})
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for in, want := range map[string]time.Duration{
		"": 0, "3": 3 * time.Second, " 1.5 ": 1500 * time.Millisecond, "0": 0, "-4": 0, "61": time.Minute, "1e300": time.Minute, "NaN": 0, "Inf": time.Minute, "soon": 0,
		now.Add(9 * time.Second).Format(http.TimeFormat): 9 * time.Second, now.Add(-time.Hour).Format(http.TimeFormat): 0,
		now.Add(time.Hour).Format(http.TimeFormat): time.Minute,
	} {
		if got := RetryAfter(http.Header{"Retry-After": {in}}, now); got != want {
			t.Errorf("%q: %v, want %v", in, got, want)
		}
	}
	h := http.Header{}
	h.Set("Retry-After", "9")
	h.Set("Retry-After-Ms", "250")
	if got := RetryAfter(h, now); got != 250*time.Millisecond {
		t.Error(got)
	}
	h.Set("Retry-After-Ms", "x")
	if got := RetryAfter(h, now); got != 9*time.Second {
		t.Error(got)
	}
}

func FuzzRetryAfter(f *testing.F) {
	for _, s := range []string{"1", "0.5", "Fri, 02 Jan 2026 03:04:05 GMT", "-1", "NaN", "1e999", fmt.Sprint(math.MaxInt64)} {
		f.Add(s, s)
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	f.Fuzz(func(t *testing.T, s, ms string) {
		if d := RetryAfter(http.Header{"Retry-After": {s}, "Retry-After-Ms": {ms}}, now); d < 0 || d > maxPushback {
			t.Errorf("%v", d)
		}
	})
}

// TestGarbage: a server that speaks no HTTP, and one whose answers the caller can't read.
func TestGarbage(t *testing.T) {
	p := newTestPool(t, Config{Backends: []Backend{{Name: "a", URL: rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
		readRequest(t, r)
		_, _ = c.Write([]byte(strings.Repeat("\x00garbage ", 1000) + "\r\n\r\n"))
	})}}})
	for i := range dfltFailures {
		if _, err := one(t, p, "a"); !Replayable(err) || Retryable(err) {
			t.Fatalf("%d: %v", i, err)
		}
	}
	if st := status(t, p, "a"); st.Breaker != BreakerOpen || len(st.LastError) > 300 {
		t.Errorf("%+v", st)
	}

	a := newActors(map[string]act{"a": answers(200)})
	p = newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
	for range dfltFailures {
		s, err := p.Hold("a", nil)
		if err != nil {
			t.Fatal(err)
		}
		req, _ := http.NewRequestWithContext(t.Context(), "POST", s.URL("/"), strings.NewReader("{}"))
		resp, err := s.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := bufio.NewReader(resp.Body).ReadString(0); err == nil {
			t.Fatal("no end")
		}
		for range 3 { // counts once
			s.Fail(errors.New("this is no answer"))
		}
		s.Release()
		resp.Body.Close()
	}
	if st := status(t, p, "a"); st.Breaker != BreakerOpen || st.LastError != "this is no answer" {
		t.Errorf("%+v", st)
	}
}

// TestBusyIsNotIll: vLLM's health answers late under load while its streams go on.
func TestBusyIsNotIll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := false
		a := newActors(map[string]act{"a": after(10*time.Millisecond, true)})
		rt := roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.URL.Path == "/health" && late {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			return a.RoundTrip(r)
		})
		p := newTestPool(t, Config{Transport: func(Backend) http.RoundTripper { return rt }, HealthInterval: time.Second, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		defer serve(t, p)()
		synctest.Wait()
		late = true
		for range 100 {
			if _, err := one(t, p, "a"); err != nil {
				t.Fatal(err)
			}
			pass(200 * time.Millisecond)
		}
		if st := status(t, p, "a"); st.State != Up {
			t.Errorf("%+v", st)
		}
		pass(20 * time.Second)
		if st := status(t, p, "a"); st.State != Down {
			t.Errorf("silent in every way: %+v", st)
		}
		late = false
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestFlappingHealth: up and down each second, by the probes' word.
func TestFlappingHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		p := newTestPool(t, Config{Transport: f.transport, HealthInterval: 500 * time.Millisecond, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		defer serve(t, p)()
		pass(10 * time.Millisecond)
		ups, was := 0, Up
		for i := range 600 {
			f.set("a:80", i%2 == 0)
			for range 10 {
				pass(100 * time.Millisecond)
				if st := status(t, p, "a").State; st != was {
					if was = st; st == Up {
						ups++
					}
				}
			}
		}
		if ups > 15 {
			t.Errorf("it came up %d times in ten minutes", ups)
		}
		f.set("a:80", false)
		pass(maxPause + time.Second)
		if st := status(t, p, "a"); st.State != Up {
			t.Errorf("steady again: %+v", st)
		}
	})
}

// TestTheOnlyOneIsTriedSoon: what has flapped for long is tried within seconds all the same where requests come and there is no other.
func TestTheOnlyOneIsTriedSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		p := newTestPool(t, Config{Transport: f.transport, HealthInterval: 500 * time.Millisecond, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		defer serve(t, p)()
		pass(10 * time.Millisecond)
		for i := range 300 {
			f.set("a:80", i%2 == 0)
			pass(time.Second)
		}
		f.set("a:80", true)
		for status(t, p, "a").State != Down {
			pass(time.Second)
		}
		f.set("a:80", false)
		var waited time.Duration
		for ; waited < maxPause; waited += time.Second {
			if _, err := p.Candidates(nil, []string{"a"}, nil); err == nil {
				break
			}
			pass(time.Second)
		}
		if waited > downPause+2*time.Second {
			t.Errorf("it came back after %v", waited)
		}
	})
}

func TestRefusedDialsOfAProvider(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": refuses})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a", Kind: Anthropic}}})
		defer serve(t, p)()
		for range dfltFailures {
			if _, err := one(t, p, "a"); !Retryable(err) || Replayable(err) {
				t.Fatal(err)
			}
		}
		if st := status(t, p, "a"); st.State != Up || st.Breaker != BreakerOpen {
			t.Fatalf("nobody probes it, so its breaker is to keep it out: %+v", st)
		}
		a.tell("a", answers(200))
		pass(breakerPause)
		if _, err := one(t, p, "a"); err != nil || status(t, p, "a").Breaker != BreakerClosed {
			t.Errorf("%v %+v", err, status(t, p, "a"))
		}
	})
}

func TestUpdateKeepsTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": resets})
		b := Backend{Name: "a", URL: "http://a"}
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{b}})
		for range dfltFailures {
			_, _ = one(t, p, "a")
		}
		b.Slots, b.FirstByteTimeout = 3, time.Second
		if err := p.Update([]Backend{b}); err != nil {
			t.Fatal(err)
		}
		if st := status(t, p, "a"); st.Breaker != BreakerOpen {
			t.Errorf("%+v", st)
		}
		b.URL = "http://b"
		if err := p.Update([]Backend{b}); err != nil {
			t.Fatal(err)
		}
		if st := status(t, p, "a"); st.Breaker != BreakerClosed {
			t.Errorf("another server: %+v", st)
		}
	})
}

func TestMayRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTestPool(t, Config{Backends: []Backend{{Name: "a", URL: "http://a"}}})
		all := func() (n int) {
			for p.MayRetry() {
				if n++; n > 10000 {
					break
				}
			}
			return n
		}
		if n := all(); n != 83 {
			t.Errorf("%d at once", n)
		}
		pass(10 * time.Second)
		if n := all(); n < 24 || n > 25 {
			t.Errorf("%d more in ten seconds", n)
		}
		for range 300 {
			s, err := p.Hold("a", nil)
			if err != nil {
				t.Fatal(err)
			}
			s.Release()
		}
		if n := all(); n != 50 {
			t.Errorf("%d for 300 requests", n)
		}
	})
}

// TestResetAfterTheHeader: over real connections, as vLLM dies between the header of a
// stream and its first token.
func TestResetAfterTheHeader(t *testing.T) {
	for _, body := range []string{"", "d"} {
		s := acquire(t, Config{}, rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(t, r)
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"))
			if body != "" {
				_, _ = c.Write([]byte("1\r\n" + body + "\r\n"))
			}
			_ = c.CloseWrite() // what was written arrives before the end
		}))
		if err := stream(t.Context(), s); Replayable(err) != (body == "") || Retryable(err) || err == nil {
			t.Errorf("after %q: %v", body, err)
		}
		if st := status(t, s.p, "a"); st.LastError == "" {
			t.Errorf("%+v", st)
		}
	}
}

// TestConnectionIsKept: the measuring body gives a connection back as the plain one does.
func TestConnectionIsKept(t *testing.T) {
	var conns atomic.Int64
	s := acquire(t, Config{}, rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
		conns.Add(1)
		for readRequest(t, r) {
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"))
		}
	}))
	for range 20 {
		if err := stream(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	s.p.Close()
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

// TestEjectedIsNotBlamedForTheMoved: what moves on because of an ejection is no failure.
func TestEjectedIsNotBlamedForTheMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": after(forever, true), "b": after(100*time.Millisecond, true)})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a", Serves: []string{"m"}}, {Name: "b", URL: "http://b", Serves: []string{"m"}}}})
		defer serve(t, p)()
		synctest.Wait()
		errs := make(chan error, 8)
		for range cap(errs) {
			s, err := p.Hold("a", nil)
			if err != nil {
				t.Fatal(err)
			}
			go func() { defer s.Release(); errs <- stream(t.Context(), s) }()
		}
		for range 100 {
			if _, err := one(t, p, "b"); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		for range cap(errs) {
			if err := <-errs; !errors.Is(err, ErrLost) || !Replayable(err) {
				t.Error(err)
			}
		}
		if st := status(t, p, "a"); !st.Ejected || st.Breaker != BreakerClosed || st.State != Up {
			t.Errorf("%+v", st)
		}
		pass(ejectPause)
		if st := status(t, p, "a"); st.Ejected || st.Share >= 1 {
			t.Errorf("%+v", st)
		}
	})
}

func TestLostBeforeTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": after(forever, true)})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		s, err := p.Hold("a", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Release()
		for range dfltFailures {
			o, err := p.Hold("a", nil)
			if err != nil {
				t.Fatal(err)
			}
			o.Fail(errors.New("nonsense"))
			o.Release()
		}
		began := time.Now()
		if err := stream(t.Context(), s); !errors.Is(err, ErrLost) || time.Since(began) > 0 {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

func TestTrialKeepsOthersFromWaitingForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": resets})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		for range dfltFailures {
			_, _ = one(t, p, "a")
		}
		pass(breakerPause)
		changed := p.Changed()
		s, err := p.Hold("a", nil)
		if err != nil || !fired(changed) {
			t.Fatalf("%v; others are told: %v", err, fired(changed))
		}
		defer s.Release()
		a.tell("a", func(r *http.Request) (*http.Response, error) { sentWhole(r); return answer(r, 200, ""), nil })
		if err := stream(t.Context(), s); err != nil { // an answer without a body is one, too
			t.Fatal(err)
		}
		if st := status(t, p, "a"); st.Breaker != BreakerClosed {
			t.Errorf("%+v", st)
		}
	})
}

// TestLongWaitBesideOthers: who waits long for an endpoint that serves others at the time
// says nothing of it.
func TestLongWaitBesideOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": after(forever, false)})
		p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		for range 2 * dfltFailures {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			s, err := p.Hold("a", nil)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error)
			go func() { done <- roundTrip(ctx, s) }()
			pass(time.Second)
			a.tell("a", after(time.Second, false))
			if id, err := one(t, p, "a"); id != "a" || err != nil {
				t.Fatal(err)
			}
			a.tell("a", after(forever, false))
			if err := <-done; !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			s.Release()
			cancel()
		}
		if st := status(t, p, "a"); st.Breaker != BreakerClosed || p.backends["a"].endpoints[0].v.breaker.row > 0 {
			t.Errorf("%+v", st)
		}
	})
}

// TestBusyWithOneStream: its health is late for as long as one answer flows.
func TestBusyWithOneStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Bool
		rt := roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.URL.Path == "/health" && !ended.Load() {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			sentWhole(r)
			resp := answer(r, 200, "")
			resp.Body = drip{}
			return resp, nil
		})
		p := newTestPool(t, Config{Transport: func(Backend) http.RoundTripper { return rt }, HealthInterval: time.Second, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		s, err := p.Hold("a", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Release()
		req, _ := http.NewRequestWithContext(t.Context(), "POST", s.URL("/"), nil)
		resp, err := s.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		defer serve(t, p)()
		for range 60 {
			if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			if st := status(t, p, "a"); st.State != Up {
				t.Fatalf("%+v", st)
			}
		}
		ended.Store(true)
	})
}

// drip brings a byte a second.
type drip struct{}

func (drip) Read(p []byte) (int, error) { time.Sleep(time.Second); return copy(p, "."), nil }
func (drip) Close() error               { return nil }

// TestReturnWhileBusy: an endpoint that left the policy and came back while a request was
// in flight is known for what it is.
func TestReturnWhileBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActors(map[string]act{"a": resets})
		bs := []Backend{{Name: "a", URL: "http://a"}}
		p := newTestPool(t, Config{Transport: a.transport, Backends: bs})
		busy, err := p.Hold("a", nil)
		if err != nil {
			t.Fatal(err)
		}
		for round, want := range []time.Duration{breakerPause, 2 * breakerPause} {
			for range dfltFailures {
				_, _ = one(t, p, "a")
			}
			e := p.backends["a"].endpoints[0]
			if got := time.Duration(e.v.breaker.until - p.now()); e.v.breaker.state != BreakerOpen || got != want || e.v.rest.times != round+1 {
				t.Fatalf("round %d: %+v", round, e.v)
			}
			if err := p.Update(nil); err != nil {
				t.Fatal(err)
			}
			if err := p.Update(bs); err != nil {
				t.Fatal(err)
			}
		}
		for range dfltFailures - 1 {
			_, _ = one(t, p, "a")
		}
		busy.Fail(errors.New("old news"))
		if st := status(t, p, "a"); st.Breaker != BreakerClosed {
			t.Errorf("what began before it left opened its breaker: %+v", st)
		}
		busy.Release()
	})
}
