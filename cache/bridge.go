package cache

import (
	"sync"
	"sync/atomic"
	"time"
)

// bridge finds entries that ristretto does not: those it has not decided about, and, for
// bridgeFor after they were put, those it refused or evicted again. It also knows what the store
// holds in all: an entry counts once for as long as ristretto or the bridge has it.
//
// The order is that of arrival; the first ones go where there is no room. Safe for concurrent
// use; its lock is the last that anybody takes.
type bridge struct {
	max int64        // bytes
	len atomic.Int64 // of m, so that readers need no lock while there is nothing

	mu         sync.Mutex
	m          map[Key]*stored
	ends       stored // of a ring through next and prev: next is the oldest
	bytes      int64  // of m
	all, total int64  // entries, and their bytes, that ristretto or the bridge has
}

func (b *bridge) init(maxBytes int64) {
	b.max = maxBytes
	b.m = make(map[Key]*stored)
	b.ends.next, b.ends.prev = &b.ends, &b.ends
}

// get is the entry of a key, or nil.
func (b *bridge) get(k *Key, now int64) *stored {
	if b.len.Load() == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	v := b.m[*k]
	if v != nil && v.bridgeable(now) {
		return v
	}
	return nil
}

// offered takes in an entry that ristretto is asked to hold.
func (b *bridge) offered(v *stored, now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count(v, func() { v.inCache = true })
	b.add(v, now)
}

// decided is called after ristretto had its say, and tells whether the entry is found.
func (b *bridge) decided(v *stored) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if v.inCache {
		b.remove(b.m[v.entry.Key])
		return true
	}
	return b.m[v.entry.Key] == v
}

// released is ristretto's OnExit: it holds the entry no more, or never did.
func (b *bridge) released(v *stored) {
	if v == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count(v, func() { v.inCache = false })
}

// evicted takes in an entry that ristretto is about to release, while it has a right to that and
// there is room: for one that is being put the others may have to go, but not for this one.
func (b *bridge) evicted(v *stored, now int64) {
	if !v.bridgeable(now) {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.makeRoom(0, now)
	if b.m[v.entry.Key] == nil && b.bytes+v.size <= b.max { // else a newer one is being put
		b.add(v, now)
	}
}

// has tells whether an entry is in the bridge.
func (b *bridge) has(v *stored) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.m[v.entry.Key] == v
}

// refused tells whether the bridge alone has an entry.
func (b *bridge) refused(v *stored) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !v.inCache && b.m[v.entry.Key] == v
}

func (b *bridge) dropThis(v *stored) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.remove(v)
}

func (b *bridge) clear() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.ends.next != &b.ends {
		b.remove(b.ends.next)
	}
}

func (b *bridge) totals() (entries, bytes, bridged int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all, b.total, b.bytes
}

// add puts an entry in the place of another of its key, and makes room for it.
func (b *bridge) add(v *stored, now int64) {
	old := b.m[v.entry.Key]
	if old == v {
		return
	}
	b.remove(old)
	if v.size > b.max {
		return
	}
	b.makeRoom(v.size, now)
	b.count(v, func() { b.m[v.entry.Key] = v })
	v.prev, v.next = b.ends.prev, &b.ends
	v.prev.next, v.next.prev = v, v
	b.bytes += v.size
	b.len.Store(int64(len(b.m)))
}

// makeRoom removes the first ones whose time is over, and those that must go for so many bytes.
func (b *bridge) makeRoom(size, now int64) {
	for first := b.ends.next; first != &b.ends; first = b.ends.next {
		if first.bridgeable(now) && b.bytes+size <= b.max {
			return
		}
		b.remove(first)
	}
}

// remove takes out an entry; one that is not there, or nil, may be given.
func (b *bridge) remove(v *stored) {
	if v == nil || b.m[v.entry.Key] != v {
		return
	}
	b.count(v, func() { delete(b.m, v.entry.Key) })
	v.prev.next, v.next.prev = v.next, v.prev
	v.prev, v.next = nil, nil
	b.bytes -= v.size
	b.len.Store(int64(len(b.m)))
}

// count keeps the totals right over a change of who has an entry.
func (b *bridge) count(v *stored, change func()) {
	before := v.inCache || b.m[v.entry.Key] == v
	change()
	switch after := v.inCache || b.m[v.entry.Key] == v; {
	case after && !before:
		b.all++
		b.total += v.size
	case before && !after:
		b.all--
		b.total -= v.size
	}
}

// bridgeable tells whether an entry may be in the bridge still.
func (v *stored) bridgeable(now int64) bool { return now-v.put < int64(bridgeFor) }

// age is since the model answered.
func (v *stored) age(now int64) time.Duration { return time.Duration(max(now-v.filled, 0)) }
