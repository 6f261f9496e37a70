package semantic

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"

	"headgate/cache/threshold"
)

const (
	// maxScopes bounds what is counted apart. What comes beyond has no semantic cache.
	maxScopes = 4096
	// scopeFor is how long one without entries is kept that nobody asks.
	scopeFor = int64(24 * 3600 * 1e9)
	// peerFor is how long the last word of a node that is heard of no more counts.
	peerFor = int64(3600 * 1e9)
)

// scopeKey names what is counted together.
type scopeKey struct{ tenant, surface, embedder string }

// scope holds what was found out about one (tenant, surface, embedder), on this node and, by its last word, on each other.
type scope struct {
	key    scopeKey
	tenant *tenant

	// Under shard.mu.
	partitions int
	entries    int
	bytes      int64
	tables     int64 // of bytes, what pool and budget took when that was looked at last
	asked      int64 // when, the last time
	tellers    map[string]int64

	pool *threshold.Pool

	mu     sync.Mutex // over what follows, and the observations of the scope's entries; taken after no other but a partition's
	budget *threshold.Budget
	policy threshold.Policy
	rng    *rand.Rand
	tally  tally
	fallen bool // no hit was allowed when that was looked at last
}

// tally is what Stats tells of a scope.
type tally struct {
	actions                                    [threshold.Serve + 1]int64
	same, different, unknown, reported, probes int64
	servedAt, refusedAt                        [Bins]int64
}

func newScope(k scopeKey, t *tenant, p *threshold.Policy, seed uint64) *scope {
	return &scope{
		key: k, tenant: t, tellers: map[string]int64{}, pool: threshold.NewPool(), budget: threshold.NewBudget(p), policy: *p,
		rng: rand.New(rand.NewPCG(seed, 1)),
	}
}

// configure takes over a policy that is another than before. The caller holds sc.mu.
func (sc *scope) configure(p *threshold.Policy) {
	if sc.policy != *p {
		sc.policy = *p
		sc.budget.Configure(p)
	}
}

// bin is the place of a similarity in a histogram.
func bin(similarity float64) int {
	return max(0, min(int(similarity*Bins), Bins-1))
}

// count counts a question by what became of it, where that is known by now.
func (sc *scope) count(f *finding, q *Question) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.configure(&q.Policy)
	if f.probe {
		sc.tally.probes++
	}
	switch {
	case f.pending:
	case f.e == nil:
		sc.budget.Count(f.decision.Action)
		sc.tally.actions[f.decision.Action]++
	default:
		sc.became(f.decision.Action, f.decision.Cell, f.similarity, f.decision.Unaudited)
	}
}

// became counts a question that had a candidate. unaudited: had it been served to who can ask a model, it would have been
// audited. The caller holds sc.mu.
func (sc *scope) became(a threshold.Action, c threshold.Cell, similarity float64, unaudited bool) {
	sc.budget.Count(a)
	sc.tally.actions[a]++
	sc.pool.Seen(c)
	if a == threshold.Serve {
		sc.tally.servedAt[bin(similarity)]++
		if unaudited {
			sc.budget.Unlabelled()
		}
	}
}

func (sc *scope) refusedAt(similarity float64) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.tally.refusedAt[bin(similarity)]++
}

// fill is the scope's own part of what Stats tells of it.
func (sc *scope) fill(s *Surface) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	t := &sc.tally
	s.Missed, s.Explored, s.Audited, s.Served = t.actions[threshold.Miss], t.actions[threshold.Explore], t.actions[threshold.Audit], t.actions[threshold.Serve]
	s.Same, s.Different, s.Unknown, s.Reported, s.Probes = t.same, t.different, t.unknown, t.reported, t.probes
	s.ServedAt, s.RefusedAt = t.servedAt, t.refusedAt
	s.Budget = sc.budget.Snapshot()
}

// silence forgets what a node has told. The caller holds shard.mu.
func (sc *scope) silence(peer string) {
	delete(sc.tellers, peer)
	sc.pool.Forget(peer)
	sc.budget.Forget(peer)
}

// weigh counts what a scope's sketches take by now. The caller holds mu.
func (s *shard) weigh(sc *scope) {
	n := int64(sc.pool.Bytes() + sc.budget.Bytes())
	s.chargeScope(sc, n-sc.tables)
	sc.tables = n
}

// chargeScope counts bytes that no eviction of entries gives back. The caller holds mu.
func (s *shard) chargeScope(sc *scope, n int64) {
	s.charge(sc, n)
	s.scopeBytes += n
	sc.tenant.scopeBytes += n
}

// crowded says whether sketches take more than half of what there is, for a tenant or all, had they so many bytes more. The
// caller holds mu.
func (s *shard) crowded(t *tenant, more int64) bool {
	return t.scopeBytes+more > s.cfg.tenantBytes/2 || s.scopeBytes+more > s.cfg.maxBytes/2
}

// trim forgets scopes that nobody asked for longest, with their entries, until sketches take no more than half of
// what there is; of a tenant's last one only what other nodes told. The caller holds mu, and tidies.
func (s *shard) trim() {
	scopes := slices.SortedFunc(maps.Values(s.scopes), func(a, b *scope) int { return cmp.Compare(a.asked, b.asked) })
	for i, sc := range scopes {
		switch {
		case !s.crowded(sc.tenant, 0):
		case sc.tenant.scopes > 1 || s.scopeBytes > s.cfg.maxBytes/2 && i < len(scopes)-1:
			s.emptyScope(sc)
		default:
			for peer := range sc.tellers {
				sc.silence(peer)
			}
			s.weigh(sc)
		}
	}
}

// emptyScope forgets a scope with all its entries, unless one is just being put in. The caller holds mu.
func (s *shard) emptyScope(sc *scope) {
	for _, p := range s.partitions {
		if p.scope != sc {
			continue
		}
		for _, e := range p.texts {
			s.drop(e, &s.counts.evicted)
		}
	}
	if sc.partitions == 0 {
		s.forgetScope(sc)
	}
}

// trip is a scope that serves no more hits, or does again.
type trip struct {
	scopeKey
	fallen bool
	why    threshold.Snapshot
}

// trips are those since the last look, and how many there are that serve no hits.
func (s *shard) trips() (changed []trip, fallen int) {
	s.mu.Lock()
	scopes := make([]*scope, 0, len(s.scopes))
	for _, sc := range s.scopes {
		scopes = append(scopes, sc)
	}
	s.mu.Unlock()
	for _, sc := range scopes {
		sc.mu.Lock()
		is := !sc.budget.Allowed()
		if is {
			fallen++
		}
		if is != sc.fallen {
			sc.fallen = is
			changed = append(changed, trip{sc.key, is, sc.budget.Snapshot()})
		}
		sc.mu.Unlock()
	}
	return changed, fallen
}
