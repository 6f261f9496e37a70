package journal

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// Encoder writes usage as CSV (RFC 4180; a cell of text that a spreadsheet would take for a
// formula, because it begins with = + - @, also full-width, a tab or a return, has a ' in front) or as JSON
// lines, one object each, with the same names. Dollars are decimal and exact to the
// nano-dollar (strings in JSON, so that no reader rounds them), times RFC 3339 in UTC with
// nanoseconds, empty where not known. Bytes that are no UTF-8 become U+FFFD. It is for one
// goroutine; Flush ends it.
type Encoder struct {
	w    *bufio.Writer
	json bool
	by   []string
	line []byte
	n    int      // cells in line
	head []string // collects the names instead of writing, where not nil
}

const encoderBuffer = 64 << 10

// NewEncoder of "csv" or "json". by is what rows are grouped by, nil for requests; Columns has
// the columns. Nothing reaches w before Flush or a buffer full; a CSV has its head even if
// nothing else comes.
func NewEncoder(w io.Writer, format string, by []string) (*Encoder, error) {
	if format != "csv" && format != "json" {
		return nil, fmt.Errorf("journal: unknown format %q: csv or json", format)
	}
	e := &Encoder{w: bufio.NewWriterSize(w, encoderBuffer), json: format == "json", by: slices.Clone(by)}
	if e.json {
		return e, nil
	}
	for _, name := range Columns(by) {
		e.text("", name)
	}
	return e, e.end()
}

// Columns names the columns of requests where by is nil, else those of rows: by's fields,
// and the sums.
func Columns(by []string) []string {
	e := &Encoder{head: []string{}}
	if by == nil {
		e.usage(&Usage{})
		return e.head
	}
	e.by = by
	e.row(&Row{Values: make([]string, len(by))})
	return e.head
}

// Usage writes one request.
func (e *Encoder) Usage(u *Usage) error {
	e.usage(u)
	return e.end()
}

func (e *Encoder) usage(u *Usage) {
	e.time("time", u.Time)
	e.time("started", u.Started)
	e.text("request_id", u.RequestID)
	e.text("tenant", u.Tenant)
	e.text("key", u.Key)
	e.text("user", u.User)
	e.text("surface", u.Surface)
	e.text("model", u.Model)
	e.text("asked_model", u.Asked)
	e.text("backend", u.Backend)
	e.int("input_tokens", u.Input)
	e.int("cached_input_tokens", u.CachedInput)
	e.int("cache_write_tokens", u.CacheWrite)
	e.int("cache_write_1h_tokens", u.CacheWrite1h)
	e.int("output_tokens", u.Output)
	e.int("images", u.Images)
	e.int("audio_seconds", u.AudioSeconds)
	e.usd("cost_usd", u.Cost)
	e.usd("reserved_usd", u.Reserved)
	e.text("cache_tier", u.Tier)
	e.int("latency_ms", u.Latency.Milliseconds())
	e.int("ttft_ms", u.TTFT.Milliseconds())
	e.int("status", int64(u.Status))
	e.text("outcome", u.Outcome)
	e.bool("stream", u.Stream)
	e.bool("estimated", u.Estimated)
	e.text("node", u.Node)
}

// Row writes one group.
func (e *Encoder) Row(r *Row) error {
	if len(r.Values) != len(e.by) {
		return fmt.Errorf("journal: a row of %d values, grouped by %d fields", len(r.Values), len(e.by))
	}
	e.row(r)
	return e.end()
}

func (e *Encoder) row(r *Row) {
	for i, v := range r.Values {
		e.text(e.by[i], v)
	}
	e.int("requests", r.Requests)
	e.int("input_tokens", r.Input)
	e.int("cached_input_tokens", r.CachedInput)
	e.int("cache_write_tokens", r.CacheWrite)
	e.int("cache_write_1h_tokens", r.CacheWrite1h)
	e.int("output_tokens", r.Output)
	e.int("images", r.Images)
	e.int("audio_seconds", r.AudioSeconds)
	e.usd("cost_usd", r.Cost)
	e.usd("lost_usd", r.Lost)
}

// Flush writes what is buffered.
func (e *Encoder) Flush() error { return e.w.Flush() }

// end ends a line.
func (e *Encoder) end() error {
	if e.json {
		e.line = append(e.line, "}\n"...)
	} else {
		e.line = append(e.line, "\r\n"...)
	}
	_, err := e.w.Write(e.line)
	e.line, e.n = e.line[:0], 0
	return err
}

// cell begins one.
func (e *Encoder) cell(name string) (write bool) {
	if e.head != nil {
		e.head = append(e.head, name)
		return false
	}
	switch {
	case e.json && e.n == 0:
		e.line = append(e.line, '{')
	case e.n > 0:
		e.line = append(e.line, ',')
	}
	e.n++
	if e.json {
		e.line = append(e.line, '"')
		e.line = append(e.line, name...) // our own word: nothing in it wants an escape
		e.line = append(e.line, '"', ':')
	}
	return true
}

func (e *Encoder) text(name, v string) {
	if !e.cell(name) {
		return
	}
	if e.json {
		e.line, _ = jsontext.AppendQuote(e.line, v) // the error says what it replaced
		return
	}
	e.line = appendCell(e.line, v)
}

// appendCell adds a cell of text as RFC 4180 has it.
func appendCell(line []byte, v string) []byte {
	if v == "" {
		return line
	}
	v = strings.ToValidUTF8(v, "\ufffd")
	first, _ := utf8.DecodeRuneInString(v)
	formula := strings.ContainsRune("=+-@\t\r\uff1d\uff0b\uff0d\uff20", first)
	if !strings.ContainsAny(v, "\",\r\n") && v[0] != ' ' {
		if formula {
			line = append(line, '\'')
		}
		return append(line, v...)
	}
	line = append(line, '"')
	if formula {
		line = append(line, '\'')
	}
	for i := range len(v) {
		if v[i] == '"' {
			line = append(line, '"')
		}
		line = append(line, v[i])
	}
	return append(line, '"')
}

func (e *Encoder) int(name string, v int64) {
	if e.cell(name) {
		e.line = strconv.AppendInt(e.line, v, 10)
	}
}

func (e *Encoder) bool(name string, v bool) {
	if e.cell(name) {
		e.line = strconv.AppendBool(e.line, v)
	}
}

func (e *Encoder) usd(name string, v int64) {
	if e.cell(name) {
		e.quote()
		e.line = appendUSD(e.line, v)
		e.quote()
	}
}

func (e *Encoder) time(name string, v time.Time) {
	if e.cell(name) {
		e.quote()
		if !v.IsZero() {
			e.line = v.UTC().AppendFormat(e.line, time.RFC3339Nano)
		}
		e.quote()
	}
}

// quote adds what stands around a string in JSON.
func (e *Encoder) quote() {
	if e.json {
		e.line = append(e.line, '"')
	}
}

// appendUSD adds nano-dollars as decimal dollars, at least two places and none that ends in a
// zero beyond.
func appendUSD(line []byte, nano int64) []byte {
	n := uint64(nano)
	if nano < 0 {
		line, n = append(line, '-'), -n
	}
	line = append(strconv.AppendUint(line, n/1e9, 10), '.')
	from := len(line)
	frac := n % 1e9
	for unit := uint64(1e8); unit > 0; unit /= 10 {
		line = append(line, byte('0'+frac/unit%10))
	}
	for len(line) > from+2 && line[len(line)-1] == '0' {
		line = line[:len(line)-1]
	}
	return line
}
