package proxy

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"time"

	"headgate/limiter"
	"headgate/proxy/openai"
)

// Money is what the front door needs of the budgets and of the usage log. It is safe for
// concurrent use, and keeps no Bill after the call that it was passed to.
type Money interface {
	// Reserve takes what the request may cost from all budgets of b.Charges or from none, and
	// puts the reservation where it survives a crash. It may ask the ledger, for a bounded time
	// and as long as ctx lives. It fails with *Broke, or with what kept it from deciding; then
	// nothing is reserved. Where it succeeds, Settle is called exactly once.
	Reserve(ctx context.Context, b *Bill) error
	// Settle charges b.Cost, nothing if b.Cancelled, and logs how the request ended. It never
	// waits and brings Spent and Left of the charges up to date. A bill of nothing, without charges,
	// may come without a Reserve.
	Settle(b *Bill)
	// Peek decides like Reserve and changes nothing.
	Peek(ctx context.Context, b *Bill) error
}

// Budget is one budget as it applies to a caller. It is shared and never changed.
type Budget struct {
	Name   string
	Bucket string // the bucket's name: Name, qualified by the plan where tenants share it
	Scope  Scope
	// Strict reserves what a request may cost at most, clamps the length of the answer to what
	// is affordable, and is never passed; otherwise the estimate is reserved.
	Strict    bool
	Amount    int64 // nano-dollars a period
	Emergency int64 // nano-dollars a node, under an override only
	Alert     int   // the percentage from which answers tell how much is used; 0: none
	Terms     any   // of whoever implements Money
	// Window is the length of a rolling period; 0 for the others.
	Window time.Duration
	// Period is the calendar period of t, in nanoseconds since 1970; 0, 0 where there is none.
	// It must not block and may be called concurrently.
	Period func(t time.Time) (start, end int64)
}

// BudgetCharge is what a request takes from one budget; amounts in nano-dollars.
type BudgetCharge struct {
	Budget *Budget
	Key    limiter.Key

	// Cost is what to reserve. Where Least < Cost, less will do, as little as Least: the strict
	// ones among the charges are then granted the same amount, the most that all of them afford.
	Cost, Least int64
	// Most is what the request may cost at the very most. A crash counts Most, or of a strict
	// budget Granted.
	Most int64

	// Filled in by Money: the period, in nanoseconds since 1970; 0, 0: none.
	Start, End int64
	// Filled in by Money, all but Granted also where it refuses, as far as it knows; an Amount of
	// 0 where the Budget's is not says that it does not.
	Granted int64 // reserved
	Spent   int64 // of the budget in this period, as last known
	Amount  int64 // of the budget, as the ledger has it
	Left    int64 // of it, not below 0
}

// Bill is what one metered request costs, from its reservation to its end. The proxy fills
// in the upper part before Reserve and the lower one before Settle.
type Bill struct {
	// Held and ID are Money's own, from Reserve to Settle.
	Held any
	ID   uint64

	RequestID, Tenant, Key, User, Surface, Class string
	Model, Asked                                 string    // the one that answers, the one asked for
	Time                                         time.Time // when the request came
	InputTokens, OutputTokens                    int64     // estimates
	// Reserved is what the request is taken to cost, in nano-dollars: the estimate, or under a
	// strict budget the upper bound, and from the grant on what was granted.
	Reserved int64
	Charges  []BudgetCharge // none for callers without budgets and for free models
	// Now is the clock by which budgets' periods go, in nanoseconds since 1970; Money sets it. A node's own may be
	// off. 0: nobody has.
	Now int64

	// Usage is Known where the backend reported it; else it is estimated or counted.
	Usage     openai.Usage
	Images    int64
	Cost      int64 // nano-dollars
	Backend   string
	Status    int    // of HTTP; 0: none was received
	Outcome   string // as headgate_requests_total has it, or "cancelled"
	Tier      string // of the cache that answered; "": none
	Stream    bool
	Cancelled bool          // no backend has seen it
	Latency   time.Duration // to the settlement
	TTFT      time.Duration // to the first byte of the answer; 0: none came
}

// clock is the time by which the budgets' periods go.
func (b *Bill) clock() time.Time {
	if b.Now == 0 {
		return time.Now()
	}
	return time.Unix(0, b.Now)
}

// BrokeKind says why budgets refuse.
type BrokeKind uint8

// The kinds.
const (
	Exhausted   BrokeKind = iota // what was spent leaves no room
	InFlight                     // what others have reserved and may yet give back does
	Unavailable                  // nobody who may decide is in reach
)

// String gives the metrics' spelling.
func (k BrokeKind) String() string { return [...]string{"exhausted", "in_flight", "unavailable"}[k] }

// Broke is the refusal of a budget.
type Broke struct {
	Index      int // of the charge; -1: none in particular
	Kind       BrokeKind
	Unwritten  bool          // Unavailable, since the usage log can't be written
	RetryAfter time.Duration // 0: unknown
	Err        error         // the cause, for the log; may be nil
}

// Error names the kind.
func (b *Broke) Error() string {
	if b.Err != nil {
		return fmt.Sprintf("budget %s: %v", b.Kind, b.Err)
	}
	return "budget " + b.Kind.String()
}

// Unwrap gives the cause.
func (b *Broke) Unwrap() error { return b.Err }

// tab is what an exchange has to do with money.
type tab struct {
	bill   Bill
	open   bool // reserved and not yet settled
	strict bool // a charge is
	// cap is the longest answer of one sequence that is paid for, in tokens; 0: nobody has to
	// be held to one. It is written into the request.
	cap     int64
	clamped bool // for want of money
	seen    seen // of an answer that was not reported whole
}

// seen bounds what an answer has taken, by what passed of it: usage as tokens, cost as nano-dollars. Without ok it has no
// bound but what was reserved.
type seen struct {
	ok    bool
	usage openai.Usage
	cost  int64
}

// names of the budgets charged.
func (b *Bill) names() []string {
	names := make([]string, len(b.Charges))
	for i := range b.Charges {
		names[i] = b.Charges[i].Budget.Name
	}
	return names
}

// invoice works out what the request is charged of the budgets. It refuses what a strict
// budget cannot bound.
func (x *exchange) invoice() *Error {
	t := &x.tab
	t.bill.Charges, t.strict, t.cap, t.clamped, t.seen = t.bill.Charges[:0], false, 0, false, seen{}
	if len(x.caller.Budgets) == 0 || x.model.Free || x.p.cfg.Money == nil || !x.route.metered {
		return nil
	}
	b := x.bounds()
	x.chargeBudgets(b.cost(x, b.least), b.cost(x, b.cap))
	if !t.strict {
		return nil
	}
	t.cap = b.cap
	return b.unbounded(x)
}

// chargeBudgets makes the charges of a request that costs its estimate, and at the very most
// `most`; an answer as short as can be costs least.
func (x *exchange) chargeBudgets(least, most int64) {
	t := &x.tab
	most = max(most, x.res.nanoUSD)
	ask := max(x.res.nanoUSD, min(most, 1)) // what may cost something asks for something: nothing is never refused
	if cap(t.bill.Charges) == 0 {
		t.bill.Charges = make([]BudgetCharge, 0, len(x.caller.Budgets))
	}
	for i := range x.caller.Budgets {
		b := &x.caller.Budgets[i]
		c := BudgetCharge{Budget: b, Key: bucket(x, b.Scope, b.Bucket), Cost: ask, Least: ask, Most: most}
		if b.Strict {
			t.strict, c.Cost, c.Least = true, most, min(least, most)
		}
		t.bill.Charges = append(t.bill.Charges, c)
	}
}

// pay reserves what invoice found, and gives the limits back where that is refused. Every
// metered request has a bill, so that the usage log has every one.
func (x *exchange) pay() error {
	money, t := x.p.cfg.Money, &x.tab
	switch {
	case !x.route.metered:
		return nil
	case money == nil && len(x.caller.Budgets) > 0 && !x.model.Free:
		x.settle(outcomeRefused)
		return errBroke(&t.bill, nil, &Broke{Index: -1, Kind: Unavailable}, 0)
	case money == nil:
		return nil
	}
	x.fillBill()
	err := money.Reserve(x.r.Context(), &t.bill)
	if err == nil {
		t.open = true
		x.p.met.billed(x)
		x.clamp()
		if len(t.bill.Charges) == 0 {
			return nil
		}
		if e := x.killed("", x.model); e != nil { // whatever was thrown while the ledger was asked
			x.settle(outcomeRefused)
			return e
		}
		return nil
	}
	x.settle(outcomeRefused)
	if x.r.Context().Err() != nil {
		return context.Cause(x.r.Context())
	}
	c, b := t.refusal(err)
	x.res.refusedModel = c != nil && c.Budget.Scope&ScopeModel != 0
	x.p.met.broke(c, b.Kind)
	return errBroke(&t.bill, c, b, x.p.cfg.BudgetStatus)
}

// payNothing gives a request that the cache answers a bill of nothing, which was never reserved, so
// that the usage log has it.
func (x *exchange) payNothing() {
	x.tab = tab{}
	if x.p.cfg.Money != nil && x.route.metered {
		x.fillBill()
		x.tab.open = true
	}
}

// What the usage log calls the caches of exact repetitions, and of similar questions.
const (
	tierExact    = "exact"
	tierSemantic = "semantic"
)

// billTier is the cache that answered.
func (c *consult) billTier() string {
	if c.tier == tierSemantic {
		return tierSemantic
	}
	return tierExact
}

// refusal is why no money could be reserved, and the charge at fault; nil if there is none
// in particular. What kept Money from deciding refuses, too.
func (t *tab) refusal(err error) (*BudgetCharge, *Broke) {
	b, ok := errors.AsType[*Broke](err)
	if !ok {
		b = &Broke{Index: -1, Kind: Unavailable, Err: err}
	}
	if b.Index < 0 || b.Index >= len(t.bill.Charges) {
		return nil, b
	}
	return &t.bill.Charges[b.Index], b
}

func (x *exchange) fillBill() {
	r, b := &x.res, &x.tab.bill
	*b = Bill{
		RequestID: x.id, Tenant: x.caller.Tenant, Key: x.caller.KeyID, User: x.payer(), Surface: x.surface, Class: x.class.String(),
		Model: x.model.Name, Asked: x.asked.Name, Time: x.start, InputTokens: r.inTokens, OutputTokens: r.outTokens,
		Reserved: r.nanoUSD, Charges: b.Charges, Stream: x.in.Stream, Images: int64(x.in.Images),
	}
	for i := range b.Charges {
		b.Reserved = max(b.Reserved, b.Charges[i].Cost)
	}
}

// clamp holds the answer to what the strict budgets granted.
func (x *exchange) clamp() {
	t := &x.tab
	if !t.strict {
		return
	}
	granted := t.bill.Reserved
	for i := range t.bill.Charges {
		if c := &t.bill.Charges[i]; c.Budget.Strict {
			granted = min(granted, c.Granted)
		}
	}
	t.bill.Reserved = granted
	if t.cap == 0 {
		return
	}
	b := x.bounds()
	t.cap = b.affordable(x, granted)
	t.clamped = t.cap < b.cap
}

// cost is what the request is charged in money when it ends in o. Under a strict budget
// only what the backend reported of a whole answer counts for less than was reserved, that
// it failed, and the bound of what passed of a stream: nobody knows what else it has generated.
func (x *exchange) cost(o outcome) int64 {
	t, a := &x.tab, &x.answer
	if !t.strict {
		return a.nanoUSD
	}
	switch {
	case o == outcomeAnswered && a.whole && x.cache.tier != "": // kept, and longer than this one could have had it made
		return min(a.nanoUSD, t.bill.Reserved)
	case o == outcomeAnswered && a.whole:
		return a.nanoUSD
	case o == outcomeAnswered && t.seen.ok:
		return min(t.seen.cost, t.bill.Reserved)
	case o == outcomeAnswered || o == outcomeUnknown || o == outcomeLost:
		return t.bill.Reserved // an estimate of the input may be above its bound
	}
	return 0
}

// settleBill ends the bill. It is settled once, even if that panics: what was reserved then
// stays so, which is never too little.
func (x *exchange) settleBill(o outcome) {
	t, a := &x.tab, &x.answer
	if !t.open {
		return
	}
	t.open = false
	b := &t.bill
	b.Usage = openai.Usage{Input: a.inTokens, Output: a.outTokens}
	switch {
	case t.strict && (o == outcomeAnswered && !a.whole || o == outcomeUnknown || o == outcomeLost):
		b.Usage = x.charged()
	case o == outcomeAnswered || o == outcomeCached:
		b.Usage = a.usage
	}
	if x.cache.tier != "" {
		b.Tier = x.cache.billTier()
	}
	b.Cost, b.Cancelled = a.nanoUSD, o == outcomeRefused
	b.Backend, b.Status, b.Outcome = a.backend, a.status, x.billOutcome(o)
	b.Latency, b.TTFT = time.Since(x.start), a.firstAt
	if t.strict && b.Cost > b.Reserved {
		x.p.met.overrun.Inc()
		x.p.cfg.Logger.Warn("an answer cost more than it could under its strict budget; the backend does not keep to its caps, or the policy to the model's context",
			"request_id", x.id, "model", x.model.Name, "backend", a.backend, "cost_nano_usd", b.Cost, "reserved_nano_usd", b.Reserved)
	}
	x.p.cfg.Money.Settle(b)
	x.p.met.levels(x)
}

// charged is the usage that costs what a strict budget is charged for an answer of which the backend did not report all.
func (x *exchange) charged() openai.Usage {
	if t := &x.tab; t.seen.ok && t.seen.cost <= t.bill.Reserved {
		return t.seen.usage
	}
	b := x.bounds()
	u := openai.Usage{Input: b.in}
	if x.tab.cap > 0 {
		u.Output = times(x.tab.cap, b.sequences) + b.echo
	}
	return u
}

// billOutcome is outcome at the time of the settlement, which may be before the end.
func (x *exchange) billOutcome(o outcome) string {
	word := x.outcome()
	switch {
	case o == outcomeRefused:
		return "cancelled"
	case word == "ok" && (o == outcomeFailed || o == outcomeLost || o == outcomeUnknown && x.answer.status == 0):
		return "upstream_error"
	}
	return word
}

// explainBudgets decides by the budgets alone on a request for so many tokens.
func (x *exchange) explainBudgets(ctx context.Context, e *Explanation, in, out int64) {
	t, money := &x.tab, x.p.cfg.Money
	if money == nil || x.model.Free || len(x.caller.Budgets) == 0 {
		return
	}
	most := in + x.p.est.template(x.model) + messageTokens + promptTokens
	if context := x.model.Context; context > 0 {
		most = max(in, min(most, context))
	}
	x.chargeBudgets(x.model.UpperBound(most, min(out, 1), 0, 0), x.model.UpperBound(most, out, 0, 0))
	if t.strict {
		e.Template = most - in
	}
	t.bill.OutputTokens = out
	t.bill.Tenant, t.bill.Key, t.bill.User, t.bill.Model = x.caller.Tenant, x.caller.KeyID, x.payer(), x.model.Name
	err := money.Peek(ctx, &t.bill)
	var at *BudgetCharge // the one that refuses
	if err != nil {
		var b *Broke
		at, b = t.refusal(err)
		name := "budgets"
		if at != nil {
			name = at.Budget.Name
		}
		if e.Refused == "" {
			e.Refused, e.Reason = name, errBroke(&t.bill, at, b, x.p.cfg.BudgetStatus).Message
		}
	}
	for i := range t.bill.Charges {
		c := &t.bill.Charges[i]
		eb := ExplainBudget{
			Name: c.Budget.Name, Scope: c.Budget.Scope.String(), Strict: c.Budget.Strict, Cost: c.Cost, Least: c.Least,
			Amount: c.Amount, Spent: c.Spent, Left: c.Left, UsedPercent: c.used(), Admitted: err == nil || at != nil && c != at,
		}
		if c.End > 0 {
			end := time.Unix(0, c.End).UTC()
			eb.Ends = &end
		}
		e.Budgets = append(e.Budgets, eb)
	}
}

// used is how much of the budget is spent, in percent, rounded down; -1: nobody knows.
func (c *BudgetCharge) used() int64 {
	switch {
	case !c.known():
		return -1
	case c.Amount <= 0:
		return 100
	}
	hi, lo := bits.Mul64(uint64(max(c.Spent, 0)), 100)
	if hi >= uint64(c.Amount) {
		return math.MaxInt64
	}
	percent, _ := bits.Div64(hi, lo, uint64(c.Amount))
	return int64(min(percent, math.MaxInt64))
}

// known says whether Money told where the budget stands.
func (c *BudgetCharge) known() bool { return c.Amount != 0 || c.Budget.Amount == 0 }
