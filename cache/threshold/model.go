package threshold

import (
	"cmp"
	"math"
	"slices"
)

// weights of a logistic model: logit = w·(1, s, vote).
type weights [3]float64

func (w *weights) logit(s, vote float64) float64 { return w[0] + w[1]*s + w[2]*vote }

// priorWeights are what a surface begins with, until it has labels of its own.
func priorWeights() weights { return weights{-2.5, 4, 0.7} }

// Chosen by replays of the training parts of banking77 and clinc150, which hardly depend on any of them; see DESIGN.md.
const (
	voteTemperature = 0.10 // how fast a neighbour's voice fades with its distance from the candidate
	refusedVoice    = 0.25 // of a neighbour with another answer that a guard refuses anyway
	background      = 0.20 // the similarity of a neighbour that always speaks against
	priorPrecision  = 2.0  // of each weight
	entryVariance   = 1.0  // of an entry's own deviation, in logits
	minLabels       = 40   // among what would be served, before anything is; or more, for bounds below 1/minLabels
	pseudoWrong     = 2.0  // wrong labels that count for the model's own word on how many there are
	cutConfidence   = 0.9  // of the bound at the cut
	leastWrong      = 0.01 // the share of wrong ones that the weights may go down to: of the far end they only guess
	maxFitSteps     = 12   // of Newton's method, which takes some five
)

// model is what a pool has learned.
type model struct {
	weights weights
	labels  int
	cut     float64 // the least logit of a hit; +Inf: none is known
	upper   float64 // bound of the share of wrong ones among hits at that cut
	excess  float64 // how many times as many wrong ones there may be as the weights say, at most
}

// unlearned is the model of who has seen nothing: it knows no cut.
func unlearned() model {
	return model{weights: priorWeights(), cut: math.Inf(1), upper: 1, excess: math.Inf(1)}
}

// vote is how strongly the neighbours speak for the candidate's answer, as log odds: each has a voice that fades with
// its distance, and there is a faint one against, so that an entry without neighbours is not unanimous.
func vote(e *Evidence) float64 {
	same, other, candidate := 0.0, math.Exp((background-e.Similarity)/voteTemperature), false
	for _, n := range e.Neighbors[:min(len(e.Neighbors), MaxNeighbors)] {
		voice := math.Exp((min(n.Similarity, 1) - e.Similarity) / voteTemperature)
		if n.Answer == e.Answer {
			same += voice
			candidate = candidate || n.Similarity == e.Similarity
		} else {
			if n.Refused {
				voice *= refusedVoice
			}
			other += voice
		}
	}
	if !candidate { // who did not list it means it all the same
		same++
	}
	return math.Log(same / other)
}

// evidence is a cell with its counts.
type evidence struct {
	s, vote float64
	n       count
	logit   float64
}

// fitModel fits the weights to the counts and finds the cut for the two bounds.
func fitModel(k sketch, hitBound, bound float64) model {
	m := unlearned()
	rows := make([]evidence, 0, len(k))
	for c, n := range k {
		s, v := c.middle()
		rows = append(rows, evidence{s: s, vote: v, n: n})
		m.labels += int(n.labelled)
	}
	if m.labels < minLabels {
		return m
	}
	slices.SortFunc(rows, func(a, b evidence) int { return cmp.Or(cmp.Compare(a.s, b.s), cmp.Compare(a.vote, b.vote)) }) // sums must not depend on a map's order
	m.weights.fit(slices.DeleteFunc(slices.Clone(rows), func(r evidence) bool { return r.n.labelled == 0 }))
	for i := range rows {
		rows[i].logit = m.weights.logit(rows[i].s, rows[i].vote)
	}
	slices.SortStableFunc(rows, func(a, b evidence) int { return cmp.Compare(b.logit, a.logit) })
	m.findCut(rows, hitBound, bound)
	return m
}

// fit maximises the likelihood of the labels under a normal prior, by Newton's method with steps that are halved while
// they lead down.
func (w *weights) fit(rows []evidence) {
	prior := *w
	worth := func(w *weights) (sum float64) {
		for i := range w {
			sum -= priorPrecision / 2 * (w[i] - prior[i]) * (w[i] - prior[i])
		}
		for i := range rows {
			z, n := w.logit(rows[i].s, rows[i].vote), &rows[i].n
			sum += float64(n.same)*z - float64(n.labelled)*softplus(z)
		}
		return sum
	}
	at := worth(w)
	for range maxFitSteps {
		step := w.climb(rows, &prior)
		next, size := *w, 1.0
		for ; size > 1e-3; size /= 2 {
			for i := range next {
				next[i] = w[i] + size*step[i]
			}
			if worth(&next) > at {
				break
			}
		}
		now := worth(&next)
		if !(now > at+1e-9) {
			break // the top, or as near as rounding lets one come
		}
		*w, at = next, now
	}
	w[1], w[2] = max(w[1], 0), max(w[2], 0) // what is more similar is never worse
}

// climb is Newton's step.
func (w *weights) climb(rows []evidence, prior *weights) weights {
	var g weights
	var h [3][3]float64
	for i := range g {
		g[i], h[i][i] = priorPrecision*(prior[i]-w[i]), priorPrecision
	}
	for r := range rows {
		n := float64(rows[r].n.labelled)
		x := weights{1, rows[r].s, rows[r].vote}
		p := logistic(w.logit(rows[r].s, rows[r].vote))
		rest, weight := float64(rows[r].n.same)-n*p, n*p*(1-p)
		for i := range g {
			g[i] += rest * x[i]
			for j := range g {
				h[i][j] += weight * x[i] * x[j]
			}
		}
	}
	return solve(h, g)
}

// findCut finds the lowest logit from which on, over all that was seen above it, at most hitBound are wrong, and at most
// bound of all requests; rows come with the highest first, and what is below the floor is a request, but no hit. What is above a cut was labelled more often near it than far
// above, where most was served: so the share of wrong ones among labels would be too great. It is taken from the weights
// instead, over what was seen, times how many more wrong ones there were among labels than the weights say: that
// with a bound, as of a Poisson count with a gamma prior.
func (m *model) findCut(rows []evidence, hitBound, bound float64) {
	var all, seen, wrongSeen, labelled, wrong, expected float64
	for _, r := range rows {
		all += float64(r.n.seen)
	}
	rows = slices.DeleteFunc(slices.Clone(rows), func(r evidence) bool { return r.s < floor }) // never served
	for i, r := range rows {
		q := max(logistic(-r.logit), leastWrong)
		seen += float64(r.n.seen)
		wrongSeen += float64(r.n.seen) * q
		labelled += float64(r.n.labelled)
		wrong += float64(r.n.labelled - r.n.same)
		expected += float64(r.n.labelled) * q
		if labelled*hitBound < 1 || labelled < minLabels || seen == 0 || i+1 < len(rows) && rows[i+1].logit == r.logit {
			continue
		}
		excess := gammaQuantile(cutConfidence, pseudoWrong+wrong) / (pseudoWrong + expected)
		if upper := excess * wrongSeen / seen; upper <= hitBound && upper*seen <= bound*all {
			m.cut, m.upper, m.excess = r.logit, upper, excess
		}
	}
}

// confidence is a lower bound of the probability that an answer of that logit is right; 1 for the cut of a model that has none.
func (m *model) confidence(logit float64) float64 {
	switch {
	case math.IsInf(logit, 1):
		return 1
	case math.IsInf(m.excess, 1):
		return 0
	}
	return max(0, 1-m.excess*max(logistic(-logit), leastWrong))
}

// solve is h⁻¹g of a positive definite matrix.
func solve(h [3][3]float64, g weights) weights {
	for i := range g {
		for j := i + 1; j < len(g); j++ {
			f := h[j][i] / h[i][i]
			for k := i; k < len(g); k++ {
				h[j][k] -= f * h[i][k]
			}
			g[j] -= f * g[i]
		}
	}
	for i := len(g) - 1; i >= 0; i-- {
		for j := i + 1; j < len(g); j++ {
			g[i] -= h[i][j] * g[j]
		}
		g[i] /= h[i][i]
	}
	return g
}

// gammaQuantile is the p-quantile of a gamma distribution of that shape and rate 1, by Wilson and Hilferty's cube.
func gammaQuantile(p, shape float64) float64 {
	x := 1 - 1/(9*shape) + normalQuantile(p)/(3*math.Sqrt(shape))
	return shape * x * x * x
}

// lean is how much an entry is better (> 0) or worse than the surface makes it, in logits, given what was observed of it:
// the mode of its posterior where that is worse, and what it is better by for sure, by one deviation, otherwise.
func (o *Observations) lean(w *weights) float64 {
	if o.Len() == 0 {
		return 0
	}
	u, h := 0.0, 0.0
	for range maxFitSteps {
		g := -u / entryVariance
		h = 1 / entryVariance
		for _, x := range o.all {
			p := logistic(w.logit(Cell(x.cell).middle()) + u)
			if x.same {
				g++
			}
			g -= p
			h += p * (1 - p)
		}
		u += g / h
		if math.Abs(g) < 1e-6*h {
			break
		}
	}
	return min(u, max(0, u-1/math.Sqrt(h)))
}
