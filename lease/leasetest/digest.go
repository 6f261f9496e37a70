package leasetest

import (
	"hash/maphash"
	"math/bits"
	"reflect"
	"sync"
)

// digest is a hash of all that a value holds and refers to, unexported fields too, in whatever order its maps are.
// Functions, mutexes and seeds of hashes do not count.
type digest struct {
	seen map[uintptr]uint64 // pointers, by the order in which they were met
}

func mix(h, x uint64) uint64 {
	hi, lo := bits.Mul64(h^x^0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9)
	return hi ^ lo
}

func digestOf(h uint64, vs ...any) uint64 {
	d := digest{seen: map[uintptr]uint64{}}
	for _, v := range vs {
		h = d.value(h, reflect.ValueOf(v))
	}
	return h
}

func (d *digest) value(h uint64, v reflect.Value) uint64 {
	switch v.Kind() {
	case reflect.Bool:
		if v.Bool() {
			return mix(h, 1)
		}
		return mix(h, 2)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return mix(h, uint64(v.Int()))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		return mix(h, v.Uint())
	case reflect.Float32, reflect.Float64:
		return mix(h, uint64(v.Float()*1e6))
	case reflect.String:
		s := v.String()
		for i := range len(s) {
			h = mix(h, uint64(s[i]))
		}
		return mix(h, uint64(len(s)))
	case reflect.Struct:
		return d.structure(h, v)
	case reflect.Pointer, reflect.UnsafePointer:
		return d.pointer(h, v)
	case reflect.Interface:
		if v.IsNil() {
			return mix(h, 3)
		}
		return d.value(h, v.Elem())
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			h = d.value(h, v.Index(i))
		}
		return mix(h, uint64(v.Len()))
	case reflect.Map:
		sum := uint64(0)
		for it := v.MapRange(); it.Next(); {
			sum += d.value(d.value(h, it.Key()), it.Value())
		}
		return mix(mix(h, sum), uint64(v.Len()))
	}
	return h
}

func (d *digest) structure(h uint64, v reflect.Value) uint64 {
	t := v.Type()
	switch t {
	case reflect.TypeFor[sync.Mutex](), reflect.TypeFor[sync.RWMutex](), reflect.TypeFor[maphash.Seed]():
		return h
	}
	for i := range v.NumField() {
		if t.Field(i).Name != "_" {
			h = d.value(h, v.Field(i))
		}
	}
	return h
}

func (d *digest) pointer(h uint64, v reflect.Value) uint64 {
	if v.IsNil() {
		return mix(h, 4)
	}
	at := v.Pointer()
	if n, known := d.seen[at]; known {
		return mix(h, n)
	}
	if v.Kind() == reflect.UnsafePointer {
		return mix(h, 5)
	}
	d.seen[at] = uint64(len(d.seen)) + 6
	return d.value(h, v.Elem())
}
