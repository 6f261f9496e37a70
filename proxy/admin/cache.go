package admin

import (
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// Bounds of what the cache is asked.
const (
	maxCacheTags     = 1_000   // of one invalidation; the ledger's own bound
	maxCacheTag      = 128     // bytes
	maxCacheQuestion = 8 << 20 // bytes of a question about keys, bodies of requests included
	maxCacheHeaders  = 100     // of one question
	maxCachePath     = 1 << 10 // bytes, and so many of a query
)

// CacheInvalidation ends kept answers on all nodes, within a quarter of a second: those with one of
// the tags, or else, by another generation, those of a surface of a tenant, of a surface of every
// tenant, of a whole tenant, or all there are.
type CacheInvalidation struct {
	Tenant  string   // "": of every tenant
	Surface string   // "": of every surface; never beside tags
	Tags    []string // of answers of the tenant; none: whatever their tags

	// Generation that was in force before and is put back, with what was kept under it and is not
	// too old; nil: a new one. Never beside tags.
	Generation *uint64
}

// CacheInvalidated is what an invalidation changed.
type CacheInvalidated struct {
	Index      uint64   `json:"index"`                // of the ledger's entry
	Generation uint64   `json:"generation,omitempty"` // in force now; 0: by tags
	Previous   uint64   `json:"previous,omitempty"`   // in force before, and can be put back
	Warnings   []string `json:"warnings,omitempty"`
}

// CacheGeneration is a generation that was ever raised: of a surface of a tenant, where Tenant is
// "" of a surface of every tenant, where Surface is "" of a whole tenant, where both are of
// everything. All others are 1.
type CacheGeneration struct {
	Tenant  string `json:"tenant,omitempty"`
	Surface string `json:"surface,omitempty"`
	Now     uint64 `json:"now"`
	Highest uint64 `json:"highest"` // each from 1 to this can be put back
}

// CacheStats is the cache of the answering node, since it was started.
type CacheStats struct {
	Node      string          `json:"node"`
	Hearing   bool            `json:"hearing"` // it hears of invalidations
	Store     CacheStore      `json:"store"`
	Surfaces  []CacheSurface  `json:"surfaces"`
	Semantic  []CacheSemantic `json:"semantic"`
	Templates []CachePrefix   `json:"templates"`
}

// CacheStore is what a node keeps in memory.
type CacheStore struct {
	Entries  int64 `json:"entries"`
	Bytes    int64 `json:"bytes"`
	MaxBytes int64 `json:"max_bytes"`
	Puts     int64 `json:"puts"`
	TooLarge int64 `json:"too_large"` // were not put
	Rejected int64 `json:"rejected"`  // times that others were asked for more often
	Dropped  int64 `json:"dropped"`   // times that the store was too busy to decide
	Evicted  int64 `json:"evicted"`   // to make room, or too old
	Invalid  int64 `json:"invalid"`   // reads that found what was invalidated
}

// CacheSurface is what the cache did for a surface of a tenant.
type CacheSurface struct {
	Tenant       string           `json:"tenant"` // with Surface, "other" stands for those beyond what is counted apart
	Surface      string           `json:"surface"`
	Personal     bool             `json:"personal,omitempty"`
	Requests     int64            `json:"requests"`
	Exact        int64            `json:"exact"`                    // answered by what was kept,
	Stale        int64            `json:"stale"`                    // by what was kept and is too old,
	Live         int64            `json:"live"`                     // by the answer to another that was under way
	Semantic     int64            `json:"semantic"`                 // by the answer to a question that means the same
	Misses       int64            `json:"misses"`                   // answered by the model, and may be kept
	Partial      int64            `json:"partial"`                  // embeddings of which some were kept
	Bypass       int64            `json:"bypass"`                   // the client did not want the cache
	Failed       int64            `json:"failed"`                   // got another's error
	Uncacheable  map[string]int64 `json:"uncacheable"`              // never kept, by why
	Unkept       map[string]int64 `json:"unkept,omitempty"`         // answers to misses that were not kept, by why
	StaleIfError int64            `json:"stale_if_error,omitempty"` // of the misses: the model failed, and what was too old was served
	Saved        USD              `json:"saved_usd"`                // what hits would have cost
	HitRate      float64          `json:"hit_rate"`                 // hits (exact, stale, live, semantic) of those, misses and partial, 0 to 1
	Recent       float64          `json:"recent_hit_rate"`          // of the last ten minutes
	RecentOf     int64            `json:"recent_requests"`          // of which it is
	Alerts       []string         `json:"alerts,omitempty"`         // that go on now: drop, never, rise
}

// CachePrefix is how well a model's own prefix cache does with the prompts of one template.
type CachePrefix struct {
	Tenant   string  `json:"tenant"`
	Surface  string  `json:"surface"`
	Template string  `json:"template,omitempty"` // its version
	Model    string  `json:"model"`
	Requests int64   `json:"requests"`
	Input    int64   `json:"input_tokens"`
	Cached   int64   `json:"cached_input_tokens"`
	Share    float64 `json:"cached_share"` // 0 to 1
	Prompt   int64   `json:"prompt_bytes"` // of a mean prompt, its first 64 KiB
	Prefix   int64   `json:"prefix_bytes"` // of these, what it has in common with others from its start on
	Finding  string  `json:"finding"`      // few, good, or what is wrong, in a word
	Text     string  `json:"text,omitempty"`
}

// CacheRequest is a request as a client would send it.
type CacheRequest struct {
	Tenant  string              `json:"tenant,omitempty"`
	Key     string              `json:"key,omitempty"` // the key's id; "" takes any of the tenant's
	User    string              `json:"user,omitempty"`
	Surface string              `json:"surface,omitempty"` // "": the key's only one
	Path    string              `json:"path,omitempty"`    // "": DefaultCachePath
	Query   string              `json:"query,omitempty"`
	Headers map[string][]string `json:"headers,omitempty"`
	Body    json.RawMessage     `json:"body,omitempty"`
}

// DefaultCachePath is where a request goes that does not say.
const DefaultCachePath = "/v1/chat/completions"

// CacheQuestion asks what the cache makes of a request, and in what another differs.
type CacheQuestion struct {
	CacheRequest
	Other *CacheRequest `json:"other,omitempty"` // what it leaves out is as in the first
}

// CacheExplanation is what the cache makes of a request. It shows of the request what was asked
// with, and never an answer.
type CacheExplanation struct {
	CacheVerdict
	Parts       []CachePart       `json:"parts"` // what the key is made of; none where the surface has no cache
	Other       *CacheVerdict     `json:"other,omitempty"`
	Pair        *CachePair        `json:"pair,omitempty"` // the two as wordings of one question; nil where one of them is not compared
	Differences []CacheDifference `json:"differences"`    // where the two differ that counts; none: their keys are equal
}

// CacheVerdict says whether answers to a request are kept.
type CacheVerdict struct {
	AsTenant  string     `json:"as_tenant"` // whose key it was taken to come with,
	AsKey     string     `json:"as_key"`    // and the key's id
	Cacheable bool       `json:"cacheable"`
	Why       string     `json:"why,omitempty"`   // not
	Model     string     `json:"model,omitempty"` // that would answer first
	Key       string     `json:"key,omitempty"`   // of the answer, hexadecimal
	Kept      *CacheKept `json:"kept,omitempty"`  // on the answering node

	// Of a request for embeddings, which are kept input by input: how many it has, and of how many
	// the answering node keeps the embedding. Kept is nil then.
	Inputs     int `json:"inputs,omitempty"`
	InputsKept int `json:"inputs_kept,omitempty"`

	Semantic *CacheCompared `json:"semantic,omitempty"` // nil where the surface has no cache at all
}

// CacheKept is an answer that is there.
type CacheKept struct {
	AgeSeconds int64 `json:"age_seconds"`
	Stale      bool  `json:"stale,omitempty"`
}

// CachePart is one thing that goes into a key, or does not.
type CachePart struct {
	Name    string `json:"name"`  // such as tenant, header "Anthropic-Version", body.messages[3]
	Value   string `json:"value"` // clipped
	Hash    string `json:"hash"`  // of all of the value
	Counted bool   `json:"counted"`
}

// CacheDifference is a place in which two requests differ.
type CacheDifference struct {
	Path   string `json:"path"`
	First  string `json:"first"` // clipped
	Second string `json:"second"`
}

// CheckCacheTag says what is wrong with a tag of an answer; it is the rule of X-Headgate-Cache-Tags.
func CheckCacheTag(tag string) error {
	bad := tag == "" || len(tag) > maxCacheTag || !utf8.ValidString(tag)
	for i := 0; i < len(tag) && !bad; i++ {
		bad = tag[i] <= ' ' || tag[i] == ',' || tag[i] == 0x7f
	}
	if bad {
		return fmt.Errorf("%.80q is no tag: one has 1 to %d bytes of text, without spaces, commas and control characters", tag, maxCacheTag)
	}
	return nil
}
