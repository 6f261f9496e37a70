package embed

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
)

// encoding is how a server is asked to write its vectors. Base64 is a third of the bytes and
// a tenth of the work; a server may not know it, and may ignore it.
type encoding uint8

const (
	base64Untried encoding = iota
	base64Taken
	plainNumbers
)

func requestBody(model string, texts []string, with encoding) []byte {
	format := "base64"
	if with == plainNumbers {
		format = "float"
	}
	body, err := json.Marshal(struct {
		Model  string   `json:"model"`
		Input  []string `json:"input"`
		Format string   `json:"encoding_format"`
	}{model, texts, format})
	if err != nil {
		panic(err) // strings always have a form in JSON
	}
	return body
}

// vector is an embedding as servers write it: numbers, or base64 of little-endian float32.
type vector []float32

func (v *vector) UnmarshalJSON(b []byte) error {
	if len(b) == 0 || b[0] != '"' {
		return json.Unmarshal(b, (*[]float32)(v))
	}
	var packed string
	if err := json.Unmarshal(b, &packed); err != nil {
		return err
	}
	raw, err := base64.StdEncoding.DecodeString(packed)
	if err != nil {
		return err
	}
	if len(raw)%4 != 0 {
		return errors.New("base64 that is not of float32")
	}
	*v = make(vector, len(raw)/4)
	for i := range *v {
		(*v)[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return nil
}

// parseAnswer reads the n vectors of an answer, in the order of the texts. dim is how long they
// are; 0: all as long as the first.
func parseAnswer(answer []byte, n, dim int) ([][]float32, error) {
	var list struct {
		Data []struct {
			Index     *int   `json:"index"`
			Embedding vector `json:"embedding"`
		} `json:"data"`
	}
	if err := json.Unmarshal(answer, &list); err != nil {
		// The error would quote the answer, and that perhaps a text.
		return nil, fmt.Errorf("%d bytes that are no JSON with a list of embeddings", len(answer))
	}
	if len(list.Data) != n {
		return nil, fmt.Errorf("%d vectors for %d texts", len(list.Data), n)
	}
	vectors := make([][]float32, n)
	for i, d := range list.Data {
		at := i
		if d.Index != nil {
			at = *d.Index
		}
		if at < 0 || at >= n || vectors[at] != nil {
			return nil, fmt.Errorf("index %d is beyond the texts, or there twice", at)
		}
		if dim == 0 {
			dim = len(d.Embedding)
		}
		if err := check(d.Embedding, dim); err != nil {
			return nil, fmt.Errorf("vector %d: %w", at, err)
		}
		vectors[at] = d.Embedding
	}
	return vectors, nil
}

// check is whether a vector has dim finite numbers and a direction.
func check(v []float32, dim int) error {
	if len(v) != dim || dim == 0 || dim > maxDim {
		return fmt.Errorf("%d numbers, want %d (at most %d)", len(v), dim, maxDim)
	}
	var sum float64
	for _, x := range v {
		sum += float64(x) * float64(x)
	}
	if math.IsNaN(sum) || math.IsInf(sum, 0) || sum == 0 {
		return errors.New("numbers that are not finite, or all zero")
	}
	return nil
}
