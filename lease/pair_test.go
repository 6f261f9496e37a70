package lease

import (
	"testing"
	"time"

	"headgate/limiter"
)

// pair is a real owner and a real holder, with nothing in between.
type pair struct {
	at Instant
	o  *Owner
	h  *Holder
}

func newPair(s Sizer) *pair {
	p := &pair{at: Instant{1e9, 1_700_000_000e9}}
	v := &View{Epoch: 1, Members: []Member{{"n1", 1, ""}, {"n2", 2, ""}}, Owners: []int32{0}, Place: func(string) uint32 { return 0 }}
	p.o = NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Sizer: s, Wait: 1.07e9})
	p.o.Step(p.at, v)
	p.h = NewHolder(HolderConfig{Self: 2, Clock: func() Instant { return p.at }})
	p.h.Step(v)
	return p
}

// take is what a Manager does, and settles.
func (p *pair) take(c limiter.Charge, used int64) {
	cs, ds := []limiter.Charge{c}, make([]limiter.Decision, 1)
	refused, missing := p.h.Take(cs, ds)
	if refused >= 0 {
		return
	}
	if missing != 0 {
		for _, x := range p.o.Handle(p.at, p.h.Request(1, []Ask{p.h.Ask(cs, 1, 0, false)})) {
			p.h.Handle(x)
			for i := range x.Decisions {
				if refused, ok := p.h.Decided(cs, 1, &x.Decisions[i], p.at.Now, ds); !ok || refused != -1 {
					return
				}
			}
		}
	}
	p.h.Settle(cs, []int64{used}, ds)
}

func (p *pair) pass(d time.Duration) {
	p.at.Now, p.at.Wall = p.at.Now+int64(d), p.at.Wall+int64(d)
	for range p.h.Owners() {
		for _, x := range p.o.Handle(p.at, p.h.Request(1, nil)) {
			p.h.Handle(x)
		}
	}
}

// TestSeriesOfABusyBucketAreClosed, also where an ask was given up and nothing was ever heard of it, and where
// each window has a series of its own.
func TestSeriesOfABusyBucketAreClosed(t *testing.T) {
	gcra := limiter.Limit{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100}
	sliding := limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: limiter.Rate{Count: 100, Per: time.Second}}
	fixed := limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 100, Per: time.Second}}
	for _, c := range []struct {
		name  string
		sizer Sizer
		limit limiter.Limit
		lost  bool
	}{
		{"all is heard", &oneSize{depth: 20, grant: 20}, gcra, false},
		{"an ask is given up", &oneSize{depth: 20, grant: 20}, gcra, true},
		{"sliding windows", nil, sliding, false},
		{"fixed windows, decided by the owner", &oneSize{}, fixed, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(c.sizer)
			one := limiter.Charge{Key: limiter.Key{Tenant: "a", Limit: "l"}, Limit: &c.limit, Cost: 1}
			p.take(one, 1)
			if c.lost {
				p.h.Request(1, []Ask{p.h.Ask([]limiter.Charge{one}, 1, 0, false)})
			}
			for i := range int64(1000) { // of them every other one is more than the lease covers
				p.pass(500 * time.Millisecond)
				one.Cost = 1 + i%2*30
				p.take(one, one.Cost-i%3%2)
			}
			if here, there := p.h.Stats().Series, p.o.Stats().Series; here > 50 || there > 50 {
				t.Errorf("%d series here and %d at the owner", here, there)
			}
		})
	}
}

// TestLoweredSlotsAreHeard: slots whose answer was lost, under a limit that was lowered since to less than they are,
// come to their holder all the same, and back from it.
func TestLoweredSlotsAreHeard(t *testing.T) {
	p := newPair(nil)
	of := func(n int64, revision uint64) *limiter.Limit {
		return &limiter.Limit{Algorithm: limiter.Semaphore, Burst: n, Revision: revision}
	}
	key := limiter.Key{Tenant: "a", Limit: "slots"}
	four := []limiter.Charge{{Key: key, Limit: of(5, 1), Cost: 4}}
	p.o.Handle(p.at, p.h.Request(1, []Ask{p.h.Ask(four, 1, 0, false)})) // nobody hears the answer
	one := []limiter.Charge{{Key: key, Limit: of(1, 2), Cost: 1}}
	p.o.Handle(p.at, p.h.Request(1, []Ask{p.h.Ask(one, 1, 0, false)})) // nor this one
	p.pass(100 * time.Millisecond)
	p.pass(100 * time.Millisecond)
	p.pass(100 * time.Millisecond)
	if s := p.h.Stats(); s.Rejected > 0 {
		t.Errorf("the holder rejects %d leases", s.Rejected)
	}
	if l := p.o.allLevels(p.at)[0]; l.Outstanding > 1 {
		t.Errorf("%d slots of one are lent: %+v", l.Outstanding, l)
	}
}

// TestLeasesEndWithTheirAlgorithm: a limit that becomes of another kind ends the leases under it, which are heard, and
// acknowledged.
func TestLeasesEndWithTheirAlgorithm(t *testing.T) {
	kinds := []limiter.Limit{
		{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100},
		{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 100, Per: time.Minute}},
		{Algorithm: limiter.SlidingWindow, Rate: limiter.Rate{Count: 100, Per: time.Second}},
		{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 100, Per: time.Second}},
		{Algorithm: limiter.Semaphore, Burst: 100},
	}
	key := limiter.Key{Tenant: "a", Limit: "l"}
	for i, from := range kinds {
		for j, to := range kinds {
			from.Revision, to.Revision = 1, 2
			p := newPair(&oneSize{depth: 50, grant: 50})
			held := []limiter.Charge{{Key: key, Limit: &from, Cost: 7}}
			ds := make([]limiter.Decision, 1)
			for range 2 { // the second out of the lease, if there is one
				if _, missing := p.h.Take(held, ds); missing == 0 {
					break
				}
				r := p.o.Handle(p.at, p.h.Request(1, []Ask{p.h.Ask(held, 1, 0, false)}))[0]
				p.h.Handle(r)
				if refused, ok := p.h.Decided(held, 1, &r.Decisions[0], p.at.Now, ds); !ok || refused != -1 {
					t.Fatalf("%d to %d: refused %d", i, j, refused)
				}
				p.h.Settle(held, []int64{0}, ds)
			}
			// Another holder brings the policy.
			p.o.Handle(p.at, &Request{Holder: 1, Owner: 1, Epoch: 1, Seq: 1, Asks: []Ask{
				{ID: 1, Charges: []AskCharge{{Bucket: Bucket{0, key}, Limit: to, Cost: 0}}},
			}})
			for range 30 {
				p.pass(250 * time.Millisecond)
			}
			p.h.Settle(held, []int64{0}, ds)
			for range 30 {
				p.pass(250 * time.Millisecond)
			}
			if h, o := p.h.Stats(), p.o.Stats(); h.Rejected > 0 || o.Rejected > 0 || h.Series > 1 || o.Series > 2 || h.Unacknowledged > 0 {
				t.Errorf("%v to %v: the holder %+v, the owner %+v", from.Algorithm, to.Algorithm, h, o)
			}
		}
	}
}

// TestDurableLimitsLendNoRate: a limit that comes to be durable takes the rate out of leases at once: the ledger's bucket
// fills by the whole of it.
func TestDurableLimitsLendNoRate(t *testing.T) {
	p := newPair(&oneSize{share: 0.5, depth: 10, grant: 10})
	key := limiter.Key{Tenant: "a", Limit: "l"}
	fast := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: time.Second}, Burst: 100, Revision: 1}
	p.take(limiter.Charge{Key: key, Limit: &fast, Cost: 1}, 1)
	day := limiter.Limit{Rate: limiter.Rate{Count: 1000, Per: 24 * time.Hour}, Burst: 1000, Revision: 2}
	rs := p.o.Handle(p.at, &Request{Holder: 1, Owner: 1, Epoch: 1, Seq: 1, Asks: []Ask{
		{ID: 1, Charges: []AskCharge{{Bucket: Bucket{0, key}, Limit: day, Cost: 0}}},
	}})
	for _, r := range rs {
		p.h.Handle(r)
	}
	p.pass(250 * time.Millisecond)
	for _, l := range p.h.Levels("a") {
		if l.Share != 0 && !l.Dead {
			t.Errorf("the holder still has %d of the rate", l.Share)
		}
	}
}

// TestTryingAgainIsNoDemand: a request that looks again at its lease after it has waited is asked for once.
func TestTryingAgainIsNoDemand(t *testing.T) {
	p := newPair(&oneSize{depth: 10, grant: 10})
	l := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: time.Second}, Burst: 100}
	cs, ds := []limiter.Charge{{Key: limiter.Key{Tenant: "a", Limit: "l"}, Limit: &l, Cost: 50}}, make([]limiter.Decision, 1)
	p.take(cs[0], 50)
	b := p.h.lookup(&cs[0].Key)
	b.asked.Store(0)
	p.h.Take(cs, ds)
	once := b.asked.Load()
	for range 3 {
		p.h.take(cs, ds, false)
	}
	if again := b.asked.Load(); once == 0 || again != once {
		t.Errorf("asked for %x at first, and %x after three more tries", once, again)
	}
}
