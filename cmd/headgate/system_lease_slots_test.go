//go:build linux

package main_test

import (
	"fmt"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"headgate/cluster"
	"headgate/proxy/admin"
)

// TestNeverNineOfEight: a tenant's eight slots are eight over five nodes, and never nine, while nodes
// that hold some and those that lend them are killed, leave and join; and none is lost.
func TestNeverNineOfEight(t *testing.T) {
	heavy(t)
	up := newArrivals(t, "127.0.0.1:0")
	f := newFleet(t, 5, up, map[string]string{"eight": "{name: slots, scope: org, unit: concurrency, max: 8, unavailable: deny}"}, nil)
	f.allAtOnce("eight", 8)
	load := f.press("eight", 80, want{tokens: 10, ms: 400})
	full := func(what string, since int64) {
		t.Helper()
		eventually(t, "eight in use after "+what, func() bool { _, most := up.inFlight("eight"); return most >= 8 })
		t.Logf("eight in use %s after %s", seconds(time.Duration(cluster.Now()-since)), what)
		up.forget("eight")
	}
	end := func(what string, m *member, s syscall.Signal) {
		t.Helper()
		at := cluster.Now()
		m.end(s)
		up.forget("eight")
		full(what, at)
		f.awaitView(f.living()...)
		up.forget("eight")
		full("the view without it", cluster.Now())
		f.lasting(time.Second)
		at = cluster.Now()
		m.up()
		f.awaitView(f.living()...)
		up.forget("eight")
		full("its start", at)
		f.lasting(time.Second)
	}
	full("the start", cluster.Now())
	f.lasting(time.Second)
	end("the owner's SIGKILL", f.owner("eight", f.members[0]), syscall.SIGKILL)
	owner := f.owner("eight", f.members[0])
	end("another's SIGKILL", f.others(owner)[0], syscall.SIGKILL)
	end("the owner's leave", f.owner("eight", f.members[0]), syscall.SIGTERM)
	end("another's leave", f.others(f.owner("eight", f.members[0]))[1], syscall.SIGTERM)
	load.stop()
	t.Log(load)
	f.allFree("eight", 8)
	if peak := up.peakOf("eight"); peak != 8 {
		t.Errorf("%d were in use at once, want 8", peak)
	}
}

// allAtOnce: as many requests as there are slots, all at one instant, are all let through, through one
// node and spread over all.
func (f *fleet) allAtOnce(tenant string, slots int) {
	f.t.Helper()
	nodes := f.living()
	for name, m := range map[string]func(i int) *member{"one node": func(int) *member { return nodes[0] }, "all nodes": func(i int) *member { return nodes[i%len(nodes)] }} {
		var all sync.WaitGroup
		replies := make([]reply, slots)
		for i := range slots {
			all.Go(func() { replies[i] = f.ask(f.t.Context(), m(i), tenant, want{tokens: 10, ms: 300}) })
		}
		all.Wait()
		for _, r := range replies {
			if r.code != http.StatusOK {
				f.t.Errorf("%d at once through %s: %+v", slots, name, r)
			}
		}
	}
}

// dayCost is what one request of TestDayLimitOutlivesItsOwner takes of 100000 a day.
const dayCost = 500

// TestDayLimitOutlivesItsOwner: of a limit by the day what was spent stays spent, and what was not is
// still there, but for one block at most, after a stop of the whole cluster and a SIGKILL of the owner.
func TestDayLimitOutlivesItsOwner(t *testing.T) {
	heavy(t)
	if d := time.Now().UTC(); d.Add(3*time.Minute).Day() != d.Day() {
		t.Skip("the day ends")
	}
	up := newArrivals(t, "127.0.0.1:0")
	limits := map[string]string{"window": "{name: tokens, scope: org, unit: tokens, rate: 100000/day, algorithm: fixed_window, unavailable: deny}"}
	for i := range 12 { // one of them has the same owner, but for once in a hundred runs
		limits[fmt.Sprintf("gcra-%d", i)] = "{name: tokens, scope: org, unit: tokens, rate: 100000/day, unavailable: deny}"
	}
	f := newFleet(t, 3, up, limits, nil)
	spend := func(tenant string, n int) {
		t.Helper()
		for i := range n {
			m := f.living()[i%len(f.living())]
			if r := f.ask(t.Context(), m, tenant, want{tokens: dayCost}); r.code != http.StatusOK {
				t.Fatalf("%s: number %d of %d: %+v", tenant, i, n, r)
			}
		}
	}
	spend("window", 20)
	for _, m := range f.members {
		m.end(syscall.SIGTERM)
	}
	for _, m := range f.members {
		m.launch()
	}
	for _, m := range f.members {
		m.ready()
	}
	f.awaitView(f.members...)
	owner := f.owner("window", f.members[0])
	tenants := []string{"window"}
	for i := range 12 {
		if name := fmt.Sprintf("gcra-%d", i); f.owner(name, f.members[0]) == owner && len(tenants) == 1 {
			tenants = append(tenants, name)
		}
	}
	for _, tenant := range tenants {
		spend(tenant, 20)
	}

	inHand := map[string]int64{}
	for _, tenant := range tenants {
		_, inHand[tenant] = f.leftOf(tenant, f.others(owner)[0])
		t.Logf("%s before the SIGKILL: %s", tenant, f.others(owner)[0].node.ok("limits", "show", tenant, "--json"))
		if inHand[tenant] > 100_000/20 {
			t.Errorf("%s: %d in hand: too much for a block", tenant, inHand[tenant])
		}
	}
	killed := cluster.Now()
	owner.end(syscall.SIGKILL)
	rest := f.others(owner)
	f.awaitView(rest...)
	for _, tenant := range tenants {
		eventually(t, tenant+" to be served again", func() bool {
			r := f.ask(t.Context(), rest[0], tenant, want{tokens: dayCost})
			return r.code == http.StatusOK
		})
		t.Logf("%s was served again %s after the SIGKILL, when the others' view was without the owner and those before it were tried", tenant, seconds(time.Duration(cluster.Now()-killed)))
		for refused, i := 0, 0; refused < 6 && i < 1000; i++ { // what another node holds of the rest comes when it is called back
			if r := f.ask(t.Context(), rest[i%2], tenant, want{tokens: dayCost}); r.code != http.StatusOK {
				refused++
				f.lasting(300 * time.Millisecond)
			}
		}
		got := int64(len(up.of(tenant))) * dayCost
		left, _ := f.leftOf(tenant, rest[0])
		if left >= dayCost {
			t.Errorf("%s: %d are left and refused: %s", tenant, left, rest[0].node.ok("limits", "show", tenant, "--json"))
		}
		t.Logf("%s: %d of 100000 came to the model server, %d are left; %d were in the owner's hand or lent when it was killed", tenant, got, left, inHand[tenant])
		if lost := 100_000 - got - left; lost < 0 || lost > inHand[tenant] {
			t.Errorf("%s: %d of 100000 a day are lost, the block in hand was %d", tenant, lost, inHand[tenant])
		}
	}
}

// leftOf a tenant's limit is all that is left, and what of it its owner has of its block, with what it lent
// of that, once nothing is under way any more.
func (f *fleet) leftOf(tenant string, says *member) (whole, inHand int64) {
	f.t.Helper()
	same := 0
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	eventually(f.t, "the block of "+tenant+" to be as it was", func() bool {
		<-again.C
		var level, hand int64
		for _, l := range look[[]admin.Level](f.group, says, "limits/"+tenant) {
			level, hand = level+l.Level, hand+max(l.Lendable, 0)+l.Outstanding
		}
		if same++; hand != inHand || level != whole && level != whole+1 { // it may refill meanwhile
			same = 0
		}
		whole, inHand = level, hand
		return same == 8
	})
	return whole, inHand
}
