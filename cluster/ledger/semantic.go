package ledger

import (
	"fmt"
	"maps"
	"strings"
	"time"
)

const (
	// leastSimilarity is what a similarity of a policy must be above: what is not is a distance.
	leastSimilarity = factorOne / 2
	// looseSimilarity is that below which a static threshold is warned of: unrelated questions reach it.
	looseSimilarity = factorOne * 8 / 10

	defaultErrorBound Factor = 10_000
	mostErrorBound    Factor = 200_000
	defaultHitBound   Factor = 20_000
	mostHitBound      Factor = 500_000
	defaultAudit      Factor = 50_000
	defaultAnswers    Factor = 920_000

	// leastAudit is the share of audits below which a warning says that they tell next to nothing.
	leastAudit Factor = 5_000
)

// builtinEmbedder is what a policy calls the model that is in the program.
const builtinEmbedder = "builtin"

var semanticModes = []string{"shadow", "static", "learned"}

// Semantic says that a surface's answers are given to other wordings of the same question, too, as written; see
// Index.Surfaces for what it becomes.
type Semantic struct {
	Mode          string    `yaml:"mode,omitempty"`            // shadow | static | learned; absent: shadow
	Threshold     *Factor   `yaml:"threshold,omitempty"`       // of static only: the least similarity
	ErrorBound    *Factor   `yaml:"error_bound,omitempty"`     // the most of all requests that may be answered wrongly; absent: 0.01
	HitErrorBound *Factor   `yaml:"hit_error_bound,omitempty"` // the most of the hits that may be wrong; absent: 0.02
	Audit         *Factor   `yaml:"audit,omitempty"`           // the share of hits of which the model is asked all the same; absent: 0.05
	TTL           *Duration `yaml:"ttl,omitempty"`             // absent: as Exact's
	Embedder      string    `yaml:"embedder,omitempty"`        // a model of the policy; absent, or builtin: the program's own
	Verifier      string    `yaml:"verifier,omitempty"`        // a model of the policy; absent: none
	Answers       *Factor   `yaml:"answers,omitempty"`         // from which similarity two answers say the same; absent: 0.92
}

// ResolvedSemantic is Semantic with its defaults in place. A similarity is the cosine of two texts' vectors: 1 is the same.
type ResolvedSemantic struct {
	Mode          string        // shadow | static | learned
	Threshold     float64       // of static, in (0.5, 1]: the least similarity of a hit; else 0
	ErrorBound    float64       // in (0, 0.2], of all requests
	HitErrorBound float64       // in (0, 0.5], of the hits
	Audit         float64       // in (0, 1], of the hits
	TTL           time.Duration // > 0
	Embedder      string        // the name of a model of the policy, never an alias; "": the program's own
	Verifier      string        // the name of a model of the policy, never an alias; "": none
	Answers       float64       // in (0.5, 1]: two answers as similar say the same
}

// misnamed says what to write instead of a name that others use.
func (*Semantic) misnamed(name string) string {
	const similarity = "write threshold, with mode: static, as a similarity: 1 is the same text, and a distance is 1 less the similarity"
	switch n := strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(name)); {
	case strings.Contains(n, "answer"): // which is a similarity, too
		return "write answers for the similarity from which two answers say the same"
	case strings.Contains(n, "distance"), strings.Contains(n, "similarity"), strings.Contains(n, "score"), strings.Contains(n, "cutoff"):
		return similarity
	case n == "delta", n == "maxerror", n == "errorrate":
		return "write error_bound for the most of all requests that may be answered wrongly, and hit_error_bound for that of the hits"
	case n == "model", strings.Contains(n, "embedding"):
		return "write embedder: the name of a model of this policy, or builtin"
	case n == "enabled":
		return "a surface without semantic has it off; write mode: shadow, static or learned"
	}
	return ""
}

// decimal is between what a share, a similarity or a pressure of a policy may be, and an example.
type decimal struct {
	what        string
	above, most Factor
	example     Factor
}

// shareOf is what a field may be; ok says whether it is such a field.
func (*Semantic) shareOf(field string) (s decimal, ok bool) {
	switch field {
	case "threshold":
		return decimal{"a similarity", leastSimilarity, factorOne, 950_000}, true
	case "answers":
		return decimal{"a similarity", leastSimilarity, factorOne, defaultAnswers}, true
	case "error_bound":
		return decimal{"a share", 0, mostErrorBound, defaultErrorBound}, true
	case "hit_error_bound":
		return decimal{"a share", 0, mostHitBound, defaultHitBound}, true
	case "audit":
		return decimal{"a share", 0, factorOne, defaultAudit}, true
	}
	return s, false
}

// mistaken says what to write instead of a value that is no decimal.
func (m *Semantic) mistaken(field, value string) string {
	if s, ok := m.shareOf(field); ok {
		return s.mistaken(value)
	}
	return ""
}

// mistaken says what to write instead of a value that is no decimal.
func (s decimal) mistaken(value string) string {
	var f Factor
	if value == "" || f.parse(scalar{text: value}) == nil {
		return ""
	}
	between := fmt.Sprintf("this is %s above %s and at most %s", s.what, s.above, s.most)
	if number, percent := strings.CutSuffix(value, "%"); percent && f.parse(scalar{text: strings.TrimSpace(number)}) == nil && f%100 == 0 {
		if f /= 100; f > s.above && f <= s.most {
			return fmt.Sprintf("%.20s is a percentage, and %s: write %s", value, between, f)
		}
	}
	return fmt.Sprintf("%.20q is no decimal with at most six digits behind the point, and %s, as in %s", value, between, s.example)
}

// mistaken says of a semantic cache without a value, which looks as if it were on, what to write.
func (*Surface) mistaken(field, value string) string {
	if field != "semantic" || value != "" {
		return ""
	}
	return "without a value it is off; write semantic: {} for mode: shadow, or remove it"
}

func (m *Semantic) mode() string {
	if m.Mode == "" {
		return semanticModes[0]
	}
	return m.Mode
}

// builtin says that the program's own model embeds.
func (m *Semantic) builtin() bool { return m.Embedder == "" || m.Embedder == builtinEmbedder }

// semanticTTL is how long answers are kept for other wordings, of a surface that has them.
func (s *Surface) semanticTTL() time.Duration {
	if s.Semantic.TTL != nil {
		return time.Duration(*s.Semantic.TTL)
	}
	return s.ttl()
}

// resolveSemantic compiles what a valid surface says of it; nil where it says nothing.
func (s *Surface) resolveSemantic(models map[string]*Model) *ResolvedSemantic {
	m := s.Semantic
	if m == nil {
		return nil
	}
	r := &ResolvedSemantic{
		Mode: m.mode(), Threshold: valueOr(m.Threshold, 0).float(), ErrorBound: valueOr(m.ErrorBound, defaultErrorBound).float(),
		HitErrorBound: valueOr(m.HitErrorBound, defaultHitBound).float(), Audit: valueOr(m.Audit, defaultAudit).float(),
		TTL: s.semanticTTL(), Answers: valueOr(m.Answers, defaultAnswers).float(),
	}
	if !m.builtin() {
		r.Embedder = models[m.Embedder].Name
	}
	if m.Verifier != "" {
		r.Verifier = models[m.Verifier].Name
	}
	return r
}

// modelsByName are the models, by name and by alias.
func (p *Policy) modelsByName() map[string]*Model {
	out := make(map[string]*Model, len(p.Models))
	for i := range p.Models {
		m := &p.Models[i]
		out[m.Name] = m
		for _, a := range m.Aliases {
			out[a] = m
		}
	}
	return out
}

// semanticWords is the semantic cache as one would say it.
func (s *Surface) semanticWords() string {
	m := s.Semantic
	var b strings.Builder
	switch m.mode() {
	case "static":
		fmt.Fprintf(&b, "other wordings are answered, too, from a similarity of %s", valueOr(m.Threshold, 0))
	case "learned":
		b.WriteString("other wordings are answered, too, where what was learned allows it")
	default:
		b.WriteString("other wordings are looked for and counted, and not answered")
	}
	fmt.Fprintf(&b, ", aiming at no more than %s of the requests and %s of the hits wrong", valueOr(m.ErrorBound, defaultErrorBound), valueOr(m.HitErrorBound, defaultHitBound))
	if m.mode() != "shadow" {
		fmt.Fprintf(&b, ", %s of the hits audited", valueOr(m.Audit, defaultAudit))
	}
	fmt.Fprintf(&b, ", kept for %s", Duration(s.semanticTTL()))
	if !m.builtin() {
		b.WriteString(", embedded by " + m.Embedder)
	}
	if m.Verifier != "" {
		b.WriteString(", verified by " + m.Verifier)
	}
	if m.Answers != nil {
		fmt.Fprintf(&b, ", answers compared at %s", *m.Answers)
	}
	return b.String()
}

// semanticsByPath are the surfaces with a semantic cache, by the path that differences call those by.
func (p *Policy) semanticsByPath() map[string]*Surface {
	out := map[string]*Surface{}
	for i := range p.Surfaces {
		if s := &p.Surfaces[i]; s.Semantic != nil {
			out["surfaces["+s.Name+"].semantic"] = s
		}
	}
	return out
}

// semantic checks what a surface says of it. models are all names and aliases.
func (c *checker) semantic(at place, s *Surface, models map[string]bool) {
	m := s.Semantic
	if len(s.Sensitive) > 0 {
		c.add(at, "a surface with sensitive: [%s] has no semantic cache: an answer to a question that is only similar would do harm; remove semantic (exact may stay), or a word of sensitive that is not so", strings.Join(s.Sensitive, ", "))
	}
	if s.Volatility == "personal" {
		c.add(at, "a surface with volatility: personal has no semantic cache: what it answers depends on who asks; remove semantic (exact may stay), or write another volatility")
	}
	if s.Exact == nil {
		c.add(at, "semantic needs exact beside it, which says which answers are kept; write exact: {}, or remove semantic")
	}
	c.oneOf(at.field("mode"), m.Mode, semanticModes, true)
	c.threshold(at.field("threshold"), m)
	c.similarity(at.field("answers"), m.Answers)
	c.part(at.field("error_bound"), m.ErrorBound, mostErrorBound, "the most of all requests that may be answered wrongly")
	c.part(at.field("hit_error_bound"), m.HitErrorBound, mostHitBound, "the most of the hits that may be wrong")
	c.part(at.field("audit"), m.Audit, factorOne, "the share of the hits of which the model is asked all the same")
	if d := m.TTL; d != nil && *d == 0 {
		c.add(at.field("ttl"), "with a ttl of 0 nothing is kept; remove semantic, or leave ttl out for that of exact")
	} else if d != nil && time.Duration(*d) > maxLife {
		c.add(at.field("ttl"), "a ttl above %s is not allowed", Duration(maxLife))
	}
	c.semanticModels(at, m, models)
}

// threshold checks that there is one where it counts, and nowhere else.
func (c *checker) threshold(at place, m *Semantic) {
	switch {
	case m.Mode == "static" && m.Threshold == nil:
		c.add(at, "mode static needs a threshold, the least similarity of a hit, as in threshold: 0.95; `headgate cache calibrate` finds one")
	case m.Mode == "static":
		c.similarity(at, m.Threshold)
	case m.Threshold != nil && m.mode() == "shadow":
		c.add(at, "a threshold does nothing with mode: shadow, in which nothing is served; remove it, or write mode: static")
	case m.Threshold != nil && m.Mode == "learned":
		c.add(at, "a threshold does nothing with mode: learned, which finds its own; remove it, or write mode: static")
	}
}

// similarity checks a similarity that a policy may leave out.
func (c *checker) similarity(at place, f *Factor) {
	switch {
	case f == nil:
	case *f < leastSimilarity:
		c.add(at, "%s looks like a distance, and this is a similarity, where 1 is the same: write 1 less the distance, here %s; a similarity is above %s and at most 1", *f, factorOne-*f, leastSimilarity)
	case *f > 100*leastSimilarity && *f <= 100*factorOne:
		c.add(at, "%s looks like a percentage: write %s; a similarity is above %s and at most 1", *f, *f/100, leastSimilarity)
	case *f == leastSimilarity, *f > factorOne:
		c.add(at, "%s is no similarity of a policy, which is above %s and at most 1, as in 0.95", *f, leastSimilarity)
	}
}

// part checks a share that a policy may leave out.
func (c *checker) part(at place, f *Factor, most Factor, what string) {
	if f != nil && (*f == 0 || *f > most) {
		c.add(at, "%s is not above 0 and at most %s: it is %s", *f, most, what)
	}
}

// semanticModels checks the models that a semantic cache asks.
func (c *checker) semanticModels(at place, m *Semantic, models map[string]bool) {
	switch {
	case m.Embedder == builtinEmbedder && models[builtinEmbedder]:
		c.add(at.field("embedder"), "builtin is the program's own model, and a model of the policy is called so, too; leave embedder out for the program's own, or call the other by another name or alias")
	case !m.builtin():
		known := maps.Clone(models)
		known[builtinEmbedder] = true // may be what was meant
		c.ref(at.field("embedder"), "model", m.Embedder, known)
	}
	if m.Verifier == "" {
		return
	}
	if c.ref(at.field("verifier"), "model", m.Verifier, models); c.embedders[c.models[m.Verifier]] {
		c.add(at.field("verifier"), "%s embeds for a surface of this policy, and a verifier answers in words; name a model for chat", m.Verifier)
	}
}

// semanticEmbedders are the models of the policy that embed for a surface.
func (p *Policy) semanticEmbedders(models map[string]*Model) map[*Model]bool {
	out := map[*Model]bool{}
	for i := range p.Surfaces {
		if m := p.Surfaces[i].Semantic; m != nil && !m.builtin() {
			out[models[m.Embedder]] = true
		}
	}
	delete(out, nil) // not found, which is said elsewhere
	return out
}

// semantic warns of what of a surface's looks like a mistake. models are by name and alias.
func (w *warnings) semantic(at place, s *Surface, models map[string]*Model) {
	m := s.Semantic
	if m.Mode == "static" && m.Threshold != nil && *m.Threshold < looseSimilarity {
		w.add(at.field("threshold"), "unrelated questions reach a similarity of %s; `headgate cache calibrate` finds a threshold that holds", *m.Threshold)
	}
	if !s.shared() {
		w.add(at, "users ask the same seldom, and these answers are for the user who got them: there will be few hits; write share: tenant where an answer is the same for all")
	}
	if e, h := valueOr(m.ErrorBound, defaultErrorBound), valueOr(m.HitErrorBound, defaultHitBound); e > h {
		w.add(at.field("error_bound"), "%s of all requests is more than %s of the hits, which end it first; is that so?", e, h)
	}
	if h := m.HitErrorBound; h != nil && *h < defaultHitBound {
		w.add(at.field("hit_error_bound"), "that more than %s of the hits are wrong is found only after very many audits; do not rely on a bound below %s", *h, defaultHitBound)
	}
	switch a := m.Audit; {
	case a != nil && m.mode() == "shadow":
		w.add(at.field("audit"), "in shadow the model is asked of every hit; audit counts with static and learned")
	case a != nil && *a < leastAudit:
		w.add(at.field("audit"), "where only %s of the hits are audited, whether the bounds are kept can hardly be known; 0.05 is the default", *a)
	}
	if x := s.Exact; x != nil && x.Tools {
		w.add(at, "answers with tool calls are kept, too, and their arguments are those of the first wording; is that so?")
	}
	if ttl, most := s.semanticTTL(), max(s.ttl(), time.Duration(s.Exact.MaxTTL)); ttl > most {
		w.add(at.field("ttl"), "an answer is given to other wordings for %s, and to its own for %s; is that so?", Duration(ttl), Duration(most))
	}
	if e := models[m.Embedder]; e != nil && !m.builtin() {
		if e.Version == "" {
			w.add(at.field("embedder"), "%s has no version: should another model come under its name, its vectors would be compared with the old ones; write version, and another with every change", e.Name)
		}
		if !e.Gratis && valueOr(e.Price.Output, 0) != 0 {
			w.add(at.field("embedder"), "%s has a price for output, as models for chat have; does it embed?", e.Name)
		}
	}
}
