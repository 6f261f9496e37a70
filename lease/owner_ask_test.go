package lease

import (
	"testing"

	"headgate/limiter"
)

// TestOwnerRefusesOnce: a flood of asks that are refused, as a lane sends them, makes one Refusal of each
// bucket, of the smallest cost; the holder takes the answer and refuses by itself from then on.
func TestOwnerRefusesOnce(t *testing.T) {
	d := newDuo(t, &oneSize{})
	h := NewHolder(HolderConfig{Self: 2, Clock: func() Instant { return d.at }})
	h.Step(viewOf(1, 0, 0))
	l := [2]limiter.Limit{{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10}, {Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 20}}
	flood := func(n int64) *Response {
		var asks []Ask
		for i := range n {
			cs := []limiter.Charge{
				{Key: limiter.Key{Tenant: "a", Limit: "x"}, Limit: &l[0], Cost: 10 - i%3},
				{Key: limiter.Key{Tenant: "a", Limit: "y"}, Limit: &l[1], Cost: 20 - i%5},
			}
			asks = append(asks, h.Ask(cs, 3, 0, false))
		}
		r := d.o[1].Handle(d.at, h.Request(1, asks))[0]
		h.Handle(r)
		return r
	}
	flood(1)
	r := flood(1000)
	if len(r.Decisions) != 1000 || len(r.Refusals) != 2 || r.Refusals[0].Cost != 8 || r.Refusals[1].Cost != 16 {
		t.Errorf("%d decisions and refusals %+v, want of costs 8 and 16", len(r.Decisions), r.Refusals)
	}
	cs := []limiter.Charge{{Key: limiter.Key{Tenant: "a", Limit: "x"}, Limit: &l[0], Cost: 8}}
	ds := make([]limiter.Decision, 1)
	if refused, _ := h.Take(cs, ds); refused != 0 || ds[0].By != limiter.ByRefusal || h.Stats().Rejected > 0 {
		t.Errorf("refused %d, %+v; %d answers rejected", refused, ds[0], h.Stats().Rejected)
	}
}

// TestOwnerRefusesWhatAHolderTakes: of more buckets than a message has room for some are asked of again.
func TestOwnerRefusesWhatAHolderTakes(t *testing.T) {
	d := newDuo(t, &oneSize{})
	l := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 1}
	var asks []Ask
	for i := range uint64(maxAsks) {
		a := Ask{ID: i + 1}
		for j := range limiter.MaxCharges {
			k := limiter.Key{Tenant: "a", Limit: "x", Subject: string(rune(1 + int(i)*limiter.MaxCharges + j))}
			a.Charges = append(a.Charges, AskCharge{Bucket: Bucket{0, k}, Limit: l, Cost: 2})
		}
		asks = append(asks, a)
	}
	r := d.say(1, 0, nil, asks...)
	if len(r.Decisions) != maxAsks || len(r.Refusals) != maxReports {
		t.Errorf("%d decisions and %d refusals", len(r.Decisions), len(r.Refusals))
	}
}
