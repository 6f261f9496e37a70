package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// blockTokens is how many tokens a block of the trace stands for.
const blockTokens = 512

// Bounds of a trace.
const (
	maxRequests = 1 << 20
	maxLine     = 1 << 20 // bytes of a line
	maxBlock    = 1 << 24 // ids are below that
)

// request is a line of the trace.
type request struct {
	at            float64 // seconds from the first one
	input, output int64   // tokens
	blocks        []int32 // equal ids are equal beginnings of prompts up to there

	chain []uint64 // hashes of it up to the ends of its turns, as far as requests tell: where one of them ends
}

// trace is what is replayed.
type trace struct {
	name     string
	requests []request
	ids      int32 // all are below
}

// readTrace reads Mooncake's format: a JSON object a line.
func readTrace(path string) (t *trace, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	t = &trace{name: filepath.Base(path)}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		var l struct {
			Timestamp    int64   `json:"timestamp"`
			InputLength  int64   `json:"input_length"`
			OutputLength int64   `json:"output_length"`
			HashIDs      []int32 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, n, err)
		}
		r := request{at: float64(l.Timestamp) / 1e3, input: l.InputLength, output: l.OutputLength, blocks: l.HashIDs}
		switch {
		case n > maxRequests:
			return nil, fmt.Errorf("%s:%d: more than %d requests", path, n, maxRequests)
		case r.input <= 0 || r.output < 0 || len(r.blocks) == 0:
			return nil, fmt.Errorf("%s:%d: lengths and hash_ids must be there", path, n)
		case len(t.requests) > 0 && r.at < t.requests[n-2].at:
			return nil, fmt.Errorf("%s:%d: the timestamp is before that of the line before", path, n)
		}
		for _, id := range r.blocks {
			if id < 0 || id >= maxBlock {
				return nil, fmt.Errorf("%s:%d: the hash id %d is not between 0 and %d", path, n, id, maxBlock)
			}
			t.ids = max(t.ids, id+1)
		}
		t.requests = append(t.requests, r)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(t.requests) < 2 {
		return nil, fmt.Errorf("%s: fewer than two requests", path)
	}
	t.spread()
	t.chains()
	return t, nil
}

// spread parts the requests of one timestamp evenly over the time until the next: the trace's clock ticks every three seconds.
func (t *trace) spread() {
	rs := t.requests
	for i := 0; i < len(rs); {
		j := i
		for j < len(rs) && rs[j].at == rs[i].at {
			j++
		}
		tick := 0.0
		if j < len(rs) {
			tick = rs[j].at - rs[i].at
		} else if i > 0 {
			tick = rs[i].at - rs[i-1].at
		}
		start := rs[i].at
		for k := i; k < j; k++ {
			rs[k].at = start + tick*float64(k-i)/float64(j-i)
		}
		i = j
	}
}

// tokens are all that prompts hold.
func (t *trace) tokens() (n int64) {
	for i := range t.requests {
		n += t.requests[i].input
	}
	return n
}

// seconds is how long the trace takes.
func (t *trace) seconds() float64 { return t.requests[len(t.requests)-1].at }

// chains finds where turns end: where a request ends that another goes on from. That all have the first block in common says
// that it is the system prompt, which is no turn.
func (t *trace) chains() {
	ends := make([]bool, t.ids)
	last := func(r *request) int { // the last whole block, else the last one
		if n := int(r.input / blockTokens); n > 1 && n <= len(r.blocks) {
			return n - 1
		}
		return len(r.blocks) - 1
	}
	for i := range t.requests {
		r := &t.requests[i]
		ends[r.blocks[last(r)]] = true
	}
	for i := range t.requests {
		r := &t.requests[i]
		for j, id := range r.blocks[:last(r)+1] {
			if j > 0 && ends[id] {
				r.chain = append(r.chain, mix(uint64(id)))
			}
		}
	}
}
