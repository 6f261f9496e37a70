package budget

import (
	"errors"
	"fmt"
	"time"

	"headgate/limiter"
)

const (
	// MaxAmount bounds every amount: 2^60 nano-dollars, more than a billion dollars. Sums of four of them
	// are inside an int64.
	MaxAmount = 1 << 60
	// MaxCharges is how many budgets one request may have.
	MaxCharges = limiter.MaxCharges
	// MaxAccounts is how many accounts a process keeps, a quarter of them of one tenant. One without money,
	// spending or requests is forgotten after a while, sooner where room is needed, and one of a period that is
	// over when the ledger has heard all.
	MaxAccounts = 1 << 17
)

// Key names an account: a budget, its subject, and the period from Start up to End in ns since the Unix
// epoch; both are 0 where the budget has none, or a rolling window.
type Key struct {
	limiter.Key
	Start, End int64
}

// Terms are what the policy says of a budget. They are handed to the ledger as they are, and must not
// change once they were used: changed ones have a higher Revision, which binds from then on.
type Terms struct {
	Amount       int64
	Revision     uint64
	Window, Slot time.Duration // of a rolling window
	Alerts       []int         // percent of Amount, rising
	// A rate of spending above SpikeFactor millionths of the trailing hour's, and of at least SpikeFloor a
	// minute, is a spike; SpikeKill: it kills the tenant.
	SpikeFactor, SpikeFloor int64
	SpikeKill               bool
	Name                    string
}

// Charge is what one budget has to pay of a request.
type Charge struct {
	Key   Key
	Terms *Terms
	// Cost is what the request may cost. Where Least is below it, the request can be made cheaper: it is
	// then granted less, but Least at the least, if the budget has no more. 0 is no wish: as Cost.
	Cost, Least int64
	// Emergency is kept aside of what the ledger grants, and spent only while it is out of reach and
	// Config.Override says so. It is less where all nodes together would set aside more than half of the amount.
	Emergency int64
}

// Taken is what a budget gave for a request, and how it stands then. It is to be settled once.
type Taken struct {
	Granted int64
	// Used is what the account has spent, of which the ledger and this process know; Left what could
	// still be granted, by the ledger's last word; Amount the budget's as it binds.
	Used, Amount, Left int64
	// Alert is the highest percent of the terms' alerts that Used has reached; 0: none.
	Alert int

	cell      *cell // nil: it is settled
	emergency int64 // of Granted
}

// Kind says why a budget refused.
type Kind uint8

const (
	// Exhausted says that what is spent leaves too little.
	Exhausted Kind = iota + 1
	// InFlight says that what is spent leaves enough, but requests that are open, here or elsewhere, hold it, or it is set
	// aside for emergencies.
	InFlight
	// Unavailable says that the ledger is out of reach or grants nothing to this process, and what it had granted
	// is spent.
	Unavailable
	// OutOfPeriod says that by the ledger's clock the key's period has not begun, or is over. Manager.Now has that
	// clock: the charge is to be made anew for the period that it is in.
	OutOfPeriod
)

// String returns the kind as metrics name it.
func (k Kind) String() string {
	switch k {
	case Exhausted:
		return "exhausted"
	case InFlight:
		return "in_flight"
	case Unavailable:
		return "unavailable"
	case OutOfPeriod:
		return "out_of_period"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Refused is the error of a Take that took nothing.
type Refused struct {
	Index int // of the charge
	Kind  Kind
	// RetryAfter is when another try may succeed; 0: unknown, as of a budget without a period.
	RetryAfter time.Duration
	// Used, Amount and Left are as of Taken; Now is the ledger's clock.
	Used, Amount, Left, Now int64
	Err                     error // of the ledger, where Kind is Unavailable and it is known
}

// Error names no subject: who has the charges adds it.
func (r *Refused) Error() string {
	s := fmt.Sprintf("budget: charge %d is refused: %v", r.Index, r.Kind)
	if r.Err != nil {
		s += ": " + r.Err.Error()
	}
	return s
}

// Unwrap returns the ledger's error.
func (r *Refused) Unwrap() error { return r.Err }

// Draw asks the ledger for a block and tells it what was spent. Of a holder and account one is under
// way at a time; a retry is the same in all fields.
type Draw struct {
	Key    Key
	Terms  *Terms
	Holder uint64
	N      uint64 // rises
	// Spent is all that this holder has spent of the account; Holding what it may still spend of what it
	// was granted, with what requests hold: the rest goes back.
	Spent, Holding int64
	// Want is asked for, Need is for requests that wait, and less than Least would help none of them.
	Want, Need, Least int64
	Final             bool // the holder is done with the account
}

// Drawn is the ledger's answer. Spent and Amount are the account's, Others what other holders have
// outstanding, Free what is left after this grant, Now the ledger's clock in ns since the Unix epoch.
type Drawn struct {
	N                                    uint64
	Granted, Spent, Amount, Others, Free int64
	Now                                  int64
	// Closed: this holder was released or had said that it is done. It holds nothing any more and is
	// granted nothing; what it still spends counts.
	Closed bool
}

// Errors of a draw after which nothing was done, neither the grant nor the report. Any other error is an
// unknown outcome: the same Draw comes again.
var (
	// ErrNotDone is in the chain of an error that would be the same at once.
	ErrNotDone = errors.New("the ledger refused the draw")
	// ErrNoAccount: a final, or a report of nothing, on an account that the ledger does not have.
	ErrNoAccount = errors.New("the ledger has no such account")
)

// StaleError says that the ledger has a draw N of this holder and account already, and this much of it as spent.
type StaleError struct {
	N     uint64
	Spent int64
}

// Error is for the log.
func (e *StaleError) Error() string {
	return fmt.Sprintf("draw %d of the account is known already", e.N)
}

// PeriodError says that nothing is granted outside an account's period. What was spent is to be told without a
// want.
type PeriodError struct{ Now int64 }

// Error is for the log.
func (e *PeriodError) Error() string { return "the account's period has not begun, or is over" }

// Level is how an account stands, for people to look at.
type Level struct {
	Held      int64 // granted here, for requests to come
	Emergency int64 // kept aside
	Open      int64 // what requests hold here
	Requests  int64 // of those
	Spent     int64 // here, by this process
	Waiting   int   // requests that wait for a draw
	Heard     bool  // the ledger has answered: Used, Amount, Others and Free are its
	Closed    bool
	// As of Taken and Drawn.
	Used, Amount, Others, Free, Left int64
}
