package proxy_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy"
	"headgate/proxy/queue"
)

// Ways around a limit that a reader of the code found, and their kind.

// TestHugeCapsCostWhatTheySay: caps × sequences beyond an int64 are more than any bucket
// holds, not less than nothing.
func TestHugeCapsCostWhatTheySay(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Tokens, 100)}})
	for _, body := range []string{
		`{"model":"m","max_tokens":9007199254740992,"n":1024,"messages":[{"role":"user","content":"x"}]}`,
		`{"model":"m","max_tokens":9007199254740992,"n":1000,"best_of":1024,"prompt":["a","b","c","d"]}`,
		`{"model":"m","max_completion_tokens":4503599627370496,"n":2,"messages":[{"role":"user","content":"x"}]}`,
	} {
		path := "/v1/chat/completions"
		if strings.Contains(body, "prompt") {
			path = "/v1/completions"
		}
		w.do(call{path: path, body: body}).refused(t, 400, "request_exceeds_limit")
	}
	if n := w.fake.Stats().Requests; n != 0 {
		t.Errorf("%d requests reached the model server", n)
	}
}

// TestShortAnswersDoNotTeachShortness: answers cut by the caller's own cap leave the next
// estimate alone, and a background answer is reserved in full whatever came before.
func TestShortAnswersDoNotTeachShortness(t *testing.T) {
	m := model("m", "vllm")
	m.DefaultOutput = 1000
	w := newWorld(t, setup{models: []*proxy.Model{m}, limits: []proxy.Limit{limit(proxy.OutputTokens, 3000)}})
	for range 30 {
		w.do(call{body: `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]}`}).want(t, 200)
	}
	if ok, _ := w.fire(call{body: `{"model":"m","messages":[{"role":"user","content":"x"}]}`}, 10, 2); ok != 2 {
		t.Errorf("%d uncapped requests were let through 3000 tokens by 1000 each, want 2", ok)
	}
}

// TestBackgroundIsReservedInFull: nobody waits for such an answer, so that its history
// counts for nothing.
func TestBackgroundIsReservedInFull(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.OutputTokens, 10_000)}})
	for range 30 {
		w.do(call{path: "/v1/responses", body: `{"model":"m","input":"x"}`}).want(t, 200)
	}
	w.do(call{path: "/v1/responses", body: `{"model":"m","input":"x","background":true,"max_output_tokens":100000}`}).refused(t, 400, "request_exceeds_limit")
}

// TestResponsesCannotBeTakenOver: the id of a stored response is the server's to choose,
// and whoever it was first given to keeps it.
func TestResponsesCannotBeTakenOver(t *testing.T) {
	other := &proxy.Caller{KeyID: "k2", Tenant: "rival"}
	w := newWorld(t, setup{callers: map[string]*proxy.Caller{"rival-key": other}})
	a := w.do(call{path: "/v1/responses", body: `{"model":"m","input":"x"}`}).want(t, 200)
	var made struct{ ID string }
	if err := json.Unmarshal([]byte(a.body), &made); err != nil || made.ID == "" {
		t.Fatalf("%v: %s", err, a.body)
	}
	id := made.ID
	w.do(call{path: "/v1/responses", key: "rival-key", body: `{"model":"m","input":"x","request_id":"` + id + `"}`}).refused(t, 400, "invalid_request")
	w.do(call{method: http.MethodGet, path: "/v1/responses/" + id, key: "rival-key"}).refused(t, 404, "invalid_request")
	w.do(call{method: http.MethodGet, path: "/v1/responses/" + id}).want(t, 200)
}

// TestUserNamesAreBounded on every way in.
func TestUserNamesAreBounded(t *testing.T) {
	perUser := limit(proxy.Requests, 10)
	perUser.Scope = proxy.ScopeUser
	w := newWorld(t, setup{limits: []proxy.Limit{perUser}, change: func(c *proxy.Caller) { c.AssertUser = true }})
	long := strings.Repeat("u", 300)
	for _, c := range []call{
		{body: chat, header: header("X-Headgate-User", long)},
		{body: "{", header: header("X-Headgate-User", long)},
		{method: http.MethodGet, path: "/v1/models", header: header("X-Headgate-User", long)},
		{body: strings.Replace(chat, "{", `{"user":"`+long+`",`, 1)},
		{body: chat, header: header("X-Headgate-User", "key:k1")},
	} {
		w.do(c).refused(t, 400, "invalid_request")
	}
	for _, l := range w.limits.Levels(w.now(), "acme") {
		if len(l.Key.Subject) > 256 {
			t.Errorf("a bucket is named by %d bytes", len(l.Key.Subject))
		}
	}
}

// TestWaitIsForAllThatRefuse: a limit that waits does not make one that refuses wait.
func TestWaitIsForAllThatRefuse(t *testing.T) {
	patient, strict := fill(proxy.Requests, 1, 24*time.Hour, 1), fill(proxy.InputTokens, 40, time.Hour, 40)
	strict.Spec.Burst = 60
	patient.Wait = 48 * time.Hour
	w := newWorld(t, setup{limits: []proxy.Limit{patient, strict}})
	long := strings.Replace(chat, `"content":"`, `"content":"`+strings.Repeat("long ", 30), 1)
	w.do(call{body: long}).want(t, 200)
	for range 3 {
		w.do(call{body: long}).refused(t, 429, "rate_limit_exceeded")
	}
}

// TestCacheOnlyIsRefused: what a client relies on and is never kept is said.
func TestCacheOnlyIsRefused(t *testing.T) {
	w := newWorld(t, setup{})
	w.do(call{body: chat, header: header("X-Headgate-Cache", "only")}).refused(t, 504, "not_cached")
	w.do(call{body: chat, header: header("X-Headgate-Cache", "always")}).refused(t, 400, "invalid_request")
	w.do(call{body: chat, header: header("X-Headgate-Cache", "bypass")}).want(t, 200)
}

// TestForeignCapsLowerNothing: a cap that the route's upstream ignores binds nothing.
func TestForeignCapsLowerNothing(t *testing.T) {
	m := model("m", "vllm")
	m.DefaultOutput = 1000
	for path, body := range map[string]string{
		"/v1/chat/completions": `{"model":"m","max_output_tokens":1,"messages":[{"role":"user","content":"x"}]}`,
		"/v1/responses":        `{"model":"m","max_tokens":1,"input":"x"}`,
		"/v1/completions":      `{"model":"m","max_completion_tokens":1,"prompt":"x"}`,
	} {
		w := newWorld(t, setup{models: []*proxy.Model{m}, limits: []proxy.Limit{limit(proxy.OutputTokens, 3000)}})
		if ok, _ := w.fire(call{path: path, body: body}, 10, 3); ok != 3 {
			t.Errorf("%s: %d were let through 3000 tokens by 1000 each, want 3", path, ok)
		}
	}
}

// TestNobodyBendsAnothersEstimate, whatever he sends.
func TestNobodyBendsAnothersEstimate(t *testing.T) {
	rival := &proxy.Caller{KeyID: "k2", Tenant: "rival"}
	w := newWorld(t, setup{callers: map[string]*proxy.Caller{"rival-key": rival}})
	prompt := `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"` + strings.Repeat("four", 1000) + `"}]}`
	reserves := func() int64 {
		before := w.tokens("reserved")
		w.do(call{body: prompt}).want(t, 200)
		w.settled()
		return w.tokens("reserved") - before
	}
	before := reserves()
	for range 20 {
		w.do(call{key: "rival-key", body: `{"model":"m","max_tokens":1,"junk":"` + strings.Repeat("x", 300_000) + `","messages":[{"role":"user","content":"h"}]}`}).want(t, 200)
	}
	for range 5 {
		w.do(call{key: "rival-key", body: `{"model":"m","max_tokens":1,"messages":[` + strings.Repeat(`{"role":"user","content":""},`, 3000) + `{"role":"user","content":"a"}]}`}).want(t, 200)
	}
	if after := reserves(); after < before-before/20 || after > before+before/20 {
		t.Errorf("reserved %d before and %d after another tenant's nonsense", before, after)
	}
}

// TestFullBackendsFallBack to another model like dead ones, once there is no place for them in the queue either.
func TestFullBackendsFallBack(t *testing.T) {
	m, n := model("m", "vllm"), model("n", "spare")
	m.Fallback = []string{"n"}
	s := setup{models: []*proxy.Model{m, n}, fake: fakevllm.Config{}, queue: queue.Config{Tickets: 1}}
	s.backends = append(s.backends, backend("vllm", 1), backend("spare", 0))
	w := newWorld(t, s)
	w.fake.Hold()
	leave := w.start(call{body: chat}, 0)
	defer leave()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	leave2 := w.start(call{body: chat}, 0)
	defer leave2()
	w.eventually(func() bool { return w.dispatch.Waiting() == 1 })
	got := make(chan answer, 1)
	go func() { got <- w.do(call{body: chat}) }()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 2 })
	w.fake.Release()
	if a := (<-got).want(t, 200); a.header.Get("X-Headgate-Backend") != "spare" {
		t.Errorf("%v", a.header)
	}
}
