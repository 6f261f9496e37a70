package lease

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"headgate/lease/leasepb"
	"headgate/limiter"
)

// maxLevels bounds the buckets that one process lists of a tenant, levelsBatch those that it looks at with the owner's
// lock held.
const (
	maxLevels   = 10_000
	levelsBatch = 4096
)

// Bucketful is one bucket as an operator sees it.
type Bucketful struct {
	Key   limiter.Key
	Limit limiter.Limit
	Owner string // the node; "": none, or out of reach
	// Level is what the owner has left to lend, negative in debt, and of a durable limit what the ledger
	// has; Here is without that. Lent is the rate lent, in 1/ShareOne; Outstanding what holders may
	// still spend at once, by the owner's count.
	Level, Here, Lent, Outstanding int64
	// Reset is the time until it would be full if nothing were lent; limiter.Never for a semaphore
	// in use. A window's is not known here.
	Reset   time.Duration
	Holders []Holding // by node
}

// Holding is a holder's part of a Bucketful.
type Holding struct {
	Node string
	// Outstanding and Lent, in 1/ShareOne of the rate, are by the owner's count; InHand is what the
	// holder says, -1 where it did not answer; InUse slots.
	Outstanding, Lent, InHand, InUse int64
}

// SilentError names the nodes of which something was to be known, and was not.
type SilentError struct {
	Nodes []string // by name
	Err   error    // why
}

// Error is for people.
func (e *SilentError) Error() string { return strings.Join(e.Nodes, ", ") + " did not answer" }

func (e *SilentError) Unwrap() error { return e.Err }

// Levels lists a tenant's buckets by limit and subject, from all members' answers; of tenant "",
// those that no tenant owns. A SilentError says who did not answer; the rest is good all the same.
func (m *Manager) Levels(ctx context.Context, tenant string) ([]Bucketful, error) {
	m.mu.Lock()
	view := m.view
	m.mu.Unlock()
	if view == nil {
		return nil, errors.New("lease: no view yet")
	}
	type answer struct {
		resp *leasepb.LevelsResponse
		err  error
	}
	answers := make([]answer, len(view.Members))
	done := make(chan struct{}, len(view.Members))
	for i, to := range view.Members {
		go func() { // ends with ctx at the latest
			defer func() { done <- struct{}{} }()
			answers[i].resp, answers[i].err = m.levelsOf(ctx, to, tenant)
		}()
	}
	for range view.Members {
		<-done
	}
	all := &gathered{buckets: map[limiter.Key]*Bucketful{}}
	var silent SilentError
	for i, to := range view.Members {
		if answers[i].err == nil {
			answers[i].err = all.owned(to, answers[i].resp)
		}
		if answers[i].err != nil {
			silent.Nodes = append(silent.Nodes, to.Name)
			silent.Err = errors.Join(silent.Err, answers[i].err)
		}
	}
	for i, to := range view.Members {
		if answers[i].err == nil {
			all.held(to, answers[i].resp)
		}
	}
	if silent.Err != nil {
		slices.Sort(silent.Nodes)
		return all.list(), &silent
	}
	return all.list(), nil
}

func (m *Manager) levelsOf(ctx context.Context, to Member, tenant string) (*leasepb.LevelsResponse, error) {
	if to.Incarnation == m.cfg.Self.Incarnation {
		return m.levels(tenant), nil
	}
	if m.cfg.Client == nil {
		return nil, errors.New("there is no way to it")
	}
	cc, err := m.cfg.Client(to.Address)
	if err != nil {
		return nil, err
	}
	return leasepb.NewLeaseClient(cc).Levels(ctx, &leasepb.LevelsRequest{Tenant: []byte(tenant)})
}

// Levels see lease.proto.
func (s service) Levels(_ context.Context, r *leasepb.LevelsRequest) (*leasepb.LevelsResponse, error) {
	return s.m.levels(string(r.GetTenant())), nil
}

// levels are this process's.
func (m *Manager) levels(tenant string) *leasepb.LevelsResponse {
	m.ownerMu.Lock()
	m.self.wanted.Store(true) // what was settled here just now counts
	m.exchangeLocked(nil)
	m.ownerMu.Unlock()
	owned := m.owned(tenant)
	held := m.holder.Levels(tenant)
	return &leasepb.LevelsResponse{
		Owned: collect(owned[:min(len(owned), maxLevels)], func(o *OwnerLevel) *leasepb.OwnedLevel {
			return &leasepb.OwnedLevel{
				Bucket: keyPB(&o.Key), Limit: limitPB(&o.Limit), Level: o.Level, Here: o.Here, Lent: o.Lent, Outstanding: o.Outstanding,
				Holders: collect(o.Holders, func(h *OwnerHolding) *leasepb.OwnedHolding {
					return &leasepb.OwnedHolding{Holder: h.Holder, Name: h.Name, Share: h.Share, Outstanding: h.Outstanding, Level: h.Level, Live: h.Live}
				}),
			}
		}),
		Held: collect(held[:min(len(held), maxLevels)], func(h *HolderLevel) *leasepb.HeldLevel {
			return &leasepb.HeldLevel{Bucket: keyPB(&h.Key), Level: h.Level, InUse: h.InUse}
		}),
	}
}

// owned are the levels of a tenant's buckets that this process owns. The lock is given up again and again: who looks at a
// million buckets must not keep asks waiting.
func (m *Manager) owned(tenant string) (all []OwnerLevel) {
	for next, more := uint32(0), true; more && len(all) < maxLevels; {
		var ls []OwnerLevel
		m.ownerMu.Lock()
		ls, next, more = m.owner.levelsFrom(m.cfg.Clock(), tenant, next, levelsBatch)
		m.ownerMu.Unlock()
		all = append(all, ls...)
	}
	sortLevels(all)
	return all
}

// gathered is what the members told.
type gathered struct{ buckets map[limiter.Key]*Bucketful }

func (g *gathered) owned(by Member, r *leasepb.LevelsResponse) error {
	for _, o := range r.GetOwned() {
		var c checker
		k, limit := c.key(o.GetBucket()), c.limit(o.GetLimit())
		if c.err != nil {
			return c.err
		}
		b := &Bucketful{Key: k, Limit: limit, Owner: by.Name, Level: o.GetLevel(), Here: o.GetHere(), Lent: int64(o.GetLent()), Outstanding: o.GetOutstanding()}
		b.Reset = resetOf(&limit, b.Level, b.Outstanding)
		for _, h := range o.GetHolders() {
			of := b.of(h.GetName())
			of.Outstanding += h.GetOutstanding()
			of.Lent += int64(h.GetShare())
		}
		g.buckets[k] = b
	}
	return nil
}

// of is a node's part.
func (b *Bucketful) of(node string) *Holding {
	i := slices.IndexFunc(b.Holders, func(h Holding) bool { return h.Node == node })
	if i < 0 {
		i = len(b.Holders)
		b.Holders = append(b.Holders, Holding{Node: node, InHand: -1})
	}
	return &b.Holders[i]
}

func (g *gathered) held(by Member, r *leasepb.LevelsResponse) {
	for _, b := range g.buckets { // it answered: what it does not name it does not have
		for i := range b.Holders {
			if h := &b.Holders[i]; h.Node == by.Name {
				h.InHand = 0
			}
		}
	}
	for _, l := range r.GetHeld() {
		var c checker
		b := g.buckets[c.key(l.GetBucket())]
		if c.err != nil || b == nil {
			continue // nobody says under which limit
		}
		h := b.of(by.Name)
		h.InHand = max(h.InHand, 0) + l.GetLevel()
		h.InUse += l.GetInUse()
	}
}

func (g *gathered) list() []Bucketful {
	out := make([]Bucketful, 0, len(g.buckets))
	for _, b := range g.buckets {
		slices.SortFunc(b.Holders, func(a, b Holding) int { return cmp.Compare(a.Node, b.Node) })
		out = append(out, *b)
	}
	slices.SortFunc(out, func(a, b Bucketful) int {
		return cmp.Or(cmp.Compare(a.Key.Limit, b.Key.Limit), cmp.Compare(a.Key.Subject, b.Key.Subject))
	})
	return out
}

// resetOf is the time until a bucket is full.
func resetOf(l *limiter.Limit, level, outstanding int64) time.Duration {
	switch {
	case l.Algorithm == limiter.Semaphore && outstanding > 0:
		return limiter.Never
	case l.Algorithm != limiter.GCRA || level >= l.Burst:
		return 0
	}
	return time.Duration(float64(l.Burst-level) / float64(l.Rate.Count) * float64(l.Rate.Per))
}
