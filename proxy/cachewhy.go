package proxy

import (
	"net/http"
	"net/url"
	"time"

	"headgate/proxy/edge"
	"headgate/proxy/openai"
)

// CacheQuestion is a request as a client would send it, for people who want to know what the
// cache makes of it.
type CacheQuestion struct {
	Caller      *Caller
	User        string // asserted, if the caller may; "": the caller's own
	Surface     string // "": the caller's only one
	Path, Query string
	Header      http.Header // what it is sent with, beside the key
	Body        []byte      // JSON
}

// CacheVerdict is what the cache makes of a request.
type CacheVerdict struct {
	Why     string       // why no answer to it is ever kept; "": it may be
	Model   string       // the one that would answer first
	Key     [32]byte     // of its answer, where Why is ""
	Context CacheContext // what the key is made of; also where Why says that none is kept, if the surface has a cache
}

// CacheVerdict says what the cache makes of q: it asks no model, charges nothing, and looks at
// nothing that is kept, which would count as a use of it. An embeddings request is looked at as a whole, though its inputs are
// kept one by one.
func (p *Proxy) CacheVerdict(q *CacheQuestion) (CacheVerdict, error) {
	r := &http.Request{Method: http.MethodPost, URL: &url.URL{Path: q.Path, RawQuery: q.Query}, Header: q.Header.Clone()}
	if r.Header == nil {
		r.Header = http.Header{}
	}
	r.Header.Del("X-Headgate-Cache") // what is asked is what would be kept
	for name, value := range map[string]string{"X-Headgate-User": q.User, "X-Headgate-Surface": q.Surface} {
		if value != "" {
			r.Header.Set(name, value)
		}
	}
	x := &exchange{p: p, snap: p.snap.Load(), w: nobody{http.Header{}}, r: r, caller: q.Caller, start: time.Now(), body: edge.NewBody(q.Body)}
	if x.snap == nil {
		return CacheVerdict{}, errNotReady()
	}
	if err := x.identify(); err != nil {
		return CacheVerdict{}, err
	}
	if err := x.matchRoute(); err != nil {
		return CacheVerdict{}, err
	}
	if x.route.local != nil {
		return CacheVerdict{Why: "this route asks no model"}, nil
	}
	if x.route.kind == openai.Audio {
		return CacheVerdict{Why: "answers of this route are not kept"}, nil
	}
	return x.cacheVerdict()
}

func (x *exchange) cacheVerdict() (v CacheVerdict, err error) {
	if x.in, err = openai.Meter(x.route.kind, x.body.Bytes()); err != nil {
		return v, asError(err)
	}
	if err := x.assertUser(); err != nil {
		return v, err
	}
	candidates, err := x.resolve()
	if err != nil {
		return v, err
	}
	x.cache.mode = cacheRefresh // nothing is looked up
	x.model = candidates[0]
	v.Model = x.model.Name
	if err := x.consider(x.model); err != nil {
		return v, err
	}
	c := &x.cache
	switch {
	case x.p.cfg.Cache == nil:
		v.Why = "this node keeps no answers"
	case x.surface == "":
		v.Why = "the request is of no surface (X-Headgate-Surface)"
	case c.surface == nil:
		v.Why = "surface " + x.surface + " has no exact cache in the policy"
	default:
		v.Why, v.Key, v.Context = c.why, c.key, x.cacheContext()
		if _, err := x.p.cfg.Cache.Key(&v.Context); err != nil {
			return v, malformed(http.StatusBadRequest, "", "the body can't be brought to a canonical form: %v", err)
		}
	}
	return v, nil
}
