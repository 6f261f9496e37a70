package proxy

import (
	"slices"
	"time"

	"headgate/limiter"
)

// Mode says what decides on a limit while the owner of its bucket is out of reach: while this
// node holds no view lease, or can't get an answer.
type Mode uint8

// The modes.
const (
	Local Mode = iota // the node's private bucket, a share of the limit
	Deny              // what the limit applies to is refused
	Allow             // the limit is neither checked nor charged
)

var modeNames = [...]string{"local", "deny", "allow"}

// String gives the policy's spelling.
func (m Mode) String() string { return modeNames[m] }

// ParseMode reads the policy's spelling.
func ParseMode(s string) (Mode, bool) {
	i := slices.Index(modeNames[:], s)
	return Mode(max(i, 0)), i >= 0
}

// override replaces every limit's mode until it expires.
type override struct {
	mode  Mode
	until time.Time
}

// SetOverride makes m the mode of every limit whose owner is out of reach, until the given moment:
// an operator's word for this node only. A moment that has passed takes it back.
func (p *Proxy) SetOverride(m Mode, until time.Time) {
	p.override.Store(&override{m, until})
}

// Override is the mode set by SetOverride and when it ends; ok is false if none is in force.
func (p *Proxy) Override() (m Mode, until time.Time, ok bool) {
	o := p.override.Load()
	if o == nil || !time.Now().Before(o.until) {
		return Local, time.Time{}, false
	}
	return o.mode, o.until, true
}

// Degraded says in words why owners of buckets are out of this node's reach, so that their limits
// follow their unavailable modes; "" while none is. The first call that finds a change between the
// two logs it, so that whoever wants the line in time calls often.
func (p *Proxy) Degraded() string {
	if p.cfg.Degraded == nil {
		return ""
	}
	why := p.cfg.Degraded()
	if now := why != ""; p.degraded.Load() != now && p.degraded.CompareAndSwap(!now, now) {
		if now {
			p.cfg.Logger.Warn("limits follow their unavailable mode where their owner is out of reach", "why", why)
		} else {
			p.cfg.Logger.Info("every limit is decided by its owner again")
		}
	}
	return why
}

// by is what decides on a charge in this mode.
func (m Mode) by() limiter.By {
	return [...]limiter.By{limiter.ByPrivate, limiter.ByDeny, limiter.ByAllow}[m]
}

// apart says whether who decided did so because the bucket's owner was out of reach.
func apart(b limiter.By) bool {
	return b == limiter.ByPrivate || b == limiter.ByDeny || b == limiter.ByAllow
}

// label is what the decisions' metric calls b.
func label(b limiter.By) string {
	if apart(b) {
		return "degraded"
	}
	return b.String()
}

// levelKnown says whether there is a level behind the i-th decision that headers could tell.
func (r *reservation) levelKnown(i int) bool {
	return r.by[i] != limiter.ByDeny && r.by[i] != limiter.ByAllow
}

// denial is why a limit refuses that nobody decided on.
type denial uint8

const (
	notDenied denial = iota
	denied           // it says deny
	shareless        // this node's private share of it is nothing
	notYet           // the private bucket waits until what the owner lent can't be spent any more
)

// denial of the i-th limit.
func (r *reservation) denial(i int) denial {
	switch c := &r.charges[i]; {
	case r.by[i] != limiter.ByDeny:
		return notDenied
	case c.Apart == limiter.ByDeny:
		return denied
	case c.Private == nil:
		return shareless
	}
	return notYet
}

// refusal words the refusal by the i-th limit.
func (r *reservation) refusal(i int) *Error {
	l, d, c, why := r.limits[i], &r.decisions[i], &r.charges[i], r.denial(i)
	if why != notDenied {
		r.n = 0 // a client that is told to come back at once should see no levels of before
	}
	switch {
	case why == denied:
		return errCutOff(l)
	case why == shareless:
		return errShareless(l)
	case why == notYet:
		return errNotYet(l, d.RetryAfter)
	case d.By == limiter.ByPrivate && d.RetryAfter == limiter.Never && l.Unit != Concurrency && c.Cost <= l.Spec.Capacity():
		return errPrivate(l, c.Cost, c.Private.Capacity())
	}
	return errLimit(l, *d, c.Cost)
}
