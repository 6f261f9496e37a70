package leasetest

import (
	"fmt"
	"strings"

	"headgate/lease"
	"headgate/limiter"
)

// Space is the small world that Search goes through: one bucket, which a owns and b may come to own, and two holders, b
// and c.
type Space struct {
	Limit   limiter.Limit
	Break   lease.Rule
	Sizer   lease.Sizer
	Warm    bool // both holders begin with sessions and what the Sizer lends them
	Move    bool // the bucket moves with both owners alive; otherwise a crashes
	Costs   []int64
	Depth   int // actions in a row
	Packets int // messages sent, at most
	Budget  int // states, at most
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
	proc byte // 'a' to 'c'; 0: it concerns everybody
	n    int  // the cost, or the message by its number
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
		return fmt.Sprintf("message %d comes to %c", a.n, a.proc)
	case actRepeat:
		return fmt.Sprintf("message %d comes to %c, not for the last time", a.n, a.proc)
	case actHalf:
		return "half a session passes"
	case actWhole:
		return "a session and its margin pass"
	case actEnd:
		return "the owner's time ends"
	}
	return fmt.Sprintf("%c applies the view", a.proc)
}

// taken is an act, and how many messages had been sent before it.
type taken struct {
	act
	sent int
}

// search is a depth-first walk. A path is played from its beginning each time: the cores cannot be copied.
type search struct {
	space  Space
	found  Found
	digest *digester
	seen   map[uint64]int8 // by digest: with how many actions left it was seen
	path   []taken
}

// Search goes through every order in which the small world's actions can come. Of two neighbours that concern different
// processes, and so do not care which of them comes first, one order is tried; a state that was seen with as many
// actions left is not gone into again.
func Search(space Space) Found {
	s := &search{space: space, seen: map[uint64]int8{}, digest: newDigester(
		// Counters, scratch, and what hangs on the seed of a hash.
		"Owner.stats", "Owner.step", "Owner.sight", "Owner.looks", "shard[headgate/lease.bucket].slots", "peer.look", "peer.place",
		"Holder.stats", "Holder.table", "purse.hash",
	)}
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
	// What may come next depends on the last act, too: see idle.
	sum := w.digest(s.digest)
	if n := len(s.path); n > 0 {
		sum = mix(sum, uint64(s.path[n-1].proc)<<8|uint64(s.path[n-1].sent))
	}
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
		if s.idle(a) {
			continue
		}
		s.path = append(s.path, taken{a, w.packets})
		s.walk(left - 1)
		s.path = s.path[:len(s.path)-1]
		if s.found.Violation != "" {
			return
		}
	}
}

// idle says that an act could as well have come before the last one, where it was tried.
func (s *search) idle(a act) bool {
	if len(s.path) == 0 || a.proc == 0 {
		return false
	}
	last := s.path[len(s.path)-1]
	if last.proc == 0 || a.proc >= last.proc {
		return false
	}
	delivers := a.kind == actDeliver || a.kind == actRepeat
	return !delivers || a.n <= last.sent
}

// play plays the path.
func (s *search) play() *lab {
	w := newSmallLab(Config{Break: s.space.Break, Sizer: s.space.Sizer}, 3, s.space.Limit)
	if s.space.Warm {
		for _, name := range "bc" {
			w.take(w.proc(name), 1)
			w.flush()
			w.settle(w.proc(name), 1)
		}
	}
	w.packets = 0
	s.found.Runs++
	for i, a := range s.path {
		s.do(w, a.act)
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

// choices lists what can come next.
func (s *search) choices(w *lab) (acts []act) {
	for _, name := range []byte("bc") {
		acts = append(acts, s.atHolder(w, name)...)
	}
	if p := w.proc('a'); s.did(actEnd) && p.alive && w.packets < s.space.Packets && len(p.holder.Owners()) > 0 {
		acts = append(acts, act{kind: actKeep, proc: 'a'}) // its roll
	}
	for _, kind := range []byte{actDeliver, actRepeat} {
		if kind == actRepeat && s.did(actRepeat) {
			continue
		}
		for i := range w.bag {
			if p := w.byInc[w.bag[i].to]; p != nil && p.alive {
				acts = append(acts, act{kind, p.node.name[0], w.bag[i].number})
			}
		}
	}
	if n := s.count(actHalf) + 2*s.count(actWhole); n < 6 {
		acts = append(acts, act{kind: actHalf}, act{kind: actWhole})
	}
	if !s.did(actEnd) {
		return append(acts, act{kind: actEnd})
	}
	for _, name := range []byte("abc") {
		if p := w.proc(rune(name)); p.alive && p.epoch < uint64(len(w.views)) {
			acts = append(acts, act{kind: actStep, proc: name})
		}
	}
	return acts
}

// atHolder is what a holder can do.
func (s *search) atHolder(w *lab, name byte) (acts []act) {
	p := w.proc(rune(name))
	if w.packets < s.space.Packets {
		for _, c := range s.space.Costs {
			acts = append(acts, act{actTake, name, int(c)})
		}
		if len(p.holder.Owners()) > 0 {
			acts = append(acts, act{kind: actKeep, proc: name})
		}
	}
	for _, q := range w.open {
		if q.p == p {
			return append(acts, act{kind: actSettle, proc: name}, act{kind: actOwe, proc: name})
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
		w.deliver(w.numbered(a.n), a.kind == actRepeat)
	case actHalf:
		w.wait(leaseFor / 2)
	case actWhole:
		w.wait(1080 * ms)
	case actEnd:
		if !s.space.Move {
			p.die("crashes")
		}
		w.own(w.proc('b'), w.living()...)
	case actStep:
		w.step(p)
	}
}

// digest is a hash of all that can matter from here on.
func (w *lab) digest(d *digester) uint64 {
	h := mix(1, uint64(w.now))
	for _, p := range w.procs {
		if !p.alive {
			h = mix(h, 7)
			continue
		}
		h = d.of(h, p.epoch, p.rights, p.owner, p.holder)
	}
	bag := uint64(0)
	for _, m := range w.bag {
		m.number = 0
		bag += d.of(0, m)
	}
	h = mix(h, bag)
	for _, q := range w.open {
		h = d.of(h, q.p.inc, q.cs)
	}
	for _, b := range w.buckets {
		if b.ideal != nil {
			for _, e := range b.ideal.entries {
				h = d.of(h, e.at, e.amount)
			}
		} else {
			h = d.of(h, b.win, b.inUse)
		}
		h = d.of(h, b.refunds, b.debts, b.frozen)
	}
	return mix(mix(h, uint64(len(w.views))), uint64(w.packets))
}

// Text is a finding for a person.
func (f Found) Text() string {
	return fmt.Sprintf("%d states, %d runs, %d actions, whole %v\n%s\n  %s", f.States, f.Runs, f.Actions, f.Whole, f.Violation,
		strings.Join(f.Trace, "\n  "))
}
