package openai

import (
	"bytes"
	"strings"
)

// maxCapture bounds each value that a Scanner keeps, in bytes; a longer one is as good
// as missing.
const maxCapture = 64 << 10

// maxField is longer than every name that a Scanner looks for.
const maxField = 16

// Scanner reads a JSON response as it passes and keeps the few members of its top that
// matter, in bounded memory, however the bytes are cut. It does not validate; of what is
// not JSON it learns nothing. It is for one goroutine at a time.
type Scanner struct {
	kind   Kind
	nested bool // members of "response" count like those of the top
	top    top

	depth   int
	inside  bool   // of the nested "response"
	closed  bool   // the value has ended
	lead    []byte // the first bytes that are no space
	quoted  bool   // inside a string
	escaped bool   // behind a backslash
	value   bool   // behind a colon at a depth of interest
	name    []byte
	target  *[]byte // what is being captured, nil for nothing
	held    []byte
	lost    bool // what is being captured is too long
}

// NewScanner starts a scanner.
func NewScanner(kind Kind) *Scanner {
	return &Scanner{kind: kind, name: make([]byte, 0, maxField)}
}

// Write takes the next bytes of the body. It never fails.
func (s *Scanner) Write(p []byte) (int, error) {
	n := len(p)
	s.begins(p)
	for len(p) > 0 && !s.closed {
		if s.quoted {
			p = s.text(p)
		} else {
			p = s.structure(p)
		}
	}
	return n, nil
}

// leadSize is enough to tell what a body is.
const leadSize = 6

// CanAnswer says, of a whole body, whether it is one JSON object, as far as its braces tell, or events, however they are called; of
// a part of one, whether it can be.
func (s *Scanner) CanAnswer(whole bool) bool {
	switch {
	case len(s.lead) == 0:
		return !whole
	case s.lead[0] == '{':
		return !whole || s.closed
	}
	for _, field := range [...]string{"data:", "event:", ":", "id:", "retry:"} {
		if bytes.HasPrefix(s.lead, []byte(field)) || !whole && strings.HasPrefix(field, string(s.lead)) {
			return true
		}
	}
	return !whole && strings.HasPrefix(byteOrderMark, string(s.lead))
}

// byteOrderMark is what some servers begin with.
const byteOrderMark = "\xef\xbb\xbf"

// begins takes the first bytes of a body.
func (s *Scanner) begins(p []byte) {
	for len(p) > 0 && len(s.lead) < leadSize {
		if len(s.lead) == 0 {
			if p = bytes.TrimLeft(p, " \t\r\n"); len(p) == 0 {
				return
			}
		}
		s.lead = append(s.lead, p[0])
		if p = p[1:]; string(s.lead) == byteOrderMark {
			s.lead = s.lead[:0]
		}
	}
}

// Usage is what the body reports; not Known where it reports nothing, or nonsense.
func (s *Scanner) Usage() Usage {
	o := s.outcome()
	return o.report.usage(s.kind)
}

// ResponseID is the id of a Response, "" for other kinds.
func (s *Scanner) ResponseID() string { return s.outcome().id }

// Failure is the error that the body carries, nil where none.
func (s *Scanner) Failure() *Failure { return s.outcome().failure }

func (s *Scanner) outcome() *outcome {
	o := &outcome{kind: s.kind}
	o.learn(&s.top)
	return o
}

// watched tells whether the names at the current depth are of interest.
func (s *Scanner) watched() bool { return s.depth == 1 || s.depth == 2 && s.inside }

// text reads inside a string, up to its end or that of p.
func (s *Scanner) text(p []byte) (rest []byte) {
	i := 0
	for ; i < len(p); i++ {
		if s.escaped {
			s.escaped = false
			continue
		}
		if p[i] == '\\' {
			s.escaped = true
		} else if p[i] == '"' {
			i++
			s.quoted = false
			break
		}
	}
	switch {
	case s.target != nil:
		s.hold(p[:i])
	case s.watched() && !s.value:
		s.name = append(s.name, p[:min(i, maxField-len(s.name))]...)
	}
	return p[i:]
}

// structure reads between strings, up to the next one.
func (s *Scanner) structure(p []byte) (rest []byte) {
	for i, c := range p {
		switch c {
		case '"':
			if s.target != nil {
				s.hold(p[i : i+1])
			} else if s.watched() && !s.value {
				s.name = s.name[:0]
			}
			s.quoted = true
			return p[i+1:]
		case ':':
			if s.target == nil && s.watched() && !s.value {
				s.begin()
				continue
			}
		case ',':
			if s.watched() {
				s.finish()
				continue
			}
		case '{', '[':
			s.depth++
		case '}', ']':
			if s.watched() {
				s.finish()
			}
			if s.depth--; s.depth <= 1 {
				s.inside = false
			}
			if s.depth <= 0 {
				s.closed = true
				return nil
			}
		}
		if s.target != nil {
			s.hold(p[i : i+1])
		}
	}
	return nil
}

// begin starts the value of the member whose name has been read.
func (s *Scanner) begin() {
	s.value = true
	name := bytes.TrimSuffix(s.name, []byte{'"'})
	if s.nested && s.depth == 1 && string(name) == "response" {
		s.inside, s.value = true, false
		return
	}
	switch string(name) {
	case "type", "object", "id", "usage", "error", "message", "code":
		if s.inside && (string(name) == "type" || string(name) == "object") {
			return // those of the event say more than those of its response
		}
		s.target, s.held, s.lost = s.top.slot(name), nil, false
	}
}

func (s *Scanner) hold(p []byte) {
	if s.lost = s.lost || len(s.held)+len(p) > maxCapture; !s.lost {
		s.held = append(s.held, p...)
	}
}

// finish ends the value of a member.
func (s *Scanner) finish() {
	if v := bytes.TrimSpace(s.held); s.target != nil && !s.lost && len(v) > 0 && !isNull(v) {
		*s.target = v
	}
	s.target, s.held, s.value = nil, nil, false
	s.name = s.name[:0]
	if s.depth == 1 {
		s.inside = false
	}
}
