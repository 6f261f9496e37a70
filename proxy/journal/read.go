package journal

import (
	"context"
	"time"
)

// Query picks requests; what is empty picks all.
type Query struct {
	From, Until              time.Time // From ≤ Usage.Time < Until
	Tenant, Key, User, Model string    // Model is the one that answered
}

// Read hands the requests that q picks to fn, in the order of their records, those that were
// settled before the call among them; Cancelled ones are passed over. fn must not keep u or its
// slices; it runs without a lock, and its error ends the reading. What cannot be read is
// passed over with a warning in the log.
func (l *Log) Read(ctx context.Context, q Query, fn func(u *Usage) error) error { return errSkeleton }
