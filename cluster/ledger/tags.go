package ledger

import (
	"cmp"
	"container/list"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"headgate/cluster/ledger/ledgerpb"
)

// tagsAction is what the audit log calls an invalidation of tags.
const tagsAction = "cache.tags"

// tagged is a tag and the count at its last invalidation. It never changes.
type tagged struct {
	cacheName
	n uint64
}

// tagNode is where a tag stands in the two orders.
type tagNode struct {
	*tagged
	all, own *list.Element
}

// tagTable holds tags in the order of their last invalidation, which is that of the log: of all, and of each tenant.
// It belongs to the State, beside the Caches that others read.
type tagTable struct {
	at  map[cacheName]*tagNode
	all *list.List // of *tagNode
	own map[string]*list.List

	most, mostOwn, mostFloors int
}

func newTagTable() *tagTable {
	return &tagTable{
		at: map[cacheName]*tagNode{}, all: list.New(), own: map[string]*list.List{},
		most: MaxTags, mostOwn: MaxTags / 4, mostFloors: maxFloors,
	}
}

// put makes a tag the newest and gives what it was before, nil: unknown.
func (t *tagTable) put(tag *tagged) (before *tagged) {
	if n, ok := t.at[tag.cacheName]; ok {
		before, n.tagged = n.tagged, tag
		t.all.MoveToBack(n.all)
		t.own[tag.tenant].MoveToBack(n.own)
		return before
	}
	n := &tagNode{tagged: tag}
	own := t.own[tag.tenant]
	if own == nil {
		own = list.New()
		t.own[tag.tenant] = own
	}
	n.all, n.own = t.all.PushBack(n), own.PushBack(n)
	t.at[tag.cacheName] = n
	return nil
}

func (t *tagTable) remove(n *tagNode) {
	t.all.Remove(n.all)
	own := t.own[n.tenant]
	if own.Remove(n.own); own.Len() == 0 {
		delete(t.own, n.tenant)
	}
	delete(t.at, n.cacheName)
}

// spare is a tag beyond the bounds, the oldest of its tenant or of all; nil: there is none.
func (t *tagTable) spare(tenant string) *tagNode {
	if own := t.own[tenant]; own != nil && own.Len() > t.mostOwn {
		return own.Front().Value.(*tagNode)
	}
	if t.all.Len() > t.most {
		return t.all.Front().Value.(*tagNode)
	}
	return nil
}

// records are the tags, the oldest first.
func (t *tagTable) records() []*tagged {
	out := make([]*tagged, 0, t.all.Len())
	for e := t.all.Front(); e != nil; e = e.Next() {
		out = append(out, e.Value.(*tagNode).tagged)
	}
	return out
}

// cachesEdit makes the next Caches of a state, and keeps its hash.
type cachesEdit struct {
	s           *State
	next        Caches
	generations *spreading[generation]
	tags        *spreading[uint64]
	ownFloors   bool // next.floors is not shared yet
}

func (s *State) editCaches() *cachesEdit {
	e := &cachesEdit{s: s}
	if s.work.Caches != nil {
		e.next = *s.work.Caches
	}
	e.generations, e.tags = e.next.generations.edit(), e.next.tags.edit()
	return e
}

// done puts it in force.
func (e *cachesEdit) done() {
	e.next.generations, e.next.tags = e.generations.next, e.tags.next
	e.s.work.Caches = &e.next
}

func (e *cachesEdit) putGeneration(n cacheName, old, next generation) {
	if old.highest > 1 {
		e.s.hash.remove(e.s.enc.generation(n, old))
	}
	e.s.hash.add(e.s.enc.generation(n, next))
	e.generations.put(n, next)
}

func (e *cachesEdit) putTag(tag *tagged) {
	if before := e.s.tags.put(tag); before != nil {
		e.s.hash.remove(e.s.enc.tag(before))
	}
	e.s.hash.add(e.s.enc.tag(tag))
	e.tags.put(tag.cacheName, tag.n)
	e.next.forAll = e.next.forAll || tag.tenant == ""
}

// forget lets go of tags beyond the bounds. What has such a tag and is older than it was then does not hold any more,
// whether it was invalidated or not.
func (e *cachesEdit) forget(tenant string) {
	for n := e.s.tags.spare(tenant); n != nil; n = e.s.tags.spare(tenant) {
		e.s.hash.remove(e.s.enc.tag(n.tagged))
		e.s.tags.remove(n)
		e.tags.remove(n.cacheName)
		e.raiseFloor(n.tenant, n.n)
	}
}

func (e *cachesEdit) raiseFloor(tenant string, n uint64) {
	old := e.next.floors[tenant]
	if n <= e.next.floorOf(tenant) {
		return
	}
	e.next.forAll = e.next.forAll || tenant == ""
	if !e.ownFloors {
		if e.next.floors = maps.Clone(e.next.floors); e.next.floors == nil {
			e.next.floors = map[string]uint64{}
		}
		e.ownFloors = true
	}
	if old > 0 {
		e.s.hash.remove(e.s.enc.floor("tenant", tenant, old))
	}
	e.s.hash.add(e.s.enc.floor("tenant", tenant, n))
	if e.next.floors[tenant] = n; len(e.next.floors) > e.s.tags.mostFloors {
		e.oneFloor()
	}
}

// oneFloor makes the highest of the tenants' floors that of all tenants.
func (e *cachesEdit) oneFloor() {
	highest, all := e.next.floor, e.next.floors[""]
	for tenant, n := range e.next.floors { // sums and the highest: whatever the order
		if tenant != "" {
			e.s.hash.remove(e.s.enc.floor("tenant", tenant, n))
			highest = max(highest, n)
		}
	}
	if e.next.floor > 0 {
		e.s.hash.remove(e.s.enc.floor("all", "", e.next.floor))
	}
	e.s.hash.add(e.s.enc.floor("all", "", highest))
	if e.next.floor, e.next.floors = highest, map[string]uint64{}; all > 0 {
		e.next.floors[""] = all
	}
}

func (s *State) setGeneration(c *ledgerpb.SetGeneration) (bool, error) {
	n := cacheName{c.GetTenant(), c.GetSurface()}
	if len(n.tenant) > maxID || len(n.name) > maxID {
		return false, refuse(codeInvalid, "the names of tenants and surfaces have at most %d bytes", maxID)
	}
	old, known := s.work.Caches.generationOf(n)
	next := old
	switch g := c.GetGeneration(); {
	case g > old.highest:
		return false, refuse(codeInvalid, "generation %d of %s was never in force, the highest is %d: name an earlier one to bring it back, or none to raise it", g, n.surfaceOf(), old.highest)
	case g > 0:
		next.now = g
	case old.highest == math.MaxUint64:
		return false, refuse(codeFull, "the generations of %s are used up", n.surfaceOf())
	default:
		next = generation{old.highest + 1, old.highest + 1}
	}
	if s.raised = (&raised{next.now, old.now}); next == old {
		return false, nil
	}
	if generations, _ := s.work.Caches.Len(); !known && n != (cacheName{}) && generations >= MaxGenerations {
		s.raised = nil
		return false, refuse(codeFull, "%d generations were raised, which is the most: raise that of everything instead", MaxGenerations)
	}
	e := s.editCaches()
	e.putGeneration(n, old, next)
	e.done()
	s.record("cache.generation", n.surfaceOf(), fmt.Sprintf("generation %d", old.now), fmt.Sprintf("generation %d", next.now))
	return true, nil
}

func (s *State) invalidateTags(c *ledgerpb.InvalidateTags) (bool, error) {
	tenant, tags := c.GetTenant(), c.GetTags()
	switch i := slices.IndexFunc(tags, func(tag string) bool { return !ValidTag(tag) }); {
	case len(tags) == 0 || len(tags) > MaxTagsAtOnce:
		return false, refuse(codeInvalid, "there are %d tags; 1 to %d can be invalidated at once", len(tags), MaxTagsAtOnce)
	case len(tenant) > maxID:
		return false, refuse(codeInvalid, "the name of a tenant has at most %d bytes", maxID)
	case i >= 0:
		return false, refuse(codeInvalid, "%q is no tag: one has 1 to %d bytes, without white space and commas", cut(tags[i], MaxTag), MaxTag)
	}
	e := s.editCaches()
	e.next.count++
	for _, tag := range tags {
		e.putTag(&tagged{cacheName{tenant, tag}, e.next.count})
	}
	e.forget(tenant)
	e.done()
	who := "all tenants"
	if tenant != "" {
		who = "tenant " + tenant
	}
	s.tagTrail.add(s.entry(tagsAction, who, "", strings.Join(tags, ", ")))
	return true, nil
}

// surfaceOf names it as a generation's.
func (n cacheName) surfaceOf() string {
	switch {
	case n == cacheName{}:
		return "everything"
	case n.name == "":
		return "tenant " + n.tenant
	case n.tenant == "":
		return "surface " + n.name
	}
	return "surface " + n.name + " of tenant " + n.tenant
}

// writeCaches writes what is known of caches.
func (c *Capture) writeCaches(sw *snapshotWriter) {
	caches := c.facts.Caches
	if !caches.used() {
		return
	}
	if caches.count > 0 {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_CacheCount{CacheCount: &ledgerpb.CacheCount{
			Count: caches.count, Since: caches.since, Floor: caches.floor,
		}}})
	}
	for _, g := range caches.Generations() {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_CacheGeneration{CacheGeneration: &ledgerpb.CacheGeneration{
			Tenant: g.Tenant, Surface: g.Surface, Now: g.Now, Highest: g.Highest,
		}}})
	}
	for _, tenant := range slices.Sorted(maps.Keys(caches.floors)) {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_CacheFloor{CacheFloor: &ledgerpb.CacheFloor{Tenant: tenant, Count: caches.floors[tenant]}}})
	}
	for _, t := range c.tags {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_CacheTag{CacheTag: &ledgerpb.CacheTag{Tenant: t.tenant, Tag: t.name, Count: t.n}}})
	}
}

func (sr *snapshotReader) takeCount(m *ledgerpb.CacheCount) error {
	c := &sr.caches.next
	if c.count > 0 || m.GetCount() == 0 || m.GetSince() > m.GetCount() || m.GetFloor() > m.GetCount() {
		return sr.damaged("counts invalidations as they cannot be, or twice")
	}
	c.count, c.since = m.GetCount(), m.GetSince()
	if c.floor = m.GetFloor(); c.floor > 0 {
		sr.state.hash.add(sr.state.enc.floor("all", "", c.floor))
	}
	sr.record++
	return nil
}

func (sr *snapshotReader) takeGeneration(m *ledgerpb.CacheGeneration) error {
	n, g := cacheName{m.GetTenant(), m.GetSurface()}, generation{m.GetNow(), m.GetHighest()}
	last := sr.lastGeneration
	switch {
	case len(n.tenant) > maxID || len(n.name) > maxID || g.now < 1 || g.now > g.highest || g.highest < 2:
		return sr.damaged("is a generation that cannot be")
	case last != nil && cmp.Or(strings.Compare(last.tenant, n.tenant), strings.Compare(last.name, n.name)) >= 0:
		return sr.damaged("is a generation out of order")
	case sr.caches.generations.next.len() > MaxGenerations:
		return sr.damaged("is one generation too many")
	}
	sr.lastGeneration = &n
	sr.caches.putGeneration(n, generation{1, 1}, g)
	sr.record++
	return nil
}

func (sr *snapshotReader) takeFloor(m *ledgerpb.CacheFloor) error {
	e, n := sr.caches, m.GetCount()
	if _, ok := e.next.floors[m.GetTenant()]; ok || len(m.GetTenant()) > maxID || n <= e.next.floorOf(m.GetTenant()) || n > e.next.count || len(e.next.floors) >= maxFloors {
		return sr.damaged("is a tenant's floor that cannot be, or twice")
	}
	e.raiseFloor(m.GetTenant(), n)
	sr.record++
	return nil
}

func (sr *snapshotReader) takeTag(m *ledgerpb.CacheTag) error {
	tag := &tagged{cacheName{m.GetTenant(), m.GetTag()}, m.GetCount()}
	t := sr.state.tags
	_, twice := t.at[tag.cacheName]
	switch {
	case twice || len(tag.tenant) > maxID || !ValidTag(tag.name) || tag.n == 0 || tag.n > sr.caches.next.count:
		return sr.damaged("is a tag that cannot be, or twice")
	case t.all.Len() > 0 && t.all.Back().Value.(*tagNode).n > tag.n:
		return sr.damaged("is a tag out of order")
	}
	if sr.caches.putTag(tag); t.spare(tag.tenant) != nil {
		return sr.damaged("is one tag too many")
	}
	sr.record++
	return nil
}

func (c *canon) generation(n cacheName, g generation) [32]byte {
	c.entry("generation")
	c.str(n.tenant)
	c.str(n.name)
	c.num(g.now)
	c.num(g.highest)
	return c.sum()
}

func (c *canon) tag(t *tagged) [32]byte {
	c.entry("tag")
	c.str(t.tenant)
	c.str(t.name)
	c.num(t.n)
	return c.sum()
}

func (c *canon) floor(of, tenant string, n uint64) [32]byte {
	c.entry("floor")
	c.str(of)
	c.str(tenant)
	c.num(n)
	return c.sum()
}
