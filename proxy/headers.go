package proxy

import (
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"headgate/limiter"
	"headgate/proxy/ladder"
	"headgate/proxy/openai"
)

// nanoPerCent turns nano-dollars into the cents in which headers show money.
const nanoPerCent = 10_000_000

// stateHeaders tells the client in which ways this answer is less than what it asked for,
// and where it stands with its limits.
func (x *exchange) stateHeaders() {
	if d := x.degraded(); d != "" {
		x.w.Header().Set("X-Headgate-Degraded", d)
	}
	if b := x.alerts(); b != "" {
		x.w.Header().Set("X-Headgate-Budget", b)
	}
	x.rateHeaders()
}

// degraded lists the ways, which are few: it runs on every request.
func (x *exchange) degraded() string {
	var list string
	add := func(word string) {
		if list != "" {
			list += ", "
		}
		list += word
	}
	if x.res.degraded {
		add("quota")
	}
	if x.gotErr != nil {
		return list
	}
	if x.served != 0 {
		add(x.served.String())
	}
	if x.served.Has(ladder.StaticAnswer) { // nothing else was done to it
		return list
	}
	if x.rungs.Has(ladder.DropOptional) {
		add(ladder.DropOptional.String())
	}
	if x.stoodIn() {
		if x.smaller {
			add(ladder.SmallerModel.String())
		}
		add("model=" + x.model.Name)
	}
	switch {
	case x.shortened():
		add(ladder.CutMaxTokens.String())
		add("max_tokens=" + strconv.FormatInt(x.cut, 10))
	case x.tab.clamped:
		add("max_tokens=" + strconv.FormatInt(x.tab.cap, 10))
	}
	return list
}

// stoodIn: another model answers than the one that was asked for or routed to.
func (x *exchange) stoodIn() bool {
	return x.routed != nil && x.model != x.routed && x.model != x.asked
}

// shortened: the ladder's cut is what bounds the answer.
func (x *exchange) shortened() bool {
	return x.cut > 0 && x.cache.tier == "" && x.shortest() == x.cut
}

// touched are the rungs that made the answer less than what was asked for, or took its place.
func (x *exchange) touched() (on ladder.Set) {
	if e := x.gotErr; e != nil {
		if r, err := ladder.ParseRung(e.degraded); err == nil {
			on = ladder.SetOf(r)
		}
		return on
	}
	on = x.served
	if on.Has(ladder.StaticAnswer) {
		return on
	}
	if x.rungs.Has(ladder.DropOptional) {
		on |= ladder.SetOf(ladder.DropOptional)
	}
	if x.stoodIn() && x.smaller {
		on |= ladder.SetOf(ladder.SmallerModel)
	}
	if x.shortened() {
		on |= ladder.SetOf(ladder.CutMaxTokens)
	}
	return on
}

// alerts lists the budgets of which more is used than where their first alert lies.
func (x *exchange) alerts() string {
	var list []byte
	for i := range x.tab.bill.Charges {
		c := &x.tab.bill.Charges[i]
		used := c.used()
		if c.Budget.Alert <= 0 || used < int64(c.Budget.Alert) {
			continue
		}
		if len(list) > 0 {
			list = append(list, ", "...)
		}
		list = append(append(list, c.Budget.Name...), ";used="...)
		list = strconv.AppendInt(list, used, 10)
	}
	return string(list)
}

// rateHeaders tells the client where it stands: the IETF draft's lists with an item for
// each limit, the tightest one in X-RateLimit-*, and the vendors' own. It runs on every
// request, so it spells header names as net/http keeps them and takes one block of memory
// for all values.
func (x *exchange) rateHeaders() {
	r, charges := &x.res, x.tab.bill.Charges
	if r.n+len(charges) == 0 {
		return
	}
	state, policy := make([]byte, 0, 64*(r.n+len(charges))), make([]byte, 0, 64*(r.n+len(charges)))
	tightest, least := -1, math.Inf(1)
	for i, l := range r.limits[:r.n] {
		if l.Shadow || !r.levelKnown(i) {
			continue
		}
		d := &r.decisions[i]
		policy = appendItem(policy, l.Name, ";q=", shown(l, l.Spec.Capacity()))
		if w := window(l); w > 0 {
			policy = strconv.AppendInt(append(policy, ";w="...), w, 10)
		}
		policy = append(append(append(policy, `;qu="`...), unitName(l.Unit)...), '"')
		state = appendItem(state, l.Name, ";r=", shown(l, max(d.Remaining, 0)))
		if l.Unit != Concurrency {
			state = strconv.AppendInt(append(state, ";t="...), seconds(d.Reset), 10)
		}
		if share := float64(d.Remaining) / float64(l.Spec.Capacity()); share < least {
			tightest, least = i, share
		}
	}
	policy, state = appendBudgets(policy, state, charges, x.tab.bill.clock())
	if len(policy) == 0 {
		return
	}
	h := valueBlock{header: x.w.Header()}
	h.set("Ratelimit-Policy", string(policy))
	h.set("Ratelimit", string(state))
	if tightest < 0 {
		return
	}
	l, d := r.limits[tightest], &r.decisions[tightest]
	h.set("X-Ratelimit-Limit", strconv.FormatInt(shown(l, l.Spec.Capacity()), 10))
	h.set("X-Ratelimit-Remaining", strconv.FormatInt(shown(l, max(d.Remaining, 0)), 10))
	if l.Unit != Concurrency { // time gives no slots back
		h.set("X-Ratelimit-Reset", strconv.FormatInt(seconds(d.Reset), 10))
	}
	if x.route != nil && (x.route.kind == openai.Message && x.route.generate || x.route.kind == openai.CountTokens) {
		for i := range anthropicHeaders {
			x.vendorHeader(&h, &anthropicHeaders[i], anthropicReset)
		}
		return
	}
	for i := range openaiHeaders {
		x.vendorHeader(&h, &openaiHeaders[i], goDuration)
	}
}

// appendBudgets adds an item for each budget that Money told of. Where no period ends, none
// is told, nor a moment at which all of the budget is back.
func appendBudgets(policy, state []byte, charges []BudgetCharge, now time.Time) ([]byte, []byte) {
	for i := range charges {
		c := &charges[i]
		if !c.known() {
			continue
		}
		policy = appendItem(policy, c.Budget.Name, ";q=", c.Amount/nanoPerCent)
		if w := max(c.End-c.Start, int64(c.Budget.Window)); w > 0 {
			policy = strconv.AppendInt(append(policy, ";w="...), ceilDiv(w, int64(time.Second)), 10)
		}
		policy = append(policy, `;qu="usd-cents"`...)
		state = appendItem(state, c.Budget.Name, ";r=", max(c.Left, 0)/nanoPerCent)
		if c.End > 0 {
			state = strconv.AppendInt(append(state, ";t="...), seconds(time.Unix(0, c.End).Sub(now)), 10)
		}
	}
	return policy, state
}

// vendorHeaders are the names under which one API shows the tightest limit on any of units.
type vendorHeaders struct {
	limit, remaining, reset string
	units                   []Unit
}

var (
	openaiHeaders = [...]vendorHeaders{
		{"X-Ratelimit-Limit-Requests", "X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests", []Unit{Requests}},
		{"X-Ratelimit-Limit-Tokens", "X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens", []Unit{Tokens, InputTokens, OutputTokens}},
	}
	anthropicHeaders = [...]vendorHeaders{
		{"Anthropic-Ratelimit-Requests-Limit", "Anthropic-Ratelimit-Requests-Remaining", "Anthropic-Ratelimit-Requests-Reset", []Unit{Requests}},
		{"Anthropic-Ratelimit-Tokens-Limit", "Anthropic-Ratelimit-Tokens-Remaining", "Anthropic-Ratelimit-Tokens-Reset", []Unit{Tokens}},
		{"Anthropic-Ratelimit-Input-Tokens-Limit", "Anthropic-Ratelimit-Input-Tokens-Remaining", "Anthropic-Ratelimit-Input-Tokens-Reset", []Unit{InputTokens}},
		{"Anthropic-Ratelimit-Output-Tokens-Limit", "Anthropic-Ratelimit-Output-Tokens-Remaining", "Anthropic-Ratelimit-Output-Tokens-Reset", []Unit{OutputTokens}},
	}
)

func (x *exchange) vendorHeader(h *valueBlock, v *vendorHeaders, reset func(time.Duration) string) {
	r := &x.res
	best := -1
	for i, l := range r.limits[:r.n] {
		if !l.Shadow && r.levelKnown(i) && slices.Contains(v.units, l.Unit) && (best < 0 || r.decisions[i].Remaining < r.decisions[best].Remaining) {
			best = i
		}
	}
	if best < 0 {
		return
	}
	d := &r.decisions[best]
	h.set(v.limit, strconv.FormatInt(r.limits[best].Spec.Capacity(), 10))
	h.set(v.remaining, strconv.FormatInt(max(d.Remaining, 0), 10))
	h.set(v.reset, reset(d.Reset))
}

// valueBlock sets headers whose names are canonical already, with values side by side.
type valueBlock struct {
	header http.Header
	values []string
}

func (b *valueBlock) set(name, value string) {
	if len(b.values) == cap(b.values) {
		b.values = make([]string, 0, 12)
	}
	n := len(b.values)
	b.values = append(b.values, value)
	b.header[name] = b.values[n : n+1 : n+1]
}

func appendItem(b []byte, name, param string, n int64) []byte {
	if len(b) > 0 {
		b = append(b, ", "...)
	}
	b = append(append(append(b, '"'), name...), '"')
	return strconv.AppendInt(append(b, param...), n, 10)
}

// anthropicReset is the moment of the reset, rounded up to a second.
func anthropicReset(d time.Duration) string {
	return time.Now().Add(finite(d)).Add(time.Second - 1).UTC().Truncate(time.Second).Format(time.RFC3339)
}

func unitName(u Unit) string {
	if u == USD {
		return "usd-cents"
	}
	return u.String()
}

// shown is an amount in the unit that headers use; money in cents, rounded down.
func shown(l *Limit, n int64) int64 {
	if l.Unit == USD {
		return n / nanoPerCent
	}
	return n
}

// window is how long an empty bucket takes to fill, in seconds; 0 for slots.
func window(l *Limit) int64 {
	switch l.Spec.Algorithm {
	case limiter.Semaphore:
		return 0
	case limiter.GCRA:
		full := float64(l.Spec.Burst) / float64(l.Spec.Rate.Count) * l.Spec.Rate.Per.Seconds()
		return max(int64(math.Ceil(full)), 1)
	default:
		return seconds(l.Spec.Rate.Per)
	}
}

// finite bounds a wait so that adding it to a date cannot overflow.
func finite(d time.Duration) time.Duration {
	const year = 365 * 24 * time.Hour
	return min(max(d, 0), 100*year)
}

func seconds(d time.Duration) int64 { return ceilDiv(int64(finite(d)), int64(time.Second)) }

// goDuration is the form of OpenAI's reset headers, such as 6m0s or 120ms.
func goDuration(d time.Duration) string {
	d = finite(d)
	if d < time.Second {
		return (time.Duration(ceilDiv(int64(d), int64(time.Millisecond))) * time.Millisecond).String()
	}
	return (time.Duration(seconds(d)) * time.Second).String()
}
