package semantic

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/bench/semantic/corpus"
	"headgate/cache/embed"
	"headgate/cache/vec"
)

// set is questions to replay: those of the publishers' test parts. Whatever of the threshold was chosen by looking, was
// chosen on the training parts.
type set struct {
	name    string
	corpus  string
	strange bool // with the questions that have no intent, each of which has an answer of its own
}

func sets() []set {
	return []set{
		{name: "banking77", corpus: corpus.Banking77},
		{name: "clinc150", corpus: corpus.CLINC150},
		{name: "clinc150 with strangers", corpus: corpus.CLINC150, strange: true},
	}
}

// load is the set's questions.
func (s *set) load() ([]corpus.Prompt, error) {
	all, err := corpus.Load(s.corpus, "test")
	if err != nil || !s.strange {
		return all, err
	}
	strangers, err := corpus.Load(s.corpus, "oos_test")
	for i, p := range strangers {
		p.Intent = fmt.Sprintf("stranger %d", i)
		all = append(all, p)
	}
	return all, err
}

// measured is a set with what was found.
type measured struct {
	set
	prompts []corpus.Prompt
	vectors [][]float32
	auc     float64
	pairs   int64
	each    time.Duration // to embed one question by itself, median
	curves  []*curve
}

// timed is how many questions are embedded one by one, for the time it takes.
const timed = 300

// measure embeds the set's questions.
func (s *set) measure(ctx context.Context, c *Config, e embed.Embedder) (*measured, error) {
	all, err := s.load()
	if err != nil {
		return nil, err
	}
	if c.Sample > 0 && c.Sample < len(all) {
		all = sample(all, c.Sample)
	}
	m := &measured{set: *s, prompts: all}
	var took []time.Duration
	for len(m.vectors) < min(timed, len(all)) {
		began := time.Now()
		v, err := e.Embed(ctx, []string{all[len(m.vectors)].Text})
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
		m.vectors = append(m.vectors, v...)
	}
	m.each = median(took)
	const batch = 32
	for len(m.vectors) < len(all) {
		var texts []string
		for _, p := range all[len(m.vectors):min(len(all), len(m.vectors)+batch)] {
			texts = append(texts, p.Text)
		}
		v, err := e.Embed(ctx, texts)
		if err != nil {
			return nil, err
		}
		m.vectors = append(m.vectors, v...)
	}
	m.auc, m.pairs = auc(m.prompts, m.vectors)
	return m, nil
}

// sample is n questions of a few intents, so that there are as many of each as in the whole.
func sample(all []corpus.Prompt, n int) (some []corpus.Prompt) {
	byIntent := map[string][]corpus.Prompt{}
	var intents []string
	for _, p := range all {
		if byIntent[p.Intent] == nil {
			intents = append(intents, p.Intent)
		}
		byIntent[p.Intent] = append(byIntent[p.Intent], p)
	}
	rng := rand.New(rand.NewPCG(1, 77))
	rng.Shuffle(len(intents), func(i, j int) { intents[i], intents[j] = intents[j], intents[i] })
	for _, name := range intents {
		if some = append(some, byIntent[name]...); len(some) >= n {
			return some[:n]
		}
	}
	return some
}

// auc is the chance that a pair of one intent is more similar than a pair of two, over all pairs of the questions.
func auc(prompts []corpus.Prompt, vectors [][]float32) (area float64, pairs int64) {
	const steps = 1 << 16 // of the similarity: pairs of one step count as equal
	same, other := make([]int64, steps), make([]int64, steps)
	for i := range prompts {
		for j := range i {
			at := min(max(int((vec.Dot(vectors[i], vectors[j])+1)/2*steps), 0), steps-1)
			if prompts[i].Intent == prompts[j].Intent {
				same[at]++
			} else {
				other[at]++
			}
		}
	}
	var below, sames, others int64
	for i := range same {
		area += float64(same[i]) * (float64(below) + float64(other[i])/2)
		below += other[i]
		sames, others = sames+same[i], others+other[i]
	}
	if sames == 0 || others == 0 {
		return 0, 0
	}
	return area / float64(sames) / float64(others), sames + others
}

func median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[(len(d)-1)/2]
}
