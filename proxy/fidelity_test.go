package proxy_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"headgate/bench/fakevllm"
	"headgate/proxy"
)

// TestRequestBytes: what reaches the model server is what the client sent, byte for
// byte, but for the model's name and, on streams, the question for usage.
func TestRequestBytes(t *testing.T) {
	const messages = `"messages":[{"role":"user","content":"hi"}]`
	usage := `"stream_options":{"include_usage":true}`
	for _, c := range []struct{ path, sent, want string }{
		{"", `{"model":"m",` + messages + `}`, `{"model":"fake",` + messages + `}`},
		{"", "\n\t { \"z\" : [ 1 , 2.50 , 1e-7 ] ,\r\n \"model\"\t:\n\"m\" , " + messages + " }\n ", "\n\t { \"z\" : [ 1 , 2.50 , 1e-7 ] ,\r\n \"model\"\t:\n\"fake\" , " + messages + " }\n "},
		{"", `{` + messages + `,"future":{"b":1,"a":[{}],"model":"m"},"\u00e9":"\ud83d\ude80 \/","model":"m"}`, `{` + messages + `,"future":{"b":1,"a":[{}],"model":"m"},"\u00e9":"\ud83d\ude80 \/","model":"fake"}`},
		{"", `{"\u006dodel":"\u006d",` + messages + `}`, `{"\u006dodel":"fake",` + messages + `}`},
		{"", `{` + messages + `}`, `{"model":"fake",` + messages + `}`}, // the key has one model only
		{"", `{"model":"m","seed":12345678901234567890,"temperature":0.10000000000000000001,` + messages + `}`, `{"model":"fake","seed":12345678901234567890,"temperature":0.10000000000000000001,` + messages + `}`},
		{"", `{"model":"m","stream":false,` + messages + `}`, `{"model":"fake","stream":false,` + messages + `}`},
		{"", `{"model":"m","stream":null,` + messages + `}`, `{"model":"fake","stream":null,` + messages + `}`},
		{"", `{"model":"m","stream":true,` + messages + `}`, `{"model":"fake","stream":true,` + usage + `,` + messages + `}`},
		{"", `{"model":"m","stream" : true , ` + messages + `}`, `{"model":"fake","stream" : true,` + usage + ` , ` + messages + `}`},
		{"", `{"model":"m","stream":true,"stream_options":null,` + messages + `}`, `{"model":"fake","stream":true,` + usage + `,` + messages + `}`},
		{"", `{"model":"m","stream":true,"stream_options":{},` + messages + `}`, `{"model":"fake","stream":true,` + usage + `,` + messages + `}`},
		{"", `{"model":"m","stream":true,"stream_options":{ "x" : 1 },` + messages + `}`, `{"model":"fake","stream":true,"stream_options":{"include_usage":true, "x" : 1 },` + messages + `}`},
		{"", `{"model":"m","stream":true,"stream_options":{"include_usage": false ,"x":1},` + messages + `}`, `{"model":"fake","stream":true,"stream_options":{"include_usage": true ,"x":1},` + messages + `}`},
		{"", `{"model":"m","stream":true,"stream_options":{"include_usage":true,"x":[1, 2]},` + messages + `}`, `{"model":"fake","stream":true,"stream_options":{"include_usage":true,"x":[1, 2]},` + messages + `}`},
		{"/v1/messages", `{"model":"m","max_tokens":3,"stream":true,` + messages + `,"thinking":{"type":"disabled"}}`, `{"model":"fake","max_tokens":3,"stream":true,` + messages + `,"thinking":{"type":"disabled"}}`},
		{"/v1/responses", `{"model":"m","stream":true,"input":"hi","reasoning":{"effort":"low"}}`, `{"model":"fake","stream":true,"input":"hi","reasoning":{"effort":"low"}}`},
		{"/v1/embeddings", `{"input":["a","b"],"encoding_format":"float","model":"m"}`, `{"input":["a","b"],"encoding_format":"float","model":"fake"}`},
		{"/score", `{"text_1":"a","text_2":["b","c"],"model":"m","activation":true}`, `{"text_1":"a","text_2":["b","c"],"model":"fake","activation":true}`},
		{"/tokenize", `{"prompt":"abc","model":"m","add_special_tokens":false}`, `{"prompt":"abc","model":"fake","add_special_tokens":false}`},
	} {
		w := newWorld(t, setup{})
		w.do(call{path: c.path, body: c.sent}).want(t, 200)
		if got := string(w.last().Body); got != c.want {
			t.Errorf("%s\n%q arrived as\n%q, want\n%q", c.path, c.sent, got, c.want)
		}
	}
}

// TestRequestHeaders: the client's own reach the model server; its key, and what it says
// to the gateway, do not.
func TestRequestHeaders(t *testing.T) {
	seen := make(chan *http.Request, 1)
	w := newWorld(t, setup{around: func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { seen <- r.Clone(r.Context()); next.ServeHTTP(w, r) })
	}, change: func(c *proxy.Caller) { c.AssertUser, c.AnySurface = true, true }})
	h := header("User-Agent", "sdk/1", "Traceparent", "00-1", "X-Stainless-Lang", "go", "Anthropic-Version", "2023-06-01", "X-Request-Id", "abc-1",
		"X-Api-Key", "other", "Connection", "keep-alive, X-Hop", "X-Hop", "1", "Keep-Alive", "5", "Te", "trailers", "Proxy-Authorization", "x",
		"X-Headgate-User", "ann", "X-Headgate-Surface", "docs", "X-Headgate-Class", "background", "X-Headgate-Timeout", "30", "Accept-Encoding", "br, gzip")
	a := w.do(call{path: "/v1/chat/completions?a=b&c=%20d", body: chat, header: h}).want(t, 200)
	r := <-seen
	for name, want := range map[string]string{
		"User-Agent": "sdk/1", "Traceparent": "00-1", "X-Stainless-Lang": "go", "Anthropic-Version": "2023-06-01",
		"Content-Type": "application/json", "Accept-Encoding": "gzip", "X-Api-Key": "", "Authorization": "", "X-Hop": "", "Keep-Alive": "", "Te": "", "Proxy-Authorization": "",
		"X-Headgate-User": "", "X-Headgate-Surface": "", "X-Headgate-Class": "", "X-Headgate-Timeout": "",
	} {
		if got := r.Header.Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if r.URL.RawQuery != "a=b&c=%20d" || r.Host != strings.TrimPrefix(w.upstream.URL, "http://") || a.header.Get("X-Request-Id") != "abc-1" {
		t.Errorf("query %q, host %q, answered as %q", r.URL.RawQuery, r.Host, a.header.Get("X-Request-Id"))
	}
}

// TestAnswerBytes: the client gets what the model server would have given it directly,
// whatever the server's habits, although the gateway asks for usage behind its back.
func TestAnswerBytes(t *testing.T) {
	bodies := generating()
	bodies["/v1/embeddings"] = `{"model":"m","input":["a","b"]}`
	bodies["/tokenize"] = `{"model":"m","prompt":"hello there"}`
	bodies["/rerank"] = `{"model":"m","query":"a","documents":["b","c"]}`
	for _, habit := range []string{"", "split", "comments", "crlf", "nonewline", "contusage", "inband=2", "400", "503", "nousage", "lieusage=huge"} {
		for path, body := range bodies {
			variants := []string{body}
			if strings.Contains(body, "tokens\":5") {
				variants = append(variants, streaming(body), streaming(long(body)))
			}
			if strings.Contains(path, "completions") {
				s := strings.TrimSuffix(streaming(body), "}")
				variants = append(variants, s+`,"stream_options":{"include_usage":true}}`, s+`,"stream_options":{"include_usage":false,"continuous_usage_stats":true}}`,
					s+`,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`, s+`,"n":3,"stream_options":{"include_usage":false}}`)
			}
			for _, v := range variants {
				direct := newFake(t).do(t, path, strings.Replace(v, `"m"`, `"fake"`, 1), habit)
				w := newWorld(t, setup{})
				got := w.do(call{path: path, body: v, header: fault(habit)})
				g, d := got.body, direct.Body.String()
				switch habit { // what the hidden chunk brings with it
				case "comments":
					g, d = strings.ReplaceAll(g, ": tick\n\n", ""), strings.ReplaceAll(d, ": tick\n\n", "")
				case "nonewline":
					g, d = strings.TrimRight(g, "\n"), strings.TrimRight(d, "\n")
				}
				if got.status != direct.Code || g != d || got.err != nil {
					t.Errorf("%s %s %q: %v\ngot      %d %q\ndirectly %d %q", habit, path, v, got.err, got.status, clip(g), direct.Code, clip(d))
				}
				for _, name := range []string{"Content-Type", "Content-Length", "Cache-Control", "Retry-After"} {
					if g, d := got.header.Get(name), direct.Header().Get(name); g != d {
						t.Errorf("%s %s: %s %q, directly %q", habit, path, name, g, d)
					}
				}
			}
		}
	}
}

// lone is a model server without a gateway, so that the first request of both has the
// same number.
type lone struct{ h http.Handler }

func newFake(t *testing.T) lone {
	return lone{must[*fakevllm.Server](t)(fakevllm.New(fakevllm.Config{})).Handler()}
}

func (l lone) do(t *testing.T, path, body, habit string) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader(body))
	r.Header = fault(habit)
	rec := httptest.NewRecorder()
	l.h.ServeHTTP(rec, r)
	return rec
}

// TestFirstBytesComeAtOnce: an event is here before the model server has made the next.
func TestFirstBytesComeAtOnce(t *testing.T) {
	for path, body := range generating() {
		w := newWorld(t, setup{})
		w.fake.HoldAfter(2)
		leave := w.start(call{path: path, body: streaming(body)}, 2)
		w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
		leave()
	}
}

// TestContentLog keeps what was said, for callers that want it, and nothing for others.
func TestContentLog(t *testing.T) {
	log := &contents{}
	w := newWorld(t, setup{
		content: log, change: func(c *proxy.Caller) { c.Content = true },
		callers: map[string]*proxy.Caller{"private": {KeyID: "k2", Tenant: "acme"}},
	})
	a := w.do(call{body: streamed}).want(t, 200)
	w.do(call{body: chat, key: "private"}).want(t, 200)
	w.do(call{body: chat, header: fault("cut=2")}).want(t, 502)
	big := w.do(call{path: "/v1/completions", body: strings.Replace(streaming(plainCall), `:60`, `:3000`, 1)}).want(t, 200)
	w.settled()
	if e := log.entries[2]; !e.Truncated || len(e.Answer) < 100_000 || !strings.HasPrefix(big.body, string(e.Answer)) {
		t.Errorf("kept %d of %d bytes, truncated %t", len(e.Answer), len(big.body), e.Truncated)
	}
	if len(log.entries) != 3 {
		t.Fatalf("%d entries", len(log.entries))
	}
	if e := log.entries[0]; string(e.Request) != streamed || string(e.Answer) != a.body || e.Failed || e.Truncated || e.Status != 200 || e.Model != "m" || e.Tenant != "acme" || e.Route != "chat" {
		t.Errorf("%+v", e)
	}
	if e := log.entries[1]; !e.Failed || e.Status != 502 {
		t.Errorf("%+v", e)
	}
}

// contents collects entries; requests come one after the other.
type contents struct{ entries []proxy.ContentEntry }

func (c *contents) Wants(string, string, bool) bool { return true }

func (c *contents) Keep(e proxy.ContentEntry) { c.entries = append(c.entries, e) }

// TestExplain says what a request would meet, and charges nothing.
func TestExplain(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 5), limit(proxy.Tokens, 100)}})
	for range 2 {
		e, err := w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 40, Output: 20})
		if err != nil || !e.Admitted || e.NanoUSD != 40*priceInput+20*priceOutput || len(e.Limits) != 2 || e.Limits[1].Cost != 60 || e.Limits[1].Remaining != 40 {
			t.Errorf("%+v %v", e, err)
		}
	}
	e, err := w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 400, Output: 20})
	if err != nil || e.Admitted || e.Refused != "tokens" || e.Limits[1].RetryAfterMS != -1 || !e.Limits[0].Admitted {
		t.Errorf("%+v %v", e, err)
	}
	if _, err := w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "none", Input: 1, Output: 1}); err == nil {
		t.Error("no such model")
	}
}
