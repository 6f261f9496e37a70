package fakevllm

import (
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

func doneFrame() []byte { return []byte("data: [DONE]\n\n") }

// streamOptions follows vLLM: naming the object at all asks for usage, unless it
// says otherwise.
type streamOptions struct {
	IncludeUsage *bool `json:"include_usage"`
	Continuous   bool  `json:"continuous_usage_stats"`
}

// usageWanted sets what a request's stream_options ask of p.
func (p *plan) usageWanted(o *streamOptions) {
	if o == nil {
		return
	}
	p.includeUsage = o.IncludeUsage != nil && *o.IncludeUsage
	p.continuous = p.continuous || p.includeUsage && o.Continuous
}

type chatRequest struct {
	Model      string         `json:"model"`
	Messages   jsontext.Value `json:"messages"`
	Tools      jsontext.Value `json:"tools"`
	ToolChoice jsontext.Value `json:"tool_choice"`
	Format     *struct {
		Type   string `json:"type"`
		Schema *struct {
			Schema jsontext.Value `json:"schema"`
		} `json:"json_schema"`
	} `json:"response_format"`
	MaxTokens           *int64         `json:"max_tokens"`
	MaxCompletionTokens *int64         `json:"max_completion_tokens"`
	N                   *int64         `json:"n"`
	Stream              bool           `json:"stream"`
	StreamOptions       *streamOptions `json:"stream_options"`
	Logprobs            bool           `json:"logprobs"`
	TopLogprobs         int            `json:"top_logprobs"`
}

func orOne(n *int64) int64 {
	if n == nil {
		return 1
	}
	return *n
}

// seed hashes those members of a body that the text is a function of: the prompt,
// not the caps, the model's name, or how the answer is to be delivered. So a gateway
// that renames the model or asks for usage gets the same text.
func (c *call) seed(parts ...jsontext.Value) uint64 {
	c.parts = parts
	h := c.s.cfg.Seed
	for _, p := range parts {
		h = mix(hashBytes(h, p))
	}
	return h
}

// conversation reads messages and counts them with their tools.
func (c *call) conversation(raw, rawTools jsontext.Value) (msgs []message, tools []tool, prompt int64, e *apiError) {
	if raw.Kind() != '[' {
		return nil, nil, 0, badRequest("messages", "The messages must be a list.")
	}
	if err := json.Unmarshal(raw, &msgs, jsontext.AllowDuplicateNames(true)); err != nil {
		return nil, nil, 0, badRequest("messages", "The messages cannot be read: %v", err)
	}
	if len(msgs) == 0 {
		return nil, nil, 0, badRequest("messages", "The messages are empty.")
	}
	if tools, e = readTools(rawTools); e != nil {
		return nil, nil, 0, e
	}
	prompt, e = chatTokens(msgs)
	return msgs, tools, prompt + tokensOf(len(rawTools)), e
}

func readTools(raw jsontext.Value) (tools []tool, e *apiError) {
	if raw == nil || raw.Kind() == 'n' {
		return nil, nil
	}
	if err := json.Unmarshal(raw, &tools, jsontext.AllowDuplicateNames(true)); err != nil {
		return nil, badRequest("tools", "The tools cannot be read: %v", err)
	}
	return tools, nil
}

func (c *call) chat() {
	var q chatRequest
	if !c.decode(&q) {
		return
	}
	model, ok := c.model(q.Model)
	if !ok {
		return
	}
	if q.StreamOptions != nil && !q.Stream {
		c.refuse(badRequest("stream_options", "Stream options can only be defined when `stream=True`."))
		return
	}
	msgs, tools, prompt, e := c.conversation(q.Messages, q.Tools)
	if e != nil {
		c.refuse(e)
		return
	}
	lim := caps{n: orOne(q.N), most: q.MaxTokens, param: "max_tokens", prompt: prompt}
	if q.MaxCompletionTokens != nil {
		lim.most, lim.param = q.MaxCompletionTokens, "max_completion_tokens"
	}
	seed := c.seed(q.Messages, q.Tools, q.ToolChoice)
	t, e := pickTool(tools, q.ToolChoice, seed, msgs[len(msgs)-1].isToolResult())
	if e != nil {
		c.refuse(e)
		return
	}
	p := c.plan(model, seed, lim, 1, q.Stream)
	if p == nil {
		return
	}
	p.usageWanted(q.StreamOptions)
	if q.Logprobs {
		p.logprobs = min(max(q.TopLogprobs, 0), 20)
	}
	switch {
	case t != nil:
		args := string(generate(nil, t.schema(), nil, seed, 0))
		p.prepare(args, "tool_calls", &toolCall{id: "chatcmpl-tool-" + p.id[:16], name: t.name()}, lim.most)
	case q.Format != nil && q.Format.Type == "json_schema" && q.Format.Schema != nil:
		p.prepare(string(generate(nil, q.Format.Schema.Schema, nil, seed, 0)), "stop", nil, lim.most)
	case q.Format != nil && q.Format.Type == "json_object":
		p.prepare(`{"answer":"größe"}`, "stop", nil, lim.most)
	}
	c.answer(p, newChatDialect(p))
}

// chatDialect is /v1/chat/completions. head is what all chunks begin with.
type chatDialect struct {
	p    *plan
	head []byte
	sent int64
}

func newChatDialect(p *plan) *chatDialect {
	return &chatDialect{p: p, head: appendHead([]byte("data: "), "chatcmpl-"+p.id, "chat.completion.chunk", p.model)}
}

func appendHead(b []byte, id, object, model string) []byte {
	b = append(b, `{"id":`...)
	b = appendString(b, id)
	b = append(b, `,"object":"`...)
	b = append(b, object...)
	b = append(b, `","created":`...)
	b = strconv.AppendInt(b, created, 10)
	b = append(b, `,"model":`...)
	b = appendString(b, model)
	return append(b, `,"choices":[`...)
}

// begin and end write a chunk around the members of its delta.
func (d *chatDialect) begin(b []byte, k int) []byte {
	b = append(b, d.head...)
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(k), 10)
	return append(b, `,"delta":{`...)
}

func (d *chatDialect) end(b []byte, finish string) []byte {
	b = append(b, `,"finish_reason":`...)
	if finish == "" {
		b = append(b, `null`...)
	} else {
		b = append(appendString(b, finish), `,"stop_reason":null`...)
	}
	b = append(b, `}]`...)
	if d.p.continuous && d.p.usage() {
		b = append(b, `,"usage":`...)
		b = d.p.appendUsage(b, d.sent)
	}
	return append(b, "}\n\n"...)
}

func (d *chatDialect) open(b []byte) []byte {
	for k := range d.p.choices {
		b = append(d.begin(b, k), `"role":"assistant","content":""},"logprobs":null`...)
		b = d.end(b, "")
	}
	return b
}

func (d *chatDialect) token(b []byte, k, i int) []byte {
	p, ch := d.p, &d.p.choices[k]
	d.sent++
	b = d.begin(b, k)
	if ch.tool == nil {
		b = append(b, `"content":`...)
		b = appendString(b, p.token(k, i))
	} else {
		b = append(b, `"tool_calls":[{`...)
		if i == 0 {
			b = append(b, `"id":`...)
			b = append(appendString(b, ch.tool.id), `,"type":"function",`...)
		}
		b = append(b, `"index":0,"function":{`...)
		if i == 0 {
			b = append(b, `"name":`...)
			b = append(appendString(b, ch.tool.name), ',')
		}
		b = append(b, `"arguments":`...)
		b = append(appendString(b, p.token(k, i)), `}}]`...)
	}
	b = append(b, `},"logprobs":`...)
	if p.logprobs < 0 {
		b = append(b, `null`...)
	} else {
		b = append(b, `{"content":[`...)
		b = append(p.appendLogprob(b, k, i), `]}`...)
	}
	return d.end(b, "")
}

func (d *chatDialect) close(b []byte) []byte {
	for k := range d.p.choices {
		b = append(d.begin(b, k), `"content":""},"logprobs":null`...)
		b = d.end(b, d.p.choices[k].finish)
	}
	if d.p.includeUsage && d.p.usage() {
		b = append(b, d.head...)
		b = append(b, `],"usage":`...)
		b = append(d.p.appendUsage(b, d.sent), "}\n\n"...)
	}
	return append(b, doneFrame()...)
}

func (d *chatDialect) body(b []byte) []byte {
	p := d.p
	b = appendHead(b, "chatcmpl-"+p.id, "chat.completion", p.model)
	for k := range p.choices {
		ch := &p.choices[k]
		if k > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(k), 10)
		b = append(b, `,"message":{"role":"assistant","content":`...)
		if ch.tool == nil {
			b = append(appendString(b, p.text(k)), `,"refusal":null,"tool_calls":[]`...)
		} else {
			b = append(b, `null,"refusal":null,"tool_calls":[{"id":`...)
			b = append(appendString(b, ch.tool.id), `,"type":"function","function":{"name":`...)
			b = append(appendString(b, ch.tool.name), `,"arguments":`...)
			b = append(appendString(b, p.text(k)), `}}]`...)
		}
		b = append(b, `},"logprobs":`...)
		if p.logprobs < 0 {
			b = append(b, `null`...)
		} else {
			b = append(b, `{"content":[`...)
			for i := range int(ch.n) {
				if i > 0 {
					b = append(b, ',')
				}
				b = p.appendLogprob(b, k, i)
			}
			b = append(b, `]}`...)
		}
		b = append(b, `,"finish_reason":`...)
		b = append(appendString(b, ch.finish), `,"stop_reason":null,"token_ids":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":null`...)
	if p.usage() {
		b = append(b, `,"usage":`...)
		b = p.appendUsage(b, p.output())
	}
	return append(b, `,"prompt_logprobs":null,"prompt_token_ids":null,"kv_transfer_params":null}`...)
}

// appendUsage writes OpenAI's usage object for so many output tokens.
func (p *plan) appendUsage(b []byte, out int64) []byte {
	b = append(b, `{"prompt_tokens":`...)
	b = p.appendCount(b, p.prompt)
	b = append(b, `,"total_tokens":`...)
	b = p.appendCount(b, p.prompt+out)
	b = append(b, `,"completion_tokens":`...)
	b = p.appendCount(b, out)
	b = append(b, `,"prompt_tokens_details":{"cached_tokens":`...)
	b = p.appendCount(b, p.cached)
	return append(b, `}}`...)
}

// appendLogprob writes a chat logprob entry with its alternatives.
func (p *plan) appendLogprob(b []byte, k, i int) []byte {
	one := func(tok string, rank int) {
		b = append(b, `{"token":`...)
		b = appendString(b, tok)
		b = append(b, `,"logprob":`...)
		b = strconv.AppendFloat(b, -0.25-0.5*float64(rank), 'g', -1, 64)
		b = append(b, `,"bytes":[`...)
		for j := range len(tok) {
			if j > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(tok[j]), 10)
		}
		b = append(b, ']')
	}
	tok := p.token(k, i)
	one(tok, 0)
	b = append(b, `,"top_logprobs":[`...)
	for r := range p.logprobs {
		if r > 0 {
			b = append(b, ',')
			one(p.words[(i+r)%len(p.words)], r)
		} else {
			one(tok, 0)
		}
		b = append(b, '}')
	}
	return append(b, `]}`...)
}

type completionRequest struct {
	Model         string         `json:"model"`
	Prompt        jsontext.Value `json:"prompt"`
	MaxTokens     *int64         `json:"max_tokens"`
	N             *int64         `json:"n"`
	Stream        bool           `json:"stream"`
	StreamOptions *streamOptions `json:"stream_options"`
	Logprobs      *int           `json:"logprobs"`
}

func (c *call) completions() {
	var q completionRequest
	if !c.decode(&q) {
		return
	}
	model, ok := c.model(q.Model)
	if !ok {
		return
	}
	if q.StreamOptions != nil && !q.Stream {
		c.refuse(badRequest("stream_options", "Stream options can only be defined when `stream=True`."))
		return
	}
	counts, e := prompts(q.Prompt, "prompt")
	if e != nil {
		c.refuse(e)
		return
	}
	var prompt int64
	for _, n := range counts {
		prompt += n
	}
	p := c.plan(model, c.seed(q.Prompt), caps{n: orOne(q.N), most: q.MaxTokens, param: "max_tokens", prompt: prompt}, len(counts), q.Stream)
	if p == nil {
		return
	}
	p.usageWanted(q.StreamOptions)
	if q.Logprobs != nil {
		p.logprobs = min(max(*q.Logprobs, 0), 20)
	}
	c.answer(p, &textDialect{p: p, head: appendHead([]byte("data: "), "cmpl-"+p.id, "text_completion", p.model)})
}

// textDialect is /v1/completions.
type textDialect struct {
	p    *plan
	head []byte
	sent int64
}

// choice writes tokens i to j of choice k.
func (d *textDialect) choice(b []byte, k, i, j int, finish string) []byte {
	p := d.p
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(k), 10)
	b = append(b, `,"text":"`...)
	for n := i; n < j; n++ {
		b = appendEscaped(b, p.token(k, n))
	}
	b = append(b, `","logprobs":`...)
	if p.logprobs < 0 || i == j {
		b = append(b, `null`...)
	} else {
		b = d.appendLogprobs(b, k, i, j)
	}
	b = append(b, `,"finish_reason":`...)
	if finish == "" {
		b = append(b, `null`...)
	} else {
		b = appendString(b, finish)
	}
	return append(b, `,"stop_reason":null}`...)
}

func (d *textDialect) appendLogprobs(b []byte, k, i, j int) []byte {
	p := d.p
	list := func(name string, item func(n int)) {
		b = append(appendString(b, name), `:[`...)
		for n := i; n < j; n++ {
			if n > i {
				b = append(b, ',')
			}
			item(n)
		}
		b = append(b, ']')
	}
	b = append(b, '{')
	offset := 0
	list("text_offset", func(n int) {
		b = strconv.AppendInt(b, int64(offset), 10)
		offset += len([]rune(p.token(k, n)))
	})
	b = append(b, ',')
	list("token_logprobs", func(int) { b = append(b, `-0.25`...) })
	b = append(b, ',')
	list("tokens", func(n int) { b = appendString(b, p.token(k, n)) })
	b = append(b, ',')
	list("top_logprobs", func(n int) {
		b = append(b, '{')
		b = append(appendString(b, p.token(k, n)), `:-0.25}`...)
	})
	return append(b, '}')
}

func (d *textDialect) frame(b []byte, k, i, j int, finish string) []byte {
	b = append(b, d.head...)
	b = append(d.choice(b, k, i, j, finish), ']')
	if d.p.continuous && d.p.usage() {
		b = append(b, `,"usage":`...)
		b = d.p.appendUsage(b, d.sent)
	}
	return append(b, "}\n\n"...)
}

func (d *textDialect) open(b []byte) []byte { return b }

func (d *textDialect) token(b []byte, k, i int) []byte {
	d.sent++
	return d.frame(b, k, i, i+1, "")
}

func (d *textDialect) close(b []byte) []byte {
	for k := range d.p.choices {
		b = d.frame(b, k, 0, 0, d.p.choices[k].finish)
	}
	if d.p.includeUsage && d.p.usage() {
		b = append(b, d.head...)
		b = append(b, `],"usage":`...)
		b = append(d.p.appendUsage(b, d.sent), "}\n\n"...)
	}
	return append(b, doneFrame()...)
}

func (d *textDialect) body(b []byte) []byte {
	p := d.p
	b = appendHead(b, "cmpl-"+p.id, "text_completion", p.model)
	for k := range p.choices {
		if k > 0 {
			b = append(b, ',')
		}
		b = d.choice(b, k, 0, int(p.choices[k].n), p.choices[k].finish)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":null`...)
	if p.usage() {
		b = append(b, `,"usage":`...)
		b = p.appendUsage(b, p.output())
	}
	return append(b, `,"kv_transfer_params":null}`...)
}
