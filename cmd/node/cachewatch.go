package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cache"
	"headgate/cluster/ledger"
	"headgate/proxy"
	"headgate/proxy/admin"
)

// Bounds of what is told of the cache.
const (
	watchEvery       = 30 * time.Second
	maxSurfaceLabels = 100 // then other
	maxModelLabels   = 200 // then other
	maxCacheNotices  = 64  // that wait for the webhook; then the oldest go
)

// cacheWatch is who watches the cache of this node, as the front door knows it.
type cacheWatch struct {
	watch    *cache.Watch
	prefixes *cache.Prefixes
	caches   func() *ledger.Caches
	now      func() int64

	input, cached, alerts *prometheus.CounterVec

	mu     sync.Mutex
	models map[string]modelTokens
}

// modelTokens are the counters of one model.
type modelTokens struct{ input, cached prometheus.Counter }

func newCacheWatch(caches func() *ledger.Caches, now func() int64, reg prometheus.Registerer) *cacheWatch {
	counter := func(name, help, label string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
		reg.MustRegister(c)
		return c
	}
	w := &cacheWatch{
		watch: cache.NewWatch(), prefixes: cache.NewPrefixes(), caches: caches, now: now, models: make(map[string]modelTokens),
		input:  counter("headgate_prefix_input_tokens_total", "Input tokens of generating requests that were of a surface and that a model answered.", "model"),
		cached: counter("headgate_prefix_cached_tokens_total", "Of those, the ones that the backend took from its prefix cache, by its own word.", "model"),
		alerts: counter("headgate_cache_alerts_total", "Alerts of the cache, by kind (drop, never, rise).", "kind"),
	}
	reg.MustRegister(w)
	return w
}

// Note see proxy.CacheWatch.
func (w *cacheWatch) Note(e *proxy.CacheEvent) {
	ev := cache.Event{Tenant: e.Tenant, Surface: e.Surface, Outcome: e.Outcome, Why: e.Why, Personal: e.Personal, SavedNanoUSD: e.SavedNanoUSD}
	if e.Context != nil {
		ev.Context = func() *cache.Context {
			c := cache.Context(e.Context())
			c.Generations = w.caches().Generation(c.Tenant, c.Surface)
			return &c
		}
	}
	w.watch.Note(&ev, w.now())
}

// Asked see proxy.CacheWatch.
func (w *cacheWatch) Asked(e *proxy.PromptEvent) {
	t := w.tokens(e.Model)
	t.input.Add(float64(e.Input))
	t.cached.Add(float64(e.CachedInput))
	w.prefixes.Note(&cache.Prompt{
		Tenant: e.Tenant, Surface: e.Surface, Template: e.Template, Model: e.Model, Body: e.Body, Input: e.Input, Cached: e.CachedInput,
	}, w.now())
}

// tokens are the counters of a model.
func (w *cacheWatch) tokens(model string) modelTokens {
	w.mu.Lock()
	defer w.mu.Unlock()
	t, ok := w.models[model]
	if ok {
		return t
	}
	label := model
	if len(w.models) >= maxModelLabels {
		label = cache.OtherWatched
	}
	t = modelTokens{w.input.WithLabelValues(label), w.cached.WithLabelValues(label)}
	if label == model {
		w.models[model] = t
	}
	return t
}

// hitRatio is the gauge of surfaces.
func hitRatio() *prometheus.Desc {
	return prometheus.NewDesc("headgate_cache_hit_ratio", "Hits of what was looked up in the last ten minutes, 0 to 1; of surfaces that were asked for then.", []string{"surface"}, nil)
}

// Describe see prometheus.Collector.
func (w *cacheWatch) Describe(ch chan<- *prometheus.Desc) { ch <- hitRatio() }

// Collect see prometheus.Collector.
func (w *cacheWatch) Collect(ch chan<- prometheus.Metric) {
	for _, s := range w.watch.Surfaces(w.now(), maxSurfaceLabels) {
		if s.Lookups > 0 {
			ch <- prometheus.MustNewConstMetric(hitRatio(), prometheus.GaugeValue, float64(s.Hits)/float64(s.Lookups), s.Surface)
		}
	}
}

// cacheLines are what this node's cache did, and what providers' prefix caches did.
func (n *Node) cacheLines() ([]admin.CacheSurface, []admin.CachePrefix) {
	least := make(map[string]int64)
	if s := n.current(); s.index != nil {
		for i := range s.index.Models {
			least[s.index.Models[i].Name] = s.index.Models[i].PrefixMinimum
		}
	}
	w := n.cacheWatch
	return cacheSurfaces(w.watch.Snapshot(w.now())), cachePrefixes(w.prefixes.Lint(func(model string) int64 { return least[model] }))
}

func cacheSurfaces(lines []cache.Line) []admin.CacheSurface {
	out := make([]admin.CacheSurface, 0, len(lines))
	for i := range lines {
		l := &lines[i]
		s := admin.CacheSurface{
			Tenant: l.Tenant, Surface: l.Surface, Personal: l.Personal, Requests: l.Requests, Exact: l.Exact, Stale: l.Stale, Live: l.Live, Semantic: l.Semantic,
			Misses: l.Misses, Partial: l.Partial, Bypass: l.Bypass, Failed: l.Failed, Uncacheable: l.Uncacheable, Saved: admin.USD(l.SavedNanoUSD),
			HitRate: l.HitRate, Recent: l.Recent, RecentOf: l.RecentOf, Unkept: l.Unkept, StaleIfError: l.StaleIfError,
		}
		for _, kind := range l.Alerts {
			s.Alerts = append(s.Alerts, kind.String())
		}
		out = append(out, s)
	}
	return out
}

func cachePrefixes(findings []cache.Finding) []admin.CachePrefix {
	out := make([]admin.CachePrefix, 0, len(findings))
	for i := range findings {
		f := &findings[i]
		out = append(out, admin.CachePrefix{
			Tenant: f.Tenant, Surface: f.Surface, Template: f.Template, Model: f.Model, Requests: f.Requests, Input: f.Input, Cached: f.Cached,
			Share: f.Share, Prompt: f.Prompt, Prefix: f.Prefix, Finding: string(f.Kind), Text: f.Text,
		})
	}
	return out
}

// cacheNotices are alerts that wait for the webhook. They are this node's own, and lost with it: the log has
// them, too.
type cacheNotices struct {
	mu      sync.Mutex
	waiting []notice // the oldest first
}

func (c *cacheNotices) add(n *notice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) >= maxCacheNotices {
		c.waiting = slices.Delete(c.waiting, 0, 1)
	}
	c.waiting = append(c.waiting, *n)
}

// pending are those that wait, at most that many.
func (c *cacheNotices) pending(most int, now time.Time) []notice {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := slices.Clone(c.waiting[:min(most, len(c.waiting))])
	for i := range out {
		out[i].stale = now.Sub(out[i].Time) > noticeStale
	}
	return out
}

// told forgets one.
func (c *cacheNotices) told(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = slices.DeleteFunc(c.waiting, func(n notice) bool { return n.ID == id })
}

// cacheNotifier tells the webhook of this node's cache by the means of the one that tells of budgets.
func (n *Node) cacheNotifier(budgets *notifier) *notifier {
	return &notifier{
		leads: func() bool { return true }, // every node tells of what it saw itself
		hook:  budgets.hook, client: budgets.client, log: n.log,
		pending: func(most int) []notice { return n.cacheNotices.pending(most, n.wall()) },
		told: func(_ context.Context, told notice) error {
			n.cacheNotices.told(told.ID)
			return nil
		},
	}
}

// watchCaches logs what goes wrong with the cache, and has people told.
func (n *Node) watchCaches(ctx context.Context) {
	t := time.NewTicker(watchEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		for _, a := range n.cacheWatch.watch.Alerts(n.ticks()) {
			n.alertCache(&a)
		}
	}
}

func (n *Node) alertCache(a *cache.Alert) {
	n.cacheWatch.alerts.WithLabelValues(a.Kind.String()).Inc()
	n.log.Warn("the cache of a surface needs a look", slog.String("kind", a.Kind.String()), slog.String("tenant", a.Tenant), slog.String("surface", a.Surface),
		slog.String("text", a.Text), slog.Any("parts", a.Parts), slog.Int64("requests", a.Requests), slog.Float64("hit_rate", a.Rate), slog.Float64("hit_rate_before", a.Before))
	if _, ok := n.webhook(); !ok {
		return
	}
	notice := noticeOfCache(a, n.wall())
	notice.Cluster, notice.Node = n.cfg.ClusterName, n.cfg.NodeID
	notice.ID = cacheNoticeID(&notice)
	n.cacheNotices.add(&notice)
}

func noticeOfCache(a *cache.Alert, now time.Time) notice {
	return notice{Event: "cache." + a.Kind.String(), Text: a.Text, Time: now.UTC(), Tenant: a.Tenant, Surface: a.Surface, Parts: a.Parts}
}

func cacheNoticeID(n *notice) string {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q %q %q %d", n.Event, n.Cluster, n.Node, n.Tenant, n.Surface, n.Time.UnixNano())
	return hex.EncodeToString(h.Sum(nil)[:16])
}
