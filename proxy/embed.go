package proxy

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"headgate/proxy/edge"
	"headgate/proxy/openai"
)

// maxEmbeddings bounds the answer that is put together for one request, in bytes.
const maxEmbeddings = 64 << 20

// Elements is what the front door needs of the cache for requests of many parts that have answers
// of their own. It is safe for concurrent use.
type Elements interface {
	// GetMany finds answers in the cluster, nil for those that are not kept. It waits for a bounded
	// time, and asks each owner once.
	GetMany(ctx context.Context, keys [][32]byte) []*Cached
	// PutMany keeps answers to questions that were asked when the Stamp was this.
	PutMany(stamp uint64, keys [][32]byte, entries []*CacheEntry)
	Stamp() uint64
}

// embedding is a request for embeddings, input by input.
type embedding struct {
	in      openai.Inputs
	keys    [][32]byte
	found   [][]byte      // by input; nil: not known
	tokens  int64         // of those that were kept
	age     time.Duration // of the oldest of those
	model   string        // as the backend calls it
	missing []int
	whole   *edge.Body // of the client's request
	wholeIn openai.Request
}

// embed answers a request for embeddings by those that are kept, and asks a backend for the others
// only. ok is false where the request can't be taken apart: then nothing has been done.
func (x *exchange) embed() (ok bool, err error) {
	in, ok := openai.SplitInputs(x.body.Bytes())
	if !ok || x.p.cfg.Elements == nil {
		return false, nil
	}
	e := &embedding{in: in, keys: make([][32]byte, in.Len()), whole: x.body, wholeIn: x.in}
	for i := range e.keys {
		if e.keys[i], err = x.elementKey(in.Body(i)); err != nil {
			return false, nil //nolint:nilerr // then it is a request like any other
		}
	}
	if err := x.enter(x.caller.CachedMetered); err != nil {
		return true, err
	}
	x.lookElements(e)
	switch {
	case len(e.missing) == 0:
		x.serveElements(e)
		return true, nil
	case x.cache.shed != nil:
		x.settle(outcomeRefused)
		return true, x.cache.shed
	case x.cache.mode == cacheOnly:
		x.settle(outcomeMalformed)
		return true, errNotKept("not all embeddings of this request are kept")
	}
	return true, x.askElements(e)
}

// elementKey names the answer to a body. That to a request for one input is the embedding of the input.
func (x *exchange) elementKey(body [][]byte) ([32]byte, error) {
	cc := x.cacheContext()
	cc.Body = bytes.Join(body, nil)
	return x.p.cfg.Cache.Key(&cc)
}

func (x *exchange) lookElements(e *embedding) {
	e.found = make([][]byte, len(e.keys))
	kept := make([]*Cached, len(e.keys))
	if x.cache.mode != cacheRefresh {
		kept = x.p.cfg.Elements.GetMany(x.r.Context(), e.keys)
	}
	for i, k := range kept {
		one := openai.Embeddings{}
		ok := k != nil && !slices.ContainsFunc(x.cache.tags, func(tag string) bool { return !slices.Contains(k.Tags, tag) })
		if ok {
			one, ok = openai.SplitEmbeddings(k.Body, 1)
		}
		if !ok || e.model != "" && one.Model != e.model { // of one backend's model only: embeddings of two do not mix
			e.missing = append(e.missing, i)
			continue
		}
		e.found[i], e.model, e.tokens, e.age = one.Elements[0], one.Model, e.tokens+k.Input, max(e.age, k.Age)
	}
}

// serveElements answers from what is kept.
func (x *exchange) serveElements(e *embedding) {
	u := openai.Usage{Input: e.tokens, Known: true}
	x.answer.usage = u
	x.settleKept("exact", x.caller.CachedMetered)
	x.cacheHeader("exact")
	x.ageHeader(e.age)
	x.write(http.StatusOK, "application/json", openai.JoinEmbeddings(e.found, e.model, u))
}

// askElements asks a backend for the embeddings that are missing, or gets them from a request that
// does. Should they turn out to be of another model than those that are kept, it asks for all.
func (x *exchange) askElements(e *embedding) error {
	defer x.restore(e)
	if len(e.missing) < len(e.keys) {
		x.cacheHeader("partial")
		x.cached("partial")
	} else {
		x.cacheHeader("miss")
		x.missed()
	}
	for {
		if err := x.reduce(e); err != nil {
			return err
		}
		rec, err := x.fetchElements(e)
		if err != nil || rec == nil {
			return err
		}
		if x.answer.status == http.StatusOK {
			answer, ok := x.joinElements(e, rec)
			if len(e.missing) == len(e.keys) { // nothing of it is ours
				answer = rec.body.Bytes()
			}
			if ok {
				x.write(http.StatusOK, "application/json", answer)
				return nil
			}
		}
		if x.answer.status != http.StatusOK || len(e.missing) == len(e.keys) {
			x.write(x.answer.status, rec.header.Get("Content-Type"), rec.body.Bytes())
			return nil
		}
		x.restore(e)
		x.cache.tier = ""
		e.missing, e.model, e.tokens = e.missing[:0], "", 0
		for i := range e.keys {
			e.missing = append(e.missing, i)
		}
	}
}

// reduce makes the request one for the missing inputs.
func (x *exchange) reduce(e *embedding) error {
	if len(e.missing) == len(e.keys) {
		return nil
	}
	body := bytes.Join(e.in.Body(e.missing...), nil)
	in, err := openai.Meter(x.route.kind, body)
	if err != nil { // it was read as a part of the whole
		x.settle(outcomeFailed)
		return err
	}
	x.body, x.in = edge.NewBody(body), in
	return nil
}

// restore makes it the client's request again.
func (x *exchange) restore(e *embedding) {
	if x.body != e.whole {
		x.body.Release()
		x.body, x.in = e.whole, e.wholeIn
	}
}

// fetchElements gets the answer to the reduced request; nil if the client was answered otherwise.
func (x *exchange) fetchElements(e *embedding) (*recorder, error) {
	c, metered := &x.cache, x.caller.CachedMetered && x.res.open
	var err error
	if c.key, err = x.elementKey(e.in.Body(e.missing...)); err != nil {
		x.settle(outcomeFailed)
		return nil, err
	}
	rec := &recorder{header: x.w.Header().Clone(), stamp: x.p.cfg.Elements.Stamp(), kept: e.tokens}
	t, err := x.join()
	switch {
	case err != nil:
		x.settle(outcomeFailed)
		return nil, err
	case t.Hit != nil:
		x.answer.usage = openai.Usage{Input: t.Hit.Input, Known: true}
		rec.theirs = true
		rec.body.Write(t.Hit.Body)
		x.settleKept("live", metered)
		return rec, nil
	case t.Failed != nil:
		return nil, x.serveFailed(t.Failed, metered)
	}
	c.fill, c.pub = t.Fill, publisher{}
	if !metered {
		if err := x.admitRest(); err != nil {
			x.endFill(FillEnd{Kind: FillUnasked})
			return nil, err
		}
	}
	return rec, x.recordAnswer(rec)
}

// recordAnswer has a backend's answer recorded.
func (x *exchange) recordAnswer(rec *recorder) error {
	client := x.w
	defer func() { x.w, x.recording, x.answer.started = client, false, false }() // also of a panic
	x.w, x.recording = rec, true
	if x.caller.CachedMetered {
		x.cache.extra = rec.kept
	}
	err := x.forward()
	x.endFill(x.failedLead(err))
	if err == nil && !rec.over {
		maps.Copy(client.Header(), rec.header)
	}
	if rec.over {
		x.answer.clientGo = false // it is us who could take no more
		return newError(http.StatusBadGateway, "upstream_error", "the embeddings are longer than %d bytes in all; send fewer inputs at once", maxEmbeddings)
	}
	return err
}

// joinElements puts the answer together and keeps what is new of it.
func (x *exchange) joinElements(e *embedding, rec *recorder) ([]byte, bool) {
	got, ok := openai.SplitEmbeddings(rec.body.Bytes(), len(e.missing))
	if !ok || e.model != "" && got.Model != e.model {
		return nil, false
	}
	for k, i := range e.missing {
		e.found[i] = got.Elements[k]
	}
	if !rec.theirs && !x.cache.pub.private {
		x.keepElements(e, &got, rec.stamp)
	}
	u := got.Usage
	u.Input += e.tokens
	return openai.JoinEmbeddings(e.found, got.Model, u), true
}

// keepElements keeps each embedding as the answer to a request for it alone.
func (x *exchange) keepElements(e *embedding, got *openai.Embeddings, stamp uint64) {
	exact := x.cache.surface.Exact
	shares := e.in.Shares(got.Usage.Input, e.missing...)
	keys, entries := make([][32]byte, 0, len(e.missing)), make([]*CacheEntry, 0, len(e.missing))
	for k, i := range e.missing {
		one := openai.JoinEmbeddings(got.Elements[k:k+1], got.Model, openai.Usage{Input: shares[k], Known: true})
		if int64(len(one)) > exact.MaxBytes {
			continue
		}
		keys = append(keys, e.keys[i])
		entries = append(entries, &CacheEntry{
			Tenant: x.caller.Tenant, Surface: x.surface, ContentType: "application/json", Body: one, Tags: x.cache.pub.tags, Input: shares[k], Life: exact.Life,
		})
	}
	x.p.cfg.Elements.PutMany(stamp, keys, entries)
}

// errOver: an answer is too long to be put together.
var errOver = errors.New("the answer is too long")

// recorder keeps an answer instead of sending it. Headers go to the client's all the same.
type recorder struct {
	header http.Header
	body   bytes.Buffer
	over   bool
	stamp  uint64 // when it was asked for
	kept   int64  // tokens of the embeddings beside it that are kept
	theirs bool   // another request's
}

// Header see http.ResponseWriter.
func (r *recorder) Header() http.Header { return r.header }

// WriteHeader see http.ResponseWriter.
func (r *recorder) WriteHeader(int) {}

// Write see http.ResponseWriter.
func (r *recorder) Write(p []byte) (int, error) {
	if r.over = r.over || r.body.Len()+len(p) > maxEmbeddings; r.over {
		return 0, errOver
	}
	return r.body.Write(p)
}

// Flush see http.Flusher.
func (r *recorder) Flush() {}
