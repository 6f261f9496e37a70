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
	maxDrag     = 1000      // how many times slower a server gets
	maxWindows  = 8192      // windows of the timeline; older ones go
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
	// PromptToken passes before the first token for each token of the prompt that
	// is not cached, as prefill does.
	PromptToken time.Duration
	// Slots is how many requests run at once. Default: 256.
	Slots int
	// Knee is how many requests run at full speed. With more of them, the time of
	// every token and of the prompt grows in proportion, so that the server's
	// throughput stays what it is at the knee. Default: no knee.
	Knee int
	// KVTokens is how many tokens, of prompts and answers, running requests hold
	// together; one that does not fit waits, as do all behind it, but a request
	// never waits for an idle server. Default: Slots · ContextLen.
	KVTokens int64
	// MaxWaiting is how many requests may wait for a slot before the next one is
	// answered 429. Default: no bound but the connections'.
	MaxWaiting int
	// DefaultOutput is the length in tokens of an uncapped answer. Default: 16.
	DefaultOutput int
	// ContextLen bounds prompt plus output, in tokens. Default: 131072.
	ContextLen int
	// CachedFraction of the prompt is reported as cached, from 0 to 1.
	CachedFraction float64
	// PrefixBlocks is the size of the prefix cache, in blocks of BlockTokens: with
	// it, what is reported as cached was in a prompt before, instead of
	// CachedFraction. The least recently used block goes. Default: no such cache.
	PrefixBlocks int
	// BlockTokens is the size of a block of the prefix cache. Default: 16.
	BlockTokens int
	// Metrics is how /metrics answers. Default: [MetricsNew].
	Metrics Metrics
	// FlapPeriod is how long the fault [Flap] leaves the server up, and then down.
	// Default: 1 s.
	FlapPeriod time.Duration
	// Dimensions of an embedding that does not ask for its own. Default: 32.
	Dimensions int
	// APIKey, when set, is asked of every route under /v1 as a bearer token.
	APIKey string
	// Faults maps a fault to its probability, from 0 to 1. The draw depends on the
	// seed and the number of the request, so that a repeated request may fare better.
	// [Server.Set] changes them while the server runs.
	Faults map[Fault]float64
	// SlowToken replaces InterToken under the fault [Slow]. Default: 50 ms.
	SlowToken time.Duration
	// SplitPause passes between the parts of a frame under the fault [Split].
	SplitPause time.Duration
	// StallMax bounds the faults [Stall] and [Hang]. Default: 60 s.
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

// The faults. A status code between 400 and 599 is also a fault of its own: =S adds
// a Retry-After of S seconds.
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
	Hang      Fault = "hang"      // accept and never answer, until the client leaves or StallMax passes; then the connection is cut. It takes no slot
	Drag      Fault = "drag"      // =F: everything takes F times as long; 10 by default
	Flap      Fault = "flap"      // down for FlapPeriod after each FlapPeriod up: connections are reset, streams under way are cut
	Refuse    Fault = "refuse"    // connections are refused; needs [Server.Listen], and a share counts as all of them
)

var faults = []Fault{
	Stall, Cut, Reset, InBand, Split, Gzip, NoUsage, LieUsage, ContUsage, Slow, NoNewline, Endless, Comments, CRLF, Garbage,
	Hang, Drag, Flap, Refuse,
}

// Metrics is a way to answer /metrics.
type Metrics string

// The ways. MetricsOld writes the names from before vLLM 0.10
// (vllm:gpu_cache_usage_perc), MetricsFrozen what a first reader saw, for ever.
const (
	MetricsNew    Metrics = "new"
	MetricsOld    Metrics = "old"
	MetricsNone   Metrics = "none" // 404
	MetricsFrozen Metrics = "frozen"
	MetricsHang   Metrics = "hang" // no answer until the client leaves or StallMax passes
)

func (m Metrics) valid() bool {
	return slices.Contains([]Metrics{"", MetricsNew, MetricsOld, MetricsNone, MetricsFrozen, MetricsHang}, m)
}

// Health is a way to answer /health.
type Health string

// The ways.
const (
	HealthFollows Health = "follows" // hangs, resets and fails as inference does under Hang, Reset, Flap and status faults from 500 on
	HealthUp      Health = "up"      // well, whatever inference does
	HealthDown    Health = "down"    // 503
)

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
		"knee": c.Knee, "prefix cache": c.PrefixBlocks, "block size": c.BlockTokens,
	} {
		check(n >= 0, "%s %d is negative", name, n)
	}
	for name, d := range map[string]time.Duration{
		"time to first token": c.TTFT, "inter-token time": c.InterToken,
		"slow token time": c.SlowToken, "split pause": c.SplitPause, "stall bound": c.StallMax,
		"prompt token time": c.PromptToken, "flap period": c.FlapPeriod,
	} {
		check(d >= 0, "%s %v is negative", name, d)
	}
	check(c.MaxBody >= 0, "body bound %d is negative", c.MaxBody)
	check(c.CachedFraction >= 0 && c.CachedFraction <= 1, "cached fraction %v is not between 0 and 1", c.CachedFraction)
	check(c.KVTokens >= 0, "kv cache %d is negative", c.KVTokens)
	check(c.Metrics.valid(), "unknown metrics %q (new, old, none, frozen or hang)", c.Metrics)
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
	setInt(&c.BlockTokens, 16)
	if c.KVTokens == 0 {
		c.KVTokens = int64(c.Slots) * int64(c.ContextLen)
	}
	if c.Metrics == "" {
		c.Metrics = MetricsNew
	}
	if c.FlapPeriod == 0 {
		c.FlapPeriod = time.Second
	}
	if c.StallMax == 0 {
		c.StallMax = time.Minute
	}
	if c.MaxBody == 0 {
		c.MaxBody = 64 << 20
	}
	return c
}
