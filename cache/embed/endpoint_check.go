package embed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"headgate/cache/vec"
)

const (
	lengthsToLearn = 8           // answers of one other length, in a row, until that is the length
	mostAlike      = .98         // two texts that have nothing in common
	failsEvery     = time.Minute // between two lines of the log that the server fails

	// Two texts that have nothing in common, not a word nor a topic nor their lengths.
	unlikeOne   = "How do I reset the password of my account?"
	unlikeOther = "Yesterday heavy rain flooded seven villages on both banks of the lower Danube."
)

// prove has the server embed two texts that have nothing in common, and is an error as long as it tells them not
// apart: everything would be like everything. That their vectors are finite and of unit length, post sees to. If all is well
// the batches that waited for it go.
func (e *Endpoint) prove(ctx context.Context) error {
	r := e.ask(ctx, []string{unlikeOne, unlikeOther})
	if err := r.first(); err != nil {
		if ofTheText(err) { // which is not the caller's
			return &Error{Kind: Refused, Reason: fmt.Sprintf("not even two short sentences are taken: %v", err)}
		}
		return err
	}
	a, b := r.vectors[0], r.vectors[1]
	if len(a) != len(b) {
		return &Error{Kind: Malformed, Reason: fmt.Sprintf("vectors of %d numbers and of %d", len(a), len(b))}
	}
	if similarity := vec.Dot(a, b); !(similarity <= mostAlike) { // so that NaN is none, either
		return &Error{Kind: Malformed, Reason: fmt.Sprintf("two sentences that have nothing in common have a similarity of %.3f: the server tells no texts apart", similarity)}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.proven, e.proving = true, false
	e.next()
	return nil
}

// learn remembers what an answer told. It is an error if the vectors have another length than the others had; after
// so many of the same other length in a row that is the length, the server has to stand its check anew, and a rest is over.
func (e *Endpoint) learn(with encoding, dim int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if with == base64Untried {
		with = base64Taken
	}
	e.encoding = with
	if e.dim == 0 || e.dim == dim {
		e.dim, e.others = dim, 0
		return nil
	}
	if e.other != dim {
		e.other, e.others = dim, 0
	}
	e.others++
	err := &Error{Kind: Malformed, Reason: fmt.Sprintf("vectors of %d numbers after some of %d", dim, e.dim)}
	if e.others >= lengthsToLearn {
		e.config.Logger.Warn("the embedding server gives vectors of another length from now on", "model", e.config.Model, "before", e.dim, "dim", dim)
		e.dim, e.others = dim, 0
		e.proven, e.breaker = false, breaker{}
	}
	return err
}

// condition is how the server was when the log was told last.
type condition uint8

const (
	works condition = iota
	fails
	rests
)

// tell writes to the log how the server is, when that has changed: what went wrong with a batch, or nil, and for how long the server
// rests if that begins now. A server that fails now and then is told of once a minute. e.mu is held.
func (e *Endpoint) tell(now time.Time, err error, rest time.Duration) {
	log := e.config.Logger.With("model", e.config.Model)
	kind, reason := Kind(""), ""
	if failure, ok := errors.AsType[*Error](err); ok {
		if kind, reason = failure.Kind, failure.Reason; failure.Err != nil {
			reason += ": " + failure.Err.Error()
		}
	}
	switch {
	case err == nil:
		if e.told != works {
			log.Warn("the embedding server is back")
		}
		e.told = works
	case rest > 0:
		if e.told != rests || e.toldKind != kind {
			log.Warn("the embedding server rests", "kind", kind, "reason", reason, "rest_ms", rest.Milliseconds())
		}
		e.told, e.toldKind = rests, kind
	case e.told == works && (e.toldAt.IsZero() || now.Sub(e.toldAt) >= failsEvery):
		log.Warn("the embedding server fails", "kind", kind, "reason", reason)
		e.told, e.toldAt = fails, now
	}
}
