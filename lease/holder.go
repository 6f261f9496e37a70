package lease

import (
	"headgate/limiter"
)

// HolderConfig is what a Holder is made of.
type HolderConfig struct {
	Self  uint64 // this process's incarnation
	Clock Clock  // safe for concurrent use
	// MaxBuckets bounds the buckets; 0: DefaultMaxBuckets. Those with reservations that are still to be
	// settled are kept above it.
	MaxBuckets int
	// Wake says that a Request to an owner should not wait for the next keep-alive. It is called from
	// within the Holder's methods, with its lock held or not: it must not block or call back. May be nil.
	Wake  func(owner uint64)
	Break Rule // for tests that show that a broken rule is missed; 0 in use
}

// Holder spends what owners lend to this process (DESIGN.md). It is safe for concurrent use, starts
// no goroutine and does no I/O.
type Holder struct {
	cfg HolderConfig
}

// NewHolder returns a holder of nothing, before its first view.
func NewHolder(c HolderConfig) *Holder { return &Holder{cfg: c} }

// Home is what a bucket is placed by: all buckets of a tenant by the tenant, with spread by tenant
// and subject; those of no tenant by limit and subject.
func Home(k *limiter.Key, spread bool) string {
	switch {
	case k.Tenant == "":
		return "\x00" + k.Limit + "\x00" + k.Subject
	case spread:
		return k.Tenant + "\x00" + k.Subject
	}
	return k.Tenant
}

// Step goes on to a view.
func (h *Holder) Step(v *View) {}

// Take charges cs from the leases in hand, in their order. Where these cover all it returns -1, 0, and
// takes no lock and allocates nothing. refused ≥ 0 is the index of a charge that is refused here (of
// several, the one with the longest wait): nothing is held. Else the charges in missing need their
// owner, and the others are held: the caller asks and calls Decided, or calls Cancel. A shadow charge
// is never refused, but may be missing. ds[i] is what decided cs[i], where it was decided.
func (h *Holder) Take(cs []limiter.Charge, ds []limiter.Decision) (refused int, missing uint32) {
	return -1, 1<<len(cs) - 1
}

// Peek is what Take would do. It changes nothing.
func (h *Holder) Peek(cs []limiter.Charge, ds []limiter.Decision) (refused int, missing uint32) {
	return -1, 1<<len(cs) - 1
}

// Owner says whom to ask about a charge; the zero Member: nobody.
func (h *Holder) Owner(c *limiter.Charge) (Member, Bucket) { return Member{}, Bucket{Key: c.Key} }

// Ask makes the question about the charges in which, all of one owner.
func (h *Holder) Ask(cs []limiter.Charge, which uint32, wait int64, peek bool) Ask { return Ask{} }

// Decided takes an owner's decision on the charges in which, after Handle of the Response that brought
// it. sent is the reading before the request with the Ask was sent. Not ok: it came too late or from
// an owner of before, and nothing is held of which. Otherwise refused is -1 (all of which are held), or
// d.Refused: the index in cs of the refusing charge (then nothing of which is held), TableFull or NotOwner. Decisions on a peek only fill ds.
func (h *Holder) Decided(cs []limiter.Charge, which uint32, d *AskDecision, sent int64, ds []limiter.Decision) (refused int, ok bool) {
	return NotOwner, false
}

// Cancel gives back what is held of the charges in which, as if it had never been taken.
func (h *Holder) Cancel(cs []limiter.Charge, which uint32) {}

// Settle replaces the cost of each charge held by actual[i] ≥ 0 and ends the hold: to settle again
// changes nothing. It asks nobody. ds[i] is the level after it as far as it is known here.
func (h *Holder) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {}

// Request is the next message to an owner, with these Asks. It reads the clock: the caller sends it at
// once. nil: the owner is not in the view.
func (h *Holder) Request(owner uint64, asks []Ask) *Request { return nil }

// Handle takes what an owner says. The caller routes r.Decisions by their ID to Decided afterwards.
func (h *Holder) Handle(r *Response) {}

// Owners lists, in ascending order, to whom there is anything to say or to keep alive: a keep-alive a
// KeepEvery is due to each.
func (h *Holder) Owners() []uint64 { return nil }

// Drain is for a process that leaves: it returns every lease and takes no new ones. What is in flight
// is settled as ever.
func (h *Holder) Drain() {}

// Drained says that after Drain nothing is held, and that owners have all totals.
func (h *Holder) Drained() bool { return true }

// HolderLevel is one series as an operator sees it.
type HolderLevel struct {
	Bucket
	Granter, Series uint64
	Limit           limiter.Limit
	// Level is what a Take can spend now: 0 where the lease is frozen, ended, or of another window. Of
	// a semaphore, free slots.
	Level  int64
	Left   int64 // ns until the lease's deadline; 0 or less: frozen or ended
	Share  uint32
	Depth  int64
	InUse  int64 // of a semaphore
	Window int64
	Dead   bool // the series is kept for reservations alone
}

// Levels lists a tenant's series, also frozen and dead ones, by limit, subject and series; of tenant "",
// those of no tenant.
func (h *Holder) Levels(tenant string) []HolderLevel { return nil }

// HolderStats counts.
type HolderStats struct {
	Buckets, Leases, Series int
	// Unacknowledged are series and rolls of which owners do not have all totals yet.
	Unacknowledged int
	Rejected       uint64 // parts of messages that could not be true
	Discarded      uint64 // those of owners of before, or late
	Void           uint64 // takes and decisions past their deadline
	Dropped        uint64 // sessions
	LostDebt       uint64 // units of debt whose series nobody knew any more
	Full           uint64 // leases given back for want of room
}

// Stats counts.
func (h *Holder) Stats() HolderStats { return HolderStats{} }
