package openai

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// replayMessage writes a Message. What nobody knows of it is in the events that open it and its
// blocks, which hold them as they are then.
func replayMessage(b, body []byte) ([]byte, error) {
	m, err := readMembers(body, "the message")
	if err != nil {
		return nil, err
	}
	blocks, ok := elements(m.get("content"))
	if !ok || len(blocks) > maxBlocks || string(m.get("type")) != `"message"` || !says(m.get("id")) || !says(m.get("model")) || !says(m.get("stop_reason")) {
		return nil, errors.New("the message has no content, id or model, or does not say why it stopped")
	}
	var usage members
	if u := m.get("usage"); u != nil && !isNull(u) {
		if usage, err = readMembers(u, "usage"); err != nil {
			return nil, err
		}
	}
	b = append(appendEvent(b, "message_start"), `,"message":`...)
	start := []member{literal("content", "[]"), literal("stop_reason", "null"), literal("stop_sequence", "null"), {"container", nil}, {"stop_details", nil}}
	if usage != nil {
		begun := usage.append(nil, literal("output_tokens", "0"), member{"output_tokens_details", nil}, member{"server_tool_use", nil})
		start = append(start, member{"usage", begun})
	}
	b = append(m.append(b, start...), "}\n\n"...)
	for i, v := range blocks {
		if b, err = replayBlock(b, i, v); err != nil {
			return nil, err
		}
	}
	return append(appendEvent(replayConclusion(b, m, usage), "message_stop"), "}\n\n"...), nil
}

// replayConclusion writes message_delta: what changes at the end of a message, and the totals.
func replayConclusion(b []byte, m, usage members) []byte {
	b = append(appendEvent(b, "message_delta"), `,"delta":`...)
	var delta, totals members
	for _, name := range [...]string{"stop_reason", "stop_sequence", "stop_details", "container"} {
		if m.has(name) {
			delta.set(name, m.get(name))
		}
	}
	b = delta.append(b)
	for _, f := range usage {
		switch f.name {
		case "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens", "output_tokens_details", "server_tool_use":
			totals.set(f.name, f.value)
		}
	}
	if usage != nil {
		b = totals.append(append(b, `,"usage":`...))
	}
	return append(b, "}\n\n"...)
}

// replayBlock writes a block: as it begins, what it grows by, its end.
func replayBlock(b []byte, index int, v []byte) ([]byte, error) {
	m, err := readMembers(v, "a block of content")
	if err != nil {
		return nil, err
	}
	at := strconv.Itoa(index)
	open := func(begun ...member) {
		b = append(append(append(appendEvent(b, "content_block_start"), `,"index":`...), at...), `,"content_block":`...)
		b = append(m.append(b, begun...), "}\n\n"...)
	}
	grow := func(kind, name string, quoted bool, piece []byte) {
		b = append(append(append(appendEvent(b, "content_block_delta"), `,"index":`...), at...), `,"delta":{"type":"`...)
		b = append(append(append(append(b, kind...), `","`...), name...), `":`...)
		if quoted {
			b = append(append(append(b, '"'), piece...), '"')
		} else {
			b = append(b, piece...)
		}
		b = append(b, "}}\n\n"...)
	}
	switch typ := unquote(m.get("type")); {
	case typ == "text" && isString(m.get("text")):
		citations, _ := elements(m.get("citations"))
		begun := []member{literal("text", `""`)}
		if len(citations) > 0 {
			begun = append(begun, literal("citations", "[]"))
		}
		open(begun...)
		for _, c := range citations {
			grow("citations_delta", "citation", false, c)
		}
		pieces(inner(m.get("text")), func(p []byte) { grow("text_delta", "text", true, p) })
	case typ == "thinking" && isString(m.get("thinking")):
		signature := m.get("signature")
		open(literal("thinking", `""`), literal("signature", `""`))
		pieces(inner(m.get("thinking")), func(p []byte) { grow("thinking_delta", "thinking", true, p) })
		if says(signature) {
			grow("signature_delta", "signature", false, signature)
		} else if signature != nil && !isString(signature) {
			return nil, errors.New("the signature of a thought is not a string")
		}
	case typ == "tool_use" && len(m.get("input")) > 0 && m.get("input")[0] == '{' && says(m.get("id")) && says(m.get("name")):
		open(literal("input", "{}"))
		quoted, err := jsontext.AppendQuote(nil, m.get("input"))
		if err != nil {
			return nil, fmt.Errorf("the input of a tool: %w", err)
		}
		pieces(inner(quoted), func(p []byte) { grow("input_json_delta", "partial_json", true, p) })
	case typ == "redacted_thinking":
		open()
	default:
		return nil, fmt.Errorf("a block of content is of a type that is not known: %s", clip([]byte(typ)))
	}
	return append(append(append(appendEvent(b, "content_block_stop"), `,"index":`...), at...), "}\n\n"...), nil
}
