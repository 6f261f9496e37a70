package ledger

import (
	"math/big"
	"strings"
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

// TestWholeAndPrivate: the whole is numbered alike on every node and not cut; the private part is
// the node's share, numbered by itself.
func TestWholeAndPrivate(t *testing.T) {
	p := mustParse(t, example)
	young, grown := time.Date(2026, 1, 20, 0, 0, 0, 0, time.UTC), time.Date(2026, 1, 29, 0, 0, 0, 0, time.UTC)
	limits := func(now time.Time, n Numbers, s Share) map[string]ResolvedLimit {
		t.Helper()
		ix, err := p.IndexAt(now, n, s, keysOf(t, p.Keys...))
		must(t, err)
		if ix.Revision != n.Local {
			t.Errorf("the index is %d, not %d", ix.Revision, n.Local)
		}
		c, ok := ix.Lookup([32]byte{})
		if !ok {
			t.Fatal("the key is gone")
		}
		out := map[string]ResolvedLimit{}
		for _, l := range c.Limits {
			out[l.Name] = l
		}
		return out
	}
	a := limits(young, Numbers{Policy: 9, Local: 3}, Share{Rank: 0, Of: 5})
	b := limits(young, Numbers{Policy: 9, Local: 70}, Share{Rank: 4, Of: 5})
	for name, l := range a {
		if *l.Whole != *b[name].Whole {
			t.Errorf("%s is %+v on one node and %+v on another", name, l.Whole, b[name].Whole)
		}
		if (l.Private == nil) != (name == "key-inflight") || l.Private != nil && l.Private.Revision != 3 || b[name].Private == nil || b[name].Private.Revision != 70 {
			t.Errorf("%s: the private part is %+v, %+v elsewhere", name, l.Private, b[name].Private)
		}
	}
	if got := *a["org-tokens"].Whole; got != (limiter.Limit{Rate: limiter.Rate{Count: 6000, Per: time.Minute}, Burst: 6000, Revision: 9<<20 | 1}) {
		t.Errorf("org-tokens is %+v", got)
	}
	if got := a["org-tokens"].Private; got.Burst != 1200 || got.Parts != 5 {
		t.Errorf("a fifth of it is %+v", got)
	}
	if a["key-inflight"].Private != nil || b["key-inflight"].Private == nil {
		t.Error("one slot of five nodes is not the last one's")
	}
	if a["fleet"].Whole.Revision != 9<<20 || a["per-model"].Whole.Revision != 9<<20 {
		t.Error("a limit of no tenant counts the steps of one's ramp")
	}
	if got := limits(grown, Numbers{Policy: 9}, Share{})["org-tokens"].Whole; got.Revision != 9<<20|2 || got.Burst != 30000 {
		t.Errorf("a step later it is %+v", got)
	}
	if got := limits(young, Numbers{Policy: 10}, Share{})["org-tokens"].Whole.Revision; got <= 9<<20|2 {
		t.Errorf("the next policy's number is %d", got)
	}
}

// TestSameShareOfAnotherStep: tenants that have as much after different steps are numbered apart.
func TestSameShareOfAnotherStep(t *testing.T) {
	p := mustParse(t, strings.Replace(example, "{name: old, plan: pro}", "{name: old, plan: pro, standing: 0.1}", 1))
	ix, err := p.Index(time.Date(2026, 1, 20, 0, 0, 0, 0, time.UTC), 1, Share{}, nil)
	must(t, err)
	a, _ := ix.Tenant("acme") // 0.2 × 0.5, one step
	b, _ := ix.Tenant("old")  // 1 × 0.1, two steps
	for i := range a.Limits {
		x, y := *a.Limits[i].Whole, *b.Limits[i].Whole
		if x.Rate != y.Rate || x.Burst != y.Burst {
			t.Errorf("%s: %+v and %+v", a.Limits[i].Name, x, y)
		}
		if tenantless := a.Limits[i].tenantless(); (x.Revision == y.Revision) != tenantless {
			t.Errorf("%s is numbered %d and %d", a.Limits[i].Name, x.Revision, y.Revision)
		}
	}
}

func TestSpreadUsers(t *testing.T) {
	text := strings.NewReplacer("oversize: refuse", "oversize: refuse\n    spread_users: true", "scope: org+model", "scope: model+user").Replace(example)
	p := mustParse(t, text)
	ix, err := p.Index(time.Unix(2e9, 0), 1, Share{}, nil)
	must(t, err)
	c, _ := ix.Tenant("acme")
	for _, l := range c.Limits {
		if l.Spread != (l.Name == "money") || strings.HasSuffix(l.Bucket, spreadMark) != l.Spread {
			t.Errorf("%s of %s: spread %v, bucket %s", l.Name, l.Scope, l.Spread, l.Bucket)
		}
	}
	if d := Diff(mustParse(t, strings.Replace(text, "    spread_users: true\n", "", 1)), p); len(d) != 1 || d[0].String() != "+ plans[pro].spread_users: true" {
		t.Errorf("the difference is %v", d)
	}
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
			if l.Private == nil {
				nones[l.Name]++
			} else {
				units[l.Name] += l.Private.Capacity()
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
