package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
)

// tensors are the arrays of a safetensors file by name: 8 bytes length, a header in JSON, data.
type tensors map[string]tensor

type tensor struct {
	shape []int
	f     []float32
}

// tensorHeader is what the header says of one array.
type tensorHeader struct {
	DType   string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
}

// readTensors reads the arrays of float32 in a safetensors file.
func readTensors(file []byte) (tensors, error) {
	if len(file) < 8 || binary.LittleEndian.Uint64(file) > uint64(len(file)-8) {
		return nil, errors.New("the header does not fit into the file")
	}
	size := int(binary.LittleEndian.Uint64(file))
	header := map[string]json.RawMessage{}
	if err := json.Unmarshal(file[8:8+size], &header); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	data := file[8+size:]
	all := tensors{}
	for name, raw := range header {
		var h tensorHeader
		if name == "__metadata__" {
			continue
		}
		if err := json.Unmarshal(raw, &h); err != nil {
			return nil, fmt.Errorf("header of %s: %w", name, err)
		}
		if h.DType != "F32" {
			continue // the numbering of positions
		}
		if h.Offsets[0] < 0 || h.Offsets[0] > h.Offsets[1] || h.Offsets[1] > len(data) {
			return nil, fmt.Errorf("%s does not fit into the file", name)
		}
		all[name] = tensor{h.Shape, floats(data[h.Offsets[0]:h.Offsets[1]])}
	}
	return all, nil
}

func floats(raw []byte) []float32 {
	f := make([]float32, len(raw)/4)
	for i := range f {
		f[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return f
}

// get is the array called name, which must have that shape.
func (t tensors) get(name string, shape ...int) ([]float32, error) {
	got, ok := t[name]
	n := 1
	for _, d := range shape {
		n *= d
	}
	if !ok || !slices.Equal(got.shape, shape) || len(got.f) != n {
		return nil, fmt.Errorf("weights: %s: shape %v is wanted, there is %v", name, shape, got.shape)
	}
	return got.f, nil
}

// writer builds a safetensors file: arrays in the order in which they were added.
type writer struct {
	entries []json.RawMessage
	data    []byte
}

func (w *writer) add(name, dtype string, raw []byte, shape ...int) {
	h, _ := json.Marshal(tensorHeader{dtype, shape, [2]int{len(w.data), len(w.data) + len(raw)}}) // cannot fail
	w.entries = append(w.entries, json.RawMessage(fmt.Sprintf("%q:%s", name, h)))
	w.data = append(w.data, raw...)
}

func (w *writer) floats(name string, f []float32) {
	raw := make([]byte, 0, 4*len(f))
	for _, v := range f {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	w.add(name, "F32", raw, len(f))
}

// matrix quantises a matrix of n rows of k numbers: name holds int8, name.scale what a one of
// each row is worth.
func (w *writer) matrix(name string, m []float32, n, k int) {
	scales := make([]float32, n)
	raw := make([]byte, 0, n*k)
	for row := range n {
		var top float32
		for _, v := range m[row*k : (row+1)*k] {
			top = max(top, v, -v)
		}
		scale := top / 127
		if scale == 0 {
			scale = 1
		}
		scales[row] = scale
		for _, v := range m[row*k : (row+1)*k] {
			raw = append(raw, byte(int8(math.RoundToEven(float64(v)/float64(scale)))))
		}
	}
	w.floats(name+".scale", scales)
	w.add(name, "I8", raw, n, k)
}

// file is the whole file; metadata is in it as JSON.
func (w *writer) file(metadata string) []byte {
	header := []byte(`{"__metadata__":` + metadata)
	for _, e := range w.entries {
		header = append(append(header, ','), e...)
	}
	header = append(header, '}')
	for len(header)%8 != 0 {
		header = append(header, ' ')
	}
	return slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header, w.data)
}
