package limiter_test

import (
	"strings"
	"testing"
	"time"

	"headgate/limiter"
)

func TestParseRate(t *testing.T) {
	for in, want := range map[string]limiter.Rate{
		"60000/min":            {Count: 60000, Per: time.Minute},
		"600/s":                {Count: 600, Per: time.Second},
		"10/day":               {Count: 10, Per: 24 * time.Hour},
		"5/10s":                {Count: 5, Per: 10 * time.Second},
		"1/h":                  {Count: 1, Per: time.Hour},
		"1/30day":              {Count: 1, Per: 720 * time.Hour},
		"3/250ms":              {Count: 3, Per: 250 * time.Millisecond},
		"9007199254740992/1ns": {Count: limiter.MaxUnits, Per: 1},
	} {
		if got, err := limiter.ParseRate(in); err != nil || got != want {
			t.Errorf("%q: got %v, %v; want %v", in, got, err, want)
		}
	}
	for in, word := range map[string]string{
		"":                     "no period",
		"60":                   "60000/min",
		"/min":                 "whole number",
		"-5/min":               "whole number",
		"1.5/min":              "whole number",
		"1e3/min":              "whole number",
		"+1/min":               "whole number",
		"0/min":                "at least 1",
		"9007199254740993/min": "above",
		"5/":                   "unknown period",
		"5/m":                  "min",
		"5/minute":             "min",
		"5/0s":                 "at least 1",
		"5/-1s":                "unknown period",
		"5/1.5s":               "unknown period",
		"5/s/s":                "unknown period",
		"5 /min":               "whole number",
		"5/99999day":           "shorten",
		"5/99999999999999999s": "above",
	} {
		if got, err := limiter.ParseRate(in); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: got %v, %v; want an error with %q", in, got, err, word)
		}
	}
}

func FuzzParseRate(f *testing.F) {
	for _, s := range []string{"60000/min", "5/10s", "1/day", "0/s", "1/0ms", "9007199254740992/ns", "/", "1/9999999999h"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := limiter.ParseRate(s)
		if err != nil {
			return
		}
		l := limiter.Limit{Algorithm: limiter.FixedWindow, Rate: r}
		if err := l.Validate(); err != nil {
			t.Fatalf("%q reads as an invalid rate: %v", s, err)
		}
		if again, err := limiter.ParseRate(r.String()); err != nil || again != r {
			t.Fatalf("%q reads as %v, which reads as %v, %v", s, r, again, err)
		}
	})
}

func TestParseAlgorithm(t *testing.T) {
	for _, a := range []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog} {
		if got, err := limiter.ParseAlgorithm(a.String()); err != nil || got != a {
			t.Errorf("%v: got %v, %v", a, got, err)
		}
	}
	for _, s := range []string{"", "semaphore", "GCRA", "token_bucket"} {
		if _, err := limiter.ParseAlgorithm(s); err == nil || !strings.Contains(err.Error(), "sliding_log") {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestValidate(t *testing.T) {
	const year = 365 * 24 * time.Hour
	rate := func(n int64, per time.Duration) limiter.Rate { return limiter.Rate{Count: n, Per: per} }
	for _, c := range []struct {
		limit limiter.Limit
		word  string // "" is valid
	}{
		{limiter.Limit{}, "rate count 0"},
		{limiter.Limit{Rate: rate(1, time.Second)}, "burst 0"},
		{limiter.Limit{Rate: rate(1, time.Second), Burst: 1}, ""},
		{limiter.Limit{Rate: rate(-1, time.Second), Burst: 1}, "rate count -1"},
		{limiter.Limit{Rate: rate(1, -time.Second), Burst: 1}, "period"},
		{limiter.Limit{Rate: rate(1, 74*year), Burst: 1}, "period"},
		{limiter.Limit{Rate: rate(1, year), Burst: 73}, ""},
		{limiter.Limit{Rate: rate(1, year), Burst: 74}, "to fill"},
		{limiter.Limit{Rate: rate(limiter.MaxUnits, 1), Burst: limiter.MaxUnits}, ""},
		{limiter.Limit{Rate: rate(1, 1), Burst: limiter.MaxUnits + 1}, "burst"},
		{limiter.Limit{Algorithm: limiter.FixedWindow, Rate: rate(5, time.Hour)}, ""},
		{limiter.Limit{Algorithm: limiter.FixedWindow, Rate: rate(5, time.Hour), Burst: 5}, ""},
		{limiter.Limit{Algorithm: limiter.FixedWindow, Rate: rate(5, time.Hour), Burst: 6}, "drop the burst"},
		{limiter.Limit{Algorithm: limiter.SlidingLog, Rate: rate(10_000, time.Hour)}, ""},
		{limiter.Limit{Algorithm: limiter.SlidingLog, Rate: rate(10_001, time.Hour)}, "sliding_window"},
		{limiter.Limit{Algorithm: limiter.Semaphore, Burst: 1}, ""},
		{limiter.Limit{Algorithm: limiter.Semaphore}, "slots 0"},
		{limiter.Limit{Algorithm: limiter.Semaphore, Burst: 1, Rate: rate(1, 1)}, "drop the rate"},
		{limiter.Limit{Algorithm: 9, Burst: 1}, "algorithm(9)"},
	} {
		err := c.limit.Validate()
		if (err == nil) != (c.word == "") || err != nil && !strings.Contains(err.Error(), c.word) {
			t.Errorf("%+v: got %v, want %q", c.limit, err, c.word)
		}
	}
}
