package cache

import (
	"math"
	"math/rand/v2"
	"time"
)

// freshness is what may be done with an entry at an age.
type freshness int

const (
	fresh       freshness = iota // serve it
	freshEarly                   // serve it, and let one refresh it: it expires before long
	freshStale                   // serve it while one refreshes it
	freshOnFail                  // serve it only where the model fails
	freshDead                    // never serve it
)

// freshTails bounds how many times δ·β before its expiry an entry may be refreshed early. A draw
// has 53 bits, so that -ln u is at most 53·ln 2 = 36.74; before that no draw is needed.
const freshTails = 37

// jitterShare is by how much of itself a lifetime is shortened or prolonged at most.
const jitterShare = 0.1

// Jitter changes TTL and MaxTTL by the same share of ±10 %, so that answers of one moment do not
// expire in one moment. The filler draws it, once: copies on other nodes agree.
func Jitter(l Life, r *rand.Rand) Life {
	f := 1 + jitterShare*(2*r.Float64()-1)
	l.TTL = freshScale(l.TTL, f)
	l.MaxTTL = freshScale(l.MaxTTL, f)
	return l
}

// freshScale multiplies a lifetime; one that there was remains.
func freshScale(d time.Duration, f float64) time.Duration {
	if d <= 0 {
		return d
	}
	return max(1, time.Duration(min(float64(d)*f, float64(freshLongest))))
}

// freshLongest bounds sums of lifetimes, far from where they overflow: 73 years.
const freshLongest = time.Duration(math.MaxInt64) / 4

// ceiling is the age that no number of hits takes an entry's expiry beyond.
func (l Life) ceiling() time.Duration {
	c := l.MaxTTL
	if c <= 0 {
		c = l.TTL
	}
	return min(max(c, 0), freshLongest)
}

// expiry is the age at which an entry expires that was hit so often, the last time at age last:
// half its TTL without a hit, its TTL after the first, and a TTL from the last one on after that.
func (l Life) expiry(hits uint32, last time.Duration) time.Duration {
	ttl := min(max(l.TTL, 0), freshLongest)
	switch hits {
	case 0:
		ttl /= 2
	case 1:
	default:
		ttl += min(max(last, 0), freshLongest)
	}
	return min(ttl, l.ceiling())
}

// longest is the age from which an entry is dead whatever hits it gets.
func (l Life) longest() time.Duration {
	return l.after(l.ceiling(), l.Stale, l.StaleIfError)
}

// after adds what is not negative, without overflow.
func (Life) after(d time.Duration, more ...time.Duration) time.Duration {
	for _, m := range more {
		d = min(d+min(max(m, 0), freshLongest), freshLongest)
	}
	return d
}

// state tells what an entry of this age that expires at expiry may be used for; not that it
// should be refreshed early: see early.
func (l Life) state(age, expiry time.Duration) freshness {
	switch {
	case age < expiry:
		return fresh
	case age < l.after(expiry, l.Stale):
		return freshStale
	case age < l.after(expiry, l.Stale, l.StaleIfError):
		return freshOnFail
	default:
		return freshDead
	}
}

// mayEarly says whether some draw would refresh a fresh entry early: the question that costs
// nothing, before one that needs a draw.
func (l Life) mayEarly(age, expiry, delta time.Duration) bool {
	return l.Beta > 0 && delta > 0 && float64(expiry-age) <= freshTails*float64(delta)*l.Beta
}

// early decides whether whoever reads a fresh entry should refresh it before it expires: where
//
//	age ≥ expiry − δ·β·(−ln u)
//
// with δ how long the fill took and u uniform in (0, 1]: XFetch, of Vattani, Chierichetti and
// Lowenstein, "Optimal Probabilistic Cache Stampede Prevention", VLDB 2015. One reader a time
// constant and expected gap of δ: no two of a crowd are likely to draw it at once.
func (l Life) early(age, expiry, delta time.Duration, u float64) bool {
	return l.mayEarly(age, expiry, delta) && float64(expiry-age) <= float64(delta)*l.Beta*-math.Log(u)
}

// freshDraw is uniform in (0, 1], in steps of 2⁻⁵³.
func freshDraw(r *rand.Rand) float64 {
	return float64(r.Uint64()>>11+1) / (1 << 53)
}

// judge decides about an entry of this age that got so many hits while it was fresh, the last at
// age last. It counts the hit that it is asked for: early weighs the expiry that this hit makes.
// draw is called at most once, and not where no draw would change the answer.
func (l Life) judge(age time.Duration, hits uint32, last, delta time.Duration, draw func() float64) freshness {
	age = max(age, 0)
	s := l.state(age, l.expiry(hits, last))
	if s != fresh {
		return s
	}
	expiry := l.expiry(freshCount(hits), age)
	if l.mayEarly(age, expiry, delta) && l.early(age, expiry, delta, draw()) {
		return freshEarly
	}
	return fresh
}

// freshCount adds a hit. Two are as good as many: nothing depends on more.
func freshCount(hits uint32) uint32 { return min(hits, 1) + 1 }
