package ledger

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// RungNames are the rungs of the ladder, the one that hurts least first: the order in which they go on.
var RungNames = []string{"shed_best_effort", "stale_cache", "smaller_model", "drop_optional", "cut_max_tokens", "shed_cost", "static_answer"}

const (
	// defaultRungFor is how long the pressure lasts before a rung goes on, where a policy says nothing.
	defaultRungFor            = 5 * time.Second
	leastRungFor, mostRungFor = 100 * time.Millisecond, time.Hour

	maxStaticText = 8 << 10 // bytes
	maxURL        = 2 << 10
)

// LadderRung is a rung of the ladder as written; see Index.Ladder for what it becomes.
type LadderRung struct {
	Rung string `yaml:"rung"` // of RungNames
	// At is from which pressure on it goes on by itself; absent: only by hand.
	At    *Factor   `yaml:"at,omitempty"`
	OffAt *Factor   `yaml:"off_at,omitempty"` // below which it goes off; absent: 0.2 less than At, or half of it where that is more
	For   *Duration `yaml:"for,omitempty"`    // how long at At or more before it goes on; absent: 5s
	// AboveTokens is of shed_cost: the input and output above which requests are shed. Like the next three it may be
	// left out, for what the ladder has where nothing is said.
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
	AboveTokens int64         // of shed_cost; 0: it says nothing
	MaxTokens   int64         // of cut_max_tokens; 0: it says nothing
	Text        string        // of static_answer: one of the two is set at most
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

// misnamed says what to write instead of a name that others use.
func (*LadderRung) misnamed(name string) string {
	switch n := plain(name); {
	case n == "name", n == "step", n == "action":
		return "write rung: one of " + strings.Join(RungNames, ", ")
	case n == "pressure", n == "threshold", n == "onat", n == "above":
		return "write at: 0.8 for the pressure from which it goes on"
	case n == "hysteresis", n == "until", n == "below", n == "off":
		return "write off_at: 0.6 for the pressure below which it goes off"
	case n == "url", strings.Contains(n, "redirect"):
		return "write fallback_url"
	case n == "answer", n == "message", n == "body":
		return "write text"
	case n == "duration", n == "after", n == "delay":
		return "write for: 5s for how long the pressure lasts before it goes on"
	}
	return ""
}

// mistaken says what to write instead of a value that is no pressure.
func (*LadderRung) mistaken(field, value string) string {
	if field != "at" && field != "off_at" {
		return ""
	}
	return aPressure().mistaken(value)
}

// words is the rung as one would say it.
func (l *LadderRung) words() string {
	var b strings.Builder
	if l.At == nil {
		b.WriteString("by hand")
	} else {
		d := valueOr(l.For, Duration(defaultRungFor))
		fmt.Fprintf(&b, "by itself from pressure %s for %s until below %s for %s", *l.At, d, l.offAt(), 2*d)
	}
	switch {
	case l.AboveTokens != 0:
		fmt.Fprintf(&b, ", above %d tokens", l.AboveTokens)
	case l.MaxTokens != 0:
		fmt.Fprintf(&b, ", %d tokens at most", l.MaxTokens)
	case l.Text != "":
		fmt.Fprintf(&b, ", %q", clip(l.Text))
	case l.FallbackURL != "":
		b.WriteString(", to " + l.FallbackURL)
	}
	if len(l.Models) > 0 {
		b.WriteString(", for " + strings.Join(l.Models, ", "))
	}
	return b.String()
}

// ladderByPath are the rungs, by the path that differences call them by.
func (p *Policy) ladderByPath() map[string]*LadderRung {
	out := map[string]*LadderRung{}
	for i := range p.Ladder {
		out["ladder["+p.Ladder[i].Rung+"]"] = &p.Ladder[i]
	}
	return out
}

// ladder checks all rungs. models are all names and aliases.
func (c *checker) ladder(root place, models map[string]bool) {
	seen, highest := map[string]bool{}, -1
	for i := range c.p.Ladder {
		l := &c.p.Ladder[i]
		at := root.item("ladder", i, l.Rung)
		c.oneOf(at.field("rung"), l.Rung, RungNames, false)
		if seen[l.Rung] {
			c.add(at.field("rung"), "the rung %q is here twice; a rung has one entry, with all its models", clip(l.Rung))
		}
		seen[l.Rung] = true
		if n := slices.Index(RungNames, l.Rung); n >= 0 && n < highest {
			c.add(at.field("rung"), "%s comes before %s: rungs stand in the order in which they go on, %s", l.Rung, RungNames[highest], strings.Join(RungNames, ", "))
		} else {
			highest = max(highest, n)
		}
		c.trigger(at, i)
		c.effect(at, l)
		c.named(at.field("models"), l.Models, "model", models)
	}
}

// named checks a list of names that may be left out.
func (c *checker) named(at place, names []string, kind string, known map[string]bool) {
	if names != nil && len(names) == 0 {
		c.add(at, "an empty list would be for none, and an absent one is for all; leave it out, or name a %s", kind)
	}
	if len(names) > maxScope {
		c.add(at, "%d names are more than %d", len(names), maxScope)
		return
	}
	for i, n := range names {
		c.ref(at.nth(i, ""), kind, n, known)
	}
}

// trigger checks when the i-th rung goes on and off.
func (c *checker) trigger(at place, i int) {
	l := &c.p.Ladder[i]
	c.pressure(at, l.At, "")
	if l.For != nil && (time.Duration(*l.For) < leastRungFor || time.Duration(*l.For) > mostRungFor) {
		c.add(at.field("for"), "%s is not between %s and %s: it is how long the pressure lasts before the rung goes on", *l.For, leastRungFor, mostRungFor)
	}
	if l.At == nil {
		for _, f := range [...]struct {
			name string
			is   bool
		}{{"off_at", l.OffAt != nil}, {"for", l.For != nil}} {
			if f.is {
				c.add(at.field(f.name), "without at the rung goes on by hand only, and %s does nothing; write at: 0.8, or remove it", f.name)
			}
		}
		return
	}
	if l.OffAt != nil && (*l.OffAt == 0 || *l.OffAt >= *l.At) {
		c.add(at.field("off_at"), "%s is not above 0 and below at, which is %s: at 0 it would stay on for good, and at at it would flap", *l.OffAt, *l.At)
	}
	for j := i - 1; j >= 0; j-- {
		b := &c.p.Ladder[j]
		if b.At == nil || !c.together(l, b) {
			continue
		}
		if *b.At > *l.At {
			c.add(at.field("at"), "%s is below that of %s, %s, and a rung goes on only while those before it are; write %s or more", *l.At, clip(b.Rung), *b.At, *b.At)
		}
		return
	}
}

// together says whether two rungs are for one model.
func (c *checker) together(a, b *LadderRung) bool {
	return len(a.Models) == 0 || len(b.Models) == 0 || slices.ContainsFunc(a.Models, func(n string) bool {
		return slices.ContainsFunc(b.Models, func(o string) bool { return n == o || c.models[n] != nil && c.models[n] == c.models[o] })
	})
}

// effect checks what a rung does.
func (c *checker) effect(at place, l *LadderRung) {
	for _, f := range [...]struct {
		name, of string
		is       bool
	}{
		{"above_tokens", "shed_cost", l.AboveTokens != 0},
		{"max_tokens", "cut_max_tokens", l.MaxTokens != 0},
		{"text", "static_answer", l.Text != ""},
		{"fallback_url", "static_answer", l.FallbackURL != ""},
	} {
		if f.is && l.Rung != f.of {
			c.add(at.field(f.name), "%s is of the rung %s; remove it, or write rung: %s", f.name, f.of, f.of)
		}
	}
	for _, f := range [...]struct {
		name string
		n    int64
	}{{"above_tokens", l.AboveTokens}, {"max_tokens", l.MaxTokens}} {
		if f.n < 0 || f.n > mostTokens {
			c.add(at.field(f.name), "%d is not between 1 and %d tokens", f.n, mostTokens)
		}
	}
	if len(l.Text) > maxStaticText || !utf8.ValidString(l.Text) {
		c.add(at.field("text"), "a text is at most %d bytes of UTF-8", maxStaticText)
	}
	if l.FallbackURL == "" {
		return
	}
	if l.Text != "" {
		c.add(at.field("fallback_url"), "a static answer is text or fallback_url; remove one of them")
	}
	switch u, err := url.Parse(l.FallbackURL); {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || len(l.FallbackURL) > maxURL:
		c.add(at.field("fallback_url"), "%q is not an http:// or https:// URL of at most %d bytes", clip(l.FallbackURL), maxURL)
	case u.User != nil:
		c.add(at.field("fallback_url"), "clients are sent there, and would see its user and password: remove them")
	}
}
