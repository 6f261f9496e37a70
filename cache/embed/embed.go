// Package embed turns texts into vectors whose inner product says how much the texts mean the same.
//
// Model is the one that runs in this process, Endpoint asks a server, and Memo stands before
// either and remembers. They are alike to who uses them: Embedder.
package embed

import (
	"context"
	"fmt"
)

// Embedder turns texts into vectors. Implementations may be called by many goroutines.
type Embedder interface {
	// Version names the model, its version and how it is quantised. Vectors of two versions
	// are never compared.
	Version() string

	// Dim is the length of every vector. A server's may change: an Endpoint's, if it is not configured.
	Dim() int

	// Embed gives one vector of unit length for each of texts, in their order. Who calls may
	// keep the vectors and must not write to them. Either all texts have a vector, of one length, or there is an
	// error: a *TooLongError, an *Error, or the context's.
	Embed(ctx context.Context, texts []string) ([][]float32, error)
}

// TooLongError says that a text does not fit into the model's window. Its vector would speak of
// its beginning only, so it has none: it is never found by similarity.
type TooLongError struct {
	Index  int // of the first such text
	Tokens int // how long it is; 0 where only a bound is known to be exceeded
	Limit  int // how long it may be; 0 where that is not known
}

func (e *TooLongError) Error() string {
	return fmt.Sprintf("text %d is too long for the embedding model: %d tokens of at most %d", e.Index, e.Tokens, e.Limit)
}

// Kind is why an embedder failed.
type Kind string

// The kinds of failure.
const (
	Unavailable Kind = "unavailable" // the server did not answer, or said it cannot
	Refused     Kind = "refused"     // the server does not want such a request; the same will fail again
	Malformed   Kind = "malformed"   // an answer came that cannot be what was asked for
	Resting     Kind = "resting"     // not asked, as the server failed too often just now
	Overloaded  Kind = "overloaded"  // not asked, as too many texts wait
)

// Error is a failure of an embedder that is neither of the text nor of the context.
type Error struct {
	Kind   Kind
	Reason string // without the text that was to be embedded
	Err    error  // nil where nothing underlies it
}

func (e *Error) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("embedding %s: %s: %v", e.Kind, e.Reason, e.Err)
	}
	return fmt.Sprintf("embedding %s: %s", e.Kind, e.Reason)
}

func (e *Error) Unwrap() error { return e.Err }

// ofOneLength gives the vectors of one call if they can be compared. They cannot if a server's length changed in between.
func ofOneLength(vectors [][]float32) ([][]float32, error) {
	for _, v := range vectors {
		if len(v) != len(vectors[0]) {
			return nil, &Error{Kind: Malformed, Reason: fmt.Sprintf("vectors of %d numbers and of %d in one call", len(vectors[0]), len(v))}
		}
	}
	return vectors, nil
}
