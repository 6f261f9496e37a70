package openai

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

func TestInspect(t *testing.T) {
	chat := func(message, finish string) string {
		return `{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",` + message + `},"finish_reason":` + finish + `}],"usage":{"prompt_tokens":3,"completion_tokens":4}}`
	}
	message := func(content, stop string) string {
		return `{"id":"m","type":"message","role":"assistant","model":"m","content":[` + content + `],"stop_reason":` + stop + `,"usage":{"input_tokens":3,"output_tokens":4}}`
	}
	response := func(output, rest string) string {
		return `{"id":"r","object":"response","output":[` + output + `],"usage":{"input_tokens":3,"output_tokens":4},` + rest + `}`
	}
	usage := Usage{Input: 3, Output: 4, Known: true}
	for _, c := range []struct {
		name  string
		kind  Kind
		body  string
		want  Facts
		texts []string
	}{
		{"text", Chat, chat(`"content":"a \"b\" \u00e9"`, `"stop"`), Facts{FinishReasons: []string{"stop"}, Complete: true, Usage: usage}, []string{`a "b" é`}},
		{"length", Chat, chat(`"content":"a"`, `"length"`), Facts{FinishReasons: []string{"length"}, Length: true, Complete: true, Usage: usage}, []string{"a"}},
		{"a reason that nobody knows", Chat, chat(`"content":"a"`, `"abort"`), Facts{FinishReasons: []string{"abort"}, Usage: usage}, []string{"a"}},
		{"no reason", Chat, chat(`"content":"a"`, `null`), Facts{FinishReasons: []string{""}, Usage: usage}, []string{"a"}},
		{"a filter", Chat, chat(`"content":""`, `"content_filter"`), Facts{FinishReasons: []string{"content_filter"}, Refused: true, Complete: true, Usage: usage}, nil},
		{"a refusal", Chat, chat(`"content":null,"refusal":"no"`, `"stop"`), Facts{FinishReasons: []string{"stop"}, Refused: true, Complete: true, Usage: usage}, []string{"no"}},
		{"thoughts", Chat, chat(`"content":"a","reasoning":"h","reasoning_content":"m","tool_calls":[]`, `"stop"`), Facts{FinishReasons: []string{"stop"}, Complete: true, Usage: usage}, []string{"a", "h", "m"}},
		{"tools", Chat, chat(`"content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"day\":\"2026-11-30\"}"}},{"id":"2","type":"custom","custom":{"name":"g","input":"x"}}]`, `"tool_calls"`), Facts{FinishReasons: []string{"tool_calls"}, Tools: true, Complete: true, Usage: usage}, []string{`{"day":"2026-11-30"}`, "x"}},
		{"an old function call", Chat, chat(`"content":null,"function_call":{"name":"f","arguments":"{}"}`, `"function_call"`), Facts{FinishReasons: []string{"function_call"}, Tools: true, Complete: true, Usage: usage}, []string{"{}"}},
		{"parts", Chat, chat(`"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]`, `"stop"`), Facts{FinishReasons: []string{"stop"}, Complete: true, Usage: usage}, []string{"a", "b"}},
		{"an error within a 200", Chat, `{"error":{"message":"boom","type":"server_error"}}`, Facts{Failure: &Failure{Message: "boom", Type: "server_error"}}, nil},
		{"an error beside an answer", Chat, strings.Replace(chat(`"content":"a"`, `"stop"`), `"choices"`, `"error":"boom","choices"`, 1), Facts{Failure: &Failure{Message: "boom"}, Usage: usage}, nil},
		{"completions", Completion, `{"id":"c","choices":[{"text":"a","finish_reason":"stop"},{"text":"b","finish_reason":"length"}]}`, Facts{FinishReasons: []string{"stop", "length"}, Length: true, Complete: true}, []string{"a", "b"}},
		{"message", Message, message(`{"type":"thinking","thinking":"hm"},{"type":"text","text":"a"}`, `"end_turn"`), Facts{FinishReasons: []string{"end_turn"}, Complete: true, Usage: usage}, []string{"a", "hm"}},
		{"message with a tool", Message, message(`{"type":"tool_use","id":"t","name":"f","input":{"a":1}}`, `"tool_use"`), Facts{FinishReasons: []string{"tool_use"}, Tools: true, Complete: true, Usage: usage}, []string{`{"a":1}`}},
		{"message cut off", Message, message(`{"type":"text","text":"a"}`, `"max_tokens"`), Facts{FinishReasons: []string{"max_tokens"}, Length: true, Complete: true, Usage: usage}, []string{"a"}},
		{"message refused", Message, message(``, `"refusal"`), Facts{FinishReasons: []string{"refusal"}, Refused: true, Complete: true, Usage: usage}, nil},
		{"message that goes on", Message, message(``, `"pause_turn"`), Facts{FinishReasons: []string{"pause_turn"}, Usage: usage}, nil},
		{"message error", Message, `{"type":"error","error":{"type":"overloaded_error","message":"busy"}}`, Facts{Failure: &Failure{Message: "busy", Type: "overloaded_error"}}, nil},
		{"response", Response, response(`{"type":"reasoning","summary":[{"type":"summary_text","text":"s"}]},{"type":"message","content":[{"type":"output_text","text":"a"}]}`, `"status":"completed"`), Facts{FinishReasons: []string{"completed"}, Complete: true, Usage: usage}, []string{"a", "s"}},
		{"response cut off", Response, response(``, `"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}`), Facts{FinishReasons: []string{"incomplete"}, Length: true, Complete: true, Usage: usage}, nil},
		{"response filtered", Response, response(``, `"status":"incomplete","incomplete_details":{"reason":"content_filter"}`), Facts{FinishReasons: []string{"incomplete"}, Refused: true, Complete: true, Usage: usage}, nil},
		{"response with a refusal", Response, response(`{"type":"message","content":[{"type":"refusal","refusal":"no"}]}`, `"status":"completed"`), Facts{FinishReasons: []string{"completed"}, Refused: true, Complete: true, Usage: usage}, []string{"no"}},
		{"response with a tool", Response, response(`{"type":"function_call","name":"f","arguments":"{}"}`, `"status":"completed"`), Facts{FinishReasons: []string{"completed"}, Tools: true, Complete: true, Usage: usage}, []string{"{}"}},
		{"response in the background", Response, response(``, `"status":"queued"`), Facts{FinishReasons: []string{"queued"}, Usage: usage}, nil},
		{"response that failed", Response, response(``, `"status":"failed","error":{"code":"server_error","message":"x"}`), Facts{Failure: &Failure{Message: "x", Code: "server_error"}, Usage: usage}, nil},
		{"embeddings", Embedding, `{"object":"list","data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":3,"total_tokens":3}}`, Facts{Complete: true, Usage: Usage{Input: 3, Known: true}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Inspect(c.kind, []byte(c.body))
			if err != nil {
				t.Fatal(err)
			}
			var texts []string
			got.Texts(func(text []byte) bool {
				texts = append(texts, string(text))
				return true
			})
			if !slices.Equal(texts, c.texts) {
				t.Errorf("texts %q, want %q", texts, c.texts)
			}
			var said []string
			got.Said(func(text []byte) bool {
				said = append(said, string(text))
				return true
			})
			if len(said) != len(got.texts) || !slices.Equal(said, texts[:len(said)]) {
				t.Errorf("it says %q of %q", said, texts)
			}
			got.texts, got.thought = nil, nil
			if (got.Failure == nil) != (c.want.Failure == nil) || got.Failure != nil && *got.Failure != *c.want.Failure {
				t.Errorf("failure %+v, want %+v", got.Failure, c.want.Failure)
			}
			got.Failure, c.want.Failure = nil, nil
			if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
	for kind, bodies := range map[Kind][]string{
		Chat:     {``, `[]`, `{`, `{}`, `{"choices":[]}`, `{"choices":{}}`, `{"choices":[1]}`, `{"choices":[{"finish_reason":"stop","message":"x"}]}`, "{\"choices\":\"\xff\"}"},
		Message:  {`{}`, `{"content":"a"}`, `{"content":[1]}`},
		Response: {`{}`, `{"output":null}`, `{"output":[[]]}`},
	} {
		for _, body := range bodies {
			if f, err := Inspect(kind, []byte(body)); err == nil || f.Complete {
				t.Errorf("%d %s: %+v", kind, body, f)
			}
		}
	}
}

// TestInspectStops: whoever has seen enough sees no more.
func TestInspectStops(t *testing.T) {
	f, err := Inspect(Completion, []byte(`{"choices":[{"text":"a","finish_reason":"stop"},{"text":"b","finish_reason":"stop"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	f.Texts(func([]byte) bool { seen++; return false })
	if seen != 1 {
		t.Errorf("saw %d texts", seen)
	}
	f, err = Inspect(Chat, []byte(`{"choices":[{"message":{"content":"a","reasoning":"b"},"finish_reason":"stop"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	seen = 0
	f.Texts(func([]byte) bool { seen++; return false })
	f.Said(func([]byte) bool { seen++; return true })
	if seen != 2 {
		t.Errorf("saw %d texts", seen)
	}
}

// TestInspectPairs: an answer is found whole and complete, whichever way it came.
func TestInspectPairs(t *testing.T) {
	fake := newFake(t)
	all := pairs()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		p := all[name]
		options := `,"stream":true`
		if p.kind == Chat || p.kind == Completion {
			options += `,"stream_options":{"include_usage":true}`
		}
		whole, err := Inspect(p.kind, ask(t, fake, p.path, p.body+"}"))
		if err != nil {
			t.Fatal(name, err)
		}
		streamed, err := Inspect(p.kind, assembled(t, p.kind, ask(t, fake, p.path, p.body+options+"}")))
		if err != nil {
			t.Fatal(name, err)
		}
		texts := func(f *Facts) (all []string) {
			f.Texts(func(text []byte) bool { all = append(all, string(text)); return true })
			f.texts, f.thought = nil, nil
			return all
		}
		if a, b := texts(&whole), texts(&streamed); !slices.Equal(a, b) || len(a) == 0 {
			t.Errorf("%s: %q, %q", name, a, b)
		}
		if a, b := fmt.Sprintf("%+v", whole), fmt.Sprintf("%+v", streamed); a != b {
			t.Errorf("%s: %s, %s", name, a, b)
		}
	}
}
