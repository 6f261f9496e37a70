package proxy_test

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/dispatch"
	"headgate/proxy/edge"
	"headgate/proxy/openai"
	"headgate/proxy/queue"
	"headgate/proxy/upstream"
)

var update = flag.Bool("update", false, "write the golden files anew")

// inside calls a handler without a network, so that virtual time can pass.
type inside struct{ h http.Handler }

func (i inside) RoundTrip(r *http.Request) (*http.Response, error) {
	switch r.Header.Get("X-Fake-Fault") {
	case "reset":
		return nil, errors.New("connection reset by peer")
	case "stall":
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	if r.Body == nil {
		r.Body = http.NoBody // a server's requests have one
	}
	rec := httptest.NewRecorder()
	i.h.ServeHTTP(rec, r)
	resp := rec.Result()
	if resp.Header.Get("X-Break-Off") != "" {
		resp.Body = io.NopCloser(&breaking{frames: strings.SplitAfter(rec.Body.String(), "\n\n")})
	}
	return resp, nil
}

// breaking gives an event a read, and then breaks off.
type breaking struct{ frames []string }

func (b *breaking) Read(p []byte) (int, error) {
	if len(b.frames) == 0 {
		return 0, errors.New("connection reset by peer")
	}
	n := copy(p, b.frames[0])
	if b.frames[0] = b.frames[0][n:]; b.frames[0] == "" {
		b.frames = b.frames[1:]
	}
	return n, nil
}

// bubbled is newWorld without sockets, for use in a synctest bubble.
func bubbled(t *testing.T, s setup) *world {
	w := newModelServer(t, s)
	pool := upstream.Config{Transport: func(upstream.Backend) http.RoundTripper { return inside{w.handler} }}
	w.assemble(s, pool, "http://inside")
	t.Cleanup(func() { w.settled(); w.pool.Close() })
	return w
}

// handle lets the gateway answer a call, in virtual time.
func (w *world) handle(c call) answer {
	w.addr = "gateway"
	r := w.request(w.t.Context(), c)
	r.RequestURI, r.RemoteAddr = r.URL.RequestURI(), "192.0.2.1:1234"
	r.Header.Set("X-Request-Id", "req_1")
	rec := httptest.NewRecorder()
	w.proxy.ServeHTTP(rec, r)
	return answer{status: rec.Code, header: rec.Header(), body: rec.Body.String()}
}

// show is an answer as the golden file has it: errors whole, of others the head.
func (a answer) show() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d\n", a.status)
	for _, name := range sortedKeys(a.header) {
		fmt.Fprintf(&b, "%s: %s\n", name, strings.Join(a.header[name], " | "))
	}
	if a.status >= 400 {
		fmt.Fprintf(&b, "\n%s\n", a.body)
	}
	return b.String()
}

func sortedKeys(h http.Header) []string {
	var names []string
	for n := range h {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// TestHeaders holds what every kind of answer says of limits and retries against a
// golden file. Time is virtual, so that every figure is exact; only what is spread on
// purpose, to keep refused clients apart, is checked and masked.
func TestHeaders(t *testing.T) {
	minute := func(u proxy.Unit, n int64) proxy.Limit { return fill(u, n, time.Minute, n) }
	window := minute(proxy.Requests, 1)
	window.Spec.Algorithm = limiter.FixedWindow
	orgTokens := named(minute(proxy.Tokens, 6000), "org-tokens")
	orgTokens.Scope = proxy.ScopeOrg
	usd := minute(proxy.USD, 50_000)
	day := fill(proxy.Requests, 1, 24*time.Hour, 1)
	messages := call{path: "/v1/messages", body: chat}
	completion := call{path: "/v1/completions", body: plainCall}
	problem := header("Accept", "application/problem+json")
	killed := &proxy.Switches{Tenants: map[string]*proxy.Kill{"acme": {Reason: "unpaid"}}}
	shedding := &proxy.Switches{Rungs: map[string]time.Time{"shed_best_effort": {}}}
	deny, shareless := minute(proxy.Requests, 60), minute(proxy.Requests, 60)
	deny.Unavailable, shareless.Private = proxy.Deny, nil
	never := func() bool { return false }
	half := minute(proxy.Tokens, 100)
	half.Private = minute(proxy.Tokens, 50).Spec
	slots := limit(proxy.Concurrency, 8)
	slots.Private = limit(proxy.Concurrency, 1).Spec
	allowed := named(minute(proxy.Requests, 60), "uncounted")
	allowed.Unavailable = proxy.Allow
	all := []proxy.Limit{minute(proxy.Requests, 60), limit(proxy.Concurrency, 8), orgTokens, minute(proxy.InputTokens, 3000), minute(proxy.OutputTokens, 1000), fill(proxy.USD, 1e9, time.Hour, 1e9)}

	month := budget("month", dollar)
	month.Alert = 50
	month.Period = func(now time.Time) (int64, int64) {
		start := time.Date(now.UTC().Year(), now.UTC().Month(), 1, 0, 0, 0, 0, time.UTC)
		return start.UnixNano(), start.AddDate(0, 1, 0).UnixNano()
	}
	rolling := budget("rolling", dollar)
	rolling.Window, rolling.Alert = 7*24*time.Hour, 80

	var out strings.Builder
	for _, c := range []struct {
		name   string
		setup  setup
		before []call // what is sent first
		call   call
		spread bool // Retry-After is jittered
		taken  bool // the first limit is, by somebody else
	}{
		{name: "an answer, no limits", call: completion},
		{name: "an answer, every unit", setup: setup{limits: all}, call: completion},
		{name: "an Anthropic answer, every unit", setup: setup{limits: all}, call: messages},
		{name: "a stream tells what was reserved", setup: setup{limits: all}, call: call{path: "/v1/completions", body: streaming(plainCall)}},
		{name: "a model list", setup: setup{limits: all}, call: call{method: "GET", path: "/v1/models"}},
		{name: "requests used up", setup: setup{limits: []proxy.Limit{minute(proxy.Requests, 1), orgTokens}}, before: []call{completion}, call: completion},
		{name: "a window used up", setup: setup{limits: []proxy.Limit{window}}, before: []call{completion}, call: completion},
		{name: "a day used up", setup: setup{limits: []proxy.Limit{day}}, before: []call{completion}, call: completion},
		{name: "tokens used up", setup: setup{limits: []proxy.Limit{minute(proxy.Tokens, 100)}}, before: []call{completion}, call: completion},
		{name: "input tokens used up, Anthropic", setup: setup{limits: []proxy.Limit{minute(proxy.InputTokens, 9)}}, before: []call{messages, messages, messages}, call: messages},
		{name: "dollars used up", setup: setup{limits: []proxy.Limit{usd}}, before: []call{completion}, call: completion},
		{name: "two limits used up: the longer wait", setup: setup{limits: []proxy.Limit{minute(proxy.Requests, 1), minute(proxy.Tokens, 70)}}, before: []call{completion}, call: completion},
		{name: "slots used up", setup: setup{limits: []proxy.Limit{limit(proxy.Concurrency, 1), orgTokens}}, call: completion, spread: true, taken: true},
		{name: "slots used up, Anthropic", setup: setup{limits: []proxy.Limit{limit(proxy.Concurrency, 1)}}, call: messages, spread: true, taken: true},
		{name: "the fleet at capacity", setup: setup{limits: []proxy.Limit{orgTokens}, backends: []upstream.Backend{{Name: "vllm", Slots: 1}}}, call: completion, spread: true, taken: true},
		{name: "the fleet at capacity, problem", setup: setup{backends: []upstream.Backend{{Name: "vllm", Slots: 1}}}, call: call{path: completion.path, body: completion.body, header: problem}, spread: true, taken: true},
		{name: "more than the burst", setup: setup{limits: []proxy.Limit{minute(proxy.Tokens, 60)}}, call: completion},
		{name: "tokens used up, problem", setup: setup{limits: []proxy.Limit{minute(proxy.Tokens, 100)}}, before: []call{completion}, call: call{path: completion.path, body: completion.body, header: problem}},
		{name: "malformed", setup: setup{limits: all}, call: call{body: `{"model":`}},
		{name: "malformed, Anthropic", call: call{path: "/v1/messages", body: `{"model":`}},
		{name: "malformed, problem", call: call{body: `{"model":`, header: problem}},
		{name: "unknown model", call: call{body: strings.Replace(chat, `"m"`, `"x"`, 1)}},
		{name: "unknown model, Anthropic", call: call{path: "/v1/messages", body: strings.Replace(chat, `"m"`, `"x"`, 1)}},
		{name: "unknown key", call: call{body: chat, key: "x"}},
		{name: "unknown key, Anthropic", call: call{path: "/v1/messages", body: chat, key: "x"}},
		{name: "revoked key", setup: setup{change: func(c *proxy.Caller) { c.Revoked = true }}, call: completion},
		{name: "management", setup: setup{limits: all}, call: call{path: "/sleep"}},
		{name: "too large", setup: setup{maxBody: map[string]int64{"": 10}}, call: completion},
		{name: "no backend", setup: setup{models: []*proxy.Model{model("m", "gone")}, limits: all}, call: completion, spread: true},
		{name: "no backend, Anthropic", setup: setup{models: []*proxy.Model{model("m", "gone")}}, call: messages, spread: true},
		{name: "no backend, problem", setup: setup{models: []*proxy.Model{model("m", "gone")}}, call: call{path: completion.path, body: completion.body, header: problem}, spread: true},
		{name: "backend fails", setup: setup{limits: all}, call: call{path: completion.path, body: completion.body, header: fault("reset")}},
		{name: "out of time", setup: setup{limits: all}, call: call{path: completion.path, body: completion.body, header: fault("stall")}},
		{name: "the backend's own error", setup: setup{limits: all}, call: call{path: completion.path, body: completion.body, header: fault("503")}},
		{name: "pre-filter", setup: setup{prefilter: edge.PrefilterConfig{ErrorBurst: 1, ErrorsPerMinute: 6}}, before: []call{{body: "{"}}, call: completion},
		{name: "killed", setup: setup{limits: all, switches: killed}, call: completion},
		{name: "killed, Anthropic", setup: setup{switches: killed}, call: messages},
		{name: "killed, problem", setup: setup{switches: killed}, call: call{path: completion.path, body: completion.body, header: problem}},
		{name: "not ready", setup: setup{unready: true}, call: completion, spread: true},
		{name: "not ready, Anthropic", setup: setup{unready: true}, call: messages, spread: true},
		{name: "not ready, problem", setup: setup{unready: true}, call: call{path: completion.path, body: completion.body, header: problem}, spread: true},
		{name: "shed", setup: setup{limits: all, switches: shedding}, call: call{path: completion.path, body: completion.body, header: header("X-Headgate-Class", "best_effort")}, spread: true},
		{name: "owner away, by the private bucket", setup: setup{limits: append(all, allowed), reach: never}, call: completion},
		{name: "owner away, denied", setup: setup{limits: []proxy.Limit{orgTokens, deny}, reach: never}, call: completion, spread: true},
		{name: "owner away, denied, Anthropic", setup: setup{limits: []proxy.Limit{deny}, reach: never}, call: messages, spread: true},
		{name: "owner away, denied, problem", setup: setup{limits: []proxy.Limit{deny}, reach: never}, call: call{path: completion.path, body: completion.body, header: problem}, spread: true},
		{name: "owner away, no share", setup: setup{limits: []proxy.Limit{orgTokens, shareless}, reach: never}, call: completion},
		{name: "owner away, more than the share", setup: setup{limits: []proxy.Limit{half}, reach: never}, call: completion},
		{name: "owner away, the share used up", setup: setup{limits: []proxy.Limit{minute(proxy.Tokens, 100)}, reach: never}, before: []call{completion}, call: completion},
		{name: "owner away, the share's slots used up", setup: setup{limits: []proxy.Limit{slots}, reach: never}, call: completion, spread: true, taken: true},
		{name: "an answer, budgets alone", setup: setup{change: budgeted(month, rolling, budget("ever", 99_999_999))}, call: completion},
		{name: "an answer, budgets and a limit, alerts passed", setup: setup{money: spent(840_000_000), limits: []proxy.Limit{orgTokens}, change: budgeted(month, rolling, budget("ever", dollar))}, call: completion},
		{name: "an answer cut short", setup: setup{money: spent(999_970_000), change: budgeted(strict(month))}, call: completion},
		{name: "a budget used up", setup: setup{money: spent(dollar), limits: []proxy.Limit{orgTokens}, change: budgeted(month)}, call: completion},
		{name: "a budget used up, Anthropic", setup: setup{money: spent(dollar), change: budgeted(month)}, call: messages},
		{name: "a budget used up, problem", setup: setup{money: spent(dollar), change: budgeted(month)}, call: call{path: completion.path, body: completion.body, header: problem}},
		{name: "a budget used up, 402", setup: setup{money: spent(dollar), broke: 402, change: budgeted(budget("ever", dollar))}, call: completion},
		{name: "a rolling budget used up", setup: setup{money: spent(dollar), change: budgeted(rolling)}, call: completion},
		{name: "a budget used up for good, Anthropic, 402", setup: setup{money: spent(dollar), broke: 402, change: budgeted(budget("ever", dollar))}, call: messages},
		{name: "more than a budget has", setup: setup{change: budgeted(budget("ever", 1000))}, call: completion},
		{name: "a budget in flight", setup: setup{money: refusing(&proxy.Broke{Kind: proxy.InFlight}), change: budgeted(month)}, call: completion},
		{name: "billing unavailable", setup: setup{money: refusing(&proxy.Broke{Index: -1, Kind: proxy.Unavailable}), limits: []proxy.Limit{orgTokens}, change: budgeted(month)}, call: completion, spread: true},
		{name: "billing unavailable, problem", setup: setup{money: refusing(&proxy.Broke{Kind: proxy.Unavailable}), change: budgeted(month)}, call: call{path: completion.path, body: completion.body, header: problem}, spread: true},
		{name: "what a strict budget cannot bound", setup: setup{change: budgeted(strict(month))}, call: call{path: "/v1/responses", body: `{"model":"m","input":"x","tools":[{"type":"mcp"}]}`}},
		{name: "panic", setup: setup{models: []*proxy.Model{{Name: "m", Cost: func(openai.Usage, int64, int64) int64 { panic("price") }}}}, call: completion},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := bubbled(t, c.setup)
			for _, b := range c.before {
				w.handle(b)
			}
			if c.taken {
				defer w.takeAway()()
			}
			a := w.handle(c.call)
			if c.spread {
				if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n < 1 || n > 20 {
					t.Errorf("%s: Retry-After: %q", c.name, a.header.Get("Retry-After"))
				}
				if m := spreadMS.FindStringSubmatch(a.body); m != nil && m[1] != a.header.Get("Retry-After-Ms") {
					t.Errorf("%s: %s ms in the body, %s in the header", c.name, m[1], a.header.Get("Retry-After-Ms"))
				}
				a.body = spreadMS.ReplaceAllString(a.body, `"retry_after_ms":SPREAD`)
				a.header["Retry-After"], a.header["Retry-After-Ms"] = []string{"SPREAD"}, []string{"SPREAD"}
			}
			fmt.Fprintf(&out, "== %s\n%s\n", c.name, a.show())
		})
	}
	golden(t, "headers.golden", out.String())
}

var spreadMS = regexp.MustCompile(`"retry_after_ms":(\d+)`)

// takeAway takes a slot of the backend, and one of the caller's first limit if that has
// slots, and returns what gives them back.
func (w *world) takeAway() (giveBack func()) {
	release := func() {}
	if w.places.slots["vllm"] > 0 {
		place := []queue.Place{{Backend: "vllm", Cost: 1}}
		release = must[*dispatch.Grant](w.t)(w.dispatch.Acquire(w.t.Context(), &dispatch.Ticket{Patience: time.Second, Places: place})).Release
	}
	if len(w.caller.Limits) == 0 || w.caller.Limits[0].Unit != proxy.Concurrency {
		return release
	}
	cs := []limiter.Charge{{Key: limiter.Key{Tenant: "acme", Limit: "concurrency", Subject: "k1"}, Limit: w.caller.Limits[0].Spec, Cost: 1}}
	ds := make([]limiter.Decision, 1)
	cs[0].Apart, cs[0].Private = limiter.ByPrivate, w.caller.Limits[0].Private
	if got := w.lender.Take(w.t.Context(), cs, ds); got != -1 {
		w.t.Fatalf("refused by %d", got)
	}
	return func() {
		w.lender.Settle(cs, []int64{0}, ds)
		release()
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := string(must[[]byte](t)(os.ReadFile(path)))
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			t.Fatalf("%s:%d: got\n%s\nwant\n%s", path, i+1, g[i], w[i])
		}
	}
	t.Fatalf("%s: got %d lines, want %d", path, len(g), len(w))
}
