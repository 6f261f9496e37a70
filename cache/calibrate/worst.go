package calibrate

import (
	"slices"

	"headgate/cache/guard"
)

// list of examples.
type list int

const (
	listServed  list = iota // different, and no guard refuses: wrong hits, the most alike first
	listStopped             // different, and a guard refuses, the most alike first
	listMissed              // the same, and no guard refuses: missed, the least alike first
	listPrice               // the same, and a guard refuses, the most alike first
	lists
)

// listOf says in which list a pair may stand.
func listOf(p *pair) list {
	switch {
	case p.same && p.kinds != 0:
		return listPrice
	case p.same:
		return listMissed
	case p.kinds != 0:
		return listStopped
	}
	return listServed
}

// Example is a pair that is worth a look.
type Example struct {
	Line       int      `json:"line"`
	A          string   `json:"a"`
	B          string   `json:"b"`
	Similarity float64  `json:"similarity"`
	Refused    []Reason `json:"refused,omitempty"`
}

// Reason is why a guard refuses.
type Reason struct {
	Kind string `json:"kind"`
	A    string `json:"a"` // what stands in the one text
	B    string `json:"b"` // and in the other
}

// maxShown bounds a text in an example, in bytes.
const maxShown = 300

// worst keeps the most extreme examples that are offered.
type worst struct {
	lowest bool      // the least alike first
	kept   []Example // in order; some more than are shown, as some are dropped again
}

// before says which example is the more extreme, and among equals the one that came first.
func (w *worst) before(a, b *Example) bool {
	if a.Similarity != b.Similarity {
		return a.Similarity > b.Similarity != w.lowest
	}
	return a.Line < b.Line
}

func (w *worst) offer(f *found, line int) {
	e := Example{Line: line, Similarity: float64(f.similarity) / grain}
	at := len(w.kept)
	for at > 0 && w.before(&e, &w.kept[at-1]) {
		at--
	}
	if at == 2*maxExamples {
		return
	}
	e.A, e.B, e.Refused = clip(f.a), clip(f.b), reasons(f.refused)
	w.kept = slices.Insert(w.kept[:min(len(w.kept), 2*maxExamples-1)], at, e)
}

// drop the example of a line.
func (w *worst) drop(line int) {
	w.kept = slices.DeleteFunc(w.kept, func(e Example) bool { return e.Line == line })
}

// shown are those for the report.
func (w *worst) shown() []Example { return w.kept[:min(len(w.kept), maxExamples)] }

func reasons(refused []guard.Reason) (out []Reason) {
	for _, r := range refused {
		out = append(out, Reason{string(r.Kind), r.A, r.B})
	}
	return out
}

// clip a text to what is shown of it.
func clip(s string) string {
	if len(s) <= maxShown {
		return s
	}
	end := maxShown
	for end > 0 && s[end]&0xC0 == 0x80 { // not within a rune
		end--
	}
	return s[:end] + "…"
}
