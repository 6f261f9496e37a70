package proxy

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"mime"
	"net/http"
	"net/netip"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/limiter"
	"headgate/proxy/affinity"
	"headgate/proxy/edge"
	"headgate/proxy/ladder"
	"headgate/proxy/openai"
	"headgate/proxy/upstream"
)

// Bounds that are nobody's to configure.
const (
	defaultTimeout = 10 * time.Minute // as the client libraries have it
	maxTimeout     = time.Hour
	maxAttempts    = 3      // backends that one request is sent to
	maxTried       = 16     // that it could not be sent to, besides
	maxFallbacks   = 4      // models tried after the one asked for
	maxWaiters     = 10_000 // requests held by limits with a wait
	maxUserName    = 256    // bytes
)

// Limits is what the front door needs of the buckets. It is safe for concurrent use.
type Limits interface {
	// Take charges all or none and returns -1, the index of the refusing charge, or a
	// number below -1 if there is no room for a new bucket. It may ask the owners of the
	// buckets, for a bounded time and as long as ctx lives; a charge whose owner is out of
	// reach is decided as its Apart says. By of each decision says who decided.
	Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int
	// Peek decides like Take and changes nothing.
	Peek(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int
	// Settle replaces each cost by the actual one; 0 cancels. It never waits.
	Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision)
}

// Whereabouts is where a charge's bucket is decided on, for people.
type Whereabouts struct {
	Owner string // the node that owns it; "": nobody
	Held  int64  // what this node may spend of it without asking, in the unit
	Away  string // why its owner is out of reach, in words; "": it is not
}

// Config is what a Proxy is made from. Content, Degraded, Where and Money may be nil, the rest
// is needed.
type Config struct {
	NodeID     string
	Limits     Limits
	Pool       *upstream.Pool
	ClientIP   func(*http.Request) netip.Addr
	Prefilter  *edge.Prefilter
	Content    ContentLog
	MaxBody    map[string]int64 // bytes, by route name; "" for the routes not named
	Registerer prometheus.Registerer
	// Degraded says in words why owners of buckets are out of this node's reach, "" while none
	// is; nil: none ever. It must not block and may be called concurrently.
	Degraded func() string
	// Where is asked for an Explanation only, and may be called concurrently.
	Where  func(*limiter.Charge) Whereabouts
	Logger *slog.Logger
	// Money keeps the budgets and the usage log; nil: nothing is logged, and who has budgets is
	// refused.
	Money Money
	// Cache keeps answers, Elements those of embeddings, input by input; nil: none are kept.
	Cache    Cache
	Elements Elements
	// Semantic finds answers to questions that mean the same; nil: nobody does.
	Semantic Semantic
	// Watch is told what the cache does; nil: nobody is.
	Watch CacheWatch
	// Hearing says whether this node hears now of kept answers that are void; nil: always.
	Hearing func() bool
	// BudgetStatus is the status of a refusal by a spent budget; 0: 429.
	BudgetStatus int
	// Dispatch gives places at backends that have only so many, in the order of the whole cluster;
	// nil: as long as there are any, first come, first served.
	Dispatch Dispatch
	// Ladder says what is shed and degraded by itself; nil: nothing is.
	Ladder *ladder.Ladder
	// Affinity knows where requests went, here and at other nodes; nil: here only.
	Affinity *affinity.Router
	// CapacityStatus is the status of a refusal for want of capacity; 0: 429.
	CapacityStatus int
}

// defaultMaxBody is the largest body taken where the configuration says nothing.
const defaultMaxBody = 8 << 20

// Proxy is the HTTP front door. It is safe for concurrent use.
type Proxy struct {
	cfg       Config
	snap      atomic.Pointer[Snapshot] // nil until the first Apply
	absent    absences
	held      atomic.Int64                  // requests that wait for backends to come back
	heldBytes atomic.Int64                  // of them
	applied   atomic.Pointer[chan struct{}] // closed by the next one
	switches  atomic.Pointer[Switches]      // never nil
	override  atomic.Pointer[override]      // nil: never set
	degraded  atomic.Bool                   // as last logged
	routes    *routes
	bodies    edge.Bodies
	est       *estimator
	owners    owners
	met       *metrics
	waiters   atomic.Int64
	refreshes atomic.Int64
	uncut     context.Context // ends when Cut is called
	cut       context.CancelFunc
	open      sync.WaitGroup // exchanges not yet settled
}

// New makes a Proxy that answers not_ready until Apply gave it a snapshot.
func New(cfg Config) (*Proxy, error) {
	met, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	if cfg.Ladder == nil {
		cfg.Ladder = ladder.New()
	}
	if cfg.Affinity == nil {
		cfg.Affinity = affinity.New(affinity.Config{})
	}
	p := &Proxy{cfg: cfg, routes: newRoutes(), est: newEstimator(), met: met}
	applied := make(chan struct{})
	p.applied.Store(&applied)
	p.uncut, p.cut = context.WithCancel(context.Background())
	p.SetSwitches(nil)
	for _, c := range []prometheus.Collector{degradedGauge(p), heldGauge(p)} {
		if err := cfg.Registerer.Register(c); err != nil {
			return nil, fmt.Errorf("proxy: %w", err)
		}
	}
	return p, nil
}

// Apply makes s what new requests work with.
func (p *Proxy) Apply(s *Snapshot) {
	p.snap.Store(s)
	applied := make(chan struct{})
	close(*p.applied.Swap(&applied))
}

// Snapshot is the one that new requests work with, nil before the first Apply.
func (p *Proxy) Snapshot() *Snapshot { return p.snap.Load() }

// Cut ends the answers in flight with an error that their clients can read: for a node
// whose time to drain is over.
func (p *Proxy) Cut() { p.cut() }

// errStopping is why an answer was cut.
var errStopping = errors.New("the gateway is stopping")

// errNotBegun is why a request was not sent.
var errNotBegun = fmt.Errorf("%w, and the request had no place yet", errStopping)

// Wait returns once every request has settled, or with ctx's error.
func (p *Proxy) Wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() { p.open.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("proxy: requests still open: %w", context.Cause(ctx))
	}
}

// exchange is one request on its way. It belongs to the request's goroutine.
type exchange struct {
	p          *Proxy
	snap       *Snapshot
	w          http.ResponseWriter
	r          *http.Request
	id         string // the client's, or ours
	start      time.Time
	upstreamID string // told to the backend, which may name what it makes by it: never another request's
	ip         netip.Addr

	credential string
	caller     *Caller
	user       string
	standIn    string // see payer
	surface    string
	class      Class
	timeout    time.Duration
	limited    bool          // that says how long it waits
	hurried    bool          // its client has less patience than its plan
	patience   time.Duration // how long it may wait for a place at a backend
	noDegrade  bool          // only the model asked for may answer

	route     *route
	pathID    string
	body      *edge.Body
	in        openai.Request
	earlier   int64          // tokens of the response that this one goes on from
	guessed   bool           // earlier is not the backend's word
	asked     *Model         // the one asked for
	named     string         // by this name
	routed    *Model         // the one that the policy's routes put in its place, mostly the same
	rule, why string         // the route that did, and in words how it came to
	model     *Model         // the one that answers
	fallsBack bool           // another model may answer if this one does not
	smaller   bool           // the ladder put a fallback before the one asked for
	rungs     ladder.Set     // of the ladder, in force for this request
	cutoff    ladder.Cutoff  // what is shed
	cut       int64          // tokens at which the ladder ends the answer; 0: it does not
	served    ladder.Set     // the rungs that made this answer less than what was asked for
	only      string         // the one endpoint that can answer, "" if any
	owned     string         // the id of the response that was recorded as the caller's
	slot      *upstream.Slot // of the last attempt; given back once the answer is complete
	line      line           // at a backend
	cache     consult
	res       reservation
	tab       tab
	answer    answer
	recording bool        // w is not the client's
	passed    http.Header // see passedHeader
	gotErr    *Error
	content   *capture
}

// ServeHTTP carries a request through the pipeline and settles it, whatever happens.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.open.Add(1)
	defer p.open.Done()
	p.met.inflight.Inc()
	defer p.met.inflight.Dec()

	x := &exchange{p: p, snap: p.snap.Load(), w: w, r: r, start: time.Now()}
	x.id, x.upstreamID = requestIDs(r)
	w.Header().Set("X-Request-Id", x.id)
	w.Header().Set("X-Headgate-Node", p.cfg.NodeID)
	aborted := x.run(x.serve)
	if aborted { // the answer broke off: only a closed connection tells the client so
		panic(http.ErrAbortHandler)
	}
}

// run is serve with everything that must happen at its end.
func (x *exchange) run(serve func() error) (aborted bool) {
	defer x.finish()
	defer func() {
		if v := recover(); v != nil {
			x.p.cfg.Logger.Error("request panicked", "request_id", x.id, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			x.gotErr = newError(http.StatusInternalServerError, "internal_error", "the gateway failed; request id %s", x.id)
			o := outcomeFailed
			if x.answer.backend != "" {
				o = outcomeUnknown
			}
			x.settle(o)
			if aborted = x.answer.started; !aborted {
				x.refuse(x.gotErr)
			}
		}
	}()
	err := serve()
	if err == nil {
		return false
	}
	x.gotErr = x.failed(err)
	switch {
	case x.relieve():
	case x.answer.begun:
		return true
	case x.answer.started: // while it waited
		x.refuseInBand(x.gotErr)
	default:
		x.refuse(x.gotErr)
	}
	return false
}

// failed is err as the client gets it.
func (x *exchange) failed(err error) *Error {
	e := asError(err)
	if e.Code == codeOverCapacity && x.p.cfg.CapacityStatus != 0 && e.Status == http.StatusTooManyRequests {
		e.Status = x.p.cfg.CapacityStatus
	}
	return e
}

// serve is the pipeline. Whatever it leaves reserved, finish settles.
func (x *exchange) serve() error {
	if err := x.prefilter(); err != nil {
		return err
	}
	if x.snap == nil {
		return errNotReady()
	}
	if err := x.authenticate(); err != nil {
		return err
	}
	if e := x.killed("", nil); e != nil {
		return e
	}
	if err := x.identify(); err != nil {
		return x.chargeMalformed(err)
	}
	if err := x.matchRoute(); err != nil {
		return x.chargeMalformed(err)
	}
	if x.route.local != nil {
		return x.route.local(x)
	}
	if err := x.meter(); err != nil {
		return x.chargeMalformed(err)
	}
	candidates, err := x.resolve()
	if err != nil {
		return x.chargeMalformed(err)
	}
	x.shorten()
	x.consider()
	if x.cache.shed = x.shed(candidates[0]); x.cache.shed != nil && x.cache.surface == nil {
		return x.cache.shed
	}
	// A fallback is admitted and charged like the model asked for; what was reserved
	// for the one before has been given back.
	for i, m := range candidates {
		x.model, x.fallsBack, x.line.age = m, i < len(candidates)-1, 0
		err = x.try()
		if err == nil || i == len(candidates)-1 || !x.mayFallBack(err) {
			break
		}
		x.settle(outcomeRefused)
	}
	return err
}

// prefilter refuses a flooding or failing client before anything is parsed.
func (x *exchange) prefilter() error {
	x.ip = x.p.cfg.ClientIP(x.r)
	x.credential = credential(x.r)
	if ok, after := x.p.cfg.Prefilter.Allow(x.start, x.ip, x.credential); !ok {
		e := newError(http.StatusTooManyRequests, "rate_limit_exceeded", "too many requests, or too many failing ones, from this address or key; see the message of the earlier errors")
		e.Limit, e.Scope, e.Unit, e.RetryAfter = "prefilter", "key", "requests", max(after, 1)
		return e
	}
	return nil
}

func (x *exchange) authenticate() error {
	if x.credential == "" {
		return unauthorized("invalid_api_key", "no API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
	}
	c, ok := x.snap.Lookup(sha256.Sum256([]byte(x.credential)))
	switch {
	case !ok:
		return x.unknownKey()
	case c.Revoked:
		return unauthorized("key_revoked", "this API key was revoked; ask for a new one")
	case !c.Expires.IsZero() && !x.start.Before(c.Expires):
		return unauthorized("invalid_api_key", "this API key expired at "+c.Expires.UTC().Format(time.RFC3339)+"; ask for a new one")
	case c.Suspended:
		return errForbidden("", "tenant %q is suspended; ask the operator", c.Tenant)
	}
	x.caller = c
	c.LastUsed.Store(x.start.Unix())
	return nil
}

// unknownKey tells a mistyped key from one that does not exist.
func (x *exchange) unknownKey() error {
	if x.snap.CheckKey != nil {
		if err := x.snap.CheckKey(x.credential); err != nil {
			return unauthorized("invalid_api_key", "this API key is not known: "+err.Error())
		}
	}
	return unauthorized("invalid_api_key", "this API key is not known; ask for a new one")
}

// identify reads what a client may say of itself, as far as its key lets it.
func (x *exchange) identify() error {
	c, h := x.caller, x.r.Header
	x.user, x.timeout = c.User, c.Timeout
	for _, name := range [...]string{"X-Headgate-User", "X-Headgate-Surface", "X-Headgate-Class", "X-Headgate-Cache", "X-Headgate-Similarity", "X-Headgate-Timeout", "X-Headgate-No-Degrade"} {
		if len(h[name]) > 1 { // which of them was meant, nobody knows
			return malformed(http.StatusBadRequest, name, "%s is there %d times; send it once, and have proxies replace what clients sent", name, len(h[name]))
		}
	}
	if u := h.Get("X-Headgate-User"); u != "" {
		if !c.AssertUser {
			return errForbidden("X-Headgate-User", "this key may not name a user; leave X-Headgate-User out or use a key with assert_user")
		}
		if err := checkUser("X-Headgate-User", u); err != nil {
			return err
		}
		x.user = u
	}
	if err := x.cacheHeaders(); err != nil {
		return err
	}
	if err := x.sort(h); err != nil {
		return err
	}
	switch s := h.Get("X-Headgate-No-Degrade"); s {
	case "", "false":
	case "true":
		x.noDegrade = true
	default:
		return malformed(http.StatusBadRequest, "X-Headgate-No-Degrade", "X-Headgate-No-Degrade must be true or false")
	}
	if x.patience = clientPatience(h, x.timeout); x.timeout == 0 {
		x.timeout = defaultTimeout
	}
	if s := h.Get("X-Headgate-Timeout"); s != "" {
		d, ok := parseTimeout(s)
		if !ok {
			return malformed(http.StatusBadRequest, "X-Headgate-Timeout", "X-Headgate-Timeout must be seconds or a duration such as 30s, above 0 and at most %s", maxTimeout)
		}
		x.hurried = d < x.timeout
		x.timeout = min(d, x.timeout)
		x.patience, x.limited = x.timeout, true
	}
	return nil
}

// sort reads the surface and the class that a client asks for.
func (x *exchange) sort(h http.Header) error {
	c := x.caller
	x.surface, x.class = c.OnlySurface, c.Class
	if s := h.Get("X-Headgate-Surface"); s != "" {
		if !c.AnySurface && !c.Surfaces[s] {
			return errForbidden("X-Headgate-Surface", "this key may not use surface %q", clip(s, 64))
		}
		x.surface = s
	}
	if s := h.Get("X-Headgate-Class"); s != "" {
		class, ok := ParseClass(s)
		if !ok {
			return malformed(http.StatusBadRequest, "X-Headgate-Class", "X-Headgate-Class must be interactive, background or best_effort")
		}
		x.class = max(class, c.Class)
	}
	return nil
}

func (x *exchange) matchRoute() error {
	rt, id, err := x.p.routes.match(x.r.Method, x.r.URL.Path)
	if err != nil {
		return err
	}
	if x.caller.Routes != nil && !x.caller.Routes[rt.name] {
		return errForbidden("", "this key may not use the %s routes", rt.name)
	}
	x.route, x.pathID = rt, id
	return nil
}

// meter reads the body and finds out what it may cost.
func (x *exchange) meter() error {
	limit, ok := x.p.cfg.MaxBody[x.route.name]
	if !ok {
		if limit = x.p.cfg.MaxBody[""]; limit == 0 {
			limit = defaultMaxBody
		}
	}
	var err error
	if x.body, err = x.p.bodies.Read(x.w, x.r, limit); err != nil {
		return err
	}
	if boundary, ok := x.formBoundary(); ok {
		x.in, err = openai.MeterMultipart(boundary, x.body.Bytes())
	} else {
		x.in, err = openai.Meter(x.route.kind, x.body.Bytes())
	}
	if err != nil {
		return err
	}
	if err := x.assertUser(); err != nil {
		return err
	}
	x.startCapture()
	return nil
}

// assertUser takes the user that the body names, where the key may name one and no header has.
func (x *exchange) assertUser() error {
	if !x.caller.AssertUser || x.r.Header.Get("X-Headgate-User") != "" || x.in.User == "" {
		return nil
	}
	if err := checkUser("user", x.in.User); err != nil {
		return err
	}
	x.user = x.in.User
	return nil
}

// keyUser begins the name under which a key without a user has its user's limits.
const keyUser = "key:"

// payer is the user whose limits and budgets the request is charged to: the key itself where there is none.
func (x *exchange) payer() string {
	if x.user == "" && x.standIn == "" {
		x.standIn = keyUser + x.caller.KeyID
	}
	return cmp.Or(x.user, x.standIn)
}

// checkUser bounds what a client may call its user; the name becomes that of a bucket.
func checkUser(field, name string) error {
	switch {
	case len(name) > maxUserName:
		return malformed(http.StatusBadRequest, field, "the user's name is longer than %d bytes", maxUserName)
	case strings.ContainsFunc(name, unicode.IsControl):
		return malformed(http.StatusBadRequest, field, "a user's name must not hold control characters")
	case strings.HasPrefix(name, keyUser):
		return malformed(http.StatusBadRequest, field, "a user's name must not begin with %s", keyUser)
	}
	return nil
}

// formBoundary: only the audio routes take forms; elsewhere a form is malformed JSON.
func (x *exchange) formBoundary() (string, bool) {
	if x.route.kind != openai.Audio {
		return "", false
	}
	mt, params, err := mime.ParseMediaType(x.r.Header.Get("Content-Type"))
	return params["boundary"], err == nil && mt == "multipart/form-data"
}

// resolve finds the models that may answer: the one asked for, then its fallbacks.
func (x *exchange) resolve() ([]*Model, error) {
	name := x.in.Model
	if !x.in.HasModel {
		mine := x.modelNames()
		if len(mine) != 1 {
			return nil, malformed(http.StatusBadRequest, "model", "model is missing; name one of those that GET /v1/models lists")
		}
		name = mine[0]
	}
	m := x.mayUse(name)
	if m == nil {
		return nil, errModel(name)
	}
	if e := x.killed(name, m); e != nil { // whatever was thrown while the body came
		return nil, e
	}
	x.asked, x.routed, x.named = m, m, name
	if id := x.in.PreviousResponseID; id != "" {
		o, ok := x.p.owners.get(id)
		if !ok || o.tenant != x.caller.Tenant {
			e := malformed(http.StatusNotFound, "previous_response_id", "no response %q of this tenant", clip(id, 128))
			return nil, e
		}
		x.only, x.earlier, x.guessed = o.endpoint, o.tokens, o.guessed
		x.descend()
		return []*Model{m}, nil
	}
	x.steer()
	x.descend()
	return x.fitting(x.candidates(x.routed))
}

// candidates are the models that may answer for m, in the order in which they are tried.
func (x *exchange) candidates(m *Model) []*Model {
	ms := []*Model{m}
	if x.noDegrade {
		return ms
	}
	s := x.p.switches.Load()
	for _, f := range m.Fallback[:min(len(m.Fallback), maxFallbacks)] {
		if fm := x.mayUse(f); fm != nil && s.model(f, fm) == nil {
			ms = append(ms, fm)
		}
	}
	if x.smaller = len(ms) > 1 && x.generates() && x.rungs.Has(ladder.SmallerModel); x.smaller {
		ms = append(ms[1:], m) // better than no answer
	}
	return ms
}

// mayUse is the model of that name if it exists and the key may use it.
func (x *exchange) mayUse(name string) *Model {
	m := x.snap.Models[name]
	if m == nil || x.caller.Models != nil && !x.caller.Models[m.Name] {
		return nil
	}
	return m
}

func (x *exchange) modelNames() []string {
	var mine []string
	for _, n := range x.snap.ModelNames {
		if x.mayUse(n) != nil {
			mine = append(mine, n)
		}
	}
	return mine
}

// mayFallBack: another model can help only where this one is exhausted or has no backend.
func (x *exchange) mayFallBack(err error) bool {
	if x.answer.begun || x.r.Context().Err() != nil {
		return false
	}
	if _, ok := errors.AsType[*Error](err); ok {
		return x.res.refusedModel
	}
	return full(err) || errors.Is(err, upstream.ErrNoBackend) || upstream.Retryable(err) || x.mayReplay(err)
}

// refuse answers with an error, also where the context has ended: a body that broke off
// ends it too, and to return without a word would make the server say 200.
func (x *exchange) refuse(e *Error) {
	if (e.malformed || e.Status == http.StatusUnauthorized) && !x.cache.early {
		x.p.cfg.Prefilter.Fault(time.Now(), x.ip, x.credential)
	}
	x.stateHeaders()
	x.answer.status = e.Status
	e.write(x.w, x.r, x.id)
}

// finish settles what is still open, frees what is held, and writes the record.
func (x *exchange) finish() {
	x.settle(outcomeFailed)
	x.endFill(FillEnd{Kind: FillAbandoned}) // of a panic
	x.record()
	if x.body != nil {
		x.body.Release()
	}
}

func unauthorized(code, message string) *Error {
	return newError(http.StatusUnauthorized, code, "%s", message)
}

// credential is the key as presented, "" for none.
func credential(r *http.Request) string {
	if a := r.Header.Get("Authorization"); a != "" {
		if scheme, key, ok := strings.Cut(a, " "); ok && strings.EqualFold(scheme, "Bearer") {
			return strings.TrimSpace(key)
		}
		return ""
	}
	return r.Header.Get("X-Api-Key")
}

// requestIDs keeps a sane id of the client's for the answer and the log, so that its
// traces join ours. Clients may repeat theirs; what the backend is told is unique.
func requestIDs(r *http.Request) (id, upstream string) {
	own := fmt.Sprintf("req_%016x%016x", rand.Uint64(), rand.Uint64())
	if id := r.Header.Get("X-Request-Id"); id != "" && len(id) <= 128 && strings.IndexFunc(id, func(c rune) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && !strings.ContainsRune("-_.:", c)
	}) < 0 {
		return id, id + "-" + own[len(own)-16:]
	}
	return own, own
}

func parseTimeout(s string) (time.Duration, bool) {
	d, err := time.ParseDuration(s)
	if f, ferr := strconv.ParseFloat(s, 64); ferr == nil && f < maxTimeout.Seconds()+1 {
		d, err = time.Duration(f*float64(time.Second)), nil
	}
	return d, err == nil && d > 0 && d <= maxTimeout
}
