package queue

import (
	"fmt"
	"testing"
	"time"
)

// Five times what 4 nodes and 2 backends can do, of three classes and many tenants, for two minutes.
func TestOverload(t *testing.T) {
	for seed := range uint64(3) {
		w := newWorld(t, seed, 4, Config{}, Backend{ID: "a", Slots: 16, Limit: -1}, Backend{ID: "b", Slots: 16, Limit: -1})
		const mean = 400 * time.Millisecond // 80/s
		until := 120 * time.Second
		ask := func(class Class, prefix string, tenants int, patience time.Duration) func() {
			return func() {
				tenant := fmt.Sprint(prefix, int(w.rng.ExpFloat64()*float64(tenants)/4))
				takes := time.Duration(w.rng.ExpFloat64() * float64(mean))
				order := []string{"a", "b"}
				if w.rng.IntN(2) == 0 {
					order[0], order[1] = order[1], order[0]
				}
				r := w.ask(class, tenant, 1, 1000, takes, patience, order...)
				if w.rng.IntN(10) == 0 { // some do not wait for their answer
					w.after(w.rng.Int64N(int64(2*time.Second)), func() { w.leave(r) })
				}
			}
		}
		w.arrivals(200, until, ask(Interactive, "i", 40, 10*time.Second))
		w.arrivals(150, until, ask(Background, "b", 10, 60*time.Second))
		w.arrivals(50, until, ask(BestEffort, "e", 5, 60*time.Second))
		w.countFrom = int64(20 * time.Second)
		w.run(until)
		var capacity float64
		for _, n := range w.slots {
			capacity += float64(n) * float64(int64(until)-w.countFrom)
		}
		var all float64
		for _, c := range w.slotTime {
			all += c
		}
		if use := all / capacity; use < .97 {
			t.Errorf("seed %d: %.3f of the slots were used", seed, use)
		}
		if bg := w.share(Background); bg < .2 {
			t.Errorf("seed %d: background got %.3f", seed, bg)
		}
		if i := w.share(Interactive); i < .72 {
			t.Errorf("seed %d: interactive got %.3f", seed, i)
		}
		if e := w.share(BestEffort); e < .02 {
			t.Errorf("seed %d: best effort got %.3f", seed, e)
		}
		for c, most := range map[Class]time.Duration{Interactive: 2*time.Second + mean, Background: 4 * time.Second, BestEffort: 6 * time.Second} {
			if p := quantile(w.waits[c], .99); p > most {
				t.Errorf("seed %d: the p99 of waiting is %v for %v", seed, p, c)
			}
		}
		t.Logf("seed %d: use %.3f shares %.3f %.3f %.3f p99 %v %v %v peak %d drops %v", seed, all/capacity,
			w.share(Interactive), w.share(Background), w.share(BestEffort),
			quantile(w.waits[0], .99), quantile(w.waits[1], .99), quantile(w.waits[2], .99), w.peakWaiting, w.drops)
	}
}

// A tenant with 10,000 requests at once, and as many again whenever it is told to come back, costs others
// nothing to speak of.
func TestFlood(t *testing.T) {
	w := newWorld(t, 1, 3, Config{}, Backend{ID: "a", Slots: 16, Limit: -1})
	const mean = 200 * time.Millisecond // 80/s
	until := 60 * time.Second
	takes := func() time.Duration { return time.Duration((0.5 + w.rng.Float64()) * float64(mean)) }
	for i := range 8 {
		w.arrivals(3, until, func() { w.ask(Interactive, fmt.Sprint("t", i), 1, 1000, takes(), 10*time.Second, "a") })
	}
	w.run(10 * time.Second)
	var flood func()
	flood = func() {
		r := w.ask(Interactive, "flood", 1, 1000, takes(), 30*time.Second, "a")
		again := func(bool) {
			if w.now < int64(until) {
				w.after(int64(time.Second), flood)
			}
		}
		if w.waiting[r.id] == nil {
			again(false)
		} else {
			r.done = again
		}
	}
	for range 10_000 {
		flood()
	}
	w.countFrom = int64(12 * time.Second)
	w.run(until)
	for i := range 8 {
		y := w.served[fmt.Sprint("t", i)]
		t.Logf("t%d: %d p50 %v p99 %v", i, y.n, quantile(y.waits, .5), quantile(y.waits, .99))
		if y.n < 110 { // of 144 on average
			t.Errorf("t%d: %d requests were served", i, y.n)
		}
		if p := quantile(y.waits, .5); p > mean/4 {
			t.Errorf("t%d waits %v", i, p)
		}
		if p := quantile(y.waits, .99); p > 1500*time.Millisecond {
			t.Errorf("t%d waits %v at worst", i, p)
		}
	}
	y := w.served["flood"]
	if y.n < 2400 { // 80/s less 24/s for 48 s
		t.Errorf("%d of the flood were served", y.n)
	}
	if w.peakWaiting > 170 { // 80/s for 2 s, and what the measure of it may be off
		t.Errorf("%d waited", w.peakWaiting)
	}
	t.Logf("flood: %d p50 %v p99 %v; peak %d, drops %v", y.n, quantile(y.waits, .5), quantile(y.waits, .99), w.peakWaiting, w.drops)
}

// Who asks for little beside a flood that fills the whole queue whenever it is alone waits for the next slot, not for the flood.
func TestLittleBesideAFlood(t *testing.T) {
	for _, target := range []time.Duration{2 * time.Second, 8 * time.Second} {
		w := newWorld(t, 1, 3, Config{TargetWait: target}, Backend{ID: "a", Slots: 8, Limit: -1})
		const mean = 100 * time.Millisecond // 80/s
		until := 60 * time.Second
		takes := func() time.Duration { return time.Duration((0.5 + w.rng.Float64()) * float64(mean)) }
		w.arrivals(1, until, func() { w.ask(Interactive, "small", 1, 1000, takes(), time.Minute, "a") })
		w.arrivals(400, until, func() { w.ask(Interactive, "flood", 1, 1000, takes(), time.Minute, "a") })
		w.countFrom = int64(10 * time.Second)
		w.run(until)
		small, flood := w.served["small"], w.served["flood"]
		t.Logf("target %v: small %d p50 %v worst %v; flood %d p99 %v", target, small.n, quantile(small.waits, .5), quantile(small.waits, 1), flood.n, quantile(flood.waits, .99))
		if p := quantile(small.waits, 1); p > 3*mean {
			t.Errorf("target %v: who asks for little waits %v", target, p)
		}
		if p := quantile(flood.waits, .99); p > target+target/8 {
			t.Errorf("target %v: the flood waits %v", target, p)
		}
		if flood.n < 3500 { // 80/s for 50 s, less the other's
			t.Errorf("target %v: %d of the flood were served", target, flood.n)
		}
	}
}

// Tenants that ask for ever, one with ten times the tokens, get the same slot-time.
func TestTenantsByWork(t *testing.T) {
	for _, known := range []bool{true, false} {
		w := newWorld(t, 2, 2, Config{}, Backend{ID: "a", Slots: 8, Limit: -1})
		until := 200 * time.Second
		for i, k := range []int64{1, 1, 10, 3} {
			work := int64(1000)
			if known {
				work *= k
			}
			w.arrivals(40, until, func() {
				w.ask(Interactive, fmt.Sprint("t", i), 1, work, time.Duration(k*(50+w.rng.Int64N(100)))*time.Millisecond, 60*time.Second, "a")
			})
		}
		w.countFrom = int64(20 * time.Second)
		w.run(until)
		for i := range 4 {
			y := w.served[fmt.Sprint("t", i)]
			if part := y.slotTime / (8 * 180e9) * 4; part < .93 || part > 1.07 {
				t.Errorf("known %v: t%d got %.2f of its part", known, i, part)
			}
			if p := quantile(y.waits, .99); p > 2500*time.Millisecond {
				t.Errorf("known %v: t%d waits %v at worst", known, i, p)
			}
			t.Logf("known %v t%d: %d slot-time %.1f p50 %v p99 %v", known, i, y.n, y.slotTime/1e9, quantile(y.waits, .5), quantile(y.waits, .99))
		}
		t.Logf("drops %v", w.drops)
	}
}
