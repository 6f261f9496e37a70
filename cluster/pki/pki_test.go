package pki

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func initialized(t *testing.T, o Options) string {
	t.Helper()
	if o.ClusterName == "" {
		o.ClusterName = "prod"
	}
	if o.Nodes == nil {
		o.Nodes = []NodeCert{{Name: "a", Hosts: []string{"10.0.0.1", "a.example"}}, {Name: "b"}}
	}
	dir := filepath.Join(t.TempDir(), "pki")
	if _, err := Init(dir, o); err != nil {
		t.Fatal(err)
	}
	return dir
}

func loadNode(t *testing.T, dir, name string) *Bundle {
	t.Helper()
	b, err := Load(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// meet has client and server shake hands and exchange a byte each way: in TLS 1.3 a client
// learns of a refusal only then.
func meet(t *testing.T, client, server *tls.Config) (seenByServer tls.ConnectionState, clientErr, serverErr error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var done sync.WaitGroup
	done.Go(func() {
		raw, err := listener.Accept()
		if err != nil {
			serverErr = err
			return
		}
		conn := tls.Server(raw, server)
		defer conn.Close()
		if serverErr = conn.HandshakeContext(t.Context()); serverErr != nil {
			return
		}
		seenByServer = conn.ConnectionState()
		if _, serverErr = conn.Write([]byte{1}); serverErr == nil {
			_, serverErr = io.ReadFull(conn, make([]byte, 1))
		}
	})
	raw, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn := tls.Client(raw, client)
	if clientErr = conn.HandshakeContext(t.Context()); clientErr == nil {
		if _, clientErr = io.ReadFull(conn, make([]byte, 1)); clientErr == nil {
			_, clientErr = conn.Write([]byte{1})
		}
	}
	_ = conn.Close()
	done.Wait()
	return seenByServer, clientErr, serverErr
}

func mustMeet(t *testing.T, a, b *Bundle) {
	t.Helper()
	seen, clientErr, serverErr := meet(t, a.ClientTLS(), b.ServerTLS())
	if clientErr != nil || serverErr != nil {
		t.Fatalf("%s and %s: %v, %v", a.NodeName(), b.NodeName(), clientErr, serverErr)
	}
	if name := PeerName(seen); name != a.NodeName() {
		t.Errorf("the server sees %q, not %q", name, a.NodeName())
	}
}

func TestNodesTrustEachOther(t *testing.T) {
	dir := initialized(t, Options{})
	a, b := loadNode(t, dir, "a"), loadNode(t, dir, "b")
	mustMeet(t, a, b)
	mustMeet(t, b, a)
	if a.ClusterName() != "prod" || a.NodeName() != "a" {
		t.Errorf("a is %s of %s", a.NodeName(), a.ClusterName())
	}
	if len(a.GossipKeys()) != 1 || !bytes.Equal(a.GossipKeys()[0], b.GossipKeys()[0]) || a.AdminToken() == "" || a.AdminToken() != b.AdminToken() {
		t.Error("gossip keys or admin tokens differ")
	}
	if left := time.Until(a.NotAfter()); left < nodeValidity-time.Hour || left > nodeValidity {
		t.Errorf("valid for %v", left)
	}
	for _, host := range []string{"node.prod.headgate", "a", "localhost", "a.example", "10.0.0.1"} {
		if err := a.now.Load().cert.Leaf.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if info, err := d.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestStrangersAreRefused(t *testing.T) {
	home := initialized(t, Options{})
	a := loadNode(t, home, "a")
	foreign := loadNode(t, initialized(t, Options{}), "b") // another authority, the same cluster name
	careless := func(c *tls.Config) *tls.Config {          // checks nothing itself
		c.VerifyConnection = nil
		return c
	}
	_, clientErr, serverErr := meet(t, careless(foreign.ClientTLS()), a.ServerTLS())
	if serverErr == nil || !strings.Contains(serverErr.Error(), "node b of cluster prod") || clientErr == nil {
		t.Errorf("a foreign authority: client %v, server %v", clientErr, serverErr)
	}
	_, clientErr, _ = meet(t, a.ClientTLS(), foreign.ServerTLS())
	if clientErr == nil || !strings.Contains(clientErr.Error(), "unknown authority") {
		t.Errorf("a foreign authority's server: %v", clientErr)
	}

	// The same authority for another cluster.
	authority, err := loadAuthority(home, "")
	if err != nil {
		t.Fatal(err)
	}
	authority.cluster = "test"
	if err := authority.issue(home, NodeCert{Name: "c"}, time.Hour); err != nil {
		t.Fatal(err)
	}
	c := loadNode(t, home, "c")
	_, _, serverErr = meet(t, careless(c.ClientTLS()), a.ServerTLS())
	if serverErr == nil || !strings.Contains(serverErr.Error(), "this node is of cluster prod") {
		t.Errorf("another cluster: %v", serverErr)
	}
	_, clientErr, _ = meet(t, c.ClientTLS(), a.ServerTLS())
	if clientErr == nil {
		t.Error("it took our server for its own")
	}

	// No certificate at all.
	_, _, serverErr = meet(t, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}, a.ServerTLS())
	if serverErr == nil {
		t.Error("a client without a certificate was let in")
	}
	// An older TLS.
	old := a.ClientTLS()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, _, serverErr = meet(t, old, a.ServerTLS()); serverErr == nil {
		t.Error("TLS 1.2 was let in")
	}
}

func TestLoadSaysWhatIsWrong(t *testing.T) {
	good := initialized(t, Options{})
	other := initialized(t, Options{})
	read := func(dir, name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, c := range []struct {
		name, file string
		content    []byte // nil: no file
		said       []string
	}{
		{"no ca", caFile, nil, []string{caFile, "headgate init"}},
		{"no key", nodeKeyFile, nil, []string{nodeKeyFile, "headgate init"}},
		{"no gossip key", gossipFile, nil, []string{gossipFile}},
		{"foreign ca", caFile, read(other, caFile), []string{nodeFile, caFile, "vouches"}},
		{"foreign key", nodeKeyFile, read(other, "a/"+nodeKeyFile), []string{nodeKeyFile, "does not fit"}},
		{"garbage", nodeFile, []byte("x"), []string{nodeFile, "no certificate"}},
		{"garbage key", nodeKeyFile, []byte("x"), []string{nodeKeyFile, "no private key"}},
		{"key where a certificate belongs", nodeFile, read(good, "a/"+nodeKeyFile), []string{"PRIVATE KEY"}},
		{"ca as node", nodeFile, read(good, caFile), []string{"no node's certificate"}},
		{"short gossip key", gossipFile, []byte("AAAA\n"), []string{gossipFile, "line 1"}},
		{"no gossip keys", gossipFile, []byte("\n"), []string{gossipFile, "0 keys"}},
		{"gossip key twice", gossipFile, bytes.Repeat(read(good, gossipFile), 2), []string{"line 2"}},
	} {
		dir := t.TempDir()
		for _, name := range []string{caFile, nodeFile, nodeKeyFile, gossipFile, tokenFile} {
			content := read(good, "a/"+name)
			if name == c.file {
				content = c.content
			}
			if content == nil {
				continue
			}
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_, err := Load(dir)
		if err == nil {
			t.Errorf("%s: loaded", c.name)
			continue
		}
		for _, part := range c.said {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q does not say %q", c.name, err, part)
			}
		}
		if strings.Contains(err.Error(), strings.TrimSpace(string(read(good, gossipFile)))) {
			t.Errorf("%s: a secret in %q", c.name, err)
		}
	}
}

func TestValidityIsChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := initialized(t, Options{NodeValidFor: 24 * time.Hour})
		loadNode(t, dir, "a")
		time.Sleep(24*time.Hour + time.Second)
		if _, err := Load(filepath.Join(dir, "a")); err == nil || !strings.Contains(err.Error(), "expired") || !strings.Contains(err.Error(), "renew") {
			t.Errorf("expired: %v", err)
		}
		if _, err := RenewNode(dir, "a"); err != nil {
			t.Fatal(err)
		}
		loadNode(t, dir, "a")
	})
	// The bubble's clock begins in 2000; this folder is made outside it, in its future.
	dir := initialized(t, Options{})
	synctest.Test(t, func(t *testing.T) {
		if _, err := Load(filepath.Join(dir, "a")); err == nil || !strings.Contains(err.Error(), "clock") {
			t.Errorf("not yet valid: %v", err)
		}
	})
}

func TestExpiredPeerIsRefused(t *testing.T) {
	dir := initialized(t, Options{})
	authority, err := loadAuthority(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	a, b := loadNode(t, dir, "a"), loadNode(t, dir, "b")
	if err := authority.issue(dir, NodeCert{Name: "b"}, -time.Minute); err != nil {
		t.Fatal(err)
	}
	stale, err := tls.LoadX509KeyPair(filepath.Join(dir, "b", nodeFile), filepath.Join(dir, "b", nodeKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	client := b.ClientTLS()
	client.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &stale, nil }
	if _, _, err := meet(t, client, a.ServerTLS()); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("an expired certificate: %v", err)
	}
}

func TestInitOverwritesNothing(t *testing.T) {
	dir := initialized(t, Options{})
	before, err := os.ReadFile(filepath.Join(dir, caFile))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Init(dir, Options{ClusterName: "prod", Nodes: []NodeCert{{Name: "z"}}}); err == nil {
		t.Error("a second init went through")
	}
	if after, _ := os.ReadFile(filepath.Join(dir, caFile)); !bytes.Equal(before, after) {
		t.Error("it changed the authority")
	}
	if _, err := os.Stat(filepath.Join(dir, "z")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("it made a folder")
	}
	if _, err := AddNode(dir, NodeCert{Name: "a"}); err == nil {
		t.Error("a node was added twice")
	}
	step, err := AddNode(dir, NodeCert{Name: "c"})
	if err != nil || len(step.Copy) != 1 || step.Copy[0] != "c/" {
		t.Fatalf("%+v, %v", step, err)
	}
	mustMeet(t, loadNode(t, dir, "c"), loadNode(t, dir, "a"))
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{
		{ClusterName: "", Nodes: []NodeCert{{Name: "a"}}},
		{ClusterName: strings.Repeat("x", 64), Nodes: []NodeCert{{Name: "a"}}},
		{ClusterName: "a..b", Nodes: []NodeCert{{Name: "a"}}},
		{ClusterName: "p"},
		{ClusterName: "p", Nodes: []NodeCert{{Name: "../a"}}},
		{ClusterName: "p", Nodes: []NodeCert{{Name: ".."}}},
		{ClusterName: "p", Nodes: []NodeCert{{Name: "ca.pem"}}},
		{ClusterName: "p", Nodes: []NodeCert{{Name: "a"}, {Name: "A"}}},
		{ClusterName: "p", Nodes: []NodeCert{{Name: "a", Hosts: []string{"x:1"}}}},
		{ClusterName: "p", Nodes: []NodeCert{{Name: "a"}}, NodeValidFor: -1},
	} {
		dir := filepath.Join(t.TempDir(), "pki")
		if _, err := Init(dir, o); err == nil {
			t.Errorf("%+v was taken", o)
		}
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%+v left something", o)
		}
	}
}

// copyStep does what the operator is told to, to the nodes' own folders.
func copyStep(t *testing.T, from, to string, step Step) {
	t.Helper()
	for _, path := range step.Copy {
		b, err := os.ReadFile(filepath.Join(from, path))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, path), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRotationsBreakNoConnection goes through every rotation, one node's files after the
// other's; after each single copy both must meet, both ways.
func TestRotationsBreakNoConnection(t *testing.T) {
	dir := initialized(t, Options{})
	nodes := t.TempDir()
	if err := os.CopyFS(nodes, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	a, b := loadNode(t, nodes, "a"), loadNode(t, nodes, "b")
	firstCA, firstKey := a.now.Load().files[caFile], a.GossipKeys()[0]
	apply := func(step Step, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if step.Done == "" || step.Next == "" || len(step.Copy) == 0 {
			t.Errorf("a step that says too little: %+v", step)
		}
		for _, node := range []*Bundle{a, b} {
			mine := step
			mine.Copy = nil
			for _, path := range step.Copy {
				if strings.HasPrefix(path, node.NodeName()+"/") {
					mine.Copy = append(mine.Copy, path)
				}
			}
			copyStep(t, dir, nodes, mine)
			if _, err := node.Reload(); err != nil {
				t.Fatalf("after %q: %v", step.Done, err)
			}
			mustMeet(t, a, b)
			mustMeet(t, b, a)
			common := false
			for _, k := range b.GossipKeys() {
				common = common || bytes.Equal(k, a.GossipKeys()[0])
			}
			if !common {
				t.Errorf("after %q b does not know the key that a writes with", step.Done)
			}
		}
	}
	apply(RenewNode(dir, "a"))
	for _, phase := range []Phase{PhaseAdd, PhaseUse, PhaseDrop} {
		apply(RotateCA(dir, phase))
	}
	for _, phase := range []Phase{PhaseAdd, PhaseUse, PhaseDrop} {
		apply(RotateGossipKey(dir, phase))
	}
	if bytes.Contains(a.now.Load().files[caFile], firstCA) || bytes.Equal(a.GossipKeys()[0], firstKey) || len(a.GossipKeys()) != 1 {
		t.Error("the old authority or key is still there")
	}
	if hosts, err := currentNode(dir, "a"); err != nil || len(hosts.Hosts) != 2 {
		t.Errorf("a's hosts are now %v, %v", hosts.Hosts, err)
	}
	// And once more, from where that ended.
	for _, phase := range []Phase{PhaseAdd, PhaseUse, PhaseDrop} {
		apply(RotateCA(dir, phase))
	}
}

func TestPhasesOutOfOrderAreRefused(t *testing.T) {
	dir := initialized(t, Options{})
	for _, rotate := range []func(string, Phase) (Step, error){RotateCA, RotateGossipKey} {
		for _, phase := range []Phase{PhaseUse, PhaseDrop, "", "x"} {
			if _, err := rotate(dir, phase); err == nil {
				t.Errorf("phase %q went first", phase)
			}
		}
		if _, err := rotate(dir, PhaseAdd); err != nil {
			t.Fatal(err)
		}
		if _, err := rotate(dir, PhaseAdd); err == nil {
			t.Error("add went through twice")
		}
	}
	if _, err := RotateCA(dir, PhaseDrop); err == nil {
		t.Error("drop went before use")
	}
	if _, err := AddNode(dir, NodeCert{Name: "c"}); err != nil {
		t.Fatal(err)
	}
	mustMeet(t, loadNode(t, dir, "c"), loadNode(t, dir, "a"))
}

func TestHandshakesGoOnWhileFilesChange(t *testing.T) {
	dir := initialized(t, Options{})
	a, b := loadNode(t, dir, "a"), loadNode(t, dir, "b")
	stop, met := make(chan struct{}), make(chan struct{})
	var meeting sync.WaitGroup
	meeting.Go(func() {
		defer close(met)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, clientErr, serverErr := meet(t, a.ClientTLS(), b.ServerTLS()); clientErr != nil || serverErr != nil {
				t.Errorf("%v, %v", clientErr, serverErr)
				return
			}
			select {
			case met <- struct{}{}:
			default:
			}
		}
	})
	for _, phase := range []Phase{PhaseAdd, PhaseUse, PhaseDrop} {
		if _, err := RotateCA(dir, phase); err != nil {
			t.Fatal(err)
		}
		for _, node := range []*Bundle{b, a} {
			if changed, err := node.Reload(); err != nil || !changed {
				t.Errorf("%v, %v", changed, err)
			}
		}
		// An operator waits between the phases: no handshake of before the last one may be under way.
		for range 2 {
			<-met
		}
	}
	close(stop)
	meeting.Wait()
}

func TestWatchTakesUpGoodFilesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := initialized(t, Options{})
		a := loadNode(t, dir, "a")
		var logged bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		var done sync.WaitGroup
		changes := 0
		done.Go(func() { a.Watch(ctx, slog.New(slog.NewTextHandler(&logged, nil)), func() { changes++ }) })
		path := filepath.Join(dir, "a", nodeFile)
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		foreign, err := os.ReadFile(filepath.Join(dir, "b", nodeFile))
		if err != nil {
			t.Fatal(err)
		}
		before := a.NotAfter()
		for _, content := range [][]byte{nil, []byte("half a certif"), foreign} {
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * watchEvery)
			synctest.Wait()
			if !a.NotAfter().Equal(before) || changes != 0 {
				t.Errorf("%.20q was taken up", content)
			}
		}
		if n := strings.Count(logged.String(), "level=ERROR"); n != 2 { // twice it holds no certificate, then a foreign one
			t.Errorf("%d complaints:\n%s", n, &logged)
		}
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := RenewNode(dir, "a"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * watchEvery)
		synctest.Wait()
		if changes != 1 || a.NotAfter().Equal(before) {
			t.Errorf("the new certificate was taken up %d times", changes)
		}
		cancel()
		done.Wait()
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), []byte("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n"))
	f.Fuzz(func(t *testing.T, certs, keys []byte) {
		if c, err := parseCerts(certs); err == nil && len(c) == 0 {
			t.Error("no certificate and no error")
		}
		if k, err := parseGossipKeys(keys); err == nil && (len(k) == 0 || len(k[0]) != gossipKeyLen) {
			t.Errorf("%v and no error", k)
		}
		_, _ = parseKey("f", certs)
	})
}
