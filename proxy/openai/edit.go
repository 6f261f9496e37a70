package openai

import (
	"bytes"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// edit replaces body[at.start:at.end] by text; an empty span inserts.
type edit struct {
	at   span
	text []byte
}

// maxEdits is the members that are missing, the model, include_usage,
// continuous_usage_stats, cache_salt and the caps.
const maxEdits = 5 + maxCaps

// Changes are what the gateway needs changed in a body.
type Changes struct {
	Model        string // the upstream's name; "" leaves what is there
	IncludeUsage bool   // ask a stream for its usage
	Cap          int64  // the most tokens of an answer; 0 leaves what is there
	CacheSalt    string // keeps the server's prefix cache apart; "" leaves what is there
}

// Pieces gives the edited body as slices to be sent one after the other: stretches of
// body, the very one that r was read from, and what stands between them instead. Nothing
// of body is copied, so that an edit of a large one costs no memory.
//
// The model name is replaced by c.Model (a body without a name gets one) and, where
// c.IncludeUsage is set and the request streams in a shape that has the option,
// include_usage is made true. Every cap that the route obeys and that is null or above c.Cap
// becomes c.Cap; a body without one gets one; 0, which some servers take for no cap, becomes
// c.Cap, except in a completion, where it is one. Where c.CacheSalt is set and a chat, a completion or
// a response has no cache_salt of its own, or a null one, it gets that one. A stream that asked for continuous_usage_stats
// without include_usage, which vLLM ignores, has them turned off, so that the added option
// adds one chunk and nothing to the others. Every other byte stays.
func (r *Request) Pieces(body []byte, c Changes) [][]byte {
	var buf [maxEdits]edit
	edits := buf[:0]
	if r.spans.form {
		edits = r.formEdits(edits, body, c)
	} else {
		edits = r.jsonEdits(edits, c)
	}
	for i := 1; i < len(edits); i++ { // by position: few, and those at one place in order
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

// capEdits changes the caps that are there and says whether one has to be added.
func (r *Request) capEdits(edits []edit, most int64) (_ []edit, missing bool) {
	if most <= 0 {
		return edits, false
	}
	missing = true
	for _, c := range r.spans.caps {
		if c.end == 0 {
			continue
		}
		missing = false
		if none := c.value < 0 || c.value == 0 && r.spans.kind != Completion; none || c.value > most {
			edits = append(edits, edit{c.span, strconv.AppendInt(nil, most, 10)})
		}
	}
	return edits, missing
}

// capName is what a cap is called on routes of this kind. Nearly every server knows
// max_tokens of a chat, few max_completion_tokens, and those that know that alone refuse the
// other.
func capName(kind Kind) string {
	switch kind {
	case Response:
		return "max_output_tokens"
	case Audio:
		return "max_completion_tokens"
	}
	return "max_tokens"
}

// salted says whether servers know a cache_salt on routes of this kind.
func salted(kind Kind) bool { return kind == Chat || kind == Completion || kind == Response }

func (r *Request) jsonEdits(edits []edit, c Changes) []edit {
	s := &r.spans
	var added []byte // the members that are missing
	if c.Model != "" && c.Model != r.Model {
		name, _ := jsontext.AppendQuote(nil, c.Model)
		if s.model.end > 0 {
			edits = append(edits, edit{s.model, name})
		} else {
			added = append(append(added, `"model":`...), name...)
		}
	}
	edits, missing := r.capEdits(edits, c.Cap)
	if missing {
		if len(added) > 0 {
			added = append(added, ',')
		}
		added = strconv.AppendInt(append(append(append(added, '"'), capName(s.kind)...), `":`...), c.Cap, 10)
	}
	if c.CacheSalt != "" && salted(s.kind) {
		salt, _ := jsontext.AppendQuote(nil, c.CacheSalt)
		switch {
		case s.nullSalt:
			edits = append(edits, edit{s.salt, salt})
		case s.salt.end == 0:
			if len(added) > 0 {
				added = append(added, ',')
			}
			added = append(append(added, `"cache_salt":`...), salt...)
		}
	}
	if len(added) > 0 {
		if !s.empty {
			added = append(added, ',')
		}
		edits = append(edits, edit{span{s.open, s.open}, added})
	}
	if !c.IncludeUsage || !r.Stream || r.WantsUsage || s.kind != Chat && s.kind != Completion {
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

func (r *Request) formEdits(edits []edit, body []byte, c Changes) []edit {
	s := &r.spans
	delimiter := body[:bytes.IndexByte(body, '\n')+1]
	field := func(name, value string) edit {
		text := string(delimiter) + "Content-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
		return edit{text: []byte(text)} // before everything else
	}
	if c.Model != "" && c.Model != r.Model {
		if s.model.end > 0 {
			edits = append(edits, edit{s.model, []byte(c.Model)})
		} else {
			edits = append(edits, field("model", c.Model))
		}
	}
	edits, missing := r.capEdits(edits, c.Cap)
	if missing {
		edits = append(edits, field(capName(s.kind), strconv.FormatInt(c.Cap, 10)))
	}
	if !c.IncludeUsage || !r.Stream || r.WantsUsage {
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
