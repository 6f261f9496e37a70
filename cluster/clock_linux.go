package cluster

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Now reads, in nanoseconds, a clock that never goes back and counts the time that the
// machine was suspended (CLOCK_BOOTTIME): a node that slept must not think its view lease
// good on waking. Readings mean nothing to other machines.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(fmt.Sprintf("read CLOCK_BOOTTIME: %v", err)) // every Linux since 2.6.39 has it
	}
	return ts.Nano()
}
