package ledger

import (
	"cmp"
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
	Limits []ResolvedLimit // cheapest first; shared, never to be changed

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
	tenants := make(map[string]*Caller, len(p.Tenants)) // without key and hash
	sets := map[limitSet][]ResolvedLimit{}
	for i := range p.Tenants {
		t, plan := &p.Tenants[i], plans[p.Tenants[i].Plan]
		if plan == nil {
			return nil, fmt.Errorf("tenant %s: there is no plan %q", t.Name, t.Plan)
		}
		factor, next := plan.ramp(t, now)
		set := limitSet{plan, product(factor, t.standing())}
		limits, ok := sets[set]
		if !ok {
			if limits, err = set.resolve(revision, shared); err != nil {
				return nil, err
			}
			sets[set] = limits
		}
		if !next.IsZero() && (ix.NextRamp.IsZero() || next.Before(ix.NextRamp)) {
			ix.NextRamp = next
		}
		tenants[t.Name] = &Caller{Tenant: t, Plan: plan, Limits: limits}
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
			if c, ok := ix.callers[h]; ok {
				return nil, fmt.Errorf("key %s is the same as key %s", k.ID, c.Key.ID)
			}
			ix.callers[h] = &Caller{Key: k, Tenant: t.Tenant, Plan: t.Plan, Limits: t.Limits, hash: h}
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

// limitSet is what decides a tenant's limits. Tenants that agree in it share them, as rules:
// the buckets are each tenant's own.
type limitSet struct {
	plan  *Plan
	share fraction // of what the plan gives: the ramp's factor times the standing
}

// resolve gives the limits, cheapest first.
func (set limitSet) resolve(revision uint64, shared sharedLimits) ([]ResolvedLimit, error) {
	p := set.plan
	limits := make([]ResolvedLimit, 0, len(p.Limits)+len(shared.global))
	for i := range p.Limits {
		l := &p.Limits[i]
		r, ok := shared.plan[l]
		if !ok {
			var err error
			if r, err = l.resolve(revision, l.Name); err != nil {
				return nil, fmt.Errorf("plans[%s].limits[%s]: %w", p.Name, l.Name, err)
			}
			set.share.scale(r.Spec)
			if err = r.Spec.Validate(); err != nil {
				return nil, fmt.Errorf("plans[%s].limits[%s], scaled by %d/%d: %w", p.Name, l.Name, set.share.num, set.share.den, err)
			}
		}
		limits = append(limits, r)
	}
	limits = append(limits, shared.global...)
	oversize := limiter.Refuse
	if p.Oversize == "debt" {
		oversize = limiter.Debt
	}
	for i := range limits {
		limits[i].Oversize = oversize
	}
	slices.SortStableFunc(limits, func(a, b ResolvedLimit) int {
		return cmp.Or(slices.Index(unitNames, a.Unit)-slices.Index(unitNames, b.Unit), strings.Compare(a.Name, b.Name))
	})
	return limits, nil
}

// scale changes what a limit admits: rate and burst or count, never below 1. The period
// of a window stays what it is.
func (f fraction) scale(l *limiter.Limit) {
	switch {
	case f.num == f.den:
	case l.Algorithm == limiter.Semaphore:
		l.Burst = f.of(l.Burst)
	case l.Algorithm == limiter.GCRA:
		l.Rate, l.Burst = f.ofRate(l.Rate), f.of(l.Burst)
	default:
		l.Rate.Count, l.Burst = f.of(l.Rate.Count), 0
	}
}

// standing is the operator's factor for a tenant.
func (t *Tenant) standing() Factor {
	if t.Standing == nil {
		return factorOne
	}
	return *t.Standing
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
