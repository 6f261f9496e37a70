// Package calibrate finds the similarity from which a surface may answer a question with
// another's answer, from pairs that people labelled: it scores them with an embedder and the
// guards, says how often each threshold would be wrong, and recommends one for a stated budget.
//
// See DESIGN.md for what the figures mean and what they leave out.
package calibrate

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"strings"

	"headgate/cache/embed"
	"headgate/cache/guard"
)

// Config of a calibration.
type Config struct {
	Embedder   embed.Embedder
	Name       string  // of the embedder in the policy; "" is builtin
	Source     string  // of the pairs, for the report
	Budget     float64 // of wrong hits among hits, in (0, 0.5]
	Confidence float64 // that the budget is kept, in [0.5, 1)

	// Progress, if set, is told how many records have been read, now and then, by the
	// goroutine that called Run.
	Progress func(records int)

	refuse func(a, b string) []guard.Reason // a test's guards, in place of the real ones
}

// Validate names what is out of bounds.
func (c *Config) Validate() error {
	switch {
	case c.Embedder == nil:
		return errors.New("embedder is missing")
	case !(c.Budget > 0 && c.Budget <= 0.5):
		return fmt.Errorf("budget is %v: it is the share of hits that may be wrong, above 0 and at most 0.5, such as 0.02", c.Budget)
	case !(c.Confidence >= 0.5 && c.Confidence < 1):
		return fmt.Errorf("confidence is %v: it is from 0.5 to below 1, such as 0.95", c.Confidence)
	}
	return nil
}

// maxProblems and maxExamples bound what of the records is shown.
const (
	maxProblems = 20
	maxExamples = 15
)

// Run reads pairs, as CSV with a header that names the columns a, b and same_answer, scores them
// and reports. Records that are no good are left out and counted. The same pairs and embedder give
// the same report. What it holds in memory is some 400 bytes a pair, whatever the texts' lengths.
//
// The error is of the configuration, a *FileError, of the reader, of the embedder or of ctx.
func Run(ctx context.Context, in io.Reader, c Config) (*Report, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	src, err := newSource(in)
	if err != nil {
		return nil, err
	}
	s := newSample()
	if err := s.fill(ctx, src, newScorer(&c), c.Progress); err != nil {
		return nil, err
	}
	if err := s.enough(); err != nil {
		return nil, err
	}
	return s.report(&c), nil
}

// fill a sample with all that the source has.
func (s *sample) fill(ctx context.Context, src *source, by *scorer, progress func(int)) error {
	batch := make([]record, 0, batchPairs)
	flush := func() error {
		found, err := by.score(ctx, batch)
		if err != nil {
			return err
		}
		for i := range found {
			s.add(&found[i])
		}
		batch = batch[:0]
		if progress != nil {
			progress(src.records)
		}
		return nil
	}
	for {
		r, problem, err := src.pair()
		switch {
		case errors.Is(err, io.EOF):
			return flush()
		case err != nil:
			return err
		case problem != nil:
			s.leaveOut(*problem)
			continue
		case r.a == r.b:
			s.identical(&r)
			continue
		}
		if batch = append(batch, r); len(batch) == batchPairs {
			if err := flush(); err != nil {
				return err
			}
		}
	}
}

// pair is one that counts.
type pair struct {
	a, b         uint32 // texts, by the order in which they came; a < b
	line         uint32 // of its first record
	again        uint32 // the line of the first record that labels it otherwise; 0 without
	ones, zeros  uint32 // records that label it the same, different
	kinds        uint32 // of refusals, by their place in guard.Kinds
	similarity   int32  // in parts of grain
	same, tested bool   // tested: it is of the half that does not choose the threshold
}

// sample is what was read, without the texts but for some examples.
type sample struct {
	texts    map[[16]byte]uint32 // by hash
	places   map[uint64]int      // in pairs, by the texts
	pairs    []pair
	records  int // that count, with repeats
	left     int
	problems []Problem
	equal    int // records of twice one text
	unequal  []Problem
	examples [lists]worst
}

func newSample() *sample {
	s := &sample{texts: make(map[[16]byte]uint32), places: make(map[uint64]int)}
	for l := range s.examples {
		s.examples[l].lowest = list(l) == listMissed
	}
	return s
}

func (s *sample) leaveOut(p Problem) {
	if s.left++; len(s.problems) < maxProblems {
		s.problems = append(s.problems, p)
	}
}

// identical texts are the exact cache's: they say nothing of similarity. Labelled different they are an error.
func (s *sample) identical(r *record) {
	s.equal++
	if !r.same && len(s.unequal) < maxProblems {
		s.unequal = append(s.unequal, Problem{Line: r.line, Reason: "the two texts are the same, yet labelled different"})
	}
}

// text is the number of a text, and a bit by chance.
func (s *sample) text(of string) (uint32, byte) {
	sum := sha256.Sum256([]byte(of))
	key := [16]byte(sum[:])
	id, ok := s.texts[key]
	if !ok {
		id = uint32(len(s.texts))
		s.texts[key] = id
	}
	return id, sum[31] & 1
}

// add one. A pair that came before, in either order, counts once: said twice it is no more certain. Labelled both
// ways it counts as different, which is the side on which an error does no harm.
func (s *sample) add(f *found) {
	if f.problem != nil {
		s.leaveOut(*f.problem)
		return
	}
	s.records++
	a, bitA := s.text(f.a)
	b, bitB := s.text(f.b)
	key := uint64(min(a, b))<<32 | uint64(max(a, b))
	at, seen := s.places[key]
	if !seen {
		at = len(s.pairs)
		s.places[key] = at
		s.pairs = append(s.pairs, pair{
			a: min(a, b), b: max(a, b), line: uint32(f.line), kinds: kindsOf(f.refused),
			similarity: f.similarity, same: f.same, tested: bitA^bitB == 1,
		})
	}
	p := &s.pairs[at]
	if f.same {
		p.ones++
	} else {
		p.zeros++
	}
	switch {
	case !seen:
		s.examples[listOf(p)].offer(f, f.line)
	case p.again == 0 && p.ones > 0 && p.zeros > 0:
		p.again = uint32(f.line)
		if p.same {
			s.examples[listOf(p)].drop(int(p.line))
			p.same = false
			s.examples[listOf(p)].offer(f, int(p.line))
		}
	}
}

// enough says what is missing to learn anything, as a *FileError.
func (s *sample) enough() error {
	same := 0
	for i := range s.pairs {
		same += one(s.pairs[i].same)
	}
	var why string
	switch {
	case len(s.pairs) == 0 && len(s.problems) > 0:
		why = fmt.Sprintf("no pair is left of %d", s.left+s.equal)
	case len(s.pairs) == 0 && s.equal > 0:
		why = fmt.Sprintf("each of the %s is twice the same text: pair texts that differ", plural(s.equal, "pair"))
	case len(s.pairs) == 0:
		why = "the file has a header and no pairs"
	case same == 0:
		why = fmt.Sprintf("none of %s is labelled the same: add pairs that have one answer (same_answer 1), or every threshold is as good as none", plural(len(s.pairs), "pair"))
	case same == len(s.pairs):
		why = fmt.Sprintf("none of %s is labelled different: add pairs that look alike and need different answers (same_answer 0), or no threshold can be found wrong", plural(len(s.pairs), "pair"))
	default:
		return nil
	}
	return &FileError{Reason: why + s.unusable()}
}

// unusable names the records that cannot be used, some of them with their lines: what is missing may be there.
func (s *sample) unusable() string {
	if s.left == 0 {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "; left out, as they cannot be used: %s", plural(s.left, "record"))
	for _, p := range s.problems[:min(len(s.problems), fewProblems)] {
		fmt.Fprintf(&b, "; line %d: %s", p.Line, p.Reason)
	}
	if more := s.left - fewProblems; more > 0 {
		fmt.Fprintf(&b, "; and %s more", thousands(more))
	}
	return b.String()
}

// otherKind is the bit of a refusal that guard.Kinds does not name.
const otherKind = 31

// kindsOf packs the kinds of refusals.
func kindsOf(refused []guard.Reason) (set uint32) {
	kinds := guard.Kinds()
	for _, r := range refused {
		at := slices.Index(kinds, r.Kind)
		if at < 0 || at > otherKind {
			at = otherKind
		}
		set |= 1 << at
	}
	return set
}

// kindNames unpacks them.
func kindNames(set uint32) (names []string) {
	kinds := guard.Kinds()
	for ; set != 0; set &= set - 1 {
		at := bits.TrailingZeros32(set)
		if at < len(kinds) {
			names = append(names, string(kinds[at]))
		} else {
			names = append(names, "other")
		}
	}
	return names
}
