package lease

import "slices"

// Step goes on to a view. Leases of partitions that went to another owner keep the deadline that they
// had, until that owner speaks; slots in use of them are counted for its roll call. A view not newer
// than the last is ignored.
func (h *Holder) Step(v *View) {
	h.mu.Lock()
	defer h.mu.Unlock()
	old := h.view.Load()
	if v == nil || old != nil && v.Epoch <= old.Epoch {
		return
	}
	at := h.cfg.Clock()
	h.sort()
	moved := h.moves(old, v)
	recount := old != nil && len(old.Owners) != len(v.Owners)
	h.view.Store(v)
	// Before peers go: what they were to hear others are to.
	leaves := func(s *tab) bool { return recount || moved[s.bucket.part] }
	for _, p := range h.peers {
		p.detached = slices.DeleteFunc(p.detached, leaves)
		p.queue = slices.DeleteFunc(p.queue, func(s *tab) bool {
			s.queued = !leaves(s)
			return !s.queued
		})
	}
	h.meet(v, at.Now)
	rolls := h.rollCall(old, v, moved)
	for _, b := range h.buckets {
		b.refusal.Store(nil)
		if recount {
			k := b.key()
			b.part = v.Place(Home(&k, old.Place(Home(&k, false)) != b.part))
		}
		roll := rolls[v.OwnerOf(b.part).Incarnation]
		switch {
		case moved[b.part]:
			h.move(b, at.Now, roll)
		case roll != nil:
			// Its owner may have skipped a view that this process saw, and know of nothing.
			h.recountSlots(b, roll)
		}
	}
	for _, p := range h.peers {
		if r := rolls[p.id]; r != nil {
			p.addRoll(r)
		}
	}
}

// moves says, by partition, whose owner changed, and notes the epoch. After a view that was skipped
// all may have, and changed back; and another number of partitions makes others of them.
func (h *Holder) moves(old, v *View) []bool {
	moved := make([]bool, len(v.Owners))
	follows := old != nil && v.Epoch == old.Epoch+1 && len(old.Owners) == len(v.Owners)
	if !follows {
		h.since = make([]uint64, len(v.Owners))
	}
	for p := range moved {
		if !follows || old.OwnerOf(uint32(p)).Incarnation != v.OwnerOf(uint32(p)).Incarnation {
			moved[p] = true
			h.since[p] = v.Epoch
		}
	}
	return moved
}

// rollCall is the rolls that are owed after a step, by owner, still without slots.
func (h *Holder) rollCall(old, v *View, moved []bool) map[uint64]*Roll {
	rolls := map[uint64]*Roll{}
	joins := h.joins(old, v)
	for p, m := range moved {
		if id := v.OwnerOf(uint32(p)).Incarnation; (m || joins) && id != 0 && rolls[id] == nil {
			rolls[id] = &Roll{Epoch: v.Epoch}
		}
	}
	return rolls
}

// joins says whether this process is a member of v and was none of old: then every owner waits for
// its roll.
func (h *Holder) joins(old, v *View) bool {
	self := func(m Member) bool { return m.Incarnation == h.cfg.Self }
	return slices.ContainsFunc(v.Members, self) && (old == nil || !slices.ContainsFunc(old.Members, self))
}

// maxGone bounds the processes that are remembered after they left the view.
const maxGone = 1024

// meet makes the lenders those of a view. A process that has left says nothing more, and its leases are
// detached with its partitions; its numbers are kept, should it come back.
func (h *Holder) meet(v *View, now int64) {
	h.peers = slices.DeleteFunc(h.peers, func(p *lender) bool {
		if slices.ContainsFunc(v.Members, func(m Member) bool { return m.Incarnation == p.id }) {
			return false
		}
		gone := &lender{id: p.id, none: p.none, seq: p.seq, dropped: p.dropped, shut: p.shut, shutBefore: p.shutBefore, shutUpTo: p.shutUpTo}
		gone.named, gone.spendable = p.names(now), p.spendable
		if p.session != nil {
			gone.dropped = max(gone.dropped, p.session.number)
			gone.spendable = max(gone.spendable, p.session.deadline.Load())
		}
		if len(h.gone) >= maxGone {
			h.gone = slices.Delete(h.gone, 0, 1)
		}
		h.gone = append(h.gone, gone)
		return true
	})
	for _, m := range v.Members {
		i, ok := slices.BinarySearchFunc(h.peers, m.Incarnation, (*lender).compare)
		if ok {
			continue
		}
		p := &lender{id: m.Incarnation, none: newSession(m.Incarnation, 0)}
		if g := slices.IndexFunc(h.gone, func(p *lender) bool { return p.id == m.Incarnation }); g >= 0 {
			p = h.gone[g]
			h.gone = slices.Delete(h.gone, g, g+1)
		}
		h.peers = slices.Insert(h.peers, i, p)
	}
}

// names is the session that an owner is told was dropped, with those before it.
func (p *lender) names(now int64) uint64 {
	if now < p.spendable {
		return p.named
	}
	return p.dropped
}

// addRoll has an owner told. One that says nothing need not go before it.
func (p *lender) addRoll(r *Roll) {
	p.rolls = slices.DeleteFunc(p.rolls, func(o *Roll) bool { return len(o.Slots) == 0 })
	p.rolls = append(p.rolls, r)
	p.rolled = r.Epoch
}

// move takes a bucket to its new owner.
func (h *Holder) move(b *purse, now int64, roll *Roll) {
	b.pending = 0
	owner := h.ownerOf(b.part)
	for s := b.series; s != nil; s = s.next() {
		if s.slots {
			continue
		}
		c := s.cell.Load()
		if c != nil && !s.detached {
			h.detach(s, c)
		}
		if s.detached && c != nil && owner != nil {
			owner.detached = append(owner.detached, s)
		}
		s.settled, s.said = 0, 0
		h.enqueue(s)
	}
	h.recountSlots(b, roll)
}

// rollAgain counts the slots of all partitions of an owner that wants it, since one of both did not see
// a view that the other saw.
func (h *Holder) rollAgain(p *lender, wanted uint64) {
	epoch := h.view.Load().Epoch
	if wanted <= p.rolled || wanted > epoch || len(p.rolls) > 0 {
		return
	}
	roll := &Roll{Epoch: epoch}
	for _, b := range h.buckets {
		if h.ownerOf(b.part) == p {
			h.recountSlots(b, roll)
		}
	}
	p.addRoll(roll)
}

// unlease takes a bucket's lease from it.
func (h *Holder) unlease(b *purse, c *cell) {
	b.lease.Store(nil)
	if p := h.peer(c.series.granter()); p != nil && !c.series.detached {
		p.leases--
	}
}

// detach fixes a lease's deadline: the session goes on without it.
func (h *Holder) detach(s *tab, c *cell) {
	live := s.live()
	if p := h.peer(c.series.granter()); live && p != nil {
		p.leases--
	}
	s.detached = true
	// Sealed first: what is taken after it sees the fixed deadline.
	w := c.word.Swap(sealed)
	was := s.session.Load()
	fixed := newSession(was.granter, was.number)
	fixed.deadline.Store(was.deadline.Load())
	s.session.Store(fixed)
	s.low.Store(0)
	n := c.copy()
	n.word.Store(w)
	s.cell.Store(n)
	if live {
		s.bucket.lease.Store(n)
	}
}

// recountSlots puts all of a bucket's slots in use under one series, which the new owner will number
// when it has the roll. What owners of before lent is theirs no more. An owner that has been the owner
// all along hears that all of its series is returned, once it has taken the roll.
func (h *Holder) recountSlots(b *purse, roll *Roll) {
	owner := h.view.Load().OwnerOf(b.part).Incarnation
	before, inUse, last := h.sealSlots(b)
	for _, s := range before {
		s.dead = true
		if s.granter() == owner && s.number != 0 && roll != nil {
			s.returned.Store(s.granted)
			s.settled, s.said, s.aside().after = 0, 0, roll.Epoch
			h.enqueue(s)
			continue
		}
		s.gone = true
		b.drop(s)
	}
	var t *tab
	if inUse > 0 {
		t = newTab(b, h.noSession(owner), 0)
		t.lent, t.slots, t.granted = true, true, inUse
		c := &cell{tariff: &last.terms.plain, series: t}
		c.word.Store(inUse)
		t.cell.Store(c)
		if roll != nil {
			roll.Slots = append(roll.Slots, RolledSlots{Bucket: b.bucket(), InUse: inUse, Limit: last.terms.limit})
		}
	}
	for _, s := range before {
		if t != nil {
			s.aside().moved.Store(t)
		}
		s.cell.Store(nil)
	}
}

// sealSlots ends all leases of slots on a bucket, and returns their series, how many slots are in use,
// and one of the leases.
func (h *Holder) sealSlots(b *purse) (before []*tab, inUse int64, last *cell) {
	for s := b.series; s != nil; s = s.next() {
		if !s.slots {
			continue
		}
		before = append(before, s)
		c := s.cell.Load()
		if s.live() {
			h.unlease(b, c)
		}
		if c != nil {
			inUse += c.word.Swap(sealed)
			last = c
		}
	}
	return before, inUse, last
}
