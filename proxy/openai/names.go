package openai

import (
	"bytes"
	"hash/maphash"

	"github.com/go-json-experiment/json/jsontext"
)

// maxNames bounds the names of all objects that are open at one point of a body: the
// memory of the search for duplicates (about 3 MiB at the bound). A body may hold any
// number of objects one after another.
const maxNames = 1 << 16

// linearNames is how many names of an object are compared one by one; beyond, a table
// is built. Comparing this few is cheaper than hashing them.
const linearNames = 12

// nameSet finds names that an object holds twice, in linear time whatever the names
// are: the hash is seeded, so that nobody can aim at collisions.
type nameSet struct {
	body    []byte
	decoded []byte // names that were written with escapes
	names   []name // of the open objects, outermost first
	seed    maphash.Seed
	seeded  bool
}

// name is body[start:end], or decoded[start:end]; without quotes.
type name struct {
	start, end uint32
	hash       uint32 // of objects with a table only
	escaped    bool
}

// scope is one open object.
type scope struct {
	first, decoded int      // lengths of names and decoded when it opened
	slots          []uint32 // open addressing; 1 + index from first; nil while small
}

func (s *nameSet) open() scope { return scope{first: len(s.names), decoded: len(s.decoded)} }

func (s *nameSet) close(sc *scope) {
	s.names, s.decoded = s.names[:sc.first], s.decoded[:sc.decoded]
}

func (s *nameSet) bytes(n name) []byte {
	if n.escaped {
		return s.decoded[n.start:n.end]
	}
	return s.body[n.start:n.end]
}

// add takes the string whose quotes enclose body[start:end] and returns its decoded
// form, valid until the object closes, and whether the object already has that name.
func (s *nameSet) add(sc *scope, start, end int) (decoded []byte, duplicate bool) {
	n := name{start: uint32(start), end: uint32(end)}
	if bytes.IndexByte(s.body[start:end], '\\') >= 0 {
		n = name{start: uint32(len(s.decoded)), escaped: true}
		s.decoded, _ = jsontext.AppendUnquote(s.decoded, s.body[start-1:end+1])
		n.end = uint32(len(s.decoded))
	}
	decoded = s.bytes(n)
	count := len(s.names) - sc.first
	if count < linearNames {
		for _, o := range s.names[sc.first:] {
			if o.end-o.start == uint32(len(decoded)) && bytes.Equal(s.bytes(o), decoded) {
				return decoded, true
			}
		}
		s.names = append(s.names, n)
		return decoded, false
	}
	if 2*(count+1) > len(sc.slots) {
		s.grow(sc)
	}
	n.hash = s.hash(decoded)
	mask := uint32(len(sc.slots) - 1)
	at := n.hash & mask
	for ; sc.slots[at] != 0; at = (at + 1) & mask {
		o := s.names[sc.first+int(sc.slots[at])-1]
		if o.hash == n.hash && bytes.Equal(s.bytes(o), decoded) {
			return decoded, true
		}
	}
	sc.slots[at] = uint32(count) + 1
	s.names = append(s.names, n)
	return decoded, false
}

// grow builds the table anew at four times the size.
func (s *nameSet) grow(sc *scope) {
	hashed := sc.slots != nil
	sc.slots = make([]uint32, max(4*linearNames+16, 4*len(sc.slots)))
	mask := uint32(len(sc.slots) - 1)
	for i := sc.first; i < len(s.names); i++ {
		n := &s.names[i]
		if !hashed {
			n.hash = s.hash(s.bytes(*n))
		}
		at := n.hash & mask
		for sc.slots[at] != 0 {
			at = (at + 1) & mask
		}
		sc.slots[at] = uint32(i-sc.first) + 1
	}
}

func (s *nameSet) hash(b []byte) uint32 {
	if !s.seeded {
		s.seed, s.seeded = maphash.MakeSeed(), true
	}
	return uint32(maphash.Bytes(s.seed, b))
}
