package upstream

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// actors are model servers in memory that behave as they are told, by host. Their health
// is good unless ill says otherwise.
type actors struct {
	mu    sync.Mutex
	play  map[string]act
	ill   map[string]bool
	calls map[string]int // but for /health
	last  http.Header
}

type act func(*http.Request) (*http.Response, error)

func newActors(hosts map[string]act) *actors {
	return &actors{play: hosts, ill: map[string]bool{}, calls: map[string]int{}}
}

func (a *actors) transport(Backend) http.RoundTripper { return a }

func (a *actors) tell(host string, f act) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.play[host] = f
}

func (a *actors) count(host string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls[host]
}

func (a *actors) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	host := strings.TrimSuffix(r.URL.Host, ":80")
	a.mu.Lock()
	f, ill := a.play[host], a.ill[host]
	if r.URL.Path != "/health" {
		a.calls[host]++
		a.last = r.Header.Clone()
	}
	a.mu.Unlock()
	switch {
	case r.URL.Path != "/health":
		return f(r)
	case ill:
		sentWhole(r)
		return nil, errors.New("connection reset by peer")
	}
	return answer(r, 200, ""), nil
}

// sentWhole has the request count as received.
func sentWhole(r *http.Request) {
	c := &countedConn{}
	dialed(r, c)
	c.written.Add(1 << 20)
}

func answers(status int, header ...string) act {
	return func(r *http.Request) (*http.Response, error) {
		sentWhole(r)
		resp := answer(r, status, "data: {}\n\n")
		for i := 0; i+1 < len(header); i += 2 {
			resp.Header.Set(header[i], header[i+1])
		}
		return resp, nil
	}
}

// after answers once some time has passed, and with its header at once if early.
func after(d time.Duration, early bool) act {
	return func(r *http.Request) (*http.Response, error) {
		sentWhole(r)
		b := &slowBody{ctx: r.Context(), wait: d, rest: "data: {}\n\n"}
		if !early {
			if err := b.pause(); err != nil {
				return nil, err
			}
		}
		resp := answer(r, 200, "")
		resp.Body = b
		return resp, nil
	}
}

// cuts breaks its answer off after what.
func cuts(what string) act {
	return func(r *http.Request) (*http.Response, error) {
		sentWhole(r)
		resp := answer(r, 200, "")
		resp.Body = io.NopCloser(io.MultiReader(strings.NewReader(what), brokenReader{}))
		return resp, nil
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func refuses(r *http.Request) (*http.Response, error) {
	dialed(r, nil)
	return nil, errors.New("connection refused")
}

func resets(r *http.Request) (*http.Response, error) {
	sentWhole(r)
	return nil, errors.New("connection reset by peer")
}

// forever is longer than any test waits.
const forever = 1000 * time.Hour

// slowBody waits before its first byte.
type slowBody struct {
	ctx  context.Context
	wait time.Duration
	rest string
}

func (b *slowBody) pause() error {
	t := time.NewTimer(b.wait)
	defer t.Stop()
	b.wait = 0
	select {
	case <-t.C:
		return nil
	case <-b.ctx.Done():
		return b.ctx.Err()
	}
}

func (b *slowBody) Read(p []byte) (int, error) {
	if b.wait > 0 {
		if err := b.pause(); err != nil {
			return 0, err
		}
	}
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	if b.rest == "" {
		return 0, io.EOF
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *slowBody) Close() error { return nil }

// stream asks slot's endpoint for a stream that may move, and reads it.
func stream(ctx context.Context, s *Slot) error {
	s.Stream()
	s.Movable()
	return roundTrip(ctx, s)
}

func roundTrip(ctx context.Context, s *Slot) error {
	req, err := http.NewRequestWithContext(ctx, "POST", s.URL("/v1/chat/completions"), strings.NewReader("{}"))
	if err != nil {
		return err
	}
	resp, err := s.RoundTrip(req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}

// one takes the best candidate and asks it for a stream.
func one(t testing.TB, p *Pool, names ...string) (id string, err error) {
	t.Helper()
	c, err := p.Candidates(nil, names, nil)
	if err != nil {
		return "", err
	}
	s, err := p.Hold(c[0].ID, nil)
	if err != nil {
		return "", err
	}
	defer s.Release()
	return c[0].ID, stream(t.Context(), s)
}

func status(t testing.TB, p *Pool, id string) BackendStatus {
	t.Helper()
	for _, s := range p.Status() {
		if s.Endpoint == id {
			return s
		}
	}
	t.Fatalf("no endpoint %s", id)
	return BackendStatus{}
}

func fired(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
