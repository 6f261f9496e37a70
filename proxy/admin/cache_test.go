package admin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"testing"
)

// TestInvalidations: what is asked for in a body, or in a URL beside any body, arrives.
func TestInvalidations(t *testing.T) {
	c, last := fakeNode()
	h := Handler(c)
	two := uint64(2)
	for _, x := range []struct {
		query, body string
		want        CacheInvalidation
	}{
		{"", `{"tenant": "acme"}`, CacheInvalidation{Tenant: "acme"}},
		{"", `{"surface": "faq"}`, CacheInvalidation{Surface: "faq"}},
		{"", `{"tenant": "acme", "surface": "faq", "generation": 2}`, CacheInvalidation{Tenant: "acme", Surface: "faq", Generation: &two}},
		{"", `{"tenant": "acme", "tags": ["doc-7", "日本"]}`, CacheInvalidation{Tenant: "acme", Tags: []string{"doc-7", "日本"}}},
		{"", `{"all": true}`, CacheInvalidation{}},
		{"", `{"all": true, "generation": 2}`, CacheInvalidation{Generation: &two}},
		{"tenant=acme&tag=a&tag=b", `{"tags": ["c"], "event": "saved"}`, CacheInvalidation{Tenant: "acme", Tags: []string{"a", "b"}}},
		{"tag=a,b&tag=c", "<xml/>", CacheInvalidation{Tags: []string{"a", "b", "c"}}},
		{"tenant=acme&surface=faq&generation=2", "", CacheInvalidation{Tenant: "acme", Surface: "faq", Generation: &two}},
		{"surface=faq&all=false", "", CacheInvalidation{Surface: "faq"}},
		{"all=true", "", CacheInvalidation{}},
	} {
		*last = seen{}
		w := ask(h, http.MethodPost, "/admin/v1/cache/invalidate?"+x.query, "operate", x.body)
		var done CacheInvalidated
		if err := json.Unmarshal(w.Body.Bytes(), &done); err != nil || w.Code != 200 || !reflect.DeepEqual(done, CacheInvalidated{Index: 7, Generation: 3, Previous: 2}) {
			t.Errorf("%s %s: %d %s", x.query, x.body, w.Code, w.Body)
		}
		if who := (Actor{"the operate", RoleOperate}); last.who != who || !reflect.DeepEqual(last.what, x.want) {
			t.Errorf("%s %s: %+v by %+v, want %+v", x.query, x.body, last.what, last.who, x.want)
		}
	}
}

// TestWrongInvalidations end nothing: least of all more than was meant, where a name was written
// wrongly or a template left it empty.
func TestWrongInvalidations(t *testing.T) {
	c, last := fakeNode()
	h := Handler(c)
	many := strings.Repeat(`"t",`, maxCacheTags)
	for _, x := range []struct{ query, body, says string }{
		{"", ``, "name a tenant, a surface or tags"},
		{"", `{}`, "all=true"},
		{"", `{"generation": 2}`, "all=true"},
		{"", `{"tenant": ""}`, "tenant is empty"},
		{"", `{"tenant": "acme", "surface": ""}`, "surface is empty"},
		{"", `{"tenant": "acme", "tags": []}`, "tags is empty"},
		{"", `{"tenant": "acme", "tags": [""]}`, "is no tag"},
		{"", `{"tenant": "acme", "tags": ["a,b"]}`, "without spaces, commas"},
		{"", `{"tenant": "acme", "tags": ["a\u0000"]}`, "is no tag"},
		{"", `{"tenant": "acme", "tags": ["` + strings.Repeat("x", maxCacheTag+1) + `"]}`, "1 to 128 bytes"},
		{"", `{"tenant": "acme", "tags": [` + many + `"t"]}`, "at most 1000"},
		{"", `{"tenant": "acme", "tag": "a"}`, `unknown field \"tag\"`},
		{"", `{"surface": "faq", "tags": ["a"]}`, "whatever the surface"},
		{"", `{"tenant": "acme", "tags": ["a"], "generation": 1}`, "does not come back"},
		{"", `{"tenant": "acme", "generation": 0}`, "the first is 1"},
		{"", `{"tenant": "acme", "generation": -1}`, "can't be read"},
		{"", `{"tenant": "acme", "all": true}`, "leave it out"},
		{"", `{"tenant": "` + strings.Repeat("x", maxName+1) + `"}`, "at most 128 bytes"},
		{"tenant=acme&tags=a", `{}`, `parameter \"tags\" is not one of tenant, surface, tag, generation, all`},
		{"tenant=acme&tag=", ``, "tag is empty"},
		{"tenant=acme&tag=a&tag=", ``, "tag is empty"},
		{"tenant=acme&tag=a,", ``, "is no tag"},
		{"tenant=&tag=a", ``, "tenant is empty"},
		{"tenant=acme&tenant=umbra", ``, "stands there 2 times"},
		{"tenant=acme&tag=%zz", ``, "can't be read"},
		{"tenant=acme;tag=a", ``, "can't be read"},
		{"tenant=acme&generation=x", ``, "not a whole number"},
		{"all=yes", ``, "neither true nor false"},
		{"all=false", ``, "name a tenant"},
		{"all=true&tag=a", ``, "leave it out"},
	} {
		*last = seen{}
		w := ask(h, http.MethodPost, "/admin/v1/cache/invalidate?"+x.query, "operate", x.body)
		if code(t, w) != Invalid || w.Code != 400 || !strings.Contains(w.Body.String(), x.says) {
			t.Errorf("%s %.100s: %d %s", x.query, x.body, w.Code, w.Body)
		}
		if last.what != nil {
			t.Errorf("%s %.100s reached the node: %+v", x.query, x.body, last.what)
		}
	}
}

// TestExplainKeyQuestions: the second request is as the first where it says nothing else.
func TestExplainKeyQuestions(t *testing.T) {
	c, last := fakeNode()
	h := Handler(c)
	first := CacheRequest{
		Tenant: "acme", Key: "acme-1", User: "ada", Surface: "faq", Path: "/v1/messages", Query: "beta=true",
		Headers: map[string][]string{"Anthropic-Version": {"2023-06-01"}}, Body: json.RawMessage(`{"model":"m","x":1.0}`),
	}
	other := first
	other.User, other.Body = "bob", json.RawMessage(`{"model": "m", "x": 1}`)
	elsewhere := first
	elsewhere.Tenant, elsewhere.Key, elsewhere.Path, elsewhere.Query, elsewhere.Headers = "umbra", "", "/v1/responses", "", map[string][]string{}
	const asked = `{"tenant": "acme", "key": "acme-1", "user": "ada", "surface": "faq", "path": "/v1/messages", "query": "beta=true",
		"headers": {"Anthropic-Version": ["2023-06-01"]}, "body": {"model":"m","x":1.0}`
	for body, want := range map[string]CacheQuestion{
		`{"body": {}}`: {CacheRequest: CacheRequest{Path: DefaultCachePath, Body: json.RawMessage(`{}`)}},
		asked + `}`:    {CacheRequest: first},
		asked + `, "other": {"user": "bob", "body": {"model": "m", "x": 1}}}`:             {first, &other},
		asked + `, "other": {"tenant": "umbra", "path": "/v1/responses", "headers": {}}}`: {first, &elsewhere},
		`{"body": "` + strings.Repeat("x", maxAsk) + `"}`:                                 {CacheRequest: CacheRequest{Path: DefaultCachePath, Body: json.RawMessage(`"` + strings.Repeat("x", maxAsk) + `"`)}},
	} {
		*last = seen{}
		w := ask(h, http.MethodPost, "/admin/v1/cache/explain-key", "read", body)
		if w.Code != 200 || !strings.Contains(w.Body.String(), `"parts": []`) || !strings.Contains(w.Body.String(), `"differences": []`) {
			t.Errorf("%.200s: %d %s", body, w.Code, w.Body)
		}
		if !reflect.DeepEqual(last.what, want) {
			t.Errorf("%.200s: %+v", body, last.what)
		}
	}
	for body, says := range map[string]string{
		``:                                     "body: put",
		`{"body": null}`:                       "body: put",
		`{"tenant": "acme"}`:                   "body: put",
		`{"body": {}, "path": "v1/x"}`:         "no path",
		`{"body": {}, "path": "/v1/x?a=b"}`:    "go into query",
		`{"body": {}, "headers": {"a b": []}}`: "no name of one",
		`{"body": {}, "headers": {"": []}}`:    "no name of one",
		`{"body": {}, "headers": {"a": ["` + strings.Repeat(`","`, maxCacheHeaders) + `"]}}`: "at most 100",
		`{"body": {}, "other": {"headers": {"x\n": []}}}`:                                    "other.headers",
		`{"body": {}, "query": "` + strings.Repeat("x", maxCachePath+1) + `"}`:               "query has at most",
		`{"body": {}, "user": "` + strings.Repeat("x", MaxSubject+1) + `"}`:                  "at most 128 bytes, and user 1024",
		`{"body": {}, "bodies": {}}`:                                                         "bodies",
		`{"body": {}} {}`:                                                                    "goes on",
		`{"body": {`:                                                                         "can't be read",
	} {
		*last = seen{}
		w := ask(h, http.MethodPost, "/admin/v1/cache/explain-key", "read", body)
		if code(t, w) != Invalid || !strings.Contains(w.Body.String(), says) || last.what != nil {
			t.Errorf("%.100s: %d %s", body, w.Code, w.Body)
		}
	}
	if w := ask(h, http.MethodPost, "/admin/v1/cache/explain-key", "read", `{"body": "`+strings.Repeat("x", maxCacheQuestion)+`"}`); code(t, w) != TooLarge {
		t.Errorf("%d %.200s", w.Code, w.Body)
	}
}

func TestCacheStatsLists(t *testing.T) {
	c, _ := fakeNode()
	if w := ask(Handler(c), http.MethodGet, "/admin/v1/cache/stats", "read", ""); !strings.Contains(w.Body.String(), `"surfaces": []`) || !strings.Contains(w.Body.String(), `"templates": []`) || !strings.Contains(w.Body.String(), `"semantic": []`) {
		t.Errorf("%s", w.Body)
	}
}

// FuzzInvalidationOf: whatever stands in a URL ends no more than it names.
func FuzzInvalidationOf(f *testing.F) {
	for _, s := range []string{"tenant=acme&tag=a&tag=b", "surface=faq&generation=2", "all=true", "tag=a,b", "tenant=%00", "tag", "all=true&all=true", "TAG=a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, query string) {
		c, err := invalidationOf(query)
		if err != nil {
			return
		}
		v, perr := url.ParseQuery(query)
		switch {
		case perr != nil:
			t.Errorf("%q can't be read, and is %+v", query, c)
		case c.Tenant == "" && c.Surface == "" && len(c.Tags) == 0 && v.Get("all") != "true":
			t.Errorf("%q ends everything", query)
		case v.Get("tenant") != c.Tenant || v.Get("surface") != c.Surface || (v.Get("tag") != "") != (len(c.Tags) > 0):
			t.Errorf("%q is %+v", query, c)
		}
		for name := range v {
			if !strings.Contains(fmt.Sprint(cacheParameters()), name) {
				t.Errorf("%q: %s was passed over", query, name)
			}
		}
		for _, tag := range c.Tags {
			if CheckCacheTag(tag) != nil {
				t.Errorf("%q has the tag %q", query, tag)
			}
		}
	})
}

// TestWrongAnswers: an entry is named, or nothing happens.
func TestWrongAnswers(t *testing.T) {
	c, last := fakeNode()
	h := Handler(c)
	w := ask(h, http.MethodPost, "/admin/v1/cache/wrong", "operate", `{"entry": "8f14e45fceea167a"}`)
	if w.Code != 200 || last.what != (CacheWrong{"8f14e45fceea167a"}) || last.who != (Actor{"the operate", RoleOperate}) {
		t.Errorf("%d %s: %+v by %+v", w.Code, w.Body, last.what, last.who)
	}
	for body, says := range map[string]string{
		``:                            "entry is missing",
		`{}`:                          "entry is missing",
		`{"entry": ""}`:               "entry is missing",
		`{"entry": 7}`:                "can't be read",
		`{"entry": "a", "by": "bob"}`: "unknown field",
		`{"entry": "a"`:               "can't be read",
		`["a"]`:                       "can't be read",
	} {
		*last = seen{}
		if w := ask(h, http.MethodPost, "/admin/v1/cache/wrong", "operate", body); code(t, w) != Invalid || !strings.Contains(w.Body.String(), says) || last.what != nil {
			t.Errorf("%s: %d %s", body, w.Code, w.Body)
		}
	}
	if w := ask(h, http.MethodPost, "/admin/v1/cache/wrong", "read", `{"entry": "a"}`); w.Code != http.StatusForbidden || last.what != nil {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if w := ask(h, http.MethodGet, "/admin/v1/cache/recent", "read", ""); strings.TrimSpace(w.Body.String()) != "[]" {
		t.Errorf("%s", w.Body)
	}
	c.WrongAnswer, c.CacheRecent = nil, nil
	h = Handler(c)
	for method, path := range map[string]string{http.MethodPost: "/admin/v1/cache/wrong", http.MethodGet: "/admin/v1/cache/recent"} {
		if w := ask(h, method, path, "operate", `{"entry": "a"}`); w.Code < 400 {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
}
