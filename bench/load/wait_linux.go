package load

import (
	"syscall"
	"time"
)

// fineSleep sleeps in the kernel, which is exact to some 50 µs.
func fineSleep(d time.Duration) {
	ts := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&ts, nil) // an interrupted sleep makes one arrival early
}
