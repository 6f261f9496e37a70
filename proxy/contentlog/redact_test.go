package contentlog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func mustCompile(t testing.TB, names ...string) redactor {
	t.Helper()
	r, err := compileRedactor(names)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestFind(t *testing.T) {
	cases := []struct{ rule, text, want string }{
		{"email", "write to bob.o'neil+x@mail.example.com, or", "write to [email], or"},
		{"email", "<a@b.co> jörg@bücher.example.", "<[email]> [email]."},
		{"email", "a@b @b.co x@ a@b. user@host.c 3@4", "a@b @b.co x@ a@b. user@host.c 3@4"},
		{"card", "4111 1111 1111 1111", "[card]"},
		{"card", "no 12 4111-1111-1111-1111 exp 12/29", "no 12 [card] exp 12/29"},
		{"card", "378282246310005,5555555555554444", "[card],[card]"},
		{"card", "4111111111111112 1767225600000 41111111111111111111111", "4111111111111112 1767225600000 41111111111111111111111"},
		{"card", "4111\u00a01111\u00a01111\u00a01111", "[card]"},
		{"phone", "call +49 (0)30 901820 now", "call [phone] now"},
		{"phone", "(415) 555-2671 or 415.555.2671 or 1-415-555-2671", "[phone] or [phone] or [phone]"},
		{"phone", "020 7946 0958; 06 12 34 56 78; 0049301234567", "[phone]; [phone]; [phone]"},
		{"phone", "1767225600 2026-05-03 0.0123456789 id0123456789 12 345 678", "1767225600 2026-05-03 0.0123456789 id0123456789 12 345 678"},
		{"[A-Z]{2}[0-9]{6}", "pass AB123456.", "pass [redacted]."},
		{"x*", "no xx", "no [redacted]"},
	}
	for _, c := range cases {
		got := string(replace([]byte(c.text), 0, mustCompile(t, c.rule).find([]byte(c.text), maxEscapes)))
		if got != c.want {
			t.Errorf("%s: %q: got %q, want %q", c.rule, c.text, got, c.want)
		}
	}
}

func TestRedactBodies(t *testing.T) {
	frames := func(parts ...string) string {
		var b strings.Builder
		for _, p := range parts {
			fmt.Fprintf(&b, "data: %s\n\n", p)
		}
		return b.String()
	}
	delta := func(index int, s string) string {
		return fmt.Sprintf(`{"id":"c-41","choices":[{"delta":{"content":%q},"index":%d}]}`, s, index)
	}
	long := strings.Repeat("word ", 100)
	cases := []struct {
		name, body string
		cut        bool
		want       string
	}{
		{"untouched bytes stay", `{ "a" : 1.50, "b":"\u00e9\/", "c":"x@y.io"}`, false, `{ "a" : 1.50, "b":"\u00e9\/", "c":"[email]"}`},
		{"escaped", `{"a":"bob\u0040x\u002eorg\nhi"}`, false, `{"a":"[email]\nhi"}`},
		{"escaped solidus, digits", `{"a":"\u0034111\/1111\/1111\/1111"}`, false, `{"a":"[card]"}`},
		{"a JSON text in a string", `{"arguments":"{\"to\":\"bob\\u0040x.org\"}"}`, false, `{"arguments":"{\"to\":\"[email]\"}"}`},
		{"a name", `{"bob@x.org":true}`, false, `{"[email]":true}`},
		{"a number", `{"card":4111111111111111,"n":12}`, false, `{"card":"[card]","n":12}`},
		{"own rule stays in its string", `{"a":"secret: x","b":"y"}`, false, `{"a":"[redacted]","b":"y"}`},
		{"a string alone", `"bob@x.org"`, false, `"[email]"`},
		{"not JSON", `{"a":"bob\u0040x.org`, false, `{"a":"[email]`},
		{"cut", `{"a":"` + long + `bob@x.org ` + long + `4111 1111 11`, true, `{"a":"` + long + `[email] ` + (long + `4111 1111 11`)[:len(long)+12-holdBack] + cutLabel},
		{"cut and short", `{"a":"4111 11`, true, cutLabel},
		{
			"across frames", frames(delta(0, "I am bo"), delta(0, "b@x"), delta(0, ".org, bye")), false,
			frames(delta(0, "I am [email]"), delta(0, ""), delta(0, ", bye")),
		},
		{
			"across frames, two choices", frames(delta(0, "bob@"), delta(1, "4111 1111 "), delta(0, "x.org"), delta(1, "1111 1111")), false,
			frames(delta(0, "[email]"), delta(1, "[card]"), delta(0, ""), delta(1, "")),
		},
		{
			"across frames, escaped arguments", frames(`{"delta":"{\"a\":\"bob\\u0"}`, `{"delta":"040x.org\"}"}`), false,
			frames(`{"delta":"{\"a\":\"[email]"}`, `{"delta":"\"}"}`),
		},
		{"ids are not joined", frames(`{"id":"4111111"}`, `{"id":"111111111"}`), false, frames(`{"id":"4111111"}`, `{"id":"111111111"}`)},
		{"other lines", ": a@b.io\r\nevent: x\r\ndata: a@b.io\r\ndata: [DONE]\r\n\r\n", false, ": [email]\r\nevent: x\r\ndata: [email]\r\ndata: [DONE]\r\n\r\n"},
		{
			"a cut stream", frames(delta(0, "word "), delta(0, "4111 1111 ")) + `data: {"choi`, true,
			frames(delta(0, cutLabel), delta(0, "")) + cutLabel,
		},
	}
	r := mustCompile(t, "email", "card", "secret.*")
	for _, c := range cases {
		got, isJSON := r.body([]byte(c.body), c.cut)
		if string(got) != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, c.want)
		}
		if isJSON != (!c.cut && json.Valid([]byte(c.body))) {
			t.Errorf("%s: JSON %v", c.name, isJSON)
		}
	}
	if got, _ := redactor(nil).body([]byte(`{"a":"bob@x.org`), true); string(got) != `{"a":"bob@x.org` {
		t.Errorf("without rules: %s", got)
	}
}

var zeros = regexp.MustCompile("0+")

// Valid documents stay valid, whatever the rules find in them, and nothing is left to find
// in any string by a rule that no label answers to.
func FuzzBody(f *testing.F) {
	for _, s := range []string{
		`{"a":"bob\u0040x.org","n":4111111111111111}`, "data: {\"delta\":\"a@\"}\n\ndata: {\"delta\":\"b.io\"}\n\n", `{"a":"\\u00`,
		`["\ud83d\ude00 +49 30 901820","\ud83d"]`, `{"index":1,"x":[{"y":"0"}]}`, `"\\\\u0040"`, "id: 1\rdata:1",
	} {
		f.Add([]byte(s), false)
		f.Add([]byte(s), true)
	}
	r := mustCompile(f, "email", "phone", "card", "0+")
	f.Fuzz(func(t *testing.T, body []byte, cut bool) {
		body = bytes.ToValidUTF8(body, []byte("\uFFFD"))
		before := string(body)
		out, isJSON := r.body(body, cut)
		if string(body) != before {
			t.Fatal("the body was changed in place")
		}
		if isJSON != (!cut && json.Valid(body)) || isJSON && !json.Valid(out) {
			t.Fatalf("%q became %q", body, out)
		}
		if !isJSON {
			return
		}
		for _, l := range leaves(out, extent{0, len(out)}) {
			if left := findPattern(zeros, l.text(out)); len(left) > 0 && !l.number {
				t.Fatalf("%q became %q: %v is left", body, out, left)
			}
		}
	})
}

func TestStemsAreSafeAndDistinct(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}`)
		a, b := name.Draw(t, "a"), name.Draw(t, "b")
		s := stem(a)
		if strings.ContainsAny(s, "./:@") || strings.ToLower(s) != s || len(s) > maxStem {
			t.Fatalf("stem %q", s)
		}
		if (a == b) != strings.EqualFold(s, stem(b)) {
			t.Fatalf("%q and %q share %q", a, b, s)
		}
		at := file{stem: s, seq: 12345}
		if back, ok := parseFile(at.name()); !ok || back.name() != at.name() {
			t.Fatalf("%q read as %+v", at.name(), back)
		}
	})
	for _, name := range []string{".lock", "a.2026-05-03.1.jsonl", "a.2026-13-03.0001.jsonl", "a.b.2026-05-03.0001.jsonl", ".2026-05-03.0001.jsonl"} {
		if f, ok := parseFile(name); ok {
			t.Errorf("%q read as %+v", name, f)
		}
	}
}

func BenchmarkBody(b *testing.B) {
	r := mustCompile(b, "email", "phone", "card")
	chat, _ := json.Marshal(map[string]any{"messages": []any{map[string]any{"content": strings.Repeat("Some words, 12 numbers; and\nlines. ", 8000)}}})
	var stream bytes.Buffer
	for range 2000 {
		stream.WriteString("data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n")
	}
	for name, body := range map[string][]byte{"chat": chat, "stream": stream.Bytes()} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				r.body(body, false)
			}
		})
	}
}
