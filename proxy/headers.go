package proxy

import (
	"math"
	"strconv"
	"strings"
	"time"

	"headgate/limiter"
	"headgate/proxy/openai"
)

// nanoPerCent turns nano-dollars into the cents in which headers show money.
const nanoPerCent = 10_000_000

// rateHeaders tells the client where it stands: the IETF draft's lists with an item for
// each limit, the tightest one in X-RateLimit-*, and the vendors' own.
func (x *exchange) rateHeaders() {
	r := &x.res
	if r.n == 0 {
		return
	}
	h := x.w.Header()
	var state, policy strings.Builder
	tightest, least := -1, math.Inf(1)
	for i, l := range r.limits[:r.n] {
		d := &r.decisions[i]
		if l.Shadow {
			continue
		}
		quota, left := shown(l, l.Spec.Capacity()), shown(l, max(d.Remaining, 0))
		appendItem(&policy, l, "q", quota)
		if w := window(l); w > 0 {
			policy.WriteString(";w=" + strconv.FormatInt(w, 10))
		}
		policy.WriteString(`;qu="` + unitName(l.Unit) + `"`)
		appendItem(&state, l, "r", left)
		if l.Unit != Concurrency {
			state.WriteString(";t=" + strconv.FormatInt(seconds(d.Reset), 10))
		}
		if share := float64(d.Remaining) / float64(l.Spec.Capacity()); share < least {
			tightest, least = i, share
		}
	}
	if tightest < 0 {
		return
	}
	h.Set("RateLimit-Policy", policy.String())
	h.Set("RateLimit", state.String())
	l, d := r.limits[tightest], &r.decisions[tightest]
	h.Set("X-RateLimit-Limit", strconv.FormatInt(shown(l, l.Spec.Capacity()), 10))
	h.Set("X-RateLimit-Remaining", strconv.FormatInt(shown(l, max(d.Remaining, 0)), 10))
	if l.Unit != Concurrency { // time gives no slots back
		h.Set("X-RateLimit-Reset", strconv.FormatInt(seconds(d.Reset), 10))
	}
	x.vendorHeaders()
}

// vendorHeaders are those of the API that the route speaks.
func (x *exchange) vendorHeaders() {
	if x.route != nil && (x.route.kind == openai.Message && x.route.generate || x.route.kind == openai.CountTokens) {
		x.vendor("Anthropic-Ratelimit-Requests", true, Requests)
		x.vendor("Anthropic-Ratelimit-Tokens", true, Tokens)
		x.vendor("Anthropic-Ratelimit-Input-Tokens", true, InputTokens)
		x.vendor("Anthropic-Ratelimit-Output-Tokens", true, OutputTokens)
		return
	}
	x.vendor("requests", false, Requests)
	x.vendor("tokens", false, Tokens, InputTokens, OutputTokens)
}

// vendor shows the tightest limit on any of units.
func (x *exchange) vendor(name string, anthropic bool, units ...Unit) {
	r := &x.res
	best := -1
	for i, l := range r.limits[:r.n] {
		if l.Shadow {
			continue
		}
		for _, u := range units {
			if l.Unit == u && (best < 0 || r.decisions[i].Remaining < r.decisions[best].Remaining) {
				best = i
			}
		}
	}
	if best < 0 {
		return
	}
	h, d := x.w.Header(), &r.decisions[best]
	limit := strconv.FormatInt(r.limits[best].Spec.Capacity(), 10)
	left := strconv.FormatInt(max(d.Remaining, 0), 10)
	if anthropic {
		h.Set(name+"-Limit", limit)
		h.Set(name+"-Remaining", left)
		h.Set(name+"-Reset", time.Now().Add(finite(d.Reset)).Add(time.Second-1).UTC().Truncate(time.Second).Format(time.RFC3339))
		return
	}
	h.Set("X-Ratelimit-Limit-"+name, limit)
	h.Set("X-Ratelimit-Remaining-"+name, left)
	h.Set("X-Ratelimit-Reset-"+name, goDuration(d.Reset))
}

func appendItem(b *strings.Builder, l *Limit, param string, n int64) {
	if b.Len() > 0 {
		b.WriteString(", ")
	}
	b.WriteString(`"` + l.Name + `";` + param + "=" + strconv.FormatInt(n, 10))
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
