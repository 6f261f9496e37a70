package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"

	"headgate/bench/fakevllm"
)

// The client libraries that applications use run the same script twice, against a model
// server and against a node in front of it, and what they saw must be the same, but for
// what knownDifferences names.

const (
	sdkKey     = "hg_test_sdk0000000000000000000000000000000000000000000000000000000000"
	sdkTimeout = 2 * time.Minute // one script, or a node's start; generous, it only ends a hang
)

// target is a server that a script runs against.
type target struct {
	url, model           string // url without /v1
	embedURL, embedModel string // where embeddings come from another server or model
	gateway              bool   // run the steps that only a gateway can answer
	faults               bool   // fakevllm is behind it
	fold                 bool   // how an answer is cut into chunks may differ between runs
}

func (t target) env() []string {
	env := append(os.Environ(), "BASE_URL="+t.url+"/v1", "API_KEY="+sdkKey, "MODEL="+t.model, "EMBED_MODEL="+t.embedModel, "EMBED_URL=")
	if t.embedURL != "" {
		env = append(env, "EMBED_URL="+t.embedURL+"/v1")
	}
	for name, on := range map[string]bool{"GATEWAY": t.gateway, "FAULTS": t.faults, "FOLD": t.fold} {
		env = append(env, name+"="+map[bool]string{true: "1"}[on])
	}
	return env
}

// script is one library's tour. It returns one JSON line per step.
type script struct {
	name string
	run  func(*testing.T, target) []string
}

func scripts() []script {
	list := []script{{"openai-go", openaiGo}}
	for _, name := range []string{"openai", "anthropic", "aisdk"} {
		list = append(list, script{name, func(t *testing.T, at target) []string { return lines(node(t, at, name+".mjs")) }})
	}
	return list
}

// knownDifference is a step in which the gateway means to answer otherwise than the
// server behind it; keep names what must agree all the same.
type knownDifference struct {
	steps []string
	why   string
	keep  func(any) any
}

func knownDifferences() []knownDifference {
	status := func(v any) any { return pick(v, "error", "class", "status", "statusCode", "isRetryable") }
	return []knownDifference{
		{[]string{"error.model", "error.model.stream"}, "the gateway knows the models, and its error says where to find those that the key may use", status},
		{[]string{"error.cap"}, "the meter refuses a negative cap before any server sees it", status},
		{[]string{"fault.cut"}, "a broken connection is told to the client in the stream's own terms, where it has any", broken},
	}
}

// broken keeps of a stream that broke off what had arrived, and that it was seen to fail.
func broken(v any) any {
	failed := dig(v, "result", "error") != nil
	all, _ := dig(v, "result", "chunks").([]any)
	arrived := []any{}
	for _, c := range all {
		failed = failed || dig(c, "error") != nil
		if typ := dig(c, "type"); typ == nil || typ == "text-delta" || typ == "content_block_delta" {
			arrived = append(arrived, c)
		}
	}
	return map[string]any{"arrived": arrived, "failed": failed}
}

// gatewayAnswers are the steps that no upstream can answer, and what they must give.
func gatewayAnswers() map[string]string {
	return map[string]string{
		"openai/gateway.key":        `{"class":"AuthenticationError","status":401,"code":"invalid_api_key","type":"authentication_error"}`,
		"openai/gateway.request_id": `"string"`,
		"openai/gateway.model":      `true`,
		"anthropic/gateway.key":     `{"class":"AuthenticationError","status":401,"type":"authentication_error"}`,
		"anthropic/gateway.bearer":  `"message"`,
		"aisdk/gateway.key":         `{"class":"APICallError","statusCode":401,"isRetryable":false}`,
	}
}

func TestSDKs(t *testing.T) {
	exe := buildHeadgate(t)
	fake := startFake(t)
	for _, s := range scripts() {
		t.Run(s.name, func(t *testing.T) {
			direct := target{url: fake, model: "m", faults: true}
			via := direct
			via.url, via.gateway = startHeadgate(t, exe, policyFor("", backend{"b", fake, "m"})), true
			compare(t, s.name, knownDifferences(), s.run(t, direct), s.run(t, via))
		})
	}
}

// TestSDKHarness holds the harness itself: it finds no difference where there is none,
// and finds a small one.
func TestSDKHarness(t *testing.T) {
	fake := startFake(t)
	between := func(change func([]byte) []byte) string {
		u, err := url.Parse(fake)
		if err != nil {
			t.Fatal(err)
		}
		proxy := &httputil.ReverseProxy{
			Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(u) },
			FlushInterval: -1,
			ModifyResponse: func(r *http.Response) error {
				if r.Header.Get("Content-Type") != "application/json" || r.Header.Get("Content-Encoding") != "" {
					return nil
				}
				b, err := io.ReadAll(r.Body)
				b = change(b)
				r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
				r.Header.Set("Content-Length", strconv.Itoa(len(b)))
				return err
			},
			ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
			ErrorLog:     log.New(io.Discard, "", 0),
		}
		// Without full duplex an answer that is quicker than the end of its request closes
		// the request's body under the transport, which then drops the connection.
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).EnableFullDuplex()
			proxy.ServeHTTP(w, r)
		}))
		t.Cleanup(srv.Close)
		return srv.URL
	}
	same := between(func(b []byte) []byte { return b })
	other := between(func(b []byte) []byte {
		return bytes.Replace(b, []byte(`"kv_transfer_params":null`), []byte(`"kv_transfer_params":{}`), 1)
	})
	for _, s := range scripts() {
		t.Run(s.name, func(t *testing.T) {
			at := func(u string) target { return target{url: u, model: "m", faults: true} }
			direct := s.run(t, at(fake))
			if d := differences(t, s.name, nil, direct, s.run(t, at(same))); len(d) > 0 {
				t.Errorf("a proxy that changes nothing differs:\n%s", strings.Join(d, "\n"))
			}
			if s.name != "openai" {
				return // the others hide that field, or their server does not send it
			}
			if d := differences(t, s.name, nil, direct, s.run(t, at(other))); len(d) == 0 {
				t.Error("a changed field was not noticed")
			}
		})
	}
}

// TestSDKRetries holds what the libraries make of a refusal: they wait as long as they
// are told and then pass, and stop where waiting is useless.
func TestSDKRetries(t *testing.T) {
	exe := buildHeadgate(t)
	fake := startFake(t)
	t.Run("retry-after-ms", func(t *testing.T) {
		url := startHeadgate(t, exe, policyFor("{name: often, scope: key, unit: requests, rate: 60/min, burst: 1}", backend{"b", fake, "m"}))
		for _, lib := range retryLibraries() {
			t.Run(lib.name, func(t *testing.T) {
				got := lib.run(t, target{url: url, model: "m"}, 2)
				if got.Error != nil {
					t.Fatalf("not every call passed in the end: %v", got)
				}
				passed, refused := 0, 0
				for _, try := range got.Tries {
					switch ms, err := strconv.Atoi(try.RetryAfterMS); {
					case try.Status == http.StatusOK:
						passed++
					case try.Status == http.StatusTooManyRequests && err == nil && ms >= 1 && ms <= 1000 && try.RetryAfter == "1" && try.ShouldRetry == "":
						refused++
					default:
						t.Errorf("try %+v", try)
					}
				}
				if passed != 2 || refused == 0 {
					t.Errorf("%d tries passed and %d were refused; want 2 and at least 1: %+v", passed, refused, got.Tries)
				}
			})
		}
	})
	t.Run("x-should-retry", func(t *testing.T) {
		url := startHeadgate(t, exe, policyFor("{name: rare, scope: key, unit: requests, rate: 10/day, burst: 1}", backend{"b", fake, "m"}))
		at := target{url: url, model: "m"}
		if got := openaiGoRetries(t, at, 1); got.Error != nil {
			t.Fatalf("the first call: %v", got)
		}
		for _, lib := range retryLibraries() {
			if lib.name == "aisdk" {
				continue // it does not know the header and tries thrice, whatever it says
			}
			t.Run(lib.name, func(t *testing.T) {
				got := lib.run(t, at, 1)
				if len(got.Tries) != 1 || got.Tries[0].Status != http.StatusTooManyRequests || got.Tries[0].ShouldRetry != "false" {
					t.Errorf("want one try, refused with x-should-retry: false; got %+v", got.Tries)
				}
				if got.Error["status"] != float64(http.StatusTooManyRequests) {
					t.Errorf("error %v", got.Error)
				}
			})
		}
	})
}

// retried is what retry.mjs prints.
type retried struct {
	Tries []try
	Error map[string]any
}

type try struct {
	Status       int
	RetryAfter   string `json:"retry-after"`
	RetryAfterMS string `json:"retry-after-ms"`
	ShouldRetry  string `json:"x-should-retry"`
}

type retryLibrary struct {
	name string
	run  func(t *testing.T, at target, calls int) retried
}

func retryLibraries() []retryLibrary {
	list := []retryLibrary{{"openai-go", openaiGoRetries}}
	for _, name := range []string{"openai", "openai.stream", "anthropic", "aisdk"} {
		list = append(list, retryLibrary{name, func(t *testing.T, at target, calls int) (r retried) {
			if err := json.Unmarshal(node(t, at, "retry.mjs", name, strconv.Itoa(calls)), &r); err != nil {
				t.Fatal(err)
			}
			return r
		}})
	}
	return list
}

func openaiGoRetries(t *testing.T, at target, calls int) (r retried) {
	client := openai.NewClient(option.WithBaseURL(at.url+"/v1"), option.WithAPIKey(sdkKey), option.WithMiddleware(func(req *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		res, err := next(req)
		if err == nil {
			h := res.Header
			r.Tries = append(r.Tries, try{res.StatusCode, h.Get("Retry-After"), h.Get("Retry-After-Ms"), h.Get("X-Should-Retry")})
		}
		return res, err
	}))
	for range calls {
		_, err := client.Chat.Completions.New(t.Context(), openai.ChatCompletionNewParams{
			Model: at.model, MaxTokens: openai.Int(2), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")},
		})
		if api, ok := errors.AsType[*openai.Error](err); ok {
			r.Error = map[string]any{"status": float64(api.StatusCode)}
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// openaiGo is the tour in openai-go.
func openaiGo(t *testing.T, at target) []string {
	newClient := func(url string) openai.Client {
		return openai.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey(sdkKey), option.WithMaxRetries(0))
	}
	client, embedder, embedModel := newClient(at.url), newClient(at.url), at.model
	if at.embedURL != "" {
		embedder, embedModel = newClient(at.embedURL), at.embedModel
	}
	base := openai.ChatCompletionNewParams{
		Model: at.model, MaxTokens: openai.Int(8), Temperature: openai.Float(0), Seed: openai.Int(7),
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Say hello — grüß Gott, 你好.")},
	}
	withTools := base
	withTools.MaxTokens = openai.Int(200)
	withTools.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name: "get_weather", Parameters: shared.FunctionParameters{"type": "object", "required": []string{"city"}, "properties": map[string]any{"city": map[string]any{"type": "string"}}},
	})}
	withTools.ToolChoice = openai.ToolChoiceOptionFunctionToolChoice(openai.ChatCompletionNamedToolChoiceFunctionParam{Name: "get_weather"})
	noModel := base
	noModel.Model = "no-such-model"
	tooLong := base
	tooLong.MaxTokens = openai.Int(1_000_000)
	withUsage := base
	withUsage.StreamOptions.IncludeUsage = openai.Bool(true)
	answer := responses.ResponseNewParams{Model: at.model, MaxOutputTokens: openai.Int(8), Temperature: openai.Float(0), Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("hi")}}
	fault := func(name string) option.RequestOption {
		return option.WithJSONSet("vllm_xargs", map[string]string{"fake_fault": name})
	}

	ctx, chat := t.Context(), client.Chat.Completions
	tr := &transcript{t: t, fold: at.fold}
	tr.step("models", func() (any, error) { r, err := client.Models.List(ctx); return raw(r, err) })
	tr.step("chat", func() (any, error) { r, err := chat.New(ctx, base); return raw(r, err) })
	tr.step("stream", func() (any, error) { return accumulate(tr, chat.NewStreaming(ctx, base)) })
	tr.step("stream.usage", func() (any, error) { return accumulate(tr, chat.NewStreaming(ctx, withUsage)) })
	tr.step("stream.abort", func() (any, error) {
		long := base
		long.MaxTokens = openai.Int(400)
		s := chat.NewStreaming(ctx, long)
		for n := 0; n < 2 && s.Next(); n++ {
		}
		return nil, s.Close()
	})
	tr.step("after.abort", func() (any, error) { r, err := chat.New(ctx, base); return raw(r, err) })
	tr.step("tools", func() (any, error) { r, err := chat.New(ctx, withTools); return raw(r, err) })
	tr.step("tools.stream", func() (any, error) { return accumulate(tr, chat.NewStreaming(ctx, withTools)) })
	tr.step("embeddings", func() (any, error) {
		r, err := embedder.Embeddings.New(ctx, openai.EmbeddingNewParams{Model: embedModel, Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"a b", "c"}}})
		return raw(r, err)
	})
	tr.step("responses", func() (any, error) { r, err := client.Responses.New(ctx, answer); return raw(r, err) })
	tr.step("responses.stream", func() (any, error) { return events(tr, client.Responses.NewStreaming(ctx, answer)) })
	tr.step("error.model", func() (any, error) { r, err := chat.New(ctx, noModel); return raw(r, err) })
	tr.step("error.context", func() (any, error) { r, err := chat.New(ctx, tooLong); return raw(r, err) })
	if at.faults {
		tr.step("fault.503", func() (any, error) { r, err := chat.New(ctx, base, fault("503")); return raw(r, err) })
		tr.step("fault.inband", func() (any, error) { return accumulate(tr, chat.NewStreaming(ctx, base, fault("inband=3"))) })
		tr.step("fault.split", func() (any, error) { return accumulate(tr, chat.NewStreaming(ctx, base, fault("split"))) })
	}
	return tr.lines
}

type transcript struct {
	t     *testing.T
	fold  bool
	lines []string
}

func (tr *transcript) step(name string, f func() (any, error)) {
	line := map[string]any{"step": name}
	result, err := f()
	line["result"] = result
	if err != nil {
		line["error"] = map[string]any{"message": err.Error()}
		if api, ok := errors.AsType[*openai.Error](err); ok {
			line["error"] = map[string]any{"status": api.StatusCode, "code": api.Code, "type": api.Type, "param": api.Param, "message": api.Message}
		}
	}
	b, err := json.Marshal(scrub(line))
	if err != nil {
		tr.t.Fatal(err)
	}
	tr.lines = append(tr.lines, string(b))
}

// raw is an answer as the server sent it, so that fields unknown to the library count.
func raw(r interface{ RawJSON() string }, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return json.RawMessage(r.RawJSON()), nil
}

// accumulate reads a stream of chunks and what the library makes of them.
func accumulate(tr *transcript, s *ssestream.Stream[openai.ChatCompletionChunk]) (any, error) {
	var acc openai.ChatCompletionAccumulator
	var chunks []json.RawMessage
	for s.Next() {
		acc.AddChunk(s.Current())
		chunks = append(chunks, json.RawMessage(s.Current().RawJSON()))
	}
	if err := s.Err(); err != nil {
		return map[string]any{"chunks": chunks}, err
	}
	if tr.fold {
		chunks = nil
	}
	var message any
	if len(acc.Choices) > 0 {
		message = acc.Choices[0]
	}
	return map[string]any{"chunks": chunks, "message": message, "usage": acc.Usage}, nil
}

func events(tr *transcript, s *ssestream.Stream[responses.ResponseStreamEventUnion]) (any, error) {
	var all []json.RawMessage
	for s.Next() {
		if ev := s.Current(); !tr.fold || ev.Type == "response.completed" {
			all = append(all, json.RawMessage(ev.RawJSON()))
		}
	}
	if tr.fold && len(all) > 0 { // its number counts the pieces that the text came in
		var last map[string]any
		if err := json.Unmarshal(all[0], &last); err != nil {
			return nil, err
		}
		delete(last, "sequence_number")
		return last, s.Err()
	}
	return all, s.Err()
}

// scrub does what harness.mjs does: it replaces ids, alike where they were alike, and
// clocks.
func scrub(line map[string]any) any {
	b, err := json.Marshal(line)
	if err != nil {
		return err.Error()
	}
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return err.Error()
	}
	seen := map[string]string{}
	ids := []string{"id", "item_id", "response_id", "tool_call_id", "call_id", "previous_response_id"}
	clocks := []string{"created", "created_at", "completed_at"}
	var walk func(key string, v any) any
	walk = func(key string, v any) any {
		switch v := v.(type) {
		case []any:
			for i := range v {
				v[i] = walk("", v[i])
			}
		case map[string]any:
			for _, k := range slices.Sorted(maps.Keys(v)) {
				v[k] = walk(k, v[k])
			}
		case string:
			if slices.Contains(ids, key) {
				if seen[v] == "" {
					seen[v] = "#" + strconv.Itoa(len(seen)+1)
				}
				return seen[v]
			}
		case float64:
			if slices.Contains(clocks, key) {
				return "TIME"
			}
		}
		return v
	}
	return walk("", v)
}

// node runs a script of testdata/sdk and returns what it printed.
func node(t *testing.T, at target, file string, args ...string) []byte {
	t.Helper()
	dir := filepath.Join("testdata", "sdk")
	if _, err := exec.LookPath("node"); err != nil {
		missing(t, "node is not installed")
	}
	if _, err := os.Stat(filepath.Join(dir, "node_modules", "openai")); err != nil {
		missing(t, "the client libraries are not installed; run npm ci in cmd/headgate/testdata/sdk")
	}
	ctx, cancel := context.WithTimeout(t.Context(), sdkTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", append([]string{file}, args...)...)
	cmd.Dir, cmd.Env = dir, at.env()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s\n%s", file, err, errs.String(), tail(out.String(), 2000))
	}
	return out.Bytes()
}

// missing ends a test that lacks a tool: a plain word for a person, a failure in CI.
func missing(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(what)
	}
	t.Skip(what)
}

// compare fails for each difference, and checks the steps that only a gateway answers.
func compare(t *testing.T, name string, known []knownDifference, direct, via []string) {
	t.Helper()
	answers := gatewayAnswers()
	var rest []string
	for _, l := range via {
		v := parse(t, l)
		step := fmt.Sprint(dig(v, "step"))
		want, ok := answers[name+"/"+step]
		if !ok {
			if strings.HasPrefix(step, "gateway.") {
				t.Errorf("%s/%s: nobody says what it must give", name, step)
			}
			rest = append(rest, l)
			continue
		}
		if got := gatewayAnswer(v); got != canonical(parse(t, want)) {
			t.Errorf("%s/%s: got %s, want %s", name, step, got, want)
		}
	}
	for _, d := range differences(t, name, known, direct, rest) {
		t.Error(d)
	}
	t.Logf("%s: %d steps", name, len(rest))
}

func gatewayAnswer(v any) string {
	if e := dig(v, "error"); e != nil {
		return canonical(pick(v, "error", "class", "status", "code", "type", "statusCode", "isRetryable"))
	}
	return canonical(dig(v, "result"))
}

func differences(t *testing.T, name string, known []knownDifference, direct, via []string) (out []string) {
	t.Helper()
	if len(direct) == 0 {
		return []string{name + ": the script printed nothing"}
	}
	if len(direct) != len(via) {
		return []string{fmt.Sprintf("%s: %d steps directly, %d through the gateway", name, len(direct), len(via))}
	}
	for i := range direct {
		a, b := parse(t, direct[i]), parse(t, via[i])
		step := fmt.Sprint(dig(a, "step"))
		for _, k := range known {
			if slices.Contains(k.steps, step) {
				a, b = k.keep(a), k.keep(b)
			}
		}
		if x, y := canonical(a), canonical(b); x != y {
			out = append(out, fmt.Sprintf("%s/%s differs\n  directly: %s\n  through:  %s", name, step, around(x, y), around(y, x)))
		}
	}
	return out
}

// around is the part of s where it starts to differ from other.
func around(s, other string) string {
	i := 0
	for i < len(s) && i < len(other) && s[i] == other[i] {
		i++
	}
	from := max(0, i-120)
	return "…" + strings.ToValidUTF8(s[from:min(len(s), i+280)], "") + "…"
}

func dig(v any, path ...string) any {
	for _, p := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[p]
	}
	return v
}

func pick(v any, member string, keys ...string) any {
	out := map[string]any{}
	for _, k := range keys {
		if x := dig(v, member, k); x != nil {
			out[k] = x
		}
	}
	return out
}

func parse(t *testing.T, line string) (v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(line), &v); err != nil {
		t.Fatalf("%v in %s", err, tail(line, 500))
	}
	return v
}

func canonical(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func lines(b []byte) (out []string) {
	for l := range strings.Lines(string(b)) {
		out = append(out, strings.TrimSpace(l))
	}
	return out
}

func tail(s string, n int) string { return s[max(0, len(s)-n):] }

func startFake(t *testing.T) string {
	t.Helper()
	fake, err := fakevllm.New(fakevllm.Config{Seed: 1, Models: []string{"m"}})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(fake.Handler())
	t.Cleanup(srv.Close)
	return srv.URL
}

// buildHeadgate compiles the binary into the test's folder.
func buildHeadgate(t *testing.T) string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "headgate")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", exe, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return exe
}

type backend struct{ name, url, model string }

// policyFor is a policy with one plan and one model a backend. Without limits of its own
// it still meters everything, far above what a script uses.
func policyFor(limits string, backends ...backend) string {
	if limits == "" {
		limits = `{name: tokens, scope: org, unit: tokens, rate: 1000000000/min, burst: 1000000000}, {name: inflight, scope: key, unit: concurrency, max: 64}`
	}
	var b, m strings.Builder
	for _, x := range backends {
		fmt.Fprintf(&b, "  - {name: %s, url: %q, slots: 64}\n", x.name, x.url)
		fmt.Fprintf(&m, "  - {name: %s, backends: [%s], version: \"1\", price_per_million: {input: \"0.20\", cached_input: \"0.02\", output: \"0.60\"}, default_output_tokens: 16}\n", x.model, x.name)
	}
	return "version: 1\nbackends:\n" + b.String() + "models:\n" + m.String() +
		"plans:\n  - name: p\n    tier: 1\n    limits: [" + limits + "]\ntenants: [{name: dev, plan: p}]\n"
}

// startHeadgate runs a node with the policy until the test ends and returns its URL.
func startHeadgate(t *testing.T, exe, policy string) string {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
	listen, admin, cluster := freePorts(t, 1), freePorts(t, 1), freePorts(t, 3)
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, exe, "serve", "--dev", "--policy", file, "--listen", listen, "--admin-listen", admin,
		"--cluster-listen", cluster, "--data-dir", filepath.Join(dir, "data"))
	cmd.Env = append(os.Environ(), "HEADGATE_DEV_KEY="+sdkKey)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() { defer close(exited); _ = cmd.Wait() }() // how it ends is in its log
	t.Cleanup(func() {
		cancel()
		<-exited
		if t.Failed() {
			t.Logf("the node's log ends:\n%s", tail(output.String(), 4000))
		}
	})
	awaitReady(t, "http://"+admin+"/readyz", exited)
	return "http://" + listen
}

// awaitReady asks until the answer is 200.
func awaitReady(t *testing.T, url string, exited <-chan struct{}) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sdkTimeout)
	defer cancel()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if res, err := http.DefaultClient.Do(req); err == nil {
			_ = res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-again.C:
		case <-exited:
			t.Fatal("the node ended before it was ready")
		case <-ctx.Done():
			t.Fatal("the node did not become ready")
		}
	}
}

// freePorts finds n free neighbouring ports on loopback and returns the first's address.
// Below the range that the system hands out, each block has a port before it that is held
// until the test ends: whoever else asks here, in this process or another, takes another block.
func freePorts(t *testing.T, n int) string {
	t.Helper()
	const lowest, block, blocks = 10_000, 4, 5_000
	if n >= block {
		t.Fatalf("%d ports do not fit into a block of %d", n, block)
	}
	for range 100 {
		base := lowest + block*rand.IntN(blocks)
		guard, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base))
		if err != nil {
			continue
		}
		if !free(base+1, n) {
			_ = guard.Close()
			continue
		}
		t.Cleanup(func() { _ = guard.Close() })
		return fmt.Sprintf("127.0.0.1:%d", base+1)
	}
	t.Fatalf("no %d neighbouring free ports", n)
	return ""
}

// free says whether nothing listens at any of n ports.
func free(first, n int) bool {
	for port := first; port < first+n; port++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return false
		}
		_ = l.Close()
	}
	return true
}
