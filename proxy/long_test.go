package proxy_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"headgate/bench/fakevllm"
	"headgate/proxy"
	"headgate/proxy/upstream"
)

// longCall has an answer of more than the gateway holds back, without streaming.
const longCall = `{"model":"m","prompt":[1,2,3,4],"max_tokens":20000}`

// TestLongAnswers pass while they come, are the upstream's byte for byte, and are settled
// before their last byte.
func TestLongAnswers(t *testing.T) {
	for _, f := range []string{"", "gzip", "split"} {
		w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Concurrency, 1), limit(proxy.Tokens, 1_000_000)}, backends: []upstream.Backend{{Name: "vllm", Slots: 1}}})
		direct := newFake(t).do(t, "/v1/completions", strings.Replace(longCall, `"m"`, `"fake"`, 1), "")
		for range 3 {
			got := w.do(call{path: "/v1/completions", body: longCall, header: fault(f)}).want(t, 200)
			if got.body != direct.Body.String() || got.err != nil || len(got.body) < 100_000 {
				t.Errorf("%s: %d bytes, directly %d: %v", f, len(got.body), direct.Body.Len(), got.err)
			}
		}
		w.settled()
		if got := w.spent(w.caller.Limits[1]); got != 3*20_004 {
			t.Errorf("%s: %d tokens spent", f, got)
		}
	}
}

// TestLongAnswerBreaksOff: after its head only a broken connection says so, and it costs
// what was reserved, since nobody knows what was generated.
func TestLongAnswerBreaksOff(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Concurrency, 1), limit(proxy.Tokens, 1_000_000)}})
	for i := range int64(2) {
		a := w.do(call{path: "/v1/completions", body: longCall, header: fault("cut")}).want(t, 200)
		if a.err == nil {
			t.Errorf("%d bytes came as if they were all", len(a.body))
		}
		w.settled()
		if got := w.spent(w.caller.Limits[1]); got != (i+1)*20_004 {
			t.Errorf("%d tokens spent", got)
		}
	}
	if n := w.metric("headgate_requests_total", "outcome", "upstream_error"); n != 2 {
		t.Errorf("%v upstream errors", n)
	}
}

// TestClientLeavesLongAnswer in the middle of it, streamed and not.
func TestClientLeavesLongAnswer(t *testing.T) {
	for _, body := range []string{longCall, streaming(longCall)} {
		more := make(chan struct{})
		w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Concurrency, 1)}, around: func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if strings.Contains(body, "stream") {
					w.Header().Set("Content-Type", "text/event-stream")
				}
				frame := `data: {"choices":[{"index":0,"text":"x"}]}` + "\n\n"
				if !strings.Contains(body, "stream") {
					frame = `{"choices":[{"index":0,"text":"x"},`
				}
				_, _ = io.WriteString(w, strings.Repeat(frame, 4000)) // the reader may leave
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
				close(more)
			})
		}})
		ctx, cancel := context.WithCancel(patience(t))
		resp, err := w.client.Do(w.request(ctx, call{path: "/v1/completions", body: body}))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := bufio.NewReader(resp.Body).Peek(1000); err != nil {
			t.Error(err)
		}
		cancel()
		resp.Body.Close()
		<-more // the model server saw it
		w.settled()
		if n := w.metric("headgate_requests_total", "outcome", "client_gone"); n != 1 {
			t.Errorf("%v clients went away", n)
		}
	}
}

// TestEstimatesLearn: from twenty answers on, a caller that always asks for little
// reserves little, and a token's bytes are the upstream's own.
func TestEstimatesLearn(t *testing.T) {
	m := model("m", "vllm")
	m.DefaultOutput, m.BytesPerToken = 300, 1000 // a byte a token: too high, to begin with
	w := newWorld(t, setup{models: []*proxy.Model{m}})
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("four", 1000) + `"}]}`
	reserves := func(body string) int64 {
		before := w.tokens("reserved")
		w.do(call{body: body, header: header("X-Fake-Output", "7")}).want(t, 200)
		w.settled()
		return w.tokens("reserved") - before
	}
	if r := reserves(body); r != 4000+4+300 && r != 4000+300 {
		t.Errorf("reserved %d at first", r)
	}
	for range 19 {
		reserves(body)
	}
	used := w.last().PromptTokens + 7
	if r := reserves(body); r < used || r > used+used/10 {
		t.Errorf("reserved %d for what takes %d", r, used)
	}
	if r, capped := reserves(body), reserves(strings.TrimSuffix(body, "}")+`,"max_tokens":3}`); r-capped < 4 || r-capped > 10 {
		t.Errorf("reserved %d, with a cap of 3 %d", r, capped)
	}
	if one, three := reserves(body), reserves(strings.TrimSuffix(body, "}")+`,"n":3}`); three-one < 8 || three-one > 14 { // 2 × 7, less what was learnt meanwhile
		t.Errorf("reserved %d for one answer, %d for three", one, three)
	}
}

// TestScopesShareTheirBuckets: keys of a tenant share its bucket, tenants share the
// fleet's, a model's is for everybody.
func TestScopesShareTheirBuckets(t *testing.T) {
	scoped := func(name string, s proxy.Scope, n int64) proxy.Limit {
		l := named(limit(proxy.Requests, n), name)
		l.Scope = s
		return l
	}
	ls := []proxy.Limit{scoped("per-key", proxy.ScopeKey, 2), scoped("per-org", proxy.ScopeOrg, 3), scoped("per-model", proxy.ScopeModel, 4), scoped("fleet", proxy.ScopeGlobal, 5)}
	w := newWorld(t, setup{limits: ls, models: []*proxy.Model{model("m", "vllm"), model("m2", "vllm")}, callers: map[string]*proxy.Caller{
		"same": {KeyID: "k2", Tenant: "acme", Limits: ls}, "other": {KeyID: "k1", Tenant: "other", Limits: ls},
	}})
	m2 := strings.Replace(chat, `"m"`, `"m2"`, 1)
	for i, c := range []struct{ key, body, refusedBy string }{
		{"", chat, ""},
		{"", chat, ""},
		{"", chat, "per-key"},
		{"same", chat, ""},
		{"same", chat, "per-org"},
		{"other", chat, ""},
		{"other", chat, "per-model"},
		{"other", m2, ""},
		{"other", m2, "per-key"},
	} {
		a := w.do(call{key: c.key, body: c.body})
		if got, _ := a.field("limit").(string); got != c.refusedBy || (a.status == 200) != (c.refusedBy == "") {
			t.Errorf("%d: status %d, refused by %q, want %q", i, a.status, got, c.refusedBy)
		}
	}
	if got := w.spent(ls[3]); got != 5 {
		t.Errorf("%d of the fleet's spent", got)
	}
	w.caller.Limits = ls[3:]
	w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
}

// TestClassesAndTimeoutsOnlyLower what the key has.
func TestClassesAndTimeoutsOnlyLower(t *testing.T) {
	log := newBuffer()
	w := newWorld(t, setup{log: log, change: func(c *proxy.Caller) { c.Class = proxy.Background }})
	for _, class := range []string{"", "interactive", "background", "best_effort"} {
		w.do(call{body: chat, header: header("X-Headgate-Class", class, "X-Stainless-Retry-Count", "2")}).want(t, 200)
	}
	w.settled()
	for i, want := range []string{"background", "background", "background", "best_effort"} {
		if r := log.records(t)[i]; r["class"] != want || r["retry_count"] != 2.0 {
			t.Errorf("record %d: %v", i, r)
		}
	}
	for _, bad := range []string{"0", "x", "3601", "-5s", "2h"} {
		w.do(call{body: chat, header: header("X-Headgate-Timeout", bad)}).refused(t, 400, "invalid_request")
	}
	for _, good := range []string{"1.5", "30s", "3600", "1h"} {
		w.do(call{body: chat, header: header("X-Headgate-Timeout", good)}).want(t, 200)
	}
}

// TestLogSaysNothingPrivate: neither key, nor prompt, nor answer.
func TestLogSaysNothingPrivate(t *testing.T) {
	log := newBuffer()
	w := newWorld(t, setup{log: log, fake: fakevllm.Config{Seed: 1}})
	a := w.do(call{body: strings.Replace(chat, "hello there", "SECRETPROMPT", 1)}).want(t, 200)
	w.do(call{body: chat, key: "hg_live_SECRETKEY"}).want(t, 401)
	w.settled()
	log.mu <- struct{}{}
	text := log.b.String()
	<-log.mu
	answerText := a.body[strings.Index(a.body, `"content":"`)+11:][:8]
	for _, s := range []string{"SECRET", key, answerText} {
		if strings.Contains(text, s) {
			t.Errorf("%q is in the log: %s", s, text)
		}
	}
}

// TestImplausibleUsage: figures that parse but cannot be are not believed: a stream costs
// what was seen, another answer what was reserved.
func TestImplausibleUsage(t *testing.T) {
	for _, usage := range []string{`{"prompt_tokens":4,"completion_tokens":500000000000}`, `{"prompt_tokens":500000000000,"completion_tokens":2}`} {
		for _, body := range []string{plainCall, streaming(plainCall)} {
			w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Tokens, 1000)}, around: func(http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if body == plainCall {
						_, _ = io.WriteString(w, `{"choices":[{"index":0,"text":"xy"}],"usage":`+usage+`}`)
						return
					}
					w.Header().Set("Content-Type", "text/event-stream")
					frame := `data: {"choices":[{"index":0,"text":"x"}]}` + "\n\n"
					_, _ = io.WriteString(w, frame+frame+`data: {"choices":[],"usage":`+usage+"}\n\ndata: [DONE]\n\n")
				})
			}})
			w.do(call{path: "/v1/completions", body: body}).want(t, 200)
			w.settled()
			want := int64(64)
			if body != plainCall {
				want = 4 + 2
			}
			if got := w.spent(w.caller.Limits[0]); got != want {
				t.Errorf("%s: %d tokens spent, want %d", usage, got, want)
			}
			if n := w.metric("headgate_usage_implausible_total"); n != 1 {
				t.Errorf("counted %v times", n)
			}
		}
	}
}

// TestMalformedIsLimitedToo: who has no requests left hears that, not what is wrong.
func TestMalformedIsLimitedToo(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 2)}})
	w.do(call{body: "{"}).refused(t, 400, "invalid_request")
	w.do(call{path: "/nowhere"}).refused(t, 404, "invalid_request")
	w.do(call{body: "{"}).refused(t, 429, "rate_limit_exceeded")
	w.do(call{method: "GET", path: "/v1/models"}).refused(t, 429, "rate_limit_exceeded")
	w.do(call{method: "GET", path: "/v1/models/m"}).refused(t, 429, "rate_limit_exceeded")
}

// TestCombinedScopes have a bucket for each combination.
func TestCombinedScopes(t *testing.T) {
	l := limit(proxy.Requests, 1)
	l.Scope = proxy.ScopeKey | proxy.ScopeUser | proxy.ScopeModel
	w := newWorld(t, setup{limits: []proxy.Limit{l}, models: []*proxy.Model{model("m", "vllm"), model("m2", "vllm")}, change: func(c *proxy.Caller) { c.AssertUser = true }})
	m2 := strings.Replace(chat, `"m"`, `"m2"`, 1)
	for i, c := range []struct {
		user, body string
		want       int
	}{{"ann", chat, 200}, {"ann", chat, 429}, {"ann", m2, 200}, {"bob", chat, 200}, {"bob", m2, 200}, {"bob", m2, 429}} {
		if a := w.do(call{body: c.body, header: header("X-Headgate-User", c.user)}); a.status != c.want {
			t.Errorf("%d: status %d, want %d: %s", i, a.status, c.want, a.body)
		}
	}
}

// TestTableOfBucketsFull refuses newcomers, by capacity and not by quota.
func TestTableOfBucketsFull(t *testing.T) {
	perUser := limit(proxy.Requests, 10)
	perUser.Scope = proxy.ScopeUser
	w := newWorld(t, setup{buckets: 1, limits: []proxy.Limit{perUser}, change: func(c *proxy.Caller) { c.AssertUser = true }})
	ask := func(user string) answer { return w.do(call{body: chat, header: header("X-Headgate-User", user)}) }
	ask("ann").want(t, 200)
	ask("bob").refused(t, 429, "over_capacity")
	ask("ann").want(t, 200)
}

// TestClientLeavesWhileSending is nobody's error but its own, and costs nothing.
func TestClientLeavesWhileSending(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 10)}})
	c := must[net.Conn](t)(net.Dial("tcp", w.addr))
	_, err := io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "+key+"\r\nContent-Length: 100\r\n\r\n{")
	if err != nil {
		t.Fatal(err)
	}
	w.eventually(func() bool { return w.metric("headgate_inflight_requests") == 1 })
	if err := c.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	c.Close()
	w.settled()
	if n := w.metric("headgate_requests_total", "outcome", "client_gone"); n != 1 {
		t.Errorf("%v clients went away", n)
	}
	if got := w.spent(w.caller.Limits[0]); got != 0 {
		t.Errorf("%d requests spent", got)
	}
}

// TestHTTP2: the same over h2c, where one connection carries what breaks and what does not.
func TestHTTP2(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Concurrency, 2), limit(proxy.Tokens, 1_000_000)}})
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	h2 := &http.Transport{Protocols: protocols, DisableCompression: true}
	t.Cleanup(h2.CloseIdleConnections)
	w.client.Transport = h2
	w.fake.Hold()
	leave := w.start(call{body: chat}, 0)
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	w.fake.HoldAfter(-1) // lets go of that one
	for path, body := range generating() {
		for _, b := range []string{body, streaming(body)} {
			if a := w.do(call{path: path, body: b}).want(t, 200); a.err != nil {
				t.Error(a.err)
			}
		}
	}
	leave()
	if a := w.do(call{path: "/v1/completions", body: longCall, header: fault("cut")}).want(t, 200); a.err == nil {
		t.Error("a cut answer came as if it were whole")
	}
	w.do(call{body: "{"}).refused(t, 400, "invalid_request")
	w.do(call{body: chat}).want(t, 200)
}
