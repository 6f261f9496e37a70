package cache

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of what is shown of a key.
const (
	maxPartValue   = 200  // bytes of a value
	maxPartLead    = 60   // of those: before the first that differs
	maxParts       = 1000 // of one body; what follows is one part more
	maxDifferences = 100
)

// Absent is the value of a Difference on the side that does not have what the other has.
const Absent = "(absent)"

// Part is one thing that went into a key, or did not.
type Part struct {
	Name    string `json:"name"`  // tenant, generations, header "Anthropic-Version", body.messages[3]
	Value   string `json:"value"` // as text, what is of the body as canonical JSON; clipped to 200 bytes
	Hash    string `json:"hash"`  // of the whole value: the first 16 hex digits of its SHA-256
	Counted bool   `json:"counted"`
}

// Difference is a place in which two contexts differ.
type Difference struct {
	Path string `json:"path"` // as Part.Name, and further in: body.messages[1].content
	A    string `json:"a"`    // as Part.Value, or Absent
	B    string `json:"b"`
}

// Explain lists what c.Key is made of, in that order: one part a field, a header, a member of
// the body and an element of it where that is a list of objects, such as messages and tools.
// Two keys are equal if and only if the names and hashes of the counted parts are. It fails
// where Key does. The values are content: show them to those who may see it.
func (c *Context) Explain() ([]Part, error) {
	plan, err := keyPlan()
	if err != nil {
		return nil, err
	}
	s := new(keyScratch)
	if err := s.load(c); err != nil {
		return nil, err
	}
	var parts []Part
	for i := range plan {
		f, v := &plan[i], reflect.ValueOf(c).Elem().Field(i)
		switch {
		case f.role == keyBody:
			parts = append(parts, s.explainBody()...)
		case f.name == "Header":
			for _, h := range explainHeaders(c.Header) {
				parts = append(parts, explainPart(h.path, h.value, true))
			}
		default:
			p := explainPart(explainName(f.name), explainValue(f, v), true)
			p.Hash = explainHash(s.appendField(nil, f, v)) // what is shown may say less
			parts = append(parts, p)
		}
	}
	return parts, nil
}

func explainPart(name, value string, counted bool) Part {
	short, _ := explainClip(value, "")
	return Part{Name: name, Value: short, Hash: explainHash([]byte(value)), Counted: counted}
}

func explainHash(image []byte) string {
	sum := sha256.Sum256(image)
	return hex.EncodeToString(sum[:8])
}

// explainName turns ModelVersion into model_version.
func explainName(field string) string {
	var b strings.Builder
	for i, r := range field {
		if unicode.IsUpper(r) && i > 0 {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// explainValue shows the value v of a field that is neither Header nor Body. Lists whose order
// does not count are shown in order.
func explainValue(f *keyField, v reflect.Value) string {
	if f.role == keySet {
		set := make([]string, v.Len())
		for i := range set {
			set[i] = fmt.Sprintf("%q", v.Index(i).String())
		}
		slices.Sort(set)
		return "[" + strings.Join(set, " ") + "]"
	}
	return fmt.Sprint(v)
}

// explainPlace is a place in a Context and what is there.
type explainPlace struct{ path, value string }

// explainHeaders orders headers, and numbers those of one name.
func explainHeaders(headers []string) []explainPlace {
	places := make([]explainPlace, 0, len(headers))
	nth := make(map[string]int)
	for _, h := range slices.Sorted(slices.Values(headers)) {
		name, value, ok := strings.Cut(h, ": ")
		path := fmt.Sprintf("header %q", name)
		if !ok {
			path = "line of " + path
		}
		if nth[name]++; nth[name] > 1 {
			path = fmt.Sprintf("%s[%d]", path, nth[name]-1)
		}
		places = append(places, explainPlace{path, value})
	}
	return places
}

// explainBody lists the parts of the parsed body, the uncounted ones last.
func (s *keyScratch) explainBody() []Part {
	if s.doc.tokens[0].kind != canonObject {
		return []Part{explainPart("body", s.text(0), true)}
	}
	var counted, others []Part
	var rest []byte
	for i, name := range s.doc.names(0) {
		path := string(explainMember([]byte("body"), s.doc.decode(nil, name)))
		switch {
		case keyLess(s.doc.bare(name)):
			others = append(others, explainPart(path, s.text(name+1), false))
		case i < maxParts:
			counted = append(counted, s.explainValues(path, name+1)...)
		default:
			rest = append(append(rest, s.doc.raw(name)...), ':')
			rest = append(s.doc.appendValue(rest, name+1, nil), ',')
		}
	}
	if rest != nil {
		counted = append(counted, explainPart("body (the rest)", string(rest), true))
	}
	return append(counted, others...)
}

// explainValues lists the value i, or its elements if it is a list of objects.
func (s *keyScratch) explainValues(path string, i uint32) []Part {
	t := &s.doc.tokens[i]
	if t.kind != canonArray || t.next == i+1 || s.doc.tokens[i+1].kind != canonObject {
		return []Part{explainPart(path, s.text(i), true)}
	}
	var parts []Part
	for m := i + 1; m < t.next; m = s.doc.tokens[m].next {
		if len(parts) == maxParts {
			var rest []byte
			for ; m < t.next; m = s.doc.tokens[m].next {
				rest = append(s.doc.appendValue(rest, m, nil), ',')
			}
			return append(parts, explainPart(fmt.Sprintf("%s[%d…]", path, maxParts), string(rest), true))
		}
		parts = append(parts, explainPart(fmt.Sprintf("%s[%d]", path, len(parts)), s.text(m), true))
	}
	return parts
}

// text returns the canonical form of the value i of the body.
func (s *keyScratch) text(i uint32) string { return string(s.doc.appendValue(nil, i, nil)) }

// names returns the names of the object i in order.
func (d *canonDoc) names(i uint32) []uint32 {
	t := &d.tokens[i]
	if t.shuffled {
		return d.order[t.start:t.end]
	}
	var names []uint32
	for m := i + 1; m < t.next; m = d.tokens[m+1].next {
		names = append(names, m)
	}
	return names
}

// explainMember appends a member's name to the path of its object: .content, or ["a b"].
func explainMember(path, name []byte) []byte {
	for i, c := range name {
		word := c == '_' || 'a' <= c|0x20 && c|0x20 <= 'z' || i > 0 && (c == '-' || '0' <= c && c <= '9')
		if !word {
			return append(fmt.Appendf(append(path, '['), "%q", name), ']')
		}
	}
	if len(name) == 0 {
		return append(path, `[""]`...)
	}
	return append(append(path, '.'), name...)
}

// Differ lists where a and b differ in what their keys are made of, the first 100 places, in
// the order of Explain: nothing if and only if their keys are equal. It fails where Key does.
// The values are content, as those of Explain; of long ones the part is shown that differs.
func Differ(a, b *Context) ([]Difference, error) {
	plan, err := keyPlan()
	if err != nil {
		return nil, err
	}
	w := explainWalk{a: new(keyScratch), b: new(keyScratch)}
	if err := w.a.load(a); err != nil {
		return nil, fmt.Errorf("the first: %w", err)
	}
	if err := w.b.load(b); err != nil {
		return nil, fmt.Errorf("the second: %w", err)
	}
	va, vb := reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem()
	for i := range plan {
		f := &plan[i]
		switch {
		case f.role == keyBody:
			w.path = append(w.path[:0], "body"...)
			w.values(0, 0, keyLess)
		case f.name == "Header":
			w.headers(explainHeaders(a.Header), explainHeaders(b.Header))
		case !bytes.Equal(w.a.appendField(nil, f, va.Field(i)), w.b.appendField(nil, f, vb.Field(i))):
			w.add(explainName(f.name), explainValue(f, va.Field(i)), explainValue(f, vb.Field(i)))
		}
	}
	return w.found, nil
}

// explainWalk walks two contexts in step.
type explainWalk struct {
	a, b  *keyScratch
	path  []byte // where in the body
	found []Difference
}

func (w *explainWalk) add(path, a, b string) {
	if len(w.found) == maxDifferences {
		return
	}
	d := Difference{Path: path}
	if d.Path, _ = explainClip(path, ""); a == Absent || b == Absent {
		d.A, _ = explainClip(a, "")
		d.B, _ = explainClip(b, "")
	} else {
		d.A, d.B = explainClip(a, b)
	}
	w.found = append(w.found, d)
}

func (w *explainWalk) headers(a, b []explainPlace) {
	ofB := make(map[string]string, len(b))
	for _, p := range b {
		ofB[p.path] = p.value
	}
	for _, p := range a {
		value, ok := ofB[p.path]
		delete(ofB, p.path)
		if !ok {
			value = Absent
		}
		if !ok || value != p.value {
			w.add(p.path, p.value, value)
		}
	}
	for _, p := range b {
		if _, ok := ofB[p.path]; ok {
			w.add(p.path, Absent, p.value)
		}
	}
}

// values compares the value i of a with the value j of b; members of theirs by whose name less
// is true do not count.
func (w *explainWalk) values(i, j uint32, less func(name []byte) bool) {
	if len(w.found) == maxDifferences {
		return
	}
	a, b := w.a.doc.tokens[i], w.b.doc.tokens[j]
	switch {
	case a.kind == canonObject && b.kind == canonObject:
		w.objects(w.a.doc.names(i), w.b.doc.names(j), less)
	case a.kind == canonArray && b.kind == canonArray:
		w.arrays(i, j)
	case a.kind >= canonArray || b.kind >= canonArray || !bytes.Equal(w.a.doc.raw(i), w.b.doc.raw(j)):
		w.add(string(w.path), w.a.text(i), w.b.text(j))
	}
}

// objects compares the members of two objects, whose names are in order.
func (w *explainWalk) objects(a, b []uint32, less func(name []byte) bool) {
	deep := len(w.path)
	for (len(a) > 0 || len(b) > 0) && len(w.found) < maxDifferences {
		var order int
		switch {
		case len(a) == 0:
			order = 1
		case len(b) == 0:
			order = -1
		default:
			order = bytes.Compare(w.a.doc.bare(a[0]), w.b.doc.bare(b[0]))
		}
		of, name := &w.b.doc, uint32(0)
		if order <= 0 {
			of, name = &w.a.doc, a[0]
		} else {
			name = b[0]
		}
		counted := less == nil || !less(of.bare(name))
		w.path = explainMember(w.path[:deep], of.decode(nil, name))
		switch {
		case !counted:
		case order < 0:
			w.add(string(w.path), w.a.text(a[0]+1), Absent)
		case order > 0:
			w.add(string(w.path), Absent, w.b.text(b[0]+1))
		default:
			w.values(a[0]+1, b[0]+1, nil)
		}
		if order <= 0 {
			a = a[1:]
		}
		if order >= 0 {
			b = b[1:]
		}
	}
	w.path = w.path[:deep]
}

// arrays compares the elements of the arrays i of a and j of b, place by place.
func (w *explainWalk) arrays(i, j uint32) {
	deep := len(w.path)
	endA, endB := w.a.doc.tokens[i].next, w.b.doc.tokens[j].next
	m, n := i+1, j+1
	for k := 0; (m < endA || n < endB) && len(w.found) < maxDifferences; k++ {
		w.path = fmt.Appendf(w.path[:deep], "[%d]", k)
		switch {
		case n >= endB:
			w.add(string(w.path), w.a.text(m), Absent)
		case m >= endA:
			w.add(string(w.path), Absent, w.b.text(n))
		default:
			w.values(m, n, nil)
		}
		if m < endA {
			m = w.a.doc.tokens[m].next
		}
		if n < endB {
			n = w.b.doc.tokens[n].next
		}
	}
	w.path = w.path[:deep]
}

// explainClip cuts both to 200 bytes, so that the first difference is among them.
func explainClip(a, b string) (string, string) {
	same := 0
	if b != "" {
		for same < len(a) && same < len(b) && a[same] == b[same] {
			same++
		}
	}
	return explainCut(a, same), explainCut(b, same)
}

// explainCut cuts s to 200 bytes that hold the byte at.
func explainCut(s string, at int) string {
	const more = "…"
	s = strings.ToValidUTF8(s, "�")
	if len(s) <= maxPartValue {
		return s
	}
	from, before, after := 0, "", ""
	if at = min(at, len(s)); at > maxPartLead {
		from, before = at-maxPartLead, more
	}
	to := from + maxPartValue - len(before) - len(more)
	if to >= len(s) {
		from, to = from-(to-len(s)), len(s)
		from = max(from, 0)
	} else {
		after = more
	}
	for from < to && !utf8.RuneStart(s[from]) {
		from++
	}
	for to > from && to < len(s) && !utf8.RuneStart(s[to]) {
		to--
	}
	return before + s[from:to] + after
}
