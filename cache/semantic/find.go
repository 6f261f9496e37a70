package semantic

import (
	"slices"
	"time"

	"headgate/cache"
	"headgate/cache/guard"
	"headgate/cache/threshold"
)

const (
	searchEf = 64
	// searchFirst neighbours are asked for; where too many of them will not do, searchMore.
	searchFirst = 12
	searchMore  = 64
	// maxCandidates is how many of those that will do guards look at, the nearest first.
	maxCandidates = 16
	// probeFrom is the similarity from which a pair that guards refuse, or of which less than probeOverlap of the
	// words agree, looks like an attempt to collide.
	probeFrom    = 0.97
	probeOverlap = 0.2
)

// The reasons for misses that are not the threshold's, constant for logs.
const (
	whyScopes    = "too many surfaces are counted"
	whyEmpty     = "nothing was asked there before"
	whyDimension = "the partition has vectors of another dimension"
	whyRead      = "guards cannot read the question"
	whyFar       = "no neighbour will do"
	whyGuards    = "guards refuse the neighbours"
	whyLeast     = "below the least similarity that the client takes"
	whyProbe     = "near in its vector and far in its words"
	whyBody      = "the stored answer is damaged"
	whyVerified  = "the verifier takes the questions for one"
	whyRefuted   = "the verifier does not take the questions for one"
)

// finding is what find found.
type finding struct {
	decision   threshold.Decision // Action and Why as they became
	shadow     bool
	e          *entry       // the candidate; nil for none
	answer     *cache.Entry // of the candidate, where it is to be served or compared
	id         uint64       // of the candidate, or of the nearest that guards refuse
	similarity float64      // of that
	refused    []guard.Reason
	probe      bool // it looks like an attempt to collide
	borderline bool
	pending    bool // who asked says what becomes of it
	age        time.Duration
}

// neighbor is an entry that will do but for guards and threshold.
type neighbor struct {
	e          *entry
	similarity float64
	class      uint64
}

// find looks for the answer to a similar question. It makes no partition.
func (s *shard) find(now int64, q *Question) finding {
	s.mu.Lock()
	sc := s.scopeOf(scopeKey{q.Tenant, q.Surface, q.Embedder}, &q.Policy, now)
	p := s.partitions[q.Partition]
	if p != nil && sc != nil && p.scope == sc {
		sc.tenant.parts.MoveToFront(p.used)
	}
	s.mu.Unlock()
	f, question := finding{shadow: q.Policy.Mode == threshold.Shadow}, guard.Parse(q.Text)
	switch {
	case sc == nil:
		f.decision.Why = whyScopes
		return f
	case question.Unreadable():
		f.decision.Why = whyRead
	case p == nil:
		f.decision.Why = whyEmpty
	case p.place != place{q.Partition, q.Tenant, q.Surface, q.Embedder} || p.dim != len(q.Vector):
		f.decision.Why = whyDimension
	default:
		f.decision.Why = whyFar
		s.judge(now, &f, sc, q, question, s.near(now, p, q))
	}
	f.pending = f.borderline && q.Verify && f.decision.Action == threshold.Serve
	s.use(f.e, f.decision.Action)
	sc.count(&f, q)
	if !f.pending {
		s.hit(f.e, f.decision.Action, f.decision.Cell)
	}
	return f
}

// near is the nearest entries that are alive, valid and have the tags, the nearest first.
func (s *shard) near(now int64, p *partition, q *Question) []neighbor {
	var out []neighbor
	for _, k := range [...]int{searchFirst, searchMore} {
		found := p.index.Search(nil, q.Vector, k, max(k, searchEf), nil)
		out = make([]neighbor, 0, len(found))
		s.mu.Lock()
		for _, n := range found {
			if e := s.entries[n.ID]; e != nil && e.p == p {
				out = append(out, neighbor{e, min(max(float64(n.Similarity), -1), 1), e.class})
			}
		}
		s.mu.Unlock()
		out = slices.DeleteFunc(out, func(n neighbor) bool { return s.unfit(now, n.e) || !n.e.has(q.Tags) })
		if len(out) >= threshold.MaxNeighbors || len(found) < k { // there are enough, or no more
			break
		}
	}
	return out[:min(len(out), maxCandidates)]
}

// unfit says whether an entry is over or was invalidated, and drops one that is.
func (s *shard) unfit(now int64, e *entry) bool {
	count := &s.counts.expired
	if e.dies > now {
		if s.cfg.valid(&e.about) {
			return false
		}
		count = &s.counts.invalid
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(e, count)
	return true
}

// judge has guards and the threshold decide about the neighbours.
func (s *shard) judge(now int64, f *finding, sc *scope, q *Question, question *guard.Text, near []neighbor) {
	if len(near) == 0 {
		return
	}
	ev := threshold.Evidence{Pool: sc.pool, NoAudit: q.Only}
	for i, n := range near {
		if i >= threshold.MaxNeighbors && f.e != nil {
			break // further ones are of use as candidates only
		}
		v := question.Compare(n.e.parsed)
		switch {
		case v.Allowed() && f.e == nil:
			f.e = n.e
			ev.Similarity, ev.Answer, ev.Own = n.similarity, n.class, &n.e.obs
		case !v.Allowed() && f.refused == nil:
			f.refused, f.id, f.similarity = v.Refused, n.e.id, n.similarity
		}
		if i < threshold.MaxNeighbors {
			ev.Neighbors = append(ev.Neighbors, threshold.Neighbor{Similarity: n.similarity, Answer: n.class, Refused: !v.Allowed()})
		}
	}
	if f.refused != nil {
		f.probe = f.similarity >= probeFrom
		sc.refusedAt(f.similarity)
	}
	if f.e == nil {
		f.decision.Why = whyGuards
		return
	}
	f.id, f.similarity, f.age = f.e.id, ev.Similarity, time.Duration(max(now-f.e.filled, 0))
	sc.mu.Lock()
	sc.configure(&q.Policy)
	f.decision = q.Policy.Decide(&ev, sc.budget, sc.rng)
	sc.mu.Unlock()
	f.tighten(q, question)
	if f.decision.Action == threshold.Miss {
		return
	}
	if f.answer = f.e.plain(); f.answer == nil {
		f.decision.Action, f.decision.Why = threshold.Miss, whyBody
		s.mu.Lock()
		s.drop(f.e, &s.counts.invalid)
		s.mu.Unlock()
	}
}

// tighten takes back what was decided where something else speaks against it.
func (f *finding) tighten(q *Question, question *guard.Text) {
	d := &f.decision
	collides := f.similarity >= probeFrom && question.Shared(f.e.parsed) < probeOverlap
	f.probe = f.probe || collides
	switch {
	case !d.WouldHit():
	case q.Least >= 1 || f.similarity < q.Least:
		d.Action, d.Why = threshold.Explore, whyLeast
	case collides:
		d.Action, d.Why = threshold.Explore, whyProbe
	case f.shadow && d.Action == threshold.Serve:
		d.Action = threshold.Audit
	}
	if d.Action == threshold.Serve {
		v := d.Confidence
		if q.Policy.Mode == threshold.Static {
			v = f.similarity
		}
		f.borderline = v-d.Threshold < (1-d.Threshold)/2 // nearer to where it would be none than to certainty
	}
}

// use notes that an entry was of use.
func (s *shard) use(e *entry, a threshold.Action) {
	if e == nil || a == threshold.Miss {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.gone && !s.closed {
		e.p.scope.tenant.used.MoveToFront(e.used)
	}
}

// hit remembers by what an entry was served.
func (s *shard) hit(e *entry, a threshold.Action, c threshold.Cell) {
	if e == nil || a != threshold.Serve {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(e.hits) == keptHits {
		copy(e.hits, e.hits[1:])
		e.hits[keptHits-1] = c
	} else {
		e.hits = append(e.hits, c)
	}
}

// lesson is what Learn brings to where a partition is.
type lesson struct {
	place  place
	once   uint64 // 0: it is not said twice
	policy threshold.Policy

	id         uint64 // of the candidate; 0: there was none
	similarity float64
	action     threshold.Action
	cell       threshold.Cell
	label      Label
	unaudited  bool // beside settles
	settles    bool // it says what became of an answer that nothing counted, by action, and nothing else

	entry  *cache.Entry // nil: it may not be kept
	text   string
	vector []float32
	came   int64 // when: the entry's age is as of then
}

// settle counts what became of an answer that find left uncounted.
func (s *shard) settle(sc *scope, e *entry, l *lesson) {
	sc.mu.Lock()
	sc.configure(&l.policy)
	sc.became(l.action, l.cell, l.similarity, l.unaudited)
	sc.mu.Unlock()
	s.hit(e, l.action, l.cell)
}

// learn takes a label and, where it is another answer, or is asked by the same words, keeps the model's.
func (s *shard) learn(now int64, l *lesson) outcome {
	s.mu.Lock()
	if s.closed || l.once != 0 && !s.once.add(l.once, struct{}{}) {
		s.mu.Unlock()
		return keptNewer
	}
	sc := s.scopeOf(l.place.scope(), &l.policy, now)
	e := s.entries[l.id]
	if e != nil && e.p.place != l.place {
		e = nil
	}
	class, not, of := uint64(0), uint64(0), uint64(0)
	if e != nil {
		of = e.class
	}
	switch {
	case e == nil || !l.label.Known:
	case l.label.Same:
		class = e.class
	default:
		not = e.class
	}
	p := s.partitions[l.place.key]
	id := s.cfg.rand.Uint64()
	again := p != nil && p.place == l.place && p.texts[textHash(s.seed, l.text)] != nil
	s.mu.Unlock()
	if sc == nil {
		return notRoom
	}
	if l.settles {
		s.settle(sc, e, l)
		return kept
	}
	if l.id != 0 && l.action != threshold.Miss {
		s.label(sc, e, of, l)
	}
	compared := l.id != 0 && l.action != threshold.Miss
	if l.entry == nil || !again && compared && !l.policy.Inserts(l.similarity, l.label.Same, l.label.Known) {
		return kept
	}
	kept := *l.entry
	kept.Age = l.age(now)
	return s.insert(now, &l.place, &l.policy, &fresh{
		id: id, text: l.text, vector: l.vector, entry: &kept, class: class, not: not, answer: l.label.AnswerHash,
		meaning: quantised(l.label.AnswerVector), answers: l.label.Answers,
	}, false)
}

// answer is the hash of the candidate's answer, as far as it is known; e is the candidate, nil where it is gone.
func (l *lesson) answer(e *entry) uint64 {
	switch {
	case e != nil:
		return e.answer
	case l.label.Same:
		return l.label.AnswerHash
	}
	return 0
}

// label counts what a comparison found: for the surface, whatever has become of the entry, and for the entry, whose class it is
// given; 0 where it is gone.
func (s *shard) label(sc *scope, e *entry, class uint64, l *lesson) {
	sc.mu.Lock()
	switch {
	case !l.label.Known:
		sc.tally.unknown++
		if l.action == threshold.Audit {
			sc.budget.Unlabelled()
		}
		sc.mu.Unlock()
		return
	case l.label.Same:
		sc.tally.same++
	default:
		sc.tally.different++
	}
	sc.pool.Add(l.cell, l.label.Same, class, l.answer(e))
	if l.action == threshold.Audit {
		sc.budget.Label(l.label.Same)
	}
	n := int64(0)
	if e != nil {
		e.obs.Add(l.similarity, l.cell, l.label.Same)
		e.changed.Add(1)
		n = int64(e.obs.Bytes())
	}
	sc.mu.Unlock()
	if e == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.gone && !s.closed {
		s.charge(sc, n-e.tables)
		e.tables = n
	}
}
