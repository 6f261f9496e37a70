package openai

import (
	"bytes"
	"fmt"
)

// maxFigure bounds every token figure that is believed. It leaves room to add a few and
// to multiply by a price.
const maxFigure = 1 << 40

// figure numbers the members of a usage object, whatever they are called.
type figure uint8

const (
	figInput figure = iota
	figOutput
	figTotal
	figCached
	figReasoning
	figCacheRead
	figCacheWrite
	figCacheWrite1h
	figSeconds
	figures
)

// report is a usage object as it was sent. Anthropic spreads one over two events, so
// reports can be merged.
type report struct {
	v   [figures]int64
	has [figures]bool
}

// ParseUsage reads a usage object: OpenAI's three shapes, vLLM's, and Anthropic's for
// Message, whose input_tokens do not include what came from or went to the cache while
// Usage.Input does. A missing or null object gives a Usage that is not Known. Figures
// that are negative, fractional, not numbers or above 2^40 are an error.
func ParseUsage(kind Kind, raw []byte) (Usage, error) {
	var r report
	if err := r.parse(raw); err != nil {
		return Usage{}, err
	}
	return r.usage(kind), nil
}

// parse reads raw into r; figures that raw lacks stay.
func (r *report) parse(raw []byte) error {
	if len(raw) == 0 || isNull(raw) {
		return nil
	}
	next := *r
	o := object{b: raw}
	for o.next() {
		if err := next.member(o.name, o.value); err != nil {
			return err
		}
	}
	if o.bad {
		return fmt.Errorf("usage is not an object")
	}
	*r = next
	return nil
}

func (r *report) member(name, value []byte) error {
	switch string(name) {
	case "prompt_tokens", "input_tokens":
		return r.set(figInput, name, value)
	case "completion_tokens", "output_tokens":
		return r.set(figOutput, name, value)
	case "total_tokens":
		return r.set(figTotal, name, value)
	case "cache_read_input_tokens":
		return r.set(figCacheRead, name, value)
	case "cache_creation_input_tokens":
		return r.set(figCacheWrite, name, value)
	case "seconds": // of audio; begun seconds count, and what is no number is no token count either
		whole, fraction, _ := bytes.Cut(value, []byte("."))
		if r.set(figSeconds, name, whole) == nil && len(bytes.Trim(fraction, "0")) > 0 {
			r.v[figSeconds]++
		}
	case "cache_creation":
		for d := (object{b: value}); d.next(); {
			if string(d.name) == "ephemeral_1h_input_tokens" {
				return r.set(figCacheWrite1h, d.name, d.value)
			}
		}
	case "prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "output_tokens_details":
		for d := (object{b: value}); d.next(); {
			var err error
			switch string(d.name) {
			case "cached_tokens":
				err = r.set(figCached, d.name, d.value)
			case "reasoning_tokens":
				err = r.set(figReasoning, d.name, d.value)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *report) set(f figure, name, value []byte) error {
	if isNull(value) {
		return nil
	}
	var x int64
	for _, c := range value {
		if c < '0' || c > '9' || x > maxFigure {
			return fmt.Errorf("usage: %s is not a token count: %s", name, clip(value))
		}
		x = 10*x + int64(c-'0')
	}
	if x > maxFigure || len(value) == 0 {
		return fmt.Errorf("usage: %s is not a token count: %s", name, clip(value))
	}
	r.v[f], r.has[f] = x, true
	return nil
}

// usage brings a report to the one meaning that Usage has.
func (r *report) usage(kind Kind) Usage {
	u := Usage{Input: r.v[figInput], Output: r.v[figOutput], AudioSeconds: r.v[figSeconds]}
	input := r.has[figInput]
	if !input && r.has[figTotal] {
		input, u.Input = true, max(0, r.v[figTotal]-u.Output)
	}
	switch kind {
	case Message, CountTokens:
		u.CachedInput, u.CacheWrite = r.v[figCacheRead], r.v[figCacheWrite]
		u.CacheWrite1h = min(r.v[figCacheWrite1h], u.CacheWrite)
		u.Input += u.CachedInput + u.CacheWrite
	default:
		u.CachedInput = min(r.v[figCached], u.Input)
	}
	u.Reasoning = min(r.v[figReasoning], u.Output)
	output := r.has[figOutput]
	switch kind {
	case Embedding, Pooling, CountTokens, Tokenize, Detokenize:
		output = true // these generate nothing
	}
	u.Known = input && output
	return u
}
