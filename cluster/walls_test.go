package cluster

import (
	"testing"
	"time"
)

func TestWalls(t *testing.T) {
	const ms = int64(time.Millisecond)
	voters := []string{"a", "b", "c"}
	var w walls
	note := func(now int64, name string, incarnation uint64, ahead int64) (int64, bool) {
		return w.note(now*ms, name, incarnation, 1e18+ahead*ms, 1e18, voters)
	}
	if _, known := note(0, "a", 1, 0); known {
		t.Error("one voter of three is a median")
	}
	if off, known := note(0, "b", 2, 700); !known || off != 350*ms {
		t.Errorf("the later of two is off by %v, %t", off, known)
	}
	if off, _ := note(0, "c", 3, 20); off != 0 {
		t.Errorf("the middle one is off by %v", off)
	}
	if off, _ := note(10, "b", 2, 700); off != 680*ms {
		t.Errorf("the one ahead is off by %v", off)
	}
	if off, _ := note(10, "d", 4, -3000); off != -3020*ms {
		t.Errorf("one without a vote is off by %v", off)
	}
	if off, _ := note(20, "b", 5, 30); off != 10*ms {
		t.Errorf("restarted with a clock put right, it is off by %v", off)
	}
	if _, known := note(6000, "a", 1, 0); known {
		t.Error("readings of long ago make a median")
	}
}

// One odd answer does not make a clock wrong; two do.
func TestWallOff(t *testing.T) {
	var c Cluster
	if _, known := c.WallOff(); known {
		t.Error("known before an answer")
	}
	for _, step := range []struct{ said, want time.Duration }{{-time.Second, -time.Second}, {3, 3}, {time.Second, 3}, {time.Second, time.Second}, {-2, -2}} {
		c.wallOff.note(step.said)
		if off, known := c.WallOff(); !known || off != step.want {
			t.Errorf("after %v: %v, %t, want %v", step.said, off, known, step.want)
		}
	}
}
