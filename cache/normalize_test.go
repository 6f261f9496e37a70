package cache

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"pgregory.net/rapid"
)

func TestNormalizeText(t *testing.T) {
	for _, c := range []struct{ in, space, fold string }{
		{"", "", ""},
		{" \t\n ", "", ""},
		{"  Hello \r\n\v\f World\t", "Hello World", "hello world"},
		{"a\u00a0b\u2003\u3000c\u2028", "a b c", "a b c"},
		{"a\u200bb", "a\u200bb", "a\u200bb"}, // no white space, by Unicode
		{"e\u0301", "é", "é"},
		{"É", "É", "é"},
		{"E\u0301", "É", "é"},
		{"Straße", "Straße", "strasse"},
		{"ΣΊΣΥΦΟΣ ς", "ΣΊΣΥΦΟΣ ς", "σίσυφοσ σ"},
		{"İI", "İI", "i\u0307i"},
		{"\u212a", "K", "k"}, // the sign of Kelvin is a K, canonically
		{"ﬁ ①", "ﬁ ①", "fi ①"},
		{"Ꭰꭰ Ᏸᏸ", "Ꭰꭰ Ᏸᏸ", "ᎠᎠ ᏰᏰ"},
		{"Not", "Not", "not"},
		{"[]{|}~@`", "[]{|}~@`", "[]{|}~@`"},
	} {
		if got := normalizeText([]byte(c.in), false); string(got) != c.space {
			t.Errorf("space of %q: %q, want %q", c.in, got, c.space)
		}
		if got := normalizeText([]byte(c.in), true); string(got) != c.fold {
			t.Errorf("fold of %q: %q, want %q", c.in, got, c.fold)
		}
	}
}

// normalizeHolds says what is wrong with the normalized forms of s.
func normalizeHolds(s string) string {
	space, fold := normalizeText([]byte(s), false), normalizeText([]byte(s), true)
	switch {
	case !utf8.Valid(space) || !utf8.Valid(fold):
		return fmt.Sprintf("%q became %q and %q", s, space, fold)
	case string(normalizeText(bytes.Clone(space), false)) != string(space):
		return fmt.Sprintf("the space of %q, %q, is not stable", s, space)
	case string(normalizeText(bytes.Clone(fold), true)) != string(fold):
		return fmt.Sprintf("the fold of %q, %q, is not stable", s, fold)
	case string(normalizeText(bytes.Clone(space), true)) != string(fold):
		return fmt.Sprintf("the fold of %q is %q, of its space %q", s, fold, space)
	case string(normalizeText(norm.NFD.Bytes([]byte(s)), true)) != string(fold):
		return fmt.Sprintf("the fold of %q depends on its form", s)
	case string(space) != strings.Join(strings.FieldsFunc(norm.NFC.String(s), unicode.IsSpace), " "):
		return fmt.Sprintf("the space of %q is %q", s, space)
	}
	return ""
}

func TestNormalizeHolds(t *testing.T) {
	for r := rune(0); r <= unicode.MaxRune; r++ {
		if unicode.In(r, unicode.Han, unicode.Hangul) || !unicode.In(r, unicode.L, unicode.M, unicode.Z, unicode.Nl, unicode.So) {
			continue // nothing to fold or compose alone
		}
		if bad := normalizeHolds("a" + string(r) + "\u0345\u0301"); bad != "" {
			t.Fatal(bad)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.OneOf(rapid.String(), rapid.StringOf(rapid.RuneFrom([]rune(" \t\u2003aAßİıſKÅ\u0301\u0307\u0345\u0323ΐᾳςΣ")))).Draw(t, "text")
		if bad := normalizeHolds(s); bad != "" && utf8.ValidString(s) {
			t.Fatal(bad)
		}
	})
}

// What may differ for two requests to be one, and what may not, in each kind of request.
func TestNormalizeOnlyLastUserText(t *testing.T) {
	const chat, messages, responses, completions = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
	turn := func(role, content string) string { return `{"role":"` + role + `","content":` + content + `}` }
	one, other := `"Hello  World "`, `"hello world"`
	for _, c := range []struct {
		name, path, format string
		same               bool
	}{
		{"text", chat, `{"messages":[` + turn("user", "%s") + `]}`, true},
		{"escaped names", chat, `{"messag\u0065s":[{"rol\u0065":"us\u0065r","content":%s}]}`, true},
		{"part", chat, `{"messages":[` + turn("user", `[{"type":"text","text":%s}]`) + `]}`, true},
		{"part of a later kind", chat, `{"messages":[` + turn("user", `[{"type":"image_url","image_url":{"url":%s}}]`) + `]}`, false},
		{"part without a type", chat, `{"messages":[` + turn("user", `[{"text":%s}]`) + `]}`, false},
		{"another member of a part", chat, `{"messages":[` + turn("user", `[{"type":"text","text":"a","x":%s}]`) + `]}`, false},
		{"two parts", chat, `{"messages":[` + turn("user", `[{"type":"text","text":"a"},{"type":"text","text":%s}]`) + `]}`, true},
		{"before an answer", chat, `{"messages":[` + turn("user", "%s") + `,` + turn("assistant", `"A"`) + `,` + turn("tool", `"T"`) + `]}`, true},
		{"not the last", chat, `{"messages":[` + turn("user", "%s") + `,` + turn("user", `"A"`) + `]}`, false},
		{"system", chat, `{"messages":[` + turn("system", "%s") + `,` + turn("user", `"A"`) + `]}`, false},
		{"assistant", chat, `{"messages":[` + turn("user", `"A"`) + `,` + turn("assistant", "%s") + `]}`, false},
		{"name", chat, `{"messages":[{"role":"user","content":"A","name":%s}]}`, false},
		{"tools", chat, `{"messages":[` + turn("user", `"A"`) + `],"tools":[%s]}`, false},
		{"nested", chat, `{"messages":[],"x":{"messages":[` + turn("user", "%s") + `]}}`, false},
		{"no role", chat, `{"messages":[{"content":%s}]}`, false},
		{"messages that are none", chat, `{"messages":{"role":"user","content":%s}}`, false},
		{"content of the body", chat, `{"role":"user","content":%s,"messages":[]}`, false},
		{"anthropic", messages, `{"messages":[` + turn("user", "%s") + `],"system":"S"}`, true},
		{"anthropic part", messages, `{"messages":[` + turn("user", `[{"type":"text","text":%s}]`) + `]}`, true},
		{"anthropic result", messages, `{"messages":[` + turn("user", `[{"type":"tool_result","content":%s}]`) + `]}`, false},
		{"anthropic result with parts", messages, `{"messages":[` + turn("user", `[{"type":"tool_result","content":[{"type":"text","text":%s}]}]`) + `]}`, false},
		{"anthropic system", messages, `{"messages":[` + turn("user", `"A"`) + `],"system":%s}`, false},
		{"input", responses, `{"input":%s}`, true},
		{"input item", responses, `{"input":[` + turn("user", "%s") + `,{"type":"function_call_output","output":"o"}]}`, true},
		{"input part", responses, `{"input":[` + turn("user", `[{"type":"input_text","text":%s}]`) + `]}`, true},
		{"output", responses, `{"input":[` + turn("user", `"A"`) + `,{"type":"function_call_output","output":%s}]}`, false},
		{"instructions", responses, `{"input":"A","instructions":%s}`, false},
		{"prompt", completions, `{"prompt":%s}`, true},
		{"prompts", completions, `{"prompt":[%s]}`, false},
		{"suffix", completions, `{"prompt":"A","suffix":%s}`, false},
		{"embedded", "/v1/embeddings", `{"input":%s}`, false},
		{"another path", "/v1/rerank", `{"messages":[` + turn("user", "%s") + `]}`, false},
		{"no object", chat, `[%s]`, false},
	} {
		for _, mode := range []string{"", NormalizeNone, NormalizeSpace, NormalizeFold} {
			a, b := keyContext(fmt.Sprintf(c.format, one)), keyContext(fmt.Sprintf(c.format, other))
			a.Path, b.Path, a.Normalize, b.Normalize = c.path, c.path, mode, mode
			if same := keyOf(t, a) == keyOf(t, b); same != (c.same && mode == NormalizeFold) {
				t.Errorf("%s, normalize %q: same %v", c.name, mode, same)
			}
			b.Body = fmt.Appendf(nil, c.format, `"\tHello\u00a0World"`)
			if same := keyOf(t, a) == keyOf(t, b); same != (c.same && (mode == NormalizeFold || mode == NormalizeSpace)) {
				t.Errorf("%s, normalize %q: white space: same %v", c.name, mode, same)
			}
			b.Body = fmt.Appendf(nil, c.format, `"Hello Worlds"`)
			if keyOf(t, a) == keyOf(t, b) {
				t.Errorf("%s, normalize %q: another word has the same key", c.name, mode)
			}
		}
	}
}
