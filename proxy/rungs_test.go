package proxy_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"headgate/proxy"
	"headgate/proxy/ladder"
)

// byHand sets a rung, and configures it.
func byHand(set ladder.Setting, s setup) setup {
	s.switches = rungs(time.Time{}, set.Rung.String())
	s.ladder = &ladder.Config{Settings: []ladder.Setting{set}, Models: []string{"m"}}
	return s
}

// TestRungStaleCache: what is too old is served, and the model is not asked.
func TestRungStaleCache(t *testing.T) {
	g := newAging()
	w := newWorld(t, setup{around: g.around, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Life.StaleIfError = 24 * time.Hour })}})
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	w.shelf.pass(3 * time.Hour)
	w.proxy.SetSwitches(rungs(time.Time{}, "stale_cache"))
	for _, body := range []string{question, streaming(question)} {
		a := w.later(call{body: body}).want(t, 200)
		if version(a.tier(t, "stale")) != "c-1" || a.header.Get("X-Headgate-Degraded") != "stale_cache" || g.calls.Load() != 1 {
			t.Errorf("degraded %q, %d calls: %s", a.header.Get("X-Headgate-Degraded"), g.calls.Load(), clip(a.body))
		}
	}
	w.later(call{body: question, header: header("X-Headgate-No-Degrade", "true")}).want(t, 200)
	if n := g.calls.Load(); n != 2 {
		t.Errorf("%d calls: who takes no less was served less", n)
	}
}

// TestRungDropOptional: applications are told, unless they said that they won't hear of it.
func TestRungDropOptional(t *testing.T) {
	w := newWorld(t, byHand(ladder.Setting{Rung: ladder.DropOptional}, setup{}))
	for _, c := range []struct{ no, want string }{{"", "drop_optional"}, {"true", ""}} {
		h := http.Header{}
		if c.no != "" {
			h.Set("X-Headgate-No-Degrade", c.no)
		}
		if got := w.do(call{body: chat, header: h}).want(t, 200).header.Get("X-Headgate-Degraded"); got != c.want {
			t.Errorf("no-degrade %q: degraded %q, want %q", c.no, got, c.want)
		}
	}
}

// TestRungCutMaxTokens: answers are cut at what the policy says, but for tools, structured output and those
// who take no less; what is reserved, kept and told goes by what was sent.
func TestRungCutMaxTokens(t *testing.T) {
	long := `{"model":"m","temperature":0,"messages":[{"role":"user","content":"hi"}],"max_tokens":50%s}`
	for _, c := range []struct {
		name, more string
		header     http.Header
		tokens     int64
		says       string
	}{
		{name: "cut", tokens: 3, says: "cut_max_tokens, max_tokens=3"},
		{name: "tools", more: `,"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]`, tokens: -1},
		{name: "structured", more: `,"response_format":{"type":"json_object"}`, tokens: -1},
		{name: "no degrade", header: header("X-Headgate-No-Degrade", "true"), tokens: 50},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, byHand(ladder.Setting{Rung: ladder.CutMaxTokens, MaxTokens: 3}, setup{limits: []proxy.Limit{limit(proxy.OutputTokens, 1000)}}))
			a := w.do(call{body: fmt.Sprintf(long, c.more), header: c.header}).want(t, 200)
			if got := a.header.Get("X-Headgate-Degraded"); got != c.says {
				t.Errorf("degraded %q, want %q", got, c.says)
			}
			if got := w.last().OutputTokens; c.tokens > 0 && got != c.tokens {
				t.Errorf("%d tokens, want %d", got, c.tokens)
			}
			if sent := string(w.last().Body); strings.Contains(sent, `"max_tokens":3`) != (c.says != "") {
				t.Errorf("sent %s", sent)
			}
		})
	}
}

// TestCutAnswersAreKeptAsCut: the answer to what was cut does not serve who asks for all of it.
func TestCutAnswersAreKeptAsCut(t *testing.T) {
	w := newWorld(t, byHand(ladder.Setting{Rung: ladder.CutMaxTokens, MaxTokens: 3}, setup{surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Length = true })}}))
	w.do(call{body: question}).want(t, 200)
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
	w.proxy.SetSwitches(nil)
	a := w.do(call{body: question}).want(t, 200)
	if n := w.fake.Stats().Requests; n != 2 || w.last().OutputTokens <= 3 {
		t.Errorf("%d requests, %d tokens: %s", n, w.last().OutputTokens, clip(a.body))
	}
}

// TestRungShedCost: dear requests are refused before anything is spent, cheap ones are not.
func TestRungShedCost(t *testing.T) {
	l := limit(proxy.Requests, 10)
	w := newWorld(t, byHand(ladder.Setting{Rung: ladder.ShedCost, AboveTokens: 20}, setup{limits: []proxy.Limit{l}}))
	a := w.do(call{path: "/v1/completions", body: plainCall}).refused(t, 429, "over_capacity")
	if a.header.Get("X-Headgate-Dropped") != "shed_cost" || a.header.Get("X-Headgate-Degraded") != "shed_cost" || !strings.Contains(a.body, "64") || w.spent(l) != 0 {
		t.Errorf("%v %s, %d spent", a.header, a.body, w.spent(l))
	}
	w.do(call{path: "/v1/completions", body: exact}).want(t, 200)
}

// TestRungStaticAnswer: by hand everybody who generates gets it, whole or as a stream, but for those who take
// no less; a URL sends them elsewhere.
func TestRungStaticAnswer(t *testing.T) {
	for _, c := range []struct {
		name   string
		set    ladder.Setting
		body   string
		header http.Header
		status int
		want   string
		asked  int64
	}{
		{name: "whole", set: ladder.Setting{Text: "we are full"}, body: chat, status: 200, want: `"content":"we are full"`},
		{name: "stream", set: ladder.Setting{Text: "we are full"}, body: streamed, status: 200, want: "data: [DONE]"},
		{name: "elsewhere", set: ladder.Setting{FallbackURL: "https://elsewhere.example/v1/chat/completions"}, body: chat, status: 307, want: "over_capacity"},
		{name: "no degrade", set: ladder.Setting{Text: "we are full"}, body: chat, header: header("X-Headgate-No-Degrade", "true"), status: 200, want: "choices", asked: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.set.Rung = ladder.StaticAnswer
			w := newWorld(t, byHand(c.set, setup{limits: []proxy.Limit{limit(proxy.Tokens, 1000)}}))
			w.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			a := w.do(call{body: c.body, header: c.header}).want(t, c.status)
			if !strings.Contains(a.body, c.want) || w.fake.Stats().Requests != c.asked || a.header.Get("Location") != c.set.FallbackURL {
				t.Errorf("%d asked; %v %s", w.fake.Stats().Requests, a.header, a.body)
			}
			if says := a.header.Get("X-Headgate-Degraded"); (says == "static_answer") == (c.asked > 0) {
				t.Errorf("degraded %q", says)
			}
			if c.asked == 0 && w.spent(w.caller.Limits[0]) != 0 {
				t.Errorf("%d tokens spent on nothing", w.spent(w.caller.Limits[0]))
			}
		})
	}
}

// TestLadderStepsByItself: pressure sets what the policy says, and takes it back; the static answer takes the
// place of refusals only.
func TestLadderStepsByItself(t *testing.T) {
	w := newWorld(t, setup{ladder: &ladder.Config{Models: []string{"m"}, Settings: []ladder.Setting{
		{Rung: ladder.ShedBestEffort, At: .5, For: time.Second}, {Rung: ladder.DropOptional, At: .6, For: time.Second}, {Rung: ladder.StaticAnswer, At: .7, For: time.Second, Text: "full"},
	}, Sheds: []ladder.Shed{{At: .9, Class: ladder.Background}}}})
	now := int64(0)
	press := func(p float64, d time.Duration) {
		for end := now + int64(d); now < end; now += int64(100 * time.Millisecond) {
			w.ladder.Step(now, func(string) float64 { return p })
		}
	}
	low := call{body: chat, header: header("X-Headgate-Class", "background")}
	w.do(low).want(t, 200)
	press(1, time.Minute)
	if a := w.do(call{body: chat}).want(t, 200); a.header.Get("X-Headgate-Degraded") != "drop_optional" || w.fake.Stats().Requests != 2 {
		t.Errorf("degraded %q, %d asked", a.header.Get("X-Headgate-Degraded"), w.fake.Stats().Requests)
	}
	if a := w.do(low).want(t, 200); !strings.Contains(a.body, `"full"`) || !strings.HasPrefix(a.header.Get("X-Headgate-Degraded"), "static_answer") || w.fake.Stats().Requests != 2 {
		t.Errorf("%v %s", a.header, a.body)
	}
	press(0, 5*time.Minute)
	if a := w.do(low).want(t, 200); a.header.Get("X-Headgate-Degraded") != "" {
		t.Errorf("degraded %q when all is well", a.header.Get("X-Headgate-Degraded"))
	}
}

// TestDegradedIsTold: what a rung did to an answer stands in its header, in the request's line and in the metrics, under the
// same words; what none touched is told nowhere.
func TestDegradedIsTold(t *testing.T) {
	for _, c := range []struct {
		name  string
		set   ladder.Setting
		body  string
		says  string
		rungs []string
	}{
		{name: "cut", set: ladder.Setting{Rung: ladder.CutMaxTokens, MaxTokens: 3}, body: chat, says: "cut_max_tokens, max_tokens=3", rungs: []string{"cut_max_tokens"}},
		{name: "optional", set: ladder.Setting{Rung: ladder.DropOptional}, body: chat, says: "drop_optional", rungs: []string{"drop_optional"}},
		{name: "shed", set: ladder.Setting{Rung: ladder.ShedCost, AboveTokens: 1}, body: chat, says: "shed_cost", rungs: []string{"shed_cost"}},
		{name: "static", set: ladder.Setting{Rung: ladder.StaticAnswer}, body: streamed, says: "static_answer", rungs: []string{"static_answer"}},
		{name: "none", set: ladder.Setting{Rung: ladder.ShedBestEffort}, body: chat},
	} {
		t.Run(c.name, func(t *testing.T) {
			log := newBuffer()
			w := newWorld(t, byHand(c.set, setup{log: log}))
			a := w.do(call{body: c.body})
			records := log.records(t)
			if len(records) != 1 {
				t.Fatalf("%d lines", len(records))
			}
			logged, _ := records[0]["degraded"].(string)
			if got := a.header.Get("X-Headgate-Degraded"); got != c.says || logged != c.says {
				t.Errorf("the header says %q, the log %q; want %q", got, logged, c.says)
			}
			if dropped, _ := records[0]["dropped"].(string); dropped != a.header.Get("X-Headgate-Dropped") {
				t.Errorf("the log says that it was dropped for %q, the header %q", dropped, a.header.Get("X-Headgate-Dropped"))
			}
			if n := w.metric("headgate_degraded_answers_total"); n != float64(len(c.rungs)) {
				t.Errorf("%v are counted", n)
			}
			for _, rung := range c.rungs {
				if n := w.metric("headgate_degraded_answers_total", "rung", rung); n != 1 {
					t.Errorf("%v of %s are counted", n, rung)
				}
			}
		})
	}
}
