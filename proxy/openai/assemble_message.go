package openai

import (
	"bytes"
	"slices"

	"github.com/go-json-experiment/json/jsontext"
)

// message is what the events of a Message have said so far. Those that open the message and its
// blocks hold them as they are then, members that nobody knows included; what follows changes the
// few that grow.
type message struct {
	begun, said bool    // message_start, message_delta were seen
	top         members // of the message
	usage       members
	blocks      []*block
	open        int // the block that grows, -1 where none does
}

// block is a block of content so far.
type block struct {
	members
	grows     string // text, thinking, input; "" for what comes whole
	more      text   // what it has grown to; of an input, its JSON as text
	signed    []byte // the signature, raw; nil for that of the start
	citations []byte // elements with commas between them
}

// messageEvent reads an event of /v1/messages.
func (a *Assembler) messageEvent(data []byte) {
	m, err := readMembers(data, "an event")
	if err != nil {
		a.failWith(err)
		return
	}
	typ := unquote(m.get("type"))
	for _, f := range m {
		switch f.name {
		case "type", "message", "index", "content_block", "delta", "usage":
		default:
			a.unknown("an event", []byte(f.name), f.value)
		}
	}
	msg := &a.message
	switch {
	case a.err != nil:
	case typ == "ping":
	case typ == "message_start" && !msg.begun:
		a.begin(m.get("message"))
	case !msg.begun || typ == "message_start":
		a.fail("an event comes before message_start, or this twice")
	case typ == "content_block_start":
		a.startBlock(smallIndex(m.get("index"), maxBlocks), m.get("content_block"))
	case typ == "content_block_delta" && msg.open >= 0 && smallIndex(m.get("index"), maxBlocks) == msg.open:
		a.grow(msg.blocks[msg.open], m.get("delta"))
	case typ == "content_block_stop" && msg.open >= 0 && smallIndex(m.get("index"), maxBlocks) == msg.open:
		msg.open = -1
	case typ == "message_delta":
		a.conclude(m.get("delta"), m.get("usage"))
	case typ == "message_stop" && msg.said && msg.open < 0:
		a.done = true
	default:
		a.fail("an event of the message is not known, an error, or out of order: %s", clip([]byte(typ)))
	}
}

// copied takes an object apart that outlives its event.
func (a *Assembler) copied(v []byte, what string) (members, bool) {
	m, err := readMembers(bytes.Clone(v), what)
	if err != nil {
		return nil, a.failWith(err)
	}
	return m, a.hold(len(v) + partCost)
}

// begin takes the message of message_start.
func (a *Assembler) begin(v []byte) {
	m, ok := a.copied(v, "message")
	if !ok {
		return
	}
	// vLLM leaves out what is always the same.
	for _, f := range [...]member{literal("type", `"message"`), literal("role", `"assistant"`)} {
		if !m.has(f.name) {
			m = append(m, f)
		}
	}
	if unquote(m.get("type")) != "message" || !m.has("id") || !m.has("model") || !m.has("content") || !saysNothing(m.get("content")) {
		a.fail("message_start holds no empty message with an id and a model")
		return
	}
	if usage := m.get("usage"); usage != nil && !isNull(usage) {
		if a.message.usage, ok = a.copied(usage, "usage"); !ok {
			return
		}
	}
	a.message.top, a.message.begun, a.message.open = m, true, -1
}

// startBlock opens a block. It must be the next one, and the one before be closed.
func (a *Assembler) startBlock(index int, v []byte) {
	msg := &a.message
	if index != len(msg.blocks) || msg.open >= 0 || msg.said {
		a.fail("a block of content is out of order")
		return
	}
	m, ok := a.copied(v, "a block of content")
	if !ok {
		return
	}
	b := &block{members: m}
	switch typ := unquote(m.get("type")); typ {
	case "text", "thinking":
		b.grows = typ
		if t := m.get(typ); t != nil {
			if !isString(t) {
				a.fail("a block of content has no text")
				return
			}
			b.more.raw = bytes.Clone(inner(t))
		}
	case "tool_use":
		b.grows = "input"
		if !saysNothing(m.get("input")) || !m.has("id") || !m.has("name") {
			a.fail("a tool_use begins with an input, or without an id or name")
			return
		}
	case "redacted_thinking":
	default:
		a.fail("a block of content is of a type that is not known: %s", clip([]byte(typ)))
		return
	}
	msg.blocks, msg.open = append(msg.blocks, b), index
}

// grow adds a delta to a block.
func (a *Assembler) grow(b *block, v []byte) {
	m, err := readMembers(v, "a delta")
	if err != nil {
		a.failWith(err)
		return
	}
	typ := unquote(m.get("type"))
	if len(m) != 2 {
		a.fail("a delta has a member that is not known")
		return
	}
	more := m.get("citation")
	switch {
	case typ == "citations_delta" && b.grows == "text" && more != nil:
		if len(b.citations) > 0 {
			b.citations = append(b.citations, ',')
		}
		b.citations = append(b.citations, more...)
	case typ == "signature_delta" && b.grows == "thinking" && isString(m.get("signature")) && b.signed == nil:
		more = m.get("signature")
		b.signed = bytes.Clone(more)
	case typ == "text_delta" && b.grows == "text":
		more = m.get("text")
	case typ == "thinking_delta" && b.grows == "thinking":
		more = m.get("thinking")
	case typ == "input_json_delta" && b.grows == "input":
		more = m.get("partial_json")
	default:
		a.fail("a delta does not fit its block: %s", clip([]byte(typ)))
		return
	}
	switch {
	case typ == "citations_delta" || typ == "signature_delta":
		a.hold(len(more))
	case !isString(more):
		a.fail("a delta has no text")
	default:
		a.add(&b.more, more)
	}
}

// conclude takes a message_delta: what of the message has changed, and the usage, whose figures
// are totals. Null ones leave what is known.
func (a *Assembler) conclude(delta, usage []byte) {
	msg := &a.message
	if msg.open >= 0 {
		a.fail("message_delta comes within a block")
		return
	}
	d, ok := a.copied(delta, "the delta of the message")
	if !ok {
		return
	}
	for _, f := range d {
		switch f.name {
		case "stop_reason", "stop_sequence", "stop_details", "container":
			if !isNull(f.value) || !msg.top.has(f.name) {
				msg.top.set(f.name, f.value)
			}
		default:
			if !a.unknown("the delta of the message", []byte(f.name), f.value) {
				return
			}
		}
	}
	msg.said = true
	if usage == nil || isNull(usage) {
		return
	}
	u, ok := a.copied(usage, "usage")
	if !ok {
		return
	}
	for _, f := range u {
		if !isNull(f.value) || !msg.usage.has(f.name) {
			msg.usage.set(f.name, f.value)
		}
	}
	if len(msg.usage) > maxMembers || len(msg.top) > maxMembers {
		a.fail("a message has too many members")
	}
}

// appendMessage writes the message, and fails where it has not ended.
func (a *Assembler) appendMessage(b []byte) []byte {
	msg := &a.message
	if reason := msg.top.get("stop_reason"); !isString(reason) {
		a.fail("the message does not say why it stopped")
		return nil
	}
	content := []byte{'['}
	for i, bl := range msg.blocks {
		if i > 0 {
			content = append(content, ',')
		}
		if content = a.appendBlock(content, bl); a.err != nil {
			return nil
		}
	}
	m := slices.Clone(msg.top)
	m.set("content", append(content, ']'))
	if msg.usage != nil {
		m.set("usage", msg.usage.append(nil))
	}
	return m.append(b)
}

// appendBlock writes a block as it has grown.
func (a *Assembler) appendBlock(b []byte, bl *block) []byte {
	m := slices.Clone(bl.members)
	quoted := append(append([]byte{'"'}, bl.more.raw...), '"')
	switch bl.grows {
	case "text", "thinking":
		m.set(bl.grows, quoted)
	case "input":
		if len(bl.more.raw) == 0 {
			break
		}
		input, err := jsontext.AppendUnquote(nil, quoted)
		if err != nil || !jsontext.Value(input).IsValid() || input[skipSpace(input, 0)] != '{' {
			a.fail("the input of a tool_use is not an object")
			return nil
		}
		m.set("input", bytes.TrimSpace(input))
	}
	if bl.signed != nil {
		m.set("signature", bl.signed)
	}
	if len(bl.citations) > 0 {
		if have := m.get("citations"); have != nil && !saysNothing(have) {
			a.fail("a block begins with citations")
			return nil
		}
		m.set("citations", append(append([]byte{'['}, bl.citations...), ']'))
	}
	return m.append(b)
}
