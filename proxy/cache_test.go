package proxy_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy"
	"headgate/proxy/upstream"
)

// question is a chat whose answer is 16 tokens long and ends of itself.
const question = `{"model":"m","temperature":0,"messages":[{"role":"user","content":"what is it?"}]}`

// asked is how many requests for answers reached the model server.
func (w *world) asked() (n int) {
	for _, r := range w.fake.Log() {
		if r.Method == http.MethodPost {
			n++
		}
	}
	return n
}

// tier fails the test if the answer is not of that word of the cache's.
func (a answer) tier(t *testing.T, word string) answer {
	t.Helper()
	aged := word == "exact" || word == "stale"
	if got := a.header.Get("X-Headgate-Cache"); got != word || word != "live" && aged != (a.header.Get("Age") != "") {
		t.Fatalf("X-Headgate-Cache: %s, Age: %s, want %s; status %d: %s", got, a.header.Get("Age"), word, a.status, clip(a.body))
	}
	return a
}

// scripted is a model server that answers as a test says; n is the number of the request, from 1.
type scripted struct {
	calls atomic.Int64
	serve func(n int64, w http.ResponseWriter, r *http.Request)
}

func (s *scripted) around(http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			s.serve(s.calls.Add(1), w, r)
		}
	})
}

func script(serve func(n int64, w http.ResponseWriter, r *http.Request)) *scripted {
	return &scripted{serve: serve}
}

// says is a chat's whole answer, of 3 and 2 tokens.
func says(n int64, content string) string {
	return fmt.Sprintf(`{"id":"c-%d","object":"chat.completion","created":7,"model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":%q},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`, n, content)
}

// saysInPieces is the same as a stream.
func saysInPieces(n int64, pieces ...string) (frames []string) {
	head := fmt.Sprintf(`data: {"id":"c-%d","object":"chat.completion.chunk","created":7,"model":"fake","choices":[`, n)
	for i, p := range pieces {
		role := ""
		if i == 0 {
			role = `"role":"assistant",`
		}
		frames = append(frames, fmt.Sprintf(`%s{"index":0,"delta":{%s"content":%q},"finish_reason":null}]}`+"\n\n", head, role, p))
	}
	return append(frames, head+`{"index":0,"delta":{},"finish_reason":"stop"}]}`+"\n\n",
		head+`],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`+"\n\n", "data: [DONE]\n\n")
}

// emit writes and flushes.
func emit(w http.ResponseWriter, frames ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, f := range frames {
		_, _ = io.WriteString(w, f) // whoever reads it may be gone
		_ = http.NewResponseController(w).Flush()
	}
}

func plain(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, body)
}

// TestHitsCostRequestsAndSlots: and no tokens, no dollars, no budget, unless the plan says so.
func TestHitsCostRequestsAndSlots(t *testing.T) {
	for _, body := range []string{question, streaming(question)} {
		for _, metered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%t stream %t", metered, strings.Contains(body, "stream")), func(t *testing.T) {
				limits := []proxy.Limit{limit(proxy.Requests, 100), limit(proxy.Concurrency, 1), limit(proxy.Tokens, 1_000_000), limit(proxy.InputTokens, 1_000_000), limit(proxy.OutputTokens, 1_000_000), limit(proxy.USD, dollar)}
				w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}, limits: limits, change: func(c *proxy.Caller) {
					c.CachedMetered = metered
					c.Budgets = []proxy.Budget{budget("month", dollar), strict(budget("day", dollar))}
				}})
				h := header("X-Fake-Output", "9") // a strict budget has a cap written into the request, which the fake would fill
				first := w.do(call{body: body, header: h}).want(t, 200).tier(t, "miss")
				w.settled()
				paid := w.till.bill(t)
				before := map[string]int64{}
				for _, l := range limits {
					before[l.Bucket] = w.spent(l)
				}
				month, day := w.till.spent("month"), w.till.spent("day")
				saved := 0.0
				for i := int64(1); i <= 3; i++ {
					hit := w.do(call{body: body, header: h}).want(t, 200).tier(t, "exact")
					if !strings.Contains(body, "stream") && hit.body != first.body {
						t.Errorf("%s\nis replayed as\n%s", first.body, hit.body)
					}
					if hit.header.Get("X-Headgate-Backend") != "" || hit.header.Get("X-Headgate-Node") != "n1" {
						t.Errorf("%v", hit.header)
					}
					w.settled()
					costs := int64(0)
					if metered {
						costs = i
					}
					for _, l := range limits {
						want := before[l.Bucket] * costs
						switch l.Unit {
						case proxy.Requests:
							want = i
						case proxy.Concurrency:
							want = 0
						}
						const refills = 1000 // billionths of a dollar, while a slow machine gets here
						if got := w.spent(l) - before[l.Bucket]; got > want || got < want && (l.Unit != proxy.USD || got < want-refills) {
							t.Errorf("hit %d took %d of %s, want %d", i, got, l.Bucket, want)
						}
					}
					if m, d := w.till.spent("month")-month, w.till.spent("day")-day; m != month*costs || d != day*costs {
						t.Errorf("hit %d: %d and %d of the budgets, of which an answer costs %d and %d", i, m, d, month, day)
					}
					bill := w.till.bill(t)
					if bill.Tier != "exact" || bill.Cost != paid.Cost*min(costs, 1) || bill.Outcome != "ok" || bill.Status != 200 || bill.Backend != "" || bill.Cancelled ||
						bill.Usage.Input != paid.Usage.Input || bill.Usage.Output != paid.Usage.Output || bill.Surface != "faq" {
						t.Errorf("bill %+v\nof an answer that had %+v", bill, paid)
					}
					saved += float64(paid.Cost)
				}
				if n := w.asked(); n != 1 {
					t.Errorf("the model was asked %d times", n)
				}
				if got := w.metric("headgate_cache_saved_usd_total", "tenant", "acme") * dollar; int64(got+.5) != int64(saved) {
					t.Errorf("saved %v nano-dollars, want %v", got, saved)
				}
				if hits, misses := w.metric("headgate_cache_requests_total", "outcome", "exact"), w.metric("headgate_cache_requests_total", "outcome", "miss"); hits != 3 || misses != 1 {
					t.Errorf("%v hits and %v misses", hits, misses)
				}
			})
		}
	}
}

// TestHitsAreRefusedByTheirLimits: what they do cost they have to have.
func TestHitsAreRefusedByTheirLimits(t *testing.T) {
	w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}, limits: []proxy.Limit{limit(proxy.Requests, 2), limit(proxy.Tokens, 520)}})
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	w.do(call{body: question}).want(t, 200).tier(t, "exact") // though there are no tokens for another answer
	if a := w.do(call{body: question}).want(t, 429); a.field("limit") != "requests" {
		t.Errorf("%s", a.body)
	}
	w.proxy.SetSwitches(&proxy.Switches{Keys: map[string]*proxy.Kill{"k1": {Reason: "stolen"}}})
	if a := w.do(call{body: question}); a.field("code") != "killed" {
		t.Errorf("a killed key was answered %d %s", a.status, a.body)
	}
}

// TestWhatIsKept and what is not: only whole good answers that may be repeated.
func TestWhatIsKept(t *testing.T) {
	exact := func(change func(*proxy.ExactCache)) func(*proxy.Surface) {
		return func(s *proxy.Surface) { change(s.Exact) }
	}
	tooled := `{"model":"m","temperature":0,"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"}}}}}],"tool_choice":"required"}`
	with := func(member string) string { return strings.TrimSuffix(question, "}") + "," + member + "}" }
	warm := func(v string) string { return strings.Replace(question, `"temperature":0`, `"temperature":`+v, 1) }
	cold := strings.Replace(question, `"temperature":0,`, "", 1)
	for name, c := range map[string]struct {
		path, body string
		header     http.Header
		change     func(*proxy.Surface)
		model      float64 // its default temperature
		status     int     // 0: 200
		again      string  // what the cache says to the second; "": miss
	}{
		"an answer":                         {again: "exact"},
		"an answer of /v1/completions":      {path: "/v1/completions", body: `{"model":"m","prompt":"a","temperature":0}`, again: "exact"},
		"of /v1/messages":                   {path: "/v1/messages", body: `{"model":"m","max_tokens":9999,"messages":[{"role":"user","content":"x"}],"temperature":0}`, header: header("X-Fake-Output", "5"), again: "exact"},
		"of /v1/responses, not stored":      {path: "/v1/responses", body: `{"model":"m","input":"x","store":false,"temperature":0}`, again: "exact"},
		"stored by its backend":             {path: "/v1/responses", body: `{"model":"m","input":"x","temperature":0}`, again: "uncacheable"},
		"in the background":                 {path: "/v1/responses", body: `{"model":"m","input":"x","temperature":0,"background":true}`, again: "uncacheable"},
		"of a route that has none":          {path: "/tokenize", body: `{"model":"m","prompt":"a"}`, again: "uncacheable"},
		"an error 400":                      {header: fault("400"), status: 400},
		"an error 404":                      {header: fault("404"), status: 404},
		"an error 429":                      {header: fault("429"), status: 429},
		"an error 500":                      {header: fault("500"), status: 500},
		"an error 503":                      {header: fault("503"), status: 503},
		"what is no JSON":                   {header: fault("garbage"), status: 502, again: "miss"},
		"an error within":                   {body: streaming(question), header: fault("inband=3")},
		"a stream that broke off":           {body: streaming(question), header: fault("cut=3")},
		"a body that broke off":             {header: fault("cut=3"), status: 502},
		"a stream without its end":          {body: streaming(question), header: fault("nonewline"), again: "miss"},
		"a stream in odd parts":             {body: streaming(question), header: fault("split,comments,crlf"), again: "exact"},
		"a compressed answer":               {header: header("X-Fake-Fault", "gzip"), again: "exact"},
		"cut at its cap":                    {body: with(`"max_tokens":3`)},
		"a stream cut at its cap":           {body: streaming(with(`"max_tokens":3`))},
		"cut at its cap, where allowed":     {body: with(`"max_tokens":3`), change: exact(func(e *proxy.ExactCache) { e.Length = true }), again: "exact"},
		"a tool call":                       {body: tooled},
		"a streamed tool call":              {body: streaming(tooled)},
		"a tool call, where allowed":        {body: tooled, change: exact(func(e *proxy.ExactCache) { e.Tools = true }), again: "exact"},
		"a streamed one, where allowed":     {body: streaming(tooled), change: exact(func(e *proxy.ExactCache) { e.Tools = true }), again: "exact"},
		"several choices":                   {body: with(`"n":2`), again: "uncacheable"},
		"several choices, where allowed":    {body: with(`"n":2`), change: exact(func(e *proxy.ExactCache) { e.Many = true }), again: "exact"},
		"warm":                              {body: warm("0.7"), again: "uncacheable"},
		"warm, below the ceiling":           {body: warm("0.7"), change: exact(func(e *proxy.ExactCache) { e.Temperature = .7 }), again: "exact"},
		"above the ceiling":                 {body: warm("0.71"), change: exact(func(e *proxy.ExactCache) { e.Temperature = .7 }), again: "uncacheable"},
		"warm, with a seed":                 {body: strings.Replace(warm("0.7"), "{", `{"seed":4,`, 1), again: "exact"},
		"without a temperature":             {body: cold, model: 1, again: "uncacheable"},
		"without one, below the ceiling":    {body: cold, model: 1, change: exact(func(e *proxy.ExactCache) { e.Temperature = 1 }), again: "exact"},
		"without one, of a cold model":      {body: cold, again: "exact"},
		"without one, with a seed":          {body: with(`"seed":1`), model: 1, again: "exact"},
		"an answer with usage in each part": {body: streaming(with(`"stream_options":{"include_usage":true,"continuous_usage_stats":true}`)), again: "uncacheable"},
		"larger than the surface's most":    {change: exact(func(e *proxy.ExactCache) { e.MaxBytes = 50 })},
		"bypassed":                          {header: header("X-Headgate-Cache", "bypass"), again: "bypass"},
		"refreshed each time":               {header: header("X-Headgate-Cache", "refresh")},
		"no user of a personal surface":     {change: func(s *proxy.Surface) { s.Personal, s.Share = true, false }, again: "uncacheable"},
		"a user of a personal surface":      {header: header("X-Headgate-User", "ann"), change: func(s *proxy.Surface) { s.Personal, s.Share = true, false }, again: "exact"},
		"no cache":                          {change: func(s *proxy.Surface) { s.Exact = nil }, again: "none"},
		"of another surface without one":    {header: header("X-Headgate-Surface", "docs"), again: "none"},
	} {
		t.Run(name, func(t *testing.T) {
			surface := faq()
			if c.change != nil {
				c.change(surface)
			}
			m := model("m", "vllm")
			m.DefaultTemperature = c.model
			w := newWorld(t, setup{surfaces: []*proxy.Surface{surface}, models: []*proxy.Model{m}, prefilter: edge1000()})
			if c.body == "" {
				c.body = question
			}
			if c.status == 0 {
				c.status = 200
			}
			word := c.again
			switch c.again {
			case "exact", "":
				word = "miss"
			case "none":
				word = ""
			}
			for i := range 3 {
				w.later(call{path: c.path, body: c.body, header: c.header}).want(t, c.status).tier(t, word)
				if i == 0 && c.again == "exact" {
					word = "exact"
				}
			}
			want := 3
			if c.again == "exact" {
				want = 1
			}
			if n := w.asked(); n != want {
				t.Errorf("the model was asked %d times, want %d", n, want)
			}
		})
	}
}

// TestAnswersThatSayWhatTheyAre: whether an answer is kept depends on what is in it.
func TestAnswersThatSayWhatTheyAre(t *testing.T) {
	today := time.Now().Format("2 January 2006")
	for name, c := range map[string]struct {
		content string
		header  http.Header // of the answer
		body    string      // for the content
		ok      bool        // the surface keeps timestamps
		kept    bool
	}{
		"nothing in particular":       {content: "forty-two", kept: true},
		"today's date":                {content: "Today is " + today + "."},
		"a clock time":                {content: "It is 14:05:09 now."},
		"a clock time, where allowed": {content: "It is 14:05:09 now.", ok: true, kept: true},
		"no-store":                    {content: "x", header: header("Cache-Control", "max-age=0, no-store")},
		"private":                     {content: "x", header: header("Cache-Control", "private")},
		"public":                      {content: "x", header: header("Cache-Control", "public, max-age=60"), kept: true},
		"a tag":                       {content: "x", header: header("X-Headgate-Cache-Tags", "doc-1, doc-2"), kept: true},
		"a tag that nobody can end":   {content: "x", header: header("X-Headgate-Cache-Tags", "doc 1")},
		"more tags than may be":       {content: "x", header: header("X-Headgate-Cache-Tags", manyTags())},
		"an error under status 200":   {body: `{"error":{"message":"out of memory","type":"server_error"}}`},
		"an error object beside text": {body: strings.Replace(says(1, "x"), `"usage"`, `"error":{"message":"no"},"usage"`, 1)},
		"nothing at all":              {body: `{}`},
		"no choice":                   {body: `{"id":"c","object":"chat.completion","created":7,"model":"fake","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0,"total_tokens":3}}`},
		"a choice that has not ended": {body: strings.Replace(says(1, "x"), `"stop"`, `null`, 1)},
		"a content filter's end":      {body: strings.Replace(says(1, "x"), `"stop"`, `"content_filter"`, 1), kept: true},
	} {
		t.Run(name, func(t *testing.T) {
			up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
				maps.Copy(w.Header(), c.header)
				body := c.body
				if body == "" {
					body = says(n, c.content)
				}
				plain(w, body)
			})
			w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Timestamps = c.ok })}})
			first := w.do(call{body: question}).want(t, 200).tier(t, "miss")
			word, calls := "miss", int64(2)
			if c.kept {
				word, calls = "exact", 1
			}
			second := w.later(call{body: question}).want(t, 200).tier(t, word)
			if up.calls.Load() != calls || c.kept && first.body != second.body {
				t.Errorf("%d calls; %s\n%s", up.calls.Load(), first.body, second.body)
			}
			if first.header.Get("X-Headgate-Cache-Tags") != "" {
				t.Error("the client got the backend's tags")
			}
		})
	}
}

// TestStreamsAndWholeAnswersShare: an answer is kept once, and told as each client wants it.
func TestStreamsAndWholeAnswersShare(t *testing.T) {
	usage := func(body string) string {
		return strings.TrimSuffix(body, "}") + `,"stream_options":{"include_usage":true}}`
	}
	for name, c := range map[string]struct{ path, body, end string }{
		"chat":     {"/v1/chat/completions", question, "data: [DONE]"},
		"text":     {"/v1/completions", `{"model":"m","prompt":"a","temperature":0}`, "data: [DONE]"},
		"message":  {"/v1/messages", `{"model":"m","max_tokens":9999,"messages":[{"role":"user","content":"x"}],"temperature":0}`, `data: {"type":"message_stop"}`},
		"response": {"/v1/responses", `{"model":"m","input":"x","store":false,"temperature":0}`, ""},
	} {
		for _, first := range []string{"whole", "stream", "usage"} {
			t.Run(name+" from "+first, func(t *testing.T) {
				shapes := map[string]string{"whole": c.body, "stream": streaming(c.body)}
				if c.end == "data: [DONE]" {
					shapes["usage"] = usage(streaming(c.body))
				} else if first == "usage" {
					t.Skip("streams of this kind always have it")
				}
				w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}})
				h := header("X-Fake-Output", "7")
				fresh := map[string]string{}
				for shape, body := range shapes {
					a := w.do(call{path: c.path, body: body, header: header("X-Fake-Output", "7", "X-Headgate-Cache", "bypass")}).want(t, 200)
					fresh[shape] = a.body
				}
				w.do(call{path: c.path, body: shapes[first], header: h}).want(t, 200).tier(t, "miss")
				before := w.asked()
				for shape, body := range shapes {
					a := w.do(call{path: c.path, body: body, header: h}).want(t, 200).tier(t, "exact")
					kind := "application/json"
					if shape != "whole" {
						kind = "text/event-stream"
						if !strings.Contains(a.body, c.end) {
							t.Errorf("%s: no end: %s", shape, a.body)
						}
					}
					if !strings.HasPrefix(a.header.Get("Content-Type"), kind) || a.header.Get("Age") != "0" {
						t.Errorf("%s: %v", shape, a.header)
					}
					if got, want := told(a.body), told(fresh[shape]); got != want {
						t.Errorf("%s: replayed\n%s\nis not what is fresh:\n%s", shape, got, want)
					}
				}
				if n := w.asked() - before; n != 0 {
					t.Errorf("%d hits asked the model", n)
				}
			})
		}
	}
}

// told is what an answer says, without how it was cut: of each member that holds text all of it, of the others
// their sorts.
func told(body string) string {
	texts, sorts := map[string]string{}, map[string]bool{}
	var walk func(v any, place string)
	walk = func(v any, place string) {
		switch v := v.(type) {
		case map[string]any:
			for k, x := range v {
				if k != "sequence_number" && k != "item_id" {
					walk(x, place+"."+k)
				}
			}
		case []any:
			for _, x := range v {
				walk(x, place)
			}
		default:
			leaf := fmt.Sprint(v)
			if strings.HasPrefix(leaf, "resp_") || strings.HasPrefix(leaf, "msg_") { // the fake counts these
				leaf = leaf[:4]
			}
			if strings.HasSuffix(place, ".content") || strings.HasSuffix(place, ".text") || strings.HasSuffix(place, ".delta") {
				texts[place] += leaf
			} else if leaf != "<nil>" && place != "message_start.message.usage.output_tokens" {
				sorts[place+"="+leaf] = true
			}
		}
	}
	frames := []string{body}
	if strings.Contains(body, "data: ") {
		frames = frames[:0]
		for line := range strings.Lines(body) {
			if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: "); ok && data != "[DONE]" {
				frames = append(frames, data)
			}
		}
	}
	for _, f := range frames {
		var v map[string]any
		if err := json.Unmarshal([]byte(f), &v); err != nil {
			return "no JSON: " + f
		}
		if v["type"] == "ping" {
			continue
		}
		typ, _ := v["type"].(string)
		walk(v, typ)
	}
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(texts)) {
		fmt.Fprintf(&b, "%s: %q\n", k, texts[k])
	}
	for _, k := range slices.Sorted(maps.Keys(sorts)) {
		fmt.Fprintln(&b, k)
	}
	return b.String()
}

// TestWhoseAnswer: people of a tenant share where their surface does, and tenants never do.
func TestWhoseAnswer(t *testing.T) {
	ann, bob := header("X-Headgate-User", "ann"), header("X-Headgate-User", "bob")
	named := func(user string) string { return strings.TrimSuffix(question, "}") + `,"user":"` + user + `"}` }
	for name, c := range map[string]struct {
		first, second call
		share, own    bool // a hit where the surface shares, or not
	}{
		"the same":                                {call{}, call{}, true, true},
		"two users":                               {call{header: ann}, call{header: bob}, true, false},
		"the same user":                           {call{header: ann}, call{header: ann}, true, true},
		"a user and nobody":                       {call{header: ann}, call{}, true, false},
		"two keys of no user":                     {call{}, call{key: "anonymous"}, true, false},
		"two keys of one user":                    {call{header: ann}, call{key: "ann"}, true, true},
		"two users in the body":                   {call{body: named("ann")}, call{body: named("bob")}, true, false},
		"a user in the header and in the body":    {call{header: ann, body: named("ann")}, call{body: named("ann")}, true, true},
		"two users claimed without the right":     {call{key: "anonymous", body: named("ann")}, call{key: "anonymous", body: named("bob")}, true, false},
		"one claimed without the right, and none": {call{key: "anonymous", body: named("ann")}, call{key: "anonymous"}, true, false},
		"claimed, and the true one":               {call{key: "anonymous", body: named("ann")}, call{body: named("ann")}, true, false},
		"a user named like a key":                 {call{}, call{key: "named"}, true, false},
		"two tenants":                             {call{}, call{key: "other"}, false, false},
		"two tenants, one user":                   {call{header: ann}, call{key: "other ann"}, false, false},
	} {
		for _, share := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, shared %t", name, share), func(t *testing.T) {
				w := newWorld(t, setup{surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Share = share })}, callers: map[string]*proxy.Caller{
					"anonymous": {KeyID: "k2", Tenant: "acme", OnlySurface: "faq"},
					"ann":       {KeyID: "k3", Tenant: "acme", OnlySurface: "faq", User: "ann"},
					"named":     {KeyID: "k4", Tenant: "acme", OnlySurface: "faq", User: "k1"},
					"other":     {KeyID: "k1", Tenant: "globex", OnlySurface: "faq"},
					"other ann": {KeyID: "k5", Tenant: "globex", OnlySurface: "faq", User: "ann"},
				}})
				want := c.own
				if share {
					want = c.share
				}
				for i, r := range []call{c.first, c.second} {
					if r.body == "" {
						r.body = question
					}
					word := "miss"
					if i == 1 && want {
						word = "exact"
					}
					w.do(r).want(t, 200).tier(t, word)
				}
			})
		}
	}
	t.Run("without the right", func(t *testing.T) {
		w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}, callers: map[string]*proxy.Caller{"anonymous": {KeyID: "k2", Tenant: "acme", OnlySurface: "faq"}}})
		w.do(call{body: question, header: ann}).want(t, 200)
		w.do(call{body: question, key: "anonymous", header: ann}).want(t, 403)
		w.do(call{body: question, key: "anonymous", header: header("X-Headgate-Surface", "faq")}).want(t, 403)
	})
}

// TestWhatIsTheSame: two requests have one answer where nothing in them can make a difference.
func TestWhatIsTheSame(t *testing.T) {
	const base = `{"model":"m","temperature":1,"seed":7,"messages":[{"role":"user","content":"Is \u00e9 é?"}],"options":{"num_ctx":2048,"a":[1,2]}}`
	swap := func(from, to string) string {
		if !strings.Contains(base, from) {
			t.Fatalf("%q is not in the base", from)
		}
		return strings.Replace(base, from, to, 1)
	}
	add := func(member string) string { return strings.TrimSuffix(base, "}") + "," + member + "}" }
	for name, c := range map[string]struct {
		body, path string
		header     http.Header
		normalize  string
		same       bool
	}{
		"nothing":                       {body: base, same: true},
		"the order of members":          {body: `{"options":{"a":[1,2],"num_ctx":2048},"messages":[{"content":"Is \u00e9 é?","role":"user"}],"seed":7,"temperature":1,"model":"m"}`, same: true},
		"white space":                   {body: strings.ReplaceAll(base, `,"`, ", \n\t\""), same: true},
		"1.0 for 1":                     {body: swap(`"temperature":1`, `"temperature":1.0`), same: true},
		"1e0 for 1":                     {body: swap(`[1,2]`, `[1e0,20e-1]`), same: true},
		"another number":                {body: swap(`[1,2]`, `[1,2.0000000000000000001]`)},
		"2^53 and one more":             {body: swap(`[1,2]`, `[1,9007199254740993]`)},
		"an escape":                     {body: swap(`\u00e9`, "é"), same: true},
		"the decomposed form":           {body: swap(`\u00e9`, `e\u0301`)},
		"an upper case":                 {body: swap(`Is `, `IS `)},
		"an upper case, folded":         {body: swap(`Is `, `IS `), normalize: "fold", same: true},
		"the decomposed form, spaced":   {body: swap(`\u00e9`, `e\u0301`), normalize: "space", same: true},
		"two blanks":                    {body: swap(`Is `, `Is  `)},
		"two blanks, spaced":            {body: swap(`Is `, ` Is  `), normalize: "space", same: true},
		"num_ctx":                       {body: swap(`2048`, `4096`)},
		"an option more":                {body: add(`"parallel_tool_calls":false`)},
		"a prediction":                  {body: add(`"prediction":{"type":"content","content":"x"}`)},
		"a null more":                   {body: add(`"stop":null`)},
		"the order in an array":         {body: swap(`[1,2]`, `[2,1]`)},
		"a stream":                      {body: add(`"stream":true`), same: true},
		"a stream with usage":           {body: add(`"stream":true,"stream_options":{"include_usage":true}`), same: true},
		"metadata":                      {body: add(`"metadata":{"trace":"1"}`), same: true},
		"the user, on a shared surface": {body: add(`"user":"ann"`), same: true},
		"another seed":                  {body: swap(`"seed":7`, `"seed":8`)},
		"another model":                 {body: swap(`"model":"m"`, `"model":"n"`)},
		"its alias":                     {body: swap(`"model":"m"`, `"model":"alias"`), same: true},
		"a query":                       {body: base, path: "/v1/chat/completions?a=b"},
		"a header that may matter":      {body: base, header: header("Anthropic-Beta", "x")},
		"a header that may not":         {body: base, header: header("Traceparent", "00-1", "X-Stainless-Lang", "go", "User-Agent", "x", "X-Request-Id", "r-1"), same: true},
		"another class":                 {body: base, header: header("X-Headgate-Class", "background"), same: true},
		"another surface":               {body: base, header: header("X-Headgate-Surface", "twin")},
	} {
		t.Run(name, func(t *testing.T) {
			s := faqWith(func(s *proxy.Surface) { s.Exact.Normalize = c.normalize; s.Exact.Timestamps = true })
			twin := *s
			twin.Name = "twin"
			other := model("n", "vllm")
			w := newWorld(t, setup{
				fake: fakevllm.Config{Models: []string{"fake", "fake2"}}, surfaces: []*proxy.Surface{s, &twin}, aliases: map[string]string{"alias": "m"},
				models: []*proxy.Model{model("m", "vllm"), changed(other, func(m *proxy.Model) { m.Upstream = "fake2" })},
			})
			w.do(call{body: base}).want(t, 200).tier(t, "miss")
			word := "miss"
			if c.same {
				word = "exact"
			}
			w.do(call{body: c.body, path: c.path, header: c.header}).want(t, 200).tier(t, word)
			w.do(call{body: c.body, path: c.path, header: c.header}).want(t, 200).tier(t, "exact")
		})
	}
	for name, body := range map[string]string{
		"a member twice":      `{"model":"m","temperature":0,"messages":[{"role":"user","content":"x","content":"y"}]}`,
		"half a surrogate":    `{"model":"m","temperature":0,"messages":[{"role":"user","content":"\ud800"}]}`,
		"an option twice too": `{"model":"m","temperature":0,"a":1,"a":2,"messages":[{"role":"user","content":"x"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}})
			a := w.do(call{body: body})
			if n := w.asked(); a.status == 200 && a.header.Get("X-Headgate-Cache") != "uncacheable" || a.status != 200 && n != 0 {
				t.Errorf("%d, asked %d times: %s", a.status, n, a.body)
			}
		})
	}
}

// manyTags are more than a request or an answer may have.
func manyTags() string {
	var b strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&b, "t%d,", i)
	}
	return b.String()
}

func changed(m *proxy.Model, change func(*proxy.Model)) *proxy.Model {
	change(m)
	return m
}

// TestPolicyIsInTheKey: an answer is not another's where the operator changed what it is made of.
func TestPolicyIsInTheKey(t *testing.T) {
	s := setup{surfaces: []*proxy.Surface{faq()}, backends: nil}
	w := newWorld(t, s)
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
	for _, change := range []func(){
		func() { s.surfaces = []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Template = "v2" })} },
		func() {
			s.models = []*proxy.Model{changed(model("m", "vllm"), func(m *proxy.Model) { m.Version = "2" })}
		},
		func() { w.shelf.raise("acme", "faq") },
		func() { w.shelf.raise("", "faq") },
		func() { w.shelf.raise("acme", "") },
		func() { w.shelf.raise("", "") },
	} {
		change()
		w.apply(s)
		w.do(call{body: question}).want(t, 200).tier(t, "miss")
		w.do(call{body: question}).want(t, 200).tier(t, "exact")
	}
	w.shelf.raise("globex", "faq")
	w.shelf.raise("acme", "docs")
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
}

// TestTags: an answer ends by its tags, of the request or of the backend, and by no other tenant's.
func TestTags(t *testing.T) {
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Headgate-Cache-Tags", "by-backend")
		plain(w, says(n, "x"))
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	h := header("X-Headgate-Cache-Tags", "doc-1, doc-2,,doc-1")
	h.Add("X-Headgate-Cache-Tags", "größe")
	ask := func(word string) {
		t.Helper()
		w.do(call{body: question, header: h}).want(t, 200).tier(t, word)
	}
	ask("miss")
	ask("exact")
	w.shelf.untag("globex", "doc-1")
	w.shelf.untag("acme", "doc-3")
	ask("exact")
	for _, tag := range []string{"doc-1", "doc-2", "größe", "by-backend"} {
		w.shelf.untag("acme", tag)
		ask("miss")
		ask("exact")
	}
	for name, bad := range map[string]string{
		"a blank within": "a b", "a control character": "a\tb", "too long": strings.Repeat("x", 129), "too many": manyTags(), "no UTF-8": "a\xff",
	} {
		a := w.do(call{body: question, header: http.Header{"X-Headgate-Cache-Tags": {bad}}})
		if a.status != 400 || a.field("param") != "X-Headgate-Cache-Tags" {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}

// TestAskedOfTheCache: what a client may say of it.
func TestAskedOfTheCache(t *testing.T) {
	w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}})
	ask := func(mode, word string, status int) answer {
		t.Helper()
		a := w.later(call{body: question, header: header("X-Headgate-Cache", mode)}).want(t, status)
		if status == 200 {
			a.tier(t, word)
		}
		return a
	}
	if a := ask("only", "", 504); a.field("code") != "not_cached" || a.header.Get("X-Should-Retry") != "false" {
		t.Errorf("%v %s", a.header, a.body)
	}
	ask("bypass", "bypass", 200)
	ask("only", "", 504)
	ask("refresh", "miss", 200)
	ask("only", "exact", 200)
	w.shelf.pass(5 * time.Minute)
	if age := w.do(call{body: question}).want(t, 200).header.Get("Age"); age != "300" {
		t.Errorf("Age %s after five minutes", age)
	}
	ask("refresh", "miss", 200)
	if age := w.do(call{body: question}).want(t, 200).header.Get("Age"); age != "0" {
		t.Errorf("Age %s after a refresh", age)
	}
	if a := ask("no", "", 400); a.field("param") != "X-Headgate-Cache" {
		t.Errorf("%s", a.body)
	}
	if n := w.asked(); n != 3 {
		t.Errorf("the model was asked %d times, want 3", n)
	}
	a := w.do(call{body: strings.Replace(question, `"temperature":0`, `"temperature":2`, 1), header: header("X-Headgate-Cache", "only")})
	a.refused(t, 504, "not_cached")
	if !strings.Contains(a.body, "temperature") {
		t.Errorf("%s does not say why", a.body)
	}
	w.do(call{body: question, header: header("X-Headgate-Cache", "only", "X-Headgate-Surface", "none")}).refused(t, 504, "not_cached")
}

// TestLargeAnswersPass: untouched, and are not kept.
func TestLargeAnswersPass(t *testing.T) {
	const size = 50 << 20
	large := append(append([]byte(`{"id":"c","object":"chat.completion","created":7,"model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":"`),
		bytes.Repeat([]byte("abcdefgh"), size/8)...), []byte(`"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`)...)
	up := script(func(_ int64, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(large)
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.MaxBytes = 16 << 20 })}})
	want := sha256.Sum256(large)
	for range 2 {
		a := w.do(call{body: question}).want(t, 200).tier(t, "miss")
		if got := sha256.Sum256([]byte(a.body)); got != want || a.err != nil {
			t.Errorf("%d bytes of %d came, error %v", len(a.body), len(large), a.err)
		}
	}
	if up.calls.Load() != 2 || w.shelf.store.Stats().Entries != 0 {
		t.Errorf("%d calls, %+v", up.calls.Load(), w.shelf.store.Stats())
	}
}

// TestTroubleDoesNotEndHits: what is at hand is served whatever becomes of the fleet, unless that is killed.
func TestTroubleDoesNotEndHits(t *testing.T) {
	down := &atomic.Bool{}
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		if down.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		plain(w, says(n, "x"))
	})
	hears := &atomic.Bool{}
	hears.Store(true)
	volatile := faqWith(func(s *proxy.Surface) { s.Name = "live"; s.Exact.Volatile = true })
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq(), volatile}, hearing: hears.Load})
	best := header("X-Headgate-Class", "best_effort")
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	w.do(call{body: question, header: header("X-Headgate-Surface", "live")}).want(t, 200).tier(t, "miss")
	w.proxy.SetSwitches(&proxy.Switches{Rungs: map[string]time.Time{"shed_best_effort": {}}})
	w.do(call{body: question, header: best}).want(t, 200).tier(t, "exact")
	w.do(call{body: strings.Replace(question, "what", "who", 1), header: best}).refused(t, 429, "over_capacity")
	w.proxy.SetSwitches(&proxy.Switches{Global: &proxy.Kill{Reason: "all of it"}})
	if a := w.do(call{body: question}); a.field("code") != "killed" {
		t.Errorf("%d %s", a.status, a.body)
	}
	w.proxy.SetSwitches(&proxy.Switches{Models: map[string]*proxy.Kill{"m": {Reason: "wrong answers"}}})
	if a := w.do(call{body: question}); a.field("code") != "killed" {
		t.Errorf("%d %s", a.status, a.body)
	}
	w.proxy.SetSwitches(nil)
	down.Store(true)
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
	hears.Store(false)
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
	w.do(call{body: question, header: header("X-Headgate-Surface", "live")}).want(t, 503).tier(t, "uncacheable")
}

// TestFallbacksHaveAnswersOfTheirOwn: what a fallback answered is kept as its own, and found again.
func TestFallbacksHaveAnswersOfTheirOwn(t *testing.T) {
	small := changed(model("small", "vllm"), func(m *proxy.Model) { m.Upstream = "fake2" })
	big := changed(model("big", "gone"), func(m *proxy.Model) { m.Fallback = []string{"small"} })
	w := newWorld(t, setup{
		fake: fakevllm.Config{Models: []string{"fake", "fake2"}}, surfaces: []*proxy.Surface{faq()}, models: []*proxy.Model{big, small},
		backends: []upstream.Backend{{Name: "gone", URL: closedPort(t)}, {Name: "vllm"}},
	})
	body := strings.Replace(question, `"m"`, `"big"`, 1)
	for _, word := range []string{"miss", "exact", "exact"} {
		a := w.do(call{body: body}).want(t, 200).tier(t, word)
		if d := a.header.Get("X-Headgate-Degraded"); d != "model=small" {
			t.Errorf("X-Headgate-Degraded: %s", d)
		}
	}
	w.do(call{body: strings.Replace(question, `"m"`, `"small"`, 1)}).want(t, 200).tier(t, "exact")
	if b := w.till.bill(t); b.Model != "small" || b.Cost != 0 {
		t.Errorf("%+v", b)
	}
	if n := w.asked(); n != 1 {
		t.Errorf("the model was asked %d times", n)
	}
}
