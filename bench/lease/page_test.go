package lease

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/html"

	"headgate/limiter"
)

// small is a run of a few short cells.
func small(t *testing.T, change func(*Config)) *Report {
	t.Helper()
	cfg := Config{Cells: []Cell{shortCell(0.9), shortCell(2)}, Command: "headgate bench lease"}
	if change != nil {
		change(&cfg)
	}
	r, err := Run(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func shortCell(load float64) Cell {
	return Cell{
		Name: "100 requests/s", Mean: 1, Nodes: 4, Load: load, For: 10 * time.Second,
		Limit: limiter.Limit{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 100},
	}
}

// TestPage: the page is whole, refers to nothing outside of itself, and its figures are those of the CSV.
func TestPage(t *testing.T) {
	dir := t.TempDir()
	r := small(t, nil)
	r.Notes = []string{`a <trace> & "its" source`}
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "lease.html"))
	if err != nil {
		t.Fatal(err)
	}
	seen, svgs := map[string]int{}, 0
	var walk func(*html.Node)
	walk = func(n *html.Node) {
		if n.Type == html.ElementNode {
			seen[n.Data]++
			if n.Data == "svg" {
				svgs++
			}
			for _, a := range n.Attr {
				if a.Key == "src" || a.Key == "href" || strings.Contains(a.Val, "//") {
					t.Errorf("<%s %s=%q> refers to something else", n.Data, a.Key, a.Val)
				}
			}
		}
		for c := n.FirstChild; c != nil; c = c.NextSibling {
			walk(c)
		}
	}
	root, err := html.Parse(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	walk(root)
	if svgs != 2 || seen["script"] != 0 || seen["link"] != 0 || seen["table"] < 2 || bytes.Contains(text, []byte("url(")) || bytes.Contains(text, []byte("NaN")) {
		t.Errorf("%d pictures, %v", svgs, seen)
	}
	if !bytes.Contains(text, []byte("a &lt;trace&gt; &amp;")) {
		t.Error("notes are not escaped, or not there")
	}
	for _, row := range r.policies() {
		if !regexp.MustCompile(`<td>` + regexp.QuoteMeta(row.Name) + `</td><td>` + regexp.QuoteMeta(strings.ReplaceAll(row.Over, "<", "&lt;"))).Match(text) {
			t.Errorf("the table has not %+v", row)
		}
	}
	for _, name := range []string{"lease.csv", "lease.txt", "lease.svg", "lease.json"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSeedsReproduce to the bit, whatever the number of processors, and another seed does not.
func TestSeedsReproduce(t *testing.T) {
	digest := func(r *Report) string {
		b, err := json.Marshal(r.Results)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	first := digest(small(t, nil))
	if again := digest(small(t, nil)); again != first {
		t.Error("the same seed gives something else")
	}
	if other := digest(small(t, func(c *Config) { c.Seed = 2 })); other == first {
		t.Error("another seed gives the same")
	}
	many := shortCell(0.9)
	many.Tenants, many.TenantSkew, many.Nodes, many.Spread = 500, .8, 50, 5
	many.Limit = limiter.Limit{Rate: limiter.Rate{Count: 60, Per: time.Minute}, Burst: 5}
	for _, p := range Policies() {
		one, err := measureMany(t.Context(), many, p, 1)
		if err != nil {
			t.Fatal(err)
		}
		three, err := measureMany(t.Context(), many, p, 3)
		if err != nil || !reflect.DeepEqual(one, three) {
			t.Errorf("%s: with three processors it is something else: %v", p.Name, err)
		}
		if one.Requests < 3000 || one.IdealRefused == 0 || p.Name == Headgate && one.Over > 0 {
			t.Errorf("%s: %d requests, %.3f refused by the ideal bucket, over %.3f", p.Name, one.Requests, one.IdealRefused, one.Over)
		}
	}
}

// TestManyIsOneByOne: a cell of many tenants is what its demand makes of each tenant's bucket.
func TestManyIsOneByOne(t *testing.T) {
	c := shortCell(1.1)
	c.Tenants, c.TenantSkew, c.Seed = 20, 1, 3
	p := Policies()[0] // each request asks: nothing hangs on when
	got, err := measureMany(t.Context(), c, p, 2)
	if err != nil {
		t.Fatal(err)
	}
	c.Replay = c.Demand()
	replayed, err := measureMany(t.Context(), c, p, 2)
	if err != nil {
		t.Fatal(err)
	}
	if got.Requests != len(c.Replay) || got.Admitted != replayed.Admitted || got.IdealRefused != replayed.IdealRefused || got.Trips != 1 || got.Admitted < .999 {
		t.Errorf("%+v\n%+v", got, replayed)
	}
}

// TestSignedRank against what is tabled and known: of n differences all of one sign, 2/2ⁿ.
func TestSignedRank(t *testing.T) {
	for _, c := range []struct {
		ds   []float64
		want float64
	}{
		{nil, 1},
		{[]float64{0, 0}, 1},
		{[]float64{1, 2, 3, 4, 5}, 2. / 32},
		{[]float64{-1, -2, -3, -4, -5, -6}, 2. / 64},
		{[]float64{1, -1}, 1},
		// Wilcoxon's W+ of 5 among 8 pairs: 20 of 256 ways are as far or farther.
		{[]float64{1, -2, -3, 4, -5, -6, -7, -8}, 20. / 256},
	} {
		if got := signedRank(c.ds); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%v: p %v, want %v", c.ds, got, c.want)
		}
	}
	var long []float64
	for i := range 40 {
		long = append(long, float64(i+1)*float64(1-2*(i%2)))
	}
	if p := signedRank(long); p < .5 {
		t.Errorf("as many up as down: p %v", p)
	}
}

// TestCompare: what has changed is found in the file of an earlier run, and nothing where nothing has.
func TestCompare(t *testing.T) {
	dir := t.TempDir()
	r := small(t, nil)
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	earlier, err := ReadJSON(filepath.Join(dir, "lease.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range Compare(earlier, r) {
		if d.Better+d.Worse != 0 || d.Cells != 2 || d.P != 1 {
			t.Errorf("nothing has changed: %+v", d)
		}
	}
	for i := range r.Results {
		if r.Results[i].Contender == Headgate {
			r.Results[i].Trips *= 2
		}
	}
	found := false
	for _, d := range Compare(earlier, r) {
		if d.Figure == "round trips" && d.Contender == Headgate {
			found = d.Worse == 2 && math.Abs(d.New-2*d.Old) < 1e-9
		} else if d.Better+d.Worse != 0 {
			t.Errorf("%+v", d)
		}
	}
	if !found {
		t.Error("twice the round trips were not found")
	}
	for _, bad := range []string{"lease.txt", "none.json"} {
		if _, err := ReadJSON(filepath.Join(dir, bad)); err == nil {
			t.Errorf("%s was read", bad)
		}
	}
}

// TestConfig: what is not there is named, with what there is.
func TestConfig(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		says string
	}{
		{Config{Policies: []string{"rate/X"}}, "rate/N"},
		{Config{Nodes: []int{5}}, "4, 16 and 64"},
		{Config{Seeds: -1}, "1000"},
	} {
		if err := c.cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c.cfg, err)
		}
	}
	var b bytes.Buffer
	p := &Progress{W: &b, Terminal: true}
	p.Tell(1, 2, "3s")
	p.Tell(2, 2, "0s")
	if !strings.Contains(b.String(), "1 of 2, 3s left") || !strings.HasSuffix(b.String(), "\n") {
		t.Errorf("%q", b.String())
	}
}
