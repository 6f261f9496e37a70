package fakevllm

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

type responsesRequest struct {
	Model        string         `json:"model"`
	Input        jsontext.Value `json:"input"`
	Instructions string         `json:"instructions"`
	Tools        jsontext.Value `json:"tools"`
	ToolChoice   jsontext.Value `json:"tool_choice"`
	MaxOutput    *int64         `json:"max_output_tokens"`
	Stream       bool           `json:"stream"`
	Store        *bool          `json:"store"`
	Background   bool           `json:"background"`
	Previous     string         `json:"previous_response_id"`
}

// stored is a response kept for later. One made in the background moves on each
// time it is looked at: queued, in_progress, completed.
type stored struct {
	d      *responsesDialect
	status string
	tokens int64 // what it adds to the prompt of one that builds on it
}

func (c *call) responses() {
	var q responsesRequest
	if !c.decode(&q) {
		return
	}
	model, ok := c.model(q.Model)
	if !ok {
		return
	}
	prompt, resultGiven, e := responsesPrompt(&q)
	var tools []tool
	if e == nil {
		tools, e = readTools(q.Tools)
	}
	if e == nil && q.Background && q.Store != nil && !*q.Store {
		e = badRequest("background", "A background response must be stored.")
	}
	if e == nil && q.Previous != "" {
		if before := c.s.lookup(q.Previous); before != nil {
			prompt += before.tokens
		} else {
			e = noResponse(q.Previous)
		}
	}
	seed := c.seed(q.Input, q.Tools, q.ToolChoice)
	var t *tool
	if e == nil {
		t, e = pickTool(tools, q.ToolChoice, seed, resultGiven)
	}
	if e != nil {
		c.refuse(e)
		return
	}
	p := c.plan(model, seed, caps{n: 1, most: q.MaxOutput, param: "max_output_tokens", prompt: prompt}, 1, q.Stream && !q.Background)
	if p == nil {
		return
	}
	p.id = fmt.Sprintf("%s%08x", p.id[:24], c.rec.Seq)
	if t != nil {
		args := string(generate(nil, t.schema(), nil, seed, 0))
		p.prepare(args, "tool_calls", &toolCall{id: "call_" + p.id[:16], name: t.name()}, q.MaxOutput)
	}
	d := &responsesDialect{p: p}
	if q.Store == nil || *q.Store {
		st := &stored{d: d, status: "completed", tokens: prompt + p.output()}
		if q.Background {
			st.status = "queued"
		}
		c.s.keep("resp_"+p.id, st)
		if q.Background {
			c.finish(OK, "")
			c.reply(http.StatusOK, "application/json", d.object(nil, "queued"))
			return
		}
	}
	c.answer(p, d)
}

// responsesPrompt counts the input, which is a text or a list of items.
func responsesPrompt(q *responsesRequest) (prompt int64, resultGiven bool, e *apiError) {
	prompt = tokensOf(len(q.Instructions)) + tokensOf(len(q.Tools))
	switch q.Input.Kind() {
	case '"':
		n, e := contentTokens(q.Input)
		return prompt + tokensPerChat + tokensPerMessage + n, false, e
	case '[':
		var items []message
		if err := json.Unmarshal(q.Input, &items, jsontext.AllowDuplicateNames(true)); err != nil {
			return 0, false, badRequest("input", "The input cannot be read: %v", err)
		}
		if len(items) == 0 {
			return 0, false, badRequest("input", "The input is empty.")
		}
		n, e := chatTokens(items)
		return prompt + n, items[len(items)-1].isToolResult(), e
	}
	return 0, false, badRequest("input", "The input must be a string or a list of items.")
}

func noResponse(id string) *apiError {
	return &apiError{status: http.StatusNotFound, msg: fmt.Sprintf("Response with id '%s' not found.", id)}
}

func (s *Server) lookup(id string) *stored {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stored[id]
}

func (s *Server) keep(id string, st *stored) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.order) >= maxStored {
		delete(s.stored, s.order[0])
		s.order = s.order[1:]
	}
	s.stored[id] = st
	s.order = append(s.order, id)
}

// withStored answers from the stored response that the path names, whose status
// next decides under the server's lock.
func (c *call) withStored(next func(status string) (string, *apiError)) {
	id := c.r.PathValue("id")
	st := c.s.lookup(id)
	if st == nil {
		c.refuse(noResponse(id))
		return
	}
	var status string
	var e *apiError
	c.s.update(func(*Stats) {
		if status, e = next(st.status); e == nil {
			st.status = status
		}
	})
	if e != nil {
		c.refuse(e)
		return
	}
	c.finish(OK, "")
	c.reply(http.StatusOK, "application/json", st.d.object(nil, status))
}

func (c *call) getResponse() {
	c.withStored(func(status string) (string, *apiError) {
		switch status {
		case "queued":
			return "in_progress", nil
		case "in_progress":
			return "completed", nil
		}
		return status, nil
	})
}

func (c *call) cancelResponse() {
	c.withStored(func(status string) (string, *apiError) {
		if status == "queued" || status == "in_progress" {
			return "cancelled", nil
		}
		return "", badRequest("", "A response that was not made in the background cannot be cancelled.")
	})
}

// responsesDialect is /v1/responses. It is not changed once it was answered.
type responsesDialect struct {
	p   *plan
	seq int64
}

// object writes the response as it stands in a status; only a completed one has
// its output and usage.
func (d *responsesDialect) object(b []byte, status string) []byte {
	p := d.p
	b = append(b, `{"id":"resp_`...)
	b = append(b, p.id...)
	b = append(b, `","object":"response","created_at":`...)
	b = strconv.AppendInt(b, created, 10)
	done := status == "completed"
	if done && p.choices[0].finish == "length" {
		status = "incomplete"
	}
	b = append(b, `,"status":"`...)
	b = append(b, status...)
	b = append(b, `","error":null,"incomplete_details":`...)
	if status == "incomplete" {
		b = append(b, `{"reason":"max_output_tokens"}`...)
	} else {
		b = append(b, `null`...)
	}
	b = append(b, `,"model":`...)
	b = appendString(b, p.model)
	b = append(b, `,"output":[`...)
	if done {
		b = d.item(b, "completed", p.text(0))
	}
	b = append(b, `],"parallel_tool_calls":true,"tool_choice":"auto","tools":[],"text":{"format":{"type":"text"}},"usage":`...)
	if !done || !p.usage() {
		return append(b, `null}`...)
	}
	b = append(b, `{"input_tokens":`...)
	b = p.appendCount(b, p.prompt)
	b = append(b, `,"input_tokens_details":{"cached_tokens":`...)
	b = p.appendCount(b, p.cached)
	b = append(b, `},"output_tokens":`...)
	b = p.appendCount(b, p.choices[0].n)
	b = append(b, `,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":`...)
	return append(p.appendCount(b, p.prompt+p.choices[0].n), `}}`...)
}

// item is the one output item, with so much of its text.
func (d *responsesDialect) item(b []byte, status, text string) []byte {
	t := d.p.choices[0].tool
	if t != nil {
		b = append(b, `{"type":"function_call","id":"fc_`...)
		b = append(b, d.p.id...)
		b = append(b, `","call_id":`...)
		b = append(appendString(b, t.id), `,"name":`...)
		b = append(appendString(b, t.name), `,"arguments":`...)
		b = append(appendString(b, text), `,"status":"`...)
		return append(append(b, status...), `"}`...)
	}
	b = append(b, `{"type":"message","id":"msg_`...)
	b = append(b, d.p.id...)
	b = append(b, `","role":"assistant","status":"`...)
	b = append(append(b, status...), `","content":[`...)
	if status == "completed" {
		b = d.part(b, text)
	}
	return append(b, `]}`...)
}

func (d *responsesDialect) part(b []byte, text string) []byte {
	b = append(b, `{"type":"output_text","text":`...)
	return append(appendString(b, text), `,"annotations":[]}`...)
}

// event opens an event with its running number; about adds which item it concerns.
func (d *responsesDialect) event(b []byte, name string) []byte {
	b = append(event(b, name), `,"sequence_number":`...)
	b = strconv.AppendInt(b, d.seq, 10)
	d.seq++
	return b
}

func (d *responsesDialect) about(b []byte, name string) []byte {
	b = append(d.event(b, name), `,"item_id":"`...)
	if d.p.choices[0].tool != nil {
		b = append(b, "fc_"...)
	} else {
		b = append(b, "msg_"...)
	}
	return append(append(b, d.p.id...), `","output_index":0`...)
}

func (d *responsesDialect) open(b []byte) []byte {
	for _, name := range []string{"response.created", "response.in_progress"} {
		b = append(d.event(b, name), `,"response":`...)
		b = append(d.object(b, "in_progress"), "}\n\n"...)
	}
	b = append(d.event(b, "response.output_item.added"), `,"output_index":0,"item":`...)
	b = append(d.item(b, "in_progress", ""), "}\n\n"...)
	if d.p.choices[0].tool == nil {
		b = append(d.about(b, "response.content_part.added"), `,"content_index":0,"part":`...)
		b = append(d.part(b, ""), "}\n\n"...)
	}
	return b
}

func (d *responsesDialect) token(b []byte, k, i int) []byte {
	if d.p.choices[k].tool != nil {
		b = append(d.about(b, "response.function_call_arguments.delta"), `,"delta":`...)
	} else {
		b = append(d.about(b, "response.output_text.delta"), `,"content_index":0,"logprobs":[],"delta":`...)
	}
	return append(appendString(b, d.p.token(k, i)), "}\n\n"...)
}

func (d *responsesDialect) close(b []byte) []byte {
	text := d.p.text(0)
	if d.p.choices[0].tool != nil {
		b = append(d.about(b, "response.function_call_arguments.done"), `,"arguments":`...)
		b = append(appendString(b, text), "}\n\n"...)
	} else {
		b = append(d.about(b, "response.output_text.done"), `,"content_index":0,"logprobs":[],"text":`...)
		b = append(appendString(b, text), "}\n\n"...)
		b = append(d.about(b, "response.content_part.done"), `,"content_index":0,"part":`...)
		b = append(d.part(b, text), "}\n\n"...)
	}
	b = append(d.event(b, "response.output_item.done"), `,"output_index":0,"item":`...)
	b = append(d.item(b, "completed", text), "}\n\n"...)
	name := "response.completed"
	if d.p.choices[0].finish == "length" {
		name = "response.incomplete"
	}
	b = append(d.event(b, name), `,"response":`...)
	return append(d.object(b, "completed"), "}\n\n"...)
}

func (d *responsesDialect) body(b []byte) []byte { return d.object(b, "completed") }
