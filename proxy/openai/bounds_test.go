package openai

import (
	"bytes"
	"strings"
	"testing"
)

func metered(t *testing.T, kind Kind, body string) Request {
	t.Helper()
	r, err := Meter(kind, []byte(body))
	if err != nil {
		t.Fatalf("Meter(%.200s): %v", body, err)
	}
	return r
}

// TestCaps: the caps that a route obeys are brought down to the given one, added where there
// is none, and nothing else changes.
func TestCaps(t *testing.T) {
	for _, c := range []struct {
		name, body, want string
		kind             Kind
		model            string
	}{
		{"none", `{"messages":[]}`, `{"max_tokens":7,"messages":[]}`, Chat, ""},
		{"none at all", ` {}`, ` {"max_tokens":7}`, Chat, ""},
		{"nor a model", `{ }`, `{"model":"up","max_tokens":7 }`, Chat, "up"},
		{"nor a model, with others", `{"a":1}`, `{"model":"up","max_tokens":7,"a":1}`, Chat, "up"},
		{"with the model", `{"model":"x"}`, `{"max_tokens":7,"model":"up"}`, Chat, "up"},
		{"above", `{"max_tokens": 100 ,"x":1}`, `{"max_tokens": 7 ,"x":1}`, Chat, ""},
		{"below", `{"max_tokens":5}`, `{"max_tokens":5}`, Chat, ""},
		{"equal, oddly written", `{"max_tokens":7.0e0}`, `{"max_tokens":7.0e0}`, Chat, ""},
		{"null", `{"max_tokens":null}`, `{"max_tokens":7}`, Chat, ""},
		{"zero may be none", `{"max_completion_tokens":0}`, `{"max_completion_tokens":7}`, Chat, ""},
		{"both above", `{"max_tokens":10,"stream":false,"max_completion_tokens":20}`, `{"max_tokens":7,"stream":false,"max_completion_tokens":7}`, Chat, ""},
		{"one below", `{"max_tokens":3,"max_completion_tokens":20}`, `{"max_tokens":3,"max_completion_tokens":7}`, Chat, ""},
		{"one null", `{"max_tokens":3,"max_completion_tokens":null}`, `{"max_tokens":3,"max_completion_tokens":7}`, Chat, ""},
		{"escaped", `{"\u006dax_tokens":30}`, `{"\u006dax_tokens":7}`, Chat, ""},
		{"nested ones are others", `{"metadata":{"max_tokens":100}}`, `{"max_tokens":7,"metadata":{"max_tokens":100}}`, Chat, ""},
		{"what the route ignores is no cap", `{"max_completion_tokens":3}`, `{"max_tokens":7,"max_completion_tokens":3}`, Completion, ""},
		{"a completion of nothing", `{"max_tokens":0,"echo":true}`, `{"max_tokens":0,"echo":true}`, Completion, ""},
		{"a completion", `{"max_tokens":9}`, `{"max_tokens":7}`, Completion, ""},
		{"a response", `{"max_tokens":3}`, `{"max_output_tokens":7,"max_tokens":3}`, Response, ""},
		{"a capped response", `{"max_output_tokens":300}`, `{"max_output_tokens":7}`, Response, ""},
		{"a message", `{"max_tokens":300,"max_output_tokens":1}`, `{"max_tokens":7,"max_output_tokens":1}`, Message, ""},
		{"an uncapped message", `{"system":""}`, `{"max_tokens":7,"system":""}`, Message, ""},
		{"speech", `{"input":"x"}`, `{"max_completion_tokens":7,"input":"x"}`, Audio, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := metered(t, c.kind, c.body)
			if got := string(bytes.Join(r.Pieces([]byte(c.body), Changes{Model: c.model, Cap: 7}), nil)); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if got := string(bytes.Join(r.Pieces([]byte(c.body), Changes{}), nil)); got != c.body {
				t.Errorf("no edit asked for: %s", got)
			}
		})
	}
}

func TestCapsOfForms(t *testing.T) {
	for _, c := range []struct{ before, after []string }{
		{[]string{"model", "w"}, []string{"max_completion_tokens", "7", "model", "w"}},
		{[]string{"max_completion_tokens", "70", "model", "w"}, []string{"max_completion_tokens", "7", "model", "w"}},
		{[]string{"max_tokens", "", "model", "w"}, []string{"max_tokens", "7", "model", "w"}},
		{[]string{"max_tokens", "5", "model", "w"}, []string{"max_tokens", "5", "model", "w"}},
	} {
		body := []byte(formOf(c.before...))
		r, err := MeterMultipart(boundary, body)
		if err != nil {
			t.Fatal(err)
		}
		if got := string(bytes.Join(r.Pieces(body, Changes{Cap: 7}), nil)); got != formOf(c.after...) {
			t.Errorf("got  %q\nwant %q", got, formOf(c.after...))
		}
	}
}

// TestBeyondAndRounds: what the body does not show is found, however it is written.
func TestBeyondAndRounds(t *testing.T) {
	part := func(p string) string {
		return `{"messages":[{"role":"user","content":[{"type":"text","text":"x"},` + p + `]}]}`
	}
	for _, c := range []struct {
		body           string
		kind           Kind
		beyond, rounds string
	}{
		{`{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]}`, Chat, "", ""},
		{part(`{"type":"image_url","image_url":{"url":"data:x"}}`), Chat, "", ""},
		{part(`{"type":"input_audio","input_audio":{"data":"x"}}`), Chat, "", ""},
		{part(`{"type":"video_url","video_url":{"url":"x"}}`), Chat, "video_url", ""},
		{part(`{"type":"v\u0069deo_url","uuid":"x"}`), Chat, "video_url", ""},
		{part(`{"type":"file","file":{"file_id":"x"}}`), Chat, "file", ""},
		{part(`{"type":"image_embeds","image_embeds":"x"}`), Chat, "image_embeds", ""},
		{part(`{"type":"document","source":{"type":"base64","data":"x"}}`), Message, "document", ""},
		{part(`{"type":"image","source":{"type":"base64","data":"x"}}`), Message, "", ""},
		{`{"prompt":"x","prompt_embeds":"AAAA"}`, Completion, "prompt_embeds", ""},
		{`{"prompt":"x","prompt_embeds":null}`, Completion, "", ""},
		{`{"messages":[],"chat_template":"{% for i in range(9) %}x{% endfor %}"}`, Chat, "chat_template", ""},
		{`{"messages":[],"\u0063hat_template":"x"}`, Chat, "chat_template", ""},
		{`{"input":"x","conversation":"conv_1"}`, Response, "conversation", ""},
		{`{"input":"x","prompt":{"id":"p"}}`, Response, "prompt", ""},
		{`{"input":[{"type":"item_r\u0065ference","id":"x"}]}`, Response, "item_reference", ""},
		{`{"input":[{"id":"x"}]}`, Response, "item_reference", ""},
		{`{"input":[{"id":"x","role":"user","content":"y"}]}`, Response, "", ""},
		{`{"input":"x","tools":[{"type":"function","name":"f"},{"type":"custom","name":"g"},{"name":"h"}]}`, Response, "", ""},
		{`{"input":"x","tools":[{"type":"function","name":"f"},{"type":"web_search_preview"}]}`, Response, "", "tools"},
		{`{"input":"x","tools":[{"t\u0079pe":"mcp"}]}`, Response, "", "tools"},
		{`{"messages":[],"tools":[{"type":"web_search_20250305"}]}`, Message, "", "tools"},
		{`{"messages":[],"web_search_options":{}}`, Chat, "", "web_search_options"},
		{`{"messages":[],"mcp_servers":[{}]}`, Message, "", "mcp_servers"},
	} {
		if b := metered(t, c.kind, c.body).Bounds; b.Beyond != c.beyond || b.Rounds != c.rounds {
			t.Errorf("%s: beyond %q, rounds %q", c.body, b.Beyond, b.Rounds)
		}
	}
}

func TestBounds(t *testing.T) {
	for _, c := range []struct {
		body string
		kind Kind
		want Bounds
	}{
		{`{"min_tokens":5,"max_tokens":null}`, Completion, Bounds{MinOutput: 5, Uncapped: true, Text: 34}},
		{`{"echo":true}`, Completion, Bounds{Echo: true, Text: 13}},
		{`{"prompt":[1,22,333]}`, Completion, Bounds{Text: 21 - 6}},
		{`{"thinking":{"type":"enabled","budget_tokens":1024}}`, Message, Bounds{MinOutput: 1025, Text: 52}},
		{`{"messages":[{"role":"user"},{"content":[{"text":"é"}]}]}`, Chat, Bounds{Messages: 2, Text: 58}},
		{`{"messages":[{"content":[{"type":"image_url","image_url":{"url":"AAAA"}}]}]}`, Chat, Bounds{Messages: 1, Text: 76 - 14}},
		// {"a":[1]} is 9 bytes, rendered 4 times as long; four elements are indented, two by two levels and two by three.
		{`{"tools":{"a":[1]}}`, Chat, Bounds{Tools: true, Hidden: "tools", Text: 19 + 3*9 + 2*(2+8) + 2*(2+12)}},
		{`{"query":"abc","documents":["x","y","z"]}`, Pooling, Bounds{Text: 41 + 2*5}},
	} {
		if got := metered(t, c.kind, c.body).Bounds; got != c.want {
			t.Errorf("%s:\ngot  %+v\nwant %+v", c.body, got, c.want)
		}
	}
	for _, body := range []string{`{"min_tokens":-1}`, `{"min_tokens":"5"}`, `{"Min_tokens":5}`} {
		if _, err := Meter(Chat, []byte(body)); err == nil {
			t.Errorf("%s was taken", body)
		}
	}
	if _, err := Meter(Completion, []byte(`{"echo":1}`)); err == nil || !strings.Contains(err.Error(), "echo") {
		t.Errorf("%v", err)
	}
}
