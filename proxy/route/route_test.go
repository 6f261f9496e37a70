package route

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func mustNew(t testing.TB, rules ...Rule) *Table {
	t.Helper()
	table, err := New(rules)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// TestMatches: each condition by itself, at its edges.
func TestMatches(t *testing.T) {
	header := func(name string) string { return map[string]string{"X-Team": "blue"}[name] }
	q := Query{Model: "big", Surface: "docs", Tenant: "acme", Class: Background, Tier: 2, Input: 100, Output: 50, Header: header}
	for _, c := range []struct {
		name  string
		match Match
		want  bool
	}{
		{"nothing asked", Match{}, true},
		{"model", Match{Models: []string{"huge", "big"}}, true},
		{"another model", Match{Models: []string{"huge"}}, false},
		{"surface", Match{Surfaces: []string{"docs"}}, true},
		{"another surface", Match{Surfaces: []string{""}}, false},
		{"tenant", Match{Tenants: []string{"acme"}}, true},
		{"another tenant", Match{Tenants: []string{"ACME"}}, false},
		{"class", Match{Classes: []Class{BestEffort, Background}}, true},
		{"another class", Match{Classes: []Class{Interactive}}, false},
		{"lower tier", Match{BelowTier: new(3)}, true},
		{"same tier", Match{BelowTier: new(2)}, false},
		{"input below", Match{Input: Range{Below: new(int64(101))}}, true},
		{"input at", Match{Input: Range{Below: new(int64(100))}}, false},
		{"input above", Match{Input: Range{Above: new(int64(99))}}, true},
		{"input at the lower end", Match{Input: Range{Above: new(int64(100))}}, false},
		{"input between", Match{Input: Range{Below: new(int64(101)), Above: new(int64(99))}}, true},
		{"output below", Match{Output: Range{Below: new(int64(51))}}, true},
		{"output above", Match{Output: Range{Above: new(int64(50))}}, false},
		{"nothing is below 0", Match{Input: Range{Below: new(int64(0))}}, false},
		{"above 0", Match{Output: Range{Above: new(int64(0))}}, true},
		{"header", Match{Headers: []Header{{"X-Team", "blue"}}}, true},
		{"another value", Match{Headers: []Header{{"X-Team", "Blue"}}}, false},
		{"two headers", Match{Headers: []Header{{"X-Team", "blue"}, {"X-Other", "x"}}}, false},
		{"all of it", Match{Models: []string{"big"}, Classes: []Class{Interactive}}, false},
	} {
		table := mustNew(t, Rule{Name: "r", Match: c.match, To: []Arm{{Model: "small"}}})
		if got, ok := table.Choose(&q); ok != c.want || ok && (got.Model != "small" || got.Rule != "r") {
			t.Errorf("%s: %+v, %t", c.name, got, ok)
		}
	}
	empty := Query{}
	table := mustNew(t, Rule{Name: "r", Match: Match{Headers: []Header{{"X-Team", "blue"}}}, To: []Arm{{Model: "small"}}})
	if _, ok := table.Choose(&empty); ok {
		t.Error("matches without headers")
	}
	zero := mustNew(t, Rule{Name: "r", Match: Match{Input: Range{Below: new(int64(10))}, Output: Range{Below: new(int64(1))}}, To: []Arm{{Model: "small"}}})
	if _, ok := zero.Choose(&empty); !ok {
		t.Error("a request of no tokens is not below a bound")
	}
}

// TestFirstMatchDecides, and once: what a rule names is not routed again. Where no arm can hold the request, the next rule decides.
func TestFirstMatchDecides(t *testing.T) {
	table := mustNew(
		t,
		Rule{Name: "cheap", Match: Match{Models: []string{"big"}, Input: Range{Below: new(int64(1000))}}, To: []Arm{{Model: "small", Context: 600}}},
		Rule{Name: "again", Match: Match{Models: []string{"small"}}, To: []Arm{{Model: "tiny"}}},
		Rule{Name: "rest", To: []Arm{{Model: "huge"}}},
	)
	for _, c := range []struct {
		q           Query
		rule, model string
	}{
		{Query{Model: "big", Input: 100, Output: 500}, "cheap", "small"},
		{Query{Model: "big", Input: 101, Output: 500}, "rest", "huge"},
		{Query{Model: "big", Input: 700}, "rest", "huge"},
		{Query{Model: "big", Input: 100, Output: math.MaxInt64}, "rest", "huge"},
		{Query{Model: "small"}, "again", "tiny"},
		{Query{Model: "big", Input: 1000}, "rest", "huge"},
	} {
		if got, ok := table.Choose(&c.q); !ok || got.Rule != c.rule || got.Model != c.model {
			t.Errorf("%+v: %+v, %t", c.q, got, ok)
		}
	}
	for _, none := range []*Table{nil, {}, mustNew(t)} {
		if _, ok := none.Choose(&Query{Model: "big"}); ok {
			t.Error("a table without rules chooses")
		}
	}
}

// TestContextOfArms: only those that can hold the request get any.
func TestContextOfArms(t *testing.T) {
	table := mustNew(t, Rule{Name: "r", Sticky: ByRequest, To: []Arm{{Model: "short", Weight: 1000, Context: 100}, {Model: "long", Weight: 1, Context: 1000}}})
	for draw := range uint64(200) {
		if got, ok := table.Choose(&Query{Draw: draw, Input: 101}); !ok || got.Model != "long" {
			t.Fatalf("%+v, %t", got, ok)
		}
	}
}

// TestWeights: arms get their share, by each way to stick.
func TestWeights(t *testing.T) {
	const n = 40_000
	for _, sticky := range []Sticky{ByUser, ByKey, ByRequest} {
		table := mustNew(t, Rule{Name: "canary", Sticky: sticky, To: []Arm{{Model: "old", Weight: 90}, {Model: "new", Weight: 10}, {Model: "off", Weight: 0}}})
		got := map[string]int{}
		for i := range n {
			c, _ := table.Choose(&Query{User: fmt.Sprint("u", i), Key: fmt.Sprint("k", i), Draw: mix(uint64(i)), Tenant: "t"})
			got[c.Model]++
		}
		if share := float64(got["new"]) / n; math.Abs(share-0.1) > 0.006 || got["off"] > 0 { // four standard deviations
			t.Errorf("by %s: %v", sticky, got)
		}
	}
	equal := mustNew(t, Rule{Name: "r", Sticky: ByRequest, To: []Arm{{Model: "a"}, {Model: "b"}}})
	got := map[string]int{}
	for i := range n {
		c, _ := equal.Choose(&Query{Draw: uint64(i)})
		got[c.Model]++
	}
	if share := float64(got["a"]) / n; math.Abs(share-0.5) > 0.01 {
		t.Errorf("arms without weights: %v", got)
	}
}

// TestSticks: what sticks has one arm, whatever else the request is; another tenant's user of that name is another, and rules draw apart.
func TestSticks(t *testing.T) {
	arms := []Arm{{Model: "a", Weight: 1}, {Model: "b", Weight: 1}}
	choose := func(rule string, sticky Sticky, q Query) string {
		c, _ := mustNew(t, Rule{Name: rule, Sticky: sticky, To: arms}).Choose(&q)
		return c.Model
	}
	var tenants, rules, alone int
	for i := range 64 {
		user, key := fmt.Sprint("u", i), fmt.Sprint("k", i)
		first := choose("r", ByUser, Query{User: user, Tenant: "t", Key: key, Draw: 1})
		if choose("r", ByUser, Query{User: user, Tenant: "t", Key: "other", Draw: uint64(i), Input: 7, Class: BestEffort}) != first {
			t.Errorf("%s moves", user)
		}
		if choose("r", ByKey, Query{User: user, Key: key}) != choose("r", ByKey, Query{User: "other", Key: key, Draw: 9}) {
			t.Errorf("%s moves", key)
		}
		if choose("r", ByUser, Query{User: user, Tenant: "other"}) != first {
			tenants++
		}
		if choose("another", ByUser, Query{User: user, Tenant: "t"}) != first {
			rules++
		}
		if choose("r", ByUser, Query{Key: "one", Draw: uint64(i)}) == "a" { // nobody is named
			alone++
		}
	}
	for what, n := range map[string]int{"tenants": tenants, "rules": rules, "nobody": alone} {
		if n < 12 || n > 52 { // five standard deviations
			t.Errorf("%s: %d of 64 differ, about half should", what, n)
		}
	}
}

// TestChangesMoveWhatTheyMust: after any change of weights whoever moves goes to an arm whose share grew, from one whose share fell.
func TestChangesMoveWhatTheyMust(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 5).Draw(t, "arms")
		weights := func(name string) []int64 {
			w := rapid.SliceOfN(rapid.Int64Range(0, 10), n, n).Draw(t, name)
			w[0]++
			return w
		}
		before, after := weights("before"), weights("after")
		of := func(w []int64) *Table {
			r := Rule{Name: "r"}
			for i := range w {
				r.To = append(r.To, Arm{Model: fmt.Sprint(i), Weight: w[i]})
			}
			table, err := New([]Rule{r})
			if err != nil {
				t.Fatal(err)
			}
			return table
		}
		a, b := of(before), of(after)
		index := func(c Choice) int { return int(c.Model[0] - '0') }
		for i := range 200 {
			q := Query{User: fmt.Sprint(i)}
			x, _ := a.Choose(&q)
			y, _ := b.Choose(&q)
			// From i to j only if j's weight grew beside i's.
			if i, j := index(x), index(y); i != j && after[j]*before[i] <= after[i]*before[j] {
				t.Fatalf("user moves from %d to %d: weights %v, then %v", i, j, before, after)
			}
		}
	})
}

// TestPrecise: what a user gets never changes between releases; else every canary would be drawn anew.
func TestPrecise(t *testing.T) {
	table := mustNew(t, Rule{Name: "canary", To: []Arm{{Model: "a", Weight: 1}, {Model: "b", Weight: 1}}})
	var got strings.Builder
	for i := range 32 {
		c, _ := table.Choose(&Query{User: fmt.Sprint("user-", i), Tenant: "acme"})
		got.WriteString(c.Model)
	}
	if want := "babbbbaababbbbbbbbbbbbbababaaabb"; got.String() != want {
		t.Errorf("%s, not %s", got.String(), want)
	}
}

func TestWhy(t *testing.T) {
	table := mustNew(
		t,
		Rule{Name: "cheap", Match: Match{
			Models: []string{"big", "huge"}, Surfaces: []string{"docs"}, Tenants: []string{"acme"}, Classes: []Class{Background, BestEffort}, BelowTier: new(2),
			Input: Range{Below: new(int64(2000)), Above: new(int64(10))}, Output: Range{Below: new(int64(100))}, Headers: []Header{{"X-Team", "blue"}},
		}, To: []Arm{{Model: "small", Weight: 3}}},
		Rule{Name: "canary", Sticky: ByKey, To: []Arm{{Model: "a", Weight: 1}, {Model: "b", Weight: 0}}},
	)
	header := func(string) string { return "blue" }
	c, _ := table.Choose(&Query{Model: "big", Surface: "docs", Tenant: "acme", Class: BestEffort, Input: 11, Header: header})
	if want := "model big or huge, surface docs, tenant acme, class background or best_effort, tier below 2, input above 10 tokens, " +
		"input below 2000 tokens, output below 100 tokens, X-Team: blue → small"; c.Why != want {
		t.Errorf("%s", c.Why)
	}
	c, _ = table.Choose(&Query{})
	if want := "every request → a (weight 1 of 1, by key)"; c.Why != want {
		t.Errorf("%s", c.Why)
	}
	if Class(9).String() != "class 9" || Sticky(9).String() != "sticky 9" {
		t.Error("words of what is not known")
	}
}

func TestNewRefuses(t *testing.T) {
	arm := []Arm{{Model: "m"}}
	for _, c := range []struct {
		words string
		rules []Rule
	}{
		{"routes: at most 256 rules, not 257", slices.Repeat([]Rule{{Name: "r", To: arm}}, 257)},
		{"routes[1].name: \"r\" is taken", []Rule{{Name: "r", To: arm}, {Name: "r", To: arm}}},
		{"routes[0].to: rule \"r\" names no model", []Rule{{Name: "r"}}},
		{"routes[0].to: at most 16 models, not 17", []Rule{{Name: "r", To: slices.Repeat(arm, 17)}}},
		{"routes[0].to[0].model: missing", []Rule{{Name: "r", To: []Arm{{}}}}},
		{"routes[0].to[1].model: \"m\" occurs twice", []Rule{{Name: "r", To: []Arm{{Model: "m"}, {Model: "m"}}}}},
		{"routes[0].to[0].weight: -1", []Rule{{Name: "r", To: []Arm{{Model: "m", Weight: -1}}}}},
		{"routes[0].match: a list of 1025", []Rule{{Name: "r", Match: Match{Models: make([]string, 1025)}, To: arm}}},
	} {
		if _, err := New(c.rules); err == nil || !strings.HasPrefix(err.Error(), c.words) {
			t.Errorf("%v, not %s", err, c.words)
		}
	}
}

// table256 matches a query with its last rule only.
func table256(t testing.TB) (*Table, *Query) {
	rules := make([]Rule, MaxRules)
	for i := range rules {
		rules[i] = Rule{Name: fmt.Sprint(i), Match: Match{Models: []string{"other", fmt.Sprint("m", i)}}, To: []Arm{{Model: "a", Weight: 1}, {Model: "b", Weight: 9}}}
	}
	return mustNew(t, rules...), &Query{Model: "m255", User: "user", Tenant: "acme", Input: 100}
}

func TestChooseAllocates(t *testing.T) {
	table, q := table256(t)
	if n := testing.AllocsPerRun(100, func() { table.Choose(q) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkChoose(b *testing.B) {
	table, q := table256(b)
	few := mustNew(b, table.rules[255].Rule)
	b.Run("1", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			few.Choose(q)
		}
	})
	b.Run("256", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			table.Choose(q)
		}
	})
}
