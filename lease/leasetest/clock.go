package leasetest

import (
	"math"
	"time"

	"headgate/lease"
)

const (
	ms    = int64(time.Millisecond)
	never = int64(math.MaxInt64)
	// epoch is the wall time of true time 0. No reading of a monotonic clock comes near it.
	epoch = 1_700_000_000 * int64(time.Second)
)

// clock runs at up to 1 % off true time, from anywhere; its wall clock is off by wall.
type clock struct{ offset, ppm, wall int64 }

func (c clock) local(t int64) int64 { return c.offset + t + t*c.ppm/1_000_000 }

func (c clock) read(t int64) lease.Instant {
	return lease.Instant{Now: c.local(t), Wall: epoch + t + c.wall}
}

// when is the first true instant at which the clock shows local, or one just after it.
func (c clock) when(local int64) int64 {
	if local == never {
		return never
	}
	t := (local - c.offset) * 1_000_000 / (1_000_000 + c.ppm)
	for c.local(t) < local {
		t++
	}
	return t
}
