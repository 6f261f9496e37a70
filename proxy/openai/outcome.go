package openai

import "bytes"

// top is what the top of an event or of a response body says: raw JSON values, nil
// where a member is missing or null.
type top struct {
	typ, object, id, usage, err []byte
	choices, delta              []byte
	response, message, code     []byte
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

// carried is what a chunk carries of an answer: tokens, at least, and bytes of text.
type carried struct{ tokens, bytes int64 }

func (c *carried) add(d carried) {
	c.tokens += d.tokens
	c.bytes += d.bytes
}

// ofText is what a JSON string carries.
func ofText(raw []byte) carried { return ofBytes(len(raw) - 2) }

func ofBytes(n int) carried {
	return carried{tokens: (int64(n) + deltaBytes - 1) / deltaBytes, bytes: int64(n)}
}

// ofChoices is what the choices of a chunk carry.
func ofChoices(choices []byte) (n carried) {
	for a := (array{b: choices}); a.next(); {
		for c := (object{b: a.value}); c.next(); {
			switch string(c.name) {
			case "delta":
				n.add(ofDelta(c.value))
			case "text":
				if isString(c.value) {
					n.add(ofText(c.value))
				}
			}
		}
	}
	return n
}

// ofDelta is what one delta carries: text of whatever sort, or calls of tools.
func ofDelta(delta []byte) (n carried) {
	for d := (object{b: delta}); d.next(); {
		switch string(d.name) {
		case "content", "reasoning_content", "reasoning", "refusal", // OpenAI and vLLM
			"text", "thinking", "partial_json": // Anthropic
			if isString(d.value) {
				n.add(ofText(d.value))
			}
		case "tool_calls":
			for a := (array{b: d.value}); a.next(); {
				n.add(ofCall(a.value))
			}
		case "function_call":
			if d.value[0] == '{' {
				n.add(ofCall(d.value))
			}
		}
	}
	return n
}

// ofCall is what a call of a tool carries, a token at least, beside its name.
func ofCall(call []byte) carried {
	n := ofArguments(call)
	n.tokens = max(1, n.tokens)
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
