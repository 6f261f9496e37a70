package proxy

import (
	"slices"
	"time"
)

// Mode says what becomes of a limit while the node is cut off from its cluster: while it
// holds no view lease.
type Mode uint8

// The modes.
const (
	Local Mode = iota // the node's own bucket goes on deciding
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

// SetOverride makes m every limit's mode while the node is cut off, until the given moment:
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

// Degraded says whether the node is cut off from its cluster: it holds no view lease. The
// first call that finds a change logs it, so that whoever wants the line in time calls often.
func (p *Proxy) Degraded() bool {
	if p.cfg.Lease == nil {
		return false
	}
	cut := !p.cfg.Lease()
	if p.cutOff.Load() != cut && p.cutOff.CompareAndSwap(!cut, cut) {
		if cut {
			p.cfg.Logger.Warn("cut off from the cluster: limits follow their unavailable mode")
		} else {
			p.cfg.Logger.Info("in the cluster again: limits are decided as usual")
		}
	}
	return cut
}

// standing is what decides on a limit.
type standing uint8

const (
	byBucket  standing = iota // its bucket
	allowed                   // nothing: the node is cut off and the limit says allow
	denied                    // the node is cut off and the limit says deny
	shareless                 // the node's share of it is nothing
)

// String is what an Explanation calls it.
func (s standing) String() string {
	return [...]string{"bucket", "allow", "deny", "no_share"}[s]
}

// standing of l while the node is cut off, or not.
func (p *Proxy) standing(l *Limit, cut bool) standing {
	if cut {
		mode := l.Unavailable
		if m, _, ok := p.Override(); ok {
			mode = m
		}
		switch mode {
		case Allow:
			return allowed
		case Deny:
			return denied
		}
	}
	if l.None {
		return shareless
	}
	return byBucket
}

// apart is a limit that is not for its bucket to decide.
type apart struct {
	limit *Limit
	standing
}

// refusal words why a limit whose bucket was not asked refuses; nil if it does not.
func (a apart) refusal() *Error {
	switch {
	case a.limit.Shadow:
		return nil
	case a.standing == denied:
		return errCutOff(a.limit)
	case a.standing == shareless:
		return errShareless(a.limit)
	}
	return nil
}

// mode is the decisions' label.
func (r *reservation) mode() string {
	if r.cut {
		return "degraded"
	}
	return "local"
}
