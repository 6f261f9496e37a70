package threshold

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"

	"pgregory.net/rapid"
)

// world is a surface: how similar questions are to the nearest entry, how many neighbours agree, and how often the answer is
// then right. wrong counts what was served wrongly.
type world struct {
	rng           *rand.Rand
	right         func(s float64, agree int) float64
	entries       []Observations
	served, wrong int
	requests      int
}

// ask asks one question and hands its label back. It tells whether it was served.
func (w *world) ask(p *Policy, b *Budget, pool *Pool) bool {
	agree := w.rng.IntN(8)
	e := Evidence{Similarity: 0.3 + 0.69*w.rng.Float64(), Answer: 1, Pool: pool}
	e.Neighbors = []Neighbor{{Similarity: e.Similarity, Answer: 1}}
	for i := range 7 {
		n := Neighbor{Similarity: e.Similarity - 0.01*float64(i+1), Answer: 1}
		if i >= agree {
			n.Answer = 2
		}
		e.Neighbors = append(e.Neighbors, n)
	}
	own := &w.entries[w.rng.IntN(len(w.entries))]
	e.Own = own
	d := p.Decide(&e, b, w.rng)
	same := w.rng.Float64() < w.right(e.Similarity, agree)
	w.requests++
	b.Count(d.Action)
	pool.Seen(d.Cell)
	if d.Action == Serve {
		w.served++
		if !same {
			w.wrong++
		}
		return true
	}
	if d.Action == Audit {
		b.Label(same)
	}
	own.Add(e.Similarity, d.Cell, same)
	pool.Add(d.Cell, same)
	return false
}

// live asks n questions from the beginning.
func (w *world) live(p *Policy, n int) (*Budget, *Pool) {
	b, pool := NewBudget(p), NewPool()
	for range n {
		w.ask(p, b, pool)
	}
	return b, pool
}

func newWorld(seed uint64, right func(float64, int) float64) *world {
	return &world{rng: rand.New(rand.NewPCG(seed, 11)), right: right, entries: make([]Observations, 200)}
}

// smooth is a world that the model can tell, crooked one that it cannot: it has a floor of wrong answers wherever one looks.
func smooth(s float64, agree int) float64 { return logistic(-8 + 10*s + 0.8*float64(agree)) }

func crooked(s float64, agree int) float64 {
	return 0.985 * logistic(20*(s-0.7)) * (0.3 + 0.7*float64(agree)/7)
}

// TestLearnedKeepsHitBound: over 20 worlds of either kind the share of wrong hits is below the bound, and hardly a world is
// surely above it; in the smooth ones there are many hits.
func TestLearnedKeepsHitBound(t *testing.T) {
	statistics(t)
	for _, c := range []struct {
		name          string
		right         func(float64, int) float64
		bound, served float64 // at least so many of all
	}{
		{"smooth", smooth, 0.02, 0.1},
		{"smooth", smooth, 0.05, 0.25},
		{"smooth", smooth, 0.1, 0.35},
		{"crooked", crooked, 0.02, 0},
		{"crooked", crooked, 0.05, 0},
		{"crooked", crooked, 0.1, 0.01},
	} {
		var exceeded, served, requests, wrong int
		const seeds = 20
		for seed := range uint64(seeds) {
			w := newWorld(seed, c.right)
			w.live(&Policy{Mode: Learned, HitErrorBound: c.bound, ErrorBound: 1, Audit: 0.05}, 3000)
			served, requests, wrong = served+w.served, requests+w.requests, wrong+w.wrong
			if LowerBound(int64(w.wrong), int64(w.served), 0.99) > c.bound {
				exceeded++
			}
		}
		share, e := float64(served)/float64(requests), float64(wrong)/float64(max(served, 1))
		t.Logf("%s, bound %g: %.3f served, %.4f of it wrong, surely above the bound in %d of %d worlds (seeds 0–19)", c.name, c.bound, share, e, exceeded, seeds)
		if e > c.bound || exceeded > 1 || share < c.served {
			t.Errorf("%s, bound %g: that is not as promised", c.name, c.bound)
		}
	}
}

// TestLearnedKeepsRequestBound: where the bound of all requests is the nearer one, it is kept.
func TestLearnedKeepsRequestBound(t *testing.T) {
	statistics(t)
	wrong, requests := 0, 0
	for seed := range uint64(20) {
		w := newWorld(seed, smooth)
		w.live(&Policy{Mode: Learned, HitErrorBound: 0.5, ErrorBound: 0.01, Audit: 0.05}, 3000)
		wrong, requests = wrong+w.wrong, requests+w.requests
		if w.served == 0 || LowerBound(int64(w.wrong), int64(w.requests), 0.99) > 0.01 {
			t.Errorf("seed %d: %d served, %d of %d requests wrong", seed, w.served, w.wrong, w.requests)
		}
	}
	if e := float64(wrong) / float64(requests); e > 0.01 {
		t.Errorf("%g of all requests wrong", e)
	}
}

// TestNothingIsServedUnlearned: neither with an empty pool, nor without one, nor in a shadow that has learned.
func TestNothingIsServedUnlearned(t *testing.T) {
	w := newWorld(1, func(float64, int) float64 { return 1 })
	learned, pool := Policy{Mode: Learned, HitErrorBound: 0.1, ErrorBound: 1}, NewPool()
	b := NewBudget(&learned)
	for i := range minLabels - 1 {
		if w.ask(&learned, b, pool) {
			t.Fatalf("served after %d labels", i)
		}
	}
	if w.ask(&learned, b, nil) {
		t.Error("served without a pool")
	}
	if d := learned.Decide(&Evidence{Similarity: 1}, b, w.rng); d.Threshold != 1 || d.Confidence != 0 {
		t.Errorf("without a pool: %+v", d)
	}
	for range 500 {
		w.ask(&learned, b, pool)
	}
	if w.served == 0 {
		t.Fatal("nothing is ever served: the rest shows nothing")
	}
	shadow, before := learned, b.Snapshot().Audited
	shadow.Mode = Shadow
	for range 500 {
		if w.ask(&shadow, b, pool) {
			t.Fatal("a shadow served")
		}
	}
	if b.Snapshot().Audited == before {
		t.Error("a shadow counts no would-be hits")
	}
	for _, p := range []Policy{{}, {Mode: Learned}} {
		for _, pool := range []*Pool{pool, NewPool()} {
			for range 100 {
				if w.ask(&p, NewBudget(&p), pool) {
					t.Fatalf("%+v serves", p)
				}
			}
		}
	}
}

// TestCut: what is served needs forty labels above the cut, more under a strict bound, and however clean the labels are, the
// model is not believed beyond one wrong in a hundred.
func TestCut(t *testing.T) {
	top, bottom := cellOf(0.95, 6), cellOf(0.4, -2)
	for _, c := range []struct {
		clean uint32
		bound float64
		cut   bool
	}{{39, 0.1, false}, {40, 0.1, true}, {45, 0.02, false}, {55, 0.02, true}, {150, 0.01, false}, {250, 0.01, true}, {400, 0.005, false}, {700, 0.005, true}} {
		k := sketch{top: {c.clean, c.clean, c.clean}, bottom: {500, 500, 0}}
		if m := fitModel(k, c.bound, 1); math.IsInf(m.cut, 1) == c.cut || c.cut && m.upper > c.bound {
			t.Errorf("%d right labels, bound %g: %+v", c.clean, c.bound, m)
		}
	}
}

// TestBadEntry: where an entry was wrong over and over, it is not served, though the surface would have it; one that was
// right is served where the surface would not.
func TestBadEntry(t *testing.T) {
	w := newWorld(3, smooth)
	p := &Policy{Mode: Learned, HitErrorBound: 0.1, ErrorBound: 1}
	b, pool := w.live(p, 3000)
	m := pool.current(p.HitErrorBound, p.ErrorBound)
	at := func(above float64) *Evidence { // a candidate beside one of another answer, whose logit is so much above the cut
		e := &Evidence{Answer: 1, Pool: pool}
		for s := floor; s < 1; s += 1e-4 {
			e.Similarity, e.Neighbors = s, []Neighbor{{Similarity: s, Answer: 1}, {Similarity: s - 0.02, Answer: 2}}
			if m.weights.logit(s, vote(e)) >= m.cut+above {
				return e
			}
		}
		t.Fatal("no similarity suffices")
		return nil
	}
	good, bad := at(0.5), at(-0.5)
	if d := p.Decide(good, b, w.rng); d.Action != Serve || d.Confidence < d.Threshold || d.Threshold <= 0 || d.Confidence >= 1 {
		t.Fatalf("%+v", d)
	}
	if d := p.Decide(bad, b, w.rng); d.Action != Explore || d.Confidence >= d.Threshold {
		t.Fatalf("%+v", d)
	}
	var wrong, right Observations
	for range 3 {
		wrong.Add(good.Similarity, cellOf(good.Similarity, vote(good)), false)
	}
	for range 60 {
		right.Add(bad.Similarity, cellOf(bad.Similarity, vote(bad)), true)
	}
	good.Own, bad.Own = &wrong, &right
	if d := p.Decide(good, b, w.rng); d.Action != Explore {
		t.Errorf("wrong three times, and: %+v", d)
	}
	if d := p.Decide(bad, b, w.rng); d.Action != Serve {
		t.Errorf("right sixty times, and: %+v", d)
	}
}

// TestPoolsAddUp: what several nodes saw makes the same model as if one had seen it all.
func TestPoolsAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := []*Pool{NewPool(), NewPool(), NewPool()}
		one := NewPool()
		for range rapid.IntRange(0, 300).Draw(t, "labels") {
			c, same := Cell(rapid.Uint32Range(0, uint32(cells)+5).Draw(t, "cell")), rapid.Bool().Draw(t, "same")
			n := nodes[rapid.IntRange(0, 2).Draw(t, "node")]
			n.Seen(c)
			n.Add(c, same)
			one.Seen(c)
			one.Add(c, same)
		}
		for i := range 2 {
			if err := nodes[2].Hear(fmt.Sprint(i), nodes[i].Own()); err != nil {
				t.Fatal(err)
			}
		}
		got, want := nodes[2].current(0.3, 1), one.current(0.3, 1)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v, not %+v", got, want)
		}
		nodes[2].Forget("0")
		nodes[2].Forget("1")
		if m := nodes[2].current(0.3, 1); m.labels != nodes[2].labels {
			t.Fatalf("%d labels after the others were forgotten, not %d", m.labels, nodes[2].labels)
		}
	})
}

// TestPoolForgets: a pool that saw much counts what is new for more, and stays a pool.
func TestPoolForgets(t *testing.T) {
	p, c := NewPool(), cellOf(0.9, 2)
	for i := range 3 * maxLabels {
		p.Seen(c)
		p.Add(c, i < maxLabels)
	}
	n := p.own[c]
	if p.labels > maxLabels || int(n.labelled) != p.labels || float64(n.same) > 0.2*float64(n.labelled) {
		t.Errorf("%d labels, %+v", p.labels, n)
	}
	for i := range MaxPeers + 1 {
		if err := p.Hear(fmt.Sprint(i), p.Own()); (err != nil) != (i == MaxPeers) {
			t.Errorf("peer %d: %v", i, err)
		}
	}
}

// TestVote: neighbours of the same answer speak for it, others against, near ones louder; order and the ninth do not count.
func TestVote(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := Evidence{Similarity: rapid.Float64Range(-1, 1).Draw(t, "s"), Answer: 1}
		e.Neighbors = []Neighbor{{Similarity: e.Similarity, Answer: 1}}
		for range rapid.IntRange(0, 6).Draw(t, "n") {
			e.Neighbors = append(e.Neighbors, Neighbor{rapid.Float64Range(-1, e.Similarity).Draw(t, "sn"), rapid.Uint64Range(1, 3).Draw(t, "a"), rapid.Bool().Draw(t, "r")})
		}
		base := vote(&e)
		with := func(n Neighbor) float64 {
			f := e
			f.Neighbors = append(append([]Neighbor(nil), e.Neighbors...), n)
			return vote(&f)
		}
		near, far := max(-1, e.Similarity-0.05), max(-1, e.Similarity-0.3)
		if !(with(Neighbor{near, 1, false}) >= base && with(Neighbor{near, 2, false}) <= base) {
			t.Fatalf("%g, with one more of the same %g, of another %g", base, with(Neighbor{near, 1, false}), with(Neighbor{near, 2, false}))
		}
		if with(Neighbor{near, 2, false}) > with(Neighbor{far, 2, false}) {
			t.Fatal("one that is farther away speaks louder")
		}
		if loud, low := with(Neighbor{near, 2, false}), with(Neighbor{near, 2, true}); low < loud || low > base {
			t.Fatalf("one that is refused speaks louder, or for it: %g, %g, %g", base, low, loud)
		}
		if e.Similarity > -0.9 && with(Neighbor{near, 2, true}) <= with(Neighbor{near, 2, false}) && len(e.Neighbors) < 4 {
			t.Fatal("one that is refused is as loud as one that is not")
		}
		alone := e
		alone.Neighbors = alone.Neighbors[1:]
		if math.Abs(vote(&alone)-base) > 1e-9 && len(e.Neighbors) == 1 {
			t.Fatal("a candidate that is not listed counts for less")
		}
		if c := cellOf(e.Similarity, base); c >= cells {
			t.Fatalf("cell %d", c)
		}
	})
}

// TestDecideAllocates nothing and looks at no more than eight neighbours.
func TestDecideAllocates(t *testing.T) {
	w := newWorld(5, smooth)
	p := &Policy{Mode: Learned, HitErrorBound: 0.05, ErrorBound: 1, Audit: 0.05}
	b, pool := NewBudget(p), NewPool()
	for range 2000 {
		w.ask(p, b, pool)
	}
	e := &Evidence{Similarity: 0.9, Answer: 1, Pool: pool, Own: &w.entries[0], Neighbors: make([]Neighbor, 50)}
	if n := testing.AllocsPerRun(100, func() { p.Decide(e, b, w.rng) }); n > 0 {
		t.Errorf("%g allocations", n)
	}
}

// TestStatic: it is a comparison; every mode has a name for what it does.
func TestStatic(t *testing.T) {
	p := &Policy{Mode: Static, Threshold: 0.85, HitErrorBound: 0.5, ErrorBound: 0.5}
	b, rng := NewBudget(p), rand.New(rand.NewPCG(1, 1))
	for _, c := range []struct {
		s    float64
		want Action
	}{{0.85, Serve}, {0.8499, Miss}, {1, Serve}, {-1, Miss}, {math.NaN(), Miss}} {
		if d := p.Decide(&Evidence{Similarity: c.s}, b, rng); d.Action != c.want || d.Threshold != 0.85 || d.Why == "" {
			t.Errorf("%g: %+v", c.s, d)
		}
	}
	p.Audit = 1
	if d := p.Decide(&Evidence{Similarity: 0.9}, b, rng); d.Action != Audit || !d.WouldHit() || d.Action.String() != "audit" {
		t.Errorf("all are to be checked, and %+v", d)
	}
	p.Audit = 0
	if d := p.Decide(&Evidence{Similarity: 0.9}, nil, rng); d.Action != Audit {
		t.Errorf("without a budget: %+v", d)
	}
	if !p.Inserts(0.9, false, false) || !p.Inserts(0.9, false, true) || p.Inserts(0.9, true, true) {
		t.Error("static: what is inserted")
	}
	p.Mode = Learned
	if !p.Inserts(0.9, true, true) || p.Inserts(0.99, true, true) || !p.Inserts(0.99, false, true) {
		t.Error("learned: what is inserted")
	}
}

func TestValidate(t *testing.T) {
	ok := Policy{Mode: Static, Threshold: 0.9, ErrorBound: 0.01, HitErrorBound: 0.02, Audit: 0.05}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
	for i, spoil := range []func(*Policy){
		func(p *Policy) { p.Mode = 17 },
		func(p *Policy) { p.Threshold = 0 },
		func(p *Policy) { p.Threshold = 1.1 },
		func(p *Policy) { p.ErrorBound = math.NaN() },
		func(p *Policy) { p.HitErrorBound = -0.1 },
		func(p *Policy) { p.Audit = 2 },
	} {
		p := ok
		if spoil(&p); p.Validate() == nil {
			t.Errorf("%d: %+v is taken", i, p)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	w := newWorld(5, smooth)
	p := &Policy{Mode: Learned, HitErrorBound: 0.05, ErrorBound: 1, Audit: 0.05}
	budget, pool := w.live(p, 3000)
	e := &Evidence{Similarity: 0.9, Answer: 1, Pool: pool, Own: &w.entries[0], Neighbors: make([]Neighbor, 8)}
	for b.Loop() {
		p.Decide(e, budget, w.rng)
	}
}

func BenchmarkFitModel(b *testing.B) {
	w := newWorld(5, smooth)
	p := &Policy{Mode: Learned, HitErrorBound: 0.05, ErrorBound: 1, Audit: 0.05}
	_, pool := w.live(p, 3000)
	b.ReportMetric(float64(len(pool.own)), "cells")
	for b.Loop() {
		fitModel(pool.own, 0.05, 1)
	}
}
