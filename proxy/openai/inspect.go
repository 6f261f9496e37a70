package openai

import (
	"errors"
	"fmt"

	"github.com/go-json-experiment/json/jsontext"
)

// Facts are what a whole JSON answer says of itself.
type Facts struct {
	FinishReasons []string // of each choice; stop_reason of a Message, status of a Response
	Length        bool     // cut off by a cap, or at the end of the context
	Tools         bool     // it calls tools
	Refused       bool     // the model, or a filter, refused
	Complete      bool     // every part of it came to an end that is known, and it holds no error
	Failure       *Failure // an error inside, nil where none
	Usage         Usage

	texts   [][]byte // raw: strings, and what tools are called with as JSON
	thought [][]byte // likewise: how the model came to them
}

// Inspect reads a whole answer. An error says that it is no JSON object, or not of its kind.
// Chats, completions, Messages and Responses are taken apart; others are searched for an error and
// a usage only. The facts refer to body.
func Inspect(kind Kind, body []byte) (Facts, error) {
	f := Facts{Complete: true}
	var t top
	if !jsontext.Value(body).IsValid(jsontext.AllowDuplicateNames(true)) || !t.parse(body) {
		return Facts{}, errors.New("inspect: the answer is not a JSON object")
	}
	o := outcome{kind: kind}
	o.learn(&t)
	f.Failure, f.Usage = o.failure, o.report.usage(kind)
	read := map[Kind]func(members) error{Chat: f.choices, Completion: f.choices, Message: f.message, Response: f.response}[kind]
	if read != nil && f.Failure == nil {
		m, err := readMembers(body, "the answer")
		if err == nil {
			err = read(m)
		}
		if err != nil {
			return Facts{}, fmt.Errorf("inspect: the answer is not of its kind: %w", err)
		}
	}
	f.Complete = f.Complete && f.Failure == nil
	return f, nil
}

// Texts calls yield with each text of the answer, decoded, until it says false: what is shown,
// thought, refused and what tools are called with. A text is valid during the call only.
func (f *Facts) Texts(yield func(text []byte) bool) {
	if tell(f.texts, yield) {
		tell(f.thought, yield)
	}
}

// Said is Texts without what was thought.
func (f *Facts) Said(yield func(text []byte) bool) { tell(f.texts, yield) }

func tell(texts [][]byte, yield func(text []byte) bool) (all bool) {
	var buf []byte
	for _, raw := range texts {
		text := raw
		if isString(raw) {
			var err error
			if buf, err = jsontext.AppendUnquote(buf[:0], raw); err != nil {
				continue // it is valid: this does not happen
			}
			text = buf
		}
		if !yield(text) {
			return false
		}
	}
	return true
}

// ended notes why something ended.
func (f *Facts) ended(reason []byte) {
	why := ""
	if isString(reason) {
		why = unquote(reason)
	}
	f.FinishReasons = append(f.FinishReasons, why)
	switch why {
	case "stop", "tool_calls", "function_call", // OpenAI and vLLM
		"end_turn", "stop_sequence", "tool_use", // Anthropic
		"completed":
	case "length", "max_tokens", "model_context_window_exceeded":
		f.Length = true
	case "content_filter", "refusal":
		f.Refused = true
	default:
		f.Complete = false
	}
}

// says notes a text; null and others say nothing.
func (f *Facts) says(v []byte) bool {
	if !says(v) {
		return false
	}
	f.texts = append(f.texts, v)
	return true
}

// thinks notes a text that only led to the answer.
func (f *Facts) thinks(v []byte) {
	if says(v) {
		f.thought = append(f.thought, v)
	}
}

// choices reads those of a chat or a completion.
func (f *Facts) choices(m members) error {
	list, ok := elements(m.get("choices"))
	if !ok || len(list) == 0 || len(list) > maxChoices {
		return errors.New("it has no choices, or too many")
	}
	for _, v := range list {
		c, err := readMembers(v, "a choice")
		if err != nil {
			return err
		}
		f.ended(c.get("finish_reason"))
		f.says(c.get("text"))
		message := c.get("message")
		if message == nil {
			continue
		}
		s, err := readMembers(message, "a message")
		if err != nil {
			return err
		}
		f.content(s.get("content"))
		f.thinks(s.get("reasoning"))
		f.thinks(s.get("reasoning_content"))
		f.Refused = f.says(s.get("refusal")) || f.Refused
		calls, _ := elements(s.get("tool_calls"))
		for _, call := range calls {
			f.called(call, 0)
		}
		if call := s.get("function_call"); call != nil && call[0] == '{' {
			f.called(call, 0)
		}
	}
	return nil
}

// content is a text, or a list of parts with texts.
func (f *Facts) content(v []byte) {
	if f.says(v) {
		return
	}
	parts, _ := elements(v)
	for _, p := range parts {
		for o := (object{b: p}); o.next(); {
			switch string(o.name) {
			case "text", "refusal":
				f.says(o.value)
			case "thinking":
				f.thinks(o.value)
			}
		}
	}
}

// called reads what a tool is called with, at most one object deep.
func (f *Facts) called(call []byte, depth int) {
	f.Tools = true
	for o := (object{b: call}); o.next(); {
		switch string(o.name) {
		case "arguments", "input":
			f.says(o.value)
		case "function", "custom":
			if depth == 0 {
				f.called(o.value, 1)
			}
		}
	}
}

// message reads a Message.
func (f *Facts) message(m members) error {
	list, ok := elements(m.get("content"))
	if !ok || len(list) > maxBlocks {
		return errors.New("it has no content, or too much")
	}
	f.ended(m.get("stop_reason"))
	for _, v := range list {
		b, err := readMembers(v, "a block of content")
		if err != nil {
			return err
		}
		f.says(b.get("text"))
		f.thinks(b.get("thinking"))
		switch unquote(b.get("type")) {
		case "text", "thinking", "redacted_thinking":
		default: // tools of all sorts, and what they gave
			f.Tools = true
			for _, name := range [...]string{"input", "content"} {
				if v := b.get(name); v != nil && !saysNothing(v) {
					f.texts = append(f.texts, v)
				}
			}
		}
	}
	return nil
}

// response reads a Response.
func (f *Facts) response(m members) error {
	list, ok := elements(m.get("output"))
	if !ok {
		return errors.New("it has no output")
	}
	status := m.get("status")
	if string(status) == `"incomplete"` {
		f.FinishReasons, f.Length = []string{"incomplete"}, true
		for o := (object{b: m.get("incomplete_details")}); o.next(); {
			if string(o.name) == "reason" && string(o.value) == `"content_filter"` {
				f.Length, f.Refused = false, true
			}
		}
	} else {
		f.ended(status)
	}
	for _, v := range list {
		item, err := readMembers(v, "an item of the output")
		if err != nil {
			return err
		}
		kind := unquote(item.get("type"))
		before := len(f.texts)
		f.content(item.get("content"))
		f.content(item.get("summary"))
		if kind == "reasoning" {
			f.thought, f.texts = append(f.thought, f.texts[before:]...), f.texts[:before]
		}
		switch kind {
		case "message":
			parts, _ := elements(item.get("content"))
			for _, p := range parts {
				for o := (object{b: p}); o.next(); {
					f.Refused = f.Refused || string(o.name) == "refusal" && says(o.value)
				}
			}
		case "reasoning":
		default:
			f.called(v, 0)
		}
	}
	return nil
}
