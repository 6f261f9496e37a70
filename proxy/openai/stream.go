package openai

import "bytes"

// Stream reads a stream of server-sent events (WHATWG HTML, section 9.2) as it passes:
// usage, failures, what was generated, and where it ends. The bytes that it gives to
// emit are, in order, the bytes fed to it, less the hidden usage chunk, however they
// were cut. Memory is bounded by MaxFrame. It is for one goroutine at a time.
type Stream struct {
	out  outcome
	hide bool

	buf   []byte // the beginning of a frame that has not ended
	long  *Scanner
	join  []byte // data of several lines, joined
	first bool   // the next frame is the first and may open with a byte order mark

	blank bool // nothing of the current line has been seen
	cr    carriage
	crlf  bool // a CRLF has been seen: a CR that ends a frame waits for its LF

	like      likeness
	whole     *Assembler // nil: nobody wants the answer whole
	generated carried
	reported  int64 // the output last reported,
	since     int64 // and the most that has passed since; as generated.most before
	started   bool  // message_start reported, message_delta has not
	done      bool
	unread    bool // a frame was too long
}

// carriage is what a carriage return, the last byte seen, stands for.
type carriage uint8

const (
	noCR    carriage = iota
	lineCR           // the end of a line, or its first half
	frameCR          // the end of a frame, or the first half of its end
)

// NewStream starts a stream. hideUsage keeps the usage chunk that Pieces asked for from a
// client that did not ask.
func NewStream(kind Kind, hideUsage bool) *Stream {
	s := &Stream{out: outcome{kind: kind}, hide: hideUsage, blank: true, first: true}
	switch kind {
	case Chat:
		s.like.field = []byte(`"content":"`)
	case Completion, Message:
		s.like.field = []byte(`"text":"`)
	}
	return s
}

// Assemble gives a the events of the stream, hidden ones too, as they pass. Call it before the
// first Feed.
func (s *Stream) Assemble(a *Assembler) { s.whole = a }

// Feed takes the next bytes from the upstream and calls emit for each frame that they
// complete and that the client may see. What a frame says is learnt before it is
// emitted. An error of emit ends Feed and is returned; the rest of p is not read.
func (s *Stream) Feed(p []byte, emit func(f Frame) error) error {
	l := lines{b: p, lf: -1}
	for from := 0; from < len(p); {
		to, end := s.boundary(&l, from)
		if err := s.take(p[from:to], end, emit); err != nil {
			return err
		}
		from = to
	}
	return nil
}

// End takes the end of the stream. A frame without its blank line is read and emitted
// as if it were whole.
func (s *Stream) End(emit func(f Frame) error) error {
	if len(s.buf) == 0 && s.long == nil {
		return nil
	}
	return s.take(nil, true, emit)
}

// Usage is the last usage seen, never a sum. Anthropic reports the input first and the
// output at the end: in between, the output is what was generated so far.
func (s *Stream) Usage() Usage {
	u := s.out.report.usage(s.out.kind)
	if s.started {
		u.Output = max(u.Output, s.generated.tokens)
		u.Known = s.out.report.has[figInput]
	}
	return u
}

// Generated counts the tokens seen passing, at least: one for each delta of each
// choice that carries something. It is what to charge where Usage is not Known.
func (s *Stream) Generated() int64 { return s.generated.tokens }

// Text is how many bytes of answer have passed, as JSON strings. Servers put several
// tokens into a chunk when they are busy; who knows how many bytes a token of this model
// has, can do better than Generated.
func (s *Stream) Text() int64 { return s.generated.bytes }

// Most bounds the tokens generated, of so many sequences, as far as they were seen passing: a byte of text at least makes a
// token. Of one sequence what was reported on the way counts, and what has passed since; of several, servers report one.
func (s *Stream) Most(sequences int64) int64 {
	if sequences == 1 {
		return s.reported + s.since
	}
	return s.generated.most
}

// Counted says whether the output in Usage is counted, as Generated is, and not reported:
// so it is in the middle of Anthropic's streams.
func (s *Stream) Counted() bool { return s.started }

// InFrame says whether the last bytes emitted are the beginning of a frame whose end has
// not come. So it is within frames longer than MaxFrame only.
func (s *Stream) InFrame() bool { return s.long != nil }

// Failure is the first error that the stream itself reported, nil where none.
func (s *Stream) Failure() *Failure { return s.out.failure }

// Complete tells whether the stream came to its proper end and reported no failure.
func (s *Stream) Complete() bool { return s.done && s.out.failure == nil }

// CutShort tells whether the stream, now that it has ended, ended before its answer did: with no terminal event, no choice that
// ended, and no failure. What was too long to be looked into may have been any of them.
func (s *Stream) CutShort() bool {
	return !s.done && !s.generated.ends && !s.unread && s.out.failure == nil
}

// ResponseID is the id of a Response, "" until it is known and for other kinds.
func (s *Stream) ResponseID() string { return s.out.id }

// lines finds line ends in b in linear time, whatever the mix of CR and LF.
type lines struct {
	b  []byte
	lf int // the next line feed, len(b) where there is none
}

// end is the offset of the first CR or LF from i on, len(b) where there is none.
func (l *lines) end(i int) int {
	if l.lf < i {
		l.lf = len(l.b)
		if j := bytes.IndexByte(l.b[i:], '\n'); j >= 0 {
			l.lf = i + j
		}
	}
	if j := bytes.IndexByte(l.b[i:l.lf], '\r'); j >= 0 {
		return i + j
	}
	return l.lf
}

// boundary returns where the frame that the bytes from i on belong to ends, or the end
// of the input. A CR may be followed by its LF in the next read. To wait for it would
// hold frames back on streams that end lines by CR alone, so only streams that have
// used CRLF wait; elsewhere a late LF leads the next frame.
func (s *Stream) boundary(l *lines, i int) (to int, end bool) {
	for i < len(l.b) {
		if cr := s.cr; cr != noCR {
			s.cr = noCR
			if l.b[i] == '\n' {
				i++
				s.crlf = true
			}
			if cr == frameCR {
				return i, true
			}
			continue
		}
		j := l.end(i)
		if j > i {
			s.blank = false
		}
		if j == len(l.b) {
			break
		}
		ends := s.blank
		s.blank = true
		i = j + 1
		switch {
		case l.b[j] == '\r' && ends && s.crlf:
			s.cr = frameCR
			continue
		case l.b[j] == '\r':
			s.cr = lineCR
		}
		if ends {
			return i, true
		}
	}
	return len(l.b), false
}

// take adds p to the current frame; end says that the frame is whole.
func (s *Stream) take(p []byte, end bool, emit func(f Frame) error) error {
	if s.long == nil && len(s.buf)+len(p) <= MaxFrame {
		if !end {
			s.buf = append(s.buf, p...)
			return nil
		}
		raw := p
		if len(s.buf) > 0 {
			s.buf = append(s.buf, p...)
			raw, s.buf = s.buf, s.buf[:0]
		}
		if last, hidden := s.read(raw); !hidden {
			return emit(Frame{Raw: raw, Last: last})
		}
		return nil
	}
	return s.pass(p, end, emit)
}

// pass lets a frame through that is too long to hold: a scanner looks at its first data
// line as it goes by. Only the last event of a long /v1/responses answer, which repeats
// the whole answer, is expected to be that long.
func (s *Stream) pass(p []byte, end bool, emit func(f Frame) error) error {
	held := s.buf
	if s.long == nil {
		s.long = NewScanner(s.out.kind)
		s.long.nested = true
		head := held
		if len(head) == 0 {
			head = p
		}
		_, _ = s.long.Write(s.payload(head))
		if len(held) > 0 {
			_, _ = s.long.Write(p)
		}
	} else {
		_, _ = s.long.Write(p)
	}
	s.unread = true
	s.passed(carried{most: int64(len(p) + len(held))})
	if a := s.whole; a != nil && a.piece(held) && a.piece(p) && end {
		a.Event(s.payload(a.long))
		a.long = nil
	}
	last := false
	if end {
		t := &s.long.top
		s.learn(t)
		last = s.ends(t)
		s.long, s.first = nil, false
	}
	s.buf = nil
	if len(held) > 0 {
		if err := emit(Frame{Raw: held}); err != nil {
			return err
		}
	}
	if len(p) == 0 {
		return nil
	}
	return emit(Frame{Raw: p, Last: last})
}

// payload joins the data lines of a frame. The result is valid until the next call.
func (s *Stream) payload(frame []byte) []byte {
	if s.first {
		frame = bytes.TrimPrefix(frame, []byte("\xef\xbb\xbf"))
	}
	var data []byte
	found := 0
	l := lines{b: frame, lf: -1}
	for i := 0; i < len(frame); {
		j := l.end(i)
		line := frame[i:j]
		i = j + 1
		if !bytes.HasPrefix(line, []byte("data:")) {
			continue // comments, other fields, and an LF left over from the frame before
		}
		line = bytes.TrimPrefix(line[len("data:"):], []byte(" "))
		switch found++; found {
		case 1:
			data = line
		case 2:
			s.join = append(append(append(s.join[:0], data...), '\n'), line...)
			data = s.join
		default:
			s.join = append(append(s.join, '\n'), line...)
			data = s.join
		}
	}
	return data
}

// read learns what a whole frame says.
func (s *Stream) read(frame []byte) (last, hidden bool) {
	data := s.payload(frame)
	s.first = false
	if s.whole != nil && len(data) > 0 {
		s.whole.Event(data)
	}
	if string(bytes.TrimSpace(data)) == "[DONE]" {
		s.done = true
		return true, false
	}
	if n, ok := s.like.match(data); ok {
		s.passed(n)
		return false, false
	}
	var t top
	if len(data) == 0 || !t.parse(data) {
		s.passed(carried{most: int64(len(data))})
		return false, false // nothing, or nothing that we can read: not ours to judge
	}
	n := t.carries()
	n.ends = n.ends || t.usage != nil && t.choices != nil && isEmptyArray(t.choices) // the last chunk's
	s.passed(n)
	hidden = s.hide && t.choices != nil && t.usage != nil && t.err == nil && isEmptyArray(t.choices)
	if string(t.typ) == `"message_start"` {
		var inner top
		inner.parse(t.message)
		s.started = inner.usage != nil
		s.learn(&inner)
	} else if t.usage != nil {
		s.started = false
	}
	if t.response != nil {
		var inner top
		inner.parse(t.response)
		s.learn(&inner)
	}
	s.learn(&t)
	last = s.ends(&t)
	if !last && !hidden && t.usage == nil && t.err == nil && t.response == nil && t.message == nil {
		s.like.remember(data, n)
	}
	return last, hidden
}

// passed counts what has passed.
func (s *Stream) passed(n carried) {
	s.generated.add(n)
	s.since += n.most
}

// learn takes what an event says. Only an output that has risen is surely said anew.
func (s *Stream) learn(t *top) {
	s.out.learn(t)
	if v := s.out.report.v[figOutput]; v > s.reported {
		s.reported, s.since = v, 0
	}
}

// carries is what an event carries of an answer.
func (t *top) carries() (n carried) {
	if t.choices != nil {
		n.add(ofChoices(t.choices))
	}
	switch {
	case t.delta == nil:
	case t.delta[0] == '{':
		n.add(ofDelta(t.delta))
		n.most++
		n.ends = n.ends || stops(t.delta)
	case isString(t.delta) && bytes.HasSuffix(t.typ, []byte(`.delta"`)):
		n.add(ofText(t.delta))
		n.most++
	default:
		n.most += leaves(t.delta, 0)
	}
	if t.block != nil {
		n.most += leaves(t.block, 0)
	}
	return n
}

// stops tells whether a message's delta says why it stopped.
func stops(delta []byte) bool {
	for o := (object{b: delta}); o.next(); {
		if string(o.name) == "stop_reason" {
			return isString(o.value)
		}
	}
	return false
}

// ends tells whether t is a terminal event and notes it.
func (s *Stream) ends(t *top) bool {
	switch string(t.typ) {
	case `"message_stop"`, `"response.completed"`, `"response.incomplete"`, `"transcript.text.done"`:
	case `"response.failed"`, `"response.cancelled"`:
		if s.out.failure == nil {
			s.out.failure = &Failure{Message: "the response failed", Type: unquote(t.typ)}
		}
	default:
		return false
	}
	s.done = true
	return true
}
