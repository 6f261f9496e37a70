package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy"
	"headgate/proxy/openai"
	"headgate/proxy/upstream"
)

// kill throws one switch.
func kill(kind, name, reason string) *proxy.Switches {
	k := map[string]*proxy.Kill{name: {Reason: reason}}
	switch kind {
	case "model":
		return &proxy.Switches{Models: k}
	case "tenant":
		return &proxy.Switches{Tenants: k}
	case "key":
		return &proxy.Switches{Keys: k}
	}
	return &proxy.Switches{Global: k[name]}
}

// TestKillSwitches: each refuses its own and nobody else, says which it is and why, costs
// nothing, and lets go when it is released.
func TestKillSwitches(t *testing.T) {
	for _, c := range []struct {
		kind, name, model string
		others            bool // other tenants are served
		says              string
	}{
		{"global", "", "m", false, "the gateway was switched off by the operator (kill switch: global): fire"},
		{"tenant", "acme", "m", true, `tenant "acme" was switched off by the operator (kill switch: tenant): fire`},
		{"key", "k1", "m", true, `key "k1" was switched off by the operator (kill switch: key): fire`},
		{"model", "m", "m", false, `model "m" was switched off by the operator (kill switch: model): fire`},
		{"model", "m", "alias", false, `model "alias" was switched off by the operator (kill switch: model): fire`},
		{"model", "alias", "alias", false, `model "alias" was switched off by the operator (kill switch: model): fire`},
	} {
		t.Run(c.kind+"/"+c.name+"/"+c.model, func(t *testing.T) {
			l := limit(proxy.Requests, 10)
			w := newWorld(t, setup{
				limits: []proxy.Limit{l}, aliases: map[string]string{"alias": "m"}, prefilter: edge1000(),
				callers: map[string]*proxy.Caller{"other": {KeyID: "k2", Tenant: "other"}},
			})
			w.proxy.SetSwitches(kill(c.kind, c.name, "fire"))
			body := strings.Replace(chat, `"m"`, `"`+c.model+`"`, 1)
			for range 3 {
				a := w.do(call{body: body}).refused(t, 403, "killed")
				if got := a.field("message"); got != c.says {
					t.Errorf("message %q, want %q", got, c.says)
				}
				if h := a.header; h.Get("X-Should-Retry") != "false" || h.Get("Retry-After") != "" || h.Get("X-Headgate-Node") != "n1" {
					t.Errorf("headers %v", h)
				}
			}
			if n := w.spent(l); n != 0 || w.fake.Stats().Requests != 0 {
				t.Errorf("%d spent, %d reached the model server", n, w.fake.Stats().Requests)
			}
			if n := w.metric("headgate_requests_total", "outcome", "refused"); n != 3 {
				t.Errorf("%v counted as refused", n)
			}
			if a := w.do(call{body: body, key: "other"}); (a.status == 200) != c.others {
				t.Errorf("another tenant's request: %d", a.status)
			}
			w.proxy.SetSwitches(nil)
			w.do(call{body: body}).want(t, 200)
		})
	}
}

// TestAKilledAliasIsNotItsModel: the operator took away a name.
func TestAKilledAliasIsNotItsModel(t *testing.T) {
	w := newWorld(t, setup{aliases: map[string]string{"alias": "m"}, switches: kill("model", "alias", "")})
	w.do(call{body: chat}).want(t, 200)
	a := w.do(call{body: strings.Replace(chat, `"m"`, `"alias"`, 1)}).refused(t, 403, "killed")
	if got := a.field("message"); got != `model "alias" was switched off by the operator (kill switch: model)` {
		t.Errorf("without a reason: %q", got)
	}
}

// TestKilledEverywhere: no route lets through whom a switch is thrown against.
func TestKilledEverywhere(t *testing.T) {
	w := newWorld(t, setup{prefilter: edge1000()})
	all := append(routes(), call{path: "/nowhere"}, call{body: "{"}, call{body: chat, header: header("X-Headgate-Class", "x")})
	for _, s := range []*proxy.Switches{kill("global", "", ""), kill("tenant", "acme", ""), kill("key", "k1", "")} {
		w.proxy.SetSwitches(s)
		for _, c := range all {
			w.do(c).want(t, 403)
			c.header = header("Accept", "application/problem+json")
			if a := w.do(c).want(t, 403); !strings.Contains(a.body, `"code":"killed"`) {
				t.Errorf("%s: %s", c.path, a.body)
			}
		}
	}
	w.do(call{body: chat, key: "unknown"}).refused(t, 401, "invalid_api_key") // a stranger learns nothing
	if n := w.fake.Stats().Requests; n != 0 {
		t.Errorf("%d reached the model server", n)
	}
}

// TestKillPrecedence: of several the widest is named, so that nobody revives the wrong one first.
func TestKillPrecedence(t *testing.T) {
	w := newWorld(t, setup{})
	s := proxy.Switches{Models: map[string]*proxy.Kill{"m": {}}}
	for _, c := range []struct {
		throw func()
		want  string
	}{
		{func() {}, "model"},
		{func() { s.Keys = map[string]*proxy.Kill{"k1": {}} }, "key"},
		{func() { s.Tenants = map[string]*proxy.Kill{"acme": {}} }, "tenant"},
		{func() { s.Global = &proxy.Kill{} }, "global"},
	} {
		c.throw()
		thrown := s
		w.proxy.SetSwitches(&thrown)
		a := w.do(call{body: chat}).refused(t, 403, "killed")
		if says := fmt.Sprint(a.field("message")); !strings.Contains(says, "(kill switch: "+c.want+")") {
			t.Errorf("%q does not name %s", says, c.want)
		}
	}
}

// TestKilledModel is neither routed to nor listed, and what it made is out of reach.
func TestKilledModel(t *testing.T) {
	w := newWorld(t, setup{
		models: twoModels(), backends: []upstream.Backend{{Name: "vllm"}, {Name: "vllm2", URL: closedPort(t)}},
		fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}}, aliases: map[string]string{"alias": "big"},
	})
	made := w.do(call{path: "/v1/responses", body: `{"model":"big","input":"x"}`}).want(t, 200)
	_, id, _ := strings.Cut(made.body, `"id":"resp_`)
	id, _, _ = strings.Cut(id, `"`)
	stored := call{method: http.MethodGet, path: "/v1/responses/resp_" + id}
	w.do(stored).want(t, 200)

	before := w.fake.Stats().Requests
	w.proxy.SetSwitches(kill("model", "big", "wrong weights"))
	for _, c := range []call{
		stored,
		{path: stored.path + "/cancel"},
		{method: http.MethodDelete, path: stored.path},
		{path: "/v1/responses", body: `{"model":"big","input":"x","previous_response_id":"resp_` + id + `"}`},
		{method: http.MethodGet, path: "/v1/models/big"},
		{method: http.MethodGet, path: "/v1/models/alias"},
		{body: toBig}, // not its fallback either: what was asked for is switched off
	} {
		w.do(c).refused(t, 403, "killed")
	}
	if n := w.fake.Stats().Requests; n != before {
		t.Errorf("%d reached the model server", n-before)
	}
	a := w.do(call{method: http.MethodGet, path: "/v1/models"}).want(t, 200)
	if strings.Contains(a.body, `"big"`) || !strings.Contains(a.body, `"small"`) {
		t.Errorf("listed: %s", a.body)
	}

	w.proxy.SetSwitches(nil)
	w.do(call{body: strings.Replace(toBig, "big", "small", 1)}).refused(t, 503, "no_backend")
	w.do(stored).want(t, 200)
}

// TestKilledFallback is passed over, under its own name or another.
func TestKilledFallback(t *testing.T) {
	models := append(twoModels(), model("tiny", "vllm"))
	models[2].Upstream, models[0].Backends, models[0].Fallback = "TINY", []string{"gone"}, []string{"small", "tiny"}
	w := newWorld(t, setup{models: models, backends: []upstream.Backend{{Name: "vllm"}, {Name: "vllm2"}}, fake: fakevllm.Config{Models: []string{"SMALL", "TINY"}}})
	if a := w.do(call{body: toBig}).want(t, 200); a.header.Get("X-Headgate-Degraded") != "model=small" {
		t.Fatalf("%v", a.header)
	}
	w.proxy.SetSwitches(kill("model", "small", ""))
	if a := w.do(call{body: toBig}).want(t, 200); a.header.Get("X-Headgate-Degraded") != "model=tiny" {
		t.Errorf("%v", a.header)
	}
	w.proxy.SetSwitches(&proxy.Switches{Models: map[string]*proxy.Kill{"small": {}, "tiny": {}}})
	w.do(call{body: toBig}).refused(t, 503, "no_backend")
}

// TestKillBindsUnderLoad: once SetSwitches has returned no request gets through, and what
// runs already is answered whole.
func TestKillBindsUnderLoad(t *testing.T) {
	w := newWorld(t, setup{prefilter: edge1000()})
	w.fake.HoldAfter(2)
	stream := must[*http.Response](t)(w.client.Do(w.request(patience(t), call{body: streamed})))
	defer stream.Body.Close()

	var thrown, revived atomic.Bool
	var served, killed, wrong atomic.Int64
	var all sync.WaitGroup
	short := strings.Replace(chat, `"max_tokens":5`, `"max_tokens":1`, 1)
	for range 4 {
		all.Go(func() {
			for !revived.Load() {
				before := thrown.Load()
				switch a := w.do(call{body: short}); {
				case a.status == 403:
					killed.Add(1)
				case a.status == 200 && (!before || !thrown.Load()):
					served.Add(1)
				default:
					wrong.Add(1)
				}
			}
		})
	}
	w.eventually(func() bool { return served.Load() > 20 })
	w.proxy.SetSwitches(kill("tenant", "acme", "now"))
	thrown.Store(true)
	w.eventually(func() bool { return killed.Load() > 20 })
	thrown.Store(false)
	w.proxy.SetSwitches(nil)
	more := served.Load() + 20
	w.eventually(func() bool { return served.Load() > more })
	revived.Store(true)
	all.Wait()
	if n := wrong.Load(); n != 0 {
		t.Errorf("%d answers that a thrown switch should have refused, or of another kind", n)
	}

	w.proxy.SetSwitches(kill("global", "", ""))
	w.fake.Release()
	if b, err := io.ReadAll(stream.Body); err != nil || !strings.Contains(string(b), "[DONE]") {
		t.Errorf("the running stream: %v, %s", err, b)
	}
}

// TestKillReachesTheWaiting: a request that is held for a limit has not been admitted yet.
func TestKillReachesTheWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fill(proxy.Requests, 1, time.Second, 1)
		l.Wait, l.Scope = time.Minute, proxy.ScopeKey|proxy.ScopeModel
		models := twoModels()
		models[1].Backends = []string{"vllm"}
		w := bubbled(t, setup{limits: []proxy.Limit{l}, models: models, fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}}})
		for _, s := range []*proxy.Switches{kill("model", "big", ""), kill("tenant", "acme", "")} {
			w.proxy.SetSwitches(nil)
			w.handle(call{body: toBig}).want(t, 200)
			before := w.fake.Stats().Requests
			answers := make(chan answer)
			go func() { answers <- w.handle(call{body: toBig}) }()
			synctest.Wait() // it is held
			w.proxy.SetSwitches(s)
			a := (<-answers).refused(t, 403, "killed")
			if w.fake.Stats().Requests != before { // not by the fallback either
				t.Errorf("it reached the model server: %s", a.body)
			}
		}
	})
}

// TestKillReachesTheUploading: a body may take long, and the switch is thrown meanwhile.
func TestKillReachesTheUploading(t *testing.T) {
	w := newWorld(t, setup{})
	body, upload := io.Pipe()
	r := w.request(patience(t), call{})
	r.Body, r.ContentLength = body, int64(len(chat))
	go func() {
		_, _ = io.WriteString(upload, chat[:10])
		w.eventually(func() bool { return w.caller.LastUsed.Load() != 0 }) // authenticated
		w.proxy.SetSwitches(kill("tenant", "acme", ""))
		_, _ = io.WriteString(upload, chat[10:])
		_ = upload.Close()
	}()
	w.send(r).refused(t, 403, "killed")
}

// rungs throws rungs until the given moment.
func rungs(until time.Time, names ...string) *proxy.Switches {
	s := &proxy.Switches{Rungs: map[string]time.Time{}}
	for _, n := range names {
		s.Rungs[n] = until
	}
	return s
}

// TestShedBestEffort: class best_effort is refused, the others and what runs no model are not.
func TestShedBestEffort(t *testing.T) {
	l := limit(proxy.Requests, 10)
	w := newWorld(t, setup{limits: []proxy.Limit{l}, switches: rungs(time.Time{}, "shed_best_effort", "of a newer version"), callers: map[string]*proxy.Caller{
		"lowly": {KeyID: "k2", Tenant: "acme", Class: proxy.BestEffort},
	}})
	lowly := call{body: chat, header: header("X-Headgate-Class", "best_effort")}
	for _, c := range []call{lowly, {body: chat, key: "lowly"}, {path: "/v1/embeddings", body: `{"model":"m","input":"a"}`, key: "lowly"}} {
		a := w.do(c).refused(t, 429, "over_capacity")
		if h := a.header; h.Get("X-Headgate-Dropped") != "shed_class" || h.Get("X-Should-Retry") != "" || h.Get("Retry-After") == "" {
			t.Errorf("headers %v", h)
		}
	}
	if n := w.spent(l); n != 0 || w.fake.Stats().Requests != 0 {
		t.Errorf("%d spent, %d reached the model server", n, w.fake.Stats().Requests)
	}
	w.do(call{body: chat}).want(t, 200)
	w.do(call{body: chat, header: header("X-Headgate-Class", "background")}).want(t, 200)
	w.do(call{method: http.MethodGet, path: "/v1/models", key: "lowly"}).want(t, 200)
	w.proxy.SetSwitches(nil)
	if a := w.do(lowly).want(t, 200); a.header.Get("X-Headgate-Dropped") != "" {
		t.Errorf("%v", a.header)
	}
}

// TestSmallerModel: the first fallback that can answers, is charged for, and is named.
func TestSmallerModel(t *testing.T) {
	models := twoModels()
	models[1].Cost = func(openai.Usage, int64, int64) int64 { return 1 }
	usd := limit(proxy.USD, 1_000_000)
	on := rungs(time.Time{}, "smaller_model")
	for _, c := range []struct {
		name, body, header, want, says string
		switches                       *proxy.Switches
		down                           bool
	}{
		{name: "off", body: toBig, want: "BIG"},
		{name: "on", body: toBig, switches: on, want: "SMALL", says: "smaller_model, model=small"},
		{name: "without a fallback", body: strings.Replace(toBig, "big", "small", 1), switches: on, want: "SMALL"},
		{name: "exempt", body: toBig, header: "true", switches: on, want: "BIG"},
		{name: "not exempt", body: toBig, header: "false", switches: on, want: "SMALL", says: "smaller_model, model=small"},
		{name: "the fallback is down", body: toBig, switches: on, want: "BIG", down: true},
		{name: "the fallback is killed", body: toBig, want: "BIG", switches: &proxy.Switches{Models: map[string]*proxy.Kill{"small": {}}, Rungs: on.Rungs}},
	} {
		t.Run(c.name, func(t *testing.T) {
			backends := []upstream.Backend{{Name: "vllm"}, {Name: "vllm2"}}
			if c.down {
				backends[1].URL = closedPort(t)
			}
			w := newWorld(t, setup{models: models, limits: []proxy.Limit{usd}, backends: backends, fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}}, switches: c.switches})
			a := w.do(call{body: c.body, header: header("X-Headgate-No-Degrade", c.header)}).want(t, 200)
			if got := w.last().Model; got != c.want || a.header.Get("X-Headgate-Degraded") != c.says {
				t.Errorf("%s answered: %v", got, a.header)
			}
			if n := w.spent(usd); (n == 1) != (c.want == "SMALL") {
				t.Errorf("charged %d", n)
			}
			for _, path := range []string{"/v1/embeddings", "/tokenize"} { // vectors and tokens of two models don't mix
				w.do(call{path: path, body: `{"model":"big","input":"a","prompt":"a"}`}).want(t, 200)
				if got := w.last().Model; got != "BIG" {
					t.Errorf("%s: %s answered", path, got)
				}
			}
		})
	}
}

// TestNoDegrade: who demands the model gets it or an error; anything but true or false is a mistake.
func TestNoDegrade(t *testing.T) {
	models := twoModels()
	models[0].Backends = []string{"gone"}
	w := newWorld(t, setup{models: models, backends: []upstream.Backend{{Name: "vllm"}, {Name: "vllm2"}}, fake: fakevllm.Config{Models: []string{"SMALL"}}})
	w.do(call{body: toBig}).want(t, 200)
	a := w.do(call{body: toBig, header: header("X-Headgate-No-Degrade", "true")}).refused(t, 503, "no_backend")
	if d := a.header.Get("X-Headgate-Degraded"); d != "" {
		t.Errorf("degraded by %s", d)
	}
	w.do(call{body: toBig, header: header("X-Headgate-No-Degrade", "yes")}).refused(t, 400, "invalid_request")
}

// TestRungsExpire by themselves.
func TestRungsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		models := twoModels()
		models[1].Backends = []string{"vllm"}
		w := bubbled(t, setup{models: models, fake: fakevllm.Config{Models: []string{"BIG", "SMALL"}}})
		w.proxy.SetSwitches(rungs(time.Now().Add(time.Minute).Round(0), "shed_best_effort", "smaller_model"))
		lowly := call{body: toBig, header: header("X-Headgate-Class", "best_effort")}
		time.Sleep(time.Minute - 1)
		w.handle(lowly).refused(t, 429, "over_capacity")
		w.handle(call{body: toBig}).want(t, 200)
		if got := w.last().Model; got != "SMALL" {
			t.Errorf("%s answered before the end", got)
		}
		time.Sleep(time.Nanosecond)
		w.handle(lowly).want(t, 200)
		if got := w.last().Model; got != "BIG" {
			t.Errorf("%s answered after the end", got)
		}
	})
}

// TestExplainSwitches: an explanation says what would meet a request, and changes nothing.
func TestExplainSwitches(t *testing.T) {
	l := limit(proxy.Requests, 1)
	w := newWorld(t, setup{
		models: twoModels(), limits: []proxy.Limit{l}, change: func(c *proxy.Caller) { c.Class = proxy.BestEffort },
		backends: []upstream.Backend{{Name: "vllm"}, {Name: "vllm2"}},
	})
	for _, c := range []struct {
		switches               *proxy.Switches
		refused, reason, model string
		rungs                  []string
	}{
		{switches: nil, model: "big"},
		{switches: rungs(time.Time{}, "smaller_model"), model: "small", rungs: []string{"smaller_model"}},
		{switches: rungs(time.Time{}, "smaller_model", "shed_best_effort"), model: "small", rungs: []string{"shed_best_effort", "smaller_model"}, refused: "shed_class", reason: "class best_effort"},
		{switches: kill("model", "big", "wrong weights"), model: "big", refused: "kill switch", reason: `model "big" was switched off by the operator (kill switch: model): wrong weights`},
		{switches: kill("tenant", "acme", ""), model: "big", refused: "kill switch", reason: `tenant "acme"`},
	} {
		w.proxy.SetSwitches(c.switches)
		e := must[proxy.Explanation](t)(w.proxy.Explain(t.Context(), w.caller, &proxy.Question{Model: "big", Input: 1, Output: 1}))
		if e.Refused != c.refused || e.Admitted != (c.refused == "") || !strings.Contains(e.Reason, c.reason) || e.Model != c.model || !slices.Equal(e.Rungs, c.rungs) {
			t.Errorf("%+v, want %+v", e, c)
		}
	}
	if n := w.spent(l); n != 0 {
		t.Errorf("explaining spent %d", n)
	}
}
