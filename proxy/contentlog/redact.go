package contentlog

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// span is a piece of a text that must not be kept, and what is written in its place.
type span struct {
	start, end int
	label      string
}

// redactor finds what must not be kept. The zero value finds nothing.
type redactor []func(text []byte) []span

const (
	maxRuleBytes = 1024
	// maxEscapes is how many layers of escaping are seen through: a JSON string in a JSON
	// string (the arguments of a tool call) in a body that is not valid JSON.
	maxEscapes = 3
	// holdBack is what is left out, in bytes, at the end of a text that was cut: the cut may
	// go through a card number, whose rest no rule would know.
	holdBack = 256
	cutLabel = "[cut]"
)

func compileRedactor(names []string) (redactor, error) {
	if len(names) > maxRules {
		return nil, fmt.Errorf("more than %d redaction rules", maxRules)
	}
	var r redactor
	for _, name := range names {
		switch name {
		case "email":
			r = append(r, findEmails)
		case "phone":
			r = append(r, findPhones)
		case "card":
			r = append(r, findCards)
		default:
			if len(name) > maxRuleBytes {
				return nil, fmt.Errorf("a redaction rule is longer than %d bytes", maxRuleBytes)
			}
			re, err := regexp.Compile(name)
			if err != nil {
				return nil, fmt.Errorf("redaction rule: %w", err)
			}
			r = append(r, func(text []byte) []span { return findPattern(re, text) })
		}
	}
	return r, nil
}

// body redacts a body of valid UTF-8; cut says that it is not the whole. It reports whether
// the result is valid JSON. A body that is not touched is returned as it is.
func (r redactor) body(b []byte, cut bool) (out []byte, isJSON bool) {
	isJSON = !cut && json.Valid(b)
	switch {
	case len(r) == 0:
		return b, isJSON
	case isJSON:
		return r.documents(b, []extent{{0, len(b)}}, false, false), true
	case isEventStream(b):
		return r.eventStream(b, cut), false
	}
	spans := r.find(b, maxEscapes)
	if cut {
		spans = merge(append(spans, tail(len(b))))
	}
	return replace(b, 0, spans), false
}

// tail is the piece at the end of a cut text of n bytes that is held back.
func tail(n int) span { return span{max(0, n-holdBack), n, cutLabel} }

// find returns what the rules find in text, and in text with its JSON escapes undone up to
// depth times; in order and not overlapping.
func (r redactor) find(text []byte, depth int) []span {
	var spans []span
	for _, rule := range r {
		spans = append(spans, rule(text)...)
	}
	if depth > 0 && bytes.IndexByte(text, '\\') >= 0 {
		if plain, at := unescape(text); plain != nil {
			for _, s := range r.find(plain, depth-1) {
				end := s.end // of the escape that made the last byte
				for end < len(plain) && at[end] == at[s.end-1] {
					end++
				}
				spans = append(spans, span{int(at[s.start]), int(at[end]), s.label})
			}
		}
	}
	return merge(spans)
}

// merge orders spans and joins those that overlap; the first one's label stays.
func merge(spans []span) []span {
	slices.SortStableFunc(spans, func(a, b span) int { return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(b.end, a.end)) })
	out := spans[:0]
	for _, s := range spans {
		if s.start >= s.end {
			continue
		}
		if n := len(out); n > 0 && s.start < out[n-1].end {
			out[n-1].end = max(out[n-1].end, s.end)
			continue
		}
		out = append(out, s)
	}
	return out
}

// replace applies spans to part, which is the piece at offset of the text they were found
// in. A label stands where its span begins; a piece in which a span only goes on loses it.
func replace(part []byte, offset int, spans []span) []byte {
	var out []byte
	done := offset
	for _, s := range spans {
		start, end := max(s.start, offset), min(s.end, offset+len(part))
		if start >= end {
			continue
		}
		out = append(out, part[done-offset:start-offset]...)
		if s.start >= offset {
			out = append(out, s.label...)
		}
		done = end
	}
	if done == offset {
		return part
	}
	return append(out, part[done-offset:]...)
}

// unescape undoes JSON's escapes wherever they stand; a backslash that begins none stays.
// at[i] is where in text the byte i of plain comes from, at[len(plain)] the length of text.
// It returns nil if there was nothing to undo.
func unescape(text []byte) (plain []byte, at []int32) {
	found := false
	plain, at = make([]byte, 0, len(text)), make([]int32, 0, len(text)+1)
	for i := 0; i < len(text); {
		c, n := rune(0), 0
		if text[i] == '\\' {
			c, n = escape(text[i:])
		}
		if n == 0 {
			plain, at = append(plain, text[i]), append(at, int32(i))
			i++
			continue
		}
		found = true
		plain = utf8.AppendRune(plain, c)
		for len(at) < len(plain) {
			at = append(at, int32(i))
		}
		i += n
	}
	if !found {
		return nil, nil
	}
	return plain, append(at, int32(len(text)))
}

// escape reads the escape that text begins with: its rune and its length, 0 if it is none.
func escape(text []byte) (rune, int) {
	if len(text) < 2 {
		return 0, 0
	}
	if i := strings.IndexByte(`"\/bfnrt`, text[1]); i >= 0 {
		return rune("\"\\/\b\f\n\r\t"[i]), 2
	}
	high, ok := hex4(text)
	if !ok {
		return 0, 0
	}
	if utf16.IsSurrogate(high) {
		if low, ok := hex4(text[6:]); ok {
			if c := utf16.DecodeRune(high, low); c != utf8.RuneError {
				return c, 12
			}
		}
		return utf8.RuneError, 6
	}
	return high, 6
}

func hex4(text []byte) (rune, bool) {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	return rune(n), err == nil
}

func findPattern(re *regexp.Regexp, text []byte) []span {
	var spans []span
	for _, m := range re.FindAllIndex(text, -1) {
		spans = append(spans, span{m[0], m[1], "[redacted]"})
	}
	return spans
}

// findEmails finds addr-spec as people write it (RFC 5322 atoms, RFC 6531 letters; no quoted
// local part): it looks around each '@', at most 64 bytes back and 255 on (RFC 5321 §4.5.3.1).
func findEmails(text []byte) []span {
	var spans []span
	for at := 0; ; at++ {
		i := bytes.IndexByte(text[at:], '@')
		if i < 0 {
			return spans
		}
		at += i
		start, end := at, at+1
		for start > 0 && at-start < 64 && (isWord(text[start-1]) || strings.IndexByte(".!#$%&'*+/=?^`{|}~-", text[start-1]) >= 0) {
			start--
		}
		for end < len(text) && end-at < 256 && (isWord(text[end]) || text[end] == '.' || text[end] == '-') {
			end++
		}
		domain := bytes.TrimRight(text[at+1:end], ".-")
		dot := bytes.LastIndexByte(domain, '.')
		if start < at && dot > 0 && len(domain)-dot > 2 {
			spans = append(spans, span{start, at + 1 + len(domain), "[email]"})
		}
	}
}

// isWord holds for letters, digits and '_'; every byte beyond ASCII counts as a letter.
func isWord(c byte) bool {
	return isDigit(c) || 'a' <= c|0x20 && c|0x20 <= 'z' || c == '_' || c >= utf8.RuneSelf
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// digits is a group of digits in a text. It is joined to the group before if nothing but
// one to three of the signs that people part numbers with stands between.
type digits struct {
	start, end int
	joined     bool
}

func (d digits) len() int { return d.end - d.start }

func digitGroups(text []byte) []digits {
	var groups []digits
	for i := 0; i < len(text); {
		if !isDigit(text[i]) {
			i++
			continue
		}
		g := digits{start: i}
		for i < len(text) && isDigit(text[i]) {
			i++
		}
		g.end = i
		if n := len(groups); n > 0 {
			g.joined = isGap(text[groups[n-1].end:g.start])
		}
		groups = append(groups, g)
	}
	return groups
}

func isGap(between []byte) bool {
	if len(between) == 0 || len(between) > 9 || utf8.RuneCount(between) > 3 {
		return false
	}
	for _, c := range string(between) {
		if !strings.ContainsRune(" -.()/\u00a0\u202f\u2009\u2010\u2011\u2012\u2013", c) {
			return false
		}
	}
	return true
}

// extend calls each with the joined groups from[:1], from[:2], … while they have at most
// limit digits together.
func extend(from []digits, limit int, each func(groups []digits, total int)) {
	total := 0
	for j, g := range from {
		if total += g.len(); total > limit || j > 0 && !g.joined {
			return
		}
		each(from[:j+1], total)
	}
}

// findCards finds payment card numbers (ISO/IEC 7812: 13 to 19 digits with a valid Luhn
// digit), in groups or not. Numbers that begin with 0, 1 or 7 are no such cards; among them
// are timestamps in milliseconds.
func findCards(text []byte) []span {
	var spans []span
	groups := digitGroups(text)
	for i := 0; i < len(groups); i++ {
		if c := text[groups[i].start]; c == '0' || c == '1' || c == '7' {
			continue
		}
		found := 0
		extend(groups[i:], 19, func(part []digits, total int) {
			if total >= 13 && luhn(text, part) {
				found = len(part)
			}
		})
		if found > 0 {
			spans = append(spans, span{groups[i].start, groups[i+found-1].end, "[card]"})
			i += found - 1
		}
	}
	return spans
}

func luhn(text []byte, groups []digits) bool {
	sum, double := 0, false
	for _, g := range slices.Backward(groups) {
		for i := g.end - 1; i >= g.start; i-- {
			d := int(text[i] - '0')
			if double {
				if d *= 2; d > 9 {
					d -= 9
				}
			}
			sum, double = sum+d, !double
		}
	}
	return sum%10 == 0
}

// findPhones finds phone numbers in the usual spellings: international (+ or 00, 8 to 15
// digits, E.164), national with a leading 0 (9 to 12 digits), and North American (3-3-4
// digits). A run of digits without such a mark is no phone number: most are not.
func findPhones(text []byte) []span {
	var spans []span
	groups := digitGroups(text)
	for i := 0; i < len(groups); i++ {
		n, start := phone(text, groups[i:])
		if n == 0 {
			continue
		}
		spans = append(spans, span{start, groups[i+n-1].end, "[phone]"})
		i += n - 1
	}
	return spans
}

// phone returns how many groups make a phone number, 0 if none, and where it starts.
func phone(text []byte, groups []digits) (n, start int) {
	first := groups[0]
	start = first.start
	if start > 0 && text[start-1] == '(' {
		start--
	}
	plus := start > 0 && text[start-1] == '+'
	if plus {
		start--
	} else if start > 0 && (isWord(text[start-1]) || text[start-1] == '.') {
		return 0, 0 // the middle of a name or of a fraction
	}
	low, high := 0, 0
	switch zeros := text[first.start:first.end]; {
	case plus:
		low, high = 8, 15
	case bytes.HasPrefix(zeros, []byte("00")):
		low, high = 10, 17
	case zeros[0] == '0' && len(zeros) > 1:
		low, high = 9, 12
	}
	extend(groups, max(high, 11), func(part []digits, total int) {
		if high > 0 && low <= total && total <= high || northAmerican(text, part) {
			n = len(part)
		}
	})
	if n > 0 {
		if end := groups[n-1].end; end < len(text) && isWord(text[end]) && !plus {
			return 0, 0
		}
	}
	return n, start
}

func northAmerican(text []byte, groups []digits) bool {
	if len(groups) == 4 && groups[0].len() == 1 && text[groups[0].start] == '1' {
		groups = groups[1:]
	}
	return len(groups) == 3 && groups[0].len() == 3 && groups[1].len() == 3 && groups[2].len() == 4
}
