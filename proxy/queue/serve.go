package queue

import (
	"math"
	"slices"
	"time"
)

// touch notes that somebody may be served at a backend now, or that it has to be woken at another time.
func (s *Scheduler) touch(b *backend) {
	if !b.dirty {
		b.dirty = true
		s.dirty = append(s.dirty, b)
	}
}

// settle serves wherever something changed. Every public call that has an Output ends with it.
func (s *Scheduler) settle(out *Output) {
	for i := 0; i < len(s.dirty); i++ {
		b := s.dirty[i]
		b.dirty = false
		s.serve(b, out)
		s.arm(b)
	}
	clear(s.dirty)
	s.dirty = s.dirty[:0]
}

// serve hands out the room of a backend, in order, until none is left or it is saved up.
func (s *Scheduler) serve(b *backend, out *Output) {
	if b.saver != nil && s.now >= b.saveUntil {
		s.giveUp(b)
	}
	for b.n > 0 && b.room(s.now) > 0 {
		p := s.next(b)
		if p == nil {
			return
		}
		t := p.ticket
		if t.deadline <= s.now {
			s.drop(t, Expired, out)
			continue
		}
		q := s.pick(t, func(o *backend) bool {
			if o == b {
				return true
			}
			n := s.next(o) // another that it prefers, if it is first there as well
			return n != nil && n.ticket == t && (o.saver == nil || o.saver == t)
		})
		if q != nil {
			s.grant(t, q, true, out)
		} else if s.save(b, p) {
			return
		}
	}
}

// save decides on a place that is next and costs more than the room that there is. True: the room is saved
// up for it. False: it is passed over for a while, as others may use the room.
func (s *Scheduler) save(b *backend, p *place) bool {
	t := p.ticket
	switch {
	case b.saver != nil:
		return true
	case t.saving != nil:
		s.park(p, t.saving.saveUntil)
		return false
	case s.now < b.spendUntil:
		s.park(p, b.spendUntil)
		return false
	}
	b.saver, t.saving = t, b
	b.saveUntil = s.now + b.hold(s.cfg.TargetWait, t.saves)
	t.saves = min(t.saves+1, 8)
	return true
}

// giveUp stops saving up: for as long as that lasted the room goes to whom it is enough for.
func (s *Scheduler) giveUp(b *backend) {
	t := b.saver
	b.saver, t.saving = nil, nil
	b.spendUntil = s.now + b.hold(s.cfg.TargetWait, t.saves-1)
	for i := range t.places {
		if p := &t.places[i]; p.backend == b && p.parked == 0 {
			s.park(p, b.spendUntil)
		}
	}
}

// park passes a place over until a time, at least for a millisecond.
func (s *Scheduler) park(p *place, until int64) {
	s.unlink(p)
	b := p.backend
	b.parked = append(b.parked, p)
	p.parked, p.until = len(b.parked), max(until, s.now+int64(time.Millisecond))
	if len(b.parked) == 1 || p.until < b.parkedTill {
		b.parkedTill = p.until
	}
	s.touch(b)
}

// unpark takes a place out of those that are passed over.
func (b *backend) unpark(p *place) {
	end := len(b.parked) - 1
	last := b.parked[end]
	b.parked[p.parked-1], last.parked = last, p.parked
	b.parked[end] = nil
	b.parked = b.parked[:end]
	p.parked = 0
}

// unparkAll brings all that are passed over back.
func (s *Scheduler) unparkAll(b *backend) {
	for len(b.parked) > 0 {
		p := b.parked[len(b.parked)-1]
		b.unpark(p)
		s.link(p)
	}
}

// rouse does what is due at a backend.
func (s *Scheduler) rouse(b *backend) {
	if b.parkedTill <= s.now {
		least := int64(math.MaxInt64)
		for _, p := range slices.Backward(b.parked) { // unpark moves the last into its place, which was seen
			if p.until <= s.now {
				b.unpark(p)
				s.link(p)
			} else {
				least = min(least, p.until)
			}
		}
		b.parkedTill = least
	}
	if b.contended && b.n == 0 && b.quietAt <= s.now {
		b.contended = false
		s.changes++
		for b.idle.head != nil {
			s.closeClaim(b.idle.head)
		}
	}
}

// arm sets when a backend is to be looked at again, and forgets one of which nothing is left.
func (s *Scheduler) arm(b *backend) {
	at := int64(-1)
	sooner := func(t int64) {
		if at < 0 || t < at {
			at = t
		}
	}
	if len(b.parked) > 0 {
		sooner(b.parkedTill)
	}
	if b.n > 0 && b.pauseUntil > s.now {
		sooner(b.pauseUntil)
	}
	if b.saver != nil {
		sooner(b.saveUntil)
	}
	if b.n == 0 && b.contended {
		sooner(b.quietAt)
	}
	if at >= 0 {
		s.wakes.set(b, at, b.seq)
	} else {
		s.wakes.remove(b)
	}
	if !b.known && b.n == 0 && b.used == 0 && b.granted == 0 && !b.contended {
		s.discard(b)
	}
}

// backendOf finds a backend, or opens one that policy does not name yet. It is nil where there are too many.
func (s *Scheduler) backendOf(id string) *backend {
	if b := s.backends[id]; b != nil {
		return b
	}
	if len(s.backends) >= 2*MaxBackends {
		return nil
	}
	s.seq++
	b := &backend{id: id, seq: s.seq, slots: 1, limit: -1, at: s.now, decayed: s.now, lookedAt: s.now, epoch: 1}
	for c := range b.classes {
		b.classes[c].ages.which, b.classes[c].ratio = 1, 1
		b.classes[c].order.at = func(c *claim) *int { return &c.inOrder }
		b.classes[c].biggest.at = func(c *claim) *int { return &c.inSize }
	}
	s.backends[id] = b
	s.touch(b) // so that it goes again where it comes to nothing
	return b
}

// close takes a backend out of the places of those that wait. What is in use or granted there stays known.
func (s *Scheduler) close(b *backend, out *Output) {
	b.known, b.closed = false, true
	if b.limited {
		b.limited = false
		s.changes++
	}
	s.unparkAll(b)
	for c := range b.classes {
		for l := &b.classes[c]; l.order.len() > 0; {
			cl, _ := l.order.first()
			p := cl.ages.head
			t := p.ticket
			if t.alive == 1 {
				s.drop(t, NoBackend, out)
				continue
			}
			s.exit(p)
			t.lose(p)
		}
	}
	s.touch(b)
}

// lose makes a place one where its ticket cannot go.
func (t *ticket) lose(p *place) {
	p.backend = nil
	t.alive--
}

// discard forgets a backend.
func (s *Scheduler) discard(b *backend) {
	for b.idle.head != nil {
		s.closeClaim(b.idle.head)
	}
	delete(s.backends, b.id)
	b.closed = true
}

// nodeOf finds or opens a node; nil where there are too many.
func (s *Scheduler) nodeOf(id uint64) *node {
	if n := s.nodes[id]; n != nil {
		return n
	}
	if len(s.nodes) >= MaxNodes {
		return nil
	}
	var n *node
	if end := len(s.freeNodes) - 1; end >= 0 {
		n = s.freeNodes[end]
		s.freeNodes = s.freeNodes[:end]
	} else {
		n = &node{used: make(map[*backend]int64)}
	}
	n.id = id
	s.nodes[id] = n
	return n
}

// closeNode forgets a node of which nothing is left.
func (s *Scheduler) closeNode(n *node) {
	if n.head == nil && len(n.used) == 0 && s.nodes[n.id] == n {
		delete(s.nodes, n.id)
		s.freeNodes = append(s.freeNodes, n) // at most MaxNodes
	}
}
