package capacity

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// clock feeds a learner ten observations a second and a reading each second.
type clock struct {
	l   *learner
	now int64
}

func newClock(set settings) *clock { return &clock{l: newLearner(set), now: int64(time.Hour)} }

// run tells the same for a while: o is of one second, s nil where there are no metrics.
func (c *clock) run(d time.Duration, o Observation, s *Sample) {
	for end := c.now + int64(d); c.now < end; {
		c.l.scraped(c.now, s)
		if s != nil {
			s.Tokens += 1000
		}
		for i := range 10 {
			c.now += int64(time.Second / 10)
			part := Observation{InUse: o.InUse, Waiting: o.Waiting, Pause: o.Pause}
			if i == 0 {
				part = o
			}
			if o.InUse < 0 { // as many as are allowed
				part.InUse = c.l.told()
			}
			c.l.observe(c.now, &part)
		}
	}
}

// busy is a second in which all slots allowed are used and answers come soon.
func busy() Observation {
	return Observation{InUse: -1, Waiting: 5, Done: 10, FirstBytes: 10, FirstByte: 10 * 50 * time.Millisecond, SlotTime: time.Second}
}

func easy() *Sample {
	return &Sample{HasWaiting: true, Running: 20, HasRunning: true, KVUsage: .3, HasKV: true, HasPreemptions: true, HasTokens: true}
}

func TestLearnerGrowsWhereItIsUsed(t *testing.T) {
	for name, set := range map[string]settings{"with metrics": {32, 2, true}, "without": {32, 2, false}} {
		sample := func() *Sample {
			if set.metrics {
				return easy()
			}
			return nil
		}
		c := newClock(set)
		start := c.l.told()
		idle := busy()
		idle.InUse, idle.Waiting = 1, 0
		c.run(time.Minute, idle, sample())
		if got := c.l.told(); got != start {
			t.Errorf("%s: %d, though %d were never used", name, got, start)
		}
		c.run(time.Minute, busy(), sample())
		if got := c.l.told(); got != 32 {
			t.Errorf("%s: %d after a minute of use, want 32", name, got)
		}
	}
}

func TestLearnerUnknownIsNotIdle(t *testing.T) {
	c := newClock(settings{32, 1, true})
	start := c.l.told()
	c.run(time.Minute, Observation{InUse: -1, Waiting: 5}, nil)
	if got := c.l.told(); got != start {
		t.Errorf("%d, want %d: nothing began, nothing ended", got, start)
	}
	bad := busy()
	bad.Failures = 5
	c.run(time.Minute, bad, easy())
	if got := c.l.told(); got != start {
		t.Errorf("%d, want %d: half of the requests failed", got, start)
	}
	page := easy()
	page.KVUsage = .9
	c.run(time.Minute, busy(), page)
	if got := c.l.told(); got != start {
		t.Errorf("%d, want %d: memory is nearly full", got, start)
	}
}

// TestLearnerWithoutStreams: where no answer streams, its whole time stands for its first byte's.
func TestLearnerWithoutStreams(t *testing.T) {
	c := newClock(settings{32, 1, false})
	c.run(time.Minute, Observation{InUse: -1, Waiting: 1, Done: 10, SlotTime: 2 * time.Second, Answers: 10, Answer: 2 * time.Second}, nil)
	if got := c.l.told(); got != 32 {
		t.Fatalf("%d after a minute of use, want 32", got)
	}
	c.run(5*time.Second, Observation{InUse: -1, Waiting: 1, Done: 10, SlotTime: 50 * time.Second, Answers: 10, Answer: 50 * time.Second}, nil)
	if got := c.l.told(); got >= 32 {
		t.Errorf("%d after answers took 25 times as long", got)
	}
}

// TestLearnerCuts holds each sign against 32 slots in use: one interval of it, and a minute.
func TestLearnerCuts(t *testing.T) {
	for name, c := range map[string]struct {
		o    func(*Observation)
		s    func(*Sample)
		once int64 // the most after 3 s
		much int64 // the most after a minute of it
	}{
		"a 429":          {func(o *Observation) { o.Pushbacks = 1 }, nil, 28, 2},
		"vLLM's queue":   {nil, func(s *Sample) { s.Waiting, s.Running = 10, 20 }, 24, 2},
		"memory is full": {nil, func(s *Sample) { s.KVUsage = .96 }, 29, 8},
		// It stays slow, whatever is cut: after half of it that counts as the work's nature, and the limit grows again.
		"slow": {func(o *Observation) { o.FirstByte = 30 * time.Second }, nil, 28, 30},
	} {
		t.Run(name, func(t *testing.T) {
			k := newClock(settings{32, 1, true})
			k.run(time.Minute, busy(), easy())
			o, s := busy(), easy()
			if c.o != nil {
				c.o(&o)
			}
			if c.s != nil {
				c.s(s)
			}
			k.run(3*time.Second, o, s)
			if got := k.l.told(); got > c.once || got < 10 {
				t.Errorf("%d after 3 s, want %d at most, and no less than 10", got, c.once)
			}
			k.run(time.Minute, o, s)
			if got := k.l.told(); got > c.much || got < 1 {
				t.Errorf("%d after a minute, want %d at most", got, c.much)
			}
			k.run(90*time.Second, busy(), easy())
			if got := k.l.told(); got != 32 {
				t.Errorf("%d when it had been well for 90 s, want 32", got)
			}
		})
	}
}

func TestLearnerCutsForPreemptions(t *testing.T) {
	k := newClock(settings{32, 1, true})
	k.run(time.Minute, busy(), easy())
	s := easy()
	s.Preemptions = 1
	k.run(2*time.Second, busy(), s)
	if got := k.l.told(); got != 28 {
		t.Errorf("%d after a preemption, want 28", got)
	}
	// The process began anew: fewer are no preemption.
	k.run(time.Minute, busy(), easy())
	if got := k.l.told(); got != 32 {
		t.Errorf("%d a minute after, want 32", got)
	}
}

// TestLearnerWaitsForACutToComeTrue: requests that run on are no reason to cut again.
func TestLearnerWaitsForACutToComeTrue(t *testing.T) {
	k := newClock(settings{32, 1, true})
	k.run(time.Minute, busy(), easy())
	full, s := busy(), easy()
	full.InUse = 32
	s.Waiting, s.Running = 8, 24
	k.run(20*time.Second, full, s)
	if got := k.l.told(); got != 24 {
		t.Errorf("%d while 32 are in use, want 24: one cut", got)
	}
}

// TestLearnerNeverWedges: refusals without end leave the least, at least 1, and not for ever (case 3).
func TestLearnerNeverWedges(t *testing.T) {
	for _, least := range []int64{1, 3} {
		k := newClock(settings{32, least, false})
		refused := Observation{InUse: -1, Waiting: 100, Pushbacks: 1000}
		k.run(10*time.Minute, refused, nil)
		if got := k.l.told(); got != least {
			t.Errorf("%d after ten minutes of refusals, want %d", got, least)
		}
		k.run(2*time.Minute, busy(), nil)
		if got := k.l.told(); got != 32 {
			t.Errorf("%d two minutes after, want 32", got)
		}
	}
}

func TestLearnerHeedsRetryAfter(t *testing.T) {
	k := newClock(settings{32, 1, true})
	o := busy()
	o.Pushbacks, o.Pause = 1, 30*time.Second
	k.run(2*time.Second, o, easy())
	at := k.l.told()
	k.run(25*time.Second, busy(), easy())
	if got := k.l.told(); got != at {
		t.Errorf("%d while it is to be left alone, want %d", got, at)
	}
	k.run(time.Minute, busy(), easy())
	if got := k.l.told(); got != 32 {
		t.Errorf("%d after that, want 32", got)
	}
}

// TestLearnerStale: metrics that were there and are not count as saturated; those that never were are unknown.
func TestLearnerStale(t *testing.T) {
	k := newClock(settings{32, 2, true})
	k.run(time.Minute, busy(), nil)
	if k.l.stale(k.now) || k.l.told() != 32 {
		t.Errorf("never had any: stale %v, limit %d; want false, 32", k.l.stale(k.now), k.l.told())
	}
	k.run(10*time.Second, busy(), easy())
	k.run(3*time.Second, busy(), nil) // the last was a second ago
	if k.l.stale(k.now) || k.l.told() != 32 {
		t.Errorf("after 4 s: stale %v, limit %d; want false, 32", k.l.stale(k.now), k.l.told())
	}
	k.run(4*time.Second, busy(), nil)
	if !k.l.stale(k.now) || k.l.told() >= 32 {
		t.Errorf("after 8 s: stale %v, limit %d; want true and less than 32", k.l.stale(k.now), k.l.told())
	}
	k.run(5*time.Minute, busy(), nil)
	if !k.l.stale(k.now) || k.l.told() != 2 {
		t.Errorf("after 5 min: stale %v, limit %d; want true, 2", k.l.stale(k.now), k.l.told())
	}
	k.run(time.Minute, busy(), easy())
	if k.l.stale(k.now) || k.l.told() < 16 {
		t.Errorf("back for a minute: stale %v, limit %d; want false, 16 or more", k.l.stale(k.now), k.l.told())
	}
	k.now += int64(time.Hour)
	k.l.resume(k.now)
	if k.l.stale(k.now) {
		t.Error("stale for the hour in which nobody asked")
	}
}

// TestLearnerFrozen: a page that says the same for ever, while requests are answered, is as good as none. One that says the same
// because nothing happens, or nothing but what the backend refuses, is not; nor because all was told at the same time.
func TestLearnerFrozen(t *testing.T) {
	answers := func(n int64) func(int) Observation {
		return func(int) Observation { return Observation{Done: n, Answers: n} }
	}
	for name, c := range map[string]struct {
		seen  func(second int) Observation
		stale bool
	}{
		"requests are answered": {answers(2), true},
		"streams begin":         {func(int) Observation { return Observation{FirstBytes: 2} }, true},
		"nothing happens":       {answers(0), false},
		"requests are refused":  {func(int) Observation { return Observation{Done: 5} }, false},
		"a crowd, and silence": {func(second int) Observation {
			if second < 1 {
				return Observation{Done: 100, Answers: 100}
			}
			return Observation{}
		}, false},
		"one now and then that the page has already": {func(second int) Observation { return Observation{Done: 1, Answers: int64(1 - min(1, second%10))} }, false},
	} {
		k := newClock(settings{32, 2, true})
		for second := range 20 {
			k.now += int64(time.Second)
			k.l.scraped(k.now, easy())
			o := c.seen(second)
			k.l.observe(k.now+int64(200*time.Millisecond), &o)
		}
		if got := k.l.stale(k.now); got != c.stale {
			t.Errorf("%s: stale %v, want %v", name, got, c.stale)
		}
	}
}

func TestLearnerSeed(t *testing.T) {
	k := newClock(settings{32, 2, true})
	k.l.seed(20)
	if got := k.l.told(); got != 20 {
		t.Errorf("%d, want what it was told", got)
	}
	k.l.seed(1000)
	if got := k.l.told(); got != 32 {
		t.Errorf("%d, want the most", got)
	}
	k.l.seed(20)
	k.run(10*time.Second, busy(), easy())
	own := k.l.told()
	k.l.seed(5)
	if got := k.l.told(); got != own || own <= 20 {
		t.Errorf("%d, want its own %d, grown from 20", got, own)
	}
	k.l.apply(settings{8, 2, true})
	if got := k.l.told(); got != 8 {
		t.Errorf("%d with 8 slots", got)
	}
	k.l.apply(settings{64, 40, true})
	if got := k.l.told(); got != 40 {
		t.Errorf("%d with 40 at least", got)
	}
}

// TestLearnerBounds: whatever it is told, the limit stays within its bounds, moves at most once a second, and by no more than its
// steps.
func TestLearnerBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		set := Backend{
			Slots: rapid.Int64Range(-2, 300).Draw(t, "slots"), Min: rapid.Int64Range(-2, 300).Draw(t, "min"), Metrics: rapid.Bool().Draw(t, "metrics"),
		}
		bound := set.settings()
		l := newLearner(bound)
		now, moved := int64(1), int64(1)
		small := rapid.Int64Range(0, 400)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			dt := rapid.Int64Range(-1e9, 4e9).Draw(t, "dt")
			if now += dt; dt < 0 { // the clock went back: time counts from there
				moved = min(moved, now)
			}
			before := l.limit
			if rapid.Bool().Draw(t, "scrape") {
				s := &Sample{
					Waiting: small.Draw(t, "w"), HasWaiting: rapid.Bool().Draw(t, "hw"), Running: small.Draw(t, "r"), HasRunning: rapid.Bool().Draw(t, "hr"),
					KVUsage: rapid.Float64Range(0, 1).Draw(t, "kv"), HasKV: rapid.Bool().Draw(t, "hkv"), Preemptions: small.Draw(t, "p"), HasPreemptions: true,
				}
				l.scraped(now, s)
			} else {
				l.observe(now, &Observation{
					InUse: small.Draw(t, "use"), Waiting: small.Draw(t, "waiting"), Done: small.Draw(t, "done"), FirstBytes: small.Draw(t, "n"), Answers: small.Draw(t, "answers"), Answer: time.Duration(small.Draw(t, "answer")) * time.Second,
					FirstByte: time.Duration(rapid.Int64Range(-1, 1e12).Draw(t, "fb")), SlotTime: time.Duration(rapid.Int64Range(0, 1e12).Draw(t, "st")),
					Pushbacks: rapid.Int64Range(0, 1).Draw(t, "push"), Failures: rapid.Int64Range(0, 3).Draw(t, "fail"), Pause: time.Duration(rapid.Int64Range(-1, 1e12).Draw(t, "pause")),
				})
			}
			if got := l.told(); got < bound.least || got > bound.slots || got < 1 {
				t.Fatalf("limit %d of %+v", got, bound)
			}
			if l.limit == before {
				continue
			}
			if now-moved < int64(interval) && moved != 1 {
				t.Fatalf("moved %v after it moved", time.Duration(now-moved))
			}
			moved = now
			if l.limit < before*cutDeeply-1e-9 && l.limit != float64(bound.least) || l.limit > before*startGrowth+growthLeast {
				t.Fatalf("from %v to %v", before, l.limit)
			}
		}
	})
}
