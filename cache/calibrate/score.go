package calibrate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"

	"headgate/cache/embed"
	"headgate/cache/guard"
	"headgate/cache/vec"
)

// How much is done at a time.
const (
	batchPairs = 1024
	batchTexts = 32 // of one call of the embedder
)

// found is what there is to say of a record.
type found struct {
	record
	similarity int32 // in parts of grain
	refused    []guard.Reason
	problem    *Problem // why it was left out
}

// scorer finds similarities and refusals. It is no good for several goroutines.
type scorer struct {
	embedder embed.Embedder
	refuse   func(a, b *text) []guard.Reason
	calls    int // at a time
}

func newScorer(c *Config) *scorer {
	s := &scorer{embedder: c.Embedder, calls: runtime.GOMAXPROCS(0)}
	s.refuse = func(a, b *text) []guard.Reason { return a.parsed.Compare(b.parsed).Refused }
	if c.refuse != nil {
		s.refuse = func(a, b *text) []guard.Reason { return c.refuse(a.of, b.of) }
	}
	return s
}

// text of a batch, and what became of it.
type text struct {
	of     string
	vector []float32
	parsed *guard.Text
	long   *embed.TooLongError
}

// score a batch. Each text is embedded and parsed once.
func (s *scorer) score(ctx context.Context, batch []record) ([]found, error) {
	places := make(map[string]int, 2*len(batch))
	var texts []text
	for i := range batch {
		for _, of := range []string{batch[i].a, batch[i].b} {
			if _, ok := places[of]; !ok {
				places[of] = len(texts)
				texts = append(texts, text{of: of})
			}
		}
	}
	if err := s.embed(ctx, texts); err != nil {
		return nil, err
	}
	all := make([]found, len(batch))
	for i := range batch {
		a, b := &texts[places[batch[i].a]], &texts[places[batch[i].b]]
		all[i] = found{record: batch[i], problem: tooLong(batch[i].line, a.long, b.long)}
		if all[i].problem == nil {
			all[i].similarity = grade(vec.Dot(a.vector, b.vector))
			all[i].refused = s.refuse(a, b)
		}
	}
	return all, nil
}

// grain is how finely similarities are told apart: more finely than thresholds, and less than processors differ in their sums.
const grain = 100_000

func grade(similarity float32) int32 {
	return int32(math.Round(min(max(float64(similarity), -1), 1) * grain))
}

// tooLong says which text does not fit into the embedder's window; nil if both do.
func tooLong(line int, a, b *embed.TooLongError) *Problem {
	for i, e := range []*embed.TooLongError{a, b} {
		switch {
		case e == nil:
		case e.Tokens > 0 && e.Limit > 0:
			return &Problem{line, 0, fmt.Sprintf("%s is too long for the embedder: %d tokens of at most %d", columns()[i], e.Tokens, e.Limit)}
		default:
			return &Problem{line, 0, columns()[i] + " is too long for the embedder"}
		}
	}
	return nil
}

// embed texts, several calls at a time. The first error ends them all.
func (s *scorer) embed(ctx context.Context, texts []text) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	parts := make(chan []text)
	var wg sync.WaitGroup
	for range min(s.calls, (len(texts)+batchTexts-1)/batchTexts) {
		wg.Go(func() {
			for part := range parts {
				if err := s.embedPart(ctx, part); err != nil {
					cancel(err)
				}
			}
		})
	}
	for len(texts) > 0 {
		n := min(batchTexts, len(texts))
		parts <- texts[:n]
		texts = texts[n:]
	}
	close(parts)
	wg.Wait()
	return context.Cause(ctx)
}

// embedPart of the texts. One that is too long is marked, and the others are embedded without it.
func (s *scorer) embedPart(ctx context.Context, part []text) error {
	for i := range part {
		part[i].parsed = guard.Parse(part[i].of)
	}
	for {
		var asked []string
		var at []int
		for i := range part {
			if part[i].long == nil {
				asked, at = append(asked, part[i].of), append(at, i)
			}
		}
		if len(asked) == 0 {
			return nil
		}
		vectors, err := s.embedder.Embed(ctx, asked)
		var long *embed.TooLongError
		switch {
		case errors.As(err, &long) && long.Index >= 0 && long.Index < len(at):
			part[at[long.Index]].long = long // one fewer is asked for: this ends
			continue
		case err != nil:
			return fmt.Errorf("embed %d texts: %w", len(asked), err)
		}
		for i, v := range vectors {
			part[at[i]].vector = v
		}
		return nil
	}
}
