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

// TestOwnerCountsWhatItHasJustLent: in how long a refused cost conforms is the owner's word of what it has by itself: not
// of what went into a lease in the same step, nor of what a holder had in its lease when it reported.
func TestOwnerCountsWhatItHasJustLent(t *testing.T) {
	s := &oneSize{}
	d := newDuo(t, s)
	l := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10}
	d.say(1, 0, nil, duoAsk(1, 7, l))
	d.later(3e8)
	s.depth, s.grant = 5, 3
	r := d.say(1, 1, nil, duoAsk(2, 5, l))
	if len(r.Leases) != 1 || r.Leases[0].Granted != 3 || len(r.Refusals) != 1 || r.Refusals[0].Cost != 5 || r.Refusals[0].RetryAfter != 47e8 {
		t.Fatalf("of 3.3 units 3 are lent, so 5 are there in 4.7 s: %+v, %+v", r.Leases, r.Refusals)
	}
	s.grant, s.refuse = 0, 3e8
	x := r.Leases[0]
	r = d.say(1, 1, []Report{{Bucket: x.Bucket, Granter: 1, Series: x.Series, Ack: 1, Level: 3, Demand: 1 << 10, Cost: 1}})
	if len(r.Refusals) != 0 {
		t.Fatalf("its only holder has units, and is refused: %+v", r.Refusals)
	}
	r = d.say(1, 1, []Report{{Bucket: x.Bucket, Granter: 1, Series: x.Series, Ack: 1, Level: 3, Demand: 1 << 10, Cost: 5}})
	if len(r.Refusals) != 1 || r.Refusals[0].For != 3e8 || r.Refusals[0].RetryAfter != 7e8 || r.Refusals[0].Cost != 1 {
		t.Fatalf("the owner has a unit in .7 s, whatever the lease has: %+v", r.Refusals)
	}
}

// TestOwnerHoldsNoLongerThanAUnitTakes: where requests come more seldom than a refusal ends, it ends with the next that
// conforms, whoever else asks, and soon where another's lease has it.
func TestOwnerHoldsNoLongerThanAUnitTakes(t *testing.T) {
	for _, c := range []struct {
		lent, hold int64
	}{{0, 1e8}, {1, int64(refusalLent)}} {
		s := &oneSize{depth: c.lent, grant: c.lent, stingy: true}
		d := newDuo(t, s)
		l := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10}
		wants := []Report{{Bucket: duoKey, Demand: 5 << 10, Cost: 1}}
		d.o[1].Handle(d.at, &Request{Holder: 1, Owner: 1, Epoch: 1, Seq: 1, Reports: wants, Asks: []Ask{duoAsk(1, 10-c.lent, l)}})
		if d.later(9e8); c.lent > 0 {
			d.at.Now -= 5e8
		}
		*s = oneSize{refuse: 3e8, stingy: true}
		if r := d.say(1, 0, wants, duoAsk(1, 1, l)); len(r.Refusals) != 1 || r.Refusals[0].For != c.hold {
			t.Errorf("%d lent: %+v, want to be refused for %d", c.lent, r.Refusals, c.hold)
		}
	}
}

// TestOwnerRecallsWhatAShareBrought since its holder reported.
func TestOwnerRecallsWhatAShareBrought(t *testing.T) {
	d := newDuo(t, &oneSize{share: 1, depth: 10, grant: 10})
	l := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: 1e9}, Burst: 10}
	x := d.say(1, 0, nil, duoAsk(1, 10, l)).Leases[0]
	d.say(1, 1, []Report{{Bucket: x.Bucket, Granter: 1, Series: x.Series, Ack: x.Number}})
	d.later(5e8)
	a := duoAsk(1, 3, l)
	a.Wait = 1e8
	rs := d.o[1].Handle(d.at, &Request{Holder: 1, Owner: 1, Epoch: 1, Seq: 1, Asks: []Ask{a}})
	if len(rs) != 2 || len(rs[0].Decisions) != 0 || rs[1].Holder != 2 || len(rs[1].Leases) != 1 {
		t.Errorf("five came to the lease, and an ask of three is decided: %+v", rs[0].Decisions)
	}
}

// seer is a Sizer that remembers what it saw last.
type seer struct {
	oneSize
	saw []SightHolder
}

func (s *seer) Size(v *Sight, i int) (share uint32, depth, grant, refuse int64) {
	s.saw = append(s.saw[:0], v.Holders...)
	return s.oneSize.Size(v, i)
}

// TestOwnerRemembersWhatWaitedWants: the demand of who has waited for its first decision is known, whose series is new.
func TestOwnerRemembersWhatWaitedWants(t *testing.T) {
	s := &seer{oneSize: oneSize{depth: 5, grant: 5}}
	d := newDuo(t, nil)
	d.o[1] = NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Sizer: s, Wait: 1.07e9})
	d.o[1].Step(d.at, viewOf(1, 0, 0))
	l := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10}
	x := d.say(1, 0, nil, duoAsk(1, 5, l)).Leases[0]
	d.say(1, 1, []Report{{Bucket: x.Bucket, Granter: 1, Series: x.Series, Ack: x.Number, Level: 5}})
	s.depth, s.grant = 0, 0
	a := duoAsk(1, 3, l)
	a.Wait = 1e8
	d.o[1].Handle(d.at, &Request{Holder: 1, Owner: 1, Epoch: 1, Seq: 1, Reports: []Report{{Bucket: duoKey, Demand: 7 << 10, Cost: 3}}, Asks: []Ask{a}})
	d.later(5e7)
	d.say(1, 1, []Report{{Bucket: x.Bucket, Granter: 1, Series: x.Series, Ack: x.Number + 1, Returned: 5, Idle: true}})
	found := false
	for _, h := range s.saw {
		found = found || h.Demand == 7<<10
	}
	if !found {
		t.Errorf("holders are %+v, and none wants seven", s.saw)
	}
}

// TestOwnerReclaimsTheWholeRate: who is refused of a bucket whose rate another has gets what comes from then on.
func TestOwnerReclaimsTheWholeRate(t *testing.T) {
	s := &oneSize{share: 1, depth: 10, grant: 10}
	d := newDuo(t, s)
	l := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10}
	x := d.say(1, 0, nil, duoAsk(1, 10, l)).Leases[0]
	d.say(1, 1, []Report{{Bucket: x.Bucket, Granter: 1, Series: x.Series, Ack: x.Number}})
	s.share, s.depth, s.grant = 0, 0, 0
	peek := duoAsk(1, 1, l)
	peek.Peek = true
	ask := func(seq uint64, a Ask) []*Response {
		return d.o[1].Handle(d.at, &Request{Holder: 1, Owner: 1, Epoch: 1, Seq: seq, Asks: []Ask{a}})
	}
	if rs := ask(1, peek); len(rs) != 1 {
		t.Errorf("who only looks takes something: %+v", rs[1])
	}
	rs := ask(2, duoAsk(2, 1, l))
	if len(rs) != 2 || rs[1].Holder != 2 || len(rs[1].Leases) != 1 || rs[1].Leases[0].Share != 0 {
		t.Fatalf("%d responses", len(rs))
	}
	if rs := ask(3, duoAsk(3, 1, l)); len(rs) != 1 {
		t.Errorf("what was recalled is recalled again: %+v", rs[1])
	}
}

// TestOwnerRecallsForAllThatWait: asks that come while a recall for another is under way are not refused
// when what it brought is gone, as long as there is more to be recalled.
func TestOwnerRecallsForAllThatWait(t *testing.T) {
	d := newDuo(t, &oneSize{})
	l := limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8}
	if r := d.say(1, 0, nil, duoAsk(1, 8, l)); len(r.Leases) != 1 || r.Leases[0].Granted != 8 {
		t.Fatalf("%+v", r)
	}
	var asks []Ask
	for i := range uint64(5) {
		a := duoAsk(i+1, 1, l)
		a.Wait = 50e6
		asks = append(asks, a)
	}
	rs := d.o[1].Handle(d.at, &Request{Holder: 1, Owner: 1, Epoch: 1, Seq: 1, Asks: asks})
	decided, rounds := 0, 0
	for ; decided < 5 && rounds < 5; rounds++ {
		var back []Report
		for _, r := range rs {
			if r.Holder == 1 {
				for _, x := range r.Decisions {
					if decided++; x.Refused != -1 {
						t.Errorf("ask %d refused: %d", x.ID, x.Refused)
					}
				}
			}
			for _, x := range r.Leases {
				if r.Holder == 2 { // all that it has is free
					back = append(back, Report{Bucket: x.Bucket, Granter: 1, Series: x.Series, Ack: x.Number, Returned: 8 - x.Depth, Level: x.Depth})
				}
			}
		}
		d.later(1e6)
		d.seq++
		rs = d.o[1].Handle(d.at, &Request{Holder: 2, Owner: 1, Epoch: 1, Seq: d.seq, Session: 1, Reports: back})
		if next := d.o[1].Next(); len(rs) == 1 && next < never {
			d.at.Now = max(d.at.Now, next)
			rs = append(rs, d.o[1].Tick(d.at)...)
		}
	}
	if decided != 5 || rounds > 4 {
		t.Errorf("%d of 5 decided after %d rounds", decided, rounds)
	}
}

// TestOwnerMovesBucketsWithTheirHome: a limit that comes to be placed by its users moves, and is no second,
// full one; it goes to the next owner of the partition that it is in.
func TestOwnerMovesBucketsWithTheirHome(t *testing.T) {
	d := newDuo(t, &oneSize{})
	spread := func(epoch uint64, owners ...int32) *View {
		v := viewOf(epoch, owners...)
		v.Place = func(home string) uint32 { return uint32(len(home) - 1) } // "a", and "a" with a user
		return v
	}
	d.step(spread(2, 0, 0, 0))
	d.later(2e9)
	k := limiter.Key{Tenant: "a", Limit: "tokens", Subject: "u"}
	l := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 50}
	ask := func(id uint64, partition uint32, cost int64) AskDecision {
		a := Ask{ID: id, Charges: []AskCharge{{Bucket: Bucket{partition, k}, Limit: l, Cost: cost}}}
		r := d.say(1, 0, nil, a)
		if len(r.Decisions) != 1 {
			t.Fatalf("%+v", r)
		}
		return r.Decisions[0]
	}
	level := func() int64 { return d.o[1].allLevels(d.at)[0].Level }
	had := int64(2) // since the end of the takeover wait, at most
	if x := ask(1, 0, 0); x.Refused != -1 {
		t.Fatalf("%+v", x)
	}
	d.later(40e9)
	if x := ask(2, 0, 40); x.Refused != -1 {
		t.Fatalf("%+v", x)
	}
	if x := ask(3, 2, had+1); x.Refused != 0 || level() > had {
		t.Errorf("%+v and a level of %d: what was spent is forgotten", x, level())
	}
	d.step(spread(3, 0, 0, 1))
	if hs := d.o[1].HandOffs(d.at); len(hs) != 1 || hs[0].Partition != 2 || len(hs[0].Buckets) != 1 {
		t.Errorf("handed over %+v", hs)
	}
	if x := ask(4, 0, 1); x.Refused != NotOwner {
		t.Errorf("decided %+v on a bucket that is being handed over", x)
	}
}
