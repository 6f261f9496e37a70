package openai

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// spoken is a choice of an answer, raw. What is nil is not there.
type spoken struct {
	role, content, refusal      []byte // raw strings or null
	reasoning, reasoningContent []byte
	calls                       []calling
	function                    *calling
	text                        []byte // of a completion

	logprobs       []byte
	finish         []byte
	stopName       string
	stop           []byte
	vllm, refusing bool // it has a stop_reason; a refusal, null or not
}

// calling is a call of a tool, raw strings.
type calling struct{ id, typ, name, arguments []byte }

// says tells whether a value is a string that is not empty.
func says(v []byte) bool { return isString(v) && len(v) > 2 }

// replayChoices writes a chat or a completion.
func replayChoices(b []byte, kind Kind, body []byte, o ReplayOptions) ([]byte, error) {
	top, err := readMembers(body, "the answer")
	if err != nil {
		return nil, err
	}
	for _, m := range top {
		switch m.name {
		case "id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint", "metrics":
		default:
			if err := unknownMember("the answer", m.name, m.value); err != nil {
				return nil, err
			}
		}
	}
	object := map[Kind]string{Chat: `"chat.completion"`, Completion: `"text_completion"`}[kind]
	list, ok := elements(top.get("choices"))
	usage := top.get("usage")
	switch {
	case string(top.get("object")) != object || !top.has("id") || !top.has("created") || !top.has("model"):
		return nil, errors.New("the answer is of another kind, or has no id, time or model")
	case !ok || len(list) == 0 || len(list) > maxChoices:
		return nil, errors.New("the answer has no choices, or too many")
	case o.IncludeUsage && (usage == nil || isNull(usage)):
		return nil, errors.New("the answer has no usage, which is asked for")
	case o.IncludeUsage && o.Continuous:
		return nil, errors.New("the usage is asked for with every chunk, which nobody remembers")
	}
	choices := make([]spoken, len(list))
	for i, v := range list {
		if choices[i], err = readSpoken(kind, i, v); err != nil {
			return nil, err
		}
	}
	w := newChunkWriter(b, kind, top, choices[0].vllm)
	for i := range choices {
		if kind == Chat {
			w.opening(i, &choices[i])
		}
	}
	for i := range choices {
		w.choice(i, &choices[i])
	}
	if o.IncludeUsage {
		w.b = appendMember(append(append(w.b, w.head...), `],`...), "usage", usage)
		for _, name := range w.late {
			if v := top.get(name); v != nil && !isNull(v) {
				w.b = appendMember(append(w.b, ','), name, v)
			}
		}
		w.b = append(w.b, "}\n\n"...)
	}
	return append(w.b, "data: [DONE]\n\n"...), nil
}

// readSpoken reads the choice of an index.
func readSpoken(kind Kind, index int, v []byte) (c spoken, err error) {
	m, err := readMembers(v, "a choice")
	if err != nil {
		return c, err
	}
	for _, f := range m {
		switch name := f.name; {
		case name == "index" && smallIndex(f.value, maxChoices) == index, name == "message" && kind == Chat:
		case name == "text" && kind == Completion:
			c.text = f.value
		case name == "logprobs":
			c.logprobs = f.value
		case name == "finish_reason":
			c.finish = f.value
		case (name == "stop_reason" || name == "matched_stop") && c.stopName == "":
			c.stopName, c.stop, c.vllm = name, f.value, name == "stop_reason"
		default:
			if name == "index" {
				return c, errors.New("the choices are not in their order")
			}
			if err = unknownMember("a choice", name, f.value); err != nil {
				return c, err
			}
		}
	}
	switch {
	case !m.has("index") || !isString(c.finish):
		return c, errors.New("a choice has no index, or does not say why it ended")
	case kind == Completion && !isString(c.text):
		return c, errors.New("a choice has no text")
	case kind == Chat:
		err = c.message(m.get("message"))
	}
	return c, err
}

// message reads the message of a chat's choice.
func (c *spoken) message(v []byte) error {
	m, err := readMembers(v, "a message")
	if err != nil {
		return err
	}
	for _, f := range m {
		into := map[string]*[]byte{
			"content": &c.content, "refusal": &c.refusal, "reasoning": &c.reasoning, "reasoning_content": &c.reasoningContent, "role": &c.role,
		}[f.name]
		switch {
		case into != nil && (isString(f.value) || isNull(f.value)):
			*into = f.value
		case f.name == "tool_calls" && f.value[0] == '[':
			err = c.toolCalls(f.value)
		case f.name == "function_call" && f.value[0] == '{':
			c.function = &calling{}
			err = c.function.body(f.value, "arguments")
		case into != nil:
			err = fmt.Errorf("%s of a message is not a string", f.name)
		default:
			err = unknownMember("a message", f.name, f.value)
		}
		if err != nil {
			return err
		}
	}
	if !says(c.role) {
		return errors.New("a message has no role")
	}
	c.refusing = c.refusal != nil
	return nil
}

// toolCalls reads those of a message.
func (c *spoken) toolCalls(v []byte) error {
	list, _ := elements(v)
	if len(list) > maxCalls {
		return errors.New("a message has too many tool calls")
	}
	c.calls = make([]calling, len(list))
	for i, v := range list {
		m, err := readMembers(v, "a tool call")
		if err != nil {
			return err
		}
		t := &c.calls[i]
		t.id, t.typ = m.get("id"), m.get("type")
		for _, f := range m {
			switch {
			case f.name == "id", f.name == "type", f.name == "index" && smallIndex(f.value, maxCalls) == i:
			case f.name == "function" && string(t.typ) == `"function"`:
				err = t.body(f.value, "arguments")
			case f.name == "custom" && string(t.typ) == `"custom"`:
				err = t.body(f.value, "input")
			default:
				err = unknownMember("a tool call", f.name, f.value)
			}
			if err != nil {
				return err
			}
		}
		if !says(t.id) || t.name == nil {
			return errors.New("a tool call has no id, or is of a type that is not known")
		}
	}
	return nil
}

// body reads what is called and with what.
func (t *calling) body(v []byte, argument string) error {
	m, err := readMembers(v, "a tool call")
	if err != nil {
		return err
	}
	for _, f := range m {
		switch f.name {
		case "name":
			t.name = f.value
		case argument:
			t.arguments = f.value
		default:
			if err := unknownMember("a tool call", f.name, f.value); err != nil {
				return err
			}
		}
	}
	if !says(t.name) || !isString(t.arguments) {
		return errors.New("a tool call has no name or arguments")
	}
	return nil
}

// chunkWriter writes chunks.
type chunkWriter struct {
	b          []byte
	kind       Kind
	head, tail []byte   // what stands before and behind a choice
	late       []string // members of the top that come with the usage, and only with it
}

func newChunkWriter(b []byte, kind Kind, top members, vllm bool) *chunkWriter {
	w := &chunkWriter{b: b, kind: kind, head: []byte("data: {"), late: []string{"metrics"}}
	if vllm {
		w.late = []string{"service_tier", "system_fingerprint", "metrics"}
	}
	for _, name := range headNames() {
		v := top.get(name)
		if name == "object" && kind == Chat {
			v = []byte(`"chat.completion.chunk"`)
		}
		if v == nil || slices.Contains(w.late, name) {
			continue
		}
		w.head = append(appendMember(w.head, name, v), ',')
	}
	w.head = append(w.head, `"choices":[`...)
	w.tail = append(w.tail, ']')
	if !vllm && top.has("usage") {
		w.tail = append(w.tail, `,"usage":null`...)
	}
	w.tail = append(w.tail, "}\n\n"...)
	return w
}

// chunk writes a chunk around what content adds to its choice: a delta, or a text. logs is raw,
// nil where there is nothing to say.
func (w *chunkWriter) chunk(index int, c *spoken, content, logs []byte, last bool) {
	w.b = append(append(w.b, w.head...), `{"index":`...)
	w.b = append(strconv.AppendInt(w.b, int64(index), 10), ',')
	w.b = append(w.b, content...)
	if c.logprobs != nil {
		if logs == nil {
			logs = []byte("null")
		}
		w.b = appendMember(append(w.b, ','), "logprobs", logs)
	}
	finish, stop := []byte("null"), []byte("null")
	if last {
		finish, stop = c.finish, c.stop
	}
	w.b = appendMember(append(w.b, ','), "finish_reason", finish)
	if c.stopName != "" && (last || w.kind == Completion) {
		w.b = appendMember(append(w.b, ','), c.stopName, stop)
	}
	w.b = append(append(w.b, '}'), w.tail...)
}

// beside tells whether a message says something else than its content.
func (c *spoken) beside() bool {
	return len(c.calls) > 0 || c.function != nil || says(c.refusal) || says(c.reasoning) || says(c.reasoningContent)
}

// opening writes the chunk that says the role. Where a message says something else than a content,
// vLLM says "" for it, others null.
func (w *chunkWriter) opening(index int, c *spoken) {
	d := appendMember([]byte(`"delta":{`), "role", c.role)
	switch {
	case string(c.content) == `""`, c.vllm && c.beside() && (c.content == nil || isNull(c.content)):
		d = append(d, `,"content":""`...)
	case c.content == nil:
	case isNull(c.content):
		d = append(d, `,"content":null`...)
	case c.logprobs != nil || c.refusing: // others say the role only
		d = append(d, `,"content":""`...)
	}
	if c.refusing && !c.vllm {
		d = append(d, `,"refusal":null`...)
	}
	w.chunk(index, c, append(d, '}'), nil, false)
}

// choice writes the chunks behind the role.
func (w *chunkWriter) choice(index int, c *spoken) {
	var d []byte
	delta := func(name string, piece []byte) []byte {
		d = append(append(append(d[:0], `"delta":{"`...), name...), `":"`...)
		return append(append(d, piece...), `"}`...)
	}
	thoughts := func(name string, v []byte) {
		if says(v) {
			pieces(inner(v), func(piece []byte) { w.chunk(index, c, delta(name, piece), nil, false) })
		}
	}
	if says(c.reasoning) && bytes.Equal(c.reasoning, c.reasoningContent) { // vLLM says both at once
		pieces(inner(c.reasoning), func(piece []byte) {
			d = delta("reasoning", piece)
			d = append(append(append(d[:len(d)-1], `,"reasoning_content":"`...), piece...), `"}`...)
			w.chunk(index, c, d, nil, false)
		})
	} else {
		thoughts("reasoning", c.reasoning)
		thoughts("reasoning_content", c.reasoningContent)
	}
	words, name := c.content, "content"
	if w.kind == Completion {
		words, name = c.text, "text"
	}
	left := c.logprobs
	write := func(piece, logs []byte) {
		if w.kind == Chat {
			w.chunk(index, c, delta(name, piece), logs, false)
		} else {
			d = append(append(append(d[:0], `"text":"`...), piece...), '"')
			w.chunk(index, c, d, logs, false)
		}
	}
	switch tokens, ok := c.tokens(w.kind, words); {
	case ok:
		for _, t := range tokens {
			write(t.text, t.logs)
		}
		left = nil
	case says(words) && left != nil && !isNull(left):
		write(inner(words), left) // nobody knows which belongs where
		left = nil
	case says(words):
		pieces(inner(words), func(piece []byte) { write(piece, nil) })
	}
	thoughts("refusal", c.refusal)
	w.calls(index, c)
	switch {
	case w.kind == Completion:
		d = append(d[:0], `"text":""`...)
	case c.vllm && (isString(c.content) || c.beside()):
		d = append(d[:0], `"delta":{"content":""}`...)
	default:
		d = append(d[:0], `"delta":{}`...)
	}
	w.chunk(index, c, d, left, true)
}

// calls writes the calls of tools: each with its name first, then with its arguments.
func (w *chunkWriter) calls(index int, c *spoken) {
	var d []byte
	for i, t := range c.calls {
		body, argument := "function", "arguments"
		if string(t.typ) == `"custom"` {
			body, argument = "custom", "input"
		}
		begin := func() {
			d = append(d[:0], `"delta":{"tool_calls":[{"index":`...)
			d = append(strconv.AppendInt(d, int64(i), 10), ',')
		}
		begin()
		d = append(appendMember(d, "id", t.id), ',')
		d = append(appendMember(d, "type", t.typ), ',')
		d = append(append(append(d, '"'), body...), `":{`...)
		d = append(appendMember(d, "name", t.name), ',')
		d = append(appendMember(d, argument, []byte(`""`)), "}}]}"...)
		w.chunk(index, c, d, nil, false)
		pieces(inner(t.arguments), func(piece []byte) {
			begin()
			d = append(append(append(d, '"'), body...), `":{"`...)
			d = append(append(append(d, argument...), `":"`...), piece...)
			d = append(d, `"}}]}`...)
			w.chunk(index, c, d, nil, false)
		})
	}
	if c.function == nil {
		return
	}
	d = append(appendMember([]byte(`"delta":{"function_call":{`), "name", c.function.name), `,"arguments":""}}`...)
	w.chunk(index, c, d, nil, false)
	pieces(inner(c.function.arguments), func(piece []byte) {
		d = append(append(d[:0], `"delta":{"function_call":{"arguments":"`...), piece...)
		w.chunk(index, c, append(d, `"}}`...), nil, false)
	})
}

// tokens gives words token by token, where the logprobs are of them, as servers send them.
func (c *spoken) tokens(kind Kind, words []byte) ([]token, bool) {
	if c.logprobs == nil || c.logprobs[0] != '{' || !says(words) {
		return nil, false
	}
	m, err := readMembers(c.logprobs, "logprobs")
	if err != nil {
		return nil, false
	}
	if kind == Completion {
		return completionTokens(m, words)
	}
	list, ok := elements(m.get("content"))
	if !ok || len(list) == 0 {
		return nil, false
	}
	for _, f := range m {
		if f.name != "content" && !isNull(f.value) {
			return nil, false
		}
	}
	texts := make([][]byte, len(list))
	for i, e := range list {
		for o := (object{b: e}); o.next(); {
			if string(o.name) == "token" {
				texts[i] = o.value
			}
		}
	}
	if !aligned(inner(words), texts) {
		return nil, false
	}
	tokens := make([]token, len(list))
	for i, e := range list {
		one := append(append([]byte{'['}, e...), ']')
		tokens[i] = token{inner(texts[i]), m.append(nil, member{"content", one})}
	}
	return tokens, true
}

// completionTokens cuts the four lists of a completion's logprobs, some of which may be null.
func completionTokens(m members, words []byte) ([]token, bool) {
	texts, ok := elements(m.get("tokens"))
	if !ok || len(texts) == 0 || !aligned(inner(words), texts) {
		return nil, false
	}
	lists := make([][][]byte, len(m))
	for i, f := range m {
		if isNull(f.value) {
			continue
		}
		if lists[i], ok = elements(f.value); !ok || len(lists[i]) != len(texts) {
			return nil, false
		}
	}
	tokens := make([]token, len(texts))
	for t := range texts {
		one := make([]member, 0, len(m))
		for i, f := range m {
			if lists[i] != nil {
				one = append(one, member{f.name, append(append([]byte{'['}, lists[i][t]...), ']')})
			}
		}
		tokens[t] = token{inner(texts[t]), m.append(nil, one...)}
	}
	return tokens, true
}
