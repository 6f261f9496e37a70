package ledger

import (
	"fmt"
	"math"
	"math/bits"
	"strings"
	"time"
)

// NanoUSD is an amount of money: 10⁻⁹ dollars.
type NanoUSD int64

const (
	nanoPerUSD         = 1_000_000_000
	maxUSD     NanoUSD = 999_999_999_999_999_999 // that can be written
)

// ParseUSD reads a decimal amount of dollars such as 250.00, with at most nine decimals.
func ParseUSD(s string) (NanoUSD, error) {
	const form = `write dollars as a decimal string with at most nine decimals, as in "250.00"`
	whole, frac, dotted := strings.Cut(s, ".")
	switch {
	case strings.HasPrefix(s, "-"):
		return 0, fmt.Errorf("%q is negative: %s", clip(s), form)
	case len(whole) > 9 && strings.Trim(whole, "0123456789") == "":
		return 0, fmt.Errorf("%q is too much: 999999999.999999999 dollars are the most", clip(s))
	}
	if whole == "" || strings.Trim(whole+frac, "0123456789") != "" || dotted && frac == "" || len(frac) > 9 || len(whole) > 9 {
		return 0, fmt.Errorf("%q is not an amount of money: %s", clip(s), form)
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
// OpenAI's prompt_tokens do and Anthropic's input_tokens do not; CacheWrite includes
// CacheWrite1h, as Anthropic's cache_creation_input_tokens does.
type Usage struct {
	Input, CachedInput, CacheWrite, CacheWrite1h, Output int64
	Images, AudioSeconds                                 int64
}

// Price is what a model costs per million tokens. What is absent is not stated, which is another thing
// than "0.00": where money is limited, input and output must be stated.
type Price struct {
	Input        *NanoUSD `yaml:"input,omitempty"`
	CachedInput  *NanoUSD `yaml:"cached_input,omitempty"`   // absent: as Input
	CacheWrite   *NanoUSD `yaml:"cache_write,omitempty"`    // kept for minutes; absent: as Input
	CacheWrite1h *NanoUSD `yaml:"cache_write_1h,omitempty"` // kept for an hour; absent: as CacheWrite
	Output       *NanoUSD `yaml:"output,omitempty"`
}

// Flat prices come on top of a Price.
type Flat struct {
	Request     NanoUSD `yaml:"request,omitempty"`
	Image       NanoUSD `yaml:"image,omitempty"`
	AudioSecond NanoUSD `yaml:"audio_second,omitempty"`
}

// Dated are the prices from a moment on. They replace all of before: what is absent is not taken over.
type Dated struct {
	From   Date  `yaml:"from"`
	Price  Price `yaml:"price_per_million,omitempty"`
	Flat   Flat  `yaml:"price_flat,omitempty"`
	Gratis bool  `yaml:"free,omitempty"`
}

// rates are a Price with the absent filled in: 0 where nothing stands for it.
type rates struct{ input, cached, write, write1h, output NanoUSD }

func (p *Price) rates() rates {
	var r rates
	r.input = valueOr(p.Input, 0)
	r.cached = valueOr(p.CachedInput, r.input)
	r.write = valueOr(p.CacheWrite, r.input)
	r.write1h = valueOr(p.CacheWrite1h, r.write)
	r.output = valueOr(p.Output, 0)
	return r
}

// Cost prices one answer by Price and Flat, rounded up once. Every token is priced exactly once: a cached
// one at its own rate only. It saturates instead of overflowing; negative counts cost nothing.
func (m *Model) Cost(u Usage) NanoUSD {
	input := max(u.Input, 0)
	cached := min(max(u.CachedInput, 0), input)
	written := min(max(u.CacheWrite, u.CacheWrite1h, 0), input-cached)
	hour := min(max(u.CacheWrite1h, 0), written)
	r := m.Price.rates()
	var s nanoSum
	s.add(input-cached-written, r.input)
	s.add(cached, r.cached)
	s.add(written-hour, r.write)
	s.add(hour, r.write1h)
	s.add(max(u.Output, 0), r.output)
	m.Flat.add(&s, u.Images, u.AudioSeconds)
	return s.dollars()
}

// UpperBound is the most that an answer with so many tokens, images and seconds can cost, whatever is cached
// or written: no Cost of as much or less is above it.
func (m *Model) UpperBound(input, output, images, audioSeconds int64) NanoUSD {
	r := m.Price.rates()
	var s nanoSum
	s.add(max(input, 0), max(r.input, r.cached, r.write, r.write1h))
	s.add(max(output, 0), r.output)
	m.Flat.add(&s, images, audioSeconds)
	return s.dollars()
}

// Free says that no answer costs anything by Price and Flat.
func (m *Model) Free() bool { return m.Price.rates() == rates{} && m.Flat == Flat{} }

// kind is one of the prices of a model.
type kind struct {
	name  string
	price *NanoUSD
}

func (p *Price) kinds() []kind {
	return []kind{{"input", p.Input}, {"cached_input", p.CachedInput}, {"cache_write", p.CacheWrite}, {"cache_write_1h", p.CacheWrite1h}, {"output", p.Output}}
}

func (f *Flat) kinds() []kind {
	return []kind{{"request", &f.Request}, {"image", &f.Image}, {"audio_second", &f.AudioSecond}}
}

// at is the model with the prices of a moment as its own, and when they change next; zero if never.
func (m *Model) at(now time.Time) (priced Model, next time.Time) {
	priced = *m
	for i := range m.Prices {
		d := &m.Prices[i]
		if from := time.Time(d.From); from.After(now) {
			return priced, from
		}
		priced.Price, priced.Flat, priced.Gratis = d.Price, d.Flat, d.Gratis
	}
	return priced, time.Time{}
}

func (f *Flat) add(s *nanoSum, images, audioSeconds int64) {
	s.add(perMillion, f.Request)
	s.add(min(max(images, 0), math.MaxInt64/perMillion)*perMillion, f.Image)
	s.add(min(max(audioSeconds, 0), math.MaxInt64/perMillion)*perMillion, f.AudioSecond)
}

const perMillion = 1_000_000

// nanoSum adds up nano-dollars × 10⁶, and saturates.
type nanoSum struct{ hi, lo uint64 }

func (s *nanoSum) add(n int64, p NanoUSD) {
	ph, pl := bits.Mul64(uint64(n), uint64(p))
	lo, carry := bits.Add64(s.lo, pl, 0)
	hi, over := bits.Add64(s.hi, ph, carry)
	if s.hi, s.lo = hi, lo; over != 0 {
		s.hi, s.lo = math.MaxUint64, math.MaxUint64
	}
}

// dollars is the sum, rounded up.
func (s *nanoSum) dollars() NanoUSD {
	lo, carry := bits.Add64(s.lo, perMillion-1, 0)
	hi, over := bits.Add64(s.hi, 0, carry)
	if over != 0 || hi >= perMillion {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, perMillion)
	return NanoUSD(min(q, math.MaxInt64))
}

// valueOr is what a policy says, d where it says nothing.
func valueOr[T any](p *T, d T) T {
	if p != nil {
		return *p
	}
	return d
}
