package lease

import (
	"slices"
	"strings"
	"testing"

	"headgate/limiter"
)

// TestOwnerLevelsInParts: looked through in parts, with the lock given up in between, a tenant's buckets are those that
// they are at once, whatever the length of their keys.
func TestOwnerLevelsInParts(t *testing.T) {
	o := NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Wait: 1.07e9})
	at := Instant{1e9, 1_700_000_000e9}
	o.Step(at, viewOf(1, 0, 0))
	l := o.intern(&limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10})
	for i := range 200 {
		k := limiter.Key{Tenant: []string{"a", "ab", "", "b"}[i%4], Limit: "l", Subject: strings.Repeat("u", i)}
		o.make(&k, l, 0, at)
	}
	for _, tenant := range []string{"a", "ab", "", "c"} {
		whole := o.Levels(at, tenant)
		if want := 50; (len(whole) != want) != (tenant == "c") {
			t.Errorf("%d buckets of %q, want %d", len(whole), tenant, want)
		}
		var all []OwnerLevel
		for next, more := uint32(0), true; more; {
			var ls []OwnerLevel
			ls, next, more = o.levelsFrom(at, tenant, next, 7)
			all = append(all, ls...)
		}
		sortLevels(all)
		if !slices.EqualFunc(all, whole, func(a, b OwnerLevel) bool { return a.Key == b.Key && a.Level == b.Level }) {
			t.Errorf("of %q there are %d buckets in parts, and %d at once", tenant, len(all), len(whole))
		}
	}
}

// TestOwnerHandsOffOneByOne: each hand-off that the heads name can be had by itself, until it is acknowledged.
func TestOwnerHandsOffOneByOne(t *testing.T) {
	d := newDuo(t, &oneSize{})
	d.say(1, 0, nil, duoAsk(1, 1, limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10}))
	d.step(viewOf(2, 1, 1))
	ks, hs := d.o[1].heads(), d.o[1].HandOffs(d.at)
	if len(ks) != 2 || len(hs) != 2 {
		t.Fatalf("%v and %v", ks, hs)
	}
	for i, k := range ks {
		h := d.o[1].handOffOf(d.at, k)
		if h == nil || h.Partition != hs[i].Partition || h.To != hs[i].To || len(h.Buckets) != len(hs[i].Buckets) {
			t.Errorf("%+v, want %+v", h, hs[i])
		}
		if d.o[1].HandedOff(k.partition, k.epoch); d.o[1].handOffOf(d.at, k) != nil {
			t.Errorf("%+v is still there", k)
		}
	}
}

// TestOwnerDrawsInTurn: of many buckets that want a block those that have waited longest come first, a bounded number at
// once, so that a request does not pay for all of them.
func TestOwnerDrawsInTurn(t *testing.T) {
	d := newDuo(t, &oneSize{})
	day := limiter.Limit{Rate: limiter.Rate{Count: 6400, Per: 86400e9}, Burst: 6400}
	var asks []Ask
	for i := range uint64(2 * maxDraws) {
		k := limiter.Key{Tenant: "a", Limit: "day", Subject: string(rune('0' + i))}
		asks = append(asks, Ask{ID: i + 1, Wait: 1e9, Charges: []AskCharge{{Bucket: Bucket{0, k}, Limit: day, Cost: 1}}})
	}
	d.say(1, 0, nil, asks...)
	for round := range 2 {
		ds := d.o[1].Draws(d.at)
		if len(ds) != maxDraws {
			t.Fatalf("%d draws at once, want %d", len(ds), maxDraws)
		}
		for i := range ds {
			if want := asks[round*maxDraws+i].Charges[0].Key; ds[i].Key != want {
				t.Errorf("draw %d is of %v, want %v", i, ds[i].Key, want)
			}
			d.o[1].Drawn(d.at, Drawn{Bucket: ds[i].Bucket, N: ds[i].N, Granted: ds[i].Want})
		}
	}
	if ds := d.o[1].Draws(d.at); len(ds) != 0 || d.o[1].Stats().Parked != 0 {
		t.Errorf("%d draws are left, and %d asks", len(ds), d.o[1].Stats().Parked)
	}
}
