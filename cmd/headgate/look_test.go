package main

import (
	"strings"
	"testing"

	"headgate/proxy"
)

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
