package fakevllm

import (
	"bytes"
	"strconv"
	"unicode/utf8"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// The documented costs of what is not text.
const (
	bytesPerToken    = 4
	tokensPerMessage = 3
	tokensPerChat    = 2
	tokensPerImage   = 256
	tokensPerAudio   = 128
	tokensPerVideo   = 512
)

func tokensOf(n int) int64 { return int64(n+bytesPerToken-1) / bytesPerToken }

// tokenIDs gives a text's tokens: each is 4 bytes of it, little-endian, so that
// textOf can turn them back. Zero bytes at the end of the text are lost.
func tokenIDs(s string) []uint32 {
	out := make([]uint32, 0, tokensOf(len(s)))
	for i := 0; i < len(s); i += bytesPerToken {
		var id uint32
		for k := 0; k < bytesPerToken && i+k < len(s); k++ {
			id |= uint32(s[i+k]) << (8 * k)
		}
		out = append(out, id)
	}
	return out
}

func textOf(ids []uint32) string {
	b := make([]byte, 0, bytesPerToken*len(ids))
	for _, id := range ids {
		b = append(b, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
	}
	for len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	return string(b)
}

// message is one turn in any of the dialects; a Responses item without a role too.
type message struct {
	Type      string         `json:"type"`
	Role      string         `json:"role"`
	Content   jsontext.Value `json:"content"`
	ToolCalls jsontext.Value `json:"tool_calls"`
	Arguments string         `json:"arguments"` // of a Responses function_call
	Output    jsontext.Value `json:"output"`    // of a Responses function_call_output
}

func (m *message) isToolResult() bool {
	return m.Role == "tool" || m.Type == "function_call_output" || contains(m.Content, "tool_result")
}

// part is one piece of a content list in any of the dialects.
type part struct {
	Type    string         `json:"type"`
	Text    string         `json:"text"`
	Content jsontext.Value `json:"content"` // of a tool_result
	Input   jsontext.Value `json:"input"`   // of a tool_use
}

// contentParts reads a content that is a string, a list of parts or absent.
func contentParts(raw jsontext.Value) ([]part, *apiError) {
	switch raw.Kind() {
	case '"':
		s, err := jsontext.AppendUnquote(nil, raw)
		if err != nil {
			return nil, badRequest("content", "The content cannot be read: %v", err)
		}
		return []part{{Type: "text", Text: string(s)}}, nil
	case '[':
		var parts []part
		if err := json.Unmarshal(raw, &parts, jsontext.AllowDuplicateNames(true)); err != nil {
			return nil, badRequest("content", "The content cannot be read: %v", err)
		}
		return parts, nil
	case 'n', 0:
		return nil, nil
	}
	return nil, badRequest("content", "The content must be a string or a list of parts.")
}

func contentTokens(raw jsontext.Value) (int64, *apiError) {
	parts, e := contentParts(raw)
	if e != nil {
		return 0, e
	}
	var n int64
	for _, p := range parts {
		switch p.Type {
		case "image_url", "input_image", "image":
			n += tokensPerImage
		case "input_audio", "audio_url":
			n += tokensPerAudio
		case "video_url":
			n += tokensPerVideo
		default:
			n += tokensOf(len(p.Text)) + tokensOf(len(p.Input))
			if p.Type == "tool_result" && p.Content.Kind() == '"' {
				n += tokensOf(len(p.Content) - 2)
			} else {
				n += tokensOf(len(p.Content))
			}
		}
	}
	return n, nil
}

// chatTokens counts a conversation as the template would render it.
func chatTokens(msgs []message) (int64, *apiError) {
	n := int64(tokensPerChat)
	for i := range msgs {
		m := &msgs[i]
		content, e := contentTokens(m.Content)
		if e != nil {
			return 0, e
		}
		n += tokensPerMessage + content + tokensOf(len(m.ToolCalls)) + tokensOf(len(m.Arguments)) + tokensOf(len(m.Output))
	}
	return n, nil
}

// prompts counts a prompt or an embedding input: a text, a list of texts, a list of
// token ids, or a list of such lists.
func prompts(raw jsontext.Value, param string) ([]int64, *apiError) {
	bad := func(err error) *apiError {
		return badRequest(param, "The %s must be a string, a list of strings, or lists of token ids: %v", param, err)
	}
	switch raw.Kind() {
	case '"':
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, bad(err)
		}
		return []int64{tokensOf(len(s))}, nil
	case '[':
	default:
		return nil, badRequest(param, "The %s is missing.", param)
	}
	var list []jsontext.Value
	if err := json.Unmarshal(raw, &list, jsontext.AllowDuplicateNames(true)); err != nil {
		return nil, bad(err)
	}
	switch {
	case len(list) == 0:
		return nil, badRequest(param, "The %s is empty.", param)
	case list[0].Kind() == '0':
		return []int64{int64(len(list))}, nil
	case len(list) > maxInputs:
		return nil, badRequest(param, "The %s holds %d entries; at most %d are taken.", param, len(list), maxInputs)
	}
	out := make([]int64, len(list))
	for i, v := range list {
		switch v.Kind() {
		case '"':
			var s string
			if err := json.Unmarshal(v, &s); err != nil {
				return nil, bad(err)
			}
			out[i] = tokensOf(len(s))
		case '[':
			var ids []int64
			if err := json.Unmarshal(v, &ids); err != nil {
				return nil, bad(err)
			}
			out[i] = int64(len(ids))
		default:
			return nil, badRequest(param, "Entry %d of the %s is neither text nor token ids.", i, param)
		}
	}
	return out, nil
}

func contains(raw jsontext.Value, s string) bool { return bytes.Contains(raw, []byte(s)) }

// pieces cuts a text into tokens of at most 4 bytes, never inside a character.
func pieces(s string) []string {
	var out []string
	for len(s) > 0 {
		n := 0
		for n < len(s) {
			_, size := utf8.DecodeRuneInString(s[n:])
			if n > 0 && n+size > bytesPerToken {
				break
			}
			n += size
		}
		out = append(out, s[:n])
		s = s[n:]
	}
	return out
}

// appendString appends s as a JSON string. Invalid UTF-8 becomes the replacement
// character.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	b = appendEscaped(b, s)
	return append(b, '"')
}

func appendEscaped(b []byte, s string) []byte {
	start := 0
	for i := 0; i < len(s); {
		switch ch := s[i]; {
		case ch >= utf8.RuneSelf:
			r, size := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && size == 1 {
				b = append(append(b, s[start:i]...), "\ufffd"...)
				start = i + 1
			}
			i += size
			continue
		case ch == '"' || ch == '\\':
			b = append(append(b, s[start:i]...), '\\', ch)
			start = i + 1
		case ch < 0x20:
			b = append(append(b, s[start:i]...), `\u00`...)
			if ch < 0x10 {
				b = append(b, '0')
			}
			b = strconv.AppendInt(b, int64(ch), 16)
			start = i + 1
		}
		i++
	}
	return append(b, s[start:]...)
}
