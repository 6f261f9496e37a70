package threshold

import (
	"errors"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
)

func bounded(hit, request float64) *Policy {
	return &Policy{Mode: Learned, HitErrorBound: hit, ErrorBound: request, Audit: 0.05}
}

// statistics skips what counts for long and on one goroutine, where only races are looked for: it takes ten times as long.
func statistics(t *testing.T) {
	if underRace {
		t.Skip("a long count on one goroutine, which cannot race")
	}
}

// play asks n questions, of which hits in a share, and of those wrong in a share; a twentieth of them is audited while
// hits are allowed, all otherwise. It ends early at the first trip if stop is set, and tells after how many.
func play(b *Budget, rng *rand.Rand, n int, hits, wrong float64, stop bool) int {
	for i := range n {
		switch {
		case rng.Float64() >= hits:
			b.Count(Miss)
		case !b.Allowed() || rng.Float64() < 0.05:
			b.Count(Audit)
			b.Label(rng.Float64() >= wrong)
		default:
			b.Count(Serve)
		}
		if stop && !b.Allowed() {
			return i
		}
	}
	return n
}

// TestBudgetTrips: an error per hit of three times the bound and more is found out, always.
func TestBudgetTrips(t *testing.T) {
	statistics(t)
	for _, c := range []struct {
		bound, wrong float64
		within       int // would-be hits, most of all seeds
	}{{0.02, 0.06, 40_000}, {0.02, 0.2, 4_000}, {0.05, 0.15, 16_000}, {0.05, 1, 400}, {0.1, 0.3, 8_000}, {0, 0.01, 20_000}} {
		worst := 0
		for seed := range uint64(200) {
			n := play(NewBudget(bounded(c.bound, 1)), rand.New(rand.NewPCG(seed, 1)), c.within, 1, c.wrong, true)
			if n == c.within {
				t.Errorf("seed %d: bound %g: an error of %g went unnoticed over %d hits", seed, c.bound, c.wrong, n)
			}
			worst = max(worst, n)
		}
		t.Logf("bound %g, error %g: found out after %d would-be hits at the latest (seeds 0–199)", c.bound, c.wrong, worst)
	}
}

// TestBudgetBears: half the bound trips hardly ever over ten times a million would-be hits, and the bound itself at most in one
// block of a thousand.
func TestBudgetBears(t *testing.T) {
	statistics(t)
	for _, c := range []struct {
		bound, wrong float64
		trips        int // at most, over all seeds
	}{{0.02, 0.01, 0}, {0.05, 0.025, 0}, {0.1, 0.03, 0}, {0.02, 0.02, 4}} {
		trips, blocks := 0, 0
		for seed := range uint64(10) {
			const audits = 50_000 // of a million hits
			b, rng := NewBudget(bounded(c.bound, 1)), rand.New(rand.NewPCG(seed, 2))
			for range audits {
				b.Count(Audit)
				b.Label(rng.Float64() >= c.wrong)
				if !b.Allowed() {
					trips++
					b.change(b.own.state+1, tally{})
				}
			}
			blocks += audits / blockAudits
		}
		t.Logf("bound %g, error %g: %d trips in %d blocks (seeds 0–9)", c.bound, c.wrong, trips, blocks)
		if trips > c.trips {
			t.Errorf("bound %g, error %g: %d trips, more than %d", c.bound, c.wrong, trips, c.trips)
		}
	}
}

// TestBudgetPerRequest: one wrong hit in ten is a wrong answer in fifty while a fifth of requests are hits.
func TestBudgetPerRequest(t *testing.T) {
	statistics(t)
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		if n := play(NewBudget(bounded(1, 0.005)), rng, 200_000, 0.2, 0.1, true); n == 200_000 {
			t.Errorf("seed %d: .02 of requests are answered wrongly, .005 may, and nobody noticed", seed)
		}
		b := NewBudget(bounded(1, 0.04))
		if n := play(b, rng, 200_000, 0.2, 0.1, true); n < 200_000 {
			t.Errorf("seed %d: .02 of requests are answered wrongly, .04 may, and it tripped after %d: %+v", seed, n, b.Snapshot())
		}
	}
}

// TestBudgetRecovers: after a trip hits stay away while the error is what it was, and come back once it is half the
// bound; a bound that is just kept does not suffice.
func TestBudgetRecovers(t *testing.T) {
	for seed := range uint64(20) {
		b, rng := NewBudget(bounded(0.05, 1)), rand.New(rand.NewPCG(seed, 4))
		if play(b, rng, 100_000, 1, 0.3, true); b.Allowed() {
			t.Fatalf("seed %d: it did not trip", seed)
		}
		if play(b, rng, 20_000, 1, 0.055, false); b.Allowed() {
			t.Errorf("seed %d: it goes on, though the error is above the bound", seed)
		}
		b.change(b.own.state, tally{}) // whoever waits long for the better is not what is tested
		play(b, rng, 20_000, 1, 0.02, false)
		if s := b.Snapshot(); !b.Allowed() || s.Tripped || s.Trips != 1 {
			t.Errorf("seed %d: it did not recover: %+v", seed, s)
		}
	}
}

// TestBudgetForgetsWhatWasMended: however long a surface went wrong after its trip, it comes back soon after that has ended.
func TestBudgetForgetsWhatWasMended(t *testing.T) {
	for seed := range uint64(20) {
		b, rng := NewBudget(bounded(0.02, 1)), rand.New(rand.NewPCG(seed, 5))
		play(b, rng, 1_000, 1, 0.6, true)
		if play(b, rng, 3_000, 1, 0.6, false); b.Allowed() {
			t.Fatalf("seed %d: it did not trip", seed)
		}
		if n := play(b, rng, 4_000, 1, 0.002, false); !b.Allowed() {
			t.Errorf("seed %d: after %d more, of which two in a thousand were wrong, it has not come back: %+v", seed, n, b.Snapshot())
		}
	}
}

// audit labels n would-be hits, all right or all wrong.
func audit(b *Budget, n int, same bool) {
	for range n {
		b.Count(Audit)
		b.Label(same)
	}
}

// TestBudgetBeginsAnew: what tripped it does not count for going on, nor trip it again; and two hundred are asked for at least.
func TestBudgetBeginsAnew(t *testing.T) {
	b := NewBudget(bounded(0.5, 1))
	for b.Allowed() {
		audit(b, 1, false)
	}
	if audit(b, minRecover-1, true); b.Allowed() {
		t.Error("it goes on before the two hundredth")
	}
	if audit(b, 1, true); !b.Allowed() {
		t.Errorf("it does not go on: %+v", b.Snapshot())
	}
	other := NewBudget(bounded(0.05, 1)) // did not hear of anything, and is about to trip
	audit(other, 2, false)
	audit(b, 1, true)
	b.Configure(bounded(0.05, 1))
	told := NewBudget(bounded(1, 1))
	audit(told, 50, false)
	if err := b.Hear("behind", told.Own()); err != nil || !b.Allowed() {
		t.Errorf("%v: counts from before its trip, of a node that did not hear of it, trip it again", err)
	}
	if err := other.Hear("ahead", b.Own()); err != nil || !other.Allowed() || other.Snapshot().Trips != 1 {
		t.Errorf("%v: the node that is behind does not follow: %+v", err, other.Snapshot())
	}
	if audit(b, 10, false); b.Allowed() {
		t.Error("it does not trip a second time")
	}
}

// TestBudgetAfterGoodTimes: a long time without a wrong one does not hide what is wrong now.
func TestBudgetAfterGoodTimes(t *testing.T) {
	b := NewBudget(bounded(0.05, 1))
	audit(b, 3*maxBlocks*blockAudits, true)
	for range blockAudits / 2 {
		audit(b, 2, true)
		audit(b, 1, false)
	}
	if b.Allowed() {
		t.Errorf("one in three is wrong now: %+v", b.Snapshot())
	}
}

// TestBudgetOfManyNodes: what no node sees enough of for itself trips them all, and all go on when one does.
func TestBudgetOfManyNodes(t *testing.T) {
	const n, each = 5, 4
	var nodes [n]*Budget
	for i := range nodes {
		nodes[i] = NewBudget(bounded(0.05, 1))
	}
	gossip := func() {
		for i, b := range nodes {
			for j, other := range nodes {
				if i != j {
					if err := b.Hear(string(rune('a'+j)), other.Own()); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}
	for _, b := range nodes {
		for i := range each { // of which a node alone makes nothing
			b.Count(Audit)
			b.Label(i%2 == 0)
		}
		if !b.Allowed() {
			t.Fatal("it tripped alone: the test shows nothing")
		}
	}
	gossip()
	gossip()
	for i, b := range nodes {
		if s := b.Snapshot(); b.Allowed() || s.Trips != 1 || s.Audited != each*n {
			t.Errorf("node %d: %+v", i, s)
		}
	}
	for range 120 {
		for _, b := range nodes {
			b.Count(Audit)
			b.Label(true)
		}
	}
	gossip()
	gossip()
	for i, b := range nodes {
		if !b.Allowed() {
			t.Errorf("node %d does not go on: %+v", i, b.Snapshot())
		}
	}
	nodes[0] = NewBudget(bounded(0.05, 1)) // it was started anew, and knows of no trip
	gossip()
	if s := nodes[0].Snapshot(); s.Trips != 1 || s.Tripped {
		t.Errorf("the new one: %+v", s)
	}
}

// TestManyAtOnce: pools and budgets are shared by requests, peers and metrics (under -race).
func TestManyAtOnce(t *testing.T) {
	p := bounded(0.05, 1)
	b, pool := NewBudget(p), NewPool()
	const each = 300
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 8))
			var own Observations
			for range each {
				d := p.Decide(&Evidence{Similarity: rng.Float64(), Own: &own, Pool: pool}, b, rng)
				b.Count(d.Action)
				pool.Seen(d.Cell)
				pool.Add(d.Cell, true)
				if d.Action == Audit {
					b.Label(true)
				}
				if err := errors.Join(pool.Hear("peer", NewPool().Own()), b.Hear("peer", NewBudget(p).Own())); err != nil {
					t.Error(err)
				}
				_, _, _ = b.Snapshot(), pool.Own(), b.Own()
			}
		})
	}
	all.Wait()
	if s := b.Snapshot(); s.Requests != 4*each || pool.labels != 4*each {
		t.Errorf("%+v, %d labels", s, pool.labels)
	}
}

// TestReports: what people report counts as audited and wrong.
func TestReports(t *testing.T) {
	b := NewBudget(bounded(0.02, 1))
	n := 0
	for ; b.Allowed() && n < 100; n++ {
		b.Count(Serve)
		b.Wrong()
	}
	if s := b.Snapshot(); n > 4 || s.Reported != int64(n) || s.Audited != 0 || !s.Tripped {
		t.Errorf("after %d reports: %+v", n, s)
	}
	var none *Budget
	if none.Allowed() {
		t.Error("without a budget hits are allowed")
	}
}

// TestInterval: the published bounds hold the truth in at least 95 of 100 histories, at all of a thousand looks.
func TestInterval(t *testing.T) {
	statistics(t)
	const histories = 400
	for _, p := range []float64{0.01, 0.05, 0.2} {
		missed := 0
		for seed := range uint64(histories) {
			rng, tl := rand.New(rand.NewPCG(seed, 6)), tally{}
			for range 1000 {
				tl.audited++
				if rng.Float64() < p {
					tl.wrong++
				}
				if excluded(&tl, p, publishAlpha) != 0 {
					missed++
					break
				}
			}
		}
		t.Logf("share %g: %d of %d histories (seeds 0–399) excluded it at some time", p, missed, histories)
		if missed > histories/20+13 { // 3 deviations
			t.Errorf("share %g: %d of %d histories excluded it", p, missed, histories)
		}
	}
	r := interval(&tally{audited: 1000, wrong: 20}, publishAlpha)
	if lower, upper := LowerBound(20, 1000, 0.975), UpperBound(20, 1000, 0.975); r.Estimate != 0.02 || r.Lower >= lower || r.Upper <= upper || r.Upper > 2*upper {
		t.Errorf("%+v is not somewhat wider than %g … %g, which holds for one look", r, lower, upper)
	}
	if r := interval(&tally{}, publishAlpha); r != (Rate{Upper: 1}) {
		t.Errorf("of nothing: %+v", r)
	}
	if math.IsNaN(interval(&tally{audited: 5, wrong: 5}, publishAlpha).Lower) {
		t.Error("all wrong: no number")
	}
}

// TestUnlabelled: where most audits find out nothing, nothing is served, and the shares are not known; neither a few of
// them nor less than half of many do that. It ends when enough find out something.
func TestUnlabelled(t *testing.T) {
	audits := func(b *Budget, labelled, not int) {
		audit(b, labelled, true)
		for range not {
			b.Count(Audit)
			b.Unlabelled()
		}
	}
	few := NewBudget(bounded(0.05, 1))
	if audits(few, 0, minLook-1); !few.Allowed() || few.Snapshot().Blind {
		t.Errorf("%d audits that found out nothing are too few to say so", minLook-1)
	}
	half := NewBudget(bounded(0.05, 1))
	for range 500 {
		audits(half, 1, 1)
	}
	if s := half.Snapshot(); !half.Allowed() || s.Blind || s.Unlabelled != 500 || s.Audited != 500 || s.PerHit.Upper > 0.05 {
		t.Errorf("every other: %+v", s)
	}
	b := NewBudget(bounded(0.05, 1))
	audits(b, 1000, 0)
	n := 0
	for ; b.Allowed() && n < 1000; n++ {
		audits(b, 0, 1)
	}
	if s := b.Snapshot(); n > 2*blockAudits || !s.Blind || s.Tripped || s.PerHit.Lower != 0 || s.PerHit.Upper != 1 || s.PerRequest.Upper != 1 {
		t.Errorf("stopped after %d: %+v", n, s)
	}
	if d := (&Policy{Mode: Static, Threshold: 0.5}).Decide(&Evidence{Similarity: 0.9}, b, rand.New(rand.NewPCG(1, 1))); d.Action != Audit || d.Why == whyTripped {
		t.Errorf("%+v", d)
	}
	other := NewBudget(bounded(0.05, 1))
	if err := other.Hear("peer", b.Own()); err != nil || other.Allowed() || other.Snapshot().Unlabelled != int64(n) {
		t.Errorf("%v: a node that was told goes on: %+v", err, other.Snapshot())
	}
	for n = 0; !b.Allowed() && n < 1000; n++ {
		audits(b, 1, 0)
	}
	if n < minLook/2 || n > 4*blockAudits || b.Snapshot().Blind {
		t.Errorf("let go on after %d: %+v", n, b.Snapshot())
	}
	audits(b, 0, 300)
	if b.Allowed() {
		t.Fatal("it is not blind: the rest shows nothing")
	}
	if audit(b, 20, false); !b.Snapshot().Tripped {
		t.Errorf("twenty wrong ones do not count where most are unknown: %+v", b.Snapshot())
	}
}

// TestTripSaysWhy: what tripped a surface is told, here and where it was heard of, and what was found since; afterwards no more.
func TestTripSaysWhy(t *testing.T) {
	b, other := NewBudget(bounded(0.05, 1)), NewBudget(bounded(0.05, 1))
	audit(b, 10, true)
	n := int64(0)
	for ; b.Allowed(); n++ {
		audit(b, 1, false)
	}
	by := Found{10 + n, n}
	if s := b.Snapshot(); s.By != by || s.Since != (Found{}) || s.PerHit.Estimate != float64(n)/float64(10+n) || s.PerHit.Lower <= 0.05 || s.PerRequest != s.PerHit {
		t.Errorf("%+v", s)
	}
	audit(b, 15, true)
	audit(b, 2, false)
	if s := b.Snapshot(); s.By != by || s.Since != (Found{17, 2}) || s.PerHit.Estimate != float64(n+2)/float64(10+n+17) {
		t.Errorf("since then: %+v", s)
	}
	if err := other.Hear("peer", b.Own()); err != nil || other.Snapshot().By != by || other.Snapshot().Since != (Found{17, 2}) {
		t.Errorf("%v: who was told: %+v", err, other.Snapshot())
	}
	for !b.Allowed() {
		audit(b, 1, true)
	}
	if s := b.Snapshot(); s.By != (Found{}) || s.Since != (Found{}) || s.Trips != 1 {
		t.Errorf("afterwards: %+v", s)
	}
}

// TestNoAudit: a hit that cannot be checked is served, and said to be unchecked as often as others are checked, by the same
// chance; it is none where no hit is allowed, or none is ever served.
func TestNoAudit(t *testing.T) {
	const n, share = 10_000, 0.2
	p := &Policy{Mode: Static, Threshold: 0.5, HitErrorBound: 0.05, ErrorBound: 1, Audit: share}
	decide := func(p *Policy, b *Budget) (actions [Serve + 1]int, unaudited int) {
		rng := rand.New(rand.NewPCG(1, 7))
		for range n {
			d := p.Decide(&Evidence{Similarity: 0.9, NoAudit: true}, b, rng)
			if actions[d.Action]++; d.Unaudited {
				unaudited++
			}
		}
		return actions, unaudited
	}
	b := NewBudget(p)
	if a, unaudited := decide(p, b); a[Serve] != n || math.Abs(float64(unaudited)/n-share) > 0.02 {
		t.Errorf("%v, %d unaudited", a, unaudited)
	}
	for b.Allowed() {
		b.Wrong()
	}
	shadow := Policy{Mode: Shadow, HitErrorBound: 0.05, ErrorBound: 1}
	for _, c := range []struct {
		p *Policy
		b *Budget
	}{{p, b}, {p, nil}, {&shadow, NewBudget(p)}} {
		if a, unaudited := decide(c.p, c.b); a[Serve] != 0 || unaudited != 0 {
			t.Errorf("%v: %v, %d unaudited", c.p.Mode, a, unaudited)
		}
	}
	b = NewBudget(p)
	for i := 0; b.Allowed() && i < n; i++ {
		b.Count(Serve)
		b.Unlabelled()
	}
	if s := b.Snapshot(); !s.Blind || s.Served != minLook {
		t.Errorf("hits of which none can ever be checked: %+v", s)
	}
}
