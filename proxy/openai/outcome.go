package openai

import "bytes"

// top is what the top of an event or of a response body says: raw JSON values, nil
// where a member is missing or null.
type top struct {
	typ, object, id, usage, err []byte
	choices, delta              []byte
	response, message, code     []byte
	block                       []byte // content_block of Anthropic's
}

// slot gives the place of the member called name, nil for those of no interest.
func (t *top) slot(name []byte) *[]byte {
	switch string(name) {
	case "type":
		return &t.typ
	case "object":
		return &t.object
	case "id":
		return &t.id
	case "usage":
		return &t.usage
	case "error":
		return &t.err
	case "choices":
		return &t.choices
	case "delta":
		return &t.delta
	case "response":
		return &t.response
	case "message":
		return &t.message
	case "code":
		return &t.code
	case "content_block":
		return &t.block
	}
	return nil
}

// parse fills t from a whole object and tells whether it is one.
func (t *top) parse(b []byte) bool {
	o := object{b: b}
	for o.next() {
		if s := t.slot(o.name); s != nil && !isNull(o.value) {
			*s = o.value
		}
	}
	return !o.bad
}

// outcome is what has been learnt of an answer, streamed or not.
type outcome struct {
	kind    Kind
	report  report
	failure *Failure
	id      string
}

// learn takes what t says of usage, failure and identity. A usage that cannot be right
// is as good as none: an earlier one stays.
func (o *outcome) learn(t *top) {
	if t.usage != nil {
		_ = o.report.parse(t.usage)
	}
	if t.id != nil && o.id == "" && o.kind == Response && len(t.id) <= maxIdentity {
		o.id = unquote(t.id)
	}
	switch {
	case o.failure != nil:
	case t.err != nil:
		o.failure = failure(t.err)
	case string(t.typ) == `"error"`, string(t.object) == `"error"`: // the error itself, unwrapped
		o.failure = &Failure{}
		o.failure.member([]byte("message"), t.message)
		o.failure.member([]byte("type"), t.typ)
		o.failure.member([]byte("code"), t.code)
	}
}

// failure reads an error object, or a plain string in its place.
func failure(raw []byte) *Failure {
	f := &Failure{}
	if isString(raw) {
		f.Message = unquote(raw)
		return f
	}
	for o := (object{b: raw}); o.next(); {
		f.member(o.name, o.value)
	}
	if *f == (Failure{}) {
		f.Message = clip(raw)
	}
	return f
}

func (f *Failure) member(name, value []byte) {
	if value == nil || isNull(value) {
		return
	}
	switch string(name) {
	case "message":
		f.Message = unquote(value)
	case "type":
		f.Type = unquote(value)
	case "code":
		f.Code = unquote(value)
	}
}

// deltaBytes is how many bytes of answer make at least one token: a chunk is one token,
// normally; one that carries a lot at once is surely more.
const deltaBytes = 64

// carried is what a chunk carries of an answer: tokens, at least and at most, and bytes of text; and whether a choice ends.
type carried struct {
	tokens, bytes, most int64
	ends                bool
}

func (c *carried) add(d carried) {
	c.tokens += d.tokens
	c.bytes += d.bytes
	c.most += d.most
	c.ends = c.ends || d.ends
}

// ofText is what a JSON string carries.
func ofText(raw []byte) carried { return ofBytes(len(raw) - 2) }

func ofBytes(n int) carried {
	return carried{tokens: (int64(n) + deltaBytes - 1) / deltaBytes, bytes: int64(n), most: int64(n)}
}

// ofChoices is what the choices of a chunk carry. One without text is a token at most all the same: that of a special
// one is empty.
func ofChoices(choices []byte) (n carried) {
	for a := (array{b: choices}); a.next(); {
		n.most++
		for c := (object{b: a.value}); c.next(); {
			switch string(c.name) {
			case "delta":
				n.add(ofDelta(c.value))
			case "text":
				if isString(c.value) {
					n.add(ofText(c.value))
				}
			case "finish_reason":
				n.ends = n.ends || isString(c.value)
			case "message": // of servers that make no deltas
				n.most += leaves(c.value, 0)
			}
		}
	}
	return n
}

// leaves bounds the tokens of all text in a value, whatever it stands for: a byte of a string at least makes one. Of what
// stands around it, names and types are the server's.
func leaves(v []byte, depth int) (n int64) {
	switch {
	case depth > maxLeaves:
		return int64(len(v))
	case v[0] == '{':
		for o := (object{b: v}); o.next(); {
			switch string(o.name) {
			case "role", "type", "id", "index", "stop_reason", "stop_sequence":
			default:
				n += leaves(o.value, depth+1)
			}
		}
	case v[0] == '[':
		for a := (array{b: v}); a.next(); {
			n += leaves(a.value, depth+1)
		}
	case isString(v):
		return int64(len(v) - 2)
	case !isNull(v):
		return int64(len(v))
	}
	return n
}

// maxLeaves is how deep leaves looks; what lies deeper counts whole.
const maxLeaves = 16

// ofDelta is what one delta carries: text of whatever sort, or calls of tools.
func ofDelta(delta []byte) (n carried) {
	for d := (object{b: delta}); d.next(); {
		switch string(d.name) {
		case "content", "reasoning_content", "reasoning", "refusal", // OpenAI and vLLM
			"text", "thinking", "partial_json": // Anthropic
			if isString(d.value) {
				n.add(ofText(d.value))
			} else {
				n.most += leaves(d.value, 0)
			}
		case "tool_calls":
			for a := (array{b: d.value}); a.next(); {
				n.add(ofCall(a.value))
			}
		case "function_call":
			if d.value[0] == '{' {
				n.add(ofCall(d.value))
			}
		case "role", "type", "stop_reason", "stop_sequence":
		default:
			n.most += leaves(d.value, 0)
		}
	}
	return n
}

// ofCall is what a call of a tool carries, a token at least, beside its name.
func ofCall(call []byte) carried {
	n := ofArguments(call)
	n.tokens, n.most = max(1, n.tokens), leaves(call, 0)
	return n
}

// ofArguments reads {"function": {"arguments": "…"}} and {"arguments": "…"}.
func ofArguments(call []byte) (n carried) {
	for c := (object{b: call}); c.next(); {
		switch string(c.name) {
		case "function":
			n.add(ofArguments(c.value))
		case "arguments":
			if isString(c.value) {
				n.add(ofText(c.value))
			}
		}
	}
	return n
}

func isEmptyArray(v []byte) bool {
	return len(v) >= 2 && v[0] == '[' && len(bytes.TrimSpace(v[1:len(v)-1])) == 0
}
