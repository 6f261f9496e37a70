package node

import (
	"context"
	"errors"
	"time"

	"headgate/cache/semantic"
	"headgate/cache/threshold"
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

func budgetOf(b *threshold.Snapshot) admin.CacheBudget {
	return admin.CacheBudget{
		Requests: b.Requests, WouldHits: b.WouldHits, Audited: b.Audited, Wrong: b.Wrong, PerRequest: admin.CacheRate(b.PerRequest), PerHit: admin.CacheRate(b.PerHit),
		Confidence: b.Confidence, Tripped: b.Tripped, Trips: b.Trips,
	}
}
