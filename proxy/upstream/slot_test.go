package upstream

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// dialed calls the hooks that a transport would; a nil conn is a failed dial.
func dialed(r *http.Request, conn net.Conn) {
	trace := httptrace.ContextClientTrace(r.Context())
	if trace == nil {
		return
	}
	trace.GetConn(r.URL.Host)
	if conn != nil {
		trace.GotConn(httptrace.GotConnInfo{Conn: conn, Reused: true})
	}
}

// rawServer answers each connection by f and waits for all at the test's end.
func rawServer(t *testing.T, f func(*net.TCPConn, *bufio.Reader)) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f(c.(*net.TCPConn), bufio.NewReader(c))
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return "http://" + l.Addr().String()
}

func readRequest(t *testing.T, r *bufio.Reader) bool {
	req, err := http.ReadRequest(r)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, req.Body)
	return err == nil
}

func acquire(t *testing.T, cfg Config, url string) *Slot {
	t.Helper()
	cfg.Backends = append(cfg.Backends, Backend{Name: "a", URL: url})
	p := newTestPool(t, cfg)
	s, err := p.Acquire([]string{"a"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Release)
	return s
}

func TestRetryableOnlyWhatCannotHaveBeenProcessed(t *testing.T) {
	t.Run("refused", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		s := acquire(t, Config{}, "http://"+l.Addr().String())
		if err := send(t, s, "{}"); !Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("closed after the whole request", func(t *testing.T) {
		s := acquire(t, Config{}, rawServer(t, func(_ *net.TCPConn, r *bufio.Reader) { readRequest(t, r) }))
		if err := send(t, s, "{}"); err == nil || Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("reset after the whole request", func(t *testing.T) {
		s := acquire(t, Config{}, rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(t, r)
			_ = c.SetLinger(0)
		}))
		if err := send(t, s, "{}"); err == nil || Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("reset in the middle of the body", func(t *testing.T) {
		s := acquire(t, Config{}, rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
			_, _ = r.ReadByte()
			_ = c.SetLinger(0)
		}))
		if err := send(t, s, strings.Repeat("x", 64<<20)); !Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("cut in the middle of the header", func(t *testing.T) {
		s := acquire(t, Config{}, rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(t, r)
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-"))
		}))
		if err := send(t, s, "{}"); err == nil || Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("cut in the middle of the answer", func(t *testing.T) {
		s := acquire(t, Config{}, rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(t, r)
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345"))
		}))
		if err := send(t, s, "{}"); err == nil || Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("header timeout", func(t *testing.T) {
		hold := make(chan struct{})
		s := acquire(t, Config{ResponseHeaderTimeout: time.Millisecond}, rawServer(t, func(_ *net.TCPConn, r *bufio.Reader) {
			readRequest(t, r)
			<-hold
		}))
		err := send(t, s, "{}")
		close(hold)
		if err == nil || Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("a client that left", func(t *testing.T) {
		s := acquire(t, Config{Transport: newFleet().transport}, "http://h")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		req, _ := http.NewRequestWithContext(ctx, "POST", s.URL("/"), strings.NewReader("{}"))
		_, err := s.RoundTrip(req)
		if !errors.Is(err, context.Canceled) || Retryable(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("a request that no transport would send", func(t *testing.T) {
		s := acquire(t, Config{}, "http://127.0.0.1:1")
		req, _ := http.NewRequestWithContext(t.Context(), "POST", s.URL("/"), strings.NewReader("{}"))
		req.Header.Set("X", "a\nb")
		_, err := s.RoundTrip(req)
		if err == nil || Retryable(err) || s.p.Status()[0].LastError != "" {
			t.Errorf("%v, blamed on the backend: %q", err, s.p.Status()[0].LastError)
		}
	})
	if Retryable(nil) || Retryable(io.ErrUnexpectedEOF) {
		t.Error("errors of others are not ours to retry")
	}
}

// TestNoReplayBehindOurBack: net/http by itself sends a POST with an Idempotency-Key
// again when a kept-alive connection breaks.
func TestNoReplayBehindOurBack(t *testing.T) {
	var arrived atomic.Int64
	s := acquire(t, Config{}, rawServer(t, func(c *net.TCPConn, r *bufio.Reader) {
		if readRequest(t, r) {
			arrived.Add(1)
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"))
		}
		if readRequest(t, r) {
			arrived.Add(1)
		}
	}))
	if err := send(t, s, "{}"); err != nil {
		t.Fatal(err)
	}
	req, _ := http.NewRequestWithContext(t.Context(), "POST", s.URL("/"), strings.NewReader("{}"))
	req.Header.Set("Idempotency-Key", "k")
	if _, err := s.RoundTrip(req); err == nil || Retryable(err) {
		t.Errorf("%v", err)
	}
	if n := arrived.Load(); n != 2 {
		t.Errorf("%d requests arrived, want 2", n)
	}
}

// staleTransport fails the first n requests like an idle connection that the server
// had closed, then answers with the body it got.
type staleTransport struct {
	n    int
	seen []string
}

func (s *staleTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	body, _ := io.ReadAll(r.Body)
	r.Body.Close()
	s.seen = append(s.seen, string(body))
	dialed(r, &countedConn{})
	if len(s.seen) <= s.n {
		return nil, errors.New("http: server closed idle connection")
	}
	return answer(r, 200, string(body)), nil
}

func TestStaleConnectionStartsOver(t *testing.T) {
	for n, ok := range map[int]bool{1: true, maxStale: true, maxStale + 1: false} {
		st := &staleTransport{n: n}
		s := acquire(t, Config{Transport: func(Backend) http.RoundTripper { return st }}, "http://h")
		err := send(t, s, "hello")
		if (err == nil) != ok || err != nil && !Retryable(err) {
			t.Errorf("%d stale: %v", n, err)
		}
		for _, b := range st.seen {
			if b != "hello" {
				t.Errorf("%d stale: sent %q", n, b)
			}
		}
		if st := s.p.Status()[0]; st.LastError != "" {
			t.Errorf("a stale connection was blamed on the backend: %+v", st)
		}
	}
	st := &staleTransport{n: 1}
	s := acquire(t, Config{Transport: func(Backend) http.RoundTripper { return st }}, "http://h")
	req, _ := http.NewRequestWithContext(t.Context(), "POST", s.URL("/"), io.NopCloser(strings.NewReader("once")))
	if _, err := s.RoundTrip(req); !Retryable(err) || len(st.seen) != 1 {
		t.Errorf("a body that cannot be had again: %v after %q", err, st.seen)
	}
}

func TestAuthorizationIsTheBackends(t *testing.T) {
	var got atomic.Value
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.Store(r.Header.Get("Authorization") + "|" + r.Header.Get("Accept-Encoding") + "|" + r.URL.Path)
	}))
	defer srv.Close()
	p := newTestPool(t, Config{Backends: []Backend{
		{Name: "with", URL: srv.URL + "/base", APIKey: "secret"}, {Name: "without", URL: srv.URL},
	}})
	for name, want := range map[string]string{"with": "Bearer secret||/base/v1/x", "without": "||/v1/x"} {
		s, err := p.Acquire([]string{name}, nil)
		if err != nil {
			t.Fatal(err)
		}
		req, _ := http.NewRequestWithContext(t.Context(), "POST", s.URL("/v1/x"), strings.NewReader("{}"))
		req.Header.Set("Authorization", "Bearer hg_live_caller")
		resp, err := s.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		s.Release()
		if got.Load() != want {
			t.Errorf("%s: %q, want %q", name, got.Load(), want)
		}
	}
}

// authority issues certificates for a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, _ := x509.ParseCertificate(der)
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func (a *authority) issue(t *testing.T, name string) (certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	pk, _ := x509.MarshalPKCS8PrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pk})
}

func TestOwnCAAndClientCertificateAreReloaded(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	file := func(name string, data []byte) string {
		f := filepath.Join(dir, name)
		if err := os.WriteFile(f, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return f
	}
	serverCert, serverKey := ca.issue(t, "vllm.internal")
	pair, err := tls.X509KeyPair(serverCert, serverKey)
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AddCert(ca.cert)
	var who, proto atomic.Value
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who.Store(r.TLS.PeerCertificates[0].Subject.CommonName)
		proto.Store(r.Proto)
	}))
	srv.EnableHTTP2 = true
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()

	cert, key := ca.issue(t, "gateway-1")
	b := Backend{
		Name: "tls", URL: srv.URL, ServerName: "vllm.internal",
		CAFile: file("ca.pem", ca.pem), CertFile: file("cert.pem", cert), KeyFile: file("key.pem", key),
	}
	p := newTestPool(t, Config{Backends: []Backend{b}})
	s, err := p.Acquire([]string{"tls"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release()
	if err := send(t, s, "{}"); err != nil || who.Load() != "gateway-1" || proto.Load() != "HTTP/2.0" {
		t.Fatalf("%v as %v over %v", err, who.Load(), proto.Load())
	}

	cert, key = ca.issue(t, "gateway-two") // another length: seen whatever the clock's grain
	file("cert.pem", cert)
	if changed, err := s.b.transport.reload(); err == nil || changed {
		t.Errorf("half a pair was loaded: %v %v", changed, err)
	}
	if err := send(t, s, "{}"); err != nil || who.Load() != "gateway-1" {
		t.Errorf("after a failed reload: %v as %v", err, who.Load())
	}
	file("key.pem", key)
	if changed, err := s.b.transport.reload(); err != nil || !changed {
		t.Fatalf("%v %v", changed, err)
	}
	if err := send(t, s, "{}"); err != nil || who.Load() != "gateway-two" {
		t.Errorf("after a reload: %v as %v", err, who.Load())
	}
	if changed, err := s.b.transport.reload(); err != nil || changed {
		t.Errorf("unchanged files: %v %v", changed, err)
	}

	b.ServerName = "other.internal"
	if err := p.Update([]Backend{b}); err != nil {
		t.Fatal(err)
	}
	s2, err := p.Acquire([]string{"tls"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s2.Release()
	if err := send(t, s2, "{}"); !Retryable(err) {
		t.Errorf("another server's certificate: %v, want a retryable failure to connect", err)
	}
	b.CAFile = file("not.pem", []byte("nonsense"))
	if err := p.Update([]Backend{b}); err == nil || !strings.Contains(err.Error(), "backends[0].ca_file") {
		t.Errorf("%v", err)
	}
}
