package node

import (
	"bytes"
	"context"
	"math"
	"strings"
	"time"

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
	maxChunks   = 32               // of one answer; what follows counts by the facts in it only
	firstChunks = 3                // of an answer that is compared with many
	studyFor    = 10 * time.Second // a comparison
	maxVerified = 8 << 10          // bytes of two answers that a verifier reads
	verifyBelow = 0.25             // how far below the similarity of answers that say the same a verifier is asked
)

// lesson is a question, what the cache said of it, and what the model did.
type lesson struct {
	rules    *proxy.SemanticCache
	study    embed.Embedder // for answers
	kind     openai.Kind
	stamp    uint64
	question semantic.Question
	said     semantic.Answer
	answer   *cache.Entry
	keep     bool  // it may serve others
	taught   int64 // when it came
}

// size is about what a lesson takes while it waits.
func (l *lesson) size() int64 {
	n := int64(len(l.answer.Body) + 4*len(l.question.Vector) + len(l.question.Text))
	if l.said.Entry != nil {
		n += int64(len(l.said.Entry.Body))
	}
	return n
}

// study compares the model's answer with the one that was found, and tells the cache. One that calls tools has
// in their arguments what the question said: it serves nobody else.
func (s *similar) study(ctx context.Context, l *lesson) {
	ctx, cancel := context.WithTimeout(ctx, studyFor)
	defer cancel()
	label := semantic.Label{Answers: l.rules.Answers}
	now := said(l.kind, l.answer.Body)
	if now.whole && !now.tools {
		label.AnswerHash = xxhash.Sum64String(now.text)
		label.AnswerVector = s.vector(ctx, l, now.text)
	}
	by := "none"
	if l.said.Entry != nil {
		label.By = "unknown"
		s.compare(ctx, l, said(l.kind, l.said.Entry.Body), now, &label)
		by = label.By
	}
	s.met.compared.WithLabelValues(by).Inc()
	kept := l.answer
	if !l.keep || now.tools {
		kept = nil
	} else {
		kept.Age = time.Duration(max(s.now()-l.taught, 0))
	}
	s.cache.Learn(ctx, &l.question, &l.said, label, kept)
}

// vector is where an answer lies among others, by its beginning; nil where nobody needs to know, or it can't be told.
func (s *similar) vector(ctx context.Context, l *lesson, text string) []float32 {
	if l.rules.Mode == "static" {
		return nil
	}
	pieces := chunks(text)
	vectors, err := l.study.Embed(ctx, pieces[:min(len(pieces), firstChunks)])
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

// compare says whether two answers say the same: they are the same; or only one calls tools; or what they state as
// facts differs; or their vectors are near; or, in between, by the verifier, where there is one.
func (s *similar) compare(ctx context.Context, l *lesson, before, now saying, label *semantic.Label) {
	switch {
	case !before.whole || !now.whole:
		return // nobody knows
	case before.tools != now.tools:
		label.Known, label.By = true, "tools"
		return
	case before.text == now.text:
		label.Known, label.Same, label.By = true, true, "exact"
		return
	case contradict(before.raw, now.raw):
		label.Known, label.By = true, "facts"
		return
	}
	similarity, err := alike(ctx, l.study, before.text, now.text)
	if err != nil {
		return
	}
	label.Known, label.Same, label.By = true, similarity >= l.rules.Answers, "embedding"
	if label.Same || l.rules.Verifier == nil || similarity < l.rules.Answers-verifyBelow || len(before.text)+len(now.text) > maxVerified {
		return
	}
	if same, err := s.verify(ctx, l.rules.Verifier, answersTo, now.text, before.text); err == nil {
		label.Same, label.By = same, "verifier"
	}
}

// saying is what an answer says.
type saying struct {
	raw   string
	text  string // in small letters and with single blanks
	whole bool   // it says something, and all of it is there to be compared
	tools bool   // it calls some
}

// said reads an answer.
func said(kind openai.Kind, body []byte) (s saying) {
	facts, err := openai.Inspect(kind, body)
	if err != nil || !facts.Complete || facts.Length || facts.Failure != nil {
		return s
	}
	var b bytes.Buffer
	facts.Said(func(t []byte) bool {
		b.Write(t)
		b.WriteByte('\n')
		return b.Len() <= maxSaid
	})
	s.tools = facts.Tools
	if b.Len() <= maxSaid {
		s.raw = b.String()
		s.text = strings.ToLower(strings.Join(strings.Fields(s.raw), " "))
		s.whole = s.text != "" || s.tools
	}
	return s
}

// contradict says whether what two answers state as facts differs, whatever their wording.
func contradict(a, b string) bool {
	if _, yes := guard.ParseFacts(a).Contradicts(guard.ParseFacts(b)); yes {
		return true
	}
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
