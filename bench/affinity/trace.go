package main

import (
	"slices"

	benchtrace "headgate/bench/trace"
)

// blockTokens is how many tokens a block of the trace stands for.
const blockTokens = 512

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
func readTrace(path string) (*trace, error) {
	from, err := benchtrace.Open(path, benchtrace.Mooncake, benchtrace.Options{})
	if err != nil {
		return nil, err
	}
	t := &trace{name: from.Name, requests: make([]request, 0, len(from.Requests))}
	for i := range from.Requests {
		r := &from.Requests[i]
		t.ids = max(t.ids, slices.Max(r.Blocks)+1)
		t.requests = append(t.requests, request{at: r.At.Seconds(), input: r.Input, output: r.Output, blocks: r.Blocks})
	}
	t.chains()
	return t, nil
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
