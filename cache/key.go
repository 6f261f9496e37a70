package cache

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"slices"
	"sync"
)

// keyDomain goes first into every key. Its number changes with anything that gives the same
// Context another key, so that nodes of two versions never take each other's entries for
// something else.
const keyDomain = "headgate cache key 1\n"

// Bounds of what is kept between two keys.
const (
	maxKeyKept   = 1 << 20 // bytes of each buffer
	maxKeyTokens = 1 << 16
)

// Uncounted returns the top-level members of a body that cannot change the answer, and model,
// which Context.Model stands for. They are not in the key. The caller owns the slice.
func Uncounted() []string {
	names := keyUncounted()
	return names[:]
}

func keyUncounted() [7]string {
	return [...]string{"stream", "stream_options", "user", "metadata", "request_id", "priority", "model"}
}

// keyLess says whether the name is one of Uncounted.
func keyLess(name []byte) bool {
	for _, n := range keyUncounted() {
		if string(name) == n {
			return true
		}
	}
	return false
}

// Key derives the key from every field: of the struct as the compiler sees it, so that none can
// be forgotten. It fails with *BodyError for a body that has no canonical form (not JSON in
// UTF-8, duplicate names, bounds) and for an unknown Normalize; such a request is not cached.
// Safe for concurrent use as long as nobody writes to c.
func (c *Context) Key() (Key, error) {
	plan, err := keyPlan()
	if err != nil {
		return Key{}, err
	}
	s := keyPool.Get().(*keyScratch)
	defer s.free()
	return s.key(c, plan)
}

// key does what Context.Key does.
func (s *keyScratch) key(c *Context, plan []keyField) (Key, error) {
	if err := s.load(c); err != nil {
		return Key{}, err
	}
	v := reflect.ValueOf(c).Elem()
	s.image = append(s.image[:0], keyDomain...)
	for i := range plan {
		s.image = s.appendField(s.image, &plan[i], v.Field(i))
	}
	return sha256.Sum256(s.image), nil
}

// keyRole is how a field of Context counts.
type keyRole uint8

const (
	keyPlain keyRole = iota // by its value
	keySet                  // a list whose order does not count
	keyBody                 // JSON, by its canonical form
)

// keyField is a field of Context.
type keyField struct {
	name string
	head []byte // its name, framed
	role keyRole
}

// keyRoleOf returns the role of the field of Context by that name.
func keyRoleOf(name string) keyRole {
	switch name {
	case "Backends", "Header":
		return keySet
	case "Body":
		return keyBody
	}
	return keyPlain
}

// keyPlan is what keyPlanOf says of Context. A failure is found by the tests: it depends on
// nothing but the type.
var keyPlan = sync.OnceValues(func() ([]keyField, error) { //nolint:gochecknoglobals // derived from a type, never changed
	return keyPlanOf(reflect.TypeFor[Context](), keyRoleOf)
})

// keyPlanOf lists the fields of the struct t in their order. It fails where the value of a
// field could not go into a key.
func keyPlanOf(t reflect.Type, role func(name string) keyRole) ([]keyField, error) {
	plan := make([]keyField, t.NumField())
	for i := range plan {
		f := t.Field(i)
		plan[i] = keyField{name: f.Name, head: keyAppendString(nil, f.Name), role: role(f.Name)}
		err := keySupports(f.Type)
		switch {
		case err != nil:
		case plan[i].role == keySet && f.Type != reflect.TypeFor[[]string]():
			err = fmt.Errorf("want []string, got %s", f.Type)
		case plan[i].role == keyBody && f.Type != reflect.TypeFor[[]byte]():
			err = fmt.Errorf("want []byte, got %s", f.Type)
		}
		if err != nil {
			return nil, fmt.Errorf("cache: field %s of %s in a key: %w", f.Name, t, err)
		}
	}
	return plan, nil
}

// keySupports says whether keyAppend takes values of t.
func keySupports(t reflect.Type) error {
	switch t.Kind() {
	case reflect.String, reflect.Bool,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Float32, reflect.Float64:
		return nil
	case reflect.Slice, reflect.Array:
		return keySupports(t.Elem())
	case reflect.Struct:
		for f := range t.Fields() {
			if err := keySupports(f.Type); err != nil {
				return fmt.Errorf("%s: %w", f.Name, err)
			}
		}
		return nil
	}
	return fmt.Errorf("values of type %s have no encoding; add one to keyAppend", t)
}

// keyScratch is the memory that a key is made in.
type keyScratch struct {
	doc   canonDoc
	image []byte   // what is hashed
	set   []string // to sort
	texts []uint32 // the last user text
	plain []byte   // of it, one
}

var keyPool = sync.Pool{New: func() any { return new(keyScratch) }} //nolint:gochecknoglobals // a free list

// free gives s back. It keeps no reference to what it was used for, and no large buffer.
func (s *keyScratch) free() {
	s.doc.src = nil
	clear(s.set)
	if cap(s.image) > maxKeyKept || cap(s.doc.arena) > maxKeyKept || cap(s.plain) > maxKeyKept ||
		cap(s.doc.tokens) > maxKeyTokens || cap(s.doc.order) > maxKeyTokens || cap(s.set) > maxKeyTokens {
		return
	}
	keyPool.Put(s)
}

// load parses the body and normalizes what is to be.
func (s *keyScratch) load(c *Context) error {
	if err := s.doc.parse(c.Body); err != nil {
		return err
	}
	return s.normalize(c)
}

// appendField appends the field f with the value v, so that what was appended can be told apart
// into names and values in one way only.
func (s *keyScratch) appendField(dst []byte, f *keyField, v reflect.Value) []byte {
	dst = append(dst, f.head...)
	switch f.role {
	case keySet:
		s.set = s.set[:0]
		for i := range v.Len() {
			s.set = append(s.set, v.Index(i).String())
		}
		slices.Sort(s.set)
		dst = keyAppendLen(append(dst, 'S'), len(s.set))
		for _, e := range s.set {
			dst = keyAppendString(dst, e)
		}
		return dst
	case keyBody:
		dst = append(dst, 'j', 0, 0, 0, 0, 0, 0, 0, 0)
		start := len(dst)
		dst = s.doc.appendValue(dst, 0, keyLess)
		binary.BigEndian.PutUint64(dst[start-8:], uint64(len(dst)-start))
		return dst
	}
	return keyAppend(dst, v)
}

// keyAppend appends the kind and value of v, of a type that keySupports.
func keyAppend(dst []byte, v reflect.Value) []byte {
	switch kind := v.Kind(); {
	case kind == reflect.String:
		return keyAppendString(append(dst, 's'), v.String())
	case kind == reflect.Bool:
		if v.Bool() {
			return append(dst, 'b', 1)
		}
		return append(dst, 'b', 0)
	case v.CanInt():
		return binary.BigEndian.AppendUint64(append(dst, 'i'), uint64(v.Int()))
	case v.CanUint():
		return binary.BigEndian.AppendUint64(append(dst, 'u'), v.Uint())
	case v.CanFloat():
		return binary.BigEndian.AppendUint64(append(dst, 'f'), math.Float64bits(v.Float()))
	case kind == reflect.Slice && v.Type().Elem().Kind() == reflect.Uint8:
		dst = keyAppendLen(append(dst, 'x'), v.Len())
		return append(dst, v.Bytes()...)
	case kind == reflect.Slice || kind == reflect.Array:
		dst = keyAppendLen(append(dst, 'l'), v.Len())
		for i := range v.Len() {
			dst = keyAppend(dst, v.Index(i))
		}
		return dst
	case kind == reflect.Struct:
		dst = keyAppendLen(append(dst, 't'), v.NumField())
		for i := range v.NumField() {
			dst = keyAppend(keyAppendString(dst, v.Type().Field(i).Name), v.Field(i))
		}
		return dst
	}
	panic("cache: a field of a type that keySupports refuses: " + v.Type().String())
}

func keyAppendString(dst []byte, s string) []byte { return append(keyAppendLen(dst, len(s)), s...) }

func keyAppendLen(dst []byte, n int) []byte { return binary.AppendUvarint(dst, uint64(n)) }
