// Package route is the router: the rules of the policy by which a request that asks for one
// model is answered by another, by its size, its class, its tier, a header or its surface, and by weights, for canaries.
//
// It is pure: no clock, no randomness, no lock. A [Table] is immutable and may be shared.
//
// # What holds
//
//   - The first rule that matches decides, and it decides once: what it names is not routed again.
//   - The same table, on whichever node, gives the same request the same model: what sticks is hashed, and nothing
//     is remembered. A change of weights moves only those that must move: from arms that lost weight, to arms
//     that gained it. An arm that is added takes from all others by their weight, one that is removed gives to them.
//   - Rules do not share a draw: who is in the tenth of one canary is in the tenth of another by chance. Renaming a
//     rule draws anew.
//   - A rule sends nobody to a model whose context cannot hold the request. Where none of its arms can, it does not match.
//
// # What is left out
//
// Whether a caller may use a model, whether it is killed, aliases, fallbacks and the ladder's smaller model are the front
// door's. What the sizes are is the meter's estimate.
package route

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// Bounds of a table.
const (
	MaxRules = 256  // rules
	MaxArms  = 16   // models of a rule
	MaxList  = 1024 // names of one list of a match
	MaxTotal = 1 << 32
)

// Class is how urgent a request is, the most urgent first.
type Class uint8

// The classes.
const (
	Interactive Class = iota
	Background
	BestEffort
)

// String gives the policy's word.
func (c Class) String() string {
	if c > BestEffort {
		return "class " + strconv.Itoa(int(c))
	}
	return [...]string{"interactive", "background", "best_effort"}[c]
}

// Sticky is what always gets the same model of a rule, while weights and arms stay.
type Sticky uint8

// The ways to stick.
const (
	ByUser    Sticky = iota // the user; where none is named, Query.Draw decides
	ByKey                   // the key
	ByRequest               // nothing: Query.Draw decides
)

// String gives the policy's word.
func (s Sticky) String() string {
	if s > ByRequest {
		return "sticky " + strconv.Itoa(int(s))
	}
	return [...]string{"user", "key", "request"}[s]
}

// Range is a condition on tokens: more than Above and fewer than Below. nil is no bound.
type Range struct{ Below, Above *int64 }

// Header is a condition on a header of the request: it has exactly this value.
type Header struct{ Name, Value string }

// Match is what a rule asks for; all of it must hold. An empty list, a zero range and a nil BelowTier hold always.
type Match struct {
	Models    []string // as the request named them, or what their aliases stand for: as the caller asks
	Surfaces  []string
	Tenants   []string
	Classes   []Class
	BelowTier *int // the plan's tier is lower
	Input     Range
	Output    Range // a request without a cap: the model's default
	Headers   []Header
}

// Arm is a model that a rule sends requests to.
type Arm struct {
	Model   string
	Weight  int64 // beside the others'; 0 gets nothing; where all are 0, they are equal
	Context int64 // tokens that the model can hold; 0: not known, so that it can hold all
}

// Rule is one rule. Names are unique in a table.
type Rule struct {
	Name   string
	Match  Match
	To     []Arm
	Sticky Sticky
}

// Query is what a rule may ask of a request.
type Query struct {
	Model, Surface, Tenant string
	Class                  Class
	Tier                   int
	User                   string // "": nobody is named
	Key                    string // its id
	Draw                   uint64 // decides where nothing else does: the same for what belongs together, such as a conversation, or random
	Input, Output          int64  // tokens
	// Header gives the value of a header, "" where there is none; nil: there are none.
	Header func(name string) string
}

// Choice is what a rule chose.
type Choice struct {
	Model string
	Rule  string
	Why   string // in words, for explain: what the rule asked for and how the model was chosen
}

// Table is a policy's rules. The zero value has none.
type Table struct{ rules []rule }

// rule is a Rule made ready.
type rule struct {
	Rule
	seed uint64 // of its draws
	arms []uint64
	why  []string // of each arm
}

// New makes a table. It keeps rules' slices, which must not change any more. The error names the field and the remedy.
func New(rules []Rule) (*Table, error) {
	if len(rules) > MaxRules {
		return nil, fmt.Errorf("routes: at most %d rules, not %d", MaxRules, len(rules))
	}
	t := &Table{rules: make([]rule, len(rules))}
	seen := make(map[string]bool, len(rules))
	for i := range rules {
		r := rule{Rule: rules[i]}
		if seen[r.Name] {
			return nil, fmt.Errorf("routes[%d].name: %q is taken by another rule; give it its own", i, r.Name)
		}
		seen[r.Name] = true
		if err := r.prepare(); err != nil {
			return nil, fmt.Errorf("routes[%d].%w", i, err)
		}
		t.rules[i] = r
	}
	return t, nil
}

// prepare checks the rule and works out what does not depend on the request.
func (r *rule) prepare() error {
	switch n := len(r.To); {
	case n == 0:
		return fmt.Errorf("to: rule %q names no model; name one", r.Name)
	case n > MaxArms:
		return fmt.Errorf("to: at most %d models, not %d", MaxArms, n)
	}
	for _, n := range [...]int{len(r.Match.Models), len(r.Match.Surfaces), len(r.Match.Tenants), len(r.Match.Headers), len(r.Match.Classes)} {
		if n > MaxList {
			return fmt.Errorf("match: a list of %d; at most %d", n, MaxList)
		}
	}
	var total int64
	models := make(map[string]bool, len(r.To))
	for i, a := range r.To {
		switch {
		case a.Model == "":
			return fmt.Errorf("to[%d].model: missing; name a model", i)
		case models[a.Model]:
			return fmt.Errorf("to[%d].model: %q occurs twice; add the weights up", i, a.Model)
		case a.Weight < 0 || a.Weight > MaxTotal:
			return fmt.Errorf("to[%d].weight: %d is not between 0 and %d", i, a.Weight, int64(MaxTotal))
		}
		models[a.Model] = true
		total += a.Weight
	}
	if total == 0 {
		r.To = slices.Clone(r.To)
		for i := range r.To {
			r.To[i].Weight = 1
		}
		total = int64(len(r.To))
	}
	r.seed = xxhash.Sum64String(r.Name)
	r.arms, r.why = make([]uint64, len(r.To)), make([]string, len(r.To))
	words := r.words()
	for i, a := range r.To {
		r.arms[i] = xxhash.Sum64String(a.Model)
		r.why[i] = words + " → " + a.Model
		if len(r.To) > 1 {
			r.why[i] += fmt.Sprintf(" (weight %d of %d, by %s)", a.Weight, total, r.Sticky)
		}
	}
	return nil
}

// Choose gives the model that answers instead of q.Model, which may be the same; not ok where no rule matches. Its time is linear in the rules,
// and it allocates nothing, unless q.Header does.
func (t *Table) Choose(q *Query) (c Choice, ok bool) {
	if t == nil {
		return Choice{}, false
	}
	for i := range t.rules {
		r := &t.rules[i]
		if !r.matches(q) {
			continue
		}
		if arm := r.draw(q); arm >= 0 {
			return Choice{Model: r.To[arm].Model, Rule: r.Name, Why: r.why[arm]}, true
		}
	}
	return Choice{}, false
}

func (r *rule) matches(q *Query) bool {
	m := &r.Match
	if !listed(m.Models, q.Model) || !listed(m.Surfaces, q.Surface) || !listed(m.Tenants, q.Tenant) || !listed(m.Classes, q.Class) {
		return false
	}
	if m.BelowTier != nil && q.Tier >= *m.BelowTier || !m.Input.holds(q.Input) || !m.Output.holds(q.Output) {
		return false
	}
	for _, h := range m.Headers {
		if q.Header == nil || q.Header(h.Name) != h.Value {
			return false
		}
	}
	return true
}

func listed[T comparable](list []T, v T) bool { return len(list) == 0 || slices.Contains(list, v) }

func (r Range) holds(n int64) bool {
	return (r.Below == nil || n < *r.Below) && (r.Above == nil || n > *r.Above)
}

// fits tells whether the arm can hold the request.
func (a *Arm) fits(q *Query) bool {
	return a.Context == 0 || q.Input <= a.Context && q.Output <= a.Context-q.Input
}

// draw chooses an arm by weighted rendezvous: each has a score that depends on nothing but who asks, itself and its weight.
// -1: none can hold the request.
func (r *rule) draw(q *Query) int {
	who := r.who(q)
	best, at := math.Inf(1), -1
	for i := range r.To {
		a := &r.To[i]
		if a.Weight == 0 || !a.fits(q) {
			continue
		}
		if score := exponential(mix(who^r.arms[i])) / float64(a.Weight); score < best {
			best, at = score, i
		}
	}
	return at
}

// who is the hash of what sticks.
func (r *rule) who(q *Query) uint64 {
	switch {
	case r.Sticky == ByUser && q.User != "":
		return mix(mix(r.seed^xxhash.Sum64String(q.Tenant)) ^ xxhash.Sum64String(q.User))
	case r.Sticky == ByKey:
		return mix(r.seed ^ xxhash.Sum64String(q.Key))
	}
	return mix(r.seed ^ q.Draw)
}

// exponential is what an exponential distribution of mean 1 has at the uniform number h: never 0, never infinite.
func exponential(h uint64) float64 { return -math.Log((float64(h>>11) + 0.5) / (1 << 53)) }

// mix makes of a number another whose every bit depends on every bit of the first.
func mix(x uint64) uint64 {
	hi, lo := bits.Mul64(x^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)
	x = hi ^ lo
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return x ^ x>>32
}

// words say what the rule asks for.
func (r *rule) words() string {
	m := &r.Match
	var all []string
	add := func(what string, list []string) {
		if len(list) > 0 {
			all = append(all, what+" "+strings.Join(list, " or "))
		}
	}
	add("model", m.Models)
	add("surface", m.Surfaces)
	add("tenant", m.Tenants)
	classes := make([]string, len(m.Classes))
	for i, c := range m.Classes {
		classes[i] = c.String()
	}
	add("class", classes)
	if m.BelowTier != nil {
		all = append(all, fmt.Sprintf("tier below %d", *m.BelowTier))
	}
	for _, n := range [...]struct {
		what string
		r    Range
	}{{"input", m.Input}, {"output", m.Output}} {
		if n.r.Above != nil {
			all = append(all, fmt.Sprintf("%s above %d tokens", n.what, *n.r.Above))
		}
		if n.r.Below != nil {
			all = append(all, fmt.Sprintf("%s below %d tokens", n.what, *n.r.Below))
		}
	}
	for _, h := range m.Headers {
		all = append(all, h.Name+": "+h.Value)
	}
	if len(all) == 0 {
		all = []string{"every request"}
	}
	return strings.Join(all, ", ")
}
