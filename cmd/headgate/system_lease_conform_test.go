//go:build linux

package main_test

import (
	"math"
	"math/big"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/cluster"
	"headgate/proxy/admin"
)

// The limits of TestLeasesConform, each a tenant's, and what of them is asked for.
const (
	denyLimits  = "{name: requests, scope: org, unit: requests, rate: 6000/min, burst: 100, unavailable: deny}"
	bothLimits  = "{name: tokens, scope: org, unit: tokens, rate: 300000/min, burst: 10000, unavailable: deny}, {name: requests, scope: key, unit: requests, rate: 6000/min, burst: 100, unavailable: deny}"
	deepLimits  = "{name: requests, scope: org, unit: requests, rate: 3000/min, burst: 500, unavailable: deny}"
	slowLimits  = "{name: requests, scope: org, unit: requests, rate: 30/min, burst: 5, unavailable: deny}"
	localLimits = "{name: requests, scope: org, unit: requests, rate: 3000/min, burst: 50, unavailable: local}"
)

// paces are the same, for the judgement.
var (
	denyPace  = pace{100, 6000, time.Minute}
	bothPace  = pace{10_000, 300_000, time.Minute}
	deepPace  = pace{500, 3000, time.Minute}
	slowPace  = pace{5, 30, time.Minute}
	localPace = pace{50, 3000, time.Minute}
)

// TestLeasesConform: under nearly twice its limits a cluster of five gives every tenant its limit and
// no more, while nodes join, leave, are restarted in turn and die: by what the nodes decided, and by
// what came to the model server.
func TestLeasesConform(t *testing.T) {
	heavy(t)
	up := newArrivals(t, "127.0.0.1:0")
	f := newFleet(t, 5, up, map[string]string{"deny": denyLimits, "both": bothLimits, "deep": deepLimits, "slow": slowLimits, "local": localLimits}, nil)
	deep := f.press("deep", 400, want{tokens: 10}) // its burst is soon spent
	deny := f.press("deny", 170, want{tokens: 10})
	both := f.press("both", 90, want{tokens: 100})
	slow := f.press("slow", 2, want{tokens: 10})
	local := f.press("local", 90, want{tokens: 10})
	loads := []*pressure{deep, deny, both, slow, local}
	began := cluster.Now()
	f.lasting(3 * time.Second)
	deep.perSecond.Store(90)
	f.lasting(3 * time.Second)
	steady := cluster.Now()

	f.add().up()
	f.awaitView(f.members...)
	f.lasting(2 * time.Second)
	leaver := f.owner("deep", f.members[0])
	beforeLeave := deep.unspent("requests")
	leaving := cluster.Now()
	leaver.end(syscall.SIGTERM)
	if code := leaver.node.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("%s ended with %d", leaver.name, code)
	}
	f.awaitView(f.living()...)
	f.lasting(3 * time.Second)
	afterLeave := deep.unspent("requests")
	left := cluster.Now()

	for _, m := range f.living() {
		m.end(syscall.SIGTERM)
		f.awaitView(f.living()...)
		m.up()
		f.awaitView(f.living()...)
	}
	f.lasting(2 * time.Second)
	afterRoll := deep.unspent("requests")
	rolled := cluster.Now()

	owner := f.owner("deny", f.living()[0])
	var orphans []string
	for _, tenant := range []string{"deny", "both", "deep", "local"} {
		if f.owner(tenant, f.living()[0]) == owner {
			orphans = append(orphans, tenant)
		}
	}
	killed := cluster.Now()
	owner.end(syscall.SIGKILL)
	f.awaitView(f.living()...)
	f.lasting(5 * time.Second)
	owner.up()
	f.awaitView(f.living()...)
	f.lasting(time.Second)
	ended := cluster.Now()
	for _, p := range loads {
		p.stop()
		t.Log(p)
	}

	all := f.decisions()
	f.conform("deny", all, "deny", "requests", denyPace, 1, whole())
	f.conform("deny", all, "both", "tokens", bothPace, 100, whole())
	f.conform("deny", all, "both", "requests", denyPace, 1, whole())
	f.conform("deny", all, "deep", "requests", deepPace, 1, whole())
	f.conform("deny", all, "slow", "requests", slowPace, 1, whole())
	f.conformLocally(all, "local", localPace, 4, 4)
	if n := units(only(all, func(t *taken) bool { return t.by == "settle" && t.limit == "tokens" })); n != 0 {
		t.Errorf("usage differed from the estimates by %d tokens, so that what is above says nothing", n)
	}
	for _, p := range loads {
		of, limit := map[*pressure]pace{deep: deepPace, deny: denyPace, both: bothPace, slow: slowPace, local: localPace}[p], "requests"
		if p == both {
			limit = "tokens"
		}
		for _, span := range []struct {
			what     string
			from, to int64
		}{{"before", began, steady}, {"a join", steady, leaving}, {"a leave", leaving, left}, {"a rolling restart", left, rolled}, {"a kill", killed, ended}, {"all", began, ended}} {
			ratio, got, best := p.share(all, limit, of, span.from, span.to)
			t.Logf("%s: %s: admitted %d of %d, %.4f", p.tenant, span.what, got, best, ratio)
		}
	}
	before, early := deep.lost(all, "requests", deepPace, beforeLeave)
	for _, c := range []struct {
		what string
		at   []unspent
	}{{"a leave", afterLeave}, {"a rolling restart", afterRoll}} {
		after, late := deep.lost(all, "requests", deepPace, c.at)
		_, _, ideal := deep.share(all, "requests", deepPace, 0, c.at[0].at)
		ratio := 1 - float64(after-before)/float64(ideal)
		t.Logf("%s: of %d that there were until after %s all but %d were admitted or are left, before it all but %d; of these %d were decided too late: %.4f", deep.tenant, ideal, c.what, after, before, late-early, ratio)
		// What a node decided, and a busy machine brought too late, is spent. And each of six nodes tells
		// what it has in whole units.
		if n := after - before - (late - early) - 6; c.what == "a leave" && 1-float64(n)/float64(ideal) < 0.995 {
			t.Errorf("%s cost %s quota: %.4f of it is left", c.what, deep.tenant, ratio)
		}
	}
	for _, tenant := range orphans {
		longest, back := pause(all, tenant, killed, min(killed+10e9, ended))
		t.Logf("after the SIGKILL of its owner %s was served again after %s, having been without for %s", tenant, seconds(time.Duration(back-killed)), seconds(longest))
	}
}

// conformLocally: what owners lend conforms to the limit; each node's own bucket, while an owner is out
// of its reach, to its share, which is 1/least at most; so that with out nodes at once like that there
// is no more than 1 + out/least of the limit.
func (f *fleet) conformLocally(all []taken, tenant string, p pace, out, least int64) {
	f.t.Helper()
	mine := only(all, func(t *taken) bool { return t.tenant == tenant })
	f.conform("local, all", all, tenant, mine[0].limit, p, 1, big.NewRat(least+out, least))
	leased := only(mine, func(t *taken) bool { return t.by != "private" })
	if v := p.worst(leased, clocksApart, whole()); v.by > 0 {
		f.t.Errorf("local: %s: %.2f more than was there to lend:\n%s", tenant, v.by, excerpt(leased, v))
	}
	var nodes []string
	for _, t := range mine {
		if !slices.Contains(nodes, t.of) {
			nodes = append(nodes, t.of)
		}
	}
	for _, node := range nodes {
		own := only(mine, func(t *taken) bool { return t.by == "private" && t.of == node })
		if v := p.worst(own, clocksApart, big.NewRat(1, least)); len(own) > 0 && v.by > 0 {
			f.t.Errorf("local: %s: %.2f more than its share by the own bucket of %s:\n%s", tenant, v.by, node, excerpt(own, v))
		}
	}
	f.t.Logf("local: %s: %d of %d units out of own buckets of %s", tenant, units(mine)-units(leased), units(mine), strings.Join(nodes, ", "))
}

// unspent is what is left of a limit at an instant, with the owner and with those it lent to, and how many
// requests were refused for want of an answer in time.
type unspent struct{ at, units, late int64 }

// unspent looks ten times within a second: what is on its way is missed by some of them.
func (p *pressure) unspent(limit string) (looks []unspent) {
	p.f.t.Helper()
	for range 10 {
		at := cluster.Now()
		for _, l := range look[[]admin.Level](p.f.group, p.f.living()[0], "limits/"+p.tenant) {
			if l.Limit == limit {
				var late int64
				p.note(func() { late = int64(p.codes["429 over_capacity"]) })
				looks = append(looks, unspent{at, l.Level, late})
			}
		}
		p.f.lasting(100 * time.Millisecond)
	}
	if len(looks) == 0 {
		p.f.t.Fatalf("%s has no bucket of limit %s", p.tenant, limit)
	}
	return looks
}

// lost is how much of what an ideal bucket gives was neither admitted nor is left, by the best of several
// looks; late is how many requests were refused for want of an answer in time until then.
func (p *pressure) lost(all []taken, limit string, of pace, looks []unspent) (least, late int64) {
	least = math.MaxInt64
	for _, l := range looks {
		_, got, ideal := p.share(all, limit, of, 0, l.at)
		if n := ideal - got - l.units; n < least {
			least, late = n, l.late
		}
	}
	return least, late
}
