package guard

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// answers is a pair of answers of testdata.
type answers struct {
	a, b, set string
	same      bool
	kind      Kind
}

func answerPairs(t testing.TB) []answers {
	t.Helper()
	data, err := os.ReadFile("testdata/answers.txt")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(data), "\n%% ")
	var out []answers
	for part := range strings.SplitSeq(text, "\n%% ") {
		head, body, _ := strings.Cut(part, "\n")
		if head == "or" {
			out[len(out)-1].b = strings.TrimSpace(body)
			continue
		}
		f := append(strings.Fields(head), "")
		out = append(out, answers{a: strings.TrimSpace(body), set: f[1], same: f[0] == "same", kind: Kind(f[2])})
	}
	return out
}

// folded is an answer as the comparison of meanings gets it: in small letters, on one line.
func folded(s string) string { return strings.ToLower(strings.Join(strings.Fields(s), " ")) }

// TestContradicts bounds how many answers that say the same are taken for contradictions,
// and how many contradictions are missed, as they are given and folded.
func TestContradicts(t *testing.T) {
	type tally struct{ same, alarms, differ, missed int }
	for _, form := range []struct {
		name string
		of   func(string) string
	}{{"as given", func(s string) string { return s }}, {"folded", folded}} {
		sets := map[string]*tally{"all": {}}
		for _, p := range answerPairs(t) {
			if sets[p.set] == nil {
				sets[p.set] = &tally{}
			}
			kind, yes := ParseFacts(form.of(p.a)).Contradicts(ParseFacts(form.of(p.b)))
			if yes == p.same {
				t.Logf("%s, %s: %t (%s), want %q: %.90q / %.200q", form.name, p.set, yes, kind, p.kind, p.a, p.b)
			}
			for _, n := range []*tally{sets[p.set], sets["all"]} {
				switch {
				case p.same && yes:
					n.alarms++
				case !p.same && !yes:
					n.missed++
				}
				if p.same {
					n.same++
				} else {
					n.differ++
				}
			}
		}
		for set, n := range sets {
			t.Logf("%s, %s: %d of %d false alarms, %d of %d missed", form.name, set, n.alarms, n.same, n.missed, n.differ)
		}
		n := sets["all"]
		if n.same < 60 || n.differ < 60 {
			t.Errorf("%d pairs that say the same and %d that do not, want 60 of each", n.same, n.differ)
		}
		if n.alarms*20 > n.same || n.missed*20 > n.differ {
			t.Errorf("%s: %d of %d false alarms, %d of %d missed; want at most one in twenty", form.name, n.alarms, n.same, n.missed, n.differ)
		}
	}
}

// checkFacts holds what is true of any two answers.
func checkFacts(t *testing.T, a, b string) {
	f, g := ParseFacts(a), ParseFacts(b)
	kind, yes := f.Contradicts(g)
	if _, back := g.Contradicts(f); back != yes {
		t.Fatalf("%q / %q: %t one way, %t the other", a, b, yes, back)
	}
	if (kind != "") != yes || yes && !slices.Contains(Kinds(), kind) {
		t.Fatalf("%q / %q: %t of kind %q", a, b, yes, kind)
	}
	if k, self := f.Contradicts(ParseFacts(a)); self {
		t.Fatalf("%q contradicts itself: %s", a, k)
	}
	if len(f.figures) > maxFigures || len(f.blocks) > maxBlocks || len(f.text.tokens) > maxFactTokens+16 {
		t.Fatalf("%d figures, %d blocks, %d words", len(f.figures), len(f.blocks), len(f.text.tokens))
	}
}

func TestFactsOfAny(t *testing.T) {
	last := ""
	for _, p := range answerPairs(t) {
		checkFacts(t, p.a, p.b)
		checkFacts(t, p.a, last)
		last = p.b
	}
	for _, s := range []string{
		"", "```", "``````", "\xff\x00", "1.", "- ", "| | |", "no", strings.Repeat("5 km ", 64<<10), strings.Repeat("1,", 64<<10), strings.Repeat("a'", 64<<10),
		strings.Repeat("not 5 days. ", 64<<10/12), strings.Repeat("```\na\n```\n", 9<<10), strings.Repeat("天5", 32<<10), strings.Repeat("x. ", 64<<10),
	} {
		checkFacts(t, s, last)
		checkFacts(t, s, s+" 7 days")
	}
}

func FuzzFacts(f *testing.F) {
	for _, p := range answerPairs(f) {
		f.Add(p.a, p.b)
	}
	f.Fuzz(func(t *testing.T, a, b string) { checkFacts(t, a, b) })
}
