package trace

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Bounds of a trace.
const (
	MaxRequests = 1 << 22
	MaxTenants  = 1 << 20
	MaxTokens   = 1 << 30 // of a prompt, and of an answer
	MaxSpan     = 400 * 24 * time.Hour
	maxName     = 256     // bytes of a tenant's name
	maxRecord   = 1 << 20 // bytes of a line
	maxBlock    = 1 << 24 // ids of blocks are below
	maxBlocks   = 1 << 26 // of all requests
)

// Request is one request of a trace.
type Request struct {
	At            time.Duration // from the first one
	Input, Output int64         // tokens
	Tenant        int32         // index of Trace.Tenants; 0 where there are none
	Session       int32         // requests that belong together have the same: they never come to different tenants. From 0, without gaps
	Blocks        []int32       // of Mooncake's format: equal ids are equal beginnings of prompts up to there, of 512 tokens each
}

// Trace is what is replayed, by time: at least two requests. Nobody changes it once it is read, so any goroutine may
// use it.
type Trace struct {
	Name     string
	Source   string   // who published it under which licence; "": it does not say
	Split    string   // how requests came to their tenants
	Tenants  []string // none: the format names none, and Trace.By makes some
	Requests []Request
}

// Span is from the first request to the last one.
func (t *Trace) Span() time.Duration { return t.Requests[len(t.Requests)-1].At }

// Tokens are all that requests took: input and output.
func (t *Trace) Tokens() (n int64) {
	for i := range t.Requests {
		n += t.Requests[i].Input + t.Requests[i].Output
	}
	return n
}

// Head is what arrived before d. It shares what it holds with t. An error says that that is too little.
func (t *Trace) Head(d time.Duration) (*Trace, error) {
	n, _ := slices.BinarySearchFunc(t.Requests, d, func(r Request, d time.Duration) int { return int(r.At - d) })
	head := *t
	head.Requests = t.Requests[:n:n]
	return &head, head.check()
}

// check refuses what cannot be replayed.
func (t *Trace) check() error {
	if len(t.Requests) < 2 {
		return fmt.Errorf("%s: fewer than two requests: nothing to replay", t.Name)
	}
	return nil
}

// String tells what it is in a line.
func (t *Trace) String() string {
	n := len(t.Requests)
	s := fmt.Sprintf("%s: %d requests in %v, %.0f tokens each", t.Name, n, t.Span().Round(time.Second), float64(t.Tokens())/float64(n))
	if t.Tenants != nil {
		s += fmt.Sprintf(", of %d tenants", len(t.Tenants))
	}
	return s
}

// row is a request as its file has it.
type row struct {
	at            int64  // ns; the whole trace is moved so that it begins at 0
	absolute      bool   // at is since 1970 by UTC
	tenant        string // until the next row is read
	input, output int64
	blocks        []int32
	skip          bool // it is no request
}

// builder makes a trace of rows.
type builder struct {
	*Trace
	format   Format
	names    map[string]int32
	absolute bool
	blocks   int
}

// errBound says that a trace is above a bound.
var errBound = errors.New("it is too large")

// add takes one more row, or says what is wrong with it.
func (b *builder) add(r *row, columns *columns) error {
	n := len(b.Requests)
	switch {
	case r.input < 0 || r.input > MaxTokens:
		return wrong{columns.input, fmt.Errorf("%d is not from 0 to %d: write how many tokens the prompt had", r.input, MaxTokens)}
	case r.output < 0 || r.output > MaxTokens:
		return wrong{columns.output, fmt.Errorf("%d is not from 0 to %d: write how many tokens the answer had", r.output, MaxTokens)}
	case n > 0 && r.absolute != b.absolute:
		return wrong{columns.at, errors.New("some lines have seconds and some a date: write all of them in the same way")}
	case n > 0 && b.format != Usage && r.at < int64(b.Requests[n-1].At):
		return wrong{columns.at, errors.New("it is before that of the line in front: sort the lines by time")}
	case n > 0 && r.at-int64(b.Requests[0].At) > int64(MaxSpan) || n > 0 && int64(b.Requests[0].At)-r.at > int64(MaxSpan):
		return wrong{columns.at, fmt.Errorf("%w: more than %d days from the first line: cut the file, or check the unit, which is a second", errBound, MaxSpan/(24*time.Hour))}
	case n == MaxRequests:
		return fmt.Errorf("%w: more than %d requests: cut the file, or read only the beginning", errBound, MaxRequests)
	}
	q := Request{At: time.Duration(r.at), Input: r.input, Output: r.output, Blocks: slices.Clone(r.blocks)}
	b.absolute = r.absolute
	if b.blocks += len(r.blocks); b.blocks > maxBlocks {
		return fmt.Errorf("%w: more than %d blocks in all: cut the file", errBound, maxBlocks)
	}
	for _, id := range r.blocks {
		if id < 0 || id >= maxBlock {
			return wrong{columns.blocks, fmt.Errorf("the hash id %d is not between 0 and %d: number the blocks anew", id, maxBlock)}
		}
	}
	if b.names != nil {
		var err error
		if q.Tenant, err = b.tenant(r.tenant); err != nil {
			return wrong{columns.tenant, err}
		}
	}
	b.Requests = append(b.Requests, q)
	return nil
}

// tenant numbers names by their first appearance.
func (b *builder) tenant(name string) (int32, error) {
	i, known := b.names[name]
	switch {
	case known:
		return i, nil
	case name == "":
		return 0, errors.New("it is empty: name the tenant, or leave the whole column out and let requests be split into tenants")
	case len(name) > maxName:
		return 0, fmt.Errorf("the name has more than %d bytes: shorten it", maxName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return 0, fmt.Errorf("%q is not UTF-8 that can be printed: write another name", name)
	case len(b.Tenants) == MaxTenants:
		return 0, fmt.Errorf("%w: more than %d tenants: cut the file, or leave the column out and let requests be split into tenants", errBound, MaxTenants)
	}
	i = int32(len(b.Tenants))
	name = strings.Clone(name) // its row is read into the same memory as the next
	b.names[name] = i
	b.Tenants = append(b.Tenants, name)
	return i, nil
}

// finish makes what was added a trace.
func (b *builder) finish() (*Trace, error) {
	t := b.Trace
	if err := t.check(); err != nil {
		return nil, err
	}
	if b.format == Usage {
		slices.SortStableFunc(t.Requests, func(x, y Request) int { return int(x.At - y.At) })
	}
	first := t.Requests[0].At
	for i := range t.Requests {
		t.Requests[i].At -= first
	}
	if b.format == Mooncake {
		t.spread()
	}
	t.sessions()
	return t, nil
}

// spread parts the requests of one moment evenly over the time until the next: the clock of Mooncake's traces ticks
// every three seconds.
func (t *Trace) spread() {
	rs := t.Requests
	for i := 0; i < len(rs); {
		j := i
		for j < len(rs) && rs[j].At == rs[i].At {
			j++
		}
		tick := time.Duration(0)
		if j < len(rs) {
			tick = rs[j].At - rs[i].At
		} else if i > 0 {
			tick = rs[i].At - rs[i-1].At
		}
		start := rs[i].At
		for k := i; k < j; k++ {
			rs[k].At = start + time.Duration(float64(tick)*float64(k-i)/float64(j-i))
		}
		i = j
	}
}

// sessions finds which requests belong together: those of a tenant that the trace names; those whose prompts begin
// with the same block, after the blocks with which all begin (a system prompt); otherwise each is alone.
func (t *Trace) sessions() {
	common := t.common()
	roots := make(map[int32]int32)
	for i := range t.Requests {
		r := &t.Requests[i]
		switch {
		case t.Tenants != nil:
			r.Session = r.Tenant
		case len(r.Blocks) > 0:
			root := r.Blocks[min(common, len(r.Blocks)-1)]
			s, known := roots[root]
			if !known {
				s = int32(len(roots))
				roots[root] = s
			}
			r.Session = s
		default:
			r.Session = int32(i)
		}
	}
}

// common is with how many blocks all requests begin.
func (t *Trace) common() int {
	first := t.Requests[0].Blocks
	n := len(first)
	for i := range t.Requests {
		b := t.Requests[i].Blocks
		n = min(n, len(b))
		for n > 0 && !slices.Equal(b[:n], first[:n]) {
			n--
		}
	}
	return n
}
