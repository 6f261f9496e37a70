package ladder

import (
	"time"

	"headgate/proxy/openai"
)

// Answer is a static answer: what a client gets instead of a model's. It has no usage, ends for the
// reason that a model ends, and says its fingerprint, headgate-static, where its kind has one.
type Answer struct {
	Kind    openai.Kind // Chat, Completion, Response or Message
	Model   string      // as the client named it
	Text    string
	ID      string // unique; the kind's prefix is put before it
	Created time.Time
	Choices int64 // of a chat or a completion; 0 is 1, at most maxChoices

	Stream       bool // as server-sent events
	IncludeUsage bool // the stream's options ask for the usage
}

// Body is the answer's bytes and its Content-Type.
func (a *Answer) Body() (body []byte, contentType string, err error) { return nil, "", nil }

// CanAnswer says whether a static answer does for a request: it generates a text, and one of a shape
// that is not prescribed. body is what in was read from.
func CanAnswer(kind openai.Kind, in *openai.Request, body []byte) bool { return false }

// Cut is the cap to set so that an answer has at most so many tokens; ok is false where nothing is to
// be cut: it is capped lower already, it may call tools, its output is structured, or nothing is
// generated. A cap that the request cannot do with (min_tokens, the budget of its thoughts) is raised
// to what it can. body is what in was read from.
func Cut(kind openai.Kind, in *openai.Request, body []byte, most int64) (limit int64, ok bool) {
	return 0, false
}
