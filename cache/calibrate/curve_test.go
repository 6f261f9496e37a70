package calibrate

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"headgate/cache/threshold"
)

func drawPairs(t *rapid.T) []pair {
	n := rapid.IntRange(2, 60).Draw(t, "n")
	pairs := make([]pair, n)
	for i := range pairs {
		pairs[i] = pair{
			similarity: int32(rapid.IntRange(-20, 20).Draw(t, "similarity")) * grain / 20, same: rapid.Bool().Draw(t, "same"),
			tested: rapid.Bool().Draw(t, "tested"), kinds: uint32(rapid.IntRange(0, 2).Draw(t, "kinds")),
		}
	}
	pairs[0].same, pairs[1].same = true, false
	return pairs
}

func all(*pair) bool { return true }

// A point of the curve is what counting says.
func TestPoints(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs, guards := drawPairs(t), rapid.Bool().Draw(t, "guards")
		limit := rapid.IntRange(leastThreshold, mostThreshold).Draw(t, "threshold")
		hits, wrong, same := 0, 0, 0
		for _, p := range pairs {
			same += one(p.same)
			if int(p.similarity)*1000 >= limit*grain && !(guards && p.kinds != 0) {
				hits++
				wrong += one(!p.same)
			}
		}
		p := count(pairs, guards, all).at(limit, 0.9)
		if p.Hits != hits || p.Wrong != wrong || p.SameHit != float64(hits-wrong)/float64(same) {
			t.Fatalf("%+v, want %d wrong of %d", p, wrong, hits)
		}
		if p.Lower > p.Error || p.Upper < p.Error || p.Upper != threshold.UpperBound(int64(wrong), int64(hits), 0.9) {
			t.Fatalf("bounds of %+v", p)
		}
	})
}

// The area is how often a pair of the same ranks above one that is different; equals count half.
func TestArea(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs, guards := drawPairs(t), rapid.Bool().Draw(t, "guards")
		rank := func(p *pair) float64 {
			if guards && p.kinds != 0 {
				return -2 * grain
			}
			return float64(p.similarity)
		}
		var above, of float64
		for i := range pairs {
			for j := range pairs {
				if !pairs[i].same || pairs[j].same {
					continue
				}
				of++
				switch a, b := rank(&pairs[i]), rank(&pairs[j]); {
				case a > b:
					above++
				case a == b:
					above += 0.5
				}
			}
		}
		curve, area := count(pairs, guards, all).roc()
		if math.Abs(area-above/of) > 1e-9 {
			t.Fatalf("area %v, want %v", area, above/of)
		}
		for i := 1; i < len(curve); i++ {
			if curve[i].same < curve[i-1].same || curve[i].different < curve[i-1].different {
				t.Fatal("the curve turns back")
			}
		}
	})
}

// The lowest threshold that keeps the budget on the half that chooses is recommended, and no other.
func TestRecommendsTheLowest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs := drawPairs(t)
		budget := rapid.SampledFrom([]float64{0.02, 0.2, 0.4}).Draw(t, "budget")
		chosen := count(pairs, true, func(p *pair) bool { return !p.tested })
		tested := count(pairs, true, func(p *pair) bool { return p.tested })
		r := recommend(chosen, tested, count(pairs, true, all), budget, 0.9)
		want := 0.0
		for limit := mostThreshold; limit >= leastThreshold; limit-- {
			if p := chosen.at(limit, 0.9); p.Hits > 0 && p.Upper <= budget {
				want = p.Threshold
			}
		}
		if r.Threshold != want {
			t.Fatalf("%v is recommended, want %v", r.Threshold, want)
		}
		if (r.Outcome == None) != (want == 0) || r.Outcome == Confirmed && r.Tested.Upper > budget || r.Outcome == Likely && r.Tested.Hits == 0 || r.Outcome == Doubtful && r.Tested.Hits > 0 && r.Tested.Error <= budget {
			t.Fatalf("%+v", r)
		}
	})
}

// So many pairs would do, and fewer would not.
func TestNeeded(t *testing.T) {
	for _, c := range []struct {
		hits, wrong, pairs int
		budget             float64
		want               int
	}{
		{10, 0, 10, 0.02, 149}, // ln .05 / ln .98
		{10, 0, 100, 0.02, 1490},
		{5, 1, 10, 0.2, 0},
		{5, 2, 10, 0.2, 0},
		{0, 0, 10, 0.2, 0},
	} {
		p := Point{Hits: c.hits, Wrong: c.wrong}
		if c.hits > 0 {
			p.Error = float64(c.wrong) / float64(c.hits)
		}
		if got := needed(p, c.pairs, c.budget, 0.95); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	p := Point{Hits: 100, Wrong: 1, Error: 0.01}
	n := needed(p, 100, 0.02, 0.95)
	bound := func(n int) float64 {
		return threshold.UpperBound(int64(math.Ceil(0.01*float64(n))), int64(n), 0.95)
	}
	if bound(n) > 0.02 || bound(n-1) <= 0.02 {
		t.Errorf("%d pairs: bounds %v, and %v with one fewer", n, bound(n), bound(n-1))
	}
}

// A threshold that its luck chose, and that is not within the budget, is confirmed no more often than the confidence says.
func TestConfirmedHolds(t *testing.T) {
	const (
		worlds       = 160
		budget, sure = 0.05, 0.8
		n            = 900
	)
	// Similarities are even in (.5, 1); a pair's chance to be different falls from this to nothing.
	differs := func(s float64) float64 { return 0.36 * (1 - s) }
	rng := rand.New(rand.NewPCG(4, 2))
	good, bad, confirmedGood, confirmedBad := 0, 0, 0, 0
	for range worlds {
		pairs := make([]pair, n)
		for i := range pairs {
			s := (1 + rng.Float64()) / 2
			pairs[i] = pair{similarity: grade(float32(s)), same: rng.Float64() >= differs(s), tested: rng.IntN(2) == 0}
		}
		r := recommend(count(pairs, true, func(p *pair) bool { return !p.tested }), count(pairs, true, func(p *pair) bool { return p.tested }), count(pairs, true, all), budget, sure)
		switch truth := differs((r.Threshold + 1) / 2); {
		case r.Outcome == None:
		case truth > budget:
			bad++
			confirmedBad += one(r.Outcome == Confirmed)
		default:
			good++
			confirmedGood += one(r.Outcome == Confirmed)
		}
	}
	t.Logf("confirmed: %d of %d that are within the budget, %d of %d that are not", confirmedGood, good, confirmedBad, bad)
	if bad < 15 || confirmedGood < 15 {
		t.Fatal("too few worlds: this shows nothing")
	}
	if most := (1 - sure) * float64(bad); float64(confirmedBad) > most {
		t.Errorf("%d thresholds of %d were confirmed wrongly, at most %.0f may", confirmedBad, bad, most)
	}
}

// Each outcome has its words, and the block for the policy serves only by a threshold that was borne out.
func TestOutcomes(t *testing.T) {
	half := func(tested bool, good, bad int) (pairs []pair) {
		for i := range good + bad {
			pairs = append(pairs, pair{similarity: grain * 9 / 10, same: i < good, tested: tested})
		}
		return append(pairs, pair{same: true, tested: tested}, pair{tested: tested})
	}
	for _, c := range []struct {
		chosen, tested []pair
		outcome        string
		needs, serves  bool
		words          string
	}{
		{half(false, 300, 1), half(true, 300, 1), Confirmed, false, true, "0.501 is recommended: on the half that did not choose it, 1 of 301 hits is wrong, at most 1.6 % with 95 % confidence."},
		{half(false, 300, 1), half(true, 60, 0), Likely, true, true, "which speaks for it and is too little to be sure of 2 %; about"},
		{half(false, 300, 1), half(true, 60, 3), Doubtful, true, false, "none is recommended yet: 0.501 kept the budget of 2 % on the half that chose it, and not on the other: on the half that did not choose it, 3 of 63 hits are wrong"},
		{half(false, 300, 1), half(true, 0, 0), Doubtful, true, false, "on the half that did not choose it, nothing is a hit"},
		{half(false, 60, 0), half(true, 60, 0), None, true, false, "none can be recommended: with so few pairs, no threshold is wrong in at most 2 % of its hits with 95 % confidence. About 308 pairs in all"},
		{half(false, 60, 9), half(true, 60, 9), None, false, false, "at every threshold more than 2 % of the hits are wrong. More pairs would not help"},
	} {
		s := newSample()
		s.pairs = append(c.chosen, c.tested...)
		for i := range s.pairs {
			s.pairs[i].a, _ = s.text(fmt.Sprint("a", i))
			s.pairs[i].b, _ = s.text(fmt.Sprint("b", i))
		}
		config := testConfig()
		config.Budget = 0.02
		r := s.report(&config)
		if got := r.Recommendation; got.Outcome != c.outcome || got.Needed > 0 != c.needs || strings.Contains(r.Policy, "mode: static") != c.serves || !strings.Contains(r.verdict(), c.words) {
			t.Errorf("want %s, %q: %+v, %s", c.outcome, c.words, got, r.verdict())
		}
		if err := r.WritePage(io.Discard); err != nil {
			t.Error(err)
		}
	}
}
