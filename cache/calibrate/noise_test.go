package calibrate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestTriangles(t *testing.T) {
	r := run(t, testConfig(), "p,q,1\nq,r,1\nr,p,0\n"+ // a contradiction
		"s,t,1\nt,u,1\nu,v,1\nv,s,0\n"+ // a longer one
		"k,l,1\nl,m,1\nk,m,1\n"+ // three that agree
		"g,h,0\nh,i,0\ng,i,1\n") // nothing to say
	n := r.Noise
	if n.Triangles != 4 || n.Contradicted != 1 || n.Chained != 2 || n.AtLeast != 1 || n.Measured {
		t.Errorf("%+v", n)
	}
	if len(n.Examples) != 1 || !slices.Equal(sorted(n.Examples[0].Lines), []int{2, 3, 4}) {
		t.Errorf("examples: %+v", n.Examples)
	}
}

func sorted(list []int) []int {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}

// A text with very many pairs is looked at in part, and what two contradictions have in common counts once.
func TestManyPairsOfOneText(t *testing.T) {
	var b strings.Builder
	for i := range 400 {
		fmt.Fprintf(&b, "hub,w%d,1\n", i)
	}
	b.WriteString("w0,w1,0\nw0,w2,0\nw398,w399,0\n")
	n := run(t, testConfig(), b.String()).Noise
	if n.Contradicted != 2 || n.AtLeast != 1 || n.Chained != 3 {
		t.Errorf("%+v", n)
	}
}

// Labels of which a known share is wrong: the share is found.
func TestShareOfWrongLabels(t *testing.T) {
	for _, wrong := range []float64{0, 0.05, 0.18} {
		rng := rand.New(rand.NewPCG(9, 9))
		flip := func(same bool) int { return one(same != (rng.Float64() < wrong)) }
		var twice, threes strings.Builder
		for i := range 1500 {
			for range 2 {
				fmt.Fprintf(&twice, "p%d,q%d,%d\n", i, i, flip(i%2 == 0))
			}
			fmt.Fprintf(&threes, "p%d,q%d,%d\nq%d,r%d,%d\np%d,r%d,%d\n", i, i, flip(true), i, i, flip(true), i, i, flip(true))
		}
		threes.WriteString("u,v,0\n")
		for name, records := range map[string]string{"twice": twice.String(), "threes": threes.String()} {
			n := run(t, testConfig(), records).Noise
			if !n.Measured || math.Abs(n.Wrong-wrong) > 0.02 || math.Abs(n.Ceiling-(1-n.Wrong)) > 1e-12 {
				t.Errorf("%s: %v of the labels, want %v", name, n.Wrong, wrong)
			}
			truth := float64(strings.Count(records, "\n")) * wrong
			if float64(n.AtLeast) > truth*1.1+1 {
				t.Errorf("%s: at least %d labels are wrong, and %.0f are", name, n.AtLeast, truth)
			}
		}
	}
}
