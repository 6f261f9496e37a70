package main_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"headgate/bench/fakevllm"
)

// The client libraries read the same through a node twice: first what the model answers, then what was kept
// of it. This file is about the node; replay_sdk_test.go about replays by themselves.

// recorder answers as a model server, and for the models of recorded as those who were recorded.
func recorder(t *testing.T) string {
	t.Helper()
	fake, err := fakevllm.New(fakevllm.Config{Seed: 1, Models: []string{"m"}})
	if err != nil {
		t.Fatal(err)
	}
	streams := recorded()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		var in struct{ Model string }
		_ = json.Unmarshal(raw, &in) // what is no JSON is of no recorded model
		if sse, ok := streams[in.Model]; ok && r.Method == http.MethodPost {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, sse)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(raw))
		fake.Handler().ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

// shim is between a client and a server. It sorts the members of bodies, says of which surface requests are and that nobody need store
// responses, and counts what the cache did.
type shim struct {
	url     string
	prime   bool // each stream is asked for as a whole first
	storing bool // responses are stored where nobody says otherwise

	mu    sync.Mutex
	words map[string]int
}

func newShim(t *testing.T, to string) *shim {
	t.Helper()
	target, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	s := &shim{words: map[string]int{}}
	pass := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		FlushInterval: -1,
		ModifyResponse: func(r *http.Response) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if r.StatusCode == http.StatusOK && r.Request.Method == http.MethodPost {
				s.words[r.Header.Get("X-Headgate-Cache")]++
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		ErrorLog:     log.New(io.Discard, "", 0),
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex() // as in TestSDKHarness
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Header.Set("X-Headgate-Surface", "faq")
		var body map[string]json.RawMessage
		if json.Unmarshal(raw, &body) == nil && body != nil { // with its members in one order, of which the fake's answer is a function
			if r.URL.Path == "/v1/responses" && body["store"] == nil && !s.storing {
				body["store"] = json.RawMessage("false")
			}
			if raw, err = json.Marshal(body); err != nil {
				t.Error(err)
			}
			if s.prime {
				s.ask(t, to, r, body)
			}
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(raw)), int64(len(raw))
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

// ask asks for a whole answer to what is about to be asked as a stream.
func (s *shim) ask(t *testing.T, to string, r *http.Request, body map[string]json.RawMessage) {
	if string(body["stream"]) != "true" || recorded()[strings.Trim(string(body["model"]), `"`)] != "" {
		return
	}
	delete(body, "stream")
	delete(body, "stream_options")
	whole, err := json.Marshal(body)
	if err != nil {
		t.Error(err)
		return
	}
	req, err := http.NewRequestWithContext(r.Context(), r.Method, to+r.URL.Path, bytes.NewReader(whole))
	if err != nil {
		t.Error(err)
		return
	}
	req.Header = r.Header.Clone()
	req.Header.Del("Content-Length")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = res.Body.Close() }()
	if text, err := io.ReadAll(res.Body); err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("%s: %d %v %s", whole, res.StatusCode, err, text)
	}
}

// forget gives what was counted, and begins anew.
func (s *shim) forget() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.words
	s.words = map[string]int{}
	return was
}

// cachedPolicy keeps whatever may be kept, so that each client finds all its answers again.
func cachedPolicy(upstream string, models ...string) string {
	backends := []backend{{"b", upstream, "m"}}
	for i, name := range models {
		backends = append(backends, backend{fmt.Sprintf("b%d", i), upstream, name})
	}
	return policyFor("", backends...) + "surfaces:\n  - {name: faq, share: tenant, exact: {ttl: 1h, beta: 0, temperature: 2, tools: true, n: true, length: true, timestamps: ok}}\n"
}

// TestSDKCache: client libraries see no difference between a stream of the model's and one that was kept,
// whether it was kept of a stream or of a whole answer.
func TestSDKCache(t *testing.T) {
	exe := buildHeadgate(t)
	up := recorder(t)
	run := func(s *shim) []string { return lines(node(t, target{url: s.url, model: "m"}, "replay.mjs")) }
	direct := run(newShim(t, up))
	for _, prime := range []bool{false, true} {
		t.Run(map[bool]string{false: "of streams", true: "of whole answers"}[prime], func(t *testing.T) {
			via := newShim(t, startHeadgate(t, exe, cachedPolicy(up, slices.Sorted(maps.Keys(recorded()))...)))
			via.prime = prime
			for i, pass := range []string{"first", "again"} {
				compare(t, "replay", nil, direct, run(via))
				words := via.forget()
				t.Logf("%s: %v", pass, words)
				if i == 1 && (words["exact"] < len(direct) || len(words) != 1) || words["uncacheable"] > 0 {
					t.Errorf("%s: of %d steps %v", pass, len(direct), words)
				}
			}
		})
	}
}

// tourDifferences are the steps of tours that mean to see what a replay may change, or an error that a kept
// answer makes needless.
func tourDifferences() []knownDifference {
	nothing := func(any) any { return nil }
	known := slices.DeleteFunc(knownDifferences(), func(k knownDifference) bool { return slices.Contains(k.steps, "fault.cut") })
	return append(known,
		knownDifference{[]string{"fault.cut"}, "as without a cache, in the shape that folding gives it", func(v any) any { return strings.Contains(canonical(v), `"error":{`) }},
		knownDifference{[]string{"tools.stream"}, "arguments are cut otherwise, which the tour does not fold; replay.mjs does", nothing},
		knownDifference{[]string{"error.stream_options"}, "they do not count where there is no stream: the answer is kept", nothing},
		knownDifference{[]string{"embeddings", "embeddings.float", "embed", "embedMany"}, "answers are put together by input, without the id and the time of any one", func(v any) any {
			if m, ok := dig(v, "result").(map[string]any); ok {
				delete(m, "id")
				delete(m, "created")
				if u, ok := m["usage"].(map[string]any); ok {
					delete(u, "completion_tokens")
				}
			}
			return v
		}})
}

// TestSDKCacheTours: all that the libraries' tours do, errors and all, through a node that keeps answers.
func TestSDKCacheTours(t *testing.T) {
	exe := buildHeadgate(t)
	up := recorder(t)
	for _, s := range scripts() {
		t.Run(s.name, func(t *testing.T) {
			at := func(sh *shim) target {
				sh.storing = true
				return target{url: sh.url, model: "m", faults: true, fold: true}
			}
			direct := s.run(t, at(newShim(t, up)))
			via := newShim(t, startHeadgate(t, exe, cachedPolicy(up)))
			for _, pass := range []string{"first", "again"} {
				compare(t, s.name, tourDifferences(), direct, s.run(t, at(via)))
				words := via.forget()
				t.Logf("%s: %v", pass, words)
				if pass == "again" && words["exact"] == 0 {
					t.Errorf("%v", words)
				}
			}
		})
	}
}
