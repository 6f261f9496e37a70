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
	r := runCLI(t, env, "cache", "warm", "-f", file, "--url", f.URL+"/", "--surface", "shop")
	if want := "6 requests: 1 were kept already, 3 were asked of the model, 2 are not cacheable, 0 failed; 1 waits\nheadgate cache explain-key says why"; r.code != 0 || !strings.HasPrefix(r.stdout, want) || r.stderr != "" {
		t.Errorf("%+v", r)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if h := f.seen["exact"]; f.paths["exact"] != admin.DefaultCachePath || h.Get("X-Headgate-Class") != "best_effort" || h.Get("X-Headgate-Surface") != "shop" || h.Get("X-Headgate-Cache") != "" || f.body["exact"] != `{"want": "exact", "n": 1.0}` {
		t.Errorf("%s %v %s", f.paths["exact"], h, f.body["exact"])
	}
	if h := f.seen["miss"]; f.paths["miss"] != "/v1/messages?beta=true" || h.Get("Anthropic-Version") != "2023-06-01" || fmt.Sprint(h["X-Many"]) != "[a b]" || h.Get("X-Headgate-User") != "bob" || h.Get("X-Headgate-Surface") != "shop" {
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
		NotCacheable           int `json:"not_cacheable"`
	}
	if err := json.Unmarshal([]byte(r.stdout), &done); err != nil || r.code != 1 || done.Requests != 8 || done.Kept != 1 || done.Failed != 7 {
		t.Errorf("%+v", r)
	}
	contains(t, r.stderr, "line 2: status 502: oh\n", "line 3: status 429: the budget is spent", "line 4: it is no JSON object", `line 5: beside the body there may be path, headers, user and surface: json: unknown field "pfad"`,
		"line 6: its body is no JSON object", `line 7: path "v1" does not begin with /`, "line 8: it is no JSON object", "headgate: 7 of 8 requests failed")
	f.mu.Lock()
	if h := f.seen["exact"]; h.Get("X-Headgate-Cache") != "refresh" {
		t.Errorf("%v", h)
	}
	f.mu.Unlock()

	bad := writeFile(t, "bad.jsonl", strings.Repeat(`{"want": "broken"}`+"\n", 30))
	if r := runCLI(t, env, "cache", "warm", "-f", bad, "--url", f.URL); r.code != 1 || strings.Count(r.stderr, "line ") != 20 || !strings.Contains(r.stderr, "only counted") || !strings.Contains(r.stdout, "30 failed") {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, []string{"HEADGATE_API_KEY=another"}, "cache", "warm", "-f", file, "--url", f.URL, "--concurrency", "1"); r.code != 1 || !strings.Contains(r.stderr, "the key in HEADGATE_API_KEY is not good there: no such key") || strings.Contains(r.stderr, "line 2") {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, env, "cache", "warm", "-f", file, "--url", "http://127.0.0.1:1", "--concurrency", "1"); r.code != 1 || !strings.Contains(r.stderr, "connection refused") || strings.Contains(r.stderr+r.stdout, cliKey) {
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
