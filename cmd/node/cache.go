package node

import (
	"context"
	"math/rand/v2"
	"slices"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/grpc"

	"headgate/cache"
	"headgate/cluster/ledger"
	"headgate/proxy"
)

const (
	defaultCacheBytes = 256 << 20
	minCacheBytes     = 1 << 20
	maxCacheEntry     = 16 << 20 // as policies bound exact.max_bytes
	cacheSuccessors   = 2        // asked after a key's owner, where that is out of reach
)

// openCache makes the cache of answers. Other nodes are asked once this one has joined.
func (n *Node) openCache() error {
	var err error
	n.shelf, err = cache.NewStore(cache.StoreConfig{
		MaxBytes: n.cacheBytes(), MaxEntry: maxCacheEntry, Now: n.ticks, Rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), Valid: n.answerValid,
	})
	if err != nil {
		return err
	}
	n.answers, err = cache.NewExact(cache.Config{
		Store: n.shelf, Ring: n.answerOwners, Client: func(address string) (grpc.ClientConnInterface, error) { return n.cluster.Conn(address) },
		Valid: n.answerValid, Stamp: func() uint64 { return n.caches().Stamp() }, Now: n.ticks,
		Rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), MaxEntry: maxCacheEntry, MaxFlying: n.cacheBytes() / 2, Logger: n.log, Registerer: n.registry,
	})
	return err
}

// ticks is the clock of what is kept: cluster.Now to within a millisecond, without a system call for each look.
func (n *Node) ticks() int64 {
	now, _ := n.time.Read()
	return now
}

func (n *Node) cacheBytes() int64 {
	if n.cfg.CacheMaxBytes == 0 {
		return defaultCacheBytes
	}
	return n.cfg.CacheMaxBytes
}

// closeCache stops what the cache has running.
func (n *Node) closeCache() {
	if n.similar != nil {
		n.similar.close()
	}
	if n.answers != nil {
		n.answers.Close()
	}
	if n.shelf != nil {
		n.shelf.Close()
	}
}

// hearing says whether this node hears of invalidations now.
func (n *Node) hearing() bool {
	c := n.joined.Load()
	return c != nil && c.Leased()
}

// caches say which answers still hold; nil before this node has joined.
func (n *Node) caches() *ledger.Caches {
	if c := n.joined.Load(); c != nil {
		return c.Ledger().Facts().Caches
	}
	return nil
}

// answerValid says whether nothing that an answer depends on was invalidated since it was asked for.
func (n *Node) answerValid(e *cache.Entry) bool {
	return n.caches().Valid(e.Tenant, e.Tags, e.Stamp)
}

// answerOwners are the addresses of the node that an answer belongs to, and of those that stand in for
// it; "" is this one. It is by the answer, not by its tenant, so that a large one's spread.
func (n *Node) answerOwners(k cache.Key) []string {
	c := n.joined.Load()
	if c == nil {
		return nil
	}
	ring := c.Fence().Ring()
	members := ring.Members()
	first := ring.Owner(ring.Partition(string(k[:])))
	if first < 0 {
		return nil
	}
	order := []int{first}
	for len(order) <= cacheSuccessors && len(order) < len(members) { // by the highest hash of name and key
		best, most := -1, uint64(0)
		for i := range members {
			if slices.Contains(order, i) {
				continue
			}
			h := xxhash.New()
			_, _ = h.WriteString(members[i].Name) // never fails
			_, _ = h.Write(k[:])
			if sum := h.Sum64(); best < 0 || sum > most {
				best, most = i, sum
			}
		}
		order = append(order, best)
	}
	out := make([]string, 0, len(order))
	for _, i := range order {
		address := members[i].Address
		if members[i].Incarnation == n.self {
			address = ""
		}
		out = append(out, address)
	}
	return out
}

// answers is the cache as the front door knows it.
type answers struct {
	*cache.Exact
	caches func() *ledger.Caches
}

// Key see proxy.Cache. The two contexts have the same fields, or this does not compile.
func (a answers) Key(c *proxy.CacheContext) ([32]byte, error) {
	c.Generations = a.caches().Generation(c.Tenant, c.Surface)
	cc := cache.Context(*c)
	return cc.Key()
}

// Counts see proxy.Cache.
func (answers) Counts(header string) bool { return cache.CountsHeader(header) }

// Look see proxy.Cache.
func (a answers) Look(key [32]byte) (*proxy.Cached, bool) {
	h, ok := a.Exact.Look(key)
	if !ok {
		return nil, false
	}
	return kept(&h), true
}

func kept(h *cache.Hit) *proxy.Cached {
	if h == nil || h.Entry == nil {
		return nil
	}
	return &proxy.Cached{
		ContentType: h.ContentType, Body: h.Body, Tags: h.Tags, Input: h.Input, CachedInput: h.CachedInput, Output: h.Output,
		Age: h.Age, Stale: h.Stale, Refresh: h.Refresh, Live: h.Tier == cache.Live,
		Via: h.Via, Similarity: h.Similarity, Stamp: h.Stamp,
	}
}

// Join see proxy.Cache.
func (a answers) Join(ctx context.Context, ask *proxy.CacheAsk) (proxy.CacheTurn, error) {
	t, err := a.Exact.Join(ctx, &cache.Ask{
		Key: ask.Key, Tenant: ask.Tenant, Tags: ask.Tags, Live: ask.Live, Refresh: ask.Refresh, Early: ask.Early, Age: ask.Age, MaxEntry: ask.MaxEntry, LeadFor: ask.LeadFor,
	})
	if err != nil {
		return proxy.CacheTurn{}, err
	}
	out := proxy.CacheTurn{Stale: kept(t.Stale)}
	switch t.Kind {
	case cache.TurnHit:
		out.Hit = kept(&t.Hit)
	case cache.TurnLead:
		out.Fill = fill{t.Fill}
	case cache.TurnLive:
		out.Live = t.Live
	case cache.TurnFailed:
		f := proxy.CacheFailure(t.Failed)
		out.Failed = &f
	case cache.TurnBusy:
		out.Busy = true
	case cache.TurnPass:
	}
	return out, nil
}

// fill is the lead as the front door knows it.
type fill struct{ *cache.Fill }

// End see proxy.CacheFill.
func (f fill) End(e proxy.FillEnd) {
	switch e.Kind {
	case proxy.FillStore:
		f.Store(answer(e.Entry))
	case proxy.FillShare:
		f.Share(answer(e.Entry))
	case proxy.FillUnshareable:
		f.Unshareable()
	case proxy.FillFailed:
		f.Failed(cache.Failure(e.Failure))
	case proxy.FillBroken:
		f.Broken()
	case proxy.FillRefused:
		f.Abandon(false)
	case proxy.FillUnasked:
		f.Refused()
	default:
		f.Abandon(true)
	}
}

func answer(e *proxy.CacheEntry) *cache.Entry {
	return &cache.Entry{
		Tenant: e.Tenant, Surface: e.Surface, ContentType: e.ContentType, Body: e.Body, Tags: e.Tags,
		Input: e.Input, CachedInput: e.CachedInput, Output: e.Output, Life: cache.Life(e.Life),
		Via: e.Via, Similarity: e.Similarity, Stamp: e.Stamp, Age: e.Age,
	}
}

// GetMany see proxy.Elements.
func (a answers) GetMany(ctx context.Context, keys [][32]byte) []*proxy.Cached {
	many := make([]cache.Key, len(keys))
	for i, k := range keys {
		many[i] = k
	}
	out := make([]*proxy.Cached, len(keys))
	for i, h := range a.Exact.GetMany(ctx, many) {
		out[i] = kept(&h)
	}
	return out
}

// Stamp see proxy.Elements.
func (a answers) Stamp() uint64 { return a.caches().Stamp() }

// PutMany see proxy.Elements.
func (a answers) PutMany(stamp uint64, keys [][32]byte, entries []*proxy.CacheEntry) {
	many := make([]cache.Entry, len(entries))
	for i, e := range entries {
		many[i] = *answer(e)
		many[i].Key, many[i].Stamp = keys[i], stamp
	}
	a.Exact.PutMany(many)
}

// surfaces are the policy's, as the front door needs them; models are too.
func surfaces(ix *ledger.Index, models map[string]*proxy.Model) map[string]*proxy.Surface {
	out := make(map[string]*proxy.Surface, len(ix.Surfaces))
	for name, s := range ix.Surfaces {
		ps := &proxy.Surface{Name: name, Template: s.TemplateVersion, Share: s.Shared, Personal: s.Personal}
		if e := s.Exact; e != nil {
			ps.Exact = &proxy.ExactCache{
				Life:        proxy.CacheLife{TTL: e.TTL, MaxTTL: e.MaxTTL, Stale: e.Stale, StaleIfError: e.StaleIfError, Beta: e.Beta},
				Temperature: e.Temperature, Normalize: e.Normalize, Timestamps: e.Timestamps, Tools: e.Tools, Many: e.N,
				Length: e.Length, MaxBytes: e.MaxBytes, Volatile: s.Volatility == "live" || s.Volatility == "personal",
			}
		}
		if e := s.Semantic; e != nil {
			ps.Semantic = &proxy.SemanticCache{
				Mode: e.Mode, Threshold: e.Threshold, ErrorBound: e.ErrorBound, HitErrorBound: e.HitErrorBound, Audit: e.Audit, Answers: e.Answers,
				TTL: e.TTL, Embedder: models[e.Embedder], Verifier: models[e.Verifier],
			}
		}
		out[name] = ps
	}
	return out
}
