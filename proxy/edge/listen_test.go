package edge

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestConfigNamesFieldAndRemedy(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, "listen"},
		{Config{Listen: ":1", TLSCert: "c"}, "tls_key"},
		{Config{Listen: ":1", ProxyProtocol: true}, "trusted_proxies"},
		{Config{Listen: ":1", TrustedProxies: make([]netip.Prefix, 1)}, "trusted_proxies[0]"},
		{Config{Listen: ":1", MaxConns: -1}, "max_conns"},
		{Config{Listen: ":1", MaxHeaders: -1}, "max_headers"},
		{Config{Listen: ":1", BodyMinRate: -1}, "body_min_rate"},
		{Config{Listen: ":1", WriteStall: -1}, "write_stall"},
	} {
		if err := c.cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want mention of %q", c.cfg, err, c.want)
		}
		if l, err := Listen(t.Context(), c.cfg); err == nil {
			l.Close()
			t.Errorf("%+v: listened", c.cfg)
		}
	}
	if err := (Config{Listen: ":1"}).Validate(); err != nil {
		t.Error(err)
	}
}

// TestConnectionCaps counts by address, gives places back, and treats a /64 as one.
func TestConnectionCaps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lines
		pipes, stop := startPipes(t, Config{MaxConns: 4, MaxConnsPerIP: 2, Logger: logger(&log)}, reply(10))
		defer stop()
		alive := func(from string) (ok bool, hangUp func()) {
			c := pipes.dial(from)
			go func() { _, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n") }()
			n, _ := io.ReadAtLeast(c, make([]byte, 4096), 1)
			return n > 0, func() { c.Close(); synctest.Wait() }
		}
		var hangUps []func()
		for i, c := range []struct {
			from string
			want bool
		}{
			{"10.0.0.1:1", true}, {"10.0.0.1:2", true}, {"10.0.0.1:3", false}, // its share
			{"[2001:db8::1]:1", true}, {"[2001:db8::2]:1", true}, // now all are taken
			{"10.0.0.9:1", false},
		} {
			ok, hangUp := alive(c.from)
			if ok != c.want {
				t.Errorf("%d: %s alive: %v", i, c.from, ok)
			}
			hangUps = append(hangUps, hangUp)
		}
		hangUps[0]()
		if ok, _ := alive("[2001:db8::ffff]:1"); ok {
			t.Error("a third connection of one /64")
		}
		ok, hangUp := alive("10.0.0.1:4")
		if !ok {
			t.Error("a place that was given back is not to be had")
		}
		hangUp()
		for _, h := range hangUps {
			h()
		}
		for range 4 { // nothing leaked, whatever was closed how often
			ok, h := alive("10.0.0.2:1")
			if !ok {
				t.Error("a place leaked")
			}
			h()
		}
		if n := strings.Count(log.String(), "connections refused"); n != 1 {
			t.Errorf("%d log lines for refusals within ten seconds:\n%s", n, log.String())
		}
	})
}

func TestProxyProtocolOnlyFromTrusted(t *testing.T) {
	v2 := "\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\xcb\x00\x71\x09\x0a\x00\x00\x01\x00\x01\x00\x50"
	v1 := "PROXY TCP4 203.0.113.9 10.0.0.1 1 80\r\n"
	get := "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
	for name, c := range map[string]struct {
		from, raw, want string // want: the client's address, or the status, or nothing
	}{
		"v1":                     {"10.0.0.1:1", v1 + get, "203.0.113.9"},
		"v2":                     {"10.0.0.1:1", v2 + get, "203.0.113.9"},
		"trusted without":        {"10.0.0.1:1", get, ""},
		"trusted, silent":        {"10.0.0.1:1", "", ""},
		"trusted, broken":        {"10.0.0.1:1", "PROXY TCP4 nonsense\r\n" + get, ""},
		"trusted, unknown":       {"10.0.0.1:1", "PROXY UNKNOWN\r\n" + get, "10.0.0.1"},
		"untrusted without":      {"192.0.2.1:1", get, "192.0.2.1"},
		"untrusted with":         {"192.0.2.1:1", v1 + get, "400"},
		"untrusted with, v2":     {"192.0.2.1:1", v2 + get, "400"},
		"untrusted X-Forwarded":  {"192.0.2.1:1", strings.Replace(get, "\r\n\r\n", "\r\nX-Forwarded-For: 1.1.1.1\r\n\r\n", 1), "192.0.2.1"},
		"X-Forwarded behind one": {"10.0.0.1:1", "PROXY TCP4 10.0.0.7 10.0.0.1 1 80\r\n" + strings.Replace(get, "\r\n\r\n", "\r\nX-Forwarded-For: 1.1.1.1\r\n\r\n", 1), "1.1.1.1"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := Config{ProxyProtocol: true, TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
				pipes, stop := startPipes(t, cfg, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.WriteString(w, cfg.ClientIP(r).String())
				}))
				defer stop()
				conn := pipes.dial(c.from)
				defer conn.Close()
				go func() { _, _ = io.WriteString(conn, c.raw) }()
				got, _ := io.ReadAll(conn)
				if c.want == "" && len(got) != 0 || !strings.Contains(string(got), c.want) {
					t.Errorf("%q, want %q", got, c.want)
				}
			})
		})
	}
}

// TestProxiedClientsHaveTheirShare: the cap is the client's, not the load balancer's.
func TestProxiedClientsHaveTheirShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{ProxyProtocol: true, MaxConnsPerIP: 1, TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32")}}
		pipes, stop := startPipes(t, cfg, reply(10))
		defer stop()
		for i, c := range []struct {
			client string
			want   bool
		}{{"203.0.113.1", true}, {"203.0.113.2", true}, {"203.0.113.1", false}} {
			conn := pipes.dial("10.0.0.1:1")
			defer conn.Close()
			go func() {
				_, _ = io.WriteString(conn, "PROXY TCP4 "+c.client+" 10.0.0.1 1 80\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n")
			}()
			if n, _ := io.ReadAtLeast(conn, make([]byte, 4096), 1); n > 0 != c.want {
				t.Errorf("%d: %s: %d bytes", i, c.client, n)
			}
		}
	})
}

func TestClientIP(t *testing.T) {
	cfg := Config{TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}}
	for _, c := range []struct {
		remote string
		xff    []string
		want   string
	}{
		{"192.0.2.1:5", nil, "192.0.2.1"},
		{"192.0.2.1:5", []string{"1.1.1.1"}, "192.0.2.1"},
		{"10.0.0.1:5", nil, "10.0.0.1"},
		{"10.0.0.1:5", []string{"1.1.1.1"}, "1.1.1.1"},
		{"10.0.0.1:5", []string{"6.6.6.6, 1.1.1.1 ,10.0.0.2"}, "1.1.1.1"},
		{"10.0.0.1:5", []string{"6.6.6.6", "1.1.1.1", "10.0.0.2"}, "1.1.1.1"},
		{"10.0.0.1:5", []string{"10.0.0.3,10.0.0.2"}, "10.0.0.3"},
		{"10.0.0.1:5", []string{"1.1.1.1, unknown"}, "10.0.0.1"},
		{"10.0.0.1:5", []string{"1.1.1.1, nonsense, 10.0.0.2"}, "10.0.0.2"},
		{"10.0.0.1:5", []string{""}, "10.0.0.1"},
		{"10.0.0.1:5", []string{"1.1.1.1:99"}, "1.1.1.1"},
		{"10.0.0.1:5", []string{"[2001:db8::1]:99"}, "2001:db8::1"},
		{"10.0.0.1:5", []string{"[2001:db8::1]"}, "2001:db8::1"},
		{"10.0.0.1:5", []string{"::ffff:1.1.1.1"}, "1.1.1.1"},
		{"[::ffff:10.0.0.1]:5", []string{"1.1.1.1"}, "1.1.1.1"},
		{"[fd00::1%eth0]:5", []string{"1.1.1.1"}, "1.1.1.1"},
		{"10.0.0.1:5", []string{"1.1.1.1," + strings.Repeat("10.0.0.2,", 1000) + "10.0.0.2"}, "10.0.0.2"},
		{"@", []string{"1.1.1.1"}, "invalid IP"},
	} {
		r := &http.Request{RemoteAddr: c.remote, Header: http.Header{"X-Forwarded-For": c.xff}}
		if got := cfg.ClientIP(r).String(); got != c.want {
			t.Errorf("%s %q: %s, want %s", c.remote, c.xff, got, c.want)
		}
	}
}

func FuzzClientIP(f *testing.F) {
	f.Add("1.1.1.1, 10.0.0.2", "[::1]:80")
	f.Add(",,,", "")
	cfg := Config{TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	f.Fuzz(func(t *testing.T, a, b string) {
		xff := []string{a, b}
		r := &http.Request{RemoteAddr: "10.0.0.1:1", Header: http.Header{"X-Forwarded-For": xff}}
		got := cfg.ClientIP(r)
		if !got.IsValid() || got.Zone() != "" || got.Is4In6() {
			t.Fatalf("%q: %v", xff, got)
		}
		r.RemoteAddr = "192.0.2.1:1"
		if got := cfg.ClientIP(r); got != netip.MustParseAddr("192.0.2.1") {
			t.Fatalf("an untrusted peer chose its address: %v", got)
		}
	})
}

func writeCert(t *testing.T, dir, name string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	pk, _ := x509.MarshalPKCS8PrivateKey(key)
	for file, block := range map[string]*pem.Block{"cert.pem": {Type: "CERTIFICATE", Bytes: der}, "key.pem": {Type: "PRIVATE KEY", Bytes: pk}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cert, _ := x509.ParseCertificate(der)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return pool
}

func TestTLSWithReloadedFiles(t *testing.T) {
	dir := t.TempDir()
	roots := writeCert(t, dir, "one.test")
	cfg := Config{TLSCert: filepath.Join(dir, "cert.pem"), TLSKey: filepath.Join(dir, "key.pem")}
	addr, srv := start(t, cfg, reply(1000))
	for proto, h2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		tr := &http.Transport{ForceAttemptHTTP2: h2, TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "one.test"}}
		req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://"+addr, strings.NewReader("hello"))
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.Proto != proto || string(body) != "hello" {
			t.Errorf("%s %q, want %s", resp.Proto, body, proto)
		}
		tr.CloseIdleConnections()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := Drain(ctx, srv); err != nil {
		t.Error(err)
	}

	files := &certFiles{cert: cfg.TLSCert, key: cfg.TLSKey, cfg: cfg.withDefaults()}
	now := time.Now()
	if err := files.load(now); err != nil {
		t.Fatal(err)
	}
	name := func() string {
		c, err := files.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		return c.Leaf.DNSNames[0]
	}
	writeCert(t, dir, "another.test")
	if got := name(); got != "one.test" {
		t.Errorf("looked at the files again at once: %s", got)
	}
	files.checked = now.Add(-time.Hour)
	if got := name(); got != "another.test" {
		t.Errorf("after a change: %s", got)
	}
	if err := os.Remove(cfg.TLSKey); err != nil {
		t.Fatal(err)
	}
	files.checked = now.Add(-time.Hour)
	if got := name(); got != "another.test" {
		t.Errorf("with a file missing: %s", got)
	}
	cfg.Listen = "127.0.0.1:0"
	if _, err := Listen(t.Context(), cfg); err == nil {
		t.Error("listens without its key")
	}
}

// TestPlainTextToTLS: strangers' mistakes are answered and do not reach the handler.
func TestPlainTextToTLS(t *testing.T) {
	dir := t.TempDir()
	writeCert(t, dir, "one.test")
	addr, _ := start(t, Config{TLSCert: filepath.Join(dir, "cert.pem"), TLSKey: filepath.Join(dir, "key.pem"), ReadHeaderTimeout: time.Second}, reply(10))
	for raw, want := range map[string][]int{"GET / HTTP/1.1\r\nHost: h\r\n\r\n": {400}, "": nil, "\x16\x03\x01": nil} {
		c := dial(t, addr)
		_, _ = io.WriteString(c, raw)
		if got := answers(c); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", raw, got, want)
		}
	}
}
