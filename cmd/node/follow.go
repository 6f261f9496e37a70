package node

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/lease"
)

// standing is what this node goes by: the policy that the cluster agreed on, compiled.
type standing struct {
	index    *ledger.Index          // nil: nothing is in force yet
	policy   *ledger.PolicyRevision // of index
	split    ledger.Share           // by which index splits limits for when their owners are out of reach
	compiled uint64                 // how often: index's Revision
	problem  error                  // why a newer policy is not in force here
	unusable uint64                 // its revision

	view  *ledger.View  // stepped to
	share *ledger.Share // of the last view in which this process was a member; nil: there was none
}

// notify wakes follow. It never blocks.
func (n *Node) notify() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// factsChanged is called in the ledger's goroutine: kill switches and rungs bind here and now,
// the rest is follow's. A ledger that was put back to a backup is told of budgets again.
func (n *Node) factsChanged(f *ledger.Facts) {
	n.setSwitches(f)
	if f.PutBack(n.shown) && n.money != nil {
		n.log.Warn("the ledger was restored from a backup: it is told again what this node has spent of budgets and holds")
		n.money.budgets.Retell()
	}
	n.shown = f
	n.notify()
}

// stepped goes on to a new view, after the fence has. The first one may be that which the levels of
// an earlier process are for.
func (n *Node) stepped(v *ledger.View) {
	n.mu.Lock()
	s := &n.now
	if share := shareOf(v, n.cfg.NodeID, n.cluster.Incarnation()); share != nil {
		s.share = share
	}
	first := s.view == nil
	s.view = v
	n.mu.Unlock()
	if first {
		n.loadLevels()
	}
	n.limits.Step(leaseView(v, n.cluster.Fence().Ring()))
	n.similar.cache.Moved()
	n.admission.dispatch.Moved()
	n.notify()
}

// leaseView is a view as package lease needs it; ring is the view's.
func leaseView(v *ledger.View, ring *cluster.Ring) *lease.View {
	out := &lease.View{Epoch: v.Epoch, Owners: make([]int32, v.Partitions), Place: ring.Partition}
	for _, m := range ring.Members() {
		out.Members = append(out.Members, lease.Member{Name: m.Name, Incarnation: m.Incarnation, Address: m.Address})
	}
	for p := range out.Owners {
		out.Owners[p] = int32(ring.Owner(uint32(p)))
	}
	return out
}

// shareOf is a process's share of a view, by its rank among the members.
func shareOf(v *ledger.View, name string, incarnation uint64) *ledger.Share {
	rank := slices.IndexFunc(v.Members, func(m ledger.Member) bool { return m.Name == name && m.Incarnation == incarnation })
	if rank < 0 {
		return nil
	}
	return &ledger.Share{Rank: rank, Of: len(v.Members)}
}

// follow keeps what requests are decided by up to date: with the policy, with this node's private
// share, and with the steps of ramps.
func (n *Node) follow(ctx context.Context) {
	const farAway = 24 * time.Hour // looked at again then, so that a clock that was set is noticed
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.changed:
		case <-t.C:
		}
		wait := farAway
		now := n.wall() // prices change at one moment on all nodes
		if next := n.compile(n.truth.Facts(), now); !next.IsZero() {
			wait = min(max(next.Sub(now), time.Millisecond), farAway)
		}
		t.Reset(wait)
	}
}

// retryEvery is how often a policy that this node can't use is tried again: what it lacks may come.
const retryEvery = 10 * time.Second

// beginPoll is how often it is looked whether this node can begin.
const beginPoll = 10 * time.Millisecond

// begun says whether limits can be decided as they should be: this node holds a view lease, and does not
// wait for the owners of before any more. Until then a node that starts takes no requests: it
// would decide them by private buckets.
func (n *Node) begun() bool {
	c := n.joined.Load()
	return c == nil || c.Leased() && c.Fence().Waiting(cluster.Now()) == 0
}

// compile puts in force what has changed, and says when something will change by itself. A
// policy that this node can't use leaves the one before in force, and the node not ready.
func (n *Node) compile(f *ledger.Facts, now time.Time) (next time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := &n.now
	sooner := func(t time.Time) {
		if !t.IsZero() && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	if s.index == nil && s.share != nil && !n.begun() {
		sooner(now.Add(beginPoll))
		return next
	}
	if s.share != nil && f.Policy != nil {
		n.bring(f.Policy, *s.share, now)
		if s.problem != nil {
			sooner(now.Add(retryEvery))
		}
	}
	if s.index != nil {
		sooner(s.index.NextChange)
	}
	return next
}

// bring puts a policy in force for a share, if that is due; n.mu is held.
func (n *Node) bring(r *ledger.PolicyRevision, share ledger.Share, now time.Time) {
	s := &n.now
	var err error
	if n.due(r, share, now) {
		err = n.putInForce(r, share, now)
	}
	if err != nil && (s.problem == nil || s.problem.Error() != err.Error()) {
		n.log.Error("a policy can't be put in force here; the one before stays", "revision", r.Revision, "error", err)
	}
	s.problem, s.unusable = err, r.Revision
	if err != nil && s.policy != nil && n.due(s.policy, share, now) { // its share and its ramps change all the same
		if err := n.putInForce(s.policy, share, now); err != nil {
			n.log.Error("the limits in force can't be brought up to date", "revision", s.policy.Revision, "error", err)
		}
	}
}

// due says whether the index must be made anew; n.mu is held.
func (n *Node) due(r *ledger.PolicyRevision, share ledger.Share, now time.Time) bool {
	s := &n.now
	return s.index == nil || !samePolicy(s.policy, r) || s.split != share ||
		!s.index.NextChange.IsZero() && !now.Before(s.index.NextChange)
}

// samePolicy: after a restore of the ledger another policy may have the same revision.
func samePolicy(a, b *ledger.PolicyRevision) bool {
	return a == b || a.Number() == b.Number() && a.Revision == b.Revision && bytes.Equal(a.Text, b.Text)
}

// putInForce; n.mu is held.
func (n *Node) putInForce(r *ledger.PolicyRevision, share ledger.Share, now time.Time) error {
	s := &n.now
	var p *ledger.Policy
	fresh := s.index == nil || !samePolicy(s.policy, r)
	if fresh {
		var err error
		if p, err = ledger.ParseInForce(r.Text); err != nil {
			return fmt.Errorf("revision %d, which a newer release may have written: %w", r.Revision, err)
		}
	} else {
		p = s.index.Policy
	}
	ix, err := p.IndexAt(now, ledger.Numbers{Policy: r.Number(), Local: s.compiled + 1}, share, n.keyTable(), n.devKeys(p)...)
	if err != nil {
		return err
	}
	if fresh {
		old := &ledger.Policy{}
		if s.index != nil {
			old = s.index.Policy
		}
		if err := n.pool.Update(backends(p)); err != nil {
			return cmp.Or(n.usable(r.Text, p), err)
		}
		if err := n.content.SetPolicies(contentPolicies(p)); err != nil {
			return errors.Join(err, n.pool.Update(backends(old))) // as it was
		}
		n.log.Info("policy in force", "revision", r.Revision)
	}
	s.index, s.policy, s.split, s.compiled = ix, r, share, ix.Revision
	n.admit(ix, r.Number())
	n.proxy.Apply(n.compiler.snapshot(ix, n.truth.Facts().ClusterID))
	close(n.inForce)
	n.inForce = make(chan struct{})
	return nil
}

// awaitRevision waits until a revision is in force on this node.
func (n *Node) awaitRevision(ctx context.Context, revision uint64) error {
	for {
		n.mu.Lock()
		s, changed := n.now, n.inForce
		n.mu.Unlock()
		switch {
		case s.policy != nil && s.policy.Revision >= revision:
			return nil
		case s.problem != nil && s.unusable >= revision:
			return s.problem
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-time.After(100 * time.Millisecond): // a problem closes nothing
		}
	}
}

// seed gives an empty ledger the policy that this node was started with.
func (n *Node) seed(ctx context.Context) {
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for said := ""; ; {
		f := n.truth.Facts()
		switch {
		case f.Policy != nil:
			n.compareSeed(f.Policy)
			return
		case n.seedText == nil && n.cluster.Epoch() > 0: // before, it may only not have come here yet
			n.log.Warn("there is no policy yet; apply one: headgate apply -f policy.yaml")
			return
		case n.seedText != nil && len(f.ClusterID) > 0:
			if err := n.proposeSeed(ctx); err != nil && ctx.Err() == nil && err.Error() != said {
				said = err.Error()
				n.log.Info("the policy waits for the ledger", "policy", n.seedSource, "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// compareSeed says so where the file that the node was started with is not what is in force.
func (n *Node) compareSeed(p *ledger.PolicyRevision) {
	if n.seedText != nil && n.seedSource != sourceDev && string(n.seedText) != string(p.Text) {
		n.log.Warn("the policy file is not the policy in force, which stands in the ledger; to put it in force: headgate apply -f, or SIGHUP",
			"policy", n.seedSource, "revision_in_force", p.Revision, "applied_by", p.Actor)
	}
}
