package cache

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// canonTree is a JSON value apart from any text of it.
type canonTree struct {
	kind     canonKind
	literal  string // true, false, null
	mantissa int64  // of a number: times 10 to the power of exponent
	exponent int
	text     string
	names    []string // of an object, distinct
	elems    []*canonTree
}

var canonNames = []string{"a", "b", "ab", "", "é", "é", "A", "a\"b", "\n", "model", "stream", "😀", "｡", "content"} //nolint:gochecknoglobals // a table

func drawCanonText(t *rapid.T) string {
	return rapid.OneOf(
		rapid.SampledFrom(canonNames),
		rapid.StringOfN(rapid.RuneFrom([]rune("ab \"\\/\b\f\n\r\t\x00\x1f\x7fé\u0301\u2028\ufeff\U0001F600\U0010FFFF")), 0, 20, -1),
		rapid.String().Filter(utf8.ValidString),
	).Draw(t, "text")
}

func drawCanonTree(t *rapid.T, depth int) *canonTree {
	most := canonObject
	if depth == 0 {
		most = canonString
	}
	n := &canonTree{kind: rapid.SampledFrom([]canonKind{canonLiteral, canonNumber, canonString, canonArray, canonObject}[:most+1]).Draw(t, "kind")}
	switch n.kind {
	case canonLiteral:
		n.literal = rapid.SampledFrom([]string{"true", "false", "null"}).Draw(t, "literal")
	case canonNumber:
		n.mantissa = rapid.OneOf(rapid.Int64(), rapid.Int64Range(-11, 101), rapid.Just(int64(9007199254740993))).Draw(t, "mantissa")
		n.exponent = rapid.OneOf(rapid.IntRange(-3, 3), rapid.IntRange(-40, 40), rapid.SampledFrom([]int{-999999, 400})).Draw(t, "exponent")
	case canonString:
		n.text = drawCanonText(t)
	case canonArray:
		for range rapid.IntRange(0, 4).Draw(t, "elements") {
			n.elems = append(n.elems, drawCanonTree(t, depth-1))
		}
	case canonObject:
		for range rapid.IntRange(0, 5).Draw(t, "members") {
			if name := drawCanonText(t); !slices.Contains(n.names, name) {
				n.names = append(n.names, name)
				n.elems = append(n.elems, drawCanonTree(t, depth-1))
			}
		}
	}
	return n
}

func (n *canonTree) clone() *canonTree {
	c := *n
	c.names, c.elems = slices.Clone(n.names), nil
	for _, e := range n.elems {
		c.elems = append(c.elems, e.clone())
	}
	return &c
}

// all returns every value in n, n first.
func (n *canonTree) all() []*canonTree {
	nodes := []*canonTree{n}
	for _, e := range n.elems {
		nodes = append(nodes, e.all()...)
	}
	return nodes
}

// change makes n another value.
func (n *canonTree) change(rng *rand.Rand) {
	switch n.kind {
	case canonLiteral:
		n.literal = map[string]string{"true": "false", "false": "null", "null": "true"}[n.literal]
	case canonNumber:
		n.mantissa ^= 1 << rng.IntN(60)
	case canonString:
		at := 0
		for i := range n.text {
			if rng.IntN(3) == 0 {
				at = i
			}
		}
		n.text = n.text[:at] + []string{"x", " ", "\x00", "\u0301", "\\", "/"}[rng.IntN(6)] + n.text[at:]
	case canonArray:
		if len(n.elems) > 0 && rng.IntN(2) == 0 {
			n.elems = n.elems[:len(n.elems)-1]
		} else {
			n.elems = append(n.elems, &canonTree{kind: canonLiteral, literal: "null"})
		}
	case canonObject:
		if len(n.elems) > 0 && rng.IntN(2) == 0 {
			n.names, n.elems = n.names[:len(n.names)-1], n.elems[:len(n.elems)-1]
		} else {
			n.names = append(n.names, "another "+strconv.Itoa(len(n.names)))
			n.elems = append(n.elems, &canonTree{kind: canonLiteral, literal: "null"})
		}
	}
}

// render writes n as somebody might: with white space, any order, any escapes, any notation.
func (n *canonTree) render(dst []byte, rng *rand.Rand) []byte {
	space := func() { dst = append(dst, []string{"", "", "", " ", "\n\t", "\r\n  "}[rng.IntN(6)]...) }
	space()
	switch n.kind {
	case canonLiteral:
		dst = append(dst, n.literal...)
	case canonNumber:
		dst = renderCanonNumber(dst, n.mantissa, n.exponent, rng)
	case canonString:
		dst = renderCanonText(dst, n.text, rng)
	case canonArray, canonObject:
		brackets := "[]"
		if n.kind == canonObject {
			brackets = "{}"
		}
		dst = append(dst, brackets[0])
		order := make([]int, len(n.elems))
		for i := range order {
			order[i] = i
		}
		if n.kind == canonObject {
			rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		}
		for k, i := range order {
			if k > 0 {
				dst = append(dst, ',')
			}
			if n.kind == canonObject {
				space()
				dst = renderCanonText(dst, n.names[i], rng)
				space()
				dst = append(dst, ':')
			}
			dst = n.elems[i].render(dst, rng)
		}
		space()
		dst = append(dst, brackets[1])
	}
	space()
	return dst
}

func renderCanonText(dst []byte, s string, rng *rand.Rand) []byte {
	escape := func(r rune) {
		format := []string{`\u%04x`, `\u%04X`}[rng.IntN(2)]
		if r > 0xFFFF {
			dst = fmt.Appendf(dst, format+format, 0xD800+(r-0x10000)>>10, 0xDC00+(r-0x10000)&0x3FF)
			return
		}
		dst = fmt.Appendf(dst, format, r)
	}
	dst = append(dst, '"')
	for _, r := range s {
		short := strings.IndexRune("\"\\/\b\f\n\r\t", r)
		switch {
		case rng.IntN(4) == 0:
			escape(r)
		case short >= 0 && rng.IntN(2) == 0:
			dst = append(dst, '\\', `"\/bfnrt`[short])
		case r < 0x20 || r == '"' || r == '\\':
			escape(r)
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}

func renderCanonNumber(dst []byte, mantissa int64, exponent int, rng *rand.Rand) []byte {
	digits := strconv.FormatInt(mantissa, 10)
	if digits[0] == '-' || mantissa == 0 && rng.IntN(2) == 0 {
		dst = append(dst, '-')
		digits = strings.TrimPrefix(digits, "-")
	}
	for n := rng.IntN(4); n > 0 && mantissa != 0; n-- { // 12 is 120e-1
		digits += "0"
		exponent--
	}
	if rng.IntN(2) == 0 && -45 < exponent && exponent < 0 { // 12e-1 is 1.2
		for len(digits) <= -exponent {
			digits = "0" + digits
		}
		digits = digits[:len(digits)+exponent] + "." + digits[len(digits)+exponent:]
		exponent = 0
	} else if point := rng.IntN(len(digits)) + 1; point < len(digits) && (digits[0] != '0' || point == 1) {
		exponent += len(digits) - point
		digits = digits[:point] + "." + digits[point:]
	}
	dst = append(dst, digits...)
	if exponent != 0 || rng.IntN(2) == 0 {
		sign := ""
		if exponent >= 0 {
			sign = []string{"", "+"}[rng.IntN(2)]
		} else {
			sign, exponent = "-", -exponent
		}
		dst = fmt.Appendf(dst, "%c%s%s%d", "eE"[rng.IntN(2)], sign, []string{"", "0", "0000000000000"}[rng.IntN(3)], exponent)
	}
	return dst
}

// canonOracle writes what encoding/json reads in src so that equal values are equal texts, by
// way of maps and rationals. It says no where encoding/json does, and to duplicate names, to
// lone surrogates and to exponents that a rational would not survive.
func canonOracle(src []byte) (text string, ok bool) {
	if !utf8.Valid(src) || !json.Valid(src) || canonLone(src) {
		return "", false
	}
	dec := json.NewDecoder(bytes.NewReader(src))
	dec.UseNumber()
	var b strings.Builder
	ok = canonOracleValue(dec, &b)
	return b.String(), ok
}

// canonLone finds an escaped surrogate without the other half, by a decoding of its own.
func canonLone(src []byte) bool {
	var half bool // the last character was the first half
	for i := 0; i < len(src); i++ {
		var unit uint64
		if src[i] == '\\' {
			i++
			if src[i] == 'u' {
				unit, _ = strconv.ParseUint(string(src[i+1:i+5]), 16, 16)
				i += 4
			}
		}
		low := 0xDC00 <= unit && unit < 0xE000
		if half != low {
			return true
		}
		half = 0xD800 <= unit && unit < 0xDC00
	}
	return false
}

func canonOracleValue(dec *json.Decoder, b *strings.Builder) bool {
	token, err := dec.Token()
	if err != nil {
		return false
	}
	switch v := token.(type) {
	case json.Delim:
		if v == '[' {
			b.WriteByte('[')
			for dec.More() {
				if !canonOracleValue(dec, b) {
					return false
				}
				b.WriteByte(',')
			}
			b.WriteByte(']')
		} else if !canonOracleObject(dec, b) {
			return false
		}
		_, err = dec.Token()
		return err == nil || err == io.EOF
	case json.Number:
		if i := strings.IndexAny(v.String(), "eE"); i >= 0 {
			if n, err := strconv.Atoi(v.String()[i+1:]); err != nil || n < -10000 || 10000 < n {
				return false
			}
		}
		r, ok := new(big.Rat).SetString(v.String())
		if ok {
			b.WriteString(r.String())
		}
		return ok
	case string:
		fmt.Fprintf(b, "%q", v)
	default:
		fmt.Fprintf(b, "%v", v)
	}
	return true
}

func canonOracleObject(dec *json.Decoder, b *strings.Builder) bool {
	members := make(map[string]string)
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return false
		}
		var value strings.Builder
		if !canonOracleValue(dec, &value) {
			return false
		}
		if _, twice := members[fmt.Sprint(name)]; twice {
			return false
		}
		members[fmt.Sprint(name)] = value.String()
	}
	fmt.Fprintf(b, "%q", members) // fmt sorts maps
	return true
}
