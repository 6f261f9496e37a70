package journal

import "time"

// Account is one budget of one subject in one period: an account of the ledger. Start and
// End are nanoseconds since the Unix epoch; both are 0 where the budget has no period.
type Account struct {
	Tenant, Budget, Subject string
	Start, End              int64
}

// Part is what a request takes of one account, in nano-dollars: in a Reservation what a
// crash counts, in a Usage what was charged.
type Part struct {
	Account
	Amount int64
}

// Reservation is a request that is about to go upstream.
type Reservation struct {
	ID                                  uint64 // set by Reserve, never 0
	Time                                time.Time
	RequestID, Tenant, Key, User, Model string
	InputTokens, OutputTokens           int64
	Cost                                int64 // nano-dollars, as estimated
	Parts                               []Part
}

// Outcomes that the journal knows; a Usage may have any other word.
const (
	// Cancelled is a request that was never served: it costs nothing, and no Read shows it.
	Cancelled = "cancelled"
	// Crashed is a request that stood open when its process ended: it counts in full.
	Crashed = "crashed"
	// Lost is no request but what the ledger counted as spent beyond a Damaged journal. Its
	// Cost is 0 (one request may be lost from several budgets), its Part says the amount.
	Lost = "lost"
)

// Usage is a request that has ended. Names beyond MaxName bytes are cut in the journal.
type Usage struct {
	ID          uint64 // of its Reservation; 0: there was none
	Incarnation uint64 // whose request it was; set by Read
	Node        string // that recorded it; set by Read

	Time, Started                  time.Time // it ended, it began
	RequestID, Tenant, Key, User   string
	Surface, Model, Asked, Backend string // Model answered, Asked was asked for
	Input, CachedInput, Output     int64  // tokens, as the upstream told
	CacheWrite, CacheWrite1h       int64  // tokens
	Images, AudioSeconds           int64
	Cost, Reserved                 int64  // nano-dollars
	Tier                           string // of the cache that answered
	Latency, TTFT                  time.Duration
	Status                         int
	Outcome                        string
	Stream, Estimated              bool // Estimated: the upstream told no token figures
	Parts                          []Part
}

// Total is what an incarnation spent on an account, in nano-dollars.
type Total struct {
	Account
	Settled int64
	Open    int64 // of requests that stood open at the end, in full
	Lost    int64 // what Log.Lost has recorded
}

// Past is an incarnation of a node whose spending the ledger may not know in full.
type Past struct {
	Incarnation uint64
	Node        string
	Accounts    []Total // by account
	// Damaged says why the records may not be all there were, empty if they are: then more
	// may have been spent than Accounts says, up to all that was outstanding.
	Damaged string
	// Forgotten: of accounts whose period ended before it (nanoseconds since the Unix epoch) more may
	// have been spent, too, up to all that was outstanding. 0: of none.
	Forgotten int64
}
