package edge

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/pires/go-proxyproto"
)

const (
	// refusalLogGap is the pause between two log lines about refused connections.
	refusalLogGap = 10 * time.Second
	// certCheckGap is the pause between two looks at the certificate files.
	certCheckGap = time.Second
	// keepAlive is the pause between TCP probes on a silent connection.
	keepAlive = 30 * time.Second
)

// Listen listens on cfg.Listen and applies the connection caps, the PROXY protocol and
// TLS of cfg. The returned listener is for NewServer's Serve.
func Listen(ctx context.Context, cfg Config) (net.Listener, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: keepAlive, Interval: keepAlive}}
	inner, err := lc.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, err
	}
	l, err := wrap(inner, cfg)
	if err != nil {
		_ = inner.Close() // nobody has connected
	}
	return l, err
}

func wrap(inner net.Listener, cfg Config) (net.Listener, error) {
	cfg = cfg.withDefaults()
	var l net.Listener = &listener{Listener: inner, cfg: cfg, perIP: map[netip.Addr]int{}}
	if cfg.TLSCert == "" {
		return l, nil
	}
	certs := &certFiles{cert: cfg.TLSCert, key: cfg.TLSKey, cfg: cfg}
	if err := certs.load(time.Now()); err != nil {
		return nil, err
	}
	return tls.NewListener(l, &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"},
		GetCertificate: certs.get,
	}), nil
}

// listener caps connections.
type listener struct {
	net.Listener
	cfg Config

	mu      sync.Mutex
	conns   int
	perIP   map[netip.Addr]int // never more entries than conns
	refused int                // since the last log line
	logged  time.Time
}

// Accept gives the next connection within the caps; others it closes.
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer := addrOf(c.RemoteAddr().String())
		// The client behind a proxy is not known until the PROXY header is read,
		// which must not hold up Accept: its share is counted at the first use.
		behind := l.cfg.ProxyProtocol && l.cfg.trusted(peer)
		if !l.admit(!behind, peer) {
			_ = c.Close() // nothing was read or written
			continue
		}
		cc := &conn{Conn: c, l: l}
		if behind {
			cc.Conn = proxyproto.NewConn(c, proxyproto.WithPolicy(proxyproto.REQUIRE),
				proxyproto.SetReadHeaderTimeout(l.cfg.ReadHeaderTimeout))
			cc.late = true
		} else {
			cc.ip = subscriber(peer)
		}
		return cc, nil
	}
}

// admit counts one more connection, and one more of ip where perIP is set.
func (l *listener) admit(perIP bool, ip netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns >= l.cfg.MaxConns {
		l.refuseLocked("max_conns", ip)
		return false
	}
	if perIP && !l.shareLocked(subscriber(ip)) {
		return false
	}
	l.conns++
	return true
}

// shareLocked counts one more connection of ip; a peer without an address has no share.
func (l *listener) shareLocked(ip netip.Addr) bool {
	if !ip.IsValid() {
		return true
	}
	if l.perIP[ip] >= l.cfg.MaxConnsPerIP {
		l.refuseLocked("max_conns_per_ip", ip)
		return false
	}
	l.perIP[ip]++
	return true
}

func (l *listener) refuseLocked(which string, ip netip.Addr) {
	l.refused++
	if now := time.Now(); now.Sub(l.logged) >= refusalLogGap {
		l.cfg.Logger.Warn("connections refused", "cap", which, "client_ip", ip.String(), "refused", l.refused, "open", l.conns)
		l.refused, l.logged = 0, now
	}
}

// conn gives its place back when it is closed.
type conn struct {
	net.Conn
	l    *listener
	late bool // behind a proxy: the client is learned from the PROXY header

	once   sync.Once // late's count
	lateOK error

	mu     sync.Mutex
	ip     netip.Addr // counted under it; zero: not counted
	closed bool
}

// Read counts a late connection's client first and fails if it has too many.
func (c *conn) Read(b []byte) (int, error) {
	if c.late {
		c.once.Do(func() { c.lateOK = c.countLate() })
		if c.lateOK != nil {
			return 0, c.lateOK
		}
	}
	return c.Conn.Read(b)
}

func (c *conn) countLate() error {
	ip := subscriber(addrOf(c.Conn.RemoteAddr().String())) // reads the PROXY header
	c.mu.Lock()
	defer c.mu.Unlock()
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	if c.closed || !c.l.shareLocked(ip) {
		return io.EOF // which the server takes without an answer
	}
	c.ip = ip
	return nil
}

// Close closes the connection; only the first call counts.
func (c *conn) Close() error {
	err := c.Conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return err
	}
	c.closed = true
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	c.l.conns--
	if c.ip.IsValid() {
		if c.l.perIP[c.ip]--; c.l.perIP[c.ip] == 0 {
			delete(c.l.perIP, c.ip)
		}
	}
	return err
}

// CloseWrite lets the server end an answer before it discards what the client is still
// sending, so that the answer is not lost to a reset.
func (c *conn) CloseWrite() error {
	inner := c.Conn
	if p, ok := inner.(*proxyproto.Conn); ok {
		inner = p.Raw()
	}
	if w, ok := inner.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// certFiles serves a certificate from files and reads them again when they changed.
type certFiles struct {
	cert, key string
	cfg       Config

	mu      sync.Mutex
	current *tls.Certificate
	seen    string // what the files looked like
	checked time.Time
}

func (f *certFiles) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := time.Now(); now.Sub(f.checked) >= certCheckGap {
		if err := f.load(now); err != nil {
			f.cfg.Logger.Warn("changed certificate files cannot be used; the old ones stay", "err", err.Error())
		}
	}
	return f.current, nil
}

// load reads the files if they look different from last time.
func (f *certFiles) load(now time.Time) error {
	f.checked = now
	var seen strings.Builder
	for _, name := range []string{f.cert, f.key} {
		fi, err := os.Stat(name)
		if err != nil {
			return err
		}
		seen.WriteString(fmt.Sprintf("%d %d;", fi.ModTime().UnixNano(), fi.Size()))
	}
	if seen.String() == f.seen {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return fmt.Errorf("tls_cert: %s with %s: %w", f.cert, f.key, err)
	}
	f.current, f.seen = &pair, seen.String()
	return nil
}
