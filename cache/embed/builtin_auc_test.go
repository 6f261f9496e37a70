package embed_test

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"headgate/bench/semantic/corpus"
	"headgate/cache/embed"
	"headgate/cache/vec"
)

// TestAUC: of two pairs of questions, one with the same intent and one without, how often is the
// first more similar? Over all pairs of a sample of the test splits, beside the float32 model's
// figure for the same pairs (numpy).
func TestAUC(t *testing.T) {
	m, err := embed.Builtin()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		set   string
		every int
		float float64
	}{
		{corpus.Banking77, 5, .94705},
		{corpus.CLINC150, 9, .97448},
	} {
		all, err := corpus.Load(c.set, "test")
		if err != nil {
			t.Fatal(err)
		}
		var texts, intents []string
		for i := 0; i < len(all); i += c.every {
			texts, intents = append(texts, all[i].Text), append(intents, all[i].Intent)
		}
		vectors, err := m.Embed(t.Context(), texts)
		if err != nil {
			t.Fatal(err)
		}
		got := auc(vectors, intents)
		t.Logf("%s: AUC %.5f over %d texts, float32 %.5f", c.set, got, len(texts), c.float)
		if got < c.float-.005 {
			t.Errorf("%s: AUC %.5f, the float32 model has %.5f", c.set, got, c.float)
		}
		if math.Abs(got-c.float) > .01 {
			t.Errorf("%s: AUC %.5f is so far from %.5f that they are not of the same pairs", c.set, got, c.float)
		}
	}
}

// auc is the share of (same, other) couples of pairs in the right order, by ranks; ties are too
// rare among float32 to matter.
func auc(vectors [][]float32, intents []string) float64 {
	type pair struct {
		similarity float32
		same       bool
	}
	var pairs []pair
	for i := range vectors {
		for j := range i {
			pairs = append(pairs, pair{vec.Dot(vectors[i], vectors[j]), intents[i] == intents[j]})
		}
	}
	slices.SortFunc(pairs, func(a, b pair) int { return cmp.Compare(a.similarity, b.similarity) })
	var same, others, below float64
	for _, p := range pairs {
		if p.same {
			same++
			below += others
		} else {
			others++
		}
	}
	return below / (same * others)
}
