package cluster

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"headgate/proxy/admin"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func figureOf(t *testing.T, r *Report, name string) Figure {
	t.Helper()
	for _, f := range r.Figures() {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("no figure %q in %+v", name, r.Figures())
	return Figure{}
}

func TestFiguresAreMedianPercentileAndWorst(t *testing.T) {
	r := &Report{}
	for i := 20; i >= 1; i-- {
		r.took(failover, i, time.Duration(i)*100*time.Millisecond)
	}
	r.took(changeFollower, 1, -time.Second)
	f := figureOf(t, r, failover)
	if f.N != 20 || f.Median != 1050 || f.P95 != 1900 || f.Max != 2000 || f.Single {
		t.Errorf("%+v", f)
	}
	if !f.Bounded() || f.Holds() {
		t.Errorf("1.9 s at the 95th percentile keep the aim: %s", f.line())
	}
	if f := figureOf(t, r, changeFollower); f.Max != 0 || !f.Holds() {
		t.Errorf("what came before the clock started: %+v", f)
	}
}

func TestNearestRank(t *testing.T) {
	for _, c := range []struct {
		values []float64
		q      float64
		want   float64
	}{
		{[]float64{7}, 0.95, 7},
		{[]float64{1, 2}, 0.5, 1},
		{[]float64{1, 2, 3}, 0.5, 2},
		{[]float64{1, 2, 3, 4}, 0.95, 4},
		{[]float64{1, 2, 3, 4}, 0.75, 3},
		{[]float64{1, 2, 3, 4}, 0, 1},
		{[]float64{1, 2, 3, 4}, 1, 4},
	} {
		if got := nearestRank(c.values, c.q); got != c.want {
			t.Errorf("%v of %v: %v, want %v", c.q, c.values, got, c.want)
		}
	}
}

func TestSharesAndSums(t *testing.T) {
	r := &Report{}
	for round := 1; round <= 20; round++ {
		kept := 1.0
		if round == 7 || round == 9 {
			kept = 0
		}
		r.add(keptLeader, round, kept, "")
		r.add(keptFollower, round, kept, "")
		r.add(requestsLeader, round, 500, "")
		r.add(failedLeader, round, float64(round%2), "")
	}
	r.add(lapsesHealthy, 1, 0, "")
	r.add(lapsesHealthy, 2, 1, "")
	if f := figureOf(t, r, keptLeader); f.Median != 90 || f.Detail != "18 of 20" || f.Holds() {
		t.Errorf("%+v", f)
	}
	if f := figureOf(t, r, keptFollower); f.Bounded() || !f.Holds() {
		t.Errorf("there is no aim: %+v", f)
	}
	if f := figureOf(t, r, lapsesHealthy); f.Max != 1 || f.Holds() {
		t.Errorf("one lapse: %+v", f)
	}
	if f := figureOf(t, r, failedShare); f.Median != 0.1 || f.Detail != "10 of 10000" || f.N != 20 {
		t.Errorf("%+v", f)
	}
	if f := figureOf(t, r, failedLeader); f.Median != 0.5 || f.Max != 1 {
		t.Errorf("%+v", f)
	}
}

func TestWritesAreSummedUp(t *testing.T) {
	b := &bench{fleet: &fleet{cfg: Config{Log: io.Discard}}, rep: &Report{}}
	var took []float64
	for i := range 200 {
		took = append(took, float64(i+1))
	}
	b.recordWrites(1, "the leader", 16, took, 2*time.Second)
	b.recordWrites(2, "the leader", 16, nil, 2*time.Second) // all failed: nothing to tell
	for name, want := range map[string]float64{"p50": 100, "p99": 198, "accepted": 100} {
		if f := figureOf(t, b.rep, "changes at the leader, 16 writers: "+name); f.Median != want || f.N != 1 {
			t.Errorf("%s: %+v, want %v", name, f, want)
		}
	}
}

func TestReportIsWritten(t *testing.T) {
	r := &Report{Machine: "a machine", Commit: "c0ffee", Started: time.Unix(0, 0).UTC(), Config: Config{Headgate: "x"}.withDefaults()}
	r.took(failover, 1, 400*time.Millisecond)
	r.took(failover, 2, 1200*time.Millisecond)
	r.add(keptLeader, 1, 1, "")
	r.note("said %s", "once")
	r.note("said once")
	dir := t.TempDir() + "/new"
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(dir + "/cluster.csv")
	if err != nil {
		t.Fatal(err)
	}
	lines, err := csv.NewReader(strings.NewReader(string(raw))).ReadAll()
	if err != nil || len(lines) != 4 || strings.Join(lines[2], "|") != failover+"|2|1200.000|ms" {
		t.Errorf("%v: %q", err, lines)
	}
	text, err := os.ReadFile(dir + "/cluster.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a machine", "c0ffee", "1970-01-01T00:00:00Z", "≤ 1000: MISSED", "1 of 1 ≥ 95: holds", "note: said once"} {
		if strings.Count(string(text), want) != 1 {
			t.Errorf("%q is not there once:\n%s", want, text)
		}
	}
}

const someMetrics = `# HELP headgate_view_epoch Epoch of the view.
# TYPE headgate_view_epoch gauge
headgate_view_epoch 17
headgate_view_lease_held 1
headgate_view_partitions_waiting 0 1700000000000
headgate_view_lease_lapses_total{node="x"} 9
headgate_view_lease_lapses_total 2
headgate_request_seconds_bucket{le="+Inf"} 12
`

func TestMetricsAreParsed(t *testing.T) {
	g, err := parseMetrics(strings.NewReader(someMetrics), metricEpoch, metricHeld, metricWaiting, metricLapses)
	if err != nil {
		t.Fatal(err)
	}
	if g[metricEpoch] != 17 || g[metricLapses] != 2 || len(g) != 4 {
		t.Errorf("%v", g)
	}
	if !g.settled(16) || g.settled(17) {
		t.Errorf("settled since 16: %v, since 17: %v", g.settled(16), g.settled(17))
	}
	for name, v := range map[string]float64{metricHeld: 0, metricWaiting: 1} {
		was := g[name]
		if g[name] = v; g.settled(16) {
			t.Errorf("settled with %s %v", name, v)
		}
		g[name] = was
	}
	for _, text := range []string{"", "headgate_view_epoch x\n", "headgate_view_epoch\n", "headgate_view_epochs 1\n", strings.Repeat("x", maxMetricLine+1)} {
		if g, err := parseMetrics(strings.NewReader(text), metricEpoch); err == nil {
			t.Errorf("%.40q gave %v", text, g)
		}
	}
}

func FuzzMetrics(f *testing.F) {
	f.Add(someMetrics)
	f.Add("headgate_view_epoch NaN")
	f.Fuzz(func(t *testing.T, text string) {
		g, err := parseMetrics(strings.NewReader(text), metricEpoch)
		if _, ok := g[metricEpoch]; (err == nil) != ok || len(g) > 1 {
			t.Errorf("%v, %v", g, err)
		}
	})
}

func TestWholeMembers(t *testing.T) {
	good := func() []admin.Member {
		var list []admin.Member
		for i, raft := range []string{"voter", "leader", "voter"} {
			list = append(list, admin.Member{Name: fmt.Sprintf("node-%d", i+1), Gossip: "alive", Raft: raft, InView: true, ViewLease: true, AppliedIndex: 40})
		}
		return list
	}
	if leader, err := wholeMembers(good(), 3); err != nil || leader != "node-2" {
		t.Errorf("%q, %v", leader, err)
	}
	if _, err := wholeMembers(good(), 4); err == nil {
		t.Error("one is missing")
	}
	for name, spoil := range map[string]func(*admin.Member){
		"failed":     func(m *admin.Member) { m.Gossip = "failed" },
		"error":      func(m *admin.Member) { m.Error = "no answer" },
		"no view":    func(m *admin.Member) { m.InView = false },
		"no lease":   func(m *admin.Member) { m.ViewLease = false },
		"behind":     func(m *admin.Member) { m.AppliedIndex = 30 },
		"ahead":      func(m *admin.Member) { m.AppliedIndex = 50 },
		"non-voter":  func(m *admin.Member) { m.Raft = "non-voter" },
		"leaderless": func(m *admin.Member) { m.Raft = "voter" },
	} {
		list := good()
		spoil(&list[1])
		if leader, err := wholeMembers(list, 3); err == nil {
			t.Errorf("%s: whole, %s leads", name, leader)
		}
	}
}

func TestOwnedBy(t *testing.T) {
	owners := map[string]string{"a": "node-1", "b": "node-2", "c": "node-1"}
	if x, y := ownedBy(owners, "node-1", 1), ownedBy(owners, "node-1", 2); x != "c" || y != "a" {
		t.Errorf("%s, %s", x, y)
	}
	if x := ownedBy(owners, "node-3", 1); x != "" {
		t.Errorf("node-3 owns %s", x)
	}
}

func TestPollLooksOftenAndNotForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, looks := time.Now(), 0
		err := poll(t.Context(), pollEvery, time.Second, func(context.Context) (bool, error) {
			looks++
			return looks == 4, nil
		})
		if err != nil || time.Since(began) != 3*pollEvery {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		sad := errors.New("sad")
		began = time.Now()
		err = poll(t.Context(), pollEvery, time.Second, func(context.Context) (bool, error) { return false, sad })
		if !errors.Is(err, errTimeout) || !errors.Is(err, sad) || time.Since(began) != time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if err := poll(t.Context(), pollEvery, time.Second, func(context.Context) (bool, error) { return true, sad }); !errors.Is(err, sad) || errors.Is(err, errTimeout) {
			t.Errorf("a last word: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := poll(ctx, pollEvery, time.Second, func(context.Context) (bool, error) { return false, nil }); !errors.Is(err, context.Canceled) {
			t.Errorf("canceled: %v", err)
		}
	})
}

func TestConfigRefusesWhatMakesNoSense(t *testing.T) {
	for _, c := range []Config{
		{},
		{Headgate: "x", Nodes: 2},
		{Headgate: "x", Nodes: 10},
		{Headgate: "x", Rounds: -1},
		{Headgate: "x", Watch: -1},
		{Headgate: "x", Each: 2 * time.Hour},
		{Headgate: "x", Rate: -1},
		{Headgate: "x", Writers: []int{0}},
	} {
		if _, err := Run(t.Context(), c); err == nil {
			t.Errorf("ran %+v", c)
		}
	}
	c := Config{Headgate: "x", Rounds: 7, Quick: true}.withDefaults()
	if c.Rounds != 7 || c.Nodes != 3 || c.Watch != 2*time.Second {
		t.Errorf("%+v", c)
	}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

// script plays a survivor: what it says changes with how often it was asked.
type script struct {
	tenants, metrics, chats atomic.Int64
	killed                  atomic.Bool
	refuseAfter             int64 // chats answered after the kill
	lapses                  int
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/admin/v1/tenants":
		owner := "victim"
		if s.tenants.Add(1) > 3 {
			owner = "node"
		}
		fmt.Fprintf(w, `[{"name": "acme", "owner": %q}]`, owner)
	case r.URL.Path == "/metrics":
		waiting := 0
		if s.metrics.Add(1) < 4 {
			waiting = 99
		}
		fmt.Fprintf(w, "%s 5\n%s 3\n%s 1\n%s %d\n%s %d\n", metricEpoch, metricMembers, metricHeld, metricWaiting, waiting, metricLapses, s.lapses)
	case strings.HasPrefix(r.URL.Path, "/v1/"):
		if s.killed.Load() && s.chats.Add(1) > s.refuseAfter {
			w.WriteHeader(http.StatusForbidden)
		}
	default: // a change
		fmt.Fprint(w, `{}`)
	}
}

// played is a bench whose nodes are scripts.
func played(t *testing.T, scripts ...*script) *bench {
	t.Helper()
	f := &fleet{cfg: Config{Headgate: "x"}.withDefaults(), client: &http.Client{Transport: newTransport()}}
	t.Cleanup(f.client.CloseIdleConnections)
	for i, s := range scripts {
		srv := httptest.NewServer(s)
		t.Cleanup(srv.Close)
		addr := strings.TrimPrefix(srv.URL, "http://")
		f.nodes = append(f.nodes, &node{name: fmt.Sprintf("node-%d", i+1), front: addr, admin: addr})
	}
	return &bench{fleet: f, rep: &Report{}}
}

func TestADeathIsRecorded(t *testing.T) {
	quiet, lapsing := &script{}, &script{lapses: 2}
	b := played(t, quiet, lapsing)
	before := map[*node]gauges{}
	for _, n := range b.nodes {
		before[n] = gauges{metricEpoch: 4}
	}
	d := &death{victim: &node{name: "victim"}, survivors: b.nodes, tenant: "acme", before: before}
	if err := b.die(t.Context(), d, true, 1); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.problems[:]...); err != nil {
		t.Fatal(err)
	}
	if quiet.tenants.Load() != 4 || lapsing.metrics.Load() != 5 {
		t.Errorf("asked %d and %d times, want 4 and 5: once more than until it is settled", quiet.tenants.Load(), lapsing.metrics.Load())
	}
	if d.detected.Before(d.at) || d.settled.Before(d.detected) || d.accepted.Before(d.at) {
		t.Errorf("killed %v, accepted %v, detected %v, settled %v", d.at, d.accepted, d.detected, d.settled)
	}
	if err := b.record(t.Context(), d, 1, true, 500, 2); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{failover, detectLeader, changeLeader} {
		if v := b.rep.values(name); len(v) != 1 || v[0] < 0 {
			t.Errorf("%s: %v", name, v)
		}
	}
	if b.rep.total(keptLeader) != 0 || b.rep.total(failedLeader) != 2 || b.rep.total(requestsLeader) != 500 {
		t.Errorf("%+v", b.rep.Rows)
	}
	if len(b.rep.Notes) != 1 || !strings.Contains(b.rep.Notes[0], "node-2 lapsed 2 times") {
		t.Errorf("%q", b.rep.Notes)
	}
}

func TestAWaitWithoutEndCountsAsItsBound(t *testing.T) {
	b := played(t, &script{})
	at := time.Now()
	d := &death{victim: &node{name: "victim"}, survivors: b.nodes, before: map[*node]gauges{b.nodes[0]: {}}, at: at, detected: at.Add(2 * waitBound), problems: [2]error{errTimeout, errTimeout}}
	if err := b.record(t.Context(), d, 3, true, 1, 0); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{failover, detectLeader, changeLeader} {
		if v := b.rep.total(name); v != float64(waitBound.Milliseconds()) {
			t.Errorf("%s: %v ms", name, v)
		}
	}
	if len(b.rep.Notes) != 2 {
		t.Errorf("%q", b.rep.Notes)
	}
}

func TestAChangeIsFollowedToEveryFrontDoor(t *testing.T) {
	at, late := &script{}, &script{refuseAfter: 5}
	b := played(t, at, late)
	w, err := b.refused(t.Context(), "key", http.StatusForbidden, func() error {
		at.killed.Store(true)
		late.killed.Store(true)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if w.admitted.After(w.sent) || w.accepted.Before(w.sent) || w.last.Before(w.sent) {
		t.Errorf("%+v", w)
	}
	if n := late.chats.Load(); n != 6 {
		t.Errorf("the last node was asked %d times after the change, want 6", n)
	}
	sad := errors.New("sad")
	at.killed.Store(false)
	late.killed.Store(false)
	if _, err := b.refused(t.Context(), "key", http.StatusForbidden, func() error { return sad }); !errors.Is(err, sad) {
		t.Errorf("a change that failed: %v", err)
	}
}

func TestPortsAreFree(t *testing.T) {
	p, err := freePorts(clusterPorts, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !free(p, clusterPorts, nil) {
		t.Errorf("%d is taken", p)
	}
	if free(p, clusterPorts, []int{p + clusterPorts - 1}) {
		t.Error("what is taken is free")
	}
}

func TestSecretsOfARunAreItsOwn(t *testing.T) {
	if a, b := secret(), secret(); a == b || len(a) < 64 {
		t.Errorf("%d characters", len(a))
	}
}
