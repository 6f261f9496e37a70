package ladder

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
	Class       Class // this class, and those that are less urgent
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
	Class       Class // this class and those that are less urgent; 0: none
}

// Sheds says whether a request is refused, by cost first, then tier, then class. tokens are its
// input and the most that it may generate.
func (c Cutoff) Sheds(tokens int64, tier int, class Class) Reason {
	switch {
	case c.AboveTokens > 0 && tokens > c.AboveTokens:
		return ByCost
	case tier < c.BelowTier:
		return ByTier
	case c.Class > Interactive && class >= c.Class:
		return ByClass
	}
	return ""
}

// String says it for people: "requests above 32,768 tokens; tiers below 2; class best_effort", or "nothing".
func (c Cutoff) String() string { return "" }
