package embed

import "unicode"

// The classes of code points by which the reference cuts a text. Its tables are of Unicode 8,
// Go's are newer: laterRunes holds what has a class since then that would make a difference.
// TestEveryCodePoint compares all code points.

// laterRunes are the code points that are letters to the reference, as it does not know them.
func laterRunes() *unicode.RangeTable {
	return &unicode.RangeTable{
		R16: []unicode.Range16{
			{0x61D, 0x61D, 1},
			{0x7FD, 0x7FD, 1},
			{0x890, 0x8E2, 1},
			{0x9FD, 0x9FE, 1},
			{0xA76, 0xA76, 1},
			{0xAFA, 0xAFF, 1},
			{0xB55, 0xB55, 1},
			{0xC04, 0xC3C, 1},
			{0xC77, 0xC77, 1},
			{0xC84, 0xC84, 1},
			{0xD00, 0xD00, 1},
			{0xD3B, 0xD3C, 1},
			{0xD81, 0xD81, 1},
			{0xEBA, 0xEBA, 1},
			{0xECE, 0xECE, 1},
			{0x180F, 0x1886, 1},
			{0x1ABF, 0x1ACE, 1},
			{0x1B7D, 0x1B7E, 1},
			{0x1C89, 0x1C89, 1},
			{0x1DF6, 0x1DFB, 1},
			{0x2E43, 0x2E5D, 1},
			{0xA7CB, 0xA7DC, 1},
			{0xA82C, 0xA82C, 1},
			{0xA8C5, 0xA8C5, 1},
			{0xA8FF, 0xA8FF, 1},
			{0xA9BD, 0xA9BD, 1},
		},
		R32: []unicode.Range32{
			{0x10D24, 0x10F89, 1},
			{0x11070, 0x11074, 1},
			{0x110C2, 0x110CD, 1},
			{0x111CF, 0x111CF, 1},
			{0x1123E, 0x11241, 1},
			{0x1133B, 0x1133B, 1},
			{0x11438, 0x1145E, 1},
			{0x11660, 0x1166C, 1},
			{0x116B9, 0x116B9, 1},
			{0x1182F, 0x11FFF, 1},
			{0x12FF1, 0x13455, 1},
			{0x16E97, 0x16F4F, 1},
			{0x16FE2, 0x16FE4, 1},
			{0x1CF00, 0x1CF46, 1},
			{0x1E000, 0x1E4EF, 1},
			{0x1E944, 0x1E95F, 1},
		},
	}
}

// class is what a code point is to the reference.
type class uint8

const (
	letter  class = iota // part of a word: all that is nothing else
	blank                // ends a word
	mark                 // punctuation, or Chinese: a word of its own
	dropped              // control and format characters, and accents
)

func (t *tokenizer) class(r rune) class {
	switch {
	case r < 0x80:
		return classASCII(byte(r))
	case isChinese(r), r == 0x166D, r == 0x111C9:
		return mark
	case r == 0xFFFD, r == 0x1734:
		return dropped
	case unicode.In(r, unicode.Mn, unicode.Cf, unicode.Co, unicode.Cc):
		if unicode.Is(t.later, r) {
			return letter
		}
		return dropped
	case unicode.Is(unicode.P, r) && !unicode.Is(t.later, r):
		return mark
	case unicode.IsSpace(r):
		return blank
	}
	return letter
}

func classASCII(c byte) class {
	switch {
	case isAlnum(c):
		return letter
	case c == ' ', c == '\t', c == '\n', c == '\r':
		return blank
	case c < ' ', c == 0x7F:
		return dropped
	}
	return mark
}

func isAlnum(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'z'
}

// isChinese is the reference's notion of it, wherein Korean and the Japanese syllabaries are not.
func isChinese(r rune) bool {
	switch {
	case r < 0x3400:
		return false
	case r <= 0x4DBF, 0x4E00 <= r && r <= 0x9FFF, 0xF900 <= r && r <= 0xFAFF,
		0x20000 <= r && r <= 0x2A6DF, 0x2A700 <= r && r <= 0x2B73F, 0x2B740 <= r && r <= 0x2B81F,
		0x2B920 <= r && r <= 0x2CEAF, 0x2F800 <= r && r <= 0x2FA1F:
		return true
	}
	return false
}

func lower(r rune) rune {
	switch {
	case 'A' <= r && r <= 'Z':
		return r + 'a' - 'A'
	case r < 0x80:
		return r
	case r == 0xA7CB: // younger than Go's tables, and their small letters are in the vocabulary
		return 0x264
	case r == 0xA7DC:
		return 0x19B
	}
	return unicode.ToLower(r)
}
