package lease

import (
	"testing"
	"time"

	"headgate/limiter"
)

func TestOver(t *testing.T) {
	l := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: time.Second}, Burst: 10}
	second := int64(time.Second)
	for _, c := range []struct {
		name string
		log  []spent
		want float64
	}{
		{"the burst, at once", []spent{{0, 4}, {0, 6}}, 0},
		{"one more", []spent{{0, 4}, {0, 7}}, 0.1},
		{"what refills in a second", []spent{{0, 10}, {second, 10}}, 0},
		{"half of it too early", []spent{{0, 10}, {second / 2, 10}}, 0.495},
		{"in another order", []spent{{second / 2, 10}, {0, 10}}, 0.495},
		{"after a window that is kept", []spent{{0, 1}, {5 * second, 10}, {5*second + 1, 1}}, 0.1},
	} {
		if got, _ := over(&l, c.log); got < c.want-1e-6 || got > c.want+1e-6 {
			t.Errorf("%s: over by %v bursts, want %v", c.name, got, c.want)
		}
	}
}

// TestBaselines holds the world and its measures against what is known of simple contenders.
func TestBaselines(t *testing.T) {
	c := Cell{
		Name: "100 requests/s", Mean: 1, Nodes: 4, Load: 2, Seed: 1,
		Limit: limiter.Limit{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100},
	}
	results := make(map[string]Result)
	for _, e := range Policies() {
		if e.Name != Headgate {
			results[e.Name] = measure(c, e)
		}
	}
	for name, r := range results {
		counts := name == "counted after 100ms" || name == "counted after 250ms" || name == "counted after 500ms"
		if counts != (r.Over > 0.01) {
			t.Errorf("%s admits over the limit by %v bursts", name, r.Over)
		}
		if r.Admitted < 0.9 || r.Admitted > 1.01 {
			t.Errorf("%s admits %v of what it could", name, r.Admitted)
		}
	}
	if r := results["each request asks"]; r.Trips != 1 || r.Local != 0 || r.Admitted < 0.999 {
		t.Errorf("each request asks: %+v", r)
	}
	if r := results["rate/N"]; r.Trips != 0 || r.Local != 1 {
		t.Errorf("rate/N: %+v", r)
	}
	if r := results["blocks of 5 requests"]; r.Trips < 0.1 || r.Trips > 1 {
		t.Errorf("blocks of 5 requests: %+v", r)
	}
}

// TestLeases holds the real owner and holders against the aims in a few small cells: requests and
// tokens, few holders and many, below the limit, at it and far above it.
func TestLeases(t *testing.T) {
	kept := map[string]bool{ // by name of the limit, burst in s, holders, zipf, load
		"100 requests/s, burst 1s, 4 nodes, even, load 0.9":    true,
		"100 requests/s, burst 1s, 16 nodes, zipf, load 1.1":   true,
		"100 requests/s, burst 10s, 64 nodes, even, load 10":   true,
		"1M tokens/min, burst 10s, 16 nodes, even, load 0.5":   true,
		"1M tokens/min, burst 10s, 4 nodes, zipf, load 2":      true,
		"20M tokens/min, burst 1s, 16 nodes, even, load 0.9":   true,
		"20M tokens/min, burst 1s, 64 nodes, even, load 1.1":   true,
		"10 requests/s, burst 1s, 16 nodes, even, load 0.9":    true,
		"1000 requests/s, burst 10s, 16 nodes, zipf, load 1.1": true,
	}
	e := Policies()[len(Policies())-1]
	for _, c := range Grid() {
		if !kept[c.String()] {
			continue
		}
		delete(kept, c.String())
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			r := measure(c, e)
			for _, m := range r.Missed() {
				t.Error(m)
			}
		})
	}
	for name := range kept {
		t.Errorf("there is no cell %q", name)
	}
}

// TestShortBursts: also a bucket that two keep-alives would overflow is not admitted over, and is of use.
func TestShortBursts(t *testing.T) {
	e := Policies()[len(Policies())-1]
	for _, burst := range []int64{50, 200} {
		r := measure(Cell{
			Name: "1000 requests/s", Mean: 1, Nodes: 4, Load: 2, Seed: 1,
			Limit: limiter.Limit{Rate: limiter.Rate{Count: 1000, Per: time.Second}, Burst: burst},
		}, e)
		if r.Over > 0 || r.Admitted < 0.9 {
			t.Errorf("burst %d: %+v", burst, r)
		}
	}
}

// TestInside: a holder in the owner's process, which asks by a call, has no more than its part of what
// is scarce.
func TestInside(t *testing.T) {
	for _, load := range []float64{0.9, 2, 10} {
		c := Cell{
			Name: "50 requests/s", Mean: 1, Nodes: 3, Load: load, Seed: 1,
			Limit: limiter.Limit{Rate: limiter.Rate{Count: 50, Per: time.Second}, Burst: 50},
		}
		var s *cores
		r := measure(c, Policy{Headgate, func(*Cell) contender {
			s = &cores{inside: true}
			return s
		}})
		var admitted, asked [3]float64
		all := 0.0
		for i, f := range s.w.fate {
			h := s.w.demand[i].Node
			asked[h]++
			if f.Admitted {
				admitted[h]++
				all++
			}
		}
		for h := range admitted {
			part := (admitted[h] / all) / (asked[h] / float64(len(s.w.fate)))
			if part < 0.7 || part > 1.3 {
				t.Errorf("load %v: holder %d has %.2f of its part", load, h, part)
			}
		}
		if r.Over > 0 || r.Admitted < 0.985 || load < 1 && r.Admitted < 0.999 {
			t.Errorf("load %v: over %v, admitted %v", load, r.Over, r.Admitted)
		}
	}
}
