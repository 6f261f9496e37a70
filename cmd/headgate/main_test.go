package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestMain lets the tests' binary be the command: called by its name, as through the link
// that the tests make to it, it is headgate. What they start is what they were built from.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "headgate" {
		main()
		return
	}
	os.Exit(m.Run())
}
