package lease

import "headgate/limiter"

// The words that owners and holders say to each other. A holder sends Requests, an owner
// answers each with a Response; it also sends Responses that answer nothing (Answers 0):
// recalls, and decisions that it took its time for. Any of them may be lost, come twice,
// late or in another order. Numbers that mean a process are incarnations.

// Bucket names a bucket and where it lives.
type Bucket struct {
	Partition uint32
	Key       limiter.Key
}

// Request is what a holder says to an owner.
type Request struct {
	Holder, Owner uint64
	Epoch         uint64 // of the view that the holder has stepped to
	Seq           uint64 // rises by one with each that this holder sends to this owner; never 0
	Session       uint64 // the session that the holder goes by; 0: none
	Dropped       uint64 // the highest session of this owner that the holder has dropped; 0: none
	Reports       []Report
	Asks          []Ask
	Roll          *Roll
}

// Report is where one series stands. Totals run from the series' beginning, in units.
type Report struct {
	Bucket
	Granter  uint64 // who opened the series; it may be an owner of before
	Series   uint64 // as numbered by the granter
	Ack      uint64 // the last Number applied; R3
	Returned int64  // taken out of the lease and given back
	Refunded int64  // of settled reservations, as far as it did not refill the lease
	Debt     int64  // by which settled reservations exceeded what they had reserved
	// Closed: the lease is dead and, but for open reservations of another series, nothing will be
	// added to the totals: the owner may forget the series once it has them.
	// Idle: the lease is dead (its tokens are in Returned), the series still open for refunds.
	Idle, Closed bool
	// Hints for the size of grants. They decide nothing that must hold.
	Level  int64 // in the lease now
	Demand int64 // asked of the bucket here, refused or not, in units per 1024 s
	Cost   int64 // of a typical request
}

// Ask is a request's charges on buckets of one owner, to be taken all or none. It is sent once:
// who hears nothing in time gives it up, and what it took is spent, or refunded if the decision still comes.
type Ask struct {
	ID      uint64 // of this holder; never used twice
	Wait    int64  // ns that the owner may take over a recall before it refuses
	Peek    bool   // decide, and change nothing
	Charges []AskCharge
}

// AskCharge is one charge of an Ask.
type AskCharge struct {
	Bucket
	Limit    limiter.Limit // as the holder knows it; the highest Revision binds
	Cost     int64
	Oversize limiter.Oversize
	Shadow   bool // counted if it conforms; never refuses
}

// Roll answers the roll call of a new owner: all slots of its partitions that are in use at the
// holder and that this owner did not lend. A retry is bit-identical: Epoch names it.
type Roll struct {
	Epoch uint64 // the holder has stepped to this view when it counted
	Slots []RolledSlots
}

// RolledSlots are slots of one bucket in use. What is given back of them after the roll is Returned
// under the series that the owner opens for them.
type RolledSlots struct {
	Bucket
	InUse int64
	Limit limiter.Limit
}

// Response is what an owner says to a holder.
type Response struct {
	Owner, Holder uint64
	Epoch         uint64 // of the view that the owner has stepped to; 0: it may not speak now, and took nothing of the request
	Answers       uint64 // the Seq of the request that this answers, whose reports are taken but for Epoch 0; 0: none
	Session       uint64 // the live one; 0: the owner may not grant now, and nothing of this counts but Failed
	Left          int64  // ns from the answer that the session holds; 0: not extended
	Leases        []Lease
	Decisions     []AskDecision
	Refusals      []Refusal
	Forgotten     []Series // reported, and unknown here: nothing more need be said of them
	RollTaken     uint64   // the Epoch of the roll that is taken
	// RollWanted: slots wait until this holder has sent a roll with an Epoch of at least this, all slots
	// in use of the owner's partitions; 0: nothing is wanted. A view that one of both skipped makes it so.
	RollWanted uint64
}

// Series names one.
type Series struct {
	Granter, Number uint64
}

// Lease sets what a holder may spend of a bucket: a GCRA of Share of the limit's rate and Depth,
// into which Granted tokens were put since the series began.
type Lease struct {
	Bucket
	Series  uint64        // opened by the sender
	Number  uint64        // of the replacement of (Share, Depth); bit-identical if sent again
	Share   uint32        // of the limit's rate, in 1/ShareOne
	Depth   int64         // units; of a semaphore, slots lent
	Granted int64         // running total
	Window  int64         // fixed windows: the window's index since the Unix epoch
	Limit   limiter.Limit // what the bucket is under now
	Level   int64         // left with the owner, for headers and sizes
	Rolled  bool          // the series is of rolled slots: Granted holds those in use
}

// ShareOne is the whole of a rate.
const ShareOne = 1 << 31

// AskDecision decides an Ask.
type AskDecision struct {
	ID      uint64
	Refused int   // -1: all taken; the index of a refusing charge; TableFull; NotOwner
	Left    int64 // ns from the answer: the decision is void when it comes later, counted from the send of the request that brought the Ask
	Charges []ChargeDecision
}

// NotOwner is a Refused: the process that was asked may not grant for one of the buckets now.
const NotOwner = -3

// ChargeDecision is one charge's part in a decision.
type ChargeDecision struct {
	limiter.Decision        // At by the owner's clock, Wall for windows
	Series           uint64 // where a refund belongs; 0: nothing was taken
	// Lent: the units were put into the series' lease (see Leases) and are to be taken from there. So
	// it is with slots, which must not be lost with an answer.
	Lent bool
}

// Refusal says that nothing of at least Cost conforms for a time, but what the holder's lease covers: the holder refuses
// by itself.
type Refusal struct {
	Bucket
	Cost int64
	For  int64 // ns from the answer's arrival
	// RetryAfter is in how many ns from the answer Cost conforms, as exact as the owner knows; limiter.Never. What the
	// holder's own lease has is not in it, where the bucket fills by itself: the holder knows that better.
	RetryAfter int64
	Level      int64 // left with the owner
}

// Handoff is all that an owner knows of a partition, for the next owner. It is given once, to one
// receiver in one epoch, after the sender stopped granting.
type Handoff struct {
	From, To  uint64
	Epoch     uint64 // the view that moves the partition
	Partition uint32
	// Nothing: the sender does not know the levels, and the receiver must wait and start empty.
	Nothing bool
	Floor   int64 // ns since the last empty start; FloorNever
	Buckets []HandedBucket
}

// FloorNever is a Floor: buckets that are not mentioned are full.
const FloorNever = -1

// HandedBucket is a bucket's part of a Handoff. Slots are not handed over: they are rolled.
type HandedBucket struct {
	Key    limiter.Key
	Limit  limiter.Limit
	State  []byte // limiter.AppendState
	Series []HandedSeries
	Drawn  int64 // durable limits: what is left of the ledger's block
	Block  uint64
}

// HandedSeries is a series' part of a HandedBucket.
type HandedSeries struct {
	Holder, Granter, Series           uint64
	Number                            uint64 // the last sent
	Share                             uint32 // the larger of what may be in force
	Depth                             int64
	Left                              int64 // ns until the lease has ended for certain; 0: ended
	Granted, Returned, Refunded, Debt int64
	Window                            int64
}
