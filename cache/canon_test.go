package cache

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
	"pgregory.net/rapid"
)

// canonOf returns the canonical form of src.
func canonOf(src []byte) ([]byte, error) {
	var d canonDoc
	if err := d.parse(src); err != nil {
		return nil, err
	}
	return d.appendValue(nil, 0, nil), nil
}

func TestCanonForm(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{" { } ", "{}"},
		{"[\n]", "[]"},
		{`{"b":1,"a":[true , false,null]}`, `{"a":[true,false,null],"b":1}`},
		{`{"b":{"d":1,"c":2},"a":{"z":{},"y":[]}}`, `{"a":{"y":[],"z":{}},"b":{"c":2,"d":1}}`},
		{`"\u0061\/\u000a\u001F\"\\\u0022\u005c"`, `"a/\n\u001f\"\\\"\\"`},
		{`"\ud83d\ude00 \u00e9"`, `"😀 é"`},
		{`{"\u0062":1,"a":2}`, `{"a":2,"b":1}`},
		{`{"":1,"a":2}`, `{"":1,"a":2}`},
		// The order is that of the names, not of their quoted form, and a name before a longer one.
		{`{"a!":1,"a":2}`, `{"a":2,"a!":1}`},
		{"\"\u2028\x7f\"", "\"\u2028\x7f\""},
	} {
		if got, err := canonOf([]byte(c.in)); err != nil || string(got) != c.want {
			t.Errorf("canon(%s) = %s, %v; want %s", c.in, got, err, c.want)
		}
	}
}

func TestCanonNumbers(t *testing.T) {
	for want, forms := range map[string][]string{
		"0":                           {"0", "-0", "0.0", "-0.000", "0e5", "0E-7", "0e99999999999999999999", "-0.0e+0"},
		"1":                           {"1", "1.0", "1e0", "10e-1", "0.1E+1", "100e-00002", "1.000e+000000000000000000"},
		"-1":                          {"-1", "-1.0", "-0.1e1"},
		"0.7":                         {"0.7", "0.70", "7e-1", "70E-2"},
		"100":                         {"100", "1e2", "1E+02", "100.0", "10e1"},
		"9007199254740993":            {"9007199254740993", "9007199254740993.0", "9.007199254740993e15"},
		"9007199254740992":            {"9007199254740992"},
		"0.1":                         {"0.1", "1e-1"},
		"0.10000000000000001":         {"0.10000000000000001", "10000000000000001e-17"},
		"0.000001":                    {"0.000001", "1e-6"},
		"1e-7":                        {"0.0000001", "1e-7", "0.1e-6"},
		"1.5e-7":                      {"0.00000015", "15e-8"},
		"100000000000000000000":       {"100000000000000000000", "1e20"},
		"1e+21":                       {"1000000000000000000000", "1e21"},
		"1.2e+21":                     {"1200000000000000000000", "12e20", "1.2E21"},
		"123456789012345678901":       {"123456789012345678901"},
		"1.234567890123456789012e+21": {"1234567890123456789012", "1234567890123456789012.0"},
		"1e+400":                      {"1e400", "10e399"},
		"-1e-400":                     {"-1e-400"},
		"1e+999999999":                {"1e999999999", "100e+0999999997"},
		"12345.678":                   {"12345.678", "12345678e-3", "12345.67800"},
	} {
		for _, form := range forms {
			got, err := canonOf([]byte(form))
			if err != nil || string(got) != want {
				t.Errorf("canon(%s) = %s, %v; want %s", form, got, err, want)
			}
		}
	}
}

func TestCanonRefuses(t *testing.T) {
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	for _, c := range []struct {
		in, problem string
		offset      int
	}{
		{"", "too early", 0},
		{"  ", "too early", 2},
		{"{", "no name", 1},
		{`{"a"`, "no colon", 4},
		{`{"a":`, "too early", 5},
		{`{"a":1`, "neither a comma", 6},
		{`{"a":1,}`, "no name", 7},
		{`{a:1}`, "no name", 1},
		{`[1,]`, "no JSON value", 3},
		{`[1 2]`, "neither a comma", 3},
		{`[1}`, "neither a comma", 2},
		{`1 2`, "bytes follow", 2},
		{"\ufeff{}", "no JSON value", 0},
		{"nul", "no JSON value", 0},
		{"NaN", "no JSON value", 0},
		{"01", "malformed number", 0},
		{"-", "malformed number", 0},
		{"+1", "no JSON value", 0},
		{".5", "no JSON value", 0},
		{"1.", "malformed number", 0},
		{"1e", "malformed number", 0},
		{"1e+", "malformed number", 0},
		{"0x1", "bytes follow", 1},
		{"1e1000000000", "nine digits", 0},
		{"[-1E-9999999999999999999999]", "nine digits", 1},
		{`"a`, "without an end", 0},
		{`"a\`, "stands for no character", 2},
		{`"\x41"`, "stands for no character", 1},
		{`"\u12g4"`, "stands for no character", 1},
		{`"\ud83d"`, "stands for no character", 1},
		{`"\ud83d\u0041"`, "stands for no character", 1},
		{`"\ude00\ud83d"`, "stands for no character", 1},
		{"\"a\nb\"", "control character", 2},
		{"\"abcdefgh\x00b\"", "control character", 9},
		{"\"\xff\"", "not UTF-8", 0},
		{"\"\xff" + `\nand then ASCII only"`, "not UTF-8", 0},
		{`"\ude00\ude00"`, "stands for no character", 1},
		{"\"\xed\xa0\x80\"", "not UTF-8", 0},
		{"{\"\xc0\x80\":1}", "not UTF-8", 1},
		{`{"a":1,"a":1}`, "twice", 0},
		{`{"a":1,"\u0061":2}`, "twice", 0},
		{`[{"b":1,"a":2,"b":3}]`, "twice", 1},
		{`{"metadata":{"a":1,"c":1,"b":1,"a":1}}`, "twice", 12},
		{deep(513), "nested too deep", 512},
		{strings.Repeat(`{"a":`, 100000), "nested too deep", 512 * 5},
		{"[" + strings.Repeat("0,", maxCanonTokens) + "0]", "more than a million values", 2*maxCanonTokens - 1},
	} {
		_, err := canonOf([]byte(c.in))
		var bad *BodyError
		if !errors.As(err, &bad) || !strings.Contains(bad.Problem, c.problem) || bad.Offset != c.offset {
			t.Errorf("canon(%.40q): %v; want %q at byte %d", c.in, err, c.problem, c.offset)
		}
		if c.in != "" && len(c.in) > 8 && strings.Contains(err.Error(), c.in) {
			t.Errorf("the error quotes the body: %v", err)
		}
	}
	if _, err := canonOf([]byte(deep(512))); err != nil {
		t.Errorf("512 deep: %v", err)
	}
}

// A tree has one canonical form however it is written, which encoding/json reads as it reads
// what was written, and which is its own.
func TestCanonIndependent(t *testing.T) {
	var d canonDoc // one for all: nothing is left over from the last
	rapid.Check(t, func(t *rapid.T) {
		tree := drawCanonTree(t, 3)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		one, other := tree.render(nil, rng), tree.render(nil, rng)
		if err := d.parse(one); err != nil {
			t.Fatalf("%s: %v", one, err)
		}
		if len(d.order) > len(d.tokens) {
			t.Fatalf("%d names of %d tokens: some are left over", len(d.order), len(d.tokens))
		}
		form := d.appendValue(nil, 0, nil)
		if again, err := canonOf(other); err != nil || !bytes.Equal(form, again) {
			t.Fatalf("%s and %s are %s and %s, %v", one, other, form, again, err)
		}
		if again, err := canonOf(form); err != nil || !bytes.Equal(form, again) {
			t.Fatalf("the form %s has the form %s, %v", form, again, err)
		}
		a, ok := canonOracle(one)
		if b, also := canonOracle(form); ok && (!also || a != b) {
			t.Fatalf("%s became %s: %s is not %s", one, form, a, b)
		}
	})
}

// Whatever value of a tree is changed, its form changes.
func TestCanonSeparate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tree := drawCanonTree(t, 3)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		src := tree.render(nil, rng)
		form, err := canonOf(src)
		if err != nil {
			t.Fatal(err)
		}
		for i := range tree.all() {
			changed := tree.clone()
			changed.all()[i].change(rng)
			text := changed.render(nil, rng)
			if other, err := canonOf(text); err != nil || bytes.Equal(form, other) {
				t.Fatalf("%s and %s are both %s, %v", src, text, other, err)
			}
		}
	})
}

// Two texts have one form if and only if encoding/json reads the same in both. Bytes are
// changed at random, so that many are near each other and some are no JSON.
func TestCanonOracle(t *testing.T) {
	const bytesOf = "0123456789eE+-. \"\\{}[],:au/\x00\xff"
	var equal, refused int
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		one := drawCanonTree(t, 2).render(nil, rng)
		other := slices.Clone(one)
		for range rng.IntN(3) {
			at := rng.IntN(len(other))
			switch rng.IntN(3) {
			case 0:
				other[at] = bytesOf[rng.IntN(len(bytesOf))]
			case 1:
				other = slices.Insert(other, at, bytesOf[rng.IntN(len(bytesOf))])
			default:
				other = append(slices.Delete(other, at, at+1), ' ')
			}
		}
		same, ok := canonAgrees(t, one, other)
		if same {
			equal++
		}
		if !ok {
			refused++
		}
	})
	if equal == 0 || refused == 0 {
		t.Errorf("%d equal and %d refused: the test shows too little", equal, refused)
	}
}

// canonAgrees holds the canonical forms of two texts against encoding/json. It returns whether
// they are the same, and whether both have one.
func canonAgrees(t interface {
	Helper()
	Fatalf(string, ...any)
}, one, other []byte,
) (same, ok bool) {
	t.Helper()
	formOne, errOne := canonOf(one)
	formOther, errOther := canonOf(other)
	a, okOne := canonOracle(one)
	b, okOther := canonOracle(other)
	if okOne && errOne != nil || okOther && errOther != nil {
		t.Fatalf("encoding/json reads %q and %q; %v, %v", one, other, errOne, errOther)
	}
	if !okOne || !okOther {
		return false, false
	}
	if bytes.Equal(formOne, formOther) != (a == b) {
		t.Fatalf("%q and %q are %s and %s; encoding/json reads %s and %s", one, other, formOne, formOther, a, b)
	}
	return a == b, true
}

func FuzzCanon(f *testing.F) {
	f.Fuzz(func(t *testing.T, one, other []byte) {
		canonAgrees(t, one, other)
		form, err := canonOf(one)
		valid := jsontext.Value(one).IsValid()
		var bad *BodyError
		switch {
		case err == nil && !valid:
			t.Fatalf("%q is not valid, but has the form %s", one, form)
		case err == nil:
			if again, err := canonOf(form); err != nil || !bytes.Equal(form, again) {
				t.Fatalf("the form %s has the form %s, %v", form, again, err)
			}
			if !utf8.Valid(form) || len(form) > 2*len(one)+maxCanonPlain*bytes.Count(one, []byte("e"))+
				maxCanonPlain*bytes.Count(one, []byte("E"))+maxCanonPlain {
				t.Fatalf("%q became %s", one, form)
			}
		case !errors.As(err, &bad) || bad.Offset < 0 || bad.Offset > len(one):
			t.Fatalf("%q: %v", one, err)
		case valid && !strings.Contains(bad.Problem, "deep") && !strings.Contains(bad.Problem, "nine digits"):
			t.Fatalf("%q is valid: %v", one, err)
		}
	})
}

// Every position of a byte that ends the scan, at every alignment, after bytes that are near
// to it.
func TestCanonScan(t *testing.T) {
	for _, near := range []byte{'a', '!', '#', '[', ']', 0x20, 0x7f, 0x80, 0xff, 0xa2, 0xdc, 0x9f} {
		for _, stop := range []byte{'"', '\\', 0, 0x1f} {
			for n := range 40 {
				for from := range n + 1 {
					src := append(bytes.Repeat([]byte{near}, n), stop, '"', near)
					at, wide := canonScan(src, from)
					if at != n || near >= 0x80 && from < n && !wide {
						t.Fatalf("scan(%q, %d) = %d, %v", src, from, at, wide)
					}
				}
				src := bytes.Repeat([]byte{near}, n)
				if at, wide := canonScan(src, 0); at != n || wide != (near >= 0x80 && n > 0) {
					t.Fatalf("scan(%q) = %d, %v", src, at, wide)
				}
			}
		}
	}
}
