package calibrate

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// Bounds of a file of pairs.
const (
	MaxPairs  = 4 << 20   // records of a file
	MaxText   = 64 << 10  // bytes of a text
	maxRecord = 256 << 10 // bytes of a record with its quotes: what is larger has a quote that nobody closed
	maxHeader = 4 << 10   // bytes of the first line
)

// FileError is a file that is no list of pairs. It says where, and what to do.
type FileError struct {
	Line, Column int // from 1, Column in bytes; 0 where it is the whole file, or line
	Reason       string
}

func (e *FileError) Error() string {
	switch {
	case e.Line == 0:
		return e.Reason
	case e.Column == 0:
		return fmt.Sprintf("line %d: %s", e.Line, e.Reason)
	}
	return fmt.Sprintf("line %d, column %d: %s", e.Line, e.Column, e.Reason)
}

// Problem is a record that was left out.
type Problem struct {
	Line   int    `json:"line"`
	Column int    `json:"column,omitempty"` // in bytes, from 1; 0 where it is the whole record
	Reason string `json:"reason"`
}

// record is a pair as the file has it.
type record struct {
	line int
	a, b string
	same bool
}

// source reads pairs. It is no good for several goroutines.
type source struct {
	leash   *leash
	csv     *csv.Reader
	column  [3]int // of a, b and same_answer
	next    int    // the least line on which the next record may begin
	records int
}

// The columns, in the order of source.column.
func columns() [3]string { return [3]string{"a", "b", "same_answer"} }

// newSource reads the first line. The error is a *FileError, or the reader's.
func newSource(in io.Reader) (*source, error) {
	buffered := bufio.NewReaderSize(in, maxHeader)
	head, err := buffered.Peek(maxHeader)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if bytes.HasPrefix(head, []byte("\xff\xfe")) || bytes.HasPrefix(head, []byte("\xfe\xff")) {
		return nil, &FileError{1, 1, "the file is UTF-16: save it as UTF-8 (in Excel: CSV UTF-8)"}
	}
	const bom = "\ufeff"
	if bytes.HasPrefix(head, []byte(bom)) {
		_, _ = buffered.Discard(len(bom)) // it was seen
		head = head[len(bom):]
	}
	line, _, ended := bytes.Cut(head, []byte("\n"))
	switch {
	case len(bytes.TrimSpace(head)) == 0:
		return nil, &FileError{1, 0, "the file is empty: its first line names the columns a,b,same_answer, and each further one has a pair"}
	case bytes.ContainsRune(bytes.TrimSuffix(line, []byte("\r")), '\r'):
		return nil, &FileError{1, bytes.IndexByte(line, '\r') + 1, "lines end in a carriage return alone: save the file with line ends of Unix (LF) or Windows (CRLF)"}
	case !ended && len(head) == maxHeader:
		return nil, &FileError{1, 0, fmt.Sprintf("the first line is longer than %d bytes: it names the columns, as in a,b,same_answer", maxHeader)}
	}
	s := &source{leash: &leash{in: buffered, left: maxRecord}, next: 1}
	s.csv = csv.NewReader(s.leash)
	s.csv.Comma, s.csv.FieldsPerRecord, s.csv.ReuseRecord = separator(line), -1, true
	fields, err := s.read()
	if err != nil {
		return nil, err
	}
	return s, s.header(fields)
}

// separator is what the first line has between its columns: spreadsheets of half of Europe write semicolons.
func separator(line []byte) rune {
	for _, c := range []rune{',', ';', '\t'} {
		if bytes.ContainsRune(line, c) {
			return c
		}
	}
	return ','
}

// header finds the columns.
func (s *source) header(fields []string) error {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = strings.ToLower(strings.TrimSpace(f))
	}
	for i, want := range columns() {
		at := slices.Index(names, want)
		if at < 0 {
			return &FileError{1, 0, missing(names, want)}
		}
		if again := slices.Index(names[at+1:], want); again >= 0 {
			_, column := s.csv.FieldPos(at + 1 + again)
			return &FileError{1, column, fmt.Sprintf("there is a second column %s: remove one", want)}
		}
		s.column[i] = at
	}
	return nil
}

// missing says that a column is, and what may have been meant.
func missing(names []string, want string) string {
	if len(names) > 2 && slices.ContainsFunc(names, func(n string) bool { _, ok := label(n); return ok }) {
		return "there is no header: put a first line with the names of the columns, a,b,same_answer"
	}
	for i, n := range names {
		if len(n) > 30 {
			names[i] = strings.ToValidUTF8(n[:30], "") + "…"
		}
	}
	return fmt.Sprintf("there is no column %s among %q: the first line names the columns a and b, which hold the texts, and same_answer, "+
		"which is 1 where one answer is right for both and 0 where it is not", want, strings.Join(names, ","))
}

// label reads whether two texts have the same answer.
func label(s string) (same, ok bool) {
	switch strings.ToLower(strings.TrimSpace(s)) {
	case "1", "true", "yes":
		return true, true
	case "0", "false", "no":
		return false, true
	}
	return false, false
}

// pair reads the next one. A record that is no good is a *Problem as error, and the next can be read;
// a file that is no good is a *FileError; io.EOF is its end.
func (s *source) pair() (record, *Problem, error) {
	if s.records == MaxPairs {
		return record{}, nil, &FileError{s.next, 0, fmt.Sprintf("there are more than %d pairs: split the file", MaxPairs)}
	}
	fields, err := s.read()
	if err != nil {
		return record{}, nil, err
	}
	s.records++
	line, _ := s.csv.FieldPos(0)
	for i, at := range s.column {
		if at >= len(fields) {
			return record{}, &Problem{line, 0, fmt.Sprintf("there is no %s: the record has %d of its columns (a comma within a text needs quotes around it)", columns()[i], len(fields))}, nil
		}
	}
	r := record{line: line}
	for i, to := range []*string{&r.a, &r.b} {
		text := strings.TrimSpace(fields[s.column[i]])
		if why := unfit(text); why != "" {
			at, column := s.csv.FieldPos(s.column[i])
			return record{}, &Problem{at, column, columns()[i] + " " + why}, nil
		}
		*to = strings.Clone(text) // the record is one string, and used again
	}
	var ok bool
	if r.same, ok = label(fields[s.column[2]]); !ok {
		at, column := s.csv.FieldPos(s.column[2])
		return record{}, &Problem{at, column, fmt.Sprintf("same_answer is %.20q: write 1, true or yes, or 0, false or no", fields[s.column[2]])}, nil
	}
	return r, nil, nil
}

// unfit says why a text cannot be compared; empty if it can.
func unfit(text string) string {
	switch {
	case text == "":
		return "is empty"
	case !utf8.ValidString(text):
		return "is not UTF-8: save the file as UTF-8"
	case len(text) > MaxText:
		return fmt.Sprintf("has %d bytes, at most %d are compared", len(text), MaxText)
	}
	return ""
}

// read one record, with errors that say what to do.
func (s *source) read() ([]string, error) {
	s.leash.left = maxRecord
	fields, err := s.csv.Read()
	var wrong *csv.ParseError
	switch {
	case err == nil:
		last := len(fields) - 1
		line, _ := s.csv.FieldPos(last)
		s.next = line + strings.Count(fields[last], "\n") + 1
		return fields, nil
	case errors.Is(err, errLeash):
		return nil, &FileError{s.next, 0, fmt.Sprintf("the record that begins here is larger than %d bytes: most likely a quote is opened and never closed", maxRecord)}
	case errors.Is(err, csv.ErrBareQuote):
		errors.As(err, &wrong)
		return nil, &FileError{wrong.Line, wrong.Column, `a quote stands within a text that has none around it: put quotes around the text and write each one within it twice ("")`}
	case errors.Is(err, csv.ErrQuote):
		errors.As(err, &wrong)
		why := `a quote within a quoted text must be written twice (""), and after the last one comes a comma or the line's end`
		if wrong.Line != wrong.StartLine {
			why += fmt.Sprintf("; the record begins on line %d", wrong.StartLine)
		}
		return nil, &FileError{wrong.Line, wrong.Column, why}
	}
	return nil, err
}

// errLeash ends a record that is too long.
var errLeash = errors.New("the record is too long")

// leash bounds what is read for one record.
type leash struct {
	in   io.Reader
	left int
}

func (l *leash) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errLeash
	}
	n, err := l.in.Read(p)
	l.left -= n
	return n, err
}
