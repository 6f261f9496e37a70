package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// connBuffer is the size of a connection's read and of its write buffer: two of
	// them are held per request in flight.
	connBuffer = 4 << 10
	// maxAnswerHeader bounds the header of an answer.
	maxAnswerHeader = 256 << 10
	// maxPEM bounds a certificate file.
	maxPEM = 4 << 20
)

// transport is a backend's HTTP transport, rebuilt when its certificate files change.
type transport struct {
	cfg   Backend
	pool  Config
	files string // what the files looked like; only the watch loop reads and writes it
	rt    atomic.Pointer[http.RoundTripper]
}

func newTransport(b Backend, pool Config) (*transport, error) {
	t := &transport{cfg: b, pool: pool}
	t.files = t.fingerprint()
	return t, t.build()
}

func (t *transport) build() error {
	var rt http.RoundTripper
	if t.pool.Transport != nil {
		rt = t.pool.Transport(t.cfg)
	} else {
		h, err := newHTTPTransport(t.cfg, t.pool)
		if err != nil {
			return err
		}
		rt = h
	}
	t.rt.Store(&rt)
	return nil
}

// reload rebuilds the transport if a file changed since it was built. Connections in
// use go on; what cannot be read leaves the old transport in place.
func (t *transport) reload() (changed bool, err error) {
	now := t.fingerprint()
	if now == t.files {
		return false, nil
	}
	old := t.rt.Load()
	if err := t.build(); err != nil {
		return false, err
	}
	t.files = now
	closeIdle(*old)
	return true, nil
}

// fingerprint changes when a file is replaced, also through a symbolic link, as
// mounted secrets are.
func (t *transport) fingerprint() string {
	var s strings.Builder
	for _, f := range []string{t.cfg.CAFile, t.cfg.CertFile, t.cfg.KeyFile} {
		if f == "" {
			continue
		}
		fi, err := os.Stat(f)
		if err != nil {
			s.WriteString("-;")
			continue
		}
		s.WriteString(fmt.Sprintf("%d %d;", fi.ModTime().UnixNano(), fi.Size()))
	}
	return s.String()
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	return (*t.rt.Load()).RoundTrip(r)
}

func (t *transport) CloseIdleConnections() { closeIdle(*t.rt.Load()) }

func closeIdle(rt http.RoundTripper) {
	if c, ok := rt.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

func newHTTPTransport(b Backend, pool Config) (*http.Transport, error) {
	base, err := b.base()
	if err != nil {
		return nil, err
	}
	connect := cmp.Or(b.ConnectTimeout, pool.DialTimeout)
	d := &net.Dialer{Timeout: connect, KeepAlive: 15 * time.Second}
	t := &http.Transport{
		Proxy: nil, // the environment must not reroute a fleet's inner traffic
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &countedConn{Conn: c}, nil
		},
		TLSHandshakeTimeout:    connect,
		DisableCompression:     true, // bytes pass as they are; usage must be readable
		MaxIdleConnsPerHost:    pool.MaxIdlePerBackend,
		IdleConnTimeout:        pool.IdleConnTimeout,
		ResponseHeaderTimeout:  pool.ResponseHeaderTimeout,
		MaxResponseHeaderBytes: maxAnswerHeader,
		WriteBufferSize:        connBuffer,
		ReadBufferSize:         connBuffer,
	}
	if base.Scheme == "https" {
		t.ForceAttemptHTTP2 = true
		t.TLSClientConfig, err = tlsConfig(b, base.Hostname())
	}
	return t, err
}

func tlsConfig(b Backend, host string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: host}
	if b.ServerName != "" {
		c.ServerName = b.ServerName
	}
	if b.CAFile != "" {
		pem, err := readPEM(b.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca_file: %s holds no PEM certificate", b.CAFile)
		}
	}
	if b.CertFile != "" {
		cert, err := readPEM(b.CertFile)
		if err != nil {
			return nil, fmt.Errorf("cert_file: %w", err)
		}
		key, err := readPEM(b.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("key_file: %w", err)
		}
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("cert_file: %s with %s: %w", b.CertFile, b.KeyFile, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

func readPEM(name string) ([]byte, error) {
	if fi, err := os.Stat(name); err != nil {
		return nil, err
	} else if fi.Size() > maxPEM {
		return nil, errors.New(name + " is too large for a PEM file")
	}
	return os.ReadFile(name)
}

// countedConn counts the bytes that may have been written to the peer.
type countedConn struct {
	net.Conn
	written atomic.Int64
}

// Write counts b before it writes it and takes back what was not written, so that the
// count is never below the truth, also while a write is under way.
func (c *countedConn) Write(b []byte) (int, error) {
	c.written.Add(int64(len(b)))
	n, err := c.Conn.Write(b)
	if n < len(b) {
		c.written.Add(int64(n - len(b)))
	}
	return n, err
}
