package fakevllm

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Bounds that a caller has no reason to move.
const (
	maxChoices  = 128       // n, and prompts in one completions request
	maxOutput   = 1 << 20   // tokens in one choice
	maxStored   = 1024      // responses kept for GET /v1/responses/{id}
	maxInputs   = 4096      // texts in one embeddings, score, rerank or classify request
	maxDims     = 8192      // embedding dimensions
	maxDepth    = 8         // levels of a generated JSON value
	endlessSize = 256 << 20 // bytes of a line that never ends
)

// Config says how the server answers. The zero value of every field means its
// default; a Config is copied by [New] and may be reused.
type Config struct {
	// Seed decides every answer together with the request body.
	Seed uint64
	// Models served; the first one answers requests that name none. Default: "fake".
	Models []string
	// TTFT passes between the moment a request gets its slot and its first token.
	TTFT time.Duration
	// InterToken passes before every token but the first. Without streaming the
	// whole of it passes before the answer.
	InterToken time.Duration
	// Slots is how many requests run at once. Default: 256.
	Slots int
	// MaxWaiting is how many requests may wait for a slot before the next one is
	// answered 429. Default: no bound but the connections'.
	MaxWaiting int
	// DefaultOutput is the length in tokens of an uncapped answer. Default: 16.
	DefaultOutput int
	// ContextLen bounds prompt plus output, in tokens. Default: 131072.
	ContextLen int
	// CachedFraction of the prompt is reported as cached, from 0 to 1.
	CachedFraction float64
	// Dimensions of an embedding that does not ask for its own. Default: 32.
	Dimensions int
	// APIKey, when set, is asked of every route under /v1 as a bearer token.
	APIKey string
	// Faults maps a fault to its probability, from 0 to 1. The draw depends on the
	// seed and the number of the request, so that a repeated request may fare better.
	Faults map[Fault]float64
	// SlowToken replaces InterToken under the fault [Slow]. Default: 50 ms.
	SlowToken time.Duration
	// SplitPause passes between the parts of a frame under the fault [Split].
	SplitPause time.Duration
	// StallMax bounds the fault [Stall]. Default: 60 s.
	StallMax time.Duration
	// MaxBody bounds a request body in bytes. Default: 64 MiB.
	MaxBody int64
	// LogSize is how many records are kept; older ones go. Default: 8192.
	LogSize int
	// RecordBody is how many bytes of a body a record keeps; negative keeps none.
	// Default: 16 KiB.
	RecordBody int
}

// Fault is one way to go wrong. Those with an argument take it as NAME=ARGUMENT
// from a request; K is a number of tokens and defaults to half of the answer.
type Fault string

// The faults. A status code between 400 and 599 is also a fault of its own.
const (
	Stall     Fault = "stall"     // =K: fall silent after K tokens until the client leaves or StallMax passes; then the connection is cut
	Cut       Fault = "cut"       // =K: cut the connection after K tokens
	Reset     Fault = "reset"     // reset the connection before any answer
	InBand    Fault = "inband"    // =K: after K tokens an error frame under status 200, then the end marker; 500 without streaming
	Split     Fault = "split"     // write each frame in odd parts, also inside a character
	Gzip      Fault = "gzip"      // compress, asked or not
	NoUsage   Fault = "nousage"   // leave the usage out
	LieUsage  Fault = "lieusage"  // =negative, huge, string or float: report usage that cannot be; default: drawn from negative and huge
	ContUsage Fault = "contusage" // usage on every chunk, asked or not
	Slow      Fault = "slow"      // SlowToken between tokens
	NoNewline Fault = "nonewline" // the stream ends without its last newline and end marker
	Endless   Fault = "endless"   // =K: after K tokens a line that does not end (bounded by endlessSize)
	Comments  Fault = "comments"  // an SSE comment before each frame
	CRLF      Fault = "crlf"      // lines end in CR LF
	Garbage   Fault = "garbage"   // 200 with a body that is not JSON
)

var faults = []Fault{Stall, Cut, Reset, InBand, Split, Gzip, NoUsage, LieUsage, ContUsage, Slow, NoNewline, Endless, Comments, CRLF, Garbage}

// status is the code that a numeric fault stands for, or 0.
func (f Fault) status() int {
	n, err := strconv.Atoi(string(f))
	if err != nil || n < 400 || n > 599 {
		return 0
	}
	return n
}

func (f Fault) valid() bool { return f.status() != 0 || slices.Contains(faults, f) }

// ParseFaults reads fault probabilities as a command line gives them:
// "stall=0.01,cut=0.02,503=0.05". The empty string is no fault.
func ParseFaults(s string) (map[Fault]float64, error) {
	out := map[Fault]float64{}
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		name, prob, ok := strings.Cut(part, "=")
		p, err := strconv.ParseFloat(prob, 64)
		if !ok || err != nil {
			return nil, fmt.Errorf("fault %q: want NAME=PROBABILITY", part)
		}
		out[Fault(name)] = p
	}
	return out, checkFaults(out)
}

func checkFaults(m map[Fault]float64) error {
	for _, f := range slices.Sorted(maps.Keys(m)) {
		if !f.valid() {
			return fmt.Errorf("unknown fault %q (one of %v or a status code)", f, faults)
		}
		if p := m[f]; !(p >= 0 && p <= 1) {
			return fmt.Errorf("fault %s: probability %v is not between 0 and 1", f, p)
		}
	}
	return nil
}

// Validate reports every field that makes no sense, joined into one error.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	for name, n := range map[string]int{
		"slots": c.Slots, "max waiting": c.MaxWaiting, "default output": c.DefaultOutput,
		"context length": c.ContextLen, "dimensions": c.Dimensions, "log size": c.LogSize,
	} {
		check(n >= 0, "%s %d is negative", name, n)
	}
	for name, d := range map[string]time.Duration{
		"time to first token": c.TTFT, "inter-token time": c.InterToken,
		"slow token time": c.SlowToken, "split pause": c.SplitPause, "stall bound": c.StallMax,
	} {
		check(d >= 0, "%s %v is negative", name, d)
	}
	check(c.MaxBody >= 0, "body bound %d is negative", c.MaxBody)
	check(c.CachedFraction >= 0 && c.CachedFraction <= 1, "cached fraction %v is not between 0 and 1", c.CachedFraction)
	check(c.DefaultOutput <= maxOutput, "default output %d exceeds %d tokens", c.DefaultOutput, maxOutput)
	check(c.Dimensions <= maxDims, "%d dimensions exceed %d", c.Dimensions, maxDims)
	for _, m := range c.Models {
		check(m != "", "a model has no name")
	}
	if err := checkFaults(c.Faults); err != nil {
		errs = append(errs, err)
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// withDefaults returns c with every zero field that has a default filled in, and
// nothing shared with the caller.
func (c Config) withDefaults() Config {
	c.Models = slices.Clone(c.Models)
	if len(c.Models) == 0 {
		c.Models = []string{"fake"}
	}
	c.Faults = maps.Clone(c.Faults)
	setInt := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	setInt(&c.Slots, 256)
	setInt(&c.DefaultOutput, 16)
	setInt(&c.ContextLen, 131072)
	setInt(&c.Dimensions, 32)
	setInt(&c.LogSize, 8192)
	setInt(&c.RecordBody, 16<<10)
	if c.SlowToken == 0 {
		c.SlowToken = 50 * time.Millisecond
	}
	if c.StallMax == 0 {
		c.StallMax = time.Minute
	}
	if c.MaxBody == 0 {
		c.MaxBody = 64 << 20
	}
	return c
}
