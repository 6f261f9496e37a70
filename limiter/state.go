package limiter

import (
	"math"
	"time"
)

// State is what one bucket remembers between calls. The zero value was never
// used and is full. A State belongs to one Limit at a time (see Convert) and is
// not safe for concurrent use; the State of a SlidingLog must not be copied.
type State struct {
	// last is the newest clock reading that changed the state. It keeps a
	// caller's older reading from being taken for a new one, and tells the
	// window that the counters of the two window algorithms belong to.
	last int64
	// a, b, c are
	//   GCRA           the TAT in nanoseconds and its remainder in 1/Count ns
	//   FixedWindow    used, carried
	//   SlidingWindow  used, carried, used in the previous window
	//   Semaphore      slots in use
	a, b, c int64
	log     *log
}

// Oversize says what happens to a cost above the limit's capacity.
type Oversize uint8

const (
	// Refuse refuses it for good.
	Refuse Oversize = iota
	// Debt admits it when the bucket is full and leaves the bucket that far
	// below zero.
	Debt
)

// Decision is what a limit says to one cost.
type Decision struct {
	// Admitted says that the cost conforms.
	Admitted bool
	// Remaining is the level after the decision in whole units, rounded down.
	// Negative is debt.
	Remaining int64
	// RetryAfter is 0 if admitted. Otherwise the same cost conforms at
	// now+RetryAfter, and not a nanosecond earlier, if nothing else happens;
	// Never where no wait helps: a cost above capacity, a semaphore.
	RetryAfter time.Duration
	// Reset is the time until the level is full again, 0 if it is. A
	// semaphore that is not full answers Never: only settling refills it.
	Reset time.Duration
	// At is the clock reading at which the decision was made; Adjust wants it
	// back.
	At int64
}

// MaxCharges is how many limits one request may name.
const MaxCharges = 16

// Key names one bucket. Tenant is empty for buckets that no tenant owns, such
// as a model's or the whole fleet's.
type Key struct{ Tenant, Limit, Subject string }

// NotTaken is the At of a Charge that holds nothing: it was refused, or it was
// a shadow charge that did not conform.
const NotTaken int64 = math.MinInt64

// Charge is one limit's part in a request.
type Charge struct {
	Key      Key
	Limit    *Limit
	Cost     int64
	Oversize Oversize
	// Shadow charges count while they conform and never refuse.
	Shadow bool
	// At is set by whoever takes the charge, and read when it is settled.
	At int64
}

// Peek decides without changing s.
func (l *Limit) Peek(s *State, now, cost int64, over Oversize) Decision { return Decision{} }

// Take decides, and charges cost if and only if it is admitted.
func (l *Limit) Take(s *State, now, cost int64, over Oversize) Decision { return Decision{} }

// Adjust settles a charge that was taken at the reading at.
func (l *Limit) Adjust(s *State, now, at, delta int64) {}

// Convert carries s over from another limit.
func (l *Limit) Convert(s *State, now int64, from *Limit) {}

// Full says whether s may be forgotten.
func (l *Limit) Full(s *State, now int64) bool { return false }

type log struct{}
