package main

import "testing"

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
