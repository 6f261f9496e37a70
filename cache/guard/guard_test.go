package guard

import (
	"encoding/csv"
	"os"
	"testing"
)

// row is a line of testdata: two questions, whether they want one answer, and its marks.
type row struct{ a, b, same, kind, set string }

func rows(t testing.TB, name string) []row {
	t.Helper()
	f, err := os.Open("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	out := make([]row, 0, len(all))
	for _, r := range all[1:] {
		out = append(out, row{r[0], r[1], r[2], r[3], r[4]})
	}
	return out
}

func TestLexicon(t *testing.T) {
	if _, err := readLexicon(); err != nil {
		t.Fatal(err)
	}
}

func TestReport(t *testing.T) {
	for _, name := range []string{"near_misses.csv", "paraphrases.csv"} {
		type tally struct{ refused, all int }
		sets := map[string]*tally{}
		kinds := map[string]int{}
		for _, r := range rows(t, name) {
			v := Parse(r.a).Compare(Parse(r.b))
			c := sets[r.set+r.same]
			if c == nil {
				c = &tally{}
				sets[r.set+r.same] = c
			}
			c.all++
			for _, x := range v.Refused {
				kinds[r.set+r.same+string(x.Kind)]++
			}
			if !v.Allowed() {
				c.refused++
			}
			if v.Allowed() != (r.same == "1") && (r.set == "dev" || r.set == "calib" || os.Getenv("SHOW") != "") {
				t.Logf("%s %s: %q / %q: %v", r.set, r.kind, r.a, r.b, v.Refused)
			}
		}
		if name == "paraphrases.csv" {
			t.Log(kinds)
		}
		for s, c := range sets {
			t.Logf("%s %s: refused %d of %d", name, s, c.refused, c.all)
		}
	}
}
