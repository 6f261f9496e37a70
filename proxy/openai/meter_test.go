package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// want builds what the meter should find: defaults changed by set.
func want(set func(r *Request)) Request {
	r := Request{MaxOutput: -1, Sequences: 1, Inputs: 1}
	set(&r)
	return r
}

func meterOK(t *testing.T, kind Kind, body string) Request {
	t.Helper()
	r, err := Meter(kind, []byte(body))
	if err != nil {
		t.Fatalf("Meter(%.200s): %v", body, err)
	}
	r.spans, r.Bounds, r.Sampling, r.Store, r.Outside = spans{}, Bounds{}, Sampling{}, false, ""
	return r
}

func TestMeter(t *testing.T) {
	payload := strings.Repeat("QUJD", 1000)
	for _, c := range []struct {
		name string
		kind Kind
		body string
		want Request
	}{
		{"smallest", Chat, `{}`, want(func(r *Request) {})},
		{"white space", Chat, " \n{ \"model\" : \"m\" ,\t\"max_tokens\" : 5 }\r\n", want(func(r *Request) { r.Model, r.HasModel, r.MaxOutput = "m", true, 5 })},
		{"null fields", Chat, `{"model":null,"stream":null,"max_tokens":null,"n":null,"stream_options":null,"user":null}`, want(func(r *Request) {})},
		{"empty model", Chat, `{"model":""}`, want(func(r *Request) {})},
		{"escaped names mean the same", Chat, `{"\u006dax_tokens":7,"\u006d\u006fdel":"m\u00fc"}`, want(func(r *Request) { r.Model, r.HasModel, r.MaxOutput = "mü", true, 7 })},
		{"larger cap wins", Chat, `{"max_tokens":1,"max_completion_tokens":1000}`, want(func(r *Request) { r.MaxOutput = 1000 })},
		{"larger cap wins, other order", Chat, `{"max_completion_tokens":1,"max_tokens":1000}`, want(func(r *Request) { r.MaxOutput = 1000 })},
		{"zero is a cap", Completion, `{"max_tokens":0,"echo":true}`, want(func(r *Request) { r.MaxOutput = 0 })},
		{"whole numbers in other spellings", Chat, `{"max_tokens":1.6e1,"n":2.0}`, want(func(r *Request) { r.MaxOutput, r.Sequences = 16, 2 })},
		{"n and best_of", Completion, `{"prompt":["a","bc","d"],"n":2,"best_of":4}`, want(func(r *Request) { r.Sequences, r.Inputs, r.InputBytes = 12, 3, 4 })},
		{"beams", Completion, `{"prompt":"a","n":5,"use_beam_search":true}`, want(func(r *Request) { r.Sequences, r.InputBytes = 5, 1 })},
		{"prompt of ids", Completion, `{"prompt":[1,2,3]}`, want(func(r *Request) { r.InputTokens = 3 })},
		{"prompts of ids", Completion, `{"prompt":[[1,2,3],[4]]}`, want(func(r *Request) { r.InputTokens, r.Inputs, r.Sequences = 4, 2, 2 })},
		{"stream options", Chat, `{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true,"x":[1]}}`, want(func(r *Request) { r.Stream, r.WantsUsage, r.Continuous = true, true, true })},
		{"messages", Chat, `{"messages":[{"role":"system","content":"ab"},{"role":"user","name":"bob","content":[{"type":"text","text":"cde"}]}]}`, want(func(r *Request) { r.InputBytes = 2 + 3 + 3 })},
		{"decoded bytes count", Chat, `{"messages":[{"role":"user","content":"\u00fc\n\ud83d\ude00\u4f60\\"}]}`, want(func(r *Request) { r.InputBytes = 2 + 1 + 4 + 3 + 1 })},
		{"a long role is text", Chat, `{"messages":[{"role":"` + strings.Repeat("r", 100) + `","content":""}]}`, want(func(r *Request) { r.InputBytes = 100 })},
		{
			"tool calls", Chat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"c1","content":"x"}]}`,
			want(func(r *Request) {
				r.InputBytes = int64(len("id"+"c1"+"type"+"function"+"function"+"name"+"f"+"arguments"+`{"a":1}`) + 1)
			}),
		},
		{
			"tools are rendered whole", Chat, `{"tools":[{"type":"function","function":{"name":"f","parameters":{"image":{"enum":[1,22]}}}}]}`,
			want(func(r *Request) {
				r.InputBytes = int64(len("type" + "function" + "function" + "name" + "f" + "parameters" + "image" + "enum" + "122"))
			}),
		},
		{
			"image by data", Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"data:image/png;base64,` + payload + `","detail":"low"}}]}]}`,
			want(func(r *Request) { r.InputBytes, r.Images = 2, 1 }),
		},
		{"payload before its type", Chat, `{"messages":[{"content":[{"image_url":{"url":"` + payload + `"},"type":"image_url"}],"role":"user"}]}`, want(func(r *Request) { r.Images = 1 })},
		{"cached image", Chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":null,"uuid":"u1"}]}]}`, want(func(r *Request) { r.Images = 1 })},
		{"null members are no media", Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"x","image_url":null}]}]}`, want(func(r *Request) { r.InputBytes = 1 })},
		{
			"audio and video", Chat, `{"messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"` + payload + `","format":"wav"}},{"type":"audio_url","audio_url":{"url":"x"}},{"type":"video_url","video_url":{"url":"x"}}]}]}`,
			want(func(r *Request) { r.Audio, r.Video = 2, 1 }),
		},
		{"the same bytes as text", Chat, `{"messages":[{"role":"system","content":"` + payload + `"}]}`, want(func(r *Request) { r.InputBytes = int64(len(payload)) })},
		{"an image in a tool's schema is text", Chat, `{"tools":[{"image_url":"` + payload + `"}]}`, want(func(r *Request) { r.InputBytes = int64(len("image_url") + len(payload)) })},
		{"unknown fields are text", Chat, `{"chat_template":"abc","new_field":{"x":["de"]}}`, want(func(r *Request) { r.InputBytes = 5 })},
		{"template arguments", Chat, `{"chat_template_kwargs":{"k":"v","n":12}}`, want(func(r *Request) { r.InputBytes = 5 })},
		{"what never reaches the prompt", Chat, `{"user":"u","metadata":{"a":"bcd"},"logit_bias":{"1":2},"kv_transfer_params":{"x":"y"},"vllm_xargs":{"x":"y"}}`, want(func(r *Request) { r.User = "u" })},
		{"embedding", Embedding, `{"input":"abc"}`, want(func(r *Request) { r.InputBytes = 3 })},
		{"embeddings", Embedding, `{"input":["abc","d"],"encoding_format":"base64"}`, want(func(r *Request) { r.InputBytes, r.Inputs = 4, 2 })},
		{"embeddings of ids", Embedding, `{"input":[[1,2],[3],[4]]}`, want(func(r *Request) { r.InputTokens, r.Inputs = 4, 3 })},
		{"rerank reads the query with each document", Pooling, `{"query":"abc","documents":["x","yy"]}`, want(func(r *Request) { r.InputBytes, r.Inputs = 3*2+3, 2 })},
		{"score", Pooling, `{"text_1":["a","b"],"text_2":["cc","dd"]}`, want(func(r *Request) { r.InputBytes, r.Inputs = 6, 2 })},
		{"classify", Pooling, `{"input":["a","b","c"]}`, want(func(r *Request) { r.InputBytes, r.Inputs = 3, 3 })},
		{"detokenize", Detokenize, `{"tokens":[1,2,3]}`, want(func(r *Request) { r.InputTokens = 3 })},
		{"prompt embeddings", Completion, `{"prompt_embeds":["` + strings.Repeat("A", 4096) + `"]}`, want(func(r *Request) { r.InputTokens, r.Inputs = 5, 1 })},
		{
			"response", Response, `{"input":"abc","instructions":"de","max_output_tokens":9,"previous_response_id":"resp_1","background":true}`,
			want(func(r *Request) {
				r.InputBytes, r.MaxOutput, r.PreviousResponseID, r.Background = 5, 9, "resp_1", true
			}),
		},
		{
			"response items", Response, `{"input":[{"role":"user","content":[{"type":"input_text","text":"ab"},{"type":"input_image","image_url":"data:` + payload + `"}]},{"type":"function_call_output","call_id":"c","output":"cd"},{"type":"computer_call_output","output":{"type":"computer_screenshot","image_url":"` + payload + `"}}]}`,
			want(func(r *Request) { r.InputBytes, r.Images = 4, 2 }),
		},
		{
			"anthropic", Message, `{"max_tokens":5,"system":[{"type":"text","text":"ab","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"` + payload + `"}},{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"cd"},{"type":"image","source":{"data":"` + payload + `","type":"base64"}}]}]}]}`,
			want(func(r *Request) { r.MaxOutput, r.InputBytes, r.Images = 5, 4, 2 }),
		},
		{
			"anthropic documents", Message, `{"messages":[{"role":"user","content":[{"type":"document","source":{"data":"abc","type":"text","media_type":"text/plain"}},{"type":"document","source":{"type":"url","url":"http://x"}},{"type":"document","source":{"type":"content","content":[{"type":"text","text":"de"}]}}]}]}`,
			want(func(r *Request) { r.InputBytes, r.Images = 5, 1 }),
		},
		{
			"anthropic tool input is text", Message, `{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"image":"abc"}}]}]}`,
			want(func(r *Request) { r.InputBytes = int64(len("f" + "image" + "abc")) }),
		},
		{"32,769 bytes are nothing special", Chat, `{"messages":[{"role":"user","content":"` + strings.Repeat("a", 32769) + `"}]}`, want(func(r *Request) { r.InputBytes = 32769 })},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := meterOK(t, c.kind, c.body); got != c.want {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}

func TestMeterRefuses(t *testing.T) {
	for _, c := range []struct {
		body   string
		offset int64 // -1: not looked at
		field  string
		says   string
	}{
		{"", 0, "", "empty"},
		{" \n", 2, "", "empty"},
		{`[]`, 0, "", "object"},
		{`"x"`, 0, "", "object"},
		{"\xef\xbb\xbf{}", 0, "", "not valid JSON"},
		{`{"model":`, 9, "", "too early"},
		{`{"a":1,}`, 7, "", "not valid JSON"},
		{`{"a":01}`, 6, "", "not valid JSON"},
		{`{"a":NaN}`, 5, "a", "not valid JSON"},
		{`{"a":'x'}`, 5, "a", "not valid JSON"},
		{"{\"a\":\"\x01\"}", 6, "a", "not valid JSON"},
		{"{\"a\":\"\xff\"}", 6, "a", "UTF-8"},
		{`{"a":"\ud800"}`, 6, "a", "surrogate"},
		{`{} x`, 3, "", "bytes follow"},
		{`{}{}`, 2, "", "bytes follow"},
		{"{}\x00", 2, "", "bytes follow"},
		{`{"max_tokens":1,"max_tokens":2}`, 16, "max_tokens", "twice"},
		{`{"max_tokens":1,"\u006dax_tokens":2}`, 16, "max_tokens", "twice"},
		{`{"stream":true,"stream_options":{"include_usage":true,"include_usage":false}}`, 54, "stream_options…include_usage", "twice"},
		{`{"messages":[{"role":"user","content":"a","content":"b"}]}`, 42, "messages…content", "twice"},
		{`{"x":{"y":[{"a":1,"b":2,"a":3}]}}`, 24, "x…a", "twice"},
		{`{"MAX_TOKENS":1}`, -1, "MAX_TOKENS", "case"},
		{`{"ſtream":true}`, -1, "ſtream", "case"},
		{`{"max_tokens":-1}`, 14, "max_tokens", "negative"},
		{`{"max_tokens":1.5}`, 14, "max_tokens", "whole"},
		{`{"max_tokens":"16"}`, 14, "max_tokens", "without quotes"},
		{`{"max_tokens":true}`, 14, "max_tokens", "whole"},
		{`{"max_tokens":[1]}`, 14, "max_tokens", "whole"},
		{`{"max_tokens":9007199254740993}`, 14, "max_tokens", "2^53"},
		{`{"max_tokens":1e400}`, 14, "max_tokens", "2^53"},
		{`{"max_tokens":1e99999999999999999999}`, 14, "max_tokens", "2^53"},
		{`{"max_completion_tokens":1e-1}`, -1, "max_completion_tokens", "whole"},
		{`{"n":1025}`, -1, "n", "1024"},
		{`{"best_of":-2}`, -1, "best_of", "negative"},
		{`{"stream":"true"}`, -1, "stream", "without quotes"},
		{`{"stream":1}`, -1, "stream", "true or false"},
		{`{"stream_options":[]}`, -1, "stream_options", "object"},
		{`{"stream_options":{"include_usage":1}}`, -1, "stream_options.include_usage", "true or false"},
		{`{"stream_options":{"continuous_usage_stats":"no"}}`, -1, "stream_options.continuous_usage_stats", "true or false"},
		{`{"model":5}`, -1, "model", "string"},
		{`{"model":"` + strings.Repeat("m", 1025) + `"}`, -1, "model", "1024"},
		{`{"user":{}}`, -1, "user", "string"},
		{`{"a":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `}`, -1, "a", "deeper than 512"},
		{`{"a":` + strings.Repeat(`{"b":`, 600) + "1" + strings.Repeat("}", 600) + `}`, -1, "a", "deeper than 512"},
		{strings.Repeat(`{"a":`, 1e6), -1, "", "depth"},
	} {
		name := c.body
		if len(name) > 60 {
			name = name[:60]
		}
		t.Run(name, func(t *testing.T) {
			_, err := Meter(Chat, []byte(c.body))
			var bad *InputError
			if !errors.As(err, &bad) {
				t.Fatalf("got %v, want an InputError", err)
			}
			if c.offset >= 0 && bad.Offset != c.offset || c.field != "" && bad.Field != c.field || !strings.Contains(bad.Error(), c.says) {
				t.Errorf("got %+v (%v)\nwant offset %d, field %q, and %q in it", *bad, bad, c.offset, c.field, c.says)
			}
		})
	}
}

// TestMeterHostile: whatever the body holds, time and memory are bounded. That it ends
// here at all shows that nothing is quadratic.
func TestMeterHostile(t *testing.T) {
	t.Run("string of 100 MB", func(t *testing.T) {
		body := append([]byte(`{"messages":[{"role":"user","content":"`), bytes.Repeat([]byte("x"), 100<<20)...)
		body = append(body, `"}]}`...)
		var r Request
		var err error
		if n := testing.AllocsPerRun(1, func() { r, err = Meter(Chat, body) }); n > 20 {
			t.Errorf("%v allocations", n)
		}
		if err != nil || r.InputBytes != 100<<20 {
			t.Errorf("%v, %v", r.InputBytes, err)
		}
	})
	t.Run("a million names in one object", func(t *testing.T) {
		_, err := Meter(Chat, manyNames(1_000_000))
		if err == nil || !strings.Contains(err.Error(), "65536 names") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("as many names as allowed", func(t *testing.T) {
		body := manyNames(maxNames - 2)
		if _, err := Meter(Chat, body); err != nil {
			t.Error(err)
		}
		again := bytes.Replace(body, []byte("\"10\":"), []byte("\"f0\":"), 1)
		if _, err := Meter(Chat, again); err == nil || !strings.Contains(err.Error(), "twice") {
			t.Errorf("a duplicate among many: %v", err)
		}
	})
	t.Run("a million objects", func(t *testing.T) {
		body := []byte(`{"x":[{"a":1}` + strings.Repeat(`,{"a":1}`, 1_000_000) + `]}`)
		if _, err := Meter(Chat, body); err != nil {
			t.Error(err)
		}
	})
	t.Run("nothing but escapes", func(t *testing.T) {
		body := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat(`\\\"`, 1<<20) + `"}]}`)
		if r, err := Meter(Chat, body); err != nil || r.InputBytes != 2<<20 {
			t.Errorf("%v, %v", r.InputBytes, err)
		}
	})
}

func manyNames(n int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"a":{`)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `"%x":1`, i)
	}
	b.WriteString("}}")
	return b.Bytes()
}

func TestMeterTranscripts(t *testing.T) {
	files, _ := filepath.Glob("testdata/vllm-sim/*.request.json")
	if len(files) < 15 {
		t.Fatalf("%d transcripts", len(files))
	}
	for _, f := range files {
		body, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Meter(kindOf(f), body)
		if strings.Contains(f, "bad_json") {
			if err == nil {
				t.Errorf("%s: accepted", f)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", f, err)
			continue
		}
		agrees(t, kindOf(f), body, &r)
		readsAlike(t, kindOf(f), body, &r)
	}
}

// agrees holds what the meter found against the standard library.
func agrees(t *testing.T, kind Kind, body []byte, r *Request) {
	t.Helper()
	var m map[string]any
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		t.Fatalf("the meter takes what encoding/json refuses: %q: %v", body, err)
	}
	if s, _ := m["model"].(string); s != r.Model {
		t.Errorf("%q: model %q, want %q", body, r.Model, s)
	}
	if b, _ := m["stream"].(bool); b != r.Stream {
		t.Errorf("%q: stream %v", body, r.Stream)
	}
	largest := -1.0
	for _, name := range []string{"max_tokens", "max_completion_tokens", "max_output_tokens"} {
		if n, ok := m[name].(json.Number); ok && capsOutput(kind, name) {
			f, _ := n.Float64()
			largest = max(largest, f)
		}
	}
	if largest != float64(r.MaxOutput) {
		t.Errorf("%q: cap %d, want %v", body, r.MaxOutput, largest)
	}
	if r.Sequences < 1 || r.Inputs < 1 || r.InputBytes < 0 || r.InputBytes > int64(len(body))*max(1, r.Inputs) || r.InputTokens > int64(len(body)) {
		t.Errorf("%q: out of bounds: %+v", body, r)
	}
}

func kindOf(file string) Kind {
	for prefix, kind := range map[string]Kind{"completions": Completion, "embeddings": Embedding, "responses": Response, "messages": Message, "tokenize": Tokenize} {
		if strings.HasPrefix(filepath.Base(file), prefix) {
			return kind
		}
	}
	return Chat
}

func TestPieces(t *testing.T) {
	for _, c := range []struct {
		name, body, want string
		kind             Kind
	}{
		{"nothing to do", `{"model":"up","stream":false}`, `{"model":"up","stream":false}`, Chat},
		{"model", `{"a":1.0, "model" : "x","b":"\u00fc"}`, `{"a":1.0, "model" : "up","b":"\u00fc"}`, Chat},
		{"no model", `{ "a":1}`, `{"model":"up", "a":1}`, Chat},
		{"null model", `{"model":null}`, `{"model":"up"}`, Chat},
		{"empty body", `{ }`, `{"model":"up" }`, Chat},
		{"not a stream", `{"model":"up","stream":false,"stream_options":{"include_usage":false}}`, `{"model":"up","stream":false,"stream_options":{"include_usage":false}}`, Chat},
		{"stream", `{"model":"up","stream": true ,"x":1}`, `{"model":"up","stream": true,"stream_options":{"include_usage":true} ,"x":1}`, Chat},
		{"stream and model", `{"stream":true,"model":"x"}`, `{"stream":true,"stream_options":{"include_usage":true},"model":"up"}`, Completion},
		{"stream without a model", `{"stream":true}`, `{"model":"up","stream":true,"stream_options":{"include_usage":true}}`, Chat},
		{"null options", `{"model":"up","stream":true,"stream_options":null}`, `{"model":"up","stream":true,"stream_options":{"include_usage":true}}`, Chat},
		{"empty options", `{"model":"up","stream_options":{ },"stream":true}`, `{"model":"up","stream_options":{"include_usage":true },"stream":true}`, Chat},
		{"false", `{"model":"up","stream_options":{"include_usage": false,"k":[1]},"stream":true}`, `{"model":"up","stream_options":{"include_usage": true,"k":[1]},"stream":true}`, Chat},
		{"null", `{"model":"up","stream_options":{"include_usage":null},"stream":true}`, `{"model":"up","stream_options":{"include_usage":true},"stream":true}`, Chat},
		{"unknown keys stay", `{"model":"up","stream_options":{"k": 1.50},"stream":true}`, `{"model":"up","stream_options":{"include_usage":true,"k": 1.50},"stream":true}`, Chat},
		{"asked already", `{"model":"up","stream_options":{"include_usage":true,"continuous_usage_stats":true},"stream":true}`, `{"model":"up","stream_options":{"include_usage":true,"continuous_usage_stats":true},"stream":true}`, Chat},
		{"continuous without usage", `{"model":"up","stream_options":{"continuous_usage_stats":true},"stream":true}`, `{"model":"up","stream_options":{"include_usage":true,"continuous_usage_stats":false},"stream":true}`, Chat},
		{"continuous before usage", `{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":false},"model":"y"}`, `{"stream":true,"stream_options":{"continuous_usage_stats":false,"include_usage":true},"model":"up"}`, Chat},
		{"responses have no such option", `{"model":"up","stream":true}`, `{"model":"up","stream":true}`, Response},
		{"messages neither", `{"model":"up","stream":true}`, `{"model":"up","stream":true}`, Message},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := Meter(c.kind, []byte(c.body))
			if err != nil {
				t.Fatal(err)
			}
			if got := string(edited(&r, []byte(c.body), "up", true)); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if got := string(edited(&r, []byte(c.body), "", false)); got != c.body {
				t.Errorf("no edit asked for: %s", got)
			}
		})
	}
}

func TestEditQuotesTheModel(t *testing.T) {
	body := []byte(`{"model":"x"}`)
	r, _ := Meter(Chat, body)
	if got := string(edited(&r, body, "a\"b\\\n", false)); got != `{"model":"a\"b\\\n"}` {
		t.Error(got)
	}
}

func FuzzMeter(f *testing.F) {
	files, _ := filepath.Glob("testdata/vllm-sim/*.request.json")
	for _, name := range files {
		body, _ := os.ReadFile(name)
		f.Add(uint8(kindOf(name)), body)
	}
	for _, s := range []string{
		`{"stream":true,"stream_options":{"continuous_usage_stats":true,"x":{}},"max_tokens":1.0e2,"n":3}`,
		`{"\u006dodel":null,"prompt":[[1,2],[3]],"prompt_embeds":["AAAA"]}`,
		`{"query":"a","documents":["b",{"content":[{"type":"image","source":{"type":"text","data":"x"}}]}]}`,
		`{"stream_options":{ },"stream":true,"max_tokens":123456789012345678e-2}`,
		`{"temperature":0.70,"seed":1,"store":false,"cache_salt":null,"Conversation":1,"chat_template":"strftime_now"}`,
		`{"input":[{"id":"x"},{"content":[{"type":"image_url","image_url":{"url":"data:x","data":"y"},"uuid":"u"}]}],"temperature":"1"}`,
	} {
		f.Add(uint8(Chat), []byte(s))
	}
	f.Fuzz(func(t *testing.T, kind uint8, body []byte) {
		k := Kind(kind % uint8(Audio+1))
		r, err := Meter(k, body)
		if err != nil {
			var bad *InputError
			if !errors.As(err, &bad) || bad.Problem == "" || bad.Offset < 0 || bad.Offset > int64(len(body)) {
				t.Fatalf("%q: %#v", body, err)
			}
			return
		}
		agrees(t, k, body, &r)
		readsAlike(t, k, body, &r)
		changed := edited(&r, body, "fuzz-model", true)
		again, err := Meter(k, changed)
		if err != nil {
			t.Fatalf("%q became %q: %v", body, changed, err)
		}
		if again.Model != "fuzz-model" || (k == Chat || k == Completion) && r.Stream && !again.WantsUsage {
			t.Errorf("%q became %q", body, changed)
		}
		sameButEdited(t, body, changed)
		capped := bytes.Join(r.Pieces(body, Changes{Cap: 7}), nil)
		if again, err = Meter(k, capped); err != nil {
			t.Fatalf("%q became %q: %v", body, capped, err)
		}
		if c := again.MaxOutput; c > 7 || c < 0 || c == 0 && k != Completion || c < min(7, r.MaxOutput) {
			t.Errorf("%q became %q: a cap of %d", body, capped, c)
		}
		if again.Sequences != r.Sequences || again.InputBytes != r.InputBytes || again.InputTokens != r.InputTokens || again.Bounds.Beyond != r.Bounds.Beyond {
			t.Errorf("%q became %q", body, capped)
		}
		if r.Bounds.Text < r.InputBytes-r.InputTokens {
			t.Errorf("%q: at most %d tokens of %d bytes of text", body, r.Bounds.Text, r.InputBytes)
		}
	})
}

// sameButEdited fails unless two bodies differ in the fields that Pieces may touch only.
func sameButEdited(t *testing.T, body, edited []byte) {
	t.Helper()
	var a, b map[string]json.RawMessage
	if json.Unmarshal(body, &a) != nil || json.Unmarshal(edited, &b) != nil {
		t.Fatalf("%q or %q is not JSON", body, edited)
	}
	var ao, bo map[string]json.RawMessage
	_ = json.Unmarshal(a["stream_options"], &ao)
	_ = json.Unmarshal(b["stream_options"], &bo)
	for _, m := range []map[string]json.RawMessage{a, b} {
		delete(m, "model")
		delete(m, "stream_options")
	}
	for _, m := range []map[string]json.RawMessage{ao, bo} {
		delete(m, "include_usage")
		delete(m, "continuous_usage_stats")
	}
	for _, p := range [][2]map[string]json.RawMessage{{a, b}, {ao, bo}} {
		if len(p[0]) != len(p[1]) {
			t.Errorf("%q became %q", body, edited)
		}
		for k, v := range p[0] {
			if !bytes.Equal(v, p[1][k]) {
				t.Errorf("%q became %q: %s", body, edited, k)
			}
		}
	}
}

// chatBody is a conversation of about size bytes, with the escapes of ordinary text.
func chatBody(size int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"model":"m","stream":true,"messages":[`)
	for i := 0; b.Len() < size; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"role":"user","content":"%s"}`, strings.Repeat(`The quick brown fox \"jumps\" over\n`, 15))
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

func BenchmarkMeter(b *testing.B) {
	ids := []byte(`{"prompt":[1` + strings.Repeat(",1234", 1<<20/5) + `]}`)
	image := []byte(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:` + strings.Repeat("A", 1<<20) + `"}}]}]}`)
	chinese := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat("你好", 1<<20/6) + `"}]}`)
	for _, c := range []struct {
		name string
		body []byte
	}{
		{"1KB", chatBody(1 << 10)}, {"1MB", chatBody(1 << 20)}, {"1MB-ids", ids}, {"1MB-image", image}, {"1MB-chinese", chinese}, {"65534-names", manyNames(maxNames - 2)},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Meter(Chat, c.body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// edited is the body that Pieces makes, in one piece.
func edited(r *Request, body []byte, model string, includeUsage bool) []byte {
	return bytes.Join(r.Pieces(body, Changes{Model: model, IncludeUsage: includeUsage}), nil)
}
