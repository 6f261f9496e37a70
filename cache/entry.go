package cache

import (
	"fmt"
	"strings"
	"sync/atomic"
	"time"
	"unique"
	"unsafe"

	"github.com/klauspost/compress/s2"
)

const (
	// packFrom is the least body that is compressed: below it there is little to win. An answer in
	// English of 2 KB shrinks by a quarter, one of 15 KB by a third, and is unpacked at 1 GB/s.
	packFrom = 2 << 10
	// packWorth is the part of itself that a body must shrink by, one over this.
	packWorth = 5
	// storedTables is what ristretto's maps take an entry: one of values (a key of 8 bytes and 48 of
	// an item), one of costs (16), one of expiries (16), each with a control byte a slot and 7/8
	// full at best, 7/16 at worst; see TestStoreBytesAreHeld.
	storedTables = 192
)

// stored is an entry as the store holds it. entry, packed, filled, put and size never change.
type stored struct {
	entry  Entry // its Body is empty where packed is not
	packed []byte
	filled int64 // when the model answered, by the store's clock
	put    int64 // when the store got it
	size   int64 // of memory

	hits    atomic.Uint32 // while fresh, as freshCount counts
	last    atomic.Int64  // the age at the last of them
	claimed atomic.Int64  // until when one reader is trusted to refresh it

	// Under bridge.mu.
	inCache    bool // ristretto has it, or is asked to
	next, prev *stored
}

// newStored copies an entry: what it came from is much larger at times, and not ours.
func newStored(e *Entry, age time.Duration, now int64) *stored {
	v := &stored{entry: *e, filled: now - int64(age), put: now}
	v.entry.Age = age
	// Thousands of entries share these few.
	v.entry.Tenant = unique.Make(e.Tenant).Value()
	v.entry.Surface = unique.Make(e.Surface).Value()
	v.entry.ContentType = unique.Make(e.ContentType).Value()
	v.entry.Tags = nil
	v.size = int64(unsafe.Sizeof(stored{})) + storedTables
	if len(e.Tags) > 0 {
		v.entry.Tags = make([]string, len(e.Tags))
		for i, t := range e.Tags {
			v.entry.Tags[i] = strings.Clone(t)
			v.size += int64(len(t)+15)&^15 + int64(unsafe.Sizeof(t))
		}
	}
	v.entry.Body, v.packed = pack(e.Body)
	v.size += int64(cap(v.entry.Body) + cap(v.packed))
	return v
}

// pack copies a body, compressed where that pays. The capacity of the copy is what it takes in memory.
func pack(body []byte) (plain, packed []byte) {
	if len(body) >= packFrom {
		packed := s2.EncodeBetter(nil, body)
		if len(packed) <= len(body)-len(body)/packWorth {
			return nil, append([]byte(nil), packed...)
		}
	}
	return append([]byte(nil), body...), nil
}

// Pack copies a body, compressed where that pays: one of the two is nil. The capacity of the copy is
// what it takes in memory.
func Pack(body []byte) (plain, packed []byte) { return pack(body) }

// Unpack is the body that Pack compressed. It refuses one of more than most bytes before it makes room for it.
func Unpack(packed []byte, most int64) ([]byte, error) {
	n, err := s2.DecodedLen(packed)
	if err != nil {
		return nil, fmt.Errorf("unpack an answer: %w", err)
	}
	if int64(n) > most {
		return nil, fmt.Errorf("unpack an answer: %d bytes, of %d at most", n, most)
	}
	body, err := s2.Decode(nil, packed)
	if err != nil {
		return nil, fmt.Errorf("unpack an answer: %w", err)
	}
	return body, nil
}

// plain is the entry with its body, or nil where that cannot be had.
func (v *stored) plain() *Entry {
	if v.packed == nil {
		return &v.entry
	}
	body, err := s2.Decode(nil, v.packed)
	if err != nil {
		return nil
	}
	e := v.entry
	e.Body = body
	return &e
}

// hit counts one at an age at which the entry is fresh. Of those that come at once one may be
// lost, which changes nothing.
func (v *stored) hit(age time.Duration) {
	if n := v.hits.Load(); n != freshCount(n) {
		v.hits.Store(freshCount(n))
	}
	if v.entry.Life.MaxTTL > v.entry.Life.TTL {
		v.last.Store(int64(age))
	}
}

// claim makes the caller the one that refreshes the entry, unless another is.
func (v *stored) claim(now int64) bool {
	until := v.claimed.Load()
	return now >= until && v.claimed.CompareAndSwap(until, now+int64(refreshFor))
}
