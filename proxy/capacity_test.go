package proxy_test

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy"
	"headgate/proxy/queue"
	"headgate/proxy/route"
	"headgate/proxy/upstream"
)

// oneSlot is a model server that is asked one thing at a time.
func oneSlot(s setup) setup {
	s.backends = []upstream.Backend{{Name: "vllm", Slots: 1}}
	return s
}

// TestWaitsForItsPlace: what finds no slot waits, nobody gets more than there are, and all are served.
func TestWaitsForItsPlace(t *testing.T) {
	w := newWorld(t, oneSlot(setup{limits: []proxy.Limit{limit(proxy.Requests, 10)}, queue: queue.Config{TargetWait: time.Hour}}))
	w.fake.Hold()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { w.do(call{body: chat}).want(t, 200) })
	}
	w.eventually(func() bool { return w.dispatch.Waiting() == 1 })
	w.await(func(s fakevllm.Stats) bool { return s.Held > 0 })
	if s := w.fake.Stats(); s.InFlight != 1 {
		t.Errorf("%d requests at a backend of one slot", s.InFlight)
	}
	w.fake.Release()
	wg.Wait()
	if got := w.spent(w.caller.Limits[0]); got != 2 {
		t.Errorf("%d requests spent", got)
	}
}

// TestFullQueueIsNotQuota: the refusal says that it is the fleet's, when to come again, and costs nothing.
func TestFullQueueIsNotQuota(t *testing.T) {
	for _, c := range []struct{ status, want int }{{0, 429}, {503, 503}} {
		w := newWorld(t, oneSlot(setup{limits: []proxy.Limit{limit(proxy.Requests, 100)}, full: c.status, queue: queue.Config{Tickets: 3}}))
		w.fake.Hold()
		leave := w.start(call{body: chat}, 0)
		w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
		ctx, gone := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for w.dispatch.Waiting() < 3 {
			before := w.dispatch.Waiting()
			wg.Go(func() {
				if resp, err := w.client.Do(w.request(ctx, call{body: chat})); err == nil {
					_ = resp.Body.Close()
				}
			})
			w.eventually(func() bool { return w.dispatch.Waiting() > before || w.metric("headgate_dropped_total") > 0 })
			if w.metric("headgate_dropped_total") > 0 {
				break
			}
		}
		a := w.do(call{body: chat}).refused(t, c.want, "over_capacity")
		if a.header.Get("X-Headgate-Dropped") != "queue_full" || a.header.Get("Retry-After") == "" || !strings.Contains(a.body, "not your quota") || a.field("limit") != nil {
			t.Errorf("%v %s", a.header, a.body)
		}
		if w.metric("headgate_requests_total", "outcome", "over_capacity") == 0 {
			t.Error("it is not told apart in the metrics")
		}
		gone()
		wg.Wait()
		w.eventually(func() bool { return w.dispatch.Waiting() == 0 }) // who leaves frees its place
		leave()
		w.fake.Release()
		w.settled()
		if got := w.spent(w.caller.Limits[0]); got > 1 {
			t.Errorf("%d requests spent, of which one reached the backend", got)
		}
	}
}

// TestPatienceIsTheClients: a request that waits longer than its client is dropped, and never sent.
func TestPatienceIsTheClients(t *testing.T) {
	for name, h := range map[string]http.Header{
		"ours":    header("X-Headgate-Timeout", "0.05"),
		"library": header("X-Stainless-Timeout", "0.05"),
		"python":  header("X-Stainless-Read-Timeout", "0.05"),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, oneSlot(setup{queue: queue.Config{TargetWait: time.Hour}}))
			w.fake.Hold()
			leave := w.start(call{body: chat}, 0)
			defer leave()
			w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
			a := w.do(call{body: chat, header: h}).refused(t, 429, "over_capacity")
			if got := a.header.Get("X-Headgate-Dropped"); got != "ttl_expired" {
				t.Errorf("dropped: %q", got)
			}
			if w.dispatch.Waiting() != 0 || w.fake.Stats().Requests != 1 {
				t.Errorf("%d wait, %+v", w.dispatch.Waiting(), w.fake.Stats())
			}
		})
	}
}

// TestSignsOfLife: a stream that waits shows comments, and goes on as one, or fails in band.
func TestSignsOfLife(t *testing.T) {
	for name, c := range map[string]struct {
		header http.Header
		want   string
	}{
		"served":  {want: "data: [DONE]"},
		"dropped": {header: header("X-Headgate-Timeout", "0.2"), want: `"over_capacity"`},
		"failed":  {header: fault("500"), want: `"error"`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, oneSlot(setup{keepAlive: 10 * time.Millisecond, queue: queue.Config{TargetWait: time.Hour}}))
			w.fake.Hold()
			leave := w.start(call{body: chat}, 0)
			w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
			resp := must[*http.Response](t)(w.client.Do(w.request(patience(t), call{body: streamed, header: c.header})))
			defer resp.Body.Close()
			first := make([]byte, 8)
			if _, err := resp.Body.Read(first); err != nil || !strings.HasPrefix(string(first), ": ") {
				t.Fatalf("the first sign is %q: %v", first, err)
			}
			if name != "dropped" {
				leave()
				w.fake.Release()
			} else {
				defer leave()
			}
			var rest strings.Builder
			if _, err := fmt.Fprint(&rest, readAll(resp)); err != nil || !strings.Contains(rest.String(), c.want) || resp.StatusCode != 200 {
				t.Errorf("status %d: %s", resp.StatusCode, rest.String())
			}
			if strings.Contains(strings.ReplaceAll(rest.String(), ": waiting for a place\n\n", ""), "{\n") {
				t.Errorf("a frame of several lines: %s", rest.String())
			}
		})
	}
}

func readAll(resp *http.Response) string {
	var b strings.Builder
	buf := make([]byte, 4096)
	for {
		n, err := resp.Body.Read(buf)
		b.Write(buf[:n])
		if err != nil {
			return b.String()
		}
	}
}

// TestLongPromptsTakeMoreSlots: a request is as large as its tokens.
func TestLongPromptsTakeMoreSlots(t *testing.T) {
	w := newWorld(t, setup{backends: []upstream.Backend{{Name: "vllm", Slots: 8, SlotTokens: 10}}})
	w.fake.Hold()
	leave := w.start(call{path: "/v1/completions", body: exact}, 0)
	defer leave()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	leave2 := w.start(call{path: "/v1/completions", body: plainCall}, 0)
	defer leave2()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 2 })
	w.places.mu.Lock()
	defer w.places.mu.Unlock()
	if got := w.places.used["vllm"]; got != 1+4 {
		t.Errorf("10 and 64 tokens take %d slots of 8 at 10 tokens a slot", got)
	}
}

// dying is a backend that accepts connections and answers nothing until it is killed.
type dying struct {
	l     net.Listener
	mu    sync.Mutex
	conns []net.Conn
	came  chan struct{}
	head  bool // it answers with a stream's head, and no token
}

func newDying(t *testing.T, head bool) *dying {
	m := &dying{l: must[net.Listener](t)(net.Listen("tcp", "127.0.0.1:0")), came: make(chan struct{}, 64), head: head}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := m.l.Accept()
			if err != nil {
				return
			}
			m.mu.Lock()
			m.conns = append(m.conns, c)
			m.mu.Unlock()
			go m.take(c)
		}
	}()
	t.Cleanup(func() { m.kill(); <-done })
	return m
}

func (m *dying) take(c net.Conn) {
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	if m.head {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	}
	m.came <- struct{}{}
}

// kill resets all connections.
func (m *dying) kill() {
	_ = m.l.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}
	m.conns = nil
}

// TestLostBackendLosesNothing: what had not begun to be answered by a backend that dies is answered by
// another, and charged once, also under a strict budget; its client sees nothing of it.
func TestLostBackendLosesNothing(t *testing.T) {
	for _, head := range []bool{false, true} {
		for _, body := range []string{chat, streamed} {
			t.Run(fmt.Sprintf("head=%t stream=%t", head, body == streamed), func(t *testing.T) {
				m := newDying(t, head && body == streamed)
				w := newWorld(t, setup{
					limits: []proxy.Limit{limit(proxy.Tokens, 1000), limit(proxy.Requests, 10)}, models: []*proxy.Model{model("m", "dying", "vllm")},
					backends: []upstream.Backend{{Name: "dying", URL: "http://" + m.l.Addr().String(), Slots: 2}, {Name: "vllm", Slots: 2}},
				})
				w.fake.Hold() // else it may have answered all before one goes elsewhere
				got := make(chan answer, 4)
				for range 4 {
					go func() { got <- w.do(call{body: body}) }()
				}
				w.eventually(func() bool { return len(m.came) > 0 })
				m.kill()
				w.fake.Release()
				for range 4 {
					a := <-got
					a.want(t, 200)
					if a.err != nil || a.header.Get("X-Headgate-Backend") != "vllm" {
						t.Errorf("%v %v", a.err, a.header)
					}
				}
				w.settled()
				if n, asked := w.spent(w.caller.Limits[1]), w.fake.Stats().Requests; n != asked {
					t.Errorf("%d requests spent on %d answers", n, asked)
				}
			})
		}
	}
}

// TestPushedBack: a backend that has no capacity is passed over where there is another; the last one's word
// is the client's.
func TestPushedBack(t *testing.T) {
	full := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(http.StatusTooManyRequests)
	}))
	defer full.Close()
	w := newWorld(t, setup{
		models: []*proxy.Model{model("m", "full", "vllm"), model("only", "full")}, backends: []upstream.Backend{{Name: "full", URL: full.URL, Slots: 4}, {Name: "vllm", Slots: 4}},
	})
	for range 4 {
		if a := w.do(call{body: chat}).want(t, 200); a.header.Get("X-Headgate-Backend") != "vllm" {
			t.Errorf("%v", a.header)
		}
	}
	a := w.do(call{body: strings.Replace(chat, `"m"`, `"only"`, 1)}).want(t, 429)
	if a.header.Get("Retry-After") == "" {
		t.Errorf("%v %s", a.header, a.body)
	}
}

// TestRoutes choose the model, once, and an explanation says how.
func TestRoutes(t *testing.T) {
	rules := []route.Rule{
		{Name: "cheap", Match: route.Match{Models: []string{"big"}, Input: route.Range{Below: new(int64(50))}}, To: []route.Arm{{Model: "small", Weight: 1}}},
		{Name: "back", Match: route.Match{Models: []string{"small"}}, To: []route.Arm{{Model: "big", Weight: 1}}},
	}
	w := newWorld(t, setup{models: twoModels(), routes: rules, backends: []upstream.Backend{{Name: "vllm"}, {Name: "vllm2"}}, fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}}})
	for _, c := range []struct{ body, want string }{
		{toBig, "SMALL"},
		{strings.Replace(toBig, `"hi"`, `"`+strings.Repeat("hi there ", 100)+`"`, 1), "BIG"},
	} {
		a := w.do(call{body: c.body}).want(t, 200)
		if got := w.last().Model; got != c.want || a.header.Get("X-Headgate-Degraded") != "" {
			t.Errorf("%s answered, want %s; degraded %q", got, c.want, a.header.Get("X-Headgate-Degraded"))
		}
	}
	if e := must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "big", Input: 10, Output: 1})); e.Model != "small" || e.Route != "cheap" || e.Routed == "" {
		t.Errorf("%+v", e)
	}
	if e := must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "big", Input: 100, Output: 1})); e.Model != "big" || e.Route != "" || len(e.Places) != 1 || e.Places[0].Backend != "vllm" {
		t.Errorf("%+v", e)
	}
}

// TestRouteToWhatTheKeyMayNot leaves the model asked for.
func TestRouteToWhatTheKeyMayNot(t *testing.T) {
	w := newWorld(t, setup{
		models: twoModels(), routes: []route.Rule{{Name: "all", To: []route.Arm{{Model: "small"}}}}, fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}},
		backends: []upstream.Backend{{Name: "vllm"}, {Name: "vllm2"}}, change: func(c *proxy.Caller) { c.Models = map[string]bool{"big": true} },
	})
	w.do(call{body: toBig}).want(t, 200)
	if got := w.last().Model; got != "BIG" {
		t.Errorf("%s answered a key that may only use big", got)
	}
}

// TestTooLongForTheModel is said before anything is asked, with the figures.
func TestTooLongForTheModel(t *testing.T) {
	m := model("m", "vllm")
	m.Context = 100
	w := newWorld(t, setup{models: []*proxy.Model{m}, prefilter: edge1000()})
	a := w.do(call{body: `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 1000) + `"}]}`}).refused(t, 400, "context_length_exceeded")
	if a.field("param") != "messages" || !strings.Contains(a.body, "100 tokens") {
		t.Errorf("%s", a.body)
	}
	if n := w.fake.Stats().Requests; n != 0 {
		t.Errorf("%d requests reached the backend", n)
	}
	w.do(call{body: chat}).want(t, 200)
}

// TestConversationsStay: all turns of a conversation go to one backend, though nobody remembers it, and
// conversations spread.
func TestConversationsStay(t *testing.T) {
	var names []string
	var backends []upstream.Backend
	for i := range 4 {
		names = append(names, fmt.Sprintf("vllm%d", i))
		backends = append(backends, upstream.Backend{Name: names[i], Slots: 64})
	}
	w := newWorld(t, setup{models: []*proxy.Model{model("m", names...)}, backends: backends})
	w.up()
	seen := map[string]bool{}
	for conversation := range 16 {
		turns := fmt.Sprintf(`{"role":"user","content":"this is conversation %d"}`, conversation)
		at := ""
		for turn := range 3 {
			a := w.do(call{body: `{"model":"m","max_tokens":2,"messages":[` + turns + `]}`}).want(t, 200)
			got := a.header.Get("X-Headgate-Backend")
			if at != "" && got != at {
				t.Errorf("turn %d of conversation %d went to %s, before to %s", turn, conversation, got, at)
			}
			at = got
			turns += fmt.Sprintf(`,{"role":"assistant","content":"answer %d"},{"role":"user","content":"and %d?"}`, turn, turn)
		}
		seen[at] = true
	}
	if len(seen) < 3 {
		t.Errorf("all conversations went to %v", seen)
	}
}

// up runs the pool's probes until all backends are known to be up.
func (w *world) up() {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = w.pool.Run(ctx) }()
	w.t.Cleanup(func() { stop(); <-ended })
	w.eventually(func() bool { return w.pool.Up() == len(w.pool.Status()) })
}

// TestStoppingEndsTheWait: a gateway whose time to drain is over sends nobody on to a backend.
func TestStoppingEndsTheWait(t *testing.T) {
	w := newWorld(t, oneSlot(setup{queue: queue.Config{TargetWait: time.Hour}}))
	w.fake.Hold()
	leave := w.start(call{body: chat}, 0)
	defer leave()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	got := make(chan answer, 1)
	go func() { got <- w.do(call{body: chat}) }()
	w.eventually(func() bool { return w.dispatch.Waiting() == 1 })
	w.proxy.Cut()
	(<-got).refused(t, 503, "no_backend")
	if n := w.fake.Stats().Requests; n != 1 {
		t.Errorf("%d requests reached the backend", n)
	}
}

// TestFallbackToAFullBackend: a fallback gets no place that the model asked for did not get.
func TestFallbackToAFullBackend(t *testing.T) {
	models := twoModels()
	models[1].Backends = []string{"vllm"}
	w := newWorld(t, oneSlot(setup{models: models, fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}}, queue: queue.Config{TargetWait: time.Millisecond}}))
	w.fake.Hold()
	defer w.start(call{body: toBig}, 0)()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	for range 20 {
		if w.metric("headgate_dropped_total", "reason", "queue_full") > 0 {
			break
		}
		before := w.dispatch.Waiting()
		defer w.start(call{body: toBig}, 0)()
		w.eventually(func() bool {
			return w.dispatch.Waiting() > before || w.metric("headgate_dropped_total", "reason", "queue_full") > 0
		})
	}
	if n := w.metric("headgate_dropped_total", "reason", "queue_full"); n == 0 {
		t.Errorf("%d wait for one slot and none is refused", w.dispatch.Waiting())
	}
}

// TestKilledWhileItWaits: a switch that is thrown while a request waits for its place binds.
func TestKilledWhileItWaits(t *testing.T) {
	w := newWorld(t, oneSlot(setup{limits: []proxy.Limit{limit(proxy.Requests, 10)}, queue: queue.Config{TargetWait: time.Hour}}))
	w.fake.Hold()
	leave := w.start(call{body: chat}, 0)
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	got := make(chan answer, 1)
	go func() { got <- w.do(call{body: chat}) }()
	w.eventually(func() bool { return w.dispatch.Waiting() == 1 })
	w.proxy.SetSwitches(kill("model", "m", "wrong weights"))
	leave()
	w.fake.Release()
	(<-got).refused(t, 403, "killed")
	if n := w.fake.Stats().Requests; n != 1 {
		t.Errorf("%d requests reached the backend", n)
	}
}

// raw is a server that answers every request with these bytes, and closes.
func raw(t *testing.T, answer string) string {
	l := must[net.Listener](t)(net.Listen("tcp", "127.0.0.1:0"))
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				req, err := http.ReadRequest(bufio.NewReader(c))
				if err != nil {
					return
				}
				if _, err := io.Copy(io.Discard, req.Body); err == nil {
					_, _ = io.WriteString(c, answer)
				}
			})
		}
	})
	return "http://" + l.Addr().String()
}

// answering is an answer of that status, type and body.
func answering(status, contentType, body string) string {
	return fmt.Sprintf("HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nLocation: http://10.0.0.9/\r\nConnection: close\r\n\r\n%s", status, contentType, len(body), body)
}

// TestMisfits: what is no answer of a model no client gets to see. It is asked of another backend, and counts against the one that
// gave it; where there is no other the client is told. A backend without the model is passed by, and no fault of its clients.
func TestMisfits(t *testing.T) {
	const sse, js = "text/event-stream", "application/json"
	token := `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
	for name, c := range map[string]struct {
		answer  string
		begins  bool // a stream of it does, and is broken off
		passes  int  // the status as it comes, where there is no other
		blessed bool // no breaker opens
	}{
		"a page":             {answer: answering("200 OK", "text/html; charset=utf-8", "<html>welcome</html>")},
		"a page of an error": {answer: answering("502 Bad Gateway", "text/html", "<html>nginx</html>")},
		"no JSON":            {answer: answering("200 OK", js, "\xff\xfe{{{")},
		"half of it":         {answer: answering("200 OK", js, `{"id":"c","choices":[`)},
		"an array":           {answer: answering("200 OK", js, `[1]`)},
		"nothing":            {answer: answering("200 OK", js, "")},
		"no content":         {answer: answering("204 No Content", js, "")},
		"a redirection":      {answer: answering("307 Temporary Redirect", js, `{}`)},
		"another protocol":   {answer: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"},
		"no status":          {answer: answering("000 ", js, `{}`)},
		"a high status":      {answer: answering("999 What", js, `{}`)},
		"not let in":         {answer: answering("401 Unauthorized", js, `{"error":{"message":"bad key"}}`)},
		"an empty stream":    {answer: answering("200 OK", sse, "")},
		"a stream cut short": {answer: answering("200 OK", sse, token), begins: true},
		"no such model":      {answer: answering("404 Not Found", js, `{"error":{"message":"no such model"}}`), passes: 404, blessed: true},
	} {
		for _, body := range []string{chat, streamed} {
			t.Run(name, func(t *testing.T) {
				w := newWorld(t, setup{
					failures: 5, limits: []proxy.Limit{limit(proxy.Tokens, 100_000)}, models: []*proxy.Model{model("m", "bad", "vllm"), model("only", "bad")},
					backends: []upstream.Backend{{Name: "bad", URL: raw(t, c.answer), Slots: 4}, {Name: "vllm", Slots: 4}},
				})
				for range 10 {
					a := w.do(call{body: body})
					if broken := c.begins && strings.Contains(a.body, "broke off"); !broken && (a.status != 200 || a.header.Get("X-Headgate-Backend") != "vllm") {
						t.Errorf("%d %v %s", a.status, a.header, a.body)
					}
				}
				only := call{body: strings.Replace(body, `"m"`, `"only"`, 1)}
				for i := range 8 {
					a := w.do(only)
					want := cmp.Or(c.passes, 502)
					if c.begins {
						want = 200
					}
					if i > 5 && a.status == 503 { // the breaker
						continue
					}
					if a.status != want && (a.status != 503 || c.blessed) || a.header.Get("Location") != "" && a.status != 200 && c.passes == 0 {
						t.Errorf("alone: %d %v %s", a.status, a.header, a.body)
					}
				}
				if a := w.do(only); (a.status == 503) == c.blessed {
					t.Errorf("the breaker: %d %s", a.status, a.body)
				}
				if c.blessed && w.do(call{body: body}).status != 200 {
					t.Error("its clients are blamed")
				}
			})
		}
	}
}

// TestOddAnswersPass: what is an answer in spite of how it comes.
func TestOddAnswersPass(t *testing.T) {
	const sse, js = "text/event-stream", "application/json"
	events := `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}` + "\n\n"
	chunked := func(contentType string, pieces ...string) string {
		var b strings.Builder
		fmt.Fprintf(&b, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n", contentType)
		for _, p := range append(pieces, "") {
			fmt.Fprintf(&b, "%x\r\n%s\r\n", len(p), p)
		}
		return b.String()
	}
	for name, c := range map[string]string{
		"blank lines first":     chunked(js, " \n\n", "  \r\n", oneAnswer),
		"many spaces first":     chunked(js, strings.Repeat(" ", 40<<10), oneAnswer),
		"a byte order mark":     chunked(js, "\xef", "\xbb\xbf", oneAnswer, "\n"),
		"a type in capitals":    chunked("Text/Event-Stream; charset=utf-8", events),
		"events without a type": chunked("", events),
		"events as plain text":  chunked("text/plain", "da", "ta: {}\n\n"),
		"no DONE":               chunked(sse, events),
		"a comment first":       chunked(sse, ": hello\n\n", events),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{failures: 5, backends: []upstream.Backend{{Name: "vllm", URL: raw(t, c), Slots: 4}}})
			for range 7 {
				if a := w.do(call{body: chat}).want(t, 200); strings.Contains(a.body, "upstream_error") {
					t.Errorf("%s", clip(a.body))
				}
			}
		})
	}
}

// TestSoberRetryAfter: no client is told to come again in years.
func TestSoberRetryAfter(t *testing.T) {
	for says, want := range map[string]string{"99999999999": "60", "-5": "", "Fri, 01 Jan 2999 00:00:00 GMT": "60", "soon": "", "7": "7"} {
		answer := fmt.Sprintf("HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: 2\r\nRetry-After: %s\r\nRetry-After-Ms: 1e15\r\nConnection: close\r\n\r\n{}", says)
		if want == "7" || want == "" {
			answer = strings.Replace(answer, "Retry-After-Ms: 1e15\r\n", "", 1)
		}
		w := newWorld(t, setup{backends: []upstream.Backend{{Name: "vllm", URL: raw(t, answer), Slots: 4}}})
		if a := w.do(call{body: chat}).want(t, 429); a.header.Get("Retry-After") != want || a.header.Get("Retry-After-Ms") != "" {
			t.Errorf("%q becomes %q and %q, not %q", says, a.header.Get("Retry-After"), a.header.Get("Retry-After-Ms"), want)
		}
	}
}

// TestEndlessStreams are ended far beyond the request's cap.
func TestEndlessStreams(t *testing.T) {
	w := newWorld(t, setup{around: func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for r.Context().Err() == nil {
				if _, err := io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}`+"\n\n"); err != nil {
					return
				}
			}
		})
	}})
	if a := w.do(call{body: streamed}).want(t, 200); !strings.Contains(a.body, "broke off") || strings.Count(a.body, `"a"`) > 20_000 {
		t.Errorf("%d chunks, %s", strings.Count(a.body, `"a"`), a.body[max(0, len(a.body)-300):])
	}
}

// TestWaitersFollowThePolicy: what waits for a backend that a new policy has no more, goes to the one that its model has now.
func TestWaitersFollowThePolicy(t *testing.T) {
	w := newWorld(t, setup{
		models: []*proxy.Model{model("m", "old")}, queue: queue.Config{TargetWait: time.Hour},
		backends: []upstream.Backend{{Name: "old", Slots: 1}},
	})
	w.fake.Hold()
	first := w.start(call{body: chat}, 0)
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	got := make(chan answer, 2) // as many as may wait at first
	for range cap(got) {
		go func() { got <- w.do(call{body: chat}) }()
	}
	w.eventually(func() bool { return w.dispatch.Waiting() == cap(got) })
	w.places.mu.Lock()
	w.places.slots["new"] = 4
	w.places.mu.Unlock()
	if err := w.pool.Update([]upstream.Backend{{Name: "new", URL: w.upstream.URL, Slots: 4, Kind: upstream.VLLM}}); err != nil {
		t.Fatal(err)
	}
	s := *w.proxy.Snapshot()
	s.Models = map[string]*proxy.Model{"m": model("m", "new")}
	w.proxy.Apply(&s)
	w.dispatch.Apply([]queue.Backend{{ID: "new", Slots: 4, Limit: -1}}, queue.Config{})
	w.fake.Release()
	for range cap(got) {
		if a := (<-got).want(t, 200); a.header.Get("X-Headgate-Backend") != "new" {
			t.Errorf("%v", a.header)
		}
	}
	first()
}

const oneAnswer = `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`

// TestPausesAreOutlasted: a backend that wants to be left alone for a second keeps its queue; who comes meanwhile waits, too.
// A pause beyond all patience is refused at once.
func TestPausesAreOutlasted(t *testing.T) {
	var n atomic.Int64
	var after atomic.Value
	after.Store("1")
	first := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		if says := after.Load().(string); says != "" && n.Add(1) == 1 {
			<-first
			w.Header().Set("Retry-After", says)
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		_, _ = io.WriteString(w, oneAnswer)
	}))
	defer server.Close()
	w := newWorld(t, setup{
		queue: queue.Config{TargetWait: time.Hour}, models: []*proxy.Model{model("m", "only")},
		backends: []upstream.Backend{{Name: "only", URL: server.URL, Slots: 1}},
	})
	got := make(chan answer, 4)
	ask := func() { got <- w.do(call{body: chat}) }
	go ask()
	w.eventually(func() bool { return n.Load() == 1 })
	for range 2 {
		go ask()
	}
	w.eventually(func() bool { return w.dispatch.Waiting() == 2 })
	close(first)
	if a := <-got; a.status != 429 {
		t.Errorf("%d %s", a.status, a.body)
	}
	go ask()
	for range 3 {
		if a := <-got; a.status != 200 {
			t.Errorf("%d %v %s", a.status, a.header, a.body)
		}
	}
	n.Store(0)
	after.Store("50")
	w.do(call{body: chat}).want(t, 429)
	if a := w.do(call{body: chat}).want(t, 429); a.header.Get("X-Headgate-Dropped") != "no_backend" {
		t.Errorf("%v %s", a.header, a.body)
	}
}

// TestHeldStreamsShowSigns: who waits for a paused backend is shown that somebody is there, as in the queue.
func TestHeldStreamsShowSigns(t *testing.T) {
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if n.Add(1) == 1 {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n")
	}))
	defer server.Close()
	w := newWorld(t, setup{keepAlive: 10 * time.Millisecond, backends: []upstream.Backend{{Name: "vllm", URL: server.URL, Slots: 1}}})
	w.do(call{body: streamed}).want(t, 429)
	if a := w.do(call{body: streamed}).want(t, 200); strings.Count(a.body, ": waiting") < 3 || !strings.Contains(a.body, "[DONE]") {
		t.Errorf("%s", clip(a.body))
	}
}

// TestTrialsAreAwaited: while a breaker lets one request through to see, the others wait for what it finds.
func TestTrialsAreAwaited(t *testing.T) {
	t.Parallel()
	var heals atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.Method == http.MethodPost && !heals.Load() {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, oneAnswer)
	}))
	defer server.Close()
	w := newWorld(t, setup{
		failures: 5, queue: queue.Config{TargetWait: time.Hour}, models: []*proxy.Model{model("m", "only")},
		backends: []upstream.Backend{{Name: "only", URL: server.URL, Slots: 4}},
	})
	w.eventually(func() bool { return w.do(call{body: chat}).status == http.StatusServiceUnavailable })
	heals.Store(true)
	w.eventually(func() bool { return w.pool.Status()[0].Breaker == upstream.BreakerHalfOpen })
	got := make(chan answer, 4)
	for range cap(got) {
		go func() { got <- w.do(call{body: chat}) }()
	}
	for range cap(got) {
		if a := <-got; a.status != 200 {
			t.Errorf("%d %v %s", a.status, a.header, a.body)
		}
	}
}

// TestFallbacksKeepTheirBound: the queue of a model whose backend goes away does not become that of its fallback, beyond what
// that bears.
func TestFallbacksKeepTheirBound(t *testing.T) {
	hold := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hold }))
	defer server.Close()
	big, small := model("big", "a"), model("m", "vllm")
	big.Fallback = []string{"m"}
	w := newWorld(t, setup{
		queue: queue.Config{TargetWait: time.Hour}, models: []*proxy.Model{big, small},
		backends: []upstream.Backend{{Name: "a", URL: server.URL, Slots: 20}, {Name: "vllm", Slots: 1}},
	})
	w.fake.Hold()
	var wg sync.WaitGroup
	for range 60 {
		wg.Go(func() { _ = w.do(call{body: strings.Replace(chat, `"m"`, `"big"`, 1)}) })
	}
	w.eventually(func() bool { return w.dispatch.Waiting() >= 39 })
	w.pool.Drain([]string{"a"})
	w.eventually(func() bool { return w.dispatch.Waiting() < 10 })
	b := w.dispatch.State().Backends["vllm"]
	if b.Waiting > b.Places {
		t.Errorf("%d wait at the fallback's backend, whose places are %d", b.Waiting, b.Places)
	}
	w.fake.Release()
	close(hold)
	wg.Wait()
}

// TestAbsentModelsAreAvoided: who does not have the model is asked once, not each time out of the budget for retries; another model
// there is asked as before.
func TestAbsentModelsAreAvoided(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), `"gone"`) {
			asked.Add(1)
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, oneAnswer)
	}))
	defer server.Close()
	gone := model("m", "bad", "bad2", "vllm")
	gone.Upstream, gone.Affinity = "gone", proxy.ByNothing
	w := newWorld(t, setup{
		models: []*proxy.Model{gone, model("other", "bad")}, fake: fakevllm.Config{Models: []string{"gone", "fake"}},
		backends: []upstream.Backend{{Name: "bad", URL: server.URL, Slots: 4}, {Name: "bad2", URL: server.URL, Slots: 4}, {Name: "vllm", Slots: 4}},
	})
	for range 300 {
		if a := w.do(call{body: chat}).want(t, 200); a.header.Get("X-Headgate-Backend") != "vllm" {
			t.Errorf("%v", a.header)
		}
	}
	if n := asked.Load(); n == 0 || n > 2 {
		t.Errorf("it was asked %d times", n)
	}
	w.do(call{body: strings.Replace(chat, `"m"`, `"other"`, 1)}).want(t, 200)
}
