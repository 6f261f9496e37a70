package proxy_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"headgate/bench/fakevllm"
	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/dispatch"
	"headgate/proxy/edge"
	"headgate/proxy/ladder"
	"headgate/proxy/openai"
	"headgate/proxy/queue"
	"headgate/proxy/route"
	"headgate/proxy/upstream"
)

func TestMain(m *testing.M) {
	// The server waits half a second before it closes a connection with unread bytes,
	// longer than goleak does.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// ages is a period so long that nothing refills during a test, and that has no window
// boundary for years.
const ages = 1000 * 24 * time.Hour

// key is what the default caller presents.
const key = "hg_test_default"

// setup says what differs from one fake model server, one model "m" and one caller.
type setup struct {
	fake      fakevllm.Config
	around    func(http.Handler) http.Handler // of the model server
	backends  []upstream.Backend              // default: the model server, as "vllm"
	models    []*proxy.Model                  // default: "m", which the server calls "fake"
	limits    []proxy.Limit                   // of the default caller
	callers   map[string]*proxy.Caller        // by key, besides the default one
	change    func(*proxy.Caller)             // the default caller
	edge      edge.Config
	prefilter edge.PrefilterConfig
	maxBody   map[string]int64
	guard     func(proxy.Limits) proxy.Limits // between the proxy and its buckets
	money     *till                           // default: a new one
	broke     int                             // the status of a spent budget
	content   proxy.ContentLog
	buckets   int // the most there may be; 0: the default
	log       io.Writer
	aliases   map[string]string // of models
	reach     func() bool       // whether the owner is in reach; nil: always
	by        limiter.By        // as what its decisions pass
	unready   bool              // no snapshot is applied
	switches  *proxy.Switches

	surfaces []*proxy.Surface // if any, there is a cache, and the default caller may name any, and a user; it is of the first
	semantic proxy.Semantic
	watch    proxy.CacheWatch
	hearing  func() bool // of what is void; nil: always

	queue     queue.Config
	ladder    *ladder.Config
	routes    []route.Rule
	keepAlive time.Duration
	failures  int // that open a breaker; 0: none is opened
	full      int // the status of a refusal for want of capacity
}

// world is a running gateway before a running model server. When the test ends it
// demands what must hold after any test: nothing in flight, every slot back, and
// tokens that add up.
type world struct {
	t        *testing.T
	fake     *fakevllm.Server
	upstream *httptest.Server
	handler  http.Handler // of the model server
	proxy    *proxy.Proxy
	pool     *upstream.Pool
	limits   *lease.Local // the owner's
	private  *lease.Local // this node's, while that is out of reach
	lender   *lender      // of both
	till     *till
	shelf    *shelf // nil: there is no cache
	places   *places
	dispatch *dispatch.Dispatcher
	ladder   *ladder.Ladder
	reg      *prometheus.Registry
	caller   *proxy.Caller
	snap     *proxy.Snapshot
	addr     string
	client   *http.Client
	tenants  map[string]bool
	began    time.Time
}

// now is the clock of the bucket tables. It does not go back.
func (w *world) now() int64 { return w.began.UnixNano() + int64(time.Since(w.began)) }

func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func newWorld(t *testing.T, s setup) *world {
	t.Helper()
	w := newModelServer(t, s)
	w.upstream = httptest.NewServer(w.handler)
	w.assemble(s, upstream.Config{}, w.upstream.URL)
	w.serve(s.edge)
	return w
}

func newModelServer(t *testing.T, s setup) *world {
	w := &world{t: t, reg: prometheus.NewRegistry(), tenants: map[string]bool{"": true}}
	w.fake = must[*fakevllm.Server](t)(fakevllm.New(s.fake))
	w.handler = w.fake.Handler()
	if s.around != nil {
		w.handler = s.around(w.handler)
	}
	return w
}

// assemble makes the gateway; backends without a URL are at the given one.
func (w *world) assemble(s setup, pool upstream.Config, url string) {
	t := w.t
	t.Helper()
	pool.Backends = s.backends
	if pool.MaxFailures = s.failures; s.failures == 0 {
		pool.MaxFailures = -1
	}
	if pool.Backends == nil {
		pool.Backends = []upstream.Backend{{Name: "vllm"}}
	}
	for i := range pool.Backends {
		if pool.Backends[i].URL == "" {
			pool.Backends[i].URL = url
		}
	}
	w.pool = must[*upstream.Pool](t)(upstream.NewPool(pool))
	w.began = time.Now()
	w.limits = must[*lease.Local](t)(lease.NewLocal(lease.Config{MaxBuckets: s.buckets, Shards: 1}))
	w.private = must[*lease.Local](t)(lease.NewLocal(lease.Config{Shards: 1}))
	if s.reach == nil {
		s.reach = func() bool { return true }
	}
	w.lender = &lender{owner: w.limits, private: w.private, reach: s.reach, by: s.by, now: w.now}
	w.openPlaces(t, s.queue)
	w.ladder = ladder.New()
	if s.ladder != nil {
		w.ladder.Apply(*s.ladder)
	}
	var limits proxy.Limits = w.lender
	if s.guard != nil {
		limits = s.guard(limits)
	}
	if w.till = s.money; w.till == nil {
		w.till = newTill()
	}
	var log io.Writer = io.Discard
	if s.log != nil {
		log = s.log
	}
	var kept proxy.Cache
	var elements proxy.Elements
	if len(s.surfaces) > 0 {
		w.shelf = newShelf(t, w.reg)
		kept, elements = w.shelf, w.shelf
	}
	w.proxy = must[*proxy.Proxy](t)(proxy.New(proxy.Config{
		NodeID: "n1", Limits: limits, Pool: w.pool, ClientIP: s.edge.ClientIP, Content: s.content, MaxBody: s.maxBody,
		Prefilter:  must[*edge.Prefilter](t)(edge.NewPrefilter(s.prefilter, time.Now())),
		Registerer: w.reg, Logger: slog.New(slog.NewJSONHandler(log, nil)), Degraded: w.lender.degraded, Where: w.lender.where,
		Dispatch: w.dispatch, Ladder: w.ladder, CapacityStatus: s.full,
		Money: w.till, BudgetStatus: s.broke, Cache: kept, Elements: elements, Semantic: s.semantic, Watch: s.watch, Hearing: s.hearing,
	}))
	w.proxy.SetSwitches(s.switches)
	if !s.unready {
		w.apply(s)
	}
}

// apply makes the snapshot of s.
func (w *world) apply(s setup) {
	w.caller = &proxy.Caller{KeyID: "k1", Tenant: "acme", Limits: s.limits, LastUsed: new(atomic.Int64)}
	if len(s.surfaces) > 0 {
		w.caller.AnySurface, w.caller.AssertUser, w.caller.OnlySurface = true, true, s.surfaces[0].Name
	}
	if s.change != nil {
		s.change(w.caller)
	}
	byHash := map[[32]byte]*proxy.Caller{sha256.Sum256([]byte(key)): w.caller}
	w.tenants[w.caller.Tenant] = true
	for k, c := range s.callers {
		if c.LastUsed == nil {
			c.LastUsed = new(atomic.Int64)
		}
		byHash[sha256.Sum256([]byte(k))] = c
		w.tenants[c.Tenant] = true
	}
	if s.models == nil {
		s.models = []*proxy.Model{model("m", "vllm")}
	}
	w.snap = &proxy.Snapshot{
		KeepAlive: s.keepAlive,
		Revision:  1, Models: map[string]*proxy.Model{}, Surfaces: map[string]*proxy.Surface{},
		Lookup: func(h [32]byte) (*proxy.Caller, bool) { c, ok := byHash[h]; return c, ok },
	}
	if s.routes != nil {
		w.snap.Routes = must[*route.Table](w.t)(route.New(s.routes))
	}
	for _, m := range s.models {
		w.snap.Models[m.Name] = m
		w.snap.ModelNames = append(w.snap.ModelNames, m.Name)
	}
	for _, surface := range s.surfaces {
		w.snap.Surfaces[surface.Name] = surface
	}
	for alias, name := range s.aliases {
		w.snap.Models[alias] = w.snap.Models[name]
	}
	w.proxy.Apply(w.snap)
}

func (w *world) serve(cfg edge.Config) {
	w.t.Helper()
	cfg.Listen = "127.0.0.1:0"
	l := must[net.Listener](w.t)(edge.Listen(w.t.Context(), cfg))
	srv := edge.NewServer(cfg, w.proxy)
	done := make(chan error)
	go func() { done <- srv.Serve(l) }()
	w.addr = l.Addr().String()
	w.client = &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 100}}
	w.t.Cleanup(func() {
		w.fake.Release()
		w.settled()
		w.client.CloseIdleConnections()
		_ = srv.Close() // only of this test's connections
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			w.t.Error(err)
		}
		w.pool.Close()
		w.upstream.Close()
	})
}

// settled waits for the open requests and demands that they left nothing behind.
func (w *world) settled() {
	w.t.Helper()
	if err := w.proxy.Wait(patience(w.t)); err != nil {
		w.t.Fatal(err)
	}
	for _, g := range []string{"headgate_inflight_requests", "headgate_inflight_reservations"} {
		if v := w.metric(g); v != 0 {
			w.t.Errorf("%s = %v after all requests ended", g, v)
		}
	}
	if r, b, d, s := w.tokens("reserved"), w.tokens("refunded"), w.tokens("debt"), w.tokens("settled"); r-b+d != s {
		w.t.Errorf("reserved %d - refunded %d + debt %d is not settled %d", r, b, d, s)
	}
	w.till.settled(w.t)
	for tenant := range w.tenants {
		for _, l := range append(w.limits.Levels(w.now(), tenant), w.private.Levels(w.now(), tenant)...) {
			if l.Limit.Algorithm == limiter.Semaphore && l.Level != l.Limit.Burst {
				w.t.Errorf("%v has %d of %d slots after all requests ended", l.Key, l.Level, l.Limit.Burst)
			}
		}
	}
	for _, b := range w.pool.Status() {
		if b.InFlight != 0 {
			w.t.Errorf("backend %s still has %d in flight", b.Name, b.InFlight)
		}
	}
}

// patience ends a test that waits for what never comes.
func patience(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func (w *world) tokens(kind string) int64 {
	return int64(w.metric("headgate_tokens_total", "kind", kind))
}

// metric sums the series of a metric that have the given labels.
func (w *world) metric(name string, labels ...string) (sum float64) {
	w.t.Helper()
	for _, f := range must[[]*dto.MetricFamily](w.t)(w.reg.Gather()) {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			for i := 0; i < len(labels); i += 2 {
				if !hasLabel(m, labels[i], labels[i+1]) {
					continue series
				}
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

func hasLabel(m *dto.Metric, name, value string) bool {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue() == value
		}
	}
	return false
}

// level is what is left in the bucket of a limit, and whether anything was ever spent.
func (w *world) level(table *lease.Local, limit string) (left int64, used bool) {
	for tenant := range w.tenants {
		for _, l := range table.Levels(w.now(), tenant) {
			if l.Key.Limit == limit {
				return l.Level, true
			}
		}
	}
	return 0, false
}

// spent is what the limit lacks of its capacity; everything refills slowly.
func (w *world) spent(l proxy.Limit) int64 {
	left, used := w.level(w.limits, l.Bucket)
	if !used {
		return 0
	}
	return l.Spec.Capacity() - left
}

// spentAlone is the same of this node's private bucket.
func (w *world) spentAlone(l proxy.Limit) int64 {
	left, used := w.level(w.private, l.Bucket)
	if !used {
		return 0
	}
	return l.Private.Capacity() - left
}

// prices in nano-dollars a token.
const (
	priceInput, priceCached, priceOutput, priceImage = 200, 20, 600, 1000
)

// model is one with the prices above, which its backends call "fake".
func model(name string, backends ...string) *proxy.Model {
	return &proxy.Model{Name: name, Upstream: "fake", Backends: backends, Cost: func(u openai.Usage, images, _ int64) int64 {
		return (u.Input-u.CachedInput)*priceInput + u.CachedInput*priceCached + u.Output*priceOutput + images*priceImage
	}, UpperBound: func(in, out, images, _ int64) int64 {
		return in*priceInput + out*priceOutput + images*priceImage
	}}
}

// limit is n of a unit for each key, at once, with next to no refill.
func limit(unit proxy.Unit, n int64) proxy.Limit {
	return limitOf(unit, limiter.GCRA, n)
}

func limitOf(unit proxy.Unit, a limiter.Algorithm, n int64) proxy.Limit {
	if unit == proxy.Concurrency {
		a = limiter.Semaphore
	}
	spec := &limiter.Limit{Algorithm: a, Rate: limiter.Rate{Count: n, Per: ages}, Burst: n, Revision: 1}
	if a == limiter.Semaphore {
		spec.Rate = limiter.Rate{}
	}
	return proxy.Limit{Name: unit.String(), Bucket: unit.String(), Scope: proxy.ScopeKey, Unit: unit, Spec: spec, Private: spec}
}

// fill makes a limit out of n every per, with a burst.
func fill(unit proxy.Unit, n int64, per time.Duration, burst int64) proxy.Limit {
	l := limit(unit, burst)
	l.Spec.Rate = limiter.Rate{Count: n, Per: per}
	return l
}

func named(l proxy.Limit, name string) proxy.Limit {
	l.Name, l.Bucket = name, name
	return l
}

// call is a request to the gateway.
type call struct {
	method, path, body, key string
	header                  http.Header
}

// answer is what came back; err is a body that broke off.
type answer struct {
	status int
	header http.Header
	body   string
	err    error
}

func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Set(pairs[i], pairs[i+1])
	}
	return h
}

func fault(f string) http.Header { return header("X-Fake-Fault", f) }

func (w *world) request(ctx context.Context, c call) *http.Request {
	w.t.Helper()
	if c.method == "" {
		c.method = http.MethodPost
	}
	if c.path == "" {
		c.path = "/v1/chat/completions"
	}
	r := must[*http.Request](w.t)(http.NewRequestWithContext(ctx, c.method, "http://"+w.addr+c.path, strings.NewReader(c.body)))
	if c.header != nil {
		r.Header = c.header.Clone()
	}
	switch {
	case c.key == "":
		r.Header.Set("Authorization", "Bearer "+key)
	case c.key != "none":
		r.Header.Set("Authorization", "Bearer "+c.key)
	}
	if c.body != "" && r.Header.Get("Content-Type") == "" {
		r.Header.Set("Content-Type", "application/json")
	}
	return r
}

// do sends a call and reads its whole answer.
func (w *world) do(c call) answer {
	w.t.Helper()
	return w.send(w.request(patience(w.t), c))
}

func (w *world) send(r *http.Request) answer {
	w.t.Helper()
	resp, err := w.client.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(b), err}
}

// want fails the test if the answer has another status.
func (a answer) want(t *testing.T, status int) answer {
	t.Helper()
	if a.status != status {
		t.Fatalf("status %d, want %d: %s", a.status, status, clip(a.body))
	}
	return a
}

// refused fails the test if the answer is not this error.
func (a answer) refused(t *testing.T, status int, code string) answer {
	t.Helper()
	a.want(t, status)
	if got := a.field("code"); got != code {
		t.Fatalf("code %v, want %s: %s", got, code, clip(a.body))
	}
	return a
}

// field is a member of the answer's error.
func (a answer) field(name string) any {
	var e struct {
		Error map[string]any `json:"error"`
	}
	if json.Unmarshal([]byte(a.body), &e) != nil {
		return nil
	}
	return e.Error[name]
}

func clip(s string) string { return s[:min(len(s), 600)] }

// direct asks the model server itself.
func (w *world) direct(c call) answer {
	w.t.Helper()
	r := w.request(patience(w.t), c)
	r.URL.Host, r.Host = strings.TrimPrefix(w.upstream.URL, "http://"), ""
	r.Header.Del("Authorization")
	return w.send(r)
}

// last is the newest record of the model server.
func (w *world) last() fakevllm.Record {
	w.t.Helper()
	log := w.fake.Log()
	if len(log) == 0 {
		w.t.Fatal("nothing reached the model server")
	}
	return log[len(log)-1]
}

// await blocks until the model server's counters satisfy cond.
func (w *world) await(cond func(fakevllm.Stats) bool) {
	w.t.Helper()
	if err := w.fake.Await(patience(w.t), cond); err != nil {
		w.t.Fatalf("%v; %+v", err, w.fake.Stats())
	}
}

// closedPort is an address where nobody listens.
func closedPort(t *testing.T) string {
	l := must[net.Listener](t)(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	return "http://" + l.Addr().String()
}

// buffer collects log lines.
type buffer struct {
	mu chan struct{}
	b  bytes.Buffer
}

func newBuffer() *buffer { return &buffer{mu: make(chan struct{}, 1)} }

func (b *buffer) Write(p []byte) (int, error) {
	b.mu <- struct{}{}
	defer func() { <-b.mu }()
	return b.b.Write(p)
}

// records are the request lines of the log.
func (b *buffer) records(t *testing.T) (out []map[string]any) {
	t.Helper()
	b.mu <- struct{}{}
	defer func() { <-b.mu }()
	for line := range strings.Lines(b.b.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		if m["msg"] == "request" {
			out = append(out, m)
		}
	}
	return out
}

const (
	chat     = `{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":5}`
	streamed = `{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":5,"stream":true}`
	// exact costs 4 tokens in and 6 out, by estimate and in truth.
	exact         = `{"model":"m","prompt":[1,2,3,4],"max_tokens":6}`
	exactStreamed = `{"model":"m","prompt":[1,2,3,4],"max_tokens":6,"stream":true}`
)

// eventually blocks until cond holds, for what has no signal of its own to wait for.
func (w *world) eventually(cond func() bool) {
	w.t.Helper()
	ctx := patience(w.t)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.t.Fatal("what was waited for did not come")
		}
	}
}

// edge1000 lets many errors through, for tests that make many on purpose.
func edge1000() edge.PrefilterConfig {
	return edge.PrefilterConfig{ErrorsPerMinute: 1000, ErrorBurst: 1000}
}

// contextCause is a context that ends with err when cancelled.
func contextCause(t *testing.T, err error) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(t.Context())
	return ctx, func() { cancel(err) }
}

func backend(name string, slots int) upstream.Backend {
	return upstream.Backend{Name: name, Slots: slots}
}
