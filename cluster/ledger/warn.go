package ledger

import (
	"fmt"
	"maps"
	"slices"
)

// priceGap is how far apart prices may lie without a warning: as far as one of a token and one of a million.
const priceGap = 1_000_000

// emergencyPart: a node may set this part of a budget's amount aside without a warning.
const emergencyPart = 10

// warnings are lines, maxWarnings at most; those beyond are counted.
type warnings struct {
	lines []string
	more  int
}

func (w *warnings) add(at place, format string, args ...any) {
	if len(w.lines) >= maxWarnings {
		w.more++
		return
	}
	w.lines = append(w.lines, at.human+": "+clip(fmt.Sprintf(format, args...)))
}

func (w *warnings) all() []string {
	if w.more > 0 {
		return append(w.lines, fmt.Sprintf("%d more of the policy's figures look like mistakes", w.more))
	}
	return w.lines
}

// Warnings says what of a valid policy looks like a mistake and is done all the same: budgets of nothing or with
// much set aside, names that limits and budgets share, prices a million times apart, sensitive or fleeting answers that are kept, cut-offs, rungs
// and routes that can never act, backends that bill what nothing prices or whose paths have /v1 twice, fallbacks that take less. maxWarnings and a count at most.
func (p *Policy) Warnings() []string {
	var w warnings
	root := place{"", "$"}
	for i := range p.Plans {
		w.budgets(root.item("plans", i, p.Plans[i].Name), p.Plans[i].Budgets, p.Plans[i].Limits)
	}
	w.budgets(root.field("global"), p.Global.Budgets, p.Global.Limits)
	w.prices(p.statedPrices())
	w.surfaces(p)
	w.admission(p)
	return w.all()
}

func (w *warnings) budgets(at place, budgets []Budget, limits []Limit) {
	for i := range budgets {
		b, in := &budgets[i], at.item("budgets", i, budgets[i].Name)
		if b.Amount != nil && *b.Amount == 0 {
			w.add(in.field("amount"), "with 0.00 dollars only free models are served")
		}
		if b.Amount != nil && b.EmergencyPerNode > *b.Amount/emergencyPart {
			w.add(in.field("emergency_per_node"), "%s dollars is more than a tenth of the amount, %s, and every node sets as much aside, up to half of the amount in all: requests get only the rest", b.EmergencyPerNode, *b.Amount)
		}
		if slices.ContainsFunc(limits, func(l Limit) bool { return l.Name == b.Name }) {
			w.add(in.field("name"), "a limit is called %q as well, and the RateLimit headers have both; give the budget another name", b.Name)
		}
	}
}

// statedPrice is a price that is stated and not 0, with what to compare it to.
type statedPrice struct {
	at     place
	kind   kind
	per    string
	beside []kind
}

// statedPrices are those of all models, at all moments.
func (p *Policy) statedPrices() (out []statedPrice) {
	for i := range p.Models {
		m, at := &p.Models[i], place{"", "$"}.item("models", i, p.Models[i].Name)
		before := map[string]*NanoUSD{} // the latest of each kind
		moment := func(at place, p *Price, f *Flat) {
			stated := func(at place, per string, k kind, input *NanoUSD) {
				if k.price == nil || *k.price == 0 {
					return
				}
				s := statedPrice{at: at.field(k.name), kind: k, per: per}
				if input != nil && *input != 0 && k.name != "input" {
					s.beside = append(s.beside, kind{"its own input", input})
				}
				if b := before[k.name]; b != nil {
					s.beside = append(s.beside, kind{"the price before", b})
				}
				before[k.name] = k.price
				out = append(out, s)
			}
			for _, k := range p.kinds() {
				stated(at.field("price_per_million"), "a million tokens", k, p.Input)
			}
			for _, k := range f.kinds() {
				stated(at.field("price_flat"), "one", k, nil)
			}
		}
		moment(at, &m.Price, &m.Flat)
		for j := range m.Prices {
			moment(at.item("prices", j, ""), &m.Prices[j].Price, &m.Prices[j].Flat)
		}
	}
	return out
}

// prices warns of those a million times what they are compared to, or a millionth.
func (w *warnings) prices(all []statedPrice) {
	byKind := map[string][]NanoUSD{}
	for _, s := range all {
		byKind[s.kind.name] = append(byKind[s.kind.name], *s.kind.price)
	}
	for name := range byKind {
		slices.Sort(byKind[name])
	}
	for _, s := range all {
		same := byKind[s.kind.name]
		for _, b := range append(s.beside, kind{"the median over all models", &same[(len(same)-1)/2]}) {
			x, y := *s.kind.price, *b.price
			if max(x, y)/priceGap >= min(x, y) {
				w.add(s.at, "%s dollars for %s is a million times more or less than %s, %s; is that so?", x, s.per, b.name, y)
				break
			}
		}
	}
}

// restarted warns of budgets that start anew because they are kept in other accounts than before.
func restarted(old, p *Policy) []string {
	var w warnings
	was, now := old.budgetsByPath(), p.budgetsByPath()
	for _, path := range slices.Sorted(maps.Keys(now)) {
		a, b := was[path], now[path]
		if a == nil || a.calendar() == b.calendar() && a.Scope == b.Scope {
			continue
		}
		w.add(place{human: path}, "it starts anew with nothing spent, because its period, time zone or scope is another: %s was %s", b.words(), a.words())
	}
	return w.all()
}
