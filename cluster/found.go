package cluster

import (
	"context"
	"time"

	"github.com/hashicorp/raft"

	"headgate/cluster/clusterpb"
)

const (
	startEvery = 200 * time.Millisecond // how often a node without a ledger looks for one to start
	promiseFor = 10 * time.Second
)

// found starts the cluster's ledger, if this node is the one to do so, and ends once there is one.
func (c *Cluster) found(ctx context.Context) {
	expect := c.cfg.BootstrapExpect
	if c.ledger.HasState() || expect == 0 {
		return
	}
	t := time.NewTicker(startEvery)
	defer t.Stop()
	said := time.Now()
	for {
		done, err := c.foundOnce(ctx, expect)
		if err != nil {
			c.log.Error("the ledger was not started", "error", err)
		}
		if done {
			return
		}
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			c.log.Info("waiting for the nodes that found the cluster", "bootstrap_expect", expect, "seen", len(c.founders()))
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// founders are the nodes without a ledger that expect as many as this one, by name; nil where
// somebody has a ledger to join.
func (c *Cluster) founders() []Peer {
	var out []Peer
	for _, m := range c.gossip.Members() {
		if m.Status != PeerAlive {
			continue
		}
		if m.Founded && m.Name != c.cfg.Name {
			return nil
		}
		if m.BootstrapExpect == c.cfg.BootstrapExpect {
			out = append(out, m)
		}
	}
	return out
}

// foundOnce: the first of the founders by name asks the others for their promise, and starts the
// ledger with all of them as voters once each has given it. A node promises itself to one only,
// so that it is never part of two ledgers.
func (c *Cluster) foundOnce(ctx context.Context, expect int) (done bool, err error) {
	if c.ledger.HasState() {
		return true, nil
	}
	all := c.founders()
	if len(all) < expect {
		return false, nil
	}
	all = all[:expect]
	if all[0].Name != c.cfg.Name {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	began := c.cfg.Seams.Now()
	servers := make([]raft.Server, 0, expect)
	for _, m := range all {
		servers = append(servers, raft.Server{ID: raft.ServerID(m.ServerID), Address: raft.ServerAddress(raftOf(m.Address))})
		if m.Name == c.cfg.Name {
			if ok, _ := c.promise(c.serverID); !ok {
				return false, nil
			}
			continue
		}
		client, err := c.peers.client(rpcOf(m.Address))
		if err != nil {
			return false, err
		}
		resp, err := client.Promise(ctx, &clusterpb.PromiseRequest{Bootstrapper: c.serverID})
		if err != nil || !resp.GetPromised() {
			c.log.Debug("a founder did not promise itself", "node", m.Name, "reason", resp.GetReason(), "error", err)
			return false, nil
		}
	}
	if c.cfg.Seams.Now()-began > int64(promiseFor/2) { // it was suspended: the promises are old
		return false, nil
	}
	c.log.Info("starting the ledger", "voters", len(servers))
	if err := c.ledger.Bootstrap(servers); err != nil {
		return false, err
	}
	return true, nil
}

// promise lends this node to who asks, if it has no ledger and is not lent to another.
func (c *Cluster) promise(to string) (ok bool, reason string) {
	if c.ledger.HasState() {
		return false, "it has a ledger"
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.cfg.Seams.Now()
	if c.promised != "" && c.promised != to && now-c.promisedAt < int64(promiseFor) {
		return false, "it has promised itself to " + c.promised
	}
	c.promised, c.promisedAt = to, now
	return true, ""
}
