package embed

import (
	_ "embed" // the asset
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"headgate/cache/vec"
)

// asset is a safetensors file, made by convert; see minilm/README.md. It is a string so that
// nobody can write to it, and so that the words stay where the program was loaded.
//
//go:embed minilm/all-minilm-l6-v2.int8.safetensors
var asset string

// The shape of all-MiniLM-L6-v2.
const (
	modelLayers = 6
	modelHeads  = 12
	modelHead   = builtinDim / modelHeads
	modelInner  = 1536
)

// weights is the model. Read only.
type weights struct {
	words      string    // int8: vocabWords rows of builtinDim
	wordScales []float32 // what a one of each row is worth
	positions  []float32 // builtinWindow rows of builtinDim
	norm       layerNorm
	layers     [modelLayers]layer
}

type layer struct {
	attention linear // queries, keys and values
	merge     linear
	mergeNorm layerNorm
	widen     linear
	narrow    linear
	outNorm   layerNorm
}

// linear is y = Wx + b with W of int8: a row of y for each row of x.
type linear struct {
	packed *vec.Packed
	worth  vec.Columns
}

type layerNorm struct{ weight, bias []float32 }

// reader reads the arrays of a safetensors file and keeps its first error.
type reader struct {
	header map[string]json.RawMessage
	data   string
	err    error
}

func readAsset(file string) (vocab string, w *weights, err error) {
	r, err := newReader(file)
	if err != nil {
		return "", nil, fmt.Errorf("embedding model: %w", err)
	}
	w = &weights{
		words:      r.raw("words", "I8", vocabWords*builtinDim),
		wordScales: r.floats("words.scale", vocabWords),
		positions:  r.floats("positions", builtinWindow*builtinDim),
		norm:       r.norm("norm"),
	}
	for i := range w.layers {
		name := fmt.Sprintf("layer.%d.", i)
		w.layers[i] = layer{
			attention: r.linear(name+"attention", 3*builtinDim, builtinDim),
			merge:     r.linear(name+"merge", builtinDim, builtinDim),
			mergeNorm: r.norm(name + "merge.norm"),
			widen:     r.linear(name+"widen", modelInner, builtinDim),
			narrow:    r.linear(name+"narrow", builtinDim, modelInner),
			outNorm:   r.norm(name + "narrow.norm"),
		}
	}
	vocab = r.raw("vocab", "U8", -1)
	if r.err != nil {
		return "", nil, fmt.Errorf("embedding model: %w", r.err)
	}
	return vocab, w, nil
}

func newReader(file string) (*reader, error) {
	if len(file) < 8 {
		return nil, errors.New("the asset is cut off")
	}
	size := binary.LittleEndian.Uint64([]byte(file[:8]))
	if size > uint64(len(file)-8) {
		return nil, errors.New("the asset's header is cut off")
	}
	r := &reader{header: map[string]json.RawMessage{}, data: file[8+size:]}
	if err := json.Unmarshal([]byte(file[8:8+size]), &r.header); err != nil {
		return nil, fmt.Errorf("the asset's header: %w", err)
	}
	return r, nil
}

// raw is the bytes of an array, which must be of this type and as many (-1: any number).
func (r *reader) raw(name, dtype string, size int) string {
	var h struct {
		DType   string `json:"dtype"`
		Offsets [2]int `json:"data_offsets"`
	}
	if err := json.Unmarshal(r.header[name], &h); err != nil {
		r.fail(name, "has no place in the header")
		return ""
	}
	from, to := h.Offsets[0], h.Offsets[1]
	if h.DType != dtype || from < 0 || from > to || to > len(r.data) || size >= 0 && to-from != size {
		r.fail(name, "is not of the model's type and size")
		return ""
	}
	return r.data[from:to]
}

func (r *reader) fail(name, what string) {
	if r.err == nil {
		r.err = fmt.Errorf("array %s %s", name, what)
	}
}

func (r *reader) floats(name string, n int) []float32 {
	return decodeFloats(r.raw(name, "F32", 4*n))
}

func decodeFloats(data string) []float32 {
	raw := []byte(data)
	f := make([]float32, len(raw)/4)
	for i := range f {
		f[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return f
}

func (r *reader) norm(name string) layerNorm {
	return layerNorm{weight: r.floats(name+".weight", builtinDim), bias: r.floats(name+".bias", builtinDim)}
}

func (r *reader) linear(name string, n, k int) linear {
	raw := r.raw(name, "I8", n*k)
	l := linear{worth: vec.Columns{
		Scale: r.floats(name+".scale", n),
		Sum:   make([]float32, n),
		Bias:  r.floats(name+".bias", n),
	}}
	if r.err != nil {
		return l
	}
	w := make([]int8, n*k)
	for i := range w {
		w[i] = int8(raw[i])
	}
	for row := range l.worth.Sum {
		var sum int
		for _, v := range w[row*k : (row+1)*k] {
			sum += int(v)
		}
		l.worth.Sum[row] = float32(sum) * l.worth.Scale[row]
	}
	l.packed = vec.Pack(w, n, k)
	return l
}
