//go:build linux

package main_test

import (
	"fmt"
	"math/big"
	"net/http"
	"syscall"
	"testing"
	"time"

	"headgate/cluster"
	"headgate/proxy"
	"headgate/proxy/admin"
)

// These tests are of single complaints about other limiters: cmd/node/cases_test.go has the list.

// TestOneLimitForAllNodes: N nodes are not N times the limit, nor is there less of it through one of
// them or without its owner; and each node tells who has what.
func TestOneLimitForAllNodes(t *testing.T) {
	t.Parallel()
	up := newArrivals(t, "127.0.0.1:0")
	const small = "{name: requests, scope: org, unit: requests, rate: 40/min, unavailable: deny}"
	f := newFleet(t, 3, up, map[string]string{"all": small, "single": small, "others": small}, nil)
	others := f.others(f.owner("others", f.members[0]))
	single := f.others(f.owner("single", f.members[0]))[0]
	for i := range 120 {
		for tenant, m := range map[string]*member{"all": f.members[i%3], "single": single, "others": others[i%2]} {
			if r := f.ask(t.Context(), m, tenant, want{tokens: 10}); r.code != http.StatusOK && r.code != http.StatusTooManyRequests || r.degraded != "" {
				t.Fatalf("%s: %+v", tenant, r)
			}
		}
	}
	all := f.decisions()
	for tenant := range f.keys {
		f.conform("three nodes", all, tenant, "requests", pace{40, 40, time.Minute}, 1, whole())
		if n := len(up.of(tenant)); n < 40 {
			t.Errorf("%s: %d of 40 were admitted", tenant, n)
		}
	}
	owner := f.owner("all", f.members[0])
	for _, m := range f.members {
		levels := decoded[[]admin.Level](m.node, "limits", "show", "all")
		if len(levels) != 1 || levels[0].Owner != owner.name || levels[0].Level > 10 || levels[0].Capacity != 40 || levels[0].Away != "" {
			t.Errorf("%s shows %+v", m.name, levels)
		}
		e := decoded[proxy.Explanation](m.node, "explain", "--tenant", "all", "--model", "m")
		if len(e.Limits) != 1 || e.Limits[0].Owner != owner.name || e.Degraded {
			t.Errorf("%s explains %+v", m.name, e)
		}
	}
}

// TestHammeredBucketRefills: a bucket that is asked for without a rest refills all the same, and the
// time at which it says that it will admit again does not move out. It is exact to a fifth of what one
// request takes to refill: an answer may be on its way.
func TestHammeredBucketRefills(t *testing.T) {
	heavy(t)
	up := newArrivals(t, "127.0.0.1:0")
	f := newFleet(t, 3, up, map[string]string{"busy": "{name: requests, scope: org, unit: requests, rate: 60/min, burst: 5, unavailable: deny}"}, nil)
	m := f.others(f.owner("busy", f.members[0]))[0]
	began := cluster.Now()
	var announced int64 // the latest that the next may be admitted, as was said since the last one was; 0: nothing
	later, refused := 0, 0
	for cluster.Now() < began+10e9 {
		r := f.ask(t.Context(), m, "busy", want{tokens: 10})
		switch r.code {
		case http.StatusOK:
			announced = 0
		case http.StatusTooManyRequests:
			refused++
			if r.degraded != "" {
				break // its owner did not answer in time: that is no word of the bucket
			}
			if at := r.sent + int64(r.retryAfter); announced != 0 && at > announced+int64(200*time.Millisecond) {
				later++
				t.Logf("%s after the start it says %s, %s later than before", seconds(time.Duration(r.sent-began)), seconds(r.retryAfter), seconds(time.Duration(at-announced)))
			}
			if at := r.got + int64(r.retryAfter); announced == 0 || at < announced {
				announced = at
			}
		default:
			t.Fatalf("%+v", r)
		}
		f.lasting(10 * time.Millisecond)
	}
	all := f.decisions()
	f.conform("hammered", all, "busy", "requests", pace{5, 60, time.Minute}, 1, whole())
	elapsed := time.Duration(cluster.Now() - began)
	if n, least := len(up.of("busy")), 5+int(elapsed.Seconds())-1; n < least {
		t.Errorf("%d were admitted in %s, there were %d", n, seconds(elapsed), least)
	}
	if later > 0 {
		t.Errorf("%d of %d refusals put off what an earlier one had said", later, refused)
	}
}

// spentTenants are many that have spent all, so that some of them change owners.
func spentTenants(t *testing.T, nodes int) *fleet {
	t.Helper()
	up := newArrivals(t, "127.0.0.1:0")
	limits := map[string]string{}
	for i := range 20 {
		limits[fmt.Sprintf("spent-%d", i)] = "{name: requests, scope: org, unit: requests, rate: 10/min, unavailable: deny}"
	}
	f := newFleet(t, nodes, up, limits, nil)
	f.askAll(13)
	return f
}

// askAll sends so many requests of each tenant, through all nodes in turn.
func (f *fleet) askAll(each int) {
	f.t.Helper()
	nodes := f.living()
	for tenant := range f.keys {
		for i := range each {
			if r := f.ask(f.t.Context(), nodes[i%len(nodes)], tenant, want{tokens: 10}); r.code != http.StatusOK && r.code != http.StatusTooManyRequests {
				f.t.Fatalf("%s: %+v", tenant, r)
			}
		}
	}
}

// spentStay: none of the tenants got more than its limit, and those that were there got it.
func (f *fleet) spentStay(what string) {
	f.t.Helper()
	all := f.decisions()
	for tenant := range f.keys {
		mine := only(all, func(t *taken) bool { return t.tenant == tenant })
		if v := (pace{10, 10, time.Minute}).worst(mine, clocksApart, whole()); v.by > 0 || len(mine) < 10 || len(f.up.of(tenant)) != len(mine) {
			f.t.Errorf("%s: %s had %d of 10 in a minute, %d came, %.2f too many", what, tenant, len(mine), len(f.up.of(tenant)), v.by)
		}
	}
}

// TestJoinReadmitsNothing: who joins becomes the owner of some tenants, and knows what they have spent.
func TestJoinReadmitsNothing(t *testing.T) {
	heavy(t)
	f := spentTenants(t, 3)
	before := map[string]*member{}
	for tenant := range f.keys {
		before[tenant] = f.owner(tenant, f.members[0])
	}
	f.add().up()
	f.awaitView(f.members...)
	moved := 0
	for tenant := range f.keys {
		if f.owner(tenant, f.members[0]) != before[tenant] {
			moved++
		}
	}
	f.askAll(8)
	f.spentStay("a join")
	t.Logf("%d of %d tenants have another owner since", moved, len(f.keys))
	if moved == 0 {
		t.Error("no tenant moved: nothing was tried")
	}
}

// TestReplacingAllNodesAdmitsNoMore: each node in turn stops for good, and others are in its place, until
// none of the first is left.
func TestReplacingAllNodesAdmitsNoMore(t *testing.T) {
	heavy(t)
	f := spentTenants(t, 3)
	for range 3 {
		f.add().up()
	}
	f.awaitView(f.members...)
	last := f.members[5]
	last.node.await("five voters", func() bool { return f.voters(last) == 5 })
	for i, m := range f.members[:3] {
		m.end(syscall.SIGTERM)
		if code := m.node.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("%s ended with %d", m.name, code)
		}
		f.awaitView(f.living()...)
		f.askAll(4)
		voters := []int{5, 3, 3}[i]
		last.node.await(fmt.Sprintf("%d voters", voters), func() bool { return f.voters(last) == voters })
	}
	f.askAll(4)
	f.spentStay("a replacement of all")
}

// TestOwnerOutOfReachCostsABoundedWait: while an owner stands still every request to the others is
// answered, as the limit says; and when it goes on it lends nothing by what it knew before.
func TestOwnerOutOfReachCostsABoundedWait(t *testing.T) {
	heavy(t)
	up := newArrivals(t, "127.0.0.1:0")
	limits := map[string]string{}
	for mode, limit := range map[string]string{"deny": denyLimits, "local": localLimits, "allow": "{name: requests, scope: org, unit: requests, rate: 100/min, burst: 1, unavailable: allow}"} {
		for i := range 12 {
			limits[fmt.Sprintf("%s-%d", mode, i)] = limit
		}
	}
	f := newFleet(t, 3, up, limits, nil)
	owner := f.owner("deny-0", f.members[0])
	tenants := map[string]string{"deny": "deny-0"}
	for _, mode := range []string{"local", "allow"} {
		for i := range 12 {
			if name := fmt.Sprintf("%s-%d", mode, i); f.owner(name, f.members[0]) == owner {
				tenants[mode] = name
			}
		}
	}
	loads := []*pressure{}
	for _, tenant := range tenants {
		loads = append(loads, f.press(tenant, 60, want{tokens: 10}))
	}
	f.lasting(2 * time.Second)
	owner.serving.Store(false)
	owner.life.Add(1)
	stopped := cluster.Now()
	owner.node.signal(syscall.SIGSTOP)
	f.awaitView(f.living()...)
	f.lasting(3 * time.Second)
	owner.node.signal(syscall.SIGCONT)
	went := cluster.Now()
	f.awaitView(f.members...)
	owner.serving.Store(true)
	f.lasting(3 * time.Second)
	for _, p := range loads {
		p.stop()
		t.Log(p)
	}
	all := f.decisions()
	f.conform("an owner that stood still", all, tenants["deny"], "requests", denyPace, 1, whole())
	f.conformLocally(all, tenants["local"], localPace, 2, 2)
	_, back := pause(all, tenants["deny"], stopped, went)
	apart := only(all, func(d *taken) bool { return d.tenant == tenants["allow"] && d.by == "allow" })
	t.Logf("served again %s after the owner stood still; %d were let through uncounted by the limit that allows that", seconds(time.Duration(back-stopped)), len(apart))
	for _, d := range apart {
		if d.at < stopped {
			t.Errorf("let through uncounted %s before the owner stood still", seconds(time.Duration(stopped-d.at)))
		}
	}
	if late := only(all, func(d *taken) bool { return d.of == owner.name && d.at > stopped && d.at < went && d.by != "settle" }); len(late) > 5 {
		t.Errorf("%s decided %d times while it stood still", owner.name, len(late))
	}
}

// TestMessagesDoNotGrowWithRequests: below the limit a request costs next to no message, and the nodes
// speak no more often when there are more requests.
func TestMessagesDoNotGrowWithRequests(t *testing.T) {
	heavy(t)
	up := newArrivals(t, "127.0.0.1:0")
	f := newFleet(t, 3, up, map[string]string{"steady": "{name: requests, scope: org, unit: requests, rate: 30000/min, burst: 500, unavailable: deny}"}, nil)
	load := f.press("steady", 75, want{tokens: 10})
	f.lasting(3 * time.Second)
	type counts struct{ asks, all, requests float64 }
	measure := func(perSecond int64) (c counts) {
		t.Helper()
		load.perSecond.Store(perSecond)
		f.lasting(2 * time.Second)
		sum := func() (c counts) {
			for _, m := range f.members {
				c.asks += total(t, m, "headgate_lease_round_trips_total", `kind="ask"`)
				c.all += total(t, m, "headgate_lease_round_trips_total", ".*")
				c.requests += total(t, m, "headgate_requests_total", ".*")
			}
			return c
		}
		before, at := sum(), cluster.Now()
		f.lasting(6 * time.Second)
		after, seconds := sum(), time.Duration(cluster.Now()-at).Seconds()
		c = counts{after.asks - before.asks, after.all - before.all, after.requests - before.requests}
		// Each node says that it is there to each owner that lent it anything, four times a second.
		keep := 4 * 2 * seconds
		t.Logf("at %d requests a second over three nodes: %.0f messages in %.1f s, of which a request waited for %.0f; %.4f a request and %.4f beyond the keep-alive of two", perSecond, c.all, seconds, c.asks, c.all/c.requests, max(c.all-keep, 0)/c.requests)
		if c.requests < 6*float64(perSecond)/2 {
			t.Errorf("only %.0f requests were served", c.requests)
		}
		if c.asks > 0.05*c.requests || c.all-keep*1.2 > 0.05*c.requests {
			t.Errorf("at %d requests a second: %.0f messages beyond the keep-alive, %.0f waited for, for %.0f requests", perSecond, c.all-keep, c.asks, c.requests)
		}
		return c
	}
	few, many := measure(75), measure(300)
	if many.all > 2*few.all+20 {
		t.Errorf("four times the requests took %.0f messages in place of %.0f", many.all, few.all)
	}
	load.stop()
	t.Log(load)
	if n := load.codes["200"]; n != len(load.sent) {
		t.Errorf("%d of %d requests below the limit were admitted: %v", n, len(load.sent), load.codes)
	}
	f.conform("below the limit", f.decisions(), "steady", "requests", pace{500, 30000, time.Minute}, 1, big.NewRat(1, 1))
}
