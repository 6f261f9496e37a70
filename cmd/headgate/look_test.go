package main

import (
	"strings"
	"testing"

	"headgate/proxy"
)

// What clients call their users does not reach a terminal raw.
func TestPrintable(t *testing.T) {
	for subject, want := range map[string]string{
		"":                       "",
		"key:dev":                "key:dev",
		"žába, été":              "žába, été",
		"key:dev\x1fllama-8b":    "key:dev / llama-8b",
		"\x1b[31mred":            `"\x1b[31mred"`,
		"two\nlines\x1fllama-8b": `"two\nlines" / llama-8b`,
	} {
		if got := printable(subject); got != want {
			t.Errorf("%q is shown as %q, want %q", subject, got, want)
		}
	}
}

// TestExplanationSaysWhatStrictAdds to the input that was asked about.
func TestExplanationSaysWhatStrictAdds(t *testing.T) {
	e := proxy.Explanation{Admitted: true, Input: 7, Budgets: []proxy.ExplainBudget{{Name: "month", Strict: true, Admitted: true}}}
	for _, template := range []int64{0, 288} {
		e.Template = template
		var b strings.Builder
		printExplanation(&b, e)
		if says := strings.Contains(b.String(), "strict: with 288 tokens for the chat template"); says != (template > 0) {
			t.Errorf("%d tokens: %s", template, b.String())
		}
	}
}
