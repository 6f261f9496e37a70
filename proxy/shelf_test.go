package proxy_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"headgate/cache"
	"headgate/proxy"
)

// shelf is the cache of a node that is alone, joined to the front door as cmd/node does, with a clock that
// tests put on and a ledger that they write.
type shelf struct {
	store *cache.Store
	exact *cache.Exact
	began time.Time
	ahead atomic.Int64 // nanoseconds by which its clock is

	mu          sync.Mutex
	generations map[[2]string]uint64 // by tenant and surface, "" for all
	tags        map[[2]string]uint64 // by tenant and tag: the stamp at which it ended
	stamp       uint64
	contexts    []proxy.CacheContext // of which keys were made, the last few
}

// maxContexts is how many are remembered.
const maxContexts = 64

func newShelf(t *testing.T, reg prometheus.Registerer) *shelf {
	t.Helper()
	s := &shelf{began: time.Now(), generations: map[[2]string]uint64{}, tags: map[[2]string]uint64{}}
	s.store = must[*cache.Store](t)(cache.NewStore(cache.StoreConfig{MaxBytes: 64 << 20, MaxEntry: 16 << 20, Now: s.now, Rand: rand.New(rand.NewPCG(1, 2)), Valid: s.valid}))
	t.Cleanup(s.store.Close)
	s.exact = must[*cache.Exact](t)(cache.NewExact(cache.Config{
		Store: s.store, Ring: func(cache.Key) []string { return nil },
		Client: func(string) (grpc.ClientConnInterface, error) { return nil, errors.New("there is no other node") },
		Valid:  s.valid, Stamp: s.Stamp, Now: s.now, Rand: rand.New(rand.NewPCG(3, 4)), Registerer: reg,
	}))
	t.Cleanup(s.exact.Close)
	return s
}

func (s *shelf) now() int64 { return int64(time.Since(s.began)) + s.ahead.Load() }

// pass lets time go by for what is kept.
func (s *shelf) pass(d time.Duration) { s.ahead.Add(int64(d)) }

// raise ends the generation of a surface of a tenant, and untag a tag of a tenant's.
func (s *shelf) raise(tenant, surface string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generations[[2]string{tenant, surface}]++
}

func (s *shelf) untag(tenant, tag string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stamp++
	s.tags[[2]string{tenant, tag}] = s.stamp
}

func (s *shelf) valid(e *cache.Entry) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, tag := range e.Tags {
		if s.tags[[2]string{e.Tenant, tag}] > e.Stamp {
			return false
		}
	}
	return true
}

// Stamp see proxy.Elements.
func (s *shelf) Stamp() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stamp
}

// Key see proxy.Cache.
func (s *shelf) Key(c *proxy.CacheContext) ([32]byte, error) {
	s.mu.Lock()
	for i, place := range [][2]string{{}, {c.Tenant, ""}, {"", c.Surface}, {c.Tenant, c.Surface}} {
		c.Generations[i] = s.generations[place] + 1
	}
	s.contexts = append(s.contexts[max(0, len(s.contexts)-maxContexts):], *c)
	s.mu.Unlock()
	cc := cache.Context(*c)
	return cc.Key()
}

// Counts see proxy.Cache.
func (s *shelf) Counts(header string) bool { return cache.CountsHeader(header) }

// Look see proxy.Cache.
func (s *shelf) Look(key [32]byte) (*proxy.Cached, bool) {
	h, ok := s.exact.Look(key)
	if !ok {
		return nil, false
	}
	return fromShelf(&h), true
}

func fromShelf(h *cache.Hit) *proxy.Cached {
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
func (s *shelf) Join(ctx context.Context, a *proxy.CacheAsk) (proxy.CacheTurn, error) {
	t, err := s.exact.Join(ctx, &cache.Ask{Key: a.Key, Tenant: a.Tenant, Tags: a.Tags, Live: a.Live, LeadFor: a.LeadFor, Refresh: a.Refresh, Early: a.Early, Age: a.Age, MaxEntry: a.MaxEntry})
	if err != nil {
		return proxy.CacheTurn{}, err
	}
	out := proxy.CacheTurn{Stale: fromShelf(t.Stale), Busy: t.Kind == cache.TurnBusy}
	switch t.Kind {
	case cache.TurnHit:
		out.Hit = fromShelf(&t.Hit)
	case cache.TurnLead:
		out.Fill = shelfFill{t.Fill}
	case cache.TurnLive:
		out.Live = t.Live
	case cache.TurnFailed:
		f := proxy.CacheFailure(t.Failed)
		out.Failed = &f
	}
	return out, nil
}

type shelfFill struct{ *cache.Fill }

// End see proxy.CacheFill.
func (f shelfFill) End(e proxy.FillEnd) {
	switch e.Kind {
	case proxy.FillStore:
		f.Store(toShelf(e.Entry))
	case proxy.FillShare:
		f.Share(toShelf(e.Entry))
	case proxy.FillUnshareable:
		f.Unshareable()
	case proxy.FillFailed:
		f.Failed(cache.Failure(e.Failure))
	case proxy.FillBroken:
		f.Broken()
	case proxy.FillUnasked:
		f.Refused()
	default:
		f.Abandon(e.Kind != proxy.FillRefused)
	}
}

func toShelf(e *proxy.CacheEntry) *cache.Entry {
	return &cache.Entry{
		Tenant: e.Tenant, Surface: e.Surface, ContentType: e.ContentType, Body: e.Body, Tags: e.Tags,
		Input: e.Input, CachedInput: e.CachedInput, Output: e.Output, Life: cache.Life(e.Life),
		Via: e.Via, Similarity: e.Similarity, Stamp: e.Stamp, Age: e.Age,
	}
}

// GetMany see proxy.Elements.
func (s *shelf) GetMany(ctx context.Context, keys [][32]byte) []*proxy.Cached {
	many := make([]cache.Key, len(keys))
	for i, k := range keys {
		many[i] = k
	}
	out := make([]*proxy.Cached, len(keys))
	for i, h := range s.exact.GetMany(ctx, many) {
		out[i] = fromShelf(&h)
	}
	return out
}

// PutMany see proxy.Elements.
func (s *shelf) PutMany(stamp uint64, keys [][32]byte, entries []*proxy.CacheEntry) {
	many := make([]cache.Entry, len(entries))
	for i, e := range entries {
		many[i] = *toShelf(e)
		many[i].Key, many[i].Stamp = keys[i], stamp
	}
	s.exact.PutMany(many)
}

// faq is a surface whose answers its tenant's users share, for an hour.
func faq() *proxy.Surface {
	return &proxy.Surface{Name: "faq", Share: true, Exact: &proxy.ExactCache{
		Life: proxy.CacheLife{TTL: time.Hour}, Normalize: "none", MaxBytes: 1 << 20,
	}}
}

// faqWith is faq, changed.
func faqWith(change func(*proxy.Surface)) *proxy.Surface {
	s := faq()
	change(s)
	return s
}
