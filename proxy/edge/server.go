package edge

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of HTTP/2, which has no room for them in Config: few tune them well.
const (
	maxStreams         = 256       // at once on a connection
	maxStreamWindow    = 256 << 10 // bytes of a body that may arrive before the handler reads them
	maxConnWindow      = 1 << 20
	pingAfter          = 30 * time.Second // of silence
	pingTimeout        = 15 * time.Second
	stallChecks        = 4 // looks at a write per WriteStall
	minRearm           = time.Second
	minWatchdogPeriod  = time.Millisecond
	errorLineMaxLength = 4 << 10
)

// NewServer makes the server for h: HTTP/1.1 and h2c, and h2 where the listener
// speaks TLS. The request that h gets has a body which fails with ErrTooSlow once it
// trickles, and its ResponseWriter drops a client that leaves a write waiting for
// WriteStall: the write fails and the request's context ends.
func NewServer(cfg Config, h http.Handler) *http.Server {
	cfg = cfg.withDefaults()
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:   &guard{next: h, cfg: cfg},
		Protocols: p,
		// OPTIONS * is a request like any other: the handler refuses it.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            cfg.ReadHeaderTimeout,
		IdleTimeout:                  cfg.IdleTimeout,
		MaxHeaderBytes:               cfg.MaxHeaderBytes,
		ErrorLog:                     log.New(errorLog{cfg.Logger}, "", 0),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReceiveBufferPerStream:     maxStreamWindow,
			MaxReceiveBufferPerConnection: maxConnWindow,
			SendPingTimeout:               pingAfter,
			PingTimeout:                   pingTimeout,
			WriteByteTimeout:              cfg.WriteStall,
		},
	}
}

// errorLog receives net/http's own lines: panics are errors, the rest is what
// strangers do to an open port.
type errorLog struct{ log *slog.Logger }

func (l errorLog) Write(line []byte) (int, error) {
	level := slog.LevelDebug
	if bytes.Contains(line, []byte("panic")) {
		level = slog.LevelError
	}
	l.log.Log(context.Background(), level, "http server", "line", string(line[:min(len(line), errorLineMaxLength)]))
	return len(line), nil
}

// guard bounds what net/http leaves open around a handler.
type guard struct {
	next http.Handler
	cfg  Config
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	lines := 0
	for _, v := range r.Header {
		lines += len(v)
	}
	chunked := r.ProtoMajor == 1 && len(r.TransferEncoding) > 0
	if chunked || lines > g.cfg.MaxHeaders {
		w.Header().Set("Connection", "close") // see the package comment
	}
	if lines > g.cfg.MaxHeaders {
		http.Error(w, "too many header lines", http.StatusRequestHeaderFieldsTooLarge)
		return
	}

	gw := &writer{ResponseWriter: w, rc: http.NewResponseController(w), stall: g.cfg.WriteStall, start: time.Now()}
	defer gw.finish()
	if r.Body == nil || r.Body == http.NoBody {
		g.next.ServeHTTP(gw, r)
		return
	}
	// A copy: the server looks at the type of its own request's body.
	paced := new(http.Request)
	*paced = *r
	body := &pacedBody{ReadCloser: r.Body, rc: gw.rc, grace: g.cfg.BodyGrace, rate: g.cfg.BodyMinRate, start: gw.start}
	body.arm(gw.start) // also if the handler never reads: the server will, to the end, before it answers
	paced.Body = body
	g.next.ServeHTTP(gw, paced)
	if paced.MultipartForm != nil {
		if err := paced.MultipartForm.RemoveAll(); err != nil {
			g.cfg.Logger.Warn("temporary upload files were not removed", "err", err.Error())
		}
	}
}

// pacedBody is a request body that must keep up a minimum rate.
type pacedBody struct {
	io.ReadCloser
	rc    *http.ResponseController
	grace time.Duration
	rate  int64 // bytes per second

	start    time.Time
	n        int64
	deadline time.Time // as last set; zero: none
}

// arm moves the read deadline along with what has arrived, at most once per minRearm
// of it, which every deadline has on top so that it is never early.
func (b *pacedBody) arm(start time.Time) {
	due := start.Add(b.grace + time.Duration(b.n/b.rate)*time.Second)
	if b.deadline.IsZero() || due.Add(minRearm).Sub(b.deadline) >= minRearm {
		b.deadline = due.Add(minRearm)
		_ = b.rc.SetReadDeadline(b.deadline) // a connection that knows none is bounded by its owner
	}
}

func (b *pacedBody) Read(p []byte) (int, error) {
	if b.n == 0 { // the handler may have waited, and Expect: 100-continue with it
		b.start = time.Now()
		b.deadline = time.Time{}
	}
	b.arm(b.start)
	n, err := b.ReadCloser.Read(p)
	b.n += int64(n)
	switch {
	case err == nil:
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = ErrTooSlow
	default:
		// At the end the server begins to listen for the client's leaving, on
		// the same connection: a deadline left behind would look like it.
		_ = b.rc.SetReadDeadline(time.Time{})
	}
	return n, err
}

// writer drops a client that stops reading. A timer looks now and then whether a write
// has been waiting for too long: a write itself costs two atomic stores and a clock
// reading. Deadlines set ahead of each write would cost more, and would cut HTTP/2
// streams that merely pause.
type writer struct {
	http.ResponseWriter
	rc    *http.ResponseController
	stall time.Duration
	start time.Time
	since atomic.Int64 // when the current write began, in ns after start; 0: none is under way

	mu    sync.Mutex // guards timer and done against the timer's own goroutine
	timer *time.Timer
	done  bool
}

// Unwrap serves http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *writer) Write(p []byte) (int, error) {
	w.begin()
	defer w.since.Store(0)
	return w.ResponseWriter.Write(p)
}

// FlushError serves http.ResponseController.
func (w *writer) FlushError() error {
	w.begin()
	defer w.since.Store(0)
	return w.rc.Flush()
}

// Flush serves http.Flusher; errors show at the next write.
func (w *writer) Flush() { _ = w.FlushError() }

func (w *writer) begin() {
	w.since.Store(max(1, int64(time.Since(w.start))))
	if w.timer == nil { // only the handler's goroutine sets it
		w.mu.Lock()
		w.timer = time.AfterFunc(w.period(), w.check)
		w.mu.Unlock()
	}
}

func (w *writer) period() time.Duration { return max(w.stall/stallChecks, minWatchdogPeriod) }

func (w *writer) check() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return
	}
	since := w.since.Load()
	if since != 0 && time.Since(w.start)-time.Duration(since) >= w.stall {
		_ = w.rc.SetWriteDeadline(time.Now().Add(-time.Second)) // wakes the write, with an error
		return
	}
	w.timer.Reset(w.period())
}

// finish ends the watch; what is still buffered has WriteStall to leave.
func (w *writer) finish() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
	if w.timer != nil {
		w.timer.Stop()
	}
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.stall))
}

// Drain ends servers gently: they stop accepting, tell kept-alive connections to close,
// and let the requests in flight finish until ctx ends; then it closes what is left,
// which ends those requests' contexts, and says so with ctx's error. Handlers may still
// be on their way out when it returns: whoever settles for them waits for them.
func Drain(ctx context.Context, servers ...*http.Server) error {
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, s := range servers {
		wg.Go(func() {
			s.SetKeepAlivesEnabled(false)
			if errs[i] = s.Shutdown(ctx); errs[i] != nil {
				errs[i] = errors.Join(errs[i], s.Close())
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
