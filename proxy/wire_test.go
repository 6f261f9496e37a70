package proxy_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/edge"
	"headgate/proxy/upstream"
)

// The tests of this file bear the numbers of what users of other gateways had to report.

// generating are the routes that generate, with a call to each.
func generating() map[string]string {
	return map[string]string{
		"/v1/chat/completions": `{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":5}`,
		"/v1/completions":      `{"model":"m","prompt":"hello there","max_tokens":5}`,
		"/v1/responses":        `{"model":"m","input":"hello there","max_output_tokens":5}`,
		"/v1/messages":         `{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":5}`,
	}
}

// streaming is the same call with streaming asked for.
func streaming(body string) string { return strings.TrimSuffix(body, "}") + `,"stream":true}` }

func everyUnit() []proxy.Limit {
	var ls []proxy.Limit
	for _, u := range []proxy.Unit{proxy.Requests, proxy.Concurrency, proxy.Tokens, proxy.InputTokens, proxy.OutputTokens, proxy.USD} {
		ls = append(ls, limit(u, 20_000_000)) // little enough that a slow test sees no refill
	}
	return ls
}

func TestWire01StreamCountsLikeNonStream(t *testing.T) {
	for path, body := range generating() {
		var spent [2][]int64
		for i, b := range []string{body, streaming(body)} {
			w := newWorld(t, setup{limits: everyUnit()})
			a := w.do(call{path: path, body: b}).want(t, 200)
			if stream := strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream"); stream != (i == 1) {
				t.Errorf("%s: streamed %t", path, stream)
			}
			w.settled()
			for _, l := range w.caller.Limits {
				spent[i] = append(spent[i], w.spent(l))
			}
			spent[i] = append(spent[i], w.tokens("settled"))
		}
		if fmt.Sprint(spent[0]) != fmt.Sprint(spent[1]) || spent[0][2] == 0 {
			t.Errorf("%s: spent %v without and %v with streaming", path, spent[0], spent[1])
		}
	}
}

func TestWire02EveryUsageShapeIsRead(t *testing.T) {
	bodies := generating()
	bodies["/v1/embeddings"] = `{"model":"m","input":["hello there","and again"]}`
	bodies["/pooling"] = `{"model":"m","input":"hello there"}`
	bodies["/rerank"] = `{"model":"m","query":"which?","documents":["this","that one"]}`
	for path, body := range bodies {
		w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Tokens, 100_000)}})
		a := w.do(call{path: path, body: body}).want(t, 200)
		r := w.last()
		want := strconv.FormatInt(100_000-r.PromptTokens-r.OutputTokens, 10)
		name := "X-Ratelimit-Remaining-Tokens"
		if path == "/v1/messages" {
			name = "Anthropic-Ratelimit-Tokens-Remaining"
		}
		if got := a.header.Get(name); got != want || r.PromptTokens == 0 {
			t.Errorf("%s: remaining %q, want %s", path, got, want)
		}
		w.settled()
		if s := w.tokens("settled"); s != r.PromptTokens+r.OutputTokens {
			t.Errorf("%s: settled %d of %d + %d", path, s, r.PromptTokens, r.OutputTokens)
		}
	}
}

func TestWire03LargerCapIsReserved(t *testing.T) {
	const body = `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"max_completion_tokens":1000}`
	w := newWorld(t, setup{limits: []proxy.Limit{fill(proxy.Tokens, 60, time.Minute, 60)}})
	a := w.do(call{body: body}).refused(t, 400, "request_exceeds_limit")
	if a.field("limit") != "tokens" || w.fake.Stats().Requests != 0 {
		t.Errorf("%s; %d reached the model server", a.body, w.fake.Stats().Requests)
	}
	w = newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Tokens, 2000)}})
	w.do(call{body: body}).want(t, 200)
	if r := w.tokens("reserved"); r < 1000 || r > 1010 {
		t.Errorf("reserved %d", r)
	}
}

func TestWire04NoCapNeeded(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 2)}})
	for range 2 {
		w.do(call{body: `{"model":"m","messages":[{"role":"user","content":"hi"}]}`}).want(t, 200)
	}
}

func TestWire05CapIsACeiling(t *testing.T) {
	m := model("m", "vllm")
	m.Context = 65_536
	w := newWorld(t, setup{models: []*proxy.Model{m}, fake: fakevllm.Config{ContextLen: 65_536}, limits: []proxy.Limit{limit(proxy.Tokens, 65_536)}})
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("four", 9000) + `"}],"max_tokens":65536}`
	a := w.do(call{body: body})
	if a.status >= 500 || w.fake.Stats().Requests != 1 {
		t.Errorf("status %d, %d reached the model server: %s", a.status, w.fake.Stats().Requests, clip(a.body))
	}
	if r := w.tokens("reserved"); r != 65_536 {
		t.Errorf("reserved %d, want the context", r)
	}
}

func TestWire06SlotsComeBackAfterUpstreamErrors(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Concurrency, 4)}, backends: []upstream.Backend{{Name: "vllm", Slots: 4}}})
	for i := range 200 {
		status := []int{502, 504}[i%2]
		w.do(call{body: chat, header: fault(strconv.Itoa(status))}).want(t, status)
	}
	w.do(call{body: chat}).want(t, 200)
}

func TestWire07LocalAnswersGiveTheirSlotBack(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Concurrency, 1)}})
	for range 3 {
		for _, path := range []string{"/v1/models", "/v1/models/m"} {
			w.do(call{method: http.MethodGet, path: path}).want(t, 200)
		}
		w.do(call{method: http.MethodGet, path: "/v1/models/none"}).want(t, 404)
		w.do(call{method: http.MethodGet, path: "/v1/responses/none"}).want(t, 404)
	}
}

// TestWire08SlotIsFreeBeforeTheLastByte: the client's limit and the backend's slots
// alike, since both answer 429.
func TestWire08SlotIsFreeBeforeTheLastByte(t *testing.T) {
	for name, s := range map[string]setup{
		"limit":   {limits: []proxy.Limit{limit(proxy.Concurrency, 1)}},
		"backend": {backends: []upstream.Backend{{Name: "vllm", Slots: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, s)
			for range 100 {
				w.do(call{body: chat}).want(t, 200)
			}
			for path, body := range generating() {
				for range 25 {
					w.untilLast(call{path: path, body: streaming(body)})
				}
			}
		})
	}
}

// untilLast sends a streaming call and returns as soon as its last event is there,
// before the end of the body.
func (w *world) untilLast(c call) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(patience(w.t))
	w.t.Cleanup(cancel)
	resp, err := w.client.Do(w.request(ctx, c))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { resp.Body.Close() })
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		l := lines.Text()
		if resp.StatusCode != 200 {
			w.t.Fatalf("%s: status %d: %s", c.path, resp.StatusCode, l)
		}
		if l == "data: [DONE]" || strings.Contains(l, `"type":"message_stop"`) || strings.Contains(l, `"type":"response.completed"`) || strings.Contains(l, `"type":"response.incomplete"`) {
			return
		}
	}
	w.t.Fatalf("%s: the stream ended without its last event: %v", c.path, lines.Err())
}

func TestWire09ImagesAreFlat(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{fill(proxy.Tokens, 50_000, time.Minute, 50_000)}})
	payload := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("pix"), 1<<20))
	image := `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":[{"type":"text","text":"what is it"},{"type":"image_url","image_url":{"url":"data:image/png;base64,` + payload + `"}}]}]}`
	w.do(call{body: image}).want(t, 200)
	if r := w.tokens("reserved"); r < 1024 || r > 1100 {
		t.Errorf("an image reserved %d", r)
	}
	text := `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}],"system":"` + payload + `"}`
	a := w.do(call{path: "/v1/messages", body: text}).refused(t, 400, "request_exceeds_limit")
	if n := fmt.Sprint(len(payload) / 4); !strings.Contains(a.body, n[:4]) {
		t.Errorf("want about %s tokens: %s", n, a.body)
	}
}

func TestWire10FixedWindowKeepsItsEnd(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limitOf(proxy.Requests, limiter.FixedWindow, 3)}})
	last := int64(ages / time.Second)
	for i := range 6 {
		a := w.do(call{body: chat})
		if ok := a.status == 200; ok != (i < 3) {
			t.Fatalf("request %d: status %d", i, a.status)
		}
		reset, err := strconv.ParseInt(a.header.Get("X-RateLimit-Reset"), 10, 64)
		if err != nil || reset > last || reset == int64(ages/time.Second) {
			t.Errorf("request %d: the window ends in %d s, before in %d s", i, reset, last)
		}
		last = reset
	}
}

func TestWire11LimitsChangeAtRunTime(t *testing.T) {
	var s setup
	at := func(n int64, revision uint64) setup {
		l := limit(proxy.Requests, n)
		l.Spec.Revision = revision
		s.limits = []proxy.Limit{l}
		return s
	}
	w := newWorld(t, at(3, 1))
	for i, step := range []struct{ limit, pass int64 }{{3, 3}, {5, 2}, {2, 0}, {4, 0}, {6, 1}} {
		w.apply(at(step.limit, uint64(i+1)))
		for range step.pass {
			w.do(call{body: chat}).want(t, 200)
		}
		w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
	}
}

func TestWire12NobodyIsTrusted(t *testing.T) {
	for name, change := range map[string]func(*proxy.Caller){
		"admin":    func(c *proxy.Caller) { c.User = "admin" },
		"trusted":  func(c *proxy.Caller) { c.AssertUser, c.AnySurface = true, true },
		"besteff.": func(c *proxy.Caller) { c.Class = proxy.BestEffort },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 10)}, change: change})
			if ok, refused := w.fire(call{body: chat}, 50, 10); ok != 10 || refused != 40 {
				t.Errorf("%d answered, %d refused", ok, refused)
			}
		})
	}
}

// twoModels are big, which falls back to small.
func twoModels() []*proxy.Model {
	big, small := model("big", "vllm"), model("small", "vllm2")
	big.Upstream, small.Upstream, big.Fallback = "BIG", "SMALL", []string{"small"}
	return []*proxy.Model{big, small}
}

const toBig = `{"model":"big","messages":[{"role":"user","content":"hi"}],"max_tokens":2}`

func TestWire13ExhaustedModelIsNotRoutedTo(t *testing.T) {
	perModel := limit(proxy.Requests, 2)
	perModel.Scope = proxy.ScopeOrg | proxy.ScopeModel
	w := newWorld(t, setup{
		models: twoModels(), limits: []proxy.Limit{perModel}, backends: []upstream.Backend{{Name: "vllm"}, {Name: "vllm2"}},
		fake:    fakevllm.Config{Models: []string{"BIG", "SMALL"}},
		callers: map[string]*proxy.Caller{"other": {KeyID: "k2", Tenant: "other", Limits: []proxy.Limit{perModel}}},
	})
	for i, want := range []string{"BIG", "BIG", "SMALL", "SMALL"} {
		a := w.do(call{body: toBig}).want(t, 200)
		if got := w.last().Model; got != want || (a.header.Get("X-Headgate-Degraded") == "model=small") != (want == "SMALL") {
			t.Errorf("request %d went to %s: %v", i, got, a.header)
		}
	}
	w.do(call{body: toBig}).refused(t, 429, "rate_limit_exceeded")
	for range 4 { // another tenant has its own
		w.do(call{body: toBig, key: "other"}).want(t, 200)
	}
	w.do(call{body: toBig, key: "other"}).refused(t, 429, "rate_limit_exceeded")
	if n := w.fake.Stats().Requests; n != 8 {
		t.Errorf("%d reached the model server", n)
	}
}

func TestWire14EveryRouteCounts(t *testing.T) {
	l := limit(proxy.Requests, 100)
	w := newWorld(t, setup{limits: []proxy.Limit{l}})
	calls := []call{
		{path: "/score", body: `{"model":"m","text_1":"a","text_2":"b"}`},
		{path: "/pooling", body: `{"model":"m","input":"a"}`},
		{path: "/v1/rerank", body: `{"model":"m","query":"a","documents":["b"]}`},
		{path: "/classify", body: `{"model":"m","input":"a"}`},
		{path: "/tokenize", body: `{"model":"m","prompt":"abc"}`},
		{path: "/detokenize", body: `{"model":"m","tokens":[1,2]}`},
		{path: "/v1/messages/count_tokens", body: `{"model":"m","messages":[{"role":"user","content":"hi"}]}`},
		{path: "/v1/models", method: http.MethodGet},
		{path: "/v1/models/m", method: http.MethodGet},
		{path: "/v1/unheard/of", body: `{}`},
		{path: "/", method: http.MethodGet},
		{path: "/reset_prefix_cache"},
		{path: "/v1/chat/completions", method: http.MethodGet},
		{path: "/v1/responses/none", method: http.MethodGet},
	}
	for i, c := range calls {
		if a := w.do(c); a.status >= 500 || a.status == 429 {
			t.Errorf("%s: status %d: %s", c.path, a.status, a.body)
		}
		if got := w.spent(l); got != int64(i+1) {
			t.Errorf("%d requests spent after %s, want %d", got, c.path, i+1)
		}
	}
}

func TestWire15FallbackIsCharged(t *testing.T) {
	perModel := limit(proxy.Tokens, 1000)
	perModel.Scope = proxy.ScopeModel
	models := twoModels()
	s := setup{models: models, limits: []proxy.Limit{perModel}, fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}}}
	s.backends = []upstream.Backend{{Name: "vllm", URL: closedPort(t)}, {Name: "vllm2"}}
	w := newWorld(t, s)
	w.do(call{body: toBig}).want(t, 200)
	w.settled()
	r := w.last()
	for _, l := range w.limits.Levels(w.now(), "") {
		switch {
		case l.Key.Subject == "small" && l.Level != 1000-r.PromptTokens-r.OutputTokens, l.Key.Subject == "big" && l.Level != 1000:
			t.Errorf("%v has %d left", l.Key, l.Level)
		}
	}
	perModel.Spec = &limiter.Limit{Rate: limiter.Rate{Count: 1, Per: ages}, Burst: 2, Revision: 2}
	s.limits = []proxy.Limit{perModel}
	w.apply(s)
	w.do(call{body: toBig}).refused(t, 400, "request_exceeds_limit") // checked, not only counted
	if n := w.fake.Stats().Requests; n != 1 {
		t.Errorf("%d reached the model server", n)
	}
}

func TestWire16ClientKilledInMidStream(t *testing.T) {
	log := newBuffer()
	w := newWorld(t, setup{log: log, limits: []proxy.Limit{limit(proxy.Tokens, 1000), limit(proxy.Concurrency, 1)}})
	for i, body := range []string{`{"model":"m","prompt":[1,2,3,4],"max_tokens":60,"stream":true}`, `{"model":"m","prompt":[1,2,3,4],"max_tokens":60}`} {
		w.fake.HoldAfter(20)
		leave := w.start(call{path: "/v1/completions", body: body}, []int{20, 0}[i])
		w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
		leave()
		w.await(func(s fakevllm.Stats) bool { return s.Outcomes[fakevllm.Aborted] == int64(i+1) })
		w.settled()
		w.fake.Release()
	}
	recs := log.records(t)
	for i, want := range []float64{20, 60} { // without streaming nobody knows: what was reserved
		if r := recs[i]; r["outcome"] != "client_gone" || r["input_tokens"] != 4.0 || r["output_tokens"] != want {
			t.Errorf("record %d: %v", i, r)
		}
	}
}

// start sends a call, waits until n events of its stream are here, and returns what
// makes the client go away.
func (w *world) start(c call, n int) (leave func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(patience(w.t))
	arrived, done := make(chan struct{}), make(chan struct{})
	r := w.request(ctx, c)
	go func() {
		defer close(done)
		if n == 0 {
			close(arrived)
		}
		resp, err := w.client.Do(r)
		if err != nil {
			return
		}
		defer resp.Body.Close()
		events := 0
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "data: ") {
				if events++; events == n {
					close(arrived)
				}
			}
		}
	}()
	select {
	case <-arrived:
	case <-ctx.Done():
		w.t.Fatalf("%d events did not come", n)
	}
	return func() { cancel(); <-done }
}

func TestWire17LastUsageCounts(t *testing.T) {
	for path, body := range generating() {
		w := newWorld(t, setup{})
		w.do(call{path: path, body: streaming(body), header: fault("contusage")}).want(t, 200)
		w.settled()
		if r := w.last(); w.tokens("settled") != r.PromptTokens+r.OutputTokens {
			t.Errorf("%s: settled %d of %d + %d", path, w.tokens("settled"), r.PromptTokens, r.OutputTokens)
		}
	}
}

func TestWire18UsageIsAskedForOnStreamsOnly(t *testing.T) {
	for path, body := range generating() {
		w := newWorld(t, setup{fake: fakevllm.Config{Models: []string{"m"}}, models: []*proxy.Model{called(model("m", "vllm"), "m")}})
		w.do(call{path: path, body: body}).want(t, 200)
		if got := string(w.last().Body); got != body {
			t.Errorf("%s: %s arrived as %s", path, body, got)
		}
		w.do(call{path: path, body: streaming(body)}).want(t, 200)
		asked := strings.Contains(string(w.last().Body), "stream_options")
		if want := path == "/v1/chat/completions" || path == "/v1/completions"; asked != want {
			t.Errorf("%s: stream_options on a stream: %t", path, asked)
		}
	}
}

func called(m *proxy.Model, name string) *proxy.Model { m.Upstream = name; return m }

func TestWire19StreamOptionsKeepUnknownKeys(t *testing.T) {
	w := newWorld(t, setup{})
	w.do(call{body: strings.TrimSuffix(streamed, "}") + `,"stream_options":{"later": {"a": [1]} , "include_usage":false}}`}).want(t, 200)
	if got := string(w.last().Body); !strings.HasSuffix(got, `"stream_options":{"later": {"a": [1]} , "include_usage":true}}`) {
		t.Error(got)
	}
}

func TestWire20FramesMayBeCutAnywhere(t *testing.T) {
	for _, f := range []string{"split", "nonewline", "crlf", "comments", "split,crlf,comments"} {
		for path, body := range generating() {
			w := newWorld(t, setup{fake: fakevllm.Config{SplitPause: time.Millisecond}})
			b := strings.Replace(streaming(body), `"m"`, `"fake"`, 1)
			if strings.Contains(path, "completions") {
				b = strings.TrimSuffix(b, "}") + `,"stream_options":{"include_usage":true}}`
			}
			c := call{path: path, body: b, header: fault(f)}
			want := w.direct(c)
			w.fake.Reset()
			c.body = strings.Replace(b, `"fake"`, `"m"`, 1)
			if got := w.do(c).want(t, 200); got.body != want.body || got.err != nil {
				t.Errorf("%s %s:\n%q\n%q %v", f, path, got.body, want.body, got.err)
			}
			w.settled()
			if r := w.last(); w.tokens("settled") != r.PromptTokens+r.OutputTokens {
				t.Errorf("%s %s: settled %d of %d + %d", f, path, w.tokens("settled"), r.PromptTokens, r.OutputTokens)
			}
		}
	}
}

func TestWire20EndlessLine(t *testing.T) {
	const size = 16 << 20
	w := newWorld(t, setup{around: func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, strings.Repeat(`data: {"choices":[{"index":0,"text":"x"}]}`+"\n\n", 3)+"data: ")
			_, _ = io.CopyN(w, endless{}, size)
			panic(http.ErrAbortHandler)
		})
	}})
	a := w.do(call{path: "/v1/completions", body: exactStreamed}).want(t, 200)
	if !strings.HasSuffix(a.body, "\n\n") || !strings.Contains(a.body[len(a.body)-300:], "upstream_error") || len(a.body) < size {
		t.Errorf("the end of %d bytes does not tell: %q", len(a.body), a.body[max(0, len(a.body)-200):])
	}
	w.settled()
	if s := w.tokens("settled"); s != 4+3 {
		t.Errorf("settled %d", s)
	}
}

func TestWire21GzipIsSeenThrough(t *testing.T) {
	for path, body := range generating() {
		for _, b := range []string{body, streaming(body), streaming(long(body))} {
			for _, accept := range []string{"gzip", "br;q=1.0, gzip;q=0.8", "", "gzip;q=0"} {
				w := newWorld(t, setup{})
				plain := w.do(call{path: path, body: b}).want(t, 200)
				w.settled()
				once := w.tokens("settled")
				h := fault("gzip")
				if accept != "" {
					h.Set("Accept-Encoding", accept)
				}
				got := w.do(call{path: path, body: b, header: h}).want(t, 200)
				zipped := strings.Contains(accept, "gzip") && accept != "gzip;q=0"
				if (got.header.Get("Content-Encoding") == "gzip") != zipped {
					t.Errorf("%s: asked for %q, got %q", path, accept, got.header.Get("Content-Encoding"))
				}
				if zipped {
					got.body = gunzip(t, got.body)
				}
				if path != "/v1/responses" && got.body != plain.body || len(got.body) != len(plain.body) || got.err != nil {
					t.Errorf("%s, %q: %v\n%q\n%q", path, accept, got.err, clip(got.body), clip(plain.body))
				}
				w.settled()
				if s := w.tokens("settled"); s != 2*once || once == 0 {
					t.Errorf("%s: settled %d, then %d", path, once, s-once)
				}
			}
		}
	}
}

// long is the same call with an answer of many reads.
func long(body string) string { return strings.Replace(body, `tokens":5`, `tokens":400`, 1) }

func gunzip(t *testing.T, s string) string {
	t.Helper()
	r := must[*gzip.Reader](t)(gzip.NewReader(strings.NewReader(s)))
	return string(must[[]byte](t)(io.ReadAll(r)))
}

func TestWire22ErrorUnderStatus200(t *testing.T) {
	for path, body := range generating() {
		w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.OutputTokens, 1000)}})
		c := call{path: path, body: streaming(body), header: fault("inband=3")}
		a := w.do(c).want(t, 200)
		if !strings.Contains(a.body, "EngineCore encountered an issue.") {
			t.Errorf("%s: %q", path, a.body)
		}
		w.settled()
		if got := w.metric("headgate_requests_total", "outcome", "upstream_error"); got != 1 {
			t.Errorf("%s: %v upstream errors", path, got)
		}
		if got := w.spent(w.caller.Limits[0]); got != 3 {
			t.Errorf("%s: billed %d output tokens, 3 were generated", path, got)
		}
	}
}

func TestWire23CutStream(t *testing.T) {
	for path, body := range generating() {
		w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.OutputTokens, 1000)}})
		body = strings.Replace(streaming(body), `tokens":5`, `tokens":60`, 1)
		a := w.do(call{path: path, body: body, header: fault("cut=40")}).want(t, 200)
		if !strings.Contains(a.body, "error") {
			t.Errorf("%s: the cut is not surfaced: %q %v", path, a.body, a.err)
		}
		w.settled()
		if got := w.spent(w.caller.Limits[0]); got != 40 {
			t.Errorf("%s: billed %d output tokens of 40", path, got)
		}
		if n := w.fake.Stats().Requests; n != 1 {
			t.Errorf("%s: sent %d times", path, n)
		}
		if got := w.metric("headgate_requests_total", "outcome", "upstream_error"); got != 1 {
			t.Errorf("%s: %v upstream errors", path, got)
		}
	}
}

func TestWire24UsageIsDeductedOnce(t *testing.T) {
	for path, body := range generating() {
		w := newWorld(t, setup{limits: everyUnit()})
		var in, out int64
		for range 3 {
			w.do(call{path: path, body: streaming(body)}).want(t, 200)
			r := w.last()
			in, out = in+r.PromptTokens, out+r.OutputTokens
		}
		w.settled()
		want := []int64{3, 0, in + out, in, out, in*priceInput + out*priceOutput}
		for i, l := range w.caller.Limits {
			if got := w.spent(l); got != want[i] {
				t.Errorf("%s: %d %s spent, want %d", path, got, l.Unit, want[i])
			}
		}
	}
}

func TestWire25CachedInputIsPricedOnce(t *testing.T) {
	for path, body := range generating() {
		for _, b := range []string{body, streaming(body)} {
			w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.USD, 1_000_000)}, fake: fakevllm.Config{CachedFraction: 0.5}})
			w.do(call{path: path, body: b}).want(t, 200)
			w.settled()
			r := w.last()
			want := (r.PromptTokens-r.CachedTokens)*priceInput + r.CachedTokens*priceCached + r.OutputTokens*priceOutput
			if got := w.spent(w.caller.Limits[0]); got != want || r.CachedTokens == 0 {
				t.Errorf("%s: %d nano-dollars for %d (%d cached) and %d tokens, want %d", path, got, r.PromptTokens, r.CachedTokens, r.OutputTokens, want)
			}
		}
	}
}

func TestWire26UnknownFieldsPass(t *testing.T) {
	w := newWorld(t, setup{})
	extra := `,"chat_template_kwargs":{"enable_thinking":false},"structured_outputs":{"choice":["a","b"]},"vllm_xargs":{"x":1.50},` +
		`"kv_transfer_params":{"do_remote_decode":true},"reasoning_effort":"low","logprobs":true,"top_logprobs":2,"return_token_ids":true,"new_field":[1e2,"\u00e9"]}`
	c := call{body: strings.TrimSuffix(chat, "}") + extra}
	got := w.do(c).want(t, 200)
	arrived := string(w.last().Body)
	if want := strings.Replace(c.body, `"m"`, `"fake"`, 1); arrived != want {
		t.Errorf("arrived as\n%s, want\n%s", arrived, want)
	}
	c.body = arrived
	if direct := w.direct(c); got.body != direct.body || !strings.Contains(got.body, "finish_reason") || !strings.Contains(got.body, "logprobs") {
		t.Errorf("came back as\n%s, directly\n%s", got.body, direct.body)
	}
}

func TestWire27ToolCallsEndWithToolUse(t *testing.T) {
	w := newWorld(t, setup{})
	body := `{"model":"m","max_tokens":50,"messages":[{"role":"user","content":"weather?"}],"tools":[{"name":"weather","input_schema":{"type":"object","properties":{"city":{"type":"string"}}}}]}`
	for _, b := range []string{body, streaming(body)} {
		a := w.do(call{path: "/v1/messages", body: b}).want(t, 200)
		if !strings.Contains(a.body, `"stop_reason":"tool_use"`) || !strings.Contains(a.body, `"text"`) {
			t.Error(a.body)
		}
		if d := w.direct(call{path: "/v1/messages", body: strings.Replace(b, `"m"`, `"fake"`, 1)}); d.body != a.body {
			t.Errorf("%s\ndirectly\n%s", a.body, d.body)
		}
	}
}

func TestWire28BodySizes(t *testing.T) {
	const most = 100_000
	w := newWorld(t, setup{maxBody: map[string]int64{"": most, "embeddings": 1000}})
	sized := func(n int) string {
		const frame = `{"model":"m","messages":[{"role":"user","content":""}],"max_tokens":5}`
		return strings.Replace(frame, `""`, `"`+strings.Repeat("x", n-len(frame))+`"`, 1)
	}
	for _, n := range []int{32_767, 32_768, 32_769, 65_536, 65_537, most} {
		w.do(call{body: sized(n)}).want(t, 200)
		if got := w.last().BodyBytes; got != int64(n)+3 { // "fake" for "m"
			t.Errorf("%d bytes arrived as %d", n, got)
		}
	}
	w.do(call{body: sized(most + 1)}).refused(t, 413, "request_too_large")
	w.do(call{path: "/v1/embeddings", body: sized(1001)}).refused(t, 413, "request_too_large")

	// Refused by its head alone: nothing of it is ever sent.
	c := must[net.Conn](t)(net.Dial("tcp", w.addr))
	defer c.Close()
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nContent-Length: 1000000000\r\nExpect: 100-continue\r\n\r\n", key)
	resp := must[*http.Response](t)(http.ReadResponse(bufio.NewReader(c), nil))
	defer resp.Body.Close()
	if resp.StatusCode != 413 {
		t.Errorf("status %d", resp.StatusCode)
	}
	// Without a length it is read no further than the cap.
	r := w.request(patience(t), call{body: "x"})
	r.Body, r.ContentLength = io.NopCloser(io.LimitReader(endless{}, 1<<30)), -1
	if resp, err := w.client.Do(r); err == nil {
		if resp.StatusCode != 413 {
			t.Errorf("status %d", resp.StatusCode)
		}
		resp.Body.Close()
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestWire29MalformedNamesItsOffset(t *testing.T) {
	requests, tokens, usd := limit(proxy.Requests, 100), limit(proxy.Tokens, 1000), limit(proxy.USD, 1_000_000)
	w := newWorld(t, setup{limits: []proxy.Limit{requests, tokens, usd}, prefilter: edge.PrefilterConfig{ErrorsPerMinute: 1}})
	bad := call{body: `{"model":"m","messages":[}`}
	for i := range 20 {
		a := w.do(bad).refused(t, 400, "invalid_request")
		if !strings.Contains(a.body, "25") {
			t.Fatalf("attempt %d names no offset: %s", i, a.body)
		}
	}
	w.do(bad).refused(t, 429, "rate_limit_exceeded")
	w.settled()
	if r, k, d := w.spent(requests), w.spent(tokens), w.spent(usd); r != 20 || k != 0 || d != 0 {
		t.Errorf("spent %d requests, %d tokens, %d nano-dollars", r, k, d)
	}
	if n := w.fake.Stats().Requests; n != 0 {
		t.Errorf("%d reached the model server", n)
	}
}

func TestWire30RetryAfterIsTrue(t *testing.T) {
	for name, c := range map[string]struct {
		limit    proxy.Limit
		least    int64
		most     int64
		hopeless bool
	}{
		"soon":  {fill(proxy.Requests, 1, 50*time.Second, 1), 1, 50, false},
		"late":  {fill(proxy.Requests, 1, time.Hour, 1), 60, 3600, true},
		"slots": {limit(proxy.Concurrency, 0), 1, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			if c.limit.Unit == proxy.Concurrency {
				c.limit.Spec.Burst = 1
			}
			w := newWorld(t, setup{limits: []proxy.Limit{c.limit}})
			ok, refused := w.fire(call{body: chat}, 2, 1)
			if ok != 1 || refused != 1 {
				t.Fatalf("%d, %d", ok, refused)
			}
			if c.limit.Unit == proxy.Concurrency {
				w.fake.Hold()
				leave := w.start(call{body: chat}, 0)
				w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
				defer leave()
			}
			a := w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
			s, err := strconv.ParseInt(a.header.Get("Retry-After"), 10, 64)
			ms, err2 := strconv.ParseInt(a.header.Get("Retry-After-Ms"), 10, 64)
			if err != nil || err2 != nil || s != (ms+999)/1000 || s < c.least || s > c.most {
				t.Errorf("Retry-After %d, %d ms, %v %v", s, ms, err, err2)
			}
			if got := a.header.Get("X-Should-Retry") == "false"; got != c.hopeless {
				t.Errorf("x-should-retry %q", a.header.Get("X-Should-Retry"))
			}
			if body, ok := a.field("retry_after_ms").(float64); c.limit.Unit != proxy.Concurrency && (!ok || int64(body) != ms) {
				t.Errorf("header %d ms, body %v", ms, a.field("retry_after_ms"))
			}
		})
	}
}

func TestWire31RefusalsDoNotConsume(t *testing.T) {
	for _, a := range []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog} {
		l := limitOf(proxy.Requests, a, 2)
		w := newWorld(t, setup{limits: []proxy.Limit{l}})
		w.do(call{body: chat}).want(t, 200)
		w.do(call{body: chat}).want(t, 200)
		before := int64(1 << 62)
		for range 50 {
			r := w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
			ms, err := strconv.ParseInt(r.header.Get("Retry-After-Ms"), 10, 64)
			if err != nil || ms > before {
				t.Fatalf("%s: Retry-After grew from %d to %d ms: %v", a, before, ms, err)
			}
			before = ms
		}
		if got := w.spent(l); got != 2 {
			t.Errorf("%s: %d spent", a, got)
		}
	}
}

func TestWire32TwoPeriodsHold(t *testing.T) {
	table := must[*lease.Local](t)(lease.NewLocal(lease.Config{}))
	minute := limit(proxy.Requests, 10)
	minute.Spec.Rate = limiter.Rate{Count: 10, Per: time.Minute}
	day := limitOf(proxy.Requests, limiter.FixedWindow, 25)
	day.Spec.Rate.Per = 24 * time.Hour
	take := func(now int64) int {
		cs := []limiter.Charge{
			{Key: limiter.Key{Limit: "minute", Tenant: "t"}, Limit: minute.Spec, Cost: 1},
			{Key: limiter.Key{Limit: "day", Tenant: "t"}, Limit: day.Spec, Cost: 1},
		}
		return table.Take(now, cs, make([]limiter.Decision, 2))
	}
	now := int64(20_000 * 24 * time.Hour)
	for i, want := range []struct{ pass, refusedBy int }{{10, 0}, {10, 0}, {5, 1}, {0, 1}} {
		for range want.pass {
			if got := take(now); got != -1 {
				t.Fatalf("minute %d: refused by %d", i, got)
			}
		}
		if got := take(now); got != want.refusedBy {
			t.Errorf("minute %d: refused by %d, want %d", i, got, want.refusedBy)
		}
		now += int64(time.Minute)
	}
	if got := take(int64(20_001 * 24 * time.Hour)); got != -1 {
		t.Errorf("next day: refused by %d", got)
	}
}

func TestWire33FastAndSlowRatesAreExact(t *testing.T) {
	for _, c := range []struct {
		rate limiter.Rate
		wait time.Duration
	}{
		{limiter.Rate{Count: 5000, Per: time.Second}, 200 * time.Microsecond},
		{limiter.Rate{Count: 1_000_000_000, Per: time.Second}, 1},
		{limiter.Rate{Count: 1, Per: 3 * 24 * time.Hour}, 3 * 24 * time.Hour},
		{limiter.Rate{Count: 1, Per: 365 * 24 * time.Hour}, 365 * 24 * time.Hour},
	} {
		table := must[*lease.Local](t)(lease.NewLocal(lease.Config{}))
		spec := &limiter.Limit{Rate: c.rate, Burst: 1}
		ds := make([]limiter.Decision, 1)
		take := func(now int64) bool {
			return table.Take(now, []limiter.Charge{{Key: limiter.Key{Limit: "l"}, Limit: spec, Cost: 1}}, ds) == -1
		}
		now := int64(20_000 * 24 * time.Hour)
		if !take(now) || take(now) || ds[0].RetryAfter != c.wait {
			t.Errorf("%v: retry after %v, want %v", c.rate, ds[0].RetryAfter, c.wait)
		}
		if now += int64(c.wait); take(now-1) || !take(now) {
			t.Errorf("%v is not exact", c.rate)
		}
	}
}

// routes are all of the table, each with a body that would be answered.
func routes() []call {
	chatBody, prompt, input := chat, `{"model":"m","prompt":"a","max_tokens":1}`, `{"model":"m","input":"a"}`
	rerank, score := `{"model":"m","query":"a","documents":["b"]}`, `{"model":"m","text_1":"a","text_2":"b"}`
	cs := []call{
		{path: "/v1/chat/completions", body: chatBody},
		{path: "/v1/completions", body: prompt},
		{path: "/v1/responses", body: input},
		{path: "/v1/messages", body: chatBody},
		{path: "/v1/messages/count_tokens", body: chatBody},
		{path: "/v1/embeddings", body: input},
		{path: "/v2/embed", body: input},
		{path: "/v1/audio/speech", body: input},
		{path: "/tokenize", body: `{"model":"m","prompt":"a"}`},
		{path: "/detokenize", body: `{"model":"m","tokens":[1]}`},
	}
	for _, p := range []string{"/pooling", "/v1/pooling", "/classify", "/v1/classify"} {
		cs = append(cs, call{path: p, body: input})
	}
	for _, p := range []string{"/score", "/v1/score"} {
		cs = append(cs, call{path: p, body: score})
	}
	for _, p := range []string{"/rerank", "/v1/rerank", "/v2/rerank"} {
		cs = append(cs, call{path: p, body: rerank})
	}
	form := header("Content-Type", "multipart/form-data; boundary=B")
	audio := "--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\nRIFF\r\n--B--\r\n"
	cs = append(cs, call{path: "/v1/audio/transcriptions", body: audio, header: form}, call{path: "/v1/audio/translations", body: audio, header: form})
	for _, p := range []string{"/v1/models", "/v1/models/m", "/v1/responses/resp_1"} {
		cs = append(cs, call{method: http.MethodGet, path: p})
	}
	return append(cs, call{path: "/v1/responses/resp_1/cancel"}, call{method: http.MethodDelete, path: "/v1/responses/resp_1"})
}

func TestWire34BlockedKeysAreBlockedEverywhere(t *testing.T) {
	w := newWorld(t, setup{prefilter: edge1000(), callers: map[string]*proxy.Caller{
		"revoked":   {KeyID: "k2", Tenant: "acme", Revoked: true},
		"suspended": {KeyID: "k3", Tenant: "acme", Suspended: true},
		"expired":   {KeyID: "k4", Tenant: "acme", Expires: time.Unix(1, 0)},
	}})
	for _, c := range routes() {
		for k, want := range map[string]struct {
			status int
			code   string
		}{"revoked": {401, "key_revoked"}, "suspended": {403, "permission_denied"}, "expired": {401, "invalid_api_key"}, "unknown": {401, "invalid_api_key"}, "none": {401, "invalid_api_key"}} {
			c.key = k
			w.do(c).refused(t, want.status, want.code)
		}
	}
	if n := w.fake.Stats().Requests; n != 0 {
		t.Errorf("%d reached the model server", n)
	}
}

var (
	structured = regexp.MustCompile(`^"[a-z_]+";r=\d+(;t=\d+)?(, "[a-z_]+";r=\d+(;t=\d+)?)*$`)
	openaiWait = regexp.MustCompile(`^(\d+h)?(\d+m)?(\d+m?s)$`)
)

func TestWire35HeadersNeverGoNegative(t *testing.T) {
	m := model("m", "vllm")
	m.DefaultOutput = 1
	w := newWorld(t, setup{models: []*proxy.Model{m}, limits: []proxy.Limit{
		limit(proxy.Requests, 5), fill(proxy.Tokens, 1, 30*time.Second, 12), limit(proxy.Concurrency, 3),
	}})
	body := `{"model":"m","messages":[{"role":"user","content":"hi"}]}` // 16 tokens come
	a := w.do(call{body: body}).want(t, 200)
	if left, _ := w.level(w.limits, "tokens"); left >= 0 {
		t.Fatalf("no debt: %d", left)
	}
	for i, a := range []answer{a, w.do(call{body: body}).refused(t, 429, "rate_limit_exceeded")} {
		if s := a.header.Get("RateLimit"); !structured.MatchString(s) || !strings.Contains(s, `"tokens";r=0;t=`) {
			t.Errorf("%d: RateLimit: %s", i, s)
		}
		for _, name := range []string{"X-RateLimit-Remaining", "X-Ratelimit-Remaining-Tokens"} {
			if got := a.header.Get(name); got != "0" {
				t.Errorf("%d: %s: %s", i, name, got)
			}
		}
		d, err := time.ParseDuration(a.header.Get("X-Ratelimit-Reset-Tokens"))
		if !openaiWait.MatchString(a.header.Get("X-Ratelimit-Reset-Tokens")) || err != nil || d < 6*time.Minute {
			t.Errorf("%d: x-ratelimit-reset-tokens: %s", i, a.header.Get("X-Ratelimit-Reset-Tokens"))
		}
		if n, err := strconv.ParseInt(a.header.Get("X-RateLimit-Reset"), 10, 64); err != nil || n != int64(d/time.Second) {
			t.Errorf("%d: X-RateLimit-Reset: %s, not %v", i, a.header.Get("X-RateLimit-Reset"), d)
		}
	}
}
