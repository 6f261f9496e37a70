package vec

import "testing"

func TestNorm(t *testing.T) {
	x := []float32{3, 0, 4}
	Norm(x)
	if x[0] != .6 || x[1] != 0 || x[2] != .8 {
		t.Errorf("Norm of 3, 0, 4 is %v, want .6, 0, .8", x)
	}
	zero := []float32{0, 0}
	if Norm(zero); zero[0] != 0 || zero[1] != 0 {
		t.Errorf("Norm of zero is %v", zero)
	}
}
