package ledger

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"headgate/cluster/ledger/ledgerpb"
)

// cachesVersion is the least StateVersion that knows generations and tags of caches.
const cachesVersion = 4

// Bounds of what is known of caches.
const (
	// MaxGenerations are the tenants, surfaces and pairs of them whose generation was ever raised.
	MaxGenerations = 100_000
	// MaxTags are the tags whose last invalidation is known, and a quarter of it those of one tenant. The oldest go.
	MaxTags = 1 << 16
	// MaxTagsAtOnce are those of one command.
	MaxTagsAtOnce = 1_000
	// MaxTag is the length of a tag, in bytes.
	MaxTag = 128

	maxTagBytes = 16 << 20 // of names of tenants and tags
	maxFloors   = 10_000   // tenants of which tags were forgotten, one by one
	// tagSkip is how far the count of invalidations jumps where the past of the ledger is replaced: further
	// than what was counted meanwhile.
	tagSkip = 1 << 32
)

// ValidTag says of a tag that it can be invalidated: text of 1 to MaxTag bytes without white space, controls and commas.
func ValidTag(tag string) bool {
	if tag == "" || len(tag) > MaxTag || !utf8.ValidString(tag) {
		return false
	}
	for i := range len(tag) {
		if c := tag[i]; c <= ' ' || c == ',' || c == 0x7f {
			return false
		}
	}
	return true
}

// cacheName is a surface or a tag, of a tenant; "" stands for all.
type cacheName struct{ tenant, name string }

// generation of a pair: now is between 1 and highest. What was never raised is {1, 1}, and is not kept.
type generation struct{ now, highest uint64 }

// Caches says which answers of the caches still hold. It never changes; nil is that of a ledger where nothing
// was ever invalidated. Take an entry's stamp before the model is asked, after its key's generations: what is
// invalidated from then on has a higher stamp, or another generation. (Where a restore comes between the two the
// entry is as good as one of after it, under a key of before; the same number may be given to a generation again.)
type Caches struct {
	count  uint64            // of commands that invalidated tags, and the jumps of restores
	since  uint64            // what was stamped before does not hold, whatever its tags
	forAll bool              // a tag was ever invalidated for all
	floor  uint64            // at least that of every tenant
	floors map[string]uint64 // the count of the last tag that was forgotten; "": of those invalidated for all

	generations *spread[generation]
	tags        *spread[uint64] // the count at the last invalidation
}

// Generation gives the generations that answers to a tenant's requests at a surface depend on: of all, of the
// tenant, of the surface, and of the surface of the tenant. Each is 1 until it is raised.
func (c *Caches) Generation(tenant, surface string) [4]uint64 {
	out := [4]uint64{1, 1, 1, 1}
	if generations, _ := c.Len(); generations == 0 {
		return out
	}
	for i, n := range [...]cacheName{{}, {tenant, ""}, {"", surface}, {tenant, surface}} {
		g, _ := c.generationOf(n)
		out[i] = g.now
	}
	return out
}

func (c *Caches) generationOf(n cacheName) (g generation, known bool) {
	if c != nil {
		if g, known = c.generations.find(n); known {
			return g, true
		}
	}
	return generation{1, 1}, false
}

// Len is how many generations were ever raised, and how many tags are known.
func (c *Caches) Len() (generations, tags int) {
	if c == nil {
		return 0, 0
	}
	return c.generations.len(), c.tags.len()
}

// CacheGeneration is a generation that was ever raised. As of SetGeneration, "" stands for all.
type CacheGeneration struct {
	Tenant, Surface string
	Now, Highest    uint64 // in force; that ever was
}

// Generations lists those that were ever raised, by tenant and surface.
func (c *Caches) Generations() []CacheGeneration {
	if c == nil {
		return nil
	}
	out := make([]CacheGeneration, 0, c.generations.len())
	for n, g := range c.generations.all {
		out = append(out, CacheGeneration{n.tenant, n.name, g.now, g.highest})
	}
	slices.SortFunc(out, func(a, b CacheGeneration) int {
		return cmp.Or(strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Surface, b.Surface))
	})
	return out
}

// Stamp is what an answer that is asked for from now on is stamped with. It rises with each command that
// invalidates tags, and is the same wherever as many were applied.
func (c *Caches) Stamp() uint64 {
	if c == nil {
		return 0
	}
	return c.count
}

// Tagged is the least stamp that an answer for the tenant with this tag must have to hold: that of the tag's last invalidation, for the tenant or for
// all, or where that may be forgotten a later one.
func (c *Caches) Tagged(tenant, tag string) uint64 {
	if c == nil {
		return 0
	}
	if !c.forAll {
		return max(c.since, c.tagged(tenant, tag))
	}
	return max(c.since, c.tagged(tenant, tag), c.tagged("", tag))
}

func (c *Caches) tagged(tenant, tag string) uint64 {
	if n, ok := c.tags.find(cacheName{tenant, tag}); ok {
		return n
	}
	return c.floorOf(tenant)
}

// Floor is the least stamp with which an answer for the tenant holds where its tags are not known.
func (c *Caches) Floor(tenant string) uint64 {
	if c == nil {
		return 0
	}
	return max(c.since, c.floorOf(tenant), c.floorOf(""))
}

func (c *Caches) floorOf(tenant string) uint64 {
	if tenant == "" {
		return c.floors[""]
	}
	return max(c.floor, c.floors[tenant])
}

// Valid says whether an answer for the tenant that was stamped so still holds: none of its tags was invalidated
// since, nor the ledger put back. It allocates nothing.
func (c *Caches) Valid(tenant string, tags []string, stamp uint64) bool {
	if c == nil {
		return true
	}
	if stamp < c.since {
		return false
	}
	for _, tag := range tags {
		if c.Tagged(tenant, tag) > stamp {
			return false
		}
	}
	return true
}

// used says that something was ever invalidated.
func (c *Caches) used() bool { return c != nil && (c.count > 0 || c.generations.len() > 0) }

// SetGeneration puts a generation of the caches in force, through the leader: of a surface of a tenant, where
// tenant is "" of a surface of all, where surface is "" of a whole tenant, and of everything where both are. generation 0 raises it to a number that was never in
// force; another must have been in force before (the first was 1), and brings back what was kept under it. A *Refusal of code
// invalid: it never was; full: there are MaxGenerations (those of everything can still be raised). It is audited as cache.generation, unless it is in force already.
// Its other errors are Propose's.
func (l *Ledger) SetGeneration(ctx context.Context, actor, tenant, surface string, generation uint64) (now, previous, index uint64, err error) {
	result, err := l.Propose(ctx, &ledgerpb.Command{Version: cachesVersion, Actor: actor, Body: &ledgerpb.Command_SetGeneration{
		SetGeneration: &ledgerpb.SetGeneration{Tenant: tenant, Surface: surface, Generation: generation},
	}})
	if err == nil {
		err = RefusalOf(result)
	}
	if err != nil {
		return 0, 0, 0, err
	}
	g := result.GetGeneration()
	return g.GetNow(), g.GetPrevious(), result.GetIndex(), nil
}

// InvalidateTags ends all answers for a tenant that have one of the tags and were asked for before, through the
// leader; "" is every tenant. MaxTagsAtOnce at once, each a ValidTag, else it is a *Refusal of code invalid. It is audited as cache.tags. Its other errors are Propose's.
func (l *Ledger) InvalidateTags(ctx context.Context, actor, tenant string, tags []string) (index uint64, err error) {
	result, err := l.Propose(ctx, &ledgerpb.Command{Version: cachesVersion, Actor: actor, Body: &ledgerpb.Command_InvalidateTags{
		InvalidateTags: &ledgerpb.InvalidateTags{Tenant: tenant, Tags: tags},
	}})
	if err == nil {
		err = RefusalOf(result)
	}
	if err != nil {
		return 0, err
	}
	return result.GetIndex(), nil
}

// spreadOver is into how many maps a spread is cut: a change copies one, and a pointer to each.
const spreadOver = 256

// spread is a map that never changes: a changed one shares all but what was touched. nil is empty.
type spread[V any] struct {
	parts [spreadOver]map[cacheName]V
	n     int
}

func (s *spread[V]) len() int {
	if s == nil {
		return 0
	}
	return s.n
}

func (s *spread[V]) find(n cacheName) (v V, ok bool) {
	if s == nil {
		return v, false
	}
	v, ok = s.parts[n.part()][n]
	return v, ok
}

// part is by FNV-1a. Names that were chosen to meet cost the time of copying one large map.
func (n cacheName) part() uint32 {
	const offset, prime = 2166136261, 16777619
	h := uint32(offset)
	for i := range len(n.tenant) {
		h = (h ^ uint32(n.tenant[i])) * prime
	}
	h *= prime // a byte between the two
	for i := range len(n.name) {
		h = (h ^ uint32(n.name[i])) * prime
	}
	return (h ^ h>>16) % spreadOver
}

// all are in no order.
func (s *spread[V]) all(yield func(cacheName, V) bool) {
	if s == nil {
		return
	}
	for _, part := range s.parts {
		for n, v := range part {
			if !yield(n, v) {
				return
			}
		}
	}
}

// spreading makes a changed spread.
type spreading[V any] struct {
	next  *spread[V]
	fresh [spreadOver]bool // parts that are next's own
}

func (s *spread[V]) edit() *spreading[V] {
	next := &spread[V]{}
	if s != nil {
		*next = *s
	}
	return &spreading[V]{next: next}
}

func (e *spreading[V]) part(n cacheName) map[cacheName]V {
	i := n.part()
	if !e.fresh[i] {
		if e.next.parts[i] = maps.Clone(e.next.parts[i]); e.next.parts[i] == nil {
			e.next.parts[i] = map[cacheName]V{}
		}
		e.fresh[i] = true
	}
	return e.next.parts[i]
}

func (e *spreading[V]) put(n cacheName, v V) {
	part := e.part(n)
	before := len(part)
	part[n] = v
	e.next.n += len(part) - before
}

func (e *spreading[V]) remove(n cacheName) {
	part := e.part(n)
	before := len(part)
	delete(part, n)
	e.next.n += len(part) - before
}
