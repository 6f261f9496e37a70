package upstream

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Bounds of this package.
const (
	maxBackends  = 1024 // in one policy
	maxEndpoints = 256  // addresses used of one dns:// name
	maxNameLen   = 128  // bytes
)

// noMetrics is the MetricsPath of a backend without metrics.
const noMetrics = "none"

// Backend is one entry of the policy's list of model servers.
type Backend struct {
	// Name identifies the backend in models, logs and metrics; unique, without spaces or '@'.
	Name string
	// URL is http://host:port, https://host:port, either with a base path, or
	// dns://name:port: every address of the name is an endpoint of its own. A dns
	// backend speaks http, and https if any of the TLS fields below is set.
	URL string
	// Slots bounds the requests in flight to each endpoint; 0 is unbounded.
	Slots int
	// APIKey is sent as a bearer token in place of the caller's; "" sends none.
	APIKey string
	// CAFile (PEM) replaces the system's roots. CertFile and KeyFile (PEM) are the
	// client certificate. All are read again when they change.
	CAFile, CertFile, KeyFile string
	// ServerName is verified against the certificate instead of the URL's host.
	ServerName string
	// HealthPath is probed by GET below the base path; default /health for VLLM. The
	// commercial kinds are probed only if it is set: their health is read from answers.
	HealthPath string

	// Kind says how the backend is spoken to; the zero value is VLLM.
	Kind Kind
	// Serves names the models that the backend answers for: endpoints that share one
	// are peers, beside which an outlier is seen. Empty: only its own endpoints are.
	Serves []string
	// Overflow marks a backend that is used only where no other has room.
	Overflow bool
	// SlotTokens is how many tokens of a request take one slot; 0: [DefaultSlotTokens].
	SlotTokens int64
	// APIKeyFile holds the key in place of APIKey; it is read again when it changes.
	APIKeyFile string
	// Models maps a model's public name to the backend's own, for [Slot.Model].
	Models map[string]string
	// MetricsPath is where [Pool.Fetch] finds metrics; default /metrics for VLLM, "none"
	// for a backend that has none.
	MetricsPath string
	// ConnectTimeout bounds TCP and TLS each; 0: Config.DialTimeout. FirstByteTimeout
	// bounds the time from a stream's request to the first byte of its answer's body, and
	// IdleTimeout the silence between two reads that brought bytes; 0: no bound but the
	// caller's.
	ConnectTimeout, FirstByteTimeout, IdleTimeout time.Duration
}

// DefaultSlotTokens is how many tokens take one slot where a backend doesn't say.
const DefaultSlotTokens = 16384

// Kind is how a backend is spoken to.
type Kind uint8

// The kinds. VLLM is any server like vLLM: a bearer token, /health, /metrics. OpenAI and
// Anthropic are commercial endpoints: no probes, the provider's own auth header.
const (
	VLLM Kind = iota
	OpenAI
	Anthropic
)

// String gives the policy's word.
func (k Kind) String() string { return [...]string{"vllm", "openai", "anthropic"}[k] }

// ParseKind reads the policy's word; "" is VLLM.
func ParseKind(s string) (Kind, bool) {
	switch s {
	case "", "vllm":
		return VLLM, true
	case "openai":
		return OpenAI, true
	case "anthropic":
		return Anthropic, true
	}
	return 0, false
}

// Resolver finds the addresses of a dns:// name; *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Config is what a Pool is made from. Zero durations and counts take the defaults.
type Config struct {
	Backends []Backend

	DialTimeout           time.Duration // TCP and TLS each; default 1.5s
	ResponseHeaderTimeout time.Duration // from the request sent to the answer's header; 0: none
	IdleConnTimeout       time.Duration // default 4s, below uvicorn's 5s
	HealthInterval        time.Duration // between probes; default 5s
	HealthTimeout         time.Duration // of one probe; default 2s
	ResolveInterval       time.Duration // between look-ups of dns:// names and of changed files; default 10s
	MaxIdlePerBackend     int           // idle connections kept to each endpoint; default 1024

	// MaxFailures in a row open an endpoint's breaker; 0: 5; below 0 breakers never open.
	MaxFailures int
	// Peers is how many gateways share the backends, this one included: an unbounded
	// endpoint that comes back takes a part of a slow start's room. Default: one.
	Peers func() int

	Logger *slog.Logger // default: discards

	// Resolver defaults to net.DefaultResolver.
	Resolver Resolver
	// Transport replaces the HTTP transport of a backend in tests. A request that it
	// fails counts as a failed dial only if it called the request's
	// httptrace GetConn hook and not GotConn.
	Transport func(Backend) http.RoundTripper
}

// Validate reports the first field that cannot work, with the remedy.
func (c Config) Validate() error {
	for _, d := range []struct {
		name string
		v    time.Duration
	}{
		{"dial_timeout", c.DialTimeout},
		{"response_header_timeout", c.ResponseHeaderTimeout},
		{"idle_conn_timeout", c.IdleConnTimeout},
		{"health_interval", c.HealthInterval},
		{"health_timeout", c.HealthTimeout},
		{"resolve_interval", c.ResolveInterval},
	} {
		if d.v < 0 {
			return fmt.Errorf("%s: %v is negative; give a duration such as 2s, or leave it out", d.name, d.v)
		}
	}
	if c.MaxIdlePerBackend < 0 {
		return fmt.Errorf("max_idle_per_backend: %d is negative; leave it out for the default", c.MaxIdlePerBackend)
	}
	return validateBackends(c.Backends)
}

func (c Config) withDefaults() Config {
	c.DialTimeout = cmp.Or(c.DialTimeout, 1500*time.Millisecond)
	c.IdleConnTimeout = cmp.Or(c.IdleConnTimeout, 4*time.Second)
	c.HealthInterval = cmp.Or(c.HealthInterval, 5*time.Second)
	c.HealthTimeout = cmp.Or(c.HealthTimeout, 2*time.Second)
	c.ResolveInterval = cmp.Or(c.ResolveInterval, 10*time.Second)
	c.MaxIdlePerBackend = cmp.Or(c.MaxIdlePerBackend, 1024)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Resolver == nil {
		c.Resolver = net.DefaultResolver
	}
	return c
}

func validateBackends(bs []Backend) error {
	if len(bs) > maxBackends {
		return fmt.Errorf("backends: %d is more than %d; use dns:// names for replicas", len(bs), maxBackends)
	}
	seen := make(map[string]bool, len(bs))
	for i, b := range bs {
		if err := b.validate(); err != nil {
			return fmt.Errorf("backends[%d].%w", i, err)
		}
		if seen[b.Name] {
			return fmt.Errorf("backends[%d].name: %q is used twice; give each backend its own", i, b.Name)
		}
		seen[b.Name] = true
	}
	return nil
}

func (b Backend) validate() error {
	switch {
	case b.Name == "":
		return fmt.Errorf("name: is empty; give the backend one, such as vllm-a")
	case len(b.Name) > maxNameLen || strings.ContainsAny(b.Name, "@ \t\r\n"):
		return fmt.Errorf("name: %q is longer than %d bytes or holds a space or '@'; choose a plainer one", b.Name, maxNameLen)
	case b.Slots < 0:
		return fmt.Errorf("slots: %d is negative; use 0 for no bound", b.Slots)
	case (b.CertFile == "") != (b.KeyFile == ""):
		return fmt.Errorf("cert_file: a client certificate needs both cert_file and key_file")
	case b.HealthPath != "" && b.HealthPath[0] != '/':
		return fmt.Errorf("health_path: %q must begin with a slash", b.HealthPath)
	case strings.ContainsAny(b.APIKey, "\r\n\x00"):
		return fmt.Errorf("api_key: holds a line break; check the file or variable it comes from")
	case b.APIKey != "" && b.APIKeyFile != "":
		return fmt.Errorf("api_key_file: excludes api_key_env; give the key by one of them")
	case b.Kind > Anthropic:
		return fmt.Errorf("kind: %d is unknown; use vllm, openai or anthropic", b.Kind)
	case b.SlotTokens < 0:
		return fmt.Errorf("slot_tokens: %d is negative; leave it out for %d", b.SlotTokens, DefaultSlotTokens)
	case b.MetricsPath != "" && b.MetricsPath != noMetrics && b.MetricsPath[0] != '/':
		return fmt.Errorf("metrics_path: %q must begin with a slash, or be none", b.MetricsPath)
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{{"connect", b.ConnectTimeout}, {"first_byte", b.FirstByteTimeout}, {"idle", b.IdleTimeout}} {
		if d.v < 0 {
			return fmt.Errorf("timeouts.%s: %v is negative; give a duration such as 2s, or leave it out", d.name, d.v)
		}
	}
	u, err := b.base()
	if err != nil {
		return err
	}
	if u.Scheme == "http" && b.tls() {
		return fmt.Errorf("url: %q is not encrypted, yet TLS files or a server name are set; use https://", b.URL)
	}
	return nil
}

// base is where requests go: scheme http or https, the host as the URL names it
// (for dns:// the name), and the base path without a slash at its end.
func (b Backend) base() (*url.URL, error) {
	u, err := url.Parse(b.URL)
	if err != nil || u.Host == "" || u.Hostname() == "" {
		return nil, fmt.Errorf("url: %q is not a URL with a host; write http://host:8000", b.URL)
	}
	if _, err := strconv.ParseUint(u.Port(), 10, 16); u.Port() != "" && err != nil {
		return nil, fmt.Errorf("url: port %s does not exist; ports end at 65535", u.Port())
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("url: %q holds a user, query or fragment; put a key into api_key_env", u.Redacted())
	}
	switch u.Scheme {
	case "http", "https":
	case "dns":
		if u.Port() == "" {
			return nil, fmt.Errorf("url: %q names no port; write dns://name:8000", b.URL)
		}
		u.Scheme = "http"
		if b.tls() {
			u.Scheme = "https"
		}
	default:
		return nil, fmt.Errorf("url: scheme %q is unknown; use http, https or dns", u.Scheme)
	}
	u.Path = strings.TrimRight(u.Path, "/")
	u.RawPath = ""
	return u, nil
}

func (b Backend) dns() bool { return strings.HasPrefix(b.URL, "dns://") }

// tls says whether a field is set that makes sense only with TLS.
func (b Backend) tls() bool { return b.CAFile != "" || b.CertFile != "" || b.ServerName != "" }

// sameServer says whether a and b reach the same server in the same way, so that
// connections, health and slots in use carry over from one to the other.
func (b Backend) sameServer(o Backend) bool {
	return b.Name == o.Name && b.URL == o.URL && b.CAFile == o.CAFile && b.CertFile == o.CertFile &&
		b.KeyFile == o.KeyFile && b.ServerName == o.ServerName &&
		b.Kind == o.Kind && b.ConnectTimeout == o.ConnectTimeout
}

// probed says whether the backend is asked for its health.
func (b Backend) probed() bool { return b.Kind == VLLM || b.HealthPath != "" }

// metricsPath is where metrics are; "" for none.
func (b Backend) metricsPath() string {
	switch {
	case b.MetricsPath == noMetrics || b.MetricsPath == "" && b.Kind != VLLM:
		return ""
	case b.MetricsPath == "":
		return "/metrics"
	}
	return b.MetricsPath
}
