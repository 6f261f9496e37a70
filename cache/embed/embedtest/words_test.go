package embedtest

import (
	"math"
	"testing"

	"headgate/cache/vec"
)

func TestWordsAreAsWorkedOutByHand(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want float64
	}{
		{"How can I reset my password", "How do I reset my password", 3 / math.Sqrt(12)},
		{"How can I reset my password?", "how CAN I reset my password", 1},
		{"What is the refund window for annual plans?", "What is the refund window for monthly plans?", 5.0 / 6},
		{"reset password", "close account", 0},
		{"the", "a", 0},
		{"no no yes", "no", 2 / math.Sqrt(5)},
	} {
		if a, b, clash := Clash(c.a, c.b); clash {
			t.Errorf("%q and %q share a dimension", a, b)
		}
		texts, err := new(Words).Embed(t.Context(), []string{c.a, c.b})
		if err != nil {
			t.Fatal(err)
		}
		if got := float64(vec.Dot(texts[0], texts[1])); math.Abs(got-c.want) > 1e-6 {
			t.Errorf("%q and %q: %.4f, want %.4f", c.a, c.b, got, c.want)
		}
	}
}
