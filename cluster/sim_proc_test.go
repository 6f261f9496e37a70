package cluster

import (
	"cmp"
	"fmt"
	"slices"

	"headgate/cluster/ledger"
)

// simProc is one process of a server, from its start to its death. The fence, Keep and the
// proposer are the real ones.
type simProc struct {
	simRaft
	w           *simWorld
	srv         *simServer
	inc         uint64
	alive       bool
	left        bool // said so in gossip
	diedAt      int64
	pausedUntil int64
	pausedSince int64

	fence    *Fence
	proposer *Proposer
	feeding  []*ledger.View // applied, to be stepped to, in order
	feedBusy bool
	asks     uint64

	// As a leader.
	waiting   []simAsk // for a barrier that has not begun
	scheduled bool
	began     int64
	rounds    []simRound

	// lent is until when, in true time, somebody may spend what this process lent, by
	// partition. It outlives the process.
	lent [simPartitions]int64

	lie      Liveness // what gossip says of it instead of the truth, until then
	lieUntil int64
	lieNotTo *simServer // nil: to everybody
}

// simAsk is a KeepView request that has come to the leader.
type simAsk struct {
	name       string
	inc, epoch uint64
	answer     func(granted bool)
}

// simRound is a barrier under way and those who wait for it.
type simRound struct {
	index uint64 // of its entry
	asks  []simAsk
	votes map[int]bool // VerifyLeader's
}

func (p *simProc) String() string { return fmt.Sprintf("%s.%d@%d", p.srv.name, p.inc, p.srv.id) }

func (p *simProc) clock() simClock { return p.srv.clock }

var simRings = ringCache{owners: map[string][]int32{}}

// start runs a new process on the server.
func (s *simServer) start() {
	w := s.w
	p := &simProc{w: w, srv: s, inc: uint64(len(w.procs) + 1), alive: true, simRaft: simRaft{leaderID: -1}}
	opts := FenceOptions{ring: simRings.ring, noWait: w.broken.noWait, ignoreIncarnations: w.broken.ignoreIncarnations, bridgeGaps: w.broken.bridgeGaps}
	p.fence = NewFence(Self{s.name, p.inc}, opts)
	p.proposer = NewProposer(ViewConfig{Partitions: simPartitions})
	p.commit, p.applied, p.view = s.base, s.base, s.baseView
	s.proc = p
	w.procs = append(w.procs, p)
	w.mighty = append(slices.DeleteFunc(w.mighty, func(p *simProc) bool {
		return !p.alive && w.now > p.diedAt+int64(2*leaseFor) // whoever borrowed of it has nothing left
	}), p)
	w.logf("%s starts", p)
	if p.view != nil {
		p.feed(p.view)
	}
	p.resetElection()
	p.watchElection()
	w.every(int64(KeepEvery), p, p.ask)
	w.every(30*simMS, p, p.propose)
	w.every(60*simMS, p, p.borrow)
}

func (p *simProc) die() {
	p.alive, p.diedAt, p.srv.proc = false, p.w.now, nil
	p.w.stats.lapses += int(p.fence.Lapses(p.clock().read(p.w.now)))
}

// grants is the oracle's question: what this process, or who borrowed of it, may grant
// at the true instant t, as a mask of partitions.
func (p *simProc) grants(t int64) (mask uint64) {
	now := p.clock().read(t)
	for part := range uint32(simPartitions) {
		if t < p.lent[part] || p.alive && p.fence.MayGrant(now, part) {
			mask |= 1 << part
		}
	}
	return mask
}

// feed hands an applied view to the fence. The clock is read once the view is in hand;
// the step may come late, and the views behind it later.
func (p *simProc) feed(v *ledger.View) {
	p.feeding = append(p.feeding, v)
	p.feedNext()
}

func (p *simProc) feedNext() {
	if p.feedBusy || len(p.feeding) == 0 {
		return
	}
	p.feedBusy = true
	now := p.clock().read(p.w.now)
	p.w.after(p.w.hesitation(), p, func() {
		v := p.feeding[0]
		p.feeding = p.feeding[1:]
		p.fence.Step(now, v)
		if w := p.w; w.calm && p.fence.Replaced() && p.alive {
			p.die()
			if p.srv != w.servers[len(w.servers)-1] {
				p.srv.start()
			}
			return
		}
		p.changed()
		if p.fence.Waiting(now) > 0 {
			p.w.stats.waits++
		}
		p.ask()
		p.feedBusy = false
		p.feedNext()
	})
}

// changed has the oracle look now, and at the instant at which time alone lets this process begin.
func (p *simProc) changed() {
	p.w.check()
	if at, ok := p.fence.NextChange(p.clock().read(p.w.now)); ok {
		p.w.after(p.clock().when(at)-p.w.now, nil, func() {})
	}
}

// ask asks some voter for a lease, and another one soon if none answers.
func (p *simProc) ask() {
	p.asks++
	p.askOnce(p.asks, true)
}

func (p *simProc) askOnce(number uint64, again bool) {
	w := p.w
	epoch, ok := p.fence.Want()
	if p.left || !ok && !w.broken.ignoreIncarnations {
		return
	}
	sent := p.clock().read(w.now)
	w.after(w.hesitation(), p, func() {
		to := p.leaderID
		if to < 0 || w.chance(.5) {
			to = w.rng.IntN(w.voters)
		}
		w.send(p.srv.id, to, func(q *simProc) {
			q.onAsk(simAsk{name: p.srv.name, inc: p.inc, epoch: epoch, answer: func(granted bool) {
				w.answer(q.srv.id, p, func() { p.onKept(number, sent, epoch, granted) })
			}}, false)
		})
	})
	if again {
		w.after(int64(KeepRetry), p, func() {
			if p.asks == number {
				p.askOnce(number, false)
			}
		})
	}
}

func (p *simProc) onKept(number uint64, sent int64, epoch uint64, granted bool) {
	if !granted {
		return
	}
	if p.asks == number {
		p.asks++ // answered
	}
	now := p.clock().read(p.w.now)
	if p.w.broken.fromAnswer {
		sent = now
	}
	p.w.after(p.w.hesitation(), p, func() {
		if p.fence.Granted(sent, now, epoch) {
			p.changed()
		}
	})
}

// onAsk is KeepView: the leader answers after a barrier, any other passes it on once.
func (p *simProc) onAsk(a simAsk, forwarded bool) {
	w := p.w
	switch {
	case p.role == simLeader:
		p.proposer.Asked(p.clock().read(w.now), a.name, a.inc, a.epoch)
		if n := len(p.rounds); n > 0 && w.broken.lateJoin {
			p.rounds[n-1].asks = append(p.rounds[n-1].asks, a)
			return
		}
		p.waiting = append(p.waiting, a)
		p.scheduleRound()
	case forwarded || p.leaderID < 0:
		a.answer(false)
	default:
		passed, back := a, a.answer
		w.send(p.srv.id, p.leaderID, func(q *simProc) {
			passed.answer = func(granted bool) { w.answer(q.srv.id, p, func() { back(granted) }) }
			q.onAsk(passed, true)
		})
	}
}

func (p *simProc) scheduleRound() {
	if p.scheduled || len(p.waiting) == 0 {
		return
	}
	p.scheduled = true
	p.w.after(max(0, p.began+int64(barrierEvery)-p.w.now), p, func() {
		p.scheduled = false
		if p.role == simLeader {
			p.beginRound()
		}
	})
}

// beginRound begins a barrier for all that wait now; for none that come later.
func (p *simProc) beginRound() {
	r := simRound{asks: p.waiting}
	p.waiting, p.began = nil, p.w.now
	if p.w.broken.verifyLeader {
		r.votes = map[int]bool{p.srv.id: true}
		p.rounds = append(p.rounds, r)
		return
	}
	r.index = p.srv.last() + 1
	p.rounds = append(p.rounds, r)
	p.append(nil)
}

// barriersApplied answers the rounds whose entry the state machine has passed.
func (p *simProc) barriersApplied() {
	done := func(r simRound) bool { return r.votes == nil && p.role == simLeader && r.index <= p.applied }
	p.finish(done)
}

func (p *simProc) finish(done func(simRound) bool) {
	rounds := p.rounds
	p.rounds = nil
	for _, r := range rounds {
		if !done(r) {
			p.rounds = append(p.rounds, r)
			continue
		}
		for _, a := range r.asks {
			a.answer(p.keep(a))
		}
	}
}

func (p *simProc) keep(a simAsk) bool {
	if p.w.broken.ignoreIncarnations && p.view != nil {
		for _, m := range p.view.Members {
			if m.Name == a.name {
				a.inc = m.Incarnation
			}
		}
	}
	granted, _ := Keep(p.view, a.name, a.inc, a.epoch)
	return granted
}

func (p *simProc) failRounds() {
	for _, r := range p.rounds {
		for _, a := range r.asks {
			a.answer(false)
		}
	}
	for _, a := range p.waiting {
		a.answer(false)
	}
	p.rounds, p.waiting = nil, nil
}

// verified is how v1.8.0 counts for VerifyLeader: every follower's next success counts
// once, be it a voter or not, whenever what it answers was sent.
func (p *simProc) verified(from int) {
	if !p.w.broken.verifyLeader {
		return
	}
	for _, r := range p.rounds {
		r.votes[from] = true
	}
	p.finish(func(r simRound) bool { return len(r.votes) > p.w.voters/2 })
}

func (p *simProc) failVerifications() {
	if p.w.broken.verifyLeader {
		p.failRounds()
	}
}

// propose is the leader's turn to change the view.
func (p *simProc) propose() {
	if p.role != simLeader {
		return
	}
	next, ok := p.proposer.Next(p.clock().read(p.w.now), p.view, p.gossip())
	if ok {
		p.commitView(next)
	}
}

func (p *simProc) commitView(v *ledger.View) {
	if p.proposed == v.Epoch && p.w.chance(.9) { // it is under way
		return
	}
	p.proposed = v.Epoch
	p.append(v)
}

// gossip is what p hears of the others: late, and not always true.
func (p *simProc) gossip() (seen []Seen) {
	const detection = 400 * simMS
	w := p.w
	for _, q := range w.procs[max(0, len(w.procs)-2*len(w.servers)):] {
		s := Seen{Name: q.srv.name, Incarnation: q.inc, Gossip: GossipAlive}
		cut := w.cut[q.srv.id][p.srv.id] > w.now && w.now-w.cutSince[q.srv.id][p.srv.id] > detection
		switch {
		case q.lieUntil > w.now && q.lieNotTo != p.srv:
			s.Gossip = q.lie
		case q.left:
			s.Gossip = GossipLeft
		case !q.alive && w.now-q.diedAt > detection, cut,
			q.pausedUntil > w.now && w.now-q.pausedSince > detection:
			s.Gossip = GossipDead
		}
		seen = append(seen, s)
	}
	return seen
}

// wild proposes some view, whatever the members did: safety must not depend on why views change.
func (p *simProc) wild() {
	if p.view == nil {
		return
	}
	v := &ledger.View{Epoch: p.view.Epoch + 1, Partitions: simPartitions, RingVersion: RingVersion}
	for _, q := range p.w.procs[max(0, len(p.w.procs)-len(p.w.servers)):] {
		if p.w.chance(.7) {
			v.Members = withMember(v.Members, q)
		}
	}
	if len(v.Members) > 0 {
		p.commitView(v)
	}
}

// withMember puts q in, in place of any other of its name.
func withMember(members []ledger.Member, q *simProc) []ledger.Member {
	members = without(members, q.srv.name)
	members = append(members, ledger.Member{Name: q.srv.name, Incarnation: q.inc})
	slices.SortFunc(members, func(a, b ledger.Member) int { return cmp.Compare(a.Name, b.Name) })
	return members
}

func without(members []ledger.Member, name string) []ledger.Member {
	return slices.DeleteFunc(slices.Clone(members), func(m ledger.Member) bool { return m.Name == name })
}

// borrow asks a random process for a session's worth of a random partition: the owner
// lends for no longer than it may grant itself, and the holder spends by its own clock,
// from the send of its request.
func (p *simProc) borrow() {
	w := p.w
	of := w.servers[w.rng.IntN(len(w.servers))]
	part := uint32(w.rng.IntN(simPartitions))
	if r := p.fence.Ring(); w.chance(.8) && r.Owner(part) >= 0 {
		for _, s := range w.servers {
			if s.name == r.members[r.Owner(part)].Name && s.proc != nil {
				of = s
			}
		}
	}
	sent := p.clock().read(w.now)
	w.after(w.hesitation(), p, func() {
		w.send(p.srv.id, of.id, func(owner *simProc) {
			lend := min(owner.fence.Left(owner.clock().read(w.now), part), int64(leaseFor))
			if lend == 0 {
				return
			}
			if w.broken.lendLong {
				lend = int64(leaseFor)
			}
			w.after(w.hesitation(), owner, func() {
				w.answer(owner.srv.id, p, func() {
					w.stats.sessions++
					owner.lent[part] = max(owner.lent[part], p.clock().when(sent+lend*98/100))
					w.check()
				})
			})
		})
	})
}
