package calibrate

import "math"

// Noise is what the labels say of themselves. Who labels errs, and no threshold can be shown to be
// better than its labels are.
type Noise struct {
	Repeated int `json:"repeated"` // pairs with more than one label
	BothWays int `json:"both_ways"`
	// Triangles are pairs of which two others say that they are the same, as both texts have one answer with a third.
	Triangles    int `json:"triangles"`
	Contradicted int `json:"contradicted"` // of the triangles, those that are labelled different
	// Chained are pairs labelled different whose texts a chain of pairs labelled the same connects, however long.
	Chained int `json:"chained"`
	// AtLeast so many labels are wrong: contradictions of which no two have a label in common.
	AtLeast int `json:"at_least"`
	// Checks are the labels that could be held against others.
	Checks   int     `json:"checks"`
	Measured bool    `json:"measured"` // there were checks enough
	Wrong    float64 `json:"wrong"`    // about this share of labels is
	Ceiling  float64 `json:"ceiling"`  // 1 − Wrong: the most that a threshold, or an AUC, can be certified to be
	Examples []Cross `json:"examples,omitempty"`
}

// Cross is a contradiction: the lines of two records of one pair, or of three pairs of three texts.
type Cross struct {
	Lines []int `json:"lines"`
}

// Bounds of the search for contradictions.
const (
	fewChecks = 30      // below it no share is named
	maxDegree = 64      // pairs of a text that are looked at
	maxWedges = 8 << 20 // pairs of pairs
)

// noise holds labels against each other.
func (s *sample) noise() Noise {
	var n Noise
	var compared, differ float64
	for i := range s.pairs {
		p := &s.pairs[i]
		ones, zeros := float64(p.ones), float64(p.zeros)
		if total := ones + zeros; total > 1 {
			n.Repeated++
			compared += total * (total - 1) / 2
			differ += ones * zeros
		}
		if p.again != 0 {
			n.BothWays++
			n.AtLeast += int(min(p.ones, p.zeros))
			n.show(int(p.line), int(p.again))
		}
	}
	n.Chained = s.chained()
	s.triangles(&n)
	// Two labels of one pair differ where just one of them is wrong: 2w(1−w). The third side of a triangle whose other two
	// are labelled the same is labelled different where it is wrong, near enough, as the others may be instead.
	if n.Repeated >= fewChecks {
		n.Measured, n.Wrong = true, (1-math.Sqrt(max(0, 1-2*differ/compared)))/2
	}
	if n.Triangles >= fewChecks {
		n.Measured, n.Wrong = true, max(n.Wrong, float64(n.Contradicted)/float64(n.Triangles))
	}
	n.Checks, n.Ceiling = n.Repeated+n.Triangles, 1-n.Wrong
	return n
}

func (n *Noise) show(lines ...int) {
	if len(n.Examples) < maxExamples {
		n.Examples = append(n.Examples, Cross{lines})
	}
}

// triangles walks over every two pairs that are labelled the same and have a text in common.
func (s *sample) triangles(n *Noise) {
	same := make([][]int, len(s.texts)) // places in pairs, by text
	for i := range s.pairs {
		p := &s.pairs[i]
		if !p.same {
			continue
		}
		for _, t := range [...]uint32{p.a, p.b} {
			if len(same[t]) < maxDegree {
				same[t] = append(same[t], i)
			}
		}
	}
	used := make(map[int]bool)
	wedges := 0
	for t, sides := range same {
		for i, first := range sides {
			for _, second := range sides[i+1:] {
				if wedges++; wedges > maxWedges {
					return
				}
				a, b := s.pairs[first].other(uint32(t)), s.pairs[second].other(uint32(t))
				third, ok := s.places[uint64(min(a, b))<<32|uint64(max(a, b))]
				if !ok || s.pairs[third].again != 0 { // what is labelled both ways was counted
					continue
				}
				n.Triangles++
				p := &s.pairs[third]
				if p.same {
					continue
				}
				n.Contradicted++
				if used[first] || used[second] || used[third] {
					continue
				}
				used[first], used[second], used[third] = true, true, true
				n.AtLeast++
				n.show(int(s.pairs[first].line), int(s.pairs[second].line), int(p.line))
			}
		}
	}
}

func (p *pair) other(t uint32) uint32 { return p.a ^ p.b ^ t }

// chained counts pairs labelled different within what pairs labelled the same hold together.
func (s *sample) chained() (count int) {
	root := make([]uint32, len(s.texts))
	for i := range root {
		root[i] = uint32(i)
	}
	find := func(t uint32) uint32 {
		for root[t] != t {
			root[t] = root[root[t]]
			t = root[t]
		}
		return t
	}
	for i := range s.pairs {
		if p := &s.pairs[i]; p.same {
			root[find(p.a)] = find(p.b)
		}
	}
	for i := range s.pairs {
		if p := &s.pairs[i]; !p.same && p.again == 0 && find(p.a) == find(p.b) {
			count++
		}
	}
	return count
}
