package cache

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func noDraw(t *testing.T) func() float64 {
	return func() float64 {
		t.Helper()
		t.Fatal("a draw where none could change the answer")
		return 0
	}
}

func TestLifeExpiry(t *testing.T) {
	const m = time.Minute
	flat, long := Life{TTL: 60 * m}, Life{TTL: 60 * m, MaxTTL: 180 * m}
	for _, c := range []struct {
		what string
		life Life
		hits uint32
		last time.Duration
		want time.Duration
	}{
		{"never hit: half", flat, 0, 0, 30 * m},
		{"the first hit: whole", flat, 1, 20 * m, 60 * m},
		{"without a MaxTTL that is all", flat, 2, 50 * m, 60 * m},
		{"never hit: half, whatever the ceiling", long, 0, 0, 30 * m},
		{"the first hit extends no further", long, 1, 29 * m, 60 * m},
		{"later ones do, from when they were", long, 2, 50 * m, 110 * m},
		{"at most to MaxTTL", long, 2, 150 * m, 180 * m},
		{"MaxTTL below TTL is a ceiling, too", Life{TTL: 60 * m, MaxTTL: 20 * m}, 1, 0, 20 * m},
		{"and for the half", Life{TTL: 60 * m, MaxTTL: 20 * m}, 0, 0, 20 * m},
		{"no life", Life{}, 2, 0, 0},
		{"a negative one is none", Life{TTL: -m, MaxTTL: -m}, 2, m, 0},
	} {
		if got := c.life.expiry(c.hits, c.last); got != c.want {
			t.Errorf("%s: expires at %v, want %v", c.what, got, c.want)
		}
	}
}

func TestLifeState(t *testing.T) {
	const s = time.Second
	l := Life{TTL: 100 * s, Stale: 10 * s, StaleIfError: 20 * s}
	for _, c := range []struct {
		life Life
		age  time.Duration
		want freshness
	}{
		{l, 0, fresh},
		{l, 100*s - 1, fresh},
		{l, 100 * s, freshStale},
		{l, 110*s - 1, freshStale},
		{l, 110 * s, freshOnFail},
		{l, 130*s - 1, freshOnFail},
		{l, 130 * s, freshDead},
		{Life{TTL: 100 * s}, 100 * s, freshDead},
		{Life{TTL: 100 * s, StaleIfError: s}, 100 * s, freshOnFail},
		{Life{}, 0, freshDead},
	} {
		if got := c.life.judge(c.age, 1, 0, 0, noDraw(t)); got != c.want {
			t.Errorf("%+v at %v is %d, want %d", c.life, c.age, got, c.want)
		}
	}
}

// An entry that is hit in the second half of the life that it would have without is refreshed
// early only where the life that the hit gives it is near its end.
func TestHitWeighsTheExpiryThatItMakes(t *testing.T) {
	l := Life{TTL: time.Hour, MaxTTL: 3 * time.Hour, Beta: 1}
	always := func() float64 { return math.SmallestNonzeroFloat64 }
	if got := l.judge(30*time.Minute-1, 0, 0, 10*time.Second, noDraw(t)); got != fresh {
		t.Errorf("just before half its TTL an entry is %d, want fresh: the hit makes it the whole", got)
	}
	if got := l.judge(2*time.Hour-1, 2, time.Hour, 10*time.Second, noDraw(t)); got != fresh {
		t.Errorf("just before it expires a hot entry is %d, want fresh: the hit extends it", got)
	}
	if got := l.judge(3*time.Hour-time.Second, 2, 170*time.Minute, 10*time.Second, always); got != freshEarly {
		t.Errorf("just before MaxTTL an entry is %d, want to be refreshed", got)
	}
}

// P(early) = P(−ln u ≥ g) = e^−g, where g is the time that is left in units of δ·β.
func TestEarlyRefreshesByItsFormula(t *testing.T) {
	const n = 100_000
	r := rand.New(rand.NewPCG(1, 2))
	delta := 3 * time.Second
	for _, beta := range []float64{0.5, 1, 2} {
		l := Life{TTL: time.Hour, Beta: beta}
		for _, g := range []float64{0.01, 0.25, 1, 2, 4, 7} {
			age := l.TTL - time.Duration(g*beta*float64(delta))
			early := 0
			for range n {
				if l.judge(age, 1, 0, delta, func() float64 { return freshDraw(r) }) == freshEarly {
					early++
				}
			}
			p := math.Exp(-g)
			if sigma := math.Sqrt(n * p * (1 - p)); math.Abs(float64(early)-n*p) > 5*sigma+1 {
				t.Errorf("β %v, %v δβ before: %d of %d refresh, want %.0f ± %.0f", beta, g, early, n, n*p, 5*sigma)
			}
		}
	}
}

// The draw is spared where it could not matter, and only there.
func TestNoDrawWhereNoneCouldRefresh(t *testing.T) {
	if least := 1.0 / (1 << 53); -math.Log(least) > freshTails {
		t.Errorf("a draw may be %v, for which freshTails is too few", least)
	}
	l := Life{TTL: time.Hour, Beta: 1}
	l.judge(l.TTL-freshTails*time.Second-1, 1, 0, time.Second, noDraw(t))
	Life{TTL: time.Hour}.judge(time.Hour-1, 1, 0, time.Second, noDraw(t)) // β 0: never
	l.judge(time.Hour-1, 1, 0, 0, noDraw(t))                              // a fill that took no time
	r := rand.New(rand.NewPCG(5, 6))
	for range 10_000 {
		if u := freshDraw(r); u <= 0 || u > 1 {
			t.Fatalf("drew %v", u)
		}
	}
}

func lives(t *rapid.T) Life {
	d := rapid.OneOf(rapid.Int64Range(0, int64(time.Hour)), rapid.Int64Range(math.MinInt64, math.MaxInt64))
	return Life{
		TTL:          time.Duration(d.Draw(t, "ttl")),
		MaxTTL:       time.Duration(d.Draw(t, "max ttl")),
		Stale:        time.Duration(d.Draw(t, "stale")),
		StaleIfError: time.Duration(d.Draw(t, "stale if error")),
		Beta:         rapid.Float64Range(0, 4).Draw(t, "beta"),
	}
}

// However an entry is hit: it is not fresh from its ceiling on, nor, without a hit, from half its
// TTL on; it is dead from the longest life on; and its state only ever gets worse without hits.
func TestNoHitsOutliveTheCeiling(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	rapid.Check(t, func(t *rapid.T) {
		l := lives(t)
		delta := time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "delta"))
		var age, last time.Duration
		var hits uint32
		for range rapid.IntRange(1, 30).Draw(t, "reads") {
			step := time.Duration(rapid.Int64Range(0, max(1, int64(l.ceiling())/4)).Draw(t, "step"))
			if age > math.MaxInt64-step {
				return
			}
			age += step
			expiry := l.expiry(hits, last)
			state := l.judge(age, hits, last, delta, func() float64 { return freshDraw(r) })
			switch {
			case expiry < 0 || expiry > l.ceiling():
				t.Fatalf("expires at %v, beyond %v", expiry, l.ceiling())
			case state <= freshEarly && age >= l.ceiling():
				t.Fatalf("fresh at %v, beyond %v", age, l.ceiling())
			case hits == 0 && state <= freshEarly && age >= max(l.TTL, 0)/2:
				t.Fatalf("fresh at %v without a hit: its TTL is %v", age, l.TTL)
			case age >= l.longest() && state != freshDead:
				t.Fatalf("not dead at %v, after %v", age, l.longest())
			case l.state(age, expiry) > l.state(age+min(step, math.MaxInt64-age), expiry):
				t.Fatalf("better off at %v than at %v", age+step, age)
			}
			if state <= freshEarly {
				if next := l.expiry(freshCount(hits), age); next < expiry {
					t.Fatalf("a hit at %v brings the expiry from %v to %v", age, expiry, next)
				}
				hits, last = freshCount(hits), age
			}
		}
	})
}

func TestJitter(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	var least, most float64 = 2, 0
	for range 10_000 {
		l := Jitter(Life{TTL: time.Hour, MaxTTL: 4 * time.Hour, Stale: time.Minute, StaleIfError: time.Hour, Beta: 1}, r)
		f := float64(l.TTL) / float64(time.Hour)
		least, most = min(least, f), max(most, f)
		if math.Abs(float64(l.MaxTTL)/float64(4*time.Hour)-f) > 1e-9 {
			t.Fatalf("TTL %v and MaxTTL %v are not changed alike", l.TTL, l.MaxTTL)
		}
		if l.Stale != time.Minute || l.StaleIfError != time.Hour || l.Beta != 1 {
			t.Fatalf("more than the TTLs changed: %+v", l)
		}
	}
	if least < 0.9 || least > 0.905 || most > 1.1 || most < 1.095 {
		t.Errorf("changes by %v to %v, want all of 0.9 to 1.1", least, most)
	}
	if l := Jitter(Life{TTL: 1}, r); l.TTL != 1 || l.MaxTTL != 0 {
		t.Errorf("1 ns and none became %v and %v", l.TTL, l.MaxTTL)
	}
	if l := Jitter(Life{TTL: math.MaxInt64}, r); l.TTL <= 0 {
		t.Errorf("the longest life became %v", l.TTL)
	}
}
