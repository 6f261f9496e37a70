package hnsw

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestRun takes every measurement, shortly: the index finds what is near, and the report speaks of all parts, of hnswlib
// or that it is not there.
func TestRun(t *testing.T) {
	rep, err := Run(t.Context(), Config{N: 1000, Queries: 20, Dim: 16, Rounds: 1, Builds: 1})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "results")
	if err := rep.Write(dir); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "hnsw-1k.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"1000 clustered vectors of 16 numbers", "hnswlib", "deletes", "readers", "few vectors", "Crossover says", "aims"} {
		if !strings.Contains(string(text), word) {
			t.Errorf("the report does not speak of %q", word)
		}
	}
	if len(rep.deletes) == 0 || rep.deletes[0].ten < 0.9 {
		t.Errorf("found of the nearest: %+v", rep.deletes)
	}
}

func TestFilesDoNotOverwriteEachOther(t *testing.T) {
	for want, c := range map[string]Config{
		"hnsw.txt": {}, "hnsw-100k.txt": {N: 100_000}, "hnsw-questions.txt": {Questions: true}, "hnsw-file.txt": {File: "vectors.f32", N: 5000},
	} {
		if got := c.Name(); got != want {
			t.Errorf("%+v goes to %s, not %s", c, got, want)
		}
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for _, c := range []Config{{N: 10}, {Queries: 1}, {Dim: 4}, {M: 1}, {EfConstruction: 3}, {Rounds: -1}, {Builds: 1000}, {File: "a", Questions: true}, {File: "/nonexistent"}} {
		if _, err := Run(t.Context(), c); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}
