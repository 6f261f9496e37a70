package cache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// Bounds of a body that has a key. A body beyond them has none: it is not cached.
const (
	maxCanonBody     = 1 << 30 // bytes
	maxCanonTokens   = 1 << 20 // values and names, of 16 bytes each
	maxCanonDepth    = 512     // as the front door's
	maxCanonExponent = 9       // digits of an exponent, of a number other than 0
	maxCanonPlain    = 21      // digits before the point of a number that is written without exponent
	maxCanonZeros    = 5       // zeros after the point of such a number
)

// BodyError says why a body has no key. It never quotes the body.
type BodyError struct {
	Offset  int // bytes into the body
	Problem string
}

func (e *BodyError) Error() string { return fmt.Sprintf("body: %s at byte %d", e.Problem, e.Offset) }

// canonKind is the kind of a canonToken.
type canonKind uint8

const (
	canonLiteral canonKind = iota // true, false, null
	canonNumber
	canonString
	canonArray
	canonObject
)

// canonToken is a value, or a name of an object, which stands before its value.
type canonToken struct {
	start, end uint32 // the canonical text; of an object: what is in canonDoc.order, if shuffled
	next       uint32 // the index of the token after this value and all that is in it
	kind       canonKind
	moved      bool // the text is in the arena, not in the source
	shuffled   bool // the members of the object were not in order
}

// canonDoc is a parsed JSON text. It yields the canonical form: no white space, members by
// the bytes of their names, strings with the fewest escapes, numbers exact and in the
// notation of ECMAScript (RFC 8785, but for numbers, which are not rounded to doubles, and
// for the order of characters beyond U+FFFF in names). Two texts have the same form if and
// only if they are the same value.
//
// The zero value is ready; parse reuses what an earlier one allocated. Not for concurrent use.
type canonDoc struct {
	src    []byte
	arena  []byte // texts that are not in src in canonical form
	tokens []canonToken
	order  []uint32 // the names of objects that were shuffled, in order
}

// parse reads src and keeps it until the next parse. It fails with *BodyError for what is not
// one JSON value in UTF-8, for duplicate names, lone surrogates, and beyond the bounds.
func (d *canonDoc) parse(src []byte) error {
	d.src, d.arena, d.tokens, d.order = src, d.arena[:0], d.tokens[:0], d.order[:0]
	if len(src) > maxCanonBody {
		return &BodyError{maxCanonBody, "longer than 1 GiB"}
	}
	pos, err := d.value(canonSpace(src, 0), 0)
	if err != nil {
		return err
	}
	if pos = canonSpace(src, pos); pos < len(src) {
		return &BodyError{pos, "bytes follow the value"}
	}
	return nil
}

func canonSpace(src []byte, pos int) int {
	for pos < len(src) && (src[pos] == ' ' || src[pos] == '\n' || src[pos] == '\r' || src[pos] == '\t') {
		pos++
	}
	return pos
}

// value reads the value at pos, which is no white space, and returns where it ends.
func (d *canonDoc) value(pos, depth int) (int, error) {
	if pos == len(d.src) {
		return 0, &BodyError{pos, "the JSON ends too early"}
	}
	switch c := d.src[pos]; {
	case c == '"':
		return d.text(pos)
	case c == '{' || c == '[':
		if depth == maxCanonDepth {
			return 0, &BodyError{pos, "nested too deep"}
		}
		if c == '{' {
			return d.object(pos, depth+1)
		}
		return d.array(pos, depth+1)
	case c == '-' || '0' <= c && c <= '9':
		return d.number(pos)
	}
	for _, literal := range [...]string{"true", "false", "null"} {
		if len(d.src)-pos >= len(literal) && string(d.src[pos:pos+len(literal)]) == literal {
			_, err := d.push(canonToken{kind: canonLiteral, start: uint32(pos), end: uint32(pos + len(literal))})
			return pos + len(literal), err
		}
	}
	return 0, &BodyError{pos, "no JSON value"}
}

// push appends t, which nothing is in so far.
func (d *canonDoc) push(t canonToken) (index int, err error) {
	index = len(d.tokens)
	if index == maxCanonTokens {
		return 0, &BodyError{int(t.start), "more than a million values"}
	}
	t.next = uint32(index + 1)
	d.tokens = append(d.tokens, t)
	return index, nil
}

func (d *canonDoc) array(pos, depth int) (int, error) {
	at, err := d.push(canonToken{kind: canonArray, start: uint32(pos)})
	if err != nil {
		return 0, err
	}
	pos = canonSpace(d.src, pos+1)
	if pos < len(d.src) && d.src[pos] == ']' {
		return pos + 1, nil
	}
	for {
		if pos, err = d.value(pos, depth); err != nil {
			return 0, err
		}
		var more bool
		if pos, more, err = d.separator(pos, ']'); err != nil {
			return 0, err
		}
		if !more {
			d.tokens[at].next = uint32(len(d.tokens))
			return pos, nil
		}
	}
}

// separator reads a comma, and the white space around it, or the end of an array or object.
func (d *canonDoc) separator(pos int, end byte) (after int, more bool, err error) {
	if pos = canonSpace(d.src, pos); pos < len(d.src) {
		switch d.src[pos] {
		case ',':
			return canonSpace(d.src, pos+1), true, nil
		case end:
			return pos + 1, false, nil
		}
	}
	return 0, false, &BodyError{pos, "neither a comma nor an end"}
}

func (d *canonDoc) object(pos, depth int) (int, error) {
	at, err := d.push(canonToken{kind: canonObject, start: uint32(pos)})
	if err != nil {
		return 0, err
	}
	opened := pos
	pos = canonSpace(d.src, pos+1)
	if pos < len(d.src) && d.src[pos] == '}' {
		return pos + 1, nil
	}
	shuffled, last := false, -1
	for {
		name := len(d.tokens)
		if pos, err = d.name(pos); err != nil {
			return 0, err
		}
		if last >= 0 {
			switch order := bytes.Compare(d.bare(uint32(last)), d.bare(uint32(name))); {
			case order == 0:
				return 0, &BodyError{opened, "an object with a name that it has twice"}
			case order > 0:
				shuffled = true
			}
		}
		last = name
		if pos, err = d.value(pos, depth); err != nil {
			return 0, err
		}
		var more bool
		if pos, more, err = d.separator(pos, '}'); err != nil {
			return 0, err
		}
		if !more {
			d.tokens[at].next = uint32(len(d.tokens))
			if shuffled && !d.sort(at) {
				return 0, &BodyError{opened, "an object with a name that it has twice"}
			}
			return pos, nil
		}
	}
}

// name reads a name and its colon, and returns where its value starts.
func (d *canonDoc) name(pos int) (int, error) {
	if pos == len(d.src) || d.src[pos] != '"' {
		return 0, &BodyError{pos, "no name where an object must have one"}
	}
	pos, err := d.text(pos)
	if err != nil {
		return 0, err
	}
	if pos = canonSpace(d.src, pos); pos == len(d.src) || d.src[pos] != ':' {
		return 0, &BodyError{pos, "no colon after a name"}
	}
	return canonSpace(d.src, pos+1), nil
}

// sort puts the members of the object at in order, unless two have the same name.
func (d *canonDoc) sort(at int) (distinct bool) {
	t, start := &d.tokens[at], len(d.order)
	for m := uint32(at + 1); m < t.next; m = d.tokens[m+1].next {
		d.order = append(d.order, m)
	}
	t.shuffled, t.start, t.end = true, uint32(start), uint32(len(d.order))
	names := d.order[start:]
	slices.SortFunc(names, func(a, b uint32) int { return bytes.Compare(d.bare(a), d.bare(b)) })
	for i := 1; i < len(names); i++ {
		if bytes.Equal(d.bare(names[i-1]), d.bare(names[i])) {
			return false
		}
	}
	return true
}

// text reads the string at pos. Escapes that are needed are left as they are: the text is
// copied only where it has others.
func (d *canonDoc) text(pos int) (int, error) {
	start, from, into := pos, pos, len(d.arena) // src[from:] is not in the arena so far
	moved, wide := false, false
	for pos++; ; {
		var beyond bool
		pos, beyond = canonScan(d.src, pos)
		wide = wide || beyond
		if pos == len(d.src) {
			return 0, &BodyError{start, "a string without an end"}
		}
		c := d.src[pos]
		if c == '"' {
			pos++
			break
		}
		if c != '\\' {
			return 0, &BodyError{pos, "a control character in a string"}
		}
		if pos+1 < len(d.src) && canonKept(d.src[pos+1]) {
			pos += 2
			continue
		}
		r, n := canonEscape(d.src[pos:])
		if n == 0 {
			return 0, &BodyError{pos, "an escape that stands for no character"}
		}
		d.arena = append(d.arena, d.src[from:pos]...)
		d.arena = canonAppendRune(d.arena, r)
		pos += n
		from, moved = pos, true
	}
	if wide && !utf8.Valid(d.src[start:pos]) {
		return 0, &BodyError{start, "a string that is not UTF-8"}
	}
	t := canonToken{kind: canonString, start: uint32(start), end: uint32(pos)}
	if moved {
		d.arena = append(d.arena, d.src[from:pos]...)
		t.moved, t.start, t.end = true, uint32(into), uint32(len(d.arena))
	}
	_, err := d.push(t)
	return pos, err
}

// canonKept says whether a backslash and c are an escape of the canonical form.
func canonKept(c byte) bool {
	switch c {
	case '"', '\\', 'b', 'f', 'n', 'r', 't':
		return true
	}
	return false
}

// canonScan returns the first byte from pos on that is a quote, a backslash or a control
// character, and whether one was passed (or nearly) that is not ASCII. Eight at a time.
func canonScan(src []byte, pos int) (at int, wide bool) {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	var seen uint64
	for ; len(src)-pos >= 8; pos += 8 {
		w := binary.LittleEndian.Uint64(src[pos:])
		quote, slash := w^('"'*ones), w^('\\'*ones)
		// The high bit of each byte that is 0, or below 0x20. A borrow can set one that
		// should not be, but only above one that should.
		stop := ((quote - ones) & ^quote) | ((slash - ones) & ^slash) | ((w - 0x20*ones) & ^w)
		seen |= w
		if stop &= highs; stop != 0 {
			return pos + bits.TrailingZeros64(stop)/8, seen&highs != 0
		}
	}
	for ; pos < len(src); pos++ {
		c := src[pos]
		if c == '"' || c == '\\' || c < 0x20 {
			break
		}
		seen |= uint64(c)
	}
	return pos, seen&highs != 0
}

// canonEscape decodes the escape that src begins with: a slash, or one or two of \uXXXX. It
// returns 0 bytes for anything else.
func canonEscape(src []byte) (r rune, n int) {
	if len(src) >= 2 && src[1] == '/' {
		return '/', 2
	}
	r, ok := canonHex(src)
	switch {
	case !ok:
		return 0, 0
	case r < 0xD800 || 0xDFFF < r:
		return r, 6
	}
	low, ok := canonHex(src[6:])
	if !ok || 0xDC00 <= r || low < 0xDC00 || 0xDFFF < low {
		return 0, 0
	}
	return (r-0xD800)<<10 + low - 0xDC00 + 0x10000, 12
}

func canonHex(src []byte) (r rune, ok bool) {
	if len(src) < 6 || src[0] != '\\' || src[1] != 'u' {
		return 0, false
	}
	for _, c := range src[2:6] {
		switch {
		case '0' <= c && c <= '9':
			r = r<<4 | rune(c-'0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

// canonAppendRune appends r as the inside of a string.
func canonAppendRune(dst []byte, r rune) []byte {
	switch r {
	case '"', '\\':
		return append(dst, '\\', byte(r))
	case '\b':
		return append(dst, '\\', 'b')
	case '\f':
		return append(dst, '\\', 'f')
	case '\n':
		return append(dst, '\\', 'n')
	case '\r':
		return append(dst, '\\', 'r')
	case '\t':
		return append(dst, '\\', 't')
	}
	if r < 0x20 {
		return append(dst, '\\', 'u', '0', '0', '0'+byte(r>>4), "0123456789abcdef"[r&15])
	}
	return utf8.AppendRune(dst, r)
}

// number reads the number at pos.
func (d *canonDoc) number(pos int) (int, error) {
	n := canonNum{start: pos}
	if d.src[pos] == '-' {
		n.negative = true
		pos++
	}
	n.whole, pos = canonDigits(d.src, pos)
	ok := len(n.whole) == 1 || len(n.whole) > 1 && n.whole[0] != '0'
	if ok && pos < len(d.src) && d.src[pos] == '.' {
		n.fraction, pos = canonDigits(d.src, pos+1)
		ok = len(n.fraction) > 0
	}
	if ok && pos < len(d.src) && d.src[pos]|0x20 == 'e' {
		if pos++; pos < len(d.src) && (d.src[pos] == '-' || d.src[pos] == '+') {
			n.below = d.src[pos] == '-'
			pos++
		}
		n.exponent, pos = canonDigits(d.src, pos)
		ok = len(n.exponent) > 0
	}
	if !ok {
		return 0, &BodyError{n.start, "a malformed number"}
	}
	t := canonToken{kind: canonNumber, start: uint32(n.start), end: uint32(pos)}
	if !n.canonical() {
		t.start = uint32(len(d.arena))
		if d.arena, ok = n.appendTo(d.arena); !ok {
			return 0, &BodyError{n.start, "a number with an exponent of more than nine digits"}
		}
		t.moved, t.end = true, uint32(len(d.arena))
	}
	_, err := d.push(t)
	return pos, err
}

func canonDigits(src []byte, pos int) (digits []byte, end int) {
	start := pos
	for pos < len(src) && '0' <= src[pos] && src[pos] <= '9' {
		pos++
	}
	return src[start:pos], pos
}

// canonNum is a well-formed number, in the parts that it was written in.
type canonNum struct {
	start                     int // in the source
	negative, below           bool
	whole, fraction, exponent []byte // digits
}

// canonical says that the number is written as appendTo would.
func (n *canonNum) canonical() bool {
	f := len(n.fraction)
	switch {
	case n.exponent != nil || len(n.whole) > maxCanonPlain:
		return false
	case f == 0:
		return !n.negative || n.whole[0] != '0'
	case n.fraction[f-1] == '0':
		return false
	}
	return n.whole[0] != '0' || len(n.fraction)-len(bytes.TrimLeft(n.fraction, "0")) <= maxCanonZeros
}

// appendTo appends the one canonical form of the number's value, the notation of ECMAScript:
// 0.000001, 100000000000000000000, 1e+21, 1.5e-7. Not ok: the exponent is out of bounds.
func (n *canonNum) appendTo(dst []byte) (_ []byte, ok bool) {
	var few [64]byte // on the stack
	digits := append(append(few[:0], n.whole...), n.fraction...)
	point := len(n.whole) // where the point is, in digits
	trimmed := bytes.TrimLeft(digits, "0")
	point -= len(digits) - len(trimmed)
	if digits = bytes.TrimRight(trimmed, "0"); len(digits) == 0 {
		return append(dst, '0'), true
	}
	exponent := bytes.TrimLeft(n.exponent, "0")
	if len(exponent) > maxCanonExponent {
		return dst, false
	}
	shift := 0
	for _, c := range exponent {
		shift = 10*shift + int(c-'0')
	}
	if n.below {
		shift = -shift
	}
	if n.negative {
		dst = append(dst, '-')
	}
	return canonAppendDecimal(dst, digits, point+shift), true
}

// canonAppendDecimal appends 0.digits times 10 to the power of point. The digits neither begin
// nor end with 0.
func canonAppendDecimal(dst, digits []byte, point int) []byte {
	const zeros = "000000000000000000000"
	switch n := len(digits); {
	case n <= point && point <= maxCanonPlain:
		return append(append(dst, digits...), zeros[:point-n]...)
	case 0 < point && point <= maxCanonPlain:
		return append(append(append(dst, digits[:point]...), '.'), digits[point:]...)
	case -maxCanonZeros <= point && point <= 0:
		return append(append(append(dst, "0."...), zeros[:-point]...), digits...)
	}
	if dst = append(dst, digits[0]); len(digits) > 1 {
		dst = append(append(dst, '.'), digits[1:]...)
	}
	if dst = append(dst, 'e'); point > 0 {
		dst = append(dst, '+')
	}
	return strconv.AppendInt(dst, int64(point-1), 10)
}

// raw returns the canonical text of a token that is neither array nor object.
func (d *canonDoc) raw(i uint32) []byte {
	t := &d.tokens[i]
	if t.moved {
		return d.arena[t.start:t.end]
	}
	return d.src[t.start:t.end]
}

// bare is raw of a string, without the quotes.
func (d *canonDoc) bare(i uint32) []byte {
	text := d.raw(i)
	return text[1 : len(text)-1]
}

// appendValue appends the canonical form of the value i. Where less is not nil, members of
// that object by whose name it is true are left out.
func (d *canonDoc) appendValue(dst []byte, i uint32, less func(name []byte) bool) []byte {
	t := &d.tokens[i]
	switch t.kind {
	case canonObject:
		dst = append(dst, '{')
		open := len(dst)
		for k, m := 0, i+1; m < t.next; k++ {
			name := m
			if t.shuffled {
				name = d.order[int(t.start)+k]
			}
			m = d.tokens[m+1].next
			if less != nil && less(d.bare(name)) {
				continue
			}
			if len(dst) > open {
				dst = append(dst, ',')
			}
			dst = append(append(dst, d.raw(name)...), ':')
			dst = d.appendValue(dst, name+1, nil)
		}
		return append(dst, '}')
	case canonArray:
		dst = append(dst, '[')
		for m := i + 1; m < t.next; m = d.tokens[m].next {
			if m > i+1 {
				dst = append(dst, ',')
			}
			dst = d.appendValue(dst, m, nil)
		}
		return append(dst, ']')
	}
	return append(dst, d.raw(i)...)
}

// member returns the value of the member of object i that has the name, if there is one.
func (d *canonDoc) member(i uint32, name string) (value uint32, ok bool) {
	if d.tokens[i].kind != canonObject {
		return 0, false
	}
	for m := i + 1; m < d.tokens[i].next; m = d.tokens[m+1].next {
		if string(d.bare(m)) == name {
			return m + 1, true
		}
	}
	return 0, false
}

// is says whether the value i is the string s, which needs no escapes.
func (d *canonDoc) is(i uint32, s string) bool {
	return d.tokens[i].kind == canonString && string(d.bare(i)) == s
}

// decode appends what the string i stands for.
func (d *canonDoc) decode(dst []byte, i uint32) []byte {
	dst, _ = jsontext.AppendUnquote(dst, d.raw(i)) // it is valid
	return dst
}

// replace makes the string i stand for s.
func (d *canonDoc) replace(i uint32, s []byte) {
	start := len(d.arena)
	d.arena, _ = jsontext.AppendQuote(d.arena, s) // s came from decode: UTF-8
	t := &d.tokens[i]
	t.moved, t.start, t.end = true, uint32(start), uint32(len(d.arena))
}
