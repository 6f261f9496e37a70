package ledger

import (
	"fmt"
	"math"
	"math/bits"
	"strings"
)

// NanoUSD is an amount of money: 10⁻⁹ dollars.
type NanoUSD int64

const nanoPerUSD = 1_000_000_000

// ParseUSD reads a decimal amount of dollars such as 250.00, with at most nine decimals.
func ParseUSD(s string) (NanoUSD, error) {
	const form = `write dollars as a decimal string with at most nine decimals, as in "250.00"`
	whole, frac, dotted := strings.Cut(s, ".")
	if whole == "" || strings.Trim(whole+frac, "0123456789") != "" || dotted && frac == "" || len(frac) > 9 || len(whole) > 9 {
		return 0, fmt.Errorf("%q is not an amount of money: %s", s, form)
	}
	var n int64
	for _, c := range whole + frac + strings.Repeat("0", 9-len(frac)) {
		n = n*10 + int64(c-'0') // 18 digits at most
	}
	return NanoUSD(n), nil
}

// String gives dollars with at least two decimals and no needless zeros.
func (n NanoUSD) String() string {
	sign := ""
	if n < 0 {
		sign, n = "-", -n
	}
	frac := strings.TrimRight(fmt.Sprintf("%09d", n%nanoPerUSD), "0")
	return fmt.Sprintf("%s%d.%-2s", sign, n/nanoPerUSD, frac+strings.Repeat("0", max(2-len(frac), 0)))
}

// parse takes strings only: a YAML float has already lost what it stood for.
func (n *NanoUSD) parse(s scalar) (err error) {
	if s.number {
		return fmt.Errorf("money must be a quoted decimal string such as \"0.20\", not the number %s", s.text)
	}
	*n, err = ParseUSD(s.text)
	return err
}

// MarshalYAML gives what a policy reads.
func (n NanoUSD) MarshalYAML() (any, error) { return n.String(), nil }

// Usage is what one answer consumed. Input includes CachedInput and CacheWrite, as
// OpenAI's prompt_tokens do and Anthropic's input_tokens do not.
type Usage struct {
	Input, CachedInput, CacheWrite, Output int64
	Images, AudioSeconds                   int64
}

// Price is what a model costs: per million tokens, and flat.
type Price struct {
	Input       NanoUSD  `yaml:"input,omitempty"`
	CachedInput *NanoUSD `yaml:"cached_input,omitempty"` // absent: as Input
	CacheWrite  *NanoUSD `yaml:"cache_write,omitempty"`  // absent: as Input
	Output      NanoUSD  `yaml:"output,omitempty"`
}

// Flat prices come on top of a Price.
type Flat struct {
	Request     NanoUSD `yaml:"request,omitempty"`
	Image       NanoUSD `yaml:"image,omitempty"`
	AudioSecond NanoUSD `yaml:"audio_second,omitempty"`
}

// Cost prices one answer, rounded up once. Every token is priced exactly once: a cached
// one at its own rate only. It saturates instead of overflowing; negative counts cost nothing.
func (m *Model) Cost(u Usage) NanoUSD {
	cached := min(max(u.CachedInput, 0), max(u.Input, 0))
	written := min(max(u.CacheWrite, 0), max(u.Input, 0)-cached)
	plain := max(u.Input, 0) - cached - written
	p := m.Price
	var hi, lo uint64 // nano-dollars × 10⁶
	hi, lo = addProduct(hi, lo, plain, p.Input)
	hi, lo = addProduct(hi, lo, cached, orPrice(p.CachedInput, p.Input))
	hi, lo = addProduct(hi, lo, written, orPrice(p.CacheWrite, p.Input))
	hi, lo = addProduct(hi, lo, max(u.Output, 0), p.Output)
	const million = 1_000_000
	hi, lo = addProduct(hi, lo, million, m.Flat.Request)
	hi, lo = addProduct(hi, lo, min(max(u.Images, 0), math.MaxInt64/million)*million, m.Flat.Image)
	hi, lo = addProduct(hi, lo, min(max(u.AudioSeconds, 0), math.MaxInt64/million)*million, m.Flat.AudioSecond)
	lo, carry := bits.Add64(lo, million-1, 0)
	if hi += carry; hi >= million {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, million)
	return NanoUSD(min(q, math.MaxInt64))
}

func addProduct(hi, lo uint64, n int64, p NanoUSD) (uint64, uint64) {
	ph, pl := bits.Mul64(uint64(n), uint64(p))
	lo, carry := bits.Add64(lo, pl, 0)
	hi, over := bits.Add64(hi, ph, carry)
	if over != 0 {
		return math.MaxUint64, math.MaxUint64
	}
	return hi, lo
}

func orPrice(p *NanoUSD, d NanoUSD) NanoUSD {
	if p != nil {
		return *p
	}
	return d
}
