package limiter

import "time"

// durableAbove is how long a limit's window, or the filling of its empty bucket, takes at
// most for it to be kept in memory only.
const durableAbove = time.Minute

// Durable says whether a bucket of the limit must outlive the process that keeps it: were it
// to start empty after a crash, that would be an outage of more than a minute. True of a
// FixedWindow of more than 60 s and of a GCRA whose empty bucket takes more than 60 s to fill.
// Never of the sliding algorithms, whose single charges would have to be kept, nor of a
// Semaphore, whose slots end with the requests that hold them.
func (l *Limit) Durable() bool {
	switch l.Algorithm {
	case FixedWindow:
		return l.Rate.Per > durableAbove
	case GCRA:
		return product(int64(durableAbove), l.Rate.Count).less(product(l.Burst, int64(l.Rate.Per)))
	}
	return false
}

// Newest is the newest clock reading that s has seen, as Take counts it: whoever saves s with
// AppendState at it and restores it there has the same state again.
func (s *State) Newest() int64 { return s.last }
