package queue

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Scheduler is the queue and the room of every backend. It is not safe for concurrent use.
type Scheduler struct {
	cfg      Config
	weights  float64 // their sum
	now      int64
	seq      uint64
	changes  uint64
	backends map[string]*backend
	nodes    map[uint64]*node
	tickets  map[ticketKey]*ticket
	accounts map[accountKey]*account
	bytes    int64
	waiting  [Classes]int
	size     [Classes]int64 // of those that wait
	sizes    [Classes]heap[int64, *account]
	tenants  int                   // accounts with somebody waiting
	due      heap[int64, *ticket]  // by deadline, or the end of a grant
	wakes    heap[int64, *backend] // by when something there is to be done
	dirty    []*backend            // those where somebody may be served now

	freeNodes    []*node
	freeTickets  []*ticket
	freeAccounts []*account
	freeClaims   []*claim
}

// New returns a scheduler without backends.
func New(cfg Config) *Scheduler {
	s := &Scheduler{
		backends: make(map[string]*backend),
		nodes:    make(map[uint64]*node),
		tickets:  make(map[ticketKey]*ticket),
		accounts: make(map[accountKey]*account),
	}
	s.due.at = func(t *ticket) *int { return &t.due }
	s.wakes.at = func(b *backend) *int { return &b.wake }
	for c := range s.sizes {
		s.sizes[c].at = func(a *account) *int { return &a.pos }
	}
	s.SetConfig(cfg)
	return s
}

// SetConfig replaces the policy. Tickets keep their places even where there are fewer now.
func (s *Scheduler) SetConfig(cfg Config) {
	if cfg.TargetWait <= 0 {
		cfg.TargetWait = 2 * time.Second
	}
	if cfg.MaxBytes <= 0 {
		cfg.MaxBytes = 256 << 20
	}
	if cfg.Weights == [Classes]int64{} {
		cfg.Weights = [Classes]int64{75, 22, 3}
	}
	if cfg.Tickets <= 0 {
		cfg.Tickets = 65536
	}
	s.weights = 0
	for c := range cfg.Weights {
		cfg.Weights[c] = max(cfg.Weights[c], 1)
		s.weights += float64(cfg.Weights[c])
	}
	s.cfg = cfg
}

// Waiting counts the tickets without a grant.
func (s *Scheduler) Waiting() int {
	n := 0
	for _, w := range s.waiting {
		n += w
	}
	return n
}

// Changes grows whenever Contended or Limited of some backend has changed: worth telling the nodes at once,
// so that they begin or cease to help themselves.
func (s *Scheduler) Changes() uint64 { return s.changes }

// tick takes the time of a call.
func (s *Scheduler) tick(now int64) { s.now = max(s.now, now) }

// SetBackends replaces the list of backends. Tickets lose the places that are gone; those that have none
// left are dropped as NoBackend. What nodes use of a backend that is gone is remembered while it lasts.
func (s *Scheduler) SetBackends(now int64, backends []Backend, out *Output) {
	s.tick(now)
	named := make(map[*backend]bool, len(backends))
	for i := range backends[:min(len(backends), MaxBackends)] {
		k := &backends[i]
		b := s.backendOf(k.ID)
		if b == nil {
			continue // too many that are gone are still in use
		}
		named[b] = true
		b.accrue(s.now)
		b.known, b.closed, b.overflow, b.stale = true, false, k.Overflow, k.Stale
		b.slots, b.limit = max(k.Slots, 1), k.Limit
		b.expect(k.SlotTime)
		if limited := b.capacity() < b.slots; limited != b.limited {
			b.limited = limited
			s.changes++
		}
		s.touch(b)
	}
	var gone []*backend
	for _, b := range s.backends {
		if b.known && !named[b] {
			gone = append(gone, b)
		}
	}
	slices.SortFunc(gone, func(a, b *backend) int { return cmp.Compare(a.seq, b.seq) })
	for _, b := range gone {
		s.close(b, out)
	}
	s.settle(out)
}

// Join queues a ticket, or grants or drops it at once. A ticket of the same name that is there leaves first.
// Places whose backends SetBackends did not name yet are waited for like full ones.
func (s *Scheduler) Join(now int64, t *Ticket, out *Output) {
	s.tick(now)
	if old := s.tickets[ticketKey{t.Node, t.ID}]; old != nil {
		s.end(old)
	}
	s.join(t, out)
	s.settle(out)
}

func (s *Scheduler) join(t *Ticket, out *Output) {
	n := s.nodeOf(t.Node)
	if n == nil {
		out.Drops = append(out.Drops, Drop{t.Node, t.ID, QueueFull, unknownWait})
		return
	}
	k := s.newTicket(t, n)
	s.setPlaces(k, t.Places)
	s.enroll(k)
	switch {
	case k.alive == 0:
		s.drop(k, NoBackend, out)
	case k.deadline <= s.now:
		s.drop(k, Expired, out)
	case !s.admitSize(k, out):
		s.drop(k, QueueFull, out)
	default:
		// Room that is free is better than any place, and nobody is passed over where nothing waits.
		if p := s.free(k); p != nil {
			s.grant(k, p, false, out)
		} else if s.admit(k, out) {
			s.wait(k, false)
		} else {
			s.drop(k, QueueFull, out)
		}
	}
}

// setPlaces gives a ticket its places, each backend once.
func (s *Scheduler) setPlaces(t *ticket, places []Place) {
	for i := range places {
		if len(t.places) == MaxPlaces {
			break
		}
		b := s.backendOf(places[i].Backend)
		if b == nil || slices.ContainsFunc(t.places, func(p place) bool { return p.backend == b }) {
			continue
		}
		t.places = append(t.places, place{ticket: t, backend: b, cost: max(places[i].Cost, 1)})
	}
	t.alive = len(t.places)
	if t.alive > 0 {
		t.part = whole / int64(t.alive)
	}
}

// free is the place that a ticket takes at once: the first where nobody waits and there is room.
func (s *Scheduler) free(t *ticket) *place {
	return s.pick(t, func(b *backend) bool { return b.n == 0 })
}

// pick is the first of a ticket's places with room for it, if may says so; those that overflow come last.
func (s *Scheduler) pick(t *ticket, may func(*backend) bool) *place {
	var over *place
	for i := range t.places {
		p := &t.places[i]
		b := p.backend
		if b == nil || p.parked > 0 || !may(b) || b.room(s.now) < min(p.cost, b.slots) {
			continue
		}
		if !b.overflow {
			return p
		}
		if over == nil {
			over = p
		}
	}
	return over
}

// wait enters a ticket at all its places.
func (s *Scheduler) wait(t *ticket, back bool) {
	s.due.set(t, t.deadline, t.seq)
	s.credit(t, back)
	for i := range t.places {
		p := &t.places[i]
		b := p.backend
		if b == nil {
			continue
		}
		b.accrue(s.now)
		if b.n == 0 {
			b.begin()
		}
		if !b.contended {
			b.contended = true
			s.changes++
		}
		l := &b.classes[t.class]
		b.n++
		b.load += t.part
		l.n++
		l.load += t.part
		weighed := float64(t.work) * float64(p.cost)
		if b.work == 0 {
			b.work = weighed
		}
		b.work += (weighed - b.work) / 64
		s.link(p)
		s.touch(b)
	}
}

// unwait takes a ticket out of all its places.
func (s *Scheduler) unwait(t *ticket) {
	for i := range t.places {
		if p := &t.places[i]; p.backend != nil {
			s.exit(p)
		}
	}
	s.debit(t)
	s.due.remove(t)
}

// exit takes a place out of its backend's queue.
func (s *Scheduler) exit(p *place) {
	t, b := p.ticket, p.backend
	if p.parked > 0 {
		b.unpark(p)
	} else {
		s.unlink(p)
	}
	b.accrue(s.now)
	l := &b.classes[t.class]
	b.n--
	b.load -= t.part
	l.n--
	l.load -= t.part
	if b.saver == t {
		b.saver, t.saving = nil, nil
	}
	if b.n == 0 {
		b.quietAt = s.now + contendedFor
	}
	s.touch(b) // it may have stood before others that fit
	s.sweep(b)
}

// grant offers a ticket the room of a place, whose turn it is where it waited.
func (s *Scheduler) grant(t *ticket, p *place, waited bool, out *Output) {
	b := p.backend
	t.cost = min(p.cost, b.slots)
	t.charge, t.epoch = 0, 0
	if waited {
		s.bill(t, b)
		s.unwait(t)
	}
	t.granted = p
	b.granted += t.cost
	s.due.set(t, s.now+int64(GrantTimeout), t.seq)
	out.Grants = append(out.Grants, Grant{t.node.id, t.id, b.id, t.cost})
}

// ungrant takes back the room of a grant.
func (s *Scheduler) ungrant(t *ticket) {
	b := t.granted.backend
	b.granted -= t.cost
	t.granted = nil
	s.due.remove(t)
	s.touch(b)
}

// Leave removes a ticket that waits or is granted; the room of its grant goes to others. An unknown one is ignored.
func (s *Scheduler) Leave(now int64, node, id uint64, out *Output) {
	s.tick(now)
	if t := s.tickets[ticketKey{node, id}]; t != nil {
		s.end(t)
	}
	s.settle(out)
}

// end removes a ticket without a word.
func (s *Scheduler) end(t *ticket) {
	if t.granted != nil {
		s.refund(t, t.granted.backend)
		s.ungrant(t)
	} else if t.account != nil {
		s.unwait(t)
	}
	n := t.node
	s.forget(t)
	s.closeNode(n)
}

// drop removes a ticket and says why.
func (s *Scheduler) drop(t *ticket, reason Reason, out *Output) {
	out.Drops = append(out.Drops, Drop{t.node.id, t.id, reason, s.retryAfter(t)})
	for i := range t.places {
		if b := t.places[i].backend; b != nil && t.granted == nil && !t.refused {
			b.dropped += float64(t.part) / whole
		}
	}
	s.end(t)
}

// Used takes a node's own word on how many slots of a backend its requests occupy, absolute. Node 0 is
// nobody: what it uses takes room and is not measured.
func (s *Scheduler) Used(now int64, node uint64, backend string, inUse int64, out *Output) {
	s.tick(now)
	inUse = max(inUse, 0)
	b := s.backends[backend]
	if b == nil && inUse > 0 {
		b = s.backendOf(backend)
	}
	if b != nil {
		s.usedBy(node, b, inUse)
	}
	s.settle(out)
}

func (s *Scheduler) usedBy(node uint64, b *backend, inUse int64) {
	s.touch(b)
	n := s.nodeOf(node)
	if n == nil {
		return
	}
	if s.use(n, b, inUse) < 0 {
		// Something really became free: no need to wait for the end of a pause.
		b.pauseUntil = 0
		if b.n == len(b.parked) {
			s.unparkAll(b)
		}
	}
	s.closeNode(n)
}

// use sets what a node uses, and returns by how much that is more.
func (s *Scheduler) use(n *node, b *backend, inUse int64) int64 {
	more := inUse - n.used[b]
	b.accrue(s.now)
	b.used += more
	if n.id == 0 {
		b.nobody += more
	}
	if inUse == 0 {
		delete(n.used, b)
	} else {
		n.used[b] = inUse
	}
	return more
}

// Started ends a granted ticket: it holds its slots, which count as used by its node from now on, until
// the node's next Used says how many there are in all. So tell Started before the Used that includes it.
func (s *Scheduler) Started(now int64, node, id uint64) {
	s.tick(now)
	t := s.tickets[ticketKey{node, id}]
	if t == nil || t.granted == nil {
		return
	}
	b, n := t.granted.backend, t.node
	s.ungrant(t)
	s.use(n, b, n.used[b]+t.cost)
	b.misses, b.pauseUntil = 0, 0
	s.forget(t)
}

// Miss says that the lease had no room for a granted ticket. It is back at its old place; that backend is
// left alone for a short while that grows with every miss in a row, and this ticket passed over there for longer.
func (s *Scheduler) Miss(now int64, node, id uint64, out *Output) {
	s.tick(now)
	if t := s.tickets[ticketKey{node, id}]; t != nil && t.granted != nil {
		s.miss(t, out)
	}
	s.settle(out)
}

const (
	firstPause = int64(2 * time.Millisecond) // of a backend
	maxPauses  = 6                           // doublings: 64 ms
	firstPark  = int64(4 * time.Millisecond) // of the ticket there
	maxParks   = 9                           // doublings: 1 s
)

func (s *Scheduler) miss(t *ticket, out *Output) {
	p := t.granted
	b := p.backend
	s.refund(t, b)
	s.ungrant(t)
	if s.now >= b.pauseUntil { // misses of one moment are one
		b.misses = min(b.misses+1, maxPauses)
		b.pauseUntil = s.now + firstPause<<(b.misses-1)
	}
	p.misses = min(p.misses+1, maxParks)
	for i := range t.places {
		o := &t.places[i]
		if o.backend == nil || !o.backend.closed {
			continue
		}
		// It went while the ticket did not wait; it may have come again.
		if o.backend = s.backends[o.backend.id]; o.backend == nil || o.backend.closed {
			o.backend = nil
			t.alive--
		}
	}
	switch {
	case t.alive == 0:
		s.drop(t, NoBackend, out)
	case t.deadline <= s.now:
		s.drop(t, Expired, out)
	default:
		s.wait(t, true)
		if p.backend != nil {
			s.park(p, s.now+firstPark<<(p.misses-1))
		}
	}
}

// Done tells that a request ended, granted or not, which held cost slots of backend for held: the rate is
// measured by it and the shares of class and tenant are corrected. It frees nothing: Used does.
func (s *Scheduler) Done(now int64, backend string, class Class, tenant string, cost int64, held time.Duration, worked bool) {
	s.tick(now)
	b := s.backends[backend]
	if b == nil {
		return
	}
	cost = max(cost, 1)
	took := max(int64(held), 0)
	b.accrue(s.now)
	if worked {
		b.depart(cost, took)
	}
	s.redeem(b, min(class, BestEffort), tenant, cost, took)
}

// Gone forgets a node: its tickets, its grants and what it uses. It drops nothing, as nobody is there to be told.
func (s *Scheduler) Gone(now int64, node uint64, out *Output) {
	s.tick(now)
	n := s.nodes[node]
	if n == nil {
		return
	}
	for b := range n.used {
		s.use(n, b, 0)
		s.touch(b)
	}
	for n.head != nil {
		s.end(n.head)
	}
	s.closeNode(n)
	s.settle(out)
}

// Expire drops whose patience is over, ends pauses, and returns when it wants to be called next
// (math.MaxInt64: not before something changes). Other calls may make that sooner: call it after each batch.
func (s *Scheduler) Expire(now int64, out *Output) (next int64) {
	s.tick(now)
	for s.due.len() > 0 {
		t, at := s.due.first()
		if at > s.now {
			break
		}
		s.drop(t, Expired, out)
	}
	for s.wakes.len() > 0 {
		b, at := s.wakes.first()
		if at > s.now {
			break
		}
		s.wakes.remove(b)
		s.rouse(b)
		s.touch(b)
	}
	s.settle(out)
	next = math.MaxInt64
	if s.due.len() > 0 {
		_, next = s.due.first()
	}
	if s.wakes.len() > 0 {
		_, at := s.wakes.first()
		next = min(next, at)
	}
	return next
}

// Look tells how things stand.
func (s *Scheduler) Look(now int64) Stats {
	s.tick(now)
	st := Stats{WaitingByClass: s.waiting, Waiting: s.Waiting(), Bytes: s.bytes, Tenants: s.tenants}
	st.Granted = len(s.tickets) - st.Waiting
	st.Backends = make([]BackendStats, 0, len(s.backends))
	for _, b := range s.backends {
		if b.known {
			st.Backends = append(st.Backends, b.look(s.now, s.cfg.TargetWait))
		}
	}
	slices.SortFunc(st.Backends, func(a, b BackendStats) int { return cmp.Compare(a.ID, b.ID) })
	return st
}
