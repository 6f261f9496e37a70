package lease_test

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/lease"
	"headgate/limiter"
)

// take charges cost to one bucket and returns what is left.
func take(t rapid.TB, l *lease.Local, now int64, c limiter.Charge) int64 {
	t.Helper()
	var ds [1]limiter.Decision
	if refused := l.Take(now, []limiter.Charge{c}, ds[:]); refused != -1 {
		t.Fatalf("%v: refused: %+v", c.Key, ds[0])
	}
	return ds[0].Remaining
}

func drawLimit(t *rapid.T) limiter.Limit {
	l := *rapid.SampledFrom(every[:4]).Draw(t, "algorithm")
	l.Rate.Count = rapid.Int64Range(1, 15).Draw(t, "count")
	if l.Algorithm == limiter.GCRA {
		l.Burst = rapid.Int64Range(1, 15).Draw(t, "burst")
	}
	return l
}

func TestFloor(t *testing.T) {
	minute := limiter.Rate{Count: 60, Per: time.Minute}
	begin := start - start%int64(time.Minute) // of a window
	at := begin + int64(20*time.Second)
	for _, c := range []struct {
		what  string
		limit limiter.Limit
		after map[time.Duration]int64 // the level, so long after the floor
	}{
		{"gcra", limiter.Limit{Rate: minute, Burst: 30}, map[time.Duration]int64{0: 0, 999 * time.Millisecond: 0, time.Second: 1, 29 * time.Second: 29, 31 * time.Second: 30, time.Hour: 30}},
		{"gcra of a minute", limiter.Limit{Rate: minute, Burst: 60}, map[time.Duration]int64{0: 0, 59 * time.Second: 59, time.Minute: 60}},
		{"gcra of more", limiter.Limit{Rate: minute, Burst: 61}, map[time.Duration]int64{0: 61}},
		{"fixed", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: minute}, map[time.Duration]int64{0: 0, 39 * time.Second: 0, 40 * time.Second: 60}},
		{"fixed, a day", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 5, Per: 24 * time.Hour}}, map[time.Duration]int64{0: 5}},
		{"sliding", limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: minute}, map[time.Duration]int64{0: 0, 40 * time.Second: 0, 50 * time.Second: 10, 100 * time.Second: 60}},
		{"log", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: minute}, map[time.Duration]int64{0: 0, 59 * time.Second: 0, time.Minute: 60}},
		{"log, an hour", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 5, Per: time.Hour}}, map[time.Duration]int64{0: 5}},
		{"slots", limiter.Limit{Algorithm: limiter.Semaphore, Burst: 3}, map[time.Duration]int64{0: 3}},
	} {
		l := newLocal(t, lease.Config{})
		l.SetFloor(at)
		for after, want := range c.after {
			now := at + int64(after)
			one := charge("a", c.what, fmt.Sprint(after), &c.limit, want)
			if got := level(l, now, one); got != want {
				t.Errorf("%s, after %v: %d, want %d", c.what, after, got, want)
			}
			if want > 0 {
				if left := take(t, l, now, one); left != 0 {
					t.Errorf("%s, after %v: %d left", c.what, after, left)
				}
				continue
			}
			one.Cost = 1
			var ds [1]limiter.Decision
			if refused := l.Take(now, []limiter.Charge{one}, ds[:]); refused != 0 || l.Len() > len(c.after) || level(l, now, one) != 0 {
				t.Errorf("%s, after %v: %d, %+v", c.what, after, refused, ds[0])
			}
			if ds[0].RetryAfter < 0 || level(l, now+int64(ds[0].RetryAfter), one) < 1 {
				t.Errorf("%s, after %v: %v is no true wait", c.what, after, ds[0].RetryAfter)
			}
		}
	}
}

// Refused requests fill no table under a floor, either.
func TestFloorLeavesNothingBehind(t *testing.T) {
	l := newLocal(t, lease.Config{MaxBuckets: 2})
	l.SetFloor(start)
	var ds [2]limiter.Decision
	for range 3 {
		cs := []limiter.Charge{charge("a", "x", "", slots, 1), charge("a", "y", "", gcra, 1)}
		if refused := l.Take(start, cs, ds[:]); refused != 1 || l.Len() != 0 {
			t.Fatalf("refused %d, %d buckets", refused, l.Len())
		}
		if refused := l.Take(start, append(cs, charge("a", "z", "", gcra, 1)), append(ds[:], limiter.Decision{})); refused != lease.TableFull || l.Len() != 0 {
			t.Fatalf("refused %d, %d buckets", refused, l.Len())
		}
	}
}

// A floor costs a decision no allocation; nor does a refused newcomer.
func TestFloorDoesNotAllocate(t *testing.T) {
	l := newLocal(t, lease.Config{})
	l.SetFloor(start)
	take(t, l, start+int64(time.Minute), charge("acme", "gcra", "", gcra, 3))
	known, newcomer := []limiter.Charge{charge("acme", "gcra", "", gcra, 1)}, []limiter.Charge{charge("acme", "new", "", gcra, 10)}
	var ds [1]limiter.Decision
	now := start + int64(time.Minute)
	if n := testing.AllocsPerRun(1000, func() {
		now += int64(time.Millisecond)
		l.Take(now, known, ds[:])
		l.Settle(now, known, []int64{0}, ds[:])
		l.Take(now, newcomer, ds[:])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Under a floor a bucket admits what one that was empty at that moment would, however often it
// is forgotten and made anew.
func TestFloorAdmitsNoMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, limit := newLocal(t, lease.Config{}), drawLimit(t)
		if limit.Algorithm == limiter.GCRA {
			limit.Burst = min(limit.Burst, limit.Rate.Count) // fills within the minute
		}
		l.SetFloor(start)
		window := func(now int64) int64 { return now / int64(time.Minute) }
		now, admitted, inWindow := start, int64(0), map[int64]int64{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.Int64Range(0, int64(8*time.Second)).Draw(t, "step")
			if rapid.Bool().Draw(t, "sweep") {
				l.Sweep(now, 100)
			}
			var ds [1]limiter.Decision
			c := charge("a", "l", "", &limit, rapid.Int64Range(1, 15).Draw(t, "cost"))
			if l.Take(now, []limiter.Charge{c}, ds[:]) == -1 {
				admitted += c.Cost
				inWindow[window(now)] += c.Cost
			}
			switch limit.Algorithm {
			case limiter.GCRA:
				if most := limit.Rate.Count * (now - start) / int64(time.Minute); admitted > most {
					t.Fatalf("%d admitted, of %d at most", admitted, most)
				}
			case limiter.SlidingLog:
				if now < start+int64(time.Minute) && admitted > 0 {
					t.Fatalf("%d admitted within the period", admitted)
				}
			default:
				if inWindow[window(start)] > 0 || inWindow[window(now)] > limit.Rate.Count {
					t.Fatalf("%v admitted by window", inWindow)
				}
			}
		}
	})
}
