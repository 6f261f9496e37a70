package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync/atomic"
)

// maxStale bounds how often one RoundTrip starts over because the server had closed
// the idle connection that it was given.
const maxStale = 3

// Slot is the right to have one request in flight to an endpoint. Its methods may be
// called from several goroutines; one request at a time.
type Slot struct {
	p        *Pool
	e        *endpoint
	b        *backend
	cfg      *Backend
	lease    Releaser // nil: none
	lost     <-chan struct{}
	released atomic.Bool

	// Guarded by Pool.mu.
	prev, next      *Slot // of the endpoint's
	stream, movable bool
	cancel          context.CancelCauseFunc // ends the request under way
	open            bool                    // a request is under way, or its answer's body is open
	begun           bool                    // the body's first byte came
	done            bool                    // what the request says of the endpoint was noted
	gen             uint32                  // of the endpoint's breaker
	sentAt          int64
}

// Name is the backend's, as the policy has it.
func (s *Slot) Name() string { return s.cfg.Name }

// Endpoint identifies the address within the pool, for Candidates' tried.
func (s *Slot) Endpoint() string { return s.e.id }

// URL is where a request for path (with a slash in front, in escaped form, without a
// query) goes: below the backend's base path.
func (s *Slot) URL(path string) string { return s.b.url(s.e.host, path) }

func (b *backend) url(host, path string) string {
	return b.base.Scheme + "://" + host + (&url.URL{Path: b.base.Path}).EscapedPath() + path
}

// Release gives the slot back, and its lease; calls after the first do nothing.
func (s *Slot) Release() {
	if !s.released.CompareAndSwap(false, true) {
		return
	}
	s.p.release(s)
	if s.lease != nil {
		s.lease.Release()
	}
}

// Fail reports what only the caller can see: an answer that is no answer, an error in the
// middle of a stream. It counts as a failure of the endpoint, once a request, and has it
// probed at once instead of at its next turn. Broken connections and timeouts are noted
// without it, and it does no harm then.
func (s *Slot) Fail(err error) {
	if err == nil || errors.Is(err, context.Canceled) {
		return // the client went away, which says nothing of the backend
	}
	s.p.mu.Lock()
	s.e.lastError = clip(err.Error())
	s.p.endLocked(s.p.now(), s, failed)
	s.p.mu.Unlock()
	s.e.probeSoon()
}

// Bills says whether the backend is a commercial one, which bills what it took, whatever it answered.
func (s *Slot) Bills() bool { return s.cfg.Kind != VLLM }

// Lost is closed when the endpoint went down, was ejected, or failed several times in a
// row since the slot was had. It says so only; see Movable.
func (s *Slot) Lost() <-chan struct{} { return s.lost }

// Stream says, before RoundTrip, that the request asks for a stream: the first byte of
// its answer is due soon, which is what first-byte timeouts and latencies go by.
func (s *Slot) Stream() {
	s.p.mu.Lock()
	s.stream = true
	s.p.mu.Unlock()
}

// Movable says, before RoundTrip, that the request may be sent to another endpoint after
// this one has received it: it does no harm twice. If the endpoint is lost before a byte
// of the answer's body has come, RoundTrip, or the first read of the body, then fails with
// a Replayable error instead of waiting on; on the last attempt that a request has, waiting
// is better. It does nothing for commercial backends, which
// bill what they took.
func (s *Slot) Movable() {
	s.p.mu.Lock()
	s.movable = s.cfg.Kind == VLLM
	s.p.mu.Unlock()
}

// Upstream is the backend's own name for a model, by the policy's Models.
func (s *Slot) Upstream(public string) (string, bool) {
	name, ok := s.cfg.Models[public]
	return name, ok
}

// Error is a request that got no answer.
type Error struct {
	Backend string // Slot.Endpoint of the one that failed
	Err     error
	unsent  bool
	silent  bool // sent, and no byte of an answer came or will come
}

func (e *Error) Error() string { return fmt.Sprintf("backend %s: %v", e.Backend, e.Err) }

// Unwrap gives the transport's error.
func (e *Error) Unwrap() error { return e.Err }

// Retryable says whether the request of which RoundTrip made err may be sent to
// another endpoint: no byte of an answer arrived, the backend cannot have received
// the request whole, and its context had not ended. See the package comment.
func Retryable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.unsent
}

// Replayable says whether the request of which RoundTrip, or the first read of the
// answer's body, made err may have been processed, yet brought no byte of an answer's body
// and will bring none: the endpoint was lost, broke the connection or kept silent beyond
// its timeout. It may be sent to another endpoint if doing the work twice does no harm and
// [Pool.MayRetry] allows it. Never what a commercial backend took, which bills it, nor
// what its caller has given up.
func Replayable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.silent
}

// RoundTrip sends req, made with the slot's URL, and returns the answer whatever its
// status; the caller closes its body, before another RoundTrip. It sets req's Host and
// credentials. A request that met a connection which the server had meanwhile closed
// starts over by itself where its body can be had again (GetBody). Errors are of type
// *Error, also those of reading the body unless req's context has ended. As with any
// http.RoundTripper, req.Body is closed, perhaps only after RoundTrip has returned.
func (s *Slot) RoundTrip(req *http.Request) (*http.Response, error) {
	req.Host = s.b.base.Host
	setAuth(req.Header, s.cfg.Kind, *s.b.key.Load())
	x := s.begin(req.Context())
	body := req.Body
	for stale := 0; ; stale++ {
		a := &attempt{}
		r := req.WithContext(httptrace.WithClientTrace(x.ctx, a.trace()))
		r.Body = body
		r.GetBody = nil // no replays but ours
		resp, err := s.b.transport.RoundTrip(r)
		if err == nil {
			x.answered(resp)
			return resp, nil
		}
		unsent := a.unsent(req.ContentLength)
		if x.ctx.Err() == nil && unsent && a.reused && stale < maxStale {
			if again, ok := rewind(req); ok {
				body = again
				continue
			}
		}
		switch {
		case !a.asked: // no transport would send it
			return nil, x.unblamed(err, false)
		case unsent && a.reused && x.ctx.Err() == nil: // stale, and the body can't be had again, or too often
			return nil, x.unblamed(err, true)
		}
		return nil, x.failed(err, unsent, !a.got)
	}
}

// rewind gives req's body from its start.
func rewind(req *http.Request) (io.ReadCloser, bool) {
	if req.Body == nil || req.Body == http.NoBody {
		return req.Body, true
	}
	if req.GetBody == nil {
		return nil, false
	}
	body, err := req.GetBody()
	return body, err == nil
}

// attempt is what became of one try, by the hooks of httptrace. They run in the
// goroutine that calls the transport.
type attempt struct {
	asked, got, reused bool
	conn               *countedConn // nil: got one that does not count
	start              int64        // conn's count when it was got
}

func (a *attempt) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GetConn: func(string) { a.asked, a.got = true, false },
		GotConn: func(i httptrace.GotConnInfo) {
			a.got, a.reused = true, i.Reused
			c := i.Conn
			if t, ok := c.(*tls.Conn); ok {
				c = t.NetConn()
			}
			if a.conn, _ = c.(*countedConn); a.conn != nil {
				a.start = a.conn.written.Load()
			}
		},
	}
}

// unsent: the peer cannot have the whole request. Encryption and, with HTTP/2, the
// other requests on the connection only make the count larger, hence the answer more careful.
func (a *attempt) unsent(length int64) bool {
	if !a.got {
		return a.asked // else the request itself was refused
	}
	return a.conn != nil && a.conn.written.Load()-a.start < max(1, length)
}
