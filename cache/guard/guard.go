// Package guard is the token gate in front of a semantic hit: it refuses a pair of
// questions whose words say that they may want different answers, however alike an
// embedder finds them. It knows no similarity, does no I/O, reads no clock, and fails
// closed: what it cannot read it refuses.
//
// See DESIGN.md for the rules, what they cost and what they leave to the threshold.
package guard

// Kind names the rule that refused a pair. The values are stable: they are written to
// logs and are labels of metrics, so there are few of them and none is ever renamed.
type Kind string

// The kinds of refusal.
const (
	KindNumber     Kind = "number"     // a number, version, amount or ordinal differs
	KindUnit       Kind = "unit"       // a unit or a currency differs, or units swapped places
	KindDate       Kind = "date"       // a day, month, season, feast, time or frequency differs
	KindNegation   Kind = "negation"   // one is negated and the other is not, or elsewhere
	KindAntonym    Kind = "antonym"    // a word faces its opposite, or a restricting one faces nothing
	KindEntity     Kind = "entity"     // a name, identifier, address, path or place differs
	KindQuote      Kind = "quote"      // quoted text differs
	KindCode       Kind = "code"       // code or an operator differs
	KindOrder      Kind = "order"      // the same words in other roles
	KindQuantifier Kind = "quantifier" // all/some/only, more/less, at least/at most
	KindPerson     Kind = "person"     // whose it is, or who does it to whom
	KindModality   Kind = "modality"   // may/must/should/will/did
	KindWh         Kind = "wh_word"    // asks for another kind of answer
	KindSubstitute Kind = "substitute" // otherwise equal, and one word stands for another
	KindModifier   Kind = "modifier"   // otherwise equal, and one has a word more that narrows it
	KindSentence   Kind = "sentence"   // one has a sentence or clause to which nothing answers
	KindCondition  Kind = "condition"  // one names a case (if, because, as a …) that the other does not
	KindFrame      Kind = "frame"      // a long text in common, and what is left differs
	KindLanguage   Kind = "language"   // two languages, or one that the gate cannot read
	KindScript     Kind = "script"     // a script that the gate cannot read, or mixed within a word
	KindLength     Kind = "length"     // longer than MaxBytes or MaxTokens
)

// Kinds returns every kind, for those who pre-register metrics.
func Kinds() []Kind {
	return []Kind{
		KindNumber, KindUnit, KindDate, KindNegation, KindAntonym, KindEntity, KindQuote,
		KindCode, KindOrder, KindQuantifier, KindPerson, KindModality, KindWh,
		KindSubstitute, KindModifier, KindSentence, KindCondition, KindFrame, KindLanguage, KindScript, KindLength,
	}
}

// Bounds of a text; a longer one is refused beside every other, an equal one included.
const (
	MaxBytes  = 8 << 10
	MaxTokens = 120 // an embedding of more says little of what any one word of it does
)

// maxReason is the most bytes of a text that a Reason quotes.
const maxReason = 48

// Reason says why a pair was refused: the words of either side that disagree, clipped to
// 48 bytes; "" where a side has no such word. They are content: a log line may name the
// Kind, never A and B.
type Reason struct {
	Kind Kind
	A, B string
}

// Verdict is what Compare found; the zero value allows.
type Verdict struct {
	Refused []Reason
}

// Allowed reports whether no rule refused the pair.
func (v Verdict) Allowed() bool { return len(v.Refused) == 0 }
