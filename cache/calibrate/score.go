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
	mostCalls  = 16 // under way
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
	s := &scorer{embedder: c.Embedder, calls: min(runtime.GOMAXPROCS(0), mostCalls)}
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
	unfit  error // why it has no vector: a *embed.TooLongError or a *embed.Error
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
		all[i] = found{record: batch[i], problem: noVector(batch[i].line, a.unfit, b.unfit)}
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

// noVector says of which text the embedder made none; nil if it made both.
func noVector(line int, a, b error) *Problem {
	for i, err := range []error{a, b} {
		if err == nil {
			continue
		}
		name := columns()[i]
		long, ok := errors.AsType[*embed.TooLongError](err)
		switch {
		case !ok:
			return &Problem{line, 0, fmt.Sprintf("%s was refused by the embedder: %v", name, err)}
		case long.Tokens > 0 && long.Limit > 0:
			return &Problem{line, 0, fmt.Sprintf("%s is too long for the embedder: %d tokens of at most %d", name, long.Tokens, long.Limit)}
		}
		return &Problem{line, 0, name + " is too long for the embedder"}
	}
	return nil
}

// embed texts, several calls at a time. The first error ends them all.
func (s *scorer) embed(ctx context.Context, texts []text) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	all := texts
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
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return allRefused(all)
}

// allRefused is the refusal of the first text if there was no other answer: it is not the text that is wrong then.
func allRefused(texts []text) error {
	for i := range texts {
		if _, ok := errors.AsType[*embed.Error](texts[i].unfit); !ok {
			return nil
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return texts[0].unfit
}

// embedPart of the texts. What is too long or refused is marked, and the others are embedded without it.
func (s *scorer) embedPart(ctx context.Context, part []text) error {
	var asked []string
	for i := range part {
		part[i].parsed = guard.Parse(part[i].of)
		asked = append(asked, part[i].of)
	}
	vectors, err := s.embedder.Embed(ctx, asked)
	_, long := errors.AsType[*embed.TooLongError](err)
	failed, ok := errors.AsType[*embed.Error](err)
	switch {
	case err == nil:
		for i, v := range vectors {
			part[i].vector = v
		}
		return nil
	case !long && (!ok || failed.Kind != embed.Refused):
		return fmt.Errorf("embed %s: %w", plural(len(asked), "text"), err)
	case len(part) == 1:
		part[0].unfit = err
		return nil
	}
	half := len(part) / 2 // most of them are fit: so few calls find those that are not
	if err := s.embedPart(ctx, part[:half]); err != nil {
		return err
	}
	return s.embedPart(ctx, part[half:])
}
