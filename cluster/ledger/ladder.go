package ledger

import (
	"strings"
	"time"
)

// RungNames are the rungs of the ladder, the one that hurts least first: the order in which they go on.
var RungNames = []string{"shed_best_effort", "stale_cache", "smaller_model", "drop_optional", "cut_max_tokens", "shed_cost", "static_answer"}

// defaultRungFor is how long the pressure lasts before a rung goes on, where a policy says nothing.
const defaultRungFor = 5 * time.Second

// LadderRung is a rung of the ladder as written; see Index.Ladder for what it becomes.
type LadderRung struct {
	Rung string `yaml:"rung"` // of RungNames
	// At is from which pressure on it goes on by itself; absent: only by hand.
	At    *Factor   `yaml:"at,omitempty"`
	OffAt *Factor   `yaml:"off_at,omitempty"` // below which it goes off; absent: 0.2 less than At, or half of it where that is more
	For   *Duration `yaml:"for,omitempty"`    // how long at At or more before it goes on; absent: 5s
	// AboveTokens is of shed_cost: the input and output above which requests are shed.
	AboveTokens int64    `yaml:"above_tokens,omitempty"`
	MaxTokens   int64    `yaml:"max_tokens,omitempty"`   // of cut_max_tokens: what is left of a request's cap
	Text        string   `yaml:"text,omitempty"`         // of static_answer: the answer
	FallbackURL string   `yaml:"fallback_url,omitempty"` // of static_answer, instead: where the client is sent
	Models      []string `yaml:"models,omitempty"`       // absent: all
}

// ResolvedLadderRung is a rung with its defaults in place. Nothing of it may be changed.
type ResolvedLadderRung struct {
	Rung string // of RungNames
	// Auto: it goes on and off by itself, beside by hand.
	Auto        bool
	At          float64       // in (0, 1] where Auto
	OffAt       float64       // in [0, At) where Auto
	For         time.Duration // > 0 where Auto
	AboveTokens int64         // > 0 of shed_cost, else 0
	MaxTokens   int64         // > 0 of cut_max_tokens, else 0
	Text        string        // of static_answer: one of the two is set
	FallbackURL string
	// Models are the own names of those that it is for, never aliases; nil: all.
	Models []string
}

// resolve compiles a rung of a valid policy. models are by name and alias.
func (l *LadderRung) resolve(models map[string]*Model) ResolvedLadderRung {
	r := ResolvedLadderRung{
		Rung: l.Rung, Auto: l.At != nil, AboveTokens: l.AboveTokens, MaxTokens: l.MaxTokens, Text: l.Text, FallbackURL: l.FallbackURL,
		Models: ownNames(l.Models, models),
	}
	if r.Auto {
		r.At, r.OffAt, r.For = l.At.float(), l.offAt().float(), time.Duration(valueOr(l.For, Duration(defaultRungFor)))
	}
	return r
}

// offAt is below which pressure an automatic rung goes off.
func (l *LadderRung) offAt() Factor {
	const less = factorOne / 5
	return valueOr(l.OffAt, max(*l.At-less, *l.At/2))
}

// ownNames are those of models that go by names, each once and in their order; nil for none.
func ownNames(names []string, models map[string]*Model) (out []string) {
	seen := map[*Model]bool{}
	for _, n := range names {
		if m := models[n]; !seen[m] {
			seen[m] = true
			out = append(out, m.Name)
		}
	}
	return out
}

// drainPrefix begins the names of rungs that are drains of backends.
const drainPrefix = "drain/"

// DrainRung is the name of the replicated flag by which a backend is drained: a rung, which expires and is
// audited as rungs are. Releases that know no drains have no rung of that name, and go on as before. A name of
// more than MaxDrain bytes has none: SetRung refuses it.
func DrainRung(backend string) string { return drainPrefix + backend }

// MaxDrain is how long the name of a backend may be that is drained, in bytes.
const MaxDrain = maxID - len(drainPrefix)

// Drains says which backend a rung drains; false for a rung of the ladder.
func (r *Rung) Drains() (backend string, ok bool) {
	backend, ok = strings.CutPrefix(r.Name, drainPrefix)
	return backend, ok && backend != ""
}
