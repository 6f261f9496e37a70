package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cache"
	"headgate/cluster/ledger"
	"headgate/proxy"
	"headgate/proxy/admin"
)

// watching is a cacheWatch whose clock stands.
func watching(reg prometheus.Registerer, now *int64) *cacheWatch {
	return newCacheWatch(func() *ledger.Caches { return nil }, func() int64 { return *now }, reg)
}

// gathered are the values of a metric with one label, by it.
func gathered(t *testing.T, reg *prometheus.Registry, name string) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				out[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return out
}

func TestCacheWatchAdapts(t *testing.T) {
	now := int64(time.Hour)
	reg := prometheus.NewRegistry()
	w := watching(reg, &now)
	asked := 0
	for range 128 {
		w.Note(&proxy.CacheEvent{Tenant: "acme", Surface: "faq", Outcome: "miss", Context: func() proxy.CacheContext {
			asked++
			return proxy.CacheContext{Tenant: "acme", Surface: "faq", Body: []byte(`{"a":1}`)}
		}})
	}
	for range 32 {
		w.Note(&proxy.CacheEvent{Tenant: "acme", Surface: "faq", Outcome: "exact", SavedNanoUSD: 5, Personal: true})
	}
	w.Note(&proxy.CacheEvent{Tenant: "acme", Surface: "faq", Outcome: "uncacheable", Why: "n: several", Personal: true})
	if asked != 2 {
		t.Errorf("of 128 misses %d were looked at", asked)
	}
	got := cacheSurfaces(w.watch.Snapshot(now))
	want := `[{"tenant":"acme","surface":"faq","personal":true,"requests":161,"exact":32,"stale":0,"live":0,"semantic":0,"misses":128,"partial":0,"bypass":0,"failed":0,` +
		`"uncacheable":{"n":1},"saved_usd":"0.00000016","hit_rate":0.2,"recent_hit_rate":0.2,"recent_requests":160}]`
	if raw, err := json.Marshal(got); err != nil || string(raw) != want {
		t.Errorf("%s, %v", raw, err)
	}

	w.Asked(&proxy.PromptEvent{Tenant: "acme", Surface: "faq", Template: "v2", Model: "m", Body: []byte(`{"prompt":"p"}`), Input: 100, CachedInput: 40})
	prefixes := cachePrefixes(w.prefixes.Lint(func(string) int64 { return 0 }))
	if len(prefixes) != 1 || prefixes[0] != (admin.CachePrefix{Tenant: "acme", Surface: "faq", Template: "v2", Model: "m", Requests: 1, Input: 100, Cached: 40, Share: 0.4, Finding: "few"}) {
		t.Errorf("%+v", prefixes)
	}
	for i := range maxModelLabels + 50 {
		w.Asked(&proxy.PromptEvent{Model: fmt.Sprint("m", i), Input: 1})
	}
	if got := gathered(t, reg, "headgate_prefix_input_tokens_total"); len(got) != maxModelLabels+1 || got["m"] != 100 || got["other"] != 51 {
		t.Errorf("%d models have a label: %v", len(got), got)
	}
	if got := gathered(t, reg, "headgate_cache_hit_ratio"); len(got) != 1 || got["faq"] != 0.2 {
		t.Errorf("%v", got)
	}
	hit := &proxy.CacheEvent{Tenant: "acme", Surface: "faq", Outcome: "exact", SavedNanoUSD: 5, Context: func() proxy.CacheContext { return proxy.CacheContext{} }}
	prompt := &proxy.PromptEvent{Tenant: "a", Model: "m", Input: 1, CachedInput: 1}
	for name, f := range map[string]func(){"a hit": func() { w.Note(hit) }, "a prompt": func() { w.Asked(prompt) }} {
		for range 40 { // of the first prompts each is looked at
			f()
		}
		if n := testing.AllocsPerRun(20, f); n > 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

// TestCacheAlerts: what goes wrong is logged, counted, and told by a node that does not lead, once.
func TestCacheAlerts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		h := &hooked{answer: func(notice) (int, error) { return 0, errors.New("refused") }}
		n := &Node{log: slog.New(slog.NewTextHandler(&log, nil)), cfg: Config{NodeID: "gw-1", ClusterName: "prod"}}
		now := int64(0)
		reg := prometheus.NewRegistry()
		n.cacheWatch = watching(reg, &now)
		policy := &ledger.Policy{}
		n.now.index = &ledger.Index{Policy: policy}
		alert := &cache.Alert{Kind: cache.AlertNever, Tenant: "acme", Surface: "faq", Text: "it is so", Parts: []string{"user"}, Requests: 500}
		n.alertCache(alert)
		if len(n.cacheNotices.waiting) != 0 {
			t.Error("it waits for a webhook that the policy does not have")
		}
		policy.Notify.Webhook = "https://hook.example/secret-path"
		n.alertCache(alert)
		for _, want := range []string{"kind=never", "tenant=acme", "surface=faq", `text="it is so"`, "parts=[user]", "requests=500"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("no %s in %s", want, log.String())
			}
		}
		if got := gathered(t, reg, "headgate_cache_alerts_total"); got["never"] != 2 {
			t.Errorf("%v alerts were counted", got)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		tell := n.cacheNotifier(&notifier{hook: n.webhook, client: &http.Client{Transport: h}})
		wg.Go(func() { tell.run(ctx) })
		time.Sleep(time.Hour) // of the bubble's
		synctest.Wait()
		h.mu.Lock()
		if len(h.got) < 2 || h.got[0].ID != h.got[1].ID {
			t.Errorf("a webhook that refuses got %+v", h.got)
		}
		h.got, h.answer = nil, func(notice) (int, error) { return 200, nil }
		h.mu.Unlock()
		time.Sleep(time.Hour)
		synctest.Wait()
		h.mu.Lock()
		if len(h.got) != 1 {
			t.Fatalf("told %d times", len(h.got))
		}
		got := h.got[0]
		h.mu.Unlock()
		raw, err := json.Marshal(got)
		want := fmt.Sprintf(`{"id":%q,"event":"cache.never","text":"it is so","cluster":"prod","node":"gw-1","time":%q,"tenant":"acme","surface":"faq","parts":["user"]}`, got.ID, got.Time.Format(time.RFC3339Nano))
		if err != nil || string(raw) != want || len(got.ID) != 32 {
			t.Errorf("%s\nwant %s\n%v", raw, want, err)
		}
		if strings.Contains(log.String(), "secret-path") {
			t.Error("the log has the webhook's address")
		}
		cancel()
		wg.Wait()
	})
}

func TestCacheNoticesAreBounded(t *testing.T) {
	var c cacheNotices
	at := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	for i := range maxCacheNotices + 10 {
		c.add(&notice{ID: fmt.Sprint(i), Time: at.Add(time.Duration(i) * time.Minute)})
	}
	list := c.pending(3, at.Add(noticeStale+11*time.Minute))
	if len(c.waiting) != maxCacheNotices || len(list) != 3 || list[0].ID != "10" || !list[0].stale || list[1].stale {
		t.Errorf("%d wait, the first are %+v", len(c.waiting), list)
	}
	c.told("10")
	if list := c.pending(1, at); list[0].ID != "11" {
		t.Errorf("%+v", list)
	}
}
