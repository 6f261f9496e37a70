package leasetest

import (
	"hash/maphash"
	"maps"
	"reflect"
	"strings"
	"sync"
	"unsafe"

	"headgate/lease"
)

// copier copies and hashes all that a value holds and refers to, unexported fields too: what Search keeps of a process.
// Pointers to one thing are pointers to one copy. It is not safe for concurrent use.
type copier struct {
	rules  map[string]fieldRule // of fields, by type and name: "Owner.stats"
	shared map[string]share     // by type, with its package
	plans  map[reflect.Type]*plan
	used   map[string]bool // the rules that met their field

	copies map[unsafe.Pointer]unsafe.Pointer // in the copy under way
	met    map[unsafe.Pointer]uint64         // in the hash under way: pointers, by the order in which they were met
	now    lease.Instant                     // what moments are hashed against
}

// treat says what is not as usual with a field.
type treat uint8

const (
	asUsual  treat = iota
	unhashed       // it is copied, and does not count in the hash
	emptied        // the copy has its zero, and it does not count: scratch
	moment         // a reading of a clock, or several: how long ago it was counts, and after a while only that it was
	ticks          // the same of one in ticks
	positive       // only whether it is more than 0 counts
	numbered       // a series' number, and above it a reading that does not count
)

// fieldRule is how a field is treated.
type fieldRule struct {
	treat treat
	keep  int64 // ns: of an older moment only that it is older counts
}

const forever = never

// share says how a pointer counts that is not followed in copies.
type share uint8

const (
	sharedFact  share = iota + 1 // what it points to never changes, and counts
	sharedFrame                  // it names a part of the world, and does not count
)

// plan is how a type is copied and hashed.
type plan struct {
	t      reflect.Type
	solid  bool                                     // its bytes are a copy
	plain  bool                                     // and its bytes say all
	fix    func(dst, src unsafe.Pointer)            // after the bytes were copied; nil: solid
	hash   func(h uint64, at unsafe.Pointer) uint64 // nil: plain
	silent bool                                     // it does not count
}

func newCopier(rules map[string]fieldRule, shared map[string]share) *copier {
	return &copier{
		rules: rules, shared: shared, plans: map[reflect.Type]*plan{}, used: map[string]bool{},
		copies: map[unsafe.Pointer]unsafe.Pointer{}, met: map[unsafe.Pointer]uint64{},
	}
}

// copyOf returns a copy of what v points to.
func copyOf[T any](c *copier, v *T) *T {
	clear(c.copies)
	return (*T)(c.pointer(c.plan(reflect.TypeFor[T]()), unsafe.Pointer(v)))
}

// hashOf hashes what v points to.
func hashOf[T any](c *copier, v *T) uint64 {
	clear(c.met)
	return c.sum(c.plan(reflect.TypeFor[T]()), 1, unsafe.Pointer(v))
}

func (c *copier) pointer(p *plan, src unsafe.Pointer) unsafe.Pointer {
	if dst, known := c.copies[src]; known {
		return dst
	}
	to := reflect.New(p.t)
	dst := to.UnsafePointer()
	c.copies[src] = dst
	to.Elem().Set(reflect.NewAt(p.t, src).Elem())
	if !p.solid {
		p.fix(dst, src)
	}
	return dst
}

func (c *copier) sum(p *plan, h uint64, at unsafe.Pointer) uint64 {
	switch {
	case p.silent:
		return h
	case p.plain:
		return mixBytes(h, unsafe.Slice((*byte)(at), p.t.Size()))
	}
	return p.hash(h, at)
}

func (c *copier) plan(t reflect.Type) *plan {
	if p := c.plans[t]; p != nil {
		return p
	}
	p := &plan{t: t}
	c.plans[t] = p // a type may refer to itself, by a pointer
	switch t.Kind() {
	case reflect.Struct:
		c.structure(p)
	case reflect.Array:
		c.array(p)
	case reflect.Pointer:
		c.pointers(p, t.Elem())
	case reflect.Interface:
		c.interfaces(p)
	case reflect.Slice:
		c.slices(p)
	case reflect.Map:
		c.maps(p)
	case reflect.String:
		p.solid = true
		p.hash = func(h uint64, at unsafe.Pointer) uint64 {
			s := *(*string)(at)
			return mixBytes(mix(h, uint64(len(s))), unsafe.Slice(unsafe.StringData(s), len(s)))
		}
	case reflect.Func, reflect.Chan, reflect.UnsafePointer:
		p.solid, p.silent = true, true
	default:
		p.solid, p.plain = true, true
	}
	return p
}

func (c *copier) structure(p *plan) {
	t := p.t
	switch {
	case t == reflect.TypeFor[sync.Mutex](), t == reflect.TypeFor[sync.RWMutex](), t == reflect.TypeFor[maphash.Seed]():
		p.solid, p.silent = true, true
		return
	case t.PkgPath() == "sync/atomic" && strings.HasPrefix(t.Name(), "Pointer["):
		c.pointers(p, t.Field(0).Type.Elem().Elem()) // [0]*T; the pointer is the only thing that takes room
		return
	}
	type part struct {
		offset uintptr
		plan   *plan
		treat  treat
		hash   func(h uint64, at unsafe.Pointer) uint64 // nil: as the plan has it
	}
	var fixes, hashes []part
	name, _, _ := strings.Cut(t.Name(), "[")
	for f := range t.Fields() {
		if f.Type.Size() == 0 {
			continue
		}
		rule := name + "." + f.Name
		how := c.rules[rule]
		x := part{f.Offset, c.plan(f.Type), how.treat, nil}
		if x.treat != asUsual {
			c.used[rule] = true
		}
		if x.treat > emptied {
			x.hash = c.as(how, f.Type)
		}
		if x.treat == emptied || !x.plan.solid {
			fixes = append(fixes, x)
		}
		if f.Name != "_" && (x.hash != nil || x.treat == asUsual && !x.plan.silent) {
			hashes = append(hashes, x)
		}
	}
	p.solid, p.plain, p.silent = len(fixes) == 0, len(hashes) == t.NumField(), len(hashes) == 0
	room := uintptr(0)
	for _, x := range hashes {
		p.plain = p.plain && x.plan.plain && x.hash == nil
		room += x.plan.t.Size()
	}
	p.plain = p.plain && room == t.Size() // between fields there may be anything
	p.fix = func(dst, src unsafe.Pointer) {
		for i := range fixes {
			x := &fixes[i]
			if x.treat == emptied {
				reflect.NewAt(x.plan.t, unsafe.Add(dst, x.offset)).Elem().SetZero()
			} else {
				x.plan.fix(unsafe.Add(dst, x.offset), unsafe.Add(src, x.offset))
			}
		}
	}
	p.hash = func(h uint64, at unsafe.Pointer) uint64 {
		for i := range hashes {
			h += uint64(hashes[i].offset+1) * 0x9e3779b97f4a7c15 // for what is zero adds nothing
			if x := &hashes[i]; x.hash != nil {
				h = x.hash(h, unsafe.Add(at, x.offset))
			} else {
				h = c.sum(x.plan, h, unsafe.Add(at, x.offset))
			}
		}
		return h
	}
}

// as hashes a field by its rule.
func (c *copier) as(how fieldRule, t reflect.Type) func(h uint64, at unsafe.Pointer) uint64 {
	switch {
	case how.treat == moment && t.Kind() == reflect.Slice:
		return func(h uint64, at unsafe.Pointer) uint64 {
			for _, v := range *(*[]int64)(at) {
				h = mix(h, c.ago(v, how.keep))
			}
			return h
		}
	case how.treat == moment && t.Kind() == reflect.Map:
		k := c.plan(t.Key())
		return func(h uint64, at unsafe.Pointer) uint64 {
			sum := uint64(0)
			for it := reflect.NewAt(t, at).Elem().MapRange(); it.Next(); {
				key := reflect.New(k.t)
				key.Elem().Set(it.Key())
				sum += mix(c.sum(k, 1, key.UnsafePointer()), c.ago(it.Value().Int(), how.keep))
			}
			return mix(h, sum)
		}
	case how.treat == moment:
		return func(h uint64, at unsafe.Pointer) uint64 { return mix(h, c.ago(*(*int64)(at), how.keep)) }
	case how.treat == ticks:
		return func(h uint64, at unsafe.Pointer) uint64 {
			was := *(*uint32)(at)
			if was == 0 {
				return mix(h, 1)
			}
			// A tick more or less is the same reading; two readings of the small world are further apart.
			age := int64(uint32(c.now.Now>>16)-was+8) >> 4
			return mix(h, uint64(2+min(age, how.keep>>20)))
		}
	case how.treat == numbered:
		return func(h uint64, at unsafe.Pointer) uint64 { return mix(h, *(*uint64)(at)&(1<<41-1)) }
	}
	size := t.Size() // positive
	return func(h uint64, at unsafe.Pointer) uint64 {
		if zero(unsafe.Slice((*byte)(at), size)) {
			return mix(h, 1)
		}
		return mix(h, 2)
	}
}

// ago is a moment as it counts. What is far from every clock is no moment.
func (c *copier) ago(v, keep int64) uint64 {
	now := c.now.Now
	switch {
	case v > epoch/2 && v < 2*epoch:
		now = c.now.Wall
	case v < 500*ms || v >= 2*epoch:
		return uint64(v)
	}
	if keep != forever && v < now-keep {
		return 1 << 62
	}
	return 1<<61 + uint64(v-now)
}

func (c *copier) array(p *plan) {
	e, n := c.plan(p.t.Elem()), p.t.Len()
	p.solid, p.plain, p.silent = e.solid, e.plain, e.silent
	p.fix = func(dst, src unsafe.Pointer) {
		for i := range n {
			e.fix(unsafe.Add(dst, uintptr(i)*e.t.Size()), unsafe.Add(src, uintptr(i)*e.t.Size()))
		}
	}
	p.hash = func(h uint64, at unsafe.Pointer) uint64 {
		for i := range n {
			// So many are zero that they are worth a look.
			x := unsafe.Add(at, uintptr(i)*e.t.Size())
			if b := unsafe.Slice((*byte)(x), e.t.Size()); !zero(b) {
				h = c.sum(e, mix(h, uint64(i)), x)
			}
		}
		return h
	}
}

func (c *copier) pointers(p *plan, to reflect.Type) {
	fact := c.shared[to.String()] == sharedFact
	p.solid, p.silent = c.shared[to.String()] != 0, c.shared[to.String()] == sharedFrame
	e := (*plan)(nil) // made when it is used: types refer to each other
	p.fix = func(dst, src unsafe.Pointer) {
		at := *(*unsafe.Pointer)(src)
		if at == nil {
			return
		}
		if e == nil {
			e = c.plan(to)
		}
		*(*unsafe.Pointer)(dst) = c.pointer(e, at)
	}
	p.hash = func(h uint64, src unsafe.Pointer) uint64 {
		at := *(*unsafe.Pointer)(src)
		if at == nil {
			return mix(h, 4)
		}
		if e == nil {
			e = c.plan(to)
		}
		if fact { // there may be several that are equal
			return c.sum(e, mix(h, 5), at)
		}
		if n, known := c.met[at]; known {
			return mix(h, n)
		}
		c.met[at] = uint64(len(c.met)) + 6
		return c.sum(e, mix(h, 5), at)
	}
}

// interfaces are copied where they hold pointers; what others hold never changes.
func (c *copier) interfaces(p *plan) {
	t := p.t
	p.fix = func(dst, src unsafe.Pointer) {
		v := reflect.NewAt(t, src).Elem().Elem()
		if v.Kind() != reflect.Pointer || v.IsNil() || c.shared[v.Type().Elem().String()] != 0 {
			return
		}
		to := v.Type().Elem()
		reflect.NewAt(t, dst).Elem().Set(reflect.NewAt(to, c.pointer(c.plan(to), v.UnsafePointer())))
	}
	p.hash = func(h uint64, at unsafe.Pointer) uint64 {
		v := reflect.NewAt(t, at).Elem().Elem()
		if !v.IsValid() {
			return mix(h, 3)
		}
		if v.Kind() == reflect.Pointer {
			x := v.UnsafePointer()
			return c.sum(c.plan(v.Type()), h, unsafe.Pointer(&x))
		}
		return mixBytes(h, []byte(v.Type().String()))
	}
}

func (c *copier) slices(p *plan) {
	t, e := p.t, c.plan(p.t.Elem())
	p.fix = func(dst, src unsafe.Pointer) {
		v := reflect.NewAt(t, src).Elem()
		if v.IsNil() {
			return
		}
		to := reflect.MakeSlice(t, v.Len(), v.Len())
		reflect.Copy(to, v)
		reflect.NewAt(t, dst).Elem().Set(to)
		if e.solid {
			return
		}
		from, at := v.UnsafePointer(), to.UnsafePointer()
		for i := range v.Len() {
			e.fix(unsafe.Add(at, uintptr(i)*e.t.Size()), unsafe.Add(from, uintptr(i)*e.t.Size()))
		}
	}
	p.hash = func(h uint64, at unsafe.Pointer) uint64 {
		s := *(*[]byte)(at) // its length is in elements
		h = mix(h, uint64(len(s)))
		switch {
		case len(s) == 0 || e.silent:
			return h
		case e.plain:
			return mixBytes(h, unsafe.Slice(unsafe.SliceData(s), uintptr(len(s))*e.t.Size()))
		}
		for i := range s {
			h = c.sum(e, h, unsafe.Add(unsafe.Pointer(unsafe.SliceData(s)), uintptr(i)*e.t.Size()))
		}
		return h
	}
}

func (c *copier) maps(p *plan) {
	t, k, e := p.t, c.plan(p.t.Key()), c.plan(p.t.Elem())
	fresh := func(pl *plan, v reflect.Value) (reflect.Value, unsafe.Pointer) {
		x := reflect.New(pl.t)
		x.Elem().Set(v)
		return x.Elem(), x.UnsafePointer()
	}
	p.fix = func(dst, src unsafe.Pointer) {
		v := reflect.NewAt(t, src).Elem()
		if v.IsNil() {
			return
		}
		to := reflect.MakeMap(t)
		for it := v.MapRange(); it.Next(); {
			key, at := fresh(k, it.Key())
			if !k.solid {
				k.fix(at, at)
			}
			value, at := fresh(e, it.Value())
			if !e.solid {
				e.fix(at, at)
			}
			to.SetMapIndex(key, value)
		}
		reflect.NewAt(t, dst).Elem().Set(to)
	}
	p.hash = func(h uint64, at unsafe.Pointer) uint64 {
		v := reflect.NewAt(t, at).Elem()
		h = mix(h, uint64(v.Len()))
		if v.Len() == 0 {
			return h
		}
		sum, before := uint64(0), c.met
		for it := v.MapRange(); it.Next(); {
			c.met = make(map[unsafe.Pointer]uint64, len(before)) // so that no entry counts for another
			maps.Copy(c.met, before)
			_, key := fresh(k, it.Key())
			_, value := fresh(e, it.Value())
			sum += c.sum(e, c.sum(k, 1, key), value)
		}
		c.met = before
		return mix(h, sum)
	}
}
