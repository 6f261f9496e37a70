package lease

import (
	"time"

	"headgate/lease"
	"headgate/limiter"
)

// The processes of the world: one that owns the bucket, and the holders.
const (
	ownerName   = 1
	firstHolder = 10 // the incarnation of holder 0
)

// cores is Headgate: lease.Owner and lease.Holder with a driver that does what lease.Manager does.
type cores struct {
	w       *world
	sizer   lease.Sizer // nil: the default
	inside  bool        // the first holder is in the owner's process, and asks by a call
	limit   limiter.Limit
	owner   *lease.Owner
	holders []*node
	self    uint64 // the owner's incarnation
	due     int64  // of the owner's next tick
}

// node is one holder and what it waits for.
type node struct {
	holder *lease.Holder
	index  int
	// later wait for the answer that is under way: what it brings may cover them. asks go with the next
	// request.
	later   []*waiter
	asks    []lease.Ask
	waiting map[uint64]*waiter // by ask
	phase   int64              // of its keep-alives
	keeping bool               // the next one is due
	flying  bool               // a request other than a keep-alive is under way
	woken   bool
}

// waiter is a request that waits for the owner.
type waiter struct {
	id      int
	sent    int64
	charges []limiter.Charge
	missing uint32
	waited  bool
}

// rights are those of a process that keeps its view lease for ever.
type rights struct{}

func (rights) Left(int64, uint32) int64      { return 980_000_000 }
func (rights) Lease(int64, uint64) int64     { return 980_000_000 }
func (rights) Started(int64, uint64, uint32) {}

func (s *cores) instant() lease.Instant {
	return lease.Instant{Now: epoch + s.w.now, Wall: epoch + s.w.now}
}

func (s *cores) start(w *world) {
	s.w, s.limit, s.due = w, w.Limit, -1
	s.limit.Revision = 1
	s.self = ownerName
	if s.inside {
		s.self = firstHolder
	}
	view := &lease.View{Epoch: 1, Owners: []int32{0}, Place: func(string) uint32 { return 0 }}
	view.Members = append(view.Members, lease.Member{Name: "owner", Incarnation: s.self})
	for i := range w.Nodes {
		if h := firstHolder + uint64(i); h != s.self {
			view.Members = append(view.Members, lease.Member{Name: "holder", Incarnation: h})
		}
	}
	s.owner = lease.NewOwner(lease.OwnerConfig{Self: s.self, Rights: rights{}, Sizer: s.sizer})
	s.owner.Step(s.instant(), view)
	for i := range w.Nodes {
		n := &node{index: i, waiting: make(map[uint64]*waiter)}
		n.holder = lease.NewHolder(lease.HolderConfig{Self: firstHolder + uint64(i), Clock: s.instant, Wake: func(uint64) { n.woken = true }})
		n.holder.Step(view)
		s.holders = append(s.holders, n)
		n.phase = w.rand.Int64N(int64(lease.KeepEvery))
	}
}

func (s *cores) lent() (sum float64) {
	for _, n := range s.holders {
		for _, l := range n.holder.Levels("t") {
			sum += float64(l.Level)
		}
	}
	return sum
}

func (s *cores) arrive(id int) {
	a := s.w.demand[id]
	s.take(s.holders[a.Node], &waiter{id: id, charges: []limiter.Charge{
		{Key: limiter.Key{Tenant: "t", Limit: "l", Subject: "s"}, Limit: &s.limit, Cost: a.Cost},
	}})
	s.send(s.holders[a.Node])
}

// take decides by the lease in hand, or puts the request to the owner.
func (s *cores) take(n *node, x *waiter) {
	var ds [1]limiter.Decision
	refused, missing := n.holder.Take(x.charges, ds[:])
	switch {
	case refused >= 0:
		s.w.decide(x.id, false, !x.waited, 0)
	case missing == 0:
		s.took(n, x, ds[:], !x.waited)
	case n.flying && !x.waited:
		x.waited = true
		n.later = append(n.later, x)
	default:
		x.missing = missing
		ask := n.holder.Ask(x.charges, missing, int64(20*time.Millisecond), false)
		n.asks = append(n.asks, ask)
		n.waiting[ask.ID] = x
	}
}

// took settles at once, at the estimate.
func (s *cores) took(n *node, x *waiter, ds []limiter.Decision, local bool) {
	s.w.decide(x.id, true, local, ds[0].At-epoch)
	n.holder.Settle(x.charges, []int64{x.charges[0].Cost}, ds)
}

// send sends what cannot wait for the next keep-alive.
func (s *cores) send(n *node) {
	if n.flying || !n.woken && len(n.asks) == 0 {
		return
	}
	n.flying = true
	s.w.trips[n.index]++
	s.exchange(n, func() {
		n.flying = false
		later := n.later
		n.later = nil
		for _, x := range later {
			s.take(n, x)
		}
		s.send(n)
	})
}

// keepLater has a node keep alive, each quarter of a second, as long as an owner counts on it.
func (s *cores) keepLater(n *node) {
	if n.keeping || len(n.holder.Owners()) == 0 {
		return
	}
	n.keeping = true
	every := int64(lease.KeepEvery)
	s.w.after(every-(s.w.now-n.phase+every)%every, func() {
		n.keeping = false
		if n.flying || len(n.holder.Owners()) == 0 {
			s.keepLater(n)
			return
		}
		s.w.kept++
		s.exchange(n, func() {})
		s.keepLater(n)
	})
}

// exchange is one request and its answer.
func (s *cores) exchange(n *node, done func()) {
	for _, a := range n.asks {
		n.waiting[a.ID].sent = epoch + s.w.now
	}
	r := n.holder.Request(s.self, n.asks)
	n.asks, n.woken = nil, false
	way := s.way(n)
	s.w.after(way, func() {
		answers := s.owner.Handle(s.instant(), r)
		s.w.after(way, func() {
			s.receive(n, answers[0])
			done()
		})
		s.push(answers[1:])
		s.tick()
	})
}

// way is how long a message takes from or to a holder.
func (s *cores) way(n *node) int64 {
	if s.inside && n.index == 0 {
		return 0
	}
	return s.w.way()
}

func (s *cores) push(rs []*lease.Response) {
	for _, r := range rs {
		s.w.pushed++
		n := s.holders[r.Holder-firstHolder]
		s.w.after(s.way(n), func() {
			s.receive(n, r)
			s.send(n)
		})
	}
}

// tick has the owner do what is due, now and later.
func (s *cores) tick() {
	next := s.owner.Next()
	if next-epoch == s.due || next-epoch > int64(s.w.length())*2 {
		return
	}
	s.due = next - epoch
	at := s.due
	s.w.after(at-s.w.now, func() {
		if s.due != at {
			return
		}
		s.due = -1
		s.push(s.owner.Tick(s.instant()))
		s.tick()
	})
}

func (s *cores) receive(n *node, r *lease.Response) {
	n.holder.Handle(r)
	s.keepLater(n)
	for i := range r.Decisions {
		d := &r.Decisions[i]
		x := n.waiting[d.ID]
		if x == nil {
			continue
		}
		delete(n.waiting, d.ID)
		var ds [1]limiter.Decision
		refused, ok := n.holder.Decided(x.charges, x.missing, d, x.sent, ds[:])
		if ok && refused == -1 {
			s.took(n, x, ds[:], false)
		} else {
			s.w.decide(x.id, false, false, 0)
		}
	}
}
