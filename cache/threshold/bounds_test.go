package threshold

import (
	"math"
	"testing"
)

// TestBounds holds both bounds against values of scipy.stats.beta.ppf.
func TestBounds(t *testing.T) {
	for _, c := range []struct {
		wrong, n     int64
		confidence   float64
		lower, upper float64
	}{
		{0, 0, 0.95, 0, 1},
		{0, 1, 0.95, 0, 0.95},
		{1, 1, 0.95, 0.05, 1},
		{0, 100, 0.99, 0, 0.045007413978564},
		{5, 100, 0.95, 0.0199055636621718, 0.102253377643274},
		{100, 100, 0.95, 0.97048695039296, 1},
		{37, 1200, 0.999, 0.0176147216056585, 0.0494600759757192},
		{1, 1000000, 0.95, 5.12932930720496e-08, 4.74385563821423e-06},
		{20000, 1000000, 0.99, 0.0196757044528393, 0.0203280871153273},
		{500000, 1000000, 0.95, 0.499177073949477, 0.500822926050523},
		{999999, 1000000, 0.95, 0.999995256144362, 0.999999948706707},
		{3, 1000000000, 0.95, 8.17691447647335e-10, 7.75365648149327e-09},
	} {
		lower, upper := LowerBound(c.wrong, c.n, c.confidence), UpperBound(c.wrong, c.n, c.confidence)
		if math.Abs(lower-c.lower) > 1e-9*max(c.lower, 1e-3) || math.Abs(upper-c.upper) > 1e-9*max(c.upper, 1e-3) {
			t.Errorf("%d of %d at %g: %.12g … %.12g, not %.12g … %.12g", c.wrong, c.n, c.confidence, lower, upper, c.lower, c.upper)
		}
	}
}
