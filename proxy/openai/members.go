package openai

import (
	"bytes"
	"fmt"
)

// maxMembers bounds the members of one object of an answer that is taken apart. The largest that
// is known, a Response, has about 40.
const maxMembers = 64

// walk goes through the members of an object that is to be understood wholly. Beside what
// [object] finds, a name twice, one with escapes and too many of them are bad, too: two parsers
// could read them differently.
type walk struct {
	object
	names [maxMembers][]byte
	n     int
}

func (w *walk) next() bool {
	if w.bad || !w.object.next() {
		return false
	}
	if w.n == maxMembers || bytes.IndexByte(w.name, '\\') >= 0 {
		return w.fail()
	}
	for _, name := range w.names[:w.n] {
		if bytes.Equal(name, w.name) {
			return w.fail()
		}
	}
	w.names[w.n] = w.name
	w.n++
	return true
}

// members is an object taken apart, in its own order. Values are raw JSON.
type members []member

type member struct {
	name  string
	value []byte
}

// readMembers takes the object v apart; what says where it stands, for the error.
func readMembers(v []byte, what string) (members, error) {
	m := make(members, 0, 12)
	w := walk{object: object{b: v}}
	for w.next() {
		m = append(m, member{string(w.name), w.value})
	}
	if w.bad {
		return nil, fmt.Errorf("%s is not an object of at most %d distinct plain names", what, maxMembers)
	}
	return m, nil
}

// get is the value of the member called name, nil where there is none.
func (m members) get(name string) []byte {
	for i := range m {
		if m[i].name == name {
			return m[i].value
		}
	}
	return nil
}

// has tells whether there is a member called name, null or not.
func (m members) has(name string) bool { return m.get(name) != nil }

// set gives the member called name another value, and adds it where there was none.
func (m *members) set(name string, value []byte) {
	for i := range *m {
		if (*m)[i].name == name {
			(*m)[i].value = value
			return
		}
	}
	*m = append(*m, member{name, value})
}

// append writes the object, with other values for those of its members that instead has. A nil
// value there leaves the member out.
func (m members) append(b []byte, instead ...member) []byte {
	b = append(b, '{')
	first := len(b)
	for _, f := range m {
		for _, o := range instead {
			if o.name == f.name {
				f.value = o.value
			}
		}
		if f.value == nil {
			continue
		}
		if len(b) > first {
			b = append(b, ',')
		}
		b = appendMember(b, f.name, f.value)
	}
	return append(b, '}')
}

// appendMember writes a name, which needs no escapes, and a raw value.
func appendMember(b []byte, name string, value []byte) []byte {
	b = append(append(append(b, '"'), name...), '"', ':')
	return append(b, value...)
}

// literal makes a raw value of plain text that is JSON already.
func literal(name, value string) member { return member{name, []byte(value)} }

// saysNothing tells whether a value that nobody understands may be left out all the same: null,
// an empty list, an empty object.
func saysNothing(v []byte) bool {
	switch {
	case isNull(v):
		return true
	case len(v) >= 2 && (v[0] == '[' || v[0] == '{'):
		return len(bytes.TrimSpace(v[1:len(v)-1])) == 0
	}
	return false
}

// smallIndex reads an index below limit as every server writes it, -1 where it is none.
func smallIndex(v []byte, limit int) int {
	if len(v) == 0 || len(v) > 6 || v[0] == '0' && len(v) > 1 {
		return -1
	}
	n := 0
	for _, c := range v {
		if c < '0' || c > '9' {
			return -1
		}
		n = 10*n + int(c-'0')
	}
	if n >= limit {
		return -1
	}
	return n
}

// inner is what stands between the quotes of a string or the brackets of a list.
func inner(v []byte) []byte { return v[1 : len(v)-1] }
