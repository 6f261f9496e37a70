package limiter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

var errState = errors.New("a state that no bucket can be in")

// AppendState appends what s remembers at now, for RestoreState to read. A
// Semaphore's slots are not kept: who holds them does not outlive the process.
// It may drop from s what no longer counts.
//
// The form: how far the newest reading seen is after now; then, for a GCRA, the
// TAT less that reading and its remainder; for a window, State.a, b and c; for
// a log, its debt, the number of its entries, and for each how old it is and
// its cost. All are uvarints.
func (l *Limit) AppendState(b []byte, s *State, now int64) []byte {
	at := s.clock(now)
	put := func(vs ...int64) {
		for _, v := range vs {
			b = binary.AppendUvarint(b, uint64(v))
		}
	}
	put(at - min(now, maxClock))
	switch l.Algorithm {
	case GCRA:
		if s.a < at {
			put(0, 0)
		} else {
			put(s.a-at, s.b)
		}
	case FixedWindow, SlidingWindow:
		l.roll(s, at)
		put(s.a, s.b, s.c)
	case SlidingLog:
		if s.log == nil {
			put(0, 0)
			break
		}
		s.log.expire(at, l.Rate)
		put(s.log.debt, int64(len(s.log.live())))
		for _, e := range s.log.live() {
			put(at-e.at, e.cost)
		}
	}
	s.last = at
	return b
}

// RestoreState reads what AppendState wrote at the reading saved, as a state at
// now. What a GCRA owed it owes still, as if no time had passed in between: of
// two processes' clocks nobody knows by how much they differ. Windows and logs
// go by the clock, as ever: one that is still open is as full as it was. Where
// the clock was set back, they wait for it for up to a period; a state from
// beyond that counts as of now.
//
// b is not trusted: what no bucket of l can hold is an error.
func (l *Limit) RestoreState(b []byte, saved, now int64) (s State, err error) {
	r := reader{b: b}
	saved, now = min(saved, maxClock), min(now, maxClock)
	late := r.next(maxClock)
	at := min(saved+late, maxClock)
	switch l.Algorithm {
	case GCRA:
		s.last = min(now+late, maxClock)
		ahead, rest := r.next(math.MaxInt64), r.next(l.Rate.Count-1)
		if s.a, s.b = s.last+ahead, rest; ahead >= math.MaxInt64-s.last {
			s.a, s.b = math.MaxInt64, 0
		}
	case FixedWindow, SlidingWindow:
		s.last = l.restoredAt(at, now)
		s.a, s.b, s.c = r.next(maxOwed), r.next(maxOwed), r.next(maxOwed)
		if s.b > s.a || s.c > 0 && l.Algorithm == FixedWindow {
			r.bad = true
		}
	case SlidingLog:
		s.last = l.restoredAt(at, now)
		s.log = r.log(l, s.last)
	default:
		r.bad = true
	}
	if r.bad || len(r.b) > 0 {
		return State{}, fmt.Errorf("%v: %w", l.Algorithm, errState)
	}
	return s, nil
}

// restoredAt is the newest reading seen that a state saved at at has at now.
func (l *Limit) restoredAt(at, now int64) int64 {
	if at-now > int64(l.Rate.Per) {
		return now
	}
	return at
}

// reader takes uvarints from b until one is missing or out of bounds.
type reader struct {
	b   []byte
	bad bool
}

// next is the next number, at most most; 0 from a bad one on.
func (r *reader) next(most int64) int64 {
	v, n := binary.Uvarint(r.b)
	if r.bad = r.bad || n <= 0 || v > uint64(most); r.bad {
		return 0
	}
	r.b = r.b[n:]
	return int64(v)
}

// log reads one whose newest reading is at, and checks its rules.
func (r *reader) log(l *Limit, at int64) *log {
	g := &log{debt: r.next(maxOwed)}
	for range r.next(l.Rate.Count) {
		e := entry{at: at - r.next(int64(l.Rate.Per)-1), cost: r.next(l.Rate.Count)}
		n := len(g.entries)
		if r.bad = r.bad || e.cost == 0 || n > 0 && g.entries[n-1].at >= e.at; r.bad {
			return nil
		}
		g.sum += e.cost
		g.entries = append(g.entries, e)
	}
	if g.sum > l.Rate.Count || g.debt > 0 && g.sum < l.Rate.Count {
		r.bad = true
	}
	return g
}

// EmptyAt returns the state at now of a bucket that was empty at the reading at:
// one of which nobody knows what was spent of it before. A window that was
// open then counts as used up. A semaphore's slots are all free.
func (l *Limit) EmptyAt(now, at int64) (s State) {
	now = min(now, maxClock)
	at = min(at, now)
	per := int64(l.Rate.Per)
	switch l.Algorithm {
	case GCRA:
		l.owe(&s, at, product(l.Burst, per))
	case FixedWindow, SlidingWindow:
		s.last = at
		l.spend(&s, at, l.Rate.Count)
		l.roll(&s, now)
	case SlidingLog:
		l.spend(&s, at, l.Rate.Count)
		s.log.expire(now, l.Rate)
	}
	s.last = now
	return s
}
