package calibrate

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Report is what a calibration found. Its JSON is for programs, WritePage and WriteOverlap for people.
type Report struct {
	Source     string  `json:"source"`
	Embedder   string  `json:"embedder"` // its version: the threshold holds for no other
	Budget     float64 `json:"budget"`
	Confidence float64 `json:"confidence"`
	Pairs      Pairs   `json:"pairs"`
	AUC        Guarded `json:"auc"`
	Guards     Effect  `json:"guards"`
	Noise      Noise   `json:"label_noise"`

	Recommendation Recommendation `json:"recommendation"`
	Unguarded      Recommendation `json:"without_guards"` // what would be recommended if there were no guards
	Mixes          []Mix          `json:"other_mixes,omitempty"`
	Policy         string         `json:"policy"` // the surface's block
	Warnings       []string       `json:"warnings,omitempty"`

	Curve []Point `json:"curve"` // with guards, of the half that chose; in hundredths
	Worst Worst   `json:"worst"`

	chosen, plain []Point // the same in thousandths, with guards and without
	rocOff, rocOn []rate
	histogram     histogram
}

// Pairs says what there was to go by.
type Pairs struct {
	Read      int       `json:"read"`      // records
	Used      int       `json:"used"`      // pairs of two texts
	Same      int       `json:"same"`      // of those used
	Different int       `json:"different"` // of those used
	Texts     int       `json:"texts"`     // distinct ones
	Repeats   int       `json:"repeats"`   // records of pairs that came before
	Identical int       `json:"identical"` // records of twice one text, which the exact cache answers
	LeftOut   int       `json:"left_out"`  // records that are no good
	Chosen    int       `json:"chosen_on"` // pairs of the half that chooses
	Tested    int       `json:"tested_on"` // and of the other
	Problems  []Problem `json:"problems,omitempty"`
}

// Guarded is a figure without the guards and with them.
type Guarded struct {
	Off float64 `json:"off"`
	On  float64 `json:"on"`
}

// Effect is what the guards did.
type Effect struct {
	RefusedSame      int          `json:"refused_same"`
	RefusedDifferent int          `json:"refused_different"`
	Kinds            []KindEffect `json:"kinds,omitempty"`
}

// KindEffect is what one rule did. A pair that several rules refuse counts for each.
type KindEffect struct {
	Kind      string `json:"kind"`
	Same      int    `json:"same"`
	Different int    `json:"different"`
	OnlySame  int    `json:"only_same"` // refused by no other rule
	OnlyDiff  int    `json:"only_different"`
}

// Worst are examples.
type Worst struct {
	Served  []Example `json:"served,omitempty"`  // different, not refused, the most alike first
	Stopped []Example `json:"stopped,omitempty"` // different, refused
	Price   []Example `json:"price,omitempty"`   // the same, refused
	Missed  []Example `json:"missed,omitempty"`  // the same, not refused, the least alike first
}

// report works everything out.
func (s *sample) report(c *Config) *Report {
	r := &Report{
		Source: c.Source, Embedder: c.Embedder.Version(), Budget: c.Budget, Confidence: c.Confidence,
		Pairs:  Pairs{Used: len(s.pairs), Texts: len(s.texts), Identical: s.equal, LeftOut: s.left, Repeats: s.records - len(s.pairs), Problems: slices.SortedFunc(slices.Values(append(s.problems, s.unequal...)), func(a, b Problem) int { return a.Line - b.Line })},
		Guards: s.effect(), Noise: s.noise(),
		Worst: Worst{
			Served: s.examples[listServed].shown(), Stopped: s.examples[listStopped].shown(),
			Price: s.examples[listPrice].shown(), Missed: s.examples[listMissed].shown(),
		},
	}
	r.Pairs.Read = s.records + s.equal + s.left
	all := func(*pair) bool { return true }
	chosen := func(p *pair) bool { return !p.tested }
	tested := func(p *pair) bool { return p.tested }
	whole, on, off := count(s.pairs, true, all), count(s.pairs, true, chosen), count(s.pairs, false, chosen)
	r.Pairs.Same, r.Pairs.Different = whole.same, whole.different
	r.Pairs.Chosen = on.same + on.different
	r.Pairs.Tested = r.Pairs.Used - r.Pairs.Chosen
	r.Recommendation = recommend(on, count(s.pairs, true, tested), whole, c.Budget, c.Confidence)
	plain := count(s.pairs, false, all)
	r.Unguarded = recommend(off, count(s.pairs, false, tested), plain, c.Budget, c.Confidence)
	r.rocOff, r.AUC.Off = plain.roc()
	r.rocOn, r.AUC.On = whole.roc()
	r.chosen, r.plain = on.curve(c.Confidence), off.curve(c.Confidence)
	for i, p := range r.chosen {
		if (i+leastThreshold)%10 == 0 {
			r.Curve = append(r.Curve, p)
		}
	}
	if r.Recommendation.Outcome != None {
		r.Mixes = mixes(r.Recommendation.Whole)
	}
	r.Policy = r.snippet(c.Name)
	r.histogram = s.histogram()
	r.Warnings = s.warnings(r)
	return r
}

// effect of the guards, by kind.
func (s *sample) effect() (e Effect) {
	var kinds [otherKind + 1]KindEffect
	for i := range s.pairs {
		p := &s.pairs[i]
		if p.kinds == 0 {
			continue
		}
		only := p.kinds&(p.kinds-1) == 0
		if p.same {
			e.RefusedSame++
		} else {
			e.RefusedDifferent++
		}
		for k := range kinds {
			switch {
			case p.kinds>>k&1 == 0:
			case p.same:
				kinds[k].Same++
				kinds[k].OnlySame += one(only)
			default:
				kinds[k].Different++
				kinds[k].OnlyDiff += one(only)
			}
		}
	}
	for k, found := range kinds {
		if found.Same+found.Different > 0 {
			found.Kind = kindNames(1 << k)[0]
			e.Kinds = append(e.Kinds, found)
		}
	}
	return e
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// plainName is what a name can be made of that needs no quotes.
const plainName = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/"

// snippet is the block for the policy. Where no threshold is sure enough it looks and serves nothing.
func (r *Report) snippet(embedder string) string {
	switch {
	case embedder == "":
		embedder = "builtin"
	case strings.Trim(embedder, plainName) != "" || strings.Trim(embedder[:1], ".-/") == "": // not plain in YAML
		embedder = strconv.Quote(embedder)
	}
	var b strings.Builder
	b.WriteString("surfaces:\n  - name: YOUR-SURFACE\n    share: tenant # where an answer is the same for all users; without it there are few hits\n    exact: {}\n    semantic:\n")
	switch r.Recommendation.Outcome {
	case Confirmed, Likely:
		fmt.Fprintf(&b, "      mode: static\n      threshold: %s\n", decimal(r.Recommendation.Threshold))
	default:
		b.WriteString("      mode: shadow\n")
	}
	fmt.Fprintf(&b, "      hit_error_bound: %s\n      embedder: %s\n", decimal(r.Budget), embedder)
	return b.String()
}

// decimal as the policy reads it, which has six places. Zero has no sign.
func decimal(v float64) string {
	return strconv.FormatFloat(math.Round(v*1e6)/1e6+0, 'f', -1, 64)
}

// histogram is how alike pairs are, in bins.
type histogram struct {
	from float64 // where the first bin begins
	bins []bin
}

type bin struct{ same, different, refusedSame, refusedDifferent int }

// bins of a histogram, for each unit of similarity.
const binsPerUnit = 50

// histogram of all pairs, from the tenth in which the least alike are.
func (s *sample) histogram() histogram {
	lowest := int32(grain / 2)
	for i := range s.pairs {
		lowest = min(lowest, s.pairs[i].similarity)
	}
	from := int(math.Floor(float64(lowest)/(grain/10))) * (grain / 10)
	h := histogram{from: float64(from) / grain, bins: make([]bin, (grain-from)*binsPerUnit/grain)}
	for i := range s.pairs {
		p := &s.pairs[i]
		b := &h.bins[min((int(p.similarity)-from)*binsPerUnit/grain, len(h.bins)-1)]
		switch {
		case p.same:
			b.same++
			b.refusedSame += one(p.kinds != 0)
		default:
			b.different++
			b.refusedDifferent += one(p.kinds != 0)
		}
	}
	return h
}

// WriteText is the report's gist for a terminal.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	p := &r.Pairs
	fact := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-15s%s\n", name, fmt.Sprintf(format, args...))
	}
	fact("pairs", "%s used of %s: %s the same, %s different", thousands(p.Used), plural(p.Read, "record"), thousands(p.Same), thousands(p.Different))
	if left := r.leftOut(); left != "" {
		fact("not used", "%s", left)
	}
	for i, x := range p.Problems {
		if i == fewProblems {
			fact("", "…")
			break
		}
		fact("", "line %d: %s", x.Line, x.Reason)
	}
	fact("embedder", "%s", r.Embedder)
	fact("guards refuse", "%s of the different, %s of the same", share(r.Guards.RefusedDifferent, p.Different), share(r.Guards.RefusedSame, p.Same))
	fact("AUC", "%.3f without guards, %.3f with", r.AUC.Off, r.AUC.On)
	fact("labels", "%s", r.Noise.sentence())
	for _, text := range r.Warnings {
		b.WriteString("\n" + wrap("Mind: "+text))
	}
	b.WriteString("\n" + wrap("As a threshold, "+r.verdict()) + "\n" + r.Policy)
	_, err := io.WriteString(w, b.String())
	return err
}

// fewProblems are those that a terminal shows.
const fewProblems = 5
