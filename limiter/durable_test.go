package limiter_test

import (
	"testing"
	"time"

	"headgate/limiter"
)

func TestDurable(t *testing.T) {
	for _, c := range []struct {
		limit limiter.Limit
		want  bool
	}{
		{limiter.Limit{Rate: limiter.Rate{Count: 60_000, Per: time.Minute}, Burst: 60_000}, false},
		{limiter.Limit{Rate: limiter.Rate{Count: 60_000, Per: time.Minute}, Burst: 60_001}, true},
		{limiter.Limit{Rate: limiter.Rate{Count: 10, Per: 24 * time.Hour}, Burst: 1}, true},
		{limiter.Limit{Rate: limiter.Rate{Count: 1_000_000, Per: time.Hour}, Burst: 100}, false},
		{limiter.Limit{Rate: limiter.Rate{Count: limiter.MaxUnits, Per: time.Nanosecond}, Burst: limiter.MaxUnits}, false},
		{limiter.Limit{Rate: limiter.Rate{Count: 1, Per: limiter.MaxSpan}, Burst: 1}, true},
		{limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 10, Per: time.Minute}}, false},
		{limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 10, Per: time.Minute + 1}}, true},
		{limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: limiter.Rate{Count: 10, Per: time.Hour}}, false},
		{limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 10, Per: time.Hour}}, false},
		{limiter.Limit{Algorithm: limiter.Semaphore, Burst: 10}, false},
	} {
		if got := c.limit.Durable(); got != c.want {
			t.Errorf("%+v: durable %v, want %v", c.limit, got, c.want)
		}
	}
}
