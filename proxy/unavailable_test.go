package proxy_test

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headgate/limiter"
	"headgate/proxy"
)

// tether is the way to the owner, which tests cut.
type tether struct{ cut atomic.Bool }

func (l *tether) held() bool { return !l.cut.Load() }

func mode(l proxy.Limit, m proxy.Mode) proxy.Limit {
	l.Unavailable = m
	return l
}

// decisions counted for a limit.
func (w *world) decisions(limit, mode, outcome string) int {
	return int(w.metric("headgate_decisions_total", "limit", limit, "mode", mode, "outcome", outcome))
}

// TestUnavailableModes: while the owner is out of reach, a private bucket stands in for local limits,
// deny refuses and allow neither checks nor charges; what the answers say of it; and nothing of it
// before and after.
func TestUnavailableModes(t *testing.T) {
	for _, c := range []struct {
		mode            proxy.Mode
		shadow          bool
		admitted, alone int64 // of 5 requests against a private 2 of a limit of 3
		outcome         string
		counted         int
	}{
		{mode: proxy.Local, admitted: 2, alone: 2, outcome: "admitted", counted: 2},
		{mode: proxy.Local, shadow: true, admitted: 5, alone: 2, outcome: "shadow_refused", counted: 3},
		{mode: proxy.Deny, outcome: "refused", counted: 5},
		{mode: proxy.Deny, shadow: true, admitted: 5, outcome: "shadow_refused", counted: 5},
		{mode: proxy.Allow, admitted: 5, outcome: "admitted", counted: 5},
	} {
		t.Run(c.mode.String(), func(t *testing.T) {
			l := mode(limit(proxy.Requests, 3), c.mode)
			l.Shadow, l.Private = c.shadow, limit(proxy.Requests, 2).Spec
			other := named(limit(proxy.Tokens, 1000), "other")
			var way tether
			w := newWorld(t, setup{limits: []proxy.Limit{l, other}, reach: way.held})
			way.cut.Store(true)
			var admitted int64
			for range 5 {
				a := w.do(call{path: "/v1/completions", body: exact})
				degraded := "quota"
				switch {
				case a.status == 200:
					admitted++
				case c.mode == proxy.Deny:
					a.refused(t, 429, "over_capacity")
					if a.field("limit") != "requests" || a.field("scope") != "key" || a.field("unit") != "requests" || a.header.Get("Retry-After") != "1" {
						t.Errorf("%v %s", a.header, a.body)
					}
					degraded = "deny"
				default:
					a.refused(t, 429, "rate_limit_exceeded")
				}
				if got := a.header.Get("X-Headgate-Degraded"); got != degraded {
					t.Errorf("X-Headgate-Degraded: %q, want %q", got, degraded)
				}
			}
			w.settled()
			if admitted != c.admitted || w.spentAlone(l) != c.alone || w.spentAlone(other) != 10*c.admitted || w.spent(l)+w.spent(other) != 0 {
				t.Errorf("%d admitted, %d and %d spent alone, %d and %d of the owner's", admitted, w.spentAlone(l), w.spentAlone(other), w.spent(l), w.spent(other))
			}
			if n := w.decisions("requests", "degraded", c.outcome); n != c.counted {
				t.Errorf("%d counted as %s, want %d", n, c.outcome, c.counted)
			}
			if n := w.metric("headgate_decisions_total", "mode", "local"); n != 0 {
				t.Errorf("%v decisions counted as local", n)
			}

			way.cut.Store(false)
			a := w.do(call{path: "/v1/completions", body: exact}).want(t, 200)
			if h := a.header.Get("X-Headgate-Degraded"); h != "" || w.spent(l) != 1 || w.spentAlone(l) != c.alone {
				t.Errorf("in reach again: %q, %d spent, %d alone", h, w.spent(l), w.spentAlone(l))
			}
		})
	}
}

// TestWhoDecided is in the metric's mode.
func TestWhoDecided(t *testing.T) {
	for by, mode := range map[limiter.By]string{limiter.ByLease: "local", limiter.ByOwner: "direct", limiter.ByRefusal: "refused_local", limiter.ByPrivate: "degraded"} {
		w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 1)}, by: by})
		ok := w.do(call{body: chat}).want(t, 200)
		no := w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
		if w.decisions("requests", mode, "admitted") != 1 || w.decisions("requests", mode, "refused") != 1 || w.metric("headgate_decisions_total") != 2 {
			t.Errorf("%v: not counted as %s", by, mode)
		}
		want := map[bool]string{true: "quota"}[mode == "degraded"]
		if ok.header.Get("X-Headgate-Degraded") != want || no.header.Get("X-Headgate-Degraded") != want {
			t.Errorf("%v: %v %v", by, ok.header, no.header)
		}
		if n := w.metric("headgate_decision_seconds"); n != 2 {
			t.Errorf("%v: %v decisions timed", by, n)
		}
	}
}

// TestDegradedIsSaid on what was decided without an owner, on errors and lists too, beside another
// word, and not where nothing was decided.
func TestDegradedIsSaid(t *testing.T) {
	models := twoModels()
	models[0].Backends, models[1].Backends, models[1].Upstream = []string{"gone"}, []string{"vllm"}, "fake"
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 100)}, models: models, reach: func() bool { return false }})
	for _, c := range []struct {
		call call
		want string
	}{
		{call{body: "{"}, "quota"},
		{call{body: chat, key: "unknown"}, ""},
		{call{path: "/sleep"}, "quota"},
		{call{method: http.MethodGet, path: "/v1/models"}, "quota"},
		{call{body: toBig}, "quota, model=small"},
		{call{body: streaming(toBig)}, "quota, model=small"},
	} {
		if a := w.do(c.call); a.header.Get("X-Headgate-Degraded") != c.want || a.header.Get("X-Headgate-Node") != "n1" {
			t.Errorf("%v: %v", c.call, a.header)
		}
	}
	w.proxy.SetSwitches(rungs(time.Time{}, "smaller_model"))
	if a := w.do(call{body: toBig}); a.header.Get("X-Headgate-Degraded") != "quota, smaller_model, model=small" {
		t.Errorf("%v", a.header)
	}
}

// TestDegradedIsSeen: the gauge shows it, and each change is one line of the log.
func TestDegradedIsSeen(t *testing.T) {
	log := newBuffer()
	var way tether
	w := newWorld(t, setup{reach: way.held, log: log})
	for i, want := range []bool{false, true, true, false, false, true} {
		way.cut.Store(want)
		gauge := map[bool]float64{true: 1}[want]
		if got, why := w.metric("headgate_degraded"), w.proxy.Degraded(); got != gauge || (why == "gw-2 is out of reach") != want || (why == "") == want {
			t.Errorf("%d: headgate_degraded %v, Degraded %q", i, got, why)
		}
		w.do(call{body: chat}).want(t, 200)
	}
	w.settled()
	log.mu <- struct{}{}
	defer func() { <-log.mu }()
	if out, in := strings.Count(log.b.String(), `"why":"gw-2 is out of reach"`), strings.Count(log.b.String(), "decided by its owner again"); out != 2 || in != 1 {
		t.Errorf("%d and %d lines", out, in)
	}
}

// TestOverride replaces each limit's mode while its owner is out of reach, and ends by itself.
func TestOverride(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var way tether
		w := bubbled(t, setup{reach: way.held, limits: []proxy.Limit{
			mode(named(limit(proxy.Requests, 100), "a"), proxy.Deny), mode(named(limit(proxy.Requests, 100), "b"), proxy.Allow),
		}})
		ask := func() int { return w.handle(call{body: chat}).status }
		spent := func() [2]int64 { return [2]int64{w.spent(w.caller.Limits[0]), w.spent(w.caller.Limits[1])} }
		alone := func() [2]int64 { return [2]int64{w.spentAlone(w.caller.Limits[0]), w.spentAlone(w.caller.Limits[1])} }

		w.proxy.SetOverride(proxy.Deny, time.Now().Add(time.Hour))
		if s := ask(); s != 200 || spent() != [2]int64{1, 1} {
			t.Fatalf("an override binds while the owner is in reach: %d, %v", s, spent())
		}
		way.cut.Store(true)
		if s := ask(); s != 429 {
			t.Errorf("deny over allow: %d", s)
		}
		w.proxy.SetOverride(proxy.Allow, time.Now().Add(15*time.Minute))
		if s := ask(); s != 200 || alone() != [2]int64{} {
			t.Errorf("allow over deny: %d, %v", s, alone())
		}
		w.proxy.SetOverride(proxy.Local, time.Now().Add(15*time.Minute))
		if s := ask(); s != 200 || alone() != [2]int64{1, 1} || spent() != [2]int64{1, 1} {
			t.Errorf("local over both: %d, %v, %v", s, alone(), spent())
		}
		time.Sleep(15*time.Minute - 1)
		if m, until, ok := w.proxy.Override(); !ok || m != proxy.Local || !until.Equal(time.Now().Add(1)) {
			t.Errorf("override %v until %v, %t", m, until, ok)
		}
		if s := ask(); s != 200 {
			t.Errorf("just before its end: %d", s)
		}
		time.Sleep(time.Nanosecond)
		if _, _, ok := w.proxy.Override(); ok {
			t.Error("it is still in force")
		}
		if s := ask(); s != 429 {
			t.Errorf("at its end: %d", s)
		}
		w.proxy.SetOverride(proxy.Allow, time.Now().Add(time.Hour))
		w.proxy.SetOverride(proxy.Allow, time.Time{}) // taken back
		if s := ask(); s != 429 {
			t.Errorf("taken back: %d", s)
		}
	})
}

// TestOutOfReachWhileWaiting: a request that is held is decided by the mode that holds when its
// turn comes, and says so if anything on its way was.
func TestOutOfReachWhileWaiting(t *testing.T) {
	for _, c := range []struct {
		before, after bool // out of reach
		mode          proxy.Mode
		status        int
		spent         int64
		degraded      string
	}{
		{before: false, after: true, mode: proxy.Deny, status: 429, spent: 1, degraded: "deny"},
		{before: false, after: true, mode: proxy.Allow, status: 200, spent: 1, degraded: "quota"},
		{before: true, after: false, mode: proxy.Allow, status: 200, spent: 2, degraded: "quota"},
	} {
		synctest.Test(t, func(t *testing.T) {
			// The one with the wait holds the request; what becomes of the other is at stake.
			wait := mode(named(fill(proxy.Requests, 1, time.Second, 1), "wait"), proxy.Local)
			wait.Wait = time.Minute
			stake := mode(named(limit(proxy.Requests, 5), "stake"), c.mode)
			var way tether
			w := bubbled(t, setup{limits: []proxy.Limit{wait, stake}, reach: way.held})
			w.handle(call{body: chat}).want(t, 200)
			way.cut.Store(c.before)
			if c.before { // the private bucket is full yet
				w.handle(call{body: chat}).want(t, 200)
			}
			answers := make(chan answer)
			go func() { answers <- w.handle(call{body: chat}) }()
			synctest.Wait()
			way.cut.Store(c.after)
			a := <-answers
			if h := a.header.Get("X-Headgate-Degraded"); a.status != c.status || w.spent(stake) != c.spent || h != c.degraded {
				t.Errorf("%+v: %d, %d spent, %q", c, a.status, w.spent(stake), h)
			}
		})
	}
}

// TestNoShare: where this node's private share of a limit is nothing, the limit refuses while its
// owner is out of reach, and says why; unless it only watches, or says allow.
func TestNoShare(t *testing.T) {
	for _, unit := range []proxy.Unit{proxy.Requests, proxy.Concurrency, proxy.Tokens} {
		l := limit(unit, 10)
		l.Private = nil
		var way tether
		w := newWorld(t, setup{limits: []proxy.Limit{l, named(limit(proxy.Requests, 100), "other")}, reach: way.held})
		w.do(call{body: chat}).want(t, 200) // by its owner
		way.cut.Store(true)
		a := w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
		if a.field("limit") != unit.String() || a.header.Get("Retry-After") != "1" || !strings.Contains(a.body, "own share is nothing") || !strings.Contains(a.body, "another node") {
			t.Errorf("%v %s", a.header, a.body)
		}
		if h := a.header.Get("RateLimit"); h != "" {
			t.Errorf("levels that nobody asked for: %s", h)
		}
		if n := w.decisions(unit.String(), "degraded", "refused"); n != 1 || w.spentAlone(w.caller.Limits[1]) != 0 {
			t.Errorf("%d counted, %d of the other spent", n, w.spentAlone(w.caller.Limits[1]))
		}
		w.proxy.SetOverride(proxy.Allow, time.Now().Add(time.Hour))
		w.do(call{body: chat}).want(t, 200)
	}
	l := limit(proxy.Requests, 1)
	l.Private, l.Shadow = nil, true
	w := newWorld(t, setup{limits: []proxy.Limit{l}, reach: func() bool { return false }})
	w.do(call{body: chat}).want(t, 200)
	if n := w.decisions("requests", "degraded", "shadow_refused"); n != 1 {
		t.Errorf("%d shadow refusals", n)
	}
}

// TestPrivateShareIsSmaller: what the owner would admit is not called more than the limit.
func TestPrivateShareIsSmaller(t *testing.T) {
	l := limit(proxy.Tokens, 100)
	l.Private = limit(proxy.Tokens, 50).Spec
	var way tether
	w := newWorld(t, setup{limits: []proxy.Limit{l}, reach: way.held})
	way.cut.Store(true)
	a := w.do(call{path: "/v1/completions", body: plainCall}).refused(t, 429, "rate_limit_exceeded")
	if !strings.Contains(a.body, "64 tokens, more than the 50 tokens") || a.header.Get("Retry-After") != "1" || a.header.Get("X-Headgate-Degraded") != "quota" {
		t.Errorf("%v %s", a.header, a.body)
	}
	w.do(call{path: "/v1/completions", body: strings.Replace(plainCall, "60", "200", 1)}).refused(t, 400, "request_exceeds_limit")
	way.cut.Store(false)
	w.do(call{path: "/v1/completions", body: plainCall}).want(t, 200)
}

// TestPrivateShareComesLater: what the owner lent may still be spent for a moment, and until then
// neither it nor the private bucket decides. A limit with a wait waits for that.
func TestPrivateShareComesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		later := &later{at: time.Now().Add(700 * time.Millisecond)}
		l := limit(proxy.Requests, 5)
		w := bubbled(t, setup{limits: []proxy.Limit{l}, guard: func(l proxy.Limits) proxy.Limits { later.Limits = l; return later }})
		e := must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 1, Output: 1}))
		if got := e.Limits[0]; got.By != "deny" || got.NoShare || got.RetryAfterMS != 700 || e.Admitted || !e.Degraded {
			t.Errorf("%+v", e)
		}
		a := w.handle(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
		if a.field("retry_after_ms") != 700.0 || a.header.Get("Retry-After") != "1" || a.header.Get("X-Headgate-Degraded") != "quota" || !strings.Contains(a.body, "another node") {
			t.Errorf("%v %s", a.header, a.body)
		}
		w.caller.Limits[0].Wait = time.Second
		if a := w.handle(call{body: chat}).want(t, 200); a.header.Get("X-Headgate-Degraded") != "quota" {
			t.Errorf("%v", a.header)
		}
	})
}

// later is an owner that went out of reach, and is back at a moment.
type later struct {
	proxy.Limits
	at time.Time
}

func (l *later) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	if wait := time.Until(l.at); wait > 0 {
		ds[0] = limiter.Decision{By: limiter.ByDeny, RetryAfter: wait}
		return 0
	}
	return l.Limits.Take(ctx, cs, ds)
}

func (l *later) Peek(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	return l.Take(ctx, cs, ds)
}

// TestAnotherPolicyDecides: an owner that has a smaller burst already refuses for good what conforms
// by this node's policy. That is no mistake of the request.
func TestAnotherPolicyDecides(t *testing.T) {
	w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Tokens, 100)}, guard: func(l proxy.Limits) proxy.Limits { return never{l} }})
	a := w.do(call{path: "/v1/completions", body: exact}).refused(t, 429, "rate_limit_exceeded")
	if a.header.Get("Retry-After") == "" || a.header.Get("X-Should-Retry") != "" {
		t.Errorf("%v", a.header)
	}
	w.do(call{path: "/v1/completions", body: strings.Replace(exact, "6", "600", 1)}).refused(t, 400, "request_exceeds_limit")
}

// never refuses for good.
type never struct{ proxy.Limits }

func (never) Take(_ context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	ds[0] = limiter.Decision{By: limiter.ByOwner, RetryAfter: limiter.Never}
	return 0
}

// TestSpread: a limit tells where its buckets are placed.
func TestSpread(t *testing.T) {
	spread := named(limit(proxy.Requests, 5), "spread")
	spread.Scope, spread.Spread = proxy.ScopeUser, true
	var seen watcher
	w := newWorld(t, setup{limits: []proxy.Limit{spread, limit(proxy.Tokens, 100)}, guard: func(l proxy.Limits) proxy.Limits { seen.Limits = l; return &seen }})
	w.do(call{path: "/v1/completions", body: exact}).want(t, 200)
	want := []limiter.Charge{
		{Key: limiter.Key{Tenant: "acme", Limit: "spread", Subject: "key:k1"}, Limit: spread.Spec, Cost: 1, Spread: true, Apart: limiter.ByPrivate, Private: spread.Private},
		{Key: limiter.Key{Tenant: "acme", Limit: "tokens", Subject: "k1"}, Limit: w.caller.Limits[1].Spec, Cost: 10, Apart: limiter.ByPrivate, Private: w.caller.Limits[1].Private},
	}
	if !slices.Equal(seen.took, want) {
		t.Errorf("%+v", seen.took)
	}
}

// watcher keeps the charges of the last Take, as they came.
type watcher struct {
	proxy.Limits
	took []limiter.Charge
}

func (w *watcher) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	w.took = slices.Clone(cs)
	return w.Limits.Take(ctx, cs, ds)
}

// TestNobodyIsAskedForTheGone: a client that goes away while an owner is asked ends the asking, and
// what is decided instead is not told to it as a refusal.
func TestNobodyIsAskedForTheGone(t *testing.T) {
	log := newBuffer()
	mute := &mute{asked: make(chan struct{})}
	w := newWorld(t, setup{limits: []proxy.Limit{mode(limit(proxy.Requests, 5), proxy.Deny)}, log: log, guard: func(l proxy.Limits) proxy.Limits { mute.Limits = l; return mute }})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-mute.asked; cancel() }()
	if res, err := w.client.Do(w.request(ctx, call{body: chat})); err == nil {
		res.Body.Close()
		t.Error("it was answered")
	}
	w.settled()
	if n := w.metric("headgate_decisions_total"); n != 0 {
		t.Errorf("%v decisions", n)
	}
	if r := log.records(t); len(r) != 1 || r[0]["outcome"] != "client_gone" {
		t.Errorf("%v", r)
	}
	if w.fake.Stats().Requests != 0 {
		t.Error("it reached the model server")
	}
}

// mute is an owner that never answers.
type mute struct {
	proxy.Limits
	asked chan struct{}
}

func (m *mute) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	close(m.asked)
	<-ctx.Done()
	for i := range cs {
		ds[i] = limiter.Decision{By: limiter.ByDeny}
	}
	return 0
}

// TestOneRefusalBurnsNothing: of two limits one refuses, by its owner, by the private bucket or by
// deny, and the other is as it was.
func TestOneRefusalBurnsNothing(t *testing.T) {
	var way tether
	few, many := limit(proxy.Requests, 1), named(limit(proxy.Tokens, 1000), "many")
	w := newWorld(t, setup{limits: []proxy.Limit{many, few}, reach: way.held})
	for _, cut := range []bool{false, true} {
		way.cut.Store(cut)
		w.do(call{path: "/v1/completions", body: exact}).want(t, 200)
		for range 3 {
			w.do(call{path: "/v1/completions", body: exact}).refused(t, 429, "rate_limit_exceeded")
		}
	}
	w.proxy.SetOverride(proxy.Deny, time.Now().Add(time.Hour))
	w.do(call{path: "/v1/completions", body: exact}).refused(t, 429, "over_capacity")
	if w.spent(many) != 10 || w.spentAlone(many) != 10 {
		t.Errorf("%d and %d spent", w.spent(many), w.spentAlone(many))
	}
}

// TestExplainUnavailable says of each limit who would decide, and of those whose owner is out of
// reach why.
func TestExplainUnavailable(t *testing.T) {
	allow, deny := mode(named(limit(proxy.Requests, 5), "allow"), proxy.Allow), mode(named(limit(proxy.Requests, 5), "deny"), proxy.Deny)
	none := named(limit(proxy.Tokens, 5), "none")
	none.Private = nil
	var way tether
	w := newWorld(t, setup{limits: []proxy.Limit{named(limit(proxy.Requests, 5), "own"), allow, deny, none}, reach: way.held, by: limiter.ByOwner})
	by := func(e proxy.Explanation) string {
		var b strings.Builder
		for _, l := range e.Limits {
			b.WriteString(l.Name + ":" + l.By + map[bool]string{true: "!"}[l.NoShare] + map[bool]string{true: "+", false: "-"}[l.Admitted] + " ")
			if l.Owner != "gw-2" || l.Held != 7 || (l.Away == "gw-2 is out of reach") != e.Degraded {
				t.Errorf("%+v", l)
			}
		}
		return b.String()
	}
	e := must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 1, Output: 1}))
	if got := by(e); got != "own:direct+ allow:direct+ deny:direct+ none:direct+ " || !e.Admitted || e.Degraded || e.Override != "" || e.Limits[0].Remaining != 4 {
		t.Errorf("%s %+v", got, e)
	}
	way.cut.Store(true)
	e = must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 1, Output: 1}))
	if got := by(e); got != "own:private- allow:allow+ deny:deny- none:deny!- " || e.Admitted || e.Refused != "none" || !e.Degraded {
		t.Errorf("%s %+v", got, e)
	}
	w.proxy.SetOverride(proxy.Allow, time.Now().Add(time.Hour))
	e = must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "m", Input: 1, Output: 1}))
	if got := by(e); got != "own:allow+ allow:allow+ deny:allow+ none:allow+ " || !e.Admitted || e.Override != "allow" || !e.Degraded {
		t.Errorf("%s %+v", got, e)
	}
	if n := w.metric("headgate_decisions_total"); n != 0 || w.spentAlone(w.caller.Limits[0]) != 0 {
		t.Errorf("%v decisions counted, %d spent", n, w.spentAlone(w.caller.Limits[0]))
	}
}

// TestNotReady: before there is a policy every route answers the same, and nothing panics.
func TestNotReady(t *testing.T) {
	log := newBuffer()
	w := newWorld(t, setup{unready: true, prefilter: edge1000(), log: log, reach: func() bool { return false }})
	all := append(routes(), call{path: "/nowhere"}, call{body: "{"}, call{body: chat, key: "none"}, call{method: http.MethodGet, path: "/v1/models/"})
	for _, c := range all {
		a := w.do(c).want(t, 503)
		if h := a.header; !strings.Contains(a.body, `"code":"not_ready"`) || h.Get("Retry-After") != "1" || h.Get("X-Headgate-Node") != "n1" {
			t.Errorf("%s: %v %s", c.path, h, a.body)
		}
	}
	w.settled()
	if got := w.metric("headgate_requests_total", "outcome", "refused"); got != float64(len(all)) {
		t.Errorf("%v of %d counted as refused", got, len(all))
	}
	for _, r := range log.records(t) {
		if r["code"] != "not_ready" {
			t.Errorf("logged %v", r)
		}
	}
	if _, err := w.proxy.Explain(t.Context(), &proxy.Caller{}, &proxy.Question{Model: "m", Input: 1, Output: 1}); err == nil || !strings.Contains(err.Error(), "not_ready") {
		t.Errorf("explain: %v", err)
	}
	w.apply(setup{})
	w.do(call{body: chat}).want(t, 200)
}

// TestABackendCannotSpeakForTheGateway: one that is a gateway too says of itself what clients
// would take for ours.
func TestABackendCannotSpeakForTheGateway(t *testing.T) {
	w := newWorld(t, setup{around: func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			for _, name := range []string{"Node", "Degraded", "Dropped", "Cache", "Backend"} {
				rw.Header().Set("X-Headgate-"+name, "inner")
			}
			h.ServeHTTP(rw, r)
		})
	}})
	a := w.do(call{body: chat}).want(t, 200)
	if h := a.header; h.Get("X-Headgate-Node") != "n1" || h.Get("X-Headgate-Backend") != "vllm" || h.Get("X-Headgate-Degraded")+h.Get("X-Headgate-Dropped")+h.Get("X-Headgate-Cache") != "" {
		t.Errorf("%v", h)
	}
}

func TestParseMode(t *testing.T) {
	for _, m := range []proxy.Mode{proxy.Local, proxy.Deny, proxy.Allow} {
		if got, ok := proxy.ParseMode(m.String()); got != m || !ok {
			t.Errorf("%v came back as %v, %t", m, got, ok)
		}
	}
	if m, ok := proxy.ParseMode("open"); ok || m != proxy.Local {
		t.Errorf("open is %v, %t", m, ok)
	}
}
