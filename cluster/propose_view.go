package cluster

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"headgate/cluster/ledger"
)

// Liveness is what gossip says of a process. It is a hint: whoever holds the gossip key
// can lie, and the worst that a lie does is a needless view.
type Liveness uint8

// What gossip may say.
const (
	GossipUnknown Liveness = iota // nothing
	GossipAlive
	GossipDead
	GossipLeft // it said so itself
)

// The defaults and bounds of ViewConfig and Proposer.
const (
	defaultDeadAfter   = 300 * time.Millisecond
	defaultSilentAfter = 3 * time.Second
	defaultRejoinAfter = 2 * time.Second
	defaultDebounce    = 100 * time.Millisecond

	// askedWithin is how old a newcomer's last request may be.
	askedWithin = 1 * time.Second
	// accusedFor is how long the word counts that a member owes another an answer: it is repeated
	// with each request for a view lease.
	accusedFor = 1 * time.Second
	// maxDoubled bounds how often RejoinAfter doubles for who owed answers again and again.
	maxDoubled = 5
	// strangerFor is when a process that is no member and is silent is forgotten.
	strangerFor = 60 * time.Second
	maxKnown    = 4096 // processes; more are not noticed
)

// ViewConfig says when members come and go. A zero field takes its default.
type ViewConfig struct {
	Partitions  uint32        // of the first view; later ones keep theirs
	RingVersion uint32        // of the first view
	DeadAfter   time.Duration // 300 ms without KeepView, if gossip says dead
	SilentAfter time.Duration // 3 s without KeepView, whatever gossip says
	RejoinAfter time.Duration // 2 s from its removal until a process may come back
	Debounce    time.Duration // 100 ms from the first change until the view
}

func (c ViewConfig) withDefaults() ViewConfig {
	c.Partitions = cmp.Or(c.Partitions, Partitions)
	c.RingVersion = cmp.Or(c.RingVersion, RingVersion)
	c.DeadAfter = cmp.Or(c.DeadAfter, defaultDeadAfter)
	c.SilentAfter = cmp.Or(c.SilentAfter, defaultSilentAfter)
	c.RejoinAfter = cmp.Or(c.RejoinAfter, defaultRejoinAfter)
	c.Debounce = cmp.Or(c.Debounce, defaultDebounce)
	return c
}

// Seen is what the leader knows of one process. A name may be seen more than once, each
// time with another incarnation.
type Seen struct {
	Name        string
	Incarnation uint64
	Address     string
	Gossip      Liveness
	// LastKeep is when this leader last had a KeepView request of it, made by a process
	// that had stepped to the view current then; who is no member must have stepped to
	// the view current now. 0: never. A member's is at least the leader's election.
	LastKeep int64
	// Removed is when this leader saw it leave the view; 0: it did not.
	Removed int64
	// Accused is when a member said last that it owes it an answer; 0: none did. Times counts the
	// removals that came of it.
	Accused int64
	Times   int
	// Replaced says that another incarnation of its name took its place. It never
	// comes back.
	Replaced bool
}

// NextView is the view that the leader would commit after current, judged at now alone
// (Proposer adds the memory). Not ok: current is as it should be. It never proposes an
// empty view, and none with more than MaxMembers members. A member that is not among seen
// never asked.
//
// A member goes at once if it left, or if another incarnation of its name is alive and
// asks for leases; after DeadAfter without a KeepView if gossip says that it is dead or
// that its name is another process now; after SilentAfter without one in any case: a
// member that cannot reach the leader grants nothing. It goes, too, when another member says that it
// owes it an answer: until it has gone what it may hold can't be lent to anybody. A process comes in if gossip says
// that it is alive and it asks for leases, which shows that it follows the ledger; one
// that was removed RejoinAfter later at the earliest.
func NextView(current *ledger.View, seen []Seen, now int64, cfg ViewConfig) (*ledger.View, bool) {
	next, _ := nextView(current, seen, now, cfg.withDefaults())
	return next, next != nil
}

// nextView also says whether some change is not to be debounced.
func nextView(current *ledger.View, seen []Seen, now int64, cfg ViewConfig) (next *ledger.View, urgent bool) {
	next = &ledger.View{Epoch: 1, Partitions: cfg.Partitions, RingVersion: cfg.RingVersion}
	var old []ledger.Member
	if current != nil {
		next.Epoch, next.Partitions, next.RingVersion = current.Epoch+1, current.Partitions, current.RingVersion
		old = current.Members
	}
	for _, m := range old {
		stays, atOnce := judge(m, seen, now, cfg)
		if stays {
			next.Members = append(next.Members, m)
		}
		urgent = urgent || atOnce
	}
	for _, s := range newcomers(old, seen, now, cfg) {
		known := slices.ContainsFunc(next.Members, func(m ledger.Member) bool { return m.Name == s.Name })
		if !known && len(next.Members) < min(MaxMembers, int(next.Partitions)) {
			next.Members = append(next.Members, ledger.Member{Name: s.Name, Incarnation: s.Incarnation, Address: s.Address})
		}
	}
	slices.SortFunc(next.Members, func(a, b ledger.Member) int { return cmp.Compare(a.Name, b.Name) })
	if len(next.Members) == 0 || current != nil && sameProcesses(old, next.Members) {
		return nil, false
	}
	return next, urgent
}

// judge says whether a member stays, and whether its going brooks no delay.
func judge(m ledger.Member, seen []Seen, now int64, cfg ViewConfig) (stays, atOnce bool) {
	var self Seen
	succeeded := false
	for _, s := range seen {
		switch {
		case s.Name != m.Name:
		case s.Incarnation == m.Incarnation:
			self = s
		case mayJoin(s, now, cfg):
			return false, true
		case s.Gossip == GossipAlive && !s.Replaced:
			succeeded = true
		}
	}
	silent := time.Duration(now - self.LastKeep)
	switch {
	case self.Accused != 0 && now-self.Accused < int64(accusedFor):
		return false, false
	case self.Gossip == GossipLeft:
		return false, true
	case self.Gossip == GossipDead, succeeded && self.Gossip != GossipAlive:
		return silent < cfg.DeadAfter, false
	default:
		return silent < cfg.SilentAfter, false
	}
}

func mayJoin(s Seen, now int64, cfg ViewConfig) bool {
	if s.Gossip != GossipAlive || s.Replaced || s.LastKeep == 0 || now-s.LastKeep > int64(askedWithin) {
		return false
	}
	return s.Removed == 0 || s.LastKeep > s.Removed && now-s.Removed >= int64(cfg.RejoinAfter)<<min(s.Times, maxDoubled)
}

// newcomers are those that may join and are no members, by name; of one name first the
// one that asked last.
func newcomers(members []ledger.Member, seen []Seen, now int64, cfg ViewConfig) (in []Seen) {
	for _, s := range seen {
		member := slices.ContainsFunc(members, func(m ledger.Member) bool { return m.Name == s.Name && m.Incarnation == s.Incarnation })
		if !member && mayJoin(s, now, cfg) {
			in = append(in, s)
		}
	}
	slices.SortFunc(in, func(a, b Seen) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), -cmp.Compare(a.LastKeep, b.LastKeep), cmp.Compare(a.Incarnation, b.Incarnation))
	})
	return in
}

// sameProcesses compares two lists by name.
func sameProcesses(a, b []ledger.Member) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(m ledger.Member) bool {
		return !slices.ContainsFunc(b, func(n ledger.Member) bool { return n.Name == m.Name && n.Incarnation == m.Incarnation })
	})
}

// Proposer is NextView with a leader's memory: who asked when, who was removed when,
// and the debounce. What it forgets at an election costs time, never safety. All its
// methods may be called from any goroutine; times are those of the caller's one clock.
type Proposer struct {
	cfg ViewConfig

	mu      sync.Mutex
	elected int64
	last    *ledger.View // what Next saw last
	changed int64        // since when Next has something to propose; 0: it has not
	known   map[Self]*asker
}

type asker struct {
	lastKeep, removed int64
	accused           int64  // when a member said last that it owes it an answer
	times             int    // it was removed for that
	epoch             uint64 // of the last request
	replaced          bool
}

// NewProposer returns the memory of a node that does not lead yet.
func NewProposer(cfg ViewConfig) *Proposer {
	return &Proposer{cfg: cfg.withDefaults(), known: map[Self]*asker{}}
}

// Elected begins a term as leader: everything is forgotten and every member has asked
// just now.
func (p *Proposer) Elected(now int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.elected, p.last, p.changed = now, nil, 0
	clear(p.known)
}

// Asked notes that a KeepView request came, whatever becomes of it.
func (p *Proposer) Asked(now int64, name string, incarnation, epoch uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != nil && epoch < p.last.Epoch {
		return // it does not follow, so no lease comes of it
	}
	if a := p.at(Self{name, incarnation}); a != nil {
		a.lastKeep, a.epoch = max(a.lastKeep, now), max(a.epoch, epoch)
	}
}

// Accused notes that a member says of others that they have owed it an answer for long. Whoever says so of
// more than a third of the others is more likely to be deaf itself: it is not heard. One goes at a time, and of
// two that accuse each other the first to speak is heard: one is enough to end the matter.
func (p *Proposer) Accused(now int64, accuser uint64, owing []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(owing) == 0 || p.last == nil {
		return
	}
	recent := func(m ledger.Member) bool {
		a := p.known[Self{m.Name, m.Incarnation}]
		return a != nil && a.accused != 0 && now-a.accused < int64(accusedFor)
	}
	var first *ledger.Member
	owe, pending, member := 0, false, false
	for i := range p.last.Members {
		m := &p.last.Members[i]
		switch {
		case m.Incarnation == accuser:
			member = true
			pending = pending || recent(*m)
		case slices.Contains(owing, m.Incarnation):
			owe++
			if first == nil || recent(*m) {
				first = m
			}
		default:
			pending = pending || recent(*m)
		}
	}
	if !member || pending || first == nil || owe > max(1, (len(p.last.Members)-1)/3) {
		return
	}
	if a := p.at(Self{first.Name, first.Incarnation}); a != nil {
		a.accused = now
	}
}

// at is the entry of a process, new if need be; nil if there is no room.
func (p *Proposer) at(id Self) *asker {
	a := p.known[id]
	if a == nil && len(p.known) < maxKnown {
		a = &asker{}
		p.known[id] = a
	}
	return a
}

// Next is the view to commit now, if any. The leader calls it every few ten
// milliseconds, with its ledger's view and what gossip says (name, incarnation, address
// and liveness of each process; the rest of Seen is filled in here), and goes on
// getting the same answer until a view is committed.
func (p *Proposer) Next(now int64, current *ledger.View, gossip []Seen) (*ledger.View, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.follow(now, current)
	next, urgent := nextView(current, p.remember(current, gossip), now, p.cfg)
	switch {
	case next == nil:
		p.changed = 0
		return nil, false
	case p.changed == 0:
		p.changed = now
	}
	if !urgent && current != nil && now-p.changed < int64(p.cfg.Debounce) {
		return nil, false
	}
	return next, true
}

// follow notes who went since the last view, and forgets who is long gone.
func (p *Proposer) follow(now int64, current *ledger.View) {
	if p.last != nil && current != nil && p.last.Epoch != current.Epoch {
		p.changed = 0
		for _, m := range p.last.Members {
			if isMember(current, m.Name, m.Incarnation) {
				continue
			}
			if a := p.at(Self{m.Name, m.Incarnation}); a != nil {
				a.removed = now
				if a.accused != 0 && now-a.accused < 2*int64(accusedFor) {
					a.times++
				}
				a.accused = 0
				a.replaced = slices.ContainsFunc(current.Members, func(n ledger.Member) bool { return n.Name == m.Name })
			}
		}
	}
	p.last = current
	for id, a := range p.known {
		if now-max(a.lastKeep, a.removed) > int64(strangerFor) && (current == nil || !isMember(current, id.Name, id.Incarnation)) {
			delete(p.known, id)
		}
	}
}

// remember adds to what gossip says what this leader knows. Members of whom gossip says
// nothing are added.
func (p *Proposer) remember(current *ledger.View, gossip []Seen) []Seen {
	seen := slices.Clone(gossip)
	if current != nil {
		for _, m := range current.Members {
			if !slices.ContainsFunc(seen, func(s Seen) bool { return s.Name == m.Name && s.Incarnation == m.Incarnation }) {
				seen = append(seen, Seen{Name: m.Name, Incarnation: m.Incarnation, Address: m.Address})
			}
		}
	}
	for i := range seen {
		s := &seen[i]
		member := current != nil && isMember(current, s.Name, s.Incarnation)
		if a := p.known[Self{s.Name, s.Incarnation}]; a != nil {
			s.LastKeep, s.Removed, s.Replaced, s.Accused, s.Times = a.lastKeep, a.removed, a.replaced, a.accused, a.times
			if !member && current != nil && a.epoch < current.Epoch {
				// It may have asked before it learned that it was replaced, and ask no more.
				s.LastKeep = 0
			}
		}
		if member {
			s.LastKeep = max(s.LastKeep, p.elected)
		}
	}
	return seen
}
