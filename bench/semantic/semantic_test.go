package semantic

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"headgate/bench/semantic/corpus"
	"headgate/bench/semantic/replay"
	"headgate/cache/embed"
	"headgate/cache/threshold"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestOursDominatesStatic embeds some hundred questions of each set with the built-in model and replays them: ours
// answers more of them than any fixed threshold with the same share of wrong hits, guards on and off, and none of its bounds is surely exceeded.
// The seeds are 0 and 1.
func TestOursDominatesStatic(t *testing.T) {
	c := Config{Questions: 900, Seeds: 2, Sample: 900, Log: io.Discard}
	e, err := embed.Builtin()
	if err != nil {
		t.Fatal(err)
	}
	two := slices.DeleteFunc(contenders(), func(k contender) bool { return k.name != static && k.name != ours })
	for _, s := range sets()[:2] {
		m, err := s.measure(t.Context(), &c, e)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.replays(t.Context(), &c, two); err != nil {
			t.Fatal(err)
		}
		for _, guarded := range []bool{false, true} {
			fixed, learned := m.find(static, guarded), m.find(ours, guarded)
			for _, target := range []float64{0.02, 0.05, 0.10} {
				f, l := fixed.reached(target, every), learned.reached(target, every)
				t.Logf("%s, %s, at most %.2f wrong a hit: static %.3f, ours %.3f", m.name, word(guarded), target, f, l)
				if l <= f {
					t.Errorf("%s, %s: ours does not dominate at %.2f", m.name, word(guarded), target)
				}
			}
			for i, bound := range learned.values {
				var sum replay.Result
				for _, r := range learned.points[i] {
					sum.Add(&r)
				}
				if threshold.LowerBound(int64(sum.Wrong), int64(sum.Served), 0.95) > bound { // nine hundred questions tell no more
					t.Errorf("%s, %s: %d of %d hits are wrong, surely above the bound of %g", m.name, word(guarded), sum.Wrong, sum.Served, bound)
				}
			}
		}
	}
}

// TestUniformAnswers: twelve hundred questions that all get one answer, or one of three in turn, teach the surface next to
// nothing. When real answers follow, hits are no more wrong than the bound allows, though all that is cached is the others; after
// the one they come back where the bound is not strict. The seeds are 0 and 1.
func TestUniformAnswers(t *testing.T) {
	const uniform, questions = 1200, 3000
	c := Config{Sample: questions}
	e, err := embed.Builtin()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sets()[:2] {
		m, err := s.measure(t.Context(), &c, e)
		if err != nil {
			t.Fatal(err)
		}
		streams := []*replay.Stream{replay.NewStream(m.prompts, m.vectors, questions, 0).Guarded(), replay.NewStream(m.prompts, m.vectors, questions, 1).Guarded()}
		for _, bound := range []float64{0.02, 0.05, 0.1} {
			for _, several := range []int{1, 3} {
				o := replay.Options{Policy: threshold.Policy{Mode: threshold.Learned, HitErrorBound: bound, ErrorBound: 1, Audit: auditShare}}
				var before, sum replay.Result
				for _, stream := range streams {
					stream = stream.Uniform(uniform, several)
					first, all := stream.First(uniform).Run(o), stream.Run(o)
					before.Add(&first)
					sum.Add(&all)
				}
				t.Logf("%s, bound %g, after %d uniform answers: %d hits, %d of them wrong", m.name, bound, several, sum.Served, sum.Wrong)
				if before.Served > 0 {
					t.Errorf("%d are served before", before.Served)
				}
				if threshold.LowerBound(int64(sum.Wrong), int64(sum.Served), 0.95) > bound {
					t.Error("that is surely above the bound")
				}
				if several == 1 && bound >= 0.05 && sum.LateServed < 50 {
					t.Error("hits do not come back")
				}
			}
		}
	}
}

// TestRun takes every measurement, shortly, and writes all that there is to write.
func TestRun(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "results")
	rep, err := Run(t.Context(), Config{Questions: 150, Seeds: 1, Sample: 160})
	if err != nil {
		t.Fatal(err)
	}
	if err := rep.Write(dir); err != nil {
		t.Fatal(err)
	}
	for name, words := range map[string][]string{
		"semantic.txt": {"clinc150 with strangers", "AUC", "all-MiniLM-L6-v2", "vCache", "guards", "aims"},
		"semantic.csv": {"set,guards,policy", `banking77,true,"ours",0.02,1,150,`},
		"semantic.svg": {"wrong answers a hit", "wrong answers a request", "polyline"},
	} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range words {
			if !strings.Contains(string(b), w) {
				t.Errorf("%s does not speak of %q", name, w)
			}
		}
		if name == "semantic.svg" {
			d := xml.NewDecoder(strings.NewReader(string(b)))
			for err == nil {
				_, err = d.Token()
			}
			if !errors.Is(err, io.EOF) {
				t.Error(err)
			}
		}
	}
}

// TestAUC holds it by hand: of two pairs of one intent and four of two, one of the first is below one of the others.
func TestAUC(t *testing.T) {
	prompts := []corpus.Prompt{{Intent: "a"}, {Intent: "a"}, {Intent: "b"}, {Intent: "b"}}
	at := func(degrees float64) []float32 {
		return []float32{float32(math.Cos(degrees * math.Pi / 180)), float32(math.Sin(degrees * math.Pi / 180))}
	}
	// a at 0° and 10°, b at 25° and 60°: of the same 10°, 35°; of others 25°, 60°, 15°, 50°.
	got, pairs := auc(prompts, [][]float32{at(0), at(10), at(25), at(60)})
	if want := (4 + 2) / 8.0; pairs != 6 || math.Abs(got-want) > 1e-9 {
		t.Errorf("%g of %d pairs, not %g", got, pairs, want)
	}
}

// TestReached: at a point, between two, and nowhere.
func TestReached(t *testing.T) {
	k := curve{contender: contender{values: []float64{1, 2, 3}}}
	for _, p := range [][2]int{{80, 16}, {50, 5}, {20, 1}} { // served of 100, wrong
		k.points = append(k.points, []replay.Result{{Requests: 100, Served: p[0], Wrong: p[1]}})
	}
	for _, c := range []struct{ most, want float64 }{{0.2, 0.8}, {0.15, 0.65}, {0.1, 0.5}, {0.05, 0.2}, {0.04, 0}} {
		if got := k.reached(c.most, every); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("at most %g: %g, not %g", c.most, got, c.want)
		}
	}
}

// TestReplayIsDeterministic: the same options make the same result, and wrong answers are counted as such.
func TestReplayIsDeterministic(t *testing.T) {
	prompts := []corpus.Prompt{{Text: "turn it on", Intent: "on"}, {Text: "turn it off", Intent: "off"}, {Text: "please turn it on", Intent: "on"}}
	vectors := [][]float32{{1, 0}, {0.8, 0.6}, {0.6, 0.8}}
	s := replay.NewStream(prompts, vectors, 10, 1)
	o := replay.Options{Policy: threshold.Policy{Mode: threshold.Static, Threshold: 0.5, HitErrorBound: 1, ErrorBound: 1}}
	r := s.Run(o)
	if again := s.Run(o); again != r {
		t.Errorf("%+v, then %+v", r, again)
	}
	if r.Requests != 3 || r.Served != 2 || r.Wrong == 0 || r.Entries != 1 {
		t.Errorf("without guards: %+v", r)
	}
	if g := s.Guarded().Run(o); g.Wrong != 0 {
		t.Errorf("with guards: %+v", g)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for _, c := range []Config{{Questions: 3}, {Seeds: -1}, {Sample: -1}, {URL: "nowhere"}} {
		if _, err := Run(t.Context(), c); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}
