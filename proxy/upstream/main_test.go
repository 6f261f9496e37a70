package upstream

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fleet is a set of model servers in memory, by host.
type fleet struct {
	mu   sync.Mutex
	down map[string]bool
	hits map[string]int // requests that arrived, by host and path
	body string         // of every answer
}

func newFleet() *fleet { return &fleet{down: map[string]bool{}, hits: map[string]int{}} }

func (f *fleet) set(host string, down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down[host] = down
}

func (f *fleet) count(hostPath string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hits[hostPath]
}

// transport is Config.Transport.
func (f *fleet) transport(Backend) http.RoundTripper { return f }

func (f *fleet) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if r.Body != nil {
		defer r.Body.Close()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hits[r.URL.Host+r.URL.Path]++
	if f.down[r.URL.Host] {
		dialed(r, nil)
		return nil, errors.New("connection refused")
	}
	return answer(r, 200, f.body), nil
}

func answer(r *http.Request, status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body)), Request: r}
}

// names is a name server in memory.
type names struct {
	mu    sync.Mutex
	addrs []netip.Addr
	err   error
}

func (n *names) set(err error, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err, n.addrs = err, nil
	for _, a := range addrs {
		n.addrs = append(n.addrs, netip.MustParseAddr(a))
	}
}

func (n *names) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.addrs, n.err
}

func newTestPool(t testing.TB, cfg Config) *Pool {
	t.Helper()
	p, err := NewPool(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// serve runs the pool's loops until the returned function is called.
func serve(t testing.TB, p *Pool) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func states(p *Pool) string {
	var s []string
	for _, b := range p.Status() {
		s = append(s, b.Endpoint+"="+b.State.String())
	}
	return strings.Join(s, " ")
}

func send(t testing.TB, s *Slot, body string) error {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", s.URL("/v1/chat/completions"), strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.RoundTrip(req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}
