package openai

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/go-json-experiment/json/jsontext"
)

// Bounds of a request body. Python servers give up on nesting far earlier than Go does,
// and differently from one parser to the next.
const (
	maxDepth     = 512
	maxSequences = 1024 // of n and of best_of
	maxIdentity  = 1024 // bytes of model, user and previous_response_id
	maxLabel     = 64   // a role, type or id up to this long is not counted as text
	indentWidth  = 4    // bytes by which a level of a structure is indented, at most
	renderedMost = 4    // tokens that a byte of a structure becomes at most: 1e15 is printed in full
	runeMost     = 4    // bytes of a character at most
	embedBytes   = 1024 // base64 bytes of prompt_embeds that make a token, for a narrow model
)

// Meter reads a JSON body once for validity and once for what it costs, both in linear
// time. It fails with *InputError for anything that two JSON parsers could read
// differently, and for values of the fields it needs that the upstream would refuse or
// coerce. It keeps no reference to body. Memory beside the body is bounded by maxNames
// and by the names written with escapes in the objects open at one time.
func Meter(kind Kind, body []byte) (Request, error) {
	m := meter{kind: kind, body: body, req: Request{MaxOutput: -1, Store: kind == Response}}
	m.names.body = body
	start, err := validate(body)
	if err != nil {
		return Request{}, err
	}
	if body[start] != '{' {
		return Request{}, &InputError{Offset: int64(start), Problem: "the body must be a JSON object"}
	}
	m.req.spans.kind = kind
	m.req.spans.open = start + 1
	m.req.spans.empty = body[skipSpace(body, start+1)] == '}'
	if m.value(start, inTop); m.err != nil {
		return Request{}, m.err
	}
	m.finish()
	return m.req, nil
}

// validate holds the body against RFC 8259 (syntax, UTF-8, surrogates, one value) and
// returns where its value starts. Duplicate names are found by the meter, in less memory.
func validate(body []byte) (start int, err error) {
	if len(body) > math.MaxInt32 {
		return 0, &InputError{Offset: math.MaxInt32, Problem: "the body is longer than 2 GiB"}
	}
	start = skipSpace(body, 0)
	if start == len(body) {
		return 0, &InputError{Offset: int64(start), Problem: "the body is empty; send a JSON object"}
	}
	dec := jsontext.NewDecoder(bytes.NewBuffer(body), jsontext.AllowDuplicateNames(true))
	if _, err = dec.ReadValue(); err == nil {
		end := int(dec.InputOffset())
		if end = skipSpace(body, end); end < len(body) {
			return 0, &InputError{Offset: int64(end), Problem: "bytes follow the JSON object; remove them"}
		}
		return start, nil
	}
	var syntax *jsontext.SyntacticError
	if !errors.As(err, &syntax) {
		return 0, &InputError{Offset: int64(len(body)), Problem: "the body is not valid JSON: " + err.Error()}
	}
	bad := &InputError{Offset: syntax.ByteOffset, Problem: "the body is not valid JSON: " + syntax.Err.Error()}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		bad.Problem = "the JSON ends too early; send the whole body"
	}
	for field := range syntax.JSONPointer.Tokens() {
		bad.Field = clip([]byte(field))
		break
	}
	return 0, bad
}

// clip shortens what a client wrote to what an error message should repeat.
func clip(s []byte) string {
	if len(s) > maxLabel {
		return string(bytes.ToValidUTF8(s[:maxLabel], nil)) + "…"
	}
	return string(s)
}

// place is what a value stands for.
type place uint8

const (
	inTop     place = iota
	inSkip          // never reaches the prompt, or is billed flat
	inText          // strings are text
	inSchema        // rendered into the prompt as JSON: names and numbers are text, too
	inMessage       // a message or item, or an array of them
	inContent       // a string, a content part, or an array of parts
	inSource        // the source of an Anthropic image or document
	inPrompt        // strings, token ids, or arrays of either
	inQuery         // like inPrompt: what is paired with each document
	inEmbeds        // base64 tensors
	inOptions       // stream_options
)

// meter walks a body that validate has accepted, so only meanings can be wrong in it.
type meter struct {
	kind  Kind
	body  []byte
	req   Request
	names nameSet
	field string // the member of the top level that is being read
	depth int
	err   *InputError

	n, bestOf           int64
	queries, queryBytes int64
	prompts             int64

	// For textMost.
	media    int64 // bytes of the body that are no text
	asked    int64 // bytes of the query that is paired with each document
	rendered int64 // bytes of the structures that templates render anew
	indents  int64 // bytes that they may be indented with
	inside   bool  // such a structure
}

func (m *meter) fail(at int, field, problem string) int {
	if m.err == nil {
		m.err = &InputError{Offset: int64(at), Field: field, Problem: problem}
	}
	return len(m.body)
}

// value reads the value at i and returns the offset behind it.
func (m *meter) value(i int, at place) int {
	switch m.body[i] {
	case '{', '[':
		if at == inSchema && !m.inside {
			m.inside = true
			end := m.structure(i, at)
			m.inside = false
			m.rendered += int64(end - i)
			return end
		}
		return m.structure(i, at)
	case '"':
		end := skipString(m.body, i)
		m.text(m.body[i+1:end-1], at)
		return end
	}
	end := skipScalar(m.body, i)
	switch at {
	case inSchema:
		m.req.InputBytes += int64(end - i)
	case inPrompt, inQuery, inEmbeds: // an id
		m.media += int64(end - i)
	}
	return end
}

// structure reads the object or array at i.
func (m *meter) structure(i int, at place) int {
	if m.body[i] == '[' {
		return m.array(i, at)
	}
	if at == inPrompt || at == inQuery {
		at = inMessage
	}
	if at == inMessage {
		m.req.Bounds.Messages++
	}
	return m.object(i, at)
}

// text counts the string s, given as it is written between its quotes.
func (m *meter) text(s []byte, at place) {
	switch at {
	case inSkip:
	case inEmbeds:
		m.req.InputTokens += int64(len(s))/embedBytes + 1
	case inQuery:
		m.queryBytes += decodedLen(s)
	default:
		m.req.InputBytes += decodedLen(s)
	}
}

func (m *meter) array(i int, at place) int {
	if m.depth++; m.depth > maxDepth {
		return m.fail(i, m.field, fmt.Sprintf("nested deeper than %d levels", maxDepth))
	}
	i = skipSpace(m.body, i+1)
	ids := false
	m.indent(at)
	for m.err == nil && m.body[i] != ']' {
		m.indent(at)
		if at >= inPrompt && at <= inEmbeds {
			m.input(i, at, &ids)
		}
		i = skipSpace(m.body, m.value(i, at))
		if m.err == nil && m.body[i] == ',' {
			i = skipSpace(m.body, i+1)
		}
	}
	m.depth--
	return i + 1
}

// input counts the value at i, which stands where a prompt may stand. The ids of one
// array are one prompt.
func (m *meter) input(i int, at place, ids *bool) {
	count := &m.prompts
	if at == inQuery {
		count = &m.queries
	}
	switch c := m.body[i]; {
	case c == '[' || c == 'n' || c == 't' || c == 'f':
	case c == '"' || c == '{':
		*count++
	default:
		m.req.InputTokens++
		if !*ids {
			*ids = true
			*count++
		}
	}
}

func (m *meter) object(i int, at place) int {
	if m.depth++; m.depth > maxDepth {
		return m.fail(i, m.field, fmt.Sprintf("nested deeper than %d levels", maxDepth))
	}
	sc := m.names.open()
	var p part
	i = skipSpace(m.body, i+1)
	m.indent(at)
	for m.body[i] != '}' {
		m.indent(at)
		end := skipString(m.body, i)
		if len(m.names.names) == maxNames {
			return m.fail(i, m.field, fmt.Sprintf("more than %d names in one object", maxNames))
		}
		name, duplicate := m.names.add(&sc, i+1, end-1)
		if duplicate {
			return m.fail(i, m.path(at, name), "the name occurs twice in one object; send it once")
		}
		v := skipSpace(m.body, skipSpace(m.body, end)+1)
		i = skipSpace(m.body, m.member(at, &p, name, v))
		if m.err != nil {
			return i
		}
		if m.body[i] == ',' {
			i = skipSpace(m.body, i+1)
		}
	}
	m.names.close(&sc)
	p.count(m, at)
	m.depth--
	return i + 1
}

// indent counts what may be put before an element of a structure.
func (m *meter) indent(at place) {
	if at == inSchema {
		m.indents += int64(2 + indentWidth*m.depth)
	}
}

// path names a member for an error message.
func (m *meter) path(at place, name []byte) string {
	if at == inTop {
		return clip(name)
	}
	return m.field + "…" + clip(name)
}

// member reads the value at v of the member called name.
func (m *meter) member(at place, p *part, name []byte, v int) int {
	switch at {
	case inTop:
		end := m.top(name, v)
		if m.err == nil {
			m.prompt(name, v, end)
		}
		return end
	case inOptions:
		return m.option(name, v)
	case inMessage:
		m.item(p, name, v)
		switch string(name) {
		case "content", "summary", "output":
			return m.value(v, inContent)
		case "arguments": // JSON in a string: templates may read it and print it anew
			if m.body[v] == '"' {
				m.rendered += int64(skipString(m.body, v) - v)
			}
		}
		return m.label(name, v, inSchema)
	case inContent:
		return m.part(p, name, v)
	case inSource:
		return m.source(p, name, v)
	case inSchema:
		m.req.InputBytes += int64(len(name))
	}
	return m.value(v, at)
}

// label reads a member whose short strings (roles, types, ids) are no text of their own.
func (m *meter) label(name []byte, v int, at place) int {
	switch string(name) {
	case "role", "type", "id", "call_id", "tool_call_id", "tool_use_id", "item_id", "status", "uuid",
		"media_type", "format", "detail":
		if end := skipValue(m.body, v); end-v <= maxLabel && m.body[v] == '"' {
			return end
		}
	}
	return m.value(v, at)
}

// finish derives what needs the whole body.
func (m *meter) finish() {
	r := &m.req
	r.Inputs = max(m.prompts, m.queries, 1)
	r.InputBytes += m.queryBytes
	if m.queries == 1 && m.prompts > 1 { // a cross-encoder reads the query with each document
		r.InputBytes += m.queryBytes * (m.prompts - 1)
	}
	r.Sequences, r.Sampling.N = max(m.n, m.bestOf, 1), max(m.n, 1)
	if m.bestOf > max(m.n, 1) {
		r.Bounds.Hidden = "best_of"
	}
	if m.kind == Completion {
		r.Sequences *= r.Inputs
	}
	r.Bounds.Text = m.textMost()
}

// textMost bounds the tokens that the text of the body can become. A token is a byte at
// least: so it is for byte-level tokenizers, for those that fall back to bytes and for
// WordPiece, if none of them first spells ligatures out. The body as it was sent is never
// shorter than what it decodes to. All of it counts, names, punctuation and what may not
// even be prompt, but for the payload of media and for ids, which are counted apart. What
// templates print as JSON or as markup of their own (tools, schemas, arguments) counts
// several times, and with an indentation of each of its elements.
func (m *meter) textMost() int64 {
	n := int64(len(m.body)) - m.media + (renderedMost-1)*m.rendered + m.indents
	if m.queries > 0 && m.queries < m.prompts {
		n += m.asked * (m.prompts - m.queries)
	}
	return n
}
