package lease

import "time"

// Instant is one reading of a process's two clocks.
type Instant struct {
	// Now is nanoseconds of a clock that counts suspend and never goes back; durations, sessions and
	// GCRAs go by it. It means nothing to another process.
	Now int64
	// Wall is nanoseconds since the Unix epoch. Only the windows of fixed and sliding windows go by it.
	Wall int64
}

// Clock reads both. It is called more than once in a step where the protocol wants a second reading.
type Clock func() Instant

// anyEpoch asks Rights.Lease whatever the view is.
const anyEpoch = ^uint64(0)

// The times of the protocol.
const (
	// KeepEvery is how often a holder speaks to an owner of whom it holds anything.
	KeepEvery = 250 * time.Millisecond
	// sessionFor is the most that one answer extends a session by.
	sessionFor = time.Second
	// A holder's deadline is the send of the request plus Left × 98/100; an owner's is its answer plus
	// Left × 102/100 plus sessionMargin: clocks run within 1 % of each other.
	sessionMargin = 50 * time.Millisecond
	// RecallEvery bounds how often one bucket's leases are recalled.
	RecallEvery = 5 * time.Millisecond
)

// Member is a process in a view.
type Member struct {
	Name        string
	Incarnation uint64
	Address     string // of its gossip
}

// View is a committed view as this room needs it. It never changes.
type View struct {
	Epoch   uint64
	Members []Member
	Owners  []int32 // by partition: an index into Members; -1: nobody
	// Place is the partition of what a bucket is placed by: see Home.
	Place func(home string) uint32
}

// OwnerOf is the owner of a partition; the zero Member where nobody owns it.
func (v *View) OwnerOf(partition uint32) Member {
	if v == nil || uint64(partition) >= uint64(len(v.Owners)) || v.Owners[partition] < 0 {
		return Member{}
	}
	return v.Members[v.Owners[partition]]
}

// Rights is what a process may grant (cluster.Fence).
type Rights interface {
	// Left is for how many ns more, at now, this process may grant for a partition; 0: not at all.
	Left(now int64, partition uint32) int64
	// Lease is for how many ns more, at now, the process's view lease holds; 0: it holds none, or the
	// rights have gone on to a view after epoch: a lease of that view must not extend what was lent
	// in the one before, which may have moved. No session is extended by more.
	Lease(now int64, epoch uint64) int64
	// Started ends a partition's wait early, since it was handed over in epoch.
	Started(now int64, epoch uint64, partition uint32)
}

// Rule names what a core may be told to break, for the tests that show that breaking it is missed.
type Rule uint32

// The rules, as DESIGN.md numbers them.
const (
	BreakDepth         Rule = 1 << iota // R1: Σc does not bound what is lent
	BreakOutstanding                    // R1, R2: TAT is not held up by Σc
	BreakAdvance                        // R2: lent rate does not slow the refill
	BreakLarger                         // R3: the new (ρ, c) counts at once
	BreakViewBound                      // R4: a session is extended beyond the view lease
	BreakNumbers                        // R5: a hello ends the live session; dropped numbers are re-adopted
	BreakTotals                         // R6: amounts add up instead of totals
	BreakSecondReading                  // R7: a take is not void past the deadline, nor a late decision
	BreakRefundDepth                    // R8: a refund fills a lease beyond its depth
	BreakRefundSeries                   // R8: a refund of an ended series counts in the live one
	BreakConvert                        // R9: a changed limit forgets the deficit
	BreakFloor                          // V3: a bucket that is not mentioned is full
	BreakNothing                        // V3: who has not started hands over all the same
	BreakWait                           // V4: no wait at a takeover
	BreakEmpty                          // V4: full after a takeover
)
