package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"headgate/bench/fakevllm"
)

// enough holds every answer of these tests.
const enough = 1 << 20

// assemble feeds a stream, in pieces, through a Stream to an Assembler.
func assemble(t testing.TB, kind Kind, most int, pieces ...[]byte) ([]byte, bool, error) {
	t.Helper()
	s, a := NewStream(kind, true), NewAssembler(kind, most)
	s.Assemble(a)
	emit := func(Frame) error { return nil }
	for _, p := range pieces {
		if err := s.Feed(bytes.Clone(p), emit); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.End(emit); err != nil {
		t.Fatal(err)
	}
	body, ok := a.JSON()
	return body, ok, a.Err()
}

// assembled is the body that a stream makes, which must be one.
func assembled(t testing.TB, kind Kind, sse []byte) []byte {
	t.Helper()
	body, ok, err := assemble(t, kind, enough, sse)
	if !ok {
		t.Fatalf("not assembled: %v\n%s", err, sse)
	}
	if f, err := Inspect(kind, body); err != nil || !f.Complete {
		t.Fatalf("assembled what is not whole: %v\n%s", err, body)
	}
	return body
}

// decoded is a body as values, with numbers as they are written.
func decoded(t testing.TB, body []byte) any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	if d.More() {
		t.Fatalf("more than a value: %s", body)
	}
	return v
}

// plain is a body without what says nothing: null, and empty lists of an object, the index of a
// tool call, and an empty content beside something else.
func plain(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
	case map[string]any:
		if _, call := v["function"]; call {
			delete(v, "index")
		}
		for name, x := range v {
			x = plain(x)
			list, isList := x.([]any)
			if x == nil || isList && len(list) == 0 && name != "content" && name != "output" {
				delete(v, name)
				continue
			}
			v[name] = x
		}
		_, said := v["role"]
		if empty, text := v["content"].(string); said && text && empty == "" && len(v) > 2 {
			delete(v, "content")
		}
	}
	return v
}

// same fails where two bodies say different things.
func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	g, _ := json.Marshal(plain(decoded(t, got)))
	w, _ := json.Marshal(plain(decoded(t, want)))
	if !bytes.Equal(g, w) {
		t.Fatalf("%s:\ngot  %s\nwant %s", what, g, w)
	}
}

// TestAssembleTranscripts assembles what a simulator of vLLM streamed, however it is cut.
func TestAssembleTranscripts(t *testing.T) {
	const model = `"model":"meta-llama/Llama-3.1-8B-Instruct"`
	for name, want := range map[string]string{
		"chat_stream":           `{"id":"chatcmpl-f7234614-973e-5056-b09b-c8f4bf2fbcde","object":"chat.completion","created":1795993324,` + model + `,"choices":[{"index":0,"message":{"role":"assistant","content":"Give a "},"finish_reason":"stop"}]}`,
		"chat_stream_usage":     `{"id":"chatcmpl-fe74c8c3-1b15-5a10-be61-0a4117d04089","object":"chat.completion","created":1795993324,` + model + `,"choices":[{"index":0,"message":{"role":"assistant","content":"I am fine, how are "},"finish_reason":"stop"}],"usage":{"prompt_tokens":11,"completion_tokens":6,"total_tokens":17,"prompt_tokens_details":{"cached_tokens":0}}}`,
		"chat_tools_stream":     `{"id":"chatcmpl-437ec607-f71b-5c70-b761-9f0b11f0768f","object":"chat.completion","created":1795993325,` + model + `,"choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"chatcmpl-tool-9792250984","type":"function","function":{"name":"get_weather","arguments":"{\"city\":\"hello\"}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":8,"completion_tokens":12,"total_tokens":20,"prompt_tokens_details":{"cached_tokens":0}}}`,
		"completions_stream":    `{"id":"cmpl-f8580f45-f853-5532-9e21-aba9d1eac315-0","object":"text_completion","created":1795993325,` + model + `,"choices":[{"index":0,"text":"Testing@","finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}}`,
		"messages_stream":       `{"id":"msg_0019c3be-f609-584e-a45b-9fc9f597e251","type":"message","role":"assistant","content":[{"type":"text","text":"Testing, testing "}],` + model + `,"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":3}}`,
		"responses_stream":      `{"id":"resp_660668a0-5d0b-5ee5-bf62-a1f1b72d4902",` + model + `,"object":"response","created_at":1795993326,"status":"completed","output":[{"type":"message","id":"msg_660668a0-5d0b-5ee5-bf62-a1f1b72d4902","role":"assistant","status":"completed","content":[{"type":"output_text","text":"To be or not "}]}],"text":{"format":{"type":"text"}},"usage":{"input_tokens":6,"output_tokens":4,"total_tokens":10}}`,
		"chat_stream_contusage": `{"id":"chatcmpl-f3145522-913f-5dd4-8365-c7511f74df46","object":"chat.completion","created":1795993324,` + model + `,"choices":[{"index":0,"message":{"role":"assistant","content":"Today is a nice sunny "},"finish_reason":"stop"}],"usage":{"prompt_tokens":6,"completion_tokens":5,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":0}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			kind, sse := kindOf(name), transcript(t, name)
			got := assembled(t, kind, sse)
			same(t, "assembled", got, []byte(want))
			for i := range sse {
				if other, ok, err := assemble(t, kind, enough, sse[:i], sse[i:]); !ok || !bytes.Equal(other, got) {
					t.Fatalf("cut at %d: %v\n%s", i, err, other)
				}
				if other, ok, _ := assemble(t, kind, enough, sse[:i]); ok && !bytes.Equal(other, got) {
					t.Fatalf("cut off at %d: assembled %s", i, other)
				}
			}
			if kind == Response {
				return // the answer is in its last event
			}
			for most := range len(got) / 2 {
				if _, ok, err := assemble(t, kind, most, sse); ok || err == nil {
					t.Fatalf("assembled within %d bytes", most)
				}
			}
		})
	}
}

// ask gives a request to a server in this process and returns the body of its answer.
func ask(t testing.TB, h http.Handler, path, body string) []byte {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	b, err := io.ReadAll(w.Body)
	if err != nil || w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s %v", body, w.Code, b, err)
	}
	return b
}

// pairs are requests whose answer comes both ways.
func pairs() map[string]struct {
	kind Kind
	path string
	body string // without its end
} {
	const say = `{"model":"m","temperature":0,"seed":7,"max_tokens":40,"messages":[{"role":"user","content":"Say hello — grüß Gott, 你好."}]`
	const call = `,"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","required":["city","days"],"properties":{"city":{"type":"string"},"days":{"type":"integer"}}}}}],"tool_choice":{"type":"function","function":{"name":"get_weather"}}`
	type pair = struct {
		kind Kind
		path string
		body string
	}
	return map[string]pair{
		"chat":               {Chat, "/v1/chat/completions", say},
		"chat length":        {Chat, "/v1/chat/completions", strings.Replace(say, ":40", ":3", 1)},
		"chat n":             {Chat, "/v1/chat/completions", say + `,"n":3`},
		"chat logprobs":      {Chat, "/v1/chat/completions", say + `,"logprobs":true,"top_logprobs":2,"n":2`},
		"chat tools":         {Chat, "/v1/chat/completions", say + call},
		"chat tools n":       {Chat, "/v1/chat/completions", say + call + `,"n":2`},
		"completion":         {Completion, "/v1/completions", `{"model":"m","max_tokens":20,"prompt":"Once upon"`},
		"completions":        {Completion, "/v1/completions", `{"model":"m","max_tokens":9,"prompt":["Once","upon"],"n":2`},
		"message":            {Message, "/v1/messages", say},
		"message length":     {Message, "/v1/messages", strings.Replace(say, ":40", ":3", 1)},
		"message tools":      {Message, "/v1/messages", say + `,"tools":[{"name":"get_weather","input_schema":{"type":"object","required":["city"],"properties":{"city":{"type":"string"}}}}],"tool_choice":{"type":"tool","name":"get_weather"}`},
		"response":           {Response, "/v1/responses", `{"model":"m","input":"hi","max_output_tokens":20`},
		"response length":    {Response, "/v1/responses", `{"model":"m","input":"hi","max_output_tokens":2`},
		"response with tool": {Response, "/v1/responses", `{"model":"m","input":"hi","tools":[{"type":"function","name":"f","parameters":{"type":"object","required":["a"],"properties":{"a":{"type":"string"}}}}],"tool_choice":"required"`},
	}
}

// newFake is a fake vLLM that answers alike whenever it is asked the same.
func newFake(t testing.TB) http.Handler {
	t.Helper()
	fake, err := fakevllm.New(fakevllm.Config{Seed: 1, Models: []string{"m"}})
	if err != nil {
		t.Fatal(err)
	}
	return fake.Handler()
}

// unnamed replaces what no two answers share.
func unnamed(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = unnamed(v[i])
		}
	case map[string]any:
		for name, x := range v {
			if s, ok := x.(string); ok && (name == "id" || name == "call_id" || name == "item_id") && s != "" {
				x = "ID"
			}
			v[name] = unnamed(x)
		}
	}
	return v
}

// TestAssemblePairs holds what is assembled of a stream against the same answer without one, and
// a replay of this against that stream.
func TestAssemblePairs(t *testing.T) {
	fake := newFake(t)
	all := pairs()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		p := all[name]
		t.Run(name, func(t *testing.T) {
			options := `,"stream":true`
			if p.kind == Chat || p.kind == Completion {
				options += `,"stream_options":{"include_usage":true}`
			}
			whole := ask(t, fake, p.path, p.body+"}")
			sse := ask(t, fake, p.path, p.body+options+"}")
			again := func(body []byte) []byte {
				b, err := json.Marshal(unnamed(decoded(t, body)))
				if err != nil {
					t.Fatal(err)
				}
				return b
			}
			same(t, "assembled", again(assembled(t, p.kind, sse)), again(whole))
			replayed, err := Replay(p.kind, whole, ReplayOptions{IncludeUsage: p.kind == Chat || p.kind == Completion})
			if err != nil {
				t.Fatal(err)
			}
			got, want := shapes(t, replayed), shapes(t, sse)
			if strings.HasSuffix(p.path, "completions") { // choices take turns as they please
				slices.Sort(got)
				slices.Sort(want)
			}
			for i := range want { // the fake says less than OpenAI's reference and vLLM do
				if strings.HasPrefix(want[i], "response.function_call_arguments.done") {
					want[i] = strings.Replace(want[i], `"output_index"`, `"name":"f","output_index"`, 1)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("replayed:\n%s\nfresh:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

// shapes are the sorts of event of a stream in the order in which they first come: the names of
// all members, and what stands there but for texts that are cut, ids and figures.
func shapes(t testing.TB, sse []byte) (list []string) {
	t.Helper()
	for _, e := range events(t, sse) {
		if string(e.data) == "[DONE]" {
			list = append(list, "[DONE]")
			continue
		}
		if e.name == "ping" {
			continue
		}
		b, err := json.Marshal(shape(decoded(t, e.data), ""))
		if err != nil {
			t.Fatal(err)
		}
		if s := e.name + " " + string(b); !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	return list
}

func shape(v any, name string) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = shape(v[i], "")
		}
	case map[string]any:
		for name, x := range v {
			v[name] = shape(x, name)
		}
	case string:
		switch name {
		case "content", "text", "arguments", "partial_json", "delta", "id", "call_id", "item_id", "token":
			return "…"
		}
	case json.Number:
		if name != "index" && name != "output_index" && name != "content_index" {
			return 0
		}
	}
	return v
}

type event struct {
	name string
	data []byte
}

// events takes a stream apart as strictly as it is to be written: an event name or none, one line
// of data, a blank line.
func events(t testing.TB, sse []byte) (list []event) {
	t.Helper()
	if !bytes.HasSuffix(sse, []byte("\n\n")) || bytes.IndexByte(sse, '\r') >= 0 {
		t.Fatalf("the stream does not end with a blank line, or holds a CR: %q", tailOf(sse))
	}
	for frame := range strings.SplitSeq(strings.TrimSuffix(string(sse), "\n\n"), "\n\n") {
		var e event
		rest := frame
		if name, ok := strings.CutPrefix(frame, "event: "); ok {
			e.name, rest, _ = strings.Cut(name, "\n")
		}
		data, ok := strings.CutPrefix(rest, "data: ")
		if !ok || strings.Contains(data, "\n") {
			t.Fatalf("not an event: %q", frame)
		}
		e.data = []byte(data)
		list = append(list, e)
	}
	return list
}

func tailOf(b []byte) []byte { return b[max(0, len(b)-200):] }

// chatChunk is a chunk with one choice.
func chatChunk(choice string) string {
	return fmt.Sprintf(`data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[%s]}`+"\n\n", choice)
}

// TestAssemble is the table of what is understood.
func TestAssemble(t *testing.T) {
	role := chatChunk(`{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}`)
	end := chatChunk(`{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}`)
	say := func(s string) string {
		return chatChunk(`{"index":0,"delta":{"content":"` + s + `"},"logprobs":null,"finish_reason":null}`)
	}
	answer := func(message, rest string) string {
		return `{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",` + message + `},"logprobs":null,"finish_reason":"stop"` + rest + `}]}`
	}
	const stop = `,"stop_reason":null`
	for _, c := range []struct {
		name, in, want string
	}{
		{"text", role + say("Hel") + say("lo") + say(" you") + end + done, answer(`"content":"Hello you","refusal":null`, stop)},
		{"escapes", role + say(`a\n`) + say(`\"b\"`) + say(`\\`) + say(`\u00e9`) + say(`\ud83d\ude00`) + say(`é`) + end + done, answer(`"content":"a\n\"b\"\\é😀é","refusal":null`, stop)},
		{"nothing", role + end + done, answer(`"content":"","refusal":null`, stop)},
		{"nothing at all", chatChunk(`{"index":0,"delta":{"role":"assistant"},"logprobs":null,"finish_reason":"stop"}`) + done, answer(`"content":null`, "")},
		{"comments, empty frames, padding", ": hi\n\n" + role + "event: x\n\n" + strings.Replace(say("a"), `"choices"`, `"obfuscation":"xyz","choices"`, 1) + end + done, answer(`"content":"a","refusal":null`, stop)},
		{"the time goes on", role + strings.Replace(say("a"), `"created":1`, `"created":2`, 1) + end + done, answer(`"content":"a","refusal":null`, stop)},
		{"refusal", role + chatChunk(`{"index":0,"delta":{"refusal":"I"}}`) + chatChunk(`{"index":0,"delta":{"refusal":" won't"}}`) + end + done, answer(`"content":null,"refusal":"I won't"`, stop)},
		{"thought", role + chatChunk(`{"index":0,"delta":{"reasoning":"h","reasoning_content":"h"}}`) + chatChunk(`{"index":0,"delta":{"reasoning":"m","reasoning_content":"m"}}`) + say("a") + end + done, answer(`"content":"a","refusal":null,"reasoning":"hm","reasoning_content":"hm"`, stop)},
		{
			"calls side by side", role +
				chatChunk(`{"index":0,"delta":{"tool_calls":[{"index":0,"id":"1","type":"function","function":{"name":"f","arguments":""}},{"index":1,"id":"2","type":"function","function":{"name":"g","arguments":"{"}}]}}`) +
				chatChunk(`{"index":0,"delta":{"tool_calls":[{"index":1,"function":{"arguments":"}"}},{"index":0,"function":{"arguments":"[1]"}}]}}`) +
				chatChunk(`{"index":0,"delta":{"tool_calls":[{"index":2,"id":"3","type":"custom","custom":{"name":"h","input":"x"}}]}}`) + end + done,
			answer(`"content":null,"refusal":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"[1]"}},{"id":"2","type":"function","function":{"name":"g","arguments":"{}"}},{"id":"3","type":"custom","custom":{"name":"h","input":"x"}}]`, stop),
		},
		{"an old function call", role + chatChunk(`{"index":0,"delta":{"function_call":{"name":"f","arguments":""}}}`) + chatChunk(`{"index":0,"delta":{"function_call":{"arguments":"{}"}}}`) + end + done, answer(`"content":null,"refusal":null,"function_call":{"name":"f","arguments":"{}"}`, stop)},
		{"what stopped SGLang", role + say("a") + chatChunk(`{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","matched_stop":2}`) + done, answer(`"content":"a"`, `,"matched_stop":2`)},
		{
			"choices in turn", chatChunk(`{"index":1,"delta":{"role":"assistant"},"logprobs":null},{"index":0,"delta":{"role":"assistant"},"logprobs":null}`) + say("a") + strings.ReplaceAll(say("b"), `"index":0`, `"index":1`) + say("c") + end + strings.ReplaceAll(end, `"index":0`, `"index":1`) + done,
			`{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ac","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null},{"index":1,"message":{"role":"assistant","content":"b","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}`,
		},
		{"constants of OpenAI's", strings.ReplaceAll(role+say("a")+end, `"model":"m"`, `"model":"m","service_tier":"default","system_fingerprint":"fp"`) + done, strings.Replace(answer(`"content":"a","refusal":null`, stop), `"model":"m"`, `"model":"m","service_tier":"default","system_fingerprint":"fp"`, 1)},
		{"usage without choices", role + say("a") + end + `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}` + "\n\n" + done, strings.TrimSuffix(answer(`"content":"a","refusal":null`, stop), "}") + `,"usage":{"prompt_tokens":1,"completion_tokens":2}}`},
		{"alike but for one of two texts", role + chatChunk(`{"index":0,"delta":{"reasoning":"h","reasoning_content":"a"}}`) + chatChunk(`{"index":0,"delta":{"reasoning":"h","reasoning_content":"b"}}`) + end + done, answer(`"content":null,"refusal":null,"reasoning":"hh","reasoning_content":"ab"`, stop)},
		{
			"alike, with logprobs", role + chatChunk(`{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"x"}]}}`) + chatChunk(`{"index":0,"delta":{"content":"b"},"logprobs":{"content":[{"token":"x"}]}}`) + end + done,
			strings.Replace(answer(`"content":"ab","refusal":null`, stop), `"logprobs":null`, `"logprobs":{"content":[{"token":"x"},{"token":"x"}]}`, 1),
		},
		{
			"logprobs", role + chatChunk(`{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a"}],"refusal":null}}`) + chatChunk(`{"index":0,"delta":{"content":"b"},"logprobs":{"content":[{"token":"b"},{"token":""}],"refusal":null}}`) + end + done,
			strings.Replace(answer(`"content":"ab","refusal":null`, stop), `"logprobs":null`, `"logprobs":{"content":[{"token":"a"},{"token":"b"},{"token":""}],"refusal":null}`, 1),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := assembled(t, Chat, []byte(c.in))
			if g, w := decoded(t, got), decoded(t, []byte(c.want)); fmt.Sprint(g) != fmt.Sprint(w) {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// TestAssembleRefuses is the table of what is not stored.
func TestAssembleRefuses(t *testing.T) {
	role := chatChunk(`{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}`)
	end := chatChunk(`{"index":0,"delta":{},"finish_reason":"stop"}`)
	say := func(delta string) string {
		return chatChunk(`{"index":0,"delta":{` + delta + `},"finish_reason":null}`)
	}
	whole := role + say(`"content":"a"`) + end + done
	if _, ok, err := assemble(t, Chat, enough, []byte(whole)); !ok {
		t.Fatal(err)
	}
	for name, in := range map[string]string{
		"nothing":                         "",
		"done only":                       done,
		"cut off before done":             role + say(`"content":"a"`) + end,
		"cut off before its reason":       role + say(`"content":"a"`) + done,
		"no role":                         say(`"content":"a"`) + end + done,
		"two ends":                        whole + done,
		"an event behind the end":         whole + say(`"content":"b"`),
		"an error inside":                 role + say(`"content":"a"`) + `data: {"error":{"message":"x"}}` + "\n\n" + end + done,
		"an error beside choices":         role + strings.Replace(end, `"choices"`, `"error":{"message":"x"},"choices"`, 1) + done,
		"not JSON":                        role + "data: {\n\n" + end + done,
		"a member within what is alike":   role + say(`"content":"a"`) + say(`"content":"a","zzz":"b"`) + end + done,
		"half a pair, alike":              role + say(`"content":"a"`) + say(`"content":"\ud83d"`) + say(`"content":"\ude00"`) + end + done,
		"a name with escapes for another": role + say(`"content":"a","cont\u0065nt":null`) + end + done,
		"half a pair":                     role + say(`"content":"\ud83d"`) + say(`"content":"\ude00"`) + end + done,
		"bytes that are not UTF-8":        role + say(`"content":"a"`) + say("\"content\":\"\xff\"") + end + done,
		"half a letter":                   role + say(`"content":"a"`) + say("\"content\":\"\xc3\"") + say("\"content\":\"\xa9\"") + end + done,
		"control bytes":                   role + say(`"content":"a"`) + say("\"content\":\"\x01\"") + end + done,
		"an escape that is none":          role + say(`"content":"a"`) + say(`"content":"\q"`) + end + done,
		"an unknown member":               role + say(`"audio":{"id":"x"}`) + end + done,
		"an unknown member of the top":    strings.Replace(whole, `"choices"`, `"x":1,"choices"`, 1),
		"an unknown member of a choice":   role + strings.Replace(end, `"delta"`, `"content_filter_results":{"hate":{}},"delta"`, 1) + done,
		"parts for a content":             role + say(`"content":[{"type":"text","text":"a"}]`) + end + done,
		"a name twice":                    role + say(`"content":"a","content":"b"`) + end + done,
		"a name with escapes":             role + say(`"cont\u0065nt":"a"`) + end + done,
		"another id":                      role + strings.Replace(end, `"id":"c"`, `"id":"d"`, 1) + done,
		"another model":                   role + strings.Replace(end, `"model":"m"`, `"model":"n"`, 1) + done,
		"another object":                  strings.ReplaceAll(whole, "chat.completion.chunk", "chat.completion"),
		"no id":                           strings.ReplaceAll(whole, `"id":"c",`, ""),
		"text behind the reason":          role + end + say(`"content":"b"`) + done,
		"two reasons":                     role + end + strings.Replace(end, "stop", "length", 1) + done,
		"a choice without an index":       role + strings.Replace(end, `"index":0,`, "", 1) + done,
		"a choice is missing":             strings.ReplaceAll(whole, `"index":0`, `"index":1`),
		"a choice far away":               strings.ReplaceAll(whole, `"index":0`, `"index":99999`),
		"a call without an index":         role + say(`"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":""}}]`) + end + done,
		"a call skips an index":           role + say(`"tool_calls":[{"index":1,"id":"1","type":"function","function":{"name":"f","arguments":""}}]`) + end + done,
		"a call without a name":           role + say(`"tool_calls":[{"index":0,"id":"1","type":"function","function":{"arguments":""}}]`) + end + done,
		"a call without an id":            role + say(`"tool_calls":[{"index":0,"type":"function","function":{"name":"f","arguments":""}}]`) + end + done,
		"a call named twice":              role + say(`"tool_calls":[{"index":0,"id":"1","type":"function","function":{"name":"f"}}]`) + say(`"tool_calls":[{"index":0,"function":{"name":"f"}}]`) + end + done,
		"a call with another id":          role + say(`"tool_calls":[{"index":0,"id":"1","type":"function","function":{"name":"f"}}]`) + say(`"tool_calls":[{"index":0,"id":"2"}]`) + end + done,
		"a call of another type":          role + say(`"tool_calls":[{"index":0,"id":"1","type":"web","function":{"name":"f","arguments":""}}]`) + end + done,
		"too many calls":                  role + say(`"tool_calls":[`+strings.TrimSuffix(strings.Repeat(`{"index":0},`, 2), ",")+`,{"index":128}]`) + end + done,
		"tokens of vLLM's":                role + strings.Replace(end, `"delta"`, `"token_ids":[1],"delta"`, 1) + done,
		"logprobs of another sort":        role + chatChunk(`{"index":0,"delta":{"content":"a"},"logprobs":{"tokens":["a"]}}`) + end + done,
		"logprobs that are a text":        role + chatChunk(`{"index":0,"delta":{"content":"a"},"logprobs":"x"}`) + end + done,
	} {
		t.Run(name, func(t *testing.T) {
			body, ok, err := assemble(t, Chat, enough, []byte(in))
			if ok || body != nil || err == nil {
				t.Errorf("assembled %s", body)
			}
		})
	}
	for _, kind := range []Kind{Embedding, CountTokens, Tokenize, Detokenize, Pooling, Audio} {
		if _, ok, err := assemble(t, kind, enough, []byte(whole)); ok || err == nil {
			t.Errorf("kind %d is assembled", kind)
		}
	}
}

// anthropic writes events as Anthropic does.
func anthropic(datas ...string) string {
	var b strings.Builder
	for _, d := range datas {
		var e struct{ Type string }
		if json.Unmarshal([]byte(d), &e) != nil {
			panic(d)
		}
		fmt.Fprintf(&b, "event: %s\ndata: %s\n\n", e.Type, d)
	}
	return b.String()
}

func TestAssembleMessage(t *testing.T) {
	start := `{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":9,"cache_read_input_tokens":4,"output_tokens":1,"service_tier":"standard"}}}`
	conclude := `{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":9,"output_tokens":30,"cache_read_input_tokens":null}}`
	stop := `{"type":"message_stop"}`
	open := func(block string) string {
		return `{"type":"content_block_start","index":0,"content_block":` + block + `}`
	}
	delta := func(d string) string { return `{"type":"content_block_delta","index":0,"delta":` + d + `}` }
	shut := `{"type":"content_block_stop","index":0}`
	second := func(s string) string { return strings.Replace(s, `"index":0`, `"index":1`, 1) }
	const tail = `],"model":"m","stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":9,"cache_read_input_tokens":4,"output_tokens":30,"service_tier":"standard"}}`
	const head = `{"id":"msg_1","type":"message","role":"assistant","content":[`
	for _, c := range []struct {
		name   string
		events []string
		want   string // the blocks
	}{
		{"text and a tool", []string{
			start, open(`{"type":"text","text":""}`), `{"type":"ping"}`, delta(`{"type":"text_delta","text":"Let "}`), delta(`{"type":"text_delta","text":"me \"see\""}`), shut,
			second(open(`{"type":"tool_use","id":"toolu_1","name":"f","input":{}}`)), second(delta(`{"type":"input_json_delta","partial_json":""}`)), second(delta(`{"type":"input_json_delta","partial_json":"{\"ci"}`)), second(delta(`{"type":"input_json_delta","partial_json":"ty\": \"Rome\"}"}`)), second(shut), conclude, stop,
		}, `{"type":"text","text":"Let me \"see\""},{"type":"tool_use","id":"toolu_1","name":"f","input":{"city": "Rome"}}`},
		{"a tool without an input", []string{start, open(`{"type":"tool_use","id":"t","name":"f","input":{},"caller":{"type":"direct"}}`), shut, conclude, stop}, `{"type":"tool_use","id":"t","name":"f","input":{},"caller":{"type":"direct"}}`},
		{"thoughts", []string{start, open(`{"type":"thinking","thinking":"","signature":""}`), delta(`{"type":"thinking_delta","thinking":"h"}`), delta(`{"type":"thinking_delta","thinking":"m"}`), delta(`{"type":"signature_delta","signature":"sig"}`), shut, second(open(`{"type":"redacted_thinking","data":"xyz"}`)), second(shut), conclude, stop}, `{"type":"thinking","thinking":"hm","signature":"sig"},{"type":"redacted_thinking","data":"xyz"}`},
		{"citations", []string{start, open(`{"type":"text","text":"","citations":[]}`), delta(`{"type":"citations_delta","citation":{"a":1}}`), delta(`{"type":"citations_delta","citation":{"a":2}}`), delta(`{"type":"text_delta","text":"x"}`), shut, conclude, stop}, `{"type":"text","text":"x","citations":[{"a":1},{"a":2}]}`},
		{"nothing said", []string{start, conclude, stop}, ``},
	} {
		t.Run(c.name, func(t *testing.T) {
			same(t, "assembled", assembled(t, Message, []byte(anthropic(c.events...))), []byte(head+c.want+tail))
			vllm := strings.Replace(anthropic(c.events...), `"type":"message","role":"assistant",`, "", 1) + done
			same(t, "as vLLM begins and ends it", assembled(t, Message, []byte(vllm)), []byte(head+c.want+tail))
		})
	}
	text := open(`{"type":"text","text":""}`)
	for name, events := range map[string][]string{
		"no start":                             {text, shut, conclude, stop},
		"two starts":                           {start, start, conclude, stop},
		"no end":                               {start, text, shut, conclude},
		"no reason":                            {start, text, shut, stop},
		"a null reason":                        {start, strings.Replace(conclude, `"tool_use"`, "null", 1), stop},
		"a block within another":               {start, text, second(text), second(shut), conclude, stop},
		"a block that never ends":              {start, text, conclude, stop},
		"an error":                             {start, `{"type":"error","error":{"type":"overloaded_error","message":"x"}}`, conclude, stop},
		"an unknown event":                     {start, `{"type":"content_block_pause","index":0}`, conclude, stop},
		"an unknown block":                     {start, open(`{"type":"web_search_tool_result","content":[]}`), shut, conclude, stop},
		"an unknown delta":                     {start, text, delta(`{"type":"x_delta","text":"a"}`), shut, conclude, stop},
		"a delta for another":                  {start, text, delta(`{"type":"thinking_delta","thinking":"a"}`), shut, conclude, stop},
		"a delta for a block that is not open": {start, text, shut, delta(`{"type":"text_delta","text":"a"}`), conclude, stop},
		"a member more":                        {start, text, delta(`{"type":"text_delta","text":"a","x":1}`), shut, conclude, stop},
		"a block out of order":                 {start, second(text), second(shut), conclude, stop},
		"an input cut off":                     {start, open(`{"type":"tool_use","id":"t","name":"f","input":{}}`), delta(`{"type":"input_json_delta","partial_json":"{\"a\":"}`), shut, conclude, stop},
		"an input that is a list":              {start, open(`{"type":"tool_use","id":"t","name":"f","input":{}}`), delta(`{"type":"input_json_delta","partial_json":"[]"}`), shut, conclude, stop},
		"two signatures":                       {start, open(`{"type":"thinking","thinking":"","signature":""}`), delta(`{"type":"signature_delta","signature":"a"}`), delta(`{"type":"signature_delta","signature":"b"}`), shut, conclude, stop},
		"edits of the context":                 {start, strings.Replace(conclude, `"usage"`, `"context_management":{"applied_edits":[1]},"usage"`, 1), stop},
		"an event behind the end":              {start, conclude, stop, `{"type":"ping"}`},
	} {
		t.Run(name, func(t *testing.T) {
			if body, ok, err := assemble(t, Message, enough, []byte(anthropic(events...))); ok || err == nil {
				t.Errorf("assembled %s", body)
			}
		})
	}
}

func TestAssembleResponse(t *testing.T) {
	full := `{"id":"resp_1","object":"response","status":"completed","output":[{"type":"web_search_call","id":"ws"}],"anything":{"x":1}}`
	completed := `{"type":"response.completed","sequence_number":9,"response":` + full + `}`
	created := `{"type":"response.created","response":{"id":"resp_1"}}`
	if got := assembled(t, Response, []byte(anthropic(created, `{"type":"response.whatever.delta","delta":"x"}`, completed))); string(got) != full {
		t.Errorf("got %s", got)
	}
	cut := strings.Replace(strings.ReplaceAll(completed, "completed", "incomplete"), `"output"`, `"incomplete_details":{"reason":"max_output_tokens"},"output"`, 1)
	if got := assembled(t, Response, []byte(anthropic(created, cut))); !bytes.Contains(got, []byte(`"incomplete"`)) {
		t.Errorf("got %s", got)
	}
	for name, events := range map[string][]string{
		"no end":              {created},
		"failed":              {created, strings.ReplaceAll(completed, "completed", "failed")},
		"an error":            {created, `{"type":"error","message":"x"}`, completed},
		"another status":      {created, strings.Replace(completed, `"status":"completed"`, `"status":"failed"`, 1)},
		"no status":           {created, strings.Replace(completed, `"status":"completed",`, ``, 1)},
		"no output":           {created, strings.Replace(completed, `"output"`, `"out"`, 1)},
		"a foreign event":     {created, `{"type":"message_stop"}`, completed},
		"something behind it": {completed, created},
	} {
		t.Run(name, func(t *testing.T) {
			if body, ok, err := assemble(t, Response, enough, []byte(anthropic(events...))); ok || err == nil {
				t.Errorf("assembled %s", body)
			}
		})
	}
}

// TestAssembleLongEvents takes events that a Stream does not hold.
func TestAssembleLongEvents(t *testing.T) {
	long := strings.Repeat("long ", MaxFrame/4)
	body := `{"id":"resp_1","object":"response","status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"` + long + `"}]}]}`
	sse := []byte(anthropic(`{"type":"response.created","response":{}}`, `{"type":"response.completed","response":`+body+`}`))
	for _, size := range []int{100 << 10, len(sse)} {
		cut := slices.Collect(slices.Chunk(sse, size))
		if got, ok, err := assemble(t, Response, 2*MaxFrame, cut...); !ok || string(got) != body {
			t.Fatalf("in pieces of %d: %v, %d bytes", size, err, len(got))
		}
		if _, ok, err := assemble(t, Response, MaxFrame, cut...); ok || err == nil {
			t.Fatal("assembled beyond the bound")
		}
	}
	chat := chatChunk(`{"index":0,"delta":{"role":"assistant","content":"` + long + `"},"finish_reason":"stop"}`)
	if got, ok, err := assemble(t, Chat, 2*MaxFrame, []byte(chat), []byte(done)); !ok || !bytes.Contains(got, []byte(long)) {
		t.Fatalf("a long chunk: %v", err)
	}
}

// TestAssembleBounded sees what an assembler holds, whatever it is fed.
func TestAssembleBounded(t *testing.T) {
	const most = 8 << 10
	a := NewAssembler(Chat, most)
	role := []byte(strings.TrimPrefix(chatChunk(`{"index":0,"delta":{"role":"assistant"}}`), "data: "))
	a.Event(bytes.TrimSpace(role))
	for i := range 100_000 {
		s := fmt.Sprintf(`{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"%0100d"}}]}`, i)
		a.Event([]byte(s))
		if len(a.chunks.choices) > 0 && cap(a.chunks.choices[0].content.raw) > 4*most {
			t.Fatalf("holds %d bytes", cap(a.chunks.choices[0].content.raw))
		}
	}
	if _, ok := a.JSON(); ok || a.Err() == nil || a.chunks.choices != nil {
		t.Error("an answer that is too long was kept")
	}
}

// TestAssembleAllocs: a chunk that only adds to a text costs no garbage.
func TestAssembleAllocs(t *testing.T) {
	a := NewAssembler(Chat, 64<<20)
	say := func(s string) []byte {
		return []byte(`{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":` + s + `,"finish_reason":null}]}`)
	}
	a.Event(say(`{"role":"assistant","content":""}`))
	plain, escaped := say(`{"content":"hello"}`), say(`{"content":"\n\"x"}`)
	a.Event(plain)
	a.chunks.choices[0].content.raw = make([]byte, 0, 1<<20)
	if n := testing.AllocsPerRun(1000, func() { a.Event(plain); a.Event(escaped) }); n > 0 {
		t.Errorf("%v allocations a chunk", n)
	}
	if a.Err() != nil {
		t.Fatal(a.Err())
	}
}

func BenchmarkAssemble(b *testing.B) {
	for _, c := range []struct{ name, delta string }{{"alike", `{"content":"hello"}`}, {"unlike", `{"content":"\u00e9"}`}} {
		b.Run(c.name, func(b *testing.B) {
			data := []byte(`{"id":"chatcmpl-c75ff4d8-e974-5016-850e-67d52dce3c5d","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":` + c.delta + `,"logprobs":null,"finish_reason":null}]}`)
			a := NewAssembler(Chat, 1<<40)
			for b.Loop() {
				a.Event(data)
				if len(a.chunks.choices[0].content.raw) > 1<<20 {
					a.chunks.choices[0].content.raw = a.chunks.choices[0].content.raw[:0]
				}
			}
		})
	}
}
