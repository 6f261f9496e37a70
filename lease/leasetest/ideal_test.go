package leasetest

import (
	"math/big"
	"slices"
	"testing"
	"time"

	"headgate/limiter"

	"pgregory.net/rapid"
)

// The ideal bucket says of a log what the definition says, window by window: of no stretch of time is more
// admitted, less what came back in it, than burst + 1.01·rate·w.
func TestIdealIsEveryWindow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limiter.Limit{Rate: limiter.Rate{Count: rapid.Int64Range(1, 50).Draw(t, "count"), Per: time.Duration(rapid.Int64Range(1, 1000).Draw(t, "per"))}, Burst: rapid.Int64Range(1, 20).Draw(t, "burst")}
		type charge struct{ at, n int64 }
		var log []charge
		d := newIdeal(l)
		for range rapid.IntRange(1, 12).Draw(t, "charges") {
			c := charge{rapid.Int64Range(0, 200).Draw(t, "at"), rapid.Int64Range(0, 12).Draw(t, "n")}
			log = append(log, c)
			d.put(c.at, c.n, admitted)
		}
		slices.SortStableFunc(log, func(a, b charge) int { return int(a.at - b.at) })
		over := false
		for i := range log {
			sum := int64(0)
			for k := i; k < len(log); k++ {
				sum += log[k].n
				most := big.NewRat(101*l.Rate.Count*(log[k].at-log[i].at), 100*int64(l.Rate.Per))
				most.Add(most, big.NewRat(l.Burst, 1))
				over = over || big.NewRat(sum, 1).Cmp(most) > 0
			}
		}
		if over != (d.over != "") {
			t.Fatalf("%v under %+v: over %v, the ideal says %q", log, l, over, d.over)
		}
	})
}

// What could be spent conforms if and only if spending it would.
func TestIdealRoom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limiter.Limit{Rate: limiter.Rate{Count: 7, Per: 100}, Burst: 10}
		d, e := newIdeal(l), newIdeal(l)
		for at := int64(0); at < 300 && d.over == ""; at += rapid.Int64Range(1, 60).Draw(t, "gap") {
			n := rapid.Int64Range(-4, 6).Draw(t, "n")
			d.put(at, n, admitted)
			e.put(at, n, admitted)
		}
		if d.over != "" {
			return
		}
		n := rapid.Int64Range(1, 12).Draw(t, "spendable")
		excess := d.room(400, n, false)
		e.put(400, n, admitted)
		if (excess != nil) != (e.over != "") {
			t.Fatalf("%d more: room says %v, the bucket %q", n, excess, e.over)
		}
		if got := d.level(400); excess == nil && got < n || excess != nil && got >= n {
			t.Fatalf("level %d, and %d is too much: %v", got, n, excess != nil)
		}
	})
}

// A bucket that was empty at a takeover owes the burst that it is made with when somebody asks for it, even if that
// is a lower one that came later; what was owed beyond it nobody knows.
func TestIdealForgives(t *testing.T) {
	limit := func(burst int64) limiter.Limit {
		return limiter.Limit{Rate: limiter.Rate{Count: 1, Per: time.Second}, Burst: burst}
	}
	for _, tc := range []struct {
		name  string
		lower int64 // when the limit was 12 for a second; never: it was not
		level int64
	}{
		{"one limit", never, 77},
		{"lowered before", 500 * ms, 89},
		{"lowered after", 2500 * ms, 89},
		{"lowered and raised long before", -5000 * ms, 77},
	} {
		d := newIdeal(limit(50))
		put := func() {
			d.put(0, 26, admitted)
			d.put(2000*ms, 0, forgiven)
		}
		if tc.lower < 0 {
			d.revise(tc.lower, limit(12))
			d.revise(tc.lower+1000*ms, limit(100))
			put()
		} else {
			put()
			if tc.lower != never {
				d.revise(tc.lower, limit(12))
			}
			d.revise(max(tc.lower, 2000*ms)%never+1000*ms, limit(100))
		}
		if got := d.level(3600 * ms); got != tc.level || d.over != "" {
			t.Errorf("%s: level %d, want %d; %s", tc.name, got, tc.level, d.over)
		}
	}
}

// A digest sees what is unexported, and no order of maps.
func TestDigest(t *testing.T) {
	type inner struct{ m map[string]*int64 }
	mk := func(x int64, names ...string) *inner {
		in := &inner{m: map[string]*int64{}}
		for _, n := range names {
			in.m[n] = &x
		}
		return in
	}
	d := newCopier(nil, nil)
	a := hashOf(d, mk(1, "p", "q", "r"))
	for range 20 {
		if b := hashOf(d, mk(1, "r", "q", "p")); a != b {
			t.Fatal("the order counts")
		}
	}
	if a == hashOf(d, mk(2, "p", "q", "r")) || a == hashOf(d, mk(1, "p", "q", "s")) {
		t.Fatal("what is inside does not count")
	}
}
