package proxy_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/openai"
	"headgate/proxy/upstream"
)

// plainCall reserves 4 + 60 tokens, and that many are used if all goes well.
const plainCall = `{"model":"m","prompt":[1,2,3,4],"max_tokens":60}`

// exit is a way in which a request ends.
type exit struct {
	name, fault, body string
	setup             setup
	status            int
	outcome           string
	in, out           int64
	noRequest         bool   // the requests unit comes back too
	has               string // in the answer
	strict            paid   // under a strict budget
}

// paid is what a strict budget is charged.
type paid uint8

const (
	asReserved paid = iota
	asUsed
	nothing
	cancelled
)

// exits are all ways in which a request for 4 + 60 tokens ends, but for a panic and a client
// that leaves.
func exits(t *testing.T) []exit {
	streamedCall := streaming(plainCall)
	brief := func(c *proxy.Caller) { c.Timeout = 500 * time.Millisecond }
	cases := []exit{
		{name: "answered", strict: asUsed, body: plainCall, status: 200, outcome: "ok", in: 4, out: 60},
		{name: "streamed", strict: asUsed, body: streamedCall, status: 200, outcome: "ok", in: 4, out: 60, has: "[DONE]"},
		{name: "upstream 400", strict: nothing, fault: "400", body: plainCall, status: 400, outcome: "client_error"},
		{name: "upstream 404", strict: nothing, fault: "404", body: streamedCall, status: 404, outcome: "client_error"},
		{name: "upstream 429", strict: nothing, fault: "429", body: plainCall, status: 429, outcome: "client_error"},
		{name: "upstream 500", strict: nothing, fault: "500", body: plainCall, status: 500, outcome: "upstream_error"},
		{name: "upstream 503", strict: nothing, fault: "503", body: streamedCall, status: 503, outcome: "upstream_error"},
		{
			name: "connection refused", strict: cancelled, body: plainCall, status: 503, outcome: "upstream_error", noRequest: true, has: "no_backend",
			setup: setup{backends: []upstream.Backend{{Name: "vllm", URL: closedPort(t)}}},
		},
		{name: "reset", fault: "reset", body: plainCall, status: 502, outcome: "upstream_error", has: "upstream_error"},
		{name: "stream reset", fault: "reset", body: streamedCall, status: 502, outcome: "upstream_error", has: "upstream_error"},
		{name: "cut", fault: "cut=3", body: plainCall, status: 502, outcome: "upstream_error", in: 4, out: 60, has: "upstream_error"},
		{name: "stream cut", fault: "cut=3", body: streamedCall, status: 200, outcome: "upstream_error", in: 4, out: 3, has: "upstream_error"},
		{name: "stalled", fault: "stall=3", body: plainCall, setup: setup{change: brief}, status: 504, outcome: "upstream_error", in: 4, out: 60, has: "deadline_exceeded"},
		{name: "stream stalled", fault: "stall=3", body: streamedCall, setup: setup{change: brief}, status: 200, outcome: "upstream_error", in: 4, out: 3, has: "deadline_exceeded"},
		{name: "stream stalled at once", fault: "stall=0", body: streamedCall, setup: setup{change: brief}, status: 504, outcome: "upstream_error", in: 4, out: 60, has: "deadline_exceeded"},
		{name: "error", strict: nothing, fault: "inband=3", body: plainCall, status: 500, outcome: "upstream_error"},
		{name: "error in stream", fault: "inband=3", body: streamedCall, status: 200, outcome: "upstream_error", in: 4, out: 3, has: "EngineCore"},
		{name: "garbage", fault: "garbage", body: plainCall, status: 502, outcome: "upstream_error", has: "no answer of a model"},
		{name: "gzip", strict: asUsed, fault: "gzip", body: plainCall, status: 200, outcome: "ok", in: 4, out: 60},
		{name: "gzip stream", strict: asUsed, fault: "gzip", body: streamedCall, status: 200, outcome: "ok", in: 4, out: 60, has: "[DONE]"},
		{name: "gzip cut", fault: "gzip,cut=3", body: streamedCall, status: 200, outcome: "upstream_error", in: 4, out: 3, has: "upstream_error"},
		{name: "no usage", fault: "nousage", body: plainCall, status: 200, outcome: "ok", in: 4, out: 60},
		{name: "no usage in stream", fault: "nousage", body: streamedCall, status: 200, outcome: "ok", in: 4, out: 60},
	}
	for _, lie := range []string{"negative", "huge", "string", "float"} {
		for _, body := range []string{plainCall, streamedCall} {
			c := cases[0]
			c.name, c.fault, c.body, c.strict = "lie "+lie, "lieusage="+lie, body, asReserved
			cases = append(cases, c)
		}
	}
	return cases
}

// TestEveryExitSettles: whatever becomes of a request, what it held comes back and what
// it used is charged. A limit of one in flight shows that the slot is free; newWorld
// checks gauges and sums.
func TestEveryExitSettles(t *testing.T) {
	for _, c := range exits(t) {
		t.Run(c.name, func(t *testing.T) {
			c.setup.limits = []proxy.Limit{limit(proxy.Requests, 100), limit(proxy.Concurrency, 1), limit(proxy.Tokens, 1_000_000), limit(proxy.USD, 1_000_000)}
			w := newWorld(t, c.setup)
			a := w.do(call{path: "/v1/completions", body: c.body, header: fault(c.fault)}).want(t, c.status)
			if !strings.Contains(a.body, c.has) || a.err != nil && c.status != 200 {
				t.Errorf("%v: %s", a.err, clip(a.body))
			}
			w.settled()
			if n := w.metric("headgate_requests_total", "outcome", c.outcome); n != 1 {
				t.Errorf("outcome is not %s", c.outcome)
			}
			want := []int64{1, 0, c.in + c.out, c.in*priceInput + c.out*priceOutput}
			if c.noRequest {
				want[0] = 0
			}
			for i, l := range w.caller.Limits {
				if got := w.spent(l); got != want[i] {
					t.Errorf("%d %s spent, want %d", got, l.Unit, want[i])
				}
			}
			if c.status != 503 || c.fault != "" {
				w.do(call{path: "/v1/completions", body: plainCall, header: header("X-Headgate-Timeout", "30")}).want(t, 200)
			}
		})
	}
}

// explosive panics in one of its methods, the first time that armed allows.
type explosive struct {
	proxy.Limits
	take, settle atomic.Int32
}

func (e *explosive) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	if e.take.Add(-1) == 0 {
		panic("take")
	}
	return e.Limits.Take(ctx, cs, ds)
}

func (e *explosive) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	if e.settle.Add(-1) == 0 {
		panic("settle")
	}
	e.Limits.Settle(cs, actual, ds)
}

// TestPanicsSettle: a panic anywhere is a 500, or a broken connection once the answer
// has begun, and leaves nothing held.
func TestPanicsSettle(t *testing.T) {
	for _, where := range []string{"take", "settle", "estimate", "price"} {
		for _, body := range []string{plainCall, streaming(plainCall)} {
			t.Run(where, func(t *testing.T) {
				bomb := &explosive{}
				m := model("m", "vllm")
				price, calls := m.Cost, atomic.Int32{}
				m.Cost = func(u openai.Usage, images, audio int64) int64 {
					if n := calls.Add(1); where == "estimate" && n == 1 || where == "price" && n == 2 {
						panic(where)
					}
					return price(u, images, audio)
				}
				switch where {
				case "take":
					bomb.take.Store(1)
				case "settle":
					bomb.settle.Store(1)
				}
				w := newWorld(t, setup{
					models: []*proxy.Model{m}, limits: []proxy.Limit{limit(proxy.Concurrency, 1), limit(proxy.Tokens, 1000)},
					guard: func(l proxy.Limits) proxy.Limits { bomb.Limits = l; return bomb },
				})
				a := w.do(call{path: "/v1/completions", body: body})
				switch {
				case a.status == 500 && a.field("code") == "internal_error" && a.field("message") != "":
				case a.status == 200 && a.err != nil && body != plainCall:
				default:
					t.Errorf("status %d, %v: %s", a.status, a.err, clip(a.body))
				}
				w.settled()
				if n := w.metric("headgate_requests_total", "outcome", "failed"); n != 1 {
					t.Errorf("%v requests failed", n)
				}
				w.do(call{path: "/v1/completions", body: body}).want(t, 200)
			})
		}
	}
}

// TestWait: a limit with a wait holds what will conform in time, and refuses the rest.
func TestWait(t *testing.T) {
	l := fill(proxy.Requests, 1, 20*time.Millisecond, 1)
	l.Wait = time.Minute
	w := newWorld(t, setup{limits: []proxy.Limit{l}})
	for range 5 {
		w.do(call{body: chat}).want(t, 200)
	}
	late := fill(proxy.Requests, 1, time.Hour, 1)
	late.Wait = time.Minute
	w = newWorld(t, setup{limits: []proxy.Limit{late}})
	w.do(call{body: chat}).want(t, 200)
	w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
}

// TestClientGoneWhileWaiting holds nothing and is no failure of the backend.
func TestClientGoneWhileWaiting(t *testing.T) {
	log := newBuffer()
	l := fill(proxy.Requests, 1, time.Hour, 1)
	l.Wait = 2 * time.Hour
	w := newWorld(t, setup{limits: []proxy.Limit{l, limit(proxy.Tokens, 1000)}, log: log})
	w.do(call{body: chat}).want(t, 200)
	w.settled()
	before := w.spent(w.caller.Limits[1])
	leave := w.start(call{body: chat}, 0)
	w.eventually(func() bool { return w.metric("headgate_inflight_requests") == 1 })
	leave()
	w.settled()
	if n := w.metric("headgate_requests_total", "outcome", "client_gone"); n != 1 {
		t.Errorf("%v clients went away: %v", n, log.records(t))
	}
	if got := w.spent(w.caller.Limits[1]); got != before {
		t.Errorf("%d tokens spent, want %d", got, before)
	}
}

// TestErrorsCarryOurHeadersOnly: an error of the gateway's does not go out under the
// headers of the answer that broke off.
func TestErrorsCarryOurHeadersOnly(t *testing.T) {
	w := newWorld(t, setup{around: func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Etag", `"x"`)
			_, _ = w.Write([]byte("this is not gzip"))
		})
	}})
	a := w.do(call{body: chat, header: header("Accept-Encoding", "gzip")}).refused(t, 502, "upstream_error")
	if a.header.Get("Content-Encoding") != "" || a.header.Get("Etag") != "" || a.header.Get("X-Request-Id") == "" {
		t.Errorf("%v", a.header)
	}
}

// TestUnreadableEncodingCostsTheReservation: what cannot be looked into passes as it is.
func TestUnreadableEncodingCostsTheReservation(t *testing.T) {
	w := newWorld(t, setup{around: func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "br")
			_, _ = w.Write([]byte("opaque"))
		})
	}})
	if a := w.do(call{path: "/v1/completions", body: plainCall}).want(t, 200); a.body != "opaque" || a.header.Get("Content-Encoding") != "br" {
		t.Errorf("%q %v", a.body, a.header)
	}
	w.settled()
	if got := w.tokens("settled"); got != 64 {
		t.Errorf("settled %d", got)
	}
}

// TestRetryBeforeTheFirstByte: a backend that cannot have got the request is passed
// over. One that may have and broke off before it answered is asked again where there is no other, so often; a
// provider, who bills what he took, is not.
func TestRetryBeforeTheFirstByte(t *testing.T) {
	m := model("m", "dead1", "dead2", "vllm")
	w := newWorld(t, setup{
		models: []*proxy.Model{m, model("p", "provider")}, limits: []proxy.Limit{limit(proxy.Requests, 10), limit(proxy.Concurrency, 1)},
		backends: []upstream.Backend{{Name: "dead1", URL: closedPort(t)}, {Name: "dead2", URL: closedPort(t)}, {Name: "vllm"}, {Name: "provider", Kind: upstream.OpenAI}},
	})
	for range 3 {
		if a := w.do(call{body: chat}).want(t, 200); a.header.Get("X-Headgate-Backend") != "vllm" {
			t.Errorf("answered by %q", a.header.Get("X-Headgate-Backend"))
		}
	}
	w.do(call{body: chat, header: fault("reset")}).refused(t, 502, "upstream_error")
	if got := w.fake.Stats().Requests; got != 3+3 {
		t.Errorf("%d reached the model server, want 6", got)
	}
	w.do(call{body: strings.Replace(chat, `"m"`, `"p"`, 1), header: fault("reset")}).refused(t, 502, "upstream_error")
	if got := w.fake.Stats().Requests; got != 3+3+1 {
		t.Errorf("%d reached the model server, want 7", got)
	}
	if got := w.spent(w.caller.Limits[0]); got != 5 {
		t.Errorf("%d requests spent", got)
	}
}

// TestOverload is the fleet's, not the caller's: it costs nothing and is spread.
func TestOverload(t *testing.T) {
	w := newWorld(t, setup{backends: []upstream.Backend{{Name: "vllm", Slots: 1}}, limits: []proxy.Limit{limit(proxy.Requests, 10)}})
	w.fake.Hold()
	leave := w.start(call{body: chat}, 0)
	defer leave()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	a := w.do(call{body: chat, header: header("X-Headgate-Timeout", "0.01")}).refused(t, 429, "over_capacity")
	if s := a.header.Get("Retry-After"); s == "" || a.header.Get("X-Should-Retry") != "" {
		t.Errorf("Retry-After %q, X-Should-Retry %q", s, a.header.Get("X-Should-Retry"))
	}
	if got := w.spent(w.caller.Limits[0]); got != 1 {
		t.Errorf("%d requests spent", got)
	}
}

// TestOversizeDebt: a cost above the burst is admitted when the bucket is full and paid
// off; while it is not full the refusal says when it will be.
func TestOversizeDebt(t *testing.T) {
	l := fill(proxy.Tokens, 1, time.Second, 32)
	l.Oversize = limiter.Debt
	w := newWorld(t, setup{limits: []proxy.Limit{l}})
	w.do(call{path: "/v1/completions", body: plainCall}).want(t, 200)
	a := w.do(call{path: "/v1/completions", body: plainCall}).refused(t, 429, "rate_limit_exceeded")
	if a.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
}

// TestShadowLimitsNeverRefuse but count.
func TestShadowLimitsNeverRefuse(t *testing.T) {
	l := limit(proxy.Requests, 1)
	l.Shadow = true
	w := newWorld(t, setup{limits: []proxy.Limit{l}})
	for range 3 {
		if a := w.do(call{body: chat}).want(t, 200); a.header.Get("RateLimit") != "" {
			t.Errorf("a shadow limit shows: %s", a.header.Get("RateLimit"))
		}
	}
	if n := w.metric("headgate_decisions_total", "outcome", "shadow_refused"); n != 2 {
		t.Errorf("%v shadow refusals", n)
	}
}

// TestWaitEnds: shutdown waits for what is open, and says so if it must not any longer.
func TestWaitEnds(t *testing.T) {
	w := newWorld(t, setup{})
	w.fake.Hold()
	leave := w.start(call{body: chat}, 0)
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	ctx, cancel := contextCause(t, errors.New("enough"))
	cancel()
	if err := w.proxy.Wait(ctx); err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("%v", err)
	}
	leave()
	w.settled()
}

// TestCutEndsStreamsReadably: what is left when a node must stop ends with an error event,
// is charged for what had passed, and is no client's doing.
func TestCutEndsStreamsReadably(t *testing.T) {
	w := newWorld(t, setup{limits: everyUnit()})
	w.fake.HoldAfter(3)
	resp := must[*http.Response](t)(w.client.Do(w.request(patience(t), call{body: streaming(`{"model":"m","max_tokens":40,"messages":[{"role":"user","content":"x"}]}`)})))
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewScanner(resp.Body)
	for events := 0; events < 4 && lines.Scan(); { // the role and three tokens
		if strings.HasPrefix(lines.Text(), "data:") {
			events++
		}
	}
	w.proxy.Cut()
	var rest strings.Builder
	for lines.Scan() {
		rest.WriteString(lines.Text())
	}
	if err := lines.Err(); err != nil || resp.StatusCode != 200 || !strings.Contains(rest.String(), "the gateway is stopping") {
		t.Errorf("status %d, %v: %s", resp.StatusCode, err, rest.String())
	}
	w.settled()
	if n := w.metric("headgate_requests_total", "outcome", "upstream_error"); n != 1 {
		t.Errorf("%v requests ended as upstream_error", n)
	}
	if got := w.spent(everyUnit()[4]); got != 3 {
		t.Errorf("%d output tokens were charged, want 3", got)
	}
}

// TestUnreadableAnswersFreeTheirSlotFirst: a client that has all of an answer finds its
// slot free, also where the answer can't be looked into.
func TestUnreadableAnswersFreeTheirSlotFirst(t *testing.T) {
	sound := func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "audio/pcm")
			w.Header().Set("Content-Length", "20000")
			_, _ = w.Write(make([]byte, 20000))
		})
	}
	w := newWorld(t, setup{around: sound, limits: []proxy.Limit{limit(proxy.Concurrency, 1)}})
	for range 50 {
		if a := w.do(call{path: "/v1/audio/speech", body: `{"model":"m","input":"hello"}`}).want(t, 200); len(a.body) != 20000 {
			t.Fatalf("%d bytes came", len(a.body))
		}
	}
}
