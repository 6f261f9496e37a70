//go:build unix

package embed

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"
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
	before := cpuTime(b)
	for b.Loop() {
		if _, err := m.Embed(context.Background(), texts); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// cpuTime is what this process has used: others on the machine make the wall's time longer.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
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
