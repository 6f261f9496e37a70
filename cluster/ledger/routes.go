package ledger

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxRoutes     = 256
	maxTargets    = 16
	maxHeaders    = 16
	maxHeaderName = 128 // bytes
	mostShare     = 1_000_000
)

var stickyNames = []string{"user", "key", "request"}

// Route sends requests that match to models, as written; see Index.Routes for what it becomes.
type Route struct {
	Name   string   `yaml:"name"`
	Match  Match    `yaml:"match"`
	To     []Target `yaml:"to"`
	Sticky string   `yaml:"sticky,omitempty"` // whose requests all go to one of several: user | key | request; absent: user
}

// Match is what a request must be: all that is said. A list holds what any of it is enough.
type Match struct {
	Models   []string          `yaml:"models,omitempty"` // that are asked for: a model's own name stands for its aliases, too
	Surfaces []string          `yaml:"surfaces,omitempty"`
	Classes  []string          `yaml:"classes,omitempty"`
	Tenants  []string          `yaml:"tenants,omitempty"`
	Tier     *int              `yaml:"below_tier,omitempty"`    // of the plan
	Input    TokenRange        `yaml:"input_tokens,omitempty"`  // as estimated
	Output   TokenRange        `yaml:"output_tokens,omitempty"` // the cap of the request, or the model's default
	Headers  map[string]string `yaml:"headers,omitempty"`       // name and exact value
}

// TokenRange is a range of counts, both ends left out.
type TokenRange struct {
	Below *int64 `yaml:"below,omitempty"`
	Above *int64 `yaml:"above,omitempty"`
}

// Target is one of the models to which a route sends.
type Target struct {
	Model  string `yaml:"model"`
	Weight *int64 `yaml:"weight,omitempty"` // share of the requests, beside the others'; absent: 1
}

// ResolvedRoute is a route with its defaults in place. Nothing of it may be changed.
type ResolvedRoute struct {
	Name string
	// Models are the names by which a request may have asked for its model, aliases among them; nil: any.
	// So are Surfaces, Classes and Tenants.
	Models, Surfaces, Classes, Tenants []string
	BelowTier                          *int // of the caller's plan; nil: any
	// A request matches with InputAbove < input < InputBelow; nil: no bound. Output likewise.
	InputBelow, InputAbove, OutputBelow, OutputAbove *int64
	Headers                                          []HeaderMatch // all of them, by name
	To                                               []ResolvedTarget
	Sticky                                           string // user | key | request
}

// HeaderMatch is a header that a request must have.
type HeaderMatch struct{ Name, Value string } // Name is canonical

// ResolvedTarget is where a route sends Weight of the sum of all weights, which is above 0.
type ResolvedTarget struct {
	Model  string // its own name, never an alias
	Weight int64  // ≥ 0
}

func (r *Route) sticky() string {
	if r.Sticky == "" {
		return stickyNames[0]
	}
	return r.Sticky
}

// asked are the names by which requests may ask for the models; nil where there are none. models are by name and alias.
func (m *Match) asked(models map[string]*Model) (out []string) {
	for _, n := range m.Models {
		out = append(out, n)
		if own := models[n]; own != nil && own.Name == n {
			out = append(out, own.Aliases...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// resolve compiles a route of a valid policy. models are by name and alias.
func (r *Route) resolve(models map[string]*Model) ResolvedRoute {
	m := &r.Match
	out := ResolvedRoute{
		Name: r.Name, Models: m.asked(models), Surfaces: m.Surfaces, Classes: m.Classes, Tenants: m.Tenants, BelowTier: m.Tier,
		InputBelow: m.Input.Below, InputAbove: m.Input.Above, OutputBelow: m.Output.Below, OutputAbove: m.Output.Above, Sticky: r.sticky(),
	}
	for name, value := range m.Headers {
		out.Headers = append(out.Headers, HeaderMatch{http.CanonicalHeaderKey(name), value})
	}
	slices.SortFunc(out.Headers, func(a, b HeaderMatch) int { return strings.Compare(a.Name, b.Name) })
	for _, t := range r.To {
		out.To = append(out.To, ResolvedTarget{models[t.Model].Name, valueOr(t.Weight, 1)})
	}
	return out
}

// misnamed says what to write instead of a name that others use.
func (*Route) misnamed(name string) string {
	switch n := plain(name); n {
	case "when", "if", "where", "conditions", "condition", "from":
		return "write match: {models: [NAME]}, with what else a request must be"
	case "model", "target", "targets", "then", "backends", "split", "weights":
		return "write to: [{model: NAME, weight: 90}, {model: OTHER, weight: 10}]"
	}
	return ""
}

// misnamed says what to write instead of a name that others use.
func (*Match) misnamed(name string) string {
	switch n := plain(name); {
	case strings.Contains(n, "tier"), n == "plan", n == "plans":
		return "write below_tier: 2 for plans of a lower tier"
	case strings.Contains(n, "output"), n == "maxtokens":
		return "write output_tokens: {below: 500}, or above"
	case strings.Contains(n, "token"), strings.Contains(n, "size"), strings.Contains(n, "prompt"):
		return "write input_tokens: {below: 500}, or above"
	case n == "orgs", n == "org", n == "keys", n == "users":
		return "write tenants: [NAME]"
	}
	return ""
}

// misnamed says what to write instead of a name that others use.
func (*TokenRange) misnamed(name string) string {
	switch n := plain(name); {
	case strings.HasPrefix(n, "max"), strings.HasPrefix(n, "lt"), strings.HasPrefix(n, "less"), n == "under", n == "to":
		return "write below, which is left out itself"
	case strings.HasPrefix(n, "min"), strings.HasPrefix(n, "gt"), strings.HasPrefix(n, "more"), n == "over", n == "from":
		return "write above, which is left out itself"
	}
	return ""
}

// misnamed says what to write instead of a name that others use.
func (*Target) misnamed(name string) string {
	switch plain(name) {
	case "name", "backend":
		return "write model: the name of a model of this policy"
	case "percent", "share", "ratio", "fraction":
		return "write weight, a whole number: its part of the sum of all weights"
	}
	return ""
}

// String is the target as one would say it.
func (t Target) String() string {
	if t.Weight == nil {
		return t.Model
	}
	return fmt.Sprintf("%s, weight %d", t.Model, *t.Weight)
}

// words is the range as one would say it; "" where all are in it.
func (r *TokenRange) words(what string) string {
	switch {
	case r.Above != nil && r.Below != nil:
		return fmt.Sprintf("with more than %d and fewer than %d %s tokens", *r.Above, *r.Below, what)
	case r.Above != nil:
		return fmt.Sprintf("with more than %d %s tokens", *r.Above, what)
	case r.Below != nil:
		return fmt.Sprintf("with fewer than %d %s tokens", *r.Below, what)
	}
	return ""
}

// words is the route as one would say it.
func (r *Route) words() string {
	m := &r.Match
	parts := []string{"requests"}
	for _, l := range [...]struct {
		what  string
		names []string
	}{{"for ", m.Models}, {"of surface ", m.Surfaces}, {"of class ", m.Classes}, {"of tenant ", m.Tenants}} {
		if len(l.names) > 0 {
			parts = append(parts, l.what+clip(strings.Join(l.names, " or ")))
		}
	}
	if m.Tier != nil {
		parts = append(parts, fmt.Sprintf("of plans below tier %d", *m.Tier))
	}
	for _, w := range [...]string{m.Input.words("input"), m.Output.words("output")} {
		if w != "" {
			parts = append(parts, w)
		}
	}
	for _, h := range slices.Sorted(maps.Keys(m.Headers)) {
		parts = append(parts, fmt.Sprintf("with %s: %s", h, m.Headers[h]))
	}
	to := make([]string, len(r.To))
	for i, t := range r.To {
		if to[i] = t.Model; len(r.To) > 1 {
			to[i] = fmt.Sprintf("%s (%d)", t.Model, valueOr(t.Weight, 1))
		}
	}
	words := strings.Join(parts, " ") + " go to " + strings.Join(to, ", ")
	if len(r.To) > 1 {
		words += ", the same for each " + r.sticky()
	}
	return words
}

// routesByPath are the routes, by the path that differences call them by.
func (p *Policy) routesByPath() map[string]*Route {
	out := map[string]*Route{}
	for i := range p.Routes {
		out["routes["+p.Routes[i].Name+"]"] = &p.Routes[i]
	}
	return out
}

// routesAlso are the names of the routes that other has, too, in the order in which they are tried.
func (p *Policy) routesAlso(other *Policy) string {
	theirs := other.routesByPath()
	var names []string
	for i := range p.Routes {
		if _, ok := theirs["routes["+p.Routes[i].Name+"]"]; ok {
			names = append(names, p.Routes[i].Name)
		}
	}
	return strings.Join(names, ", ")
}

// routes checks all routes. models are all names and aliases.
func (c *checker) routes(root place, models, surfaces, tenants map[string]bool) {
	if n := len(c.p.Routes); n > maxRoutes {
		c.add(root.field("routes"), "%d routes are more than %d", n, maxRoutes)
		return
	}
	seen := map[string]bool{}
	for i := range c.p.Routes {
		r := &c.p.Routes[i]
		at := root.item("routes", i, r.Name)
		c.name(at.field("name"), r.Name, seen)
		in, m := at.field("match"), &r.Match
		c.named(in.field("models"), m.Models, "model", models)
		if n := len(m.asked(c.models)); n > maxScope {
			c.add(in.field("models"), "these have %d names with their aliases, which are more than %d; name fewer", n, maxScope)
		}
		c.named(in.field("surfaces"), m.Surfaces, "surface", surfaces)
		c.named(in.field("tenants"), m.Tenants, "tenant", tenants)
		c.match(in, m)
		c.targets(at.field("to"), r, models)
		c.oneOf(at.field("sticky"), r.Sticky, stickyNames, true)
	}
}

// match checks the conditions that name nothing of the policy.
func (c *checker) match(at place, m *Match) {
	if m.Classes != nil && len(m.Classes) == 0 {
		c.add(at.field("classes"), "an empty list would be for none, and an absent one is for all; leave it out, or name a class")
	}
	for i, w := range m.Classes {
		c.oneOf(at.field("classes").nth(i, ""), w, classNames, false)
	}
	if m.Tier != nil && *m.Tier < 1 {
		c.add(at.field("below_tier"), "there is no plan below tier %d: tiers begin with 0; write 1 or more", *m.Tier)
	}
	for _, r := range [...]struct {
		name string
		is   *TokenRange
	}{{"input_tokens", &m.Input}, {"output_tokens", &m.Output}} {
		in := at.field(r.name)
		switch above, below := valueOr(r.is.Above, -1), valueOr(r.is.Below, mostTokens); {
		case r.is.Above != nil && (above < 0 || above > mostTokens):
			c.add(in.field("above"), "%d is not between 0 and %d tokens", above, mostTokens)
		case below < 1 || below > mostTokens:
			c.add(in.field("below"), "%d is not between 1 and %d tokens", below, mostTokens)
		case below-above < 2:
			c.add(in, "no number is above %d and below %d, which are left out themselves", above, below)
		}
	}
	if len(m.Headers) > maxHeaders {
		c.add(at.field("headers"), "%d headers are more than %d", len(m.Headers), maxHeaders)
		return
	}
	seen := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
		c.header(at.field("headers").entry(name), name, m.Headers[name], seen)
	}
	if m.empty() {
		c.add(at, "a route without a condition takes every request, whatever it asks for; write match: {models: [NAME]}, or which else")
	}
}

// empty says whether there is no condition. An empty list is one, and refused elsewhere.
func (m *Match) empty() bool {
	return m.Models == nil && m.Surfaces == nil && m.Classes == nil && m.Tenants == nil && m.Tier == nil &&
		m.Input == TokenRange{} && m.Output == TokenRange{} && len(m.Headers) == 0
}

// header checks a condition on a header. seen are those of before, by canonical name.
func (c *checker) header(at place, name, value string, seen map[string]string) {
	canonical := http.CanonicalHeaderKey(name)
	switch {
	case name == "" || len(name) > maxHeaderName || strings.Trim(strings.ToLower(name), "abcdefghijklmnopqrstuvwxyz0123456789-_") != "":
		c.add(at, "a header's name has letters, digits, - and _, %d at most", maxHeaderName)
	case strings.HasPrefix(canonical, "X-Headgate-"):
		c.add(at, "X-Headgate- headers are the gateway's own: match surfaces, classes or tenants, which are what the key allows, too")
	case slices.Contains([]string{"Authorization", "X-Api-Key", "Api-Key", "Cookie", "Proxy-Authorization"}, canonical):
		c.add(at, "%s holds credentials, and a policy holds no secrets: match tenants", canonical)
	case slices.Contains([]string{"Host", "Connection", "Transfer-Encoding", "Content-Length", "Te", "Trailer", "Upgrade", "Keep-Alive", "Proxy-Connection"}, canonical):
		c.add(at, "%s is of the connection and not of the request; match another header", canonical)
	case seen[canonical] != "":
		c.add(at, "%s and %s are the same header; remove one of them", name, seen[canonical])
	}
	seen[canonical] = name
	if value == "" || len(value) > maxLabel || strings.TrimSpace(value) != value || !utf8.ValidString(value) || strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) {
		c.add(at, "the value of a header is 1 to %d printable bytes without space around it", maxLabel)
	}
}

// targets checks where a route sends. models are all names and aliases.
func (c *checker) targets(at place, r *Route, models map[string]bool) {
	if n := len(r.To); n == 0 || n > maxTargets {
		c.add(at, "a route goes to 1 to %d models, not %d: write to: [{model: NAME}]", maxTargets, n)
		return
	}
	seen, sum := map[*Model]bool{}, int64(0)
	for i, t := range r.To {
		in := at.nth(i, "")
		c.ref(in.field("model"), "model", t.Model, models)
		m := c.models[t.Model]
		if m != nil && seen[m] {
			c.add(in.field("model"), "the route goes to %s already; add the weights up", m.Name)
		}
		seen[m] = true
		w := valueOr(t.Weight, 1)
		if w < 0 || w > mostShare {
			c.add(in.field("weight"), "%d is not between 0 and %d: it is a share beside the others'", w, mostShare)
		}
		sum += max(w, 0)
	}
	if sum == 0 {
		c.add(at, "all weights are 0, so that nobody gets the requests; write one above 0, or remove the route")
	}
}
