// Package threshold decides whether an answer that was given to a similar question may be given to this one, and holds
// what is decided to two budgets for being wrong. It is statistics and nothing else: no clock, no I/O, chance and
// counts are handed in. DESIGN.md says what is promised and what was measured.
//
// Who uses it: finds the nearest neighbours, has the guards take away those that must not be served, fills in an
// Evidence, calls Policy.Decide, does as told, and hands labels back to Observations, Pool and Budget.
package threshold

import (
	"fmt"
	"math/rand/v2"
)

// Mode says by what a would-be hit is told from a miss.
type Mode uint8

const (
	// Shadow decides as Learned does and serves nothing: every would-be hit is asked of the model and compared.
	Shadow Mode = iota
	// Static takes what is at least as similar as Policy.Threshold.
	Static
	// Learned is ours: a model pooled over the surface, corrected by the entry's own observations, above a floor of similarity.
	Learned
	// VCache is the published per-entry threshold (arXiv 2502.03771), which benchmarks are held against. No policy names it.
	VCache
)

// Policy is what the operator has set for a surface. The zero value is shadow with the bounds at 0: never a hit.
type Policy struct {
	Mode Mode
	// Threshold is the least similarity of a hit of mode Static.
	Threshold float64
	// ErrorBound is the share of all requests that may be answered wrongly: vCache's δ.
	ErrorBound float64
	// HitErrorBound is the share of hits that may be wrong.
	HitErrorBound float64
	// Audit is the share of would-be hits that are asked of the model all the same, chosen by chance.
	Audit float64
}

// Validate says what is wrong with the policy, naming the field.
func (p *Policy) Validate() error {
	share := func(v float64) bool { return v >= 0 && v <= 1 } // false for what is no number
	switch {
	case p.Mode > VCache:
		return fmt.Errorf("mode %d: there is no such mode", p.Mode)
	case p.Mode == Static && !(p.Threshold > 0 && p.Threshold <= 1):
		return fmt.Errorf("threshold %g: a similarity above 0, at most 1", p.Threshold)
	case !share(p.ErrorBound):
		return fmt.Errorf("error_bound %g: a share between 0 and 1", p.ErrorBound)
	case !share(p.HitErrorBound):
		return fmt.Errorf("hit_error_bound %g: a share between 0 and 1", p.HitErrorBound)
	case !share(p.Audit):
		return fmt.Errorf("audit %g: a share between 0 and 1", p.Audit)
	}
	return nil
}

// Neighbor is an entry near the question.
type Neighbor struct {
	Similarity float64
	// Answer names the answer: two entries whose answers were found to be the same have the same number.
	Answer uint64
	// Refused says that a guard does not let its answer pass for that to the question. Where it is the candidate's answer it
	// speaks for it as others do; where it is another it speaks against it in a low voice: the "turn off" beside a "turn on".
	Refused bool
}

// MaxNeighbors is how many neighbours are looked at; further ones change nothing.
const MaxNeighbors = 8

// Evidence is what speaks for and against giving the answer of one entry, the candidate, to a question.
type Evidence struct {
	// Similarity of the candidate, the nearest entry that the guards let pass. Cosine, in [-1, 1].
	Similarity float64
	// Answer of the candidate.
	Answer uint64
	// Neighbors are the nearest entries, the nearest first, refused ones and the candidate among them.
	Neighbors []Neighbor
	// Own is what was observed of the candidate; nil counts as none.
	Own *Observations
	// Pool is what was observed of its surface; nil counts as nothing.
	Pool *Pool
	// NoAudit says that the model cannot be asked for this question, so that a hit cannot be checked. It is served unchecked, and
	// where chance had chosen it, Decision.Unaudited says so. Where no hit is allowed it is none either, and Audit means that.
	NoAudit bool
}

// Action is what is to be done with a question.
type Action uint8

const (
	// Miss is to ask the model, and to insert its answer.
	Miss Action = iota
	// Explore is to ask the model, and to label what is no hit, but has an answer to compare.
	Explore
	// Audit is to ask the model, and to label a would-be hit: one that was chosen to be checked, or is not to be served.
	Audit
	// Serve is to give the candidate's answer.
	Serve
)

// String is the action in lower case, for labels of metrics and logs.
func (a Action) String() string {
	return [...]string{"miss", "explore", "audit", "serve"}[min(a, Serve)]
}

// Decision is what Decide decided, and by what.
type Decision struct {
	Action Action
	// Threshold is the similarity at which it would have become a hit (Static, VCache: t̂), or the confidence (Learned; 1: at none).
	Threshold float64
	// Tau is vCache's probability of exploring; 0 in other modes.
	Tau float64
	// Confidence is a lower bound of the probability that the answer is right; 0 where nothing is known.
	Confidence float64
	// Unaudited: chance chose this hit to be checked, but Evidence.NoAudit forbids it. Who serves it calls Budget.Unlabelled.
	Unaudited bool
	// Cell names the evidence to the pool: hand it back with the label. It is meaningless to others.
	Cell Cell
	// Why in a few words, constant, for logs.
	Why string
}

// WouldHit tells whether the answer would have been served, had nobody wanted to check it.
func (d *Decision) WouldHit() bool { return d.Action == Serve || d.Action == Audit }

// Decide says what to do. It changes nothing but caches: who calls counts with Budget.Count and Pool.Seen what became of
// it, since it may yet decide otherwise (a client's least similarity, a verifier). rng and e.Own must not be used by
// others at the same time. A nil Budget allows nothing.
func (p *Policy) Decide(e *Evidence, b *Budget, rng *rand.Rand) Decision {
	v := vote(e)
	d := Decision{Action: Miss, Cell: cellOf(e.Similarity, v)}
	var would bool
	switch p.Mode {
	case Static:
		d.Threshold, would = p.Threshold, e.Similarity >= p.Threshold
		d.Why = "below the threshold"
	case VCache:
		f := e.Own.Fit()
		d.Threshold = f.T
		d.Tau, d.Confidence = f.Tau(e.Similarity, p.ErrorBound)
		would = rng.Float64() > d.Tau
		d.Action, d.Why = Explore, "the entry's observations do not bear it"
	default:
		m := e.Pool.current(p.HitErrorBound, p.ErrorBound)
		z := m.weights.logit(e.Similarity, v) + e.Own.lean(&m.weights)
		would = z >= m.cut && e.Similarity >= floor && !e.Pool.disowned(e.Answer)
		d.Threshold, d.Confidence = m.confidence(m.cut), m.confidence(z)
		d.Action, d.Why = Explore, "not surely the same answer"
		if e.Similarity < floor {
			d.Why = "too little alike, whatever was learned"
		}
	}
	if !would {
		return d
	}
	if p.Mode == Shadow {
		d.Action, d.Why = Audit, "shadow"
		return d
	}
	if why := b.refusal(); why != "" {
		d.Action, d.Why = Audit, why
		return d
	}
	d.Action, d.Why = Serve, "sure enough"
	if rng.Float64() < p.Audit {
		if d.Unaudited = e.NoAudit; !e.NoAudit {
			d.Action, d.Why = Audit, "chosen to be checked"
		}
	}
	return d
}

// floor is the least similarity of a hit of mode Learned, and of a would-be hit of Shadow, whatever labels say: they may come
// from a time in which every answer was the same.
const floor = 0.60

// Inserts tells whether the model's answer to a question is to become an entry, beside the candidate of similarity
// s whose answer was found to be the same (known, same), another (known, not same), or was not compared (not known).
func (p *Policy) Inserts(s float64, same, known bool) bool {
	switch {
	case !known || !same:
		return true
	case p.Mode == Shadow || p.Mode == Learned:
		return s < twin
	}
	return false
}

// twin is the similarity from which an entry with the same answer is of no use beside another.
const twin = 0.97
