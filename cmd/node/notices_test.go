package node

import (
	"errors"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cluster/ledger"
)

func TestNoticesAreCounted(t *testing.T) {
	h := &hooked{}
	reg := prometheus.NewRegistry()
	n := h.notifier()
	n.client = &http.Client{Transport: countNotices(reg, h)}
	for _, a := range []struct {
		status int
		err    error
	}{{200, nil}, {204, nil}, {302, nil}, {503, nil}, {0, errors.New("refused")}} {
		h.answer = func(notice) (int, error) { return a.status, a.err }
		if _, err := n.post(t.Context(), webhook{url: "http://hook.example"}, &notice{}); (err == nil) != (a.status/100 == 2) {
			t.Errorf("%d: %v", a.status, err)
		}
	}
	got := map[string]float64{}
	families, err := reg.Gather()
	if err != nil || len(families) != 1 || families[0].GetName() != "headgate_notices_total" {
		t.Fatal(families, err)
	}
	for _, m := range families[0].GetMetric() {
		got[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
	}
	if want := map[string]float64{"sent": 2, "failed": 3}; !maps.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

func TestTokenless(t *testing.T) {
	t.Setenv("HOOK_IS_SET", "x")
	n := &Node{cfg: Config{NodeID: "gw-2"}}
	for env, want := range map[string]string{"": "", "HOOK_IS_SET": "", "HOOK_IS_NOT": "notify.token_env: HOOK_IS_NOT is not set on node gw-2: "} {
		p := &ledger.Policy{}
		p.Notify.Webhook, p.Notify.TokenEnv = "https://hook.example/", env
		if got := n.tokenless(p); !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q", env, got)
		}
	}
	if got := n.tokenless(&ledger.Policy{}); got != "" {
		t.Errorf("%q", got)
	}
}
