package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// TestParseUsage is the golden table of what each shape means: cached tokens are part
// of the input once, whoever reports them.
func TestParseUsage(t *testing.T) {
	for _, c := range []struct {
		name string
		kind Kind
		raw  string
		want Usage
	}{
		{"missing", Chat, ``, Usage{}},
		{"null", Chat, `null`, Usage{}},
		{"empty", Chat, `{}`, Usage{}},
		{"chat", Chat, `{"prompt_tokens":11,"completion_tokens":12,"total_tokens":23,"prompt_tokens_details":{"cached_tokens":0}}`, Usage{Input: 11, Output: 12, Known: true}},
		{"openai's input includes the cached", Chat, `{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":80,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":4}}`, Usage{Input: 100, CachedInput: 80, Output: 5, Reasoning: 4, Known: true}},
		{"responses likewise", Response, `{"input_tokens":100,"input_tokens_details":{"cached_tokens":80},"output_tokens":5,"output_tokens_details":{"reasoning_tokens":4},"total_tokens":105}`, Usage{Input: 100, CachedInput: 80, Output: 5, Reasoning: 4, Known: true}},
		{"anthropic's input does not", Message, `{"input_tokens":20,"cache_read_input_tokens":80,"cache_creation_input_tokens":7,"output_tokens":5}`, Usage{Input: 107, CachedInput: 80, CacheWrite: 7, Output: 5, Known: true}},
		{"anthropic without a cache, as vLLM", Message, `{"input_tokens":100,"output_tokens":5}`, Usage{Input: 100, Output: 5, Known: true}},
		{"anthropic's writes for an hour", Message, `{"input_tokens":20,"cache_creation_input_tokens":7,"cache_creation":{"ephemeral_5m_input_tokens":4,"ephemeral_1h_input_tokens":3},"output_tokens":5}`, Usage{Input: 27, CacheWrite: 7, CacheWrite1h: 3, Output: 5, Known: true}},
		{"anthropic's writes for an hour beyond all writes", Message, `{"input_tokens":20,"cache_creation":{"ephemeral_1h_input_tokens":3},"output_tokens":5}`, Usage{Input: 20, Output: 5, Known: true}},
		{"anthropic nulls", Message, `{"input_tokens":20,"cache_read_input_tokens":null,"cache_creation_input_tokens":null,"output_tokens":5}`, Usage{Input: 20, Output: 5, Known: true}},
		{"null details", Chat, `{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}`, Usage{Input: 1, Output: 2, Known: true}},
		{"embedding", Embedding, `{"prompt_tokens":3,"total_tokens":3}`, Usage{Input: 3, Known: true}},
		{"rerank with a total only", Pooling, `{"total_tokens":56}`, Usage{Input: 56, Known: true}},
		{"a chat without its output is not known", Chat, `{"prompt_tokens":3}`, Usage{Input: 3}},
		{"transcription in seconds", Audio, `{"type":"duration","seconds":3}`, Usage{AudioSeconds: 3}},
		{"transcription in begun seconds", Audio, `{"type":"duration","seconds":3.2}`, Usage{AudioSeconds: 4}},
		{"transcription in tokens", Audio, `{"type":"tokens","input_tokens":14,"input_token_details":{"audio_tokens":14},"output_tokens":45}`, Usage{Input: 14, Output: 45, Known: true}},
		{"more cached than read", Chat, `{"prompt_tokens":10,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":99},"completion_tokens_details":{"reasoning_tokens":9}}`, Usage{Input: 10, CachedInput: 10, Output: 1, Reasoning: 1, Known: true}},
		{"unknown members", Chat, `{"prompt_tokens":1,"x":{"prompt_tokens":"y"},"completion_tokens":2,"cost":0.5}`, Usage{Input: 1, Output: 2, Known: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, err := ParseUsage(c.kind, []byte(c.raw)); err != nil || got != c.want {
				t.Errorf("got  %+v, %v\nwant %+v", got, err, c.want)
			}
		})
	}
	for _, raw := range []string{
		`{"prompt_tokens":-1,"completion_tokens":1}`, `{"prompt_tokens":1.5}`, `{"prompt_tokens":1e3}`, `{"prompt_tokens":"7"}`, `{"prompt_tokens":true}`,
		`{"completion_tokens":1099511627777}`, `{"completion_tokens":99999999999999999999999}`, `{"prompt_tokens":{}}`,
		`{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":-5}}`, `{"prompt_tokens":1`, `[]`, `7`, `"x"`,
	} {
		if got, err := ParseUsage(Chat, []byte(raw)); err == nil || got != (Usage{}) {
			t.Errorf("%s: %+v, %v", raw, got, err)
		}
	}
}

func FuzzParseUsage(f *testing.F) {
	f.Add(uint8(Chat), []byte(`{"prompt_tokens":11,"completion_tokens":12,"total_tokens":23,"prompt_tokens_details":{"cached_tokens":0}}`))
	f.Add(uint8(Message), []byte(`{"input_tokens":20,"cache_read_input_tokens":80,"output_tokens":5}`))
	f.Add(uint8(Pooling), []byte(`{"total_tokens":-56}`))
	f.Add(uint8(Audio), []byte(`{"seconds":3.20}`))
	f.Fuzz(func(t *testing.T, kind uint8, raw []byte) {
		u, err := ParseUsage(Kind(kind%uint8(Audio+1)), raw)
		for _, n := range []int64{u.Input, u.CachedInput, u.CacheWrite, u.Output, u.Reasoning, u.AudioSeconds} {
			if n < 0 || n > 3*maxFigure || err != nil && n != 0 {
				t.Fatalf("%q: %+v, %v", raw, u, err)
			}
		}
		if u.CachedInput+u.CacheWrite > u.Input || u.Reasoning > u.Output || err != nil && u.Known {
			t.Fatalf("%q: %+v, %v", raw, u, err)
		}
	})
}

// scan writes body to a new scanner in pieces of the given size.
func scan(kind Kind, body []byte, size int) *Scanner {
	s := NewScanner(kind)
	for len(body) > 0 {
		n := min(size, len(body))
		if m, err := s.Write(append([]byte(nil), body[:n]...)); m != n || err != nil {
			panic("a scanner's Write failed")
		}
		body = body[n:]
	}
	return s
}

// answer is all that a scanner has learnt.
type answer struct {
	usage   Usage
	failure Failure
	id      string
}

func answerOf(s *Scanner) answer {
	a := answer{usage: s.Usage(), id: s.ResponseID()}
	if f := s.Failure(); f != nil {
		a.failure = *f
	}
	return a
}

func TestScannerTranscripts(t *testing.T) {
	used := func(in, out int64) answer { return answer{usage: Usage{Input: in, Output: out, Known: true}} }
	response := used(6, 3)
	response.id = "resp_6d2abb1d-030c-5349-b227-e79a322ff91c"
	failed := func(typ, code string) answer { return answer{failure: Failure{Type: typ, Code: code}} }
	for name, want := range map[string]answer{
		"chat":                used(11, 12),
		"chat_n2_logprobs":    used(6, 4),
		"chat_tools":          used(8, 12),
		"completions":         used(2, 4),
		"embeddings":          used(3, 0),
		"embeddings_b64":      used(2, 0),
		"messages":            used(6, 1),
		"responses":           response,
		"tokenize_chat":       {},
		"tokenize_prompt":     {},
		"err_404":             {},
		"err_bad_json":        failed("BadRequestError", "400"),
		"err_context_len":     failed("BadRequestError", "400"),
		"err_unknown_model":   failed("NotFoundError", "404"),
		"inject_ratelimit":    failed("RateLimitError", "429"),
		"inject_server_error": failed("InternalServerError", "503"),
		"queuefull_2":         failed("RateLimitError", "429"),
	} {
		t.Run(name, func(t *testing.T) {
			body := transcript(t, name)
			for size := 1; size <= len(body)+1; size++ {
				got := answerOf(scan(kindOf(name), body, size))
				if (got.failure.Message != "") != (want.failure.Type != "") {
					t.Errorf("message %q", got.failure.Message)
				}
				got.failure.Message = ""
				if got != want {
					t.Fatalf("by %d: got  %+v\nwant %+v", size, got, want)
				}
			}
		})
	}
}

func TestScanner(t *testing.T) {
	usage := answer{usage: Usage{Input: 1, Output: 2, Known: true}}
	for _, c := range []struct {
		name string
		kind Kind
		body string
		want answer
	}{
		{"nothing", Chat, ``, answer{}},
		{"not JSON", Chat, `usage: {"prompt_tokens":1,"completion_tokens":2}`, answer{}},
		{"usage last", Chat, ` { "choices" : [ { "x" : "}]\"" } ] , "usage" : { "prompt_tokens" : 1 , "completion_tokens" : 2 } } `, usage},
		{"usage deeper is not ours", Chat, `{"choices":[{"usage":{"prompt_tokens":1,"completion_tokens":2}}],"x":{"usage":{"prompt_tokens":1,"completion_tokens":2}}}`, answer{}},
		{"usage as text", Chat, `{"content":"\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}","a":"usage"}`, answer{}},
		{"null", Chat, `{"usage":null,"error":null}`, answer{}},
		{"cut short", Chat, `{"usage":{"prompt_tokens":1,"completion_tokens":2}`, answer{}},
		{"array on top", Chat, `["usage",{"usage":{"prompt_tokens":1,"completion_tokens":2}}]`, answer{}},
		{"a second value", Chat, `{"a":1}{"usage":{"prompt_tokens":1,"completion_tokens":2}}`, answer{}},
		{"lies", Chat, `{"usage":{"prompt_tokens":-1,"completion_tokens":2}}`, answer{}},
		{"too long", Chat, `{"usage":{"x":"` + strings.Repeat("x", maxCapture) + `","prompt_tokens":1,"completion_tokens":2}}`, answer{}},
		{"a long name", Chat, `{"` + strings.Repeat("usage", 100) + `":1,"usage":{"prompt_tokens":1,"completion_tokens":2}}`, usage},
		{"anthropic error", Message, `{"type":"error","error":{"type":"invalid_request_error","message":"m"}}`, answer{failure: Failure{"m", "invalid_request_error", ""}}},
		{"error of old", Chat, `{"object":"error","message":"m\n","type":"T","param":null,"code":"c"}`, answer{failure: Failure{"m\n", "T", "c"}}},
		{"failed response", Response, `{"id":"resp_1","status":"failed","error":{"code":"c","message":"m"},"usage":null}`, answer{id: "resp_1", failure: Failure{"m", "", "c"}}},
		{"ids of other kinds", Chat, `{"id":"chatcmpl-1"}`, answer{}},
		{"nested response is not looked into", Response, `{"response":{"id":"resp_1","usage":{"input_tokens":1,"output_tokens":2}}}`, answer{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, size := range []int{1, 2, 3, 7, 64, 1 << 20} {
				if got := answerOf(scan(c.kind, []byte(c.body), size)); got != c.want {
					t.Fatalf("by %d: got  %+v\nwant %+v", size, got, c.want)
				}
			}
		})
	}
}

func TestScannerMemory(t *testing.T) {
	s := NewScanner(Chat)
	_, _ = s.Write([]byte(`{"error":"`))
	piece := bytes.Repeat([]byte("x"), 1<<20)
	for range 32 {
		_, _ = s.Write(piece)
	}
	if cap(s.held)+cap(s.name) > 4*maxCapture {
		t.Errorf("%d bytes held", cap(s.held))
	}
	deep := bytes.Repeat([]byte(`{"a":[`), 1<<20)
	if n := testing.AllocsPerRun(5, func() { _, _ = NewScanner(Chat).Write(deep) }); n > 4 {
		t.Errorf("%v allocations for a deep body", n)
	}
}

func FuzzScanner(f *testing.F) {
	for _, name := range []string{"chat", "embeddings", "messages", "responses", "err_bad_json"} {
		f.Add(uint8(kindOf(name)), transcript(f, name), uint16(5))
	}
	f.Add(uint8(Chat), []byte(`{"usage":{"prompt_tokens":1},"usage":{"prompt_tokens":2,"completion_tokens":3},"error":"\"`), uint16(1))
	f.Fuzz(func(t *testing.T, kind uint8, body []byte, size uint16) {
		k := Kind(kind % uint8(Audio+1))
		whole := answerOf(scan(k, body, len(body)+1))
		if got := answerOf(scan(k, body, 1+int(size))); got != whole {
			t.Errorf("by %d: got  %+v\nwant %+v", 1+int(size), got, whole)
		}
		var m map[string]json.RawMessage
		if json.Unmarshal(body, &m) != nil || bytes.IndexByte(body, '\\') >= 0 {
			return
		}
		if u, err := ParseUsage(k, m["usage"]); err == nil && len(m["usage"]) < maxCapture && bytes.Count(body, []byte(`"usage"`)) == 1 && u != whole.usage {
			t.Errorf("%q: %+v, want %+v", body, whole.usage, u)
		}
	})
}

func BenchmarkScanner(b *testing.B) {
	var floats bytes.Buffer
	floats.WriteString(`{"object":"list","data":[{"embedding":[0.5`)
	for floats.Len() < 1<<20 {
		fmt.Fprintf(&floats, ",%f", 1/float64(floats.Len()))
	}
	floats.WriteString(`]}],"usage":{"prompt_tokens":3,"total_tokens":3}}`)
	chat := bytes.Replace(chatBody(1<<10), []byte("{"), []byte(`{"usage":{"prompt_tokens":3,"completion_tokens":3},`), 1)
	for _, c := range []struct {
		name string
		body []byte
	}{{"1KB-chat", chat}, {"1MB-embeddings", floats.Bytes()}} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.body)))
			b.ReportAllocs()
			for b.Loop() {
				s := NewScanner(Embedding)
				_, _ = s.Write(c.body)
				if !s.Usage().Known {
					b.Fatal("not read")
				}
			}
		})
	}
}
