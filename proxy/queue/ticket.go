package queue

import "math"

// whole is one ticket's part of the places, cut up evenly among its backends: it divides by every number
// up to MaxPlaces.
const whole = 720720

// ticket is a Ticket that waits (its places are entered) or is granted.
type ticket struct {
	node     *node
	id       uint64
	seq      uint64 // by when it joined: breaks ties of age
	tenant   string
	class    Class
	work     int64
	bytes    int64
	arrived  int64 // when it would have joined, had it waited here all the time
	deadline int64
	waited   bool // it had a place before
	refused  bool // before, elsewhere
	places   []place
	alive    int   // places whose backend is still there
	part     int64 // whole / len(places)

	account            *account // while it waits
	accPrev, accNext   *ticket
	nodePrev, nodeNext *ticket
	due                int // in Scheduler.due

	granted     *place
	cost        int64   // of the grant
	charge      float64 // what its tenant was charged for the grant, in slot-nanoseconds
	classCharge float64
	epoch       uint64 // of the backend then; 0: nothing was charged

	saving *backend // saves room up for it
	saves  uint8    // how often one did
}

// place is one backend where a ticket may go. While the ticket waits it stands in its claim's list, or is
// parked: passed over until a time.
type place struct {
	ticket  *ticket
	backend *backend // nil: gone
	cost    int64
	claim   *claim   // of the list in which it stands
	weight  float64  // there
	links   [2]links // while it does
	parked  int      // in backend.parked, plus one
	until   int64
	misses  uint8
}

// node is one gateway: what it uses, and its tickets.
type node struct {
	id         uint64
	head, tail *ticket
	used       map[*backend]int64
}

type ticketKey struct{ node, id uint64 }

// account is what one tenant has waiting in one class.
type account struct {
	tenant     string
	class      Class
	head, tail *ticket // by age as far as known: the tail goes first where room is needed
	n          int
	size       int64
	seq        uint64
	pos        int // in Scheduler.sizes
	claims     map[*backend]*claim
}

type accountKey struct {
	tenant string
	class  Class
}

// ticketSize is what a ticket counts beside its bytes where bounds of memory are shared out.
const ticketSize = 4096

func (t *ticket) size() int64 { return t.bytes + ticketSize }

// newTicket copies what Join was given, without its places.
func (s *Scheduler) newTicket(t *Ticket, n *node) *ticket {
	var k *ticket
	if end := len(s.freeTickets) - 1; end >= 0 {
		k = s.freeTickets[end]
		s.freeTickets = s.freeTickets[:end]
	} else {
		k = &ticket{}
	}
	s.seq++
	waited := max(t.Waited, 0)
	*k = ticket{
		node: n, id: t.ID, seq: s.seq, tenant: t.Tenant, class: min(t.Class, BestEffort),
		work: max(t.Work, 1), bytes: max(t.Bytes, 0), waited: waited > 0, refused: t.Refused,
		arrived: s.now - int64(waited), deadline: later(s.now, int64(t.Patience)),
		places: k.places[:0],
	}
	return k
}

// later is at + d, without overflow.
func later(at, d int64) int64 {
	if d > math.MaxInt64-at {
		return math.MaxInt64
	}
	return at + d
}

// enroll makes a ticket known to its node, the index and the bounds.
func (s *Scheduler) enroll(t *ticket) {
	s.tickets[ticketKey{t.node.id, t.id}] = t
	s.bytes += t.bytes
	n := t.node
	t.nodePrev = n.tail
	if n.tail != nil {
		n.tail.nodeNext = t
	} else {
		n.head = t
	}
	n.tail = t
}

// forget undoes enroll; the ticket must not wait any more. It may be used again afterwards.
func (s *Scheduler) forget(t *ticket) {
	delete(s.tickets, ticketKey{t.node.id, t.id})
	s.bytes -= t.bytes
	s.due.remove(t)
	n := t.node
	if t.nodePrev != nil {
		t.nodePrev.nodeNext = t.nodeNext
	} else {
		n.head = t.nodeNext
	}
	if t.nodeNext != nil {
		t.nodeNext.nodePrev = t.nodePrev
	} else {
		n.tail = t.nodePrev
	}
	clear(t.places)
	*t = ticket{places: t.places[:0]}
	if len(s.freeTickets) < maxFree {
		s.freeTickets = append(s.freeTickets, t)
	}
}

// maxFree bounds what is kept for use again, of each kind.
const maxFree = 4096

// accountOf finds or opens the account of a tenant in a class.
func (s *Scheduler) accountOf(tenant string, class Class) *account {
	key := accountKey{tenant, class}
	a := s.accounts[key]
	if a != nil {
		return a
	}
	if end := len(s.freeAccounts) - 1; end >= 0 {
		a = s.freeAccounts[end]
		s.freeAccounts = s.freeAccounts[:end]
	} else {
		a = &account{claims: make(map[*backend]*claim, 1)}
	}
	s.seq++
	a.tenant, a.class, a.seq = tenant, class, s.seq
	s.accounts[key] = a
	return a
}

// closeAccount forgets an account in which nothing is left.
func (s *Scheduler) closeAccount(a *account) {
	if a.n > 0 || len(a.claims) > 0 {
		return
	}
	delete(s.accounts, accountKey{a.tenant, a.class})
	*a = account{claims: a.claims}
	if len(s.freeAccounts) < maxFree {
		s.freeAccounts = append(s.freeAccounts, a)
	}
}

// credit adds a waiting ticket to its account; one that comes back counts as old.
func (s *Scheduler) credit(t *ticket, old bool) {
	a := s.accountOf(t.tenant, t.class)
	t.account = a
	switch {
	case a.head == nil:
		a.head, a.tail = t, t
	case old:
		t.accNext, a.head.accPrev, a.head = a.head, t, t
	default:
		t.accPrev, a.tail.accNext, a.tail = a.tail, t, t
	}
	a.n++
	a.size += t.size()
	if a.n == 1 {
		s.tenants++
	}
	s.waiting[t.class]++
	s.size[t.class] += t.size()
	s.sizes[t.class].set(a, -a.size, a.seq)
}

// debit undoes credit.
func (s *Scheduler) debit(t *ticket) {
	a := t.account
	if t.accPrev != nil {
		t.accPrev.accNext = t.accNext
	} else {
		a.head = t.accNext
	}
	if t.accNext != nil {
		t.accNext.accPrev = t.accPrev
	} else {
		a.tail = t.accPrev
	}
	t.account, t.accPrev, t.accNext = nil, nil, nil
	a.n--
	a.size -= t.size()
	s.waiting[t.class]--
	s.size[t.class] -= t.size()
	if a.n > 0 {
		s.sizes[t.class].set(a, -a.size, a.seq)
		return
	}
	s.tenants--
	s.sizes[t.class].remove(a)
	s.closeAccount(a)
}
