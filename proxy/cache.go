package proxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"headgate/proxy/openai"
)

// Bounds of what the cache is asked.
const (
	maxCacheTags  = 16               // of a request or an answer
	maxCacheTag   = 128              // bytes
	streamSilence = 30 * time.Second // of a stream that another leads, before its first byte
	maxRejoins    = 2                // after another's answer broke off before its first byte came here
)

// Cache is what the front door needs of the cache of answers. It is safe for concurrent use.
type Cache interface {
	// Key names the answer of c. It fills in c.Generations.
	Key(c *CacheContext) ([32]byte, error)
	// Look finds an answer on this node. It never waits.
	Look(key [32]byte) (*Cached, bool)
	// Join finds an answer in the cluster, or waits for that of another request, or lets this one
	// lead. It fails when ctx ends, and then with its error.
	Join(ctx context.Context, a *CacheAsk) (CacheTurn, error)
	// Counts says whether a header that is passed on may change an answer.
	Counts(header string) bool
}

// CacheContext is all that an answer depends on. The cache's own context has the same fields.
type CacheContext struct {
	Tenant       string
	User         string // whom the answer is for; "" where the surface shares within the tenant
	Claimed      string // the user that the body names without the right to, likewise
	Surface      string
	Template     string // the version of the surface's template
	Model        string // as the backends know it
	ModelVersion string
	Backends     []string
	Generations  [4]uint64 // filled in by Cache
	Path         string
	Query        string
	Header       []string // "Name: value" of those that count
	Normalize    string
	Body         []byte
}

// CacheLife says how long an answer is kept. It has the fields of the cache's own.
type CacheLife struct {
	TTL          time.Duration // from the fill on; half of it until the first hit
	MaxTTL       time.Duration // hits extend it to this at most
	Stale        time.Duration // after that, served while it is refreshed
	StaleIfError time.Duration // after that, served where the model fails
	Beta         float64       // how early hits refresh; 0: never
}

// Cached is an answer that was kept: JSON, as a model's server would send it unstreamed.
type Cached struct {
	ContentType                string
	Body                       []byte // not to be written to
	Tags                       []string
	Input, CachedInput, Output int64 // tokens that it took
	Age                        time.Duration
	Stale                      bool // older than its time
	Refresh                    bool // this request is the one that should refresh it
	Live                       bool // another request's, which has just been answered
}

// CacheAsk is one question to the cluster.
type CacheAsk struct {
	Key      [32]byte
	Live     bool // the stream of another will do while it passes
	Refresh  bool // nothing that is kept will do
	Early    bool // if another is at it already, or it is younger than Age by now, that is enough
	Age      time.Duration
	MaxEntry int64
	LeadFor  time.Duration // how long another may lead without a byte that others see
}

// CacheTurn is what to do next. One of Hit, Fill, Live and Failed is set, or none: then the
// request goes on without the cache. Busy answers Early.
type CacheTurn struct {
	Hit    *Cached
	Fill   CacheFill // this request leads
	Stale  *Cached   // beside Fill: what may be served where the model fails
	Live   CacheStream
	Failed *CacheFailure
	Busy   bool
}

// CacheStream is the stream of another request, as it passes. Next fails with io.EOF at its end;
// what it returns must not be written to.
type CacheStream interface {
	Next(ctx context.Context) ([]byte, error)
	Close()
}

// CacheFailure is an error of the model's, shared by those who had asked the same meanwhile.
type CacheFailure struct {
	Status      int
	ContentType string
	Body        []byte
}

// CacheFill is the right and the duty to get an answer for all who wait for it. End must be
// called; its first call counts.
type CacheFill interface {
	// Context is for the call of the model: it outlives the client as long as others wait.
	Context(client context.Context) (context.Context, context.CancelFunc)
	// Begin says that a stream of events has begun, Write what has passed of it. Neither waits.
	Begin(contentType string)
	Write(p []byte)
	End(FillEnd)
}

// FillEnd is how a fill ended.
type FillEnd struct {
	Kind    FillKind
	Entry   *CacheEntry  // of FillStore and FillShare
	Failure CacheFailure // of FillFailed
	Err     error        // of FillBroken
}

// FillKind says it in a word.
type FillKind uint8

// The ways in which a fill ends.
const (
	FillAbandoned   FillKind = iota // nobody answered; the next one leads
	FillRefused                     // likewise, for reasons of this request's own
	FillBroken                      // in the middle of the answer
	FillFailed                      // with an error of the model's
	FillStore                       // with an answer to be kept
	FillShare                       // with an answer for those who wait for it now
	FillUnshareable                 // with an answer for nobody else
)

// CacheEntry is an answer to be kept.
type CacheEntry struct {
	Tenant, Surface, ContentType string
	Body                         []byte // not written to any more
	Tags                         []string
	Input, CachedInput, Output   int64
	Life                         CacheLife
}

// Surface is a named product entry.
type Surface struct {
	Name, Template string
	Share          bool        // answers may be shared between the users of a tenant
	Personal       bool        // answers are about their users
	Exact          *ExactCache // nil: answers are not kept
}

// ExactCache is how a surface's answers are kept.
type ExactCache struct {
	Life        CacheLife
	Temperature float64 // above it answers are not kept, unless they have a seed
	Normalize   string  // what of the last user text does not count: none, space or fold
	Timestamps  bool    // answers with today's date or a time of day are kept, too
	Tools       bool    // so are those that call tools,
	Many        bool    // requests for several answers,
	Length      bool    // and answers cut at their cap
	MaxBytes    int64   // of an answer
	Volatile    bool    // nothing is served while this node does not hear of invalidations
}

// cacheMode is what a client asks of the cache.
type cacheMode uint8

const (
	cacheUse     cacheMode = iota
	cacheBypass            // neither read nor kept
	cacheRefresh           // not read, but kept
	cacheOnly              // read, and nothing else
)

// consult is what an exchange has to do with the cache.
type consult struct {
	mode    cacheMode
	tags    []string
	surface *Surface      // nil: it has no cache, or none was named
	why     string        // why the answer is not kept; "": it may be
	model   *Model        // that key is for
	key     [32]byte      // once it is known
	kept    *Cached       // found on this node
	stale   *Cached       // what may be served where the model fails
	fill    CacheFill     // this request leads
	early   bool          // nobody waits for this request: it refreshes what is kept
	missed  bool          // and counted so
	waited  time.Duration // for others' answers
	pub     publisher
	tier    string // that answered: exact, stale, live or ""
	age     time.Duration
}

// cacheHeaders reads what a client says of the cache.
func (x *exchange) cacheHeaders() error {
	h, c := x.r.Header, &x.cache
	switch s := h.Get("X-Headgate-Cache"); s {
	case "":
	case "bypass":
		c.mode = cacheBypass
	case "refresh":
		c.mode = cacheRefresh
	case "only":
		c.mode = cacheOnly
	default:
		return malformed(http.StatusBadRequest, "X-Headgate-Cache", "X-Headgate-Cache must be bypass, refresh or only; leave it out to use the cache")
	}
	for _, line := range h["X-Headgate-Cache-Tags"] {
		tags, err := parseTags(c.tags, line)
		if err != nil {
			return malformed(http.StatusBadRequest, "X-Headgate-Cache-Tags", "X-Headgate-Cache-Tags: %v", err)
		}
		c.tags = tags
	}
	return nil
}

// parseTags adds the tags of a comma-separated line.
func parseTags(tags []string, line string) ([]string, error) {
	for tag := range strings.SplitSeq(line, ",") {
		tag = strings.TrimSpace(tag)
		switch {
		case tag == "" || slices.Contains(tags, tag):
			continue
		case len(tags) == maxCacheTags:
			return nil, fmt.Errorf("more than %d tags", maxCacheTags)
		}
		if err := CheckTag(tag); err != nil {
			return nil, err
		}
		tags = append(tags, tag)
	}
	return tags, nil
}

// CheckTag says what is wrong with a tag of an answer.
func CheckTag(tag string) error {
	if tag == "" || len(tag) > maxCacheTag || !utf8.ValidString(tag) || strings.ContainsFunc(tag, func(c rune) bool { return c <= ' ' || c == ',' || c == 0x7f }) {
		return fmt.Errorf("a tag is 1 to %d bytes of text without spaces, commas and control characters, not %q", maxCacheTag, clip(tag, 80))
	}
	return nil
}

// consider finds out whether the cache has to do with this request, and looks on this node. m is
// the model that would answer first.
func (x *exchange) consider(m *Model) error {
	c := &x.cache
	if x.p.cfg.Cache == nil || x.surface == "" {
		return x.onlyKept()
	}
	s := x.snap.Surfaces[x.surface]
	if s == nil || s.Exact == nil {
		return x.onlyKept()
	}
	c.surface = s
	x.model = m
	if c.mode == cacheBypass {
		return nil
	}
	if c.why = x.uncacheable(); c.why == "" {
		c.why = x.deriveKey()
	}
	if c.why != "" {
		return x.onlyKept()
	}
	if c.mode == cacheUse || c.mode == cacheOnly {
		c.kept, _ = x.p.cfg.Cache.Look(c.key)
		if c.kept != nil && !x.tagged(c.kept) {
			c.kept = nil
		}
	}
	return nil
}

// tagged says whether an answer that was kept has the tags of this request. Where it has not, its end
// would not come with theirs: it is asked for anew, and kept with both.
func (x *exchange) tagged(k *Cached) bool {
	c := &x.cache
	missing := slices.ContainsFunc(c.tags, func(tag string) bool { return !slices.Contains(k.Tags, tag) })
	if !missing || c.mode == cacheOnly {
		return !missing
	}
	c.mode, c.tags = cacheRefresh, joinTags(c.tags, k.Tags)
	return false
}

// joinTags are both, as far as there is room.
func joinTags(tags, more []string) []string {
	out := slices.Clone(tags)
	for _, tag := range more {
		if len(out) < maxCacheTags && !slices.Contains(out, tag) {
			out = append(out, tag)
		}
	}
	return out
}

// onlyKept refuses a request for what is kept where nothing ever is.
func (x *exchange) onlyKept() error {
	if x.cache.mode != cacheOnly {
		return nil
	}
	why := "its surface has no cache"
	if x.cache.why != "" {
		why = x.cache.why
	}
	return errNotKept("no answer to this request is ever kept: " + why)
}

// deriveKey names the answer of x.model. It says why there is no such name; "": there is.
func (x *exchange) deriveKey() (why string) {
	c := &x.cache
	if c.model == x.model {
		return ""
	}
	c.kept = nil // of another model
	cc := x.cacheContext()
	key, err := x.p.cfg.Cache.Key(&cc)
	if err != nil {
		return "the body has no canonical form: " + err.Error()
	}
	c.key, c.model = key, x.model
	return ""
}

// cacheContext is what the answer of x.model depends on. What a request is passed on with, and
// may change its answer, has to be here.
func (x *exchange) cacheContext() CacheContext {
	s := x.cache.surface
	cc := CacheContext{
		Tenant: x.caller.Tenant, Surface: s.Name, Template: s.Template, Model: x.model.Upstream, ModelVersion: x.model.Version,
		Backends: x.model.Backends, Path: x.r.URL.Path, Query: x.r.URL.RawQuery, Normalize: s.Exact.Normalize, Body: x.body.Bytes(),
	}
	if !s.Share {
		cc.User, cc.Claimed = x.payer(), x.in.User
	}
	for name, values := range x.r.Header {
		if x.p.cfg.Cache.Counts(name) {
			for _, v := range values {
				cc.Header = append(cc.Header, name+": "+v)
			}
		}
	}
	return cc
}

// caching says whether the answer of x.model may be found, or kept.
func (x *exchange) caching() bool {
	return x.cache.surface != nil && x.cache.why == "" && x.cache.mode != cacheBypass
}

// try answers by x.model: from the cache where it can, else from a backend.
func (x *exchange) try() error {
	if !x.caching() {
		x.withoutCache()
		if err := x.admit(); err != nil {
			return err
		}
		return x.forward()
	}
	if x.cache.why = x.deriveKey(); x.cache.why != "" {
		return x.try()
	}
	if x.route.kind == openai.Embedding {
		if ok, err := x.embed(); ok {
			return err
		}
	}
	metered := x.caller.CachedMetered
	if err := x.enter(metered); err != nil {
		return err
	}
	for rejoins := 0; ; rejoins++ {
		err := x.turn(metered)
		if !errors.Is(err, errLiveBroke) || rejoins == maxRejoins {
			return err
		}
	}
}

// withoutCache says so, where the surface has a cache.
func (x *exchange) withoutCache() {
	word := ""
	switch c := &x.cache; {
	case c.surface == nil:
		return
	case c.mode == cacheBypass:
		word = "bypass"
	default:
		word = "uncacheable"
	}
	x.cached(word)
	x.cacheHeader(word)
}

// CacheWatch is told what the cache does for whom. It must not block and may be called concurrently.
type CacheWatch interface {
	Note(e *CacheEvent)
	// Asked tells of a request that a model has answered, for the caches of its prefixes.
	Asked(e *PromptEvent)
}

// CacheEvent is what the cache did for one request.
type CacheEvent struct {
	Tenant, Surface string
	Outcome         string // as headgate_cache_requests_total has it
	Why             string // of uncacheable
	Personal        bool   // the surface's answers are about their users
	SavedNanoUSD    int64
	Context         func() CacheContext // what the key is made of, until Note returns; nil: it has none
}

// PromptEvent is a request that a model has answered.
type PromptEvent struct {
	Tenant, Surface, Template, Model string
	Path                             string
	Body                             []byte // until Asked returns
	Input, CachedInput               int64  // tokens
}

// cached counts what the cache did for this request. What that saved is the cost of answer.usage.
func (x *exchange) cached(outcome string) {
	saved := int64(0)
	if x.cache.tier != "" && x.model != nil {
		saved = x.model.Cost(x.answer.usage, int64(x.in.Images), 0)
	}
	x.p.met.cached(x.caller.Tenant, outcome, saved)
	if w := x.p.cfg.Watch; w != nil {
		e := CacheEvent{Tenant: x.caller.Tenant, Surface: x.surface, Outcome: outcome, Why: x.cache.why, Personal: x.cache.surface.Personal, SavedNanoUSD: saved}
		if x.cache.model != nil {
			e.Context = x.cacheContext
		}
		w.Note(&e)
	}
}

// tellPrompt tells of a request that the model has answered as a whole.
func (x *exchange) tellPrompt(u openai.Usage) {
	w := x.p.cfg.Watch
	if w == nil || !x.route.generate || x.surface == "" || x.body == nil {
		return
	}
	e := PromptEvent{Tenant: x.caller.Tenant, Surface: x.surface, Model: x.model.Name, Path: x.r.URL.Path, Body: x.body.Bytes(), Input: u.Input, CachedInput: u.CachedInput}
	if s := x.snap.Surfaces[x.surface]; s != nil {
		e.Template = s.Template
	}
	w.Asked(&e)
}

// word says what the cache did, for the log.
func (c *consult) word() string {
	switch {
	case c.tier != "":
		return c.tier
	case c.mode == cacheBypass:
		return "bypass"
	case c.why != "":
		return "uncacheable"
	case c.early:
		return "refresh"
	}
	return "miss"
}

func (x *exchange) cacheHeader(word string) { x.w.Header().Set("X-Headgate-Cache", word) }

// enter takes what a request costs that the cache may answer.
func (x *exchange) enter(metered bool) error {
	if metered {
		return x.admit()
	}
	x.res.inTokens, x.res.outTokens, x.res.nanoUSD = 0, 0, 0
	return x.admitRequest()
}

// turn asks the cache once and does what it says.
func (x *exchange) turn(metered bool) error {
	c := &x.cache
	if kept := c.kept; kept != nil {
		c.kept = nil
		if served, err := x.serveKept(kept, metered); served || err != nil {
			return err
		}
	}
	t, err := x.join()
	if err != nil {
		x.settle(outcomeFailed)
		return err
	}
	switch {
	case t.Busy:
		x.settle(outcomeRefused)
		return nil
	case t.Hit != nil && !x.tagged(t.Hit):
		if c.mode != cacheOnly {
			return x.turn(metered)
		}
	case t.Hit != nil:
		if served, err := x.serveKept(t.Hit, metered); served || err != nil {
			return err
		}
	case t.Live != nil:
		return x.followLive(t.Live, metered)
	case t.Failed != nil:
		if s := t.Failed.Status; t.Stale != nil && modelFailed(s) && x.serveStale(t.Stale) {
			return nil
		}
		return x.serveFailed(t.Failed)
	}
	if c.mode == cacheOnly {
		x.settle(outcomeMalformed)
		return errNotKept("no answer to this request is kept")
	}
	return x.lead(&t, metered)
}

// join asks the cluster, for as long as the request's timeout.
func (x *exchange) join() (CacheTurn, error) {
	c := &x.cache
	began := time.Now()
	defer func() { c.waited += time.Since(began) }()
	ctx, cancel := context.WithTimeout(x.r.Context(), x.timeout-min(c.waited, x.timeout))
	defer cancel()
	defer context.AfterFunc(x.p.uncut, cancel)()
	if c.mode == cacheOnly {
		return CacheTurn{Hit: x.p.cfg.Elements.GetMany(ctx, [][32]byte{c.key})[0]}, nil
	}
	ask := CacheAsk{Key: c.key, Live: x.in.Stream, LeadFor: x.leadFor(), Refresh: c.mode == cacheRefresh, Early: c.early, Age: c.age, MaxEntry: c.surface.Exact.MaxBytes}
	if x.route.kind == openai.Embedding {
		ask.MaxEntry = maxAnswerHeld
	}
	t, err := x.p.cfg.Cache.Join(ctx, &ask)
	switch {
	case err == nil:
		return t, nil
	case x.r.Context().Err() != nil:
		x.answer.clientGo = true
		return t, context.Cause(x.r.Context())
	case x.p.uncut.Err() != nil:
		return t, errStopping
	}
	return t, err
}

// leadFor is how long another may go on without a sign before this request asks the model, too. An
// answer that is not streamed gives none before its end.
func (x *exchange) leadFor() time.Duration {
	if x.in.Stream {
		return min(streamSilence, x.timeout/2)
	}
	return x.timeout / 2
}

// lead gets the answer from a backend, for itself or also for those who wait for it.
func (x *exchange) lead(t *CacheTurn, metered bool) error {
	c := &x.cache
	c.fill, c.stale, c.pub = t.Fill, t.Stale, publisher{}
	x.cacheHeader("miss")
	x.missed()
	if !metered {
		if err := x.admitRest(); err != nil {
			x.endFill(FillEnd{Kind: FillRefused})
			return err
		}
	}
	err := x.forward()
	x.endFill(x.failedLead(err)) // unless it has ended
	if err != nil && !x.answer.started && c.stale != nil && x.r.Context().Err() == nil && !isRefusal(err) && x.serveStale(c.stale) {
		return nil
	}
	return err
}

// failedLead is how a fill ends whose lead came to nothing by err.
func (x *exchange) failedLead(err error) FillEnd {
	switch {
	case x.cache.pub.began:
		return FillEnd{Kind: FillBroken}
	case err == nil:
		return FillEnd{Kind: FillAbandoned}
	case x.r.Context().Err() != nil, x.hurried && errors.Is(err, context.DeadlineExceeded), errors.Is(err, errStopping):
		return FillEnd{Kind: FillRefused} // that says nothing of the model
	case x.fallsBack && x.mayFallBack(err):
		return FillEnd{Kind: FillAbandoned} // so may those who wait
	}
	return FillEnd{Kind: FillFailed, Failure: x.failure(asError(err))}
}

// failure is an error of the gateway's as those get it who wait for the same answer.
func (x *exchange) failure(e *Error) CacheFailure {
	return CacheFailure{Status: e.Status, ContentType: "application/json", Body: e.body(x.route.kind)}
}

// missed counts that the cache had no answer: once a request, whatever the models that it falls back to.
func (x *exchange) missed() {
	c := &x.cache
	switch {
	case c.missed:
	case c.mode == cacheRefresh: // nothing was looked up
		x.cached("refresh")
	default:
		x.cached("miss")
	}
	c.missed = true
}

// isRefusal: the gateway's own word, not a failure of the model's.
func isRefusal(err error) bool {
	_, ok := errors.AsType[*Error](err)
	return ok
}

// endFill ends the fill that x leads, if it does.
func (x *exchange) endFill(e FillEnd) {
	if x.cache.fill != nil {
		x.cache.fill.End(e)
		x.cache.fill = nil
	}
}

// errLiveBroke: another's stream broke off before any of it came here.
var errLiveBroke = errors.New("the answer of another request broke off")

// serveKept answers with what was kept. It does not where that can't be told as the client wants
// it: then nothing has been done.
func (x *exchange) serveKept(k *Cached, metered bool) (served bool, err error) {
	word := "exact"
	switch {
	case k.Live:
		word = "live"
	case k.Stale:
		word = "stale"
	}
	body, contentType, err := x.shape(k)
	if err != nil {
		x.p.cfg.Logger.Debug("a kept answer can't be replayed", "request_id", x.id, "error", err)
		return false, nil
	}
	x.answer.usage = openai.Usage{Input: k.Input, CachedInput: k.CachedInput, Output: k.Output, Known: true}
	if err := x.settleKept(word, metered); err != nil {
		return true, err
	}
	x.cache.age = k.Age
	x.cacheHeader(word)
	x.w.Header().Set("Age", strconv.FormatInt(int64(k.Age/time.Second), 10))
	x.write(http.StatusOK, contentType, body)
	if k.Refresh {
		x.refreshLater(k)
	}
	return true, nil
}

// shape is what was kept as the client wants it: whole, or as a stream.
func (x *exchange) shape(k *Cached) (body []byte, contentType string, err error) {
	if !x.in.Stream {
		return k.Body, k.ContentType, nil
	}
	body, err = openai.Replay(x.route.kind, k.Body, openai.ReplayOptions{IncludeUsage: x.in.WantsUsage})
	return body, "text/event-stream; charset=utf-8", err
}

// settleKept settles for an answer that no model was asked for.
func (x *exchange) settleKept(word string, metered bool) error {
	x.cache.tier = word
	x.cached(word)
	x.answer.status = http.StatusOK
	if metered {
		x.answer.whole = true
		x.settle(outcomeAnswered)
		return nil
	}
	if err := x.payNothing(); err != nil {
		return err
	}
	x.settle(outcomeCached)
	return nil
}

// serveStale answers with what is too old, the model having failed. The reservation is settled.
func (x *exchange) serveStale(k *Cached) bool {
	body, contentType, err := x.shape(k)
	if err != nil {
		return false
	}
	x.cache.tier, x.cache.age = "stale", k.Age
	x.cached("stale_if_error")
	x.settle(outcomeFailed)
	x.cacheHeader("stale")
	x.w.Header().Set("Age", strconv.FormatInt(int64(k.Age/time.Second), 10))
	x.answer.backend = ""
	x.write(http.StatusOK, contentType, body)
	return true
}

// serveFailed passes the model's error on, as it was told to another request.
func (x *exchange) serveFailed(f *CacheFailure) error {
	x.cached("failed")
	x.settle(outcomeMalformed)
	if len(f.Body) == 0 {
		return newError(cmp.Or(f.Status, http.StatusBadGateway), "upstream_error", "the answer broke off for two other requests that asked the same; try again")
	}
	x.cacheHeader("live")
	x.write(f.Status, f.ContentType, f.Body)
	return nil
}

// write sends a whole answer. The client may be gone; nothing depends on it.
func (x *exchange) write(status int, contentType string, body []byte) {
	h := x.w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	x.answer.status = status
	x.first()
	dst := sink{x: x, out: attached{Writer: x.w}}
	if dst.Write(body) != nil {
		x.answer.clientGo = true
	}
}

// liveReader reads the stream of another request.
type liveReader struct {
	ctx  context.Context
	live CacheStream
	rest []byte
}

func (r *liveReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		next, err := r.live.Next(r.ctx)
		if err != nil {
			return 0, err
		}
		r.rest = next
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// followLive passes on the stream of the request that leads, as it comes.
func (x *exchange) followLive(live CacheStream, metered bool) error {
	defer live.Close()
	ctx, cancel := context.WithCancelCause(x.r.Context())
	defer cancel(nil)
	silence := time.AfterFunc(x.timeout, func() { cancel(context.DeadlineExceeded) })
	defer silence.Stop()
	defer context.AfterFunc(x.p.uncut, func() { cancel(errStopping) })()

	if !metered {
		if err := x.payNothing(); err != nil {
			x.settle(outcomeRefused)
			return err
		}
	}
	x.cache.tier = "live"
	x.cacheHeader("live")
	h := x.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	x.answer.status = http.StatusOK
	src := &source{ctx: ctx, r: &liveReader{ctx: ctx, live: live}, alive: func() { silence.Reset(x.timeout) }}
	err := x.relayStream(src, x.newSink())
	if err != nil && !x.answer.started && ctx.Err() == nil {
		x.cache.tier = ""
		x.settleBill(outcomeRefused)
		return errors.Join(errLiveBroke, err)
	}
	return err
}
