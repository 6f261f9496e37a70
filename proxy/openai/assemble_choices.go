package openai

import (
	"bytes"
	"strconv"
)

// chunks is what the chunks of a chat or a completion have said so far.
type chunks struct {
	head    [headMembers]string // values of headNames; "" where none was seen
	choices []*choice           // by index; nil where a later one came first
	usage   []byte
	metrics []byte // of vLLM's: how long things took, beside the usage
}

// headMembers is how many members every chunk of a stream repeats.
const headMembers = 6

// headNames are those members, in the order in which they are written.
func headNames() [headMembers]string {
	return [...]string{"id", "object", "created", "model", "service_tier", "system_fingerprint"}
}

// choice is one choice so far.
type choice struct {
	role                                                []byte
	content, reasoning, reasoningContent, refusal, text text
	calls                                               []*call
	function                                            *call
	logprobs                                            logprobs
	finish                                              []byte // raw; nil while it goes on
	stopName                                            string // stop_reason of vLLM, matched_stop of SGLang; "" where the server has none
	stop                                                []byte
}

// call is a call of a tool.
type call struct {
	id, typ, name []byte // raw strings
	body          string // function or custom
	arguments     text
}

// chunk reads one chunk.
func (a *Assembler) chunk(data []byte) {
	c := &a.chunks
	w := walk{object: object{b: data}}
	for ok := true; ok && w.next(); {
		switch string(w.name) {
		case "choices":
			ok = a.list(w.value, "choices", a.choice)
		case "usage":
			ok = a.replace(&c.usage, w.value)
		case "metrics":
			ok = a.replace(&c.metrics, w.value)
		case "obfuscation": // padding of random length
		default:
			ok = a.constant(w.name, w.value)
		}
	}
	if w.bad {
		a.fail("a chunk holds a name twice, or too many")
	}
}

// replace takes a value that is said anew; null leaves what is known.
func (a *Assembler) replace(into *[]byte, v []byte) bool {
	if isNull(v) {
		return true
	}
	a.step.other = true
	if !a.hold(len(v) - len(*into)) {
		return false
	}
	*into = append((*into)[:0], v...)
	return true
}

// list calls f for each element of a list, null being an empty one, while f says so.
func (a *Assembler) list(v []byte, what string, f func(v []byte) bool) bool {
	if isNull(v) {
		return true
	}
	if v[0] != '[' {
		return a.fail("%s is not a list", what)
	}
	for e := (array{b: v}); e.next(); {
		if !f(e.value) {
			return false
		}
	}
	return true
}

// constant takes a member that all chunks have alike, but for the time, of which the first counts.
func (a *Assembler) constant(name, value []byte) bool {
	for i, n := range headNames() {
		if n != string(name) {
			continue
		}
		switch known := a.chunks.head[i]; {
		case known == string(value), isNull(value) && known != "", n == "created" && known != "":
			return true
		case known != "" && known != "null":
			return a.fail("%s is not the same in all chunks", n)
		}
		a.chunks.head[i] = string(value)
		a.step.other = true
		return a.hold(len(value))
	}
	return a.unknown("a chunk", name, value)
}

// choice reads a choice of a chunk. Its members may come in any order, its index last.
func (a *Assembler) choice(v []byte) bool {
	var index, delta, words, logs, finish, stop []byte
	stopName := ""
	w := walk{object: object{b: v}}
	for w.next() {
		switch name := string(w.name); name {
		case "index":
			index = w.value
		case "delta":
			delta = w.value
		case "text":
			words = w.value
		case "logprobs":
			logs = w.value
		case "finish_reason":
			finish = w.value
		case "stop_reason", "matched_stop":
			if stopName != "" {
				return a.fail("a choice has two reasons to stop")
			}
			stopName, stop = name, w.value
		default:
			if !a.unknown("a choice", w.name, w.value) {
				return false
			}
		}
	}
	i := smallIndex(index, maxChoices)
	if w.bad || i < 0 || a.kind == Chat && words != nil || a.kind == Completion && (delta != nil || words == nil) {
		return a.fail("a choice has no index, or not the members of its kind")
	}
	c := a.choiceAt(i)
	return c != nil &&
		(delta == nil || a.delta(c, delta)) &&
		(words == nil || a.join(c, &c.text, words, "text")) &&
		(logs == nil || a.logprobs(c, logs)) &&
		a.finish(c, finish, stopName, stop)
}

// choiceAt is the choice of an index, nil where there is no room for it.
func (a *Assembler) choiceAt(i int) *choice {
	cs := &a.chunks.choices
	if i >= len(*cs) {
		if !a.hold(8 * (i + 1 - len(*cs))) {
			return nil
		}
		*cs = append(*cs, make([]*choice, i+1-len(*cs))...)
	}
	if (*cs)[i] == nil {
		if !a.hold(partCost) {
			return nil
		}
		(*cs)[i] = &choice{}
		a.step.other = true
	}
	return (*cs)[i]
}

// finish notes how a choice ended. Servers that say why it stopped say null until then.
func (a *Assembler) finish(c *choice, reason []byte, stopName string, stop []byte) bool {
	if stopName != "" && (c.stopName != stopName || !bytes.Equal(c.stop, stop)) {
		if c.stopName != "" && !isNull(c.stop) {
			return a.fail("a choice has two reasons to stop")
		}
		c.stopName, c.stop = stopName, bytes.Clone(stop)
		a.step.other = true
		if !a.hold(len(stop)) {
			return false
		}
	}
	switch {
	case reason == nil || isNull(reason):
		return true
	case !isString(reason):
		return a.fail("finish_reason is not a string")
	case c.finish != nil && !bytes.Equal(c.finish, reason):
		return a.fail("a choice ends twice")
	case c.finish != nil:
		return true
	}
	c.finish = bytes.Clone(reason)
	a.step.other = true
	return a.hold(len(reason))
}

// delta reads what a chunk adds to a message.
func (a *Assembler) delta(c *choice, v []byte) bool {
	if isNull(v) {
		return true
	}
	w := walk{object: object{b: v}}
	for ok := true; w.next(); {
		switch string(w.name) {
		case "role":
			ok = a.once(&c.role, w.value, "role")
		case "content":
			ok = a.join(c, &c.content, w.value, "content")
		case "reasoning":
			ok = a.join(c, &c.reasoning, w.value, "reasoning")
		case "reasoning_content":
			ok = a.join(c, &c.reasoningContent, w.value, "reasoning_content")
		case "refusal":
			ok = a.join(c, &c.refusal, w.value, "refusal")
		case "tool_calls":
			ok = a.list(w.value, "tool_calls", func(v []byte) bool { return a.toolCall(c, v) })
		case "function_call":
			if isNull(w.value) {
				break
			}
			if c.function == nil {
				c.function = &call{body: "function_call"}
				ok = a.hold(partCost)
			}
			ok = ok && a.called(c, c.function, w.value, "arguments")
		default:
			ok = a.unknown("a delta", w.name, w.value)
		}
		if !ok {
			return false
		}
	}
	return !w.bad || a.fail("a delta is not an object of distinct names")
}

// once takes a string that is said once, and may be repeated as it is. Nothing, null and "" do not
// say it.
func (a *Assembler) once(into *[]byte, v []byte, what string) bool {
	switch {
	case isNull(v), string(v) == `""`, *into != nil && bytes.Equal(*into, v):
		return true
	case !isString(v) || *into != nil:
		return a.fail("%s is not a string, or changes", what)
	}
	*into = bytes.Clone(v)
	a.step.other = true
	return a.hold(len(v))
}

// join adds the string v to a text. Nothing may be said behind the end of a choice.
func (a *Assembler) join(c *choice, t *text, v []byte, what string) bool {
	switch {
	case isNull(v):
		t.null = true
		return true
	case !isString(v):
		return a.fail("%s is not a string", what)
	case c.finish != nil && len(v) > 2:
		return a.fail("%s follows the end of its choice", what)
	}
	t.seen = true
	return a.add(t, v)
}

// toolCall reads an element of a delta's tool_calls.
func (a *Assembler) toolCall(c *choice, v []byte) bool {
	var index, id, typ, function, custom []byte
	w := walk{object: object{b: v}}
	for w.next() {
		switch string(w.name) {
		case "index":
			index = w.value
		case "id":
			id = w.value
		case "type":
			typ = w.value
		case "function":
			function = w.value
		case "custom":
			custom = w.value
		default:
			if !a.unknown("a tool call", w.name, w.value) {
				return false
			}
		}
	}
	i := smallIndex(index, maxCalls)
	if w.bad || i < 0 || i > len(c.calls) { // calls begin in their order
		return a.fail("a tool call has no index, or skips one")
	}
	if i == len(c.calls) {
		if !a.hold(partCost) {
			return false
		}
		c.calls = append(c.calls, &call{})
		a.step.other = true
	}
	t := c.calls[i]
	if id != nil && !a.once(&t.id, id, "the id of a tool call") || typ != nil && !a.once(&t.typ, typ, "the type of a tool call") {
		return false
	}
	body, argument := "function", "arguments"
	if custom != nil && !isNull(custom) {
		function, body, argument = custom, "custom", "input"
	}
	if function == nil || isNull(function) {
		return true
	}
	if t.body != "" && t.body != body {
		return a.fail("a tool call changes its type")
	}
	t.body = body
	return a.called(c, t, function, argument)
}

// called reads what is called and with what. A name that comes twice is joined by some clients and
// replaced by others.
func (a *Assembler) called(c *choice, t *call, v []byte, argument string) bool {
	w := walk{object: object{b: v}}
	for w.next() {
		var ok bool
		switch string(w.name) {
		case "name":
			if t.name != nil && !isNull(w.value) && string(w.value) != `""` {
				return a.fail("a tool call is named twice")
			}
			ok = a.once(&t.name, w.value, "the name of a tool call")
		case argument:
			ok = a.join(c, &t.arguments, w.value, argument)
		default:
			ok = a.unknown("a tool call", w.name, w.value)
		}
		if !ok {
			return false
		}
	}
	return !w.bad || a.fail("a tool call is not an object of distinct names")
}

// appendAnswer writes the answer, and fails where something is missing.
func (a *Assembler) appendAnswer(b []byte) []byte {
	c := &a.chunks
	object := `"chat.completion.chunk"`
	if a.kind == Completion {
		object = `"text_completion"`
	}
	if c.head[0] == "" || c.head[1] != object || c.head[2] == "" || c.head[3] == "" || len(c.choices) == 0 {
		a.fail("the chunks are not of their kind, or have no id, time, model or choice")
		return nil
	}
	b = append(b, '{')
	for i, name := range headNames() {
		switch value := c.head[i]; {
		case value == "":
			continue
		case i == 1 && a.kind == Chat:
			b = appendMember(b, name, []byte(`"chat.completion"`))
		default:
			b = appendMember(b, name, []byte(value))
		}
		b = append(b, ',')
	}
	b = append(b, `"choices":[`...)
	for i, ch := range c.choices {
		if ch == nil || ch.finish == nil || a.kind == Chat && ch.role == nil {
			a.fail("a choice is missing, or has no role or end")
			return nil
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(strconv.AppendInt(append(b, `{"index":`...), int64(i), 10), ',')
		if a.kind == Chat {
			b = a.appendSpoken(append(b, `"message":`...), ch)
		} else {
			b = ch.text.append(b, "text")
		}
		if ch.logprobs.seen {
			b = ch.logprobs.append(append(b, `,"logprobs":`...), a.kind)
		}
		b = appendMember(append(b, ','), "finish_reason", ch.finish)
		if ch.stopName != "" {
			b = appendMember(append(b, ','), ch.stopName, ch.stop)
		}
		b = append(b, '}')
	}
	b = append(b, ']')
	if c.usage != nil {
		b = appendMember(append(b, ','), "usage", c.usage)
	}
	if c.metrics != nil {
		b = appendMember(append(b, ','), "metrics", c.metrics)
	}
	return append(b, '}')
}

// appendSpoken writes a message as its server does without streaming: beside a refusal, and of
// vLLM beside all else that is said, an empty content is null; a refusal, which vLLM never mentions
// in a stream, is null in its bodies.
func (a *Assembler) appendSpoken(b []byte, c *choice) []byte {
	b = appendMember(append(b, '{'), "role", c.role)
	b = append(b, ',')
	vllm := c.stopName == "stop_reason"
	beside := len(c.refusal.raw) > 0 ||
		vllm && (len(c.calls) > 0 || c.function != nil || len(c.reasoning.raw)+len(c.reasoningContent.raw) > 0)
	if len(c.content.raw) == 0 && (beside || !c.content.seen) {
		b = append(b, `"content":null`...)
	} else {
		b = c.content.append(b, "content")
	}
	for _, t := range [...]struct {
		text
		name string
		null bool
	}{
		{c.refusal, "refusal", c.refusal.null || c.refusal.seen || vllm},
		{c.reasoning, "reasoning", c.reasoning.null || c.reasoning.seen},
		{c.reasoningContent, "reasoning_content", c.reasoningContent.null || c.reasoningContent.seen},
	} {
		if len(t.raw) > 0 {
			b = t.append(append(b, ','), t.name)
		} else if t.null {
			b = appendMember(append(b, ','), t.name, []byte("null"))
		}
	}
	if len(c.calls) > 0 {
		b = append(b, `,"tool_calls":[`...)
		for i, t := range c.calls {
			if i > 0 {
				b = append(b, ',')
			}
			if t.id == nil || t.typ == nil || t.name == nil || string(inner(t.typ)) != t.body {
				a.fail("a tool call has no id, type or name")
				return nil
			}
			b = append(appendMember(append(b, '{'), "id", t.id), ',')
			b = append(appendMember(b, "type", t.typ), ',')
			b = append(t.append(append(append(append(b, '"'), t.body...), `":`...)), '}')
		}
		b = append(b, ']')
	}
	if c.function != nil {
		if c.function.name == nil {
			a.fail("a function call has no name")
			return nil
		}
		b = c.function.append(append(b, `,"function_call":`...))
	}
	return append(b, '}')
}

// append writes what is called and with what.
func (t *call) append(b []byte) []byte {
	b = append(appendMember(append(b, '{'), "name", t.name), ',')
	if t.body == "custom" {
		b = t.arguments.append(b, "input")
	} else {
		b = t.arguments.append(b, "arguments")
	}
	return append(b, '}')
}

// logprobs are those of a choice so far.
type logprobs struct {
	seen  bool // the choice has the member, null or not
	whole bool // it is no null
	lists [4]list
}

// list is a list that comes in pieces: its elements, with commas between them.
type list struct {
	raw        []byte
	list, null bool // it was seen as a list, as null
}

// logprobNames are the lists of logprobs, of a chat and of a completion.
func logprobNames(kind Kind) []string {
	if kind == Chat {
		return []string{"content", "refusal"}
	}
	return []string{"text_offset", "token_logprobs", "tokens", "top_logprobs"}
}

// logprobs reads those of a chunk.
func (a *Assembler) logprobs(c *choice, v []byte) bool {
	l := &c.logprobs
	if !l.seen {
		l.seen, a.step.other = true, true
	}
	if isNull(v) {
		return true
	}
	l.whole, a.step.other = true, true
	w := walk{object: object{b: v}}
	for w.next() {
		at := -1
		for i, name := range logprobNames(a.kind) {
			if name == string(w.name) {
				at = i
			}
		}
		if at < 0 {
			if !a.unknown("logprobs", w.name, w.value) {
				return false
			}
			continue
		}
		if !a.lengthen(&l.lists[at], w.value) {
			return false
		}
	}
	return !w.bad || a.fail("logprobs is not an object of distinct names")
}

// lengthen adds the elements of v.
func (a *Assembler) lengthen(l *list, v []byte) bool {
	if isNull(v) {
		l.null = true
	} else {
		if v[0] != '[' {
			return a.fail("logprobs holds what is not a list")
		}
		l.list = true
		if more := bytes.TrimSpace(inner(v)); len(more) > 0 {
			if len(l.raw) > 0 {
				l.raw = append(l.raw, ',')
			}
			l.raw = append(l.raw, more...)
			if !a.hold(len(more) + 1) {
				return false
			}
		}
	}
	if a.kind == Completion && l.null && l.list {
		return a.fail("logprobs has a list for some tokens only")
	}
	return true
}

// append writes them, with the lists that were seen.
func (l *logprobs) append(b []byte, kind Kind) []byte {
	if !l.whole {
		return append(b, "null"...)
	}
	b = append(b, '{')
	first := len(b)
	for i, name := range logprobNames(kind) {
		t := &l.lists[i]
		if (t.list || t.null) && len(b) > first {
			b = append(b, ',')
		}
		switch {
		case t.list:
			b = append(append(append(append(b, '"'), name...), `":[`...), t.raw...)
			b = append(b, ']')
		case t.null:
			b = appendMember(b, name, []byte("null"))
		}
	}
	return append(b, '}')
}
