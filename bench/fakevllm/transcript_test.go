package fakevllm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const recordedModel = "meta-llama/Llama-3.1-8B-Instruct"

// transcripts maps each recording to the route it was posted to, or read from.
func transcripts() map[string]string {
	return map[string]string{
		"chat": "/v1/chat/completions", "chat_stream": "/v1/chat/completions", "chat_stream_usage": "/v1/chat/completions",
		"chat_stream_contusage": "/v1/chat/completions", "chat_tools": "/v1/chat/completions", "chat_tools_stream": "/v1/chat/completions",
		"chat_n2_logprobs": "/v1/chat/completions", "completions": "/v1/completions", "completions_stream": "/v1/completions",
		"embeddings": "/v1/embeddings", "embeddings_b64": "/v1/embeddings", "tokenize_prompt": "/tokenize", "tokenize_chat": "/tokenize",
		"responses": "/v1/responses", "responses_stream": "/v1/responses", "messages": "/v1/messages", "messages_stream": "/v1/messages",
		"err_unknown_model": "/v1/chat/completions", "err_bad_json": "/v1/chat/completions", "err_context_len": "/v1/chat/completions",
		"err_404": "/v1/nope", "models": "/v1/models", "health": "/health", "ready": "/health/ready", "version": "/version", "metrics": "/metrics",
		"inject_ratelimit": "/v1/chat/completions", "inject_server_error": "/v1/chat/completions", "queuefull": "/v1/chat/completions",
	}
}

// allowed are the differences from the recordings that are meant: a pattern over
// "RECORDING: difference" and why. The simulator stands between us and vLLM; where
// the two part, we follow vLLM.
func allowed() map[string]string {
	return map[string]string{
		`^err_404: content type|^err_404: .*extra`: "vLLM answers an unknown route in its error shape, the simulator with plain text",
		`^version: `:                    "the simulator lacks the route",
		`^(health|ready): content type`: "vLLM's empty answer has no type",
		`^metrics: .*(_seconds|_num_generation_tokens|request_\w+_tokens) missing`:                        "histograms are left out: nobody reads them here",
		`^metrics: .*lora_requests_info missing`:                                                          "no LoRA",
		`^metrics: .*(num_preemptions|prefix_cache_\w+)_total extra`:                                      "vLLM has them",
		`^err_context_len: .error.param is string instead of null`:                                        "vLLM names the parameter",
		`^(chat|completions)\w*: \.(service_tier|system_fingerprint|prompt_\w+|kv_transfer_params) extra`: "vLLM's members that hold null",
		`^(chat|completions)\w*: \w*\.choices\[\]\.(logprobs|stop_reason|token_ids) extra`:                "vLLM's members that hold null",
		`^chat\w*: \.choices\[\]\.message\.(refusal|tool_calls|content) extra`:                            "vLLM's members that hold null or nothing",
		`^(chat|completions)_\w*: (role|token|finish|call)\.usage missing`:                                "vLLM leaves usage out of chunks that have none; the simulator sends null",
		`^chat_stream_contusage: (role|token|finish)\.usage(\.\S+ extra| is object instead of null)`:      "the simulator ignores continuous_usage_stats",
		`^chat_\w*: (role|finish)\.choices\[\]\.delta\.content extra`:                                     "vLLM's first and last delta hold empty content",
		`^chat_tools: \.choices\[\]\.message\.tool_calls\[\]\.index missing`:                              "vLLM numbers tool calls only on streams",
		`^chat_tools_stream: token\.choices\[\]\.delta\.tool_calls\[\]\.(id|type|function\.name) missing`: "vLLM names the call once",
		`^chat_tools_stream: finish\.choices\[\]\.delta\.tool_calls\S* missing`:                           "the simulator ends with a piece of the call",
		`^embeddings\w*: \.(created|id|usage\.completion_tokens) extra`:                                   "vLLM's embeddings have them",
		`^messages_stream: content_block_start\.content_block\.text extra`:                                "Anthropic's SDK needs the empty text",
		`^messages_stream: message_delta\.usage\.\w+ extra`:                                               "vLLM repeats the input's counts",
		`^responses\w*: \S* ?\S*extra$`:                                                                   "members of OpenAI's response object that the simulator lacks",
		`^responses_stream: response\.(created|in_progress)\.response\.\S+ (extra|missing)`:               "an unfinished response has all members",
	}
}

func readRecording(t *testing.T, name string) (*http.Response, []byte) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", "vllm-sim", name+".response.raw"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(raw)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // it reads from memory
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, body
}

// replay sends the recorded request to a server of ours that is told to end its
// answer where the recording ended.
func replay(t *testing.T, name, path string, recorded []byte) (*http.Response, []byte) {
	t.Helper()
	s, err := New(Config{Models: []string{recordedModel}, ContextLen: 8192, Slots: 1, MaxWaiting: 1})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(s.Handler())
	defer srv.Close()
	body, err := os.ReadFile(filepath.Join("testdata", "vllm-sim", name+".request.json"))
	method := http.MethodPost
	fault := ""
	switch {
	case name == "inject_ratelimit":
		fault = "429"
	case name == "inject_server_error":
		fault = "503"
	case name == "queuefull":
		defer fill(t, s, srv.URL)()
	case err != nil:
		method = http.MethodGet
	}
	if method == http.MethodPost && err != nil {
		body = fmt.Appendf(nil, `{"model":%q,"messages":[{"role":"user","content":"Hi"}]}`, recordedModel)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, srv.URL+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if fault != "" {
		req.Header.Set("X-Fake-Fault", fault)
	}
	if m := regexp.MustCompile(`"(?:completion|output)_tokens":([1-9]\d*)`).FindSubmatch(recorded); m != nil && !strings.Contains(name, "tools") {
		req.Header.Set("X-Fake-Output", string(m[1]))
	} else if name == "chat_stream" {
		req.Header.Set("X-Fake-Output", "2")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end below
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, got
}

func TestAnswersHaveTheShapeOfTheRecordings(t *testing.T) {
	files, err := filepath.Glob("testdata/vllm-sim/*.response.raw")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != len(transcripts()) {
		t.Errorf("%d recordings, %d routes for them", len(files), len(transcripts()))
	}
	used := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(transcripts())) {
		want, wantBody := readRecording(t, name)
		got, gotBody := replay(t, name, transcripts()[name], wantBody)
		for _, d := range compare(want, wantBody, got, gotBody) {
			if !excused(name+": "+d, used) {
				t.Errorf("%s: %s", name, d)
			}
		}
	}
	for pattern := range allowed() {
		if !used[pattern] {
			t.Errorf("no difference needs the allowance %q any more", pattern)
		}
	}
}

func excused(difference string, used map[string]bool) bool {
	for pattern := range allowed() {
		if regexp.MustCompile(pattern).MatchString(difference) {
			used[pattern] = true
			return true
		}
	}
	return false
}

// compare lists how an answer of ours differs from a recorded one.
func compare(want *http.Response, wantBody []byte, got *http.Response, gotBody []byte) (out []string) {
	if want.StatusCode != got.StatusCode {
		out = append(out, fmt.Sprintf("status %d instead of %d", got.StatusCode, want.StatusCode))
	}
	media := func(r *http.Response) string {
		m, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
		if err != nil {
			return ""
		}
		return m
	}
	if w, g := media(want), media(got); w != g {
		out = append(out, fmt.Sprintf("content type %q instead of %q", g, w))
	}
	wantOrder, wantKinds := kinds(media(want), wantBody)
	gotOrder, gotKinds := kinds(media(got), gotBody)
	if w, g := strings.Join(wantOrder, " "), strings.Join(gotOrder, " "); w != g {
		out = append(out, fmt.Sprintf("sequence %q instead of %q", g, w))
	}
	for _, kind := range slices.Sorted(maps.Keys(wantKinds)) {
		w, g := wantKinds[kind], gotKinds[kind]
		for _, path := range slices.Sorted(maps.Keys(w)) {
			switch {
			case g[path] == "":
				out = append(out, fmt.Sprintf("%s%s missing", kind, path))
			case g[path] != w[path]:
				out = append(out, fmt.Sprintf("%s%s is %s instead of %s", kind, path, g[path], w[path]))
			}
		}
		for _, path := range slices.Sorted(maps.Keys(g)) {
			if w[path] == "" {
				out = append(out, fmt.Sprintf("%s%s extra", kind, path))
			}
		}
	}
	return out
}

// kinds sorts the documents in a body by what they are, and gives their order with
// repetitions folded, and the shape of each kind: JSON path to types.
func kinds(media string, body []byte) (order []string, shapes map[string]map[string]string) {
	shapes = map[string]map[string]string{}
	add := func(kind string, doc []byte) {
		if len(order) == 0 || order[len(order)-1] != kind {
			order = append(order, kind)
		}
		if shapes[kind] == nil {
			shapes[kind] = map[string]string{}
		}
		var v any
		if json.Unmarshal(doc, &v) == nil {
			walk(shapes[kind], "", v)
		}
	}
	switch media {
	case "text/event-stream":
		for frame := range strings.SplitSeq(strings.TrimSpace(string(body)), "\n\n") {
			event, data := "", ""
			for line := range strings.SplitSeq(strings.TrimSpace(frame), "\n") {
				if v, ok := strings.CutPrefix(line, "event: "); ok {
					event = v
				}
				if v, ok := strings.CutPrefix(line, "data: "); ok {
					data = v
				}
			}
			add(kindOf(event, data), []byte(data))
		}
	case "text/plain":
		for line := range strings.Lines(string(body)) {
			if v, ok := strings.CutPrefix(line, "# TYPE "); ok {
				name, kind, _ := strings.Cut(strings.TrimSpace(v), " ")
				add("metrics", nil)
				shapes["metrics"][" "+name] = kind
			}
		}
	default:
		add("", body)
	}
	return order, shapes
}

func kindOf(event, data string) string {
	switch {
	case event != "":
		return event
	case data == "[DONE]":
		return data
	case strings.Contains(data, `"choices":[]`):
		return "usage"
	case strings.Contains(data, `"finish_reason":"`):
		return "finish"
	case strings.Contains(data, `"role"`):
		return "role"
	case strings.Contains(data, `"name":"`):
		return "call"
	}
	return "token"
}

func walk(shape map[string]string, path string, v any) {
	note := func(kind string) {
		if !strings.Contains(shape[path], kind) {
			all := append(strings.Fields(strings.ReplaceAll(shape[path], "|", " ")), kind)
			slices.Sort(all)
			shape[path] = strings.Join(all, "|")
		}
	}
	switch v := v.(type) {
	case nil:
		note("null")
	case bool:
		note("bool")
	case float64:
		note("number")
	case string:
		note("string")
	case []any:
		note("array")
		for _, e := range v {
			walk(shape, path+"[]", e)
		}
	case map[string]any:
		note("object")
		for k, e := range v {
			walk(shape, path+"."+k, e)
		}
	}
}
