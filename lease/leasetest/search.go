package leasetest

import (
	"fmt"
	"slices"
	"strings"

	"headgate/lease"
	"headgate/limiter"
)

// Space is the small world that Search goes through: one bucket, which a owns and b may come to own, and two holders, b
// and c.
type Space struct {
	Limit limiter.Limit
	Break lease.Rule
	Sizer lease.Sizer
	Warm  bool // both holders begin with sessions and what the Sizer lends them
	Move  bool // the bucket moves with both owners alive; otherwise a crashes
	Costs []int64

	Messages int // that may come to somebody; those that are sent after so many are lost
	Takes    int
	Settles  int // refunds, and as many debts
	Repeats  int // messages that come once more
	Times    int // steps of time: half a session, or a session and its margin
	Budget   int // states, at most

	plain    bool            // states are told apart by all that is in them
	outcomes map[uint64]bool // of all that the judge was shown; nil: nobody asks
}

// Found is what Search came to.
type Found struct {
	States, Acts, Played, Ends int
	Whole                      bool // all was seen: the budget sufficed
	Violation                  string
	Trace                      []string // the acts that lead to it
}

// act is something that may happen next in the small world.
type act struct {
	kind byte
	proc byte // 'a' to 'c'; 0: it concerns everybody
	n    int  // the cost, or the message by its number, or how long
}

const (
	actTake    = 't'
	actSettle  = 's' // with nothing used: a refund
	actOwe     = 'o' // with more used: a debt
	actKeep    = 'k'
	actDeliver = 'd'
	actRepeat  = 'r'
	actPass    = 'p' // time passes
	actTick    = 'i' // what time brings to an owner
	actEnd     = 'x' // the first owner crashes, or loses the partition
	actStep    = 'v'
)

// The steps of time: half a session; a session and its margin.
const (
	half  = int(leaseFor / 2)
	whole = int(1080 * ms)
)

func (a act) String() string {
	switch a.kind {
	case actTake:
		return fmt.Sprintf("take %d at %c", a.n, a.proc)
	case actSettle:
		return fmt.Sprintf("refund at %c", a.proc)
	case actOwe:
		return fmt.Sprintf("debt at %c", a.proc)
	case actKeep:
		return fmt.Sprintf("keep-alive from %c", a.proc)
	case actDeliver:
		return fmt.Sprintf("message %d comes to %c", a.n, a.proc)
	case actRepeat:
		return fmt.Sprintf("message %d comes to %c, not for the last time", a.n, a.proc)
	case actPass:
		return fmt.Sprintf("%d ms pass", int64(a.n)/ms)
	case actEnd:
		return "the owner's time ends"
	}
	return fmt.Sprintf("%c applies the view", a.proc)
}

// search is a depth-first walk over states.
type search struct {
	*engine
	space Space
	found Found
	seen  numbers
	path  []act
}

// Search goes through every state that the small world can come to.
func Search(space Space) Found {
	s, first := newSearch(space)
	s.walk(&first)
	s.found.States, s.found.Played = s.seen.n, s.plays
	return s.found
}

func newSearch(space Space) (*search, state) {
	e, first := newEngine(&space)
	first.left = budget{int8(space.Takes), int8(space.Settles), int8(space.Settles), int8(space.Repeats), int8(space.Times)}
	s := &search{engine: e, space: space}
	s.found.Whole = true
	return s, first
}

// walk tries all that can come after a state.
func (s *search) walk(at *state) {
	if !s.seen.add(s.hash(at)) {
		return
	}
	if s.seen.n > s.space.Budget {
		s.found.Whole = false
		return
	}
	ends := true
	for _, a := range s.choices(at) {
		next := *at
		ok, failed := s.apply(&next, a)
		if !ok {
			continue
		}
		ends = false
		s.found.Acts++
		s.path = append(s.path, a)
		if failed != "" {
			s.found.Violation = failed
			s.found.Trace = s.trace()
			return
		}
		s.walk(&next)
		s.path = s.path[:len(s.path)-1]
		if s.found.Violation != "" || !s.found.Whole {
			return
		}
	}
	if ends {
		s.found.Ends++
	}
}

// trace is the path for a person.
func (s *search) trace() (lines []string) {
	s.cfg.Trace = true
	for _, a := range s.path {
		line := a.String()
		if a.kind == actDeliver || a.kind == actRepeat {
			line += ": " + s.describe(&s.packets[a.n], "=>")
		}
		lines = append(lines, line)
	}
	return lines
}

// choices lists what can come next.
func (s *search) choices(at *state) (acts []act) {
	for i, name := range []byte("abc") {
		l := at.local[i]
		if l < 0 {
			continue
		}
		k := &s.locals[l]
		if i > 0 && at.left.takes > 0 {
			for _, c := range s.space.Costs {
				acts = append(acts, act{actTake, name, int(c)})
			}
		}
		if len(k.open) > 0 {
			if at.left.refunds > 0 {
				acts = append(acts, act{kind: actSettle, proc: name})
			}
			if at.left.debts > 0 && s.space.Limit.Algorithm != limiter.Semaphore {
				acts = append(acts, act{kind: actOwe, proc: name})
			}
		}
		if int(at.sent) < s.space.Messages && at.kept>>i&1 == 0 && (i > 0 || at.ended && s.space.Limit.Algorithm == limiter.Semaphore) { // a holds nothing, and owes a roll
			acts = append(acts, act{kind: actKeep, proc: name})
		}
		if int(k.local.proc.epoch) < at.epoch() {
			acts = append(acts, act{kind: actStep, proc: name})
		}
	}
	for i, m := range at.bag[:at.bagged] {
		if i > 0 && at.bag[i-1] == m {
			continue
		}
		name := byte('a' + s.packets[m].to - 1)
		acts = append(acts, act{actDeliver, name, int(m)})
		if at.left.repeats > 0 {
			acts = append(acts, act{actRepeat, name, int(m)})
		}
	}
	if at.left.times > 0 {
		acts = append(acts, act{kind: actPass, n: half}, act{kind: actPass, n: whole})
	}
	if !at.ended {
		acts = append(acts, act{kind: actEnd})
	}
	return acts
}

// apply does an act. Not ok: nothing comes of it.
func (s *search) apply(at *state, a act) (ok bool, failed string) {
	switch a.kind {
	case actPass:
		at.left.times--
		at.kept = 0
		return true, s.pass(at, int64(a.n))
	case actEnd:
		at.ended = true
		if !s.space.Move {
			at.local[0] = nobody
			s.undeliverable(at)
		}
		return true, s.check(at)
	case actKeep:
		at.kept |= 1 << (a.proc - 'a')
	case actTake:
		at.left.takes--
	case actSettle:
		at.left.refunds--
	case actOwe:
		at.left.debts--
	case actDeliver, actRepeat:
		if a.kind == actRepeat {
			at.left.repeats--
			at.again = int32(a.n)
		} else {
			at.drop(slices.Index(at.bag[:at.bagged], int32(a.n)))
		}
	}
	kind := a.kind
	if kind == actRepeat {
		kind = actDeliver
	}
	before := at.sent
	if failed = s.at(at, int(a.proc-'a'), kind, int32(a.n)); failed == "" {
		failed = s.check(at)
	}
	switch {
	case failed != "":
	case a.kind == actKeep && at.sent == before, // it has nobody to speak to
		a.kind == actTake && int(at.sent) > s.space.Messages:
		return false, ""
	}
	return true, failed
}

// at does an act at one process.
func (s *search) at(at *state, i int, kind byte, n int32) (failed string) {
	d := s.act(at.now, at.local[i], at.oracle, kind, n, at.epoch())
	at.local[i], at.oracle = d.local, d.oracle
	for _, m := range d.sent {
		if at.sent++; int(at.sent) <= s.space.Messages && at.reaches(s.packets[m].to) {
			at.put(m)
		}
	}
	return d.failed
}

// reaches says whether a process is still there.
func (s *state) reaches(inc uint64) bool { return s.local[inc-1] >= 0 }

// undeliverable drops what is on its way to who is no more.
func (s *search) undeliverable(at *state) {
	for i := int(at.bagged) - 1; i >= 0; i-- {
		if !at.reaches(s.packets[at.bag[i]].to) {
			at.drop(i)
		}
	}
}

// pass lets time pass. Owners do what it brings at its end.
func (s *search) pass(at *state, d int64) (failed string) {
	for i, l := range at.local {
		if l >= 0 {
			at.local[i] = s.act(at.now, l, at.oracle, actPass, int32(d), at.epoch()).local
		}
	}
	at.now += d
	if failed = s.check(at); failed != "" {
		return failed
	}
	ticked := false
	for i, l := range at.local {
		if l >= 0 && s.locals[l].next <= at.now && failed == "" {
			ticked = true
			failed = s.at(at, i, actTick, 0)
		}
	}
	if ticked && failed == "" {
		failed = s.check(at)
	}
	return failed
}

// do does an act in a lab.
func (w *lab) do(a act, move bool) {
	p := w.proc('a')
	if a.proc != 0 {
		p = w.proc(rune(a.proc))
	}
	switch a.kind {
	case actTake:
		w.take(p, int64(a.n))
	case actSettle:
		w.settle(p, 0)
	case actOwe:
		w.settle(p, 3)
	case actKeep:
		for _, owner := range p.holder.Owners() {
			w.keep(p, owner)
		}
	case actStep:
		w.step(p)
	case actPass:
		w.wait(int64(a.n))
	case actEnd:
		if !move {
			p.die("crashes")
		}
		w.own(w.proc('b'), w.living()...)
		w.look()
	}
}

// Text is a finding for a person.
func (f Found) Text() string {
	return fmt.Sprintf("%d states, %d ends, %d acts, %d played, whole %v\n%s\n  %s", f.States, f.Ends, f.Acts, f.Played, f.Whole, f.Violation,
		strings.Join(f.Trace, "\n  "))
}

// numbers is a set of hashes.
type numbers struct {
	slots []uint64
	n     int
}

// add says whether a number is new.
func (s *numbers) add(h uint64) bool {
	if h == 0 {
		h = 1
	}
	if s.n*4 >= len(s.slots)*3 {
		old := s.slots
		s.slots = make([]uint64, max(1<<10, 2*len(old)))
		for _, x := range old {
			if x != 0 {
				s.slots[s.place(x)] = x
			}
		}
	}
	i := s.place(h)
	if s.slots[i] == h {
		return false
	}
	s.slots[i] = h
	s.n++
	return true
}

// place is where a number is, or would be.
func (s *numbers) place(h uint64) int {
	mask := uint64(len(s.slots) - 1)
	i := h >> 7 & mask
	for s.slots[i] != 0 && s.slots[i] != h {
		i = (i + 1) & mask
	}
	return int(i)
}
