package cache

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"headgate/cache"
)

func TestMain(m *testing.M) {
	if isChild, err := Child(context.Background()); isChild { // the fleet runs this very program
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func shortConfig() Config {
	return Config{Rounds: 1, Each: 40 * time.Millisecond, Reads: 20_000, Keys: 3000, Entries: 2000, Nodes: 2, Crowd: 20, Misses: 6, Log: io.Discard}
}

// TestRun takes every measurement, shortly. That hits ask no model, and that misses and hits are what they are taken
// for, the run sees to itself.
func TestRun(t *testing.T) {
	c := shortConfig()
	c.Nodes, c.Dir = 3, t.TempDir()
	rep, err := Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if len(rep.sections) != len(parts()) {
		t.Errorf("%d sections", len(rep.sections))
	}
	whole := rep.String()
	for _, word := range [...]string{
		"JSON, short", "stream, long", "look-up, store", "look-up, theine", "key, chat of 1 KB", "otter v2", "Zipf 1.01, drifting", "cache bypassed",
		"aim ≤ 60", "another node owns the key", "hit at the owner", "20 at once over 3 nodes, JSON: 1 calls of the model at most, 0 failed",
	} {
		if !strings.Contains(whole, word) {
			t.Errorf("the report does not speak of %q", word)
		}
	}
	if left, err := os.ReadDir(c.Dir); err != nil || len(left) > 0 {
		t.Errorf("it left %v, %v", left, err)
	}
}

func TestMedianAndPairs(t *testing.T) {
	if v := median([]float64{3, 1, 2}); v != 2 {
		t.Errorf("the median of 3, 1, 2 is %g", v)
	}
	// By round 2, 1 and 8: not the ratio of the medians.
	if v := median(pairs([]float64{2, 4, 8}, []float64{1, 4, 1}, func(a, b *float64) float64 { return *a / *b })); v != 2 {
		t.Errorf("the median of the ratios is %g", v)
	}
	if v := median(pairs([]float64{1}, nil, func(a, _ *float64) float64 { return *a })); v != 0 {
		t.Errorf("without a peer there is %g", v)
	}
}

// TestStatic holds by the byte what is read most: of 2 reads of 10 bytes, 3 of 30 and 4 of 100 the first two.
func TestStatic(t *testing.T) {
	reads := []int32{0, 0, 1, 1, 1, 2, 2, 2, 2}
	if v := static(reads, []int{10, 30, 100}, 0, 60); v != 3.0/9 {
		t.Errorf("%g", v)
	}
}

// TestLRU forgets what was read longest ago, and by bytes.
func TestLRU(t *testing.T) {
	c, err := newLRU(10)(100)
	if err != nil {
		t.Fatal(err)
	}
	a, b := keyOf(1), keyOf(2)
	put := func(n, size int) { c.put(&cache.Entry{Key: keyOf(n), Body: make([]byte, size)}) }
	put(1, 16)
	put(2, 16)
	if !c.get(&a) {
		t.Error("the first is gone")
	}
	put(3, 48) // 26 + 26 + 58
	if !c.get(&a) || c.get(&b) {
		t.Error("it kept what was read longest ago")
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for _, c := range []Config{{Rounds: -1}, {Each: time.Hour}, {Reads: 10}, {Nodes: 1}, {Crowd: 5000}, {Only: []string{"everything"}}, {Kind: "video"}, {Misses: -1}} {
		if _, err := Run(t.Context(), c); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}
