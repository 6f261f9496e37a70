package proxy

import (
	"context"
	"time"
)

// Bounds of what the cache is asked.
const (
	maxCacheTags  = 16               // of a request
	maxEntryTags  = 64               // of an answer: of all requests for it, and the backend's
	maxCacheTag   = 128              // bytes
	streamSilence = 30 * time.Second // of a stream that another leads, before its first byte
	maxRejoins    = 2                // after another's answer broke off before its first byte came here
)

// Cache is what the front door needs of the cache of answers. It is safe for concurrent use.
type Cache interface {
	// Key names the answer of c. It fills in c.Generations.
	Key(c *CacheContext) ([32]byte, error)
	// Look finds an answer on this node. It never waits.
	Look(key [32]byte) (*Cached, bool)
	// Join finds an answer in the cluster, or waits for that of another request, or lets this one
	// lead. It fails when ctx ends, and then with its error.
	Join(ctx context.Context, a *CacheAsk) (CacheTurn, error)
	// Counts says whether a header that is passed on may change an answer.
	Counts(header string) bool
}

// CacheContext is all that an answer depends on. The cache's own context has the same fields.
type CacheContext struct {
	Tenant       string
	User         string // whom the answer is for; "" where the surface shares within the tenant
	Claimed      string // the user that the body names without the right to, likewise
	Surface      string
	Template     string // the version of the surface's template
	Model        string // as the backends know it
	ModelVersion string
	Backends     []string
	Generations  [4]uint64 // filled in by Cache
	Path         string
	Query        string
	Header       []string // "Name: value" of those that count
	Normalize    string
	Body         []byte
}

// CacheLife says how long an answer is kept. It has the fields of the cache's own.
type CacheLife struct {
	TTL          time.Duration // from the fill on; half of it until the first hit
	MaxTTL       time.Duration // hits extend it to this at most
	Stale        time.Duration // after that, served while it is refreshed
	StaleIfError time.Duration // after that, served where the model fails
	Beta         float64       // how early hits refresh; 0: never
}

// Cached is an answer that was kept: JSON, as a model's server would send it unstreamed.
type Cached struct {
	ContentType                string
	Body                       []byte // not to be written to
	Tags                       []string
	Input, CachedInput, Output int64 // tokens that it took
	Age                        time.Duration
	Stale                      bool // older than its time
	Refresh                    bool // this request is the one that should refresh it
	Live                       bool // another request's, which has just been answered

	Via        string  // the entry of the cache of similar questions that it was found under; "": it is to this very question
	Similarity float64 // of the two questions then
	Stamp      uint64  // and where the ledger was when its model was asked
}

// CacheAsk is one question to the cluster.
type CacheAsk struct {
	Key      [32]byte
	Tenant   string
	Tags     []string // of the request
	Live     bool     // the stream of another will do while it passes
	Refresh  bool     // nothing that is kept will do
	Early    bool     // if another is at it already, or it is younger than Age by now, that is enough
	Age      time.Duration
	MaxEntry int64
	LeadFor  time.Duration // how long another may lead without a byte that others see
}

// CacheTurn is what to do next. One of Hit, Fill, Live and Failed is set, or none: then the
// request goes on without the cache. Busy answers Early.
type CacheTurn struct {
	Hit    *Cached
	Fill   CacheFill // this request leads
	Stale  *Cached   // beside Fill: what may be served where the model fails
	Live   CacheStream
	Failed *CacheFailure
	Busy   bool
}

// CacheStream is the stream of another request, as it passes. Next fails with io.EOF at its end;
// what it returns must not be written to.
type CacheStream interface {
	Next(ctx context.Context) ([]byte, error)
	Close()
}

// CacheFailure is an error of the model's, shared by those who had asked the same meanwhile.
type CacheFailure struct {
	Status      int
	ContentType string
	Body        []byte
}

// CacheFill is the right and the duty to get an answer for all who wait for it. End must be
// called; its first call counts.
type CacheFill interface {
	// Context is for the call of the model: it outlives the client as long as others wait.
	Context(client context.Context) (context.Context, context.CancelFunc)
	// Begin says that a stream of events has begun, Write what has passed of it. Neither waits.
	Begin(contentType string)
	Write(p []byte)
	End(FillEnd)
}

// FillEnd is how a fill ended.
type FillEnd struct {
	Kind    FillKind
	Entry   *CacheEntry  // of FillStore and FillShare
	Failure CacheFailure // of FillFailed
	Err     error        // of FillBroken
}

// FillKind says it in a word.
type FillKind uint8

// The ways in which a fill ends.
const (
	FillAbandoned   FillKind = iota // nobody answered; the next one leads
	FillRefused                     // likewise, for reasons of this request's own
	FillUnasked                     // likewise, and the model was not even asked
	FillBroken                      // in the middle of the answer
	FillFailed                      // with an error of the model's
	FillStore                       // with an answer to be kept
	FillShare                       // with an answer for those who wait for it now
	FillUnshareable                 // with an answer for nobody else
)

// CacheEntry is an answer to be kept.
type CacheEntry struct {
	Tenant, Surface, ContentType string
	Body                         []byte // not written to any more
	Tags                         []string
	Input, CachedInput, Output   int64
	Life                         CacheLife

	// As Cached has them, of the answer to a similar question; else zero.
	Via        string
	Similarity float64
	Stamp      uint64
	Age        time.Duration
}

// Surface is a named product entry.
type Surface struct {
	Name, Template string
	Share          bool           // answers may be shared between the users of a tenant
	Personal       bool           // answers are about their users
	Exact          *ExactCache    // nil: answers are not kept
	Semantic       *SemanticCache // nil: none serves a question that only means the same
}

// ExactCache is how a surface's answers are kept.
type ExactCache struct {
	Life        CacheLife
	Temperature float64 // above it answers are not kept, unless they have a seed
	Normalize   string  // what of the last user text does not count: none, space or fold
	Timestamps  bool    // answers with today's date or a time of day are kept, too
	Tools       bool    // so are those that call tools,
	Many        bool    // requests for several answers,
	Length      bool    // and answers cut at their cap
	MaxBytes    int64   // of an answer
	Volatile    bool    // nothing is served while this node does not hear of invalidations
}

// CacheWatch is told what the cache does for whom. It must not block and may be called concurrently.
type CacheWatch interface {
	Note(e *CacheEvent)
	// Asked tells of a request that a model has answered, for the caches of its prefixes.
	Asked(e *PromptEvent)
}

// CacheEvent is what the cache did for one request.
type CacheEvent struct {
	Tenant, Surface string
	Outcome         string // as headgate_cache_requests_total has it
	Why             string // of uncacheable
	Personal        bool   // the surface's answers are about their users
	SavedNanoUSD    int64
	Context         func() CacheContext // what the key is made of, until Note returns; nil: it has none
}

// PromptEvent is a request that a model has answered.
type PromptEvent struct {
	Tenant, Surface, Template, Model string
	Path                             string
	Body                             []byte // until Asked returns
	Input, CachedInput               int64  // tokens
}
