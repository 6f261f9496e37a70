package threshold

import (
	"math/bits"
	"slices"
	"unsafe"
)

const (
	leastTold  = 8 // right labels that any answer may give the pools of all nodes
	partTold   = 4 // or such a part of all
	maxTold    = 64
	maxRecords = 32
	recordBits = 16
)

// answers counts how often answers were named, of the maxTold most frequent: by Misra and Gries (1982), so that none is
// counted too often, and none too seldom by more than a 65th part of all. None is missed that is named as often as matters here.
type answers []told

type told struct {
	answer uint64
	times  int
}

// times is how often it was named at least; the answer 0 never is.
func (a answers) times(answer uint64) int {
	if i := a.at(answer); i >= 0 {
		return a[i].times
	}
	return 0
}

func (a answers) at(answer uint64) int {
	return slices.IndexFunc(a, func(t told) bool { return t.answer == answer })
}

// add counts one.
func (a *answers) add(answer uint64) {
	i := a.at(answer)
	switch {
	case answer == 0:
	case i >= 0:
		(*a)[i].times++
	case len(*a) < maxTold:
		*a = append(*a, told{answer, 1})
	default:
		a.shrink(func(n int) int { return n - 1 })
	}
}

// halve forgets half of everything.
func (a *answers) halve() { a.shrink(func(n int) int { return n / 2 }) }

func (a *answers) shrink(to func(int) int) {
	for i := range *a {
		(*a)[i].times = to((*a)[i].times)
	}
	*a = slices.DeleteFunc(*a, func(t told) bool { return t.times == 0 })
}

func (a answers) bytes() int { return cap(a) * int(unsafe.Sizeof(told{})) }

// records are what was found of late of answers that were named too often, the newest such answer last.
type records []record

type record struct {
	answer uint64
	looked int    // how many labels, up to recordBits
	newest uint16 // wrong ones of them, by bit
}

func (r records) at(answer uint64) int {
	return slices.IndexFunc(r, func(x record) bool { return x.answer == answer })
}

// add notes a label of an answer that has a record, or is named too often by now. For a new record one goes that is not
// disowned, or else the oldest.
func (r *records) add(answer uint64, same, often bool) {
	i := r.at(answer)
	if i < 0 {
		if !often || answer == 0 {
			return
		}
		if len(*r) == maxRecords {
			i = max(0, slices.IndexFunc(*r, func(x record) bool { return !x.disowned() }))
			*r = slices.Delete(*r, i, i+1)
		}
		*r = append(*r, record{answer: answer})
		i = len(*r) - 1
	}
	x := &(*r)[i]
	x.newest <<= 1
	if !same {
		x.newest |= 1
	}
	x.looked = min(x.looked+1, recordBits)
}

// disowned tells whether most of what was found of it is wrong.
func (x *record) disowned() bool {
	return x.looked >= leastTold && 2*bits.OnesCount16(x.newest) > x.looked
}

func (r records) disowned(answer uint64) bool {
	i := r.at(answer)
	return i >= 0 && r[i].disowned()
}

func (r records) bytes() int { return cap(r) * int(unsafe.Sizeof(record{})) }
