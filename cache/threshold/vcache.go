package threshold

import "math"

// Fit is vCache's estimate of the similarity from which an entry's answer is right: L(s) = 1/(1 + exp(−γ(s − t))).
type Fit struct {
	N         int     // observations, the two seeds among them
	T         float64 // t̂, in [0, 1]
	Gamma     float64 // ≥ 1e-6; +Inf where right and wrong are separated, which has no finite fit
	Deviation float64 // √Var(t̂)
}

const (
	minObserved = 6    // with fewer, the seeds among them, vCache explores
	minGamma    = 1e-6 // a curve that falls is taken for one that is flat
)

// Fit is the maximum likelihood estimate of the entry's observations with the seeds (0, wrong) and (1, right). It is
// kept until something is added. A nil receiver is an entry without observations.
func (o *Observations) Fit() Fit {
	if o == nil {
		return Fit{N: 2, T: 0.5, Gamma: math.Inf(1), Deviation: separatedDeviation(2)}
	}
	if !o.fitted {
		o.fit, o.fitted = o.estimate(), true
	}
	return o.fit
}

func (o *Observations) estimate() Fit {
	f := Fit{N: len(o.all) + 2}
	wrong, right := 0.0, 1.0 // the most similar that was wrong, the least similar that was right: the seeds
	for _, x := range o.all {
		if x.same {
			right = min(right, float64(x.s))
		} else {
			wrong = max(wrong, float64(x.s))
		}
	}
	if wrong > right {
		if b, gamma, ok := o.climb(); ok {
			f.Gamma = max(gamma, minGamma)
			f.T = min(max(-b/f.Gamma, 0), 1)
			f.Deviation = o.deviation(b, f.Gamma)
			return f
		}
	}
	// Without overlap the likelihood grows with γ without end; on its way the curve's middle tends to that of the gap.
	f.Gamma, f.T, f.Deviation = math.Inf(1), (wrong+right)/2, separatedDeviation(f.N)
	return f
}

// each calls f with all observations and the seeds.
func (o *Observations) each(f func(s, c float64)) {
	f(0, 0)
	f(1, 1)
	for _, x := range o.all {
		c := 0.0
		if x.same {
			c = 1
		}
		f(float64(x.s), c)
	}
}

// maxSteps bounds Newton's method, which takes some ten steps where the likelihood has a maximum.
const maxSteps = 100

// climb maximises the likelihood of logit = b + γs by Newton's method, with steps halved while they lead down.
func (o *Observations) climb() (b, gamma float64, ok bool) {
	likelihood := func(b, gamma float64) (sum float64) {
		o.each(func(s, c float64) {
			z := b + gamma*s
			sum += c*z - softplus(z)
		})
		return sum
	}
	at := likelihood(b, gamma)
	for range maxSteps {
		var gb, gg, hbb, hbg, hgg float64
		o.each(func(s, c float64) {
			p := logistic(b + gamma*s)
			w := p * (1 - p)
			gb, gg = gb+c-p, gg+(c-p)*s
			hbb, hbg, hgg = hbb+w, hbg+w*s, hgg+w*s*s
		})
		det := hbb*hgg - hbg*hbg
		if !(det > 1e-290) {
			return 0, 0, false
		}
		db, dg := (hgg*gb-hbg*gg)/det, (hbb*gg-hbg*gb)/det
		step, next := 1.0, likelihood(b+db, gamma+dg)
		for next < at && step > 1e-9 {
			step /= 2
			next = likelihood(b+step*db, gamma+step*dg)
		}
		if next < at {
			return b, gamma, true // rounding leads down in all directions: the top
		}
		b, gamma, at = b+step*db, gamma+step*dg, next
		if math.Abs(db) < 1e-8*(1+math.Abs(b)) && math.Abs(dg) < 1e-8*(1+math.Abs(gamma)) {
			return b, gamma, true
		}
	}
	return b, gamma, true // as near as it gets: there is a maximum, since right and wrong overlap
}

// deviation is √(gᵀH⁻¹g), g = (−1/γ, b/γ²): the delta method.
func (o *Observations) deviation(b, gamma float64) float64 {
	var hbb, hbg, hgg float64
	o.each(func(s, _ float64) {
		p := logistic(b + gamma*s)
		w := p * (1 - p)
		hbb, hbg, hgg = hbb+w, hbg+w*s, hgg+w*s*s
	})
	g1, g2 := -1/gamma, b/(gamma*gamma)
	v := (g1*g1*hgg - 2*g1*g2*hbg + g2*g2*hbb) / (hbb*hgg - hbg*hbg)
	if !(v >= 0) {
		return math.Inf(1)
	}
	return math.Sqrt(v)
}

// separated holds the variance of t̂ where right and wrong are separated, by the number of observations.
var separated = [...]struct{ n, variance float64 }{{6, .0354}, {10, .0194}, {15, .0093}, {20, .0131}, {30, .0080}, {40, .0052}, {48, .0153}}

// separatedDeviation reads the table, in between along straight lines.
func separatedDeviation(n int) float64 {
	x, last := float64(n), separated[0]
	for _, next := range separated {
		if x <= next.n {
			share := 0.0
			if next.n > last.n {
				share = max(0, (x-last.n)/(next.n-last.n))
			}
			return math.Sqrt(last.variance + share*(next.variance-last.variance))
		}
		last = next
	}
	return math.Sqrt(last.variance)
}

// riskPoints is the length of the grid on which the confidence of t′ is searched.
const riskPoints = 50

// risk is the i-th ε of the grid. Its ends are all but 0 and 1: were the least 1/51, nothing could ever be served with
// more than even chances at δ = .01.
func risk(i int) float64 {
	const end = 1e-6
	return end + float64(i)*(1-2*end)/(riskPoints-1)
}

// Tau is the probability with which a question of similarity s is to be explored so that at most delta of all are
// answered wrongly; and the confidence α at which it was found, a lower bound of the probability that the answer is right.
// 1 is "explore", 0 and less "serve". With fewer than six observations, the seeds among them, it is 1.
func (f *Fit) Tau(s, delta float64) (tau, alpha float64) {
	if f.N < minObserved {
		return 1, 0
	}
	for i := range riskPoints {
		e := risk(i)
		t := f.T
		if f.Deviation > 0 {
			t = min(max(t+normalQuantile(1-e)*f.Deviation, 0), 1)
		}
		alpha = max(alpha, (1-e)*f.right(s, t))
	}
	if alpha >= 1 {
		return 0, alpha
	}
	return 1 - delta/(1-alpha), alpha // the least over ε is where α is greatest
}

// right is L(s; t, γ).
func (f *Fit) right(s, t float64) float64 {
	switch {
	case !math.IsInf(f.Gamma, 1):
		return logistic(f.Gamma * (s - t))
	case s > t:
		return 1
	case s < t:
		return 0
	}
	return 0.5
}

func logistic(z float64) float64 { return 1 / (1 + math.Exp(-z)) }

// softplus is ln(1 + exp z).
func softplus(z float64) float64 { return max(z, 0) + math.Log1p(math.Exp(-math.Abs(z))) }

// normalQuantile is Φ⁻¹(p).
func normalQuantile(p float64) float64 { return math.Sqrt2 * math.Erfinv(2*p-1) }
