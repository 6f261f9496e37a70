package ladder

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Class is how urgent a request is, with the numbers of the queue's classes.
type Class uint8

// The classes, most urgent first.
const (
	Interactive Class = iota
	Background
	BestEffort
)

// String gives the policy's spelling.
func (c Class) String() string {
	return [...]string{"interactive", "background", "best_effort"}[min(c, BestEffort)]
}

// Shed is one entry of the policy's list: from the pressure At on, what it names is refused. One
// of the three is set.
type Shed struct {
	At          float64
	AboveTokens int64 // requests of more tokens, in and out
	BelowTier   int   // callers of a lower tier
	Class       Class // this class and those that are less urgent, never Interactive
}

// An entry goes on at once, so that nobody waits behind what is going to be refused. It goes off
// when the pressure has been shedGap below At, or at half of it where that is more, for shedHold,
// and one entry after the other: what was refused does not come back all at once.
const (
	shedGap  = .1
	shedHold = 2 * time.Second
)

func (s *Shed) offAt() float64 { return max(s.At-shedGap, s.At/2) }

// String says it for people: "from pressure 0.75: requests above 32,768 tokens".
func (s Shed) String() string {
	c := Cutoff{AboveTokens: s.AboveTokens, BelowTier: s.BelowTier, Class: s.Class}
	return "from pressure " + number(s.At) + ": " + c.String()
}

// Reason says by what a request was shed, as X-Headgate-Dropped spells it; "" where it was not.
type Reason string

// The reasons.
const (
	ByCost  Reason = "shed_cost"
	ByTier  Reason = "shed_tier"
	ByClass Reason = "shed_class"
)

// Cutoff is what is refused at present. The zero value refuses nothing.
type Cutoff struct {
	AboveTokens int64 // requests of more tokens, in and out; 0: none
	BelowTier   int   // callers of a lower tier; 0: none
	Class       Class // this class and those that are less urgent; Interactive: none
}

// Sheds says whether a request is refused, by cost first, then tier, then class. tokens are its
// input and the most that it may generate.
func (c Cutoff) Sheds(tokens int64, tier int, class Class) Reason {
	switch {
	case c.AboveTokens > 0 && tokens > c.AboveTokens:
		return ByCost
	case c.BelowTier > 0 && tier < c.BelowTier:
		return ByTier
	case c.Class > Interactive && class >= c.Class:
		return ByClass
	}
	return ""
}

// and is what either refuses.
func (c Cutoff) and(o Cutoff) Cutoff {
	if c.AboveTokens == 0 || o.AboveTokens > 0 && o.AboveTokens < c.AboveTokens {
		c.AboveTokens = o.AboveTokens
	}
	if c.Class == Interactive || o.Class > Interactive && o.Class < c.Class {
		c.Class = o.Class
	}
	c.BelowTier = max(c.BelowTier, o.BelowTier)
	return c
}

// String says it for people: "requests above 32,768 tokens; tiers below 2; class best_effort", or
// "nothing".
func (c Cutoff) String() string {
	var parts []string
	if c.AboveTokens > 0 {
		parts = append(parts, "requests above "+grouped(c.AboveTokens)+" tokens")
	}
	if c.BelowTier > 0 {
		parts = append(parts, fmt.Sprintf("tiers below %d", c.BelowTier))
	}
	switch c.Class {
	case Interactive:
	case Background:
		parts = append(parts, "classes background and best_effort")
	default:
		parts = append(parts, "class best_effort")
	}
	if parts == nil {
		return "nothing"
	}
	return strings.Join(parts, "; ")
}

// grouped writes a whole number of 0 or more for people: 32,768.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// number writes a pressure for people, in hundredths.
func number(f float64) string {
	if math.IsNaN(f) {
		return "unknown"
	}
	return strconv.FormatFloat(math.Round(f*100)/100, 'f', -1, 64)
}

// shedder decides which entries of the policy's list are on for one model: always the first few. It
// is a pure core, for one goroutine at a time. The zero value has none.
type shedder struct {
	sheds   []Shed // by At
	level   int
	sinking tally
}

// set takes the entries by At, ascending. As many stay on as were, where they say the same.
func (s *shedder) set(sheds []Shed) {
	kept := 0
	for kept < min(s.level, len(sheds)) && s.sheds[kept] == sheds[kept] {
		kept++
	}
	s.sheds, s.level, s.sinking = sheds, kept, 0
}

func (s *shedder) step(p span) {
	if s.level > 0 && !math.IsNaN(p.was) {
		s.sinking.add(p.d, p.was < s.sheds[s.level-1].offAt(), shedHold)
	}
	if s.level > 0 && p.is < s.sheds[s.level-1].offAt() && time.Duration(s.sinking) >= shedHold {
		s.level, s.sinking = s.level-1, 0
	}
	for s.level < len(s.sheds) && p.is >= s.sheds[s.level].At {
		s.level, s.sinking = s.level+1, 0
	}
}

func (s *shedder) cutoff() (c Cutoff) {
	for _, e := range s.sheds[:s.level] {
		c = c.and(Cutoff{e.AboveTokens, e.BelowTier, e.Class})
	}
	return c
}
