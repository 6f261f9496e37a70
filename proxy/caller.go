package proxy

import (
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"headgate/limiter"
	"headgate/proxy/openai"
	routing "headgate/proxy/route"
)

// Snapshot is what one policy revision means to the front door. It is immutable:
// a request works with the one it started with, so that a policy change in
// mid-flight cannot settle under other names than it reserved under.
type Snapshot struct {
	Revision uint64
	// Lookup finds the caller of a key by the SHA-256 of the whole key. It is safe
	// for concurrent use, compares in constant time and returns revoked and expired
	// callers too, which authenticate tells apart from unknown ones.
	Lookup func(hash [32]byte) (*Caller, bool)
	// CheckKey says what is wrong with the form of a key that Lookup does not find, nil if
	// nothing is; its error must not hold the key. It may be nil.
	CheckKey func(key string) error
	// Models by public name; aliases point to the same Model.
	Models map[string]*Model
	// ModelNames in the policy's order, for listings and for requests that name none.
	ModelNames []string
	// Surfaces by name.
	Surfaces map[string]*Surface
	// Salted are the backends whose prefix caches are kept apart by CacheSalt.
	Salted map[string]bool
	// Routes choose the model that answers; nil: the one asked for.
	Routes *routing.Table
	// KeepAlive is how often a stream's client gets a comment while its request waits for a place; 0: never.
	KeepAlive time.Duration
}

// Caller is who a key resolves to. It is shared between requests and never changed.
type Caller struct {
	KeyID, Tenant string
	User          string // bound to the key; "" leaves the key itself as the user
	Class         Class
	Tier          int // of the plan: lower ones are shed first

	Revoked   bool
	Suspended bool      // the tenant is
	Expires   time.Time // zero: never

	Models     map[string]bool // nil: all
	Routes     map[string]bool // nil: all; route names as in routes.go
	Surfaces   map[string]bool // nil: none may be named
	AnySurface bool
	// OnlySurface is the one that requests are of which name none; "": they are of none.
	OnlySurface string
	AssertUser  bool
	// CacheSalt is what keeps the tenant's prefixes apart from others' in the caches of backends that
	// are Salted.
	CacheSalt string
	// CachedMetered: answers of the cache are charged like the model's.
	CachedMetered bool

	Limits   []Limit // cheapest first; at most limiter.MaxCharges
	Budgets  []Budget
	Timeout  time.Duration
	Content  bool          // prompts and answers may be kept: see ContentLog
	LastUsed *atomic.Int64 // Unix seconds; kept across snapshots
}

// Limit is one limit as it applies to a caller.
type Limit struct {
	Name     string
	Bucket   string // the bucket's name: Name, qualified by the plan where tenants share it
	Scope    Scope
	Unit     Unit
	Spec     *limiter.Limit
	Wait     time.Duration // hold a request that will conform within it instead of refusing
	Shadow   bool
	Oversize limiter.Oversize

	Spread      bool           // its buckets are placed by tenant and subject, not by tenant alone
	Unavailable Mode           // what decides while the bucket's owner is out of reach
	Private     *limiter.Limit // under Local: this node's private share of the limit; nil: nothing, the limit being smaller than the number of nodes
}

// Model is a served model with its prices bound in.
type Model struct {
	Name     string
	Upstream string // the name that the backends know
	Version  string // of its weights; part of what names a kept answer
	// DefaultTemperature is what the backends take where a request says nothing.
	DefaultTemperature float64
	Backends           []string
	Context            int64 // tokens; 0: unknown
	DefaultOutput      int64 // tokens reserved for an answer without a cap
	ImageTokens        int64 // flat, per part
	AudioTokens        int64
	BytesPerToken      int64 // thousandths; where the learned ratio starts
	Fallback           []string
	// Cost prices one answer in nano-dollars, rounded up once.
	Cost func(u openai.Usage, images, audio int64) int64
	// UpperBound prices the dearest answer of so many tokens: no usage within them, and no mix
	// of its kinds, has a higher Cost. Only budgets need it.
	UpperBound func(in, out, images, audio int64) int64
	// TemplateTokens is how many tokens the chat template adds to a conversation at most, beside
	// those of its messages and tools; 0: defaultTemplateTokens. Where the backend reports more,
	// that is learnt, too late for the request that showed it.
	TemplateTokens int64
	// Affinity is by what endpoints are preferred for it.
	Affinity Affinity
	// Free says that every price is 0, on purpose: no budget is asked.
	Free bool
}

// Affinity says which of a model's requests are sent to the same endpoint, whose prefix cache has what
// they begin with.
type Affinity uint8

// The affinities: ByPrefix those that begin alike, BySession those that name the same session
// (prompt_cache_key), or also that, ByNothing none.
const (
	ByPrefix Affinity = iota
	BySession
	ByNothing
)

// Scope is the set of identities that a limit is keyed on (DESIGN: key, user, org,
// model, global and combinations).
type Scope uint8

// The scopes. ScopeGlobal is the empty combination: one bucket for everybody.
const (
	ScopeKey Scope = 1 << iota
	ScopeUser
	ScopeOrg
	ScopeModel
	ScopeGlobal Scope = 0
)

// String gives the policy's spelling, parts joined by +.
func (s Scope) String() string {
	if s == ScopeGlobal {
		return "global"
	}
	var parts []string
	for i, name := range scopeNames {
		if s&(1<<i) != 0 {
			parts = append(parts, name)
		}
	}
	return strings.Join(parts, "+")
}

// scopeNames in the order of their bits.
var scopeNames = [...]string{"key", "user", "org", "model"}

// ParseScope reads the policy's spelling.
func ParseScope(text string) (s Scope, ok bool) {
	if text == "global" {
		return ScopeGlobal, true
	}
	for part := range strings.SplitSeq(text, "+") {
		i := slices.Index(scopeNames[:], part)
		if i < 0 {
			return 0, false
		}
		s |= 1 << i
	}
	return s, true
}

// Unit is what a limit counts.
type Unit uint8

// The units. USD counts nano-dollars.
const (
	Requests Unit = iota
	Concurrency
	Tokens
	InputTokens
	OutputTokens
	USD
)

// String gives the policy's spelling.
func (u Unit) String() string { return unitNames[u] }

var unitNames = [...]string{"requests", "concurrency", "tokens", "input_tokens", "output_tokens", "usd"}

// ParseUnit reads the policy's spelling.
func ParseUnit(s string) (Unit, bool) {
	i := slices.Index(unitNames[:], s)
	return Unit(max(i, 0)), i >= 0
}

// Class is how urgent a caller's requests are; a request may only lower it.
type Class uint8

// The classes, most urgent first.
const (
	Interactive Class = iota
	Background
	BestEffort
)

// String gives the policy's spelling.
func (c Class) String() string {
	return [...]string{"interactive", "background", "best_effort"}[c]
}

// ParseClass reads the policy's spelling.
func ParseClass(s string) (Class, bool) {
	for c := Interactive; c <= BestEffort; c++ {
		if c.String() == s {
			return c, true
		}
	}
	return 0, false
}

// key names the bucket that l uses for this exchange.
func (l *Limit) key(x *exchange) limiter.Key { return bucket(x, l.Scope, l.Bucket) }

// bucket is the one of that name that a scope has for this exchange.
func bucket(x *exchange, scope Scope, name string) limiter.Key {
	k := limiter.Key{Limit: name}
	if scope&(ScopeKey|ScopeUser|ScopeOrg) != 0 {
		k.Tenant = x.caller.Tenant
	}
	switch scope &^ ScopeOrg {
	case 0:
	case ScopeKey:
		k.Subject = x.caller.KeyID
	case ScopeUser:
		k.Subject = x.payer()
	case ScopeModel:
		k.Subject = x.model.Name
	default: // combinations are rare: they pay for a concatenation
		var parts []string
		if scope&ScopeKey != 0 {
			parts = append(parts, x.caller.KeyID)
		}
		if scope&ScopeUser != 0 {
			parts = append(parts, x.payer())
		}
		if scope&ScopeModel != 0 {
			parts = append(parts, x.model.Name)
		}
		k.Subject = strings.Join(parts, "\x1f")
	}
	return k
}

// cost is what an exchange of this size takes from a limit of unit u.
func (u Unit) cost(inTokens, outTokens, nanoUSD int64) int64 {
	switch u {
	case Tokens:
		return min(inTokens+outTokens, limiter.MaxUnits)
	case InputTokens:
		return inTokens
	case OutputTokens:
		return outTokens
	case USD:
		return nanoUSD
	default:
		return 1
	}
}
