package ledger

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"headgate/limiter"
)

// Numbers say by what limits are numbered, so that where two meet in one bucket the newer binds.
type Numbers struct {
	// Policy is PolicyRevision.Number, alike on every node: the Revision of a Whole is
	// Policy<<20 plus the steps of its tenant's ramp that have begun, 0 for limits whose buckets
	// belong to no tenant.
	Policy uint64
	// Local counts this process's indexes: the Revision of a Private, which differs from node
	// to node and changes with its share.
	Local uint64
}

// whole is the revision of a limit with so many steps of a ramp begun.
func (n Numbers) whole(steps int) uint64 {
	const bits = 20 // above maxMarks, and so above the steps of any ramp
	return n.Policy<<bits | uint64(min(steps, 1<<bits-1))
}

// Index is one revision of a policy, ready to resolve keys. It never changes itself, and is
// safe for concurrent use; the keys that it resolves are those of the live table.
type Index struct {
	Policy   *Policy
	Revision uint64
	Share    Share
	// Models are the policy's, in its order, each with the prices that are in force as its own. Policy.Models
	// have the first ones.
	Models []Model
	// Surfaces are the policy's by name, compiled; never to be changed.
	Surfaces map[string]*ResolvedSurface
	// Backends and Routes are the policy's in its order, Ladder the rungs that it names in the ladder's; never
	// to be changed, as Capacity.
	Backends []ResolvedBackend
	Capacity ResolvedCapacity
	Ladder   []ResolvedLadderRung
	Routes   []ResolvedRoute
	// NextChange is when a step of a ramp changes a limit or a price changes next; zero if never.
	NextChange time.Time

	keys    *Keys
	extra   *Keys
	tenants map[string]*Caller // without a key
}

// Caller is what a key resolves to. Pointers lead into the policy and the table of keys.
type Caller struct {
	// Key is the same pointer for as long as the key is unchanged, under every index: what is
	// derived from a caller may be kept by it for the life of the index.
	Key    *KeyRecord
	Tenant *Tenant
	Plan   *Plan
	Limits []ResolvedLimit // cheapest first; shared, never to be changed
	// Budgets are the plan's in the order of the policy, and the global ones after them; shared as Limits are.
	Budgets []ResolvedBudget
}

// ResolvedLimit is a limit as it applies to a tenant.
type ResolvedLimit struct {
	*Limit
	// Whole is the limit for all of the cluster, with ramp and standing applied. Its Revision means
	// the same on every node.
	Whole *limiter.Limit
	// Private is this node's share of Whole: of what decides while nobody else can be asked. nil
	// where the share is nothing.
	Private  *limiter.Limit
	Bucket   string // what its bucket is called: qualified by the plan where tenants share it
	Oversize limiter.Oversize
	// Spread: the bucket is placed by tenant and user.
	Spread bool
}

// Index builds the index of revision as of now, for a node that holds share of every limit.
// keys resolves live, so that a new or revoked key needs no new index; nil is an empty
// table. extra are keys beyond it, such as that of a development node; where one has the hash of a key of
// the table, the table's counts. The policy's own list of keys plays no part: see Prepare.
//
// It is IndexAt where nothing is numbered but by revision: for a policy that is looked at by itself.
func (p *Policy) Index(now time.Time, revision uint64, share Share, keys *Keys, extra ...Key) (*Index, error) {
	return p.IndexAt(now, Numbers{Policy: revision, Local: revision}, share, keys, extra...)
}

// IndexAt is Index for a policy in force; Index.Revision is numbers.Local.
func (p *Policy) IndexAt(now time.Time, numbers Numbers, share Share, keys *Keys, extra ...Key) (*Index, error) {
	if err := share.validate(); err != nil {
		return nil, err
	}
	ix := &Index{Policy: p, Revision: numbers.Local, Share: share, keys: keys, tenants: make(map[string]*Caller, len(p.Tenants))}
	plans := make(map[string]*Plan, len(p.Plans))
	for i := range p.Plans {
		plans[p.Plans[i].Name] = &p.Plans[i]
	}
	by := cutting{numbers, share}
	shared, err := p.shared(by)
	if err != nil {
		return nil, err
	}
	budgets, err := p.budgets(numbers.whole(0))
	if err != nil {
		return nil, err
	}
	ix.price(now)
	models := p.modelsByName()
	ix.Surfaces = make(map[string]*ResolvedSurface, len(p.Surfaces))
	for i := range p.Surfaces {
		ix.Surfaces[p.Surfaces[i].Name] = p.Surfaces[i].resolve(models)
	}
	ix.admission(models)
	sets := map[limitSet][]ResolvedLimit{}
	for i := range p.Tenants {
		t, plan := &p.Tenants[i], plans[p.Tenants[i].Plan]
		if plan == nil {
			return nil, fmt.Errorf("tenant %s: there is no plan %q", t.Name, t.Plan)
		}
		factor, steps, next := plan.ramp(t, now)
		set := limitSet{plan, product(factor, t.standing()), steps}
		limits, ok := sets[set]
		if !ok {
			if limits, err = set.resolve(by, shared); err != nil {
				return nil, err
			}
			sets[set] = limits
		}
		ix.sooner(next)
		ix.tenants[t.Name] = &Caller{Tenant: t, Plan: plan, Limits: limits, Budgets: budgets[plan]}
	}
	for i := range extra {
		if _, ok := ix.tenants[extra[i].Tenant]; !ok {
			return nil, fmt.Errorf("key %s: there is no tenant %q", extra[i].ID, extra[i].Tenant)
		}
	}
	if len(extra) > 0 {
		if ix.extra, err = KeysOf(extra...); err != nil {
			return nil, err
		}
	}
	return ix, nil
}

// admission compiles how requests come to backends. models are by name and alias.
func (ix *Index) admission(models map[string]*Model) {
	p := ix.Policy
	ix.Capacity = p.Capacity.resolve()
	ix.Backends = p.ResolvedBackends()
	for i := range p.Ladder {
		ix.Ladder = append(ix.Ladder, p.Ladder[i].resolve(models))
	}
	for i := range p.Routes {
		ix.Routes = append(ix.Routes, p.Routes[i].resolve(models))
	}
}

// price takes the prices of a moment.
func (ix *Index) price(now time.Time) {
	ix.Models = make([]Model, len(ix.Policy.Models))
	for i := range ix.Models {
		var next time.Time
		ix.Models[i], next = ix.Policy.Models[i].at(now)
		ix.sooner(next)
	}
}

// sooner notes when something changes by itself; zero: never.
func (ix *Index) sooner(t time.Time) {
	if !t.IsZero() && (ix.NextChange.IsZero() || t.Before(ix.NextChange)) {
		ix.NextChange = t
	}
}

// Lookup finds the caller of a key by its hash, of revoked and expired ones too; a key whose tenant
// does not exist resolves to nothing. It takes no lock and allocates nothing.
func (ix *Index) Lookup(hash [32]byte) (Caller, bool) {
	k, ok := ix.keys.Lookup(hash)
	if !ok {
		if k, ok = ix.extra.Lookup(hash); !ok {
			return Caller{}, false
		}
	}
	return ix.Resolve(k)
}

// Resolve is what a key that was looked up already resolves to.
func (ix *Index) Resolve(k *KeyRecord) (Caller, bool) {
	t, ok := ix.tenants[k.Tenant]
	if !ok {
		return Caller{}, false
	}
	return Caller{Key: k, Tenant: t.Tenant, Plan: t.Plan, Limits: t.Limits, Budgets: t.Budgets}, true
}

// Tenant is what every key of a tenant resolves to, without a key.
func (ix *Index) Tenant(name string) (Caller, bool) {
	t, ok := ix.tenants[name]
	if !ok {
		return Caller{}, false
	}
	return *t, true
}

// sharedLimits are those whose buckets belong to no tenant, resolved once for all.
type sharedLimits struct {
	global []ResolvedLimit
	plan   map[*Limit]ResolvedLimit
}

func (p *Policy) shared(by cutting) (sharedLimits, error) {
	s := sharedLimits{plan: map[*Limit]ResolvedLimit{}}
	for i := range p.Global.Limits {
		l := &p.Global.Limits[i]
		r, err := l.resolve(l.Name)
		if err != nil {
			return s, fmt.Errorf("global.limits[%s]: %w", l.Name, err)
		}
		by.part(&r, 0)
		s.global = append(s.global, r)
	}
	for i := range p.Plans {
		for j := range p.Plans[i].Limits {
			l := &p.Plans[i].Limits[j]
			if !l.tenantless() {
				continue
			}
			r, err := l.resolve(p.Plans[i].Name + "/" + l.Name)
			if err != nil {
				return s, fmt.Errorf("plans[%s].limits[%s]: %w", p.Plans[i].Name, l.Name, err)
			}
			by.part(&r, 0)
			s.plan[l] = r
		}
	}
	return s, nil
}

func (l *Limit) resolve(bucket string) (ResolvedLimit, error) {
	whole, _, err := l.compile()
	return ResolvedLimit{Limit: l, Whole: &whole, Bucket: bucket}, err
}

// cutting is by what wholes are numbered and parts are cut from them.
type cutting struct {
	numbers Numbers
	share   Share
}

// part finishes a limit whose Whole is scaled.
func (c cutting) part(r *ResolvedLimit, steps int) {
	part := *r.Whole
	part.Revision, r.Whole.Revision = c.numbers.Local, c.numbers.whole(steps)
	if none := c.share.split(&part); !none {
		r.Private = &part
	}
}

// tenantless limits have one bucket for all tenants.
func (l *Limit) tenantless() bool { return tenantless(l.Scope) }

func tenantless(scope string) bool { return scope == "global" || scope == "model" }

// spreadMark ends the names of buckets that are spread, and is in no limit's name: what is placed elsewhere
// is another bucket.
const spreadMark = "@user"

// spreads says whether the limit has buckets that a plan's spread_users spreads.
func (l *Limit) spreads() bool { return slices.Contains(strings.Split(l.Scope, "+"), "user") }

// limitSet is what decides a tenant's limits. Tenants that agree in it share them, as rules:
// the buckets are each tenant's own.
type limitSet struct {
	plan  *Plan
	share fraction // of what the plan gives: the ramp's factor times the standing
	steps int      // of the ramp, begun
}

// resolve gives a node's share of the limits, cheapest first.
func (set limitSet) resolve(by cutting, shared sharedLimits) ([]ResolvedLimit, error) {
	p := set.plan
	limits := make([]ResolvedLimit, 0, len(p.Limits)+len(shared.global))
	for i := range p.Limits {
		l := &p.Limits[i]
		r, ok := shared.plan[l]
		if !ok {
			var err error
			if r, err = l.resolve(l.Name); err != nil {
				return nil, fmt.Errorf("plans[%s].limits[%s]: %w", p.Name, l.Name, err)
			}
			set.share.scale(r.Whole)
			if err = r.Whole.Validate(); err != nil {
				return nil, fmt.Errorf("plans[%s].limits[%s], scaled by %d/%d: %w", p.Name, l.Name, set.share.num, set.share.den, err)
			}
			by.part(&r, set.steps)
			if r.Spread = p.SpreadUsers && l.spreads(); r.Spread {
				r.Bucket += spreadMark
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

// ramp is the factor of a tenant's age, how many steps have begun, and when the next begins. Before the first step
// and without a `since` the first step and the last apply: an account of unknown age is an old one.
func (p *Plan) ramp(t *Tenant, now time.Time) (factor Factor, steps int, next time.Time) {
	if len(p.Ramp) == 0 {
		return factorOne, 0, time.Time{}
	}
	if t.Since.IsZero() {
		return p.Ramp[len(p.Ramp)-1].Factor, len(p.Ramp), time.Time{}
	}
	since := time.Time(t.Since)
	factor = p.Ramp[0].Factor
	for i, s := range p.Ramp {
		at := since.Add(time.Duration(s.After))
		if at.After(now) {
			return factor, i, at
		}
		factor = s.Factor
	}
	return factor, len(p.Ramp), time.Time{}
}
