package threshold

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// TestObservations: the newest are kept, what is no observation is not, and what was told comes back.
func TestObservations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var o Observations
		var want []observation
		for range rapid.IntRange(0, 100).Draw(t, "n") {
			s, c, same := rapid.Float64Range(-1.5, 1.5).Draw(t, "s"), Cell(rapid.Uint32Range(0, uint32(cells)+9).Draw(t, "cell")), rapid.Bool().Draw(t, "same")
			o.Add(s, c, same)
			if c < cells {
				want = append(want, observation{float32(min(max(s, 0), 1)), uint16(c), same})
			}
		}
		o.Add(math.NaN(), 0, true)
		want = want[max(0, len(want)-MaxObservations):]
		if o.Len() != len(want) || o.Bytes() < 8*len(want) || o.Bytes() > 16*MaxObservations+64 {
			t.Fatalf("%d of %d, in %d bytes", o.Len(), len(want), o.Bytes())
		}
		b, _ := o.AppendBinary(nil)
		var back Observations
		if err := back.UnmarshalBinary(b); err != nil {
			t.Fatal(err)
		}
		for i := range want {
			if o.all[i] != want[i] || back.all[i] != want[i] {
				t.Fatalf("%d: %+v and %+v, not %+v", i, o.all[i], back.all[i], want[i])
			}
		}
		if back.Fit() != o.Fit() {
			t.Fatalf("%+v became %+v", o.Fit(), back.Fit())
		}
		var both Observations
		both.Merge(&back)
		both.Merge(&back)
		if both.Len() != min(2*len(want), MaxObservations) {
			t.Fatalf("%d and %d are %d", len(want), len(want), both.Len())
		}
	})
}
