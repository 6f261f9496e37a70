package semantic

import (
	"container/heap"
	"container/list"
	"context"
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"sync"

	"headgate/cache"
	"headgate/cache/hnsw"
	"headgate/cache/threshold"
)

const (
	// partitionFixed is what a partition takes beside its index and entries: two maps, places in lists.
	partitionFixed = 1 << 10
	// scopeFixed is about what a scope takes, its histograms included, beside its pool and its budget.
	scopeFixed = 8 << 10
	// maxLately is how many learnings are remembered, so that none counts twice, and how many reports.
	maxLately = 8192
	// insertBurst is how many seconds' worth of a tenant's inserts may come at once.
	insertBurst = 10
	// maxDeaths is how many entries one sweep takes at most.
	maxDeaths = 4096
	// tidyRounds is how often indices are tidied in a row: that can make them evict, where there is no byte to spare.
	tidyRounds  = 4
	forgetEvery = int64(60 * 1e9)
	// slackFrom is the least number of places from which an index is made anew where more than half of them are free.
	slackFrom = 256
)

// shardConfig is the bounds of a shard, and what it asks.
type shardConfig struct {
	maxBytes      int64
	tenantBytes   int64
	maxPartitions int
	inserts       float64 // a second and tenant
	crossover     func(dim int) int
	valid         func(*cache.Entry) bool
	rand          *rand.Rand
}

// shard is what one node keeps. It does no I/O and reads no clock. Safe for concurrent use.
//
// Locks are taken in this order: partition.write, shard.mu, scope.mu. Nothing is parsed, packed or searched under mu. An
// index has locks of its own and may be behind: ids that it finds and entries has not are of entries that went or are
// not there yet.
type shard struct {
	cfg  shardConfig
	seed maphash.Seed

	mu         sync.Mutex
	closed     bool
	partitions map[cache.Key]*partition
	entries    map[uint64]*entry
	tenants    map[string]*tenant
	scopes     map[scopeKey]*scope
	deaths     byDeath
	bytes      int64
	scopeBytes int64                   // those of scopes without entries
	dirty      map[*partition]struct{} // whose index has what is gone
	slack      map[*partition]struct{} // whose index has more room than it needs
	once       lately[struct{}]        // learnings
	reported   lately[*report]         // by ids of entries that somebody said are wrong: they may be on their way between nodes
	forgot     int64                   // when forget was called last
	counts     counts
}

// counts are since the shard was made.
type counts struct {
	evicted, expired, invalid, replaced, wrong, movedOut int64
	dropped                                              [outcomes]int64
}

// tenant is what one tenant takes.
type tenant struct {
	name       string
	bytes      int64
	scopeBytes int64 // those of scopes without entries
	scopes     int
	used       *list.List // *entry, in order of use, the latest first
	parts      *list.List // *partition, likewise
	tokens     float64    // inserts that it may make
	filled     int64      // when they were counted
}

// partition is entries that may be compared.
type partition struct {
	place place
	scope *scope
	dim   int
	index *hnsw.Index
	write sync.Mutex // held by who writes the index; taken before shard.mu

	// Under shard.mu.
	gone  bool
	pins  int               // writers that will put something into it
	texts map[uint64]*entry // by hash of what was asked
	dead  []uint64          // ids to be taken out of the index
	bytes int64             // of the index and its own, as counted
	used  *list.Element
}

// outcome is what became of an entry that was to be kept.
type outcome uint8

const (
	kept      outcome = iota
	keptNewer         // what is there is newer
	notKept           // it is over, or was invalidated
	notLarge          // it is larger than a tenant's share
	notOften          // the tenant inserts too often
	notPlace          // the partition is another's, or of other dimensions
	notVector         // the index refused it
	notRoom           // the scopes are full, or the shard is closed
	notRead           // guards cannot read the question: no other would ever get the answer
	outcomes
)

func (o outcome) String() string {
	return [...]string{"kept", "newer", "over", "large", "rate", "place", "vector", "room", "unfit"}[min(o, outcomes-1)]
}

func newShard(cfg shardConfig) *shard {
	return &shard{
		cfg: cfg, seed: maphash.MakeSeed(), partitions: map[cache.Key]*partition{}, entries: map[uint64]*entry{},
		tenants: map[string]*tenant{}, scopes: map[scopeKey]*scope{}, dirty: map[*partition]struct{}{}, slack: map[*partition]struct{}{},
	}
}

// scopeOf finds or makes one; nil where there are too many. The caller holds mu.
func (s *shard) scopeOf(k scopeKey, p *threshold.Policy, now int64) *scope {
	if s.closed {
		return nil
	}
	if sc := s.scopes[k]; sc != nil {
		sc.asked = now
		return sc
	}
	t := s.tenants[k.tenant]
	if t == nil {
		t = &tenant{name: k.tenant, used: list.New(), parts: list.New(), tokens: s.cfg.inserts * insertBurst, filled: now}
	}
	if s.full(t) {
		if s.forgetScopes(now, t); s.full(t) {
			return nil
		}
	}
	s.tenants[k.tenant] = t
	t.scopes++
	sc := newScope(k, t, p, s.cfg.rand.Uint64())
	sc.asked = now
	s.scopes[k] = sc
	s.chargeScope(sc, scopeFixed)
	return sc
}

// forgetScopes drops those that have no entries and were not asked for in a day, or else, while there is no place for one more of a
// tenant, the one of them that was not for longest. The caller holds mu.
func (s *shard) forgetScopes(now int64, t *tenant) {
	own := t.scopeBytes+scopeFixed > s.cfg.tenantBytes/2 // only the tenant's can make place
	var oldest *scope
	for _, sc := range s.scopes {
		switch {
		case sc.partitions > 0:
		case now-sc.asked >= scopeFor:
			s.forgetScope(sc)
		case own && sc.tenant != t:
		case oldest == nil || sc.asked < oldest.asked:
			oldest = sc
		}
	}
	if oldest != nil && s.full(t) {
		s.forgetScope(oldest)
	}
}

// full says whether there is no place for one more scope of a tenant. The caller holds mu.
func (s *shard) full(t *tenant) bool { return len(s.scopes) >= maxScopes || s.crowded(t, scopeFixed) }

func (s *shard) forgetScope(sc *scope) {
	delete(s.scopes, sc.key)
	s.chargeScope(sc, -scopeFixed-sc.tables)
	sc.tables = 0
	if sc.tenant.scopes--; sc.tenant.scopes == 0 {
		delete(s.tenants, sc.tenant.name)
	}
}

// charge counts bytes. The caller holds mu.
func (s *shard) charge(sc *scope, n int64) {
	s.bytes += n
	sc.bytes += n
	sc.tenant.bytes += n
}

// recharge counts what an index takes by now. The caller holds mu.
func (s *shard) recharge(p *partition) {
	if p.gone {
		return
	}
	n := p.index.Bytes() + partitionFixed
	s.charge(p.scope, n-p.bytes)
	p.bytes = n
}

// allow takes one insert of what a tenant may make. The caller holds mu.
func (s *shard) allow(t *tenant, now int64) bool {
	t.tokens = min(t.tokens+float64(max(now-t.filled, 0))/1e9*s.cfg.inserts, s.cfg.inserts*insertBurst)
	t.filled = now
	if t.tokens < 1 {
		return false
	}
	t.tokens--
	return true
}

// pin finds or makes the partition that an entry is to go to, and keeps it from going until unpin.
func (s *shard) pin(pl *place, pol *threshold.Policy, f *fresh, index hnsw.Config, moved bool, now int64) (*partition, outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sc := s.scopeOf(pl.scope(), pol, now)
	if sc == nil {
		return nil, notRoom
	}
	p, dim := s.partitions[pl.key], len(f.vector)
	if _, wrong := s.reported.has[f.id]; wrong {
		return nil, notKept
	}
	if p != nil && (p.place != *pl || p.dim != dim) {
		return nil, notPlace
	}
	if !moved && !s.allow(sc.tenant, now) {
		return nil, notOften
	}
	if p == nil {
		if len(s.partitions) >= s.cfg.maxPartitions && !s.emptyOne() {
			return nil, notRoom
		}
		index.Seed = s.cfg.rand.Uint64()
		p = &partition{place: *pl, scope: sc, dim: dim, texts: map[uint64]*entry{}, index: hnsw.New(index)}
		s.partitions[pl.key] = p
		p.used = sc.tenant.parts.PushFront(p)
		sc.partitions++
		s.recharge(p)
	}
	p.pins++
	return p, kept
}

// unpin undoes pin. The caller holds mu.
func (s *shard) unpin(p *partition) {
	p.pins--
	s.maybeGone(p)
}

// maybeGone forgets a partition that has nothing any more. The caller holds mu.
func (s *shard) maybeGone(p *partition) {
	if p.gone || p.pins > 0 || len(p.texts) > 0 {
		return
	}
	p.gone, p.dead = true, nil
	delete(s.partitions, p.place.key)
	delete(s.dirty, p)
	delete(s.slack, p)
	p.scope.tenant.parts.Remove(p.used)
	p.scope.partitions--
	s.charge(p.scope, -p.bytes)
	p.bytes = 0
}

// emptyOne makes room for a partition: of the tenant that has most the one that was used least lately goes. The caller
// holds mu.
func (s *shard) emptyOne() bool {
	var most *tenant
	for _, t := range s.tenants {
		if most == nil || t.parts.Len() > most.parts.Len() || t.parts.Len() == most.parts.Len() && t.name < most.name {
			most = t
		}
	}
	if most == nil {
		return false
	}
	for el := most.parts.Back(); el != nil; el = el.Prev() {
		p, _ := el.Value.(*partition)
		if p.pins > 0 {
			continue
		}
		for _, e := range p.texts {
			s.drop(e, &s.counts.evicted)
		}
		return true
	}
	return false
}

// drop forgets an entry: all of it is out of reach at once, its vector's place is free when the index is tidied. The
// caller holds mu.
func (s *shard) drop(e *entry, count *int64) {
	if e.gone || s.closed {
		return
	}
	e.gone = true
	*count++
	p := e.p
	delete(s.entries, e.id)
	if p.texts[e.hash] == e {
		delete(p.texts, e.hash)
	}
	heap.Remove(&s.deaths, e.heapAt)
	p.scope.tenant.used.Remove(e.used)
	p.scope.entries--
	s.charge(p.scope, -e.size-e.tables)
	s.bury(p, e.id)
	s.maybeGone(p)
}

// bury has an id taken out of the index, later. The caller holds mu.
func (s *shard) bury(p *partition, id uint64) {
	if p.gone {
		return
	}
	p.dead = append(p.dead, id)
	s.dirty[p] = struct{}{}
}

// put makes an entry, whose vector is in the index, one that is found. The caller holds mu and e.p.write.
func (s *shard) put(e *entry) outcome {
	p := e.p
	if old := p.texts[e.hash]; old != nil {
		same := old.answer != 0 && old.answer == e.answer || old.class == e.class
		if old.filled > e.filled {
			if same && old.text == e.text {
				s.unite(old, e)
			}
			s.bury(p, e.id)
			return keptNewer
		}
		if same && old.text == e.text {
			s.unite(e, old)
		}
		s.drop(old, &s.counts.replaced)
	}
	s.entries[e.id] = e
	p.texts[e.hash] = e
	heap.Push(&s.deaths, e)
	e.used = p.scope.tenant.used.PushFront(e)
	p.scope.tenant.parts.MoveToFront(p.used)
	p.scope.entries++
	s.charge(p.scope, e.size+e.tables)
	return kept
}

// unite adds to an entry what was observed of another with the same question and answer. The caller holds mu; where to is
// in the shard already its bytes are counted.
func (s *shard) unite(to, from *entry) {
	sc := to.p.scope
	sc.mu.Lock()
	to.obs.Merge(&from.obs)
	n := int64(to.obs.Bytes())
	sc.mu.Unlock()
	if s.entries[to.id] == to {
		s.charge(sc, n-to.tables)
	}
	to.tables = n
	to.changed.Add(1)
}

// makeRoom evicts what was used least lately: of a tenant that takes more than its share; and where all take too
// much, of the one that takes most, which who takes less than an equal part never is. The caller holds mu.
func (s *shard) makeRoom(t *tenant) {
	for t.bytes > s.cfg.tenantBytes && s.evict(t) {
	}
	for s.bytes > s.cfg.maxBytes {
		var most *tenant
		for _, t := range s.tenants {
			if t.used.Len() > 0 && (most == nil || t.bytes > most.bytes || t.bytes == most.bytes && t.name < most.name) {
				most = t
			}
		}
		if most == nil || !s.evict(most) {
			return
		}
	}
}

func (s *shard) evict(t *tenant) bool {
	el := t.used.Back()
	if el == nil || s.closed {
		return false
	}
	e, _ := el.Value.(*entry)
	s.drop(e, &s.counts.evicted)
	return true
}

// insert keeps an answer. moved: it was another node's, which is bound by no rate and gives way to what is newer.
func (s *shard) insert(now int64, pl *place, pol *threshold.Policy, f *fresh, moved bool) outcome {
	o := s.insertOne(now, pl, pol, f, moved)
	if o != kept {
		s.mu.Lock()
		s.counts.dropped[o]++
		s.mu.Unlock()
	}
	return o
}

func (s *shard) insertOne(now int64, pl *place, pol *threshold.Policy, f *fresh, moved bool) outcome {
	if f.entry.Tenant != pl.tenant || f.entry.Surface != pl.surface {
		return notPlace
	}
	e, err := newEntry(f, textHash(s.seed, f.text), now)
	switch {
	case err != nil:
		return notVector
	case e.parsed.Unreadable():
		return notRead
	case e.dies <= now, !s.cfg.valid(&e.about):
		return notKept
	case e.size > s.cfg.tenantBytes/4:
		return notLarge
	}
	index := hnsw.Config{Dim: len(f.vector), Crossover: s.cfg.crossover(len(f.vector))} // which may measure
	p, o := s.pin(pl, pol, f, index, moved, now)
	if p == nil {
		return o
	}
	e.p = p
	p.write.Lock()
	o = s.write(e, f, moved)
	p.write.Unlock()
	s.tidy()
	return o
}

// write puts an entry into its pinned partition. The caller holds e.p.write.
func (s *shard) write(e *entry, f *fresh, moved bool) outcome {
	p := e.p
	s.mu.Lock()
	had := s.entries[e.id]
	s.mu.Unlock()
	if had != nil { // a move that was not acknowledged, once more: observations that came since are its giver's
		s.mu.Lock()
		defer s.mu.Unlock()
		defer s.unpin(p)
		if !moved || had.p != p || had.text != e.text {
			return notPlace
		}
		return s.again(had, e)
	}
	if e.class == 0 {
		class := s.classOf(p, e, f)
		s.mu.Lock()
		e.class = class
		s.mu.Unlock()
	}
	err := p.index.Insert(e.id, f.vector)
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.unpin(p)
	s.recharge(p)
	switch {
	case errors.Is(err, hnsw.ErrExists): // it went, and its vector not yet
		return notPlace
	case err != nil:
		return notVector
	case s.closed:
		return notRoom
	}
	o := s.put(e)
	s.makeRoom(p.scope.tenant)
	return o
}

// again takes over what the giver of an entry has observed of it since it gave it first. The caller holds mu.
func (s *shard) again(had, e *entry) outcome {
	sc := had.p.scope
	sc.mu.Lock()
	if e.obs.Len() > had.obs.Len() {
		had.obs = e.obs
	}
	n := int64(had.obs.Bytes())
	sc.mu.Unlock()
	if !had.gone {
		s.charge(sc, n-had.tables)
	}
	had.tables = n
	return kept
}

// classOf is the class of an answer of which nobody said that it is another's: that of the nearest neighbour whose answer has
// the same words or the same meaning, or a new one. The words' own hash is as good a number as any, and the same on each
// node.
func (s *shard) classOf(p *partition, e *entry, f *fresh) uint64 {
	if e.answer == 0 && len(e.meaning) == 0 {
		return e.id
	}
	near := p.index.Search(nil, f.vector, threshold.MaxNeighbors, searchEf, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range near {
		other := s.entries[n.ID]
		if other == nil || other.p != p || other.class == f.not {
			continue
		}
		if e.answer != 0 && other.answer == e.answer || f.answers > 0 && alike(other.meaning, e.meaning) >= f.answers {
			return other.class
		}
	}
	if e.answer == 0 || e.answer == f.not {
		return e.id
	}
	return e.answer
}

// tidy takes out of the indices what is gone. No lock may be held.
func (s *shard) tidy() {
	for range tidyRounds {
		s.mu.Lock()
		parts := make([]*partition, 0, len(s.dirty))
		for p := range s.dirty {
			parts = append(parts, p)
		}
		clear(s.dirty)
		s.mu.Unlock()
		if len(parts) == 0 {
			return
		}
		for _, p := range parts {
			p.write.Lock()
			s.tidyOne(p)
			p.write.Unlock()
		}
	}
}

// tidyOne does so for one partition. The caller holds p.write.
func (s *shard) tidyOne(p *partition) {
	s.mu.Lock()
	dead := p.dead
	p.dead = nil
	s.mu.Unlock()
	for _, id := range dead {
		p.index.Delete(id)
	}
	st := p.index.Stats()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recharge(p)
	s.makeRoom(p.scope.tenant) // an index remembers what is to be mended in it
	if !p.gone && st.Slots >= slackFrom && st.Len < st.Slots/2 {
		s.slack[p] = struct{}{}
	}
}

// shrink makes those indices anew that hold much more memory than they need, which takes as long as inserting what they
// have. Others read and write meanwhile.
func (s *shard) shrink(ctx context.Context) {
	s.mu.Lock()
	parts := make([]*partition, 0, len(s.slack))
	for p := range s.slack {
		parts = append(parts, p)
	}
	clear(s.slack)
	s.mu.Unlock()
	for _, p := range parts {
		if p.index.Rebuild(ctx) != nil {
			continue // it is under way, or ctx has ended
		}
		s.mu.Lock()
		s.recharge(p)
		s.mu.Unlock()
	}
}

// sweep drops what is over. It tells whether there may be more.
func (s *shard) sweep(now int64) (more bool) {
	s.mu.Lock()
	for range maxDeaths {
		if len(s.deaths) == 0 || s.deaths[0].dies > now {
			break
		}
		s.drop(s.deaths[0], &s.counts.expired)
	}
	more = len(s.deaths) > 0 && s.deaths[0].dies <= now
	if now-s.forgot >= forgetEvery {
		s.forgot = now
		s.forget(now)
	}
	s.mu.Unlock()
	s.tidy()
	return more
}

// forget drops what nobody asked for in a long time, and words of nodes that are not heard of, and looks what pools and budgets
// take by now. The caller holds mu.
func (s *shard) forget(now int64) {
	for _, sc := range s.scopes {
		for peer, at := range sc.tellers {
			if now-at >= peerFor {
				sc.silence(peer)
			}
		}
		if sc.partitions == 0 && now-sc.asked >= scopeFor {
			s.forgetScope(sc)
			continue
		}
		s.weigh(sc)
	}
	s.trim()
	for _, t := range s.tenants {
		s.makeRoom(t)
	}
}

// close forgets all.
func (s *shard) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.partitions, s.entries, s.tenants, s.scopes = map[cache.Key]*partition{}, map[uint64]*entry{}, map[string]*tenant{}, map[scopeKey]*scope{}
	s.deaths, s.bytes, s.scopeBytes = nil, 0, 0
	clear(s.dirty)
	clear(s.slack)
}

// lately is the last maxLately numbers that were added, each with something. Its zero value is empty.
type lately[T any] struct {
	has  map[uint64]T
	ring []uint64
	at   int
}

// add tells whether a number is new.
func (l *lately[T]) add(n uint64, with T) bool {
	if _, ok := l.has[n]; ok {
		return false
	}
	if l.has == nil {
		l.has = map[uint64]T{}
	}
	if len(l.ring) < maxLately {
		l.ring = append(l.ring, n)
	} else {
		delete(l.has, l.ring[l.at])
		l.ring[l.at] = n
		l.at = (l.at + 1) % maxLately
	}
	l.has[n] = with
	return true
}

// surfaces is Stats.
func (s *shard) surfaces() []Surface {
	s.mu.Lock()
	var out []Surface
	scopes := make([]*scope, 0, len(s.scopes))
	for _, sc := range s.scopes {
		scopes = append(scopes, sc)
		out = append(out, Surface{
			Tenant: sc.key.tenant, Surface: sc.key.surface, Embedder: sc.key.embedder, Partitions: sc.partitions, Entries: sc.entries, Bytes: sc.bytes,
		})
	}
	s.mu.Unlock()
	for i, sc := range scopes {
		sc.fill(&out[i])
	}
	slices.SortFunc(out, bySurface)
	return out
}

// totals is what the shard holds and what it did.
type totals struct {
	counts
	entries, bytes, partitions int64
}

func (s *shard) totals() totals {
	s.mu.Lock()
	defer s.mu.Unlock()
	return totals{counts: s.counts, entries: int64(len(s.entries)), bytes: s.bytes, partitions: int64(len(s.partitions))}
}
