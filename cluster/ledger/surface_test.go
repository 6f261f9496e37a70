package ledger

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// surfaced is a policy with one surface, and what else it says.
func surfaced(surface string) string {
	return `version: 1
backends: [{name: b, url: "http://127.0.0.1:8000"}]
models: [{name: m, backends: [b]}]
plans: [{name: p}]
tenants: [{name: acme, plan: p}]
surfaces:
  - {name: docs, ` + surface + "}\n"
}

func indexOf(t *testing.T, text string) *Index {
	t.Helper()
	ix, err := mustParse(t, text).Index(time.Unix(1e9, 0), 1, Share{}, nil)
	must(t, err)
	return ix
}

func TestSurfacesAreCompiled(t *testing.T) {
	const hour, day = time.Hour, 24 * time.Hour
	plain := ResolvedExact{TTL: hour, MaxTTL: hour, Beta: 1, Normalize: "none", MaxBytes: 1 << 20}
	lasting := func(ttl time.Duration) *ResolvedExact { x := plain; x.TTL, x.MaxTTL = ttl, ttl; return &x }
	for text, want := range map[string]ResolvedSurface{
		"share: user":                        {},
		"share: tenant":                      {Shared: true},
		"exact: {}":                          {Exact: &plain},
		"volatility: static, exact: {}":      {Exact: lasting(7 * day)},
		"volatility: docs, exact: {}":        {Exact: lasting(6 * hour)},
		"volatility: live, exact: {}":        {Exact: lasting(time.Minute)},
		"volatility: personal, exact: {}":    {Exact: lasting(10 * time.Minute), Personal: true},
		"sensitive: [personal], exact: {}":   {Exact: &plain, Personal: true},
		"sensitive: [legal], exact: {}":      {Exact: &plain},
		"volatility: docs, exact: {ttl: 2d}": {Exact: lasting(2 * day)},
		"exact: {beta: 0, normalize: none, timestamps: skip, temperature: 2, max_bytes: 16777216, max_ttl: 1h}": {
			Exact: &ResolvedExact{TTL: hour, MaxTTL: hour, Normalize: "none", Temperature: 2, MaxBytes: 16 << 20},
		},
		"share: tenant, exact: {ttl: 30s, max_ttl: 1d, stale: 5m, stale_if_error: 12h, beta: 0.25, temperature: 0.7, normalize: space, timestamps: ok, tools: true, n: true, length: true, max_bytes: 1}": {
			Shared: true, Exact: &ResolvedExact{
				TTL: 30 * time.Second, MaxTTL: day, Stale: 5 * time.Minute, StaleIfError: 12 * hour, Beta: .25, Temperature: .7,
				Normalize: "space", Timestamps: true, Tools: true, N: true, Length: true, MaxBytes: 1,
			},
		},
	} {
		ix := indexOf(t, surfaced(text))
		got := ix.Surfaces["docs"]
		if got == nil || got.Surface != &ix.Policy.Surfaces[0] || len(ix.Surfaces) != 1 {
			t.Fatalf("%s: %+v of %d", text, got, len(ix.Surfaces))
		}
		want.Surface = got.Surface
		if !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: got %+v of %+v, want %+v of %+v", text, got.Exact, *got, want.Exact, want)
		}
	}
}

func TestDefaultTemperature(t *testing.T) {
	p := mustParse(t, example)
	if got := p.Models[0].Temperature(); got != .7 {
		t.Errorf("it is %v where 0.7 is written", got)
	}
	if got := p.Models[1].Temperature(); got != 1 {
		t.Errorf("it is %v where nothing is written", got)
	}
	zero := mustParse(t, strings.Replace(example, "default_temperature: 0.7", "default_temperature: 0", 1))
	if got := zero.Models[0].Temperature(); got != 0 {
		t.Errorf("it is %v where 0 is written", got)
	}
}

func TestSurfaceRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"exact: {ttl: 0s}":                                "surfaces[docs].exact.ttl: with a ttl of 0 nothing is kept; remove exact, or leave ttl out for 1h0m0s",
		"exact: {ttl: 401d}":                              "a ttl above 400d",
		"exact: {ttl: 60}":                                "is not a duration",
		"exact: {ttl: 2h, max_ttl: 1h}":                   "surfaces[docs].exact.max_ttl: 1h0m0s is below the ttl, which is 2h0m0s",
		"volatility: docs, exact: {max_ttl: 5h}":          "5h0m0s is below the ttl, which is 6h0m0s",
		"exact: {max_ttl: 401d}":                          "max_ttl above 400d",
		"exact: {stale: 401d}":                            "stale above 400d",
		"exact: {stale_if_error: 401d}":                   "stale_if_error above 400d",
		"exact: {beta: 10.1}":                             "beta is between 0",
		"exact: {beta: -1}":                               "is a decimal between",
		"exact: {temperature: 2.000001}":                  "a temperature is between 0 and 2",
		"exact: {temperature: hot}":                       "is a decimal between",
		"exact: {normalize: folded}":                      `"folded" is not one of none, space, fold; did you mean "fold"?`,
		"exact: {timestamps: true}":                       "is not one of ok, skip",
		"exact: {max_bytes: 0}":                           "0 is not between 1 and 16777216 bytes",
		"exact: {max_bytes: 16777217}":                    "is not between 1 and 16777216 bytes",
		"exact: {max_bytes: 1 MiB}":                       "must be a whole number",
		"exact: {tll: 6h}":                                `surfaces[docs].exact.tll: unknown field "tll"; did you mean "ttl"?`,
		"exact: true":                                     "must be a mapping of ttl, max_ttl",
		"volatility: personal, share: tenant":             "surfaces[docs].share: volatility: personal and share: tenant contradict each other",
		"sensitive: [legal, personal], share: tenant":     "surfaces[docs].share: sensitive: [personal] and share: tenant contradict each other",
		"volatility: daily":                               "is not one of static, docs, live, personal",
		"share: all":                                      "is not one of user, tenant",
		"exact: {tools: yes}":                             "must be true or false",
		"}\nplans: [{name: q, cached: half}]\nglobal: {":  `plans[q].cached: "half" is not one of free, metered`,
		"}\nmodels: [{name: q, default_temperature: 2.5}": "models[q].default_temperature: a temperature is between 0 and 2",
		"}\nmodels: [{name: q, prefix_minimum: -1}":       "models[q].prefix_minimum: -1 is negative",
		"}\nmodels: [{name: q, prefix_minimum: 1000001}":  "no provider's least",
		"}\nbackends: [{name: q, cache_salt: user}":       `backends[q].cache_salt: "user" is not one of tenant`,
	} {
		policy := surfaced(text)
		if section, ok := strings.CutPrefix(text, "}\n"); ok { // one of its own in the place of the policy's
			policy = "version: 1\n" + section + closing(section) + "\n"
		}
		if p, err := ParsePolicy([]byte(policy)); p != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
}

func closing(section string) string {
	if strings.HasSuffix(section, "{") {
		return "}"
	}
	return "]"
}

func TestSurfaceWarnings(t *testing.T) {
	for text, want := range map[string]string{
		"exact: {}": "",
		"volatility: live, exact: {ttl: 1m, max_ttl: 1h}":                        "",
		"volatility: live, exact: {ttl: 1m, max_ttl: 61m}":                       "surfaces[docs].exact: volatility is live, and answers are kept for up to 1h1m0s; is that so?",
		"volatility: personal, exact: {ttl: 1d}":                                 "surfaces[docs].exact: volatility is personal, and answers are kept for up to 1d; is that so?",
		"volatility: static, exact: {ttl: 300d}":                                 "",
		"sensitive: [medical], share: tenant, exact: {}":                         "surfaces[docs].share: medical answers are kept for the whole tenant: whoever of it asks the same gets the same; is that so?",
		"sensitive: [medical], share: tenant":                                    "",
		"sensitive: [medical, legal], share: user, exact: {}":                    "",
		"sensitive: [legal], volatility: live, share: tenant, exact: {ttl: 24h}": "surfaces[docs].share: legal answers are kept for the whole tenant: whoever of it asks the same gets the same; is that so?\nsurfaces[docs].exact: volatility is live, and answers are kept for up to 1d; is that so?",
	} {
		if got := strings.Join(mustParse(t, surfaced(text)).Warnings(), "\n"); got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", text, got, want)
		}
	}
}

func TestCachesInDifferences(t *testing.T) {
	for name, c := range map[string]struct{ old, new, want string }{
		"a cache with defaults": {"volatility: docs", "volatility: docs, exact: {}", "+ surfaces[docs].exact: answers are kept for 6h0m0s, for each user"},
		"one that says all": {
			"share: tenant", "share: tenant, exact: {ttl: 6h, max_ttl: 2d, stale: 10m, stale_if_error: 1d, beta: 1.5, temperature: 0.3, normalize: fold, timestamps: ok, tools: true, n: true, length: true, max_bytes: 65536}",
			"+ surfaces[docs].exact: answers are kept for 6h0m0s, up to 2d where they are asked for, 10m0s more while they are refreshed, 1d more where the model fails, beta 1.5, up to temperature 0.3, normalize fold, with times of the day, with tool calls, with several choices, cut off ones too, of 65536 bytes at most, for the whole tenant",
		},
		"one that goes": {"exact: {ttl: 1d}", "share: user", "- surfaces[docs].exact: answers are kept for 1d, for each user\n+ surfaces[docs].share: user"},
		"its fields":    {"exact: {ttl: 1d, n: true}", "exact: {ttl: 2d, beta: 0}", "+ surfaces[docs].exact.beta: 0\n- surfaces[docs].exact.n: true\n~ surfaces[docs].exact.ttl: 1d -> 2d"},
		"nothing":       {"exact: {}", "exact: {}", ""},
	} {
		var lines []string
		for _, change := range Diff(mustParse(t, surfaced(c.old)), mustParse(t, surfaced(c.new))) {
			lines = append(lines, fmt.Sprint(change))
		}
		if got := strings.Join(lines, "\n"); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", name, got, c.want)
		}
	}
}
