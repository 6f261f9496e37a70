package load

import (
	"context"
	"time"
)

// coarse is what is left to the fine wait: the runtime's timers may be late by a
// millisecond, because the poller that an idle processor sleeps in counts in them.
const coarse = 1500 * time.Microsecond

// WaitUntil returns true at a moment, or false when ctx ends before it.
func WaitUntil(ctx context.Context, until time.Time) bool {
	if d := time.Until(until) - coarse; d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return false
		}
	}
	if d := time.Until(until); d > 0 {
		fineSleep(d)
	}
	return ctx.Err() == nil
}
