package ladder

import (
	"sync"
	"sync/atomic"
	"time"
)

// Setting is a rung of the policy's ladder: when it goes on by itself, and what it takes to act.
// A rung without one can be set by hand, and acts with the defaults.
type Setting struct {
	Rung Rung
	At   float64 // the pressure at which it goes on; 0: by hand only
	// OffAt is the pressure below which it goes off, less than At; 0: At − DefaultGap, or half of
	// At where that is more.
	OffAt float64
	For   time.Duration // how long the pressure must have been there; it goes off after twice that

	AboveTokens int64  // ShedCost: tokens, in and out, that a request may have; 0: DefaultAboveTokens
	MaxTokens   int64  // CutMaxTokens: tokens that an answer may have; 0: DefaultMaxTokens
	Text        string // StaticAnswer: what is answered; "": DefaultText
	FallbackURL string // StaticAnswer: where clients are sent instead of being given Text

	Models []string // to which it applies; none: to all
}

// What a rung acts with where the policy does not say.
const (
	DefaultGap         = .2
	DefaultAboveTokens = 16_384
	DefaultMaxTokens   = 512
	DefaultText        = "The service is at capacity and cannot answer this now. Please try again later."
)

// Config is what the policy says of shedding and the ladder.
type Config struct {
	Settings []Setting // in the ladder's order; of several for one rung the first that covers a model holds for it
	Sheds    []Shed    // in the order in which they go on
	Models   []string  // that there are
}

// State is what requests for one model meet. It is immutable.
type State struct {
	Rungs    Set     // in force by their triggers
	Pressure float64 // as last told; NaN: not known
	cutoff   Cutoff

	aboveTokens       int64
	MaxTokens         int64  // at which CutMaxTokens cuts; always there
	Text, FallbackURL string // of StaticAnswer; Text is always there
}

// With is what is in force for a request when byHand is set by hand as well, and what is shed then.
func (s *State) With(byHand Set) (Set, Cutoff) {
	on, c := s.Rungs|byHand, s.cutoff
	if on.Has(ShedBestEffort) && c.Class == 0 {
		c.Class = BestEffort
	}
	if on.Has(ShedCost) && (c.AboveTokens == 0 || c.AboveTokens > s.aboveTokens) {
		c.AboveTokens = s.aboveTokens
	}
	return on, c
}

// Ladder keeps the State of each model. It has no goroutine and no clock: who learns of pressures
// calls Step. All methods are safe for concurrent use; State takes no lock.
type Ladder struct {
	mu     sync.Mutex
	states atomic.Pointer[map[string]*State]
}

// New is a ladder with nothing configured: rungs act by hand only, and nothing is shed.
func New() *Ladder { return &Ladder{} }

// Apply takes a new policy. What is on stays on where its setting is still there.
func (l *Ladder) Apply(c Config) {}

// State is what requests for that model meet, never nil. A model that is not known meets the state
// of one without any settings of its own.
func (l *Ladder) State(model string) *State { return nil }

// Step takes the pressure of each model: waiting over places, 1 while the queue refuses, NaN where
// nobody knows. now is in nanoseconds of any clock that does not go back. Call it a few times a
// second. It reports whether any State has other rungs or cut-offs than before.
func (l *Ladder) Step(now int64, pressure func(model string) float64) (changed bool) { return false }
