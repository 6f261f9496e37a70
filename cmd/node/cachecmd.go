package node

import (
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"headgate/cache"
	"headgate/cluster/ledger"
	"headgate/proxy"
	"headgate/proxy/admin"
)

// cachecmd is the part of the admin API that is about kept answers.

// invalidateCache ends kept answers on every node.
func (n *Node) invalidateCache(ctx context.Context, by admin.Actor, c admin.CacheInvalidation) (admin.CacheInvalidated, error) {
	s := n.current()
	if s.index == nil {
		return admin.CacheInvalidated{}, admin.Errorf(admin.Conflict, "no policy is in force on this node yet")
	}
	warnings, err := namedCaches(s.index, c.Tenant, c.Surface)
	if err != nil {
		return admin.CacheInvalidated{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	done := admin.CacheInvalidated{Warnings: warnings}
	if len(c.Tags) > 0 {
		done.Index, err = n.cluster.Ledger().InvalidateTags(ctx, by.Name, c.Tenant, c.Tags)
		return done, n.cacheError(err)
	}
	generation := uint64(0) // a new one
	if c.Generation != nil {
		generation = *c.Generation
	}
	done.Generation, done.Previous, done.Index, err = n.cluster.Ledger().SetGeneration(ctx, by.Name, c.Tenant, c.Surface, generation)
	return done, n.cacheError(err)
}

// cacheError gives what the ledger said its code.
func (n *Node) cacheError(err error) error {
	switch _, refused := errors.AsType[*ledger.Refusal](err); {
	case err == nil:
		return nil
	case refused:
		return refusal(err)
	}
	return n.notProposed(err)
}

// namedCaches refuses names that the policy does not have: an invalidation that names nobody would
// look like one that was made. It warns where nothing is kept under them.
func namedCaches(ix *ledger.Index, tenant, surface string) (warnings []string, err error) {
	if tenant != "" {
		if _, ok := ix.Tenant(tenant); !ok {
			return nil, noTenant(ix.Policy, tenant)
		}
	}
	if surface == "" {
		return nil, nil
	}
	resolved, ok := ix.Surfaces[surface]
	switch {
	case !ok:
		return nil, noSurface(ix.Policy, surface)
	case resolved.Exact == nil:
		return []string{"surface " + strconv.Quote(surface) + " has no cache in the policy in force"}, nil
	}
	return nil, nil
}

// noSurface is the error about a surface that the policy does not have.
func noSurface(p *ledger.Policy, name string) error {
	names := make([]string, 0, len(p.Surfaces))
	for i := range p.Surfaces {
		names = append(names, p.Surfaces[i].Name)
	}
	return admin.Errorf(admin.NotFound, "there is no surface %q%s (headgate policy show)", name, others(name, names, "nor any other", strconv.Quote))
}

// cacheGenerations are those that were ever raised.
func (n *Node) cacheGenerations(context.Context) ([]admin.CacheGeneration, error) {
	var out []admin.CacheGeneration
	for _, g := range n.truth.Facts().Caches.Generations() {
		out = append(out, admin.CacheGeneration(g))
	}
	return out, nil
}

// cacheStats are this node's.
func (n *Node) cacheStats(context.Context) (admin.CacheStats, error) {
	s := n.shelf.Stats()
	out := admin.CacheStats{Node: n.cfg.NodeID, Hearing: n.hearing(), Store: admin.CacheStore{
		Entries: s.Entries, Bytes: s.Bytes, MaxBytes: n.cacheBytes(), Puts: s.Puts, TooLarge: s.TooLarge,
		Rejected: s.Rejected, Dropped: s.Dropped, Evicted: s.Evicted, Invalid: s.Invalid,
	}}
	out.Surfaces, out.Templates = n.cacheLines()
	out.Semantic = n.similar.stats()
	for i := range out.Semantic {
		row := &out.Semantic[i]
		if surface := n.surface(row.Surface); surface != nil && surface.Semantic != nil && n.similar.embedsBy(surface.Semantic, row.Embedder) {
			row.Mode = surface.Semantic.Mode
		}
	}
	return out, nil
}

// surface is one of the policy in force; nil: it has none by that name.
func (n *Node) surface(name string) *proxy.Surface {
	if s := n.proxy.Snapshot(); s != nil {
		return s.Surfaces[name]
	}
	return nil
}

// explainKey says what the cache makes of a request, and in what another one differs.
func (n *Node) explainKey(ctx context.Context, q admin.CacheQuestion) (admin.CacheExplanation, error) {
	var e admin.CacheExplanation
	first, err := n.cacheVerdict(ctx, &q.CacheRequest)
	if err != nil {
		return e, err
	}
	e.CacheVerdict = first.said
	if first.of != nil {
		parts, err := first.of.Explain()
		if err != nil {
			return e, &admin.Error{Code: admin.Invalid, Err: err}
		}
		for _, p := range parts {
			e.Parts = append(e.Parts, admin.CachePart(p))
		}
	}
	if q.Other == nil {
		return e, nil
	}
	second, err := n.cacheVerdict(ctx, q.Other)
	if err != nil {
		return e, asOther(err)
	}
	e.Other, e.Pair = &second.said, n.similar.pair(first, second)
	if first.of == nil || second.of == nil {
		return e, nil
	}
	differences, err := cache.Differ(first.of, second.of)
	if err != nil {
		return e, &admin.Error{Code: admin.Invalid, Err: err}
	}
	for _, d := range differences {
		e.Differences = append(e.Differences, admin.CacheDifference{Path: d.Path, First: d.A, Second: d.B})
	}
	return e, nil
}

// asOther says of an error that it is about the second request.
func asOther(err error) error {
	if e, ok := errors.AsType[*admin.Error](err); ok {
		return admin.Errorf(e.Code, "other: %w", e.Err)
	}
	return err
}

// verdict is what is said of a request, and by what.
type verdict struct {
	said    admin.CacheVerdict
	of      *cache.Context // nil: its surface has no cache
	surface string
	text    string    // that is compared, where said.Semantic.Compared,
	vector  []float32 // and its vector

	verified bool // the surface has a verifier
}

// cacheVerdict asks the front door about a request, and the embedder of its surface, if there is one.
func (n *Node) cacheVerdict(ctx context.Context, q *admin.CacheRequest) (*verdict, error) {
	caller, err := n.anyCaller(q)
	if err != nil {
		return nil, err
	}
	header := make(http.Header, len(q.Headers))
	for name, values := range q.Headers {
		for _, v := range values {
			header.Add(name, v)
		}
	}
	user := q.User
	if user == caller.User { // all requests with the key are this user's, who need not be named
		user = ""
	}
	v, err := n.proxy.CacheVerdict(&proxy.CacheQuestion{
		Caller: caller, User: user, Surface: q.Surface, Path: q.Path, Query: q.Query, Header: header, Body: q.Body,
	})
	if err != nil {
		return nil, ofFrontDoor(err)
	}
	out := &verdict{said: admin.CacheVerdict{AsTenant: caller.Tenant, AsKey: caller.KeyID, Cacheable: v.Why == "", Why: v.Why, Model: v.Model}}
	if v.Context.Surface == "" { // it has no cache
		return out, nil
	}
	of := cache.Context(v.Context)
	out.of, out.surface = &of, of.Surface
	n.similar.compared(ctx, out, &v)
	if out.said.Cacheable {
		n.whatIsKept(&out.said, &v)
	}
	return out, nil
}

// whatIsKept says under which key an answer is, or would be, and whether this node has one. It counts no hit.
func (n *Node) whatIsKept(out *admin.CacheVerdict, v *proxy.CacheVerdict) {
	out.Key = hex.EncodeToString(v.Key[:])
	if out.Inputs = len(v.Inputs); out.Inputs > 0 {
		for _, k := range v.Inputs {
			if _, ok := n.shelf.Stale(k, n.ticks()); ok {
				out.InputsKept++
			}
		}
		return
	}
	if h, ok := n.shelf.Stale(v.Key, n.ticks()); ok {
		out.Kept = &admin.CacheKept{AgeSeconds: int64(h.Age / time.Second), Stale: h.Stale}
	}
}

// ofFrontDoor gives a refusal of the front door a code of the admin API: the request that was asked
// about is at fault.
func ofFrontDoor(err error) error {
	e, ok := errors.AsType[*proxy.Error](err)
	switch {
	case !ok:
		return err
	case e.Status == http.StatusServiceUnavailable:
		return admin.Errorf(admin.Conflict, "%s", e.Message)
	case e.Param != "":
		return admin.Errorf(admin.Invalid, "it would be refused with status %d: %s: %s", e.Status, e.Param, e.Message)
	}
	return admin.Errorf(admin.Invalid, "it would be refused with status %d: %s", e.Status, e.Message)
}

// anyCaller is who comes with the key that a question names, or with one of the tenant's: if there
// is, one that is good, may use the surface, and may name the user.
func (n *Node) anyCaller(q *admin.CacheRequest) (*proxy.Caller, error) {
	s := n.current()
	if s.index == nil {
		return nil, admin.Errorf(admin.Conflict, "no policy is in force on this node yet")
	}
	if _, ok := s.index.Tenant(q.Tenant); !ok && q.Tenant != "" {
		return nil, noTenant(s.index.Policy, q.Tenant)
	}
	if _, ok := s.index.Surfaces[q.Surface]; !ok && q.Surface != "" {
		return nil, noSurface(s.index.Policy, q.Surface)
	}
	k := n.anyKey(s.index, q.Tenant, q.Key)
	if k == nil {
		return nil, n.noKey(q.Tenant, q.Key)
	}
	if now := time.Now(); q.Key == "" && !mayAsk(k, q, now) {
		for other := range n.keyTable().All() {
			if (q.Tenant == "" || other.Tenant == q.Tenant) && mayAsk(other, q, now) {
				k = other
				break
			}
		}
	}
	c, ok := n.proxy.Snapshot().Lookup(k.Hash)
	if !ok {
		return nil, admin.Errorf(admin.NotFound, "key %q belongs to no tenant of the policy", k.ID)
	}
	return c, nil
}

// mayAsk says that a request could come with a key.
func mayAsk(k *ledger.KeyRecord, q *admin.CacheRequest, now time.Time) bool {
	surface := q.Surface == "" || slices.Contains(k.Surfaces, q.Surface) || slices.Contains(k.Surfaces, "*")
	return k.Active(now) && surface && (q.User == "" || k.AssertUser || k.User == q.User)
}

// noKey is the error about a key that is not there.
func (n *Node) noKey(tenant, id string) error {
	switch {
	case id == "" && tenant == "":
		return admin.Errorf(admin.NotFound, "there is no key; headgate keys create --tenant NAME makes one")
	case id == "":
		return admin.Errorf(admin.NotFound, "tenant %q has no key; headgate keys create --tenant %s makes one", tenant, tenant)
	case tenant == "":
		return admin.Errorf(admin.NotFound, "there is no key %q; headgate keys list shows them", id)
	}
	return admin.Errorf(admin.NotFound, "there is no key %q of tenant %q; headgate keys list shows them", id, tenant)
}
