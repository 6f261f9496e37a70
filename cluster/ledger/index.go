package ledger

import (
	"crypto/subtle"
	"fmt"
	"slices"
	"strings"
	"time"

	"headgate/limiter"
)

// Index is one revision of a policy, ready to resolve keys. It is immutable and safe for
// concurrent use.
type Index struct {
	Policy   *Policy
	Revision uint64
	// NextRamp is when a ramp step changes a limit next; zero if none will.
	NextRamp time.Time

	callers map[[32]byte]*Caller
}

// Caller is what a key resolves to. Pointers lead into the policy.
type Caller struct {
	Key    *Key
	Tenant *Tenant
	Plan   *Plan
	Limits []ResolvedLimit // cheapest first; shared by all keys of the tenant

	hash [32]byte
}

// ResolvedLimit is a limit as it applies to a tenant.
type ResolvedLimit struct {
	*Limit
	Spec     *limiter.Limit // with the ramp applied
	Bucket   string         // what its bucket is called: qualified by the plan where tenants share it
	Oversize limiter.Oversize
}

// Index builds the index of revision as of now. extra are keys beyond the policy's own,
// such as that of a development node.
func (p *Policy) Index(now time.Time, revision uint64, extra ...Key) (*Index, error) {
	ix := &Index{Policy: p, Revision: revision, callers: make(map[[32]byte]*Caller, len(p.Keys)+len(extra))}
	plans := make(map[string]*Plan, len(p.Plans))
	for i := range p.Plans {
		plans[p.Plans[i].Name] = &p.Plans[i]
	}
	shared, err := p.shared(revision)
	if err != nil {
		return nil, err
	}
	type resolved struct {
		tenant *Tenant
		limits []ResolvedLimit
	}
	tenants := make(map[string]resolved, len(p.Tenants))
	for i := range p.Tenants {
		t := &p.Tenants[i]
		limits, next, err := plans[t.Plan].resolve(t, now, revision, shared)
		if err != nil {
			return nil, err
		}
		if !next.IsZero() && (ix.NextRamp.IsZero() || next.Before(ix.NextRamp)) {
			ix.NextRamp = next
		}
		tenants[t.Name] = resolved{t, limits}
	}
	for _, keys := range [...][]Key{p.Keys, extra} {
		for i := range keys {
			k := &keys[i]
			h, err := ParseHash(k.Hash)
			if err != nil {
				return nil, fmt.Errorf("key %s: %w", k.ID, err)
			}
			t, ok := tenants[k.Tenant]
			if !ok {
				return nil, fmt.Errorf("key %s: there is no tenant %q", k.ID, k.Tenant)
			}
			ix.callers[h] = &Caller{Key: k, Tenant: t.tenant, Plan: plans[t.tenant.Plan], Limits: t.limits, hash: h}
		}
	}
	return ix, nil
}

// Lookup finds the caller of a key by its hash, revoked and expired ones too. The map
// look-up may take a time that depends on the hash; that tells an attacker nothing
// about a key, whose SHA-256 he cannot steer towards a known one. The comparison that
// decides takes constant time.
func (ix *Index) Lookup(hash [32]byte) (*Caller, bool) {
	c, ok := ix.callers[hash]
	if !ok || subtle.ConstantTimeCompare(c.hash[:], hash[:]) != 1 {
		return nil, false
	}
	return c, true
}

// sharedLimits are those whose buckets belong to no tenant, resolved once for all.
type sharedLimits struct {
	global []ResolvedLimit
	plan   map[*Limit]ResolvedLimit
}

func (p *Policy) shared(revision uint64) (sharedLimits, error) {
	s := sharedLimits{plan: map[*Limit]ResolvedLimit{}}
	for i := range p.Global.Limits {
		l := &p.Global.Limits[i]
		r, err := l.resolve(revision, l.Name)
		if err != nil {
			return s, fmt.Errorf("global.limits[%s]: %w", l.Name, err)
		}
		s.global = append(s.global, r)
	}
	for i := range p.Plans {
		for j := range p.Plans[i].Limits {
			l := &p.Plans[i].Limits[j]
			if !l.tenantless() {
				continue
			}
			r, err := l.resolve(revision, p.Plans[i].Name+"/"+l.Name)
			if err != nil {
				return s, fmt.Errorf("plans[%s].limits[%s]: %w", p.Plans[i].Name, l.Name, err)
			}
			s.plan[l] = r
		}
	}
	return s, nil
}

func (l *Limit) resolve(revision uint64, bucket string) (ResolvedLimit, error) {
	spec, _, err := l.compile()
	spec.Revision = revision
	return ResolvedLimit{Limit: l, Spec: &spec, Bucket: bucket}, err
}

// tenantless limits have one bucket for all tenants.
func (l *Limit) tenantless() bool { return l.Scope == "global" || l.Scope == "model" }

// resolve gives the limits of a tenant, cheapest first, and when its ramp moves on.
func (p *Plan) resolve(t *Tenant, now time.Time, revision uint64, shared sharedLimits) ([]ResolvedLimit, time.Time, error) {
	factor, next := p.ramp(t, now)
	standing := factorOne
	if t.Standing != nil {
		standing = *t.Standing
	}
	oversize := limiter.Refuse
	if p.Oversize == "debt" {
		oversize = limiter.Debt
	}
	limits := make([]ResolvedLimit, 0, len(p.Limits)+len(shared.global))
	for i := range p.Limits {
		l := &p.Limits[i]
		r, ok := shared.plan[l]
		if !ok {
			var err error
			if r, err = l.resolve(revision, l.Name); err != nil {
				return nil, next, fmt.Errorf("plans[%s].limits[%s]: %w", p.Name, l.Name, err)
			}
			rampLimit(r.Spec, factor, standing)
		}
		limits = append(limits, r)
	}
	limits = append(limits, shared.global...)
	for i := range limits {
		limits[i].Oversize = oversize
	}
	slices.SortStableFunc(limits, func(a, b ResolvedLimit) int {
		if d := slices.Index(unitNames, a.Unit) - slices.Index(unitNames, b.Unit); d != 0 {
			return d
		}
		return strings.Compare(a.Name, b.Name)
	})
	return limits, next, nil
}

// rampLimit scales what a limit admits: rate and burst, never below 1.
func rampLimit(l *limiter.Limit, fs ...Factor) {
	if l.Algorithm == limiter.GCRA || l.Algorithm == limiter.Semaphore {
		l.Burst = min(scale(l.Burst, fs...), limiter.MaxUnits)
	}
	if l.Algorithm != limiter.Semaphore {
		l.Rate.Count = min(scale(l.Rate.Count, fs...), limiter.MaxUnits)
		if l.Algorithm != limiter.GCRA {
			l.Burst = 0
		}
	}
}

// ramp is the factor of a tenant's age, and when it changes next. Before the first step
// and without a `since` the first step and the last apply: an account of unknown age is an old one.
func (p *Plan) ramp(t *Tenant, now time.Time) (Factor, time.Time) {
	if len(p.Ramp) == 0 {
		return factorOne, time.Time{}
	}
	if t.Since.IsZero() {
		return p.Ramp[len(p.Ramp)-1].Factor, time.Time{}
	}
	since := time.Time(t.Since)
	factor := p.Ramp[0].Factor
	for _, s := range p.Ramp {
		at := since.Add(time.Duration(s.After))
		if at.After(now) {
			return factor, at
		}
		factor = s.Factor
	}
	return factor, time.Time{}
}
