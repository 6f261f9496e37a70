//go:build linux

package main_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"headgate/proxy/admin"
)

// These tests run in networks of their own: a test of this file runs itself again in a fresh
// network, mount and process namespace, in which it may do as it likes, and which ends with
// all that is in it.

// insideVariable says that this is that second run.
const insideVariable = "HEADGATE_TEST_INSIDE"

// inside is true in the second run. In the first it makes the second one, passes its verdict
// on, and is false.
func inside(t *testing.T, tools ...string) bool {
	t.Helper()
	return insideFor(t, 3*time.Minute, tools...)
}

// insideFor is for a second run that may take so long.
func insideFor(t *testing.T, most time.Duration, tools ...string) bool {
	t.Helper()
	if os.Getenv(insideVariable) == t.Name() {
		return true
	}
	lacks := ""
	if os.Geteuid() != 0 {
		lacks = "root"
	}
	for _, tool := range append([]string{"unshare", "ip"}, tools...) {
		if _, err := exec.LookPath(tool); err != nil {
			lacks = tool
		}
	}
	if lacks != "" {
		if os.Getenv("CI") == "true" {
			t.Fatalf("a network of its own needs %s", lacks)
		}
		t.Skipf("a network of its own needs %s", lacks)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), most)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", self, "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), insideVariable+"="+t.Name())
	cmd.WaitDelay = 10 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Errorf("%v:\n%s", err, out.String())
	} else {
		t.Log(out.String())
	}
	return false
}

// sudo runs a command that must succeed.
func sudo(t *testing.T, command string) {
	t.Helper()
	args := strings.Fields(command)
	if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
}

// lan is a set of hosts with two networks: one on which they meet, and one on which they serve
// this process, which is at serviceHost. Host i is 10.77.0.i on the one and 10.78.0.i on the other.
type lan struct{ t *testing.T }

const serviceHost = "10.78.0.254"

func newLAN(t *testing.T, hosts int) *lan {
	t.Helper()
	l := &lan{t}
	for _, c := range []string{
		"ip link set lo up", "mkdir -p /run/netns", "mount -t tmpfs none /run/netns",
		"ip link add meet type bridge", "ip link set meet up", "ip link add serve type bridge", "ip addr add " + serviceHost + "/24 dev serve", "ip link set serve up",
	} {
		sudo(t, c)
	}
	for i := 1; i <= hosts; i++ {
		sudo(t, fmt.Sprintf("ip netns add host%d", i))
		sudo(t, fmt.Sprintf("ip -n host%d link set lo up", i))
		for net, bridge := range map[int]string{77: "meet", 78: "serve"} {
			sudo(t, fmt.Sprintf("ip link add %s%d type veth peer name %s netns host%d", bridge, i, bridge, i))
			sudo(t, fmt.Sprintf("ip link set %s%d master %s up", bridge, i, bridge))
			sudo(t, fmt.Sprintf("ip -n host%d addr add 10.%d.0.%d/24 dev %s", i, net, i, bridge))
			sudo(t, fmt.Sprintf("ip -n host%d link set %s up", i, bridge))
		}
	}
	return l
}

// place is where a group's members are.
func (l *lan) place(i int) (host, gossip string, in []string) {
	return fmt.Sprintf("10.78.0.%d", i), fmt.Sprintf("10.77.0.%d:7946", i), []string{"ip", "netns", "exec", fmt.Sprintf("host%d", i)}
}

func (l *lan) filter(how string, hears, speaks *member) {
	l.t.Helper()
	number := func(m *member) string { return strings.TrimPrefix(m.name, "n") }
	sudo(l.t, fmt.Sprintf("ip netns exec host%s iptables -w %s INPUT -s 10.77.0.%s -j DROP", number(hears), how, number(speaks)))
}

// deafen has a host no longer hear others, without a word to either side.
func (l *lan) deafen(m *member, to ...*member) {
	l.t.Helper()
	for _, o := range to {
		l.filter("-A", m, o)
	}
}

// cut takes hosts out of each other's hearing.
func (l *lan) cut(m *member, from ...*member) {
	l.t.Helper()
	l.deafen(m, from...)
	for _, o := range from {
		l.deafen(o, m)
	}
}

// heal ends all of that.
func (l *lan) heal(members ...*member) {
	l.t.Helper()
	for _, m := range members {
		sudo(l.t, "ip netns exec host"+strings.TrimPrefix(m.name, "n")+" iptables -w -F INPUT")
	}
}

// modesPolicy has a tenant for each thing that a limit may say of a node that is cut off. The
// small limits are nine a day, three on each of three nodes.
const modesPolicy = `
  - {name: deny, limits: [{name: few, scope: org, unit: requests, rate: 1000/day, unavailable: deny}]}
  - {name: local, limits: [{name: few, scope: org, unit: requests, rate: 9/day, unavailable: local}]}
  - {name: allow, limits: [{name: few, scope: org, unit: requests, rate: 9/day, unavailable: allow}]}
tenants:
  - {name: dev, plan: p}
  - {name: deny, plan: deny}
  - {name: local, plan: local}
  - {name: allow, plan: allow}
`

// TestPartitions: a node that is cut off, in whichever way, takes no change and says so; what
// its limits say becomes of them; the others go on, and it is one of them again by itself.
// Meanwhile every request to every node is answered.
func TestPartitions(t *testing.T) {
	heavy(t)
	if !inside(t, "iptables") {
		return
	}
	l := newLAN(t, 3)
	g := newGroupAt(t, 3, strings.Replace(systemPolicy(slowFakeAt(t, serviceHost+":8000")), "\ntenants: [{name: dev, plan: p}]\n", modesPolicy, 1), l.place)
	for _, m := range g.members {
		m.env = append(m.env, "HEADGATE_INSECURE=true")
	}
	g.up()
	keys := map[string]string{}
	for _, tenant := range []string{"deny", "local", "allow"} {
		var k admin.CreatedKey
		if code, apiErr, err := g.call(g.members[0], http.MethodPost, "keys", admin.NewKey{Tenant: tenant, ID: tenant}, &k); code != http.StatusOK {
			t.Fatalf("%d %s %v", code, apiErr, err)
		}
		keys[tenant] = k.Key
	}
	g.awaitSame(g.members...)
	traffic := g.startLoad(50 * time.Millisecond)

	for round, c := range []struct {
		name  string
		apart func(lost *member, rest []*member)
	}{
		{"the leader cut off", func(lost *member, rest []*member) { l.cut(lost, rest...) }},
		{"the leader deaf", func(lost *member, rest []*member) { l.deafen(lost, rest...) }},
		{"the leader unheard", func(lost *member, rest []*member) {
			for _, m := range rest {
				l.deafen(m, lost)
			}
		}},
	} {
		lost := g.leader(g.members...)
		rest := g.others(lost)
		began := time.Now()
		c.apart(lost, rest)
		p := partition{t: t, g: g, lost: lost, rest: rest, keys: keys, what: c.name, fresh: round == 0}
		p.lostIsDegraded()
		degraded := time.Since(began)
		g.awaitView(rest...)
		view := time.Since(began)
		refused := p.lostTakesNoChange()
		p.restGoesOn()
		p.limitsAsTheySay()
		healed := time.Now()
		l.heal(g.members...)
		g.awaitView(g.members...)
		rejoined := time.Since(healed)
		p.whole(refused)
		t.Logf("%s: it noticed after %s, the others' view is without it after %s, and with it %s after the network healed", c.name, seconds(degraded), seconds(view), seconds(rejoined))
	}

	// A follower that does not hear the leader does not follow the ledger. It must not go on as if
	// it did: for long it neither has what is committed, nor says that it is cut off.
	lead := g.leader(g.members...)
	lost := g.others(lead)[0]
	l.deafen(lost, lead)
	g.writable(lead)
	g.writable(g.others(lead, lost)[0])
	code, _, err := g.call(lead, http.MethodPut, "kill/tenant/deny", map[string]string{"reason": "while one is deaf"}, nil)
	if code != http.StatusOK {
		t.Errorf("a kill switch while one follower does not hear the leader: %d %v", code, err)
	}
	deaf := time.Now()
	var killed bool
	lost.node.await(lost.name+" to be killed or degraded", func() bool {
		code, _, _, _ := g.chat(lost, keys["deny"], smallChat)
		killed = code == http.StatusForbidden
		return killed || metric(t, lost, "headgate_degraded") == 1
	})
	t.Logf("a follower that does not hear the leader: killed %t, else degraded, after %s", killed, seconds(time.Since(deaf)))
	l.heal(g.members...)
	g.awaitView(g.members...)
	for _, m := range g.members {
		eventually(t, "the kill switch to bind on "+m.name, func() bool { code, _, _, _ := g.chat(m, keys["deny"], smallChat); return code == http.StatusForbidden })
	}
	traffic.end()
	g.awaitSame(g.members...)
	t.Logf("%d requests answered", traffic.answered.Load())
}

// partition is what is asked while lost is cut off from rest.
type partition struct {
	t     *testing.T
	g     *group
	lost  *member
	rest  []*member
	keys  map[string]string // of tenants, which are called as their limits' unavailable
	what  string
	fresh bool // nobody has spent of the small limits yet
}

func (p *partition) ask(m *member, tenant string) (code int, degraded, text string) {
	p.t.Helper()
	code, text, h, err := p.g.chat(m, p.keys[tenant], smallChat)
	if err != nil {
		p.t.Fatalf("%s: %s did not answer: %v", p.what, m.name, err)
	}
	return code, h.Get("X-Headgate-Degraded"), text
}

// metric is one without labels; -1 if it is not there.
func metric(t *testing.T, m *member, name string) float64 {
	t.Helper()
	found := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(get(t, m.admin+"/metrics"))
	if found == nil {
		return -1
	}
	v, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// lostIsDegraded: it says so on answers, in metrics and in its status.
func (p *partition) lostIsDegraded() {
	p.t.Helper()
	p.lost.node.await(p.lost.name+" to notice that it is cut off", func() bool {
		return metric(p.t, p.lost, "headgate_degraded") == 1 && metric(p.t, p.lost, "headgate_view_lease_held") == 0
	})
	if s := look[admin.Status](p.g, p.lost, "status"); s.Degraded == "" || s.Cluster.ViewLease.Held {
		p.t.Errorf("%s: its status says nothing of it: %+v", p.what, s)
	}
	if code, degraded, _ := p.ask(p.lost, "allow"); code != http.StatusOK || degraded != "quota" {
		p.t.Errorf("%s: status %d, X-Headgate-Degraded %q", p.what, code, degraded)
	}
}

// lostTakesNoChange gives the names of kill switches that were refused.
func (p *partition) lostTakesNoChange() (refused []string) {
	p.t.Helper()
	eventually(p.t, "a plain no", func() bool {
		name := fmt.Sprintf("refused-%d", time.Now().UnixNano())
		r := p.lost.node.cli("kill", "tenant", name)
		if r.code != 1 {
			p.t.Fatalf("%s: a change without a quorum: %+v", p.what, r)
		}
		if strings.Contains(r.stderr, "may or may not") {
			return false // it was under way when the node was cut off
		}
		contains(p.t, r.stderr, "the cluster has no leader", "headgate members") // what is wrong, and a remedy
		refused = append(refused, name)
		return true
	})
	if !p.fresh {
		return refused // an answer takes five seconds
	}
	name := fmt.Sprintf("refused-%d", time.Now().UnixNano())
	if code, apiErr, err := p.g.call(p.lost, http.MethodPut, "kill/tenant/"+name, nil, nil); code != http.StatusServiceUnavailable || apiErr != admin.NoQuorum {
		p.t.Errorf("%s: status %d %s %v for a change without a quorum", p.what, code, apiErr, err)
	}
	return append(refused, name)
}

// restGoesOn: with changes, with all limits, and without a word of anything amiss.
func (p *partition) restGoesOn() {
	p.t.Helper()
	for _, m := range p.rest {
		p.g.writable(m)
		// On a busy machine the two may lose sight of each other for an instant.
		m.node.await(p.what+": "+m.name+" of the majority to serve as ever", func() bool {
			code, degraded, _ := p.ask(m, "deny")
			return code == http.StatusOK && degraded == "" && metric(p.t, m, "headgate_degraded") == 0
		})
	}
}

// limitsAsTheySay: deny refuses, local goes on with its share and ends there, allow counts nothing.
func (p *partition) limitsAsTheySay() {
	p.t.Helper()
	if code, degraded, text := p.ask(p.lost, "deny"); code != http.StatusTooManyRequests || degraded == "" || !strings.Contains(text, "over_capacity") {
		p.t.Errorf("%s: deny: status %d, X-Headgate-Degraded %q: %s", p.what, code, degraded, text)
	}
	admitted := 0
	for range 10 {
		if code, _, _ := p.ask(p.lost, "local"); code == http.StatusOK {
			admitted++
		}
		if code, _, text := p.ask(p.lost, "allow"); code != http.StatusOK {
			p.t.Errorf("%s: allow: status %d: %s", p.what, code, text)
		}
	}
	if admitted != 3 && p.fresh || admitted > 3 {
		p.t.Errorf("%s: local admitted %d, its share is 3", p.what, admitted)
	}
}

// whole: it is one of them again, with all that they have and nothing that it refused.
func (p *partition) whole(refused []string) {
	p.t.Helper()
	p.g.awaitSame(p.g.members...)
	for _, m := range p.g.members {
		for _, k := range look[[]admin.Kill](p.g, m, "kill") {
			if slices.Contains(refused, k.Name) {
				p.t.Errorf("%s: %s has the change %s, which was refused", p.what, m.name, k.Name)
			}
		}
		p.g.writable(m)
		// The next owner of a bucket waits for a second before it grants.
		m.node.await(m.name+" to have its limits decided by their owners again", func() bool {
			code, degraded, _ := p.ask(m, "deny")
			return code == http.StatusOK && degraded == "" && metric(p.t, m, "headgate_degraded") == 0
		})
	}
}
