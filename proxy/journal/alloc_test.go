//go:build !race

package journal

import "testing"

// TestAppendAllocates nothing, in the long run.
func TestAppendAllocates(t *testing.T) {
	l := mustOpen(t, testConfig(newDisk(), 1))
	defer abandon(l)
	l.file = blackHole{}
	r, u := benchReservation(), benchUsage()
	got := testing.AllocsPerRun(2000, func() {
		if err := l.Reserve(r); err != nil {
			t.Fatal(err)
		}
		u.ID = r.ID
		if err := l.Settle(u); err != nil {
			t.Fatal(err)
		}
	})
	if got > 1 { // pools are emptied now and then
		t.Errorf("%v allocations", got)
	}
}

// blackHole takes everything.
type blackHole struct{ *handle }

func (blackHole) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
