package limiter

import (
	"math"
	"time"
)

// What an owner that lends parts of a bucket to others needs beside Take and Adjust. Of a GCRA it
// lends rate and units: lent rate refills elsewhere, and units that others may still spend at
// once, outstanding, keep the level below the burst by as much. Of a fixed window it lends units
// only. All roundings are against the level, by less than 1/Count ns of refill a call.

// ShareOne is the whole of a rate where parts of it are lent.
const ShareOne = 1 << 31

// maxShare bounds a lent share: 2^40, 512 times the rate, while a lowered limit is taking over.
const maxShare = 1 << 40

// Advance brings s to now, where since the newest reading seen share/ShareOne of the rate refilled
// elsewhere and outstanding units could be spent elsewhere at any instant. Afterwards level +
// outstanding ≤ capacity. It comes before every change of either and of the level, with the
// values of before.
func (l *Limit) Advance(s *State, now int64, share uint64, outstanding int64) {
	now = s.clock(now)
	outstanding = max(0, min(outstanding, maxOwed))
	switch l.Algorithm {
	case GCRA:
		deficit := l.deficit(s, s.last)
		if share > 0 {
			deficit = deficit.plus(product(now-s.last, l.Rate.Count).scaleUp(int64(min(share, maxShare)), ShareOne))
		}
		if passed := product(now-s.last, l.Rate.Count); deficit.less(passed) {
			deficit = wide{}
		} else {
			deficit = deficit.minus(passed)
		}
		if floor := product(outstanding, int64(l.Rate.Per)); deficit.less(floor) {
			deficit = floor
		}
		l.owe(s, now, deficit)
	case FixedWindow:
		l.roll(s, now)
		s.a = max(s.a, outstanding)
	case SlidingWindow:
		l.roll(s, now)
	case SlidingLog:
		if s.log != nil {
			s.log.expire(now, l.Rate)
		}
	case Semaphore:
	}
	s.last = now
}

// Credit gives units back, unspent ones or refunds, at a reading to which s was advanced: no level
// rises above capacity less outstanding. Of a window they must be of the present one. A semaphore
// gets its slots back by it.
func (l *Limit) Credit(s *State, now, units, outstanding int64) {
	units = max(0, min(units, MaxUnits))
	if l.Algorithm == SlidingLog {
		l.creditLog(s, now, units)
		return
	}
	l.Adjust(s, now, now, units)
	if l.Algorithm == GCRA || l.Algorithm == FixedWindow {
		l.Advance(s, now, 0, outstanding)
	}
}

// creditLog takes units out of the oldest entries, since nobody knows any more which was theirs:
// what remains counts no shorter than it should.
func (l *Limit) creditLog(s *State, now, units int64) {
	l.Adjust(s, now, now, 0)
	g := s.log
	paid := min(units, g.debt)
	g.debt -= paid
	units -= paid
	for units > 0 && len(g.live()) > 0 {
		e := &g.live()[0]
		taken := min(units, e.cost)
		e.cost -= taken
		g.sum -= taken
		units -= taken
		if e.cost == 0 {
			g.head++
		}
	}
}

// Debit takes units without asking, whatever the level: those put into a lease, or a debt.
func (l *Limit) Debit(s *State, now, units int64) {
	l.Adjust(s, now, now, -max(0, min(units, MaxUnits)))
}

// Level is what is left at now in whole units, rounded down; negative is debt. It moves s no further: the time up to
// now is still to be advanced over, with the share that is lent.
func (l *Limit) Level(s *State, now int64) int64 {
	t := *s
	return l.Take(&t, now, 0, Refuse).Remaining
}

// Until is the time from now, to which s was advanced, until cost conforms if nothing else happens,
// while share/ShareOne of the rate is lent and outstanding units are. Never where it will not.
func (l *Limit) Until(s *State, now, cost int64, share uint64, outstanding int64) time.Duration {
	if l.Algorithm != GCRA {
		return l.Peek(s, now, cost, Refuse).RetryAfter
	}
	now = s.clock(now)
	size := product(l.Burst, int64(l.Rate.Per))
	after := l.deficit(s, now).plus(product(max(cost, 0), int64(l.Rate.Per)))
	switch {
	case cost <= 0 || !size.less(after):
		return 0
	case cost > l.Burst-min(outstanding, l.Burst) || share >= ShareOne:
		return Never
	}
	wait := after.minus(size)
	if share > 0 {
		wait = wait.scaleUp(ShareOne, ShareOne-int64(share))
	}
	return time.Duration(wait.overUp(l.Rate.Count))
}

// Share converts a share of from's rate into one of l's, rounded up, so that it is no less.
func (l *Limit) Share(share uint64, from *Limit) uint64 {
	if l.Algorithm != GCRA || from.Algorithm != GCRA || l.Rate == from.Rate {
		return share
	}
	w := product(int64(min(share, maxShare)), from.Rate.Count).scaleUp(int64(l.Rate.Per), int64(from.Rate.Per))
	return uint64(min(w.overUp(l.Rate.Count), maxShare))
}

// Earned is what share/ShareOne of the rate brings in d, rounded up.
func (l *Limit) Earned(share uint64, d int64) int64 {
	if l.Algorithm != GCRA || share == 0 || d <= 0 {
		return 0
	}
	w := product(min(d, maxClock), l.Rate.Count).scaleUp(int64(min(share, maxShare)), ShareOne)
	return min(w.overUp(int64(l.Rate.Per)), math.MaxInt64)
}

// Fill is how long the whole rate takes to bring units, rounded up; Never where there is no rate.
func (l *Limit) Fill(units int64) time.Duration {
	if l.Algorithm != GCRA {
		return Never
	}
	return time.Duration(product(max(units, 0), int64(l.Rate.Per)).overUp(l.Rate.Count))
}
