package proxy

import (
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"headgate/proxy/affinity"
	"headgate/proxy/dispatch"
	"headgate/proxy/openai"
	"headgate/proxy/queue"
	"headgate/proxy/upstream"
)

// Dispatch gives out places at backends that have only so many, in one order for the whole
// cluster. It is safe for concurrent use.
type Dispatch interface {
	// Acquire waits for a place. It fails with *dispatch.Dropped, dispatch.ErrMoved, or ctx's cause.
	Acquire(ctx context.Context, t *dispatch.Ticket) (*dispatch.Grant, error)
	// State is how full the backends are; it must not block.
	State() *dispatch.State
	// Placed tells the other nodes what went where; it must not block.
	Placed(p dispatch.Placement)
}

const (
	// defaultPatience is how long a request waits for a place whose plan has no timeout.
	defaultPatience = time.Minute
	// maxHolds is how often a request that got a place finds that its backend has just gone.
	maxHolds = 8
	// reviveFor is how long a request waits, in all, for backends to come back that died under it.
	reviveFor = 10 * time.Second
	// renewFor is how long a request without a backend waits for the policy by which the pool has just changed.
	renewFor = 100 * time.Millisecond
	// maxHeld and maxHeldBytes bound those of a node that wait for backends outside of the queue.
	maxHeld      = 1 << 14
	maxHeldBytes = 256 << 20
	// settlePart, settleMost and settleLeast are of how long a place stays taken after its answer.
	settlePart, settleMost, settleLeast = 32, 5 * time.Millisecond, 100 * time.Microsecond
	// minPatience is what a request is given whose time is over before it has come to the queue.
	minPatience = time.Millisecond
)

// line is where a request stands, or stood, in the queue.
type line struct {
	waited time.Duration // in all
	age    time.Duration // of that, for this model
	held   time.Duration // of that, for backends to come back
	full   bool          // a queue has refused it
	sent   time.Time     // to the backend
	grant  *dispatch.Grant
	names  []string             // of the backends where it may go
	places []upstream.Candidate // of them, those that are up
	ticket dispatch.Ticket
	buf    [4]queue.Place

	hashed   bool
	prefix   openai.Prefix
	affinity affinity.Query
	found    []affinity.Candidate
	order    []int
}

// clientPatience is how long a client will wait, by what its library says of itself; else as long as its plan
// lets it, which is also the most.
func clientPatience(h http.Header, plan time.Duration) time.Duration {
	most := plan
	if plan == 0 {
		plan, most = defaultPatience, maxTimeout
	}
	for _, name := range [...]string{"X-Stainless-Timeout", "X-Stainless-Read-Timeout"} {
		if s, err := strconv.ParseFloat(h.Get(name), 64); err == nil && s > 0 && s <= maxTimeout.Seconds() {
			return min(time.Duration(s*float64(time.Second)), most)
		}
	}
	return plan
}

// full says whether a model has no room.
func full(err error) bool {
	_, ok := errors.AsType[*dispatch.Dropped](err)
	return ok || errors.Is(err, upstream.ErrSaturated)
}

// place gives the request a place at a backend that is not in tried, after its turn in the queue where
// all places are taken. What it gets is to be released.
func (x *exchange) place(tried []string) (*upstream.Slot, error) {
	pool := x.p.cfg.Pool
	changed := pool.Changed()
	for holds := 0; ; {
		if err := x.candidatesFor(tried); err != nil {
			if x.renewed(changed) || x.outlasts(err, changed, tried) {
				changed = pool.Changed()
				continue
			}
			return nil, err
		}
		id, held, err := x.takePlace(tried)
		var dropped *dispatch.Dropped
		switch {
		case errors.Is(err, dispatch.ErrMoved):
			continue
		case errors.As(err, &dropped) && dropped.Reason == queue.NoBackend && holds < maxHolds: // where it stood is gone
			holds++
			continue
		case err != nil:
			return nil, err
		}
		if e := x.killed("", x.model); e != nil { // thrown while it waited
			if held != nil {
				held.Release()
			}
			return nil, e
		}
		slot, err := pool.Hold(id, held)
		if err == nil {
			x.placed(id)
			return slot, nil
		}
		if held != nil {
			held.Release()
		}
		if holds++; holds >= maxHolds {
			return nil, err
		}
	}
}

// backends are the model's, by the newest policy: also what waits goes where that says.
func (x *exchange) backends() []string {
	if x.only != "" {
		return []string{x.only}
	}
	if m := x.p.snap.Load().Models[x.model.Name]; m != nil {
		return m.Backends
	}
	return x.model.Backends
}

// renewed says, where no backend was left and the pool has changed meanwhile, that the policy has others for the model. The pool has
// them a moment before.
func (x *exchange) renewed(changed <-chan struct{}) bool {
	select {
	case <-changed:
	default:
		return false
	}
	was, applied := x.line.names, *x.p.applied.Load()
	if !slices.Equal(was, x.backends()) {
		return true
	}
	t := time.NewTimer(renewFor)
	defer t.Stop()
	select {
	case <-applied:
	case <-t.C:
	case <-x.r.Context().Done():
	}
	return !slices.Equal(was, x.backends())
}

// outlasts waits where there is no backend just now: for one that says itself, or whose breaker says, that it will be there
// within the time that is left; and, where the request has waited in its queue already, for one that went down. Others are told at
// once, and so are those who have another model to fall back to.
func (x *exchange) outlasts(err error, changed <-chan struct{}, tried []string) bool {
	var paused *upstream.PausedError
	switch {
	case x.fallsBack:
	case errors.As(err, &paused):
		wait := max(time.Until(paused.Until), time.Millisecond)
		return wait <= x.mayHold() && x.holdOn(changed, wait)
	case errors.Is(err, upstream.ErrNoBackend) && x.line.age > 0 && len(tried) == 0:
		wait := x.mayHold()
		return x.holdOn(changed, wait) && x.mayHold() > 0
	}
	return false
}

// placed remembers where the request goes, for those that follow it, at whichever node.
func (x *exchange) placed(id string) {
	if !x.line.hashed {
		return
	}
	p := x.p.cfg.Affinity.Placed(&x.line.affinity, id)
	if x.p.cfg.Dispatch != nil && p.Prompt != 0 {
		x.p.cfg.Dispatch.Placed(dispatch.Placement(p))
	}
}

// candidatesFor finds where the request may go, best first.
func (x *exchange) candidatesFor(tried []string) (err error) {
	x.line.names = x.backends()
	x.line.places, err = x.p.cfg.Pool.Candidates(x.line.places[:0], x.line.names, tried)
	if err == nil {
		x.line.places = x.p.absent.without(x.line.places, x.sought(), time.Now())
		x.prefer(x.line.places)
	}
	return err
}

// takePlace says which of x.line.places it is, and what is to be released for it.
func (x *exchange) takePlace(tried []string) (id string, held upstream.Releaser, err error) {
	l := &x.line
	l.grant = nil
	open := slices.IndexFunc(l.places, func(c upstream.Candidate) bool { return !c.Bounded })
	if x.p.cfg.Dispatch == nil {
		open = 0
	}
	if open >= 0 {
		return l.places[open].ID, nil, nil
	}
	g, err := x.queue(tried)
	if err != nil {
		return "", nil, err
	}
	l.grant = g
	return g.Backend, &vacancy{p: x.p, grant: g, since: time.Now()}, nil
}

// vacancy is a place that comes free a moment after its answer has ended: the backend has sent the last byte then,
// and not yet counted the request out. It takes a part of the time that the request took, so that short ones cost
// no more than long ones.
type vacancy struct {
	p     *Proxy
	grant *dispatch.Grant
	since time.Time
}

// Release see upstream.Releaser.
func (v *vacancy) Release() {
	rest := min(time.Since(v.since)/settlePart, settleMost)
	if rest < settleLeast {
		v.grant.Release()
		return
	}
	v.p.open.Add(1) // the exchange is open still
	time.AfterFunc(rest, func() {
		defer v.p.open.Done()
		v.grant.Release()
	})
}

// queue waits for one of x.line.places.
func (x *exchange) queue(tried []string) (*dispatch.Grant, error) {
	l := &x.line
	left := x.left()
	left = max(left/2, left-x.p.est.latency(x.model, x.in.Stream)) // what can't begin in time had better not be sent
	tokens := x.res.inTokens + x.res.outTokens
	places := l.buf[:0]
	for i := range l.places[:min(len(l.places), queue.MaxPlaces)] {
		c := &l.places[i]
		places = append(places, queue.Place{Backend: c.ID, Cost: slots(tokens, c)})
	}
	l.ticket = dispatch.Ticket{
		Tenant: x.caller.Tenant, Class: queue.Class(x.class), Work: max(tokens, 1), Bytes: x.bodyBytes(),
		Waited: l.age, Patience: max(left, minPatience), Refused: l.full, Places: places,
		Watch: func() (<-chan struct{}, bool) {
			changed := x.p.cfg.Pool.Changed() // first: what changes from here on has it look again
			return changed, x.moved(places, tried)
		},
	}
	if every := x.keepsAlive(); every > 0 {
		l.ticket.TickEvery, l.ticket.Tick = every, x.keepAlive
	}
	ctx, cancel := context.WithCancelCause(x.r.Context())
	defer cancel(nil)
	defer context.AfterFunc(x.p.uncut, func() { cancel(errNotBegun) })()
	began := time.Now()
	g, err := x.p.cfg.Dispatch.Acquire(ctx, &l.ticket)
	l.waited += time.Since(began)
	l.age += time.Since(began)
	var dropped *dispatch.Dropped
	if errors.As(err, &dropped) && dropped.Reason != queue.NoBackend {
		l.full = true
	}
	if err != nil && x.r.Context().Err() != nil {
		x.answer.clientGo = true
	}
	return g, err
}

// slots is how many of a backend's slots so many tokens take: a long prompt keeps a model server as
// busy as many short ones.
func slots(tokens int64, c *upstream.Candidate) int64 {
	return min(max(ceilDiv(tokens, max(c.SlotTokens, 1)), 1), max(int64(c.Slots)/2, 1))
}

// bodyBytes is what the request keeps in memory while it waits.
func (x *exchange) bodyBytes() int64 {
	if x.body == nil {
		return 0
	}
	return int64(len(x.body.Bytes()))
}

// moved says whether the request may go elsewhere than when it began to wait.
func (x *exchange) moved(places []queue.Place, tried []string) bool {
	if err := x.candidatesFor(tried); err != nil || len(x.line.places) > len(places) && len(places) < queue.MaxPlaces {
		return true
	}
	for i := range places {
		if !slices.ContainsFunc(x.line.places, func(c upstream.Candidate) bool { return c.Bounded && c.ID == places[i].Backend }) {
			return true
		}
	}
	return false
}

// keepsAlive is how often somebody is shown that they are waited for; 0: never.
func (x *exchange) keepsAlive() time.Duration {
	if !x.in.Stream || x.recording || x.cache.early {
		return 0
	}
	return x.snap.KeepAlive
}

// keepAlive shows whoever is between the client and us that somebody is there: a comment, which
// clients of event streams skip. After it the answer's status is out, and a refusal comes in band.
func (x *exchange) keepAlive() {
	if !x.answer.started {
		h := x.w.Header()
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
		h.Set("Cache-Control", "no-cache")
		x.stateHeaders()
		x.answer.status, x.answer.started = http.StatusOK, true
		x.w.WriteHeader(http.StatusOK)
	}
	out := attached{x.w, http.NewResponseController(x.w)}
	if _, err := out.Write([]byte(": waiting for a place\n\n")); err == nil {
		_ = out.Flush() // a client that is gone ends its context
	}
}

// refuseInBand ends a stream that had only shown signs of life.
func (x *exchange) refuseInBand(e *Error) {
	dst := sink{x: x, out: attached{x.w, http.NewResponseController(x.w)}}
	if dst.Write(e.inBand(x.route.kind)) == nil {
		_ = dst.Close() // best effort: the client may be gone
	}
}

// mayReplay: nothing of an answer has come, and the backend that may have worked on it is gone. To ask
// another is safe where an answer leaves nothing behind but itself.
func (x *exchange) mayReplay(err error) bool {
	return upstream.Replayable(err) && x.repeatable()
}

func (x *exchange) repeatable() bool {
	in := &x.in
	return !x.answer.begun && x.r.Context().Err() == nil && x.route.metered && x.only == "" &&
		!in.Background && in.Bounds.Rounds == "" && !(in.Store && x.route.kind == openai.Response)
}

// left is for how long the request may still wait. Who says for how long counts from when it came; a plan's patience is for
// waiting alone.
func (x *exchange) left() time.Duration {
	if x.limited {
		return x.patience - time.Since(x.start)
	}
	return x.patience - x.line.waited - x.cache.waited
}

// mayHold is for how long it may wait outside of the queue for backends to come back.
func (x *exchange) mayHold() time.Duration {
	if x.p.held.Load() >= maxHeld || x.p.heldBytes.Load()+x.bodyBytes() > maxHeldBytes {
		return 0
	}
	return min(x.left(), reviveFor-x.line.held)
}

// holdOn waits until backends come or go, or so long. False: its client, or the gateway, has gone.
func (x *exchange) holdOn(changed <-chan struct{}, most time.Duration) bool {
	if most <= 0 {
		return false
	}
	l := &x.line
	began := time.Now()
	bytes := x.bodyBytes()
	x.p.held.Add(1)
	x.p.heldBytes.Add(bytes)
	defer func() {
		x.p.held.Add(-1)
		x.p.heldBytes.Add(-bytes)
		took := time.Since(began)
		l.held, l.waited = l.held+took, l.waited+took
		if l.age > 0 { // else it had no place that it could come back to
			l.age += took
		}
	}()
	t := time.NewTimer(most)
	defer t.Stop()
	var tick <-chan time.Time
	if every := x.keepsAlive(); every > 0 {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		select {
		case <-changed:
			return true
		case <-t.C:
			return true
		case <-tick:
			x.keepAlive()
		case <-x.r.Context().Done():
			return false
		case <-x.p.uncut.Done():
			return false
		}
	}
}

// again says whether the request may be sent to another backend after err.
func (x *exchange) again(err error) bool {
	why := ""
	switch {
	case x.answer.begun || x.r.Context().Err() != nil:
		return false
	case upstream.Retryable(err):
		why = "unsent"
	case errors.Is(err, errPushedBack): // of the budget already
		why = "pushed_back"
	case x.mayReplay(err) && x.p.cfg.Pool.MayRetry():
		why = "lost"
	case errors.Is(err, errNotThere): // likewise
		why = "not_there"
	case errors.Is(err, errDenied) && x.repeatable() && x.p.cfg.Pool.MayRetry():
		why = "denied"
	case isGarbage(err) && x.repeatable() && !x.slot.Bills() && x.p.cfg.Pool.MayRetry():
		why = "garbage"
	default:
		return false
	}
	x.p.met.again.WithLabelValues(why).Inc()
	return true
}

// errPushedBack: a backend has refused the request for want of capacity, and there is another.
var errPushedBack = errors.New("the backend has no capacity")

// What a backend may answer that is not for the client.
var (
	errGarbage  = errors.New("the backend's answer is no answer of a model") // such as the page of something between
	errCutShort = errors.New("the backend's stream ended before its answer") // in good order, as where a proxy closes for it
	errDenied   = errors.New("the backend does not take the gateway's credential")
	errNotThere = errors.New("the backend has no such model or path") // others may
)

func isGarbage(err error) bool { return errors.Is(err, errGarbage) || errors.Is(err, errCutShort) }

// converses: it is known what an answer looks like.
func (x *exchange) converses() bool {
	switch x.route.kind {
	case openai.Chat, openai.Completion, openai.Message, openai.Response:
		return x.route.generate
	}
	return false
}

// misfit says what is wrong with an answer that no client is to see. That is a page of something between, where no 4xx says that it is
// about the request; what is no status of an answer: clients follow redirections, with the prompt, to wherever a
// backend says; and that the gateway is not let in, which its clients would take for their own keys. What says nothing of
// itself, or says plain text as careless servers do, or can't be looked into, may be an answer.
func (x *exchange) misfit(resp *http.Response) error {
	status := resp.StatusCode
	answers := status >= 200 && status < 300 || status >= 400 && status < 600
	enc := resp.Header.Get("Content-Encoding")
	page := (enc == "" || enc == "identity" || enc == "gzip") && strings.HasPrefix(strings.ToLower(resp.Header.Get("Content-Type")), "text/html")
	switch {
	case status == http.StatusUnauthorized:
		return errDenied
	case !answers, page && (status < 400 || status >= 500), x.converses() && (status == http.StatusNoContent || status == http.StatusResetContent):
		return errGarbage
	}
	return nil
}

// sobered has a Retry-After say no more than clients can do with: some obey whatever it says.
func sobered(h http.Header) {
	after := upstream.RetryAfter(h, time.Now())
	if h.Del("Retry-After-Ms"); after <= 0 {
		h.Del("Retry-After")
		return
	}
	h.Set("Retry-After", strconv.Itoa(int(math.Ceil(min(after, maxUsefulWait).Seconds()))))
}

// garbles says whether what has come of a body is neither a JSON object nor events, where it should be. What has begun to go out goes on.
func (x *exchange) garbles(scan *openai.Scanner, status int, whole bool) bool {
	return status < 300 && x.converses() && !x.answer.begun && !scan.CanAnswer(whole)
}

// elsewhere says whether there is another backend than those tried and this one.
func (x *exchange) elsewhere(tried []string, slot *upstream.Slot) bool {
	if x.only != "" {
		return false
	}
	_, err := x.p.cfg.Pool.Candidates(nil, x.backends(), append(slices.Clone(tried), slot.Endpoint()))
	return err == nil
}

// statusOverloaded is Anthropic's.
const statusOverloaded = 529

// pushedBack: the answer says that the backend can't take the request now, and has not.
func pushedBack(status int) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, statusOverloaded:
		return true
	}
	return false
}
