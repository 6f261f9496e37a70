package node

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headgate/cluster/ledger"
	"headgate/proxy"
	"headgate/proxy/contentlog"
	"headgate/proxy/openai"
	"headgate/proxy/upstream"
)

// backends are the policy's, with their keys from the environment.
func backends(p *ledger.Policy) []upstream.Backend {
	serves := map[string][]string{}
	for _, m := range p.Models {
		for _, b := range m.Backends {
			serves[b] = append(serves[b], m.Name)
		}
	}
	out := make([]upstream.Backend, 0, len(p.Backends))
	for _, b := range p.ResolvedBackends() {
		kind, _ := upstream.ParseKind(b.Kind) // validated
		u := upstream.Backend{
			Name: b.Name, URL: b.URL, Slots: b.Slots, CAFile: b.CAFile, CertFile: b.CertFile, KeyFile: b.KeyFile,
			ServerName: b.ServerName, HealthPath: b.HealthPath, Kind: kind, Serves: serves[b.Name], Overflow: b.Overflow, SlotTokens: b.SlotTokens,
			APIKeyFile: b.APIKeyFile, Models: b.Models, MetricsPath: cmp.Or(b.MetricsPath, "none"),
			ConnectTimeout: b.ConnectTimeout, FirstByteTimeout: b.FirstByteTimeout, IdleTimeout: b.IdleTimeout,
		}
		if b.APIKeyEnv != "" {
			u.APIKey = os.Getenv(b.APIKeyEnv)
		}
		out = append(out, u)
	}
	return out
}

// contentPolicies say of every tenant what is kept of its requests, if only nothing.
func contentPolicies(p *ledger.Policy) map[string]contentlog.Policy {
	out := make(map[string]contentlog.Policy, len(p.Tenants))
	for _, t := range p.Tenants {
		c := t.ContentLog
		cp := contentlog.Policy{Mode: contentlog.Mode(c.Mode), Retention: time.Duration(c.Retention), Redact: c.Redact, Dir: c.Path}
		if c.Sample != nil {
			cp.SampleMillionths = int64(*c.Sample)
		}
		out[t.Name] = cp
	}
	return out
}

// compiler turns an index into what the proxy works with.
type compiler struct {
	lastUsed sync.Map // key id → *atomic.Int64; as many as there are keys
}

// snapshot is what a policy means to the front door. secret is the cluster's.
func (c *compiler) snapshot(ix *ledger.Index, secret []byte) *proxy.Snapshot {
	s := &proxy.Snapshot{Revision: ix.Revision, CheckKey: ledger.CheckFormat, Models: map[string]*proxy.Model{}, Salted: map[string]bool{}}
	for _, b := range ix.Policy.Backends {
		if b.CacheSalt == "tenant" {
			s.Salted[b.Name] = true
		}
	}
	for i := range ix.Models {
		m := model(&ix.Models[i])
		s.Models[m.Name] = m
		s.ModelNames = append(s.ModelNames, m.Name)
		for _, a := range ix.Models[i].Aliases {
			s.Models[a] = m
		}
	}
	s.Surfaces = surfaces(ix, s.Models)
	s.Routes, s.KeepAlive = routes(ix), ix.Capacity.KeepAlive
	var callers sync.Map // *ledger.KeyRecord → *proxy.Caller, each made when first seen
	s.Lookup = func(hash [32]byte) (*proxy.Caller, bool) {
		lc, ok := ix.Lookup(hash)
		if !ok {
			return nil, false
		}
		if pc, ok := callers.Load(lc.Key); ok {
			return pc.(*proxy.Caller), true
		}
		fresh := c.caller(s, lc)
		if len(s.Salted) > 0 {
			fresh.CacheSalt = cacheSalt(secret, fresh.Tenant)
		}
		pc, _ := callers.LoadOrStore(lc.Key, fresh)
		return pc.(*proxy.Caller), true
	}
	return s
}

// cacheSalt keeps the prefixes of a tenant apart from others' in a backend's cache. Nobody who does
// not know the secret can guess another's.
func cacheSalt(secret []byte, tenant string) string {
	h := hmac.New(sha256.New, secret)
	_, _ = h.Write([]byte("prefix cache\x00" + tenant)) // never fails
	return base64.RawURLEncoding.EncodeToString(h.Sum(nil))
}

func model(m *ledger.Model) *proxy.Model {
	pm := &proxy.Model{
		Name: m.Name, Upstream: m.Upstream, Backends: m.Backends, Context: m.Context, DefaultOutput: m.DefaultOutput,
		TemplateTokens: m.TemplateTokens, ImageTokens: m.ImageTokens, AudioTokens: m.AudioTokens, BytesPerToken: int64(m.BytesPerToken) / 1000, Fallback: m.Fallback,
		Free: m.Free(), Version: m.Version, DefaultTemperature: m.Temperature(),
		Cost: func(u openai.Usage, images, audioSeconds int64) int64 {
			return int64(m.Cost(ledger.Usage{Input: u.Input, CachedInput: u.CachedInput, CacheWrite: u.CacheWrite, CacheWrite1h: u.CacheWrite1h, Output: u.Output, Images: images, AudioSeconds: audioSeconds}))
		},
	}
	pm.UpperBound = func(input, output, images, audioSeconds int64) int64 {
		return int64(m.UpperBound(input, output, images, audioSeconds))
	}
	pm.Affinity = [...]proxy.Affinity{proxy.ByPrefix, proxy.BySession, proxy.ByNothing}[slices.Index([]string{"prefix", "session", "none"}, m.AffinityOf())]
	if pm.Upstream == "" {
		pm.Upstream = m.Name
	}
	return pm
}

func (c *compiler) caller(s *proxy.Snapshot, lc ledger.Caller) *proxy.Caller {
	k, t := lc.Key, lc.Tenant
	pc := &proxy.Caller{
		KeyID: k.ID, Tenant: t.Name, User: k.User, Tier: lc.Plan.Tier,
		Revoked: k.Revoked, Suspended: t.Suspended, Expires: k.Expires(),
		Models: c.models(s, k.Models), Routes: set(k.Routes), Surfaces: set(k.Surfaces), AssertUser: k.AssertUser,
		Timeout: time.Duration(lc.Plan.Timeout), LastUsed: c.used(k.ID),
		Content: t.ContentLog.Mode != "" && t.ContentLog.Mode != "off",
	}
	pc.AnySurface = pc.Surfaces["*"]
	if len(k.Surfaces) == 1 && !pc.AnySurface {
		pc.OnlySurface = k.Surfaces[0]
	}
	pc.CachedMetered = lc.Plan.Cached == "metered"
	pc.Class, _ = proxy.ParseClass(t.Class) // validated; absent is the most urgent
	if class, ok := proxy.ParseClass(k.Class); ok {
		pc.Class = max(pc.Class, class)
	}
	for _, l := range lc.Limits {
		scope, _ := proxy.ParseScope(l.Scope) // validated
		unit, _ := proxy.ParseUnit(l.Unit)
		mode, _ := proxy.ParseMode(l.Unavailable) // absent: local
		pc.Limits = append(pc.Limits, proxy.Limit{
			Name: l.Name, Bucket: l.Bucket, Scope: scope, Unit: unit, Spec: l.Whole, Wait: time.Duration(l.Wait), Shadow: l.Shadow, Oversize: l.Oversize,
			Spread: l.Spread, Unavailable: mode, Private: l.Private,
		})
	}
	for i := range lc.Budgets {
		pc.Budgets = append(pc.Budgets, proxyBudget(&lc.Budgets[i]))
	}
	return pc
}

func proxyBudget(b *ledger.ResolvedBudget) proxy.Budget {
	scope, _ := proxy.ParseScope(b.Scope) // validated
	pb := proxy.Budget{
		Name: b.Name, Bucket: b.Bucket, Scope: scope, Strict: b.Strict, Amount: b.Terms.Amount, Emergency: int64(b.EmergencyPerNode),
		Terms: budgetTerms(&b.Terms), Window: b.Terms.Window, Period: b.Calendar.At,
	}
	if len(b.Terms.Alerts) > 0 {
		pb.Alert = b.Terms.Alerts[0]
	}
	return pb
}

// models a key is held to, by their own names where it names aliases; nil for all.
func (c *compiler) models(s *proxy.Snapshot, names []string) map[string]bool {
	m := set(names)
	for n := range m {
		if known := s.Models[n]; known != nil {
			m[known.Name] = true
		}
	}
	return m
}

func (c *compiler) used(keyID string) *atomic.Int64 {
	v, ok := c.lastUsed.Load(keyID)
	if !ok {
		v, _ = c.lastUsed.LoadOrStore(keyID, new(atomic.Int64))
	}
	return v.(*atomic.Int64)
}

// allUsed is when keys were used last on this node, in Unix seconds.
func (c *compiler) allUsed() map[string]int64 {
	out := map[string]int64{}
	c.lastUsed.Range(func(id, at any) bool {
		if t := at.(*atomic.Int64).Load(); t > 0 {
			out[id.(string)] = t
		}
		return true
	})
	return out
}

// set of names; nil for none, which the proxy takes for all.
func set(names []string) map[string]bool {
	if len(names) == 0 {
		return nil
	}
	m := make(map[string]bool, len(names))
	for _, n := range names {
		m[n] = true
	}
	return m
}
