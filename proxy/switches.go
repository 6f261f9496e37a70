package proxy

import (
	"cmp"
	"fmt"
	"strings"
	"time"
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
	// Rungs() does not list, of a newer version perhaps, have no effect here.
	Rungs map[string]time.Time
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
	p.switches.Store(s)
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

func (s *Switches) on(rung string, now time.Time) bool {
	until, ok := s.Rungs[rung]
	return ok && (until.IsZero() || now.Before(until))
}

// Rung is a step of the degradation ladder.
type Rung struct {
	Name   string `json:"name"`
	Effect string `json:"effect"` // one line, for people
}

// The rungs.
const (
	rungShed    = "shed_best_effort"
	rungSmaller = "smaller_model"
)

// Rungs lists the rungs that have an effect, in the order in which they hurt.
func Rungs() []Rung {
	return []Rung{
		{rungShed, "requests of class best_effort are refused as over_capacity"},
		{rungSmaller, "what generates is answered by the first of its model's fallbacks that can, unless the client says X-Headgate-No-Degrade: true"},
	}
}

// CheckRung says which rungs there are if name is none of them.
func CheckRung(name string) error {
	var names []string
	for _, r := range Rungs() {
		if r.Name == name {
			return nil
		}
		names = append(names, r.Name)
	}
	return fmt.Errorf("rung %q is not known; use one of %s", clip(name, 64), strings.Join(names, ", "))
}
