// Package embedtest has embedders for tests, whose similarities can be worked out by hand.
package embedtest

import (
	"context"
	"hash/fnv"
	"math"
	"strings"
	"sync/atomic"
	"unicode"
)

// Words embeds a text as the bag of its words: lower case, without the words that say little
// (the, a, an, is, are, do, does, I, to, of, my, in). The similarity of two texts is then their
// common words over the root of the product of their numbers of words, as long as no two
// words share a dimension; 4096 of them make that rare, and Clash finds it. A text without a word is the zero vector.
//
// "How can I reset my password" and "How do I reset my password" have .866.
// The zero value is ready. It may be used by many goroutines.
type Words struct {
	calls, texts atomic.Int64
}

const dim = 4096

// Version is of this embedder only.
func (*Words) Version() string { return "embedtest-words-1" }

// Dim is 4096.
func (*Words) Dim() int { return dim }

// Calls is how often Embed was called, and with how many texts in all.
func (w *Words) Calls() (calls, texts int64) { return w.calls.Load(), w.texts.Load() }

// Embed never fails, unless ctx is done.
func (w *Words) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w.calls.Add(1)
	w.texts.Add(int64(len(texts)))
	vectors := make([][]float32, len(texts))
	for i, text := range texts {
		vectors[i] = Vector(text)
	}
	return vectors, nil
}

// Vector is what Words makes of text.
func Vector(text string) []float32 {
	v := make([]float32, dim)
	var sum float64
	for _, word := range Split(text) {
		d := dimension(word)
		sum += float64(2*v[d] + 1) // (n+1)² - n²
		v[d]++
	}
	if sum == 0 {
		return v
	}
	for i := range v {
		v[i] = float32(float64(v[i]) / math.Sqrt(sum))
	}
	return v
}

// Clash gives two different words of texts that share a dimension, if there are such.
func Clash(texts ...string) (a, b string, clash bool) {
	at := make(map[uint32]string)
	for _, text := range texts {
		for _, word := range Split(text) {
			if other, ok := at[dimension(word)]; ok && other != word {
				return other, word, true
			}
			at[dimension(word)] = word
		}
	}
	return "", "", false
}

// Split gives the words of text that count, in lower case, in their order.
func Split(text string) []string {
	words := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '\''
	})
	counted := words[:0]
	for _, word := range words {
		switch word {
		case "the", "a", "an", "is", "are", "do", "does", "i", "to", "of", "my", "in":
		default:
			counted = append(counted, word)
		}
	}
	return counted
}

func dimension(word string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(word)) // a hash takes all
	return h.Sum32() % dim
}
