package proxy

import (
	"bytes"
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

	"headgate/proxy/ladder"
	"headgate/proxy/openai"
)

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
	mode     cacheMode
	tags     []string
	surface  *Surface      // nil: it has no cache, or none was named
	model    *Model        // that why and key are for
	why      string        // why its answer is not kept; "": it may be
	key      [32]byte      // of its answer, where it may be kept
	shed     *Error        // the refusal unless an answer is at hand
	stale    *Cached       // what may be served where the model fails
	fill     CacheFill     // this request leads
	early    bool          // nobody waits for this request: it refreshes what is kept
	missed   bool          // and counted so
	waited   time.Duration // for others' answers
	rejected int           // of those, that would not do
	extra    int64         // tokens of what was kept of an answer, to be charged with the rest
	unkept   string        // why an answer that a model gave is not kept
	pub      publisher
	least    float64                        // similarity of a question whose answer will do
	learn    func(e *CacheEntry, keep bool) // wants to know what the model says; nil: nobody does
	tier     string                         // that answered: exact, stale, live, semantic or ""
	via      string                         // of the cache of similar questions that answered
	alike    float64                        // how similar that question is
	age      time.Duration
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
		tags, err := parseTags(c.tags, line, maxCacheTags)
		if err != nil {
			return malformed(http.StatusBadRequest, "X-Headgate-Cache-Tags", "X-Headgate-Cache-Tags: %v", err)
		}
		c.tags = tags
	}
	return x.leastSimilarity()
}

// parseTags adds the tags of a comma-separated line, up to so many.
func parseTags(tags []string, line string, most int) ([]string, error) {
	for tag := range strings.SplitSeq(line, ",") {
		tag = strings.TrimSpace(tag)
		switch {
		case tag == "" || slices.Contains(tags, tag):
			continue
		case len(tags) >= most:
			return nil, fmt.Errorf("more than %d tags", most)
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

// consider finds the surface whose cache the request is for, if there is one.
func (x *exchange) consider() {
	if s := x.snap.Surfaces[x.surface]; x.p.cfg.Cache != nil && s != nil && s.Exact != nil {
		x.cache.surface = s
	}
}

// tagged says whether an answer that was kept has the tags of this request. Where it has not, its end
// would not come with theirs: it is asked for anew, and kept with both.
func (x *exchange) tagged(k *Cached) bool {
	c := &x.cache
	if k.Via != "" {
		return x.acceptable(k)
	}
	if k.Live { // it was asked for while this request waited; who asks next finds what it lacks
		return true
	}
	has := hasTags(k.Tags, c.tags)
	if has || c.mode == cacheOnly {
		return has
	}
	c.mode, c.tags = cacheRefresh, joinTags(c.tags, k.Tags)
	return false
}

// hasTags says whether tags has all that are wanted.
func hasTags(tags, wanted []string) bool {
	return !slices.ContainsFunc(wanted, func(tag string) bool { return !slices.Contains(tags, tag) })
}

// joinTags are both, as far as there is room.
func joinTags(tags, more []string) []string {
	out := slices.Clone(tags)
	for _, tag := range more {
		if len(out) < maxEntryTags && !slices.Contains(out, tag) {
			out = append(out, tag)
		}
	}
	return out
}

// caching says whether the answer of x.model may be found, or kept; why says why not.
func (x *exchange) caching() bool {
	c := &x.cache
	if c.surface == nil || c.mode == cacheBypass {
		return false
	}
	if c.model != x.model {
		c.model, c.why = x.model, x.uncacheable()
		if c.why == "" {
			c.why = x.deriveKey()
		}
	}
	return c.why == ""
}

// deriveKey names the answer of x.model. It says why there is no such name; "": there is.
func (x *exchange) deriveKey() (why string) {
	cc := x.cacheContext()
	key, err := x.p.cfg.Cache.Key(&cc)
	if err != nil {
		return "the body has no canonical form: " + err.Error()
	}
	x.cache.key = key
	return ""
}

// cacheContext is what the answer of x.model depends on. What a request is passed on with, and
// may change its answer, has to be here.
func (x *exchange) cacheContext() CacheContext {
	s := x.cache.surface
	cc := CacheContext{
		Tenant: x.caller.Tenant, Surface: s.Name, Template: s.Template, Model: x.model.Upstream, ModelVersion: x.model.Version,
		Backends: x.model.Backends, Path: x.r.URL.Path, Query: x.r.URL.RawQuery, Normalize: s.Exact.Normalize, Body: x.sentBody(),
	}
	if !s.Share {
		cc.User, cc.Claimed = x.payer(), cmp.Or(x.in.User, x.in.EndUser)
	}
	for name, values := range x.passedHeader() { // not those that came: some are taken off on the way
		if x.p.cfg.Cache.Counts(name) {
			for _, v := range values {
				cc.Header = append(cc.Header, name+": "+v)
			}
		}
	}
	return cc
}

// sentBody is the body as the ladder leaves it.
func (x *exchange) sentBody() []byte {
	if x.cut == 0 {
		return x.body.Bytes()
	}
	return bytes.Join(x.in.Pieces(x.body.Bytes(), openai.Changes{Cap: x.cut}), nil)
}

// try answers by x.model: from the cache where it can, else from a backend.
func (x *exchange) try() error {
	if !x.caching() {
		return x.tryModel()
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
		err := x.turn(rejoins == 0, metered)
		if !errors.Is(err, errLiveBroke) || rejoins == maxRejoins {
			return err
		}
	}
}

// tryModel answers by x.model itself.
func (x *exchange) tryModel() error {
	c := &x.cache
	switch {
	case c.shed != nil:
		return c.shed
	case c.mode == cacheOnly && c.surface == nil:
		return errNotKept("no answer to this request is ever kept: it is of no surface with a cache")
	case c.mode == cacheOnly:
		return errNotKept("no answer to this request is ever kept: " + c.why)
	}
	x.withoutCache()
	if err := x.admit(); err != nil {
		return err
	}
	return x.forward()
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

// cached counts what the cache did for this request. What that saved is the cost of answer.usage.
func (x *exchange) cached(outcome string) {
	saved := int64(0)
	if x.cache.tier != "" && x.model != nil {
		saved = x.model.Cost(x.answer.usage, int64(x.in.Images), 0)
	}
	x.p.met.cached(x.caller.Tenant, outcome, saved)
	if w := x.p.cfg.Watch; w != nil {
		e := CacheEvent{Tenant: x.caller.Tenant, Surface: x.surface, Outcome: outcome, Why: x.cache.why, Personal: x.cache.surface.Personal, SavedNanoUSD: saved}
		if x.cache.why == "" && x.cache.mode != cacheBypass {
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

// ageHeader says how old an answer is (RFC 9111, section 5.1).
func (x *exchange) ageHeader(age time.Duration) {
	x.cache.age = age
	x.w.Header().Set("Age", strconv.FormatInt(int64(age/time.Second), 10))
}

// enter takes what a request costs that the cache may answer.
func (x *exchange) enter(metered bool) error {
	if metered {
		return x.admit()
	}
	x.res.inTokens, x.res.outTokens, x.res.nanoUSD = 0, 0, 0
	return x.admitRequest()
}

// turn asks the cache once and does what it says: first on this node, where that has not been done.
func (x *exchange) turn(look, metered bool) error {
	c := &x.cache
	x.slot, x.answer.backend = nil, "" // of an earlier attempt
	if look && (c.mode == cacheUse || c.mode == cacheOnly) {
		if k, ok := x.p.cfg.Cache.Look(c.key); ok && x.tagged(k) && x.serveKept(k, metered) {
			return nil
		}
	}
	if c.shed != nil {
		x.settle(outcomeRefused)
		return c.shed
	}
	t, err := x.join()
	if err != nil {
		x.settle(outcomeFailed)
		return err
	}
	switch {
	case t.Busy, t.Hit != nil && c.early: // what is kept is younger by now
		x.settle(outcomeRefused)
		return nil
	case t.Hit != nil && !x.tagged(t.Hit):
		if c.rejected++; c.mode != cacheOnly && c.rejected <= maxRejoins {
			return x.turn(false, metered)
		}
		t = CacheTurn{} // others are always faster: it asks for itself
	case t.Hit != nil && x.serveKept(t.Hit, metered):
		return nil
	case t.Hit != nil: // it can't be told as the client wants it
	case t.Live != nil:
		return x.followLive(t.Live, metered)
	case t.Failed != nil:
		if s := t.Failed.Status; t.Stale != nil && modelFailed(s) && x.serveStale(t.Stale) {
			return nil
		}
		return x.serveFailed(t.Failed, metered)
	}
	if c.mode == cacheOnly {
		if x.similar(metered) {
			return nil
		}
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
		if x.p.cfg.Elements == nil {
			return CacheTurn{}, nil
		}
		return CacheTurn{Hit: x.p.cfg.Elements.GetMany(ctx, [][32]byte{c.key})[0]}, nil
	}
	ask := CacheAsk{Key: c.key, Tenant: x.caller.Tenant, Tags: c.tags, Live: x.in.Stream, LeadFor: x.leadFor(), Refresh: c.mode == cacheRefresh, Early: c.early, Age: c.age, MaxEntry: c.surface.Exact.MaxBytes}
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
	if x.rungs.Has(ladder.StaleCache) && c.stale != nil && c.mode == cacheUse && !c.early && x.serveRipe(c.stale, metered) {
		return nil
	}
	if x.similar(metered) {
		return nil
	}
	x.cacheHeader("miss")
	x.missed()
	if !metered {
		if err := x.admitRest(); err != nil {
			x.endFill(FillEnd{Kind: FillUnasked})
			return err
		}
	}
	err := x.forward()
	x.endFill(x.failedLead(err)) // unless it has ended
	if err != nil && !x.answer.begun && c.stale != nil && x.r.Context().Err() == nil && !isRefusal(err) && x.serveStale(c.stale) {
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

// unkept counts that an answer was paid for and is not kept, and why, in a word.
func (x *exchange) unkept(why string) {
	x.cache.unkept = why
	x.p.met.unkept.WithLabelValues(why).Inc()
	if w := x.p.cfg.Watch; w != nil {
		w.Note(&CacheEvent{Tenant: x.caller.Tenant, Surface: x.surface, Outcome: "unkept", Why: why, Personal: x.cache.surface.Personal})
	}
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
		x.teach(&e)
	}
}

// errLiveBroke: another's stream broke off before any of it came here.
var errLiveBroke = errors.New("the answer of another request broke off")

// serveKept answers with what was kept. It does not where that can't be told as the client wants
// it: then nothing has been done.
func (x *exchange) serveKept(k *Cached, metered bool) (served bool) {
	body, contentType, ok := x.shaped(k)
	if ok {
		x.handOut(k, body, contentType, metered)
	}
	return ok
}

// shaped is shape; where that fails, it is logged.
func (x *exchange) shaped(k *Cached) (body []byte, contentType string, ok bool) {
	body, contentType, err := x.shape(k)
	if err != nil {
		x.p.cfg.Logger.Debug("a kept answer can't be replayed", "request_id", x.id, "error", err)
	}
	return body, contentType, err == nil
}

// handOut answers with k, in that shape.
func (x *exchange) handOut(k *Cached, body []byte, contentType string, metered bool) {
	word := "exact"
	switch {
	case k.Via != "":
		word = tierSemantic
		x.cache.via, x.cache.alike = k.Via, k.Similarity
		x.w.Header().Set("X-Headgate-Cache-Entry", k.Via)
		x.w.Header().Set("X-Headgate-Similarity", strconv.FormatFloat(k.Similarity, 'f', 3, 64))
	case k.Live:
		word = "live"
	case k.Stale:
		word = "stale"
	}
	x.answer.usage = openai.Usage{Input: k.Input, CachedInput: k.CachedInput, Output: k.Output, Known: true}
	x.settleKept(word, metered)
	x.cacheHeader(word)
	x.ageHeader(k.Age)
	x.write(http.StatusOK, contentType, body)
	if k.Refresh && x.cache.mode != cacheOnly {
		x.refreshLater(k)
	}
}

// shape is what was kept as the client wants it: whole, or as a stream.
func (x *exchange) shape(k *Cached) (body []byte, contentType string, err error) {
	if !x.in.Stream {
		return k.Body, k.ContentType, nil
	}
	body, err = openai.Replay(x.route.kind, k.Body, openai.ReplayOptions{IncludeUsage: x.in.WantsUsage, Sound: true})
	return body, "text/event-stream; charset=utf-8", err
}

// settleKept settles for an answer that no model was asked for.
func (x *exchange) settleKept(word string, metered bool) {
	x.cache.tier = word
	x.cached(word)
	x.answer.status = http.StatusOK
	x.tab.clamped = false // nothing was cut
	if metered {
		x.answer.whole = true
		x.settle(outcomeAnswered)
		return
	}
	x.payNothing()
	x.settle(outcomeCached)
}

// serveStale answers with what is too old, the model having failed. The reservation is settled.
func (x *exchange) serveStale(k *Cached) bool {
	body, contentType, err := x.shape(k)
	if err != nil {
		return false
	}
	x.cache.tier = "stale"
	x.answer.usage = openai.Usage{Input: k.Input, CachedInput: k.CachedInput, Output: k.Output, Known: true}
	x.cached("stale_if_error")
	x.settle(outcomeFailed)
	x.cacheHeader("stale")
	x.ageHeader(k.Age)
	x.w.Header().Del("X-Headgate-Backend")
	x.answer.backend = ""
	x.write(http.StatusOK, contentType, body)
	return true
}

// serveRipe answers with what is too old since the ladder says so, without asking the model.
func (x *exchange) serveRipe(k *Cached, metered bool) bool {
	body, contentType, ok := x.shaped(k)
	if !ok {
		return false
	}
	x.served |= ladder.SetOf(ladder.StaleCache)
	x.endFill(FillEnd{Kind: FillUnasked})
	ripe := *k
	ripe.Stale, ripe.Refresh = true, false
	x.handOut(&ripe, body, contentType, metered)
	return true
}

// serveFailed passes the model's error on, as it was told to another request.
func (x *exchange) serveFailed(f *CacheFailure, metered bool) error {
	x.cached("failed")
	x.answer.status = f.Status
	if !metered {
		x.payNothing()
	}
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
	if x.answer.firstAt == 0 {
		x.answer.firstAt = time.Since(x.start)
	}
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
		x.payNothing()
	}
	x.cache.tier = "live"
	x.cacheHeader("live")
	h := x.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	x.answer.status = http.StatusOK
	src := &source{ctx: ctx, r: &liveReader{ctx: ctx, live: live}, alive: func() { silence.Reset(x.timeout) }}
	err := x.relayStream(src, x.newSink())
	if err != nil && !x.answer.begun && ctx.Err() == nil {
		x.cache.tier = ""
		if !metered { // else what was reserved is for the answer that comes instead
			x.settleBill(outcomeRefused)
		}
		return errors.Join(errLiveBroke, err)
	}
	return err
}
