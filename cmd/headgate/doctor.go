package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/cluster/pki"
	"headgate/cmd/node"
)

// finding is one line of headgate doctor.
type finding struct {
	Verdict string `json:"verdict"` // ok | warn | fail
	What    string `json:"what"`
	Detail  string `json:"detail"`
}

// examination collects findings.
type examination struct{ found []finding }

func (e *examination) ok(what, format string, args ...any)   { e.add("ok", what, format, args) }
func (e *examination) warn(what, format string, args ...any) { e.add("warn", what, format, args) }
func (e *examination) fail(what, format string, args ...any) { e.add("fail", what, format, args) }
func (e *examination) add(verdict, what, format string, args []any) {
	e.found = append(e.found, finding{verdict, what, fmt.Sprintf(format, args...)})
}

func (e *examination) failed() (n int) {
	for _, f := range e.found {
		if f.Verdict == "fail" {
			n++
		}
	}
	return n
}

func doctorCommand() *cobra.Command {
	flags := node.Defaults()
	var file string
	var asJSON bool
	c := &cobra.Command{
		Use: "doctor", Short: "Check a node's configuration and its machine before a start", Args: exactly(0),
		Long: "Check what headgate serve would run into, with the flags that it would be given: configuration,\n" +
			"policy, ports, data folder, certificates, seeds and clock. A node that runs already holds its ports:\n" +
			"run this before the start. The exit code is 1 if anything fails; warnings do not count.",
		Example: "  headgate doctor --config /etc/headgate/headgate.yaml",
	}
	c.Flags().StringVar(&file, "config", "", "file with the node's configuration; flags and environment go over it")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	bindNode(c.Flags(), &flags)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := nodeConfig(c.Flags(), file)
		var e examination
		if err != nil {
			e.fail("configuration", "%v", err)
		} else {
			e.examine(c.Context(), cfg)
		}
		if err := e.print(c.OutOrStdout(), asJSON); err != nil {
			return err
		}
		if n := e.failed(); n > 0 {
			return fmt.Errorf("%d of %d checks failed", n, len(e.found))
		}
		return nil
	}
	return c
}

func (e *examination) print(w io.Writer, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(e.found)
	}
	return tabled(w, func(t io.Writer) {
		for _, f := range e.found {
			fmt.Fprintf(t, "%s\t%s\t%s\n", f.Verdict, f.What, f.Detail)
		}
	})
}

// examine runs every check; none stops those after it.
func (e *examination) examine(ctx context.Context, cfg node.Config) {
	if bundle := e.clusterTLS(cfg); bundle != nil && cfg.AdminToken == "" {
		cfg.AdminToken = bundle.AdminToken()
	}
	if err := cfg.Validate(); err != nil {
		e.fail("configuration", "%v", err)
	} else {
		e.ok("configuration", "valid")
	}
	e.policy(cfg)
	e.port(ctx, "listen", cfg.Listen, 0, "tcp")
	e.port(ctx, "admin_listen", cfg.AdminListen, 0, "tcp")
	e.clusterPorts(ctx, cfg.ClusterListen)
	e.folder(cfg.DataDir)
	e.keyPair("tls", cfg.TLSCert, cfg.TLSKey)
	e.keyPair("admin_tls", cfg.AdminTLSCert, cfg.AdminTLSKey)
	e.seeds(ctx, cfg.Join)
	e.clock(time.Now())
	e.files(cfg.MaxConns)
}

// policy checks the policy file; without one the ledger brings the policy.
func (e *examination) policy(cfg node.Config) {
	if cfg.Policy == "" {
		e.ok("policy", "no file: the node uses what the cluster has")
		return
	}
	text, err := os.ReadFile(cfg.Policy)
	if err != nil {
		e.fail("policy", "%v", err)
		return
	}
	p, err := readPolicy(text)
	if err != nil {
		e.fail("policy", "%s: %s", cfg.Policy, strings.ReplaceAll(err.Error(), "\n", "; "))
		return
	}
	if err := node.CheckBackends(text, p); err != nil {
		e.fail("policy", "%s: %s", cfg.Policy, strings.ReplaceAll(err.Error(), "\n", "; "))
		return
	}
	e.ok("policy", "%s: %d tenants, %d models", cfg.Policy, len(p.Tenants), len(p.Models))
	for _, b := range p.Backends {
		if b.APIKeyEnv != "" && os.Getenv(b.APIKeyEnv) == "" {
			e.warn("policy", "backend %s wants its key in %s, which is not set", b.Name, b.APIKeyEnv)
		}
	}
}

// readPolicy reads a policy as a node does that has no other.
func readPolicy(text []byte) (*ledger.Policy, error) {
	p, err := ledger.ParsePolicy(text)
	if err != nil {
		return nil, err
	}
	keys, err := ledger.KeysOf(p.Keys...)
	if err != nil {
		return nil, err
	}
	_, err = p.Index(time.Now(), 1, ledger.Share{}, keys)
	return p, err
}

// clusterPorts are three in a row: gossip (over TCP and UDP), gRPC, raft.
func (e *examination) clusterPorts(ctx context.Context, addr string) {
	for offset := range 3 {
		e.port(ctx, "cluster_listen", addr, offset, "tcp")
	}
	e.port(ctx, "cluster_listen", addr, 0, "udp")
}

// port tries to listen, and stops at once.
func (e *examination) port(ctx context.Context, what, addr string, offset int, network string) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return // the configuration's own check says so
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		e.fail(what, "%s: the port is not a number", addr)
		return
	}
	if n != 0 { // 0 is any
		addr = net.JoinHostPort(host, strconv.Itoa(n+offset))
	}
	var lc net.ListenConfig
	var c io.Closer
	if network == "udp" {
		c, err = lc.ListenPacket(ctx, network, addr)
	} else {
		c, err = lc.Listen(ctx, network, addr)
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		e.fail(what, "%s/%s is in use; stop what listens there, or choose another port", addr, network)
		return
	case err != nil:
		e.fail(what, "%v", err)
		return
	}
	if err := c.Close(); err != nil {
		e.warn(what, "%v", err)
		return
	}
	e.ok(what, "%s/%s is free", addr, network)
}

const (
	syncTries = 20
	syncSlow  = 20 * time.Millisecond // of one fsync; every change of the ledger waits for some
)

// folder writes into the data folder as the ledger does: a little, forced to the disk.
func (e *examination) folder(dir string) {
	if dir == "" {
		return // the configuration's own check says so
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		e.fail("data_dir", "%v", err)
		return
	}
	if info, err := os.Stat(dir); err == nil && info.Mode().Perm()&0o077 != 0 {
		e.warn("data_dir", "%s has mode %o: others may read it; chmod 700", dir, info.Mode().Perm())
	}
	f, err := os.CreateTemp(dir, ".doctor.*")
	if err != nil {
		e.fail("data_dir", "%v", err)
		return
	}
	defer func() { _ = os.Remove(f.Name()) }() // an empty file harms nobody
	defer func() { _ = f.Close() }()
	start := time.Now()
	for range syncTries {
		if _, err = f.Write(make([]byte, 256)); err == nil {
			err = f.Sync()
		}
		if err != nil {
			e.fail("data_dir", "write and fsync: %v", err)
			return
		}
	}
	each := (time.Since(start) / syncTries).Round(10 * time.Microsecond)
	if each > syncSlow {
		e.warn("data_dir", "%s: an fsync takes %s; changes will be slow and leaders may change", dir, each)
		return
	}
	e.ok("data_dir", "%s is writable; an fsync takes %s", dir, each)
}

// soon is when the end of a certificate is worth a warning.
const soon = 30 * 24 * time.Hour

// keyPair checks a certificate with its key; both empty is none.
func (e *examination) keyPair(what, certFile, keyFile string) {
	if certFile == "" || keyFile == "" {
		return
	}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		e.fail(what, "%v", err)
		return
	}
	e.certificate(what, certFile, pair.Leaf)
}

func (e *examination) certificate(what, file string, leaf *x509.Certificate) {
	left := time.Until(leaf.NotAfter)
	switch {
	case left <= 0:
		e.fail(what, "%s ended on %s", file, moment(leaf.NotAfter))
	case time.Now().Before(leaf.NotBefore):
		e.fail(what, "%s begins on %s: is the clock right?", file, moment(leaf.NotBefore))
	case left < soon:
		e.warn(what, "%s ends on %s", file, moment(leaf.NotAfter))
	default:
		e.ok(what, "%s is valid until %s", file, moment(leaf.NotAfter))
	}
}

// clock looks for one that is plainly wrong. Running nodes compare theirs with the others': one that is a
// minute off the median grants nothing of budgets and limits of hours while it leads the ledger, and lets another
// lead. Certificates, the audit log and calendar limits read them, too.
func (e *examination) clock(now time.Time) {
	const firstYear = 2026 // this program is not older
	synced, known := clockSynced()
	switch {
	case now.Year() < firstYear:
		e.fail("clock", "it says %s", moment(now))
	case known && !synced:
		e.warn("clock", "%s; the kernel knows of no time source", moment(now))
	default:
		e.ok("clock", "%s", moment(now))
	}
}

// filesBeside are descriptors that a node wants beside two a connection.
const filesBeside = 1024

func (e *examination) files(conns int) {
	if conns == 0 {
		conns = 10_000
	}
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		e.warn("open files", "%v", err)
		return
	}
	if want := uint64(2*conns + filesBeside); uint64(r.Max) < want { //nolint:unconvert // its type differs between systems
		e.warn("open files", "the limit is %d; %d connections may want %d (LimitNOFILE, ulimit -n)", r.Max, conns, want)
		return
	}
	e.ok("open files", "the limit is %d", r.Max)
}

// seeds tries to reach the nodes that are to be joined. It is no failure if none is there
// yet: nodes may start in any order.
func (e *examination) seeds(ctx context.Context, addrs []string) {
	const patience = 2 * time.Second
	for _, addr := range addrs {
		d := net.Dialer{Timeout: patience}
		c, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			e.warn("join", "%s does not answer: %v", addr, err)
			continue
		}
		_ = c.Close() // nothing was said
		e.ok("join", "%s answers", addr)
	}
}

// clusterTLS checks the folder that headgate init made for the node; nil if there is none
// that can be used.
func (e *examination) clusterTLS(cfg node.Config) *pki.Bundle {
	if cfg.ClusterTLS == "" {
		return nil
	}
	b, err := pki.Load(cfg.ClusterTLS)
	if err != nil {
		e.fail("cluster_tls", "%v", err)
		return nil
	}
	switch {
	case cfg.ClusterName != b.ClusterName() && cfg.ClusterName != node.Defaults().ClusterName:
		e.fail("cluster_tls", "%s is for cluster %s, not %s", cfg.ClusterTLS, b.ClusterName(), cfg.ClusterName)
	case cfg.NodeID != "" && b.NodeName() != cfg.NodeID:
		e.fail("cluster_tls", "%s is for node %s, not %s", cfg.ClusterTLS, b.NodeName(), cfg.NodeID)
	case time.Until(b.NotAfter()) < soon:
		e.warn("cluster_tls", "%s ends on %s: headgate init renew-node %s", cfg.ClusterTLS, moment(b.NotAfter()), b.NodeName())
	default:
		e.ok("cluster_tls", "%s is node %s of cluster %s, valid until %s", cfg.ClusterTLS, b.NodeName(), b.ClusterName(), moment(b.NotAfter()))
	}
	return b
}
