package proxy

import (
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/limiter"
)

// TestSwitchesCostNothing: what every request passes allocates nothing, thrown or not.
func TestSwitchesCostNothing(t *testing.T) {
	p, err := New(Config{Registerer: prometheus.NewRegistry(), Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	others := map[string]*Kill{"other": {}}
	p.SetSwitches(&Switches{Tenants: others, Keys: others, Models: others, Rungs: map[string]time.Time{"shed_best_effort": {}, "smaller_model": time.Unix(1, 0)}})
	p.SetOverride(Allow, time.Now().Add(time.Hour))
	l := Limit{Name: "l", Bucket: "l", Scope: ScopeKey, Spec: &limiter.Limit{Burst: 1}}
	m := &Model{Name: "m"}
	x := &exchange{p: p, r: &http.Request{}, start: time.Now(), user: "u", asked: m, routed: m, model: m, route: &route{generate: true}, caller: &Caller{KeyID: "k", Tenant: "t", Limits: []Limit{l, l, l}}}
	keep := func(*Limit) bool { return true }
	for _, by := range []limiter.By{limiter.ByLease, limiter.ByOwner, limiter.ByAllow} {
		x.res.degraded = false
		ok := true
		if n := testing.AllocsPerRun(100, func() {
			x.descend()
			ok = ok && x.killed("m", m) == nil && x.shed(m) == nil
			x.charge(0, keep)
			x.res.decisions[2].By = by
			x.res.decided()
			ok = ok && x.res.n == 3 && x.res.charges[1].Apart == limiter.ByAllow && (x.degraded() == "quota") == (by == limiter.ByAllow)
		}); n != 0 || !ok {
			t.Errorf("%v: %v allocations, right %t", by, n, ok)
		}
	}
}
