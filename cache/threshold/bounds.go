package threshold

import "math"

// UpperBound is Clopper and Pearson's one-sided upper bound of a share of which wrong of n were seen:
// P(true share > bound) ≤ 1 − confidence for a number of looks that was fixed before. Without any it is 1.
func UpperBound(wrong, n int64, confidence float64) float64 {
	if n <= 0 || wrong >= n {
		return 1
	}
	wrong = max(wrong, 0)
	return betaQuantile(confidence, float64(wrong)+1, float64(n-wrong))
}

// LowerBound is Clopper and Pearson's one-sided lower bound: P(true share < bound) ≤ 1 − confidence. Without any, or
// without a wrong one, it is 0.
func LowerBound(wrong, n int64, confidence float64) float64 {
	if n <= 0 || wrong <= 0 {
		return 0
	}
	wrong = min(wrong, n)
	return betaQuantile(1-confidence, float64(wrong), float64(n-wrong)+1)
}

// betaQuantile is the x at which the regularised incomplete beta function of a, b > 0 is p, by bisection: it is
// monotone, and a look-up table or Newton's steps would only make errors at the ends possible.
func betaQuantile(p, a, b float64) float64 {
	lo, hi := 0.0, 1.0
	for range 60 { // to the last bits of a share that is not below 1e-18
		mid := (lo + hi) / 2
		if betaShare(mid, a, b) < p {
			lo = mid
		} else {
			hi = mid
		}
	}
	return (lo + hi) / 2
}

// betaShare is the regularised incomplete beta function I_x(a, b): the share of a Beta(a, b) distribution below x.
func betaShare(x, a, b float64) float64 {
	switch {
	case x <= 0:
		return 0
	case x >= 1:
		return 1
	}
	front := math.Exp(a*math.Log(x) + b*math.Log1p(-x) - logBeta(a, b))
	if x < (a+1)/(a+b+2) {
		return front * betaFraction(x, a, b) / a
	}
	return 1 - front*betaFraction(1-x, b, a)/b
}

// logBeta is ln B(a, b).
func logBeta(a, b float64) float64 {
	la, _ := math.Lgamma(a)
	lb, _ := math.Lgamma(b)
	lab, _ := math.Lgamma(a + b)
	return la + lb - lab
}

// maxFractionTerms bounds the continued fraction, whose length grows as the root of a and b: enough for 10⁹.
const maxFractionTerms = 100_000

// betaFraction is the continued fraction of I_x(a, b), by Lentz's method, which converges fast below the mean.
func betaFraction(x, a, b float64) float64 {
	const tiny = 1e-300
	nonzero := func(v float64) float64 {
		if math.Abs(v) < tiny {
			return tiny
		}
		return v
	}
	c, d := 1.0, 1/nonzero(1-(a+b)*x/(a+1))
	f := d
	for i := 1; i <= maxFractionTerms; i++ {
		m := float64(i)
		even := m * (b - m) * x / ((a + 2*m - 1) * (a + 2*m))
		d = 1 / nonzero(1+even*d)
		c = nonzero(1 + even/c)
		f *= d * c
		odd := -(a + m) * (a + b + m) * x / ((a + 2*m) * (a + 2*m + 1))
		d = 1 / nonzero(1+odd*d)
		c = nonzero(1 + odd/c)
		f *= d * c
		if math.Abs(d*c-1) < 1e-15 {
			break
		}
	}
	return f
}
