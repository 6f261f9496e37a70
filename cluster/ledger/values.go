package ledger

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strings"
	"time"

	"headgate/limiter"
)

// scalar is how a plain value stood in the policy. Its text is kept as written, so that
// nothing becomes a float on the way.
type scalar struct {
	text   string
	number bool // without quotes, and a number to YAML
}

// scalarParser is a type that reads itself from a scalar.
type scalarParser interface{ parse(scalar) error }

// Duration is a Go duration, or whole days as in 14d.
type Duration time.Duration

func (d *Duration) parse(s scalar) error {
	if days, ok := strings.CutSuffix(s.text, "d"); ok {
		if h, err := time.ParseDuration(days + "h"); err == nil && h >= 0 && h <= limiter.MaxSpan/24 {
			*d = Duration(h * 24)
			return nil
		}
	}
	v, err := time.ParseDuration(s.text)
	if err != nil || v < 0 {
		return fmt.Errorf("%q is not a duration: write 500ms, 60s, 10m, 6h or 14d", s.text)
	}
	*d = Duration(v)
	return nil
}

// UnmarshalYAML reads a duration in files other than the policy.
func (d *Duration) UnmarshalYAML(text []byte) error {
	return d.parse(scalar{text: strings.Trim(strings.TrimSpace(string(text)), `"'`)})
}

// MarshalYAML is the inverse of UnmarshalYAML.
func (d Duration) MarshalYAML() ([]byte, error) { return []byte(d.String()), nil }

// String gives whole days as days, as policies do, and anything else as Go does.
func (d Duration) String() string {
	if day := Duration(24 * time.Hour); d > 0 && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	return time.Duration(d).String()
}

// Date is a day (midnight UTC) or a moment (RFC 3339).
type Date time.Time

func (d *Date) parse(s scalar) error {
	for _, form := range [...]string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(form, s.text); err == nil {
			*d = Date(t.UTC())
			return nil
		}
	}
	return fmt.Errorf("%q is not a date: write 2026-01-15 or 2026-01-15T12:00:00Z", s.text)
}

// MarshalYAML gives what a policy reads.
func (d Date) MarshalYAML() ([]byte, error) { return []byte(d.String()), nil }

// String gives a day where the moment is one's beginning.
func (d Date) String() string {
	t := time.Time(d)
	if t.Equal(t.Truncate(24 * time.Hour)) {
		return t.Format(time.DateOnly)
	}
	return t.Format(time.RFC3339Nano)
}

// IsZero lets an absent date be left out.
func (d Date) IsZero() bool { return time.Time(d).IsZero() }

// Scalar is a plain value as written: what it means depends on the fields beside it.
type Scalar string

func (v *Scalar) parse(s scalar) error {
	if s.number && strings.ContainsAny(s.text, ".eE") && !strings.HasPrefix(s.text, "0x") {
		return fmt.Errorf("%s is a float: write a whole number, and dollars as a string, as in \"10.50\"", s.text)
	}
	*v = Scalar(s.text)
	return nil
}

// Factor is an exact decimal between 0 and 1000 with at most six decimals, in millionths.
type Factor int64

const factorOne Factor = 1_000_000

// parse reads the decimal as written, so that 0.2 is one fifth.
func (f *Factor) parse(s scalar) error {
	whole, frac, dotted := strings.Cut(s.text, ".")
	if whole == "" || len(whole) > 3 || len(frac) > 6 || dotted && frac == "" || strings.Trim(whole+frac, "0123456789") != "" {
		return errors.New("a factor is a decimal between 0 and 1000 with at most six decimals, as in 0.2")
	}
	var n Factor
	for _, c := range whole + frac + strings.Repeat("0", 6-len(frac)) {
		n = n*10 + Factor(c-'0')
	}
	*f = n
	return nil
}

// MarshalYAML gives what a policy reads.
func (f Factor) MarshalYAML() ([]byte, error) { return []byte(f.String()), nil }

// String gives a decimal without needless zeros.
func (f Factor) String() string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%d.%06d", f/factorOne, f%factorOne), "0"), ".")
}

// fraction is a product of factors, exact and in lowest terms.
type fraction struct{ num, den int64 }

func product(a, b Factor) fraction {
	num, den := int64(a)*int64(b), int64(factorOne)*int64(factorOne) // 10¹⁸ at most
	g := gcd(num, den)
	return fraction{num / g, den / g}
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// of scales a count, rounded down, but to 1 at least and limiter.MaxUnits at most.
func (f fraction) of(n int64) int64 {
	v := new(big.Int).Mul(big.NewInt(n), big.NewInt(f.num))
	v.Quo(v, big.NewInt(f.den))
	if !v.IsInt64() {
		return limiter.MaxUnits
	}
	return min(max(v.Int64(), 1), limiter.MaxUnits)
}

// ofRate scales a rate exactly, by a longer period where the count would not stay whole:
// a fifth of 7/s is 7/5s. Where that passes the limiter's bounds the rate is rounded down.
func (f fraction) ofRate(r limiter.Rate) limiter.Rate {
	den, count := big.NewInt(f.den), new(big.Int).Mul(big.NewInt(r.Count), big.NewInt(f.num))
	if g := new(big.Int).GCD(nil, nil, count, den); g.Sign() > 0 {
		den.Quo(den, g)
		per := new(big.Int).Mul(big.NewInt(int64(r.Per)), den)
		if n := new(big.Int).Quo(count, g); n.IsInt64() && n.Int64() <= limiter.MaxUnits && per.IsInt64() && per.Int64() <= int64(limiter.MaxSpan) {
			return limiter.Rate{Count: max(n.Int64(), 1), Per: time.Duration(per.Int64())}
		}
	}
	if n := f.of(r.Count); n > 1 {
		return limiter.Rate{Count: n, Per: r.Per}
	}
	per := new(big.Int).Mul(big.NewInt(int64(r.Per)), big.NewInt(f.den))
	per, rest := per.QuoRem(per, count, new(big.Int))
	if rest.Sign() > 0 {
		per.Add(per, big.NewInt(1))
	}
	if !per.IsInt64() {
		per.SetInt64(math.MaxInt64) // which the limiter refuses
	}
	return limiter.Rate{Count: 1, Per: time.Duration(per.Int64())}
}
