package contentlog

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"
	"strings"
)

// extent is a piece of a body.
type extent struct{ start, end int }

// leaf is a string or a number of a JSON document: where it stands in the body, quotes
// included, and under which name in which object or array.
type leaf struct {
	extent
	in     *node
	name   string
	number bool
}

// node is an object or array of a document.
type node struct {
	parent *node
	name   string
	depth  int
	index  string // its members that are called …index, with their values
	path   string // set by key
}

// Bounds of the search for redactions.
const (
	minNumber = 8  // digits of a number below which no rule looks at it
	maxJoin   = 64 // depth below which strings of an event stream are not joined
)

// leaves lists the strings and numbers of a valid document in order, names of members among
// them. doc is a piece of body.
func leaves(body []byte, doc extent) []leaf {
	var out []leaf
	in, name := &node{}, ""
	for i := doc.start; i < doc.end; {
		switch c := body[i]; {
		case c == '{' || c == '[':
			in, name = &node{parent: in, name: name, depth: in.depth + 1}, ""
			i++
		case c == '}' || c == ']':
			in, name = in.parent, ""
			i++
		case c == '"':
			end := stringEnd(body, i)
			next := end
			for next < doc.end && strings.IndexByte(" \t\r\n", body[next]) >= 0 {
				next++
			}
			l := leaf{extent: extent{i, end}, in: in, name: name}
			if next < doc.end && body[next] == ':' {
				name = string(body[i+1 : end-1])
				l.name = ""
			}
			out = append(out, l)
			i = end
		case c == '-' || isDigit(c):
			end := i + 1
			for end < doc.end && strings.IndexByte("0123456789+-.eE", body[end]) >= 0 {
				end++
			}
			if strings.HasSuffix(name, "index") {
				in.index += name + "=" + string(body[i:end]) + ";"
			} else if end-i >= minNumber {
				out = append(out, leaf{extent: extent{i, end}, in: in, name: name, number: true})
			}
			i = end
		default:
			i++
		}
	}
	return out
}

// stringEnd is where the string that begins at i ends, its quote included.
func stringEnd(body []byte, i int) int {
	for i++; body[i] != '"'; i++ {
		if body[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// key names the strings that are one text when the frames of a stream are put together: the
// path to them, without positions in arrays but with what the objects on it say of their
// index (choices, tool calls, content blocks, output items are numbered so).
func (n *node) key() string {
	if n.path == "" && n.parent != nil {
		n.path = n.parent.key() + "/" + n.name + "#" + n.index
	}
	return n.path
}

// joins tells whether the leaf may go on in the next frame. Names, ids and states are said
// anew in each; put together they would only be mistaken for numbers.
func (l leaf) joins() bool {
	switch l.name {
	case "", "object", "model", "type", "role", "status", "finish_reason", "system_fingerprint", "service_tier", "obfuscation":
		return false
	}
	return !l.number && l.in.depth <= maxJoin && !strings.HasSuffix(l.name, "id")
}

// edit puts text in the place of a piece of a body.
type edit struct {
	extent
	text []byte
}

// documents redacts the strings and numbers of the JSON documents in a body, each on its
// own or, with join, as the texts that they make together; of those, when the body was cut,
// the end is held back. The documents stay valid: a number with a finding becomes a string.
func (r redactor) documents(body []byte, docs []extent, join, cut bool, more ...edit) []byte {
	var order [][]leaf
	joined := map[string]int{}
	for _, doc := range docs {
		for _, l := range leaves(body, doc) {
			if !join || !l.joins() {
				order = append(order, []leaf{l})
				continue
			}
			key := l.in.key() + "/" + l.name
			i, ok := joined[key]
			if !ok {
				i = len(order)
				joined[key], order = i, append(order, nil)
			}
			order[i] = append(order[i], l)
		}
	}
	edits := more
	for _, group := range order {
		edits = append(edits, r.group(body, group, cut)...)
	}
	return splice(body, edits)
}

// group redacts leaves that make one text.
func (r redactor) group(body []byte, group []leaf, cut bool) []edit {
	parts, text := make([][]byte, len(group)), []byte(nil)
	for i, l := range group {
		parts[i] = l.text(body)
		if len(group) > 1 {
			text = append(text, parts[i]...)
		} else {
			text = parts[i]
		}
	}
	spans := r.find(text, maxEscapes)
	if cut && len(group) > 1 {
		spans = merge(append(spans, tail(len(text))))
	}
	if len(spans) == 0 {
		return nil
	}
	var edits []edit
	offset := 0
	for i, l := range group {
		if out := replace(parts[i], offset, spans); !bytes.Equal(out, parts[i]) {
			edits = append(edits, edit{l.extent, quote(out)})
		}
		offset += len(parts[i])
	}
	return edits
}

// text is what the leaf says.
func (l leaf) text(body []byte) []byte {
	raw := body[l.start:l.end]
	if l.number {
		return raw
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw[1 : len(raw)-1]
	}
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return raw[1 : len(raw)-1] // cannot be: the document is valid
	}
	return []byte(s)
}

// quote makes a JSON string of text. Pieces of a text that was parted inside a character
// become U+FFFD.
func quote(text []byte) []byte {
	out, err := encode(string(text))
	if err != nil {
		return []byte(`"[redacted]"`) // cannot be: a string always encodes
	}
	return bytes.TrimSuffix(out, []byte("\n"))
}

// splice applies edits that do not overlap.
func splice(body []byte, edits []edit) []byte {
	if len(edits) == 0 {
		return body
	}
	slices.SortFunc(edits, func(a, b edit) int { return cmp.Compare(a.start, b.start) })
	out, done := make([]byte, 0, len(body)), 0
	for _, e := range edits {
		out = append(append(out, body[done:e.start]...), e.text...)
		done = e.end
	}
	return append(out, body[done:]...)
}

// isEventStream tells whether a body looks like server-sent events.
func isEventStream(body []byte) bool {
	body = bytes.TrimLeft(body, "\uFEFF\r\n")
	for _, field := range []string{"data:", "event:", "id:", "retry:", ":"} {
		if bytes.HasPrefix(body, []byte(field)) {
			return true
		}
	}
	return false
}

// eventStream redacts server-sent events: an address that comes in three frames is found as
// if it had come in one. Lines that hold no JSON are taken as text.
func (r redactor) eventStream(body []byte, cut bool) []byte {
	var docs []extent
	var edits []edit
	for start := 0; start < len(body); {
		end := len(body)
		if i := bytes.IndexAny(body[start:], "\r\n"); i >= 0 {
			end = start + i
		}
		line := body[start:end]
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok && json.Valid(data) {
			docs = append(docs, extent{end - len(data), end})
		} else {
			spans := r.find(line, maxEscapes)
			if cut && end == len(body) {
				spans = merge(append(spans, tail(len(line))))
			}
			if len(spans) > 0 {
				edits = append(edits, edit{extent{start, end}, replace(line, 0, spans)})
			}
		}
		start = end + 1
	}
	return r.documents(body, docs, true, cut, edits...)
}
