package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy"
	"headgate/proxy/upstream"
)

// What people who looked for trouble with kept answers found.

// settledBills are those of all requests so far.
func (w *world) settledBills() []proxy.Bill {
	w.t.Helper()
	w.settled()
	w.till.mu.Lock()
	defer w.till.mu.Unlock()
	return append([]proxy.Bill(nil), w.till.bills...)
}

// TestMeteredFollowersPayOnce: also where the stream that they follow breaks off before its first byte.
func TestMeteredFollowersPayOnce(t *testing.T) {
	goOn := make(chan struct{})
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		if n > 1 {
			emit(w, saysInPieces(n, "a", "b")...)
			return
		}
		emit(w, "") // its head
		<-goOn
		panic(http.ErrAbortHandler)
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}, limits: []proxy.Limit{limit(proxy.Tokens, 1_000_000)}, change: func(c *proxy.Caller) {
		c.CachedMetered = true
		c.Budgets = []proxy.Budget{budget("month", dollar)}
	}})
	leader := w.crowd(1, call{body: streaming(question)})
	w.eventually(func() bool { return up.calls.Load() == 1 })
	followers := w.crowd(1, call{body: streaming(question)})
	w.eventually(func() bool { return w.metric("headgate_inflight_requests") == 2 })
	close(goOn)
	if a := leader()[0]; a.status != 502 && !strings.Contains(a.body, "[DONE]") {
		t.Errorf("the leader got %d %s", a.status, a.body)
	}
	if a := followers()[0]; a.status != 200 || !strings.Contains(a.body, "[DONE]") {
		t.Errorf("the follower got %d %s", a.status, a.body)
	}
	paid, sum := 0, int64(0)
	for _, b := range w.settledBills() {
		if sum += b.Cost; b.Cost == 3*priceInput+2*priceOutput {
			paid++
		}
	}
	if paid < 1 || w.till.spent("month") != sum {
		t.Errorf("%d paid for an answer; %d of the budget for bills of %d", paid, w.till.spent("month"), sum)
	}
}

// TestMeteredHitsKeepToStrictBudgets: what is kept costs no more than was reserved.
func TestMeteredHitsKeepToStrictBudgets(t *testing.T) {
	const most = 200_000
	w := newWorld(t, setup{
		surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Length = true })},
		models:   []*proxy.Model{changed(model("m", "vllm"), func(m *proxy.Model) { m.TemplateTokens = 1 })},
		callers: map[string]*proxy.Caller{
			"poor": {KeyID: "k2", Tenant: "acme", OnlySurface: "faq", CachedMetered: true, Budgets: []proxy.Budget{strict(budget("day", most))}},
		},
	})
	body := strings.TrimSuffix(question, "}") + `,"max_tokens":1000}`
	h := header("X-Fake-Output", "900")
	w.do(call{body: body, header: h}).want(t, 200).tier(t, "miss")
	for range 3 {
		w.do(call{body: body, key: "poor", header: h})
		w.do(call{body: streaming(body), key: "poor", header: h})
		w.settled()
		if spent := w.till.spent("day"); spent > most || w.metric("headgate_strict_overruns_total") != 0 {
			t.Fatalf("%d of %d spent, %v overruns", spent, int64(most), w.metric("headgate_strict_overruns_total"))
		}
	}
}

// TestHitsHaveTheTagsOfTheirRequests: whoever tags a request counts on the end of its answer.
func TestHitsHaveTheTagsOfTheirRequests(t *testing.T) {
	w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}})
	tagged := func(tags string) call {
		return call{body: question, header: header("X-Headgate-Cache-Tags", tags)}
	}
	w.do(tagged("doc-0")).want(t, 200).tier(t, "miss")
	w.do(tagged("doc-1")).want(t, 200).tier(t, "miss")
	for _, tags := range []string{"doc-1", "doc-0", "doc-0,doc-1"} {
		w.do(tagged(tags)).want(t, 200).tier(t, "exact")
	}
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
	for _, tag := range []string{"doc-0", "doc-1"} {
		w.shelf.untag("acme", tag)
		w.do(tagged("doc-0,doc-1")).want(t, 200).tier(t, "miss")
		w.do(tagged("doc-0,doc-1")).want(t, 200).tier(t, "exact")
	}
}

// TestAnthropicUsersAreUsers: metadata.user_id is a user, though metadata does not count.
func TestAnthropicUsersAreUsers(t *testing.T) {
	w := newWorld(t, setup{surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Share = false })}, callers: map[string]*proxy.Caller{
		"asserts": {KeyID: "k2", Tenant: "acme", OnlySurface: "faq", AssertUser: true},
		"own":     {KeyID: "k3", Tenant: "acme", OnlySurface: "faq", User: "svc"},
	}})
	for _, key := range []string{"asserts", "own"} {
		for _, user := range []string{"ann", "bob"} {
			c := call{path: "/v1/messages", key: key, header: header("X-Fake-Output", "5"), body: `{"model":"m","max_tokens":9999,"temperature":0,"metadata":{"user_id":"` + user + `"},"messages":[{"role":"user","content":"my mail?"}]}`}
			w.do(c).want(t, 200).tier(t, "miss")
			w.do(c).want(t, 200).tier(t, "exact")
		}
	}
}

// TestFallbacksHaveTemperaturesOfTheirOwn: what the one that answers would take counts.
func TestFallbacksHaveTemperaturesOfTheirOwn(t *testing.T) {
	small := changed(model("small", "vllm"), func(m *proxy.Model) { m.Upstream, m.DefaultTemperature = "fake2", 1 })
	big := changed(model("big", "gone"), func(m *proxy.Model) { m.Fallback = []string{"small"} })
	w := newWorld(t, setup{
		fake: fakevllm.Config{Models: []string{"fake", "fake2"}}, surfaces: []*proxy.Surface{faq()}, models: []*proxy.Model{big, small},
		backends: []upstream.Backend{{Name: "gone", URL: closedPort(t)}, {Name: "vllm"}},
	})
	for range 2 {
		for _, m := range []string{"big", "small"} {
			w.do(call{body: `{"model":"` + m + `","messages":[{"role":"user","content":"what is it?"}]}`}).want(t, 200).tier(t, "uncacheable")
		}
	}
	if n := w.asked(); n != 4 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestPanicsWhileEmbeddingsArePutTogether: the client is told.
func TestPanicsWhileEmbeddingsArePutTogether(t *testing.T) {
	up := script((&vectors{}).serve)
	till := newTill()
	var settled atomic.Int64
	till.after = func(*proxy.Bill) {
		if settled.Add(1) == 1 {
			panic("a bug")
		}
	}
	w := newWorld(t, setup{around: up.around, money: till, surfaces: []*proxy.Surface{faq()}})
	c := call{path: "/v1/embeddings", body: `{"model":"m","input":["a","bb"]}`}
	if a := w.do(c); a.status != 500 || a.field("code") != "internal_error" {
		t.Errorf("%d %q", a.status, a.body)
	}
	till.mu.Lock()
	clear(till.open) // the bill that the bug has left open
	till.mu.Unlock()
	w.later(c).want(t, 200)
	w.do(c).want(t, 200).tier(t, "exact")
}

// TestMeteredEmbeddings: each input is paid, whoever asked the model for it, and the content log has the answer
// that the client got.
func TestMeteredEmbeddings(t *testing.T) {
	up := script((&vectors{}).serve)
	keep := &contents{}
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}, content: keep, change: func(c *proxy.Caller) {
		c.CachedMetered, c.Content = true, true
		c.Budgets = []proxy.Budget{budget("month", dollar)}
	}})
	for i, c := range []struct {
		input, word string
		tokens      int64
	}{{`["a","bb"]`, "miss", 3}, {`["a","bb"]`, "exact", 3}, {`["a","bb","ccc"]`, "partial", 6}} {
		before := w.till.spent("month")
		a := w.do(call{path: "/v1/embeddings", body: `{"model":"m","input":` + c.input + `}`}).want(t, 200)
		w.settled()
		if got := w.till.spent("month") - before; got != c.tokens*priceInput || a.header.Get("X-Headgate-Cache") != c.word || !strings.Contains(a.body, fmt.Sprintf(`"prompt_tokens":%d`, c.tokens)) {
			t.Errorf("%s: %s, %d paid: %s", c.input, a.header.Get("X-Headgate-Cache"), got, a.body)
		}
		if log := keep.entries; len(log) != i+1 || string(log[i].Answer) != a.body {
			t.Errorf("%s: the content log has %d answers: %v", c.input, len(log), log)
		}
	}
}

// TestOnlyAsksNoModel: not even later.
func TestOnlyAsksNoModel(t *testing.T) {
	w := newWorld(t, setup{surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Life.Stale = time.Hour })}})
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	w.shelf.pass(80 * time.Minute)
	w.do(call{body: question, header: header("X-Headgate-Cache", "only")}).want(t, 200).tier(t, "stale")
	w.settled()
	if n := w.asked(); n != 1 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestHeadersThatAreTakenOffDoNotCount: what the backend did not get is not in the key, or it would be of another
// request's answer.
func TestHeadersThatAreTakenOffDoNotCount(t *testing.T) {
	up := script(func(n int64, w http.ResponseWriter, r *http.Request) {
		plain(w, says(n, "variant "+r.Header.Get("X-Variant")))
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	c := must[net.Conn](t)(net.Dial("tcp", w.addr))
	defer c.Close()
	_, err := fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nConnection: X-Variant\r\nX-Variant: b\r\nContent-Length: %d\r\n\r\n%s", w.addr, key, len(question), question)
	if err != nil {
		t.Fatal(err)
	}
	res := must[*http.Response](t)(http.ReadResponse(bufio.NewReader(c), nil))
	if text, err := io.ReadAll(res.Body); err != nil || !strings.Contains(string(text), `"variant "`) {
		t.Errorf("%v: %s", err, text)
	}
	if a := w.do(call{body: question, header: header("X-Variant", "b")}).want(t, 200); !strings.Contains(a.body, `"variant b"`) {
		t.Errorf("%s", a.body)
	}
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
}

// TestHitsAreNotCountedAsTheModels: what a provider's own cache saved is counted once.
func TestHitsAreNotCountedAsTheModels(t *testing.T) {
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		plain(w, strings.Replace(says(n, "x"), `"total_tokens":5`, `"total_tokens":5,"prompt_tokens_details":{"cached_tokens":2}`, 1))
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	for range 4 {
		w.do(call{body: question}).want(t, 200)
	}
	w.settled()
	if n := w.tokens("cached_input"); n != 2 {
		t.Errorf("%d tokens cached by the provider, of 2", n)
	}
}

// TestPagesAreNotKept: of routes without text, too, only what is an answer.
func TestPagesAreNotKept(t *testing.T) {
	up := script(func(_ int64, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<html>please log in</html>")
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	for path, body := range map[string]string{"/rerank": `{"model":"m","query":"q","documents":["a"]}`, "/v1/embeddings": `{"model":"m","input":"a"}`, "/v1/chat/completions": question} {
		for range 2 {
			if a := w.do(call{path: path, body: body}); a.status == 200 || a.header.Get("X-Headgate-Cache") == "exact" {
				t.Errorf("%s: %d %s", path, a.status, a.body)
			}
		}
	}
}

// TestCapsOfTheGatewayAreTheirCallers: an answer that was cut at a cap which only a strict budget wrote is
// nobody else's.
func TestCapsOfTheGatewayAreTheirCallers(t *testing.T) {
	w := newWorld(t, setup{
		surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Length = true })},
		models:   []*proxy.Model{changed(model("m", "vllm"), func(m *proxy.Model) { m.TemplateTokens, m.Context = 1, 400 })},
		callers:  map[string]*proxy.Caller{"strict": {KeyID: "k2", Tenant: "acme", OnlySurface: "faq", Budgets: []proxy.Budget{strict(budget("day", dollar))}}},
	})
	h := header("X-Fake-Output", "330")
	cut := w.do(call{body: question, key: "strict", header: h}).want(t, 200)
	whole := w.later(call{body: question, header: h}).want(t, 200)
	if !strings.Contains(cut.body, `"finish_reason":"length"`) {
		t.Fatalf("it was not cut: %s", cut.body)
	}
	if !strings.Contains(whole.body, `"finish_reason":"stop"`) {
		t.Errorf("%s, %s", whole.header.Get("X-Headgate-Cache"), whole.body)
	}
}

// TestDirectivesHaveNoCase of letters.
func TestDirectivesHaveNoCase(t *testing.T) {
	for _, directive := range []string{"No-Store", "max-age=5, PRIVATE"} {
		up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Cache-Control", directive)
			plain(w, says(n, "x"))
		})
		w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
		for range 2 {
			w.do(call{body: question}).want(t, 200).tier(t, "miss")
		}
	}
}
