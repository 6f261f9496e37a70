package node

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/cluster/pki"
	"headgate/proxy/edge"
)

// Config is a node's own configuration: the file of --config, over which the flags and
// the environment go. What all nodes share stands in the policy instead.
type Config struct {
	Listen      string `yaml:"listen"`
	AdminListen string `yaml:"admin_listen"`
	NodeID      string `yaml:"node_id"`
	DataDir     string `yaml:"data_dir"`
	Policy      string `yaml:"policy"` // file; it seeds an empty ledger
	Dev         bool   `yaml:"dev"`
	Upstream    string `yaml:"upstream"` // with Dev and without a policy

	ClusterListen    string   `yaml:"cluster_listen"` // gossip; gRPC is the next port, raft the one after
	ClusterAdvertise string   `yaml:"cluster_advertise"`
	ClusterName      string   `yaml:"cluster_name"`
	ClusterTLS       string   `yaml:"cluster_tls"` // folder that headgate init made for the node
	Join             []string `yaml:"join"`
	BootstrapExpect  int      `yaml:"bootstrap_expect"` // 0: 1 without Join, else none
	Insecure         bool     `yaml:"insecure"`         // listen beyond loopback without TLS

	TLSCert        string   `yaml:"tls_cert"`
	TLSKey         string   `yaml:"tls_key"`
	AdminTLSCert   string   `yaml:"admin_tls_cert"` // "": with ClusterTLS the node's, beyond loopback
	AdminTLSKey    string   `yaml:"admin_tls_key"`
	TrustedProxies []string `yaml:"trusted_proxies"` // networks in CIDR form
	ProxyProtocol  bool     `yaml:"proxy_protocol"`

	MaxBody       map[string]int64 `yaml:"max_body"` // bytes by route name; "default" for the others
	MaxConns      int              `yaml:"max_conns"`
	MaxConnsPerIP int              `yaml:"max_conns_per_ip"`
	MaxBuckets    int              `yaml:"max_buckets"`
	DecisionLog   string           `yaml:"decision_log"` // file; "": none
	Prefilter     PrefilterConfig  `yaml:"prefilter"`

	CacheMaxBytes int64 `yaml:"cache_max_bytes"` // of memory for kept answers; 0: 256 MiB
	// SemanticMaxBytes is of memory for what serves other wordings; 0: 128 MiB.
	SemanticMaxBytes int64 `yaml:"semantic_max_bytes"`

	CapacityStatus int      `yaml:"capacity_status"` // what a refusal for want of capacity answers: 429, or 503
	BudgetStatus   int      `yaml:"budget_status"`   // what an exhausted budget answers: 429, or 402 for clients that retry every 429
	UsageRetention Duration `yaml:"usage_retention"` // of the usage log
	UsageMaxBytes  int64    `yaml:"usage_max_bytes"` // of the usage log; the oldest files go first
	UsageSync      bool     `yaml:"usage_sync"`      // no request goes on before its reservation is on the disk

	DrainTimeout Duration `yaml:"drain_timeout"` // how long streams may go on after a stop
	LogLevel     string   `yaml:"log_level"`     // debug | info | warn | error

	// Not in the file: secrets come from the environment.
	DevKey     string       `yaml:"-"`
	AdminToken string       `yaml:"-"`
	Version    string       `yaml:"-"`
	Logger     *slog.Logger `yaml:"-"`
	Out        io.Writer    `yaml:"-"` // where a fresh key is printed, once
}

// PrefilterConfig sets the rates of the pre-filter, for each address and key.
type PrefilterConfig struct {
	RequestsPerSecond int64 `yaml:"requests_per_second"`
	RequestBurst      int64 `yaml:"request_burst"`
	ErrorsPerMinute   int64 `yaml:"errors_per_minute"`
	ErrorBurst        int64 `yaml:"error_burst"`
}

// Duration is written as in the policy: 30s, 10m, 14d.
type Duration = ledger.Duration

// Defaults is the configuration of a node that was told nothing.
func Defaults() Config {
	return Config{
		Listen: "127.0.0.1:8080", AdminListen: "127.0.0.1:8081", ClusterListen: "127.0.0.1:7946",
		ClusterName: "headgate", DataDir: "headgate-data", DrainTimeout: Duration(30 * time.Second), LogLevel: "info",
	}
}

// ReadConfig reads the file over c. Unknown fields are errors with their line.
func (c *Config) ReadConfig(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(c); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("configuration %s: %s", path, yaml.FormatError(err, false, true))
	}
	return nil
}

// loadTLS reads the folder of ClusterTLS, if there is one, and takes from it what is not set:
// the node's name, its cluster's and the admin token.
func (c *Config) loadTLS() (*pki.Bundle, error) {
	if c.ClusterTLS == "" {
		return nil, nil
	}
	b, err := pki.Load(c.ClusterTLS)
	if err != nil {
		return nil, err
	}
	if c.NodeID = cmp.Or(c.NodeID, b.NodeName()); c.NodeID != b.NodeName() {
		return nil, fmt.Errorf("node-id is %q, but cluster_tls %s was made for node %q; use the folder that headgate init made for this node", c.NodeID, c.ClusterTLS, b.NodeName())
	}
	if c.ClusterName == Defaults().ClusterName {
		c.ClusterName = b.ClusterName()
	}
	if c.ClusterName != b.ClusterName() {
		return nil, fmt.Errorf("cluster-name is %q, but the certificates of cluster_tls %s are those of cluster %q", c.ClusterName, c.ClusterTLS, b.ClusterName())
	}
	c.AdminToken = cmp.Or(c.AdminToken, b.AdminToken())
	return b, nil
}

// name is the node's; the host's, where none is given.
func (c *Config) name() string {
	if c.NodeID != "" {
		return c.NodeID
	}
	host, _ := os.Hostname() // a host without a name needs a node-id, as Validate says
	return host
}

// Validate names the field and the remedy.
func (c *Config) Validate() error {
	for _, l := range [...]struct{ field, addr string }{{"listen", c.Listen}, {"admin-listen", c.AdminListen}, {"cluster-listen", c.ClusterListen}} {
		if _, _, err := net.SplitHostPort(l.addr); err != nil {
			return fmt.Errorf("%s %q is not HOST:PORT, such as 127.0.0.1:8080", l.field, l.addr)
		}
	}
	switch {
	case c.DrainTimeout < 0:
		return fmt.Errorf("drain-timeout: %s is below 0", time.Duration(c.DrainTimeout))
	case c.DataDir == "":
		return errors.New("data-dir is empty; name a folder that the node may write")
	case c.BudgetStatus != 0 && c.BudgetStatus != http.StatusTooManyRequests && c.BudgetStatus != http.StatusPaymentRequired:
		return fmt.Errorf("budget-status %d is neither 429 nor 402", c.BudgetStatus)
	case c.CapacityStatus != 0 && c.CapacityStatus != http.StatusTooManyRequests && c.CapacityStatus != http.StatusServiceUnavailable:
		return fmt.Errorf("capacity-status %d is neither 429 nor 503", c.CapacityStatus)
	case c.UsageRetention < 0 || c.UsageMaxBytes < 0:
		return errors.New("usage-retention or usage-max-bytes is below 0; leave it out for the default")
	case c.CacheMaxBytes != 0 && c.CacheMaxBytes < minCacheBytes:
		return fmt.Errorf("cache_max_bytes %d is below %d; leave it out for %d, or leave exact out of the policy's surfaces to keep no answers", c.CacheMaxBytes, minCacheBytes, defaultCacheBytes)
	case c.SemanticMaxBytes != 0 && c.SemanticMaxBytes < minSemanticBytes:
		return fmt.Errorf("semantic_max_bytes %d is below %d; leave it out for %d, or leave semantic out of the policy's surfaces to answer no other wordings", c.SemanticMaxBytes, minSemanticBytes, defaultSemanticBytes)
	case c.Upstream != "" && !c.Dev:
		return errors.New("upstream goes with dev only; without it backends stand in the policy")
	case c.Upstream != "" && c.Policy != "":
		return errors.New("upstream and policy exclude each other: put the backend into the policy")
	case c.Dev && c.DevKey != "" && len(c.DevKey) < ledger.MinKeyLength:
		return fmt.Errorf("HEADGATE_DEV_KEY has fewer than %d characters", ledger.MinKeyLength)
	case !c.Dev && c.AdminToken == "":
		return errors.New("HEADGATE_ADMIN_TOKEN is not set; set it to a long random string, the same on all nodes (with --dev one is made, and headgate init makes one)")
	}
	if err := c.exposed(); err != nil {
		return err
	}
	cc := cluster.Config{
		Name: c.name(), ClusterName: c.ClusterName, Listen: c.ClusterListen, Advertise: c.ClusterAdvertise, Seeds: c.Join, BootstrapExpect: c.BootstrapExpect,
	}
	if err := cc.Validate(); err != nil {
		return err
	}
	for route, limit := range c.MaxBody {
		if route != "default" && !slices.Contains(ledger.RouteNames, route) {
			return fmt.Errorf("max_body: there is no route %q; write default or one of %s", route, strings.Join(ledger.RouteNames, ", "))
		}
		if limit < 1 {
			return fmt.Errorf("max_body: %d bytes for %s is not above 0", limit, route)
		}
	}
	if _, err := c.level(); err != nil {
		return err
	}
	if _, err := c.edge(); err != nil {
		return err
	}
	return nil
}

// exposed says what would be open beyond this machine without TLS.
func (c *Config) exposed() error {
	if (c.AdminTLSCert == "") != (c.AdminTLSKey == "") {
		return errors.New("admin_tls_cert and admin_tls_key go together; set both or neither")
	}
	if c.Insecure {
		return nil
	}
	for _, l := range [...]struct{ field, addr, tls, remedy string }{
		{"listen", c.Listen, c.TLSCert, "set tls_cert and tls_key"},
		{"admin-listen", c.AdminListen, c.AdminTLSCert + c.ClusterTLS, "set admin_tls_cert and admin_tls_key, or cluster_tls"},
		{"cluster-listen", c.ClusterListen, c.ClusterTLS, "set cluster_tls to the folder that headgate init made for this node"},
	} {
		if l.tls == "" && !loopback(l.addr) {
			return fmt.Errorf("%s %s can be reached from beyond this machine without TLS; %s, listen on 127.0.0.1, or say --insecure if that is meant", l.field, l.addr, l.remedy)
		}
	}
	return nil
}

// loopback addresses are reached from this machine only.
func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

func (c *Config) level() (l slog.Level, err error) {
	if err := l.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return l, fmt.Errorf("log-level %q is not one of debug, info, warn, error", c.LogLevel)
	}
	return l, nil
}

// NewLogger logs JSON lines at the configured level.
func (c *Config) NewLogger(w io.Writer) (*slog.Logger, error) {
	l, err := c.level()
	if err != nil {
		return nil, err
	}
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l})), nil
}

func (c *Config) edge() (edge.Config, error) {
	e := edge.Config{
		Listen: c.Listen, TLSCert: c.TLSCert, TLSKey: c.TLSKey, ProxyProtocol: c.ProxyProtocol,
		MaxConns: c.MaxConns, MaxConnsPerIP: c.MaxConnsPerIP, Logger: c.Logger,
	}
	for _, s := range c.TrustedProxies {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return e, fmt.Errorf("trusted-proxies: %q is not a network such as 10.0.0.0/8 or 192.0.2.7/32", s)
		}
		e.TrustedProxies = append(e.TrustedProxies, p)
	}
	return e, e.Validate()
}
