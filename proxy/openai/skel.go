package openai

type spans struct{}

// Meter reads body.
func Meter(kind Kind, body []byte) (Request, error) { return Request{}, nil }

// MeterMultipart reads a form.
func MeterMultipart(boundary string, body []byte) (Request, error) { return Request{}, nil }

// Edit appends the edited body to dst.
func (r *Request) Edit(dst, body []byte, upstreamModel string, includeUsage bool) []byte {
	return append(dst, body...)
}

// ParseUsage reads a usage object.
func ParseUsage(kind Kind, raw []byte) (Usage, error) { return Usage{}, nil }

// Stream reads server-sent events.
type Stream struct{}

// NewStream starts a stream.
func NewStream(kind Kind, hideUsage bool) *Stream { return &Stream{} }

// Feed takes the next bytes.
func (s *Stream) Feed(p []byte, emit func(Frame) error) error { return emit(Frame{Raw: p}) }

// End flushes.
func (s *Stream) End(emit func(Frame) error) error { return nil }

// Usage is the last seen.
func (s *Stream) Usage() Usage { return Usage{} }

// Generated counts deltas.
func (s *Stream) Generated() int64 { return 0 }

// Failure is the error seen.
func (s *Stream) Failure() *Failure { return nil }

// Complete tells whether a terminal frame was seen.
func (s *Stream) Complete() bool { return false }

// ResponseID is the id of a response.
func (s *Stream) ResponseID() string { return "" }

// Scanner reads a JSON response as it passes.
type Scanner struct{}

// NewScanner starts a scanner.
func NewScanner(kind Kind) *Scanner { return &Scanner{} }

// Write never fails.
func (s *Scanner) Write(p []byte) (int, error) { return len(p), nil }

// Usage is what was reported.
func (s *Scanner) Usage() Usage { return Usage{} }

// ResponseID is the id.
func (s *Scanner) ResponseID() string { return "" }

// Failure is the error seen.
func (s *Scanner) Failure() *Failure { return nil }
