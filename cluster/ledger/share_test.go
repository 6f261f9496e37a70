package ledger

import (
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/limiter"
)

// TestSharesAddUp: over all ranks every count is the limit's, every rate is its or below it
// by less than a unit a period for each member, and what a rank holds is a valid limit.
func TestSharesAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limiter.Limit{Algorithm: limiter.Algorithm(rapid.IntRange(0, 4).Draw(t, "algorithm")), Revision: 3}
		count := rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, limiter.MaxUnits))
		if l.Algorithm == limiter.Semaphore || l.Algorithm == limiter.GCRA {
			l.Burst = count.Draw(t, "burst")
		}
		if l.Algorithm != limiter.Semaphore {
			l.Rate = limiter.Rate{Count: count.Draw(t, "rate"), Per: rapid.SampledFrom([]time.Duration{1, time.Second, time.Minute, 24 * time.Hour, limiter.MaxSpan}).Draw(t, "per")}
		}
		if l.Validate() != nil {
			t.Skip("no limit")
		}
		of := rapid.OneOf(rapid.IntRange(0, 5), rapid.IntRange(1, maxMembers)).Draw(t, "of")
		units, rate, least := int64(0), new(big.Rat), new(big.Rat)
		for rank := range max(of, 1) {
			part := l
			if (Share{Rank: rank, Of: of}).split(&part) {
				if part != l {
					t.Fatalf("nothing of %+v is %+v", l, part)
				}
				continue
			}
			if err := part.Validate(); err != nil || part.Revision != 3 {
				t.Fatalf("rank %d of %d holds %+v: %v", rank, of, part, err)
			}
			units += part.Capacity()
			if l.Algorithm == limiter.GCRA {
				rate.Add(rate, big.NewRat(part.Rate.Count, int64(part.Rate.Per)))
				least.Add(least, big.NewRat(1, int64(l.Rate.Per)))
			}
		}
		if units != l.Capacity() {
			t.Fatalf("the shares of %+v between %d add up to %d", l, of, units)
		}
		if l.Algorithm == limiter.GCRA {
			whole := big.NewRat(l.Rate.Count, int64(l.Rate.Per))
			if rate.Cmp(whole) > 0 || rate.Add(rate, least).Cmp(whole) < 0 {
				t.Fatalf("the rates of %+v between %d add up to %v", l, of, rate)
			}
		}
	})
}

func TestRatesAreDividedExactly(t *testing.T) {
	for _, c := range []struct {
		of          int
		burst, part int64
		rate, want  string
	}{
		{3, 7, 2, "10/s", "10/3s"},
		{3, 9, 3, "60000/min", "20000/min"},
		{4, 2, 1, "1/day", "1/2day"}, // two members hold one each, and half of the rate
		{1, 5, 5, "5/s", "5/s"},
	} {
		r, err := limiter.ParseRate(c.rate)
		must(t, err)
		l := limiter.Limit{Rate: r, Burst: c.burst}
		rank := c.of - 1
		if c.burst%int64(c.of) != 0 && c.burst > int64(c.of) {
			rank = 0 // the last rank's is rounded up
		}
		if none := (Share{Rank: rank, Of: c.of}).split(&l); none || l.Rate.String() != c.want || l.Burst != c.part {
			t.Errorf("a share of %s, %d between %d is %v, %d (none: %v)", c.rate, c.burst, c.of, l.Rate, l.Burst, none)
		}
	}
}

// TestLeastIsWhatEveryRankHolds: no rank has less, so that it may be spent whatever the ranks are.
func TestLeastIsWhatEveryRankHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		of := rapid.IntRange(1, 50).Draw(t, "of")
		l := limiter.Limit{Rate: limiter.Rate{Count: rapid.Int64Range(1, 1000).Draw(t, "rate"), Per: time.Second}, Burst: rapid.Int64Range(1, 100).Draw(t, "burst")}
		least := l
		none := (Share{Of: of, Least: true}).split(&least)
		for rank := range of {
			part := l
			if without := (Share{Rank: rank, Of: of}).split(&part); without && !none || !none && part.Burst < least.Burst {
				t.Fatalf("rank %d of %d holds %+v, the least is %+v", rank, of, part, least)
			}
		}
	})
}

func TestIndexOfAShare(t *testing.T) {
	p := mustParse(t, example)
	keys := keysOf(t, p.Keys...)
	now := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC) // standing 0.5, ramp done
	units, nones := map[string]int64{}, map[string]int{}
	const of = 5
	for rank := range of {
		ix, err := p.Index(now, 1, Share{Rank: rank, Of: of}, keys)
		must(t, err)
		c, _ := ix.Lookup([32]byte{})
		for _, l := range c.Limits {
			if l.None {
				nones[l.Name]++
			} else {
				units[l.Name] += l.Spec.Capacity()
			}
		}
	}
	for name, want := range map[string]int64{"org-tokens": 30_000, "key-requests": 25, "key-inflight": 4, "org-day": 50_000, "money": 1_250_000_000, "per-model": 10, "fleet": 2_000_000} {
		if units[name] != want {
			t.Errorf("%s adds up to %d, want %d", name, units[name], want)
		}
	}
	if nones["key-inflight"] != 1 || len(nones) != 1 {
		t.Errorf("4 slots between 5 leave one without: %v", nones)
	}
	for _, s := range []Share{{Rank: 1, Of: 1}, {Rank: -1, Of: 2}, {Rank: 2, Of: 2}, {Rank: 1}, {Of: maxMembers + 1}} {
		if _, err := p.Index(now, 1, s, keys); err == nil {
			t.Errorf("%+v was taken for a share", s)
		}
	}
}
