package proxy

import (
	"context"
	"net/http"
	"time"

	"headgate/limiter"
	"headgate/proxy/ladder"
	"headgate/proxy/openai"
)

// reservation is what an exchange holds of its limits, from admission to settlement.
// Every one ends exactly once; open says whether it still has to.
type reservation struct {
	open         bool
	refusedModel bool // the last refusal was of a limit on the model
	degraded     bool // something was decided without the owner of its bucket
	n            int  // that were decided
	held         int  // of these, the first ones that are reserved
	limits       [limiter.MaxCharges]*Limit
	charges      [limiter.MaxCharges]limiter.Charge
	decisions    [limiter.MaxCharges]limiter.Decision
	by           [limiter.MaxCharges]limiter.By // who decided; decisions tell it until they are settled

	inTokens, outTokens, nanoUSD int64 // as estimated
}

// admit reserves what the request may cost of all its limits and budgets, or nothing.
// Requests, slots, tokens and dollars are taken in one step, so that a refusal by the dearest
// never shows in the cheapest; then the budgets, for which the ledger may have to be asked.
func (x *exchange) admit() error {
	x.estimate()
	if e := x.invoice(); e != nil {
		return x.chargeMalformed(e)
	}
	if err := x.take(func(*Limit) bool { return true }); err != nil {
		return err
	}
	return x.pay()
}

// chargeMalformed lets a request that cannot be served cost its `requests` units, so
// that a client stuck on it is slowed, and nothing else. It returns err, or the refusal.
func (x *exchange) chargeMalformed(err error) error {
	if e := asError(err); !e.malformed {
		return err
	}
	x.model, x.res.inTokens, x.res.outTokens, x.res.nanoUSD = nil, 0, 0, 0
	x.tab = tab{}
	if refused := x.take(func(l *Limit) bool { return l.Unit == Requests && l.Scope&ScopeModel == 0 }); refused != nil {
		return refused
	}
	x.settle(outcomeMalformed)
	return err
}

// admitRest reserves, on top of what admitRequest took, what a request costs that a model has to
// answer after all. A refusal gives everything back.
func (x *exchange) admitRest() error {
	x.estimate()
	err := error(nil)
	if e := x.invoice(); e != nil {
		err = e
	} else {
		err = x.take(func(l *Limit) bool { return l.Unit != Requests && l.Unit != Concurrency })
	}
	if err == nil {
		return x.pay()
	}
	x.res.inTokens, x.res.outTokens, x.res.nanoUSD = 0, 0, 0 // none of it was reserved
	o := outcomeRefused
	if asError(err).malformed {
		o = outcomeMalformed
	}
	x.settle(o)
	return err
}

// admitRequest charges a request that runs no model, or may not have to: its requests and its slot.
func (x *exchange) admitRequest() error {
	return x.take(func(l *Limit) bool {
		return (l.Unit == Requests || l.Unit == Concurrency) && (x.model != nil || l.Scope&ScopeModel == 0)
	})
}

// estimate fills in what the answer may cost at most, or at the 90th percentile of
// what this caller's answers from this model took.
func (x *exchange) estimate() {
	r := &x.res
	r.inTokens, r.outTokens, r.nanoUSD = 0, 0, 0
	if !x.route.metered {
		return
	}
	r.inTokens = x.p.est.input(x.caller.Tenant, x.model, &x.in) + x.earlier
	if x.route.generate {
		r.outTokens = x.p.est.output(x.caller.KeyID, x.model, &x.in, r.inTokens)
	}
	r.nanoUSD = x.model.Cost(openai.Usage{Input: r.inTokens, Output: r.outTokens, Known: true}, int64(x.in.Images), x.seconds())
}

// charge names the buckets of the limits that keep lets through, behind the first `held`, and
// what decides on each while its owner is out of reach.
func (x *exchange) charge(held int, keep func(*Limit) bool) {
	r := &x.res
	r.n = held
	instead, _, overridden := x.p.Override()
	for i := range x.caller.Limits {
		l := &x.caller.Limits[i]
		if !keep(l) || r.n == len(r.charges) {
			continue
		}
		mode := l.Unavailable
		if overridden {
			mode = instead
		}
		r.limits[r.n] = l
		r.charges[r.n] = limiter.Charge{
			Key: l.key(x), Limit: l.Spec, Cost: l.Unit.cost(r.inTokens, r.outTokens, r.nanoUSD), Oversize: l.Oversize, Shadow: l.Shadow,
			Spread: l.Spread, Apart: mode.by(), Private: l.Private,
		}
		r.n++
	}
}

// take takes the charges of the limits that keep lets through, all or none, waiting where they
// say so; what was taken before stays. While it waits it holds nothing more; what was thrown
// meanwhile, or while another model was tried, binds, and an owner may have gone out of reach or
// have come back.
func (x *exchange) take(keep func(*Limit) bool) error {
	r := &x.res
	if !r.open {
		r.held = 0
	}
	held := r.held
	var waited time.Duration
	for {
		r.refusedModel = false
		if e := x.killed("", x.model); e != nil {
			return e
		}
		x.charge(held, keep)
		began := time.Now()
		i := x.p.cfg.Limits.Take(x.r.Context(), r.charges[held:r.n], r.decisions[held:r.n])
		x.p.met.decided.Observe(time.Since(began).Seconds())
		if i == -1 {
			first := !r.open
			r.open, r.held = true, r.n
			r.decided()
			x.p.met.admitted(x, held, first)
			return nil
		}
		if x.r.Context().Err() != nil { // nobody waits for the refusal, and it may be for want of an answer
			r.n = held
			return context.Cause(x.r.Context())
		}
		if i < 0 {
			r.n = held // nothing was decided that headers could tell
			return newError(http.StatusTooManyRequests, "over_capacity", "the gateway tracks as many buckets as it may; raise max_buckets").retry(time.Second)
		}
		r.decided()
		i += held
		l, d := r.limits[i], r.decisions[i]
		r.refusedModel = l.Scope&ScopeModel != 0
		if !r.mayWait(waited) {
			x.p.met.refused(l, d.By)
			return r.refusal(i)
		}
		if err := x.hold(d.RetryAfter); err != nil {
			return err
		}
		waited += d.RetryAfter
	}
}

// decided notes by whom. An answer is degraded by what was decided on its way, too: for a model
// that did not answer in the end, or before a wait.
func (r *reservation) decided() {
	for i := range r.n {
		r.by[i] = r.decisions[i].By
		r.degraded = r.degraded || apart(r.by[i])
	}
}

// mayWait: every limit that refuses says that the request may be held until it conforms.
func (r *reservation) mayWait(waited time.Duration) bool {
	for i, l := range r.limits[:r.n] {
		d := &r.decisions[i]
		if d.Admitted || l.Shadow {
			continue
		}
		if l.Wait == 0 || d.RetryAfter <= 0 || d.RetryAfter == limiter.Never || d.RetryAfter > l.Wait-waited || r.denial(i) == denied || r.denial(i) == shareless {
			return false
		}
	}
	return true
}

// hold waits d. The number of those who wait at once is bounded.
func (x *exchange) hold(d time.Duration) error {
	if x.p.waiters.Add(1) > maxWaiters {
		x.p.waiters.Add(-1)
		return newError(http.StatusTooManyRequests, "over_capacity", "%d requests wait for their limits already", maxWaiters).retry(time.Second)
	}
	defer x.p.waiters.Add(-1)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-x.r.Context().Done():
		return context.Cause(x.r.Context())
	}
}

// outcome says how an exchange ended, as far as its limits are concerned.
type outcome uint8

const (
	outcomeFailed    outcome = iota // never reached a backend's model, or failed there: requests stay spent
	outcomeRefused                  // not the caller's doing: as if it had never come
	outcomeMalformed                // the caller's: requests stay spent
	outcomeAnswered                 // answered, wholly or in part: what usage says
	outcomeUnknown                  // a backend worked on it and nobody knows how long: what was reserved
	outcomeLost                     // a backend may have worked on it and broke off: as failed, but what strict budgets reserved stays spent
	outcomeCached                   // answered by the cache: requests stay spent
)

// settle ends the reservation. Only the first call counts.
func (x *exchange) settle(o outcome) {
	r := &x.res
	if !r.open {
		x.settleBill(o) // of a panic between the two
		return
	}
	var in, out, usd int64
	switch o {
	case outcomeAnswered:
		u := x.answer.usage
		in, out = u.Input, u.Output
		if x.route.metered {
			usd = x.model.Cost(u, int64(x.in.Images), u.AudioSeconds)
		}
	case outcomeUnknown:
		in, out, usd = r.inTokens, r.outTokens, r.nanoUSD
	}
	x.answer.inTokens, x.answer.outTokens, x.answer.nanoUSD = in, out, usd
	var actual [limiter.MaxCharges]int64
	for i, l := range r.limits[:r.held] {
		switch {
		case l.Unit == Concurrency || o == outcomeRefused:
		case l.Unit == Requests:
			actual[i] = r.charges[i].Cost
		default:
			actual[i] = l.Unit.cost(in, out, usd)
		}
	}
	x.p.cfg.Limits.Settle(r.charges[:r.held], actual[:r.held], r.decisions[:r.held])
	r.open = false // not before: should the price or a bucket panic, run settles once more
	x.answer.nanoUSD = x.cost(o)
	x.p.met.settled(x, in+out, x.answer.nanoUSD)
	x.settleBill(o)
}

// Explanation says whether a request would be admitted now, and why.
type Explanation struct {
	Admitted bool            `json:"admitted"`
	Refused  string          `json:"refused_by,omitempty"` // a limit, max_buckets, a rung, or "kill switch"
	Reason   string          `json:"reason,omitempty"`     // of a kill switch or a rung, as the client would read it
	Model    string          `json:"model"`                // the one that would be tried first
	Route    string          `json:"route,omitempty"`      // of the policy, that chose it
	Routed   string          `json:"routed,omitempty"`     // how, in words
	Shedding string          `json:"shedding,omitempty"`   // what is refused now, in words
	Policy   []string        `json:"policy,omitempty"`     // what would be, and which rungs are set, at which pressure
	Places   []ExplainPlace  `json:"places,omitempty"`     // where it may go, best first
	Rungs    []string        `json:"rungs,omitempty"`      // of the ladder, that change this request
	Degraded bool            `json:"degraded,omitempty"`   // some limit's owner is out of reach
	Override string          `json:"override,omitempty"`   // the mode that replaces such a limit's own
	Limits   []ExplainLimit  `json:"limits"`
	Budgets  []ExplainBudget `json:"budgets,omitempty"`
	Input    int64           `json:"input_tokens"`
	Output   int64           `json:"output_tokens"`
	Template int64           `json:"template_tokens,omitempty"` // that strict budgets reserve beside the input
	NanoUSD  int64           `json:"nano_usd"`
}

// ExplainPlace is a backend that may take the request, as far as this node knows.
type ExplainPlace struct {
	Backend  string  `json:"backend"` // its endpoint
	Cost     int64   `json:"cost"`    // in slots; 0: it is not bounded
	InUse    int64   `json:"in_use"`  // slots, by all nodes; of an unbounded one its requests from this node
	Limit    int64   `json:"limit"`   // slots that may be in use now
	Waiting  int64   `json:"waiting"` // requests that could go there
	Places   int64   `json:"places"`  // for those
	Pressure float64 `json:"pressure"`
	Overflow bool    `json:"overflow,omitempty"`
}

// ExplainLimit is one limit's part of an Explanation; amounts in the unit, nano-dollars for usd.
type ExplainLimit struct {
	Name         string `json:"name"`
	Scope        string `json:"scope"`
	Unit         string `json:"unit"`
	Cost         int64  `json:"cost"`
	Remaining    int64  `json:"remaining"`
	Admitted     bool   `json:"admitted"`
	Shadow       bool   `json:"shadow,omitempty"`
	RetryAfterMS int64  `json:"retry_after_ms,omitempty"` // -1: waiting is useless
	// By says who would decide: this node out of what it was lent (local) or by what it was told
	// (refused_local), the owner (direct), or, that being out of reach, the node's private bucket
	// (private) or nobody (deny, allow: then Remaining means nothing).
	By      string `json:"by"`
	Owner   string `json:"owner,omitempty"`    // the node that owns the bucket
	Held    int64  `json:"held"`               // what this node may spend of it without asking
	Away    string `json:"away,omitempty"`     // why the owner is out of reach
	NoShare bool   `json:"no_share,omitempty"` // refused, since this node's private share is nothing
}

// ExplainBudget is one budget's part of an Explanation; amounts in nano-dollars.
type ExplainBudget struct {
	Name        string     `json:"name"`
	Scope       string     `json:"scope"`
	Strict      bool       `json:"strict,omitempty"`
	Cost        int64      `json:"cost"`  // what would be reserved
	Least       int64      `json:"least"` // what would do, with a shorter answer
	Amount      int64      `json:"amount"`
	Spent       int64      `json:"spent"`
	Left        int64      `json:"left"`
	UsedPercent int64      `json:"used_percent"` // -1: nobody in reach knows
	Ends        *time.Time `json:"ends,omitempty"`
	Admitted    bool       `json:"admitted"`
}

// Question is a request that nobody sends.
type Question struct {
	Model, User   string
	Header        http.Header // of it; class and surface are read from there, and what routes match
	Input, Output int64       // tokens
}

// Explain decides on a request of c, without charging it. It may ask the owners of the buckets as long as ctx lives.
func (p *Proxy) Explain(ctx context.Context, c *Caller, q *Question) (Explanation, error) {
	x := &exchange{p: p, snap: p.snap.Load(), caller: c, user: q.User, start: time.Now()}
	if x.snap == nil {
		return Explanation{}, errNotReady()
	}
	if err := x.sort(q.Header); err != nil {
		return Explanation{}, err
	}
	asked := x.mayUse(q.Model)
	if asked == nil {
		return Explanation{}, errModel(q.Model)
	}
	in, out := q.Input, q.Output
	x.asked, x.routed = asked, asked
	x.steerBy(q.Header, in, out)
	x.descend()
	x.model = x.candidates(x.routed)[0]
	r := &x.res
	r.inTokens, r.outTokens = in, out
	r.nanoUSD = x.model.Cost(openai.Usage{Input: in, Output: out, Known: true}, 0, 0)
	x.charge(0, func(*Limit) bool { return true })
	e := Explanation{Model: x.model.Name, Input: in, Output: out, NanoUSD: r.nanoUSD}
	if m, _, ok := p.Override(); ok {
		e.Override = m.String()
	}
	e.Route, e.Routed, e.Rungs = x.rule, x.why, x.rungs.Names()
	if x.cutoff != (ladder.Cutoff{}) {
		e.Shedding = x.cutoff.String()
	}
	state := p.cfg.Ladder.State(x.routed.Name)
	for _, s := range state.Sheds {
		e.Policy = append(e.Policy, s.String())
	}
	for _, s := range state.Settings {
		e.Policy = append(e.Policy, s.String())
	}
	x.explainLimits(ctx, &e)
	x.explainBudgets(ctx, &e, in, out)
	x.explainPlaces(&e)
	if why := x.cutoff.Sheds(in+out, c.Tier, ladder.Class(x.class)); why != "" {
		e.Refused, e.Reason = string(why), errShed(why, in+out, x).Message
	}
	if killed := x.killed(q.Model, asked); killed != nil {
		e.Refused, e.Reason = "kill switch", killed.Message
	}
	e.Admitted = e.Refused == ""
	return e, nil
}

// explainPlaces says where the request may go.
func (x *exchange) explainPlaces(e *Explanation) {
	if err := x.candidatesFor(nil); err != nil {
		if e.Refused == "" {
			shown := asError(err)
			e.Refused, e.Reason = shown.dropped, shown.Message
		}
		return
	}
	for i := range x.line.places {
		c := &x.line.places[i]
		p := ExplainPlace{Backend: c.ID, InUse: int64(c.InFlight), Overflow: c.Overflow}
		if c.Bounded {
			p.Cost, p.Limit = slots(x.res.inTokens+x.res.outTokens, c), int64(c.Slots)
			if s, ok := x.p.state().Backends[c.ID]; ok {
				p.InUse, p.Limit, p.Waiting, p.Places, p.Pressure = s.InUse, s.Limit, int64(s.Waiting), int64(s.Places), s.Pressure
			}
		}
		e.Places = append(e.Places, p)
	}
}

// explainLimits decides by the limits alone.
func (x *exchange) explainLimits(ctx context.Context, e *Explanation) {
	r := &x.res
	switch i := x.p.cfg.Limits.Peek(ctx, r.charges[:r.n], r.decisions[:r.n]); {
	case i >= 0:
		e.Refused = r.limits[i].Name
	case i < -1:
		e.Refused = "max_buckets"
	}
	r.decided()
	e.Degraded = r.degraded
	for i, l := range r.limits[:r.n] {
		c, d := &r.charges[i], &r.decisions[i]
		el := ExplainLimit{
			Name: l.Name, Scope: l.Scope.String(), Unit: l.Unit.String(), Cost: c.Cost, Shadow: l.Shadow, Admitted: d.Admitted,
			By: d.By.String(), NoShare: r.denial(i) == shareless,
		}
		if r.levelKnown(i) {
			el.Remaining = d.Remaining
		}
		if r.levelKnown(i) || r.denial(i) == notYet {
			if el.RetryAfterMS = ceilDiv(int64(d.RetryAfter), int64(time.Millisecond)); d.RetryAfter == limiter.Never {
				el.RetryAfterMS = -1
			}
		}
		if x.p.cfg.Where != nil {
			w := x.p.cfg.Where(c)
			el.Owner, el.Held, el.Away = w.Owner, w.Held, w.Away
		}
		e.Limits = append(e.Limits, el)
	}
}
