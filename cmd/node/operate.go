package node

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/admin"
	"headgate/proxy/contentlog"
)

// adminConfig is what the admin API may see and do.
func (n *Node) adminConfig() admin.Config {
	return admin.Config{
		Token: n.cfg.AdminToken, Authorize: n.authorize, Gatherer: n.registry, Ready: n.ready, Status: n.status,
		Tenants: n.tenants, Levels: n.Levels, Explain: n.explain,
		PolicyText: n.policyText, PolicyRevisions: n.policyRevisions, ApplyPolicy: n.applyPolicy, RollBack: n.rollBack,
		ListKeys: n.listKeys, CreateKey: n.createKey, RotateKey: n.rotateKey, RevokeKey: n.revokeKey,
		Kills: n.kills, SetKill: n.setKill, Ladder: n.ladder, SetRung: n.setRung, Backends: n.backends, SetDrain: n.setDrain,
		Members: n.members, RemoveMember: n.removeMember, Audit: n.audit,
		Tokens: n.tokens, CreateToken: n.createToken, RevokeToken: n.revokeToken,
		Ledger: n.ledgerInfo, Backup: n.backup, Restore: n.restore,
		Zone: ledger.LoadZone, Budgets: n.budgets, AdjustBudget: n.adjustBudget, Holders: n.holders, ReleaseBudget: n.releaseBudget,
		Now: n.wall, ExportUsage: n.exportUsage, TopUsage: n.topUsage,
		Override: n.overriding, SetOverride: n.setOverride, NodeKills: n.nodeKills, SetNodeKill: n.setNodeKill,
		ExportContent: n.exportContent, EraseContent: n.eraseContent,
		InvalidateCache: n.invalidateCache, CacheGenerations: n.cacheGenerations, CacheStats: n.cacheStats, ExplainKey: n.explainKey, WrongAnswer: n.wrongAnswer, CacheRecent: n.cacheRecent,
	}
}

func (n *Node) exportContent(by admin.Actor, w io.Writer, f admin.ContentFilter) error {
	if err := n.alone.notes.add(by, "content.export", describe(f), time.Now()); err != nil {
		return err
	}
	_, err := n.content.Export(w, contentlog.Filter(f))
	return err
}

func (n *Node) eraseContent(by admin.Actor, f admin.ContentFilter) (int, error) {
	if err := n.alone.notes.add(by, "content.erase", describe(f), time.Now()); err != nil {
		return 0, err
	}
	return n.content.Erase(contentlog.Filter(f))
}

// describe says whose content a filter means.
func describe(f admin.ContentFilter) string {
	var of []string
	if f.Tenant != "" {
		of = append(of, fmt.Sprintf("tenant %q", f.Tenant))
	}
	if f.User != "" {
		of = append(of, fmt.Sprintf("user %q", f.User))
	}
	if !f.Since.IsZero() {
		of = append(of, "since "+stamp(f.Since))
	}
	if !f.Until.IsZero() {
		of = append(of, "until "+stamp(f.Until))
	}
	return strings.Join(of, ", ")
}

// ready says why the node should get no traffic. A node that was cut off from its cluster goes
// on serving, by what its limits say of that.
func (n *Node) ready() error {
	s, health := n.current(), n.cluster.Ledger().Health()
	switch {
	case n.draining.Load():
		return errors.New("draining")
	case health != nil:
		return health
	case n.cluster.Epoch() == 0:
		return fmt.Errorf("not joined yet: %s", n.cluster.Awaits())
	case s.problem != nil:
		return fmt.Errorf("the policy in force in the cluster can't be used here: %w", s.problem)
	case s.index == nil && n.truth.Facts().Policy == nil:
		return errors.New("there is no policy yet: headgate apply -f policy.yaml")
	case s.index == nil:
		return errors.New("entering the view")
	case n.pool.Up() == 0:
		return errors.New("no backend is up")
	}
	return nil
}

// current is what requests are decided by now.
func (n *Node) current() standing {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.now
}

// policy is the one in force here; empty before there is one.
func (s *standing) policyOrNone() *ledger.Policy {
	if s.index == nil {
		return &ledger.Policy{}
	}
	return s.index.Policy
}

func (n *Node) status() admin.Status {
	now := n.current()
	p := now.policyOrNone()
	f := n.truth.Facts()
	s := admin.Status{
		Node: n.cfg.NodeID, Version: n.cfg.Version, UptimeSeconds: int64(time.Since(n.started).Seconds()), Ready: true,
		Listen: n.Addr(), ClusterListen: n.cluster.Address(), Tenants: len(p.Tenants), Keys: n.keyTable().Len() + len(n.devKeys(p)),
		Models: []string{}, Buckets: n.limits.Len(), Backends: []admin.Backend{},
		Cluster: &admin.ClusterStatus{
			Name: n.cfg.ClusterName, ID: hex.EncodeToString(f.ClusterID), Incarnation: fmt.Sprintf("%016x", n.cluster.Incarnation()),
			Leader: n.cluster.LeaderName(), Epoch: n.cluster.Epoch(), Members: []string{},
			ViewLease: admin.ViewLease{Held: n.cluster.Leased(), UntilMS: n.cluster.LeaseLeft().Milliseconds()},
		},
	}
	s.Cluster.Partitions, s.Cluster.Waiting = n.owned()
	for _, incarnation := range n.limits.Owing() {
		s.Cluster.Owing = append(s.Cluster.Owing, n.nameOf(incarnation))
	}
	if now.policy != nil {
		s.PolicyRevision, s.PolicySource = now.policy.Revision, "applied by "+now.policy.Actor
	}
	if now.view != nil {
		for _, m := range now.view.Members {
			s.Cluster.Members = append(s.Cluster.Members, m.Name)
		}
	}
	if now.index != nil {
		s.Degraded = n.degraded()
	}
	if err := n.ready(); err != nil {
		s.Ready, s.NotReady = false, err.Error()
	}
	for _, m := range p.Models {
		s.Models = append(s.Models, m.Name)
	}
	for _, b := range n.backendStates() {
		s.Backends = append(s.Backends, admin.Backend{
			Name: b.Backend, Endpoint: b.Endpoint, URL: b.URL, State: b.State, Draining: b.Leaving, InFlight: b.InFlight, Slots: int(b.Slots), LastError: b.LastError,
			Breaker: b.Breaker, Ejected: b.Ejected, Drained: b.Drained, PausedMS: b.PausedMS, Share: b.Share, Stale: b.Stale, Overflow: b.Overflow,
		})
	}
	return s
}

// owned counts the partitions that this node owns, and those of them that it may not grant for yet.
func (n *Node) owned() (partitions, waiting int) {
	ring := n.cluster.Fence().Ring()
	for i, owned := range ring.Owned() {
		if ring.Members()[i].Incarnation == n.self {
			partitions = owned
		}
	}
	return partitions, n.cluster.Fence().Waiting(cluster.Now())
}

// nameOf a member of the view.
func (n *Node) nameOf(incarnation uint64) string {
	for _, m := range n.cluster.Fence().Ring().Members() {
		if m.Incarnation == incarnation {
			return m.Name
		}
	}
	return fmt.Sprintf("%016x", incarnation)
}

func (n *Node) tenants() []admin.Tenant {
	now := n.current()
	keys := map[string]int{}
	for k := range n.keyTable().All() {
		keys[k.Tenant]++
	}
	p := now.policyOrNone()
	out := make([]admin.Tenant, 0, len(p.Tenants))
	for _, t := range p.Tenants {
		out = append(out, admin.Tenant{Name: t.Name, Plan: t.Plan, Keys: keys[t.Name], Suspended: t.Suspended, Owner: n.cluster.Owner(t.Name).Name})
	}
	return out
}

// Levels are a tenant's buckets under the policy in force, as their owner and those it lent to say.
func (n *Node) Levels(ctx context.Context, tenant string) ([]admin.Level, error) {
	s := n.current()
	if s.index == nil {
		return nil, admin.Errorf(admin.Conflict, "no policy is in force on this node yet")
	}
	c, ok := s.index.Tenant(tenant)
	if !ok {
		return nil, noTenant(s.index.Policy, tenant)
	}
	limits := make(map[string]ledger.ResolvedLimit, len(c.Limits))
	for _, l := range c.Limits {
		limits[l.Bucket] = l
	}
	away := ""
	buckets, err := n.limits.Levels(ctx, tenant)
	if n.supersede(ctx, buckets, limits) {
		buckets, err = n.limits.Levels(ctx, tenant)
	}
	if err != nil {
		away = err.Error()
	}
	out := []admin.Level{}
	for i := range buckets {
		if rule, ok := limits[buckets[i].Key.Limit]; ok { // else its plan has it no more
			out = append(out, level(&buckets[i], &rule, away))
		}
	}
	return out, nil
}

// maxSuperseded bounds the buckets that are brought under a changed limit because somebody looks.
const maxSuperseded = 1000

// supersede has the owners of buckets that were not used since their limits changed take the change
// over, so that they are shown as they will be then. It says whether there was any.
func (n *Node) supersede(ctx context.Context, buckets []lease.Bucketful, limits map[string]ledger.ResolvedLimit) (any bool) {
	for i := range buckets[:min(len(buckets), maxSuperseded)] {
		b := &buckets[i]
		if rule, ok := limits[b.Key.Limit]; ok && b.Limit.Revision < rule.Whole.Revision {
			any = true
			cs := [...]limiter.Charge{{Key: b.Key, Limit: rule.Whole, Spread: rule.Spread, Shadow: true}}
			n.limits.Peek(ctx, cs[:], make([]limiter.Decision, 1))
		}
	}
	return any
}

// level words one bucket for people.
func level(b *lease.Bucketful, rule *ledger.ResolvedLimit, away string) admin.Level {
	a := admin.Level{
		Limit: rule.Name, Scope: rule.Scope, Unit: rule.Unit, Subject: b.Key.Subject, Level: b.Level, Capacity: rule.Whole.Capacity(),
		ResetMS: -1, Owner: b.Owner, Away: away, Unavailable: cmp.Or(rule.Unavailable, proxy.Local.String()),
		Lendable: b.Here, Debt: max(-b.Here, 0), Outstanding: b.Outstanding, LentRate: lentRate(b.Lent), Holders: []admin.Holding{},
	}
	if b.Reset != limiter.Never {
		a.ResetMS = b.Reset.Milliseconds()
	}
	for _, h := range b.Holders {
		held := admin.Holding{Node: h.Node, Outstanding: h.Outstanding, InUse: h.InUse}
		if h.InHand >= 0 {
			held.InHand = &h.InHand
			a.Level += h.InHand
		}
		if h.Lent >= 0 {
			lent := lentRate(h.Lent)
			held.LentRate = &lent
		}
		a.Holders = append(a.Holders, held)
	}
	return a
}

// lentRate is a part of a rate, 0 to 1.
func lentRate(share int64) float64 { return float64(share) / lease.ShareOne }

// explain asks for a key of the tenant, or for the one named.
func (n *Node) explain(ctx context.Context, q admin.ExplainRequest) (any, error) {
	s := n.current()
	if s.index == nil {
		return nil, admin.Errorf(admin.Conflict, "no policy is in force on this node yet")
	}
	if _, ok := s.index.Tenant(q.Tenant); !ok && q.Tenant != "" {
		return nil, noTenant(s.index.Policy, q.Tenant)
	}
	k := n.anyKey(s.index, q.Tenant, q.Key)
	if k == nil {
		return nil, n.noKey(q.Tenant, q.Key)
	}
	if q.Model == "" {
		return nil, admin.Errorf(admin.Invalid, "model: say which one is asked for (--model); headgate status lists them")
	}
	c, ok := n.proxy.Snapshot().Lookup(k.Hash)
	if !ok {
		return nil, admin.Errorf(admin.NotFound, "key %q belongs to no tenant of the policy", k.ID)
	}
	user := q.User
	if user == "" {
		user = c.User
	}
	h := http.Header{}
	for name, value := range q.Headers {
		h.Set(name, value)
	}
	for name, value := range map[string]string{"X-Headgate-Class": q.Class, "X-Headgate-Surface": q.Surface} {
		if value != "" {
			h.Set(name, value)
		}
	}
	return n.proxy.Explain(ctx, c, &proxy.Question{Model: q.Model, User: user, Header: h, Input: q.Input, Output: q.Output})
}

// anyKey is the key with an id, or any of a tenant's; nil if there is none.
func (n *Node) anyKey(ix *ledger.Index, tenant, id string) *ledger.KeyRecord {
	fits := func(k *ledger.KeyRecord) bool {
		return (tenant == "" || k.Tenant == tenant) && (id == "" || k.ID == id)
	}
	for _, k := range n.devRecords(ix.Policy) {
		if fits(k) {
			return k
		}
	}
	if id != "" {
		if k, ok := n.keyTable().ByID(id); ok && fits(k) {
			return k
		}
		return nil
	}
	for k := range n.keyTable().All() {
		if fits(k) {
			return k
		}
	}
	return nil
}

// devRecords are the development node's own keys as the table has others.
func (n *Node) devRecords(p *ledger.Policy) (out []*ledger.KeyRecord) {
	keys, err := ledger.KeysOf(n.devKeys(p)...)
	if err != nil { // they were indexed
		return nil
	}
	for k := range keys.All() {
		out = append(out, k)
	}
	return out
}

// overriding is this node's override; nil where there is none.
func (n *Node) overriding(context.Context) (*admin.Override, error) {
	return n.alone.current(time.Now()), nil
}

// setOverride sets or ends this node's override, without a quorum.
func (n *Node) setOverride(_ context.Context, by admin.Actor, o admin.OverrideChange) (admin.Done, error) {
	now := time.Now()
	mode, ok := proxy.ParseMode(o.Unavailable)
	if !ok && o.Unavailable != "" {
		return admin.Done{}, admin.Errorf(admin.Invalid, "unavailable: %q is not one of allow, deny, local", o.Unavailable)
	}
	if err := n.alone.overrule(by, o, now); err != nil {
		return admin.Done{}, err
	}
	n.log.Warn("override of this node's limits", "unavailable", o.Unavailable, "for", o.For.String(), "actor", by.Name)
	n.switching.Lock()
	defer n.switching.Unlock()
	var until time.Time // has passed
	// Of two at once the one that is shown.
	if o := n.alone.current(now); o != nil {
		mode, _ = proxy.ParseMode(o.Unavailable)
		until = o.Expires
	}
	n.proxy.SetOverride(mode, until)
	return admin.Done{}, nil
}

func (n *Node) nodeKills(context.Context) ([]admin.Kill, error) {
	kills, _ := n.alone.live(time.Now())
	slices.SortFunc(kills, func(a, b admin.Kill) int { return strings.Compare(a.Kind+" "+a.Name, b.Kind+" "+b.Name) })
	return kills, nil
}

// setNodeKill throws or releases a kill switch of this node alone, without a quorum.
func (n *Node) setNodeKill(_ context.Context, by admin.Actor, k admin.KillSwitch) (admin.Done, error) {
	if err := n.alone.set(by, k, time.Now()); err != nil {
		return admin.Done{}, err
	}
	n.log.Warn("kill switch of this node", "kind", k.Kind, "name", k.Name, "on", k.On, "actor", by.Name)
	n.setSwitches(nil)
	return admin.Done{}, nil
}

// reportEvery is how often a node looks at what it owes the ledger and the log.
const reportEvery = time.Second

// usedEvery is how often the ledger is told at most when keys were used last.
const usedEvery = time.Minute

// report tells the ledger what this node did alone and when keys were used last, lets its own
// kill switches expire, and the log know when it is cut off.
func (n *Node) report(ctx context.Context) {
	t := time.NewTicker(reportEvery)
	defer t.Stop()
	told := time.Now()
	var expires time.Time
	var tokenless string
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		standing, lacks := n.current(), ""
		if standing.index != nil {
			n.proxy.Degraded() // logs a change
		}
		if n.cluster.Ledger().IsLeader() {
			lacks = n.tokenless(standing.policyOrNone())
		}
		if lacks != "" && lacks != tokenless {
			n.log.Warn("the webhook gets no token", "problem", lacks)
		}
		tokenless = lacks
		now := time.Now()
		if kills, next := n.alone.live(now); !next.Equal(expires) || len(kills) == 0 && !expires.IsZero() {
			expires = next
			n.setSwitches(nil)
		}
		if !n.cluster.Leased() {
			continue
		}
		if err := n.alone.notes.tell(ctx, n.cfg.NodeID, n.proposeNote); err != nil && ctx.Err() == nil {
			n.log.Debug("the audit log was not told of what this node did alone", "error", err)
		}
		if now.Sub(told) >= usedEvery {
			told = now
			n.flushUsed(ctx)
		}
	}
}

func (n *Node) proposeNote(ctx context.Context, cmd *ledgerpb.Command) error {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	_, err := n.cluster.Propose(ctx, cmd)
	return err
}

// maxTouched bounds the keys of one report; the others are in the next.
const maxTouched = 10_000

// flushUsed tells the ledger which keys were used since it was told last.
func (n *Node) flushUsed(ctx context.Context) {
	touch := &ledgerpb.TouchKeys{}
	keys := n.keyTable()
	for id, at := range n.compiler.allUsed() {
		k, ok := keys.ByID(id)
		if !ok || at <= keys.LastUsed(k).Unix() || len(touch.GetIds()) >= maxTouched {
			continue
		}
		touch.Ids, touch.Unix = append(touch.Ids, id), append(touch.Unix, at)
	}
	if len(touch.GetIds()) == 0 {
		return
	}
	cmd := &ledgerpb.Command{Version: 1, Actor: n.actor().Name, Body: &ledgerpb.Command_TouchKeys{TouchKeys: touch}}
	if err := n.proposeNote(ctx, cmd); err != nil && ctx.Err() == nil {
		n.log.Debug("the ledger was not told when keys were used last", "error", err)
	}
}
