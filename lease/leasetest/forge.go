package leasetest

import (
	"math"
	"math/rand/v2"

	"headgate/lease"
	"headgate/limiter"
)

// twist makes of a message one that nobody who keeps the protocol sends: numbers that are negative, huge or of
// nothing that exists, epochs and sessions of another time. It may change nothing at who gets it. What a liar could
// plausibly claim is not among it: nodes authenticate each other.
func twist(rng *rand.Rand, m packet) packet {
	m = m.clone()
	m.forged = true
	odd := []int64{-1, math.MinInt64, math.MaxInt64, limiter.MaxUnits + 1}[rng.IntN(4)]
	switch {
	case m.request != nil:
		twistRequest(rng, m.request, odd)
	case m.response != nil:
		twistResponse(rng, m.response, odd)
	case m.handoff != nil:
		if m.handoff.Epoch += 1 << 20; rng.IntN(2) == 0 { // of no view that will ever be; or from nobody
			m.handoff.Epoch -= 1 << 20
			m.handoff.From += 1 << 40
		}
	}
	return m
}

func twistRequest(rng *rand.Rand, r *lease.Request, odd int64) {
	r.Asks, r.Roll = nil, nil
	r.Seq = 1 // a new one would make repetitions of those that follow
	if len(r.Reports) == 0 {
		r.Epoch += uint64(rng.IntN(3)) << 20
		return
	}
	p := &r.Reports[rng.IntN(len(r.Reports))]
	p.Idle, p.Closed = false, false
	r.Reports = []lease.Report{*p}
	p = &r.Reports[0]
	switch rng.IntN(5) {
	case 0:
		p.Returned = min(odd, -1)
	case 1:
		p.Refunded = min(odd, -1)
	case 2:
		p.Debt = min(odd, -1)
	case 3:
		p.Ack = uint64(odd)
	case 4:
		p.Series += 1 << 30
		p.Refunded += 1000
	}
}

func twistResponse(rng *rand.Rand, r *lease.Response, odd int64) {
	r.Decisions, r.Refusals, r.Forgotten = nil, nil, nil
	r.Answers, r.Left, r.RollTaken, r.RollWanted = 0, 0, 0, 0 // what is true of it would be heard without the lease
	if len(r.Leases) == 0 {
		r.Epoch, r.RollTaken = 0, math.MaxUint64
		return
	}
	l := &r.Leases[rng.IntN(len(r.Leases))]
	r.Leases = []lease.Lease{*l}
	l = &r.Leases[0]
	l.Number += 1 << 20
	switch rng.IntN(3) {
	case 0:
		l.Depth = odd
	case 1:
		l.Granted = min(odd, -1)
	case 2:
		l.Share = math.MaxUint32
	}
}
