package lease

import (
	"fmt"
	"testing"
	"time"

	"headgate/limiter"
)

// take is one request of one charge; the admitted ones are settled as they were reserved.
func takeOne(t *testing.T, m *Manager, subject string, l *limiter.Limit, cost int64) limiter.Decision {
	t.Helper()
	cs := []limiter.Charge{{Key: limiter.Key{Tenant: "t", Limit: "durable", Subject: subject}, Limit: l, Cost: cost}}
	ds := make([]limiter.Decision, 1)
	if m.Take(t.Context(), cs, ds) == -1 {
		m.Settle(cs, []int64{cost}, ds)
	}
	return ds[0]
}

// TestIdleBlocksGoBack: what an idle bucket of a durable limit has in hand goes back to where it was drawn
// from, and the bucket is forgotten; what was spent of it is not.
func TestIdleBlocksGoBack(t *testing.T) {
	now := Instant{1e9, 1_700_000_000e9}
	const most = 50
	m, err := NewAlone(func() Instant { return now }, most)
	if err != nil {
		t.Fatal(err)
	}
	pass := func(d time.Duration) {
		for step := 5 * time.Second; d > 0; d -= step {
			now.Now, now.Wall = now.Now+int64(step), now.Wall+int64(step)
			m.speak()
			m.Sweep(1000)
		}
	}
	l := limiter.Limit{Rate: limiter.Rate{Count: 100_000, Per: time.Hour}, Burst: 100_000}
	for i := range 4 * most {
		if d := takeOne(t, m, fmt.Sprint(i), &l, 1); !d.Admitted {
			t.Fatalf("user %d is refused, with %d buckets: %+v", i, m.Len(), d)
		}
		pass(25 * time.Second)
	}
	if n := m.Len(); n > 3 {
		t.Errorf("%d buckets are left", n)
	}

	spent := takeOne(t, m, "x", &l, 90_000)
	if !spent.Admitted {
		t.Fatalf("%+v", spent)
	}
	pass(time.Minute)
	if n := m.Len(); n > 0 {
		t.Errorf("%d buckets are left of an idle tenant", n)
	}
	refilled := int64(70 * 100_000 / 3600)
	if d := takeOne(t, m, "x", &l, 10_000+2*refilled); d.Admitted {
		t.Errorf("what was spent was forgotten: %+v", d)
	}
	if d := takeOne(t, m, "x", &l, 10_000); !d.Admitted {
		t.Errorf("more than what was spent is gone: %+v", d)
	}
}

// TestDurableLimitIsUsedUp: the last of a durable limit can be had, by small requests, too.
func TestDurableLimitIsUsedUp(t *testing.T) {
	for _, l := range []limiter.Limit{
		{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 100_000, Per: 24 * time.Hour}},
		{Rate: limiter.Rate{Count: 100_000, Per: 24 * time.Hour}, Burst: 100_000},
	} {
		now := Instant{1e9, 1_700_000_000e9}
		m, err := NewAlone(func() Instant { return now }, 100)
		if err != nil {
			t.Fatal(err)
		}
		n := int64(0)
		for takeOne(t, m, "", &l, 7).Admitted {
			n += 7
		}
		if n < 99_993 || n > 100_000 {
			t.Errorf("%v: %d of 100000 were admitted", l.Algorithm, n)
		}
	}
}
