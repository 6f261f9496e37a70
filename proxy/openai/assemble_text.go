package openai

import (
	"bytes"
	"unicode/utf8"
)

// text is a string that comes in pieces; raw is what stands between its quotes, with its escapes.
type text struct {
	raw        []byte
	seen, null bool // a string was seen, or null
}

// append writes a member of that name: the text.
func (t *text) append(b []byte, name string) []byte {
	b = append(append(append(b, '"'), name...), `":"`...)
	return append(append(b, t.raw...), '"')
}

// step is what the event that is being read does.
type step struct {
	appends int
	sink    *text  // the text that it adds to, last
	added   []byte // the string that it adds, a part of the event
	other   bool   // it does something else, too
}

// add adds the string v, a part of the event, to a text.
func (a *Assembler) add(t *text, v []byte) bool {
	t.raw = append(t.raw, inner(v)...)
	a.step.appends++
	a.step.sink, a.step.added = t, v
	return a.hold(len(v) - 2)
}

// wording recognises chunks that differ from an earlier one only in the string that they add to
// one text, which nearly all do; see likeness. It saves most of a chunk's cost.
type wording struct {
	pre, post []byte // all that stands before and behind what is between the quotes; nil: none yet
	sink      *text
}

// take adds the string of data to its text, if data is like the chunk remembered.
func (l *wording) take(a *Assembler, data []byte) bool {
	if l.sink == nil || len(data) < len(l.pre)+len(l.post) || !bytes.HasPrefix(data, l.pre) || !bytes.HasSuffix(data, l.post) {
		return false
	}
	end := len(data) - len(l.post)
	words := data[len(l.pre):end]
	// The string must end where it seems to. Half of a surrogate pair, or of a letter, and
	// what else is no string, is left to the parser.
	if bytes.IndexByte(words, '"') >= 0 || bytes.IndexByte(words, '\\') >= 0 {
		if skipString(data, len(l.pre)-1) != end+1 || bytes.Contains(words, []byte(`\u`)) {
			return false
		}
	}
	if !utf8.Valid(words) {
		return false
	}
	l.sink.raw = append(l.sink.raw, words...)
	a.hold(len(words))
	return true
}

// remember takes a chunk that did nothing but add to one text for a pattern, and forgets the
// pattern at every other.
func (l *wording) remember(s *step, data []byte) {
	if s.appends != 1 || s.other {
		l.sink = nil
		return
	}
	start := cap(data) - cap(s.added) + 1 // added is a part of data
	end := start + len(s.added) - 2
	if start > maxLikeness || len(data)-end > maxLikeness {
		l.sink = nil
		return
	}
	l.pre = append(l.pre[:0], data[:start]...)
	l.post = append(l.post[:0], data[end:]...)
	l.sink = s.sink
}
