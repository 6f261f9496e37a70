package fakevllm

import (
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

type messagesRequest struct {
	Model      string         `json:"model"`
	System     jsontext.Value `json:"system"`
	Messages   jsontext.Value `json:"messages"`
	Tools      jsontext.Value `json:"tools"`
	ToolChoice jsontext.Value `json:"tool_choice"`
	MaxTokens  *int64         `json:"max_tokens"`
	Stream     bool           `json:"stream"`
}

// readMessages parses and counts a body of /v1/messages or of its count_tokens.
func (c *call) readMessages() (q messagesRequest, model string, msgs []message, tools []tool, prompt int64, ok bool) {
	if !c.decode(&q) {
		return
	}
	if model, ok = c.model(q.Model); !ok {
		return
	}
	msgs, tools, prompt, e := c.conversation(q.Messages, q.Tools)
	var system int64
	if e == nil {
		system, e = contentTokens(q.System)
	}
	if e != nil {
		c.refuse(e)
		return q, model, nil, nil, 0, false
	}
	return q, model, msgs, tools, prompt + system, true
}

func (c *call) countTokens() {
	_, _, _, _, prompt, ok := c.readMessages()
	if ok {
		c.answerJSON(map[string]any{"input_tokens": prompt})
	}
}

func (c *call) messages() {
	q, model, msgs, tools, prompt, ok := c.readMessages()
	if !ok {
		return
	}
	if q.MaxTokens == nil {
		c.refuse(badRequest("max_tokens", "max_tokens: field required"))
		return
	}
	seed := c.seed(q.Messages, q.System, q.Tools, q.ToolChoice)
	t, e := pickTool(tools, q.ToolChoice, seed, msgs[len(msgs)-1].isToolResult())
	if e != nil {
		c.refuse(e)
		return
	}
	p := c.plan(model, seed, caps{n: 1, most: q.MaxTokens, param: "max_tokens", prompt: prompt}, 1, q.Stream)
	if p == nil {
		return
	}
	if t != nil {
		args := string(generate(nil, t.schema(), nil, seed, 0))
		p.prepare(args, "tool_calls", &toolCall{id: "toolu_" + p.id[:16], name: t.name()}, q.MaxTokens)
	}
	c.answer(p, &messagesDialect{p: p})
}

// messagesDialect is /v1/messages. An answer that calls a tool holds a line of text
// before the call, as models do.
type messagesDialect struct {
	p    *plan
	sent int64
}

const toolPreface = "Voilà: "

func stopReason(finish string) string {
	switch finish {
	case "length":
		return "max_tokens"
	case "tool_calls":
		return "tool_use"
	}
	return "end_turn"
}

// usage is Anthropic's: input_tokens leaves out what came from the cache.
func (d *messagesDialect) usage(b []byte, out int64) []byte {
	if !d.p.usage() {
		return b
	}
	b = append(b, `,"usage":{"input_tokens":`...)
	b = d.p.appendCount(b, d.p.prompt-d.p.cached)
	b = append(b, `,"cache_creation_input_tokens":0,"cache_read_input_tokens":`...)
	b = d.p.appendCount(b, d.p.cached)
	b = append(b, `,"output_tokens":`...)
	return append(d.p.appendCount(b, out), '}')
}

func event(b []byte, name string) []byte {
	b = append(b, "event: "...)
	b = append(b, name...)
	b = append(b, "\n"+`data: {"type":"`...)
	return append(append(b, name...), '"')
}

func (d *messagesDialect) head(b []byte) []byte {
	b = append(b, `"id":"msg_`...)
	b = append(b, d.p.id...)
	b = append(b, `","type":"message","role":"assistant","model":`...)
	return appendString(b, d.p.model)
}

func (d *messagesDialect) open(b []byte) []byte {
	b = append(event(b, "message_start"), `,"message":{`...)
	b = append(d.head(b), `,"content":[],"stop_reason":null,"stop_sequence":null`...)
	b = append(d.usage(b, 0), "}}\n\n"...)
	b = append(event(b, "content_block_start"), `,"index":0,"content_block":{"type":"text","text":""}}`+"\n\n"...)
	b = append(event(b, "ping"), "}\n\n"...)
	if t := d.p.choices[0].tool; t != nil {
		b = d.delta(b, 0, "text_delta", "text", toolPreface)
		b = append(event(b, "content_block_stop"), `,"index":0}`+"\n\n"...)
		b = append(event(b, "content_block_start"), `,"index":1,"content_block":{"type":"tool_use","id":`...)
		b = append(appendString(b, t.id), `,"name":`...)
		b = append(appendString(b, t.name), `,"input":{}}}`+"\n\n"...)
	}
	return b
}

func (d *messagesDialect) delta(b []byte, index int, kind, member, text string) []byte {
	b = append(event(b, "content_block_delta"), `,"index":`...)
	b = strconv.AppendInt(b, int64(index), 10)
	b = append(b, `,"delta":{"type":"`...)
	b = append(append(b, kind...), `","`...)
	b = append(append(b, member...), `":`...)
	return append(appendString(b, text), "}}\n\n"...)
}

func (d *messagesDialect) token(b []byte, k, i int) []byte {
	d.sent++
	if d.p.choices[k].tool != nil {
		return d.delta(b, 1, "input_json_delta", "partial_json", d.p.token(k, i))
	}
	return d.delta(b, 0, "text_delta", "text", d.p.token(k, i))
}

func (d *messagesDialect) close(b []byte) []byte {
	ch := &d.p.choices[0]
	b = append(event(b, "content_block_stop"), `,"index":`...)
	if ch.tool != nil {
		b = append(b, "1}\n\n"...)
	} else {
		b = append(b, "0}\n\n"...)
	}
	b = append(event(b, "message_delta"), `,"delta":{"stop_reason":`...)
	b = append(appendString(b, stopReason(ch.finish)), `,"stop_sequence":null}`...)
	b = append(d.usage(b, d.sent), "}\n\n"...)
	return append(event(b, "message_stop"), "}\n\n"...)
}

func (d *messagesDialect) body(b []byte) []byte {
	ch := &d.p.choices[0]
	b = append(b, '{')
	b = append(d.head(b), `,"content":[{"type":"text","text":`...)
	if ch.tool == nil {
		b = append(appendString(b, d.p.text(0)), `}]`...)
	} else {
		b = append(appendString(b, toolPreface), `},{"type":"tool_use","id":`...)
		b = append(appendString(b, ch.tool.id), `,"name":`...)
		b = append(appendString(b, ch.tool.name), `,"input":`...)
		if args := d.p.text(0); jsontext.Value(args).IsValid() {
			b = append(b, args...)
		} else { // cut off by max_tokens
			b = append(b, `{}`...)
		}
		b = append(b, `}]`...)
	}
	b = append(b, `,"stop_reason":`...)
	b = append(appendString(b, stopReason(ch.finish)), `,"stop_sequence":null`...)
	return append(d.usage(b, ch.n), '}')
}

// tokenizeRequest is vLLM's: a prompt or a conversation.
type tokenizeRequest struct {
	Model    string         `json:"model"`
	Prompt   *string        `json:"prompt"`
	Messages jsontext.Value `json:"messages"`
	Tools    jsontext.Value `json:"tools"`
	Strings  bool           `json:"return_token_strs"`
}

func (c *call) tokenize() {
	var q tokenizeRequest
	if !c.decode(&q) {
		return
	}
	if _, ok := c.model(q.Model); !ok {
		return
	}
	var ids []uint32
	switch {
	case q.Prompt != nil:
		ids = tokenIDs(*q.Prompt)
	default:
		msgs, _, n, e := c.conversation(q.Messages, q.Tools)
		if e != nil {
			c.refuse(e)
			return
		}
		for _, m := range msgs {
			var s string
			if json.Unmarshal(m.Content, &s) == nil {
				ids = append(ids, tokenIDs(s)...)
			}
		}
		for int64(len(ids)) < n { // the template and whatever is not text
			ids = append(ids, 0)
		}
	}
	var strs []string
	if q.Strings {
		strs = make([]string, len(ids))
		for i := range ids {
			strs[i] = string([]rune(textOf(ids[i : i+1])))
		}
	}
	out := map[string]any{"count": len(ids), "max_model_len": c.s.cfg.ContextLen, "tokens": ids, "token_strs": nil}
	if strs != nil {
		out["token_strs"] = strs
	}
	c.answerJSON(out)
}

func (c *call) detokenize() {
	var q struct {
		Model  string   `json:"model"`
		Tokens []uint32 `json:"tokens"`
	}
	if !c.decode(&q) {
		return
	}
	if _, ok := c.model(q.Model); ok {
		c.answerJSON(map[string]any{"prompt": string([]rune(textOf(q.Tokens)))})
	}
}
