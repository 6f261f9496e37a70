package upstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Why a request ended whose backend kept silent for longer than the policy's timeouts allow.
var (
	ErrFirstByte = errors.New("the backend sent no byte of a stream within its first_byte timeout")
	ErrIdle      = errors.New("the backend fell silent in the middle of an answer for longer than its idle timeout")
)

// statusOverloaded is what Anthropic answers with when it is.
const statusOverloaded = 529

// exchange is one request on its way to an endpoint and its answer on the way back: the
// answer's body. It sees to the timeouts and tells the pool what the request says of the
// endpoint. Like any body it is read by one goroutine at a time.
type exchange struct {
	s      *Slot
	caller context.Context // the request's own
	ctx    context.Context // ends also when the endpoint is lost or a timeout is over
	cancel context.CancelCauseFunc
	timer  *time.Timer // of the first byte, then of silence; nil: none

	body  io.ReadCloser
	good  bool        // by its status
	works bool        // by its status: the model was asked
	begun atomic.Bool // a byte of the body came
	whole atomic.Bool // the body ended as it should
}

// patience is how long a caller is to have waited, while no answer to anybody brought a
// byte, for its giving up to be the endpoint's failure.
const patience = 10 * time.Second

// begin starts the clock of a request.
func (s *Slot) begin(caller context.Context) *exchange {
	x := &exchange{s: s, caller: caller}
	x.ctx, x.cancel = context.WithCancelCause(caller)
	s.p.mu.Lock()
	s.cancel, s.open, s.begun, s.done, s.sentAt = x.cancel, true, false, false, s.p.now()
	stream := s.stream
	select {
	case <-s.lost:
		if s.movable {
			x.cancel(ErrLost)
		}
	default:
	}
	s.p.mu.Unlock()
	first := s.cfg.FirstByteTimeout
	if !stream {
		first = 0
	}
	if first > 0 || s.cfg.IdleTimeout > 0 {
		x.timer = time.AfterFunc(cmp.Or(first, time.Hour), x.late)
		if first == 0 {
			x.timer.Stop()
		}
	}
	return x
}

// late is called when a timeout is over.
func (x *exchange) late() {
	if x.begun.Load() {
		x.cancel(ErrIdle)
	} else {
		x.cancel(ErrFirstByte)
	}
}

// answered takes over the answer's body.
func (x *exchange) answered(resp *http.Response) {
	s, p := x.s, x.s.p
	x.body, resp.Body = resp.Body, x
	x.good, x.works = resp.StatusCode < 500, resp.StatusCode < 400
	wait, why := RetryAfter(resp.Header, time.Now()), fmt.Sprintf("it answered with status %d", resp.StatusCode)
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	if x.good {
		p.upLocked(s.e)
	}
	switch resp.StatusCode {
	case http.StatusTooManyRequests:
		if wait == 0 && s.cfg.Kind != VLLM { // a provider means it even if it doesn't say for how long
			wait = dfltPushback
		}
		if wait > 0 {
			p.pushLocked(now, s.e, wait)
		}
		p.endLocked(now, s, nothing)
	case http.StatusServiceUnavailable, statusOverloaded:
		if wait > 0 {
			p.pushLocked(now, s.e, wait)
		}
		x.blameLocked(now, failed, why)
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		x.blameLocked(now, failed, why)
	case http.StatusInternalServerError:
		x.blameLocked(now, error500, why)
	}
}

// blameLocked notes that the request failed for a fault of the endpoint's.
func (x *exchange) blameLocked(now int64, what verdict, why string) {
	if !x.s.done && why != "" {
		x.s.e.lastError = clip(why)
	}
	x.s.p.endLocked(now, x.s, what)
}

// Read reads the answer's body.
func (x *exchange) Read(b []byte) (int, error) {
	n, err := x.body.Read(b)
	if n > 0 {
		x.bytes()
	}
	if err == nil {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		if !x.begun.Load() {
			x.bytes() // an answer without a body
		}
		x.whole.Store(true)
		x.rest()
		return n, err
	}
	if x.caller.Err() != nil {
		x.givenUp()
		return n, err
	}
	return n, x.failed(err, false, false)
}

// bytes notes that some came.
func (x *exchange) bytes() {
	s, p := x.s, x.s.p
	now := p.now()
	if x.works {
		s.e.heard.Store(now)
	}
	if x.begun.CompareAndSwap(false, true) {
		x.rest()
		p.mu.Lock()
		p.beganLocked(now, s, x.good)
		p.mu.Unlock()
	}
	if x.timer != nil && s.cfg.IdleTimeout > 0 {
		x.timer.Reset(s.cfg.IdleTimeout)
	}
}

// rest stops the timer.
func (x *exchange) rest() {
	if x.timer != nil {
		x.timer.Stop()
	}
}

// Close ends the exchange: what was read whole and not found fault with is a good answer.
func (x *exchange) Close() error {
	err := x.body.Close()
	what := nothing
	if x.whole.Load() {
		what = fine
	}
	x.over(what)
	return err
}

// over notes what the request came to and lets go of it.
func (x *exchange) over(what verdict) {
	x.rest()
	p := x.s.p
	p.mu.Lock()
	p.endLocked(p.now(), x.s, what)
	x.s.open = false
	p.mu.Unlock()
	x.cancel(nil)
}

// unblamed is a request that came to nothing through no fault of the endpoint's.
func (x *exchange) unblamed(err error, unsent bool) error {
	x.over(nothing)
	return &Error{Backend: x.s.e.id, Err: err, unsent: unsent && x.caller.Err() == nil}
}

// failed is a request that came to nothing, or an answer that broke off.
func (x *exchange) failed(err error, unsent, dial bool) error {
	s, p := x.s, x.s.p
	out := &Error{Backend: s.e.id, Err: err}
	if x.caller.Err() != nil {
		x.givenUp()
		x.over(nothing)
		return out
	}
	lost := false
	if x.ctx.Err() != nil { // ours, not the transport's word for it
		out.Err = context.Cause(x.ctx)
		lost = errors.Is(out.Err, ErrLost)
	}
	out.unsent = unsent
	out.silent = !unsent && !x.begun.Load() && s.cfg.Kind == VLLM
	p.mu.Lock()
	now := p.now()
	switch {
	case lost: // whatever it was lost for is noted
		p.endLocked(now, s, nothing)
	default:
		x.blameLocked(now, failed, out.Err.Error())
		if dial {
			p.dialFailedLocked(s.e)
		}
	}
	p.mu.Unlock()
	if x.body == nil { // else Close does
		x.over(nothing)
	}
	if !dial {
		s.e.probeSoon()
	}
	return out
}

// givenUp notes that the caller ended the request. That says something of the endpoint
// only if the caller's patience was long, and no answer to anybody brought a byte meanwhile.
func (x *exchange) givenUp() {
	s, p := x.s, x.s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	now, what := p.now(), nothing
	if errors.Is(context.Cause(x.caller), context.DeadlineExceeded) && now-s.sentAt >= int64(patience) && s.e.heard.Load() < s.sentAt {
		what = failed
	}
	x.blameLocked(now, what, "")
}

// dialFailedLocked notes that no connection to e could be had.
func (p *Pool) dialFailedLocked(e *endpoint) {
	if e.v.failedDials++; e.v.failedDials >= maxFailedDials && e.b.cfg.probed() {
		p.downLocked(e)
		e.probeSoon()
	}
}

// RetryAfter is how long an answer's header asks to be left alone, by OpenAI's
// retry-after-ms or Retry-After in seconds or as a date; 0 if it doesn't, or not sensibly.
// At most a minute.
func RetryAfter(h http.Header, now time.Time) time.Duration {
	if ms, err := strconv.ParseFloat(strings.TrimSpace(h.Get("Retry-After-Ms")), 64); err == nil && ms > 0 {
		return within(ms / 1000)
	}
	v := strings.TrimSpace(h.Get("Retry-After"))
	if v == "" {
		return 0
	}
	if s, err := strconv.ParseFloat(v, 64); err == nil {
		return within(s)
	}
	if at, err := http.ParseTime(v); err == nil {
		return within(at.Sub(now).Seconds())
	}
	return 0
}

func within(seconds float64) time.Duration {
	if !(seconds > 0) { // also what is no number
		return 0
	}
	return time.Duration(min(seconds, maxPushback.Seconds()) * float64(time.Second))
}
