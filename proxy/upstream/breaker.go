package upstream

import (
	"cmp"
	"time"
)

const (
	dfltFailures  = 5 // in a row open a breaker
	rowFailure    = 2 // weight of one in the row
	rowError500   = 1 // of a plain 500, which may be the request's fault as well
	windowSeconds = 10
	windowLeast   = 20               // answers within the window that its share of failures is judged by
	probePatience = 10 * time.Second // after which a half-open breaker lets another through
	breakerPause  = 5 * time.Second  // the first one; doubles
	maxPause      = 60 * time.Second // of any kind
	maxTimes      = 6                // that pauses double for
	calm          = 60 * time.Second // for so long well, one doubling is forgiven
)

// BreakerState says whether failures keep requests from an endpoint.
type BreakerState uint8

// The states: requests pass; none does; one may try.
const (
	BreakerClosed BreakerState = iota
	BreakerOpen
	BreakerHalfOpen
)

// String gives the word used in status and logs.
func (s BreakerState) String() string { return [...]string{"closed", "open", "half_open"}[s] }

// verdict is what one request says of an endpoint.
type verdict uint8

const (
	nothing  verdict = iota // the client left, or it says as much of the request as of the endpoint
	fine                    // a whole answer
	error500                // a plain 500
	failed
)

// rest says how long an endpoint that failed is left alone: longer each time it fails
// soon after it came back, so that one which flaps is tried ever more rarely.
type rest struct {
	times int   // it failed, less what was forgiven
	out   bool  // since the last failure
	since int64 // it came back
}

// fail notes that the endpoint is out and gives the times that it has been, ≥ 1. While
// it is out, further failures are the same one.
func (r *rest) fail(now int64) int {
	if !r.out {
		r.out = true
		r.times = max(r.times-int((now-r.since)/int64(calm)), 0)
		return r.again()
	}
	return r.times
}

// again notes that the endpoint was tried and failed before it came back.
func (r *rest) again() int {
	r.times = min(r.times+1, maxTimes)
	return r.times
}

// back notes that the endpoint is in use again.
func (r *rest) back(now int64) {
	if r.out {
		r.out, r.since = false, now
	}
}

// pause is first for the first time and doubles.
func pause(first time.Duration, times int) int64 {
	return int64(min(first<<(max(times, 1)-1), maxPause))
}

// tally counts good and bad answers of the last ten seconds.
type tally struct {
	second    [windowSeconds]int64
	good, bad [windowSeconds]uint32
}

func (t *tally) add(now int64, good bool) {
	s := now / int64(time.Second)
	i := s % windowSeconds
	if t.second[i] != s {
		t.second[i], t.good[i], t.bad[i] = s, 0, 0
	}
	if good {
		t.good[i]++
	} else {
		t.bad[i]++
	}
}

func (t *tally) count(now int64) (good, bad int) {
	oldest := now/int64(time.Second) - windowSeconds + 1
	for i, s := range t.second {
		if s >= oldest {
			good += int(t.good[i])
			bad += int(t.bad[i])
		}
	}
	return good, bad
}

// breaker keeps requests from an endpoint that fails them: five failures in a row, or
// half of at least twenty within ten seconds, open it (ten, where they are plain 500s); after a pause one request may try,
// and the first byte of its answer closes it. No lock, no clock: now is an argument that
// does not fall, in nanoseconds, > 0.
type breaker struct {
	state BreakerState
	// gen counts the changes of state. What a request that began under another one came
	// to is old news: the fifty that die with a crash open the breaker once.
	gen    uint32
	row    int // weight of the failures in a row
	window tally
	until  int64 // of open
	trial  int64 // when half-open's request began; 0: none is out
	most   int   // failures in a row that open it; 0: dfltFailures; < 0: nothing does
}

func (b *breaker) turn(s BreakerState) {
	b.state, b.row, b.trial, b.window = s, 0, 0, tally{}
	b.gen++
}

// settle lets a pause that is over be over.
func (b *breaker) settle(now int64) {
	if b.state == BreakerOpen && now >= b.until {
		b.turn(BreakerHalfOpen)
	}
}

// allows says whether a request may go, after settle.
func (b *breaker) allows(now int64) bool {
	switch b.state {
	case BreakerOpen:
		return false
	case BreakerHalfOpen:
		return b.trial == 0 || now-b.trial >= int64(probePatience)
	}
	return true
}

// begin notes that a request goes; it hands gen back with what the request came to.
func (b *breaker) begin(now int64) (gen uint32) {
	if b.state == BreakerHalfOpen {
		b.trial = now
	}
	return b.gen
}

// began notes the first byte of a good answer. closed says that it closed the breaker;
// the request belongs to the new gen then.
func (b *breaker) began(gen uint32) (now uint32, closed bool) {
	if gen == b.gen && b.state == BreakerHalfOpen {
		b.turn(BreakerClosed)
		return b.gen, true
	}
	return gen, false
}

// end notes what a request came to, and says whether that is to open the breaker, and
// whether for failures in a row: then nothing good has come of it lately.
func (b *breaker) end(now int64, gen uint32, v verdict) (opens, row bool) {
	if gen != b.gen || b.state == BreakerOpen || b.most < 0 {
		return false, false
	}
	if b.state == BreakerHalfOpen {
		b.trial = 0
		return v == failed || v == error500, true
	}
	switch v {
	case nothing:
		return false, false
	case fine:
		b.row = 0
	case error500:
		b.row += rowError500
	case failed:
		b.row += rowFailure
	}
	b.window.add(now, v != failed)
	good, bad := b.window.count(now)
	row = b.row >= rowFailure*cmp.Or(b.most, dfltFailures)
	return row || v == failed && good+bad >= windowLeast && bad >= good, row
}

// open leaves the endpoint alone until then.
func (b *breaker) open(until int64) {
	b.turn(BreakerOpen)
	b.until = until
}
