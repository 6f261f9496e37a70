package limiter_test

import (
	"math/big"
	"testing"
	"time"

	"headgate/limiter"

	"pgregory.net/rapid"
)

// The reference: each algorithm in the most literal form, in math/big, a
// bucket that fills with time, a count for each window, one record for each
// unit. It shares nothing with the package but the types.
type reference interface {
	advance(now int64)
	// take decides and charges.
	take(cost int64, over limiter.Oversize) bool
	// level is what is left, not rounded.
	level() *big.Rat
	adjust(at, delta int64)
	// load charges units that were spent under another limit.
	load(units *big.Rat)
	// resize changes the capacity or rate without touching what is spent.
	resize(l limiter.Limit)
}

func rat(n int64) *big.Rat { return new(big.Rat).SetInt64(n) }

func ratio(a, b int64) *big.Rat { return big.NewRat(a, b) }

// floor rounds down, ceil up.
func floor(r *big.Rat) int64 {
	q, m := new(big.Int).DivMod(r.Num(), r.Denom(), new(big.Int))
	_ = m // DivMod is Euclidean: with a positive denominator the quotient is the floor.
	return q.Int64()
}

func ceil(r *big.Rat) int64 { return -floor(new(big.Rat).Neg(r)) }

func admits(l limiter.Limit, level *big.Rat, cost int64, over limiter.Oversize) bool {
	if cost > l.Capacity() {
		return over == limiter.Debt && level.Cmp(rat(l.Capacity())) == 0
	}
	return cost <= 0 || level.Cmp(rat(cost)) >= 0
}

// bucket fills at the limit's rate up to its burst.
type bucket struct {
	limit limiter.Limit
	now   int64
	held  *big.Rat
}

func (b *bucket) cap() {
	if full := rat(b.limit.Burst); b.held.Cmp(full) > 0 {
		b.held = full
	}
}

func (b *bucket) advance(now int64) {
	drops := new(big.Rat).Mul(rat(now-b.now), ratio(b.limit.Rate.Count, int64(b.limit.Rate.Per)))
	b.held = new(big.Rat).Add(b.held, drops)
	b.now = now
	b.cap()
}

func (b *bucket) take(cost int64, over limiter.Oversize) bool {
	ok := admits(b.limit, b.held, cost, over)
	if ok && cost > 0 {
		b.held = new(big.Rat).Sub(b.held, rat(cost))
	}
	return ok
}

func (b *bucket) level() *big.Rat { return b.held }

func (b *bucket) adjust(_, delta int64) {
	b.held = new(big.Rat).Add(b.held, rat(delta))
	b.cap()
}

func (b *bucket) load(units *big.Rat) { b.held = new(big.Rat).Sub(b.held, units) }

// resize keeps the deficit, rounded up to what the new period expresses.
func (b *bucket) resize(l limiter.Limit) {
	deficit := new(big.Rat).Sub(rat(b.limit.Burst), b.held)
	grain := rat(int64(l.Rate.Per))
	deficit = new(big.Rat).Quo(rat(ceil(new(big.Rat).Mul(deficit, grain))), grain)
	b.limit = l
	b.held = new(big.Rat).Sub(rat(l.Burst), deficit)
}

// windows steps from window to window, carrying debt.
type windows struct {
	limit               limiter.Limit
	now, index          int64
	last, used, carried int64
}

func (w *windows) advance(now int64) {
	w.now = now
	for w.index < now/int64(w.limit.Rate.Per) {
		w.index++
		w.last = min(w.used, w.limit.Rate.Count)
		w.used = max(w.used-w.limit.Rate.Count, 0)
		w.carried = w.used
		if w.used == 0 && w.last == 0 {
			w.index = now / int64(w.limit.Rate.Per)
		}
	}
}

func (w *windows) level() *big.Rat {
	level := rat(w.limit.Rate.Count - w.used)
	if w.limit.Algorithm == limiter.SlidingWindow {
		per := int64(w.limit.Rate.Per)
		share := ratio((w.index+1)*per-w.now, per)
		level.Sub(level, share.Mul(share, rat(w.last)))
	}
	return level
}

func (w *windows) take(cost int64, over limiter.Oversize) bool {
	ok := admits(w.limit, w.level(), cost, over)
	if ok {
		w.used += max(cost, 0)
	}
	return ok
}

func (w *windows) adjust(at, delta int64) {
	own := at / int64(w.limit.Rate.Per)
	switch {
	case delta < 0:
		w.used -= delta
	case own == w.index:
		w.used = max(w.used-delta, 0)
		w.carried = min(w.carried, w.used)
	default:
		for ; delta > 0 && w.carried > 0; delta-- {
			w.carried--
			w.used--
		}
		if own == w.index-1 {
			w.last = max(w.last-delta, 0)
		}
	}
}

func (w *windows) load(units *big.Rat) { w.used = ceil(units); w.carried = w.used }

func (w *windows) resize(l limiter.Limit) {
	if l.Algorithm == limiter.SlidingWindow && w.limit.Algorithm == limiter.FixedWindow {
		w.last = 0 // a fixed window did not remember it
	}
	w.limit = l
}

// units remembers every single unit.
type units struct {
	limit limiter.Limit
	now   int64
	at    []int64 // oldest first
	owed  int64
}

func (u *units) advance(now int64) {
	u.now = now
	for len(u.at) > 0 && u.at[0]+int64(u.limit.Rate.Per) <= now {
		left := u.at[0] + int64(u.limit.Rate.Per)
		u.at = u.at[1:]
		if u.owed > 0 {
			u.owed--
			u.at = append(u.at, left)
		}
	}
}

func (u *units) level() *big.Rat { return rat(u.limit.Rate.Count - int64(len(u.at)) - u.owed) }

func (u *units) charge(n int64) {
	for ; n > 0; n-- {
		if int64(len(u.at)) < u.limit.Rate.Count {
			u.at = append(u.at, u.now)
		} else {
			u.owed++
		}
	}
}

func (u *units) take(cost int64, over limiter.Oversize) bool {
	ok := admits(u.limit, u.level(), cost, over)
	if ok {
		u.charge(cost)
	}
	return ok
}

func (u *units) adjust(at, delta int64) {
	u.charge(-delta)
	for ; delta > 0; delta-- {
		if u.owed > 0 {
			u.owed--
			continue
		}
		for i := range u.at {
			if u.at[i] == at {
				u.at = append(u.at[:i:i], u.at[i+1:]...)
				break
			}
		}
	}
}

func (u *units) load(r *big.Rat) { u.charge(ceil(r)) }

func (u *units) resize(l limiter.Limit) {
	u.limit = l
	for int64(len(u.at)) > l.Rate.Count {
		u.at = u.at[:len(u.at)-1]
		u.owed++
	}
	for u.owed > 0 && int64(len(u.at)) < l.Rate.Count {
		u.owed--
		u.at = append(u.at, u.now)
	}
}

// slots counts.
type slots struct {
	limit limiter.Limit
	used  int64
}

func (s *slots) advance(int64)          {}
func (s *slots) level() *big.Rat        { return rat(s.limit.Burst - s.used) }
func (s *slots) adjust(_, delta int64)  { s.used = max(s.used-delta, 0) }
func (s *slots) load(*big.Rat)          {}
func (s *slots) resize(l limiter.Limit) { s.limit = l }

func (s *slots) take(cost int64, over limiter.Oversize) bool {
	ok := admits(s.limit, s.level(), cost, over)
	if ok {
		s.used += max(cost, 0)
	}
	return ok
}

func newReference(l limiter.Limit, now int64) reference {
	switch l.Algorithm {
	case limiter.GCRA:
		return &bucket{limit: l, now: now, held: rat(l.Burst)}
	case limiter.FixedWindow, limiter.SlidingWindow:
		return &windows{limit: l, now: now, index: now / int64(l.Rate.Per)}
	case limiter.SlidingLog:
		return &units{limit: l, now: now}
	}
	return &slots{limit: l}
}

// convert carries a reference over as Convert promises to.
func convert(r reference, from, to limiter.Limit, now int64) reference {
	windowed := func(l limiter.Limit) bool {
		return l.Algorithm == limiter.FixedWindow || l.Algorithm == limiter.SlidingWindow
	}
	same := from.Algorithm == to.Algorithm || windowed(from) && windowed(to)
	if same && (from.Rate.Per == to.Rate.Per || from.Algorithm == limiter.GCRA) {
		r.resize(to)
		return r
	}
	fresh := newReference(to, now)
	if from.Algorithm != limiter.Semaphore && to.Algorithm != limiter.Semaphore {
		spent := new(big.Rat).Sub(rat(from.Capacity()), r.level())
		fresh.load(rat(ceil(spent)))
	}
	return fresh
}

var algorithms = []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog, limiter.Semaphore}

// drawLimit draws limits from one unit a day to several a nanosecond.
func drawLimit(t *rapid.T, algorithms ...limiter.Algorithm) limiter.Limit {
	a := rapid.SampledFrom(algorithms).Draw(t, "algorithm")
	rate := limiter.Rate{
		Count: rapid.OneOf(rapid.Int64Range(1, 12), rapid.SampledFrom([]int64{600, 9_973, 1e9, 250e9})).Draw(t, "count"),
		Per: rapid.SampledFrom([]time.Duration{
			7, 1000, time.Second, 10 * time.Second, time.Minute,
			time.Hour, 24 * time.Hour,
		}).Draw(t, "per"),
	}
	burst := rapid.Int64Range(1, 50).Draw(t, "burst")
	switch a {
	case limiter.SlidingLog:
		rate.Count = rate.Count%12 + 1
	case limiter.FixedWindow, limiter.SlidingWindow:
		rate.Count = rate.Count%1000 + 1
	case limiter.GCRA:
		burst *= rapid.SampledFrom([]int64{1, rate.Count}).Draw(t, "bursts")
	}
	if len(algorithms) > 1 {
		// What one spends another may have to pay, unit by unit in the
		// reference and before the clock's end.
		rate.Count, burst = rate.Count%12+1, burst%50+1
	}
	l := limitOf(a, rate, burst)
	if err := l.Validate(); err != nil {
		t.Fatal(err)
	}
	return l
}

func drawCost(t *rapid.T, l limiter.Limit) int64 {
	c := l.Capacity()
	return rapid.OneOf(rapid.Int64Range(-2, 12), rapid.Int64Range(0, c), rapid.Int64Range(max(1, c-1), c+1),
		rapid.Int64Range(c, 4*c)).Draw(t, "cost")
}

// machine runs a limit beside its reference.
type machine struct {
	limit limiter.Limit
	state limiter.State
	ref   reference
	now   int64
	open  []charge // taken and not settled
}

type charge struct{ at, cost int64 }

func (m *machine) step(t *rapid.T) {
	per := int64(max(m.limit.Rate.Per, time.Second))
	m.now += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 3), rapid.Int64Range(0, per/4),
		rapid.SampledFrom([]int64{per - m.now%per, per, 2 * per}), rapid.Int64Range(0, 3*per)).Draw(t, "step")
	m.ref.advance(m.now)
}

func (m *machine) take(t *rapid.T) {
	m.step(t)
	cost := drawCost(t, m.limit)
	over := rapid.SampledFrom([]limiter.Oversize{limiter.Refuse, limiter.Debt}).Draw(t, "oversize")
	peeked := m.limit.Peek(&m.state, m.now, cost, over)
	d := m.limit.Take(&m.state, m.now, cost, over)
	if d != peeked {
		t.Fatalf("peeked %+v, took %+v", peeked, d)
	}
	want := m.ref.take(cost, over)
	if left := floor(m.ref.level()); d.Admitted != want || d.Remaining != left || d.At != m.now {
		t.Fatalf("cost %d at %d: got %+v, want admitted %v, remaining %d", cost, m.now, d, want, left)
	}
	if d.Admitted {
		m.open = append(m.open, charge{d.At, max(cost, 0)})
	}
	m.promises(t, d, cost, over)
}

// promises holds a decision to what it says about the time to come.
func (m *machine) promises(t *rapid.T, d limiter.Decision, cost int64, over limiter.Oversize) {
	admitted := func(after time.Duration) bool {
		return m.limit.Peek(&m.state, m.now+int64(after), cost, over).Admitted
	}
	full := func(after time.Duration) bool {
		return m.limit.Peek(&m.state, m.now+int64(after), 0, over).Reset == 0
	}
	switch {
	case d.Admitted != (d.RetryAfter == 0):
		t.Fatalf("%+v", d)
	case d.RetryAfter == limiter.Never:
		if m.limit.Algorithm != limiter.Semaphore && !(cost > m.limit.Capacity() && over == limiter.Refuse) {
			t.Fatalf("cost %d: no wait helps: %+v", cost, d)
		}
	case d.RetryAfter > 0 && (admitted(d.RetryAfter-1) || !admitted(d.RetryAfter)):
		t.Fatalf("cost %d: retry is not exact: %+v", cost, d)
	}
	switch {
	case d.Reset == 0 && d.Remaining != m.limit.Capacity(), d.Reset == limiter.Never && m.limit.Algorithm != limiter.Semaphore:
		t.Fatalf("%+v", d)
	case d.Reset > 0 && d.Reset < limiter.Never && (full(d.Reset-1) || !full(d.Reset)):
		t.Fatalf("reset is not exact: %+v", d)
	}
}

func (m *machine) settle(t *rapid.T) {
	if len(m.open) == 0 {
		t.Skip("nothing open")
	}
	m.step(t)
	i := rapid.IntRange(0, len(m.open)-1).Draw(t, "charge")
	c := m.open[i]
	m.open = append(m.open[:i], m.open[i+1:]...)
	actual := rapid.OneOf(rapid.SampledFrom([]int64{0, c.cost}), rapid.Int64Range(0, 2*c.cost),
		rapid.Int64Range(c.cost, c.cost+m.limit.Capacity())).Draw(t, "actual")
	m.limit.Adjust(&m.state, m.now, c.at, c.cost-actual)
	m.ref.adjust(c.at, c.cost-actual)
}

func (m *machine) change(t *rapid.T) {
	m.step(t)
	from := m.limit
	next := drawLimit(t, algorithms...)
	m.ref = convert(m.ref, from, next, m.now)
	next.Convert(&m.state, m.now, &from)
	m.limit = next
	if (from.Algorithm == limiter.Semaphore) != (next.Algorithm == limiter.Semaphore) {
		m.open = nil
	}
}

func (m *machine) check(t *rapid.T) {
	d := m.limit.Peek(&m.state, m.now, 0, limiter.Refuse)
	if left := floor(m.ref.level()); d.Remaining != left || d.Remaining > m.limit.Capacity() {
		t.Fatalf("%d left of %d, want %d", d.Remaining, m.limit.Capacity(), left)
	}
	want := m.ref.level().Cmp(rat(m.limit.Capacity())) == 0
	if got := m.limit.Full(&m.state, m.now); got != want || got != (d.Reset == 0) {
		t.Fatalf("full is %v, want %v; %+v", got, want, d)
	}
	if m.limit.Full(&m.state, m.now) {
		m.state = limiter.State{} // a full bucket may be forgotten at any time
	}
}

func TestAgainstReference(t *testing.T) {
	for _, a := range algorithms {
		t.Run(a.String(), rapid.MakeCheck(func(t *rapid.T) {
			m := newMachine(t, a)
			t.Repeat(map[string]func(*rapid.T){"take": m.take, "settle": m.settle, "": m.check})
		}))
	}
}

// Also while the limit itself changes, to any other.
func TestChangedLimitsKeepWhatWasSpent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t, algorithms...)
		t.Repeat(map[string]func(*rapid.T){"take": m.take, "settle": m.settle, "change": m.change, "": m.check})
	})
}

func newMachine(t *rapid.T, algorithms ...limiter.Algorithm) *machine {
	m := &machine{limit: drawLimit(t, algorithms...), now: start}
	m.ref = newReference(m.limit, m.now)
	return m
}

// TestConformance holds every window between two events of a GCRA to burst +
// rate·w, refunds counted at the reading that changed the bucket.
func TestConformance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLimit(t, limiter.GCRA)
		var s limiter.State
		type event struct{ at, admitted int64 }
		var events []event
		var open []charge
		now := start
		gap := max(1, 3*int64(l.Rate.Per)/l.Rate.Count)
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				now += rapid.Int64Range(0, gap).Draw(t, "step")
				cost := rapid.Int64Range(1, l.Burst).Draw(t, "cost")
				if d := l.Take(&s, now, cost, limiter.Refuse); d.Admitted {
					events = append(events, event{now, cost})
					open = append(open, charge{now, cost})
				}
			},
			"refund": func(t *rapid.T) {
				if len(open) == 0 {
					t.Skip("nothing open")
				}
				now += rapid.Int64Range(0, gap).Draw(t, "step")
				c := open[0]
				open = open[1:]
				before := l.Peek(&s, now, 0, limiter.Refuse).Remaining
				back := rapid.Int64Range(0, c.cost).Draw(t, "back")
				l.Adjust(&s, now, c.at, back)
				// What really came back, rounded down: the cap keeps the rest.
				after := l.Peek(&s, now, 0, limiter.Refuse).Remaining
				events = append(events, event{now, -min(back, after-before)})
			},
		})
		rate := ratio(l.Rate.Count, int64(l.Rate.Per))
		for i := range events {
			sum := int64(0)
			for _, e := range events[i:] {
				sum += e.admitted
				bound := new(big.Rat).Mul(rate, rat(e.at-events[i].at))
				if bound.Add(bound, rat(l.Burst)); rat(sum).Cmp(bound) > 0 {
					t.Fatalf("%d admitted in %d ns, at most %v conform", sum, e.at-events[i].at, bound.FloatString(3))
				}
			}
		}
	})
}
