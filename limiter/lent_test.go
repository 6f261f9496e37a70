package limiter_test

import (
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/limiter"
)

func someGCRA(t *rapid.T, what string) *limiter.Limit {
	return &limiter.Limit{
		Rate: limiter.Rate{
			Count: rapid.Int64Range(1, 1e9).Draw(t, what+" count"),
			Per:   time.Duration(rapid.SampledFrom([]int64{1, 1e3, 1e9, 60e9, 7e9 + 1}).Draw(t, what+" per")),
		},
		Burst: rapid.Int64Range(1, 1e6).Draw(t, what+" burst"),
	}
}

// bigBucket is the same in exact fractions: what is missing from a full bucket, in units.
type bigBucket struct {
	limit   *limiter.Limit
	deficit *big.Rat
	last    int64
}

func (b *bigBucket) advance(now int64, share uint64, outstanding int64) {
	own := new(big.Rat).Sub(big.NewRat(1, 1), new(big.Rat).SetFrac(new(big.Int).SetUint64(share), big.NewInt(limiter.ShareOne)))
	refill := new(big.Rat).Mul(big.NewRat(now-b.last, int64(b.limit.Rate.Per)), big.NewRat(b.limit.Rate.Count, 1))
	b.deficit.Sub(b.deficit, refill.Mul(refill, own))
	if least := big.NewRat(outstanding, 1); b.deficit.Cmp(least) < 0 {
		b.deficit.Set(least)
	}
	b.last = now
}

func (b *bigBucket) level() *big.Rat {
	return new(big.Rat).Sub(big.NewRat(b.limit.Burst, 1), b.deficit)
}

// TestAdvanceIsExact: however often it is brought to now, a bucket that lends is never above the exact
// one, and below it by no more than the roundings: less than 1/Count ns of refill a call, and what of a
// unit a level does not show.
func TestAdvanceIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := someGCRA(t, "limit")
		now := int64(1e9)
		var s limiter.State
		l.Advance(&s, now, 0, 0)
		exact := &bigBucket{limit: l, deficit: new(big.Rat), last: now}
		calls := int64(0)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.Int64Range(0, 5e9).Draw(t, "ns")
			share := rapid.Uint64Range(0, 2*limiter.ShareOne).Draw(t, "share")
			outstanding := rapid.Int64Range(0, l.Burst).Draw(t, "outstanding")
			l.Advance(&s, now, share, outstanding)
			exact.advance(now, share, outstanding)
			calls++
			units := rapid.Int64Range(0, 2*l.Burst).Draw(t, "units")
			if rapid.Bool().Draw(t, "credit") {
				l.Credit(&s, now, units, outstanding)
				exact.deficit.Sub(exact.deficit, big.NewRat(units, 1))
				exact.advance(now, 0, outstanding)
			} else {
				l.Debit(&s, now, units)
				exact.deficit.Add(exact.deficit, big.NewRat(units, 1))
			}
			level := big.NewRat(l.Level(&s, now), 1)
			if level.Cmp(exact.level()) > 0 {
				t.Fatalf("level %v, exactly %v", level, exact.level().FloatString(3))
			}
			slack := new(big.Rat).Add(big.NewRat(1, 1), big.NewRat(calls, int64(l.Rate.Per)))
			if low := new(big.Rat).Sub(exact.level(), slack); level.Cmp(low) < 0 {
				t.Fatalf("level %v, exactly %v, after %d calls", level, exact.level().FloatString(3), calls)
			}
			if v := l.Level(&s, now); v > l.Burst-outstanding {
				t.Fatalf("level %d and %d outstanding of %d", v, outstanding, l.Burst)
			}
		}
	})
}

// TestUntilIsTrue: a cost conforms after Until's wait, and not a nanosecond earlier but for roundings.
func TestUntilIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := someGCRA(t, "limit")
		now := int64(1e9)
		var s limiter.State
		share := rapid.Uint64Range(0, limiter.ShareOne).Draw(t, "share")
		outstanding := rapid.Int64Range(0, l.Burst).Draw(t, "outstanding")
		l.Debit(&s, now, rapid.Int64Range(0, 3*l.Burst).Draw(t, "spent"))
		l.Advance(&s, now, 0, outstanding)
		cost := rapid.Int64Range(1, l.Burst).Draw(t, "cost")
		wait := l.Until(&s, now, cost, share, outstanding)
		switch {
		case wait == limiter.Never:
			if cost <= l.Burst-outstanding && share < limiter.ShareOne {
				t.Fatalf("%d of %d never conforms, with %d outstanding and %d of the rate lent", cost, l.Burst, outstanding, share)
			}
			return
		case wait > 1<<60:
			return
		}
		at := func(ns int64) bool {
			c := s.Clone()
			l.Advance(&c, now+ns, share, outstanding)
			return l.Take(&c, now+ns, cost, limiter.Refuse).Admitted
		}
		if !at(int64(wait) + 1) {
			t.Fatalf("after %v %d does not conform", wait, cost)
		}
		if wait > 1 && at(int64(wait)-1) {
			t.Fatalf("%d conforms before %v", cost, wait)
		}
	})
}

// TestShareIsNoLess: a converted share is at least the same rate, and not much more.
func TestShareIsNoLess(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from, to := someGCRA(t, "from"), someGCRA(t, "to")
		share := rapid.Uint64Range(0, limiter.ShareOne).Draw(t, "share")
		rate := func(l *limiter.Limit, share uint64) *big.Rat {
			r := big.NewRat(l.Rate.Count, int64(l.Rate.Per))
			return r.Mul(r, new(big.Rat).SetInt(new(big.Int).SetUint64(share)))
		}
		got := to.Share(share, from)
		if got >= 1<<40 {
			return // it is cut off there
		}
		if rate(to, got).Cmp(rate(from, share)) < 0 || got > 0 && rate(to, got-1).Cmp(rate(from, share)) >= 0 && to.Rate != from.Rate {
			t.Fatalf("%d of %v became %d of %v", share, from.Rate, got, to.Rate)
		}
	})
}

// TestCreditOfTheOthers: windows keep what is outstanding, logs free the oldest, semaphores slots.
func TestCreditOfTheOthers(t *testing.T) {
	w := &limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 10, Per: time.Second}}
	var s limiter.State
	w.Debit(&s, 5e9, 8)
	w.Credit(&s, 5e9, 6, 5)
	if got := w.Level(&s, 5e9); got != 5 {
		t.Errorf("a window with 5 outstanding has %d of 10 left", got)
	}
	if w.Advance(&s, 6e9, 0, 0); w.Level(&s, 6e9) != 10 {
		t.Errorf("the next window has %d of 10", w.Level(&s, 6e9))
	}
	g := &limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 10, Per: 10 * time.Second}}
	s = limiter.State{}
	g.Take(&s, 1e9, 4, limiter.Refuse)
	g.Take(&s, 5e9, 5, limiter.Refuse)
	g.Credit(&s, 6e9, 5, 0)
	if got := g.Level(&s, 6e9); got != 6 {
		t.Errorf("a log of 4 and 5 less 5 has %d of 10 left", got)
	}
	if got := g.Level(&s, 11.5e9); got != 6 { // the newest counts as long as it would have
		t.Errorf("it has %d of 10 left when the older one is over", got)
	}
	p := &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 4}
	s = limiter.State{}
	p.Debit(&s, 1, 3)
	p.Credit(&s, 2, 2, 0)
	if got := p.Level(&s, 2); got != 3 {
		t.Errorf("%d of 4 slots are free", got)
	}
}
