package openai

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// result is all that a stream lets its user see.
type result struct {
	out       string
	lasts     int
	usage     Usage
	generated int64
	failure   Failure
	complete  bool
	id        string
}

// play feeds the pieces to a new stream.
func play(t testing.TB, kind Kind, hide bool, pieces ...[]byte) (r result) {
	t.Helper()
	s := NewStream(kind, hide)
	var out bytes.Buffer
	emit := func(f Frame) error {
		out.Write(f.Raw)
		if f.Last {
			r.lasts++
		}
		return nil
	}
	for _, p := range pieces {
		if err := s.Feed(append([]byte(nil), p...), emit); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.End(emit); err != nil {
		t.Fatal(err)
	}
	r.out, r.usage, r.generated, r.complete, r.id = out.String(), s.Usage(), s.Generated(), s.Complete(), s.ResponseID()
	if f := s.Failure(); f != nil {
		r.failure = *f
	}
	return r
}

// transcript is the body of a recorded answer, its HTTP framing taken off.
func transcript(t testing.TB, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata/vllm-sim", name+".response.raw"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(raw)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func TestStreamTranscripts(t *testing.T) {
	seen := func(in, out int64) Usage { return Usage{Input: in, Output: out, Known: true} }
	for _, c := range []struct {
		name      string
		usage     Usage
		generated int64
		hidden    bool
		id        string
	}{
		{name: "chat_stream", generated: 2},
		{name: "chat_stream_usage", usage: seen(11, 6), generated: 6, hidden: true},
		{name: "chat_stream_contusage", usage: seen(6, 5), generated: 5, hidden: true},
		{name: "chat_tools_stream", usage: seen(8, 12), generated: 9, hidden: true},
		{name: "completions_stream", usage: seen(2, 2), generated: 2, hidden: true},
		{name: "responses_stream", usage: seen(6, 4), generated: 4, id: "resp_660668a0-5d0b-5ee5-bf62-a1f1b72d4902"},
		{name: "messages_stream", usage: seen(6, 3), generated: 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			kind, body := kindOf(c.name), transcript(t, c.name)
			want := result{out: string(body), lasts: 1, usage: c.usage, generated: c.generated, complete: true, id: c.id}
			if got := play(t, kind, false, body); got != want {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
			if c.hidden {
				i := strings.LastIndex(want.out, `data: {`)
				j := strings.LastIndex(want.out, `data: [DONE]`)
				want.out = want.out[:i] + want.out[j:]
			}
			for i := range body { // a cut anywhere changes nothing
				if got := play(t, kind, true, body[:i], body[i:]); got != want {
					t.Fatalf("cut at %d: got  %+v\nwant %+v", i, got, want)
				}
			}
			single := make([][]byte, len(body))
			for i := range body {
				single[i] = body[i : i+1]
			}
			if got := play(t, kind, true, single...); got != want {
				t.Errorf("byte by byte: got  %+v\nwant %+v", got, want)
			}
			for _, eol := range []string{"\r\n", "\r"} { // and neither does the sort of line end
				other := bytes.ReplaceAll(body, []byte("\n"), []byte(eol))
				eolWant := want
				eolWant.out = strings.ReplaceAll(want.out, "\n", eol)
				for i := range other {
					if got := play(t, kind, true, other[:i], other[i:]); got != eolWant {
						t.Fatalf("%q cut at %d: got  %+v\nwant %+v", eol, i, got, eolWant)
					}
				}
			}
		})
	}
}

// chunk is a chat chunk as vLLM sends it.
func chunk(content string) string {
	return `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"` + content + `"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
}

const (
	usageChunk = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}` + "\n\n"
	done       = "data: [DONE]\n\n"
)

func TestStream(t *testing.T) {
	usage := Usage{Input: 9, CachedInput: 4, Output: 3, Known: true}
	for _, c := range []struct {
		name  string
		kind  Kind
		in    string
		want  result // out: "" stands for in
		shown string
	}{
		{name: "nothing"},
		{name: "comments and pings pass", in: ": ping\n\n:\n\nevent: x\n\n" + chunk("a"), want: result{generated: 1}},
		{name: "data without a space", in: strings.ReplaceAll(chunk("a")+usageChunk+done, "data: ", "data:"), shown: strings.ReplaceAll(chunk("a")+done, "data: ", "data:"), want: result{generated: 1, usage: usage, complete: true, lasts: 1}},
		{name: "data over several lines", in: chunk("a") + strings.Replace(usageChunk, `,"usage"`, ",\ndata: \"usage\"", 1) + done, shown: chunk("a") + done, want: result{generated: 1, usage: usage, complete: true, lasts: 1}},
		{name: "byte order mark", in: "\xef\xbb\xbf" + usageChunk + done, shown: done, want: result{usage: usage, complete: true, lasts: 1}},
		{name: "the last frame lacks its blank line", in: chunk("a") + strings.TrimRight(usageChunk, "\n"), shown: chunk("a"), want: result{generated: 1, usage: usage}},
		{name: "done without a line end", in: chunk("a") + "data: [DONE]", want: result{generated: 1, complete: true, lasts: 1}},
		{name: "cut in the middle of a frame", in: chunk("a") + chunk("b")[:60], want: result{generated: 1}},
		{name: "cut after 40", in: strings.Repeat(chunk("a"), 40), want: result{generated: 40}},
		{
			name: "usage on every chunk: the last one counts", in: strings.ReplaceAll(chunk("a"), `"logprobs"`, `"x":1,"logprobs"`) + strings.ReplaceAll(chunk("b"), `]}`+"\n", `],"usage":{"prompt_tokens":9,"completion_tokens":2}}`+"\n"),
			want: result{generated: 2, usage: Usage{Input: 9, Output: 2, Known: true}},
		},
		{name: "usage beside choices is not hidden", in: strings.Replace(usageChunk, "[]", `[{"index":0,"delta":{}}]`, 1), want: result{usage: usage}},
		{name: "a usage that lies is not believed", in: usageChunk + strings.Replace(usageChunk, "9", "-9", 1) + strings.Replace(usageChunk, "9", "9e99", 1), shown: "\x00", want: result{usage: usage}},
		{name: "null usage", in: strings.Replace(chunk("a"), `"created"`, `"usage":null,"created"`, 1), want: result{generated: 1}},
		{name: "the word usage as an answer", in: chunk("usage") + chunk(`\"usage\":{\"prompt_tokens\":1}`), want: result{generated: 2}},
		{
			name: "error, then done", in: chunk("a") + `data: {"error": {"message": "out of memory", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n" + done,
			want: result{generated: 1, lasts: 1, failure: Failure{"out of memory", "InternalServerError", "500"}},
		},
		{name: "error of old", in: `data: {"object":"error","message":"bad","type":"BadRequestError","code":400}` + "\n\n", want: result{failure: Failure{"bad", "BadRequestError", "400"}}},
		{name: "error as a string", in: `data: {"error":"gone"}` + "\n\n", want: result{failure: Failure{Message: "gone"}}},
		{name: "empty deltas are none", in: chunk("") + strings.Replace(chunk("x"), `"content":"x"`, `"role":"assistant","content":null,"tool_calls":[]`, 1), want: result{}},
		{name: "reasoning", in: strings.Replace(chunk("x"), `"content"`, `"reasoning_content"`, 1) + strings.Replace(chunk("x"), `"content"`, `"reasoning"`, 1), want: result{generated: 2}},
		{name: "two choices in a chunk", in: strings.Replace(chunk("x"), `[{"index":0`, `[{"index":1,"delta":{"content":"y"}},{"index":0`, 1), want: result{generated: 2}},
		{name: "a lot at once is more than one token", in: chunk(strings.Repeat("word ", 100)), want: result{generated: 8}},
		{name: "not JSON passes", in: "data: {\"choices\":[\n\ndata: oops\n\ndata: }\n\n", want: result{}},
		{name: "anthropic, cut before the end", kind: Message, in: msgStart + msgText + msgText, want: result{generated: 2, usage: Usage{Input: 17, CachedInput: 10, CacheWrite: 2, Output: 2, Known: true}}},
		{name: "anthropic", kind: Message, in: msgStart + msgText + msgDelta + msgStop, want: result{generated: 1, lasts: 1, complete: true, usage: Usage{Input: 17, CachedInput: 10, CacheWrite: 2, Output: 7, Known: true}}},
		{name: "done after the end", kind: Message, in: msgStart + msgDelta + msgStop + done, want: result{lasts: 2, complete: true, usage: Usage{Input: 17, CachedInput: 10, CacheWrite: 2, Output: 7, Known: true}}},
		{name: "anthropic, input at the end", kind: Message, in: msgStart + strings.Replace(msgDelta, `"output_tokens"`, `"input_tokens":6,"output_tokens"`, 1), want: result{usage: Usage{Input: 18, CachedInput: 10, CacheWrite: 2, Output: 7, Known: true}}},
		{name: "anthropic tool call and thinking", kind: Message, in: strings.Replace(msgText, `"text":"hi"`, `"partial_json":"{"`, 1) + strings.Replace(msgText, `"text":"hi"`, `"thinking":"hm"`, 1) + strings.Replace(msgText, `"text":"hi"`, `"signature":"abc"`, 1), want: result{generated: 2}},
		{name: "anthropic error", kind: Message, in: "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n", want: result{failure: Failure{"Overloaded", "overloaded_error", ""}}},
		{name: "response failed", kind: Response, in: "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"id\":\"resp_1\",\"status\":\"failed\",\"error\":{\"code\":\"server_error\",\"message\":\"x\"}}}\n\n", want: result{lasts: 1, id: "resp_1", failure: Failure{"x", "", "server_error"}}},
		{name: "response failed without a word", kind: Response, in: "data: {\"type\":\"response.failed\",\"response\":{\"id\":\"resp_1\",\"error\":null}}\n\n", want: result{lasts: 1, id: "resp_1", failure: Failure{"the response failed", "response.failed", ""}}},
		{
			name: "response incomplete is an end", kind: Response, in: "data: {\"type\":\"response.incomplete\",\"response\":{\"id\":\"resp_1\",\"usage\":{\"input_tokens\":5,\"input_tokens_details\":{\"cached_tokens\":2},\"output_tokens\":3,\"output_tokens_details\":{\"reasoning_tokens\":1}}}}\n\n",
			want: result{lasts: 1, complete: true, id: "resp_1", usage: Usage{Input: 5, CachedInput: 2, Output: 3, Reasoning: 1, Known: true}},
		},
		{name: "response error event", kind: Response, in: "data: {\"type\":\"error\",\"code\":\"c\",\"message\":\"m\",\"param\":null}\n\n", want: result{failure: Failure{"m", "error", "c"}}},
		{name: "response arguments", kind: Response, in: "data: {\"type\":\"response.function_call_arguments.delta\",\"delta\":\"{\"}\n\ndata: {\"type\":\"response.function_call_arguments.done\",\"arguments\":\"{}\"}\n\n", want: result{generated: 1}},
		{name: "transcription", kind: Audio, in: strings.ReplaceAll(chunk("a")+usageChunk, "chat.completion.chunk", "transcription.chunk") + done, shown: strings.ReplaceAll(chunk("a"), "chat.completion.chunk", "transcription.chunk") + done, want: result{generated: 1, lasts: 1, complete: true, usage: usage}},
		{name: "mixed line ends", in: "data: 1\r\n\n\r\r\n" + "data: 2\n\r\ndata: 3\r\r\n" + done + "\r", want: result{lasts: 1, complete: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := c.want
			switch want.out = c.shown; want.out {
			case "":
				want.out = c.in
			case "\x00":
				want.out = ""
			}
			for i := 0; i <= len(c.in); i++ {
				if got := play(t, c.kind, true, []byte(c.in[:i]), []byte(c.in[i:])); got != want {
					t.Fatalf("cut at %d:\ngot  %+v\nwant %+v", i, got, want)
				}
			}
			want.out = c.in
			if got := play(t, c.kind, false, []byte(c.in)); got != want {
				t.Errorf("nothing hidden:\ngot  %+v\nwant %+v", got, want)
			}
		})
	}
}

const (
	msgStart = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"usage\":{\"input_tokens\":5,\"cache_creation_input_tokens\":2,\"cache_read_input_tokens\":10,\"output_tokens\":1}}}\n\n"
	msgText  = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"hi\"}}\n\n"
	msgDelta = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"tool_use\"},\"usage\":{\"output_tokens\":7}}\n\n"
	msgStop  = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
)

// TestStreamLatency: a frame leaves with the byte that ends it, whatever the line ends.
func TestStreamLatency(t *testing.T) {
	for _, eol := range []string{"\n", "\r\n", "\r"} {
		s := NewStream(Chat, false)
		for n, frame := range []string{"data: 1", "data: 2", "data: 3"} {
			emitted := 0
			if err := s.Feed([]byte(frame+eol+eol), func(f Frame) error { emitted++; return nil }); err != nil || emitted != 1 {
				t.Errorf("%q: frame %d: %d emitted, %v", eol, n, emitted, err)
			}
		}
	}
}

// TestStreamLongFrames: a frame beyond MaxFrame passes in pieces, is never held whole,
// and the event that ends a long response is still understood.
func TestStreamLongFrames(t *testing.T) {
	long := strings.Repeat("x", MaxFrame)
	for _, c := range []struct {
		name string
		kind Kind
		in   string
		want result
	}{
		{"a line without end", Chat, "data: " + long + long, result{}},
		{"a long chunk", Chat, chunk("a") + chunk(long) + chunk("b") + done, result{generated: 2, lasts: 1, complete: true}},
		{
			"a long response", Response, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"output\":[{\"type\":\"message\",\"content\":\"" + long + "\"}],\"usage\":{\"input_tokens\":5,\"output_tokens\":3}}}\n\n",
			result{lasts: 1, complete: true, id: "resp_1", usage: Usage{Input: 5, Output: 3, Known: true}},
		},
		{
			"a long failure", Response, "data: {\"response\":{\"id\":\"resp_1\",\"x\":\"" + long + "\",\"error\":{\"message\":\"m\"}},\"type\":\"response.failed\"}\n\n",
			result{lasts: 1, id: "resp_1", failure: Failure{Message: "m"}},
		},
		{"exactly MaxFrame", Chat, "data: " + long[:MaxFrame-8] + "\n\n" + done, result{lasts: 1, complete: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.want.out = c.in
			for _, size := range []int{1000, 4096, 1 << 20, len(c.in)} {
				var pieces [][]byte
				for rest := []byte(c.in); len(rest) > 0; {
					n := min(size, len(rest))
					pieces, rest = append(pieces, rest[:n]), rest[n:]
				}
				if got := play(t, c.kind, true, pieces...); got != c.want {
					got.out, c.want.out = fmt.Sprint(len(got.out)), fmt.Sprint(len(c.want.out))
					t.Fatalf("by %d:\ngot  %+v\nwant %+v", size, got, c.want)
				}
			}
		})
	}
	s := NewStream(Chat, true)
	for range 64 {
		if err := s.Feed([]byte(long), func(Frame) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if cap(s.buf) > 2*MaxFrame {
			t.Fatalf("%d bytes held", cap(s.buf))
		}
	}
	// Nothing but line ends of the rarest sort, in one read: linear, or this would not end.
	crs := bytes.Repeat([]byte("\r"), 8<<20)
	if got := play(t, Chat, true, crs); len(got.out) != len(crs) {
		t.Errorf("%d bytes of %d", len(got.out), len(crs))
	}
}

func TestStreamEmitError(t *testing.T) {
	s := NewStream(Chat, false)
	gone := errors.New("gone")
	calls := 0
	err := s.Feed([]byte(chunk("a")+chunk("b")), func(Frame) error { calls++; return gone })
	if !errors.Is(err, gone) || calls != 1 || s.Generated() != 1 {
		t.Errorf("%v after %d calls, %d generated", err, calls, s.Generated())
	}
}

func TestStreamAllocs(t *testing.T) {
	s := NewStream(Chat, true)
	frame := []byte(chunk("hello"))
	emit := func(Frame) error { return nil }
	if n := testing.AllocsPerRun(100, func() { _ = s.Feed(frame, emit) }); n != 0 {
		t.Errorf("%v allocations for a chunk", n)
	}
	half := len(frame) / 2
	if n := testing.AllocsPerRun(100, func() { _ = s.Feed(frame[:half], emit); _ = s.Feed(frame[half:], emit) }); n != 0 {
		t.Errorf("%v allocations for a chunk in two pieces", n)
	}
}

func FuzzStream(f *testing.F) {
	for _, name := range []string{"chat_stream_usage", "chat_tools_stream", "responses_stream", "messages_stream"} {
		f.Add(uint8(kindOf(name)), transcript(f, name), uint16(7), uint16(300))
	}
	f.Add(uint8(Chat), []byte("data: 1\r\n\r\rdata\n\r:x\r\r\n"), uint16(3), uint16(5))
	f.Add(uint8(Chat), []byte(usageChunk+`data: {"error":"x","choices":[],"usage":{}}`), uint16(3), uint16(50))
	f.Fuzz(func(t *testing.T, kind uint8, in []byte, cut, step uint16) {
		k := Kind(kind % uint8(Audio+1))
		whole := play(t, k, true, in)
		i := int(cut) % (len(in) + 1)
		pieces := [][]byte{in[:i]}
		for rest := in[i:]; len(rest) > 0; {
			n := min(1+int(step), len(rest))
			pieces, rest = append(pieces, rest[:n]), rest[n:]
		}
		if got := play(t, k, true, pieces...); got != whole {
			t.Errorf("got  %+v\nwant %+v", got, whole)
		}
		open := play(t, k, false, pieces...)
		if open.out != string(in) {
			t.Errorf("bytes changed: %q became %q", in, open.out)
		}
		if len(whole.out) > len(in) || whole.usage != open.usage || whole.generated < 0 || whole.generated > int64(len(in)) {
			t.Errorf("%+v\n%+v", whole, open)
		}
	})
}

func BenchmarkStream(b *testing.B) {
	var in bytes.Buffer
	for i := range 300 {
		in.WriteString(chunk(fmt.Sprintf(" word%d", i)))
	}
	in.WriteString(usageChunk + done)
	body := in.Bytes()
	emit := func(Frame) error { return nil }
	for _, c := range []struct {
		name string
		size int
	}{{"chunk-a-read", 0}, {"4KB-reads", 4096}} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				s := NewStream(Chat, true)
				for rest := body; len(rest) > 0; {
					n := min(c.size, len(rest))
					if c.size == 0 {
						n = bytes.Index(rest, []byte("\n\n")) + 2
					}
					if err := s.Feed(rest[:n], emit); err != nil {
						b.Fatal(err)
					}
					rest = rest[n:]
				}
				if !s.Complete() || s.Generated() != 300 {
					b.Fatal("not read")
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/302, "ns/chunk")
		})
	}
}
