package lease

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/limiter"
)

// rates draws a rate and a share of it.
func rates(t *rapid.T) (limiter.Rate, uint32) {
	count := rapid.Int64Range(1, limiter.MaxUnits).Draw(t, "count")
	if rapid.Bool().Draw(t, "small") {
		count = rapid.Int64Range(1, 1e6).Draw(t, "small count")
	}
	per := rapid.SampledFrom([]time.Duration{1, time.Microsecond, time.Second, time.Minute, 24 * time.Hour, limiter.MaxSpan}).Draw(t, "per")
	share := uint32(rapid.SampledFrom([]int64{1, 2, 3, ShareOne / 7, ShareOne / 2, ShareOne - 1, ShareOne}).Draw(t, "share"))
	return limiter.Rate{Count: count, Per: per}, share
}

// exact is how long n units take, as a fraction.
func exact(r limiter.Rate, share uint32, n int64) *big.Rat {
	num := new(big.Int).Mul(big.NewInt(int64(r.Per)), big.NewInt(ShareOne))
	num.Mul(num, big.NewInt(n))
	den := new(big.Int).Mul(big.NewInt(r.Count), big.NewInt(int64(share)))
	return new(big.Rat).SetFrac(num, den)
}

func TestPaceIsExactToTheSafeSide(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, share := rates(t)
		p := newPace(r, share)
		n := rapid.Int64Range(0, limiter.MaxUnits).Draw(t, "n")
		want := exact(r, share, n)
		up, down := p.up(n), p.down(n)
		limit := new(big.Rat).SetInt64(math.MaxInt64)
		if want.Cmp(limit) >= 0 {
			if up != math.MaxInt64 {
				t.Fatalf("%d units of %v·%d take %d ns, want the most there is", n, r, share, up)
			}
			return
		}
		if new(big.Rat).SetInt64(up).Cmp(want) < 0 {
			t.Fatalf("up(%d) of %v·%d is %d, less than %v", n, r, share, up, want.FloatString(3))
		}
		// Two roundings of 2^-63 each, and to a whole nanosecond.
		slack := new(big.Rat).Add(want, new(big.Rat).Mul(want, big.NewRat(1, 1<<61)))
		slack.Add(slack, big.NewRat(1, 1))
		if up < math.MaxInt64 && new(big.Rat).SetInt64(up).Cmp(slack) > 0 {
			t.Fatalf("up(%d) of %v·%d is %d, more than %v", n, r, share, up, want.FloatString(3))
		}
		if down > up || up < math.MaxInt64 && up-down > 1 {
			t.Fatalf("down(%d) is %d where up is %d", n, down, up)
		}
		if down <= maxFill {
			if back := p.units(down, limiter.MaxUnits); back > n {
				t.Fatalf("units(down(%d)) is %d", n, back)
			}
			if back := p.units(up, math.MaxInt64); back < n {
				t.Fatalf("units(up(%d)) is %d", n, back)
			}
		}
	})
}

func TestPaceKnown(t *testing.T) {
	for _, c := range []struct {
		rate  limiter.Rate
		share uint32
		n, up int64
	}{
		{limiter.Rate{Count: 1000, Per: time.Second}, ShareOne, 3, 3e6},
		{limiter.Rate{Count: 1000, Per: time.Second}, ShareOne / 2, 3, 6e6},
		{limiter.Rate{Count: 3, Per: time.Second}, ShareOne, 1, 333333334},
		{limiter.Rate{Count: 3e9, Per: time.Second}, ShareOne, 1, 1},
		{limiter.Rate{Count: limiter.MaxUnits, Per: 1}, ShareOne, limiter.MaxUnits, 1},
		{limiter.Rate{Count: limiter.MaxUnits, Per: 1}, ShareOne, limiter.MaxUnits - 1, 1},
		{limiter.Rate{Count: 1, Per: limiter.MaxSpan}, 1, 1, math.MaxInt64},
	} {
		if got := newPace(c.rate, c.share).up(c.n); got != c.up {
			t.Errorf("%d units of %v·%d take %d ns, want %d", c.n, c.rate, c.share, got, c.up)
		}
	}
}

func TestCarryNeverGains(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, a := rates(t)
		q, b := rates(t)
		from, to := newPace(r, a), newPace(q, b)
		ns := rapid.Int64Range(0, maxFill).Draw(t, "ns")
		got := from.carry(ns, to, maxFill)
		// ns/T tokens are ns·T'/T of the other.
		want := new(big.Rat).Quo(exact(q, b, 1), exact(r, a, 1))
		want.Mul(want, new(big.Rat).SetInt64(ns))
		slack := new(big.Rat).Add(want, new(big.Rat).Mul(want, big.NewRat(1, 1<<60)))
		if new(big.Rat).SetInt64(got).Cmp(slack) > 0 {
			t.Fatalf("%d ns of %v·%d carry to %d of %v·%d, more than %v", ns, r, a, got, q, b, want.FloatString(3))
		}
		if got < maxFill {
			// It loses no more than a nanosecond of either.
			low := new(big.Rat).Sub(want, big.NewRat(2, 1))
			low.Sub(low, new(big.Rat).Mul(big.NewRat(2, 1), new(big.Rat).Quo(exact(q, b, 1), exact(r, a, 1))))
			low.Sub(low, new(big.Rat).Mul(want, big.NewRat(1, 1<<60)))
			if new(big.Rat).SetInt64(got).Cmp(low) < 0 {
				t.Fatalf("%d ns of %v·%d carry to %d of %v·%d, less than %v", ns, r, a, got, q, b, want.FloatString(3))
			}
		}
	})
}
