package ledger

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

// Facts are what the cluster agrees on, keys apart, after one command. They never change, and
// nothing that they lead to may be changed.
type Facts struct {
	Index     uint64    // of the last command applied
	Changed   uint64    // of the last command that changed something
	Time      time.Time // the cluster's, of the last command; it never goes back; zero before the first
	ClusterID []byte    // nil: not founded yet
	Policy    *PolicyRevision
	History   []*PolicyRevision // the oldest first; the last is Policy
	Kills     Kills
	Rungs     Rungs
	View      *View // nil: none yet
	Tokens    Tokens
	KeyCount  int
	Caches    *Caches // nil: nothing was ever invalidated
	Durables  int     // buckets of durable limits
	Budgets   int     // accounts of budgets
	// Hash is over the policy and its history, keys, kill switches, rungs, tokens, durable buckets, budgets, and generations and
	// tags of caches: equal on
	// replicas of equal content. See multisetHash for what it is good for.
	Hash [32]byte
}

// PutBack says whether a backup was restored since before, which this replica showed earlier: then what
// the cluster was told meanwhile may be forgotten, and who knows it should say it again. nil: nothing was shown. A replica that was
// away for a thousand views says so, too.
func (f *Facts) PutBack(before *Facts) bool {
	if before == nil {
		return false
	}
	return f.Index < before.Index || f.View != nil && before.View != nil && f.View.Epoch >= before.View.Epoch+epochSkip
}

// Revision of the policy in force; 0: none yet.
func (f *Facts) Revision() uint64 {
	if f.Policy == nil {
		return 0
	}
	return f.Policy.Revision
}

// PolicyAt finds a revision in the history.
func (f *Facts) PolicyAt(revision uint64) (*PolicyRevision, bool) {
	for _, p := range f.History {
		if p.Revision == revision {
			return p, true
		}
	}
	return nil, false
}

// PolicyRevision is a policy that is or was in force.
type PolicyRevision struct {
	Revision     uint64
	Time         time.Time
	Actor        string
	Text         []byte // YAML, as written
	RolledBackTo uint64 // the revision whose text this is; 0: none
	// Index is that of the log entry that put it in force; 0 where a snapshot of an early version
	// does not tell. A restore raises that of the policy in force beyond all that was before, since
	// Revision may go back by it. It is no part of the state's hash.
	Index uint64
}

// Number is alike on every node and rises with each policy that is put in force, by a restore too.
func (r *PolicyRevision) Number() uint64 { return max(r.Index, r.Revision) }

// KillKind is what a kill switch stops.
type KillKind int32

// The kinds of kill switches.
const (
	KillGlobal KillKind = 1 + iota
	KillModel
	KillTenant
	KillKey
)

// killKinds are the words for them, as the command line has them.
func killKinds() []string { return []string{"global", "model", "tenant", "key"} }

// String gives the command line's word.
func (k KillKind) String() string {
	if k < KillGlobal || k > KillKey {
		return fmt.Sprintf("kind(%d)", int32(k))
	}
	return killKinds()[k-KillGlobal]
}

// ParseKillKind reads what String writes.
func ParseKillKind(s string) (KillKind, error) {
	if i := slices.Index(killKinds(), s); i >= 0 {
		return KillGlobal + KillKind(i), nil
	}
	return 0, fmt.Errorf("%q is not a kind of kill switch: use %s", s, strings.Join(killKinds(), ", "))
}

// Kill is a kill switch that is thrown.
type Kill struct {
	Kind   KillKind
	Name   string // "" for KillGlobal
	Reason string
	Actor  string
	Time   time.Time
}

type killName struct {
	kind KillKind
	name string
}

// Kills are the kill switches that are thrown. The zero value has none.
type Kills struct{ m map[killName]*Kill }

// Lookup finds a switch that is thrown; name is "" for KillGlobal.
func (k Kills) Lookup(kind KillKind, name string) (*Kill, bool) {
	s, ok := k.m[killName{kind, name}]
	return s, ok
}

// Len is how many are thrown.
func (k Kills) Len() int { return len(k.m) }

// All are in the order of kind and name.
func (k Kills) All() []*Kill {
	return slices.SortedFunc(maps.Values(k.m), func(a, b *Kill) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Name, b.Name))
	})
}

// with is k and a switch, without is k less one.
func (k Kills) with(s *Kill) Kills { return Kills{with(k.m, killName{s.Kind, s.Name}, s)} }

func (k Kills) without(s *Kill) Kills {
	return Kills{without(k.m, killName{s.Kind, s.Name})}
}

// Rung is a rung of the degradation ladder that was set by hand.
type Rung struct {
	Name    string
	Expires time.Time // zero: until it is set again. Whoever reads it compares
	Reason  string
	Actor   string
	Time    time.Time
}

// Rungs are those that are set. The zero value has none.
type Rungs struct{ m map[string]*Rung }

// Lookup finds a rung that is set, expired ones too.
func (r Rungs) Lookup(name string) (*Rung, bool) {
	s, ok := r.m[name]
	return s, ok
}

// Len is how many are set.
func (r Rungs) Len() int { return len(r.m) }

// All are in the order of their names.
func (r Rungs) All() []*Rung {
	return slices.SortedFunc(maps.Values(r.m), func(a, b *Rung) int { return strings.Compare(a.Name, b.Name) })
}

// Member is a node of a view.
type Member struct {
	Name        string
	Incarnation uint64
	Address     string // HOST:PORT of its gossip
}

// View is a committed member list; its epoch is the fencing token.
type View struct {
	Epoch       uint64
	Members     []Member // by name
	Partitions  uint32
	RingVersion uint32
}

// Role is what an admin token may do.
type Role int32

// The roles; each may do what those before it may.
const (
	RoleRead Role = 1 + iota
	RoleOperate
	RoleAdmin
)

func roleNames() []string { return []string{"read", "operate", "admin"} }

// String gives the command line's word.
func (r Role) String() string {
	if r < RoleRead || r > RoleAdmin {
		return fmt.Sprintf("role(%d)", int32(r))
	}
	return roleNames()[r-RoleRead]
}

// ParseRole reads what String writes.
func ParseRole(s string) (Role, error) {
	if i := slices.Index(roleNames(), s); i >= 0 {
		return RoleRead + Role(i), nil
	}
	return 0, fmt.Errorf("%q is not a role: use %s", s, strings.Join(roleNames(), ", "))
}

// Token is an admin token, known by its hash.
type Token struct {
	Name    string
	Hash    [32]byte // SHA-256 of the whole token
	Role    Role
	Created time.Time
	Expires time.Time // zero: never. Whoever reads it compares
}

// Tokens are those that were created and not revoked. The zero value has none.
type Tokens struct {
	byName map[string]*Token
	byHash map[[32]byte]*Token
}

// Lookup finds a token by its hash, expired ones too. As with keys, the time of a map's
// look-up by a SHA-256 tells nothing of use.
func (t Tokens) Lookup(hash [32]byte) (*Token, bool) {
	s, ok := t.byHash[hash]
	return s, ok
}

// ByName finds a token by its name, expired ones too.
func (t Tokens) ByName(name string) (*Token, bool) {
	s, ok := t.byName[name]
	return s, ok
}

// Len is how many there are.
func (t Tokens) Len() int { return len(t.byName) }

// All are in the order of their names.
func (t Tokens) All() []*Token {
	return slices.SortedFunc(maps.Values(t.byName), func(a, b *Token) int { return strings.Compare(a.Name, b.Name) })
}

// with is m and an entry, without is m less one; m stays as it is.
func with[K comparable, V any](m map[K]V, k K, v V) map[K]V {
	next := make(map[K]V, len(m)+1)
	maps.Copy(next, m)
	next[k] = v
	return next
}

func without[K comparable, V any](m map[K]V, k K) map[K]V {
	next := maps.Clone(m)
	delete(next, k)
	return next
}

// AuditEntry says what a command changed.
type AuditEntry struct {
	Index  uint64
	Time   time.Time
	Actor  string
	Action string // such as policy.apply, key.revoke
	Object string
	Before string
	After  string
}

// AuditFilter selects entries; an empty field selects all.
type AuditFilter struct {
	Actor  string
	Action string // or its beginning: "key." for all that keys saw
	Object string // or a part of it
	Since  time.Time
	Until  time.Time // exclusive
}

func (f *AuditFilter) matches(e *AuditEntry) bool {
	return (f.Actor == "" || e.Actor == f.Actor) && strings.HasPrefix(e.Action, f.Action) && strings.Contains(e.Object, f.Object) &&
		(f.Since.IsZero() || !e.Time.Before(f.Since)) && (f.Until.IsZero() || e.Time.Before(f.Until))
}

func viewOf(v *ledgerpb.View) *View {
	out := &View{Epoch: v.GetEpoch(), Partitions: v.GetPartitions(), RingVersion: v.GetRingVersion()}
	for _, m := range v.GetMembers() {
		out.Members = append(out.Members, Member{m.GetName(), m.GetIncarnation(), m.GetAddress()})
	}
	return out
}

// Equal says whether two views are the same.
func (v *View) Equal(o *View) bool {
	return v.Epoch == o.Epoch && v.Partitions == o.Partitions && v.RingVersion == o.RingVersion && slices.Equal(v.Members, o.Members)
}

// Message is the view as commands and snapshots carry it.
func (v *View) Message() *ledgerpb.View {
	out := &ledgerpb.View{Epoch: v.Epoch, Partitions: v.Partitions, RingVersion: v.RingVersion}
	for _, m := range v.Members {
		out.Members = append(out.Members, &ledgerpb.Member{Name: m.Name, Incarnation: m.Incarnation, Address: m.Address})
	}
	return out
}

func nanoOrZero(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
