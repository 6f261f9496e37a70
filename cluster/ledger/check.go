package ledger

import (
	"encoding/hex"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"headgate/limiter"
)

// Names of what a policy may say, in its own spelling.
var (
	scopeParts   = []string{"key", "user", "org", "model", "global"}
	unitNames    = []string{"requests", "concurrency", "tokens", "input_tokens", "output_tokens", "usd"} // cheapest first
	classNames   = []string{"interactive", "background", "best_effort"}
	unavailables = []string{"allow", "deny", "local"}
	oversizes    = []string{"refuse", "debt"}
	contentModes = []string{"off", "errors", "sample", "all"}
	redactions   = []string{"email", "phone", "card"}
	// RouteNames are the groups of routes that a key can be held to.
	RouteNames = []string{"models", "chat", "completions", "responses", "messages", "embeddings", "audio", "pooling", "tokenize"}
)

// namePattern is what names may look like: they become header items, labels and log values.
var namePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$`)

// wordPattern tells a word from a regular expression.
var wordPattern = regexp.MustCompile(`^[a-z_]*$`)

// envPattern is what names of environment variables look like.
var envPattern = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

// found is a Problem with its place in the YAML.
type found struct {
	Problem
	yamlPath string
}

// checker gathers problems.
type checker struct {
	found     []found
	p         *Policy
	calendars calendars
	models    map[string]*Model // by name and alias; once they were checked
	embedders map[*Model]bool   // of surfaces; likewise
}

// place is where in the policy something stands: for people and for the parser.
type place struct{ human, yaml string }

func (at place) field(name string) place {
	if at.human == "" {
		return place{name, at.yaml + "." + name}
	}
	return place{at.human + "." + name, at.yaml + "." + name}
}

func (at place) item(list string, i int, name string) place {
	return at.field(list).nth(i, name)
}

// nth is the place of an entry of the list at, called by its name if it has one.
func (at place) nth(i int, name string) place {
	if name == "" {
		name = strconv.Itoa(i)
	}
	return place{at.human + "[" + clip(name) + "]", at.yaml + "[" + strconv.Itoa(i) + "]"}
}

// entry is the place of an entry of the map at.
func (at place) entry(name string) place {
	return place{at.human + "[" + clip(name) + "]", at.yaml + ".'" + strings.ReplaceAll(name, "'", `\'`) + "'"}
}

func (c *checker) add(at place, format string, args ...any) {
	if len(c.found) < maxProblems {
		c.found = append(c.found, found{Problem{Path: at.human, Message: clip(fmt.Sprintf(format, args...))}, at.yaml})
	}
}

// name checks a name and that it was not used before.
func (c *checker) name(at place, name string, seen map[string]bool) {
	switch {
	case !namePattern.MatchString(name):
		c.add(at, "the name %q is empty or has other than letters, digits and . _ : / @ - (128 at most)", name)
	case seen[name]:
		c.add(at, "the name %q is used twice; names are unique", name)
	}
	seen[name] = true
}

// oneOf checks a word; "" passes where it is optional.
func (c *checker) oneOf(at place, word string, words []string, optional bool) {
	if word == "" && optional || slices.Contains(words, word) {
		return
	}
	c.add(at, "%q is not one of %s%s", word, strings.Join(words, ", "), Hint(word, words))
}

// ref checks that a name refers to something.
func (c *checker) ref(at place, kind, name string, known map[string]bool) {
	if known[name] {
		return
	}
	names := make([]string, 0, len(known))
	for n := range known {
		names = append(names, n)
	}
	slices.Sort(names)
	if len(names) == 0 {
		c.add(at, "there is no %s %q: the policy has none", kind, name)
		return
	}
	c.add(at, "there is no %s %q%s", kind, name, didYouMean(name, names))
}

func (c *checker) notNegative(at place, n int64) {
	if n < 0 {
		c.add(at, "%d is negative; write a number above 0, or leave it out", n)
	}
}

// check finds everything wrong with p but prices that are missing: see unpriced.
func (p *Policy) check() []found {
	c := &checker{p: p, calendars: calendars{}}
	root := place{"", "$"}
	if p.Version != 1 {
		c.add(root.field("version"), "version must be 1, the only one there is")
	}
	backends, models, plans, tenants, surfaces := map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
	for i := range p.Backends {
		c.backend(root.item("backends", i, p.Backends[i].Name), &p.Backends[i], backends)
	}
	for i := range p.Models {
		c.model(root.item("models", i, p.Models[i].Name), &p.Models[i], models, backends)
	}
	for i := range p.Models {
		for j, f := range p.Models[i].Fallback {
			at := root.item("models", i, p.Models[i].Name).item("fallback", j, "")
			if c.ref(at, "model", f, models); f == p.Models[i].Name {
				c.add(at, "a model can't fall back to itself; name another")
			}
		}
	}
	globals, globalBudgets := map[string]bool{}, map[string]bool{}
	for i := range p.Global.Limits {
		c.limit(root.field("global").item("limits", i, p.Global.Limits[i].Name), &p.Global.Limits[i], globals, true)
	}
	for i := range p.Global.Budgets {
		c.budget(root.field("global").item("budgets", i, p.Global.Budgets[i].Name), &p.Global.Budgets[i], globalBudgets, true)
	}
	for i := range p.Plans {
		c.plan(root.item("plans", i, p.Plans[i].Name), &p.Plans[i], plans, globals, globalBudgets)
	}
	c.notify(root.field("notify"), &p.Notify)
	c.models = p.modelsByName()
	c.embedders = p.semanticEmbedders(c.models)
	for i := range p.Backends {
		c.publicNames(root.item("backends", i, p.Backends[i].Name).field("models"), &p.Backends[i], models)
	}
	for i := range p.Surfaces {
		c.surface(root.item("surfaces", i, p.Surfaces[i].Name), &p.Surfaces[i], surfaces, models)
	}
	shares := map[limitSet]bool{}
	for i := range p.Tenants {
		c.shares(root.item("tenants", i, p.Tenants[i].Name), &p.Tenants[i], shares)
		c.tenant(root.item("tenants", i, p.Tenants[i].Name), &p.Tenants[i], tenants, plans)
	}
	c.capacity(root.field("capacity"), &p.Capacity)
	c.ladder(root, models)
	c.routes(root, models, surfaces, tenants)
	ids, hashes := map[string]bool{}, map[string]bool{}
	for i := range p.Keys {
		c.key(root.item("keys", i, p.Keys[i].ID), &p.Keys[i], ids, hashes, tenants, models, surfaces)
	}
	return c.found
}

func (c *checker) backend(at place, b *Backend, seen map[string]bool) {
	c.name(at.field("name"), b.Name, seen)
	u, err := url.Parse(b.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "dns" {
		c.add(at.field("url"), "%q is not http://host:port, https://host:port or dns://name:port", b.URL)
	} else if u.Scheme == "dns" && u.Port() == "" {
		c.add(at.field("url"), "dns://%s needs a port, as in dns://%s:8000", u.Host, u.Hostname())
	}
	c.notNegative(at.field("slots"), int64(b.Slots))
	if (b.CertFile == "") != (b.KeyFile == "") {
		c.add(at.field("cert_file"), "cert_file and key_file go together")
	}
	if b.HealthPath != "" && !strings.HasPrefix(b.HealthPath, "/") {
		c.add(at.field("health_path"), "health_path must begin with /")
	}
	c.oneOf(at.field("cache_salt"), b.CacheSalt, saltNames, true)
	c.served(at, b)
}

func (c *checker) model(at place, m *Model, seen, backends map[string]bool) {
	c.name(at.field("name"), m.Name, seen)
	for i, a := range m.Aliases {
		c.name(at.item("aliases", i, ""), a, seen)
	}
	if len(m.Backends) == 0 {
		c.add(at.field("backends"), "a model needs at least one backend")
	}
	for i, b := range m.Backends {
		c.ref(at.item("backends", i, ""), "backend", b, backends)
	}
	c.notNegative(at.field("context"), m.Context)
	c.notNegative(at.field("default_output_tokens"), m.DefaultOutput)
	c.notNegative(at.field("template_tokens"), m.TemplateTokens)
	c.notNegative(at.field("image_tokens"), m.ImageTokens)
	c.notNegative(at.field("audio_tokens"), m.AudioTokens)
	if m.DefaultTemperature != nil && *m.DefaultTemperature > maxTemperature {
		c.add(at.field("default_temperature"), "a temperature is between 0 and %s", Factor(maxTemperature))
	}
	if c.notNegative(at.field("prefix_minimum"), m.PrefixMinimum); m.PrefixMinimum > maxPrefix {
		c.add(at.field("prefix_minimum"), "a prefix of more than %d tokens is no provider's least", maxPrefix)
	}
	c.oneOf(at.field("affinity"), m.Affinity, affinityNames, true)
	c.prices(at, &m.Price, &m.Flat, m.Gratis)
	for i := range m.Prices {
		d, in := &m.Prices[i], at.item("prices", i, "")
		if d.From.IsZero() {
			c.add(in.field("from"), "prices need the moment from which they hold, as in from: 2027-01-01")
		} else if i > 0 && !time.Time(d.From).After(time.Time(m.Prices[i-1].From)) {
			c.add(in.field("from"), "prices must come in the order of their moments")
		}
		c.prices(in, &d.Price, &d.Flat, d.Gratis)
		c.stated(in, &d.Price, d.Gratis, "these prices replace all of before, and don't say what the model costs")
	}
}

// prices checks what one moment's prices say.
func (c *checker) prices(at place, p *Price, f *Flat, gratis bool) {
	priced := *f != Flat{}
	for _, k := range p.kinds() {
		if k.price != nil && (*k.price < 0 || *k.price > maxUSD) {
			c.add(at.field("price_per_million").field(k.name), "%s is not between 0.00 and %s dollars", *k.price, maxUSD)
		}
		priced = priced || k.price != nil && *k.price != 0
	}
	if gratis && priced {
		c.add(at.field("free"), "a free model has no prices: remove them, or free")
	}
	for _, k := range f.kinds() {
		if *k.price < 0 || *k.price > maxUSD {
			c.add(at.field("price_flat").field(k.name), "%s is not between 0.00 and %s dollars", *k.price, maxUSD)
		}
	}
}

// stated checks that prices say what input and output cost.
func (c *checker) stated(at place, p *Price, gratis bool, why string) {
	field := at.field("price_per_million")
	switch {
	case gratis || p.Input != nil && p.Output != nil:
		return
	case p.Input != nil:
		field = field.field("output")
	case p.Output != nil:
		field = field.field("input")
	}
	c.add(field, `%s: state its input and output, where it has none as "0.00", or write free: true`, why)
}

// unpriced finds the models of which nothing says what they cost, where money is limited: they would be
// free by an oversight.
func (p *Policy) unpriced() []found {
	limit := p.limitsMoney()
	if limit == "" {
		return nil
	}
	c := &checker{p: p}
	for i := range p.Models {
		m := &p.Models[i]
		c.stated(place{"", "$"}.item("models", i, m.Name), &m.Price, m.Gratis,
			fmt.Sprintf("%s limits money, and nothing says what the model %q costs", limit, m.Name))
	}
	return c.found
}

// limitsMoney names the first budget, or limit in dollars; "" where there is none.
func (p *Policy) limitsMoney() string {
	first := func(at place, ls []Limit, bs []Budget) string {
		if len(bs) > 0 {
			return at.item("budgets", 0, bs[0].Name).human
		}
		if i := slices.IndexFunc(ls, func(l Limit) bool { return l.Unit == "usd" }); i >= 0 {
			return at.item("limits", i, ls[i].Name).human
		}
		return ""
	}
	root := place{"", "$"}
	for i := range p.Plans {
		if s := first(root.item("plans", i, p.Plans[i].Name), p.Plans[i].Limits, p.Plans[i].Budgets); s != "" {
			return s
		}
	}
	return first(root.field("global"), p.Global.Limits, p.Global.Budgets)
}

func (c *checker) notify(at place, n *Notify) {
	if n.Webhook != "" {
		if u, err := url.Parse(n.Webhook); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			c.add(at.field("webhook"), "a webhook is an http:// or https:// URL") // not quoted: it may hold a secret
		} else if u.User != nil {
			c.add(at.field("webhook"), "a policy holds no secrets: put the token into an environment variable of the nodes, and its name into token_env")
		}
	}
	switch {
	case n.TokenEnv == "":
	case n.Webhook == "":
		c.add(at.field("token_env"), "a token without a webhook does nothing; remove it, or write webhook: https://…")
	case !envPattern.MatchString(n.TokenEnv):
		c.add(at.field("token_env"), "name an environment variable, as in BUDGET_HOOK_TOKEN")
	}
}

func (c *checker) plan(at place, p *Plan, seen, globals, globalBudgets map[string]bool) {
	c.name(at.field("name"), p.Name, seen)
	names, budgets := maps.Clone(globals), maps.Clone(globalBudgets)
	for i := range p.Limits {
		c.limit(at.item("limits", i, p.Limits[i].Name), &p.Limits[i], names, false)
	}
	if n := len(p.Limits) + len(globals); n > limiter.MaxCharges {
		c.add(at.field("limits"), "%d limits apply to one request, with the global ones; %d are allowed", n, limiter.MaxCharges)
	}
	for i := range p.Budgets {
		c.budget(at.item("budgets", i, p.Budgets[i].Name), &p.Budgets[i], budgets, false)
	}
	if n := len(p.Budgets) + len(globalBudgets); n > maxBudgets {
		c.add(at.field("budgets"), "%d budgets apply to one request, with the global ones; %d are allowed", n, maxBudgets)
	}
	if p.SpreadUsers && !slices.ContainsFunc(p.Limits, func(l Limit) bool { return l.spreads() }) {
		c.add(at.field("spread_users"), "spread_users is for limits whose scope names user, and the plan has none: remove it, or write such a scope")
	}
	c.oneOf(at.field("oversize"), p.Oversize, oversizes, true)
	c.oneOf(at.field("cached"), p.Cached, cachedNames, true)
	if time.Duration(p.Timeout) > time.Hour {
		c.add(at.field("timeout"), "a timeout above 1h is not allowed")
	}
	for i, s := range p.Ramp {
		if s.Factor == 0 {
			c.add(at.item("ramp", i, "").field("factor"), "a factor must be above 0; `suspended: true` stops a tenant")
		}
		if i > 0 && s.After <= p.Ramp[i-1].After {
			c.add(at.item("ramp", i, ""), "steps must come in the order of their age")
		}
	}
}

// shares checks that a tenant's limits hold at every step of its ramp.
func (c *checker) shares(at place, t *Tenant, seen map[limitSet]bool) {
	i := slices.IndexFunc(c.p.Plans, func(p Plan) bool { return p.Name == t.Plan })
	if i < 0 {
		return
	}
	p := &c.p.Plans[i]
	factors := []Factor{factorOne}
	if len(p.Ramp) > 0 {
		factors = factors[:0]
		for _, s := range p.Ramp {
			factors = append(factors, s.Factor)
		}
	}
	for _, f := range factors {
		set := limitSet{plan: p, share: product(f, t.standing())}
		if f == 0 || t.standing() == 0 || seen[set] {
			continue
		}
		seen[set] = true
		for j := range p.Limits {
			l := &p.Limits[j]
			spec, _, err := l.compile()
			if err != nil || l.tenantless() {
				continue
			}
			if set.share.scale(&spec); spec.Validate() != nil {
				c.add(at.field("plan"), "with the ramp's factor %v and the standing %v the limit %q can't hold: %v", f, t.standing(), l.Name, spec.Validate())
			}
		}
	}
}

func (c *checker) limit(at place, l *Limit, seen map[string]bool, global bool) {
	c.name(at.field("name"), l.Name, seen)
	c.scope(at.field("scope"), l.Scope, "limit", global)
	c.oneOf(at.field("unit"), l.Unit, unitNames, false)
	c.oneOf(at.field("unavailable"), l.Unavailable, unavailables, true)
	if time.Duration(l.Wait) > time.Minute {
		c.add(at.field("wait"), "a wait above 1m is not allowed: clients give up before")
	}
	if l.Wait > 0 && (l.Shadow || l.Unit == "concurrency") {
		c.add(at.field("wait"), "a wait does nothing on a shadow limit, which never refuses, nor on concurrency, which no wait gives back; remove it")
	}
	if _, field, err := l.compile(); err != nil {
		c.add(at.field(field), "%v", err)
	}
}

// scope checks what a limit or a budget counts apart.
func (c *checker) scope(at place, scope, what string, global bool) {
	parts := strings.Split(scope, "+")
	for _, part := range parts {
		c.oneOf(at, part, scopeParts, false)
	}
	if slices.Sort(parts); len(slices.Compact(slices.Clone(parts))) < len(parts) {
		c.add(at, "%q names a part twice", scope)
	}
	if slices.Contains(parts, "global") && len(parts) > 1 {
		c.add(at, "global can't be combined")
	}
	if global && slices.ContainsFunc(parts, func(s string) bool { return s != "global" && s != "model" }) {
		c.add(at, "a global %s has scope global or model; put the others into plans", what)
	}
}

func (c *checker) tenant(at place, t *Tenant, seen, plans map[string]bool) {
	c.name(at.field("name"), t.Name, seen)
	c.ref(at.field("plan"), "plan", t.Plan, plans)
	c.oneOf(at.field("class"), t.Class, classNames, true)
	if t.Standing != nil && *t.Standing == 0 {
		c.add(at.field("standing"), "a standing must be above 0; `suspended: true` stops a tenant")
	}
	cl, in := t.ContentLog, at.field("content_log")
	c.oneOf(in.field("mode"), cl.Mode, contentModes, true)
	if cl.Sample != nil && *cl.Sample > factorOne {
		c.add(in.field("sample"), "a sample is a share between 0 and 1")
	}
	if cl.Mode == "sample" && cl.Sample == nil {
		c.add(in.field("sample"), "mode sample needs a share, as in sample: 0.1")
	}
	for i, r := range cl.Redact {
		if _, err := regexp.Compile(r); err != nil {
			c.add(in.item("redact", i, ""), "neither one of %s nor a regular expression: %v", strings.Join(redactions, ", "), err)
		} else if wordPattern.MatchString(r) { // a slip in a name would else redact nothing
			c.oneOf(in.item("redact", i, ""), r, redactions, false)
		}
	}
}

func (c *checker) key(at place, k *Key, ids, hashes, tenants, models, surfaces map[string]bool) {
	c.name(at.field("id"), k.ID, ids)
	c.ref(at.field("tenant"), "tenant", k.Tenant, tenants)
	if _, err := ParseHash(k.Hash); err != nil {
		c.add(at.field("hash"), "%v", err)
	} else if hashes[strings.ToLower(k.Hash)] {
		c.add(at.field("hash"), "another key has the same hash")
	}
	hashes[strings.ToLower(k.Hash)] = true
	c.oneOf(at.field("class"), k.Class, classNames, true)
	for _, l := range [...]struct {
		name  string
		names []string
	}{{"models", k.Models}, {"routes", k.Routes}} {
		if l.names != nil && len(l.names) == 0 {
			c.add(at.field(l.name), "an empty list would allow none and an absent one allows all; leave it out, or revoke the key")
		}
	}
	for i, m := range k.Models {
		c.ref(at.item("models", i, ""), "model", m, models)
	}
	for i, r := range k.Routes {
		c.oneOf(at.item("routes", i, ""), r, RouteNames, false)
	}
	for i, s := range k.Surfaces {
		if s != "*" {
			c.ref(at.item("surfaces", i, ""), "surface", s, surfaces)
		}
	}
	for _, l := range [...]struct{ field, text string }{{"user", k.User}, {"name", k.Name}} {
		if len(l.text) > maxLabel || !utf8.ValidString(l.text) || strings.ContainsFunc(l.text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			c.add(at.field(l.field), "a key's %s is at most %d printable bytes", l.field, maxLabel)
		}
	}
	if n := len(k.Models) + len(k.Routes) + len(k.Surfaces); n > maxScope {
		c.add(at, "a key is held to at most %d models, routes and surfaces, not %d", maxScope, n)
	}
	if !k.Expires.IsZero() && time.Time(k.Expires).Unix() <= 0 {
		c.add(at.field("expires"), "a key expires after 1970; `revoked: true` stops one")
	}
}

// compile turns a limit as written into arithmetic. On an error it names the field.
func (l *Limit) compile() (spec limiter.Limit, field string, err error) {
	if l.Unit == "concurrency" {
		if l.Rate != "" || l.Burst != "" || l.Algorithm != "" {
			return spec, "rate", fmt.Errorf("concurrency has max, and neither rate, burst nor algorithm")
		}
		spec = limiter.Limit{Algorithm: limiter.Semaphore, Burst: l.Max}
		return spec, "max", spec.Validate()
	}
	if l.Max != 0 {
		return spec, "max", fmt.Errorf("max is for the unit concurrency; write rate and burst")
	}
	if l.Algorithm != "" {
		if spec.Algorithm, err = limiter.ParseAlgorithm(l.Algorithm); err != nil {
			return spec, "algorithm", err
		}
	}
	if spec.Rate, err = l.parseRate(); err != nil {
		return spec, "rate", err
	}
	if spec.Algorithm == limiter.GCRA {
		spec.Burst = spec.Rate.Count
	}
	if l.Burst != "" {
		if spec.Burst, err = l.parseAmount(string(l.Burst)); err != nil {
			return spec, "burst", err
		}
	}
	return spec, "rate", spec.Validate()
}

func (l *Limit) parseRate() (limiter.Rate, error) {
	if l.Rate == "" {
		return limiter.Rate{}, fmt.Errorf("a rate is needed, as in 60000/min")
	}
	if l.Unit != "usd" {
		return limiter.ParseRate(string(l.Rate))
	}
	count, period, ok := strings.Cut(string(l.Rate), "/")
	if !ok {
		return limiter.Rate{}, fmt.Errorf("rate %q has no period: write dollars/period, as in 10.00/min", l.Rate)
	}
	usd, err := ParseUSD(count)
	if err != nil {
		return limiter.Rate{}, err
	}
	r, err := limiter.ParseRate("1/" + period)
	r.Count = int64(usd)
	return r, err
}

func (l *Limit) parseAmount(s string) (int64, error) {
	if l.Unit == "usd" {
		usd, err := ParseUSD(s)
		return int64(usd), err
	}
	r, err := limiter.ParseRate(s + "/s")
	if err != nil {
		return 0, fmt.Errorf("burst %q is not a whole number of %s between 1 and %d", s, l.Unit, int64(limiter.MaxUnits))
	}
	return r.Count, nil
}

// ParseHash reads what FormatHash writes.
func ParseHash(s string) (h [32]byte, err error) {
	const form = "write sha256: and the 64 hexadecimal digits that `headgate keys create` prints"
	digits, ok := strings.CutPrefix(s, "sha256:")
	if !ok || len(digits) != 64 {
		return h, fmt.Errorf("not a key's hash: %s", form)
	}
	if _, err = hex.Decode(h[:], []byte(digits)); err != nil {
		return h, fmt.Errorf("not a key's hash (%w): %s", err, form)
	}
	return h, nil
}
