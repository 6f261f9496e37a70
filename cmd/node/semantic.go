package node

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"headgate/cache"
	"headgate/cache/embed"
	"headgate/cache/hnsw"
	"headgate/cache/semantic"
	"headgate/cache/threshold"
	"headgate/proxy"
)

const (
	defaultSemanticBytes = 128 << 20
	minSemanticBytes     = 1 << 20
	maxQuestion          = 1 << 10 // bytes of one that is compared with others; the vector of a longer one says little of what it asks
	maxLesson            = 1 << 20 // bytes of an answer that serves other words
)

// similar is the cache of similar questions as the front door knows it.
type similar struct {
	cache     *semantic.Cache
	embedders *embedders
	verify    func(ctx context.Context, m *proxy.Model, what, one, other string) (same bool, err error)
	stamp     func() uint64
	now       func() int64 // nanoseconds
	lessons   *lessons
	met       *similarMetrics
}

// openSemantic makes the cache of similar questions.
func (n *Node) openSemantic() error {
	kept, err := semantic.New(semantic.Config{
		Ring: n.answerOwners, Client: func(address string) (grpc.ClientConnInterface, error) { return n.cluster.Conn(address) }, Peers: n.peers,
		Valid: n.answerValid, Now: n.ticks, Rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), MaxBytes: n.semanticBytes(), Crossover: measuredCrossover(), Logger: n.log, Registerer: n.registry,
	})
	if err != nil {
		return err
	}
	n.similar = &similar{
		cache: kept, embedders: newEmbedders(n.post, n.log), verify: verifier{n.post}.same, stamp: func() uint64 { return n.caches().Stamp() }, now: n.ticks,
		lessons: newLessons(), met: newSimilarMetrics(n.registry),
	}
	return nil
}

func (n *Node) semanticBytes() int64 {
	if n.cfg.SemanticMaxBytes == 0 {
		return defaultSemanticBytes
	}
	return n.cfg.SemanticMaxBytes
}

// measuredCrossover says from how many vectors on an index is faster than a look at all: it is measured here when a
// length is first met, which takes some milliseconds.
func measuredCrossover() func(dim int) int {
	var mu sync.Mutex
	known := map[int]int{}
	return func(dim int) int {
		mu.Lock()
		defer mu.Unlock()
		n, ok := known[dim]
		if !ok {
			n = hnsw.Crossover(dim, time.Now)
			known[dim] = n
		}
		return n
	}
}

// peers are the addresses of all other nodes.
func (n *Node) peers() []string {
	c := n.joined.Load()
	if c == nil {
		return nil
	}
	var out []string
	for _, m := range c.Fence().Ring().Members() {
		if m.Incarnation != n.self {
			out = append(out, m.Address)
		}
	}
	return out
}

// run does what no request waits for, until ctx ends.
func (s *similar) run(ctx context.Context) {
	var workers sync.WaitGroup
	workers.Go(func() { s.cache.Run(ctx) })
	defer workers.Wait()
	for {
		l := s.lessons.pop(ctx)
		if l == nil {
			return
		}
		s.study(ctx, l)
	}
}

func (s *similar) close() {
	s.cache.Close()
	s.embedders.shut()
}

// Ask see proxy.Semantic.
func (s *similar) Ask(ctx context.Context, q *proxy.SemanticQuestion) proxy.SemanticTurn {
	l, outcome := s.lesson(ctx, q)
	if l == nil {
		return proxy.SemanticTurn{Outcome: outcome}
	}
	l.said = s.cache.Ask(ctx, &l.question)
	s.verifyClose(ctx, l)
	a := &l.said
	if outcome = a.Action.String(); a.Shadow && a.Action != threshold.Miss {
		outcome = "shadow"
	}
	if a.Action == threshold.Serve {
		return proxy.SemanticTurn{Outcome: "hit", Hit: &proxy.Cached{
			ContentType: a.Entry.ContentType, Body: a.Entry.Body, Tags: a.Entry.Tags, Input: a.Entry.Input, CachedInput: a.Entry.CachedInput, Output: a.Entry.Output,
			Age: a.Age, Via: a.EntryID, Similarity: min(max(a.Similarity, 0), 1), Stamp: a.Entry.Stamp,
		}}
	}
	return proxy.SemanticTurn{Outcome: outcome, Learn: func(e *proxy.CacheEntry, keep bool) { s.teach(l, e, keep) }}
}

// verifyClose has a verifier, where the surface has one, look at a close thing before it is served.
func (s *similar) verifyClose(ctx context.Context, l *lesson) {
	if a := &l.said; a.Action != threshold.Serve || !a.Borderline || l.rules.Verifier == nil {
		return
	}
	same, err := s.verify(ctx, l.rules.Verifier, questions, l.question.Text, l.said.CachedText)
	verdict := "another"
	switch {
	case err != nil:
		verdict = "failed"
	case same:
		verdict = "same"
	}
	s.met.verified.WithLabelValues(verdict).Inc()
	s.cache.Verified(&l.question, &l.said, same)
}

// lesson is what q asks the cache; nil where it asks nothing, and why. The ledger is read before the
// model is asked: what ends after that has ended the answer, too.
func (s *similar) lesson(ctx context.Context, q *proxy.SemanticQuestion) (*lesson, string) {
	sem := q.Surface.Semantic
	e, err := s.embedders.of(sem.Embedder)
	if err != nil {
		return nil, "failed"
	}
	cc := cache.Context(*q.Context)
	version := e.Version()
	part, text, ok, err := cc.Partition(version)
	if err != nil || !ok || len(text) > maxQuestion {
		return nil, "unfit"
	}
	vectors, err := e.Embed(ctx, []string{text})
	if err != nil {
		if _, long := errors.AsType[*embed.TooLongError](err); long {
			return nil, "unfit"
		}
		return nil, "failed"
	}
	return &lesson{
		rules: sem, study: e.answers(), kind: q.Kind, stamp: s.stamp(),
		question: semantic.Question{
			Partition: part, Tenant: q.Context.Tenant, Surface: q.Surface.Name, Embedder: version, Text: text, Vector: vectors[0],
			Policy: policyOf(sem), Least: q.Least, Tags: q.Tags, Request: q.Request, Verify: sem.Verifier != nil, Only: q.Only,
		},
	}, ""
}

// policyOf is what the surface's policy means to the cache. A mode of a later version is none.
func policyOf(s *proxy.SemanticCache) threshold.Policy {
	p := threshold.Policy{Threshold: s.Threshold, ErrorBound: s.ErrorBound, HitErrorBound: s.HitErrorBound, Audit: s.Audit}
	switch s.Mode {
	case "static":
		p.Mode = threshold.Static
	case "learned":
		p.Mode = threshold.Learned
	default:
		p.Mode = threshold.Shadow
	}
	return p
}

// teach has the model's answer compared, later, with the one that was found. It does not block. What can't wait, since
// too much of its tenant's does, is not compared, and kept all the same.
func (s *similar) teach(l *lesson, e *proxy.CacheEntry, keep bool) {
	l.answer, l.keep, l.taught = answer(e), keep, s.now()
	l.answer.Stamp, l.answer.Life = l.stamp, cache.Life{TTL: l.rules.TTL, MaxTTL: l.rules.TTL}
	switch {
	case len(e.Body) > maxLesson: // whoever counts audits hears that this one found out nothing
		l.keep = false
		s.learn(context.Background(), l, saying{}, &semantic.Label{Answers: l.rules.Answers}, "dropped")
	case l.rules.Mode == "static" && l.said.Entry == nil: // there is nothing to be compared
		s.learn(context.Background(), l, said(l.kind, l.answer.Body), &semantic.Label{Answers: l.rules.Answers}, "none")
	case !s.lessons.push(l):
		s.learn(context.Background(), l, said(l.kind, l.answer.Body), &semantic.Label{Answers: l.rules.Answers}, "dropped")
	}
}

// similarMetrics are of what this room does; the cache counts what it decides.
type similarMetrics struct {
	compared *prometheus.CounterVec
	verified *prometheus.CounterVec
	posted   *prometheus.CounterVec
}

func newSimilarMetrics(r prometheus.Registerer) *similarMetrics {
	m := &similarMetrics{
		compared: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_semantic_comparisons_total", Help: "Answers of models that were compared with the one that would have been served, by what told (exact, tools, facts, embedding, verifier; none: there was no other, unknown: nothing could; dropped: too many waited, or it was too large).",
		}, []string{"by"}),
		verified: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_semantic_verified_total", Help: "Questions about which a verifier was asked before a similar one's answer was served (same, another, failed).",
		}, []string{"verdict"}),
		posted: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_semantic_upstream_requests_total", Help: "Requests of the gateway's own to models that embed or verify, which nobody is charged for (ok, failed).",
		}, []string{"model", "outcome"}),
	}
	r.MustRegister(m.compared, m.verified, m.posted)
	return m
}
