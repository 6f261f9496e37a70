package openai

import (
	"bytes"
	"math"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// maxExact is the largest integer that every JSON parser reads alike (RFC 8259, section 6).
const maxExact = 1 << 53

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// skipString returns the offset behind the string that opens at b[i], or -1 where it
// does not end. It trusts the escapes.
func skipString(b []byte, i int) int {
	for i++; ; {
		j := bytes.IndexByte(b[i:], '"')
		if j < 0 {
			return -1
		}
		end := i + j
		k := end
		for k > i && b[k-1] == '\\' {
			k--
		}
		i = end + 1
		if (end-k)%2 == 0 {
			return i
		}
	}
}

// skipScalar returns the offset behind the number or literal at b[i].
func skipScalar(b []byte, i int) int {
	for i < len(b) {
		switch b[i] {
		case ',', ']', '}', ' ', '\n', '\r', '\t', ':', '"', '[', '{':
			return i
		}
		i++
	}
	return i
}

// isNumeric tells the bytes of plain numbers, the commas between them and the slash, which ends nothing
// either.
func isNumeric(c byte) bool { return c-'+' <= '9'-'+' }

// skipValue returns the offset behind the value at b[i], or -1 where it does not end.
// It counts brackets and does not check their kind.
func skipValue(b []byte, i int) int {
	depth := 0
	for i < len(b) {
		switch b[i] {
		case '"':
			if i = skipString(b, i); i < 0 {
				return -1
			}
		case '{', '[':
			depth++
			i++
			continue
		case '}', ']':
			depth--
			i++
		case ',', ':', ' ', '\n', '\r', '\t':
			i++
			continue
		default:
			if depth > 0 && isNumeric(b[i]) { // a run of numbers: what embeddings consist of
				for i < len(b) && isNumeric(b[i]) {
					i++
				}
				continue
			}
			i = skipScalar(b, i)
		}
		if depth <= 0 {
			if depth < 0 {
				return -1
			}
			return i
		}
	}
	return -1
}

// object walks the members of a JSON object that nobody has validated: what an upstream
// sent. A name with escapes is given as it is written, so it matches none of ours.
type object struct {
	b           []byte
	i           int
	name, value []byte
	bad         bool // not an object, or cut short
	started     bool
}

func (o *object) next() bool {
	i := skipSpace(o.b, o.i)
	switch {
	case i >= len(o.b):
		return o.fail()
	case !o.started && o.b[i] == '{':
		if i = skipSpace(o.b, i+1); i < len(o.b) && o.b[i] == '}' {
			o.i = i
			return false
		}
	case o.started && o.b[i] == ',':
		i = skipSpace(o.b, i+1)
	case o.started && o.b[i] == '}':
		o.i = i
		return false
	default:
		return o.fail()
	}
	o.started = true
	if i >= len(o.b) || o.b[i] != '"' {
		return o.fail()
	}
	end := skipString(o.b, i)
	if end < 0 {
		return o.fail()
	}
	o.name = o.b[i+1 : end-1]
	i = skipSpace(o.b, end)
	if i >= len(o.b) || o.b[i] != ':' {
		return o.fail()
	}
	i = skipSpace(o.b, i+1)
	if end = skipValue(o.b, i); end <= i {
		return o.fail()
	}
	o.value, o.i = o.b[i:end], end
	return true
}

func (o *object) fail() bool {
	o.bad = true
	return false
}

// array walks the elements of a JSON array that nobody has validated.
type array struct {
	b     []byte
	i     int
	value []byte
}

func (a *array) next() bool {
	i := skipSpace(a.b, a.i)
	if i >= len(a.b) || a.b[i] != '[' && a.b[i] != ',' {
		return false
	}
	i = skipSpace(a.b, i+1)
	end := skipValue(a.b, i)
	if end <= i {
		return false
	}
	a.value, a.i = a.b[i:end], end
	return true
}

func isNull(v []byte) bool   { return string(v) == "null" }
func isString(v []byte) bool { return len(v) >= 2 && v[0] == '"' }

// unquote decodes a string; what cannot be decoded is given as it stands.
func unquote(v []byte) string {
	if !isString(v) {
		return string(v)
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return string(v[1 : len(v)-1])
	}
	s, err := jsontext.AppendUnquote(nil, v)
	if err != nil {
		return string(v[1 : len(v)-1])
	}
	return string(s)
}

// decodedLen is the length in UTF-8 of the text between a valid string's quotes.
func decodedLen(s []byte) int64 {
	i := bytes.IndexByte(s, '\\')
	if i < 0 {
		return int64(len(s))
	}
	n := i
	for i < len(s) {
		if s[i] != '\\' {
			i, n = i+1, n+1
			continue
		}
		if i+6 > len(s) || s[i+1] != 'u' {
			i, n = i+2, n+1
			continue
		}
		r, _ := strconv.ParseUint(string(s[i+2:i+6]), 16, 16)
		i += 6
		switch {
		case r < 0x80:
			n++
		case r < 0x800:
			n += 2
		case r >= 0xd800 && r < 0xe000: // half of a pair of four bytes
			n += 2
		default:
			n += 3
		}
	}
	return int64(n)
}

// maxDecimal is longer than anybody writes a number that is not to be read exactly, in bytes.
const maxDecimal = 64

// temperature reads a valid JSON value as Sampling.Temperature says; null is 0.
func temperature(v []byte) float64 {
	if isNull(v) {
		return 0
	}
	if c := v[0]; len(v) <= maxDecimal && (c == '-' || c >= '0' && c <= '9') {
		if x, err := strconv.ParseFloat(string(v), 64); err == nil && x >= 0 {
			return max(x, 0) // not -0
		}
	}
	return math.Inf(1)
}

// integer reads a JSON number exactly, without floating point: 16, 16.0 and 1.6e1 are
// sixteen, as they are to the upstream. The problem is "" where there is none.
func integer(tok []byte) (v int64, problem string) {
	neg := tok[0] == '-'
	var digits [17]byte // of the mantissa, without leading zeros
	n, exp, i := 0, 0, 0
	zeros := 0 // zeros that count only if another digit follows
	point := false
	for ; i < len(tok) && tok[i] != 'e' && tok[i] != 'E'; i++ {
		switch c := tok[i]; {
		case c == '-':
			continue
		case c == '.':
			point = true
			continue
		case c == '0':
			if n > 0 {
				zeros++
			}
		default:
			if n+zeros >= len(digits) {
				n = len(digits) // too many digits to be exact, whatever the exponent
				break
			}
			for ; zeros > 0; zeros-- {
				digits[n] = '0'
				n++
			}
			digits[n] = c
			n++
		}
		if point {
			exp--
		}
	}
	if n == 0 {
		return 0, ""
	}
	if i < len(tok) {
		e, err := strconv.Atoi(string(bytes.TrimPrefix(tok[i+1:], []byte("+"))))
		if err != nil || e > 1<<30 || e < -1<<30 {
			return 0, "must be an integer of at most 2^53"
		}
		exp += e
	}
	exp += zeros
	switch {
	case neg:
		return 0, "must not be negative"
	case exp < 0:
		return 0, "must be a whole number"
	case n+exp > len(digits)-1:
		return 0, "must be at most 2^53"
	}
	v, _ = strconv.ParseInt(string(digits[:n]), 10, 64)
	for ; exp > 0; exp-- {
		v *= 10
	}
	if v > maxExact {
		return 0, "must be at most 2^53"
	}
	return v, ""
}
