package ledger

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// moneyPolicy is a policy with one tenant, the budgets of its plan and the models given.
func moneyPolicy(budgets, models string) string {
	return "version: 1\nbackends: [{name: b, url: \"http://127.0.0.1:1\"}]\nmodels: [" + models + "]\nplans: [{name: p, budgets: [" + budgets + "]}]\ntenants: [{name: t, plan: p}]\n"
}

const (
	freeModel = "{name: m, backends: [b], free: true}"
	aBudget   = `{name: month, scope: org, amount: "5.00", period: month}`
)

func TestBudgetsRefused(t *testing.T) {
	budget := func(fields string) string { return moneyPolicy("{name: x, "+fields+"}", freeModel) }
	for name, c := range map[string]struct{ text, want string }{
		"no amount":        {budget(`scope: org, period: day`), `plans[p].budgets[x].amount: a budget needs an amount in dollars, as in "250.00"`},
		"a negative one":   {budget(`scope: org, period: day, amount: "-5.00"`), `budgets[x].amount: "-5.00" is negative`},
		"1e15 dollars":     {budget(`scope: org, period: day, amount: "1000000000000000.00"`), `"1000000000000000.00" is too much: 999999999.999999999 dollars are the most`},
		"1e15 in short":    {budget(`scope: org, period: day, amount: "1e15"`), `"1e15" is not an amount of money`},
		"a float":          {budget(`scope: org, period: day, amount: 250.00`), "quoted decimal string"},
		"dust":             {budget(`scope: org, period: day, amount: "0.0000000001"`), "at most nine decimals"},
		"no period":        {budget(`scope: org, amount: "1"`), `budgets[x].period: "" is not one of day, week, month, rolling, none`},
		"a slip in it":     {budget(`scope: org, amount: "1", period: moth`), `did you mean "month"?`},
		"no scope":         {budget(`amount: "1", period: day`), `budgets[x].scope: "" is not one of key, user, org, model, global`},
		"scope twice":      {budget(`scope: user+user, amount: "1", period: day`), "names a part twice"},
		"global combined":  {budget(`scope: global+key, amount: "1", period: day`), "global can't be combined"},
		"mode":             {budget(`scope: org, amount: "1", period: day, mode: hard`), `budgets[x].mode: "hard" is not one of strict, normal`},
		"unknown field":    {budget(`scope: org, amount: "1", period: day, timezone: UTC`), `unknown field "timezone"; did you mean "time_zone"?`},
		"unknown zone":     {budget(`scope: org, amount: "1", period: day, time_zone: Europe/Berln`), `budgets[x].time_zone: there is no time zone "Europe/Berln": write a name of the IANA database, as in Europe/Berlin; did you mean "Europe/Berlin"?`},
		"a city":           {budget(`scope: org, amount: "1", period: day, time_zone: berlin`), `did you mean "Europe/Berlin"?`},
		"the machine's":    {budget(`scope: org, amount: "1", period: day, time_zone: Local`), `there is no time zone "Local"`},
		"a useless zone":   {budget(`scope: org, amount: "1", period: none, time_zone: UTC`), "a time zone does nothing"},
		"no window":        {budget(`scope: org, amount: "1", period: rolling`), "budgets[x].window: a rolling budget needs a window between 1h and 400d"},
		"a short window":   {budget(`scope: org, amount: "1", period: rolling, window: 59m`), "between 1h and 400d"},
		"a long window":    {budget(`scope: org, amount: "1", period: rolling, window: 401d`), "between 1h and 400d"},
		"a useless window": {budget(`scope: org, amount: "1", period: day, window: 1d`), "a window is for period: rolling"},
		"alerts fall":      {budget(`scope: org, amount: "1", period: day, alerts: [80, 50]`), "budgets[x].alerts: alerts are rising percentages"},
		"alerts twice":     {budget(`scope: org, amount: "1", period: day, alerts: [50, 50]`), "rising percentages"},
		"alert at nothing": {budget(`scope: org, amount: "1", period: day, alerts: [0]`), "between 1 and 1000"},
		"alert beyond all": {budget(`scope: org, amount: "1", period: day, alerts: [1001]`), "between 1 and 1000"},
		"no alerts":        {budget(`scope: org, amount: "1", period: day, alerts: []`), "leave it out"},
		"many alerts":      {budget(`scope: org, amount: "1", period: day, alerts: [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]`), "17 alerts, of 16 at most"},
		"spike below one":  {budget(`scope: org, amount: "1", period: day, spike: {factor: 0.5}`), "budgets[x].spike.factor: a spike is between 1 and 1000 times"},
		"spike of nobody":  {budget(`scope: model, amount: "1", period: day, spike: {factor: 5}`), "budgets[x].spike: a spike is told of a tenant"},
		"emergency":        {budget(`scope: org, amount: "1", period: day, emergency_per_node: "1.01"`), "budgets[x].emergency_per_node: 1.01 is not between 0.00 and the budget's amount, 1.00"},
		"same name":        {moneyPolicy(aBudget+", "+aBudget, freeModel), `the name "month" is used twice`},
		"global's name":    {moneyPolicy(aBudget, freeModel) + `global: {budgets: [{name: month, scope: global, amount: "1", period: day}]}`, `the name "month" is used twice`},
		"global on org":    {moneyPolicy("", freeModel) + `global: {budgets: [{name: g, scope: org, amount: "1", period: day}]}`, "global.budgets[g].scope: a global budget has scope global or model"},
		"nine of them": {moneyPolicy(func() string {
			var b strings.Builder
			for i := range 8 {
				fmt.Fprintf(&b, `{name: b%d, scope: org, amount: "1", period: day},`, i)
			}
			return b.String()
		}(), freeModel) + `global: {budgets: [{name: g, scope: global, amount: "1", period: day}]}`, "9 budgets apply to one request, with the global ones; 8 are allowed"},

		"no price":           {moneyPolicy(aBudget, "{name: m, backends: [b]}"), `models[m].price_per_million: plans[p].budgets[month] limits money, and nothing says what the model "m" costs: state its input and output, where it has none as "0.00", or write free: true`},
		"no output":          {moneyPolicy(aBudget, `{name: m, backends: [b], price_per_million: {input: "1"}}`), "models[m].price_per_million.output: "},
		"no input":           {moneyPolicy(aBudget, `{name: m, backends: [b], price_per_million: {output: "1"}}`), "models[m].price_per_million.input: "},
		"no price, a limit":  {strings.Replace(moneyPolicy("", "{name: m, backends: [b]}"), "budgets: []", "limits: [{name: l, scope: org, unit: usd, rate: 1.00/h}]", 1), "plans[p].limits[l] limits money"},
		"no price, global":   {moneyPolicy("", "{name: m, backends: [b]}") + `global: {budgets: [{name: g, scope: global, amount: "1", period: day}]}`, "global.budgets[g] limits money"},
		"free and priced":    {moneyPolicy(aBudget, `{name: m, backends: [b], free: true, price_flat: {request: "1"}}`), "models[m].free: a free model has no prices"},
		"later: no moment":   {moneyPolicy("", `{name: m, backends: [b], prices: [{free: true}]}`), "models[m].prices[0].from: prices need the moment"},
		"later: order":       {moneyPolicy("", `{name: m, backends: [b], prices: [{from: 2027-01-01, free: true}, {from: 2027-01-01, free: true}]}`), "models[m].prices[1].from: prices must come in the order"},
		"later: no price":    {moneyPolicy("", `{name: m, backends: [b], prices: [{from: 2027-01-01, price_flat: {image: "1"}}]}`), "models[m].prices[0].price_per_million: these prices replace all of before"},
		"hook without http":  {moneyPolicy("", freeModel) + "notify: {webhook: \"ftp://x\"}", "notify.webhook: a webhook is an http:// or https:// URL"},
		"a secret in a hook": {moneyPolicy("", freeModel) + "notify: {webhook: \"https://u:p@x/\"}", "a policy holds no secrets"},
		"token without hook": {moneyPolicy("", freeModel) + "notify: {token_env: T}", "notify.token_env: a token without a webhook"},
		"token is no name":   {moneyPolicy("", freeModel) + "notify: {webhook: \"https://x/\", token_env: \"s3-cret\"}", "name an environment variable"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := ParsePolicy([]byte(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

// TestOnePriceOneProblem: a price that can't be read is not said to be missing as well.
func TestOnePriceOneProblem(t *testing.T) {
	_, err := ParsePolicy([]byte(moneyPolicy(aBudget, `{name: m, backends: [b], price_per_million: {input: 1.5, output: "1"}}`)))
	if ps, ok := errors.AsType[Problems](err); !ok || len(ps) != 1 {
		t.Errorf("got %v", err)
	}
}

// TestPricesOfBefore: what was accepted before prices had to be stated stays readable, and takes keys.
func TestPricesOfBefore(t *testing.T) {
	p, err := ParseInForce([]byte(moneyPolicy(aBudget, "{name: m, backends: [b]}")))
	must(t, err)
	if _, err := p.PrepareKeys("", time.Time{}, Key{ID: "k", Tenant: "t", Hash: zeroHash}); err != nil {
		t.Errorf("no key can be created: %v", err)
	}
	if p.Validate() == nil {
		t.Error("it passes for a new one")
	}
	if _, err := ParseInForce([]byte(moneyPolicy("{name: x}", freeModel))); err == nil {
		t.Error("any other mistake passes")
	}
}

func TestBudgetsResolve(t *testing.T) {
	p := mustParse(t, example)
	ix, err := p.IndexAt(time.Date(2026, 10, 25, 12, 0, 0, 0, time.UTC), Numbers{Policy: 3, Local: 9}, Share{Rank: 1, Of: 3}, keysOf(t, p.Keys...))
	must(t, err)
	c, ok := ix.Lookup([32]byte{})
	if !ok {
		t.Fatal("no caller")
	}
	var names []string
	by := map[string]ResolvedBudget{}
	for _, b := range c.Budgets {
		names = append(names, b.Bucket)
		by[b.Name] = b
	}
	if want := []string{"org-month", "user-30d", "pro/small-ever", "fleet-day"}; !slices.Equal(names, want) {
		t.Errorf("%v, want %v", names, want)
	}
	month := by["org-month"]
	if got := fmt.Sprintf("%+v %v", month.Terms, month.Strict); got != "{Amount:250000000000 Revision:3145728 Window:0s Slot:0s Alerts:[50 90] Spike:{Factor:5 Floor:0.50 Kill:true} Name:org-month} true" {
		t.Errorf("org-month is %s", got)
	}
	if start, end := month.Calendar.At(time.Date(2026, 10, 31, 23, 30, 0, 0, time.UTC)); time.Unix(0, start).UTC() != time.Date(2026, 10, 31, 23, 0, 0, 0, time.UTC) || end-start != int64(30*24*time.Hour) {
		t.Errorf("November in Berlin begins %v", time.Unix(0, start).UTC())
	}
	rolling := by["user-30d"].Terms
	if rolling.Window != 30*24*time.Hour || rolling.Slot != 12*time.Hour || !slices.Equal(rolling.Alerts, []int{50, 80, 100}) || by["user-30d"].Strict {
		t.Errorf("user-30d is %+v", rolling)
	}
	other, _ := ix.Tenant("old")
	if &other.Budgets[0] != &c.Budgets[0] {
		t.Error("two tenants of a plan have budgets of their own")
	}
	for _, b := range c.Budgets {
		if err := b.Terms.check(&BudgetKey{}); err != nil {
			t.Errorf("the ledger refuses %s: %v", b.Name, err)
		}
	}
}

// TestTermsAreTheLedgers: whatever budget is valid as written, the ledger takes its terms.
func TestTermsAreTheLedgers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		amount := NanoUSD(rapid.Int64Range(0, int64(maxUSD)).Draw(t, "amount"))
		b := Budget{Name: "b", Scope: "org", Amount: &amount, Period: rapid.SampledFrom(periodNames).Draw(t, "period")}
		if b.Period == "rolling" {
			b.Window = Duration(rapid.Int64Range(int64(minWindow), int64(maxWindow)).Draw(t, "window"))
		}
		if rapid.Bool().Draw(t, "spike") {
			b.Spike = &Spike{Factor: Factor(rapid.Int64Range(int64(factorOne), maxFactor).Draw(t, "factor")), Floor: NanoUSD(rapid.Int64Range(0, int64(maxUSD)).Draw(t, "floor"))}
		}
		c := &checker{p: &Policy{}, calendars: calendars{}}
		if c.budget(place{"", "$"}, &b, map[string]bool{}, false); len(c.found) > 0 {
			t.Fatalf("%+v: %v", b, c.found)
		}
		r, err := b.resolve("b", 1, calendars{})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Terms.check(&BudgetKey{}); err != nil {
			t.Fatalf("%+v: %v", r.Terms, err)
		}
		if w := r.Terms.Window; w > 0 && (w+r.Terms.Slot-1)/r.Terms.Slot > rollingSlots {
			t.Fatalf("%v of %v are too many slots", w, r.Terms.Slot)
		}
		if b.Spike != nil && r.Terms.Spike.Floor <= 0 {
			t.Fatal("a spike without a floor")
		}
	})
}

func TestPricesTakeEffect(t *testing.T) {
	p := mustParse(t, moneyPolicy(aBudget, `{name: m, backends: [b], price_per_million: {input: "1.00", cached_input: "0.10", output: "2.00"}, price_flat: {request: "0.50"},
  prices: [{from: 2027-01-01, price_per_million: {input: "3.00", output: "4.00"}}, {from: 2027-02-01T06:00:00Z, free: true}]}`))
	at := func(s string) time.Time { x, err := time.Parse(time.RFC3339, s); must(t, err); return x }
	for _, c := range []struct {
		now, next string
		cost      NanoUSD
	}{
		{"2026-12-31T23:59:59Z", "2027-01-01T00:00:00Z", 500_000_000 + 500*1000 + 500*100 + 1000*2000},
		{"2027-01-01T00:00:00Z", "2027-02-01T06:00:00Z", 1000*3000 + 1000*4000}, // the cached price and the flat one are not taken over
		{"2027-02-01T06:00:00Z", "", 0},
	} {
		ix, err := p.Index(at(c.now), 1, Share{}, nil)
		must(t, err)
		if got := ix.Models[0].Cost(Usage{Input: 1000, CachedInput: 500, Output: 1000}); got != c.cost {
			t.Errorf("at %s: %s, want %s", c.now, got, c.cost)
		}
		if next := ix.NextChange; c.next == "" != next.IsZero() || c.next != "" && !next.Equal(at(c.next)) {
			t.Errorf("at %s: next change %v, want %q", c.now, next, c.next)
		}
		if free := ix.Models[0].Free(); free != (c.cost == 0) {
			t.Errorf("at %s: free is %v", c.now, free)
		}
	}
	if p.Models[0].Price.CachedInput == nil {
		t.Error("an index changed the policy")
	}
}

func TestFree(t *testing.T) {
	zero, one := NanoUSD(0), NanoUSD(1)
	for _, c := range []struct {
		m    Model
		free bool
	}{
		{Model{}, true},
		{Model{Gratis: true}, true},
		{Model{Price: Price{Input: &zero, Output: &zero}}, true},
		{Model{Price: Price{Input: &zero, Output: &one}}, false},
		{Model{Price: Price{Input: &zero, CacheWrite1h: &one, Output: &zero}}, false},
		{Model{Flat: Flat{Image: 1}}, false},
	} {
		if c.m.Free() != c.free {
			t.Errorf("%+v: free is %v", c.m, !c.free)
		}
	}
}

// TestUpperBound: no usage within the bound costs more, and what is more never costs less.
func TestUpperBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		price := rapid.Map(rapid.Int64Range(0, 1<<42), func(i int64) NanoUSD { return NanoUSD(i) })
		some := func(name string) *NanoUSD {
			if !rapid.Bool().Draw(t, "states "+name) {
				return nil
			}
			n := price.Draw(t, name)
			return &n
		}
		m := Model{
			Price: Price{Input: some("input"), CachedInput: some("cached"), CacheWrite: some("write"), CacheWrite1h: some("hour"), Output: some("output")},
			Flat:  Flat{Request: price.Draw(t, "request"), Image: price.Draw(t, "image"), AudioSecond: price.Draw(t, "second")},
		}
		n := rapid.Int64Range(0, 1<<40)
		bound := [4]int64{n.Draw(t, "in"), n.Draw(t, "out"), n.Draw(t, "images"), n.Draw(t, "seconds")}
		within := func(i int, name string) int64 { return rapid.Int64Range(0, bound[i]).Draw(t, name) }
		u := Usage{Input: within(0, "used in"), Output: within(1, "used out"), Images: within(2, "used images"), AudioSeconds: within(3, "used seconds")}
		u.CachedInput, u.CacheWrite, u.CacheWrite1h = within(0, "used cached"), within(0, "used write"), within(0, "used hour")
		most := m.UpperBound(bound[0], bound[1], bound[2], bound[3])
		if cost := m.Cost(u); cost > most {
			t.Fatalf("%+v costs %s, above %s", u, cost, most)
		}
		if less := m.UpperBound(u.Input, u.Output, u.Images, u.AudioSeconds); less > most {
			t.Fatalf("less costs at most %s, and more %s", less, most)
		}
		if m.Free() && most != 0 {
			t.Fatalf("free, and %s", most)
		}
	})
}

func TestWarnings(t *testing.T) {
	model := func(name, in, out string) string {
		return fmt.Sprintf("{name: %s, backends: [b], price_per_million: {input: %q, output: %q}}", name, in, out)
	}
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"none":                {moneyPolicy(aBudget, model("m", "0.20", "0.60")+", "+model("n", "15.00", "75.00")+", "+model("o", "0.00", "0.00")), nil},
		"a budget of nothing": {moneyPolicy(`{name: x, scope: org, amount: "0.00", period: none}`, freeModel), []string{"plans[p].budgets[x].amount: with 0.00 dollars only free models are served"}},
		"too much aside": {moneyPolicy(`{name: x, scope: org, amount: "10.00", period: none, emergency_per_node: "1.01"}, {name: y, scope: org, amount: "10.00", period: none, emergency_per_node: "1.00"}`, freeModel), []string{
			"plans[p].budgets[x].emergency_per_node: 1.01 dollars is more than a tenth of the amount, 10.00, and every node sets as much aside, up to half of the amount in all: requests get only the rest",
		}},
		"a shared name": {strings.Replace(moneyPolicy(aBudget, freeModel), "budgets:", "limits: [{name: month, scope: org, unit: requests, rate: 1/s}], budgets:", 1), []string{`plans[p].budgets[month].name: a limit is called "month" as well, and the RateLimit headers have both; give the budget another name`}},
		"a token for a million": {moneyPolicy(aBudget, model("m", "0.20", "0.60")+", "+model("n", "0.10", "0.40")+", "+model("o", "0.0000001", "0.0000004")), []string{
			"models[o].price_per_million.input: 0.0000001 dollars for a million tokens is a million times more or less than the median over all models, 0.10; is that so?",
			"models[o].price_per_million.output: 0.0000004 dollars for a million tokens is a million times more or less than the median over all models, 0.40; is that so?",
		}},
		"input and output": {moneyPolicy(aBudget, model("m", "0.20", "200000.00")), []string{"models[m].price_per_million.output: 200000.00 dollars for a million tokens is a million times more or less than its own input, 0.20; is that so?"}},
		"just below":       {moneyPolicy(aBudget, model("m", "0.20", "199999.99")), nil},
		"a later one": {moneyPolicy(aBudget, `{name: m, backends: [b], price_per_million: {input: "1", output: "1"}, prices: [{from: 2027-01-01, price_per_million: {input: "1000000", output: "1000000"}}]}`), []string{
			"models[m].prices[0].price_per_million.input: 1000000.00 dollars for a million tokens is a million times more or less than the price before, 1.00; is that so?",
			"models[m].prices[0].price_per_million.output: 1000000.00 dollars for a million tokens is a million times more or less than the price before, 1.00; is that so?",
		}},
		"a flat one": {moneyPolicy(aBudget, `{name: m, backends: [b], free: false, price_per_million: {input: "0", output: "0"}, price_flat: {image: "0.001"}}, {name: n, backends: [b], price_per_million: {input: "0", output: "0"}, price_flat: {image: "1000"}}`), []string{
			"models[n].price_flat.image: 1000.00 dollars for one is a million times more or less than the median over all models, 0.001; is that so?",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			p := mustParse(t, c.text)
			if got := p.Warnings(); !slices.Equal(got, c.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
			f := &Facts{}
			prepared, err := Prepare(time.Unix(2e9, 0), []byte(c.text), f, nil, nil)
			must(t, err)
			if !slices.Equal(prepared.Warnings, c.want) {
				t.Errorf("apply warns of %q", prepared.Warnings)
			}
		})
	}
	var many strings.Builder
	for i := range 100 {
		many.WriteString(model(fmt.Sprintf("m%d", i), "0.000001", "1000.00") + ", ")
	}
	if got := mustParse(t, moneyPolicy(aBudget, many.String())).Warnings(); len(got) != maxWarnings+1 || got[maxWarnings] != "50 more of the policy's figures look like mistakes" {
		t.Errorf("%d warnings, the last %q", len(got), got[len(got)-1])
	}
}

// TestDiffSaysBudgetsInWords, and apply that a changed period starts anew.
func TestDiffSaysBudgetsInWords(t *testing.T) {
	a := mustParse(t, moneyPolicy(aBudget+`, {name: gone, scope: user+model, amount: "1.5", period: rolling, window: 30d, mode: strict}`, freeModel))
	text := moneyPolicy(`{name: month, scope: org, amount: "7.50", period: week, time_zone: Asia/Tokyo, mode: strict}, {name: new, scope: key, amount: "3.00", period: none, alerts: [90], spike: {factor: 5, kill: true}, emergency_per_node: "0.25"}`, freeModel) +
		`global: {budgets: [{name: all, scope: global, amount: "100.00", period: day}]}`
	b := mustParse(t, text)
	var lines []string
	for _, c := range Diff(a, b) {
		lines = append(lines, c.String())
	}
	want := `+ global.budgets[all]: 100.00 USD a day (UTC) per global, normal, alerts at 50, 80, 100 %
- plans[p].budgets[gone]: 1.50 USD in any 30d per user+model, strict, alerts at 50, 80, 100 %
~ plans[p].budgets[month].amount: 5.00 -> 7.50
+ plans[p].budgets[month].mode: strict
~ plans[p].budgets[month].period: month -> week
+ plans[p].budgets[month].time_zone: Asia/Tokyo
+ plans[p].budgets[new]: 3.00 USD in all per key, normal, alerts at 90 %, spike at 5 times the hour before kills the tenant, 0.25 USD a node for emergencies`
	if got := strings.Join(lines, "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	warned := restarted(a, b)
	if len(warned) != 1 || !strings.HasPrefix(warned[0], "plans[p].budgets[month]: it starts anew with nothing spent") {
		t.Errorf("warned of %q", warned)
	}
	for _, c := range [][2]string{{"period: none", "period: rolling, window: 1d"}, {"period: day", "period: day, time_zone: UTC"}, {"period: day", "period: day, mode: strict"}} {
		budget := func(period string) *Policy {
			return mustParse(t, moneyPolicy(`{name: x, scope: org, amount: "1", `+period+`}`, freeModel))
		}
		if got := restarted(budget(c[0]), budget(c[1])); got != nil {
			t.Errorf("%v: %q", c, got)
		}
	}
	if same := restarted(b, b); same != nil {
		t.Errorf("nothing changed, and %q", same)
	}
}
