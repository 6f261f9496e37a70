package proxy

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"headgate/proxy/openai"
	"headgate/proxy/upstream"
)

const (
	readSize        = 8 << 10                // what is read from a backend at once
	maxAudioSeconds = 24 * 60 * 60           // reported beyond that is not believed
	backlogBytes    = 2 << 10                // read at once, so much says that the backend is ahead of the client
	backlogReads    = 4                      // so many reads ago, since a buffer on the way may end between two
	noticeTime      = 250 * time.Millisecond // until a backend that was left works on nothing any more
	backlogWait     = 100 * time.Millisecond // so long a write does
	holdBody        = 32 << 10               // answers up to this are read whole, so that their settled levels stand in their headers
)

// answer is what is known of the answer so far.
type answer struct {
	started  bool // its status went to the client: it can't be refused any more but in band
	begun    bool // bytes of an answer did: nobody else can give it any more
	status   int
	backend  string
	usage    openai.Usage
	whole    bool          // usage is the backend's own word on all of the answer
	firstAt  time.Duration // from the request's start
	failure  *openai.Failure
	clientGo bool // the client went away
	behind   bool // more of a stream may have been sent than was read of it

	inTokens, outTokens, nanoUSD int64 // as settled
}

// forward sends the request to a backend of the model and relays the answer. A backend
// that cannot have received it is passed over for another one.
func (x *exchange) forward() error {
	var tried []string
	var last, lost error // of the backend tried last; of one that may have worked on it
	for sent := 0; ; {
		changed := x.p.cfg.Pool.Changed()
		slot, err := x.place(tried)
		if err != nil {
			again := upstream.Replayable(lost) && sent < maxAttempts && (errors.Is(err, upstream.ErrNoBackend) || errors.Is(err, upstream.ErrSaturated))
			switch {
			case again && tried != nil: // better the same once more than none
				tried = nil
				continue
			case again && x.holdOn(changed, x.mayHold()):
				continue
			case lost != nil && x.r.Context().Err() == nil:
				x.settle(outcomeLost)
				return lost
			}
			x.settle(outcomeRefused)
			return errors.Join(err, last)
		}
		err = x.attempt(slot, sent, tried)
		if last = err; !upstream.Retryable(err) {
			sent++
		}
		if upstream.Replayable(err) || isGarbage(err) || errors.Is(err, errDenied) {
			lost = err
		}
		if err == nil || sent == maxAttempts || len(tried) == maxTried || !x.again(err) {
			if lost != nil {
				x.settle(outcomeLost)
			}
			return err
		}
		tried = append(tried, slot.Endpoint())
	}
}

// attempt sends the request to one backend. The plan's timeout is the longest silence
// that is borne: before the first byte of the answer, and between any two.
func (x *exchange) attempt(slot *upstream.Slot, sent int, tried []string) (err error) {
	base, done := x.upstreamContext()
	defer done()
	ctx, cancel := context.WithCancelCause(base)
	defer cancel(nil)
	silence := time.AfterFunc(x.silence(), func() { cancel(context.DeadlineExceeded) })
	defer silence.Stop()
	defer context.AfterFunc(x.p.uncut, func() { cancel(errStopping) })()
	sentOff := false
	defer func() { x.vacate(slot, sentOff && err != nil && (ctx.Err() != nil || x.answer.clientGo)) }()

	req, err := x.request(ctx, slot)
	if err != nil {
		return err
	}
	x.answer.backend, x.slot = slot.Name(), slot
	if x.in.Stream {
		slot.Stream()
	}
	if x.repeatable() && sent < maxAttempts-1 {
		slot.Movable()
	}
	x.line.sent, sentOff = time.Now(), true
	resp, err := slot.RoundTrip(req)
	if err != nil {
		x.tellPlace(nil, err)
		return x.unanswered(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }()
	x.tellPlace(resp, nil)
	if pushedBack(resp.StatusCode) && x.repeatable() && sent < maxAttempts-1 && x.elsewhere(tried, slot) && x.p.cfg.Pool.MayRetry() {
		return errPushedBack
	}
	if err := x.misfit(resp); err != nil {
		x.blame(slot, err)
		return err
	}
	if resp.StatusCode == http.StatusNotFound && x.route.metered {
		x.p.absent.note(slot.Endpoint(), x.sought(), time.Now())
	}
	if resp.StatusCode == http.StatusNotFound && x.repeatable() && sent < maxAttempts-1 && x.elsewhere(tried, slot) && x.p.cfg.Pool.MayRetry() {
		return errNotThere
	}
	if x.preferStale(resp.StatusCode) {
		x.settle(outcomeMalformed)
		x.endFill(FillEnd{Kind: FillFailed, Failure: x.failure(newError(resp.StatusCode, "upstream_error", "the backend answered with an error"))})
		return errModelFailed
	}
	err = x.relay(ctx, resp, func() { silence.Reset(x.timeout) })
	if err != nil && !x.answer.begun { // the error that will be sent is ours: no header of the backend's describes it
		for name := range resp.Header {
			x.w.Header().Del(name)
		}
		x.w.Header().Set("X-Request-Id", x.id)
	}
	if err != nil && x.r.Context().Err() == nil {
		x.blame(slot, err)
	}
	return err
}

// blame says that the backend failed, to those who choose backends and to those who learn of them.
func (x *exchange) blame(slot *upstream.Slot, err error) {
	slot.Fail(err)
	if isGarbage(err) && x.line.grant != nil {
		x.line.grant.Refused()
	}
	if x.line.grant != nil && !errors.Is(err, context.Canceled) {
		x.line.grant.Failed()
	}
}

// silence is for how long the first byte may be waited for.
func (x *exchange) silence() time.Duration {
	left := max(x.timeout-x.cache.waited-x.line.waited, 0)
	if x.limited {
		left = max(min(left, x.patience-time.Since(x.start)), 0)
	}
	return left
}

// vacate gives the place at a backend back. One that was left in the middle of its work goes on for a moment,
// until it notices.
func (x *exchange) vacate(slot *upstream.Slot, left bool) {
	if !left {
		slot.Release()
		return
	}
	x.p.open.Add(1)
	time.AfterFunc(noticeTime, func() {
		defer x.p.open.Done()
		slot.Release()
	})
}

// unanswered settles a request that got no answer: nobody knows how much was generated
// for a client that left or ran out of time, so that it costs what was reserved.
func (x *exchange) unanswered(ctx context.Context, err error) error {
	if upstream.Retryable(err) || ctx.Err() == nil && x.mayReplay(err) {
		return err
	}
	switch {
	case x.r.Context().Err() != nil:
		x.answer.clientGo = true
		x.settle(outcomeUnknown)
		return context.Cause(x.r.Context())
	case ctx.Err() != nil: // out of time, or the gateway is stopping
		x.settle(outcomeUnknown)
		return context.Cause(ctx)
	}
	x.settle(outcomeLost)
	return err
}

// passedHeader is what of the client's header a backend gets to see. It must not be changed.
func (x *exchange) passedHeader() http.Header {
	if x.passed == nil {
		x.passed = make(http.Header, len(x.r.Header))
		copyHeaders(x.passed, x.r.Header)
		dropOurs(x.passed)
		for _, name := range [...]string{"Authorization", "X-Api-Key", "Api-Key", "Cookie", "Expect"} { // credentials are the gateway's to check, not the backend's to see
			x.passed.Del(name)
		}
	}
	return x.passed
}

// request makes the upstream's request: the client's, with another key, another model
// name where there is an alias, and usage asked for where the client did not.
func (x *exchange) request(ctx context.Context, slot *upstream.Slot) (*http.Request, error) {
	target := slot.URL((&url.URL{Path: x.r.URL.Path}).EscapedPath()) // as it was matched, however it was written
	if x.r.URL.RawQuery != "" {
		target += "?" + x.r.URL.RawQuery
	}
	req, err := http.NewRequestWithContext(ctx, x.r.Method, target, nil)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, x.passedHeader())
	req.Header.Set("X-Request-Id", x.upstreamID)
	// Only encodings that can be looked into; the client still gets gzip if it asked and the backend compresses.
	if x.acceptsGzip() {
		req.Header.Set("Accept-Encoding", "gzip")
	} else {
		req.Header.Set("Accept-Encoding", "identity")
	}
	if x.body == nil {
		return req, nil
	}
	changes := openai.Changes{Model: x.upstreamName(slot), IncludeUsage: x.asksUsage(), Cap: x.shortest()}
	if x.snap.Salted[slot.Name()] {
		changes.CacheSalt = x.caller.CacheSalt
	}
	pieces := x.in.Pieces(x.body.Bytes(), changes)
	for _, p := range pieces {
		req.ContentLength += int64(len(p))
	}
	req.GetBody = func() (io.ReadCloser, error) { return &pieceReader{pieces: pieces, hold: x.body.Open()}, nil }
	req.Body, err = req.GetBody()
	return req, err
}

// pieceReader reads slices one after the other. It holds the body that they lie in.
type pieceReader struct {
	mu     sync.Mutex // HTTP/2 closes a body while it is being read
	pieces [][]byte
	from   int // of the first piece
	closed bool
	hold   io.Closer
}

func (r *pieceReader) Read(p []byte) (n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, http.ErrBodyReadAfterClose
	}
	for len(r.pieces) > 0 && n < len(p) {
		m := copy(p[n:], r.pieces[0][r.from:])
		n, r.from = n+m, r.from+m
		if r.from == len(r.pieces[0]) {
			r.pieces, r.from = r.pieces[1:], 0
		}
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (r *pieceReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	return r.hold.Close()
}

// asksUsage: usage is injected only on the streams that know stream_options.
func (x *exchange) asksUsage() bool {
	return x.in.Stream && (x.route.kind == openai.Chat || x.route.kind == openai.Completion || x.route.kind == openai.Audio)
}

// relay passes an answer on, metering it on the way.
func (x *exchange) relay(ctx context.Context, resp *http.Response, alive func()) error {
	h := x.w.Header()
	x.observe(resp.Header)
	dropOurs(resp.Header) // a backend may be a gateway too
	copyHeaders(h, resp.Header)
	h.Set("X-Request-Id", x.id)
	h.Set("X-Headgate-Backend", x.answer.backend)
	if pushedBack(resp.StatusCode) {
		sobered(h)
	}
	x.answer.status = resp.StatusCode
	src := &source{ctx: ctx, r: resp.Body, alive: alive}
	if x.answer.started && (resp.StatusCode >= 300 || !isEventStream(resp.Header)) {
		return x.relayInBand(src, resp.StatusCode)
	}
	dst := x.newSink()
	defer dst.end()
	switch enc := resp.Header.Get("Content-Encoding"); {
	case enc == "gzip":
		zr, err := gzip.NewReader(resp.Body)
		if err != nil {
			x.settle(outcomeUnknown)
			return err
		}
		src.r = zr
		h.Del("Content-Length")
		if x.acceptsGzip() {
			dst.zip = gzip.NewWriter(dst.out)
		} else {
			h.Del("Content-Encoding")
		}
	case enc != "" && enc != "identity": // can't be looked into
		return x.relayOpaque(src, dst, resp.StatusCode)
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "audio/") { // sound says nothing of usage, and is to be heard as it comes
		return x.relayOpaque(src, dst, resp.StatusCode)
	}
	if resp.StatusCode < 300 && isEventStream(resp.Header) {
		return x.relayStream(src, dst)
	}
	return x.relayBody(src, dst, resp.StatusCode)
}

func isEventStream(h http.Header) bool {
	const want = "text/event-stream"
	t := h.Get("Content-Type")
	return len(t) >= len(want) && strings.EqualFold(t[:len(want)], want)
}

// relayInBand passes on what is no stream to a client that has been told to read one: as its last event.
func (x *exchange) relayInBand(src *source, status int) error {
	raw, err := io.ReadAll(io.LimitReader(src, holdBody+1))
	if err != nil {
		return x.bodyBroke(src, openai.NewScanner(x.route.kind), err)
	}
	x.first()
	scan := openai.NewScanner(x.route.kind)
	_, _ = scan.Write(raw) // never fails
	x.settleBody(scan, status)
	e := newError(max(status, http.StatusBadRequest), "upstream_error", "the backend answered with status %d", status)
	if status < http.StatusBadRequest {
		e = newError(http.StatusBadGateway, "upstream_error", "what the backend said is no stream")
	}
	frame := e.inBand(x.route.kind)
	var line bytes.Buffer
	if len(raw) <= holdBody && json.Compact(&line, raw) == nil && (x.typed(line.Bytes()) || status < http.StatusBadRequest && scan.CanAnswer(true)) {
		frame = eventFrame(x.route.kind, line.Bytes())
	}
	dst := sink{x: x, out: attached{x.w, http.NewResponseController(x.w)}}
	if dst.Write(frame) != nil || dst.Close() != nil {
		x.answer.clientGo = true
	}
	x.answer.status = status // for the log: the client was told another before
	return nil
}

// typed says whether an error is one that clients of this dialect's streams can tell: some go by its type.
func (x *exchange) typed(body []byte) bool {
	if x.route.kind != openai.Response && x.route.kind != openai.Message {
		return true
	}
	var e struct{ Type string }
	return json.Unmarshal(body, &e) == nil && e.Type == "error"
}

// relayStream passes server-sent events on. It settles before the last of them, so that
// a client that reacts to it finds its slot free.
func (x *exchange) relayStream(src *source, dst *sink) error {
	x.w.Header().Del("Content-Length")
	hide := x.asksUsage() && !x.in.WantsUsage
	s := openai.NewStream(x.route.kind, hide)
	x.publishStream(s)
	emit := func(f openai.Frame) error {
		x.own(s.ResponseID())
		if f.Last {
			x.settleStream(s)
			x.publishStreamEnd(s)
		}
		return dst.Write(f.Raw)
	}
	buf := buffers.Get().(*[readSize]byte)
	defer buffers.Put(buf)
	ahead := 0 // reads until the backend is not ahead of the client any more
	for {
		n, err := src.Read(buf[:])
		if ahead--; n >= backlogBytes {
			ahead = backlogReads
		}
		x.answer.behind = ahead > 0
		if n > 0 {
			x.first()
			x.publish(buf[:n])
			if s.Generated() > x.endless() {
				return x.streamBroke(src, dst, s, errEndless)
			}
			began := time.Now()
			gone := s.Feed(buf[:n], emit) != nil || dst.Flush() != nil
			if time.Since(began) > backlogWait {
				ahead, x.answer.behind = backlogReads, true
			}
			if gone {
				return x.clientGone(s)
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			// What ends without a blank line is read only now, and settled before it goes out.
			ended := s.End(func(f openai.Frame) error { f.Last = true; return emit(f) })
			if ended == nil && x.converses() && s.CutShort() {
				return x.streamBroke(src, dst, s, errCutShort)
			}
			x.settleStream(s)
			x.publishStreamEnd(s)
			if ended != nil || dst.Close() != nil {
				return x.clientGone(s)
			}
			return nil
		case x.r.Context().Err() != nil:
			return x.clientGone(s)
		default:
			return x.streamBroke(src, dst, s, err)
		}
	}
}

// streamBroke ends a stream whose backend failed: with an error that the client can read.
func (x *exchange) streamBroke(src *source, dst *sink, s *openai.Stream, cause error) error {
	if x.cache.tier != "" && !x.answer.begun && src.ctx.Err() == nil { // another's: it may yet be asked for anew
		return cause
	}
	if src.ctx.Err() == nil && (x.mayReplay(cause) || errors.Is(cause, errCutShort) && !x.answer.begun) {
		return cause
	}
	if src.ctx.Err() != nil {
		cause = context.Cause(src.ctx)
	}
	e := asError(cause)
	switch e.Code {
	case "upstream_error":
		e.Message = "the backend broke off in the middle of the answer"
	case "deadline_exceeded":
		x.answer.behind = true // nobody knows what it is about
		e.Message = "the backend fell silent in the middle of the answer for longer than the request's timeout"
	}
	x.gotErr = e // the bill says how it ended
	x.settleStream(s)
	if !x.answer.begun {
		return e
	}
	if x.slot != nil {
		x.blame(x.slot, cause)
	}
	frame := e.inBand(x.route.kind)
	if s.InFrame() { // the one that broke off must not swallow it
		frame = append([]byte("\n\n"), frame...)
	}
	if dst.Write(frame) == nil {
		_ = dst.Close() // best effort: the client may be gone too
	}
	return nil
}

// clientGone settles for a client that left in the middle of a stream.
func (x *exchange) clientGone(s *openai.Stream) error {
	x.answer.clientGo = true
	x.settleStream(s)
	if err := x.r.Context().Err(); err != nil {
		return context.Cause(x.r.Context())
	}
	return context.Canceled
}

// errEndless: a backend goes on far beyond what was asked for.
var errEndless = errors.New("the backend's stream does not end")

// endless is how many tokens of a stream are too many for it to end yet: more than the request's cap and what a count of
// deltas may be off, or than the model can hold.
func (x *exchange) endless() int64 {
	if limit := x.maxOutput(); limit > 0 && limit < x.maxTokens() {
		return 2*limit*max(x.in.Sequences, 1) + 1024
	}
	return x.maxTokens()
}

// settleStream settles by the usage last seen, else by the deltas counted.
func (x *exchange) settleStream(s *openai.Stream) {
	if x.answer.failure == nil {
		x.answer.failure = s.Failure()
	}
	if !x.res.open { // settled at the last event; this is the end of the body
		return
	}
	u := s.Usage()
	if x.cache.tier != "" {
		x.answer.usage = u
		x.cached("live")
		if !x.caller.CachedMetered { // the request that leads pays
			x.settle(outcomeCached)
			return
		}
		x.tab.clamped = false // nothing was cut
	}
	if !x.plausible(u) {
		u = openai.Usage{Input: x.res.inTokens, Output: x.counted(s)}
	} else if s.Counted() {
		u.Output, u.Known = x.counted(s), false
	} else {
		x.p.est.learnText(x.model, s.Text(), u.Output)
	}
	if x.tab.strict && !(u.Known && s.Complete()) {
		x.tab.seen = x.seen(s)
	}
	x.settleUsage(u, s.Complete())
	x.own(s.ResponseID())
	if x.slot != nil && s.Complete() {
		x.slot.Release() // like the caller's own slots: free before the last byte goes out
	}
}

// counted is how long the answer is that has passed, where no usage says it: by its
// chunks, or by its bytes if those make it longer, since a busy backend puts several
// tokens into a chunk; never longer than the request allows.
func (x *exchange) counted(s *openai.Stream) int64 {
	n := max(s.Generated(), x.p.est.textTokens(x.model, s.Text()))
	if most := x.maxOutput(); most >= 0 {
		n = min(n, max(times(most, x.in.Sequences), s.Generated()))
	}
	return n
}

// upstreamName is what the slot's backend calls the model.
func (x *exchange) upstreamName(slot *upstream.Slot) string {
	if name, ok := slot.Upstream(x.model.Name); ok {
		return name
	}
	return x.model.Upstream
}

// shortest is the cap to write into the request: what the budgets pay for, or where the ladder ends it; 0: none.
func (x *exchange) shortest() int64 {
	if x.tab.cap == 0 || x.cut > 0 && x.cut < x.tab.cap {
		return x.cut
	}
	return x.tab.cap
}

// maxOutput is the cap that the backend was told; -1: none.
func (x *exchange) maxOutput() int64 {
	if x.tab.cap > 0 {
		return x.tab.cap
	}
	return x.in.MaxOutput
}

// settleUsage settles for an answer and learns from it if it was whole.
func (x *exchange) settleUsage(u openai.Usage, whole bool) {
	if !x.res.open {
		return
	}
	if !x.route.metered {
		u = openai.Usage{}
	}
	x.answer.usage, x.answer.whole = u, whole && u.Known
	x.answer.usage.Input += x.cache.extra
	x.settle(outcomeAnswered)
	if x.answer.whole && x.route.metered {
		x.learnTemplate(u)
		x.tellPrompt(u)
		x.p.est.learn(x.caller.Tenant, x.caller.KeyID, x.model, &x.in, u, x.route.generate, x.maxOutput())
	}
}

// plausible: an upstream that lies about usage must not put a bucket in debt for years.
func (x *exchange) plausible(u openai.Usage) bool {
	if !u.Known {
		return false
	}
	nothing := u.Input == 0 && x.in.InputBytes+x.in.InputTokens > 0
	if most := x.maxTokens(); nothing || u.Input > most || u.Output > most {
		x.p.met.implausible.Inc()
		return false
	}
	return true
}

// maxTokens is more than any answer to this request can have used, either way.
func (x *exchange) maxTokens() int64 {
	const unknownContext = 16 << 20
	if x.model == nil {
		return unknownContext
	}
	return orDefault(x.model.Context, unknownContext) * max(x.in.Sequences, x.in.Inputs, 1)
}

// relayBody passes a JSON answer on. Short ones, which nearly all are, are settled
// before their headers are written; of long ones the last piece is kept until then.
func (x *exchange) relayBody(src *source, dst *sink, status int) error {
	scan := openai.NewScanner(x.route.kind)
	held := holds.Get().(*[holdBody]byte)
	defer holds.Put(held)
	n := 0 // bytes of held that wait
	for {
		m, err := src.Read(held[n:])
		if m > 0 {
			_, _ = scan.Write(held[n : n+m]) // never fails
			if x.garbles(scan, status, errors.Is(err, io.EOF)) {
				return errGarbage
			}
			x.first()
			x.publishBody(held[n : n+m])
			n += m
		}
		switch {
		case errors.Is(err, io.EOF):
			if x.garbles(scan, status, true) {
				return errGarbage
			}
			x.settleBody(scan, status)
			x.publishBodyEnd(status, x.w.Header().Get("Content-Type"))
			if dst.Write(held[:n]) != nil || dst.Close() != nil {
				x.answer.clientGo = true
			}
			return nil
		case err != nil:
			return x.bodyBroke(src, scan, err)
		case n == len(held):
			keep := 1 // a byte is enough to keep the answer from being whole
			if dst.Write(held[:n-keep]) != nil {
				x.answer.clientGo = true
				x.settle(outcomeUnknown)
				return context.Canceled
			}
			n = copy(held[:], held[n-keep:n])
		}
	}
}

// settleBody settles for a whole answer, and frees the backend's slot like the caller's own.
func (x *exchange) settleBody(scan *openai.Scanner, status int) {
	x.slot.Release()
	x.answer.failure = scan.Failure()
	x.own(scan.ResponseID())
	u := scan.Usage()
	switch {
	case status >= 400 || x.answer.failure != nil && !u.Known:
		if status < 500 && status != http.StatusTooManyRequests && status != http.StatusForbidden && status != http.StatusNotFound {
			x.p.cfg.Prefilter.Fault(time.Now(), x.ip, x.credential) // a client stuck on a bad request
		}
		x.settle(outcomeMalformed)
	case x.plausible(u):
		x.settleUsage(u, true)
	case !x.route.metered:
		x.settleUsage(openai.Usage{}, false)
	case u.AudioSeconds > 0 && u.AudioSeconds <= maxAudioSeconds: // transcriptions are reported in seconds, not in tokens
		x.settleUsage(openai.Usage{Input: x.res.inTokens, Output: x.res.outTokens, AudioSeconds: u.AudioSeconds}, false)
	default:
		x.settle(outcomeUnknown)
	}
	x.own(scan.ResponseID())
}

// bodyBroke settles for an answer that broke off. Once its head is out only a closed
// connection says so.
func (x *exchange) bodyBroke(src *source, scan *openai.Scanner, err error) error {
	if src.ctx.Err() == nil && x.mayReplay(err) {
		return err
	}
	switch {
	case x.r.Context().Err() != nil:
		x.answer.clientGo = true
		err = context.Cause(x.r.Context())
	case src.ctx.Err() != nil:
		err = context.Cause(src.ctx)
	}
	x.gotErr = asError(err) // the bill says how it ended
	if u := scan.Usage(); x.plausible(u) {
		x.settleUsage(u, false)
	}
	x.settle(outcomeUnknown)
	return err
}

// relayOpaque passes on what can't be read. It costs what was reserved, unless it is an
// error. The last byte that came is held until the next one has, so that the answer is
// settled before it is whole.
func (x *exchange) relayOpaque(src *source, dst *sink, status int) error {
	ended := outcomeUnknown
	if status >= http.StatusBadRequest {
		ended = outcomeMalformed
	}
	buf := buffers.Get().(*[readSize]byte)
	defer buffers.Put(buf)
	n := 0 // bytes of buf that wait
	for {
		m, err := src.Read(buf[n:])
		if m > 0 {
			x.first()
			n += m
		}
		if err != nil && src.ctx.Err() == nil && n == 0 && x.mayReplay(err) {
			return err
		}
		if err != nil {
			x.settle(ended)
		}
		if errors.Is(err, io.EOF) {
			x.slot.Release()
			x.publishOpaqueEnd(status)
			if dst.Write(buf[:n]) != nil || dst.Close() != nil {
				x.answer.clientGo = true
			}
			return nil
		}
		if err != nil {
			return err
		}
		if n < 2 {
			continue
		}
		if dst.Write(buf[:n-1]) != nil || dst.Flush() != nil {
			x.answer.clientGo = true
			x.settle(ended)
			return context.Canceled
		}
		n = copy(buf[:], buf[n-1:n])
	}
}

// tellPlace says how a backend took the request.
func (x *exchange) tellPlace(resp *http.Response, err error) {
	g := x.line.grant
	if g != nil && resp != nil && resp.StatusCode >= http.StatusBadRequest {
		g.Refused()
	}
	switch {
	case g == nil:
	case err != nil:
		if x.r.Context().Err() == nil {
			g.Failed()
		}
	case resp.StatusCode == http.StatusTooManyRequests:
		g.Pushback(upstream.RetryAfter(resp.Header, time.Now()))
	case resp.StatusCode >= http.StatusInternalServerError:
		g.Failed()
	}
}

// first notes when the answer began. A refusal says nothing of how long work takes.
func (x *exchange) first() {
	if x.answer.firstAt != 0 {
		return
	}
	now := time.Now()
	x.answer.firstAt = now.Sub(x.start)
	if x.line.sent.IsZero() || !x.route.metered || x.answer.status >= http.StatusMultipleChoices {
		return
	}
	took := now.Sub(x.line.sent)
	x.p.est.learnLatency(x.model, x.in.Stream, took)
	switch g := x.line.grant; {
	case g == nil:
	case x.in.Stream:
		g.FirstByte(took)
	default:
		g.Answered(took)
	}
}

// own remembers whose a stored response is, before its id can reach the client, and again
// once it is settled, how many tokens it stands for.
func (x *exchange) own(id string) {
	tokens := x.answer.inTokens + x.answer.outTokens
	if id == "" || x.slot == nil || x.route.kind != openai.Response || !x.route.generate || id == x.owned && tokens == 0 {
		return
	}
	x.owned = id
	x.p.owners.put(id, owner{tenant: x.caller.Tenant, endpoint: x.slot.Endpoint(), model: x.model.Name, tokens: tokens, guessed: !x.answer.whole})
}

// source reads an answer and keeps its timer alive.
type source struct {
	ctx   context.Context
	r     io.Reader
	alive func()
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if n > 0 {
		s.alive()
	}
	return n, err
}

// sink writes an answer: headers first, compressed again if it came so.
type sink struct {
	x    *exchange
	out  flushWriter
	zip  *gzip.Writer
	gone bool // the client is, and others wait for the rest
}

// flushWriter is a client as it is written to.
type flushWriter interface {
	io.Writer
	Flush() error
}

// newSink writes to the client, where others wait for the answer, too, at the client's own pace.
func (x *exchange) newSink() *sink {
	if x.cache.fill != nil {
		return &sink{x: x, out: detach(x.w, x.cache.surface.Exact.MaxBytes)}
	}
	return &sink{x: x, out: attached{x.w, http.NewResponseController(x.w)}}
}

// end waits until nothing is written any more. It may come after Close.
func (d *sink) end() {
	if out, ok := d.out.(*detached); ok {
		_ = out.Close() // whoever had to know was told by the write
	}
}

// attached writes to a client at once.
type attached struct {
	io.Writer
	flusher *http.ResponseController
}

// Flush sends what was written.
func (a attached) Flush() error { return a.flusher.Flush() }

// Write passes p on. The first one sends the headers. Where others wait for the answer, too, it
// goes on without its client.
func (d *sink) Write(p []byte) error { return d.spare(func() error { return d.write(p) }) }

// spare does what concerns the client, as long as it is there.
func (d *sink) spare(act func() error) error {
	if d.gone {
		return nil
	}
	err := act()
	if err == nil || d.x.cache.fill == nil {
		return err
	}
	d.gone, d.x.answer.clientGo = true, true
	return nil
}

func (d *sink) write(p []byte) error {
	x := d.x
	if !x.answer.started {
		x.stateHeaders()
		x.answer.started = true
		x.w.WriteHeader(x.answer.status)
	}
	x.answer.begun = true
	if x.content != nil && !x.recording {
		x.content.answer(p)
	}
	if len(p) == 0 {
		return nil
	}
	var err error
	if d.zip != nil {
		_, err = d.zip.Write(p)
	} else {
		_, err = d.out.Write(p)
	}
	return err
}

// Flush sends what was written.
func (d *sink) Flush() error { return d.spare(d.flush) }

func (d *sink) flush() error {
	if !d.x.answer.started {
		return nil
	}
	if d.zip != nil {
		if err := d.zip.Flush(); err != nil {
			return err
		}
	}
	return d.out.Flush()
}

// Close ends the answer, also one without a byte.
func (d *sink) Close() error {
	if !d.x.answer.started {
		if err := d.Write(nil); err != nil {
			return err
		}
	}
	if d.zip != nil && !d.gone {
		if err := d.zip.Close(); err != nil {
			return err
		}
	}
	if out, ok := d.out.(*detached); ok {
		return out.Close()
	}
	return nil
}

var (
	buffers = sync.Pool{New: func() any { return new([readSize]byte) }}
	holds   = sync.Pool{New: func() any { return new([holdBody]byte) }}
)

// copyHeaders copies all but those that belong to one connection (RFC 9110 §7.6.1).
func copyHeaders(dst, src http.Header) {
	for name, values := range src {
		switch name {
		case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade":
			continue
		}
		dst[name] = values
	}
	for _, c := range src["Connection"] {
		for name := range strings.SplitSeq(c, ",") {
			dst.Del(strings.TrimSpace(name))
		}
	}
}

// dropOurs removes what is between the gateway and its clients.
func dropOurs(h http.Header) {
	for name := range h {
		if strings.HasPrefix(name, "X-Headgate-") {
			delete(h, name)
		}
	}
}

// acceptsGzip: the client may get what the backend has compressed, and nobody looks into it here.
func (x *exchange) acceptsGzip() bool { return !x.recording && !x.answer.started && acceptsGzip(x.r) }

// acceptsGzip: the client named gzip and did not refuse it by q=0.
func acceptsGzip(r *http.Request) bool {
	for _, v := range r.Header["Accept-Encoding"] {
		for part := range strings.SplitSeq(v, ",") {
			name, q, _ := strings.Cut(strings.TrimSpace(part), ";")
			if strings.EqualFold(strings.TrimSpace(name), "gzip") {
				q = strings.ReplaceAll(q, " ", "")
				return q != "q=0" && !strings.HasPrefix(q, "q=0.000")
			}
		}
	}
	return false
}
