package lease

import (
	"context"
	"slices"
	"sync"
	"time"

	"headgate/limiter"
)

// chunks is into how many parts the tenants of a cell are cut. Each is summed up by itself, and the sums are added in order, so that
// the digits do not hang on how many processors there are.
const chunks = 256

// measureMany runs a policy in a cell of many tenants, bucket by bucket: what nodes say of one bucket changes nothing about another, but
// for messages that several may share, which are counted as if none did.
func measureMany(ctx context.Context, c Cell, p Policy, processors int) (Result, error) {
	tallies := make([]*tally, min(chunks, c.tenants()))
	own, what := c.apart(), c.plan()
	faultAt := time.Duration(0)
	if what != nil {
		faultAt = time.Duration(what.at)
	}
	work := make(chan int)
	var wg sync.WaitGroup
	for range max(processors, 1) {
		wg.Go(func() {
			for i := range work {
				t := newTally(&c, faultAt)
				for tenant := i; tenant < c.tenants() && ctx.Err() == nil; tenant += len(tallies) {
					one(&c, p, own(tenant), what, t)
				}
				tallies[i] = t
			}
		})
	}
	for i := range tallies {
		work <- i
	}
	close(work)
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	all := tallies[0]
	for _, t := range tallies[1:] {
		all.merge(t)
	}
	r := all.result()
	r.Engine, r.Contender = Simulated, p.Name
	return r, nil
}

// apart gives each tenant's demand.
func (c *Cell) apart() func(tenant int) []Arrival {
	if c.Replay == nil {
		return c.drawer().of
	}
	demand := make([][]Arrival, c.tenants())
	for _, a := range c.Replay {
		demand[a.Tenant] = append(demand[a.Tenant], a)
	}
	return func(tenant int) []Arrival { return demand[tenant] }
}

// one runs one tenant's bucket. Nodes at which none of its requests arrive are left out, if nothing fails: they have no part in it.
func one(c *Cell, p Policy, demand []Arrival, what *plan, t *tally) {
	if len(demand) == 0 {
		return
	}
	var nodes []int32
	for i := range demand {
		if at, ok := slices.BinarySearch(nodes, demand[i].Node); !ok {
			nodes = slices.Insert(nodes, at, demand[i].Node)
		}
	}
	if what != nil {
		nodes = nodes[:0]
		for i := range c.nodesOf() {
			nodes = append(nodes, int32(i))
		}
	}
	sub := *c
	sub.Tenants, sub.Nodes, sub.For, sub.Seed = 1, len(nodes), c.length(), splitmix(c.Seed, uint64(demand[0].Tenant))
	if what != nil {
		sub.Nodes = c.Nodes
	}
	local := slices.Clone(demand)
	for i := range local {
		at, _ := slices.BinarySearch(nodes, local[i].Node)
		local[i].Node = int32(at)
	}
	e := simulate(sub, p, local, what)
	t.add(demand, e.Fates)
	for i, n := range e.Trips {
		t.trips[nodes[i]] += n
	}
	e.Trips = nil
	t.count(&e)
}

// Large is the cell that shows how far the simulator goes: a thousand nodes, a million tenants, 24 million requests in a minute.
func Large() Cell {
	return Cell{
		Name: "a million tenants, 30 requests/min each", Limit: limiter.Limit{Rate: limiter.Rate{Count: 30, Per: time.Minute}, Burst: 10},
		Mean: 1, Nodes: 1000, Tenants: 1_000_000, TenantSkew: .5, Spread: 8, Load: .8, For: time.Minute, Seed: 1,
	}
}
