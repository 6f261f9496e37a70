package main

import (
	"fmt"
	"math"
)

// The shape of all-MiniLM-L6-v2.
const (
	words   = 30522
	width   = 384
	inner   = 1536
	layers  = 6
	heads   = 12
	window  = 256 // positions that sentence-transformers lets the model see
	trained = 512 // positions in the weights
)

// metadata goes into the asset's header.
const metadata = `{"model":"all-MiniLM-L6-v2","license":"Apache-2.0","source":"` + wheelName +
	`","source_sha256":"` + wheelSHA256 + `","quantisation":"int8 symmetric by output row, 1"}`

// convert makes the asset. Position and token-type embeddings become one, as do the matrices of
// queries, keys and values, and the scale of attention goes into that of the queries.
func convert(t tensors, vocab []byte) ([]byte, error) {
	w := &writer{}
	w.add("vocab", "U8", vocab, len(vocab))
	if pad := -len(vocab) & 7; pad != 0 {
		w.add("padding", "U8", make([]byte, pad), pad) // so that what follows is aligned
	}
	table, err := t.get("embeddings.word_embeddings.weight", words, width)
	if err != nil {
		return nil, err
	}
	w.matrix("words", table, words, width)
	positions, err := positions(t)
	if err != nil {
		return nil, err
	}
	w.floats("positions", positions)
	if err := layerNorm(w, t, "norm", "embeddings.LayerNorm"); err != nil {
		return nil, err
	}
	for l := range layers {
		if err := layer(w, t, l); err != nil {
			return nil, err
		}
	}
	return w.file(metadata), nil
}

// positions adds the embedding of token type 0, the only one here, to those of the positions.
func positions(t tensors) ([]float32, error) {
	p, err := t.get("embeddings.position_embeddings.weight", trained, width)
	if err != nil {
		return nil, err
	}
	types, err := t.get("embeddings.token_type_embeddings.weight", 2, width)
	if err != nil {
		return nil, err
	}
	sum := make([]float32, window*width)
	for i := range sum {
		sum[i] = p[i] + types[i%width]
	}
	return sum, nil
}

func layer(w *writer, t tensors, l int) error {
	from, to := fmt.Sprintf("encoder.layer.%d.", l), fmt.Sprintf("layer.%d.", l)
	if err := attention(w, t, to+"attention", from+"attention.self."); err != nil {
		return err
	}
	steps := []struct {
		to, from string
		n, k     int
		norm     string
	}{
		{"merge", "attention.output.dense", width, width, "attention.output.LayerNorm"},
		{"widen", "intermediate.dense", inner, width, ""},
		{"narrow", "output.dense", width, inner, "output.LayerNorm"},
	}
	for _, s := range steps {
		m, err := t.get(from+s.from+".weight", s.n, s.k)
		if err != nil {
			return err
		}
		b, err := t.get(from+s.from+".bias", s.n)
		if err != nil {
			return err
		}
		w.floats(to+s.to+".bias", b)
		w.matrix(to+s.to, m, s.n, s.k)
		if s.norm == "" {
			continue
		}
		if err := layerNorm(w, t, to+s.to+".norm", from+s.norm); err != nil {
			return err
		}
	}
	return nil
}

func attention(w *writer, t tensors, to, from string) error {
	m := make([]float32, 0, 3*width*width)
	b := make([]float32, 0, 3*width)
	for _, part := range []string{"query", "key", "value"} {
		pm, err := t.get(from+part+".weight", width, width)
		if err != nil {
			return err
		}
		pb, err := t.get(from+part+".bias", width)
		if err != nil {
			return err
		}
		m, b = append(m, pm...), append(b, pb...)
	}
	scale := float32(1 / math.Sqrt(width/heads))
	for i := range width * width {
		m[i] *= scale
	}
	for i := range width {
		b[i] *= scale
	}
	w.floats(to+".bias", b)
	w.matrix(to, m, 3*width, width)
	return nil
}

func layerNorm(w *writer, t tensors, to, from string) error {
	for _, part := range []string{"weight", "bias"} {
		f, err := t.get(from+"."+part, width)
		if err != nil {
			return err
		}
		w.floats(to+"."+part, f)
	}
	return nil
}
