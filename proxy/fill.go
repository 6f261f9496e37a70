package proxy

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"headgate/proxy/ladder"
	"headgate/proxy/openai"
)

const (
	maxFailureKept = 64 << 10 // bytes of an error that is shared
	maxAnswerHeld  = 16 << 20 // bytes of embeddings that are gathered to be shared
	maxRefreshes   = 256      // requests at once that refresh what is kept
)

// publisher gathers the answer of a request that leads, and passes it to those who wait.
type publisher struct {
	assembler *openai.Assembler // of a stream
	body      []byte            // of an answer that is none
	began     bool              // others may have had some of it
	over      bool              // it is longer than is gathered
	private   bool              // the backend says that nobody else may have it
	tags      []string
}

// observe learns from the head of the answer what is to be done with it.
func (x *exchange) observe(h http.Header) {
	if x.cache.fill == nil && !x.recording {
		return
	}
	p := publisher{tags: x.cache.tags}
	for _, line := range h["X-Headgate-Cache-Tags"] {
		if tags, err := parseTags(p.tags, line, maxEntryTags); err == nil { // those of a backend that can't be read are none
			p.tags = tags
		} else {
			p.private = true // whoever tagged it counts on being able to take it back
		}
	}
	for _, v := range h["Cache-Control"] {
		v = strings.ToLower(v)
		p.private = p.private || strings.Contains(v, "no-store") || strings.Contains(v, "private")
	}
	x.cache.pub = p
}

// publishStream begins to gather what passes of s. Others may follow it, unless what comes may be
// for nobody else: cut to this request's own budget, or with calls of tools that are not shared.
func (x *exchange) publishStream(s *openai.Stream) {
	fill, pub := x.cache.fill, &x.cache.pub
	if fill == nil {
		return
	}
	pub.assembler = openai.NewAssembler(x.route.kind, int(x.cache.surface.Exact.MaxBytes))
	s.Assemble(pub.assembler)
	pub.began = !pub.private && !x.tab.clamped && (!x.in.Bounds.Tools || x.cache.surface.Exact.Tools)
	if pub.began {
		fill.Begin("text/event-stream")
	}
}

// publish passes on what came of a stream.
func (x *exchange) publish(p []byte) {
	if x.cache.fill != nil && x.cache.pub.began {
		x.cache.fill.Write(p)
	}
}

// publishStreamEnd ends the fill, before the client can know that the answer is whole.
func (x *exchange) publishStreamEnd(s *openai.Stream) {
	pub := &x.cache.pub
	if x.cache.fill == nil || pub.assembler == nil {
		return
	}
	if f := s.Failure(); f != nil { // those who follow have seen it, too
		e := newError(http.StatusBadGateway, "upstream_error", "the backend failed in the middle of the answer: %s", clip(f.Message, 512))
		x.endFill(FillEnd{Kind: FillFailed, Failure: x.failure(e)})
		return
	}
	body, ok := pub.assembler.JSON()
	if !ok {
		x.unkept("shape")
		x.endFill(FillEnd{Kind: FillUnshareable})
		return
	}
	x.endFill(x.judge("application/json", body))
}

// publishBody gathers an answer that is no stream.
func (x *exchange) publishBody(p []byte) {
	pub := &x.cache.pub
	if x.cache.fill == nil || pub.over {
		return
	}
	most := x.cache.surface.Exact.MaxBytes
	if x.recording {
		most = maxAnswerHeld
	}
	if pub.over = int64(len(pub.body)+len(p)) > most; !pub.over {
		pub.body = append(pub.body, p...)
	}
}

// publishBodyEnd ends the fill, before the client can know that the answer is whole.
func (x *exchange) publishBodyEnd(status int, contentType string) {
	pub := &x.cache.pub
	switch failed := status >= http.StatusBadRequest || x.answer.failure != nil; {
	case x.cache.fill == nil:
	case failed && (pub.over || len(pub.body) > maxFailureKept):
		e := newError(max(status, http.StatusBadRequest), "upstream_error", "the backend answered two requests that asked the same with an error that is too long to be repeated")
		x.endFill(FillEnd{Kind: FillFailed, Failure: x.failure(e)})
	case pub.over:
		x.unkept("max_bytes")
		x.endFill(FillEnd{Kind: FillUnshareable})
	case failed:
		x.endFill(FillEnd{Kind: FillFailed, Failure: CacheFailure{Status: status, ContentType: contentType, Body: pub.body}})
	case status != http.StatusOK:
		x.endFill(FillEnd{Kind: FillUnshareable})
	default:
		x.endFill(x.judge(contentType, pub.body))
	}
}

// publishOpaqueEnd ends the fill with an answer that can't be looked into.
func (x *exchange) publishOpaqueEnd(status int) {
	if x.cache.fill == nil || status >= http.StatusBadRequest {
		return
	}
	x.unkept("shape")
	x.endFill(FillEnd{Kind: FillUnshareable})
}

// judge says who may have a whole answer: everybody who asks the same for a while, those who wait
// for it now, or nobody else.
func (x *exchange) judge(contentType string, body []byte) FillEnd {
	exact, pub := x.cache.surface.Exact, &x.cache.pub
	e := &CacheEntry{
		Tenant: x.caller.Tenant, Surface: x.surface, ContentType: contentType, Body: body, Tags: pub.tags,
		Input: x.answer.usage.Input, CachedInput: x.answer.usage.CachedInput, Output: x.answer.usage.Output, Life: exact.Life,
	}
	kind, why := x.judgeText(contentType, body)
	switch {
	case pub.private:
		kind, why = FillUnshareable, "private"
	}
	if why != "" {
		x.unkept(why)
	} else if x.recording { // it is kept by its parts
		kind = FillShare
	}
	return FillEnd{Kind: kind, Entry: e}
}

// judgeText looks into an answer: whether it may be kept, and if not, why, in a word.
func (x *exchange) judgeText(contentType string, body []byte) (kind FillKind, why string) {
	exact := x.cache.surface.Exact
	if !strings.HasPrefix(contentType, "application/json") {
		return FillUnshareable, "shape"
	}
	facts, err := openai.Inspect(x.route.kind, body)
	switch {
	case err != nil:
		return FillUnshareable, "shape"
	case facts.Failure != nil, !facts.Complete:
		return FillUnshareable, "incomplete"
	case facts.Tools && !exact.Tools:
		return FillUnshareable, "tools"
	case facts.Length && x.tab.clamped: // that says nothing of the question: the next one leads
		return FillRefused, "cut"
	case facts.Length && x.capped(): // at what the context leaves by a high estimate
		return FillUnshareable, "cut"
	case facts.Length && !exact.Length:
		return FillShare, "length"
	}
	if !exact.Timestamps && x.route.generate {
		now := time.Now()
		for text := range facts.Texts {
			if hasMoment(text, now) {
				return FillShare, "timestamps"
			}
		}
	}
	return FillStore, ""
}

// capped: the answer may be shorter than the request allows, for this caller's budgets.
func (x *exchange) capped() bool {
	most := x.tab.cap
	return most > 0 && (x.in.MaxOutput < 0 || most < x.in.MaxOutput)
}

// upstreamContext is what the call of the backend lives by: the client, and for a request that
// leads those who wait for it, too.
func (x *exchange) upstreamContext() (context.Context, context.CancelFunc) {
	if x.cache.fill != nil {
		return x.cache.fill.Context(x.r.Context())
	}
	return x.r.Context(), func() {}
}

// errModelFailed: the model answered an error, and something older is at hand.
var errModelFailed = errors.New("the backend answered with an error")

// preferStale: better an old answer than an error of the model's.
func (x *exchange) preferStale(status int) bool {
	return x.cache.stale != nil && modelFailed(status)
}

// modelFailed: by no fault of the request's.
func modelFailed(status int) bool {
	return status >= http.StatusInternalServerError || status == http.StatusTooManyRequests
}

// refreshLater asks the model again for an answer that grows old, while it goes on being served.
// It is a request of the same caller's, of class best_effort, and costs what one costs.
func (x *exchange) refreshLater(k *Cached) {
	p := x.p
	if p.refreshes.Add(1) > maxRefreshes {
		p.refreshes.Add(-1)
		return
	}
	y := &exchange{
		p: p, snap: x.snap, w: nobody{http.Header{}}, r: x.r.Clone(context.WithoutCancel(x.r.Context())), start: time.Now(), ip: x.ip,
		credential: x.credential, caller: x.caller, user: x.user, standIn: x.standIn, surface: x.surface, class: BestEffort, timeout: x.timeout,
		patience: x.patience, noDegrade: x.noDegrade, route: x.route, body: x.body.Share(), in: x.in, asked: x.asked, routed: x.routed, model: x.model, cut: x.cut,
		cache: consult{mode: cacheRefresh, early: true, age: k.Age, tags: joinTags(x.cache.tags, k.Tags), surface: x.cache.surface},
	}
	y.r.Header.Del("X-Request-Id") // it is another request than the client's
	y.id, y.upstreamID = requestIDs(y.r)
	p.open.Go(func() { // x is still open
		defer p.refreshes.Add(-1)
		y.run(func() error {
			if e := y.killed("", y.model); e != nil {
				return e
			}
			if y.descend(); y.rungs.Has(ladder.DropOptional) {
				return errShed(ladder.ByClass, 0, y)
			}
			if e := y.shed(y.model); e != nil {
				return e
			}
			return y.try()
		})
	})
}

// nobody takes an answer that no client waits for.
type nobody struct{ h http.Header }

// Header see http.ResponseWriter.
func (n nobody) Header() http.Header { return n.h }

// Write see http.ResponseWriter.
func (n nobody) Write(p []byte) (int, error) { return len(p), nil }

// WriteHeader see http.ResponseWriter.
func (n nobody) WriteHeader(int) {}

// Flush see http.Flusher.
func (n nobody) Flush() {}
