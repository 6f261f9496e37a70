package cache

import (
	"fmt"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// What of the last user text does not count; values of Context.Normalize, beside "" for none.
const (
	NormalizeNone  = "none"
	NormalizeSpace = "space" // which white space, how much, and any at the ends; composed or not
	NormalizeFold  = "fold"  // that, and the case
)

// normalize rewrites the last user text of the body as c.Normalize says.
func (s *keyScratch) normalize(c *Context) error {
	fold := c.Normalize == NormalizeFold
	switch c.Normalize {
	case "", NormalizeNone:
		return nil
	case NormalizeSpace, NormalizeFold:
	default:
		return fmt.Errorf("cache: normalize is %q; use none, space or fold", c.Normalize)
	}
	s.texts = s.doc.lastUser(s.texts[:0], c.Path)
	for _, i := range s.texts {
		s.plain = s.doc.decode(s.plain[:0], i)
		s.doc.replace(i, normalizeText(s.plain, fold))
	}
	return nil
}

// lastUser appends the strings that are the last user text of a request to path: the text of
// the last message of role user (also of the items of /v1/responses), an input or a prompt
// that is one string. None, where there is none; images and results of tools are none.
func (d *canonDoc) lastUser(dst []uint32, path string) []uint32 {
	switch path {
	case "/v1/chat/completions", "/v1/messages":
		if messages, ok := d.member(0, "messages"); ok {
			return d.lastMessage(dst, messages)
		}
	case "/v1/responses":
		if input, ok := d.member(0, "input"); ok {
			if d.tokens[input].kind == canonString {
				return append(dst, input)
			}
			return d.lastMessage(dst, input)
		}
	case "/v1/completions":
		if prompt, ok := d.member(0, "prompt"); ok && d.tokens[prompt].kind == canonString {
			return append(dst, prompt)
		}
	}
	return dst
}

// lastMessage appends the texts of the last element of the array that has the role user.
func (d *canonDoc) lastMessage(dst []uint32, array uint32) []uint32 {
	if d.tokens[array].kind != canonArray {
		return dst
	}
	var last uint32 // 0 is the body itself
	for m := array + 1; m < d.tokens[array].next; m = d.tokens[m].next {
		if role, ok := d.member(m, "role"); ok && d.is(role, "user") {
			last = m
		}
	}
	content, ok := d.member(last, "content")
	switch {
	case last == 0 || !ok:
	case d.tokens[content].kind == canonString:
		return append(dst, content)
	case d.tokens[content].kind == canonArray:
		for p := content + 1; p < d.tokens[content].next; p = d.tokens[p].next {
			kind, ok := d.member(p, "type")
			if !ok || !d.is(kind, "text") && !d.is(kind, "input_text") {
				continue
			}
			if text, ok := d.member(p, "text"); ok && d.tokens[text].kind == canonString {
				dst = append(dst, text)
			}
		}
	}
	return dst
}

// normalizeText returns s with one blank for each run of white space, none at the ends,
// composed (NFC) and, if fold, without case (Unicode's full folding, by its definition D145).
// It may overwrite s. Doing it again changes nothing.
func normalizeText(s []byte, fold bool) []byte {
	if !normalizeASCII(s) {
		if fold {
			s = cases.Fold().Bytes(norm.NFD.Bytes(s))
		}
		s = norm.NFC.Bytes(s)
	}
	out, gap := s[:0], false // out never overtakes what is read: a blank is the shortest space
	for i, n := 0, 0; i < len(s); i += n {
		c := s[i]
		space := c == ' ' || '\t' <= c && c <= '\r'
		r := rune(c)
		if n = 1; c >= utf8.RuneSelf {
			r, n = utf8.DecodeRune(s[i:])
			space = unicode.IsSpace(r)
		}
		switch {
		case space:
			gap = len(out) > 0
			continue
		case gap:
			out, gap = append(out, ' '), false
		}
		switch {
		case fold && 'A' <= c && c <= 'Z':
			out = append(out, c+'a'-'A')
		case fold && n > 1 && unicode.Is(unicode.Cherokee, r): // whose cases package cases swaps
			out = utf8.AppendRune(out, unicode.ToUpper(r))
		default:
			out = append(out, s[i:i+n]...)
		}
	}
	return out
}

func normalizeASCII(s []byte) bool {
	for _, c := range s {
		if c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}
