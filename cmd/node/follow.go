package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"headgate/cluster"
	"headgate/cluster/ledger"
)

// standing is what this node goes by: the policy that the cluster agreed on, compiled for the
// node's share of its limits.
type standing struct {
	index    *ledger.Index          // nil: nothing is in force yet
	policy   *ledger.PolicyRevision // of index
	spent    ledger.Share           // the share that index was made for
	compiled uint64                 // how often: the revision of index's limits
	problem  error                  // why a newer policy is not in force here
	unusable uint64                 // its revision

	view      *ledger.View  // stepped to
	share     *ledger.Share // of view; nil: this process is no member
	before    *ledger.Share // what was spendable when view came; nil: nothing, or not known
	settledAt time.Time     // until then before counts, too; zero: settled

	entered   uint64 // epoch of the first view with a share for this process; 0: none yet
	enteredAt int64  // by the buckets' clock
	levels    bool   // what an earlier process saved was seen to
}

// notify wakes follow. It never blocks.
func (n *Node) notify() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// factsChanged is called in the ledger's goroutine: kill switches and rungs bind here and now,
// the rest is follow's.
func (n *Node) factsChanged(f *ledger.Facts) {
	n.setSwitches(f)
	n.notify()
}

// step takes this node's share of a view that it steps to. Nodes that have not stepped yet still
// spend their shares of earlier views, for as long as a view lease may last: till then a share
// that grew is not spent. Who skipped a view does not know what others spent in it.
func (s *standing) step(now time.Time, v *ledger.View, share *ledger.Share) {
	if v.Epoch > 1 { // before the first view nobody spent anything
		before, ok := s.spendable(now)
		s.before, s.settledAt = nil, now.Add(cluster.TakeoverWait)
		if ok && s.view != nil && v.Epoch == s.view.Epoch+1 {
			s.before = &before
		}
	}
	s.view, s.share = v, share
}

// stepped goes on to a new view. Until follow has put its share in force, that of before is spent
// on the lease of before only.
func (n *Node) stepped(v *ledger.View) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s, now := &n.now, time.Now()
	share := shareOf(v, n.cfg.NodeID, n.cluster.Incarnation())
	s.step(now, v, share)
	if spendable, ok := s.spendable(now); !ok || spendable != s.spent {
		n.outdatedAt.CompareAndSwap(0, cluster.Now()+int64(n.cluster.LeaseLeft()))
	}
	if share != nil && s.entered == 0 {
		s.entered, s.enteredAt = v.Epoch, n.proxy.Now()
	}
	n.notify()
}

// shareOf is a process's share of a view, by its rank among the members.
func shareOf(v *ledger.View, name string, incarnation uint64) *ledger.Share {
	rank := slices.IndexFunc(v.Members, func(m ledger.Member) bool { return m.Name == name && m.Incarnation == incarnation })
	if rank < 0 {
		return nil
	}
	return &ledger.Share{Rank: rank, Of: len(v.Members)}
}

// spendable is the share of every limit that this node may spend now: none while it is no
// member, or enters; what any member of either view holds while its share changes.
func (s *standing) spendable(now time.Time) (share ledger.Share, ok bool) {
	settled := s.settledAt.IsZero() || !now.Before(s.settledAt)
	switch {
	case s.share == nil:
		return ledger.Share{}, false
	case settled || s.before != nil && *s.before == *s.share:
		return *s.share, true
	case s.before == nil:
		return ledger.Share{}, false
	}
	return ledger.Share{Of: max(s.before.Of, s.share.Of), Least: true}, true
}

// leased: the cluster counts on this node, and it may spend its share.
func (n *Node) leased() bool {
	if !n.entered.Load() || !n.cluster.Leased() {
		return false
	}
	outdated := n.outdatedAt.Load()
	return outdated == 0 || cluster.Now() < outdated
}

// follow keeps what requests are decided by up to date: with the policy, with this node's
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
		if next := n.compile(n.truth.Facts(), time.Now()); !next.IsZero() {
			wait = min(max(time.Until(next), time.Millisecond), farAway)
		}
		t.Reset(wait)
	}
}

// retryEvery is how often a policy that this node can't use is tried again: what it lacks may come.
const retryEvery = 10 * time.Second

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
	share, ok := s.spendable(now)
	n.entered.Store(ok)
	if ok && f.Policy != nil {
		n.bring(f.Policy, share, now)
		if s.problem != nil {
			sooner(now.Add(retryEvery))
		}
	}
	if !ok || s.index == nil || s.spent == share {
		n.outdatedAt.Store(0)
	}
	if s.index != nil {
		sooner(s.index.NextRamp)
	}
	if now.Before(s.settledAt) {
		sooner(s.settledAt)
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
	return s.index == nil || !samePolicy(s.policy, r) || s.spent != share ||
		!s.index.NextRamp.IsZero() && !now.Before(s.index.NextRamp)
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
		if p, err = ledger.ParsePolicy(r.Text); err != nil {
			return fmt.Errorf("revision %d, which a newer release may have written: %w", r.Revision, err)
		}
	} else {
		p = s.index.Policy
	}
	ix, err := p.IndexAt(now, ledger.Numbers{Policy: r.Number(), Local: s.compiled + 1}, share, n.keyTable(), n.devKeys(p)...)
	if err == nil {
		err = n.restoreLevels()
	}
	if err != nil {
		return err
	}
	if fresh {
		old := &ledger.Policy{}
		if s.index != nil {
			old = s.index.Policy
		}
		if err := n.pool.Update(backends(p)); err != nil {
			return err
		}
		if err := n.content.SetPolicies(contentPolicies(p)); err != nil {
			return errors.Join(err, n.pool.Update(backends(old))) // as it was
		}
		n.log.Info("policy in force", "revision", r.Revision)
	}
	s.index, s.policy, s.spent, s.compiled = ix, r, share, ix.Revision
	n.proxy.Apply(n.compiler.snapshot(ix))
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
