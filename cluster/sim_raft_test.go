package cluster

import (
	"fmt"
	"slices"

	"headgate/cluster/ledger"
)

// The model of raft: terms, votes, replication, commitment by a majority of the voters,
// a state machine that lags, snapshots. What a server keeps survives its processes.

type simRole uint8

const (
	simFollower simRole = iota
	simCandidate
	simLeader
)

const (
	simHeartbeat   = 40 * simMS
	simElectionMin = 200 * simMS
	simElectionMax = 400 * simMS
	simMaxEntries  = 64 // in one message
)

// simEntry is one of the log: a view, or nothing (a barrier, a new leader's first).
type simEntry struct {
	term uint64
	view *ledger.View
}

// simServer is a machine with a data folder.
type simServer struct {
	w     *simWorld
	id    int
	name  string
	voter bool
	clock simClock
	proc  *simProc // nil: none runs

	// Kept on disk.
	term     uint64
	votedFor int
	log      []simEntry // after base
	base     uint64     // what the snapshot holds
	baseTerm uint64
	baseView *ledger.View
}

func (s *simServer) last() uint64 { return s.base + uint64(len(s.log)) }

func (s *simServer) termAt(i uint64) uint64 {
	if i == s.base {
		return s.baseTerm
	}
	return s.log[i-s.base-1].term
}

func (s *simServer) lastTerm() uint64 { return s.termAt(s.last()) }

// compact replaces the log that the state machine has applied by a snapshot.
func (s *simServer) compact() {
	p := s.proc
	if p == nil || p.applied <= s.base {
		return
	}
	term := s.termAt(p.applied)
	s.log = slices.Clone(s.log[p.applied-s.base:])
	s.base, s.baseTerm, s.baseView = p.applied, term, p.view
}

// simRaft is what a process knows of raft and forgets when it dies.
type simRaft struct {
	role        simRole
	leaderID    int // -1: unknown
	votes       map[int]bool
	commit      uint64
	applied     uint64
	view        *ledger.View // of the state machine
	applying    bool
	lagUntil    int64
	electionAt  int64
	next, match []uint64
	contact     []int64
	proposed    uint64 // epoch of the view last put into the log
}

func (p *simProc) resetElection() {
	p.electionAt = p.w.now + p.w.between(simElectionMin, simElectionMax)
}

func (p *simProc) watchElection() {
	p.w.after(max(p.electionAt-p.w.now, simMS), p, func() {
		if p.w.now >= p.electionAt && p.srv.voter && p.role != simLeader {
			p.campaign()
		}
		p.watchElection()
	})
}

func (p *simProc) stepDown(term uint64) {
	s := p.srv
	if term > s.term {
		s.term, s.votedFor = term, -1
	}
	if p.role == simLeader {
		p.w.logf("%s leads no more", p)
		p.failRounds()
		p.resetElection()
	}
	p.role, p.leaderID = simFollower, -1
}

func (p *simProc) campaign() {
	w, s := p.w, p.srv
	p.resetElection()
	s.term++
	s.votedFor = s.id
	p.role, p.leaderID, p.votes = simCandidate, -1, map[int]bool{s.id: true}
	term, last, lastTerm := s.term, s.last(), s.lastTerm()
	for _, to := range w.servers[:w.voters] {
		if to == s {
			continue
		}
		w.send(s.id, to.id, func(q *simProc) { q.onVote(p, term, last, lastTerm) })
	}
}

func (p *simProc) onVote(candidate *simProc, term, last, lastTerm uint64) {
	s := p.srv
	if term > s.term {
		p.stepDown(term)
	}
	upToDate := lastTerm > s.lastTerm() || lastTerm == s.lastTerm() && last >= s.last()
	granted := term == s.term && upToDate && (s.votedFor == -1 || s.votedFor == candidate.srv.id)
	if granted {
		s.votedFor = candidate.srv.id
		p.resetElection()
	}
	mine := s.term
	p.w.answer(s.id, candidate, func() {
		c := candidate
		switch {
		case mine > c.srv.term:
			c.stepDown(mine)
		case granted && c.role == simCandidate && c.srv.term == term:
			c.votes[s.id] = true
			if len(c.votes) > p.w.voters/2 {
				c.lead()
			}
		}
	})
}

func (p *simProc) lead() {
	w, s := p.w, p.srv
	w.stats.elections++
	w.logf("%s leads term %d (log %d, applied %d)", p, s.term, s.last(), p.applied)
	p.role, p.leaderID, p.proposed = simLeader, s.id, 0
	p.next, p.match, p.contact = make([]uint64, len(w.servers)), make([]uint64, len(w.servers)), make([]int64, len(w.servers))
	for i := range p.next {
		p.next[i], p.contact[i] = s.last()+1, w.now
	}
	p.proposer.Elected(p.clock().read(w.now))
	p.append(nil)
	term := s.term
	var beat, lease func()
	still := func() bool { return p.role == simLeader && s.term == term }
	beat = func() {
		if still() {
			p.replicate()
			w.after(simHeartbeat, p, beat)
		}
	}
	lease = func() {
		if still() {
			p.checkLeaderLease()
			w.after(w.leaderLease/2, p, lease)
		}
	}
	w.after(simHeartbeat, p, beat)
	w.after(w.leaderLease/2, p, lease)
}

// checkLeaderLease steps down if no majority of voters was in contact of late.
func (p *simProc) checkLeaderLease() {
	heard := 0
	for _, to := range p.w.servers[:p.w.voters] {
		if to == p.srv || p.w.now-p.contact[to.id] <= p.w.leaderLease {
			heard++
		}
	}
	if heard <= p.w.voters/2 {
		p.stepDown(p.srv.term)
	}
}

// append puts an entry into the leader's log and sends it; its index is returned.
func (p *simProc) append(view *ledger.View) uint64 {
	p.srv.log = append(p.srv.log, simEntry{term: p.srv.term, view: view})
	p.replicate()
	p.advance()
	return p.srv.last()
}

func (p *simProc) replicate() {
	for _, to := range p.w.servers {
		if to != p.srv && to.proc != nil {
			p.replicateTo(to)
		}
	}
}

func (p *simProc) replicateTo(to *simServer) {
	w, s := p.w, p.srv
	term := s.term
	next := max(p.next[to.id], 1)
	if next <= s.base {
		index, indexTerm, view := s.base, s.baseTerm, s.baseView
		w.send(s.id, to.id, func(q *simProc) { q.onSnapshot(p, term, index, indexTerm, view) })
		return
	}
	prev := next - 1
	prevTerm, commit := s.termAt(prev), p.commit
	pending := s.log[prev-s.base:]
	entries := slices.Clone(pending[:min(len(pending), simMaxEntries)])
	w.send(s.id, to.id, func(q *simProc) { q.onAppend(p, term, prev, prevTerm, commit, entries) })
}

func (p *simProc) onAppend(leader *simProc, term, prev, prevTerm, commit uint64, entries []simEntry) {
	s := p.srv
	if !p.heed(leader, term) {
		return
	}
	if prev < s.base { // the snapshot holds the rest
		skip := min(s.base-prev, uint64(len(entries)))
		prev, entries = prev+skip, entries[skip:]
		if prev < s.base {
			p.acknowledge(leader, term, prev, true)
			return
		}
		prevTerm = s.baseTerm
	}
	if prev > s.last() || s.termAt(prev) != prevTerm {
		p.acknowledge(leader, term, min(s.last(), prev-1), false)
		return
	}
	for i, e := range entries {
		at := prev + 1 + uint64(i)
		if at <= s.last() && s.termAt(at) == e.term {
			continue
		}
		s.log = append(s.log[:at-s.base-1], e) // what is under way holds copies
	}
	have := prev + uint64(len(entries))
	if commit = min(commit, have); commit > p.commit {
		p.commit = commit
		p.apply()
	}
	p.acknowledge(leader, term, have, true)
}

// heed follows the leader of term, or says that there is a later one.
func (p *simProc) heed(leader *simProc, term uint64) bool {
	s := p.srv
	if term < s.term {
		p.acknowledge(leader, term, 0, false)
		return false
	}
	if term > s.term || p.role != simFollower {
		p.stepDown(term)
	}
	p.leaderID = leader.srv.id
	p.resetElection()
	return true
}

func (p *simProc) onSnapshot(leader *simProc, term, index, indexTerm uint64, view *ledger.View) {
	s := p.srv
	if !p.heed(leader, term) {
		return
	}
	if index > p.applied {
		p.w.stats.snapshots++
		if index <= s.last() && index > s.base && s.termAt(index) == indexTerm {
			s.log = slices.Clone(s.log[index-s.base:])
		} else {
			s.log = nil
		}
		s.base, s.baseTerm, s.baseView = index, indexTerm, view
		p.applied, p.commit = index, max(p.commit, index)
		if view != nil && (p.view == nil || view.Epoch > p.view.Epoch) {
			p.w.logf("%s installs a snapshot with epoch %d", p, view.Epoch)
			p.view = view
			p.feed(view)
		}
	}
	p.acknowledge(leader, term, index, true)
}

// acknowledge answers an append: whether it fitted, and up to where the logs agree (or may).
func (p *simProc) acknowledge(leader *simProc, term, have uint64, ok bool) {
	from, mine := p.srv.id, p.srv.term
	p.w.answer(from, leader, func() { leader.onAcknowledged(from, term, mine, have, ok) })
}

func (p *simProc) onAcknowledged(from int, term, theirs, have uint64, ok bool) {
	if theirs > p.srv.term {
		p.failVerifications()
		p.stepDown(theirs)
		return
	}
	if p.role != simLeader || p.srv.term != term {
		return
	}
	p.contact[from] = p.w.now
	if !ok {
		p.next[from] = max(min(p.next[from]-1, have+1), 1)
		p.replicateTo(p.w.servers[from])
		return
	}
	p.verified(from)
	p.match[from] = max(p.match[from], have)
	p.next[from] = max(p.next[from], have+1)
	p.advance()
}

// advance commits what a majority of the voters holds, if it is of this term.
func (p *simProc) advance() {
	s := p.srv
	held := make([]uint64, 0, 8)
	for _, v := range p.w.servers[:p.w.voters] {
		if v == s {
			held = append(held, s.last())
		} else {
			held = append(held, p.match[v.id])
		}
	}
	slices.Sort(held)
	if n := held[(len(held)-1)/2]; n > p.commit && s.termAt(n) == s.term {
		p.commit = n
		p.apply()
	}
}

// apply lets the state machine follow, in its own time.
func (p *simProc) apply() {
	if p.applying {
		return
	}
	p.applying = true
	d := p.w.between(20_000, simMS)
	p.w.after(max(d, p.lagUntil-p.w.now), p, func() {
		p.applying = false
		for p.applied < p.commit {
			p.applied++
			v := p.srv.log[p.applied-p.srv.base-1].view
			if v != nil && (p.view == nil && v.Epoch == 1 || p.view != nil && v.Epoch == p.view.Epoch+1) {
				p.view = v
				p.w.applied(v)
				if p.role == simLeader {
					p.w.stats.views++
				}
				p.w.logf("%s applies epoch %d: %s", p, v.Epoch, viewString(v))
				p.feed(v)
			}
		}
		p.barriersApplied()
	})
}

func viewString(v *ledger.View) (s string) {
	for _, m := range v.Members {
		s += fmt.Sprintf("%s.%d ", m.Name, m.Incarnation)
	}
	return s
}
