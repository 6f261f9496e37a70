package threshold

import (
	"runtime"
	"testing"
)

// TestPoolBytes holds what a pool says that it takes against what the heap grows by.
func TestPoolBytes(t *testing.T) {
	if underRace {
		t.Skip("the race detector takes memory of its own")
	}
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for _, n := range []Cell{5, 50, 333, 1000, 1600, cells} {
		before, said := heap(), 0
		var pools []*Pool
		for range 50 {
			p := NewPool()
			for c := range n {
				p.Seen(c)
			}
			for _, peer := range []string{"a", "b"} {
				if err := p.Hear(peer, p.Own()); err != nil {
					t.Fatal(err)
				}
			}
			pools = append(pools, p)
			said += p.Bytes()
		}
		grown := heap() - before
		if ratio := float64(said) / float64(grown); ratio < 0.6 || ratio > 1.3 {
			t.Errorf("%d cells: %d bytes, where the heap grew by %d: %.2f", n, said, grown, ratio)
		}
		runtime.KeepAlive(pools)
	}
}
