package node

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"headgate/cache/embed"
	"headgate/cache/guard"
	"headgate/cache/semantic"
	"headgate/cache/threshold"
	"headgate/cache/vec"
	"headgate/proxy"
	"headgate/proxy/admin"
)

// similarcmd is the part of the admin API that is about answers to questions in other words.

// wrongAnswer evicts an entry on every node and counts it against its surface.
func (n *Node) wrongAnswer(ctx context.Context, by admin.Actor, w admin.CacheWrong) (admin.CacheWrongDone, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	r, err := n.similar.cache.Wrong(ctx, w.Entry, by.Name)
	done := admin.CacheWrongDone{Evicted: r.Evicted, Unreached: r.Unreached, Tenant: r.Tenant, Surface: r.Surface}
	switch {
	case errors.Is(err, semantic.ErrID):
		return done, admin.Errorf(admin.Invalid, "entry: %w", err)
	case err != nil:
		return done, err
	case !r.Found && r.Unreached > 0:
		return done, admin.Errorf(admin.NotFound, "no node that could be asked knows entry %s; %d could not be", w.Entry, r.Unreached)
	case !r.Found:
		return done, admin.Errorf(admin.NotFound, "no node knows entry %s: it was evicted or has ended, and no request of late was answered by it", w.Entry)
	}
	n.log.Info("an answer was reported as wrong", "cache_entry", w.Entry, "by", by.Name, "tenant", r.Tenant, "surface", r.Surface, "evicted", r.Evicted, "unreached", r.Unreached)
	return done, nil
}

// cacheRecent is what was decided last for requests of this node.
func (n *Node) cacheRecent(context.Context) ([]admin.CacheDecision, error) {
	now, at := time.Now(), n.ticks()
	var out []admin.CacheDecision
	for _, d := range n.similar.cache.Recent() {
		out = append(out, admin.CacheDecision{
			Time: now.Add(-time.Duration(at - d.At)).Round(time.Millisecond), Request: d.Request, Tenant: d.Tenant, Surface: d.Surface, Action: d.Action, Shadow: d.Shadow,
			Entry: d.Entry, Similarity: d.Similarity, Threshold: d.Threshold, Tau: d.Tau, Refused: d.Refused, Why: d.Why, Owner: d.Owner,
		})
	}
	return out, nil
}

// stats are this node's.
func (s *similar) stats() (out []admin.CacheSemantic) {
	for _, v := range s.cache.Stats() {
		out = append(out, admin.CacheSemantic{
			Tenant: v.Tenant, Surface: v.Surface, Embedder: v.Embedder, Partitions: v.Partitions, Entries: v.Entries, Bytes: v.Bytes, Missed: v.Missed,
			Explored: v.Explored, Audited: v.Audited, Served: v.Served, Same: v.Same, Different: v.Different, Unknown: v.Unknown, Reported: v.Reported,
			Probes: v.Probes, Budget: budgetOf(&v.Budget), ServedAt: v.ServedAt[:], RefusedAt: v.RefusedAt[:],
		})
	}
	return out
}

// embedsBy says whether a surface's embedder in the policy in force is of a version. One that cannot be had may be.
func (s *similar) embedsBy(rules *proxy.SemanticCache, version string) bool {
	e, err := s.embedders.of(rules.Embedder)
	return err != nil || e.Version() == version
}

// compared says of a request whether it is compared with questions in other words, and has its text turned into
// a vector if so. The embedder is asked; nothing is looked up, and nothing counted.
func (s *similar) compared(ctx context.Context, out *verdict, v *proxy.CacheVerdict) {
	c := &admin.CacheCompared{Why: v.Apart}
	out.said.Semantic = c
	rules := v.Semantic
	if rules == nil {
		return
	}
	c.Mode, c.Least, out.verified = rules.Mode, v.Least, rules.Verifier != nil
	if rules.Mode == "static" {
		c.Threshold = rules.Threshold
	}
	if c.Why != "" {
		return
	}
	e, err := s.embedders.of(rules.Embedder)
	if err != nil {
		c.Why = "there is no embedder: " + err.Error()
		return
	}
	c.Embedder = e.Version()
	part, text, ok, err := out.of.Partition(c.Embedder)
	switch {
	case err != nil:
		c.Why = err.Error()
		return
	case !ok:
		c.Why = "there is no text of a user in it"
		return
	}
	c.Partition = hex.EncodeToString(part[:])
	if out.vector, c.Why = vectorOf(ctx, e, text); c.Why == "" {
		c.Compared, out.text = true, text
	}
}

// vectorOf is a text's vector; why says why it has none, and is not compared.
func vectorOf(ctx context.Context, e embed.Embedder, text string) (vector []float32, why string) {
	if len(text) > maxQuestion {
		return nil, fmt.Sprintf("the last user text has %d bytes, and %d at most are compared", len(text), maxQuestion)
	}
	vectors, err := e.Embed(ctx, []string{text})
	long, tooLong := errors.AsType[*embed.TooLongError](err)
	switch {
	case tooLong && long.Limit > 0:
		return nil, fmt.Sprintf("the last user text has %d tokens or more, and the embedder takes %d", long.Tokens, long.Limit)
	case tooLong:
		return nil, "the last user text is too long for the embedder"
	case err != nil:
		return nil, "the embedder fails, and until it does not all such requests are misses: " + err.Error()
	}
	return vectors[0], ""
}

// pair says what would become of a request after the other was answered; nil where one of them is not compared.
func (s *similar) pair(a, b *verdict) *admin.CachePair {
	x, y := a.said.Semantic, b.said.Semantic
	if x == nil || y == nil || !x.Compared || !y.Compared {
		return nil
	}
	p := &admin.CachePair{Hit: "no", SamePartition: x.Partition == y.Partition, Refused: []admin.CacheRefusal{}}
	if x.Embedder == y.Embedder && len(a.vector) == len(b.vector) {
		similarity := float64(min(max(vec.Dot(a.vector, b.vector), -1), 1))
		p.Similarity = &similarity
	}
	for _, r := range guard.Parse(a.text).Compare(guard.Parse(b.text)).Refused {
		p.Refused = append(p.Refused, admin.CacheRefusal{Guard: string(r.Kind), First: r.A, Second: r.B})
	}
	p.Hit, p.Why = s.wouldHit(p, a, b)
	return p
}

// wouldHit says whether the answer to one of a pair would be given to the other.
func (s *similar) wouldHit(p *admin.CachePair, a, b *verdict) (hit, why string) {
	rules := a.said.Semantic
	least := max(rules.Least, b.said.Semantic.Least)
	switch {
	case a.said.Key == b.said.Key:
		return "yes", "they are one request: the exact cache answers"
	case !p.SamePartition || p.Similarity == nil:
		return "no", "they differ in more than the last user text"
	case len(p.Refused) > 0:
		return "no", "guards refuse them, whatever their similarity"
	case rules.Mode == "static" && *p.Similarity < rules.Threshold:
		return "no", fmt.Sprintf("the threshold is %g", rules.Threshold)
	case *p.Similarity < least:
		return "no", fmt.Sprintf("the request asks for %g", least)
	case rules.Mode != "static" && rules.Mode != "learned":
		return "no", "in mode " + rules.Mode + " nothing is served"
	case s.tripped(a.said.AsTenant, a.surface, rules.Embedder):
		return "no", "the surface exceeds its budget for wrong answers"
	case rules.Mode == "learned":
		return "perhaps", "it goes by what was learned of the surface's answers"
	case a.verified:
		return "yes", "guards let them pass, and they are similar enough; but where it is a close thing and the verifier says no, for what is audited, and where something nearer is kept"
	}
	return "yes", "guards let them pass, and they are similar enough; but for what is audited, and where something nearer is kept"
}

// tripped says whether a surface of a tenant exceeds its budget, as far as this node knows.
func (s *similar) tripped(tenant, surface, embedder string) bool {
	for _, v := range s.cache.Stats() {
		if v.Tenant == tenant && v.Surface == surface && v.Embedder == embedder {
			return v.Budget.Tripped || v.Budget.Blind
		}
	}
	return false
}

func budgetOf(b *threshold.Snapshot) admin.CacheBudget {
	return admin.CacheBudget{
		Requests: b.Requests, WouldHits: b.WouldHits, Audited: b.Audited, Wrong: b.Wrong, PerRequest: admin.CacheRate(b.PerRequest), PerHit: admin.CacheRate(b.PerHit),
		Confidence: b.Confidence, Tripped: b.Tripped, Trips: b.Trips,
		Unlabelled: b.Unlabelled, Blind: b.Blind, By: admin.CacheFound(b.By), Since: admin.CacheFound(b.Since),
	}
}
