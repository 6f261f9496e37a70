package main_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"headgate/proxy/admin"
)

// frontStub is a front door that answers by what a body says, and notes what came.
type frontStub struct {
	*httptest.Server
	mu    sync.Mutex
	seen  map[string]http.Header // by the body's "want"
	paths map[string]string
	body  map[string]string
	busy  int // refusals of "busy" to come
}

func startFrontStub(t *testing.T) *frontStub {
	f := &frontStub{seen: map[string]http.Header{}, paths: map[string]string{}, body: map[string]string{}, busy: 1}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		var ask struct{ Want string }
		if err != nil || json.Unmarshal(raw, &ask) != nil {
			http.Error(w, "what?", http.StatusTeapot)
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		w.Header().Set("X-Headgate-Node", "gw-1")
		f.seen[ask.Want], f.paths[ask.Want], f.body[ask.Want] = r.Header.Clone(), r.URL.String(), string(raw)
		switch {
		case r.Header.Get("Authorization") != "Bearer "+cliKey:
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, `{"error": {"message": "no such key"}}`)
			return
		case ask.Want == "busy" && f.busy > 0:
			f.busy--
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		case ask.Want == "quota":
			w.Header().Set("Retry-After", "86400")
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = io.WriteString(w, `{"error": {"message": "the budget is spent"}}`)
			return
		case ask.Want == "elsewhere":
			w.Header().Del("X-Headgate-Node")
			http.NotFound(w, r)
			return
		case ask.Want == "broken":
			http.Error(w, "oh\nno", http.StatusBadGateway)
			return
		}
		w.Header().Set("X-Headgate-Cache", map[string]string{"busy": "miss"}[ask.Want])
		if ask.Want != "busy" && ask.Want != "nothing" {
			w.Header().Set("X-Headgate-Cache", ask.Want)
		}
		_, _ = io.WriteString(w, `{}`)
	}))
	t.Cleanup(f.Close)
	return f
}

// TestCacheWarm: what is sent, what comes of it, and that a refusal is sat out.
func TestCacheWarm(t *testing.T) {
	t.Parallel()
	f := startFrontStub(t)
	file := writeFile(t, "requests.jsonl", strings.Join([]string{
		`{"want": "exact", "n": 1.0}`,
		``,
		`  {"path": "/v1/messages?beta=true", "headers": {"Anthropic-Version": "2023-06-01", "X-Many": ["a", "b"], "Authorization": "Bearer stolen"}, "user": "bob", "surface": "faq", "body": {"want": "miss"}}`,
		`{"want": "partial", "stream": true, "stream_options": {"include_usage": true}, "n": 1.50}`,
		`{"want": "uncacheable"}`,
		`{"want": "nothing"}`,
		`{"want": "busy"}`,
	}, "\n"))
	env := []string{"HEADGATE_API_KEY=" + cliKey}
	r := runCLI(t, env, "cache", "warm", "-f", file, "--url", f.URL+"/v1/", "--surface", "shop")
	const problems = "headgate: line 5: not cacheable: headgate cache explain-key says why\nheadgate: line 6: not cacheable: it is of no surface, or of one without a cache\n"
	if want := "6 requests: 1 kept already, 3 asked of the model, 2 asked but not cacheable, 0 failed; 1 waits\n"; r.code != 0 || r.stdout != want || r.stderr != problems {
		t.Errorf("%+v", r)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if h := f.seen["exact"]; f.paths["exact"] != admin.DefaultCachePath || h.Get("X-Headgate-Class") != "best_effort" || h.Get("X-Headgate-Surface") != "shop" || h.Get("X-Headgate-Cache") != "" || f.body["exact"] != `{"want": "exact", "n": 1.0}` {
		t.Errorf("%s %v %s", f.paths["exact"], h, f.body["exact"])
	}
	if h := f.seen["miss"]; f.paths["miss"] != "/v1/messages?beta=true" || h.Get("Anthropic-Version") != "2023-06-01" || fmt.Sprint(h["X-Many"]) != "[a b]" || h.Get("X-Headgate-User") != "bob" || h.Get("X-Headgate-Surface") != "faq" {
		t.Errorf("%s %v", f.paths["miss"], h)
	}
	if got := f.body["partial"]; got != `{"n":1.50,"want":"partial"}` {
		t.Errorf("the stream was asked for as %s", got)
	}
}

// TestCacheWarmFails: each failure is told by its line and counts, and a key that is not good ends all.
func TestCacheWarmFails(t *testing.T) {
	t.Parallel()
	f := startFrontStub(t)
	env := []string{"HEADGATE_API_KEY=" + cliKey}
	file := writeFile(t, "requests.jsonl", strings.Join([]string{
		`{"want": "exact"}`, `{"want": "broken"}`, `{"want": "quota"}`, `[]`, `{"body": {}, "pfad": "/"}`, `{"body": "x"}`, `{"path": "v1", "body": {"want": "exact"}}`, `{"want"`,
	}, "\n"))
	r := runCLI(t, env, "cache", "warm", "-f", file, "--url", f.URL, "--refresh", "--json", "--concurrency", "1")
	var done struct {
		Requests, Kept, Failed int
		Problems               []struct {
			Line int
			Says string
		}
	}
	if err := json.Unmarshal([]byte(r.stdout), &done); err != nil || r.code != 1 || done.Requests != 8 || done.Kept != 1 || done.Failed != 7 || len(done.Problems) != 7 || done.Problems[0].Line != 2 {
		t.Errorf("%+v", r)
	}
	contains(t, r.stderr, "headgate: 7 of 8 requests failed")
	f.mu.Lock()
	if h := f.seen["exact"]; h.Get("X-Headgate-Cache") != "refresh" {
		t.Errorf("%v", h)
	}
	f.mu.Unlock()
	r = runCLI(t, env, "cache", "warm", "-f", file, "--url", f.URL)
	contains(t, r.stderr, "line 2: status 502: oh\nheadgate: line 3: status 429: the budget is spent\nheadgate: line 4: it is no JSON object",
		`line 5: beside the body there may be path, headers, user and surface: json: unknown field "pfad"`,
		"line 6: its body is no JSON object", `line 7: path "v1" does not begin with /`, "line 8: it is no JSON object")

	bad := writeFile(t, "bad.jsonl", strings.Repeat(`{"want": "broken"}`+"\n", 1003))
	if r := runCLI(t, env, "cache", "warm", "-f", bad, "--url", f.URL); r.code != 1 || strings.Count(r.stderr, "line ") != 1000 || !strings.Contains(r.stderr, "headgate: and 3 more\n") || !strings.Contains(r.stdout, "1003 failed") {
		t.Errorf("%.300s", fmt.Sprint(r))
	}
	gone := writeFile(t, "gone.jsonl", strings.Repeat(`{"want": "elsewhere"}`+"\n", 30))
	if r := runCLI(t, env, "cache", "warm", "-f", gone, "--url", f.URL); r.code != 1 || !strings.Contains(r.stderr, "is no front door of a node (status 404: 404 page not found)") || !strings.Contains(r.stdout, "0 requests") {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, []string{"HEADGATE_API_KEY=another"}, "cache", "warm", "-f", file, "--url", f.URL, "--concurrency", "1"); r.code != 1 || !strings.Contains(r.stderr, "the key in HEADGATE_API_KEY is not good there: no such key") || strings.Contains(r.stderr, "line 2") {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, env, "cache", "warm", "-f", file, "--url", "http://127.0.0.1:1", "--concurrency", "1"); r.code != 1 || !strings.Contains(r.stderr, "nobody answers at --url http://127.0.0.1:1: ") || strings.Contains(r.stderr, "line ") || strings.Contains(r.stderr+r.stdout, cliKey) {
		t.Errorf("%+v", r)
	}
	long := writeFile(t, "long.jsonl", `{"want": "exact"}`+"\n"+`{"want": "`+strings.Repeat("x", 9<<20)+`"}`)
	if r := runCLI(t, env, "cache", "warm", "-f", long, "--url", f.URL); r.code != 1 || !strings.Contains(r.stderr, "a line is longer than 8.0 MiB") || !strings.Contains(r.stdout, "1 requests") {
		t.Errorf("%.300s", fmt.Sprint(r))
	}
}

// TestWrongCacheCalls ask no node, but say what is wrong.
func TestWrongCacheCalls(t *testing.T) {
	t.Parallel()
	good := writeFile(t, "good.json", `{"model": "m"}`)
	env := []string{"HEADGATE_ADMIN_TOKEN=" + cliToken, "HEADGATE_ADMIN=http://127.0.0.1:1"}
	key := "HEADGATE_API_KEY=" + cliKey
	for args, says := range map[string]string{
		"cache invalidate":                                                             "--all ends every one there is",
		"cache invalidate --generation 2":                                              "--all ends every one there is",
		"cache invalidate --all --tenant acme":                                         "leave it out, or the rest",
		"cache invalidate --tenant= --tag a":                                           "--tenant is empty",
		"cache invalidate --tenant acme --tag=":                                        "--tag is empty",
		"cache invalidate --tenant acme --tag a,,b":                                    "--tag is empty",
		"cache invalidate --tenant acme --generation -1":                               `"-1" is not a whole number`,
		"cache invalidate acme":                                                        "takes no argument",
		"cache generations x":                                                          "takes no argument",
		"cache explain-key":                                                            "-f request.json",
		"cache explain-key -f none.json":                                               "none.json",
		"cache explain-key -f " + good + " --against none.json":                        "none.json",
		"cache explain-key -f " + good + " --header nothing":                           "'Name: value'",
		"cache explain-key -f " + writeFile(t, "bad.json", "[]"):                       "no JSON object",
		"cache explain-key -f " + writeFile(t, "big.json", strings.Repeat(" ", 9<<20)): "larger than 8.0 MiB",

		"cache warm":               "-f requests.jsonl",
		"cache warm -f none.jsonl": "none.jsonl",

		"cache warm -f " + good + " --concurrency 0":      "not between 1 and 64",
		"cache warm -f " + good + " --url 127.0.0.1:8080": "has no scheme",
		"cache warm -f " + good + " --ca none.pem":        "none.pem",
		"cache stat": `did you mean "stats"?`,
	} {
		if r := runCLI(t, append(env, key), strings.Fields(args)...); r.code != 2 || !strings.Contains(r.stderr, says) || r.stdout != "" {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if r := runCLI(t, env, "cache", "warm", "-f", good); r.code != 2 || !strings.Contains(r.stderr, "HEADGATE_API_KEY is not set") {
		t.Errorf("%+v", r)
	}
}

// cachePolicy keeps answers of faq for a whole tenant, of desk for each user.
func cachePolicy(upstream string) string {
	return fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b], default_temperature: 0, price_per_million: {input: "1.00", output: "2.00"}}]
plans: [{name: p}]
tenants: [{name: dev, plan: p}]
surfaces:
  - {name: faq, share: tenant, template_version: "7", exact: {}}
  - {name: desk, exact: {}}
  - {name: plain}
`, upstream)
}

// cached asks a question at faq and returns what the cache did.
func (n *nodeProcess) cached(question string, headers ...string) string {
	n.t.Helper()
	body, err := json.Marshal(map[string]any{"model": "m", "temperature": 0, "messages": []any{map[string]string{"role": "user", "content": question}}})
	if err != nil {
		n.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(n.t.Context(), http.MethodPost, n.front+"/v1/chat/completions", strings.NewReader(string(body)))
	if err != nil {
		n.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+cliKey)
	req.Header.Set("X-Headgate-Surface", "faq")
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != http.StatusOK {
		n.t.Fatalf("status %d: %v", res.StatusCode, err)
	}
	return res.Header.Get("X-Headgate-Cache")
}

// TestCacheInvalidate: what was kept ends by generation and by tag, and comes back with the
// generation; nothing ends that nobody named.
func TestCacheInvalidate(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cachePolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	expect := func(when, want, question string) {
		t.Helper()
		if got := n.cached(question); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	n.cached("one", "X-Headgate-Cache-Tags: doc-1, doc-2")
	n.cached("two", "X-Headgate-Cache-Tags: doc-2")
	expect("asked again", "exact", "one")

	contains(t, n.ok("cache", "invalidate", "--tenant", "dev", "--tag", "doc-1"), "what was kept with doc-1 is ended, for tenant dev")
	expect("another's tag ended", "exact", "two")
	expect("its tag ended", "miss", "one")
	expect("filled anew", "exact", "one")

	contains(t, n.ok("cache", "invalidate", "--tenant", "dev", "--surface", "faq"), "surface faq of tenant dev: generation 2 is in force; --generation 1 puts back")
	expect("a new generation", "miss", "two")
	back := decoded[admin.CacheInvalidated](n, "cache", "invalidate", "--tenant", "dev", "--surface", "faq", "--generation", "1")
	if back.Generation != 1 || back.Previous != 2 || back.Index == 0 {
		t.Errorf("%+v", back)
	}
	expect("the first generation again", "exact", "two")
	contains(t, n.ok("cache", "invalidate", "--tenant", "dev", "--surface", "faq", "--generation", "1"), "generation 1 is in force already")
	contains(t, n.ok("cache", "invalidate", "--all"), "everything: generation 2 is in force")
	expect("all ended", "miss", "two")
	contains(t, spaced(n.ok("cache", "generations")), "TENANT SURFACE GENERATION HIGHEST\n(all) (all) 2 2\ndev faq 1 2\n")
	if list := decoded[[]admin.CacheGeneration](n, "cache", "generations"); len(list) != 2 || list[1] != (admin.CacheGeneration{Tenant: "dev", Surface: "faq", Now: 1, Highest: 2}) {
		t.Errorf("%+v", list)
	}
	contains(t, n.ok("audit"), "cache.generation", "surface faq of tenant dev", "cache.tags", "doc-1")

	for args, want := range map[string]struct {
		code int
		says string
	}{
		"--tenant deb --tag doc-1":               {1, `there is no tenant "deb"; did you mean "dev"?`},
		"--surface fqa":                          {1, `there is no surface "fqa"; did you mean "faq"?`},
		"--surface faq --generation 9":           {2, "generation 9 of surface faq was never in force, the highest is 1"},
		"--tenant dev --tag a\u00a0b":            {0, "what was kept with"},
		"--surface faq --tag doc-1":              {2, "tags are a tenant's"},
		"--tag doc-1 --generation 1":             {2, "does not come back"},
		"--surface plain":                        {0, `warning: surface "plain" has no cache in the policy in force`},
		"--tenant dev --tag doc-2,doc-3 --tag x": {0, "doc-2 or doc-3 or x"},
	} {
		r := n.cli(append([]string{"cache", "invalidate"}, strings.Split(args, " ")...)...)
		if r.code != want.code || !strings.Contains(r.stdout+r.stderr, want.says) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if s := decoded[admin.CacheStats](n, "cache", "stats"); s.Node == "" || !s.Hearing || s.Store.Puts < 4 || s.Store.Entries < 1 || s.Store.Bytes < s.Store.Entries || s.Store.MaxBytes < s.Store.Bytes {
		t.Errorf("%+v", s)
	}
	contains(t, n.ok("cache", "stats"), "answers in", "of 256.0 MiB")
}

// TestCacheRoles: who operates ends answers, who looks may ask about keys, and sees no answer.
func TestCacheRoles(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cachePolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	question := writeFile(t, "question.json", `{"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "one"}]}`)
	n.cached("one")
	as := func(role string) func(args ...string) result {
		token := decoded[admin.CreatedToken](n, "tokens", "create", "the-"+role, "--role", role).Token
		return func(args ...string) result {
			return runCLI(t, []string{"HEADGATE_ADMIN=" + n.admin, "HEADGATE_ADMIN_TOKEN=" + token}, args...)
		}
	}
	looks, operates := as("read"), as("operate")
	if r := looks("cache", "invalidate", "--all"); r.code != 1 || !strings.Contains(r.stderr, "role operate") {
		t.Errorf("%+v", r)
	}
	if r := operates("cache", "invalidate", "--surface", "desk"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	r := looks("cache", "explain-key", "-f", question, "--surface", "faq", "--json")
	var e admin.CacheExplanation
	if err := json.Unmarshal([]byte(r.stdout), &e); err != nil || !e.Cacheable || e.Kept == nil || len(e.Key) != 64 {
		t.Errorf("%v %+v", err, r)
	}
	if strings.Contains(r.stdout, "assistant") || strings.Contains(r.stdout, "choices") {
		t.Errorf("an answer is shown: %s", r.stdout)
	}
}

// TestCacheExplainKey: why an answer is not kept, what its key is made of, and where two differ.
func TestCacheExplainKey(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cachePolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	file := func(text string) string { return writeFile(t, "request.json", text) }
	plain := file(`{"model": "m", "messages": [{"role": "user", "content": "one"}], "stream": true, "temperature": 0.0}`)
	explain := func(args ...string) admin.CacheExplanation {
		t.Helper()
		return decoded[admin.CacheExplanation](n, append([]string{"cache", "explain-key", "-f"}, args...)...)
	}

	before := explain(plain, "--surface", "faq")
	if before.AsKey != "dev" || before.AsTenant != "dev" || !before.Cacheable || before.Kept != nil || before.Model != "m" {
		t.Errorf("%+v", before)
	}
	n.cached("one")
	for range 3 { // to ask is no use: an entry that is never hit lives half as long
		explain(plain, "--surface", "faq")
	}
	same := explain(plain, "--surface", "faq", "--against", file(`{"temperature": 0e1, "messages": [{"content": "one", "role": "user"}], "model": "m"}`))
	if same.Key != before.Key || same.Other == nil || same.Other.Key != same.Key || len(same.Differences) != 0 {
		t.Errorf("%+v", same)
	}
	parts := map[string]admin.CachePart{}
	for _, p := range same.Parts {
		parts[p.Name] = p
	}
	if p := parts["body.messages[0]"]; !p.Counted || !strings.Contains(p.Value, `"one"`) || len(p.Hash) != 16 {
		t.Errorf("%+v", parts)
	}
	if p := parts["body.stream"]; p.Counted || p.Value != "true" || parts["template"].Value != "7" || parts["tenant"].Value != "dev" {
		t.Errorf("%+v", parts)
	}

	other := file(`{"path": "/v1/chat/completions?v=2", "headers": {"OpenAI-Organization": "o", "X-Request-Id": "9"}, "surface": "desk", "user": "ada", "body": {"model": "m", "messages": [{"role": "user", "content": "two"}], "temperature": 0}}`)
	differs := explain(plain, "--surface", "desk", "--header", "OpenAI-Project: p", "--against", other)
	found := map[string]admin.CacheDifference{}
	for _, d := range differs.Differences {
		found[d.Path] = d
	}
	for path, want := range map[string][2]string{
		"user": {"key:dev", "ada"}, "query": {"", "v=2"}, "body.messages[0].content": {`"one"`, `"two"`},
		`header "Openai-Organization"`: {"(absent)", "o"}, `header "Openai-Project"`: {"p", "(absent)"},
	} {
		if d := found[path]; d.First != want[0] || d.Second != want[1] {
			t.Errorf("%s: %+v", path, differs.Differences)
		}
	}
	if len(found) != 5 || differs.Key == differs.Other.Key {
		t.Errorf("%+v", differs.Differences)
	}
	contains(t, n.ok("cache", "explain-key", "-f", plain, "--surface", "desk", "--against", other), "DIFFERS IN", "the other: answers of m are kept", `"two"`)
	contains(t, n.ok("cache", "explain-key", "-f", plain, "--surface", "faq"), "answers of m are kept, key "+before.Key, "this node keeps one of", "PART", "generations", "body.stream")

	for args, want := range map[string]struct {
		code int
		says string
	}{
		plain:                                      {0, "not kept: the request is of no surface"},
		plain + " --surface plain":                 {0, `not kept: surface plain has no exact cache`},
		plain + " --surface fqa":                   {1, `there is no surface "fqa"; did you mean "faq"?`},
		plain + " --tenant deb":                    {1, `there is no tenant "deb"; did you mean "dev"?`},
		plain + " --key k":                         {1, `there is no key "k"; headgate keys list shows them`},
		plain + " --surface faq --path /v1/none":   {2, "it would be refused with status 404"},
		plain + " --surface faq --path /v1/models": {2, "it would be refused with status 405"},
		file(`{"model": "m", "temperature": 0.5, "messages": []}`) + " --surface faq":     {0, "not kept: temperature: it is 0.5"},
		file(`{"model": "nobody", "messages": []}`) + " --surface faq":                    {2, "it would be refused with status 404: model"},
		file(`{"model": "m", "model": "m", "messages": []}`) + " --surface faq":           {2, "it would be refused with status 400"},
		plain + " --surface faq --against " + file(`{"model": "nobody", "messages": []}`): {2, "other: it would be refused"},
	} {
		r := n.cli(append([]string{"cache", "explain-key", "-f"}, strings.Fields(args)...)...)
		if r.code != want.code || !strings.Contains(r.stdout+r.stderr, want.says) {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

// TestCacheExplainInputs: embeddings are kept input by input, and are explained so.
func TestCacheExplainInputs(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cachePolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	ask := func(inputs string) string {
		return writeFile(t, "request.jsonl", `{"path": "/v1/embeddings", "surface": "faq", "body": {"model": "m", "input": `+inputs+`}}`)
	}
	if r := runCLI(t, []string{"HEADGATE_API_KEY=" + cliKey}, "cache", "warm", "-f", ask(`["a", "b"]`), "--url", n.front); r.code != 0 || !strings.Contains(r.stdout, "1 asked of the model") {
		t.Fatalf("%+v", r)
	}
	for inputs, want := range map[string][2]int{`["a", "b"]`: {2, 2}, `["c", "b", "d"]`: {3, 1}, `"a"`: {1, 1}, `"e"`: {1, 0}} {
		n.await(inputs, func() bool { // they are put in the background
			e := decoded[admin.CacheExplanation](n, "cache", "explain-key", "-f", ask(inputs))
			return e.Cacheable && e.Kept == nil && e.Inputs == want[0] && e.InputsKept == want[1]
		})
	}
	contains(t, n.ok("cache", "explain-key", "-f", ask(`["c", "b"]`)), "input by input: this node keeps 1 of 2")
}

// TestCacheWarmAtANode: what was warmed is a hit for whoever asks the same.
func TestCacheWarmAtANode(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cachePolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	line := `{"messages": [{"content": %q, "role": "user"}], "model": "m", "temperature": 0, "stream": true}` + "\n"
	file := writeFile(t, "requests.jsonl", fmt.Sprintf(line, "one")+fmt.Sprintf(line, "two")+`{"surface": "plain", "body": {"model": "m", "messages": [{"role": "user", "content": "one"}]}}`+"\n")
	for _, want := range []string{"3 requests: 0 kept already, 2 asked of the model, 1 asked but not cacheable, 0 failed", "3 requests: 2 kept already, 0 asked of the model"} {
		r := runCLI(t, []string{"HEADGATE_API_KEY=" + cliKey}, "cache", "warm", "-f", file, "--url", n.front, "--surface", "faq")
		if r.code != 0 || !strings.Contains(r.stdout, want) {
			t.Errorf("%+v", r)
		}
	}
	if got := n.cached("two"); got != "exact" {
		t.Errorf("what was warmed is a %s", got)
	}
}
