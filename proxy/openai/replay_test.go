package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// replay replays a body, which must be possible, and holds that a Stream finds the result whole.
func replay(t testing.TB, kind Kind, body []byte, o ReplayOptions) []byte {
	t.Helper()
	sse, err := Replay(kind, body, o)
	if err != nil {
		t.Fatalf("%v\n%s", err, body)
	}
	wellFormed(t, kind, sse)
	return sse
}

// wellFormed holds a stream against its own rules.
func wellFormed(t testing.TB, kind Kind, sse []byte) {
	t.Helper()
	if r := play(t, kind, false, sse); !r.complete || r.lasts != 1 || r.out != string(sse) {
		t.Fatalf("the stream is not whole: %+v", r)
	}
	for i, e := range events(t, sse) {
		if string(e.data) == "[DONE]" {
			continue
		}
		var v struct {
			Type string `json:"type"`
			Seq  *int   `json:"sequence_number"`
		}
		if err := json.Unmarshal(e.data, &v); err != nil {
			t.Fatalf("%v: %s", err, e.data)
		}
		if v.Type != e.name {
			t.Fatalf("an event is called %q and %q", e.name, v.Type)
		}
		if kind == Response && (v.Seq == nil || *v.Seq != i) {
			t.Fatalf("event %d has another number: %s", i, e.data)
		}
	}
}

// TestReplayTranscripts replays every whole answer of the recorded ones, assembles that and has
// the same; and replays what is assembled of every stream.
func TestReplayTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/vllm-sim/*.response.raw")
	if err != nil || len(files) == 0 {
		t.Fatal(err, files)
	}
	tried := 0
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".response.raw")
		kind := kindOf(name)
		if strings.HasPrefix(name, "err_") || strings.HasPrefix(name, "inject") || strings.HasPrefix(name, "queue") {
			continue
		}
		if kind != Chat && kind != Completion && kind != Message && kind != Response || strings.HasPrefix(name, "tokenize") || strings.HasPrefix(name, "embed") {
			continue
		}
		tried++
		t.Run(name, func(t *testing.T) {
			body := transcript(t, name)
			if bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")) {
				same(t, "again", assembled(t, kind, replay(t, kind, body, usageOf(kind))), body)
				return
			}
			once := assembled(t, kind, body)
			o := usageOf(kind)
			o.IncludeUsage = o.IncludeUsage && bytes.Contains(once, []byte(`"usage"`))
			same(t, "again", assembled(t, kind, replay(t, kind, once, o)), once)
		})
	}
	if tried < 12 {
		t.Errorf("only %d transcripts were replayed", tried)
	}
}

// usageOf asks for the usage where that is to be asked for.
func usageOf(kind Kind) ReplayOptions {
	return ReplayOptions{IncludeUsage: kind == Chat || kind == Completion}
}

// TestReplayShapes holds a replay of the simulator's answers to how it streams.
func TestReplayShapes(t *testing.T) {
	for _, name := range []string{"chat_stream_usage", "completions_stream", "messages_stream"} {
		t.Run(name, func(t *testing.T) {
			kind, sse := kindOf(name), transcript(t, name)
			// It opens a block without its text.
			sse = bytes.ReplaceAll(sse, []byte(`"content_block":{"type":"text"}`), []byte(`"content_block":{"type":"text","text":""}`))
			got := shapes(t, replay(t, kind, assembled(t, kind, sse), usageOf(kind)))
			want := shapes(t, sse)
			for i := range want { // totals that it leaves out
				want[i] = strings.ReplaceAll(want[i], `"usage":{"output_tokens":0}`, `"usage":{"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"input_tokens":0,"output_tokens":0}`)
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("replayed:\n%s\nfresh:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

// Golden streams, to be read.
func TestReplayGolden(t *testing.T) {
	for _, c := range []struct {
		name string
		kind Kind
		body string
		o    ReplayOptions
		want string
	}{
		{
			"openai", Chat,
			`{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello","refusal":null,"annotations":[]},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2},"service_tier":"default","system_fingerprint":null}`,
			ReplayOptions{IncludeUsage: true},
			`data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","service_tier":"default","system_fingerprint":null,"choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","service_tier":"default","system_fingerprint":null,"choices":[{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","service_tier":"default","system_fingerprint":null,"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}

data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","service_tier":"default","system_fingerprint":null,"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}

data: [DONE]

`,
		},
		{
			"vllm with tools", Chat,
			`{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":null,"refusal":null,"tool_calls":[{"id":"t","type":"function","function":{"name":"f","arguments":"{}"}}],"reasoning":null},"logprobs":null,"finish_reason":"tool_calls","stop_reason":null,"token_ids":null}],"service_tier":null,"usage":{"prompt_tokens":1},"prompt_logprobs":null}`,
			ReplayOptions{Continuous: true},
			`data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"t","type":"function","function":{"name":"f","arguments":""}}]},"logprobs":null,"finish_reason":null}]}

data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]},"logprobs":null,"finish_reason":null}]}

data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"tool_calls","stop_reason":null}]}

data: [DONE]

`,
		},
		{
			"completion with logprobs", Completion,
			`{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"ab","logprobs":{"text_offset":[0,1],"token_logprobs":[-1,-2],"tokens":["a","b"],"top_logprobs":null},"finish_reason":"length","stop_reason":null}]}`,
			ReplayOptions{},
			`data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","logprobs":{"text_offset":[0],"token_logprobs":[-1],"tokens":["a"],"top_logprobs":null},"finish_reason":null,"stop_reason":null}]}

data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"b","logprobs":{"text_offset":[1],"token_logprobs":[-2],"tokens":["b"],"top_logprobs":null},"finish_reason":null,"stop_reason":null}]}

data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}]}

data: [DONE]

`,
		},
		{
			"anthropic", Message,
			`{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"thinking","thinking":"hm","signature":"s"},{"type":"text","text":"Hi"},{"type":"tool_use","id":"t","name":"f","input":{"a":"\""}}],"stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":3,"output_tokens":5,"service_tier":"standard"}}`,
			ReplayOptions{},
			`event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":3,"output_tokens":0,"service_tier":"standard"}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"s"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Hi"}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"a\":\"\\\"\"}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":3,"output_tokens":5}}

event: message_stop
data: {"type":"message_stop"}

`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			sse := replay(t, c.kind, []byte(c.body), c.o)
			if string(sse) != c.want {
				t.Errorf("got\n%s\nwant\n%s", sse, c.want)
			}
			var pretty bytes.Buffer
			if err := json.Indent(&pretty, []byte(c.body), "", "  "); err != nil {
				t.Fatal(err)
			}
			if other := replay(t, c.kind, pretty.Bytes(), c.o); !bytes.Equal(other, sse) {
				t.Errorf("line breaks make a difference:\n%s", other)
			}
		})
	}
}

// TestReplayResponse names the events of a Response, item by item.
func TestReplayResponse(t *testing.T) {
	body := `{"id":"resp_1","object":"response","created_at":1,"completed_at":2,"status":"incomplete","error":null,"incomplete_details":{"reason":"max_output_tokens"},"model":"m","output":[` +
		`{"type":"reasoning","id":"rs","summary":[{"type":"summary_text","text":"s"}],"content":[{"type":"reasoning_text","text":"r"}]},` +
		`{"type":"message","id":"msg","role":"assistant","status":"completed","content":[{"type":"output_text","text":"ab","annotations":[{"type":"url_citation"}],"logprobs":[{"token":"a"},{"token":"b"}]},{"type":"refusal","refusal":"no"}]},` +
		`{"type":"function_call","id":"fc","call_id":"c","name":"f","arguments":"{}","status":"completed"},` +
		`{"type":"custom_tool_call","id":"ct","call_id":"d","name":"g","input":"x"}],"usage":{"input_tokens":1,"output_tokens":2},"store":true}`
	sse := replay(t, Response, []byte(body), ReplayOptions{})
	var names []string
	for _, e := range events(t, sse) {
		names = append(names, strings.TrimPrefix(e.name, "response."))
	}
	want := []string{
		"created", "in_progress",
		"output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done", "reasoning_summary_part.done",
		"content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
		"output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.annotation.added", "output_text.done", "content_part.done",
		"content_part.added", "refusal.delta", "refusal.done", "content_part.done", "output_item.done",
		"output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
		"output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
		"incomplete",
	}
	if fmt.Sprint(names) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", names, want)
	}
	for _, line := range []string{
		`"type":"response.created","sequence_number":0,"response":{"id":"resp_1","object":"response","created_at":1,"completed_at":null,"status":"in_progress","error":null,"incomplete_details":null,"model":"m","output":[],"usage":null,"store":true}}`,
		`"item_id":"msg","output_index":1,"content_index":0,"logprobs":[{"token":"b"}],"delta":"b"}`,
		`"item_id":"msg","output_index":1,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}}`,
		`"item_id":"rs","output_index":0,"summary_index":0,"delta":"s"}`,
		`"item_id":"fc","output_index":2,"name":"f","arguments":"{}"}`,
	} {
		if !bytes.Contains(sse, []byte(line)) {
			t.Errorf("no %s in\n%s", line, sse)
		}
	}
	if got := assembled(t, Response, sse); string(got) != body {
		t.Errorf("got %s", got)
	}
}

// TestReplayRefuses is the table of what cannot be told in a stream.
func TestReplayRefuses(t *testing.T) {
	chat := func(message, rest string) string {
		return `{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"a"` + message + `},"finish_reason":"stop"` + rest + `}]}`
	}
	const whole = `{"id":"m","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"a"}],"stop_reason":"end_turn","usage":{"output_tokens":1}}`
	const response = `{"id":"r","object":"response","status":"completed","output":[{"type":"message","id":"i","content":[{"type":"output_text","text":"a"}]}]}`
	replay(t, Chat, []byte(chat("", "")), ReplayOptions{})
	replay(t, Message, []byte(whole), ReplayOptions{})
	replay(t, Response, []byte(response), ReplayOptions{})
	for _, c := range []struct {
		name string
		kind Kind
		body string
		o    ReplayOptions
	}{
		{"nothing", Chat, ``, ReplayOptions{}},
		{"no object", Chat, `[]`, ReplayOptions{}},
		{"bytes that are not UTF-8", Chat, strings.Replace(chat("", ""), `"a"`, "\"\xff\"", 1), ReplayOptions{}},
		{"bytes that are not UTF-8, over lines", Chat, "\n" + strings.Replace(chat("", ""), `"a"`, "\"\xff\"", 1), ReplayOptions{}},
		{"half a pair", Chat, "\n" + strings.Replace(chat("", ""), `"a"`, `"\ud83d"`, 1), ReplayOptions{}},
		{"cut short", Chat, strings.TrimSuffix(chat("", ""), "}"), ReplayOptions{}},
		{"an error", Chat, `{"error":{"message":"x"}}`, ReplayOptions{}},
		{"another kind", Completion, chat("", ""), ReplayOptions{}},
		{"no choices", Chat, `{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[]}`, ReplayOptions{}},
		{"no id", Chat, strings.Replace(chat("", ""), `"id":"c",`, "", 1), ReplayOptions{}},
		{"a usage that is not there", Chat, chat("", ""), ReplayOptions{IncludeUsage: true}},
		{"usage as it goes", Chat, strings.TrimSuffix(chat("", ""), "}") + `,"usage":{"prompt_tokens":1}}`, ReplayOptions{IncludeUsage: true, Continuous: true}},
		{"an unknown member", Chat, strings.Replace(chat("", ""), `"choices"`, `"x":0,"choices"`, 1), ReplayOptions{}},
		{"an unknown member of a choice", Chat, chat("", `,"content_filter_results":{"hate":1}`), ReplayOptions{}},
		{"an unknown member of a message", Chat, chat(`,"audio":{"id":"a"}`, ""), ReplayOptions{}},
		{"annotations", Chat, chat(`,"annotations":[{"type":"url_citation"}]`, ""), ReplayOptions{}},
		{"logprobs of the prompt", Chat, strings.Replace(chat("", ""), `"choices"`, `"prompt_logprobs":[null],"choices"`, 1), ReplayOptions{}},
		{"a name twice", Chat, chat(`,"content":"b"`, ""), ReplayOptions{}},
		{"a content in parts", Chat, strings.Replace(chat("", ""), `"a"`, `[{"type":"text","text":"a"}]`, 1), ReplayOptions{}},
		{"no role", Chat, strings.Replace(chat("", ""), `"role":"assistant",`, "", 1), ReplayOptions{}},
		{"no end", Chat, strings.Replace(chat("", ""), `"stop"`, "null", 1), ReplayOptions{}},
		{"choices out of order", Chat, strings.Replace(chat("", ""), `"index":0`, `"index":1`, 1), ReplayOptions{}},
		{"a call without a name", Chat, chat(`,"tool_calls":[{"id":"1","type":"function","function":{"arguments":"{}"}}]`, ""), ReplayOptions{}},
		{"a call without an id", Chat, chat(`,"tool_calls":[{"type":"function","function":{"name":"f","arguments":"{}"}}]`, ""), ReplayOptions{}},
		{"a call of an unknown type", Chat, chat(`,"tool_calls":[{"id":"1","type":"web","web":{"name":"f","arguments":"{}"}}]`, ""), ReplayOptions{}},
		{"calls out of order", Chat, chat(`,"tool_calls":[{"index":1,"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]`, ""), ReplayOptions{}},
		{"a message without a reason", Message, strings.Replace(whole, `"end_turn"`, "null", 1), ReplayOptions{}},
		{"a block that is not known", Message, strings.Replace(whole, `"type":"text"`, `"type":"server_tool_use"`, 1), ReplayOptions{}},
		{"a text that is none", Message, strings.Replace(whole, `"text":"a"`, `"text":1`, 1), ReplayOptions{}},
		{"a response in progress", Response, strings.Replace(response, "completed", "in_progress", 1), ReplayOptions{}},
		{"a response that failed", Response, strings.Replace(response, `"output"`, `"error":{"code":"x"},"output"`, 1), ReplayOptions{}},
		{"an item that is not known", Response, strings.Replace(response, `"type":"message"`, `"type":"web_search_call"`, 1), ReplayOptions{}},
		{"a part that is not known", Response, strings.Replace(response, "output_text", "output_audio", 1), ReplayOptions{}},
		{"embeddings", Embedding, `{"object":"list","data":[]}`, ReplayOptions{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if sse, err := Replay(c.kind, []byte(c.body), c.o); err == nil || sse != nil {
				t.Errorf("replayed:\n%s", sse)
			}
		})
	}
}

// Generators of answers.

// words are JSON strings, as servers write them: raw or escaped.
func words(min int) *rapid.Generator[string] {
	letters := rapid.SampledFrom([]string{
		"a", "b ", "word ", "é", "好", "😀", `\n`, `\"`, `\\`, `\/`, `\u00e9`, `\ud83d\ude00`, `\u2028`, "\u2028", `\\u0041`, " ", "{", "}", "[DONE]", "data: ", strings.Repeat("long ", 60),
	})
	return rapid.Custom(func(t *rapid.T) string {
		return `"` + strings.Join(rapid.SliceOfN(letters, min, 30).Draw(t, "letters"), "") + `"`
	})
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// arguments are JSON, as text in a string.
func arguments() *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		return quoted(fmt.Sprintf(`{"a": %s, "b": [1.0, 1e3, {"c": null}]}`, words(0).Draw(t, "argument")))
	})
}

func oneOf(t *rapid.T, name string, of ...string) string { return rapid.SampledFrom(of).Draw(t, name) }

// spokenBody makes a chat answer such as OpenAI's, vLLM's or SGLang's.
func spokenBody(t *rapid.T) []byte {
	server := oneOf(t, "server", "openai", "vllm", "sglang", "bare")
	logs := server != "bare" && rapid.Bool().Draw(t, "logprobs")
	var choices []string
	for i := range rapid.IntRange(1, 3).Draw(t, "n") {
		var members []string
		text := words(0).Draw(t, "content")
		content := text
		tokens := "null"
		if logs && len(text) > 2 {
			var list []string
			cut := len([]rune(unquote([]byte(text)))) / 2
			all := []rune(unquote([]byte(text)))
			if rapid.Bool().Draw(t, "aligned") {
				list = []string{string(all[:cut]), string(all[cut:])}
			} else {
				list = []string{"other"}
			}
			for j := range list {
				list[j] = fmt.Sprintf(`{"token":%s,"logprob":-0.50,"bytes":null,"top_logprobs":[]}`, quoted(list[j]))
			}
			tokens = `{"content":[` + strings.Join(list, ",") + `]` + oneOf(t, "refusal logprobs", "", `,"refusal":null`) + `}`
		}
		switch oneOf(t, "what", "text", "text", "tools", "function", "refusal", "thought") {
		case "tools":
			content = oneOf(t, "content beside", "null", text)
			var calls []string
			for j := range rapid.IntRange(1, 3).Draw(t, "calls") {
				if rapid.IntRange(0, 4).Draw(t, "custom") == 0 {
					calls = append(calls, fmt.Sprintf(`{"id":"call_%d","type":"custom","custom":{"name":"g","input":%s}}`, j, words(0).Draw(t, "input")))
				} else {
					calls = append(calls, fmt.Sprintf(`{"id":"call_%d","type":"function","function":{"name":"f%d","arguments":%s}}`, j, j, arguments().Draw(t, "arguments")))
				}
			}
			members = append(members, `"tool_calls":[`+strings.Join(calls, ",")+`]`)
		case "function":
			content = "null"
			members = append(members, `"function_call":{"name":"f","arguments":`+arguments().Draw(t, "arguments")+`}`)
		case "refusal":
			content = "null"
			members = append(members, `"refusal":`+words(1).Draw(t, "refusal"))
		case "thought":
			content = oneOf(t, "content beside", "null", text)
			members = append(members, `"`+oneOf(t, "name", "reasoning", "reasoning_content")+`":`+words(1).Draw(t, "thought"))
			if server == "vllm" {
				thought := words(1).Draw(t, "thought of vLLM")
				members = []string{`"reasoning":` + thought, `"reasoning_content":` + thought}
			}
		}
		members = append([]string{`"role":"assistant"`, `"content":` + content}, members...)
		if server == "vllm" {
			members = append(members, oneOf(t, "more", `"annotations":null`, `"audio":null`))
		}
		choice := fmt.Sprintf(`{"index":%d,"message":{%s},"finish_reason":%s`, i, strings.Join(members, ","), oneOf(t, "finish", `"stop"`, `"length"`, `"tool_calls"`))
		if server != "bare" {
			choice += `,"logprobs":` + tokens
		}
		switch server {
		case "vllm":
			choice += `,"stop_reason":` + oneOf(t, "stop", "null", "128009", `"END"`) + `,"token_ids":null`
		case "sglang":
			choice += `,"matched_stop":` + oneOf(t, "stop", "null", "2")
		}
		choices = append(choices, choice+"}")
	}
	head := `"id":"chatcmpl-1","object":"chat.completion","created":1795993324,"model":"m"`
	switch server {
	case "openai":
		head += `,"service_tier":"default","system_fingerprint":"fp_1"`
	case "vllm":
		head += oneOf(t, "fingerprint", ``, `,"service_tier":null,"system_fingerprint":null,"metrics":null`, `,"system_fingerprint":"vllm-1","metrics":{"queued":0.5}`)
	}
	return []byte(`{` + head + `,"choices":[` + strings.Join(choices, ",") + `],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}`)
}

func completionBody(t *rapid.T) []byte {
	var choices []string
	vllm := rapid.Bool().Draw(t, "vllm")
	for i := range rapid.IntRange(1, 3).Draw(t, "n") {
		text := words(0).Draw(t, "text")
		logs := "null"
		if all := []rune(unquote([]byte(text))); len(all) > 1 && rapid.Bool().Draw(t, "logprobs") {
			top := oneOf(t, "top", `null`, `[{"a":-0.5},{"b":-1}]`)
			logs = fmt.Sprintf(`{"text_offset":[0,1],"token_logprobs":[null,-1.50],"tokens":[%s,%s],"top_logprobs":%s}`, quoted(string(all[:1])), quoted(string(all[1:])), top)
		}
		choice := fmt.Sprintf(`{"index":%d,"text":%s,"logprobs":%s,"finish_reason":"stop"`, i, text, logs)
		if vllm {
			choice += `,"stop_reason":null`
		}
		choices = append(choices, choice+"}")
	}
	return []byte(`{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[` + strings.Join(choices, ",") + `],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}`)
}

func messageBody(t *rapid.T) []byte {
	var blocks []string
	for i := range rapid.IntRange(0, 4).Draw(t, "blocks") {
		switch oneOf(t, "block", "text", "cited", "tool", "thought", "hidden") {
		case "text":
			blocks = append(blocks, `{"type":"text","text":`+words(0).Draw(t, "text")+`}`)
		case "cited":
			blocks = append(blocks, `{"type":"text","text":`+words(0).Draw(t, "text")+`,"citations":[{"type":"char_location","cited_text":`+words(0).Draw(t, "cited")+`}]}`)
		case "tool":
			blocks = append(blocks, fmt.Sprintf(`{"type":"tool_use","id":"toolu_%d","name":"f","input":{"a":%s,"b":[1.0,{}]}}`, i, words(0).Draw(t, "input")))
		case "thought":
			blocks = append(blocks, `{"type":"thinking","thinking":`+words(0).Draw(t, "thought")+`,"signature":`+oneOf(t, "signature", `""`, `"c2ln"`)+`}`)
		case "hidden":
			blocks = append(blocks, `{"type":"redacted_thinking","data":"eA=="}`)
		}
	}
	stop := oneOf(t, "stop", `"end_turn","stop_sequence":null`, `"stop_sequence","stop_sequence":"END"`, `"max_tokens","stop_sequence":null`)
	return []byte(`{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[` + strings.Join(blocks, ",") + `],"stop_reason":` + stop +
		`,"usage":{"input_tokens":9,"cache_read_input_tokens":4,"output_tokens":30,"service_tier":"standard"}}`)
}

func responseBody(t *rapid.T) []byte {
	var items []string
	for i := range rapid.IntRange(0, 3).Draw(t, "items") {
		switch oneOf(t, "item", "message", "call", "thought") {
		case "message":
			items = append(items, fmt.Sprintf(`{"type":"message","id":"msg_%d","role":"assistant","status":"completed","content":[{"type":"output_text","text":%s,"annotations":[]},{"type":"refusal","refusal":%s}]}`, i, words(0).Draw(t, "text"), words(0).Draw(t, "refusal")))
		case "call":
			items = append(items, fmt.Sprintf(`{"type":"function_call","id":"fc_%d","call_id":"call_%d","name":"f","arguments":%s,"status":"completed"}`, i, i, arguments().Draw(t, "arguments")))
		case "thought":
			items = append(items, fmt.Sprintf(`{"type":"reasoning","id":"rs_%d","summary":[{"type":"summary_text","text":%s}],"encrypted_content":null}`, i, words(0).Draw(t, "summary")))
		}
	}
	return []byte(`{"id":"resp_1","object":"response","created_at":1,"status":"` + oneOf(t, "status", "completed", "incomplete") + `","model":"m","output":[` + strings.Join(items, ",") + `],"usage":{"input_tokens":1,"output_tokens":2,"total_tokens":3}}`)
}

// TestReplayRoundTrip: what is assembled of a replay is the answer, wherever the stream is cut.
func TestReplayRoundTrip(t *testing.T) {
	for _, c := range []struct {
		name string
		kind Kind
		body func(*rapid.T) []byte
	}{{"chat", Chat, spokenBody}, {"completion", Completion, completionBody}, {"message", Message, messageBody}, {"response", Response, responseBody}} {
		t.Run(c.name, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				body := c.body(rt)
				if rapid.Bool().Draw(rt, "pretty") {
					var b bytes.Buffer
					if err := json.Indent(&b, body, "", "\t"); err != nil {
						rt.Fatal(err)
					}
					body = append(b.Bytes(), "\r\n"...)
				}
				sse, err := Replay(c.kind, body, usageOf(c.kind))
				if err != nil {
					rt.Fatalf("%v\n%s", err, body)
				}
				wellFormed(t, c.kind, sse)
				pieces := [][]byte{}
				rest := sse
				for len(rest) > 0 {
					n := min(len(rest), rapid.IntRange(1, 4000).Draw(rt, "piece"))
					pieces, rest = append(pieces, rest[:n]), rest[n:]
				}
				got, ok, err := assemble(t, c.kind, enough, pieces...)
				if !ok {
					rt.Fatalf("%v\n%s\n%s", err, body, sse)
				}
				g, _ := json.Marshal(plain(decoded(t, got)))
				w, _ := json.Marshal(plain(decoded(t, body)))
				if !bytes.Equal(g, w) {
					rt.Fatalf("got  %s\nwant %s\n%s", g, w, sse)
				}
				again, err := Replay(c.kind, got, usageOf(c.kind))
				if err != nil || !bytes.Equal(withoutOrder(t, again), withoutOrder(t, sse)) {
					rt.Fatalf("replayed again: %v\n%s\n%s", err, again, sse)
				}
			})
		})
	}
}

// withoutOrder writes the events with their members in one order, and strings in one way.
func withoutOrder(t testing.TB, sse []byte) []byte {
	var b bytes.Buffer
	for _, e := range events(t, sse) {
		if string(e.data) == "[DONE]" {
			continue
		}
		data, err := json.Marshal(decoded(t, e.data))
		if err != nil {
			t.Fatal(err)
		}
		b.Write(data)
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// TestReplayPieces: cutting loses nothing and cuts no letter.
func TestReplayPieces(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := words(0).Draw(t, "words")
		s = strings.Repeat(s[1:len(s)-1], rapid.IntRange(1, 40).Draw(t, "times"))
		var whole strings.Builder
		count := 0
		pieces([]byte(s), func(p []byte) {
			count++
			whole.Write(p)
			if !json.Valid([]byte(`"` + string(p) + `"`)) {
				t.Fatalf("a piece is no string: %q", p)
			}
			var v string
			if err := json.Unmarshal([]byte(`"`+string(p)+`"`), &v); err != nil || strings.ContainsRune(v, '\ufffd') {
				t.Fatalf("a letter was cut: %q", p)
			}
			if len(p) == 0 {
				t.Fatal("an empty piece")
			}
		})
		size := rapid.IntRange(0, len(s)+2).Draw(t, "size")
		i := 0
		for i < min(size, len(s)) {
			i += letter([]byte(s[i:]))
		}
		if got := leap([]byte(s), size); got != i {
			t.Fatalf("the first letter from %d on begins at %d, not %d, of %q", size, i, got, s)
		}
		if whole.String() != s || count > maxPieces {
			t.Fatalf("%d pieces, %d bytes of %d", count, whole.Len(), len(s))
		}
	})
}

// TestReplayWords: a piece ends with a word, where one ends soon.
func TestReplayWords(t *testing.T) {
	pieces([]byte(strings.Repeat("word ", 1000)), func(p []byte) {
		if !bytes.HasSuffix(p, []byte(" ")) {
			t.Errorf("a piece ends within a word: …%s", p[len(p)-8:])
		}
	})
	pieces([]byte(strings.Repeat("好", 1000)), func(p []byte) {
		if len(p) > minPiece+wordEnd+3 {
			t.Errorf("a piece of %d bytes", len(p))
		}
	})
}

func BenchmarkReplay(b *testing.B) {
	body := []byte(`{"id":"chatcmpl-c75ff4d8-e974-5016-850e-67d52dce3c5d","object":"chat.completion","created":1795993324,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"` + strings.Repeat("some words ", 180) + `","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, err := Replay(Chat, body, ReplayOptions{IncludeUsage: true}); err != nil {
			b.Fatal(err)
		}
	}
}
