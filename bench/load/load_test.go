package load

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// roundTrip answers without a network, so that runs happen in a bubble's time.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func answerWith(status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
}

func plainWait(ctx context.Context, until time.Time) bool {
	time.Sleep(time.Until(until))
	return ctx.Err() == nil
}

func body(int64) []byte { return []byte(`{}`) }

func slow(d time.Duration) roundTrip {
	return func(r *http.Request) (*http.Response, error) {
		select {
		case <-time.After(d):
			return answerWith(200, "ok"), nil
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
}

func bubble(t *testing.T, cfg Config) *Result {
	t.Helper()
	if cfg.URL == "" {
		cfg.URL = "http://127.0.0.1/"
	}
	if cfg.Body == nil {
		cfg.Body = body
	}
	res, err := runWith(t.Context(), cfg, plainWait)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// A server that needs ten times the time between arrivals sees them all the same:
// the generator does not wait for answers.
func TestArrivalsDoNotWaitForAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		res := bubble(t, Config{Rate: 100, Duration: time.Second, Transport: slow(100 * time.Millisecond)})
		if res.Arrivals != 100 || res.Good != 100 || res.Dropped != 0 {
			t.Fatalf("arrivals %d, good %d, dropped %d; want 100, 100, 0", res.Arrivals, res.Good, res.Dropped)
		}
		if want := 990*time.Millisecond + 100*time.Millisecond; res.Elapsed != want {
			t.Errorf("elapsed %v, want %v", res.Elapsed, want)
		}
		if p50 := time.Duration(res.Latency.ValueAtQuantile(50)).Round(time.Millisecond); p50 != 100*time.Millisecond {
			t.Errorf("p50 latency %v, want 100ms", p50)
		}
	})
}

func TestArrivalsBeyondMaxInFlightAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		res := bubble(t, Config{Rate: 100, Count: 50, MaxInFlight: 5, Transport: slow(time.Hour), Timeout: 10 * time.Second})
		if res.Arrivals != 50 || res.Dropped != 45 || res.Errors["timeout"] != 5 {
			t.Fatalf("arrivals %d, dropped %d, errors %v; want 50, 45, 5 timeouts", res.Arrivals, res.Dropped, res.Errors)
		}
	})
}

func TestSaturationKeepsAFixedNumberUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var live, peak atomic.Int64
		rt := roundTrip(func(r *http.Request) (*http.Response, error) {
			peak.Store(max(peak.Load(), live.Add(1)))
			defer live.Add(-1)
			time.Sleep(10 * time.Millisecond)
			return answerWith(200, "ok"), nil
		})
		res := bubble(t, Config{Duration: time.Second, MaxInFlight: 4, Transport: rt})
		if peak.Load() > 4 || res.Good != 400 {
			t.Fatalf("peak %d, good %d; want at most 4, and 400", peak.Load(), res.Good)
		}
	})
}

func TestPoissonArrivalsRepeatWithTheirSeed(t *testing.T) {
	times := func(seed uint64) (out []time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			rt := roundTrip(func(*http.Request) (*http.Response, error) { return answerWith(200, ""), nil })
			res, err := runWith(t.Context(), Config{URL: "http://127.0.0.1/", Body: body, Rate: 50, Count: 200, Poisson: true, Seed: seed, Transport: rt},
				func(ctx context.Context, until time.Time) bool {
					out = append(out, until.Sub(start))
					return plainWait(ctx, until)
				})
			if err != nil || res.Good != 200 {
				t.Fatalf("good %d, error %v", res.Good, err)
			}
		})
		return out
	}
	a, b, other := times(1), times(1), times(2)
	same := 0
	for i := range a {
		if a[i] != b[i] {
			t.Fatalf("arrival %d came at %v and at %v", i, a[i], b[i])
		}
		if a[i] == other[i] {
			same++
		}
	}
	if same > 1 { // the first is at 0 for every seed
		t.Errorf("%d of %d arrivals are the same for another seed", same, len(a))
	}
	if mean := a[len(a)-1] / time.Duration(len(a)-1); mean < 14*time.Millisecond || mean > 26*time.Millisecond {
		t.Errorf("mean gap %v of virtual time at 50/s", mean)
	}
}

func TestAnswersAreSorted(t *testing.T) {
	stream := "data: a\n\ndata: b\n\ndata: [DONE]\n\n"
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/good":
			_, _ = io.WriteString(w, stream)
		case "/cut":
			_, _ = io.WriteString(w, stream[:20])
		case "/refused":
			w.WriteHeader(http.StatusTooManyRequests)
		case "/broken":
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "short")
		case "/long":
			_, _ = io.WriteString(w, strings.Repeat("x", 4096))
		}
	}))
	defer srv.Close()
	for _, tc := range []struct {
		path, err string
		status    int
		good      int64
	}{
		{"/good", "", 200, 7}, {"/cut", "truncated", 200, 0}, {"/refused", "", 429, 0}, {"/broken", "transport", 200, 0}, {"/long", "too_long", 200, 0},
	} {
		res, err := Run(t.Context(), Config{URL: srv.URL + tc.path, Body: body, End: "[DONE]", Count: 7, Rate: 1e6, MaxAnswer: 1024})
		if err != nil {
			t.Fatal(err)
		}
		if res.Good != tc.good || res.Status[tc.status] != 7 || tc.err != "" && res.Errors[tc.err] != 7 {
			t.Errorf("%s: good %d, status %v, errors %v", tc.path, res.Good, res.Status, res.Errors)
		}
		if tc.path == "/good" && (res.Chunks != 21 || res.Service.TotalCount() != 7 || res.First.TotalCount() != 7) {
			t.Errorf("good answers: %d chunks, %d times, %d first bytes; want 21, 7, 7", res.Chunks, res.Service.TotalCount(), res.First.TotalCount())
		}
	}
}

func TestEndOfContextEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		res, err := runWith(ctx, Config{URL: "http://127.0.0.1/", Body: body, Rate: 10, Count: 1000, Transport: slow(time.Minute)}, plainWait)
		if err != nil || res.Arrivals > 11 || res.Good != 0 {
			t.Fatalf("arrivals %d, good %d, error %v", res.Arrivals, res.Good, err)
		}
	})
}

func TestConfigRefusesWhatMakesNoSense(t *testing.T) {
	good := Config{URL: "http://127.0.0.1:1/", Body: body, Count: 1}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"far target":    func(c *Config) { c.URL = "http://192.0.2.1/" },
		"named target":  func(c *Config) { c.URL = "http://example.test/" },
		"https":         func(c *Config) { c.URL = "https://127.0.0.1/" },
		"no body":       func(c *Config) { c.Body = nil },
		"no bound":      func(c *Config) { c.Count = 0 },
		"negative rate": func(c *Config) { c.Rate = -1 },
	} {
		c := good
		change(&c)
		if c.Validate() == nil {
			t.Errorf("%s: accepted", name)
		}
		if _, err := Run(t.Context(), c); err == nil {
			t.Errorf("%s: run", name)
		}
	}
}

var errNothing = errors.New("nothing there")

func TestTransportErrorsAreCounted(t *testing.T) {
	rt := roundTrip(func(*http.Request) (*http.Response, error) { return nil, errNothing })
	res, err := Run(t.Context(), Config{URL: "http://[::1]:1/", Body: body, Rate: 1e6, Count: 3, Transport: rt})
	if err != nil || res.Errors["transport"] != 3 || res.Good != 0 {
		t.Fatalf("errors %v, good %d, %v", res.Errors, res.Good, err)
	}
}

func TestImpatientClientsLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			mu   sync.Mutex
			seen []Seen
		)
		res := bubble(t, Config{
			Rate: 100, Count: 4, Transport: slow(time.Second), Timeout: time.Minute,
			Each: func(n int64) Shot {
				return Shot{Body: []byte(`{}`), Patience: time.Duration(n) * 600 * time.Millisecond} // none, too little, enough, enough
			},
			Seen: func(s Seen) {
				mu.Lock()
				defer mu.Unlock()
				seen = append(seen, s)
			},
		})
		if res.Good != 3 || res.Errors["impatient"] != 1 || len(seen) != 4 {
			t.Fatalf("good %d, errors %v, seen %d", res.Good, res.Errors, len(seen))
		}
		for _, s := range seen {
			if want := map[bool]string{true: "impatient"}[s.N == 1]; s.Kind != want {
				t.Errorf("request %d: %q, want %q", s.N, s.Kind, want)
			}
			if s.N == 1 && s.Last.Sub(s.Due) != 600*time.Millisecond {
				t.Errorf("it left after %v", s.Last.Sub(s.Due))
			}
			if s.N != 1 && (s.Status != 200 || s.First.Sub(s.Due) != time.Second) {
				t.Errorf("request %d: %+v", s.N, s)
			}
		}
	})
}

// A client whose first byte has come stays to the end.
func TestPatienceEndsWithTheFirstByte(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := roundTrip(func(*http.Request) (*http.Response, error) {
			r, w := io.Pipe()
			go func() {
				_, _ = io.WriteString(w, "first ")
				time.Sleep(time.Minute)
				_, _ = io.WriteString(w, "last")
				_ = w.Close()
			}()
			resp := answerWith(200, "")
			resp.Body = r
			return resp, nil
		})
		res := bubble(t, Config{
			Rate: 1, Count: 1, Transport: rt, Timeout: time.Hour,
			Each: func(int64) Shot { return Shot{Body: []byte(`{}`), End: "last", Patience: time.Second} },
		})
		if res.Good != 1 || res.Elapsed != time.Minute {
			t.Errorf("good %d after %v, errors %v", res.Good, res.Elapsed, res.Errors)
		}
	})
}

func TestRefusalsAreSeenWithTheirStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []Seen
		rt := roundTrip(func(*http.Request) (*http.Response, error) { return answerWith(429, "full"), nil })
		res := bubble(t, Config{Rate: 1, Count: 1, Transport: rt, Seen: func(s Seen) { seen = append(seen, s) }})
		if len(seen) != 1 || seen[0].Status != 429 || seen[0].Kind != "status" || res.Status[429] != 1 || len(res.Errors) != 0 {
			t.Errorf("seen %+v, result %+v", seen, res)
		}
	})
}
