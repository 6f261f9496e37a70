package openai

import "errors"

// Assembler makes of a stream the one JSON body that the same answer would have been without
// streaming. What it does not understand to the last member, it does not assemble. It is for one
// goroutine at a time.
type Assembler struct {
	kind Kind
	most int
	err  error
}

// NewAssembler starts an assembler that holds at most so many bytes of an answer; one that is
// longer is not assembled. Give it to [Stream.Assemble], or its events to [Assembler.Event].
func NewAssembler(kind Kind, most int) *Assembler {
	return &Assembler{kind: kind, most: most, err: errNotEnded}
}

// errNotEnded says that a stream has not come to its end.
var errNotEnded = errors.New("the stream has not come to its proper end")

// Event takes the data of one event, which is valid during the call only.
func (a *Assembler) Event(data []byte) { _ = data }

// JSON is the answer; ok only where the stream came to its proper end, reported no error and
// everything in it was understood.
func (a *Assembler) JSON() (body []byte, ok bool) { return nil, false }

// Err says why there is no answer, nil where there is one. It names members, never what they hold.
func (a *Assembler) Err() error { return a.err }
