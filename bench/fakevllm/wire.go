package fakevllm

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"strconv"
	"time"
	"unicode/utf8"
)

// wire writes one streamed answer, bent by the faults that concern bytes. Every
// method that returns bool says whether the client is still there.
type wire struct {
	c     *call
	rc    *http.ResponseController
	gz    *gzip.Writer
	split bool
	pause time.Duration
	seed  uint64
	extra []byte // scratch for comments and CRLF
}

func (c *call) status(code int) { c.s.update(func(*Stats) { c.rec.Status = code }) }

// openStream sends the headers of a stream.
func (c *call) openStream() *wire {
	o := &wire{c: c, rc: http.NewResponseController(c.w), split: c.has(Split), pause: c.s.cfg.SplitPause, seed: uint64(c.rec.Seq)}
	h := c.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	if c.has(Gzip) {
		h.Set("Content-Encoding", "gzip")
		o.gz = gzip.NewWriter(c.w)
	}
	c.status(http.StatusOK)
	c.w.WriteHeader(http.StatusOK)
	return o
}

// frame writes one frame and flushes it.
func (o *wire) frame(b []byte) bool {
	if o.c.has(Comments) {
		o.extra = append(append(o.extra[:0], ": tick\n\n"...), b...)
		b = o.extra
	}
	if o.c.has(CRLF) {
		b = bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n"))
	}
	if !o.split {
		return o.write(b)
	}
	if o.pause > 0 {
		at := middle(b)
		return o.write(b[:at]) && o.c.pause(o.pause) && o.write(b[at:])
	}
	for len(b) > 0 {
		o.seed = mix(o.seed)
		n := min(len(b), 1+2*int(o.seed%16))
		if !o.write(b[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

// middle is a place to cut b: inside its first multi-byte character, else at an odd
// place about half way.
func middle(b []byte) int {
	for i, c := range b {
		if c >= utf8.RuneSelf {
			return i + 1
		}
	}
	return min(len(b), len(b)/2|1)
}

func (o *wire) write(b []byte) bool {
	if o.gz == nil {
		if _, err := o.c.w.Write(b); err != nil {
			return false
		}
		return o.rc.Flush() == nil
	}
	if _, err := o.gz.Write(b); err != nil || o.gz.Flush() != nil {
		return false
	}
	return o.rc.Flush() == nil
}

// frames writes frames one by one.
func (o *wire) frames(b []byte) bool {
	for len(b) > 0 {
		n := frameLen(b)
		if !o.frame(b[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

func frameLen(b []byte) int {
	if i := bytes.Index(b, []byte("\n\n")); i >= 0 {
		return i + 2
	}
	return len(b)
}

// last ends an answer well. The request leaves its slot before the last frame.
func (o *wire) last(b []byte) {
	for n := frameLen(b); n < len(b); n = frameLen(b) {
		if o.c.has(NoNewline) && bytes.Equal(b[n:], doneFrame()) {
			b = bytes.TrimRight(b[:n], "\n")
			break
		}
		if !o.frame(b[:n]) {
			o.c.abort()
			return
		}
		b = b[n:]
	}
	if o.c.has(NoNewline) {
		b = bytes.TrimRight(b, "\n")
	}
	o.c.finish(OK, "")
	if !o.frame(b) || !o.closed() {
		o.c.abort()
	}
}

func (o *wire) closed() bool { return o.gz == nil || o.gz.Close() == nil }

// inband ends a stream with an error in place of the rest.
func (o *wire) inband(e *apiError) {
	var b []byte
	switch {
	case o.c.anthropic():
		b = append(b, "event: error\ndata: "...)
		b = append(e.append(b, true), "\n\n"...)
	case o.c.r.URL.Path == "/v1/responses":
		b = append(b, `event: error`+"\n"+`data: {"type":"error","code":"server_error","message":`...)
		b = append(appendString(b, e.msg), `,"param":null,"sequence_number":0}`+"\n\n"...)
	default:
		b = append(b, "data: "...)
		b = append(e.append(b, false), "\n\n"...)
		b = append(b, doneFrame()...)
	}
	if !o.frames(b) || !o.closed() {
		return // the client left an answer that had failed already
	}
}

// endless sends a line without end, up to endlessSize, and then cuts the connection.
func (o *wire) endless() {
	block := bytes.Repeat([]byte("x"), 64<<10)
	alive := o.write([]byte("data: "))
	for n := 0; alive && n < endlessSize; n += len(block) {
		alive = o.write(block) && o.c.r.Context().Err() == nil
	}
	if !alive {
		o.c.abort()
		return
	}
	o.c.finish(Failed, Endless)
	panic(http.ErrAbortHandler)
}

// reply sends a whole answer. The request must have been finished before.
func (c *call) reply(status int, contentType string, b []byte) {
	h := c.w.Header()
	if contentType != "" {
		h.Set("Content-Type", contentType)
	}
	if c.has(Gzip) && len(b) > 0 {
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		_, err := w.Write(b)
		if cerr := w.Close(); err == nil && cerr == nil {
			b = z.Bytes()
			h.Set("Content-Encoding", "gzip")
		}
	}
	h.Set("Content-Length", strconv.Itoa(len(b)))
	c.status(status)
	c.w.WriteHeader(status)
	if c.r.Method == http.MethodHead {
		return
	}
	if !c.has(Split) {
		if _, err := c.w.Write(b); err != nil {
			c.abort()
		}
		return
	}
	o := &wire{c: c, rc: http.NewResponseController(c.w), split: true, pause: c.s.cfg.SplitPause, seed: uint64(c.rec.Seq)}
	if !o.frame(b) {
		c.abort()
	}
}

// reset drops the connection so that the client reads "connection reset" where the
// protocol allows it, else a broken stream.
func (c *call) reset() {
	conn, _, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	resetConn(conn)
}
