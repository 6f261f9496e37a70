package main_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"headgate/bench/fakevllm"
	"headgate/proxy/openai"
)

// replayer answers requests for streams in one of three ways: as a model server streams (fresh),
// by a replay of what was assembled of that stream (assembled), and by a replay of what the server
// answers without streaming (converted).
type replayer struct {
	t       *testing.T
	fake    http.Handler
	way     string
	replays int
}

func (p *replayer) ask(path string, body map[string]any) []byte {
	b, err := json.Marshal(body)
	if err != nil {
		p.t.Error(err)
	}
	if sse, ok := recorded()[fmt.Sprint(body["model"])]; ok {
		return []byte(sse)
	}
	w := httptest.NewRecorder()
	p.fake.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, bytes.NewReader(b)))
	if w.Code != http.StatusOK {
		p.t.Errorf("%s: %d %s", b, w.Code, w.Body)
	}
	return w.Body.Bytes()
}

func (p *replayer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body map[string]any
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		p.t.Error(err)
	}
	kind := map[string]openai.Kind{
		"/v1/chat/completions": openai.Chat, "/v1/completions": openai.Completion, "/v1/messages": openai.Message, "/v1/responses": openai.Response,
	}[r.URL.Path]
	var o openai.ReplayOptions
	if asked, ok := body["stream_options"].(map[string]any); ok {
		o.IncludeUsage = asked["include_usage"] == true
	}
	w.Header().Set("Content-Type", "text/event-stream")
	if p.way == "fresh" {
		_, _ = w.Write(p.ask(r.URL.Path, body))
		return
	}
	_, isRecorded := recorded()[fmt.Sprint(body["model"])]
	var answer []byte
	if p.way == "converted" && !isRecorded {
		delete(body, "stream")
		delete(body, "stream_options")
		answer = p.ask(r.URL.Path, body)
	} else {
		if kind == openai.Chat || kind == openai.Completion {
			body["stream_options"] = map[string]any{"include_usage": true}
		}
		s, a := openai.NewStream(kind, !o.IncludeUsage), openai.NewAssembler(kind, 1<<20)
		s.Assemble(a)
		emit := func(openai.Frame) error { return nil }
		if err := s.Feed(p.ask(r.URL.Path, body), emit); err != nil {
			p.t.Error(err)
		}
		if answer, isRecorded = a.JSON(); !isRecorded {
			p.t.Errorf("%v is not assembled: %v", body, a.Err())
		}
	}
	sse, err := openai.Replay(kind, answer, o)
	if err != nil {
		p.t.Errorf("%v is not replayed: %v\n%s", body, err, answer)
	}
	p.replays++
	_, _ = io.Copy(w, bytes.NewReader(sse))
}

// TestSDKReplay: client libraries see no difference between a fresh stream and a replayed one.
func TestSDKReplay(t *testing.T) {
	run := func(way string) ([]string, int) {
		fake, err := fakevllm.New(fakevllm.Config{Seed: 1, Models: []string{"m"}})
		if err != nil {
			t.Fatal(err)
		}
		p := &replayer{t: t, fake: fake.Handler(), way: way}
		srv := httptest.NewServer(p)
		defer srv.Close()
		return lines(node(t, target{url: srv.URL, model: "m"}, "replay.mjs")), p.replays
	}
	fresh, _ := run("fresh")
	for _, l := range fresh {
		if strings.Contains(l, `"error":{`) {
			t.Errorf("a fresh stream cannot be read: %s", l)
		}
	}
	for _, way := range []string{"assembled", "converted"} {
		t.Run(way, func(t *testing.T) {
			got, replays := run(way)
			if replays < len(fresh) {
				t.Errorf("%d replays in %d steps", replays, len(fresh))
			}
			compare(t, way, nil, fresh, got)
		})
	}
}

// frames writes chunks as OpenAI does, each data of which is given less what all have.
func frames(head string, chunks ...string) string {
	var b strings.Builder
	for _, c := range chunks {
		fmt.Fprintf(&b, "data: {%s%s}\n\n", head, c)
	}
	return b.String() + "data: [DONE]\n\n"
}

// named writes events as Anthropic does.
func named(events ...string) string {
	var b strings.Builder
	for _, e := range events {
		name, _, _ := strings.Cut(strings.TrimPrefix(e, `{"type":"`), `"`)
		fmt.Fprintf(&b, "event: %s\ndata: %s\n\n", name, e)
	}
	return b.String()
}

// recorded are streams in the form in which OpenAI, vLLM and Anthropic document and send them, by
// the name of the model that is asked for.
func recorded() map[string]string {
	const head = `"id":"chatcmpl-Bq1","object":"chat.completion.chunk","created":1741569952,"model":"gpt-5","service_tier":"default","system_fingerprint":"fp_44709d6fcb",`
	const vllm = `"id":"chatcmpl-9f","object":"chat.completion.chunk","created":1741569952,"model":"qwen",`
	const usage = `"choices":[],"usage":{"prompt_tokens":19,"completion_tokens":10,"total_tokens":29,"prompt_tokens_details":{"cached_tokens":0,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":0,"audio_tokens":0,"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}`
	chunk := func(delta, finish string) string {
		return `"choices":[{"index":0,"delta":` + delta + `,"logprobs":null,"finish_reason":` + finish + `}],"usage":null`
	}
	thought := func(delta, finish string) string {
		return `"choices":[{"index":0,"delta":` + delta + `,"logprobs":null,"finish_reason":` + finish + `}]`
	}
	response := func(status, rest string) string {
		return `"response":{"id":"resp_67c9fdcecf488190bdd9a0409de3a1ec07b8b0ad4e5eb654","object":"response","created_at":1741290958,"status":"` + status + `","error":null,"incomplete_details":null,"instructions":"You are a helpful assistant.","max_output_tokens":null,"model":"gpt-5","parallel_tool_calls":true,"previous_response_id":null,"reasoning":{"effort":null,"summary":null},"store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_p":1.0,"truncation":"disabled","user":null,"metadata":{},` + rest + `}`
	}
	const (
		reasoning = `{"id":"rs_1","type":"reasoning","summary":[{"type":"summary_text","text":"They greet."}]}`
		spoken    = `{"id":"msg_1","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hi there!","annotations":[],"logprobs":[]}]}`
		calling   = `{"id":"fc_1","type":"function_call","status":"completed","arguments":"{\"city\":\"Rome\"}","call_id":"call_1","name":"get_weather"}`
	)
	return map[string]string{
		"openai": frames(head, chunk(`{"role":"assistant","content":"","refusal":null}`, "null"), chunk(`{"content":"Hello"}`, "null"), chunk(`{"content":" there"}`, "null"), chunk(`{}`, `"stop"`), usage),
		"openai-tools": frames(head, chunk(`{"role":"assistant","content":null,"refusal":null}`, "null"),
			chunk(`{"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"name":"get_weather","arguments":""}}]}`, "null"),
			chunk(`{"tool_calls":[{"index":0,"function":{"arguments":"{\"ci"}}]}`, "null"), chunk(`{"tool_calls":[{"index":0,"function":{"arguments":"ty\":\"Rome\"}"}}]}`, "null"),
			chunk(`{"tool_calls":[{"index":1,"id":"call_b","type":"function","function":{"name":"get_time","arguments":""}}]}`, "null"),
			chunk(`{"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]}`, "null"), chunk(`{}`, `"tool_calls"`), usage),
		"openai-refusal": frames(head, chunk(`{"role":"assistant","content":null,"refusal":null}`, "null"), chunk(`{"refusal":"I'm sorry"}`, "null"), chunk(`{"refusal":", no."}`, "null"), chunk(`{}`, `"stop"`), usage),
		"vllm-thought": frames(vllm, thought(`{"role":"assistant","content":""}`, "null"), thought(`{"reasoning":"Hm","reasoning_content":"Hm"}`, "null"), // the helper keeps only the last of several
			thought(`{"content":"Hello"}`, "null"), thought(`{"content":""}`, `"stop","stop_reason":null`), usage),
		"anthropic": named(
			`{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"model":"claude-opus-4-7","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":472,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":2,"service_tier":"standard"}}}`,
			`{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}`, `{"type":"ping"}`,
			`{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"The user"}}`, `{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":" greets."}}`,
			`{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}}`, `{"type":"content_block_stop","index":0}`,
			`{"type":"content_block_start","index":1,"content_block":{"type":"text","text":"","citations":[]}}`,
			`{"type":"content_block_delta","index":1,"delta":{"type":"citations_delta","citation":{"type":"char_location","cited_text":"hi","document_index":0,"document_title":null,"start_char_index":0,"end_char_index":2}}}`,
			`{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Okay"}}`, `{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":", let me check."}}`, `{"type":"content_block_stop","index":1}`,
			`{"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"toolu_01","name":"get_weather","input":{}}}`,
			`{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":""}}`, `{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"city\": \"Ro"}}`, `{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"me\"}"}}`, `{"type":"content_block_stop","index":2}`,
			`{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":472,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":89}}`, `{"type":"message_stop"}`),
		"response": named(
			`{"type":"response.created","sequence_number":0,`+response("in_progress", `"output":[],"usage":null`)+`}`,
			`{"type":"response.in_progress","sequence_number":1,`+response("in_progress", `"output":[],"usage":null`)+`}`,
			`{"type":"response.output_item.added","sequence_number":2,"output_index":0,"item":{"id":"rs_1","type":"reasoning","summary":[]}}`,
			`{"type":"response.reasoning_summary_part.added","sequence_number":3,"item_id":"rs_1","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":""}}`,
			`{"type":"response.reasoning_summary_text.delta","sequence_number":4,"item_id":"rs_1","output_index":0,"summary_index":0,"delta":"They "}`,
			`{"type":"response.reasoning_summary_text.delta","sequence_number":5,"item_id":"rs_1","output_index":0,"summary_index":0,"delta":"greet."}`,
			`{"type":"response.reasoning_summary_text.done","sequence_number":6,"item_id":"rs_1","output_index":0,"summary_index":0,"text":"They greet."}`,
			`{"type":"response.reasoning_summary_part.done","sequence_number":7,"item_id":"rs_1","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":"They greet."}}`,
			`{"type":"response.output_item.done","sequence_number":8,"output_index":0,"item":`+reasoning+`}`,
			`{"type":"response.output_item.added","sequence_number":9,"output_index":1,"item":{"id":"msg_1","type":"message","status":"in_progress","role":"assistant","content":[]}}`,
			`{"type":"response.content_part.added","sequence_number":10,"item_id":"msg_1","output_index":1,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}}`,
			`{"type":"response.output_text.delta","sequence_number":11,"item_id":"msg_1","output_index":1,"content_index":0,"delta":"Hi","logprobs":[]}`,
			`{"type":"response.output_text.delta","sequence_number":12,"item_id":"msg_1","output_index":1,"content_index":0,"delta":" there!","logprobs":[]}`,
			`{"type":"response.output_text.done","sequence_number":13,"item_id":"msg_1","output_index":1,"content_index":0,"text":"Hi there!","logprobs":[]}`,
			`{"type":"response.content_part.done","sequence_number":14,"item_id":"msg_1","output_index":1,"content_index":0,"part":{"type":"output_text","text":"Hi there!","annotations":[],"logprobs":[]}}`,
			`{"type":"response.output_item.done","sequence_number":15,"output_index":1,"item":`+spoken+`}`,
			`{"type":"response.output_item.added","sequence_number":16,"output_index":2,"item":{"id":"fc_1","type":"function_call","status":"in_progress","arguments":"","call_id":"call_1","name":"get_weather"}}`,
			`{"type":"response.function_call_arguments.delta","sequence_number":17,"item_id":"fc_1","output_index":2,"delta":"{\"city\":"}`,
			`{"type":"response.function_call_arguments.delta","sequence_number":18,"item_id":"fc_1","output_index":2,"delta":"\"Rome\"}"}`,
			`{"type":"response.function_call_arguments.done","sequence_number":19,"item_id":"fc_1","output_index":2,"name":"get_weather","arguments":"{\"city\":\"Rome\"}"}`,
			`{"type":"response.output_item.done","sequence_number":20,"output_index":2,"item":`+calling+`}`,
			`{"type":"response.completed","sequence_number":21,`+response("completed", `"output":[`+reasoning+`,`+spoken+`,`+calling+`],"usage":{"input_tokens":37,"input_tokens_details":{"cached_tokens":0},"output_tokens":11,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":48}`)+`}`),
	}
}
