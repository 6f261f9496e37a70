package leasetest

import (
	"testing"
	"time"

	"headgate/lease"
	"headgate/limiter"
)

// constant lends everybody the same.
type constant struct {
	share        uint32
	depth, grant int64
}

func (c constant) Size(*lease.Sight, int) (share uint32, depth, grant, refuse int64) {
	return c.share, c.depth, c.grant, 0
}

func (constant) Recall(*lease.Sight, int, int64) bool { return true }

// first lends to one holder at a time.
type first struct{ constant }

func (f first) Size(s *lease.Sight, i int) (share uint32, depth, grant, refuse int64) {
	if s.Holders[i].Depth != s.Outstanding {
		return 0, 0, 0, 0
	}
	return f.share, f.depth, f.grant, 0
}

// early lends at the beginning of a schedule, and nothing later.
type early struct{ constant }

func (e early) Size(s *lease.Sight, i int) (share uint32, depth, grant, refuse int64) {
	if h := &s.Holders[i]; s.Now > 1000*ms {
		return h.Share, h.Depth, 0, 0
	} else if h.Depth != s.Outstanding {
		return 0, 0, 0, 0
	}
	return e.share, e.depth, e.grant, 0
}

func perSecond(count, burst int64) limiter.Limit {
	return limiter.Limit{Algorithm: limiter.GCRA, Rate: limiter.Rate{Count: count, Per: time.Second}, Burst: burst, Revision: 1}
}

func slots(n int64) limiter.Limit {
	return limiter.Limit{Algorithm: limiter.Semaphore, Burst: n, Revision: 1}
}

func perDay(n int64) limiter.Limit {
	return limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: n, Per: 24 * time.Hour}, Revision: 1}
}

func keyOf(limit string) limiter.Key { return limiter.Key{Tenant: "t", Limit: limit} }

// beat lets time pass as it does for the living: keep-alives every 250 ms, all delivered.
func (w *lab) beat(d int64) {
	for step := int64(lease.KeepEvery); d > 0 && w.failed == ""; d -= step {
		w.wait(min(step, d))
		for _, p := range w.living() {
			for _, owner := range p.holder.Owners() {
				w.keep(p, owner)
			}
		}
		w.flush()
	}
}

// drain takes one unit after the other at p until it is refused.
func (w *lab) drain(p *proc) (n int) {
	for w.failed == "" && n < 10_000 {
		before := w.stats.Admitted
		w.take(p, 1)
		w.flush()
		if w.stats.Admitted == before {
			return n
		}
		n++
	}
	return n
}

// spend takes what p has in hand, unit by unit, and asks nobody.
func (w *lab) spend(p *proc) {
	for {
		if n, _ := p.inHand(w.buckets[0]); n < 1 || w.failed != "" {
			return
		}
		w.take(p, 1)
	}
}

// rules has a schedule for each rule that a core can be told to break. As they are, the cores must pass it; broken,
// they must be caught.
func rules() []rule {
	half := uint32(lease.ShareOne / 2)
	lazy := limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 20, Per: 2 * time.Second}, Revision: 1}
	return []rule{
		{"R1 depth", lease.BreakDepth, perSecond(20, 10), constant{half, 10, 1}, func(w *lab) {
			w.take(w.proc('c'), 1)
			w.take(w.proc('d'), 1)
			w.flush()
			w.wait(900 * ms)
		}},
		{"R1 outstanding", lease.BreakOutstanding, perSecond(10, 10), constant{0, 5, 5}, func(w *lab) {
			w.take(w.proc('c'), 1)
			w.flush()
			w.beat(3000 * ms)
		}},
		{"R2 advance", lease.BreakAdvance, perSecond(10, 10), constant{half, 4, 1}, func(w *lab) {
			for range 20 {
				w.drain(w.proc('c'))
				w.drain(w.proc('d'))
				w.beat(250 * ms)
			}
		}},
		{"R3 the larger", lease.BreakLarger, perSecond(10, 10), first{constant{half, 6, 5}}, unheardRecall},
		{"R4 view lease", lease.BreakViewBound, perSecond(10, 10), constant{half, 6, 5}, lendingBeyond},
		{"R5 numbers", lease.BreakNumbers, perSecond(10, 10), early{constant{half, 6, 5}}, lateHello},
		{"R6 totals", lease.BreakTotals, perSecond(1, 10), constant{0, 1, 1}, func(w *lab) {
			c := w.proc('c')
			w.take(c, 8)
			w.flush()
			w.settle(c, 4)
			w.keep(c, w.proc('a').inc)
			told := w.hold(func(packet) bool { return true })
			w.late(told...)
			w.late(told...)
			w.late(told...)
			w.flush()
			w.drain(c)
		}},
		{"R7 second reading", lease.BreakSecondReading, perSecond(10, 10), constant{half, 6, 5}, func(w *lab) {
			c := w.proc('c')
			w.take(c, 1)
			w.flush()
			w.beat(500 * ms)
			c.takePause, c.takeWhole = 2000*ms, true
			w.take(c, 1)
			w.flush()
		}},
		{"R7 late decision", lease.BreakSecondReading, perSecond(10, 10), constant{}, func(w *lab) {
			c := w.proc('c')
			w.take(c, 1)
			w.flush()
			w.take(c, 1)
			w.deliver(0, false)
			answer := w.hold(func(m packet) bool { return m.response != nil })
			w.wait(1100 * ms)
			w.late(answer...)
		}},
		{"R8 depth", lease.BreakRefundDepth, perSecond(10, 10), constant{0, 6, 6}, func(w *lab) {
			c := w.proc('c')
			w.take(c, 1)
			w.flush()
			w.take(c, 4)
			w.beat(4000 * ms)
			w.settle(c, 0)
			w.settle(c, 0)
		}},
		{"R8 series", lease.BreakRefundSeries, lazy, constant{0, 8, 8}, func(w *lab) {
			c := w.proc('c')
			w.take(c, 1)
			w.flush()
			w.take(c, 5)
			w.flush()
			w.beat(2250 * ms)
			w.take(c, 1)
			w.flush()
			w.spend(c)
			w.drain(w.proc('d'))
			w.settle(c, 0)
			w.settle(c, 0)
			w.look()
		}},
		{"R9 changed limits", lease.BreakConvert, perSecond(10, 10), constant{}, func(w *lab) {
			c := w.proc('c')
			w.drain(c)
			l := perSecond(5, 10)
			l.Revision = 2
			w.buckets[0].revise(w.now, l)
			c.node.limit[0] = w.buckets[0].limit
			w.drain(c)
		}},
		{"V3 floor", lease.BreakFloor, perSecond(2, 10), constant{}, secondOwnerAfterACrash},
		{"V3 nothing", lease.BreakNothing, perSecond(10, 10), early{constant{half, 6, 5}}, handOffOfNothing},
		{"V4 wait", lease.BreakWait, perSecond(2, 10), constant{}, func(w *lab) {
			w.take(w.proc('c'), 1)
			w.flush()
			w.cut[w.proc('a')] = true
			w.own(w.proc('b'), w.living()...)
			w.stepAll()
			w.take(w.proc('c'), 1)
			w.flush()
		}},
		{"V4 empty", lease.BreakEmpty, perSecond(2, 10), constant{}, func(w *lab) {
			c := w.proc('c')
			w.drain(c)
			w.proc('a').die("crashes")
			w.own(w.proc('b'), w.living()...)
			w.stepAll()
			w.wait(1100 * ms)
			w.drain(c)
		}},
	}
}

type rule struct {
	name     string
	broken   lease.Rule
	limit    limiter.Limit
	sizer    lease.Sizer
	schedule func(*lab)
}

// unheardRecall: c holds half the rate, spends what it brings, and does not hear that it is wanted back.
func unheardRecall(w *lab) {
	c, d := w.proc('c'), w.proc('d')
	w.park = 50 * ms
	w.take(c, 1)
	w.flush()
	w.take(d, 4)
	w.flush()
	w.keep(c, w.proc('a').inc)
	w.flush()
	w.take(d, 3)
	w.deliver(0, false)
	w.hold(func(m packet) bool { return m.to == c.inc })
	w.flush()
	for range 8 {
		w.wait(100 * ms)
		w.spend(c)
		w.look()
	}
}

// lendingBeyond: a is cut off and has little left of its view lease when it extends c's session; b takes over.
func lendingBeyond(w *lab) {
	a, b, c := w.proc('a'), w.proc('b'), w.proc('c')
	w.take(c, 1)
	w.flush()
	w.cut[a] = true
	w.own(b, b, c, w.proc('d'))
	w.step(b)
	w.wait(900 * ms)
	w.keep(c, a.inc)
	w.flush()
	w.wait(200 * ms)
}

// lateHello: the first request of c, in which it names no session, comes again when c has one; c does not hear the
// answer to it.
func lateHello(w *lab) {
	c, d := w.proc('c'), w.proc('d')
	w.take(c, 1)
	first := w.hold(func(m packet) bool { return m.request != nil })
	w.late(first...)
	w.flush()
	w.drain(d)
	w.spend(c)
	w.beat(250 * ms)
	w.late(first...)
	w.lose()
	for range 6 {
		w.wait(100 * ms)
		w.spend(c)
		w.drain(d)
	}
}

// secondOwnerAfterACrash: the owner of a spent bucket crashes; the next one, who is never asked for it, hands its
// partition on.
func secondOwnerAfterACrash(w *lab) {
	c := w.proc('c')
	w.drain(c)
	w.proc('a').die("crashes")
	w.own(w.proc('b'), w.living()...)
	w.stepAll()
	w.wait(1100 * ms)
	w.take(c, 0, 1) // so that it has begun to grant
	w.flush()
	again := w.start(w.nodes[0])
	w.own(again, w.living()...)
	w.stepAll()
	w.flush()
	w.drain(c)
}

// handOffOfNothing: the owner crashes while c can spend what it lent; the next one loses the partition before its
// wait is over.
func handOffOfNothing(w *lab) {
	c := w.proc('c')
	w.take(c, 1)
	w.flush()
	w.drain(w.proc('d'))
	w.keep(c, w.proc('a').inc)
	w.flush()
	w.proc('a').die("crashes")
	w.own(w.proc('b'), w.living()...)
	w.step(w.proc('b'))
	w.own(w.proc('d'), w.living()...)
	w.step(w.proc('b'))
	w.step(w.proc('d'))
	w.step(w.proc('d'))
	w.flush()
	for range 8 {
		w.wait(100 * ms)
		w.spend(c)
		w.drain(w.proc('d'))
	}
}

// TestSchedules plays each schedule by the rules: nothing is wrong.
func TestSchedules(t *testing.T) {
	for _, r := range rules() {
		t.Run(r.name, func(t *testing.T) {
			w := newLab(Config{Trace: true, Sizer: r.sizer}, r.limit, r.limit)
			r.schedule(w)
			if w.failed != "" {
				for _, line := range w.trace {
					t.Log(line)
				}
				t.Fatal(w.failed)
			}
			if w.stats.Admitted == 0 {
				t.Fatal("nothing was admitted")
			}
		})
	}
}

// TestBrokenRules plays them with the rule removed: the judge must object.
func TestBrokenRules(t *testing.T) {
	for _, r := range rules() {
		t.Run(r.name, func(t *testing.T) {
			w := newLab(Config{Trace: true, Sizer: r.sizer, Break: r.broken}, r.limit, r.limit)
			r.schedule(w)
			if w.failed == "" {
				for _, line := range w.trace {
					t.Log(line)
				}
				t.Fatal("nobody noticed")
			}
			t.Log(w.failed)
		})
	}
}
