package threshold

import (
	"math/bits"
	"slices"
	"unsafe"
)

const (
	leastTold = 8 // labels that any answer may give a pool
	partTold  = 8 // or such a part of all
	maxTold   = 64
)

// answers counts how often answers were named, of the maxTold most frequent: by Misra and Gries (1982), so that none is
// counted too often, and none too seldom by more than a 65th part of all. None is missed that is named as often as matters here.
type answers []told

type told struct {
	answer uint64
	times  int
	looked int    // how many were observed since it was first named too often, up to 16
	newest uint16 // of them, by bit: wrong ones
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
		*a = append(*a, told{answer: answer, times: 1})
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

// observe notes what was found of an answer that is named too often, where questions were similar enough for a hit: the
// newest sixteen.
func (a answers) observe(answer uint64, c Cell, same bool, most int) {
	i := a.at(answer)
	if s, _ := c.middle(); i < 0 || s < floor || a[i].times < most && a[i].looked == 0 {
		return
	}
	a[i].newest <<= 1
	if !same {
		a[i].newest |= 1
	}
	a[i].looked = min(a[i].looked+1, 16)
}

// disowned tells whether most of what was observed of an answer was wrong.
func (a answers) disowned(answer uint64) bool {
	i := a.at(answer)
	return i >= 0 && a[i].looked >= leastTold && 2*bits.OnesCount16(a[i].newest) > a[i].looked
}

func (a answers) bytes() int { return cap(a) * int(unsafe.Sizeof(told{})) }
