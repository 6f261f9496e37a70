package lease

import "headgate/limiter"

// Sizer says how much of a bucket a holder is to be lent. It is pure.
type Sizer interface {
	// Size returns what Holders[i] should hold: its share of the rate, the depth of its lease, and the
	// tokens to put into it now. The owner cuts all three to what is there. Depth 0 ends the lease:
	// the holder asks for each request.
	Size(s *Sight, i int) (share uint32, depth, grant int64)
}

// Sight is what a Sizer sees of a bucket.
type Sight struct {
	Now   int64 // ns of the owner's clock
	Limit *limiter.Limit
	// Level is what is left with the owner, negative in debt; of a semaphore, slots not lent.
	Level int64
	// Share and Outstanding are what all holders have, Holders[i]'s included.
	Share       uint32
	Outstanding int64
	Holders     []SightHolder
}

// SightHolder is one holder of a bucket.
type SightHolder struct {
	Share  uint32
	Depth  int64
	Level  int64 // in its lease, as last reported; of a semaphore, slots lent
	Demand int64 // units per 1024 s, refused or not
	Cost   int64 // of a typical request
	Live   bool  // its session holds
	Asks   bool  // it asks now
}
