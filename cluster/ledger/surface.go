package ledger

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// maxLife bounds how long a policy may have an answer kept.
	maxLife = 400 * 24 * time.Hour
	// defaultMaxBytes is the largest answer that is kept where a surface says nothing, and mostMaxBytes what it may say.
	defaultMaxBytes = 1 << 20
	mostMaxBytes    = 16 << 20
	// maxTemperature is the most that model servers take.
	maxTemperature = 2 * factorOne
	maxBeta        = 10 * factorOne
	// maxPrefix bounds a provider's least prefix, in tokens.
	maxPrefix = 1_000_000
)

// Names of what a surface, a plan and a backend may say.
var (
	shareNames      = []string{"user", "tenant"}
	volatilityNames = []string{"static", "docs", "live", "personal"}
	sensitiveNames  = []string{"personal", "financial", "medical", "legal"}
	normalizeNames  = []string{"none", "space", "fold"}
	timestampNames  = []string{"ok", "skip"}
	cachedNames     = []string{"free", "metered"}
	saltNames       = []string{"tenant"}
)

// Surface is a named product entry.
type Surface struct {
	Name            string   `yaml:"name"`
	TemplateVersion string   `yaml:"template_version,omitempty"`
	Share           string   `yaml:"share,omitempty"`      // user | tenant; absent: user
	Sensitive       []string `yaml:"sensitive,omitempty"`  // personal, financial, medical, legal
	Volatility      string   `yaml:"volatility,omitempty"` // static | docs | live | personal
	Exact           *Exact   `yaml:"exact,omitempty"`      // absent: answers are not kept
	// Semantic: answers are for other wordings, too. absent: they are not.
	Semantic *Semantic `yaml:"semantic,omitempty"`
}

// Exact says that answers to a surface's requests are kept for the same requests, which and for how long, as
// written; see Index.Surfaces for what it becomes.
type Exact struct {
	TTL          *Duration `yaml:"ttl,omitempty"`            // absent: by the surface's volatility
	MaxTTL       Duration  `yaml:"max_ttl,omitempty"`        // to which hits extend it; absent: the ttl
	Stale        Duration  `yaml:"stale,omitempty"`          // after that, served while it is refreshed
	StaleIfError Duration  `yaml:"stale_if_error,omitempty"` // after that, served where the model fails
	Beta         *Factor   `yaml:"beta,omitempty"`           // how early it is refreshed; absent: 1
	Temperature  Factor    `yaml:"temperature,omitempty"`    // the highest whose answers are kept
	Normalize    string    `yaml:"normalize,omitempty"`      // none | space | fold
	Timestamps   string    `yaml:"timestamps,omitempty"`     // ok | skip; absent: skip
	Tools        bool      `yaml:"tools,omitempty"`          // answers with tool calls are kept
	N            bool      `yaml:"n,omitempty"`              // answers with several choices are kept
	Length       bool      `yaml:"length,omitempty"`         // answers that were cut off are kept
	MaxBytes     *int64    `yaml:"max_bytes,omitempty"`      // the largest answer that is kept; absent: 1 MiB
}

// ResolvedSurface is a surface as it applies to a request. Nothing of it may be changed.
type ResolvedSurface struct {
	*Surface
	Shared bool // its users share answers within their tenant
	// Personal: what it answers depends on who asks, so that without a user nothing is kept.
	Personal bool
	Exact    *ResolvedExact // nil: answers are not kept. It hides Surface.Exact
	// Semantic: nil where answers are for their own wording only. It hides Surface.Semantic. Where there is one there is an Exact.
	Semantic *ResolvedSemantic
}

// ResolvedExact is Exact with its defaults in place.
type ResolvedExact struct {
	TTL          time.Duration // > 0
	MaxTTL       time.Duration // ≥ TTL
	Stale        time.Duration
	StaleIfError time.Duration
	Beta         float64 // 0: not refreshed early
	Temperature  float64
	Normalize    string // none | space | fold
	Timestamps   bool   // answers that hold today's date or a time of the day are kept
	Tools        bool
	N            bool
	Length       bool
	MaxBytes     int64
}

// defaultTTL is how long answers of a volatility are kept where a surface names no ttl.
func defaultTTL(volatility string) time.Duration {
	switch volatility {
	case "static":
		return 7 * 24 * time.Hour
	case "docs":
		return 6 * time.Hour
	case "live":
		return time.Minute
	case "personal":
		return 10 * time.Minute
	}
	return time.Hour
}

// ttl is how long answers are kept.
func (s *Surface) ttl() time.Duration {
	if s.Exact.TTL != nil {
		return time.Duration(*s.Exact.TTL)
	}
	return defaultTTL(s.Volatility)
}

func (s *Surface) shared() bool { return s.Share == "tenant" }

// personal says what makes the surface personal, as a policy writes it; "" where nothing does.
func (s *Surface) personal() string {
	switch {
	case s.Volatility == "personal":
		return "volatility: personal"
	case slices.Contains(s.Sensitive, "personal"):
		return "sensitive: [personal]"
	}
	return ""
}

// resolve compiles a valid surface. models are by name and alias.
func (s *Surface) resolve(models map[string]*Model) *ResolvedSurface {
	r := &ResolvedSurface{Surface: s, Shared: s.shared(), Personal: s.personal() != "", Semantic: s.resolveSemantic(models)}
	x := s.Exact
	if x == nil {
		return r
	}
	r.Exact = &ResolvedExact{
		TTL: s.ttl(), MaxTTL: max(s.ttl(), time.Duration(x.MaxTTL)), Stale: time.Duration(x.Stale), StaleIfError: time.Duration(x.StaleIfError),
		Beta: 1, Temperature: x.Temperature.float(), Normalize: x.normalize(), Timestamps: x.Timestamps == "ok",
		Tools: x.Tools, N: x.N, Length: x.Length, MaxBytes: defaultMaxBytes,
	}
	if x.Beta != nil {
		r.Exact.Beta = x.Beta.float()
	}
	if x.MaxBytes != nil {
		r.Exact.MaxBytes = *x.MaxBytes
	}
	return r
}

func (x *Exact) normalize() string {
	if x.Normalize == "" {
		return "none"
	}
	return x.Normalize
}

// float is the factor as the nearest binary fraction, which is what its decimal text would be read as.
func (f Factor) float() float64 { return float64(f) / float64(factorOne) }

// Temperature is that of a request which names none.
func (m *Model) Temperature() float64 {
	if m.DefaultTemperature == nil {
		return 1
	}
	return m.DefaultTemperature.float()
}

// words is the cache as one would say it.
func (s *Surface) words() string {
	x := s.Exact
	var b strings.Builder
	fmt.Fprintf(&b, "answers are kept for %s", Duration(s.ttl()))
	for _, f := range [...]struct {
		is   bool
		what string
	}{
		{x.MaxTTL > 0, fmt.Sprintf("up to %s where they are asked for", x.MaxTTL)},
		{x.Stale > 0, fmt.Sprintf("%s more while they are refreshed", x.Stale)},
		{x.StaleIfError > 0, fmt.Sprintf("%s more where the model fails", x.StaleIfError)},
		{x.Beta != nil, fmt.Sprintf("beta %s", valueOr(x.Beta, 0))},
		{x.Temperature > 0, fmt.Sprintf("up to temperature %s", x.Temperature)},
		{x.normalize() != "none", fmt.Sprintf("normalize %s", x.normalize())},
		{x.Timestamps == "ok", "with times of the day"},
		{x.Tools, "with tool calls"},
		{x.N, "with several choices"},
		{x.Length, "cut off ones too"},
		{x.MaxBytes != nil, fmt.Sprintf("of %d bytes at most", valueOr(x.MaxBytes, 0))},
	} {
		if f.is {
			b.WriteString(", " + f.what)
		}
	}
	if s.shared() {
		return b.String() + ", for the whole tenant"
	}
	return b.String() + ", for each user"
}

// surface checks one surface. models are all names and aliases.
func (c *checker) surface(at place, s *Surface, seen, models map[string]bool) {
	c.name(at.field("name"), s.Name, seen)
	c.oneOf(at.field("share"), s.Share, shareNames, true)
	c.oneOf(at.field("volatility"), s.Volatility, volatilityNames, true)
	for i, w := range s.Sensitive {
		c.oneOf(at.item("sensitive", i, ""), w, sensitiveNames, false)
	}
	if s.Exact != nil {
		c.exact(at.field("exact"), s)
	}
	if s.Semantic != nil {
		c.semantic(at.field("semantic"), s, models)
	}
	if why := s.personal(); why != "" && s.shared() {
		c.add(at.field("share"), "%s and share: tenant contradict each other: one user would get another's answer; write share: user", why)
	}
}

func (c *checker) exact(at place, s *Surface) {
	x := s.Exact
	ttl := s.ttl()
	switch {
	case x.TTL != nil && *x.TTL == 0:
		c.add(at.field("ttl"), "with a ttl of 0 nothing is kept; remove exact, or leave ttl out for %s", Duration(defaultTTL(s.Volatility)))
	case ttl > maxLife:
		c.add(at.field("ttl"), "a ttl above %s is not allowed", Duration(maxLife))
	}
	if x.MaxTTL != 0 && time.Duration(x.MaxTTL) < ttl {
		c.add(at.field("max_ttl"), "%s is below the ttl, which is %s: an answer that is asked for would end before one that is not", x.MaxTTL, Duration(ttl))
	}
	for _, f := range [...]struct {
		name string
		d    Duration
	}{{"max_ttl", x.MaxTTL}, {"stale", x.Stale}, {"stale_if_error", x.StaleIfError}} {
		if time.Duration(f.d) > maxLife {
			c.add(at.field(f.name), "%s above %s is not allowed", f.name, Duration(maxLife))
		}
	}
	if x.Beta != nil && *x.Beta > maxBeta {
		c.add(at.field("beta"), "beta is between 0 (never early) and %s; 1 is right where a fill takes as long as it did", Factor(maxBeta))
	}
	if x.Temperature > maxTemperature {
		c.add(at.field("temperature"), "a temperature is between 0 and %s", Factor(maxTemperature))
	}
	c.oneOf(at.field("normalize"), x.Normalize, normalizeNames, true)
	c.oneOf(at.field("timestamps"), x.Timestamps, timestampNames, true)
	if x.MaxBytes != nil && (*x.MaxBytes < 1 || *x.MaxBytes > mostMaxBytes) {
		c.add(at.field("max_bytes"), "%d is not between 1 and %d bytes", *x.MaxBytes, mostMaxBytes)
	}
}

// surfaces warns of what of surfaces looks like a mistake.
func (w *warnings) surfaces(p *Policy) {
	models := p.modelsByName()
	for i := range p.Surfaces {
		s, at := &p.Surfaces[i], place{"", "$"}.item("surfaces", i, p.Surfaces[i].Name)
		if s.Exact == nil {
			continue
		}
		for _, what := range s.Sensitive {
			if s.shared() && what != "personal" { // that is refused
				w.add(at.field("share"), "%s answers are kept for the whole tenant: whoever of it asks the same gets the same; is that so?", what)
			}
		}
		longest := max(s.ttl(), time.Duration(s.Exact.MaxTTL))
		if most := 60 * defaultTTL(s.Volatility); (s.Volatility == "live" || s.Volatility == "personal") && longest > most {
			w.add(at.field("exact"), "volatility is %s, and answers are kept for up to %s; is that so?", s.Volatility, Duration(longest))
		}
		if s.Semantic != nil {
			w.semantic(at.field("semantic"), s, models)
		}
	}
}

// cachesByPath are the surfaces that keep answers, by the path that differences call their caches by.
func (p *Policy) cachesByPath() map[string]*Surface {
	out := map[string]*Surface{}
	for i := range p.Surfaces {
		if s := &p.Surfaces[i]; s.Exact != nil {
			out["surfaces["+s.Name+"].exact"] = s
		}
	}
	return out
}
