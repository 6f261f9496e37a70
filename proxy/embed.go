package proxy

import (
	"bytes"
	"context"
	"errors"
	"net/http"

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
	found   [][]byte // by input; nil: not known
	tokens  int64    // of those that were kept
	model   string   // as the backend calls it
	missing []int
}

// embed answers a request for embeddings by those that are kept, and asks a backend for the others
// only. ok is false where the request can't be taken apart: then nothing has been done.
func (x *exchange) embed() (ok bool, err error) {
	in, ok := openai.SplitInputs(x.body.Bytes())
	if !ok || x.p.cfg.Elements == nil {
		return false, nil
	}
	e := &embedding{in: in}
	if err := x.elementKeys(e); err != nil {
		return true, x.chargeMalformed(err)
	}
	if err := x.enter(x.caller.CachedMetered); err != nil {
		return true, err
	}
	x.lookElements(e)
	switch {
	case len(e.missing) == 0:
		return true, x.serveElements(e)
	case x.cache.mode == cacheOnly:
		x.settle(outcomeMalformed)
		return true, errNotKept("not all embeddings of this request are kept")
	}
	return true, x.askElements(e)
}

// elementKeys names the embedding of each input: it is the answer to a request for it alone.
func (x *exchange) elementKeys(e *embedding) error {
	cc := x.cacheContext()
	e.keys = make([][32]byte, e.in.Len())
	for i := range e.keys {
		cc.Body = bytes.Join(e.in.Body(i), nil)
		key, err := x.p.cfg.Cache.Key(&cc)
		if err != nil {
			return malformed(http.StatusBadRequest, "input", "the body can't be brought to a canonical form: %v", err)
		}
		e.keys[i] = key
	}
	return nil
}

func (x *exchange) lookElements(e *embedding) {
	e.found = make([][]byte, len(e.keys))
	kept := make([]*Cached, len(e.keys))
	if x.cache.mode != cacheRefresh {
		kept = x.p.cfg.Elements.GetMany(x.r.Context(), e.keys)
	}
	for i, k := range kept {
		if k == nil {
			e.missing = append(e.missing, i)
			continue
		}
		one, ok := openai.SplitEmbeddings(k.Body, 1)
		if !ok {
			e.missing = append(e.missing, i)
			continue
		}
		e.found[i], e.model, e.tokens = one.Elements[0], one.Model, e.tokens+k.Input
	}
}

// serveElements answers from what is kept.
func (x *exchange) serveElements(e *embedding) error {
	u := openai.Usage{Input: e.tokens, Known: true}
	x.answer.usage = u
	if err := x.settleKept("exact", x.caller.CachedMetered); err != nil {
		return err
	}
	x.cacheHeader("exact")
	x.write(http.StatusOK, "application/json", openai.JoinEmbeddings(e.found, e.model, u))
	return nil
}

// askElements asks a backend for the embeddings that are missing.
func (x *exchange) askElements(e *embedding) error {
	word := "miss"
	if len(e.missing) < len(e.keys) {
		word = "partial"
	}
	x.cached(word)
	x.cacheHeader(word)
	whole, wholeIn := x.body, x.in
	part, err := x.reduce(e)
	if err != nil {
		return err
	}
	defer func() {
		if x.body != whole {
			x.body.Release()
			x.body, x.in = whole, wholeIn
		}
	}()
	if !x.caller.CachedMetered {
		if err := x.admitRest(); err != nil {
			return err
		}
	}
	stamp := x.p.cfg.Elements.Stamp()
	w := x.w
	rec := &recorder{header: w.Header()}
	x.w, x.recording = rec, true
	err = x.forward()
	x.w, x.recording = w, false
	started := x.answer.started
	x.answer.started = false
	if rec.over {
		return newError(http.StatusBadGateway, "upstream_error", "the embeddings are longer than %d bytes in all; send fewer inputs at once", maxEmbeddings)
	}
	if err != nil || !started {
		return err
	}
	if x.answer.status == http.StatusOK {
		if answer, ok := x.joinElements(e, rec.body.Bytes(), stamp); ok {
			x.write(http.StatusOK, "application/json", answer)
			return nil
		}
		if part {
			return newError(http.StatusBadGateway, "upstream_error", "the backend's embeddings can't be told apart; send X-Headgate-Cache: bypass")
		}
	}
	x.write(x.answer.status, w.Header().Get("Content-Type"), rec.body.Bytes())
	return nil
}

// reduce makes the request one for the missing inputs. part says that others are left out.
func (x *exchange) reduce(e *embedding) (part bool, err error) {
	if len(e.missing) == len(e.keys) {
		return false, nil
	}
	body := bytes.Join(e.in.Body(e.missing...), nil)
	in, err := openai.Meter(x.route.kind, body)
	if err != nil {
		x.settle(outcomeFailed)
		return true, err
	}
	x.body, x.in = edge.NewBody(body), in
	return true, nil
}

// joinElements puts the answer together and keeps what is new of it.
func (x *exchange) joinElements(e *embedding, answer []byte, stamp uint64) ([]byte, bool) {
	got, ok := openai.SplitEmbeddings(answer, len(e.missing))
	if !ok || e.model != "" && got.Model != e.model {
		return nil, false
	}
	exact := x.cache.surface.Exact
	shares := e.in.Shares(got.Usage.Input, e.missing...)
	keys, entries := make([][32]byte, 0, len(e.missing)), make([]*CacheEntry, 0, len(e.missing))
	for k, i := range e.missing {
		e.found[i] = got.Elements[k]
		one := openai.JoinEmbeddings(got.Elements[k:k+1], got.Model, openai.Usage{Input: shares[k], Known: true})
		if int64(len(one)) > exact.MaxBytes || x.cache.pub.private {
			continue
		}
		keys = append(keys, e.keys[i])
		entries = append(entries, &CacheEntry{
			Tenant: x.caller.Tenant, Surface: x.surface, ContentType: "application/json", Body: one, Tags: x.cache.tags, Input: shares[k], Life: exact.Life,
		})
	}
	x.p.cfg.Elements.PutMany(stamp, keys, entries)
	u := got.Usage
	u.Input += e.tokens
	return openai.JoinEmbeddings(e.found, got.Model, u), true
}

// errOver: an answer is too long to be put together.
var errOver = errors.New("the answer is too long")

// recorder keeps an answer instead of sending it. Headers go to the client's all the same.
type recorder struct {
	header http.Header
	body   bytes.Buffer
	over   bool
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
