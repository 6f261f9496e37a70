package upstream

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

const second = int64(time.Second)

func TestBreakerOpens(t *testing.T) {
	repeat := func(n int, v ...verdict) (out []verdict) {
		for range n {
			out = append(out, v...)
		}
		return out
	}
	for name, c := range map[string]struct {
		most  int
		what  []verdict
		gap   time.Duration
		opens int // at this one, from 1; 0: never
	}{
		"five in a row":            {what: repeat(9, failed), opens: 5},
		"good ones between":        {what: repeat(9, failed, failed, failed, failed, fine, fine, fine, fine, fine), gap: time.Second},
		"ten plain 500s":           {what: repeat(12, error500), opens: 10},
		"500s of one caller":       {what: repeat(50, error500, error500, error500, fine)},
		"clients that leave":       {what: repeat(50, nothing)},
		"leaving is no good sign":  {what: repeat(9, failed, nothing), opens: 9},
		"half of twenty":           {what: repeat(30, failed, fine), opens: 21},
		"half, but too slowly":     {what: repeat(30, failed, fine), gap: time.Second},
		"a third":                  {what: repeat(60, failed, fine, fine)},
		"as many as one likes":     {most: -1, what: repeat(99, failed)},
		"three, where three will":  {most: 3, what: repeat(9, failed), opens: 3},
		"more than half, at first": {what: append(repeat(4, failed), repeat(16, fine)...)},
	} {
		b, now, opened := breaker{most: c.most}, second, 0
		for i, v := range c.what {
			if opens, _ := b.end(now, b.begin(now), v); opens {
				opened = i + 1
				break
			}
			now += int64(c.gap)
		}
		if opened != c.opens {
			t.Errorf("%s: opened at %d, want %d", name, opened, c.opens)
		}
	}
}

// TestPausesGrowAndAreForgiven goes through the pauses of an endpoint that fails each
// trial, comes back, and fails again sooner or later.
func TestPausesGrowAndAreForgiven(t *testing.T) {
	v, now := vitals{}, second
	fails := func() time.Duration {
		for {
			opened, _ := v.end(now, v.begin(now), failed)
			if opened {
				return time.Duration(v.breaker.until - now)
			}
		}
	}
	over := func() {
		now = v.breaker.until
		if v.settle(now - 1); v.eligible(now - 1) {
			t.Fatal("takes requests before its pause is over")
		}
		if v.settle(now); !v.eligible(now) {
			t.Fatal("takes none after its pause")
		}
	}
	comesBack := func() {
		over()
		v.began(now, v.begin(now), -1)
	}
	for i, want := range []time.Duration{5, 10, 20, 40, 60, 60, 60} {
		if got := fails(); got != want*time.Second {
			t.Fatalf("pause %d is %v", i, got)
		}
		over()
	}
	v.began(now, v.begin(now), -1)
	if v.breaker.state != BreakerClosed || v.share(now) != rampFrom {
		t.Fatalf("a good answer left it %v with a share of %v", v.breaker.state, v.share(now))
	}
	now += second
	if got := fails(); got != 60*time.Second {
		t.Errorf("an endpoint that failed again at once was given a pause of %v", got)
	}
	comesBack()
	now += 3*int64(calm) + 1
	if got := fails(); got != 40*time.Second {
		t.Errorf("after three calm minutes: %v, want what three doublings fewer leave", got)
	}
	comesBack()
	now += 100 * int64(calm)
	if got := fails(); got != 5*time.Second {
		t.Errorf("after a long calm: %v", got)
	}
}

func TestOldNewsOpensNothing(t *testing.T) {
	v, now := vitals{}, second
	gens := make([]uint32, 50)
	for i := range gens {
		gens[i] = v.begin(now)
	}
	opened := 0
	for _, g := range gens { // all die with one crash
		if o, _ := v.end(now, g, failed); o {
			opened++
		}
	}
	if opened != 1 || v.rest.times != 1 {
		t.Errorf("one crash opened the breaker %d times, counted as %d", opened, v.rest.times)
	}
	old := gens[0]
	now = v.breaker.until
	v.settle(now)
	g := v.begin(now)
	if v.eligible(now) {
		t.Error("two at once on trial")
	}
	if v.end(now, old, fine); v.breaker.state != BreakerHalfOpen || v.eligible(now) {
		t.Error("an old request ended the trial")
	}
	if v.end(now, g, nothing); !v.eligible(now) {
		t.Error("a client that left on trial keeps others out")
	}
	g = v.begin(now)
	if now += int64(probePatience); !v.eligible(now) {
		t.Error("a trial that hangs keeps all out")
	}
	if g = v.began(now, g, -1); v.breaker.state != BreakerClosed {
		t.Error("a good answer did not close")
	}
	if o, _ := v.end(now, g, failed); o || v.breaker.row != rowFailure {
		t.Error("what was on trial and broke off later counts as one failure")
	}
}

// TestVitalsHold: whatever happens in whatever order, no pause is longer than a minute,
// a pause is kept, one request at a time is on trial, and what is left alone comes back.
func TestVitalsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v, now := vitals{}, second
		var gens []uint32
		trials := []int64{}
		keptUntil := func() int64 {
			u := max(v.ejectedUntil, v.pausedUntil)
			if v.breaker.state == BreakerOpen {
				u = max(u, v.breaker.until)
			}
			if v.state == Down {
				u = max(u, v.downUntil)
			}
			return u
		}
		t.Repeat(map[string]func(*rapid.T){
			"pass": func(t *rapid.T) {
				now += rapid.SampledFrom([]int64{1, second / 10, second, 7 * second, 61 * second, 600 * second}).Draw(t, "ns")
				v.settle(now)
			},
			"begin": func(t *rapid.T) {
				v.settle(now)
				if !v.eligible(now) || v.paused(now) {
					return
				}
				if v.breaker.state == BreakerHalfOpen {
					if n := len(trials); n > 0 && v.breaker.trial != 0 && now-trials[n-1] < int64(probePatience) {
						t.Fatal("two on trial")
					}
					trials = append(trials, now)
				}
				gens = append(gens, v.begin(now))
			},
			"end": func(t *rapid.T) {
				if len(gens) == 0 {
					return
				}
				i := rapid.IntRange(0, len(gens)-1).Draw(t, "which")
				if rapid.Bool().Draw(t, "begun") {
					gens[i] = v.began(now, gens[i], rapid.Int64Range(-1, 20*second).Draw(t, "wait"))
				}
				v.end(now, gens[i], rapid.SampledFrom([]verdict{nothing, fine, error500, failed}).Draw(t, "verdict"))
				gens = append(gens[:i], gens[i+1:]...)
			},
			"push":  func(t *rapid.T) { v.push(now, time.Duration(rapid.Int64Range(1, 1<<62).Draw(t, "wait"))) },
			"up":    func(*rapid.T) { v.up(now) },
			"down":  func(*rapid.T) { v.down(now) },
			"eject": func(*rapid.T) { v.eject(now) },
			"": func(t *rapid.T) {
				if u := keptUntil(); u > now+int64(maxPause) {
					t.Fatalf("left alone for %v", time.Duration(u-now))
				}
				if s := v.share(now); s < rampFrom || s > 1 {
					t.Fatalf("a share of %v", s)
				}
				well := v // a copy: whatever it went through, a good probe and a good answer bring it back within the longest pause
				at := max(keptUntil(), now) + int64(probePatience)
				well.settle(at)
				well.up(at)
				if !well.eligible(at) || well.paused(at) {
					t.Fatalf("it never comes back: %+v", well)
				}
				well.began(at, well.begin(at), 1)
				if well.breaker.state != BreakerClosed || well.share(at+int64(rampTime)) != 1 {
					t.Fatalf("it is not well after all: %+v", well)
				}
			},
		})
	})
}

func TestBudgetBoundsRetries(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b, now := budget{tokens: retryBurst, at: 0}, int64(0)
		requests, retries, asked := 0, 0, rapid.IntRange(0, 3).Draw(t, "asked")
		rate := rapid.IntRange(1, 2000).Draw(t, "rate")
		for range rapid.IntRange(1, 4000).Draw(t, "requests") {
			now += second / int64(rate)
			b.begin(now, retryBurst)
			requests++
			for range asked {
				if b.take(now, retryBurst) {
					b.begin(now, retryBurst)
					retries++
				}
			}
		}
		most := retryBurst + retryShare*float64(requests) + retryRate*time.Duration(now).Seconds() + 1
		if float64(retries) > most {
			t.Fatalf("%d retries of %d requests in %v, most %v", retries, requests, time.Duration(now), most)
		}
		if asked > 0 && float64(retries) < min(float64(requests)-5, most-5) {
			t.Fatalf("%d retries of %d requests in %v, less than the %v that there is room for", retries, requests, time.Duration(now), most)
		}
	})
}

func TestOneCrashCountsOnce(t *testing.T) {
	v, now := vitals{state: Up}, second
	gens := []uint32{v.begin(now), v.begin(now), v.begin(now), v.begin(now), v.begin(now)}
	v.down(now) // by its dials or probes
	for _, g := range gens {
		v.end(now, g, failed)
	}
	if v.breaker.state != BreakerOpen || v.rest.times != 1 || v.breaker.until != now+int64(breakerPause) || v.downUntil != now {
		t.Errorf("%+v", v)
	}
}

func TestWhatIsOverIsForgotten(t *testing.T) {
	v, now := vitals{state: Up}, second
	for range maxSamples {
		v.began(now, v.begin(now), 9*second)
	}
	v.weight = leastWeight
	for range dfltFailures {
		v.end(now, v.begin(now), failed)
	}
	now = v.breaker.until
	v.settle(now)
	v.began(now, v.begin(now), second)
	if w, known := v.firstByte(now); known || v.typical() != second || v.latencyWeight() != 1 {
		t.Errorf("after it came back: %v %v, typical %v, weight %v", w, known, v.typical(), v.latencyWeight())
	}
}
