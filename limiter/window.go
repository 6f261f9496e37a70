package limiter

import (
	"math"
	"time"
)

// Both window algorithms count in windows aligned to multiples of Per since the
// epoch; s.a is what the window of s.last has used. A sliding window adds the
// previous window's use, s.c, weighed by the part of it that lies less than Per
// back; a fixed window is the case s.c = 0.
//
// Use above the count is debt: it is carried into the next window, which it
// fills first, and so on until it is paid. s.b is the part of s.a that was
// carried in.

func (l *Limit) windowed() bool {
	return l.Algorithm == FixedWindow || l.Algorithm == SlidingWindow
}

// roll brings the counters from the window of s.last to that of now ≥ s.last.
func (l *Limit) roll(s *State, now int64) {
	per := int64(l.Rate.Per)
	if start := now - now%per; s.last < start {
		l.ahead(s, start/per-s.last/per)
	}
	s.last = now
}

// ahead moves the counters n ≥ 1 windows on.
func (l *Limit) ahead(s *State, n int64) {
	count := l.Rate.Count
	s.a = max(0, s.a-times(count, n-1))
	s.c = 0
	if l.Algorithm == SlidingWindow {
		s.c = min(s.a, count)
	}
	s.a = max(0, s.a-count)
	s.b = s.a
}

// times returns a·b for a, b ≥ 0, saturated.
func times(a, b int64) int64 {
	w := product(a, b)
	if w.hi > 0 || w.lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(w.lo)
}

// weighed returns the use of the sliding window that ends at offset into the
// counters' window, in units times Per.
func (l *Limit) weighed(s *State, offset int64) wide {
	per := int64(l.Rate.Per)
	used := product(s.a, per)
	if s.c == 0 {
		return used
	}
	return used.plus(product(s.c, per-offset))
}

func (l *Limit) takeWindow(s *State, now, cost int64, over Oversize, d *Decision) {
	l.roll(s, now)
	per, count := int64(l.Rate.Per), l.Rate.Count
	offset := now % per
	size := product(count, per)
	used := l.weighed(s, offset)
	after := used.plus(product(cost, per))
	d.Admitted = fits(cost, count, over, !size.less(after), used.zero())
	switch {
	case d.Admitted:
		s.a += cost
		used = after
	case cost <= count:
		d.RetryAfter = l.untilFits(*s, offset, cost)
	case over == Debt && cost <= MaxUnits:
		d.RetryAfter = l.untilUnused(*s, offset)
	default:
		d.RetryAfter = Never
	}
	d.Remaining = level(size, used, per)
	d.Reset = l.untilUnused(*s, offset)
}

// untilFits returns when a cost within capacity that does not fit at offset
// will: use falls while the previous window slides out, and at a window's end
// by no more than debt is paid.
func (l *Limit) untilFits(s State, offset, cost int64) time.Duration {
	per, count := int64(l.Rate.Per), l.Rate.Count
	wait := int64(0)
	if over := s.a + cost - count; over > 0 {
		// Whatever the previous window weighs: not before this many ends.
		ends := (over-1)/count + 1
		wait = untilEnd(per, offset, ends)
		l.ahead(&s, ends)
		offset = 0
	}
	if free := count - s.a - cost; s.c > 0 {
		// It fits while at most this much of the previous window counts.
		slice, _ := product(free, per).over(s.c)
		wait = add(wait, max(0, per-offset-slice))
	}
	return time.Duration(wait)
}

// untilUnused returns when nothing that is charged now will count any more.
func (l *Limit) untilUnused(s State, offset int64) time.Duration {
	ends := int64(0)
	if s.a > 0 {
		ends = (s.a-1)/l.Rate.Count + 1
	}
	if l.Algorithm == SlidingWindow && (s.a > 0 || s.c > 0) {
		ends++
	}
	return time.Duration(untilEnd(int64(l.Rate.Per), offset, ends))
}

// untilEnd returns the time from offset into a window to its end, and on to the
// end of the n-th window counted from it; 0 for n = 0, Never past the clock.
func untilEnd(per, offset, n int64) int64 {
	if n == 0 {
		return 0
	}
	return add(times(per, n-1), per-offset)
}

// add returns a + b for a, b ≥ 0, saturated.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

func (l *Limit) adjustWindow(s *State, now, at, delta int64) {
	l.roll(s, now)
	if delta <= 0 {
		s.a = min(s.a-delta, maxOwed)
		return
	}
	per := int64(l.Rate.Per)
	switch behind := now/per - max(0, min(at, now))/per; behind {
	case 0:
		s.a = max(0, s.a-delta)
		s.b = min(s.b, s.a)
	default:
		paid := min(delta, s.b)
		s.a, s.b = s.a-paid, s.b-paid
		if behind == 1 {
			s.c = max(0, s.c-(delta-paid))
		}
	}
}
