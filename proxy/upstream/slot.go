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
	released atomic.Bool
	stream   bool
	lost     <-chan struct{}
}

// Name is the backend's, as the policy has it.
func (s *Slot) Name() string { return s.cfg.Name }

// Endpoint identifies the address within the pool, for Acquire's tried.
func (s *Slot) Endpoint() string { return s.e.id }

// URL is where a request for path (with a slash in front, in escaped form, without a
// query) goes: below the backend's base path.
func (s *Slot) URL(path string) string { return s.b.url(s.e.host, path) }

func (b *backend) url(host, path string) string {
	return b.base.Scheme + "://" + host + (&url.URL{Path: b.base.Path}).EscapedPath() + path
}

// Release gives the slot back; calls after the first do nothing.
func (s *Slot) Release() {
	if s.released.CompareAndSwap(false, true) {
		s.p.release(s.e)
	}
}

// Fail reports that an answer broke off after RoundTrip had returned it. The endpoint
// is probed at once instead of at its next turn; it keeps its state until then.
func (s *Slot) Fail(err error) {
	s.p.suspect(s.e, err)
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
// answer's body, made err may have been processed, yet brought no byte of an answer and
// will bring none: the endpoint was lost, broke the connection or kept silent beyond its
// timeout. It may be sent to another endpoint if doing the work twice does no harm and
// [Pool.Retry] allows it.
func Replayable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.silent
}

// Lost is closed when the endpoint went down, was ejected, or failed several times in a
// row since the slot was had. A request that has had no byte of its answer by then ends
// by itself with an error that is Replayable; one that has goes on.
func (s *Slot) Lost() <-chan struct{} { return s.lost }

// Stream says, before RoundTrip, that the request asks for a stream: the first byte of
// its answer is due soon, which is what first-byte timeouts and latencies go by.
func (s *Slot) Stream() { s.stream = true }

// Model is the backend's own name for a model, by the policy's Models; "" if it has none.
func (s *Slot) Model(public string) string { return s.cfg.Models[public] }

// RoundTrip sends req, made with the slot's URL, and returns the answer whatever its
// status; the caller closes its body. It sets req's Host and Authorization. A request
// that met a connection which the server had meanwhile closed starts over by itself
// where its body can be had again (GetBody). Errors are of type *Error. As with any
// http.RoundTripper, req.Body is closed, perhaps only after RoundTrip has returned.
func (s *Slot) RoundTrip(req *http.Request) (*http.Response, error) {
	req.Host = s.b.base.Host
	setAuth(req.Header, s.cfg.APIKey)
	body := req.Body
	for stale := 0; ; stale++ {
		a := &attempt{}
		r := req.WithContext(httptrace.WithClientTrace(req.Context(), a.trace()))
		r.Body = body
		r.GetBody = nil // no replays but ours
		resp, err := s.b.transport.RoundTrip(r)
		if err == nil {
			if resp.StatusCode < 500 {
				s.p.answered(s.e)
			}
			return resp, nil
		}
		if req.Context().Err() != nil {
			return nil, &Error{Backend: s.e.id, Err: err}
		}
		unsent := a.unsent(req.ContentLength)
		if unsent && a.reused && stale < maxStale {
			if again, ok := rewind(req); ok {
				body = again
				continue
			}
		}
		if a.failedDial() {
			s.p.dialFailed(s.e, err)
		}
		return nil, &Error{Backend: s.e.id, Err: err, unsent: unsent}
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

// failedDial: a connection was asked for and none was got.
func (a *attempt) failedDial() bool { return a.asked && !a.got }

// unsent: the peer cannot have the whole request. Encryption and, with HTTP/2, the
// other requests on the connection only make the count larger, hence the answer more careful.
func (a *attempt) unsent(length int64) bool {
	if !a.got {
		return a.asked // else the request itself was refused
	}
	return a.conn != nil && a.conn.written.Load()-a.start < max(1, length)
}

// answered notes that e works.
func (p *Pool) answered(e *endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.upLocked(e)
}

// dialFailed notes that no connection to e could be had.
func (p *Pool) dialFailed(e *endpoint, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.failedDials++
	e.lastError = err.Error()
	if e.failedDials >= maxFailedDials {
		p.downLocked(e)
		e.probeSoon()
	}
}

func (p *Pool) suspect(e *endpoint, err error) {
	if err == nil || errors.Is(err, context.Canceled) {
		return // the client went away, which says nothing of the backend
	}
	p.mu.Lock()
	e.lastError = err.Error()
	p.mu.Unlock()
	e.probeSoon()
}
