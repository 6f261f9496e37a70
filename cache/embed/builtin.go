package embed

import (
	"context"
	"sync"

	"headgate/cache/vec"
)

const (
	builtinVersion = "all-MiniLM-L6-v2/int8-1" // the model and how it is quantised: change it with either
	builtinDim     = 384
	builtinWindow  = 256 // word pieces, [CLS] and [SEP] among them
	builtinPass    = 64  // word pieces of several texts that go through the model together
)

// Model is the embedding model that runs in this process: all-MiniLM-L6-v2 with weights of int8.
// It may be called by many goroutines and never changes.
type Model struct {
	tok     *tokenizer
	weights *weights
	pool    sync.Pool // of *pass
}

// Builtin makes the model out of the asset that is part of the program. That takes some 50 ms
// and 15 MB; do it once. An error means that the program was built with another asset.
func Builtin() (*Model, error) {
	vocab, weights, err := readAsset(asset)
	if err != nil {
		return nil, err
	}
	tok, err := newTokenizer(vocab)
	if err != nil {
		return nil, err
	}
	return &Model{tok: tok, weights: weights, pool: sync.Pool{New: func() any { return &pass{} }}}, nil
}

// Version is the model's name and how its weights are quantised.
func (m *Model) Version() string { return builtinVersion }

// Dim is 384.
func (m *Model) Dim() int { return builtinDim }

// Embed gives one vector of unit length for each of texts, on the goroutine that calls. A text of
// more than 254 word pieces (some 190 English words) is a *TooLongError, found before any
// text is embedded; the work of a text that fits is so bounded. ctx is looked at between passes,
// each of which takes a few milliseconds, or some 60 for a text that fills the window. The empty text
// has a vector too. A text's vector does not depend on the texts beside it.
func (m *Model) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	p := m.pool.Get().(*pass)
	defer m.pool.Put(p)
	vectors := make([][]float32, len(texts))
	p.start()
	for i, text := range texts {
		if tokens := p.tokenize(m.tok, text); tokens > builtinWindow {
			return nil, &TooLongError{Index: i, Tokens: tokens, Limit: builtinWindow}
		}
	}
	all := make([]float32, len(texts)*builtinDim)
	for first := 0; first < len(texts); {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		next := p.next(first)
		p.run(m.weights, first, next, all[first*builtinDim:next*builtinDim])
		first = next
	}
	for i := range vectors {
		vectors[i] = all[i*builtinDim : (i+1)*builtinDim : (i+1)*builtinDim]
		vec.Norm(vectors[i])
	}
	return vectors, nil
}
