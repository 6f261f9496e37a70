package node_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/cmd/node"
)

// soakPolicy has limits of every unit, some of which refuse under this load.
const soakPolicy = `version: 1
backends: [{name: a, url: %q, slots: 48}, {name: gone, url: "http://127.0.0.1:1"}]
models:
  - {name: m, backends: [a, gone], context: 131072, price_per_million: {input: "1.00", cached_input: "0.10", output: "2.00"}, fallback: [n]}
  - {name: n, upstream_model: m, backends: [a], free: true}
plans:
  - name: p
    timeout: 2s
    limits:
      - {name: requests, scope: key, unit: requests, rate: 100000/s}
      - {name: slots, scope: org, unit: concurrency, max: 24}
      - {name: tokens, scope: org, unit: tokens, rate: 40000/s, burst: 80000, wait: 200ms}
      - {name: out, scope: user, unit: output_tokens, algorithm: sliding_window, rate: 100000/s}
      - {name: money, scope: org+model, unit: usd, rate: 10.00/s}
tenants: [{name: dev, plan: p}]
`

// TestSoak puts faults, aborts and nonsense through a node for HEADGATE_SOAK (make soak:
// 10m; make test: a few seconds) and then demands that nothing is left behind.
func TestSoak(t *testing.T) {
	length := 3 * time.Second
	if s := os.Getenv("HEADGATE_SOAK"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	}
	up, err := fakevllm.New(fakevllm.Config{
		Seed: 1, Models: []string{"m"}, TTFT: time.Millisecond, InterToken: 100 * time.Microsecond, Slots: 64, CachedFraction: 0.3, StallMax: 5 * time.Second,
		SlowToken: 5 * time.Millisecond, SplitPause: time.Millisecond,
		Faults: map[fakevllm.Fault]float64{
			fakevllm.Cut: 0.02, fakevllm.Reset: 0.02, fakevllm.InBand: 0.02, fakevllm.Split: 0.05, fakevllm.Gzip: 0.05, fakevllm.NoUsage: 0.03, fakevllm.LieUsage: 0.02,
			fakevllm.ContUsage: 0.03, fakevllm.NoNewline: 0.02, fakevllm.Stall: 0.002, fakevllm.Comments: 0.02, fakevllm.CRLF: 0.02, fakevllm.Garbage: 0.02, "503": 0.02, "429": 0.02, "500": 0.02,
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(up.Handler())
	defer srv.Close()
	dir := t.TempDir()
	policy := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(policy, fmt.Appendf(nil, soakPolicy, srv.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := node.Defaults()
	cfg.Listen, cfg.AdminListen, cfg.ClusterListen, cfg.DataDir, cfg.Policy = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", dir, policy
	cfg.Dev, cfg.DevKey, cfg.AdminToken = true, "soak-key-0123456789", "soak-token"
	cfg.Prefilter.ErrorsPerMinute, cfg.Prefilter.ErrorBurst = 60_000_000, 1_000_000 // the nonsense is to reach the meter
	cfg.Prefilter.RequestsPerSecond, cfg.Prefilter.RequestBurst = 1_000_000, 1_000_000
	n, err := node.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()

	awaitReady(t, n)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	defer client.CloseIdleConnections()
	end := time.Now().Add(length)
	quarter := length / 4
	soakLoad(seed, client, n.Addr(), time.Now().Add(quarter)) // warm-up: pools, histories, labels
	goroutines, heap := settled(t, n)
	t.Logf("after the warm-up: %d goroutines, %d KiB heap", goroutines, heap>>10)
	done := soakLoad(seed+1, client, n.Addr(), end)
	after, heapAfter := settled(t, n)
	t.Logf("after %d requests more: %d goroutines, %d KiB heap", done, after, heapAfter>>10)

	if done < 100 {
		t.Errorf("only %d requests were answered", done)
	}
	if after > goroutines+64 { // connections to be, not requests
		t.Errorf("goroutines grew from %d to %d", goroutines, after)
	}
	if heapAfter > heap+32<<20 {
		t.Errorf("the heap grew from %d KiB to %d KiB", heap>>10, heapAfter>>10)
	}
	m := scrape(t, n)
	kinds := map[string]float64{}
	for line, v := range m {
		if k := regexp.MustCompile(`^headgate_tokens_total\{kind="(\w+)"`).FindStringSubmatch(line); k != nil {
			kinds[k[1]] += v
		}
	}
	t.Logf("tokens: %v", kinds)
	if kinds["settled"] == 0 || kinds["reserved"]-kinds["refunded"]+kinds["debt"] != kinds["settled"] {
		t.Errorf("reserved - refunded + debt is not settled: %v", kinds)
	}
	levels, err := n.Levels(t.Context(), "dev")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range levels {
		if l.Unit == "concurrency" && l.Level != l.Capacity {
			t.Errorf("%s: %d of %d slots are back", l.Limit, l.Level, l.Capacity)
		}
	}
}

// soakLoad sends requests from 32 clients until end and counts the answers.
func soakLoad(seed uint64, client *http.Client, addr string, end time.Time) (answered int64) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for w := range 32 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			var n int64
			for time.Now().Before(end) {
				if soakRequest(rng, client, addr) {
					n++
				}
			}
			mu.Lock()
			answered += n
			mu.Unlock()
		})
	}
	wg.Wait()
	return answered
}

// soakRequest sends one request of a random kind, perhaps leaving in its middle.
func soakRequest(rng *rand.Rand, client *http.Client, addr string) bool {
	text := strings.Repeat("wörter ", 1+rng.IntN(200))
	stream := rng.IntN(2) == 0
	bodies := [...]struct{ path, body string }{
		{"/v1/chat/completions", fmt.Sprintf(`{"model":"m","stream":%v,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`, stream, 1+rng.IntN(80), text)},
		{"/v1/chat/completions", fmt.Sprintf(`{"model":"n","stream":%v,"n":2,"messages":[{"role":"user","content":%q}]}`, stream, text)},
		{"/v1/completions", fmt.Sprintf(`{"model":"m","stream":%v,"max_tokens":20,"prompt":[%q,"b"]}`, stream, text)},
		{"/v1/embeddings", fmt.Sprintf(`{"model":"m","input":[%q,"x"]}`, text)},
		{"/v1/messages", fmt.Sprintf(`{"model":"m","stream":%v,"max_tokens":30,"messages":[{"role":"user","content":%q}]}`, stream, text)},
		{"/v1/responses", fmt.Sprintf(`{"model":"m","stream":%v,"max_output_tokens":30,"input":%q}`, stream, text)},
		{"/tokenize", fmt.Sprintf(`{"model":"m","prompt":%q}`, text)},
		{"/score", fmt.Sprintf(`{"model":"m","text_1":"a","text_2":%q}`, text)},
		{"/v1/chat/completions", `{"model":"m","max_tokens":1,"max_tokens":2,"messages":[]}`},
		{"/v1/chat/completions", `{"model":"m","messages":[`},
		{"/sleep", `{}`},
	}
	b := bodies[rng.IntN(len(bodies))]
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	leave := rng.IntN(8) == 0
	if leave && rng.IntN(2) == 0 { // before the answer
		t := time.AfterFunc(time.Duration(rng.IntN(4000))*time.Microsecond, cancel)
		defer t.Stop()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+b.path, strings.NewReader(b.body))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Authorization", "Bearer soak-key-0123456789")
	req.Header.Set("X-Headgate-User", fmt.Sprint("u", rng.IntN(20)))
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	if leave {
		_, _ = io.CopyN(io.Discard, resp.Body, int64(rng.IntN(2000)))
		return true
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err == nil
}

// settled waits until nothing is in flight and tells goroutines and live heap.
func settled(t *testing.T, n *node.Node) (goroutines int, heap uint64) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		m := scrape(t, n)
		inflight, ok1 := m["headgate_inflight_requests"]
		open, ok2 := m["headgate_inflight_reservations"]
		if !ok1 || !ok2 {
			t.Fatal("the in-flight gauges are missing")
		}
		if inflight == 0 && open == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("still in flight: %v requests, %v reservations", inflight, open)
		}
		runtime.Gosched()
	}
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return runtime.NumGoroutine(), s.HeapAlloc
}

// scrape reads /metrics.
func scrape(t *testing.T, n *node.Node) map[string]float64 {
	t.Helper()
	resp, err := http.Get("http://" + n.AdminAddr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			if v, err := strconv.ParseFloat(strings.TrimSpace(line[i:]), 64); err == nil {
				m[line[:i]] = v
			}
		}
	}
	return m
}

// awaitReady waits until a node may get traffic.
func awaitReady(t *testing.T, n *node.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.AdminAddr()+"/readyz", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return
		}
	}
}
