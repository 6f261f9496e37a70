package openai

import (
	"strings"
	"testing"
)

// TestMostBoundsWhatPassed: a token for each byte of whatever may be text, one for a chunk without, and what was reported
// in place of all before.
func TestMostBoundsWhatPassed(t *testing.T) {
	chat := func(delta string) string { return `{"choices":[{"index":0,"delta":` + delta + `}]}` }
	long := strings.Repeat("x", MaxFrame)
	for _, c := range []struct {
		name       string
		kind       Kind
		data       []string
		one, three int64 // of so many sequences, at least
		slack      int64 // at most that much above
	}{
		{"text", Chat, []string{chat(`{"role":"assistant","content":""}`), chat(`{"content":"abc"}`), chat(`{"content":"abc"}`), chat(`{"content":""}`)}, 8, 8, 2},
		{"escapes", Chat, []string{chat(`{"content":"\n\"é"}`)}, 4, 4, 4},
		{"reasoning", Chat, []string{chat(`{"reasoning_content":"abc","content":null}`), chat(`{"reasoning":"abc"}`)}, 8, 8, 0},
		{"refusal", Chat, []string{chat(`{"refusal":"abc"}`)}, 4, 4, 0},
		{"unknown", Chat, []string{chat(`{"later_found":{"a":["abc",{"b":"de"}]},"role":"assistant"}`)}, 6, 6, 0},
		{"unknown beside text", Chat, []string{chat(`{"x":"abcdefgh","content":"i"}`), chat(`{"x":"abcdefgh","content":"i"}`), chat(`{"x":"abcdefgh","content":"j"}`)}, 30, 30, 0},
		{"a call", Chat, []string{chat(`{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]}`)}, 9, 9, 3},
		{"two choices", Chat, []string{`{"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":""}}]}`}, 3, 3, 0},
		{"completion", Completion, []string{`{"choices":[{"index":0,"text":"abc"}]}`, `{"choices":[{"index":0,"text":"abcd"}]}`}, 9, 9, 0},
		{"whole message", Chat, []string{`{"choices":[{"index":0,"message":{"role":"assistant","content":"abc"}}]}`}, 4, 4, 0},
		{"response", Response, []string{`{"type":"response.output_text.delta","delta":"abc"}`, `{"type":"x","delta":"abc"}`}, 7, 7, 0},
		{"anthropic", Message, []string{`{"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}`, `{"type":"content_block_start","content_block":{"type":"text","text":"ab"}}`, `{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"abc"}}`}, 7, 6, 0},
		{"reported", Chat, []string{chat(`{"content":"abcdef"}`), `{"choices":[{"index":0,"delta":{"content":"abc"}}],"usage":{"prompt_tokens":1,"completion_tokens":2}}`, chat(`{"content":"de"}`)}, 5, 14, 0},
		{"reported again", Chat, []string{`{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}`, chat(`{"content":"de"}`), `{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}`}, 5, 3, 0},
		{"nonsense", Chat, []string{`abcdef`}, 6, 6, 0},
		{"deep", Chat, []string{chat(strings.Repeat(`{"x":`, 40) + `"abc"` + strings.Repeat(`}`, 40))}, 4, 4, 300},
		{"long", Chat, []string{chat(`{"content":"` + long + `"}`)}, MaxFrame, MaxFrame, 200},
	} {
		s := NewStream(c.kind, false)
		for _, d := range c.data {
			if err := s.Feed([]byte("data: "+d+"\n\n"), func(Frame) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		for n, want := range map[int64]int64{1: c.one, 3: c.three} {
			if got := s.Most(n); got < want || got > want+c.slack {
				t.Errorf("%s, %d sequences: %d, want %d and at most %d more", c.name, n, got, want, c.slack)
			}
		}
	}
}

// TestWhatHides: fields by which a server may generate what it does not send.
func TestWhatHides(t *testing.T) {
	for _, c := range []struct {
		body, hidden string
		held         int64
	}{
		{`{"model":"m","temperature":1,"stop":null,"tools":null,"n":4,"best_of":4,"include_reasoning":true,"ignore_eos":false}`, "", 0},
		{`{"best_of":1}`, "", 0},
		{`{"best_of":2}`, "best_of", 0},
		{`{"n":2,"best_of":3}`, "best_of", 0},
		{`{"include_reasoning":false}`, "include_reasoning", 0},
		{`{"include_reasoning":"no"}`, "include_reasoning", 0},
		{`{"stream_reasoning":0}`, "stream_reasoning", 0},
		{`{"use_beam_search":true}`, "use_beam_search", 0},
		{`{"ignore_\u0065os":1}`, "ignore_eos", 0},
		{`{"logit_bias":{}}`, "logit_bias", 0},
		{`{"reasoning":{"exclude":true}}`, "reasoning", 0},
		{`{"tools":[]}`, "tools", 0},
		{`{"thinking":{"type":"enabled","budget_tokens":9,"display":"omitted"}}`, "thinking", 0},
		{`{"stop":["abc"]}`, "", 4 * 7},
	} {
		r, err := Meter(Chat, []byte(c.body))
		if err != nil || r.Bounds.Hidden != c.hidden || r.Bounds.Held != c.held {
			t.Errorf("%s: %v, hidden %q, held %d", c.body, err, r.Bounds.Hidden, r.Bounds.Held)
		}
	}
}
