package leasetest

import (
	"math/rand/v2"
	"testing"

	"headgate/lease"
	"headgate/limiter"
)

// passes fails the test if the judge objected.
func (w *lab) passes(t *testing.T) {
	t.Helper()
	if w.failed == "" {
		return
	}
	for _, line := range w.trace {
		t.Log(line)
	}
	t.Fatal(w.failed)
}

// A graceful leave of an owner that lent most of a bucket, and of a holder that has some of it, loses no quota.
func TestLeaveLosesNothing(t *testing.T) {
	w := newLab(Config{Trace: true, Sizer: constant{0, 12, 12}}, perSecond(1, 50))
	a, b, c, d := w.proc('a'), w.proc('b'), w.proc('c'), w.proc('d')
	w.take(c, 1)
	w.flush()
	w.take(d, 1)
	w.flush()
	w.take(c, 5)
	w.beat(250 * ms)
	spent := int64(7)

	d.holder.Drain()
	w.beat(500 * ms)
	if !d.holder.Drained() {
		t.Fatal("d still holds something half a second after it began to drain")
	}
	w.own(b, b, c) // a and d have left
	w.stepAll()
	w.beat(250 * ms)
	if hs := a.owner.HandOffs(a.clock.read(w.now)); len(hs) != 0 {
		t.Errorf("a still has to hand over %v", hs)
	}
	got := int64(w.drain(c))
	w.beat(500 * ms) // what c had of a's goes to b with the next keep-alive
	got += int64(w.drain(c))
	w.passes(t)
	if most := 50 - spent + 1; got < most-1 || got > most { // a unit came in a second
		for _, line := range w.trace {
			t.Log(line)
		}
		t.Errorf("after the leave %d could be taken, of %d", got, most)
	}
}

// A debt that a sole holder makes binds it, although the whole rate is lent to it.
func TestDebtBinds(t *testing.T) {
	w := newLab(Config{Trace: true, Sizer: constant{lease.ShareOne, 10, 5}}, perSecond(10, 10))
	c := w.proc('c')
	w.take(c, 1)
	w.flush()
	admitted := 0
	for range 40 { // 10 s, in which each request uses ten times what it reserved
		before := w.stats.Admitted
		w.take(c, 1)
		w.flush()
		if w.stats.Admitted > before {
			admitted++
			for w.settle(c, 10) {
				continue
			}
		}
		w.beat(250 * ms)
	}
	w.passes(t)
	if used := 10 * admitted; used > 10+10*10+40 {
		t.Errorf("%d units were used in 10 s of 10 a second: debts are not paid", used)
	}
}

// The slots of a process that was killed are free again once a view without it and its wait are over, at whoever owns
// them then.
func TestSlotsComeBack(t *testing.T) {
	for _, owner := range "ab" {
		w := newLab(Config{Trace: true, Sizer: constant{0, 8, 0}}, slots(8))
		b, c, d := w.proc('b'), w.proc('c'), w.proc('d')
		w.take(c, 5)
		w.flush()
		w.take(d, 2)
		w.flush()
		d.die("is killed")
		w.own(w.proc(owner), w.living()...)
		w.stepAll()
		w.beat(1200 * ms)
		w.take(b, 4)
		w.flush()
		w.beat(250 * ms)
		if w.stats.Admitted != 2 {
			t.Errorf("owner %c: 4 slots were given, 5 being in use of 8", owner)
		}
		w.take(b, 3)
		w.flush()
		w.passes(t)
		if w.stats.Admitted != 3 {
			for _, line := range w.trace {
				t.Log(line)
			}
			t.Errorf("owner %c: 3 slots are not to be had, 5 being in use of 8", owner)
		}
	}
}

// A crash of the owner of a durable limit loses what it had drawn, and no more.
func TestCrashLosesABlock(t *testing.T) {
	const most = 1000
	s := &Script{Clocks: []clock{{offset: 1}, {offset: 2}, {offset: 3}}, Partitions: 1}
	s.Buckets = []BucketSpec{{Key: keyOf("day"), Limit: perDay(most)}}
	for i := range 200 {
		s.Steps = append(s.Steps, Step{At: 100*ms + int64(i)*15*ms, Node: i % 3, Take: &Take{
			N: i, Wait: 100 * ms, Charges: []TakeCharge{{Cost: 3, Actual: 3}},
		}})
	}
	for _, crashed := range []int{0, 1, 2} {
		c := *s
		c.Steps = append([]Step{{At: 1500 * ms, Kind: Crash, Node: crashed, For: 300 * ms}}, s.Steps...)
		cfg := Config{Script: &c, Trace: true}
		w := start(cfg, &c)
		w.run(storm + quiet)
		if w.failed != "" {
			t.Fatal(w.failed)
		}
		b := w.buckets[0]
		spent := b.win.used[(epoch+w.now)/int64(b.limit.Rate.Per)]
		w.cfg.storm = w.now
		rest := int64(0)
		for n := 0; n < most && w.failed == ""; n++ {
			before := w.stats.Admitted
			w.living()[0].begin(Take{N: 10_000 + n, Wait: 200 * ms, Charges: []TakeCharge{{Cost: 1, Actual: 1}}})
			w.run(w.now + 5*ms)
			if w.stats.Admitted == before {
				w.run(w.now + 400*ms)
				if w.stats.Admitted == before {
					break
				}
			}
			rest++
		}
		if w.failed != "" {
			t.Fatal(w.failed)
		}
		if lost := most - spent - rest; lost < 0 || lost > 40 {
			t.Errorf("crash of %c: %d spent, %d could be had, %d lost", 'a'+crashed, spent, rest, lost)
		}
	}
}

// behind lets a own the partition again, as far as its rights know: it has not looked since it owned it before, and
// its cores are where they were. b owned it meanwhile, and between() is what came of that.
func (w *lab) behind(between func()) (a *proc) {
	a, b := w.proc('a'), w.proc('b')
	w.cut[a] = true
	w.own(b, w.living()...)
	w.stepAll()
	between()
	w.own(a, w.living()...)
	w.stepAll()
	w.lose()
	w.cut[a] = false
	a.stepPause = 2500 * ms
	a.step(w.newest())
	return a
}

// What an owner remembers from before a view that it skipped is nothing that anybody can have: from the step of its
// rights to its own it answers nobody.
func TestOwnerBehindItsRightsGivesNothing(t *testing.T) {
	w := newLab(Config{Trace: true, Sizer: constant{}}, perSecond(1, 10))
	b, c := w.proc('b'), w.proc('c')
	w.take(c, 1)
	w.flush()
	a := w.behind(func() {
		w.wait(5000 * ms)
		w.take(c, 3)
		w.flush()
	})
	if w.stats.Admitted != 2 {
		t.Fatalf("%s admitted nothing in between", b.name)
	}
	w.wait(1100 * ms)
	if a.rights.Left(a.clock.local(w.now), 0) == 0 || !a.lags() {
		t.Fatal("a's cores do not lag behind rights that let it grant")
	}
	w.keep(c, a.inc)
	w.take(c, 1)
	w.flush()
	if w.stats.Admitted != 2 {
		t.Error("a admitted by what it knew of before")
	}
	w.run(w.now + 2000*ms)
	w.passes(t)
	w.wait(2000 * ms)
	w.take(c, 1)
	w.flush()
	w.passes(t)
	if w.stats.Admitted != 3 {
		t.Error("a admits nothing after its step")
	}
}

// Nor does time make it: what waits for a recall since before is not admitted by what has refilled by the old count.
func TestParkedBehindItsRights(t *testing.T) {
	w := newLab(Config{Trace: true, Sizer: constant{0, 1, 1}}, perSecond(10, 10))
	c, d := w.proc('c'), w.proc('d')
	w.take(c, 1)
	w.flush()
	w.keep(c, w.proc('a').inc)
	w.flush()
	w.park = 2000 * ms
	w.take(d, 9)
	w.deliver(0, false)
	w.lose() // the recall, too
	if n := w.proc('a').owner.Stats().Parked; n != 1 {
		t.Fatalf("%d asks wait, want 1", n)
	}
	a := w.behind(func() {})
	w.wait(1100 * ms)
	w.wait(1100 * ms)
	w.passes(t)
	if !a.lags() || a.owner.Stats().Parked != 0 {
		t.Error("the ask is not refused yet, or a has stepped")
	}
}

// A debt that came before the hand-over is charged at the owner's reading of its clock, however long it pauses after
// that: what the bucket gains by then it has.
func TestEarlyDebtCountsAtTheReading(t *testing.T) {
	w := newLab(Config{Trace: true, Sizer: constant{}}, perSecond(20, 10))
	b, c := w.proc('b'), w.proc('c')
	w.take(c, 1)
	w.flush()
	w.own(b, w.living()...)
	w.stepAll()
	handed := w.hold(func(m packet) bool { return m.handoff != nil })
	w.settle(c, 3)
	w.keep(c, b.inc)
	w.flush()
	if len(handed) != 1 || w.buckets[0].debts != 2 {
		t.Fatalf("%d hand-offs, a debt of %d, want 1 and 2", len(handed), w.buckets[0].debts)
	}
	w.wait(250 * ms)
	b.before = 245 * ms
	w.late(handed...)
	w.run(w.now + 300*ms)
	w.passes(t)
	if w.buckets[0].debts != 0 {
		t.Error("b has not heard of the debt")
	}
	if n := w.drain(c); n != 10 {
		t.Errorf("%d can be had, want all 10", n)
	}
	w.passes(t)
}

// What an owner hears in a hand-over after the next one's tenure began, since it has not looked, is lost, as what a
// crash takes with it is: the next one's buckets were empty when it began.
func TestEarlyDebtOfATenureThatIsOver(t *testing.T) {
	w := newLab(Config{Trace: true, Sizer: constant{}}, perSecond(20, 10))
	a, b, c := w.proc('a'), w.proc('b'), w.proc('c')
	w.take(c, 1)
	w.flush()
	w.own(b, w.living()...)
	w.stepAll()
	handed := w.hold(func(m packet) bool { return m.handoff != nil })
	w.settle(c, 3)
	w.keep(c, b.inc)
	w.flush()
	w.cut[b] = true
	w.own(a, w.living()...)
	w.stepAll()
	w.wait(1200 * ms)
	w.take(c, 1)
	w.flush()
	w.wait(1000 * ms)
	if len(handed) != 1 || w.buckets[0].debts != 2 || w.stats.Admitted != 2 {
		t.Fatalf("%d hand-offs, a debt of %d, %d admitted, want 1, 2 and 2", len(handed), w.buckets[0].debts, w.stats.Admitted)
	}
	w.late(handed...)
	if !b.knows[0] {
		t.Error("b did not take the hand-off")
	}
	w.passes(t)
}

// A request above a durable limit that goes into debt and uses less: all that it gives back can be had again, but for
// what the ledger was told of as debt. Of the window no more is admitted than it has, and no less.
func TestRefundPaysTheLedgerFirst(t *testing.T) {
	for _, over := range []int64{1, 150} {
		const most = 200
		s := &Script{Clocks: []clock{{offset: 1}, {offset: 2}}, Partitions: 1}
		s.Buckets = []BucketSpec{{Key: keyOf("day"), Limit: perDay(most)}}
		s.Steps = []Step{{At: 100 * ms, Node: 1, Take: &Take{N: 1, Wait: 200 * ms, Hold: 300 * ms, Charges: []TakeCharge{
			{Cost: most + over, Actual: 80, Oversize: limiter.Debt},
		}}}}
		cfg := Config{Script: s, Trace: true}
		w := start(cfg, s)
		w.run(storm)
		w.cfg.storm = never
		got := int64(0)
		for n := 0; n < 2*most && w.failed == ""; n++ {
			before := w.stats.Admitted
			w.living()[1].begin(Take{N: 10_000 + n, Wait: 200 * ms, Charges: []TakeCharge{{Cost: 1, Actual: 1}}})
			w.run(w.now + 400*ms)
			if w.stats.Admitted == before {
				break
			}
			got++
		}
		if w.failed != "" || got != most-80 {
			for _, line := range w.trace[max(0, len(w.trace)-100):] {
				t.Log(line)
			}
			t.Errorf("%d over: %s; %d could be had after 80 of %d were used", over, w.failed, got, most)
		}
	}
}

// An answer that is lost leaves no lease behind that only its owner knows of: the holder speaks on until it has heard.
func TestLostAnswerIsHeard(t *testing.T) {
	w := newLab(Config{Trace: true, Sizer: constant{0, 10, 9}}, perSecond(1, 10))
	b, c := w.proc('b'), w.proc('c')
	w.keep(c, w.proc('a').inc)
	w.flush()
	w.take(c, 1)
	w.deliver(0, false)
	w.lose()
	w.beat(500 * ms)
	if n, _ := c.inHand(w.buckets[0]); n != 9 {
		t.Errorf("c has %d in hand, want the 9 that it was lent", n)
	}
	c.holder.Drain()
	w.beat(500 * ms)
	w.take(b, 9)
	w.flush()
	w.passes(t)
	if w.stats.Admitted != 1 {
		t.Error("what c gave back cannot be had")
	}
}

// What is forged changes nothing at who gets it, and tells nothing that is true.
func TestTwistTellsNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		m := twist(rng, packet{response: &lease.Response{Epoch: 3, Session: 2, RollTaken: 3, Leases: []lease.Lease{{Series: 1, Number: 1}}}})
		if m.response.RollTaken != 0 {
			t.Fatal("a forged answer says that a roll was taken, and of the lease nothing")
		}
		h := twist(rng, packet{handoff: &lease.Handoff{From: 1, To: 2, Epoch: 2}}).handoff
		if h.Epoch < 100 && h.From < 100 {
			t.Fatalf("a forged hand-off of view %d by %d may be the word of who owned it", h.Epoch, h.From)
		}
	}
}
