package ledger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

// command makes a command of a body, with an id of its own for each n.
func command(n uint64, body any) *ledgerpb.Command {
	c := &ledgerpb.Command{Version: 1, Id: make([]byte, 16), UnixNano: int64(1e18 + n), Actor: "alice"}
	binary.BigEndian.PutUint64(c.Id, n+1)
	switch b := body.(type) {
	case *ledgerpb.Found:
		c.Body = &ledgerpb.Command_Found{Found: b}
	case *ledgerpb.SetPolicy:
		c.Body = &ledgerpb.Command_SetPolicy{SetPolicy: b}
	case *ledgerpb.CreateKeys:
		c.Body = &ledgerpb.Command_CreateKeys{CreateKeys: b}
	case *ledgerpb.RevokeKey:
		c.Body = &ledgerpb.Command_RevokeKey{RevokeKey: b}
	case *ledgerpb.TouchKeys:
		c.Body = &ledgerpb.Command_TouchKeys{TouchKeys: b}
	case *ledgerpb.SetKill:
		c.Body = &ledgerpb.Command_SetKill{SetKill: b}
	case *ledgerpb.SetRung:
		c.Body = &ledgerpb.Command_SetRung{SetRung: b}
	case *ledgerpb.SetView:
		c.Body = &ledgerpb.Command_SetView{SetView: b}
	case *ledgerpb.CreateToken:
		c.Body = &ledgerpb.Command_CreateToken{CreateToken: b}
	case *ledgerpb.RevokeToken:
		c.Body = &ledgerpb.Command_RevokeToken{RevokeToken: b}
	case *ledgerpb.Note:
		c.Body = &ledgerpb.Command_Note{Note: b}
	case *ledgerpb.ReserveBlock:
		c.Body = &ledgerpb.Command_ReserveBlock{ReserveBlock: b}
	case *ledgerpb.SettleBlock:
		c.Body = &ledgerpb.Command_SettleBlock{SettleBlock: b}
	case *ledgerpb.Check:
		c.Body = &ledgerpb.Command_Check{Check: b}
	case *ledgerpb.Budget:
		c.Body = &ledgerpb.Command_Budget{Budget: b}
	case *ledgerpb.AdjustBudget:
		c.Body = &ledgerpb.Command_AdjustBudget{AdjustBudget: b}
	case *ledgerpb.ReleaseHolder:
		c.Body = &ledgerpb.Command_ReleaseHolder{ReleaseHolder: b}
	case *ledgerpb.BudgetNotified:
		c.Body = &ledgerpb.Command_BudgetNotified{BudgetNotified: b}
	case *ledgerpb.SetGeneration:
		c.Body = &ledgerpb.Command_SetGeneration{SetGeneration: b}
	case *ledgerpb.InvalidateTags:
		c.Body = &ledgerpb.Command_InvalidateTags{InvalidateTags: b}
	default:
		panic(fmt.Sprintf("no command has the body %T", body))
	}
	return c
}

// world applies bodies one after another.
type world struct {
	t     testing.TB
	s     *State
	index uint64
}

func newWorld(t testing.TB) *world { return &world{t: t, s: NewState()} }

func (w *world) try(body any) *ledgerpb.Result {
	w.t.Helper()
	w.index++
	r, err := w.s.Apply(w.index, command(w.index, body))
	must(w.t, err)
	if got := w.s.Facts().Index; got != w.index {
		w.t.Fatalf("the index is %d after entry %d", got, w.index)
	}
	return r
}

// do applies what must succeed.
func (w *world) do(body any) *ledgerpb.Result {
	w.t.Helper()
	r := w.try(body)
	must(w.t, RefusalOf(r))
	return r
}

func hashOf(s string) []byte { h := HashKey(s); return h[:] }

func keyMessage(id, tenant string) *ledgerpb.Key {
	return &ledgerpb.Key{Id: id, Tenant: tenant, Hash: hashOf(id)}
}

func createKeys(keys ...*ledgerpb.Key) *ledgerpb.CreateKeys {
	return &ledgerpb.CreateKeys{Keys: keys}
}

func snapshotOf(t testing.TB, s *State) []byte {
	t.Helper()
	var b bytes.Buffer
	must(t, s.Capture().Write(&b))
	return b.Bytes()
}

func readState(t testing.TB, snapshot []byte) *State {
	t.Helper()
	s, err := ReadState(bytes.NewReader(snapshot))
	must(t, err)
	return s
}

// lived is a state that holds something of everything.
func lived(t testing.TB) *world {
	w := newWorld(t)
	w.do(&ledgerpb.Found{ClusterId: bytes.Repeat([]byte{7}, 16)})
	w.do(&ledgerpb.SetPolicy{Text: []byte("version: 1\n"), NewKeys: []*ledgerpb.Key{keyMessage("filed", "acme")}, Changes: []string{"+ version: 1"}})
	w.do(&ledgerpb.SetPolicy{Text: []byte("version: 1\n# two\n"), Expected: proto.Uint64(1)})
	k := keyMessage("full", "acme")
	k.Name, k.User, k.Class, k.Models, k.Routes, k.Surfaces, k.AssertUser, k.ExpiresUnixNano = "n", "u", "background", []string{"m"}, []string{"chat"}, []string{"*"}, true, 2e18
	w.do(createKeys(k, keyMessage("second", "globex")))
	w.do(&ledgerpb.CreateKeys{Keys: []*ledgerpb.Key{keyMessage("third", "globex")}, Replaces: "second", ReplacedExpiresUnixNano: 15e17})
	w.do(&ledgerpb.RevokeKey{Id: "full"})
	w.do(&ledgerpb.TouchKeys{Ids: []string{"third", "nobody"}, Unix: []int64{1e9, 1e9}})
	w.do(&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: "acme", On: true, Reason: "abuse"})
	w.do(&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_GLOBAL, On: true})
	w.do(&ledgerpb.SetRung{Rung: "cheap_models", On: true, ExpiresUnixNano: 2e18, Reason: "load"})
	w.do(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 1, Partitions: 4093, RingVersion: 1, Members: []*ledgerpb.Member{
		{Name: "b", Incarnation: 2, Address: "h:2"}, {Name: "a", Incarnation: 1, Address: "h:1"},
	}}})
	w.do(&ledgerpb.CreateToken{Token: &ledgerpb.Token{Name: "ci", Hash: hashOf("ci"), Role: ledgerpb.Role_ROLE_OPERATE, ExpiresUnixNano: 2e18}})
	w.do(&ledgerpb.Note{Node: "a", UnixNano: 1e18, Action: "node.override", Detail: "for 15m"})
	for _, body := range slices.Concat(blockBodies(), budgetBodies(), cacheBodies()) {
		w.do(body)
	}
	if r := w.try(&ledgerpb.RevokeKey{Id: "nobody"}); r.GetCode() != codeNotFound {
		t.Fatalf("revoking nobody: %v", r)
	}
	return w
}

// blockBodies are of two buckets, one of which two owners hold.
func blockBodies() []any {
	day, hour := daily(50), hourly(100)
	return []any{
		(&Reserve{Bucket: bucketOf("hourly"), Limit: hour, Owner: 1, Epoch: 1, N: 1, Want: 30, Least: 5}).message(),
		(&Reserve{Bucket: bucketOf("hourly"), Limit: hour, Owner: 2, Epoch: 1, N: 1, Want: 80, Least: 80}).message(),
		(&Reserve{Bucket: bucketOf("daily"), Limit: day, Owner: 1, Epoch: 1, N: 2, Want: 30, Holding: 4, Debt: 3}).message(),
		(&Settle{Bucket: bucketOf("hourly"), Owner: 1, Epoch: 1, N: 3, Holding: 10, Returned: 5}).message(),
	}
}

func TestFactsAfterEveryCommand(t *testing.T) {
	w := lived(t)
	f := w.s.Facts()
	if f.Changed != w.index-1 {
		t.Errorf("changed at %d, want %d: a refusal changes nothing", f.Changed, w.index-1)
	}
	if f.Revision() != 2 || string(f.Policy.Text) != "version: 1\n# two\n" || len(f.History) != 2 || f.Policy != f.History[1] {
		t.Errorf("the policy is %+v of %d", f.Policy, len(f.History))
	}
	if p, ok := f.PolicyAt(1); !ok || p.Actor != "alice" || !p.Time.Equal(time.Unix(0, 1e18+2)) {
		t.Errorf("revision 1 is %+v", p)
	}
	if k, ok := f.Kills.Lookup(KillTenant, "acme"); !ok || k.Reason != "abuse" || k.Actor != "alice" {
		t.Errorf("the kill switch is %+v", k)
	}
	if _, ok := f.Kills.Lookup(KillModel, "acme"); ok || f.Kills.Len() != 2 || f.Kills.All()[0].Kind != KillGlobal {
		t.Errorf("kill switches: %+v", f.Kills.All())
	}
	if r, ok := f.Rungs.Lookup("cheap_models"); !ok || !r.Expires.Equal(time.Unix(0, 2e18)) {
		t.Errorf("the rung is %+v", r)
	}
	if f.View.Epoch != 1 || f.View.Members[0] != (Member{"a", 1, "h:1"}) {
		t.Errorf("the view is %+v", f.View)
	}
	if tok, ok := f.Tokens.Lookup(HashKey("ci")); !ok || tok.Role != RoleOperate || tok.Name != "ci" {
		t.Errorf("the token is %+v", tok)
	}
	keys := w.s.Keys()
	full, ok := keys.ByID("full")
	if !ok || !full.Revoked || full.User != "u" || full.Active(time.Unix(1e9, 0)) || f.KeyCount != 4 {
		t.Errorf("the revoked key is %+v, of %d", full, f.KeyCount)
	}
	second, _ := keys.ByID("second")
	if !second.Expires().Equal(time.Unix(0, 15e17)) || second.Revoked {
		t.Errorf("the rotated key is %+v", second)
	}
	third, _ := keys.Lookup(HashKey("third"))
	if got := keys.LastUsed(third); !got.Equal(time.Unix(1e9, 0)) {
		t.Errorf("last used at %v", got)
	}
}

// TestRefusals: what a known command cannot do gives a code, and changes nothing.
func TestRefusals(t *testing.T) {
	long := strings.Repeat("x", maxID+1)
	for name, c := range map[string]struct {
		body any
		code string
	}{
		"founded twice":        {&ledgerpb.Found{ClusterId: make([]byte, 16)}, codeExists},
		"no cluster id":        {&ledgerpb.Found{}, codeInvalid},
		"another revision":     {&ledgerpb.SetPolicy{Expected: proto.Uint64(1)}, codeConflict},
		"seed":                 {&ledgerpb.SetPolicy{Seed: true}, codeExists},
		"policy with a twin":   {&ledgerpb.SetPolicy{NewKeys: []*ledgerpb.Key{{Id: "new", Tenant: "t", Hash: hashOf("full")}}}, codeExists},
		"no keys":              {createKeys(), codeInvalid},
		"key exists":           {createKeys(keyMessage("new", "t"), keyMessage("full", "t")), codeExists},
		"key twice":            {createKeys(keyMessage("new", "t"), keyMessage("new", "t")), codeExists},
		"hash twice":           {createKeys(keyMessage("new", "t"), &ledgerpb.Key{Id: "newer", Tenant: "t", Hash: hashOf("new")}), codeExists},
		"hash exists":          {createKeys(&ledgerpb.Key{Id: "new", Tenant: "t", Hash: hashOf("full")}), codeExists},
		"long id":              {createKeys(keyMessage(long, "t")), codeInvalid},
		"short hash":           {createKeys(&ledgerpb.Key{Id: "new", Tenant: "t", Hash: make([]byte, 31)}), codeInvalid},
		"no tenant":            {createKeys(keyMessage("new", "")), codeInvalid},
		"long scope":           {createKeys(&ledgerpb.Key{Id: "new", Tenant: "t", Hash: hashOf("new"), Models: []string{long}}), codeInvalid},
		"wide scope":           {createKeys(&ledgerpb.Key{Id: "new", Tenant: "t", Hash: hashOf("new"), Models: make([]string, maxScope+1)}), codeInvalid},
		"replaces nobody":      {&ledgerpb.CreateKeys{Keys: []*ledgerpb.Key{keyMessage("new", "t")}, Replaces: "nobody", ReplacedExpiresUnixNano: 1}, codeNotFound},
		"replaces revoked":     {&ledgerpb.CreateKeys{Keys: []*ledgerpb.Key{keyMessage("new", "t")}, Replaces: "full", ReplacedExpiresUnixNano: 1}, codeConflict},
		"replaces, no end":     {&ledgerpb.CreateKeys{Keys: []*ledgerpb.Key{keyMessage("new", "t")}, Replaces: "second"}, codeInvalid},
		"revokes nobody":       {&ledgerpb.RevokeKey{Id: "nobody"}, codeNotFound},
		"touch of two lengths": {&ledgerpb.TouchKeys{Ids: []string{"full"}}, codeInvalid},
		"kill of nothing":      {&ledgerpb.SetKill{On: true}, codeInvalid},
		"kill of all by name":  {&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_GLOBAL, Name: "x", On: true}, codeInvalid},
		"kill without a name":  {&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_KEY, On: true}, codeInvalid},
		"kill of a later kind": {&ledgerpb.SetKill{Kind: 99, Name: "x", On: true}, codeInvalid},
		"revive the living":    {&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_KEY, Name: "full"}, codeNotFound},
		"rung not set":         {&ledgerpb.SetRung{Rung: "x"}, codeNotFound},
		"rung without a name":  {&ledgerpb.SetRung{On: true}, codeInvalid},
		"a view skipped":       {&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 3}}, codeConflict},
		"a view back":          {&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 1}}, codeConflict},
		"a member twice":       {&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 2, Members: []*ledgerpb.Member{{Name: "a"}, {Name: "a"}}}}, codeInvalid},
		"token exists":         {&ledgerpb.CreateToken{Token: &ledgerpb.Token{Name: "ci", Hash: hashOf("x"), Role: 1}}, codeExists},
		"token's twin":         {&ledgerpb.CreateToken{Token: &ledgerpb.Token{Name: "cd", Hash: hashOf("ci"), Role: 1}}, codeExists},
		"token of no role":     {&ledgerpb.CreateToken{Token: &ledgerpb.Token{Name: "cd", Hash: hashOf("x")}}, codeInvalid},
		"no token":             {&ledgerpb.CreateToken{}, codeInvalid},
		"revokes no token":     {&ledgerpb.RevokeToken{Name: "cd"}, codeNotFound},
		"note of nothing":      {&ledgerpb.Note{}, codeInvalid},
		"check of nothing":     {&ledgerpb.Check{}, codeInvalid},
		"generation to come":   {&ledgerpb.SetGeneration{Tenant: "acme", Surface: "docs", Generation: 4}, codeInvalid},
		"generation of anew":   {&ledgerpb.SetGeneration{Tenant: "new", Generation: 2}, codeInvalid},
		"generation, long":     {&ledgerpb.SetGeneration{Tenant: long}, codeInvalid},
		"generation, long too": {&ledgerpb.SetGeneration{Surface: long}, codeInvalid},
		"no tags":              {&ledgerpb.InvalidateTags{Tenant: "acme"}, codeInvalid},
		"many tags":            {&ledgerpb.InvalidateTags{Tenant: "acme", Tags: make([]string, MaxTagsAtOnce+1)}, codeInvalid},
		"tags of a long name":  {&ledgerpb.InvalidateTags{Tenant: long, Tags: []string{"a"}}, codeInvalid},
		"a tag among others":   {&ledgerpb.InvalidateTags{Tenant: "acme", Tags: []string{"a", "b c", "d"}}, codeInvalid},
		"a long tag":           {&ledgerpb.InvalidateTags{Tenant: "acme", Tags: []string{long}}, codeInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			w := lived(t)
			before, audit := *w.s.Facts(), len(w.s.Audit(maxAudit, AuditFilter{}))
			r := w.try(c.body)
			if r.GetCode() != c.code || r.GetMessage() == "" {
				t.Errorf("got %q %q, want the code %s", r.GetCode(), r.GetMessage(), c.code)
			}
			after := *w.s.Facts()
			after.Index, after.Time = before.Index, before.Time
			if !reflect.DeepEqual(before, after) || len(w.s.Audit(maxAudit, AuditFilter{})) != audit {
				t.Errorf("it changed\n%+v\nto\n%+v", before, after)
			}
			if _, ok := w.s.Keys().ByID("new"); ok {
				t.Error("a key was created all the same")
			}
		})
	}
}

func TestWhatChangesNothingIsNoError(t *testing.T) {
	w := lived(t)
	changed, audit := w.s.Facts().Changed, len(w.s.Audit(maxAudit, AuditFilter{}))
	sum := w.s.Facts().Hash
	w.do(&ledgerpb.RevokeKey{Id: "full"})
	w.do(&ledgerpb.TouchKeys{Ids: []string{"third"}, Unix: []int64{999_999_999}}) // it never goes back
	w.do(&ledgerpb.SetView{View: w.s.Facts().View.Message()})
	w.do(&ledgerpb.Found{ClusterId: w.s.Facts().ClusterID})
	w.do(&ledgerpb.Check{Index: changed, Hash: sum[:]})
	if f := w.s.Facts(); f.Changed != changed || f.Hash != sum || len(w.s.Audit(maxAudit, AuditFilter{})) != audit {
		t.Error("something was changed")
	}
}

func TestRotationProlongsNothing(t *testing.T) {
	w := newWorld(t)
	k := keyMessage("old", "t")
	k.ExpiresUnixNano = 10
	w.do(createKeys(k))
	w.do(&ledgerpb.CreateKeys{Keys: []*ledgerpb.Key{keyMessage("new", "t")}, Replaces: "old", ReplacedExpiresUnixNano: 20})
	if old, _ := w.s.Keys().ByID("old"); old.Expires().UnixNano() != 10 {
		t.Errorf("it now expires at %v", old.Expires())
	}
}

func TestUnknownCommandsStop(t *testing.T) {
	for name, c := range map[string]*ledgerpb.Command{
		"a later version": {Version: StateVersion + 1, Body: &ledgerpb.Command_Note{Note: &ledgerpb.Note{Action: "a"}}},
		"no body":         {Version: 1},
		"a later body": func() *ledgerpb.Command { // field 1000
			var c ledgerpb.Command
			must(t, proto.Unmarshal([]byte{8, 1, 0xc2, 0x3e, 0}, &c))
			return &c
		}(),
	} {
		w := lived(t)
		before := snapshotOf(t, w.s)
		if r, err := w.s.Apply(99, c); !errors.Is(err, ErrUnknownCommand) || r != nil {
			t.Errorf("%s: %v %v", name, r, err)
		}
		if !bytes.Equal(before, snapshotOf(t, w.s)) {
			t.Errorf("%s: it changed the state", name)
		}
	}
}

func TestCheckFindsDivergence(t *testing.T) {
	w := lived(t)
	f := w.s.Facts()
	wrong := bytes.Repeat([]byte{1}, 32)
	w.do(&ledgerpb.Check{Index: f.Changed - 1, Hash: wrong}) // of another moment: nothing to compare
	if _, err := w.s.Apply(99, command(99, &ledgerpb.Check{Index: f.Changed, Hash: wrong})); !errors.Is(err, ErrDiverged) {
		t.Errorf("got %v", err)
	}
}

func TestSameIDAnswersAsItDid(t *testing.T) {
	for _, body := range []any{
		&ledgerpb.SetPolicy{Text: []byte("three")}, createKeys(keyMessage("new", "t")), &ledgerpb.RevokeKey{Id: "nobody"}, &ledgerpb.RevokeKey{Id: "third"},
		&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: "acme"}, &ledgerpb.SetRung{Rung: "r", On: true},
		&ledgerpb.RevokeToken{Name: "ci"}, &ledgerpb.Note{Action: "a"}, &ledgerpb.Found{ClusterId: make([]byte, 16)},
		&ledgerpb.SetGeneration{Tenant: "acme"}, &ledgerpb.SetGeneration{Tenant: "acme", Generation: 9}, &ledgerpb.InvalidateTags{Tags: []string{"a"}},
	} {
		w := lived(t)
		c := command(1000, body)
		first, err := w.s.Apply(1000, c)
		must(t, err)
		facts, audit := *w.s.Facts(), w.s.Audit(maxAudit, AuditFilter{})
		restored := readState(t, snapshotOf(t, w.s))
		for _, s := range []*State{w.s, restored} {
			again, err := s.Apply(1001, c)
			must(t, err)
			if !proto.Equal(first, again) {
				t.Errorf("%T: first %v, then %v", body, first, again)
			}
			after := *s.Facts()
			if after.Index != 1001 || after.Changed != facts.Changed || after.Hash != facts.Hash || !reflect.DeepEqual(audit, s.Audit(maxAudit, AuditFilter{})) {
				t.Errorf("%T: the second time changed something", body)
			}
		}
	}
}

func TestDoneRingForgetsTheOldest(t *testing.T) {
	w := newWorld(t)
	first := command(1, &ledgerpb.Note{Action: "a"})
	_, err := w.s.Apply(1, first)
	must(t, err)
	const more = 2*maxDone + 100 // the list is cut on the way
	for i := uint64(2); i < more; i++ {
		_, err := w.s.Apply(i, command(i, &ledgerpb.RevokeKey{Id: "x"}))
		must(t, err)
	}
	if got := len(w.s.done.at); got != maxDone || len(w.s.done.last()) != maxDone {
		t.Errorf("%d ids are remembered, want %d", got, maxDone)
	}
	oldest, err := w.s.Apply(more, command(more-maxDone, &ledgerpb.Note{Action: "a"}))
	must(t, err)
	if oldest.GetIndex() != more-maxDone || oldest.GetCode() != codeNotFound {
		t.Errorf("the oldest that is remembered answers %v", oldest)
	}
	again, err := w.s.Apply(more+1, first)
	must(t, err)
	if again.GetIndex() != more+1 {
		t.Errorf("the first is still remembered: %v", again)
	}
}

// TestClockSetBack: time never goes back, and nothing else depends on it.
func TestClockSetBack(t *testing.T) {
	s := NewState()
	day := int64(24 * time.Hour)
	for i, at := range []int64{5 * day, 4 * day, -day, 5*day + 1} {
		c := command(uint64(i), &ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_KEY, Name: fmt.Sprint(i), On: true})
		c.UnixNano = at
		r, err := s.Apply(uint64(i+1), c)
		must(t, err)
		must(t, RefusalOf(r))
		want := time.Unix(0, max(5*day, at))
		k, _ := s.Facts().Kills.Lookup(KillKey, fmt.Sprint(i))
		if !s.Facts().Time.Equal(want) || !k.Time.Equal(want) || !s.Audit(1, AuditFilter{})[0].Time.Equal(want) {
			t.Errorf("command %d at %v: time %v, noted %v", i, time.Unix(0, at), s.Facts().Time, k.Time)
		}
	}
}

func TestHistoryIsBounded(t *testing.T) {
	w := newWorld(t)
	for range maxHistory + 5 {
		w.do(&ledgerpb.SetPolicy{Text: []byte("small")})
	}
	f := w.s.Facts()
	if len(f.History) != maxHistory || f.History[0].Revision != 6 || f.Revision() != maxHistory+5 {
		t.Errorf("%d revisions from %d", len(f.History), f.History[0].Revision)
	}
	for range 3 {
		w.do(&ledgerpb.SetPolicy{Text: make([]byte, maxHistoryBytes/2)})
	}
	if f = w.s.Facts(); len(f.History) != 2 {
		t.Errorf("%d revisions of half the bytes are kept", len(f.History))
	}
	w.do(&ledgerpb.SetPolicy{Text: make([]byte, maxHistoryBytes+1)})
	if f = w.s.Facts(); len(f.History) != 1 || f.Policy != f.History[0] {
		t.Errorf("the one in force is not kept alone: %d", len(f.History))
	}
	restored := readState(t, snapshotOf(t, w.s))
	if restored.Facts().Hash != f.Hash || restored.Facts().Revision() != f.Revision() {
		t.Error("what was forgotten is still in the hash")
	}
}

func TestAuditTellsWhoDidWhat(t *testing.T) {
	w := lived(t)
	all := w.s.Audit(maxAudit, AuditFilter{})
	actions := make([]string, len(all))
	for i, e := range all {
		actions[len(all)-1-i] = e.Action
		if e.Actor != "alice" || e.Index == 0 || e.Time.IsZero() || e.Object == "" {
			t.Errorf("an entry lacks something: %+v", e)
		}
		digits := fmt.Sprintf("%x", hashOf("full"))
		if text := fmt.Sprint(e); strings.Contains(text, digits[:hashDigits+1]) {
			t.Errorf("a hash is told: %s", text)
		}
	}
	want := "cluster.found policy.apply policy.apply key.create key.rotate key.revoke kill.throw kill.throw ladder.set view.change token.create node.override budget.charge budget.alert budget.credit budget.release" +
		strings.Repeat(" cache.generation", 6) + strings.Repeat(" cache.tags", 4)
	if got := strings.Join(actions, " "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := w.s.Audit(10, AuditFilter{Action: "key."}); len(got) != 3 || got[0].Action != "key.revoke" {
		t.Errorf("of keys: %+v", got)
	}
	if got := w.s.Audit(2, AuditFilter{}); len(got) != 2 || got[0].Action != "cache.tags" {
		t.Errorf("the last two: %+v", got)
	}
	if got := w.s.Audit(9, AuditFilter{Object: "tenant acme", Actor: "alice", Since: all[len(all)-1].Time, Until: all[9].Time}); len(got) != 4 || got[3].After != "on: abuse" || got[3].Before != "off" || got[0].Action != "budget.credit" {
		t.Errorf("of acme: %+v", got)
	}
	if got := w.s.Audit(9, AuditFilter{Actor: "bob"}); got != nil {
		t.Errorf("of bob: %+v", got)
	}
}

func TestAuditIsBoundedAndKeepsSecretsOut(t *testing.T) {
	w := newWorld(t)
	secret, hash, err := NewKey(bytes.NewReader(bytes.Repeat([]byte{0xa5}, 32)), true)
	must(t, err)
	w.do(&ledgerpb.Note{Action: "a", Node: "n", Detail: secret + " " + FormatHash(hash)})
	if e := w.s.Audit(1, AuditFilter{})[0]; strings.Contains(e.After, strings.Repeat("a5", 7)) || strings.Contains(e.After, fmt.Sprintf("%x", hash[:7])) || !strings.Contains(e.After, "hg_live_a5a5a5a5a5a5…") {
		t.Errorf("the audit log holds %s", e.After)
	}
	for range maxAudit + 10 {
		w.do(&ledgerpb.Note{Action: "a", Node: "n", Detail: strings.Repeat("é", maxAuditText)})
	}
	got := w.s.Audit(2*maxAudit, AuditFilter{})
	bytes := 0
	for _, e := range got {
		if bytes += e.size(); len(e.After) > maxAuditText {
			t.Fatalf("a text of %d bytes", len(e.After))
		}
	}
	if bytes > maxAuditBytes || bytes < maxAuditBytes*9/10 || got[0].Index != w.index {
		t.Errorf("%d entries of %d bytes up to %d", len(got), bytes, got[0].Index)
	}
	for range maxAudit + 10 {
		w.do(&ledgerpb.Note{Action: "a", Node: "n"})
	}
	if got := w.s.Audit(2*maxAudit, AuditFilter{}); len(got) != maxAudit {
		t.Errorf("%d entries", len(got))
	}
}

func TestReplaceShowsAndAdoptKeepsTheFence(t *testing.T) {
	w := newWorld(t)
	keys := w.s.Keys()
	w.do(createKeys(keyMessage("mine", "t")))
	w.do(&ledgerpb.Found{ClusterId: make([]byte, 16)})
	for e := uint64(1); e < 5; e++ {
		w.do(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: e}})
	}
	here := w.s.Facts()
	backup := readState(t, snapshotOf(t, lived(t).s))
	want := backup.Facts()
	backup.Adopt(here)
	w.s.Replace(backup)
	f := w.s.Facts()
	if f.Hash != want.Hash || f.Revision() != 2 || f.KeyCount != 4 {
		t.Errorf("after it the facts are %+v", f)
	}
	if f.Policy.Index != here.Index+1 || f.History[1] != f.Policy || f.History[0].Index != 2 || want.Policy.Index != 3 {
		t.Errorf("the policies in force are numbered %d and %d, after index %d", f.History[0].Index, f.Policy.Index, here.Index)
	}
	if f.View.Epoch != 4 || !bytes.Equal(f.ClusterID, here.ClusterID) {
		t.Errorf("the epoch went back to %d, the cluster is %x", f.View.Epoch, f.ClusterID)
	}
	if _, ok := keys.ByID("mine"); ok || keys.Len() != 4 || keys != w.s.Keys() {
		t.Error("readers still see the old keys")
	}
	if len(w.s.Audit(maxAudit, AuditFilter{})) != 26 {
		t.Error("the audit log is not the backup's")
	}
	w.do(createKeys(keyMessage("mine", "t")))
	_, err := w.s.Apply(1, command(500, &ledgerpb.SetPolicy{Text: []byte("version: 1\n")}))
	must(t, err)
	if after := w.s.Facts().Policy; after.Index != here.Index+2 || after.Revision != 3 {
		t.Errorf("the next policy, at an index that went back, is %+v", after)
	}
	if again := readState(t, snapshotOf(t, w.s)); again.Facts().Hash != w.s.Facts().Hash {
		t.Error("the hash is wrong after a replacement")
	}
}

// drawBody draws a command that often does something.
func drawBody(t *rapid.T, facts *Facts) any {
	id := rapid.Map(rapid.IntRange(0, 30), func(i int) string { return fmt.Sprintf("k%d", i) })
	few := rapid.SampledFrom([]string{"acme", "globex", "m1"})
	switch rapid.IntRange(0, 15).Draw(t, "kind") {
	case 0:
		return &ledgerpb.Found{ClusterId: bytes.Repeat([]byte{byte(rapid.IntRange(0, 1).Draw(t, "cluster"))}, 16)}
	case 1:
		p := &ledgerpb.SetPolicy{Text: rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, "text"), Seed: rapid.Bool().Draw(t, "seed")}
		if rapid.Bool().Draw(t, "guarded") {
			p.Expected = new(facts.Revision() - uint64(rapid.IntRange(0, 1).Draw(t, "behind")))
		}
		for _, k := range rapid.SliceOfN(id, 0, 3).Draw(t, "keys") {
			p.NewKeys = append(p.NewKeys, keyMessage(k, few.Draw(t, "tenant")))
		}
		return p
	case 2, 3:
		c := &ledgerpb.CreateKeys{}
		for _, k := range rapid.SliceOfNDistinct(id, 1, 3, rapid.ID).Draw(t, "keys") {
			c.Keys = append(c.Keys, keyMessage(k, few.Draw(t, "tenant")))
		}
		if rapid.Bool().Draw(t, "rotate") {
			c.Replaces, c.ReplacedExpiresUnixNano = id.Draw(t, "replaces"), rapid.Int64().Draw(t, "ends")
		}
		return c
	case 4:
		return &ledgerpb.RevokeKey{Id: id.Draw(t, "id")}
	case 5:
		c := &ledgerpb.TouchKeys{Ids: rapid.SliceOfN(id, 0, 5).Draw(t, "ids")}
		for range c.Ids {
			c.Unix = append(c.Unix, rapid.Int64Range(-1, 1<<33).Draw(t, "unix"))
		}
		return c
	case 6:
		kind := rapid.Int32Range(0, 5).Draw(t, "kind")
		c := &ledgerpb.SetKill{Kind: ledgerpb.KillKind(kind), On: rapid.Bool().Draw(t, "on"), Reason: few.Draw(t, "why")}
		if kind != 1 {
			c.Name = few.Draw(t, "name")
		}
		return c
	case 7:
		return &ledgerpb.SetRung{Rung: few.Draw(t, "rung"), On: rapid.Bool().Draw(t, "on"), ExpiresUnixNano: rapid.Int64Range(-1, 1<<60).Draw(t, "expires")}
	case 8:
		v := &ledgerpb.View{Epoch: uint64(rapid.IntRange(0, 2).Draw(t, "step")), Members: []*ledgerpb.Member{{Name: "b"}, {Name: "a"}}}
		if facts.View != nil {
			v.Epoch += facts.View.Epoch
		}
		return &ledgerpb.SetView{View: v}
	case 9:
		name := few.Draw(t, "token")
		return &ledgerpb.CreateToken{Token: &ledgerpb.Token{Name: name, Hash: hashOf(name), Role: ledgerpb.Role(rapid.Int32Range(0, 3).Draw(t, "role"))}}
	case 10:
		return &ledgerpb.RevokeToken{Name: few.Draw(t, "token")}
	case 11:
		l := rapid.SampledFrom([]limiter.Limit{hourly(100), daily(50)}).Draw(t, "limit")
		l.Revision = rapid.Uint64Range(0, 3).Draw(t, "revision")
		units := rapid.Int64Range(-1, 100)
		return (&Reserve{
			Bucket: bucketOf(few.Draw(t, "bucket")), Limit: l, Owner: rapid.Uint64Range(0, 3).Draw(t, "owner"), Epoch: rapid.Uint64Range(0, 3).Draw(t, "epoch"),
			N: rapid.Uint64Range(0, 40).Draw(t, "n"), Want: units.Draw(t, "want"), Least: units.Draw(t, "least"), Holding: units.Draw(t, "holding"), Debt: units.Draw(t, "debt"),
		}).message()
	case 12:
		units := rapid.Int64Range(-1, 100)
		return (&Settle{
			Bucket: bucketOf(few.Draw(t, "bucket")), Owner: rapid.Uint64Range(0, 3).Draw(t, "owner"), Epoch: rapid.Uint64Range(0, 3).Draw(t, "epoch"),
			N: rapid.Uint64Range(0, 40).Draw(t, "n"), Holding: units.Draw(t, "holding"), Returned: units.Draw(t, "returned"),
		}).message()
	case 13:
		return &ledgerpb.SetGeneration{Tenant: few.Draw(t, "tenant"), Surface: few.Draw(t, "surface"), Generation: rapid.Uint64Range(0, 3).Draw(t, "generation")}
	case 14:
		return &ledgerpb.InvalidateTags{Tenant: few.Draw(t, "tenant"), Tags: rapid.SliceOfN(few, 0, 3).Draw(t, "tags")}
	default:
		if rapid.Bool().Draw(t, "note") {
			return &ledgerpb.Note{Node: "n", Action: few.Draw(t, "action"), UnixNano: rapid.Int64().Draw(t, "at")}
		}
		return &ledgerpb.Check{Index: facts.Changed, Hash: facts.Hash[:]}
	}
}

// TestReplicasAgree feeds two replicas the same log, one of them stopped and restored from
// its snapshot on the way, and a third one that was fed as it came over the wire.
func TestReplicasAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, wired := NewState(), NewState(), NewState()
		var past []*ledgerpb.Command
		for i := range uint64(rapid.IntRange(1, 60).Draw(t, "length")) {
			c := command(i, drawBody(t, a.Facts()))
			if len(past) > 0 && rapid.IntRange(0, 5).Draw(t, "again") == 0 {
				c = rapid.SampledFrom(past).Draw(t, "past")
			}
			c.UnixNano = rapid.Int64Range(-10, 1<<60).Draw(t, "clock")
			if past = append(past, c); c.GetCheck() != nil {
				past = past[:len(past)-1] // true at its time only
			}
			text, err := proto.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			var copied ledgerpb.Command
			if err := proto.Unmarshal(text, &copied); err != nil {
				t.Fatal(err)
			}
			var results [3]*ledgerpb.Result
			for j, s := range []*State{a, b} {
				if results[j], err = s.Apply(i+1, c); err != nil {
					t.Fatal(err)
				}
			}
			if results[2], err = wired.Apply(i+1, &copied); err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(results[0], results[1]) || !proto.Equal(results[0], results[2]) {
				t.Fatalf("entry %d gave %v", i+1, results)
			}
			if rapid.IntRange(0, 9).Draw(t, "restart") == 0 {
				b = restored(t, b)
			}
		}
		want := written(t, a)
		for _, s := range []*State{b, wired, restored(t, a)} {
			if !reflect.DeepEqual(plainly(s.Facts()), plainly(a.Facts())) {
				t.Fatalf("facts differ:\n%+v\n%+v", a.Facts(), s.Facts())
			}
			if !bytes.Equal(written(t, s), want) {
				t.Fatal("snapshots differ")
			}
		}
	})
}

// plainly is f without what an empty map or slice may say in two ways.
func plainly(f *Facts) Facts {
	g := *f
	g.Kills, g.Rungs, g.Tokens, g.Caches = Kills{}, Rungs{}, Tokens{}, nil
	return g // the hash holds them
}

func written(t *rapid.T, s *State) []byte {
	var b bytes.Buffer
	if err := s.Capture().Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func restored(t *rapid.T, s *State) *State {
	out, err := ReadState(bytes.NewReader(written(t, s)))
	if err != nil {
		t.Fatal(err)
	}
	return out
}
