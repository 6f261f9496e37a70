package affinity

import (
	"math/bits"
	"sync/atomic"
)

// ways is how many entries of the memory a hash can stand in.
const ways = 4

// maxMemory bounds Config.Memory.
const maxMemory = 1 << 24

// memory knows where prompts went last. It has a fixed size; the entries that were longest not put give way. The
// zero value is empty and stays so. Readers and writers take no lock: two that meet in one entry may leave the hash of one
// with the place of the other, which makes a wrong guess once.
type memory struct {
	sets  [][ways]entry
	clock atomic.Uint32 // counts puts
}

// entry is a hash, 0 where there is none, and where its prompt went, above the clock at that time.
type entry struct{ hash, place atomic.Uint64 }

func (m *memory) init(n int) {
	n = max(min(n, maxMemory)/ways, 1)
	m.sets = make([][ways]entry, 1<<bits.Len(uint(n-1)))
}

// short is as much of an endpoint's hash as is remembered.
func short(id uint64) uint32 { return uint32(id >> 32) }

func (m *memory) set(hash uint64) *[ways]entry {
	return &m.sets[mix(hash)&uint64(len(m.sets)-1)]
}

// get says where the prompt of that hash went last.
func (m *memory) get(hash uint64) (place uint32, ok bool) {
	if len(m.sets) == 0 {
		return 0, false
	}
	s := m.set(hash)
	for i := range s {
		if s[i].hash.Load() == hash {
			return uint32(s[i].place.Load() >> 32), true
		}
	}
	return 0, false
}

// put notes where it went.
func (m *memory) put(hash uint64, place uint32) {
	if len(m.sets) == 0 || hash == 0 {
		return
	}
	now := m.clock.Add(1)
	s := m.set(hash)
	to, oldest := &s[0], uint32(0)
	for i := range s {
		e := &s[i]
		h := e.hash.Load()
		if h == hash || h == 0 {
			to = e
			break
		}
		if age := now - uint32(e.place.Load()); age >= oldest {
			to, oldest = e, age
		}
	}
	to.place.Store(uint64(place)<<32 | uint64(now))
	to.hash.Store(hash)
}
