package edge

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lines collects log lines.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func logger(l io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// start serves h on loopback and stops at the test's end.
func start(t *testing.T, cfg Config, h http.Handler) (addr string, srv *http.Server) {
	t.Helper()
	cfg.Listen = "127.0.0.1:0"
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	srv = NewServer(cfg, h)
	done := make(chan error)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		_ = srv.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return l.Addr().String(), srv
}

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// answers reads the status codes of all answers on c until it is closed.
func answers(c net.Conn) (codes []int) {
	r := bufio.NewReader(c)
	for {
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			return codes
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		codes = append(codes, resp.StatusCode)
		if err != nil {
			return codes
		}
	}
}

// pipes is a listener whose connections are in memory, for virtual time.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// peer gives one end of a pipe an address.
type peer struct {
	net.Conn
	addr netip.AddrPort
}

func (p peer) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(p.addr) }

func (p *pipes) dial(from string) net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- peer{theirs, netip.MustParseAddrPort(from)}
	return ours
}

// startPipes serves h on in-memory connections; stop waits for the server.
func startPipes(t *testing.T, cfg Config, h http.Handler) (p *pipes, stop func()) {
	t.Helper()
	p = newPipes()
	l, err := wrap(p, cfg)
	if err != nil {
		t.Fatal(err)
	}
	srv := NewServer(cfg, h)
	done := make(chan error)
	go func() { done <- srv.Serve(l) }()
	return p, func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := Drain(ctx, srv); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}
}

// reply answers as the pipeline will: by what became of the body.
func reply(limit int64) http.HandlerFunc {
	bodies := new(Bodies)
	return func(w http.ResponseWriter, r *http.Request) {
		b, err := bodies.Read(w, r, limit)
		if err != nil {
			http.Error(w, err.Error(), statusOf(err))
			return
		}
		defer b.Release()
		_, _ = w.Write(b.Bytes())
	}
}
