package cluster

import (
	"context"
	"sync"
	"time"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
)

const (
	keepTimeout  = time.Second // a later answer to a request for a view lease would grant nothing
	maxAsking    = 32          // such requests in flight; unanswered, keepTimeout / KeepRetry of them are
	viewsPending = 64          // views to step to; beyond these one is skipped, which costs a wait only
	catchUpEvery = time.Second
)

// changed runs in the ledger's goroutine. A view that finds no room is skipped: the next one
// then shows a gap, and every partition waits.
func (c *Cluster) changed(f *ledger.Facts) {
	if f.View != nil && f.View.Epoch != c.told.Load() {
		select {
		case c.views <- f.View:
		default:
		}
		c.told.Store(f.View.Epoch)
	}
	c.cfg.Changed(f)
}

// follow steps through the views one by one. Should the last of many have found no room, it is
// caught up with here, too.
func (c *Cluster) follow(ctx context.Context) {
	t := time.NewTicker(catchUpEvery)
	defer t.Stop()
	for {
		var v *ledger.View
		select {
		case <-ctx.Done():
			return
		case v = <-c.views:
		case <-t.C:
			// Before one that changed was not told yet there may be others.
			if last := c.ledger.Facts().View; last != nil && last.Epoch == c.told.Load() && len(c.views) == 0 {
				v = last
			}
		}
		if v == nil || v.Epoch <= c.fence.Epoch() {
			continue
		}
		c.fence.Step(c.cfg.Seams.Now(), v)
		if c.fence.Replaced() {
			close(c.ousted)
			return
		}
		select {
		case c.asked <- struct{}{}:
		default:
		}
		c.gossip.Remember(addressesOf(v))
		c.log.Info("view", "epoch", v.Epoch, "members", memberNames(v))
		c.cfg.Stepped(v)
		c.stepped.Store(v.Epoch)
	}
}

func addressesOf(v *ledger.View) []string {
	out := make([]string, 0, len(v.Members))
	for _, m := range v.Members {
		out = append(out, m.Address)
	}
	return out
}

func memberNames(v *ledger.View) []string {
	names := make([]string, 0, len(v.Members))
	for _, m := range v.Members {
		names = append(names, m.Name)
	}
	return names
}

// asking is where the requests for a view lease stand.
type asking struct {
	mu       sync.Mutex
	sent     int64 // of the last request
	answered bool
	inFlight int
	voter    int // the next voter to try
}

// keepView asks for a view lease every KeepEvery, at once on a new view, and anew after KeepRetry
// where no answer came: a fresh request, to another voter.
func (c *Cluster) keepView(ctx context.Context) {
	var a asking
	var wg sync.WaitGroup
	defer wg.Wait()
	t := time.NewTicker(KeepRetry)
	defer t.Stop()
	for {
		now := false
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-c.asked:
			now = true
		}
		epoch, ok := c.fence.Want()
		if !ok { // another process has this name: Run ends
			return
		}
		a.mu.Lock()
		due := now || !a.answered || c.cfg.Seams.Now()-a.sent >= int64(KeepEvery-KeepRetry/2)
		if due = due && a.inFlight < maxAsking; due {
			a.inFlight++
			if !a.answered {
				a.voter++
			}
			voter, retry := a.voter, !a.answered
			a.sent, a.answered = c.cfg.Seams.Now(), false
			wg.Go(func() { c.ask(ctx, &a, epoch, voter, retry) })
		}
		a.mu.Unlock()
	}
}

// ask sends one request for a view lease; the lease runs from before it was sent.
func (c *Cluster) ask(ctx context.Context, a *asking, epoch uint64, voter int, retry bool) {
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	r := &clusterpb.KeepViewRequest{Name: c.cfg.Name, Incarnation: c.incarnation, Epoch: epoch, Applied: c.ledger.Facts().Index, Owing: c.cfg.Owing(), Wall: time.Now().UnixNano()}
	sent := c.cfg.Seams.Now()
	resp, err := c.askOne(ctx, r, voter, retry)
	now := c.cfg.Seams.Now()
	if err != nil {
		c.gossip.Suspect(c.LeaderName())
	}
	a.mu.Lock()
	a.inFlight--
	if err == nil && resp.GetReason() != ReasonNotLeader {
		a.answered = true
	}
	a.mu.Unlock()
	if err == nil && resp.WallOff != nil && now-sent <= int64(wallTrip) {
		c.wallOff.note(time.Duration(resp.GetWallOff()))
	}
	if err == nil && resp.GetGranted() {
		c.fence.Granted(sent, now, epoch)
	}
}

// askOne asks the leader, or where that went unanswered, a voter, which passes it on.
func (c *Cluster) askOne(ctx context.Context, r *clusterpb.KeepViewRequest, voter int, retry bool) (*clusterpb.KeepViewResponse, error) {
	if c.ledger.IsLeader() {
		return c.keepAsLeader(ctx, r), nil
	}
	_, leader := c.ledger.Leader()
	address := string(leader)
	if voters := c.ledger.Voters(); address == "" || retry && voter%2 == 0 && len(voters) > 0 {
		if len(voters) == 0 {
			return nil, ledger.ErrNoLeader
		}
		v := voters[voter/2%len(voters)]
		address = c.raftAddressOr(v.ID, v.Address)
	}
	client, err := c.peers.client(rpcOfRaft(address))
	if err != nil {
		return nil, err
	}
	return client.KeepView(ctx, r)
}
