package proxy

import "time"

// ContentLog keeps prompts and answers of the callers that have Content set. Keep must
// not block; it owns the entry.
type ContentLog interface {
	// Wants says whether an entry would be kept, were it to end as told.
	Wants(tenant, requestID string, failed bool) bool
	Keep(ContentEntry)
}

// ContentEntry is one request with its content.
type ContentEntry struct {
	RequestID, Tenant, User, Key, Model, Route string
	Time                                       time.Time
	Status                                     int
	Failed                                     bool
	Request, Answer                            []byte
	Truncated                                  bool // Answer is longer
}

// maxAnswerKept bounds what is held of one answer for the content log, in bytes.
const maxAnswerKept = 256 << 10

// capture gathers an answer while it passes.
type capture struct {
	buf       []byte
	truncated bool
}

func (c *capture) answer(p []byte) {
	if room := maxAnswerKept - len(c.buf); len(p) > room {
		p, c.truncated = p[:room], true
	}
	c.buf = append(c.buf, p...)
}

// startCapture begins to keep content if the tenant wants that.
func (x *exchange) startCapture() {
	if x.caller.Content && x.p.cfg.Content != nil && x.p.cfg.Content.Wants(x.caller.Tenant, x.id, true) {
		x.content = &capture{}
	}
}

// close hands the exchange over if it is still wanted. The body is copied: its buffer goes
// back to the pool.
func (c *capture) close(x *exchange) {
	failed := x.gotErr != nil || x.answer.status >= 400 || x.answer.failure != nil
	if !x.p.cfg.Content.Wants(x.caller.Tenant, x.id, failed) {
		return
	}
	e := ContentEntry{
		RequestID: x.id, Tenant: x.caller.Tenant, User: x.user, Key: x.caller.KeyID, Time: x.start, Route: x.route.name,
		Status: x.answer.status, Failed: failed, Answer: c.buf, Truncated: c.truncated,
	}
	if x.model != nil {
		e.Model = x.model.Name
	}
	if x.body != nil {
		e.Request = append([]byte(nil), x.body.Bytes()...)
	}
	x.p.cfg.Content.Keep(e)
}
