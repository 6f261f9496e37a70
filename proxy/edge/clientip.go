package edge

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// maxForwarded bounds the hops of X-Forwarded-For that are looked at.
const maxForwarded = 32

// ClientIP is the address that the request's limits and log line are charged to: the
// peer's, or, behind trusted proxies, the right-most of X-Forwarded-For that is not
// trusted itself. An unreadable entry ends the walk at the last hop that was read. It
// is the zero Addr only where the peer has no IP address.
func (c *Config) ClientIP(r *http.Request) netip.Addr {
	ip := addrOf(r.RemoteAddr)
	if len(c.TrustedProxies) == 0 || !c.trusted(ip) {
		return ip
	}
	hops := 0
	lines := r.Header["X-Forwarded-For"]
	for _, line := range slices.Backward(lines) {
		rest, more := line, true
		for more {
			if hops++; hops > maxForwarded {
				return ip
			}
			var hop string
			if j := strings.LastIndexByte(rest, ','); j >= 0 {
				rest, hop = rest[:j], rest[j+1:]
			} else {
				hop, more = rest, false
			}
			next := addrOf(strings.TrimSpace(hop))
			if !next.IsValid() {
				return ip
			}
			if ip = next; !c.trusted(ip) {
				return ip
			}
		}
	}
	return ip
}

func (c *Config) trusted(ip netip.Addr) bool {
	for _, p := range c.TrustedProxies {
		if p.Contains(ip) {
			return true
		}
	}
	return false
}

// addrOf reads an address with or without port, brackets and zone, and takes an IPv4
// address out of its IPv6 form; the zero Addr if it is none.
func addrOf(s string) netip.Addr {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr().Unmap().WithZone("")
	}
	if n := len(s); n > 2 && s[0] == '[' && s[n-1] == ']' {
		s = s[1 : n-1]
	}
	ip, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Addr{}
	}
	return ip.Unmap().WithZone("")
}

// subscriber is the unit that per-address caps count: an IPv4 address, or the /64 that
// an IPv6 subscriber gets whole.
func subscriber(ip netip.Addr) netip.Addr {
	if !ip.Is6() {
		return ip
	}
	p, err := ip.Prefix(64)
	if err != nil {
		return ip
	}
	return p.Addr()
}
