package node

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"headgate/cluster/ledger"
	"headgate/proxy/edge"
)

// Config is a node's own configuration: the file of --config, over which the flags and
// the environment go. What all nodes share stands in the policy instead.
type Config struct {
	Listen        string `yaml:"listen"`
	AdminListen   string `yaml:"admin_listen"`
	ClusterListen string `yaml:"cluster_listen"` // kept for the cluster; nothing listens there yet
	NodeID        string `yaml:"node_id"`
	DataDir       string `yaml:"data_dir"`
	Policy        string `yaml:"policy"` // file; "": the one last applied
	Dev           bool   `yaml:"dev"`
	Upstream      string `yaml:"upstream"` // with Dev and without a policy

	TLSCert        string   `yaml:"tls_cert"`
	TLSKey         string   `yaml:"tls_key"`
	TrustedProxies []string `yaml:"trusted_proxies"` // networks in CIDR form
	ProxyProtocol  bool     `yaml:"proxy_protocol"`

	MaxBody       map[string]int64 `yaml:"max_body"` // bytes by route name; "default" for the others
	MaxConns      int              `yaml:"max_conns"`
	MaxConnsPerIP int              `yaml:"max_conns_per_ip"`
	MaxBuckets    int              `yaml:"max_buckets"`
	Prefilter     PrefilterConfig  `yaml:"prefilter"`

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
		DataDir: "headgate-data", DrainTimeout: Duration(30 * time.Second), LogLevel: "info",
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

// Validate names the field and the remedy.
func (c *Config) Validate() error {
	for _, l := range [...]struct{ field, addr string }{{"listen", c.Listen}, {"admin-listen", c.AdminListen}, {"cluster-listen", c.ClusterListen}} {
		if _, _, err := net.SplitHostPort(l.addr); err != nil {
			return fmt.Errorf("%s %q is not HOST:PORT, such as 127.0.0.1:8080", l.field, l.addr)
		}
	}
	switch {
	case c.DataDir == "":
		return errors.New("data-dir is empty; name a folder that the node may write")
	case c.Upstream != "" && !c.Dev:
		return errors.New("upstream goes with dev only; without it backends stand in the policy")
	case c.Upstream != "" && c.Policy != "":
		return errors.New("upstream and policy exclude each other: put the backend into the policy")
	case c.Dev && c.DevKey != "" && len(c.DevKey) < ledger.MinKeyLength:
		return fmt.Errorf("HEADGATE_DEV_KEY has fewer than %d characters", ledger.MinKeyLength)
	case !c.Dev && c.AdminToken == "":
		return errors.New("HEADGATE_ADMIN_TOKEN is not set; set it to a long random string (with --dev one is made)")
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
