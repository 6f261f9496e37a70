package ledger

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

const small = `version: 1
plans: [{name: p}]
tenants: [{name: acme, plan: p}, {name: globex, plan: p}]
keys:
  - {id: a, tenant: acme, hash: "sha256:%x"}
`

var smallText = fmt.Sprintf(small, HashKey("a"))

// apply puts a text in force, and fails the test unless it could be prepared.
func (w *world) apply(text string) *Prepared {
	w.t.Helper()
	p, err := Prepare(time.Unix(1e9, 0), []byte(text), w.s.Facts(), w.s.Keys(), nil)
	must(w.t, err)
	w.do(p.Command)
	return p
}

func TestPrepareIsTheWholeTruthButForKeys(t *testing.T) {
	w := newWorld(t)
	first := w.apply(smallText)
	if !slices.Equal(first.NewKeys, []string{"a"}) || len(first.Warnings) != 0 {
		t.Errorf("new keys %v, warnings %v", first.NewKeys, first.Warnings)
	}
	if again := w.apply(smallText); len(again.Changes)+len(again.NewKeys)+len(again.Warnings) != 0 {
		t.Errorf("the same text again: %+v", again)
	}
	w.do(createKeys(keyMessage("made", "acme")))
	without := w.apply("version: 1\nplans: [{name: p, tier: 2}]\ntenants: [{name: acme, plan: p}]\n")
	var lines []string
	for _, c := range without.Changes {
		lines = append(lines, c.String())
	}
	if got, want := strings.Join(lines, "\n"), "+ plans[p].tier: 2\n- tenants[globex].name: globex\n- tenants[globex].plan: p"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if !slices.Equal(without.Command.GetChanges(), lines) || w.s.Keys().Len() != 2 {
		t.Errorf("changes %q, %d keys", without.Command.GetChanges(), w.s.Keys().Len())
	}
}

func TestPrepareLeavesKeysThatExistAlone(t *testing.T) {
	w := newWorld(t)
	w.apply(smallText)
	file := func(key string) string {
		return strings.Replace(smallText, fmt.Sprintf("{id: a, tenant: acme, hash: \"sha256:%x\"}", HashKey("a")), key, 1)
	}
	entry := func(more string) string {
		return fmt.Sprintf("{id: a, tenant: acme, hash: \"sha256:%x\"%s}", HashKey("a"), more)
	}
	for more, want := range map[string]string{
		", revoked: true":    "it is not revoked; use headgate keys revoke a",
		", user: u, name: n": "and the file says (tenant acme, sha256:",
	} {
		if p := w.apply(file(entry(more))); len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], want) || !strings.HasPrefix(p.Command.GetChanges()[0], "! key a exists already") {
			t.Errorf("%s: warnings %q, changes %q", more, p.Warnings, p.Command.GetChanges())
		}
	}
	for key, want := range map[string]string{
		fmt.Sprintf("{id: a, tenant: globex, hash: \"sha256:%x\"}", HashKey("a")): "it belongs to tenant acme",
		fmt.Sprintf("{id: a, tenant: acme, hash: \"sha256:%x\"}", HashKey("b")):   "its hash is another",
	} {
		if p := w.apply(file(key)); len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], want) {
			t.Errorf("%s: warnings %q", key, p.Warnings)
		}
	}
	w.do(&ledgerpb.RevokeKey{Id: "a"})
	if p := w.apply(smallText); len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "it is revoked, for ever") {
		t.Errorf("revoked: warnings %q", p.Warnings)
	}
	if k, _ := w.s.Keys().ByID("a"); !k.Revoked || k.User != "" || w.s.Keys().Len() != 1 {
		t.Errorf("the key is now %+v", k)
	}
	_, err := Prepare(time.Unix(1e9, 0), []byte(file(fmt.Sprintf("{id: z, tenant: acme, hash: \"sha256:%x\"}", HashKey("a")))), w.s.Facts(), w.s.Keys(), nil)
	if err == nil || !strings.Contains(err.Error(), `keys[z].hash: key "a" has the same hash`) {
		t.Errorf("a twin: %v", err)
	}
}

func TestPrepareRefusesToOrphanKeys(t *testing.T) {
	w := newWorld(t)
	w.apply(smallText)
	expiring := keyMessage("b", "acme")
	expiring.ExpiresUnixNano = 2e18
	w.do(createKeys(expiring, keyMessage("c", "acme"), keyMessage("d", "globex")))
	text := []byte("version: 1\nplans: [{name: p}]\ntenants: [{name: globex, plan: p}]\n")
	prepare := func(now int64) error {
		_, err := Prepare(time.Unix(now, 0), text, w.s.Facts(), w.s.Keys(), nil)
		return err
	}
	err := prepare(1e9)
	if _, ok := errors.AsType[Problems](err); !ok || !strings.Contains(err.Error(), "tenants[acme]: the tenant would be removed and still has 3 keys in force; revoke them first") {
		t.Errorf("got %v", err)
	}
	w.do(&ledgerpb.RevokeKey{Id: "a"})
	w.do(&ledgerpb.RevokeKey{Id: "c"})
	if err := prepare(1e9); err == nil || !strings.Contains(err.Error(), "1 key in force") {
		t.Errorf("got %v", err)
	}
	must(t, prepare(3e9))
	w.do(&ledgerpb.RevokeKey{Id: "b"})
	must(t, prepare(1e9))
}

func TestPrepareHoldsWhatIsExpected(t *testing.T) {
	w := newWorld(t)
	w.apply(smallText)
	one := uint64(1)
	p, err := Prepare(time.Unix(1e9, 0), []byte(smallText), w.s.Facts(), w.s.Keys(), &one)
	must(t, err)
	w.apply(smallText)
	if r := w.try(p.Command); r.GetCode() != codeConflict {
		t.Errorf("a policy for revision 1 on revision 2: %v", r)
	}
	if _, err := Prepare(time.Unix(1e9, 0), []byte("version: 7"), w.s.Facts(), w.s.Keys(), nil); err == nil {
		t.Error("a wrong policy was prepared")
	}
}

func TestPrepareRollback(t *testing.T) {
	w := newWorld(t)
	w.apply(smallText)
	w.apply(strings.Replace(smallText, "{name: p}", "{name: p, tier: 3}", 1))
	w.do(&ledgerpb.RevokeKey{Id: "a"})
	p, err := PrepareRollback(time.Unix(1e9, 0), 1, w.s.Facts(), w.s.Keys())
	must(t, err)
	if len(p.Changes) != 1 || p.Changes[0].String() != "- plans[p].tier: 3" || len(p.Warnings) != 1 {
		t.Errorf("changes %v, warnings %v", p.Changes, p.Warnings)
	}
	w.do(p.Command)
	f := w.s.Facts()
	if f.Revision() != 3 || f.Policy.RolledBackTo != 1 || string(f.Policy.Text) != smallText {
		t.Errorf("in force is %+v", f.Policy)
	}
	if k, _ := w.s.Keys().ByID("a"); !k.Revoked {
		t.Error("a rollback revived a key")
	}
	if e := w.s.Audit(1, AuditFilter{})[0]; e.Action != "policy.rollback" || !strings.Contains(e.After, "- plans[p].tier: 3") {
		t.Errorf("the audit log says %+v", e)
	}
	if r := w.try(p.Command); r.GetCode() != codeConflict {
		t.Errorf("the same command again, which expects revision 2: %v", r)
	}
	_, err = PrepareRollback(time.Unix(1e9, 0), 9, f, w.s.Keys())
	if r, ok := errors.AsType[*Refusal](err); !ok || r.Code != codeNotFound || !strings.Contains(r.Message, "kept are: 1, 2, 3") {
		t.Errorf("got %v", err)
	}
}

// TestPrepareAfterANewerVersion: a policy in force that cannot be read is no reason to stay with it.
func TestPrepareAfterANewerVersion(t *testing.T) {
	w := newWorld(t)
	w.do(&ledgerpb.SetPolicy{Text: []byte("version: 9\nnews: true\n")})
	w.do(createKeys(keyMessage("x", "gone")))
	if _, err := Prepare(time.Unix(1e9, 0), []byte(smallText), w.s.Facts(), w.s.Keys(), nil); err == nil || !strings.Contains(err.Error(), "tenants[gone]") {
		t.Errorf("got %v", err)
	}
	w.do(&ledgerpb.RevokeKey{Id: "x"})
	p, err := Prepare(time.Unix(1e9, 0), []byte(smallText), w.s.Facts(), w.s.Keys(), nil)
	must(t, err)
	if len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "can't be read by this version") {
		t.Errorf("warnings %q", p.Warnings)
	}
}

// TestPrepareTenThousandKeys in one apply, and says when a file is too large.
func TestPrepareTenThousandKeys(t *testing.T) {
	list := func(n, scope int) string {
		var b strings.Builder
		b.WriteString("version: 1\nplans: [{name: p}]\nmodels: []\ntenants: [{name: acme, plan: p}]\nkeys:\n")
		for i := range n {
			fmt.Fprintf(&b, "- {id: k%d, tenant: acme, hash: \"sha256:%x\", name: \"%s\"}\n", i, HashKey(fmt.Sprint(i)), strings.Repeat("n", scope))
		}
		return b.String()
	}
	w := newWorld(t)
	p := w.apply(list(10_000, 10))
	if len(p.NewKeys) != 10_000 || w.s.Keys().Len() != 10_000 || len(p.Command.GetChanges()) != maxChanges+1 {
		t.Errorf("%d new keys, %d in the table, %d changes told", len(p.NewKeys), w.s.Keys().Len(), len(p.Command.GetChanges()))
	}
	if got := p.Command.GetChanges()[maxChanges]; got != "… and 9804 more" {
		t.Errorf("the last change is %q", got)
	}
	_, err := Prepare(time.Unix(1e9, 0), []byte(list(26_000, 250)), NewState().Facts(), nil, nil)
	if err == nil || !strings.Contains(err.Error(), "the policy is too large for one step") || !strings.Contains(err.Error(), "headgate keys create") {
		t.Errorf("too large: %v", err)
	}
}

func TestPrepareKeys(t *testing.T) {
	p := mustParse(t, example)
	hash := FormatHash(HashKey("new"))
	c, err := p.PrepareKeys("k1", time.Unix(2e9, 0), Key{ID: "new", Tenant: "acme", Hash: hash, Models: []string{"llama-8b"}, Expires: Date(time.Unix(1e12, 0))})
	must(t, err)
	if k := c.GetKeys()[0]; c.GetReplaces() != "k1" || c.GetReplacedExpiresUnixNano() != 2e18 || k.GetTenant() != "acme" || k.GetExpiresUnixNano() != 1<<63-1 {
		t.Errorf("the command is %v", c)
	}
	for want, k := range map[string]Key{
		`keys[new].tenant: there is no tenant "acne"; did you mean "acme"`: {ID: "new", Tenant: "acne", Hash: hash},
		`there is no model "m"`:                           {ID: "new", Tenant: "acme", Hash: hash, Models: []string{"m"}},
		"is empty or has other than":                      {Tenant: "acme", Hash: hash},
		"keys[new].name: a key's name is at most 256":     {ID: "new", Tenant: "acme", Hash: hash, Name: "\xff"},
		"keys[new].user: a key's user is at most 256":     {ID: "new", Tenant: "acme", Hash: hash, User: strings.Repeat("u", 257)},
		"keys[new].expires: a key expires after 1970":     {ID: "new", Tenant: "acme", Hash: hash, Expires: Date(time.Unix(0, 0))},
		"a key is held to at most 1000 models, routes":    {ID: "new", Tenant: "acme", Hash: hash, Surfaces: slices.Repeat([]string{"*"}, 1001)},
		"keys[new].hash: not a key's hash: write sha256:": {ID: "new", Tenant: "acme", Hash: "x"},
	} {
		if _, err := p.PrepareKeys("", time.Time{}, k); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestDiffCutsHashes(t *testing.T) {
	p := mustParse(t, smallText)
	for _, c := range Diff(&Policy{}, p) {
		if strings.Contains(c.String(), fmt.Sprintf("%x", HashKey("a"))[:hashDigits+1]) {
			t.Errorf("a hash is told: %v", c)
		}
	}
}
