package threshold

import (
	"cmp"
	"math"
	"slices"
)

// weights of a logistic model: logit = w·(1, s, vote).
type weights [3]float64

// model is what a pool has learned.
type model struct {
	weights weights
	labels  int
	cut     float64 // the least logit of a hit; +Inf: none is known
	upper   float64 // upper bound of the share of wrong ones among hits at that cut
}

func (w *weights) logit(s, vote float64) float64 { return w[0] + w[1]*s + w[2]*vote }

// Tuned on the training parts of banking77 and clinc150; see DESIGN.md.
const (
	voteTemperature = 0.10 // how fast a neighbour's vote fades with its distance from the candidate
	background      = 0.20 // the similarity of a neighbour that always votes against
	priorWeight     = 2.0  // precision of the prior of the weights
	pseudo          = 2.0  // wrong labels that the model's word counts for, beside those of the region
	minLabels       = 40   // in a region, before anything of it is served
	cutConfidence   = 0.9  // of the bound at the cut
	entryVariance   = 1.0  // of an entry's own deviation, in logits
)

func priorWeights() weights { return weights{-2.5, 4, 0.7} }

// vote is how strongly the neighbours speak for the candidate's answer, as log odds: each has a voice that fades with
// its distance, and there is a faint one against, so that an entry without neighbours is not unanimous.
func vote(e *Evidence) float64 {
	same, other := 1.0, math.Exp((background-e.Similarity)/voteTemperature)
	candidate := false
	for i, n := range e.Neighbors {
		if i == MaxNeighbors {
			break
		}
		if !candidate && n.Answer == e.Answer && n.Similarity == e.Similarity {
			candidate = true // its voice is the 1
			continue
		}
		v := math.Exp((min(n.Similarity, 1) - e.Similarity) / voteTemperature)
		if n.Answer == e.Answer {
			same += v
		} else {
			other += v
		}
	}
	return math.Log(same / other)
}

// fitModel fits the weights by penalised maximum likelihood and finds the cut.
func fitModel(k sketch, hitBound, bound float64) model {
	m := model{weights: priorWeights(), cut: math.Inf(1), upper: 1}
	type row struct {
		x     [3]float64
		n     count
		logit float64
	}
	rows := make([]row, 0, len(k))
	for c, n := range k {
		s, v := c.middle()
		rows = append(rows, row{x: [3]float64{1, s, v}, n: n})
		m.labels += int(n.labelled)
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Or(cmp.Compare(a.x[1], b.x[1]), cmp.Compare(a.x[2], b.x[2])) }) // sums must not depend on a map's order
	if m.labels < minLabels {
		return m
	}
	prior := m.weights
	for range 12 {
		var g weights
		var h [3][3]float64
		for i := range g {
			g[i], h[i][i] = priorWeight*(prior[i]-m.weights[i]), priorWeight
		}
		for r := range rows {
			x, n := &rows[r].x, &rows[r].n
			if n.labelled == 0 {
				continue
			}
			p := logistic(m.weights.logit(x[1], x[2]))
			d, w := float64(n.same)-float64(n.labelled)*p, float64(n.labelled)*p*(1-p)
			for i := range g {
				g[i] += d * x[i]
				for j := range g {
					h[i][j] += w * x[i] * x[j]
				}
			}
		}
		step := solve(h, g)
		for i := range step {
			m.weights[i] += step[i]
		}
		if math.Abs(step[0])+math.Abs(step[1])+math.Abs(step[2]) < 1e-9 {
			break
		}
	}
	m.weights[1], m.weights[2] = max(m.weights[1], 0), max(m.weights[2], 0) // more similar is never worse
	var all float64
	for i := range rows {
		rows[i].logit = m.weights.logit(rows[i].x[1], rows[i].x[2])
		all += float64(rows[i].n.seen)
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.logit, a.logit) })
	var seen, mass, labelled, wrong, expected float64
	for _, r := range rows {
		q := logistic(-r.logit)
		seen += float64(r.n.seen)
		mass += float64(r.n.seen) * q
		labelled += float64(r.n.labelled)
		wrong += float64(r.n.labelled - r.n.same)
		expected += float64(r.n.labelled) * q
		if labelled < minLabels || seen == 0 {
			continue
		}
		upper := gammaQuantile(cutConfidence, pseudo+wrong) / (pseudo + expected) * mass / seen
		if upper <= hitBound && upper*seen <= bound*all {
			m.cut, m.upper = r.logit, upper
		}
	}
	return m
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

// deviation is how much the entry is better (> 0) or worse than the pool makes it, in logits: the mode of its posterior.
func (o *Observations) deviation2(w *weights) (u float64) {
	if o.Len() == 0 {
		return 0
	}
	for range 8 {
		g, h := -u/entryVariance, 1/entryVariance
		for _, x := range o.all {
			s, v := Cell(x.cell).middle()
			p := logistic(w.logit(s, v) + u)
			if x.same {
				g++
			}
			g -= p
			h += p * (1 - p)
		}
		u += g / h
		if math.Abs(g/h) < 1e-6 {
			break
		}
	}
	return u
}

// gammaQuantile is the p-quantile of a gamma distribution of that shape and rate 1, by Wilson and Hilferty's cube.
func gammaQuantile(p, shape float64) float64 {
	x := 1 - 1/(9*shape) + normalQuantile(p)/(3*math.Sqrt(shape))
	return shape * max(x, 0) * x * x
}
