//go:build linux

package main_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"headgate/cluster"
)

// TestLeasesSoak: nodes are cut off, deafened, stopped, killed and restarted by chance, under load, for
// HEADGATE_SOAK; no limit that says deny is ever exceeded by a decision, no window, and no tenant's slots
// but by streams behind a partition.
func TestLeasesSoak(t *testing.T) {
	heavy(t)
	length, err := time.ParseDuration(os.Getenv("HEADGATE_SOAK"))
	if err != nil {
		t.Skip("HEADGATE_SOAK says for how long: make soak")
	}
	if !insideFor(t, length+2*time.Minute, "iptables") {
		return
	}
	l := newLAN(t, 3)
	up := newArrivals(t, serviceHost+":8000")
	limits := map[string]string{}
	for i := range 3 {
		limits[fmt.Sprintf("deny-%d", i)] = denyLimits
		limits[fmt.Sprintf("window-%d", i)] = "{name: requests, scope: org, unit: requests, rate: 60/2s, algorithm: fixed_window, unavailable: deny}"
	}
	f := newFleet(t, 3, up, limits, l.place)
	var loads []*pressure
	for i := range 3 {
		loads = append(loads, f.press(fmt.Sprintf("deny-%d", i), 150, want{tokens: 10}), f.press(fmt.Sprintf("window-%d", i), 60, want{tokens: 10}))
	}
	wall := time.Now().UnixNano() - cluster.Now()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	began := cluster.Now()
	for round := 0; cluster.Now() < began+int64(length); round++ {
		m := f.members[r.IntN(3)]
		rest := f.others(m)
		what := []string{"cut off", "deaf", "unheard", "stopped", "killed", "paused"}[r.IntN(6)]
		t.Logf("%s: %s is %s", seconds(time.Duration(cluster.Now()-began)), m.name, what)
		switch what {
		case "cut off":
			l.cut(m, rest...)
		case "deaf":
			l.deafen(m, rest[r.IntN(2)])
		case "unheard":
			l.deafen(rest[0], m)
			l.deafen(rest[1], m)
		case "stopped":
			m.end(syscall.SIGTERM)
		case "killed":
			m.end(syscall.SIGKILL)
		case "paused":
			m.serving.Store(false)
			m.life.Add(1)
			m.node.signal(syscall.SIGSTOP)
		}
		f.lasting(time.Duration(r.Int64N(int64(4 * time.Second))))
		switch what {
		case "stopped", "killed":
			m.up()
		case "paused":
			m.node.signal(syscall.SIGCONT)
			m.serving.Store(true)
		}
		l.heal(f.members...)
		f.awaitView(f.members...)
		f.lasting(time.Duration(r.Int64N(int64(2 * time.Second))))
		if t.Failed() {
			break
		}
	}
	for _, p := range loads {
		p.stop()
		t.Log(p)
	}
	all := f.decisions()
	for tenant := range f.keys {
		if tenant[0] == 'd' {
			f.conform("soak", all, tenant, "requests", denyPace, 1, whole())
		} else {
			f.windowsHold(all, tenant, 60, 2*time.Second, began, wall)
		}
	}
}

// windowsHold: no window of a tenant's limit gave more than it has.
func (f *fleet) windowsHold(all []taken, tenant string, most int64, per time.Duration, began, wall int64) {
	f.t.Helper()
	counts := map[int64][]taken{}
	for _, d := range all {
		if d.tenant == tenant {
			w := (d.at + wall) / int64(per)
			counts[w] = append(counts[w], d)
		}
	}
	for w, ts := range counts {
		if n := units(ts); n > most {
			begins := w*int64(per) - wall
			f.t.Errorf("%s: %d in a window of %d that began %s after the load:\n%s", tenant, n, most, seconds(time.Duration(begins-began)), excerpt(ts, verdict{from: begins, to: begins + int64(per)}))
		}
	}
}
