package ladder

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Setting is a rung of the policy's ladder: when it goes on by itself, and what it takes to act.
// A rung without one can be set by hand, and acts with the defaults.
type Setting struct {
	Rung Rung
	At   float64 // the pressure at which it goes on; 0: by hand only
	// OffAt is the pressure below which it goes off. 0, or what is not below At, stands for
	// At − DefaultGap, or half of At where that is more.
	OffAt float64
	For   time.Duration // how long the pressure must have been there; it goes off after twice that

	AboveTokens int64  // ShedCost: tokens, in and out, that a request may have; 0: DefaultAboveTokens
	MaxTokens   int64  // CutMaxTokens: tokens that an answer may have; 0: DefaultMaxTokens
	Text        string // StaticAnswer: what is answered; "": DefaultText
	FallbackURL string // StaticAnswer: where clients are redirected to instead of being given Text

	Models []string // to which it applies; none: to all
}

// What a rung acts with where the policy does not say.
const (
	DefaultGap         = .2
	DefaultAboveTokens = 16_384
	DefaultMaxTokens   = 512
	DefaultText        = "The service is at capacity and cannot answer this now. Please try again later."
)

func (s *Setting) offAt() float64 {
	if s.OffAt > 0 && s.OffAt < s.At {
		return s.OffAt
	}
	return max(s.At-DefaultGap, s.At/2)
}

// String says it for people: "shed_cost from pressure 0.9 for 5s, until below 0.7 for 10s: requests
// above 16,384 tokens".
func (s Setting) String() string {
	when := "by hand only"
	if s.At > 0 {
		when = fmt.Sprintf("from pressure %s for %v, until below %s for %v", number(s.At), s.For, number(s.offAt()), 2*s.For)
	}
	what := ""
	switch s.Rung {
	case ShedCost:
		what = ": requests above " + grouped(cmp.Or(s.AboveTokens, DefaultAboveTokens)) + " tokens"
	case CutMaxTokens:
		what = ": answers of at most " + grouped(cmp.Or(s.MaxTokens, DefaultMaxTokens)) + " tokens"
	}
	return s.Rung.String() + " " + when + what
}

// Config is what the policy says of shedding and the ladder.
type Config struct {
	Settings []Setting // of several for one rung the first that covers a model holds for it
	Sheds    []Shed
	Models   []string // that there are, by their own names
}

// State is what requests for one model meet. It is immutable.
type State struct {
	Rungs    Set     // in force by their triggers
	Pressure float64 // as last told; NaN: not known

	// What the rungs act with; always there but for FallbackURL.
	AboveTokens int64
	MaxTokens   int64
	Text        string
	FallbackURL string // in place of Text, where it is not ""

	Cutoff   Cutoff    // by the policy's list; With adds what the rungs refuse
	Shedding int       // how many of Sheds are in force
	Sheds    []Shed    // the policy's list; don't change it
	Settings []Setting // of this model, in the ladder's order; don't change it
}

// With is what is in force for a request when byHand is set by hand as well, and what is refused
// then.
func (s *State) With(byHand Set) (Set, Cutoff) {
	on, c := s.Rungs|byHand, s.Cutoff
	if on.Has(ShedBestEffort) {
		c = c.and(Cutoff{Class: BestEffort})
	}
	if on.Has(ShedCost) {
		c = c.and(Cutoff{AboveTokens: s.AboveTokens})
	}
	return on, c
}

// Explain says for people what is refused at present: "at pressure 0.82: requests above 32,768
// tokens; class best_effort".
func (s *State) Explain(byHand Set) string {
	_, c := s.With(byHand)
	if math.IsNaN(s.Pressure) {
		return "the pressure is not known: " + c.String()
	}
	return "at pressure " + number(s.Pressure) + ": " + c.String()
}

// Change is a model whose rungs or cut-offs are others than before.
type Change struct {
	Model   string
	Was, Is *State
}

// Ladder keeps the State of each model. It has no goroutine and no clock: who learns of pressures
// calls Step. All methods are safe for concurrent use; State takes no lock.
type Ladder struct {
	mu        sync.Mutex
	models    map[string]*model
	published atomic.Pointer[published]
}

// published is what State reads.
type published struct {
	states map[string]*State
	others *State // of models that are not known
}

// model is the core of one.
type model struct {
	gauge   gauge
	trigger trigger
	shedder shedder
	state   *State
}

// New is a ladder with nothing configured: rungs act by hand only, and nothing is shed.
func New() *Ladder {
	l := &Ladder{}
	l.Apply(Config{})
	return l
}

// Apply takes a new policy. What is on stays on where its setting, and those of all below it, are
// still there. It keeps c's lists.
func (l *Ladder) Apply(c Config) {
	sheds := slices.Clone(c.Sheds)
	slices.SortStableFunc(sheds, func(a, b Shed) int { return cmp.Compare(a.At, b.At) })
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.models
	l.models = make(map[string]*model, len(c.Models))
	for _, name := range c.Models {
		m := before[name]
		if m == nil {
			m = &model{gauge: newGauge()}
		}
		settings := settingsOf(name, c.Settings)
		m.trigger.set(slices.DeleteFunc(slices.Clone(settings), func(s Setting) bool { return s.At <= 0 }))
		m.shedder.set(sheds)
		m.state = newState(settings, sheds)
		l.models[name] = m
	}
	l.publish(newState(settingsOf("", c.Settings), sheds))
}

// settingsOf are those that hold for a model, one a rung, in the ladder's order. "" is a model of
// which no setting speaks.
func settingsOf(model string, all []Setting) []Setting {
	var found Set
	var own []Setting
	for _, s := range all {
		if !found.Has(s.Rung) && (len(s.Models) == 0 || slices.Contains(s.Models, model)) {
			found |= SetOf(s.Rung)
			own = append(own, s)
		}
	}
	slices.SortFunc(own, func(a, b Setting) int { return cmp.Compare(a.Rung, b.Rung) })
	return own
}

// newState is one with nothing on.
func newState(settings []Setting, sheds []Shed) *State {
	s := &State{Pressure: math.NaN(), AboveTokens: DefaultAboveTokens, MaxTokens: DefaultMaxTokens, Text: DefaultText, Sheds: sheds, Settings: settings}
	for _, o := range settings {
		switch o.Rung {
		case ShedCost:
			s.AboveTokens = cmp.Or(o.AboveTokens, s.AboveTokens)
		case CutMaxTokens:
			s.MaxTokens = cmp.Or(o.MaxTokens, s.MaxTokens)
		case StaticAnswer:
			s.Text, s.FallbackURL = cmp.Or(o.Text, s.Text), o.FallbackURL
		}
	}
	return s
}

// publish makes what the cores say what State reads. The caller holds the lock.
func (l *Ladder) publish(others *State) {
	p := &published{states: make(map[string]*State, len(l.models)), others: others}
	for name, m := range l.models {
		s := *m.state
		s.Rungs, s.Cutoff, s.Shedding, s.Pressure = m.trigger.on(), m.shedder.cutoff(), m.shedder.level, m.gauge.told
		m.state = &s
		p.states[name] = m.state
	}
	l.published.Store(p)
}

// State is what requests for that model meet, by its own name; never nil. A model that the policy
// does not know has nothing on by itself.
func (l *Ladder) State(model string) *State {
	p := l.published.Load()
	if s := p.states[model]; s != nil {
		return s
	}
	return p.others
}

// Step takes the pressure of each model: waiting over places, 1 while its queue refuses, NaN where
// nobody knows. now is in nanoseconds of any clock that does not go back. Call it a few times a
// second: what lies between two calls counts for two seconds at most. pressure must not call the
// Ladder. It returns the models whose rungs or cut-offs changed, by name.
func (l *Ladder) Step(now int64, pressure func(model string) float64) (changed []Change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, m := range l.models {
		s := m.gauge.step(now, pressure(name))
		m.trigger.step(s)
		m.shedder.step(s)
		if m.trigger.on() != m.state.Rungs || m.shedder.level != m.state.Shedding {
			changed = append(changed, Change{Model: name, Was: m.state})
		}
	}
	l.publish(l.published.Load().others)
	for i := range changed {
		changed[i].Is = l.models[changed[i].Model].state
	}
	slices.SortFunc(changed, func(a, b Change) int { return cmp.Compare(a.Model, b.Model) })
	return changed
}
