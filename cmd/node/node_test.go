package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"headgate/cluster"
	"headgate/cluster/ledger"
)

// TestMain: whatever a node started has ended when it has stopped.
func TestMain(m *testing.M) {
	code := m.Run()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

const rampPolicy = `version: 1
backends: [{name: b, url: "http://127.0.0.1:1"}]
models: [{name: m, backends: [b]}]
plans:
  - name: p
    limits: [{name: org-tokens, scope: org, unit: tokens, rate: 1000/min}]
    ramp: [{after: 0d, factor: 0.2}, {after: 14d, factor: 0.5}, {after: 30d, factor: 1}]
tenants: [{name: dev, plan: p, since: 2000-01-01}]
`

// agreed stands for what a cluster has agreed on.
type agreed struct{ facts atomic.Pointer[ledger.Facts] }

func (a *agreed) Facts() *ledger.Facts { return a.facts.Load() }
func (a *agreed) Keys() *ledger.Keys   { return nil }

// TestRampStepsComeAtTheirTime, and prices, in virtual time, which begins at the tenant's `since`.
func TestRampStepsComeAtTheirTime(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var truth agreed
		truth.facts.Store(&ledger.Facts{})
		n := &Node{
			cfg: Defaults(), log: slog.New(slog.DiscardHandler), registry: prometheus.NewRegistry(), truth: &truth,
			changed: make(chan struct{}, 1), inForce: make(chan struct{}), self: 1, time: cluster.NewClock(), devKey: "ramp-test-key-0123",
		}
		n.cfg.Dev, n.cfg.DataDir, n.cfg.NodeID = true, dir, "n"
		n.now.share = &ledger.Share{Of: 1}
		if err := n.build(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := n.discard(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		apply := func(revision uint64, policy string) {
			t.Helper()
			truth.facts.Store(&ledger.Facts{Policy: &ledger.PolicyRevision{Revision: revision, Text: []byte(policy)}})
			n.notify()
		}
		apply(1, rampPolicy)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); n.follow(ctx) }()
		check := func(capacity int64, compiled uint64) {
			t.Helper()
			synctest.Wait()
			s := n.current()
			c, ok := s.index.Tenant("dev")
			if !ok {
				t.Fatal("no tenant dev")
			}
			if got := c.Limits[0].Whole.Capacity(); got != capacity || s.index.Revision != compiled {
				t.Errorf("after %v: %d tokens, compiled %d times, want %d and %d", time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)), got, s.index.Revision, capacity, compiled)
			}
		}
		const day = 24 * time.Hour
		check(200, 1)
		<-time.After(14*day - 1)
		check(200, 1)
		<-time.After(time.Second)
		check(500, 2)
		// A policy that moves the next step is heeded at once.
		apply(2, strings.Replace(rampPolicy, "after: 30d", "after: 15d", 1))
		check(500, 3)
		<-time.After(day)
		check(1000, 4)
		<-time.After(100 * day)
		check(1000, 4)
		// So do prices.
		costs := func(cost ledger.NanoUSD, compiled uint64) {
			t.Helper()
			check(1000, compiled)
			if got := n.current().index.Models[0].Cost(ledger.Usage{}); got != cost {
				t.Errorf("a request costs %s, want %s", got, cost)
			}
		}
		apply(3, strings.Replace(rampPolicy, "backends: [b]}]", `backends: [b], price_flat: {request: "1.00"},
  prices: [{from: 2001-01-01, price_per_million: {input: "0", output: "0"}, price_flat: {request: "2.00"}}]}]`, 1))
		costs(1e9, 5)
		<-time.After(time.Until(time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)) - 1)
		costs(1e9, 5)
		<-time.After(time.Second)
		costs(2e9, 6)
		stop()
		<-done
	})
}

const adminPolicy = `version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b]}]
plans: [{name: p, limits: [{name: org-tokens, scope: org, unit: tokens, rate: 1000/min}]}]
tenants: [{name: dev, plan: p}]
`

// start runs a node until the test ends.
func start(t *testing.T, change func(*Config)) *Node {
	t.Helper()
	cfg := Defaults()
	cfg.Listen, cfg.AdminListen, cfg.ClusterListen, cfg.DataDir = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", t.TempDir()
	cfg.Dev, cfg.DevKey, cfg.AdminToken = true, "node-test-key-0123", "node-test-token"
	change(&cfg)
	n, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	bounded, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := n.awaitRevision(bounded, 1); err != nil {
		t.Fatal(err)
	}
	return n
}

// upstreamServer answers every probe and lists one model.
func upstreamServer(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"object": "list", "data": [{"id": "m"}]}`)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func policyFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func ask(t *testing.T, n *Node, method, path, authorization, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+n.AdminAddr()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func TestAdminAPI(t *testing.T) {
	policy := fmt.Sprintf(adminPolicy, upstreamServer(t))
	n := start(t, func(c *Config) { c.Policy = policyFile(t, policy) })
	const bearer = "Bearer node-test-token"
	for name, c := range map[string]struct {
		method, path, auth, body string
		status                   int
		want                     string
	}{
		"alive":              {"GET", "/healthz", "", "", 200, "alive"},
		"metrics":            {"GET", "/metrics", "", "", 200, "headgate_inflight_requests 0"},
		"no token":           {"GET", "/admin/v1/status", "", "", 401, "HEADGATE_ADMIN_TOKEN"},
		"wrong token":        {"GET", "/admin/v1/keys", "Bearer node-test-tokeN", "", 401, "missing or wrong"},
		"an API key":         {"GET", "/admin/v1/keys", "Bearer node-test-key-0123", "", 401, "missing or wrong"},
		"other scheme":       {"PUT", "/admin/v1/policy", "Basic node-test-token", policy, 401, "missing or wrong"},
		"unknown, no token":  {"GET", "/admin/v1/secrets", "", "", 401, "missing or wrong"},
		"unknown":            {"GET", "/admin/v1/secrets", bearer, "", 404, ""},
		"method":             {"DELETE", "/admin/v1/policy", bearer, "", 405, ""},
		"status":             {"GET", "/admin/v1/status", bearer, "", 200, `"policy_revision": 1`},
		"tenants":            {"GET", "/admin/v1/tenants", bearer, "", 200, `"name": "dev"`},
		"keys":               {"GET", "/admin/v1/keys", bearer, "", 200, `"id": "dev"`},
		"policy":             {"GET", "/admin/v1/policy", bearer, "", 200, policy},
		"limits":             {"GET", "/admin/v1/limits/dev", bearer, "", 200, "[]"},
		"no tenant":          {"GET", "/admin/v1/limits/none", bearer, "", 404, `there is no tenant \"none\"`},
		"dry run":            {"PUT", "/admin/v1/policy?dry_run=true", bearer, strings.Replace(policy, "1000/min", "2000/min", 1), 200, "rate: 1000/min -\\u003e 2000/min"},
		"wrong policy":       {"PUT", "/admin/v1/policy", bearer, strings.Replace(policy, "1000/min", "1000", 1), 400, "line 4: plans[p].limits[org-tokens].rate"},
		"not YAML":           {"PUT", "/admin/v1/policy", bearer, "{", 400, "line 1"},
		"explain":            {"POST", "/admin/v1/explain", bearer, `{"tenant": "dev", "model": "m", "input_tokens": 5}`, 200, `"admitted": true`},
		"explain, misspelt":  {"POST", "/admin/v1/explain", bearer, `{"tenent": "dev"}`, 400, "tenent"},
		"explain, negative":  {"POST", "/admin/v1/explain", bearer, `{"tenant": "dev", "model": "m", "input_tokens": -5}`, 400, "must not be negative"},
		"explain, no tenant": {"POST", "/admin/v1/explain", bearer, `{"tenant": "none", "model": "m"}`, 404, "none"},
		"explain, no model":  {"POST", "/admin/v1/explain", bearer, `{"tenant": "dev", "model": "x"}`, 404, "does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			status, text := ask(t, n, c.method, c.path, c.auth, c.body)
			if status != c.status || !strings.Contains(text, c.want) {
				t.Errorf("status %d, want %d, with %q in: %s", status, c.status, c.want, text)
			}
			var e struct{ Error struct{ Message string } }
			if c.status >= 400 && c.want != "" && (json.Unmarshal([]byte(text), &e) != nil || e.Error.Message == "") {
				t.Errorf("the error says nothing: %s", text)
			}
		})
	}
	if s := n.current(); s.policy.Revision != 1 {
		t.Errorf("the policy is at revision %d", s.policy.Revision)
	}
}

// TestDevSecretsAreShownOnce and work.
func TestDevSecretsAreShownOnce(t *testing.T) {
	var shown bytes.Buffer
	n := start(t, func(c *Config) {
		c.Upstream, c.DevKey, c.AdminToken, c.Out = upstreamServer(t), "", "", &shown
	})
	m := regexp.MustCompile(`^API key \(shown once\): (hg_test_\w+)\nadmin token \(shown once\): (\w+)\n$`).FindStringSubmatch(shown.String())
	if m == nil {
		t.Fatalf("shown: %q", shown.String())
	}
	if status, text := ask(t, n, "GET", "/admin/v1/keys", "Bearer "+m[2], ""); status != http.StatusOK || strings.Contains(text, m[1]) {
		t.Errorf("status %d: %s", status, text)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+n.Addr()+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", m[1])
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("status %d", resp.StatusCode)
	}
}

// TestNotReadyWithoutABackend, and the status says why.
func TestNotReadyWithoutABackend(t *testing.T) {
	n := start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(adminPolicy, "http://127.0.0.1:1")) })
	if status, text := ask(t, n, "GET", "/readyz", "", ""); status != http.StatusServiceUnavailable || !strings.Contains(text, "no backend is up") {
		t.Errorf("status %d: %s", status, text)
	}
	if s := n.status(); s.Ready || s.NotReady != "no backend is up" {
		t.Errorf("%+v", s)
	}
}

// TestPolicyFileSeedsOnce: after that the ledger's counts, and the log says so.
func TestPolicyFileSeedsOnce(t *testing.T) {
	var log syncBuffer
	data, first := t.TempDir(), fmt.Sprintf(adminPolicy, "http://127.0.0.1:1")
	run := func(policy string) []byte {
		var text []byte
		t.Run("node", func(t *testing.T) {
			n := start(t, func(c *Config) {
				c.DataDir, c.NodeID, c.Policy, c.Logger = data, "n1", policyFile(t, policy), slog.New(slog.NewTextHandler(&log, nil))
			})
			text = n.current().policy.Text
		})
		return text
	}
	if got := run(first); string(got) != first {
		t.Errorf("in force: %s", got)
	}
	if got := run(strings.Replace(first, "1000/min", "7/min", 1)); string(got) != first {
		t.Errorf("a file went over the ledger: %s", got)
	}
	if !strings.Contains(log.String(), "the policy file is not the policy in force") {
		t.Errorf("log: %s", log.String())
	}
}

// syncBuffer is a buffer for several goroutines.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
