package ledger

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"pgregory.net/rapid"

	"headgate/limiter"
)

const zeroHash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

// example has every section and every field that exists.
var example = `version: 1
backends:
  - {name: vllm-a, url: "http://127.0.0.1:8000", slots: 64, api_key_env: VLLM_A_KEY, slot_tokens: 8192, learn: {min: 8}, metrics_path: /stats, timeouts: {connect: 2s, first_byte: 30s, idle: 60s}}
  - {name: pods, url: "dns://vllm.svc:8000", ca_file: ca.pem, cert_file: c.pem, key_file: k.pem, server_name: vllm, health_path: /health, cache_salt: tenant, metrics_path: none}
  - {name: bought, url: "https://api.example", kind: openai, api_key_file: /run/key, slots: 16, overflow: true, models: {small: gpt-5-mini}}
models:
  - {name: llama-8b, aliases: [small], backends: [vllm-a, pods, bought], affinity: session, upstream_model: meta-llama/Llama-3.1-8B-Instruct, version: "2026-05", context: 131072,
     price_per_million: {input: "0.20", cached_input: "0.02", cache_write: "0.25", cache_write_1h: "0.40", output: "0.60"}, price_flat: {request: "0.000001", image: "0.001", audio_second: "0.0001"},
     prices: [{from: 2027-01-01, price_per_million: {input: "0.10", output: "0.30"}}, {from: 2028-01-01T12:00:00Z, free: true}],
     default_output_tokens: 512, image_tokens: 900, audio_tokens: 700, bytes_per_token: 3.5, fallback: [llama-1b], default_temperature: 0.7, prefix_minimum: 1024}
  - {name: llama-1b, backends: [vllm-a], free: true}
  - {name: e5, backends: [pods], version: "1", free: true}
plans:
  - name: pro
    tier: 2
    limits:
      - {name: org-tokens,   scope: org, unit: tokens,      rate: 60000/min, burst: 60000, unavailable: local}
      - {name: key-requests, scope: key, unit: requests,    rate: 600/min,   burst: 50, wait: 500ms}
      - {name: key-inflight, scope: key, unit: concurrency, max: 8}
      - {name: org-day,      scope: org, unit: requests,    algorithm: fixed_window, rate: 100000/day, shadow: true}
      - {name: money,        scope: org+model, unit: usd,   rate: 10.00/min, burst: "2.50"}
      - {name: per-model,    scope: model, unit: requests,  rate: 10/s}
    budgets:
      - {name: org-month, scope: org, amount: "250.00", period: month, time_zone: Europe/Berlin, mode: strict, alerts: [50, 90], spike: {factor: 5, floor: "0.50", kill: true}, emergency_per_node: "1.00"}
      - {name: user-30d, scope: user+model, amount: "1.5", period: rolling, window: 30d}
      - {name: small-ever, scope: model, amount: "0.00", period: none}
    oversize: refuse
    timeout: 60s
    cached: metered
    ramp: [{after: 0d, factor: 0.2}, {after: 14d, factor: 1.0}]
tenants:
  - {name: acme, plan: pro, class: interactive, since: 2026-01-15, standing: 0.5, content_log: {mode: sample, sample: 0.1, retention: 30d, redact: [email, "[0-9]{9}"], path: /var/log/hg}}
  - {name: old, plan: pro}
keys:
  - {id: k1, tenant: acme, hash: "` + zeroHash + `", user: u, class: background, expires: 2027-01-01, models: [llama-8b], routes: [chat], surfaces: [docs-bot], assert_user: true}
surfaces:
  - {name: docs-bot, template_version: "7", share: tenant, sensitive: [], volatility: docs,
     exact: {ttl: 6h, max_ttl: 2d, stale: 10m, stale_if_error: 1d, beta: 1.5, temperature: 0.3, normalize: fold, timestamps: ok, tools: true, n: true, length: true, max_bytes: 65536},
     semantic: {mode: static, threshold: 0.93, error_bound: 0.005, hit_error_bound: 0.04, audit: 0.1, ttl: 5h, embedder: e5, verifier: small, answers: 0.9}}
  - {name: plain}
global: {limits: [{name: fleet, scope: global, unit: tokens, rate: 6000000/min, burst: 2000000}], budgets: [{name: fleet-day, scope: global, amount: "1000.00", period: day}]}
notify: {webhook: "https://hooks.example/headgate", token_env: HOOK_TOKEN}
capacity:
  target_wait: 1500ms
  max_bytes: 1073741824
  keepalive: 15s
  weights: {interactive: 70, background: 25, best_effort: 5}
  shed: [{at: 0.75, above_tokens: 32768}, {at: 0.85, below_tier: 1}, {at: 0.9, class: background}]
ladder:
  - {rung: shed_best_effort, at: 0.5, off_at: 0.4, for: 1s}
  - {rung: stale_cache, at: 0.5}
  - {rung: smaller_model, at: 0.7, for: 10s, models: [small]}
  - {rung: drop_optional}
  - {rung: cut_max_tokens, at: 0.9, max_tokens: 1024}
  - {rung: shed_cost, above_tokens: 16384}
  - {rung: static_answer, at: 1, text: "We are busy.\nPlease come back."}
routes:
  - name: cheap
    match: {models: [llama-8b], surfaces: [docs-bot], classes: [background, best_effort], tenants: [acme], below_tier: 3,
      input_tokens: {above: 0, below: 500}, output_tokens: {below: 100}, headers: {X-Team: "7", x-kind: small talk}}
    to: [{model: llama-1b}]
  - {name: canary, match: {models: [small]}, to: [{model: llama-8b, weight: 95}, {model: llama-1b, weight: 5}], sticky: key}
`

func mustParse(t testing.TB, text string) *Policy {
	t.Helper()
	p, err := ParsePolicy([]byte(text))
	if err != nil {
		t.Fatalf("ParsePolicy: %v", err)
	}
	return p
}

func TestParseExample(t *testing.T) {
	p := mustParse(t, example)
	if got := *p.Models[0].Price.Input; got != 200_000_000 {
		t.Errorf("input price is %d nano-dollars, want 200000000", got)
	}
	if got := p.Models[0].BytesPerToken; got != 3_500_000 {
		t.Errorf("bytes per token are %d millionths", got)
	}
	if got := time.Duration(p.Plans[0].Ramp[1].After); got != 14*24*time.Hour {
		t.Errorf("ramp after %v", got)
	}
	if d := Diff(p, p); len(d) != 0 {
		t.Errorf("a policy differs from itself: %v", d)
	}
}

func TestParseRoundTrip(t *testing.T) {
	p := mustParse(t, example)
	text, err := yaml.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	if d := Diff(p, mustParse(t, string(text))); len(d) != 0 {
		t.Errorf("after writing and reading back: %v", d)
	}
}

func TestParseInlineEmptySections(t *testing.T) {
	p := mustParse(t, `version: 1
backends: [{name: b, url: "http://127.0.0.1:1", slots: 256}]
models:
  - {name: m, backends: [b], version: "1", context: 100000, price_per_million: {input: "1.00", cached_input: "1.00", output: "1.00"}, default_output_tokens: 16}
plans:
  - name: p
    tier: 1
    limits: []
    budgets: []
tenants: [{name: dev, plan: p}]
surfaces: []

`)
	if len(p.Tenants) != 1 {
		t.Errorf("tenants: %v", p.Tenants)
	}
}

func TestParseRefuses(t *testing.T) {
	replace := func(pairs ...string) string {
		for i := 0; i < len(pairs); i += 2 {
			if !strings.Contains(example, pairs[i]) {
				t.Fatalf("the example lacks %q", pairs[i])
			}
		}
		return strings.NewReplacer(pairs...).Replace(example)
	}
	for name, c := range map[string]struct{ text, want string }{
		"unknown field":      {replace("oversize: refuse", "oversized: refuse"), `unknown field "oversized"; did you mean "oversize"`},
		"its line":           {replace("oversize: refuse", "oversized: refuse"), "line 27:"},
		"money as a float":   {replace(`input: "0.20"`, `input: 0.20`), "quoted decimal string"},
		"money with dust":    {replace(`input: "0.20"`, `input: "0.2000000001"`), "at most nine decimals"},
		"duplicate key":      {replace("tier: 2", "tier: 2\n    tier: 3"), "line 16: plans[pro].tier: \"tier\" stands here twice; the first is on line 15"},
		"semantic cache":     {replace("{name: plain}", "{name: plain, semantic: {}}"), "surfaces[plain].semantic: semantic needs exact"},
		"fallback to itself": {replace("fallback: [llama-1b]", "fallback: [llama-8b]"), "fall back to itself"},
		"no such backend":    {replace("backends: [vllm-a], free", "backends: [vllm-b], free"), `there is no backend "vllm-b"; did you mean "vllm-a"`},
		"no such plan":       {replace("{name: old, plan: pro}", "{name: old, plan: prp}"), `tenants[old].plan: there is no plan "prp"; did you mean "pro"`},
		"scope":              {replace("scope: org+model", "scope: org+modle"), `did you mean "model"`},
		"global combined":    {replace("scope: org+model", "scope: org+global"), "global can't be combined"},
		"global on org":      {replace("scope: global", "scope: org"), "a global limit has scope global or model"},
		"unit":               {replace("unit: usd", "unit: dollars"), "is not one of requests"},
		"rate":               {replace("rate: 60000/min", "rate: 60000"), "plans[pro].limits[org-tokens].rate"},
		"its rate's line":    {replace("rate: 60000/min", "rate: 60000"), "line 17:"},
		"zero rate":          {replace("rate: 60000/min", "rate: 0/min"), "zero"},
		"burst":              {replace("burst: 60000", "burst: -1"), "plans[pro].limits[org-tokens].burst"},
		"slots with a rate":  {replace("max: 8", "max: 8, rate: 1/s"), "concurrency has max"},
		"no slots":           {replace("max: 8", "max: 0"), "plans[pro].limits[key-inflight].max"},
		"max on requests":    {replace("wait: 500ms", "max: 3"), "max is for the unit concurrency"},
		"long wait":          {replace("wait: 500ms", "wait: 2m"), "above 1m"},
		"same limit name":    {replace("name: org-day", "name: org-tokens"), "used twice"},
		"global's name":      {replace("name: org-day", "name: fleet"), "used twice"},
		"bad name":           {replace("name: org-day", `name: "or\"g"`), "letters, digits"},
		"hash":               {replace(zeroHash, "sha256:00"), "keys[k1].hash"},
		"date":               {replace("2027-01-01", "soon"), "is not a date"},
		"duration":           {replace("timeout: 60s", "timeout: 60"), "is not a duration"},
		"ramp order":         {replace("after: 14d", "after: 0d"), "in the order of their age"},
		"redaction":          {replace(`"[0-9]{9}"`, `"[0-9"`), "regular expression"},
		"anchor":             {replace("tier: 2", "tier: &a 2"), "anchors"},
		"version":            {replace("version: 1", "version: 2"), "version must be 1"},
		"two documents":      {example + "---\nversion: 1\n", "one YAML document"},
		"deep":               {"version: " + strings.Repeat("[", 1_000_000), "nested"},
		"deep block":         {strings.Repeat("- ", 10_000), "nested"},
		"deeper block":       {strings.Repeat("- ", 2_000_000), "too large"},
		"deep lines": {func() string { // a step deeper on every line
			var b strings.Builder
			for i := range 100 {
				b.WriteString(strings.Repeat(" ", i) + "a:\n")
			}
			return b.String()
		}(), "nested"},
		"wide": {"version: 1\n" + func() string { // quadratic in the parser
			var b strings.Builder
			for i := range 50_000 {
				fmt.Fprintf(&b, "a%d: 1\n", i)
			}
			return b.String()
		}(), "more than 64 fields"},
		"wide in braces":      {"{" + strings.Repeat("a: 1, ", 100) + "}", "more than 64 fields"},
		"merge":               {"<<: {version: 1}", "merges"},
		"tag":                 {replace("tier: 2", "tier: !!int 2"), "tags"},
		"list for a mapping":  {replace("global: {limits", "global: [{limits", "period: day}]}", "period: day}]}]"), "must be a mapping of limits"},
		"text for a list":     {replace("aliases: [small]", "aliases: small"), "must be a list"},
		"list for text":       {replace("tier: 2", "oversize: [debt]\n    tier: 2"), "must be text"},
		"quoted number":       {replace("tier: 2", `tier: "2"`), "without quotes"},
		"fraction of a tier":  {replace("tier: 2", "tier: 2.5"), "whole number"},
		"hex":                 {replace("tier: 2", "tier: 0x2"), "whole number"},
		"truth":               {replace("assert_user: true", "assert_user: yes"), "must be true or false"},
		"float for dollars":   {replace(`burst: "2.50"`, "burst: 2.50"), "2.50 is a float"},
		"scope twice":         {replace("scope: org+model", "scope: org+org"), "names a part twice"},
		"wait on slots":       {replace("max: 8", "max: 8, wait: 1s"), "a wait does nothing"},
		"no models":           {replace("models: [llama-8b], routes", "models: [], routes"), "an empty list would allow none"},
		"control in a user":   {replace("user: u,", `user: "u\x1f",`), "printable"},
		"nobody to spread":    {replace("oversize: refuse", "oversize: refuse\n    spread_users: true"), "plans[pro].spread_users: spread_users is for limits whose scope names user"},
		"slip in a redaction": {replace("redact: [email", "redact: [emial"), `did you mean "email"`},
		"no standing":         {replace("standing: 0.5", "standing: 0"), "suspended: true"},
		"no factor":           {replace("factor: 0.2", "factor: 0"), "suspended: true"},
		"too long a log":      {replace("algorithm: fixed_window, rate: 100000/day", "algorithm: sliding_log, rate: 6000/day", "standing: 0.5", "standing: 2"), "can't hold"},
		"binary":              {"\x00\x01", ""},
		"empty":               {"", "version must be 1"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := ParsePolicy([]byte(c.text))
			if err == nil || p != nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestParseReportsAllAtOnceButNotForEver(t *testing.T) {
	text := "version: 1\ntenants:\n" + strings.Repeat("  - {name: '', plan: x}\n", 500)
	_, err := ParsePolicy([]byte(text))
	if ps, ok := errors.AsType[Problems](err); !ok || len(ps) != maxProblems {
		t.Errorf("%T of %d problems, want %d", err, len(ps), maxProblems)
	}
}

// TestParseReportsWhatItReadsAndWhatItFinds in one go, in the order of the lines, and
// without what only follows from another problem.
func TestParseReportsWhatItReadsAndWhatItFinds(t *testing.T) {
	_, err := ParsePolicy([]byte(`version: 1
backends:
  - {name: b, url: "ftp://x", slot: 4}
plans:
  - name: p
    name: q
    limits:
      - {name: l, scope: org, unit: usd, rate: [], burst: 1.5}
    budgets: [{name: month, scope: org, amount: 5, period: monthly}]
    timeout: soon
tenants: [{name: acme, plan: r, standing: high}]
`))
	want := `line 3: backends[b].slot: unknown field "slot"; did you mean "slots"?
line 3: backends[b].url: "ftp://x" is not http://host:port, https://host:port or dns://name:port
line 6: plans[p].name: "name" stands here twice; the first is on line 5
line 8: plans[p].limits[l].rate: must be a plain value and not a list or a mapping
line 8: plans[p].limits[l].burst: 1.5 is a float: write a whole number, and dollars as a string, as in "10.50"
line 9: plans[p].budgets[month].amount: money must be a quoted decimal string such as "0.20", not the number 5
line 9: plans[p].budgets[month].period: "monthly" is not one of day, week, month, rolling, none; did you mean "month"?
line 10: plans[p].timeout: "soon" is not a duration: write 500ms, 60s, 10m, 6h or 14d
line 11: tenants[acme].standing: a factor is a decimal between 0 and 1000 with at most six decimals, as in 0.2
line 11: tenants[acme].plan: there is no plan "r"; did you mean "p"?`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

// TestBracketsInPatternsAreNotNesting: regular expressions may leave brackets open.
func TestBracketsInPatternsAreNotNesting(t *testing.T) {
	text := "version: 1\nplans: [{name: p}]\ntenants:\n"
	for i := range 2 * maxNesting {
		text += fmt.Sprintf("  - {name: t%d, plan: p, content_log: {mode: all, redact: ['\\[\\{secret']}}\n", i)
	}
	mustParse(t, text)
}

func TestMessagesStayShort(t *testing.T) {
	_, err := ParsePolicy([]byte("version: 1\ntenants: [{name: '" + strings.Repeat("é ", 1<<20) + "', plan: p}]"))
	if err == nil || len(err.Error()) > 4*maxMessage || !utf8.ValidString(err.Error()) {
		t.Errorf("a message of %d bytes", len(err.Error()))
	}
}

func TestTooManyLimits(t *testing.T) {
	var b strings.Builder
	b.WriteString("version: 1\nplans:\n  - name: p\n    limits:\n")
	for i := range limiter.MaxCharges + 1 {
		fmt.Fprintf(&b, "      - {name: l%d, scope: org, unit: requests, rate: 1/s}\n", i)
	}
	if _, err := ParsePolicy([]byte(b.String())); err == nil || !strings.Contains(err.Error(), "17 limits apply") {
		t.Errorf("got %v", err)
	}
}

func TestIndexResolvesAndRamps(t *testing.T) {
	p := mustParse(t, example)
	day := func(s string) time.Time { d, _ := time.Parse(time.DateOnly, s); return d }
	young, err := p.Index(day("2026-01-20"), 7, Share{}, keysOf(t, p.Keys...))
	if err != nil {
		t.Fatal(err)
	}
	c, ok := young.Lookup([32]byte{})
	if !ok || c.Tenant.Name != "acme" || c.Plan.Name != "pro" {
		t.Fatalf("Lookup: %+v %v", c, ok)
	}
	if _, ok := young.Lookup([32]byte{1}); ok {
		t.Error("an unknown hash was found")
	}
	if want := day("2026-01-29"); !young.NextChange.Equal(want) {
		t.Errorf("next ramp at %v, want %v", young.NextChange, want)
	}
	byName := func(c Caller) map[string]ResolvedLimit {
		m := map[string]ResolvedLimit{}
		for _, l := range c.Limits {
			m[l.Name] = l
		}
		return m
	}
	ls := byName(c)
	// standing 0.5 × ramp 0.2
	if got := *ls["org-tokens"].Private; got != (limiter.Limit{Rate: limiter.Rate{Count: 6000, Per: time.Minute}, Burst: 6000, Revision: 7}) {
		t.Errorf("org-tokens is %+v", got)
	}
	if got := ls["key-inflight"].Private.Burst; got != 1 {
		t.Errorf("0.1 of 8 slots is %d, want 1: never below", got)
	}
	if got := ls["money"].Private; got.Rate.Count != 1_000_000_000 || got.Burst != 250_000_000 {
		t.Errorf("money is %+v", got)
	}
	if got := ls["fleet"].Private.Burst; got != 2_000_000 || ls["fleet"].Bucket != "fleet" {
		t.Errorf("a ramp changed the fleet's limit: %d", got)
	}
	if ls["per-model"].Bucket != "pro/per-model" {
		t.Errorf("bucket %q", ls["per-model"].Bucket)
	}
	for i := 1; i < len(c.Limits); i++ {
		if rank(c.Limits[i].Unit) < rank(c.Limits[i-1].Unit) {
			t.Errorf("%s comes before %s", c.Limits[i-1].Name, c.Limits[i].Name)
		}
	}
	grown, err := p.Index(day("2026-01-29"), 8, Share{}, keysOf(t, p.Keys...))
	if err != nil {
		t.Fatal(err)
	}
	c, _ = grown.Lookup([32]byte{})
	if got := byName(c)["org-tokens"].Private.Burst; got != 30000 || !grown.NextChange.Equal(day("2027-01-01")) {
		t.Errorf("after the ramp: burst %d, next %v", got, grown.NextChange)
	}
}

// TestScaleIsExact holds ramps against rationals: the rate is what the factors say, and
// where the limiter cannot express that, below it by less than one unit a period.
func TestScaleIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		factor := rapid.Map(rapid.Int64Range(1, 999_999_999), func(i int64) Factor { return Factor(i) })
		f := product(factor.Draw(t, "ramp"), factor.Draw(t, "standing"))
		r := limiter.Rate{
			Count: rapid.Int64Range(1, 1<<40).Draw(t, "count"),
			Per:   rapid.SampledFrom([]time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour, 7 * time.Second}).Draw(t, "per"),
		}
		got := f.ofRate(r)
		want := big.NewRat(f.num, f.den)
		want.Mul(want, big.NewRat(r.Count, int64(r.Per)))
		if got.Per > limiter.MaxSpan {
			return // refused as a limit
		}
		have := big.NewRat(got.Count, int64(got.Per))
		if want.Cmp(big.NewRat(limiter.MaxUnits, int64(r.Per))) > 0 {
			if got.Count != limiter.MaxUnits || got.Per != r.Per {
				t.Fatalf("%v became %v", r, got)
			}
			return
		}
		if have.Cmp(want) > 0 {
			t.Fatalf("%v by %d/%d became more: %v", r, f.num, f.den, got)
		}
		if short := want.Sub(want, have); short.Cmp(big.NewRat(1, int64(r.Per))) >= 0 {
			t.Fatalf("%v by %d/%d became %v, short by %v", r, f.num, f.den, got, short)
		}
	})
	for _, c := range []struct {
		f    fraction
		r, w string
	}{
		{fraction{1, 5}, "60000/min", "12000/min"},
		{fraction{1, 5}, "7/s", "7/5s"},
		{fraction{1, 20}, "10/day", "1/2day"},
		{fraction{1, 3}, "9/s", "3/s"},
	} {
		r, err := limiter.ParseRate(c.r)
		must(t, err)
		if got := c.f.ofRate(r).String(); got != c.w {
			t.Errorf("%d/%d of %s is %s, want %s", c.f.num, c.f.den, c.r, got, c.w)
		}
	}
}

func TestIndexSharesAndRefuses(t *testing.T) {
	p := mustParse(t, strings.Replace(example, "  - {name: old, plan: pro}\n", "  - {name: old, plan: pro}\n  - {name: older, plan: pro}\n", 1))
	key := func(id, tenant string, b byte) Key {
		return Key{ID: id, Tenant: tenant, Hash: FormatHash([32]byte{b})}
	}
	ix, err := p.Index(time.Unix(2e9, 0), 1, Share{}, keysOf(t, p.Keys...), key("a", "old", 1), key("b", "older", 2))
	must(t, err)
	a, _ := ix.Lookup([32]byte{1})
	b, _ := ix.Lookup([32]byte{2})
	if &a.Limits[0] != &b.Limits[0] {
		t.Error("two tenants of one plan and one share have limits of their own")
	}
	if n := testing.AllocsPerRun(100, func() { ix.Lookup([32]byte{1}) }); n != 0 {
		t.Errorf("a look-up allocates %v times", n)
	}
	for name, c := range map[string]struct {
		key  Key
		want string
	}{
		"no such tenant": {key("dev", "nobody", 3), `there is no tenant "nobody"`},
		"no hash":        {Key{ID: "dev", Tenant: "old"}, "not a key's hash"},
	} {
		if _, err := p.Index(time.Unix(2e9, 0), 1, Share{}, keysOf(t, p.Keys...), c.key); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := (&Policy{Tenants: []Tenant{{Name: "t", Plan: "p"}}}).Index(time.Unix(2e9, 0), 1, Share{}, nil); err == nil {
		t.Error("a tenant without a plan was indexed")
	}
}

func rank(unit string) int {
	for i, u := range unitNames {
		if u == unit {
			return i
		}
	}
	return -1
}

func TestDiffNamesWhatChanged(t *testing.T) {
	a := mustParse(t, example)
	b := mustParse(t, strings.NewReplacer("rate: 60000/min, burst: 60000", "rate: 90000/min, burst: 60000", "  - {name: old, plan: pro}\n", "").Replace(example))
	want := "~ plans[pro].limits[org-tokens].rate: 60000/min -> 90000/min\n- tenants[old].name: old\n- tenants[old].plan: pro"
	if got := differences(a, b); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// differences are those of two policies, a line each.
func differences(old, new *Policy) string {
	var lines []string
	for _, c := range Diff(old, new) {
		lines = append(lines, c.String())
	}
	return strings.Join(lines, "\n")
}

// TestCostGolden prices OpenAI's and Anthropic's shapes of the same answer: 1000 input
// tokens, 400 of them cached, 100 written to the cache, 50 out.
func TestCostGolden(t *testing.T) {
	usd := func(s string) *NanoUSD { n, err := ParseUSD(s); must(t, err); return &n }
	nano := func(n NanoUSD) *NanoUSD { return &n }
	m := Model{Price: Price{Input: usd("2.00"), CachedInput: usd("0.50"), CacheWrite: usd("2.50"), Output: usd("8.00")}}
	hour := m
	hour.Price.CacheWrite1h = usd("4.00")
	openai := Usage{Input: 1000, CachedInput: 400, Output: 50}
	anthropic := Usage{Input: 500 + 400 + 100, CachedInput: 400, CacheWrite: 100, Output: 50}
	for _, c := range []struct {
		name string
		m    Model
		u    Usage
		want NanoUSD
	}{
		{"openai", m, openai, 600*2000 + 400*500 + 50*8000},
		{"anthropic", m, anthropic, 500*2000 + 400*500 + 100*2500 + 50*8000},
		{"an hour as minutes", m, Usage{Input: 100, CacheWrite: 100, CacheWrite1h: 60}, 100 * 2500},
		{"kept for an hour", hour, Usage{Input: 130, CacheWrite: 100, CacheWrite1h: 60}, 30*2000 + 40*2500 + 60*4000},
		{"more hours than writes", hour, Usage{Input: 100, CacheWrite1h: 60}, 40*2000 + 60*4000},
		{"no cached price", Model{Price: Price{Input: usd("2.00")}}, openai, 1000 * 2000},
		{"rounded up once", Model{Price: Price{Input: nano(1), Output: nano(1)}}, Usage{Input: 1, Output: 1}, 1},
		{"cached beyond input", m, Usage{Input: 10, CachedInput: 50}, 10 * 500},
		{"negative", m, Usage{Input: -5, Output: -5, CachedInput: -1}, 0},
		{"flat", Model{Flat: Flat{Request: 7, Image: 11, AudioSecond: 13}}, Usage{Images: 2, AudioSeconds: 3}, 7 + 22 + 39},
		{"saturates", Model{Price: Price{Input: nano(math.MaxInt64), Output: nano(math.MaxInt64)}}, Usage{Input: math.MaxInt64, Output: math.MaxInt64}, math.MaxInt64},
	} {
		if got := c.m.Cost(c.u); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestCostAgainstBigInt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(0, 1<<53)
		price := rapid.Map(rapid.Int64Range(0, 1<<40), func(i int64) NanoUSD { return NanoUSD(i) })
		in := n.Draw(t, "in")
		cached := rapid.Int64Range(0, in).Draw(t, "cached")
		ip, cp, op := price.Draw(t, "input price"), price.Draw(t, "cached price"), price.Draw(t, "output price")
		m := Model{Price: Price{Input: &ip, CachedInput: &cp, Output: &op}}
		out := n.Draw(t, "out")
		sum := new(big.Int)
		for _, x := range [][2]int64{{in - cached, int64(ip)}, {cached, int64(cp)}, {out, int64(op)}} {
			sum.Add(sum, new(big.Int).Mul(big.NewInt(x[0]), big.NewInt(x[1])))
		}
		sum.Add(sum, big.NewInt(999_999)).Div(sum, big.NewInt(1_000_000))
		want := NanoUSD(math.MaxInt64)
		if sum.IsInt64() {
			want = NanoUSD(sum.Int64())
		}
		if got := m.Cost(Usage{Input: in, CachedInput: cached, Output: out}); got != want {
			t.Fatalf("%d, want %d", got, want)
		}
	})
}

func TestUSD(t *testing.T) {
	for s, want := range map[string]NanoUSD{"0": 0, "250.00": 250e9, "0.000000001": 1, "999999999.999999999": 999999999999999999} {
		got, err := ParseUSD(s)
		if err != nil || got != want {
			t.Errorf("%s: %d %v", s, got, err)
		}
		if back, err := ParseUSD(got.String()); err != nil || back != got {
			t.Errorf("%s printed as %s", s, got)
		}
	}
	for _, s := range []string{"", ".5", "1.", "-1", "1e3", "1,5", "1.0000000000", "1234567890"} {
		if _, err := ParseUSD(s); err == nil {
			t.Errorf("%q was taken for money", s)
		}
	}
}

func TestKeys(t *testing.T) {
	secret, hash, err := NewKey(rand.Reader, true)
	must(t, err)
	if !strings.HasPrefix(secret, "hg_live_") || CheckFormat(secret) != nil || HashKey(secret) != hash {
		t.Errorf("a fresh key is not well formed: %v", CheckFormat(secret))
	}
	if back, err := ParseHash(FormatHash(hash)); err != nil || back != hash {
		t.Errorf("FormatHash: %v", err)
	}
	for i := range secret { // any one character mistyped shows
		b := []byte(secret)
		b[i] ^= 1
		if err := CheckFormat(string(b)); err == nil || strings.Contains(err.Error(), secret[10:]) {
			t.Fatalf("character %d mistyped: %v", i, err)
		}
	}
	if _, _, err := NewKey(bytes.NewReader(make([]byte, 31)), false); err == nil {
		t.Error("a key was made of 31 bytes")
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func keysOf(t testing.TB, keys ...Key) *Keys {
	t.Helper()
	ks, err := KeysOf(keys...)
	must(t, err)
	return ks
}

func FuzzParsePolicy(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte("version: 1\nplans: [{name: p, limits: [{name: l, scope: org, unit: usd, rate: 1.5/h}], budgets: [{name: b, scope: key, amount: '1', period: rolling, window: 1h}]}]\ntenants: [{name: t, plan: p}]"))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte(asked(keeping, "mode: static, threshold: 0.500001, embedder: vectors, verifier: judge")))
	f.Add([]byte(asked("volatility: personal, sensitive: [legal], share: user", "mode: learned, threshold: 95, distance: 1, verifier: e5, embedder: e5")))
	f.Add([]byte(admitted("", "capacity: {shed: []}")))
	f.Add([]byte(admitted("slots: 8, learn: {}, models: {small: x, 'a.b': [1], m: ~}", "ladder: [{rung: static_answer, at: 80%, fallback_url: 'http://x'}, {rung: shed_cost, above_tokens: 5, models: [small, m]}]")))
	f.Add([]byte(admitted("slots: 2, kind: anthropic, overflow: true, models: {m: \"1\"}", "routes: [{name: r, match: {headers: {x-a: '1', 2: 3}, input_tokens: {above: 3, below: 5}}, to: [{model: small, weight: 0}, {model: tiny}]}]")))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := ParsePolicy(text)
		if err != nil {
			if ps, ok := errors.AsType[Problems](err); !ok || len(ps) == 0 {
				t.Fatal("an error without a problem")
			}
			return
		}
		if err := p.Validate(); err != nil {
			t.Fatalf("parsed and not valid: %v", err)
		}
		if d := Diff(p, p); len(d) != 0 {
			t.Fatalf("differs from itself: %v", d)
		}
		for _, now := range []int64{-1e10, 1e9, 1e11} {
			ix, err := p.Index(time.Unix(now, 0), 1, Share{Rank: 1, Of: 3}, keysOf(t, p.Keys...))
			if err != nil {
				t.Fatalf("valid and not indexable: %v", err)
			}
			for _, s := range ix.Surfaces {
				checkSemantic(t, ix, s)
			}
			checkAdmission(t, ix)
			for _, c := range ix.tenants {
				for _, l := range c.Limits {
					if err := l.Whole.Validate(); err != nil {
						t.Fatalf("valid, with the limit %+v: %v", *l.Whole, err)
					}
				}
				for _, b := range c.Budgets {
					if start, end := b.Calendar.At(time.Unix(now, 0)); start > end || b.Terms.Amount < 0 {
						t.Fatalf("valid, with the budget %+v of %d to %d", b, start, end)
					}
				}
			}
		}
		_, _ = p.Warnings(), Diff(&Policy{}, p)
		again, err := yaml.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		back, err := ParsePolicy(again)
		if err != nil {
			t.Fatalf("written as\n%s\nand not read back: %v", again, err)
		}
		if d := Diff(p, back); len(d) != 0 {
			t.Fatalf("after writing and reading back: %v", d)
		}
	})
}

func BenchmarkParsePolicy(b *testing.B) {
	var text strings.Builder
	text.WriteString("version: 1\nplans: [{name: p, limits: [{name: l, scope: org, unit: tokens, rate: 1/s}]}]\ntenants:\n")
	for i := range 1_000 {
		fmt.Fprintf(&text, "- {name: t%d, plan: p}\n", i)
	}
	text.WriteString("keys:\n")
	for i := range 10_000 {
		fmt.Fprintf(&text, "- {id: k%d, tenant: t%d, hash: \"sha256:%064x\"}\n", i, i%1_000, i)
	}
	b.SetBytes(int64(text.Len()))
	for b.Loop() {
		mustParse(b, text.String())
	}
}

func BenchmarkIndex(b *testing.B) {
	var text strings.Builder
	text.WriteString("version: 1\nplans: [{name: p, limits: [{name: l, scope: org, unit: tokens, rate: 1/s}]}]\ntenants:\n")
	for i := range 10_000 {
		fmt.Fprintf(&text, "- {name: t%d, plan: p}\n", i)
	}
	p := mustParse(b, text.String())
	for i := range 100_000 {
		p.Keys = append(p.Keys, Key{ID: fmt.Sprint(i), Tenant: fmt.Sprintf("t%d", i%10_000), Hash: fmt.Sprintf("sha256:%064x", i)})
	}
	keys := keysOf(b, p.Keys...)
	for b.Loop() {
		if _, err := p.Index(time.Unix(1e9, 0), 1, Share{}, keys); err != nil {
			b.Fatal(err)
		}
	}
}

// TestNearest proposes what may have been meant, and nothing that is far from it.
func TestNearest(t *testing.T) {
	periods, zones := []string{"day", "week", "month", "rolling", "none"}, []string{"Asia/Kolkata", "Europe/Berlin", "Iran"}
	for _, c := range []struct {
		name string
		of   []string
		want string
	}{
		{"moth", periods, "month"},
		{"Monthly", periods, "month"},
		{"year", periods, ""},
		{"", periods, ""},
		{"team", scopeParts, ""},
		{"hard", []string{"strict", "normal"}, ""},
		{"emial", []string{"phone", "email"}, "email"},
		{"acmee", []string{"acne-2", "acme"}, "acme"},
		{"x", nil, ""},
		{"por", []string{"free", "pro"}, "pro"},
	} {
		if got := Nearest(c.name, c.of); got != c.want {
			t.Errorf("%q: %q, want %q", c.name, got, c.want)
		}
	}
	for pair, want := range map[[2]string]int{{"", "abc"}: 3, {"abc", ""}: 3, {"kitten", "sitting"}: 3, {"ab", "ba"}: 1, {"abcd", "badc"}: 2, {"same", "same"}: 0} {
		if got := editDistance(pair[0], pair[1]); got != want {
			t.Errorf("%q: %d, want %d", pair, got, want)
		}
	}
	for name, want := range map[string]string{"Berlin": "Europe/Berlin", "europe/berln": "Europe/Berlin", "Mars": "", "erlin": ""} {
		if got := nearestZone(name, zones); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
	if got, want := didYouMean("far", []string{"pro", "trial"}), "; there are pro, trial"; got != want {
		t.Errorf("%q", got)
	}
}
