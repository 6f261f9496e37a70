package ledger

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

// asked is a policy with one surface that keeps answers and is semantic, models to embed and to verify, and what else it says.
func asked(surface, semantic string) string {
	models := `models: [{name: m, backends: [b]}, {name: e5, aliases: [vectors], version: "1", backends: [b]}, {name: judge, aliases: [j], backends: [b]}]`
	return strings.Replace(surfaced(surface+", semantic: {"+semantic+"}"), "models: [{name: m, backends: [b]}]", models, 1)
}

const keeping = "share: tenant, volatility: docs, exact: {}"

func TestSemanticsAreCompiled(t *testing.T) {
	def := func(change func(*ResolvedSemantic)) *ResolvedSemantic {
		r := &ResolvedSemantic{Mode: "shadow", ErrorBound: .01, HitErrorBound: .02, Audit: .05, TTL: 6 * time.Hour, Answers: .92}
		change(r)
		return r
	}
	for text, want := range map[string]*ResolvedSemantic{
		"":                                def(func(*ResolvedSemantic) {}),
		"mode: shadow, embedder: builtin": def(func(*ResolvedSemantic) {}),
		"mode: learned":                   def(func(r *ResolvedSemantic) { r.Mode = "learned" }),
		"mode: static, threshold: 0.95":   def(func(r *ResolvedSemantic) { r.Mode, r.Threshold = "static", .95 }),
		"mode: static, threshold: 1, error_bound: 0.2, hit_error_bound: 0.5, audit: 1, answers: 1, ttl: 400d": def(func(r *ResolvedSemantic) {
			*r = ResolvedSemantic{Mode: "static", Threshold: 1, ErrorBound: .2, HitErrorBound: .5, Audit: 1, Answers: 1, TTL: 400 * 24 * time.Hour}
		}),
		"mode: static, threshold: 0.500001, error_bound: 0.000001, hit_error_bound: 0.000001, audit: 0.000001, answers: 0.500001, ttl: 1s": def(func(r *ResolvedSemantic) {
			*r = ResolvedSemantic{Mode: "static", Threshold: .500001, ErrorBound: 1e-6, HitErrorBound: 1e-6, Audit: 1e-6, Answers: .500001, TTL: time.Second}
		}),
		"embedder: e5, verifier: judge":  def(func(r *ResolvedSemantic) { r.Embedder, r.Verifier = "e5", "judge" }),
		"embedder: vectors, verifier: j": def(func(r *ResolvedSemantic) { r.Embedder, r.Verifier = "e5", "judge" }),
	} {
		got := indexOf(t, asked(keeping, text)).Surfaces["docs"]
		if !reflect.DeepEqual(got.Semantic, want) || got.Exact == nil {
			t.Errorf("%s: got %+v, want %+v", text, got.Semantic, want)
		}
	}
	ttl := indexOf(t, asked("share: tenant, exact: {ttl: 90s, max_ttl: 1d}", "")).Surfaces["docs"].Semantic.TTL
	if ttl != 90*time.Second {
		t.Errorf("where it says nothing answers are kept for %v, and exact's ttl is 90 s", ttl)
	}
	if got := indexOf(t, surfaced(keeping)).Surfaces["docs"]; got.Semantic != nil || got.Exact == nil {
		t.Errorf("without semantic it is %+v", got.Semantic)
	}
}

func TestSemanticRefuses(t *testing.T) {
	const at = "surfaces[docs].semantic"
	for text, want := range map[string]string{
		"mode: dynamic":                  at + `.mode: "dynamic" is not one of shadow, static, learned`,
		"mode: learn":                    `did you mean "learned"?`,
		"mode: static":                   at + ".threshold: mode static needs a threshold, the least similarity of a hit, as in threshold: 0.95",
		"threshold: 0.95":                at + ".threshold: a threshold does nothing with mode: shadow, in which nothing is served; remove it, or write mode: static",
		"mode: learned, threshold: 0.95": at + ".threshold: a threshold does nothing with mode: learned, which finds its own; remove it, or write mode: static",
		"mode: static, threshold: 0.07":  at + ".threshold: 0.07 looks like a distance, and this is a similarity, where 1 is the same: write 1 less the distance, here 0.93",
		"mode: static, threshold: 0.5":   at + ".threshold: 0.5 is no similarity of a policy, which is above 0.5 and at most 1, as in 0.95",
		"mode: static, threshold: 0":     "0 looks like a distance",
		"mode: static, threshold: 95":    at + ".threshold: 95 looks like a percentage: write 0.95;",
		"mode: static, threshold: 100":   at + ".threshold: 100 looks like a percentage: write 1;",
		"mode: static, threshold: 50":    at + ".threshold: 50 is no similarity",
		"mode: static, threshold: 1.2":   at + ".threshold: 1.2 is no similarity",
		"mode: static, threshold: 300":   at + ".threshold: 300 is no similarity",
		"mode: static, threshold: -0.5":  at + `.threshold: "-0.5" is no decimal with at most six digits behind the point, and this is a similarity above 0.5 and at most 1, as in 0.95`,
		"mode: static, threshold: high":  `"high" is no decimal`,
		"mode: static, threshold: 85%":   at + ".threshold: 85% is a percentage, and this is a similarity above 0.5 and at most 1: write 0.85",
		"mode: static, threshold: 40%":   `"40%" is no decimal`,
		"answers: 92.5%":                 at + ".answers: 92.5% is a percentage, and this is a similarity above 0.5 and at most 1: write 0.925",
		"error_bound: 1%":                at + ".error_bound: 1% is a percentage, and this is a share above 0 and at most 0.2: write 0.01",
		"hit_error_bound: 60%":           at + `.hit_error_bound: "60%" is no decimal with at most six digits behind the point, and this is a share above 0 and at most 0.5, as in 0.02`,
		"audit: 5 %":                     at + ".audit: 5 % is a percentage, and this is a share above 0 and at most 1: write 0.05",
		"embedder: built-in":             at + `.embedder: there is no model "built-in"; did you mean "builtin"?`,
		"embedder: buildin":              `did you mean "builtin"?`,
		"embedder: own":                  `there is no model "own"; there are builtin, e5, `,
		"error_bound: 0":                 at + ".error_bound: 0 is not above 0 and at most 0.2: it is the most of all requests that may be answered wrongly",
		"error_bound: 0.200001":          "0.200001 is not above 0 and at most 0.2",
		"hit_error_bound: 0":             at + ".hit_error_bound: 0 is not above 0 and at most 0.5: it is the most of the hits that may be wrong",
		"hit_error_bound: 0.500001":      "0.500001 is not above 0 and at most 0.5",
		"audit: 0":                       at + ".audit: 0 is not above 0 and at most 1: it is the share of the hits of which the model is asked all the same",
		"audit: 1.000001":                "1.000001 is not above 0 and at most 1",
		"answers: 0.5":                   at + ".answers: 0.5 is no similarity",
		"answers: 0.49":                  at + ".answers: 0.49 looks like a distance",
		"answers: 1.01":                  at + ".answers: 1.01 is no similarity",
		"ttl: 0s":                        at + ".ttl: with a ttl of 0 nothing is kept; remove semantic, or leave ttl out for that of exact",
		"ttl: 401d":                      at + ".ttl: a ttl above 400d is not allowed",
		"ttl: 60":                        "is not a duration",
		"embedder: e6":                   at + `.embedder: there is no model "e6"; did you mean "e5"?`,
		"verifier: jugde":                at + `.verifier: there is no model "jugde"; did you mean "judge"?`,
		"verifier: builtin":              at + `.verifier: there is no model "builtin"`,
		"embedder: e5, verifier: e5":     at + ".verifier: e5 embeds for a surface of this policy, and a verifier answers in words; name a model for chat",
		"embedder: vectors, verifier: e5}}\n  - {name: b, exact: {}, semantic: {mode: shadow": at + ".verifier: e5 embeds",
		"verifier: e5}}\n  - {name: b, exact: {}, semantic: {embedder: vectors":               at + ".verifier: e5 embeds",
		"distance: 0.1":                       at + `.distance: unknown field "distance"; write threshold, with mode: static, as a similarity: 1 is the same text, and a distance is 1 less the similarity`,
		"similarity_threshold: 0.9":           `unknown field "similarity_threshold"; write threshold, with mode: static, as a similarity`,
		"distance_threshold: 0.1":             "write threshold, with mode: static, as a similarity",
		"maxDistance: 0.1":                    "write threshold, with mode: static, as a similarity",
		"min-score: 0.9":                      "write threshold, with mode: static, as a similarity",
		"treshold: 0.9":                       `unknown field "treshold"; did you mean "threshold"?`,
		"similarity: 0.9":                     "write threshold, with mode: static, as a similarity",
		"answer_similarity: 0.9":              "write answers for the similarity from which two answers say the same",
		"delta: 0.02":                         "write error_bound for the most of all requests",
		"model: e5":                           "write embedder: the name of a model of this policy, or builtin",
		"embedding_model: e5":                 "write embedder: the name of a model of this policy, or builtin",
		"enabled: true":                       "a surface without semantic has it off; write mode: shadow, static or learned",
		"frequency: 5":                        "; there are mode, threshold, error_bound, hit_error_bound, audit, ttl, embedder, verifier, answers",
		"embeder: e5":                         `did you mean "embedder"?`,
		"}, semantic: {mode: learned":         `"semantic" stands here twice`,
		"mode: [static], threshold: 0.95":     "must be text",
		"mode: static, threshold: [0.95]":     "must be a plain value",
		"}}\n  - {name: builtin, semantic: {": "surfaces[builtin].semantic: semantic needs exact beside it",
		"mode: static, threshold: 0.5e0":      "is no decimal",
		"mode: static, threshold: \"95%\"":    "95% is a percentage",
	} {
		if p, err := ParsePolicy([]byte(asked(keeping, text))); p != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
	if _, err := ParsePolicy([]byte(surfaced(keeping + ", semantic: true"))); err == nil || !strings.Contains(err.Error(), "must be a mapping of mode, threshold") {
		t.Errorf("semantic: true: %v", err)
	}
	for _, bare := range []string{", semantic:", ", semantic: null", ", semantic: ~"} { // it looks as if it were on
		if _, err := ParsePolicy([]byte(surfaced(keeping + bare))); err == nil || !strings.Contains(err.Error(), at+": without a value it is off; write semantic: {} for mode: shadow, or remove it") {
			t.Errorf("%s: %v", bare, err)
		}
	}
	if _, err := ParsePolicy([]byte(asked(keeping, "embedder: e6, verifier: x"))); err == nil || strings.Contains(err.Error(), "embeds") || strings.Count(err.Error(), "there is no model") != 2 {
		t.Errorf("two models that are none: %v", err)
	}
	ambiguous := strings.Replace(asked(keeping, "embedder: builtin"), "name: m,", "name: builtin,", 1)
	if _, err := ParsePolicy([]byte(ambiguous)); err == nil || !strings.Contains(err.Error(), "semantic.embedder: builtin is the program's own model, and a model of the policy is called so, too") {
		t.Errorf("a model called builtin: %v", err)
	}
	mustParse(t, strings.Replace(ambiguous, "embedder: builtin", "", 1))
}

// TestWhatIsSensitiveHasNoSemanticCache, in no mode.
func TestWhatIsSensitiveHasNoSemanticCache(t *testing.T) {
	for _, mode := range append([]string{""}, semanticModes...) {
		semantic := "mode: " + mode
		if mode == "static" {
			semantic += ", threshold: 0.95"
		}
		for surface, want := range map[string]string{
			"sensitive: [personal]":                  "sensitive: [personal] has no semantic cache",
			"sensitive: [financial]":                 "sensitive: [financial] has no semantic cache",
			"sensitive: [medical]":                   "sensitive: [medical] has no semantic cache",
			"sensitive: [legal]":                     "sensitive: [legal] has no semantic cache",
			"sensitive: [legal, medical]":            "sensitive: [legal, medical] has no semantic cache",
			"volatility: personal":                   "volatility: personal has no semantic cache",
			"share: tenant, sensitive: [legal]":      "remove semantic (exact may stay)",
			"sensitive: [], volatility: personal":    "remove semantic (exact may stay)",
			"volatility: personal, sensitive: [lgl]": "sensitive: [lgl] has no semantic cache",
		} {
			_, err := ParsePolicy([]byte(asked(surface+", exact: {}", semantic)))
			if err == nil || !strings.Contains(err.Error(), "surfaces[docs].semantic: a surface with ") || !strings.Contains(err.Error(), want) {
				t.Errorf("%s, %s: got %v, want %q", surface, semantic, err, want)
			}
		}
	}
	for _, both := range []string{"sensitive: [legal], volatility: personal", "volatility: personal, share: user, sensitive: [medical]"} {
		_, err := ParsePolicy([]byte(asked(both, "")))
		for _, want := range []string{"has no semantic cache: an answer to", "volatility: personal has no semantic cache", "semantic needs exact"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q, too", both, err, want)
			}
		}
	}
}

func TestSemanticWarnings(t *testing.T) {
	const at = "surfaces[docs].semantic"
	for text, want := range map[string]string{
		"|":                                  "",
		"|mode: static, threshold: 0.8":      "",
		"|mode: static, threshold: 0.799999": at + ".threshold: unrelated questions reach a similarity of 0.799999; `headgate cache calibrate` finds a threshold that holds",
		"share: user, exact: {}|":            at + ": users ask the same seldom, and these answers are for the user who got them: there will be few hits; write share: tenant where an answer is the same for all",
		"|error_bound: 0.03":                 at + ".error_bound: 0.03 of all requests is more than 0.02 of the hits, which end it first; is that so?",
		"|error_bound: 0.02":                 "",
		"|hit_error_bound: 0.005": at + ".error_bound: 0.01 of all requests is more than 0.005 of the hits, which end it first; is that so?\n" +
			at + ".hit_error_bound: that more than 0.005 of the hits are wrong is found only after very many audits; do not rely on a bound below 0.02",
		"|audit: 0.1":                                   at + ".audit: in shadow the model is asked of every hit; audit counts with static and learned",
		"|mode: learned, audit: 0.1":                    "",
		"|hit_error_bound: 0.02":                        "",
		"|mode: learned, audit: 0.005":                  "",
		"|mode: learned, audit: 0.004999":               at + ".audit: where only 0.004999 of the hits are audited, whether the bounds are kept can hardly be known; 0.05 is the default",
		"share: tenant, exact: {tools: true}|":          at + ": answers with tool calls are kept, too, and their arguments are those of the first wording; is that so?",
		"|ttl: 6h":                                      "",
		"|ttl: 7h":                                      at + ".ttl: an answer is given to other wordings for 7h0m0s, and to its own for 6h0m0s; is that so?",
		"share: tenant, exact: {ttl: 1h, max_ttl: 2h}|": "",
		"share: tenant, exact: {max_ttl: 2h}|ttl: 2h":   "",
		"share: tenant, exact: {max_ttl: 2h}|ttl: 2h1s": at + ".ttl: an answer is given to other wordings for 2h0m1s, and to its own for 2h0m0s; is that so?",
		"|embedder: e5, verifier: judge":                "",
		"|embedder: judge":                              at + ".embedder: judge has no version: should another model come under its name, its vectors would be compared with the old ones; write version, and another with every change",
		"|embedder: j":                                  at + ".embedder: judge has no version: should another model come under its name, its vectors would be compared with the old ones; write version, and another with every change",
	} {
		surface, semantic, _ := strings.Cut(text, "|")
		if surface == "" {
			surface = keeping
		}
		if got := strings.Join(mustParse(t, asked(surface, semantic)).Warnings(), "\n"); got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", text, got, want)
		}
	}
	priced := strings.Replace(asked(keeping, "embedder: e5"), `version: "1"`, `version: "1", price_per_million: {input: "0.1", output: "0.2"}`, 1)
	if got, want := strings.Join(mustParse(t, priced).Warnings(), "\n"), at+".embedder: e5 has a price for output, as models for chat have; does it embed?"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestSemanticInDifferences(t *testing.T) {
	const bounds = ", aiming at no more than 0.01 of the requests and 0.02 of the hits wrong"
	for name, c := range map[string]struct{ old, new, want string }{
		"defaults": {"-", "", "+ surfaces[docs].semantic: other wordings are looked for and counted, and not answered" + bounds + ", kept for 6h0m0s"},
		"all": {
			"-", "mode: static, threshold: 0.95, error_bound: 0.005, hit_error_bound: 0.03, audit: 0.1, ttl: 1d, embedder: e5, verifier: judge, answers: 0.9",
			"+ surfaces[docs].semantic: other wordings are answered, too, from a similarity of 0.95, aiming at no more than 0.005 of the requests and 0.03 of the hits wrong, 0.1 of the hits audited, kept for 1d, embedded by e5, verified by judge, answers compared at 0.9",
		},
		"learned, gone": {"mode: learned", "-", "- surfaces[docs].semantic: other wordings are answered, too, where what was learned allows it" + bounds + ", 0.05 of the hits audited, kept for 6h0m0s"},
		"its fields":    {"", "mode: static, threshold: 0.95", "+ surfaces[docs].semantic.mode: static\n+ surfaces[docs].semantic.threshold: 0.95"},
		"changed":       {"mode: static, threshold: 0.95, audit: 0.1", "mode: learned, audit: 0.2", "~ surfaces[docs].semantic.audit: 0.1 -> 0.2\n~ surfaces[docs].semantic.mode: static -> learned\n- surfaces[docs].semantic.threshold: 0.95"},
		"nothing":       {"mode: learned", "mode: learned", ""},
	} {
		policy := func(semantic string) *Policy {
			if semantic == "-" {
				return mustParse(t, strings.Replace(asked(keeping, ""), ", semantic: {}", "", 1))
			}
			return mustParse(t, asked(keeping, semantic))
		}
		if got := differences(policy(c.old), policy(c.new)); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", name, got, c.want)
		}
	}
}

// TestPoliciesAreTextToTheState: what a policy may say is no part of the state's version, so that a command with a newer
// one stops no node: one that can't read it keeps the policy that it has.
func TestPoliciesAreTextToTheState(t *testing.T) {
	plan, err := Prepare(time.Unix(1e9, 0), []byte(asked(keeping, "mode: learned")), &Facts{}, nil, nil)
	must(t, err)
	s := NewState()
	for i, text := range [][]byte{plan.Command.GetText(), []byte("version: 1\nof_a_newer_release: true\n")} {
		c := command(uint64(i+1), &ledgerpb.SetPolicy{Text: text})
		if r, err := s.Apply(uint64(i+1), c); err != nil || r.GetCode() != "" || c.GetVersion() > 1 {
			t.Fatalf("version %d: %v, %v", c.GetVersion(), r, err)
		}
	}
	back := readState(t, snapshotOf(t, s)).Facts()
	if back.Revision() != 2 || !bytes.Contains(back.Policy.Text, []byte("newer")) || back.Hash != s.Facts().Hash {
		t.Errorf("it reads back as %+v", back)
	}
	if v := s.Capture().version(); v != 1 {
		t.Errorf("the snapshot is of version %d", v)
	}
}

// checkSemantic: what a valid surface says of its semantic cache is within what ResolvedSemantic promises.
func checkSemantic(t *testing.T, ix *Index, s *ResolvedSurface) {
	t.Helper()
	m := s.Semantic
	if m == nil {
		return
	}
	within := func(v, above, most float64) bool { return v > above && v <= most }
	known := func(name string) bool {
		return name == "" || slices.ContainsFunc(ix.Models, func(m Model) bool { return m.Name == name })
	}
	switch {
	case s.Exact == nil, len(s.Sensitive) > 0, s.Volatility == "personal", s.Personal:
		t.Fatalf("it has a semantic cache: %+v", s.Surface)
	case !slices.Contains(semanticModes, m.Mode), (m.Mode == "static") != within(m.Threshold, .5, 1), m.Mode != "static" && m.Threshold != 0:
		t.Fatalf("mode %s has threshold %v", m.Mode, m.Threshold)
	case !within(m.ErrorBound, 0, .2), !within(m.HitErrorBound, 0, .5), !within(m.Audit, 0, 1), !within(m.Answers, .5, 1), m.TTL <= 0 || m.TTL > maxLife:
		t.Fatalf("it is %+v", m)
	case !known(m.Embedder), !known(m.Verifier), m.Embedder != "" && m.Embedder == m.Verifier:
		t.Fatalf("it asks models that are none: %+v", m)
	}
}
