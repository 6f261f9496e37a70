package guard

import (
	"strings"
	"testing"
)

// The pairs of the benchmarks: short questions as support bots get them.
const (
	benchA = "How do I change the delivery address of order AB-1029 before Friday?"
	benchB = "Can I still change where order AB-1029 goes before it ships on Friday?"
)

// BenchmarkPair is a pair from two strings: Parse, Parse, Compare.
func BenchmarkPair(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		Parse(benchA).Compare(Parse(benchB))
	}
}

// BenchmarkParse is the part that a lookup pays once.
func BenchmarkParse(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		Parse(benchA)
	}
}

// BenchmarkCompare is the part that a lookup pays for each neighbour.
func BenchmarkCompare(b *testing.B) {
	b.ReportAllocs()
	x, y := Parse(benchA), Parse(benchB)
	for b.Loop() {
		x.Compare(y)
	}
}

// BenchmarkLexicon is what the first Parse of a process pays besides.
func BenchmarkLexicon(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := readLexicon(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLongest is the worst that two texts within the bounds can cost.
func BenchmarkLongest(b *testing.B) {
	b.ReportAllocs()
	one, other := "", ""
	for i := range MaxTokens {
		one += string(rune('a'+i%26)) + string(rune('a'+i/26)) + "word "
		other = string(rune('a'+i%26)) + string(rune('a'+i/26)) + "wort " + other
	}
	for b.Loop() {
		Parse(one).Compare(Parse(other))
	}
}

// BenchmarkFacts is two answers of 16 KiB: read, and held against each other.
func BenchmarkFacts(b *testing.B) {
	pairs := answerPairs(b)
	var s strings.Builder
	for i := 0; s.Len() < 16<<10; i++ {
		s.WriteString(pairs[i%len(pairs)].a + "\n\n")
	}
	one := s.String()[:16<<10]
	other := strings.ReplaceAll(one, "you", "one")
	b.Run("read", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			ParseFacts(one)
		}
	})
	b.Run("contradict", func(b *testing.B) {
		f, g := ParseFacts(one), ParseFacts(other)
		for b.Loop() {
			f.Contradicts(g)
		}
	})
}
