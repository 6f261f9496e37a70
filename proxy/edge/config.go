package edge

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"time"
)

// Config is the edge's part of a node's configuration. Zero values take the defaults.
type Config struct {
	Listen string // host:port

	// TLSCert and TLSKey are PEM files, read again when they change; both or none.
	TLSCert, TLSKey string

	// ProxyProtocol demands a PROXY header, version 1 or 2, of the peers in
	// TrustedProxies, and of no other.
	ProxyProtocol bool
	// TrustedProxies may say for whom they speak, by PROXY header and X-Forwarded-For.
	TrustedProxies []netip.Prefix

	MaxConns      int // default 10000
	MaxConnsPerIP int // an IPv6 /64 counts as one address; default 1000

	MaxHeaderBytes int // request line and header; default 64 KiB
	MaxHeaders     int // header lines; default 128

	ReadHeaderTimeout time.Duration // default 10s
	IdleTimeout       time.Duration // default 120s
	// A body must have arrived by BodyGrace + size/BodyMinRate; defaults 10s and 1024 B/s.
	BodyGrace   time.Duration
	BodyMinRate int64
	// WriteStall is how long a write may wait for the client; default 30s.
	WriteStall time.Duration

	Logger *slog.Logger // default: discards
}

// Validate reports the first field that cannot work, with the remedy.
func (c Config) Validate() error {
	switch {
	case c.Listen == "":
		return fmt.Errorf("listen: is empty; give host:port, such as 127.0.0.1:8080")
	case (c.TLSCert == "") != (c.TLSKey == ""):
		return fmt.Errorf("tls_cert: TLS needs both tls_cert and tls_key")
	case c.ProxyProtocol && len(c.TrustedProxies) == 0:
		return fmt.Errorf("proxy_protocol: nobody is trusted to send it; list the load balancers in trusted_proxies")
	case c.BodyMinRate < 0:
		return fmt.Errorf("body_min_rate: %d is negative; give bytes per second, or leave it out", c.BodyMinRate)
	}
	for i, p := range c.TrustedProxies {
		if !p.IsValid() {
			return fmt.Errorf("trusted_proxies[%d]: is not a prefix; write 10.0.0.0/8", i)
		}
	}
	for _, f := range []struct {
		name string
		v    int
	}{{"max_conns", c.MaxConns}, {"max_conns_per_ip", c.MaxConnsPerIP}, {"max_header_bytes", c.MaxHeaderBytes}, {"max_headers", c.MaxHeaders}} {
		if f.v < 0 {
			return fmt.Errorf("%s: %d is negative; leave it out for the default", f.name, f.v)
		}
	}
	for _, f := range []struct {
		name string
		v    time.Duration
	}{{"read_header_timeout", c.ReadHeaderTimeout}, {"idle_timeout", c.IdleTimeout}, {"body_grace", c.BodyGrace}, {"write_stall", c.WriteStall}} {
		if f.v < 0 {
			return fmt.Errorf("%s: %v is negative; give a duration such as 10s, or leave it out", f.name, f.v)
		}
	}
	return nil
}

func (c Config) withDefaults() Config {
	c.MaxConns = cmp.Or(c.MaxConns, 10_000)
	c.MaxConnsPerIP = cmp.Or(c.MaxConnsPerIP, 1000)
	c.MaxHeaderBytes = cmp.Or(c.MaxHeaderBytes, 64<<10)
	c.MaxHeaders = cmp.Or(c.MaxHeaders, 128)
	c.ReadHeaderTimeout = cmp.Or(c.ReadHeaderTimeout, 10*time.Second)
	c.IdleTimeout = cmp.Or(c.IdleTimeout, 120*time.Second)
	c.BodyGrace = cmp.Or(c.BodyGrace, 10*time.Second)
	c.BodyMinRate = cmp.Or(c.BodyMinRate, 1024)
	c.WriteStall = cmp.Or(c.WriteStall, 30*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}
