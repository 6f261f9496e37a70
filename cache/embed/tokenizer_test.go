package embed

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// theTokenizer is that of the built-in model.
func theTokenizer(tb testing.TB) *tokenizer {
	tb.Helper()
	r, err := newReader(asset)
	if err != nil {
		tb.Fatal(err)
	}
	tok, err := newTokenizer(r.raw("vocab", "U8", -1))
	if err != nil {
		tb.Fatal(err)
	}
	return tok
}

// goldenIDs are 2,100 texts and the ids that the "tokenizers" library 0.23.3 gives with the
// model's tokenizer.json: questions, other scripts, and noise of all code points.
func goldenIDs(tb testing.TB) (texts []string, ids [][]uint16) {
	tb.Helper()
	f, err := os.Open("testdata/tokens.jsonl.gz")
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	for d := json.NewDecoder(z); ; {
		var line struct {
			Text string
			IDs  []uint16
		}
		if err := d.Decode(&line); errors.Is(err, io.EOF) {
			return texts, ids
		} else if err != nil {
			tb.Fatal(err)
		}
		texts, ids = append(texts, line.Text), append(ids, line.IDs)
	}
}

func TestTokenizerEqualsReference(t *testing.T) {
	tok := theTokenizer(t)
	texts, want := goldenIDs(t)
	if len(texts) < 2000 {
		t.Fatalf("%d golden texts", len(texts))
	}
	for i, text := range texts {
		if got := tok.append(nil, text, 1<<20); !slices.Equal(got, want[i]) {
			t.Errorf("%q: ids %v, the reference has %v", text, got, want[i])
		}
	}
}

// TestEveryCodePoint compares the ids of "a?b ?" for each code point with the reference's, by
// their hash. A newer Go whose Unicode tables know more would show here.
func TestEveryCodePoint(t *testing.T) {
	const want = "ccc07b3d7c4288bc91944131e219844208b9c76c0bb23e02ad4251b8318cd909"
	tok := theTokenizer(t)
	hash := sha256.New()
	var ids []uint16
	var raw, text []byte
	for r := rune(0); r <= utf8.MaxRune; r++ {
		if !utf8.ValidRune(r) {
			continue
		}
		text = utf8.AppendRune(append(text[:0], 'a'), r)
		text = utf8.AppendRune(append(text, "b "...), r)
		ids = tok.append(ids[:0], string(text), 100)
		raw = raw[:0]
		for _, id := range ids {
			raw = append(raw, byte(id), byte(id>>8))
		}
		hash.Write(raw)
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != want {
		t.Errorf("ids of all code points have the hash %s, the reference's have %s", got, want)
	}
}

func TestTokenizerStopsBeyondLimit(t *testing.T) {
	tok := theTokenizer(t)
	for _, text := range []string{
		strings.Repeat("money ", 1000), strings.Repeat("x", 100_000), strings.Repeat("[SEP]", 1000),
		strings.Repeat("!", 1000), strings.Repeat("unbelievablenesses ", 300), strings.Repeat("é中", 1000),
	} {
		whole := tok.append(nil, text, 1<<20)
		cut := tok.append(nil, text, 50)
		if len(whole) <= 50 != (len(cut) <= 50) {
			t.Errorf("%.20q…: %d ids, with a limit of 50 %d", text, len(whole), len(cut))
		}
		if len(cut) > 50+maxWordLen+2 {
			t.Errorf("%.20q…: %d ids with a limit of 50", text, len(cut))
		}
		if n := min(len(cut)-1, 50); !slices.Equal(cut[:n], whole[:n]) {
			t.Errorf("%.20q…: a limit changes the ids before it", text)
		}
	}
}

func TestVocabularyRefused(t *testing.T) {
	for name, vocab := range map[string]string{
		"short":   "[PAD]\n[UNK]\n",
		"misused": strings.Repeat("x\n", vocabWords),
	} {
		if _, err := newTokenizer(vocab); err == nil {
			t.Errorf("a %s vocabulary was taken", name)
		}
	}
}

func FuzzTokenizer(f *testing.F) {
	tok := theTokenizer(f)
	for _, text := range []string{"How do I reset my password?", "[CLS]x[SEP", "e\u0301\xff中", "##a ##", "\x00\u200b"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ids := tok.append(nil, text, 1<<20)
		if len(ids) < 2 || ids[0] != startID || ids[len(ids)-1] != endID {
			t.Fatalf("%q: ids %v do not begin and end as they must", text, ids)
		}
		if len(ids) > 2+4*utf8.RuneCountInString(text) {
			t.Fatalf("%q: %d ids of %d code points", text, len(ids), utf8.RuneCountInString(text))
		}
		for _, id := range ids {
			if id >= vocabWords {
				t.Fatalf("%q: id %d is not in the vocabulary", text, id)
			}
		}
		if lowered := tok.append(nil, strings.ToLower(text), 1<<20); isASCII(text) && !strings.Contains(text, "[") && !slices.Equal(ids, lowered) {
			t.Fatalf("%q: ids %v, in lower case %v", text, ids, lowered)
		}
	})
}
