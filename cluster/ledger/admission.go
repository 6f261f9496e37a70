package ledger

import (
	"slices"
	"strings"
)

// admission warns of what of backends, cut-offs, rungs and routes looks like a mistake.
func (w *warnings) admission(p *Policy) {
	a := admissionWarnings{warnings: w, p: p, models: p.modelsByName(), backends: map[string]*Backend{}}
	root := place{"", "$"}
	for i := range p.Backends {
		a.backends[p.Backends[i].Name] = &p.Backends[i]
	}
	for i := range p.Backends {
		a.backend(root.item("backends", i, p.Backends[i].Name), &p.Backends[i])
	}
	for i := range p.Models {
		a.model(root.item("models", i, p.Models[i].Name), &p.Models[i])
	}
	if p.Capacity.Shed != nil {
		a.sheds(root.field("capacity").field("shed"), *p.Capacity.Shed)
	}
	for i := range p.Ladder {
		a.rung(root.item("ladder", i, p.Ladder[i].Rung), &p.Ladder[i])
	}
	a.routes(root)
}

// admissionWarnings are warnings of a policy whose models and backends are looked up.
type admissionWarnings struct {
	*warnings
	p        *Policy
	models   map[string]*Model // by name and alias
	backends map[string]*Backend
}

// bills says whether what a backend serves costs money by what it is.
func (b *Backend) bills() bool { return b.kind() != "vllm" }

func (a *admissionWarnings) backend(at place, b *Backend) {
	if base, ok := strings.CutSuffix(strings.TrimRight(b.URL, "/"), "/v1"); ok {
		a.add(at.field("url"), "it ends in /v1, with which the paths of requests begin already, so that they go to /v1/v1; write %s", base)
	}
	if b.bills() && b.APIKeyEnv == "" && b.APIKeyFile == "" {
		a.add(at.field("kind"), "an endpoint of kind %s wants a key, and nothing is sent to this one; write api_key_env or api_key_file", b.Kind)
	}
	if b.Learn != nil && !b.bills() && b.metricsPath() == "" {
		a.add(at.field("learn"), "without metrics how many slots there are is learnt by latency and 429s alone, which is slower; write metrics_path where there are any")
	}
	if b.Learn != nil && valueOr(b.Learn.Min, 1) == b.Slots {
		a.add(at.field("learn").field("min"), "it is as much as slots, so that nothing is learnt; write less, or remove learn")
	}
}

// model warns of what overflows, of what costs what nobody said, and of fallbacks that take less.
func (a *admissionWarnings) model(at place, m *Model) {
	overflow := 0
	for _, name := range m.Backends {
		b := a.backends[name]
		if b.Overflow {
			overflow++
		}
		switch unsaid := m.Price.Input == nil && m.Price.Output == nil && len(m.Prices) == 0; {
		case b.bills() && m.Gratis:
			a.add(at.field("free"), "its backend %s, of kind %s, bills what it serves; is that so?", b.Name, b.Kind)
		case (b.Overflow || b.bills()) && !m.Gratis && unsaid:
			a.add(at.field("price_per_million"), "its backend %s may bill what it serves, and nothing says what the model costs; write its prices, or free: true", b.Name)
		}
	}
	if overflow > 0 && overflow == len(m.Backends) {
		a.add(at.field("backends"), "all of them are overflow, which makes no difference then")
	}
	for i, name := range m.Fallback {
		if f := a.models[name]; f.Context != 0 && f.Context < m.Context {
			a.add(at.item("fallback", i, ""), "the context of %s, %d, is smaller than that of %s, %d: it is no help to longer requests, and its backend refuses those that it does not quite hold; name a model that takes as much, if there is one", name, f.Context, m.Name, m.Context)
		}
	}
}

// pressed says whether there is ever pressure for any of models, all if there are none: whether a backend of it is bounded.
func (a *admissionWarnings) pressed(models []string) bool {
	return slices.ContainsFunc(a.those(models), func(m *Model) bool {
		return slices.ContainsFunc(m.Backends, func(b string) bool { return a.backends[b].Slots > 0 })
	})
}

// those are the models that go by names, all if there are none.
func (a *admissionWarnings) those(names []string) (out []*Model) {
	for _, n := range names {
		out = append(out, a.models[n])
	}
	for i := range a.p.Models {
		if len(names) == 0 {
			out = append(out, &a.p.Models[i])
		}
	}
	return out
}

// fits says whether no request for any of models is of more than tokens: all have a context, and none a larger one.
func (a *admissionWarnings) fits(models []string, tokens int64) bool {
	return !slices.ContainsFunc(a.those(models), func(m *Model) bool { return m.Context == 0 || m.Context > tokens })
}

func (a *admissionWarnings) sheds(at place, sheds []Cutoff) {
	if len(sheds) > 0 && !a.pressed(nil) {
		a.add(at, "no backend of a model has slots, so that nothing waits and nothing is ever shed; write slots")
		return
	}
	for i := range sheds {
		s, in := &sheds[i], at.nth(i, "")
		switch below := s.BelowTier; {
		case s.AboveTokens != nil && a.fits(nil, *s.AboveTokens):
			a.add(in.field("above_tokens"), "no model takes more than %d tokens, so that this never sheds", *s.AboveTokens)
		case below != nil && !slices.ContainsFunc(a.p.Plans, func(p Plan) bool { return p.Tier < *below }):
			a.add(in.field("below_tier"), "no plan is below tier %d, so that this never sheds", *below)
		case below != nil && !slices.ContainsFunc(a.p.Plans, func(p Plan) bool { return p.Tier >= *below }):
			a.add(in.field("below_tier"), "every plan is below tier %d, so that this sheds everybody", *below)
		}
		for j := range sheds[:i] {
			if sheds[j].covers(s) {
				a.add(in, "what this sheds is shed already, from %s on; change their order, or remove it", *sheds[j].At)
				break
			}
		}
	}
}

// covers says whether s sheds all that o does.
func (s *Cutoff) covers(o *Cutoff) bool {
	switch {
	case s.AboveTokens != nil && o.AboveTokens != nil:
		return *s.AboveTokens <= *o.AboveTokens
	case s.BelowTier != nil && o.BelowTier != nil:
		return *s.BelowTier >= *o.BelowTier
	}
	return s.Class != "" && o.Class != "" && slices.Index(classNames, s.Class) <= slices.Index(classNames, o.Class)
}

func (a *admissionWarnings) rung(at place, l *LadderRung) {
	if l.At != nil && !a.pressed(l.Models) {
		a.add(at.field("at"), "no backend of its models has slots, so that there is no pressure and it never goes on by itself; write slots, or remove at")
	}
	switch l.Rung {
	case "stale_cache":
		if !slices.ContainsFunc(a.p.Surfaces, func(s Surface) bool { return s.Exact != nil }) {
			a.add(at, "no surface keeps answers, so that it never acts; write exact: {} for one")
		}
	case "smaller_model":
		if !slices.ContainsFunc(a.those(l.Models), func(m *Model) bool { return len(m.Fallback) > 0 }) {
			a.add(at, "no model of it has a fallback, so that it never acts; write fallback: [NAME] for one")
		}
	case "shed_cost":
		if l.AboveTokens != 0 && a.fits(l.Models, l.AboveTokens) {
			a.add(at.field("above_tokens"), "no model of it takes more than %d tokens, so that it never acts", l.AboveTokens)
		}
	case "shed_best_effort":
		for _, s := range a.p.Capacity.shed() {
			if l.At != nil && s.Class != "" && *s.At <= *l.At {
				a.add(at.field("at"), "best_effort is shed already, from %s on, by capacity.shed; write less, or remove one of them", *s.At)
				break
			}
		}
	}
}

func (a *admissionWarnings) routes(root place) {
	compiled := make([]ResolvedRoute, len(a.p.Routes))
	for i := range a.p.Routes {
		r := &a.p.Routes[i]
		at := root.item("routes", i, r.Name)
		compiled[i] = r.resolve(a.models)
		for j := range compiled[:i] {
			if compiled[j].covers(&compiled[i]) {
				a.add(at, "the route %s takes all of its requests before; change their order, or remove one of them", compiled[j].Name)
				break
			}
		}
		if r.Match.Models == nil && len(a.p.Models) > 1 {
			a.add(at.field("match"), "without models it takes what asks for any, for embeddings, too; is that so?")
		}
		if r.Sticky != "" && len(r.To) == 1 {
			a.add(at.field("sticky"), "with one model to go to it does nothing; remove it, or write another model")
		}
	}
}

// covers says whether r takes all requests that o would.
func (r *ResolvedRoute) covers(o *ResolvedRoute) bool {
	within := func(all, some []string) bool {
		return all == nil || some != nil && !slices.ContainsFunc(some, func(s string) bool { return !slices.Contains(all, s) })
	}
	below := func(all, some *int64) bool { return all == nil || some != nil && *some <= *all }
	above := func(all, some *int64) bool { return all == nil || some != nil && *some >= *all }
	return within(r.Models, o.Models) && within(r.Surfaces, o.Surfaces) && within(r.Classes, o.Classes) && within(r.Tenants, o.Tenants) &&
		(r.BelowTier == nil || o.BelowTier != nil && *o.BelowTier <= *r.BelowTier) &&
		below(r.InputBelow, o.InputBelow) && above(r.InputAbove, o.InputAbove) && below(r.OutputBelow, o.OutputBelow) && above(r.OutputAbove, o.OutputAbove) &&
		!slices.ContainsFunc(r.Headers, func(h HeaderMatch) bool { return !slices.Contains(o.Headers, h) })
}
