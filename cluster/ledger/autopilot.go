package ledger

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	autopilot "github.com/hashicorp/raft-autopilot"
)

const (
	// leastVoters is what failures alone never shrink the voters below.
	leastVoters = 3
	// healthyContact is how long ago a healthy server heard of the leader, at most.
	healthyContact = time.Second
	// healthyLag is how many entries a healthy server may lag, at most.
	healthyLag = 2048
)

// AutopilotTimes are how patient the leader is with its members; zero values are defaults.
type AutopilotTimes struct {
	Update    time.Duration // between two looks at gossip and at each server; 500 ms
	Reconcile time.Duration // between two rounds of promotions; 1 s
	Stable    time.Duration // how long a server is healthy before it may vote; 2 s
	FailedFor time.Duration // how long a voter is gone before another takes its place for good; 10 s (others: six times that)
	LeftFor   time.Duration // how long one that said that it leaves is expected back, as from a restart; 60 s
	SpareFor  time.Duration // how long a voter too many stays one; 30 s
}

func (t *AutopilotTimes) withDefaults() {
	orDefault(&t.Update, 500*time.Millisecond)
	orDefault(&t.Reconcile, time.Second)
	orDefault(&t.Stable, 2*time.Second)
	orDefault(&t.FailedFor, 10*time.Second)
	orDefault(&t.LeftFor, time.Minute)
	orDefault(&t.SpareFor, 30*time.Second)
}

// wantVoters is how many should vote of so many healthy servers. An even number survives no
// more failures than the odd one below it; see DESIGN.md.
func wantVoters(healthy int) int {
	switch {
	case healthy >= 5:
		return 5
	case healthy >= 3:
		return 3
	default:
		return 1
	}
}

func majority(voters int) int { return voters/2 + 1 }

// change is one step towards the members that gossip calls for.
type change struct {
	remove bool
	server raft.Server // with its suffrage
	why    string
}

// nodeName is the node's name in a server's id, NAME.SUFFIX.
func nodeName(id raft.ServerID) string {
	if i := strings.LastIndexByte(string(id), '.'); i > 0 {
		return string(id[:i])
	}
	return string(id)
}

// plan compares the members with what gossip knows: who came back under another id, whose
// address another took over, or who left for longer than a restart takes is removed, who is alive and
// no member is added without a vote, a changed address is changed. Removals come first. It never
// removes self.
func plan(now time.Time, leftFor time.Duration, self raft.ServerID, members []raft.Server, known []Server) (changes []change) {
	byID := make(map[raft.ServerID]Server, len(known))
	aliveName := map[string]raft.ServerID{}
	aliveAddress := map[raft.ServerAddress]raft.ServerID{}
	for _, s := range known {
		byID[s.ID] = s
		if s.Status == StatusAlive {
			aliveName[s.Name], aliveAddress[s.Address] = s.ID, s.ID
		}
	}
	isMember := make(map[raft.ServerID]bool, len(members))
	var updates []change
	for _, m := range members {
		isMember[m.ID] = true
		if m.ID == self {
			continue
		}
		s, isKnown := byID[m.ID]
		alive := isKnown && s.Status == StatusAlive
		other, named := aliveName[nodeName(m.ID)]
		user, taken := aliveAddress[m.Address]
		switch {
		case isKnown && s.Status == StatusLeft && now.Sub(s.Since) >= leftFor:
			changes = append(changes, change{true, m, "it left"})
		case !alive && named && other != m.ID:
			changes = append(changes, change{true, m, "its node came back without its data, as " + string(other)})
		case !alive && taken && user != m.ID:
			changes = append(changes, change{true, m, "its address is now that of " + string(user)})
		case alive && s.Address != "" && s.Address != m.Address:
			updates = append(updates, change{false, raft.Server{ID: m.ID, Address: s.Address, Suffrage: m.Suffrage}, "its address changed"})
		}
	}
	changes = append(changes, updates...)
	for _, s := range known {
		if s.Status == StatusAlive && !isMember[s.ID] && s.ID != "" && s.Address != "" {
			changes = append(changes, change{false, raft.Server{ID: s.ID, Address: s.Address, Suffrage: raft.Nonvoter}, "it is alive"})
		}
	}
	slices.SortStableFunc(changes, func(a, b change) int {
		return cmp.Or(-cmp.Compare(b2i(a.remove), b2i(b.remove)), cmp.Compare(a.server.ID, b.server.ID))
	})
	return changes
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// known is what gossip knows, less those without an id yet and those given up.
func (l *Ledger) known() []Server {
	return slices.DeleteFunc(slices.Clone(l.config.Servers()), func(s Server) bool { return s.ID == "" || l.forgotten[s.ID] })
}

// mayRemove refuses what would leave no majority of voters that gossip calls alive.
func (l *Ledger) mayRemove(id raft.ServerID) error {
	voters := l.Voters()
	i := slices.IndexFunc(voters, func(v raft.Server) bool { return v.ID == id })
	if i < 0 || l.config.Servers == nil {
		return nil
	}
	alive := map[raft.ServerID]bool{l.config.ServerID: true}
	for _, s := range l.known() {
		if s.Status == StatusAlive {
			alive[s.ID] = true
		}
	}
	left := 0
	for _, v := range slices.Delete(voters, i, i+1) {
		if alive[v.ID] {
			left++
		}
	}
	if n := len(voters) - 1; left < majority(n) {
		return fmt.Errorf("removing the voter %s would leave %d alive of %d, no majority", id, left, n)
	}
	return nil
}

// pilot keeps the members as gossip and their health call for, until ctx ends.
func (l *Ledger) pilot(ctx context.Context) {
	times := l.config.Autopilot
	p := &pilot{l: l, doomed: map[raft.ServerID]bool{}}
	a := autopilot.New(l.raft, p,
		autopilot.WithPromoter(&promoter{times: times, now: time.Now}),
		autopilot.WithUpdateInterval(times.Update),
		autopilot.WithReconcileInterval(times.Reconcile),
		autopilot.WithLogger(newHclog(l.logger, "ledger")))
	a.Start(ctx)
	defer func() { <-a.Stop() }()
	tick := time.NewTicker(times.Update)
	defer tick.Stop()
	for {
		p.step(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// pilot is what autopilot asks of the Ledger. Its methods are called from two goroutines.
type pilot struct {
	l *Ledger

	mu     sync.Mutex
	doomed map[raft.ServerID]bool // failed servers that autopilot gave up; members only
}

var _ autopilot.ApplicationIntegration = (*pilot)(nil)

// step makes the changes that are due, and stops at the first that fails.
func (p *pilot) step(ctx context.Context) {
	members := p.l.Members()
	changes := plan(time.Now(), p.l.config.Autopilot.LeftFor, p.l.config.ServerID, members, p.l.known())
	p.mu.Lock()
	for _, m := range members {
		if p.doomed[m.ID] {
			changes = slices.Insert(changes, 0, change{true, m, "it failed"})
		}
	}
	clear(p.doomed)
	p.mu.Unlock()
	for _, c := range changes {
		if err := p.make(ctx, c); err != nil {
			if ctx.Err() == nil {
				p.l.logger.Warn("changing the members of the ledger failed",
					"server", string(c.server.ID), "remove", c.remove, "reason", c.why, "error", err)
			}
			return
		}
	}
}

func (p *pilot) make(ctx context.Context, c change) error {
	if c.remove {
		if err := p.l.mayRemove(c.server.ID); err != nil {
			return err
		}
	}
	err := p.l.submit(ctx, func() raft.Future {
		switch r := p.l.raft; {
		case c.remove:
			return r.RemoveServer(c.server.ID, 0, forwardWithin)
		case c.server.Suffrage == raft.Voter:
			return r.AddVoter(c.server.ID, c.server.Address, 0, forwardWithin)
		default:
			return r.AddNonvoter(c.server.ID, c.server.Address, 0, forwardWithin)
		}
	})
	if err != nil {
		return err
	}
	p.l.logger.Info("the members of the ledger changed",
		"server", string(c.server.ID), "address", string(c.server.Address), "remove", c.remove, "reason", c.why)
	return nil
}

// AutopilotConfig is that of every round.
func (p *pilot) AutopilotConfig() *autopilot.Config {
	return &autopilot.Config{
		CleanupDeadServers:      true,
		LastContactThreshold:    healthyContact,
		MaxTrailingLogs:         healthyLag,
		MinQuorum:               leastVoters,
		ServerStabilizationTime: p.l.config.Autopilot.Stable,
	}
}

// NotifyState tells nothing of interest.
func (p *pilot) NotifyState(*autopilot.State) {}

// RemoveFailedServer has the next step remove it.
func (p *pilot) RemoveFailedServer(s *autopilot.Server) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.doomed[s.ID] = true
}

// KnownServers is what gossip knows, this node always alive.
func (p *pilot) KnownServers() map[raft.ServerID]*autopilot.Server {
	self := p.l.config.ServerID
	known := map[raft.ServerID]*autopilot.Server{}
	for _, s := range p.l.known() {
		status := autopilot.NodeFailed // who left, too, until plan removes it: it may be restarting
		if s.Status == StatusAlive {
			status = autopilot.NodeAlive
		}
		known[s.ID] = &autopilot.Server{
			ID: s.ID, Name: s.Name, Address: s.Address, NodeStatus: status,
			RaftVersion: int(raft.ProtocolVersionMax), NodeType: autopilot.NodeVoter,
		}
	}
	known[self] = &autopilot.Server{
		ID: self, Name: nodeName(self), Address: p.l.config.Address, NodeStatus: autopilot.NodeAlive,
		RaftVersion: int(raft.ProtocolVersionMax), NodeType: autopilot.NodeVoter, IsLeader: true,
	}
	return known
}

// FetchServerStats asks all servers at once.
func (p *pilot) FetchServerStats(ctx context.Context, servers map[raft.ServerID]*autopilot.Server) map[raft.ServerID]*autopilot.ServerStats {
	var (
		mu    sync.Mutex
		asked sync.WaitGroup
		stats = make(map[raft.ServerID]*autopilot.ServerStats, len(servers))
	)
	for id, s := range servers {
		if id == p.l.config.ServerID {
			own := p.l.Stats()
			mu.Lock()
			stats[id] = &autopilot.ServerStats{LastIndex: own.LastIndex, LastTerm: own.LastTerm}
			mu.Unlock()
			continue
		}
		if s.NodeStatus != autopilot.NodeAlive {
			continue
		}
		asked.Go(func() {
			index, term, contact, err := p.l.config.Stats(ctx, Server{ID: id, Name: s.Name, Address: s.Address})
			if err != nil {
				contact = healthyContact + 1 // an old answer must not pass for a new one
			}
			mu.Lock()
			defer mu.Unlock()
			stats[id] = &autopilot.ServerStats{LastIndex: index, LastTerm: term, LastContact: contact}
		})
	}
	asked.Wait()
	return stats
}

// promoter decides who votes and which failed servers are given up, by the table of
// DESIGN.md. It keeps nothing between calls.
type promoter struct {
	times AutopilotTimes
	now   func() time.Time
}

var _ autopilot.Promoter = (*promoter)(nil)

// census counts the servers of a state.
type census struct {
	voters, healthyVoters, healthy int
	spares                         []*autopilot.ServerState // healthy and stable, without a vote, the longest first
}

func (p *promoter) count(state *autopilot.State) (c census) {
	now := p.now()
	for _, s := range state.Servers {
		if s.HasVotingRights() {
			c.voters++
			if s.Health.Healthy {
				c.healthyVoters++
			}
		} else if s.Health.IsStable(now, p.times.Stable) {
			c.spares = append(c.spares, s)
		}
	}
	c.healthy = c.healthyVoters + len(c.spares)
	slices.SortFunc(c.spares, func(a, b *autopilot.ServerState) int {
		return cmp.Or(a.Health.StableSince.Compare(b.Health.StableSince), cmp.Compare(a.Server.ID, b.Server.ID))
	})
	return c
}

// GetServerExt adds nothing.
func (p *promoter) GetServerExt(*autopilot.Config, *autopilot.ServerState) any { return nil }

// GetStateExt adds nothing.
func (p *promoter) GetStateExt(*autopilot.Config, *autopilot.State) any { return nil }

// IsPotentialVoter holds for all.
func (p *promoter) IsPotentialVoter(autopilot.NodeType) bool { return true }

// GetNodeTypes makes every server one that may vote.
func (p *promoter) GetNodeTypes(_ *autopilot.Config, s *autopilot.State) map[raft.ServerID]autopilot.NodeType {
	types := make(map[raft.ServerID]autopilot.NodeType, len(s.Servers))
	for id := range maps.Keys(s.Servers) {
		types[id] = autopilot.NodeVoter
	}
	return types
}

// CalculatePromotionsAndDemotions gives votes to as many healthy servers as are wanted; it
// takes one away only where every voter has been healthy for SpareFor.
func (p *promoter) CalculatePromotionsAndDemotions(_ *autopilot.Config, state *autopilot.State) (changes autopilot.RaftChanges) {
	c := p.count(state)
	want := wantVoters(c.healthy)
	for i, s := range c.spares {
		if c.healthyVoters+i >= want || c.healthyVoters+i+1 < majority(c.voters+i+1) {
			break
		}
		changes.Promotions = append(changes.Promotions, s.Server.ID)
	}
	if c.voters <= want || c.healthyVoters < c.voters || len(changes.Promotions) > 0 {
		return changes
	}
	var last *autopilot.ServerState // the least proven
	for _, s := range state.Servers {
		if !s.HasVotingRights() {
			continue
		}
		if !s.Health.IsStable(p.now(), p.times.SpareFor) {
			return changes
		}
		if s.State != autopilot.RaftLeader && (last == nil || lessProven(s, last)) {
			last = s
		}
	}
	if last != nil {
		changes.Demotions = append(changes.Demotions, last.Server.ID)
	}
	return changes
}

func lessProven(a, b *autopilot.ServerState) bool {
	return cmp.Or(b.Health.StableSince.Compare(a.Health.StableSince), cmp.Compare(b.Server.ID, a.Server.ID)) < 0
}

// FilterFailedServerRemovals gives up a voter only where the healthy ones are as many as
// wanted, a majority, and at least leastVoters remain; one a round.
func (p *promoter) FilterFailedServerRemovals(_ *autopilot.Config, state *autopilot.State, failed *autopilot.FailedServers) *autopilot.FailedServers {
	c := p.count(state)
	gone := func(id raft.ServerID, patience time.Duration) bool {
		s, ok := state.Servers[id]
		return ok && !s.Health.Healthy && p.now().Sub(s.Health.StableSince) >= patience
	}
	spend := c.healthyVoters >= wantVoters(c.healthy) && c.healthyVoters >= majority(c.voters) && c.voters > leastVoters
	voterGone := func(id raft.ServerID) bool {
		if !spend || !gone(id, p.times.FailedFor) {
			return false
		}
		spend = false
		return true
	}
	out := new(autopilot.FailedServers)
	for _, id := range failed.StaleVoters {
		if voterGone(id) {
			out.StaleVoters = append(out.StaleVoters, id)
		}
	}
	for _, s := range failed.FailedVoters {
		if voterGone(s.ID) {
			out.FailedVoters = append(out.FailedVoters, s)
		}
	}
	for _, id := range failed.StaleNonVoters {
		if gone(id, 6*p.times.FailedFor) {
			out.StaleNonVoters = append(out.StaleNonVoters, id)
		}
	}
	for _, s := range failed.FailedNonVoters {
		if gone(s.ID, 6*p.times.FailedFor) {
			out.FailedNonVoters = append(out.FailedNonVoters, s)
		}
	}
	return out
}
