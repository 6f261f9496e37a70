package node

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

const drainPolicy = `version: 1
backends: [{name: vllm-a, url: %[1]q, slots: 4}, {name: vllm-b, url: %[1]q}]
models: [{name: m, backends: [vllm-a]}, {name: both, backends: [vllm-a, vllm-b]}]
plans: [{name: p}]
tenants: [{name: dev, plan: p}]
`

// TestDrains: a backend that is drained gets nothing, whoever asks; what it is called must be in the policy, and the
// audit log has who did it.
func TestDrains(t *testing.T) {
	n := start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(drainPolicy, answeringServer(t))) })
	waitFor(t, "both backends are up", func() bool { return n.pool.Up() == 2 })
	shown := func(name string) admin.BackendState {
		t.Helper()
		for _, b := range must[[]admin.BackendState](t, n, 200, "GET", "backends", rootBearer, "") {
			if b.Endpoint == name {
				return b
			}
		}
		t.Fatalf("%s is not listed", name)
		return admin.BackendState{}
	}
	metrics := func(line string) bool {
		_, text := ask(t, n, "GET", "/metrics", "", "")
		return strings.Contains(text, line+"\n")
	}
	if a, b := shown("vllm-a"), shown("vllm-b"); a.Drained || a.Slots != 4 || a.Limit < 1 || a.State != "up" || a.Breaker != "closed" || a.Kind != "vllm" || b.Slots != 0 {
		t.Errorf("before: %+v, %+v", a, b)
	}
	if got := chat(t, n, "node-test-key-0123"); got != http.StatusOK {
		t.Fatalf("before: %d", got)
	}

	d := must[admin.Done](t, n, 200, "PUT", "backends/vllm-a/drain", rootBearer, `{"on": true, "for": "1h", "reason": "new weights"}`)
	if len(d.Warnings) != 1 || !strings.Contains(d.Warnings[0], "model m has no other backend") {
		t.Errorf("warnings: %q", d.Warnings)
	}
	waitFor(t, "vllm-a is drained", func() bool { return shown("vllm-a").Drained })
	if got := chat(t, n, "node-test-key-0123"); got != http.StatusServiceUnavailable {
		t.Errorf("drained: %d", got)
	}
	if !metrics(`headgate_backend_drained{backend="vllm-a",endpoint="vllm-a"} 1`) || !metrics(`headgate_backend_drained{backend="vllm-b",endpoint="vllm-b"} 0`) {
		t.Error("the metrics don't say which is drained")
	}
	entry := n.cluster.Ledger().Audit(1, ledger.AuditFilter{})[0]
	if entry.Actor != "root" || entry.Object != ledger.DrainRung("vllm-a") || !strings.Contains(entry.After, "new weights") {
		t.Errorf("in the audit log: %+v", entry)
	}

	if s := must[admin.Status](t, n, 200, "GET", "status", rootBearer, ""); len(s.Backends) != 2 || !s.Backends[0].Drained || s.Backends[1].Drained || s.Backends[0].Breaker != "closed" || s.Backends[0].Share != 1 {
		t.Errorf("status: %+v", s.Backends)
	}

	must[admin.Done](t, n, 200, "PUT", "backends/vllm-a/drain", rootBearer, `{"on": false}`)
	log := must[[]admin.AuditEntry](t, n, 200, "GET", "audit?limit=2&object=vllm-a", rootBearer, "")
	if len(log) != 2 || log[0].Action != "backend.drain" || log[0].Object != "vllm-a" || !strings.Contains(log[0].After, "new weights") || log[1].Action != "backend.undrain" || log[1].Object != "vllm-a" {
		t.Errorf("the audit log says %+v", log)
	}
	waitFor(t, "vllm-a is served again", func() bool { return chat(t, n, "node-test-key-0123") == http.StatusOK })
	if shown("vllm-a").Drained {
		t.Error("vllm-a is shown as drained")
	}

	refusedWith(t, n, 404, "not_found", "vllm-a is not drained", "PUT", "backends/vllm-a/drain", rootBearer, `{"on": false}`)
	for _, body := range []string{`{"on": true}`, `{"on": false}`} {
		refusedWith(t, n, 404, "not_found", `did you mean "vllm-a"`, "PUT", "backends/vlm-a/drain", rootBearer, body)
	}
	refusedWith(t, n, 404, "not_found", "headgate backends lists them", "PUT", "backends/none@10.0.0.1:80/drain", rootBearer, `{"on": true}`)
	d = must[admin.Done](t, n, 200, "PUT", "backends/vllm-b@10.0.0.1:80/drain", rootBearer, `{"on": true}`)
	const none = `this node knows no endpoint "vllm-b@10.0.0.1:80" now, and vllm-b has one address: headgate drain vllm-b drains it`
	if len(d.Warnings) != 1 || d.Warnings[0] != none || shown("vllm-b").Drained {
		t.Errorf("of an endpoint: %q", d.Warnings)
	}
	must[admin.Done](t, n, 200, "PUT", "ladder/shed_cost", rootBearer, `{"on": true}`)
	if log := must[[]admin.AuditEntry](t, n, 200, "GET", "audit?limit=1", rootBearer, ""); log[0].Action != "ladder.set" || log[0].Object != "shed_cost" {
		t.Errorf("the audit log says of a rung %+v", log)
	}
}

// TestDrainOfAnEndpointThatIsNotThere: it is drained should it come, and the warning has those that may have been meant.
func TestDrainOfAnEndpointThatIsNotThere(t *testing.T) {
	server := answeringServer(t)
	pods := "dns" + strings.TrimPrefix(server, "http")
	n := start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(drainPolicy, pods)) })
	waitFor(t, "both backends are up", func() bool { return n.pool.Up() == 2 })
	there := "vllm-a@" + strings.TrimPrefix(server, "http://")
	for name, want := range map[string]string{
		"vllm-a@127.0.0.1":    fmt.Sprintf("; did you mean %q?", there),
		"vllm-a@10.9.8.7:443": "; there are " + there,
	} {
		d := must[admin.Done](t, n, 200, "PUT", "backends/"+name+"/drain", rootBearer, `{"on": true}`)
		if want = fmt.Sprintf("this node knows no endpoint %q now; it is drained should it come", name) + want; len(d.Warnings) != 1 || d.Warnings[0] != want {
			t.Errorf("got %q, want %q", d.Warnings, want)
		}
	}
	if d := must[admin.Done](t, n, 200, "PUT", "backends/"+there+"/drain", rootBearer, `{"on": true}`); len(d.Warnings) != 0 {
		t.Errorf("of one that is there: %q", d.Warnings)
	}
}

// TestABackendThatMoved: while requests to its former address end, its metrics are one line each.
func TestABackendThatMoved(t *testing.T) {
	n := start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(drainPolicy, answeringServer(t))) })
	waitFor(t, "both backends are up", func() bool { return n.pool.Up() == 2 })
	slot, err := n.pool.Hold("vllm-b", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer slot.Release()
	must[admin.Applied](t, n, 200, "PUT", "policy", rootBearer, fmt.Sprintf(drainPolicy, answeringServer(t)))
	const line = `headgate_backend_inflight{backend="vllm-b",endpoint="vllm-b"} `
	waitFor(t, "the former address is left", func() bool {
		for _, b := range n.pool.Status() {
			if b.Draining && b.Name == "vllm-b" {
				return true
			}
		}
		return false
	})
	status, text := ask(t, n, "GET", "/metrics", "", "")
	if status != http.StatusOK || strings.Count(text, line) != 1 || !strings.Contains(text, line+"1\n") {
		t.Errorf("status %d: %s", status, text[:min(len(text), 500)])
	}
}

// TestPressureIsOfWhatServes: a backend that is drained takes no requests, and does not make a model's queue look empty.
func TestPressureIsOfWhatServes(t *testing.T) {
	open := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.Method == http.MethodPost {
			<-open
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`)
	}))
	t.Cleanup(server.Close)
	n := start(t, func(c *Config) {
		c.Policy = policyFile(t, fmt.Sprintf(strings.NewReplacer("slots: 4", "slots: 1", "{name: vllm-b, url: %[1]q}", "{name: vllm-b, url: %[1]q, slots: 1}", "{name: m, backends: [vllm-a]}", "{name: m, backends: [vllm-a, vllm-b]}").Replace(drainPolicy), server.URL))
	})
	var wg sync.WaitGroup
	defer func() { close(open); wg.Wait() }()
	waitFor(t, "both backends are up", func() bool { return n.pool.Up() == 2 })
	must[admin.Done](t, n, 200, "PUT", "backends/vllm-b/drain", rootBearer, `{"on": true}`)
	waitFor(t, "it is drained", func() bool { return n.pool.Up() == 2 && len(drains(n.truth.Facts(), time.Now())) == 1 })
	for range 30 {
		wg.Go(func() { chat(t, n, "node-test-key-0123") })
	}
	waitFor(t, "the model is pressed", func() bool { return n.pressure()("m") > .5 })
}
