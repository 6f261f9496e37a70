package openai

import (
	"bytes"
	"math/bits"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// Bounds of an embeddings request that is split, and of its answer.
const (
	maxInputs = 2048    // inputs of one request, as OpenAI bounds them
	maxRest   = 4 << 10 // bytes of the body around its inputs: they are in every body that Body makes
)

// Inputs are the inputs of a body of /v1/embeddings, each of which has an embedding of its own,
// whatever stands beside it. It refers to the body.
type Inputs struct {
	body     []byte
	at       span // the value of input
	elements []span
}

// SplitInputs finds the inputs of a body that Meter has accepted: a string, an array of strings,
// an array of ids, or one of arrays of ids. It is not ok where anything is unusual, such as a
// field that is not known to leave the inputs apart from each other or an encoding_format whose
// answer is not JSON: then the body should be sent as it is. Linear in the body.
func SplitInputs(body []byte) (in Inputs, ok bool) {
	in.body = body
	o := object{b: body}
	for o.next() {
		switch string(o.name) {
		case "input":
			if in.at.end > 0 {
				return Inputs{}, false
			}
			in.at = span{o.i - len(o.value), o.i}
		case "encoding_format":
			if v := string(o.value); v != "null" && v != `"float"` && v != `"base64"` {
				return Inputs{}, false
			}
		case "model", "user", "metadata", "request_id", "priority", "safety_identifier", "cache_salt",
			"dimensions", "output_dimension", "input_type", "task",
			"truncate", "truncation", "truncation_side", "truncate_prompt_tokens", "add_special_tokens",
			"normalize", "use_activation":
		default:
			return Inputs{}, false
		}
	}
	if o.bad || in.at.end == 0 || len(body)-(in.at.end-in.at.start) > maxRest {
		return Inputs{}, false
	}
	return in, in.split()
}

// split finds the elements.
func (in *Inputs) split() bool {
	first := skipSpace(in.body, in.at.start+1)
	switch c := in.body[in.at.start]; {
	case c == '"':
		in.elements = []span{in.at}
		return true
	case c != '[':
		return false
	case in.body[first] >= '0' && in.body[first] <= '9':
		in.elements = []span{in.at}
		return isIDs(in.body[in.at.start:in.at.end])
	}
	open := in.body[first] // all of one sort
	a := array{b: in.body[:in.at.end], i: in.at.start}
	for a.next() {
		if len(in.elements) == maxInputs || a.value[0] != open || open != '"' && !isIDs(a.value) {
			return false
		}
		in.elements = append(in.elements, span{a.i - len(a.value), a.i})
	}
	return len(in.elements) > 0 && in.body[skipSpace(in.body, a.i)] == ']'
}

// isIDs tells whether a value is an array of one token id at least.
func isIDs(v []byte) bool {
	if v[0] != '[' {
		return false
	}
	n := 0
	for a := (array{b: v}); a.next(); n++ {
		for _, c := range a.value {
			if c < '0' || c > '9' {
				return false
			}
		}
	}
	return n > 0
}

// Len is the number of inputs, 1 to maxInputs.
func (in *Inputs) Len() int { return len(in.elements) }

// Body gives a body that asks only for the inputs of those indices, in that order and always as an array, as
// slices to be sent one after the other. Every other byte is that of the body, nothing of which
// is copied. Two requests that have an input in common, and the rest, have the same Body of it,
// up to the form of the JSON: its key is the key of the embedding.
func (in *Inputs) Body(indices ...int) [][]byte {
	pieces := make([][]byte, 0, 2*len(indices)+2)
	pieces = append(pieces, in.body[:in.at.start])
	between := []byte("[")
	for _, i := range indices {
		e := in.elements[i]
		pieces = append(pieces, between, in.body[e.start:e.end])
		between = []byte(",")
	}
	return append(pieces, []byte("]"), in.body[in.at.end:])
}

// Shares parts the tokens that the embeddings of those indices took among them, by the length of the inputs. They add up to total.
func (in *Inputs) Shares(total int64, indices ...int) []int64 {
	shares := make([]int64, len(indices))
	var weight, sum, given int64
	for _, i := range indices {
		sum += in.weight(i)
	}
	for k, i := range indices { // what is rounded off goes to the next
		weight += in.weight(i)
		high, low := bits.Mul64(uint64(max(total, 0)), uint64(weight))
		upTo, _ := bits.Div64(high, low, uint64(sum))
		shares[k] = int64(upTo) - given
		given = int64(upTo)
	}
	return shares
}

// weight is what an input takes, more or less; at least 1.
func (in *Inputs) weight(i int) int64 {
	v := in.body[in.elements[i].start:in.elements[i].end]
	if v[0] == '[' {
		return int64(bytes.Count(v, []byte(","))) + 1
	}
	return decodedLen(v[1:len(v)-1]) + 1
}

// Embeddings is what a server answered to a body of /v1/embeddings.
type Embeddings struct {
	// Elements are the embeddings in the order of the inputs, as the server wrote them: arrays of
	// numbers, or base64 in quotes. They refer to the answer.
	Elements [][]byte
	Model    string // as the server calls it
	Usage    Usage
}

// SplitEmbeddings reads the answer to a body with n inputs. It is not ok unless the answer is
// whole, holds an embedding for each input and nothing that is not known, and says what was used.
// Linear in the answer.
func SplitEmbeddings(answer []byte, n int) (e Embeddings, ok bool) {
	if n < 1 || n > maxInputs {
		return Embeddings{}, false
	}
	e.Elements = make([][]byte, n)
	seen := [3]bool{} // data, model, usage
	o := object{b: answer}
	for o.next() {
		switch string(o.name) {
		case "data":
			if seen[0] || !e.data(o.value) {
				return Embeddings{}, false
			}
			seen[0] = true
		case "model":
			if seen[1] || !isString(o.value) {
				return Embeddings{}, false
			}
			e.Model, seen[1] = unquote(o.value), true
		case "usage":
			u, err := ParseUsage(Embedding, o.value)
			if seen[2] || err != nil || !u.Known {
				return Embeddings{}, false
			}
			e.Usage, seen[2] = u, true
		case "object":
			if string(o.value) != `"list"` {
				return Embeddings{}, false
			}
		case "id", "created":
		default:
			if !isNull(o.value) {
				return Embeddings{}, false
			}
		}
	}
	whole := !o.bad && skipSpace(answer, o.i+1) == len(answer)
	return e, whole && seen == [3]bool{true, true, true}
}

// data reads the list of embeddings.
func (e *Embeddings) data(v []byte) bool {
	n := 0
	a := array{b: v}
	for ; a.next(); n++ {
		at, embedding := embeddingOf(a.value)
		if at < 0 || at >= len(e.Elements) || e.Elements[at] != nil || !isEmbedding(embedding) {
			return false
		}
		e.Elements[at] = embedding
	}
	return n == len(e.Elements) && string(v[skipSpace(v, a.i):]) == "]"
}

// embeddingOf reads an element of the list; at is -1 where it is not one.
func embeddingOf(v []byte) (at int, embedding []byte) {
	at = -1
	o := object{b: v}
	for o.next() {
		switch string(o.name) {
		case "object":
			if string(o.value) != `"embedding"` {
				return -1, nil
			}
		case "index":
			x, err := strconv.ParseUint(string(o.value), 10, 31)
			if err != nil || at >= 0 {
				return -1, nil
			}
			at = int(x)
		case "embedding":
			if embedding != nil {
				return -1, nil
			}
			embedding = o.value
		default:
			if !isNull(o.value) {
				return -1, nil
			}
		}
	}
	if o.bad {
		return -1, nil
	}
	return at, embedding
}

// isEmbedding tells whether a value is an array of numbers or base64 in quotes, whoever wrote it.
func isEmbedding(v []byte) bool {
	if len(v) < 3 {
		return false
	}
	inner := v[1 : len(v)-1]
	if v[0] == '"' {
		for _, c := range inner {
			if !(c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '+' || c == '/' || c == '=') {
				return false
			}
		}
		return v[len(v)-1] == '"'
	}
	if v[0] != '[' || v[len(v)-1] != ']' {
		return false
	}
	for i := 0; ; i++ {
		if i = skipNumber(inner, skipSpace(inner, i)); i < 0 {
			return false
		}
		if i = skipSpace(inner, i); i == len(inner) {
			return true
		}
		if inner[i] != ',' {
			return false
		}
	}
}

// skipNumber returns the offset behind the number at b[i] (RFC 8259, section 6), or -1 where there is none.
func skipNumber(b []byte, i int) int {
	if i < len(b) && b[i] == '-' {
		i++
	}
	end := skipDigits(b, i)
	if end == i || b[i] == '0' && end > i+1 {
		return -1
	}
	if i = end; i < len(b) && b[i] == '.' {
		if end = skipDigits(b, i+1); end == i+1 {
			return -1
		}
		i = end
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		if i++; i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if end = skipDigits(b, i); end == i {
			return -1
		}
		i = end
	}
	return i
}

func skipDigits(b []byte, i int) int {
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		i++
	}
	return i
}

// JoinEmbeddings makes an answer of embeddings as SplitEmbeddings gives them, in the order of the
// inputs. Of u, Input is told.
func JoinEmbeddings(elements [][]byte, model string, u Usage) []byte {
	const around, digits = `{"object":"embedding","index":,"embedding":},`, 20
	size := len(`{"object":"list","data":[],"model":,"usage":{"prompt_tokens":,"total_tokens":}}`) + 6*len(model) + 2 + 2*digits
	for _, e := range elements {
		size += len(around) + digits + len(e)
	}
	b := append(make([]byte, 0, size), `{"object":"list","data":[`...)
	for i, e := range elements {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(append(b, `{"object":"embedding","index":`...), int64(i), 10)
		b = append(append(append(b, `,"embedding":`...), e...), '}')
	}
	b, _ = jsontext.AppendQuote(append(b, `],"model":`...), model)
	b = strconv.AppendInt(append(b, `,"usage":{"prompt_tokens":`...), u.Input, 10)
	b = strconv.AppendInt(append(b, `,"total_tokens":`...), u.Input, 10)
	return append(b, "}}"...)
}
