package fakevllm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
)

// start serves cfg until the test ends.
func start(t testing.TB, cfg Config) (*Server, string) {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(s.Handler())
	t.Cleanup(srv.Close)
	t.Cleanup(s.Release)
	return s, srv.URL
}

// send posts a body and returns the response unread. header holds pairs.
func send(t testing.TB, url, body string, header ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// post is send that reads the answer.
func post(t testing.TB, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	resp := send(t, url, body, header...)
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// fill occupies the only slot and the only place to wait of a server.
func fill(t *testing.T, s *Server, url string) (release func()) {
	t.Helper()
	s.Hold()
	done := make(chan struct{}, 2)
	for range 2 {
		go func() {
			resp, err := http.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader([]byte(`{"messages":[{"role":"user","content":"Hi"}]}`)))
			if err == nil {
				_ = resp.Body.Close()
			}
			done <- struct{}{}
		}()
	}
	if err := s.Await(t.Context(), func(st Stats) bool { return st.Running == 1 && st.Waiting == 1 }); err != nil {
		t.Fatal(err)
	}
	return func() {
		s.Release()
		<-done
		<-done
	}
}

const hello = `{"messages":[{"role":"user","content":"hello there"}],"max_tokens":40}`

// with adds members to a JSON object.
func with(body, members string) string { return body[:len(body)-1] + "," + members + "}" }

// frames returns the data of a stream's frames.
func frames(stream string) (out []string) {
	for f := range strings.SplitSeq(stream, "\n\n") {
		for line := range strings.SplitSeq(f, "\n") {
			if d, ok := strings.CutPrefix(line, "data: "); ok {
				out = append(out, d)
			}
		}
	}
	return out
}

func decode[T any](t testing.TB, s string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v in %.300s", err, s)
	}
	return v
}

type usage struct {
	Prompt     int64 `json:"prompt_tokens"`
	Completion int64 `json:"completion_tokens"`
	Total      int64 `json:"total_tokens"`
	Details    struct {
		Cached int64 `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type completion struct {
	Choices []struct {
		Finish  string `json:"finish_reason"`
		Text    string `json:"text"`
		Message struct {
			Content   string `json:"content"`
			ToolCalls []struct {
				Function struct{ Name, Arguments string } `json:"function"`
			} `json:"tool_calls"`
		} `json:"message"`
		Delta struct {
			Content string `json:"content"`
		} `json:"delta"`
	} `json:"choices"`
	Usage *usage `json:"usage"`
}

func TestTextIsAFunctionOfSeedAndPrompt(t *testing.T) {
	_, a := start(t, Config{Seed: 1})
	_, b := start(t, Config{Seed: 1, Slots: 1})
	_, c := start(t, Config{Seed: 2})
	path := "/v1/chat/completions"
	_, first := post(t, a+path, hello)
	if _, again := post(t, b+path, hello); again != first {
		t.Errorf("another server with the same seed answers otherwise")
	}
	if _, other := post(t, c+path, hello); other == first {
		t.Errorf("another seed gives the same answer")
	}
	text := decode[completion](t, first).Choices[0].Message.Content
	if !utf8.ValidString(text) || utf8.RuneCountInString(text) == len(text) {
		t.Errorf("text %q holds no multi-byte character", text)
	}
	_, stream := post(t, a+path, with(hello, `"stream":true,"model":"fake"`))
	var sb strings.Builder
	n := 0
	for _, f := range frames(stream) {
		if f == "[DONE]" {
			continue
		}
		d := decode[completion](t, f)
		if d.Choices[0].Delta.Content != "" {
			n++
		}
		sb.WriteString(d.Choices[0].Delta.Content)
	}
	if sb.String() != text || n != 40 {
		t.Errorf("streamed %d tokens %q, whole %q", n, sb.String(), text)
	}
}

func TestUsageIsAsDocumented(t *testing.T) {
	s, url := start(t, Config{CachedFraction: 0.5, DefaultOutput: 7})
	image := `{"messages":[{"role":"user","content":[{"type":"text","text":"12345"},{"type":"image_url","image_url":{"url":"data:,` + strings.Repeat("A", 5000) + `"}}]}]}`
	for _, tc := range []struct {
		name, path, body    string
		prompt, output, hit int64
		finish              string
	}{
		{"cap", "/v1/chat/completions", hello, 2 + 3 + 3, 40, 4, "length"},
		{"no cap", "/v1/chat/completions", `{"messages":[{"role":"user","content":"hello there"}]}`, 8, 7, 4, "stop"},
		{"the newer cap", "/v1/chat/completions", with(hello, `"max_completion_tokens":3`), 8, 3, 4, "length"},
		{"choices", "/v1/chat/completions", with(hello, `"n":3`), 8, 120, 4, "length"},
		{"image", "/v1/chat/completions", image, 2 + 3 + 2 + 256, 7, 131, "stop"},
		{"one prompt", "/v1/completions", `{"prompt":"12345678","max_tokens":5}`, 2, 5, 1, "length"},
		{"prompts", "/v1/completions", `{"prompt":["1234","12345"],"max_tokens":5,"n":2}`, 3, 20, 1, "length"},
		{"token ids", "/v1/completions", `{"prompt":[[1,2,3],[4]],"max_tokens":5}`, 4, 10, 2, "length"},
	} {
		_, whole := post(t, url+tc.path, tc.body)
		_, stream := post(t, url+tc.path, with(tc.body, `"stream":true,"stream_options":{"include_usage":true}`))
		fs := frames(stream)
		for kind, doc := range map[string]string{"whole": whole, "stream": fs[len(fs)-2]} {
			u := decode[completion](t, doc).Usage
			if u == nil || u.Prompt != tc.prompt || u.Completion != tc.output || u.Total != tc.prompt+tc.output || u.Details.Cached != tc.hit {
				t.Errorf("%s, %s: usage %+v, want %d, %d, cached %d", tc.name, kind, u, tc.prompt, tc.output, tc.hit)
			}
		}
		if f := decode[completion](t, whole).Choices[0].Finish; f != tc.finish {
			t.Errorf("%s: finish %q, want %q", tc.name, f, tc.finish)
		}
		log := s.Log()
		if r := log[len(log)-1]; r.PromptTokens != tc.prompt || r.OutputTokens != tc.output || r.Outcome != OK || !r.Stream || r.Status != 200 {
			t.Errorf("%s: record %+v", tc.name, r)
		}
	}
}

func TestUsageOnStreamsOnlyWhereAsked(t *testing.T) {
	_, url := start(t, Config{})
	count := func(members string) (n int, last int64) {
		_, stream := post(t, url+"/v1/chat/completions", with(hello, `"stream":true`+members))
		for _, f := range frames(stream) {
			if f == "[DONE]" {
				continue
			}
			if u := decode[completion](t, f).Usage; u != nil {
				n, last = n+1, u.Completion
			}
		}
		return n, last
	}
	for members, want := range map[string]int{
		"": 0, `,"stream_options":{"include_usage":false}`: 0, `,"stream_options":{}`: 0, `,"stream_options":{"include_usage":true}`: 1,
		`,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`: 43, `,"vllm_xargs":{"fake_fault":"contusage"}`: 42,
	} {
		if n, last := count(members); n != want || n > 0 && last != 40 {
			t.Errorf("%q: %d chunks with usage, the last %d; want %d, 40", members, n, last, want)
		}
	}
}

func TestSlotsHoldAndTheRestWaits(t *testing.T) {
	s, url := start(t, Config{Slots: 3})
	s.Hold()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() { post(t, url+"/v1/chat/completions", hello) })
	}
	if err := s.Await(t.Context(), func(st Stats) bool { return st.Held == 3 && st.Waiting == 7 }); err != nil {
		t.Fatal(err)
	}
	_, metrics := get(t, url+"/metrics")
	for _, want := range []string{`vllm:num_requests_running{engine="0",model_name="fake"} 3`, `vllm:num_requests_waiting{engine="0",model_name="fake"} 7`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	s.Release()
	wg.Wait()
	if st := s.Stats(); st.PeakRunning != 3 || st.PeakInFlight != 10 || st.InFlight != 0 || st.Running != 0 || st.Waiting != 0 || st.Held != 0 || st.Outcomes[OK] != 11 {
		t.Errorf("afterwards %+v", st)
	}
}

func get(t testing.TB, url string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

func TestFiftyAreAdmittedBeforeOneFinishes(t *testing.T) {
	s, url := start(t, Config{})
	s.HoldAfter(2)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { post(t, url+"/v1/chat/completions", with(hello, `"stream":true`)) })
	}
	if err := s.Await(t.Context(), func(st Stats) bool { return st.Held == 50 }); err != nil {
		t.Fatal(err)
	}
	for _, r := range s.Log() {
		if r.Outcome != Open || r.OutputTokens != 2 {
			t.Fatalf("held record %+v", r)
		}
	}
	s.Release()
	wg.Wait()
	if st := s.Stats(); st.Outcomes[OK] != 50 || st.OutputTokens != 50*40 {
		t.Errorf("afterwards %+v", st)
	}
}

func TestClientsThatLeaveAreNoticed(t *testing.T) {
	for name, tc := range map[string]struct {
		members string
		fault   string
		tokens  int64
	}{
		"in a stream":      {`"stream":true`, "stall=5", 5},
		"without a stream": {`"n":1`, "stall=12", 12},
		"before the first": {`"stream":true`, "stall=0", 0},
	} {
		s, url := start(t, Config{})
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(with(hello, tc.members)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Fake-Fault", tc.fault)
		done := make(chan struct{})
		go func() {
			defer close(done)
			if resp, err := http.DefaultClient.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		}()
		if err := s.Await(t.Context(), func(st Stats) bool { return st.Running == 1 }); err != nil {
			t.Fatal(err)
		}
		cancel()
		<-done
		if err := s.Await(t.Context(), func(st Stats) bool { return st.Outcomes[Aborted] == 1 }); err != nil {
			t.Fatal(err)
		}
		if r := s.Log()[0]; r.Outcome != Aborted || r.OutputTokens > tc.tokens {
			t.Errorf("%s: record %+v, want aborted with %d tokens", name, r, tc.tokens)
		}
		if st := s.Stats(); st.Running != 0 || st.InFlight != 0 {
			t.Errorf("%s: %+v still there", name, st)
		}
	}
}

// A client that reads five tokens and leaves is recorded with five.
func TestAbortedStreamsCountWhatWasGenerated(t *testing.T) {
	s, url := start(t, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(with(hello, `"stream":true,"vllm_xargs":{"fake_fault":"stall=5"}`)))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // cut off on purpose
	br := bufio.NewReader(resp.Body)
	for range 12 { // the role and five tokens, each with an empty line
		if _, err := br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := s.Await(t.Context(), func(st Stats) bool { return st.Outcomes[Aborted] == 1 }); err != nil {
		t.Fatal(err)
	}
	if r := s.Log()[0]; r.OutputTokens != 5 {
		t.Errorf("record %+v, want 5 tokens", r)
	}
}

func TestManagementRoutesAreRecorded(t *testing.T) {
	s, url := start(t, Config{})
	for _, p := range managementRoutes() {
		post(t, url+p, `{}`)
	}
	get(t, url+"/v1/models")
	if st := s.Stats(); st.Management != int64(len(managementRoutes())) {
		t.Errorf("%d management requests recorded, want %d", st.Management, len(managementRoutes()))
	}
	for _, r := range s.Log() {
		if r.Management == (r.Path == "/v1/models") {
			t.Errorf("%s: management %v", r.Path, r.Management)
		}
	}
}

func TestRefusals(t *testing.T) {
	s, url := start(t, Config{Models: []string{"m"}, ContextLen: 100, MaxBody: 1 << 16, APIKey: "k"})
	type refusal struct {
		path, body string
		status     int
		kind       string
	}
	msg := `"messages":[{"role":"user","content":"hi"}]`
	for _, tc := range []refusal{
		{"/v1/chat/completions", `{"model":`, 400, "BadRequestError"},
		{"/v1/chat/completions", `[]`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{"model":"x",` + msg + `}`, 404, "NotFoundError"},
		{"/v1/chat/completions", `{}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{"messages":[]}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"max_tokens":0}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"max_tokens":-5}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"max_tokens":"7"}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"max_tokens":1.5}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"max_tokens":98}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"max_tokens":9223372036854775807}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"n":0}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"n":1000}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"stream_options":{}}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"tool_choice":"required"}`, 400, "BadRequestError"},
		{"/v1/chat/completions", `{` + msg + `,"pad":"` + strings.Repeat("x", 1<<16) + `"}`, 413, "Request Entity Too Large"},
		{"/v1/completions", `{"prompt":7}`, 400, "BadRequestError"},
		{"/v1/completions", `{"prompt":[true]}`, 400, "BadRequestError"},
		{"/v1/embeddings", `{"input":"x","dimensions":0}`, 400, "BadRequestError"},
		{"/v1/embeddings", `{"input":"x","encoding_format":"hex"}`, 400, "BadRequestError"},
		{"/v1/embeddings", `{"input":"` + strings.Repeat("x", 500) + `"}`, 400, "BadRequestError"},
		{"/v1/responses", `{"input":[]}`, 400, "BadRequestError"},
		{"/v1/responses", `{"input":"x","previous_response_id":"resp_no"}`, 404, "NotFoundError"},
		{"/v1/messages", `{` + msg + `}`, 400, "invalid_request_error"},
		{"/v1/messages", `{"model":"x","max_tokens":1,` + msg + `}`, 404, "not_found_error"},
		{"/v1/audio/transcriptions", `{}`, 400, "BadRequestError"},
		{"/score", `{"text_1":["a","b"],"text_2":["c"]}`, 400, "BadRequestError"},
		{"/rerank", `{"query":"a"}`, 400, "BadRequestError"},
		{"/v1/responses/none/cancel", ``, 404, "NotFoundError"},
		{"/v1/models", ``, 405, "Method Not Allowed"},
		{"/v1/nope", ``, 404, "NotFoundError"},
		{"/v1/chat/completions", `{` + msg + `,"vllm_xargs":{"fake_fault":"fire"}}`, 400, "BadRequestError"},
	} {
		resp, body := post(t, url+tc.path, tc.body, "Authorization", "Bearer k")
		e := decode[struct{ Error struct{ Type string } }](t, body)
		if resp.StatusCode != tc.status || e.Error.Type != tc.kind {
			t.Errorf("%s %.60s: %d %s, want %d %s", tc.path, tc.body, resp.StatusCode, body, tc.status, tc.kind)
		}
	}
	if resp, _ := get(t, url+"/v1/models"); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a key: %d", resp.StatusCode)
	}
	if st := s.Stats(); st.Outcomes[Refused] != st.Requests || st.OutputTokens != 0 || st.PromptTokens != 0 || st.InFlight != 0 {
		t.Errorf("refusals left %+v", st)
	}
}

func TestToolCallsFitTheirSchema(t *testing.T) {
	_, url := start(t, Config{})
	weather := `{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"},"unit":{"enum":["C","F"]},"days":{"type":"integer"}},"required":["city","unit"]}}`
	chat := func(members string) completion {
		_, body := post(t, url+"/v1/chat/completions", `{"messages":[{"role":"user","content":"weather?"}],"tools":[{"type":"function","function":`+weather+`}]`+members+`}`)
		return decode[completion](t, body)
	}
	for _, members := range []string{``, `,"tool_choice":"auto"`, `,"tool_choice":"required"`, `,"tool_choice":{"type":"function","function":{"name":"get_weather"}}`} {
		c := chat(members).Choices[0]
		if c.Finish != "tool_calls" || len(c.Message.ToolCalls) != 1 {
			t.Fatalf("%s: %+v", members, c)
		}
		f := c.Message.ToolCalls[0].Function
		args := decode[map[string]string](t, f.Arguments)
		if f.Name != "get_weather" || args["city"] == "" || args["unit"] != "C" && args["unit"] != "F" || len(args) != 2 {
			t.Errorf("%s: call %+v", members, f)
		}
	}
	if c := chat(`,"tool_choice":"none"`).Choices[0]; c.Finish != "stop" || c.Message.Content == "" {
		t.Errorf("none: %+v", c)
	}
	if c := chat(`,"max_tokens":2`).Choices[0]; c.Finish != "length" {
		t.Errorf("cut off: %+v", c)
	}
	body := `{"max_tokens":50,"messages":[{"role":"user","content":"weather?"}],"tools":[{"name":"w","input_schema":{"type":"object","properties":{"a":{"type":"array","items":{"type":"boolean"}}}}}]}`
	_, whole := post(t, url+"/v1/messages", body)
	m := decode[struct {
		Content []struct {
			Type  string
			Input map[string][]bool
		}
		Stop string `json:"stop_reason"`
	}](t, whole)
	if m.Stop != "tool_use" || len(m.Content) != 2 || m.Content[0].Type != "text" || m.Content[1].Type != "tool_use" || len(m.Content[1].Input["a"]) != 1 {
		t.Errorf("messages: %s", whole)
	}
	_, stream := post(t, url+"/v1/messages", with(body, `"stream":true`))
	if !strings.Contains(stream, `"stop_reason":"tool_use"`) || !strings.Contains(stream, "input_json_delta") {
		t.Errorf("messages stream: %s", stream)
	}
	_, result := post(t, url+"/v1/messages", `{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":"sunny"}]}],"tools":[{"name":"w"}]}`)
	if !strings.Contains(result, `"stop_reason":"max_tokens"`) {
		t.Errorf("after a result: %s", result)
	}
}

func TestResponsesAreKept(t *testing.T) {
	s, url := start(t, Config{})
	type response struct {
		ID, Status string
		Usage      *struct {
			Input  int64 `json:"input_tokens"`
			Output int64 `json:"output_tokens"`
		}
	}
	_, one := post(t, url+"/v1/responses", `{"input":"hello there"}`)
	a := decode[response](t, one)
	if _, two := post(t, url+"/v1/responses", `{"input":"hello there"}`); decode[response](t, two).ID == a.ID {
		t.Error("two responses share an id")
	}
	if _, again := get(t, url+"/v1/responses/"+a.ID); again != one {
		t.Errorf("read again: %s\nfirst: %s", again, one)
	}
	_, next := post(t, url+"/v1/responses", `{"input":"hello there","previous_response_id":"`+a.ID+`"}`)
	if u := decode[response](t, next).Usage; u.Input != a.Usage.Input*2+a.Usage.Output {
		t.Errorf("built on another: usage %+v after %+v", u, a.Usage)
	}
	if resp, _ := post(t, url+"/v1/responses/"+a.ID+"/cancel", ``); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("cancel of a finished one: %d", resp.StatusCode)
	}
	_, bg := post(t, url+"/v1/responses", `{"input":"later","background":true,"stream":true}`)
	b := decode[response](t, bg)
	for _, want := range []string{"in_progress", "completed", "completed"} {
		_, seen := get(t, url+"/v1/responses/"+b.ID)
		if got := decode[response](t, seen).Status; got != want || b.Status != "queued" {
			t.Errorf("background: %s then %s, want queued then %s", b.Status, got, want)
		}
	}
	_, bg = post(t, url+"/v1/responses", `{"input":"never","background":true}`)
	if _, gone := post(t, url+"/v1/responses/"+decode[response](t, bg).ID+"/cancel", ``); decode[response](t, gone).Status != "cancelled" {
		t.Errorf("cancelled: %s", gone)
	}
	_, hidden := post(t, url+"/v1/responses", `{"input":"x","store":false}`)
	if resp, _ := get(t, url+"/v1/responses/"+decode[response](t, hidden).ID); resp.StatusCode != http.StatusNotFound {
		t.Errorf("a response that was not to be stored: %d", resp.StatusCode)
	}
	s.Reset()
	if resp, _ := get(t, url+"/v1/responses/"+a.ID); resp.StatusCode != http.StatusNotFound {
		t.Errorf("after a reset: %d", resp.StatusCode)
	}
}

func TestPoolingRoutes(t *testing.T) {
	s, url := start(t, Config{})
	_, floats := post(t, url+"/v1/embeddings", `{"input":["12345678","x"],"dimensions":4}`)
	_, b64 := post(t, url+"/v1/embeddings", `{"input":["12345678","x"],"dimensions":4,"encoding_format":"base64"}`)
	f := decode[struct {
		Data  []struct{ Embedding []float32 }
		Usage usage
	}](t, floats)
	b := decode[struct{ Data []struct{ Embedding []byte } }](t, b64)
	for i, d := range f.Data {
		for j, v := range d.Embedding {
			if got := math.Float32frombits(binary.LittleEndian.Uint32(b.Data[i].Embedding[4*j:])); got != v {
				t.Errorf("vector %d: base64 %v, floats %v", i, got, v)
			}
		}
	}
	if f.Usage.Prompt != 3 || len(f.Data) != 2 || len(f.Data[0].Embedding) != 4 {
		t.Errorf("embeddings %s", floats)
	}
	for path, body := range map[string]string{
		"/pooling": `{"input":"12345678"}`, "/classify": `{"input":"12345678"}`,
		"/score": `{"text_1":"1234","text_2":"5678"}`, "/v1/score": `{"text_1":"1234","text_2":["5678"]}`,
		"/rerank": `{"query":"1234","documents":["5678"]}`, "/v1/rerank": `{"query":"1234","documents":["5678"],"top_n":1}`,
	} {
		resp, got := post(t, url+path, body)
		if u := decode[struct{ Usage usage }](t, got).Usage; resp.StatusCode != 200 || u.Total != 2 {
			t.Errorf("%s: %d %s", path, resp.StatusCode, got)
		}
	}
	if st := s.Stats(); st.PromptTokens != 2*3+6*2 || st.OutputTokens != 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestTranscriptions(t *testing.T) {
	s, url := start(t, Config{})
	form := func(fields ...string) (string, string) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		fw, err := w.CreateFormFile("file", "a.wav")
		if err == nil {
			_, err = fw.Write(make([]byte, 3*bytesPerSecond-1))
		}
		for i := 0; i+1 < len(fields) && err == nil; i += 2 {
			err = w.WriteField(fields[i], fields[i+1])
		}
		if err == nil {
			err = w.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		return b.String(), w.FormDataContentType()
	}
	body, ct := form()
	_, whole := post(t, url+"/v1/audio/transcriptions", body, "Content-Type", ct)
	got := decode[struct {
		Text  string
		Usage struct {
			Type    string
			Seconds int64
		}
	}](t, whole)
	if got.Text == "" || got.Usage.Type != "duration" || got.Usage.Seconds != 3 {
		t.Errorf("json: %s", whole)
	}
	body, ct = form("response_format", "text")
	if resp, plain := post(t, url+"/v1/audio/translations", body, "Content-Type", ct); plain != got.Text || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain") {
		t.Errorf("text: %q", plain)
	}
	body, ct = form("stream", "true", "stream_include_usage", "true")
	_, stream := post(t, url+"/v1/audio/transcriptions", body, "Content-Type", ct)
	fs := frames(stream)
	if u := decode[completion](t, fs[len(fs)-2]).Usage; len(fs) != 6+3 || u.Completion != 6 {
		t.Errorf("stream: %s", stream)
	}
	if r := s.Log()[2]; r.OutputTokens != 6 || r.Outcome != OK {
		t.Errorf("record %+v", r)
	}
}

func TestTokenizeAndBack(t *testing.T) {
	_, url := start(t, Config{})
	for _, text := range []string{"", "a", "1234", "größe 🚀 日本", "x\ny\"\\"} {
		raw, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		_, body := post(t, url+"/tokenize", `{"prompt":`+string(raw)+`}`)
		tok := decode[struct {
			Count  int64
			Tokens json.RawMessage
		}](t, body)
		_, back := post(t, url+"/detokenize", `{"tokens":`+string(tok.Tokens)+`}`)
		if got := decode[struct{ Prompt string }](t, back).Prompt; got != text || tok.Count != tokensOf(len(text)) {
			t.Errorf("%q came back as %q from %d tokens", text, got, tok.Count)
		}
	}
	_, count := post(t, url+"/v1/messages/count_tokens", `{"system":"1234","messages":[{"role":"user","content":"1234"}]}`)
	if count != `{"input_tokens":7}` {
		t.Errorf("count %s", count)
	}
	_, chat := post(t, url+"/tokenize", `{"messages":[{"role":"user","content":"1234"}],"return_token_strs":true}`)
	if !strings.Contains(chat, `"count":6`) || !strings.Contains(chat, `"1234"`) {
		t.Errorf("chat %s", chat)
	}
}

func TestLogIsBoundedAndReset(t *testing.T) {
	s, url := start(t, Config{LogSize: 3, RecordBody: 5})
	for i := range 5 {
		post(t, fmt.Sprintf("%s/v1/chat/completions?%d", url, i), hello, "Authorization", "Bearer secret", "X-Other", "no")
	}
	log := s.Log()
	if len(log) != 3 || log[0].Path != "/v1/chat/completions?2" || log[2].Seq != 5 || s.Stats().Dropped != 2 {
		t.Fatalf("log %+v", log)
	}
	if r := log[0]; string(r.Body) != hello[:5] || r.BodyBytes != int64(len(hello)) || r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get("X-Other") != "" {
		t.Errorf("record %+v", r)
	}
	s.Reset()
	if st := s.Stats(); len(s.Log()) != 0 || st.Requests != 0 || st.PeakInFlight != 0 {
		t.Errorf("after a reset: %+v", st)
	}
}

// In virtual time an answer takes TTFT and then InterToken for each further token,
// streaming or not.
func TestAnswersTakeTheirTime(t *testing.T) {
	for _, members := range []string{`"n":2`, `"stream":true`} {
		synctest.Test(t, func(t *testing.T) {
			s, err := New(Config{TTFT: 300 * time.Millisecond, InterToken: 20 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			from := time.Now()
			w := httptest.NewRecorder()
			s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(with(hello, members))))
			if got, want := time.Since(from), 300*time.Millisecond+39*20*time.Millisecond; got != want || w.Code != 200 {
				t.Errorf("%s: %v, status %d, want %v", members, got, w.Code, want)
			}
		})
	}
}

func TestConfigRefusesWhatMakesNoSense(t *testing.T) {
	for _, c := range []Config{
		{Slots: -1},
		{CachedFraction: 1.5},
		{TTFT: -1},
		{Models: []string{""}},
		{Faults: map[Fault]float64{"fire": 1}},
		{Faults: map[Fault]float64{Cut: 2}},
		{MaxBody: -1},
		{DefaultOutput: maxOutput + 1},
		{Dimensions: maxDims + 1},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("accepted %+v", c)
		}
	}
	if m, err := ParseFaults("stall=0.25, 503=1,"); err != nil || m[Stall] != 0.25 || m["503"] != 1 || len(m) != 2 {
		t.Errorf("faults %v, %v", m, err)
	}
	for _, s := range []string{"stall", "fire=1", "cut=x", "cut=-1", "cut=NaN", "200=1"} {
		if _, err := ParseFaults(s); err == nil {
			t.Errorf("accepted faults %q", s)
		}
	}
}

func FuzzAnyBody(f *testing.F) {
	paths := []string{"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/score", "/rerank", "/classify", "/tokenize", "/detokenize", "/v1/audio/transcriptions"}
	f.Add(uint8(0), []byte(hello))
	f.Add(uint8(0), []byte(`{"messages":[{"role":"user","content":[{"type":"tool_result","content":["a"]}]}],"tools":[{"function":{"name":"a","parameters":{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}}}]}`))
	f.Add(uint8(1), []byte(`{"prompt":[[1],"a"],"stream":true,"logprobs":3}`))
	f.Add(uint8(3), []byte(`{"input":[{"type":"function_call_output","output":"x"}],"stream":true}`))
	f.Add(uint8(8), []byte(`{"messages":[{"content":"a"},{"content":null}]}`))
	s, err := New(Config{MaxBody: 1 << 16})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		if bytes.Contains(body, []byte("fake_fault")) {
			return
		}
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, paths[int(which)%len(paths)], bytes.NewReader(body)))
		if w.Code != 200 && w.Code != 400 && w.Code != 404 && w.Code != 413 {
			t.Errorf("status %d: %s", w.Code, w.Body)
		}
		if strings.HasPrefix(w.Header().Get("Content-Type"), "application/json") && !json.Valid(w.Body.Bytes()) {
			t.Errorf("not JSON: %s", w.Body)
		}
		if st := s.Stats(); st.InFlight != 0 || st.Running != 0 {
			t.Errorf("left in flight: %+v", st)
		}
	})
}

func BenchmarkStream(b *testing.B) {
	s, err := New(Config{LogSize: 16})
	if err != nil {
		b.Fatal(err)
	}
	body := with(hello, `"stream":true,"max_completion_tokens":300`)
	b.ReportAllocs()
	for b.Loop() {
		w := &discard{h: http.Header{}}
		s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)))
		if w.n == 0 {
			b.Fatal("nothing was written")
		}
	}
}

type discard struct {
	h http.Header
	n int
}

func (d *discard) Header() http.Header         { return d.h }
func (d *discard) WriteHeader(int)             {}
func (d *discard) Write(b []byte) (int, error) { d.n += len(b); return len(b), nil }
func (d *discard) Flush()                      {}
