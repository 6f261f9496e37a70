//go:build !race

package embed

import (
	"runtime"
	"testing"
)

// The race detector drops things from pools, and takes memory of its own.

func TestEmbedAllocates(t *testing.T) {
	m := theModel(t)
	texts := []string{"how long does it take until a refund is back on my card"}
	allocs := testing.AllocsPerRun(50, func() {
		if _, err := m.Embed(t.Context(), texts); err != nil {
			t.Fatal(err)
		}
	})
	if allocs > 4 { // the vectors and their numbers are two
		t.Errorf("%v allocations for a question", allocs)
	}
}

// TestResident holds the heap that the model keeps. Beside it there
// are the 23 MB of the asset, which are a part of the program's file.
func TestResident(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	m := theModel(t)
	kept := heap() - before
	if kept > 16<<20 {
		t.Errorf("the model keeps %d bytes of heap", kept)
	}
	t.Logf("%.1f MB of heap", float64(kept)/(1<<20))
	runtime.KeepAlive(m)
}
