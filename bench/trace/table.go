package trace

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// table reads CSV by the names of its columns.
type table struct {
	csv    *csv.Reader
	in     *bounded
	cols   columns
	usage  bool
	index  map[string]int
	cells  []string
	began  int // the line where cells began
	failed int // the line of an error of csv
}

// bounded ends with an error where a record has no end.
type bounded struct {
	r    io.Reader
	left int
}

// readAhead is at least what csv reads in front of a record.
const readAhead = 8 << 10

var errEndless = fmt.Errorf("the line has more than %d bytes: does a quote end?", maxRecord)

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errEndless
	}
	n, err := b.r.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// newTable reads the head line. The column of tenants need not be there, unless more says so.
func newTable(r io.Reader, c columns, more ...string) (*table, error) {
	t := &table{in: &bounded{r: r, left: maxRecord + readAhead}, cols: c, index: make(map[string]int)}
	t.csv = csv.NewReader(t.in)
	t.csv.ReuseRecord = true
	head, err := t.csv.Read()
	if errors.Is(err, io.EOF) {
		return nil, errors.New("it is empty: the first line names the columns")
	}
	if err != nil {
		return nil, t.syntax(err)
	}
	for i, name := range head {
		name = strings.TrimSpace(strings.TrimPrefix(name, "\ufeff"))
		if _, twice := t.index[name]; twice && slices.Contains([]string{c.at, c.tenant, c.input, c.output}, name) {
			return nil, wrong{name, errors.New("two columns have that name: rename one")}
		}
		t.index[strings.Clone(name)] = i
	}
	t.began = 1
	must := append([]string{c.at, c.input, c.output}, more...)
	for _, name := range must {
		if _, there := t.index[name]; there {
			continue
		}
		if _, sums := t.index["requests"]; sums && len(more) > 0 {
			return nil, errSums
		}
		return nil, wrong{name, fmt.Errorf("it is missing: the first line must name %s, and names %s", hint(must), hint(head))}
	}
	if _, there := t.index[c.tenant]; !there {
		t.cols.tenant = ""
	}
	return t, nil
}

// newUsageTable reads what `headgate usage export` prints.
func newUsageTable(r io.Reader) (*table, error) {
	t, err := newTable(r, usageColumns(), "request_id", "time", "tenant", "outcome")
	if err != nil {
		return nil, err
	}
	t.usage = true
	return t, nil
}

func (t *table) line() int {
	if t.failed > 0 {
		return t.failed
	}
	return t.began
}

func (t *table) columns() *columns { return &t.cols }
func (t *table) named() bool       { return t.cols.tenant != "" }

// cell is that of a column that is there.
func (t *table) cell(name string) string { return t.cells[t.index[name]] }

func (t *table) next(r *row) (err error) {
	t.in.left = maxRecord + readAhead
	if t.cells, err = t.csv.Read(); errors.Is(err, io.EOF) {
		return err
	} else if err != nil {
		return t.syntax(err)
	}
	t.began, _ = t.csv.FieldPos(0)
	input, err := tokens(t.cell(t.cols.input))
	if err != nil {
		return wrong{t.cols.input, err}
	}
	output, err := tokens(t.cell(t.cols.output))
	if err != nil {
		return wrong{t.cols.output, err}
	}
	if t.usage {
		return usage(r, t.cell("started"), t.cell("time"), unguarded(t.cell("tenant")), t.cell("outcome"), input, output)
	}
	*r = row{input: input, output: output}
	if r.at, r.absolute, err = moment(t.cell(t.cols.at)); err != nil {
		return wrong{t.cols.at, err}
	}
	if t.named() {
		r.tenant = t.cell(t.cols.tenant)
	}
	return nil
}

// syntax says in which line an error of csv is.
func (t *table) syntax(err error) error {
	var at *csv.ParseError
	if !errors.As(err, &at) {
		t.failed = t.began + 1
		return err
	}
	t.failed = at.Line
	if errors.Is(err, csv.ErrFieldCount) {
		return fmt.Errorf("there are not as many cells as in the first line, which has %d: put cells with a comma in quotes", len(t.index))
	}
	return fmt.Errorf("column %d: %w: write CSV as RFC 4180 has it", at.Column, at.Err)
}

// unguarded takes away what stands in front of what a spreadsheet would take for a formula.
func unguarded(s string) string {
	rest, guarded := strings.CutPrefix(s, "'")
	first, _ := utf8.DecodeRuneInString(rest)
	if guarded && strings.ContainsRune("=+-@\t\r\uff1d\uff0b\uff0d\uff20", first) {
		s = rest
	}
	return s
}

// tokens reads a whole number.
func tokens(s string) (int64, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%.40q is no whole number: write how many tokens it were", s)
	}
	return n, nil
}

// maxSeconds is below what fits in nanoseconds.
const maxSeconds = 1 << 32

// moment reads seconds or a date, in ns. Seconds are exact to the microsecond where they are since 1970, to the
// nanosecond where they are few.
func moment(s string) (ns int64, absolute bool, err error) {
	s = strings.TrimSpace(s)
	if x, err := strconv.ParseFloat(s, 64); err == nil && x >= 0 && x <= maxSeconds {
		return int64(math.Round(x * 1e9)), false, nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02 15:04:05.999999999", "2006-01-02 15:04:05.999999999Z07:00"} {
		t, err := time.Parse(layout, s)
		switch {
		case err != nil:
		case t.Unix() < 0 || t.Unix() > maxSeconds:
			return 0, false, fmt.Errorf("%.40q is before 1970 or after 2106", s)
		default:
			return t.UnixNano(), true, nil
		}
	}
	return 0, false, fmt.Errorf("%.40q is no time: write seconds from any start, such as 12.25, or RFC 3339, such as 2026-01-15T08:00:00Z", s)
}
