package proxy_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/cache"
	"headgate/proxy"
)

// twins is a cache of similar questions that goes by a table: which question means the same as which, and how
// similar they are.
type twins struct {
	alike  map[[2]string]float64
	shadow bool
	gate   chan struct{} // unless nil, each Ask takes one out of it first

	mu     sync.Mutex
	asked  []proxy.SemanticQuestion
	kept   map[string]*proxy.CacheEntry // by partition and text
	taught int
	passed int // of those, that are not kept
}

func (s *twins) Ask(ctx context.Context, q *proxy.SemanticQuestion) proxy.SemanticTurn {
	if s.gate != nil {
		select {
		case <-s.gate:
		case <-ctx.Done():
			return proxy.SemanticTurn{Outcome: "failed"}
		}
	}
	cc := cache.Context(*q.Context)
	part, text, ok, err := cc.Partition("table")
	if err != nil || !ok {
		return proxy.SemanticTurn{Outcome: "unfit"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, *q)
	out := proxy.SemanticTurn{Outcome: "miss", Learn: func(e *proxy.CacheEntry, keep bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.taught++; keep {
			s.kept[string(part[:])+text] = e
		} else {
			s.passed++
		}
	}}
	for pair, similarity := range s.alike {
		if e := s.kept[string(part[:])+pair[0]]; pair[1] == text && e != nil && similarity >= q.Least {
			if out.Outcome = "shadow"; s.shadow {
				break
			}
			return proxy.SemanticTurn{Outcome: "hit", Hit: &proxy.Cached{
				ContentType: e.ContentType, Body: e.Body, Tags: e.Tags, Input: e.Input, Output: e.Output, Age: time.Minute, Via: "e1", Similarity: similarity,
			}}
		}
	}
	return out
}

func (s *twins) count() (asked, taught int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.asked), s.taught
}

func newTwins(gate chan struct{}) *twins {
	return &twins{gate: gate, kept: map[string]*proxy.CacheEntry{}, alike: map[[2]string]float64{
		{"How do I reset my password?", "How can I reset my password?"}: 0.866,
	}}
}

// help is faq with a cache of similar questions.
func help() *proxy.Surface {
	return faqWith(func(s *proxy.Surface) { s.Semantic = &proxy.SemanticCache{Mode: "static", Threshold: 0.85} })
}

// asking is a question to the model m.
func asking(text string) string {
	return fmt.Sprintf(`{"model":"m","temperature":0,"messages":[{"role":"user","content":%q}]}`, text)
}

const (
	resetDo  = "How do I reset my password?"
	resetCan = "How can I reset my password?"
)

// TestSimilarQuestions: one that means the same gets the answer of the other, as a hit that costs what a hit
// costs, and says what it is.
func TestSimilarQuestions(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
			log, s := newBuffer(), newTwins(nil)
			tokens := limit(proxy.Tokens, 1_000_000)
			w := newWorld(t, setup{surfaces: []*proxy.Surface{help()}, semantic: s, limits: []proxy.Limit{tokens}, log: log})
			one, other := asking(resetDo), asking(resetCan)
			if stream {
				other = streaming(other)
			}
			first := w.later(call{body: one, header: header("X-Fake-Output", "9")}).want(t, 200).tier(t, "miss")
			w.settled()
			spent := w.spent(tokens)
			hit := w.later(call{body: other, header: header("X-Fake-Output", "9")}).want(t, 200)
			h := hit.header
			if h.Get("X-Headgate-Cache") != "semantic" || h.Get("X-Headgate-Similarity") != "0.866" || h.Get("X-Headgate-Cache-Entry") != "e1" || h.Get("Age") != "60" || h.Get("X-Headgate-Backend") != "" {
				t.Fatalf("%v", h)
			}
			_, content, _ := strings.Cut(first.body, `"content":"`)
			content, _, _ = strings.Cut(content, `"`)
			if !stream && hit.body != first.body || !strings.Contains(hit.body, content) {
				t.Errorf("%s\nis told as\n%s", first.body, hit.body)
			}
			w.settled()
			if bill := w.till.bill(t); bill.Tier != "semantic" || bill.Cost != 0 || bill.Outcome != "ok" || w.spent(tokens) != spent {
				t.Errorf("%+v, %d tokens", bill, w.spent(tokens)-spent)
			}
			if hits, misses := w.metric("headgate_cache_requests_total", "tier", "semantic", "outcome", "hit"), w.metric("headgate_cache_requests_total", "outcome", "miss", "tier", "exact"); hits != 1 || misses != 1 {
				t.Errorf("%v hits, %v misses", hits, misses)
			}
			if n := w.metric("headgate_request_seconds", "path", "semantic"); n != 1 {
				t.Errorf("%v requests by the path", n)
			}
			lines := log.records(t)
			if last := lines[len(lines)-1]; last["cache"] != "semantic" || last["cache_entry"] != "e1" || last["similarity"] != 0.866 {
				t.Errorf("%v", last)
			}
			// It is not kept as an answer to the other question: whoever asks it again is looked up again.
			w.later(call{body: other, header: header("X-Fake-Output", "9")}).want(t, 200)
			if asked, taught := s.count(); asked != 3 || taught != 1 || w.asked() != 1 {
				t.Errorf("asked %d times, taught %d, the model %d", asked, taught, w.asked())
			}
		})
	}
}

// TestSimilarOnlyTightens: what a client may say of it, and when nobody looks.
func TestSimilarOnlyTightens(t *testing.T) {
	s := newTwins(nil)
	w := newWorld(t, setup{surfaces: []*proxy.Surface{help(), faqWith(func(s *proxy.Surface) { s.Name = "plain" })}, semantic: s})
	ask := func(word string, looks int, pairs ...string) {
		t.Helper()
		before, _ := s.count()
		a := w.later(call{body: asking(resetCan), header: header(pairs...)}).want(t, 200)
		if got := a.header.Get("X-Headgate-Cache"); got != word {
			t.Errorf("%v: %s, want %s", pairs, got, word)
		}
		if after, _ := s.count(); after-before != looks {
			t.Errorf("%v: looked %d times, want %d", pairs, after-before, looks)
		}
	}
	w.later(call{body: asking(resetDo)}).want(t, 200).tier(t, "miss")
	ask("semantic", 1, "X-Headgate-Similarity", "0.8")
	ask("semantic", 1, "X-Headgate-Cache", "only")
	ask("bypass", 0, "X-Headgate-Cache", "bypass")
	ask("miss", 0, "X-Headgate-Surface", "plain")
	w.do(call{body: asking("What else?"), header: header("X-Headgate-Cache", "only")}).refused(t, 504, "not_cached")
	for _, bad := range []string{"-0.1", "1.1", "NaN", "much", "0.5,0.6"} {
		if a := w.do(call{body: asking(resetCan), header: header("X-Headgate-Similarity", bad)}).want(t, 400); a.field("param") != "X-Headgate-Similarity" {
			t.Errorf("%s: %s", bad, a.body)
		}
	}
	ask("miss", 1, "X-Headgate-Similarity", "0.87")
	ask("exact", 0, "X-Headgate-Similarity", "1")
	ask("miss", 1, "X-Headgate-Cache", "refresh") // no hit: its answer takes the place of what is kept
	w.shelf.pass(2 * time.Hour)
	ask("miss", 1, "X-Headgate-Similarity", "1")
}

// TestSimilarIsSharedWithThoseWhoWait: of those who ask the same at once one looks, and those who want it to be
// closer ask the model.
func TestSimilarIsSharedWithThoseWhoWait(t *testing.T) {
	gate := make(chan struct{}, 100)
	s := newTwins(gate)
	w := newWorld(t, setup{surfaces: []*proxy.Surface{help()}, semantic: s})
	gate <- struct{}{}
	w.later(call{body: asking(resetDo)}).want(t, 200).tier(t, "miss")
	same := w.crowd(5, call{body: asking(resetCan)})
	w.waiting(4)
	stream := w.crowd(5, call{body: streaming(asking(resetCan))})
	w.waiting(9)
	closer := w.crowd(1, call{body: asking(resetCan), header: header("X-Headgate-Similarity", "0.9")})
	tagged := w.crowd(1, call{body: asking(resetCan), header: header("X-Headgate-Cache-Tags", "doc-7")})
	fresh := w.crowd(1, call{body: asking(resetCan), header: header("X-Headgate-Cache", "refresh")})
	w.waiting(12)
	gate <- struct{}{}
	if got := tiers(append(same(), stream()...)); got["200 semantic"] != 10 {
		t.Errorf("%v", got)
	}
	for _, a := range slices.Concat(closer(), tagged(), fresh()) {
		if word := a.header.Get("X-Headgate-Cache"); a.status != 200 || word == "semantic" || a.header.Get("X-Headgate-Similarity") != "" {
			t.Errorf("%d %s", a.status, word)
		}
	}
	if n := w.asked(); n < 2 || n > 4 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestRefreshedAnswersServeOtherWords: who has an answer made anew has it made anew for all who ask the same.
func TestRefreshedAnswersServeOtherWords(t *testing.T) {
	s := newTwins(nil)
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) { plain(w, says(n, fmt.Sprint("version ", n))) })
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{help()}, semantic: s})
	w.later(call{body: asking(resetDo)}).want(t, 200).tier(t, "miss")
	w.later(call{body: asking(resetDo), header: header("X-Headgate-Cache", "refresh")}).want(t, 200).tier(t, "miss")
	w.settled()
	if a := w.later(call{body: asking(resetCan)}).want(t, 200); a.header.Get("X-Headgate-Cache") != "semantic" || !strings.Contains(a.body, "version 2") {
		t.Errorf("%s: %s", a.header.Get("X-Headgate-Cache"), a.body)
	}
}

// TestSimilarLearns: of whole answers that are kept, and of no others.
func TestSimilarLearns(t *testing.T) {
	for _, c := range []struct {
		name, answer string
		taught, kept int
	}{
		{"an answer", says(1, "By mail."), 1, 1},
		{"a call", `{"id":"c","object":"chat.completion","created":7,"model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"t","type":"function","function":{"name":"f","arguments":"{\"who\":\"bob\"}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`, 1, 1},
		{"one that was cut", strings.Replace(says(1, "By"), `"stop"`, `"length"`, 1), 1, 0},
		{"one with the time", says(1, "It is 14:05 now."), 1, 0},
		{"one that is no JSON", "By mail.", 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newTwins(nil)
			up := script(func(_ int64, w http.ResponseWriter, _ *http.Request) { plain(w, c.answer) })
			w := newWorld(t, setup{around: up.around, semantic: s, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) {
				s.Exact.Tools, s.Semantic = true, &proxy.SemanticCache{Mode: "learned"}
			})}})
			if a := w.do(call{body: asking(resetDo)}); a.status != 200 && c.taught > 0 {
				t.Errorf("%d %s", a.status, a.body)
			}
			w.settled()
			if _, taught := s.count(); taught != c.taught || taught-s.passed != c.kept {
				t.Errorf("taught %d times, %d not to be kept, want %d and %d", taught, s.passed, c.taught, c.taught-c.kept)
			}
		})
	}
	t.Run("a failure", func(t *testing.T) {
		s := newTwins(nil)
		w := newWorld(t, setup{semantic: s, surfaces: []*proxy.Surface{help()}})
		w.do(call{body: asking(resetDo), header: fault("status=500")})
		w.settled()
		if _, taught := s.count(); taught != 0 {
			t.Errorf("taught %d times", taught)
		}
	})
	t.Run("in the shadow", func(t *testing.T) {
		s := newTwins(nil)
		s.shadow = true
		w := newWorld(t, setup{semantic: s, surfaces: []*proxy.Surface{help()}})
		w.later(call{body: asking(resetDo)}).want(t, 200).tier(t, "miss")
		w.later(call{body: asking(resetCan)}).want(t, 200).tier(t, "miss")
		if _, taught := s.count(); taught != 2 || w.asked() != 2 {
			t.Errorf("taught %d times, asked %d", taught, w.asked())
		}
		if n := w.metric("headgate_cache_requests_total", "tier", "semantic", "outcome", "shadow"); n != 1 {
			t.Errorf("%v in the shadow", n)
		}
	})
}

// TestSimilarWhoseAnswer: "What's my account balance?" of two users, two tenants, after another conversation.
func TestSimilarWhoseAnswer(t *testing.T) {
	s := newTwins(nil)
	s.alike = map[[2]string]float64{{"What's my account balance?", "What is my account balance?"}: 1}
	personal := help()
	personal.Share = false
	w := newWorld(t, setup{surfaces: []*proxy.Surface{personal}, semantic: s, callers: map[string]*proxy.Caller{
		"other-key-of-16-characters": {KeyID: "k2", Tenant: "globex", AnySurface: true, AssertUser: true, OnlySurface: "faq"},
	}})
	ask := func(body, user, with string) string {
		t.Helper()
		return w.later(call{key: with, body: body, header: header("X-Headgate-User", user)}).want(t, 200).header.Get("X-Headgate-Cache")
	}
	first, again := asking("What's my account balance?"), asking("What is my account balance?")
	if got := ask(first, "ann", ""); got != "miss" {
		t.Fatal(got)
	}
	system := func(body, prompt string) string {
		return strings.Replace(body, `"messages":[`, `"messages":[`+`{"role":"system","content":"`+prompt+`"},`, 1)
	}
	for _, c := range []struct{ name, body, user, key, want string }{
		{"another user", again, "bob", "", "miss"},
		{"another tenant", again, "ann", "other-key-of-16-characters", "miss"},
		{"another prompt", system(again, "You are a bank."), "ann", "", "miss"},
		{"another setting", strings.Replace(again, `"temperature":0`, `"temperature":0,"top_p":0.1`, 1), "ann", "", "miss"},
		{"the same", again, "ann", "", "semantic"},
	} {
		if got := ask(c.body, c.user, c.key); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	parts := map[string]bool{}
	for i := range s.asked {
		q := &s.asked[i]
		if !slices.Equal(q.Context.Backends, []string{"vllm"}) || q.Context.Generations == [4]uint64{} || q.Request == "" {
			t.Errorf("%+v", q)
		}
		parts[q.Context.Tenant+" "+q.Context.User] = true
	}
	if len(parts) != 3 {
		t.Errorf("%v", parts)
	}
}
