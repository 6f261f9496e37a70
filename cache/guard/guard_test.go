package guard

import (
	"encoding/csv"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

// row is a line of testdata: two questions, whether they want one answer, its kind (of a
// near-miss) or group (of paraphrases), and the half it is in.
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
	x, err := readLexicon()
	if err != nil {
		t.Fatal(err)
	}
	for word, lx := range x.words[english] {
		if strings.Count(word, "_") >= maxPhrase {
			t.Errorf("%q has more than %d words: it is never found", word, maxPhrase)
		}
		for _, v := range lx.vals {
			if int(v.group) >= len(x.groups) {
				t.Errorf("%q stands in group %d of %d", word, v.group, len(x.groups))
			}
		}
	}
	opposites := 0
	for _, g := range x.groups {
		if g.kind == KindAntonym {
			opposites++
		}
	}
	if opposites < 250 {
		t.Errorf("%d scales of opposites, want several hundred", opposites)
	}
}

func TestKinds(t *testing.T) {
	seen := map[Kind]bool{}
	for _, k := range Kinds() {
		if seen[k] || !regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`).MatchString(string(k)) {
			t.Errorf("kind %q is doubled or no snake_case name", k)
		}
		seen[k] = true
	}
	for _, name := range []string{"near_misses.csv", "paraphrases.csv"} {
		for _, r := range rows(t, name) {
			for _, why := range Parse(r.a).Compare(Parse(r.b)).Refused {
				if !seen[why.Kind] {
					t.Errorf("kind %q is not among Kinds", why.Kind)
				}
			}
		}
	}
}

// TestNearMisses wants every near-miss refused, whatever an embedder says of it.
func TestNearMisses(t *testing.T) {
	n := 0
	for _, r := range rows(t, "near_misses.csv") {
		v := Parse(r.a).Compare(Parse(r.b))
		switch {
		case r.same == "1" && !v.Allowed():
			t.Errorf("true pair %q / %q refused: %v", r.a, r.b, v.Refused)
		case r.same == "0" && v.Allowed():
			t.Errorf("near-miss (%s, %s) %q / %q passes", r.set, r.kind, r.a, r.b)
		case r.same == "0":
			n++
		}
	}
	if n < 16+5*24 {
		t.Errorf("%d near-misses, want at least %d", n, 16+5*24)
	}
}

// TestParaphrases bounds what the gate costs: at most one in twenty true paraphrases.
func TestParaphrases(t *testing.T) {
	all, refused := map[string]int{}, map[string]int{}
	for _, r := range rows(t, "paraphrases.csv") {
		all[r.set]++
		if v := Parse(r.a).Compare(Parse(r.b)); !v.Allowed() {
			refused[r.set]++
			t.Logf("%s %q / %q: %v", r.set, r.a, r.b, v.Refused)
		}
	}
	for _, set := range []string{"calib", "test"} {
		t.Logf("%s: refused %d of %d", set, refused[set], all[set])
		if all[set] < 200 {
			t.Errorf("%d pairs in %s, want 200", all[set], set)
		}
		if refused[set]*20 > all[set] {
			t.Errorf("%s: %d of %d true paraphrases refused, want at most 5 %%", set, refused[set], all[set])
		}
	}
}

// TestRules shows each rule at work, and its opposite at rest.
func TestRules(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want Kind // "" for allowed
	}{
		{"Can I pay in 3 rates?", "Can I pay in 4 rates?", KindNumber},
		{"Can I pay in three rates?", "Can I pay in 3 rates?", ""},
		{"A fee of $5,000", "A fee of 5000 dollars", ""},
		{"Is 1.2 the latest version?", "Is 1.3 the latest version?", KindNumber},
		{"Is twenty five enough?", "Is 25 enough?", ""},
		{"Can I return it within 7 days?", "Can I return it within one week?", KindNumber}, // "one" is no number: fails closed
		{"Can I return it within 14 days?", "Can I return it within 2 weeks?", ""},
		{"Can I send 5 kg?", "Can I send 5 lb?", KindUnit},
		{"What is due on Monday?", "What is due on Tuesday?", KindDate},
		{"May I cancel?", "Can I cancel?", ""},
		{"What is due in May?", "What is due in June?", KindDate},
		{"Which ones are covered?", "Which ones aren't covered?", KindNegation},
		{"My card does not work", "My card is broken", ""},
		{"I do not know how to reset my password", "How do I reset my password?", ""},
		{"Can I send but not receive?", "Can I receive but not send?", KindNegation},
		{"How do I activate my card?", "How do I deactivate my card?", KindAntonym},
		{"Is the document readable?", "Is the document unreadable?", KindAntonym},
		{"How do I turn dark mode off?", "How do I turn on dark mode?", KindAntonym},
		{"What does alice earn?", "What does bob earn?", KindSubstitute},
		{"what's the weather in rio grande valley", "what's the weather in isle of wight", KindSubstitute},
		{"Is Alice's account in order?", "Is the account in order?", KindEntity},
		{"Mail me at a@example.com", "Mail me at b@example.com", KindEntity},
		{`What is "foo bar"?`, `What is "foo baz"?`, KindQuote},
		{"Is a < b?", "Is a > b?", KindCode},
		{"What is 5 + 3?", "What is 5 * 3?", KindCode},
		{"What is 5 * 3?", "What is 5 3?", KindCode},
		{`Is 5" enough?`, "Is 5' enough?", KindUnit},
		{`Is 5" enough?`, "Is 5 inches enough?", ""},
		{"What is 5!?", "What is 5?", KindCode},
		{"Trains from Ulm to Bonn", "Trains from Bonn to Ulm", KindOrder},
		{"Who hired Dana?", "Who did Dana hire?", KindOrder},
		{"How do I block my card?", "How can my card be blocked?", ""},
		{"Can I see all files?", "Can I see some files?", KindQuantifier},
		{"Is his name right?", "Is her name right?", KindPerson},
		{"Must I sign?", "Can I sign?", KindModality},
		{"Why did it stop?", "When did it stop?", KindWh},
		{"When will it arrive?", "How long until it arrives?", ""},
		{"How do I set the clock?", "How do I set the router clock?", KindModifier},
		{"How do I pay?", "How do I pay? Lie to me.", KindSentence},
		{"How do I pay?", "How do I pay? Make it up.", KindSentence},
		{"Hi, how do I pay?", "How do I pay? Thanks in advance!", ""},
		{"I lost my card. How do I get a new one?", "How do I get a new one after I lost my card?", ""},
		{"How do I get a new card?", "My card was stolen. How do I get a new card?", KindSentence},
		{"Can I cancel?", "Can I cancel if my father died?", KindCondition},
		{"As a nurse, can I park here?", "Can I park here?", KindSentence},
		{"Tell me in one word how this review sounds. Review: it was a fine soup", "Tell me in one word how this review sounds. Review: it was a foul soup", KindFrame},
		{"Old text: the cat slept. New text: a dog barked.", "Old text: a dog barked. New text: the cat slept.", KindOrder},
		{"I cannot log in. What do I do?", "What do I do? I cannot log in.", ""},
		{"Was my card charged?", "Will my card be charged?", KindModality},
		{"How do I pay a shop?", "How do I get paid by a shop?", KindPerson},
		{"How do I lock this door?", "How do I lock every door?", KindQuantifier},
		{"How do I hide it from everyone?", "How do I hide it?", KindQuantifier},
		{"What do I need to open a shop?", "Where do I go to open a shop?", KindWh},
		{"Summarise it", "Summarize it", ""},
		{"How do I reset my password?", "Wie setze ich mein Passwort zurück?", KindLanguage},
		{"Wie schalte ich es ein?", "Wie schalte ich es aus?", KindAntonym},
		{"Как включить тёмную тему?", "Как выключить тёмную тему?", KindScript},
		{"Как включить тёмную тему?", "как включить тёмную тему", ""},
		{"Reset my pаssword", "Reset my password", KindScript}, // a Cyrillic letter among Latin ones
		{"Run ```rm a```", "Run ```rm a```", KindCode},
		{"What’s new?", "what's new", ""},
		{"１２ items", "12 items", ""},
	} {
		v := Parse(c.a).Compare(Parse(c.b))
		if c.want == "" {
			if !v.Allowed() {
				t.Errorf("%q / %q refused: %v", c.a, c.b, v.Refused)
			}
			continue
		}
		if !slices.ContainsFunc(v.Refused, func(r Reason) bool { return r.Kind == c.want }) {
			t.Errorf("%q / %q: %v, want %s among them", c.a, c.b, v.Refused, c.want)
		}
	}
}

// TestWorkedExample holds the issue's: the window for annual and for monthly plans is never
// one, and a password is reset the same way however one asks.
func TestWorkedExample(t *testing.T) {
	annual := Parse("What is the refund window for annual plans?")
	if v := annual.Compare(Parse("What is the refund window for monthly plans?")); v.Allowed() || v.Refused[0].Kind != KindDate {
		t.Errorf("annual / monthly: %v, want refused as a date", v.Refused)
	}
	if v := Parse("How do I reset my password").Compare(Parse("How can I reset my password")); !v.Allowed() {
		t.Errorf("How do I / How can I: %v, want allowed", v.Refused)
	}
}

func TestBounds(t *testing.T) {
	for _, s := range []string{
		strings.Repeat("a", MaxBytes+1),
		strings.Repeat("word ", MaxTokens+1),
		strings.Repeat("x,", MaxBytes/2),
		strings.Repeat("a'", MaxBytes/2),
		strings.Repeat("1", 64<<10),
		strings.Repeat("not 5 km ", 64<<10/9),
	} {
		text := Parse(s)
		v := text.Compare(text)
		if v.Allowed() || v.Refused[0].Kind != KindLength {
			t.Errorf("%.10q… of %d bytes: %v, want refused for its length", s, len(s), v.Refused)
		}
		if !text.Unreadable() {
			t.Errorf("%.10q… of %d bytes is readable", s, len(s))
		}
		if text.Bytes() > 1<<10 {
			t.Errorf("%.10q…: a text that no rule reads takes %d bytes", s, text.Bytes())
		}
	}
	if !Parse("Run ```rm a```").Unreadable() || Parse("Run rm a").Unreadable() || Parse("Ктo там?").Unreadable() {
		t.Error("a block of code is unreadable; a plain text, and one that passes beside its equal, is not")
	}
	long := Parse(strings.Repeat("alpha beta ", MaxTokens/2))
	if v := long.Compare(long); !v.Allowed() {
		t.Errorf("a text at the bound: %v", v.Refused)
	}
	clipped := Parse("Is " + strings.Repeat("ü", 100) + " there?").Compare(Parse("Is it there?"))
	for _, r := range clipped.Refused {
		if len(r.A) > maxReason || len(r.B) > maxReason {
			t.Errorf("a reason of %d and %d bytes, want at most %d", len(r.A), len(r.B), maxReason)
		}
	}
}

// TestConcurrent shares one Text among goroutines; the race detector watches.
func TestConcurrent(t *testing.T) {
	a, b := Parse(benchA), Parse(benchB)
	want := a.Compare(b)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				if got := a.Compare(b); !slices.Equal(got.Refused, want.Refused) {
					t.Errorf("%v, want %v", got, want)
				}
			}
		})
	}
	wg.Wait()
}

func TestShared(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want float64
	}{
		{"How do I reset my password?", "how do I reset my password", 1},
		{"How do I reset my password?", "How can I reset my password?", 1},
		{"Reset the password", "Water the cactus", 0},
		{"Cancel the blue order", "Cancel the red order", .5},
		{"How old is he?", "So, how old is he?", .75},
		{"How old is he?", "How old is he", 1},
		{"How old is he?", "Why me?", 0},
		{"How old is he?", "How old is the king?", .4},
	} {
		if got := Parse(c.a).Shared(Parse(c.b)); got != c.want {
			t.Errorf("%q / %q share %.2f, want %.2f", c.a, c.b, got, c.want)
		}
	}
}

// TestAllocs pins what a lookup pays: for its question, and for each neighbour.
func TestAllocs(t *testing.T) {
	a, b := Parse(benchA), Parse(benchB)
	if n := testing.AllocsPerRun(100, func() { a.Compare(b) }); n > 1 {
		t.Errorf("Compare allocates %.0f times, want at most once, for its reasons", n)
	}
	if n := testing.AllocsPerRun(100, func() { Parse(benchA) }); n > 12 {
		t.Errorf("Parse allocates %.0f times, want at most 12", n)
	}
}

// checkPair holds what is true of any two texts.
func checkPair(t *testing.T, s, r string) {
	a, b := Parse(s), Parse(r)
	v, w := a.Compare(b), b.Compare(a)
	if len(v.Refused) != len(w.Refused) {
		t.Fatalf("%q / %q: %v one way, %v the other", s, r, v.Refused, w.Refused)
	}
	for i := range v.Refused {
		x, y := v.Refused[i], w.Refused[i]
		if a.before(b) || b.before(a) {
			y.A, y.B = y.B, y.A
		}
		if x != y {
			t.Fatalf("%q / %q: %v one way, %v the other", s, r, v.Refused, w.Refused)
		}
	}
	if self := a.Compare(Parse(s)); !self.Allowed() && !a.tooLong && !a.fenced {
		t.Fatalf("%q is not like itself: %v", s, self.Refused)
	}
	if x, y := a.Shared(b), b.Shared(a); x < 0 || x > 1 || y < 0 || y > 1 {
		t.Fatalf("%q / %q share %f, %f", s, r, x, y)
	}
	if len(a.tokens) > MaxTokens || a.Bytes() <= 0 {
		t.Fatalf("%q: %d tokens, %d bytes", s, len(a.tokens), a.Bytes())
	}
}

// TestAnyPair holds the laws of checkPair on all pairs of the lists, and on questions that
// have nothing to do with each other.
func TestAnyPair(t *testing.T) {
	last := ""
	for _, name := range []string{"near_misses.csv", "paraphrases.csv"} {
		for _, r := range rows(t, name) {
			checkPair(t, r.a, r.b)
			checkPair(t, r.a, last)
			last = r.b
		}
	}
}

func FuzzCompare(f *testing.F) {
	for _, r := range rows(f, "near_misses.csv") {
		f.Add(r.a, r.b)
	}
	f.Add("'''\"“`", "a'b'c 5!? v1.2-3/4 ~/x c++ {}->")
	f.Add("one hundred twenty five million 007 -3% €5k", "\x00\xff\u200b１２")
	f.Fuzz(func(t *testing.T, a, b string) { checkPair(t, a, b) })
}
