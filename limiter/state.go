package limiter

import (
	"math"
	"time"
)

// State is what one bucket remembers between calls. The zero value was never
// used and is full. A State belongs to one Limit at a time (Convert carries it
// to another) and is not safe for concurrent use. It is a plain value;
// under a SlidingLog it refers to its log, and must be copied by Clone.
type State struct {
	// last is the newest clock reading seen. An older one is read as this, and
	// the counters of the two window algorithms belong to the window it is in.
	last int64
	// a, b, c are
	//   GCRA           the TAT in nanoseconds and its remainder in 1/Count ns
	//   FixedWindow    used, and how much of that was carried in as debt
	//   SlidingWindow  the same, and what the previous window used
	//   Semaphore      slots in use
	a, b, c int64
	log     *log
}

const (
	// maxClock bounds a clock reading: 2^62 ns, in the year 2116. The span
	// above it leaves room for what a bucket may owe.
	maxClock int64 = 1 << 62
	// maxOwed bounds what a counter may hold; debt saturates there.
	maxOwed int64 = 1 << 62
)

// clock returns the reading that s takes now for: itself, or the newest seen.
func (s *State) clock(now int64) int64 {
	return max(s.last, min(now, maxClock))
}

// Oversize says what happens to a cost above the limit's capacity.
type Oversize uint8

const (
	// Refuse refuses it for good.
	Refuse Oversize = iota
	// Debt admits it when the bucket is full and leaves the bucket that far
	// below zero, for later requests to pay off.
	Debt
)

// Decision is what a limit says to one cost.
type Decision struct {
	// Admitted says that the cost conforms.
	Admitted bool
	// By is written by whoever passes the decision on; a limit itself leaves it.
	By By
	// Remaining is the level after the decision in whole units, rounded down.
	// Negative is debt.
	Remaining int64
	// RetryAfter is 0 if admitted. Otherwise the same cost conforms at
	// now+RetryAfter, and not a nanosecond earlier, if nothing else happens
	// before; it is Never where no wait helps: a cost above capacity that is
	// refused, a semaphore.
	RetryAfter time.Duration
	// Reset is the time until the level is full again, 0 if it is. A
	// semaphore with slots in use answers Never: no wait gives them back.
	Reset time.Duration
	// At is the clock reading at which the decision was made, in nanoseconds
	// since the Unix epoch. Adjust wants it back.
	At int64
}

// By says who decided a charge, and as a Charge's Apart who is to while the
// owner of its bucket is out of reach.
type By uint8

const (
	// ByLease is this process, out of what it was lent.
	ByLease By = iota
	// ByOwner is the owner of the bucket, asked.
	ByOwner
	// ByRefusal is this process, because the owner said that nothing of this size
	// conforms for a time.
	ByRefusal
	// ByPrivate is a bucket that this process keeps for itself, under a charge's
	// Private.
	ByPrivate
	// ByDeny is nobody; refused.
	ByDeny
	// ByAllow is nobody; let through.
	ByAllow
)

// String is the name in logs and metrics.
func (b By) String() string {
	names := [...]string{"local", "direct", "refused_local", "private", "deny", "allow"}
	if int(b) >= len(names) {
		return "unknown"
	}
	return names[b]
}

// MaxCharges is how many limits one request may name.
const MaxCharges = 16

// Key names one bucket. Tenant is empty for a bucket that no tenant owns, such
// as a model's or the whole fleet's.
type Key struct{ Tenant, Limit, Subject string }

// NotTaken is the At of a Charge that holds nothing: it was refused, or it was
// a shadow charge that did not conform. No clock reads it.
const NotTaken int64 = math.MinInt64

// Charge is one limit's part in a request.
type Charge struct {
	Key      Key
	Limit    *Limit
	Cost     int64
	Oversize Oversize
	// Shadow charges count while they conform and never refuse.
	Shadow bool
	// Spread says that the bucket is placed by tenant and subject, not by
	// tenant alone.
	Spread bool
	// Apart is what decides while the bucket's owner is out of reach: ByPrivate,
	// as which the zero value ByLease counts, too, ByDeny or ByAllow.
	Apart By
	// Private is the limit of the bucket that decides under ByPrivate. Without
	// one the charge is refused.
	Private *Limit
	// Held is what whoever took the charge holds of it, nil for nothing. It is
	// written with At and read when the charge is settled.
	Held any
	// At is written by whoever takes the charge and read when it is settled.
	At int64
}

// Clone returns a copy that shares nothing with s. It allocates only under a
// SlidingLog.
func (s *State) Clone() State {
	t := *s
	if t.log != nil {
		t.log = t.log.clone()
	}
	return t
}

// Peek decides as Take would and changes nothing. Under a SlidingLog it copies
// the log.
func (l *Limit) Peek(s *State, now, cost int64, over Oversize) Decision {
	t := s.Clone()
	return l.Take(&t, now, cost, over)
}

// Take decides at now, in nanoseconds since the Unix epoch by a clock that does
// not go back; a reading older than the newest seen is read as the newest. It
// charges cost if and only if it is admitted: a refusal costs nothing and
// delays nothing. A cost of 0 is always admitted, also in debt; a negative one
// counts as 0, so that no request can raise a level; one above MaxUnits is
// refused.
func (l *Limit) Take(s *State, now, cost int64, over Oversize) (d Decision) {
	l.TakeInto(s, now, cost, over, &d)
	return d
}

// TakeInto is Take for a caller that has a place for the decision: to hand 40
// bytes up through the calls takes as long as the arithmetic.
func (l *Limit) TakeInto(s *State, now, cost int64, over Oversize, d *Decision) {
	now = s.clock(now)
	cost = max(cost, 0)
	d.RetryAfter, d.Reset, d.At = 0, 0, now
	switch l.Algorithm {
	case GCRA:
		l.takeGCRA(s, now, cost, over, d)
	case FixedWindow, SlidingWindow:
		l.takeWindow(s, now, cost, over, d)
	case SlidingLog:
		l.takeLog(s, now, cost, over, d)
	case Semaphore:
		l.takeSlots(s, cost, over, d)
	}
	s.last = now
}

// fits says whether a cost conforms to a bucket of the given capacity, if
// enough is whether the level covers the cost and full whether nothing is
// spent.
func fits(cost, capacity int64, over Oversize, enough, full bool) bool {
	switch {
	case cost == 0:
		return true
	case cost <= capacity:
		return enough
	}
	return over == Debt && full && cost <= MaxUnits
}

// Adjust settles a charge that Take admitted at the reading at: delta is the
// charged cost less the actual one. What is too much (delta > 0) comes back,
// never above capacity and, under the window algorithms, never into another
// window than the charge's own; of a later window it can only lower the debt
// that was carried into it. What is too little (delta < 0) is charged at now without
// asking and may leave the level below zero. Give a semaphore its slots back
// with delta = cost. Debt saturates: at the clock's end, in the year 2262,
// under a GCRA, and at 2^62 units elsewhere. A delta beyond ±MaxUnits counts
// as MaxUnits.
func (l *Limit) Adjust(s *State, now, at, delta int64) {
	now = s.clock(now)
	delta = max(-MaxUnits, min(delta, MaxUnits))
	switch l.Algorithm {
	case GCRA:
		l.adjustGCRA(s, now, delta)
	case FixedWindow, SlidingWindow:
		l.adjustWindow(s, now, at, delta)
	case SlidingLog:
		l.adjustLog(s, now, at, delta)
	case Semaphore:
		s.a = min(max(s.a-delta, 0), maxOwed)
	}
	s.last = now
}

// Full says whether nothing is spent or owed at now, so that s may be
// forgotten: the zero State decides the same from now on.
func (l *Limit) Full(s *State, now int64) bool {
	now = s.clock(now)
	switch l.Algorithm {
	case GCRA:
		return s.a < now || s.a == now && s.b == 0
	case FixedWindow, SlidingWindow:
		t := *s
		l.roll(&t, now)
		return t.a == 0 && t.c == 0
	case SlidingLog:
		if s.log == nil {
			return true
		}
		s.log.expire(now, l.Rate)
		s.last = now
		return s.log.sum == 0
	}
	return s.a == 0
}

// Convert carries s over from the limit that it was used with to l, when a
// limit is changed at run time. What was spent stays spent: the deficit is kept
// in units, rounded up where the new limit cannot express it, and debt stays
// debt. A raised burst or count is there at once, save where a GCRA comes to be
// another part of its whole: then the level is kept, as far as it has room,
// since what one part gains another may have spent. Between windows of different
// length, or different algorithms, the deficit counts as spent in the window,
// or at the instant, of now. Slots in use are not spending and do not become
// any: between a semaphore and any other algorithm the bucket starts full.
func (l *Limit) Convert(s *State, now int64, from *Limit) {
	now = s.clock(now)
	samePer := l.Rate.Per == from.Rate.Per
	switch {
	case l.Algorithm == Semaphore && from.Algorithm == Semaphore:
	case l.Algorithm == Semaphore || from.Algorithm == Semaphore:
		*s = State{last: now}
	case l.Algorithm == GCRA && from.Algorithm == GCRA:
		l.owe(s, now, l.carry(from.deficit(s, now), from))
	case l.windowed() && from.windowed() && samePer:
		from.roll(s, now)
		if l.Algorithm == FixedWindow {
			s.c = 0
		}
	case l.Algorithm == SlidingLog && from.Algorithm == SlidingLog && samePer:
		if s.log != nil {
			s.log.expire(now, from.Rate)
			s.log.resize(now, l.Rate.Count)
		}
	default:
		spent := from.spent(s, now)
		*s = State{last: now}
		l.spend(s, now, spent)
	}
	s.last = now
}

// spent is the deficit at now in whole units, rounded up, of any algorithm
// but Semaphore.
func (l *Limit) spent(s *State, now int64) int64 {
	switch l.Algorithm {
	case GCRA:
		return min(l.deficit(s, now).overUp(int64(l.Rate.Per)), maxOwed)
	case FixedWindow, SlidingWindow:
		l.roll(s, now)
		return l.weighed(s, now%int64(l.Rate.Per)).overUp(int64(l.Rate.Per))
	}
	if s.log == nil {
		return 0
	}
	s.log.expire(now, l.Rate)
	return s.log.sum + s.log.debt
}

// spend charges units to the zero state s without asking.
func (l *Limit) spend(s *State, now, units int64) {
	switch l.Algorithm {
	case GCRA:
		l.owe(s, now, product(units, int64(l.Rate.Per)))
	case FixedWindow, SlidingWindow:
		// Carried, because the charges behind it may be older than this window
		// and their refunds must still find it.
		s.a, s.b = units, units
	case SlidingLog:
		if units > 0 {
			s.log = new(log)
			s.log.add(now, units, l.Rate.Count)
		}
	}
}

// takeSlots is Take of a Semaphore.
func (l *Limit) takeSlots(s *State, cost int64, over Oversize, d *Decision) {
	if d.Admitted = fits(cost, l.Burst, over, cost <= l.Burst-s.a, s.a == 0); d.Admitted {
		s.a += cost
	} else {
		d.RetryAfter = Never
	}
	if s.a > 0 {
		d.Reset = Never
	}
	d.Remaining = l.Burst - s.a
}
