package capacity

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"
)

// MaxPage is the longest metrics text that ParseMetrics reads, in bytes. A vLLM with eight engines writes about 0.5 MB.
const MaxPage = 4 << 20

// maxCount bounds a figure that is summed, so that no sum of them overflows.
const maxCount = 1 << 50

// ErrPageTooLong is what ParseMetrics says of a text longer than MaxPage.
var ErrPageTooLong = errors.New("metrics text too long")

// Sample is one reading of a vLLM's /metrics, over all models and engines that it serves. What the text did not say is unknown,
// which is never zero: each figure has its own Has.
type Sample struct {
	// Waiting and Running are requests: waiting in vLLM for room, and in its batch. Those that wait for something else than
	// room (a KV transfer, a grammar) are left out where vLLM tells them apart; those swapped out (V0) wait.
	Waiting, Running       int64
	HasWaiting, HasRunning bool

	// KVUsage is the share of the KV cache's blocks in use, 0 to 1; of several engines, the fullest's.
	KVUsage float64
	HasKV   bool

	// Preemptions counts, since the process began, the requests that lost their KV blocks and start over.
	Preemptions    int64
	HasPreemptions bool

	// Tokens counts prompt and generated tokens since the process began: a page that goes on saying the same while requests
	// end is frozen.
	Tokens    int64
	HasTokens bool
}

// Known reports whether the text held a figure that says how full the backend is.
func (s *Sample) Known() bool { return s.HasWaiting || s.HasRunning || s.HasKV || s.HasPreemptions }

// count is the sum of a figure over its series.
type count struct {
	sum        int64
	seen, lost bool
}

func (c *count) add(v float64) {
	if !(v >= 0 && v <= maxCount) { // NaN, too
		c.lost = true
		return
	}
	c.seen, c.sum = true, min(c.sum+int64(v), maxCount)
}

// value is the sum, unless one of the series had none: a sum that leaves one out is no sum.
func (c *count) value() (int64, bool) {
	if !c.seen || c.lost {
		return 0, false
	}
	return c.sum, true
}

// page gathers the figures of one text.
type page struct {
	waiting, forRoom, swapped, running, preempted, tokens count
	kv                                                    float64
	kvSeen, kvLost                                        bool
}

// ParseMetrics reads the figures from Prometheus's text format under the names of vLLM V0 and V1. Lines of other names are
// passed over unread, whatever they hold; a line of one of these names that cannot be read is an error, and so is a text beyond
// MaxPage. NaN, and figures that cannot be, are unknown. A last line without its line feed may be torn and is left out. Time is
// linear in the text; nothing of it is kept.
func ParseMetrics(text []byte) (Sample, error) {
	if len(text) > MaxPage {
		return Sample{}, fmt.Errorf("%w: %d bytes, %d are read", ErrPageTooLong, len(text), MaxPage)
	}
	var p page
	for n := 1; ; n++ {
		end := bytes.IndexByte(text, '\n')
		if end < 0 {
			return p.sample(), nil
		}
		line := bytes.TrimLeft(text[:end], " \t")
		text = text[end+1:]
		rest, ours := bytes.CutPrefix(line, []byte("vllm:"))
		if !ours {
			continue
		}
		if err := p.read(rest); err != nil {
			return Sample{}, fmt.Errorf("metrics text: line %d: %w", n, err)
		}
	}
}

// read takes one line, less its "vllm:".
func (p *page) read(line []byte) error {
	name := line
	if i := bytes.IndexAny(line, "{ \t"); i >= 0 {
		name = line[:i]
	}
	var c *count
	switch string(name) {
	case "num_requests_waiting":
		c = &p.waiting
	case "num_requests_waiting_by_reason":
		c = &p.forRoom
	case "num_requests_swapped": // V0
		c = &p.swapped
	case "num_requests_running":
		c = &p.running
	case "num_preemptions_total", "num_preemptions":
		c = &p.preempted
	case "prompt_tokens_total", "generation_tokens_total":
		c = &p.tokens
	case "kv_cache_usage_perc", "gpu_cache_usage_perc": // since 0.9; until 0.11: for a while a page had both
	default:
		return nil
	}
	labels, value, err := split(line[len(name):])
	if err != nil {
		return fmt.Errorf("vllm:%s: %w", name, err)
	}
	switch {
	case c == nil:
		p.addUsage(value)
	case c == &p.forRoom && !bytes.Contains(labels, []byte(`reason="capacity"`)):
	default:
		c.add(value)
	}
	return nil
}

func (p *page) addUsage(v float64) {
	if !(v >= 0 && v <= 1) {
		p.kvLost = true
		return
	}
	p.kvSeen, p.kv = true, max(p.kv, v)
}

func (p *page) sample() (s Sample) {
	s.Running, s.HasRunning = p.running.value()
	s.Preemptions, s.HasPreemptions = p.preempted.value()
	s.Tokens, s.HasTokens = p.tokens.value()
	if p.kvSeen && !p.kvLost {
		s.KVUsage, s.HasKV = p.kv, true
	}
	s.Waiting, s.HasWaiting = p.waiting.value()
	if n, ok := p.forRoom.value(); ok {
		s.Waiting, s.HasWaiting = n, true
	}
	if p.swapped.lost {
		s.Waiting, s.HasWaiting = 0, false
	}
	if s.HasWaiting {
		s.Waiting += p.swapped.sum
	}
	return s
}

var (
	errOpenLabels = errors.New("labels without an end")
	errNoValue    = errors.New("no value")
)

// split takes what follows a name: labels, if there are any, a value and perhaps a timestamp.
func split(rest []byte) (labels []byte, value float64, err error) {
	rest = bytes.TrimLeft(rest, " \t")
	if len(rest) > 0 && rest[0] == '{' {
		end := labelsEnd(rest)
		if end < 0 {
			return nil, 0, errOpenLabels
		}
		labels, rest = rest[1:end], bytes.TrimLeft(rest[end+1:], " \t")
	}
	if i := bytes.IndexAny(rest, " \t\r"); i >= 0 {
		rest = rest[:i]
	}
	if len(rest) == 0 {
		return nil, 0, errNoValue
	}
	const longest = 64 // a float64 has 24 digits and signs; what is longer is not copied into an error
	value, err = strconv.ParseFloat(string(rest[:min(len(rest), longest)]), 64)
	if errors.Is(err, strconv.ErrRange) {
		return labels, math.NaN(), nil
	}
	if err != nil || len(rest) > longest {
		return nil, 0, fmt.Errorf("value %.16q is not a number", rest)
	}
	return labels, value, nil
}

// labelsEnd is where the brace that opens rest is closed, outside of quotes; -1: nowhere.
func labelsEnd(rest []byte) int {
	quoted := false
	for i := 0; i < len(rest); i++ {
		switch rest[i] {
		case '\\':
			if quoted {
				i++
			}
		case '"':
			quoted = !quoted
		case '}':
			if !quoted {
				return i
			}
		}
	}
	return -1
}
