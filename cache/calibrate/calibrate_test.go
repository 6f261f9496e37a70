package calibrate

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"headgate/cache/embed"
	"headgate/cache/embed/embedtest"
	"headgate/cache/guard"
)

var update = flag.Bool("update", false, "write testdata anew")

// testGuards refuses pairs of which only one has a word of those, and all with a number that the other lacks.
func testGuards(a, b string) (refused []guard.Reason) {
	x, y := embedtest.Split(a), embedtest.Split(b)
	for _, w := range []string{"not", "off", "monthly"} {
		if slices.Contains(x, w) != slices.Contains(y, w) {
			r := guard.Reason{Kind: guard.KindAntonym, A: w}
			if w == "not" {
				r.Kind = guard.KindNegation
			}
			if slices.Contains(y, w) {
				r.A, r.B = r.B, r.A
			}
			refused = append(refused, r)
		}
	}
	return refused
}

func testConfig() Config {
	return Config{Embedder: &embedtest.Words{}, Source: "pairs.csv", Budget: 0.05, Confidence: 0.95, refuse: testGuards}
}

// run a calibration of records below a header.
func run(t *testing.T, c Config, records string) *Report {
	t.Helper()
	r, err := Run(t.Context(), strings.NewReader("a,b,same_answer\n"+records), c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// testPairs are made of words by chance: those with one answer have more in common than the others, and some that need
// two have all but a word that guards know.
func testPairs(n int, seed uint64) string {
	rng := rand.New(rand.NewPCG(seed, 1))
	words := func(k int) (out []string) {
		for range k {
			out = append(out, fmt.Sprintf("w%d", rng.IntN(4000)))
		}
		return out
	}
	var b strings.Builder
	for i := range n {
		shared, a, c, same := words(8), words(rng.IntN(2)), words(rng.IntN(3)), 1
		switch {
		case i%7 == 0: // a near-miss
			a, c, same = []string{"not"}, nil, 0
		case i%2 == 0:
			k := rng.IntN(7)
			a, c, shared, same = words(8-k), words(8-k), shared[:k], 0
		}
		fmt.Fprintf(&b, "%s,%s,%d\n", strings.Join(append(slices.Clone(shared), a...), " "), strings.Join(append(slices.Clone(shared), c...), " "), same)
	}
	return b.String()
}

// The worked example of the issue: the first pair hits at .85, the second never does with guards.
func TestWorkedExample(t *testing.T) {
	r := run(t, testConfig(), "How can I reset my password,How do I reset my password,1\n"+
		"What is the refund window for annual plans?,What is the refund window for monthly plans?,0\n")
	if got := r.Worst.Missed[0].Similarity; math.Abs(got-0.866) > 0.0005 {
		t.Errorf("the first pair has %v, not .866", got)
	}
	stopped := r.Worst.Stopped
	if len(stopped) != 1 || math.Abs(stopped[0].Similarity-0.833) > 0.0005 || stopped[0].Refused[0] != (Reason{"antonym", "", "monthly"}) {
		t.Errorf("the second pair is %+v, not stopped at .833", stopped)
	}
	if r.Recommendation.Outcome != None {
		t.Errorf("two pairs are enough for %+v", r.Recommendation)
	}
}

func TestGolden(t *testing.T) {
	extra := "same text,same text,1\nodd text,odd text,0\nw1 w2,,1\n<script>alert(1)</script> w1,\"<b>w2</b>, \"\"w1\"\"\",0\nw7 w8,w7 w9,maybe\n" +
		"both ways w3,w3 ways both too,1\nw3 ways both too,both ways w3,0\n"
	r := run(t, testConfig(), testPairs(1200, 7)+extra)
	if r.Recommendation.Outcome != Confirmed {
		t.Errorf("the outcome is %s: the page of the golden file should show a threshold", r.Recommendation.Outcome)
	}
	var page, overlap, text bytes.Buffer
	if err := errors.Join(r.WritePage(&page), r.WriteOverlap(&overlap), r.WriteText(&text)); err != nil {
		t.Fatal(err)
	}
	asJSON, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "page.html", page.Bytes())
	golden(t, "overlap.svg", overlap.Bytes())
	golden(t, "report.txt", text.Bytes())
	digits := regexp.MustCompile(`(\.\d{6})\d+`) // processors differ in the last ones
	golden(t, "report.json", append(digits.ReplaceAll(asJSON, []byte("$1")), '\n'))

	wellFormed(t, page.String(), false)
	wellFormed(t, overlap.String(), true)
	for _, bad := range []string{"<script", "<b>w2", "src=", "@import", "url(", "NaN", "Inf", "ZgotmplZ"} {
		if strings.Contains(page.String(), bad) {
			t.Errorf("the page has %q", bad)
		}
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(got, want) {
		return
	}
	g, w := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i := range g {
		if i >= len(w) || g[i] != w[i] {
			t.Fatalf("%s, line %d: got %.200q; see go test -update", name, i+1, g[i])
		}
	}
	t.Fatalf("%s: the end is missing", name)
}

// wellFormed holds that elements are closed as they were opened.
func wellFormed(t *testing.T, doc string, strict bool) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(doc))
	if !strict {
		d.Strict, d.AutoClose, d.Entity = false, xml.HTMLAutoClose, xml.HTMLEntity
	}
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The order of the calls by which texts are embedded, and how many at a time, must not show.
func TestSameReportTwice(t *testing.T) {
	records := testPairs(3000, 3)
	var first []byte
	for i := range 3 {
		raw, err := json.Marshal(run(t, testConfig(), records))
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = raw
		} else if !bytes.Equal(raw, first) {
			t.Fatal("another report of the same pairs")
		}
	}
}

// What comes twice counts once, in either order; both labels count as different.
func TestRepeats(t *testing.T) {
	r := run(t, testConfig(), "x y,x z,1\nx z,x y,1\nx y,x z,true\np q,p r,yes\np r,p q,no\np q,p r,1\nk l,k m,0\n")
	if r.Pairs.Used != 3 || r.Pairs.Same != 1 || r.Pairs.Different != 2 || r.Pairs.Repeats != 4 || r.Pairs.Read != 7 {
		t.Errorf("pairs: %+v", r.Pairs)
	}
	if n := r.Noise; n.Repeated != 2 || n.BothWays != 1 || n.AtLeast != 1 || len(n.Examples) != 1 || !slices.Equal(n.Examples[0].Lines, []int{5, 6}) {
		t.Errorf("noise: %+v", n)
	}
	if len(r.Worst.Missed) != 1 || len(r.Worst.Served) != 2 || r.Worst.Served[0].Line != 5 {
		t.Errorf("examples: missed %+v, served %+v", r.Worst.Missed, r.Worst.Served)
	}
}

func TestTooLittle(t *testing.T) {
	for _, c := range []struct{ records, want string }{
		{"", "the file has a header and no pairs"},
		{"x,x,1\ny,y,1\n", "each of the 2 pairs is twice the same text"},
		{"x,,1\n", "no pair is left of 1; left out, as they cannot be used: 1 record; line 2: b is empty"},
		{"x,y,1\nx,z,no idea\n", "none of 1 pair is labelled different: add pairs that look alike and need different answers (same_answer 0), or no threshold can be found wrong; left out, as they cannot be used: 1 record; line 3: "},
		{"x,y,0\n,z,1\nq,,1\n,z,1\n,z,1\n,z,1\n,z,1\n,z,1\n", "left out, as they cannot be used: 7 records; line 3: a is empty; line 4: b is empty; line 5: a is empty; line 6: a is empty; line 7: a is empty; and 2 more"},
		{"x,y,1\n", "none of 1 pair is labelled different: add pairs that look alike"},
		{"x,y,0\nx,z,0\n", "none of 2 pairs is labelled the same: add pairs that have one answer"},
	} {
		_, err := Run(t.Context(), strings.NewReader("a,b,same_answer\n"+c.records), testConfig())
		var wrong *FileError
		if !errors.As(err, &wrong) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.records, err, c.want)
		}
	}
}

func TestConfigValidate(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"embedder":   func(c *Config) { c.Embedder = nil },
		"budget":     func(c *Config) { c.Budget = math.NaN() },
		"budget is":  func(c *Config) { c.Budget = 2 },
		"confidence": func(c *Config) { c.Confidence = 1 },
	} {
		c := testConfig()
		change(&c)
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if _, err := Run(t.Context(), strings.NewReader("a,b,same_answer\nx,y,1\n"), c); err == nil {
			t.Errorf("%s: it runs", want)
		}
	}
}

// window is an embedder with one, of so many bytes.
type window struct {
	embedtest.Words
	limit int
	fail  error
}

func (w *window) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	for i, text := range texts {
		if len(text) > w.limit {
			return nil, fmt.Errorf("model: %w", &embed.TooLongError{Index: i, Tokens: len(text), Limit: w.limit})
		}
		if w.fail != nil && strings.HasPrefix(text, "fail") {
			return nil, w.fail
		}
	}
	return w.Words.Embed(ctx, texts)
}

func TestTooLongForTheEmbedder(t *testing.T) {
	c := testConfig()
	c.Embedder = &window{limit: 10}
	r := run(t, c, "x y,x z,1\nx y,this is much too long,1\nthis is much too long,as is this one,0\nk l,k m,0\n")
	if r.Pairs.Used != 2 || r.Pairs.LeftOut != 2 || r.Pairs.Read != 4 {
		t.Errorf("pairs: %+v", r.Pairs)
	}
	want := []Problem{{3, 0, "b is too long for the embedder: 21 tokens of at most 10"}, {4, 0, "a is too long for the embedder: 21 tokens of at most 10"}}
	if !slices.Equal(r.Pairs.Problems, want) {
		t.Errorf("problems: %+v", r.Pairs.Problems)
	}
}

// A server that refuses one text is asked about the others; one that refuses all is the wrong one.
func TestRefusedByTheEmbedder(t *testing.T) {
	c := testConfig()
	refused := &embed.Error{Kind: embed.Refused, Reason: "status 400"}
	c.Embedder = &window{limit: 100, fail: refused}
	r := run(t, c, "x y,x z,1\nx y,fail this,1\nk l,k m,0\n")
	if want := []Problem{{3, 0, "b was refused by the embedder: embedding refused: status 400"}}; r.Pairs.Used != 2 || !slices.Equal(r.Pairs.Problems, want) {
		t.Errorf("pairs: %+v", r.Pairs)
	}
	_, err := Run(t.Context(), strings.NewReader("a,b,same_answer\nfail a,fail b,1\nfail a,fail c,0\n"), c)
	if !errors.Is(err, refused) {
		t.Errorf("%v, want %v", err, refused)
	}
}

func TestEmbedderFails(t *testing.T) {
	c := testConfig()
	down := &embed.Error{Kind: embed.Unavailable, Reason: "nobody listens"}
	c.Embedder = &window{limit: 100, fail: down}
	_, err := Run(t.Context(), strings.NewReader("a,b,same_answer\n"+testPairs(3000, 1)+"fail a,b,1\n"), c)
	if !errors.Is(err, down) {
		t.Errorf("%v, want %v", err, down)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, strings.NewReader("a,b,same_answer\nx,y,1\n"), testConfig()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that it was canceled", err)
	}
}

// Each text of a batch is embedded once, however many pairs have it.
func TestTextsAreEmbeddedOnce(t *testing.T) {
	c := testConfig()
	words := &embedtest.Words{}
	c.Embedder = words
	var b strings.Builder
	for i := range 500 {
		fmt.Fprintf(&b, "hub text,text %d,%d\n", i%250, i%2)
	}
	run(t, c, b.String())
	if _, texts := words.Calls(); texts != 251 {
		t.Errorf("%d texts were embedded, not 251", texts)
	}
}

func TestKinds(t *testing.T) {
	all := guard.Kinds()
	set := kindsOf([]guard.Reason{{Kind: all[3]}, {Kind: all[0]}, {Kind: "new"}, {Kind: all[3]}})
	if got, want := kindNames(set), []string{string(all[0]), string(all[3]), "other"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if len(all) > otherKind {
		t.Errorf("there are %d kinds of refusals: a pair has room for %d", len(all), otherKind)
	}
}

func TestWarnings(t *testing.T) {
	far := run(t, testConfig(), "x y,x z,1\nx y,u v,0\n")
	if len(far.Warnings) != 1 || !strings.HasPrefix(far.Warnings[0], "Half of the pairs with different answers are less alike than 0.00") {
		t.Errorf("far apart: %q", far.Warnings)
	}
	var noisy strings.Builder
	for i := range 40 {
		fmt.Fprintf(&noisy, "x p%d,x q%d,1\nx p%d,x q%d,%d\n", i, i, i, i, i%2)
	}
	if w := run(t, testConfig(), noisy.String()).Warnings; len(w) != 1 || !strings.HasPrefix(w[0], "About 50 % of the labels are wrong") {
		t.Errorf("noisy: %q", w)
	}
	var few strings.Builder
	for i := range 9 {
		for j := range i {
			fmt.Fprintf(&few, "x t%d,x t%d,%d\n", i, j, (i+j)%2)
		}
	}
	if w := run(t, testConfig(), few.String()).Warnings; len(w) == 0 || !strings.HasPrefix(w[len(w)-1], "The 36 pairs are of only 9 texts") {
		t.Errorf("few texts: %q", w)
	}
}

func TestNamesInThePolicy(t *testing.T) {
	for name, want := range map[string]string{"": "builtin", "e5-small": "e5-small", "BAAI/bge": "BAAI/bge", "a: b": `"a: b"`, "-x": `"-x"`, "1.5 # no": `"1.5 # no"`} {
		c := testConfig()
		c.Name = name
		if r := run(t, c, "x y,x z,1\nx y,u v,0\n"); !strings.HasSuffix(r.Policy, "      embedder: "+want+"\n") {
			t.Errorf("%q: %s", name, r.Policy)
		}
	}
}
