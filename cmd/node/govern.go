package node

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy"
	"headgate/proxy/admin"
	"headgate/proxy/ladder"
)

// govern is the part of the admin API that the whole cluster answers for.

// proposeTimeout bounds how long a change waits for a quorum.
const proposeTimeout = 5 * time.Second

// propose has the cluster agree on a change. When it returns this node's replica has it: who
// changed something sees it here at once.
func (n *Node) propose(ctx context.Context, by admin.Actor, cmd *ledgerpb.Command) (*ledgerpb.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	cmd.Version, cmd.Actor = 1, by.Name
	r, err := n.cluster.Propose(ctx, cmd)
	if err != nil {
		return nil, n.notProposed(err)
	}
	if err := ledger.RefusalOf(r); err != nil {
		return nil, refusal(err)
	}
	return r, nil
}

// notProposed gives an error of a proposal its code.
func (n *Node) notProposed(err error) error {
	switch {
	case errors.Is(err, ledger.ErrUnknownOutcome):
		return &admin.Error{Code: admin.Unknown, Err: fmt.Errorf("%w; headgate audit shows what was", err)}
	case errors.Is(err, ledger.ErrNoLeader) && n.cluster.Epoch() == 0:
		return admin.Errorf(admin.NoQuorum, "nothing was done: %s", n.cluster.Awaits())
	case errors.Is(err, ledger.ErrNoLeader), errors.Is(err, ledger.ErrBusy), errors.Is(err, ledger.ErrStopped): // nothing was done
		return &admin.Error{Code: admin.NoQuorum, Err: err}
	case errors.Is(err, ledger.ErrTooLarge):
		return &admin.Error{Code: admin.TooLarge, Err: err}
	}
	return err
}

func (n *Node) change(ctx context.Context, by admin.Actor, cmd *ledgerpb.Command) (admin.Done, error) {
	r, err := n.propose(ctx, by, cmd)
	return admin.Done{Index: r.GetIndex()}, err
}

// authorize finds the holder of an admin token that the cluster keeps.
func (n *Node) authorize(token string) (admin.Actor, bool) {
	t, ok := n.truth.Facts().Tokens.Lookup(sha256.Sum256([]byte(token)))
	if !ok || !t.Expires.IsZero() && !time.Now().Before(t.Expires) {
		return admin.Actor{}, false
	}
	return admin.Actor{Name: t.Name, Role: admin.Role(t.Role)}, true // the same three, in the same order
}

// applyPolicy puts a policy in force on every node; it returns once it is on this one.
func (n *Node) applyPolicy(ctx context.Context, by admin.Actor, c admin.PolicyChange) (admin.Applied, error) {
	f := n.truth.Facts()
	if c.Expected != nil && *c.Expected != f.Revision() {
		return admin.Applied{}, unexpected(*c.Expected, f)
	}
	plan, err := ledger.Prepare(time.Now(), c.Text, f, n.keyTable(), c.Expected)
	if err != nil {
		return admin.Applied{}, refusal(err)
	}
	return n.enact(ctx, by, plan, c.DryRun)
}

// rollBack puts the text of an earlier revision in force again, as a new revision.
func (n *Node) rollBack(ctx context.Context, by admin.Actor, r admin.Rollback) (admin.Applied, error) {
	f := n.truth.Facts()
	if r.Expected != nil && *r.Expected != f.Revision() {
		return admin.Applied{}, unexpected(*r.Expected, f)
	}
	plan, err := ledger.PrepareRollback(time.Now(), r.Revision, f, n.keyTable())
	if err != nil {
		return admin.Applied{}, refusal(err)
	}
	return n.enact(ctx, by, plan, false)
}

func unexpected(expected uint64, f *ledger.Facts) error {
	return admin.Errorf(admin.Conflict, "revision %d is in force, not %d: look at it (headgate policy show) and apply again", f.Revision(), expected)
}

// refusal gives an error of the ledger's checks its code.
func refusal(err error) error {
	if r, ok := errors.AsType[*ledger.Refusal](err); ok {
		return &admin.Error{Code: admin.Code(r.Code), Err: err}
	}
	return &admin.Error{Code: admin.Invalid, Err: err}
}

func (n *Node) enact(ctx context.Context, by admin.Actor, plan *ledger.Prepared, dry bool) (admin.Applied, error) {
	a := admin.Applied{Revision: n.truth.Facts().Revision(), DryRun: dry, Changes: []string{}, Warnings: plan.Warnings}
	for _, c := range plan.Changes {
		a.Changes = append(a.Changes, c.String())
	}
	if lacks := n.tokenless(plan.Policy); lacks != "" {
		a.Warnings = append(a.Warnings, lacks)
	}
	if err := n.usable(plan.Command.GetText(), plan.Policy); err != nil {
		return a, &admin.Error{Code: admin.Invalid, Err: err}
	}
	if dry {
		return a, nil
	}
	r, err := n.propose(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_SetPolicy{SetPolicy: plan.Command}})
	if err != nil {
		return a, err
	}
	a.Revision = r.GetRevision()
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	if err := n.awaitRevision(ctx, a.Revision); err != nil {
		a.Warnings = append(a.Warnings, fmt.Sprintf("revision %d is committed, but not in force on this node: %v", a.Revision, err))
	}
	return a, nil
}

// usable says what of a policy this node could not use, such as a file that it does not have. text is what p was read from.
func (n *Node) usable(text []byte, p *ledger.Policy) error { return checkBackends(n.pool, text, p) }

func (n *Node) policyText(_ context.Context, revision uint64) (admin.PolicyText, error) {
	f := n.truth.Facts()
	p := f.Policy
	if revision != 0 {
		var ok bool
		if p, ok = f.PolicyAt(revision); !ok {
			return admin.PolicyText{}, admin.Errorf(admin.NotFound, "revision %d is not kept; headgate policy revisions lists those that are", revision)
		}
	}
	if p == nil {
		return admin.PolicyText{}, admin.Errorf(admin.NotFound, "there is no policy yet: headgate apply -f policy.yaml")
	}
	return admin.PolicyText{Revision: p.Revision, Text: p.Text}, nil
}

func (n *Node) policyRevisions(context.Context) ([]admin.PolicyRevision, error) {
	f := n.truth.Facts()
	out := make([]admin.PolicyRevision, 0, len(f.History))
	for _, p := range f.History {
		out = append(out, admin.PolicyRevision{Revision: p.Revision, At: p.Time, Actor: p.Actor, RolledBackTo: p.RolledBackTo, InForce: p.Revision == f.Revision()})
	}
	return out, nil
}

// createKey makes a key; its secret is in the answer and nowhere else.
func (n *Node) createKey(ctx context.Context, by admin.Actor, k admin.NewKey) (admin.CreatedKey, error) {
	now := time.Now()
	secret, hash, err := ledger.NewKey(rand.Reader, !k.Test)
	if err != nil {
		return admin.CreatedKey{}, err
	}
	if k.ID == "" {
		k.ID = freshID(k.Tenant, hash, now)
	}
	key := ledger.Key{
		ID: k.ID, Tenant: k.Tenant, Hash: ledger.FormatHash(hash), Name: k.Name, User: k.User, Class: k.Class, Expires: ledger.Date(k.Expires),
		Models: k.Models, Routes: k.Routes, Surfaces: k.Surfaces, AssertUser: k.AssertUser,
	}
	if err := n.addKey(ctx, by, key, "", time.Time{}); err != nil {
		return admin.CreatedKey{}, err
	}
	return admin.CreatedKey{Key: secret, ID: k.ID, Tenant: k.Tenant, Hash: key.Hash, Expires: k.Expires}, nil
}

// addKey adds a key, which may take the place of another that ends then.
func (n *Node) addKey(ctx context.Context, by admin.Actor, k ledger.Key, replaces string, ends time.Time) error {
	ix := n.current().index
	if ix == nil {
		return admin.Errorf(admin.Conflict, "there is no policy in force on this node yet, and so no tenant: headgate apply -f policy.yaml")
	}
	cmd, err := ix.Policy.PrepareKeys(replaces, ends, k)
	if err != nil {
		return refusal(err)
	}
	_, err = n.propose(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_CreateKeys{CreateKeys: cmd}})
	return err
}

// freshID names a key after its tenant and day; some digits of the hash keep two apart.
func freshID(tenant string, hash [32]byte, now time.Time) string {
	return fmt.Sprintf("%s-%s-%x", tenant, now.UTC().Format("20060102"), hash[:3])
}

// rotateKey makes a key with the rights of another, which ends after the overlap.
func (n *Node) rotateKey(ctx context.Context, by admin.Actor, r admin.KeyRotation) (admin.CreatedKey, error) {
	now := time.Now()
	old, ok := n.keyTable().ByID(r.ID)
	if !ok {
		return admin.CreatedKey{}, admin.Errorf(admin.NotFound, "there is no key %q; headgate keys list shows them", r.ID)
	}
	if !old.Active(now) {
		return admin.CreatedKey{}, admin.Errorf(admin.Conflict, "key %s is revoked or expired; create a new one: headgate keys create --tenant %s", r.ID, old.Tenant)
	}
	secret, hash, err := ledger.NewKey(rand.Reader, true)
	if err != nil {
		return admin.CreatedKey{}, err
	}
	ends := now.Add(r.Overlap)
	if e := old.Expires(); !e.IsZero() && e.Before(ends) {
		ends = e
	}
	key := ledger.Key{
		ID: freshID(old.Tenant, hash, now), Tenant: old.Tenant, Hash: ledger.FormatHash(hash), Name: old.Name, User: old.User, Class: old.Class,
		Expires: ledger.Date(old.Expires()), Models: old.Models, Routes: old.Routes, Surfaces: old.Surfaces, AssertUser: old.AssertUser,
	}
	if err := n.addKey(ctx, by, key, r.ID, ends); err != nil {
		return admin.CreatedKey{}, err
	}
	return admin.CreatedKey{Key: secret, ID: key.ID, Tenant: old.Tenant, Hash: key.Hash, Expires: old.Expires(), Replaces: r.ID, ReplacedExpires: ends}, nil
}

func (n *Node) revokeKey(ctx context.Context, by admin.Actor, id string) (admin.Done, error) {
	return n.change(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_RevokeKey{RevokeKey: &ledgerpb.RevokeKey{Id: id}}})
}

// listKeys are all keys, with when any node saw them used last.
func (n *Node) listKeys(ctx context.Context) ([]admin.Key, error) {
	s := n.current()
	f, now := n.truth.Facts(), time.Now()
	status := map[string]string{}
	if s.index != nil {
		for _, t := range s.index.Policy.Tenants {
			if t.Suspended {
				status[t.Name] = "suspended"
			}
		}
	}
	for _, k := range f.Kills.All() {
		if k.Kind == ledger.KillTenant {
			status[k.Name] = "killed"
		}
	}
	used := n.cluster.LastUsed(ctx)
	var out []admin.Key
	add := func(k *ledger.KeyRecord, last time.Time) {
		a := admin.Key{ID: k.ID, Tenant: k.Tenant, Name: k.Name, Status: "active", Created: stamp(k.Created()), Expires: stamp(k.Expires())}
		if s := status[k.Tenant]; s != "" {
			a.Status = s
		}
		_, killed := f.Kills.Lookup(ledger.KillKey, k.ID)
		switch {
		case k.Revoked:
			a.Status = "revoked"
		case !k.Active(now):
			a.Status = "expired"
		case killed:
			a.Status = "killed"
		}
		if u := time.Unix(used[k.ID], 0); u.After(last) && used[k.ID] > 0 {
			last = u
		}
		a.LastUsed = stamp(last)
		out = append(out, a)
	}
	for k, last := range n.keyTable().All() {
		add(k, last)
	}
	for _, k := range n.devRecords(s.policyOrNone()) {
		add(k, time.Time{})
	}
	slices.SortFunc(out, func(a, b admin.Key) int { return strings.Compare(a.Tenant+"\x00"+a.ID, b.Tenant+"\x00"+b.ID) })
	return out, nil
}

// stamp writes a moment, and nothing for none.
func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

func (n *Node) kills(context.Context) ([]admin.Kill, error) {
	var out []admin.Kill
	for _, k := range n.truth.Facts().Kills.All() {
		out = append(out, admin.Kill{Kind: k.Kind.String(), Name: k.Name, Reason: k.Reason, Actor: k.Actor, At: k.Time})
	}
	return out, nil
}

// setKill throws or releases a kill switch everywhere. A name that nothing has is taken: it may
// come.
func (n *Node) setKill(ctx context.Context, by admin.Actor, k admin.KillSwitch) (admin.Done, error) {
	kind, err := ledger.ParseKillKind(k.Kind)
	if err != nil {
		return admin.Done{}, &admin.Error{Code: admin.Invalid, Err: err}
	}
	done, err := n.change(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_SetKill{SetKill: &ledgerpb.SetKill{
		Kind: ledgerpb.KillKind(kind), Name: k.Name, On: k.On, Reason: k.Reason,
	}}})
	if err == nil && k.On {
		done.Warnings = n.unknownTarget(kind, k.Name)
	}
	return done, err
}

// unknownTarget warns of a kill switch that stops nothing yet, which may be a slip.
func (n *Node) unknownTarget(kind ledger.KillKind, name string) []string {
	ix := n.current().index
	known := kind == ledger.KillGlobal
	switch {
	case kind == ledger.KillKey:
		_, known = n.keyTable().ByID(name)
		known = known || name == devKeyID
	case ix == nil:
	case kind == ledger.KillTenant:
		known = slices.ContainsFunc(ix.Policy.Tenants, func(t ledger.Tenant) bool { return t.Name == name })
	case kind == ledger.KillModel:
		known = slices.ContainsFunc(ix.Policy.Models, func(m ledger.Model) bool { return m.Name == name || slices.Contains(m.Aliases, name) })
	}
	if known {
		return nil
	}
	return []string{fmt.Sprintf("there is no %s %q now; the switch is thrown should one come", kind, name)}
}

func (n *Node) ladder(context.Context) ([]admin.Rung, error) {
	f, now := n.truth.Facts(), time.Now()
	var out []admin.Rung
	for _, r := range ladder.Rungs() {
		a := admin.Rung{Rung: r.String(), Effect: r.Effect(), Models: n.automatic(r)}
		if s, ok := f.Rungs.Lookup(r.String()); ok && (s.Expires.IsZero() || now.Before(s.Expires)) {
			a.On, a.Reason, a.Actor, a.At, a.Expires = true, s.Reason, s.Actor, s.Time, s.Expires
		}
		out = append(out, a)
	}
	return out, nil
}

func (n *Node) setRung(ctx context.Context, by admin.Actor, c admin.RungChange) (admin.Done, error) {
	if _, err := ladder.ParseRung(c.Rung); err != nil {
		return admin.Done{}, &admin.Error{Code: admin.NotFound, Err: err}
	}
	set := &ledgerpb.SetRung{Rung: c.Rung, On: c.On, Reason: c.Reason}
	if c.For > 0 {
		set.ExpiresUnixNano = time.Now().Add(c.For).UnixNano()
	}
	return n.change(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_SetRung{SetRung: set}})
}

func (n *Node) tokens(context.Context) ([]admin.Token, error) {
	var out []admin.Token
	for _, t := range n.truth.Facts().Tokens.All() {
		out = append(out, admin.Token{Name: t.Name, Role: admin.Role(t.Role), Created: t.Created, Expires: t.Expires})
	}
	return out, nil
}

func (n *Node) createToken(ctx context.Context, by admin.Actor, t admin.NewToken) (admin.CreatedToken, error) {
	secret := "hg_admin_" + strings.ToLower(rand.Text()+rand.Text())
	hash := sha256.Sum256([]byte(secret))
	m := &ledgerpb.Token{Name: t.Name, Hash: hash[:], Role: ledgerpb.Role(t.Role)}
	if !t.Expires.IsZero() {
		m.ExpiresUnixNano = t.Expires.UnixNano()
	}
	if _, err := n.propose(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_CreateToken{CreateToken: &ledgerpb.CreateToken{Token: m}}}); err != nil {
		return admin.CreatedToken{}, err
	}
	return admin.CreatedToken{Token: secret, Name: t.Name, Role: t.Role, Expires: t.Expires}, nil
}

func (n *Node) revokeToken(ctx context.Context, by admin.Actor, name string) (admin.Done, error) {
	return n.change(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_RevokeToken{RevokeToken: &ledgerpb.RevokeToken{Name: name}}})
}

func (n *Node) audit(_ context.Context, f admin.AuditFilter) ([]admin.AuditEntry, error) {
	entries := n.cluster.Ledger().Audit(f.Limit, ledger.AuditFilter{Actor: f.Actor, Object: f.Object, Since: f.Since})
	out := make([]admin.AuditEntry, 0, len(entries))
	for i := range slices.Backward(entries) { // the newest last
		out = append(out, auditEntry(&entries[i]))
	}
	return out, nil
}

// members are the nodes as this one sees them, each asked how it is.
func (n *Node) members(ctx context.Context) ([]admin.Member, error) {
	var out []admin.Member
	for _, m := range n.cluster.Members(ctx) {
		a := admin.Member{
			Name: m.Name, Incarnation: fmt.Sprintf("%016x", m.Incarnation), Address: m.Address, Version: m.Version, Self: m.Self, Gossip: m.Gossip, Raft: m.Raft,
			InView: m.InView, Partitions: m.Partitions, AppliedIndex: m.AppliedIndex, StateHash: hex.EncodeToString(m.StateHash),
			LastContactMS: m.LastContact.Milliseconds(), ViewLease: m.ViewLease,
		}
		if m.LastContact < 0 {
			a.LastContactMS = -1
		}
		if m.Err != nil {
			a.Error = m.Err.Error()
		}
		out = append(out, a)
	}
	return out, nil
}

func (n *Node) removeMember(ctx context.Context, by admin.Actor, name string) (admin.Done, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	err := n.cluster.Remove(ctx, name)
	switch {
	case errors.Is(err, cluster.ErrAlive):
		return admin.Done{}, &admin.Error{Code: admin.Conflict, Err: err}
	case errors.Is(err, cluster.ErrNoMember):
		return admin.Done{}, &admin.Error{Code: admin.NotFound, Err: fmt.Errorf("%w; headgate members lists those that are", err)}
	case errors.Is(err, ledger.ErrNoLeader):
		return admin.Done{}, &admin.Error{Code: admin.NoQuorum, Err: err}
	case errors.Is(err, ledger.ErrUnknownOutcome):
		return admin.Done{}, &admin.Error{Code: admin.Unknown, Err: fmt.Errorf("%w; headgate members shows what came of it", err)}
	case err != nil:
		return admin.Done{}, err
	}
	done, err := n.change(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_Note{Note: &ledgerpb.Note{
		Node: n.cfg.NodeID, UnixNano: time.Now().UnixNano(), Action: "member.remove", Detail: name,
	}}})
	if err != nil {
		done.Warnings = []string{"the audit log was not told: " + err.Error()}
	}
	return done, nil
}

func (n *Node) ledgerInfo(context.Context) (admin.LedgerInfo, error) {
	f, l := n.truth.Facts(), n.cluster.Ledger()
	s := l.Stats()
	info := admin.LedgerInfo{
		ClusterID: hex.EncodeToString(f.ClusterID), Index: f.Index, Term: s.Term, Leader: n.cluster.LeaderName(), StateHash: hex.EncodeToString(f.Hash[:]),
		PolicyRevision: f.Revision(), Voters: []string{},
		Counts: map[string]int{"keys": f.KeyCount, "kills": f.Kills.Len(), "rungs": f.Rungs.Len(), "tokens": f.Tokens.Len(), "budgets": f.Budgets, "revisions": len(f.History), "audit": len(l.Audit(admin.MaxAudit, ledger.AuditFilter{}))},
	}
	for _, m := range l.Members() {
		name := cluster.ServerIDName(string(m.ID))
		if m.Suffrage == raft.Voter {
			info.Voters = append(info.Voters, name)
		} else {
			info.NonVoters = append(info.NonVoters, name)
		}
	}
	return info, nil
}

// backup writes what the ledger holds. That it is taken is noted there first: a replica that has
// seen this change of its own has all that was committed before it.
func (n *Node) backup(ctx context.Context, by admin.Actor, w io.Writer, stale bool) error {
	if !stale {
		r, err := n.propose(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_Note{Note: &ledgerpb.Note{
			Node: n.cfg.NodeID, UnixNano: time.Now().UnixNano(), Action: "ledger.backup",
		}}})
		if e, ok := errors.AsType[*admin.Error](err); ok && e.Code == admin.NoQuorum {
			return admin.Errorf(admin.NoQuorum, "%w; a copy of what this node has: headgate ledger backup --stale", err)
		}
		switch {
		case err != nil:
			return err
		case n.truth.Facts().Index < r.GetIndex():
			return errors.New("this node lags behind its cluster: try again, or on another node")
		}
	}
	return n.cluster.Ledger().Backup(ctx, w, true)
}

func (n *Node) restore(ctx context.Context, by admin.Actor, r io.Reader, force bool) (admin.Restored, error) {
	hash, err := n.cluster.RestoreLedger(ctx, r, force)
	switch {
	case errors.Is(err, ledger.ErrNoLeader):
		return admin.Restored{}, &admin.Error{Code: admin.NoQuorum, Err: err}
	case errors.Is(err, ledger.ErrNotEmpty):
		return admin.Restored{}, &admin.Error{Code: admin.Conflict, Err: err}
	case errors.Is(err, ledger.ErrBackup):
		return admin.Restored{}, &admin.Error{Code: admin.Invalid, Err: err}
	case err != nil:
		return admin.Restored{}, &admin.Error{Code: admin.Unknown, Err: fmt.Errorf("%w; compare the state of headgate ledger inspect with the backup's", err)}
	}
	state := hex.EncodeToString(hash)
	n.log.Warn("the ledger was restored from a backup", "actor", by.Name, "state_hash", state)
	// Noted only now: the restore replaces the audit log, too.
	if err := n.alone.notes.add(by, "ledger.restore", "state "+state, time.Now()); err != nil {
		n.log.Error("the audit log is not told of the restore", "error", err)
	}
	return admin.Restored{StateHash: state}, nil
}

// setSwitches hands the cluster's kill switches and rungs, and this node's own, to the front door.
// Facts are for the ledger's goroutine to bring, as they come in order; nil stands for the last:
// whoever reads them himself may have been overtaken.
func (n *Node) setSwitches(f *ledger.Facts) {
	n.switching.Lock()
	defer n.switching.Unlock()
	if f != nil {
		n.switched = f
	}
	s := &proxy.Switches{Tenants: map[string]*proxy.Kill{}, Keys: map[string]*proxy.Kill{}, Models: map[string]*proxy.Kill{}, Rungs: map[string]time.Time{}}
	put := func(kind, name, reason string) {
		k := &proxy.Kill{Reason: reason}
		switch kind {
		case "global":
			s.Global = k
		case "model":
			s.Models[name] = k
		case "tenant":
			s.Tenants[name] = k
		case "key":
			s.Keys[name] = k
		}
	}
	own, _ := n.alone.live(time.Now())
	for _, k := range own {
		put(k.Kind, k.Name, k.Reason)
	}
	if f = n.switched; f != nil {
		for _, k := range f.Kills.All() {
			put(k.Kind.String(), k.Name, k.Reason)
		}
		for _, r := range f.Rungs.All() {
			s.Rungs[r.Name] = r.Expires
		}
		n.applyDrains(f)
	}
	n.proxy.SetSwitches(s)
}
