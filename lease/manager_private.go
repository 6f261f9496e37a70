package lease

import (
	"math/bits"
	"time"

	"headgate/limiter"
)

// refuseFor is the RetryAfter of a charge that nobody decides on.
const refuseFor = time.Second

// privates are the buckets that this process keeps for itself, for charges whose owner is out of
// reach. They start empty when that begins, since what a full one would admit, the lease before it
// has; those that were used keep their level from one time to the next.
type privates struct {
	table *Local
	base  int64 // the wall clock less the other one, at the start: a table's clock never goes back
}

func newPrivates(at Instant, maxBuckets int) (*privates, error) {
	table, err := NewLocal(Config{MaxBuckets: maxBuckets})
	if err != nil {
		return nil, err
	}
	return &privates{table: table, base: max(at.Wall-at.Now, 0)}, nil
}

func (p *privates) now(at Instant) int64 { return at.Now + p.base }

// begin says that an owner is out of reach from now on.
func (p *privates) begin(at Instant) { p.table.SetFloor(max(p.now(at), 1)) }

// subset copies the charges in which that are for a private bucket.
func subset(cs []limiter.Charge, which uint32) (sub []limiter.Charge, index [limiter.MaxCharges]int) {
	sub = make([]limiter.Charge, 0, bits.OnesCount32(which))
	for w := which; w != 0; w &= w - 1 {
		i := bits.TrailingZeros32(w)
		index[len(sub)] = i
		sub = append(sub, cs[i])
	}
	return sub, index
}

// take charges all in which or none, and returns what Take does.
func (p *privates) take(at Instant, cs []limiter.Charge, ds []limiter.Decision, which uint32, peek bool) (refused int) {
	if which == 0 {
		return -1
	}
	sub, index := subset(cs, which)
	for i := range sub {
		sub[i].Limit = sub[i].Private
	}
	subDs := make([]limiter.Decision, len(sub))
	if peek {
		refused = p.table.Peek(p.now(at), sub, subDs)
	} else {
		refused = p.table.Take(p.now(at), sub, subDs)
	}
	for i := range sub {
		c, d := &cs[index[i]], &ds[index[i]]
		*d = subDs[i]
		d.By = limiter.ByPrivate
		c.At, c.Held = limiter.NotTaken, nil
		if refused == -1 && !peek && sub[i].At != limiter.NotTaken {
			c.At, c.Held = sub[i].At, p
		}
	}
	if refused >= 0 {
		return index[refused]
	}
	return refused
}

// held is which of cs lie here.
func (p *privates) held(cs []limiter.Charge) (own uint32) {
	for i := range cs {
		if q, ok := cs[i].Held.(*privates); ok && q == p {
			own |= 1 << i
		}
	}
	return own
}

func (p *privates) settle(at Instant, cs []limiter.Charge, actual []int64, ds []limiter.Decision, own uint32) {
	for ; own != 0; own &= own - 1 {
		i := bits.TrailingZeros32(own)
		c := cs[i]
		c.Limit = c.Private
		p.table.Settle(p.now(at), []limiter.Charge{c}, actual[i:i+1], ds[i:i+1])
		ds[i].By = limiter.ByPrivate
		cs[i].At, cs[i].Held, cs[i].Cost = limiter.NotTaken, nil, max(actual[i], 0)
	}
}

func (p *privates) sweep(at Instant, budget int) int { return p.table.Sweep(p.now(at), budget) }

// apart decides the charges whose owners are out of reach, as each says; all or none. lent are those
// whose owner is silent while what it lent can still be spent: their private bucket waits for that.
func (m *Manager) apart(cs []limiter.Charge, ds []limiter.Decision, which uint32, lent map[int]int64, peek bool) (refused int) {
	at := m.cfg.Clock()
	refused = -1
	private := uint32(0)
	for w := which; w != 0; w &= w - 1 {
		i := bits.TrailingZeros32(w)
		c := &cs[i]
		c.At, c.Held = limiter.NotTaken, nil
		switch left, waits := lent[i]; {
		case c.Apart == limiter.ByAllow:
			ds[i] = limiter.Decision{Admitted: true, By: limiter.ByAllow, At: at.Now}
		case c.Apart != limiter.ByDeny && c.Private != nil && !waits:
			private |= 1 << i
		default:
			ds[i] = limiter.Decision{By: limiter.ByDeny, RetryAfter: refuseFor, At: at.Now}
			if waits {
				ds[i].RetryAfter = max(time.Duration(left), time.Millisecond)
			}
			if !c.Shadow && (refused < 0 || ds[i].RetryAfter > ds[refused].RetryAfter) {
				refused = i
			}
		}
	}
	if refused >= 0 {
		return refused
	}
	return m.private.take(at, cs, ds, private, peek)
}
