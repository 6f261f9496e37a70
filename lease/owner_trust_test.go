package lease

import (
	"testing"

	"headgate/limiter"
)

// A limit of a later policy than the owner's process knows binds nobody, whoever names it: else one forged ask would
// put a bucket under it for good, as no later policy has a higher revision.
func TestOwnerBelievesNoLaterPolicy(t *testing.T) {
	const newest = 5 << 20
	known := uint64(newest)
	o := NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Wait: 1.07e9, Newest: func() uint64 { return known }})
	at := Instant{1e9, 1_700_000_000e9}
	o.Step(at, viewOf(1, 0, 0))
	seq := uint64(0)
	ask := func(l limiter.Limit) AskDecision {
		seq++
		r := o.Handle(at, &Request{Holder: 2, Owner: 1, Epoch: 1, Seq: seq, Asks: []Ask{duoAsk(seq, 1, l)}})[0]
		return r.Decisions[0]
	}
	true5 := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10, Revision: newest}
	forged := limiter.Limit{Rate: limiter.Rate{Count: 1e6, Per: 1e9}, Burst: 1e6, Revision: 1<<64 - 1}
	if d := ask(forged); d.Refused != NotOwner || o.Stats().Buckets != 0 || o.Stats().Rejected != 1 {
		t.Errorf("a new bucket under a forged limit: %+v, %+v", d, o.Stats())
	}
	if d := ask(true5); d.Refused != -1 {
		t.Errorf("%+v", d)
	}
	if d := ask(forged); d.Refused != NotOwner || o.Stats().Rejected != 2 {
		t.Errorf("%+v, %+v", d, o.Stats())
	}
	if l := o.allLevels(at)[0].Limit; l != true5 {
		t.Errorf("the bucket is under %+v", l)
	}
	next := true5 // a policy that the holder knows first
	next.Burst, next.Revision = 20, newest+1<<20
	if d := ask(next); d.Refused != NotOwner {
		t.Errorf("%+v", d)
	}
	known = next.Revision
	if d := ask(next); d.Refused != -1 || o.allLevels(at)[0].Limit != next {
		t.Errorf("%+v under %+v", d, o.allLevels(at)[0].Limit)
	}
}

// Slots in use and handed levels count under whatever limit they are told with; that of a policy which is not known
// binds only until somebody asks.
func TestOwnerKeepsWhatComesUnderALaterPolicy(t *testing.T) {
	at := Instant{1e9, 1_700_000_000e9}
	newOwner := func() *Owner {
		o := NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Wait: 1.07e9, Newest: func() uint64 { return 7 }})
		o.Step(at, viewOf(1, 1, 1))
		return o
	}
	o := newOwner()
	o.Step(at, viewOf(2, 0, 1))
	later := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 50, Revision: 8}
	k := limiter.Key{Tenant: "a", Limit: "l"}
	handed := &Handoff{From: 2, To: 1, Epoch: 2, Floor: FloorNever, Buckets: []HandedBucket{{Key: k, Limit: later}}}
	var state limiter.State
	later.Debit(&state, at.Now, 45)
	handed.Buckets[0].State = later.AppendState(nil, &state, at.Now)
	if !o.Accept(at, handed) {
		t.Fatal("not accepted")
	}
	mine := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 50, Revision: 7}
	seq := uint64(1)
	a := Ask{ID: 1, Charges: []AskCharge{{Bucket: Bucket{0, k}, Limit: mine, Cost: 6}}}
	if r := o.Handle(at, &Request{Holder: 2, Owner: 1, Epoch: 2, Seq: seq, Asks: []Ask{a}})[0]; r.Decisions[0].Refused != 0 {
		t.Errorf("6 of 5: %+v", r.Decisions[0])
	}
	if l := o.allLevels(at)[0]; l.Limit != mine || l.Level != 5 || o.Stats().Rejected == 0 {
		t.Errorf("%+v; %+v", l, o.Stats())
	}

	o = newOwner()
	slots := limiter.Limit{Algorithm: limiter.Semaphore, Burst: 100, Revision: 8}
	o.Step(at, viewOf(2, 0, 1))
	roll := &Roll{Epoch: 2, Slots: []RolledSlots{{Bucket: Bucket{0, k}, InUse: 3, Limit: slots}}}
	o.Handle(at, &Request{Holder: 2, Owner: 1, Epoch: 2, Seq: 1, Roll: roll})
	slots.Burst, slots.Revision = 4, 7
	a = Ask{ID: 2, Peek: true, Charges: []AskCharge{{Bucket: Bucket{0, k}, Limit: slots, Cost: 1}}}
	at.Now += 2e9
	o.Handle(at, &Request{Holder: 1, Owner: 1, Epoch: 2, Seq: 1, Roll: &Roll{Epoch: 2}})
	o.Handle(at, &Request{Holder: 2, Owner: 1, Epoch: 2, Seq: 2, Asks: []Ask{a}})
	if l := o.allLevels(at)[0]; l.Limit != slots || l.Level != 1 {
		t.Errorf("%+v, want one slot of four", l)
	}
}
