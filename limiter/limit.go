package limiter

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// The bounds that Validate enforces. Together they keep every sum and product
// of this package inside 128 bits and every clock reading inside an int64.
const (
	// MaxUnits bounds a rate's count, a burst, and the cost of one charge:
	// 2^53, the largest integer that survives a JSON reader made of floats.
	// In nano-dollars it is nine million dollars.
	MaxUnits = 1 << 53
	// MaxSpan bounds a rate's period and the time an empty bucket takes to
	// fill: 2^61 ns, about 73 years.
	MaxSpan time.Duration = 1 << 61
	// MaxLogEntries bounds the count of a SlidingLog, which keeps one entry of
	// 16 bytes for every unit that it may have to remember.
	MaxLogEntries = 10_000
)

// Never is the RetryAfter of a refusal that no wait will turn into an
// admission, and the Reset of a level that does not recover with time.
const Never time.Duration = math.MaxInt64

// Algorithm says how a limit counts. The zero value is GCRA.
type Algorithm uint8

const (
	// GCRA is the generic cell rate algorithm (ATM Forum TM 4.0 §4.4.2), the
	// exact form of a token bucket.
	GCRA Algorithm = iota
	// FixedWindow counts in windows aligned to multiples of the period since
	// the Unix epoch, so that a period of one day is the UTC day.
	FixedWindow
	// SlidingWindow weighs the previous fixed window by how much of it the
	// sliding window still covers. It assumes that traffic was even in it.
	SlidingWindow
	// SlidingLog remembers every charge of the last period: exact, and dear.
	SlidingLog
	// Semaphore counts slots in use; time gives none back.
	Semaphore
)

var algorithmNames = [...]string{"gcra", "fixed_window", "sliding_window", "sliding_log", "semaphore"}

// String returns the name that a policy uses.
func (a Algorithm) String() string {
	if int(a) < len(algorithmNames) {
		return algorithmNames[a]
	}
	return "algorithm(" + strconv.Itoa(int(a)) + ")"
}

// ParseAlgorithm reads the name of a rate's algorithm. A semaphore is not
// among them: a policy asks for it by the unit concurrency.
func ParseAlgorithm(s string) (Algorithm, error) {
	for a, name := range algorithmNames[:Semaphore] {
		if s == name {
			return Algorithm(a), nil
		}
	}
	return 0, fmt.Errorf("unknown algorithm %q: use %s", s, strings.Join(algorithmNames[:Semaphore], ", "))
}

// Rate is Count units every Per.
type Rate struct {
	Count int64
	Per   time.Duration
}

// Periods that a rate may name, the longest first so that String finds the
// shortest spelling.
var periods = [...]struct {
	name string
	per  time.Duration
}{
	{"day", 24 * time.Hour},
	{"h", time.Hour},
	{"min", time.Minute},
	{"s", time.Second},
	{"ms", time.Millisecond},
	{"us", time.Microsecond},
	{"ns", time.Nanosecond},
}

// ParseRate reads a rate such as 60000/min, 600/s, 10/day or 5/10s.
func ParseRate(s string) (Rate, error) {
	const form = "write COUNT/PERIOD, the period being ns, us, ms, s, min, h or day with an optional whole number before it, as in 60000/min or 5/10s"
	count, period, ok := strings.Cut(s, "/")
	if !ok {
		return Rate{}, fmt.Errorf("rate %q has no period: %s", s, form)
	}
	n, err := parseWhole(count)
	if err != nil {
		return Rate{}, fmt.Errorf("rate %q: the count %q %w: %s", s, count, err, form)
	}
	unit := strings.TrimLeft(period, "0123456789")
	times := int64(1)
	if digits := period[:len(period)-len(unit)]; digits != "" {
		if times, err = parseWhole(digits); err != nil {
			return Rate{}, fmt.Errorf("rate %q: the number of periods %q %w: %s", s, digits, err, form)
		}
	}
	for _, p := range periods {
		if unit != p.name {
			continue
		}
		if times > int64(MaxSpan/p.per) {
			return Rate{}, fmt.Errorf("rate %q: the period is longer than %d days: shorten it", s, MaxSpan/(24*time.Hour))
		}
		return Rate{Count: n, Per: time.Duration(times) * p.per}, nil
	}
	return Rate{}, fmt.Errorf("rate %q: unknown period %q: %s", s, unit, form)
}

// parseWhole reads a number from 1 to MaxUnits in plain digits.
func parseWhole(s string) (int64, error) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, errors.New("is not a whole number in plain digits")
	}
	n, err := strconv.ParseInt(s, 10, 64)
	switch {
	case err != nil || n > MaxUnits:
		return 0, fmt.Errorf("is above %d", int64(MaxUnits))
	case n == 0:
		return 0, errors.New("is zero and must be at least 1")
	}
	return n, nil
}

// String returns the rate in the shortest form that ParseRate reads.
func (r Rate) String() string {
	for _, p := range periods {
		if r.Per >= p.per && r.Per%p.per == 0 {
			times := ""
			if n := r.Per / p.per; n > 1 {
				times = strconv.FormatInt(int64(n), 10)
			}
			return strconv.FormatInt(r.Count, 10) + "/" + times + p.name
		}
	}
	return fmt.Sprintf("%d/%v", r.Count, r.Per)
}

// Limit is one rule. It must not change once a State was used with it: a
// changed rule is a new Limit, to which Convert carries the State over. The
// zero value is not valid.
type Limit struct {
	Algorithm Algorithm
	// Rate is what refills a GCRA and what a window admits. A Semaphore has
	// none.
	Rate Rate
	// Burst is the size of a GCRA bucket and the number of a semaphore's
	// slots. A window's is its rate's count: leave it 0, or say the same.
	Burst int64
	// Revision numbers the policy that the limit came from; where two meet in
	// one bucket the higher one binds.
	Revision uint64
	// Parts says of how many equal parts of a whole this limit is one; 0 is the
	// whole. Where it changes Convert keeps the level instead of the deficit.
	Parts int32
}

// Validate says what is wrong with a limit and what to write instead. The
// other methods are defined for valid limits only.
func (l *Limit) Validate() error {
	if l.Algorithm > Semaphore {
		return fmt.Errorf("unknown %v", l.Algorithm)
	}
	if l.Algorithm == Semaphore {
		if l.Rate != (Rate{}) {
			return fmt.Errorf("a semaphore has slots and no rate: drop the rate %v", l.Rate)
		}
		return checkUnits("slots", l.Burst)
	}
	if err := checkUnits("rate count", l.Rate.Count); err != nil {
		return err
	}
	if l.Rate.Per < 1 || l.Rate.Per > MaxSpan {
		return fmt.Errorf("rate period %v: must be from 1ns to %d days", l.Rate.Per, MaxSpan/(24*time.Hour))
	}
	if l.Algorithm == GCRA {
		if err := checkUnits("burst", l.Burst); err != nil {
			return err
		}
		fill := product(l.Burst, int64(l.Rate.Per))
		if product(int64(MaxSpan), l.Rate.Count).less(fill) {
			return fmt.Errorf("burst %d at %v takes more than %d days to fill: lower the burst or raise the rate",
				l.Burst, l.Rate, MaxSpan/(24*time.Hour))
		}
		return nil
	}
	if l.Burst != 0 && l.Burst != l.Rate.Count {
		return fmt.Errorf("%v admits its rate's count of %d in a window: drop the burst of %d or use gcra",
			l.Algorithm, l.Rate.Count, l.Burst)
	}
	if l.Algorithm == SlidingLog && l.Rate.Count > MaxLogEntries {
		return fmt.Errorf("sliding_log remembers up to %d units, not %d: use sliding_window or gcra",
			MaxLogEntries, l.Rate.Count)
	}
	return nil
}

func checkUnits(what string, n int64) error {
	if n < 1 || n > MaxUnits {
		return fmt.Errorf("%s %d: must be from 1 to %d", what, n, int64(MaxUnits))
	}
	return nil
}

// Capacity is the most that the limit can ever admit at one instant.
func (l *Limit) Capacity() int64 {
	if l.Algorithm == GCRA || l.Algorithm == Semaphore {
		return l.Burst
	}
	return l.Rate.Count
}
