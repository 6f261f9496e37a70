package fakevllm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// recordedHeaders are kept in a Record: what a gateway may add, change or leak.
func recordedHeaders() []string {
	return []string{
		"Authorization", "X-Api-Key", "Content-Type", "Content-Encoding", "Accept-Encoding", "User-Agent",
		"X-Request-Id", "Traceparent", "X-Forwarded-For", "Anthropic-Version", "Cookie", "Host", "Te",
		"X-Headgate-User", "X-Headgate-Surface", "X-Headgate-Class", "X-Headgate-Cache", "X-Headgate-Timeout",
	}
}

// call is one request in progress. It belongs to its handler's goroutine; the
// record inside is shared with readers of the log and changes only under the
// server's lock.
type call struct {
	s      *Server
	w      http.ResponseWriter
	r      *http.Request
	rec    *Record
	body   []byte
	faults map[Fault]string
	timer  *time.Timer

	inference bool // counts as in flight
	running   bool // holds a slot
	kv        int64
	out       int64            // tokens generated
	parts     []jsontext.Value // what its prompt is made of, for the prefix cache
}

// handle wraps an endpoint in what all share: the record, the method, the key, the
// body, the faults and the way out. method "" takes any.
func (s *Server) handle(method string, inference bool, f func(*call)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c := s.begin(w, r, inference)
		defer c.end()
		switch {
		case method != "" && r.Method != method && (method != http.MethodGet || r.Method != http.MethodHead):
			w.Header().Set("Allow", method)
			c.refuse(&apiError{status: http.StatusMethodNotAllowed, msg: "Method Not Allowed"})
		case s.cfg.APIKey != "" && strings.HasPrefix(r.URL.Path, "/v1") && r.Header.Get("Authorization") != "Bearer "+s.cfg.APIKey:
			c.finish(Refused, "")
			c.reply(http.StatusUnauthorized, "application/json", []byte(`{"error":"Unauthorized"}`))
		default:
			if c.read() && c.chooseFaults() && (inference || !c.sick()) {
				f(c)
			}
		}
	}
}

func (s *Server) begin(w http.ResponseWriter, r *http.Request, inference bool) *call {
	rec := &Record{Time: time.Now(), Method: r.Method, Path: r.URL.RequestURI(), Header: http.Header{}, Outcome: Open}
	for _, h := range recordedHeaders() {
		if v := r.Header.Values(h); len(v) > 0 {
			rec.Header[h] = v
		}
	}
	rec.Header["Host"] = []string{r.Host}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	rec.Seq = s.seq
	at := &s.ring[s.seq%int64(len(s.ring))]
	if *at != nil {
		s.stats.Dropped++
	}
	*at = rec
	s.stats.Requests++
	if inference {
		s.stats.InFlight++
		s.stats.PeakInFlight = max(s.stats.PeakInFlight, s.stats.InFlight)
	}
	s.notify()
	return &call{s: s, w: w, r: r, rec: rec, inference: inference}
}

// finish settles how the request ended and takes it out of all gauges. It comes
// before the last bytes are written; only Aborted may still overrule it.
func (c *call) finish(o Outcome, f Fault) {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &s.stats
	s.stop(c)
	rec := c.rec
	switch {
	case rec.Outcome == Open:
		rec.Ended = time.Now()
		st.PromptTokens += rec.PromptTokens
		st.CachedTokens += rec.CachedTokens
		st.OutputTokens += c.out
	case o == Aborted && rec.Outcome != Aborted:
		st.Outcomes[rec.Outcome]--
		st.OutputTokens += c.out - rec.OutputTokens
	default:
		return
	}
	if o == Aborted {
		st.WastedTokens += c.out
	}
	rec.OutputTokens, rec.Outcome, rec.Fault = c.out, o, f
	st.Outcomes[o]++
	s.notify()
}

// end closes a request on every way out, a panic included.
func (c *call) end() {
	if c.timer != nil {
		c.timer.Stop()
	}
	c.finish(Failed, "")
}

// abort ends a request whose client went away.
func (c *call) abort() { c.finish(Aborted, "") }

func (c *call) read() bool {
	var buf bytes.Buffer
	if n := c.r.ContentLength; n > 0 {
		buf.Grow(int(min(n, c.s.cfg.MaxBody)) + bytes.MinRead)
	}
	_, err := buf.ReadFrom(http.MaxBytesReader(c.w, c.r.Body, c.s.cfg.MaxBody))
	c.body = buf.Bytes()
	c.s.update(func(*Stats) {
		c.rec.BodyBytes = int64(len(c.body))
		if keep := min(len(c.body), c.s.cfg.RecordBody); keep > 0 {
			c.rec.Body = c.body[:keep:keep]
		}
	})
	var tooBig *http.MaxBytesError
	switch {
	case err == nil:
		return true
	case errors.As(err, &tooBig):
		c.refuse(&apiError{status: http.StatusRequestEntityTooLarge, msg: fmt.Sprintf("The body exceeds %d bytes.", tooBig.Limit)})
	default:
		c.abort()
	}
	return false
}

// decode reads the body into v. Unknown members are allowed, repeated ones take the
// last value, names are case-sensitive: as vLLM's parser has it.
func (c *call) decode(v any) bool {
	if err := json.Unmarshal(c.body, v, jsontext.AllowDuplicateNames(true)); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("unexpected end of JSON input")
		}
		c.refuse(badRequest("", "The request body cannot be read: %v", err))
		return false
	}
	return true
}

// chooseFaults collects what the request asks for and what chance adds.
func (c *call) chooseFaults() bool {
	asked := c.r.Header.Get("X-Fake-Fault")
	if asked == "" && bytes.Contains(c.body, []byte(`"fake_fault"`)) {
		var b struct {
			Args struct {
				Fault string `json:"fake_fault"`
			} `json:"vllm_xargs"`
		}
		if json.Unmarshal(c.body, &b, jsontext.AllowDuplicateNames(true)) == nil {
			asked = b.Args.Fault
		}
	}
	standing := c.s.standing()
	if asked == "" && len(standing) == 0 {
		return true
	}
	c.faults = map[Fault]string{}
	for part := range strings.SplitSeq(asked, ",") {
		name, arg, _ := strings.Cut(strings.TrimSpace(part), "=")
		if name == "" {
			continue
		}
		if !Fault(name).valid() {
			c.refuse(badRequest("", "There is no fault %q.", name))
			return false
		}
		c.faults[Fault(name)] = arg
	}
	for _, f := range standing {
		if unit(mix(hashString(c.s.cfg.Seed, string(f.fault))^uint64(c.rec.Seq))) < f.share && c.inference {
			c.faults[f.fault] = f.arg
		}
	}
	return true
}

func (c *call) has(f Fault) bool { _, ok := c.faults[f]; return ok }

// early lets those faults strike that leave no answer at all, or only an error.
// It reports whether one did.
func (c *call) early() bool {
	for f := range c.faults {
		if code := f.status(); code != 0 {
			if after := c.faults[f]; after != "" {
				c.w.Header().Set("Retry-After", after)
			}
			c.finish(Failed, f)
			c.fail(&apiError{status: code, msg: "This answer is a fault that was asked for."})
			return true
		}
	}
	switch {
	case c.has(Reset), c.has(Refuse):
		c.finish(Failed, Reset)
		c.reset()
	case c.down():
		c.finish(Failed, Flap)
		c.reset()
	case c.has(Hang):
		c.hang(Hang)
	case c.has(Garbage):
		c.finish(Failed, Garbage)
		c.reply(http.StatusOK, "text/html", []byte("<html>not what you asked for: \xff</html>\n"))
	default:
		return false
	}
	return true
}

// admit waits for a slot, then for whoever holds it back, then for the first token.
// cached is how many tokens of the prompt need no time; the prefix cache, where there
// is one, overrules it. It returns false when the request has ended.
func (c *call) admit(prompt int64, cached *int64, planned int64) bool {
	s := c.s
	if c.early() {
		return false
	}
	c.kv = prompt + planned
	if !c.enter() {
		return false
	}
	if s.prefix != nil {
		*cached = s.prefix.cachedOf(c.parts, prompt)
	}
	s.update(func(*Stats) { c.rec.PromptTokens, c.rec.CachedTokens = prompt, *cached })
	if !c.held() || !c.pause(c.pace(s.cfg.TTFT+time.Duration(prompt-*cached)*s.cfg.PromptToken)) {
		c.abort()
		return false
	}
	return true
}

// drag is the factor of the fault Drag, at least 1.
func (c *call) drag() int64 {
	arg, ok := c.faults[Drag]
	if !ok {
		return 1
	}
	if n, err := strconv.ParseInt(arg, 10, 64); err == nil && n >= 1 {
		return min(n, maxDrag)
	}
	return 10
}

// held blocks while Hold applies to the number of tokens generated so far. It
// returns false when the client went away.
func (c *call) held() bool {
	h := c.s.hold.Load()
	if h == nil || h.after != c.out {
		return true
	}
	c.s.update(func(st *Stats) { st.Held++; c.rec.OutputTokens = c.out })
	defer c.s.update(func(st *Stats) { st.Held-- })
	select {
	case <-h.released:
		return true
	case <-c.r.Context().Done():
		return false
	}
}

// pause waits d. It returns false when the client went away.
func (c *call) pause(d time.Duration) bool {
	if d <= 0 {
		return c.r.Context().Err() == nil
	}
	if c.timer == nil {
		c.timer = time.NewTimer(d)
	} else {
		c.timer.Reset(d)
	}
	select {
	case <-c.timer.C:
		return true
	case <-c.r.Context().Done():
		return false
	}
}

// apiError is an answer in vLLM's error shape.
type apiError struct {
	status     int
	msg, param string
}

func (e *apiError) Error() string { return e.msg }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, msg: fmt.Sprintf(format, args...), param: param}
}

// kind is the type that vLLM gives an error of this status.
func (e *apiError) kind() string {
	switch e.status {
	case http.StatusBadRequest:
		return "BadRequestError"
	case http.StatusNotFound:
		return "NotFoundError"
	case http.StatusTooManyRequests:
		return "RateLimitError"
	}
	if e.status >= 500 {
		return "InternalServerError"
	}
	return http.StatusText(e.status)
}

// anthropicKind is the type that Anthropic's API gives an error of this status.
func (e *apiError) anthropicKind() string {
	switch e.status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	}
	if e.status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

func (e *apiError) append(b []byte, anthropic bool) []byte {
	if anthropic {
		b = append(b, `{"type":"error","error":{"type":`...)
		b = appendString(b, e.anthropicKind())
		b = append(b, `,"message":`...)
		b = appendString(b, e.msg)
		return append(b, `}}`...)
	}
	b = append(b, `{"error":{"message":`...)
	b = appendString(b, e.msg)
	b = append(b, `,"type":`...)
	b = appendString(b, e.kind())
	b = append(b, `,"param":`...)
	if e.param == "" {
		b = append(b, `null`...)
	} else {
		b = appendString(b, e.param)
	}
	b = append(b, `,"code":`...)
	b = strconv.AppendInt(b, int64(e.status), 10)
	return append(b, `}}`...)
}

func (c *call) anthropic() bool { return strings.HasPrefix(c.r.URL.Path, "/v1/messages") }

// refuse answers with an error that the request earned.
func (c *call) refuse(e *apiError) {
	c.finish(Refused, "")
	c.fail(e)
}

func (c *call) fail(e *apiError) {
	c.reply(e.status, "application/json", e.append(nil, c.anthropic()))
}

// answerJSON ends a lookup or a pooling request with v.
func (c *call) answerJSON(v any) {
	b, err := json.Marshal(v, json.Deterministic(true))
	if err != nil {
		c.finish(Failed, "")
		c.fail(&apiError{status: http.StatusInternalServerError, msg: err.Error()})
		return
	}
	c.finish(OK, "")
	c.reply(http.StatusOK, "application/json", b)
}

// model checks the name that a request asked for and returns the one served.
func (c *call) model(name string) (string, bool) {
	if name == "" {
		name = c.s.cfg.Models[0]
	}
	c.s.update(func(*Stats) { c.rec.Model = name })
	if slices.Contains(c.s.cfg.Models, name) {
		return name, true
	}
	c.refuse(&apiError{status: http.StatusNotFound, msg: fmt.Sprintf("The model `%s` does not exist.", name)})
	return "", false
}
