package leasetest

import (
	"fmt"
	"strings"

	"headgate/lease"
	"headgate/limiter"
)

// Space is the small world that Search goes through: two owners, two holders, one bucket.
type Space struct {
	Limit   limiter.Limit
	Break   lease.Rule
	Sizer   lease.Sizer
	Depth   int  // actions in a row
	Packets int  // messages sent, at most
	Budget  int  // states, at most
	Move    bool // the bucket moves with both owners alive; otherwise the first crashes
	Costs   []int64
}

// Found is what Search came to.
type Found struct {
	States, Runs, Actions int
	Whole                 bool // all was seen: the budget sufficed
	Violation             string
	Trace                 []string // the actions that lead to it
}

// act is something that may happen next in the small world.
type act struct {
	kind byte
	proc byte // 'a' to 'd'
	n    int
}

const (
	actTake    = 't'
	actSettle  = 's' // with nothing used: a refund
	actOwe     = 'o' // with more used: a debt
	actKeep    = 'k'
	actDeliver = 'd'
	actRepeat  = 'r'
	actHalf    = 'h' // half a session passes
	actWhole   = 'w' // a session and its margin pass
	actEnd     = 'x' // the first owner crashes, or loses the partition
	actStep    = 'v'
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
		return fmt.Sprintf("deliver %d", a.n)
	case actRepeat:
		return fmt.Sprintf("deliver %d and keep it", a.n)
	case actHalf:
		return "½ TTL passes"
	case actWhole:
		return "TTL + margin pass"
	case actEnd:
		return "the owner's time ends"
	}
	return fmt.Sprintf("%c applies the view", a.proc)
}

// search is a depth-first walk. A path is played from its beginning each time: the cores cannot be copied.
type search struct {
	space Space
	found Found
	seen  map[uint64]int8 // by digest: with how many actions left it was seen
	path  []act
}

// Search goes through every order in which the small world's actions can come. States that were seen with as
// many actions left are not gone into again.
func Search(space Space) Found {
	s := &search{space: space, seen: map[uint64]int8{}}
	s.found.Whole = true
	s.walk(space.Depth)
	s.found.States = len(s.seen)
	return s.found
}

// walk tries all that can come after the path.
func (s *search) walk(left int) {
	w := s.play()
	if s.found.Violation != "" {
		return
	}
	sum := w.digest()
	if was, known := s.seen[sum]; known && int(was) >= left {
		return
	}
	s.seen[sum] = int8(left)
	if left == 0 {
		return
	}
	if len(s.seen) > s.space.Budget {
		s.found.Whole = false
		return
	}
	for _, a := range s.choices(w) {
		s.path = append(s.path, a)
		s.walk(left - 1)
		s.path = s.path[:len(s.path)-1]
		if s.found.Violation != "" {
			return
		}
	}
}

// play plays the path.
func (s *search) play() *lab {
	w := newLab(Config{Break: s.space.Break, Sizer: s.space.Sizer}, s.space.Limit)
	s.found.Runs++
	for i, a := range s.path {
		s.do(w, a)
		s.found.Actions++
		if w.failed != "" {
			s.found.Violation = w.failed
			for _, a := range s.path[:i+1] {
				s.found.Trace = append(s.found.Trace, a.String())
			}
			return w
		}
	}
	return w
}

// choices lists what can come next. The holders are alike: the first to do anything is c.
func (s *search) choices(w *lab) (acts []act) {
	sent := w.sent()
	for _, name := range []byte("cd") {
		p := w.proc(rune(name))
		if name == 'd' && len(s.path) == 0 {
			continue
		}
		open := 0
		for _, q := range w.open {
			if q.p == p {
				open++
			}
		}
		if sent < s.space.Packets {
			for _, c := range s.space.Costs {
				acts = append(acts, act{actTake, name, int(c)})
			}
			if len(p.holder.Owners()) > 0 {
				acts = append(acts, act{kind: actKeep, proc: name})
			}
		}
		if open > 0 {
			acts = append(acts, act{kind: actSettle, proc: name}, act{kind: actOwe, proc: name})
		}
	}
	for i := range w.bag {
		acts = append(acts, act{kind: actDeliver, n: i})
	}
	if !s.did(actRepeat) {
		for i := range w.bag {
			acts = append(acts, act{kind: actRepeat, n: i})
		}
	}
	if n := s.count(actHalf) + 2*s.count(actWhole); n < 6 {
		acts = append(acts, act{kind: actHalf}, act{kind: actWhole})
	}
	if !s.did(actEnd) {
		return append(acts, act{kind: actEnd})
	}
	for _, name := range []byte("abcd") {
		if p := w.proc(rune(name)); p.alive && p.epoch < uint64(len(w.views)) {
			acts = append(acts, act{kind: actStep, proc: name})
		}
	}
	return acts
}

func (s *search) did(kind byte) bool { return s.count(kind) > 0 }

func (s *search) count(kind byte) (n int) {
	for _, a := range s.path {
		if a.kind == kind {
			n++
		}
	}
	return n
}

func (s *search) do(w *lab, a act) {
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
	case actDeliver, actRepeat:
		w.deliver(a.n, a.kind == actRepeat)
	case actHalf:
		w.wait(leaseFor / 2)
	case actWhole:
		w.wait(1080 * ms)
	case actEnd:
		if !s.space.Move {
			p.die("crashes")
		}
		w.own(w.proc('b'), w.members()...)
	case actStep:
		w.step(p)
	}
}

// sent counts the messages that were put into the bag.
func (w *lab) sent() int { return w.packets }

// digest is a hash of all that can matter from here on.
func (w *lab) digest() uint64 {
	h := mix(1, uint64(w.now))
	for _, p := range w.procs {
		if !p.alive {
			h = mix(h, 7)
			continue
		}
		h = digestOf(h, p.epoch, p.rights, p.owner, p.holder)
	}
	bag := uint64(0)
	for _, m := range w.bag {
		bag += digestOf(0, m)
	}
	h = mix(h, bag)
	for _, q := range w.open {
		h = digestOf(h, q.p.inc, q.cs)
	}
	for _, b := range w.buckets {
		if b.ideal != nil {
			for _, e := range b.ideal.entries {
				h = digestOf(h, e.at, e.amount)
			}
		} else {
			h = digestOf(h, b.win, b.inUse)
		}
		h = digestOf(h, b.refunds, b.debts, b.frozen)
	}
	return mix(mix(h, uint64(len(w.views))), uint64(w.packets))
}

// Text is a finding for a person.
func (f Found) Text() string {
	return fmt.Sprintf("%d states, %d runs, %d actions, whole %v\n%s\n  %s", f.States, f.Runs, f.Actions, f.Whole, f.Violation,
		strings.Join(f.Trace, "\n  "))
}
