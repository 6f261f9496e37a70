package lease

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/limiter"
)

const (
	self   = 100
	ownerA = 7
	ownerB = 8
)

// failer is a *testing.T or a *rapid.T.
type failer interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// stand is a holder whose owners the test plays.
type stand struct {
	t     failer
	h     *Holder
	now   atomic.Int64
	mu    sync.Mutex
	woken map[uint64]int
	view  *View
	asked *Request // the last with an ask
	// between runs after the nth reading of the clock from now on, once.
	countdown int
	between   func()
}

func newStand(t failer, rule Rule) *stand {
	s := &stand{t: t, woken: map[uint64]int{}}
	s.now.Store(1e12)
	s.h = NewHolder(HolderConfig{Self: self, Clock: s.clock, MaxBuckets: 1000, Break: rule, Wake: s.wake})
	s.step(1, ownerA, ownerA)
	return s
}

func (s *stand) wake(owner uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.woken[owner]++
}

func (s *stand) clock() Instant {
	at := Instant{Now: s.now.Load(), Wall: s.now.Load() + 1e18}
	if s.between != nil {
		if s.countdown--; s.countdown == 0 {
			f := s.between
			s.between = nil
			f()
			at = Instant{Now: s.now.Load(), Wall: s.now.Load() + 1e18}
		}
	}
	return at
}

// zApart puts tenants that begin with z into partition 1.
func zApart(home string) uint32 {
	if home[0] == 'z' {
		return 1
	}
	return 0
}

// step goes on to a view in which two partitions have these owners.
func (s *stand) step(epoch uint64, owners ...uint64) {
	v := &View{Epoch: epoch, Place: zApart, Members: []Member{{Name: "self", Incarnation: self}}}
	for _, o := range owners {
		v.Members = append(v.Members, Member{Name: fmt.Sprint(o), Incarnation: o})
		v.Owners = append(v.Owners, int32(len(v.Members)-1))
	}
	s.view = v
	s.h.Step(v)
}

func (s *stand) pass(d time.Duration) { s.now.Add(int64(d)) }

// answer answers a request of the owner's with leases, within session.
func (s *stand) answer(owner, session uint64, leases ...Lease) *Request {
	s.t.Helper()
	q := s.h.Request(owner, nil)
	if q == nil {
		s.t.Fatalf("no request to %d", owner)
	}
	s.h.Handle(&Response{Owner: owner, Holder: self, Epoch: s.view.Epoch, Answers: q.Seq, Session: session, Left: 1e9, Leases: leases, RollTaken: s.view.Epoch})
	return q
}

// push is an answer to nothing.
func (s *stand) push(owner, session uint64, leases ...Lease) {
	s.h.Handle(&Response{Owner: owner, Holder: self, Epoch: s.view.Epoch, Session: session, Leases: leases})
}

func (s *stand) take(c *limiter.Charge) (limiter.Decision, bool) {
	cs, ds := []limiter.Charge{*c}, make([]limiter.Decision, 1)
	refused, missing := s.h.Take(cs, ds)
	*c = cs[0]
	return ds[0], refused == -1 && missing == 0
}

func (s *stand) settle(c *limiter.Charge, actual int64) {
	cs := []limiter.Charge{*c}
	s.h.Settle(cs, []int64{actual}, make([]limiter.Decision, 1))
	*c = cs[0]
}

// spend takes costs of 1 until the lease is empty.
func (s *stand) spend(k limiter.Key, l *limiter.Limit) (n int64) {
	for range 1_000_000 {
		c := limiter.Charge{Key: k, Limit: l, Cost: 1}
		if _, ok := s.take(&c); !ok {
			return n
		}
		n++
	}
	s.t.Fatal("a lease without an end")
	return 0
}

// report is what is said of a series in the next request to an owner.
func (s *stand) report(owner, series uint64) *Report {
	s.pass(againAfter) // what is on its way is said again
	for _, r := range s.h.Request(owner, nil).Reports {
		if r.Series == series {
			return &r
		}
	}
	return nil
}

var (
	keyA   = limiter.Key{Tenant: "a", Limit: "tokens", Subject: "u"}
	keyZ   = limiter.Key{Tenant: "z", Limit: "tokens", Subject: "u"}
	perSec = &limiter.Limit{Rate: limiter.Rate{Count: 1000, Per: time.Second}, Burst: 1000, Revision: 1}
	perDay = &limiter.Limit{Rate: limiter.Rate{Count: 1000, Per: 24 * time.Hour}, Burst: 1000, Revision: 1}
	daily  = &limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 1000, Per: 24 * time.Hour}, Revision: 1}
	slots8 = &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8, Revision: 1}
)

// block is a lease of a bucket that does not fill by itself, so that all is returned that does not fit.
func block(series, number uint64, depth, granted int64) Lease {
	return Lease{Bucket: Bucket{0, keyA}, Series: series, Number: number, Depth: depth, Granted: granted, Limit: *perDay}
}

// trickle is a lease of a part of a rate of 1000/s.
func trickle(series, number uint64, depth, granted int64, share uint32) Lease {
	return Lease{Bucket: Bucket{0, keyA}, Series: series, Number: number, Depth: depth, Granted: granted, Limit: *perSec, Share: share}
}

func TestHolderSpendsABlock(t *testing.T) {
	s := newStand(t, 0)
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("spent %d of nothing", n)
	}
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	if n := s.spend(keyA, perSec); n != 10 {
		t.Fatalf("spent %d of a block of 10", n)
	}
	s.push(ownerA, 1, block(5, 1, 10, 14), block(5, 1, 10, 14))
	if n := s.spend(keyA, perSec); n != 4 {
		t.Fatalf("spent %d of 4 that were added, twice said", n)
	}
	s.push(ownerA, 1, block(5, 2, 10, 34))
	if r := s.report(ownerA, 5); r == nil || r.Returned != 10 || r.Ack != 2 || r.Level != 10 {
		t.Fatalf("20 into a depth of 10: %+v", r)
	}
}

func TestHolderSpendsARate(t *testing.T) {
	s := newStand(t, 0)
	l := trickle(5, 1, 100, 20, ShareOne/4) // 250/s
	s.answer(ownerA, 1, l)
	if n := s.spend(keyA, perSec); n != 20 {
		t.Fatalf("spent %d of 20", n)
	}
	s.pass(100 * time.Millisecond)
	if n := s.spend(keyA, perSec); n != 25 {
		t.Fatalf("spent %d of 25", n)
	}
	s.pass(900 * time.Millisecond)
	s.answer(ownerA, 1)
	if n := s.spend(keyA, perSec); n != 100 {
		t.Fatalf("spent %d where the depth is 100", n)
	}
	l.Number, l.Share = 2, ShareOne/2
	s.pass(2 * time.Millisecond)
	s.push(ownerA, 1, l)
	s.pass(3 * time.Millisecond)
	if n := s.spend(keyA, perSec); n != 2 {
		t.Fatalf("spent %d of .5 + 1.5", n)
	}
}

func TestHolderFreezesAndThaws(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	s.pass(980 * time.Millisecond)
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("spent %d past the deadline", n)
	}
	s.answer(ownerA, 1)
	if n := s.spend(keyA, perSec); n != 10 {
		t.Fatalf("spent %d after the thaw, want 10", n)
	}
	s.push(ownerA, 1, block(5, 1, 10, 15))
	s.answer(ownerA, 2)
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("spent %d of a session that was dropped", n)
	}
	s.answer(ownerA, 1, block(5, 2, 10, 30))
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("spent %d of a session of before", n)
	}
	if q := s.h.Request(ownerA, nil); q.Session != 2 || q.Dropped != 1 {
		t.Fatalf("session %d, dropped %d", q.Session, q.Dropped)
	}
}

func TestHolderReadsTheClockAgain(t *testing.T) {
	for _, rule := range []Rule{0, BreakSecondReading} {
		s := newStand(t, rule)
		s.answer(ownerA, 1, block(5, 1, 10, 10))
		s.countdown, s.between = 2, func() { s.pass(time.Second) }
		c := limiter.Charge{Key: keyA, Limit: perSec, Cost: 4}
		if _, ok := s.take(&c); ok != (rule != 0) {
			t.Errorf("rule %d: taken: %v", rule, ok)
		}
		if rule == 0 {
			s.answer(ownerA, 1)
			if n := s.spend(keyA, perSec); n != 6 {
				t.Errorf("a void take gave back: %d left, want 6", n)
			}
			if c.Held != nil || s.h.Stats().Void != 1 {
				t.Errorf("a void take holds %v; %d counted", c.Held, s.h.Stats().Void)
			}
		}
	}
}

func TestHolderSettles(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	c := limiter.Charge{Key: keyA, Limit: perSec, Cost: 6}
	if _, ok := s.take(&c); !ok {
		t.Fatal("not taken")
	}
	s.settle(&c, 2)
	s.settle(&c, 0)
	if n := s.spend(keyA, perSec); n != 8 {
		t.Fatalf("%d left after 2 of 10", n)
	}
	c = limiter.Charge{Key: keyA, Limit: perSec, Cost: 1}
	s.push(ownerA, 1, block(5, 1, 10, 15))
	s.take(&c)
	s.settle(&c, 8) // 4 are there
	if r := s.report(ownerA, 5); r == nil || r.Debt != 3 || r.Refunded != 0 {
		t.Fatalf("7 more where 4 are there: %+v", r)
	}
	s.push(ownerA, 1, block(5, 1, 10, 25))
	c = limiter.Charge{Key: keyA, Limit: perSec, Cost: 6}
	s.take(&c)
	s.push(ownerA, 1, block(5, 2, 6, 27))
	s.settle(&c, 0) // 6 lie in a depth of 6
	if r := s.report(ownerA, 5); r == nil || r.Refunded != 6 {
		t.Fatalf("6 back into a full lease: %+v", r)
	}
}

func slotLease(series, number uint64, depth, granted int64) Lease {
	return Lease{Bucket: Bucket{0, keyA}, Series: series, Number: number, Depth: depth, Granted: granted, Limit: *slots8}
}

func TestHolderKeepsSlots(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, slotLease(5, 1, 3, 3))
	var held []limiter.Charge
	for range 4 {
		c := limiter.Charge{Key: keyA, Limit: slots8, Cost: 1}
		if _, ok := s.take(&c); ok {
			held = append(held, c)
		}
	}
	if len(held) != 3 {
		t.Fatalf("%d of 3 slots taken", len(held))
	}
	s.settle(&held[0], 1)
	if held[0].Held == nil {
		t.Fatal("a slot that is settled as used is no longer held")
	}
	s.settle(&held[0], 0)
	s.settle(&held[0], 0)
	if n := s.spend(keyA, slots8); n != 1 {
		t.Fatalf("%d free after one came back, twice said", n)
	}
	s.push(ownerA, 1, slotLease(5, 2, 1, 3))
	if s.woken[ownerA] == 0 {
		t.Error("a recall is acknowledged with the next keep-alive only")
	}
	s.woken[ownerA] = 0
	s.settle(&held[1], 0)
	if s.woken[ownerA] == 0 {
		t.Error("a slot that was recalled goes back with the next keep-alive only")
	}
	if r := s.report(ownerA, 5); r == nil || r.Returned != 1 || r.Ack != 2 || r.Level != 0 {
		t.Fatalf("one freed of 3 in use where 1 may be kept: %+v", r)
	}
	s.answer(ownerA, 2) // the session was ended
	s.settle(&held[2], 0)
	if r := s.report(ownerA, 5); r == nil || r.Returned != 2 || !r.Idle || r.Closed {
		t.Fatalf("one in use in a session that was dropped: %+v", r)
	}
}

func TestHolderReturnsSlotsThatDoNotCoverAnAsk(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, slotLease(5, 1, 3, 3))
	c := limiter.Charge{Key: keyA, Limit: slots8, Cost: 1}
	s.take(&c)
	big := []limiter.Charge{{Key: keyA, Limit: slots8, Cost: 4}}
	q := s.h.Request(ownerA, []Ask{s.h.Ask(big, 1, 0, false)})
	if r := q.Reports[0]; r.Returned != 2 || r.Idle || r.Level != 0 {
		t.Fatalf("%+v", r)
	}
	if n := s.spend(keyA, slots8); n != 0 {
		t.Fatalf("%d taken of those given back", n)
	}
	s.settle(&c, 0)
	if n := s.spend(keyA, slots8); n != 1 {
		t.Fatalf("%d taken of the one that stayed", n)
	}
}

func TestHolderRollsSlots(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, slotLease(5, 1, 3, 3))
	cs := make([]limiter.Charge, 2)
	for i := range cs {
		cs[i] = limiter.Charge{Key: keyA, Limit: slots8, Cost: 1}
		s.take(&cs[i])
	}
	s.step(2, ownerB, ownerA)
	if n := s.spend(keyA, slots8); n != 0 {
		t.Fatalf("%d taken of an owner of before", n)
	}
	s.settle(&cs[0], 0)
	for range 2 { // a retry is the same
		q := s.h.Request(ownerB, nil)
		if q.Roll == nil || q.Roll.Epoch != 2 || len(q.Roll.Slots) != 1 || q.Roll.Slots[0].InUse != 2 || len(q.Reports) != 0 {
			t.Fatalf("roll %+v, reports %+v", q.Roll, q.Reports)
		}
	}
	if q := s.h.Request(ownerA, nil); q.Roll != nil && len(q.Roll.Slots) > 0 {
		t.Fatalf("the owner of before hears of %+v", q.Roll)
	}
	l := slotLease(9, 1, 2, 2)
	l.Rolled = true
	s.answer(ownerB, 3, l)
	if r := s.report(ownerB, 9); r == nil || r.Ack != 1 || r.Granter != ownerB {
		t.Fatalf("%+v", r)
	}
	if n := s.spend(keyA, slots8); n != 0 {
		t.Fatalf("%d taken where one of 2 came back before the series had a number", n)
	}
	s.settle(&cs[1], 0)
	if n := s.spend(keyA, slots8); n != 1 {
		t.Fatalf("%d taken of the one that may be kept", n)
	}
	s.h.Drain()
	if r := s.report(ownerB, 9); r == nil || r.Returned != 1 {
		t.Fatalf("one of 2 is in use: %+v", r)
	}
}

func TestHolderWindow(t *testing.T) {
	s := newStand(t, 0)
	day := int64(24 * time.Hour)
	w := (s.clock().Wall + day) / day // tomorrow
	l := Lease{Bucket: Bucket{0, keyA}, Series: 5, Number: 1, Depth: 10, Granted: 10, Limit: *daily, Window: w}
	s.answer(ownerA, 1, l)
	if n := s.spend(keyA, daily); n != 0 {
		t.Fatalf("%d taken of tomorrow's", n)
	}
	s.now.Store(w*day - 1e18)
	s.answer(ownerA, 1)
	c := limiter.Charge{Key: keyA, Limit: daily, Cost: 3}
	if d, ok := s.take(&c); !ok || d.At != s.clock().Wall {
		t.Fatalf("%+v", d)
	}
	s.countdown, s.between = 2, func() { s.now.Add(day) }
	if _, ok := s.take(&limiter.Charge{Key: keyA, Limit: daily, Cost: 3}); ok {
		t.Fatal("taken across the end of a window")
	}
	s.settle(&c, 1)
	if r := s.report(ownerA, 5); r == nil || r.Refunded != 2 || !r.Idle {
		t.Fatalf("a refund of yesterday's: %+v", r)
	}
}

func TestHolderDetaches(t *testing.T) {
	for _, late := range []bool{false, true} {
		s := newStand(t, 0)
		s.answer(ownerA, 1, block(5, 1, 10, 10))
		c := limiter.Charge{Key: keyA, Limit: perSec, Cost: 2}
		s.take(&c)
		s.pass(500 * time.Millisecond)
		s.step(2, ownerB, ownerA)
		s.answer(ownerA, 1) // extends the session, not the lease that moved
		if late {
			s.pass(480 * time.Millisecond)
		} else if _, ok := s.take(&limiter.Charge{Key: keyA, Limit: perSec, Cost: 1}); !ok {
			t.Fatal("a lease that moved is spent until its deadline")
		}
		s.push(ownerA, 1, block(5, 2, 10, 20))
		s.answer(ownerB, 4)
		if n := s.spend(keyA, perSec); n != 0 {
			t.Fatalf("%d taken after the return", n)
		}
		want := int64(7)
		if late {
			want = 0
		}
		if r := s.report(ownerB, 5); r == nil || r.Granter != ownerA || r.Returned != want || !r.Idle {
			t.Fatalf("late %v: %+v", late, r)
		}
		s.settle(&c, 0)
		if r := s.report(ownerB, 5); r == nil || r.Refunded != 2 {
			t.Fatalf("late %v: %+v", late, r)
		}
	}
}

func (s *stand) decide(c []limiter.Charge, d AskDecision, wait time.Duration) (limiter.Decision, int, bool) {
	a := s.h.Ask(c, 1, 0, false)
	sent := s.now.Load()
	q := s.h.Request(ownerA, []Ask{a})
	s.asked = q
	s.pass(wait)
	d.ID = a.ID
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: s.view.Epoch, Answers: q.Seq, Session: 1, Left: 1e9, Decisions: []AskDecision{d}})
	ds := make([]limiter.Decision, 1)
	refused, ok := s.h.Decided(c, 1, &d, sent, ds)
	return ds[0], refused, ok
}

func TestHolderTakesADecision(t *testing.T) {
	yes := AskDecision{Refused: -1, Left: 1e9, Charges: []ChargeDecision{{Decision: limiter.Decision{Admitted: true, At: 5}, Series: 6}}}
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	c := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 20}}
	if d, refused, ok := s.decide(c, yes, time.Millisecond); !ok || refused != -1 || d.By != limiter.ByOwner || c[0].At != 5 {
		t.Fatalf("%+v %d %v", d, refused, ok)
	}
	if r := s.asked.Reports[0]; r.Series != 5 || !r.Idle || r.Returned != 10 || !r.Closed {
		t.Fatalf("a lease that did not cover an ask: %+v", r)
	}
	s.settle(&c[0], 5)
	if r := s.report(ownerA, 6); r == nil || r.Refunded != 15 {
		t.Fatalf("a refund of a direct decision: %+v", r)
	}
	c = []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 20}}
	if _, _, ok := s.decide(c, yes, 980*time.Millisecond); ok || c[0].Held != nil {
		t.Fatal("a late decision counts")
	}
	no := AskDecision{Refused: 0, Charges: []ChargeDecision{{Decision: limiter.Decision{RetryAfter: 9}}}}
	if d, refused, ok := s.decide(c, no, time.Millisecond); !ok || refused != 0 || d.RetryAfter != 9 {
		t.Fatalf("%+v %d %v", d, refused, ok)
	}
}

func TestHolderAnswersFromARefusal(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, trickle(5, 1, 10, 10, 0))
	refuse := Refusal{Bucket: Bucket{0, keyA}, Cost: 5, For: 1e8, RetryAfter: 2e8}
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Session: 1, Refusals: []Refusal{refuse}})
	if _, ok := s.take(&limiter.Charge{Key: keyA, Limit: perSec, Cost: 7}); !ok {
		t.Fatal("what the lease covers is refused")
	}
	try := func(cost int64) (limiter.Decision, int, uint32) {
		ds := make([]limiter.Decision, 1)
		refused, missing := s.h.Take([]limiter.Charge{{Key: keyA, Limit: perSec, Cost: cost}}, ds)
		return ds[0], refused, missing
	}
	// One more than the owner speaks of, less the three that the lease has.
	if d, refused, _ := try(6); refused != 0 || d.RetryAfter != 198e6 || d.By != limiter.ByRefusal || d.Admitted {
		t.Fatalf("%d %+v", refused, d)
	}
	if _, refused, missing := try(4); refused != -1 || missing != 1 {
		t.Fatal("less than what is refused is not asked for")
	}
	s.pass(100 * time.Millisecond)
	if _, refused, missing := try(6); refused != -1 || missing != 1 {
		t.Fatal("refused after its time")
	}
}

// TestHolderWithAllOfABucketRefusesByItself: what has the whole burst and the whole rate is all that there is (R1). It says to
// the nanosecond when a cost conforms, and does not go back, with the part of a unit that it has, for what it
// does not cover.
func TestHolderWithAllOfABucketRefusesByItself(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, trickle(5, 1, 1000, 0, ShareOne))
	s.pass(2500 * time.Microsecond)
	try := func(cost int64, o limiter.Oversize) (limiter.Decision, int, uint32) {
		ds := make([]limiter.Decision, 1)
		refused, missing := s.h.Take([]limiter.Charge{{Key: keyA, Limit: perSec, Cost: cost, Oversize: o}}, ds)
		return ds[0], refused, missing
	}
	for _, c := range []struct {
		cost     int64
		oversize limiter.Oversize
		wait     time.Duration
	}{
		{3, limiter.Refuse, 500 * time.Microsecond},
		{1000, limiter.Refuse, 997500 * time.Microsecond},
		{1001, limiter.Refuse, limiter.Never},
		{5000, limiter.Debt, 997500 * time.Microsecond}, // when it is full
	} {
		if d, refused, _ := try(c.cost, c.oversize); refused != 0 || d.RetryAfter != c.wait || d.By != limiter.ByRefusal || d.Remaining != 2 || d.Reset != 997500*time.Microsecond {
			t.Errorf("%d: refused %d, %+v, want to wait %s", c.cost, refused, d, c.wait)
		}
		ds := make([]limiter.Decision, 1)
		if refused, _ := s.h.Peek([]limiter.Charge{{Key: keyA, Limit: perSec, Cost: c.cost, Oversize: c.oversize}}, ds); refused != 0 || ds[0].RetryAfter != c.wait {
			t.Errorf("%d: a peek says %d, %+v", c.cost, refused, ds[0])
		}
	}
	newer := *perSec
	newer.Revision, newer.Burst = 2, 2000
	ds := make([]limiter.Decision, 1)
	if _, missing := s.h.Take([]limiter.Charge{{Key: keyA, Limit: &newer, Cost: 3}}, ds); missing != 1 {
		t.Error("refused under a limit that its owner may not know of")
	}
	s.pass(1100 * time.Millisecond)
	if _, _, missing := try(5000, limiter.Debt); missing != 1 {
		t.Error("of a full bucket the owner lends on credit")
	}
	for _, l := range []Lease{trickle(5, 2, 999, 0, ShareOne), trickle(5, 3, 1000, 0, ShareOne/2)} {
		s.push(ownerA, 1, l)
		s.spend(keyA, perSec)
		if _, _, missing := try(500, limiter.Refuse); missing != 1 {
			t.Errorf("%+v is not all of the bucket, and others were not asked", l)
		}
	}
}

// TestHolderKnowsItsLeaseBetterThanARefusal: when a cost conforms hangs on what the owner had, and on what the lease has by
// now; of what the lease has spent since the owner heard of it nothing is counted.
func TestHolderKnowsItsLeaseBetterThanARefusal(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, trickle(5, 1, 10, 4, 0))
	hold := Refusal{Bucket: Bucket{0, keyA}, Cost: 1, For: 1e6, RetryAfter: 700_000} // it has .3 of a unit
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Session: 1, Refusals: []Refusal{hold}})
	try := func(cost int64) time.Duration {
		ds := make([]limiter.Decision, 1)
		if refused, _ := s.h.Take([]limiter.Charge{{Key: keyA, Limit: perSec, Cost: cost}}, ds); refused != 0 {
			t.Fatalf("%d is not refused", cost)
		}
		return ds[0].RetryAfter
	}
	if w := try(6); w != 1700*time.Microsecond {
		t.Errorf("6 of 4.3 after %s", w)
	}
	s.spend(keyA, perSec)
	if w := try(1); w != time.Millisecond {
		t.Errorf("1 of .3 after %s, though nothing else is asked for as long as that is refused", w)
	}
	s.pass(500 * time.Microsecond)
	if w := try(2); w != 1200*time.Microsecond {
		t.Errorf("2 of .8 after %s", w)
	}
}

// TestHolderReturnsWhatCrossedItsReturn: a grant that was under way when the lease went back, and came before the answer
// to that, is not forgotten with the series, and whoever waits for it waits no longer than it must.
func TestHolderReturnsWhatCrossedItsReturn(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, trickle(5, 1, 2, 2, 0))
	both := limiter.Charge{Key: keyA, Limit: perSec, Cost: 2}
	s.take(&both)
	s.settle(&both, 2)
	low := s.h.Request(ownerA, nil)
	ask := s.h.Request(ownerA, []Ask{s.h.Ask([]limiter.Charge{{Key: keyA, Limit: perSec, Cost: 1}}, 1, 0, false)})
	if !ask.Reports[0].Closed {
		t.Fatalf("%+v", ask.Reports)
	}
	s.woken[ownerA] = 0
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Answers: low.Seq, Session: 1, Left: 1e9, Leases: []Lease{trickle(5, 2, 10, 5, 0)}})
	if s.woken[ownerA] == 0 {
		t.Error("the owner hears of it when it is next spoken to")
	}
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Answers: ask.Seq, Session: 1, Left: 1e9})
	if r := s.report(ownerA, 5); r == nil || r.Returned != 3 || r.Ack != 2 || !r.Idle {
		t.Fatalf("of the three that came: %+v", r)
	}
}

func TestHolderRefusesLessThanTheLevelOfARefusal(t *testing.T) {
	s := newStand(t, 0)
	one := Refusal{Bucket: Bucket{0, keyA}, Cost: 1, For: 1e8, RetryAfter: 1, Level: 50}
	many := slices.Repeat([]Refusal{one}, maxSaid+1)
	many[maxSaid].For = 0 // beyond the bound: it ends nothing
	s.answer(ownerA, 1, trickle(5, 1, 10, 0, 0))
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Session: 1, Refusals: many})
	ds := make([]limiter.Decision, 1)
	if refused, _ := s.h.Take([]limiter.Charge{{Key: keyA, Limit: perSec, Cost: 6}}, ds); refused != 0 || ds[0].RetryAfter != 1e8 {
		t.Fatalf("%d %+v", refused, ds[0])
	}
}

func TestHolderTakesAllOrNothing(t *testing.T) {
	s := newStand(t, 0)
	l := block(6, 1, 10, 10)
	l.Key.Limit = "other"
	s.answer(ownerA, 1, block(5, 1, 10, 10), l)
	cs := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 4}, {Key: l.Key, Limit: perSec, Cost: 11}, {Key: keyA, Limit: perSec, Cost: 4}}
	ds := make([]limiter.Decision, 3)
	if refused, missing := s.h.Take(cs, ds); refused != -1 || missing != 2 || cs[0].Held == nil || cs[1].Held != nil {
		t.Fatalf("%d %b", refused, missing)
	}
	s.h.Cancel(cs, 5)
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Session: 1, Refusals: []Refusal{{Bucket: l.Bucket, Cost: 1, For: 1e8, RetryAfter: 1e8}}})
	if refused, missing := s.h.Take(cs, ds); refused != 1 || missing != 0 || cs[0].Held != nil || !ds[0].Admitted || ds[1].Admitted {
		t.Fatalf("%d %b %+v", refused, missing, ds)
	}
	if n := s.spend(keyA, perSec); n != 10 {
		t.Fatalf("%d left of 10 after a cancel and a refusal", n)
	}
}

func TestHolderDropsWhatCannotBeTrue(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	bad := map[string]*Response{
		"another holder":        {Owner: ownerA, Holder: self + 1, Session: 1, Leases: []Lease{block(5, 2, 10, 20)}},
		"nobody's":              {Owner: 999, Holder: self, Session: 1, Leases: []Lease{block(5, 2, 10, 20)}},
		"an answer to come":     {Owner: ownerA, Holder: self, Session: 1, Answers: 1e6, Leases: []Lease{block(5, 2, 10, 20)}},
		"a long session":        {Owner: ownerA, Holder: self, Session: 1, Left: 1e18, Leases: []Lease{block(5, 2, 10, 20)}},
		"negative left":         {Owner: ownerA, Holder: self, Session: 1, Left: -1, Leases: []Lease{block(5, 2, 10, 20)}},
		"no session":            {Owner: ownerA, Holder: self, Leases: []Lease{block(5, 2, 10, 20)}},
		"negative grant":        {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{block(5, 2, 10, -20)}},
		"huge grant":            {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{block(5, 2, 10, 1<<62+1)}},
		"depth over burst":      {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{block(5, 2, 1001, 20)}},
		"negative depth":        {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{block(5, 2, -1, 20)}},
		"number 0":              {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{block(5, 0, 10, 20)}},
		"series 0":              {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{block(0, 2, 10, 20)}},
		"slots for units":       {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{slotLease(5, 2, 8, 20)}},
		"no such partition":     {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{{Bucket: Bucket{7, keyA}, Series: 5, Number: 2, Depth: 10, Granted: 20, Limit: *perSec}}},
		"another's place":       {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{{Bucket: Bucket{1, keyA}, Series: 5, Number: 2, Depth: 10, Granted: 20, Limit: *perSec}}},
		"an epoch of before":    {Owner: ownerA, Holder: self, Session: 1, Leases: []Lease{block(5, 2, 10, 20)}, Epoch: 0},
		"a refusal of the past": {Owner: ownerA, Holder: self, Session: 1, Refusals: []Refusal{{Bucket: Bucket{0, keyA}, For: -1}}},
	}
	for name, r := range bad {
		before := s.h.Stats()
		if name != "an epoch of before" {
			r.Epoch = 1
		}
		s.h.Handle(r)
		after := s.h.Stats()
		if name != "no session" && after.Rejected+after.Discarded == before.Rejected+before.Discarded {
			t.Errorf("%s is not counted", name)
		}
		if l := s.h.Levels("a"); len(l) != 1 || l[0].Level != 10 || l[0].Depth != 10 {
			t.Errorf("%s changed something: %+v", name, l)
		}
	}
	c := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 20}}
	if _, ok := s.h.Decided(c, 1, &AskDecision{ID: 77, Refused: -1, Left: 1e9, Charges: make([]ChargeDecision, 1)}, s.now.Load(), make([]limiter.Decision, 1)); ok {
		t.Error("a decision on an ask that there was not")
	}
}

func TestHolderDrains(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	c := limiter.Charge{Key: keyA, Limit: perSec, Cost: 2}
	s.take(&c)
	s.h.Drain()
	if s.h.Drained() {
		t.Fatal("drained before the owner knows")
	}
	s.pass(againAfter)
	q := s.answer(ownerA, 1, block(6, 1, 10, 10))
	if len(q.Reports) != 1 || q.Reports[0].Returned != 8 || !q.Reports[0].Idle || q.Reports[0].Closed {
		t.Fatalf("%+v", q.Reports)
	}
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("%d taken of a lease that came after", n)
	}
	q = s.answer(ownerA, 1)
	if len(q.Reports) != 1 || q.Reports[0].Series != 6 || q.Reports[0].Returned != 10 || !q.Reports[0].Closed {
		t.Fatalf("%+v", q.Reports)
	}
	if !s.h.Drained() {
		t.Fatalf("%+v", s.h.Stats())
	}
	s.settle(&c, 0)
	if s.h.Drained() {
		t.Fatal("drained with a refund on its way")
	}
	q = s.answer(ownerA, 1)
	if len(q.Reports) != 1 || q.Reports[0].Refunded != 2 || !q.Reports[0].Closed {
		t.Fatalf("%+v", q.Reports)
	}
	if st := s.h.Stats(); st.Series != 0 || !s.h.Drained() {
		t.Fatalf("%+v", st)
	}
}

func TestHolderForgets(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	for range 60 {
		s.pass(KeepEvery)
		s.answer(ownerA, 1)
	}
	if st := s.h.Stats(); st.Buckets != 0 || st.Leases != 0 || len(s.h.Owners()) != 0 {
		t.Fatalf("15 s without use: %+v", st)
	}
	s.push(ownerA, 1, block(5, 1, 10, 10)) // a duplicate of long ago
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("%d spent of a series that was closed", n)
	}
}

func TestHolderSaysWhatIsLow(t *testing.T) {
	s := newStand(t, 0)
	s.pass(time.Second)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	for range 9 {
		s.take(&limiter.Charge{Key: keyA, Limit: perSec, Cost: 1})
	}
	if s.woken[ownerA] != 0 {
		t.Fatal("woken above the mark")
	}
	s.take(&limiter.Charge{Key: keyA, Limit: perSec, Cost: 1})
	if s.woken[ownerA] != 1 {
		t.Fatalf("woken %d times at the mark", s.woken[ownerA])
	}
	s.answer(ownerA, 1, block(5, 1, 10, 11))
	s.take(&limiter.Charge{Key: keyA, Limit: perSec, Cost: 1})
	if s.woken[ownerA] != 2 {
		t.Fatal("not woken after something came")
	}
	s.answer(ownerA, 1)
	s.push(ownerA, 1, block(5, 2, 10, 11))
	c := limiter.Charge{Key: keyA, Limit: perSec}
	if s.take(&c); s.woken[ownerA] != 2 {
		t.Fatal("woken again though nothing came")
	}
}

func TestHolderTellsTheNextOwnerWhatTheLastDidNotHear(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	c := limiter.Charge{Key: keyA, Limit: perSec, Cost: 2}
	s.take(&c)
	s.h.Request(ownerA, nil) // lost
	s.step(2, ownerB, ownerB)
	s.settle(&c, 5)
	s.pass(time.Second)
	if r := s.report(ownerB, 5); r == nil || r.Granter != ownerA || r.Ack != 1 {
		t.Fatalf("%+v", r)
	}
	if got := s.h.Owners(); len(got) != 1 || got[0] != ownerB {
		t.Fatalf("owners %v", got)
	}
}

func TestHolderKeepsItsNumbersForWhoComesBack(t *testing.T) {
	s := newStand(t, 0)
	seq := s.answer(ownerA, 5, block(5, 1, 10, 10)).Seq
	s.step(2, ownerB, ownerB)
	s.step(3, ownerA, ownerB)
	q := s.h.Request(ownerA, nil)
	if q.Seq <= seq || q.Session != 0 || q.Dropped != 0 {
		t.Fatalf("seq %d after %d, session %d, dropped %d, though its lease may still be spent", q.Seq, seq, q.Session, q.Dropped)
	}
	s.pass(time.Second)
	if q = s.h.Request(ownerA, nil); q.Session != 0 || q.Dropped != 5 {
		t.Fatalf("session %d, dropped %d", q.Session, q.Dropped)
	}
	s.push(ownerA, 5, block(6, 1, 10, 10))
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("%d spent", n)
	}
	if l := s.h.Levels("a"); len(l) != 1 || l[0].Series != 5 {
		t.Fatalf("a session of before is adopted: %+v", l)
	}
}

func TestHolderThatSkippedAViewRollsWhatItsOwnerLent(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, slotLease(5, 1, 8, 8))
	c := limiter.Charge{Key: keyA, Limit: slots8, Cost: 7}
	s.take(&c)
	s.step(3, ownerA, ownerA)
	q := s.h.Request(ownerA, nil)
	if q.Roll == nil || q.Roll.Slots[0].InUse != 7 || len(q.Reports) != 0 {
		t.Fatalf("%+v", q)
	}
	s.push(ownerA, 1, slotLease(5, 2, 8, 8))
	if n := s.spend(keyA, slots8); n != 0 {
		t.Fatalf("%d taken of slots that were rolled", n)
	}
	l := slotLease(6, 1, 0, 7)
	l.Rolled = true
	if r := s.answer(ownerA, 1, l).Reports; len(r) != 0 {
		t.Fatalf("said before the roll was taken: %+v", r)
	}
	if r := s.report(ownerA, 5); r == nil || r.Returned != 8 || !r.Closed || r.Ack != 2 {
		t.Fatalf("%+v", r)
	}
	s.settle(&c, 0)
	if r := s.report(ownerA, 6); r == nil || r.Returned != 7 || !r.Closed {
		t.Fatalf("%+v", r)
	}
}

func TestHolderForgotWhatASeriesWasGranted(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	c := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 20}}
	yes := AskDecision{Refused: -1, Left: 1e9, Charges: []ChargeDecision{{Decision: limiter.Decision{Admitted: true}, Series: 5}}}
	// Closed and acknowledged; the owner decides in it all the same.
	if _, refused, ok := s.decide(c, yes, time.Millisecond); !ok || refused != -1 {
		t.Fatalf("%d %v", refused, ok)
	}
	s.push(ownerA, 1, block(5, 2, 10, 30))
	if n := s.spend(keyA, perSec); n != 0 {
		t.Fatalf("%d spent", n)
	}
	if r := s.report(ownerA, 5); r == nil || r.Returned != 0 || !r.Idle || r.Ack != 2 {
		t.Fatalf("%+v", r)
	}
	s.settle(&c[0], 0)
	if r := s.report(ownerA, 5); r == nil || r.Returned != 0 || r.Refunded != 20 || !r.Closed {
		t.Fatalf("%+v", r)
	}
}

func TestHolderHearsOfAClosedSeriesAgain(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, block(5, 1, 10, 10))
	c := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 20}}
	q := s.h.Request(ownerA, []Ask{s.h.Ask(c, 1, 0, false)})
	if !q.Reports[0].Closed {
		t.Fatalf("%+v", q.Reports)
	}
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Answers: q.Seq, Session: 1, Left: 1e9, Leases: []Lease{block(5, 2, 10, 16)}})
	if r := s.report(ownerA, 5); r == nil || r.Returned != 16 || r.Ack != 2 {
		t.Fatalf("what crossed the close: %+v", r)
	}
	s.pass(askFor + 1) // the ask is given up
	s.answer(ownerA, 1)
	s.pass(againAfter)
	s.answer(ownerA, 1)
	s.push(ownerA, 1, block(5, 3, 10, 20))
	if r := s.report(ownerA, 5); r == nil || r.Returned != 0 || r.Ack != 3 || !r.Closed {
		t.Fatalf("after it was forgotten: %+v", r)
	}
}

// TestHolderRollsForAnOwnerOfWhomItHoldsNothing: there is no session between them, and it is asked all the same.
func TestHolderRollsForAnOwnerOfWhomItHoldsNothing(t *testing.T) {
	s := newStand(t, 0)
	first := s.h.Request(ownerA, nil)
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Answers: first.Seq, Session: 1, Left: 1e9, RollTaken: 1})
	s.step(2, ownerA, ownerA)
	if q := s.h.Request(ownerA, nil); q.Roll != nil {
		t.Fatalf("it owes %+v", q.Roll)
	}
	s.pass(againAfter)
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 2, RollWanted: 2})
	if q := s.h.Request(ownerA, nil); q.Roll == nil || q.Roll.Epoch != 2 {
		t.Fatalf("it rolls %+v", q.Roll)
	}
}

func TestHolderRollsAgainForAnOwnerThatSkippedAView(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, slotLease(5, 1, 8, 8))
	c := limiter.Charge{Key: keyA, Limit: slots8, Cost: 3}
	s.take(&c)
	s.step(2, ownerA, ownerA)
	want := func(epoch uint64) *Request {
		s.pass(againAfter)
		s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 2, Session: 1, RollWanted: epoch})
		return s.h.Request(ownerA, nil)
	}
	if q := want(3); q.Roll != nil {
		t.Fatalf("rolled %+v for a view to come", q.Roll)
	}
	q := want(2)
	if q.Roll == nil || q.Roll.Epoch != 2 || q.Roll.Slots[0].InUse != 3 || s.spend(keyA, slots8) != 0 {
		t.Fatalf("%+v", q.Roll)
	}
	if again := want(2); again.Roll != q.Roll {
		t.Fatalf("%+v is not the same again", again.Roll)
	}
}

func TestHolderAsksUnderANewerLimit(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, trickle(5, 1, 10, 10, 0))
	same, other := *perSec, *perSec
	same.Revision, other.Revision, other.Burst = 2, 3, 500
	for limit, ok := range map[*limiter.Limit]bool{&same: true, &other: false, slots8: false, perSec: true} {
		c := limiter.Charge{Key: keyA, Limit: limit, Cost: 1}
		if _, took := s.take(&c); took != ok {
			t.Errorf("%+v: taken %v", limit, took)
		}
		s.settle(&c, 0)
	}
	c := []limiter.Charge{{Key: keyA, Limit: &other, Cost: 1}}
	if r := s.h.Request(ownerA, []Ask{s.h.Ask(c, 1, 0, false)}).Reports[0]; !r.Idle || r.Returned != 10 {
		t.Fatalf("the lease stays under the old limit: %+v", r)
	}
}

func TestHolderUndoesWhatARefusalLeaves(t *testing.T) {
	s := newStand(t, 0)
	l, other := trickle(5, 1, 100, 20, ShareOne/3), block(6, 1, 10, 10)
	other.Key.Limit = "other"
	s.answer(ownerA, 1, l, other)
	s.push(ownerA, 1)
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Session: 1, Refusals: []Refusal{{Bucket: other.Bucket, Cost: 11, For: 1e8, RetryAfter: 1e8}}})
	cs := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 7}, {Key: other.Key, Limit: perSec, Cost: 11}}
	ds := make([]limiter.Decision, 2)
	s.pass(time.Microsecond) // of the roundings of the takes to come
	for range 1000 {         // a nanosecond each would be seen
		if refused, _ := s.h.Take(cs, ds); refused != 1 || ds[0].Remaining != 20 {
			t.Fatalf("%d %+v", refused, ds[0])
		}
	}
	if n := s.spend(keyA, perSec); n != 20 {
		t.Fatalf("%d left of 20", n)
	}
	if refused, missing := s.h.Peek(cs, ds); refused != 1 || missing != 1 {
		t.Fatalf("peek: %d %b", refused, missing)
	}
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Session: 1, Refusals: []Refusal{{Bucket: other.Bucket}}})
	if refused, missing := s.h.Peek(cs, ds); refused != -1 || missing != 3 {
		t.Fatalf("peek after the refusal ended: %d %b", refused, missing)
	}
}

func TestHolderGivesBackADecisionWhoseSlotIsGone(t *testing.T) {
	s := newStand(t, 0)
	slots := slotLease(5, 1, 1, 1)
	slots.Key.Limit = "slots"
	third := keyA
	third.Limit = "third"
	cs := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 7}, {Key: slots.Key, Limit: slots8, Cost: 1}, {Key: third, Limit: perSec, Cost: 9}}
	a := s.h.Ask(cs, 7, 0, false)
	sent := s.now.Load()
	q := s.h.Request(ownerA, []Ask{a})
	yes := limiter.Decision{Admitted: true}
	d := AskDecision{ID: a.ID, Refused: -1, Left: 1e9, Charges: []ChargeDecision{
		{Decision: yes, Series: 4}, {Decision: yes, Series: 5, Lent: true}, {Decision: yes, Series: 6},
	}}
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Answers: q.Seq, Session: 1, Left: 1e9, Leases: []Lease{slots}, Decisions: []AskDecision{d}})
	if n := s.spend(slots.Key, slots8); n != 1 {
		t.Fatalf("%d", n)
	}
	ds := make([]limiter.Decision, 3)
	if refused, ok := s.h.Decided(cs, 7, &d, sent, ds); refused != NotOwner || ok {
		t.Fatalf("%d %v %+v", refused, ok, ds[1])
	}
	for i := range cs {
		if cs[i].Held != nil {
			t.Errorf("charge %d is held", i)
		}
	}
	if r := s.report(ownerA, 4); r == nil || r.Refunded != 7 {
		t.Errorf("%+v", r)
	}
	if r := s.report(ownerA, 6); r == nil || r.Refunded != 9 {
		t.Errorf("%+v", r)
	}
}

func TestHolderFindsManyBuckets(t *testing.T) {
	s := newStand(t, 0)
	var ls []Lease
	for i := range 1100 {
		l := block(uint64(i+1), 1, 10, 10)
		l.Key.Subject = fmt.Sprint(i)
		ls = append(ls, l)
	}
	s.answer(ownerA, 1, ls[:maxSaid]...)
	s.answer(ownerA, 1, ls[maxSaid:]...)
	if st := s.h.Stats(); st.Buckets != 1000 || st.Full != 100 {
		t.Fatalf("%+v", st)
	}
	for i, l := range ls {
		c := limiter.Charge{Key: l.Key, Limit: perSec, Cost: 1}
		if _, ok := s.take(&c); ok != (i < 1000) {
			t.Fatalf("bucket %d: taken %v", i, ok)
		}
		s.settle(&c, 1)
	}
	s.pass(KeepEvery)
	n := 0
	for range 3 {
		for _, r := range s.answer(ownerA, 1).Reports {
			if n++; r.Series > 1000 && (r.Returned != 10 || !r.Closed) {
				t.Fatalf("%+v", r)
			}
		}
	}
	if n < 1000 || s.woken[ownerA] == 0 {
		t.Fatalf("%d reports, woken %d times for the rest", n, s.woken[ownerA])
	}
	for range 400 {
		s.pass(KeepEvery)
		s.answer(ownerA, 1)
	}
	if st := s.h.Stats(); st.Buckets != 0 || st.Unacknowledged != 0 {
		t.Fatalf("%+v", st)
	}
	s.answer(ownerA, 1, ls[1050])
	if n := s.spend(ls[1050].Key, perSec); n != 0 {
		t.Fatalf("%d spent of a series that was given back", n)
	}
}

// TestHolderReturnsNoMoreThanTheOwnerCounts: a bucket that fills by itself has filled up while a grant
// was on its way that does not fit any more.
func TestHolderReturnsNoMoreThanTheOwnerCounts(t *testing.T) {
	s := newStand(t, 0)
	s.answer(ownerA, 1, trickle(5, 1, 100, 100, ShareOne/4))
	s.push(ownerA, 1, trickle(5, 1, 100, 130, ShareOne/4))
	if r := s.report(ownerA, 5); r == nil || r.Returned != 0 {
		t.Fatalf("30 into a full lease: %+v", r)
	}
	s.push(ownerA, 1, trickle(5, 2, 60, 140, ShareOne/4))
	if r := s.report(ownerA, 5); r == nil || r.Returned != 40 {
		t.Fatalf("a depth of 100 becomes 60: %+v", r)
	}
	for range 20 {
		s.take(&limiter.Charge{Key: keyA, Limit: perSec, Cost: 1})
	}
	s.push(ownerA, 1, trickle(5, 3, 0, 140, 0))
	s.push(ownerA, 1, trickle(5, 4, 30, 190, 0))
	if r := s.report(ownerA, 5); r == nil || r.Returned != 40+40+20 || r.Ack != 4 {
		t.Fatalf("40 of 60 are given back, then 50 come: %+v", r)
	}
}

func TestHolderSaysWhatRemainsAfterASettle(t *testing.T) {
	yes := limiter.Decision{Admitted: true, Remaining: 7, Reset: 3 * time.Millisecond}
	for actual, want := range map[int64]limiter.Decision{
		3: {Remaining: 7, Reset: 3 * time.Millisecond}, 5: {Remaining: 5, Reset: 5 * time.Millisecond}, 0: {Remaining: 10},
		11: {Remaining: -1, Reset: 11 * time.Millisecond},
	} {
		s := newStand(t, 0)
		c := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 3}}
		d, _, ok := s.decide(c, AskDecision{Refused: -1, Left: 1e9, Charges: []ChargeDecision{{Decision: yes, Series: 6}}}, 0)
		if !ok {
			t.Fatal("void")
		}
		ds := []limiter.Decision{d}
		s.h.Settle(c, []int64{actual}, ds)
		if ds[0].Remaining != want.Remaining || ds[0].Reset != want.Reset {
			t.Errorf("3 that become %d: %d remain, reset in %v", actual, ds[0].Remaining, ds[0].Reset)
		}
	}
}

func TestHolderClosesWhatWasDecidedForIt(t *testing.T) {
	s := newStand(t, 0)
	c := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 3}}
	yes := ChargeDecision{Decision: limiter.Decision{Admitted: true}, Series: 6}
	s.decide(c, AskDecision{Refused: -1, Left: 1e9, Charges: []ChargeDecision{yes}}, 0)
	s.settle(&c[0], 3)
	s.answer(ownerA, 1)
	closed := false
	for range 80 {
		s.pass(KeepEvery)
		for _, o := range s.h.Owners() {
			for _, r := range s.answer(o, 1).Reports {
				closed = closed || r.Series == 6 && r.Closed
			}
		}
	}
	if st := s.h.Stats(); !closed || st.Series != 0 || st.Buckets != 0 {
		t.Fatalf("closed %v: %+v", closed, st)
	}
}

// TestHolderRollsAllOfAnOwner: an owner that skipped a view knows nothing of a partition that, for this
// process, has been its own all along.
func TestHolderRollsAllOfAnOwner(t *testing.T) {
	s := newStand(t, 0)
	s.step(2, ownerA, ownerB)
	l := slotLease(5, 1, 8, 8)
	s.answer(ownerA, 1, l)
	c, d := limiter.Charge{Key: keyA, Limit: slots8, Cost: 3}, limiter.Charge{Key: keyA, Limit: slots8, Cost: 2}
	s.take(&c)
	s.take(&d)
	s.step(3, ownerA, ownerA)
	q := s.h.Request(ownerA, nil)
	if len(q.Roll.Slots) != 1 || q.Roll.Slots[0].InUse != 5 || len(q.Reports) != 0 {
		t.Fatalf("%+v", q)
	}
	s.settle(&c, 0)
	s.settle(&d, 0)
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 3, Answers: q.Seq, Session: 1, Left: 1e9, RollTaken: 3, RollWanted: 4})
	s.step(4, ownerA, ownerA)
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 4, Session: 1, RollWanted: 4})
	q = s.answer(ownerA, 1)
	if q.Roll == nil || len(q.Roll.Slots) != 0 {
		t.Fatalf("%+v", q.Roll)
	}
	if q = s.answer(ownerA, 1); len(q.Reports) != 1 || q.Reports[0].Returned != 8 || !q.Reports[0].Closed {
		t.Fatalf("%+v", q.Reports)
	}
	if st := s.h.Stats(); st.Series != 0 || st.Unacknowledged != 0 {
		t.Fatalf("slots that came back before they had a number: %+v", st)
	}
}

// TestHolderRefundsABlockUntilItIsReported: what an owner last heard of a block's level is the most that
// it can be until the owner grants.
func TestHolderRefundsABlockUntilItIsReported(t *testing.T) {
	s := newStand(t, 0)
	l := block(6, 1, 10, 10)
	l.Key.Limit = "other"
	s.answer(ownerA, 1, trickle(5, 1, 10, 10, 0), l)
	before := limiter.Charge{Key: keyA, Limit: perSec, Cost: 6}
	s.take(&before)
	if r := s.report(ownerA, 5); r == nil || r.Level != 4 {
		t.Fatalf("%+v", r)
	}
	s.pass(time.Millisecond)
	after := limiter.Charge{Key: keyA, Limit: perSec, Cost: 3}
	s.take(&after)
	s.settle(&before, 1)
	if n := s.h.Levels("a")[1].Level; n != 1 {
		t.Fatalf("%d in the lease after a refund of what was taken before the report", n)
	}
	s.settle(&after, 1)
	if n := s.h.Levels("a")[1].Level; n != 3 {
		t.Fatalf("%d in the lease after a refund of what was taken after the report", n)
	}
	if r := s.report(ownerA, 5); r == nil || r.Refunded != 5 || r.Level != 3 {
		t.Fatalf("%+v", r)
	}
	s.pass(time.Millisecond)
	s.h.Handle(&Response{Owner: ownerA, Holder: self, Epoch: 1, Session: 1, Refusals: []Refusal{{Bucket: l.Bucket, Cost: 11, For: 1e8, RetryAfter: 1e8}}})
	cs := []limiter.Charge{{Key: keyA, Limit: perSec, Cost: 2}, {Key: l.Key, Limit: perSec, Cost: 11}}
	if refused, _ := s.h.Take(cs, make([]limiter.Decision, 2)); refused != 1 {
		t.Fatalf("%d", refused)
	}
	if n := s.h.Levels("a")[1].Level; n != 3 {
		t.Fatalf("%d in the lease after a take that was undone", n)
	}
}
