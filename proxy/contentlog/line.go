package contentlog

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"
)

// record is the form of a line. Of request and request_text, answer and answer_text one is set.
type record struct {
	Time             time.Time       `json:"time"`
	RequestID        string          `json:"request_id"`
	Tenant           string          `json:"tenant"`
	User             string          `json:"user,omitempty"`
	Key              string          `json:"key,omitempty"`
	Model            string          `json:"model,omitempty"`
	Route            string          `json:"route,omitempty"`
	Status           int             `json:"status"`
	Failed           bool            `json:"failed,omitempty"`
	Request          json.RawMessage `json:"request,omitempty"`
	RequestText      string          `json:"request_text,omitempty"`
	RequestTruncated bool            `json:"request_truncated,omitempty"`
	Answer           json.RawMessage `json:"answer,omitempty"`
	AnswerText       string          `json:"answer_text,omitempty"`
	AnswerTruncated  bool            `json:"answer_truncated,omitempty"`
}

// place is where the entry goes.
func (k *kept) place() place {
	return place{dir: folder(k.rules.Dir), stem: stem(k.Tenant), day: k.Time.UTC().Format(dayForm)}
}

// line redacts the entry's bodies and encodes it. It fails for a year beyond 9999.
func (k *kept) line() (line, error) {
	r := record{
		Time: k.Time.UTC(), RequestID: clean(k.RequestID), Tenant: clean(k.Tenant), User: clean(k.User), Key: clean(k.Key),
		Model: clean(k.Model), Route: clean(k.Route), Status: k.Status, Failed: k.Failed,
		RequestTruncated: k.requestCut, AnswerTruncated: k.Truncated,
	}
	r.Request, r.RequestText = k.rules.body(k.Request, k.requestCut)
	r.Answer, r.AnswerText = k.rules.body(k.Answer, k.Truncated)
	return encode(r)
}

// body redacts one body. Bytes that are not UTF-8 become U+FFFD.
func (r *rules) body(b []byte, cut bool) (json.RawMessage, string) {
	if len(b) == 0 {
		return nil, ""
	}
	b, isJSON := r.redact.body(bytes.ToValidUTF8(b, []byte("\uFFFD")), cut)
	if isJSON {
		return b, ""
	}
	return nil, string(b)
}

// clean makes s what a JSON string can hold, so that it is found again.
func clean(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// encode is json.Marshal with a line end and without escaping for HTML.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return b.Bytes(), err
}
