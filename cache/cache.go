// Package cache keeps answers, so that the same question is asked of a model once. See DESIGN.md.
//
// A [Key] is derived from a [Context], which holds all that an answer depends on. [Exact] looks
// for its answer on this node, then at the key's owner in the cluster, and lets one request at a
// time ask the model while the others wait for it.
//
// The package knows no HTTP and no wire format of a model server: bodies are bytes to it.
package cache

import "time"

// Context is all that an answer depends on. Every field goes into the key by its name, so that
// one that is added later does, too. cmd/node converts the front door's own struct into this
// one: the two have the same fields, or the build fails.
type Context struct {
	Tenant       string
	User         string // whom the answer is for; "" where the surface shares within the tenant
	Claimed      string // the user that the body names without the right to, likewise
	Surface      string
	Template     string // the version of the surface's template
	Model        string // as the backends know it
	ModelVersion string
	Backends     []string  // that may answer; their order does not count
	Generations  [4]uint64 // of all, of the tenant, of the surface, of the surface of the tenant
	Path         string
	Query        string
	Header       []string // "Name: value" of those that are passed on and may change the answer; their order does not count
	Normalize    string   // what of the last user text does not count: "" or none, space, fold
	// Body is the whole body, JSON. Members that cannot change the answer do not count (see
	// Uncounted), nor do the order of members and the form of numbers.
	Body []byte
}

// Key names an answer: SHA-256 over its Context.
type Key [32]byte

// Life says how long an entry is good.
type Life struct {
	TTL          time.Duration // from the fill on; half of it until the first hit
	MaxTTL       time.Duration // each hit extends by up to TTL, to MaxTTL after the fill at most
	Stale        time.Duration // after that, served while it is refreshed
	StaleIfError time.Duration // after that, served where the model fails
	Beta         float64       // of XFetch: how early hits refresh; 0: never
}

// Entry is an answer. It never changes; Body must not be written to.
type Entry struct {
	Key         Key
	Tenant      string
	Surface     string
	ContentType string
	Body        []byte
	Tags        []string
	Stamp       uint64 // where the ledger of the filling node was when it began to ask; see Config.Valid

	// What the model took.
	Input, CachedInput, Output int64

	Life  Life
	Delta time.Duration // how long the fill took
	Age   time.Duration // since the fill; kept by whoever stores or sends it

	// Via is the entry of the semantic cache that the answer was found under, which was to a
	// question so similar; "": it is the model's answer to this one. Such an entry is shared
	// with those who wait, and never stored.
	Via        string
	Similarity float64
}

// Hit is an entry that was found.
type Hit struct {
	*Entry
	Age     time.Duration
	Stale   bool // served because it is being refreshed, or may be where the model fails
	Refresh bool // whoever got it should refresh it; others go on being served
	Tier    Tier
}

// Tier is where an answer came from.
type Tier string

// The tiers.
const (
	Local Tier = "local" // this node
	Owner Tier = "owner" // the key's owner
	Live  Tier = "live"  // the request of another, while it was answered
)
