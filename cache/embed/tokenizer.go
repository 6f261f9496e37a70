package embed

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

const (
	vocabWords = 30522 // of BERT, uncased
	maxWordLen = 100   // runes; a longer word is unknown, as in the reference
	unknownID  = 100   // [UNK]
	startID    = 101   // [CLS]
	endID      = 102   // [SEP]
	continuing = "##"  // before a piece that is not the beginning of a word
)

// tokenizer cuts a text into the pieces that BERT (uncased) reads, WordPiece after Wu et al.
// It gives the very ids of the reference, the "tokenizers" library with the model's own
// tokenizer.json, for every text: also for code points that the tables of that library are too
// old to know. It never changes once made.
type tokenizer struct {
	heads    map[string]uint16 // pieces that begin a word
	tails    map[string]uint16 // pieces within a word, without their ##
	specials map[string]uint16 // [CLS] and the like, which a text may contain
	later    *unicode.RangeTable
	longest  int // bytes of the longest piece
}

// newTokenizer reads a vocabulary: one piece a line, its id is the line.
func newTokenizer(vocab string) (*tokenizer, error) {
	words := strings.Split(strings.TrimSuffix(vocab, "\n"), "\n")
	if len(words) != vocabWords {
		return nil, fmt.Errorf("vocabulary: %d pieces, %d wanted", len(words), vocabWords)
	}
	t := &tokenizer{
		heads:    make(map[string]uint16, len(words)*4/5),
		tails:    make(map[string]uint16, len(words)/4),
		specials: map[string]uint16{},
		later:    laterRunes(),
	}
	for _, special := range []string{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} {
		t.specials[special] = 0
	}
	for i, word := range words {
		id := uint16(i)
		if _, ok := t.specials[word]; ok {
			t.specials[word] = id
		}
		if tail, ok := strings.CutPrefix(word, continuing); ok && tail != "" {
			t.tails[tail] = id
			// A text may hold the word ##x itself only as # # x: punctuation stands alone.
		} else {
			t.heads[word] = id
		}
		t.longest = max(t.longest, len(word))
	}
	if t.specials["[UNK]"] != unknownID || t.specials["[CLS]"] != startID || t.specials["[SEP]"] != endID {
		return nil, fmt.Errorf("vocabulary: [UNK], [CLS] and [SEP] are not where BERT has them")
	}
	return t, nil
}

// append adds the ids of text to ids, [CLS] before and [SEP] behind them, and stops once they
// are more than limit: then the text is longer than that, and its ids are of no use.
func (t *tokenizer) append(ids []uint16, text string, limit int) []uint16 {
	limit += len(ids)
	ids = append(ids, startID)
	var array [256]byte
	room := array[:0]
	emit := func(word []byte) bool {
		ids = t.appendWord(ids, word)
		return len(ids) < limit
	}
	for text != "" && len(ids) < limit {
		plain, id, rest := t.cutSpecial(text)
		room = t.eachWord(room, plain, emit)
		if len(plain) == len(text) {
			break
		}
		ids, text = append(ids, id), rest
	}
	return append(ids, endID)
}

// cutSpecial cuts text at the first special piece in it, whose id it gives. Without one all of
// text is plain.
func (t *tokenizer) cutSpecial(text string) (plain string, id uint16, rest string) {
	for from := 0; ; {
		at := strings.IndexByte(text[from:], '[')
		if at < 0 {
			return text, 0, ""
		}
		at += from
		if end := strings.IndexByte(text[at:min(len(text), at+len("[MASK]"))], ']'); end > 0 {
			if id, ok := t.specials[text[at:at+end+1]]; ok {
				return text[:at], id, text[at+end+1:]
			}
		}
		from = at + 1
	}
}

// eachWord gives the words of a text without special pieces one after another to emit, in
// lower case and without accents, every mark alone, until it says stop. They are built in
// room, which is given back, and last until emit returns.
func (t *tokenizer) eachWord(room []byte, text string, emit func(word []byte) (more bool)) []byte {
	if !isASCII(text) {
		text = t.decompose(text)
	}
	word := room[:0]
	for _, r := range text {
		class := t.class(r)
		if class == letter {
			word = utf8.AppendRune(word, lower(r))
			continue
		}
		if class == dropped {
			continue
		}
		if len(word) > 0 && !emit(word) {
			return word
		}
		word = word[:0]
		if class == mark {
			if word = utf8.AppendRune(word, r); !emit(word) {
				return word
			}
			word = word[:0]
		}
	}
	if len(word) > 0 {
		emit(word)
	}
	return word
}

// appendWord adds the ids of the pieces of word: always the longest that fits. A word that
// cannot be cut into pieces is one unknown.
func (t *tokenizer) appendWord(ids []uint16, word []byte) []uint16 {
	if len(word) > maxWordLen && utf8.RuneCount(word) > maxWordLen {
		return append(ids, unknownID)
	}
	kept := len(ids)
	pieces := t.heads
	for start := 0; start < len(word); pieces = t.tails {
		end := min(len(word), start+t.longest)
		for ; end > start; end-- {
			if id, ok := pieces[string(word[start:end])]; ok {
				ids = append(ids, id)
				break
			}
		}
		if end == start {
			return append(ids[:kept], unknownID)
		}
		start = end
	}
	return ids
}

// decompose drops what is no part of a text, sets Chinese apart, and decomposes the rest
// (NFD): in this order, as the reference does.
func (t *tokenizer) decompose(text string) string {
	clean := make([]byte, 0, len(text)+64)
	for _, r := range text { // what is not UTF-8 reads as U+FFFD, which is dropped
		switch {
		case isChinese(r):
			clean = append(clean, ' ')
			clean = utf8.AppendRune(clean, r)
			clean = append(clean, ' ')
		case unicode.Is(unicode.Mn, r):
			clean = utf8.AppendRune(clean, r) // it matters to the order of others
		case t.class(r) != dropped:
			clean = utf8.AppendRune(clean, r)
		}
	}
	return string(norm.NFD.Append(make([]byte, 0, len(clean)*2), clean...))
}

func isASCII(text string) bool {
	for i := range len(text) {
		if text[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}
