package ledger

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	maxBudgets = 8 // on one request, with the global ones
	// rollingSlots are what the window of a rolling budget is cut into at most: spending leaves the window by
	// slots, so that late by one of them.
	rollingSlots = 60
	minWindow    = time.Hour
	maxWindow    = 400 * 24 * time.Hour
)

// Names of what a budget may say.
var (
	periodNames = []string{"day", "week", "month", "rolling", "none"}
	budgetModes = []string{"strict", "normal"}
)

// defaultAlerts are the percentages at which spending is told where a budget names none.
var defaultAlerts = []int{50, 80, 100}

// Budget is an amount of money that may be spent in a period, as written; see Caller.Budgets for what it
// becomes.
type Budget struct {
	Name     string   `yaml:"name"`
	Scope    string   `yaml:"scope"`
	Amount   *NanoUSD `yaml:"amount"`              // required; "0.00": only free models pass
	Period   string   `yaml:"period"`              // day | week | month | rolling | none
	Window   Duration `yaml:"window,omitempty"`    // rolling: how long spending counts
	TimeZone string   `yaml:"time_zone,omitempty"` // IANA; absent: UTC
	Mode     string   `yaml:"mode,omitempty"`      // strict | normal; absent: normal
	Alerts   []int    `yaml:"alerts,omitempty"`    // percent, rising; absent: 50, 80, 100
	Spike    *Spike   `yaml:"spike,omitempty"`
	// EmergencyPerNode is set aside on every node out of Amount, and is spent without the ledger only
	// under an override.
	EmergencyPerNode NanoUSD `yaml:"emergency_per_node,omitempty"`
}

// Spike is a spend rate that is an event: more in a minute than Factor times the mean minute of the trailing
// hour, and not less than Floor.
type Spike struct {
	Factor Factor  `yaml:"factor"`
	Floor  NanoUSD `yaml:"floor,omitempty"` // absent: a hundredth of the budget's amount
	Kill   bool    `yaml:"kill,omitempty"`  // it throws the tenant's kill switch
}

// ResolvedBudget is a budget as it applies to a tenant. Tenants of a plan share it; nothing of it may be changed.
type ResolvedBudget struct {
	*Budget
	Bucket   string // what its accounts are called: qualified by the plan where tenants share them
	Terms    BudgetTerms
	Strict   bool
	Calendar Calendar
}

// tenantless budgets have one account for all tenants.
func (b *Budget) tenantless() bool { return tenantless(b.Scope) }

func (b *Budget) strict() bool { return b.Mode == "strict" }

func (b *Budget) zone() string { return cmp.Or(b.TimeZone, "UTC") }

// calendar names what cuts the budget's time into periods; "" where it has none.
func (b *Budget) calendar() string {
	if b.Period == "rolling" || b.Period == "none" {
		return ""
	}
	return b.Period + " " + b.zone()
}

// slot is what the window of a rolling budget is counted by, in whole seconds; 0 of any other.
func (b *Budget) slot() time.Duration {
	if b.Period != "rolling" {
		return 0
	}
	const step = rollingSlots * time.Second
	return (time.Duration(b.Window) + step - 1) / step * time.Second
}

// resolve compiles a valid budget, numbered by revision. Calendars are shared.
func (b *Budget) resolve(bucket string, revision uint64, cs calendars) (ResolvedBudget, error) {
	calendar, err := cs.of(b.Period, b.TimeZone)
	if err != nil {
		return ResolvedBudget{}, err
	}
	r := ResolvedBudget{Budget: b, Bucket: bucket, Strict: b.strict(), Calendar: calendar}
	r.Terms = BudgetTerms{Amount: int64(valueOr(b.Amount, 0)), Revision: revision, Slot: b.slot(), Alerts: b.Alerts, Name: b.Name}
	if len(b.Alerts) == 0 {
		r.Terms.Alerts = defaultAlerts
	}
	if r.Terms.Slot > 0 {
		r.Terms.Window = time.Duration(b.Window)
	}
	if b.Spike != nil {
		r.Terms.Spike = *b.Spike
		if b.Spike.Floor == 0 {
			r.Terms.Spike.Floor = NanoUSD(max(r.Terms.Amount/100, 1))
		}
	}
	return r, nil
}

// calendars are those of one policy, by period and zone.
type calendars map[[2]string]Calendar

func (cs calendars) of(period, zone string) (Calendar, error) {
	k := [2]string{period, zone}
	c, ok := cs[k]
	if !ok {
		var err error
		if c, err = CalendarOf(period, zone); err != nil {
			return c, err
		}
		cs[k] = c
	}
	return c, nil
}

// budgets are those of every plan and the global ones, compiled: the plan's in the order of the file, and
// the global ones after them.
func (p *Policy) budgets(revision uint64) (map[*Plan][]ResolvedBudget, error) {
	cs := calendars{}
	var global []ResolvedBudget
	for i := range p.Global.Budgets {
		b := &p.Global.Budgets[i]
		r, err := b.resolve(b.Name, revision, cs)
		if err != nil {
			return nil, fmt.Errorf("global.budgets[%s]: %w", b.Name, err)
		}
		global = append(global, r)
	}
	out := make(map[*Plan][]ResolvedBudget, len(p.Plans))
	for i := range p.Plans {
		plan := &p.Plans[i]
		var all []ResolvedBudget
		for j := range plan.Budgets {
			b := &plan.Budgets[j]
			bucket := b.Name
			if b.tenantless() {
				bucket = plan.Name + "/" + b.Name
			}
			r, err := b.resolve(bucket, revision, cs)
			if err != nil {
				return nil, fmt.Errorf("plans[%s].budgets[%s]: %w", plan.Name, b.Name, err)
			}
			all = append(all, r)
		}
		out[plan] = append(all, global...)
	}
	return out, nil
}

// words is the budget as one would say it.
func (b *Budget) words() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s USD ", valueOr(b.Amount, 0))
	switch b.Period {
	case "rolling":
		fmt.Fprintf(&s, "in any %s", b.Window)
	case "none":
		s.WriteString("in all")
	default:
		fmt.Fprintf(&s, "a %s (%s)", b.Period, b.zone())
	}
	fmt.Fprintf(&s, " per %s, ", b.Scope)
	if b.strict() {
		s.WriteString("strict")
	} else {
		s.WriteString("normal")
	}
	alerts := b.Alerts
	if len(alerts) == 0 {
		alerts = defaultAlerts
	}
	fmt.Fprintf(&s, ", alerts at %s %%", strings.Trim(strings.Join(strings.Fields(fmt.Sprint(alerts)), ", "), "[]"))
	if b.Spike != nil {
		fmt.Fprintf(&s, ", spike at %s times the hour before", b.Spike.Factor)
		if b.Spike.Kill {
			s.WriteString(" kills the tenant")
		}
	}
	if b.EmergencyPerNode > 0 {
		fmt.Fprintf(&s, ", %s USD a node for emergencies", b.EmergencyPerNode)
	}
	return s.String()
}

// budget checks one budget.
func (c *checker) budget(at place, b *Budget, seen map[string]bool, global bool) {
	c.name(at.field("name"), b.Name, seen)
	c.scope(at.field("scope"), b.Scope, "budget", global)
	c.oneOf(at.field("period"), b.Period, periodNames, false)
	c.oneOf(at.field("mode"), b.Mode, budgetModes, true)
	amount := valueOr(b.Amount, 0)
	switch {
	case b.Amount == nil:
		c.add(at.field("amount"), `a budget needs an amount in dollars, as in "250.00"`)
	case amount < 0 || amount > maxUSD:
		c.add(at.field("amount"), "%s is not between 0.00 and %s dollars", amount, maxUSD)
	}
	w := time.Duration(b.Window)
	switch {
	case b.Period == "rolling" && (w < minWindow || w > maxWindow):
		c.add(at.field("window"), "a rolling budget needs a window between 1h and 400d, as in window: 30d")
	case b.Period != "rolling" && w != 0:
		c.add(at.field("window"), "a window is for period: rolling; remove it")
	}
	if b.TimeZone != "" && (b.Period == "rolling" || b.Period == "none") {
		c.add(at.field("time_zone"), "a time zone does nothing where no day, week or month begins; remove it")
	} else if _, err := c.calendars.of("day", b.TimeZone); err != nil {
		c.add(at.field("time_zone"), "%v", err)
	}
	c.alerts(at.field("alerts"), b.Alerts)
	if b.EmergencyPerNode < 0 || b.EmergencyPerNode > amount {
		c.add(at.field("emergency_per_node"), "%s is not between 0.00 and the budget's amount, %s: it is a part of it", b.EmergencyPerNode, amount)
	}
	if b.Spike != nil {
		c.spike(at.field("spike"), b)
	}
}

func (c *checker) alerts(at place, alerts []int) {
	switch {
	case alerts != nil && len(alerts) == 0:
		c.add(at, "an empty list looks like no alerts, and an absent one means 50, 80 and 100; leave it out")
	case len(alerts) > maxLevels:
		c.add(at, "%d alerts, of %d at most", len(alerts), maxLevels)
	case !slices.IsSorted(alerts) || len(slices.Compact(slices.Clone(alerts))) < len(alerts) || len(alerts) > 0 && (alerts[0] < 1 || alerts[len(alerts)-1] > maxPercent):
		c.add(at, "alerts are rising percentages between 1 and %d, as in [50, 80, 100]", maxPercent)
	}
}

func (c *checker) spike(at place, b *Budget) {
	s := b.Spike
	if b.tenantless() {
		c.add(at, "a spike is told of a tenant, and a budget of scope %s has none; write the scope org, key or user", b.Scope)
	}
	if s.Factor < factorOne || s.Factor > maxFactor {
		c.add(at.field("factor"), "a spike is between 1 and %s times the hour before, as in factor: 5", Factor(maxFactor))
	}
	if s.Floor < 0 || s.Floor > maxUSD {
		c.add(at.field("floor"), "%s is not between 0.00 and %s dollars", s.Floor, maxUSD)
	}
}
