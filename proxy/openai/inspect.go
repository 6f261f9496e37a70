package openai

import "fmt"

// Facts are what a whole JSON answer says of itself.
type Facts struct {
	FinishReasons []string // of each choice; stop_reason of a Message, status of a Response
	Length        bool     // cut off by a cap of tokens
	Tools         bool     // it calls tools
	Refused       bool     // the model, or a filter, refused
	Complete      bool     // every part of it came to an end that is known, and no error is in it
	Failure       *Failure // an error inside, nil where none
	Usage         Usage

	kind Kind
	body []byte
}

// Inspect reads a whole answer. An error says that it is no JSON object of that kind.
func Inspect(kind Kind, body []byte) (Facts, error) {
	return Facts{kind: kind, body: body}, fmt.Errorf("inspect: answers of kind %d are not read", kind)
}

// Texts calls yield with each text of the answer, decoded, until it says false: what is shown,
// thought, refused and what tools are called with. A text is valid during the call only.
func (f *Facts) Texts(yield func(text []byte) bool) { _ = yield }
