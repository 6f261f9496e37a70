package upstream

import "time"

const (
	retryShare  = 0.2 // of the requests
	retryRate   = 3.0 // a second
	retryBurst  = 100 // and as many as are in flight: an endpoint that dies may hold nearly all
	retryCharge = 1 + retryShare
)

// budget bounds second attempts, so that trouble does not multiply load: a token bucket
// that requests and time fill. now is as for breaker.
type budget struct {
	tokens float64
	at     int64
}

// begin notes a request, first attempt or not; full is how many tokens there may be.
func (b *budget) begin(now int64, full float64) {
	b.fill(now, full)
	b.tokens = min(b.tokens+retryShare, full)
}

// take says whether another attempt may be made. It gives for what begin will add for
// that attempt, too.
func (b *budget) take(now int64, full float64) bool {
	b.fill(now, full)
	if b.tokens < retryCharge {
		return false
	}
	b.tokens -= retryCharge
	return true
}

func (b *budget) fill(now int64, full float64) {
	passed := time.Duration(max(now-b.at, 0)).Seconds()
	b.tokens, b.at = min(b.tokens+passed*retryRate, full), now
}

// left is how many attempts take would allow now.
func (b *budget) left(now int64, full float64) int {
	b.fill(now, full)
	return int(b.tokens / retryCharge)
}
