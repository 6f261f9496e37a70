package limiter_test

import (
	"encoding/binary"
	"math"
	"testing"
	"time"

	"headgate/limiter"

	"pgregory.net/rapid"
)

// A state that was saved and restored at the same instant decides as before, for ever.
func TestRestoredStateIsTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &limiter.Limit{
			Algorithm: limiter.Algorithm(rapid.IntRange(0, int(limiter.SlidingLog)).Draw(t, "algorithm")),
			Rate:      limiter.Rate{Count: rapid.Int64Range(1, 100).Draw(t, "count"), Per: time.Duration(rapid.Int64Range(1, int64(time.Minute)).Draw(t, "per"))},
		}
		if l.Algorithm == limiter.GCRA {
			l.Burst = rapid.Int64Range(1, 100).Draw(t, "burst")
		}
		var s limiter.State
		now := int64(1_788_111_222_333_444_555)
		step := func() { now += rapid.Int64Range(0, 2*int64(l.Rate.Per)).Draw(t, "step") }
		for range rapid.IntRange(0, 20).Draw(t, "charges") {
			step()
			d := l.Take(&s, now, rapid.Int64Range(0, 120).Draw(t, "cost"), limiter.Debt)
			l.Adjust(&s, now, d.At, rapid.Int64Range(-200, 0).Draw(t, "more"))
		}
		// A reading older than the newest seen is read as that.
		saved := now - rapid.Int64Range(0, min(3, int64(l.Rate.Per))).Draw(t, "back")
		restored, err := l.RestoreState(l.AppendState(nil, &s, saved), saved, saved)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			step()
			cost := rapid.Int64Range(0, 120).Draw(t, "cost")
			if got, want := l.Take(&restored, now, cost, limiter.Debt), l.Take(&s, now, cost, limiter.Debt); got != want {
				t.Fatalf("%+v, want %+v", got, want)
			}
		}
	})
}

func uvarints(vs ...uint64) (b []byte) {
	for _, v := range vs {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

func TestImpossibleStatesAreErrors(t *testing.T) {
	rate := limiter.Rate{Count: 10, Per: time.Minute}
	gcra := &limiter.Limit{Rate: rate, Burst: 10}
	fixed := &limiter.Limit{Algorithm: limiter.FixedWindow, Rate: rate}
	sliding := &limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: rate}
	log := &limiter.Limit{Algorithm: limiter.SlidingLog, Rate: rate}
	slots := &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 10}
	for what, c := range map[string]struct {
		limit *limiter.Limit
		b     []byte
		ok    bool
	}{
		"gcra":                       {gcra, uvarints(0, 60, 9), true},
		"gcra beyond the clock":      {gcra, uvarints(0, math.MaxInt64, 0), true},
		"seen later than the clock":  {gcra, uvarints(1<<62, 60, 9), true},
		"nothing":                    {gcra, nil, false},
		"cut off":                    {gcra, uvarints(0, 60), false},
		"something behind":           {gcra, uvarints(0, 60, 9, 0), false},
		"no uvarint":                 {gcra, []byte{0, 0x80}, false},
		"a uvarint too long":         {gcra, []byte{0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0}, false},
		"a remainder of the rate":    {gcra, uvarints(0, 60, 10), false},
		"seen too late":              {gcra, uvarints(1<<62+1, 60, 9), false},
		"fixed":                      {fixed, uvarints(0, 9, 9, 0), true},
		"more carried than used":     {fixed, uvarints(0, 9, 10, 0), false},
		"a fixed window before this": {fixed, uvarints(0, 9, 9, 1), false},
		"sliding":                    {sliding, uvarints(0, 9, 0, 10), true},
		"used too much":              {sliding, uvarints(0, 1<<62+1, 0, 10), false},
		"log":                        {log, uvarints(0, 0, 2, 5, 4, 3, 6), true},
		"a log in debt":              {log, uvarints(0, 7, 1, 5, 10), true},
		"debt without a full log":    {log, uvarints(0, 7, 1, 5, 9), false},
		"debt with an empty log":     {log, uvarints(0, 7, 0), false},
		"a log too full":             {log, uvarints(0, 0, 2, 5, 5, 3, 6), false},
		"entries out of order":       {log, uvarints(0, 0, 2, 3, 1, 5, 1), false},
		"two entries of an instant":  {log, uvarints(0, 0, 2, 3, 1, 3, 1), false},
		"an entry of nothing":        {log, uvarints(0, 0, 1, 3, 0), false},
		"an entry too old":           {log, uvarints(0, 0, 1, uint64(time.Minute), 1), false},
		"too many entries":           {log, uvarints(0, 0, 11), false},
		"slots":                      {slots, uvarints(0), false},
	} {
		const now = int64(1_788_111_222_333_444_555)
		s, err := c.limit.RestoreState(c.b, now, now)
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", what, err)
		}
		if err == nil && c.limit.Full(&s, now) {
			t.Errorf("%s: nothing is spent", what)
		}
	}
}

// A bucket that was empty at some instant is never above what an ideal one can have by then.
func TestEmptyAt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &limiter.Limit{
			Algorithm: limiter.Algorithm(rapid.IntRange(0, int(limiter.SlidingLog)).Draw(t, "algorithm")),
			Rate:      limiter.Rate{Count: rapid.Int64Range(1, 100).Draw(t, "count"), Per: time.Minute},
		}
		if l.Algorithm == limiter.GCRA {
			l.Burst = rapid.Int64Range(1, 100).Draw(t, "burst")
		}
		at := rapid.Int64Range(1_788_111_222_333_444_555, 1_788_111_333_333_444_555).Draw(t, "at")
		age := rapid.Int64Range(0, int64(3*time.Minute)).Draw(t, "age")
		s := l.EmptyAt(at+age, at)
		got := l.Peek(&s, at+age, 0, limiter.Refuse).Remaining
		want := int64(0)
		switch offset := at % int64(time.Minute); l.Algorithm {
		case limiter.GCRA:
			want = min(l.Burst, l.Rate.Count*age/int64(time.Minute))
		case limiter.FixedWindow:
			if offset+age >= int64(time.Minute) {
				want = l.Rate.Count
			}
		case limiter.SlidingWindow:
			if in := offset + age - int64(time.Minute); in >= 0 {
				want = min(l.Rate.Count, l.Rate.Count*in/int64(time.Minute))
			}
		case limiter.SlidingLog:
			if age >= int64(time.Minute) {
				want = l.Rate.Count
			}
		}
		if got != want {
			t.Fatalf("%d, want %d", got, want)
		}
		// It is the state that an empty one grows into.
		grown := l.EmptyAt(at, at)
		for _, now := range []int64{at + age, at + age + rapid.Int64Range(0, int64(time.Minute)).Draw(t, "on")} {
			if a, b := l.Take(&s, now, 1, limiter.Refuse), l.Take(&grown, now, 1, limiter.Refuse); a != b {
				t.Fatalf("%+v, want %+v", b, a)
			}
		}
	})
}
