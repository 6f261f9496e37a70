package ledger

import (
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	maxFallbacks = 4         // that are tried: as many as the proxy does
	mostSlots    = 1_000_000 // of one endpoint
	maxTier      = 1_000
	leastTimeout = 100 * time.Millisecond
	lastPort     = 65_535
)

// refusedAnew finds what only a new policy is refused for: earlier releases took it, so that it may be in force.
func (p *Policy) refusedAnew() []found {
	c := &checker{p: p, models: p.modelsByName()}
	root := place{"", "$"}
	for i := range p.Backends {
		c.reachable(root.item("backends", i, p.Backends[i].Name), &p.Backends[i])
	}
	for i := range p.Models {
		at := root.item("models", i, p.Models[i].Name)
		c.once(at.field("backends"), p.Models[i].Backends)
		c.fallbacks(at.field("fallback"), &p.Models[i])
	}
	for i := range p.Plans {
		c.sold(root.item("plans", i, p.Plans[i].Name), &p.Plans[i])
	}
	for i := range p.Ladder {
		c.once(root.item("ladder", i, p.Ladder[i].Rung).field("models"), p.Ladder[i].Models)
	}
	for i := range p.Routes {
		at, m := root.item("routes", i, p.Routes[i].Name).field("match"), &p.Routes[i].Match
		c.once(at.field("models"), m.Models)
		c.once(at.field("surfaces"), m.Surfaces)
		c.once(at.field("classes"), m.Classes)
		c.once(at.field("tenants"), m.Tenants)
	}
	return append(c.found, p.unpriced()...)
}

// once checks that no name stands in a list twice.
func (c *checker) once(at place, names []string) {
	seen := make(map[string]bool, len(names))
	for i, n := range names {
		if seen[n] {
			c.add(at.nth(i, ""), "%s stands here already; remove one of them", clip(n))
		}
		seen[n] = true
	}
}

// fallbacks checks that those of m are some that are tried, each once. One that is m's own name is refused elsewhere.
func (c *checker) fallbacks(at place, m *Model) {
	if n := len(m.Fallback); n > maxFallbacks {
		c.add(at, "%d models are more than %d, of which the last would never be tried; remove some", n, maxFallbacks)
		return
	}
	c.once(at, m.Fallback)
	for i, n := range m.Fallback {
		f := c.models[n]
		switch before := slices.IndexFunc(m.Fallback[:i], func(o string) bool { return f != nil && c.models[o] == f }); {
		case f == m && n != m.Name:
			c.add(at.nth(i, ""), "%s is the model %s itself; name another", clip(n), clip(m.Name))
		case before >= 0 && m.Fallback[before] != n && f != m:
			c.add(at.nth(i, ""), "%s is the model %s, which stands here already; remove one of them", clip(n), clip(f.Name))
		}
	}
}

// sold checks what a plan promises.
func (c *checker) sold(at place, p *Plan) {
	if p.Tier < 0 || p.Tier > maxTier {
		c.add(at.field("tier"), "%d is not between 0 and %d: lower tiers are shed first; write 0 for the lowest", p.Tier, maxTier)
	}
	if d := time.Duration(p.Timeout); d > 0 && d < leastTimeout {
		c.add(at.field("timeout"), "with %s every request fails: write %s or more, or leave it out for 10m", d, leastTimeout)
	}
}

// reachable checks what of a backend's address nobody could reach. It says nothing of one that is none.
func (c *checker) reachable(at place, b *Backend) {
	if b.Slots > mostSlots {
		c.add(at.field("slots"), "%d is more than %d; write how many requests one endpoint has in flight at most, or leave it out for no bound", b.Slots, mostSlots)
	}
	if strings.Contains(b.Name, "@") {
		c.add(at.field("name"), "@ stands between the names of a backend and of its endpoint; write another name")
	}
	at = at.field("url")
	u, err := url.Parse(b.URL)
	if err != nil || u.Host == "" {
		return
	}
	port, err := strconv.ParseUint(u.Port(), 10, 32)
	switch {
	case u.User != nil: // not quoted: it is a secret
		c.add(at, "the user and password belong into no policy, which holds no secrets: put the key into api_key_env or api_key_file")
	case u.RawQuery != "" || u.Fragment != "": // likewise
		c.add(at, "what is behind ? or # is not sent; remove it, and put a key into api_key_env or api_key_file")
	case strings.ContainsAny(b.URL, " \t"):
		c.add(at, "%q has a space in it; remove it", b.URL)
	case u.Port() != "" && (err != nil || port < 1 || port > lastPort):
		c.add(at, "port %s does not exist; write 1 to %d, as in %s://%s8000", clip(u.Port()), lastPort, u.Scheme, strings.TrimSuffix(u.Host, u.Port()))
	case u.Scheme == "http" && (b.CAFile != "" || b.CertFile != "" || b.ServerName != ""):
		c.add(at, "TLS files or a server name are set, and http:// is not encrypted: write https://")
	}
}
