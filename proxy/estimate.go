package proxy

import (
	"slices"
	"sync"

	"headgate/proxy/openai"
)

// estimator learns, from the upstream's own usage, how many bytes make a token and how
// long a caller's answers are. It is safe for concurrent use and bounded.
type estimator struct {
	mu      sync.Mutex
	models  map[string]*ratio // of inputs; as many as there are models
	answers map[string]*ratio // of answers; likewise

	shards [estimatorShards]struct {
		mu      sync.Mutex
		answers map[answerKey]*lengths
	}
}

const (
	estimatorShards = 64
	answersPerShard = 1024 // callers × models remembered in each shard
	lengthsKept     = 64   // answers remembered of each
	lengthsNeeded   = 20   // answers before the percentile counts

	defaultBytesPerToken = 4000 // thousandths
	ratioWeight          = 1000 // tokens that the starting ratio is worth
	ratioHorizon         = 1 << 20

	defaultImageTokens  = 1024
	defaultAudioTokens  = 1500
	videoImages         = 8 // a video counts as so many images
	defaultOutputTokens = 512
)

type answerKey struct{ key, model string }

// ratio is Σ bytes / Σ tokens over the recent past.
type ratio struct{ bytes, tokens int64 }

// lengths is a ring of answer lengths with their 90th percentile.
type lengths struct {
	ring [lengthsKept]int64
	n    int
	p90  int64
}

func newEstimator() *estimator {
	e := &estimator{models: map[string]*ratio{}, answers: map[string]*ratio{}}
	for i := range e.shards {
		e.shards[i].answers = map[answerKey]*lengths{}
	}
	return e
}

// input is how many tokens the request's input is likely to be.
func (e *estimator) input(m *Model, in *openai.Request) int64 {
	e.mu.Lock()
	r := e.ratio(m)
	bytes, tokens := r.bytes, r.tokens
	e.mu.Unlock()
	// In thousandths of bytes the product of a 100 MB body and 2^21 tokens fits.
	n := in.InputTokens + ceilDiv(in.InputBytes*tokens, max(bytes, 1))
	n += int64(in.Images+videoImages*in.Video) * orDefault(m.ImageTokens, defaultImageTokens)
	n += int64(in.Audio) * orDefault(m.AudioTokens, defaultAudioTokens)
	return n
}

// output is how many tokens to reserve for the answer: the request's cap, what the
// context leaves, or what nine in ten of this caller's answers stayed below, whichever is
// the smallest; without a cap and without a history, the model's default.
func (e *estimator) output(key string, m *Model, in *openai.Request, inTokens int64) int64 {
	limit := in.MaxOutput
	p90, known := e.percentile(answerKey{key, m.Name})
	switch {
	case known && (limit < 0 || p90 < limit):
		limit = p90
	case limit < 0:
		limit = orDefault(m.DefaultOutput, defaultOutputTokens)
	}
	if m.Context > 0 {
		limit = min(limit, max(m.Context-inTokens/max(in.Inputs, 1), 1))
	}
	return limit * max(in.Sequences, 1)
}

// learn takes in what an answer really took.
func (e *estimator) learn(key string, m *Model, in *openai.Request, u openai.Usage, generate bool) {
	if in.InputBytes > 0 && u.Input > 0 && in.InputTokens == 0 && in.Images+in.Audio+in.Video == 0 {
		e.mu.Lock()
		e.ratio(m).add(in.InputBytes, u.Input)
		e.mu.Unlock()
	}
	if !generate {
		return
	}
	k := answerKey{key, m.Name}
	s := e.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.answers[k]
	if l == nil {
		if len(s.answers) >= answersPerShard {
			for old := range s.answers { // any: a forgotten history only makes the next estimate plainer
				delete(s.answers, old)
				break
			}
		}
		l = &lengths{}
		s.answers[k] = l
	}
	l.add(ceilDiv(u.Output, max(in.Sequences, 1)))
}

// learnText takes in how many bytes of text an answer of so many tokens had.
func (e *estimator) learnText(m *Model, bytes, tokens int64) {
	if bytes <= 0 || tokens <= 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.answers[m.Name]
	if r == nil {
		r = &ratio{}
		e.answers[m.Name] = r
	}
	r.add(bytes, tokens)
}

// textTokens is how many tokens so many bytes of an answer are likely to be; 0 as long as
// no answer has told.
func (e *estimator) textTokens(m *Model, bytes int64) int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.answers[m.Name]
	if r == nil {
		return 0
	}
	return bytes * r.tokens / r.bytes // rounded down: chunks, not bytes, are what was surely generated
}

func (r *ratio) add(bytes, tokens int64) {
	r.bytes += bytes
	r.tokens += tokens
	if r.tokens > ratioHorizon || r.bytes > ratioHorizon*8 {
		r.bytes, r.tokens = max(r.bytes/2, 1), max(r.tokens/2, 1)
	}
}

func (l *lengths) add(n int64) {
	l.ring[l.n%lengthsKept] = n
	l.n++
	sorted := l.ring
	part := sorted[:min(l.n, lengthsKept)]
	slices.Sort(part)
	l.p90 = part[(len(part)*9+9)/10-1]
}

func (e *estimator) percentile(k answerKey) (int64, bool) {
	s := e.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.answers[k]
	if l == nil || l.n < lengthsNeeded {
		return 0, false
	}
	return l.p90, true
}

func (e *estimator) shard(k answerKey) *struct {
	mu      sync.Mutex
	answers map[answerKey]*lengths
} {
	h := uint32(2166136261)
	for i := range len(k.key) {
		h = (h ^ uint32(k.key[i])) * 16777619
	}
	return &e.shards[h%estimatorShards]
}

// ratio of a model; e.mu is held.
func (e *estimator) ratio(m *Model) *ratio {
	r := e.models[m.Name]
	if r == nil {
		r = &ratio{bytes: orDefault(m.BytesPerToken, defaultBytesPerToken) * ratioWeight / 1000, tokens: ratioWeight}
		e.models[m.Name] = r
	}
	return r
}

func orDefault(v, d int64) int64 {
	if v > 0 {
		return v
	}
	return d
}
