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
	Inputs  [][32]byte   // of a request for embeddings, which are kept input by input: the keys of theirs; nil: it is kept as a whole
	Context CacheContext // what the key is made of; also where Why says that none is kept, if the surface has a cache

	Apart    string         // why the request is not compared with questions in other words; "": it is, if what it asks lets itself be compared
	Semantic *SemanticCache // how it is compared; nil where the surface has no such cache
	Least    float64        // similarity below which its client wants no answer of another question's
}

// CacheVerdict says what the cache makes of q: it asks no model, charges nothing, and looks at
// nothing that is kept, which would count as a use of it.
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
	x.model = candidates[0]
	v.Model = x.model.Name
	x.consider()
	c := &x.cache
	switch {
	case x.p.cfg.Cache == nil:
		v.Why = "this node keeps no answers"
	case x.surface == "":
		v.Why = "the request is of no surface: send X-Headgate-Surface with a key that may name one, or use a key that may name just one"
	case c.surface == nil:
		v.Why = "surface " + x.surface + " has no exact cache in the policy"
	default:
		x.caching()
		v.Why, v.Key, v.Context = c.why, c.key, x.cacheContext()
		if _, err := x.p.cfg.Cache.Key(&v.Context); err != nil && v.Why == "" { // it also fills in the generations
			v.Why = err.Error()
		}
		v.Inputs = x.inputKeys(v.Why)
		v.Apart, v.Semantic, v.Least = x.apart(v.Why), c.surface.Semantic, c.least
	}
	return v, nil
}

// apart is why the request is not compared with questions in other words, as far as that does not depend on what
// it asks; "": it is. unkept is why no answer to it is kept.
func (x *exchange) apart(unkept string) string {
	s := x.cache.surface
	switch {
	case s.Semantic == nil && s.Personal:
		return "surface " + s.Name + " is personal: its answers are for their own wording only"
	case s.Semantic == nil:
		return "surface " + s.Name + " has no semantic cache in the policy"
	case x.p.cfg.Semantic == nil:
		return "this node keeps no answers for other wordings"
	case unkept != "":
		return "no answer to it is kept"
	case !x.route.generate:
		return "answers of this route are for their own wording only"
	case x.cache.least >= 1:
		return "X-Headgate-Similarity: 1 takes no answer of another question, though its own may serve others"
	}
	return ""
}

// inputKeys are those of the inputs of a request for embeddings, unless it is kept as a whole, or not at all.
func (x *exchange) inputKeys(why string) [][32]byte {
	in, ok := openai.SplitInputs(x.body.Bytes())
	if !ok || why != "" || x.route.kind != openai.Embedding || x.p.cfg.Elements == nil {
		return nil
	}
	keys := make([][32]byte, in.Len())
	for i := range keys {
		var err error
		if keys[i], err = x.elementKey(in.Body(i)); err != nil {
			return nil
		}
	}
	return keys
}
