package dispatch

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/proxy/capacity"
	"headgate/proxy/queue"
)

// phantom is the node that uses all slots while none are to be given out.
const phantom = 0

// seat is a queue on this node: the cluster's, or, where no scheduler is within reach, that of its own tickets. All of
// it is under Dispatcher.mu.
type seat struct {
	d        *Dispatcher
	official bool // it serves other nodes, and what it grants is to be leased
	core     *queue.Scheduler
	out      queue.Output
	sessions map[uint64]*session // by node
	backends []queue.Backend     // as the core has them
	settling int64               // until when the phantom uses all slots; 0: it does not
	expireAt int64
	learnAt  int64
	learned  map[string]*capacity.Observation // since learnAt

	showAt, shownAt int64
	touched         bool   // something may have changed since
	flips           uint64 // of backends' Contended and Limited
	turn            uint64 // of broadcasts
	shown           map[string]*showing
	gone            []leaving
	stats           queue.Stats // as last shown
}

// showing is a backend as it was broadcast.
type showing struct {
	queue.BackendStats
	turn uint64 // when it changed
}

// leaving is a backend that is none any more.
type leaving struct {
	id   string
	turn uint64
}

// newSeat opens one, with everything in use until it settles; d.mu is held.
func newSeat(d *Dispatcher, now int64, official bool) *seat {
	s := &seat{
		d: d, official: official, sessions: map[uint64]*session{}, learned: map[string]*capacity.Observation{}, shown: map[string]*showing{},
		settling: maxTime, expireAt: maxTime, learnAt: maxTime, showAt: now, shownAt: math.MinInt64,
	}
	if official {
		s.settling = now + int64(settleFor)
		if d.cfg.Learner != nil {
			s.learnAt = s.settling // before, nobody has said what it uses
			for id, n := range d.learnt {
				d.cfg.Learner.Seed(id, n)
			}
		}
	}
	s.core = queue.New(s.config())
	s.apply(now)
	s.settled(now)
	return s
}

func (s *seat) config() queue.Config {
	c := s.d.qcfg
	c.Rand = rand.New(rand.NewPCG(s.d.rand.Uint64(), s.d.rand.Uint64())) //nolint:gosec // it spreads waits
	return c
}

// apply takes the policy.
func (s *seat) apply(now int64) {
	s.core.SetConfig(s.config())
	old := s.backends
	s.backends = slices.Clone(s.d.backends)
	for i := range s.backends {
		b := &s.backends[i]
		if !s.official {
			b.Slots = max(1, b.Slots/int64(s.d.members))
		}
		if was, ok := s.d.state.Load().Backends[b.ID]; ok && was.Rate > 0 { // the queue before this one knew how fast it is
			b.SlotTime = time.Duration(float64(was.Limit) / was.Rate * float64(time.Second))
		}
		if s.settling != 0 {
			s.core.Used(now, phantom, b.ID, max(1, b.Slots), &s.out)
		}
		if s.d.cfg.Learner == nil {
			continue
		}
		// What is learnt goes on to count, also what another node's queue was told.
		if j := slices.IndexFunc(old, func(o queue.Backend) bool { return o.ID == b.ID }); j >= 0 {
			b.Limit, b.Stale = old[j].Limit, old[j].Stale
		} else if n, ok := s.d.learnt[b.ID]; ok {
			b.Limit = n
		}
	}
	s.core.SetBackends(now, s.backends, &s.out)
	s.touched = true
	s.showAt = min(s.showAt, now)
}

// settled ends the settling of the cluster's queue once all nodes are here, or it has lasted.
func (s *seat) settled(now int64) {
	if s.settling == 0 || !s.official {
		return
	}
	here := 1
	for _, to := range s.sessions {
		if to.heard > 1 {
			here++
		}
	}
	if now >= s.settling || here >= s.d.members {
		s.unsettle(now)
	}
}

// unsettle has slots given out.
func (s *seat) unsettle(now int64) {
	s.settling = 0
	s.showAt = now
	if s.learnAt != maxTime {
		s.learnAt = now + int64(showEvery) // by then it is shown what is in use
	}
	s.core.Gone(now, phantom, &s.out)
	s.touched = true
}

// join queues a ticket.
func (s *seat) join(now int64, t *queue.Ticket) {
	s.core.Join(now, t, &s.out)
	s.touched = true
}

// hear takes a node's news.
func (s *seat) hear(now int64, node uint64, t *told) {
	s.touched = true
	s.spread(node, t.placed)
	for i := range t.dones {
		d := &t.dones[i]
		s.core.Done(now, d.backend, d.class, d.tenant, d.cost, time.Duration(d.held), d.worked)
		if o := s.observed(d.backend); o != nil {
			o.Done++
			o.SlotTime += time.Duration(min(d.cost*d.held, maxSlotTime))
		}
	}
	// A ticket's slots count from here on, and the node's own word, which has them, is next.
	for _, id := range t.started {
		s.core.Started(now, node, id)
	}
	for i := range t.uses {
		u := &t.uses[i]
		s.core.Used(now, node, u.backend, u.inUse, &s.out)
		if u.nothing() {
			continue
		}
		if o := s.observed(u.backend); o != nil {
			o.FirstByte += time.Duration(u.firstByte)
			o.FirstBytes += u.firstBytes
			o.Answer += time.Duration(u.answer)
			o.Answers += u.answers
			o.Pushbacks += u.pushbacks
			o.Pause = max(o.Pause, time.Duration(u.pause))
			o.Failures += u.failures
		}
	}
}

// spread tells the other nodes what went where at one.
func (s *seat) spread(node uint64, ps []Placement) {
	if len(ps) == 0 {
		return
	}
	for _, to := range s.sessions {
		if to.node != node {
			to.placed = append(to.placed, ps[:min(len(ps), maxPlaced-len(to.placed))]...)
			to.said()
		}
	}
	if node != s.d.cfg.Self {
		s.d.placed(ps)
	}
}

// maxSlotTime bounds what one request adds to the sum.
const maxSlotTime = int64(1000 * time.Hour)

// observed is what is collected for the learner about a backend; nil: nothing is, or there is no such backend.
func (s *seat) observed(backend string) *capacity.Observation {
	if s.learnAt == maxTime {
		return nil
	}
	o := s.learned[backend]
	if o == nil && slices.ContainsFunc(s.backends, func(b queue.Backend) bool { return b.ID == backend }) {
		o = &capacity.Observation{Backend: backend}
		s.learned[backend] = o
	}
	return o
}

// deliver hands out what the core decided.
func (s *seat) deliver(now int64) {
	s.expireAt = s.core.Expire(now, &s.out)
	if n := s.core.Changes(); n != s.flips {
		s.flips = n
		s.showAt = min(s.showAt, max(now, s.shownAt+int64(showSoon)))
	}
	for i := range s.out.Grants {
		g := &s.out.Grants[i]
		if g.Node == s.d.cfg.Self {
			s.d.granted(g.ID, g.Backend, g.Cost)
		} else if to := s.sessions[g.Node]; to != nil {
			to.grants = append(to.grants, *g)
			to.said()
		}
	}
	for i := range s.out.Drops {
		x := &s.out.Drops[i]
		if x.Node == s.d.cfg.Self {
			s.d.droppedBy(x.ID, Dropped{x.Reason, x.RetryAfter})
		} else if to := s.sessions[x.Node]; to != nil {
			to.drops = append(to.drops, *x)
			to.said()
		}
	}
	s.out.Reset()
	if s.touched {
		s.showAt = min(s.showAt, s.shownAt+int64(showEvery))
	}
	if now >= s.showAt {
		s.show(now)
	}
}

// due is when tick is to be called next.
func (s *seat) due(int64) int64 {
	next := min(s.expireAt, s.learnAt, s.showAt)
	if s.settling != 0 {
		next = min(next, s.settling)
	}
	return next
}

// tick does what is due; deliver follows.
func (s *seat) tick(now int64) {
	s.settled(now)
	if now >= s.learnAt {
		s.learnAt = now + int64(learnEvery)
		s.learn(now)
	}
}

// learn tells the learner what was seen, and the core what it makes of that.
func (s *seat) learn(now int64) {
	changed := false
	for i := range s.backends {
		b := &s.backends[i]
		o := s.learned[b.ID]
		if o == nil {
			o = &capacity.Observation{Backend: b.ID}
		}
		if st := s.shown[b.ID]; st != nil {
			o.InUse, o.Waiting = st.InUse, int64(st.Waiting)
		}
		s.d.cfg.Learner.Observe(now, *o)
		limit, stale := s.d.cfg.Learner.Limit(now, b.ID)
		if limit != b.Limit || stale != b.Stale {
			b.Limit, b.Stale, changed = limit, stale, true
		}
	}
	clear(s.learned)
	if changed {
		s.core.SetBackends(now, s.backends, &s.out)
		s.touched = true
	}
}

// show says how things stand.
func (s *seat) show(now int64) {
	s.stats = s.core.Look(now)
	s.turn++
	var changed []queue.BackendStats
	var gone []string
	for i := range s.stats.Backends {
		b := &s.stats.Backends[i]
		was := s.shown[b.ID]
		if was == nil {
			was = &showing{}
			s.shown[b.ID] = was
		} else if was.BackendStats == *b {
			continue
		}
		was.BackendStats, was.turn = *b, s.turn
		changed = append(changed, *b)
	}
	if len(s.shown) > len(s.stats.Backends) {
		gone = s.forget()
	}
	s.d.shown(now, s.shownAt == math.MinInt64, changed, gone)
	if s.official {
		s.d.learn(changed)
	}
	for _, to := range s.sessions {
		to.show = true
		to.said()
	}
	every := showIdle
	if len(changed) > 0 || s.stats.Waiting > 0 {
		every = showEvery
	}
	s.touched = false
	s.shownAt, s.showAt = now, now+int64(every)
}

// forget takes those out that are no backends any more.
func (s *seat) forget() (gone []string) {
	for id := range s.shown {
		if !slices.ContainsFunc(s.stats.Backends, func(b queue.BackendStats) bool { return b.ID == id }) {
			delete(s.shown, id)
			gone = append(gone, id)
			s.gone = append(s.gone, leaving{id, s.turn})
		}
	}
	if len(s.gone) > queue.MaxBackends {
		s.gone = slices.Delete(s.gone, 0, len(s.gone)-queue.MaxBackends)
	}
	return gone
}

// changes is what changed since a turn, for a session that has seen that.
func (s *seat) changes(since uint64) (changed []queue.BackendStats, gone []string) {
	for _, b := range s.shown {
		if b.turn > since {
			changed = append(changed, b.BackendStats)
		}
	}
	for _, l := range s.gone {
		if l.turn > since && s.shown[l.id] == nil {
			gone = append(gone, l.id)
		}
	}
	return changed, gone
}

// dismissAll ends the sessions: the queue is kept elsewhere.
func (s *seat) dismissAll() {
	for _, to := range s.sessions {
		to.cut()
	}
	clear(s.sessions)
}
