package lease

import (
	"time"

	"headgate/limiter"
)

// TableFull is what Take returns when a charge needs a new bucket and the
// table has neither room nor a full bucket to forget.
const TableFull = -2

// Config sizes a Local. Zero fields take the defaults.
type Config struct{ Shards, MaxBuckets int }

// Local is the bucket table of one process.
type Local struct{ cfg Config }

// Level is one bucket as an operator sees it.
type Level struct {
	Key   limiter.Key
	Limit limiter.Limit
	Level int64
	Reset time.Duration
}

// NewLocal returns an empty table.
func NewLocal(cfg Config) (*Local, error) { return &Local{cfg: cfg}, nil }

// Take charges all of cs or none.
func (l *Local) Take(now int64, cs []limiter.Charge, ds []limiter.Decision) (refused int) { return -1 }

// Settle replaces each charge's cost by actual[i].
func (l *Local) Settle(now int64, cs []limiter.Charge, actual []int64, ds []limiter.Decision) {}

// Peek decides like Take and changes nothing.
func (l *Local) Peek(now int64, cs []limiter.Charge, ds []limiter.Decision) (refused int) { return -1 }

// Levels lists the buckets of a tenant.
func (l *Local) Levels(now int64, tenant string) []Level { return nil }

// Sweep forgets full buckets.
func (l *Local) Sweep(now int64, budget int) (forgotten int) { return 0 }

// Len is the number of buckets.
func (l *Local) Len() int { return 0 }
