package proxy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"headgate/limiter"
	"headgate/proxy/dispatch"
	"headgate/proxy/edge"
	"headgate/proxy/ladder"
	"headgate/proxy/openai"
	"headgate/proxy/queue"
	"headgate/proxy/upstream"
)

// Error is a refusal or failure as a client sees it. Every error that leaves the
// pipeline becomes one, in this file and nowhere else.
type Error struct {
	Status  int
	Code    string // one of the documented codes
	Message string // names the field and the remedy
	Param   string // the request's field at fault, if one is

	// Set for refusals by a limit.
	Limit      string
	Scope      string
	Unit       string
	RetryAfter time.Duration // 0: unknown; limiter.Never: waiting is useless
	Jitter     bool          // capacity: spread the retries; quota's is exact

	allow     string // the method that a 405 names
	location  string // where a 307 sends the client
	dropped   string // X-Headgate-Dropped: which valve shed it
	degraded  string // X-Headgate-Degraded, in place of what the answer would say
	malformed bool   // the request itself is at fault: counts in the errors bucket
	hopeless  bool   // it is not to be tried again, whatever RetryAfter says
	err       error  // the cause, for the log only
}

func (e *Error) Error() string { return e.Code + ": " + e.Message }
func (e *Error) Unwrap() error { return e.err }

func newError(status int, code, format string, args ...any) *Error {
	return &Error{Status: status, Code: code, Message: fmt.Sprintf(format, args...)}
}

func malformed(status int, param, format string, args ...any) *Error {
	e := newError(status, "invalid_request", format, args...)
	e.Param, e.malformed = param, true
	return e
}

func errMethod(want string) *Error {
	e := malformed(http.StatusMethodNotAllowed, "", "this route takes %s only", want)
	e.allow = want
	return e
}

func errRoute(method, path string) *Error {
	return malformed(http.StatusNotFound, "", "no route %s %s; see GET /v1/models and the docs for what is served", method, clip(path, 128))
}

func errManagement(path string) *Error {
	return errForbidden("", "%s operates a backend and is not reachable through the gateway", clip(path, 128))
}

func errForbidden(param, format string, args ...any) *Error {
	e := newError(http.StatusForbidden, "permission_denied", format, args...)
	e.Param, e.malformed = param, true
	return e
}

func errModel(name string) *Error {
	e := newError(http.StatusNotFound, "model_not_found", "The model `%s` does not exist or this key may not use it; GET /v1/models lists those it may.", clip(name, 128))
	e.Param, e.malformed = "model", true
	return e
}

// errKilled names the switch and its reason. Nothing that the client does can help.
func errKilled(kind, name string, k *Kill) *Error {
	what := "the gateway"
	if name != "" {
		what = fmt.Sprintf("%s %q", kind, clip(name, 128))
	}
	e := newError(http.StatusForbidden, "killed", "%s was switched off by the operator (kill switch: %s)", what, kind)
	if k.Reason != "" {
		e.Message += ": " + clip(k.Reason, 512)
	}
	e.RetryAfter = limiter.Never
	return e
}

// errNotReady: there is no policy yet to know anybody by: the node has not joined, or none was applied.
func errNotReady() *Error {
	return newError(http.StatusServiceUnavailable, "not_ready", "this node has no policy yet; try again shortly, or ask another node").retry(halfSecond)
}

// The codes of refusals for want of capacity.
const (
	codeOverCapacity = "over_capacity"
	codeNoBackend    = "no_backend"
)

// errShed: the request is given up, to keep room for others.
func errShed(why ladder.Reason, tokens int64, x *exchange) *Error {
	what := "requests of class " + x.class.String() + " are refused for now"
	switch why {
	case ladder.ByCost:
		what = fmt.Sprintf("requests of more than %d tokens are refused for now, and this one may take %d", x.cutoff.AboveTokens, tokens)
	case ladder.ByTier:
		what = fmt.Sprintf("requests of plans below tier %d are refused for now", x.cutoff.BelowTier)
	}
	e := newError(http.StatusTooManyRequests, codeOverCapacity, "%s, to keep room for others; this is not your quota", what).retry(shedPause)
	e.dropped = string(why)
	if why == ladder.ByClass && x.class == BestEffort && x.rungs.Has(ladder.ShedBestEffort) {
		e.degraded = ladder.ShedBestEffort.String()
	}
	if why == ladder.ByCost && x.rungs.Has(ladder.ShedCost) {
		e.degraded = ladder.ShedCost.String()
	}
	return e
}

// errStatic: the operator has everybody answered statically.
func errStatic() *Error {
	return newError(http.StatusTooManyRequests, codeOverCapacity, "nothing is asked of a model for now; this is not your quota").retry(shedPause)
}

// errDropped: the queue has given the request up.
func errDropped(d *dispatch.Dropped) *Error {
	e := newError(http.StatusTooManyRequests, codeOverCapacity, "the fleet is at capacity and its queue is full; this is not your quota")
	switch d.Reason {
	case queue.Expired:
		e.Message = "the fleet is at capacity, and no place came free within the request's timeout; this is not your quota"
	case queue.Evicted:
		e.Message = "the fleet is at capacity, and the place in its queue went to somebody who has had less of it; this is not your quota"
	case queue.NoBackend:
		e = newError(http.StatusServiceUnavailable, codeNoBackend, "no backend of this model is left; try again shortly")
	}
	e.dropped, e.RetryAfter, e.err = d.Reason.String(), max(d.RetryAfter, halfSecond), d
	return e
}

// errNotKept: the client wants what is kept, and nothing is.
func errNotKept(why string) *Error {
	e := newError(http.StatusGatewayTimeout, "not_cached", "%s; leave X-Headgate-Cache: only out to have the model asked", why)
	e.Param, e.hopeless = "X-Headgate-Cache", true
	return e
}

// errCutOff: the limit may not be decided without the owner of its bucket.
func errCutOff(l *Limit) *Error {
	e := newError(http.StatusTooManyRequests, codeOverCapacity, "the owner of limit %q is out of this node's reach, and the limit refuses until it is back; try again, or another node", l.Name).retry(halfSecond)
	e.Limit, e.Scope, e.Unit, e.degraded = l.Name, l.Scope.String(), l.Unit.String(), Deny.String()
	return e
}

// errShareless: another node may hold a share, or reach the owner.
func errShareless(l *Limit) *Error {
	return errApart(l, "the owner of limit %q is out of this node's reach, and the node's own share is nothing, since the limit is smaller than the number of nodes; try again, or another node", l.Name)
}

// errNotYet: for about a second more.
func errNotYet(l *Limit, after time.Duration) *Error {
	e := errApart(l, "the owner of limit %q has just gone out of this node's reach; the node's own share decides in a moment; try again, or another node", l.Name)
	e.RetryAfter = after
	return e
}

// errPrivate: what stands in for the owner can't ever admit the cost; the owner may.
func errPrivate(l *Limit, cost, share int64) *Error {
	return errApart(l, "this request may cost %s, more than the %s that this node may admit at once of limit %q while the limit's owner is out of reach; try again, or another node",
		amount(l.Unit, cost), amount(l.Unit, share), l.Name)
}

func errApart(l *Limit, format string, args ...any) *Error {
	e := newError(http.StatusTooManyRequests, "rate_limit_exceeded", format, args...)
	e.Limit, e.Scope, e.Unit, e.RetryAfter = l.Name, l.Scope.String(), l.Unit.String(), time.Second
	return e
}

// errLimit words the refusal of one limit from its own decision; l.Private must be there where
// that stood in for it.
func errLimit(l *Limit, d limiter.Decision, cost int64) *Error {
	if l.Unit != Concurrency && d.RetryAfter == limiter.Never && cost > l.Spec.Capacity() {
		e := newError(http.StatusBadRequest, "request_exceeds_limit",
			"this request may cost %s, more than limit %q of %s can ever admit at once; shorten the input, lower max_tokens or n, or ask for a larger burst",
			amount(l.Unit, cost), l.Name, amount(l.Unit, l.Spec.Capacity()))
		e.Limit, e.Scope, e.Unit, e.RetryAfter = l.Name, l.Scope.String(), l.Unit.String(), limiter.Never
		return e
	}
	e := newError(http.StatusTooManyRequests, "rate_limit_exceeded", "limit %q (%s per %s) is used up: %s left, %s needed",
		l.Name, l.Unit, l.Scope, amount(l.Unit, max(d.Remaining, 0)), amount(l.Unit, cost))
	e.Limit, e.Scope, e.Unit, e.RetryAfter = l.Name, l.Scope.String(), l.Unit.String(), d.RetryAfter
	if d.RetryAfter == limiter.Never { // it was decided under another policy than this node has yet
		e.RetryAfter, e.Jitter = time.Second, true
	}
	slots := l.Spec
	if d.By == limiter.ByPrivate {
		slots = l.Private
	}
	if l.Unit == Concurrency {
		e.Message = fmt.Sprintf("limit %q: %d requests per %s are already in flight", l.Name, slots.Capacity(), l.Scope)
		e.RetryAfter, e.Jitter = time.Second, true
	}
	if d.By == limiter.ByPrivate {
		e.Message += "; its owner is out of reach, and this node may spend a share of it only"
	}
	return e
}

// errBroke words the refusal of bill by the budget of c, or by nobody in particular where that is nil.
// status is that of a spent budget; 0: 429.
func errBroke(bill *Bill, c *BudgetCharge, b *Broke, status int) *Error {
	var e *Error
	switch {
	case b.Kind == Exhausted:
		e = newError(cmp.Or(status, http.StatusTooManyRequests), "insufficient_quota", "the budget is used up")
		e.hopeless = true
	case b.Kind == InFlight:
		e = newError(http.StatusTooManyRequests, "insufficient_quota", "what is left of the budget is held by requests in flight; try again when they have ended")
		e.RetryAfter = max(b.RetryAfter, time.Second)
	case b.Unwritten:
		e = newError(http.StatusServiceUnavailable, "billing_unavailable", "this node can't write its usage log, without which it charges no budget; try again, or another node").retry(halfSecond)
	default:
		e = newError(http.StatusServiceUnavailable, "billing_unavailable", "budgets can't be decided on this node now: what it holds of them is spent, and the ledger grants it no more, or is out of its reach; try again, or another node").retry(halfSecond)
	}
	if c != nil {
		e.Limit, e.Scope, e.Unit = c.Budget.Name, c.Budget.Scope.String(), USD.String()
		switch b.Kind {
		case Exhausted:
			c.exhausted(e, bill, b.RetryAfter)
		case InFlight:
			e.Message = fmt.Sprintf("what is left of %s is held by requests in flight: this one %s; try again when they have ended", c.named(), c.costs(bill))
		}
	}
	e.err = fmt.Errorf("%s (%w)", e.Message, b)
	return e
}

// exhausted words what c lacks for a request, and what helps.
func (c *BudgetCharge) exhausted(e *Error, bill *Bill, told time.Duration) {
	remedy := "shorten the input"
	if !c.Budget.Strict && bill.OutputTokens > 0 {
		remedy = "lower max_tokens or n, or shorten the input"
	}
	if c.Least > c.amount() {
		e.Message = fmt.Sprintf("this request %s, more than all of %s, so that waiting does not help: %s, or ask for a larger budget", c.costs(bill), c.named(), remedy)
		return
	}
	left := min(c.Left, c.amount()-c.Spent)
	switch {
	case !c.known():
		e.Message = fmt.Sprintf("%s has too little left: this request %s; %s", c.named(), c.costs(bill), remedy)
	case left <= 0:
		e.Message = fmt.Sprintf("%s is used up: %s is left, and this request %s", c.named(), dollars(left), c.costs(bill))
	default:
		e.Message = fmt.Sprintf("%s has %s left, and this request %s: %s", c.named(), dollars(left), c.costs(bill), remedy)
	}
	e.RetryAfter = c.renewal(told, bill.clock())
	if c.End > 0 {
		e.Message += "; it starts anew at " + time.Unix(0, c.End).UTC().Format(time.RFC3339)
	}
}

// amount of the budget as it binds, as far as is known.
func (c *BudgetCharge) amount() int64 {
	if c.known() {
		return c.Amount
	}
	return c.Budget.Amount
}

func (c *BudgetCharge) named() string {
	return fmt.Sprintf("budget %q of %s (%s)", c.Budget.Name, dollars(c.amount()), c.Budget.Scope)
}

// costs words what of the budget is needed.
func (c *BudgetCharge) costs(bill *Bill) string {
	switch {
	case c.Least < c.Cost:
		return "costs at least " + dollars(c.Least)
	case !c.Budget.Strict && bill.OutputTokens > 0:
		return fmt.Sprintf("may cost %s, with an answer of %d tokens", dollars(c.Least), bill.OutputTokens)
	}
	return "may cost " + dollars(c.Least)
}

// renewal is how long to wait for money: until the next period begins, or until what was
// spent first in a rolling one, as far as anybody knows, is out of it; 0: for ever.
func (c *BudgetCharge) renewal(told time.Duration, now time.Time) time.Duration {
	switch {
	case c.End > 0:
		return max(time.Unix(0, c.End).Sub(now), time.Second)
	case c.Budget.Window > 0 && told > 0:
		return min(told, c.Budget.Window, time.Hour)
	case c.Budget.Window > 0:
		return min(c.Budget.Window, time.Hour)
	}
	return 0
}

// dollars words nano-dollars for a person: exactly, with two decimals at least.
func dollars(n int64) string {
	if n < 0 {
		return "-" + dollars(-max(n, -math.MaxInt64))
	}
	whole, frac := n/1e9, n%1e9
	s := strings.TrimRight(fmt.Sprintf("%09d", frac), "0")
	return fmt.Sprintf("$%d.%s", whole, s+strings.Repeat("0", max(2-len(s), 0)))
}

// For the log: whoever would read them is gone. The status is the one that proxies use.
const (
	statusClientGone = 499
	codeClientGone   = "client_gone"
)

// asError maps what the rooms below return. A cause that nobody foresaw is our fault.
func asError(err error) *Error {
	var e *Error
	var input *openai.InputError
	var large edge.TooLarge
	var dropped *dispatch.Dropped
	var paused *upstream.PausedError
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &input):
		m := malformed(http.StatusBadRequest, input.Field, "%s", input.Error())
		return m
	case errors.As(err, &large):
		m := malformed(http.StatusRequestEntityTooLarge, "", "the body is larger than %d bytes, the most this route takes", large.Limit)
		m.Code = "request_too_large"
		return m
	case errors.Is(err, edge.ErrTooSlow):
		return malformed(http.StatusRequestTimeout, "", "the body came too slowly; send it at 1 KiB a second or faster")
	case errors.Is(err, edge.ErrMalformed):
		return malformed(http.StatusBadRequest, "", "the body is not framed as HTTP demands")
	case errors.Is(err, edge.ErrTruncated):
		return malformed(http.StatusBadRequest, "", "the body ended before its Content-Length or its last chunk")
	case errors.As(err, &dropped):
		return errDropped(dropped)
	case errors.As(err, &paused):
		e := newError(http.StatusTooManyRequests, codeOverCapacity, "every backend of this model has asked to be left alone for a while; this is not your quota").retry(max(time.Until(paused.Until), halfSecond))
		e.dropped, e.err = codeNoBackend, err
		return e
	case errors.Is(err, upstream.ErrNoBackend):
		e := newError(http.StatusServiceUnavailable, codeNoBackend, "no backend of this model is up; try again shortly").retry(2 * time.Second)
		e.dropped, e.err = codeNoBackend, err
		return e
	case errors.Is(err, upstream.ErrSaturated), errors.Is(err, errPushedBack):
		return newError(http.StatusTooManyRequests, codeOverCapacity, "the fleet is at capacity; this is not your quota").retry(time.Second)
	case errors.Is(err, errNotBegun):
		e := newError(http.StatusServiceUnavailable, codeNoBackend, "the gateway is stopping, and the request had not been sent yet; try again").retry(time.Second)
		e.dropped, e.err = codeNoBackend, err
		return e
	case errors.Is(err, errStopping):
		return newError(http.StatusServiceUnavailable, codeNoBackend, "the gateway is stopping and could not wait for the rest of the answer; try again").retry(time.Second)
	case errors.Is(err, errDenied):
		e := newError(http.StatusBadGateway, "upstream_error", "the backend refuses the gateway's own credential; this is not about your key: tell who operates the gateway")
		e.err = err
		return e
	case isGarbage(err):
		e := newError(http.StatusBadGateway, "upstream_error", "what the backend said is no answer of a model")
		e.err = err
		return e
	case errors.Is(err, upstream.ErrFirstByte), errors.Is(err, upstream.ErrIdle):
		e := newError(http.StatusGatewayTimeout, "deadline_exceeded", "the backend kept silent for longer than its timeout in the policy")
		e.err = err
		return e
	case errors.Is(err, context.DeadlineExceeded):
		return newError(http.StatusGatewayTimeout, "deadline_exceeded", "no answer began within the request's timeout; raise X-Headgate-Timeout or the plan's timeout, or ask for less")
	case errors.Is(err, context.Canceled), errors.Is(err, edge.ErrClientGone):
		e := newError(statusClientGone, codeClientGone, "the client went away")
		e.err = err
		return e
	default:
		e := newError(http.StatusBadGateway, "upstream_error", "the backend failed before it answered")
		e.err = err
		return e
	}
}

// retry adds a jittered Retry-After: for capacity, where an exact one would bring all back at once.
func (e *Error) retry(after time.Duration) *Error {
	e.RetryAfter, e.Jitter = after, true
	return e
}

// Pauses before jitter. Half a second is shown as a Retry-After of one.
const (
	halfSecond = 500 * time.Millisecond
	shedPause  = 10 * time.Second
)

// maxUsefulWait is the longest Retry-After that a client library should sit out. Some
// obey any value without a cap, so that a daily quota would hang them for hours.
const maxUsefulWait = time.Minute

// write sends e in the dialect that the route and the client speak.
func (e *Error) write(w http.ResponseWriter, r *http.Request, requestID string) {
	h := w.Header()
	e.retryHeaders(h)
	if e.dropped != "" {
		h.Set("X-Headgate-Dropped", e.dropped)
	}
	if e.degraded != "" {
		h.Set("X-Headgate-Degraded", e.degraded)
	}
	var body any
	switch {
	case strings.Contains(r.Header.Get("Accept"), "application/problem+json"):
		h.Set("Content-Type", "application/problem+json")
		body = e.problem(r.URL.Path)
	case strings.HasPrefix(r.URL.Path, "/v1/messages"):
		h.Set("Content-Type", "application/json")
		body = map[string]any{"type": "error", "error": e.fields(anthropicType(e.Status)), "request_id": requestID}
	default:
		h.Set("Content-Type", "application/json")
		body = map[string]any{"error": e.fields(openaiType(e))}
	}
	raw, err := json.Marshal(body)
	if err != nil { // only strings and integers went in
		panic(err)
	}
	h.Set("Content-Length", strconv.Itoa(len(raw)))
	w.WriteHeader(e.Status)
	_, _ = w.Write(raw) // the client may be gone; nothing depends on it
}

func (e *Error) retryHeaders(h http.Header) {
	switch {
	case e.location != "":
		h.Set("Location", e.location)
	case e.allow != "":
		h.Set("Allow", e.allow)
	case e.Status == http.StatusUnauthorized:
		h.Set("WWW-Authenticate", "Bearer")
	}
	if e.hopeless {
		h.Set("X-Should-Retry", "false")
	}
	switch {
	case e.RetryAfter == 0:
		if e.Status == http.StatusBadRequest || e.Status == http.StatusTooManyRequests {
			h.Set("X-Should-Retry", "false")
		}
		return
	case e.RetryAfter == limiter.Never:
		h.Set("X-Should-Retry", "false")
		return
	case e.Jitter:
		e.RetryAfter, e.Jitter = e.RetryAfter+time.Duration(rand.Int64N(int64(max(e.RetryAfter/4, halfSecond)))), false
	}
	h.Set("Retry-After", strconv.FormatInt(ceilDiv(int64(e.RetryAfter), int64(time.Second)), 10))
	h.Set("Retry-After-Ms", strconv.FormatInt(ceilDiv(int64(e.RetryAfter), int64(time.Millisecond)), 10))
	if e.RetryAfter > maxUsefulWait {
		h.Set("X-Should-Retry", "false")
	}
}

func (e *Error) fields(typ string) map[string]any {
	f := map[string]any{"message": e.Message, "type": typ, "param": nil, "code": e.Code}
	if e.Param != "" {
		f["param"] = e.Param
	}
	if e.Limit != "" {
		f["limit"], f["scope"], f["unit"] = e.Limit, e.Scope, e.Unit
		if e.RetryAfter > 0 && e.RetryAfter != limiter.Never {
			f["retry_after_ms"] = ceilDiv(int64(e.RetryAfter), int64(time.Millisecond))
		}
	}
	return f
}

// problem is RFC 9457 with the problem types of draft-ietf-httpapi-ratelimit-headers.
func (e *Error) problem(path string) map[string]any {
	f := e.fields("about:blank")
	delete(f, "message")
	delete(f, "param")
	f["title"], f["status"], f["detail"], f["instance"] = http.StatusText(e.Status), e.Status, e.Message, path
	switch {
	case e.Code == codeOverCapacity || e.Code == codeNoBackend || e.Code == "not_ready" || e.Code == "billing_unavailable":
		f["type"] = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
	case e.Limit != "":
		f["type"] = "https://iana.org/assignments/http-problem-types#quota-exceeded"
		f["violated-policies"] = []string{e.Limit}
	}
	return f
}

func openaiType(e *Error) string {
	if e.Code == "insufficient_quota" {
		return e.Code
	}
	switch e.Status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "NotFoundError"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	}
	if e.Status < http.StatusInternalServerError {
		return "invalid_request_error"
	}
	return "api_error"
}

func anthropicType(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusPaymentRequired:
		return "billing_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusGatewayTimeout:
		return "timeout_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	}
	if status < http.StatusInternalServerError {
		return "invalid_request_error"
	}
	return "api_error"
}

// body is the error as the body of an answer, without the id of a request.
func (e *Error) body(kind openai.Kind) []byte {
	fields := map[string]any{"error": e.fields(openaiType(e))}
	if kind == openai.Message {
		fields = map[string]any{"type": "error", "error": e.fields(anthropicType(e.Status))}
	}
	raw, err := json.Marshal(fields)
	if err != nil { // only strings and integers went in
		panic(err)
	}
	return raw
}

// inBand is the last frame of a stream that failed after its first byte.
func (e *Error) inBand(kind openai.Kind) []byte {
	var body any
	switch kind {
	case openai.Message:
		body = map[string]any{"type": "error", "error": e.fields(anthropicType(e.Status))}
	case openai.Response:
		body = map[string]any{"type": "error", "code": e.Code, "message": e.Message, "param": nil}
	default:
		body = map[string]any{"error": e.fields(openaiType(e))}
	}
	raw, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return eventFrame(kind, raw)
}

// eventFrame is an error, one line of JSON, as the last frame of a stream.
func eventFrame(kind openai.Kind, raw []byte) []byte {
	frame := append([]byte("data: "), raw...)
	if kind == openai.Message || kind == openai.Response {
		frame = append([]byte("event: error\n"), frame...)
	}
	return append(frame, "\n\n"...)
}

// amount words n of a unit for a person.
func amount(u Unit, n int64) string {
	if u == USD {
		return fmt.Sprintf("$%d.%09d", n/1e9, n%1e9)
	}
	return fmt.Sprintf("%d %s", n, u)
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}

func ceilDiv(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64 / b
	}
	return (a + b - 1) / b
}
