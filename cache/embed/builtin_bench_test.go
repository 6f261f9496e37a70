package embed

import (
	"context"
	"strings"
	"testing"
)

// BenchmarkEmbed12Words is a question of twelve words, the figure in DESIGN.md.
func BenchmarkEmbed12Words(b *testing.B) {
	benchEmbed(b, "how long does it take until a refund is back on my card")
}

// BenchmarkEmbedFull is a text that fills the window.
func BenchmarkEmbedFull(b *testing.B) {
	benchEmbed(b, strings.TrimSpace(strings.Repeat("money ", builtinWindow-2)))
}

// BenchmarkEmbed32 is 32 questions in one call.
func BenchmarkEmbed32(b *testing.B) {
	texts := make([]string, 32)
	for i := range texts {
		texts[i] = "how long does it take until a refund is back on my card"
	}
	benchEmbed(b, texts...)
}

func benchEmbed(b *testing.B, texts ...string) {
	b.Helper()
	m, err := Builtin()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Embed(context.Background(), texts); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkBuiltin is what making the model takes.
func BenchmarkBuiltin(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Builtin(); err != nil {
			b.Fatal(err)
		}
	}
}
