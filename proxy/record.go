package proxy

import (
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/limiter"
	"headgate/proxy/ladder"
)

// metrics of the front door. Label sets are bounded: models and limits are the policy's,
// tenants are capped.
type metrics struct {
	requests    *prometheus.CounterVec
	decisions   *prometheus.CounterVec
	decided     prometheus.Histogram
	tokens      *prometheus.CounterVec
	seconds     *prometheus.HistogramVec
	ttft        *prometheus.HistogramVec
	spend       *prometheus.CounterVec
	inflight    prometheus.Gauge
	slots       prometheus.Gauge
	implausible prometheus.Counter
	budgets     *prometheus.CounterVec
	spent, left *prometheus.GaugeVec
	overrun     prometheus.Counter
	cache       *prometheus.CounterVec
	savings     *prometheus.CounterVec
	unkept      *prometheus.CounterVec
	shed        *prometheus.CounterVec
	retries     *prometheus.CounterVec
	again       *prometheus.CounterVec
	degraded    *prometheus.CounterVec

	mu      sync.Mutex
	tenants map[string]bool
}

// maxTenantLabels is how many tenants have metrics of their own; the rest share `other`.
const maxTenantLabels = 1000

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_requests_total", Help: "Requests by outcome (ok, refused, over_capacity, client_error, upstream_error, client_gone, failed) and model."}, []string{"outcome", "model"}),
		decisions:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_decisions_total", Help: "Decisions by limit, mode (local: out of a lease; direct: by the owner, asked; refused_local: as the owner said before; degraded: without the owner) and outcome (admitted, refused, shadow_refused)."}, []string{"limit", "mode", "outcome"}),
		decided:     prometheus.NewHistogram(prometheus.HistogramOpts{Name: "headgate_decision_seconds", Help: "One decision over all limits of a request, with what asking the owners took and without the wait of a limit.", Buckets: prometheus.ExponentialBuckets(1e-7, 4, 12)}),
		tokens:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_tokens_total", Help: "Tokens by kind and model. Once nothing is in flight, reserved - refunded + debt = settled."}, []string{"kind", "model"}),
		seconds:     prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "headgate_request_seconds", Help: "From the request's head to its end, by path (upstream, local, refused).", Buckets: prometheus.ExponentialBuckets(0.0005, 2, 20)}, []string{"path"}),
		ttft:        prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "headgate_ttft_seconds", Help: "From the request's head to the first byte of the answer.", Buckets: prometheus.ExponentialBuckets(0.001, 2, 16)}, []string{"model"}),
		spend:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_spend_usd_total", Help: "Settled cost in dollars."}, []string{"tenant"}),
		inflight:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "headgate_inflight_requests", Help: "Requests in the gateway."}),
		slots:       prometheus.NewGauge(prometheus.GaugeOpts{Name: "headgate_inflight_reservations", Help: "Reservations not yet settled."}),
		implausible: prometheus.NewCounter(prometheus.CounterOpts{Name: "headgate_usage_implausible_total", Help: "Answers whose reported usage could not be true and was not believed."}),
		budgets:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_budget_decisions_total", Help: "Decisions by budget and outcome (admitted; clamped: admitted with a shorter answer; exhausted; in_flight: held by requests not yet settled; unavailable: no budget could be decided on)."}, []string{"budget", "outcome"}),
		spent:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "headgate_budget_spent_usd", Help: "Spent of a tenant's or the fleet's budget in its period, in dollars, as this node saw it last. Budgets of keys, users and models are not shown."}, []string{"tenant", "budget"}),
		left:        prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "headgate_budget_remaining_usd", Help: "What was left of it, in dollars."}, []string{"tenant", "budget"}),
		overrun:     prometheus.NewCounter(prometheus.CounterOpts{Name: "headgate_strict_overruns_total", Help: "Answers that cost more than their strict budgets had reserved: the backend does not keep to its caps, or the policy to the model's context."}),
		cache:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_cache_requests_total", Help: "Requests that the cache had to do with, by tier and outcome (exact: answered by what is kept; stale: that is being refreshed, or the model failed; live: by another request's answer; stale_if_error; failed: by its error; miss: the model was asked; partial: for some of the inputs; refresh; uncacheable; bypass; of the semantic tier: hit, miss, explore, audit, shadow, unfit, failed)."}, []string{"tier", "outcome"}),
		savings:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_cache_saved_usd_total", Help: "What answers of the cache would have cost, in dollars."}, []string{"tenant"}),
		shed:        prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_dropped_total", Help: "Requests refused for want of capacity, by reason, as X-Headgate-Dropped has it (shed_cost, shed_tier, shed_class: before anything was spent; queue_full, ttl_expired, evicted: by the queue; no_backend)."}, []string{"reason"}),
		retries:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_client_retries_total", Help: "Requests that their client library had sent before, by how often (1, 2, 3+): a storm of them shows here."}, []string{"attempt"}),
		again:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_backend_retries_total", Help: "Requests sent to another backend before a byte of an answer had come, by reason (unsent: the first can't have had it; lost: it went down; pushed_back: it had no capacity; garbage: its answer was none; denied: it does not take the gateway's credential; not_there: it has no such model)."}, []string{"reason"}),
		degraded:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_degraded_answers_total", Help: "Answers that a rung of the ladder made less than what was asked for, or took the place of, by rung: of several each counts."}, []string{"rung"}),
		unkept:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headgate_cache_unkept_total", Help: "Answers that a model gave and that are not kept, by reason (length, tools, timestamps, max_bytes, private: the backend says so; incomplete; cut: to a budget; shape: it can't be looked into)."}, []string{"reason"}),
		tenants:     map[string]bool{},
	}
	for _, c := range []prometheus.Collector{m.requests, m.decisions, m.decided, m.tokens, m.seconds, m.ttft, m.spend, m.inflight, m.slots, m.implausible, m.budgets, m.spent, m.left, m.overrun, m.cache, m.savings, m.unkept, m.shed, m.retries, m.again, m.degraded} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	for _, r := range ladder.Rungs() {
		m.degraded.WithLabelValues(r.String()) // so that an alarm finds it before the first
	}
	return m, nil
}

// degradedGauge shows Degraded.
func degradedGauge(p *Proxy) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "headgate_degraded", Help: "1 while owners of buckets are out of the node's reach: it holds no view lease, or gets no answer."}, func() float64 {
		if p.Degraded() != "" {
			return 1
		}
		return 0
	})
}

// heldGauge shows who waits for backends outside of the queue.
func heldGauge(p *Proxy) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "headgate_held_requests", Help: "Requests that wait for a backend that is paused, on trial or down to come back, outside of the queue."}, func() float64 {
		return float64(p.held.Load())
	})
}

// admitted counts a reservation: the charges from `from` on, of which the first ones have come before.
func (m *metrics) admitted(x *exchange, from int, first bool) {
	if first {
		m.slots.Inc()
	}
	r := &x.res
	for i := from; i < r.n; i++ {
		l := r.limits[i]
		outcome := "admitted"
		if l.Shadow && !r.decisions[i].Admitted {
			outcome = "shadow_refused"
		}
		m.decisions.WithLabelValues(l.Name, label(r.by[i]), outcome).Inc()
	}
	if t := r.inTokens + r.outTokens; t > 0 {
		m.tokens.WithLabelValues("reserved", x.model.Name).Add(float64(t))
	}
}

func (m *metrics) refused(l *Limit, by limiter.By) {
	m.decisions.WithLabelValues(l.Name, label(by), "refused").Inc()
}

// settled counts the end of a reservation.
func (m *metrics) settled(x *exchange, tokens, nanoUSD int64) {
	m.slots.Dec()
	r := &x.res
	if d := tokens - r.inTokens - r.outTokens; d > 0 {
		m.tokens.WithLabelValues("debt", x.model.Name).Add(float64(d))
	} else if d < 0 {
		m.tokens.WithLabelValues("refunded", x.model.Name).Add(float64(-d))
	}
	if tokens > 0 {
		m.tokens.WithLabelValues("settled", x.model.Name).Add(float64(tokens))
	}
	if c := x.answer.usage.CachedInput; c > 0 && x.cache.tier == "" {
		m.tokens.WithLabelValues("cached_input", x.model.Name).Add(float64(c))
	}
	if nanoUSD > 0 {
		m.spend.WithLabelValues(m.tenant(x.caller.Tenant)).Add(float64(nanoUSD) / 1e9)
	}
}

// billed counts what the budgets granted.
func (m *metrics) billed(x *exchange) {
	for i := range x.tab.bill.Charges {
		c := &x.tab.bill.Charges[i]
		outcome := "admitted"
		if c.Granted < c.Cost {
			outcome = "clamped"
		}
		m.budgets.WithLabelValues(c.Budget.Name, outcome).Inc()
	}
}

// cached counts what the cache did for a request, and what that saved.
func (m *metrics) cached(tenant, outcome string, savedNanoUSD int64) {
	if outcome == tierSemantic {
		m.cache.WithLabelValues(tierSemantic, "hit").Inc()
	} else {
		m.cache.WithLabelValues(tierExact, outcome).Inc()
	}
	if savedNanoUSD > 0 {
		m.savings.WithLabelValues(m.tenant(tenant)).Add(float64(savedNanoUSD) / 1e9)
	}
}

// broke counts a refusal by the budget of c; nil: by none in particular.
func (m *metrics) broke(c *BudgetCharge, k BrokeKind) {
	name := ""
	if c != nil {
		name = c.Budget.Name
	}
	m.budgets.WithLabelValues(name, k.String()).Inc()
}

// levels shows where the budgets stand that have one bucket a tenant, or one in all.
func (m *metrics) levels(x *exchange) {
	for i := range x.tab.bill.Charges {
		c := &x.tab.bill.Charges[i]
		if !c.known() || c.Budget.Scope&^ScopeOrg != 0 {
			continue
		}
		tenant := ""
		if c.Key.Tenant != "" {
			tenant = m.tenant(c.Key.Tenant)
		}
		m.spent.WithLabelValues(tenant, c.Budget.Name).Set(float64(c.Spent) / 1e9)
		m.left.WithLabelValues(tenant, c.Budget.Name).Set(float64(c.Left) / 1e9)
	}
}

func (m *metrics) tenant(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.tenants[name] {
		if len(m.tenants) >= maxTenantLabels {
			return "other"
		}
		m.tenants[name] = true
	}
	return name
}

// record writes the request's line and its metrics: metadata only, never content.
func (x *exchange) record() {
	took := time.Since(x.start)
	model := "none"
	if x.model != nil {
		model = x.model.Name
	}
	a := &x.answer
	outcome := x.outcome()
	m := x.p.met
	m.requests.WithLabelValues(outcome, model).Inc()
	m.seconds.WithLabelValues(x.way()).Observe(took.Seconds())
	if a.firstAt > 0 {
		m.ttft.WithLabelValues(model).Observe(a.firstAt.Seconds())
	}
	x.recordPressure()
	if x.content != nil {
		x.content.close(x)
	}
	log := x.p.cfg.Logger
	if !log.Enabled(x.r.Context(), slog.LevelInfo) {
		return
	}
	attrs := make([]slog.Attr, 0, 32)
	attrs = append(attrs, slog.String("request_id", x.id), slog.String("outcome", outcome), slog.Int("status", a.status),
		slog.String("method", x.r.Method), slog.String("path", clip(x.r.URL.Path, 128)), slog.String("client_ip", x.ip.String()))
	attrs = x.whoAttrs(attrs)
	attrs = x.whatAttrs(attrs)
	attrs = append(attrs, slog.Int64("took_us", took.Microseconds()), slog.Int64("first_byte_us", a.firstAt.Microseconds()))
	attrs = x.wrongAttrs(attrs)
	log.LogAttrs(x.r.Context(), slog.LevelInfo, "request", attrs...)
}

// recordPressure counts what was shed or degraded, and how often clients come again.
func (x *exchange) recordPressure() {
	m := x.p.met
	if on := x.touched(); on != 0 {
		for _, name := range on.Names() {
			m.degraded.WithLabelValues(name).Inc()
		}
	}
	if e := x.gotErr; e != nil && e.dropped != "" {
		m.shed.WithLabelValues(e.dropped).Inc()
	}
	if n, err := strconv.Atoi(x.r.Header.Get("X-Stainless-Retry-Count")); err == nil && n > 0 {
		m.retries.WithLabelValues([...]string{"1", "2", "3+"}[min(n, 3)-1]).Inc()
	}
}

// way is who answered: a backend, the cache, the gateway itself, or nobody.
func (x *exchange) way() string {
	switch {
	case x.cache.tier != "":
		return x.cache.billTier()
	case x.answer.backend != "":
		return "upstream"
	case x.answer.started:
		return "local"
	}
	return "refused"
}

// whoAttrs say whose request it was.
func (x *exchange) whoAttrs(attrs []slog.Attr) []slog.Attr {
	if x.caller == nil {
		return attrs
	}
	attrs = append(attrs, slog.String("tenant", x.caller.Tenant), slog.String("key_id", x.caller.KeyID), slog.String("user", x.payer()), slog.String("class", x.class.String()))
	if x.surface != "" {
		attrs = append(attrs, slog.String("surface", x.surface))
	}
	return attrs
}

// whatAttrs say what it was, and took.
func (x *exchange) whatAttrs(attrs []slog.Attr) []slog.Attr {
	a := &x.answer
	if x.model != nil {
		if b := &x.tab.bill; len(b.Charges) > 0 {
			attrs = append(attrs, slog.Any("budgets", b.names()), slog.Int64("reserved_nano_usd", b.Reserved))
		}
		attrs = append(attrs, slog.String("model", x.model.Name), slog.String("backend", a.backend), slog.Bool("stream", x.in.Stream),
			slog.Int64("input_tokens", a.inTokens), slog.Int64("cached_input_tokens", a.usage.CachedInput), slog.Int64("output_tokens", a.outTokens), slog.Int64("cost_nano_usd", a.nanoUSD),
			slog.Int64("reserved_tokens", x.res.inTokens+x.res.outTokens))
	}
	if x.rule != "" {
		attrs = append(attrs, slog.String("route", x.rule))
	}
	if d := x.w.Header().Get("X-Headgate-Degraded"); d != "" {
		attrs = append(attrs, slog.String("degraded", d))
	}
	if x.cache.surface != nil {
		attrs = append(attrs, slog.String("cache", x.cache.word()))
		if x.cache.unkept != "" {
			attrs = append(attrs, slog.String("cache_unkept", x.cache.unkept))
		}
		if x.cache.via != "" {
			attrs = append(attrs, slog.String("cache_entry", x.cache.via), slog.Float64("similarity", x.cache.alike))
		}
	}
	return attrs
}

// wrongAttrs say what went wrong, if anything did, and how often the client has tried.
func (x *exchange) wrongAttrs(attrs []slog.Attr) []slog.Attr {
	if s := x.r.Header.Get("X-Stainless-Retry-Count"); s != "" {
		if n, err := strconv.Atoi(s); err == nil {
			attrs = append(attrs, slog.Int("retry_count", n))
		}
	}
	if e := x.gotErr; e != nil {
		attrs = append(attrs, slog.String("code", e.Code), slog.String("limit", e.Limit))
		if e.dropped != "" {
			attrs = append(attrs, slog.String("dropped", e.dropped))
		}
		if e.err != nil {
			attrs = append(attrs, slog.Any("cause", e.err))
		}
	}
	if f := x.answer.failure; f != nil {
		attrs = append(attrs, slog.String("upstream_failure", clip(f.Type, 64)))
	}
	return attrs
}

// outcome is the word for how it went.
func (x *exchange) outcome() string {
	a := &x.answer
	switch {
	case a.clientGo, x.gotErr != nil && x.gotErr.Code == codeClientGone:
		return "client_gone"
	case x.gotErr != nil:
		switch e := x.gotErr; {
		case e.Code == codeOverCapacity:
			return codeOverCapacity
		case e.Status == http.StatusTooManyRequests || e.Code == "request_exceeds_limit" || e.Code == "insufficient_quota" || e.Code == "billing_unavailable" || e.Code == "killed" || e.Code == "not_ready":
			return "refused"
		case e.Status < http.StatusInternalServerError:
			return "client_error"
		case e.Code == "internal_error":
			return "failed"
		}
		return "upstream_error"
	case a.status >= http.StatusInternalServerError, a.failure != nil && a.status < http.StatusBadRequest:
		return "upstream_error"
	case a.status >= http.StatusBadRequest:
		return "client_error"
	}
	return "ok"
}
