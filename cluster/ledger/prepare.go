package ledger

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

const (
	maxChanges      = 200      // lines of a difference that a command carries for the audit log
	maxWarnings     = 50       // of one policy; those beyond are counted
	commandOverhead = 64 << 10 // bytes of a command beside its text, keys and changes
)

// Prepared is a policy that may be put in force, and what that would change.
type Prepared struct {
	Command  *ledgerpb.SetPolicy // its seed is the caller's to set
	Policy   *Policy
	Changes  []Change // against the policy in force; of keys only those that are added
	NewKeys  []string // ids of the keys that the file adds
	Warnings []string // what of the file is not done, such as a key that exists already, or looks like a mistake
}

// Prepare checks a policy as written and makes the command that puts it in force. It is for
// whoever proposes; Apply checks no more than what may have changed since (expected, ids and hashes). f and
// keys are a replica's, now its clock: keys that have expired by it stand in nobody's way.
//
// The rules:
//   - The file is the whole truth for backends, models, plans, tenants, surfaces and global:
//     what it does not name any more is removed.
//   - Keys are never owned by the file. Its keys only add ids that do not exist yet. An id that exists
//     stays as it is, so that a revoked key stays revoked; where the file says otherwise a
//     warning says so. A key that the file does not name stays, too.
//   - A tenant that still has keys in force is not removed: its keys would stop as if by accident.
//
// expected is the revision that must be in force when the command is applied; nil: any. The error is of
// type Problems.
func Prepare(now time.Time, text []byte, f *Facts, keys *Keys, expected *uint64) (*Prepared, error) {
	p, err := ParsePolicy(text)
	if err != nil {
		return nil, err
	}
	out := &Prepared{Policy: p, Command: &ledgerpb.SetPolicy{Text: text, Expected: expected}}
	old := &Policy{}
	if f.Policy != nil {
		if old, err = ParseInForce(f.Policy.Text); err != nil {
			old = nil
			out.Warnings = append(out.Warnings, fmt.Sprintf("revision %d, which is in force, can't be read by this version, so that what changes is not known", f.Policy.Revision))
		}
	}
	if ps := orphaned(now, old, p, keys); ps != nil {
		return nil, ps
	}
	if ps := out.addKeys(keys); ps != nil {
		return nil, ps
	}
	out.Warnings = append(out.Warnings, p.Warnings()...)
	out.Warnings = append(out.Warnings, drained(now, old, p, f.Rungs)...)
	if old != nil {
		out.Warnings = append(out.Warnings, restarted(old, p)...)
		out.Changes = append(Diff(withoutKeys(old), withoutKeys(p)), out.Changes...)
	}
	out.Command.Changes = out.lines()
	if n := proto.Size(out.Command) + commandOverhead; n > MaxCommand {
		return nil, Problems{{Message: fmt.Sprintf("the policy is too large for one step: %d bytes with its %d new keys, of %d at most; create keys with `headgate keys create` instead of listing them", n, len(out.NewKeys), MaxCommand)}}
	}
	return out, nil
}

// PrepareRollback makes the command that puts the text of an earlier revision in force
// again, as a new revision and by the rules of Prepare: keys that were created or revoked
// since stay so. It expects that the policy in force is still f's. The error is a *Refusal or of type Problems.
func PrepareRollback(now time.Time, revision uint64, f *Facts, keys *Keys) (*Prepared, error) {
	p, ok := f.PolicyAt(revision)
	if !ok {
		have := make([]string, len(f.History))
		for i, h := range f.History {
			have[i] = fmt.Sprint(h.Revision)
		}
		return nil, refuse(codeNotFound, "there is no revision %d of the policy to go back to; kept are: %s", revision, strings.Join(have, ", "))
	}
	current := f.Revision()
	out, err := Prepare(now, p.Text, f, keys, &current)
	if err != nil {
		return nil, err
	}
	out.Command.RolledBackTo = revision
	return out, nil
}

// PrepareKeys checks keys against the policy in force and makes the command that creates
// them. replaces is the id of the key that they take the place of, which then ends at the
// moment given; "" for none. The error is of type Problems.
func (p *Policy) PrepareKeys(replaces string, ends time.Time, keys ...Key) (*ledgerpb.CreateKeys, error) {
	with := *p
	with.Keys = keys
	var problems Problems
	for _, f := range with.check() { // not its prices: it is in force
		problems = append(problems, f.Problem)
	}
	if err := problems.err(); err != nil {
		return nil, err
	}
	c := &ledgerpb.CreateKeys{Replaces: replaces}
	if replaces != "" {
		c.ReplacedExpiresUnixNano = unixNano(ends)
	}
	for i := range keys {
		m, err := keys[i].message()
		if err != nil {
			return nil, err
		}
		c.Keys = append(c.Keys, m)
	}
	return c, nil
}

// drained warns of backends that p has, and old has not, and that a flag drains which was set before. A nil old is not known.
func drained(now time.Time, old, p *Policy, rungs Rungs) []string {
	had := map[string]bool{}
	if old != nil {
		for i := range old.Backends {
			had[old.Backends[i].Name] = true
		}
	}
	var w warnings
	for i := range p.Backends {
		name := p.Backends[i].Name
		if r, ok := rungs.Lookup(DrainRung(name)); ok && !had[name] && (r.Expires.IsZero() || now.Before(r.Expires)) {
			w.add(place{}.item("backends", i, name), "it is drained since %s and gets no requests; headgate undrain %s ends that", r.Time.UTC().Format(time.RFC3339), name)
		}
	}
	return w.all()
}

// orphaned finds tenants that are to be removed while keys of theirs are in force. A nil old
// is not known: then any tenant that keys name may have been in it.
func orphaned(now time.Time, old, p *Policy, keys *Keys) Problems {
	gone := map[string]int{}
	stays := make(map[string]bool, len(p.Tenants))
	for i := range p.Tenants {
		stays[p.Tenants[i].Name] = true
	}
	if old != nil {
		for i := range old.Tenants {
			if name := old.Tenants[i].Name; !stays[name] {
				gone[name] = 0
			}
		}
		if len(gone) == 0 {
			return nil
		}
	}
	for k := range keys.All() {
		if _, was := gone[k.Tenant]; (was || old == nil && !stays[k.Tenant]) && k.Active(now) {
			gone[k.Tenant]++
		}
	}
	var out Problems
	for _, name := range slices.Sorted(maps.Keys(gone)) {
		if n := gone[name]; n > 0 && len(out) < maxProblems {
			out = append(out, Problem{Path: "tenants[" + clip(name) + "]", Message: fmt.Sprintf(
				"the tenant would be removed and still has %d %s in force; revoke them first (headgate keys list, headgate keys revoke ID), or keep the tenant with `suspended: true`", n, plural(n, "key"))})
		}
	}
	return out
}

func plural(n int, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

// addKeys sorts the file's keys into those to add and those that exist.
func (out *Prepared) addKeys(keys *Keys) (problems Problems) {
	unsaid := 0
	for i := range out.Policy.Keys {
		k := &out.Policy.Keys[i]
		m, err := k.message()
		if err != nil { // its hash was checked
			return Problems{{Path: "keys[" + clip(k.ID) + "]", Message: err.Error()}}
		}
		if live, ok := keys.ByID(k.ID); ok {
			switch w := differs(live, m); {
			case w == "":
			case len(out.Warnings) >= maxWarnings:
				unsaid++
			default:
				out.Warnings = append(out.Warnings, w)
			}
			continue
		}
		if same, ok := keys.Lookup([32]byte(m.GetHash())); ok {
			if len(problems) < maxProblems {
				problems = append(problems, Problem{Path: "keys[" + clip(k.ID) + "].hash", Message: fmt.Sprintf("key %q has the same hash; remove this one, or make a new key", same.ID)})
			}
			continue
		}
		out.Command.NewKeys = append(out.Command.NewKeys, m)
		out.NewKeys = append(out.NewKeys, k.ID)
		out.Changes = append(out.Changes, Change{Path: "keys[" + k.ID + "]", New: "tenant " + k.Tenant})
	}
	if n := keys.Len() + len(out.NewKeys); n > MaxKeys {
		problems = append(problems, Problem{Path: "keys", Message: fmt.Sprintf("there would be %d keys, of %d at most", n, MaxKeys)})
	}
	if unsaid > 0 {
		out.Warnings = append(out.Warnings, fmt.Sprintf("%d more keys exist already and stay as they are", unsaid))
	}
	return problems
}

// differs is the warning about a key of the file that exists and is another; "" if it is as
// the file says.
func differs(live *KeyRecord, m *ledgerpb.Key) string {
	const stays = "key %s exists already and stays as it is: "
	filed := newRecord(m, m.GetTenant(), &KeyScope{})
	switch {
	case live.Revoked && !filed.Revoked:
		return fmt.Sprintf(stays+"it is revoked, for ever; remove it from the file", live.ID)
	case !live.Revoked && filed.Revoked:
		return fmt.Sprintf(stays+"it is not revoked; use headgate keys revoke %s", live.ID, live.ID)
	case live.Hash != filed.Hash:
		return fmt.Sprintf(stays+"its hash is another; give a new key a new id", live.ID)
	case live.Tenant != filed.Tenant:
		return fmt.Sprintf(stays+"it belongs to tenant %s; give a new key a new id", live.ID, live.Tenant)
	}
	if is, said := live.describe(), filed.describe(); is != said {
		return fmt.Sprintf(stays+"it is (%s), and the file says (%s)", live.ID, clip(is), clip(said))
	}
	return ""
}

// withoutKeys is p as far as the file owns it.
func withoutKeys(p *Policy) *Policy {
	q := *p
	q.Keys = nil
	return &q
}

// lines are the difference and the warnings for the audit log.
func (out *Prepared) lines() []string {
	lines := make([]string, 0, min(len(out.Changes)+len(out.Warnings), maxChanges)+1)
	for _, w := range out.Warnings {
		lines = append(lines, strings.ToValidUTF8(clip("! "+w), "�"))
	}
	for i, c := range out.Changes {
		if len(lines) >= maxChanges {
			lines = append(lines, fmt.Sprintf("… and %d more", len(out.Changes)-i))
			break
		}
		lines = append(lines, strings.ToValidUTF8(clip(c.String()), "�"))
	}
	return lines
}
