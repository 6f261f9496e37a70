package ladder

import (
	"bytes"

	"github.com/go-json-experiment/json/jsontext"

	"headgate/proxy/openai"
)

// generates says whether requests of that kind ask for a text.
func generates(kind openai.Kind) bool {
	return kind == openai.Chat || kind == openai.Completion || kind == openai.Response || kind == openai.Message
}

// CanAnswer says whether a static answer does for a request: it asks for a text, one of no prescribed
// shape, and now. in has been read from body.
func CanAnswer(kind openai.Kind, in *openai.Request, body []byte) bool {
	if !generates(kind) || in.Background || in.Bounds.Echo || kind == openai.Completion && in.MaxOutput == 0 {
		return false // to be fetched later; or to be scored, not continued
	}
	s := shapeOf(kind, body)
	return !s.structured && !s.forced
}

// Cut is the cap to set so that an answer has at most so many tokens; ok is false where nothing is to
// be cut: it is capped so already, it may call tools, its output is structured, or nothing is
// generated. A request that cannot do with so few (min_tokens, the budget of its thoughts) gets what
// it needs. in has been read from body.
func Cut(kind openai.Kind, in *openai.Request, body []byte, most int64) (limit int64, ok bool) {
	if !generates(kind) || most <= 0 || in.Bounds.Tools || in.Bounds.Rounds != "" {
		return 0, false
	}
	if in.Bounds.Beyond == "prompt" && kind == openai.Response { // stored, tools and all
		return 0, false
	}
	limit = max(most, in.Bounds.MinOutput)
	capped := in.MaxOutput
	if kind == openai.Completion {
		if capped < 0 && !in.Bounds.Uncapped {
			capped = openai.DefaultCompletion
		}
		if capped == 0 {
			return 0, false
		}
	}
	if capped > 0 && capped <= limit || shapeOf(kind, body).structured {
		return 0, false
	}
	return limit, true
}

// shape is what a request prescribes of its answer.
type shape struct {
	structured bool // a schema, a grammar, a choice
	forced     bool // a tool must be called
}

// shapeOf reads the members of body, which is sound, by one linear scan. It is asked only while a
// rung is on that has to know.
func shapeOf(kind openai.Kind, body []byte) (s shape) {
	each(body, func(name string, value jsontext.Value) {
		switch name {
		case "response_format":
			s.structured = s.structured || !free(value)
		case "text":
			if kind == openai.Response {
				s.structured = s.structured || !free(member(value, "format"))
			}
		case "output_config":
			s.structured = s.structured || !free(member(value, "format"))
		case "output_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
			"json_schema", "regex", "ebnf", "grammar": // vLLM's, and what other servers call it
			s.structured = s.structured || !free(value)
		case "tool_choice", "function_call":
			s.forced = s.forced || !freeChoice(value)
		}
	})
	return s
}

// free says whether a format prescribes nothing: none, or text.
func free(value jsontext.Value) bool {
	switch value.Kind() {
	case 0, 'n':
		return true
	case '{':
		return text(member(value, "type")) == "text"
	}
	return false
}

// freeChoice says whether the model need not call a tool.
func freeChoice(value jsontext.Value) bool {
	chosen := text(value)
	if value.Kind() == '{' {
		chosen = text(member(value, "type"))
	}
	return value.Kind() == 'n' || chosen == "auto" || chosen == "none"
}

// text is a string's, "" of all else.
func text(value jsontext.Value) string {
	if value.Kind() != '"' {
		return ""
	}
	b, err := jsontext.AppendUnquote(nil, value)
	if err != nil {
		return ""
	}
	return string(b)
}

// member is one of an object, nil where it is not there.
func member(object jsontext.Value, name string) (found jsontext.Value) {
	each(object, func(n string, value jsontext.Value) {
		if n == name {
			found = value.Clone()
		}
	})
	return found
}

// each calls yield with the members of a sound object; of all else there are none. A value is valid
// during the call.
func each(object []byte, yield func(name string, value jsontext.Value)) {
	dec := jsontext.NewDecoder(bytes.NewBuffer(object), jsontext.AllowDuplicateNames(true))
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '{' {
		return
	}
	for dec.PeekKind() == '"' {
		t, err := dec.ReadToken()
		if err != nil {
			return
		}
		name := t.String()
		value, err := dec.ReadValue()
		if err != nil {
			return
		}
		yield(name, value)
	}
}
