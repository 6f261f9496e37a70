package lease

import (
	"testing"

	"headgate/limiter"
)

// TestLineForgetsWhatIsAnswered: also while the owner, here the one in this process, may not grant.
func TestLineForgetsWhatIsAnswered(t *testing.T) {
	now := Instant{1e9, 1_700_000_000e9}
	rights := &deedRights{lease: 1e9}
	m, err := NewManager(ManagerConfig{Self: Member{Name: "n1", Incarnation: 1}, Clock: func() Instant { return now }, Rights: rights, Wait: 1})
	if err != nil {
		t.Fatal(err)
	}
	m.Step(&View{Epoch: 1, Members: []Member{{Name: "n1", Incarnation: 1}}, Owners: []int32{0, 0}, Place: deedPlace})
	l := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: 1e9}, Burst: 100}
	take := func() {
		cs := []limiter.Charge{{Key: limiter.Key{Tenant: "a", Limit: "x"}, Limit: &l, Private: &l, Cost: 1}}
		ds := make([]limiter.Decision, 1)
		m.Take(t.Context(), cs, ds)
		m.Settle(cs, []int64{0}, ds)
	}
	take()
	rights.lease = 0
	for range 200 {
		now.Now += 50e6
		take()
	}
	if n := len(m.self.sent); n > 0 {
		t.Errorf("%d requests are remembered", n)
	}
}
