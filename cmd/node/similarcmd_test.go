package node

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"headgate/cache/embed/embedtest"
	"headgate/proxy/admin"
)

const comparedPolicy = `version: 1
backends: [{name: b, url: %q}, {name: gone, url: "http://127.0.0.1:1"}]
models: [{name: m, backends: [b]}, {name: vectors, backends: [gone], version: "1"}]
plans: [{name: p}]
tenants: [{name: dev, plan: p}, {name: acme, plan: p}]
surfaces:
  - {name: help, share: tenant, exact: {normalize: fold}, semantic: {mode: static, threshold: 0.85, audit: 0.000001}}
  - {name: own, exact: {}, semantic: {mode: static, threshold: 0.85}}
  - {name: checked, share: tenant, exact: {}, semantic: {mode: static, threshold: 0.85, verifier: m}}
  - {name: watched, share: tenant, exact: {}, semantic: {}}
  - {name: taught, share: tenant, exact: {}, semantic: {mode: learned}}
  - {name: elsewhere, share: tenant, exact: {}, semantic: {embedder: vectors}}
  - {name: exactly, exact: {}}
  - {name: inbox, volatility: personal, sensitive: [personal], exact: {}}
  - {name: plain}
`

// newComparedDesk is a help desk with surfaces of all kinds.
func newComparedDesk(t *testing.T) *helpDesk {
	d := &helpDesk{t: t, parrot: &parrot{says: map[string]string{}}}
	up := httptest.NewServer(d.parrot)
	t.Cleanup(up.Close)
	d.n = start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(comparedPolicy, up.URL)) })
	d.n.similar.embedders.byModel[""] = &embedderUse{Embedder: new(embedtest.Words)}
	return d
}

// questionAt is a request with one question of a user.
func questionAt(surface, text string) admin.CacheRequest {
	return admin.CacheRequest{
		Surface: surface, Path: admin.DefaultCachePath, Body: json.RawMessage(fmt.Sprintf(`{"model":"m","temperature":0,"messages":[{"role":"user","content":%q}]}`, text)),
	}
}

// explain gives what is said of requests.
func (d *helpDesk) explain(first admin.CacheRequest, other ...admin.CacheRequest) admin.CacheExplanation {
	d.t.Helper()
	q := admin.CacheQuestion{CacheRequest: first}
	if len(other) > 0 {
		q.Other = &other[0]
	}
	e, err := d.n.explainKey(d.t.Context(), q)
	if err != nil {
		d.t.Fatal(err)
	}
	return e
}

// TestWhoIsCompared: whether a request is compared with others in other words, and why not.
func TestWhoIsCompared(t *testing.T) {
	d := newComparedDesk(t)
	header := func(q admin.CacheRequest, name, value string) admin.CacheRequest {
		q.Headers = map[string][]string{name: {value}}
		return q
	}
	body := func(surface, path, text string) admin.CacheRequest {
		return admin.CacheRequest{Surface: surface, Path: path, Body: json.RawMessage(text)}
	}
	const text = "How do I reset my password?"
	for name, c := range map[string]struct {
		q    admin.CacheRequest
		why  string // "": it is compared
		want admin.CacheCompared
	}{
		"static":         {questionAt("help", text), "", admin.CacheCompared{Mode: "static", Threshold: 0.85}},
		"shadow":         {questionAt("watched", text), "", admin.CacheCompared{Mode: "shadow"}},
		"learned":        {questionAt("taught", text), "", admin.CacheCompared{Mode: "learned"}},
		"a wish":         {header(questionAt("help", text), "X-Headgate-Similarity", "0.95"), "", admin.CacheCompared{Mode: "static", Threshold: 0.85, Least: 0.95}},
		"no wish":        {header(questionAt("help", text), "X-Headgate-Similarity", "1"), "takes no answer of another question", admin.CacheCompared{Mode: "static", Threshold: 0.85, Least: 1}},
		"no cache":       {questionAt("exactly", text), "surface exactly has no semantic cache in the policy", admin.CacheCompared{}},
		"personal":       {questionAt("inbox", text), "surface inbox is personal", admin.CacheCompared{}},
		"warm":           {body("help", admin.DefaultCachePath, `{"model":"m","temperature":1,"messages":[{"role":"user","content":"hi"}]}`), "no answer to it is kept", admin.CacheCompared{Mode: "static", Threshold: 0.85}},
		"an embedding":   {body("help", "/v1/embeddings", `{"model":"m","input":"hi"}`), "answers of this route", admin.CacheCompared{Mode: "static", Threshold: 0.85}},
		"nobody asks":    {body("help", admin.DefaultCachePath, `{"model":"m","temperature":0,"messages":[{"role":"system","content":"hi"}]}`), "no text of a user", admin.CacheCompared{Mode: "static", Threshold: 0.85}},
		"blanks":         {questionAt("help", " \n "), "no text of a user", admin.CacheCompared{Mode: "static", Threshold: 0.85}},
		"too long":       {questionAt("help", strings.Repeat("word ", maxQuestion/5+2)), fmt.Sprint(maxQuestion, " at most are compared"), admin.CacheCompared{Mode: "static", Threshold: 0.85}},
		"embedder fails": {questionAt("elsewhere", text), "the embedder fails", admin.CacheCompared{Mode: "shadow"}},
	} {
		e := d.explain(c.q)
		got := e.Semantic
		if got == nil || got.Compared != (c.why == "") || !strings.Contains(got.Why, c.why) || got.Mode != c.want.Mode || got.Threshold != c.want.Threshold || got.Least != c.want.Least || e.Pair != nil {
			t.Errorf("%s: %+v", name, got)
			continue
		}
		if raw, err := hex.DecodeString(got.Partition); got.Compared && (err != nil || len(raw) != 32 || got.Partition == e.Key || got.Embedder != "embedtest-words-1") {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if e := d.explain(questionAt("plain", text)); e.Semantic != nil {
		t.Errorf("%+v", e.Semantic)
	}
	_, err := d.n.explainKey(t.Context(), admin.CacheQuestion{CacheRequest: header(questionAt("help", text), "X-Headgate-Similarity", "95%")})
	if e, ok := errors.AsType[*admin.Error](err); !ok || e.Code != admin.Invalid || !strings.Contains(err.Error(), "X-Headgate-Similarity") {
		t.Errorf("%v", err)
	}
	if n := d.parrot.count(); n != 0 {
		t.Errorf("the model was asked %d times", n)
	}
	for _, s := range d.n.similar.cache.Stats() {
		t.Errorf("it was counted: %+v", s)
	}
}

// TestComparedPairs: whether one of two requests would get the other's answer, and why not.
func TestComparedPairs(t *testing.T) {
	d := newComparedDesk(t)
	wish := questionAt("help", "How can I reset my password?")
	wish.Headers = map[string][]string{"X-Headgate-Similarity": {"0.9"}}
	brief := questionAt("help", "How can I reset my password?")
	brief.Body = json.RawMessage(`{"model":"m","temperature":0,"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"How can I reset my password?"}]}`)
	ada, bob := questionAt("own", "How do I reset my password?"), questionAt("own", "How can I reset my password?")
	ada.User, bob.User = "ada", "bob"
	for name, c := range map[string]struct {
		a, b       admin.CacheRequest
		hit, why   string
		same       bool
		similarity float64
		guard      string
	}{
		"other words":  {questionAt("help", "How do I reset my password?"), questionAt("help", "How can I reset my password?"), "yes", "similar enough", true, 0.866, ""},
		"checked":      {questionAt("checked", "How do I reset my password?"), questionAt("checked", "How can I reset my password?"), "yes", "the verifier says no", true, 0.866, ""},
		"one request":  {questionAt("help", "How do I reset my password?"), questionAt("help", " how do I reset my PASSWORD? "), "yes", "the exact cache", true, 1, ""},
		"too far":      {questionAt("help", "How do I reset my password?"), questionAt("help", "Where is the order that was sent yesterday?"), "no", "", true, 0, "any"},
		"below":        {questionAt("help", "How do I reset my password?"), questionAt("help", "Please, how can one reset my password?"), "no", "the threshold is 0.85", true, 0, ""},
		"a wish":       {questionAt("help", "How do I reset my password?"), wish, "no", "asks for 0.9", true, 0.866, ""},
		"guards":       {questionAt("help", "Can I turn on dark mode?"), questionAt("help", "Can I turn off dark mode?"), "no", "guards", true, 0.8, "antonym"},
		"numbers":      {questionAt("help", "Can I return it after 14 days?"), questionAt("help", "Can I return it after 30 days?"), "no", "guards", true, 0.833, "number"},
		"conversation": {questionAt("help", "How do I reset my password?"), brief, "no", "more than the last user text", false, 0.866, ""},
		"users":        {ada, bob, "no", "more than the last user text", false, 0.866, ""},
		"surfaces":     {questionAt("help", "How do I reset my password?"), questionAt("taught", "How can I reset my password?"), "no", "more than the last user text", false, 0.866, ""},
		"shadow":       {questionAt("watched", "How do I reset my password?"), questionAt("watched", "How can I reset my password?"), "no", "in mode shadow nothing is served", true, 0.866, ""},
		"learned":      {questionAt("taught", "How do I reset my password?"), questionAt("taught", "How can I reset my password?"), "perhaps", "what was learned", true, 0.866, ""},
	} {
		for range 2 { // it does not matter which comes first
			p := d.explain(c.a, c.b).Pair
			if p == nil || p.Similarity == nil {
				t.Fatalf("%s: %+v", name, p)
			}
			if p.Hit != c.hit || !strings.Contains(p.Why, c.why) || p.SamePartition != c.same || c.similarity > 0 && math.Abs(*p.Similarity-c.similarity) > 0.001 {
				t.Errorf("%s: %+v, %.3f", name, p, *p.Similarity)
			}
			if len(p.Refused) > 0 != (c.guard != "") || c.guard != "" && c.guard != "any" && p.Refused[0].Guard != c.guard {
				t.Errorf("%s: %+v", name, p.Refused)
			}
			c.a, c.b = c.b, c.a
		}
	}
	p := d.explain(questionAt("help", "Can I order 14 chairs?"), questionAt("help", "Can I order 30 chairs?")).Pair
	if r := p.Refused[0]; r.First != "14" || r.Second != "30" {
		t.Errorf("%+v", r)
	}
	if p := d.explain(questionAt("help", "hi"), questionAt("exactly", "hi")).Pair; p != nil {
		t.Errorf("a pair of which one is not compared: %+v", p)
	}
	if n := d.parrot.count(); n != 0 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestTrippedPairs: a surface that is wrong too often gives no other wording an answer, and it is said.
func TestTrippedPairs(t *testing.T) {
	d := newComparedDesk(t)
	a, b := questionAt("help", "How do I reset my password?"), questionAt("help", "How can I reset my password?")
	if p := d.explain(a, b).Pair; p.Hit != "yes" {
		t.Errorf("%+v", p)
	}
	things := []string{"password", "router", "printer", "phone", "camera", "watch"}
	for _, thing := range things {
		d.ask("How do I reset my " + thing + "?")
		d.learned(1)
		word, h := d.ask("How can I reset my " + thing + "?")
		if word != "semantic" {
			t.Fatalf("%s: %s", thing, word)
		}
		done, err := d.n.wrongAnswer(t.Context(), admin.Actor{Name: "ann"}, admin.CacheWrong{Entry: h.Get("X-Headgate-Cache-Entry")})
		if want := (admin.CacheWrongDone{Evicted: 1, Tenant: "dev", Surface: "help"}); err != nil || done != want {
			t.Fatalf("%s: %+v, %v", thing, done, err)
		}
		if d.n.similar.tripped("dev", "help", "embedtest-words-1") {
			break // nothing is served any more
		}
	}
	if p := d.explain(a, b).Pair; p.Hit != "no" || !strings.Contains(p.Why, "budget") {
		t.Errorf("%+v", p)
	}
	stats, err := d.n.cacheStats(t.Context())
	if err != nil || len(stats.Semantic) != 1 || stats.Semantic[0].Mode != "static" || !stats.Semantic[0].Budget.Tripped || stats.Semantic[0].Served == 0 || stats.Semantic[0].Reported != stats.Semantic[0].Served {
		t.Errorf("%+v, %v", stats.Semantic, err)
	}
}

// TestWrongEntries: what is no entry is refused, and what nobody knows is not found.
func TestWrongEntries(t *testing.T) {
	d := newComparedDesk(t)
	for entry, want := range map[string]admin.Code{"": admin.Invalid, "x": admin.Invalid, "0000000000000000": admin.Invalid, "8f14e45fceea167a": admin.NotFound, strings.Repeat("1", 100): admin.Invalid} {
		_, err := d.n.wrongAnswer(t.Context(), admin.Actor{Name: "ann"}, admin.CacheWrong{Entry: entry})
		if e, ok := errors.AsType[*admin.Error](err); !ok || e.Code != want {
			t.Errorf("%q: %v", entry, err)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+d.n.AdminAddr()+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if text, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(text), "headgate_semantic_wrong_total 0") {
		t.Errorf("%v: an entry that is none was counted", err)
	}
}
