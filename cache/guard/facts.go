package guard

import "slices"

// Bounds of what is read of an answer.
const (
	MaxFacts = 64 << 10 // bytes that ParseFacts reads; what stands beyond is not known

	maxFactTokens = 1 << 14 // words of an answer
	maxFigures    = 2048    // numbers, dates and times of an answer
	maxBlocks     = 64      // of code
	maxSegment    = 48      // content words of a sentence that are compared
	maxPostings   = 8       // sentences that are looked up by one word; a commoner word finds none
	maxSameKey    = 32      // figures of one thing that are held against each other
)

// Facts is what an answer states that another answer may contradict. It is immutable and
// may be shared by any number of goroutines.
type Facts struct {
	text     *Text
	content  []uint32 // of each token what it counts as, 0 for nothing
	units    []value  // of each token, group 0 for none
	segments []segment
	figures  []figure
	blocks   []block
	opening  int8 // of an answer to a yes/no question: opensYes …, 0 for neither

	byWord     map[uint32]postings // sentences by content word
	byKey      map[uint32][]uint16 // figures by what they count, maxSameKey each
	bySkeleton map[uint32]int32    // sentence by its words; -1 where two have the same
	values     map[value]bool      // places in groups that are named anywhere
	said       map[uint32]bool     // segment.stated
}

// postings is the first sentences that hold a word.
type postings struct {
	at [maxPostings]uint16
	n  uint8
}

// ParseFacts reads an answer: plain text or Markdown, best as it was given (line breaks and
// capitals tell sentences, lists and names apart; without them it finds less). It never
// fails, and costs time and memory in proportion to the text, of which it reads MaxFacts.
func ParseFacts(s string) *Facts {
	f := &Facts{}
	if len(s) > MaxFacts {
		s = s[:MaxFacts]
	}
	prose, blocks := fences(s)
	f.blocks = blocks
	t := &Text{}
	sc := scanner{most: maxFactTokens}
	sc.tokens = make([]token, 0, min(len(prose)/5+8, maxFactTokens+8))
	sc.scan(plain(fold(prose)))
	t.tokens = sc.tokens
	x := loaded()
	t.tongue(x)
	t.look(x)
	t.spelled()
	f.text = t
	f.weigh(x)
	f.split(x)
	f.measure(x)
	f.open()
	f.index()
	return f
}

// Contradicts reports whether two answers cannot both be true: what they say of one thing
// differs in a number, a date, a "not", an opposite, a name, or in a block of code. What
// only one of them says is no contradiction. Kind is of the first rule that found one,
// "" without. It is symmetric but for the Kind, and takes time in proportion to the two texts.
func (f *Facts) Contradicts(g *Facts) (Kind, bool) {
	if f.opening*g.opening < 0 && f.opening-g.opening != weakly && g.opening-f.opening != weakly {
		return KindNegation, true
	}
	if f.otherCode(g) {
		return KindCode, true
	}
	for _, rule := range [...]func(f, g *Facts) Kind{(*Facts).otherFigure, (*Facts).otherList, (*Facts).otherSentence} {
		if k := rule(f, g); k != "" {
			return k, true
		}
		if k := rule(g, f); k != "" {
			return k, true
		}
	}
	return "", false
}

// index makes the sentences and figures of an answer findable by their words.
func (f *Facts) index() {
	f.byWord = make(map[uint32]postings, len(f.text.tokens)/4)
	f.bySkeleton = make(map[uint32]int32, len(f.segments))
	f.byKey = make(map[uint32][]uint16, len(f.figures)/2)
	f.values = make(map[value]bool)
	f.said = make(map[uint32]bool, len(f.segments))
	for i := range f.segments {
		s := &f.segments[i]
		for _, id := range s.ids {
			if l := f.byWord[id]; l.n < maxPostings {
				l.at[l.n] = uint16(i)
				l.n++
				f.byWord[id] = l
			}
		}
		if _, twice := f.bySkeleton[s.skeleton]; twice {
			f.bySkeleton[s.skeleton] = -1
		} else {
			f.bySkeleton[s.skeleton] = int32(i)
		}
		f.said[s.stated] = true
		for _, p := range s.poles {
			f.values[p.value] = true
		}
	}
	for i := range f.figures {
		for _, k := range f.figures[i].keys {
			if l := f.byKey[k]; k != 0 && len(l) < maxSameKey {
				f.byKey[k] = append(l, uint16(i))
			}
		}
	}
}

// shared counts what two sorted lists have in common.
func shared(a, b []uint32) int {
	n := 0
	for i, j := 0, 0; i < len(a) && j < len(b); {
		switch {
		case a[i] < b[j]:
			i++
		case a[i] > b[j]:
			j++
		default:
			n, i, j = n+1, i+1, j+1
		}
	}
	return n
}

func sorted(ids []uint32) []uint32 {
	slices.Sort(ids)
	return slices.Compact(ids)
}
