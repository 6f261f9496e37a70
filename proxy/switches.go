package proxy

import (
	"cmp"
	"time"

	"headgate/proxy/ladder"
)

// Switches is what the operators have thrown: kill switches and rungs of the ladder. It is
// independent of policy revisions, so that a kill binds without one being compiled. It is
// immutable once SetSwitches has it; the zero value has nothing thrown.
type Switches struct {
	Global  *Kill
	Tenants map[string]*Kill
	Keys    map[string]*Kill // by key id
	// Models by name. A model's own name covers its aliases and its use as another's
	// fallback; an alias covers the requests that name it.
	Models map[string]*Kill
	// Rungs in force, by name, until when; the zero time is until taken back. Names that
	// are none of the ladder's, of a newer version perhaps, have no effect here.
	Rungs map[string]time.Time

	hand ladder.Hand // Rungs, as requests read them
}

// Kill is a kill switch that is thrown. Reason is shown to those whom it refuses.
type Kill struct {
	Reason string
}

// SetSwitches makes s, or nothing thrown for nil, what new requests meet. Answers that have
// begun go on.
func (p *Proxy) SetSwitches(s *Switches) {
	if s == nil {
		s = &Switches{}
	}
	own := *s
	own.hand = ladder.ByHand(s.Rungs)
	p.switches.Store(&own)
}

// killed is the refusal by a switch thrown against the caller or m, nil if there is none. m
// may be nil; name is what it goes by here.
func (x *exchange) killed(name string, m *Model) *Error {
	s, c := x.p.switches.Load(), x.caller
	if k := s.Global; k != nil {
		return errKilled("global", "", k)
	}
	if k := s.Tenants[c.Tenant]; k != nil {
		return errKilled("tenant", c.Tenant, k)
	}
	if k := s.Keys[c.KeyID]; k != nil {
		return errKilled("key", c.KeyID, k)
	}
	if m == nil {
		return nil
	}
	if k := s.model(name, m); k != nil {
		return errKilled("model", cmp.Or(name, m.Name), k)
	}
	return nil
}

// Killed says whether nobody may use m, the gateway itself included.
func (p *Proxy) Killed(m *Model) bool {
	s := p.switches.Load()
	return s.Global != nil || s.model("", m) != nil
}

// model is the switch thrown against m, which goes by name here; nil if there is none.
func (s *Switches) model(name string, m *Model) *Kill {
	if k := s.Models[m.Name]; k != nil {
		return k
	}
	return s.Models[name]
}
