package lease

import (
	"reflect"
	"testing"
	"time"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/limiter"
)

func faultCell(f Fault, load float64) Cell {
	return Cell{
		Name: "100 requests/s", Mean: 1, Nodes: 6, Load: load, Seed: 1, Fault: f, For: 60 * time.Second,
		Limit: limiter.Limit{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100},
	}
}

func policy(t *testing.T, name string) Policy {
	t.Helper()
	for _, p := range Policies() {
		if p.Name == name {
			return p
		}
	}
	t.Fatalf("there is no policy %q", name)
	return Policy{}
}

// denying is Headgate with `unavailable: deny`: nothing but leases and owners admits anything.
func denying() Policy {
	return Policy{"denying", func(*Cell) contender { return &fleet{deny: true} }}
}

// TestFaultTimes holds the times of the faults against those of package cluster.
func TestFaultTimes(t *testing.T) {
	now := int64(time.Hour)
	view := &ledger.View{Epoch: 1, Partitions: cluster.Partitions, RingVersion: cluster.RingVersion, Members: []ledger.Member{{Name: "a", Incarnation: 1}, {Name: "b", Incarnation: 2}}}
	dead := func(silent time.Duration) bool {
		_, changes := cluster.NextView(view, []cluster.Seen{
			{Name: "a", Incarnation: 1, Gossip: cluster.GossipAlive, LastKeep: now},
			{Name: "b", Incarnation: 2, Gossip: cluster.GossipDead, LastKeep: now - int64(silent)},
		}, now, cluster.ViewConfig{})
		return changes
	}
	if dead(deadAfter-1) || !dead(deadAfter) {
		t.Errorf("a dead member does not leave %v after its last request for a view lease", deadAfter)
	}
	back := func(after time.Duration) bool {
		next, changes := cluster.NextView(&ledger.View{Epoch: 1, Partitions: cluster.Partitions, Members: view.Members[:1]}, []cluster.Seen{
			{Name: "a", Incarnation: 1, Gossip: cluster.GossipAlive, LastKeep: now},
			{Name: "b", Incarnation: 2, Gossip: cluster.GossipAlive, LastKeep: now, Removed: now - int64(after)},
		}, now, cluster.ViewConfig{})
		return changes && len(next.Members) == 2
	}
	if back(rejoinAfter-1) || !back(rejoinAfter) {
		t.Errorf("a member does not come back %v after its removal", rejoinAfter)
	}
	p := cluster.NewProposer(cluster.ViewConfig{})
	p.Elected(0)
	gossip := []cluster.Seen{{Name: "a", Incarnation: 1, Gossip: cluster.GossipAlive}, {Name: "b", Incarnation: 2, Gossip: cluster.GossipDead}}
	for at := time.Duration(0); ; at += time.Millisecond {
		p.Asked(int64(at), "a", 1, 1)
		if _, changes := p.Next(int64(at), view, gossip); changes {
			if at != deadAfter+debounce {
				t.Errorf("the view comes %v after the last request of who is dead, not %v", at, deadAfter+debounce)
			}
			break
		}
		if at > 10*time.Second {
			t.Fatal("there is no other view")
		}
	}
	f := cluster.NewFence(cluster.Self{Name: "a", Incarnation: 1}, cluster.FenceOptions{})
	f.Step(now, view)
	f.Granted(now, now, 1)
	if got := f.Lease(now, 1); got != int64(viewLease) {
		t.Errorf("a view lease is of %v, not %v", time.Duration(got), viewLease)
	}
}

// TestFaults: whatever happens, no more is admitted than may be, service comes back, and every request ends.
func TestFaults(t *testing.T) {
	for _, f := range Faults()[1:] {
		for _, load := range []float64{.7, 2} {
			for _, p := range []Policy{denying(), policy(t, Headgate)} {
				c := faultCell(f, load)
				t.Run(c.String()+" "+p.Name, func(t *testing.T) {
					t.Parallel()
					// `local` may add rate/N at each of the two nodes that are cut off, for the ten seconds of the cut.
					most, least, back := 0.0, .99, 100*time.Millisecond
					switch {
					case f == Partition:
						back = c.For/6 + reunited
						if least = .94; p.Name == Headgate {
							most = float64(2) / 6 * 10
						}
					case f == OwnerCrash: // until the new owner may grant, and a burst
						least, back = .96, 4*time.Second
					}
					e := simulate(c, p, c.Demand(), c.plan())
					r := Judge(c, &e)
					if r.Over > most {
						t.Errorf("over by %.4f bursts, more than %.2f", r.Over, most)
					}
					if r.Admitted < least || r.Recovery > back || r.Recovery < 0 {
						t.Errorf("admitted %.4f, back after %v; want %.2f and %v", r.Admitted, r.Recovery, least, back)
					}
					crash := f == OwnerCrash || f == HolderCrash
					for i, x := range e.Fates {
						if !x.Decided && !(crash && x.Lost) || x.Took > int64(300*time.Millisecond) {
							t.Fatalf("request %d: %+v", i, x)
						}
					}
				})
			}
		}
	}
}

// TestStoreFaults: a store in the middle that is away for 5 s of 60 refuses what would have been admitted; one that comes back empty
// admits a burst anew; rate/N admits by as much more as there are nodes more.
func TestStoreFaults(t *testing.T) {
	r := measure(faultCell(OwnerCrash, .7), policy(t, "each request asks"))
	if r.FalseRefused < .08 || r.FalseRefused > .09 || r.Recovery < storeAway {
		t.Errorf("each request asks, store crash: %.4f refused, back after %v", r.FalseRefused, r.Recovery)
	}
	short := faultCell(OwnerCrash, 2)
	short.Limit.Burst, short.Limit.Rate.Count, short.Mean, short.Load = 10000, 100, 50, 40 // the burst takes a hundred seconds to fill
	if r := measure(short, policy(t, "each request asks")); r.Over < .9 {
		t.Errorf("the bucket of a store that comes back empty is full, and %.4f bursts are over", r.Over)
	}
	if r := measure(faultCell(Join, 2), policy(t, "rate/N")); r.Over < 5 {
		t.Errorf("seven nodes of six: %.4f bursts over", r.Over)
	}
	cut := measure(faultCell(Partition, .7), policy(t, "each request asks"))
	if cut.P99 != askFor {
		t.Errorf("a request that is cut off is refused after %v, not %v", cut.P99, askFor)
	}
	crash := measure(faultCell(HolderCrash, .7), policy(t, "rate/N"))
	if crash.Admitted > .96 {
		t.Errorf("with a node goes its part of the rate, and %.4f is admitted", crash.Admitted)
	}
}

// TestFaultsRepeat: a seed makes the same of every fault, to the bit; another seed does not.
func TestFaultsRepeat(t *testing.T) {
	for _, f := range Faults() {
		for _, p := range Policies() {
			c := faultCell(f, 1.1)
			c.For, c.Zipf = 15*time.Second, true
			a, b := simulate(c, p, c.Demand(), c.plan()), simulate(c, p, c.Demand(), c.plan())
			if !reflect.DeepEqual(a, b) {
				t.Errorf("%s, %s: two runs differ", &c, p.Name)
			}
			if !reflect.DeepEqual(Judge(c, &a), Judge(c, &b)) {
				t.Errorf("%s, %s: two judgements differ", &c, p.Name)
			}
			c.Seed++
			if e := simulate(c, p, c.Demand(), c.plan()); reflect.DeepEqual(a.Fates, e.Fates) {
				t.Errorf("%s, %s: another seed makes the same", &c, p.Name)
			}
		}
	}
}

// TestPlan: what goes wrong goes wrong at the nodes that it is said to, and one node at a time is restarted.
func TestPlan(t *testing.T) {
	for _, nodes := range []int{2, 3, 4, 16, 64} {
		for _, f := range Faults() {
			c := faultCell(f, 1)
			c.Nodes = nodes
			p := c.plan()
			if f == NoFault {
				if p != nil {
					t.Error("a plan for nothing")
				}
				continue
			}
			cut := 0
			for i, out := range p.cut {
				if out && i == p.owner {
					t.Errorf("%s: the owner is cut off", &c)
				}
				if out {
					cut++
				}
			}
			switch {
			case f == OwnerCrash && p.victim != p.owner, f == HolderCrash && (p.victim == p.owner || p.victim < 0),
				f == Partition && cut != max(1, nodes/3), f == RollingRestart && p.leaves[0].node != p.owner:
				t.Errorf("%s: %+v", &c, p)
			}
			if after := p.home(0, func(i int) bool { return i <= nodes }); after != nodes {
				t.Errorf("%s: the bucket of the first tenant is node %d's after a join", &c, after)
			}
		}
	}
}

// TestManyTenantsInTrouble: of many tenants each has an owner somewhere, and what befalls a node befalls them all.
func TestManyTenantsInTrouble(t *testing.T) {
	for _, f := range Faults()[1:] {
		c := faultCell(f, .7)
		c.Tenants, c.TenantSkew, c.For = 40, .5, 15*time.Second
		r, err := measureMany(t.Context(), c, policy(t, Headgate), 2)
		if err != nil {
			t.Fatal(err)
		}
		again, err := measureMany(t.Context(), c, policy(t, Headgate), 1)
		if err != nil || !reflect.DeepEqual(r, again) {
			t.Errorf("%s: the number of processors makes a difference (%v)", &c, err)
		}
		if r.Over > 1.2 || r.Admitted < .9 || r.Requests == 0 || r.Course.FaultAt != 5*time.Second {
			t.Errorf("%s: over %.3f, admitted %.4f", &c, r.Over, r.Admitted)
		}
	}
}
