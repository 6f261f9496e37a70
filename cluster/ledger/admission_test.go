package ledger

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

// admitted is a policy with what else a backend and the policy say.
func admitted(backend, policy string) string {
	if backend != "" {
		backend = ", " + backend
	}
	return `version: 1
backends: [{name: b, url: "http://127.0.0.1:8000"` + backend + `}, {name: other, url: "http://127.0.0.1:8001", slots: 4}]
models: [{name: m, aliases: [small], backends: [b, other], fallback: [tiny]}, {name: tiny, aliases: [t1, t2], backends: [other]}]
plans: [{name: p, tier: 1}, {name: q, tier: 3}]
tenants: [{name: acme, plan: p}]
surfaces: [{name: docs}]
` + policy + "\n"
}

func TestBackendsAreCompiled(t *testing.T) {
	plain := ResolvedBackend{Kind: "vllm", SlotTokens: 16384, MetricsPath: "/metrics"}
	with := func(change func(*ResolvedBackend)) ResolvedBackend { r := plain; change(&r); return r }
	for text, want := range map[string]ResolvedBackend{
		"":                               plain,
		"slots: 8":                       plain,
		"slots: 8, learn: {}":            with(func(r *ResolvedBackend) { r.LearnMin = 1 }),
		"slots: 8, learn: {min: 8}":      with(func(r *ResolvedBackend) { r.LearnMin = 8 }),
		"slots: 8, slot_tokens: 1":       with(func(r *ResolvedBackend) { r.SlotTokens = 1 }),
		"metrics_path: none":             with(func(r *ResolvedBackend) { r.MetricsPath = "" }),
		"metrics_path: /m, kind: vllm":   with(func(r *ResolvedBackend) { r.MetricsPath = "/m" }),
		"kind: openai":                   with(func(r *ResolvedBackend) { r.Kind, r.MetricsPath = "openai", "" }),
		"kind: anthropic":                with(func(r *ResolvedBackend) { r.Kind, r.MetricsPath = "anthropic", "" }),
		"kind: openai, metrics_path: /m": with(func(r *ResolvedBackend) { r.Kind, r.MetricsPath = "openai", "/m" }),
		"models: {small: M-1}":           with(func(r *ResolvedBackend) { r.Models = map[string]string{"m": "M-1"} }),
		"models: {}":                     plain,
		"timeouts: {connect: 1s, first_byte: 2s, idle: 1h}": with(func(r *ResolvedBackend) {
			r.ConnectTimeout, r.FirstByteTimeout, r.IdleTimeout = time.Second, 2*time.Second, time.Hour
		}),
	} {
		ix := indexOf(t, admitted(text, ""))
		want.Backend = &ix.Policy.Backends[0]
		if got := ix.Backends; len(got) != 2 || !reflect.DeepEqual(got[0], want) || !reflect.DeepEqual(ix.Policy.ResolvedBackends(), got) {
			t.Errorf("%s: got %+v, want %+v", text, got, want)
		}
	}
	p := mustParse(t, example)
	if got := []string{p.Models[0].AffinityOf(), p.Models[1].AffinityOf()}; !slices.Equal(got, []string{"session", "prefix"}) {
		t.Errorf("affinities %v", got)
	}
}

func TestCapacityIsCompiled(t *testing.T) {
	def := ResolvedCapacity{TargetWait: 2 * time.Second, MaxBytes: 256 << 20, Weights: [3]int64{75, 22, 3}, Shed: []ResolvedCutoff{{At: .9, Class: "best_effort"}}}
	with := func(change func(*ResolvedCapacity)) ResolvedCapacity { r := def; change(&r); return r }
	two := 2
	for text, want := range map[string]ResolvedCapacity{
		"":                               def,
		"capacity: {}":                   def,
		"capacity: {shed: []}":           with(func(r *ResolvedCapacity) { r.Shed = nil }),
		"capacity: {keepalive: 15s}":     with(func(r *ResolvedCapacity) { r.KeepAlive = 15 * time.Second }),
		"capacity: {max_bytes: 1048576}": with(func(r *ResolvedCapacity) { r.MaxBytes = 1 << 20 }),
		"capacity: {target_wait: 50ms, weights: {background: 30}}": with(func(r *ResolvedCapacity) { r.TargetWait, r.Weights = 50*time.Millisecond, [3]int64{75, 30, 3} }),
		"capacity: {shed: [{at: 0.75, above_tokens: 9}, {at: 0.75, below_tier: 2}, {at: 1, class: background}]}": with(func(r *ResolvedCapacity) {
			r.Shed = []ResolvedCutoff{{At: .75, AboveTokens: 9}, {At: .75, BelowTier: &two}, {At: 1, Class: "background"}}
		}),
	} {
		if got := indexOf(t, admitted("", text)).Capacity; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v, want %+v", text, got, want)
		}
	}
}

func TestLadderIsCompiled(t *testing.T) {
	for text, want := range map[string]ResolvedLadderRung{
		"rung: drop_optional":                            {Rung: "drop_optional"},
		"rung: stale_cache, at: 0.6":                     {Rung: "stale_cache", Auto: true, At: .6, OffAt: .4, For: 5 * time.Second},
		"rung: stale_cache, at: 0.3":                     {Rung: "stale_cache", Auto: true, At: .3, OffAt: .15, For: 5 * time.Second},
		"rung: stale_cache, at: 1, off_at: 0.1, for: 1h": {Rung: "stale_cache", Auto: true, At: 1, OffAt: .1, For: time.Hour},
		"rung: shed_cost, above_tokens: 7":               {Rung: "shed_cost", AboveTokens: 7},
		"rung: cut_max_tokens, max_tokens: 8":            {Rung: "cut_max_tokens", MaxTokens: 8},
		"rung: static_answer, text: 'a b'":               {Rung: "static_answer", Text: "a b"},
		"rung: static_answer, fallback_url: 'https://x'": {Rung: "static_answer", FallbackURL: "https://x"},
		"rung: static_answer, models: [t1, m, tiny]":     {Rung: "static_answer", Models: []string{"tiny", "m"}},
	} {
		if got := indexOf(t, admitted("", "ladder: [{"+text+"}]")).Ladder; len(got) != 1 || !reflect.DeepEqual(got[0], want) {
			t.Errorf("%s: got %+v, want %+v", text, got, want)
		}
	}
}

func TestRoutesAreCompiled(t *testing.T) {
	n := func(i int64) *int64 { return &i }
	tier := 2
	for text, want := range map[string]ResolvedRoute{
		"match: {models: [m]}, to: [{model: t2}]": {Models: []string{"m", "small"}, To: []ResolvedTarget{{"tiny", 1}}, Sticky: "user"},
		"match: {models: [t2, m, small]}, to: [{model: m, weight: 9}, {model: tiny, weight: 0}], sticky: request": {
			Models: []string{"m", "small", "t2"}, To: []ResolvedTarget{{"m", 9}, {"tiny", 0}}, Sticky: "request",
		},
		"match: {surfaces: [docs], classes: [background], tenants: [acme], below_tier: 2, input_tokens: {above: 1, below: 3}, output_tokens: {above: 0}, headers: {x-b: 1, X-A: yes}}, to: [{model: m}]": {
			Surfaces: []string{"docs"}, Classes: []string{"background"}, Tenants: []string{"acme"}, BelowTier: &tier,
			InputAbove: n(1), InputBelow: n(3), OutputAbove: n(0), Headers: []HeaderMatch{{"X-A", "yes"}, {"X-B", "1"}}, To: []ResolvedTarget{{"m", 1}}, Sticky: "user",
		},
	} {
		want.Name = "r"
		if got := indexOf(t, admitted("", "routes: [{name: r, "+text+"}]")).Routes; len(got) != 1 || !reflect.DeepEqual(got[0], want) {
			t.Errorf("%s: got %+v, want %+v", text, got, want)
		}
	}
}

func TestAdmissionRefuses(t *testing.T) {
	wrong := func(text string, cases map[string]string) {
		t.Helper()
		for said, want := range cases {
			full := strings.Replace(text, "…", said, 1)
			if backend, ok := strings.CutPrefix(full, "backend: "); ok {
				full = admitted(backend, "")
			} else {
				full = admitted("", full)
			}
			if p, err := ParsePolicy([]byte(full)); p != nil || err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", said, err, want)
			}
		}
	}
	wrong("backend: …", map[string]string{
		"kind: vlm":                        `backends[b].kind: "vlm" is not one of vllm, openai, anthropic; did you mean "vllm"?`,
		"kind: openai, cache_salt: tenant": "backends[b].cache_salt: cache_salt is vLLM's, and an endpoint of kind openai refuses what it does not know; remove it",
		"api_key_env: A, api_key_file: /k": "backends[b].api_key_file: a backend has one key: remove api_key_env or api_key_file",
		"metrics_path: metrics":            "backends[b].metrics_path: metrics_path must begin with /, or be none",
		"slots: -1":                        "backends[b].slots: -1 is negative; write a number above 0, or leave it out",
		"learn: {}":                        "backends[b].learn: learn needs slots: how many slots there are is learnt up to slots; write slots: 64, or remove learn",
		"overflow: true":                   "backends[b].overflow: overflow needs slots: what overflows must be bounded",
		"slot_tokens: 9":                   "backends[b].slot_tokens: slot_tokens needs slots",
		"slots: 4, slot_tokens: -1":        "backends[b].slot_tokens: -1 is not between 1 and 1000000000 tokens; 16384 is the default",
		"slots: 4, learn: {min: 5}":        "backends[b].learn.min: 5 is not between 1 and slots, which is 4",
		"slots: 4, learn: {min: 0}":        "backends[b].learn.min: 0 is not between 1",
		"slots: 4, learn:":                 "backends[b].learn: without a value nothing is learnt; write learn: {} for from 1 up to slots, or remove it",
		"slots: 4, learn: true":            "backends[b].learn: must be a mapping of min",
		"timeouts: {connect: 2m}":          "backends[b].timeouts.connect: 2m0s is not between 1ms and 1m0s",
		"timeouts: {first_byte: 2h}":       "backends[b].timeouts.first_byte: 2h0m0s is not between 1ms and 1h0m0s",
		"timeouts: {idle: 1us}":            "backends[b].timeouts.idle: 1µs is not between",
		"timeouts: 5s":                     "backends[b].timeouts: must be a mapping of connect, first_byte, idle",
		"models: {smal: x}":                `backends[b].models[smal]: there is no model "smal"; did you mean "small"?`,
		"models: {tiny: x}":                "backends[b].models[tiny]: the model tiny is not served here: add b to its backends, or remove this",
		"models: {m: x, small: y}":         "backends[b].models[small]: small is the same model as m; remove one of them",
		"models: {m: x, m: y}":             `backends[b].models[m]: "m" stands here twice`,
		"models: {m: ''}":                  "backends[b].models[m]: what does the backend call the model?",
		"models: {m: }":                    "backends[b].models[m]: there is nothing behind it; write a text, or remove it",
		"models: {m: [x]}":                 "backends[b].models[m]: must be text and not a list",
		"models: [m]":                      "backends[b].models: must be a mapping of names to texts",
		"max_concurrency: 4":               `unknown field "max_concurrency"; write slots for how many requests`,
		"provider: openai":                 "write kind: vllm, openai or anthropic",
		"request_timeout: 4s":              "write timeouts: {connect: 2s",
		"priority: 4":                      "write overflow: true for one that is used last",
		"model_map: {}":                    "write models: {NAME: what the backend calls it}",
		"min_slots: 4":                     "and learn: {min: 8} for the least",
		"overfow: true":                    `did you mean "overflow"?`,
	})
	wrong("capacity: {…}", map[string]string{
		"target_wait: 49ms":                                              "capacity.target_wait: 49ms is not between 50ms and 5m0s",
		"target_wait: 6m":                                                "capacity.target_wait: 6m0s is not between",
		"keepalive: 500ms":                                               "capacity.keepalive: 500ms is not between 1s and 5m0s",
		"max_bytes: 1000":                                                "capacity.max_bytes: 1000 is not between 1048576 and 1099511627776",
		"weights: {interactive: 0}":                                      "capacity.weights.interactive: 0 is not between 1 and 1000: every class that waits is served",
		"weights: {background: 19}":                                      "capacity.weights.background: 19 of 97 is less than a fifth, which background work has at least: write 20 or more",
		"weights: {best_effort: 1001}":                                   "capacity.weights.best_effort: 1001 is not between",
		"weights: {batch: 3}":                                            `unknown field "batch"`,
		"shed:":                                                          "capacity.shed: without a value it is the default, best_effort at 0.9; write shed: [] for none, or remove it",
		"shed: [{class: background}]":                                    "capacity.shed[0].at: a cut-off needs the pressure from which it sheds, as in at: 0.75",
		"shed: [{at: 0, class: background}]":                             "capacity.shed[0].at: a pressure of 0 is always reached",
		"shed: [{at: 75, class: background}]":                            "capacity.shed[0].at: 75 looks like a percentage: write 0.75",
		"shed: [{at: 75%, class: background}]":                           "capacity.shed[0].at: 75% is a percentage, and this is a pressure above 0 and at most 1: write 0.75",
		"shed: [{at: full, class: background}]":                          `capacity.shed[0].at: "full" is no decimal`,
		"shed: [{at: .nan, class: background}]":                          `capacity.shed[0].at: ".nan" is no decimal`,
		"shed: [{at: -.inf, class: background}]":                         `capacity.shed[0].at: "-.inf" is no decimal`,
		"shed: [{at: 1.5, class: background}]":                           "capacity.shed[0].at: 1.5 is above 1, at which the queue is full",
		"shed: [{at: 0.5}]":                                              "capacity.shed[0]: a cut-off has one of above_tokens, below_tier and class",
		"shed: [{at: 0.5, below_tier: 1, class: background}]":            "capacity.shed[0]: a cut-off has one of",
		"shed: [{at: 0.5, class: interactive}]":                          "capacity.shed[0].class: interactive and all below it are everybody; write background or best_effort",
		"shed: [{at: 0.5, class: batch}]":                                `capacity.shed[0].class: "batch" is not one of background, best_effort`,
		"shed: [{at: 0.5, below_tier: 0}]":                               "capacity.shed[0].below_tier: a tier below 0 sheds nobody",
		"shed: [{at: 0.5, above_tokens: 0}]":                             "capacity.shed[0].above_tokens: 0 is not between 1",
		"shed: [{at: 0.5, class: background}, {at: 0.6, below_tier: 1}]": "capacity.shed[1]: what is dear is shed before tiers, and tiers before classes: this entry goes before that at 0.5",
		"shed: [{at: 0.5, below_tier: 1}, {at: 0.4, class: background}]": "capacity.shed[1].at: 0.4 is below that of the entry before, 0.5",
		"shed: [{at: 0.5, tokens: 7}]":                                   "write above_tokens for the input and output together",
		"shed: [{pressure: 0.5}]":                                        "write at: 0.75 for the pressure",
		"shed: [{tier: 1}]":                                              "write below_tier",
		"max_wait: 3s":                                                   "write target_wait for how long the queue is; how long one request waits is its X-Headgate-Timeout, or the plan's timeout",
		"max_queue: 3":                                                   "how many wait follows from target_wait",
		"heartbeat: 3s":                                                  "write keepalive: 15s",
		"shares: {}":                                                     "write weights: {interactive: 75",
		"shed: [" + strings.Repeat("{at: 0.5, class: background}, ", 17) + "]": "capacity.shed: 17 cut-offs are more than 16",
	})
	wrong("ladder: [{…}]", map[string]string{
		"rung: smaler_model":                                             `ladder[smaler_model].rung: "smaler_model" is not one of shed_best_effort, stale_cache, smaller_model, drop_optional, cut_max_tokens, shed_cost, static_answer; did you mean "smaller_model"?`,
		"at: 0.5":                                                        `ladder[0].rung: "" is not one of`,
		"rung: stale_cache}, {rung: stale_cache":                         `ladder[stale_cache].rung: the rung "stale_cache" is here twice; a rung has one entry, with all its models`,
		"rung: smaller_model}, {rung: stale_cache":                       "ladder[stale_cache].rung: stale_cache comes before smaller_model: rungs stand in the order in which they go on",
		"rung: stale_cache, at: 0":                                       "ladder[stale_cache].at: a pressure of 0 is always reached",
		"rung: stale_cache, at: 80%":                                     "ladder[stale_cache].at: 80% is a percentage",
		"rung: stale_cache, at: 0.8, off_at: 60%":                        "ladder[stale_cache].off_at: 60% is a percentage, and this is a pressure above 0 and at most 1: write 0.6",
		"rung: stale_cache, at: 0.8, off_at: 0.8":                        "ladder[stale_cache].off_at: 0.8 is not above 0 and below at, which is 0.8: at 0 it would stay on for good",
		"rung: stale_cache, at: 0.8, off_at: 0":                          "ladder[stale_cache].off_at: 0 is not above 0",
		"rung: stale_cache, off_at: 0.8":                                 "ladder[stale_cache].off_at: without at the rung goes on by hand only, and off_at does nothing",
		"rung: stale_cache, for: 8s":                                     "ladder[stale_cache].for: without at the rung goes on by hand only, and for does nothing",
		"rung: stale_cache, at: 0.8, for: 0s":                            "ladder[stale_cache].for: 0s is not between 100ms and 1h0m0s",
		"rung: stale_cache, at: 0.8}, {rung: shed_cost, at: 0.7":         "ladder[shed_cost].at: 0.7 is below that of stale_cache, 0.8, and a rung goes on only while those before it are; write 0.8 or more",
		"rung: stale_cache, max_tokens: 8":                               "ladder[stale_cache].max_tokens: max_tokens is of the rung cut_max_tokens; remove it, or write rung: cut_max_tokens",
		"rung: cut_max_tokens, above_tokens: 8":                          "ladder[cut_max_tokens].above_tokens: above_tokens is of the rung shed_cost",
		"rung: shed_cost, text: x":                                       "ladder[shed_cost].text: text is of the rung static_answer",
		"rung: shed_cost, above_tokens: -8":                              "ladder[shed_cost].above_tokens: -8 is not between 1",
		"rung: static_answer, text: x, fallback_url: 'http://x'":         "ladder[static_answer].fallback_url: a static answer is text or fallback_url; remove one of them",
		"rung: static_answer, fallback_url: 'ftp://x'":                   `ladder[static_answer].fallback_url: "ftp://x" is not an http:// or https:// URL`,
		"rung: static_answer, fallback_url: 'http://u:p@x'":              "ladder[static_answer].fallback_url: clients are sent there, and would see its user and password",
		"rung: static_answer, text: '" + strings.Repeat("x", 8193) + "'": "ladder[static_answer].text: a text is at most 8192 bytes",
		"rung: stale_cache, models: []":                                  "ladder[stale_cache].models: an empty list would be for none, and an absent one is for all; leave it out, or name a model",
		"rung: stale_cache, models: [n]":                                 `ladder[stale_cache].models[0]: there is no model "n"`,
		"name: stale_cache":                                              "write rung: one of shed_best_effort",
		"rung: stale_cache, threshold: 0.5":                              "write at: 0.8",
		"rung: stale_cache, hysteresis: 0.5":                             "write off_at: 0.6",
		"rung: static_answer, message: x":                                "write text",
		"rung: static_answer, redirect_url: x":                           "write fallback_url",
		"rung: stale_cache, duration: 3s":                                "write for: 5s",
	})
	wrong("routes: [{name: r, …}]", map[string]string{
		"to: [{model: m}]":                                                                          "routes[r].match: a route without a condition takes every request, whatever it asks for; write match: {models: [NAME]}",
		"match: {}, to: [{model: m}]":                                                               "routes[r].match: a route without a condition",
		"match: {models: [m]}":                                                                      "routes[r].to: a route goes to 1 to 16 models, not 0: write to: [{model: NAME}]",
		"match: {models: [m]}, to: [{model: n}]":                                                    `routes[r].to[0].model: there is no model "n"`,
		"match: {models: [m]}, to: [{model: m, weight: 0}]":                                         "routes[r].to: all weights are 0, so that nobody gets the requests",
		"match: {models: [m]}, to: [{model: m, weight: -1}]":                                        "routes[r].to[0].weight: -1 is not between 0 and 1000000",
		"match: {models: [m]}, to: [{model: m}, {model: small}]":                                    "routes[r].to[1].model: the route goes to m already; add the weights up",
		"match: {models: [m]}, to: [{model: m, percent: 5}]":                                        "write weight, a whole number",
		"match: {models: [m]}, to: [{model: m}], sticky: session":                                   `routes[r].sticky: "session" is not one of user, key, request`,
		"match: {models: [m]}, to: [{model: m}]}, {name: r, match: {models: [m]}, to: [{model: m}]": "used twice",
		"match: {models: []}, to: [{model: m}]":                                                     "routes[r].match.models: an empty list would be for none",
		"match: {models: [x]}, to: [{model: m}]":                                                    `routes[r].match.models[0]: there is no model "x"`,
		"match: {surfaces: [dosc]}, to: [{model: m}]":                                               `routes[r].match.surfaces[0]: there is no surface "dosc"; did you mean "docs"?`,
		"match: {tenants: [acne]}, to: [{model: m}]":                                                `routes[r].match.tenants[0]: there is no tenant "acne"; did you mean "acme"?`,
		"match: {classes: []}, to: [{model: m}]":                                                    "routes[r].match.classes: an empty list",
		"match: {classes: [bckground]}, to: [{model: m}]":                                           `did you mean "background"?`,
		"match: {below_tier: 0}, to: [{model: m}]":                                                  "routes[r].match.below_tier: there is no plan below tier 0",
		"match: {input_tokens: {below: 0}}, to: [{model: m}]":                                       "routes[r].match.input_tokens.below: 0 is not between 1",
		"match: {output_tokens: {above: -1}}, to: [{model: m}]":                                     "routes[r].match.output_tokens.above: -1 is not between 0",
		"match: {input_tokens: {above: 5, below: 6}}, to: [{model: m}]":                             "routes[r].match.input_tokens: no number is above 5 and below 6, which are left out themselves",
		"match: {input_tokens: {max: 6}}, to: [{model: m}]":                                         "write below, which is left out itself",
		"match: {input_tokens: {min: 6}}, to: [{model: m}]":                                         "write above, which is left out itself",
		"match: {headers: {authorization: x}}, to: [{model: m}]":                                    "routes[r].match.headers[authorization]: Authorization holds credentials, and a policy holds no secrets: match tenants",
		"match: {headers: {X-Api-Key: x}}, to: [{model: m}]":                                        "X-Api-Key holds credentials",
		"match: {headers: {x-headgate-surface: x}}, to: [{model: m}]":                               "X-Headgate- headers are the gateway's own: match surfaces, classes or tenants",
		"match: {headers: {Host: x}}, to: [{model: m}]":                                             "Host is of the connection",
		"match: {headers: {'x y': x}}, to: [{model: m}]":                                            "a header's name has letters, digits, - and _",
		"match: {headers: {X-A: x, x-a: y}}, to: [{model: m}]":                                      "x-a and X-A are the same header; remove one of them",
		"match: {headers: {X-A: ''}}, to: [{model: m}]":                                             "routes[r].match.headers[X-A]: the value of a header is 1 to 256 printable bytes",
		"match: {headers: {X-A: ' a'}}, to: [{model: m}]":                                           "without space around it",
		"when: {models: [m]}, to: [{model: m}]":                                                     "write match: {models: [NAME]}",
		"match: {models: [m]}, target: m":                                                           "write to: [{model: NAME, weight: 90}",
		"match: {tier: 2}, to: [{model: m}]":                                                        "write below_tier: 2",
		"match: {max_tokens: 2}, to: [{model: m}]":                                                  "write output_tokens: {below: 500}",
		"match: {prompt_tokens: 2}, to: [{model: m}]":                                               "write input_tokens: {below: 500}",
		"match: {users: [x]}, to: [{model: m}]":                                                     "write tenants: [NAME]",
		"match: {models: [m]}, to: [{model: m}" + strings.Repeat(", {model: m}", 16) + "]":          "routes[r].to: a route goes to 1 to 16 models, not 17",
	})
	many := "routes: [{name: r, match: {models: [m]}, to: [{model: m}]}]"
	aliases := make([]string, maxScope)
	for i := range aliases {
		aliases[i] = fmt.Sprint("a", i)
	}
	crowd := strings.Replace(admitted("", many), "aliases: [small]", "aliases: ["+strings.Join(aliases, ", ")+"]", 1)
	if _, err := ParsePolicy([]byte(crowd)); err == nil || !strings.Contains(err.Error(), "routes[r].match.models: these have 1001 names with their aliases, which are more than 1000") {
		t.Errorf("a thousand aliases: %v", err)
	}
	for text, want := range map[string]string{
		"models: [{name: m2, backends: [other], affinity: sticky}]": `models[m2].affinity: "sticky" is not one of prefix, session, none`,
	} {
		full := strings.Replace(admitted("", ""), "models: [", text[:len(text)-1]+", ", 1)
		if _, err := ParsePolicy([]byte(full)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
}

// TestNamesOfMapsHaveLines: what is wrong with an entry whose name is no field's is said with its line.
func TestNamesOfMapsHaveLines(t *testing.T) {
	_, err := ParsePolicy([]byte(`version: 1
backends:
  - name: b
    url: "http://127.0.0.1:8000"
    models:
      m: one
      "gpt-4.1/o'x": two
      gpt-4.1: three
models: [{name: m, backends: [b]}, {name: gpt-4.2, backends: [b]}]
`))
	want := `line 7: backends[b].models[gpt-4.1/o'x]: there is no model "gpt-4.1/o'x"; there are gpt-4.2, m
line 8: backends[b].models[gpt-4.1]: there is no model "gpt-4.1"; did you mean "gpt-4.2"?`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

func TestAdmissionWarnings(t *testing.T) {
	for text, want := range map[string]string{
		"|": "",
		"|capacity: {shed: [{at: 0.5, above_tokens: 9}, {at: 0.6, below_tier: 2}, {at: 0.9, class: background}]}": "",
		"kind: openai|": "backends[b].kind: an endpoint of kind openai wants a key, and nothing is sent to this one; write api_key_env or api_key_file\n" +
			"models[m].price_per_million: its backend b may bill what it serves, and nothing says what the model costs; write its prices, or free: true",
		"slots: 4, overflow: true|":                     "models[m].price_per_million: its backend b may bill what it serves, and nothing says what the model costs; write its prices, or free: true",
		"slots: 4, learn: {}|":                          "",
		"slots: 4, learn: {min: 4}|":                    "backends[b].learn.min: it is as much as slots, so that nothing is learnt; write less, or remove learn",
		"slots: 4, learn: {}, metrics_path: none|":      "backends[b].learn: without metrics how many slots there are is learnt by latency and 429s alone, which is slower; write metrics_path where there are any",
		"|capacity: {shed: [{at: 0.5, below_tier: 1}]}": "capacity.shed[0].below_tier: no plan is below tier 1, so that this never sheds",
		"|capacity: {shed: [{at: 0.5, below_tier: 4}]}": "capacity.shed[0].below_tier: every plan is below tier 4, so that this sheds everybody",
		"|capacity: {shed: [{at: 0.5, above_tokens: 4}, {at: 0.6, above_tokens: 5}, {at: 0.7, above_tokens: 3}]}":                                                                 "capacity.shed[1]: what this sheds is shed already, from 0.5 on; change their order, or remove it",
		"|capacity: {shed: [{at: 0.5, class: background}, {at: 0.6, class: best_effort}]}":                                                                                        "capacity.shed[1]: what this sheds is shed already, from 0.5 on; change their order, or remove it",
		"|capacity: {shed: [{at: 0.5, class: best_effort}, {at: 0.6, class: background}]}":                                                                                        "",
		"|ladder: [{rung: stale_cache, at: 0.5}]":                                                                                                                                 "ladder[stale_cache]: no surface keeps answers, so that it never acts; write exact: {} for one",
		"|ladder: [{rung: smaller_model, at: 0.5}]":                                                                                                                               "",
		"|ladder: [{rung: smaller_model, at: 0.5, models: [tiny]}]":                                                                                                               "ladder[smaller_model]: no model of it has a fallback, so that it never acts; write fallback: [NAME] for one",
		"|ladder: [{rung: shed_best_effort, at: 0.8}]":                                                                                                                            "",
		"|ladder: [{rung: shed_best_effort, at: 0.9}]":                                                                                                                            "ladder[shed_best_effort].at: best_effort is shed already, from 0.9 on, by capacity.shed; write less, or remove one of them",
		"|ladder: [{rung: shed_best_effort, at: 0.9}]\ncapacity: {shed: []}":                                                                                                      "",
		"|routes: [{name: a, match: {classes: [background]}, to: [{model: m}]}]":                                                                                                  "routes[a].match: without models it takes what asks for any, for embeddings, too; is that so?",
		"|routes: [{name: a, match: {models: [m]}, to: [{model: m}], sticky: user}]":                                                                                              "routes[a].sticky: with one model to go to it does nothing; remove it, or write another model",
		"|routes: [{name: a, match: {models: [m]}, to: [{model: m}]}, {name: b, match: {models: [small], below_tier: 2}, to: [{model: tiny}]}]":                                   "routes[b]: the route a takes all of its requests before; change their order, or remove one of them",
		"|routes: [{name: a, match: {models: [small]}, to: [{model: m}]}, {name: b, match: {models: [m]}, to: [{model: tiny}]}]":                                                  "",
		"|routes: [{name: a, match: {models: [m], input_tokens: {below: 9}}, to: [{model: m}]}, {name: b, match: {models: [m], input_tokens: {below: 10}}, to: [{model: tiny}]}]": "",
		"|routes: [{name: a, match: {models: [m], headers: {x-a: b}}, to: [{model: m}]}, {name: b, match: {models: [m], headers: {X-B: c, X-A: b}}, to: [{model: tiny}]}]":        "routes[b]: the route a takes all of its requests before; change their order, or remove one of them",
	} {
		backend, policy, _ := strings.Cut(text, "|")
		if got := strings.Join(mustParse(t, admitted(backend, policy)).Warnings(), "\n"); got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", text, got, want)
		}
	}
	for url, want := range map[string]string{
		"http://127.0.0.1:8000/v1":        "write http://127.0.0.1:8000",
		"http://127.0.0.1:8000/v1/":       "write http://127.0.0.1:8000",
		"https://api.example.com/base/v1": "write https://api.example.com/base",
		"dns://vllm:8000/v1":              "write dns://vllm:8000",
		"http://127.0.0.1:8000/base":      "",
		"http://127.0.0.1:8000/v10":       "",
	} {
		if want != "" {
			want = "backends[b].url: it ends in /v1, with which the paths of requests begin already, so that they go to /v1/v1; " + want
		}
		if got := strings.Join(mustParse(t, strings.Replace(admitted("", ""), "http://127.0.0.1:8000", url, 1)).Warnings(), "\n"); got != want {
			t.Errorf("%s: got %q, want %q", url, got, want)
		}
	}
	unbounded := strings.Replace(admitted("", "capacity: {shed: [{at: 0.9, class: best_effort}]}\nladder: [{rung: drop_optional, at: 0.5}, {rung: shed_cost}]"), ", slots: 4", "", 1)
	want := "capacity.shed: no backend of a model has slots, so that nothing waits and nothing is ever shed; write slots\n" +
		"ladder[drop_optional].at: no backend of its models has slots, so that there is no pressure and it never goes on by itself; write slots, or remove at"
	if got := strings.Join(mustParse(t, unbounded).Warnings(), "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	short := strings.NewReplacer("fallback: [tiny]", "fallback: [tiny], context: 100", "aliases: [t1, t2]", "aliases: [t1, t2], context: 50").
		Replace(admitted("slots: 4, overflow: true, kind: openai, api_key_env: K", "capacity: {shed: [{at: 0.5, above_tokens: 100}]}\nladder: [{rung: shed_cost, above_tokens: 50, models: [t1]}]"))
	short = strings.NewReplacer("backends: [b, other]", "backends: [b], free: true").Replace(short)
	want = "models[m].free: its backend b, of kind openai, bills what it serves; is that so?\n" +
		"models[m].backends: all of them are overflow, which makes no difference then\n" +
		"models[m].fallback[0]: the context of tiny, 50, is smaller than that of m, 100: it is no help to longer requests, and its backend refuses those that it does not quite hold; name a model that takes as much, if there is one\n" +
		"capacity.shed[0].above_tokens: no model takes more than 100 tokens, so that this never sheds\n" +
		"ladder[shed_cost].above_tokens: no model of it takes more than 50 tokens, so that it never acts"
	if got := strings.Join(mustParse(t, short).Warnings(), "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestAdmissionInDifferences(t *testing.T) {
	for name, c := range map[string]struct{ old, new, want string }{
		"capacity": {
			"|", "|capacity: {keepalive: 15s, shed: [{at: 0.7, above_tokens: 9}, {at: 0.8, below_tier: 2}, {at: 0.9, class: background}]}",
			"+ capacity: the queue is as long as can be served within 2s and holds 268435456 bytes at most; interactive, background and best_effort weigh 75, 22 and 3; streams that wait get a comment every 15s; from pressure 0.7 requests above 9 tokens are shed, from 0.8 plans below tier 2 are shed, from 0.9 class background and best_effort are shed",
		},
		"nothing shed":   {"|", "|capacity: {shed: []}", "+ capacity: the queue is as long as can be served within 2s and holds 268435456 bytes at most; interactive, background and best_effort weigh 75, 22 and 3; nothing is shed"},
		"its fields":     {"|capacity: {target_wait: 1s, shed: [{at: 0.7, above_tokens: 9}]}", "|capacity: {target_wait: 3s, shed: []}", "+ capacity.shed: []\n- capacity.shed[0]: 0.7: requests above 9 tokens\n~ capacity.target_wait: 1s -> 3s"},
		"the default":    {"|capacity: {target_wait: 1s}", "|capacity: {target_wait: 1s, shed: []}", "+ capacity.shed: []"},
		"learnt":         {"slots: 8|", "slots: 8, learn: {}|", "+ backends[b].learn: how many slots there are is learnt, from 1 to 8"},
		"learnt else":    {"slots: 8, learn: {min: 3}|", "slots: 8, learn: {min: 2}|", "~ backends[b].learn.min: 3 -> 2"},
		"learnt no more": {"slots: 8, learn: {min: 3}|", "slots: 8|", "- backends[b].learn: how many slots there are is learnt, from 3 to 8"},
		"backend":        {"|", "kind: openai, models: {m: x}, timeouts: {idle: 3s}|", "+ backends[b].kind: openai\n+ backends[b].models[m]: x\n+ backends[b].timeouts.idle: 3s"},
		"other name":     {"models: {m: x}|", "models: {m: y}|", "~ backends[b].models[m]: x -> y"},
		"rungs": {
			"|ladder: [{rung: drop_optional}, {rung: cut_max_tokens, at: 0.8, max_tokens: 9}]", "|ladder: [{rung: cut_max_tokens, at: 0.9, max_tokens: 9}, {rung: static_answer, at: 0.9, for: 3s, text: Busy., models: [m]}]",
			"~ ladder[cut_max_tokens].at: 0.8 -> 0.9\n- ladder[drop_optional]: by hand\n+ ladder[static_answer]: by itself from pressure 0.9 for 3s until below 0.7 for 6s, \"Busy.\", for m",
		},
		"other rungs": {
			"|ladder: [{rung: cut_max_tokens, max_tokens: 9}]", "|ladder: [{rung: shed_cost, above_tokens: 9}, {rung: static_answer, fallback_url: 'https://x'}]",
			"- ladder[cut_max_tokens]: by hand, 9 tokens at most\n+ ladder[shed_cost]: by hand, above 9 tokens\n+ ladder[static_answer]: by hand, to https://x",
		},
		"routes": {
			"|", "|routes: [{name: r, match: {models: [m, tiny], surfaces: [docs], classes: [background], tenants: [acme], below_tier: 2, input_tokens: {above: 1, below: 9}, output_tokens: {above: 7}, headers: {X-A: b}}, to: [{model: tiny}]}, {name: canary, match: {models: [m], output_tokens: {below: 3}}, to: [{model: m, weight: 9}, {model: tiny}]}]",
			"+ routes[canary]: requests for m with fewer than 3 output tokens go to m (9), tiny (1), the same for each user\n" +
				"+ routes[r]: requests for m or tiny of surface docs of class background of tenant acme of plans below tier 2 with more than 1 and fewer than 9 input tokens with more than 7 output tokens with X-A: b go to tiny",
		},
		"weights": {
			"|routes: [{name: r, match: {models: [m]}, to: [{model: m, weight: 9}, {model: tiny}]}]", "|routes: [{name: r, match: {models: [m]}, to: [{model: m, weight: 5}, {model: tiny}]}]",
			"~ routes[r].to[0]: m, weight 9 -> m, weight 5",
		},
	} {
		policy := func(text string) *Policy {
			backend, policy, _ := strings.Cut(text, "|")
			return mustParse(t, admitted(backend, policy))
		}
		if got := differences(policy(c.old), policy(c.new)); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", name, got, c.want)
		}
	}
}

// TestAnOrderOfRoutesIsSaid: which comes first decides, so that to change it is a change.
func TestAnOrderOfRoutesIsSaid(t *testing.T) {
	const a, b = "{name: a, match: {models: [m]}, to: [{model: m}]}", "{name: b, match: {models: [tiny]}, to: [{model: m}]}"
	order := func(x, y string) *Policy { return mustParse(t, admitted("", "routes: ["+x+", "+y+"]")) }
	if got := differences(order(a, b), order(b, a)); got != "~ routes: a, b -> b, a" {
		t.Errorf("got %s", got)
	}
	if got := differences(order(a, b), order(a, b)); got != "" {
		t.Errorf("the same order differs: %v", got)
	}
}

// TestDrainsAreRungs: a drain is a rung to the state, without a new version of commands or snapshots, and rungs of
// names that no release knows pass through as well.
func TestDrainsAreRungs(t *testing.T) {
	long := strings.Repeat("b", MaxDrain)
	names := append([]string{DrainRung("vllm-a"), DrainRung("a/b:c@d"), DrainRung(long)}, RungNames...)
	s := NewState()
	for i, name := range names {
		c := command(uint64(i+1), &ledgerpb.SetRung{Rung: name, On: true, ExpiresUnixNano: 2e18, Reason: "why"})
		if r, err := s.Apply(uint64(i+1), c); err != nil || r.GetCode() != "" || c.GetVersion() > 1 {
			t.Fatalf("%s, version %d: %v, %v", name, c.GetVersion(), r, err)
		}
	}
	if v := s.Capture().version(); v != 1 {
		t.Errorf("the snapshot is of version %d", v)
	}
	var drained []string
	back := readState(t, snapshotOf(t, s)).Facts()
	for _, r := range back.Rungs.All() {
		if name, ok := r.Drains(); ok {
			drained = append(drained, name)
		} else if !slices.Contains(RungNames, r.Name) {
			t.Errorf("%s is neither", r.Name)
		}
	}
	if want := []string{"a/b:c@d", long, "vllm-a"}; !slices.Equal(drained, want) || back.Rungs.Len() != len(names) || back.Hash != s.Facts().Hash {
		t.Errorf("%d rungs, of which drain: %v, want %v", back.Rungs.Len(), drained, want)
	}
	n := uint64(len(names))
	if r, err := s.Apply(n+1, command(n+1, &ledgerpb.SetRung{Rung: DrainRung(long + "b"), On: true})); err != nil || r.GetCode() != codeInvalid {
		t.Errorf("a name that is too long: %v, %v", r, err)
	}
	if r, err := s.Apply(n+2, command(n+2, &ledgerpb.SetRung{Rung: DrainRung("vllm-a")})); err != nil || r.GetCode() != "" {
		t.Errorf("undrained: %v, %v", r, err)
	}
	if _, ok := s.Facts().Rungs.Lookup(DrainRung("vllm-a")); ok {
		t.Error("it is still drained")
	}
	for _, name := range []string{"drain/", "drain", "stale_cache", "xdrain/a"} {
		if b, ok := (&Rung{Name: name}).Drains(); ok {
			t.Errorf("%s drains %q", name, b)
		}
	}
}

// TestDrainsOutliveBackends: who puts a backend into the policy that a flag of before drains is told.
func TestDrainsOutliveBackends(t *testing.T) {
	at := time.Unix(1e9, 0)
	flag := func(expires time.Time) *Facts {
		return &Facts{Rungs: Rungs{map[string]*Rung{DrainRung("b"): {Name: DrainRung("b"), Expires: expires, Time: at}, "stale_cache": {Name: "stale_cache"}}}}
	}
	const want = "backends[b]: it is drained since 2001-09-09T01:46:40Z and gets no requests; headgate undrain b ends that"
	for name, c := range map[string]struct {
		f    *Facts
		said bool
	}{
		"new, drained":            {flag(time.Time{}), true},
		"new, drained for a time": {flag(at.Add(time.Second)), true},
		"new, drained before":     {flag(at), false},
		"new, not drained":        {&Facts{}, false},
		"in force, drained": {func() *Facts {
			f := flag(time.Time{})
			f.Policy = &PolicyRevision{Revision: 1, Text: []byte(admitted("", ""))}
			return f
		}(), false},
	} {
		plan, err := Prepare(at, []byte(admitted("", "")), c.f, nil, nil)
		must(t, err)
		if slices.Contains(plan.Warnings, want) != c.said {
			t.Errorf("%s: %q", name, plan.Warnings)
		}
	}
}

// TestAdmissionIsTextToTheState: as the other fields of a policy these are no new version, so that a node of a release
// before keeps the policy that it has until it is upgraded; see TestPoliciesAreTextToTheState.
func TestAdmissionIsTextToTheState(t *testing.T) {
	plan, err := Prepare(time.Unix(1e9, 0), []byte(example), &Facts{}, nil, nil)
	must(t, err)
	c := command(1, plan.Command)
	s := NewState()
	if r, err := s.Apply(1, c); err != nil || r.GetCode() != "" || c.GetVersion() > 1 || s.Capture().version() != 1 {
		t.Fatalf("version %d, a snapshot of %d: %v, %v", c.GetVersion(), s.Capture().version(), r, err)
	}
	if back := readState(t, snapshotOf(t, s)).Facts(); !bytes.Equal(back.Policy.Text, []byte(example)) || back.Hash != s.Facts().Hash {
		t.Errorf("it reads back as %+v", back)
	}
}

// checkAdmission: what a valid policy says is within what the resolved types promise.
func checkAdmission(t *testing.T, ix *Index) {
	t.Helper()
	known := func(name string) bool {
		return slices.ContainsFunc(ix.Models, func(m Model) bool { return m.Name == name })
	}
	pressure := func(f float64) bool { return f > 0 && f <= 1 }
	for _, b := range ix.Backends {
		if !slices.Contains(kindNames, b.Kind) || b.SlotTokens < 1 || b.LearnMin < 0 || b.LearnMin > b.Slots || b.Overflow && b.Slots == 0 || (b.Learn != nil) != (b.LearnMin > 0) ||
			b.MetricsPath != "" && b.MetricsPath[0] != '/' || min(b.ConnectTimeout, b.FirstByteTimeout, b.IdleTimeout) < 0 {
			t.Fatalf("the backend %+v", b)
		}
		for public, upstream := range b.Models {
			if !known(public) || upstream == "" {
				t.Fatalf("the backend calls %q %q", public, upstream)
			}
		}
	}
	k := ix.Capacity
	if k.TargetWait <= 0 || k.MaxBytes <= 0 || k.KeepAlive < 0 || min(k.Weights[0], k.Weights[1], k.Weights[2]) < 1 || 5*k.Weights[1] < k.Weights[0]+k.Weights[1]+k.Weights[2] {
		t.Fatalf("the capacity is %+v", k)
	}
	for i, s := range k.Shed {
		if !pressure(s.At) || i > 0 && s.At < k.Shed[i-1].At || (s.AboveTokens > 0) == (s.BelowTier != nil || s.Class != "") {
			t.Fatalf("cut-off %d of %+v", i, k.Shed)
		}
	}
	for i, l := range ix.Ladder {
		if !slices.Contains(RungNames, l.Rung) || l.Auto != pressure(l.At) || l.Auto && (l.OffAt <= 0 || l.OffAt >= l.At || l.For <= 0) || min(l.AboveTokens, l.MaxTokens) < 0 ||
			i > 0 && slices.Index(RungNames, l.Rung) <= slices.Index(RungNames, ix.Ladder[i-1].Rung) || slices.ContainsFunc(l.Models, func(n string) bool { return !known(n) }) {
			t.Fatalf("rung %d is %+v", i, l)
		}
	}
	for _, r := range ix.Routes {
		var sum int64
		for _, target := range r.To {
			if sum += target.Weight; !known(target.Model) || target.Weight < 0 {
				t.Fatalf("the route %+v", r)
			}
		}
		if sum < 1 || !slices.Contains(stickyNames, r.Sticky) || slices.ContainsFunc(r.Headers, func(h HeaderMatch) bool { return h.Name == "" || h.Value == "" }) {
			t.Fatalf("the route %+v", r)
		}
	}
}
