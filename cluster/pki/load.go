package pki

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	watchEvery    = 2 * time.Second
	maxFile       = 1 << 20
	maxGossipKeys = 8
)

// Bundle is what one node trusts and is trusted by. The TLS configurations it gives always
// use the newest files that it has taken up. It is safe for concurrent use.
type Bundle struct {
	dir           string
	cluster, name string
	now           atomic.Pointer[loaded]

	mu sync.Mutex // of Reload
}

// loaded are the files of one moment; never changed.
type loaded struct {
	files  map[string][]byte
	cert   *tls.Certificate
	roots  *x509.CertPool
	gossip [][]byte
	token  string
}

// Load reads a node's folder. Errors name the file and the remedy.
func Load(dir string) (*Bundle, error) {
	files, err := readFolder(dir)
	if err != nil {
		return nil, err
	}
	l, cluster, name, err := parse(dir, files)
	if err != nil {
		return nil, err
	}
	b := &Bundle{dir: dir, cluster: cluster, name: name}
	b.now.Store(l)
	return b, nil
}

// ClusterName is the cluster that the certificate is for.
func (b *Bundle) ClusterName() string { return b.cluster }

// NodeName is the node that the certificate is for.
func (b *Bundle) NodeName() string { return b.name }

// GossipKeys gives the keys of gossip, the first of which encrypts. They are not to be
// changed.
func (b *Bundle) GossipKeys() [][]byte { return slices.Clone(b.now.Load().gossip) }

// AdminToken is the token in the folder, "" if it holds none.
func (b *Bundle) AdminToken() string { return b.now.Load().token }

// NotAfter is when the node's certificate ends.
func (b *Bundle) NotAfter() time.Time { return b.now.Load().cert.Leaf.NotAfter }

// ServerTLS accepts nodes of this cluster, and nobody else.
func (b *Bundle) ServerTLS() *tls.Config {
	return &tls.Config{
		MinVersion:       tls.VersionTLS13,
		ClientAuth:       tls.RequireAnyClientCert, // VerifyConnection does what the standard check does, with the roots of now
		GetCertificate:   func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return b.now.Load().cert, nil },
		VerifyConnection: func(s tls.ConnectionState) error { return b.verify(s, x509.ExtKeyUsageClientAuth) },
		// A resumed session would outlive the authority that vouched for it.
		SessionTicketsDisabled: true,
	}
}

// ClientTLS connects to nodes of this cluster, and to nobody else, whatever their address.
func (b *Bundle) ClientTLS() *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		ServerName:           serverName(b.cluster),
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return b.now.Load().cert, nil },
		// Not insecure: VerifyConnection does the standard check, with the roots of now,
		// which RootCAs, read once, would not give.
		InsecureSkipVerify: true,
		VerifyConnection:   func(s tls.ConnectionState) error { return b.verify(s, x509.ExtKeyUsageServerAuth) },
	}
}

// verify is the check of both ends.
func (b *Bundle) verify(s tls.ConnectionState, usage x509.ExtKeyUsage) error {
	if len(s.PeerCertificates) == 0 {
		return errors.New("the other end showed no certificate")
	}
	leaf := s.PeerCertificates[0]
	cluster, kind, name := identity(leaf)
	who := "the certificate of " + leaf.Subject.CommonName
	if kind == "node" {
		who = fmt.Sprintf("the certificate of node %s of cluster %s", name, cluster)
	}
	if kind != "node" {
		return fmt.Errorf("%s is no node's", who)
	}
	between := x509.NewCertPool()
	for _, c := range s.PeerCertificates[1:] {
		between.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{Roots: b.now.Load().roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}})
	if err != nil {
		return fmt.Errorf("%s: %w", who, err)
	}
	if err := leaf.VerifyHostname(serverName(b.cluster)); err != nil || cluster != b.cluster {
		return fmt.Errorf("%s: this node is of cluster %s", who, b.cluster)
	}
	return nil
}

// PeerName is the node at the other end of a connection that a Bundle's configuration made;
// "" if it showed no node's certificate.
func PeerName(s tls.ConnectionState) string {
	if len(s.PeerCertificates) == 0 {
		return ""
	}
	_, kind, name := identity(s.PeerCertificates[0])
	if kind != "node" {
		return ""
	}
	return name
}

// Reload reads the files again and takes them up if they are good and differ; else the old
// ones stay in use. New connections use the new ones at once.
func (b *Bundle) Reload() (changed bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	files, err := readFolder(b.dir)
	if err != nil {
		return false, err
	}
	if maps.EqualFunc(b.now.Load().files, files, bytes.Equal) {
		return false, nil
	}
	l, cluster, name, err := parse(b.dir, files)
	if err != nil {
		return false, err
	}
	if cluster != b.cluster || name != b.name {
		return false, fmt.Errorf("%s is now for node %s of cluster %s, not %s of %s: copy this node's own folder", filepath.Join(b.dir, nodeFile), name, cluster, b.name, b.cluster)
	}
	b.now.Store(l)
	return true, nil
}

// Watch reloads every two seconds until ctx ends and calls onChange, if not nil, after new
// files were taken up. Files that are not good are logged once; while an operator copies
// them one by one they may not fit for a moment, so only what stays wrong is.
func (b *Bundle) Watch(ctx context.Context, logger *slog.Logger, onChange func()) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var wrong, said string
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		changed, err := b.Reload()
		switch {
		case err != nil:
			if text := err.Error(); text == wrong && text != said {
				said = text
				logger.Error("new certificates or keys are not good; the old ones stay in use", "error", text)
			}
			wrong = err.Error()
			continue
		case changed:
			logger.Info("took up new certificates and keys", "not_after", b.NotAfter(), "gossip_keys", len(b.now.Load().gossip))
			if onChange != nil {
				onChange()
			}
		}
		wrong, said = "", ""
	}
}

func serverName(cluster string) string { return "node." + cluster + ".headgate" }

// identity reads whom a certificate is for: kind is node, ca, or "" for a foreign one.
func identity(c *x509.Certificate) (cluster, kind, name string) {
	for _, u := range c.URIs {
		if u.Scheme != "headgate" {
			continue
		}
		if u.Path == "/ca" {
			return u.Host, "ca", ""
		}
		if name, ok := strings.CutPrefix(u.Path, "/node/"); ok && name != "" {
			return u.Host, "node", name
		}
	}
	return "", "", ""
}

// readFolder reads all files of a node; the admin token may be missing.
func readFolder(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, name := range []string{caFile, nodeFile, nodeKeyFile, gossipFile, tokenFile} {
		path := filepath.Join(dir, name)
		b, err := readBounded(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) && name == tokenFile:
			continue
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("%w: copy the node's whole folder from where `headgate init` wrote it", err)
		case err != nil:
			return nil, err
		}
		files[name] = b
	}
	return files, nil
}

func readBounded(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxFile {
		return nil, fmt.Errorf("%s has %d bytes: more than a file of certificates or keys", path, info.Size())
	}
	return os.ReadFile(path)
}

// parse checks that the files are good by themselves and fit each other.
func parse(dir string, files map[string][]byte) (l *loaded, cluster, name string, err error) {
	fail := func(file, format string, args ...any) (*loaded, string, string, error) {
		return nil, "", "", fmt.Errorf("%s: "+format, append([]any{filepath.Join(dir, file)}, args...)...)
	}
	l = &loaded{files: files, roots: x509.NewCertPool(), token: strings.TrimSpace(string(files[tokenFile]))}
	cas, err := parseCerts(files[caFile])
	if err != nil {
		return fail(caFile, "%w: copy it anew from where `headgate init` wrote it", err)
	}
	for _, c := range cas {
		l.roots.AddCert(c)
	}
	chain, err := parseCerts(files[nodeFile])
	if err != nil {
		return fail(nodeFile, "%w: copy it anew from where `headgate init` wrote it", err)
	}
	leaf := chain[0]
	cluster, kind, name := identity(leaf)
	if kind != "node" {
		return fail(nodeFile, "is no node's certificate: it was not made by `headgate init`")
	}
	key, err := parseKey(filepath.Join(dir, nodeKeyFile), files[nodeKeyFile])
	if err != nil {
		return nil, "", "", err
	}
	if !key.PublicKey.Equal(leaf.PublicKey) {
		return fail(nodeKeyFile, "does not fit %s: copy both from the same folder", nodeFile)
	}
	if err := valid(leaf, time.Now()); err != nil {
		return fail(nodeFile, "%w", err)
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: l.roots, Intermediates: between, DNSName: serverName(cluster), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return fail(nodeFile, "no authority in %s vouches for it: copy both from the same folder (%w)", caFile, err)
	}
	l.cert = &tls.Certificate{PrivateKey: key, Leaf: leaf}
	for _, c := range chain {
		l.cert.Certificate = append(l.cert.Certificate, c.Raw)
	}
	if l.gossip, err = parseGossipKeys(files[gossipFile]); err != nil {
		return fail(gossipFile, "%w", err)
	}
	return l, cluster, name, nil
}

func valid(c *x509.Certificate, now time.Time) error {
	switch {
	case now.After(c.NotAfter):
		return fmt.Errorf("expired on %s: renew it (`headgate init renew-node NODE`) and copy it here", c.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(c.NotBefore):
		return fmt.Errorf("is valid only from %s: check this machine's clock, which says %s", c.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return nil
}

func readCerts(path string) (certs []*x509.Certificate, text []byte, err error) {
	if text, err = readBounded(path); err != nil {
		return nil, nil, err
	}
	if certs, err = parseCerts(text); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return certs, text, nil
}

// parseCerts gives at least one certificate, or an error.
func parseCerts(text []byte) (certs []*x509.Certificate, err error) {
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("holds a %s where a certificate belongs", block.Type)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("holds a broken certificate: %w", err)
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, errors.New("holds no certificate")
	}
	return certs, nil
}

func parseKey(path string, text []byte) (*ecdsa.PrivateKey, error) {
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, fmt.Errorf("%s: holds no private key: copy it anew from where `headgate init` wrote it", path)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: holds a broken private key: copy it anew from where `headgate init` wrote it", path)
	}
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s: holds a key of another kind than `headgate init` makes", path)
	}
	return ec, nil
}

func readGossipKeys(path string) ([][]byte, error) {
	text, err := readBounded(path)
	if err != nil {
		return nil, err
	}
	keys, err := parseGossipKeys(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return keys, nil
}

// parseGossipKeys never says what a line holds: it is a secret.
func parseGossipKeys(text []byte) (keys [][]byte, err error) {
	line := 0
	for s := range strings.Lines(string(text)) {
		line++
		if s = strings.TrimSpace(s); s == "" {
			continue
		}
		k, err := base64.StdEncoding.DecodeString(s)
		if err != nil || len(k) != gossipKeyLen {
			return nil, fmt.Errorf("line %d is not %d bytes in base64: copy the file anew from where `headgate init` wrote it", line, gossipKeyLen)
		}
		if slices.ContainsFunc(keys, func(other []byte) bool { return bytes.Equal(other, k) }) {
			return nil, fmt.Errorf("line %d repeats a key", line)
		}
		keys = append(keys, k)
	}
	if len(keys) == 0 || len(keys) > maxGossipKeys {
		return nil, fmt.Errorf("holds %d keys, not 1 to %d", len(keys), maxGossipKeys)
	}
	return keys, nil
}
