package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

// StateVersion is the newest version of the state machine that this program can apply. What
// a command does, the bounds below and the forms of the state hash belong to it: another
// behaviour is another version.
//
// 2 knows the blocks of durable limits; the arithmetic of package limiter that they use belongs to it. 3 knows
// the accounts of budgets, 4 the generations and tags of caches.
const StateVersion = 4

// Bounds of what the state holds.
const (
	// MaxCommand bounds an encoded command and a policy's text, in bytes. Whatever carries
	// commands must let as much through.
	MaxCommand = 16 << 20

	maxHistory      = 20      // revisions
	maxHistoryBytes = 8 << 20 // of their texts; the one in force is always kept
	maxKills        = 10_000
	maxRungs        = 1_000
	maxTokens       = 1_000
	maxMembers      = 1_024 // of a view
	maxAudit        = 10_000
	maxAuditBytes   = 16 << 20
	maxEvents       = 2_000 // alerts and spikes of budgets, beside them
	maxEventBytes   = 4 << 20
	maxTagged       = 2_000 // invalidations of tags, beside those
	maxTaggedBytes  = 4 << 20
	maxAuditText    = 4 << 10 // of before, and of after
	maxDone         = 1 << 16 // ids of commands that are remembered

	maxID     = 128 // bytes of ids and names, as namePattern has it
	maxLabel  = 256 // bytes of what people write: a name, a user, an actor, an address
	maxReason = 1_024
	maxScope  = 1_000 // names that one key is held to
)

var (
	// ErrUnknownCommand says that the command needs a newer program. The replica must stop rather than
	// guess; it goes on where it was once it was upgraded.
	ErrUnknownCommand = errors.New("the log holds a command that this version does not know: upgrade this node")
	// ErrDiverged says that the state of this replica is not the cluster's. It must stop, and its data
	// folder be wiped.
	ErrDiverged = errors.New("this replica has diverged from the cluster: stop it, wipe its data folder and let it join again")
)

// The codes of refused commands.
const (
	codeConflict = "conflict"
	codeNotFound = "not_found"
	codeExists   = "exists"
	codeInvalid  = "invalid"
	codeStale    = "stale"
	codeFull     = "full"
	codePeriod   = "period"
	codeNoMember = "no_member"
)

// Refusal is why a command was not done: a result's code and message as an error.
type Refusal struct {
	Code    string // conflict | not_found | exists | invalid | stale | full | period | no_member
	Message string // for people
}

func (r *Refusal) Error() string { return r.Message }

func refuse(code, format string, args ...any) error {
	return &Refusal{code, clip(fmt.Sprintf(format, args...))}
}

// RefusalOf is a result's refusal, a *Refusal; nil if the command was done.
func RefusalOf(r *ledgerpb.Result) error {
	if r.GetCode() == "" {
		return nil
	}
	return &Refusal{r.GetCode(), r.GetMessage()}
}

// State is the replicated truth: a pure state machine. It reads no clock and no randomness,
// and the order of no map, so that replicas that applied the same log are equal to the byte.
//
// Apply, Capture, Replace and Adopt are for one goroutine. Facts, Keys and Audit are for any.
type State struct {
	facts    atomic.Pointer[Facts]
	keys     *Keys
	audit    auditTrail
	events   auditTrail // what budgets' spending set off
	tagTrail auditTrail // invalidations of tags
	tags     *tagTable
	durables *durables
	budgets  *accountTable
	tell     map[BudgetKey]struct{} // those of which people should be told
	recalls  []BudgetKey            // of this batch: others want what is held of them

	work Facts // what is published next
	nano int64 // work.Time
	hash multisetHash
	done doneRing
	enc  canon

	// shown is the index of the last command that changed more than blocks and what budgets have spent.
	shown uint64

	// Of the command that is being applied.
	index uint64
	actor string
	stamp int64 // the proposer's clock
	block *ledgerpb.BlockResult

	budgetGave *ledgerpb.BudgetResult
	raised     *raised
	shows      bool // though it is about a block, it changed what all see
}

// NewState is a state that no command was applied to.
func NewState() *State {
	s := &State{
		keys: newKeys(), durables: newDurables(), budgets: newAccountTable(), tell: map[BudgetKey]struct{}{}, tags: newTagTable(),
		audit: auditTrail{most: maxAudit, mostBytes: maxAuditBytes}, events: auditTrail{most: maxEvents, mostBytes: maxEventBytes},
		tagTrail: auditTrail{most: maxTagged, mostBytes: maxTaggedBytes},
	}
	s.publish()
	return s
}

// Facts after the last command. The value never changes.
func (s *State) Facts() *Facts { return s.facts.Load() }

// Keys is the live table: the same pointer for the life of the state.
func (s *State) Keys() *Keys { return s.keys }

// Audit gives the entries that filter selects, the newest first, limit at most.
func (s *State) Audit(limit int, filter AuditFilter) []AuditEntry {
	trails := [...][]*AuditEntry{s.audit.entries(), s.events.entries(), s.tagTrail.entries()}
	var out []AuditEntry
	for len(out) < limit {
		var from *[]*AuditEntry
		for i, t := range trails {
			if len(t) > 0 && (from == nil || t[len(t)-1].Index >= (*from)[len(*from)-1].Index) {
				from = &trails[i]
			}
		}
		if from == nil {
			break
		}
		e := (*from)[len(*from)-1]
		*from = (*from)[:len(*from)-1]
		if filter.matches(e) {
			out = append(out, *e)
		}
	}
	return out
}

func (s *State) publish() {
	s.work.Time, s.work.KeyCount, s.work.Hash = timeOrZero(s.nano), s.keys.Len(), s.hash.sum()
	s.work.Durables, s.work.Budgets = len(s.durables.at), len(s.budgets.at)
	f := s.work
	s.facts.Store(&f)
}

// Replace makes s what o is: for a restore. Readers of Facts and Keys see the switch. o must
// not be used any more.
func (s *State) Replace(o *State) {
	s.keys.table.Store(o.keys.table.Load())
	s.audit.replace(o.audit.entries())
	s.events.replace(o.events.entries())
	s.tagTrail.replace(o.tagTrail.entries())
	s.work, s.nano, s.hash, s.done, s.shown = o.work, o.nano, o.hash, o.done, o.shown
	s.durables, s.budgets, s.tell, s.tags = o.durables, o.budgets, o.tell, o.tags
	s.publish()
}

// Adopt gives s the cluster id and the view of another state, and raises the number of the policy in
// force beyond f.Index. No answer that was kept holds any more, where anything was ever invalidated: what was
// invalidated since the backup is not known. A backup that is restored into a running cluster needs it: epochs
// fence, limits of a higher number bind, and neither may go back.
func (s *State) Adopt(f *Facts) {
	s.work.ClusterID, s.work.View = f.ClusterID, f.View
	if p := s.work.Policy; p != nil && p.Number() <= f.Index {
		s.renumber(f.Index + 1)
	}
	if s.work.Caches.used() || f.Caches.used() {
		e := s.editCaches()
		e.next.count = max(e.next.count, f.Caches.Stamp()) + tagSkip
		e.next.since = e.next.count
		e.done()
	}
	s.publish()
}

// Apply applies the entry at a log index. Its error means that this replica must stop:
// ErrUnknownCommand or ErrDiverged; then nothing was changed. A known command that cannot be done gives a
// result with a code, and a command whose id was applied before gives the result that it gave
// then. c must not be changed afterwards: the state keeps parts of it.
func (s *State) Apply(index uint64, c *ledgerpb.Command) (*ledgerpb.Result, error) {
	if v := c.GetVersion(); v > StateVersion {
		return nil, fmt.Errorf("log index %d has version %d, of %d known: %w", index, v, StateVersion, ErrUnknownCommand)
	}
	if c.GetBody() == nil {
		return nil, fmt.Errorf("log index %d: %w", index, ErrUnknownCommand)
	}
	if check := c.GetCheck(); check != nil && check.GetIndex() == s.work.Changed && len(check.GetHash()) == 32 {
		if sum := s.hash.sum(); !bytes.Equal(sum[:], check.GetHash()) {
			return nil, fmt.Errorf("at log index %d the state has hash %x, the cluster's %x: %w", index, sum[:6], check.GetHash()[:6], ErrDiverged)
		}
	}
	s.work.Index = index
	id := c.GetId()
	if known, ok := s.done.find(id); ok {
		s.publish()
		return known.result(), nil
	}
	s.index, s.actor, s.nano = index, cut(c.GetActor(), maxLabel), max(s.nano, c.GetUnixNano())
	s.stamp, s.block, s.budgetGave, s.raised, s.shows = c.GetUnixNano(), nil, nil, nil, false
	changed, err := false, error(nil)
	if len(id) != 0 && len(id) != len(done{}.id) {
		err = refuse(codeInvalid, "a command's id has %d bytes, not %d", len(id), len(done{}.id))
	} else {
		changed, err = s.apply(c)
	}
	if changed {
		s.work.Changed = index
		if s.shows || !ofBlocks(c) {
			s.shown = index
		}
	}
	d := done{index: index, revision: s.work.Revision(), raised: s.raised}
	if err != nil {
		d.refusal, _ = errors.AsType[*Refusal](err)
	}
	if remembered(c) && len(id) == len(d.id) {
		copy(d.id[:], id)
		s.done.add(d)
	}
	s.publish()
	r := d.result()
	r.Block, r.Budget = s.block, s.budgetGave
	return r, nil
}

// ofBlocks says of a command that it is about blocks: it comes all the time, and shows in no Facts
// (but for what a budget's spending may set off).
func ofBlocks(c *ledgerpb.Command) bool {
	switch c.GetBody().(type) {
	case *ledgerpb.Command_ReserveBlock, *ledgerpb.Command_SettleBlock, *ledgerpb.Command_Budget:
		return true
	}
	return false
}

// remembered says whether a command's id must be: not of those that may be applied again
// without harm, and come all the time.
func remembered(c *ledgerpb.Command) bool {
	switch c.GetBody().(type) {
	case *ledgerpb.Command_TouchKeys, *ledgerpb.Command_SetView, *ledgerpb.Command_Check, *ledgerpb.Command_BudgetNotified:
		return false
	}
	return !ofBlocks(c) // which have numbers of their own
}

// apply says whether something was changed. Its error is a *Refusal, and then nothing was but that
// buckets and accounts may be forgotten.
func (s *State) apply(c *ledgerpb.Command) (changed bool, err error) {
	switch b := c.GetBody().(type) {
	case *ledgerpb.Command_Found:
		return s.found(b.Found)
	case *ledgerpb.Command_SetPolicy:
		return s.setPolicy(b.SetPolicy)
	case *ledgerpb.Command_CreateKeys:
		return s.createKeys(b.CreateKeys)
	case *ledgerpb.Command_RevokeKey:
		return s.revokeKey(b.RevokeKey)
	case *ledgerpb.Command_TouchKeys:
		return s.touchKeys(b.TouchKeys)
	case *ledgerpb.Command_SetKill:
		return s.setKill(b.SetKill)
	case *ledgerpb.Command_SetRung:
		return s.setRung(b.SetRung)
	case *ledgerpb.Command_SetView:
		return s.setView(b.SetView)
	case *ledgerpb.Command_CreateToken:
		return s.createToken(b.CreateToken.GetToken())
	case *ledgerpb.Command_RevokeToken:
		return s.revokeToken(b.RevokeToken)
	case *ledgerpb.Command_Note:
		return s.note(b.Note)
	case *ledgerpb.Command_ReserveBlock:
		return s.reserveBlock(b.ReserveBlock)
	case *ledgerpb.Command_SettleBlock:
		return s.settleBlock(b.SettleBlock)
	case *ledgerpb.Command_Budget:
		return s.budget(b.Budget)
	case *ledgerpb.Command_AdjustBudget:
		return s.adjustBudget(b.AdjustBudget)
	case *ledgerpb.Command_ReleaseHolder:
		return s.releaseHolder(b.ReleaseHolder)
	case *ledgerpb.Command_BudgetNotified:
		return s.budgetNotified(b.BudgetNotified)
	case *ledgerpb.Command_SetGeneration:
		return s.setGeneration(b.SetGeneration)
	case *ledgerpb.Command_InvalidateTags:
		return s.invalidateTags(b.InvalidateTags)
	case *ledgerpb.Command_Check:
		if len(b.Check.GetHash()) != 32 {
			return false, refuse(codeInvalid, "a hash has 32 bytes, not %d", len(b.Check.GetHash()))
		}
		return false, nil
	}
	return false, refuse(codeInvalid, "the command has no effect") // a body of this version's own, without a case
}

func (s *State) found(c *ledgerpb.Found) (bool, error) {
	switch id := c.GetClusterId(); {
	case len(id) != 16:
		return false, refuse(codeInvalid, "a cluster id has 16 bytes, not %d", len(id))
	case bytes.Equal(id, s.work.ClusterID):
		return false, nil
	case s.work.ClusterID != nil:
		return false, refuse(codeExists, "the cluster was founded already, as %x", s.work.ClusterID)
	default:
		s.work.ClusterID = id
		s.record("cluster.found", fmt.Sprintf("%x", id), "", "")
		return true, nil
	}
}

func (s *State) setPolicy(c *ledgerpb.SetPolicy) (bool, error) {
	current := s.work.Revision()
	if c.Expected != nil && c.GetExpected() != current {
		return false, refuse(codeConflict, "revision %d of the policy is in force, not %d: look at the difference and apply again", current, c.GetExpected())
	}
	if c.GetSeed() && current != 0 {
		return false, refuse(codeExists, "revision %d of the policy is in force already: a seed is for a cluster that never had one", current)
	}
	if len(c.GetText()) > MaxCommand {
		return false, refuse(codeInvalid, "the policy has %d bytes, of %d at most", len(c.GetText()), MaxCommand)
	}
	fresh := make([]*ledgerpb.Key, 0, len(c.GetNewKeys()))
	for _, k := range c.GetNewKeys() {
		if _, ok := s.keys.ByID(k.GetId()); !ok {
			fresh = append(fresh, k)
		}
	}
	if _, err := s.addKeys(fresh); err != nil {
		return false, err
	}
	p := &PolicyRevision{Revision: current + 1, Time: timeOrZero(s.nano), Actor: s.actor, Text: c.GetText(), RolledBackTo: c.GetRolledBackTo(), Index: s.index}
	if s.work.Policy != nil {
		p.Index = max(p.Index, s.work.Policy.Number()+1)
	}
	s.putPolicy(p)
	action, before := "policy.apply", ""
	if p.RolledBackTo != 0 {
		action = "policy.rollback"
	}
	if current != 0 {
		before = fmt.Sprintf("revision %d", current)
	}
	after := strings.Join(append([]string{fmt.Sprintf("revision %d", p.Revision)}, c.GetChanges()...), "\n")
	s.record(action, "policy", before, after)
	return true, nil
}

// putPolicy puts a revision in force and forgets the oldest ones beyond the bounds.
func (s *State) putPolicy(p *PolicyRevision) {
	history := append(slices.Clone(s.work.History), p)
	s.hash.add(s.enc.policy(p))
	size := 0
	for _, h := range history {
		size += len(h.Text)
	}
	for len(history) > 1 && (len(history) > maxHistory || size > maxHistoryBytes) {
		size -= len(history[0].Text)
		s.hash.remove(s.enc.policy(history[0]))
		history = history[1:]
	}
	s.work.History, s.work.Policy = history, p
}

// renumber puts the policy in force under another index. What its hash is over stays as it is.
func (s *State) renumber(index uint64) {
	p := *s.work.Policy
	p.Index = index
	s.work.History = append(slices.Clone(s.work.History[:len(s.work.History)-1]), &p)
	s.work.Policy = &p
}

// addKeys adds keys as created now, all or none.
func (s *State) addKeys(keys []*ledgerpb.Key) ([]*KeyRecord, error) {
	for _, k := range keys {
		if err := checkKey(k); err != nil {
			return nil, err
		}
	}
	t := s.keys.table.Load()
	records := make([]*KeyRecord, len(keys))
	for i, k := range keys {
		records[i] = t.record(k)
		records[i].created = s.nano
	}
	if err := t.admit(records); err != nil {
		return nil, err
	}
	t.insert(records, nil)
	for _, r := range records {
		s.hash.add(s.enc.key(r))
	}
	return records, nil
}

// checkKey holds a key to the bounds of the state. What its names mean was checked where it was proposed.
func checkKey(k *ledgerpb.Key) error {
	id := k.GetId()
	switch {
	case id == "" || len(id) > maxID:
		return refuse(codeInvalid, "a key's id has %d bytes; 1 to %d are allowed", len(id), maxID)
	case len(k.GetHash()) != 32:
		return refuse(codeInvalid, "key %q: its hash has %d bytes, not 32", id, len(k.GetHash()))
	case k.GetTenant() == "" || len(k.GetTenant()) > maxID:
		return refuse(codeInvalid, "key %q: its tenant's name has %d bytes; 1 to %d are allowed", id, len(k.GetTenant()), maxID)
	case len(k.GetName()) > maxLabel || len(k.GetUser()) > maxLabel || len(k.GetClass()) > maxLabel:
		return refuse(codeInvalid, "key %q: its name, user and class have at most %d bytes each", id, maxLabel)
	case k.GetExpiresUnixNano() < 0:
		return refuse(codeInvalid, "key %q: it expires before 1970", id)
	case len(k.GetModels())+len(k.GetRoutes())+len(k.GetSurfaces()) > maxScope:
		return refuse(codeInvalid, "key %q: it is held to more than %d models, routes and surfaces", id, maxScope)
	}
	for _, list := range [...][]string{k.GetModels(), k.GetRoutes(), k.GetSurfaces()} {
		for _, name := range list {
			if len(name) > maxID {
				return refuse(codeInvalid, "key %q: the name %q has more than %d bytes", id, name, maxID)
			}
		}
	}
	return nil
}

func (s *State) createKeys(c *ledgerpb.CreateKeys) (bool, error) {
	if len(c.GetKeys()) == 0 {
		return false, refuse(codeInvalid, "there is no key to create")
	}
	var old *KeyRecord
	if id := c.GetReplaces(); id != "" {
		var ok bool
		if old, ok = s.keys.ByID(id); !ok {
			return false, refuse(codeNotFound, "there is no key %q to replace", id)
		}
		if old.Revoked {
			return false, refuse(codeConflict, "key %q is revoked and cannot be rotated; create one instead", id)
		}
		if c.GetReplacedExpiresUnixNano() <= 0 {
			return false, refuse(codeInvalid, "when key %q ends is missing", id)
		}
	}
	added, err := s.addKeys(c.GetKeys())
	if err != nil {
		return false, err
	}
	object, after := added[0].ID, added[0].describe()
	if len(added) > 1 {
		object, after = fmt.Sprintf("%d keys", len(added)), idList(added)
	}
	if old == nil {
		s.record("key.create", object, "", after)
		return true, nil
	}
	next := *old
	if at := c.GetReplacedExpiresUnixNano(); next.expires == 0 || at < next.expires { // a rotation prolongs nothing
		next.expires = at
	}
	s.changeKey(old, &next)
	s.record("key.rotate", old.ID, old.describe(), next.describe()+"; replaced by "+object+": "+after)
	return true, nil
}

func (s *State) changeKey(old, next *KeyRecord) {
	s.hash.remove(s.enc.key(old))
	s.hash.add(s.enc.key(next))
	s.keys.table.Load().replace(next)
}

func (s *State) revokeKey(c *ledgerpb.RevokeKey) (bool, error) {
	old, ok := s.keys.ByID(c.GetId())
	if !ok {
		return false, refuse(codeNotFound, "there is no key %q", c.GetId())
	}
	if old.Revoked {
		return false, nil
	}
	next := *old
	next.Revoked = true
	s.changeKey(old, &next)
	s.record("key.revoke", old.ID, old.describe(), "revoked")
	return true, nil
}

// touchKeys leaves ids out that do not exist: who counts uses may be behind.
func (s *State) touchKeys(c *ledgerpb.TouchKeys) (changed bool, err error) {
	if len(c.GetIds()) != len(c.GetUnix()) {
		return false, refuse(codeInvalid, "there are %d keys and %d moments", len(c.GetIds()), len(c.GetUnix()))
	}
	t := s.keys.table.Load()
	for i, id := range c.GetIds() {
		r, ok := t.byIDOf(id)
		if !ok {
			continue
		}
		before, after := t.touch(r, c.GetUnix()[i])
		if before == after {
			continue
		}
		if before != 0 {
			s.hash.remove(s.enc.used(r, before))
		}
		s.hash.add(s.enc.used(r, after))
		changed = true
	}
	return changed, nil
}

func (s *State) setKill(c *ledgerpb.SetKill) (bool, error) {
	k := &Kill{Kind: KillKind(c.GetKind()), Name: c.GetName(), Reason: c.GetReason(), Actor: s.actor, Time: timeOrZero(s.nano)}
	switch {
	case k.Kind < KillGlobal || k.Kind > KillKey:
		return false, refuse(codeInvalid, "there is no kill switch of %v", k.Kind)
	case (k.Kind == KillGlobal) != (k.Name == ""):
		return false, refuse(codeInvalid, "a kill switch of a model, tenant or key names it, the global one nothing")
	case len(k.Name) > maxID || len(k.Reason) > maxReason:
		return false, refuse(codeInvalid, "a kill switch's name has at most %d bytes and its reason %d", maxID, maxReason)
	}
	old, on := s.work.Kills.Lookup(k.Kind, k.Name)
	before := "off"
	switch {
	case !c.GetOn() && !on:
		return false, refuse(codeNotFound, "the kill switch %s is not thrown", k.object())
	case c.GetOn() && !on && s.work.Kills.Len() >= maxKills:
		return false, refuse(codeInvalid, "%d kill switches are thrown, which is the most; release some", maxKills)
	}
	if on {
		before = onBecause(old.Reason)
		s.hash.remove(s.enc.kill(old))
	}
	if c.GetOn() {
		s.hash.add(s.enc.kill(k))
		s.work.Kills = s.work.Kills.with(k)
		s.record("kill.throw", k.object(), before, onBecause(k.Reason))
	} else {
		s.work.Kills = s.work.Kills.without(k)
		s.record("kill.release", k.object(), before, offBecause(k.Reason))
	}
	return true, nil
}

func (k *Kill) object() string { return strings.TrimSuffix(k.Kind.String()+" "+k.Name, " ") }

func onBecause(reason string) string  { return strings.TrimSuffix("on: "+reason, ": ") }
func offBecause(reason string) string { return strings.TrimSuffix("off: "+reason, ": ") }

func (s *State) setRung(c *ledgerpb.SetRung) (bool, error) {
	r := &Rung{Name: c.GetRung(), Expires: timeOrZero(c.GetExpiresUnixNano()), Reason: c.GetReason(), Actor: s.actor, Time: timeOrZero(s.nano)}
	if r.Name == "" || len(r.Name) > maxID || len(r.Reason) > maxReason || c.GetExpiresUnixNano() < 0 {
		return false, refuse(codeInvalid, "a rung's name has 1 to %d bytes, its reason at most %d, and it expires after 1970", maxID, maxReason)
	}
	old, on := s.work.Rungs.Lookup(r.Name)
	before := "off"
	switch {
	case !c.GetOn() && !on:
		return false, refuse(codeNotFound, "the rung %q is not set", r.Name)
	case c.GetOn() && !on && s.work.Rungs.Len() >= maxRungs:
		return false, refuse(codeInvalid, "%d rungs are set, which is the most", maxRungs)
	}
	if on {
		before = old.describe()
		s.hash.remove(s.enc.rung(old))
	}
	if c.GetOn() {
		s.hash.add(s.enc.rung(r))
		s.work.Rungs = Rungs{with(s.work.Rungs.m, r.Name, r)}
		s.record("ladder.set", r.Name, before, r.describe())
	} else {
		s.work.Rungs = Rungs{without(s.work.Rungs.m, r.Name)}
		s.record("ladder.clear", r.Name, before, offBecause(r.Reason))
	}
	return true, nil
}

func (r *Rung) describe() string {
	if r.Expires.IsZero() {
		return onBecause(r.Reason)
	}
	return strings.TrimSuffix("on until "+r.Expires.Format(time.RFC3339)+": "+r.Reason, ": ")
}

func (s *State) setView(c *ledgerpb.SetView) (bool, error) {
	v := viewOf(c.GetView())
	slices.SortFunc(v.Members, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	if len(v.Members) > maxMembers {
		return false, refuse(codeInvalid, "the view has %d members, of %d at most", len(v.Members), maxMembers)
	}
	for i, m := range v.Members {
		if m.Name == "" || len(m.Name) > maxID || len(m.Address) > maxLabel || i > 0 && m.Name == v.Members[i-1].Name {
			return false, refuse(codeInvalid, "the member %q is named twice, or its name or address has more than %d or %d bytes", m.Name, maxID, maxLabel)
		}
	}
	epoch, before := uint64(0), ""
	if old := s.work.View; old != nil {
		if epoch, before = old.Epoch, old.describe(); old.Equal(v) { // tried again
			return false, nil
		}
	}
	if v.Epoch != epoch+1 {
		return false, refuse(codeConflict, "the view of epoch %d is in force: %d cannot follow it", epoch, v.Epoch)
	}
	s.work.View = v
	s.record("view.change", fmt.Sprintf("epoch %d", v.Epoch), before, v.describe())
	return true, nil
}

func (v *View) describe() string {
	names := make([]string, len(v.Members))
	for i, m := range v.Members {
		names[i] = fmt.Sprintf("%s (%x, %s)", m.Name, m.Incarnation, m.Address)
	}
	return strings.Join(names, ", ")
}

func (s *State) createToken(c *ledgerpb.Token) (bool, error) {
	t := &Token{Name: c.GetName(), Role: Role(c.GetRole()), Created: timeOrZero(s.nano), Expires: timeOrZero(c.GetExpiresUnixNano())}
	switch {
	case t.Name == "" || len(t.Name) > maxID || len(c.GetHash()) != len(t.Hash) || c.GetExpiresUnixNano() < 0:
		return false, refuse(codeInvalid, "a token has a name of 1 to %d bytes, a hash of %d, and expires after 1970", maxID, len(t.Hash))
	case t.Role < RoleRead || t.Role > RoleAdmin:
		return false, refuse(codeInvalid, "there is no %v", t.Role)
	case s.work.Tokens.Len() >= maxTokens:
		return false, refuse(codeInvalid, "there are %d admin tokens, which is the most; revoke some", maxTokens)
	}
	copy(t.Hash[:], c.GetHash())
	if _, ok := s.work.Tokens.ByName(t.Name); ok {
		return false, refuse(codeExists, "an admin token %q exists already; revoke it, or choose another name", t.Name)
	}
	if other, ok := s.work.Tokens.Lookup(t.Hash); ok {
		return false, refuse(codeExists, "it is the same as the admin token %q; make a new one", other.Name)
	}
	s.putToken(t)
	s.record("token.create", t.Name, "", t.describe())
	return true, nil
}

func (s *State) putToken(t *Token) {
	s.hash.add(s.enc.token(t))
	s.work.Tokens = Tokens{with(s.work.Tokens.byName, t.Name, t), with(s.work.Tokens.byHash, t.Hash, t)}
}

func (s *State) revokeToken(c *ledgerpb.RevokeToken) (bool, error) {
	t, ok := s.work.Tokens.ByName(c.GetName())
	if !ok {
		return false, refuse(codeNotFound, "there is no admin token %q", c.GetName())
	}
	s.hash.remove(s.enc.token(t))
	s.work.Tokens = Tokens{without(s.work.Tokens.byName, t.Name), without(s.work.Tokens.byHash, t.Hash)}
	s.record("token.revoke", t.Name, t.describe(), "revoked")
	return true, nil
}

func (t *Token) describe() string {
	out := t.Role.String() + ", " + shortHash(t.Hash)
	if !t.Expires.IsZero() {
		out += ", expires " + t.Expires.Format(time.RFC3339)
	}
	return out
}

func (s *State) note(c *ledgerpb.Note) (bool, error) {
	if c.GetAction() == "" || len(c.GetAction()) > maxID || len(c.GetNode()) > maxID {
		return false, refuse(codeInvalid, "a note has an action of 1 to %d bytes and a node of at most %d", maxID, maxID)
	}
	detail := c.GetDetail()
	if at := c.GetUnixNano(); at > 0 {
		detail += " (at " + timeOrZero(at).Format(time.RFC3339) + " by the node's clock)"
	}
	s.record(c.GetAction(), strings.TrimSuffix("node "+c.GetNode(), " "), "", detail)
	return true, nil
}

// record writes into the audit log what the command that is being applied did.
func (s *State) record(action, object, before, after string) {
	s.audit.add(s.entry(action, object, before, after))
}

func (s *State) entry(action, object, before, after string) *AuditEntry {
	return &AuditEntry{
		Index: s.index, Time: timeOrZero(s.nano), Actor: redact(s.actor), Action: action, Object: redact(cut(object, maxLabel)),
		Before: cut(redact(before), maxAuditText), After: cut(redact(after), maxAuditText),
	}
}
