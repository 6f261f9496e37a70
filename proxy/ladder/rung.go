package ladder

import (
	"fmt"
	"strings"
	"time"
)

// Rung is a step of the degradation ladder. A larger one hurts more.
type Rung uint8

// The rungs, in the ladder's order.
const (
	ShedBestEffort Rung = iota
	StaleCache
	SmallerModel
	DropOptional
	CutMaxTokens
	ShedCost
	StaticAnswer

	count // how many there are
)

// words are the rung's name, as the policy, the command line and X-Headgate-Degraded spell it, and
// what it does, for people.
func (r Rung) words() (name, effect string) {
	switch r {
	case ShedBestEffort:
		return "shed_best_effort", "requests of class best_effort are refused as over_capacity"
	case StaleCache:
		return "stale_cache", "an answer that the cache keeps is served although its time is over, and the model is not asked for a new one"
	case SmallerModel:
		return "smaller_model", "what generates is answered by the first of its model's fallbacks that can, unless the client says X-Headgate-No-Degrade: true"
	case DropOptional:
		return "drop_optional", "X-Headgate-Degraded: drop_optional asks the application to leave out what it can do without, and kept answers are not fetched anew ahead of their end"
	case CutMaxTokens:
		return "cut_max_tokens", "answers end at the ladder's max_tokens, but for tools, structured output, and clients that say X-Headgate-No-Degrade: true"
	case ShedCost:
		return "shed_cost", "requests of more than the ladder's above_tokens are refused as over_capacity"
	case StaticAnswer:
		return "static_answer", "what generates gets the ladder's text or fallback_url: always when set by hand, in place of a refusal for want of capacity by its trigger; not for structured output, nor for clients that say X-Headgate-No-Degrade: true"
	}
	return fmt.Sprintf("rung(%d)", uint8(r)), ""
}

// String is the rung's name, as the policy and X-Headgate-Degraded spell it.
func (r Rung) String() string {
	name, _ := r.words()
	return name
}

// Effect says in one line, for people, what the rung does.
func (r Rung) Effect() string {
	_, effect := r.words()
	return effect
}

// Rungs lists all rungs in the ladder's order.
func Rungs() []Rung {
	all := make([]Rung, count)
	for i := range all {
		all[i] = Rung(i)
	}
	return all
}

// maxName is how much of a name that is not known an error repeats, in bytes.
const maxName = 64

// ParseRung reads a name; the error lists those that there are.
func ParseRung(name string) (Rung, error) {
	var names []string
	for _, r := range Rungs() {
		if r.String() == name {
			return r, nil
		}
		names = append(names, r.String())
	}
	if len(name) > maxName {
		name = strings.ToValidUTF8(name[:maxName], "") + "…"
	}
	return 0, fmt.Errorf("rung %q is not known; use one of %s", name, strings.Join(names, ", "))
}

// Set is a set of rungs. The zero value is empty.
type Set uint8

// SetOf is the set of these rungs.
func SetOf(rungs ...Rung) Set {
	var s Set
	for _, r := range rungs {
		s |= 1 << r
	}
	return s
}

// Has says whether r is in s.
func (s Set) Has(r Rung) bool { return s&(1<<r) != 0 }

// Kept is what of s holds for a client that says X-Headgate-No-Degrade: it is refused like all
// others, but gets no worse answer than it asked for.
func (s Set) Kept() Set { return s & SetOf(ShedBestEffort, ShedCost) }

// String lists the names in the ladder's order: "shed_best_effort, smaller_model". Of the empty set it is "".
func (s Set) String() string { return strings.Join(s.Names(), ", ") }

// Names are those of the rungs, in the ladder's order.
func (s Set) Names() []string {
	var names []string
	for r := range count {
		if s.Has(r) {
			names = append(names, r.String())
		}
	}
	return names
}

// Hand is what operators have set by command. It is immutable; the zero value has nothing set.
type Hand struct {
	set   Set
	until [count]time.Time
}

// ByHand takes rungs by name, and until when they are in force; the zero time is until taken back.
// Names that are no rungs, of a newer version perhaps, have no effect.
func ByHand(rungs map[string]time.Time) Hand {
	var h Hand
	for name, until := range rungs {
		if r, err := ParseRung(name); err == nil {
			h.set |= SetOf(r)
			h.until[r] = until
		}
	}
	return h
}

// On are those in force at now. It allocates nothing, and costs one comparison where nothing is set.
func (h *Hand) On(now time.Time) Set {
	if h.set == 0 {
		return 0
	}
	on := h.set
	for r := range count {
		if until := h.until[r]; !until.IsZero() && !now.Before(until) {
			on &^= 1 << r
		}
	}
	return on
}
