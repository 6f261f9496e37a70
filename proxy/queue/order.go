package queue

import "time"

// line is what one class has waiting at one backend.
type line struct {
	order   heap[float64, *claim] // claims with tickets that are not parked, by tag
	biggest heap[int64, *claim]   // the same, the most tickets first
	ages    ageList               // of their places
	n       int                   // parked ones included
	load    int64
	tag     float64 // slot-nanoseconds served, by weight
	virtual float64 // start tag of the claim that was served last
	high    float64 // the highest tag of a claim
	claims  int     // idle ones included
	served  int     // of those that waited
	marks   [2]mark // the older one first
	owed    float64 // charged for grants whose Done has not come
	owedFor int64   // their cost
	ratio   float64 // of what its requests take to what is expected
}

// mark is where a line's virtual time was.
type mark struct {
	at      int64
	virtual float64
	served  int
}

// markAfter is how many are served between marks, so that chance evens out.
const markAfter = 4

// pace is how fast virtual time moves: what each of those that wait is served, in slot-nanoseconds a nanosecond,
// over about a target wait and enough tickets to tell. rate is how many are served, in tickets a second.
func (l *line) pace(now int64, target time.Duration) (pace, rate float64, known bool) {
	half := int64(target) / 2
	if m := l.marks[1]; m.at == 0 || now-m.at >= half && l.served >= m.served+markAfter {
		l.marks[0], l.marks[1] = m, mark{now, l.virtual, l.served}
	}
	m := l.marks[0]
	if m.at == 0 {
		return 0, 0, false
	}
	dt := float64(now - m.at)
	return (l.virtual - m.virtual) / dt, float64(l.served-m.served) / dt * 1e9, true
}

// claim is what one account has waiting at one backend, and what it was served there.
type claim struct {
	backend         *backend
	account         *account
	ages            ageList // of its places
	n               int
	load            int64
	weight          float64 // of what stands in it
	seq             uint64
	epoch           uint64  // of the backend: what was served before is forgiven
	tag             float64 // slot-nanoseconds served
	owed            float64
	owedFor         int64
	ratio           float64 // of what its requests take to what is expected
	inOrder, inSize int
	idlePrev        *claim // while nothing stands in it
	idleNext        *claim
	idle            bool
}

// claimList is a list of claims in which nothing stands, the longest so first.
type claimList struct {
	head, tail *claim
	n          int
}

// maxIdle bounds the tenants without a ticket whose service at a backend is remembered.
const maxIdle = 4096

func (l *claimList) push(c *claim) {
	c.idle, c.idlePrev, c.idleNext = true, l.tail, nil
	if l.tail != nil {
		l.tail.idleNext = c
	} else {
		l.head = c
	}
	l.tail = c
	l.n++
}

func (l *claimList) remove(c *claim) {
	if c.idlePrev != nil {
		c.idlePrev.idleNext = c.idleNext
	} else {
		l.head = c.idleNext
	}
	if c.idleNext != nil {
		c.idleNext.idlePrev = c.idlePrev
	} else {
		l.tail = c.idlePrev
	}
	c.idle, c.idlePrev, c.idleNext = false, nil, nil
	l.n--
}

// begin opens a time in which something waits: nobody has been served in it yet.
func (b *backend) begin() {
	b.epoch++
	b.virtual = 0
	for i := range b.classes {
		l := &b.classes[i]
		l.tag, l.virtual, l.high, l.owed, l.owedFor = 0, 0, 0, 0, 0
		l.served, l.marks = 0, [2]mark{}
	}
}

// current is a claim whose sums are of its backend's time.
func (c *claim) current() *claim {
	if c.epoch != c.backend.epoch {
		c.epoch, c.tag, c.owed, c.owedFor = c.backend.epoch, 0, 0, 0
	}
	return c
}

// claimOf finds or opens an account's claim on a backend.
func (s *Scheduler) claimOf(a *account, b *backend) *claim {
	if c := a.claims[b]; c != nil {
		return c.current()
	}
	var c *claim
	if end := len(s.freeClaims) - 1; end >= 0 {
		c = s.freeClaims[end]
		s.freeClaims = s.freeClaims[:end]
	} else {
		c = &claim{}
	}
	s.seq++
	*c = claim{backend: b, account: a, seq: s.seq, epoch: b.epoch, ratio: 1}
	a.claims[b] = c
	b.classes[a.class].claims++
	b.idle.push(c)
	return c
}

// findClaim is the claim of a tenant on a backend, or nil.
func (s *Scheduler) findClaim(tenant string, class Class, b *backend) *claim {
	a := s.accounts[accountKey{tenant, class}]
	if a == nil {
		return nil
	}
	c := a.claims[b]
	if c == nil {
		return nil
	}
	return c.current()
}

// closeClaim forgets an idle claim.
func (s *Scheduler) closeClaim(c *claim) {
	a, b := c.account, c.backend
	b.idle.remove(c)
	b.classes[a.class].claims--
	delete(a.claims, b)
	*c = claim{}
	if len(s.freeClaims) < maxFree {
		s.freeClaims = append(s.freeClaims, c)
	}
	s.closeAccount(a)
}

// sweep forgets idle claims that are no different from new ones. Two a call keep up with those that come.
func (s *Scheduler) sweep(b *backend) {
	for range 2 {
		c := b.idle.head
		if c == nil {
			return
		}
		old := c.epoch != b.epoch || b.n == 0 || c.tag <= b.classes[c.account.class].virtual && c.owedFor == 0
		if old || b.idle.n > maxIdle {
			s.closeClaim(c)
			continue
		}
		b.idle.remove(c)
		b.idle.push(c)
	}
}

// link puts a place into its claim's list.
func (s *Scheduler) link(p *place) {
	t, b := p.ticket, p.backend
	c := s.claimOf(t.account, b)
	l := &b.classes[t.class]
	c.ages.insert(p)
	l.ages.insert(p)
	c.n++
	c.load += t.part
	p.weight = b.weight(t.work, min(p.cost, b.slots)) * float64(t.part) / whole
	c.weight += p.weight
	p.claim = c
	if c.n == 1 {
		b.idle.remove(c)
		if l.order.len() == 0 {
			l.tag = max(l.tag, b.virtual) // no credit for having been away
			l.virtual = l.high            // nor a debt to nobody
		}
		c.tag = max(c.tag, l.virtual)
		l.order.set(c, c.tag, c.seq)
	}
	l.biggest.set(c, -int64(c.n), c.seq)
}

// unlink takes a place out of its claim's list.
func (s *Scheduler) unlink(p *place) {
	c, b := p.claim, p.backend
	l := &b.classes[c.account.class]
	c.ages.remove(p)
	l.ages.remove(p)
	c.n--
	c.load -= p.ticket.part
	c.weight -= p.weight
	p.claim = nil
	if c.n > 0 {
		l.biggest.set(c, -int64(c.n), c.seq)
		return
	}
	c.weight = 0 // sums of floats drift
	l.order.remove(c)
	l.biggest.remove(c)
	b.idle.push(c)
}

// older says which of two places stands first by age.
func (p *place) older(q *place) bool {
	if p.ticket.arrived != q.ticket.arrived {
		return p.ticket.arrived < q.ticket.arrived
	}
	return p.ticket.seq < q.ticket.seq
}

// ageList holds places by age. A place is in two: its claim's and its line's.
type ageList struct {
	head, tail *place
	last       *place // the one that came in last, while it is there
	which      int    // of a place's links
}

type links struct{ prev, next *place }

// insert costs a step each for what comes in runs of one order: it begins at the ends and where the last
// one went.
func (l *ageList) insert(p *place) {
	var after *place
	switch {
	case l.tail == nil || p.older(l.head):
	case l.tail.older(p):
		after = l.tail
	default:
		after = l.last
		for after.older(p) {
			after = after.links[l.which].next
		}
		for p.older(after) {
			after = after.links[l.which].prev
		}
	}
	k := links{after, l.head}
	if after != nil {
		k.next = after.links[l.which].next
		after.links[l.which].next = p
	} else {
		l.head = p
	}
	if k.next != nil {
		k.next.links[l.which].prev = p
	} else {
		l.tail = p
	}
	p.links[l.which] = k
	l.last = p
}

func (l *ageList) remove(p *place) {
	k := p.links[l.which]
	if l.last == p {
		if l.last = k.prev; l.last == nil {
			l.last = k.next
		}
	}
	if k.prev != nil {
		k.prev.links[l.which].next = k.next
	} else {
		l.head = k.next
	}
	if k.next != nil {
		k.next.links[l.which].prev = k.prev
	} else {
		l.tail = k.prev
	}
	p.links[l.which] = links{}
}

// ageEighths of the target wait is the age from which tickets go by age: early enough for nearly all to
// be served within the target.
const ageEighths = 7

// next is the place whose turn it is at a backend, nil where all are parked. It is of the class that was
// served least for its weight; there, of the tenant that was served least the oldest, but first the oldest of all if that
// has waited for about the target, and this tenant has its part of those that wait; or for twice the target, whoever comes.
func (s *Scheduler) next(b *backend) *place {
	var best *line
	for i := range b.classes {
		if l := &b.classes[i]; l.order.len() > 0 && (best == nil || l.tag < best.tag) {
			best = l
		}
	}
	if best == nil {
		return nil
	}
	c, _ := best.order.first()
	p := best.ages.head
	if age := s.now - p.ticket.arrived; age > int64(s.cfg.TargetWait)/8*ageEighths && !best.modest(c) || age > 2*int64(s.cfg.TargetWait) {
		return p
	}
	return c.ages.head
}

// modest says that a tenant waits with less than half of its part of a line: it is not for its sake that others grow
// old there, and it does not have to wait until they are gone.
func (l *line) modest(c *claim) bool { return 2*c.n*l.order.len() <= l.n }

// bill charges class and tenant for a grant at b, where it was the ticket's turn, and moves virtual time.
func (s *Scheduler) bill(t *ticket, b *backend) {
	l := &b.classes[t.class]
	c := s.findClaim(t.tenant, t.class, b)
	_, least := l.order.first() // not c's: it may go before its turn, by age
	b.virtual, l.virtual = max(b.virtual, l.tag), max(l.virtual, least)
	l.served++
	usual := b.charge(b.weight(t.work, t.cost))
	t.charge, t.classCharge, t.epoch = usual*c.ratio, usual*l.ratio, b.epoch
	l.owed += t.classCharge
	l.owedFor += t.cost
	c.owed += t.charge
	c.owedFor += t.cost
	s.correct(b, t.class, t.classCharge, t.classCharge)
	s.correctClaim(b, c, t.charge, t.charge)
}

// refund takes back what a grant that came to nothing was charged.
func (s *Scheduler) refund(t *ticket, b *backend) {
	if t.epoch == 0 || t.epoch != b.epoch || b.n == 0 {
		return
	}
	l := &b.classes[t.class]
	l.owed, l.owedFor = settled(l.owed, l.owedFor, t.classCharge, t.cost)
	s.correct(b, t.class, -t.classCharge, 0)
	if c := s.findClaim(t.tenant, t.class, b); c != nil {
		c.owed, c.owedFor = settled(c.owed, c.owedFor, t.charge, t.cost)
		s.correctClaim(b, c, -t.charge, 0)
	}
}

// settled is a sum without one charge of it.
func settled(owed float64, owedFor int64, charge float64, cost int64) (float64, int64) {
	if cost >= owedFor {
		return 0, 0
	}
	return max(0, owed-charge), owedFor - cost
}

// redeem replaces what a request was charged, as the mean of what is owed, by what it took.
func (s *Scheduler) redeem(b *backend, class Class, tenant string, cost, held int64) {
	if b.n == 0 {
		return // the next that waits finds all equal
	}
	took := float64(cost) * float64(held)
	l := &b.classes[class]
	pay := owes(l.owed, l.owedFor, cost)
	l.owed, l.owedFor = settled(l.owed, l.owedFor, pay, cost)
	s.correct(b, class, took-pay, pay)
	l.ratio = learned(l.ratio, took, pay, 64)
	if c := s.findClaim(tenant, class, b); c != nil {
		pay = owes(c.owed, c.owedFor, cost)
		c.owed, c.owedFor = settled(c.owed, c.owedFor, pay, cost)
		s.correctClaim(b, c, took-pay, pay)
		c.ratio = learned(c.ratio, took, pay, 16)
	}
}

// learned is a ratio after a request took so much where so much was paid, averaged over about so many.
func learned(ratio, took, paid, over float64) float64 {
	if paid <= 0 {
		return ratio
	}
	return min(32, max(1.0/32, ratio*(1+(min(8, took/paid)-1)/over)))
}

// owes is the part of cost in what is owed.
func owes(owed float64, owedFor, cost int64) float64 {
	if owedFor == 0 {
		return 0
	}
	return owed * min(1, float64(cost)/float64(owedFor))
}

// correct adds slot-time to a class's tag at b. It gets no further ahead of the others than about the
// target wait's worth, or one of the usual charges: nobody is shut out for longer by what went before.
func (s *Scheduler) correct(b *backend, class Class, slotTime, usual float64) {
	l := &b.classes[class]
	weight := float64(s.cfg.Weights[class])
	bound := b.virtual + max(s.horizon(b, 2)/s.weights, 2*usual/weight)
	l.tag = min(l.tag+slotTime/weight, max(bound, l.tag))
}

// correctClaim does for a claim what correct does for its class.
func (s *Scheduler) correctClaim(b *backend, c *claim, slotTime, usual float64) {
	l := &b.classes[c.account.class]
	bound := l.virtual + max(s.turn(b, c.account.class), 2*usual)
	c.tag = min(c.tag+slotTime, max(bound, c.tag))
	l.high = max(l.high, c.tag)
	if c.n > 0 {
		l.order.set(c, c.tag, c.seq)
	}
}

// horizon is all slot-time of a backend in the target wait, or in so many requests' time if that is more.
func (s *Scheduler) horizon(b *backend, requests float64) float64 {
	return float64(b.capacity()) * max(float64(s.cfg.TargetWait), requests*b.held)
}

// turn is what each account of a class may be served in half the target wait.
func (s *Scheduler) turn(b *backend, class Class) float64 {
	var sum int64
	for i := range b.classes {
		if b.classes[i].n > 0 || Class(i) == class {
			sum += s.cfg.Weights[i]
		}
	}
	part := float64(s.cfg.Weights[class]) / float64(sum)
	accounts := float64(max(1, b.classes[class].order.len()))
	return float64(b.capacity()) * float64(s.cfg.TargetWait) / 2 * part / accounts
}
