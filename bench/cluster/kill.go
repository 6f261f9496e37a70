package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headgate/bench/load"
)

// healthy watches the leases under load while nobody dies.
func (b *bench) healthy(ctx context.Context) error {
	before, err := b.standings(ctx, b.nodes)
	if err != nil {
		return err
	}
	sent, failed, err := b.load(ctx, b.nodes, b.cfg.Watch, func() {})
	if err != nil {
		return err
	}
	after, err := b.standings(ctx, b.nodes)
	if err != nil {
		return err
	}
	for i, n := range b.nodes {
		b.rep.add(lapsesHealthy, i+1, after[n][metricLapses]-before[n][metricLapses], "")
		if after[n][metricEpoch] != before[n][metricEpoch] {
			b.rep.note("the view changed although nobody died: %s went from epoch %v to %v", n.name, before[n][metricEpoch], after[n][metricEpoch])
		}
	}
	if failed > 0 {
		b.rep.note("%d of %d requests failed while nobody died", failed, sent)
	}
	b.progress("watched for %v: %.0f lapses, %d of %d requests failed", b.cfg.Watch, b.rep.total(lapsesHealthy), failed, sent)
	return ctx.Err()
}

// load sends requests to nodes at the set rate and calls armed once all of them are under it.
func (b *bench) load(ctx context.Context, nodes []*node, span time.Duration, armed func()) (sent, failed int64, err error) {
	const warm = 5 // requests a node before it counts as under load
	var waiting atomic.Int64
	waiting.Store(int64(len(nodes)))
	results, errs := make([]*load.Result, len(nodes)), make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		transport := newTransport()
		defer transport.CloseIdleConnections()
		cfg := load.Config{
			URL: "http://" + n.front + "/v1/chat/completions", Header: http.Header{"Authorization": {"Bearer " + b.devKey}},
			Rate: b.cfg.Rate, Poisson: true, Seed: uint64(i + 1), Duration: span, MaxInFlight: maxInFlight, Timeout: callBound, Transport: transport,
		}
		cfg.Body = func(k int64) []byte {
			if k == warm && waiting.Add(-1) == 0 {
				armed()
			}
			return chat(k)
		}
		wg.Go(func() { results[i], errs[i] = load.Run(ctx, cfg) })
	}
	wg.Wait()
	if err := errors.Join(append(errs, ctx.Err())...); err != nil {
		return 0, 0, err
	}
	for i, r := range results {
		sent += r.Arrivals
		if bad := r.Arrivals - r.Good; bad > 0 {
			failed += bad
			b.rep.note("%s: %d of %d requests failed: %v, status %v", nodes[i].name, bad, r.Arrivals, r.Errors, r.Status)
		}
	}
	return sent, failed, nil
}

// kills kills the leader and then another node, in every round.
func (b *bench) kills(ctx context.Context) error {
	for round := 1; round <= b.cfg.Rounds; round++ {
		leader, err := b.whole(ctx)
		if err != nil {
			return err
		}
		if err := b.killOne(ctx, round, leader, true); err != nil {
			return err
		}
		if leader, err = b.whole(ctx); err != nil {
			return err
		}
		followers := b.others(leader)
		if err := b.killOne(ctx, round, followers[round%len(followers)], false); err != nil {
			return err
		}
	}
	_, err := b.whole(ctx)
	return err
}

// death is what is seen of a node's death.
type death struct {
	victim    *node
	survivors []*node
	tenant    string           // the victim's
	before    map[*node]gauges // of the survivors
	at        time.Time        // of the SIGKILL
	accepted  time.Time        // the first change after it; zero: not asked for
	detected  time.Time        // every survivor is in a view in which the tenant is another's
	settled   time.Time        // and waits for nothing
	problems  [2]error         // of the two waits
}

// killOne kills a node under load, waits for what follows and starts it again.
func (b *bench) killOne(ctx context.Context, round int, victim *node, leads bool) error {
	d := &death{victim: victim, survivors: b.others(victim)}
	owners, err := b.tenants(ctx, victim)
	if err != nil {
		return err
	}
	if d.tenant = ownedBy(owners, victim.name, round); d.tenant == "" {
		return fmt.Errorf("%s owns none of %d tenants", victim.name, len(owners))
	}
	if d.before, err = b.standings(ctx, d.survivors); err != nil {
		return err
	}
	sent, failed, err := b.killUnderLoad(ctx, d, leads, round)
	if err != nil {
		return err
	}
	if err := b.record(ctx, d, round, leads, sent, failed); err != nil {
		return err
	}
	began := time.Now()
	if err := b.start(victim); err != nil {
		return err
	}
	if err := b.ready(ctx, victim); err != nil {
		return err
	}
	b.rep.took(startNode, len(b.rep.values(startNode))+1, time.Since(began))
	return nil
}

// killUnderLoad kills the victim once its survivors are under load, and returns when the load has
// ended and the survivors have settled.
func (b *bench) killUnderLoad(ctx context.Context, d *death, leads bool, round int) (sent, failed int64, err error) {
	within, cancel := context.WithCancel(ctx)
	defer cancel()
	armed := make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	killed := errors.New("the load is too light: no node was killed under it; raise the rate")
	wg.Go(func() {
		select {
		case <-armed:
			killed = b.die(within, d, leads, round)
		case <-within.Done():
		}
	})
	sent, failed, err = b.load(within, d.survivors, b.cfg.Around, func() { once.Do(func() { close(armed) }) })
	once.Do(cancel) // never armed
	if err != nil {
		cancel()
	}
	wg.Wait()
	if ctx.Err() != nil {
		return 0, 0, ctx.Err()
	}
	return sent, failed, errors.Join(err, killed)
}

// ownedBy is one of the tenants that a node owns, another one each round; "" if it owns none.
func ownedBy(owners map[string]string, name string, round int) string {
	var own []string
	for tenant, owner := range owners {
		if owner == name {
			own = append(own, tenant)
		}
	}
	if len(own) == 0 {
		return ""
	}
	slices.Sort(own)
	return own[round%len(own)]
}

// die kills the node and sees what the survivors make of it.
func (b *bench) die(ctx context.Context, d *death, leads bool, round int) error {
	d.at = time.Now()
	if err := d.victim.kill(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	if leads {
		asked := d.survivors[round%len(d.survivors)]
		wg.Go(func() {
			d.problems[0] = poll(ctx, pollEvery, waitBound, func(ctx context.Context) (bool, error) {
				err := b.change(ctx, asked)
				return err == nil, err
			})
			d.accepted = time.Now()
		})
	}
	d.problems[1] = b.changed(ctx, d)
	wg.Wait()
	return ctx.Err()
}

// changed waits until every survivor has stepped to a view without the victim, and then until
// none of them waits. One node is asked at a time: the others' times come out at most as much too
// late as that takes.
func (b *bench) changed(ctx context.Context, d *death) error {
	var errs []error
	for _, n := range d.survivors {
		errs = append(errs, poll(ctx, pollEvery, waitBound, func(ctx context.Context) (bool, error) {
			owners, err := b.tenants(ctx, n)
			return err == nil && owners[d.tenant] != d.victim.name, err
		}))
	}
	d.detected = time.Now()
	for _, n := range d.survivors {
		seen := 0 // twice: a node does not write all its metrics at one instant
		var first time.Time
		errs = append(errs, poll(ctx, pollEvery, waitBound, func(ctx context.Context) (bool, error) {
			g, err := b.metrics(ctx, n, metricEpoch, metricHeld, metricWaiting)
			if err != nil || !g.settled(d.before[n][metricEpoch]) {
				seen = 0
				return false, err
			}
			if seen++; seen == 1 {
				first = time.Now()
			}
			return seen == 2, nil
		}))
		if first.After(d.settled) {
			d.settled = first
		}
	}
	return errors.Join(errs...)
}

// record puts what a death showed into the report.
func (b *bench) record(ctx context.Context, d *death, round int, leads bool, sent, failed int64) error {
	kept, detect, change, requests, fails, what := keptFollower, detectFollower, changeFollower, requestsOther, failedOther, "follower"
	if leads {
		kept, detect, change, requests, fails, what = keptLeader, detectLeader, changeLeader, requestsLeader, failedLeader, "leader"
		took := d.accepted.Sub(d.at)
		if err := d.problems[0]; err != nil {
			b.rep.note("round %d: no change was accepted within %v of the leader's death: %v", round, waitBound, err)
			took = waitBound
		}
		b.rep.took(failover, round, took)
		b.progress("round %d: the next change was accepted after %v", round, took.Round(time.Millisecond))
	}
	detected, settled := d.detected.Sub(d.at), d.settled.Sub(d.at)
	if err := d.problems[1]; err != nil {
		b.rep.note("round %d: the view did not settle within %v of a %s's death: %v", round, waitBound, what, err)
		detected, settled = min(detected, waitBound), waitBound
	}
	b.rep.took(detect, round, detected)
	b.rep.took(change, round, settled)
	after, err := b.standings(ctx, d.survivors)
	if err != nil {
		return err
	}
	all := 1.0
	for _, n := range d.survivors {
		if lapsed := after[n][metricLapses] - d.before[n][metricLapses]; lapsed != 0 {
			all = 0
			b.rep.note("round %d: the lease of %s lapsed %.0f times when a %s died", round, n.name, lapsed, what)
		}
	}
	b.rep.add(kept, round, all, "")
	b.rep.add(requests, round, float64(sent), "")
	b.rep.add(fails, round, float64(failed), "")
	b.progress("round %d, %s: view %v, settled %v, leases kept %v, %d of %d requests failed", round, what,
		detected.Round(time.Millisecond), settled.Round(time.Millisecond), all == 1, failed, sent)
	return nil
}
