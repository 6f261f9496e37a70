package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	caFile       = "ca.pem"
	caKeyFile    = "ca-key.pem"
	nodeFile     = "node.pem"
	nodeKeyFile  = "node-key.pem"
	gossipFile   = "gossip.keys"
	tokenFile    = "admin-token"
	nextPrefix   = "next-" // of the authority that is to follow
	gossipKeyLen = 32

	maxName      = 128
	maxCluster   = 63 // of a DNS label
	maxHosts     = 64 // in one certificate
	maxNodes     = 1024
	caValidity   = 10 * 365 * 24 * time.Hour
	nodeValidity = 2 * 365 * 24 * time.Hour
	backdate     = time.Hour // for nodes whose clocks are behind
)

// NodeCert says which node a certificate is for. Hosts are further DNS names and IP
// addresses that people reach it at; nodes themselves need none.
type NodeCert struct {
	Name  string
	Hosts []string
}

// Options are what Init makes. Zero validities are ten years for the authority, two for
// nodes.
type Options struct {
	ClusterName  string
	Nodes        []NodeCert
	CAValidFor   time.Duration
	NodeValidFor time.Duration
}

// Step says what was done and what the operator does next.
type Step struct {
	Done string
	Copy []string // files and folders to copy to the nodes, relative to the folder
	Next string
}

// Phase is a part of a rotation. All nodes must have the files of one before the next.
type Phase string

// The new is first trusted beside the old, then used, then trusted alone.
const (
	PhaseAdd  Phase = "add"
	PhaseUse  Phase = "use"
	PhaseDrop Phase = "drop"
)

// Init writes the folder of a new cluster into dir, which it makes if need be. It
// overwrites nothing: a file that is there already is an error before anything is written.
func Init(dir string, o Options) (Step, error) {
	if err := o.validate(); err != nil {
		return Step{}, err
	}
	paths := []string{caFile, caKeyFile, gossipFile, tokenFile}
	for _, n := range o.Nodes {
		paths = append(paths, n.Name)
	}
	for _, p := range paths {
		if _, err := os.Lstat(filepath.Join(dir, p)); !errors.Is(err, fs.ErrNotExist) {
			return Step{}, fmt.Errorf("%s is there already: choose another folder, or add a node to this one", filepath.Join(dir, p))
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return Step{}, fmt.Errorf("make the folder: %w", err)
	}
	a, err := newAuthority(o.ClusterName, or(o.CAValidFor, caValidity))
	if err != nil {
		return Step{}, err
	}
	key, err := a.keyPEM()
	if err != nil {
		return Step{}, err
	}
	files := []file{{caKeyFile, key}, {caFile, a.certPEM()}, {gossipFile, gossipKeysText([][]byte{random(gossipKeyLen)})}, {tokenFile, []byte("hgadm_" + base64.RawURLEncoding.EncodeToString(random(32)) + "\n")}}
	if err := writeAll(dir, files); err != nil {
		return Step{}, err
	}
	var copies []string
	for _, n := range o.Nodes {
		if err := a.issue(dir, n, or(o.NodeValidFor, nodeValidity)); err != nil {
			return Step{}, err
		}
		copies = append(copies, n.Name+"/")
	}
	return Step{
		Done: fmt.Sprintf("made the authority of cluster %s and %d certificates", o.ClusterName, len(o.Nodes)), Copy: copies,
		Next: "copy each folder to its node and give it as --cluster-tls; keep " + caKeyFile + " on no node",
	}, nil
}

func (o Options) validate() error {
	if err := checkName("cluster name", o.ClusterName, maxCluster); err != nil {
		return err
	}
	if strings.HasSuffix(o.ClusterName, ".") || strings.Contains(o.ClusterName, "..") {
		return fmt.Errorf("cluster name %q: it becomes part of a DNS name, no part of which may be empty", o.ClusterName)
	}
	if len(o.Nodes) == 0 || len(o.Nodes) > maxNodes {
		return fmt.Errorf("%d nodes: name 1 to %d", len(o.Nodes), maxNodes)
	}
	if o.CAValidFor < 0 || o.NodeValidFor < 0 {
		return errors.New("a validity must be positive")
	}
	seen := map[string]bool{}
	for _, n := range o.Nodes {
		if err := n.validate(); err != nil {
			return err
		}
		// On a file system that folds case the folders of A and a would be one.
		if fold := strings.ToLower(n.Name); seen[fold] {
			return fmt.Errorf("node %q is named twice", n.Name)
		} else {
			seen[fold] = true
		}
	}
	return nil
}

func (n NodeCert) validate() error {
	if err := checkName("node name", n.Name, maxName); err != nil {
		return err
	}
	if len(n.Hosts) > maxHosts {
		return fmt.Errorf("node %s has %d hosts: at most %d", n.Name, len(n.Hosts), maxHosts)
	}
	for _, reserved := range []string{caFile, caKeyFile, gossipFile, tokenFile, nextPrefix + caFile, nextPrefix + caKeyFile} {
		if strings.EqualFold(n.Name, reserved) {
			return fmt.Errorf("node name %q is the name of a file here: choose another", n.Name)
		}
	}
	for _, h := range n.Hosts {
		if h == "" || strings.ContainsAny(h, "/: ") && net.ParseIP(h) == nil {
			return fmt.Errorf("node %s: host %q is neither a DNS name nor an IP address", n.Name, h)
		}
	}
	return nil
}

func checkName(what, name string, most int) error {
	if name == "" || len(name) > most {
		return fmt.Errorf("%s %.40q: must have 1 to %d characters", what, name, most)
	}
	bad := func(c rune) bool {
		return !(c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || strings.ContainsRune("._-", c))
	}
	if strings.ContainsFunc(name, bad) || strings.HasPrefix(name, ".") {
		return fmt.Errorf("%s %q: only letters, digits, '.', '_' and '-' may stand in it, and '.' not first", what, name)
	}
	return nil
}

// AddNode makes the folder of a further node.
func AddNode(dir string, n NodeCert) (Step, error) {
	if err := n.validate(); err != nil {
		return Step{}, err
	}
	if _, err := os.Lstat(filepath.Join(dir, n.Name)); !errors.Is(err, fs.ErrNotExist) {
		return Step{}, fmt.Errorf("%s is there already: renew it instead", filepath.Join(dir, n.Name))
	}
	a, err := loadAuthority(dir, "")
	if err != nil {
		return Step{}, err
	}
	if err := a.issue(dir, n, nodeValidity); err != nil {
		return Step{}, err
	}
	return Step{
		Done: "made a certificate for node " + n.Name, Copy: []string{n.Name + "/"},
		Next: "copy the folder to the node and give it as --cluster-tls",
	}, nil
}

// RenewNode gives a node a new key and certificate with the hosts it has. The node takes
// them up without a restart.
func RenewNode(dir, name string) (Step, error) {
	a, err := loadAuthority(dir, "")
	if err != nil {
		return Step{}, err
	}
	n, err := currentNode(dir, name)
	if err != nil {
		return Step{}, err
	}
	if err := a.issue(dir, n, nodeValidity); err != nil {
		return Step{}, err
	}
	return Step{
		Done: "renewed the certificate of node " + name, Copy: []string{name + "/" + nodeKeyFile, name + "/" + nodeFile},
		Next: "copy both files into the node's --cluster-tls; it reads them by itself",
	}, nil
}

// RotateCA replaces the authority in three phases. Add: all trust the new one, too. Use: all
// certificates are made anew by it. Drop: nobody trusts the old any more.
func RotateCA(dir string, phase Phase) (Step, error) {
	switch phase {
	case PhaseAdd:
		return addCA(dir)
	case PhaseUse:
		return useCA(dir)
	case PhaseDrop:
		return dropCA(dir)
	}
	return Step{}, fmt.Errorf("phase %q: must be add, use or drop", phase)
}

func addCA(dir string) (Step, error) {
	old, err := loadAuthority(dir, "")
	if err != nil {
		return Step{}, err
	}
	if _, err := os.Lstat(filepath.Join(dir, nextPrefix+caFile)); err == nil {
		return Step{}, fmt.Errorf("a rotation of the authority is under way: go on with phase %s", PhaseUse)
	}
	if old.bundled() > 1 {
		return Step{}, fmt.Errorf("%s holds the authority before the last rotation: finish that with phase %s", filepath.Join(dir, caFile), PhaseDrop)
	}
	next, err := newAuthority(old.cluster, caValidity)
	if err != nil {
		return Step{}, err
	}
	key, err := next.keyPEM()
	if err != nil {
		return Step{}, err
	}
	both := slices.Concat(old.certPEM(), next.certPEM())
	if err := writeAll(dir, []file{{nextPrefix + caKeyFile, key}, {nextPrefix + caFile, next.certPEM()}, {caFile, both}}); err != nil {
		return Step{}, err
	}
	copies, err := toNodes(dir, caFile, both)
	return Step{Done: "made the next authority; nodes will trust both", Copy: copies, Next: "copy each file to its node; once all have it, run phase use"}, err
}

func useCA(dir string) (Step, error) {
	next, err := loadAuthority(dir, nextPrefix)
	if errors.Is(err, fs.ErrNotExist) {
		return Step{}, fmt.Errorf("no rotation of the authority is under way: begin with phase %s", PhaseAdd)
	} else if err != nil {
		return Step{}, err
	}
	bundle, err := os.ReadFile(filepath.Join(dir, caFile))
	if err != nil {
		return Step{}, err
	}
	// Its own certificate first: that is how the authority in charge is told.
	next.pem = slices.Concat(next.certPEM(), without(bundle, next.cert))
	names, err := nodeNames(dir)
	if err != nil {
		return Step{}, err
	}
	var copies []string
	for _, name := range names {
		n, err := currentNode(dir, name)
		if err != nil {
			return Step{}, err
		}
		if err := next.issue(dir, n, nodeValidity); err != nil {
			return Step{}, err
		}
		copies = append(copies, name+"/"+nodeKeyFile, name+"/"+nodeFile)
	}
	key, err := next.keyPEM()
	if err != nil {
		return Step{}, err
	}
	if err := writeAll(dir, []file{{caKeyFile, key}, {caFile, next.pem}}); err != nil {
		return Step{}, err
	}
	for _, name := range []string{nextPrefix + caKeyFile, nextPrefix + caFile} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			return Step{}, err
		}
	}
	return Step{Done: "made all certificates anew", Copy: copies, Next: "copy them to their nodes; once all have theirs, run phase drop"}, nil
}

func dropCA(dir string) (Step, error) {
	a, err := loadAuthority(dir, "")
	if err != nil {
		return Step{}, err
	}
	if _, err := os.Lstat(filepath.Join(dir, nextPrefix+caFile)); err == nil {
		return Step{}, fmt.Errorf("the next authority is not in use yet: run phase %s first", PhaseUse)
	}
	if a.bundled() < 2 {
		return Step{}, errors.New("only one authority is trusted: there is none to drop")
	}
	if err := writeAll(dir, []file{{caFile, a.certPEM()}}); err != nil {
		return Step{}, err
	}
	copies, err := toNodes(dir, caFile, a.certPEM())
	return Step{Done: "the authority before is no longer trusted", Copy: copies, Next: "copy each file to its node"}, err
}

// RotateGossipKey replaces the gossip key in three phases. Add: all can read the new one.
// Use: all write with it. Drop: nobody reads the old any more.
func RotateGossipKey(dir string, phase Phase) (Step, error) {
	keys, err := readGossipKeys(filepath.Join(dir, gossipFile))
	if err != nil {
		return Step{}, err
	}
	var step Step
	switch phase {
	case PhaseAdd:
		if len(keys) > 1 {
			return Step{}, fmt.Errorf("%s holds %d keys: a rotation is under way, go on with phase use or drop", gossipFile, len(keys))
		}
		keys = append(keys, random(gossipKeyLen))
		step = Step{Done: "made the next gossip key; nodes will read both", Next: "copy each file to its node; once all have it, run phase use"}
	case PhaseUse:
		if len(keys) != 2 {
			return Step{}, fmt.Errorf("%s holds %d keys, not the old and the new: begin with phase add", gossipFile, len(keys))
		}
		keys[0], keys[1] = keys[1], keys[0]
		step = Step{Done: "nodes will write with the new gossip key (running this phase again goes back)", Next: "copy each file to its node; once all have it, run phase drop"}
	case PhaseDrop:
		if len(keys) < 2 {
			return Step{}, fmt.Errorf("%s holds one key: there is none to drop", gossipFile)
		}
		keys = keys[:1]
		step = Step{Done: "the gossip key before is no longer read", Next: "copy each file to its node"}
	default:
		return Step{}, fmt.Errorf("phase %q: must be add, use or drop", phase)
	}
	text := gossipKeysText(keys)
	if err := writeAll(dir, []file{{gossipFile, text}}); err != nil {
		return Step{}, err
	}
	step.Copy, err = toNodes(dir, gossipFile, text)
	return step, err
}

// authority signs. pem is ca.pem as nodes get it, the authority's own certificate first,
// save in phase add, when the one still in charge stands first.
type authority struct {
	cluster string
	cert    *x509.Certificate
	key     *ecdsa.PrivateKey
	pem     []byte
}

func newAuthority(cluster string, validFor time.Duration) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the authority's key: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "Headgate CA of " + cluster, Organization: []string{cluster}},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(validFor), IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, URIs: []*url.URL{{Scheme: "headgate", Host: cluster, Path: "/ca"}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("make the authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make the authority: %w", err)
	}
	a := &authority{cluster: cluster, cert: cert, key: key}
	a.pem = a.certPEM()
	return a, nil
}

func loadAuthority(dir, prefix string) (*authority, error) {
	certs, bundle, err := readCerts(filepath.Join(dir, prefix+caFile))
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, prefix+caKeyFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the authority's key (only the folder that init wrote holds it): %w", err)
	}
	key, err := parseKey(path, b)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(certs, func(c *x509.Certificate) bool { return key.PublicKey.Equal(c.PublicKey) })
	if i < 0 {
		return nil, fmt.Errorf("%s fits no certificate in %s: restore both from the same backup", path, prefix+caFile)
	}
	cluster, kind, _ := identity(certs[i])
	if kind != "ca" {
		return nil, fmt.Errorf("%s is no authority that headgate init made", prefix+caFile)
	}
	return &authority{cluster: cluster, cert: certs[i], key: key, pem: bundle}, nil
}

func (a *authority) certPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

func (a *authority) keyPEM() ([]byte, error) { return keyPEM(a.key) }

func (a *authority) bundled() (n int) {
	for rest := a.pem; ; n++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return n
		}
	}
}

// issue writes a node's folder: a new key and certificate, and what all nodes share.
func (a *authority) issue(dir string, n NodeCert, validFor time.Duration) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make the key of node %s: %w", n.Name, err)
	}
	now := time.Now()
	// What outlives its authority would fail on the day that nobody expects.
	until := now.Add(validFor)
	if until.After(a.cert.NotAfter) {
		until = a.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: n.Name, Organization: []string{a.cluster}},
		NotBefore: now.Add(-backdate), NotAfter: until, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames: []string{serverName(a.cluster), n.Name, "localhost"},
		URIs:     []*url.URL{{Scheme: "headgate", Host: a.cluster, Path: "/node/" + n.Name}},
	}
	for _, h := range n.Hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if !slices.Contains(template.DNSNames, h) {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return fmt.Errorf("sign the certificate of node %s: %w", n.Name, err)
	}
	keyText, err := keyPEM(key)
	if err != nil {
		return err
	}
	files := []file{{nodeKeyFile, keyText}, {nodeFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}, {caFile, a.pem}}
	for _, shared := range []string{gossipFile, tokenFile} {
		b, err := os.ReadFile(filepath.Join(dir, shared))
		if err != nil {
			return fmt.Errorf("make the folder of node %s: %w", n.Name, err)
		}
		files = append(files, file{shared, b})
	}
	folder := filepath.Join(dir, n.Name)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fmt.Errorf("make the folder of node %s: %w", n.Name, err)
	}
	return writeAll(folder, files)
}

// currentNode reads from a node's certificate whom it is for.
func currentNode(dir, name string) (NodeCert, error) {
	if err := checkName("node name", name, maxName); err != nil {
		return NodeCert{}, err
	}
	certs, _, err := readCerts(filepath.Join(dir, name, nodeFile))
	if err != nil {
		return NodeCert{}, err
	}
	n := NodeCert{Name: name}
	cluster, _, _ := identity(certs[0])
	for _, h := range certs[0].DNSNames {
		if h != serverName(cluster) && h != name && h != "localhost" {
			n.Hosts = append(n.Hosts, h)
		}
	}
	for _, ip := range certs[0].IPAddresses {
		n.Hosts = append(n.Hosts, ip.String())
	}
	return n, nil
}

func nodeNames(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join(dir, e.Name(), nodeFile)); e.IsDir() && err == nil {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// toNodes writes a shared file into every node's folder and names the copies.
func toNodes(dir, name string, b []byte) (copies []string, err error) {
	names, err := nodeNames(dir)
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		if err := writeAll(filepath.Join(dir, n), []file{{name, b}}); err != nil {
			return nil, err
		}
		copies = append(copies, n+"/"+name)
	}
	return copies, nil
}

// without is a bundle less one certificate.
func without(bundle []byte, cert *x509.Certificate) (rest []byte) {
	for {
		var block *pem.Block
		if block, bundle = pem.Decode(bundle); block == nil {
			return rest
		}
		if string(block.Bytes) != string(cert.Raw) {
			rest = append(rest, pem.EncodeToMemory(block)...)
		}
	}
}

type file struct {
	name string
	b    []byte
}

// writeAll replaces files one by one, each whole or not at all, readable by the owner only.
func writeAll(dir string, files []file) error {
	for _, f := range files {
		path := filepath.Join(dir, f.name)
		tmp := filepath.Join(dir, "."+f.name+".new")
		if err := os.WriteFile(tmp, f.b, 0o600); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
		if err := os.Rename(tmp, path); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	}
	return nil
}

func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func gossipKeysText(keys [][]byte) (b []byte) {
	for _, k := range keys {
		b = append(append(b, base64.StdEncoding.EncodeToString(k)...), '\n')
	}
	return b
}

// random never fails: crypto/rand ends the process instead.
func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return b
}

func serial() *big.Int {
	b := random(16)
	b[0] &= 0x7f
	return new(big.Int).SetBytes(b)
}

func or(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}
