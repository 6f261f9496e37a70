package proxy

import (
	"context"
	"fmt"
	"time"

	"headgate/limiter"
	"headgate/proxy/openai"
)

// Money is what the front door needs of the budgets and of the usage log. It is safe for
// concurrent use, and keeps no Bill after the call that it was passed to.
type Money interface {
	// Reserve takes what the request may cost from all budgets of b.Charges or from none, and
	// puts the reservation where it survives a crash. It may ask the ledger, for a bounded time
	// and as long as ctx lives. It fails with *Broke, or with what kept it from deciding; then
	// nothing is reserved. Where it succeeds, Settle is called exactly once.
	Reserve(ctx context.Context, b *Bill) error
	// Settle charges b.Cost, nothing if b.Cancelled, and logs how the request ended. It never
	// waits and brings Spent and Left of the charges up to date.
	Settle(b *Bill)
	// Peek decides like Reserve and changes nothing.
	Peek(ctx context.Context, b *Bill) error
}

// Budget is one budget as it applies to a caller. It is shared and never changed.
type Budget struct {
	Name   string
	Bucket string // the bucket's name: Name, qualified by the plan where tenants share it
	Scope  Scope
	// Strict reserves what a request may cost at most, clamps the length of the answer to what
	// is affordable, and is never passed; otherwise the estimate is reserved.
	Strict    bool
	Amount    int64 // nano-dollars a period
	Emergency int64 // nano-dollars a node, under an override only
	Alert     int   // the percentage from which answers tell how much is used; 0: none
	Terms     any   // of whoever implements Money
	// Window is the length of a rolling period; 0 for the others.
	Window time.Duration
	// Period is the calendar period of t, in nanoseconds since 1970; 0, 0 where there is none.
	// It must not block and may be called concurrently.
	Period func(t time.Time) (start, end int64)
}

// BudgetCharge is what a request takes from one budget; amounts in nano-dollars.
type BudgetCharge struct {
	Budget     *Budget
	Key        limiter.Key
	Start, End int64 // of the period, in nanoseconds since 1970; 0, 0: none

	// Cost is what to reserve. Where Least < Cost, less will do, as little as Least: the strict
	// ones among the charges are then granted the same amount, the most that all of them afford.
	Cost, Least int64
	// Most is what the request may cost at the very most. A crash counts Most, or of a strict
	// budget Granted.
	Most int64

	// Filled in by Money.
	Granted int64 // reserved
	Spent   int64 // of the budget in this period, as last known
	Amount  int64 // of the budget, as the ledger has it
	Left    int64 // of it, not below 0
}

// Bill is what one metered request costs, from its reservation to its end. The proxy fills
// in the upper part before Reserve and the lower one before Settle.
type Bill struct {
	// Held and ID are Money's own, from Reserve to Settle.
	Held any
	ID   uint64

	RequestID, Tenant, Key, User, Surface, Class string
	Model, Asked                                 string    // the one that answers, the one asked for
	Time                                         time.Time // when the request came
	InputTokens, OutputTokens                    int64     // estimates
	// Reserved is what the request is expected to cost, in nano-dollars: the estimate, or under
	// a strict budget what was granted at the upper bound.
	Reserved int64
	Charges  []BudgetCharge // none for callers without budgets and for free models

	// Usage is Known where the backend reported it; else it is estimated or counted.
	Usage     openai.Usage
	Images    int64
	Cost      int64 // nano-dollars
	Backend   string
	Status    int    // of HTTP; 0: none was received
	Outcome   string // as headgate_requests_total has it, or "cancelled"
	Tier      string // of the cache that answered; "": none
	Stream    bool
	Cancelled bool          // no backend has seen it
	Latency   time.Duration // to the settlement
	TTFT      time.Duration // to the first byte of the answer; 0: none came
}

// BrokeKind says why budgets refuse.
type BrokeKind uint8

// The kinds.
const (
	Exhausted   BrokeKind = iota // what was spent leaves no room
	InFlight                     // what others have reserved and may yet give back does
	Unavailable                  // nobody who may decide is in reach
)

// Broke is the refusal of a budget.
type Broke struct {
	Index      int // of the charge; -1: none in particular
	Kind       BrokeKind
	RetryAfter time.Duration // 0: unknown
	Err        error         // the cause, for the log; may be nil
}

// Error names the kind.
func (b *Broke) Error() string {
	what := [...]string{"exhausted", "held by requests in flight", "unavailable"}[b.Kind]
	if b.Err != nil {
		return fmt.Sprintf("budget %s: %v", what, b.Err)
	}
	return "budget " + what
}

// Unwrap gives the cause.
func (b *Broke) Unwrap() error { return b.Err }
