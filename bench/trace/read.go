package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Format is how a file tells of requests.
type Format string

// The formats.
const (
	CSV      Format = "csv"      // our own, see the package's comment
	Azure    Format = "azure"    // the Azure LLM inference traces: TIMESTAMP,ContextTokens,GeneratedTokens
	Mooncake Format = "mooncake" // Mooncake's: an object a line, with timestamp in ms, input_length, output_length and hash_ids
	Usage    Format = "usage"    // what `headgate usage export` prints, as CSV or JSON lines, each request a line
)

// Options say how much is read.
type Options struct {
	Name  string        // in messages
	First time.Duration // only what arrived before that, from the first request on; 0: all
}

// columns are the names that a format has for what it tells.
type columns struct{ at, tenant, input, output, blocks string }

// source is a file of some format.
type source interface {
	// next reads the next row, or returns io.EOF.
	next(*row) error
	// line is where the row began.
	line() int
	columns() *columns
	// named says that rows have tenants.
	named() bool
}

// wrong is what is wrong with a column.
type wrong struct {
	column string
	err    error
}

func (w wrong) Error() string { return "column " + w.column + ": " + w.err.Error() }
func (w wrong) Unwrap() error { return w.err }

// Open reads a file, packed with gzip or not, of the format or, if that is "", of one that its beginning shows. An
// error names the file, and the line, the column and the remedy where one is wrong.
func Open(path string, format Format, o Options) (t *Trace, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if o.Name == "" {
		o.Name = path
	}
	if t, err = Read(f, format, o); err != nil {
		return nil, err
	}
	t.Name = strings.TrimSuffix(filepath.Base(path), ".gz")
	return t, nil
}

// Read is Open for what is open already.
func Read(r io.Reader, format Format, o Options) (*Trace, error) {
	t, line, err := read(r, format, o)
	switch {
	case err == nil:
		return t, nil
	case line == 0:
		return nil, fmt.Errorf("%s: %w", o.Name, err)
	}
	return nil, fmt.Errorf("%s:%d: %w", o.Name, line, err)
}

// read says in which line an error is; 0: in none of them.
func read(r io.Reader, format Format, o Options) (*Trace, int, error) {
	s, format, looks, err := open(r, format)
	if err != nil {
		if looks != format {
			err = fmt.Errorf("%w; is it of the format %s?", err, looks)
		}
		return nil, 1, err
	}
	b := &builder{Trace: &Trace{Name: o.Name}, format: format}
	if s.named() {
		b.names = make(map[string]int32)
		b.Split = "as the file names them"
	}
	for {
		var r row
		if err := s.next(&r); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, s.line(), err
		}
		if o.First > 0 && format != Usage && len(b.Requests) > 0 && r.at-int64(b.Requests[0].At) >= int64(o.First) {
			break
		}
		if r.skip {
			continue
		}
		if err := b.add(&r, s.columns()); err != nil {
			return nil, s.line(), err
		}
	}
	t, err := b.finish()
	if err == nil && o.First > 0 {
		t, err = t.Head(o.First)
	}
	if err != nil { // that names the trace already
		return nil, 0, errors.New(strings.TrimPrefix(err.Error(), o.Name+": "))
	}
	return t, 0, nil
}

// sniffed is how much of a file tells its format.
const sniffed = 64 << 10

// open finds the format if it is not told, and says how the file looks.
func open(r io.Reader, format Format) (s source, _, looks Format, err error) {
	in := bufio.NewReaderSize(r, sniffed)
	if head, _ := in.Peek(2); bytes.Equal(head, []byte{0x1f, 0x8b}) {
		packed, err := gzip.NewReader(in)
		if err != nil {
			return nil, format, format, fmt.Errorf("unpack: %w", err)
		}
		in = bufio.NewReaderSize(packed, sniffed)
	}
	head, err := in.Peek(sniffed)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, format, format, err
	}
	head, _, _ = bytes.Cut(bytes.TrimLeft(head, "\ufeff \t\r\n"), []byte("\n"))
	object := bytes.HasPrefix(head, []byte("{"))
	if looks = formatOf(string(head), object); format == "" {
		format = looks
	} else if len(head) == 0 {
		looks = format
	}
	err = nil // what there is has been seen, however little
	switch {
	case format == Azure:
		s, err = newTable(in, columns{at: "TIMESTAMP", input: "ContextTokens", output: "GeneratedTokens"})
	case format == CSV:
		s, err = newTable(in, columns{at: "time", tenant: "tenant", input: "input_tokens", output: "output_tokens"})
	case format == Mooncake && !object:
		err = errors.New("it does not begin with an object: write JSON, an object a line")
	case format == Mooncake:
		s = &objects{lines: newLines(in), cols: columns{at: "timestamp", input: "input_length", output: "output_length", blocks: "hash_ids"}, read: mooncakeRow}
	case format == Usage && object:
		s = &objects{lines: newLines(in), cols: usageColumns(), read: usageRow}
	case format == Usage:
		s, err = newUsageTable(in)
	default:
		err = fmt.Errorf("there is no format %q: it is one of %s", format, strings.Join(Formats(), ", "))
	}
	return s, format, looks, err
}

// Formats are the names of all formats.
func Formats() []string {
	return []string{string(CSV), string(Azure), string(Mooncake), string(Usage)}
}

// formatOf knows a format by the first line.
func formatOf(head string, object bool) Format {
	switch {
	case object && strings.Contains(head, `"hash_ids"`):
		return Mooncake
	case object, strings.Contains(head, "request_id"):
		return Usage
	case strings.Contains(head, "ContextTokens"):
		return Azure
	}
	return CSV
}

// objects reads JSON, an object a line.
type objects struct {
	lines *bufio.Scanner
	cols  columns
	read  func(line []byte, r *row) error
	n     int
}

func newLines(r io.Reader) *bufio.Scanner {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxRecord)
	return s
}

func (o *objects) next(r *row) error {
	for o.lines.Scan() {
		o.n++
		if line := bytes.TrimSpace(o.lines.Bytes()); len(line) > 0 {
			return o.read(line, r)
		}
	}
	switch err := o.lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		o.n++
		return fmt.Errorf("the line has more than %d bytes: is it an object a line?", maxRecord)
	case err != nil:
		return err
	}
	return io.EOF
}

func (o *objects) line() int         { return o.n }
func (o *objects) columns() *columns { return &o.cols }
func (o *objects) named() bool       { return o.cols.tenant != "" }

// unmarshal says in which column an error is, if in one.
func unmarshal(line []byte, v any) error {
	err := json.Unmarshal(line, v)
	var kind *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &kind) && kind.Field != "":
		return wrong{kind.Field, fmt.Errorf("%s can't be read as a %v", kind.Value, kind.Type)}
	}
	return fmt.Errorf("%w: write an object a line", err)
}

func mooncakeRow(line []byte, r *row) error {
	var l struct {
		Timestamp    int64   `json:"timestamp"`
		InputLength  int64   `json:"input_length"`
		OutputLength int64   `json:"output_length"`
		HashIDs      []int32 `json:"hash_ids"`
	}
	if err := unmarshal(line, &l); err != nil {
		return err
	}
	switch {
	case l.InputLength <= 0 || len(l.HashIDs) == 0:
		return errors.New("columns input_length and hash_ids: both must be there, and not empty")
	case l.Timestamp < 0 || l.Timestamp > maxSeconds*1000:
		return wrong{"timestamp", fmt.Errorf("%d is not from 0 to %d: write milliseconds", l.Timestamp, int64(maxSeconds)*1000)}
	}
	*r = row{at: l.Timestamp * int64(time.Millisecond), input: l.InputLength, output: l.OutputLength, blocks: l.HashIDs}
	return nil
}

// lost is the outcome of lines of the usage log that are no requests.
const lost = "lost"

func usageColumns() columns {
	return columns{at: "started", tenant: "tenant", input: "input_tokens", output: "output_tokens"}
}

func usageRow(line []byte, r *row) error {
	var l struct {
		RequestID *string `json:"request_id"`
		Requests  *int64  `json:"requests"`
		Time      string  `json:"time"`
		Started   string  `json:"started"`
		Tenant    string  `json:"tenant"`
		Input     int64   `json:"input_tokens"`
		Output    int64   `json:"output_tokens"`
		Outcome   string  `json:"outcome"`
	}
	if err := unmarshal(line, &l); err != nil {
		return err
	}
	if l.Requests != nil {
		return errSums
	}
	if l.RequestID == nil {
		return errNoUsage
	}
	return usage(r, l.Started, l.Time, l.Tenant, l.Outcome, l.Input, l.Output)
}

// What is not each request of the usage log.
var (
	errSums    = errors.New("these are sums: export without --by, each request a line")
	errNoUsage = wrong{"request_id", errors.New("it is missing: give what `headgate usage export` prints")}
)

// usage makes a row of a line of the usage log.
func usage(r *row, started, ended, tenant, outcome string, input, output int64) error {
	if outcome == lost {
		r.skip = true
		return nil
	}
	if started == "" { // not known of those that a crash ended
		started = ended
	}
	at, absolute, err := moment(started)
	if err != nil {
		return wrong{"started", err}
	}
	*r = row{at: at, absolute: absolute, tenant: tenant, input: input, output: output}
	return nil
}

// hint lists what is there.
func hint(names []string) string {
	names = slices.Clone(names)
	if len(names) > 12 {
		names = append(names[:12], "…")
	}
	return strings.Join(names, ", ")
}
