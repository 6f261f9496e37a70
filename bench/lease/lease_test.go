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
		if got := over(&l, c.log); got < c.want-1e-6 || got > c.want+1e-6 {
			t.Errorf("%s: over by %v bursts, want %v", c.name, got, c.want)
		}
	}
}

// TestBaselines holds the world and its measures against what is known of simple contenders.
func TestBaselines(t *testing.T) {
	c := Cell{
		Name: "100 requests/s", Mean: 1, Holders: 4, Load: 2, Seed: 1,
		Limit: limiter.Limit{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100},
	}
	results := make(map[string]Result)
	for _, e := range contenders() {
		if e.name != headgate {
			results[e.name] = measure(c, e)
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
