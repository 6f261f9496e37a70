package openai

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/go-json-experiment/json/jsontext"
)

// Bounds of what is assembled.
const (
	maxChoices   = 1024
	maxCalls     = 128  // of a choice
	maxBlocks    = 1024 // of a Message
	partCost     = 512  // bytes that a choice, a call or a block counts for, beside what it holds
	maxFrameHead = 4 << 10
)

// Assembler makes of a stream the one JSON body that the same answer would have been without
// streaming. What it does not understand to the last member, it does not assemble; members that
// are null or empty say nothing and may be left out. It is for one goroutine at a time.
//
// Servers tell in a stream what they tell without one, but for this, which both ways leave as
// they came: vLLM's first chunk has "" for the content of an answer that is tool calls or thought
// only, where its body has null; so has the one assembled.
type Assembler struct {
	kind Kind
	most int
	held int // bytes that are held, at least
	err  error
	done bool
	long []byte // of an event longer than MaxFrame, its raw frame so far

	chunks   chunks
	message  message
	response []byte

	step step
	like wording
}

// NewAssembler starts an assembler that holds about so many bytes of an answer; one that is
// longer is not assembled. Give it to [Stream.Assemble], or its events to [Assembler.Event].
func NewAssembler(kind Kind, most int) *Assembler {
	a := &Assembler{kind: kind, most: most}
	switch kind {
	case Chat, Completion, Message, Response:
	default:
		a.err = errNoStream
	}
	return a
}

var (
	errNoStream = errors.New("answers of this kind are not streamed")
	errNotEnded = errors.New("the stream has not come to its proper end")
	errTooLong  = errors.New("the answer is too long to be kept")
)

// Event takes the data of one event, which is valid during the call only.
func (a *Assembler) Event(data []byte) {
	if a.err != nil {
		return
	}
	if a.like.take(a, data) {
		return
	}
	if string(bytes.TrimSpace(data)) == "[DONE]" {
		if chunked := a.kind == Chat || a.kind == Completion; chunked == a.done {
			a.fail("the stream ends twice, or before its last event")
		}
		a.done, a.like = true, wording{} // vLLM ends streams of Anthropic's with it, too
		return
	}
	a.step = step{}
	switch {
	case a.done:
		a.fail("an event follows the end")
	case !jsontext.Value(data).IsValid(jsontext.AllowDuplicateNames(true)):
		a.fail("an event is not JSON")
	case a.kind == Message:
		a.messageEvent(data)
	case a.kind == Response:
		a.responseEvent(data)
	default:
		a.chunk(data)
	}
	if a.err == nil {
		a.like.remember(&a.step, data)
	}
}

// JSON is the answer; ok only where the stream came to its proper end, reported no error and
// everything in it was understood. Call it once, after the end.
func (a *Assembler) JSON() (body []byte, ok bool) {
	if a.err == nil && !a.done {
		a.err = errNotEnded
	}
	if a.err != nil {
		return nil, false
	}
	switch a.kind {
	case Message:
		body = a.appendMessage(nil)
	case Response:
		body = a.response
	default:
		body = a.appendAnswer(nil)
	}
	if a.err == nil && !jsontext.Value(body).IsValid(jsontext.AllowDuplicateNames(true)) {
		a.fail("what was assembled is not JSON")
	}
	if a.err != nil {
		return nil, false
	}
	return body, true
}

// Err says why there is no answer, nil where there may be one. It names members, never what they
// hold.
func (a *Assembler) Err() error { return a.err }

// fail gives up, for good, and lets go of what is held. It returns false.
func (a *Assembler) fail(format string, args ...any) bool {
	return a.failWith(fmt.Errorf(format, args...))
}

func (a *Assembler) failWith(err error) bool {
	if a.err == nil {
		a.err = err
	}
	a.chunks, a.message, a.response, a.long, a.like = chunks{}, message{}, nil, nil, wording{}
	return false
}

// unknown fails for a member that is not understood, unless it says nothing.
func (a *Assembler) unknown(where string, name, value []byte) bool {
	if saysNothing(value) {
		return true
	}
	return a.fail("%s has a member that is not known: %s", where, clip(name))
}

// hold counts n more bytes and tells whether they may be held.
func (a *Assembler) hold(n int) bool {
	if a.held += n; a.held > a.most {
		return a.failWith(errTooLong)
	}
	return true
}

// piece takes a piece of a raw frame that is longer than MaxFrame, and tells whether it may go on.
func (a *Assembler) piece(p []byte) bool {
	if a.err != nil {
		return false
	}
	if len(a.long)+len(p) > a.most+maxFrameHead {
		return a.failWith(errTooLong)
	}
	a.long = append(a.long, p...)
	return true
}

// responseEvent reads an event of /v1/responses. The last one repeats the whole answer, so that
// what came before it need not be understood.
func (a *Assembler) responseEvent(data []byte) {
	var typ, response []byte
	w := walk{object: object{b: data}}
	for w.next() {
		switch string(w.name) {
		case "type":
			typ = w.value
		case "response":
			response = w.value
		}
	}
	switch {
	case w.bad || !bytes.HasPrefix(typ, []byte(`"response.`)):
		a.fail("an event of the response is not known, or an error")
		return
	case string(typ) == `"response.failed"`, string(typ) == `"response.cancelled"`:
		a.fail("the response failed")
		return
	case string(typ) != `"response.completed"` && string(typ) != `"response.incomplete"`:
		return
	}
	m, err := readMembers(response, "response")
	if err != nil {
		a.failWith(err)
		return
	}
	status := unquote(m.get("status"))
	if status != "completed" && status != "incomplete" || len(m.get("output")) == 0 || m.get("output")[0] != '[' {
		a.fail("the response has no output, or has not come to its end")
		return
	}
	if a.hold(len(response)) {
		a.response = bytes.Clone(response)
		a.done = true
	}
}
