package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
)

// ErrNoMember is what Remove says of a name that no node has.
var ErrNoMember = errors.New("no such member")

// ErrAlive is what Remove says of a node that is alive: it would come back at once.
var ErrAlive = errors.New("the member is alive")

// MemberStatus is a node as this one sees it.
type MemberStatus struct {
	Name, Address, Version string
	Incarnation            uint64
	Self                   bool
	Gossip                 string // alive | suspect | failed | left | unknown
	Raft                   string // leader | voter | non-voter | none
	InView                 bool
	Partitions             int // that it owns in the view

	// As the node itself says; Err is why it could not be asked.
	AppliedIndex uint64
	StateHash    []byte
	LastContact  time.Duration // since it heard of the leader; negative: never
	ViewLease    bool
	Err          error
}

// Members are all nodes that gossip, the view or raft know of, each asked how it is, by name.
func (c *Cluster) Members(ctx context.Context) []MemberStatus {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	byName := map[string]*MemberStatus{}
	at := func(name string) *MemberStatus {
		m := byName[name]
		if m == nil {
			m = &MemberStatus{Name: name, Gossip: "unknown", Raft: "none", LastContact: -1, Self: name == c.cfg.Name}
			byName[name] = m
		}
		return m
	}
	for _, p := range c.gossip.Members() {
		m := at(p.Name)
		m.Address, m.Version, m.Incarnation, m.Gossip = p.Address, p.Version, p.Incarnation, p.Status.String()
		if p.Suspected {
			m.Gossip = "suspect"
		}
	}
	leader, _ := c.ledger.Leader()
	for _, s := range c.ledger.Members() {
		m := at(ServerIDName(string(s.ID)))
		switch {
		case s.ID == leader:
			m.Raft = "leader"
		case s.Suffrage == raft.Voter:
			m.Raft = "voter"
		default:
			m.Raft = "non-voter"
		}
	}
	if ring := c.fence.Ring(); ring != nil {
		owned := ring.Owned()
		for i, v := range ring.Members() {
			m := at(v.Name)
			m.InView, m.Partitions = m.Incarnation == 0 || m.Incarnation == v.Incarnation, owned[i]
		}
	}
	c.askAll(ctx, slices.Collect(maps.Values(byName)))
	out := make([]MemberStatus, 0, len(byName))
	for _, m := range byName {
		out = append(out, *m)
	}
	slices.SortFunc(out, func(a, b MemberStatus) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// askAll fills in what only the nodes themselves know.
func (c *Cluster) askAll(ctx context.Context, members []*MemberStatus) {
	var wg sync.WaitGroup
	for _, m := range members {
		if m.Address == "" {
			m.Err = errors.New("gossip does not know where it is")
			continue
		}
		wg.Go(func() {
			id, err := c.identityOf(ctx, m)
			if err != nil {
				m.Err = unanswered(err)
				return
			}
			m.AppliedIndex, m.StateHash, m.ViewLease = id.GetAppliedIndex(), id.GetStateHash(), id.GetViewLease()
			m.LastContact = time.Duration(id.GetLastContactMs()) * time.Millisecond
		})
	}
	wg.Wait()
}

// unanswered words an error of gRPC's for people.
func unanswered(err error) error {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded:
		return errors.New("does not answer")
	}
	return err
}

func (c *Cluster) identityOf(ctx context.Context, m *MemberStatus) (*clusterpb.IdentifyResponse, error) {
	if m.Self {
		return c.identity(), nil
	}
	client, err := c.peers.client(rpcOf(m.Address))
	if err != nil {
		return nil, err
	}
	return client.Identify(ctx, &clusterpb.IdentifyRequest{})
}

// identity is what this node says of itself.
func (c *Cluster) identity() *clusterpb.IdentifyResponse {
	s, f := c.ledger.Stats(), c.ledger.Facts()
	leader, _ := c.ledger.Leader()
	return &clusterpb.IdentifyResponse{
		Name: c.cfg.Name, Incarnation: c.incarnation, ServerId: c.serverID, ClusterId: f.ClusterID, Version: c.cfg.Version,
		LastIndex: s.LastIndex, LastTerm: s.LastTerm, LastContactMs: millis(s.LastContact), AppliedIndex: f.Index, StateHash: f.Hash[:],
		Leader: string(leader), ViewLease: c.Leased(), Epoch: c.fence.Epoch(),
	}
}

// millis keeps never (a negative duration) apart from now.
func millis(d time.Duration) int64 {
	if d < 0 {
		return -1
	}
	return d.Milliseconds()
}

// Awaits says, for people, what a node that has stepped to no view yet waits for.
func (c *Cluster) Awaits() string {
	alive, founded, differ := 0, false, ""
	expect := c.cfg.BootstrapExpect
	for _, p := range c.gossip.Members() {
		if p.Status == PeerAlive {
			alive++
			founded = founded || p.Founded && p.Name != c.cfg.Name
			if p.BootstrapExpect != expect {
				differ += fmt.Sprintf("; %s expects %d", p.Name, p.BootstrapExpect)
			}
		}
	}
	switch leader := c.LeaderName(); {
	case c.ledger.HasState() && leader == "":
		names := make([]string, 0, len(c.ledger.Voters()))
		for _, v := range c.ledger.Voters() {
			names = append(names, ServerIDName(string(v.ID)))
		}
		return fmt.Sprintf("the ledger has no leader: most of its voters (%s) must be up and reach each other; %d nodes of this cluster are seen", strings.Join(names, ", "), alive)
	case c.ledger.HasState():
		return fmt.Sprintf("the leader, %s, has not taken this node into the view yet", leader)
	case founded:
		return "the leader has not added this node to the ledger yet"
	case alive == 1 && len(c.cfg.Seeds) > 0:
		return fmt.Sprintf("none of --join answers: %s", strings.Join(c.cfg.Seeds, ", "))
	case expect == 0:
		return fmt.Sprintf("%d nodes have met and none has a ledger; those that are to found the cluster need --bootstrap-expect with their number", alive)
	}
	return fmt.Sprintf("%d of the %d nodes have met that found the cluster (--bootstrap-expect %d, the same on all)%s", len(c.founders()), expect, expect, differ)
}

// LeaderName is the node that leads; "" if none is known.
func (c *Cluster) LeaderName() string {
	id, _ := c.ledger.Leader()
	return ServerIDName(string(id))
}

// LastUsed collects from the nodes when each saw keys used last, in Unix seconds. Nodes that
// do not answer in a second are left out.
func (c *Cluster) LastUsed(ctx context.Context) map[string]int64 {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	used := map[string]int64{}
	var mu sync.Mutex
	merge := func(more map[string]int64) {
		mu.Lock()
		defer mu.Unlock()
		for id, at := range more {
			used[id] = max(used[id], at)
		}
	}
	merge(c.cfg.LastUsed())
	var wg sync.WaitGroup
	for _, p := range c.gossip.Members() {
		if p.Status != PeerAlive || p.Name == c.cfg.Name {
			continue
		}
		wg.Go(func() {
			client, err := c.peers.client(p.GRPCAddress())
			if err != nil {
				return
			}
			if r, err := client.LastUsed(ctx, &clusterpb.LastUsedRequest{}); err == nil {
				merge(r.GetUnix())
			}
		})
	}
	wg.Wait()
	return used
}

// stats is what autopilot wants to know of a server.
func (c *Cluster) stats(ctx context.Context, s ledger.Server) (lastIndex, lastTerm uint64, lastContact time.Duration, err error) {
	if string(s.ID) == c.serverID {
		st := c.ledger.Stats()
		return st.LastIndex, st.LastTerm, st.LastContact, nil
	}
	client, err := c.peers.client(rpcOfRaft(string(s.Address)))
	if err != nil {
		return 0, 0, 0, err
	}
	r, err := client.Identify(ctx, &clusterpb.IdentifyRequest{})
	if err == nil && r.GetServerId() != string(s.ID) {
		err = fmt.Errorf("at %s answers %s", s.Address, r.GetServerId())
	}
	return r.GetLastIndex(), r.GetLastTerm(), time.Duration(r.GetLastContactMs()) * time.Millisecond, err
}

// registerMetrics shows where this node stands.
func (c *Cluster) registerMetrics() {
	gauge := func(name, help string, f func() float64) {
		c.cfg.Registerer.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f))
	}
	gauge("headgate_view_epoch", "Epoch of the view that this node has stepped to; 0 before the first.", func() float64 { return float64(c.fence.Epoch()) })
	gauge("headgate_view_members", "Members of that view.", func() float64 { return float64(len(c.fence.Ring().Members())) })
	gauge("headgate_view_lease_held", "1 while this node holds a view lease, 0 while it is cut off from its cluster.", func() float64 { return truth(c.Leased()) })
	gauge("headgate_view_partitions_waiting", "Partitions that this node owns and may not grant for yet.", func() float64 { return float64(c.fence.Waiting(c.cfg.Seams.Now())) })
	gauge("headgate_members_alive", "Nodes that gossip holds alive, this one with them.", func() float64 {
		n := 0
		for _, p := range c.gossip.Members() {
			if p.Status == PeerAlive {
				n++
			}
		}
		return float64(n)
	})
	if c.cfg.TLS != nil {
		gauge("headgate_cluster_certificate_expiry_seconds", "When this node's certificate ends, in seconds since the Unix epoch.", func() float64 { return float64(c.cfg.TLS.NotAfter().Unix()) })
	}
	c.cfg.Registerer.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "headgate_view_lease_lapses_total", Help: "How often this node's view lease ran out before the next one came.",
	}, func() float64 { return float64(c.fence.Lapses(c.cfg.Seams.Now())) }))
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Remove takes a node that is dead for good out of the ledger's configuration. It would be
// taken out in time anyway where others replace it; this is for those who will not wait.
func (c *Cluster) Remove(ctx context.Context, name string) error {
	if c.ledger.IsLeader() {
		if err := c.removeHere(ctx, name); !errors.Is(err, ledger.ErrNotLeader) {
			return err
		}
	}
	_, leader := c.ledger.Leader()
	if leader == "" {
		return ledger.ErrNoLeader
	}
	client, err := c.peers.client(rpcOfRaft(string(leader)))
	if err != nil {
		return err
	}
	r, err := client.Remove(ctx, &clusterpb.RemoveRequest{Name: name})
	switch {
	case status.Code(err) == codes.DeadlineExceeded || status.Code(err) == codes.Unavailable:
		return fmt.Errorf("%w: the leader's answer was lost", ledger.ErrUnknownOutcome)
	case err != nil:
		return err
	case r.GetCode() == codeNotFound:
		return as(ErrNoMember, r.GetError())
	case r.GetCode() == codeAlive:
		return as(ErrAlive, r.GetError())
	case r.GetCode() == ReasonNotLeader:
		return ledger.ErrNoLeader
	case r.GetError() != "":
		return errors.New(r.GetError())
	}
	return nil
}

// The codes of RemoveResponse and RestoreResponse, beside ReasonNotLeader.
const (
	codeNotFound = "not_found"
	codeAlive    = "alive"
	codeNotEmpty = "not_empty"
	codeBackup   = "bad_backup"
)

// as is a sentinel in the words that another node had for it, which begin with its own.
func as(sentinel error, text string) error {
	return fmt.Errorf("%w%s", sentinel, strings.TrimPrefix(text, sentinel.Error()))
}

func (c *Cluster) removeHere(ctx context.Context, name string) error {
	for _, p := range c.gossip.Members() {
		if p.Name == name && p.Status == PeerAlive {
			return fmt.Errorf("%w: %s would come back at once; stop it first", ErrAlive, name)
		}
	}
	found := false
	for _, s := range c.ledger.Members() {
		if ServerIDName(string(s.ID)) != name {
			continue
		}
		found = true
		if err := c.ledger.RemoveServer(ctx, s.ID); err != nil {
			return err
		}
	}
	if !found {
		return fmt.Errorf("%w: %q is not in the ledger's configuration", ErrNoMember, name)
	}
	return nil
}
