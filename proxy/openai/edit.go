package openai

import (
	"bytes"

	"github.com/go-json-experiment/json/jsontext"
)

// edit replaces body[at.start:at.end] by text; an empty span inserts.
type edit struct {
	at   span
	text []byte
}

// maxEdits is the model, include_usage and continuous_usage_stats.
const maxEdits = 3

// Pieces gives the edited body as slices to be sent one after the other: stretches of
// body, the very one that r was read from, and what stands between them instead. Nothing
// of body is copied, so that an edit of a large one costs no memory.
//
// The model name is replaced by upstreamModel ("" leaves it; a body without a name gets
// one) and, where includeUsage is set and the request streams in a shape that has the
// option, include_usage is made true. A stream that asked for continuous_usage_stats
// without include_usage, which vLLM ignores, has them turned off, so that the added option
// adds one chunk and nothing to the others. Every other byte stays.
func (r *Request) Pieces(body []byte, upstreamModel string, includeUsage bool) [][]byte {
	var buf [maxEdits]edit
	edits := buf[:0]
	if r.spans.form {
		edits = r.formEdits(edits, body, upstreamModel, includeUsage)
	} else {
		edits = r.jsonEdits(edits, upstreamModel, includeUsage)
	}
	for i := 1; i < len(edits); i++ { // by position: three at most
		for j := i; j > 0 && edits[j].at.start < edits[j-1].at.start; j-- {
			edits[j], edits[j-1] = edits[j-1], edits[j]
		}
	}
	pieces := make([][]byte, 0, 2*len(edits)+1)
	from := 0
	for _, e := range edits {
		pieces = append(pieces, body[from:e.at.start], e.text)
		from = e.at.end
	}
	return append(pieces, body[from:])
}

func (r *Request) jsonEdits(edits []edit, model string, includeUsage bool) []edit {
	s := &r.spans
	if model != "" && model != r.Model {
		name, _ := jsontext.AppendQuote(nil, model)
		switch {
		case s.model.end > 0:
			edits = append(edits, edit{s.model, name})
		case s.empty:
			edits = append(edits, edit{span{s.open, s.open}, []byte(`"model":` + string(name))})
		default:
			edits = append(edits, edit{span{s.open, s.open}, []byte(`"model":` + string(name) + `,`)})
		}
	}
	if !includeUsage || !r.Stream || r.WantsUsage || s.kind != Chat && s.kind != Completion {
		return edits
	}
	const on = `"include_usage":true`
	inside := s.options.start + 1
	switch {
	case s.options.end == 0:
		edits = append(edits, edit{span{s.stream.end, s.stream.end}, []byte(`,"stream_options":{` + on + `}`)})
	case s.nullOptions:
		edits = append(edits, edit{s.options, []byte(`{` + on + `}`)})
	case s.usage.end > 0:
		edits = append(edits, edit{s.usage, []byte("true")})
	case s.noOptions:
		edits = append(edits, edit{span{inside, inside}, []byte(on)})
	default:
		edits = append(edits, edit{span{inside, inside}, []byte(on + ",")})
	}
	if r.Continuous {
		edits = append(edits, edit{s.continuous, []byte("false")})
	}
	return edits
}

func (r *Request) formEdits(edits []edit, body []byte, model string, includeUsage bool) []edit {
	s := &r.spans
	delimiter := body[:bytes.IndexByte(body, '\n')+1]
	field := func(name, value string) edit {
		text := string(delimiter) + "Content-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
		return edit{text: []byte(text)} // before everything else
	}
	if model != "" && model != r.Model {
		if s.model.end > 0 {
			edits = append(edits, edit{s.model, []byte(model)})
		} else {
			edits = append(edits, field("model", model))
		}
	}
	if !includeUsage || !r.Stream || r.WantsUsage {
		return edits
	}
	if s.usage.end > 0 {
		edits = append(edits, edit{s.usage, []byte("true")})
	} else {
		edits = append(edits, field("stream_include_usage", "true"))
	}
	if r.Continuous {
		edits = append(edits, edit{s.continuous, []byte("false")})
	}
	return edits
}
