package openai

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// ReplayOptions are what the request that gets a replayed stream asked for.
type ReplayOptions struct {
	IncludeUsage bool // stream_options.include_usage: a chunk with the usage before [DONE]
	Continuous   bool // stream_options.continuous_usage_stats: with IncludeUsage, it cannot be replayed
	// Sound says that the body is known to be JSON, and so is not looked through for that: the stream
	// of one that is not is no stream.
	Sound bool
}

// Replay writes a whole JSON answer as the stream of server-sent events that its server would have
// sent, in fewer pieces. Members that are null or empty say nothing and may be left out; what else
// cannot be told in a stream, or is not known, is an error, and no stream.
//
// Servers differ in what they say around an answer. Whose answer it is shows by its members: vLLM
// has a stop_reason in every choice, and says its fingerprint and timings beside the usage only, so
// that who does not ask for that does not see them; others say null for the usage in every chunk
// but the last.
func Replay(kind Kind, body []byte, o ReplayOptions) (sse []byte, err error) {
	if body, err = oneLine(body, o.Sound); err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	b := make([]byte, 0, 2*len(body)+4<<10)
	switch kind {
	case Chat, Completion:
		b, err = replayChoices(b, kind, body, o)
	case Message:
		b, err = replayMessage(b, body)
	case Response:
		b, err = replayResponse(b, body)
	default:
		err = errNoStream
	}
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	return b, nil
}

// oneLine checks that body is JSON, unless it is known to be, and gives it without line breaks, which
// would end an event.
func oneLine(body []byte, sound bool) ([]byte, error) {
	duplicates := jsontext.AllowDuplicateNames(true) // where it matters, walk finds them
	if !sound && !jsontext.Value(body).IsValid(duplicates) {
		return nil, errNotJSON
	}
	if bytes.IndexByte(body, '\n') < 0 && bytes.IndexByte(body, '\r') < 0 {
		return bytes.TrimSpace(body), nil
	}
	v := jsontext.Value(bytes.Clone(body))
	if v.Compact() != nil { // it leaves numbers and strings as they are written
		return nil, errNotJSON
	}
	return v, nil
}

var errNotJSON = errors.New("the answer is not JSON")

// unknownMember is the error for a member that a stream has no way to tell, nil if it says nothing.
func unknownMember(where string, name string, value []byte) error {
	if saysNothing(value) {
		return nil
	}
	return fmt.Errorf("%s has a member that is not known: %s", where, clip([]byte(name)))
}

// Bounds of the pieces that texts are cut into: of at least so many bytes as they are written, and
// at most so many pieces.
const (
	minPiece  = 256
	maxPieces = 16
	wordEnd   = 32 // a piece may be that much longer to end with a word
)

// pieces cuts what is between the quotes of a string. No letter and no escape is cut.
func pieces(raw []byte, yield func(piece []byte)) {
	size := max(minPiece, len(raw)/maxPieces+1)
	for len(raw) > 0 {
		i := leap(raw, size)
		for i < len(raw) && (i < size || i < size+wordEnd && raw[i-1] != ' ') {
			i += letter(raw[i:])
		}
		yield(raw[:i])
		raw = raw[i:]
	}
}

// leap is the index of the first letter that begins at size or later, or len(raw): most letters need no
// looking at on the way.
func leap(raw []byte, size int) int {
	size = min(size, len(raw))
	i := 0
	for i < size {
		n := bytes.IndexByte(raw[i:size], '\\')
		if n < 0 {
			for i = size; i < len(raw) && !utf8.RuneStart(raw[i]); {
				i++
			}
			return i
		}
		i += n
		i += letter(raw[i:])
	}
	return i
}

// letter is the length of the first letter as it is written in a sound string.
func letter(raw []byte) int {
	switch {
	case raw[0] >= utf8.RuneSelf:
		_, n := utf8.DecodeRune(raw)
		return n
	case raw[0] != '\\':
		return 1
	case len(raw) < 6 || raw[1] != 'u':
		return min(2, len(raw))
	case len(raw) >= 12 && (raw[2] == 'd' || raw[2] == 'D') && raw[3] != '0' && raw[3] >= '8' && raw[6] == '\\': // half of a pair
		return 12
	}
	return 6
}

// tokens are texts with what is said of each of their tokens.
type token struct {
	text []byte // raw, between the quotes
	logs []byte // raw elements
}

// aligned tells whether the strings, raw, run together make text, raw between the quotes.
func aligned(text []byte, strings [][]byte) bool {
	whole := unquote(append(append([]byte{'"'}, text...), '"'))
	for _, s := range strings {
		if !isString(s) {
			return false
		}
		word := unquote(s)
		if len(whole) < len(word) || whole[:len(word)] != word {
			return false
		}
		whole = whole[len(word):]
	}
	return whole == ""
}

// elements are the values of a list; ok is false where v is none.
func elements(v []byte) (list [][]byte, ok bool) {
	if len(v) == 0 || v[0] != '[' {
		return nil, false
	}
	for a := (array{b: v}); a.next(); {
		list = append(list, a.value)
	}
	return list, true
}

// event begins an event with its name and the beginning of its data, which ends behind the type.
func appendEvent(b []byte, name string) []byte {
	b = append(append(b, "event: "...), name...)
	b = append(append(b, "\ndata: {\"type\":\""...), name...)
	return append(b, '"')
}
