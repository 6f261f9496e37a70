package calibrate

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// percent with as many digits as say something.
func percent(v float64) string {
	p := v * 100
	switch {
	case p == 0:
		return "0 %"
	case p < 0.095:
		return strconv.FormatFloat(p, 'f', 2, 64) + " %"
	case p < 99.95 || p >= 100:
		return strings.TrimSuffix(strconv.FormatFloat(p, 'f', 1, 64), ".0") + " %"
	}
	return strconv.FormatFloat(p, 'f', 2, 64) + " %"
}

// tenths is a percentage with one digit behind the point, for columns; what would be none in it has two.
func tenths(v float64) string {
	if v > 0 && v < 0.00095 {
		return percent(v)
	}
	return strconv.FormatFloat(v*100, 'f', 1, 64) + " %"
}

// share of a whole, as a percentage with the counts.
func share(part, whole int) string {
	if whole == 0 {
		return "none"
	}
	return fmt.Sprintf("%s (%s of %s)", percent(float64(part)/float64(whole)), thousands(part), thousands(whole))
}

// thousands sets a number's digits apart by threes.
func thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// plural names a count of things.
func plural(n int, name string) string {
	if n == 1 {
		return "1 " + name
	}
	return thousands(n) + " " + name + "s"
}

// leftOut says what of the records was not used.
func (r *Report) leftOut() string {
	var parts []string
	p := &r.Pairs
	if p.Repeats > 0 {
		parts = append(parts, plural(p.Repeats, "repeat"))
	}
	if p.Identical > 0 {
		parts = append(parts, plural(p.Identical, "pair")+" of twice the same text")
	}
	if p.LeftOut > 0 {
		parts = append(parts, plural(p.LeftOut, "record")+" that cannot be used")
	}
	return strings.Join(parts, ", ")
}

// sentence says how far labels can be trusted.
func (n *Noise) sentence() string {
	switch {
	case !n.Measured && n.AtLeast > 0:
		return fmt.Sprintf("at least %s %s wrong; too few can be held against others (%d) to say what share is", thousands(n.AtLeast), are(n.AtLeast), n.Checks)
	case !n.Measured:
		return fmt.Sprintf("too few can be held against others (%d) to say what share of them is wrong", n.Checks)
	case n.Wrong == 0:
		return fmt.Sprintf("none of %s contradicts another", thousands(n.Checks))
	}
	return fmt.Sprintf("about %s are wrong, by %s: nothing above %s can be certified", percent(n.Wrong), plural(n.Checks, "check"), percent(n.Ceiling))
}

// verdict is the recommendation in a sentence or two.
func (r *Report) verdict() string {
	c := &r.Recommendation
	tested := fmt.Sprintf("on the half that did not choose it, %s, at most %s with %s confidence", wrongOf(&c.Tested), percent(c.Tested.Upper), percent(r.Confidence))
	if c.Tested.Hits == 0 {
		tested = "on the half that did not choose it, nothing is a hit"
	}
	switch c.Outcome {
	case Confirmed:
		return fmt.Sprintf("%s is recommended: %s. It hits %s of the pairs that have one answer.", decimal(c.Threshold), tested, percent(c.Whole.SameHit))
	case Likely:
		return fmt.Sprintf("%s is recommended: %s, which speaks for it and is too little to be sure of %s%s. It hits %s of the pairs that have one answer.",
			decimal(c.Threshold), tested, percent(r.Budget), r.more("; about %s in all would be needed"), percent(c.Whole.SameHit))
	case Doubtful:
		return fmt.Sprintf("none is recommended yet: %s kept the budget of %s on the half that chose it, and not on the other: %s%s.",
			decimal(c.Threshold), percent(r.Budget), tested, r.more("; about %s in all would decide it"))
	}
	if c.Needed > 0 {
		return fmt.Sprintf("none can be recommended: with so few pairs, no threshold is wrong in at most %s of its hits with %s confidence. About %s in all, such as these, would be needed.",
			percent(r.Budget), percent(r.Confidence), plural(c.Needed, "pair"))
	}
	return fmt.Sprintf("none can be recommended: at every threshold more than %s of the hits are wrong. More pairs would not help: another embedder, a larger budget or mode: learned may.", percent(r.Budget))
}

// more says how many pairs would be needed, where it is known.
func (r *Report) more(format string) string {
	if r.Recommendation.Needed == 0 {
		return ""
	}
	return fmt.Sprintf(format, plural(r.Recommendation.Needed, "pair"))
}

// wrongOf says how often a threshold was wrong.
func wrongOf(p *Point) string {
	return fmt.Sprintf("%s of %s %s wrong", thousands(p.Wrong), plural(p.Hits, "hit"), are(p.Wrong))
}

func are(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// What warnings go by: the similarity below which pairs are no near-misses, how many pairs there may be for each text,
// and the threshold below which the policy warns, too.
const (
	farApart     = grain / 2
	sharedTexts  = 3
	lowThreshold = 0.8
)

// warnings say why the figures may be better than the truth.
func (s *sample) warnings(r *Report) (out []string) {
	var different []int32
	for i := range s.pairs {
		if !s.pairs[i].same {
			different = append(different, s.pairs[i].similarity)
		}
	}
	slices.Sort(different)
	if middle := different[len(different)/2]; middle < farApart {
		out = append(out, fmt.Sprintf("Half of the pairs with different answers are less alike than %.2f: they are easily told apart. "+
			"The cache meets each question with its nearest neighbour, which is closer: label such pairs, or what is recommended is too low.", float64(middle)/grain))
	}
	if c := &r.Recommendation; (c.Outcome == Confirmed || c.Outcome == Likely) && c.Threshold < lowThreshold {
		out = append(out, fmt.Sprintf("%s is a low threshold: of what these pairs do not show, much may pass it. Begin in mode: shadow, and look at what would be served.", decimal(c.Threshold)))
	}
	if r.Noise.Wrong >= r.Budget {
		out = append(out, fmt.Sprintf("About %s of the labels are wrong, which is no less than the budget of %s: no threshold can be shown to keep it until they are better.",
			percent(r.Noise.Wrong), percent(r.Budget)))
	}
	if len(s.pairs) > sharedTexts*len(s.texts) {
		out = append(out, fmt.Sprintf("The %s are of only %s: they say less than as many pairs of their own texts would, and the bounds are too narrow.",
			plural(len(s.pairs), "pair"), plural(len(s.texts), "text")))
	}
	return out
}

// wrap sets a text in lines for a terminal.
func wrap(text string) string {
	const width = 100
	var b strings.Builder
	column := 0
	for i, word := range strings.Split(text, " ") {
		n := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case column+1+n > width && word != "%": // a number keeps its sign
			b.WriteByte('\n')
			column = 0
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += n
	}
	b.WriteByte('\n')
	return b.String()
}
