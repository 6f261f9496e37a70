package ladder

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	sdk "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"pgregory.net/rapid"

	"headgate/proxy/openai"
)

const busy = "We are busy.\n\"Later\", <please> & \u2028 thank you 🙏"

func answer(kind openai.Kind) Answer {
	return Answer{Kind: kind, Model: "llama-8b", Text: busy, ID: "0001", Created: time.Unix(1_800_000_000, 5)}
}

var kinds = map[string]openai.Kind{"chat": openai.Chat, "completion": openai.Completion, "response": openai.Response, "message": openai.Message}

// body is an answer's, which must be there.
func body(t testing.TB, a Answer) []byte {
	t.Helper()
	b, typ, err := a.Body()
	if err != nil {
		t.Fatal(err)
	}
	if want := map[bool]string{false: "application/json", true: "text/event-stream; charset=utf-8"}[a.Stream]; typ != want {
		t.Errorf("Content-Type %q, want %q", typ, want)
	}
	return b
}

// whole holds a JSON answer against what the gateway's own readers find in it.
func whole(t testing.TB, a Answer, b []byte, choices int) {
	t.Helper()
	facts, err := openai.Inspect(a.Kind, b)
	if err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	ends := map[openai.Kind]string{openai.Chat: "stop", openai.Completion: "stop", openai.Response: "completed", openai.Message: "end_turn"}
	if !facts.Complete || facts.Tools || facts.Refused || facts.Length || facts.Failure != nil || facts.Usage != (openai.Usage{Known: true}) ||
		!slices.Equal(facts.FinishReasons, slices.Repeat([]string{ends[a.Kind]}, choices)) {
		t.Errorf("facts %+v", facts)
	}
	said := 0
	facts.Said(func(text []byte) bool {
		if said++; string(text) != a.Text {
			t.Errorf("text %q, want %q", text, a.Text)
		}
		return true
	})
	if said != choices {
		t.Errorf("%d texts, want %d", said, choices)
	}
	s := openai.NewScanner(a.Kind)
	_, _ = s.Write(b)
	if u := s.Usage(); u != (openai.Usage{Known: true}) || s.Failure() != nil {
		t.Errorf("scanned: %+v, %v", u, s.Failure())
	}
	var top struct {
		ID, Model   string
		Fingerprint string `json:"system_fingerprint"`
		Created     int64
		CreatedAt   int64 `json:"created_at"`
	}
	if err := json.Unmarshal(b, &top); err != nil || top.Model != a.Model || !strings.HasSuffix(top.ID, "_"+a.ID) && !strings.HasSuffix(top.ID, "-"+a.ID) {
		t.Errorf("%v, %+v", err, top)
	}
	switch a.Kind {
	case openai.Message:
	case openai.Response:
		if top.CreatedAt != a.Created.Unix() {
			t.Errorf("created at %d", top.CreatedAt)
		}
	default:
		if top.Created != a.Created.Unix() || top.Fingerprint != "headgate-static" {
			t.Errorf("%+v", top)
		}
	}
}

// assembled makes a stream's answer one again.
func assembled(t testing.TB, kind openai.Kind, sse []byte) (b []byte, usage openai.Usage) {
	t.Helper()
	s, a := openai.NewStream(kind, false), openai.NewAssembler(kind, 1<<20)
	s.Assemble(a)
	var out []byte
	last := 0
	emit := func(f openai.Frame) error {
		out = append(out, f.Raw...)
		if f.Last {
			last++
		}
		return nil
	}
	if err := s.Feed(sse, emit); err != nil {
		t.Fatal(err)
	}
	if err := s.End(emit); err != nil || string(out) != string(sse) || last != 1 || s.Failure() != nil {
		t.Fatalf("not whole: %v, %d last frames, %v: %s", err, last, s.Failure(), sse)
	}
	b, ok := a.JSON()
	if !ok {
		t.Fatalf("%v: %s", a.Err(), sse)
	}
	return b, s.Usage()
}

// TestStaticAnswers are what a client library expects of each kind, whole and streamed.
func TestStaticAnswers(t *testing.T) {
	for name, kind := range kinds {
		t.Run(name, func(t *testing.T) {
			a := answer(kind)
			b := body(t, a)
			whole(t, a, b, 1)
			if again := body(t, a); string(again) != string(b) {
				t.Errorf("another one: %s", again)
			}
			a.Stream, a.IncludeUsage = true, true
			back, usage := assembled(t, kind, body(t, a))
			whole(t, a, back, 1)
			if usage != (openai.Usage{Known: true}) {
				t.Errorf("usage %+v", usage)
			}
			a.IncludeUsage = false
			sse := string(body(t, a))
			if usage := strings.Contains(sse, `"prompt_tokens"`); usage || strings.Contains(sse, "[DONE]") != (kind == openai.Chat || kind == openai.Completion) {
				t.Errorf("usage unasked %t: %s", usage, sse)
			}
		})
	}
}

// TestStaticChoices: as many as were asked for, within bounds.
func TestStaticChoices(t *testing.T) {
	for _, kind := range []openai.Kind{openai.Chat, openai.Completion} {
		for asked, want := range map[int64]int{-1: 1, 0: 1, 1: 1, 3: 3, 128: 128, 1024: 128} {
			a := answer(kind)
			a.Choices = asked
			whole(t, a, body(t, a), want)
			a.Stream = true
			sse := body(t, a)
			if n := strings.Count(string(sse), `"finish_reason":"stop"`); n != want {
				t.Errorf("%d asked for: %d ended", asked, n)
			}
		}
	}
}

// TestNoStaticAnswer for what generates no text.
func TestNoStaticAnswer(t *testing.T) {
	for _, kind := range []openai.Kind{openai.Embedding, openai.CountTokens, openai.Tokenize, openai.Detokenize, openai.Pooling, openai.Audio} {
		a := answer(kind)
		if b, _, err := a.Body(); err == nil {
			t.Errorf("kind %d: %s", kind, b)
		}
		if CanAnswer(kind, &openai.Request{}, []byte("{}")) {
			t.Errorf("kind %d can be answered", kind)
		}
	}
}

// TestAnyTextIsAnswered: whatever the policy says arrives, whole and streamed.
func TestAnyTextIsAnswered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := answer(rapid.SampledFrom([]openai.Kind{openai.Chat, openai.Completion, openai.Response, openai.Message}).Draw(t, "kind"))
		a.Text = rapid.StringN(1, 2000, -1).Draw(t, "text")
		a.Model = rapid.StringN(1, 20, -1).Draw(t, "model")
		a.Stream = rapid.Bool().Draw(t, "stream")
		b, _, err := a.Body()
		if err != nil {
			t.Fatal(err)
		}
		if a.Stream {
			s, as := openai.NewStream(a.Kind, false), openai.NewAssembler(a.Kind, 1<<20)
			s.Assemble(as)
			if err := s.Feed(b, func(openai.Frame) error { return nil }); err != nil {
				t.Fatal(err)
			}
			var ok bool
			if b, ok = as.JSON(); !ok {
				t.Fatal(as.Err())
			}
		}
		facts, err := openai.Inspect(a.Kind, b)
		if err != nil || !facts.Complete {
			t.Fatalf("%v, %+v: %s", err, facts, b)
		}
		facts.Said(func(text []byte) bool {
			if string(text) != a.Text {
				t.Fatalf("%q, want %q", text, a.Text)
			}
			return true
		})
	})
}

// TestStaticAnswersBySDK: OpenAI's own library reads them, whole and streamed.
func TestStaticAnswersBySDK(t *testing.T) {
	mux := http.NewServeMux()
	for path, kind := range map[string]openai.Kind{"/chat/completions": openai.Chat, "/completions": openai.Completion, "/responses": openai.Response} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			var in struct {
				Stream  bool
				Options struct {
					Usage bool `json:"include_usage"`
				} `json:"stream_options"`
			}
			if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
				t.Error(err)
			}
			a := answer(kind)
			a.Stream, a.IncludeUsage = in.Stream, in.Options.Usage
			b, typ, err := a.Body()
			if err != nil {
				t.Error(err)
			}
			w.Header().Set("Content-Type", typ)
			_, _ = w.Write(b)
		})
	}
	server := httptest.NewServer(mux)
	defer server.Close()
	c := sdk.NewClient(option.WithBaseURL(server.URL), option.WithAPIKey("k"), option.WithMaxRetries(0))
	want := func(name, text, id string, err error) {
		t.Helper()
		if err != nil || text != busy || !strings.HasSuffix(id, "0001") {
			t.Errorf("%s: %q, %q, %v", name, text, id, err)
		}
	}
	ctx := t.Context()

	chat := sdk.ChatCompletionNewParams{Model: "llama-8b", Messages: []sdk.ChatCompletionMessageParamUnion{sdk.UserMessage("hi")}, StreamOptions: sdk.ChatCompletionStreamOptionsParam{IncludeUsage: sdk.Bool(true)}}
	got, err := c.Chat.Completions.New(ctx, chat)
	if err != nil {
		t.Fatal(err)
	}
	want("chat", got.Choices[0].Message.Content, got.ID, err)
	stream := c.Chat.Completions.NewStreaming(ctx, chat)
	var acc sdk.ChatCompletionAccumulator
	for stream.Next() {
		if !acc.AddChunk(stream.Current()) {
			t.Errorf("a chunk that does not belong: %s", stream.Current().RawJSON())
		}
	}
	if len(acc.Choices) != 1 {
		t.Fatalf("%+v", acc)
	}
	want("chat streamed", acc.Choices[0].Message.Content, acc.ID, stream.Err())
	if f := acc.Choices[0].FinishReason; f != "stop" || acc.Usage.TotalTokens != 0 {
		t.Errorf("%+v", acc)
	}

	prompt := sdk.CompletionNewParams{Model: "llama-8b", Prompt: sdk.CompletionNewParamsPromptUnion{OfString: sdk.String("hi")}}
	completion, err := c.Completions.New(ctx, prompt)
	if err != nil {
		t.Fatal(err)
	}
	want("completion", completion.Choices[0].Text, completion.ID, err)
	text, id, finish := "", "", ""
	pieces := c.Completions.NewStreaming(ctx, prompt)
	for pieces.Next() {
		p := pieces.Current()
		for _, choice := range p.Choices {
			text, id, finish = text+choice.Text, p.ID, string(choice.FinishReason)
		}
	}
	want("completion streamed", text, id, pieces.Err())
	if finish != "stop" {
		t.Errorf("finish_reason %q", finish)
	}

	input := responses.ResponseNewParams{Model: "llama-8b", Input: responses.ResponseNewParamsInputUnion{OfString: sdk.String("hi")}}
	response, err := c.Responses.New(ctx, input)
	if err != nil {
		t.Fatal(err)
	}
	want("response", response.OutputText(), response.ID, err)
	text, id = "", ""
	var names []string
	events := c.Responses.NewStreaming(ctx, input)
	for events.Next() {
		e := events.Current()
		names = append(names, e.Type)
		switch e.Type {
		case "response.output_text.delta":
			text += e.Delta
		case "response.completed":
			id = e.Response.ID
			if e.Response.OutputText() != busy {
				t.Errorf("the last event: %s", e.RawJSON())
			}
		}
	}
	want("response streamed", text, id, events.Err())
	if names[0] != "response.created" || names[len(names)-1] != "response.completed" {
		t.Errorf("events %v", names)
	}
}

// request meters a body, which must be one.
func request(t testing.TB, kind openai.Kind, body string) *openai.Request {
	t.Helper()
	in, err := openai.Meter(kind, []byte(body))
	if err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return &in
}

// TestCut: what is cut and to what, and what is answered statically.
func TestCut(t *testing.T) {
	const tools = `"tools":[{"type":"function","function":{"name":"f"}}]`
	for _, c := range []struct {
		kind   openai.Kind
		fields string
		limit  int64 // 0: not cut
		static bool
	}{
		{openai.Chat, ``, 100, true},
		{openai.Chat, `"max_tokens":101`, 100, true},
		{openai.Chat, `"max_tokens":100`, 0, true},
		{openai.Chat, `"max_completion_tokens":1000,"max_tokens":5`, 100, true},
		{openai.Chat, `"max_tokens":0`, 100, true}, // some servers take it for no cap
		{openai.Chat, `"max_tokens":null`, 100, true},
		{openai.Chat, `"min_tokens":150`, 150, true},
		{openai.Chat, `"min_tokens":150,"max_tokens":151`, 150, true},
		{openai.Chat, `"min_tokens":150,"max_tokens":150`, 0, true},
		{openai.Chat, tools, 0, true},
		{openai.Chat, tools + `,"tool_choice":"auto"`, 0, true},
		{openai.Chat, tools + `,"tool_choice":"none"`, 0, true},
		{openai.Chat, tools + `,"tool_choice":null`, 0, true},
		{openai.Chat, tools + `,"tool_choice":"required"`, 0, false},
		{openai.Chat, tools + `,"tool_choice":{"type":"function","function":{"name":"f"}}`, 0, false},
		{openai.Chat, `"functions":[{"name":"f"}],"function_call":{"name":"f"}`, 0, false},
		{openai.Chat, `"web_search_options":{}`, 0, true},
		{openai.Chat, `"response_format":{"type":"text"}`, 100, true},
		{openai.Chat, `"response_format":null`, 100, true},
		{openai.Chat, `"response_format":{"type":"json_object"}`, 0, false},
		{openai.Chat, `"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"type":"text"}}}`, 0, false},
		{openai.Chat, `"response_format":{"json_schema":{"type":"text"}}`, 0, false},
		{openai.Chat, `"resp\u006fnse_format":{"typ\u0065":"json_object"}`, 0, false},
		{openai.Chat, `"response_format":"json"`, 0, false},
		{openai.Chat, `"structured_outputs":{"regex":"a+"}`, 0, false},
		{openai.Chat, `"guided_choice":["a","b"]`, 0, false},
		{openai.Chat, `"guided_json":null`, 100, true},
		{openai.Chat, `"metadata":{"response_format":{"type":"json_object"}}`, 100, true},
		{openai.Chat, `"text":{"format":{"type":"json_schema"}}`, 100, true}, // a response's
		{openai.Completion, ``, 0, true},                                     // 16
		{openai.Completion, `"max_tokens":null`, 100, true},
		{openai.Completion, `"max_tokens":0`, 0, false},
		{openai.Completion, `"max_tokens":500`, 100, true},
		{openai.Completion, `"max_tokens":500,"echo":true`, 100, false},
		{openai.Completion, `"max_tokens":500,"guided_regex":"a"`, 0, false},
		{openai.Response, ``, 100, true},
		{openai.Response, `"max_output_tokens":500`, 100, true},
		{openai.Response, `"background":true`, 100, false},
		{openai.Response, `"text":{"verbosity":"low"}`, 100, true},
		{openai.Response, `"text":{"format":{"type":"text"}}`, 100, true},
		{openai.Response, `"text":{"format":{"type":"json_object"}}`, 0, false},
		{openai.Response, `"prompt":{"id":"pmpt_1"}`, 0, true},
		{openai.Response, `"tools":[{"type":"web_search"}]`, 0, true},
		{openai.Message, `"max_tokens":500`, 100, true},
		{openai.Message, `"max_tokens":50`, 0, true},
		{openai.Message, `"max_tokens":5000,"thinking":{"type":"enabled","budget_tokens":2048}`, 2049, true},
		{openai.Message, `"max_tokens":500,"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"auto"}`, 0, true},
		{openai.Message, `"max_tokens":500,"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"any"}`, 0, false},
		{openai.Message, `"max_tokens":500,"output_config":{"effort":"low"}`, 100, true},
		{openai.Message, `"max_tokens":500,"output_config":{"format":{"type":"json_schema","schema":{}}}`, 0, false},
		{openai.Message, `"max_tokens":500,"output_format":{"type":"json_schema","schema":{}}`, 0, false},
		{openai.Embedding, ``, 0, false},
		{openai.Pooling, ``, 0, false},
	} {
		b := `{"model":"m"}`
		if c.fields != "" {
			b = fmt.Sprintf(`{"model":"m", %s}`, c.fields)
		}
		in := request(t, c.kind, b)
		if limit, ok := Cut(c.kind, in, []byte(b), 100); limit != c.limit || ok != (c.limit > 0) {
			t.Errorf("kind %d, %s: cut at %d, %t, want %d", c.kind, b, limit, ok, c.limit)
		}
		if _, ok := Cut(c.kind, in, []byte(b), 0); ok {
			t.Errorf("kind %d, %s: cut to nothing", c.kind, b)
		}
		if got := CanAnswer(c.kind, in, []byte(b)); got != c.static {
			t.Errorf("kind %d, %s: answered statically %t", c.kind, b, got)
		}
	}
}

// TestACutRequestIsStillOne: what is sent after a cut has that cap, and none above it.
func TestACutRequestIsStillOne(t *testing.T) {
	for _, kind := range kinds {
		b := []byte(`{"model":"m","max_tokens":500,"max_output_tokens":500}`)
		in := request(t, kind, string(b))
		limit, ok := Cut(kind, in, b, 100)
		if !ok {
			t.Fatalf("kind %d is not cut", kind)
		}
		var sent strings.Builder
		for _, p := range in.Pieces(b, openai.Changes{Cap: limit}) {
			sent.Write(p)
		}
		if got := request(t, kind, sent.String()).MaxOutput; got != 100 {
			t.Errorf("kind %d: %s", kind, sent.String())
		}
	}
}

// FuzzShape holds what is read of a body against encoding/json.
func FuzzShape(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"response_format":{"type":"json_object"}}`, `{"text":{"format":{"type":"x"}}}`, `{"tool_choice":"required"}`, ` {"tool_choice" : {"type" : "auto"} } `,
		`{"r\u0065gex":1}`, `{"response_format":{"type":"text","type2":[{"type":"x"}]}}`, `[]`, `"response_format"`, `{"output_config":{"format":null}}`, `{"messages":[{"regex":1}],"ebnf":"a"}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, kind := range kinds {
			got := shapeOf(kind, []byte(s))
			if _, err := openai.Meter(kind, []byte(s)); err != nil {
				continue // not sound: it must not panic, no more
			}
			if want := naive(t, kind, s); got != want {
				t.Errorf("kind %d, %s: %+v, want %+v", kind, s, got, want)
			}
		}
	})
}

// naive is shapeOf by other means.
func naive(t *testing.T, kind openai.Kind, s string) (sh shape) {
	var m map[string]any
	if err := json.Unmarshal([]byte(s), &m); err != nil {
		t.Fatal(err)
	}
	prescribes := func(v any) bool {
		if o, ok := v.(map[string]any); ok {
			return o["type"] != "text"
		}
		return v != nil
	}
	inside := func(v any) any {
		o, _ := v.(map[string]any)
		return o["format"]
	}
	formats := []any{
		m["response_format"], inside(m["output_config"]), m["output_format"], m["structured_outputs"], m["json_schema"], m["regex"], m["ebnf"], m["grammar"],
		m["guided_json"], m["guided_regex"], m["guided_choice"], m["guided_grammar"],
	}
	if kind == openai.Response {
		formats = append(formats, inside(m["text"]))
	}
	sh.structured = slices.ContainsFunc(formats, prescribes)
	for _, name := range []string{"tool_choice", "function_call"} {
		v := m[name]
		if o, ok := v.(map[string]any); ok {
			v = o["type"]
			if v == nil {
				v = "a function"
			}
		}
		sh.forced = sh.forced || v != nil && v != "auto" && v != "none"
	}
	return sh
}
