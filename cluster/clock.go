package cluster

import (
	"sync/atomic"
	"time"
)

// stepNoticed is by how much the wall clock and the monotonic one may part before a Clock asks
// anew: they part by nothing but what somebody sets, and what the machine sleeps.
const stepNoticed = int64(time.Millisecond)

// Clock reads what Now does, to within stepNoticed, for a fifth of its price, which is that of a
// system call. The monotonic clock comes without one but does not count suspend; the wall clock
// does. So where the two part, Now is asked again. It may be read concurrently. Two readings may
// differ from their order by what Now takes.
type Clock struct {
	start time.Time // its monotonic part is what readings count from
	known atomic.Pointer[offsets]
}

// offsets are what the monotonic clock, counted from a Clock's start, lacks.
type offsets struct {
	boot int64 // to Now
	wall int64 // to the wall clock
}

// NewClock returns a Clock.
func NewClock() *Clock {
	c := &Clock{start: time.Now()}
	c.known.Store(&offsets{})
	return c
}

// Read gives Now and the wall clock's nanoseconds since the Unix epoch.
func (c *Clock) Read() (now, wall int64) {
	t := time.Now()
	monotonic, wall := int64(t.Sub(c.start)), t.UnixNano()
	o := c.known.Load()
	if off := wall - monotonic - o.wall; off > stepNoticed || off < -stepNoticed {
		o = &offsets{boot: Now() - monotonic, wall: wall - monotonic}
		c.known.Store(o)
	}
	return monotonic + o.boot, wall
}
