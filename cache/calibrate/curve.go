package calibrate

import (
	"cmp"
	"math"
	"slices"
	"sort"

	"headgate/cache/threshold"
)

// Thresholds are tried in thousandths, above what the policy takes for a distance.
const (
	leastThreshold = 501
	mostThreshold  = 1000
)

// Point is what a threshold would do to pairs.
type Point struct {
	Threshold float64 `json:"threshold"`
	Hits      int     `json:"hits"`  // pairs that would be answered with one answer
	Wrong     int     `json:"wrong"` // of them, those that are labelled different
	Error     float64 `json:"error"` // per hit; 0 without a hit
	Lower     float64 `json:"lower"` // one-sided bounds of it, each with the report's confidence
	Upper     float64 `json:"upper"`
	SameHit   float64 `json:"same_hit"`      // the share that hits of the pairs labelled the same
	Different float64 `json:"different_hit"` // and of those labelled different
}

// tally is some pairs by how alike they are. Refused pairs are no hits.
type tally struct {
	similarity      []int32 // of those that are not refused, the highest first
	wrong           []int   // of the first n, how many are labelled different
	same, different int     // with the refused
}

// count pairs that keep holds for, with the guards or as if there were none.
func count(pairs []pair, guards bool, keep func(*pair) bool) *tally {
	var t tally
	var open []*pair
	for i := range pairs {
		p := &pairs[i]
		if !keep(p) {
			continue
		}
		if p.same {
			t.same++
		} else {
			t.different++
		}
		if !guards || p.kinds == 0 {
			open = append(open, p)
		}
	}
	slices.SortFunc(open, func(a, b *pair) int { return cmp.Compare(b.similarity, a.similarity) })
	t.similarity, t.wrong = make([]int32, len(open)), make([]int, len(open)+1)
	for i, p := range open {
		t.similarity[i], t.wrong[i+1] = p.similarity, t.wrong[i]
		if !p.same {
			t.wrong[i+1]++
		}
	}
	return &t
}

// at says what a threshold does, in thousandths.
func (t *tally) at(limit int, confidence float64) Point {
	hits := sort.Search(len(t.similarity), func(i int) bool { return int(t.similarity[i]) < limit*(grain/1000) })
	wrong := t.wrong[hits]
	p := Point{
		Threshold: float64(limit) / 1000, Hits: hits, Wrong: wrong,
		Lower: threshold.LowerBound(int64(wrong), int64(hits), confidence), Upper: threshold.UpperBound(int64(wrong), int64(hits), confidence),
	}
	if hits > 0 {
		p.Error = float64(wrong) / float64(hits)
	}
	if t.same > 0 {
		p.SameHit = float64(hits-wrong) / float64(t.same)
	}
	if t.different > 0 {
		p.Different = float64(wrong) / float64(t.different)
	}
	return p
}

// curve is every threshold that can be recommended, the lowest first.
func (t *tally) curve(confidence float64) []Point {
	points := make([]Point, 0, mostThreshold-leastThreshold+1)
	for limit := leastThreshold; limit <= mostThreshold; limit++ {
		points = append(points, t.at(limit, confidence))
	}
	return points
}

// rate is a point of the ROC: the shares of the pairs labelled the same and different at or above a similarity.
type rate struct{ same, different float64 }

// roc is the whole curve from nothing to all pairs that are not refused, and the area under it; refused ones rank below
// all others and are alike. Steps at one similarity are one.
func (t *tally) roc() (curve []rate, area float64) {
	curve = append(curve, rate{})
	add := func(hits int) {
		last := curve[len(curve)-1]
		next := rate{float64(hits-t.wrong[hits]) / float64(t.same), float64(t.wrong[hits]) / float64(t.different)}
		area += (next.different - last.different) * (next.same + last.same) / 2
		curve = append(curve, next)
	}
	for i := range t.similarity {
		if i+1 == len(t.similarity) || t.similarity[i+1] != t.similarity[i] {
			add(i + 1)
		}
	}
	last := curve[len(curve)-1]
	return curve, area + (1-last.different)*(1+last.same)/2
}

// The outcomes of a calibration.
const (
	Confirmed = "confirmed" // the other half bears the threshold out, with the confidence that was asked for
	Likely    = "likely"    // the other half speaks for it, and is too small to be sure
	Doubtful  = "doubtful"  // the other half was wrong more often than the budget allows, or had no hit
	None      = "none"      // no threshold keeps the budget surely enough
)

// Recommendation is the lowest threshold whose upper bound is within the budget on the half of the pairs that chose it,
// and how it did on the other half.
type Recommendation struct {
	Outcome   string  `json:"outcome"`
	Threshold float64 `json:"threshold,omitempty"` // 0 for none
	Chosen    Point   `json:"chosen_on"`
	Tested    Point   `json:"tested_on"`
	Whole     Point   `json:"both_halves"`
	// Needed is about how many pairs such as these, in all, would make it sure; 0 where it is sure, or more would not help.
	Needed int `json:"pairs_needed,omitempty"`
}

// recommend a threshold, from the halves and from all pairs.
func recommend(chosen, tested, whole *tally, budget, confidence float64) Recommendation {
	r := Recommendation{Outcome: None}
	for limit := leastThreshold; limit <= mostThreshold && r.Threshold == 0; limit++ {
		if p := chosen.at(limit, confidence); p.Upper <= budget { // it is 1 without a hit
			r.Threshold, r.Chosen = p.Threshold, p
		}
	}
	pairs := whole.same + whole.different
	if r.Threshold == 0 {
		for limit := leastThreshold + 9; limit <= mostThreshold; limit += 10 {
			p := whole.at(limit, confidence)
			// Half of the pairs choose.
			if n := 2 * needed(p, pairs, budget, confidence); n > 0 && (r.Needed == 0 || n < r.Needed) {
				r.Needed = n
			}
		}
		return r
	}
	limit := int(math.Round(r.Threshold * 1000))
	r.Tested, r.Whole = tested.at(limit, confidence), whole.at(limit, confidence)
	switch {
	case r.Tested.Upper <= budget:
		r.Outcome = Confirmed
	case r.Tested.Hits > 0 && r.Tested.Error <= budget:
		r.Outcome, r.Needed = Likely, 2*needed(r.Tested, tested.same+tested.different, budget, confidence)
	default:
		r.Outcome, r.Needed = Doubtful, 2*needed(r.Whole, pairs, budget, confidence)
	}
	return r
}

// mostNeeded bounds what is looked for.
const mostNeeded = 1 << 30

// needed says how many pairs would bring the upper bound within the budget if the errors stayed as frequent as they are
// at a point of so many pairs; 0 if none would.
func needed(p Point, pairs int, budget, confidence float64) int {
	if p.Hits == 0 || p.Error >= budget {
		return 0
	}
	enough := func(hits int) bool {
		return threshold.UpperBound(int64(math.Ceil(p.Error*float64(hits))), int64(hits), confidence) <= budget
	}
	hits := 1
	for !enough(hits) {
		if hits *= 2; hits > mostNeeded {
			return 0
		}
	}
	hits = hits/2 + sort.Search(hits/2, func(i int) bool { return enough(hits/2 + i) })
	return int(math.Ceil(float64(hits) * float64(pairs) / float64(p.Hits)))
}

// Mix is the error per hit where another share of a question's nearest neighbours has the same answer.
type Mix struct {
	Same  float64 `json:"same"`
	Error float64 `json:"error"`
}

// mixes works out how often a threshold is wrong in other traffic.
func mixes(p Point) (out []Mix) {
	for _, same := range []float64{.1, .25, .5, .75, .9} {
		good, bad := same*p.SameHit, (1-same)*p.Different
		if good+bad > 0 {
			out = append(out, Mix{same, bad / (good + bad)})
		}
	}
	return out
}
