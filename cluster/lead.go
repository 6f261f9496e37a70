package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"time"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
)

const (
	leadEvery = 50 * time.Millisecond // how often the leader looks for a new view

	// foundersPatience is how long the first view waits for all founders: they need not wait for
	// each other in it, as those who enter a later one must.
	foundersPatience = 2 * time.Second
)

// keepAsLeader answers a request for a view lease; that it was asked shows that the member lives.
// One that does not follow the ledger does not count as a member: kill switches and revocations
// would not bind on it, and nothing else would tell.
func (c *Cluster) keepAsLeader(ctx context.Context, r *clusterpb.KeepViewRequest) *clusterpb.KeepViewResponse {
	now, wall := c.cfg.Seams.Now(), time.Now().UnixNano()
	if r.GetApplied() < c.trail.due(now) {
		return &clusterpb.KeepViewResponse{Reason: reasonLags}
	}
	c.next.Asked(now, r.GetName(), r.GetIncarnation(), r.GetEpoch())
	c.next.Accused(now, r.GetIncarnation(), r.GetOwing())
	granted, reason := c.keeper.Keep(ctx, r.GetName(), r.GetIncarnation(), r.GetEpoch())
	resp := &clusterpb.KeepViewResponse{Granted: granted, Reason: reason}
	if v := c.ledger.Facts().View; v != nil {
		resp.Epoch = v.Epoch
	}
	voters := c.ledger.Voters()
	names := make([]string, 0, len(voters))
	for _, v := range voters {
		names = append(names, ServerIDName(string(v.ID)))
	}
	if r.GetWall() == 0 {
		return resp // it did not say
	}
	if ahead, known := c.walls.note(now, r.GetName(), r.GetIncarnation(), r.GetWall(), wall, names); known {
		resp.WallOff = &ahead
	}
	return resp
}

// lead commits the views, while this node leads.
func (c *Cluster) lead(ctx context.Context) {
	t := time.NewTicker(leadEvery)
	defer t.Stop()
	leads := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if !c.ledger.IsLeader() {
			leads = false
			c.trail.forget()
			continue
		}
		if err := c.leadOnce(ctx, leads); err != nil {
			if ctx.Err() == nil {
				c.log.Debug("the leader could not look after the view", "error", err)
			}
			continue
		}
		leads = true
	}
}

// leadOnce commits what is due. A new leader first lets its replica catch up: what earlier
// leaders committed must show.
func (c *Cluster) leadOnce(ctx context.Context, leads bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if !leads {
		if err := c.ledger.Barrier(ctx); err != nil {
			return err
		}
		c.led = c.cfg.Seams.Now()
		c.next.Elected(c.led)
	}
	f := c.ledger.Facts()
	c.trail.note(c.cfg.Seams.Now(), f.Index)
	if len(f.ClusterID) == 0 {
		id := make([]byte, 16)
		if _, err := rand.Read(id); err != nil {
			return err
		}
		return c.command(ctx, &ledgerpb.Command{Body: &ledgerpb.Command_Found{Found: &ledgerpb.Found{ClusterId: id}}})
	}
	now := c.cfg.Seams.Now()
	view, ok := c.next.Next(now, f.View, c.seen())
	if !ok || f.View == nil && len(view.Members) < c.cfg.BootstrapExpect && now-c.led < int64(foundersPatience) {
		return nil
	}
	return c.command(ctx, &ledgerpb.Command{Body: &ledgerpb.Command_SetView{SetView: &ledgerpb.SetView{View: view.Message()}}})
}

func (c *Cluster) command(ctx context.Context, cmd *ledgerpb.Command) error {
	cmd.Version, cmd.Actor = 1, "node "+c.cfg.Name
	r, err := c.ledger.Propose(ctx, cmd)
	return cmp.Or(err, ledger.RefusalOf(r))
}

// seen is what gossip says of everybody's life.
func (c *Cluster) seen() []Seen {
	members := c.gossip.Members()
	out := make([]Seen, 0, len(members))
	for _, m := range members {
		s := Seen{Name: m.Name, Incarnation: m.Incarnation, Address: m.Address, Gossip: GossipAlive}
		switch m.Status {
		case PeerFailed:
			s.Gossip = GossipDead
		case PeerLeft:
			s.Gossip = GossipLeft
		}
		out = append(out, s)
	}
	return out
}
