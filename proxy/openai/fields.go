package openai

import (
	"bytes"
	"cmp"
	"fmt"
)

// spans are the offsets that Pieces needs; 0 stands for "not there", since no value of a
// member starts at 0.
type spans struct {
	kind  Kind
	form  bool // a multipart form
	open  int  // behind the brace that opens the body
	empty bool

	model                  span
	stream                 span
	options                span // stream_options, when it is an object or null
	usage                  span // …include_usage
	continuous             span // …continuous_usage_stats
	noOptions, nullOptions bool // stream_options is {}; is null

	salt     span // cache_salt
	nullSalt bool // …is null

	caps [maxCaps]capSpan // those that the route obeys

	lead  [leads]span // what is rendered before the conversation; see Prefix
	turns span        // the conversation, or the prompt
}

// maxCaps is max_tokens and max_completion_tokens.
const maxCaps = 2

// capSpan is where a cap stands.
type capSpan struct {
	span
	value int64 // -1: null, or an empty field of a form
}

// cap notes where a cap of that value stands.
func (s *spans) cap(at span, value int64) {
	for i := range s.caps {
		if s.caps[i].end == 0 {
			s.caps[i] = capSpan{at, value}
			return
		}
	}
}

type span struct{ start, end int }

// top reads a member of the body itself.
func (m *meter) top(name []byte, v int) int {
	m.field = clip(name)
	r := &m.req
	switch string(name) {
	case "model":
		end := m.identity(v, &r.Model)
		r.HasModel, r.spans.model = r.Model != "", span{v, end}
		return end
	case "user":
		return m.identity(v, &r.User)
	case "previous_response_id":
		m.looksUp(name, v)
		return m.identity(v, &r.PreviousResponseID)
	case "stream":
		end := m.flag(v, m.field, &r.Stream)
		r.spans.stream = span{v, end}
		return end
	case "background":
		return m.flag(v, m.field, &r.Background)
	case "stream_options":
		return m.options(v)
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		if !capsOutput(m.kind, string(name)) {
			var ignored int64 // by the upstream, too: a cap that binds nothing must not lower the estimate
			return m.number(v, &ignored, maxExact)
		}
		value := int64(-1)
		end := m.number(v, &value, maxExact)
		r.spans.cap(span{v, end}, value)
		r.MaxOutput, r.Bounds.Uncapped = max(r.MaxOutput, value), value < 0
		return end
	case "min_tokens":
		return m.number(v, &r.Bounds.MinOutput, maxExact)
	case "echo":
		if m.kind == Completion {
			return m.flag(v, m.field, &r.Bounds.Echo)
		}
	case "thinking":
		return m.thinking(v)
	case "n":
		return m.number(v, &m.n, maxSequences)
	case "best_of":
		return m.number(v, &m.bestOf, maxSequences)
	case "temperature", "seed", "store", "cache_salt":
		end := m.value(v, m.placeOf(name)) // whatever it is, the server judges it
		m.setting(name, span{v, end})
		return end
	case "metadata":
		if m.kind == Message {
			end := m.value(v, m.placeOf(name))
			m.endUser(m.body[v:end])
			return end
		}
	}
	if m.kind == Response && string(name) == "request_id" && m.body[v] != 'n' {
		return m.fail(v, m.field, "would name the stored response, perhaps another caller's; leave it out")
	}
	if folds(name) {
		return m.fail(v, m.field, "differs from a known field in case only; write the name in lower case")
	}
	m.reaches(name, v)
	m.hides(name, v)
	m.looksUp(name, v)
	at := m.placeOf(name)
	if c := m.body[v]; at >= inPrompt && at <= inEmbeds && c != '[' {
		if ids := false; c == '"' || c == '{' {
			m.input(v, at, &ids)
		}
	}
	end := m.value(v, at)
	if at == inQuery {
		m.asked += int64(end - v)
	}
	return end
}

// endUser reads of Anthropic's metadata whom the request is for. Nothing of it is refused.
func (m *meter) endUser(metadata []byte) {
	for o := (object{b: metadata}); metadata[0] == '{' && o.next(); {
		switch {
		case string(o.name) != "user_id" || isNull(o.value):
		case len(o.value) > maxIdentity+2:
			m.req.Outside = cmp.Or(m.req.Outside, "metadata.user_id")
		case isString(o.value):
			m.req.EndUser = unquote(o.value)
		default:
			m.req.EndUser = string(o.value)
		}
	}
}

// folds tells whether name differs in case only from one whose meaning the meter knows:
// some servers would take it for that one. Plain lower-case names, which nearly all are,
// do not reach the comparison.
func folds(name []byte) bool {
	if isPlain(name) {
		return false
	}
	for _, known := range [...]string{
		"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens",
		"n", "best_of", "user", "previous_response_id", "background", "min_tokens",
	} {
		if bytes.EqualFold(name, []byte(known)) {
			return true
		}
	}
	return false
}

// isPlain tells whether name is ASCII without capitals.
func isPlain(name []byte) bool {
	for _, c := range name {
		if c >= 0x80 || c >= 'A' && c <= 'Z' {
			return false
		}
	}
	return true
}

// placeOf says what an uninterpreted member of the top level holds. Unknown fields
// count as text: too high an estimate is settled back, too low a one lets a caller pass.
func (m *meter) placeOf(name []byte) place {
	switch string(name) {
	case "messages":
		return inMessage
	case "input":
		if m.kind == Response {
			return inMessage
		}
		return inPrompt
	case "system", "instructions":
		return inContent
	case "prompt", "tokens", "token_ids", "prompt_token_ids", "text_2", "items", "data_2":
		return inPrompt
	case "documents":
		if m.kind == Pooling {
			return inPrompt
		}
		return inSchema
	case "query", "queries", "text_1", "data_1":
		return inQuery
	case "prompt_embeds":
		return inEmbeds
	case "tools", "functions", "response_format", "structured_outputs", "guided_json", "guided_grammar",
		"output_config", "text", "chat_template_kwargs":
		return inSchema
	case "metadata", "request_id", "cache_salt", "prompt_cache_key", "safety_identifier", "service_tier",
		"encoding_format", "logit_bias", "kv_transfer_params", "mm_processor_kwargs", "tool_choice",
		"reasoning", "reasoning_effort", "include", "truncation", "vllm_xargs":
		return inSkip
	}
	return inText
}

// reaches notes the fields by which a request takes more than its body shows.
func (m *meter) reaches(name []byte, v int) {
	r, c := &m.req, m.body[v]
	switch string(name) {
	case "chat_template", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs", "conversation":
		if c != 'n' {
			r.Bounds.Beyond = string(name)
		}
	case "prompt": // of a response: one that the server has stored
		if c == '{' && m.kind == Response {
			r.Bounds.Beyond = "prompt"
		}
	case "web_search_options", "mcp_servers", "container":
		if c != 'n' {
			r.Bounds.Rounds = string(name)
		}
	case "functions":
		r.Bounds.Tools = c != 'n'
	case "tools":
		r.Bounds.Tools = c != 'n'
		for a := (array{b: m.body[v:skipValue(m.body, v)]}); a.next(); {
			for o := (object{b: a.value}); o.next(); {
				mayBeType := string(o.name) == "type" || bytes.IndexByte(o.name, '\\') >= 0
				if mayBeType && string(o.value) != `"function"` && string(o.value) != `"custom"` && !isNull(o.value) {
					r.Bounds.Rounds = "tools"
				}
			}
		}
	}
}

// hides notes the fields by which a server generates more than it sends: thoughts and beams that it keeps, special
// tokens, which are no text, in any number, and calls of tools, of which parsers swallow what they do not understand.
// best_of is finish's.
func (m *meter) hides(name []byte, v int) {
	b, c := &m.req.Bounds, m.body[v]
	hidden := false
	switch string(name) {
	case "stop", "stop_sequences": // held back by characters
		if c != 'n' {
			b.Held = max(b.Held, runeMost*int64(skipValue(m.body, v)-v))
		}
	case "include_reasoning", "stream_reasoning", "detokenize":
		hidden = c != 'n' && c != 't'
	case "use_beam_search", "ignore_eos":
		hidden = c != 'n' && c != 'f'
	case "logit_bias", "allowed_token_ids", "logits_processors", "custom_logit_processor", "vllm_xargs", "reasoning", "tools", "functions":
		hidden = c != 'n'
	}
	if hidden {
		b.Hidden = string(name)
	}
}

// thinking reads Anthropic's: what is thought must fit into the answer.
func (m *meter) thinking(v int) int {
	end := m.value(v, inSkip)
	if m.err != nil || m.body[v] != '{' {
		return end
	}
	for o := (object{b: m.body[v:end]}); o.next(); {
		if string(o.name) == "display" {
			m.req.Bounds.Hidden = "thinking"
		}
		if string(o.name) != "budget_tokens" {
			continue
		}
		if x, problem := integer(o.value); problem == "" && x <= maxExact {
			m.req.Bounds.MinOutput = max(m.req.Bounds.MinOutput, x+1)
		}
	}
	return end
}

// identity reads a string or null.
func (m *meter) identity(v int, into *string) int {
	end := skipValue(m.body, v)
	switch raw := m.body[v:end]; {
	case isNull(raw):
	case !isString(raw):
		return m.fail(v, m.field, "must be a string")
	case len(raw) > maxIdentity+2:
		return m.fail(v, m.field, fmt.Sprintf("must be at most %d bytes long", maxIdentity))
	default:
		*into = unquote(raw)
	}
	return end
}

// flag reads true, false or null. Servers also coerce 1 and "true", each in its own way.
func (m *meter) flag(v int, field string, into *bool) int {
	end := skipValue(m.body, v)
	switch string(m.body[v:end]) {
	case "true":
		*into = true
	case "false", "null":
	default:
		return m.fail(v, field, "must be true or false, without quotes")
	}
	return end
}

// number reads a whole number or null and raises into to it. Servers also coerce "16"
// and true, each in its own way.
func (m *meter) number(v int, into *int64, limit int64) int {
	c := m.body[v]
	if c == 'n' {
		return skipScalar(m.body, v)
	}
	if c != '-' && (c < '0' || c > '9') {
		return m.fail(v, m.field, "must be a whole number, without quotes")
	}
	end := skipScalar(m.body, v)
	x, problem := integer(m.body[v:end])
	if problem != "" {
		return m.fail(v, m.field, problem)
	}
	if x > limit {
		return m.fail(v, m.field, fmt.Sprintf("must be at most %d", limit))
	}
	*into = max(*into, x)
	return end
}

// isWhole says whether raw is a whole number: what servers take for a seed.
func isWhole(raw []byte) bool {
	raw = bytes.TrimPrefix(raw, []byte("-"))
	return len(raw) > 0 && !bytes.ContainsFunc(raw, func(c rune) bool { return c < '0' || c > '9' })
}

// setting notes a member that the upstream may judge in peace: it costs nothing.
func (m *meter) setting(name []byte, at span) {
	r, raw := &m.req, m.body[at.start:min(at.end, len(m.body))]
	switch string(name) {
	case "temperature":
		r.Sampling.Temperature, r.Sampling.HasTemperature = temperature(raw), !isNull(raw)
	case "seed":
		r.Sampling.HasSeed = isWhole(raw) && (m.kind == Chat || m.kind == Completion || m.kind == Response)
	case "store":
		switch {
		case string(raw) == "false":
			r.Store, r.HasStore = false, true
		case !isNull(raw): // true, or what a server may take for it
			r.Store, r.HasStore = true, true
		}
	case "cache_salt":
		r.spans.salt, r.spans.nullSalt = at, isNull(raw)
	}
}

// options reads stream_options.
func (m *meter) options(v int) int {
	s := &m.req.spans
	switch m.body[v] {
	case 'n':
		s.options, s.nullOptions = span{v, skipScalar(m.body, v)}, true
		return s.options.end
	case '{':
		s.noOptions = m.body[skipSpace(m.body, v+1)] == '}'
		end := m.value(v, inOptions)
		s.options = span{v, end}
		return end
	}
	return m.fail(v, m.field, "must be an object")
}

// option reads a member of stream_options.
func (m *meter) option(name []byte, v int) int {
	r := &m.req
	switch string(name) {
	case "include_usage":
		end := m.flag(v, "stream_options.include_usage", &r.WantsUsage)
		r.spans.usage = span{v, end}
		return end
	case "continuous_usage_stats":
		end := m.flag(v, "stream_options.continuous_usage_stats", &r.Continuous)
		r.spans.continuous = span{v, end}
		return end
	}
	return m.value(v, inSkip)
}

// capsOutput says whether a route of this kind obeys a cap of this name.
func capsOutput(kind Kind, name string) bool {
	switch kind {
	case Completion, Message:
		return name == "max_tokens"
	case Response:
		return name == "max_output_tokens"
	default:
		return name != "max_output_tokens"
	}
}
