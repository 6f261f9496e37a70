package lease

import (
	"fmt"
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

// bench is a holder whose owners the test plays.
type stand struct {
	t     testing.TB
	h     *Holder
	now   atomic.Int64
	woken map[uint64]int
	view  *View
	// between runs after the nth reading of the clock from now on, once.
	countdown int
	between   func()
}

func newStand(t testing.TB, rule Rule) *stand {
	s := &stand{t: t, woken: map[uint64]int{}}
	s.now.Store(1e12)
	s.h = NewHolder(HolderConfig{Self: self, Clock: s.clock, MaxBuckets: 1000, Break: rule, Wake: func(o uint64) { s.woken[o]++ }})
	s.step(1, ownerA, ownerA)
	return s
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
	daily  = &limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 1000, Per: 24 * time.Hour}, Revision: 1}
	slots8 = &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8, Revision: 1}
)

func block(series, number uint64, depth, granted int64) Lease {
	return Lease{Bucket: Bucket{0, keyA}, Series: series, Number: number, Depth: depth, Granted: granted, Limit: *perSec}
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
	l := block(5, 1, 100, 20)
	l.Share = ShareOne / 4 // 250/s
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
	twice := c
	s.settle(&c, 2)
	s.settle(&c, 0)
	if n := s.spend(keyA, perSec); n != 8 {
		t.Fatalf("%d left after 2 of 10", n)
	}
	_ = twice
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
