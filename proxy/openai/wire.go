package openai

import "fmt"

// Kind is the shape of a route's request and response bodies.
type Kind uint8

// The kinds. Pooling stands for every other JSON route that runs a model (score,
// rerank, classify, pooling and their twins), read generically; Audio for the
// transcription and translation forms and for JSON bodies of the speech route.
const (
	Chat Kind = iota
	Completion
	Embedding
	Response
	Message
	CountTokens
	Tokenize
	Detokenize
	Pooling
	Audio
)

// Request is what one pass over a body finds. It refers to the body by offsets only,
// so it stays valid however long the body lives.
type Request struct {
	Model      string
	HasModel   bool // false where the field is absent, null or ""
	Stream     bool
	WantsUsage bool  // stream_options.include_usage is true
	Continuous bool  // stream_options.continuous_usage_stats is true
	MaxOutput  int64 // the larger of max_tokens, max_completion_tokens and max_output_tokens; -1 where none is set
	Sequences  int64 // completions that will be generated: the larger of n and best_of, times the prompts of a completion; at least 1

	InputBytes  int64 // decoded bytes of text that becomes prompt tokens; never media payloads
	InputTokens int64 // prompt tokens given as ids
	FileBytes   int64 // size of the files of a multipart form
	Images      int   // parts billed flat, documents included
	Audio       int
	Video       int
	Inputs      int64 // prompts, embedding inputs or documents; at least 1

	Bounds   Bounds
	Sampling Sampling

	PreviousResponseID string
	PromptCacheKey     string // what the client says belongs together; "" where it is no string of at most maxIdentity bytes
	Background         bool
	User               string
	EndUser            string // Anthropic's metadata.user_id, of whom the server is told the request is
	Store              bool   // the server shall keep the answer, to be named later: store is true, or left out of a response
	HasStore           bool   // store is true or false
	Outside            string // a field by which the answer depends on what the body does not hold, "" where none is known; see outside.go

	spans spans
}

// Sampling is what decides whether the same body gets the same answer. Of a form, only N is read.
type Sampling struct {
	// Temperature as a server reads it. What is no plain number of 0 or more, such as one in
	// quotes, which servers coerce each in its own way, is +Inf: above every ceiling.
	Temperature    float64
	HasTemperature bool // temperature is there and not null; where it is not, the model's default holds
	HasSeed        bool // seed is there and not null, on a route that obeys one
	N              int64
}

// Bounds are what an upper bound of what a request may take is made of.
type Bounds struct {
	Text      int64  // no text of the body can become more tokens, however it is rendered; see textMost
	Messages  int64  // messages and items of a conversation
	Tools     bool   // tools or functions are described
	MinOutput int64  // tokens that each answer must be able to have
	Uncapped  bool   // a completion's cap is null; absent, it is DefaultCompletion
	Echo      bool   // a completion begins with its prompt
	Beyond    string // a field by which the prompt takes in what the body does not hold, "" where none does
	Rounds    string // a field by which the server may run the model more than once, "" where none does
	Hidden    string // a field by which what is generated may not all be sent, "" where none does; see hides
	Held      int64  // what a server may hold back of each answer, in tokens, since a stop may begin there
}

// InputError says why a body was refused. Offset is the byte at which it went wrong,
// Field the name of the field concerned ("" where there is none).
type InputError struct {
	Offset  int64
	Field   string
	Problem string
}

// Error names the field, the byte offset and the remedy.
func (e *InputError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("at byte %d: %s", e.Offset, e.Problem)
	}
	return fmt.Sprintf("%s (at byte %d): %s", e.Field, e.Offset, e.Problem)
}

// Usage is what the upstream says that a request consumed, in tokens. Input includes
// CachedInput and CacheWrite, which includes CacheWrite1h; Output includes Reasoning.
type Usage struct {
	Input, CachedInput, CacheWrite, Output, Reasoning int64
	CacheWrite1h                                      int64 // to be kept for an hour, not five minutes

	AudioSeconds int64 // transcriptions are reported in seconds, not in tokens
	Known        bool  // both token figures were reported
}

// DefaultCompletion is the cap of a completion that says nothing of one.
const DefaultCompletion = 16

// Failure is an error that the upstream reported inside a body or stream.
type Failure struct{ Message, Type, Code string }

// Frame is one server-sent event with its blank line, or a stretch of one that is
// longer than MaxFrame. Raw is valid during the call of emit only. Last says that the
// answer is whole: it may be settled before Raw is passed on. Should bytes follow all the
// same (some servers end every stream with [DONE]), they still come as frames.
type Frame struct {
	Raw  []byte
	Last bool // [DONE], message_stop, response.completed, failed or incomplete
}

// MaxFrame bounds the memory that a stream holds, in bytes.
const MaxFrame = 1 << 20
