package fakevllm

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// serve serves cfg on a listener of the server's own until the test ends.
func serve(t *testing.T, cfg Config) (*Server, string) {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: time.Minute}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		s.Release()
		_ = srv.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("served until %v", err)
		}
	})
	return s, "http://" + l.Addr().String()
}

// direct hands a chat to the server without a network, so that it may be in a bubble.
func direct(ctx context.Context, s *Server, members string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(with(hello, members)))
	defer func() {
		if p := recover(); p != nil && p != any(http.ErrAbortHandler) {
			panic(p)
		}
	}()
	s.Handler().ServeHTTP(w, r.WithContext(ctx))
	return w
}

func set(t *testing.T, s *Server, f Fault, share float64) {
	t.Helper()
	if err := s.Set(f, share); err != nil {
		t.Fatal(err)
	}
}

func TestFaultsAreSetWhileItRuns(t *testing.T) {
	s, url := serve(t, Config{Faults: map[Fault]float64{"500": 1}})
	status := func() int {
		resp, _, err := attempt(t, url, `"n":1`, "")
		if err != nil {
			return 0
		}
		return resp.StatusCode
	}
	if got := status(); got != 500 {
		t.Errorf("status %d, want the 500 of its configuration", got)
	}
	if err := s.Clear(); err != nil {
		t.Fatal(err)
	}
	set(t, s, "429=7", 1)
	resp, _, err := attempt(t, url, `"n":1`, "")
	if err != nil || resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "7" {
		t.Errorf("%v, %v", resp, err)
	}
	set(t, s, "429", 0)
	if got := status(); got != 200 {
		t.Errorf("status %d after the fault was taken back", got)
	}
	for f, share := range map[Fault]float64{"fire": 1, Hang: 1.5, "cut=3": -1} {
		if err := s.Set(f, share); err == nil {
			t.Errorf("%s at %v was taken", f, share)
		}
	}
}

func TestAShareStrikesThatShare(t *testing.T) {
	s, err := New(Config{Seed: 3})
	if err != nil {
		t.Fatal(err)
	}
	set(t, s, "503", 0.3)
	struck := 0
	for range 400 {
		if direct(t.Context(), s, `"n":1`).Code == 503 {
			struck++
		}
	}
	if struck < 80 || struck > 160 {
		t.Errorf("%d of 400 were struck", struck)
	}
}

func TestHealthFollowsWhatStrikesAll(t *testing.T) {
	s, url := serve(t, Config{})
	health := func() int {
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := c.Get(url + "/health")
		if err != nil {
			return 0
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	for _, tc := range []struct {
		fault Fault
		share float64
		as    Health
		want  int
	}{
		{"503", 1, HealthFollows, 503},
		{"503", 0.9, HealthFollows, 200},
		{"503", 1, HealthUp, 200},
		{"429", 1, HealthFollows, 200},
		{Reset, 1, HealthFollows, 0},
		{Cut, 1, HealthFollows, 200},
		{Cut, 1, HealthDown, 503},
	} {
		if err := errors.Join(s.Clear(), s.Set(tc.fault, tc.share), s.SetHealth(tc.as)); err != nil {
			t.Fatal(err)
		}
		if got := health(); got != tc.want {
			t.Errorf("%s at %v, health %s: %d, want %d", tc.fault, tc.share, tc.as, got, tc.want)
		}
	}
	if err := s.SetHealth("ill"); err == nil {
		t.Error("an unknown health was taken")
	}
}

func TestRefusedConnectionsAreRefused(t *testing.T) {
	s, url := serve(t, Config{})
	if resp, _, err := attempt(t, url, `"n":1`, ""); err != nil || resp.StatusCode != 200 {
		t.Fatal(resp, err)
	}
	held := make(chan error, 1)
	s.Hold()
	go func() {
		_, _, err := attempt(t, url, `"n":1`, "")
		held <- err
	}()
	if err := s.Await(t.Context(), func(st Stats) bool { return st.Held == 1 }); err != nil {
		t.Fatal(err)
	}
	set(t, s, Refuse, 1)
	if err := <-held; err == nil {
		t.Error("a request under way got its answer")
	}
	if _, _, err := attempt(t, url, `"n":1`, ""); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("error %v, want a refusal", err)
	}
	s.Release()
	set(t, s, Refuse, 0)
	if resp, _, err := attempt(t, url, `"n":1`, ""); err != nil || resp.StatusCode != 200 {
		t.Errorf("after it opened again: %v, %v", resp, err)
	}
	set(t, s, Refuse, 1) // and ends while it refuses
}

func TestHangingTakesNoSlotAndEndsWithItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{Slots: 1, StallMax: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		set(t, s, Hang, 1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		from := time.Now()
		direct(ctx, s, `"n":1`)
		if st := s.Stats(); time.Since(from) != time.Minute || st.PeakRunning != 0 || st.Outcomes[Aborted] != 1 || st.InFlight != 0 {
			t.Errorf("after %v: %+v", time.Since(from), st)
		}
		direct(t.Context(), s, `"n":1`)
		if st := s.Stats(); time.Since(from) != time.Hour+time.Minute || st.Outcomes[Failed] != 1 {
			t.Errorf("after %v: %+v", time.Since(from), st)
		}
	})
}

func TestFlappingIsUpAndDownByTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{FlapPeriod: time.Second, InterToken: 30 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		outcomes := func() map[Outcome]int64 {
			defer s.Reset()
			direct(t.Context(), s, `"max_tokens":20`) // 570 ms
			return s.Stats().Outcomes
		}
		set(t, s, Flap, 1)
		if got := outcomes(); got[OK] != 1 {
			t.Errorf("at 0 s: %v", got)
		}
		time.Sleep(100 * time.Millisecond) // virtual
		if got := outcomes(); got[Failed] != 1 {
			t.Errorf("from 0.67 s, over the edge: %v", got)
		}
		if got := outcomes(); got[Failed] != 1 {
			t.Errorf("while it is down: %v", got)
		}
		time.Sleep(time.Second)
		if got := outcomes(); got[OK] != 1 {
			t.Errorf("up again: %v", got)
		}
	})
}

func TestSlownessInVirtualTime(t *testing.T) {
	took := func(cfg Config, together int, fault Fault) (longest time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			s, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if fault != "" {
				set(t, s, fault, 1)
			}
			from := time.Now()
			done := make(chan time.Duration)
			for range together {
				go func() {
					direct(t.Context(), s, `"max_tokens":11`)
					done <- time.Since(from)
				}()
			}
			for range together {
				longest = max(longest, <-done)
			}
		})
		return longest
	}
	cfg := Config{TTFT: 100 * time.Millisecond, InterToken: 10 * time.Millisecond}
	knee := cfg
	knee.Knee = 4
	prompt := Config{PromptToken: time.Millisecond}
	for name, tc := range map[string]struct{ got, want time.Duration }{
		"alone":                     {took(cfg, 1, ""), 200 * time.Millisecond},
		"drag":                      {took(cfg, 1, Drag), 2 * time.Second},
		"drag=3":                    {took(cfg, 1, "drag=3"), 600 * time.Millisecond},
		"at the knee":               {took(knee, 4, ""), 200 * time.Millisecond},
		"three times past the knee": {took(knee, 12, ""), 600 * time.Millisecond},
		"a prompt of 8 tokens":      {took(prompt, 1, ""), 8 * time.Millisecond},
	} {
		// The first to run and the last to leave see a batch that is not full.
		if tc.got > tc.want || tc.got < tc.want*3/4 {
			t.Errorf("%s: %v, want %v", name, tc.got, tc.want)
		}
	}
}

func TestMetricsInEveryWay(t *testing.T) {
	s, url := start(t, Config{Slots: 4, ContextLen: 1000})
	scrape := func(m Metrics) (int, string) {
		if m != "" {
			if err := s.SetMetrics(m); err != nil {
				t.Fatal(err)
			}
		}
		resp, body := get(t, url+"/metrics")
		return resp.StatusCode, body
	}
	if _, b := scrape(""); !strings.Contains(b, `vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0`) {
		t.Errorf("new: %s", b)
	}
	if _, b := scrape(MetricsOld); !strings.Contains(b, `vllm:gpu_cache_usage_perc{model_name="fake"} 0`) || strings.Contains(b, "kv_cache") {
		t.Errorf("old: %s", b)
	}
	if code, _ := scrape(MetricsNone); code != 404 {
		t.Errorf("none: %d", code)
	}
	_, before := scrape(MetricsFrozen)
	post(t, url+"/v1/chat/completions", hello)
	if _, after := scrape(""); after != before {
		t.Errorf("frozen, but:\n%s", after)
	}
	if _, after := scrape(MetricsNew); !strings.Contains(after, `vllm:generation_tokens_total{engine="0",model_name="fake"} 40`) {
		t.Errorf("thawed: %s", after)
	}
	if s.SetMetrics("odd") == nil {
		t.Error("unknown metrics were taken")
	}
}

func TestItIsSteeredByAnotherProcess(t *testing.T) {
	s, url := serve(t, Config{})
	control := httptest.NewServer(s.Control())
	defer control.Close()
	steer := func(path string) int {
		resp, err := http.Post(control.URL+path, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	for _, tc := range []struct {
		path string
		want int
	}{
		{"/fake/set", 400},
		{"/fake/set?fault=fire", 400},
		{"/fake/set?fault=hang&share=x", 400},
		{"/fake/set?metrics=odd", 400},
		{"/fake/set?health=odd", 400},
		{"/fake/hold?after=x", 400},
		{"/fake/hold?after=3", 204},
		{"/fake/release", 204},
		{"/fake/reset", 204},
		{"/fake/set?fault=503&share=0.1&metrics=none&health=up", 204},
		{"/fake/clear", 204},
		{"/fake/else", 404},
	} {
		if got := steer(tc.path); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.path, got, tc.want)
		}
	}
	if steer("/fake/set?fault=refuse") != 204 {
		t.Fatal("not steered")
	}
	if _, _, err := attempt(t, url, `"n":1`, ""); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("error %v", err)
	}
	if steer("/fake/clear") != 204 {
		t.Fatal("not steered")
	}
	if resp, _, err := attempt(t, url, `"n":1`, "429=3"); err != nil || resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "3" {
		t.Errorf("%v %v", resp, err)
	}
	if resp, _, err := attempt(t, url, `"n":1`, ""); err != nil || resp.StatusCode != 200 {
		t.Errorf("%v %v", resp, err)
	}
	var st Stats
	var log []Record
	for path, v := range map[string]any{"/fake/stats": &st, "/fake/log": &log, "/fake/timeline": &[]Window{}} {
		_, body := get(t, control.URL+path)
		if err := json.Unmarshal([]byte(body), v); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	if st.Requests != 2 || st.Outcomes[OK] != 1 || st.PeakRunning != 1 || len(log) != 2 || log[0].Body != nil || log[1].Started.IsZero() {
		t.Errorf("stats %+v, log %+v", st, log)
	}
}

func TestADoorThatIsClosedAcceptsNothing(t *testing.T) {
	s, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	set(t, s, Refuse, 1)
	l, err := s.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		_ = c.Close()
		t.Error("it listens although connections are refused")
	}
	done := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		done <- err
	}()
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("accepted until %v", err)
	}
	if err := s.Set(Refuse, 0); err != nil {
		t.Errorf("a closed door was opened: %v", err)
	}
}
