package affinity

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

func fleetOf(n int) []Candidate {
	cs := make([]Candidate, n)
	for i := range cs {
		cs[i] = Candidate{ID: fmt.Sprint("vllm-", i), Slots: 32}
	}
	return cs
}

// names are the candidates in the order that the router gives.
func names(r *Router, q *Query, cs []Candidate) []string {
	var ids []string
	for _, i := range r.Order(nil, q, cs) {
		ids = append(ids, cs[i].ID)
	}
	return ids
}

// TestOrder: what decides, one after the other.
func TestOrder(t *testing.T) {
	loads := func(loads ...int64) []Candidate {
		cs := fleetOf(len(loads))
		for i := range cs {
			cs[i].Load = loads[i]
		}
		return cs
	}
	q := func(root uint64) *Query { return &Query{Root: root} }
	home := names(New(Config{}), q(1), fleetOf(4)) // of root 1 while nothing is in flight
	of := func(i int) int { return int(home[i][len(home[i])-1] - '0') }
	first, second, third := of(0), of(1), of(2)
	with := func(at int, load int64) []Candidate {
		cs := loads(10, 10, 10, 10)
		cs[at].Load = load
		return cs
	}
	for _, c := range []struct {
		name string
		q    Query
		cs   []Candidate
		want []int
	}{
		{"load alone, equals as they came", Query{}, loads(2, 1, 2, 1), []int{1, 3, 0, 2}},
		{"load beside the size", Query{}, []Candidate{{ID: "a", Slots: 8, Load: 4}, {ID: "b", Slots: 32, Load: 8}}, []int{1, 0}},
		{"unbounded is as large as the largest", Query{}, []Candidate{{ID: "a", Load: 5}, {ID: "b", Slots: 32, Load: 6}, {ID: "c", Slots: 8, Load: 1}}, []int{2, 0, 1}},
		{"home", Query{Root: 1}, loads(10, 10, 10, 10), []int{first, second, third, of(3)}},
		{"home is above the bound", Query{Root: 1}, with(first, 12), []int{second, third, of(3), first}},
		{"a long prompt lets it be", Query{Root: 1, Tokens: 8192}, with(first, 12), []int{first, second, third, of(3)}},
		{"but not for ever", Query{Root: 1, Tokens: math.MaxInt64}, with(first, 40), []int{second, third, of(3), first}},
		{"what is new to who knows of all goes by the least bound", Query{Root: 1, Tokens: 8192, Told: true}, with(first, 12), []int{second, third, of(3), first}},
		{"a session goes before the root", Query{Root: 2, Session: 1}, loads(10, 10, 10, 10), []int{first, second, third, of(3)}},
	} {
		if got := New(Config{}).Order(nil, &c.q, c.cs); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, not %v", c.name, got, c.want)
		}
	}
	if got := New(Config{}).Order([]int{7}, q(1), nil); !slices.Equal(got, []int{7}) {
		t.Errorf("of none: %v", got)
	}
}

// TestOverflow is behind all others, however little it has to do and whatever it remembers.
func TestOverflow(t *testing.T) {
	r := New(Config{})
	cs := fleetOf(4)
	for i := range cs {
		cs[i].Load, cs[i].Overflow = 31, i < 2
	}
	cs[0].Load, cs[1].Load = 0, 1
	q := Query{Root: 1, Chain: []uint64{1}, Told: true}
	r.Placed(&q, cs[1].ID)
	for _, q := range []Query{{}, q, {Root: 5}} {
		if got := r.Order(nil, &q, cs); got[0] < 2 || got[1] < 2 {
			t.Errorf("%+v: %v", q, got)
		}
	}
	if got := r.Order(nil, &q, cs); got[2] != 1 {
		t.Errorf("of the overflow, not what it went to before: %v", got)
	}
}

// TestRemembers: where a conversation went it goes again, up to the loosest bound, and by the longest beginning that is known.
func TestRemembers(t *testing.T) {
	cs := fleetOf(4)
	for i := range cs {
		cs[i].Load = 10
	}
	home := New(Config{}).Order(nil, &Query{Root: 1}, cs)
	away := home[3]
	r := New(Config{})
	r.Placed(&Query{Root: 1, Chain: []uint64{1}}, cs[away].ID)
	next := &Query{Root: 1, Chain: []uint64{1, 2, 3}, Told: true}
	if got := r.Order(nil, next, cs); got[0] != away || !slices.Equal(got[1:], home[:3]) {
		t.Errorf("%v, home %v", got, home)
	}
	cs[away].Load = 20
	if got := r.Order(nil, next, cs); got[0] != away {
		t.Errorf("within twice the mean: %v", got)
	}
	cs[away].Load = 40
	if got := r.Order(nil, next, cs); got[0] != home[0] || got[3] != away {
		t.Errorf("above twice the mean: %v, not %v", got, home)
	}
	cs[away].Load = 10
	r.Placed(next, cs[home[2]].ID)
	if got := r.Order(nil, &Query{Root: 1, Chain: []uint64{1, 2, 3, 4}, Told: true}, cs); got[0] != home[2] {
		t.Errorf("the longer beginning went to %d: %v", home[2], got)
	}
	if got := r.Order(nil, &Query{Root: 1, Chain: []uint64{1, 9}, Told: true}, cs); got[0] != away {
		t.Errorf("the shorter one to %d: %v", away, got)
	}
	if got := r.Order(nil, next, slices.Delete(slices.Clone(cs), home[2], home[2]+1)); len(got) != 3 {
		t.Errorf("without it: %v", got)
	}
	if got := r.Order(nil, &Query{Root: 1, Chain: []uint64{1, 2, 3}}, cs); !slices.Equal(got, home) {
		t.Errorf("who does not know of all goes by what all know: %v, not %v", got, home)
	}
	none := New(Config{Memory: -1})
	none.Placed(&Query{Chain: []uint64{1}}, cs[away].ID)
	if got := none.Order(nil, &Query{Root: 1, Chain: []uint64{1}, Told: true}, cs); !slices.Equal(got, home) {
		t.Errorf("without memory: %v", got)
	}
}

// TestMemoryIsBounded: it forgets what was longest not put, and never what it was just told.
func TestMemoryIsBounded(t *testing.T) {
	var m memory
	m.init(100)
	if n := len(m.sets) * ways; n < 100 || n > 256 {
		t.Fatalf("%d entries", n)
	}
	for i := range uint64(10_000) {
		m.put(i+1, uint32(i))
		if place, ok := m.get(i + 1); !ok || place != uint32(i) {
			t.Fatalf("%d: %d, %t", i, place, ok)
		}
	}
	var kept int
	for i := range uint64(10_000) {
		if _, ok := m.get(i + 1); ok {
			if kept++; i < 9_000 {
				t.Errorf("%d is still there", i)
			}
		}
	}
	if kept < len(m.sets)*ways/2 {
		t.Errorf("%d are kept", kept)
	}
	m.put(7, 1)
	m.put(7, 2)
	if place, _ := m.get(7); place != 2 {
		t.Errorf("%d", place)
	}
	m.put(0, 1)
	if _, ok := m.get(0); ok {
		t.Error("0 is remembered, which is no hash")
	}
}

// TestAgree: routers that know nothing of each other agree, whatever order the candidates stand in.
func TestAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "candidates")
		cs := fleetOf(n)
		for i := range cs {
			cs[i].Load = rapid.Int64Range(0, 40).Draw(t, "load")
			cs[i].Slots = rapid.Int64Range(0, 64).Draw(t, "slots")
			cs[i].Overflow = rapid.Bool().Draw(t, "overflow")
		}
		q := &Query{Root: rapid.Uint64Min(1).Draw(t, "root"), Tokens: rapid.Int64Range(0, 1<<20).Draw(t, "tokens")}
		one := names(New(Config{}), q, cs)
		two := names(New(Config{}), q, rapid.Permutation(cs).Draw(t, "other order"))
		sorted := slices.Sorted(slices.Values(one))
		if len(slices.Compact(sorted)) != n {
			t.Fatalf("%v are not all of %d", one, n)
		}
		above := boundedLoads(cs, q)
		for i := range one {
			if one[i] == two[i] {
				continue
			}
			if !above[one[i]] || !above[two[i]] { // those are by load, where equals stay as they came
				t.Fatalf("%v, %v", one, two)
			}
		}
		for i := 1; i < n; i++ {
			a, b := find(cs, one[i-1]), find(cs, one[i])
			if a.Overflow && !b.Overflow || a.Overflow == b.Overflow && above[a.ID] && !above[b.ID] {
				t.Fatalf("%s before %s: %+v", a.ID, b.ID, cs)
			}
		}
	})
}

func find(cs []Candidate, id string) *Candidate {
	return &cs[slices.IndexFunc(cs, func(c Candidate) bool { return c.ID == id })]
}

// boundedLoads says who is above the bound, by its definition: a request more would be above its share of all, times the bound, rounded up, and above what is as good as idle.
func boundedLoads(cs []Candidate, q *Query) map[string]bool {
	above := map[string]bool{}
	largest := int64(1)
	for _, c := range cs {
		largest = max(largest, c.Slots)
	}
	size := func(c Candidate) float64 {
		if c.Slots == 0 {
			return float64(largest)
		}
		return float64(c.Slots)
	}
	for _, c := range cs {
		total, sizes := 1.0, 0.0
		for _, o := range cs {
			if o.Overflow == c.Overflow {
				total, sizes = total+float64(o.Load), sizes+size(o)
			}
		}
		bound := min(1+float64(q.Tokens)/32768, 2)
		above[c.ID] = float64(c.Load+1) > max(math.Ceil(bound*(total*size(c)/sizes)), idle(c.Slots))
	}
	return above
}

// TestLeavesAndJoins: who leaves gives what it had to all others, and nobody else moves; who comes takes from all.
func TestLeavesAndJoins(t *testing.T) {
	const n, requests = 8, 20_000
	cs := fleetOf(n)
	r := New(Config{Memory: -1})
	var moved int
	gained := map[string]int{}
	for root := range uint64(requests) {
		q := &Query{Root: mix(root) | 1}
		before, after := names(r, q, cs)[0], names(r, q, cs[:n-1])[0]
		switch {
		case before == cs[n-1].ID:
			moved++
			gained[after]++
		case before != after:
			t.Fatalf("root %d moves from %s to %s", root, before, after)
		}
	}
	if share := float64(moved) / requests; math.Abs(share-1.0/n) > 0.012 { // five standard deviations
		t.Errorf("it had %.3f of all", share)
	}
	if len(gained) != n-1 {
		t.Errorf("went to %v", gained)
	}
}

// TestSizes: each gets by its size.
func TestSizes(t *testing.T) {
	const requests = 30_000
	cs := []Candidate{{ID: "small", Slots: 8}, {ID: "large", Slots: 24}, {ID: "unbounded"}}
	r := New(Config{Memory: -1})
	got := map[string]float64{}
	for root := range uint64(requests) {
		got[names(r, &Query{Root: mix(root) | 1}, cs)[0]] += 1.0 / requests
	}
	for id, want := range map[string]float64{"small": 1.0 / 7, "large": 3.0 / 7, "unbounded": 3.0 / 7} {
		if math.Abs(got[id]-want) > 0.015 {
			t.Errorf("%s got %.3f, not %.3f", id, got[id], want)
		}
	}
}

// TestBoundHolds: requests that all begin alike are spread, so that none has more in flight than the bound.
func TestBoundHolds(t *testing.T) {
	for _, told := range []bool{false, true} {
		cs := fleetOf(5)
		r := New(Config{})
		for n := range int64(500) {
			q := &Query{Root: 1, Chain: []uint64{1}, Tokens: n * 100, Told: told}
			on := r.Order(nil, q, cs)[0]
			cs[on].Load++
			r.Placed(q, cs[on].ID)
			if most := max(math.Ceil(2*float64(n+1)/5), idle(cs[on].Slots)); float64(cs[on].Load) > most {
				t.Fatalf("told %t: %d of %d in flight are on one", told, cs[on].Load, n+1)
			}
		}
	}
}

// TestIdleEndpointsKeep: with so little in flight that requests hardly feel each other, they go where their cache is, such as a
// turn right after the one before it; where there is one slot, they don't wait for it.
func TestIdleEndpointsKeep(t *testing.T) {
	for _, c := range []struct{ slots, load, keeps int64 }{{64, 3, 1}, {64, 4, 0}, {0, 1, 1}, {0, 2, 0}, {16, 1, 1}, {1, 1, 0}, {2, 1, 1}, {2, 2, 0}} {
		cs := fleetOf(4)
		for i := range cs {
			cs[i].Slots = c.slots
		}
		for _, told := range []bool{false, true} {
			r, q := New(Config{}), &Query{Root: 7, Chain: []uint64{7}, Told: told}
			home := r.Order(nil, q, cs)[0]
			r.Placed(q, cs[home].ID)
			cs[home].Load = c.load
			if kept := r.Order(nil, q, cs)[0] == home; kept != (c.keeps == 1) {
				t.Errorf("%d of %d slots in use, told %t: kept %t", c.load, c.slots, told, kept)
			}
			cs[home].Load = 0
		}
	}
}

// TestManyCandidates: those beyond the most stay behind.
func TestManyCandidates(t *testing.T) {
	cs := fleetOf(MaxCandidates + 10)
	got := New(Config{}).Order(nil, &Query{Root: 1}, cs)
	for i := range 10 {
		if got[MaxCandidates+i] != MaxCandidates+i {
			t.Errorf("%v", got[MaxCandidates:])
		}
	}
	if !slices.Equal(slices.Sorted(slices.Values(got)), New(Config{}).Order(nil, &Query{}, cs)) {
		t.Errorf("%v are not all", got)
	}
}

func TestSession(t *testing.T) {
	if Session(1, "") != 0 || Session(1, "a") == 0 || Session(1, string([]byte{'a'})) != Session(1, "a") {
		t.Error("a key has one hash, none has 0")
	}
	if Session(1, "a") == Session(2, "a") || Session(1, "a") == Session(1, "b") {
		t.Error("seeds and keys are not told apart")
	}
}

// TestAtOnce: what goroutines do to the memory at once is never worse than a wrong guess.
func TestAtOnce(t *testing.T) {
	r := New(Config{Memory: 8})
	cs := fleetOf(3)
	var crew sync.WaitGroup
	for g := range uint64(4) {
		crew.Go(func() {
			for i := range uint64(2000) {
				q := &Query{Root: i%16 + 1, Chain: []uint64{i%16 + 1, i%7 + g + 1}, Told: true}
				order := r.Order(nil, q, cs)
				if len(order) != 3 || order[0] == order[1] || order[1] == order[2] || order[0] == order[2] {
					t.Errorf("%v", order)
					return
				}
				r.Placed(q, cs[order[0]].ID)
			}
		})
	}
	crew.Wait()
}

// hot is a request of a conversation of ten turns.
func hot() *Query {
	q := &Query{Root: 1, Tokens: 5000, Told: true}
	for i := range uint64(10) {
		q.Chain = append(q.Chain, mix(i))
	}
	return q
}

func TestOrderAllocates(t *testing.T) {
	r, q, cs := New(Config{}), hot(), fleetOf(8)
	order := make([]int, 0, 8)
	if n := testing.AllocsPerRun(100, func() {
		order = r.Order(order[:0], q, cs)
		r.Placed(q, cs[order[0]].ID)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkOrder(b *testing.B) {
	for _, n := range []int{2, 8, 64} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r, q, cs := New(Config{}), hot(), fleetOf(n)
			order := make([]int, 0, n)
			b.ReportAllocs()
			for b.Loop() {
				order = r.Order(order[:0], q, cs)
			}
		})
	}
}

func BenchmarkPlaced(b *testing.B) {
	r, q := New(Config{}), hot()
	b.ReportAllocs()
	for b.Loop() {
		r.Placed(q, "vllm-0")
	}
}
