package lease

import (
	"time"

	"headgate/limiter"
)

// MaxFloorFill is how long a bucket may take to fill, or its window be, for a floor to count.
// An hour's or a day's limit that started empty would be an outage.
const MaxFloorFill = time.Minute

// SetFloor says that nobody knows what was spent before at: a bucket without a level counts as
// having been empty then, not full, if it fills within MaxFloorFill. Semaphores start free all
// the same. A later floor replaces the one before; buckets that have a level keep it.
func (l *Local) SetFloor(at int64) { l.floor.Store(at) }

// fresh is the level of a bucket that has none.
func (l *Local) fresh(now int64, limit *limiter.Limit) limiter.State {
	at := l.floor.Load()
	// Two periods are what a sliding window looks back on.
	if at == 0 || now-at >= 2*int64(MaxFloorFill) {
		return limiter.State{}
	}
	fills := limit.Rate.Per
	if limit.Algorithm == limiter.GCRA {
		s := limit.EmptyAt(at, at)
		fills = limit.Take(&s, at, 0, limiter.Refuse).Reset
	}
	if fills > MaxFloorFill {
		return limiter.State{}
	}
	return limit.EmptyAt(now, at)
}
