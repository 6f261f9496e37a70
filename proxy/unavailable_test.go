package proxy_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headgate/proxy"
)

// tether is a view lease that tests cut.
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

// TestUnavailableModes: while the node is cut off, local limits go on, deny refuses and allow
// neither checks nor charges; what every answer says of it; and nothing of it before and after.
func TestUnavailableModes(t *testing.T) {
	for _, c := range []struct {
		mode            proxy.Mode
		shadow          bool
		admitted, spent int64 // of 5 requests against a limit of 3
		outcome         string
		counted         int
	}{
		{mode: proxy.Local, admitted: 3, spent: 3, outcome: "admitted", counted: 3},
		{mode: proxy.Local, shadow: true, admitted: 5, spent: 3, outcome: "shadow_refused", counted: 2},
		{mode: proxy.Deny, outcome: "refused", counted: 5},
		{mode: proxy.Deny, shadow: true, admitted: 5, outcome: "shadow_refused", counted: 5},
		{mode: proxy.Allow, admitted: 5, outcome: "admitted", counted: 5},
	} {
		t.Run(c.mode.String(), func(t *testing.T) {
			l := mode(limit(proxy.Requests, 3), c.mode)
			l.Shadow = c.shadow
			other := named(limit(proxy.Tokens, 1000), "other")
			var lease tether
			w := newWorld(t, setup{limits: []proxy.Limit{l, other}, lease: lease.held})
			lease.cut.Store(true)
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
			if admitted != c.admitted || w.spent(l) != c.spent || w.spent(other) != 10*c.admitted {
				t.Errorf("%d admitted, %d and %d spent", admitted, w.spent(l), w.spent(other))
			}
			if n := w.decisions("requests", "degraded", c.outcome); n != c.counted {
				t.Errorf("%d counted as %s, want %d", n, c.outcome, c.counted)
			}
			if n := w.metric("headgate_decisions_total", "mode", "local"); n != 0 {
				t.Errorf("%v decisions counted as local", n)
			}

			lease.cut.Store(false)
			a := w.do(call{path: "/v1/completions", body: exact})
			if ok := c.spent < 3 || c.shadow; (a.status == 200) != ok || a.header.Get("X-Headgate-Degraded") != "" {
				t.Errorf("back in the cluster: %d %v", a.status, a.header)
			}
			if c.spent == 0 && w.spent(l) != 1 {
				t.Errorf("back in the cluster, %d spent", w.spent(l))
			}
		})
	}
}

// TestDegradedIsSaidEverywhere: on errors and on lists too, and beside another word.
func TestDegradedIsSaidEverywhere(t *testing.T) {
	models := twoModels()
	models[0].Backends, models[1].Backends, models[1].Upstream = []string{"gone"}, []string{"vllm"}, "fake"
	w := newWorld(t, setup{models: models, lease: func() bool { return false }})
	for _, c := range []struct {
		call call
		want string
	}{
		{call{body: "{"}, "quota"},
		{call{body: chat, key: "unknown"}, "quota"},
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
	var lease tether
	w := newWorld(t, setup{lease: lease.held, log: log})
	for i, want := range []bool{false, true, true, false, false, true} {
		lease.cut.Store(want)
		gauge := map[bool]float64{true: 1}[want]
		if got := w.metric("headgate_degraded"); got != gauge || w.proxy.Degraded() != want {
			t.Errorf("%d: headgate_degraded %v, Degraded %t", i, got, w.proxy.Degraded())
		}
		w.do(call{body: chat}).want(t, 200)
	}
	w.settled()
	log.mu <- struct{}{}
	defer func() { <-log.mu }()
	if out, in := strings.Count(log.b.String(), "cut off from the cluster"), strings.Count(log.b.String(), "in the cluster again"); out != 2 || in != 1 {
		t.Errorf("%d and %d lines", out, in)
	}
}

// TestOverride replaces each limit's mode while the node is cut off, and ends by itself.
func TestOverride(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lease tether
		w := bubbled(t, setup{lease: lease.held, limits: []proxy.Limit{
			mode(named(limit(proxy.Requests, 100), "a"), proxy.Deny), mode(named(limit(proxy.Requests, 100), "b"), proxy.Allow),
		}})
		ask := func() int { return w.handle(call{body: chat}).status }
		spent := func() [2]int64 { return [2]int64{w.spent(w.caller.Limits[0]), w.spent(w.caller.Limits[1])} }

		w.proxy.SetOverride(proxy.Deny, time.Now().Add(time.Hour))
		if s := ask(); s != 200 || spent() != [2]int64{1, 1} {
			t.Fatalf("an override binds in the cluster: %d, %v", s, spent())
		}
		lease.cut.Store(true)
		if s := ask(); s != 429 {
			t.Errorf("deny over allow: %d", s)
		}
		w.proxy.SetOverride(proxy.Allow, time.Now().Add(15*time.Minute))
		if s := ask(); s != 200 || spent() != [2]int64{1, 1} {
			t.Errorf("allow over deny: %d, %v", s, spent())
		}
		w.proxy.SetOverride(proxy.Local, time.Now().Add(15*time.Minute))
		if s := ask(); s != 200 || spent() != [2]int64{2, 2} {
			t.Errorf("local over both: %d, %v", s, spent())
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

// TestCutOffWhileWaiting: a request that is held is decided by the mode that holds when its
// turn comes.
func TestCutOffWhileWaiting(t *testing.T) {
	for _, c := range []struct {
		before, after bool // cut off
		mode          proxy.Mode
		status        int
		spent         int64
	}{
		{before: false, after: true, mode: proxy.Deny, status: 429, spent: 1},
		{before: false, after: true, mode: proxy.Allow, status: 200, spent: 1},
		{before: true, after: false, mode: proxy.Allow, status: 200, spent: 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			// The one with the wait holds the request; what becomes of the other is at stake.
			wait := mode(named(fill(proxy.Requests, 1, time.Second, 1), "wait"), proxy.Local)
			wait.Wait = time.Minute
			stake := mode(named(limit(proxy.Requests, 5), "stake"), c.mode)
			var lease tether
			w := bubbled(t, setup{limits: []proxy.Limit{wait, stake}, lease: lease.held})
			w.handle(call{body: chat}).want(t, 200)
			lease.cut.Store(c.before)
			answers := make(chan answer)
			go func() { answers <- w.handle(call{body: chat}) }()
			synctest.Wait()
			lease.cut.Store(c.after)
			if a := <-answers; a.status != c.status || w.spent(stake) != c.spent {
				t.Errorf("%+v: %d, %d spent", c, a.status, w.spent(stake))
			}
		})
	}
}

// TestNoShare: a limit of which this node has no share admits nothing, and says why; unless it
// only watches, or the node is cut off and the limit says allow.
func TestNoShare(t *testing.T) {
	for _, unit := range []proxy.Unit{proxy.Requests, proxy.Concurrency, proxy.Tokens} {
		l := limit(unit, 10)
		l.None = true
		var lease tether
		w := newWorld(t, setup{limits: []proxy.Limit{l, named(limit(proxy.Requests, 100), "other")}, lease: lease.held})
		for _, cut := range []bool{false, true} { // local: its own bucket would go on, and has nothing
			lease.cut.Store(cut)
			a := w.do(call{body: chat}).refused(t, 429, "rate_limit_exceeded")
			if a.field("limit") != unit.String() || a.header.Get("Retry-After") != "1" || !strings.Contains(a.body, "no share") {
				t.Errorf("%v %s", a.header, a.body)
			}
			if h := a.header.Get("RateLimit"); h != "" {
				t.Errorf("levels that nobody asked for: %s", h)
			}
		}
		if n := w.decisions(unit.String(), "local", "refused"); n != 1 || w.spent(w.caller.Limits[1]) != 0 {
			t.Errorf("%d counted, %d of the other spent", n, w.spent(w.caller.Limits[1]))
		}
		w.proxy.SetOverride(proxy.Allow, time.Now().Add(time.Hour))
		w.do(call{body: chat}).want(t, 200)
	}
	l := limit(proxy.Requests, 1)
	l.None, l.Shadow = true, true
	w := newWorld(t, setup{limits: []proxy.Limit{l}})
	w.do(call{body: chat}).want(t, 200)
	if n := w.decisions("requests", "local", "shadow_refused"); n != 1 {
		t.Errorf("%d shadow refusals", n)
	}
}

// TestExplainUnavailable: the limits whose buckets are not asked stand beside those that are.
func TestExplainUnavailable(t *testing.T) {
	allow, deny := mode(named(limit(proxy.Requests, 5), "allow"), proxy.Allow), mode(named(limit(proxy.Requests, 5), "deny"), proxy.Deny)
	none := named(limit(proxy.Tokens, 5), "none")
	none.None = true
	var lease tether
	w := newWorld(t, setup{limits: []proxy.Limit{named(limit(proxy.Requests, 5), "own"), allow, deny, none}, lease: lease.held})
	instead := func(e proxy.Explanation) string {
		var b strings.Builder
		for _, l := range e.Limits {
			b.WriteString(l.Name + ":" + l.Instead + map[bool]string{true: "+", false: "-"}[l.Admitted] + " ")
		}
		return b.String()
	}
	e := must[proxy.Explanation](t)(w.proxy.Explain(w.caller, "m", "", 1, 1))
	if got := instead(e); got != "own:+ allow:+ deny:+ none:no_share- " || e.Admitted || e.Refused != "none" || e.Degraded || e.Override != "" {
		t.Errorf("%s %+v", got, e)
	}
	lease.cut.Store(true)
	e = must[proxy.Explanation](t)(w.proxy.Explain(w.caller, "m", "", 1, 1))
	if got := instead(e); got != "own:+ allow:allow+ deny:deny- none:no_share- " || e.Admitted || e.Refused != "deny" || !e.Degraded {
		t.Errorf("%s %+v", got, e)
	}
	w.proxy.SetOverride(proxy.Allow, time.Now().Add(time.Hour))
	e = must[proxy.Explanation](t)(w.proxy.Explain(w.caller, "m", "", 1, 1))
	if got := instead(e); got != "own:allow+ allow:allow+ deny:allow+ none:allow+ " || !e.Admitted || e.Override != "allow" {
		t.Errorf("%s %+v", got, e)
	}
}

// TestNotReady: before there is a policy every route answers the same, and nothing panics.
func TestNotReady(t *testing.T) {
	log := newBuffer()
	w := newWorld(t, setup{unready: true, prefilter: edge1000(), log: log, lease: func() bool { return false }})
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
	if _, err := w.proxy.Explain(&proxy.Caller{}, "m", "", 1, 1); err == nil || !strings.Contains(err.Error(), "not_ready") {
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
