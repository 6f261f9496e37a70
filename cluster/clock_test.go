package cluster

import (
	"testing"
	"time"
)

// TestClock: a Clock shows what Now shows, also after the machine slept or the wall clock was set,
// which is when its two clocks have parted.
func TestClock(t *testing.T) {
	c := NewClock()
	check := func(what string) {
		t.Helper()
		before := Now()
		now, wall := c.Read()
		after := Now()
		if now < before-2*stepNoticed || now > after+2*stepNoticed {
			t.Errorf("%s: %d, want between %d and %d", what, now, before, after)
		}
		if off := time.Now().UnixNano() - wall; off < 0 {
			t.Errorf("%s: the wall clock is %d ns ahead", what, -off)
		}
	}
	check("first")
	check("second")
	o := *c.known.Load()
	c.known.Store(&offsets{boot: o.boot - int64(time.Hour), wall: o.wall - int64(time.Hour)}) // as if it had slept for an hour since
	check("slept")
	c.known.Store(&offsets{boot: o.boot, wall: o.wall + int64(time.Hour)}) // the wall clock was set back by one
	check("set back")
	if n := testing.AllocsPerRun(100, func() { c.Read() }); n != 0 {
		t.Errorf("%v allocations a reading", n)
	}
}

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		Now()
	}
}

func BenchmarkClock(b *testing.B) {
	c := NewClock()
	for b.Loop() {
		c.Read()
	}
}
