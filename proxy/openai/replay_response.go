package openai

import (
	"errors"
	"fmt"
	"strconv"
)

// responseWriter writes the events of a Response, numbered.
type responseWriter struct {
	b   []byte
	seq int64
}

// replayResponse writes a Response. Its last event repeats it whole, whatever it holds.
func replayResponse(b, body []byte) ([]byte, error) {
	m, err := readMembers(body, "the response")
	if err != nil {
		return nil, err
	}
	items, ok := elements(m.get("output"))
	status := unquote(m.get("status"))
	failed := m.get("error")
	switch {
	case string(m.get("object")) != `"response"` || !says(m.get("id")) || !ok:
		return nil, errors.New("the response has no id or output")
	case status != "completed" && status != "incomplete" || failed != nil && !isNull(failed):
		return nil, errors.New("the response has not come to its end, or failed")
	}
	w := &responseWriter{b: b}
	for _, name := range [...]string{"response.created", "response.in_progress"} {
		w.event(name)
		w.b = m.append(append(w.b, `,"response":`...), literal("status", `"in_progress"`), literal("output", "[]"),
			literal("usage", "null"), literal("incomplete_details", "null"), literal("completed_at", "null"), member{"output_text", nil})
		w.end()
	}
	for i, v := range items {
		if err := w.item(i, v); err != nil {
			return nil, err
		}
	}
	w.event("response." + status)
	w.b = append(append(w.b, `,"response":`...), body...)
	w.end()
	return w.b, nil
}

// event begins an event.
func (w *responseWriter) event(name string) {
	w.b = append(appendEvent(w.b, name), `,"sequence_number":`...)
	w.b = strconv.AppendInt(w.b, w.seq, 10)
	w.seq++
}

func (w *responseWriter) end() { w.b = append(w.b, "}\n\n"...) }

// spot says which item an event is about, and which part of it.
type spot struct {
	id     []byte // raw; nil for items of servers that give none
	output int
	part   string // content_index or summary_index; "" for the item itself
	index  int
}

// about begins an event about a place.
func (w *responseWriter) about(name string, p spot) {
	w.event(name)
	if p.id != nil {
		w.b = appendMember(append(w.b, ','), "item_id", p.id)
	}
	w.number("output_index", p.output)
	if p.part != "" {
		w.number(p.part, p.index)
	}
}

func (w *responseWriter) number(name string, n int) {
	w.b = appendMember(append(w.b, ','), name, strconv.AppendInt(nil, int64(n), 10))
}

func (w *responseWriter) raw(name string, v []byte) { w.b = appendMember(append(w.b, ','), name, v) }

// item writes an item of the output: as it begins, its parts, its end.
func (w *responseWriter) item(i int, v []byte) error {
	m, err := readMembers(v, "an item of the output")
	if err != nil {
		return err
	}
	p := spot{id: m.get("id"), output: i}
	added := func(begun ...member) {
		w.event("response.output_item.added")
		w.number("output_index", i)
		w.b = m.append(append(w.b, `,"item":`...), append(begun, literal("status", `"in_progress"`))...)
		w.end()
	}
	switch typ := unquote(m.get("type")); {
	case typ == "message":
		added(literal("content", "[]"))
		err = w.parts(p, m.get("content"), "content_index")
	case typ == "reasoning":
		begun := []member{literal("summary", "[]")}
		if !saysNothing(m.get("content")) {
			begun = append(begun, literal("content", "[]"))
		}
		added(begun...)
		if err = w.parts(p, m.get("summary"), "summary_index"); err == nil {
			err = w.parts(p, m.get("content"), "content_index")
		}
	case typ == "function_call" && isString(m.get("arguments")) && says(m.get("name")):
		added(literal("arguments", `""`))
		w.grows("response.function_call_arguments", p, "arguments", m.get("arguments"), m.get("name"))
	case typ == "custom_tool_call" && isString(m.get("input")):
		added(literal("input", `""`))
		w.grows("response.custom_tool_call_input", p, "input", m.get("input"), nil)
	default:
		err = fmt.Errorf("an item of the output is of a type that is not known: %s", clip([]byte(typ)))
	}
	if err != nil {
		return err
	}
	w.event("response.output_item.done")
	w.number("output_index", i)
	w.raw("item", v)
	w.end()
	return nil
}

// grows writes what a string of an item grows by, and then the whole.
func (w *responseWriter) grows(event string, p spot, member string, v, name []byte) {
	pieces(inner(v), func(piece []byte) {
		w.about(event+".delta", p)
		w.delta(piece)
		w.end()
	})
	w.about(event+".done", p)
	if name != nil {
		w.raw("name", name)
	}
	w.raw(member, v)
	w.end()
}

func (w *responseWriter) delta(piece []byte) {
	w.b = append(append(append(w.b, `,"delta":"`...), piece...), '"')
}

// parts writes the parts of an item.
func (w *responseWriter) parts(p spot, list []byte, part string) error {
	if list == nil || isNull(list) {
		return nil
	}
	vs, ok := elements(list)
	if !ok {
		return errors.New("the parts of an item are not a list")
	}
	for i, v := range vs {
		p.part, p.index = part, i
		if err := w.part(p, v); err != nil {
			return err
		}
	}
	return nil
}

// part writes a part: as it begins, what it grows by, its end.
func (w *responseWriter) part(p spot, v []byte) error {
	m, err := readMembers(v, "a part of an item")
	if err != nil {
		return err
	}
	typ := unquote(m.get("type"))
	name, grows, around := "text", "", "response.content_part"
	switch {
	case typ == "output_text" && p.part == "content_index":
		grows = "response.output_text"
	case typ == "refusal" && p.part == "content_index":
		name, grows = "refusal", "response.refusal"
	case typ == "reasoning_text" && p.part == "content_index":
		grows = "response.reasoning_text"
	case typ == "summary_text" && p.part == "summary_index":
		grows, around = "response.reasoning_summary_text", "response.reasoning_summary_part"
	default:
		return fmt.Errorf("a part of an item is of a type that is not known: %s", clip([]byte(typ)))
	}
	words := m.get(name)
	if !isString(words) {
		return errors.New("a part of an item has no text")
	}
	begun := []member{literal(name, `""`)}
	for _, list := range [...]string{"annotations", "logprobs"} {
		if v := m.get(list); v != nil && v[0] == '[' {
			begun = append(begun, literal(list, "[]"))
		}
	}
	w.about(around+".added", p)
	w.b = m.append(append(w.b, `,"part":`...), begun...)
	w.end()
	if typ == "output_text" {
		err = w.outputText(p, m)
	} else {
		w.grows(grows, p, name, words, nil)
	}
	if err != nil {
		return err
	}
	w.about(around+".done", p)
	w.raw("part", v)
	w.end()
	return nil
}

// outputText writes the text of a message, token by token where it has logprobs, and its
// annotations.
func (w *responseWriter) outputText(p spot, m members) error {
	const event = "response.output_text"
	words, logs := m.get("text"), m.get("logprobs")
	write := func(piece, logs []byte) {
		w.about(event+".delta", p)
		w.raw("logprobs", logs)
		w.delta(piece)
		w.end()
	}
	list, ok := elements(logs)
	if !ok {
		logs = []byte("[]")
	}
	texts := make([][]byte, len(list))
	for i, e := range list {
		for o := (object{b: e}); o.next(); {
			if string(o.name) == "token" {
				texts[i] = o.value
			}
		}
	}
	switch {
	case len(list) > 0 && aligned(inner(words), texts):
		for i, e := range list {
			write(inner(texts[i]), append(append([]byte{'['}, e...), ']'))
		}
	case len(list) > 0:
		write(inner(words), logs)
	default:
		pieces(inner(words), func(piece []byte) { write(piece, logs) })
	}
	notes, ok := elements(m.get("annotations"))
	if v := m.get("annotations"); !ok && v != nil && !isNull(v) {
		return errors.New("the annotations of a text are not a list")
	}
	for i, note := range notes {
		w.about(event+".annotation.added", p)
		w.number("annotation_index", i)
		w.raw("annotation", note)
		w.end()
	}
	w.about(event+".done", p)
	w.raw("logprobs", logs)
	w.raw("text", words)
	w.end()
	return nil
}
