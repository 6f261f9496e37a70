package lease

import (
	"math"

	"headgate/limiter"
)

// OwnerConfig is what an Owner is made of.
type OwnerConfig struct {
	Self   uint64 // this process's incarnation
	Rights Rights
	Sizer  Sizer // nil: the default
	// MaxBuckets bounds the buckets; 0: DefaultMaxBuckets. Debts and hand-offs are taken above it.
	MaxBuckets int
	// Wait is how long after a view nobody can still act on the one before, in ns; V4.
	Wait  int64
	Break Rule // for tests that show that a broken rule is missed; 0 in use
}

// Draw asks the ledger for a block of a durable limit. A retry is the same in all fields.
type Draw struct {
	Bucket
	Limit limiter.Limit
	Epoch uint64 // of the view that the owner has stepped to when it first asked
	N     uint64 // rises with each draw of this owner for this bucket
	// Want is what it asks for, Least what it needs to admit the smallest that waits, Holding all that
	// it and its holders could still spend of earlier blocks.
	Want, Least, Holding int64
}

// Drawn is what came of a Draw.
type Drawn struct {
	Bucket
	N          uint64
	Granted    int64
	RetryAfter int64 // where nothing was granted: ns until Least would be; limiter.Never
	Level      int64 // left in the ledger
	Err        bool  // unknown: the same Draw is to be tried again
	Window     int64 // of a fixed window: the window that the block is of
}

// OwnerLevel is a bucket as an operator sees it.
type OwnerLevel struct {
	Key   limiter.Key
	Limit limiter.Limit
	Level int64 // left with the owner, negative in debt; of a semaphore, slots not lent
	Debt  int64 // how far it is below zero
	Lent  uint32
	// Outstanding is what holders may still spend at once; of a semaphore, slots lent.
	Outstanding int64
	Holders     []OwnerHolding
}

// OwnerHolding is what one holder has of a bucket.
type OwnerHolding struct {
	Holder      uint64
	Name        string // "" where it is in no view any more
	Share       uint32 // of the rate, in 1/ShareOne
	Outstanding int64  // the lease's depth; of a semaphore, slots lent
	Level       int64  // as last reported
	Live        bool   // within its session's deadline
}

// OwnerStats counts.
type OwnerStats struct {
	Buckets, Series, Parked, Sessions int
	// Outstanding is Σ of all leases' depths, Lent Σ of their shares in whole rates.
	Outstanding int64
	Lent        float64
	// Stranded is what was last reported to lie in leases of buckets that had an ask refused meanwhile.
	Stranded  int64
	Rejected  uint64 // parts of messages that could not be true
	Granted   uint64 // leases granted or topped up
	Direct    uint64 // asks admitted directly
	Refused   uint64 // asks refused
	Recalls   uint64 // leases recalled
	Fruitless uint64 // recalls that did not bring the cost
	Ended     uint64 // sessions ended with leases counted as spent
	Forgotten uint64 // series that were reported and are unknown
	LostDebt  int64  // units of debt reported for unknown series
	// SlotsLost is slots of processes that left, free again.
	SlotsLost uint64
}

// never is a time that does not come.
const never = math.MaxInt64

// Owner owns partitions and lends their buckets (DESIGN.md). It does no I/O, reads no clock, and
// is not safe for concurrent use. `at` never goes back.
type Owner struct {
	cfg OwnerConfig
}

// NewOwner returns an owner of nothing.
func NewOwner(c OwnerConfig) *Owner { return &Owner{cfg: c} }

// Step goes on to a view, after Rights did. Lost partitions stop and are kept for HandOffs; gained
// ones wait until they are handed over or the takeover wait has passed.
func (o *Owner) Step(at Instant, v *View) {}

// Handle answers a request: the first Response at once, the others are pushes to any holders.
func (o *Owner) Handle(at Instant, r *Request) []*Response { return nil }

// Tick does what time brings: parked asks that end, recalls to be sent again.
func (o *Owner) Tick(at Instant) []*Response { return nil }

// Next is when Tick has something to do, by Instant.Now.
func (o *Owner) Next() int64 { return never }

// HandOffs returns what is to be handed over, also again, until HandedOff acknowledges it.
func (o *Owner) HandOffs(at Instant) []*Handoff { return nil }

// HandedOff says that the receiver has a Handoff.
func (o *Owner) HandedOff(partition uint32, epoch uint64) {}

// Accept takes over a partition from its owner of before: once, before anything was granted of it
// in this epoch. It returns true also for a repetition of what it accepted, so that the sender can
// forget it; false: it is of no use here, now or ever.
func (o *Owner) Accept(at Instant, h *Handoff) bool { return false }

// Draws returns what is to be asked of the ledger, also again, until Drawn.
func (o *Owner) Draws(at Instant) []Draw { return nil }

// Drawn is the ledger's answer; the Responses are decisions that waited for it.
func (o *Owner) Drawn(at Instant, d Drawn) []*Response { return nil }

// Levels lists a tenant's buckets by limit and subject; of tenant "", those that no tenant owns.
func (o *Owner) Levels(at Instant, tenant string) []OwnerLevel { return nil }

// Sweep looks at up to budget buckets, going on where the last left off, and forgets those that are
// full and owe, lend and remember nothing.
func (o *Owner) Sweep(at Instant, budget int) (forgotten int) { return 0 }

// Owing lists the members that have owed this owner a roll for more than 3 s.
func (o *Owner) Owing(at Instant) []uint64 { return nil }

// Save returns all partitions that this process owned and nobody took over, for the next process
// on this node, with the epoch of its last view. It is for a process that grants nothing more.
func (o *Owner) Save(at Instant) (epoch uint64, hs []*Handoff) { return 0, nil }

// Load gives back what Save returned, before the first Step. It is used only where the first view
// that gives this process anything is of epoch+1.
func (o *Owner) Load(epoch uint64, hs []*Handoff) {}

// Stats counts.
func (o *Owner) Stats() OwnerStats { return OwnerStats{} }
