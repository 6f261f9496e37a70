//go:build linux

package main_test

import (
	"context"
	"math/big"
	"net/http"
	"sync"
	"testing"
	"time"

	"headgate/cluster"
)

// windowOf is the window of a fixed window of 5 s that a time by the wall clock is in.
func windowOf(wall int64) int64 { return wall / int64(5*time.Second) }

// TestLeasesThroughAPartition: an owner is cut off, and later a node is heard by nobody, under load.
// Limits that say deny conform throughout; after the network healed all is decided by leases again, and
// windows have what is theirs: nothing of an old one is counted in a new one.
func TestLeasesThroughAPartition(t *testing.T) {
	heavy(t)
	if !inside(t, "iptables") {
		return
	}
	l := newLAN(t, 3)
	up := newArrivals(t, serviceHost+":8000")
	f := newFleet(t, 3, up, map[string]string{
		"deny": denyLimits, "local": localLimits,
		"window": "{name: requests, scope: org, unit: requests, rate: 100/5s, algorithm: fixed_window, unavailable: deny}",
	}, l.place)
	deny, local, window := f.press("deny", 170, want{tokens: 10}), f.press("local", 90, want{tokens: 10}), f.press("window", 50, want{tokens: 10})
	wall := time.Now().UnixNano() - cluster.Now()
	began := cluster.Now()
	f.lasting(3 * time.Second)

	for _, c := range []struct {
		name  string
		apart func(lost *member, rest []*member)
	}{
		{"the owner cut off", func(lost *member, rest []*member) { l.cut(lost, rest...) }},
		{"the owner unheard", func(lost *member, rest []*member) {
			for _, m := range rest {
				l.deafen(m, lost)
			}
		}},
	} {
		lost := f.owner("deny", f.members[0])
		rest := f.others(lost)
		cut := cluster.Now()
		c.apart(lost, rest)
		lost.node.await(lost.name+" to notice that it is cut off", func() bool { return metric(t, lost, "headgate_degraded") == 1 })
		f.awaitView(rest...)
		f.lasting(4 * time.Second)
		r := f.ask(t.Context(), lost, "deny", want{tokens: 10})
		if r.code != http.StatusTooManyRequests || r.error != "over_capacity" || r.degraded != "deny" {
			t.Errorf("%s: a limit that says deny: %+v", c.name, r)
		}
		healed := cluster.Now()
		l.heal(f.members...)
		f.awaitView(f.members...)
		for _, m := range f.members {
			m.node.await(m.name+" to reach all owners again", func() bool { return metric(t, m, "headgate_degraded") == 0 })
		}
		whole := cluster.Now()
		f.lasting(6 * time.Second) // one window is in it from end to end
		for _, m := range f.members {
			if r := f.ask(t.Context(), m, "local", want{tokens: 10}); r.degraded != "" {
				t.Errorf("%s: afterwards %s answers %+v", c.name, m.name, r)
			}
		}
		all := f.decisions()
		longest, back := pause(all, "deny", cut, healed)
		t.Logf("%s: served again after %s, having been without for %s at most; whole %s after the network healed", c.name, seconds(time.Duration(back-cut)), seconds(longest), seconds(time.Duration(whole-healed)))
		if own := only(all, func(t *taken) bool { return t.by == "private" && t.at > whole+1e9 }); len(own) > 0 {
			t.Errorf("%s: a second after all owners are in reach %d decisions are still by nodes' own buckets, the last %s later", c.name, len(own), seconds(time.Duration(own[len(own)-1].at-whole)))
		}
		f.fullWindow(c.name, all, whole, cluster.Now(), wall)
	}
	ended := cluster.Now()
	for _, p := range []*pressure{deny, local, window} {
		p.stop()
		t.Log(p)
	}
	all := f.decisions()
	f.conform("partitions", all, "deny", "requests", denyPace, 1, big.NewRat(1, 1))
	f.conformLocally(all, "local", localPace, 3, 2)
	f.windowsHold(all, "window", 100, 5*time.Second, began, wall)
	for p, of := range map[*pressure]pace{deny: denyPace, local: localPace} {
		ratio, got, best := p.share(all, "requests", of, began, ended)
		t.Logf("%s: admitted %d of %d, %.4f", p.tenant, got, best, ratio)
	}
}

// fullWindow: of the windows that lie within a span each gave all that it has.
func (f *fleet) fullWindow(what string, all []taken, from, to, wall int64) {
	f.t.Helper()
	for w := windowOf(from+wall) + 1; w < windowOf(to+wall); w++ {
		if n := units(only(all, func(t *taken) bool { return t.tenant == "window" && windowOf(t.at+wall) == w })); n != 100 {
			f.t.Errorf("%s: the window after it gave %d of 100, and 250 were asked for", what, n)
		}
	}
}

// TestExcessBehindAPartitionIsCounted: the streams of a node that was cut off are not cut, and its slots
// are lent again: what is then in use beyond the limit is counted, and passes.
func TestExcessBehindAPartitionIsCounted(t *testing.T) {
	heavy(t)
	if !inside(t, "iptables") {
		return
	}
	l := newLAN(t, 3)
	up := newArrivals(t, serviceHost+":8000")
	f := newFleet(t, 3, up, map[string]string{"eight": "{name: slots, scope: org, unit: concurrency, max: 8, unavailable: deny}"}, l.place)
	owner := f.owner("eight", f.members[0])
	lost := f.others(owner)[0]
	rest := f.others(lost)
	var all sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer func() { cancel(); all.Wait() }()
	for i := range 3 {
		all.Go(func() { f.ask(ctx, lost, "eight", want{tokens: 10, ms: -1}) })
		eventually(t, "the stream to have begun", func() bool { now, _ := up.inFlight("eight"); return now == i+1 })
	}
	l.cut(lost, rest...)
	f.awaitView(rest...)
	eventually(t, "its slots to be lent again", func() bool {
		now, _ := up.inFlight("eight")
		if now == 11 {
			return true
		}
		all.Go(func() { f.ask(ctx, rest[now%2], "eight", want{tokens: 10, ms: -1}) })
		return false
	})
	f.lasting(time.Second)
	if now, _ := up.inFlight("eight"); now != 11 {
		t.Errorf("%d streams, want the 8 of the limit and the 3 behind the partition", now)
	}
	l.heal(f.members...)
	f.awaitView(f.members...)
	eventually(t, "the excess to be counted", func() bool {
		var n float64
		for _, m := range f.members {
			n += total(t, m, "headgate_lease_slots_excess_total", ".*")
		}
		return n >= 3
	})
	for _, m := range f.members {
		if r := f.ask(t.Context(), m, "eight", want{tokens: 10}); r.code != http.StatusTooManyRequests {
			t.Errorf("with 11 of 8 in use %s answers %+v", m.name, r)
		}
	}
	up.letGo()
	f.allFree("eight", 8)
}

// allFree: all slots of a tenant can be used at once, and no more.
func (f *fleet) allFree(tenant string, slots int) {
	f.t.Helper()
	eventually(f.t, "nothing of "+tenant+" in flight", func() bool { now, _ := f.up.inFlight(tenant); return now == 0 })
	var all sync.WaitGroup
	ctx, cancel := context.WithCancel(f.t.Context())
	defer func() { cancel(); all.Wait() }()
	nodes := f.living()
	next := 0
	eventually(f.t, "all slots of "+tenant+" to be free", func() bool {
		now, _ := f.up.inFlight(tenant)
		if now >= slots {
			return true
		}
		m := nodes[next%len(nodes)]
		next++
		all.Go(func() { f.ask(ctx, m, tenant, want{tokens: 10, ms: -1}) })
		return false
	})
	for _, m := range nodes {
		if r := f.ask(f.t.Context(), m, tenant, want{tokens: 10}); r.code != http.StatusTooManyRequests {
			f.t.Errorf("with all slots of %s in use %s answers %+v", tenant, m.name, r)
		}
	}
	if now, _ := f.up.inFlight(tenant); now != slots {
		f.t.Errorf("%d of %d slots of %s in use", now, slots, tenant)
	}
	f.up.letGo()
}
