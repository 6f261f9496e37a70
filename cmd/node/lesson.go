package node

import (
	"bytes"
	"context"
	"math"
	"strings"
	"time"
	"unicode"

	"github.com/cespare/xxhash/v2"

	"headgate/cache"
	"headgate/cache/embed"
	"headgate/cache/guard"
	"headgate/cache/semantic"
	"headgate/cache/vec"
	"headgate/proxy"
	"headgate/proxy/openai"
)

const (
	maxSaid     = 64 << 10         // bytes of an answer that is compared; of longer ones nobody knows
	chunkSaid   = 320              // bytes of an answer that are turned into one vector: any embedder's window holds them
	maxChunks   = 32               // of one answer; the rest counts by facts only
	firstChunks = 3                // of an answer that is compared with many
	studyFor    = 10 * time.Second // a comparison
	verifyBelow = 0.25             // how far below the similarity of answers that say the same a verifier is asked
)

// lesson is a question, what the cache said of it, and what the model did.
type lesson struct {
	rules    *proxy.SemanticCache
	embedder embed.Embedder
	kind     openai.Kind
	stamp    uint64
	question semantic.Question
	said     semantic.Answer
	answer   *cache.Entry
}

// study compares the model's answer with the one that was found, and tells the cache.
func (s *similar) study(ctx context.Context, l *lesson) {
	ctx, cancel := context.WithTimeout(ctx, studyFor)
	defer cancel()
	label := semantic.Label{Answers: l.rules.Answers}
	now, ok := said(l.kind, l.answer.Body)
	if ok {
		label.AnswerHash = xxhash.Sum64String(now)
		label.AnswerVector = s.vector(ctx, l, now)
	}
	by := "none"
	if l.said.Entry != nil {
		before, known := said(l.kind, l.said.Entry.Body)
		if label.By = "unknown"; ok && known {
			s.compare(ctx, l, before, now, &label)
		}
		by = label.By
	}
	s.met.compared.WithLabelValues(by).Inc()
	s.cache.Learn(ctx, &l.question, &l.said, label, l.answer)
}

// vector is where an answer lies among others, by its beginning; nil where nobody needs to know, or it can't be told.
func (s *similar) vector(ctx context.Context, l *lesson, text string) []float32 {
	if l.rules.Mode == "static" {
		return nil
	}
	pieces := chunks(text)
	vectors, err := l.embedder.Embed(ctx, pieces[:min(len(pieces), firstChunks)])
	if err != nil {
		return nil
	}
	out := make([]float32, len(vectors[0]))
	for i, x := range sum(vectors) {
		out[i] = float32(x)
	}
	vec.Norm(out)
	return out
}

// compare says whether two answers say the same: they are the same; or their numbers, dates or negations
// differ; or their vectors are near; or, in between, by the verifier, where there is one.
func (s *similar) compare(ctx context.Context, l *lesson, before, now string, label *semantic.Label) {
	label.Known = true
	if before == now {
		label.Same, label.By = true, "exact"
		return
	}
	if contradict(before, now) {
		label.By = "facts"
		return
	}
	similarity, err := alike(ctx, l.embedder, before, now)
	if err != nil {
		label.Known = false
		return
	}
	label.Same, label.By = similarity >= l.rules.Answers, "embedding"
	if label.Same || l.rules.Verifier == nil || similarity < l.rules.Answers-verifyBelow {
		return
	}
	if same, err := s.verify(ctx, l.rules.Verifier, now, before); err == nil {
		label.Same, label.By = same, "verifier"
	}
}

// said is what an answer says, in small letters and with single blanks. ok: it says something, which can be compared.
func said(kind openai.Kind, body []byte) (text string, ok bool) {
	facts, err := openai.Inspect(kind, body)
	if err != nil {
		return "", false
	}
	var b bytes.Buffer
	facts.Said(func(t []byte) bool {
		b.Write(t)
		b.WriteByte('\n')
		return b.Len() <= maxSaid
	})
	if b.Len() > maxSaid {
		return "", false
	}
	text = strings.ToLower(strings.Join(strings.Fields(b.String()), " "))
	return text, strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsSpace(r) })
}

// contradict says whether what two answers state as facts differs, whatever their wording.
func contradict(a, b string) bool {
	for _, r := range guard.Parse(a).Compare(guard.Parse(b)).Refused {
		switch r.Kind {
		case guard.KindNumber, guard.KindUnit, guard.KindDate, guard.KindNegation:
			return true
		}
	}
	return false
}

// alike is the similarity of two answers: of the sums of the vectors of their pieces.
func alike(ctx context.Context, e embed.Embedder, a, b string) (float64, error) {
	x, y := chunks(a), chunks(b)
	vectors, err := e.Embed(ctx, append(x, y...))
	if err != nil {
		return 0, err
	}
	return cosine(sum(vectors[:len(x)]), sum(vectors[len(x):])), nil
}

// chunks cuts a text at blanks.
func chunks(s string) (out []string) {
	for len(s) > chunkSaid && len(out) < maxChunks-1 {
		at := strings.LastIndexByte(s[:chunkSaid], ' ')
		if at <= 0 {
			at = chunkSaid
		}
		out, s = append(out, strings.ToValidUTF8(s[:at], "")), strings.TrimLeft(s[at:], " ")
	}
	return append(out, strings.ToValidUTF8(s[:min(len(s), chunkSaid)], ""))
}

func cosine(a, b []float64) float64 {
	var ab, aa, bb float64
	for i := range a {
		ab, aa, bb = ab+a[i]*b[i], aa+a[i]*a[i], bb+b[i]*b[i]
	}
	if aa == 0 || bb == 0 {
		return 0
	}
	return ab / math.Sqrt(aa*bb)
}

func sum(vectors [][]float32) []float64 {
	out := make([]float64, len(vectors[0]))
	for _, v := range vectors {
		for i, x := range v {
			out[i] += float64(x)
		}
	}
	return out
}
