package node

import (
	"bytes"
	"context"
	"math"
	"slices"
	"strings"
	"sync"
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
	maxLessons     = 256 // that wait; one at a time is studied, so that requests have the processor
	maxLessonBytes = 32 << 20
	lessonShare    = 4                // a tenant has one part in so many of both
	maxSaid        = 64 << 10         // bytes of an answer that is compared; of longer ones nobody knows
	chunkSaid      = 320              // bytes of an answer that are turned into one vector: any embedder's window holds them
	maxChunks      = 8                // of what one answer says beside another; what follows counts by the facts in it only
	firstChunks    = 3                // of an answer that is compared with many
	studyFor       = 10 * time.Second // a comparison
	maxVerified    = 8 << 10          // bytes of two answers that a verifier reads
	verifyBelow    = 0.25             // how far below the similarity of answers that say the same a verifier is asked
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

// lessons wait for their turn, which the tenants have one after the other.
type lessons struct {
	mu     sync.Mutex
	queues map[string]*lessonQueue
	turns  []*lessonQueue // of those that have some
	n      int
	bytes  int64
	more   chan struct{} // has one where there are some
}

type lessonQueue struct {
	waiting []*lesson
	bytes   int64
}

func newLessons() *lessons {
	return &lessons{queues: map[string]*lessonQueue{}, more: make(chan struct{}, 1)}
}

// push says whether there was room for l.
func (s *lessons) push(l *lesson) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	size, tenant := l.size(), l.question.Tenant
	q := s.queues[tenant]
	if q == nil {
		q = &lessonQueue{}
	}
	if s.n >= maxLessons || s.bytes+size > maxLessonBytes || len(q.waiting) >= maxLessons/lessonShare || q.bytes+size > maxLessonBytes/lessonShare {
		return false
	}
	if len(q.waiting) == 0 {
		s.queues[tenant], s.turns = q, append(s.turns, q)
	}
	q.waiting, q.bytes = append(q.waiting, l), q.bytes+size
	s.n, s.bytes = s.n+1, s.bytes+size
	select {
	case s.more <- struct{}{}:
	default:
	}
	return true
}

// pop waits for the next; nil when ctx ends.
func (s *lessons) pop(ctx context.Context) *lesson {
	for {
		if l := s.take(); l != nil {
			return l
		}
		select {
		case <-s.more:
		case <-ctx.Done():
			return nil
		}
	}
}

func (s *lessons) take() *lesson {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.turns) == 0 {
		return nil
	}
	q := s.turns[0]
	l := q.waiting[0]
	s.turns, q.waiting = s.turns[1:], q.waiting[1:]
	s.n, s.bytes, q.bytes = s.n-1, s.bytes-l.size(), q.bytes-l.size()
	if len(q.waiting) > 0 {
		s.turns = append(s.turns, q)
	} else {
		delete(s.queues, l.question.Tenant)
	}
	return l
}

// study compares the model's answer with the one that was found, and tells the cache.
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
	s.learn(ctx, l, now, &label, by)
}

// learn tells the cache. An answer that calls tools has in their arguments what the question said: it serves nobody else.
func (s *similar) learn(ctx context.Context, l *lesson, now saying, label *semantic.Label, by string) {
	s.met.compared.WithLabelValues(by).Inc()
	kept := l.answer
	if !l.keep || now.tools {
		kept = nil
	} else {
		kept.Age = time.Duration(max(s.now()-l.taught, 0))
	}
	s.cache.Learn(ctx, &l.question, &l.said, *label, kept)
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
	similarity, err := alike(ctx, l.study, before, now)
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
	_, yes := guard.ParseFacts(a).Contradicts(guard.ParseFacts(b))
	return yes
}

// alike is the similarity of two answers that are not equal: of what they do not have in common, for a sentence among many
// that both have moves the vector of the whole by nothing. It is of the sums of the vectors of the pieces. Where one
// has all that the other has, what it has beside that is held against all of the other.
func alike(ctx context.Context, e embed.Embedder, a, b saying) (float64, error) {
	x, y := sentences(a.raw), sentences(b.raw)
	x, y = without(x, y), without(y, x)
	switch {
	case len(x) == 0 && len(y) == 0:
		return 1, nil // the same, in another order or number
	case len(x) == 0:
		x = []string{a.text}
	case len(y) == 0:
		y = []string{b.text}
	}
	one, other := chunks(strings.Join(x, " ")), chunks(strings.Join(y, " "))
	vectors, err := e.Embed(ctx, slices.Concat(one, other))
	if err != nil {
		return 0, err
	}
	return cosine(sum(vectors[:len(one)]), sum(vectors[len(one):])), nil
}

// sentences are those of a text, and its lines, in small letters, with single blanks, and without what stands around words.
func sentences(text string) (out []string) {
	for line := range strings.Lines(text) {
		for len(line) > 0 {
			end := len(line)
			for i := 0; i+1 < len(line); i++ {
				if strings.IndexByte(".!?", line[i]) >= 0 && line[i+1] == ' ' {
					end = i + 1
					break
				}
			}
			s := strings.ToLower(strings.Join(strings.Fields(line[:end]), " "))
			if s = strings.Trim(s, " .!?*-•#>`\""); s != "" {
				out = append(out, s)
			}
			line = line[end:]
		}
	}
	return out
}

// without is what is in a and not in b.
func without(a, b []string) (out []string) {
	has := make(map[string]bool, len(b))
	for _, s := range b {
		has[s] = true
	}
	for _, s := range a {
		if !has[s] {
			out = append(out, s)
		}
	}
	return out
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
