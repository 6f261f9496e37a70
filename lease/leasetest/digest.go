package leasetest

import (
	"hash/maphash"
	"maps"
	"math/bits"
	"reflect"
	"strings"
	"sync"
	"unsafe"
)

// digester hashes all that a value holds and refers to, unexported fields too, in whatever order its maps are. Functions,
// mutexes, seeds of hashes and the fields that it is told to leave out do not count.
type digester struct {
	out   map[string]bool // fields left out, by type and name: "Owner.stats"
	plans map[reflect.Type]*plan
}

// plan is what counts of a type.
type plan struct {
	flat   bool // its bytes say all
	fields []int
}

func newDigester(out ...string) *digester {
	d := &digester{out: map[string]bool{}, plans: map[reflect.Type]*plan{}}
	for _, name := range out {
		d.out[name] = true
	}
	return d
}

func (d *digester) of(h uint64, vs ...any) uint64 {
	w := walk{d: d, seen: map[uintptr]uint64{}}
	for _, v := range vs {
		h = w.value(h, reflect.ValueOf(v))
	}
	return h
}

func (d *digester) plan(t reflect.Type) *plan {
	if p := d.plans[t]; p != nil {
		return p
	}
	p := &plan{}
	d.plans[t] = p // a type may refer to itself
	p.flat = d.isFlat(t)
	if t.Kind() == reflect.Struct && !p.flat {
		for i := range t.NumField() {
			f := t.Field(i)
			switch f.Type {
			case reflect.TypeFor[sync.Mutex](), reflect.TypeFor[sync.RWMutex](), reflect.TypeFor[maphash.Seed]():
				continue
			}
			if f.Name != "_" && f.Type.Kind() != reflect.Func && !d.out[t.Name()+"."+f.Name] {
				p.fields = append(p.fields, i)
			}
		}
	}
	return p
}

// isFlat says whether a type refers to nothing, and all of it counts.
func (d *digester) isFlat(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Array:
		return d.plan(t.Elem()).flat
	case reflect.Struct:
		for f := range t.Fields() {
			if f.Type.Size() > 0 && !d.plan(f.Type).flat || d.out[t.Name()+"."+f.Name] {
				return false
			}
		}
		return true
	case reflect.Pointer, reflect.UnsafePointer, reflect.Interface, reflect.Slice, reflect.Map, reflect.String, reflect.Func, reflect.Chan:
		return false
	}
	return true
}

func mix(h, x uint64) uint64 {
	hi, lo := bits.Mul64(h^x^0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9)
	return hi ^ lo
}

func mixBytes(h uint64, b []byte) uint64 {
	for len(b) >= 8 {
		if x := *(*uint64)(unsafe.Pointer(&b[0])); x != 0 {
			h = mix(h, x^uint64(len(b))<<32)
		}
		b = b[8:]
	}
	for _, x := range b {
		h = mix(h, uint64(x))
	}
	return h
}

// walk is one digest under way.
type walk struct {
	d    *digester
	seen map[uintptr]uint64 // pointers, by the order in which they were met
}

func (w *walk) value(h uint64, v reflect.Value) uint64 {
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
		return mixBytes(mix(h, uint64(v.Len())), []byte(v.String()))
	case reflect.Struct, reflect.Array:
		return w.composite(h, v)
	case reflect.Pointer, reflect.UnsafePointer:
		return w.pointer(h, v)
	case reflect.Interface:
		if v.IsNil() {
			return mix(h, 3)
		}
		return w.value(h, v.Elem())
	case reflect.Slice:
		return w.slice(mix(h, uint64(v.Len())), v)
	case reflect.Map:
		sum := uint64(0)
		for it := v.MapRange(); it.Next(); {
			entry := walk{d: w.d, seen: maps.Clone(w.seen)} // so that no entry counts for another
			sum += entry.value(entry.value(h, it.Key()), it.Value())
		}
		return mix(mix(h, sum), uint64(v.Len()))
	}
	return h
}

func (w *walk) slice(h uint64, v reflect.Value) uint64 {
	t := v.Type().Elem()
	if v.Len() == 0 {
		return h
	}
	if w.d.plan(t).flat {
		return mixBytes(h, unsafe.Slice((*byte)(v.UnsafePointer()), v.Len()*int(t.Size())))
	}
	for i := range v.Len() {
		h = w.value(h, v.Index(i))
	}
	return h
}

func (w *walk) composite(h uint64, v reflect.Value) uint64 {
	t := v.Type()
	p := w.d.plan(t)
	var raw []byte
	if v.CanAddr() {
		raw = unsafe.Slice((*byte)(unsafe.Pointer(v.UnsafeAddr())), t.Size())
		if p.flat {
			return mixBytes(h, raw)
		}
		if zero(raw) && t.PkgPath() != "sync/atomic" {
			return mix(h, 8)
		}
	}
	if v.Kind() == reflect.Array {
		for i := range v.Len() {
			h = w.value(h, v.Index(i))
		}
		return h
	}
	if t.PkgPath() == "sync/atomic" && strings.HasPrefix(t.Name(), "Pointer[") {
		to := t.Field(0).Type.Elem() // [0]*T
		at := v.FieldByName("v").UnsafePointer()
		return w.pointer(h, reflect.NewAt(to.Elem(), at))
	}
	if p.flat {
		for _, f := range v.Fields() {
			h = w.value(h, f)
		}
		return h
	}
	for _, i := range p.fields {
		h = w.value(h, v.Field(i))
	}
	return h
}

func zero(b []byte) bool {
	for len(b) >= 8 {
		if *(*uint64)(unsafe.Pointer(&b[0])) != 0 {
			return false
		}
		b = b[8:]
	}
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

func (w *walk) pointer(h uint64, v reflect.Value) uint64 {
	if v.IsNil() {
		return mix(h, 4)
	}
	at := v.Pointer()
	if n, known := w.seen[at]; known {
		return mix(h, n)
	}
	if v.Kind() == reflect.UnsafePointer {
		return mix(h, 5)
	}
	w.seen[at] = uint64(len(w.seen)) + 6
	return w.value(h, v.Elem())
}
