package openai

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// TestLikenessChangesNothing reads streams with and without the short cut.
func TestLikenessChangesNothing(t *testing.T) {
	texts := []string{"", "a", " wörter", `\"`, `\\`, `a\nb`, `","x":"`, strings.Repeat("long ", 40), `"usage":{`, `\"usage\":{`, "日本"}
	rng := rand.New(rand.NewPCG(1, 2))
	shapes := map[Kind]string{
		Chat:       `{"id":"x","choices":[{"index":%d,"delta":{"content":"%s"},"finish_reason":null}],"usage":null}`,
		Completion: `{"id":"x","choices":[{"index":%d,"text":"%s","finish_reason":null}]}`,
		Message:    `{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":"%s"}}`,
	}
	for kind, shape := range shapes {
		for range 200 {
			var in strings.Builder
			for range rng.IntN(30) {
				fmt.Fprintf(&in, "data: "+shape+"\n\n", rng.IntN(2), texts[rng.IntN(len(texts))])
				if rng.IntN(10) == 0 {
					in.WriteString(`data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9,"total_tokens":16}}` + "\n\n")
				}
				if rng.IntN(40) == 0 {
					in.WriteString(`data: {"error":{"message":"boom"}}` + "\n\n")
				}
			}
			quick, slow := NewStream(kind, true), NewStream(kind, true)
			slow.like.field = nil // nothing is ever remembered
			a, b := feedAll(t, quick, in.String()), feedAll(t, slow, in.String())
			if a != b || quick.generated != slow.generated || quick.Usage() != slow.Usage() || (quick.Failure() == nil) != (slow.Failure() == nil) {
				t.Fatalf("%v: %d and %d tokens, %+v and %+v for\n%s", kind, quick.Generated(), slow.Generated(), quick.Usage(), slow.Usage(), in.String())
			}
		}
	}
}

func feedAll(t *testing.T, s *Stream, in string) string {
	t.Helper()
	var out strings.Builder
	emit := func(f Frame) error { out.Write(f.Raw); return nil }
	if err := s.Feed([]byte(in), emit); err != nil {
		t.Fatal(err)
	}
	if err := s.End(emit); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestLikenessIsUsed keeps the short cut from being lost unnoticed.
func TestLikenessIsUsed(t *testing.T) {
	var l likeness
	l.field = []byte(`"content":"`)
	chunk := func(text string) []byte {
		return []byte(`{"choices":[{"index":0,"delta":{"content":"` + text + `"}}]}`)
	}
	l.remember(chunk("hello"), carried{tokens: 1, most: 5})
	if n, ok := l.match(chunk(strings.Repeat("x", deltaBytes+1))); !ok || n.tokens != 2 || n.bytes != deltaBytes+1 {
		t.Errorf("match: %v %v", n, ok)
	}
	if _, ok := l.match(chunk(`a\"b`)); ok {
		t.Error("a text with a quotation mark was not sent to the parser")
	}
}
