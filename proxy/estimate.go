package proxy

import (
	"slices"
	"sync"
	"time"

	"headgate/limiter"
	"headgate/proxy/openai"
)

// estimator learns, from the upstream's own usage, how many bytes make a token and how
// long a caller's answers are. It is safe for concurrent use and bounded.
type estimator struct {
	mu    sync.Mutex
	texts map[string]*ratio            // of answers; as many as there are models
	added map[string]*template         // where more than their models state was seen
	first map[string]*[2]time.Duration // how long their backends take to the first byte: of a whole answer, of a stream

	shards [estimatorShards]estimatorShard
}

// estimatorShard holds what is learnt of some callers.
type estimatorShard struct {
	mu      sync.Mutex
	inputs  map[callerModel]*ratio // by tenant: none can bend another's
	answers map[callerModel]*lengths
}

const (
	estimatorShards = 64
	callersPerShard = 1024 // callers × models remembered in each shard
	lengthsKept     = 64   // answers remembered of each
	lengthsNeeded   = 20   // answers before the percentile counts

	defaultBytesPerToken = 4000 // thousandths
	ratioWeight          = 1000 // tokens that the starting ratio is worth
	ratioHorizon         = 1 << 20
	learnBytes           = 256 // of input at least: of a short one the chat template is most
	ratioRange           = 4   // times above or below where it started

	maxTemplateTokens = 64 << 10        // that are learnt; a backend that says more is wrong
	templateAnswers   = 64              // answers that show less, after which less is believed
	templateKept      = 5 * time.Minute // since it was last seen: where all are refused for it, no answer shows less

	defaultImageTokens  = 1024
	defaultAudioTokens  = 1500
	videoImages         = 8 // a video counts as so many images
	defaultOutputTokens = 512
)

// callerModel is a key or a tenant, and a model.
type callerModel struct{ caller, model string }

// ratio is Σ bytes / Σ tokens over the recent past.
type ratio struct{ bytes, tokens int64 }

// lengths is a ring of answer lengths with their 90th percentile.
type lengths struct {
	ring [lengthsKept]int64
	n    int
	p90  int64
}

func newEstimator() *estimator {
	e := &estimator{texts: map[string]*ratio{}, added: map[string]*template{}, first: map[string]*[2]time.Duration{}}
	for i := range e.shards {
		e.shards[i].inputs, e.shards[i].answers = map[callerModel]*ratio{}, map[callerModel]*lengths{}
	}
	return e
}

// input is how many tokens the request's input is likely to be.
func (e *estimator) input(tenant string, m *Model, in *openai.Request) int64 {
	k := callerModel{tenant, m.Name}
	s := e.shard(k)
	s.mu.Lock()
	r := startRatio(m)
	if known := s.inputs[k]; known != nil {
		r = *known
	}
	s.mu.Unlock()
	bytes, tokens := r.bytes, r.tokens
	// Whoever feeds it nonsense may not bend his own by more than ratioRange either.
	start := orDefault(m.BytesPerToken, defaultBytesPerToken)
	bytes = min(max(bytes, tokens*start/(1000*ratioRange)), tokens*start*ratioRange/1000)
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
	p90, known := e.percentile(callerModel{key, m.Name})
	known = known && !in.Background // nobody waits for such an answer: what it really took is never seen
	switch {
	case known && (limit < 0 || p90 < limit):
		limit = p90
	case limit < 0 && in.Background && m.Context > 0:
		limit = m.Context
	case limit < 0:
		limit = orDefault(m.DefaultOutput, defaultOutputTokens)
	}
	if m.Context > 0 {
		limit = min(limit, max(m.Context-inTokens/max(in.Inputs, 1), 1))
	}
	return times(limit, in.Sequences)
}

// latency is how long a model's backends lately took to the first byte of an answer; 0: nobody knows.
func (e *estimator) latency(m *Model, stream bool) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.first[m.Name]; l != nil {
		return l[index(stream)]
	}
	return 0
}

// learnLatency takes in one of them; the newest eight weigh most.
func (e *estimator) learnLatency(m *Model, stream bool, d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.first[m.Name]
	if l == nil {
		l = new([2]time.Duration)
		e.first[m.Name] = l
	}
	if was := &l[index(stream)]; *was == 0 {
		*was = d
	} else {
		*was += (d - *was) / 8
	}
}

func index(b bool) int {
	if b {
		return 1
	}
	return 0
}

// learn takes in what an answer really took that was capped to most tokens; -1: it was not.
func (e *estimator) learn(tenant, key string, m *Model, in *openai.Request, u openai.Usage, generate bool, most int64) {
	if in.InputBytes >= learnBytes && u.Input > 0 && in.PreviousResponseID == "" && in.InputTokens == 0 && in.Images+in.Audio+in.Video == 0 {
		e.learnInput(callerModel{tenant, m.Name}, m, in.InputBytes, u.Input)
	}
	if !generate || most >= 0 && u.Output >= times(most, in.Sequences) {
		return // an answer cut by its own cap says nothing of how long answers are
	}
	k := callerModel{key, m.Name}
	s := e.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.answers[k]
	if l == nil {
		makeRoom(s.answers)
		l = &lengths{}
		s.answers[k] = l
	}
	l.add(ceilDiv(u.Output, max(in.Sequences, 1)))
}

func (e *estimator) learnInput(k callerModel, m *Model, bytes, tokens int64) {
	s := e.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.inputs[k]
	if r == nil {
		makeRoom(s.inputs)
		start := startRatio(m)
		r = &start
		s.inputs[k] = r
	}
	r.add(bytes, tokens)
}

// makeRoom forgets one of a full map, any: it only makes the next estimate plainer.
func makeRoom[V any](m map[callerModel]V) {
	if len(m) < callersPerShard {
		return
	}
	for k := range m {
		delete(m, k)
		return
	}
}

// template is how many tokens the chat template of a model adds at most, as far as is known.
func (e *estimator) template(m *Model) int64 {
	stated := orDefault(m.TemplateTokens, defaultTemplateTokens)
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.added[m.Name]
	if t == nil || t.tokens <= stated {
		return stated
	}
	if time.Since(t.seen) > templateKept {
		delete(e.added, m.Name)
		return stated
	}
	return t.tokens
}

// template is what was seen of a chat template, more than its model states. One odd answer is no template for ever: it
// would have strict budgets refuse everybody.
type template struct {
	tokens int64
	seen   time.Time // when an answer last showed about so many
	below  int       // answers since of which all input was less,
	most   int64     // and no more than this
	told   int64     // in the log
}

// learnTemplate takes in an answer that has added more than that, or of whose input all was so many. It says how
// many are to be told to people; 0: nothing new.
func (e *estimator) learnTemplate(m *Model, more, input int64) (tell int64) {
	more = min(more, maxTemplateTokens)
	stated := orDefault(m.TemplateTokens, defaultTemplateTokens)
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.added[m.Name]
	if t == nil {
		if more <= stated {
			return 0
		}
		t = &template{}
		e.added[m.Name] = t
	}
	switch {
	case more >= t.tokens/2:
		t.seen, t.below, t.most = time.Now(), 0, 0
		if t.tokens = max(t.tokens, more); t.tokens >= 2*t.told {
			t.told = t.tokens
			return t.tokens
		}
	case input < t.tokens:
		if t.below, t.most = t.below+1, max(t.most, input); t.below == templateAnswers {
			if t.tokens, t.told, t.below, t.most = t.most, t.most, 0, 0; t.tokens <= stated {
				delete(e.added, m.Name)
			}
		}
	}
	return 0
}

// learnText takes in how many bytes of text an answer of so many tokens had.
func (e *estimator) learnText(m *Model, bytes, tokens int64) {
	if bytes <= 0 || tokens <= 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.texts[m.Name]
	if r == nil {
		r = &ratio{}
		e.texts[m.Name] = r
	}
	r.add(bytes, tokens)
}

// textTokens is how many tokens so many bytes of an answer are likely to be; 0 as long as
// no answer has told.
func (e *estimator) textTokens(m *Model, bytes int64) int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.texts[m.Name]
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

func (e *estimator) percentile(k callerModel) (int64, bool) {
	s := e.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.answers[k]
	if l == nil || l.n < lengthsNeeded {
		return 0, false
	}
	return l.p90, true
}

func (e *estimator) shard(k callerModel) *estimatorShard {
	h := uint32(2166136261) // FNV-1a
	for i := range len(k.caller) {
		h = (h ^ uint32(k.caller[i])) * 16777619
	}
	return &e.shards[h%estimatorShards]
}

// startRatio is what is taken for a model's ratio before anything was learnt.
func startRatio(m *Model) ratio {
	return ratio{bytes: orDefault(m.BytesPerToken, defaultBytesPerToken) * ratioWeight / 1000, tokens: ratioWeight}
}

// times is how many tokens n sequences of so many are, without overflow.
func times(tokens, n int64) int64 {
	if n = max(n, 1); tokens > limiter.MaxUnits/n {
		return limiter.MaxUnits
	}
	return tokens * n
}

func orDefault(v, d int64) int64 {
	if v > 0 {
		return v
	}
	return d
}
