package capacity

import "time"

// Observation is what the cluster's own requests said about one backend since the last one: sums, so that those of many
// nodes can be added. Backend, InUse, Waiting and Pause are no sums.
type Observation struct {
	// Backend is the endpoint's ID.
	Backend string

	// Done is how many requests ended, however they ended, and SlotTime how long they held how many slots (Σ cost × time).
	Done     int64
	SlotTime time.Duration

	// FirstByte is the sum of the times from the send to the first byte of the answer, over FirstBytes requests: those that stream
	// and were answered well. A refusal comes at once, and says nothing of the work.
	FirstByte  time.Duration
	FirstBytes int64

	// Answer and Answers are the same of those that do not stream, whose first byte comes when all is done.
	Answer  time.Duration
	Answers int64

	// Pushbacks is how many 429s the backend answered; Pause what is left of the longest Retry-After among them.
	Pushbacks int64
	Pause     time.Duration

	// Failures is how many requests the backend failed: no connection, no first byte in time, 5xx, a torn stream.
	Failures int64

	// InUse is the number of slots held of this backend, by all nodes, when this was said. Where it is left at zero the use is
	// reckoned from SlotTime alone, which lags by the length of a request.
	InUse int64

	// Waiting is how many requests wait for a slot of this backend, or may be given one. Left at zero, only use tells whether
	// more slots would be used.
	Waiting int64
}
