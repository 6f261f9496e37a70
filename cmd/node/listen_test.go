package node

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"headgate/cluster/pki"
)

// TestTheNodesCertificateServesOperators: beyond loopback the admin API shows the node's certificate and
// asks for none.
func TestTheNodesCertificateServesOperators(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	if _, err := pki.Init(dir, pki.Options{ClusterName: "west", Nodes: []pki.NodeCert{{Name: "gw-1", Hosts: []string{"127.0.0.1"}}}}); err != nil {
		t.Fatal(err)
	}
	bundle, err := pki.Load(filepath.Join(dir, "gw-1"))
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{cfg: Config{AdminListen: "0.0.0.0:0"}, log: slog.New(slog.DiscardHandler), tls: bundle}
	l, err := n.listenAdmin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") })}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	defer func() { _ = s.Close(); <-served }()

	authority, err := os.ReadFile(filepath.Join(dir, "gw-1", "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}, DisableKeepAlives: true}}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+net.JoinHostPort("127.0.0.1", port), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatalf("an operator without a certificate: %v", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if text, err := io.ReadAll(resp.Body); err != nil || string(text) != "here" {
		t.Errorf("%q, %v", text, err)
	}
}
