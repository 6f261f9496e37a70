package cache

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestExplain(t *testing.T) {
	c := keyContext(`{"stream":true,"messages":[{"role":"user","content":"a"},{"content":" B  ","role":"user"}],"temperature":1.0,"a b":[1,2],"model":"x","tools":[]}`)
	c.Backends, c.Header, c.Normalize = []string{"b2", "b 1"}, []string{"X-B: 2", "X-A: 1", "X-B: 1", "odd"}, NormalizeFold
	parts, err := c.Explain()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range parts {
		got = append(got, fmt.Sprintf("%s=%s %v", p.Name, p.Value, p.Counted))
		if len(p.Hash) != 16 {
			t.Errorf("%s has the hash %q", p.Name, p.Hash)
		}
	}
	want := []string{
		"tenant=acme true", "user=u1 true", "claimed=c1 true", "surface=help true", "template=v3 true", "model=llama true", "model_version=2026-01 true",
		`backends=["b 1" "b2"] true`, "generations=[1 2 3 4] true", "path=/v1/chat/completions true", "query=a=b true",
		`header "X-A"=1 true`, `header "X-B"=1 true`, `header "X-B"[1]=2 true`, `line of header "odd"= true`, "normalize=fold true",
		`body["a b"]=[1,2] true`, `body.messages[0]={"content":"a","role":"user"} true`, `body.messages[1]={"content":"b","role":"user"} true`,
		"body.temperature=1 true", "body.tools=[] true", `body.model="x" false`, "body.stream=true false",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if _, err := keyContext("{").Explain(); err == nil {
		t.Error("a body that is no JSON is explained")
	}
	if parts, err := keyContext(`"text"`).Explain(); err != nil || parts[len(parts)-1].Name != "body" {
		t.Errorf("a body that is a string: %+v, %v", parts, err)
	}
}

func TestDiffer(t *testing.T) {
	a := keyContext(`{"messages":[{"role":"user","content":"one"},{"role":"user","content":"two"}],"temperature":0,"stream":true,"x":{"a\"b":1,"c":[1]},"only":null}`)
	b := keyContext(`{"temperature":0.5,"messages":[{"content":"one","role":"user"},{"content":"2","role":"user"},{}],"stream":false,"x":{"a\"b":2,"c":{}},"new":"n"}`)
	b.User, b.Backends, b.Generations[1] = "u2", []string{"b2", "b3"}, 9
	b.Header = []string{"Anthropic-Version: 2", "X-New: n"}
	found, err := Differ(a, b)
	if err != nil {
		t.Fatal(err)
	}
	want := []Difference{
		{"user", "u1", "u2"},
		{"backends", `["b1" "b2"]`, `["b2" "b3"]`},
		{"generations", "[1 2 3 4]", "[1 9 3 4]"},
		{`header "Anthropic-Version"`, "1", "2"},
		{`header "X-Mode"`, "fast", Absent},
		{`header "X-New"`, Absent, "n"},
		{"body.messages[1].content", `"two"`, `"2"`},
		{"body.messages[2]", Absent, "{}"},
		{"body.new", Absent, `"n"`},
		{"body.only", "null", Absent},
		{"body.temperature", "0", "0.5"},
		{`body.x["a\"b"]`, "1", "2"},
		{"body.x.c", "[1]", "{}"},
	}
	if !reflect.DeepEqual(found, want) {
		t.Errorf("got\n%+v\nwant\n%+v", found, want)
	}
	for _, bad := range []string{"", `{"a":1,"a":1}`} {
		if _, err := Differ(a, keyContext(bad)); err == nil || !strings.HasPrefix(err.Error(), "the second: body: ") {
			t.Errorf("differ from %q: %v", bad, err)
		}
		if _, err := Differ(keyContext(bad), a); err == nil || !strings.HasPrefix(err.Error(), "the first: body: ") {
			t.Errorf("differ %q: %v", bad, err)
		}
	}
}

// What is shown is bounded, and of long values shows what differs.
func TestDifferBounds(t *testing.T) {
	long := strings.Repeat("é", 5000)
	a, b := keyContext(`{"x":"`+long+"1"+long+`"}`), keyContext(`{"x":"`+long+"2"+long+`"}`)
	found, err := Differ(a, b)
	if err != nil || len(found) != 1 {
		t.Fatalf("%+v, %v", found, err)
	}
	for value, want := range map[string]string{found[0].A: "é1é", found[0].B: "é2é"} {
		if len(value) > maxPartValue || !utf8.ValidString(value) || !strings.Contains(value, want) || !strings.HasPrefix(value, "…") || !strings.HasSuffix(value, "…") {
			t.Errorf("%d bytes of the value: %s", len(value), value)
		}
	}
	many := func(n int, value string) string {
		return `{"l":[` + strings.Repeat(value+",", n) + `{}],"m":[` + strings.Repeat(value+",", n) + `0]}`
	}
	if found, err = Differ(keyContext(many(5000, "{}")), keyContext(many(5000, "[]"))); err != nil || len(found) != maxDifferences {
		t.Errorf("%d differences, %v", len(found), err)
	}
	names := make([]string, 3000)
	for i := range names {
		names[i] = fmt.Sprintf(`"n%d":0`, i)
	}
	for _, body := range []string{many(5000, "{}"), "{" + strings.Join(names, ",") + "}"} {
		parts, err := keyContext(body).Explain()
		if err != nil || len(parts) > 2*maxParts+50 || len(parts) < maxParts {
			t.Errorf("%d parts, %v", len(parts), err)
		}
		for _, p := range parts {
			if len(p.Value) > maxPartValue {
				t.Errorf("%s has %d bytes", p.Name, len(p.Value))
			}
		}
	}
	// Names that are deep and long are not copied at each level.
	deep := strings.Repeat(`{"`+strings.Repeat("n", 2000)+`":`, 500)
	close := strings.Repeat("}", 500)
	if found, err = Differ(keyContext(deep+"1"+close), keyContext(deep+"2"+close)); err != nil || len(found) != 1 || len(found[0].Path) > maxPartValue {
		t.Errorf("%+v, %v", found, err)
	}
}

func TestExplainCut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := strings.Repeat(rapid.StringN(1, 5, -1).Draw(t, "s"), rapid.IntRange(1, 200).Draw(t, "n"))
		at := rapid.IntRange(0, len(s)).Draw(t, "at")
		if cut := explainCut(s, at); len(cut) > maxPartValue || !utf8.ValidString(cut) || cut == "" {
			t.Fatalf("%q cut at %d is %q", s, at, cut)
		}
	})
}

// Two contexts have one key if and only if they do not differ, and if and only if their
// counted parts have the same names and hashes.
func TestDifferIsKey(t *testing.T) {
	counted := func(t *rapid.T, c *Context) []string {
		parts, err := c.Explain()
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, p := range parts {
			if p.Counted {
				all = append(all, p.Name+" "+p.Hash)
			}
		}
		return all
	}
	var same, other int
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		tree := drawCanonTree(t, 3)
		a, b := keyContext(string(tree.render(nil, rng))), keyContext("")
		if rng.IntN(2) == 0 {
			nodes := tree.all()
			nodes[rng.IntN(len(nodes))].change(rng)
		}
		b.Body = tree.render(nil, rng)
		switch rng.IntN(6) {
		case 0:
			b.Header = rapid.SliceOfN(rapid.SampledFrom([]string{"A", "A: ", "A: 1", "X-Mode: fast", "Anthropic-Version: 1", ": "}), 0, 3).Draw(t, "header")
			a.Header = rapid.SliceOfN(rapid.SampledFrom([]string{"A", "A: ", "A: 1", "X-Mode: fast", "Anthropic-Version: 1", ": "}), 0, 3).Draw(t, "header")
		case 1:
			b.Backends = rapid.SliceOfN(rapid.SampledFrom([]string{"b1", "b2", "", "b1\" \"b2"}), 0, 3).Draw(t, "backends")
		case 2:
			b.Surface = "hel" + string(rune('p'+rng.IntN(2)))
		}
		keys := keyOf(t, a) == keyOf(t, b)
		found, err := Differ(a, b)
		if parts := slices.Equal(counted(t, a), counted(t, b)); err != nil || keys != (len(found) == 0) || keys != parts {
			t.Fatalf("%+v\n%+v: same key %v, same parts %v, differences %+v, %v", a, b, keys, parts, found, err)
		}
		if keys {
			same++
		} else {
			other++
		}
	})
	if same == 0 || other == 0 {
		t.Errorf("%d the same and %d not: the test shows too little", same, other)
	}
}
