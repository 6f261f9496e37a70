package ladder

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"headgate/proxy/openai"
)

// maxChoices is how many choices a static answer has at most, however many were asked for.
const maxChoices = 128

// Fingerprint is the system_fingerprint of static answers.
const Fingerprint = "headgate-static"

// Answer is a static answer: what a client gets instead of a model's. It has no usage but zeros, and
// ends for the reason that a model ends.
type Answer struct {
	Kind    openai.Kind // Chat, Completion, Response or Message
	Model   string      // as the client named it
	Text    string
	ID      string // unique, without the prefix that ids of the kind have
	Created time.Time
	Choices int64 // of a chat or a completion; below 1 is 1, at most 128

	Stream       bool // as server-sent events
	IncludeUsage bool // the stream's options ask for the usage
}

// Body is the answer's bytes and its Content-Type. It fails for other kinds only.
func (a *Answer) Body() (body []byte, contentType string, err error) {
	var v any
	switch a.Kind {
	case openai.Chat, openai.Completion:
		v = a.choices()
	case openai.Response:
		v = a.response()
	case openai.Message:
		v = a.message()
	default:
		return nil, "", fmt.Errorf("static answer: requests of kind %d have none", a.Kind)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, "", fmt.Errorf("static answer: %w", err)
	}
	if !a.Stream {
		return b.Bytes(), "application/json", nil
	}
	sse, err := openai.Replay(a.Kind, b.Bytes(), openai.ReplayOptions{IncludeUsage: a.IncludeUsage, Sound: true})
	if err != nil {
		return nil, "", fmt.Errorf("static answer: %w", err)
	}
	return sse, "text/event-stream; charset=utf-8", nil
}

type choicesAnswer struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	Model       string `json:"model"`
	Fingerprint string `json:"system_fingerprint"`
	Choices     []any  `json:"choices"`
	Usage       struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
	} `json:"usage"`
}

func (a *Answer) choices() any {
	type message struct {
		Role    string  `json:"role"`
		Content string  `json:"content"`
		Refusal *string `json:"refusal"`
	}
	type chat struct {
		Index    int       `json:"index"`
		Message  message   `json:"message"`
		Logprobs *struct{} `json:"logprobs"`
		Finish   string    `json:"finish_reason"`
	}
	type completion struct {
		Index    int       `json:"index"`
		Text     string    `json:"text"`
		Logprobs *struct{} `json:"logprobs"`
		Finish   string    `json:"finish_reason"`
	}
	out := choicesAnswer{ID: "chatcmpl-" + a.ID, Object: "chat.completion", Created: a.Created.Unix(), Model: a.Model, Fingerprint: Fingerprint}
	if a.Kind == openai.Completion {
		out.ID, out.Object = "cmpl-"+a.ID, "text_completion"
	}
	for i := range int(min(max(a.Choices, 1), maxChoices)) {
		if a.Kind == openai.Completion {
			out.Choices = append(out.Choices, completion{Index: i, Text: a.Text, Finish: "stop"})
			continue
		}
		out.Choices = append(out.Choices, chat{Index: i, Message: message{Role: "assistant", Content: a.Text}, Finish: "stop"})
	}
	return out
}

// response has every member that OpenAI's client libraries take for granted.
func (a *Answer) response() any {
	type object = map[string]any
	at := a.Created.Unix()
	return object{
		"id": "resp_" + a.ID, "object": "response", "created_at": at, "completed_at": at, "status": "completed", "model": a.Model,
		"output": []any{object{
			"id": "msg_" + a.ID, "type": "message", "status": "completed", "role": "assistant",
			"content": []any{object{"type": "output_text", "text": a.Text, "annotations": []any{}, "logprobs": []any{}}},
		}},
		"error": nil, "incomplete_details": nil, "instructions": nil, "metadata": object{}, "previous_response_id": nil,
		"parallel_tool_calls": true, "temperature": nil, "tool_choice": "auto", "tools": []any{}, "top_p": nil, "store": false,
		"usage": object{
			"input_tokens": 0, "input_tokens_details": object{"cached_tokens": 0},
			"output_tokens": 0, "output_tokens_details": object{"reasoning_tokens": 0}, "total_tokens": 0,
		},
	}
}

func (a *Answer) message() any {
	type block struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	type usage struct {
		Input  int `json:"input_tokens"`
		Output int `json:"output_tokens"`
	}
	return struct {
		ID           string  `json:"id"`
		Type         string  `json:"type"`
		Role         string  `json:"role"`
		Model        string  `json:"model"`
		Content      []block `json:"content"`
		StopReason   string  `json:"stop_reason"`
		StopSequence *string `json:"stop_sequence"`
		Usage        usage   `json:"usage"`
	}{"msg_" + a.ID, "message", "assistant", a.Model, []block{{"text", a.Text}}, "end_turn", nil, usage{}}
}
