package proxy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/limiter"
	"headgate/proxy"
)

// waiting blocks until so many requests wait for another's answer.
func (w *world) waiting(n int) {
	w.t.Helper()
	w.eventually(func() bool {
		return w.metric("headgate_cache_waiters") == float64(n) && w.metric("headgate_inflight_requests") > float64(n) // who leads counts among the former at first
	})
}

// crowd sends the same n times at once.
func (w *world) crowd(n int, c call) func() []answer {
	var all sync.WaitGroup
	out := make([]answer, n)
	for i := range n {
		all.Go(func() { out[i] = w.do(c) })
	}
	return func() []answer { all.Wait(); return out }
}

// follow begins n requests for a stream one after the other, each of which has its head when the next begins.
func (w *world) follow(n int, c call) func() []answer {
	w.t.Helper()
	var open []*http.Response
	for range n {
		res, err := w.client.Do(w.request(patience(w.t), c))
		if err != nil {
			w.t.Fatal(err)
		}
		open = append(open, res)
	}
	return func() (out []answer) {
		for _, res := range open {
			b, err := io.ReadAll(res.Body)
			_ = res.Body.Close()
			out = append(out, answer{res.StatusCode, res.Header, string(b), err})
		}
		return out
	}
}

// later asks once the flight of those who asked before has ended: until its last word is heard, whoever comes
// still belongs to them.
func (w *world) later(c call) (a answer) {
	w.t.Helper()
	w.eventually(func() bool {
		a = w.do(c)
		return a.header.Get("X-Headgate-Cache") != "live"
	})
	return a
}

// tiers counts what the cache said.
func tiers(as []answer) map[string]int {
	words := map[string]int{}
	for _, a := range as {
		words[fmt.Sprint(a.status, " ", a.header.Get("X-Headgate-Cache"))]++
	}
	return words
}

// TestOneAsksForAll: the others get its answer, whatever form they want it in, and pay nothing.
func TestOneAsksForAll(t *testing.T) {
	for name, c := range map[string]struct{ first, others string }{
		"whole":             {question, question},
		"streams":           {streaming(question), streaming(question)},
		"streams of whole":  {question, streaming(question)},
		"whole of a stream": {streaming(question), question},
	} {
		t.Run(name, func(t *testing.T) {
			goOn := make(chan struct{})
			up := script(func(n int64, w http.ResponseWriter, r *http.Request) {
				<-goOn
				if body, _ := io.ReadAll(r.Body); bytes.Contains(body, []byte(`"stream":true`)) {
					emit(w, saysInPieces(n, "one ", "answer")...)
					return
				}
				plain(w, says(n, "one answer"))
			})
			tokens := limit(proxy.Tokens, 1_000_000)
			w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}, limits: []proxy.Limit{limit(proxy.Requests, 100), limit(proxy.Concurrency, 50), tokens}})
			leader := w.crowd(1, call{body: c.first})
			w.eventually(func() bool { return up.calls.Load() == 1 })
			others := w.crowd(20, call{body: c.others})
			w.waiting(20)
			close(goOn)
			if a := leader()[0]; a.status != 200 || a.header.Get("X-Headgate-Cache") != "miss" {
				t.Errorf("the leader got %d %s", a.status, a.body)
			}
			got := others()
			if words := tiers(got); words["200 live"] != 20 {
				t.Errorf("%v", words)
			}
			for _, a := range got {
				if c.others == question && a.body != got[0].body || !strings.Contains(told(a.body), `"one answer"`) {
					t.Errorf("%s", a.body)
				}
			}
			w.settled()
			w.till.mu.Lock()
			costs := 0
			for _, b := range w.till.bills {
				if b.Cost > 0 {
					costs++
				} else if b.Tier != "exact" || b.Usage.Output != 2 || b.Backend != "" {
					t.Errorf("%+v", b)
				}
			}
			w.till.mu.Unlock()
			if costs != 1 || up.calls.Load() != 1 || w.spent(tokens) != 5 {
				t.Errorf("%d paid, the model was asked %d times, %d tokens", costs, up.calls.Load(), w.spent(tokens))
			}
		})
	}
}

// TestErrorsAreSharedWithThoseWhoWait: after a second try all get the model's error, and nobody later does.
func TestErrorsAreSharedWithThoseWhoWait(t *testing.T) {
	goOn := make(chan struct{})
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		<-goOn
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		_, _ = fmt.Fprintf(w, `{"error":{"message":"no %d","type":"BadRequestError","code":400}}`, n)
	})
	tokens := limit(proxy.Tokens, 1_000_000)
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}, limits: []proxy.Limit{tokens}, prefilter: edge1000()})
	done := w.crowd(10, call{body: question})
	w.eventually(func() bool { return up.calls.Load() == 1 })
	w.waiting(9)
	close(goOn)
	for _, a := range done() {
		if a.status != 400 || !strings.Contains(a.body, `"no `) {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if n := up.calls.Load(); n != 2 {
		t.Errorf("the model was asked %d times", n)
	}
	w.later(call{body: question}).want(t, 400).tier(t, "miss")
	if n := up.calls.Load(); n != 3 || w.spent(tokens) != 0 {
		t.Errorf("the model was asked %d times; %d tokens", n, w.spent(tokens))
	}
}

// TestRefusedLeadersHandOver: whoever may not ask the model does not keep the others from it.
func TestRefusedLeadersHandOver(t *testing.T) {
	held := make(chan struct{})
	var once sync.Once
	asks := make(chan struct{})
	poor := limit(proxy.Tokens, 3)
	w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}, callers: map[string]*proxy.Caller{
		"poor": {KeyID: "k2", Tenant: "acme", OnlySurface: "faq", Limits: []proxy.Limit{poor}},
	}, guard: func(l proxy.Limits) proxy.Limits {
		return guarded{l, func(cs []limiter.Charge) {
			if len(cs) > 0 && cs[0].Key.Subject == "k2" {
				once.Do(func() { close(asks); <-held })
			}
		}}
	}})
	leader := w.crowd(1, call{key: "poor", body: question})
	<-asks
	others := w.crowd(5, call{body: question})
	w.waiting(5)
	close(held)
	if a := leader()[0]; a.status != 400 || a.field("code") != "request_exceeds_limit" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if words := tiers(others()); words["200 miss"] != 1 || words["200 live"] != 4 {
		t.Errorf("%v", words)
	}
	if n := w.asked(); n != 1 || w.spent(poor) != 0 {
		t.Errorf("asked %d times", n)
	}
	w.do(call{key: "poor", body: question}).want(t, 200).tier(t, "exact") // which costs it no tokens
}

// guarded calls before each Take.
type guarded struct {
	proxy.Limits
	before func([]limiter.Charge)
}

func (g guarded) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	g.before(cs)
	return g.Limits.Take(ctx, cs, ds)
}

// stuck is a client that takes nothing until it goes on.
type stuck struct {
	*httptest.ResponseRecorder
	goesOn chan struct{}
}

func (s stuck) Write(p []byte) (int, error) {
	<-s.goesOn
	return s.ResponseRecorder.Write(p)
}

// TestSlowLeadersHoldUpNobody: one that does not read the answer it asked for.
func TestSlowLeadersHoldUpNobody(t *testing.T) {
	pieces := slices.Repeat([]string{strings.Repeat("0123456789abcdef", 100)}, 100)
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) { emit(w, saysInPieces(n, pieces...)...) })
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	slow, ended := stuck{httptest.NewRecorder(), make(chan struct{})}, make(chan struct{})
	goOn := sync.OnceFunc(func() { close(slow.goesOn) })
	defer goOn() // whatever happens
	go func() {
		defer close(ended)
		w.proxy.ServeHTTP(slow, w.request(patience(t), call{body: streaming(question)}))
	}()
	w.eventually(func() bool { return up.calls.Load() == 1 })
	frames := saysInPieces(1, pieces...)
	want := strings.Join(slices.Delete(frames, len(frames)-2, len(frames)-1), "") // without the usage, which nobody asked for
	for range 3 {
		a := w.do(call{body: streaming(question)}).want(t, 200)
		if a.header.Get("X-Headgate-Cache") == "live" && a.body != want || told(a.body) != told(want) {
			t.Errorf("%d bytes of %d", len(a.body), len(want))
		}
	}
	goOn()
	<-ended
	if text := slow.Body.String(); text != want {
		t.Errorf("the slow one got %d bytes of %d", len(text), len(want))
	}
	if n := up.calls.Load(); n != 1 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestLeaversHarmNobody: a leader that goes before or in the middle of its answer, and followers that do.
func TestLeaversHarmNobody(t *testing.T) {
	for _, begun := range []bool{false, true} {
		t.Run(fmt.Sprint("begun ", begun), func(t *testing.T) {
			goOn := make(chan struct{})
			up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
				frames := saysInPieces(n, "one ", "answer")
				if begun {
					emit(w, frames[0])
				}
				<-goOn
				if !begun {
					emit(w, frames[0])
				}
				emit(w, frames[1:]...)
			})
			w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}, limits: []proxy.Limit{limit(proxy.Tokens, 1_000_000)}})
			ctx, leave := context.WithCancel(t.Context())
			gone := make(chan error, 1)
			ended := make(chan struct{})
			go func() { // without a connection, which the gateway would see end at some time only
				defer close(ended)
				defer func() {
					if v := recover(); v != nil && v != http.ErrAbortHandler { //nolint:errorlint // it is no error to be wrapped
						t.Error(v)
					}
				}()
				w.proxy.ServeHTTP(httptest.NewRecorder(), w.request(ctx, call{body: streaming(question)}))
			}()
			w.eventually(func() bool { return up.calls.Load() == 1 })
			go func() { // one that follows and leaves
				res, err := w.client.Do(w.request(ctx, call{body: streaming(question)}))
				if err == nil {
					_, err = io.ReadAll(res.Body)
					_ = res.Body.Close()
				}
				gone <- err
			}()
			var others func() []answer
			whole := w.crowd(3, call{body: question})
			if begun {
				others = w.follow(3, call{body: streaming(question)})
				w.waiting(3)
				w.eventually(func() bool { return w.metric("headgate_inflight_requests") == 8 })
			} else {
				others = w.crowd(3, call{body: streaming(question)})
				w.waiting(7)
			}
			leave()
			if err := <-gone; err == nil {
				t.Error("whoever left got an answer")
			}
			w.eventually(func() bool { return w.metric("headgate_inflight_requests") == 7 })
			close(goOn)
			<-ended
			got := append(others(), whole()...)
			for _, a := range got {
				if a.status != 200 || a.err != nil || !strings.Contains(told(a.body), `"one answer"`) {
					t.Errorf("%d %v %s", a.status, a.err, a.body)
				}
			}
			w.settled()
			if n := up.calls.Load(); n != 1 {
				t.Errorf("the model was asked %d times", n)
			}
			w.do(call{body: question}).want(t, 200).tier(t, "exact")
			w.till.mu.Lock()
			defer w.till.mu.Unlock()
			for _, b := range w.till.bills {
				if b.Backend != "" && (b.Usage.Input != 3 || b.Usage.Output != 2 || b.Cost != 3*priceInput+2*priceOutput) {
					t.Errorf("the leader, whose client left, is charged %+v", b)
				}
			}
		})
	}
	t.Run("all of them", func(t *testing.T) {
		stopped := make(chan struct{}, 10)
		up := script(func(_ int64, _ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // so that the server sees the connection end
			<-r.Context().Done()
			stopped <- struct{}{}
		})
		w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if res, err := w.client.Do(w.request(ctx, call{body: question})); err == nil {
					_ = res.Body.Close()
					t.Error("there was an answer")
				}
			})
		}
		w.waiting(3)
		w.eventually(func() bool { return up.calls.Load() == 1 })
		leave()
		all.Wait()
		select {
		case <-stopped:
		case <-patience(t).Done():
			t.Error("the model goes on for nobody")
		}
	})
}

// TestBrokenStreamsAreSeenToBe: those who follow one learn that it broke off, whoever has had nothing gets
// another's, and nothing of it is kept.
func TestBrokenStreamsAreSeenToBe(t *testing.T) {
	goOn := make(chan struct{})
	up := script(func(n int64, w http.ResponseWriter, r *http.Request) {
		if n > 1 {
			plain(w, says(n, "another answer"))
			return
		}
		emit(w, saysInPieces(n, "one ")[0])
		<-goOn
		panic(http.ErrAbortHandler)
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	streams := w.follow(4, call{body: streaming(question)})
	whole := w.crowd(3, call{body: question})
	w.waiting(3)
	close(goOn)
	for _, a := range streams() {
		if a.status != 200 || !strings.Contains(a.body, `data: {"error"`) || strings.Contains(a.body, "[DONE]") {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	for _, a := range whole() {
		if a.status != 200 || !strings.Contains(a.body, "another answer") {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if n := up.calls.Load(); n != 2 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestErrorsWithinAreShownToThoseWhoFollow and to nobody later.
func TestErrorsWithinAreShownToThoseWhoFollow(t *testing.T) {
	goOn := make(chan struct{})
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		frames := saysInPieces(n, "one ", "answer")
		if n > 1 {
			emit(w, frames...)
			return
		}
		emit(w, frames[0])
		<-goOn
		emit(w, `data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}`+"\n\n", "data: [DONE]\n\n")
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	streams := w.follow(4, call{body: streaming(question)})
	close(goOn)
	for _, a := range streams() {
		if a.status != 200 || strings.Count(a.body, "EngineCore died") != 1 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	w.later(call{body: streaming(question)}).want(t, 200).tier(t, "miss")
	w.do(call{body: streaming(question)}).want(t, 200).tier(t, "exact")
}

// TestCutAnswersAreSharedNotKept: those who wait for the same get what was cut at the cap they named, too.
func TestCutAnswersAreSharedNotKept(t *testing.T) {
	goOn := make(chan struct{})
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		<-goOn
		plain(w, strings.Replace(says(n, "half an"), `"stop"`, `"length"`, 1))
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
	done := w.crowd(5, call{body: question})
	w.waiting(4)
	close(goOn)
	if words := tiers(done()); words["200 miss"] != 1 || words["200 live"] != 4 {
		t.Errorf("%v", words)
	}
	w.later(call{body: question}).want(t, 200).tier(t, "miss")
	if n := up.calls.Load(); n != 2 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestPrivateAnswersAreNotShared: what the backend says is nobody else's goes to whoever asked.
func TestPrivateAnswersAreNotShared(t *testing.T) {
	for _, body := range []string{question, streaming(question)} {
		goOn := make(chan struct{})
		up := script(func(n int64, w http.ResponseWriter, r *http.Request) {
			if n == 1 {
				<-goOn
			}
			w.Header().Set("Cache-Control", "no-store")
			if in, _ := io.ReadAll(r.Body); bytes.Contains(in, []byte(`"stream":true`)) {
				emit(w, saysInPieces(n, "for one")...)
				return
			}
			plain(w, says(n, "for one"))
		})
		w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}})
		done := w.crowd(4, call{body: body})
		w.waiting(3)
		close(goOn)
		ids := map[string]bool{}
		for _, a := range done() {
			a.want(t, 200)
			_, id, _ := strings.Cut(a.body, `"id":"`)
			ids[id[:3]] = true
		}
		if len(ids) != 4 || up.calls.Load() != 4 {
			t.Errorf("%d calls; answers %v", up.calls.Load(), ids)
		}
	}
}

// TestPanicsEndTheFill: they are settled, and the next who waits asks.
func TestPanicsEndTheFill(t *testing.T) {
	held := make(chan struct{})
	var calls atomic.Int64
	till := newTill()
	till.before = func() {
		if calls.Add(1) == 1 {
			<-held
			panic("a bug")
		}
	}
	w := newWorld(t, setup{surfaces: []*proxy.Surface{faq()}, money: till, limits: []proxy.Limit{limit(proxy.Concurrency, 10), limit(proxy.Tokens, 1_000_000)}})
	leader := w.crowd(1, call{body: question})
	w.eventually(func() bool { return calls.Load() == 1 })
	others := w.crowd(5, call{body: question})
	w.waiting(5)
	close(held)
	if a := leader()[0]; a.status != 500 || a.field("code") != "internal_error" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if words := tiers(others()); words["200 miss"] != 1 || words["200 live"] != 4 {
		t.Errorf("%v", words)
	}
}

// TestTooLongStreamsBreakOffForFollowers: never silently, and whoever asked gets all of it.
func TestTooLongStreamsBreakOffForFollowers(t *testing.T) {
	piece := strings.Repeat("0123456789abcdef", 4<<10)
	pieces := slices.Repeat([]string{piece}, 160) // 10 MiB
	goOn := make(chan struct{})
	up := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		frames := saysInPieces(n, pieces...)
		emit(w, frames[0])
		if n == 1 {
			<-goOn
		}
		emit(w, frames[1:]...)
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.MaxBytes = 16 << 20 })}})
	leader := w.follow(1, call{body: streaming(question)})
	followers := w.follow(2, call{body: streaming(question)})
	close(goOn)
	ended := func(body string) bool { return strings.HasSuffix(strings.TrimSpace(body), "data: [DONE]") }
	if a := leader()[0]; !ended(a.body) || len(a.body) < 10<<20 {
		t.Errorf("the leader got %d bytes", len(a.body))
	}
	for _, a := range followers() {
		if ended(a.body) == strings.Contains(a.body, `data: {"error"`) || ended(a.body) && len(a.body) < 10<<20 {
			t.Errorf("a follower got %d bytes without a word: …%s", len(a.body), a.body[max(0, len(a.body)-200):])
		}
	}
}

// aging is a model server that may fail.
type aging struct {
	*scripted
	fails atomic.Int64 // the status; 0: it answers; -1: it closes the connection
}

func newAging() *aging {
	g := &aging{}
	g.scripted = script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		switch s := g.fails.Load(); s {
		case 0:
			plain(w, says(n, "x"))
		case -1:
			panic(http.ErrAbortHandler)
		default:
			w.WriteHeader(int(s))
		}
	})
	return g
}

func version(a answer) string {
	_, id, _ := strings.Cut(a.body, `"id":"`)
	id, _, _ = strings.Cut(id, `"`)
	return id
}

// TestStaleWhileRevalidate: what is too old is served while one request asks anew, at the expense of whoever
// was served.
func TestStaleWhileRevalidate(t *testing.T) {
	g := newAging()
	tokens := limit(proxy.Tokens, 1_000_000)
	w := newWorld(t, setup{around: g.around, limits: []proxy.Limit{limit(proxy.Requests, 1000), limit(proxy.Concurrency, 100), tokens}, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) {
		s.Exact.Life.Stale = time.Hour
	})}})
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	w.shelf.pass(80 * time.Minute) // it was never hit: half of its hour is over, and not all of the hour after
	w.proxy.SetSwitches(nil)
	got := w.crowd(20, call{body: question})()
	for _, a := range got {
		if a.status != 200 || version(a) != "c-1" && version(a) != "c-2" {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	w.eventually(func() bool { // unless the flight before it had not quite ended
		w.settled()
		if g.calls.Load() == 2 {
			return true
		}
		got = append(got, w.do(call{body: question}))
		return false
	})
	if words := tiers(got); words["200 stale"] == 0 || words["200 stale"]+words["200 exact"] != len(got) {
		t.Errorf("%v", words)
	}
	if a := w.do(call{body: streaming(question)}).want(t, 200).tier(t, "exact"); version(a) != "c-2" || a.header.Get("Age") != "0" {
		t.Errorf("%v %s", a.header, a.body)
	}
	if n := g.calls.Load(); n != 2 || w.spent(tokens) != 10 {
		t.Errorf("the model was asked %d times; %d tokens", n, w.spent(tokens))
	}
	w.till.mu.Lock()
	defer w.till.mu.Unlock()
	refreshes := 0
	for _, b := range w.till.bills {
		if b.Class == "best_effort" {
			refreshes++
			if b.Key != "k1" || b.Cost != 3*priceInput+2*priceOutput || b.Tier != "" || b.Backend != "vllm" {
				t.Errorf("%+v", b)
			}
		}
	}
	if refreshes != 1 {
		t.Errorf("%d refreshes", refreshes)
	}
}

// TestRefreshesThatFail: the fleet's trouble is no time to refresh, and one that failed may be tried again.
func TestRefreshesThatFail(t *testing.T) {
	g := newAging()
	w := newWorld(t, setup{around: g.around, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Life.Stale = time.Hour })}})
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	w.shelf.pass(80 * time.Minute)
	w.proxy.SetSwitches(&proxy.Switches{Rungs: map[string]time.Time{"shed_best_effort": {}}})
	w.do(call{body: question}).want(t, 200).tier(t, "stale")
	w.settled()
	if n := g.calls.Load(); n != 1 {
		t.Errorf("the model was asked %d times", n)
	}
	w.proxy.SetSwitches(nil)
	w.shelf.pass(time.Minute) // whoever had the right to refresh it did not
	for n, status := range []int64{500, 0} {
		g.fails.Store(status)
		w.eventually(func() bool { // unless the flight before it has not quite ended
			w.do(call{body: question}).want(t, 200).tier(t, "stale")
			w.settled()
			return g.calls.Load() == int64(n+2)
		})
	}
	w.do(call{body: question}).want(t, 200).tier(t, "exact")
	if n := g.calls.Load(); n != 3 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestEarlyRefresh: before an answer is too old it is asked for anew by one of those who read it.
func TestEarlyRefresh(t *testing.T) {
	var shelf *shelf
	g := script(func(n int64, w http.ResponseWriter, _ *http.Request) {
		shelf.pass(10 * time.Minute) // how long the model takes
		plain(w, says(n, "x"))
	})
	w := newWorld(t, setup{around: g.around, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) { s.Exact.Life.Beta = 5 })}})
	shelf = w.shelf
	w.do(call{body: question}).want(t, 200).tier(t, "miss")
	for range 100 {
		w.do(call{body: question}).want(t, 200).tier(t, "exact")
		w.settled()
		if g.calls.Load() == 2 {
			break
		}
	}
	if b := w.till.bill(t); g.calls.Load() != 2 || b.Class != "best_effort" || b.Cost == 0 {
		t.Errorf("the model was asked %d times; %+v", g.calls.Load(), b)
	}
	if a := w.do(call{body: question}).want(t, 200).tier(t, "exact"); version(a) != "c-2" {
		t.Errorf("%s", a.body)
	}
}

// TestStaleIfError: better an old answer than none, but not than the client's own mistake.
func TestStaleIfError(t *testing.T) {
	for name, c := range map[string]struct {
		fails  int64
		status int
	}{
		"500": {500, 200}, "503": {503, 200}, "429": {429, 200}, "no connection": {-1, 200}, "400": {400, 400}, "404": {404, 404},
	} {
		for _, body := range []string{question, streaming(question)} {
			t.Run(name, func(t *testing.T) {
				g := newAging()
				tokens := limit(proxy.Tokens, 1_000_000)
				w := newWorld(t, setup{around: g.around, limits: []proxy.Limit{tokens, limit(proxy.Concurrency, 2)}, surfaces: []*proxy.Surface{faqWith(func(s *proxy.Surface) {
					s.Exact.Life.StaleIfError = 24 * time.Hour
				})}})
				w.do(call{body: question}).want(t, 200).tier(t, "miss")
				w.shelf.pass(3 * time.Hour)
				g.fails.Store(c.fails)
				for range 2 {
					a := w.later(call{body: body}).want(t, c.status)
					if c.status == 200 && (version(a.tier(t, "stale")) != "c-1" || a.header.Get("Age") != "10800") {
						t.Errorf("%v %s", a.header, a.body)
					}
				}
				w.settled()
				if n := g.calls.Load(); n < 3 {
					t.Errorf("the model was asked %d times", n)
				}
				g.fails.Store(0)
				w.later(call{body: question}).want(t, 200).tier(t, "miss")
				w.do(call{body: question}).want(t, 200).tier(t, "exact")
				w.shelf.pass(30 * time.Hour)
				g.fails.Store(500)
				if a := w.later(call{body: question}); a.status == 200 {
					t.Errorf("%v %s", a.header, a.body)
				}
			})
		}
	}
}

// vectors answers for each input with a vector that its text makes, and counts inputs.
type vectors struct {
	mu     sync.Mutex
	inputs [][]string
}

func (v *vectors) serve(_ int64, w http.ResponseWriter, r *http.Request) {
	var in struct{ Input []string }
	raw, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(raw, &in); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	v.mu.Lock()
	v.inputs = append(v.inputs, in.Input)
	v.mu.Unlock()
	data, tokens := []string{}, 0
	for i, text := range in.Input {
		data = append(data, fmt.Sprintf(`{"object":"embedding","index":%d,"embedding":%s}`, i, vector(text)))
		tokens += len(text)
	}
	plain(w, fmt.Sprintf(`{"object":"list","data":[%s],"model":"fake","usage":{"prompt_tokens":%d,"total_tokens":%d}}`, strings.Join(data, ","), tokens, tokens))
}

func vector(text string) string {
	return fmt.Sprintf("[%d,0.%d1]", len(text), len(text))
}

// TestEmbeddingsAreKeptByInput: of a hundred inputs of which ninety are known the model is asked for ten.
func TestEmbeddingsAreKeptByInput(t *testing.T) {
	v := &vectors{}
	up := script(v.serve)
	tokens := limit(proxy.Tokens, 1_000_000)
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}, limits: []proxy.Limit{limit(proxy.Requests, 100), tokens}})
	texts := make([]string, 100)
	for i := range texts {
		texts[i] = strings.Repeat("x", i+1)
	}
	ask := func(in []string, word string) (vectors []json.RawMessage, usage int64) {
		t.Helper()
		raw, err := json.Marshal(map[string]any{"model": "m", "input": in})
		if err != nil {
			t.Fatal(err)
		}
		a := w.do(call{path: "/v1/embeddings", body: string(raw)}).want(t, 200)
		if got := a.header.Get("X-Headgate-Cache"); got != word {
			t.Errorf("X-Headgate-Cache: %s, want %s", got, word)
		}
		var out struct {
			Data []struct {
				Index     int
				Embedding json.RawMessage
			}
			Usage struct {
				Prompt int64 `json:"prompt_tokens"`
			}
		}
		if err := json.Unmarshal([]byte(a.body), &out); err != nil || len(out.Data) != len(in) {
			t.Fatalf("%v: %s", err, clip(a.body))
		}
		for i, d := range out.Data {
			if d.Index != i || string(d.Embedding) != vector(in[i]) {
				t.Errorf("the embedding of input %d is %s at %d", i, d.Embedding, d.Index)
			}
			vectors = append(vectors, d.Embedding)
		}
		return vectors, out.Usage.Prompt
	}
	var known, fresh []string
	for i, text := range texts {
		if i%10 == 3 {
			fresh = append(fresh, text)
		} else {
			known = append(known, text)
		}
	}
	sum := func(in []string) (n int64) {
		for _, s := range in {
			n += int64(len(s))
		}
		return n
	}
	if _, usage := ask(known, "miss"); usage != sum(known) {
		t.Errorf("usage %d of %d", usage, sum(known))
	}
	mixed := slices.Clone(texts)
	slices.Reverse(mixed)
	if _, usage := ask(mixed, "partial"); usage < sum(texts)-100 || usage > sum(texts)+100 { // shares of a sum are rounded
		t.Errorf("usage %d of %d", usage, sum(texts))
	}
	w.settled()
	if b := w.till.bill(t); b.Usage.Input != sum(fresh) || w.spent(tokens) != sum(texts) {
		t.Errorf("%d tokens of %d are charged, %d in all", b.Usage.Input, sum(fresh), w.spent(tokens))
	}
	ask(texts, "exact")
	ask(texts[:1], "exact")
	ask([]string{texts[5], texts[5]}, "exact")
	w.settled()
	if b := w.till.bill(t); b.Cost != 0 || b.Tier != "exact" || w.spent(tokens) != sum(texts) {
		t.Errorf("%+v", b)
	}
	slices.Reverse(fresh)
	if len(v.inputs) != 2 || !slices.Equal(v.inputs[1], fresh) {
		t.Errorf("%d calls; the second was for %q", len(v.inputs), v.inputs[len(v.inputs)-1])
	}
	w.do(call{path: "/v1/embeddings", body: `{"model":"m","input":["new"]}`, header: header("X-Headgate-Cache", "only")}).refused(t, 504, "not_cached")
}

// TestEmbeddingsOfOthers: the inputs are those of the tenant, and a part that fails is told as the whole.
func TestEmbeddingsOfOthers(t *testing.T) {
	fails := &atomic.Bool{}
	v := &vectors{}
	up := script(func(n int64, w http.ResponseWriter, r *http.Request) {
		if fails.Load() {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"error":{"message":"too long","code":400}}`)
			return
		}
		v.serve(n, w, r)
	})
	w := newWorld(t, setup{around: up.around, surfaces: []*proxy.Surface{faq()}, callers: map[string]*proxy.Caller{"other": {KeyID: "k1", Tenant: "globex", OnlySurface: "faq"}}})
	ask := func(key, input string) answer {
		return w.do(call{path: "/v1/embeddings", key: key, body: `{"model":"m","input":` + input + `}`})
	}
	ask("", `["a","bb"]`).want(t, 200).tier(t, "miss")
	ask("other", `["a","bb"]`).want(t, 200).tier(t, "miss")
	fails.Store(true)
	if a := ask("", `["a","ccc"]`).want(t, 400); !strings.Contains(a.body, "too long") {
		t.Errorf("%s", a.body)
	}
	if a := ask("", `["bb"]`).want(t, 200); a.header.Get("X-Headgate-Cache") != "exact" {
		t.Errorf("%v", a.header)
	}
	fails.Store(false)
	if a := ask("", `["a","ccc"]`).want(t, 200); a.header.Get("X-Headgate-Cache") != "partial" {
		t.Errorf("%v", a.header)
	}
	w.shelf.raise("acme", "faq")
	ask("", `["a"]`).want(t, 200).tier(t, "miss")
}
