package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// cacheParameters are those that an invalidation may have in its URL.
func cacheParameters() []string { return []string{"tenant", "surface", "tag", "generation", "all"} }

// readInvalidation takes what is to end from the URL where it has parameters, else from the body:
// a webhook's body is its sender's, and is not looked at then.
func readInvalidation(w http.ResponseWriter, r *http.Request) (CacheInvalidation, error) {
	if r.URL.RawQuery != "" {
		return invalidationOf(r.URL.RawQuery)
	}
	var ask struct {
		Tenant     *string  `json:"tenant"`
		Surface    *string  `json:"surface"`
		Tags       []string `json:"tags"`
		Generation *uint64  `json:"generation"`
		All        bool     `json:"all"`
	}
	if err := decode(w, r, &ask, maxAsk); err != nil {
		return CacheInvalidation{}, err
	}
	c := CacheInvalidation{Tags: ask.Tags, Generation: ask.Generation}
	for _, f := range [...]struct {
		name string
		from *string
		to   *string
	}{{"tenant", ask.Tenant, &c.Tenant}, {"surface", ask.Surface, &c.Surface}} {
		switch {
		case f.from == nil:
		case *f.from == "":
			return c, fmt.Errorf("%s is empty: leave it out for every %s", f.name, f.name)
		default:
			*f.to = *f.from
		}
	}
	if ask.Tags != nil && len(ask.Tags) == 0 {
		return c, errors.New("tags is empty: leave it out for whatever has any, or none")
	}
	return c, c.check(ask.All)
}

// invalidationOf reads parameters. One that is not known, or empty, is most likely a slip in
// somebody's template, and what it was to narrow must not end instead.
func invalidationOf(query string) (c CacheInvalidation, err error) {
	v, err := url.ParseQuery(query)
	if err != nil {
		return c, fmt.Errorf("the parameters can't be read: %w", err)
	}
	all := false
	for name, values := range v {
		switch {
		case !slices.Contains(cacheParameters(), name):
			return c, fmt.Errorf("parameter %.80q is not one of %s", name, strings.Join(cacheParameters(), ", "))
		case slices.Contains(values, ""):
			return c, fmt.Errorf("%s is empty: leave it out, if that is what is meant", name)
		case name != "tag" && len(values) > 1:
			return c, fmt.Errorf("%s stands there %d times; once is enough", name, len(values))
		}
	}
	c.Tenant, c.Surface = v.Get("tenant"), v.Get("surface")
	for _, tags := range v["tag"] {
		c.Tags = append(c.Tags, strings.Split(tags, ",")...)
	}
	if s := v.Get("generation"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			return c, fmt.Errorf("generation=%.80q is not a whole number", s)
		}
		c.Generation = &n
	}
	switch s := v.Get("all"); s {
	case "", "false":
	case "true":
		all = true
	default:
		return c, fmt.Errorf("all=%.80q is neither true nor false", s)
	}
	return c, c.check(all)
}

// check what needs no ledger: all must be said, and only where nothing else is.
func (c *CacheInvalidation) check(all bool) error {
	nothing := c.Tenant == "" && c.Surface == "" && len(c.Tags) == 0
	switch {
	case nothing && !all:
		return errors.New("name a tenant, a surface or tags whose answers end; all=true ends every one there is")
	case !nothing && all:
		return errors.New("all=true is for every answer there is: leave it out, or the rest")
	case len(c.Tags) > 0 && c.Surface != "":
		return errors.New("surface: tags are a tenant's, whatever the surface; leave one of the two out")
	case len(c.Tags) > 0 && c.Generation != nil:
		return errors.New("generation: what ended by its tags does not come back; leave one of the two out")
	case c.Generation != nil && *c.Generation == 0:
		return errors.New("generation: the first is 1; leave it out for a new one")
	case len(c.Tags) > maxCacheTags:
		return fmt.Errorf("tags: there are %d; at most %d end at once", len(c.Tags), maxCacheTags)
	case len(c.Tenant) > maxName || len(c.Surface) > maxName:
		return fmt.Errorf("tenant and surface have at most %d bytes", maxName)
	}
	for _, tag := range c.Tags {
		if err := CheckCacheTag(tag); err != nil {
			return fmt.Errorf("tags: %w", err)
		}
	}
	return nil
}

// getCacheStats shows the node's own.
func (c Config) getCacheStats(w http.ResponseWriter, r *http.Request) {
	if c.CacheStats == nil {
		unsupported(w)
		return
	}
	one(func(ctx context.Context) (CacheStats, error) {
		s, err := c.CacheStats(ctx)
		s.Surfaces, s.Templates = append([]CacheSurface{}, s.Surfaces...), append([]CachePrefix{}, s.Templates...)
		s.Semantic = append([]CacheSemantic{}, s.Semantic...)
		return s, err
	}).ServeHTTP(w, r)
}

// postExplainKey shows what was asked with, and says nothing of what was answered.
func (c Config) postExplainKey(w http.ResponseWriter, r *http.Request) {
	if c.ExplainKey == nil {
		unsupported(w)
		return
	}
	var q CacheQuestion
	err := decode(w, r, &q, maxCacheQuestion)
	if err == nil {
		err = q.check("")
	}
	if err == nil && q.Other != nil {
		q.Other.inherit(&q.CacheRequest)
		err = q.Other.check("other.")
	}
	if err != nil {
		fail(w, coded(Invalid, err))
		return
	}
	one(func(ctx context.Context) (CacheExplanation, error) {
		e, err := c.ExplainKey(ctx, q)
		e.Parts, e.Differences = append([]CachePart{}, e.Parts...), append([]CacheDifference{}, e.Differences...)
		return e, err
	}).ServeHTTP(w, r)
}

// inherit takes what q leaves out from the first request. Another tenant has another key.
func (q *CacheRequest) inherit(first *CacheRequest) {
	if q.Tenant == "" && q.Key == "" {
		q.Tenant, q.Key = first.Tenant, first.Key
	}
	for _, f := range [...]struct{ to, from *string }{{&q.User, &first.User}, {&q.Surface, &first.Surface}} {
		if *f.to == "" {
			*f.to = *f.from
		}
	}
	if q.Path == "" {
		q.Path, q.Query = first.Path, first.Query
	}
	if q.Headers == nil {
		q.Headers = first.Headers
	}
	if q.Body == nil {
		q.Body = first.Body
	}
}

// check a request; the path has its default afterwards.
func (q *CacheRequest) check(of string) error {
	if q.Path == "" {
		q.Path = DefaultCachePath
	}
	headers := 0
	for name, values := range q.Headers {
		if name == "" || strings.ContainsFunc(name, notOfAHeader) {
			return fmt.Errorf("%sheaders: %.80q is no name of one", of, name)
		}
		headers += len(values)
	}
	switch {
	case len(q.Body) == 0 || string(q.Body) == "null":
		return fmt.Errorf("%sbody: put the request's body there, as JSON", of)
	case q.Path[0] != '/' || len(q.Path) > maxCachePath || strings.ContainsAny(q.Path, "?#"):
		return fmt.Errorf("%spath: %.80q is no path such as %s; parameters go into query", of, q.Path, DefaultCachePath)
	case len(q.Query) > maxCachePath:
		return fmt.Errorf("%squery has at most %d bytes", of, maxCachePath)
	case headers > maxCacheHeaders:
		return fmt.Errorf("%sheaders: there are %d; at most %d can be looked at", of, headers, maxCacheHeaders)
	case len(q.Tenant) > maxName || len(q.Key) > maxName || len(q.Surface) > maxName || len(q.User) > MaxSubject:
		return fmt.Errorf("%stenant, %skey and %ssurface have at most %d bytes, and user %d", of, of, of, maxName, MaxSubject)
	}
	return nil
}

// notOfAHeader is what names of headers have none of (RFC 9110, tokens).
func notOfAHeader(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}
