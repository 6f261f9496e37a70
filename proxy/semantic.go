package proxy

import (
	"context"
	"math"
	"net/http"
	"strconv"
	"time"

	"headgate/proxy/openai"
)

// maxSemantic bounds how long the search for a similar question may hold a request up.
const maxSemantic = 500 * time.Millisecond

// Semantic is what the front door needs of the cache of similar questions. It is safe for
// concurrent use.
type Semantic interface {
	// Ask looks for the answer to a question that means the same. It never fails: whatever goes
	// wrong is a miss. It ends with ctx.
	Ask(ctx context.Context, q *SemanticQuestion) SemanticTurn
}

// SemanticQuestion is a request that nobody has asked before in these words.
type SemanticQuestion struct {
	Context *CacheContext // with its generations; good until Ask returns
	Surface *Surface      // whose Semantic is set
	Kind    openai.Kind   // of the answer
	Least   float64       // similarity below which its client wants no answer of another question's
	Tags    []string      // that the answer must have
	Only    bool          // the model will not be asked, whatever is said
	Request string        // its id, for logs
}

// SemanticTurn is what the cache of similar questions says.
type SemanticTurn struct {
	Hit *Cached // nil: the model is to be asked
	// Outcome is hit, miss, explore or audit (there would be a hit or might be one, and the model
	// is asked to learn of it), shadow (likewise, since the surface only watches), unfit (such a
	// question is not compared) or failed.
	Outcome string
	// Learn, unless nil, is to be told the model's answer, if it is whole, and whether it may be
	// kept; at most once. It does not block, and keeps e.
	Learn func(e *CacheEntry, keep bool)
}

// SemanticCache is how a surface's answers serve similar questions, as the policy has it.
type SemanticCache struct {
	Mode          string        // shadow, static or learned
	Threshold     float64       // similarity from which on questions mean the same; of static
	ErrorBound    float64       // the share of requests that may get a wrong answer
	HitErrorBound float64       // the share of hits that may be wrong
	Audit         float64       // the share of would-be hits that the model is asked about
	Answers       float64       // similarity from which on two answers say the same
	TTL           time.Duration // how long an answer serves others
	Embedder      *Model        // that turns questions into vectors; nil: the gateway's own
	Verifier      *Model        // that is asked where it is a close thing; nil: none
}

// leastSimilarity reads how similar a question has to be whose answer the client takes.
func (x *exchange) leastSimilarity() error {
	s := x.r.Header.Get("X-Headgate-Similarity")
	if s == "" {
		return nil
	}
	least, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(least) || least < 0 || least > 1 {
		return malformed(http.StatusBadRequest, "X-Headgate-Similarity", "X-Headgate-Similarity is the least similarity of a question whose answer is taken: a number from 0 to 1, where 1 takes none, not %q", clip(s, 40))
	}
	x.cache.least = least
	return nil
}

// similar answers with what was kept of a question that means the same, if it can. The request leads, or
// nothing but what is kept will do. One that takes nothing kept asks, too: what the model says is to take
// the place of what is there.
func (x *exchange) similar(metered bool) (served bool) {
	c := &x.cache
	c.learn = nil
	if c.surface.Semantic == nil || x.p.cfg.Semantic == nil || !x.route.generate {
		return false
	}
	least := c.least
	if c.mode == cacheRefresh {
		least = 1
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(x.r.Context(), min(maxSemantic, x.timeout-min(c.waited, x.timeout)))
	defer cancel()
	cc := x.cacheContext()
	if _, err := x.p.cfg.Cache.Key(&cc); err != nil { // it fills in the generations
		return false
	}
	t := x.p.cfg.Semantic.Ask(ctx, &SemanticQuestion{Context: &cc, Surface: c.surface, Kind: x.route.kind, Least: least, Tags: c.tags, Only: c.mode == cacheOnly, Request: x.id})
	c.waited += time.Since(began)
	if t.Hit == nil {
		c.learn = t.Learn
		x.p.met.cache.WithLabelValues(tierSemantic, t.Outcome).Inc()
		return false
	}
	body, contentType, ok := x.shaped(t.Hit)
	if !ok {
		return false
	}
	x.endFill(FillEnd{Kind: FillShare, Entry: x.found(t.Hit)})
	x.handOut(t.Hit, body, contentType, metered)
	return true
}

// found is k for those who wait for the same answer.
func (x *exchange) found(k *Cached) *CacheEntry {
	return &CacheEntry{
		Tenant: x.caller.Tenant, Surface: x.surface, ContentType: k.ContentType, Body: k.Body, Tags: k.Tags, Input: k.Input, CachedInput: k.CachedInput,
		Output: k.Output, Life: x.cache.surface.Exact.Life, Via: k.Via, Similarity: k.Similarity, Stamp: k.Stamp, Age: k.Age,
	}
}

// acceptable says whether an answer that another request found under a similar question is one for this
// request, too. Where it is not, the model is asked.
func (x *exchange) acceptable(k *Cached) bool {
	c := &x.cache
	if k.Via == "" || c.mode != cacheRefresh && c.least < 1 && k.Similarity >= c.least && hasTags(k.Tags, c.tags) {
		return true
	}
	if c.mode != cacheOnly {
		c.mode = cacheRefresh
	}
	return false
}

// teach tells of an answer of the model's, and whether it is kept.
func (x *exchange) teach(e *FillEnd) {
	if c := &x.cache; c.learn != nil && e.Entry != nil && e.Entry.Via == "" {
		c.learn(e.Entry, e.Kind == FillStore)
		c.learn = nil
	}
}
