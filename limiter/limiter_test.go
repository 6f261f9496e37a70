package limiter_test

import (
	"fmt"
	"math"
	"testing"
	"time"
	"unsafe"

	"headgate/limiter"
)

// start is a reading in the middle of a minute, an hour and a day.
const start = int64(1_788_111_222_333_444_555)

const (
	sec  = int64(time.Second)
	mins = int64(time.Minute)
	day  = 24 * 60 * mins
)

// step is one line of a table: at a reading after start, take (or adjust by) a
// number of units and expect a decision.
type step struct {
	after     int64
	op        string // take, debt (take with limiter.Debt) or adjust
	units     int64
	admitted  bool
	remaining int64
	retry     time.Duration
}

func run(t *testing.T, l limiter.Limit, origin int64, steps []step) {
	t.Helper()
	if err := l.Validate(); err != nil {
		t.Fatal(err)
	}
	var s limiter.State
	for i, st := range steps {
		now := origin + st.after
		var d limiter.Decision
		switch st.op {
		case "adjust":
			l.Adjust(&s, now, now, st.units)
			d = l.Take(&s, now, 0, limiter.Refuse)
		case "debt":
			d = l.Take(&s, now, st.units, limiter.Debt)
		default:
			d = l.Take(&s, now, st.units, limiter.Refuse)
		}
		if d.Admitted != st.admitted || d.Remaining != st.remaining || d.RetryAfter != st.retry {
			t.Errorf("step %d, %s %d after %v: got admitted %v, remaining %d, retry %v; want %v, %d, %v", i, st.op, st.units,
				time.Duration(st.after), d.Admitted, d.Remaining, d.RetryAfter, st.admitted, st.remaining, st.retry)
		}
	}
}

// The worked example: 6000 tokens a minute, a burst of 6000.
func TestWorkedExample(t *testing.T) {
	l := limiter.Limit{Rate: limiter.Rate{Count: 6000, Per: time.Minute}, Burst: 6000}
	t.Run("spend", func(t *testing.T) {
		run(t, l, start, []step{
			{0, "take", 500, true, 5500, 0},
			{0, "take", 500, true, 5000, 0},
			{0, "take", 4000, true, 1000, 0},
			{0, "take", 2000, false, 1000, 10 * time.Second},
			{30 * sec, "take", 2000, true, 2000, 0},
		})
	})
	t.Run("another tenant", func(t *testing.T) {
		run(t, l, start, []step{{0, "take", 2000, true, 4000, 0}})
	})
	t.Run("debt", func(t *testing.T) {
		run(t, l, start, []step{
			{0, "take", 500, true, 5500, 0},
			{0, "adjust", 500 - 5000, true, 1000, 0},
			{0, "take", 500, true, 500, 0},
		})
	})
}

func TestTables(t *testing.T) {
	const s = time.Second
	perMinute := limiter.Rate{Count: 10, Per: time.Minute}
	minute := start - start%mins // a window's beginning
	for _, c := range []struct {
		name   string
		limit  limiter.Limit
		origin int64
		steps  []step
	}{
		{"gcra burst 1", limiter.Limit{Rate: limiter.Rate{Count: 1, Per: s}, Burst: 1}, start, []step{
			{0, "take", 1, true, 0, 0},
			{0, "take", 1, false, 0, s},
			{sec - 1, "take", 1, false, 0, 1},
			{sec, "take", 1, true, 0, 0},
			{10 * sec, "take", 1, true, 0, 0},
			{10 * sec, "take", 1, false, 0, s},
		}},
		{"gcra burst 5", limiter.Limit{Rate: limiter.Rate{Count: 1, Per: s}, Burst: 5}, start, []step{
			{0, "take", 1, true, 4, 0},
			{0, "take", 1, true, 3, 0},
			{0, "take", 1, true, 2, 0},
			{0, "take", 1, true, 1, 0},
			{0, "take", 1, true, 0, 0},
			{0, "take", 1, false, 0, s},
			{3 * sec, "take", 4, false, 3, s},
			{3 * sec, "take", 3, true, 0, 0},
		}},
		{"gcra a third of a unit", limiter.Limit{Rate: limiter.Rate{Count: 3, Per: s}, Burst: 1}, start, []step{
			{0, "take", 1, true, 0, 0},
			{0, "take", 1, false, 0, 333_333_334},
			{333_333_333, "take", 1, false, 0, 1},
			{333_333_334, "take", 1, true, 0, 0},
		}},
		{"gcra dollars: 240 nano-dollars in 57.6 ns", limiter.Limit{Rate: limiter.Rate{Count: 250e9, Per: time.Minute}, Burst: 250e9}, start, []step{
			{0, "take", 250e9, true, 0, 0},
			{57, "take", 240, false, 237, 1},
			{58, "take", 240, true, 1, 0},
			{60, "take", 10, true, 0, 0},
		}},
		{"gcra one a day", limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 24 * time.Hour}, Burst: 2}, start, []step{
			{0, "take", 2, true, 0, 0},
			{day - 1, "take", 1, false, 0, 1},
			{day, "take", 1, true, 0, 0},
		}},
		{"gcra a negative first hit raises nothing", limiter.Limit{Rate: perMinute, Burst: 100}, start, []step{
			{0, "take", -500, true, 100, 0},
			{0, "take", 101, false, 100, limiter.Never},
			{0, "take", 100, true, 0, 0},
			{0, "take", 0, true, 0, 0},
		}},
		{"gcra oversize as debt", limiter.Limit{Rate: perMinute, Burst: 10}, start, []step{
			{0, "take", 1, true, 9, 0},
			{0, "debt", 25, false, 9, 6 * s},
			{6 * sec, "debt", 25, true, -15, 0},
			{6 * sec, "take", 1, false, -15, 96 * s},
			{6 * sec, "take", 0, true, -15, 0},
			{96*sec + 6*sec, "take", 1, true, 0, 0},
		}},
		{"gcra refund is capped", limiter.Limit{Rate: perMinute, Burst: 10}, start, []step{
			{0, "take", 8, true, 2, 0},
			{30 * sec, "adjust", 8, true, 10, 0},
			{30 * sec, "take", 10, true, 0, 0},
			{30 * sec, "take", 1, false, 0, 6 * s},
		}},
		{"an older reading is the newest", limiter.Limit{Rate: perMinute, Burst: 10}, start, []step{
			{6 * sec, "take", 10, true, 0, 0},
			{0, "take", 1, false, 0, 6 * s},
			{-start - 5, "take", 1, false, 0, 6 * s},
			{12 * sec, "take", 1, true, 0, 0},
		}},
		{"fixed window keeps its end", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: perMinute}, minute, []step{
			{50 * sec, "take", 10, true, 0, 0},
			{55 * sec, "take", 1, false, 0, 5 * s},
			{59 * sec, "take", 1, false, 0, s},
			{60 * sec, "take", 10, true, 0, 0},
			{0, "take", 1, false, 0, 60 * s},
		}},
		{"fixed window carries debt", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: perMinute}, minute, []step{
			{0, "debt", 25, true, -15, 0},
			{10 * sec, "take", 1, false, -15, 110 * s},
			{60 * sec, "take", 0, true, -5, 0},
			{120 * sec, "take", 6, false, 5, 60 * s},
			{120 * sec, "take", 5, true, 0, 0},
		}},
		{
			"fixed window of a day is the UTC day",
			limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 1, Per: 24 * time.Hour}},
			time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC).UnixNano(),
			[]step{
				{day - 1, "take", 1, true, 0, 0},
				{day - 1, "take", 1, false, 0, 1},
				{day, "take", 1, true, 0, 0},
			},
		},
		{"sliding window weighs the last", limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: perMinute}, minute, []step{
			{30 * sec, "take", 10, true, 0, 0},
			{59 * sec, "take", 1, false, 0, 7 * s},
			{66 * sec, "take", 1, true, 0, 0},
			{90 * sec, "take", 5, false, 4, 6 * s},
			{96 * sec, "take", 5, true, 0, 0},
		}},
		{"sliding log slides", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 3, Per: time.Minute}}, start, []step{
			{0, "take", 1, true, 2, 0},
			{20 * sec, "take", 2, true, 0, 0},
			{21 * sec, "take", 1, false, 0, 39 * s},
			{21 * sec, "take", 2, false, 0, 59 * s},
			{60*sec - 1, "take", 1, false, 0, 1},
			{60 * sec, "take", 1, true, 0, 0},
			{80 * sec, "take", 3, false, 2, 40 * s},
		}},
		{"sliding log carries debt", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 3, Per: time.Minute}}, start, []step{
			{0, "debt", 7, true, -4, 0},
			{0, "take", 1, false, -4, 120 * s},
			{60 * sec, "take", 0, true, -1, 0},
			{120 * sec, "take", 2, true, 0, 0},
		}},
		{"semaphore", limiter.Limit{Algorithm: limiter.Semaphore, Burst: 2}, start, []step{
			{0, "take", 1, true, 1, 0},
			{0, "take", 1, true, 0, 0},
			{day, "take", 1, false, 0, limiter.Never},
			{day, "adjust", 1, true, 1, 0},
			{day, "adjust", 9, true, 2, 0},
			{day, "take", 3, false, 2, limiter.Never},
			{day, "debt", 3, true, -1, 0},
		}},
	} {
		t.Run(c.name, func(t *testing.T) { run(t, c.limit, c.origin, c.steps) })
	}
}

// From full exactly the burst passes, one by one, also where an interval is no
// whole number of nanoseconds.
func TestBurstFromFullIsExact(t *testing.T) {
	for _, a := range []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog, limiter.Semaphore} {
		for _, n := range []int64{1, 5, 7, 1000} {
			t.Run(fmt.Sprintf("%v/%d", a, n), func(t *testing.T) {
				l := limitOf(a, limiter.Rate{Count: n, Per: time.Minute}, n)
				var s limiter.State
				passed := int64(0)
				for range 2 * n {
					if l.Take(&s, start, 1, limiter.Refuse).Admitted {
						passed++
					}
				}
				if passed != n {
					t.Errorf("%d of %d passed", passed, n)
				}
			})
		}
	}
}

// limitOf builds a limit of any algorithm from the figures that it has a use for.
func limitOf(a limiter.Algorithm, r limiter.Rate, burst int64) limiter.Limit {
	switch a {
	case limiter.GCRA:
		return limiter.Limit{Algorithm: a, Rate: r, Burst: burst}
	case limiter.Semaphore:
		return limiter.Limit{Algorithm: a, Burst: burst}
	}
	return limiter.Limit{Algorithm: a, Rate: r}
}

// A million small charges leave what one large one leaves, to the fraction of
// a nanosecond: the next unit is due at the same instant.
func TestNoDrift(t *testing.T) {
	for _, r := range []limiter.Rate{
		{Count: 1, Per: 24 * time.Hour},
		{Count: 7, Per: time.Second},
		{Count: 1e9, Per: time.Second},
		{Count: 250e9, Per: time.Minute},
		{Count: 999_999_937, Per: time.Minute},
	} {
		l := limiter.Limit{Rate: r, Burst: 10_000}
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		var many, one limiter.State
		for range 10_000 {
			l.Take(&many, start, 1, limiter.Refuse)
		}
		l.Take(&one, start, 10_000, limiter.Refuse)
		if many != one {
			t.Errorf("%v: %+v after many, %+v after one", r, many, one)
		}
	}
}

func TestRefundStaysInItsWindow(t *testing.T) {
	r := limiter.Rate{Count: 10, Per: time.Minute}
	minute := start - start%mins
	for _, c := range []struct {
		algorithm limiter.Algorithm
		refundAt  int64
		want      int64 // remaining after 6 of 10 in the first and 6 in the next minute
	}{
		{limiter.FixedWindow, 90 * sec, 4},
		{limiter.SlidingWindow, 90 * sec, 4},   // 6/2 of the previous window gone
		{limiter.SlidingWindow, 150 * sec, 7},  // two windows back: nothing to give
		{limiter.SlidingLog, 59*sec + mins, 4}, // the charge no longer counts
	} {
		l := limitOf(c.algorithm, r, 0)
		var s limiter.State
		first := l.Take(&s, minute, 6, limiter.Refuse)
		if d := l.Take(&s, minute+90*sec, 6, limiter.Refuse); !first.Admitted || !d.Admitted {
			t.Fatal(c.algorithm, first, d)
		}
		l.Adjust(&s, minute+c.refundAt, first.At, 6)
		if d := l.Take(&s, minute+c.refundAt, 0, limiter.Refuse); d.Remaining != c.want {
			t.Errorf("%v after %v: %d left, want %d", c.algorithm, time.Duration(c.refundAt), d.Remaining, c.want)
		}
	}
}

// A refund that comes after its window pays the debt that the window carried on.
func TestLateRefundPaysCarriedDebt(t *testing.T) {
	for _, a := range []limiter.Algorithm{limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog} {
		l := limitOf(a, limiter.Rate{Count: 10, Per: time.Minute}, 0)
		var s limiter.State
		minute := start - start%mins
		d := l.Take(&s, minute, 50, limiter.Debt)
		l.Adjust(&s, minute+3*mins, d.At, 50)
		got := l.Take(&s, minute+3*mins, 0, limiter.Refuse)
		if want := map[limiter.Algorithm]int64{limiter.FixedWindow: 10, limiter.SlidingWindow: 0, limiter.SlidingLog: 0}[a]; got.Remaining != want {
			t.Errorf("%v: %d left, want %d", a, got.Remaining, want)
		}
		if got := l.Take(&s, minute+5*mins, 10, limiter.Refuse); !got.Admitted {
			t.Errorf("%v: the debt is still there: %+v", a, got)
		}
	}
}

func TestExtremesSaturate(t *testing.T) {
	slow := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 24 * time.Hour}, Burst: 1}
	for _, a := range []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog, limiter.Semaphore} {
		l := limitOf(a, slow.Rate, 1)
		var s limiter.State
		if d := l.Take(&s, start, limiter.MaxUnits+1, limiter.Debt); d.Admitted || d.RetryAfter != limiter.Never {
			t.Errorf("%v admits more than MaxUnits: %+v", a, d)
		}
		for range 4000 {
			l.Adjust(&s, start, start, math.MinInt64)
		}
		d := l.Take(&s, math.MaxInt64, 1, limiter.Refuse)
		if d.Admitted || d.Remaining >= 0 || d.RetryAfter <= 0 || d.Reset <= 0 {
			t.Errorf("%v forgets a debt: %+v", a, d)
		}
		l.Adjust(&s, 0, start, math.MaxInt64)
		if d := l.Take(&s, 0, 0, limiter.Refuse); d.Remaining > 1 || d.Reset < 0 {
			t.Errorf("%v above capacity after a refund: %+v", a, d)
		}
	}
	var s limiter.State
	if d := slow.Take(&s, start, limiter.MaxUnits, limiter.Debt); d.Admitted || d.RetryAfter != limiter.Never {
		t.Errorf("a debt beyond the clock's end was admitted: %+v", d)
	}
}

func TestLogIsBounded(t *testing.T) {
	l := limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 100, Per: time.Minute}}
	var s limiter.State
	now := start
	for i := range int64(200_000) {
		now += 1 + i%7*100_000_000
		if l.Take(&s, now, 1, limiter.Refuse); i%3 == 0 {
			l.Adjust(&s, now, now, -1)
		}
	}
	if n := limiter.LogCap(&s); n > 400 {
		t.Errorf("the log of 100 units holds %d entries", n)
	}
}

func TestStateIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(limiter.State{}); n > 40 {
		t.Errorf("a state has %d bytes", n)
	}
}

func TestDecisionsDoNotAllocate(t *testing.T) {
	for _, a := range []limiter.Algorithm{limiter.GCRA, limiter.FixedWindow, limiter.SlidingWindow, limiter.Semaphore} {
		l := limitOf(a, limiter.Rate{Count: 1000, Per: time.Minute}, 1000)
		var s limiter.State
		now := start
		if n := testing.AllocsPerRun(1000, func() {
			now += sec
			l.Peek(&s, now, 3, limiter.Refuse)
			d := l.Take(&s, now, 3, limiter.Refuse)
			l.Adjust(&s, now, d.At, 1)
			l.Full(&s, now)
		}); n != 0 {
			t.Errorf("%v: %v allocations", a, n)
		}
	}
}
