package openai

import (
	"bytes"
	"testing"

	"github.com/go-json-experiment/json/jsontext"
)

// held sums up what an assembler holds.
func (a *Assembler) total() (n int) {
	n = cap(a.long) + cap(a.response) + cap(a.chunks.usage)
	for _, c := range a.chunks.choices {
		if c == nil {
			continue
		}
		n += cap(c.content.raw) + cap(c.reasoning.raw) + cap(c.reasoningContent.raw) + cap(c.refusal.raw) + cap(c.text.raw) + cap(c.finish) + cap(c.stop)
		for _, t := range c.calls {
			n += cap(t.id) + cap(t.name) + cap(t.arguments.raw)
		}
		for _, l := range c.logprobs.lists {
			n += cap(l.raw)
		}
	}
	for _, b := range a.message.blocks {
		n += cap(b.more.raw) + cap(b.citations) + cap(b.signed)
	}
	return n
}

// FuzzAssemble: whatever comes, an assembler does not panic, holds little, and what it makes is
// JSON of its kind which replays, if it does, to a stream that assembles to the same.
func FuzzAssemble(f *testing.F) {
	for _, name := range []string{"chat_stream", "chat_stream_usage", "chat_tools_stream", "completions_stream", "messages_stream", "responses_stream"} {
		f.Add(uint8(kindOf(name)), uint16(7), transcript(f, name))
	}
	f.Add(uint8(Chat), uint16(1), []byte(chatChunk(`{"index":0,"delta":{"role":"assistant","tool_calls":[{"index":0,"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},"logprobs":{"content":[{"token":"a"}]},"finish_reason":"stop","stop_reason":1}`)+done))
	f.Add(uint8(Message), uint16(3), []byte(anthropic(`{"type":"message_start","message":{"id":"m","type":"message","role":"assistant","model":"m","content":[],"usage":{"input_tokens":1}}}`,
		`{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}`, `{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"s"}}`,
		`{"type":"content_block_stop","index":0}`, `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}`, `{"type":"message_stop"}`)))
	f.Fuzz(func(t *testing.T, k uint8, cut uint16, sse []byte) {
		const most = 16 << 10
		kind := Kind(k % uint8(Audio+1))
		s, a := NewStream(kind, false), NewAssembler(kind, most)
		s.Assemble(a)
		for rest := sse; len(rest) > 0; {
			n := min(len(rest), int(cut)%1000+1)
			if err := s.Feed(bytes.Clone(rest[:n]), func(Frame) error { return nil }); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
			if held := a.total(); held > 4*most+8*maxFrameHead {
				t.Fatalf("holds %d bytes", held)
			}
		}
		if err := s.End(func(Frame) error { return nil }); err != nil {
			t.Fatal(err)
		}
		body, ok := a.JSON()
		if !ok {
			if a.Err() == nil || body != nil {
				t.Fatalf("no reason, and %s", body)
			}
			return
		}
		if !s.Complete() {
			t.Fatalf("assembled a stream that is not complete: %s", body)
		}
		decoded(t, body)
		if again, err := Replay(kind, body, ReplayOptions{}); err == nil {
			wellFormed(t, kind, again)
			once := assembledWhole(t, kind, again)
			if kind == Chat || kind == Completion {
				once = withoutUsage(t, once)
				body = withoutUsage(t, body)
			}
			same(t, "assembled of the replay", once, body)
		}
	})
}

func assembledWhole(t *testing.T, kind Kind, sse []byte) []byte {
	t.Helper()
	body, ok, err := assemble(t, kind, 1<<20, sse)
	if !ok {
		t.Fatalf("a replay is not assembled: %v\n%s", err, sse)
	}
	return body
}

func withoutUsage(t *testing.T, body []byte) []byte {
	m, err := readMembers(body, "the answer")
	if err != nil {
		t.Fatal(err)
	}
	return m.append(nil, member{"usage", nil})
}

// FuzzReplay: whatever it is given, a replay is a well-formed stream that assembles to what it was
// given, or an error.
func FuzzReplay(f *testing.F) {
	for _, name := range []string{"chat", "chat_n2_logprobs", "chat_tools", "completions", "messages", "responses"} {
		f.Add(uint8(kindOf(name)), transcript(f, name))
	}
	f.Add(uint8(Message), []byte(`{"id":"m","type":"message","role":"assistant","model":"m","content":[{"type":"tool_use","id":"t","name":"f","input":{"a":"\""}},{"type":"thinking","thinking":"h","signature":"s"}],"stop_reason":"tool_use","usage":{"output_tokens":1}}`))
	f.Add(uint8(Response), []byte(`{"id":"r","object":"response","status":"completed","output":[{"type":"reasoning","id":"i","summary":[{"type":"summary_text","text":"s"}]},{"type":"function_call","id":"i","call_id":"c","name":"f","arguments":"{}"}]}`))
	f.Fuzz(func(t *testing.T, k uint8, body []byte) {
		kind := Kind(k % uint8(Audio+1))
		_, _ = Inspect(kind, body)
		sse, err := Replay(kind, body, ReplayOptions{})
		known, knownErr := Replay(kind, body, ReplayOptions{Sound: true}) // of what is none it ends, at least
		if jsontext.Value(body).IsValid(jsontext.AllowDuplicateNames(true)) && (!bytes.Equal(known, sse) || (err == nil) != (knownErr == nil)) {
			t.Fatalf("it is another stream where it is known to be JSON: %v, %v", err, knownErr)
		}
		if err != nil {
			if sse != nil {
				t.Fatal("a stream beside an error")
			}
			return
		}
		wellFormed(t, kind, sse)
		once := assembledWhole(t, kind, sse)
		if kind == Chat || kind == Completion {
			once, body = withoutUsage(t, once), withoutUsage(t, body)
		}
		same(t, "assembled of the replay", once, body)
	})
}
