package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"headgate/cluster/ledger/ledgerpb"
)

// cacheBodies are of four generations, one of them set back, and five tags, one of them invalidated twice.
func cacheBodies() []any {
	return []any{
		&ledgerpb.SetGeneration{},
		&ledgerpb.SetGeneration{Tenant: "acme"},
		&ledgerpb.SetGeneration{Surface: "docs"},
		&ledgerpb.SetGeneration{Tenant: "acme", Surface: "docs"},
		&ledgerpb.SetGeneration{Tenant: "acme", Surface: "docs"},
		&ledgerpb.SetGeneration{Tenant: "acme", Surface: "docs", Generation: 2},
		&ledgerpb.InvalidateTags{Tenant: "acme", Tags: []string{"product:42", "größe"}},
		&ledgerpb.InvalidateTags{Tags: []string{"product:42"}},
		&ledgerpb.InvalidateTags{Tenant: "globex", Tags: []string{"product:42", "user/7"}},
		&ledgerpb.InvalidateTags{Tenant: "acme", Tags: []string{"product:42"}},
	}
}

func floorRecord(n uint64) *ledgerpb.Record_CacheFloor {
	return &ledgerpb.Record_CacheFloor{CacheFloor: &ledgerpb.CacheFloor{Tenant: "acme", Count: n}}
}

func TestGenerations(t *testing.T) {
	w := newWorld(t)
	set := func(tenant, surface string, generation, now, previous uint64) {
		t.Helper()
		r := w.do(&ledgerpb.SetGeneration{Tenant: tenant, Surface: surface, Generation: generation})
		if g := r.GetGeneration(); g.GetNow() != now || g.GetPrevious() != previous {
			t.Errorf("generation %d of %q, %q gives %v, want %d after %d", generation, tenant, surface, g, now, previous)
		}
	}
	is := func(tenant, surface string, want ...uint64) {
		t.Helper()
		if got := w.s.Facts().Caches.Generation(tenant, surface); got != [4]uint64(want) {
			t.Errorf("of %q, %q there are %v, want %v", tenant, surface, got, want)
		}
	}
	is("acme", "docs", 1, 1, 1, 1)
	set("acme", "docs", 1, 1, 1) // is in force
	if generations, _ := w.s.Facts().Caches.Len(); generations != 0 {
		t.Errorf("%d generations are kept, of none raised", generations)
	}
	set("acme", "docs", 0, 2, 1)
	set("acme", "docs", 0, 3, 2)
	set("acme", "docs", 1, 1, 3) // back to the first
	set("acme", "docs", 0, 4, 1) // no number comes twice
	set("acme", "docs", 3, 3, 4)
	set("acme", "docs", 4, 4, 3) // and what was undone may be done again
	set("acme", "", 0, 2, 1)
	set("", "docs", 0, 2, 1)
	set("", "", 0, 2, 1)
	set("", "", 0, 3, 2)
	is("acme", "docs", 3, 2, 2, 4)
	is("acme", "chat", 3, 2, 1, 1)
	is("globex", "docs", 3, 1, 2, 1)
	is("globex", "", 3, 1, 3, 1) // who asks for none: of all twice
	listed := []CacheGeneration{{"", "", 3, 3}, {"", "docs", 2, 2}, {"acme", "", 2, 2}, {"acme", "docs", 4, 4}}
	if got := w.s.Facts().Caches.Generations(); !slices.Equal(got, listed) || (*Caches)(nil).Generations() != nil {
		t.Errorf("those ever raised are %v", got)
	}
	if r := w.try(&ledgerpb.SetGeneration{Tenant: "acme", Surface: "docs", Generation: 5}); r.GetCode() != codeInvalid || !strings.Contains(r.GetMessage(), "the highest is 4") {
		t.Errorf("a generation that never was gives %v", r)
	}
	want := []string{
		"everything: generation 2 -> generation 3", "everything: generation 1 -> generation 2", "surface docs: generation 1 -> generation 2",
		"tenant acme: generation 1 -> generation 2", "surface docs of tenant acme: generation 3 -> generation 4",
	}
	var got []string
	for _, e := range w.s.Audit(len(want), AuditFilter{Action: "cache.generation"}) {
		got = append(got, fmt.Sprintf("%s: %s -> %s", e.Object, e.Before, e.After))
	}
	if !slices.Equal(got, want) {
		t.Errorf("the audit log has\n%s", strings.Join(got, "\n"))
	}
}

// TestGenerationsAreBounded, and where there is no room that of everything can be raised.
func TestGenerationsAreBounded(t *testing.T) {
	w := newWorld(t)
	e := w.s.editCaches()
	for i := range MaxGenerations {
		e.putGeneration(cacheName{fmt.Sprint("t", i), ""}, generation{1, 1}, generation{2, 2})
	}
	e.done()
	if r := w.try(&ledgerpb.SetGeneration{Tenant: "another"}); r.GetCode() != codeFull || r.GetGeneration() != nil {
		t.Errorf("one more gives %v", r)
	}
	if r := w.do(&ledgerpb.SetGeneration{Tenant: "t7"}); r.GetGeneration().GetNow() != 3 {
		t.Errorf("one that is known gives %v", r)
	}
	w.do(&ledgerpb.SetGeneration{})
	back := readState(t, snapshotOf(t, w.s)).Facts()
	if got := back.Caches.Generation("t7", "s"); got != [4]uint64{2, 3, 1, 1} || back.Hash != w.s.Facts().Hash {
		t.Errorf("read back they are %v", got)
	}
}

func TestValidTag(t *testing.T) {
	for tag, want := range map[string]bool{
		"a": true, "product:42": true, "größe": true, "a/b?c=d": true, strings.Repeat("x", MaxTag): true, "日本": true,
		"": false, "a b": false, "a,b": false, "a\n": false, "\x00": false, "\x7f": false, "\xff": false, strings.Repeat("x", MaxTag+1): false,
	} {
		if ValidTag(tag) != want {
			t.Errorf("%q is valid: %v", tag, !want)
		}
	}
}

func TestTags(t *testing.T) {
	w := newWorld(t)
	caches := func() *Caches { return w.s.Facts().Caches }
	if !caches().Valid("acme", []string{"a"}, 0) || caches().Stamp() != 0 || caches().Floor("acme") != 0 {
		t.Error("something is invalid where nothing ever was invalidated")
	}
	first := caches().Stamp()
	w.do(&ledgerpb.InvalidateTags{Tenant: "acme", Tags: []string{"a", "b"}})
	second, held := caches().Stamp(), caches()
	w.do(&ledgerpb.InvalidateTags{Tags: []string{"c", "c"}})
	third := caches().Stamp()
	for _, c := range []struct {
		tenant string
		tags   []string
		stamp  uint64
		want   bool
	}{
		{"acme", nil, first, true},
		{"acme", []string{"x", "y"}, first, true},
		{"acme", []string{"x", "b"}, first, false},
		{"acme", []string{"x", "b"}, second, true},
		{"globex", []string{"a", "b"}, first, true},
		{"acme", []string{"c"}, second, false},
		{"globex", []string{"c"}, second, false},
		{"globex", []string{"c"}, third, true},
	} {
		if got := caches().Valid(c.tenant, c.tags, c.stamp); got != c.want {
			t.Errorf("%s %v of %d is valid: %v", c.tenant, c.tags, c.stamp, got)
		}
	}
	if !held.Valid("acme", []string{"c"}, second) || held.Stamp() != second {
		t.Error("what was read earlier changed")
	}
	if got := caches().Tagged("acme", "b"); got != second {
		t.Errorf("the tag b holds from %d on, want %d", got, second)
	}
	log := w.s.Audit(10, AuditFilter{Action: tagsAction})
	if len(log) != 2 || log[0].Object != "all tenants" || log[1].Object != "tenant acme" || log[1].After != "a, b" || log[1].Actor != "alice" {
		t.Errorf("the audit log has %+v", log)
	}
}

// TestTagsPushOutNothing that people did: whoever invalidates by a webhook does it all day.
func TestTagsPushOutNothing(t *testing.T) {
	w := newWorld(t)
	w.do(&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_GLOBAL, On: true})
	for range maxAudit + 5 {
		w.do(&ledgerpb.InvalidateTags{Tenant: "acme", Tags: []string{"a"}})
	}
	w.do(&ledgerpb.SetGeneration{})
	for name, s := range map[string]*State{"lived": w.s, "read back": readState(t, snapshotOf(t, w.s))} {
		log := s.Audit(maxAudit+10, AuditFilter{})
		if len(log) != maxTagged+2 || log[0].Action != "cache.generation" || log[len(log)-1].Action != "kill.throw" {
			t.Errorf("%s: the audit log has %d entries, from %+v to %+v", name, len(log), log[len(log)-1], log[0])
		}
	}
}

// TestTagsAreForgotten: at most a quarter are one tenant's and so many all tenants', and what had a forgotten tag does not hold.
func TestTagsAreForgotten(t *testing.T) {
	w := newWorld(t)
	const quarter = MaxTags / 4
	invalidate := func(tenant string, from, to int) {
		for ; from < to; from += MaxTagsAtOnce {
			var tags []string
			for i := from; i < min(to, from+MaxTagsAtOnce); i++ {
				tags = append(tags, fmt.Sprint("tag", i))
			}
			w.do(&ledgerpb.InvalidateTags{Tenant: tenant, Tags: tags})
		}
	}
	stamp := w.s.Facts().Caches.Stamp()
	invalidate("one", 0, quarter)
	if c := w.s.Facts().Caches; c.Floor("one") != 0 || !c.Valid("one", []string{"other"}, stamp) {
		t.Errorf("a quarter fills it, to the floor %d", c.Floor("one"))
	}
	invalidate("one", quarter, quarter+1)
	c := w.s.Facts().Caches
	if _, tags := c.Len(); tags != quarter || c.Floor("one") != stamp+1 || c.Floor("two") != 0 {
		t.Errorf("%d tags of one tenant, its floor is %d", tags, c.Floor("one"))
	}
	if c.Valid("one", []string{"tag0"}, stamp) || c.Valid("one", []string{"other"}, stamp) || !c.Valid("one", []string{"tag0"}, stamp+1) || !c.Valid("one", nil, stamp) {
		t.Error("a forgotten tag is valid, or more than its invalidation ends")
	}
	for i := range 4 {
		invalidate(fmt.Sprint("more", i), 0, quarter)
	}
	c = w.s.Facts().Caches
	if _, tags := c.Len(); tags != MaxTags || c.Floor("one") != w.s.Facts().Caches.Tagged("one", "tag0") || c.Floor("more0") != 0 {
		t.Errorf("%d tags, the floors are %d and %d", tags, c.Floor("one"), c.Floor("more0"))
	}
	if c.Valid("one", []string{fmt.Sprint("tag", quarter)}, stamp+17) {
		t.Error("the last tag of one is forgotten, and valid")
	}
	back := readState(t, snapshotOf(t, w.s))
	if f := back.Facts(); f.Hash != w.s.Facts().Hash || f.Caches.Floor("one") != c.Floor("one") || !bytes.Equal(snapshotOf(t, back), snapshotOf(t, w.s)) {
		t.Error("read back it is another state")
	}
}

// TestFloorsAreBounded: beyond the bound all tenants have the highest.
func TestFloorsAreBounded(t *testing.T) {
	w := newWorld(t)
	w.s.tags.mostOwn, w.s.tags.mostFloors = 1, 2
	for _, tenant := range []string{"", "t0", "t1", "t2"} {
		w.do(&ledgerpb.InvalidateTags{Tenant: tenant, Tags: []string{"a", "b"}})
	}
	c := w.s.Facts().Caches
	if c.floors["t0"] != 0 || c.floors[""] != 1 || c.Floor("t0") != 3 || c.Floor("nobody") != 3 || len(c.floors) != 2 {
		t.Errorf("the floors are %v above %d", c.floors, c.floor)
	}
	if !c.Valid("t1", []string{"b"}, 3) || c.Valid("t1", []string{"b"}, 2) || c.Valid("t0", []string{"a"}, 2) {
		t.Error("what is known of a tag does not count any more")
	}
	if back := readState(t, snapshotOf(t, w.s)).Facts(); back.Hash != w.s.Facts().Hash || back.Caches.Floor("nobody") != 3 {
		t.Error("read back it is another state")
	}
}

// TestAFloorOfAll: what was invalidated for all, and was forgotten, ends answers of every tenant, also of a state that was read.
func TestAFloorOfAll(t *testing.T) {
	w := newWorld(t)
	w.s.tags.most = 1
	w.do(&ledgerpb.InvalidateTags{Tags: []string{"a"}})
	held := w.s.Facts().Caches
	w.do(&ledgerpb.InvalidateTags{Tenant: "t0", Tags: []string{"b"}})
	for name, c := range map[string]*Caches{"lived": w.s.Facts().Caches, "read back": readState(t, snapshotOf(t, w.s)).Facts().Caches} {
		if c.Valid("t1", []string{"a"}, 0) || !c.Valid("t1", []string{"a"}, 1) || c.Floor("t1") != 1 {
			t.Errorf("%s: the tag's answer holds from %d on, the floor is %d", name, c.Tagged("t1", "a"), c.Floor("t1"))
		}
	}
	if held.Floor("t1") != 0 {
		t.Error("Caches that were read before have changed")
	}
}

// TestValidAllocatesNothing: it is asked at every look into a cache.
func TestValidAllocatesNothing(t *testing.T) {
	w := lived(t)
	c, tags := w.s.Facts().Caches, []string{"product:43", "größer", "user/8"}
	sum := uint64(0)
	if n := testing.AllocsPerRun(100, func() {
		if c.Valid("acme", tags, 0) {
			sum += c.Generation("acme", "docs")[3]
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if sum != 101*2 {
		t.Errorf("the sum is %d", sum)
	}
}

// BenchmarkValid is a look-up's part: three tags and the generations, with the table full.
func BenchmarkValid(b *testing.B) {
	w := newWorld(b)
	for i := range 4 {
		for from := 0; from < MaxTags/4; from += 512 {
			var tags []string
			for j := range 512 {
				tags = append(tags, fmt.Sprint("tag", from+j))
			}
			w.do(&ledgerpb.InvalidateTags{Tenant: fmt.Sprint("t", i), Tags: tags})
		}
	}
	w.do(&ledgerpb.SetGeneration{})
	c, tags := w.s.Facts().Caches, []string{"tag7", "tag8", "tag9"}
	b.ReportAllocs()
	for b.Loop() {
		if !c.Valid("t1", tags, c.Stamp()) || c.Generation("t1", "docs")[0] != 2 {
			b.Fatal("it is not valid")
		}
	}
}

// BenchmarkInvalidate is one tag, with the table full.
func BenchmarkInvalidate(b *testing.B) {
	w := newWorld(b)
	for i := range MaxTags {
		w.s.tags.put(&tagged{cacheName{fmt.Sprint("t", i%5), fmt.Sprint("tag", i)}, 1})
	}
	e := w.s.editCaches()
	e.next.count = 1
	for n := range w.s.tags.at {
		e.tags.put(n, 1)
	}
	e.done()
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		i++
		w.do(&ledgerpb.InvalidateTags{Tenant: "t1", Tags: []string{fmt.Sprint("new", i)}})
	}
}

func TestSnapshotsWithoutCachesAreOfBefore(t *testing.T) {
	w := newWorld(t)
	version := func() (v uint32) {
		edited(t, snapshotOf(t, w.s), func(rs []*ledgerpb.Record, h *ledgerpb.Header) []*ledgerpb.Record { v = h.GetVersion(); return rs })
		return v
	}
	if v := version(); v != 1 {
		t.Errorf("empty it has version %d", v)
	}
	for _, body := range budgetBodies() {
		w.do(body)
	}
	if v := version(); v != 3 {
		t.Errorf("with budgets it has version %d", v)
	}
	w.s.Adopt(&Facts{Index: 100}) // nothing was ever invalidated, here or there
	if v := version(); v != 3 {
		t.Errorf("restored it has version %d", v)
	}
	w.do(&ledgerpb.SetGeneration{Tenant: "acme"})
	if v := version(); v != 4 {
		t.Errorf("with a generation it has version %d", v)
	}
}

func TestCapturedCachesStay(t *testing.T) {
	w := lived(t)
	c := w.s.Capture()
	var before, after bytes.Buffer
	must(t, c.Write(&before))
	for _, body := range cacheBodies() {
		w.do(body)
	}
	must(t, c.Write(&after))
	if !bytes.Equal(before.Bytes(), after.Bytes()) {
		t.Error("what was captured changed")
	}
}

// TestARestoreEndsWhatWasKept: which tags were invalidated since the backup nobody knows any more, and generations may come again.
func TestARestoreEndsWhatWasKept(t *testing.T) {
	for name, c := range map[string]struct{ before, since []any }{
		"tags since":               {nil, []any{&ledgerpb.InvalidateTags{Tenant: "acme", Tags: []string{"a"}}}},
		"a generation since":       {nil, []any{&ledgerpb.SetGeneration{Tenant: "acme"}}},
		"a generation before":      {[]any{&ledgerpb.SetGeneration{Tenant: "acme"}}, nil},
		"both, and both are above": {cacheBodies(), cacheBodies()},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			for _, body := range c.before {
				w.do(body)
			}
			backup := snapshotOf(t, w.s)
			for _, body := range c.since {
				w.do(body)
			}
			now := w.s.Facts()
			stamp := now.Caches.Stamp()
			restored := readState(t, backup)
			want := restored.Facts().Hash
			restored.Adopt(successor(now, restored.Facts()))
			w.s.Replace(restored)
			f := w.s.Facts()
			for _, old := range []uint64{0, stamp, stamp + 1000} { // and what was stamped by what is lost
				if f.Caches.Valid("acme", nil, old) || f.Caches.Valid("acme", []string{"a"}, old) {
					t.Errorf("what was stamped with %d holds", old)
				}
			}
			if !f.Caches.Valid("acme", []string{"a"}, f.Caches.Stamp()) || f.Hash != want {
				t.Error("nothing holds any more, or the hash is not the backup's")
			}
			again := readState(t, snapshotOf(t, w.s)).Facts()
			if again.Caches.Stamp() != f.Caches.Stamp() || again.Caches.Valid("acme", nil, stamp) {
				t.Error("read back, old answers hold")
			}
		})
	}
}

// kept is an answer in some cache, and of the naive model how many of its events it has seen.
type kept struct {
	tenant, surface string
	tags            []string
	stamp           uint64
	seen, restores  int

	caches *Caches // of when it was kept
	tagged []uint64
	floor  uint64
}

// naive remembers everything that was ever invalidated.
type naive struct {
	events   []cacheName
	now      map[cacheName]uint64
	ever     map[cacheName]map[uint64]bool
	restores int
}

// invalid says whether a tag of an answer was invalidated since, or the past was replaced.
func (m *naive) invalid(k *kept) bool {
	if k.restores < m.restores {
		return true
	}
	return slices.ContainsFunc(m.events[k.seen:], func(e cacheName) bool {
		return (e.tenant == "" || e.tenant == k.tenant) && slices.Contains(k.tags, e.name)
	})
}

func (m *naive) generation(n cacheName) uint64 { return max(1, m.now[n]) }

// cacheMachine lives through whatever happens to generations and tags.
type cacheMachine struct {
	t      interface{ Fatalf(string, ...any) }
	pick   func(what string, n int) int // of 0 to n-1
	w      *world
	m      naive
	small  bool // the bounds: tags are forgotten
	kept   []*kept
	twin   *State // as it was before the state was read from a snapshot; nil: none
	backup []byte
	saved  naive
}

func (c *cacheMachine) bound() {
	if c.small { // a snapshot does not have them
		c.w.s.tags.most, c.w.s.tags.mostOwn, c.w.s.tags.mostFloors = 7, 4, 2
	}
}

func (c *cacheMachine) try(body any) *ledgerpb.Result {
	r := c.w.try(body)
	if c.twin == nil {
		return r
	}
	other, err := c.twin.Apply(c.w.index, command(c.w.index, body))
	must(c.w.t, err)
	if a, b := c.w.s.Facts(), c.twin.Facts(); !proto.Equal(r, other) || a.Hash != b.Hash || a.Caches.Stamp() != b.Caches.Stamp() {
		c.t.Fatalf("after %v two replicas differ, one of which was read from a snapshot", body)
	}
	return r
}

func (c *cacheMachine) do(body any) *ledgerpb.Result {
	r := c.try(body)
	must(c.w.t, RefusalOf(r))
	return r
}

func (c *cacheMachine) name(what string) string {
	names := [...]string{"", "acme", "globex", "hooli", "umbrella"}
	return names[c.pick(what, len(names))]
}

func (c *cacheMachine) tags() []string {
	tags := make([]string, 1+c.pick("tags", 4))
	for i := range tags {
		tags[i] = string(rune('a' + c.pick("tag", 10)))
	}
	return tags
}

func (c *cacheMachine) invalidate() {
	tenant, tags := c.name("tenant"), c.tags()
	c.do(&ledgerpb.InvalidateTags{Tenant: tenant, Tags: tags})
	for _, tag := range tags {
		c.m.events = append(c.m.events, cacheName{tenant, tag})
	}
}

func (c *cacheMachine) raise() {
	n := cacheName{c.name("tenant"), c.name("surface")}
	was := c.m.generation(n)
	g := c.do(&ledgerpb.SetGeneration{Tenant: n.tenant, Surface: n.name}).GetGeneration()
	if c.m.ever[n] == nil {
		c.m.ever[n] = map[uint64]bool{1: true}
	}
	if c.m.ever[n][g.GetNow()] || g.GetPrevious() != was {
		c.t.Fatalf("generation %d of %v was in force before, or it was %d and not %d", g.GetNow(), n, was, g.GetPrevious())
	}
	c.m.now[n], c.m.ever[n][g.GetNow()] = g.GetNow(), true
}

func (c *cacheMachine) setBack() {
	n := cacheName{c.name("tenant"), c.name("surface")}
	g := uint64(1 + c.pick("generation", 5))
	r := c.try(&ledgerpb.SetGeneration{Tenant: n.tenant, Surface: n.name, Generation: g})
	if may := g == 1 || c.m.ever[n][g]; may != (r.GetCode() == "") {
		c.t.Fatalf("generation %d of %v, which was in force: %v, gives %v", g, n, may, r)
	} else if may {
		c.m.now[n] = g
	}
}

func (c *cacheMachine) keep() {
	k := &kept{tenant: c.name("tenant"), surface: c.name("surface"), seen: len(c.m.events), restores: c.m.restores}
	if k.tenant == "" {
		k.tenant = "initech"
	}
	if c.pick("tagged", 2) == 1 {
		k.tags = c.tags()
	}
	caches := c.w.s.Facts().Caches
	k.caches, k.stamp, k.floor = caches, caches.Stamp(), caches.Floor(k.tenant)
	for _, tag := range k.tags {
		k.tagged = append(k.tagged, caches.Tagged(k.tenant, tag))
	}
	c.kept = append(c.kept, k)
}

// reread puts what a snapshot holds in the place of the state.
func (c *cacheMachine) reread() {
	before := snapshotOf(c.w.t, c.w.s)
	c.twin = c.w.s
	c.w.s = readState(c.w.t, before)
	c.bound()
	if !bytes.Equal(before, snapshotOf(c.w.t, c.w.s)) {
		c.t.Fatalf("written again it is another snapshot")
	}
}

func (c *cacheMachine) save() {
	c.backup = snapshotOf(c.w.t, c.w.s)
	c.saved = naive{now: maps.Clone(c.m.now), ever: map[cacheName]map[uint64]bool{}}
	for n, ever := range c.m.ever {
		c.saved.ever[n] = maps.Clone(ever)
	}
}

func (c *cacheMachine) restore() {
	if c.backup == nil {
		return
	}
	now, restored := c.w.s.Facts(), readState(c.w.t, c.backup)
	restored.Adopt(successor(now, restored.Facts()))
	if now.Caches.used() || restored.Facts().Caches.used() {
		c.m.restores++
	}
	c.w.s, c.twin = restored, nil
	c.bound()
	c.m.now = maps.Clone(c.saved.now)
	c.m.ever = map[cacheName]map[uint64]bool{}
	for n, ever := range c.saved.ever {
		c.m.ever[n] = maps.Clone(ever)
	}
}

// holds compares what the ledger says of every answer with the model: what the model ended does not
// hold, and where nothing is forgotten all else does.
func (c *cacheMachine) holds() {
	caches := c.w.s.Facts().Caches
	for _, k := range c.kept {
		valid, ended := caches.Valid(k.tenant, k.tags, k.stamp), c.m.invalid(k)
		if valid && ended {
			c.t.Fatalf("%+v holds, and it was invalidated", k)
		}
		if !valid && !ended && (!c.small || len(k.tags) == 0 || caches.Floor(k.tenant) <= k.stamp) {
			c.t.Fatalf("%+v does not hold, and nothing invalidated it", k)
		}
		for i, tag := range k.tags {
			if got := k.caches.Tagged(k.tenant, tag); got != k.tagged[i] || k.caches.Floor(k.tenant) != k.floor {
				c.t.Fatalf("Caches that were read before have changed: %+v", k)
			}
		}
		want := [4]uint64{c.m.generation(cacheName{}), c.m.generation(cacheName{k.tenant, ""}), c.m.generation(cacheName{"", k.surface}), c.m.generation(cacheName{k.tenant, k.surface})}
		if got := caches.Generation(k.tenant, k.surface); got != want {
			c.t.Fatalf("the generations of %s, %s are %v, want %v", k.tenant, k.surface, got, want)
		}
	}
	table := c.w.s.tags
	if _, tags := caches.Len(); tags != len(table.at) || tags != table.all.Len() || tags > table.most {
		c.t.Fatalf("%d tags, %d in the table, of %d", tags, len(table.at), table.most)
	}
	if caches != nil && len(caches.floors) > table.mostFloors {
		c.t.Fatalf("%d floors, of %d", len(caches.floors), table.mostFloors)
	}
	for n, node := range table.at {
		if got, ok := caches.tags.find(n); !ok || got != node.n || table.own[n.tenant].Len() > table.mostOwn {
			c.t.Fatalf("%v is %d, and %d in the table", n, got, node.n)
		}
	}
}

// actions are what may happen; what happens most is there twice.
func (c *cacheMachine) actions() []func() {
	return []func(){c.invalidate, c.invalidate, c.keep, c.keep, c.raise, c.setBack, c.reread, c.save, c.restore}
}

func newCacheMachine(t testing.TB, failing interface{ Fatalf(string, ...any) }, small bool, pick func(string, int) int) *cacheMachine {
	c := &cacheMachine{t: failing, pick: pick, w: newWorld(t), m: naive{now: map[cacheName]uint64{}, ever: map[cacheName]map[uint64]bool{}}, small: small}
	c.bound()
	return c
}

// TestCachesAgainstANaiveModel that forgets nothing: Valid never holds an answer for good whose tag was invalidated after its
// stamp, also where tags were forgotten, snapshots read and backups restored; and no generation comes again by itself.
func TestCachesAgainstANaiveModel(t *testing.T) {
	for _, small := range []bool{false, true} {
		t.Run(fmt.Sprintf("small %v", small), func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				c := newCacheMachine(t, rt, small, func(what string, n int) int { return rapid.IntRange(0, n-1).Draw(rt, what) })
				for range rapid.IntRange(1, 60).Draw(rt, "steps") {
					c.actions()[c.pick("action", len(c.actions()))]()
					c.holds()
				}
			})
		})
	}
}

// FuzzCaches is TestCachesAgainstANaiveModel, steered by bytes.
func FuzzCaches(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 2, 1, 0, 1, 2, 3, 4, 4, 1, 1, 5, 1, 1, 3, 6, 7, 0, 2, 2, 8, 3, 1, 1})
	f.Add(bytes.Repeat([]byte{2, 1, 1, 1, 3, 0, 1, 3, 0, 1, 3, 7}, 8))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := newCacheMachine(t, t, true, func(_ string, n int) int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b) % n
		})
		for range 200 {
			if len(data) == 0 {
				break
			}
			c.actions()[c.pick("action", len(c.actions()))]()
			c.holds()
		}
	})
}

// TestCachesOverRaft: both methods from any node, refusals, and a restore that every node sees.
func TestCachesOverRaft(t *testing.T) {
	inBubble(t, func(c *Config) { c.Servers = nil }, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		c.found()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		follower := c.follower().ledger
		now, previous, index, err := follower.SetGeneration(ctx, "bob", "acme", "docs", 0)
		if now != 2 || previous != 1 || index == 0 || err != nil {
			t.Errorf("raised to %d from %d at %d, %v", now, previous, index, err)
		}
		if got := follower.Facts().Caches.Generation("acme", "docs"); got != [4]uint64{1, 1, 1, 2} {
			t.Errorf("where it was raised it is %v", got)
		}
		if now, previous, _, err = c.leader().ledger.SetGeneration(ctx, "bob", "acme", "docs", 1); now != 1 || previous != 2 || err != nil {
			t.Errorf("set back to %d from %d, %v", now, previous, err)
		}
		var backup bytes.Buffer
		must(t, c.leader().ledger.Backup(ctx, &backup, false))
		stamp := follower.Facts().Caches.Stamp()
		tagged, err := follower.InvalidateTags(ctx, "hook", "acme", []string{"product:42"})
		if err != nil || tagged <= index || follower.Facts().Caches.Valid("acme", []string{"product:42"}, stamp) {
			t.Errorf("invalidated at %d, %v", tagged, err)
		}
		for name, refused := range map[string]func() error{
			"a generation to come": func() error { _, _, _, err := follower.SetGeneration(ctx, "bob", "acme", "docs", 9); return err },
			"no tag":               func() error { _, err := follower.InvalidateTags(ctx, "bob", "acme", nil); return err },
			"a tag in two":         func() error { _, err := follower.InvalidateTags(ctx, "bob", "acme", []string{"a b"}); return err },
		} {
			if r, ok := errors.AsType[*Refusal](refused()); !ok || r.Code != codeInvalid {
				t.Errorf("%s gives %v", name, r)
			}
		}
		c.settled()
		for _, n := range nodes {
			log := n.ledger.Audit(2, AuditFilter{Action: "cache."})
			if len(log) != 2 || log[0].Actor != "hook" || log[0].After != "product:42" || log[1].Actor != "bob" {
				t.Errorf("%s has %+v", n.id, log)
			}
		}
		if _, err := c.leader().ledger.Restore(ctx, &backup, true); err != nil {
			t.Fatal(err)
		}
		for _, n := range nodes {
			c.until("the restore on every node", func() bool {
				caches := n.ledger.Facts().Caches
				return caches.Stamp() > tagSkip && !caches.Valid("acme", nil, stamp) && caches.Generation("acme", "docs")[3] == 1
			})
		}
		if now, _, _, err = follower.SetGeneration(ctx, "bob", "acme", "docs", 0); now != 3 || err != nil {
			t.Errorf("after the restore it is raised to %d, %v", now, err)
		}
		c.settled()
	})
}

// TestALateAnswerOfSetGeneration: who tries again because the answer was lost is told what came of it.
func TestALateAnswerOfSetGeneration(t *testing.T) {
	w := newWorld(t)
	c := command(7, &ledgerpb.SetGeneration{Tenant: "acme"})
	first, err := w.s.Apply(7, c)
	must(t, err)
	again, err := readState(t, snapshotOf(t, w.s)).Apply(8, c)
	must(t, err)
	for _, r := range []*ledgerpb.Result{first, again} {
		if r.GetGeneration().GetNow() != 2 || r.GetGeneration().GetPrevious() != 1 || r.GetIndex() != 7 {
			t.Errorf("it is said to be %v", r)
		}
	}
}
