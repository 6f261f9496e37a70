package threshold

import (
	_ "embed"
	"encoding/json"
	"math"
	"math/rand/v2"
	"testing"
)

// golden is what testdata/vcache.py computed by scipy.
//
//go:embed testdata/vcache.json
var golden []byte

func close64(a, b, within float64) bool { return math.Abs(a-b) <= within*max(1, math.Abs(b)) }

// TestVCache holds estimates and probabilities of exploring against values that were computed another way.
func TestVCache(t *testing.T) {
	var cases []struct {
		Observed [][2]any
		Fit      struct {
			N            int
			T, Deviation float64
			Gamma        *float64 // null: without end
		}
		Taus [][3]float64
	}
	if err := json.Unmarshal(golden, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 35 {
		t.Fatalf("only %d cases", len(cases))
	}
	for i, c := range cases {
		var o Observations
		for _, x := range c.Observed {
			o.Add(x[0].(float64), 0, x[1].(bool))
		}
		got, gamma := o.Fit(), math.Inf(1)
		if c.Fit.Gamma != nil {
			gamma = *c.Fit.Gamma
		}
		// 1e-4: observations are kept as float32, and the optimiser of scipy stops where the likelihood is flat.
		if got.N != c.Fit.N || !close64(got.T, c.Fit.T, 1e-4) || math.IsInf(gamma, 1) != math.IsInf(got.Gamma, 1) || !math.IsInf(gamma, 1) && !close64(got.Gamma, gamma, 1e-4) ||
			!close64(got.Deviation, c.Fit.Deviation, 1e-4) {
			t.Errorf("case %d, %v: %+v, not %+v with γ %g", i, c.Observed, got, c.Fit, gamma)
			continue
		}
		for _, x := range c.Taus {
			if tau, _ := got.Tau(x[0], x[1]); !close64(tau, x[2], 1e-3) {
				t.Errorf("case %d: s %g, δ %g: τ is %g, not %g", i, x[0], x[1], tau, x[2])
			}
		}
	}
}

// TestVCacheKeepsItsPromise: with an entry whose curve is as the model says, at most δ of all requests are answered
// wrongly, once there is something to go by; and it serves.
func TestVCacheKeepsItsPromise(t *testing.T) {
	statistics(t)
	for _, delta := range []float64{0.02, 0.05} {
		wrong, served, requests := 0, 0, 0
		for seed := range uint64(20) {
			rng := rand.New(rand.NewPCG(seed, 9))
			p, b := &Policy{Mode: VCache, ErrorBound: delta}, NewBudget(&Policy{HitErrorBound: 1, ErrorBound: 1})
			var o Observations
			for range 500 {
				s := 0.5 + rng.Float64()/2
				same := rng.Float64() < logistic(25*(s-0.75))
				d := p.Decide(&Evidence{Similarity: s, Own: &o}, b, rng)
				requests++
				if d.Action != Serve {
					o.Add(s, d.Cell, same)
					continue
				}
				served++
				if !same {
					wrong++
				}
			}
		}
		t.Logf("δ %g: %d served of %d, %d wrong (seeds 0–19)", delta, served, requests, wrong)
		if rate := float64(wrong) / float64(requests); rate > delta || served < requests/10 {
			t.Errorf("δ %g: served %d of %d, %d wrong: %g of all", delta, served, requests, wrong, rate)
		}
	}
}

// TestVCacheExploresFirst: with less than six observations, the seeds among them, nothing is served.
func TestVCacheExploresFirst(t *testing.T) {
	var o Observations
	for range 4 {
		if f := o.Fit(); f.N >= minObserved {
			t.Fatalf("%+v", f)
		} else if tau, alpha := f.Tau(1, 0.2); tau != 1 || alpha != 0 {
			t.Errorf("%d observed: τ is %g, α %g", f.N, tau, alpha)
		}
		o.Add(0.9, 0, true)
	}
	f := o.Fit()
	if tau, _ := f.Tau(0.99, 0.2); tau >= 1 {
		t.Errorf("six observed, and τ is %g", tau)
	}
}
