package proxy_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headgate/bench/fakevllm"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/openai"
	"headgate/proxy/upstream"
)

const dollar = 1_000_000_000 // nano-dollars

// TestEveryExitSettlesMoney: whatever becomes of a request, its bill is settled once, for
// what it used, and under a strict budget for what it may have used. newWorld checks that
// it is settled once.
func TestEveryExitSettlesMoney(t *testing.T) {
	for _, c := range exits(t) {
		for _, isStrict := range []bool{false, true} {
			t.Run(c.name+" "+strconv.FormatBool(isStrict), func(t *testing.T) {
				b := budget("month", dollar)
				b.Strict = isStrict
				s := c.setup
				s.change = func(cl *proxy.Caller) {
					cl.Budgets = []proxy.Budget{b}
					if c.setup.change != nil {
						c.setup.change(cl)
					}
				}
				w := newWorld(t, s)
				w.do(call{path: "/v1/completions", body: c.body, header: fault(c.fault)}).want(t, c.status)
				w.settled()
				bill := w.till.bill(t)
				used := c.in*priceInput + c.out*priceOutput
				want, outcome := used, c.outcome
				if isStrict && c.strict == asReserved {
					want = bill.Reserved
				}
				if c.strict == cancelled {
					outcome = "cancelled"
				}
				if bill.Cost != want || w.till.spent("month") != want || isStrict && bill.Reserved <= used {
					t.Errorf("charged %d of %d reserved, want %d", bill.Cost, bill.Reserved, want)
				}
				if bill.Cancelled != (c.strict == cancelled) || bill.Outcome != outcome {
					t.Errorf("outcome %s, cancelled %v", bill.Outcome, bill.Cancelled)
				}
				if known := c.strict == asUsed; bill.Usage.Known != known || known && bill.Usage.Output != c.out {
					t.Errorf("usage %+v", bill.Usage)
				}
				if spend := w.metric("headgate_spend_usd_total"); int64(spend*dollar+.5) != want {
					t.Errorf("the counter says %v", spend)
				}
			})
		}
	}
}

// TestTheBillTellsTheRequest as the usage log wants it.
func TestTheBillTellsTheRequest(t *testing.T) {
	w := newWorld(t, setup{aliases: map[string]string{"alias": "m"}, change: func(c *proxy.Caller) { c.AnySurface, c.AssertUser = true, true }})
	w.do(call{
		path: "/v1/completions", body: `{"model":"m","prompt":[1,2,3,4],"max_tokens":6,"stream":true}`,
		header: header("X-Headgate-User", "ann", "X-Headgate-Surface", "docs", "X-Headgate-Class", "background", "X-Request-Id", "r1"),
	}).want(t, 200)
	w.settled()
	b := w.till.bill(t)
	if b.RequestID != "r1" || b.Tenant != "acme" || b.Key != "k1" || b.User != "ann" || b.Surface != "docs" || b.Class != "background" ||
		b.Model != "m" || b.Asked != "m" || b.Backend != "vllm" || b.Status != 200 || b.Outcome != "ok" || !b.Stream {
		t.Errorf("%+v", b)
	}
	if b.Usage.Input != 4 || b.Usage.Output != 6 || b.Cost != 4*priceInput+6*priceOutput || b.Reserved != b.Cost || len(b.Charges) != 0 {
		t.Errorf("%+v", b)
	}
	if b.TTFT <= 0 || b.Latency < b.TTFT || b.Time.IsZero() || b.InputTokens != 4 || b.OutputTokens != 6 {
		t.Errorf("%+v", b)
	}
}

// TestOnlyWhatRunsAModelHasABill.
func TestOnlyWhatRunsAModelHasABill(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{named(limit(proxy.Tokens, 100), "t")}, prefilter: edge1000()})
	w.do(call{method: http.MethodGet, path: "/v1/models"}).want(t, 200)
	w.do(call{path: "/tokenize", body: `{"model":"m","prompt":"x"}`}).want(t, 200)
	w.do(call{body: `{`}).want(t, 400)
	w.do(call{body: `{"model":"m","messages":[],"max_tokens":1000}`}).want(t, 400) // more than the limit's burst
	w.settled()
	if n := len(w.till.bills); n != 0 {
		t.Errorf("%d bills", n)
	}
}

// TestPanicsOfMoney: one in Reserve gives the limits back; one in Settle leaves what was
// reserved spent, and is not tried again.
func TestPanicsOfMoney(t *testing.T) {
	bomb := func(n int) func() {
		return func() {
			if n--; n == 0 {
				panic("money")
			}
		}
	}
	limits := []proxy.Limit{limit(proxy.Concurrency, 1), limit(proxy.Tokens, 1000)}
	money := newTill()
	money.before = bomb(1)
	w := newWorld(t, setup{money: money, limits: limits, change: budgeted(budget("month", dollar))})
	w.do(call{path: "/v1/completions", body: exact}).refused(t, 500, "internal_error")
	w.settled()
	if n := w.spent(w.caller.Limits[1]); n != 0 || w.till.spent("month") != 0 {
		t.Errorf("%d tokens and %d nano-dollars spent by what no backend saw", n, w.till.spent("month"))
	}
	w.do(call{path: "/v1/completions", body: exact}).want(t, 200)

	money = newTill()
	boom, calls := bomb(1), 0
	money.after = func(*proxy.Bill) { calls++; boom() }
	w = newWorld(t, setup{money: money, limits: limits, change: budgeted(strict(budget("month", dollar)))})
	w.do(call{path: "/v1/completions", body: exact}).refused(t, 500, "internal_error")
	if err := w.proxy.Wait(patience(t)); err != nil {
		t.Fatal(err)
	}
	if calls != 1 || len(money.open) != 1 {
		t.Errorf("settled %d times, %d open", calls, len(money.open))
	}
	money.open, money.accounts = map[uint64]granted{}, map[account]*balance{} // as a restart would
	w.do(call{path: "/v1/completions", body: exact}).want(t, 200)
}

// TestAPanicAfterTheBackendWorkedIsPaidFor: what a strict budget reserved stays spent.
func TestAPanicAfterTheBackendWorkedIsPaidFor(t *testing.T) {
	m := model("m", "vllm")
	price, calls := m.Cost, 0
	m.Cost = func(u openai.Usage, images, audio int64) int64 {
		if calls++; calls == 2 {
			panic("price")
		}
		return price(u, images, audio)
	}
	w := newWorld(t, setup{models: []*proxy.Model{m}, change: budgeted(strict(budget("month", dollar)))})
	w.do(call{path: "/v1/completions", body: exact}).refused(t, 500, "internal_error")
	w.settled()
	if b := w.till.bill(t); b.Cost != b.Reserved || b.Cost == 0 || b.Outcome != "failed" {
		t.Errorf("%+v", b)
	}
}

// TestAudioBySecondsIsRefusedAtTheEnd: a model that is priced by the second of audio alone has an estimate, so that a
// budget that is used up refuses it.
func TestAudioBySecondsIsRefusedAtTheEnd(t *testing.T) {
	m := model("m", "vllm")
	m.Cost = func(_ openai.Usage, _, audio int64) int64 { return audio * 1000 }
	m.UpperBound = func(_, _, _, audio int64) int64 { return audio * 1000 }
	c := call{path: "/v1/audio/transcriptions", header: header("Content-Type", "multipart/form-data; boundary=B"), body: "--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n" +
		"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n" + strings.Repeat("a", 80_000) + "\r\n--B--\r\n"}
	w := newWorld(t, setup{models: []*proxy.Model{m}, change: budgeted(budget("month", 15_000))})
	w.do(c).want(t, 200)
	w.settled()
	if b := w.till.bill(t); b.Reserved != 10_000 {
		t.Errorf("ten seconds reserve %d", b.Reserved)
	}
	w.till.opening = 15_000
	w.till.accounts = map[account]*balance{}
	w.do(c).refused(t, 429, "insufficient_quota")
}

// TestClientsThatLeavePay: for what passed, or under a strict budget for what was reserved.
func TestClientsThatLeavePay(t *testing.T) {
	for _, isStrict := range []bool{false, true} {
		for _, body := range []string{plainCall, streaming(plainCall)} {
			b := budget("month", dollar)
			b.Strict = isStrict
			w := newWorld(t, setup{change: budgeted(b)})
			w.fake.HoldAfter(3)
			leave := w.start(call{path: "/v1/completions", body: body}, 0)
			w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
			leave()
			w.settled()
			bill := w.till.bill(t)
			if bill.Outcome != "client_gone" || bill.Cost == 0 || isStrict && bill.Cost != bill.Reserved || bill.Usage.Known {
				t.Errorf("strict %v: %+v", isStrict, bill)
			}
		}
	}
}

// TestCutPays: also where the gateway stops.
func TestCutPays(t *testing.T) {
	w := newWorld(t, setup{change: budgeted(strict(budget("month", dollar)))})
	w.fake.Hold()
	leave := w.start(call{path: "/v1/completions", body: plainCall}, 0)
	defer leave()
	w.await(func(s fakevllm.Stats) bool { return s.Held == 1 })
	w.proxy.Cut()
	w.settled()
	if b := w.till.bill(t); b.Cost != b.Reserved || b.Cost == 0 || b.Outcome != "upstream_error" {
		t.Errorf("%+v", b)
	}
}

// TestRetriesPayOnce: a backend that cannot have got the request costs nothing.
func TestRetriesPayOnce(t *testing.T) {
	m := model("m", "dead", "vllm")
	w := newWorld(t, setup{
		models: []*proxy.Model{m}, change: budgeted(budget("month", dollar)),
		backends: []upstream.Backend{{Name: "dead", URL: closedPort(t)}, {Name: "vllm"}},
	})
	for range 3 {
		w.do(call{path: "/v1/completions", body: exact}).want(t, 200)
	}
	w.settled()
	if n := w.till.spent("month"); n != 3*(4*priceInput+6*priceOutput) || len(w.till.bills) != 3 {
		t.Errorf("%d spent by %d bills", n, len(w.till.bills))
	}
}

// TestFallbacksPayTheirOwnPrice: the first model's bill is cancelled.
func TestFallbacksPayTheirOwnPrice(t *testing.T) {
	dear, cheap := model("m", "dead"), model("cheap", "vllm")
	dear.Fallback = []string{"cheap"}
	cheap.Cost = func(u openai.Usage, _, _ int64) int64 { return u.Input + u.Output }
	cheap.UpperBound = func(in, out, _, _ int64) int64 { return in + out }
	for _, isStrict := range []bool{false, true} {
		b := budget("month", dollar)
		b.Strict = isStrict
		w := newWorld(t, setup{
			models: []*proxy.Model{dear, cheap}, change: budgeted(b),
			backends: []upstream.Backend{{Name: "dead", URL: closedPort(t)}, {Name: "vllm"}},
		})
		w.do(call{path: "/v1/completions", body: exact}).want(t, 200)
		w.settled()
		if n := len(w.till.bills); n != 2 {
			t.Fatalf("%d bills", n)
		}
		first, second := w.till.bills[0], w.till.bills[1]
		if !first.Cancelled || first.Model != "m" || second.Cancelled || second.Model != "cheap" || second.Asked != "m" || second.Cost != 10 || w.till.spent("month") != 10 {
			t.Errorf("%+v\n%+v", first, second)
		}
	}
}

// TestBudgetsRefuse, each kind in its words, and give the limits back.
func TestBudgetsRefuse(t *testing.T) {
	month := budget("org-month", 10_000)
	month.Period = func(now time.Time) (int64, int64) {
		return now.Add(-time.Hour).UnixNano(), now.Add(36 * time.Hour).UnixNano()
	}
	rolling := budget("rolling", 10_000)
	rolling.Window = 30 * 24 * time.Hour
	small, debt := month, month
	small.Name, small.Amount, debt.Amount = "small", 1000, 8000
	for _, c := range []struct {
		name         string
		budget       proxy.Budget
		broke        int
		err          error
		status       int
		code         string
		after, retry string // headers
		has          string
	}{
		{"period", month, 0, &proxy.Broke{}, 429, "insufficient_quota", "129600", "false", `budget "org-month" of $0.00001 (org) has $0.000001 left, and this request may cost $0.0000044, with an answer of 6 tokens: lower max_tokens`},
		{"period, 402", month, 402, &proxy.Broke{}, 402, "insufficient_quota", "129600", "false", "it starts anew at "},
		{"none", budget("all", 10_000), 0, &proxy.Broke{}, 429, "insufficient_quota", "", "false", `budget "all"`},
		{"none, 402", budget("all", 10_000), 402, &proxy.Broke{}, 402, "insufficient_quota", "", "false", `budget "all"`},
		{"rolling", rolling, 0, &proxy.Broke{RetryAfter: 2 * time.Hour}, 429, "insufficient_quota", "3600", "false", "rolling"},
		{"rolling, soon", rolling, 0, &proxy.Broke{RetryAfter: 90 * time.Second}, 429, "insufficient_quota", "90", "false", "rolling"},
		{"in flight", month, 402, &proxy.Broke{Kind: proxy.InFlight}, 429, "insufficient_quota", "1", "", "held by requests in flight"},
		{"unavailable", month, 402, &proxy.Broke{Kind: proxy.Unavailable}, 503, "billing_unavailable", "1", "", "another node"},
		{"nobody's", month, 0, &proxy.Broke{Index: -1, Kind: proxy.Unavailable, Err: errors.New("disk full")}, 503, "billing_unavailable", "1", "", "another node"},
		{"unforeseen", month, 0, errors.New("what?"), 503, "billing_unavailable", "1", "", "another node"},
		{"never", small, 0, &proxy.Broke{RetryAfter: time.Hour}, 429, "insufficient_quota", "", "false", "with an answer of 6 tokens, more than all of budget \"small\" of $0.000001 (org), so that waiting does not help: lower max_tokens"},
		{"never, strict", strict(small), 0, &proxy.Broke{}, 429, "insufficient_quota", "", "false", "costs at least $0.0000132, more than all of"},
		{"in debt", debt, 0, &proxy.Broke{}, 429, "insufficient_quota", "129600", "false", "is used up: -$0.000001 is left"},
		{"no log", month, 402, &proxy.Broke{Index: -1, Kind: proxy.Unavailable, Unwritten: true}, 503, "billing_unavailable", "1", "", "usage log"},
	} {
		t.Run(c.name, func(t *testing.T) {
			log := newBuffer()
			money := spent(9000)
			money.refuse = c.err
			w := newWorld(t, setup{money: money, broke: c.broke, log: log, limits: []proxy.Limit{limit(proxy.Requests, 10), limit(proxy.Concurrency, 1)}, change: budgeted(c.budget)})
			a := w.do(call{path: "/v1/completions", body: exact}).refused(t, c.status, c.code)
			if got := a.header.Get("Retry-After"); got != c.after || a.header.Get("X-Should-Retry") != c.retry {
				t.Errorf("Retry-After %q, X-Should-Retry %q", got, a.header.Get("X-Should-Retry"))
			}
			if msg, _ := a.field("message").(string); !strings.Contains(msg, c.has) || c.after == "" && strings.Contains(msg, "anew") {
				t.Errorf("%s", msg)
			}
			w.settled()
			if n := w.spent(w.caller.Limits[0]); n != 0 || len(money.bills) != 0 || w.fake.Stats().Requests != 0 {
				t.Errorf("a refusal cost %d requests, %d bills", n, len(money.bills))
			}
			if r := log.records(t); len(r) != 1 || r[0]["outcome"] != "refused" || r[0]["code"] != c.code || !strings.Contains(r[0]["cause"].(string), c.has) {
				t.Errorf("%v", r)
			}
			money.refuse = nil
			w.do(call{path: "/v1/completions", body: exact, header: nil}).refused(t, cmp.Or(c.broke, 429), "insufficient_quota") // costs more than there is
		})
	}
}

// TestBudgetRefusalsInOtherDialects.
func TestBudgetRefusalsInOtherDialects(t *testing.T) {
	w := newWorld(t, setup{broke: 402, change: budgeted(budget("all", 10))})
	a := w.do(call{path: "/v1/messages", body: `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}`}).want(t, 402)
	if a.field("type") != "billing_error" {
		t.Error(a.body)
	}
	a = w.do(call{body: chat}).want(t, 402)
	if a.field("type") != "insufficient_quota" || a.field("limit") != "all" || a.field("unit") != "usd" || a.field("scope") != "org" {
		t.Error(a.body)
	}
	a = w.do(call{body: chat, header: header("Accept", "application/problem+json")}).want(t, 402)
	if !strings.Contains(a.body, "quota-exceeded") || !strings.Contains(a.body, `"violated-policies":["all"]`) {
		t.Error(a.body)
	}
}

// TestFreeModelsPassAnExhaustedBudget.
func TestFreeModelsPassAnExhaustedBudget(t *testing.T) {
	paid, free := model("m", "vllm"), model("free", "vllm")
	free.Free, free.Cost = true, func(openai.Usage, int64, int64) int64 { return 0 }
	w := newWorld(t, setup{models: []*proxy.Model{paid, free}, change: budgeted(strict(budget("all", 0)))})
	w.do(call{body: chat}).refused(t, 429, "insufficient_quota")
	a := w.do(call{body: strings.Replace(chat, `"m"`, `"free"`, 1)}).want(t, 200)
	w.settled()
	if b := w.till.bill(t); b.Model != "free" || len(b.Charges) != 0 || b.Cost != 0 {
		t.Errorf("%+v", b)
	}
	if a.header.Get("RateLimit") != "" {
		t.Errorf("a budget that was not asked shows: %s", a.header.Get("RateLimit"))
	}
}

// TestModelBudgetsFallBack: a budget of the model alone leaves the others.
func TestModelBudgetsFallBack(t *testing.T) {
	first, second := model("m", "vllm"), model("n", "vllm")
	first.Fallback = []string{"n"}
	b := budget("model", 1)
	b.Scope = proxy.ScopeModel
	second.Free = true
	w := newWorld(t, setup{models: []*proxy.Model{first, second}, change: budgeted(b)})
	if a := w.do(call{body: chat}).want(t, 200); a.header.Get("X-Headgate-Degraded") != "model=n" {
		t.Errorf("%v", a.header)
	}
	w = newWorld(t, setup{models: []*proxy.Model{first, second}, change: budgeted(budget("org", 1))})
	w.do(call{body: chat}).refused(t, 429, "insufficient_quota")
}

// TestAllBudgetsOrNone: a refusal by one leaves the others as they were, and each scope has
// its own account.
func TestAllBudgetsOrNone(t *testing.T) {
	user, org := budget("user", dollar), budget("org", dollar)
	user.Scope = proxy.ScopeUser
	all := budget("all", 10_000)
	all.Scope = proxy.ScopeGlobal
	w := newWorld(t, setup{change: func(c *proxy.Caller) { c.Budgets, c.AssertUser = []proxy.Budget{user, org, all}, true }})
	const cost = 4*priceInput + 6*priceOutput
	w.do(call{path: "/v1/completions", body: exact, header: header("X-Headgate-User", "ann")}).want(t, 200)
	w.do(call{path: "/v1/completions", body: exact, header: header("X-Headgate-User", "bob")}).want(t, 200)
	w.do(call{path: "/v1/completions", body: exact, header: header("X-Headgate-User", "bob")}).refused(t, 429, "insufficient_quota")
	w.settled()
	for k, a := range w.till.accounts {
		want := int64(cost)
		if k.key.Limit != "user" {
			want *= 2
		}
		if a.spent != want || (k.key.Tenant == "") != (k.key.Limit == "all") {
			t.Errorf("%v spent %d, want %d", k.key, a.spent, want)
		}
	}
	if len(w.till.accounts) != 4 {
		t.Errorf("%d accounts", len(w.till.accounts))
	}
}

// TestSwitchesBindWhileTheLedgerIsAsked.
func TestSwitchesBindWhileTheLedgerIsAsked(t *testing.T) {
	money := newTill()
	w := newWorld(t, setup{money: money, change: budgeted(budget("all", dollar))})
	money.before = func() { w.proxy.SetSwitches(&proxy.Switches{Global: &proxy.Kill{}}) }
	w.do(call{body: chat}).refused(t, 403, "killed")
	w.settled()
	if b := money.bill(t); !b.Cancelled {
		t.Errorf("%+v", b)
	}
}

// TestClientGoneWhileTheLedgerIsAsked holds nothing.
func TestClientGoneWhileTheLedgerIsAsked(t *testing.T) {
	money := newTill()
	asked, answer := make(chan struct{}), make(chan struct{})
	money.refuse = context.Canceled
	money.before = func() { close(asked); <-answer }
	w := newWorld(t, setup{money: money, limits: []proxy.Limit{limit(proxy.Requests, 10)}, change: budgeted(budget("all", dollar))})
	leave := w.start(call{body: chat}, 0)
	<-asked
	leave()
	w.eventually(func() bool { return w.metric("headgate_inflight_reservations") == 1 })
	close(answer)
	w.settled()
	if n := w.spent(w.caller.Limits[0]); n != 0 {
		t.Errorf("%d requests spent", n)
	}
}

// TestClampedAnswers: a strict budget that is nearly spent shortens the answer, says so, and
// refuses once not even one token is affordable.
func TestClampedAnswers(t *testing.T) {
	m := model("m", "vllm")
	m.TemplateTokens = 1
	body := `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1000}`
	log := newBuffer()
	w := newWorld(t, setup{log: log, models: []*proxy.Model{m}, change: budgeted(strict(budget("month", 200_000)))})
	a := w.do(call{body: body}).want(t, 200)
	w.settled()
	bill := w.till.bill(t)
	most := (200_000 - priceInput*int64(len(body)+1+16+16)) / priceOutput
	if got := a.header.Get("X-Headgate-Degraded"); got != "max_tokens="+strconv.FormatInt(most, 10) {
		t.Errorf("%q, want %d tokens", got, most)
	}
	if bill.Reserved > 200_000 || bill.Cost > bill.Reserved || w.till.spent("month") != bill.Cost {
		t.Errorf("%+v", bill)
	}
	if n := w.metric("headgate_budget_decisions_total", "outcome", "clamped"); n != 1 {
		t.Errorf("%v clamped", n)
	}
	if r := log.records(t)[0]; r["reserved_nano_usd"] != 200_000. || r["cost_nano_usd"] != float64(bill.Cost) || !slices.Equal(r["budgets"].([]any), []any{"month"}) {
		t.Errorf("%v", r)
	}
	for n := 0; ; n++ {
		a := w.do(call{body: body})
		if a.status == 429 {
			break
		}
		if a.want(t, 200); n > 100 {
			t.Fatal("the budget has no end")
		}
	}
	w.settled()
	if spent := w.till.spent("month"); spent > 200_000 || spent < 200_000-priceInput*int64(len(body)+1+16+16)-priceOutput {
		t.Errorf("%d of 200000 spent", spent)
	}
	if w.metric("headgate_strict_overruns_total") != 0 || w.metric("headgate_budget_spent_usd", "tenant", "acme", "budget", "month") != float64(w.till.spent("month"))/1e9 {
		t.Error("the metrics say otherwise")
	}
}

// TestAnOverrunIsChargedAndTold: a backend that passes its cap is believed.
func TestAnOverrunIsChargedAndTold(t *testing.T) {
	w := newWorld(t, setup{around: func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"object":"chat.completion","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":100000}}`))
		})
	}, change: budgeted(strict(budget("month", dollar)))})
	w.do(call{body: chat}).want(t, 200)
	w.settled()
	if b := w.till.bill(t); b.Cost != 5*priceInput+100_000*priceOutput || w.metric("headgate_strict_overruns_total") != 1 {
		t.Errorf("%+v", b)
	}
}

// TestTemplatesAreLearnt: a template that adds more than the policy says passes its strict
// budget's reservation once.
func TestTemplatesAreLearnt(t *testing.T) {
	w := newWorld(t, setup{around: func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"object":"chat.completion","choices":[],"usage":{"prompt_tokens":1500,"completion_tokens":5}}`))
		})
	}, change: budgeted(strict(budget("month", dollar)))})
	for i := range 3 {
		w.do(call{body: chat}).want(t, 200)
		w.settled()
		b := w.till.bill(t)
		if want := int64(1500*priceInput + 5*priceOutput); b.Cost != want || (b.Reserved < b.Cost) != (i == 0) || i > 0 && b.Reserved != want {
			t.Errorf("%d: charged %d of %d reserved", i, b.Cost, b.Reserved)
		}
	}
	if n := w.metric("headgate_strict_overruns_total"); n != 1 {
		t.Errorf("%v overruns", n)
	}
}

// TestAnOddAnswerIsNoTemplateForEver: answers that show less take it back, and so does time where nobody gets an answer.
func TestAnOddAnswerIsNoTemplateForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		input, media := 30_000, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:AAAA"}}]}],"max_tokens":5}`
		log := newBuffer()
		w := bubbled(t, setup{log: log, prefilter: edge1000(), around: func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, `{"object":"chat.completion","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":5}}`, input)
			})
		}, change: budgeted(strict(budget("month", 1000*dollar)))})
		reserved := func(body string) int64 {
			if a := w.handle(call{body: body}); a.status != 200 {
				t.Fatalf("%d: %s", a.status, a.body)
			}
			return w.till.bill(t).Reserved
		}
		usual := reserved(media)
		if n := reserved(media); n != usual {
			t.Errorf("a picture of many tokens is taken for a template: %d reserved, not %d", n, usual)
		}
		usual = reserved(chat)
		if n := reserved(chat); n < 30_000*priceInput {
			t.Errorf("%d reserved: nothing was learnt", n)
		}
		time.Sleep(4 * time.Minute)
		reserved(chat)
		time.Sleep(4 * time.Minute)
		if n := reserved(chat); n < 30_000*priceInput {
			t.Errorf("%d reserved: forgotten, though every answer shows it", n)
		}
		input = 6
		for range 64 {
			reserved(chat)
		}
		if n := reserved(chat); n != usual {
			t.Errorf("%d reserved after 64 answers that show less, %d before", n, usual)
		}
		input = 30_000
		reserved(chat)
		time.Sleep(6 * time.Minute)
		if n := reserved(chat); n != usual {
			t.Errorf("%d reserved after a while without an answer, %d before", n, usual)
		}
		if warned := strings.Count(log.b.String(), `"template_tokens":`); warned != 3 {
			t.Errorf("%d warnings, want one each time it was learnt", warned)
		}
	})
}

// TestExplainShowsBudgets, and changes nothing.
func TestExplainShowsBudgets(t *testing.T) {
	month := budget("month", 100_000)
	end := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	month.Period = func(time.Time) (int64, int64) { return end.AddDate(0, -1, 0).UnixNano(), end.UnixNano() }
	w := newWorld(t, setup{change: budgeted(month, strict(budget("all", 4000+288*priceInput)))})
	e := must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 4, Output: 6}))
	if !e.Admitted || len(e.Budgets) != 2 {
		t.Fatalf("%+v", e)
	}
	const cost = 4*priceInput + 6*priceOutput
	m, a := e.Budgets[0], e.Budgets[1]
	if m.Name != "month" || m.Cost != cost || m.Least != cost || m.Amount != 100_000 || m.Left != 100_000 || !m.Admitted || m.Ends == nil || !m.Ends.Equal(end) || m.Strict {
		t.Errorf("%+v", m)
	}
	const around = (256 + 16 + 16) * priceInput // what a chat template may add
	if !a.Strict || a.Cost != cost+around || a.Least != 4*priceInput+priceOutput+around || a.Ends != nil || e.Template != 288 {
		t.Errorf("%+v", a)
	}
	e = must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 40, Output: 6}))
	if e.Admitted || e.Refused != "all" || !strings.Contains(e.Reason, "more than all of budget") || e.Budgets[1].Admitted || !e.Budgets[0].Admitted {
		t.Errorf("%+v", e)
	}
	if len(w.till.open)+len(w.till.bills) != 0 || w.till.spent("month") != 0 || w.metric("headgate_budget_decisions_total") != 0 {
		t.Error("an explanation was charged")
	}
}

// TestBudgetKeys: a budget's account is that of its scope.
func TestBudgetKeys(t *testing.T) {
	b := budget("b", dollar)
	b.Scope = proxy.ScopeKey | proxy.ScopeModel
	w := newWorld(t, setup{change: budgeted(b)})
	w.do(call{body: chat}).want(t, 200)
	w.settled()
	if c := w.till.bill(t).Charges[0]; c.Key != (limiter.Key{Tenant: "acme", Limit: "b", Subject: "k1\x1fm"}) {
		t.Errorf("%v", c.Key)
	}
}

// TestUserBudgetOfAKeyWithoutAUser: the key is its own user, on the model asked for, on a fallback and in an explanation.
func TestUserBudgetOfAKeyWithoutAUser(t *testing.T) {
	b := budget("b", dollar)
	b.Scope = proxy.ScopeUser
	m := model("m", "none")
	m.Fallback = []string{"cheap"}
	w := newWorld(t, setup{models: []*proxy.Model{m, model("cheap", "vllm")}, change: budgeted(b)})
	w.do(call{body: chat}).want(t, 200)
	w.settled()
	for _, bill := range w.till.bills {
		if len(bill.Charges) != 1 || bill.Charges[0].Key.Subject != "key:k1" || bill.User != "key:k1" {
			t.Errorf("model %s: user %q pays from %+v", bill.Model, bill.User, bill.Charges)
		}
	}
	if len(w.till.bills) != 2 {
		t.Errorf("%d bills, want one for each model", len(w.till.bills))
	}
}

// TestEveryRouteThatRunsAModelIsPaidFor under a strict budget, forms and media too.
func TestEveryRouteThatRunsAModelIsPaidFor(t *testing.T) {
	m := model("m", "vllm")
	m.Context = 8192
	capped := false
	w := newWorld(t, setup{
		models: []*proxy.Model{m}, prefilter: edge1000(), change: budgeted(strict(budget("all", 100*dollar))),
		around: func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				b, err := io.ReadAll(r.Body)
				if err != nil {
					return
				}
				capped = capped || strings.Contains(string(b), "name=\"max_completion_tokens\"\r\n\r\n")
				r.Body = io.NopCloser(bytes.NewReader(b))
				h.ServeHTTP(w, r)
			})
		},
	})
	paid := 0
	for _, c := range routes() {
		if c.method != "" || strings.HasSuffix(c.path, "tokenize") || strings.HasSuffix(c.path, "count_tokens") || strings.HasSuffix(c.path, "cancel") {
			continue
		}
		before := len(w.till.bills)
		a := w.do(c)
		w.settled()
		if len(w.till.bills) != before+1 {
			t.Fatalf("%s: status %d without a bill: %s", c.path, a.status, clip(a.body))
		}
		b := w.till.bill(t)
		if a.status == 200 && (b.Cost <= 0 || b.Cost > b.Reserved) || a.status != 200 && b.Cost != 0 {
			t.Errorf("%s: status %d, charged %d of %d", c.path, a.status, b.Cost, b.Reserved)
		}
		if a.status == 200 {
			paid++
		}
	}
	if paid < 10 || !capped || w.metric("headgate_strict_overruns_total") != 0 {
		t.Errorf("%d paid for, a form was capped: %v", paid, capped)
	}
}
